//! The inodes that were made since rows were last made durable, and by which session.
//!
//! Invariant: an inode whose creation may be lost is here, unless there are more than [`MOST`]: then every
//! inode counts as made by another session.

use penstock_base::{HashMap, Ino};
use std::collections::VecDeque;

/// Most inodes that are remembered.
const MOST: usize = 1 << 16;

#[derive(Debug, Default)]
pub(crate) struct Fresh {
    /// The session that made each, and its number in the order.
    makers: HashMap<Ino, (u64, u64)>,
    /// The inodes in the order in which they were made, with their numbers in it.
    order: VecDeque<(u64, Ino)>,
    last: u64,
    /// The last one that was not remembered.
    left_out: u64,
}

impl Fresh {
    /// A session makes an inode. To be called before its row is written, since others may find it then, and
    /// after: what is made durable in between may be without it.
    pub(crate) fn made(&mut self, session: u64, ino: Ino) {
        self.last += 1;
        if self.order.len() >= MOST {
            self.left_out = self.last;
            return;
        }
        self.makers.insert(ino, (session, self.last));
        self.order.push_back((self.last, ino));
        assert!(self.makers.len() <= self.order.len(), "each inode has its place in the order");
    }

    /// The number of the last inode that was made.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// The inodes up to this number are durable.
    pub(crate) fn are_durable(&mut self, upto: u64) {
        assert!(upto <= self.last, "they were made");
        while let Some((number, ino)) = self.order.pop_front_if(|(number, _)| *number <= upto) {
            if self.makers.get(&ino).is_some_and(|(_, last)| *last == number) {
                self.makers.remove(&ino);
            }
        }
        if self.left_out <= upto {
            self.left_out = 0;
        }
    }

    /// True if the creation of an inode by another session may be lost.
    pub(crate) fn is_by_another(&self, session: u64, ino: Ino) -> bool {
        match self.makers.get(&ino) {
            Some((maker, _)) => *maker != session,
            None => self.left_out > 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_is_fresh_until_it_is_durable() {
        let mut fresh = Fresh::default();
        fresh.made(1, Ino(7));
        fresh.made(2, Ino(8));
        assert!(fresh.is_by_another(2, Ino(7)) && !fresh.is_by_another(1, Ino(7)));
        assert!(!fresh.is_by_another(1, Ino(9)), "it is older");
        fresh.made(3, Ino(10));
        let before_its_row = fresh.last();
        fresh.made(3, Ino(10));
        fresh.are_durable(before_its_row);
        assert!(fresh.is_by_another(1, Ino(10)), "its row may have been written after that");
        fresh.made(2, Ino(8));
        assert!(!fresh.is_by_another(2, Ino(7)) && fresh.is_by_another(1, Ino(8)));
    }

    #[test]
    fn more_than_are_remembered_count_as_made_by_another() {
        let mut fresh = Fresh::default();
        (0..MOST as u64).for_each(|ino| fresh.made(1, Ino(ino)));
        assert!(!fresh.is_by_another(1, Ino(1 << 40)));
        fresh.made(1, Ino(1 << 40));
        assert!(fresh.is_by_another(1, Ino(1 << 40)) && !fresh.is_by_another(1, Ino(5)));
        fresh.are_durable(fresh.last() - 1);
        assert!(fresh.is_by_another(1, Ino(1 << 40)));
        fresh.are_durable(fresh.last());
        assert!(!fresh.is_by_another(1, Ino(1 << 40)) && fresh.makers.is_empty() && fresh.order.is_empty());
    }
}
