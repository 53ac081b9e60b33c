//! The words every other crate speaks: identifiers, units, checksums, buffers, byte codecs, status kinds,
//! and the traits through which time, randomness and tasks come.
//!
//! Owns no I/O, no threads and no clock: what runs the system (`penstock-drive`) or simulates it
//! (`penstock-sim`) implements [`env::Runtime`].
#![forbid(unsafe_code)]

pub mod buf;
pub mod codec;
pub mod crc;
pub mod env;
pub mod finding;
pub mod held_ranges;
pub mod ids;
pub mod latency;
pub mod locks;
pub mod map;
pub mod newcomers;
pub mod noted;
pub mod range_locks;
pub mod status;
pub mod text;

pub use buf::{Buf, BufMut};
pub use codec::{Dec, DecodeError, Enc, hex};
pub use crc::{ZERO_BLOCK_CRC, crc32c, crc32c_append, crc32c_blocks};
pub use env::{Env, LocalBoxFuture};
pub use finding::{Finding, FindingKind, Findings};
pub use held_ranges::{HeldRange, HeldRanges};
pub use ids::*;
pub use latency::Histogram;
pub use locks::KeyedLocks;
pub use map::{HashMap, HashSet};
pub use newcomers::Newcomers;
pub use noted::Noted;
pub use status::Kind;

/// The unit of checksums and of allocation.
pub const BLOCK_BYTES: usize = 4096;
/// Bytes of the longest file: offsets of the kernel are 63 bits.
pub const MAX_FILE_BYTES: u64 = 1 << 62;
/// The smallest part of a drive that a power cut leaves whole.
pub const SECTOR_BYTES: usize = 512;
