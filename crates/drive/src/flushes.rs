//! Flushes of one drive: concurrent ones are shared, and a failure is remembered.
//!
//! Invariants:
//! - A flush that returns success began after its caller asked for it.
//! - If a flush fails, or is abandoned before the drive answers, while there are unflushed writes, every
//!   later flush fails. The kernel and the drive report a lost write only once, to the next flush, so success
//!   of a later flush would prove nothing. A failure without unflushed writes has lost nothing and is
//!   forgotten. Until the first flush succeeds, those of an earlier process count.
//! - A durable write fails if a flush fails while it is in flight. On a file the kernel writes first and then
//!   flushes: the failed flush may have lost the write, and the flush within the write would not report it.
//!   Likewise a flush fails if a durable write fails while the flush is in flight.
//! - A flush or durable write whose caller gave up still counts when it fails, however late.
//! - A drive may report a failure late. A flush or durable write succeeds only after the drive has answered
//!   all earlier ones, so that no data counts as durable that an earlier one has lost.

use crate::DriveError;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use tokio::sync::{Mutex, MutexGuard, Notify};

/// The state of a drive's flushes and durable writes.
#[derive(Default)]
pub(crate) struct Flushes {
    turn: Mutex<()>,
    /// The number of flushes begun.
    begun: Cell<u64>,
    /// The number of the last flush that succeeded.
    done: Cell<u64>,
    /// The number of writes in flight and of ended writes, without durable ones.
    in_flight: Cell<u64>,
    writes: Cell<u64>,
    /// The number of ended writes that the last successful flush covers.
    flushed_writes: Cell<u64>,
    /// The number of failed flushes and durable writes.
    failed: Cell<u64>,
    lost: RefCell<Option<String>>,
    /// The number of flushes and durable writes sent to the drive, and the numbers of those that it has not
    /// answered.
    asked: Cell<u64>,
    unanswered: RefCell<BTreeSet<u64>>,
    answered: Notify,
}

/// A flush or durable write that was sent to the drive. Dropping it without [`Asked::answered`] counts as a
/// failure.
pub(crate) struct Asked {
    flushes: Rc<Flushes>,
    number: u64,
    answered: bool,
}

impl Asked {
    /// Notes the drive's answer. A success returns only when the drive has answered everything that was sent
    /// before.
    pub(crate) async fn answered(mut self, result: Result<(), DriveError>) -> Result<(), DriveError> {
        self.answered = true;
        if let Err(error) = &result {
            self.flushes.note_failure(error);
            return result;
        }
        let flushes = self.flushes.clone();
        drop(self);
        flushes.wait_for_answers().await;
        result
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if !self.answered {
            self.flushes.note_failure(&abandoned());
        }
        self.flushes.unanswered.borrow_mut().remove(&self.number);
        self.flushes.answered.notify_waiters();
    }
}

fn abandoned() -> DriveError {
    let why = "it was abandoned before the drive answered".to_owned();
    DriveError::Io { op: "flush", at: 0, len: 0, why }
}

/// A guard for a write in flight that needs a flush.
pub(crate) struct InFlight(Rc<Flushes>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
        // Only a flush that begins after this covers the write.
        self.0.writes.set(self.0.writes.get() + 1);
    }
}

/// The right to flush the drive. Dropping it without [`Turn::end`] counts as a failed flush.
pub(crate) struct Turn<'a> {
    flushes: &'a Flushes,
    _turn: MutexGuard<'a, ()>,
    number: u64,
    covered_writes: u64,
    /// The number of failures before it.
    failed: u64,
    ended: bool,
}

impl Flushes {
    /// Counts a write in flight that needs a flush, until the returned guard is dropped.
    pub(crate) fn begin_write(this: &Rc<Self>) -> InFlight {
        this.in_flight.set(this.in_flight.get() + 1);
        InFlight(this.clone())
    }

    /// Counts a flush or durable write as sent to the drive.
    pub(crate) fn ask(this: &Rc<Self>) -> Asked {
        let number = this.asked.get();
        this.asked.set(number + 1);
        this.unanswered.borrow_mut().insert(number);
        Asked { flushes: this.clone(), number, answered: false }
    }

    /// Waits until the drive has answered everything that was sent to it before this call.
    async fn wait_for_answers(&self) {
        let end = self.asked.get();
        loop {
            let answered = self.answered.notified();
            if self.unanswered.borrow().first().is_none_or(|first| *first >= end) {
                return;
            }
            answered.await;
        }
    }

    /// The number of failures so far, to compare with a later one.
    pub(crate) fn failed(&self) -> u64 {
        self.failed.get()
    }

    /// True if writes may be lost by a flush that fails. Before the first flush these may be writes of an
    /// earlier process.
    fn has_unflushed(&self) -> bool {
        let is_first = self.done.get() == 0;
        is_first || self.in_flight.get() > 0 || self.writes.get() > self.flushed_writes.get()
    }

    /// Notes that a flush or durable write failed. Errors that follow from an earlier failure or a full host
    /// do not count.
    pub(crate) fn note_failure(&self, error: &DriveError) {
        if matches!(error, DriveError::Down(_) | DriveError::HostFull | DriveError::FlushLost(_)) {
            return;
        }
        self.failed.set(self.failed.get() + 1);
        if self.has_unflushed() {
            self.lost.borrow_mut().get_or_insert_with(|| error.to_string());
        }
    }

    /// Waits for the right to flush. Returns none if a flush that began after this call has succeeded
    /// meanwhile, and an error if an earlier failure may have lost writes.
    pub(crate) async fn take_turn(&self) -> Result<Option<Turn<'_>>, DriveError> {
        let wanted = self.begun.get() + 1;
        let turn = self.turn.lock().await;
        if let Some(why) = &*self.lost.borrow() {
            return Err(DriveError::FlushLost(why.clone()));
        }
        if self.done.get() >= wanted {
            return Ok(None);
        }
        let number = self.begun.get() + 1;
        self.begun.set(number);
        Ok(Some(Turn {
            flushes: self,
            _turn: turn,
            number,
            covered_writes: self.writes.get(),
            failed: self.failed.get(),
            ended: false,
        }))
    }
}

impl Turn<'_> {
    /// Ends the turn with the flush's result. Returns that result, or an error if a durable write failed
    /// meanwhile and may have lost writes.
    pub(crate) fn end(mut self, result: Result<(), DriveError>) -> Result<(), DriveError> {
        self.ended = true;
        // A durable write that failed meanwhile may have lost writes that this flush covers.
        let lost = self.flushes.lost.borrow().clone();
        if let Some(why) = lost.filter(|_| result.is_ok() && self.failed != self.flushes.failed.get()) {
            return Err(DriveError::FlushLost(why));
        }
        match &result {
            Ok(()) => {
                assert!(self.number > self.flushes.done.get(), "flushes end in order");
                self.flushes.done.set(self.number);
                self.flushes.flushed_writes.set(self.covered_writes);
            }
            Err(error) => self.flushes.note_failure(error),
        }
        result
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.flushes.note_failure(&abandoned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn eio() -> DriveError {
        DriveError::Io { op: "flush", at: 0, len: 0, why: "EIO".into() }
    }

    fn turn(flushes: &Rc<Flushes>) -> Result<Option<Turn<'_>>, DriveError> {
        flushes.take_turn().now_or_never().expect("nobody has the turn")
    }

    #[test]
    fn a_failure_is_told_to_everybody_who_flushes_later() {
        let flushes = Rc::<Flushes>::default();
        drop(Flushes::begin_write(&flushes));
        assert!(turn(&flushes).unwrap().unwrap().end(Err(eio())).is_err());
        for _ in 0..3 {
            drop(Flushes::begin_write(&flushes));
            assert!(matches!(turn(&flushes), Err(DriveError::FlushLost(_))));
        }
    }

    #[test]
    fn an_abandoned_flush_is_a_failed_one() {
        let flushes = Rc::<Flushes>::default();
        drop(Flushes::begin_write(&flushes));
        drop(turn(&flushes));
        assert!(turn(&flushes).is_err());
    }

    #[test]
    fn an_abandoned_call_that_includes_a_flush_is_a_failed_one() {
        let flushes = Rc::<Flushes>::default();
        drop(Flushes::begin_write(&flushes));
        drop(Flushes::ask(&flushes));
        assert!(turn(&flushes).is_err());
    }

    #[test]
    fn a_failure_with_nothing_unflushed_loses_nothing() {
        let flushes = Rc::<Flushes>::default();
        drop(Flushes::begin_write(&flushes));
        turn(&flushes).unwrap().unwrap().end(Ok(())).unwrap();
        flushes.note_failure(&eio());
        assert!(turn(&flushes).unwrap().unwrap().end(Err(eio())).is_err());
        assert!(turn(&flushes).unwrap().unwrap().end(Ok(())).is_ok());
    }

    #[test]
    fn a_flush_beside_a_failure_says_so() {
        let flushes = Rc::<Flushes>::default();
        drop(Flushes::begin_write(&flushes));
        let flush = turn(&flushes).unwrap().unwrap();
        flushes.note_failure(&eio());
        assert!(matches!(flush.end(Ok(())), Err(DriveError::FlushLost(_))));
    }

    /// Regression: a flush that began after the drive had failed, and ended before the drive reported the
    /// failure, counted as a success.
    #[test]
    fn a_flush_waits_for_older_answers_and_for_no_younger_ones() {
        let flushes = Rc::<Flushes>::default();
        drop(Flushes::begin_write(&flushes));
        let older = Flushes::ask(&flushes);
        let flush = turn(&flushes).unwrap().unwrap();
        let asked = Flushes::ask(&flushes);
        let mut answered = Box::pin(asked.answered(Ok(())));
        assert!(answered.as_mut().now_or_never().is_none());
        let _younger = Flushes::ask(&flushes);
        assert!(older.answered(Err(eio())).now_or_never().unwrap().is_err());
        let result = answered.now_or_never().expect("it waits for what was asked later");
        assert!(matches!(flush.end(result), Err(DriveError::FlushLost(_))));
    }

    #[test]
    fn a_write_during_a_flush_is_not_covered_by_it() {
        let flushes = Rc::<Flushes>::default();
        let first = turn(&flushes).unwrap().unwrap();
        drop(Flushes::begin_write(&flushes));
        first.end(Ok(())).unwrap();
        flushes.note_failure(&eio());
        assert!(turn(&flushes).is_err());
    }

    /// Regression: a write was counted when it began, so a flush that ended before the write covered it.
    #[test]
    fn a_write_that_outlives_a_flush_is_not_covered_by_it() {
        let flushes = Rc::<Flushes>::default();
        let write = Flushes::begin_write(&flushes);
        turn(&flushes).unwrap().unwrap().end(Ok(())).unwrap();
        drop(write);
        assert!(turn(&flushes).unwrap().unwrap().end(Err(eio())).is_err());
        assert!(turn(&flushes).is_err());
    }

    #[test]
    fn callers_who_wait_share_the_next_flush() {
        let flushes = Rc::<Flushes>::default();
        let first = turn(&flushes).unwrap().unwrap();
        let mut waiting = [Box::pin(flushes.take_turn()), Box::pin(flushes.take_turn())];
        assert!(waiting.iter_mut().all(|wait| wait.as_mut().now_or_never().is_none()));
        first.end(Ok(())).unwrap();
        let [second, third] = &mut waiting;
        let shared =
            second.as_mut().now_or_never().unwrap().unwrap().expect("the first flush began too early");
        shared.end(Ok(())).unwrap();
        assert!(third.as_mut().now_or_never().unwrap().unwrap().is_none(), "the second served it");
    }
}
