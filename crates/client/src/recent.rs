//! Files whose size or time was sent recently.
//!
//! An attribute reply that the service produced before that may arrive after it and is then out of date. The
//! file's own state, which would correct it, may be forgotten by then.

use penstock_base::FileId;
use penstock_base::num::to_usize;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// Number of syncs that are remembered. A caller that missed more must repeat its request.
const REMEMBERED: usize = 256;

/// The last syncs, in order.
#[derive(Default)]
pub(crate) struct RecentSyncs {
    count: Cell<u64>,
    recent: RefCell<VecDeque<FileId>>,
}

impl RecentSyncs {
    /// Adds a file whose size or time was sent.
    pub(crate) fn add(&self, file: FileId) {
        self.count.set(self.count.get() + 1);
        let mut recent = self.recent.borrow_mut();
        recent.push_back(file);
        if recent.len() > REMEMBERED {
            recent.pop_front();
        }
        assert!(recent.len() as u64 <= self.count.get(), "every remembered sync was counted");
    }

    /// Returns a mark for [`RecentSyncs::since`].
    pub(crate) fn mark(&self) -> u64 {
        self.count.get()
    }

    /// True if a file was synced since a mark, or if that cannot be known any more.
    pub(crate) fn since(&self, mark: u64, file: FileId) -> bool {
        assert!(mark <= self.count.get(), "a mark is from the past");
        let missed = to_usize(self.count.get() - mark);
        missed > REMEMBERED || self.recent.borrow().iter().rev().take(missed).any(|synced| *synced == file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_is_seen_by_requests_from_before_it() {
        let syncs = RecentSyncs::default();
        let before = syncs.mark();
        syncs.add(FileId::of_numbers(0, 1));
        let between = syncs.mark();
        syncs.add(FileId::of_numbers(0, 2));
        assert!(
            syncs.since(before, FileId::of_numbers(0, 1)) && syncs.since(before, FileId::of_numbers(0, 2))
        );
        assert!(
            !syncs.since(between, FileId::of_numbers(0, 1)) && syncs.since(between, FileId::of_numbers(0, 2))
        );
        (0..300).for_each(|_| syncs.add(FileId::of_numbers(0, 3)));
        assert!(syncs.since(before, FileId::of_numbers(0, 9)), "too long ago to know");
    }
}
