//! The cut of a volume into allocation groups. Each has as many full stripes as a row of bits has room for,
//! so a stripe is in one group.
//!
//! Behind those of the volume come *borrowed* groups, all of that size: each has the blocks of one loan, from
//! its first block on. Blocks and stripes of all groups have numbers of one row, with a gap behind the volume
//! if its last group is smaller.

use super::Run;
use crate::rows::{Extent, GROUP_WORDS, GROUPS_IN_A_ROW};
use penstock_base::num::to_u32;
use std::ops::Range;

/// Bits in a group's row.
const ROW_BITS: u64 = 64 * GROUP_WORDS as u64;
/// The most blocks in a group: fewer in the tests of this crate, whose volumes are small.
const MOST_BLOCKS: u64 = if cfg!(test) { 256 } else { ROW_BITS };

/// The groups of a volume of full stripes, and those of loans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    blocks: u64,
    stripe_blocks: u64,
    /// Blocks in each group but the last one of the volume, which may have fewer.
    blocks_each: u64,
    /// Borrowed groups.
    borrowed: u64,
}

impl Groups {
    pub(crate) fn new(blocks: u64, stripe_blocks: u64) -> Self {
        assert!(blocks.is_multiple_of(stripe_blocks), "{blocks} blocks are full stripes of {stripe_blocks}");
        assert!(stripe_blocks <= MOST_BLOCKS, "a stripe of {stripe_blocks} blocks fits into a group");
        Self { blocks, stripe_blocks, blocks_each: MOST_BLOCKS / stripe_blocks * stripe_blocks, borrowed: 0 }
    }

    /// The same volume with so many borrowed groups.
    pub(crate) fn with_borrowed(self, borrowed: u64) -> Self {
        Self { borrowed, ..self }
    }

    /// Number of groups of the volume: the borrowed ones come behind.
    pub(crate) fn own(self) -> u64 {
        self.blocks.div_ceil(self.blocks_each)
    }

    /// The stripes of some groups that follow each other, and the gap behind the volume.
    pub(crate) fn stripes_of(self, groups: Range<u64>) -> Range<u64> {
        let each = self.blocks_each / self.stripe_blocks;
        groups.start * each..groups.end * each
    }

    /// Blocks in a borrowed group.
    pub(crate) fn blocks_each(self) -> u64 {
        self.blocks_each
    }

    /// Blocks of all groups.
    pub(crate) fn all_blocks(self) -> u64 {
        self.blocks + self.borrowed * self.blocks_each
    }

    /// The part of an extent that is in its chunk and in allocation groups.
    pub(crate) fn valid_part(self, extent: &Extent, chunk_blocks: u32) -> Extent {
        let in_chunk = extent.count.min(chunk_blocks.saturating_sub(extent.first));
        let in_groups = self.have_of((extent.block, in_chunk.into()));
        assert!(in_groups <= u64::from(in_chunk) && in_chunk <= extent.count, "a part of {extent:?}");
        Extent { count: to_u32(in_groups), ..*extent }
    }

    /// The blocks from the first one of a run on that are in groups, at most those of the run.
    pub(crate) fn have_of(self, (start, count): Run) -> u64 {
        let first_borrowed = self.own() * self.blocks_each;
        let end = match start < self.blocks && self.blocks < first_borrowed {
            true => self.blocks,
            false => self.blocks.max(self.count() * self.blocks_each),
        };
        let is_in = start < self.blocks || start >= first_borrowed;
        if is_in { count.min(end.saturating_sub(start)) } else { 0 }
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
        self.own() + self.borrowed
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
        assert!(group < self.count(), "group {group} of {}", self.count());
        match group < self.own() {
            true => first..self.blocks.min(first + self.blocks_each),
            false => first..first + self.blocks_each,
        }
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

    /// The groups whose counts are in a row; none if the volume has none of them. Those of borrowed groups
    /// are in none.
    pub(crate) fn counted_in(self, row: u64) -> Option<Range<u64>> {
        let first = row.checked_mul(GROUPS_IN_A_ROW).filter(|first| *first < self.own())?;
        Some(first..self.own().min(first + GROUPS_IN_A_ROW))
    }

    /// The parts of a run by group, each counted from the first block of its group.
    pub(crate) fn parts(self, (start, count): Run) -> impl Iterator<Item = (u64, Run)> {
        let end = start + count;
        assert_eq!(self.have_of((start, count)), count, "{start}+{count} is in {self:?}");
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
