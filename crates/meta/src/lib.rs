//! Metadata targets: the name space of whole filesets in a key-value store.
//!
//! Owns inodes, directories, links, extended attributes and the queue of removed files. Does not own file
//! data (a storage target does), nor sessions (`penstock-session`). Where both share one store, a truncation
//! or a removal is one transaction of both.
//!
//! The parts, from the bottom: `names` (rows, their caches, and the turn to change them), `chunks` (the chunk
//! store as a small trait), `uses` (inodes in use, removed files), `parts` (these together), `ops` (one
//! function per operation), `reaper`, `fsck` (checks and repairs, from the guard of the quiet gate), `target`
//! and `service`.
//!
//! Invariants:
//! - one operation that changes something runs at a time, and is one transaction, so after a crash the name
//!   space is a prefix of the acknowledged operations;
//! - the result of a request with a sequence number is stored in the request's own transaction, so a repeat
//!   is answered from it and not executed again;
//! - an inode without a name is in the queue of removed files from the transaction that takes its last name
//!   until the transaction that removes the inode, so a crash leaks nothing.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod access;
mod acl;
mod chunks;
mod elsewhere;
mod error;
mod forgotten;
mod fresh;
mod fsck;
mod inode;
mod names;
mod ops;
mod other_target;
mod parts;
mod queue;
mod queue_work;
mod reaper;
mod restore;
pub mod rows;
mod service;
mod store;
mod target;
mod uses;

pub use chunks::ChunkStore;
pub use elsewhere::Elsewhere;
pub use error::MetaError;
pub use fsck::{CheckProgress, Checking, MetaCheck, Repair, Targets};
pub use inode::{Data, FileKind, Inode, Layout};
pub use ops::forget::{FilesOn, forgotten_targets};
pub use ops::layout::{LayoutInfo, WantedLayout};
pub use other_target::{HeldFile, OtherTarget};
pub use parts::InUse;
pub use restore::{RestoredNames, is_copied, number_of_newer, reserve_for_newer, reserved_inodes};
pub use store::{NewStore, check_store, open_store, set_repaired};
pub use target::{FsInfo, MetaTarget};

/// Longest file name, in bytes.
pub const NAME_MAX: usize = 255;
/// Longest target of a symbolic link, in bytes.
pub const PATH_MAX: usize = 4095;
/// Longest value of an extended attribute, in bytes.
pub const XATTR_MAX: usize = 64 * 1024;
/// Most names (hard links) of one inode that is no directory.
pub const LINK_MAX: u32 = 65_000;
/// Inode number of the root directory of the first family.
pub const ROOT: penstock_base::Ino = penstock_base::Ino::of_family(1, 1);
/// The highest inode number of the first family.
pub(crate) const LAST_INO: penstock_base::Ino = penstock_base::Ino::of_family(1, (1 << 40) - 1);
/// Most chunks dropped in one transaction, beside a few other rows.
const STEP_CHUNKS: usize = penstock_kv::ROWS_AT_ONCE - 16;

#[cfg(test)]
mod tests;
