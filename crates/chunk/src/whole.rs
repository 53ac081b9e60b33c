//! Files of which memory holds every chunk that there is: nobody needs to look for rows of others.
//!
//! Invariant: of a file noted in `Target::whole`, each chunk that has a row is in `Target::chunks`. A file comes in when
//! its inode is made, before anything can be written to it; all go when chunks are let go of.

use crate::target::Target;
use penstock_base::Ino;

impl Target {
    /// Notes that an inode is new: it has a number that no inode had before, and no chunk.
    pub fn made(&self, branch: u64, ino: Ino) {
        self.whole.note((branch, ino));
    }
}
