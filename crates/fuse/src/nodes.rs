//! The inodes that the kernel knows.
//!
//! Each reply that names an inode counts one lookup of it, and a FORGET takes lookups back. As long as the
//! count is above 0, a program may have the inode open, be in it, or hold it by `O_PATH`. So the last
//! attributes of an inode that has lost its last name through this mount are kept until then, and answer for
//! it once the service has dropped it. It has nothing else by then: a directory that is removed is empty and
//! stays so, and a file is dropped only when nobody has it open.
//!
//! Invariants:
//! - an inode is in the table exactly while the kernel knows it;
//! - attributes are kept only for inodes in the table.

use penstock_base::{HashMap, Ino};
use penstock_client::Attr;
use std::cell::RefCell;

/// An inode that the kernel knows.
#[derive(Default)]
struct Node {
    /// Replies that named it, less what the kernel has forgotten; at least 1.
    lookups: u64,
    /// Its last attributes, if it has lost its last name.
    removed: Option<Box<Attr>>,
}

/// The table of inodes that the kernel knows. The root is not in it: the kernel never forgets it.
#[derive(Default)]
pub(crate) struct Nodes(RefCell<HashMap<Ino, Node>>);

impl Nodes {
    /// A reply names an inode.
    pub(crate) fn looked_up(&self, ino: Ino) {
        let mut nodes = self.0.borrow_mut();
        let node = nodes.entry(ino).or_default();
        node.lookups += 1;
    }

    /// The kernel has forgotten that many lookups of an inode.
    pub(crate) fn forget(&self, ino: Ino, lookups: u64) {
        let mut nodes = self.0.borrow_mut();
        let Some(node) = nodes.get_mut(&ino) else {
            tracing::debug!(%ino, lookups, "the kernel forgets an inode that no reply named");
            return;
        };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 {
            nodes.remove(&ino);
        }
    }

    /// Takes in attributes that the service or a program has given an inode. Keeps them while it has no name.
    pub(crate) fn note(&self, attr: &Attr) {
        let mut nodes = self.0.borrow_mut();
        if let Some(node) = nodes.get_mut(&Ino(attr.ino)) {
            match attr.nlink {
                0 => node.removed = Some(Box::new(attr.clone())),
                // A crash may bring a name back.
                _ => node.removed = None,
            }
        }
    }

    /// The last attributes of an inode that has lost its last name through this mount.
    pub(crate) fn removed(&self, ino: Ino) -> Option<Attr> {
        let nodes = self.0.borrow();
        let attr = nodes.get(&ino)?.removed.as_deref().cloned()?;
        assert_eq!((attr.ino, attr.nlink), (ino.0, 0), "attributes of a removed inode");
        Some(attr)
    }

    /// Number of inodes that the kernel knows.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.0.borrow().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(ino: u64, nlink: u32) -> Attr {
        Attr { ino, nlink, mode: 0o040_700, ..Attr::default() }
    }

    #[test]
    fn an_inode_is_known_until_all_its_lookups_are_forgotten() {
        let nodes = Nodes::default();
        for ino in [7, 7, 8] {
            nodes.looked_up(Ino(ino));
        }
        nodes.forget(Ino(7), 1);
        assert_eq!(nodes.len(), 2);
        nodes.forget(Ino(7), 1);
        nodes.forget(Ino(9), 1);
        assert_eq!(nodes.len(), 1, "the last lookup of inode 7 is forgotten, and 9 was never named");
        nodes.forget(Ino(8), 5);
        assert_eq!(nodes.len(), 0);
    }

    #[test]
    fn the_attributes_of_a_removed_inode_are_kept_while_the_kernel_knows_it() {
        let nodes = Nodes::default();
        nodes.note(&attr(7, 0));
        assert_eq!(nodes.removed(Ino(7)), None, "the kernel does not know it");
        nodes.looked_up(Ino(7));
        nodes.note(&attr(7, 1));
        assert_eq!(nodes.removed(Ino(7)), None, "it has another name");
        nodes.note(&attr(7, 0));
        nodes.note(&attr(7, 1));
        assert_eq!(nodes.removed(Ino(7)), None, "it has a name again");
        nodes.note(&Attr { mode: 0o040_500, ..attr(7, 0) });
        nodes.note(&attr(7, 0));
        assert_eq!(nodes.removed(Ino(7)), Some(attr(7, 0)));
        nodes.looked_up(Ino(7));
        nodes.forget(Ino(7), 1);
        assert!(nodes.removed(Ino(7)).is_some());
        nodes.forget(Ino(7), 1);
        nodes.looked_up(Ino(7));
        assert_eq!(nodes.removed(Ino(7)), None, "a number is not given twice, so this is a late reply");
    }
}
