//! The directory that this client has changed last, while it is the sole client.
//!
//! The kernel drops what it knows of a directory with each name that is made or removed in it, and asks for
//! its attributes on its way to the next one. The reply to the change has had them already.
//!
//! Invariant: the attributes are those of now. They come with the reply to the newest change of names or
//! attributes, while no other one is under way, and the next change drops them. Other clients change nothing
//! while the ownership lasts, and nothing but such changes alters the attributes of a directory. An
//! administrator may have ended the session, which this client learns with the next reply only: so they count
//! for a moment, as in the kernel.

use crate::leases::Ownership;
use penstock_base::FileId;
use penstock_wire::metadata::Attr;
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// The longest time for which attributes count, from the beginning of the change.
const KEPT: Duration = Duration::from_secs(1);

/// The attributes of the directory, and the changes under way.
#[derive(Default)]
pub(crate) struct LastDir {
    last: RefCell<Option<Last>>,
    begun: Cell<u64>,
    running: Cell<u64>,
}

struct Last {
    attr: Attr,
    owned: Ownership,
    /// The time when the change began.
    began: Duration,
}

/// A change under way. If this is dropped before its end, the change is abandoned and may be made at any time
/// from then on: it counts as under way for ever.
#[must_use]
pub(crate) struct Change<'a> {
    of: &'a LastDir,
    number: u64,
    began: Duration,
}

impl LastDir {
    /// A change begins.
    pub(crate) fn begins(&self, now: Duration) -> Change<'_> {
        self.last.take();
        self.begun.set(self.begun.get() + 1);
        self.running.set(self.running.get() + 1);
        Change { of: self, number: self.begun.get(), began: now }
    }

    /// True if no change is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.running.get() == 0
    }

    /// The attributes of a directory, if it is the last one and this client has been the sole one since, with
    /// the ownership of now.
    pub(crate) fn get(&self, file: FileId, owned: Option<Ownership>, now: Duration) -> Option<Attr> {
        let last = self.last.borrow();
        let last = last.as_ref()?;
        let counts = last.attr.file() == file && Some(last.owned) == owned && now < last.began + KEPT;
        counts.then(|| last.attr.clone())
    }
}

impl Change<'_> {
    /// The change has ended. It has left a directory like this, if that is known. `owned` is the ownership
    /// that has lasted since it began, if there was one.
    pub(crate) fn ends(self, dir: Option<&Attr>, owned: Option<Ownership>) {
        if self.of.running.get() == 1 && self.of.begun.get() == self.number {
            let last = dir.cloned().zip(owned);
            *self.of.last.borrow_mut() = last.map(|(attr, owned)| Last { attr, owned, began: self.began });
        }
        self.of.running.set(self.of.running.get() - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(100);

    #[test]
    fn the_directory_is_known_until_the_next_change_begins() {
        let (last, owned) = (LastDir::default(), Some(Ownership::Alone { start: 1, time: 1 }));
        let dir = |ino, nlink| Attr { ino, nlink, ..Attr::default() };
        let id = |ino| FileId::of_numbers(0, ino);
        let found = |now| last.get(id(7), now, NOW).map(|attr| attr.nlink);
        last.begins(NOW).ends(Some(&dir(7, 3)), owned);
        assert_eq!(found(owned), Some(3));
        assert!(found(None).is_none() && found(Some(Ownership::Alone { start: 1, time: 2 })).is_none());
        assert!(last.get(id(8), owned, NOW).is_none());
        assert!(last.is_idle());
        let change = last.begins(NOW);
        assert!(!last.is_idle() && found(owned).is_none(), "it may be made now");
        change.ends(None, owned);
        assert!(found(owned).is_none(), "it may have been made");
        last.begins(NOW).ends(Some(&dir(7, 4)), None);
        assert!(found(None).is_none(), "others may change it");
    }

    #[test]
    fn no_other_change_is_under_way_or_later() {
        let (last, owned) = (LastDir::default(), Some(Ownership::Alone { start: 1, time: 1 }));
        let dir = |nlink| Attr { ino: 7, nlink, ..Attr::default() };
        let found = || last.get(FileId::of_numbers(0, 7), owned, NOW).map(|attr| attr.nlink);
        let (first, second) = (last.begins(NOW), last.begins(NOW));
        second.ends(Some(&dir(4)), owned);
        assert!(found().is_none(), "the first one may come after it");
        first.ends(Some(&dir(3)), owned);
        assert!(found().is_none(), "the second one was begun after it");
        last.begins(NOW).ends(Some(&dir(5)), owned);
        assert_eq!(found(), Some(5));
        drop(last.begins(NOW));
        last.begins(NOW).ends(Some(&dir(6)), owned);
        assert!(!last.is_idle() && found().is_none(), "an abandoned change may come at any time");
    }

    #[test]
    fn the_directory_is_known_for_a_moment() {
        let (last, owned) = (LastDir::default(), Some(Ownership::Alone { start: 1, time: 1 }));
        last.begins(NOW).ends(Some(&Attr { ino: 7, ..Attr::default() }), owned);
        let found = |now| last.get(FileId::of_numbers(0, 7), owned, now).is_some();
        assert!(found(NOW + KEPT - Duration::from_nanos(1)) && !found(NOW + KEPT));
    }
}
