//! Loans as allocation groups, and as blocks of their lender.

use super::Groups;
use super::Run;
use crate::rows::Loan;

/// Most borrowed groups: 8 TiB, if all loans are as large as can be.
const MOST_GROUPS: u64 = 1 << 16;

/// True if a loan can be an allocation group.
pub(crate) fn fits(loan: &Loan, groups: Groups) -> bool {
    let blocks = u64::from(loan.stripes) * groups.stripe_blocks();
    let missing: u64 = loan.gaps.iter().map(|(_, count)| u64::from(*count)).sum();
    let ends = loan.gaps.last().map_or(0, |(first, count)| u64::from(*first) + u64::from(*count));
    blocks <= groups.blocks_each() && ends <= blocks && missing < blocks
}

/// True if all blocks of a loan are on the volume of its lender.
pub(crate) fn is_on(loan: &Loan, groups: Groups) -> bool {
    let own = groups.blocks() / groups.stripe_blocks();
    fits(loan, groups) && loan.stripe <= own && u64::from(loan.stripes) <= own - loan.stripe
}

/// True if a borrowed group may have this number.
pub(crate) fn may_be_borrowed(group: u64, groups: Groups) -> bool {
    (groups.own()..groups.own() + MOST_GROUPS).contains(&group)
}

/// The runs of blocks on the lender's volume that a loan has.
pub(crate) fn runs_of(loan: &Loan, stripe_blocks: u64) -> Vec<Run> {
    let (first, blocks) = (loan.stripe * stripe_blocks, u64::from(loan.stripes) * stripe_blocks);
    let (mut runs, mut at) = (Vec::new(), 0);
    let gaps = loan.gaps.iter().map(|(first, count)| (u64::from(*first), u64::from(*count)));
    for (gap, count) in gaps.chain([(blocks, 0)]) {
        if at < gap {
            runs.push((first + at, gap - at));
        }
        at = gap + count;
    }
    runs
}
