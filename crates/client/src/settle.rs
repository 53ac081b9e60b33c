//! Settling: data durable, then size and time, and on demand the name space.

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

/// What is written is durable at the latest after about this.
const INTERVAL: Duration = Duration::from_secs(5);
const ESTALE: u16 = 116;

/// Files settled or given another size lately. What a service said of a file before that was done, and what arrives after
/// it, is old: the file's own state, which would correct it, may be forgotten by then.
#[derive(Default)]
pub(crate) struct Settled {
    count: Cell<u64>,
    recent: RefCell<VecDeque<Ino>>,
}

/// Settles that are remembered; who missed more asks again to be sure.
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

    /// A mark for [`Settled::since`].
    pub(crate) fn mark(&self) -> u64 {
        self.count.get()
    }

    /// Whether a file was settled since a mark.
    pub(crate) fn since(&self, mark: u64, ino: Ino) -> bool {
        let missed = (self.count.get() - mark) as usize;
        missed > REMEMBERED || self.recent.borrow().iter().rev().take(missed).any(|settled| *settled == ino)
    }
}

impl Client {
    /// Makes a file's data durable and sends its size and time, which the next sync makes durable. A loss before it is
    /// left to be told by an fsync.
    pub(crate) async fn settle_quietly(&self, ino: Ino) -> Result<(), Failure> {
        self.settle_rest(ino, async || Ok(())).await
    }

    /// The same. Does `next` once size and
    /// time are sent: for a file that did not grow while its data becomes durable, because there its size says
    /// nothing new of it.
    async fn settle_rest(
        &self,
        ino: Ino,
        next: impl AsyncFnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        // One at a time, so that a time which is set after a settle is not overtaken by one that was on its way.
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
            // The file itself says what is not synced of it.
            match self.settle_once::<AttrReply>(Kind::SetAttr, &request).await {
                Ok(_) => {}
                // Removed and dropped meanwhile: there is nothing to settle any more.
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
            // Committed by another start of the service than the one that had the writes: the file is marked.
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

    /// Something of a file was sent that the next sync makes durable.
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

    /// Whether a file has writes that were not settled.
    pub fn is_unsettled(&self, ino: Ino) -> bool {
        self.files.borrow().get(&ino).is_some_and(|state| state.borrow().mtime_ns.is_some())
    }

    /// fsync: what was written to the file before, by this client and by others, its size, and every name that was
    /// changed before, are durable. Fails, once, when writes before it were lost.
    pub async fn fsync(&self, ino: Ino) -> Result<(), Failure> {
        self.make_durable(ino).await?;
        let names = self.check_names_lost();
        self.report_lost(ino).and(names)
    }

    /// The same through a descriptor that has heard of `seen` losses.
    pub async fn fsync_through(&self, ino: Ino, seen: &Cell<u64>) -> Result<(), Failure> {
        self.make_durable(ino).await?;
        let names = self.check_names_lost();
        self.report_loss_to(ino, seen).and(names)
    }

    /// Settles what this client and others wrote to a file.
    pub(crate) async fn settle_everywhere(&self, ino: Ino) -> Result<(), Failure> {
        self.settle_elsewhere(ino).await?;
        self.settle_quietly(ino).await
    }

    async fn settle_elsewhere(&self, ino: Ino) -> Result<(), Failure> {
        if self.leases.covers(ino) {
            return Ok(());
        }
        // The service asks who has it exclusively to settle, before it answers.
        match self.ask::<AttrReply>(Kind::GetAttr, &InodeRequest { ino: ino.0 }).await {
            Err(failure) if failure.errno != ESTALE => Err(failure),
            _ => Ok(()),
        }
    }

    async fn make_durable(&self, ino: Ino) -> Result<(), Failure> {
        self.settle_elsewhere(ino).await?;
        self.settle_rest(ino, async || self.sync_names().await).await?;
        // Rows that the commit of the data changed, if it did.
        self.sync_names().await
    }

    fn check_names_lost(&self) -> Result<(), Failure> {
        match self.restarts.take_lost() {
            true => Err(lost("a change of names or attributes")),
            false => Ok(()),
        }
    }

    /// Makes every acknowledged operation on names durable.
    pub async fn sync(&self) -> Result<(), Failure> {
        self.sync_names().await?;
        self.check_names_lost()
    }

    /// fsync of a directory: what this client wrote before, and every name, are durable. A loss of writes to a file is
    /// told by an fsync of that file.
    pub async fn sync_directory(&self) -> Result<(), Failure> {
        self.sync_rest().await?;
        self.check_names_lost()
    }

    pub(crate) async fn sync_names(&self) -> Result<(), Failure> {
        let (generation, changed) = (self.restarts.generation(), self.restarts.take_changed());
        // What is settled from here on, another sync covers.
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
            // Settled again while the sync was on its way.
            && !self.unsynced.borrow().contains(&ino)
        {
            state.borrow_mut().unsynced = false;
        }
        self.forget_idle(ino);
    }

    /// Makes everything durable.
    pub async fn sync_all(&self) -> Result<(), Failure> {
        let mut result = Ok(());
        // A file that cannot be settled does not keep the others from it.
        for ino in self.files_where(|state| state.mtime_ns.is_some() || state.lost) {
            let settled = self.settle_quietly(ino).await;
            result = result.and(settled).and(self.report_lost(ino));
        }
        self.sync().await?;
        result
    }

    /// Makes everything durable that can be, and leaves the word of what was lost for who asks for it.
    async fn sync_rest(&self) -> Result<(), Failure> {
        let mut result = Ok(());
        for ino in self.files_where(|state| state.mtime_ns.is_some()) {
            let settled = self.settle_quietly(ino).await;
            result = result.and(settled);
        }
        self.sync_names().await?;
        result
    }

    /// Files that programs have open, or of which the kernel has pages that they change in maps.
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
