//! Changes that were sent to the service, until a `Sync` request has made them durable.
//!
//! Invariant: a `Sync` request makes durable what was sent before it and nothing else. Each change has a
//! number of its own, so a change that is sent during a request waits for another one, however many are in
//! flight.

use penstock_base::Ino;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

/// The number of a change that was sent. Later changes have higher numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Change(u64);

/// The changes of one session that a restart of the service may lose.
#[derive(Default)]
pub(crate) struct SentChanges {
    last: Cell<Change>,
    /// The last change of names or attributes that is not durable.
    names: Cell<Option<Change>>,
    /// Files with a change that is not durable, without those that a request in flight covers.
    files: RefCell<BTreeSet<Ino>>,
}

/// The changes that a `Sync` request covers.
pub(crate) struct Covered {
    /// The last one of them.
    pub(crate) upto: Change,
    /// Files that have some.
    pub(crate) files: BTreeSet<Ino>,
}

impl SentChanges {
    fn next(&self) -> Change {
        let next = Change(self.last.get().0 + 1);
        self.last.set(next);
        next
    }

    /// Records that names or attributes were changed.
    pub(crate) fn names(&self) {
        self.names.set(Some(self.next()));
    }

    /// Records that a file was changed, and returns the number of the change.
    pub(crate) fn file(&self, ino: Ino) -> Change {
        self.files.borrow_mut().insert(ino);
        self.next()
    }

    /// Begins a `Sync` request: returns what it covers.
    pub(crate) fn cover(&self) -> Covered {
        Covered { upto: self.last.get(), files: self.files.take() }
    }

    /// The request has succeeded: returns the files for which it holds.
    pub(crate) fn synced(&self, covered: Covered) -> (BTreeSet<Ino>, Change) {
        if self.names.get().is_some_and(|last| last <= covered.upto) {
            self.names.set(None);
        }
        (covered.files, covered.upto)
    }

    /// The request has failed.
    pub(crate) fn put_back(&self, covered: Covered) {
        self.files.borrow_mut().extend(covered.files);
    }

    /// Forgets all changes, after a restart of the service. Returns true if some were of names.
    pub(crate) fn lose(&self) -> bool {
        self.files.take();
        self.names.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: Ino = Ino(5);

    #[test]
    fn a_request_makes_durable_what_was_sent_before_it() {
        let sent = SentChanges::default();
        let first = sent.file(INO);
        sent.names();
        let one = sent.cover();
        // Another request begins while the first is in flight.
        let second = sent.file(INO);
        sent.names();
        let other = sent.cover();
        let (files, upto) = sent.synced(one);
        assert!(files.contains(&INO) && upto >= first && upto < second);
        let lost = SentChanges { names: sent.names.clone(), ..SentChanges::default() };
        assert!(lost.lose(), "the later change of names is not durable");
        let (files, upto) = sent.synced(other);
        assert!(files.contains(&INO) && upto >= second);
        assert!(!sent.lose() && sent.cover().files.is_empty());
    }

    #[test]
    fn what_a_failed_request_covered_waits_for_the_next() {
        let sent = SentChanges::default();
        sent.names();
        sent.file(INO);
        let failed = sent.cover();
        assert!(sent.cover().files.is_empty());
        sent.put_back(failed);
        let next = sent.cover();
        assert!(next.files.contains(&INO));
        sent.put_back(next);
        assert!(sent.lose() && !sent.lose());
    }
}
