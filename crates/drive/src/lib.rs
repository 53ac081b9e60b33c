//! Drives: block address spaces that can be read, written, flushed and discarded, and their superblocks.
//!
//! This crate owns the [`Drive`] trait and its kinds (file or block device, memory, faulty), the superblock
//! with the slice table, and [`DriveHandle`], which gives every I/O a deadline, counts it, and refuses I/O on
//! a failed drive. It does not decide when a drive has failed: the array that loses a write does.
//!
//! Contract of a drive: every later read sees a write that has returned. The write is durable only after a
//! later flush has returned, unless it asked to be durable itself ([`Io::durable`]). A power cut preserves
//! any subset of the writes since the last flush, and tears no 512-byte sector. Offset and length of every
//! I/O are multiples of the block size (4 KiB).
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![deny(unsafe_code)]

pub mod copies;
mod faulty;
mod file;
mod flushes;
mod handle;
mod memory;
mod read_only;
pub mod superblock;
mod uring;

pub use faulty::{Fault, FaultyDrive, Op, Pace};
pub use file::{FileDrive, OpenError};
pub use handle::{Counters, DriveHandle, DriveLatency, DriveState, Slice};
pub use memory::MemoryDrive;
pub use read_only::ReadOnlyDrive;

pub use penstock_base::Class;
use penstock_base::{Buf, BufMut, IoContext, LocalBoxFuture};
use std::time::Duration;

/// The attributes of an I/O, passed down to the drive's queue.
#[derive(Clone, Copy, Debug)]
pub struct Io {
    /// For whom and for what.
    pub context: IoContext,
    /// Time limit for the drive's answer: a drive that takes longer has a fault.
    pub deadline: Duration,
    /// The name of the place in the code that issues the I/O: the unit of power cuts in tests.
    pub site: &'static str,
    /// For a write: it is durable when it returns, without a flush.
    pub durable: bool,
}

impl Io {
    /// The system's own I/O of `class` from the named site with the ordinary deadline of 30 s.
    pub const fn new(class: Class, site: &'static str) -> Self {
        let context = IoContext::system(class);
        Self { context, deadline: Duration::from_secs(30), site, durable: false }
    }

    /// The same I/O from another site.
    pub const fn at(self, site: &'static str) -> Self {
        Self { site, ..self }
    }

    /// The same I/O for somebody else.
    pub const fn within(self, context: IoContext) -> Self {
        Self { context, ..self }
    }

    /// The same write, durable when it returns. It does not make earlier writes durable.
    pub const fn durable(self) -> Self {
        Self { durable: true, ..self }
    }
}

/// The failure of an I/O, which did not happen or may have happened in part.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DriveError {
    /// The block device or file reported an error.
    #[error("{op} of {len} bytes at {at}: {why}")]
    Io {
        /// `read`, `write`, `flush` or `discard`.
        op: &'static str,
        /// Byte offset on the drive.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// The operating system's error message.
        why: String,
    },
    /// The file that stands in for a drive could not grow: the host's file system is full.
    #[error("the host file system is full")]
    HostFull,
    /// The drive did not answer within the deadline.
    #[error("no answer within {0:?}")]
    Deadline(Duration),
    /// A flush of this drive failed. Success of later ones would not prove that the writes covered by it are
    /// durable.
    #[error("an earlier flush failed ({0}): writes that it covered may be lost")]
    FlushLost(String),
    /// The drive was latched as failed, or is missing.
    #[error("drive is {0}")]
    Down(String),
}

/// A block address space. All methods may be called concurrently.
pub trait Drive {
    /// Size in bytes, a multiple of the block size.
    fn size_bytes(&self) -> u64;

    /// Fills `buf` with the bytes at offset `at`.
    fn read(&self, at: u64, buf: BufMut, io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>>;

    /// Writes `data` at offset `at`. Durable only after a later [`Drive::flush`], or on return if
    /// [`Io::durable`] is set.
    fn write(&self, at: u64, data: Buf, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>>;

    /// Makes durable all writes that returned before this call.
    fn flush(&self, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>>;

    /// Gives space back. Until it is written again, the range reads as zeros or as before.
    fn discard(&self, at: u64, len: u64, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>>;
}
