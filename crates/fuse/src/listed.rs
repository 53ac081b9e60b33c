//! The listings of directories that the kernel has cached or begun to cache.
//!
//! The kernel shows a listing that it has read to its end again, without a request and without a limit of
//! time, until it learns of another time of change of the directory, which a user may set back. So it keeps
//! one only while nobody else changes the directory: the mount is alone, or it has had one lease on the
//! directory all the time since the first part. The pages of all others are dropped before the reply that
//! ends them, and those of a lease before the lease is gone.

use penstock_base::{FileId, HashMap};
use std::cell::{Cell, RefCell};

/// The least number of directories above which those are forgotten that the kernel has forgotten.
const MANY: usize = 1024;

/// The reason why nobody else changes a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Under {
    /// There is no other mount.
    Alone,
    /// The lease of this number on its names.
    Lease(u64),
}

/// The parts of one directory's listing that the kernel has got.
#[derive(Debug)]
struct Listed {
    /// The reason that was there for all parts; none if there was none, or another one, for a part.
    under: Option<Under>,
    /// The number of the last part.
    last: u64,
}

/// The directories of which the kernel has got a listing, or a part, since its pages were dropped.
#[derive(Debug, Default)]
pub(crate) struct AllListed {
    dirs: RefCell<HashMap<FileId, Listed>>,
    /// The number of parts.
    parts: Cell<u64>,
    /// The number of directories at which the table is looked through.
    many: Cell<usize>,
}

impl AllListed {
    /// The kernel gets a part of a listing. `is_known` tells whether the kernel knows a directory.
    pub(crate) fn gives(&self, dir: FileId, under: Option<Under>, is_known: impl Fn(FileId) -> bool) {
        self.parts.set(self.parts.get() + 1);
        let mut dirs = self.dirs.borrow_mut();
        if dirs.len() >= self.many.get().max(MANY) {
            dirs.retain(|dir, _| is_known(*dir));
            self.many.set(2 * dirs.len());
        }
        let listed = dirs.entry(dir).or_insert(Listed { under, last: 0 });
        listed.last = self.parts.get();
        if listed.under != under {
            listed.under = None;
        }
    }

    /// True if the kernel may cache the listing whose end it gets now: there has been this reason all the
    /// time.
    pub(crate) fn is_kept(&self, dir: FileId, under: Option<Under>) -> bool {
        under.is_some() && self.dirs.borrow().get(&dir).is_some_and(|listed| listed.under == under)
    }

    /// True if the kernel may have a listing of a directory, or a part.
    pub(crate) fn has(&self, dir: FileId) -> bool {
        self.dirs.borrow().contains_key(&dir)
    }

    /// All directories of which it may have one.
    pub(crate) fn all(&self) -> Vec<FileId> {
        self.dirs.borrow().keys().copied().collect()
    }

    /// The number of the last part that was given, for [`Self::dropped`].
    pub(crate) fn mark(&self) -> u64 {
        self.parts.get()
    }

    /// The kernel has dropped what it had got of a directory up to a mark.
    pub(crate) fn dropped(&self, dir: FileId, mark: u64) {
        assert!(mark <= self.parts.get(), "a mark is of the past");
        let mut dirs = self.dirs.borrow_mut();
        if dirs.get(&dir).is_some_and(|listed| listed.last <= mark) {
            dirs.remove(&dir);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: FileId = FileId::of_numbers(0, 7);
    const LEASE: Option<Under> = Some(Under::Lease(5));

    #[test]
    fn a_listing_is_kept_under_one_reason_for_all_its_parts() {
        let listed = AllListed::default();
        assert!(!listed.is_kept(DIR, LEASE), "its parts were dropped");
        for (first, second, end, is_kept) in [
            (LEASE, LEASE, LEASE, true),
            (Some(Under::Alone), Some(Under::Alone), Some(Under::Alone), true),
            (LEASE, LEASE, Some(Under::Lease(6)), false),
            (LEASE, Some(Under::Alone), Some(Under::Alone), false),
            (None, LEASE, LEASE, false),
            (LEASE, None, LEASE, false),
            (None, None, None, false),
        ] {
            listed.gives(DIR, first, |_| true);
            listed.gives(DIR, second, |_| true);
            assert!(listed.has(DIR) && listed.all() == [DIR]);
            assert_eq!(listed.is_kept(DIR, end), is_kept, "{first:?}, {second:?}, {end:?}");
            listed.dropped(DIR, listed.mark());
            assert!(!listed.has(DIR));
        }
    }

    #[test]
    fn a_part_that_is_given_during_a_drop_stays_known() {
        let listed = AllListed::default();
        listed.gives(DIR, LEASE, |_| true);
        let mark = listed.mark();
        listed.gives(DIR, LEASE, |_| true);
        listed.dropped(DIR, mark);
        assert!(listed.has(DIR));
        listed.dropped(DIR, listed.mark());
        assert!(!listed.has(DIR));
    }

    #[test]
    fn directories_that_the_kernel_has_forgotten_are_forgotten() {
        let listed = AllListed::default();
        let dir = |ino: usize| FileId::of_numbers(0, ino as u64);
        (0..MANY).for_each(|ino| listed.gives(dir(ino), LEASE, |_| true));
        listed.gives(dir(MANY), LEASE, |known| known == dir(3));
        assert_eq!(listed.all().len(), 2);
    }
}
