//! Free space of a target, pure: bitmaps of used blocks, in memory and as the key-value store has them.
//!
//! There are two bitmaps. *Used* drives allocation: it has every allocated block, committed or not, and every
//! freed block whose transaction is not durable. *Committed* is the content of the rows; only commits change
//! it.
//!
//! Invariant: reservations and used blocks together never exceed the volume, except that blocks of a write in
//! progress are both for a moment.
//!
//! Small extents come from partly used stripes, lowest first. Full stripes come from the top. So the two meet
//! only when space is short.

use crate::rows::encode_group;
use penstock_base::num::{to_u32, to_usize};
use std::collections::BTreeSet;

/// Blocks in an allocation group: its row has 4 KiB of bits.
pub(crate) const GROUP_BLOCKS: u64 = 32 * 1024;
const GROUP_WORDS: usize = to_usize(GROUP_BLOCKS) / 64;

/// A run of volume blocks: first block and count.
pub(crate) type Run = (u64, u64);

/// Adds a run, merged with the last one if it follows directly.
pub(crate) fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some((start, count)) if *start + *count == run.0 => *count += run.1,
        _ => runs.push(run),
    }
}

/// Counts derived from the bits: used blocks in total, used blocks by stripe, empty stripes, and partly used
/// stripes.
type Summary = (u64, Vec<u32>, BTreeSet<u64>, BTreeSet<u64>);

/// Space of a target, in blocks of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceUsage {
    /// Blocks on the volume.
    pub total_blocks: u64,
    /// Blocks that are neither used nor reserved for dirty blocks in memory.
    pub free_blocks: u64,
    /// Headroom: free blocks that only deletes may use.
    pub headroom_blocks: u64,
}

/// A change of the committed bitmap.
#[must_use]
pub(crate) struct SpaceCommit {
    /// Numbers and rows of the groups that changed.
    pub(crate) rows: Vec<(u64, Vec<u8>)>,
    allocated: Vec<Run>,
    freed: Vec<Run>,
}

impl SpaceCommit {
    /// The runs that were marked and are not any more.
    pub(crate) fn into_freed(self) -> Vec<Run> {
        self.freed
    }
}

/// One bit per block, by allocation groups.
#[derive(Clone)]
pub(crate) struct Bitmap {
    words: Vec<u64>,
}

impl Bitmap {
    pub(crate) fn new(blocks: u64) -> Self {
        Self { words: vec![0; to_usize(blocks.div_ceil(GROUP_BLOCKS)) * GROUP_WORDS] }
    }

    pub(crate) fn get(&self, block: u64) -> bool {
        self.words[(block / 64) as usize] & (1 << (block % 64)) != 0
    }

    pub(crate) fn set(&mut self, block: u64, used: bool) {
        let (word, bit) = ((block / 64) as usize, 1u64 << (block % 64));
        match used {
            true => self.words[word] |= bit,
            false => self.words[word] &= !bit,
        }
    }

    /// Sets or clears the bits of a run. Panics if one of them has the new value already.
    fn change(&mut self, (start, count): Run, used: bool) {
        let end = start + count;
        let mut at = start;
        while at < end {
            let (word, bit) = ((at / 64) as usize, at % 64);
            let part = (64 - bit).min(end - at);
            let mask = (u64::MAX >> (64 - part)) << bit;
            let found = if used { self.words[word] & mask } else { !self.words[word] & mask };
            assert_eq!(found, 0, "each of the blocks {at}+{part} is owned once");
            self.words[word] ^= mask;
            at += part;
        }
    }

    /// Returns a group's bits as words of 64.
    pub(crate) fn group(&self, group: u64) -> &[u64] {
        &self.words[to_usize(group) * GROUP_WORDS..(to_usize(group) + 1) * GROUP_WORDS]
    }
}

/// The free space of one target.
pub(crate) struct Space {
    blocks: u64,
    stripe_blocks: u64,
    used: Bitmap,
    committed: Bitmap,
    /// Number of used blocks in each stripe.
    fill: Vec<u32>,
    /// Stripes with both used and free blocks.
    partial: BTreeSet<u64>,
    /// Stripes without a used block.
    empty: BTreeSet<u64>,
    used_blocks: u64,
    reserved: u64,
    /// Used blocks that are taken only while their stripes are being discarded.
    discarding: u64,
}

/// Returns the blocks whose bits are set in a group's words, in order.
pub(crate) fn bits(group: u64, words: &[u64]) -> impl Iterator<Item = u64> {
    (group * GROUP_BLOCKS..).step_by(64).zip(words).flat_map(|(first, word)| {
        let word = *word;
        (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| first + bit)
    })
}

/// Returns the runs of blocks whose bits are set in a group's words, in order.
fn runs(group: u64, words: &[u64]) -> Vec<Run> {
    let in_group = runs_within(words, 0, words.len() as u64 * 64);
    in_group.into_iter().map(|(at, count)| (group * GROUP_BLOCKS + at, count)).collect()
}

/// Returns the runs of set bits between `from` and `until`, in order. Works by runs of bits, not bit by bit.
fn runs_within(words: &[u64], from: u64, until: u64) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut at = from;
    while at < until {
        let word = words[to_usize(at / 64)] >> (at % 64);
        let in_word = (64 - at % 64).min(until - at);
        let clear = u64::from(word.trailing_zeros()).min(in_word);
        at += clear;
        let set = u64::from((word.checked_shr(to_u32(clear)).unwrap_or(0)).trailing_ones());
        let set = set.min(in_word - clear);
        if set > 0 {
            push_run(&mut runs, (at, set));
        }
        at += set;
    }
    runs
}

impl Space {
    /// Free space of a volume of full stripes, all of it free.
    pub(crate) fn new(blocks: u64, stripe_blocks: u64) -> Self {
        assert!(blocks.is_multiple_of(stripe_blocks), "{blocks} blocks are full stripes of {stripe_blocks}");
        let stripes = blocks / stripe_blocks;
        Self {
            blocks,
            stripe_blocks,
            used: Bitmap::new(blocks),
            committed: Bitmap::new(blocks),
            fill: vec![0; to_usize(stripes)],
            partial: BTreeSet::new(),
            empty: (0..stripes).collect(),
            used_blocks: 0,
            reserved: 0,
            discarding: 0,
        }
    }

    /// Returns the number of allocation groups.
    pub(crate) fn groups(&self) -> u64 {
        self.blocks.div_ceil(GROUP_BLOCKS)
    }

    /// Returns the number of words in a group's row.
    pub(crate) fn group_words() -> usize {
        GROUP_WORDS
    }

    /// Loads the bits of a group from its row; none of its blocks may be marked before. Ignores bits of
    /// blocks that the volume does not have: a check reports them.
    pub(crate) fn load_group(&mut self, group: u64, words: &[u64]) {
        for (start, count) in runs(group, words) {
            let count = count.min(self.blocks.saturating_sub(start));
            if count > 0 {
                self.committed.change((start, count), true);
                self.mark((start, count), true);
            }
        }
    }

    /// Counts a block as used and committed, in whatever state it was before.
    pub(crate) fn mark_owned(&mut self, block: u64) {
        self.committed.set(block, true);
        if !self.used.get(block) {
            self.mark((block, 1), true);
        }
    }

    /// Counts a block as neither used nor committed.
    pub(crate) fn mark_unowned(&mut self, block: u64) {
        self.committed.set(block, false);
        if self.used.get(block) {
            self.mark((block, 1), false);
        }
    }

    fn count(&self) -> Summary {
        let stripes = 0..self.fill.len() as u64;
        let count = |stripe: u64| {
            let first = stripe * self.stripe_blocks;
            to_u32((first..first + self.stripe_blocks).filter(|block| self.used.get(*block)).count())
        };
        let fill: Vec<u32> = stripes.clone().map(count).collect();
        let of = |wanted: &dyn Fn(u64) -> bool| -> BTreeSet<u64> {
            stripes.clone().filter(|stripe| wanted(u64::from(fill[to_usize(*stripe)]))).collect()
        };
        let empty = of(&|fill| fill == 0);
        let partial = of(&|fill| fill > 0 && fill < self.stripe_blocks);
        let used_blocks = fill.iter().map(|fill| u64::from(*fill)).sum();
        (used_blocks, fill, empty, partial)
    }

    /// True if the derived counts agree with the bits.
    pub(crate) fn is_counted(&self) -> bool {
        let (used_blocks, fill, empty, partial) = self.count();
        (used_blocks, &fill, &empty, &partial) == (self.used_blocks, &self.fill, &self.empty, &self.partial)
    }

    /// Recomputes the derived counts from the bits.
    pub(crate) fn recount(&mut self) {
        (self.used_blocks, self.fill, self.empty, self.partial) = self.count();
    }

    /// Returns a group's bits as the rows have them.
    pub(crate) fn committed_group(&self, group: u64) -> &[u64] {
        self.committed.group(group)
    }

    /// Marks a run as used or free. All of its blocks must have the opposite state.
    fn mark(&mut self, (start, count): Run, used: bool) {
        self.used.change((start, count), used);
        let end = start + count;
        let mut at = start;
        while at < end {
            let stripe = at / self.stripe_blocks;
            let part = end.min((stripe + 1) * self.stripe_blocks) - at;
            self.fill_changed(stripe, part, used);
            at += part;
        }
    }

    fn fill_changed(&mut self, stripe: u64, blocks: u64, used: bool) {
        let fill = &mut self.fill[to_usize(stripe)];
        match used {
            true => {
                *fill += to_u32(blocks);
                self.used_blocks += blocks;
            }
            false => {
                *fill -= to_u32(blocks);
                self.used_blocks -= blocks;
            }
        }
        let fill = u64::from(*fill);
        assert!(
            fill <= self.stripe_blocks && self.used_blocks <= self.blocks,
            "{fill} used blocks in stripe {stripe}, {} in all",
            self.used_blocks
        );
        self.empty.remove(&stripe);
        self.partial.remove(&stripe);
        if fill == 0 {
            self.empty.insert(stripe);
        } else if fill < self.stripe_blocks {
            self.partial.insert(stripe);
        }
    }

    fn headroom_blocks(&self) -> u64 {
        self.blocks / 50
    }

    pub(crate) fn usage(&self) -> SpaceUsage {
        SpaceUsage {
            total_blocks: self.blocks,
            // While a write is written back, its blocks are both reserved and used.
            free_blocks: self.blocks.saturating_sub(self.used_blocks + self.reserved),
            headroom_blocks: self.headroom_blocks(),
        }
    }

    /// Returns the space for callers that can wait: blocks in a running discard count as free, because it
    /// ends soon.
    pub(crate) fn reported(&self) -> SpaceUsage {
        let usage = self.usage();
        SpaceUsage { free_blocks: usage.free_blocks + self.discarding, ..usage }
    }

    /// True if `blocks` are free beside all reservations. The caller's own reservation of `mine` blocks
    /// counts as free.
    pub(crate) fn has_beside_reservations(&self, blocks: u64, mine: u64) -> bool {
        self.used_blocks + self.reserved + blocks <= self.blocks + mine
    }

    /// Sets the number of blocks that a running discard has taken.
    pub(crate) fn set_discarding(&mut self, blocks: u64) {
        assert!(blocks <= self.used_blocks, "{blocks} blocks in a discard are used");
        self.discarding = blocks;
    }

    /// Reserves blocks for a write in memory. Returns false, and reserves nothing, if too few are free.
    pub(crate) fn reserve(&mut self, blocks: u64) -> bool {
        let usage = self.reported();
        let enough = usage.free_blocks >= blocks + usage.headroom_blocks;
        if enough {
            self.reserved += blocks;
        }
        enough
    }

    /// Releases a reservation, because the blocks are allocated now or the write is void. Panics if fewer are
    /// reserved.
    pub(crate) fn release(&mut self, blocks: u64) {
        self.reserved = self.reserved.checked_sub(blocks).expect("only reserved blocks are released");
    }

    /// Allocates one run of up to `wanted` blocks in a stripe for which `usable` is true. `None` if no such
    /// block is free.
    pub(crate) fn allocate(&mut self, wanted: u64, usable: impl Fn(u64) -> bool) -> Option<Run> {
        assert!(wanted > 0, "a run has a block");
        let stripe = self.partial.iter().chain(&self.empty).find(|stripe| usable(**stripe)).copied()?;
        let first = stripe * self.stripe_blocks;
        let end = first + self.stripe_blocks;
        let start = (first..end).find(|block| !self.used.get(*block)).expect("the stripe has a free block");
        let run = (start..end.min(start + wanted)).take_while(|block| !self.used.get(*block)).count() as u64;
        assert!((1..=wanted).contains(&run), "a run of {run} blocks for {wanted}");
        self.mark((start, run), true);
        Some((start, run))
    }

    /// The last empty stripe for which `usable` is true.
    pub(crate) fn last_empty(&self, usable: impl Fn(u64) -> bool) -> Option<u64> {
        self.empty.iter().rev().find(|stripe| usable(**stripe)).copied()
    }

    /// Allocates all blocks of an empty stripe. Returns false if the stripe is not empty.
    pub(crate) fn take_stripe(&mut self, stripe: u64) -> bool {
        let empty = self.is_empty(stripe);
        if empty {
            self.mark((stripe * self.stripe_blocks, self.stripe_blocks), true);
        }
        empty
    }

    /// Frees blocks for allocation. Returns the stripes that are empty now.
    pub(crate) fn free(&mut self, (start, count): Run) -> Vec<u64> {
        assert!(count > 0, "a run has a block");
        self.mark((start, count), false);
        let stripes = start / self.stripe_blocks..=(start + count - 1) / self.stripe_blocks;
        stripes.filter(|stripe| self.fill[to_usize(*stripe)] == 0).collect()
    }

    /// True if a stripe has no used block.
    pub(crate) fn is_empty(&self, stripe: u64) -> bool {
        self.fill[to_usize(stripe)] == 0
    }

    /// Changes the committed bitmap. A run in both lists was allocated and then freed.
    ///
    /// A freed block that counts as free stays so, and is not in the result: its bit was wrong, or another
    /// file owned it too and freed it. Then the allocator may have given it to a third file already.
    pub(crate) fn commit(&mut self, allocated: Vec<Run>, freed: &[Run]) -> SpaceCommit {
        allocated.iter().for_each(|run| self.committed.change(*run, true));
        let mut marked = Vec::new();
        for run in freed {
            let parts = runs_within(&self.committed.words, run.0, run.0 + run.1);
            parts.iter().for_each(|part| self.committed.change(*part, false));
            let count: u64 = parts.iter().map(|(_, count)| count).sum();
            if count < run.1 {
                let (block, unmarked) = (run.0, run.1 - count);
                tracing::error!(
                    block,
                    unmarked,
                    "a file gave up blocks that count as free: `penstock fs check`"
                );
            }
            marked.extend(parts);
        }
        let groups_of = |(start, count): &Run| *start / GROUP_BLOCKS..=(*start + *count - 1) / GROUP_BLOCKS;
        let groups: BTreeSet<u64> = allocated.iter().chain(&marked).flat_map(groups_of).collect();
        let rows = groups.into_iter().map(|group| (group, encode_group(self.committed.group(group))));
        SpaceCommit { rows: rows.collect(), allocated, freed: marked }
    }

    /// Undoes a [`Space::commit`], the last one.
    pub(crate) fn undo_commit(&mut self, commit: SpaceCommit) {
        commit.freed.into_iter().for_each(|run| self.committed.change(run, true));
        commit.allocated.into_iter().for_each(|run| self.committed.change(run, false));
    }

    /// True if the rows mark a block as used.
    pub(crate) fn is_committed(&self, block: u64) -> bool {
        self.committed.get(block)
    }
}

#[cfg(test)]
mod tests;
