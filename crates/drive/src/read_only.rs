//! A drive that is only read, for people who look at what lies on it. It takes no lock, so a drive that is in
//! use can be read too.

use crate::file::{error, size_of};
use crate::{Drive, DriveError, Io};
use penstock_base::{BLOCK_BYTES, Buf, BufMut, LocalBoxFuture};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A file or block device through the page cache. Everything that changes a drive is refused.
pub struct ReadOnlyDrive {
    file: File,
    size_bytes: u64,
}

impl ReadOnlyDrive {
    /// Opens the drive at `path` for reading.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let size_bytes = size_of(&file)? / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        Ok(Self { file, size_bytes })
    }
}

fn refused<'a>() -> LocalBoxFuture<'a, Result<(), DriveError>> {
    Box::pin(async { Err(DriveError::Down("opened for reading only".to_owned())) })
}

impl Drive for ReadOnlyDrive {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, at: u64, mut buf: BufMut, _io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>> {
        let len = buf.len();
        let read = self.file.read_exact_at(buf.as_mut(), at);
        Box::pin(async move { read.map(|()| buf).map_err(|source| error("read", at, len, &source)) })
    }

    fn write(&self, _at: u64, _data: Buf, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        refused()
    }

    fn flush(&self, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        refused()
    }

    fn discard(&self, _at: u64, _len: u64, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        refused()
    }
}
