//! Data blocks that are in the log and not yet in their strips.
//!
//! Invariants: for each block the overlay holds the newest write; the segment that a block's entry lies in stays in
//! the log until the block is destaged or a newer write of it is durable. Memory is bounded by the log: a write
//! waits for log space first ([`crate::room`]), for which the overlay counts its blocks and the columns they touch.
//!
//! A stripe that cannot be destaged is *parked*: it is passed over and counted apart until it is written again or its
//! time to be tried again comes.

use penstock_base::{Buf, HashMap};
use std::collections::{BTreeMap, BTreeSet};

/// A block and where its entry stands.
#[derive(Clone, Debug)]
pub(crate) struct DirtyBlock {
    pub(crate) data: Buf,
    pub(crate) crc: u32,
    pub(crate) order: u64,
    /// The segment of its entry; none until it is appended.
    pub(crate) segment: Option<u64>,
}

/// All dirty blocks of an array.
pub(crate) struct Overlay {
    strip_blocks: u32,
    stripes: HashMap<u64, DirtyStripe>,
    /// Dirty stripes that are not parked, by their [`DirtyStripe::turn`].
    oldest: BTreeMap<u64, u64>,
    blocks: u64,
    columns: u64,
    /// Parked stripes, and their blocks and columns.
    parked: BTreeSet<u64>,
    parked_blocks: u64,
    parked_columns: u64,
}

#[derive(Default)]
struct DirtyStripe {
    /// The stripe with the lowest is destaged first: the order of its oldest block, or a later one, drawn when the stripe was put
    /// off. No two stripes have the same.
    turn: u64,
    blocks: BTreeMap<u32, DirtyBlock>,
    /// Dirty blocks in each column that has some.
    columns: BTreeMap<u32, u32>,
}

impl Overlay {
    /// An empty overlay for strips of `strip_blocks`.
    pub(crate) fn new(strip_blocks: u32) -> Self {
        Self {
            strip_blocks,
            stripes: HashMap::default(),
            oldest: BTreeMap::new(),
            blocks: 0,
            columns: 0,
            parked: BTreeSet::new(),
            parked_blocks: 0,
            parked_columns: 0,
        }
    }

    /// Dirty blocks, and columns that have some, of the stripes that are to be destaged.
    pub(crate) fn to_destage(&self) -> (u64, u64) {
        (self.blocks - self.parked_blocks, self.columns - self.parked_columns)
    }

    /// Dirty blocks, and columns that have some, of all stripes.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.blocks, self.columns)
    }

    /// The same of parked stripes.
    pub(crate) fn parked(&self) -> (u64, u64) {
        (self.parked_blocks, self.parked_columns)
    }

    pub(crate) fn is_parked(&self, stripe: u64) -> bool {
        self.parked.contains(&stripe)
    }

    /// Passes a stripe over from now on.
    pub(crate) fn park(&mut self, stripe: u64) {
        if let Some(entry) = self.stripes.get(&stripe)
            && self.parked.insert(stripe)
        {
            self.parked_blocks += entry.blocks.len() as u64;
            self.parked_columns += entry.columns.len() as u64;
            self.oldest.remove(&entry.turn);
        }
    }

    /// Parks a stripe, and lets all others go first when it is tried again. `turn` is a new order.
    pub(crate) fn park_behind(&mut self, stripe: u64, turn: u64) {
        self.park(stripe);
        if let Some(entry) = self.stripes.get_mut(&stripe) {
            assert!(turn > entry.turn, "a new order is above all others");
            entry.turn = turn;
        }
    }

    /// Lets a stripe be destaged again.
    fn unpark(&mut self, stripe: u64) {
        if self.parked.remove(&stripe) {
            let entry = &self.stripes[&stripe];
            self.parked_blocks -= entry.blocks.len() as u64;
            self.parked_columns -= entry.columns.len() as u64;
            self.oldest.insert(entry.turn, stripe);
        }
    }

    /// Lets all parked stripes be tried again.
    pub(crate) fn unpark_all(&mut self) {
        while let Some(stripe) = self.parked.first().copied() {
            self.unpark(stripe);
        }
        assert_eq!((self.parked_blocks, self.parked_columns), (0, 0), "what is not parked is not counted so");
    }

    /// The parked stripes.
    pub(crate) fn parked_stripes(&self) -> &BTreeSet<u64> {
        &self.parked
    }

    /// Blocks of these stripes whose entries lie in segments below `segment`: (stripe, block, the block).
    pub(crate) fn logged_before(&self, stripes: &BTreeSet<u64>, segment: u64) -> Vec<(u64, u32, DirtyBlock)> {
        let dirty = stripes.iter().filter_map(|stripe| Some((*stripe, self.stripes.get(stripe)?)));
        let blocks = dirty.flat_map(|(stripe, entry)| {
            entry.blocks.iter().map(move |(block, dirty)| (stripe, *block, dirty))
        });
        let old = blocks.filter(|(_, _, dirty)| dirty.segment.is_some_and(|at| at < segment));
        old.map(|(stripe, block, dirty)| (stripe, block, dirty.clone())).collect()
    }

    /// Gives a dirty block another place in the log. Returns the segment of the entry that it replaces.
    pub(crate) fn log_again(&mut self, stripe: u64, block: u32, order: u64) -> Option<u64> {
        let entry = self.stripes.get_mut(&stripe).expect("the stripe has dirty blocks");
        let dirty = entry.blocks.get_mut(&block).expect("the block is dirty");
        dirty.order = order;
        dirty.segment.take()
    }

    /// Dirty blocks and columns of one stripe.
    pub(crate) fn counts_of(&self, stripe: u64) -> (u64, u64) {
        self.stripes
            .get(&stripe)
            .map_or((0, 0), |entry| (entry.blocks.len() as u64, entry.columns.len() as u64))
    }

    /// Number of dirty blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Puts a newer block in. Returns the one it replaces.
    pub(crate) fn insert(&mut self, stripe: u64, block: u32, dirty: DirtyBlock) -> Option<DirtyBlock> {
        // What is written now may be what its column lacked.
        self.unpark(stripe);
        let entry = self.stripes.entry(stripe).or_default();
        if entry.blocks.is_empty() {
            entry.turn = dirty.order;
            self.oldest.insert(dirty.order, stripe);
        }
        let before = entry.blocks.insert(block, dirty);
        if before.is_none() {
            self.blocks += 1;
            let column = entry.columns.entry(block % self.strip_blocks).or_default();
            self.columns += u64::from(*column == 0);
            *column += 1;
        }
        before
    }

    pub(crate) fn get(&self, stripe: u64, block: u32) -> Option<&DirtyBlock> {
        self.stripes.get(&stripe)?.blocks.get(&block)
    }

    pub(crate) fn has_stripe(&self, stripe: u64) -> bool {
        self.stripes.contains_key(&stripe)
    }

    /// Notes where the entry of `order` was appended; false when a newer write has taken its place.
    pub(crate) fn appended(&mut self, stripe: u64, block: u32, order: u64, segment: u64) -> bool {
        match self.stripes.get_mut(&stripe).and_then(|entry| entry.blocks.get_mut(&block)) {
            Some(dirty) if dirty.order == order => {
                dirty.segment = Some(segment);
                true
            }
            _ => false,
        }
    }

    /// The blocks of a stripe whose entries are appended.
    pub(crate) fn appended_of(&self, stripe: u64) -> Vec<(u32, DirtyBlock)> {
        let blocks = self.stripes.get(&stripe).into_iter().flat_map(|entry| &entry.blocks);
        blocks
            .filter(|(_, dirty)| dirty.segment.is_some())
            .map(|(block, dirty)| (*block, dirty.clone()))
            .collect()
    }

    /// Removes a block if it is not newer than `order`. Returns what was removed.
    pub(crate) fn remove(&mut self, stripe: u64, block: u32, order: u64) -> Option<DirtyBlock> {
        if self.stripes.get(&stripe)?.blocks.get(&block)?.order > order {
            return None;
        }
        self.unpark(stripe);
        let entry = self.stripes.get_mut(&stripe)?;
        let removed = entry.blocks.remove(&block);
        self.blocks -= u64::from(removed.is_some());
        let column = block % self.strip_blocks;
        if let Some(count) = entry.columns.get_mut(&column) {
            *count -= 1;
            if *count == 0 {
                entry.columns.remove(&column);
                self.columns -= 1;
            }
        }
        self.oldest.remove(&entry.turn);
        match entry.blocks.values().map(|dirty| dirty.order).min() {
            Some(turn) => {
                entry.turn = turn;
                self.oldest.insert(turn, stripe);
            }
            None => {
                self.stripes.remove(&stripe);
            }
        }
        removed
    }

    /// Removes all blocks of a stripe that are not newer than `order`.
    pub(crate) fn remove_upto(&mut self, stripe: u64, order: u64) -> Vec<DirtyBlock> {
        let Some(entry) = self.stripes.get(&stripe) else { return Vec::new() };
        let numbers: Vec<u32> = entry.blocks.keys().copied().collect();
        numbers.into_iter().filter_map(|block| self.remove(stripe, block, order)).collect()
    }

    /// Dirty stripes that are not parked, oldest first.
    pub(crate) fn oldest_stripes(&self, most: usize) -> Vec<u64> {
        self.oldest.values().take(most).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dirty(order: u64) -> DirtyBlock {
        DirtyBlock { data: Buf::zeroed(0), crc: 0, order, segment: Some(order) }
    }

    /// Three stripes of strips of 4 blocks: two blocks in one column, one block, one block.
    fn overlay() -> Overlay {
        let mut overlay = Overlay::new(4);
        for (order, (stripe, block)) in (1..).zip([(7, 0), (7, 4), (8, 1), (9, 2)]) {
            overlay.insert(stripe, block, dirty(order));
        }
        overlay
    }

    #[test]
    fn a_parked_stripe_is_passed_over_and_counted_apart() {
        let mut overlay = overlay();
        overlay.park(7);
        overlay.park(7);
        overlay.park(1000);
        assert_eq!(overlay.oldest_stripes(9), [8, 9]);
        assert_eq!((overlay.to_destage(), overlay.parked().0, overlay.blocks()), ((2, 2), 2, 4));
        overlay.unpark_all();
        assert_eq!(overlay.oldest_stripes(9), [7, 8, 9]);
        assert_eq!((overlay.to_destage(), overlay.parked().0), ((4, 3), 0));
    }

    #[test]
    fn a_write_or_a_discard_of_a_parked_stripe_ends_that() {
        let mut written = overlay();
        written.park(7);
        assert_eq!(written.insert(7, 0, dirty(10)).unwrap().order, 1);
        assert_eq!((written.to_destage(), written.parked().0), ((4, 3), 0));
        let mut discarded = overlay();
        discarded.park(7);
        assert_eq!(discarded.remove_upto(7, 100).len(), 2);
        assert_eq!((discarded.to_destage(), discarded.parked().0, discarded.blocks()), ((2, 2), 0, 2));
        assert_eq!(discarded.oldest_stripes(9), [8, 9]);
    }

    #[test]
    fn a_stripe_that_is_put_off_has_its_turn_behind_the_others() {
        let mut overlay = overlay();
        overlay.park_behind(7, 10);
        overlay.park_behind(8, 11);
        overlay.unpark_all();
        assert_eq!(overlay.oldest_stripes(9), [9, 7, 8]);
        // A later write does not bring it forward.
        overlay.insert(7, 1, dirty(12));
        assert_eq!(overlay.oldest_stripes(9), [9, 7, 8]);
        assert_eq!(overlay.remove_upto(7, 100).len(), 3);
        assert_eq!(overlay.oldest_stripes(9), [9, 8]);
    }

    #[test]
    fn a_block_that_is_logged_again_moves_its_segment() {
        let mut overlay = overlay();
        overlay.park(7);
        let stripes = BTreeSet::from([7, 1000]);
        let old: Vec<u32> =
            overlay.logged_before(&stripes, 2).into_iter().map(|(_, block, _)| block).collect();
        assert_eq!(old, [0]);
        assert_eq!(overlay.log_again(7, 0, 20), Some(1));
        assert!(overlay.appended(7, 0, 20, 30) && overlay.logged_before(&stripes, 30).len() == 1);
        assert_eq!(overlay.to_destage(), (2, 2));
        overlay.unpark_all();
        assert_eq!(overlay.remove_upto(7, 20).len(), 2);
    }
}
