//! The map of one chunk: its extents on the volume, and the changes of them that are not committed.
//!
//! Invariants:
//! - extents are in order of their blocks, do not overlap, and adjacent ones that continue each other are
//!   joined;
//! - a run is in `allocated` or belongs to the row, and a run in `freed` belongs to the row: so a commit that
//!   fails or a truncation that is undone loses no block.
//!
//! Pure: the caller gives blocks back to the free space.

use crate::free::{Run, push_run};
use crate::rows::Extent;
use std::ops::Range;

/// Extents of one chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChunkMap {
    /// In order, committed or not.
    extents: Vec<Extent>,
    /// Runs allocated since the last commit.
    allocated: Vec<Run>,
    /// Runs of the committed map that are no longer used.
    freed: Vec<Run>,
    /// The extents differ from the row.
    changed: bool,
    /// The row exists.
    has_row: bool,
}

/// Changes of a map since the last commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MapChanges {
    /// All extents as they are now.
    pub(crate) extents: Vec<Extent>,
    /// The row existed before.
    pub(crate) had_row: bool,
    pub(crate) allocated: Vec<Run>,
    pub(crate) freed: Vec<Run>,
}

impl ChunkMap {
    /// The map of a chunk that has a row. Extents of no block, which a check finds, are left out.
    pub(crate) fn of_row(mut extents: Vec<Extent>) -> Self {
        extents.retain(|extent| extent.count > 0);
        Self { extents, has_row: true, ..Self::default() }
    }

    /// Blocks with a place on the volume, preallocated ones included.
    pub(crate) fn blocks(&self) -> u64 {
        self.extents.iter().map(|extent| u64::from(extent.count)).sum()
    }

    /// True if no block has a place on the volume.
    pub(crate) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// True if the extents differ from the row.
    pub(crate) fn is_changed(&self) -> bool {
        self.changed
    }

    fn assert_ordered(&self) {
        let ends = self.extents.windows(2).all(|pair| pair[0].first + pair[0].count <= pair[1].first);
        assert!(
            ends && self.extents.iter().all(|extent| extent.count > 0),
            "{:?} are in order",
            self.extents
        );
    }

    /// Returns the volume block that holds a chunk block's data; `None` if it reads as zeros.
    pub(crate) fn lookup(&self, block: u32) -> Option<u64> {
        self.run_at(block, block + 1).0
    }

    /// Returns the volume block of `at`, or `None` if it reads as zeros, and the number of blocks from `at`
    /// on, up to `until`, to which the same applies contiguously. `until` must be above `at`.
    pub(crate) fn run_at(&self, at: u32, until: u32) -> (Option<u64>, u32) {
        assert!(at < until, "a run from {at} on ends behind it, not at {until}");
        let after = self.extents.partition_point(|extent| extent.first <= at);
        if let Some(extent) = after.checked_sub(1).map(|before| self.extents[before])
            && at < extent.first + extent.count
        {
            let run = until.min(extent.first + extent.count) - at;
            return ((!extent.preallocated).then(|| extent.block + u64::from(at - extent.first)), run);
        }
        let next = self.extents.get(after).map_or(until, |extent| extent.first.min(until));
        (None, next - at)
    }

    /// Returns the volume block of a chunk block, and whether it is only preallocated. `None` if it has none.
    pub(crate) fn place(&self, block: u32) -> Option<(u64, bool)> {
        let after = self.extents.partition_point(|extent| extent.first <= block);
        let extent = self.extents.get(after.checked_sub(1)?)?;
        let inside = block < extent.first + extent.count;
        inside.then(|| (extent.block + u64::from(block - extent.first), extent.preallocated))
    }

    /// Blocks of a range without a volume block, as ranges in order.
    pub(crate) fn unplaced(&self, blocks: Range<u32>) -> Vec<Range<u32>> {
        let mut unplaced = Vec::new();
        let mut at = blocks.start;
        for extent in &self.extents {
            if at >= blocks.end || extent.first >= blocks.end {
                break;
            }
            if at < extent.first {
                unplaced.push(at..extent.first);
            }
            at = at.max(extent.first + extent.count);
        }
        if at < blocks.end {
            unplaced.push(at..blocks.end);
        }
        unplaced
    }

    /// Marks the volume blocks of a range as preallocated, so that they read as zeros, or as containing data.
    /// Blocks without a volume block stay without.
    pub(crate) fn set_preallocated(&mut self, blocks: Range<u32>, preallocated: bool) {
        self.split_at(blocks.start);
        self.split_at(blocks.end);
        for extent in self.extents.iter_mut().filter(|extent| blocks.contains(&extent.first)) {
            self.changed |= extent.preallocated != preallocated;
            extent.preallocated = preallocated;
        }
        self.extents = joined(std::mem::take(&mut self.extents));
        self.assert_ordered();
    }

    /// Splits the extent that has `block` in its middle, so that an extent begins there.
    fn split_at(&mut self, block: u32) {
        let after = self.extents.partition_point(|extent| extent.first < block);
        let Some(at) = after.checked_sub(1) else { return };
        let extent = self.extents[at];
        let kept = block - extent.first;
        if kept < extent.count {
            self.extents[at].count = kept;
            let rest = Extent {
                first: block,
                count: extent.count - kept,
                block: extent.block + u64::from(kept),
                ..extent
            };
            self.extents.insert(after, rest);
        }
    }

    /// Maps an extent in place of everything that was mapped in its range. Replaced runs go to `freed` if
    /// they were committed; the others are returned, for the caller to free immediately.
    pub(crate) fn put(&mut self, new: Extent) -> Vec<Run> {
        assert!(new.count > 0, "{new:?} has a block");
        let back = self.remove(new.first, new.count);
        let at = self.extents.partition_point(|extent| extent.first < new.first);
        self.extents.insert(at, new);
        self.allocated.push((new.block, u64::from(new.count)));
        self.changed = true;
        self.extents = joined(std::mem::take(&mut self.extents));
        self.assert_ordered();
        back
    }

    /// Unmaps blocks. Returns the runs that were never committed.
    pub(crate) fn remove(&mut self, first: u32, count: u32) -> Vec<Run> {
        let end = first.saturating_add(count);
        let mut kept = Vec::new();
        let mut back = Vec::new();
        for extent in std::mem::take(&mut self.extents) {
            let extent_end = extent.first + extent.count;
            if extent_end <= first || extent.first >= end {
                kept.push(extent);
                continue;
            }
            self.changed = true;
            if extent.first < first {
                kept.push(Extent { count: first - extent.first, ..extent });
            }
            let (from, until) = (extent.first.max(first), extent_end.min(end));
            let run = (extent.block + u64::from(from - extent.first), u64::from(until - from));
            back.extend(self.drop_run(run));
            if extent_end > end {
                let block = extent.block + u64::from(end - extent.first);
                kept.push(Extent { first: end, count: extent_end - end, block, ..extent });
            }
        }
        self.extents = kept;
        // A damaged row may name no block. It goes like any other row that becomes empty.
        self.changed |= self.extents.is_empty() && self.has_row;
        self.assert_ordered();
        back
    }

    /// Splits a run into parts allocated since the last commit, which are returned, and committed parts,
    /// which go to `freed`.
    fn drop_run(&mut self, (start, count): Run) -> Vec<Run> {
        let mut back: Vec<Run> = Vec::new();
        let (mut at, end) = (start, start + count);
        while at < end {
            let fresh = self.allocated.iter().position(|(first, len)| (*first..first + len).contains(&at));
            let Some(index) = fresh else {
                let next = self.allocated.iter().map(|(first, _)| *first).filter(|first| *first > at).min();
                let until = next.map_or(end, |next| next.min(end));
                push_run(&mut self.freed, (at, until - at));
                at = until;
                continue;
            };
            let (first, len) = self.allocated.swap_remove(index);
            let until = end.min(first + len);
            if at > first {
                self.allocated.push((first, at - first));
            }
            if until < first + len {
                self.allocated.push((until, first + len - until));
            }
            push_run(&mut back, (at, until - at));
            at = until;
        }
        back
    }

    /// Takes the changes that a commit must make durable; `None` if the extents equal the row.
    pub(crate) fn take_changes(&mut self) -> Option<MapChanges> {
        if !self.changed {
            return None;
        }
        self.changed = false;
        let had_row = std::mem::replace(&mut self.has_row, !self.extents.is_empty());
        let (allocated, freed) = (std::mem::take(&mut self.allocated), std::mem::take(&mut self.freed));
        Some(MapChanges { extents: self.extents.clone(), had_row, allocated, freed })
    }

    /// Takes changes back after their commit failed.
    pub(crate) fn put_back(&mut self, changes: MapChanges) {
        self.changed = true;
        self.has_row = changes.had_row;
        self.allocated.extend(changes.allocated);
        self.freed.extend(changes.freed);
    }
}

/// Merges extents in which all blocks follow each other, in the file and on the volume.
pub(crate) fn joined(extents: Vec<Extent>) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::with_capacity(extents.len());
    for extent in extents {
        match joined.last_mut() {
            Some(last)
                if last.first + last.count == extent.first
                    && last.block + u64::from(last.count) == extent.block
                    && (last.preallocated, last.birth) == (extent.preallocated, extent.birth) =>
            {
                last.count += extent.count;
            }
            _ => joined.push(extent),
        }
    }
    joined
}

#[cfg(test)]
mod tests;
