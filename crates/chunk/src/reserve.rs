//! Preallocates space of files ahead of writes, and punches holes.
//!
//! A preallocated block (`reserved` in its extent) has a volume block like any other, but reads as zeros. So
//! a write to it needs no further space. A crash shows zeros until the row marks the block as data, which
//! happens only once the data is durable.
//!
//! Nothing here is durable before a commit of the file. Power cut: the row of each chunk has either the old
//! state or the new one.

use crate::ChunkError;
use crate::chunk::Chunk;
use crate::rows::{ChunkKey, Extent};
use crate::target::Target;
use penstock_base::Ino;
use std::cell::RefCell;
use std::ops::Range;

/// Chunks that change before their rows are committed, which bounds the uncommitted changes in memory.
const STEP_CHUNKS: u64 = 4096;

impl Target {
    /// Preallocates all of `blocks` of a file that have no space yet. With `zero`, the other blocks read as
    /// zeros afterwards as well. Does nothing if free space does not suffice. `cut` is the truncate
    /// generation that the caller knows.
    pub async fn reserve(
        &self,
        branch: u64,
        ino: Ino,
        blocks: Range<u64>,
        zero: bool,
        cut: u64,
    ) -> Result<(), ChunkError> {
        let file = ChunkKey { branch, ino, index: 0 };
        if self.suffices(file, &blocks).await.is_err() {
            // Freed blocks may be waiting only for a durable commit.
            self.commit_all().await?;
            self.suffices(file, &blocks).await?;
        }
        let per_chunk = u64::from(self.config.chunk_blocks);
        let last = blocks.end.div_ceil(per_chunk);
        for index in blocks.start / per_chunk..last {
            let key = ChunkKey { index, ..file };
            self.reserve_in(key, self.within(key, &blocks), zero, cut).await?;
            if index % STEP_CHUNKS == STEP_CHUNKS - 1 {
                self.commit(branch, ino, true).await?;
            }
        }
        Ok(())
    }

    /// Frees the space of `blocks` of a file, which read as zeros afterwards.
    pub async fn punch(&self, branch: u64, ino: Ino, blocks: Range<u64>, cut: u64) -> Result<(), ChunkError> {
        let mut next = self.chunk_in(ChunkKey { branch, ino, index: 0 }, &blocks).await?;
        let mut punched = 0;
        while let Some(key) = next {
            let part = self.within(key, &blocks);
            let lock = self.chunk_locks.exclusive(key).await;
            self.check_cut(key, cut)?;
            let chunk = self.chunk(key).await?;
            self.drop_dirty(key, &chunk, part.clone());
            let back = chunk.borrow_mut().cut(part.start, part.end - part.start);
            self.give_back(back);
            drop((lock, chunk));
            punched += 1;
            if punched % STEP_CHUNKS == 0 {
                self.commit(branch, ino, true).await?;
            }
            next = self.chunk_in(ChunkKey { index: key.index + 1, ..key }, &blocks).await?;
        }
        Ok(())
    }

    /// Returns the part of a range of file blocks that is in a chunk, as blocks of that chunk.
    fn within(&self, key: ChunkKey, blocks: &Range<u64>) -> Range<u32> {
        let per_chunk = u64::from(self.config.chunk_blocks);
        let first = key.index.saturating_mul(per_chunk);
        let at = |block: u64| block.saturating_sub(first).min(per_chunk) as u32;
        at(blocks.start)..at(blocks.end)
    }

    /// Returns the first chunk, from `from` on, that has blocks in the range and has a row or is in memory.
    async fn chunk_in(&self, from: ChunkKey, blocks: &Range<u64>) -> Result<Option<ChunkKey>, ChunkError> {
        let per_chunk = u64::from(self.config.chunk_blocks);
        let from = ChunkKey { index: from.index.max(blocks.start / per_chunk), ..from };
        Ok(self.next_chunk(from).await?.filter(|key| key.index < blocks.end.div_ceil(per_chunk)))
    }

    /// Fails with [`ChunkError::NoSpace`] if free space does not suffice for the blocks of a range that have
    /// none.
    async fn suffices(&self, file: ChunkKey, blocks: &Range<u64>) -> Result<(), ChunkError> {
        let mut wanted = blocks.end - blocks.start;
        let mut next = self.chunk_in(file, blocks).await?;
        while let Some(key) = next {
            let _lock = self.chunk_locks.shared(key).await;
            let chunk = self.chunk(key).await?;
            let there = {
                let chunk = chunk.borrow();
                self.within(key, blocks).filter(|block| chunk.has_space(*block)).count()
            };
            wanted -= there as u64;
            next = self.chunk_in(ChunkKey { index: key.index + 1, ..key }, blocks).await?;
        }
        // Only a test: each chunk makes its own reservation later.
        self.promise(wanted)?;
        self.space.borrow_mut().unpromise(wanted);
        Ok(())
    }

    async fn reserve_in(
        &self,
        key: ChunkKey,
        blocks: Range<u32>,
        zero: bool,
        cut: u64,
    ) -> Result<(), ChunkError> {
        let _lock = self.chunk_locks.exclusive(key).await;
        self.check_cut(key, cut)?;
        let chunk = self.chunk(key).await?;
        let (missing, held): (Vec<u32>, u64) = {
            let chunk = chunk.borrow();
            // With `zero`, a dirty block without a volume block gets one too, out of the reservation that it
            // has already.
            let lacks = |block: &u32| match zero {
                true => chunk.place(*block).is_none(),
                false => !chunk.has_space(*block),
            };
            let missing: Vec<u32> = blocks.clone().filter(lacks).collect();
            let held = missing.iter().filter(|block| chunk.dirty.contains_key(*block)).count();
            (missing, held as u64)
        };
        self.promise(missing.len() as u64 - held)?;
        if zero {
            let taken = self.take_dirty(key, &chunk, blocks.clone());
            assert_eq!(taken, held, "exactly the dirty blocks without a volume block have a reservation");
            chunk.borrow_mut().set_reserved(blocks, true);
        }
        self.reserve_promised(&chunk, &missing).await
    }

    /// Allocates volume blocks for `missing`, which have none. Free space is reserved for them, and the
    /// reservation is released on success and on failure.
    async fn reserve_promised(&self, chunk: &RefCell<Chunk>, missing: &[u32]) -> Result<(), ChunkError> {
        let mut left = missing;
        while let Some(first) = left.first().copied() {
            let run = left.iter().zip(first..).take_while(|(block, expected)| *block == expected).count();
            let allocated = self.allocate_promised(run as u64).await;
            let Ok((block, count)) = allocated else {
                self.space.borrow_mut().unpromise(left.len() as u64);
                return allocated.map(drop);
            };
            self.space.borrow_mut().unpromise(count);
            let back = chunk.borrow_mut().put(Extent { first, count: count as u32, block, reserved: true });
            assert!(back.is_empty(), "nothing had a place there");
            left = &left[count as usize..];
        }
        Ok(())
    }
}
