//! Remembers files without program capabilities (`security.capability`), so that writes do not look for them.
//!
//! A write removes the capabilities of a file. A client that sets capabilities owns the file's exclusive
//! lease. So a result holds while nobody else may change the file, and until this mount sets capabilities
//! itself.

use penstock_base::{BoundedSet, FileId};
use penstock_client::Ownership;
use std::cell::Cell;

/// The state at the beginning of a look for a file's capabilities. Its result counts only for this ownership.
#[derive(Clone, Copy)]
pub(crate) struct Look {
    owned: Option<Ownership>,
    given: u64,
}

#[derive(Default)]
pub(crate) struct Capabilities {
    none: BoundedSet<(Ownership, FileId)>,
    /// The number of times that this mount set capabilities on a file.
    given: Cell<u64>,
}

impl Capabilities {
    /// Begins a look at a file that this client owns as `owned` says, or does not own.
    pub(crate) fn look(&self, owned: Option<Ownership>) -> Look {
        Look { owned, given: self.given.get() }
    }

    /// True if the file is known to have no capabilities. False proves nothing.
    pub(crate) fn has_none(&self, look: Look, file: FileId) -> bool {
        look.owned.is_some_and(|owned| self.none.contains(&(owned, file)))
    }

    /// Records that a look found no capabilities, unless this mount set some since the look began.
    pub(crate) fn note_none(&self, look: Look, file: FileId) {
        if let Some(owned) = look.owned
            && look.given == self.given.get()
        {
            self.none.insert((owned, file));
        }
    }

    /// Forgets all results, because this mount has set capabilities on a file, or may have.
    pub(crate) fn given(&self) {
        self.given.set(self.given.get() + 1);
        self.none.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Ownership::{Alone, Lease};

    #[test]
    fn what_a_look_saw_holds_while_nobody_gives_some() {
        let known = Capabilities::default();
        let file = FileId::of_numbers(0, 7);
        let knows = |owned| known.has_none(known.look(Some(owned)), file);
        for owned in [Alone { start: 1, time: 1 }, Lease { start: 1, grant: 1 }] {
            let look = known.look(Some(owned));
            known.note_none(look, file);
            assert!(known.has_none(look, file) && knows(owned));
            known.given();
            assert!(!knows(owned));
            known.note_none(look, file);
            assert!(!knows(owned), "this look began before some were given");
            known.note_none(known.look(Some(owned)), file);
        }
        assert!(!knows(Alone { start: 1, time: 2 }), "others were there since");
        assert!(!knows(Alone { start: 2, time: 1 }), "the service may have lost that some were taken");
        assert!(!knows(Lease { start: 1, grant: 2 }) && !knows(Lease { start: 2, grant: 1 }));
        assert!(!known.has_none(known.look(None), file), "others may change it");
    }
}
