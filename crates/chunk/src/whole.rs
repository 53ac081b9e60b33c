//! Tracks files all of whose chunks are in memory, so that no rows have to be looked up for them.
//!
//! Invariant: for a file in `Target::whole`, each chunk that has a row is in `Target::chunks`. A file is
//! added when its inode is created, before anything can be written to it. All are removed when chunks are
//! evicted.

use crate::target::Target;
use penstock_base::Ino;

impl Target {
    /// Notes that an inode is new: no inode had its number before, and it has no chunk.
    pub fn made(&self, branch: u64, ino: Ino) {
        self.whole.note((branch, ino));
    }
}
