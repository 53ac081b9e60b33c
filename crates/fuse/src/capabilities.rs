//! Files that are known to have no capabilities of a program (`security.capability`), which a write takes away: a write
//! need not look for them again.
//!
//! Another client may give a file some: what was seen holds while this one is alone, for that time. So does what this
//! mount gives while somebody looks.

use penstock_base::{Ino, Noted};
use penstock_client::Client;
use std::cell::Cell;

/// A look at a file's capabilities, which begins.
#[derive(Clone, Copy)]
pub(crate) struct Look {
    /// While the client is alone.
    time_alone: Option<u64>,
    given: u64,
}

#[derive(Default)]
pub(crate) struct Capabilities {
    none: Noted<(u64, Ino)>,
    /// Times that this mount gave some to a file.
    given: Cell<u64>,
}

impl Capabilities {
    pub(crate) fn look(&self, client: &Client) -> Look {
        Look { time_alone: client.time_alone(), given: self.given.get() }
    }

    /// Whether a file is known to have none.
    pub(crate) fn has_none(&self, look: Look, ino: Ino) -> bool {
        look.time_alone.is_some_and(|time| self.none.contains(&(time, ino)))
    }

    /// A look that ends here saw none.
    pub(crate) fn note_none(&self, look: Look, ino: Ino) {
        if let Some(time) = look.time_alone
            && look.given == self.given.get()
        {
            self.none.note((time, ino));
        }
    }

    /// This mount has given some to a file, or may have.
    pub(crate) fn given(&self) {
        self.given.set(self.given.get() + 1);
        self.none.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_look_saw_holds_while_nobody_gives_some() {
        let known = Capabilities::default();
        let look = |time_alone| Look { time_alone, given: known.given.get() };
        let (file, first) = (Ino(7), look(Some(1)));
        known.note_none(first, file);
        assert!(known.has_none(first, file));
        assert!(!known.has_none(look(None), file), "others are there");
        assert!(!known.has_none(look(Some(2)), file), "others were there since");
        known.given();
        assert!(!known.has_none(look(Some(1)), file));
        known.note_none(first, file);
        assert!(!known.has_none(look(Some(1)), file), "this look began before some were given");
        known.note_none(look(None), file);
        assert!(!known.has_none(look(Some(1)), file), "a look beside others holds for nothing");
    }
}
