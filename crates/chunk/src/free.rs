//! Free space of a target, pure: used blocks by allocation groups, in memory and as the key-value store has
//! them.
//!
//! For each group the counts of used blocks and empty stripes are in memory. Its bits are there as far as
//! they are needed: whoever looks at a block, or changes it, loads the group of the block before. There are
//! two bitmaps. *Used* drives allocation: it has every allocated block, committed or not, and every freed
//! block whose transaction is not durable. *Committed* is the content of the row; only commits change it.
//!
//! Invariants:
//! - reservations and used blocks together never exceed the volume, except that blocks of a write in progress
//!   are both for a moment;
//! - a group whose used blocks are not those of its row, as every later reader finds it, is in memory;
//! - no block is allocated that was free in a *suspect* group when that became known. The bits of a group are
//!   suspect if they are not as they are counted, or if a file owns a block without a bit; the row of counts
//!   says so from its next change on, until a repair.
//!
//! Small extents come from partly used stripes, lowest first. Full stripes come from the top. So the two meet
//! only when space is short. Blocks of loans come last.
//!
//! A borrowed group lacks the blocks that its loan does not have, all if there is no loan: they count as used
//! in memory, and have no bits in its row, which is that of the loan.

mod bitmap;
mod bits;
mod group;
mod group_set;
mod groups;
mod loans;

use crate::rows::{Borrowed, GROUPS_IN_A_ROW, counts_key, encode_counts, encode_group, group_key};
pub(crate) use bitmap::Bitmap;
use group::{Group, counts_of};
use group_set::GroupSet;
pub(crate) use groups::Groups;
use loans::lacking_of;
pub(crate) use loans::{all_bits, blocks_of, fits, is_on, may_be_borrowed, runs_of};
use penstock_base::num::{to_u16, to_usize};
use penstock_kv::Row;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

pub use crate::rows::Counts;

/// Groups in memory above which those are given up that are not needed: 9 KiB each.
pub(crate) const MOST_GROUPS: usize = if cfg!(test) { 2 } else { 1024 };
/// Groups looked at to find some that may leave the memory.
const LOOK: usize = 64;

/// A run of volume blocks: first block and count.
pub(crate) type Run = (u64, u64);

/// Adds a run, merged with the last one if it follows directly.
pub(crate) fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some((start, count)) if *start + *count == run.0 => *count += run.1,
        _ => runs.push(run),
    }
}

/// The set bits of a group's words, in order, counted from the first block of the group.
pub(crate) fn set_bits(words: &[u64]) -> impl Iterator<Item = u64> {
    bits::set_bits(words)
}

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

impl SpaceUsage {
    /// Free blocks that others than deletes may use too.
    pub fn available_blocks(&self) -> u64 {
        self.free_blocks.saturating_sub(self.headroom_blocks)
    }
}

impl std::iter::Sum for SpaceUsage {
    fn sum<I: Iterator<Item = Self>>(usages: I) -> Self {
        usages.fold(Self::default(), |sum, more| Self {
            total_blocks: sum.total_blocks + more.total_blocks,
            free_blocks: sum.free_blocks + more.free_blocks,
            headroom_blocks: sum.headroom_blocks + more.headroom_blocks,
        })
    }
}

/// A change of the committed bitmap. The groups that it concerns stay in memory until it is ended or undone.
#[must_use]
pub(crate) struct SpaceCommit {
    /// The rows that change.
    pub(crate) rows: Vec<Row>,
    groups: BTreeSet<u64>,
    allocated: Vec<Run>,
    freed: Vec<Run>,
}

/// The kind of stripe from which blocks are allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Some of its blocks are used.
    Partial,
    /// None is.
    Empty,
}

/// The use that an empty stripe is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Extents of small writes.
    Extents,
    /// A full chunk, for which it must be unwritten.
    FullChunk,
}

/// The free space of one target.
#[derive(Clone)]
pub(crate) struct Space {
    groups: Groups,
    counts: Vec<Counts>,
    with_partial: GroupSet,
    with_empty: GroupSet,
    loaded: BTreeMap<u64, Group>,
    /// Groups in memory above which those leave that are not needed.
    most_groups: usize,
    /// The group at which the next look for groups that may go begins.
    hand: u64,
    used_blocks: u64,
    /// Those of them that are in borrowed groups, with blocks that these do not have.
    used_of_loans: u64,
    reserved: u64,
    /// Free blocks of which none could be allocated when that was last tried, as those of stripes that cannot
    /// be read: they are promised to nobody.
    barred: u64,
    /// Used blocks that are taken only while their stripes are being discarded.
    discarding: u64,
    /// Blocks freed or borrowed so far.
    freed: u64,
    /// Groups some of whose bits may be lost.
    suspects: BTreeSet<u64>,
    /// By use, groups in which no empty stripe may be used for it until the sweep or a discard has gone on.
    unusable: [BTreeSet<u64>; 2],
    /// The loans, by their groups.
    loans: BTreeMap<u64, Borrowed>,
    /// Blocks that borrowed groups do not have.
    lacking: u64,
    /// The counts of loans whose lender is away: nothing of them counts as free meanwhile.
    away: BTreeMap<u64, Counts>,
}

impl Space {
    /// Free space of a volume of full stripes, all of it free.
    pub(crate) fn new(blocks: u64, stripe_blocks: u64) -> Self {
        let groups = Groups::new(blocks, stripe_blocks);
        let count = groups.count();
        let mut space = Self {
            groups,
            counts: vec![Counts::default(); to_usize(count)],
            with_partial: GroupSet::new(count),
            with_empty: GroupSet::new(count),
            loaded: BTreeMap::new(),
            most_groups: MOST_GROUPS,
            hand: 0,
            used_blocks: 0,
            used_of_loans: 0,
            reserved: 0,
            barred: 0,
            discarding: 0,
            freed: 0,
            suspects: BTreeSet::new(),
            unusable: Default::default(),
            loans: BTreeMap::new(),
            lacking: 0,
            away: BTreeMap::new(),
        };
        (0..count).for_each(|group| space.set_counts(group, space.free_counts(group)));
        space
    }

    /// So many groups may be in memory, and more while they are needed.
    pub(crate) fn keep_groups(&mut self, most: usize) {
        assert!(most > 0, "a group is in memory while its blocks are allocated");
        self.most_groups = most;
    }

    /// The groups of the volume.
    pub(crate) fn groups(&self) -> Groups {
        self.groups
    }

    /// The counts of a group whose row has these bits.
    pub(crate) fn counts_of(&self, group: u64, words: &[u64]) -> Counts {
        match group < self.groups.own() {
            true => counts_of(words, self.groups.blocks_in(group), self.groups.stripe_blocks()),
            false => self.group_of(group, words).counts(),
        }
    }

    /// A group whose row has these bits.
    fn group_of(&self, group: u64, words: &[u64]) -> Group {
        let (blocks, stripe_blocks) = (self.groups.blocks_in(group), self.groups.stripe_blocks());
        Group::without(words, blocks, stripe_blocks, &self.lacking_in(group))
    }

    /// The runs that a group does not have, counted from its first block.
    fn lacking_in(&self, group: u64) -> Vec<Run> {
        let blocks = self.groups.blocks_in(group);
        match self.loans.get(&group) {
            _ if group < self.groups.own() => Vec::new(),
            None => vec![(0, blocks)],
            Some(borrowed) => lacking_of(&borrowed.loan, blocks, self.groups.stripe_blocks()),
        }
    }

    /// The loans, by their groups.
    pub(crate) fn loans(&self) -> &BTreeMap<u64, Borrowed> {
        &self.loans
    }

    /// The first borrowed group without a loan. It is one that does not exist yet if all have one.
    pub(crate) fn group_for_loan(&self) -> u64 {
        (self.groups.own()..).find(|group| !self.loans.contains_key(group)).expect("there is a number")
    }

    /// The blocks of a loan are a group from now on, of which these are used.
    pub(crate) fn add_loan(&mut self, group: u64, borrowed: Borrowed, words: &[u64]) {
        assert!(group >= self.groups.own() && !self.loans.contains_key(&group), "group {group} has no loan");
        self.grow(group + 1);
        let blocks = blocks_of(&borrowed.loan, self.groups.stripe_blocks());
        assert!(blocks > 0, "{borrowed:?} has a block");
        self.lacking -= blocks;
        // Those who look for blocks look again.
        self.freed += blocks;
        self.loans.insert(group, borrowed);
        self.loaded.remove(&group);
        self.set_counts(group, self.counts_of(group, words));
        self.clear_unusable();
    }

    /// The lender of a loan is away.
    pub(crate) fn set_away(&mut self, group: u64) {
        assert!(self.loans.contains_key(&group), "group {group} has a loan");
        let counts = self.known_counts(group);
        self.away.insert(group, counts);
        // Counts as full from here on.
        self.set_counts(group, counts);
    }

    /// The lender of a loan is there.
    pub(crate) fn set_there(&mut self, group: u64) {
        if let Some(counts) = self.away.remove(&group) {
            self.freed += self.groups.blocks_in(group) - u64::from(counts.used);
            self.set_counts(group, counts);
            self.clear_unusable();
        }
    }

    /// True if the lender of the loan of a stripe is away, or if there is no such loan.
    pub(crate) fn is_away(&self, stripe: u64) -> bool {
        let group = self.groups.of_stripe(stripe);
        group >= self.groups.own() && (self.away.contains_key(&group) || !self.loans.contains_key(&group))
    }

    /// The counts of a group, whether or not its lender is there.
    pub(crate) fn known_counts(&self, group: u64) -> Counts {
        self.away.get(&group).copied().unwrap_or_else(|| self.counts(group))
    }

    /// Has groups below `count`.
    fn grow(&mut self, count: u64) {
        let before = self.groups.count();
        if count <= before {
            return;
        }
        self.groups = self.groups.with_borrowed(count - self.groups.own());
        self.counts.resize(to_usize(count), Counts::default());
        self.with_partial.grow(count);
        self.with_empty.grow(count);
        for group in before..count {
            self.lacking += self.groups.blocks_in(group);
            self.set_counts(group, self.full_counts(group));
        }
    }

    /// Loans of which no block is used, and which neither a reservation nor the headroom needs: these can be
    /// given back.
    pub(crate) fn idle_loans(&self) -> Vec<u64> {
        let mut spare = self.usage().available_blocks();
        let is_idle = |(group, borrowed): (&u64, &Borrowed)| {
            let blocks = blocks_of(&borrowed.loan, self.groups.stripe_blocks());
            let may_go = self.is_unused(*group, borrowed) && spare >= blocks;
            spare -= if may_go { blocks } else { 0 };
            may_go.then_some(*group)
        };
        self.loans.iter().filter_map(is_idle).collect()
    }

    /// True if no block of a loan is used, and none waits to be committed or to be free.
    fn is_unused(&self, group: u64, borrowed: &Borrowed) -> bool {
        let lacking = self.groups.blocks_each() - blocks_of(&borrowed.loan, self.groups.stripe_blocks());
        u64::from(self.counts(group).used) == lacking
            && !self.is_suspect(group)
            && self.loaded.get(&group).is_none_or(Group::may_leave)
    }

    /// A loan of which no block is used ends: its group has no blocks any more.
    pub(crate) fn end_loan(&mut self, group: u64) -> Borrowed {
        let is_unused = self.loans.get(&group).is_some_and(|borrowed| self.is_unused(group, borrowed));
        assert!(is_unused, "no block of the loan of group {group} is used, or waits to be free");
        self.drop_loan(group)
    }

    /// The same, whatever is used of it. Nothing is dirty in memory.
    pub(crate) fn drop_loan(&mut self, group: u64) -> Borrowed {
        let borrowed = self.loans.remove(&group).expect("the group has a loan");
        self.away.remove(&group);
        self.suspects.remove(&group);
        self.loaded.remove(&group);
        self.lacking += blocks_of(&borrowed.loan, self.groups.stripe_blocks());
        self.set_counts(group, self.full_counts(group));
        borrowed
    }

    /// Blocks of loans.
    pub(crate) fn borrowed_blocks(&self) -> u64 {
        self.groups.all_blocks() - self.groups.blocks() - self.lacking
    }

    /// The counts of a group without a used block.
    pub(crate) fn free_counts(&self, group: u64) -> Counts {
        Counts { used: 0, empty: to_u16(to_usize(self.groups.stripes_in(group))) }
    }

    /// True if a group can have these counts.
    pub(crate) fn is_possible(&self, group: u64, counts: Counts) -> bool {
        let filled = self.groups.stripes_in(group).checked_sub(counts.empty.into());
        let used = u64::from(counts.used);
        filled.is_some_and(|filled| used >= filled && used <= filled * self.groups.stripe_blocks())
    }

    /// The counts of a group.
    pub(crate) fn counts(&self, group: u64) -> Counts {
        self.counts[to_usize(group)]
    }

    /// Sets the counts of a group, as its row has it.
    pub(crate) fn set_counts(&mut self, group: u64, counts: Counts) {
        assert!(self.is_possible(group, counts), "group {group} with {counts:?}");
        let full = self.full_counts(group);
        let counts = match self.away.get_mut(&group) {
            Some(saved) => {
                *saved = counts;
                full
            }
            None => counts,
        };
        let before = std::mem::replace(&mut self.counts[to_usize(group)], counts);
        let change = |used: &mut u64| *used = *used - u64::from(before.used) + u64::from(counts.used);
        change(&mut self.used_blocks);
        if group >= self.groups.own() {
            change(&mut self.used_of_loans);
        }
        let filled = (self.groups.stripes_in(group) - u64::from(counts.empty)) * self.groups.stripe_blocks();
        self.with_partial.set(group, u64::from(counts.used) < filled);
        self.with_empty.set(group, counts.empty > 0);
    }

    /// True if a group is in memory. It stays there until the next wait.
    pub(crate) fn has(&mut self, group: u64) -> bool {
        self.loaded.get_mut(&group).map(|group| group.is_used = true).is_some()
    }

    /// Counts of a group without a block that may be allocated.
    fn full_counts(&self, group: u64) -> Counts {
        Counts { used: to_u16(to_usize(self.groups.blocks_in(group))), empty: 0 }
    }

    /// Some bits of a group may be lost: nothing that is free there is allocated before a repair.
    pub(crate) fn suspect(&mut self, group: u64) {
        self.suspects.insert(group);
        match self.loaded.contains_key(&group) {
            true => self.change(group, Group::suspect),
            false => self.set_counts(group, self.full_counts(group)),
        }
    }

    /// True if some bits of a group may be lost.
    pub(crate) fn is_suspect(&self, group: u64) -> bool {
        self.suspects.contains(&group)
    }

    /// Puts a group with these bits into memory, which is not there. Returns false if it was counted in
    /// another way: it is suspect from now on.
    pub(crate) fn load(&mut self, group: u64, words: &[u64]) -> bool {
        self.give_up_groups();
        let new = self.group_of(group, words);
        let (before, counts) = (self.known_counts(group), new.counts());
        let old = self.loaded.insert(group, new);
        assert!(old.is_none(), "group {group} is in memory, and may be newer there");
        let agrees = self.is_suspect(group) || before == counts;
        self.set_counts(group, counts);
        if self.is_suspect(group) || !agrees {
            self.suspect(group);
        }
        agrees
    }

    /// Looks at some groups, and lets those leave the memory that are not needed, while there are too many.
    fn give_up_groups(&mut self) {
        for _ in 0..LOOK.min(self.loaded.len()) {
            if self.loaded.len() < self.most_groups {
                return;
            }
            let next = self.loaded.range(self.hand..).next().or_else(|| self.loaded.first_key_value());
            let Some(group) = next.map(|(group, _)| *group) else { return };
            self.hand = group + 1;
            let found = self.loaded.get_mut(&group).expect("it was found");
            if !std::mem::take(&mut found.is_used) && found.may_leave() {
                self.loaded.remove(&group);
            }
        }
    }

    /// True if far more groups are in memory than it is meant for: blocks wait to be committed, or to be
    /// free, in most of them.
    pub(crate) fn is_crowded(&mut self) -> bool {
        self.give_up_groups();
        self.loaded.len() > 2 * self.most_groups
    }

    /// Keeps a group in memory, or one time less.
    pub(crate) fn pin(&mut self, group: u64, is_pinned: bool) {
        let pins = &mut self.group_mut(group).pins;
        *pins = if is_pinned { *pins + 1 } else { pins.checked_sub(1).expect("it is pinned") };
    }

    /// # Panics
    /// If the group is not in memory.
    fn group(&self, group: u64) -> &Group {
        self.loaded.get(&group).unwrap_or_else(|| panic!("allocation group {group} is not in memory"))
    }

    fn group_mut(&mut self, group: u64) -> &mut Group {
        self.loaded.get_mut(&group).unwrap_or_else(|| panic!("allocation group {group} is not in memory"))
    }

    /// A stripe's group, and its number there.
    fn place_of(&self, stripe: u64) -> (u64, u64) {
        let group = self.groups.of_stripe(stripe);
        (group, stripe - self.groups.stripes(group).start)
    }

    /// The first group of a range that has stripes of a kind.
    pub(crate) fn next_group(&self, kind: Kind, range: Range<u64>) -> Option<u64> {
        match kind {
            Kind::Partial => self.with_partial.first(range),
            Kind::Empty => self.with_empty.first(range),
        }
    }

    /// The same without groups none of whose stripes of that kind may be used now.
    pub(crate) fn next_usable_group(&self, kind: Kind, range: Range<u64>) -> Option<u64> {
        let next = |from| self.next_group(kind, from..range.end);
        let mut all = std::iter::successors(next(range.start), |group| next(group + 1));
        all.find(|group| kind == Kind::Partial || !self.unusable[Use::Extents as usize].contains(group))
    }

    /// No empty stripe of a group may be used now for something.
    pub(crate) fn set_unusable(&mut self, group: u64, of: Use) {
        self.unusable[of as usize].insert(group);
    }

    /// More stripes may be used than before.
    pub(crate) fn clear_unusable(&mut self) {
        self.unusable.iter_mut().for_each(BTreeSet::clear);
    }

    /// The last group before one that has empty stripes of which one may be usable for a full chunk.
    pub(crate) fn last_usable_group(&self, until: u64) -> Option<u64> {
        let mut all =
            std::iter::successors(self.with_empty.last(until), |group| self.with_empty.last(*group));
        all.find(|group| !self.unusable[Use::FullChunk as usize].contains(group))
    }

    /// The first stripe of a kind in a group in memory for which `usable` is true.
    pub(crate) fn first_in(&self, group: u64, kind: Kind, usable: impl Fn(u64) -> bool) -> Option<u64> {
        let first = self.groups.stripes(group).start;
        let found = self.group(group).first_with(kind == Kind::Empty, |stripe| usable(first + stripe));
        found.map(|stripe| first + stripe)
    }

    /// The last empty stripe in a group in memory for which `usable` is true.
    pub(crate) fn last_empty_in(&self, group: u64, usable: impl Fn(u64) -> bool) -> Option<u64> {
        let first = self.groups.stripes(group).start;
        let found = self.group(group).last_empty(|stripe| usable(first + stripe));
        found.map(|stripe| first + stripe)
    }

    /// Marks a run as used or free. All of its blocks must have the opposite state.
    fn mark(&mut self, run: Run, used: bool) {
        for (group, part) in self.groups.parts(run).collect::<Vec<_>>() {
            self.change(group, |group| group.mark(part, used));
        }
    }

    fn change(&mut self, group: u64, change: impl FnOnce(&mut Group)) {
        let found = self.group_mut(group);
        change(found);
        let counts = found.counts();
        self.set_counts(group, counts);
        let blocks = self.groups.all_blocks();
        assert!(self.used_blocks <= blocks, "{} used blocks of {blocks}", self.used_blocks);
    }

    fn headroom_blocks(&self) -> u64 {
        self.groups.blocks() / 50
    }

    pub(crate) fn usage(&self) -> SpaceUsage {
        SpaceUsage {
            total_blocks: self.groups.blocks(),
            // While a write is written back, its blocks are both reserved and used.
            free_blocks: self
                .groups
                .all_blocks()
                .saturating_sub(self.used_blocks + self.reserved + self.barred),
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
        self.used_blocks + self.reserved + blocks <= self.groups.all_blocks() + mine
    }

    /// Sets the number of blocks that a running discard has taken.
    pub(crate) fn set_discarding(&mut self, blocks: u64) {
        assert!(blocks <= self.used_blocks, "{blocks} blocks in a discard are used");
        self.discarding = blocks;
    }

    /// Reserves blocks for a write in memory. Returns false, and reserves nothing, if too few are free.
    pub(crate) fn reserve(&mut self, blocks: u64) -> bool {
        let usage = self.reported();
        // Whoever needs none may go on without free ones, and writes over its own.
        let enough = blocks == 0 || usage.free_blocks >= blocks + usage.headroom_blocks;
        if enough {
            self.reserved += blocks;
        }
        enough
    }

    /// No free block can be allocated. Those that become free, or are borrowed, from now on can.
    pub(crate) fn bar_free(&mut self) {
        self.barred = self.groups.all_blocks().saturating_sub(self.used_blocks);
        assert!(self.usage().free_blocks == 0, "none is promised");
    }

    /// Free blocks may be allocated again.
    pub(crate) fn clear_barred(&mut self) {
        self.barred = 0;
    }

    /// Releases a reservation, because the blocks are allocated now or the write is void. Panics if fewer are
    /// reserved.
    pub(crate) fn release(&mut self, blocks: u64) {
        self.reserved = self.reserved.checked_sub(blocks).expect("only reserved blocks are released");
    }

    /// Allocates one run of up to `wanted` blocks in a stripe that has free ones.
    pub(crate) fn allocate(&mut self, stripe: u64, wanted: u64) -> Run {
        assert!(wanted > 0, "a run has a block");
        let (number, at) = self.place_of(stripe);
        let (group, start) = (self.group(number), self.groups.range(number).start);
        let blocks = group.blocks_of(at);
        let first = blocks.clone().find(|block| !group.is_used(*block)).expect("the stripe has a free block");
        let most = blocks.end.min(first + wanted);
        let run = (first..most).take_while(|block| !group.is_used(*block)).count() as u64;
        assert!((1..=wanted).contains(&run), "a run of {run} blocks for {wanted}");
        self.mark((start + first, run), true);
        (start + first, run)
    }

    /// Allocates all blocks of an empty stripe. Returns false if the stripe is not empty.
    pub(crate) fn take_stripe(&mut self, stripe: u64) -> bool {
        let empty = self.is_empty(stripe);
        if empty {
            let stripe_blocks = self.groups.stripe_blocks();
            self.mark((stripe * stripe_blocks, stripe_blocks), true);
        }
        empty
    }

    /// Frees blocks for allocation. Returns the stripes that are empty now.
    pub(crate) fn free(&mut self, (start, count): Run) -> Vec<u64> {
        assert!(count > 0, "a run has a block");
        self.mark((start, count), false);
        self.freed += count;
        self.clear_unusable();
        let stripe_blocks = self.groups.stripe_blocks();
        let stripes = start / stripe_blocks..=(start + count - 1) / stripe_blocks;
        stripes.filter(|stripe| self.is_empty(*stripe)).collect()
    }

    /// Frees a run that was taken and never committed: for a discard, or for a write that failed. In a group
    /// that has become suspect it counts as used, like all that was free there. Returns the stripes that are
    /// empty now.
    pub(crate) fn free_uncommitted(&mut self, run: Run) -> Vec<u64> {
        let mut empty = Vec::new();
        for (group, (at, count)) in self.groups.parts(run).collect::<Vec<_>>() {
            match self.is_suspect(group) {
                true => self.change(group, |group| group.hide((at, count))),
                false => empty.extend(self.free((self.groups.range(group).start + at, count))),
            }
        }
        empty
    }

    /// Blocks freed or borrowed so far.
    pub(crate) fn freed(&self) -> u64 {
        self.freed
    }

    /// True if a stripe has no used block.
    pub(crate) fn is_empty(&self, stripe: u64) -> bool {
        let (group, stripe) = self.place_of(stripe);
        self.group(group).fill(stripe) == 0
    }

    /// Changes the committed bitmap. A run in both lists was allocated and then freed.
    ///
    /// A freed block that counts as free stays so, and is not in the result: its bit was wrong, or another
    /// file owned it too and freed it. Then the allocator may have given it to a third file already.
    pub(crate) fn commit(&mut self, allocated: Vec<Run>, freed: &[Run]) -> SpaceCommit {
        self.commit_runs(&allocated, true);
        let mut marked = Vec::new();
        for run in freed {
            let before = marked.iter().map(|(_, count)| count).sum::<u64>();
            for (group, part) in self.groups.parts(*run).collect::<Vec<_>>() {
                let start = self.groups.range(group).start;
                for (at, count) in self.group(group).committed_parts(part) {
                    self.group_mut(group).commit((at, count), false);
                    push_run(&mut marked, (start + at, count));
                }
            }
            let count = marked.iter().map(|(_, count)| count).sum::<u64>() - before;
            if count < run.1 {
                let (block, unmarked) = (run.0, run.1 - count);
                tracing::error!(
                    block,
                    unmarked,
                    "a file gave up blocks that count as free: `penstock fs check`"
                );
            }
        }
        let groups: BTreeSet<u64> =
            self.groups.of_runs(&allocated).chain(self.groups.of_runs(&marked)).collect();
        groups.iter().for_each(|group| self.group_mut(*group).count_row());
        let rows = self.rows(&groups);
        groups.iter().for_each(|group| self.pin(*group, true));
        SpaceCommit { rows, groups, allocated, freed: marked }
    }

    fn commit_runs(&mut self, runs: &[Run], is_set: bool) {
        for run in runs {
            for (group, part) in self.groups.parts(*run).collect::<Vec<_>>() {
                self.group_mut(group).commit(part, is_set);
            }
        }
    }

    /// The rows of groups, and the rows that have their counts.
    fn rows(&self, groups: &BTreeSet<u64>) -> Vec<Row> {
        let (own, borrowed) = (groups.range(..self.groups.own()), groups.range(self.groups.own()..));
        let bits = own.clone().map(|group| (group_key(*group), encode_group(self.committed_group(*group))));
        let of_loans = borrowed.filter_map(|group| {
            let loan = self.loans.get(group)?;
            Some((Borrowed::key(*group), loan.encode(self.committed_group(*group))))
        });
        let of_counts: BTreeSet<u64> = own.map(|group| group / GROUPS_IN_A_ROW).collect();
        let counts = |row: u64| {
            let groups = self.groups.counted_in(row).into_iter().flatten();
            let counts: Vec<Counts> = groups.map(|group| self.committed_counts(group)).collect();
            (counts_key(row), encode_counts(&counts))
        };
        bits.chain(of_counts.into_iter().map(counts)).chain(of_loans).collect()
    }

    /// The counts of a group as its row has it; those of a suspect one say so.
    fn committed_counts(&self, group: u64) -> Counts {
        match self.is_suspect(group) {
            true => Counts::SUSPECT,
            false => self.loaded.get(&group).map_or_else(|| self.counts(group), Group::row_counts),
        }
    }

    /// A [`Space::commit`] is in the rows. Returns the runs that were marked and are not any more.
    pub(crate) fn end_commit(&mut self, commit: SpaceCommit) -> Vec<Run> {
        commit.groups.iter().for_each(|group| self.pin(*group, false));
        commit.freed
    }

    /// Undoes a [`Space::commit`], the last one.
    pub(crate) fn undo_commit(&mut self, commit: SpaceCommit) {
        commit.groups.iter().for_each(|group| self.pin(*group, false));
        self.commit_runs(&commit.freed, true);
        self.commit_runs(&commit.allocated, false);
        commit.groups.iter().for_each(|group| self.group_mut(*group).count_row());
    }

    /// The bits of a group in memory, as its row has them.
    fn committed_group(&self, group: u64) -> &[u64] {
        self.group(group).committed()
    }

    /// The bits of a group as its row has them; none if it is not in memory.
    pub(crate) fn bits_in_memory(&self, group: u64) -> Option<&[u64]> {
        self.loaded.get(&group).map(Group::committed)
    }

    /// Blocks that are used.
    pub(crate) fn used_blocks(&self) -> u64 {
        self.used_blocks - self.lacking
    }

    /// True if no block of a group is free.
    pub(crate) fn is_full(&self, group: u64) -> bool {
        u64::from(self.known_counts(group).used) == self.groups.blocks_in(group)
    }

    /// Blocks of the volume that are neither used nor reserved, wherever the reserved ones will be.
    pub(crate) fn free_of_volume(&self) -> u64 {
        self.groups.blocks().saturating_sub(self.used_blocks - self.used_of_loans + self.reserved)
    }

    /// True if what is free on the volume itself is its headroom at most, so that loans are used first.
    pub(crate) fn is_low(&self) -> bool {
        self.free_of_volume() <= self.headroom_blocks()
    }

    /// The free blocks of a run in a group in memory, which is counted from its first block.
    pub(crate) fn free_in(&self, group: u64, (at, count): Run) -> Vec<u64> {
        let (first, group) = (self.groups.range(group).start, self.group(group));
        (at..at + count).filter(|block| !group.is_used(*block)).map(|block| first + block).collect()
    }

    /// The number of groups some of whose bits may be lost.
    pub(crate) fn suspects(&self) -> u64 {
        self.suspects.len() as u64
    }

    /// A repair wrote the row of a group: it has these bits now, and none is lost. Blocks that are allocated
    /// and not committed stay so.
    pub(crate) fn reload(&mut self, group: u64, words: &[u64]) {
        self.suspects.remove(&group);
        match self.loaded.contains_key(&group) {
            true => self.change(group, |group| group.reload(words)),
            false => self.set_counts(group, self.counts_of(group, words)),
        }
    }

    /// True if the counts agree with the bits in memory.
    pub(crate) fn is_counted(&self) -> bool {
        let agrees = |(group, found): (&u64, &Group)| {
            found.is_counted() && found.counts() == self.known_counts(*group)
        };
        let used: u64 = self.counts.iter().map(|counts| u64::from(counts.used)).sum();
        used == self.used_blocks && self.loaded.iter().all(agrees)
    }
}

#[cfg(test)]
mod tests;
