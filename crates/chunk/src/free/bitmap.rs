//! One bit for each block of a volume, by allocation groups.
//!
//! A group of which all bits are alike takes no memory for them: most groups of a volume with large files are
//! like that. In the worst case there is one bit for each block.

use super::Run;
use super::bits;
use super::group::counts_of;
use super::groups::Groups;
use super::{Counts, push_run};
use crate::rows::GROUP_WORDS;
use penstock_base::num::{to_u32, to_usize};

type Words = [u64; GROUP_WORDS];

/// The bits of one group.
#[derive(Clone)]
enum Bits {
    /// None is set.
    Clear,
    /// All are set that the first group has, and no other. Larger and smaller ones have their own bits.
    Full,
    /// So many are set.
    Some(u32, Box<Words>),
}

/// Bits of all blocks of a volume.
#[derive(Clone)]
pub(crate) struct Bitmap {
    groups: Groups,
    bits: Vec<Bits>,
    /// The words of a full group.
    full: Box<Words>,
    /// The blocks of the first group.
    blocks_each: u32,
}

static CLEAR: Words = [0; GROUP_WORDS];

impl Bitmap {
    pub(crate) fn new(groups: Groups) -> Self {
        let mut full = Box::new(CLEAR);
        let blocks_each = if groups.count() > 0 { groups.blocks_in(0) } else { 0 };
        bits::change(&mut *full, (0, blocks_each), true);
        let bits = vec![Bits::Clear; to_usize(groups.count())];
        Self { groups, bits, full, blocks_each: to_u32(blocks_each) }
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
        if self.get(block) == is_set {
            return;
        }
        let (group, at) = self.place(block);
        let bits = &mut self.bits[to_usize(group)];
        match bits {
            Bits::Clear => *bits = Bits::Some(0, Box::new(CLEAR)),
            Bits::Full => *bits = Bits::Some(self.blocks_each, self.full.clone()),
            Bits::Some(..) => {}
        }
        let Bits::Some(count, words) = bits else { unreachable!("it was just put there") };
        bits::change(&mut **words, (at, 1), is_set);
        *count = if is_set { *count + 1 } else { *count - 1 };
        if *count == 0 {
            *bits = Bits::Clear;
        } else if *count == self.blocks_each && **words == *self.full {
            *bits = Bits::Full;
        }
    }

    /// The bits of a group.
    pub(crate) fn group(&self, group: u64) -> &[u64] {
        match &self.bits[to_usize(group)] {
            Bits::Clear => &CLEAR,
            Bits::Full => &*self.full,
            Bits::Some(_, words) => &**words,
        }
    }

    /// Groups that take memory for their bits.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.bits.iter().filter(|bits| matches!(bits, Bits::Some(..))).count()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{Random, STRIPE};

    #[test]
    fn groups_with_equal_bits_take_no_memory() {
        // Two groups of 256 blocks and a shorter one.
        let groups = Groups::new(2 * 256 + 64, STRIPE);
        let mut bitmap = Bitmap::new(groups);
        let (mut model, mut random) = (vec![false; 2 * 256 + 64], Random::new(3));
        let check = |bitmap: &Bitmap, model: &[bool]| {
            assert!((0..).zip(model).all(|(block, is_set)| bitmap.get(block) == *is_set));
        };
        for is_set in [true, false, true] {
            for (block, bit) in (0..).zip(&mut model) {
                bitmap.set(block, is_set);
                bitmap.set(block, is_set);
                *bit = is_set;
            }
            check(&bitmap, &model);
            // The last one is shorter, and has its own bits.
            assert_eq!(bitmap.held(), usize::from(is_set));
        }
        for _ in 0..2000 {
            let (block, is_set) = (random.below(model.len() as u64), random.below(2) == 0);
            bitmap.set(block, is_set);
            model[block as usize] = is_set;
        }
        check(&bitmap, &model);
        let set = |range: std::ops::Range<usize>| model[range].iter().filter(|bit| **bit).count();
        for (group, range) in [(0, 0..256), (1, 256..512), (2, 512..576)] {
            assert_eq!(usize::from(bitmap.counts(group).used), set(range), "group {group}");
        }
        let (mut runs, other) = (Vec::new(), Bitmap::new(groups));
        (0..3).for_each(|group| bitmap.only_here(&other, group, &mut runs));
        assert_eq!(runs.iter().map(|(_, count)| *count as usize).sum::<usize>(), set(0..576));
    }
}
