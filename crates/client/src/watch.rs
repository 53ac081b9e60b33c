//! Watching the service: that it hears of this client, that it was not started again, that the session goes on.
//!
//! Every reply carries the generation of the service. When it changes, what was acknowledged and not durable may be
//! lost. The client keeps no copy of it: the files are marked, and so are the names, and whoever asks next that they be
//! durable gets EIO, once. Marks are made in the same step in which the new generation is seen, before the reply that
//! brought it is used.

use crate::file::FileState;
use crate::session::Client;
use penstock_base::{Ino, Kind as Todo};
use penstock_wire::names::{EmptyReply, OpenCount, PingRequest};
use penstock_wire::{Failure, Kind};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

const EIO: u16 = 5;
const ESTALE: u16 = 116;
/// Generations that are remembered, so that a reply that was late is not taken for another restart.
const REMEMBERED: usize = 16;
/// Open inodes in one ping.
const RECLAIMED_AT_ONCE: usize = 4096;
/// Pings in a lease.
const PINGS: u32 = 4;

/// What is known of the service's restarts.
#[derive(Default)]
pub(crate) struct Restarts {
    /// Generations seen, the newest last.
    seen: RefCell<VecDeque<u64>>,
    /// Names or attributes were changed and not made durable.
    names_changed: Cell<bool>,
    /// They may be lost, and nobody was told.
    names_lost: Cell<bool>,
    /// Files that are open must be opened again.
    owes_opens: Cell<bool>,
    ended: Cell<bool>,
}

impl Restarts {
    /// The generation of the service as it is known.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.seen.borrow().back().copied()
    }

    /// Names or attributes were changed.
    pub(crate) fn changed(&self) {
        self.names_changed.set(true);
    }

    /// Takes the word that they were, before they are made durable.
    pub(crate) fn take_changed(&self) -> bool {
        self.names_changed.take()
    }

    /// Some may be lost.
    pub(crate) fn lose(&self) {
        self.names_lost.set(true);
    }

    /// Takes the word that some may be lost.
    pub(crate) fn take_lost(&self) -> bool {
        self.names_lost.take()
    }

    /// Whether a generation is another one than before; false for the first.
    fn is_restart(&self, generation: u64) -> bool {
        let mut seen = self.seen.borrow_mut();
        if generation == 0 || seen.contains(&generation) {
            return false;
        }
        seen.push_back(generation);
        if seen.len() > REMEMBERED {
            seen.pop_front();
        }
        seen.len() > 1
    }
}

/// What fsync says of data or names that were acknowledged and are lost.
pub(crate) fn lost(what: &str) -> Failure {
    let message = format!("{what} was lost: the service was started again before it was durable");
    Failure { kind: Todo::Internal, errno: EIO, message }
}

impl Client {
    /// Does something of several requests under one start of the service, which may lose what it did not make durable: what
    /// straddles a restart is done once more.
    pub(crate) async fn under_one_start<T>(
        &self,
        act: impl AsyncFn() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        loop {
            let generation = self.restarts.generation();
            let done = act().await?;
            if generation == self.restarts.generation() {
                return Ok(done);
            }
        }
    }

    /// Fails when the session has ended.
    pub(crate) fn check_lives(&self) -> Result<(), Failure> {
        match self.restarts.ended.get() {
            false => Ok(()),
            true => {
                Err(Failure { kind: Todo::Ended, errno: ESTALE, message: "the session has ended".into() })
            }
        }
    }

    /// Notes that the session has ended, and says so once if it was not this client that ended it.
    pub(crate) fn note_failure(&self, failure: &Failure) {
        if failure.kind == Todo::Ended && !self.restarts.ended.replace(true) && !self.closed.get() {
            tracing::error!(%failure, "every operation fails from here on: unmount and mount again");
            self.leases.clock.end();
            // For pages that it has the kernel asks nobody.
            self.open_files().into_iter().for_each(|ino| self.drop_pages_soon(ino));
        }
    }

    /// Whether its session has ended.
    pub fn has_ended(&self) -> bool {
        self.restarts.ended.get()
    }

    /// Looks at the generation in a reply.
    pub(crate) fn note_generation(&self, generation: u64) {
        if !self.restarts.is_restart(generation) {
            return;
        }
        let mut files = 0;
        for (ino, state) in self.files.borrow().iter() {
            let mut state = state.borrow_mut();
            // The end may be what another client wrote and lost.
            state.note_lost_end();
            state.stale = true;
            let loses = state.mtime_ns.is_some() || state.unsynced;
            if loses {
                state.lose();
                files += 1;
            }
            if loses || state.mapped {
                // Its pages and its size in the kernel may be among what is lost.
                self.drop_pages_soon(*ino);
            }
        }
        let names = self.restarts.names_changed.take();
        self.restarts.names_lost.set(self.restarts.names_lost.get() || names);
        self.restarts.owes_opens.set(true);
        self.unsynced.borrow_mut().clear();
        self.leases.restarted();
        tracing::warn!(files, names, "the service was started again: what was not synced may be lost");
    }

    /// Says what is open and locked, after a restart of the service. If that is started once more meanwhile, its next start takes
    /// none of it, and all is owed again.
    async fn reclaim(&self) -> Result<(), Failure> {
        let start = self.restarts.generation().unwrap_or_default();
        let _nobody_opens = self.opening.write().await;
        let opens = |(ino, state): (&Ino, &Rc<RefCell<FileState>>)| {
            let count = u32::try_from(state.borrow().opens).unwrap_or(u32::MAX);
            (count > 0).then_some(OpenCount { ino: ino.0, count })
        };
        let mut opens: Vec<OpenCount> = self.files.borrow().iter().filter_map(opens).collect();
        opens.sort_unstable_by_key(|open| open.ino);
        for part in opens.chunks(RECLAIMED_AT_ONCE) {
            let ping = PingRequest { opens: part.to_vec(), start, ..PingRequest::default() };
            let _: EmptyReply = self.ask(Kind::Ping, &ping).await?;
        }
        let _nobody_locks = self.locks.still().await;
        for part in self.locks.all().chunks(RECLAIMED_AT_ONCE) {
            let ping = PingRequest { locks: part.to_vec(), start, ..PingRequest::default() };
            let _: EmptyReply = self.ask(Kind::Ping, &ping).await?;
        }
        let all = PingRequest { reclaimed: true, start, ..PingRequest::default() };
        let _: EmptyReply = self.ask(Kind::Ping, &all).await?;
        Ok(())
    }

    async fn ping(&self) -> Result<(), Failure> {
        let _: EmptyReply = self.ask(Kind::Ping, &PingRequest::default()).await?;
        if self.restarts.owes_opens.take() {
            self.reclaim().await.inspect_err(|_| self.restarts.owes_opens.set(true))?;
        }
        Ok(())
    }

    /// Tells the service that this client lives.
    pub(crate) async fn lease_task(self: Rc<Self>, lease: Duration) {
        while !self.closed.get() && !self.has_ended() {
            let due = self.env.now() + lease / PINGS;
            if let Err(failure) = self.ping().await {
                tracing::debug!(%failure, "the service was not told that this client lives");
                self.env.sleep(lease / PINGS).await;
            }
            // An answer that came late is as old as its question.
            self.env.sleep(due.saturating_sub(self.env.now())).await;
        }
    }

    /// Has the kernel drop what it keeps of files when the service has not answered for so long that others may change them.
    pub(crate) async fn lapse_task(self: Rc<Self>) {
        let clock = &self.leases.clock;
        let is_over = || self.closed.get() || self.has_ended();
        loop {
            let (until, within) = clock.run_out(is_over).await;
            if is_over() {
                return;
            }
            tracing::warn!(
                "the service does not answer: programs wait until it does, for others may change what this mount has"
            );
            if let Some(cache) = self.leases.kernel_cache() {
                let size = |ino: &Ino| self.files.borrow().get(ino).map_or(0, |state| state.borrow().size);
                let files = self.open_files().into_iter().map(|ino| (ino, size(&ino))).collect();
                cache.hide_pages(files, within, &|| !clock.ran_since(until)).await;
            }
            if clock.ran_since(until) {
                // Pages that came into the kernel meanwhile are there still if it has run out again.
                continue;
            }
            clock.running(is_over).await;
            if is_over() {
                return;
            }
            tracing::warn!("the service answers again");
        }
    }

    /// Fails when writes of a file were lost, for a close. Others may close it who would not look: a program that is
    /// started beside a thread that opens files. So this tells of it and leaves it to be told of until the last close.
    ///
    /// `seen` is how often a loss was told through this descriptor.
    pub fn tell_lost(&self, ino: Ino, seen: u64) -> Result<(), Failure> {
        match self.losses(ino) > seen {
            true => self.check_lost(ino, |state| state.lost_told = true),
            false => Ok(()),
        }
    }

    /// How often writes of a file were lost, while it is known.
    fn losses(&self, ino: Ino) -> u64 {
        self.files.borrow().get(&ino).map_or(0, |state| state.borrow().losses)
    }

    /// How often writes of a file were lost, as far as a descriptor that is opened now need not hear of it: all, but for
    /// the last one while nobody was told.
    pub fn losses_told(&self, ino: Ino) -> u64 {
        let of = |state: &Rc<RefCell<FileState>>| state.borrow().losses - u64::from(state.borrow().lost);
        self.files.borrow().get(&ino).map_or(0, of)
    }

    /// Fails when writes of a file were lost that this descriptor has not heard of. Every descriptor that was open hears
    /// of it once, whoever asked first.
    pub(crate) fn report_loss_to(&self, ino: Ino, seen: &Cell<u64>) -> Result<(), Failure> {
        let losses = self.losses(ino);
        if losses <= seen.get() {
            return Ok(());
        }
        seen.set(losses);
        // The first to hear of it says so in the log.
        self.report_lost(ino).and_then(|()| Err(lost(&format!("data written to inode {ino}"))))
    }

    /// Fails, once, when writes of a file were lost.
    pub(crate) fn report_lost(&self, ino: Ino) -> Result<(), Failure> {
        let told = |state: &mut FileState| (state.lost, state.lost_told) = (false, false);
        self.check_lost(ino, told).inspect_err(|failure| {
            self.forget_idle(ino);
            tracing::error!(%failure, "an fsync fails for it");
        })
    }

    /// Fails while writes of a file are lost and nobody was told.
    pub(crate) fn refuse_lost(&self, ino: Ino) -> Result<(), Failure> {
        self.check_lost(ino, |_| ())
            .inspect_err(|failure| tracing::error!(%failure, "it takes no other file's name"))
    }

    fn check_lost(&self, ino: Ino, tell: impl FnOnce(&mut FileState)) -> Result<(), Failure> {
        match self.files.borrow().get(&ino).map(|state| state.borrow_mut()) {
            Some(mut state) if state.lost => tell(&mut state),
            _ => return Ok(()),
        }
        Err(lost(&format!("data written to inode {ino}")))
    }
}
