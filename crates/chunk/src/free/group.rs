//! One allocation group in memory.
//!
//! Blocks and stripes are counted from the first ones of the group.

use super::bits;
use super::{Counts, Run};
use crate::rows::GROUP_WORDS;
use penstock_base::num::{to_u16, to_usize};
use std::ops::Range;

type Words = Box<[u64; GROUP_WORDS]>;

/// The bits of a group, and what follows from them.
#[derive(Clone)]
pub(super) struct Group {
    blocks: u64,
    stripe_blocks: u64,
    /// Blocks that are not free.
    used: Words,
    /// Blocks that the row has.
    committed: Words,
    /// Used blocks by stripe.
    fill: Vec<u16>,
    counts: Counts,
    /// The counts of the bits of the row.
    row_counts: Counts,
    /// Callers that need it in memory.
    pub(super) pins: u32,
    /// It was used since the last look for groups that may leave the memory.
    pub(super) is_used: bool,
    /// Blocks that count as used only because some bits of the row may be lost; none if that is not so.
    hidden: Option<Words>,
    /// Blocks that count as used because the group does not have them; none if it has all.
    lacking: Option<Words>,
}

/// The counts of a group with these bits.
pub(super) fn counts_of(words: &[u64], blocks: u64, stripe_blocks: u64) -> Counts {
    let used = bits::runs_within(words, 0, blocks).iter().map(|(_, count)| count).sum();
    let is_empty = |stripe: &u64| {
        let first = stripe * stripe_blocks;
        bits::runs_within(words, first, first + stripe_blocks).is_empty()
    };
    let empty = (0..blocks / stripe_blocks).filter(is_empty).count();
    Counts { used: to_u16(to_usize(used)), empty: to_u16(empty) }
}

impl Group {
    /// A group of so many blocks with these bits. Bits of blocks that it does not have count for nothing: a
    /// check reports them.
    pub(super) fn new(words: &[u64], blocks: u64, stripe_blocks: u64) -> Self {
        assert_eq!(words.len(), GROUP_WORDS, "a row has all words of a group");
        let mut committed: Words = Box::new([0; GROUP_WORDS]);
        bits::runs_within(words, 0, blocks)
            .into_iter()
            .for_each(|run| bits::change(&mut *committed, run, true));
        let fill = vec![0; to_usize(blocks / stripe_blocks)];
        let counts = Counts { used: 0, empty: to_u16(fill.len()) };
        let mut group = Self {
            blocks,
            stripe_blocks,
            used: Box::new([0; GROUP_WORDS]),
            committed,
            fill,
            counts,
            row_counts: counts,
            pins: 0,
            is_used: true,
            hidden: None,
            lacking: None,
        };
        for run in bits::runs_within(&*group.committed, 0, blocks) {
            group.mark(run, true);
        }
        group.row_counts = group.counts;
        group
    }

    /// The same without these runs, which the group does not have. They count as used, whatever their bits
    /// say.
    pub(super) fn without(words: &[u64], blocks: u64, stripe_blocks: u64, lacking: &[Run]) -> Self {
        let mut missing: Words = Box::new([0; GROUP_WORDS]);
        lacking.iter().for_each(|run| bits::change(&mut *missing, *run, true));
        let present: Vec<u64> = words.iter().zip(&*missing).map(|(word, missing)| word & !missing).collect();
        let mut group = Self::new(&present, blocks, stripe_blocks);
        lacking.iter().for_each(|run| group.mark(*run, true));
        group.lacking = (!lacking.is_empty()).then_some(missing);
        group
    }

    /// Some bits of the row may be lost: counts all blocks as used.
    pub(super) fn suspect(&mut self) {
        let mut free: Words = Box::new([0; GROUP_WORDS]);
        free.iter_mut().zip(&*self.used).for_each(|(free, used)| *free = !used);
        let runs = bits::runs_within(&*free, 0, self.blocks);
        let hidden = self.hidden.get_or_insert_with(|| Box::new([0; GROUP_WORDS]));
        runs.iter().for_each(|run| bits::change(&mut **hidden, *run, true));
        runs.into_iter().for_each(|run| self.mark(run, true));
        assert_eq!(u64::from(self.counts.used), self.blocks, "all blocks count as used");
    }

    /// A used run counts as used only because some bits of the row may be lost.
    pub(super) fn hide(&mut self, run: Run) {
        let hidden = self.hidden.as_mut().expect("the group is suspect");
        bits::change(&mut **hidden, run, true);
    }

    /// Counts of used blocks and empty stripes.
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// The same for the bits of the row, when these were counted last.
    pub(super) fn row_counts(&self) -> Counts {
        self.row_counts
    }

    /// Counts the bits of the row again.
    pub(super) fn count_row(&mut self) {
        self.row_counts = counts_of(&*self.committed, self.blocks, self.stripe_blocks);
    }

    /// True if the counts are those of the bits.
    pub(super) fn is_counted(&self) -> bool {
        let has_lacking =
            |lacking: &Words| self.used.iter().zip(&**lacking).all(|(used, bit)| bit & !used == 0);
        self.counts == counts_of(&*self.used, self.blocks, self.stripe_blocks)
            && self.lacking.as_ref().is_none_or(has_lacking)
    }

    /// True if nothing is lost when it leaves the memory.
    pub(super) fn may_leave(&self) -> bool {
        // No block waits to be committed, or to be free.
        let is_as_loaded = |at: usize| {
            let extra = |words: &Option<Words>| words.as_ref().map_or(0, |words| words[at]);
            self.used[at] ^ (extra(&self.hidden) | extra(&self.lacking)) == self.committed[at]
        };
        self.pins == 0 && (0..GROUP_WORDS).all(is_as_loaded)
    }

    /// The bits of the row.
    pub(super) fn committed(&self) -> &[u64] {
        &*self.committed
    }

    /// True if the group does not have a block.
    fn lacks(&self, block: u64) -> bool {
        self.lacking.as_ref().is_some_and(|lacking| bits::get(&**lacking, block))
    }

    pub(super) fn is_used(&self, block: u64) -> bool {
        bits::get(&*self.used, block)
    }

    pub(super) fn is_committed(&self, block: u64) -> bool {
        bits::get(&*self.committed, block)
    }

    /// Used blocks of a stripe.
    pub(super) fn fill(&self, stripe: u64) -> u64 {
        self.fill[to_usize(stripe)].into()
    }

    /// The first partly used stripe, or the first empty one, for which `usable` is true.
    pub(super) fn first_with(&self, wants_empty: bool, usable: impl Fn(u64) -> bool) -> Option<u64> {
        (0..self.fill.len() as u64).find(|stripe| self.is_wanted(*stripe, wants_empty) && usable(*stripe))
    }

    /// The last empty stripe for which `usable` is true.
    pub(super) fn last_empty(&self, usable: impl Fn(u64) -> bool) -> Option<u64> {
        (0..self.fill.len() as u64).rev().find(|stripe| self.fill(*stripe) == 0 && usable(*stripe))
    }

    fn is_wanted(&self, stripe: u64, wants_empty: bool) -> bool {
        match self.fill(stripe) {
            0 => wants_empty,
            fill => !wants_empty && fill < self.stripe_blocks,
        }
    }

    /// The blocks of a stripe.
    pub(super) fn blocks_of(&self, stripe: u64) -> Range<u64> {
        stripe * self.stripe_blocks..(stripe + 1) * self.stripe_blocks
    }

    /// Marks a run as used or free. All of its blocks must have the opposite state.
    pub(super) fn mark(&mut self, (start, count): Run, used: bool) {
        bits::change(&mut *self.used, (start, count), used);
        let (mut at, end) = (start, start + count);
        while at < end {
            let stripe = at / self.stripe_blocks;
            let part = end.min((stripe + 1) * self.stripe_blocks) - at;
            let blocks = to_u16(to_usize(part));
            let fill = &mut self.fill[to_usize(stripe)];
            self.counts.empty -= u16::from(*fill == 0);
            match used {
                true => (*fill, self.counts.used) = (*fill + blocks, self.counts.used + blocks),
                false => (*fill, self.counts.used) = (*fill - blocks, self.counts.used - blocks),
            }
            self.counts.empty += u16::from(*fill == 0);
            assert!(u64::from(*fill) <= self.stripe_blocks, "{fill} used blocks in stripe {stripe}");
            at += part;
        }
        assert!(u64::from(self.counts.used) <= self.blocks, "{:?} of {} blocks", self.counts, self.blocks);
    }

    /// The parts of a run that the row has.
    pub(super) fn committed_parts(&self, (start, count): Run) -> Vec<Run> {
        bits::runs_within(&*self.committed, start, start + count)
    }

    /// Changes the bits of the row. All of them must have the opposite state.
    pub(super) fn commit(&mut self, run: Run, is_set: bool) {
        bits::change(&mut *self.committed, run, is_set);
    }

    /// The row has these bits now. Blocks that are allocated and not committed stay so.
    pub(super) fn reload(&mut self, words: &[u64]) {
        if let Some(hidden) = &self.hidden {
            let is_pending = |block: &u64| {
                let is_extra = bits::get(&**hidden, *block) || self.lacks(*block);
                self.is_used(*block) && !self.is_committed(*block) && !is_extra
            };
            let pending: Vec<u64> = (0..self.blocks).filter(is_pending).collect();
            let lacking =
                self.lacking.as_ref().map_or(Vec::new(), |all| bits::runs_within(&**all, 0, self.blocks));
            let new = Self::without(words, self.blocks, self.stripe_blocks, &lacking);
            *self = Self { pins: self.pins, ..new };
            for block in pending {
                if !self.is_used(block) {
                    self.mark((block, 1), true);
                }
            }
            return;
        }
        for block in 0..self.blocks {
            let used = bits::get(words, block);
            if self.is_committed(block) != used && !self.lacks(block) {
                self.commit((block, 1), used);
                if self.is_used(block) != used {
                    self.mark((block, 1), used);
                }
            }
        }
        self.count_row();
    }

    /// Makes the counts wrong.
    #[cfg(test)]
    pub(super) fn miscount(&mut self) {
        self.counts.used -= 3;
    }
}
