//! Notices that make the kernel drop its cached state of an inode, or ask for a name again.

use crate::abi::{
    EXPIRE_ONLY, InvalEntryOut, InvalInodeOut, NOTIFY_INVAL_ENTRY, NOTIFY_INVAL_INODE, OutHeader,
};
use penstock_base::num::to_u32;
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use zerocopy::IntoBytes;

/// True if the notice was not needed: the kernel does not know the inode, or the mount has ended.
pub(crate) fn is_needless(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NODEV | Errno::NOTCONN)
}

/// The part of an inode's cache that a notice drops, besides its attributes.
pub(crate) enum Drops {
    Pages(Range<u64>),
    Nothing,
}

/// Has the kernel drop pages of an inode. Blocks while one of them is locked.
pub(crate) fn drop_pages_now(device: &File, nodeid: u64, bytes: Range<u64>) -> io::Result<()> {
    notify_inval_inode(device, nodeid, &Drops::Pages(bytes))
}

/// Has the kernel drop a part of an inode's cache.
pub(crate) fn notify_inval_inode(device: &File, nodeid: u64, what: &Drops) -> io::Result<()> {
    let (off, len) = match what {
        // Length 0 means to the end of the file.
        Drops::Pages(bytes) => {
            let end = i64::try_from(bytes.end);
            (
                i64::try_from(bytes.start).unwrap_or(i64::MAX),
                end.map_or(0, |end| end.saturating_sub_unsigned(bytes.start)),
            )
        }
        Drops::Nothing => (-1, 0),
    };
    let notice = InvalInodeOut { ino: nodeid, off, len };
    notify(device, NOTIFY_INVAL_INODE, &[notice.as_bytes()])
}

/// Has the kernel ask for a name of a directory before it uses it again. Blocks while the directory is
/// locked.
pub(crate) fn notify_expire(device: &File, dir: u64, name: &[u8]) -> io::Result<()> {
    let notice = InvalEntryOut { parent: dir, namelen: to_u32(name.len()), flags: EXPIRE_ONLY };
    notify(device, NOTIFY_INVAL_ENTRY, &[notice.as_bytes(), name, &[0]])
}

fn notify(device: &File, notice: i32, parts: &[&[u8]]) -> io::Result<()> {
    let len = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
    let header = OutHeader { len: to_u32(len), error: notice, unique: 0 };
    let mut slices = vec![IoSlice::new(header.as_bytes())];
    slices.extend(parts.iter().map(|part| IoSlice::new(part)));
    match rustix::io::writev(device, &slices) {
        Err(error) if !is_needless(error) => Err(error.into()),
        _ => Ok(()),
    }
}
