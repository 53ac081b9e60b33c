//! Files of which memory holds every chunk that there is: nobody needs to look for rows of others.
//!
//! Invariant: of a file in this set, each chunk that has a row is in `Target::chunks`. A file comes in when its inode
//! is made, before anything can be written to it; all go when chunks are let go of.

use crate::target::Target;
use penstock_base::{HashSet, Ino};
use std::cell::RefCell;

const MOST: usize = 1 << 16;

/// Files by branch and inode.
#[derive(Default)]
pub(crate) struct WholeFiles(RefCell<HashSet<(u64, Ino)>>);

impl WholeFiles {
    pub(crate) fn contains(&self, branch: u64, ino: Ino) -> bool {
        self.0.borrow().contains(&(branch, ino))
    }

    /// Chunks leave memory, or rows change behind them.
    pub(crate) fn clear(&self) {
        self.0.borrow_mut().clear();
    }

    pub(crate) fn forget(&self, branch: u64, ino: Ino) {
        self.0.borrow_mut().remove(&(branch, ino));
    }
}

impl Target {
    /// Notes that an inode is new: it has a number that no inode had before, and no chunk.
    pub fn made(&self, branch: u64, ino: Ino) {
        let mut files = self.whole.0.borrow_mut();
        if files.len() >= MOST {
            files.clear();
        }
        files.insert((branch, ino));
    }
}
