//! The chunk store as the name space sees it: few methods, so that tests can put a store in memory in its
//! place.

use penstock_base::{FileId, LocalBoxFuture};
use penstock_chunk::{Behind, ChunkError, Known, Owner, SpaceUsage, Target, WantedRow};
use penstock_kv::WriteSet;
use std::ops::Range;

/// The contents of files, in chunks.
///
/// Invariant: a truncation and the transaction that it is given are applied together or not at all.
pub trait ChunkStore {
    /// Blocks in a chunk of new files.
    fn chunk_blocks(&self) -> u32;

    /// A number that changes with every start.
    fn generation(&self) -> u64;

    /// Total, free and headroom blocks.
    fn usage(&self) -> SpaceUsage;

    /// A file is new: it has no chunk.
    fn file_made(&self, file: FileId);

    /// A file was removed, with all its chunks.
    fn file_removed(&self, file: FileId);

    /// Blocks that each file holds.
    fn held_blocks(&self, files: Vec<FileId>) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>>;

    /// Blocks that a file holds, or the row to be read for that.
    fn held_or_row(&self, file: FileId) -> Result<u64, WantedRow>;

    /// The blocks of a file whose row was read.
    fn held_by_row(&self, wanted: &WantedRow, row: Option<Vec<u8>>) -> u64;

    /// Counts a file to another owner, in one transaction with `writes`.
    fn set_owner(
        &self,
        file: FileId,
        owner: Owner,
        writes: WriteSet,
    ) -> LocalBoxFuture<'_, Result<(), ChunkError>>;

    /// Makes blocks of a file read as zeros, in one transaction with `writes`. Later writes to the file that
    /// were sent with an older truncate generation than the one in `known` are rejected. The range ends at
    /// the end of a chunk or at `u64::MAX`.
    fn truncate(
        &self,
        file: FileId,
        blocks: Range<u64>,
        behind: Behind,
        known: Known,
        writes: WriteSet,
    ) -> LocalBoxFuture<'_, Result<(), ChunkError>>;

    /// The blocks at which a truncation to `first_block` can stop on its way, the last one first, so that no
    /// step changes more than `most` chunks.
    fn truncate_steps(
        &self,
        file: FileId,
        first_block: u64,
        most: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>>;

    /// Makes everything durable that was written. If a file fails, the others are still committed.
    fn commit_all(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>>;

    /// Makes committed rows durable, also those of the name space, which share the key-value store.
    fn sync(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>>;
}

impl ChunkStore for Target {
    fn chunk_blocks(&self) -> u32 {
        self.config().chunk_blocks
    }

    fn generation(&self) -> u64 {
        self.config().generation
    }

    fn usage(&self) -> SpaceUsage {
        Target::usage(self)
    }

    fn file_made(&self, file: FileId) {
        Target::file_made(self, file);
    }

    fn file_removed(&self, file: FileId) {
        Target::file_removed(self, file);
    }

    fn held_blocks(&self, files: Vec<FileId>) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>> {
        Box::pin(async move { Target::held_blocks(self, &files).await })
    }

    fn held_or_row(&self, file: FileId) -> Result<u64, WantedRow> {
        Target::held_or_row(self, file)
    }

    fn held_by_row(&self, wanted: &WantedRow, row: Option<Vec<u8>>) -> u64 {
        Target::held_by_row(self, wanted, row)
    }

    fn set_owner(
        &self,
        file: FileId,
        owner: Owner,
        writes: WriteSet,
    ) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(Target::set_owner(self, file, owner, writes))
    }

    fn truncate(
        &self,
        file: FileId,
        blocks: Range<u64>,
        behind: Behind,
        known: Known,
        writes: WriteSet,
    ) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(Target::truncate(self, file, blocks, behind, known, writes))
    }

    fn truncate_steps(
        &self,
        file: FileId,
        first_block: u64,
        most: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>> {
        Box::pin(Target::truncate_steps(self, file, first_block, most))
    }

    fn commit_all(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(Target::commit_all(self))
    }

    fn sync(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(Target::sync(self))
    }
}
