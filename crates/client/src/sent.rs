//! Changes that were sent to the service, until a `Sync` request has made them durable.
//!
//! Invariant: a `Sync` request makes durable what was sent before it and nothing else. Each change has a
//! number of its own, so a change that is sent during a request waits for another one, however many are in
//! flight.

use penstock_base::FileId;
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
    files: RefCell<BTreeSet<FileId>>,
}

/// The changes that a `Sync` request covers. If it is dropped because the request failed, or because nobody
/// waits for the request any more, the next request covers them.
pub(crate) struct Covered<'a> {
    sent: &'a SentChanges,
    upto: Change,
    files: BTreeSet<FileId>,
}

impl Covered<'_> {
    /// The request has succeeded: returns the files that it was for, and their last change that is durable.
    pub(crate) fn are_durable(mut self) -> (BTreeSet<FileId>, Change) {
        if self.sent.names.get().is_some_and(|last| last <= self.upto) {
            self.sent.names.set(None);
        }
        (std::mem::take(&mut self.files), self.upto)
    }
}

impl Drop for Covered<'_> {
    fn drop(&mut self) {
        self.sent.files.borrow_mut().append(&mut self.files);
    }
}

impl SentChanges {
    /// Returns the number of another change that was sent.
    pub(crate) fn next(&self) -> Change {
        let next = Change(self.last.get().0 + 1);
        self.last.set(next);
        next
    }

    /// Records that names or attributes were changed, and returns the number of the change.
    pub(crate) fn names(&self) -> Change {
        let next = self.next();
        self.names.set(Some(next));
        next
    }

    /// Records that a file was changed, and returns the number of the change.
    pub(crate) fn file(&self, file: FileId) -> Change {
        self.files.borrow_mut().insert(file);
        self.next()
    }

    /// Begins a `Sync` request: returns what it covers.
    pub(crate) fn cover(&self) -> Covered<'_> {
        Covered { sent: self, upto: self.last.get(), files: self.files.take() }
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

    const FILE: FileId = FileId::of_numbers(0, 5);

    #[test]
    fn a_request_makes_durable_what_was_sent_before_it() {
        let sent = SentChanges::default();
        let first = sent.file(FILE);
        sent.names();
        let one = sent.cover();
        // Another request begins while the first is in flight.
        let second = sent.file(FILE);
        sent.names();
        let other = sent.cover();
        let (files, upto) = one.are_durable();
        assert!(files.contains(&FILE) && upto >= first && upto < second);
        let lost = SentChanges { names: sent.names.clone(), ..SentChanges::default() };
        assert!(lost.lose(), "the later change of names is not durable");
        let (files, upto) = other.are_durable();
        assert!(files.contains(&FILE) && upto >= second);
        assert!(!sent.lose() && sent.cover().files.is_empty());
    }

    #[test]
    fn what_a_failed_request_covered_waits_for_the_next() {
        let sent = SentChanges::default();
        sent.names();
        sent.file(FILE);
        let failed = sent.cover();
        assert!(sent.cover().files.is_empty());
        drop(failed);
        let next = sent.cover();
        assert!(next.files.contains(&FILE));
        drop(next);
        assert!(sent.lose() && !sent.lose());
    }
}
