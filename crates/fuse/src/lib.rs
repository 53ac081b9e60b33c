//! The mount: the kernel's FUSE requests on one side, the client library on the other.
//!
//! Owns the device, the protocol and the mount point. Keeps no state of files: the client does, and the kernel's page
//! cache keeps data, write-through.
#![deny(unsafe_code)]

mod abi;
mod ask;
mod attr;
mod attributes;
mod cache;
mod capabilities;
mod data;
mod deferred;
mod device;
mod guard;
mod hide;
mod known;
mod latency;
mod listing;
mod locked;
mod locks;
mod looks;
mod mount;
mod mounts;
mod names;
mod null;
mod read_ahead;
mod reads;
mod session;
mod size_notice;

pub use guard::{GUARD, guard};
pub use latency::{FuseLatency, Op};
pub use mount::{
    KIND, Mount, MountError, MountOptions, check_mount_point, is_stale, kind_at, mount_point, unmount,
    unmount_stale,
};
pub use null::mount_null;
pub use read_ahead::set_read_ahead;

/// Longest write that the kernel may send.
pub const MAX_WRITE_BYTES: u32 = 1 << 20;
/// Requests that the kernel may have in the background. Reads of pages that wait for a lease are among them, about one for each
/// program, and pages that are written back, for which others may wait, need a place beside them.
pub const MAX_BACKGROUND: u16 = 1024;
/// With more than this it reads no further ahead.
const CONGESTION: u16 = 48;
