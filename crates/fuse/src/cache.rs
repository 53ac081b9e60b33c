//! What the kernel keeps of a mount, and how it is told to let go of it.
//!
//! Notices are sent by a thread beside the worker: the kernel takes one only when it has locked the pages that it is
//! about, which requests may hold that wait for the worker.

use crate::abi::{InvalInodeOut, NOTIFY_INVAL_INODE, OutHeader};
use crate::attr::{Root, VALID};
use penstock_base::{Env, Ino, LocalBoxFuture};
use penstock_client::KernelCache;
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

/// The kernel counts in ticks, and may be one late.
const TICKS: Duration = Duration::from_millis(50);

/// The kernel's side of one mount.
pub(crate) struct Cache {
    env: Env,
    root: Root,
    device: Arc<File>,
}

impl Cache {
    /// `device` is the mount's descriptor, or a copy of it.
    pub(crate) fn new(env: &Env, root: Root, device: File) -> Self {
        Self { env: env.clone(), root, device: Arc::new(device) }
    }
}

fn notify_inval_inode(device: &File, nodeid: u64, bytes: &Range<u64>) -> io::Result<()> {
    // Zero is to the end.
    let len = match i64::try_from(bytes.end) {
        Ok(end) => end.saturating_sub_unsigned(bytes.start),
        Err(_) => 0,
    };
    let off = i64::try_from(bytes.start).unwrap_or(i64::MAX);
    let notice = InvalInodeOut { ino: nodeid, off, len };
    let header = OutHeader {
        len: (size_of::<OutHeader>() + size_of::<InvalInodeOut>()) as u32,
        error: NOTIFY_INVAL_INODE,
        unique: 0,
    };
    match rustix::io::writev(device, &[IoSlice::new(header.as_bytes()), IoSlice::new(notice.as_bytes())]) {
        // It knows nothing of the inode, or nothing at all any more.
        Ok(_) | Err(Errno::NOENT | Errno::NODEV | Errno::NOTCONN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl KernelCache for Cache {
    fn drop_pages(&self, ino: Ino, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        let (device, nodeid) = (self.device.clone(), self.root.outer(ino.0));
        Box::pin(async move {
            let told =
                penstock_drive::runtime::blocking(move || notify_inval_inode(&device, nodeid, &bytes)).await;
            if let Err(error) = told {
                tracing::error!(%error, %ino, "the kernel does not let go of pages: they may be old");
            }
        })
    }

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        // Made here, so that the time runs from now on.
        self.env.sleep(VALID + TICKS)
    }
}
