//! Checks of what targets lend each other: lender and borrower must know each loan alike.
//!
//! A loan that only the lender has belongs to nobody. One that only the borrower has is lent again, unless
//! the lender has given its blocks to others.

use penstock_base::{FindingKind as Kind, TargetId};
use penstock_chunk::{Borrowed, Lent, LentKey, TargetLoans};
use std::collections::BTreeMap;

/// The repair of a loan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoanFix {
    /// Lend it again if its blocks are free, or drop it at the borrower, whose group is this one.
    Relend { lender: TargetId, key: LentKey, lent: Lent },
    /// Delete the lender's row. What is written in the blocks of the loan, if that is known, gets a file.
    DropLent { lender: TargetId, key: Vec<u8>, lent: Option<Lent> },
    /// Make the borrower's row again.
    PutLoan { borrower: TargetId, group: u64, borrowed: Borrowed },
    /// Delete the borrower's row, which cannot be read and which nobody knows.
    DropLoan { borrower: TargetId, group: u64 },
}

/// A fault of a loan, with its repair. One that its target has found already has no text.
pub(super) struct Found {
    pub(super) kind: Kind,
    pub(super) text: Option<String>,
    pub(super) fix: LoanFix,
}

/// The loans of all targets that serve.
#[derive(Default)]
pub(super) struct Loans(BTreeMap<TargetId, TargetLoans>);

impl Loans {
    pub(super) fn see(&mut self, target: TargetId, loans: TargetLoans) {
        let before = self.0.insert(target, loans);
        assert!(before.is_none(), "{target} is seen once");
    }

    /// Compares lenders with borrowers of a store with so many targets, once all that serve were seen.
    pub(super) fn check(&self, targets: u32) -> Vec<Found> {
        let (are_all, mut found) = (self.0.len() as u64 >= u64::from(targets), Vec::new());
        for (target, of) in &self.0 {
            // The blocks may be those of a borrower that is away.
            let is_there = |key: &&Vec<u8>| {
                are_all || LentKey::decode(key).is_ok_and(|key| self.0.contains_key(&key.borrower))
            };
            found.extend(of.bad_lent.iter().filter(is_there).map(|key| {
                let fix = LoanFix::DropLent { lender: *target, key: key.clone(), lent: None };
                Found { kind: Kind::BadLoanRow, text: None, fix }
            }));
            found.extend(of.borrowed.iter().filter_map(|(group, borrowed)| match borrowed {
                Some(borrowed) => self.check_loan(*target, *group, borrowed),
                None => self.check_bad_loan(*target, *group, are_all),
            }));
            found.extend(of.lent.iter().filter_map(|(key, lent)| self.check_lent(*target, *key, lent)));
        }
        found
    }

    /// The row of a loan cannot be read, which its target has found.
    fn check_bad_loan(&self, borrower: TargetId, group: u64, are_all: bool) -> Option<Found> {
        let fix = match self.lent_as(borrower, group) {
            Some(borrowed) => LoanFix::PutLoan { borrower, group, borrowed },
            None if are_all => LoanFix::DropLoan { borrower, group },
            None => return None,
        };
        Some(Found { kind: Kind::BadLoanRow, text: None, fix })
    }

    fn check_loan(&self, borrower: TargetId, group: u64, borrowed: &Borrowed) -> Option<Found> {
        let lender = self.0.get(&borrowed.lender)?;
        let key = LentKey { borrower, number: borrowed.number };
        let lent = Lent { group, loan: borrowed.loan.clone() };
        if lender.lent.get(&key) == Some(&lent) {
            return None;
        }
        let text = format!(
            "target {borrower} has blocks from stripe {} of target {} on loan, which knows nothing of it",
            lent.loan.stripe, borrowed.lender
        );
        let fix = LoanFix::Relend { lender: borrowed.lender, key, lent };
        Some(Found { kind: Kind::LoanDisagrees, text: Some(text), fix })
    }

    fn check_lent(&self, lender: TargetId, key: LentKey, lent: &Lent) -> Option<Found> {
        let borrower = self.0.get(&key.borrower)?;
        // A row that cannot be read may be of it.
        let is_it = |loan: &Option<Borrowed>| {
            loan.as_ref().is_none_or(|loan| loan.lender == lender && loan.number == key.number)
        };
        let has_it = borrower.borrowed.get(&lent.group).is_some_and(is_it);
        if has_it || borrower.unrecorded.contains(&(lender, key.number)) {
            return None;
        }
        let text = format!(
            "target {lender} has lent blocks from stripe {} on to target {}, which does not have them",
            lent.loan.stripe, key.borrower
        );
        let fix = LoanFix::DropLent { lender, key: key.row(), lent: Some(lent.clone()) };
        Some(Found { kind: Kind::LoanDisagrees, text: Some(text), fix })
    }

    /// The only loan of this group that another target says it has lent.
    fn lent_as(&self, borrower: TargetId, group: u64) -> Option<Borrowed> {
        let of_target = |(lender, of): (&TargetId, &TargetLoans)| -> Vec<Borrowed> {
            let lent = of.lent.iter().filter(|(key, lent)| key.borrower == borrower && lent.group == group);
            let loan = |(key, lent): (&LentKey, &Lent)| Borrowed {
                lender: *lender,
                number: key.number,
                loan: lent.loan.clone(),
            };
            lent.map(loan).collect()
        };
        let all: Vec<Borrowed> = self.0.iter().flat_map(of_target).collect();
        // Of several nobody knows which it was.
        <[Borrowed; 1]>::try_from(all).ok().map(|[only]| only)
    }
}
