//! The inode that the last request has looked up, while this client is the sole one.
//!
//! The kernel has the attributes in the reply to a lookup. For a program that also wants the time of birth,
//! which many ask for with all others, it asks for them again at once.
//!
//! Invariant: the attributes are those of now. Other clients have changed nothing, because the ownership has
//! lasted from before the lookup on. This one has changed nothing, because no other request was in flight
//! from then on; the caller sees that no earlier one left anything to be done. The next request drops them.

use penstock_base::FileId;
use penstock_client::{Attr, Ownership};
use std::cell::{Cell, RefCell};

/// The last lookup of a mount, until the next request.
#[derive(Default)]
pub(crate) struct LastFound {
    /// The number of requests that were received.
    received: Cell<u64>,
    last: RefCell<Option<Found>>,
}

struct Found {
    attr: Attr,
    by: Lookup,
}

/// A lookup during which no other request is in flight.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lookup {
    number: u64,
    owned: Ownership,
}

impl LastFound {
    /// A request was received that may alter attributes, or ask for them.
    pub(crate) fn received(&self) {
        self.received.set(self.received.get() + 1);
    }

    fn now(&self, owned: Option<Ownership>) -> Option<Lookup> {
        owned.map(|owned| Lookup { number: self.received.get(), owned })
    }

    /// The last request is a lookup. `in_flight` is the number of requests that are, with this one.
    pub(crate) fn begins(&self, in_flight: usize, owned: Option<Ownership>) -> Option<Lookup> {
        assert!(in_flight > 0, "the lookup is in flight");
        self.now(owned).filter(|_| in_flight == 1)
    }

    /// The lookup has found an inode with these attributes.
    pub(crate) fn ends(&self, lookup: Lookup, attr: &Attr, owned: Option<Ownership>) {
        if self.now(owned) == Some(lookup) {
            *self.last.borrow_mut() = Some(Found { attr: attr.clone(), by: lookup });
        }
    }

    /// The last request asks for attributes. Returns them if the one before has looked up this inode.
    pub(crate) fn take(&self, file: FileId, owned: Option<Ownership>) -> Option<Attr> {
        let now = self.now(owned)?;
        let found = self.last.take()?;
        assert!(found.by.number <= now.number, "requests are counted in order");
        let is_next = Lookup { number: found.by.number + 1, ..found.by } == now;
        (is_next && found.attr.file() == file).then_some(found.attr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNED: Option<Ownership> = Some(Ownership::Alone { start: 1, time: 1 });
    const LATER: Option<Ownership> = Some(Ownership::Alone { start: 1, time: 2 });
    const FILE: FileId = FileId::of_numbers(0, 7);

    fn found(last: &LastFound) -> Option<Lookup> {
        last.received();
        let lookup = last.begins(1, OWNED)?;
        last.ends(lookup, &Attr { ino: 7, nlink: 3, ..Attr::default() }, OWNED);
        Some(lookup)
    }

    #[test]
    fn the_next_request_gets_the_attributes_once() {
        let last = LastFound::default();
        found(&last).expect("no other request is in flight");
        last.received();
        assert_eq!(last.take(FILE, OWNED).map(|attr| attr.nlink), Some(3));
        assert!(last.take(FILE, OWNED).is_none());
        last.received();
        assert!(last.take(FILE, OWNED).is_none());
    }

    #[test]
    fn nothing_may_have_changed_since_the_lookup_began() {
        let last = LastFound::default();
        let given = |between: &dyn Fn(), file, owned| {
            found(&last);
            between();
            last.received();
            last.take(file, owned).is_some()
        };
        assert!(given(&|| {}, FILE, OWNED));
        assert!(!given(&|| last.received(), FILE, OWNED), "another request came first");
        assert!(!given(&|| {}, FileId::of_numbers(0, 8), OWNED));
        assert!(!given(&|| {}, FILE, LATER) && !given(&|| {}, FILE, None), "others may have changed it");
        last.received();
        assert!(last.begins(2, OWNED).is_none() && last.begins(1, None).is_none());
        let attr = Attr { ino: 7, ..Attr::default() };
        let lookup = last.begins(1, OWNED).expect("it is the only request");
        last.ends(lookup, &attr, LATER);
        last.received();
        assert!(last.take(FILE, OWNED).is_none(), "others may have changed it during the lookup");
        last.received();
        let lookup = last.begins(1, OWNED).expect("it is the only request");
        last.received();
        last.ends(lookup, &attr, OWNED);
        assert!(last.take(FILE, OWNED).is_none(), "it is no later than the request that asks");
        last.received();
        assert!(last.take(FILE, OWNED).is_none(), "a request came during the lookup");
    }
}
