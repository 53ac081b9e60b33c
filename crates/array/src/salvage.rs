//! Salvage: reads as much of a range as can be read, block by block if it must.
//!
//! Absent, unreadable and damaged are three different results. A block that the drive does not return is
//! neither zeros nor wrong; a caller that depends on it must stop.

use futures_util::StreamExt;
use futures_util::stream;
use penstock_base::{BLOCK_BYTES, Buf, BufMut};
use penstock_drive::{DriveError, Io, Slice};

/// Blocks read at the same time after a read of the full range failed.
const AT_A_TIME: usize = 16;

/// The bytes of a range, with zeros for blocks that could not be read.
pub(crate) struct Salvaged {
    bytes: Buf,
    /// By block, true if it could not be read; empty if all could be.
    unreadable: Vec<bool>,
    answered: bool,
}

impl Salvaged {
    /// The result for a drive that is not read: every block is unreadable.
    pub(crate) fn nothing(len: usize) -> Self {
        Self {
            bytes: BufMut::zeroed(len).freeze(),
            unreadable: vec![true; len / BLOCK_BYTES],
            answered: false,
        }
    }

    /// True if the drive answered, if only with an error.
    pub(crate) fn answered(&self) -> bool {
        self.answered
    }

    /// The bytes, with zeros for blocks that could not be read.
    pub(crate) fn bytes(&self) -> &Buf {
        &self.bytes
    }

    /// True if all of these blocks could be read.
    pub(crate) fn has(&self, first_block: usize, blocks: usize) -> bool {
        let end = (first_block + blocks).min(self.bytes.len() / BLOCK_BYTES);
        self.unreadable.is_empty() || self.unreadable[first_block.min(end)..end].iter().all(|bad| !bad)
    }

    /// True if a block could not be read.
    pub(crate) fn lacks_some(&self) -> bool {
        !self.unreadable.is_empty()
    }
}

/// Reads `len` bytes at `at` with one I/O, and block by block if the drive answers that with an error. A
/// drive that does not answer is not asked again.
pub(crate) async fn read(slice: &Slice, at: u64, len: usize, io: Io) -> Salvaged {
    assert!(len.is_multiple_of(BLOCK_BYTES), "whole blocks are read");
    let answered = match slice.read(at, len, io).await {
        Ok(bytes) => return Salvaged { bytes, unreadable: Vec::new(), answered: true },
        Err(DriveError::Io { .. }) => true,
        Err(_) => false,
    };
    let mut bytes = BufMut::zeroed(len);
    let mut unreadable = vec![true; len / BLOCK_BYTES];
    if answered {
        let one = |block: usize| async move {
            (block, slice.read(at + (block * BLOCK_BYTES) as u64, BLOCK_BYTES, io).await)
        };
        let mut blocks = stream::iter(0..unreadable.len()).map(one).buffer_unordered(AT_A_TIME);
        while let Some((block, read)) = blocks.next().await {
            if let Ok(read) = read {
                bytes.as_mut()[block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES].copy_from_slice(&read);
                unreadable[block] = false;
            }
        }
    }
    Salvaged { bytes: bytes.freeze(), unreadable, answered }
}
