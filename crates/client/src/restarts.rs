//! Restarts of the service as a client sees them, and the losses of names that they cause.
//!
//! Every reply carries the generation of the service. If it changes, acknowledged changes that were not
//! durable may be lost.
//!
//! Generations are random numbers, and a reply may arrive late: its generation may be an older one than the
//! last seen, even one that was not seen before. Of two starts the one that answered a request is the newer
//! if the request was sent after the other had been seen. Where that is not known, the one seen last counts
//! as the newest until a reply shows that it is not. A change of the newest generation counts as a restart
//! each time: too many losses are reported rather than too few.

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
    /// Number of times that the newest generation has changed.
    changes: Cell<u64>,
    /// Restarts that may have lost changes of names or attributes.
    name_losses: Cell<u64>,
    /// The last of them that anything has reported.
    name_losses_told: Cell<u64>,
    /// The last of them that was reported without a descriptor.
    without_descriptor: Cell<u64>,
    ended: Cell<bool>,
}

impl Restarts {
    /// Returns the newest generation of the service; `None` before the first reply.
    pub(crate) fn generation(&self) -> Option<u64> {
        self.seen.borrow().back().copied()
    }

    /// Fails, once, if changes of names or attributes may be lost. This is for callers without a descriptor;
    /// reports through descriptors do not count.
    pub(crate) fn report_lost_names(&self) -> Result<(), Failure> {
        self.report_lost_names_to(&self.without_descriptor)
    }

    /// Fails if changes of names or attributes may be lost and the descriptor, through which `seen` losses
    /// were reported, has not reported that.
    pub(crate) fn report_lost_names_to(&self, seen: &Cell<u64>) -> Result<(), Failure> {
        let losses = self.name_losses.get();
        assert!(seen.get() <= losses, "only losses are reported");
        if seen.replace(losses) == losses {
            return Ok(());
        }
        self.name_losses_told.set(losses);
        Err(lost("a change of names or attributes"))
    }

    /// Number of losses of names that a descriptor opened now need not report.
    pub(crate) fn name_losses_told(&self) -> u64 {
        self.name_losses_told.get()
    }

    /// The number of changes of the newest generation, for [`Self::is_restart`] of the reply to a request
    /// that is sent now.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.get()
    }

    /// Takes in the generation of a reply to a request that was sent after `changes` changes. Returns true if
    /// the service was started again; then changes that are not durable count as lost, and open files must be
    /// reclaimed.
    pub(crate) fn is_restart(&self, generation: u64, changes: u64) -> bool {
        let mut seen = self.seen.borrow_mut();
        assert!(changes <= self.changes.get(), "a request is sent before its reply");
        let is_late = seen.contains(&generation) && changes < self.changes.get();
        if generation == 0 || seen.back() == Some(&generation) || is_late {
            return false;
        }
        self.changes.set(self.changes.get() + 1);
        seen.retain(|other| *other != generation);
        seen.push_back(generation);
        if seen.len() > REMEMBERED {
            seen.pop_front();
        }
        assert!((1..=REMEMBERED).contains(&seen.len()), "the memory of generations is bounded");
        seen.len() > 1
    }

    /// Records that a restart has lost changes of names or attributes.
    pub(crate) fn lose_names(&self) {
        self.name_losses.set(self.name_losses.get() + 1);
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

/// The error of an fsync that spans a restart of a service with several clients.
pub(crate) fn others_may_have_lost() -> Failure {
    let message = "what other clients wrote may be lost: the service was started again during the fsync";
    Failure { kind: ErrorKind::Internal, errno: EIO, message: message.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generation_counts_once_and_the_first_is_no_restart() {
        let restarts = Restarts::default();
        for (generation, changes, is_restart, newest) in [
            (0, 0, false, None),
            (7, 0, false, Some(7)),
            (7, 1, false, Some(7)),
            (8, 1, true, Some(8)),
            // A late reply of the start before.
            (7, 1, false, Some(8)),
            (0, 2, false, Some(8)),
            (3, 2, true, Some(3)),
        ] {
            assert_eq!(restarts.is_restart(generation, changes), is_restart, "{generation}");
            assert_eq!(restarts.generation(), newest, "{generation}");
        }
        (100..200).for_each(|generation| assert!(restarts.is_restart(generation, restarts.changes())));
        assert!(restarts.seen.borrow().len() <= REMEMBERED);
    }

    /// Regression: every later request was repeated without end.
    #[test]
    fn a_late_reply_of_a_start_that_was_not_seen_does_not_count_for_ever() {
        let restarts = Restarts::default();
        restarts.is_restart(7, restarts.changes());
        let sent = restarts.changes();
        assert!(restarts.is_restart(9, sent));
        assert!(restarts.is_restart(8, sent) && restarts.generation() == Some(8));
        assert!(!restarts.is_restart(9, sent + 1), "it may have been answered before");
        assert!(restarts.is_restart(9, restarts.changes()) && restarts.generation() == Some(9));
        assert!(!restarts.is_restart(8, sent + 2) && restarts.generation() == Some(9));
    }

    #[test]
    fn a_loss_of_names_is_reported_once_through_each_descriptor() {
        let restarts = Restarts::default();
        assert!(restarts.report_lost_names().is_ok(), "nothing was lost");
        let descriptors = [Cell::new(restarts.name_losses_told()), Cell::new(restarts.name_losses_told())];
        restarts.lose_names();
        let unreported = Cell::new(restarts.name_losses_told());
        assert_eq!(restarts.report_lost_names().unwrap_err().errno, EIO);
        assert!(restarts.report_lost_names().is_ok());
        for seen in descriptors.iter().chain([&unreported]) {
            assert_eq!(restarts.report_lost_names_to(seen).unwrap_err().errno, EIO);
            assert!(restarts.report_lost_names_to(seen).is_ok());
        }
        // This one was opened after the report.
        assert!(restarts.report_lost_names_to(&Cell::new(restarts.name_losses_told())).is_ok());
    }

    #[test]
    fn a_session_ends_once() {
        let restarts = Restarts::default();
        assert!(restarts.check_lives().is_ok() && restarts.end() && !restarts.end());
        assert_eq!(restarts.check_lives().unwrap_err().errno, ESTALE);
    }
}
