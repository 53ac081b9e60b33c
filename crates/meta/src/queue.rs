//! The state of the queue of work for targets of other stacks, in memory.
//!
//! A transaction of names or sizes records in a row the work that each such target has to do for it. A target
//! acts only after the row is durable, may be asked several times, and is taken off the row once it has
//! answered durably. The row goes with the last target ([`crate::queue_work`]).
//!
//! Invariants:
//! - numbers rise, and a number is given once;
//! - a target carries out its work in the order of numbers;
//! - an entry counts for a target from the commit of its row to the commit of the target's answer.

use penstock_base::TargetId;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use tokio::sync::Notify;

/// The entries of one target.
#[derive(Default)]
struct OfTarget {
    /// The first number that may be of an entry that it has not carried out.
    next: u64,
    entries: u64,
    /// Entries that it has answered since the start.
    answers: u64,
    /// Its last attempt failed.
    is_stuck: bool,
    wake: Rc<Notify>,
}

/// The state of the queue.
#[derive(Default)]
pub(crate) struct Queue {
    targets: RefCell<BTreeMap<TargetId, OfTarget>>,
    /// The last number of a transaction that was committed.
    committed: Cell<u64>,
}

/// An entry that is in a transaction and not committed.
#[must_use]
pub(crate) struct Entry {
    number: u64,
    targets: Vec<TargetId>,
}

impl Entry {
    /// Work of this number for targets.
    pub(crate) fn new(number: u64, targets: Vec<TargetId>) -> Self {
        assert!(number > 0 && !targets.is_empty(), "entry {number} is for {targets:?}");
        Self { number, targets }
    }
}

impl Queue {
    /// The last number of a transaction that was committed.
    pub(crate) fn committed(&self) -> u64 {
        self.committed.get()
    }

    /// A start finds that numbers up to this one were given.
    pub(crate) fn were_given(&self, upto: u64) {
        assert!(upto >= self.committed.get(), "numbers rise");
        self.committed.set(upto);
    }

    /// The transaction with an entry was committed, if there was one; or a start finds it.
    pub(crate) fn note(&self, entry: Option<Entry>) {
        let Some(Entry { number, targets }) = entry else { return };
        assert!(number > self.committed.get(), "{number} follows {}", self.committed.get());
        self.committed.set(number);
        let mut known = self.targets.borrow_mut();
        for target in targets {
            let of_target = known.entry(target).or_default();
            of_target.entries += 1;
            of_target.wake.notify_one();
        }
    }

    /// Entries of a target.
    pub(crate) fn entries_of(&self, target: TargetId) -> u64 {
        self.targets.borrow().get(&target).map_or(0, |of_target| of_target.entries)
    }

    /// Entries that a target has answered since the start.
    pub(crate) fn answers_of(&self, target: TargetId) -> u64 {
        self.targets.borrow().get(&target).map_or(0, |of_target| of_target.answers)
    }

    /// Ends a wait for work of a target.
    pub(crate) fn wake(&self, target: TargetId) {
        self.targets.borrow_mut().entry(target).or_default().wake.notify_one();
    }

    /// Ends all waits for work.
    pub(crate) fn wake_all(&self) {
        self.targets.borrow().values().for_each(|of_target| of_target.wake.notify_one());
    }

    /// Waits until there may be work of a target.
    pub(crate) async fn woken(&self, target: TargetId) {
        let wake = self.targets.borrow_mut().entry(target).or_default().wake.clone();
        wake.notified().await;
    }

    /// True if a target has work up to this number that has not failed just now.
    pub(crate) fn has_fresh_work(&self, target: TargetId, upto: u64) -> bool {
        self.due(target, upto).is_some() && !self.targets.borrow()[&target].is_stuck
    }

    /// The first number that may be of work that a target has not done, if that is at most this one.
    pub(crate) fn due(&self, target: TargetId, upto: u64) -> Option<u64> {
        let targets = self.targets.borrow();
        let of_target = targets.get(&target)?;
        (of_target.entries > 0 && of_target.next <= upto).then_some(of_target.next)
    }

    /// The answer of a target to an entry was committed.
    pub(crate) fn answered(&self, target: TargetId) {
        let mut targets = self.targets.borrow_mut();
        let of_target = targets.get_mut(&target).expect("an entry that was answered was counted");
        assert!(of_target.entries > 0, "target {target} answers what it was asked");
        of_target.entries -= 1;
        of_target.answers += 1;
    }

    /// A target has done everything below this number, and failed at it if `is_stuck`.
    pub(crate) fn done_below(&self, target: TargetId, next: u64, is_stuck: bool) {
        let mut targets = self.targets.borrow_mut();
        let of_target = targets.entry(target).or_default();
        assert!(next <= self.committed.get() + 1, "nothing behind {next} was asked");
        of_target.next = of_target.next.max(next);
        of_target.is_stuck = is_stuck;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: TargetId = TargetId(1);
    const TWO: TargetId = TargetId(2);

    #[test]
    fn entries_count_from_their_commit_to_the_last_answer() {
        let queue = Queue::default();
        queue.were_given(4);
        queue.note(None);
        queue.note(Some(Entry::new(5, vec![ONE, TWO])));
        queue.note(Some(Entry::new(9, vec![TWO])));
        assert_eq!((queue.committed(), queue.entries_of(ONE), queue.entries_of(TWO)), (9, 1, 2));
        assert_eq!(queue.due(TWO, 9), Some(0), "nothing was looked at");
        queue.answered(ONE);
        queue.done_below(ONE, 10, false);
        queue.done_below(TWO, 5, true);
        assert_eq!(queue.due(ONE, 9), None, "it has no work");
        assert_eq!((queue.due(TWO, 4), queue.due(TWO, 5)), (None, Some(5)));
        assert!(!queue.has_fresh_work(TWO, 9), "what is left has failed");
        queue.done_below(TWO, 5, false);
        assert!(queue.has_fresh_work(TWO, 9) && !queue.has_fresh_work(TWO, 4));
        assert!(!queue.has_fresh_work(ONE, 9));
        [TWO, TWO].into_iter().for_each(|target| queue.answered(target));
        assert_eq!((queue.entries_of(TWO), queue.due(TWO, 9)), (0, None));
    }

    #[test]
    #[should_panic(expected = "answers what it was asked")]
    fn a_target_answers_once() {
        let queue = Queue::default();
        queue.note(Some(Entry::new(1, vec![ONE])));
        queue.answered(ONE);
        queue.answered(ONE);
    }
}
