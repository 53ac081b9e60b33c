//! Data blocks that are in the log and not yet in their strips.
//!
//! Invariants:
//! - for each block the overlay holds the newest write. The segment with a block's entry stays in the log
//!   until the block is destaged, or a newer write of it is durable;
//! - the counters equal the sums over all dirty stripes; a parked stripe is counted apart and has no turn;
//! - memory is bounded by the log: a write reserves log space first ([`crate::log::space`]).
//!
//! A stripe that cannot be destaged is *parked*: destage passes it over until the stripe is written again, or
//! until all parked stripes are tried again.

use crate::place::SegmentNo;
use penstock_base::{Buf, HashMap, Stripe};
use std::collections::{BTreeMap, BTreeSet};

/// A dirty block, and the place of its entry.
#[derive(Clone, Debug)]
pub(crate) struct DirtyBlock {
    pub(crate) data: Buf,
    pub(crate) crc: u32,
    /// The number of its write among all writes of the array.
    pub(crate) order: u64,
    /// The segment of its entry; none until it is appended.
    pub(crate) segment: Option<SegmentNo>,
}

/// Dirty blocks, and columns with at least one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dirty {
    pub(crate) blocks: u64,
    pub(crate) columns: u64,
}

impl std::ops::Add for Dirty {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { blocks: self.blocks + other.blocks, columns: self.columns + other.columns }
    }
}

impl std::ops::Sub for Dirty {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { blocks: self.blocks - other.blocks, columns: self.columns - other.columns }
    }
}

/// All dirty blocks of an array.
pub(crate) struct Overlay {
    strip_blocks: u32,
    /// The highest order that was given.
    order: u64,
    stripes: HashMap<Stripe, DirtyStripe>,
    /// Dirty stripes that are not parked, by their [`DirtyStripe::turn`].
    oldest: BTreeSet<(u64, Stripe)>,
    all: Dirty,
    parked_stripes: BTreeSet<Stripe>,
    parked: Dirty,
}

#[derive(Default)]
struct DirtyStripe {
    /// The stripe with the lowest turn is destaged first. The turn is the order of its oldest block, or a
    /// later order that was drawn when the stripe was postponed. Only a log that nobody wrote so can give two
    /// stripes the same turn.
    turn: u64,
    blocks: BTreeMap<u32, DirtyBlock>,
    /// Dirty blocks in each column that has some.
    columns: BTreeMap<u32, u32>,
}

impl DirtyStripe {
    fn dirty(&self) -> Dirty {
        Dirty { blocks: self.blocks.len() as u64, columns: self.columns.len() as u64 }
    }
}

impl Overlay {
    /// An empty overlay for strips of `strip_blocks`.
    pub(crate) fn new(strip_blocks: u32) -> Self {
        Self {
            strip_blocks,
            order: 0,
            stripes: HashMap::default(),
            oldest: BTreeSet::new(),
            all: Dirty::default(),
            parked_stripes: BTreeSet::new(),
            parked: Dirty::default(),
        }
    }

    /// The highest order that was given: a write from now on has a higher one.
    pub(crate) fn order(&self) -> u64 {
        self.order
    }

    /// Gives the next order.
    pub(crate) fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// Never gives an order up to this one. A record names it; its entry may be lost or no longer in the log,
    /// but a write of this opening must not be made void by that record.
    pub(crate) fn skip_order(&mut self, order: u64) {
        self.order = self.order.max(order);
    }

    /// The work of destage: all stripes that are not parked.
    pub(crate) fn to_destage(&self) -> Dirty {
        self.all - self.parked
    }

    /// All stripes.
    pub(crate) fn counts(&self) -> Dirty {
        self.all
    }

    /// Parked stripes.
    pub(crate) fn parked(&self) -> Dirty {
        self.parked
    }

    pub(crate) fn is_parked(&self, stripe: Stripe) -> bool {
        self.parked_stripes.contains(&stripe)
    }

    /// Passes a stripe over from now on.
    pub(crate) fn park(&mut self, stripe: Stripe) {
        if let Some(entry) = self.stripes.get(&stripe)
            && self.parked_stripes.insert(stripe)
        {
            self.parked = self.parked + entry.dirty();
            self.oldest.remove(&(entry.turn, stripe));
        }
        self.assert_turns();
    }

    /// Parks a stripe, and puts it behind all others for when it is tried again.
    pub(crate) fn park_behind(&mut self, stripe: Stripe) {
        self.park(stripe);
        let turn = self.next_order();
        if let Some(entry) = self.stripes.get_mut(&stripe) {
            assert!(turn > entry.turn, "a new order is above all others");
            entry.turn = turn;
        }
    }

    /// Lets a stripe be destaged again.
    fn unpark(&mut self, stripe: Stripe) {
        if self.parked_stripes.remove(&stripe) {
            let entry = &self.stripes[&stripe];
            self.parked = self.parked - entry.dirty();
            self.oldest.insert((entry.turn, stripe));
        }
        self.assert_turns();
    }

    /// Lets all parked stripes be tried again.
    pub(crate) fn unpark_all(&mut self) {
        while let Some(stripe) = self.parked_stripes.first().copied() {
            self.unpark(stripe);
        }
        assert_eq!(self.parked, Dirty::default(), "no block is counted as parked");
    }

    /// The parked stripes.
    pub(crate) fn parked_stripes(&self) -> &BTreeSet<Stripe> {
        &self.parked_stripes
    }

    fn assert_turns(&self) {
        assert_eq!(
            self.oldest.len() + self.parked_stripes.len(),
            self.stripes.len(),
            "a dirty stripe has a turn or is parked"
        );
    }

    /// Blocks of these stripes whose entries lie in segments below `segment`: (stripe, block, the block).
    pub(crate) fn logged_before(
        &self,
        stripes: &BTreeSet<Stripe>,
        segment: SegmentNo,
    ) -> Vec<(Stripe, u32, DirtyBlock)> {
        let dirty = stripes.iter().filter_map(|stripe| Some((*stripe, self.stripes.get(stripe)?)));
        let blocks = dirty.flat_map(|(stripe, entry)| {
            entry.blocks.iter().map(move |(block, dirty)| (stripe, *block, dirty))
        });
        let old = blocks.filter(|(_, _, dirty)| dirty.segment.is_some_and(|at| at < segment));
        old.map(|(stripe, block, dirty)| (stripe, block, dirty.clone())).collect()
    }

    /// A dirty block is logged again under a new order. Returns the segment of the entry that it replaces.
    pub(crate) fn log_again(&mut self, stripe: Stripe, block: u32, order: u64) -> Option<SegmentNo> {
        assert!(order <= self.order, "order {order} was not given");
        let entry = self.stripes.get_mut(&stripe).expect("the stripe has dirty blocks");
        let dirty = entry.blocks.get_mut(&block).expect("the block is dirty");
        dirty.order = order;
        dirty.segment.take()
    }

    /// One stripe.
    pub(crate) fn counts_of(&self, stripe: Stripe) -> Dirty {
        self.stripes.get(&stripe).map_or(Dirty::default(), DirtyStripe::dirty)
    }

    /// Puts a newer block in. Returns the one that it replaces.
    pub(crate) fn insert(&mut self, stripe: Stripe, block: u32, dirty: DirtyBlock) -> Option<DirtyBlock> {
        assert!(dirty.order <= self.order, "order {} was not given", dirty.order);
        // The written block may be the one that its column lacked.
        self.unpark(stripe);
        let entry = self.stripes.entry(stripe).or_default();
        if entry.blocks.is_empty() {
            entry.turn = dirty.order;
            self.oldest.insert((dirty.order, stripe));
        }
        let before = entry.blocks.insert(block, dirty);
        if before.is_none() {
            self.all.blocks += 1;
            let column = entry.columns.entry(block % self.strip_blocks).or_default();
            self.all.columns += u64::from(*column == 0);
            *column += 1;
        }
        assert!(self.all.columns <= self.all.blocks, "a dirty column has a dirty block");
        before
    }

    pub(crate) fn get(&self, stripe: Stripe, block: u32) -> Option<&DirtyBlock> {
        self.stripes.get(&stripe)?.blocks.get(&block)
    }

    /// The dirty stripes, in no order.
    pub(crate) fn stripes(&self) -> impl Iterator<Item = Stripe> {
        self.stripes.keys().copied()
    }

    pub(crate) fn has_stripe(&self, stripe: Stripe) -> bool {
        self.stripes.contains_key(&stripe)
    }

    /// Records the segment of the entry of `order`. Returns false if a newer write of the block is dirty.
    pub(crate) fn appended(&mut self, stripe: Stripe, block: u32, order: u64, segment: SegmentNo) -> bool {
        match self.stripes.get_mut(&stripe).and_then(|entry| entry.blocks.get_mut(&block)) {
            Some(dirty) if dirty.order == order => {
                dirty.segment = Some(segment);
                true
            }
            _ => false,
        }
    }

    /// The blocks of a stripe whose entries are appended.
    pub(crate) fn appended_of(&self, stripe: Stripe) -> Vec<(u32, DirtyBlock)> {
        let blocks = self.stripes.get(&stripe).into_iter().flat_map(|entry| &entry.blocks);
        blocks
            .filter(|(_, dirty)| dirty.segment.is_some())
            .map(|(block, dirty)| (*block, dirty.clone()))
            .collect()
    }

    /// Removes a block if it is not newer than `order`. Returns the removed block.
    pub(crate) fn remove(&mut self, stripe: Stripe, block: u32, order: u64) -> Option<DirtyBlock> {
        if self.stripes.get(&stripe)?.blocks.get(&block)?.order > order {
            return None;
        }
        self.unpark(stripe);
        let entry = self.stripes.get_mut(&stripe)?;
        let removed = entry.blocks.remove(&block);
        self.all.blocks -= u64::from(removed.is_some());
        let column = block % self.strip_blocks;
        if let Some(count) = entry.columns.get_mut(&column) {
            *count -= 1;
            if *count == 0 {
                entry.columns.remove(&column);
                self.all.columns -= 1;
            }
        }
        self.oldest.remove(&(entry.turn, stripe));
        match entry.blocks.values().map(|dirty| dirty.order).min() {
            Some(turn) => {
                entry.turn = turn;
                self.oldest.insert((turn, stripe));
            }
            None => {
                self.stripes.remove(&stripe);
            }
        }
        self.assert_turns();
        removed
    }

    /// Removes all blocks of a stripe that are not newer than `order`.
    pub(crate) fn remove_upto(&mut self, stripe: Stripe, order: u64) -> Vec<DirtyBlock> {
        let Some(entry) = self.stripes.get(&stripe) else { return Vec::new() };
        let numbers: Vec<u32> = entry.blocks.keys().copied().collect();
        numbers.into_iter().filter_map(|block| self.remove(stripe, block, order)).collect()
    }

    /// Dirty stripes that are not parked, oldest first.
    pub(crate) fn oldest_stripes(&self, most: usize) -> Vec<Stripe> {
        self.oldest.iter().take(most).map(|(_, stripe)| *stripe).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three stripes of strips of 4 blocks: two blocks in one column, one block, one block.
    fn overlay() -> Overlay {
        let mut overlay = Overlay::new(4);
        for (stripe, block) in [(7, 0), (7, 4), (8, 1), (9, 2)] {
            insert(&mut overlay, stripe, block);
        }
        overlay
    }

    /// Inserts a block with the next order, whose entry lies in the segment of that number.
    fn insert(overlay: &mut Overlay, stripe: u64, block: u32) -> Option<DirtyBlock> {
        let order = overlay.next_order();
        let dirty = DirtyBlock { data: Buf::zeroed(0), crc: 0, order, segment: Some(SegmentNo(order)) };
        overlay.insert(Stripe(stripe), block, dirty)
    }

    fn oldest(overlay: &Overlay) -> Vec<u64> {
        overlay.oldest_stripes(9).into_iter().map(|stripe| stripe.0).collect()
    }

    fn dirty(blocks: u64, columns: u64) -> Dirty {
        Dirty { blocks, columns }
    }

    #[test]
    fn a_parked_stripe_is_passed_over_and_counted_apart() {
        let mut overlay = overlay();
        overlay.park(Stripe(7));
        overlay.park(Stripe(7));
        overlay.park(Stripe(1000));
        assert_eq!(oldest(&overlay), [8, 9]);
        assert_eq!(
            (overlay.to_destage(), overlay.parked(), overlay.counts()),
            (dirty(2, 2), dirty(2, 1), dirty(4, 3))
        );
        overlay.unpark_all();
        assert_eq!(oldest(&overlay), [7, 8, 9]);
        assert_eq!((overlay.to_destage(), overlay.parked()), (dirty(4, 3), dirty(0, 0)));
    }

    #[test]
    fn a_write_or_a_discard_ends_parking() {
        let mut written = overlay();
        written.park(Stripe(7));
        assert_eq!(insert(&mut written, 7, 0).unwrap().order, 1);
        assert_eq!((written.to_destage(), written.parked()), (dirty(4, 3), dirty(0, 0)));
        let mut discarded = overlay();
        discarded.park(Stripe(7));
        assert_eq!(discarded.remove_upto(Stripe(7), 100).len(), 2);
        assert_eq!(
            (discarded.to_destage(), discarded.parked(), discarded.counts()),
            (dirty(2, 2), dirty(0, 0), dirty(2, 2))
        );
        assert_eq!(oldest(&discarded), [8, 9]);
    }

    #[test]
    fn a_postponed_stripe_has_its_turn_behind_the_others() {
        let mut overlay = overlay();
        overlay.park_behind(Stripe(7));
        overlay.park_behind(Stripe(8));
        overlay.unpark_all();
        assert_eq!(oldest(&overlay), [9, 7, 8]);
        // A later write does not bring it forward.
        insert(&mut overlay, 7, 1);
        assert_eq!(oldest(&overlay), [9, 7, 8]);
        assert_eq!(overlay.remove_upto(Stripe(7), 100).len(), 3);
        assert_eq!(oldest(&overlay), [9, 8]);
    }

    #[test]
    fn a_block_that_is_logged_again_moves_to_another_segment() {
        let mut overlay = overlay();
        overlay.park(Stripe(7));
        let stripes = BTreeSet::from([Stripe(7), Stripe(1000)]);
        let before = |overlay: &Overlay, segment| -> Vec<u32> {
            let old = overlay.logged_before(&stripes, SegmentNo(segment));
            old.into_iter().map(|(_, block, _)| block).collect()
        };
        assert_eq!(before(&overlay, 2), [0]);
        let order = overlay.next_order();
        assert_eq!(overlay.log_again(Stripe(7), 0, order), Some(SegmentNo(1)));
        assert!(overlay.appended(Stripe(7), 0, order, SegmentNo(30)));
        assert_eq!(before(&overlay, 30), [4]);
        assert_eq!(overlay.to_destage(), dirty(2, 2));
        overlay.unpark_all();
        assert_eq!(overlay.remove_upto(Stripe(7), order).len(), 2);
    }

    #[test]
    fn an_order_is_never_given_twice() {
        let mut overlay = Overlay::new(4);
        overlay.skip_order(10);
        overlay.skip_order(3);
        assert_eq!((overlay.order(), overlay.next_order()), (10, 11));
    }

    #[test]
    #[should_panic(expected = "was not given")]
    fn a_block_has_an_order_that_was_given() {
        let dirty = DirtyBlock { data: Buf::zeroed(0), crc: 0, order: 1, segment: None };
        Overlay::new(4).insert(Stripe(0), 0, dirty);
    }
}
