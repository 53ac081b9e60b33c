//! The file that each thread has just looked up, beside other mounts.
//!
//! For rename(2) the kernel looks up the old name and then the new one, with both directories locked. If it
//! gets one file for both, it returns without a request, because two names of one file are left as they are.
//! Another mount may have renamed the file in between, so this one would be told that it did so itself.
//!
//! Invariant: no thread gets one file by two names in two requests that follow each other. The second reply
//! names another file of the same kind, by a number that no node has (`Nodes::stranger`). A rename then goes
//! to the service, which decides, also if both names are of that file. All else that the kernel asks about
//! that number fails with ESTALE, upon which it looks the name up again.
//!
//! The kernel may ignore the reply and look up at once, if it had a file by the new name before. So what a
//! thread has looked up stays noted until it asks for something else.

use penstock_base::{FileId, HashMap};
use std::cell::RefCell;
use std::time::Duration;

/// The time for which a lookup counts. In a rename the next one follows at once.
const COUNTS: Duration = Duration::from_secs(10);
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
    threads: RefCell<HashMap<u32, Lookup>>,
}

impl LastLookups {
    /// A thread gets a file by this name. Returns false if it must not, because it got the file by another
    /// name in its last request.
    pub(crate) fn gets(&self, thread: u32, file: FileId, (dir, name): Place<'_>, now: Duration) -> bool {
        let mut threads = self.threads.borrow_mut();
        let last = threads.get(&thread).filter(|lookup| now < lookup.at + COUNTS);
        if last.is_some_and(|last| last.file == file && (last.dir, &*last.name) != (dir, name)) {
            return false;
        }
        if threads.len() >= MOST {
            threads.retain(|_, lookup| now < lookup.at + COUNTS);
        }
        if threads.len() < MOST || threads.contains_key(&thread) {
            threads.insert(thread, Lookup { file, dir, name: name.into(), at: now });
        }
        true
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
    fn a_thread_gets_no_file_by_two_names_in_a_row() {
        let last = LastLookups::default();
        let gets = |thread, file, name: &[u8]| last.gets(thread, file, (DIR, name), NOW);
        assert!(gets(1, FILE, b"old") && gets(1, FILE, b"old"));
        assert!(!gets(1, FILE, b"new") && !gets(1, FILE, b"new"), "also if the kernel looks up again");
        assert!(!last.gets(1, FILE, (FILE, b"old"), NOW), "the same name in another directory");
        assert!(gets(2, FILE, b"new"), "another thread");
        last.asks(2);
        assert!(!gets(1, FILE, b"new"));
        last.asks(1);
        assert!(gets(1, FILE, b"new"), "it asked for something else");
        assert!(gets(1, DIR, b"other") && gets(1, FILE, b"old"), "another file in between");
        assert!(last.gets(1, FILE, (DIR, b"new"), NOW + COUNTS), "long after");
    }

    #[test]
    fn the_threads_are_bounded() {
        let last = LastLookups::default();
        let gets = |thread, name: &[u8], now| last.gets(thread, FILE, (DIR, name), now);
        assert!((0..=MOST as u32).all(|thread| gets(thread, b"old", NOW)));
        assert!(gets(MOST as u32, b"new", NOW), "one too many");
        let later = NOW + Duration::from_secs(1);
        assert!(!gets(0, b"new", later) && gets(1, b"old", later));
        assert!(gets(MOST as u32, b"old", NOW + COUNTS));
        assert_eq!(last.threads.borrow().len(), 2, "the old ones have gone");
    }
}
