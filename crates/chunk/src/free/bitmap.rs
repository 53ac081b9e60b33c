//! One bit for each block of a volume, by allocation groups.

use super::Run;
use super::bits;
use super::group::counts_of;
use super::groups::Groups;
use super::{Counts, push_run};
use crate::rows::GROUP_WORDS;
use penstock_base::num::to_usize;

/// Bits of all blocks of a volume.
#[derive(Clone)]
pub(crate) struct Bitmap {
    groups: Groups,
    words: Vec<u64>,
}

impl Bitmap {
    pub(crate) fn new(groups: Groups) -> Self {
        Self { groups, words: vec![0; to_usize(groups.count()) * GROUP_WORDS] }
    }

    fn place(&self, block: u64) -> (u64, u64) {
        let group = self.groups.of_block(block);
        (group, block - self.groups.range(group).start)
    }

    pub(crate) fn get(&self, block: u64) -> bool {
        let (group, at) = self.place(block);
        bits::get(self.group(group), at)
    }

    pub(crate) fn set(&mut self, block: u64, is_set: bool) {
        if self.get(block) != is_set {
            let (group, at) = self.place(block);
            let first = to_usize(group) * GROUP_WORDS;
            bits::change(&mut self.words[first..first + GROUP_WORDS], (at, 1), is_set);
        }
    }

    /// The bits of a group.
    pub(crate) fn group(&self, group: u64) -> &[u64] {
        &self.words[to_usize(group) * GROUP_WORDS..(to_usize(group) + 1) * GROUP_WORDS]
    }

    /// The counts of a group.
    pub(crate) fn counts(&self, group: u64) -> Counts {
        counts_of(self.group(group), self.groups.blocks_in(group), self.groups.stripe_blocks())
    }

    /// Appends the runs of blocks of a group whose bit is set here and not in `other`.
    pub(crate) fn only_here(&self, other: &Self, group: u64, runs: &mut Vec<Run>) {
        let pairs = self.group(group).iter().zip(other.group(group));
        let differ: Vec<u64> = pairs.map(|(here, there)| here & !there).collect();
        let first = self.groups.range(group).start;
        for (start, count) in bits::runs_within(&differ, 0, self.groups.blocks_in(group)) {
            push_run(runs, (first + start, count));
        }
    }
}
