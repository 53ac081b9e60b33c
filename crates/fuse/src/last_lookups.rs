//! The file that each thread has just looked up, beside other mounts.
//!
//! For rename(2) the kernel looks up the old name and then the new one, with both directories locked. If it
//! gets one file for both, it returns without a request, because two names of one file are left as they are.
//! Another mount may have renamed the file in between, so this one would be told that it did so itself.
//!
//! Invariant: where a thread gets a file, and in its next request the same file by another name, both names
//! were there at the same time. If they may not have been, the second reply names another file of the same
//! kind, by a number that no node has (`Nodes::stranger`). A rename then goes to the service, which decides.
//! All else that the kernel asks about that number fails with ESTALE, upon which it looks the name up again.
//!
//! The kernel may ignore the reply and look up at once, if it had a file by the new name before. So what a
//! thread has looked up stays noted until it asks for something else.

use penstock_base::{FileId, HashMap};
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// The time for which a lookup counts. In a rename the next one follows at once.
const COUNTS: Duration = Duration::from_secs(10);
/// Most threads that are remembered. The lookups of others do not count.
const MOST: usize = 4096;
/// A lookup that takes longer may end after others have changed a name that the kernel used just before it,
/// without a lookup. Names count as used for longer than the kernel uses them, by more than this (`TICKS` in
/// attr.rs).
const QUICK: Duration = Duration::from_millis(25);

/// A name in a directory.
pub(crate) type Place<'a> = (FileId, &'a [u8]);

struct Lookup {
    file: FileId,
    dir: FileId,
    name: Box<[u8]>,
    at: Duration,
}

/// The last lookups of threads, by their numbers.
#[derive(Default)]
pub(crate) struct LastLookups {
    threads: RefCell<HashMap<u32, Lookup>>,
    /// When names that the kernel could not be told to forget ended last.
    ran_out: Cell<Duration>,
}

impl LastLookups {
    /// A thread gets a file by this name.
    pub(crate) fn note(&self, thread: u32, file: FileId, (dir, name): Place<'_>, now: Duration) {
        let mut threads = self.threads.borrow_mut();
        if threads.len() >= MOST {
            threads.retain(|_, lookup| now < lookup.at + COUNTS);
        }
        if threads.len() < MOST || threads.contains_key(&thread) {
            threads.insert(thread, Lookup { file, dir, name: name.into(), at: now });
        }
    }

    /// A thread asks for something other than a name.
    pub(crate) fn asks(&self, thread: u32) {
        let mut threads = self.threads.borrow_mut();
        if !threads.is_empty() {
            threads.remove(&thread);
        }
    }

    /// The other name by which a thread has just looked up this file.
    pub(crate) fn other(
        &self,
        thread: u32,
        file: FileId,
        (dir, name): Place<'_>,
        now: Duration,
    ) -> Option<(FileId, Box<[u8]>)> {
        let threads = self.threads.borrow();
        let lookup = threads.get(&thread).filter(|lookup| now < lookup.at + COUNTS)?;
        let is_other = lookup.file == file && (lookup.dir, &*lookup.name) != (dir, name);
        is_other.then(|| (lookup.dir, lookup.name.clone()))
    }

    /// Names that the kernel got under a lease have ended without its knowledge: others may change them.
    pub(crate) fn names_ran_out(&self, now: Duration) {
        self.ran_out.set(now);
    }

    /// True if a lookup, begun at `begun`, may have outlived a name that the kernel used before it without
    /// asking.
    pub(crate) fn outlives_names(&self, begun: Duration, now: Duration) -> bool {
        begun <= self.ran_out.get() && now > begun + QUICK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: FileId = FileId::of_numbers(0, 7);
    const FILE: FileId = FileId::of_numbers(0, 8);
    const NOW: Duration = Duration::from_secs(100);

    #[test]
    fn the_last_lookup_of_a_thread_counts_until_it_asks_for_something_else() {
        let last = LastLookups::default();
        last.note(1, FILE, (DIR, b"old"), NOW);
        let other = |thread, file, name: &[u8], now| last.other(thread, file, (DIR, name), now);
        assert_eq!(other(1, FILE, b"new", NOW), Some((DIR, b"old".as_slice().into())));
        assert_eq!(other(1, FILE, b"old", NOW), None, "the same name");
        assert_eq!(other(1, DIR, b"new", NOW), None, "another file");
        assert_eq!(other(2, FILE, b"new", NOW), None, "another thread");
        assert_eq!(other(1, FILE, b"new", NOW + COUNTS), None, "long ago");
        assert!(last.other(1, FILE, (FILE, b"old"), NOW).is_some(), "the name in another directory");
        last.asks(2);
        assert!(other(1, FILE, b"new", NOW).is_some());
        last.asks(1);
        assert_eq!(other(1, FILE, b"new", NOW), None);
    }

    #[test]
    fn the_threads_are_bounded() {
        let last = LastLookups::default();
        (0..MOST as u32).for_each(|thread| last.note(thread, FILE, (DIR, b"old"), NOW));
        last.note(MOST as u32, FILE, (DIR, b"old"), NOW);
        assert_eq!(last.other(MOST as u32, FILE, (DIR, b"new"), NOW), None);
        last.note(0, DIR, (DIR, b"newer"), NOW + Duration::from_secs(1));
        last.note(MOST as u32, FILE, (DIR, b"old"), NOW + COUNTS);
        assert_eq!(last.threads.borrow().len(), 2, "the old ones have gone");
    }

    #[test]
    fn a_lookup_outlives_names_if_it_is_under_way_when_they_end() {
        let last = LastLookups::default();
        last.names_ran_out(NOW);
        let long = QUICK + Duration::from_millis(1);
        assert!(last.outlives_names(NOW, NOW + long) && !last.outlives_names(NOW, NOW + QUICK));
        assert!(!last.outlives_names(NOW + QUICK, NOW + QUICK + long), "it began later");
    }
}
