//! Drives: block address spaces that can be read, written, flushed and discarded, and how they are found again.
//!
//! Owns the [`Drive`] trait and its kinds (file or block device, memory, faulty), the superblock with the slice
//! table, and [`DriveHandle`], which gives every I/O a deadline, counts it and refuses work on a drive that has
//! failed. Does not decide when a drive has failed: the array that loses a write does.
//!
//! Contract of a drive: a write that returned is seen by every later read; it is durable only after a flush that
//! was issued later has returned, unless it asked to be durable itself ([`Io::durable`]). A power cut leaves any subset of the writes since the last flush, each
//! 512-byte sector whole. I/O is block aligned (4 KiB) in place and length.
#![deny(unsafe_code)]

mod faulty;
mod file;
mod flushes;
mod handle;
mod memory;
pub mod patience;
pub mod runtime;
pub mod superblock;
mod uring;

pub use faulty::{Fault, FaultyDrive, Op, Pace};
pub use file::{FileDrive, OpenError};
pub use handle::{Counters, DriveHandle, DriveLatency, DriveState, Slice};
pub use memory::MemoryDrive;

use penstock_base::{Buf, BufMut, LocalBoxFuture};
use std::time::Duration;

/// Who an I/O is done for, so that queues can be shared fairly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Class {
    /// A client's data.
    Client = 1,
    /// Name space and maps.
    Meta = 2,
    /// Appends to a log.
    Log = 3,
    /// Log contents on their way to stripes, and checkpoints.
    Destage = 4,
    /// Reconstruction of a lost drive.
    Rebuild = 5,
    /// Bringing a returned drive up to date.
    Resync = 6,
    /// Background verification.
    Scrub = 7,
}

impl Class {
    /// Reads a class as it travels on the wire.
    pub fn from_u8(raw: u8) -> Option<Self> {
        use Class::*;
        [Client, Meta, Log, Destage, Rebuild, Resync, Scrub].into_iter().find(|class| *class as u8 == raw)
    }
}

/// What every I/O carries down to the drive's queue.
#[derive(Clone, Copy, Debug)]
pub struct Io {
    /// The tenant it is charged to; 0 is the system.
    pub tenant: u32,
    /// Its class.
    pub class: Class,
    /// How long the drive may take.
    pub deadline: Duration,
    /// The name of the place in the code that issues it: the unit of crash tests.
    pub site: &'static str,
    /// Of a write: it is durable when it returns, without a flush.
    pub durable: bool,
}

impl Io {
    /// An I/O of `class` from the named site with the ordinary deadline of 30 s.
    pub const fn new(class: Class, site: &'static str) -> Self {
        Self { tenant: 0, class, deadline: Duration::from_secs(30), site, durable: false }
    }

    /// The same I/O from another site.
    pub const fn at(self, site: &'static str) -> Self {
        Self { site, ..self }
    }

    /// The same write, durable when it returns: itself, and none that was made before it.
    pub const fn durable(self) -> Self {
        Self { durable: true, ..self }
    }
}

/// An I/O did not happen, or may have happened in part.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DriveError {
    /// The device or file reported an error.
    #[error("{op} of {len} bytes at {at}: {why}")]
    Io {
        /// `read`, `write`, `flush` or `discard`.
        op: &'static str,
        /// Byte offset on the drive.
        at: u64,
        /// Length in bytes.
        len: u64,
        /// The operating system's words.
        why: String,
    },
    /// The file that stands in for a drive could not grow: the host's file system is full.
    #[error("the host file system is full")]
    HostFull,
    /// No answer within the deadline.
    #[error("no answer within {0:?}")]
    Deadline(Duration),
    /// A flush of this drive failed before, so later ones say nothing about what it should have made durable.
    #[error("an earlier flush failed ({0}): writes that it covered may be lost")]
    FlushLost(String),
    /// The drive was latched as failed before, or is not there.
    #[error("drive is {0}")]
    Down(String),
}

/// One block address space. All methods may be called concurrently.
pub trait Drive {
    /// Size in bytes, whole blocks.
    fn size_bytes(&self) -> u64;

    /// Fills `buf` with the bytes at `at`.
    fn read(&self, at: u64, buf: BufMut, io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>>;

    /// Writes `data` at `at`. Durable only after a later [`Drive::flush`], or at once where `io` says so.
    fn write(&self, at: u64, data: Buf, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>>;

    /// Makes all writes that returned before this call durable.
    fn flush(&self, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>>;

    /// Gives space back; the range reads as zeros or as it was until written again.
    fn discard(&self, at: u64, len: u64, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>>;
}
