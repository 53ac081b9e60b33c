//! The files that each thread has just looked up, beside other mounts.
//!
//! For rename(2) the kernel looks up the old name and then the new one, with both directories locked. If it
//! gets one file for both, it returns without a request, because two names of one file are left as they are.
//! Another mount may have renamed the file in between, so this one would be told that it did so itself.
//!
//! Invariant: where a thread gets one file by two names, with nothing but lookups in between, both names were
//! there at one moment. Otherwise the second reply names another file of the same kind, by a number that no
//! node has (`Nodes::stranger`). A rename then goes to the service, which decides. All else that the kernel
//! asks about that number fails with ESTALE, upon which it looks the name up again.
//!
//! The kernel looks up each of the two names twice if it had another file by that name before. So the last
//! few lookups of a thread count, until it asks for something else.

use penstock_base::{FileId, HashMap};
use std::cell::RefCell;
use std::time::Duration;

/// The time for which a lookup counts. In a rename the next one follows at once.
const COUNTS: Duration = Duration::from_secs(10);
/// The number of lookups in a row that count.
const IN_A_ROW: usize = 4;
/// Most threads that are remembered. The lookups of others do not count.
const MOST: usize = 4096;

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
    threads: RefCell<HashMap<u32, Vec<Lookup>>>,
}

impl LastLookups {
    /// Another name by which a thread has just got this file.
    pub(crate) fn other(
        &self,
        thread: u32,
        file: FileId,
        (dir, name): Place<'_>,
        now: Duration,
    ) -> Option<(FileId, Box<[u8]>)> {
        let threads = self.threads.borrow();
        let is_other = |last: &&Lookup| {
            last.file == file && now < last.at + COUNTS && (last.dir, &*last.name) != (dir, name)
        };
        let last = threads.get(&thread)?.iter().rfind(is_other)?;
        Some((last.dir, last.name.clone()))
    }

    /// A thread gets a file by this name. Threads that this mount cannot tell apart have the number 0.
    pub(crate) fn gets(&self, thread: u32, file: FileId, (dir, name): Place<'_>, now: Duration) {
        if thread == 0 {
            return;
        }
        let mut threads = self.threads.borrow_mut();
        if threads.len() >= MOST {
            threads.retain(|_, lookups| lookups.iter().any(|lookup| now < lookup.at + COUNTS));
        }
        if threads.len() >= MOST && !threads.contains_key(&thread) {
            return;
        }
        let lookups = threads.entry(thread).or_default();
        lookups.retain(|last| (last.dir, &*last.name) != (dir, name));
        if lookups.len() >= IN_A_ROW {
            lookups.remove(0);
        }
        lookups.push(Lookup { file, dir, name: name.into(), at: now });
    }

    /// A thread asks for something other than a name.
    pub(crate) fn asks(&self, thread: u32) {
        let mut threads = self.threads.borrow_mut();
        if !threads.is_empty() {
            threads.remove(&thread);
        }
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
        let other = |thread, file, name: &[u8]| last.other(thread, file, (DIR, name), NOW);
        last.gets(1, FILE, (DIR, b"old"), NOW);
        assert_eq!(other(1, FILE, b"new"), Some((DIR, b"old".as_slice().into())));
        assert_eq!(other(1, FILE, b"new"), other(1, FILE, b"new"), "also if the kernel looks up again");
        assert!(last.other(1, FILE, (FILE, b"old"), NOW).is_some(), "the same name in another directory");
        assert!(other(1, FILE, b"old").is_none() && other(1, DIR, b"new").is_none());
        assert!(other(2, FILE, b"new").is_none(), "another thread");
        assert!(last.other(1, FILE, (DIR, b"new"), NOW + COUNTS).is_none(), "long after");
        last.asks(2);
        assert!(other(1, FILE, b"new").is_some());
        last.gets(1, FILE, (DIR, b"new"), NOW);
        assert!(other(1, FILE, b"old").is_some() && other(1, FILE, b"new").is_some());
        last.asks(1);
        assert!(other(1, FILE, b"old").is_none(), "it asked for something else");
        last.gets(0, FILE, (DIR, b"old"), NOW);
        assert!(other(0, FILE, b"new").is_none(), "it may be another thread");
    }

    /// Regression: the kernel had a file by the new name that had been replaced. It looked up the new name,
    /// got a third file, and looked it up again. By then the first lookup was forgotten.
    #[test]
    fn a_name_that_is_looked_up_twice_hides_no_other() {
        let last = LastLookups::default();
        let gets = |file, name: &[u8]| last.gets(1, file, (DIR, name), NOW);
        let is_other = |name: &[u8]| last.other(1, FILE, (DIR, name), NOW).is_some();
        let third = FileId::of_numbers(0, 9);
        gets(FILE, b"old");
        gets(third, b"new");
        assert!(is_other(b"new") && !is_other(b"old"));
        gets(third, b"old");
        assert!(!is_other(b"new"), "the old name means another file by now");
        gets(FILE, b"old");
        [b"1", b"2", b"3"].iter().for_each(|name| gets(third, *name));
        assert!(is_other(b"new"));
        gets(third, b"4");
        assert!(!is_other(b"new"), "no rename looks up so much");
    }

    #[test]
    fn the_threads_are_bounded() {
        let last = LastLookups::default();
        let gets = |thread, now| last.gets(thread, FILE, (DIR, b"old"), now);
        let counts = |thread, now| last.other(thread, FILE, (DIR, b"new"), now).is_some();
        let most = MOST as u32;
        (1..=most + 1).for_each(|thread| gets(thread, NOW));
        assert!(counts(most, NOW) && !counts(most + 1, NOW), "one too many");
        gets(1, NOW + Duration::from_secs(1));
        gets(most + 1, NOW + COUNTS);
        assert!(counts(1, NOW + COUNTS) && counts(most + 1, NOW + COUNTS));
        assert_eq!(last.threads.borrow().len(), 2, "the old ones have gone");
    }
}
