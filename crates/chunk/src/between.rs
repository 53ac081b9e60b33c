//! Loans of which one side has done its part and the other one has not, or not yet told of it.
//!
//! Invariant: the rows of both sides of a loan agree, or it is in here, or a crash or damage has parted them.

use penstock_base::TargetId;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// The loans of a borrower about which it does not know its lender's state.
#[derive(Default)]
pub(crate) struct Between {
    /// By lender and number; true while the lender is asked.
    loans: RefCell<BTreeMap<(TargetId, u64), bool>>,
}

/// A lender is asked for its part of a loan until this is dropped.
pub(crate) struct Asked {
    between: Rc<Between>,
    loan: (TargetId, u64),
}

impl Drop for Asked {
    fn drop(&mut self) {
        if let Some(is_asked) = self.between.loans.borrow_mut().get_mut(&self.loan) {
            *is_asked = false;
        }
    }
}

impl Between {
    /// A lender is asked for its part from here on.
    pub(crate) fn ask(self: &Rc<Self>, lender: TargetId, number: u64) -> Asked {
        let loan = (lender, number);
        let before = self.loans.borrow_mut().insert(loan, true);
        assert!(before != Some(true), "{loan:?} is asked for once at a time");
        Asked { between: self.clone(), loan }
    }

    /// Both sides agree about a loan.
    pub(crate) fn agreed(&self, lender: TargetId, number: u64) {
        let was_asked = self.loans.borrow_mut().remove(&(lender, number));
        assert_eq!(was_asked, Some(false), "the lender has answered");
    }

    /// Forgets the loans of a lender that have ended, of those for which it is not asked.
    pub(crate) fn forget_ended(&self, lender: TargetId, ended: impl Fn(u64) -> bool) {
        self.loans
            .borrow_mut()
            .retain(|(of, number), is_asked| *of != lender || *is_asked || !ended(*number));
    }

    /// True if a lender is asked for something and has not answered.
    pub(crate) fn is_asked(&self, lender: TargetId) -> bool {
        self.loans.borrow().range((lender, 0)..=(lender, u64::MAX)).any(|(_, is_asked)| *is_asked)
    }

    /// All of them, by lender and number.
    pub(crate) fn all(&self) -> BTreeSet<(TargetId, u64)> {
        self.loans.borrow().keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loan_is_there_until_both_sides_agree() {
        let (between, lender) = (Rc::new(Between::default()), TargetId(1));
        let (asked, late) = (between.ask(lender, 5), between.ask(lender, 6));
        assert!(between.is_asked(lender) && !between.is_asked(TargetId(0)) && between.all().len() == 2);
        drop(asked);
        between.agreed(lender, 5);
        between.forget_ended(lender, |_| true);
        assert!(between.is_asked(lender), "nobody knows what comes of it");
        drop(late);
        assert!(!between.is_asked(lender));
        between.forget_ended(lender, |_| false);
        assert_eq!(between.all().into_iter().collect::<Vec<_>>(), [(lender, 6)]);
        between.forget_ended(lender, |_| true);
        assert!(between.all().is_empty());
    }
}
