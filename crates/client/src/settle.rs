//! Syncs files: data durable first, then size and time sent, and on demand a `Sync` request for all metadata.

use crate::file::FileState;
use crate::session::Client;
use crate::watch::lost;
use penstock_base::Ino;
use penstock_wire::data::encode_commit;
use penstock_wire::names::{AttrReply, EmptyReply, InodeRequest, SetAttrRequest};
use penstock_wire::{Failure, Kind};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

/// Interval of the periodic sync: writes are durable after about this at the latest.
const INTERVAL: Duration = Duration::from_secs(5);
const ESTALE: u16 = 116;

/// Files whose size or time was sent recently. An attribute reply that the service produced before that may
/// arrive after it and is then out of date. The file's own state, which would correct it, may be forgotten by
/// then.
#[derive(Default)]
pub(crate) struct Settled {
    count: Cell<u64>,
    recent: RefCell<VecDeque<Ino>>,
}

/// Number of syncs that are remembered. A caller that missed more must repeat its request.
const REMEMBERED: usize = 256;

impl Settled {
    pub(crate) fn note(&self, ino: Ino) {
        self.count.set(self.count.get() + 1);
        let mut recent = self.recent.borrow_mut();
        recent.push_back(ino);
        if recent.len() > REMEMBERED {
            recent.pop_front();
        }
    }

    /// Returns a mark for [`Settled::since`].
    pub(crate) fn mark(&self) -> u64 {
        self.count.get()
    }

    /// True if a file was synced since a mark, or if that cannot be known any more.
    pub(crate) fn since(&self, mark: u64, ino: Ino) -> bool {
        let missed = (self.count.get() - mark) as usize;
        missed > REMEMBERED || self.recent.borrow().iter().rev().take(missed).any(|settled| *settled == ino)
    }
}

impl Client {
    /// Syncs a file: makes its data durable and sends its size and time, which the next `Sync` request makes
    /// durable. Does not report earlier losses; the next fsync does.
    pub(crate) async fn settle_quietly(&self, ino: Ino) -> Result<(), Failure> {
        self.settle_rest(ino, async || Ok(())).await
    }

    /// Like [`Client::settle_quietly`]. Calls `next` after size and time are sent. If the file did not grow,
    /// this happens while its data becomes durable, because its size covers no new data.
    async fn settle_rest(
        &self,
        ino: Ino,
        next: impl AsyncFnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        // One sync at a time, so that a time that is set after one is not overtaken by one in flight.
        let turn = self.settling.exclusive(ino).await;
        let generation = self.restarts.generation();
        let Some(file) = self.files.borrow().get(&ino).cloned() else { return Ok(()) };
        let before = file.borrow().clone();
        let Some(mtime_ns) = before.mtime_ns else { return Ok(()) };
        let request = SetAttrRequest {
            ino: ino.0,
            size: Some(before.size),
            grow: true,
            cut: before.cut,
            mtime_ns: Some(mtime_ns),
            ctime_ns: Some(mtime_ns),
            ..SetAttrRequest::default()
        };
        let commit =
            async { self.data(Kind::Commit, encode_commit(0, ino, true), Vec::new()).await.map(drop) };
        let send = async {
            // `note_unsynced` below records what was sent.
            match self.settle_once::<AttrReply>(Kind::SetAttr, &request).await {
                Ok(_) => {}
                // Removed meanwhile and no longer open anywhere: there is nothing to sync.
                Err(failure) if failure.errno == ESTALE => {}
                Err(failure) => return Err(failure),
            }
            drop(turn);
            next().await
        };
        if before.size <= before.settled_size {
            let (committed, sent) = futures_util::future::join(commit, send).await;
            committed.and(sent)?;
        } else {
            commit.await?;
            if generation == self.restarts.generation() {
                send.await?;
            }
        }
        if generation != self.restarts.generation() {
            // Another start of the service committed than the one that had the writes. The file is marked as
            // having lost them.
            return Ok(());
        }
        self.note_unsynced(ino);
        let mut state = file.borrow_mut();
        if state.cut == before.cut {
            state.settled_size = state.settled_size.max(before.size);
        }
        if state.writes == before.writes {
            state.mtime_ns = None;
        }
        drop(state);
        drop(file);
        self.settled_now(ino);
        Ok(())
    }

    /// Records that a change of a file was sent that the next `Sync` request makes durable.
    pub(crate) fn note_unsynced(&self, ino: Ino) {
        let Some(state) = self.files.borrow().get(&ino).cloned() else { return };
        if !std::mem::replace(&mut state.borrow_mut().unsynced, true) {
            self.unsynced.borrow_mut().push(ino);
        }
    }

    pub(crate) fn settled_now(&self, ino: Ino) {
        self.settled.note(ino);
        self.forget_idle(ino);
    }

    /// True if a file has unsynced writes.
    pub fn is_unsettled(&self, ino: Ino) -> bool {
        self.files.borrow().get(&ino).is_some_and(|state| state.borrow().mtime_ns.is_some())
    }

    /// fsync: makes durable all earlier writes to the file by this client and by others, its size, and every
    /// earlier change of names. Fails, once, if earlier writes were lost.
    pub async fn fsync(&self, ino: Ino) -> Result<(), Failure> {
        self.make_durable(ino).await?;
        let names = self.check_names_lost();
        self.report_lost(ino).and(names)
    }

    /// Like [`Client::fsync`], for a descriptor through which `seen` losses were reported.
    pub async fn fsync_through(&self, ino: Ino, seen: &Cell<u64>) -> Result<(), Failure> {
        self.make_durable(ino).await?;
        let names = self.check_names_lost();
        self.report_loss_to(ino, seen).and(names)
    }

    /// Syncs a file on this client and on the client that has its exclusive lease.
    pub(crate) async fn settle_everywhere(&self, ino: Ino) -> Result<(), Failure> {
        self.settle_elsewhere(ino).await?;
        self.settle_quietly(ino).await
    }

    async fn settle_elsewhere(&self, ino: Ino) -> Result<(), Failure> {
        if self.leases.covers(ino) {
            return Ok(());
        }
        // Before it answers, the service makes the owner of the exclusive lease sync.
        match self.ask::<AttrReply>(Kind::GetAttr, &InodeRequest { ino: ino.0 }).await {
            Err(failure) if failure.errno != ESTALE => Err(failure),
            _ => Ok(()),
        }
    }

    async fn make_durable(&self, ino: Ino) -> Result<(), Failure> {
        self.settle_elsewhere(ino).await?;
        self.settle_rest(ino, async || self.sync_names().await).await?;
        // Covers rows that the commit of the data changed, if it did.
        self.sync_names().await
    }

    fn check_names_lost(&self) -> Result<(), Failure> {
        match self.restarts.take_lost() {
            true => Err(lost("a change of names or attributes")),
            false => Ok(()),
        }
    }

    /// Makes every acknowledged operation on names durable. Fails, once, if one was lost.
    pub async fn sync(&self) -> Result<(), Failure> {
        self.sync_names().await?;
        self.check_names_lost()
    }

    /// fsync of a directory: makes durable all writes of this client and every change of names. Lost writes
    /// to a file are reported by an fsync of that file.
    pub async fn sync_directory(&self) -> Result<(), Failure> {
        self.sync_rest().await?;
        self.check_names_lost()
    }

    pub(crate) async fn sync_names(&self) -> Result<(), Failure> {
        let (generation, changed) = (self.restarts.generation(), self.restarts.take_changed());
        // Changes that are sent from here on are covered by a later request.
        let covered = self.unsynced.take();
        let result = self.ask::<EmptyReply>(Kind::Sync, &EmptyReply {}).await;
        if generation != self.restarts.generation() {
            // The files were marked when the new generation was seen.
            if changed {
                self.restarts.lose();
            }
        } else if result.is_ok() {
            covered.into_iter().for_each(|ino| self.note_synced(ino));
        } else {
            self.unsynced.borrow_mut().extend(covered);
            if changed {
                self.restarts.changed();
            }
        }
        result.map(|_| ())
    }

    fn note_synced(&self, ino: Ino) {
        if let Some(state) = self.files.borrow().get(&ino)
            // Changed again while the request was in flight.
            && !self.unsynced.borrow().contains(&ino)
        {
            state.borrow_mut().unsynced = false;
        }
        self.forget_idle(ino);
    }

    /// Makes everything durable and reports all losses.
    pub async fn sync_all(&self) -> Result<(), Failure> {
        let mut result = Ok(());
        // A failure does not keep the other files from being synced.
        for ino in self.files_where(|state| state.mtime_ns.is_some() || state.lost) {
            let settled = self.settle_quietly(ino).await;
            result = result.and(settled).and(self.report_lost(ino));
        }
        self.sync().await?;
        result
    }

    /// Makes everything durable that can be. Leaves losses to be reported by an fsync.
    async fn sync_rest(&self) -> Result<(), Failure> {
        let mut result = Ok(());
        for ino in self.files_where(|state| state.mtime_ns.is_some()) {
            let settled = self.settle_quietly(ino).await;
            result = result.and(settled);
        }
        self.sync_names().await?;
        result
    }

    /// Returns files that programs have open, or of which the kernel has pages that programs change in
    /// mappings.
    pub fn open_files(&self) -> Vec<Ino> {
        self.files_where(|state| state.opens > 0 || state.mapped)
    }

    pub(crate) fn files_where(&self, wanted: impl Fn(&FileState) -> bool) -> Vec<Ino> {
        let files = self.files.borrow();
        let wanted = files.iter().filter(|(_, state)| wanted(&state.borrow()));
        let mut inos: Vec<Ino> = wanted.map(|(ino, _)| *ino).collect();
        inos.sort_unstable();
        inos
    }

    pub(crate) async fn settle_task(self: Rc<Self>) {
        while !self.closed.get() && !self.has_ended() {
            self.env.sleep(INTERVAL).await;
            if self.closed.get() || self.has_ended() {
                break;
            }
            if let Err(failure) = self.sync_rest().await {
                tracing::error!(%failure, "a periodic sync failed; it will be tried again");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_settle_is_seen_by_who_asked_before_it() {
        let settled = Settled::default();
        let before = settled.mark();
        settled.note(Ino(1));
        let between = settled.mark();
        settled.note(Ino(2));
        assert!(settled.since(before, Ino(1)) && settled.since(before, Ino(2)));
        assert!(!settled.since(between, Ino(1)) && settled.since(between, Ino(2)));
        (0..300).for_each(|_| settled.note(Ino(3)));
        assert!(settled.since(before, Ino(9)), "too long ago to know");
    }
}
