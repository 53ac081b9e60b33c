//! Metadata targets: the name space of whole filesets in a key-value store.
//!
//! Owns inodes, directories, links, extended attributes and the queue of removed files. Does not own file
//! data (a storage target does), nor sessions (`penstock-session`). Where both share one store, a truncation
//! or a removal is one transaction of both.
//!
//! Invariants:
//! - one operation that changes something runs at a time, and is one transaction, so after a crash the name
//!   space is a prefix of the acknowledged operations;
//! - the result of a request with a sequence number is stored in the request's own transaction, so a repeat
//!   is answered from it and not executed again;
//! - an inode without a name is in the queue of removed files from the transaction that takes its last name
//!   until the transaction that removes the inode, so a crash leaks nothing.
#![forbid(unsafe_code)]

mod acl;
mod cache;
mod check;
mod dirs;
mod entries;
mod error;
mod inode;
mod judge;
mod lost_found;
mod ops;
mod paths;
mod readdir;
mod reap;
mod rename;
mod repair;
pub mod rows;
mod service;
mod setattr;
mod target;
mod xattr;

pub use check::{CheckProgress, MetaCheck};
pub use error::MetaError;
pub use inode::{Data, FileKind, Inode, Layout};
pub use repair::Repair;
pub use target::{FsInfo, InUse, MetaTarget};

/// Longest file name, in bytes.
pub const NAME_MAX: usize = 255;
/// Longest target of a symbolic link, in bytes.
pub const PATH_MAX: usize = 4095;
/// Longest value of an extended attribute, in bytes.
pub const XATTR_MAX: usize = 64 * 1024;
/// Most names (hard links) of one inode that is no directory.
pub const LINK_MAX: u32 = 65_000;
/// Inode number of the root directory of the first fileset. The upper 16 bits of an inode number are the
/// fileset.
pub const ROOT: penstock_base::Ino = penstock_base::Ino((1 << 48) | 1);
