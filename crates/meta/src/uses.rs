//! Inodes in use, inodes that are being deleted, and the queue of removed files.
//!
//! Invariants:
//! - an inode that is in use has at least one use, and every use ends once;
//! - an inode that is being deleted is not in use, and no use begins;
//! - a removed file is in the queue at most once; one is reaped at a time.

use penstock_base::{HashMap, Ino};
use penstock_chunk::Owner;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Uses of inodes: open files and running changes of contents. A used inode is not deleted.
#[derive(Debug, Default)]
pub(crate) struct Uses(HashMap<Ino, State>);

/// State of an inode that is not idle.
#[derive(Debug)]
enum State {
    /// It is in use.
    Used {
        /// The number of uses, at least one.
        count: u64,
        /// The owner and the truncate generation that a change gave it last since it is in use.
        changed: Option<(Owner, u64)>,
    },
    /// It is being deleted, or an attempt at that deleted a part.
    Going { is_partly_gone: bool },
}

/// An inode is being deleted, so no use of it begins.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct IsGoing;

impl Uses {
    /// Adds uses of an inode.
    pub(crate) fn begin(&mut self, ino: Ino, times: u64) -> Result<(), IsGoing> {
        match self.0.get_mut(&ino) {
            Some(State::Going { .. }) => return Err(IsGoing),
            Some(State::Used { count, .. }) => *count += times,
            None if times > 0 => drop(self.0.insert(ino, State::Used { count: times, changed: None })),
            None => {}
        }
        Ok(())
    }

    /// Ends uses of an inode. Returns true if these were the last ones.
    ///
    /// # Panics
    /// If the inode has fewer uses.
    pub(crate) fn end(&mut self, ino: Ino, times: u64) -> bool {
        let Some(State::Used { count, .. }) = self.0.get_mut(&ino) else {
            assert!(times == 0, "more uses of inode {ino} end than began");
            return false;
        };
        assert!(*count >= times, "more uses of inode {ino} end than began");
        *count -= times;
        if *count > 0 {
            return false;
        }
        self.0.remove(&ino);
        true
    }

    /// True if the inode is in use.
    pub(crate) fn contains(&self, ino: Ino) -> bool {
        matches!(self.0.get(&ino), Some(State::Used { .. }))
    }

    /// The owner of an inode or its truncate generation was changed.
    pub(crate) fn note_change(&mut self, ino: Ino, owner: Owner, truncations: u64) {
        if let Some(State::Used { count, changed }) = self.0.get_mut(&ino) {
            assert!(*count > 0, "inode {ino} is in use");
            *changed = Some((owner, truncations));
        }
    }

    /// The owner and the truncate generation that a change gave an inode since it is in use.
    pub(crate) fn last_change(&self, ino: Ino) -> Option<(Owner, u64)> {
        match self.0.get(&ino) {
            Some(State::Used { changed, .. }) => *changed,
            _ => None,
        }
    }

    /// Keeps new uses of an inode away, because it is about to be deleted. Returns false if it is in use.
    pub(crate) fn begin_deletion(&mut self, ino: Ino) -> bool {
        let state = self.0.entry(ino).or_insert(State::Going { is_partly_gone: false });
        matches!(state, State::Going { .. })
    }

    /// A part of an inode that is being deleted is gone.
    ///
    /// # Panics
    /// If it is not being deleted.
    pub(crate) fn part_is_gone(&mut self, ino: Ino) {
        let state = self.0.insert(ino, State::Going { is_partly_gone: true });
        assert!(matches!(state, Some(State::Going { .. })), "inode {ino} was being deleted, not {state:?}");
    }

    /// A start finds the row of a removed file that says that a part of it is gone. If the inode is in use
    /// all the same, the row is damaged.
    pub(crate) fn restore_deletion(&mut self, ino: Ino) {
        self.0.entry(ino).or_insert(State::Going { is_partly_gone: true });
    }

    /// An attempt at a deletion failed. If a part is gone, nobody may use the rest.
    pub(crate) fn end_attempt(&mut self, ino: Ino) {
        if matches!(self.0.get(&ino), Some(State::Going { is_partly_gone: false })) {
            self.0.remove(&ino);
        }
    }

    /// The inode is gone, or stays after all. Returns true if it was being deleted.
    pub(crate) fn end_deletion(&mut self, ino: Ino) -> bool {
        let was_going = matches!(self.0.get(&ino), Some(State::Going { .. }));
        if was_going {
            self.0.remove(&ino);
        }
        was_going
    }
}

/// Removed files that wait to be reaped, by the earliest time at which each may be.
#[derive(Debug, Default)]
pub(crate) struct RemovedFiles {
    waiting: BTreeMap<Ino, Waiting>,
    /// The same files, by time.
    order: BTreeSet<(Duration, Ino)>,
    reaping: Option<Ino>,
}

#[derive(Debug)]
struct Waiting {
    due: Duration,
    /// It probably cannot be reaped before a repair, or before a target has done other work.
    is_stuck: bool,
}

impl RemovedFiles {
    /// Queues a file, to be reaped at `due` or later. A file that waits already goes at the earlier time.
    pub(crate) fn push(&mut self, due: Duration, ino: Ino) {
        let due = self.waiting.get(&ino).map_or(due, |waiting| waiting.due.min(due));
        self.put(ino, Waiting { due, is_stuck: false });
    }

    /// Makes files that are stuck due now, after a repair or once a target has done work.
    pub(crate) fn retry_all(&mut self) {
        let stuck: Vec<Ino> =
            self.waiting.iter().filter(|(_, file)| file.is_stuck).map(|(ino, _)| *ino).collect();
        stuck.into_iter().for_each(|ino| self.push(Duration::ZERO, ino));
    }

    /// The file that is due first, with its time.
    pub(crate) fn first(&self) -> Option<(Duration, Ino)> {
        self.order.first().copied()
    }

    /// Takes a file from the queue, to be reaped now.
    ///
    /// # Panics
    /// If it is not in the queue, or another one is being reaped.
    pub(crate) fn begin(&mut self, ino: Ino) {
        assert!(self.reaping.is_none(), "one file is reaped at a time");
        let waiting = self.waiting.remove(&ino);
        assert!(waiting.is_some_and(|file| self.order.remove(&(file.due, ino))), "inode {ino} was queued");
        self.reaping = Some(ino);
    }

    /// The file that was taken is gone, or still in use.
    pub(crate) fn done(&mut self) {
        assert!(self.reaping.take().is_some(), "a file was being reaped");
    }

    /// The file that was taken could not be reaped. It waits until `due`, unless it was queued again
    /// meanwhile; with `is_stuck` it probably needs a repair.
    pub(crate) fn retry(&mut self, due: Duration, is_stuck: bool) {
        let Some(ino) = self.reaping.take() else { panic!("a file was being reaped") };
        if !self.waiting.contains_key(&ino) {
            self.put(ino, Waiting { due, is_stuck });
        }
    }

    fn put(&mut self, ino: Ino, waiting: Waiting) {
        self.order.insert((waiting.due, ino));
        if let Some(before) = self.waiting.insert(ino, waiting)
            && before.due != self.waiting[&ino].due
        {
            self.order.remove(&(before.due, ino));
        }
        assert_eq!(self.order.len(), self.waiting.len(), "a file is in the queue once");
    }

    /// True if a file is being reaped, or waits and is not stuck.
    pub(crate) fn is_fresh(&self, ino: Ino) -> bool {
        self.reaping == Some(ino) || self.waiting.get(&ino).is_some_and(|file| !file.is_stuck)
    }

    /// The files of which that is so.
    pub(crate) fn fresh(&self) -> Vec<Ino> {
        let waiting = self.waiting.iter().filter(|(_, file)| !file.is_stuck).map(|(ino, _)| *ino);
        self.reaping.into_iter().chain(waiting).collect()
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
                true => assert_eq!(uses.begin(Ino(7), times), Ok(())),
                false => assert_eq!(uses.end(Ino(7), times), !contains),
            }
            assert_eq!(uses.contains(Ino(7)), contains);
        }
        assert!(!uses.end(Ino(8), 0), "nothing ended");
        assert_eq!(uses.begin(Ino(8), 0), Ok(()));
        assert!(!uses.contains(Ino(8)), "no use is no use");
    }

    #[test]
    fn a_change_of_the_owner_is_known_until_the_last_use_ends() {
        let mut uses = Uses::default();
        let owner = |uid| Owner { uid, ..Owner::default() };
        uses.note_change(Ino(7), owner(1), 1);
        assert_eq!(uses.last_change(Ino(7)), None, "nobody uses it");
        uses.begin(Ino(7), 2).unwrap();
        for uid in [2, 3] {
            uses.note_change(Ino(7), owner(uid), uid.into());
            assert_eq!(uses.last_change(Ino(7)), Some((owner(uid), uid.into())));
        }
        assert!(!uses.end(Ino(7), 1) && uses.last_change(Ino(7)) == Some((owner(3), 3)));
        assert!(uses.end(Ino(7), 1) && uses.last_change(Ino(7)).is_none());
    }

    #[test]
    #[should_panic(expected = "more uses of inode 7 end than began")]
    fn a_use_cannot_end_twice() {
        let mut uses = Uses::default();
        uses.begin(Ino(7), 1).unwrap();
        uses.end(Ino(7), 1);
        uses.end(Ino(7), 1);
    }

    #[test]
    fn no_use_begins_while_an_inode_is_deleted() {
        let mut uses = Uses::default();
        uses.begin(Ino(7), 1).unwrap();
        assert!(!uses.begin_deletion(Ino(7)), "it is in use");
        assert!(uses.end(Ino(7), 1));
        assert!(uses.begin_deletion(Ino(7)) && !uses.contains(Ino(7)));
        for times in [0, 1] {
            assert_eq!(uses.begin(Ino(7), times), Err(IsGoing));
        }
        assert_eq!(uses.begin(Ino(8), 1), Ok(()), "another one");
        uses.end_attempt(Ino(7));
        assert_eq!(uses.begin(Ino(7), 1), Ok(()), "it stayed");
        assert!(!uses.end_deletion(Ino(7)) && uses.contains(Ino(7)), "it is in use");
    }

    #[test]
    fn an_inode_of_which_a_part_is_gone_takes_no_use_before_the_rest_is() {
        let mut uses = Uses::default();
        assert!(uses.begin_deletion(Ino(7)));
        uses.part_is_gone(Ino(7));
        for _ in 0..2 {
            uses.end_attempt(Ino(7));
            assert_eq!(uses.begin(Ino(7), 1), Err(IsGoing));
            assert!(uses.begin_deletion(Ino(7)), "another attempt");
        }
        assert!(uses.end_deletion(Ino(7)) && !uses.end_deletion(Ino(7)));
        assert_eq!(uses.begin(Ino(7), 1), Ok(()), "it has a name again");
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
            files.begin(ino);
            assert!(!files.fresh().is_empty(), "one is being reaped");
            order.push((due.as_secs(), ino.0));
            // The first attempt at file 5 fails.
            match (due.as_secs(), ino.0) {
                (2, 5) => files.retry(at(4), false),
                _ => files.done(),
            }
        }
        assert_eq!(order, [(0, 9), (2, 5), (3, 1), (4, 5)]);
        assert!(files.fresh().is_empty());
    }

    #[test]
    fn a_file_that_is_stuck_holds_up_no_other_one() {
        let at = Duration::from_secs;
        let mut files = RemovedFiles::default();
        files.push(at(1), Ino(1));
        files.begin(Ino(1));
        files.retry(at(600), true);
        assert!(files.fresh().is_empty(), "nobody waits for a repair");
        files.push(at(2), Ino(2));
        assert!(!files.fresh().is_empty());
        assert_eq!(files.first(), Some((at(2), Ino(2))));
        files.begin(Ino(2));
        files.done();
        // After a repair it is queued again, and goes at once.
        files.push(at(0), Ino(1));
        assert!(!files.fresh().is_empty());
        files.begin(Ino(1));
        files.done();
        assert!(files.fresh().is_empty() && files.first().is_none());
    }

    #[test]
    fn a_file_waits_once() {
        let at = Duration::from_secs;
        let mut files = RemovedFiles::default();
        for due in [5, 9, 3, 4] {
            files.push(at(due), Ino(1));
        }
        assert_eq!(files.first(), Some((at(3), Ino(1))), "the earliest time counts");
        files.begin(Ino(1));
        assert!(files.first().is_none());
        // It is queued while it is being reaped, and then the attempt fails.
        files.push(at(6), Ino(1));
        files.retry(at(600), true);
        assert_eq!(files.first(), Some((at(6), Ino(1))));
        assert!(!files.fresh().is_empty());
        files.begin(Ino(1));
        files.done();
        assert!(files.fresh().is_empty() && files.first().is_none());
        let again = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| files.begin(Ino(1))));
        assert!(again.is_err(), "it is not in the queue");
    }
}
