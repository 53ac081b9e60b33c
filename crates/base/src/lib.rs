//! Basic types of all other crates: identifiers, units, checksums, buffers, byte codecs, status kinds, and
//! the traits for time, randomness and tasks.
//!
//! This crate has no I/O, no threads and no clock. `penstock-drive` implements [`env::Runtime`] on a real
//! machine, `penstock-sim` in a simulation.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

pub mod bounded_set;
pub mod buf;
pub mod codec;
pub mod crc;
pub mod env;
pub mod features;
pub mod finding;
pub mod gate;
pub mod held_ranges;
pub mod ids;
mod io;
pub mod latency;
pub mod locks;
pub mod map;
pub mod newcomers;
pub mod num;
pub mod range_locks;
pub mod rank;
mod span;
mod spread;
pub mod status;
pub mod text;

pub use bounded_set::BoundedSet;
pub use buf::{Buf, BufMut};
pub use codec::{Dec, DecodeError, Enc, MOST_WITH_ROOM, hex};
pub use crc::{ZERO_BLOCK_CRC, crc32c, crc32c_append, crc32c_blocks};
pub use env::{Env, LocalBoxFuture};
pub use features::Features;
pub use finding::{Finding, FindingKind, Findings};
pub use gate::{Gate, Quiet};
pub use held_ranges::{HeldRange, HeldRanges};
pub use ids::*;
pub use io::{Class, IoContext};
pub use latency::Histogram;
pub use locks::KeyedLocks;
pub use map::{HashMap, HashSet};
pub use newcomers::Newcomers;
pub use span::{Piece, Span};
pub use spread::{Share, Spread};
pub use status::ErrorKind;

/// Bytes of a block, the unit of checksums and of allocation.
pub const BLOCK_BYTES: usize = 4096;
/// Bytes of the longest file: the kernel's file offsets have 63 bits.
pub const MAX_FILE_BYTES: u64 = 1 << 62;
/// Bytes of a sector, the unit that a drive writes atomically: a power cut never tears one.
pub const SECTOR_BYTES: usize = 512;
