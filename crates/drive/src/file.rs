//! A drive in a local file or on a block device, with O_DIRECT.
//!
//! Invariant: the file is locked (flock, exclusive) for the life of this object, so no second process writes
//! to the same drive. If the file system refuses O_DIRECT, the drive uses the page cache and reports so
//! ([`FileDrive::direct`]). A flush is fdatasync in both cases.

use crate::{Drive, DriveError, Io, uring};
use compio_runtime::fd::AsyncFd;
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, LocalBoxFuture};
use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The reason why a drive's file cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The operating system reported an error, such as a missing file or permission.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: io::Error,
    },
    /// Another process has the lock of the drive.
    #[error("{0}: another process uses this drive")]
    Locked(PathBuf),
}

/// A drive in a file or on a block device.
pub struct FileDrive {
    file: AsyncFd<File>,
    raw: Arc<File>,
    /// The same file, opened with O_DSYNC for durable writes; none on tmpfs, which has nothing to flush.
    synced: Option<AsyncFd<File>>,
    size_bytes: u64,
    direct: bool,
    /// True if the file is on tmpfs. I/O then runs synchronously on the worker: tmpfs does not support
    /// non-blocking I/O, so io_uring would use a kernel thread, and waking that costs more than copying a
    /// strip.
    memory: bool,
}

/// `f_type` of tmpfs (statfs(2)).
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

impl FileDrive {
    /// Opens and locks the drive at `path`. Must be called on a worker thread, which owns the drive from then
    /// on.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        let fail = |source| OpenError::Io { path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        // The kernel lets nobody mount, format or assemble a device that is open so, and refuses one that is
        // in use. For files the flag has no meaning.
        let is_device = std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device());
        let own = if is_device { OFlags::EXCL } else { OFlags::empty() };
        let open =
            |flags: OFlags| options.clone().custom_flags((flags | own).bits().cast_signed()).open(path);
        let is =
            |error: &io::Error, errno: rustix::io::Errno| error.raw_os_error() == Some(errno.raw_os_error());
        let (file, direct) = match open(OFlags::DIRECT) {
            Err(error) if is(&error, rustix::io::Errno::INVAL) => {
                (open(OFlags::empty()).map_err(fail)?, false)
            }
            Err(error) if is_device && is(&error, rustix::io::Errno::BUSY) => {
                return Err(OpenError::Locked(path.to_owned()));
            }
            other => (other.map_err(fail)?, true),
        };
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(OpenError::Locked(path.to_owned()));
        }
        let size_bytes = size_of(&file).map_err(fail)? / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let memory = rustix::fs::fstatfs(&file).is_ok_and(|found| found.f_type == TMPFS_MAGIC);
        let raw = Arc::new(file.try_clone().map_err(fail)?);
        let flags = OFlags::DSYNC | if direct { OFlags::DIRECT } else { OFlags::empty() };
        let synced = match memory {
            true => None,
            false => Some(options.custom_flags(flags.bits().cast_signed()).open(path).map_err(fail)?),
        };
        let synced = synced.map(AsyncFd::new).transpose().map_err(fail)?;
        let file = AsyncFd::new(file).map_err(fail)?;
        Ok(Self { file, raw, synced, size_bytes, direct, memory })
    }

    /// True if another process has the lock of the drive at `path`.
    pub fn is_locked(path: &Path) -> bool {
        let Ok(file) = File::open(path) else { return false };
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
    }

    /// Creates a sparse file of `size_bytes` and makes it and its directory entry durable. Fails if the file
    /// exists.
    pub fn create(path: &Path, size_bytes: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        if let Err(error) = file.set_len(size_bytes).and_then(|()| file.sync_all()) {
            // A file without its size would be taken for something that somebody needs.
            std::fs::remove_file(path)?;
            return Err(error);
        }
        match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
            _ => File::open(".")?.sync_all(),
        }
    }

    /// The size of the file or block device at `path` in bytes.
    pub fn size_at(path: &Path) -> io::Result<u64> {
        let file = File::open(path)?;
        let kind = file.metadata()?.file_type();
        match kind.is_file() || kind.is_block_device() {
            true => size_of(&file),
            false => Err(io::Error::other("it is neither a regular file nor a block device")),
        }
    }

    /// True if I/O bypasses the page cache.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// Allocates a range in full, so that later writes to it cannot fail because the host is full. Does
    /// nothing for a block device.
    pub fn allocate(path: &Path, at: u64, len: u64) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        if !file.metadata()?.is_file() {
            return Ok(());
        }
        rustix::fs::fallocate(&file, FallocateFlags::empty(), at, len)?;
        file.sync_all()
    }
}

pub(crate) fn size_of(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    if metadata.file_type().is_block_device() {
        return Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?);
    }
    Ok(metadata.len())
}

pub(crate) fn error(op: &'static str, at: u64, len: usize, source: &io::Error) -> DriveError {
    // ENOSPC at a flush, which is possible only without O_DIRECT, is an I/O error: the kernel has dropped the
    // data that it could not write.
    let full = [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT].map(|errno| Some(errno.raw_os_error()));
    if op == "write" && full.contains(&source.raw_os_error()) {
        return DriveError::HostFull;
    }
    DriveError::Io { op, at, len: len as u64, why: source.to_string() }
}

impl Drive for FileDrive {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, at: u64, mut buf: BufMut, _io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>> {
        Box::pin(async move {
            let len = buf.len();
            if self.memory {
                let read = self.raw.read_exact_at(buf.as_mut(), at);
                return read.map(|()| buf).map_err(|source| error("read", at, len, &source));
            }
            uring::read_exact_at(&self.file, buf, at).await.map_err(|source| error("read", at, len, &source))
        })
    }

    fn write(&self, at: u64, data: Buf, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let len = data.len();
            if self.memory {
                return self.raw.write_all_at(&data, at).map_err(|source| error("write", at, len, &source));
            }
            let file = self.synced.as_ref().filter(|_| io.durable).unwrap_or(&self.file);
            uring::write_all_at(file, data, at).await.map_err(|source| error("write", at, len, &source))
        })
    }

    fn flush(&self, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let synced = match self.memory {
                true => self.raw.sync_data(),
                false => uring::sync_data(&self.file).await,
            };
            synced.map_err(|source| error("flush", 0, 0, &source))
        })
    }

    fn discard(&self, at: u64, len: u64, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        let file = self.raw.clone();
        Box::pin(async move {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let punch = compio_runtime::spawn_blocking(move || rustix::fs::fallocate(&*file, flags, at, len));
            match punch.await {
                Ok(Ok(()) | Err(rustix::io::Errno::OPNOTSUPP)) => Ok(()),
                Ok(Err(errno)) => Err(error("discard", at, to_usize(len), &errno.into())),
                Err(_) => Err(error("discard", at, to_usize(len), &io::Error::other("the task was stopped"))),
            }
        })
    }
}
