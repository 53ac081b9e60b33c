//! The mount: the kernel's FUSE requests on one side, the client library on the other.
//!
//! Owns the threads that read requests (fuser's) and the hand-over to the worker that owns the client. Keeps no
//! state of files: the client does, and the kernel's page cache keeps data, write-through.
//!
//! Requests in flight are bounded by the kernel ([`MAX_BACKGROUND`] and one for each waiting thread).
#![deny(unsafe_code)]

mod attr;
mod fs;
mod mount;
mod null;

pub use mount::{Mount, MountError, check_mount_point, is_stale, unmount_stale};
pub use null::mount_null;

/// Longest write that the kernel may send.
pub const MAX_WRITE_BYTES: u32 = 1 << 20;
/// Requests that the kernel may have in the background.
pub const MAX_BACKGROUND: u16 = 64;
