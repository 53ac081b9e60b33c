//! Finds data and holes in files, from the maps of their chunks and from dirty blocks in memory.
//!
//! A block is data if it is dirty or has a volume block that is not only preallocated; all others are holes.
//! A search for data skips chunks that have no row and are not in memory, so its cost depends on the existing
//! chunks and not on the length of the file.

use crate::ChunkError;
use crate::part::Part;
use crate::rows::ChunkKey;
use crate::target::Target;
use penstock_base::FileId;
use penstock_base::num::to_u32;

impl Target {
    /// Returns the first block of a part of a file that is data, or with `hole` the first that is a hole.
    /// Returns the end of its blocks if there is none.
    pub async fn seek(&self, file: FileId, part: impl Into<Part>, hole: bool) -> Result<u64, ChunkError> {
        let Part { blocks, share } = part.into();
        let per_chunk = u64::from(self.config.chunk_blocks);
        let mut index = share.next(blocks.start / per_chunk);
        loop {
            let here = ChunkKey { file, index };
            let next = if hole { Some(here) } else { self.cache.next_key(here).await? };
            let Some(key) = next else { return Ok(blocks.end) };
            let Some(first) = key.first_block(self.config.chunk_blocks).filter(|first| *first < blocks.end)
            else {
                return Ok(blocks.end);
            };
            if !share.has(key.index) {
                index = share.next(key.index);
                continue;
            }
            let _lock = self.cache.shared(key).await;
            let chunk = self.cache.get(key).await?;
            let chunk = chunk.borrow();
            let mut within = to_u32(blocks.start.max(first) - first)..self.config.chunk_blocks;
            if let Some(found) = within.find(|block| chunk.is_data(*block) != hole) {
                return Ok(blocks.end.min(first + u64::from(found)));
            }
            index = share.next(key.index + 1);
        }
    }
}

#[cfg(test)]
mod tests;
