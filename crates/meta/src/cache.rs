//! Inodes kept in memory, bounded.
//!
//! Invariant: an inode is put in by the operation that wrote it, after its transaction, or by a read that no
//! transaction has overtaken (the count of transactions is still the one from before it).

use crate::inode::Inode;
use penstock_base::{HashMap, Ino};
use std::collections::VecDeque;

const MOST: usize = 1 << 16;

/// Inodes by number; the first put in is the first to go.
#[derive(Default)]
pub(crate) struct InodeCache {
    inodes: HashMap<Ino, Inode>,
    order: VecDeque<Ino>,
}

impl InodeCache {
    pub(crate) fn get(&self, ino: Ino) -> Option<&Inode> {
        self.inodes.get(&ino)
    }

    pub(crate) fn put(&mut self, inode: Inode) {
        let ino = inode.ino;
        if self.inodes.insert(ino, inode).is_none() {
            self.order.push_back(ino);
        }
        while self.order.len() > MOST {
            let oldest = self.order.pop_front().expect("the queue is longer than the bound");
            self.inodes.remove(&oldest);
        }
    }

    pub(crate) fn remove(&mut self, ino: Ino) {
        if self.inodes.remove(&ino).is_some() {
            self.order.retain(|other| *other != ino);
        }
    }
}
