//! Loans as allocation groups, and as blocks of their lender.

use super::{Groups, Run, bits, push_run};
use crate::rows::{GROUP_WORDS, Loan};

/// Most borrowed groups: 8 TiB, if all loans are as large as can be.
const MOST_GROUPS: u64 = 1 << 16;

/// The gaps of a loan, counted from its first block.
fn gaps_of(loan: &Loan) -> impl Iterator<Item = Run> {
    loan.gaps.iter().map(|(first, count)| (u64::from(*first), u64::from(*count)))
}

/// True if a loan can be an allocation group.
pub(crate) fn fits(loan: &Loan, groups: Groups) -> bool {
    let blocks = u64::from(loan.stripes) * groups.stripe_blocks();
    let missing: u64 = gaps_of(loan).map(|(_, count)| count).sum();
    let ends = gaps_of(loan).last().map_or(0, |(first, count)| first + count);
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

/// The runs of blocks that a loan has, counted from its first block.
fn runs_within(loan: &Loan, stripe_blocks: u64) -> Vec<Run> {
    let (mut runs, mut at) = (Vec::new(), 0);
    for (gap, count) in gaps_of(loan).chain([(u64::from(loan.stripes) * stripe_blocks, 0)]) {
        if at < gap {
            runs.push((at, gap - at));
        }
        at = gap + count;
    }
    runs
}

/// The runs of blocks on the lender's volume that a loan has.
pub(crate) fn runs_of(loan: &Loan, stripe_blocks: u64) -> Vec<Run> {
    let first = loan.stripe * stripe_blocks;
    runs_within(loan, stripe_blocks).into_iter().map(|(at, count)| (first + at, count)).collect()
}

/// The number of blocks that a loan has.
pub(crate) fn blocks_of(loan: &Loan, stripe_blocks: u64) -> u64 {
    runs_within(loan, stripe_blocks).iter().map(|(_, count)| count).sum()
}

/// The bits of a group in which all blocks of a loan are used.
pub(crate) fn all_bits(loan: &Loan, stripe_blocks: u64) -> Vec<u64> {
    let mut words = vec![0; GROUP_WORDS];
    runs_within(loan, stripe_blocks).into_iter().for_each(|run| bits::change(&mut words, run, true));
    words
}

/// The runs of a group of so many blocks that a loan does not have.
pub(super) fn lacking_of(loan: &Loan, blocks: u64, stripe_blocks: u64) -> Vec<Run> {
    let lent = u64::from(loan.stripes) * stripe_blocks;
    assert!(lent <= blocks, "{loan:?} fits into a group of {blocks} blocks");
    let mut lacking: Vec<Run> = Vec::new();
    let tail = (lent < blocks).then(|| (lent, blocks - lent));
    gaps_of(loan).chain(tail).for_each(|run| push_run(&mut lacking, run));
    lacking
}
