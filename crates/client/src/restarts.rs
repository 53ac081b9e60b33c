//! Restarts of the service as a client sees them, and the losses of names that they cause.
//!
//! Every reply carries the generation of the service. If it changes, acknowledged changes that were not
//! durable may be lost.

use penstock_base::ErrorKind;
use penstock_wire::Failure;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

const EIO: u16 = 5;
const ESTALE: u16 = 116;
/// Generations that are remembered, so that a late reply is not mistaken for another restart.
const REMEMBERED: usize = 16;

/// Restarts of the service, and losses of names that they caused.
#[derive(Default)]
pub(crate) struct Restarts {
    /// Generations seen, the newest last.
    seen: RefCell<VecDeque<u64>>,
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

    /// Fails, once, if changes of names or attributes may be lost.
    pub(crate) fn report_lost(&self) -> Result<(), Failure> {
        if self.names_lost.take() { Err(lost("a change of names or attributes")) } else { Ok(()) }
    }

    /// Takes in the generation of a reply. Returns true if the service was started again; then changes that
    /// are not durable count as lost, and open files must be reclaimed.
    pub(crate) fn is_restart(&self, generation: u64) -> bool {
        let mut seen = self.seen.borrow_mut();
        if generation == 0 || seen.contains(&generation) {
            return false;
        }
        seen.push_back(generation);
        if seen.len() > REMEMBERED {
            seen.pop_front();
        }
        assert!((1..=REMEMBERED).contains(&seen.len()), "the memory of generations is bounded");
        seen.len() > 1
    }

    /// Records that the service was started again, and that this lost changes of names if `names` is true.
    pub(crate) fn restarted(&self, names: bool) {
        self.names_lost.set(self.names_lost.get() || names);
        self.owes_opens.set(true);
    }

    /// Takes the duty to reclaim open files and locks.
    pub(crate) fn take_opens(&self) -> bool {
        self.owes_opens.take()
    }

    /// Records that open files and locks must be reclaimed.
    pub(crate) fn owe_opens(&self) {
        self.owes_opens.set(true);
    }

    /// Records that the session has ended. Returns true the first time.
    pub(crate) fn end(&self) -> bool {
        !self.ended.replace(true)
    }

    /// True if the session has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended.get()
    }

    /// Fails if the session has ended.
    pub(crate) fn check_lives(&self) -> Result<(), Failure> {
        match self.ended.get() {
            false => Ok(()),
            true => Err(Failure {
                kind: ErrorKind::Ended,
                errno: ESTALE,
                message: "the session has ended".into(),
            }),
        }
    }
}

/// The error of an fsync when acknowledged data or names are lost.
pub(crate) fn lost(what: &str) -> Failure {
    let message = format!("{what} was lost: the service was started again before it was durable");
    Failure { kind: ErrorKind::Internal, errno: EIO, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_counts_once_and_the_first_is_no_restart() {
        let restarts = Restarts::default();
        for (generation, is_restart, newest) in [
            (0, false, None),
            (7, false, Some(7)),
            (7, false, Some(7)),
            (8, true, Some(8)),
            // A late reply of the start before.
            (7, false, Some(8)),
            (0, false, Some(8)),
            (3, true, Some(3)),
        ] {
            assert_eq!(restarts.is_restart(generation), is_restart, "{generation}");
            assert_eq!(restarts.generation(), newest, "{generation}");
        }
        (100..200).for_each(|generation| assert!(restarts.is_restart(generation)));
        assert!(restarts.seen.borrow().len() <= REMEMBERED);
    }

    #[test]
    fn a_loss_of_names_is_reported_once() {
        let restarts = Restarts::default();
        restarts.restarted(false);
        assert!(restarts.report_lost().is_ok(), "nothing was changed");
        restarts.restarted(true);
        assert!(restarts.take_opens() && !restarts.take_opens());
        // A second restart without a change keeps the report.
        restarts.restarted(false);
        assert_eq!(restarts.report_lost().unwrap_err().errno, EIO);
        assert!(restarts.report_lost().is_ok());
    }

    #[test]
    fn a_session_ends_once() {
        let restarts = Restarts::default();
        assert!(restarts.check_lives().is_ok() && restarts.end() && !restarts.end());
        assert_eq!(restarts.check_lives().unwrap_err().errno, ESTALE);
    }
}
