//! Attributes and errors in fuser's types.

use fuser::{Errno, FileAttr, FileType, INodeNo};
use penstock_base::{Ino, Kind};
use penstock_client::{Attr, Failure};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Maps the kernel's root to the file system's and back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Root(pub(crate) Ino);

impl Root {
    pub(crate) fn inner(self, ino: INodeNo) -> Ino {
        if ino == INodeNo::ROOT { self.0 } else { Ino(ino.0) }
    }

    pub(crate) fn outer(self, ino: u64) -> INodeNo {
        if ino == self.0.0 { INodeNo::ROOT } else { INodeNo(ino) }
    }
}

fn time(ns: i64) -> SystemTime {
    let distance = Duration::from_nanos(ns.unsigned_abs());
    if ns >= 0 { UNIX_EPOCH + distance } else { UNIX_EPOCH - distance }
}

/// Nanoseconds since 1970.
pub(crate) fn nanoseconds(time: SystemTime) -> i64 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |ns| -ns),
    }
}

/// The type that the type bits of a mode name.
pub(crate) fn file_type(mode: u32) -> FileType {
    match mode & 0o170_000 {
        0o040_000 => FileType::Directory,
        0o120_000 => FileType::Symlink,
        0o010_000 => FileType::NamedPipe,
        0o140_000 => FileType::Socket,
        0o060_000 => FileType::BlockDevice,
        0o020_000 => FileType::CharDevice,
        _ => FileType::RegularFile,
    }
}

pub(crate) fn file_attr(root: Root, attr: &Attr) -> FileAttr {
    FileAttr {
        ino: root.outer(attr.ino),
        size: attr.size,
        blocks: attr.size.div_ceil(512),
        atime: time(attr.atime_ns),
        mtime: time(attr.mtime_ns),
        ctime: time(attr.ctime_ns),
        crtime: time(attr.btime_ns),
        kind: file_type(attr.mode),
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: penstock_base::BLOCK_BYTES as u32,
        flags: 0,
    }
}

/// The error number of a failure: its own, or the one that fits what the caller must do.
pub(crate) fn errno(failure: &Failure) -> Errno {
    if failure.errno != 0 {
        return Errno::from_i32(failure.errno.into());
    }
    match failure.kind {
        Kind::NoSpace => Errno::ENOSPC,
        Kind::Invalid => Errno::EINVAL,
        Kind::Denied => Errno::EACCES,
        Kind::Retry | Kind::RefreshMap | Kind::Fenced | Kind::Corrupt | Kind::Internal => {
            tracing::error!(kind = ?failure.kind, %failure, "a file operation failed");
            Errno::EIO
        }
    }
}
