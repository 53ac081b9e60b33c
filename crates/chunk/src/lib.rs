//! The storage target: the chunk store on one volume, with its map and free space in a key-value store.
//!
//! The map and the allocation groups are rows of that store. The target owns chunks, extents, free space, and
//! the dirty blocks in memory. It does not own files: a chunk is identified by (branch, inode, index), and
//! sizes, names and links belong to the metadata target.
//!
//! Invariants:
//! - A map row enters the key-value store only after the data it points to is durable on the volume, so a row
//!   never points to foreign bytes.
//! - A map row, the bits of its blocks, the row of the file and the account of its owner change in one
//!   transaction.
//! - Freed blocks count as used until the transaction that freed them is durable. Then they are reused or
//!   discarded.
//! - Dirty blocks in memory are bounded by [`DIRTY_BYTES`]: above it, a write waits until older ones are
//!   written back.
//!
//! The parts, each standing on those above it: `rows`, `map`, `dirty` and `free` are pure; `files` has what
//! is known of a file, `accounts` the blocks by owner; `cache` holds chunks in memory, `allocator` free
//! space; `volumes` is the volume with the loans of other targets; `writeback` takes dirty blocks there,
//! `commit` makes rows durable; `target` is the facade, `lending` what targets lend each other, `fsck` its
//! exclusive side, `copies` keeps copies of all rows on the volume, and `service` serves requests.
//!
//! Power cut: of uncommitted writes, each block is either fully present or fully lost. Blocks that were
//! allocated and not committed are free again, because no bit marks them as used.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod accounts;
mod allocator;
mod between;
mod cache;
mod commit;
pub mod copies;
mod counters;
mod dirty;
mod fetch;
mod files;
mod free;
mod fsck;
mod idle;
mod lending;
mod map;
mod part;
mod preallocate;
mod ranks;
pub mod rows;
mod seek;
mod service;
mod target;
#[cfg(test)]
mod tests;
mod truncate;
mod volumes;
mod work;
mod writeback;

pub use cache::WantedRow;
pub use counters::TargetCounts;
pub use files::{AsOf, Known, Knows, REMOVED};
pub use free::SpaceUsage;
pub use fsck::{DamagedRuns, Fsck, Owned, TargetCheck, TargetLoans, View};
pub use part::Part;
pub use rows::{
    Borrowed, ChunkKey, Extent, FileRow, Lent, LentKey, MapRow, Owner, all_maps, chunks_of_a_file, map_range,
};
pub use service::{FileUse, FileUses, Service};
pub use target::{Target, TargetConfig, TargetMemory};
pub use truncate::Behind;
pub use work::{Cut, Hold, TargetWork};

use penstock_array::ArrayError;
use penstock_base::{ErrorKind, TargetId};
use penstock_kv::KvError;

/// Bytes of dirty blocks that a target keeps in memory. Above this, a write first writes back the oldest
/// chunks.
pub const DIRTY_BYTES: u64 = 64 << 20;

/// Reasons why an operation on chunks failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ChunkError {
    /// Too few blocks are free outside the headroom.
    #[error("no space left: {free_blocks} blocks of 4 KiB are free and {wanted_blocks} are needed")]
    NoSpace {
        /// Free blocks outside the headroom and outside reservations.
        free_blocks: u64,
        /// Blocks that the operation needs.
        wanted_blocks: u64,
    },
    /// The write carries an older truncate generation than the file: it was sent before a truncation.
    #[error("the file was truncated since (truncate generation {found}, the write has {sent})")]
    Truncated {
        /// The truncate generation that the target knows.
        found: u64,
        /// The truncate generation that the write carries.
        sent: u64,
    },
    /// The request is malformed, for example because its blocks are outside the chunk.
    #[error("{0}")]
    Invalid(String),
    /// The blocks are a loan of a target that does not serve, or does not know of it.
    #[error("the blocks are on target {lender}, which is not there")]
    LenderAway {
        /// That target.
        lender: TargetId,
    },
    /// The volume below returned an error.
    #[error(transparent)]
    Array(#[from] ArrayError),
    /// The key-value store returned an error.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// A row of the map or of an allocation group cannot be decoded.
    #[error(transparent)]
    Row(#[from] penstock_base::DecodeError),
}

impl ChunkError {
    /// Returns the class of the error, which says how the caller should react.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoSpace { .. } => ErrorKind::NoSpace,
            Self::Truncated { .. } => ErrorKind::RefreshMap,
            Self::Invalid(_) => ErrorKind::Invalid,
            Self::LenderAway { .. } => ErrorKind::Internal,
            Self::Array(error) => error.kind(),
            Self::Kv(error) => error.kind(),
            Self::Row(_) => ErrorKind::Corrupt,
        }
    }
}
