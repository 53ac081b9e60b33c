//! The inode that the last request has looked up.
//!
//! The kernel has the attributes in the reply to a lookup. For a program that also wants the time of birth,
//! which many ask for with all others, it asks for them again at once.
//!
//! Invariant: the attributes are those of now. This client has changed nothing since, because no other
//! request was in flight from the lookup on. The caller sees that no earlier request left anything to be
//! done, and that other clients can have changed nothing. The next request drops them. An administrator may
//! have ended the session, which this client learns with the next reply only: so they count no longer than
//! the kernel would use them.

use crate::attr::VALID;
use penstock_base::FileId;
use penstock_client::{Attr, Ownership};
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// The last lookup of a mount, until the next request.
#[derive(Default)]
pub(crate) struct LastFound {
    /// The number of requests that were received.
    received: Cell<u64>,
    last: RefCell<Option<(Lookup, Attr)>>,
}

/// A lookup during which no other request is in flight.
pub(crate) struct Lookup {
    number: u64,
    began: Duration,
    /// When it began.
    owned: Option<Ownership>,
}

impl LastFound {
    /// A request was received that may alter attributes, or ask for them.
    pub(crate) fn received(&self) {
        self.received.set(self.received.get() + 1);
    }

    /// The last request is a lookup. `in_flight` is the number of requests that are, with this one.
    pub(crate) fn begins(&self, in_flight: usize, owned: Option<Ownership>, now: Duration) -> Option<Lookup> {
        assert!(in_flight > 0, "the lookup is in flight");
        (in_flight == 1).then(|| Lookup { number: self.received.get(), began: now, owned })
    }

    /// The lookup has found an inode with these attributes.
    pub(crate) fn ends(&self, lookup: Lookup, attr: &Attr) {
        if self.received.get() == lookup.number {
            *self.last.borrow_mut() = Some((lookup, attr.clone()));
        }
    }

    /// The last request asks for attributes. Returns them if the one before has looked up this inode, with
    /// the ownership of when that began.
    pub(crate) fn take(&self, file: FileId, now: Duration) -> Option<(Attr, Option<Ownership>)> {
        let (lookup, attr) = self.last.take()?;
        assert!(lookup.number <= self.received.get(), "requests are counted in order");
        let is_next = lookup.number + 1 == self.received.get() && now < lookup.began + VALID;
        (is_next && attr.file() == file).then_some((attr, lookup.owned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNED: Option<Ownership> = Some(Ownership::Alone { start: 1, time: 1 });
    const FILE: FileId = FileId::of_numbers(0, 7);
    const NOW: Duration = Duration::from_secs(100);

    fn attr() -> Attr {
        Attr { ino: 7, nlink: 3, ..Attr::default() }
    }

    fn found(last: &LastFound) {
        last.received();
        last.ends(last.begins(1, OWNED, NOW).expect("no other request is in flight"), &attr());
    }

    #[test]
    fn the_next_request_gets_the_attributes_once() {
        let last = LastFound::default();
        found(&last);
        last.received();
        assert_eq!(last.take(FILE, NOW), Some((attr(), OWNED)));
        assert!(last.take(FILE, NOW).is_none());
        last.received();
        assert!(last.take(FILE, NOW).is_none());
    }

    #[test]
    fn no_other_request_comes_from_the_lookup_on() {
        let last = LastFound::default();
        let given = |between: &dyn Fn(), file| {
            found(&last);
            between();
            last.received();
            last.take(file, NOW).is_some()
        };
        assert!(given(&|| {}, FILE));
        assert!(!given(&|| last.received(), FILE) && !given(&|| {}, FileId::of_numbers(0, 8)));
        last.received();
        assert!(last.begins(2, OWNED, NOW).is_none(), "another one may change something now");
        let lookup = last.begins(1, OWNED, NOW).expect("it is the only request");
        last.received();
        last.ends(lookup, &attr());
        assert!(last.take(FILE, NOW).is_none(), "it came during the lookup");
        last.received();
        assert!(last.take(FILE, NOW).is_none());
    }

    /// Regression: a mount whose session had been ended answered from a lookup of long ago.
    #[test]
    fn they_count_as_long_as_the_kernel_would_use_them() {
        let last = LastFound::default();
        for (later, counts) in [(VALID - Duration::from_nanos(1), true), (VALID, false)] {
            found(&last);
            last.received();
            assert_eq!(last.take(FILE, NOW + later).is_some(), counts);
        }
    }
}
