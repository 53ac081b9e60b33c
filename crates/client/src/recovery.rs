//! After a restart of the service: sends again what was acknowledged and is not durable, and reports what is
//! open and locked.
//!
//! First the changes of names and attributes, in the order of their numbers; the service puts those of all
//! clients into one order. Before a change that sets the size of a file, or that puts it in place of another
//! one, come the file's blocks: they must be durable no later. Then come the blocks of all other files. All
//! other requests wait meanwhile, because they may depend on any of this, and because a later request would
//! take the slot of an earlier one.
//!
//! A change that the service refuses is lost, for example a name in a directory that another client had made
//! and lost. The service also refuses a change that would concern other inodes than the first time. Writes
//! are lost if a truncation that came before them is. Every descriptor that is open then fails its next
//! fsync, and reads of the file fail until somebody was told.

use crate::file_state::FileState;
use crate::kept::{KeptChange, KeptWrite};
use crate::session::{Errand, PAUSE, Session};
use penstock_base::num::to_u32;
use penstock_base::{Branch, ErrorKind, FileId};
use penstock_wire::metadata::{
    AttrReply, Change, GetAttrRequest, OpenCount, PingReply, PingRequest, RepeatRequest,
};
use penstock_wire::{Failure, Kind};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Most open inodes or locks in one ping.
const RECLAIMED_AT_ONCE: usize = 4096;
const ESTALE: u16 = 116;

/// Recovers after each restart of the service, until the session is over.
pub(crate) async fn recovery_task(session: Rc<Session>) {
    loop {
        let recovery = session.recovery();
        recovery.begun(|| session.is_over()).await;
        if session.is_over() {
            recovery.end();
            return;
        }
        let round = Round::begin(&session);
        let done = round.recover().await;
        if round.is_over() {
            // The service was started once more.
            continue;
        }
        match done {
            Ok(()) => {
                assert_eq!(
                    session.restarts().generation(),
                    Some(round.start),
                    "it was for the present start"
                );
                recovery.end();
                session.kept().press();
            }
            Err(failure) => {
                tracing::debug!(%failure, "the recovery after a restart begins again");
                session.env().sleep(PAUSE).await;
            }
        }
    }
}

/// One recovery, with one start of the service.
struct Round<'a> {
    session: &'a Session,
    /// The generation of that start.
    start: u64,
    /// The changes of the generation that had been seen when it began.
    changes: u64,
}

impl<'a> Round<'a> {
    fn begin(session: &'a Session) -> Self {
        let restarts = session.restarts();
        Self { session, start: restarts.generation().unwrap_or_default(), changes: restarts.changes() }
    }

    /// True once the service was started again, or the session has ended: what a request has brought means
    /// nothing.
    fn is_over(&self) -> bool {
        self.session.restarts().changes() != self.changes || self.session.is_over()
    }

    async fn recover(&self) -> Result<(), Failure> {
        let session = self.session;
        let (changes, files) = (session.kept().changes(), session.kept().files());
        let (kept, kept_files) = (changes.len(), files.len());
        assert!(session.recovery().is_running(), "all other requests wait");
        let mut sent = BTreeMap::new();
        for change in changes {
            let needs_blocks = change.file.filter(|_| change.needs_blocks);
            let has_blocks = match needs_blocks {
                Some(file) => self.has_blocks(file, change.change, &mut sent).await?,
                None => true,
            };
            match has_blocks || change.drops_blocks {
                true => self.repeat(&change).await?,
                false => self.lose(&change),
            }
            if let Some(file) = needs_blocks.filter(|_| change.drops_blocks) {
                sent.remove(&file);
            }
        }
        if !files.is_empty() {
            self.wait_for_turn(Change { number: u64::MAX, ..Change::default() }).await?;
        }
        // Also those that were sent: another client may have truncated the file since.
        for file in files {
            self.send_blocks(file, true).await?;
        }
        for file in session.files().select(FileState::has_unsynced_writes) {
            self.fetch_again(file).await?;
        }
        self.report().await?;
        tracing::warn!(
            changes = kept,
            files = kept_files,
            "what was not durable was sent to the service again"
        );
        Ok(())
    }

    /// Sends the blocks of a file before a change, unless they are among those that were sent. Returns false
    /// if they are lost.
    async fn has_blocks(
        &self,
        file: FileId,
        before: Change,
        sent: &mut BTreeMap<FileId, bool>,
    ) -> Result<bool, Failure> {
        if let Some(has_blocks) = sent.get(&file) {
            return Ok(*has_blocks);
        }
        // Another client may have made the file.
        self.wait_for_turn(before).await?;
        let has_blocks = self.send_blocks(file, false).await?;
        sent.insert(file, has_blocks);
        Ok(has_blocks)
    }

    /// Waits until all clients have sent again what came before a change.
    async fn wait_for_turn(&self, change: Change) -> Result<(), Failure> {
        let request = RepeatRequest { change, start: self.start, ..RepeatRequest::default() };
        match self.session.repeat(Branch::MAIN, 0, &request).await {
            Err(failure) if self.is_over() => Err(failure),
            Err(failure) => {
                // Then what follows is refused, or is not.
                tracing::error!(%failure, "the service gives no turn in the recovery");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Sends a change again. If the service refuses it, it is lost.
    async fn repeat(&self, kept: &KeptChange) -> Result<(), Failure> {
        let (kind, body) = (u32::from(kept.kind as u16), kept.body.clone());
        let request = RepeatRequest { kind, body, change: kept.change, made: kept.made, start: self.start };
        match self.session.repeat(kept.branch, kept.sequence, &request).await {
            Ok(()) => Ok(()),
            Err(failure) if self.is_over() => Err(failure),
            Err(failure) => {
                tracing::error!(%failure, kind = ?kept.kind, "a change that was acknowledged is lost");
                self.lose(kept);
                Ok(())
            }
        }
    }

    /// A change is lost.
    fn lose(&self, kept: &KeptChange) {
        let session = self.session;
        session.kept().forget_change(kept);
        session.restarts().lose_names();
        match kept.file {
            Some(file) if kept.needs_blocks => session.lose(file),
            Some(file) => _ = session.files().with(file, FileState::lose_part),
            None => {}
        }
    }

    /// Sends what is kept of a file, after all changes or before some of them, and commits it. If the service
    /// refuses it, the file's writes are lost, and the result is false.
    async fn send_blocks(&self, file: FileId, has_all_changes: bool) -> Result<bool, Failure> {
        let session = self.session;
        let (mark, writes) = (session.kept().mark(file), session.kept().writes(file));
        if writes.is_empty() {
            return Ok(true);
        }
        match self.send(file, &writes, has_all_changes).await {
            Err(failure) if self.is_over() => Err(failure),
            Ok(()) => {
                session.note_committed(file, mark);
                Ok(true)
            }
            Err(failure) => Ok(!self.lose_writes(file, &failure)),
        }
    }

    /// The service has refused what was written to a file. It is lost, unless the file's last name was
    /// removed and this client has it not open. Returns true if it is.
    fn lose_writes(&self, file: FileId, failure: &Failure) -> bool {
        let session = self.session;
        let is_open = session.files().with(file, |state| state.opens() > 0) == Some(true);
        // Nobody opens a file of another client whose creation may be lost: it was removed.
        if failure.errno == ESTALE && !is_open {
            session.forget_writes(file);
            return false;
        }
        tracing::error!(%failure, %file, "writes that were acknowledged are lost");
        if !session.files().contains(file) {
            // Nobody has a descriptor of the file that would tell it.
            session.restarts().lose_names();
        }
        session.lose(file);
        true
    }

    /// Fails if the service has an older truncate generation of a file than this client knew: another client
    /// had truncated the file, which is lost, and what was written after that does not belong to the contents
    /// that the file has now.
    fn check_truncations(file: FileId, known: u64, fetched: &FileState) -> Result<(), Failure> {
        match fetched.truncations() < known {
            true => {
                let why = format!("{file} was truncated by another client before, which is lost");
                Err(Failure::new(ErrorKind::Internal, why))
            }
            false => Ok(()),
        }
    }

    async fn send(&self, file: FileId, writes: &[KeptWrite], has_all_changes: bool) -> Result<(), Failure> {
        let (session, fetched) = (self.session, self.fetch(file).await?);
        // Before that, truncations of this client are missing too.
        if has_all_changes {
            Self::check_truncations(file, session.kept().truncations(file), &fetched)?;
        }
        for write in writes {
            match write {
                KeptWrite::Space(change, blocks) => {
                    let (to, blocks) = ((file, &fetched), blocks.clone());
                    session.send_space(Errand::Recovery, to, *change, blocks).await?;
                }
                KeptWrite::Blocks(first, data) => {
                    session.send_blocks(Errand::Recovery, (file, &fetched), *first, data).await?;
                }
            }
        }
        session.send_commit(Errand::Recovery, file).await
    }

    async fn fetch(&self, file: FileId) -> Result<FileState, Failure> {
        let request = GetAttrRequest { ino: file.ino.0, ..GetAttrRequest::default() };
        let errand = Errand::Recovery;
        let reply: AttrReply = self.session.ask_for(errand, Kind::GetAttr, file.branch, &request).await?;
        let attr = reply.attr.unwrap_or_default();
        Ok(FileState::of(&attr, self.session.targets().spread_of(&attr)))
    }

    /// Fetches what the service knows of a file with unsynced writes.
    async fn fetch_again(&self, file: FileId) -> Result<(), Failure> {
        let known = self.session.files().with(file, |state| state.truncations()).unwrap_or_default();
        let fetched = self.fetch(file).await;
        let fetched =
            fetched.and_then(|fetched| Self::check_truncations(file, known, &fetched).map(|()| fetched));
        match fetched {
            Err(failure) if self.is_over() => return Err(failure),
            // Others must not wait for a file that cannot be read.
            Err(failure) => _ = self.lose_writes(file, &failure),
            Ok(fetched) => _ = self.session.files().with(file, |state| state.resent(&fetched)),
        }
        Ok(())
    }

    /// Reports open files and locks. A later start of the service accepts none of this.
    async fn report(&self) -> Result<(), Failure> {
        let session = self.session;
        let ping = async |ping: PingRequest| {
            let ping = PingRequest { start: self.start, ..ping };
            session.ask_for::<PingReply>(Errand::Recovery, Kind::Ping, Branch::MAIN, &ping).await
        };
        // Those that are being closed too: the service has yet to carry that out.
        let mut counts: BTreeMap<FileId, u64> = session.closing();
        session.files().for_each(|file, state| *counts.entry(file).or_default() += state.opens());
        let open = |(file, count): (FileId, u64)| {
            let (ino, branch) = (file.ino.0, file.branch.0);
            OpenCount { ino, branch, count: to_u32(count.min(u32::MAX.into())), user: 0 }
        };
        let opens: Vec<OpenCount> = counts.into_iter().filter(|(_, count)| *count > 0).map(open).collect();
        for part in opens.chunks(RECLAIMED_AT_ONCE) {
            ping(PingRequest { opens: part.to_vec(), ..PingRequest::default() }).await?;
        }
        let _nobody_locks = session.locks().still().await;
        for part in session.locks().all().chunks(RECLAIMED_AT_ONCE) {
            let reply = ping(PingRequest { locks: part.to_vec(), ..PingRequest::default() }).await?;
            if reply.refused_locks > 0 {
                tracing::error!(
                    locks = reply.refused_locks,
                    "locks of programs are lost: another client has said that they were its own"
                );
            }
        }
        ping(PingRequest { reclaimed: true, ..PingRequest::default() }).await?;
        Ok(())
    }
}
