//! Everything that the rows say of one inode number.

use crate::ROOT;
use crate::inode::FileKind;
use penstock_base::{Ino, Spread};
use penstock_chunk::{Known, Owned};

/// The parts of an inode's row that are needed to check it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Brief {
    pub(super) kind: FileKind,
    pub(super) type_bits: u32,
    pub(super) nlink: u32,
    pub(super) size: u64,
    pub(super) parent: Ino,
    pub(super) entries: u64,
    pub(super) chunk_blocks: u32,
    /// As numbered in the row: 0 none, 1 inline, 2 chunks.
    pub(super) data: u8,
    pub(super) inline_bytes: u64,
    /// Truncate generation and owner.
    pub(super) known: Known,
    /// Other targets may have a part of it.
    pub(super) is_spread: bool,
    /// The targets of its layout; none if it fits no map.
    pub(super) spread: Option<Spread>,
}

/// Everything that is known of one inode number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    pub(super) row: Option<Brief>,
    /// A row exists, but it cannot be decoded.
    pub(super) opaque: bool,
    pub(super) queued: bool,
    pub(super) xattrs: bool,
    pub(crate) owned: Owned,
    /// Number of names, if it is no directory.
    pub(super) names: u32,
    /// Directory and cookie of each name, if it is a directory.
    pub(super) holders: Vec<(Ino, u64)>,
    /// Rows of entries in it; below, how many of these are directories.
    pub(crate) children: u64,
    pub(super) subdirs: u32,
    /// True if some of its entries are from a later release.
    pub(super) unsure: bool,
}

impl Trace {
    pub(super) fn is_known(&self) -> bool {
        self.row.is_some() || self.opaque
    }

    /// True if data belongs to it.
    pub(super) fn has_data(&self) -> bool {
        self.owned.chunks > 0 || self.xattrs || self.children > 0
    }

    /// True if nothing but names refers to it.
    pub(super) fn has_only_names(&self) -> bool {
        !self.is_known() && !self.has_data() && !self.queued
    }

    pub(super) fn is_dir(&self) -> bool {
        self.row.is_some_and(|row| row.kind == FileKind::Directory)
    }

    /// Directory and cookie of the one name of a directory that counts: the name in its row's parent, or else
    /// the first.
    pub(super) fn holder(&self, ino: Ino) -> Option<(Ino, u64)> {
        if ino == ROOT {
            return None;
        }
        let parent = self.row.map(|row| row.parent);
        let in_parent = self.holders.iter().find(|(dir, _)| Some(*dir) == parent);
        in_parent.or(self.holders.first()).copied()
    }

    /// Number of names, and true if it is in the queue of removed files.
    pub(crate) fn names_and_queue(&self) -> (u32, bool) {
        (self.names, self.queued)
    }

    /// True for a directory; none if the type is not known.
    pub(super) fn known_dir(&self) -> Option<bool> {
        self.row.map(|_| self.is_dir())
    }
}
