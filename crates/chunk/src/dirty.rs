//! Dirty blocks of a chunk in memory, kept as runs, so that a full chunk passes from a request to the drives
//! in one piece.
//!
//! A run is the data of adjacent blocks from one write, with a CRC32C of each. Adjacent runs of two writes
//! stay two.
//!
//! Invariants:
//! - runs do not overlap, and none is empty;
//! - all blocks of a run have a reservation of free space, or none has;
//! - the counters are the sums over all runs.
//!
//! Pure: the caller reserves and releases free space.

use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Buf};
use std::collections::BTreeMap;
use std::ops::Range;

/// Adjacent dirty blocks.
#[derive(Clone, Debug)]
struct Run {
    data: Buf,
    crcs: Vec<u32>,
    /// Each block has a reservation of a free block.
    reserved: bool,
}

impl Run {
    fn count(&self) -> u32 {
        to_u32(self.crcs.len())
    }

    /// Blocks of the run, counted from its first one.
    fn slice(&self, blocks: Range<u32>) -> Self {
        let (start, end) = (blocks.start as usize, blocks.end as usize);
        Self {
            data: self.data.slice(start * BLOCK_BYTES..end * BLOCK_BYTES),
            crcs: self.crcs[start..end].to_vec(),
            reserved: self.reserved,
        }
    }
}

/// Blocks that are no longer dirty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dropped {
    pub(crate) blocks: u64,
    /// Blocks among them that had a reservation: it passes to the caller.
    pub(crate) reserved: u64,
}

/// All dirty blocks of one chunk.
#[derive(Default)]
pub(crate) struct DirtyRuns {
    runs: BTreeMap<u32, Run>,
    blocks: u32,
    reserved: u32,
}

impl DirtyRuns {
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The number of dirty blocks.
    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The number of dirty blocks with a reservation.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.into()
    }

    /// The run that covers `block`, with its first block.
    fn run_of(&self, block: u32) -> Option<(u32, &Run)> {
        let (first, run) = self.runs.range(..=block).next_back()?;
        (block - first < run.count()).then_some((*first, run))
    }

    pub(crate) fn contains(&self, block: u32) -> bool {
        self.run_of(block).is_some()
    }

    /// The first dirty block at or after `block` and before `end`.
    pub(crate) fn next(&self, block: u32, end: u32) -> Option<u32> {
        if self.contains(block) {
            return (block < end).then_some(block);
        }
        self.runs.range(block..end).next().map(|(first, _)| *first)
    }

    /// Data and checksums from a dirty block on, up to `end` or the end of its run.
    pub(crate) fn get(&self, block: u32, end: u32) -> Option<(Buf, Vec<u32>)> {
        let (first, run) = self.run_of(block)?;
        let part = run.slice(block - first..run.count().min(end - first));
        Some((part.data, part.crcs))
    }

    /// Blocks of a range that are not dirty, as ranges in order.
    pub(crate) fn gaps(&self, blocks: Range<u32>) -> Vec<Range<u32>> {
        let mut gaps = Vec::new();
        let mut at = blocks.start;
        while at < blocks.end {
            match self.run_of(at) {
                Some((first, run)) => at = first + run.count(),
                None => {
                    let end = self.next(at, blocks.end).unwrap_or(blocks.end);
                    gaps.push(at..end);
                    at = end;
                }
            }
        }
        gaps
    }

    /// Makes blocks dirty. `reserved` are ranges of them that were not dirty and have a reservation now; a
    /// block that was dirty keeps the one that it had. Returns the number of blocks that were not dirty
    /// before.
    ///
    /// # Panics
    /// If data, checksums and reservations do not fit together.
    pub(crate) fn insert(&mut self, first: u32, data: &Buf, crcs: &[u32], reserved: &[Range<u32>]) -> u64 {
        let blocks = first..first + to_u32(crcs.len());
        assert_eq!(data.len(), crcs.len() * BLOCK_BYTES, "a checksum for each block");
        assert!(
            reserved.iter().all(|new| self.gaps(new.clone()) == [new.clone()]),
            "{reserved:?} are not dirty"
        );
        let before = self.blocks;
        let replaced = self.take(blocks.clone());
        let mut with: Vec<Range<u32>> = replaced
            .iter()
            .filter(|(_, run)| run.reserved)
            .map(|(at, run)| *at..at + run.count())
            .chain(reserved.iter().cloned())
            .collect();
        with.sort_by_key(|range| range.start);
        let all = Run { data: data.clone(), crcs: crcs.to_vec(), reserved: false };
        let mut at = blocks.start;
        let mut push = |this: &mut Self, until: u32, reserved: bool| {
            if at < until {
                let part = all.slice(at - first..until - first);
                this.push(at, Run { reserved, ..part });
                at = until;
            }
        };
        for range in joined(with) {
            push(self, range.start, false);
            push(self, range.end, true);
        }
        push(self, blocks.end, false);
        assert!(self.blocks >= before, "no block becomes clean by a write");
        u64::from(self.blocks - before)
    }

    fn push(&mut self, first: u32, run: Run) {
        self.blocks += run.count();
        self.reserved += if run.reserved { run.count() } else { 0 };
        assert!(
            run.count() > 0 && self.reserved <= self.blocks,
            "{} of {} blocks",
            self.reserved,
            self.blocks
        );
        let before = self.runs.insert(first, run);
        assert!(before.is_none(), "runs do not overlap");
    }

    /// Splits the run that has `block` in its middle, so that a run begins there.
    fn split_at(&mut self, block: u32) {
        let Some((first, run)) = self.run_of(block).filter(|(first, _)| *first < block) else { return };
        let (head, tail) = (run.slice(0..block - first), run.slice(block - first..run.count()));
        self.runs.insert(first, head);
        self.runs.insert(block, tail);
    }

    fn take(&mut self, blocks: Range<u32>) -> Vec<(u32, Run)> {
        self.split_at(blocks.start);
        self.split_at(blocks.end);
        let keys: Vec<u32> = self.runs.range(blocks).map(|(first, _)| *first).collect();
        let taken: Vec<_> = keys.into_iter().filter_map(|first| self.runs.remove_entry(&first)).collect();
        for (_, run) in &taken {
            self.blocks -= run.count();
            self.reserved -= if run.reserved { run.count() } else { 0 };
        }
        assert!(
            self.reserved <= self.blocks && self.runs.is_empty() == (self.blocks == 0),
            "{} of {} blocks in {} runs",
            self.reserved,
            self.blocks,
            self.runs.len()
        );
        taken
    }

    /// Drops the dirty blocks of a range.
    pub(crate) fn remove(&mut self, blocks: Range<u32>) -> Dropped {
        let mut dropped = Dropped::default();
        for (_, run) in self.take(blocks) {
            dropped.blocks += u64::from(run.count());
            dropped.reserved += if run.reserved { run.count().into() } else { 0 };
        }
        dropped
    }

    /// The first adjacent dirty blocks, at most `most`: the first block, the data in parts, and the
    /// checksums.
    pub(crate) fn first(&self, most: u32) -> Option<(u32, Vec<Buf>, Vec<u32>)> {
        assert!(most > 0, "a run has a block");
        let first = *self.runs.first_key_value()?.0;
        let (mut parts, mut crcs) = (Vec::new(), Vec::new());
        while let Some((data, sums)) = self.get(first + to_u32(crcs.len()), first.saturating_add(most)) {
            parts.push(data);
            crcs.extend(sums);
            if to_u32(crcs.len()) >= most {
                break;
            }
        }
        Some((first, parts, crcs))
    }
}

/// Joins adjacent ranges, which are sorted and do not overlap.
fn joined(ranges: Vec<Range<u32>>) -> Vec<Range<u32>> {
    let mut joined: Vec<Range<u32>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests;
