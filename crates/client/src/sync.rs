//! Syncs files: data durable first, then size and time sent, and on demand a `Sync` request for all metadata.

use crate::file_state::FileState;
use crate::losses::Reported;
use crate::restarts::others_may_have_lost;
use crate::session::{Errand, PAUSE, Session};
use penstock_base::env::timeout;
use penstock_base::{Branch, FileId};
use penstock_wire::metadata::{EmptyReply, PingReply, PingRequest, SetAttrRequest};
use penstock_wire::{Failure, Kind};
use std::rc::Rc;
use std::time::Duration;

/// Interval of the periodic sync: writes are durable after about this at the latest.
const INTERVAL: Duration = Duration::from_secs(5);
const ESTALE: u16 = 116;

/// The beginning of a sync for a program, which covers what other clients did as well.
pub(crate) struct Begun {
    changes: u64,
    has_met_others: bool,
}

impl Begun {
    /// A sync begins now.
    pub(crate) fn now(session: &Session) -> Self {
        let changes = session.restarts().changes();
        Self { changes, has_met_others: session.leases().has_met_others() }
    }

    /// Fails if a restart since then may have lost what other clients did: they have made it known, it was
    /// not durable, and nothing else tells of it here.
    pub(crate) async fn covers_others(&self, session: &Session) -> Result<(), Failure> {
        let has_met_others = self.has_met_others || session.leases().has_met_others();
        let restarts = session.restarts().changes() - self.changes;
        if !has_met_others || restarts == 0 {
            return Ok(());
        }
        // Others have sent again what they had, unless they ended together with the service.
        let count = async || -> Result<u64, Failure> {
            let reply: PingReply = session.ask(Kind::Ping, Branch::MAIN, &PingRequest::default()).await?;
            Ok(reply.unreported)
        };
        match session.kept().is_on() && restarts == 1 && count().await? == 0 {
            true => Ok(()),
            false => Err(others_may_have_lost()),
        }
    }
}

impl Session {
    /// Syncs a file: makes its data durable and sends its size and time, which the next `Sync` request makes
    /// durable. Does not report earlier losses; the next fsync does.
    pub(crate) async fn sync_file(&self, file: FileId) -> Result<(), Failure> {
        self.sync_file_and(file, async || Ok(())).await
    }

    /// Makes a file's data durable. Its size and time are not sent.
    pub(crate) async fn commit(&self, file: FileId) -> Result<(), Failure> {
        self.send_commit(Errand::Usual, file).await
    }

    /// Like [`Session::sync_file`]. Calls `next` after size and time are sent. If the file did not grow, this
    /// happens while its data becomes durable, because its size covers no new data.
    async fn sync_file_and(
        &self,
        file: FileId,
        next: impl AsyncFn() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        // Writes that were committed to another start of the service were sent again, and are synced again.
        while !self.sync_file_once(file, &next).await? {}
        Ok(())
    }

    /// Returns false if the service was started again meanwhile, and the file must be synced again.
    async fn sync_file_once(
        &self,
        file: FileId,
        next: &impl AsyncFn() -> Result<(), Failure>,
    ) -> Result<bool, Failure> {
        // In a recovery the truncate generation may change, and the service takes the size of no other one.
        self.recovery().over().await;
        // One sync at a time, so that a time that is set after one is not overtaken by one in flight.
        let turn = self.syncing().exclusive(file).await;
        let (generation, mark) = (self.restarts().generation(), self.kept().mark(file));
        let state = self.files().get(file);
        let unsynced = state.filter(|state| state.borrow().has_unsynced_writes());
        let Some(state) = unsynced else {
            if self.kept().is_uncommitted(file) {
                // A write has failed after a part of it was done. The file may even be closed by now.
                self.commit(file).await?;
                self.note_committed(file, mark);
            }
            return Ok(generation == self.restarts().generation());
        };
        let before = state.borrow().clone();
        let mtime = before.mtime().expect("it has unsynced writes");
        let request = SetAttrRequest {
            ino: file.ino.0,
            size: Some(before.size()),
            grow: true,
            truncations: before.truncations(),
            mtime: Some(mtime),
            ctime: Some(mtime),
            ..SetAttrRequest::default()
        };
        let send = async {
            // `note_unsynced` below records what was sent.
            match self.sync_once(file, &request).await {
                Ok(()) => {}
                // Removed meanwhile and no longer open anywhere: there is nothing to sync.
                Err(failure) if failure.errno == ESTALE => {}
                Err(failure) => return Err(failure),
            }
            drop(turn);
            next().await
        };
        if before.size() <= before.sent_size() {
            let (committed, sent) = futures_util::future::join(self.commit(file), send).await;
            committed.and(sent)?;
        } else {
            self.commit(file).await?;
            if generation == self.restarts().generation() {
                send.await?;
            }
        }
        if generation != self.restarts().generation() {
            // Another start of the service committed than the one that had the writes. A client that keeps
            // nothing has marked the file as having lost them.
            return Ok(!self.kept().is_on());
        }
        self.note_committed(file, mark);
        state.borrow_mut().synced(&before);
        drop(state);
        self.recent().add(file);
        self.files().forget_idle(file);
        Ok(true)
    }

    /// fsync: makes durable all earlier writes to the file by this client and by others, its size, and every
    /// earlier change of names. Fails, once, if earlier writes were lost.
    pub(crate) async fn fsync(&self, file: FileId) -> Result<(), Failure> {
        let begun = Begun::now(self);
        self.make_durable(file).await?;
        let names = self.restarts().report_lost_names();
        self.report_lost(file).and(names)?;
        begun.covers_others(self).await
    }

    /// Like [`Session::fsync`], through a descriptor: fails once for each loss that it has not reported.
    pub(crate) async fn fsync_through(&self, file: FileId, descriptor: &Reported) -> Result<(), Failure> {
        let begun = Begun::now(self);
        self.make_durable(file).await?;
        self.report_losses_to(file, descriptor)?;
        begun.covers_others(self).await
    }

    /// Syncs a file on this client and on the client that has its exclusive lease.
    pub(crate) async fn sync_everywhere(&self, file: FileId) -> Result<(), Failure> {
        let is_elsewhere = !self.leases().covers(file);
        self.sync_elsewhere(file).await?;
        self.sync_file(file).await?;
        // This client cannot send again what another one has written.
        if is_elsewhere { self.sync_names().await } else { Ok(()) }
    }

    async fn sync_elsewhere(&self, file: FileId) -> Result<(), Failure> {
        if self.leases().covers(file) {
            return Ok(());
        }
        // Before it answers, the service makes the owner of the exclusive lease sync.
        match self.ask_attributes(file, false).await {
            Err(failure) if failure.errno != ESTALE => Err(failure),
            _ => Ok(()),
        }
    }

    async fn make_durable(&self, file: FileId) -> Result<(), Failure> {
        self.sync_elsewhere(file).await?;
        self.sync_file_and(file, async || self.sync_names().await).await?;
        // Covers rows that the commit of the data changed, if it did.
        self.sync_names().await
    }

    /// Makes every acknowledged operation on names durable. Does not report losses.
    pub(crate) async fn sync_names(&self) -> Result<(), Failure> {
        // Of a request that was sent to another start it is not known what it covers.
        self.under_one_start(async || {
            let generation = self.restarts().generation();
            // Changes that are sent from here on are covered by a later request.
            let covered = self.sent().cover();
            self.ask::<EmptyReply>(Kind::Sync, Branch::MAIN, &EmptyReply {}).await?;
            if generation == self.restarts().generation() {
                self.note_synced(covered);
            }
            Ok(())
        })
        .await
    }

    /// Reports all losses, also those of a restart that the last requests have met.
    pub(crate) fn report_all(&self) -> Result<(), Failure> {
        let mut result = Ok(());
        for file in self.files().select(FileState::is_lost) {
            result = result.and(self.report_lost(file));
        }
        result.and(self.restarts().report_lost_names())
    }

    /// Makes everything durable that can be. Leaves losses to be reported by an fsync.
    pub(crate) async fn sync_rest(&self) -> Result<(), Failure> {
        let result = self.sync_files().await;
        self.sync_names().await?;
        result
    }

    /// Syncs every file. A failure does not keep the others from being synced.
    async fn sync_files(&self) -> Result<(), Failure> {
        let mut result = Ok(());
        let is_uncommitted = |file: &FileId| self.kept().is_uncommitted(*file);
        for file in self.files_with_kept(FileState::has_unsynced_writes, is_uncommitted) {
            let synced = self.sync_file(file).await;
            result = result.and(synced);
        }
        result
    }
}

/// Syncs everything every 5 s ([`INTERVAL`]), and when there is much to keep, until the session is over.
pub(crate) async fn sync_task(session: Rc<Session>) {
    while !session.is_over() {
        let kept = session.kept();
        let pressed = timeout(session.env(), INTERVAL, kept.pressed()).await.is_some();
        if session.is_over() {
            break;
        }
        let synced = session.sync_rest().await;
        if let Err(failure) = &synced {
            tracing::error!(%failure, "a periodic sync failed; it will be tried again");
        }
        let failed = synced.is_err();
        kept.note_sync(synced);
        if failed && pressed {
            session.env().sleep(PAUSE).await;
        }
    }
    session.kept().end();
}
