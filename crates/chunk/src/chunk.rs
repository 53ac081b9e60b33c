//! One chunk in memory: its map, its uncommitted changes, and its dirty blocks.

use crate::rows::{ChunkKey, Extent};
use crate::space::Run;
use penstock_base::Buf;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// A block that was written and is not written back yet.
#[derive(Clone, Debug)]
pub(crate) struct DirtyBlock {
    pub(crate) data: Buf,
    pub(crate) crc: u32,
    /// A block of free space is reserved for it.
    pub(crate) promised: bool,
}

/// One chunk.
#[derive(Default)]
pub(crate) struct Chunk {
    /// Extents of its blocks on the volume, in order, committed or not.
    pub(crate) map: Vec<Extent>,
    /// Runs allocated since the last commit.
    pub(crate) allocated: Vec<Run>,
    /// Runs of the committed map that are no longer used.
    pub(crate) freed: Vec<Run>,
    /// The map differs from the row.
    pub(crate) changed: bool,
    /// The row exists.
    pub(crate) has_row: bool,
    pub(crate) dirty: BTreeMap<u32, DirtyBlock>,
    /// Order of the first write since the chunk was clean; the lowest is written back first.
    pub(crate) since: u64,
}

impl Changes {
    /// Returns changes to the chunk after their commit failed.
    pub(crate) fn put_back(self) {
        let mut chunk = self.chunk.borrow_mut();
        chunk.changed = true;
        chunk.has_row = self.had_row;
        chunk.allocated.extend(self.allocated);
        chunk.freed.extend(self.freed);
    }
}

/// The uncommitted changes of one chunk, taken by a commit.
///
/// They keep a reference to the chunk. Until the rows are committed, the map exists only in memory, so the
/// chunk must not be evicted although it counts as clean.
pub(crate) struct Changes {
    pub(crate) key: ChunkKey,
    pub(crate) chunk: Rc<RefCell<Chunk>>,
    pub(crate) map: Vec<Extent>,
    pub(crate) had_row: bool,
    pub(crate) allocated: Vec<Run>,
    pub(crate) freed: Vec<Run>,
}

impl Chunk {
    pub(crate) fn with_map(map: Vec<Extent>) -> Self {
        Self { map, has_row: true, ..Self::default() }
    }

    /// Copies the map and its uncommitted changes, without dirty blocks, for [`Chunk::restore`].
    pub(crate) fn mapped(&self) -> Self {
        Self {
            map: self.map.clone(),
            allocated: self.allocated.clone(),
            freed: self.freed.clone(),
            changed: self.changed,
            has_row: self.has_row,
            ..Self::default()
        }
    }

    /// Undoes all changes of the map since [`Chunk::mapped`]. Dirty blocks stay as they are.
    pub(crate) fn restore(&mut self, before: Self) {
        let Self { map, allocated, freed, changed, has_row, dirty: _, since: _ } = before;
        (self.map, self.allocated, self.freed) = (map, allocated, freed);
        (self.changed, self.has_row) = (changed, has_row);
    }

    /// Returns the volume block that holds a chunk block's data; `None` if it reads as zeros.
    pub(crate) fn lookup(&self, block: u32) -> Option<u64> {
        self.run_at(block, block + 1).0
    }

    /// Returns the volume block of `at`, or `None` if it reads as zeros, and the number of blocks from `at`
    /// on, up to `until`, to which the same applies contiguously. `until` must be above `at`.
    pub(crate) fn run_at(&self, at: u32, until: u32) -> (Option<u64>, u32) {
        let after = self.map.partition_point(|extent| extent.first <= at);
        if let Some(extent) = after.checked_sub(1).map(|before| self.map[before])
            && at < extent.first + extent.count
        {
            let run = until.min(extent.first + extent.count) - at;
            return ((!extent.reserved).then(|| extent.block + u64::from(at - extent.first)), run);
        }
        let next = self.map.get(after).map_or(until, |extent| extent.first.min(until));
        (None, next - at)
    }

    /// Returns the volume block of a chunk block, and whether it is only preallocated. `None` if it has none.
    pub(crate) fn place(&self, block: u32) -> Option<(u64, bool)> {
        let after = self.map.partition_point(|extent| extent.first <= block);
        let extent = self.map.get(after.checked_sub(1)?)?;
        let inside = block < extent.first + extent.count;
        inside.then(|| (extent.block + u64::from(block - extent.first), extent.reserved))
    }

    /// True if a block is dirty or has a volume block, so that writing it needs no further free space.
    pub(crate) fn has_space(&self, block: u32) -> bool {
        self.dirty.contains_key(&block) || self.place(block).is_some()
    }

    /// Marks the volume blocks of a range as preallocated, so that they read as zeros, or as containing data.
    /// Blocks without a volume block stay without.
    pub(crate) fn set_reserved(&mut self, blocks: Range<u32>, reserved: bool) {
        self.split_at(blocks.start);
        self.split_at(blocks.end);
        for extent in self.map.iter_mut().filter(|extent| blocks.contains(&extent.first)) {
            self.changed |= extent.reserved != reserved;
            extent.reserved = reserved;
        }
        self.join();
    }

    /// Splits the extent that has `block` in its middle, so that an extent begins there.
    fn split_at(&mut self, block: u32) {
        let after = self.map.partition_point(|extent| extent.first < block);
        let Some(at) = after.checked_sub(1) else { return };
        let extent = self.map[at];
        let kept = block - extent.first;
        if kept < extent.count {
            self.map[at].count = kept;
            let rest = Extent {
                first: block,
                count: extent.count - kept,
                block: extent.block + u64::from(kept),
                ..extent
            };
            self.map.insert(after, rest);
        }
    }

    /// Maps an extent in place of everything that was mapped in its range. Replaced runs go to `freed` if
    /// they were committed; the others are returned, for the caller to free immediately.
    pub(crate) fn put(&mut self, new: Extent) -> Vec<Run> {
        let back = self.cut(new.first, new.count);
        let at = self.map.partition_point(|extent| extent.first < new.first);
        self.map.insert(at, new);
        self.allocated.push((new.block, u64::from(new.count)));
        self.changed = true;
        self.join();
        back
    }

    /// Unmaps blocks. Returns the runs that were never committed.
    pub(crate) fn cut(&mut self, first: u32, count: u32) -> Vec<Run> {
        let end = first.saturating_add(count);
        let mut kept = Vec::new();
        let mut back = Vec::new();
        for extent in std::mem::take(&mut self.map) {
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
        self.map = kept;
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

    fn join(&mut self) {
        let mut joined: Vec<Extent> = Vec::with_capacity(self.map.len());
        for extent in std::mem::take(&mut self.map) {
            match joined.last_mut() {
                Some(last)
                    if last.first + last.count == extent.first
                        && last.block + u64::from(last.count) == extent.block
                        && last.reserved == extent.reserved =>
                {
                    last.count += extent.count;
                }
                _ => joined.push(extent),
            }
        }
        self.map = joined;
    }

    /// True if each of its first `count` blocks contains data.
    pub(crate) fn covers(&self, count: u32) -> bool {
        (0..count).all(|block| self.is_data(block))
    }

    /// True if a block contains written data, in memory or on the volume.
    pub(crate) fn is_data(&self, block: u32) -> bool {
        self.dirty.contains_key(&block) || self.lookup(block).is_some()
    }

    /// True if the row describes all that memory has: no dirty block and no uncommitted change of the map.
    pub(crate) fn is_clean(&self) -> bool {
        self.dirty.is_empty() && !self.changed
    }

    /// Takes the changes that a commit must make durable; `None` if the map equals the row.
    pub(crate) fn take_changes(this: &Rc<RefCell<Self>>, key: ChunkKey) -> Option<Changes> {
        let mut chunk = this.borrow_mut();
        if !chunk.changed {
            return None;
        }
        chunk.changed = false;
        let has_row = !chunk.map.is_empty();
        let had_row = std::mem::replace(&mut chunk.has_row, has_row);
        let (allocated, freed) = (std::mem::take(&mut chunk.allocated), std::mem::take(&mut chunk.freed));
        Some(Changes { key, chunk: this.clone(), map: chunk.map.clone(), had_row, allocated, freed })
    }
}

/// Adds a run, merged with the last one if it follows directly.
fn push_run(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some((start, count)) if *start + *count == run.0 => *count += run.1,
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(first: u32, count: u32, block: u64) -> Extent {
        Extent { first, count, block, reserved: false }
    }

    #[test]
    fn places_become_reserved_and_data_again() {
        let mut chunk = Chunk::with_map(vec![extent(0, 8, 100)]);
        chunk.set_reserved(8..9, true);
        assert!(!chunk.changed, "nothing has a place there");
        chunk.set_reserved(2..5, true);
        assert!(chunk.changed);
        let reserved = Extent { reserved: true, ..extent(2, 3, 102) };
        assert_eq!(chunk.map, [extent(0, 2, 100), reserved, extent(5, 3, 105)]);
        assert_eq!([chunk.lookup(1), chunk.lookup(2), chunk.lookup(5)], [Some(101), None, Some(105)]);
        assert_eq!(chunk.place(4), Some((104, true)));
        assert!(chunk.has_space(4) && !chunk.has_space(8));
        chunk.set_reserved(0..4, false);
        assert_eq!(chunk.map[1], Extent { reserved: true, ..extent(4, 1, 104) });
        chunk.set_reserved(4..5, false);
        assert_eq!(chunk.map, [extent(0, 8, 100)], "whole again");
        assert!(chunk.freed.is_empty() && chunk.allocated.is_empty(), "no block changed hands");
    }

    #[test]
    fn a_map_changes_and_says_what_falls_out() {
        let mut chunk = Chunk::with_map(vec![extent(0, 8, 100)]);
        assert!(chunk.put(extent(2, 2, 200)).is_empty());
        assert_eq!(chunk.freed, [(102, 2)]);
        assert_eq!([chunk.lookup(1), chunk.lookup(2), chunk.lookup(4)], [Some(101), Some(200), Some(104)]);
        assert_eq!([chunk.run_at(0, 8), chunk.run_at(3, 8)], [(Some(100), 2), (Some(201), 1)]);
        assert_eq!([chunk.run_at(5, 7), chunk.run_at(8, 20)], [(Some(105), 2), (None, 12)]);
        // Blocks allocated since the last commit are returned for immediate reuse.
        assert_eq!(chunk.cut(3, 3), [(201, 1)]);
        assert_eq!(chunk.freed, [(102, 4)]);
        assert_eq!(chunk.allocated, [(200, 1)]);
        assert_eq!([chunk.lookup(3), chunk.lookup(6)], [None, Some(106)]);
        assert!(chunk.put(extent(3, 1, 201)).is_empty());
        assert_eq!(chunk.map[1], extent(2, 2, 200));
    }

    #[test]
    fn a_cut_that_could_not_be_committed_leaves_nothing() {
        let chunk = Rc::new(RefCell::new(Chunk::with_map(vec![extent(0, 8, 100)])));
        chunk.borrow_mut().put(extent(8, 2, 200));
        let before = chunk.borrow().mapped();
        let map = before.map.clone();
        assert_eq!(chunk.borrow_mut().cut(4, u32::MAX), [(200, 2)]);
        let key = ChunkKey { branch: 0, ino: penstock_base::Ino(7), index: 0 };
        Chunk::take_changes(&chunk, key).unwrap().put_back();
        chunk.borrow_mut().restore(before);
        let chunk = chunk.borrow();
        assert_eq!((&chunk.map, &chunk.allocated[..]), (&map, &[(200, 2)][..]));
        assert!(chunk.freed.is_empty() && chunk.changed && chunk.has_row);
    }
}
