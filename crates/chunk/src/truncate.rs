//! Truncates and removes files.
//!
//! The rows change in the caller's transaction, together with the file's size or with the removal of its
//! inode, so that a crash never shows one without the other.

use crate::ChunkError;
use crate::chunk::Chunk;
use crate::rows::{ChunkKey, map_range};
use crate::target::Target;
use penstock_base::Ino;
use penstock_kv::{WriteSet, for_each_key};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;

/// Treatment of the blocks behind the new end of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behind {
    /// They are freed.
    Dropped,
    /// They become preallocated, including those with data.
    Reserved,
}

impl Behind {
    /// The treatment for a file of `before` bytes that gets `size`. Only a smaller size frees blocks;
    /// otherwise the blocks preallocated behind the end are kept.
    pub fn of(size: u64, before: u64) -> Self {
        if size < before { Self::Dropped } else { Self::Reserved }
    }
}

impl Target {
    /// Makes these blocks of a file read as zeros and commits that together with `writes`. Later writes with
    /// an older truncate generation than `cut` are rejected. The range ends at the end of a chunk or at
    /// `u64::MAX`.
    pub async fn cut(
        &self,
        branch: u64,
        ino: Ino,
        blocks: Range<u64>,
        behind: Behind,
        cut: u64,
        mut writes: WriteSet,
    ) -> Result<(), ChunkError> {
        let _open = self.gate.read().await;
        let _lock = self.inode_locks.exclusive((branch, ino)).await;
        let per_chunk = u64::from(self.config.chunk_blocks);
        let first_block = blocks.start;
        debug_assert!(blocks.end == u64::MAX || blocks.end.is_multiple_of(per_chunk));
        let mut locks = Vec::new();
        let mut chunks = Vec::new();
        for key in
            self.keys_within(branch, ino, first_block / per_chunk..blocks.end.div_ceil(per_chunk)).await?
        {
            locks.push(self.chunk_locks.exclusive(key).await);
            chunks.push((key, self.chunk(key).await?));
        }
        // A row that stays may point to blocks written since the last commit, including preallocated ones
        // that were filled. Flushed before anything changes, so that a truncation that fails here has no
        // effect.
        if chunks.iter().any(|(_, chunk)| chunk.borrow().changed) {
            self.volume.flush().await?;
        }
        let known = self.cuts.borrow().get(&(branch, ino)).copied();
        self.cuts.borrow_mut().insert((branch, ino), cut.max(known.unwrap_or(0)));
        let mut changes = Vec::new();
        let mut back = Vec::new();
        let mut before = Vec::new();
        let from = |key: &ChunkKey| {
            (first_block.saturating_sub(key.index.saturating_mul(per_chunk))).min(per_chunk) as u32
        };
        for (key, chunk) in &chunks {
            before.push(chunk.borrow().mapped());
            let from = from(key);
            match behind {
                Behind::Dropped => back.extend(chunk.borrow_mut().cut(from, u32::MAX)),
                Behind::Reserved => chunk.borrow_mut().set_reserved(from..u32::MAX, true),
            }
            changes.extend(Chunk::take_changes(chunk, *key));
        }
        writes.changes_what_is_there();
        if let Err(error) = self.commit_rows(changes, writes).await {
            // Undo everything: the file keeps its blocks, and writes with its old truncate generation are
            // accepted again.
            for ((_, chunk), before) in chunks.iter().zip(before) {
                chunk.borrow_mut().restore(before);
            }
            match known {
                Some(known) => self.cuts.borrow_mut().insert((branch, ino), known),
                None => self.cuts.borrow_mut().remove(&(branch, ino)),
            };
            return Err(error);
        }
        chunks.iter().for_each(|(key, chunk)| self.drop_dirty(*key, chunk, from(key)..u32::MAX));
        self.give_back(back);
        Ok(())
    }

    /// Returns the blocks at which a truncation to `first_block` can stop on its way, the last one first, so
    /// that no step changes more than `most` existing chunks.
    pub async fn cut_steps(
        &self,
        branch: u64,
        ino: Ino,
        first_block: u64,
        most: usize,
    ) -> Result<Vec<u64>, ChunkError> {
        let per_chunk = u64::from(self.config.chunk_blocks);
        let keys = self.keys_within(branch, ino, first_block / per_chunk..u64::MAX).await?;
        let stops = keys.iter().rev().skip(most - 1).step_by(most).map(|key| key.index * per_chunk);
        Ok(stops.filter(|stop| *stop > first_block).collect())
    }

    /// Forgets the truncate generation and the empty chunks of a file that was removed.
    pub fn forget(&self, branch: u64, ino: Ino) {
        self.cuts.borrow_mut().remove(&(branch, ino));
        self.whole.forget(&(branch, ino));
        let keys = self.keys_of(branch, ino, |chunk| chunk.is_clean() && chunk.map.is_empty());
        keys.iter().for_each(|key| drop(self.chunks.borrow_mut().remove(key)));
    }

    /// Returns the keys of the chunks with these indices that have a row or are in memory.
    async fn keys_within(
        &self,
        branch: u64,
        ino: Ino,
        indices: Range<u64>,
    ) -> Result<BTreeSet<ChunkKey>, ChunkError> {
        let known = self.keys_of(branch, ino, |_| true).into_iter();
        let mut keys: BTreeSet<ChunkKey> = known.filter(|key| indices.contains(&key.index)).collect();
        if self.whole.contains(&(branch, ino)) {
            return Ok(keys);
        }
        let (from, mut until) = map_range(branch, ino, indices.start);
        if indices.end < u64::MAX {
            until = map_range(branch, ino, indices.end).0;
        }
        for_each_key(&*self.kv, (from, until), |key| {
            keys.insert(ChunkKey::decode(key)?.0);
            Ok::<_, ChunkError>(())
        })
        .await?;
        Ok(keys)
    }

    /// Drops dirty blocks of a range and releases their reservations.
    pub(crate) fn drop_dirty(&self, key: ChunkKey, chunk: &RefCell<Chunk>, blocks: Range<u32>) {
        let promised = self.take_dirty(key, chunk, blocks);
        self.space.borrow_mut().unpromise(promised);
    }

    /// Drops dirty blocks of a range. Returns the number of them that had a reservation, which passes to the
    /// caller.
    pub(crate) fn take_dirty(&self, key: ChunkKey, chunk: &RefCell<Chunk>, blocks: Range<u32>) -> u64 {
        let mut chunk = chunk.borrow_mut();
        let mut taken = chunk.dirty.split_off(&blocks.start);
        let mut kept = taken.split_off(&blocks.end);
        chunk.dirty.append(&mut kept);
        if taken.is_empty() {
            return 0;
        }
        self.dirty_blocks.set(self.dirty_blocks.get() - taken.len() as u64);
        if chunk.dirty.is_empty() {
            let waited = self.waiting.borrow_mut().remove(&chunk.since);
            assert_eq!(waited, Some(key), "a chunk waits once");
        }
        taken.values().filter(|block| block.promised).count() as u64
    }
}
