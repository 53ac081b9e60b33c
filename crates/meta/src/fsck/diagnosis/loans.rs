//! Checks of what targets lend each other: lender and borrower must know each loan alike.
//!
//! A loan that only the lender has belongs to nobody. One that only the borrower has is lent again, unless
//! the lender has given its blocks to others.

use penstock_base::{FindingKind as Kind, TargetId};
use penstock_chunk::{Borrowed, Lent, LentKey, TargetLoans};
use std::collections::{BTreeMap, BTreeSet};

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
    /// Make the row with the numbers of loans again: none that others know has a higher one.
    PutNumbers { borrower: TargetId, highest: u64 },
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

    /// Compares lenders with borrowers of a store with so many targets, once all that serve were seen. What
    /// forgotten ones have lent and borrowed is lost.
    pub(super) fn check(&self, targets: u32, forgotten: &BTreeSet<TargetId>) -> Vec<Found> {
        let known = (self.0.len() + forgotten.len()) as u64;
        let (are_all, mut found) = (known >= u64::from(targets), Vec::new());
        for (target, of) in &self.0 {
            // The blocks may be those of a borrower that is away.
            let is_there = |key: &&Vec<u8>| {
                are_all || LentKey::decode(key).is_ok_and(|key| self.0.contains_key(&key.borrower))
            };
            let is_lost = |lender: TargetId| forgotten.contains(&lender);
            found.extend(of.bad_lent.iter().filter(is_there).map(|key| {
                let fix = LoanFix::DropLent { lender: *target, key: key.clone(), lent: None };
                Found { kind: Kind::BadLoanRow, text: None, fix }
            }));
            found.extend(of.borrowed.iter().filter_map(|(group, borrowed)| match borrowed {
                Some(borrowed) if is_lost(borrowed.lender) => {
                    Some(Self::lost_loan(*target, *group, borrowed))
                }
                Some(borrowed) => self.check_loan(*target, *group, borrowed),
                // Nobody knows the loans of a forgotten one.
                None => self.check_bad_loan(*target, *group, (are_all, forgotten.is_empty())),
            }));
            found.extend(of.lent.iter().filter_map(|(key, lent)| match is_lost(key.borrower) {
                true => Some(Self::unused_loan(*target, *key, lent)),
                false => self.check_lent(*target, *key, lent),
            }));
            found.extend((of.has_bad_numbers && are_all).then(|| self.new_numbers(*target)));
        }
        found
    }

    /// The row with the numbers of loans cannot be read, which its target has found.
    fn new_numbers(&self, borrower: TargetId) -> Found {
        let lent = self.0.values().flat_map(|of| of.lent.keys()).filter(|key| key.borrower == borrower);
        let highest = lent.map(|key| key.number).max().unwrap_or(0);
        let fix = LoanFix::PutNumbers { borrower, highest };
        Found { kind: Kind::BadLoanRow, text: None, fix }
    }

    /// The row of a loan cannot be read, which its target has found.
    fn check_bad_loan(
        &self,
        borrower: TargetId,
        group: u64,
        (are_all, are_whole): (bool, bool),
    ) -> Option<Found> {
        // A target that is away may have lent the group of this number last, or one whose row of it cannot be
        // read: then nobody knows which blocks it has.
        if !are_all {
            return None;
        }
        let is_of_another = |key: &Vec<u8>| LentKey::decode(key).is_ok_and(|key| key.borrower != borrower);
        let are_known = self.0.values().flat_map(|of| &of.bad_lent).all(is_of_another);
        let fix = match self.lent_as(borrower, group).filter(|_| are_known && are_whole) {
            Some(borrowed) => LoanFix::PutLoan { borrower, group, borrowed },
            None => LoanFix::DropLoan { borrower, group },
        };
        Some(Found { kind: Kind::BadLoanRow, text: None, fix })
    }

    fn check_loan(&self, borrower: TargetId, group: u64, borrowed: &Borrowed) -> Option<Found> {
        let lender = self.0.get(&borrowed.lender)?;
        let key = LentKey { borrower, number: borrowed.number };
        if lender.lent.get(&key).is_some_and(|lent| lent.is(group, &borrowed.loan)) {
            return None;
        }
        let lent = Lent { group, loan: borrowed.loan.clone(), is_restored: false };
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
        Some(Self::unused_loan(lender, key, lent))
    }

    /// A loan that its borrower does not have.
    fn unused_loan(lender: TargetId, key: LentKey, lent: &Lent) -> Found {
        let text = format!(
            "target {lender} has lent blocks from stripe {} on to target {}, which does not have them",
            lent.loan.stripe, key.borrower
        );
        let fix = LoanFix::DropLent { lender, key: key.row(), lent: Some(lent.clone()) };
        Found { kind: Kind::LoanDisagrees, text: Some(text), fix }
    }

    /// A loan whose lender is forgotten.
    fn lost_loan(borrower: TargetId, group: u64, borrowed: &Borrowed) -> Found {
        let text = format!(
            "target {borrower} has blocks from stripe {} of target {} on loan, which is forgotten",
            borrowed.loan.stripe, borrowed.lender
        );
        let fix = LoanFix::DropLoan { borrower, group };
        Found { kind: Kind::LoanDisagrees, text: Some(text), fix }
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

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_chunk::rows::Loan;

    const BORROWER: TargetId = TargetId(0);

    fn loan(stripe: u64) -> Loan {
        Loan { stripe, stripes: 2, gaps: Vec::new() }
    }

    fn lent(number: u64, stripe: u64) -> (LentKey, Lent) {
        let key = LentKey { borrower: BORROWER, number };
        (key, Lent { group: 9, loan: loan(stripe), is_restored: false })
    }

    /// The loans of a lender, and keys of rows that cannot be read.
    type Lender = (Vec<(LentKey, Lent)>, Vec<Vec<u8>>);

    /// A borrower with a row of group 9 that cannot be read, and two others with these loans and bad rows.
    fn fixes(count: u32, others: [Lender; 2]) -> Vec<LoanFix> {
        let mut loans = Loans::default();
        loans.see(BORROWER, TargetLoans { borrowed: [(9, None)].into(), ..TargetLoans::default() });
        for (target, (lent, bad_lent)) in [TargetId(1), TargetId(2)].into_iter().zip(others) {
            let lent = lent.into_iter().collect();
            loans.see(target, TargetLoans { lent, bad_lent, ..TargetLoans::default() });
        }
        loans.check(count, &BTreeSet::new()).into_iter().map(|found| found.fix).collect()
    }

    /// Regression: an older loan of the same group took the place of one whose lender was away, or whose row
    /// could not be read there either.
    #[test]
    fn a_row_that_cannot_be_read_is_made_again_only_if_nobody_else_may_have_lent_it() {
        let put = |number, stripe| LoanFix::PutLoan {
            borrower: BORROWER,
            group: 9,
            borrowed: Borrowed { lender: TargetId(1), number, loan: loan(stripe) },
        };
        let drop = [LoanFix::DropLoan { borrower: BORROWER, group: 9 }];
        let (one, nothing) = (|| (vec![lent(3, 5)], vec![]), || (vec![], vec![]));
        assert_eq!(fixes(3, [one(), nothing()]), [put(3, 5)]);
        assert_eq!(fixes(4, [one(), nothing()]), [], "a target is away");
        assert_eq!(fixes(3, [one(), (vec![lent(4, 7)], vec![])]), drop, "which of both?");
        assert_eq!(fixes(3, [nothing(), nothing()]), drop);
        let bad = LentKey { borrower: BORROWER, number: 4 }.row();
        let found = fixes(3, [one(), (vec![], vec![bad.clone()])]);
        assert!(found.contains(&drop[0]) && !found.contains(&put(3, 5)), "{found:?}");
        let of_another = LentKey { borrower: TargetId(2), number: 4 }.row();
        assert!(fixes(3, [one(), (vec![], vec![of_another])]).contains(&put(3, 5)));
    }

    #[test]
    fn loans_of_forgotten_targets_are_lost() {
        let mut loans = Loans::default();
        let borrowed = |lender| Borrowed { lender, number: 3, loan: loan(5) };
        let of_lost = [(9, Some(borrowed(TargetId(1)))), (10, Some(borrowed(TargetId(3))))].into();
        let key = LentKey { borrower: TargetId(1), number: 8 };
        let (_, lent) = lent(8, 30);
        let of_borrower =
            TargetLoans { borrowed: of_lost, lent: [(key, lent.clone())].into(), ..TargetLoans::default() };
        loans.see(BORROWER, of_borrower);
        let fixes: Vec<LoanFix> =
            loans.check(4, &[TargetId(1)].into()).into_iter().map(|found| found.fix).collect();
        let expected = [
            LoanFix::DropLoan { borrower: BORROWER, group: 9 },
            LoanFix::DropLent { lender: BORROWER, key: key.row(), lent: Some(lent) },
        ];
        assert_eq!(fixes, expected, "target 3 is away and may come back");
    }

    #[test]
    fn numbers_go_on_behind_those_that_others_know() {
        let mut loans = Loans::default();
        loans.see(BORROWER, TargetLoans { has_bad_numbers: true, ..TargetLoans::default() });
        assert!(loans.check(2, &BTreeSet::new()).is_empty(), "a target is away");
        loans.see(
            TargetId(1),
            TargetLoans { lent: [lent(3, 5), lent(8, 9)].into(), ..TargetLoans::default() },
        );
        let fixes: Vec<LoanFix> =
            loans.check(2, &BTreeSet::new()).into_iter().map(|found| found.fix).collect();
        assert!(fixes.contains(&LoanFix::PutNumbers { borrower: BORROWER, highest: 8 }), "{fixes:?}");
    }
}
