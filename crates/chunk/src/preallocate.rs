//! Preallocates space of files ahead of writes, and punches holes.
//!
//! A preallocated block (`preallocated` in its extent) has a volume block like any other, but reads as zeros.
//! So a write to it needs no further space. A crash shows zeros until the row marks the block as data, which
//! happens only once the data is durable.
//!
//! Nothing here is durable before a commit of the file. Power cut: the row of each chunk has either the old
//! state or the new one.

use crate::ChunkError;
use crate::allocator::Source;
use crate::cache::Chunk;
use crate::files::Knows;
use crate::part::Part;
use crate::rows::{ChunkKey, Extent};
use crate::target::Target;
use penstock_base::num::to_u32;
use penstock_base::{Birth, FileId};
use std::cell::RefCell;
use std::ops::Range;

/// Chunks that change before their rows are committed, which bounds the uncommitted changes in memory.
const STEP_CHUNKS: u64 = 4096;

impl Target {
    /// Preallocates all blocks of a part of a file that have no space yet. With `zero`, the other blocks of
    /// it read as zeros afterwards as well. Does nothing if free space does not suffice.
    pub async fn preallocate(
        &self,
        file: FileId,
        part: impl Into<Part>,
        zero: bool,
        known: impl Knows,
    ) -> Result<(), ChunkError> {
        let part = part.into();
        self.lending.with_space(async || self.suffices(file, &part).await).await?;
        for (done, index) in (1..).zip(part.chunks(self.config.chunk_blocks)) {
            let key = ChunkKey { file, index };
            let within = self.within(key, &part.blocks);
            // Others may have what was free before, and loans may have been given back.
            let act = async || self.preallocate_in(key, within.clone(), zero, &known).await;
            self.lending.with_space(act).await?;
            if done % STEP_CHUNKS == 0 {
                self.commit(file, true).await?;
            }
        }
        Ok(())
    }

    /// Frees the space of a part of a file, which reads as zeros afterwards. The request was sent under the
    /// truncate generation `sent`.
    pub async fn punch(&self, file: FileId, part: impl Into<Part>, sent: u64) -> Result<(), ChunkError> {
        let of_file = part.into();
        let mut next = self.chunk_in(ChunkKey { file, index: 0 }, &of_file).await?;
        let mut punched = 0;
        while let Some(key) = next {
            let part = self.within(key, &of_file.blocks);
            let lock = self.cache.exclusive(key).await;
            let chunk = self.cache.get(key).await?;
            chunk.borrow().file().check(sent)?;
            let dropped = self.cache.drop_dirty(key, &chunk, part.clone());
            self.allocator.release(dropped.reserved);
            let back = chunk.borrow_mut().change(|map| map.remove(part.start, part.end - part.start));
            self.allocator.give_back_uncommitted(back);
            drop((lock, chunk));
            punched += 1;
            if punched % STEP_CHUNKS == 0 {
                self.commit(file, true).await?;
            }
            next = self.chunk_in(ChunkKey { index: key.index + 1, ..key }, &of_file).await?;
        }
        Ok(())
    }

    /// Returns the part of a range of file blocks that is in a chunk, as blocks of that chunk.
    fn within(&self, key: ChunkKey, blocks: &Range<u64>) -> Range<u32> {
        let per_chunk = u64::from(self.config.chunk_blocks);
        let first = key.index.saturating_mul(per_chunk);
        let at = |block: u64| to_u32(block.saturating_sub(first).min(per_chunk));
        let within = at(blocks.start)..at(blocks.end);
        assert!(within.start <= within.end, "{blocks:?} are in order");
        within
    }

    /// Returns the first chunk, from `from` on, that has blocks in the part and has a row or is in memory.
    async fn chunk_in(&self, from: ChunkKey, part: &Part) -> Result<Option<ChunkKey>, ChunkError> {
        let Part { blocks, share } = part;
        let per_chunk = u64::from(self.config.chunk_blocks);
        let mut index = from.index.max(blocks.start / per_chunk);
        loop {
            index = share.next(index);
            let found = self.cache.next_key(ChunkKey { index, ..from }).await?;
            match found.filter(|key| key.index < blocks.end.div_ceil(per_chunk)) {
                Some(key) if !share.has(key.index) => index = key.index,
                found => return Ok(found),
            }
        }
    }

    /// Fails with [`ChunkError::NoSpace`] if free space does not suffice for the blocks of a part that have
    /// none.
    async fn suffices(&self, file: FileId, part: &Part) -> Result<(), ChunkError> {
        let mut wanted = part.len(self.config.chunk_blocks);
        let mut next = self.chunk_in(ChunkKey { file, index: 0 }, part).await?;
        while let Some(key) = next {
            let _lock = self.cache.shared(key).await;
            let chunk = self.cache.get(key).await?;
            let within = self.within(key, &part.blocks);
            let lacking: u32 = chunk.borrow().without_space(within.clone()).iter().map(range_len).sum();
            wanted -= u64::from(range_len(&within) - lacking);
            next = self.chunk_in(ChunkKey { index: key.index + 1, ..key }, part).await?;
        }
        // Only a test: each chunk makes its own reservation later.
        self.allocator.reserve(wanted)?;
        self.allocator.release(wanted);
        Ok(())
    }

    async fn preallocate_in(
        &self,
        key: ChunkKey,
        blocks: Range<u32>,
        zero: bool,
        known: &dyn Knows,
    ) -> Result<(), ChunkError> {
        let _lock = self.cache.exclusive(key).await;
        let chunk = self.cache.get(key).await?;
        chunk.borrow().file().begin(known)?;
        // With `zero`, a dirty block without a volume block gets one too, out of the reservation that it has
        // already.
        let lacking = chunk.borrow().without_space(blocks.clone());
        let missing = match zero {
            true => chunk.borrow().map().unplaced(blocks.clone()),
            false => lacking.clone(),
        };
        self.allocator.reserve(lacking.iter().map(range_len).sum::<u32>().into())?;
        if zero {
            let dropped = self.cache.drop_dirty(key, &chunk, blocks.clone());
            let held: u32 =
                missing.iter().map(range_len).sum::<u32>() - lacking.iter().map(range_len).sum::<u32>();
            // So have those whose volume blocks are lost.
            assert!(
                dropped.reserved >= held.into(),
                "dirty blocks without a volume block have a reservation"
            );
            self.allocator.release(dropped.reserved - u64::from(held));
            chunk.borrow_mut().change(|map| map.set_preallocated(blocks, true));
        }
        self.allocate(&chunk, &missing).await
    }

    /// Allocates volume blocks for `missing`, which have none. Free space is reserved for them, and the
    /// reservation is released on success and on failure.
    async fn allocate(&self, chunk: &RefCell<Chunk>, missing: &[Range<u32>]) -> Result<(), ChunkError> {
        let mut left: u32 = missing.iter().map(range_len).sum();
        for range in missing {
            let mut first = range.start;
            while first < range.end {
                let allocated =
                    self.allocator.allocate_reserved(u64::from(range.end - first), Source::Any).await;
                let Ok((block, count)) = allocated else {
                    self.allocator.release(left.into());
                    return allocated.map(drop);
                };
                self.allocator.release(count);
                let count = to_u32(count);
                let new = Extent { first, count, block, preallocated: true, birth: Birth::FIRST };
                let back = chunk.borrow_mut().change(|map| map.put(new));
                assert!(back.is_empty(), "nothing had a place there");
                first += count;
                left -= count;
            }
        }
        assert_eq!(left, 0, "every missing block has a place");
        Ok(())
    }
}

/// The number of blocks of a range.
fn range_len(range: &Range<u32>) -> u32 {
    range.end - range.start
}

#[cfg(test)]
mod tests;
