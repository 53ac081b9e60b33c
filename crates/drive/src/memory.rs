//! A drive in memory, for tests and for benchmarks without a storage medium.

use crate::{Drive, DriveError, Io};
use penstock_base::num::to_usize;
use penstock_base::{Buf, BufMut, LocalBoxFuture};
use std::cell::RefCell;

/// A drive in memory. Its contents are lost when it is dropped.
pub struct MemoryDrive {
    bytes: RefCell<BufMut>,
}

impl MemoryDrive {
    /// A drive of `size_bytes` zero bytes. Memory is allocated page by page when it is first written.
    pub fn new(size_bytes: usize) -> Self {
        Self { bytes: RefCell::new(BufMut::zeroed(size_bytes)) }
    }

    fn check(&self, op: &'static str, at: u64, len: usize) -> Result<usize, DriveError> {
        let size = self.bytes.borrow().len() as u64;
        if at + len as u64 > size {
            return Err(DriveError::Io { op, at, len: len as u64, why: format!("the drive ends at {size}") });
        }
        Ok(to_usize(at))
    }
}

impl Drive for MemoryDrive {
    fn size_bytes(&self) -> u64 {
        self.bytes.borrow().len() as u64
    }

    fn read(&self, at: u64, mut buf: BufMut, _io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>> {
        Box::pin(async move {
            let start = self.check("read", at, buf.len())?;
            let len = buf.len();
            buf.as_mut().copy_from_slice(&self.bytes.borrow().as_ref()[start..start + len]);
            Ok(buf)
        })
    }

    fn write(&self, at: u64, data: Buf, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let start = self.check("write", at, data.len())?;
            self.bytes.borrow_mut().as_mut()[start..start + data.len()].copy_from_slice(&data);
            Ok(())
        })
    }

    fn flush(&self, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async { Ok(()) })
    }

    fn discard(&self, at: u64, len: u64, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let start = self.check("discard", at, to_usize(len))?;
            self.bytes.borrow_mut().as_mut()[start..start + to_usize(len)].fill(0);
            Ok(())
        })
    }
}
