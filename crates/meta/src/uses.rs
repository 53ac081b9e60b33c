//! Inodes in use, and the queue of removed files.
//!
//! Invariants:
//! - an inode that is in use has at least one use, and every use ends once;
//! - one removed file is reaped at a time, and it is not in the queue meanwhile.

use penstock_base::{HashMap, Ino};
use std::collections::BTreeSet;
use std::time::Duration;

/// Uses of inodes: open files and running changes of contents. A used inode is not reaped.
#[derive(Debug, Default)]
pub(crate) struct Uses(HashMap<Ino, u64>);

impl Uses {
    /// Adds uses of an inode.
    pub(crate) fn begin(&mut self, ino: Ino, times: u64) {
        if times > 0 {
            *self.0.entry(ino).or_default() += times;
        }
    }

    /// Ends uses of an inode. Returns true if these were the last ones.
    ///
    /// # Panics
    /// If the inode has fewer uses.
    pub(crate) fn end(&mut self, ino: Ino, times: u64) -> bool {
        let Some(count) = self.0.get_mut(&ino).filter(|count| **count >= times) else {
            assert!(times == 0, "more uses of inode {ino} end than began");
            return false;
        };
        *count -= times;
        if *count > 0 {
            return false;
        }
        self.0.remove(&ino);
        true
    }

    /// True if the inode is in use.
    pub(crate) fn contains(&self, ino: Ino) -> bool {
        self.0.contains_key(&ino)
    }
}

/// Removed files that wait to be reaped, by the earliest time at which each may be.
#[derive(Debug, Default)]
pub(crate) struct RemovedFiles {
    queue: BTreeSet<(Duration, Ino)>,
    reaping: Option<Ino>,
    /// Files in the queue that cannot be reaped before a repair.
    stuck: BTreeSet<Ino>,
}

impl RemovedFiles {
    /// Queues a file, to be reaped at `due` or later. A file may be queued several times.
    pub(crate) fn push(&mut self, due: Duration, ino: Ino) {
        self.queue.insert((due, ino));
    }

    /// The file that is due first, with its time.
    pub(crate) fn first(&self) -> Option<(Duration, Ino)> {
        self.queue.first().copied()
    }

    /// Takes the first file from the queue, to be reaped now.
    pub(crate) fn begin(&mut self, due: Duration, ino: Ino) {
        assert!(self.reaping.is_none(), "one file is reaped at a time");
        assert!(self.queue.remove(&(due, ino)), "a file that is reaped was queued");
        self.reaping = Some(ino);
    }

    /// The file that was taken is gone, or still in use.
    pub(crate) fn done(&mut self) {
        let ino = self.take();
        self.stuck.remove(&ino);
    }

    /// The file that was taken could not be reaped. It waits until `due`; with `stuck` it probably needs a
    /// repair.
    pub(crate) fn retry(&mut self, due: Duration, stuck: bool) {
        let ino = self.take();
        self.queue.insert((due, ino));
        match stuck {
            true => self.stuck.insert(ino),
            false => self.stuck.remove(&ino),
        };
    }

    fn take(&mut self) -> Ino {
        let ino = self.reaping.take();
        assert!(ino.is_some(), "a file was being reaped");
        ino.unwrap_or_default()
    }

    /// True if every file in the queue is stuck, and none is being reaped.
    pub(crate) fn is_idle(&self) -> bool {
        self.reaping.is_none() && self.queue.iter().all(|(_, ino)| self.stuck.contains(ino))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_use_of_several_ends_the_use() {
        let mut uses = Uses::default();
        for (begin, times, contains) in
            [(true, 2, true), (true, 0, true), (false, 1, true), (true, 3, true), (false, 4, false)]
        {
            match begin {
                true => uses.begin(Ino(7), times),
                false => assert_eq!(uses.end(Ino(7), times), !contains),
            }
            assert_eq!(uses.contains(Ino(7)), contains);
        }
        assert!(!uses.end(Ino(8), 0), "nothing ended");
        uses.begin(Ino(8), 0);
        assert!(!uses.contains(Ino(8)), "no use is no use");
    }

    #[test]
    #[should_panic(expected = "more uses of inode 7 end than began")]
    fn a_use_cannot_end_twice() {
        let mut uses = Uses::default();
        uses.begin(Ino(7), 1);
        uses.end(Ino(7), 1);
        uses.end(Ino(7), 1);
    }

    #[test]
    fn files_are_reaped_in_the_order_of_their_times() {
        let at = Duration::from_secs;
        let mut files = RemovedFiles::default();
        for (due, ino) in [(3, 1), (0, 9), (3, 1), (2, 5)] {
            files.push(at(due), Ino(ino));
        }
        let mut order = Vec::new();
        while let Some((due, ino)) = files.first() {
            files.begin(due, ino);
            assert!(!files.is_idle(), "one is being reaped");
            order.push((due.as_secs(), ino.0));
            // The first attempt at file 5 fails.
            match (due.as_secs(), ino.0) {
                (2, 5) => files.retry(at(4), false),
                _ => files.done(),
            }
        }
        assert_eq!(order, [(0, 9), (2, 5), (3, 1), (4, 5)]);
        assert!(files.is_idle());
    }

    #[test]
    fn a_file_that_is_stuck_holds_up_no_other_one() {
        let at = Duration::from_secs;
        let mut files = RemovedFiles::default();
        files.push(at(1), Ino(1));
        files.begin(at(1), Ino(1));
        files.retry(at(600), true);
        assert!(files.is_idle(), "nobody waits for a repair");
        files.push(at(2), Ino(2));
        assert!(!files.is_idle());
        assert_eq!(files.first(), Some((at(2), Ino(2))));
        files.begin(at(2), Ino(2));
        files.done();
        // After a repair it is queued again, and goes.
        files.push(at(0), Ino(1));
        for due in [0, 600] {
            files.begin(at(due), Ino(1));
            files.done();
        }
        assert!(files.is_idle() && files.first().is_none());
    }
}
