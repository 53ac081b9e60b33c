//! The cut of a volume into allocation groups. Each has as many full stripes as a row of bits has room for,
//! so a stripe is in one group.

use super::Run;
use crate::rows::{GROUP_WORDS, GROUPS_IN_A_ROW};
use std::ops::Range;

/// Bits in a group's row.
const ROW_BITS: u64 = 64 * GROUP_WORDS as u64;
/// The most blocks in a group: fewer in the tests of this crate, whose volumes are small.
const MOST_BLOCKS: u64 = if cfg!(test) { 256 } else { ROW_BITS };

/// The groups of a volume of full stripes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    blocks: u64,
    stripe_blocks: u64,
    /// Blocks in each group but the last one, which may have fewer.
    blocks_each: u64,
}

impl Groups {
    pub(crate) fn new(blocks: u64, stripe_blocks: u64) -> Self {
        assert!(blocks.is_multiple_of(stripe_blocks), "{blocks} blocks are full stripes of {stripe_blocks}");
        assert!(stripe_blocks <= MOST_BLOCKS, "a stripe of {stripe_blocks} blocks fits into a group");
        Self { blocks, stripe_blocks, blocks_each: MOST_BLOCKS / stripe_blocks * stripe_blocks }
    }

    /// Blocks on the volume.
    pub(crate) fn blocks(self) -> u64 {
        self.blocks
    }

    /// Blocks in a stripe.
    pub(crate) fn stripe_blocks(self) -> u64 {
        self.stripe_blocks
    }

    /// Number of groups.
    pub(crate) fn count(self) -> u64 {
        self.blocks.div_ceil(self.blocks_each)
    }

    /// The group of a block.
    pub(crate) fn of_block(self, block: u64) -> u64 {
        block / self.blocks_each
    }

    /// The group of a stripe.
    pub(crate) fn of_stripe(self, stripe: u64) -> u64 {
        self.of_block(stripe * self.stripe_blocks)
    }

    /// The blocks of a group.
    pub(crate) fn range(self, group: u64) -> Range<u64> {
        let first = group * self.blocks_each;
        assert!(first < self.blocks, "group {group} of {}", self.count());
        first..self.blocks.min(first + self.blocks_each)
    }

    /// The stripes of a group.
    pub(crate) fn stripes(self, group: u64) -> Range<u64> {
        let range = self.range(group);
        range.start / self.stripe_blocks..range.end / self.stripe_blocks
    }

    /// Blocks of a group.
    pub(crate) fn blocks_in(self, group: u64) -> u64 {
        let range = self.range(group);
        range.end - range.start
    }

    /// Stripes of a group.
    pub(crate) fn stripes_in(self, group: u64) -> u64 {
        self.blocks_in(group) / self.stripe_blocks
    }

    /// The groups whose counts are in a row; none if the volume has none of them.
    pub(crate) fn counted_in(self, row: u64) -> Option<Range<u64>> {
        let first = row.checked_mul(GROUPS_IN_A_ROW).filter(|first| *first < self.count())?;
        Some(first..self.count().min(first + GROUPS_IN_A_ROW))
    }

    /// The parts of a run by group, each counted from the first block of its group.
    pub(crate) fn parts(self, (start, count): Run) -> impl Iterator<Item = (u64, Run)> {
        let end = start + count;
        assert!(end <= self.blocks, "{start}+{count} of {} blocks", self.blocks);
        let next = move |at: u64| {
            (at < end).then(|| {
                let range = self.range(self.of_block(at));
                (at, end.min(range.end))
            })
        };
        std::iter::successors(next(start), move |(_, until)| next(*until)).map(move |(at, until)| {
            let group = self.of_block(at);
            (group, (at - self.range(group).start, until - at))
        })
    }

    /// The groups in which runs have blocks.
    pub(crate) fn of_runs(self, runs: &[Run]) -> impl Iterator<Item = u64> {
        runs.iter().flat_map(move |run| self.parts(*run).map(|(group, _)| group))
    }
}
