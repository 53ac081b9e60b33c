//! Data blocks that are in the log and not yet in their strips.
//!
//! Invariants: for each block the overlay holds the newest write; the segment that a block's entry lies in stays in
//! the log until the block is destaged or a newer write of it is durable. Memory is bounded by the log: a write
//! waits for log space first ([`crate::room`]), for which the overlay counts its blocks and the columns they touch.

use penstock_base::{Buf, HashMap};
use std::collections::BTreeMap;

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
    /// Dirty stripes by their [`DirtyStripe::since`], to destage the oldest first.
    oldest: BTreeMap<u64, u64>,
    blocks: u64,
    columns: u64,
}

#[derive(Default)]
struct DirtyStripe {
    /// A lower bound of the orders of its blocks; no two stripes have the same.
    since: u64,
    blocks: BTreeMap<u32, DirtyBlock>,
    /// Dirty blocks in each column that has some.
    columns: BTreeMap<u32, u32>,
}

impl Overlay {
    /// An empty overlay for strips of `strip_blocks`.
    pub(crate) fn new(strip_blocks: u32) -> Self {
        let (stripes, oldest) = (HashMap::default(), BTreeMap::new());
        Self { strip_blocks, stripes, oldest, blocks: 0, columns: 0 }
    }

    /// Number of columns with dirty blocks, in all stripes.
    pub(crate) fn columns(&self) -> u64 {
        self.columns
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
        let entry = self.stripes.entry(stripe).or_default();
        if entry.blocks.is_empty() {
            entry.since = dirty.order;
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
        let entry = self.stripes.get_mut(&stripe)?;
        if entry.blocks.get(&block)?.order > order {
            return None;
        }
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
        self.oldest.remove(&entry.since);
        match entry.blocks.values().map(|dirty| dirty.order).min() {
            Some(since) => {
                entry.since = since;
                self.oldest.insert(since, stripe);
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

    /// Dirty stripes, oldest first.
    pub(crate) fn oldest_stripes(&self, most: usize) -> Vec<u64> {
        self.oldest.values().take(most).copied().collect()
    }
}
