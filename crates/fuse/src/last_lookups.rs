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
//! few lookups of a thread count, until it asks for something else. They count however long ago they were:
//! the second may wait for a recovery, or this process may be stopped. Of too many threads the one goes that
//! has not looked up anything for longest, but none with a lookup that is being served, so a flood of threads
//! between the two lookups of a rename must fit into the time that the kernel takes from one to the next.

use penstock_base::{FileId, HashMap};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The number of lookups in a row that count.
const IN_A_ROW: usize = 4;
/// Most threads that are remembered.
const MOST: usize = 4096;

/// A name in a directory.
pub(crate) type Place<'a> = (FileId, &'a [u8]);

struct Lookup {
    file: FileId,
    dir: FileId,
    name: Box<[u8]>,
}

/// The last lookups of one thread, the newest last. A request has it while it is served.
#[derive(Default)]
pub(crate) struct Row(Vec<Lookup>);

impl Row {
    /// Another name by which the thread has just got this file.
    pub(crate) fn other(&self, file: FileId, place: Place<'_>) -> Option<Place<'_>> {
        let is_other = |last: &&Lookup| last.file == file && (last.dir, &*last.name) != place;
        self.0.iter().rfind(is_other).map(|last| (last.dir, &*last.name))
    }

    /// The thread gets a file by this name.
    pub(crate) fn gets(&mut self, file: FileId, (dir, name): Place<'_>) {
        self.0.retain(|last| (last.dir, &*last.name) != (dir, name));
        if self.0.len() >= IN_A_ROW {
            self.0.remove(0);
        }
        self.0.push(Lookup { file, dir, name: name.into() });
    }
}

#[derive(Default)]
struct Threads {
    /// The row of each thread, with the number of the time when it was kept.
    rows: HashMap<u32, (u64, Row)>,
    /// The threads by these numbers.
    kept: BTreeMap<u64, u32>,
    last: u64,
}

impl Threads {
    fn take(&mut self, thread: u32) -> Option<Row> {
        let (number, row) = self.rows.remove(&thread)?;
        self.kept.remove(&number);
        Some(row)
    }

    fn keep(&mut self, thread: u32, row: Row) {
        self.take(thread);
        if self.rows.len() >= MOST {
            let (_, oldest) = self.kept.pop_first().expect("every row has a number");
            self.rows.remove(&oldest);
        }
        self.last += 1;
        self.rows.insert(thread, (self.last, row));
        self.kept.insert(self.last, thread);
        assert_eq!(self.rows.len(), self.kept.len(), "every row has a number");
    }
}

/// The last lookups of threads, by their numbers. Threads that this mount cannot tell apart have the number 0
/// and are not remembered.
#[derive(Default)]
pub(crate) struct LastLookups(RefCell<Threads>);

impl LastLookups {
    /// Takes the row of a thread out, while a lookup of it is served.
    pub(crate) fn take(&self, thread: u32) -> Row {
        self.0.borrow_mut().take(thread).unwrap_or_default()
    }

    /// Puts the row of a thread back.
    pub(crate) fn keep(&self, thread: u32, row: Row) {
        if thread != 0 && !row.0.is_empty() {
            self.0.borrow_mut().keep(thread, row);
        }
    }

    /// A thread asks for something other than a name.
    pub(crate) fn asks(&self, thread: u32) {
        let mut threads = self.0.borrow_mut();
        if !threads.rows.is_empty() {
            threads.take(thread);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: FileId = FileId::of_numbers(0, 7);
    const FILE: FileId = FileId::of_numbers(0, 8);

    fn gets(last: &LastLookups, thread: u32, file: FileId, name: &[u8]) {
        let mut row = last.take(thread);
        row.gets(file, (DIR, name));
        last.keep(thread, row);
    }

    fn is_other(last: &LastLookups, thread: u32, file: FileId, place: Place<'_>) -> bool {
        let row = last.take(thread);
        let is_other = row.other(file, place).is_some();
        last.keep(thread, row);
        is_other
    }

    #[test]
    fn the_last_lookup_of_a_thread_counts_until_it_asks_for_something_else() {
        let last = LastLookups::default();
        let other = |thread, file, name: &[u8]| is_other(&last, thread, file, (DIR, name));
        gets(&last, 1, FILE, b"old");
        assert!(other(1, FILE, b"new") && other(1, FILE, b"new"), "also if the kernel looks up again");
        let row = last.take(1);
        assert_eq!(row.other(FILE, (DIR, b"new")), Some((DIR, b"old".as_slice())));
        assert_eq!(row.other(FILE, (FILE, b"old")), Some((DIR, b"old".as_slice())), "in another directory");
        assert!(!other(1, FILE, b"new"), "the row is taken");
        last.keep(1, row);
        assert!(!other(1, FILE, b"old") && !other(1, DIR, b"new"));
        assert!(!other(2, FILE, b"new"), "another thread");
        last.asks(2);
        assert!(other(1, FILE, b"new"));
        gets(&last, 1, FILE, b"new");
        assert!(other(1, FILE, b"old") && other(1, FILE, b"new"));
        last.asks(1);
        assert!(!other(1, FILE, b"old"), "it asked for something else");
        gets(&last, 0, FILE, b"old");
        assert!(!other(0, FILE, b"new"), "it may be another thread");
    }

    /// Regression: the kernel had a file by the new name that had been replaced. It looked up the new name,
    /// got a third file, and looked it up again. By then the first lookup was forgotten.
    #[test]
    fn a_name_that_is_looked_up_twice_hides_no_other() {
        let last = LastLookups::default();
        let gets = |file, name: &[u8]| gets(&last, 1, file, name);
        let is_other = |name: &[u8]| is_other(&last, 1, FILE, (DIR, name));
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

    /// Regression: once 4,096 threads had looked up a name each, no other was remembered, so that many short
    /// programs made two mounts say that they had moved the same file.
    #[test]
    fn of_too_many_threads_the_oldest_goes() {
        let last = LastLookups::default();
        let counts = |thread| last.0.borrow().rows.contains_key(&thread);
        let most = MOST as u32;
        (1..=most).for_each(|thread| gets(&last, thread, FILE, b"old"));
        gets(&last, 1, FILE, b"old");
        let served = last.take(2);
        (most + 1..=2 * most).for_each(|thread| gets(&last, thread, FILE, b"old"));
        assert!(!counts(1) && !counts(most) && counts(most + 1) && counts(2 * most));
        last.keep(2, served);
        assert!(counts(2) && !counts(most + 1) && counts(most + 2));
        assert_eq!(last.0.borrow().rows.len(), MOST);
        (1..=2 * most).for_each(|thread| last.asks(thread));
        assert!(last.0.borrow().rows.is_empty() && last.0.borrow().kept.is_empty());
    }
}
