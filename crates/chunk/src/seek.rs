//! Finds data and holes in files, from the maps of their chunks and from dirty blocks in memory.
//!
//! A block is data if it is dirty or has a volume block that is not only preallocated; all others are holes.
//! A search for data skips chunks that have no row and are not in memory, so its cost depends on the existing
//! chunks and not on the length of the file.

use crate::ChunkError;
use crate::rows::ChunkKey;
use crate::target::Target;
use penstock_base::FileId;
use penstock_base::num::to_u32;
use std::ops::Range;

impl Target {
    /// Returns the first block of a file within `blocks` that is data, or with `hole` the first that is a
    /// hole. Returns the end of `blocks` if there is none.
    pub async fn seek(&self, file: FileId, blocks: Range<u64>, hole: bool) -> Result<u64, ChunkError> {
        let per_chunk = u64::from(self.config.chunk_blocks);
        let mut at = blocks.start;
        while at < blocks.end {
            let index = at / per_chunk;
            let here = ChunkKey { file, index };
            let next = if hole { Some(here) } else { self.cache.next_key(here).await? };
            let Some(key) = next else { return Ok(blocks.end) };
            let Some(first) = key.first_block(self.config.chunk_blocks).filter(|first| *first < blocks.end)
            else {
                return Ok(blocks.end);
            };
            at = at.max(first);
            let _lock = self.cache.shared(key).await;
            let chunk = self.cache.get(key).await?;
            let chunk = chunk.borrow();
            let mut within = to_u32(at - first)..self.config.chunk_blocks;
            if let Some(found) = within.find(|block| chunk.is_data(*block) != hole) {
                return Ok(blocks.end.min(first + u64::from(found)));
            }
            at = first + per_chunk;
        }
        Ok(blocks.end)
    }
}

#[cfg(test)]
mod tests;
