//! Targets: the chunk store on one volume, with its map and its allocation groups as rows of a key-value store.
//!
//! Owns chunks, extents, free space and the memory that holds writes until they are placed. Does not own files: a
//! chunk is known by (branch, inode, index), and sizes, names and links are the metadata target's.
//!
//! Invariants:
//! - a map row enters the key-value store only after the data it points to is durable on the volume, so a row never
//!   points to foreign bytes;
//! - a map row and the bits of its blocks change in one transaction;
//! - freed blocks count as used until the transaction that freed them is durable; then they are reused or discarded;
//! - memory for writes is bounded by [`DIRTY_BYTES`]: above it a write waits until older ones are placed.
//!
//! Power cut: what was not committed is lost whole or present whole per block; blocks allocated and not committed are
//! free again, because no bit says otherwise.
#![forbid(unsafe_code)]

mod chunk;
mod commit;
mod damaged;
mod discard;
mod place;
mod repair;
mod reserve;
pub mod rows;
mod seek;
mod space;
mod target;
mod truncate;
mod verify;
mod whole;

pub use damaged::DamagedRuns;
pub use rows::{ChunkKey, Extent, all_maps, decode_map, encode_map, map_range};
pub use space::SpaceUsage;
pub use target::{Target, TargetConfig, TargetCounts};
pub use truncate::Behind;
pub use verify::{Owned, TargetCheck, chunks_of_a_file};

use penstock_array::ArrayError;
use penstock_base::Kind;
use penstock_kv::KvError;

/// Bytes of writes that a target holds in memory before it places the oldest.
pub const DIRTY_BYTES: u64 = 64 << 20;

/// An operation on chunks did not happen.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ChunkError {
    /// No block is free but the reserve.
    #[error("no space left: {free_blocks} blocks of 4 KiB are free and {wanted_blocks} are needed")]
    NoSpace {
        /// Blocks that may be used.
        free_blocks: u64,
        /// Blocks that are needed.
        wanted_blocks: u64,
    },
    /// The write belongs to a time before the file was cut.
    #[error("the file was cut since (generation {found}, the write has {sent})")]
    Truncated {
        /// The target's generation.
        found: u64,
        /// The write's generation.
        sent: u64,
    },
    /// The request makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The volume below failed.
    #[error(transparent)]
    Array(#[from] ArrayError),
    /// The map failed.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// A row of the map is not what was written.
    #[error(transparent)]
    Row(#[from] penstock_base::DecodeError),
}

impl ChunkError {
    /// What the caller must do.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NoSpace { .. } => Kind::NoSpace,
            Self::Truncated { .. } => Kind::RefreshMap,
            Self::Invalid(_) => Kind::Invalid,
            Self::Array(error) => error.kind(),
            Self::Kv(error) => error.kind(),
            Self::Row(_) => Kind::Corrupt,
        }
    }
}
