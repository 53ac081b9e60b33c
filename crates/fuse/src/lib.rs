//! Mounts the file system: translates the kernel's FUSE requests into calls of the client library.
//!
//! Owns the FUSE device, the protocol and the mount point. Keeps no file state of its own: the client keeps
//! that, and the kernel's page cache, which is write-through, keeps data.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![deny(unsafe_code)]

mod abi;
mod ask;
mod attr;
mod attributes;
mod cache;
mod capabilities;
mod data;
mod dead;
mod deferred;
mod device;
mod given;
mod guard;
mod hide;
mod known;
mod last_found;
mod last_lookups;
mod latency;
mod listing;
mod locked;
mod locks;
mod looks;
mod mount;
mod mounts;
mod names;
mod nodes;
mod notices;
mod null;
mod probe;
mod read_ahead;
mod reads;
mod serve;
mod session;
mod size_notice;

pub use guard::{ENDS, GUARD, guard};
pub use latency::{FuseLatency, Op};
pub use mount::{Mount, MountError, MountOptions, check_mount_point, mount_point, unmount, unmount_stale};
pub use mounts::{KIND, kind_at};
pub use null::mount_null;
pub use probe::{Answer, PROBE, SYNC, Server, probe, probe_directly, process_behind, sync, sync_directly};
pub use read_ahead::set_read_ahead;

/// The longest write that the kernel may send, in bytes.
pub const MAX_WRITE_BYTES: u32 = 1 << 20;
/// The most background requests that the kernel may have in flight. They include reads of pages that wait for
/// a lease, about one for each program. Pages that are written back, for which others may wait, need a place
/// beside them.
pub const MAX_BACKGROUND: u16 = 1024;
/// With more background requests than this the kernel stops reading ahead.
const CONGESTION: u16 = 48;
