//! Files that are open for writing on this mount, and the sizes that the kernel may know of them.
//!
//! The kernel is told the size of a file that another mount made longer with the file's last byte
//! ([`crate::cache::Cache::grow`]). A program of this mount may have a newer byte there, in a page that it has mapped,
//! which nobody else knows of. It can have one only where it knew the file to reach.
//!
//! Invariant: while a file is open for writing here, `bytes` is at least every size that the kernel was told of it.

use penstock_base::{HashMap, Ino};
use std::cell::RefCell;

struct Known {
    handles: u64,
    bytes: u64,
}

/// The files, and by handle which of them it may write to.
#[derive(Default)]
pub(crate) struct KnownSizes {
    files: RefCell<HashMap<Ino, Known>>,
    handles: RefCell<HashMap<u64, Ino>>,
}

impl KnownSizes {
    /// A handle may write to a file of this size.
    pub(crate) fn opened(&self, handle: u64, ino: Ino, bytes: u64) {
        let mut files = self.files.borrow_mut();
        let known = files.entry(ino).or_insert(Known { handles: 0, bytes });
        known.handles += 1;
        known.bytes = known.bytes.max(bytes);
        self.handles.borrow_mut().insert(handle, ino);
    }

    /// A handle is closed, and no map of it is left.
    pub(crate) fn closed(&self, handle: u64) {
        let Some(ino) = self.handles.borrow_mut().remove(&handle) else { return };
        let mut files = self.files.borrow_mut();
        let known = files.get_mut(&ino).expect("a file is known while a handle may write to it");
        known.handles -= 1;
        if known.handles == 0 {
            files.remove(&ino);
        }
    }

    /// The kernel hears, or has made itself, that a file has so many bytes.
    pub(crate) fn reaches(&self, ino: Ino, bytes: u64) {
        if let Some(known) = self.files.borrow_mut().get_mut(&ino) {
            known.bytes = known.bytes.max(bytes);
        }
    }

    /// The kernel takes this for the size, whatever it knew before: the reply to a change of it.
    pub(crate) fn is_cut(&self, ino: Ino, bytes: u64) {
        if let Some(known) = self.files.borrow_mut().get_mut(&ino) {
            known.bytes = bytes;
        }
    }

    /// The largest size that the kernel may know of a file that is open for writing; none of any other.
    pub(crate) fn of(&self, ino: Ino) -> Option<u64> {
        self.files.borrow().get(&ino).map(|known| known.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_known_while_somebody_may_write() {
        let (sizes, ino) = (KnownSizes::default(), Ino(7));
        sizes.reaches(ino, 9);
        assert_eq!(sizes.of(ino), None);
        sizes.opened(1, ino, 100);
        sizes.opened(2, ino, 90);
        sizes.reaches(ino, 120);
        sizes.reaches(ino, 110);
        assert_eq!(sizes.of(ino), Some(120));
        sizes.is_cut(ino, 10);
        assert_eq!(sizes.of(ino), Some(10));
        sizes.closed(1);
        sizes.closed(3);
        assert_eq!(sizes.of(ino), Some(10));
        sizes.closed(2);
        assert_eq!(sizes.of(ino), None);
    }
}
