//! Truncates and removes files.
//!
//! The rows change in the caller's transaction, together with the file's size or with the removal of its
//! inode, so that a crash never shows one without the other.

use crate::ChunkError;
use crate::cache::Changes;
use crate::files::{FileState, Known, REMOVED};
use crate::rows::ChunkKey;
use crate::target::Target;
use penstock_base::FileId;
use penstock_base::num::to_u32;
use penstock_kv::WriteSet;
use std::collections::BTreeSet;
use std::ops::Range;

/// Treatment of the blocks behind the new end of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// They are freed.
    Dropped,
    /// They become preallocated, including those with data.
    Preallocated,
}

/// The chunks that a truncation changes.
pub(crate) enum Chunks {
    /// All from its first block to this one, at the end of a chunk or `u64::MAX`.
    Until(u64),
    /// These, none of which ends before its first block.
    These(BTreeSet<ChunkKey>),
}

/// The blocks and chunks that a truncation changes.
pub(crate) struct Doomed {
    /// The first block, counted from the start of the file.
    pub(crate) from: u64,
    pub(crate) chunks: Chunks,
}

impl Behind {
    /// The treatment for a file of `before` bytes that gets `size`. Only a smaller size frees blocks;
    /// otherwise the blocks preallocated behind the end are kept.
    pub fn of(size: u64, before: u64) -> Self {
        if size < before { Self::Dropped } else { Self::Preallocated }
    }
}

impl Target {
    /// Makes these blocks of a file read as zeros and commits that together with `writes`. Later writes with
    /// an older truncate generation than the one in `known` are rejected; it is [`crate::REMOVED`] for a file
    /// that is being removed, whose last step begins at block 0 and removes the inode in `writes`. The range
    /// ends at the end of a chunk or at `u64::MAX`.
    pub async fn truncate(
        &self,
        file: FileId,
        blocks: Range<u64>,
        behind: Behind,
        known: Known,
        writes: WriteSet,
    ) -> Result<(), ChunkError> {
        let doomed = Doomed { from: blocks.start, chunks: Chunks::Until(blocks.end) };
        self.truncate_doomed(file, doomed, behind, known, writes).await
    }

    /// The same with the chunks that are doomed.
    pub(crate) async fn truncate_doomed(
        &self,
        file: FileId,
        doomed: Doomed,
        behind: Behind,
        known: Known,
        mut writes: WriteSet,
    ) -> Result<(), ChunkError> {
        let _changing = self.gate.change().await;
        let _lock = self.commits.lock(file).await;
        let state = self.cache.file(file).await?;
        // Before the chunks are listed: from here on no write of an earlier generation makes another one.
        let owner_before = state.set_owner(known.owner);
        let generation_before = state.truncate(known.truncations);
        assert!(state.truncations() >= known.truncations, "later writes of earlier ones are rejected");
        writes.changes_what_is_there();
        // The last step of a removal has the deletion of the inode in `writes`.
        state.set_ended(known.truncations == REMOVED && doomed.from == 0);
        let result = self.truncate_listed(file, &state, doomed, behind, writes).await;
        if result.is_err() {
            // Writes with its old truncate generation are accepted again.
            state.set_ended(false);
            state.undo_truncation(generation_before);
            state.undo_owner(owner_before);
        }
        result
    }

    /// Changes the chunks that a file has, or none of them.
    async fn truncate_listed(
        &self,
        file: FileId,
        state: &FileState,
        Doomed { from: first_block, chunks: doomed }: Doomed,
        behind: Behind,
        writes: WriteSet,
    ) -> Result<(), ChunkError> {
        let per_chunk = u64::from(self.config.chunk_blocks);
        let mut locks = Vec::new();
        let mut chunks = Vec::new();
        let keys = match doomed {
            Chunks::These(keys) => keys,
            // The end of a longer truncation may have nothing left to clear, and only changes rows.
            Chunks::Until(end) if end <= first_block => BTreeSet::new(),
            Chunks::Until(end) => {
                assert!(end == u64::MAX || end.is_multiple_of(per_chunk), "block {end} begins a chunk");
                // Without an end, also chunks that no file has, which only a damaged row names.
                let end = if end == u64::MAX { u64::MAX } else { end / per_chunk };
                self.cache.keys_within(file, first_block / per_chunk..end).await?
            }
        };
        for key in keys {
            locks.push(self.cache.exclusive(key).await);
            chunks.push((key, self.cache.get(key).await?));
        }
        // A row that stays may point to blocks written since the last commit, including preallocated ones
        // that were filled. Flushed before anything changes, so that a truncation that fails here has no
        // effect.
        if chunks.iter().any(|(_, chunk)| chunk.borrow().map().is_changed()) {
            self.volumes.flush(file).await?;
        }
        let mut changes = Vec::new();
        let mut back = Vec::new();
        let mut before = Vec::new();
        let from = |key: &ChunkKey| {
            to_u32((first_block.saturating_sub(key.index.saturating_mul(per_chunk))).min(per_chunk))
        };
        for (key, chunk) in &chunks {
            before.push(chunk.borrow().map().clone());
            let from = from(key);
            match behind {
                Behind::Dropped => back.extend(chunk.borrow_mut().change(|map| map.remove(from, u32::MAX))),
                Behind::Preallocated => {
                    chunk.borrow_mut().change(|map| map.set_preallocated(from..u32::MAX, true));
                }
            }
            changes.extend(Changes::take(*key, chunk));
        }
        if let Err(error) = self.commits.commit_rows(file, state, changes, writes).await {
            // The file keeps its blocks.
            for ((_, chunk), before) in chunks.iter().zip(before) {
                chunk.borrow_mut().change(|map| *map = before);
            }
            return Err(error);
        }
        for (key, chunk) in &chunks {
            let dropped = self.cache.drop_dirty(*key, chunk, from(key)..u32::MAX);
            self.allocator.release(dropped.reserved);
        }
        self.allocator.give_back_uncommitted(back);
        Ok(())
    }

    /// Returns the blocks at which a truncation to `first_block` can stop on its way, the last one first, so
    /// that no step changes more than `most` existing chunks.
    pub async fn truncate_steps(
        &self,
        file: FileId,
        first_block: u64,
        most: usize,
    ) -> Result<Vec<u64>, ChunkError> {
        assert!(most > 0, "a step changes a chunk");
        // A commit in flight has taken changes, and gives them back if it fails.
        let _lock = self.commits.lock(file).await;
        // Each row names a block at least, unless the chunk was changed since, so most files need no look at
        // their rows.
        let changed = self.cache.keys_of(file, |chunk| chunk.map().is_changed()).len() as u64;
        if self.cache.file(file).await?.held() + changed <= most as u64 {
            return Ok(Vec::new());
        }
        let per_chunk = u64::from(self.config.chunk_blocks);
        let keys = self.cache.keys_within(file, first_block / per_chunk..u64::MAX).await?;
        // The first chunk is left to the end, so that the last step changes something.
        let first = keys.first().copied();
        let stops = keys.iter().rev().skip(most - 1).step_by(most).filter(|key| Some(**key) > first);
        // A damaged row may name a chunk that no file has. The step before includes it.
        let stops = stops.filter_map(|key| key.index.checked_mul(per_chunk));
        Ok(stops.filter(|stop| *stop > first_block).collect())
    }
}

#[cfg(test)]
mod tests;
