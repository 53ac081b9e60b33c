//! Watches the session: keeps it alive, detects restarts of the service and lapses, and reports lost writes.
//!
//! Every reply carries the generation of the service. If it changes, acknowledged changes that were not
//! durable may be lost. The client keeps no copy of them. It marks the files, and names as a whole, and the
//! next request to make them durable fails with EIO, once. Marks are set in the same step in which the new
//! generation is seen, before the reply that carried it is used.

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
/// Generations that are remembered, so that a late reply is not mistaken for another restart.
const REMEMBERED: usize = 16;
/// Most open inodes or locks in one ping.
const RECLAIMED_AT_ONCE: usize = 4096;
/// Pings in one lease time.
const PINGS: u32 = 4;

/// Restarts of the service, and losses of names that they caused.
#[derive(Default)]
pub(crate) struct Restarts {
    /// Generations seen, the newest last.
    seen: RefCell<VecDeque<u64>>,
    /// Names or attributes were changed and are not durable.
    names_changed: Cell<bool>,
    /// Changes of names or attributes may be lost, and that was not reported yet.
    names_lost: Cell<bool>,
    /// Open files and locks must be reclaimed.
    owes_opens: Cell<bool>,
    ended: Cell<bool>,
}

impl Restarts {
    /// Returns the newest generation of the service; `None` before the first reply.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.seen.borrow().back().copied()
    }

    /// Records that names or attributes were changed.
    pub(crate) fn changed(&self) {
        self.names_changed.set(true);
    }

    /// Returns and clears the record of such changes, before they are made durable.
    pub(crate) fn take_changed(&self) -> bool {
        self.names_changed.take()
    }

    /// Records that changes of names or attributes may be lost.
    pub(crate) fn lose(&self) {
        self.names_lost.set(true);
    }

    /// Returns and clears the record that changes may be lost.
    pub(crate) fn take_lost(&self) -> bool {
        self.names_lost.take()
    }

    /// True if the generation was not seen before; false for the first one and for 0.
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

/// The error of an fsync when acknowledged data or names are lost.
pub(crate) fn lost(what: &str) -> Failure {
    let message = format!("{what} was lost: the service was started again before it was durable");
    Failure { kind: Todo::Internal, errno: EIO, message }
}

impl Client {
    /// Runs several requests under one start of the service, because a restart may lose the first ones. They
    /// are repeated if the service restarted meanwhile.
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

    /// Fails if the session has ended.
    pub(crate) fn check_lives(&self) -> Result<(), Failure> {
        match self.restarts.ended.get() {
            false => Ok(()),
            true => {
                Err(Failure { kind: Todo::Ended, errno: ESTALE, message: "the session has ended".into() })
            }
        }
    }

    /// Records that the session has ended. Logs that once, unless this client ended it.
    pub(crate) fn note_failure(&self, failure: &Failure) {
        if failure.kind == Todo::Ended && !self.restarts.ended.replace(true) && !self.closed.get() {
            tracing::error!(%failure, "every operation fails from here on: unmount and mount again");
            self.leases.clock.end();
            // The kernel uses pages that it has without asking the client.
            self.open_files().into_iter().for_each(|ino| self.drop_pages_soon(ino));
        }
    }

    /// True if the session has ended.
    pub fn has_ended(&self) -> bool {
        self.restarts.ended.get()
    }

    /// Checks the generation in a reply, and marks losses if the service restarted.
    pub(crate) fn note_generation(&self, generation: u64) {
        if !self.restarts.is_restart(generation) {
            return;
        }
        let mut files = 0;
        for (ino, state) in self.files.borrow().iter() {
            let mut state = state.borrow_mut();
            // The end may result from a lost write of another client.
            state.note_lost_end();
            state.stale = true;
            let loses = state.mtime_ns.is_some() || state.unsynced;
            if loses {
                state.lose();
                files += 1;
            }
            if loses || state.mapped {
                // The kernel's pages and its size may include lost changes.
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

    /// Reclaims open files and locks after a restart of the service. If it restarts again meanwhile, its next
    /// start accepts none of this, and everything must be reclaimed again.
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

    /// Keeps the session alive with [`PINGS`] pings in each lease time.
    pub(crate) async fn lease_task(self: Rc<Self>, lease: Duration) {
        while !self.closed.get() && !self.has_ended() {
            let due = self.env.now() + lease / PINGS;
            if let Err(failure) = self.ping().await {
                tracing::debug!(%failure, "the service was not told that this client lives");
                self.env.sleep(lease / PINGS).await;
            }
            // A late answer is only as recent as its request.
            self.env.sleep(due.saturating_sub(self.env.now())).await;
        }
    }

    /// Makes the kernel drop its pages of files once the service has not answered for so long that others may
    /// change them.
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
                // The time ran on meanwhile. If it has run out again, pages that the kernel got in between
                // are still there.
                continue;
            }
            clock.running(is_over).await;
            if is_over() {
                return;
            }
            tracing::warn!("the service answers again");
        }
    }

    /// Fails a close if writes of the file were lost. The caller of close may ignore errors, for example a
    /// program that is started while another thread opens files. So the loss is reported here and stays to be
    /// reported until the last close.
    ///
    /// `seen` is the number of losses that were reported through this descriptor.
    pub fn tell_lost(&self, ino: Ino, seen: u64) -> Result<(), Failure> {
        match self.losses(ino) > seen {
            true => self.check_lost(ino, |state| state.lost_told = true),
            false => Ok(()),
        }
    }

    /// Returns how often writes of a file were lost; 0 if its state is not known.
    fn losses(&self, ino: Ino) -> u64 {
        self.files.borrow().get(&ino).map_or(0, |state| state.borrow().losses)
    }

    /// Returns the number of losses that a descriptor opened now need not report: all, except the last one if
    /// it was not reported yet.
    pub fn losses_told(&self, ino: Ino) -> u64 {
        let of = |state: &Rc<RefCell<FileState>>| state.borrow().losses - u64::from(state.borrow().lost);
        self.files.borrow().get(&ino).map_or(0, of)
    }

    /// Fails if writes of a file were lost and this descriptor has not reported it. Every descriptor that was
    /// open reports a loss once, regardless of others.
    pub(crate) fn report_loss_to(&self, ino: Ino, seen: &Cell<u64>) -> Result<(), Failure> {
        let losses = self.losses(ino);
        if losses <= seen.get() {
            return Ok(());
        }
        seen.set(losses);
        // Only the first descriptor to report a loss logs it.
        self.report_lost(ino).and_then(|()| Err(lost(&format!("data written to inode {ino}"))))
    }

    /// Fails, once, if writes of a file were lost.
    pub(crate) fn report_lost(&self, ino: Ino) -> Result<(), Failure> {
        let told = |state: &mut FileState| (state.lost, state.lost_told) = (false, false);
        self.check_lost(ino, told).inspect_err(|failure| {
            self.forget_idle(ino);
            tracing::error!(%failure, "lost writes are reported to a caller");
        })
    }

    /// Fails while a loss of writes of the file is unreported.
    pub(crate) fn refuse_lost(&self, ino: Ino) -> Result<(), Failure> {
        self.check_lost(ino, |_| ())
            .inspect_err(|failure| tracing::error!(%failure, "a rename over another file fails"))
    }

    fn check_lost(&self, ino: Ino, tell: impl FnOnce(&mut FileState)) -> Result<(), Failure> {
        match self.files.borrow().get(&ino).map(|state| state.borrow_mut()) {
            Some(mut state) if state.lost => tell(&mut state),
            _ => return Ok(()),
        }
        Err(lost(&format!("data written to inode {ino}")))
    }
}
