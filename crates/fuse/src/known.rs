//! Tracks the size up to which the kernel knows each file that is open for writing on this mount.
//!
//! The kernel is sent a larger size by one notice ([`crate::cache::Cache::grow`]).
//!
//! Invariant: while a file is open for writing here, the kernel has taken the size `bytes`, or a larger one,
//! since it last dropped all pages of the file, or a notice with it is in flight. The ends of direct writes
//! do not count: the kernel knows them only some time after the reply.

use penstock_base::{FileId, HashMap};
use std::cell::RefCell;

struct Known {
    handles: u64,
    bytes: u64,
    /// The number of notices to drop all pages that are running.
    drops: u32,
    /// Like `bytes`, but counted from when the first running drop began.
    since: u64,
}

impl Known {
    fn reaches(&mut self, bytes: u64) {
        self.bytes = self.bytes.max(bytes);
        self.since = self.since.max(bytes);
    }
}

/// The known sizes by file, and the files by handle that may write to them.
#[derive(Default)]
pub(crate) struct KnownSizes {
    files: RefCell<HashMap<FileId, Known>>,
    handles: RefCell<HashMap<u64, FileId>>,
}

impl KnownSizes {
    /// Records a handle that may write to a file. `bytes` is the size that the kernel knows, 0 if it may know
    /// none.
    pub(crate) fn opened(&self, handle: u64, file: FileId, bytes: u64) {
        let mut files = self.files.borrow_mut();
        let known = files.entry(file).or_insert(Known { handles: 0, bytes: 0, drops: 0, since: 0 });
        known.handles += 1;
        known.reaches(bytes);
        self.handles.borrow_mut().insert(handle, file);
    }

    /// Records that a handle was closed and no map of it is left.
    pub(crate) fn closed(&self, handle: u64) {
        let Some(file) = self.handles.borrow_mut().remove(&handle) else { return };
        let mut files = self.files.borrow_mut();
        let known = files.get_mut(&file).expect("a file is known while a handle may write to it");
        known.handles -= 1;
        if known.handles == 0 {
            files.remove(&file);
        }
    }

    /// Records that the kernel knows that a file has so many bytes.
    pub(crate) fn reaches(&self, file: FileId, bytes: u64) {
        if let Some(known) = self.files.borrow_mut().get_mut(&file) {
            known.reaches(bytes);
        }
    }

    /// True if the kernel may not know this size: the file is not open for writing, or is known only up to a
    /// smaller size.
    pub(crate) fn may_be_told(&self, file: FileId, bytes: u64) -> bool {
        self.of(file).is_none_or(|known| bytes > known)
    }

    /// Like [`Self::may_be_told`], and records the size as known: on true the caller must send it.
    pub(crate) fn tells(&self, file: FileId, bytes: u64) -> bool {
        let may = self.may_be_told(file, bytes);
        self.reaches(file, bytes);
        may
    }

    /// The kernel begins to drop all pages of a file. Returns true if [`Self::drop_ends`] must be called.
    pub(crate) fn drop_begins(&self, file: FileId) -> bool {
        let mut files = self.files.borrow_mut();
        let Some(known) = files.get_mut(&file) else { return false };
        if known.drops == 0 {
            known.since = 0;
        }
        known.drops += 1;
        true
    }

    /// The kernel has dropped the pages that it had when the drop began. With `failed` it may have kept some.
    pub(crate) fn drop_ends(&self, file: FileId, failed: bool) {
        // If the file was closed meanwhile, and perhaps opened again, its record is new and has no drop
        // running.
        if let Some(known) = self.files.borrow_mut().get_mut(&file).filter(|known| known.drops > 0) {
            known.drops -= 1;
            if !failed {
                known.bytes = known.since;
            }
        }
    }

    /// Records the size in a reply to a request for attributes. The kernel takes a smaller one too, if it
    /// takes it: with `may_ignore` it may not.
    pub(crate) fn is_answered(&self, file: FileId, bytes: u64, may_ignore: bool) {
        if let Some(known) = self.files.borrow_mut().get_mut(&file) {
            if may_ignore {
                (known.bytes, known.since) = (known.bytes.min(bytes), known.since.min(bytes));
            } else {
                (known.bytes, known.since) = (bytes, bytes);
            }
        }
    }

    /// Records the size in a reply to a change of size, which the kernel takes whatever it knew before.
    pub(crate) fn is_cut(&self, file: FileId, bytes: u64) {
        self.is_answered(file, bytes, false);
    }

    /// True if a program of this mount may write to the file.
    pub(crate) fn is_open_for_writing(&self, file: FileId) -> bool {
        self.files.borrow().contains_key(&file)
    }

    /// Returns the size that the kernel may know of a file that is open for writing. None for any other file.
    pub(crate) fn of(&self, file: FileId) -> Option<u64> {
        self.files.borrow().get(&file).map(|known| known.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_known_while_somebody_may_write() {
        let (sizes, file) = (KnownSizes::default(), FileId::of_numbers(0, 7));
        sizes.reaches(file, 9);
        assert_eq!(sizes.of(file), None);
        sizes.opened(1, file, 100);
        sizes.opened(2, file, 90);
        sizes.reaches(file, 120);
        sizes.reaches(file, 110);
        assert_eq!(sizes.of(file), Some(120));
        assert!(!sizes.may_be_told(file, 120) && !sizes.tells(file, 120) && sizes.tells(file, 121));
        assert!(!sizes.tells(file, 121), "nobody tells it again");
        sizes.is_cut(file, 10);
        assert_eq!(sizes.of(file), Some(10));
        // Regression: a smaller size in a reply was taken by the kernel and not noted, so that it was not
        // told of later growth up to the larger one.
        for (size, may_ignore, known) in [(30, false, 30), (20, false, 20), (40, true, 20), (10, true, 10)] {
            sizes.is_answered(file, size, may_ignore);
            assert_eq!(sizes.of(file), Some(known), "{size} {may_ignore}");
        }
        sizes.closed(1);
        sizes.closed(3);
        assert_eq!(sizes.of(file), Some(10));
        sizes.closed(2);
        assert_eq!(sizes.of(file), None);
    }

    #[test]
    fn what_was_known_goes_with_the_pages() {
        let (sizes, file) = (KnownSizes::default(), FileId::of_numbers(0, 7));
        assert!(!sizes.drop_begins(file));
        sizes.opened(1, file, 100);
        assert!(sizes.drop_begins(file));
        sizes.reaches(file, 30);
        assert_eq!(sizes.of(file), Some(100));
        assert!(sizes.drop_begins(file));
        sizes.drop_ends(file, false);
        assert_eq!(sizes.of(file), Some(30), "read while it dropped them");
        sizes.drop_ends(file, false);
        assert_eq!(sizes.of(file), Some(30), "the second may have passed it too");
        assert!(sizes.drop_begins(file));
        sizes.drop_ends(file, true);
        assert_eq!(sizes.of(file), Some(30));
        assert!(sizes.drop_begins(file));
        sizes.drop_ends(file, false);
        assert_eq!(sizes.of(file), Some(0));
    }
}
