//! Inodes cached in memory, in a bounded number.
//!
//! Invariant: an inode enters the cache after the transaction that wrote it, or from a read during which no
//! transaction ran (the number of transactions is the same before and after it).

use crate::inode::Inode;
use penstock_base::{HashMap, Ino};
use std::cell::Cell;
use std::collections::VecDeque;

const MOST: usize = 1 << 16;

/// Inodes by number. Eviction takes the oldest that was not used since it entered or was last considered.
#[derive(Default)]
pub(crate) struct InodeCache {
    inodes: HashMap<Ino, Kept>,
    /// Every cached inode once, and some that were removed.
    order: VecDeque<Ino>,
}

struct Kept {
    inode: Inode,
    used: Cell<bool>,
}

impl InodeCache {
    pub(crate) fn get(&self, ino: Ino) -> Option<&Inode> {
        let kept = self.inodes.get(&ino)?;
        kept.used.set(true);
        Some(&kept.inode)
    }

    pub(crate) fn put(&mut self, inode: Inode) {
        let ino = inode.ino;
        if self.inodes.insert(ino, Kept { inode, used: Cell::new(false) }).is_none() {
            self.order.push_back(ino);
        }
        while self.order.len() > MOST {
            let oldest = self.order.pop_front().expect("the queue is longer than the bound");
            match self.inodes.get(&oldest) {
                Some(kept) if kept.used.take() => self.order.push_back(oldest),
                Some(_) => drop(self.inodes.remove(&oldest)),
                None => {}
            }
        }
        assert!(self.inodes.len() <= self.order.len(), "every cached inode is in the queue");
    }

    pub(crate) fn clear(&mut self) {
        self.inodes.clear();
        self.order.clear();
    }

    pub(crate) fn remove(&mut self, ino: Ino) {
        self.inodes.remove(&ino);
    }
}
