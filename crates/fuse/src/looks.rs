//! Checks the sizes of open files that other mounts may have changed, and sends them to the kernel.
//!
//! The kernel asks for a file's size where a program reads or wants attributes. In sendfile, splice,
//! copy_file_range and page faults of a map it uses the size that it knows. A file that another mount makes
//! longer would end too early there for as long as it is open. So each file that may have grown is checked
//! within a second (`attributes`), and its size sent to the kernel. A notice can only make it larger. So a
//! file is checked once more when a program gets a lock, and then the kernel asks.
//!
//! Invariant: an open file is due for a check, or was checked under a lease since it was opened and since the
//! kernel last ended to drop all its pages. A client that changes its size takes that lease first, and then
//! all pages are dropped. The lease may serve a check until then.

use penstock_base::{FileId, HashMap};
use std::cell::{Cell, RefCell};

/// The open files of one mount with their handle counts, and the files that are due.
#[derive(Default)]
pub(crate) struct Looks {
    handles: RefCell<HashMap<FileId, u64>>,
    /// The number of the event for which each file is due, and for which it is due under a lock.
    due: RefCell<HashMap<FileId, u64>>,
    due_under_lock: RefCell<HashMap<FileId, u64>>,
    events: Cell<u64>,
}

/// A file that is due, and the event for which it is. It stays due until [`Looks::is_checked`], so that
/// whoever gets a lock during a check of somebody else checks too.
pub(crate) struct Due {
    pub(crate) file: FileId,
    event: u64,
}

impl Looks {
    /// Counts a new handle. The file becomes due.
    pub(crate) fn opened(&self, file: FileId) {
        *self.handles.borrow_mut().entry(file).or_default() += 1;
        self.is_due(file);
    }

    /// Counts a closed handle. A file without handles is no longer due.
    pub(crate) fn closed(&self, file: FileId) {
        let mut handles = self.handles.borrow_mut();
        let left = handles.get_mut(&file).expect("a file is open while it has a handle");
        *left -= 1;
        if *left == 0 {
            handles.remove(&file);
            self.due.borrow_mut().remove(&file);
            self.due_under_lock.borrow_mut().remove(&file);
        }
    }

    /// True if a file has a handle.
    pub(crate) fn is_open(&self, file: FileId) -> bool {
        self.handles.borrow().contains_key(&file)
    }

    /// Makes an open file due, because its size may change from here on without a notice.
    pub(crate) fn is_due(&self, file: FileId) {
        if self.is_open(file) {
            self.events.set(self.events.get() + 1);
            for due in [&self.due, &self.due_under_lock] {
                due.borrow_mut().insert(file, self.events.get());
            }
        }
    }

    /// Returns a file if it is due under a lock. The caller checks it now.
    pub(crate) fn one_due_under_lock(&self, file: FileId) -> Option<Due> {
        self.due_under_lock.borrow().get(&file).map(|event| Due { file, event: *event })
    }

    /// Returns all files that are due. The caller checks them now.
    pub(crate) fn all_due(&self) -> Vec<Due> {
        self.due.borrow().iter().map(|(file, event)| Due { file: *file, event: *event }).collect()
    }

    /// Records that the kernel was told of a larger size. The file stays due if there was another event
    /// meanwhile.
    pub(crate) fn is_checked(&self, checked: &Due) {
        ends(&mut self.due.borrow_mut(), checked);
    }

    /// Records that the kernel goes by the size, also by a smaller one.
    pub(crate) fn is_checked_under_lock(&self, checked: &Due) {
        ends(&mut self.due_under_lock.borrow_mut(), checked);
    }
}

/// A file is not due any more, unless for another event.
fn ends(due: &mut HashMap<FileId, u64>, checked: &Due) {
    if due.get(&checked.file) == Some(&checked.event) {
        due.remove(&checked.file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(looks: &Looks) -> Vec<FileId> {
        looks.all_due().into_iter().map(|due| due.file).collect()
    }

    #[test]
    fn only_open_files_are_due() {
        let (looks, one, other) = (Looks::default(), FileId::of_numbers(0, 5), FileId::of_numbers(0, 6));
        looks.is_due(one);
        assert!(files(&looks).is_empty());
        looks.opened(one);
        looks.opened(one);
        looks.opened(other);
        looks.closed(one);
        looks.closed(other);
        assert_eq!(files(&looks), [one]);
        let due = looks.one_due_under_lock(one).unwrap();
        looks.is_checked(&due);
        assert!(files(&looks).is_empty() && looks.one_due_under_lock(one).is_some(), "it may be shorter");
        looks.is_checked_under_lock(&due);
        assert!(looks.one_due_under_lock(one).is_none());
        looks.is_due(one);
        looks.is_due(other);
        assert_eq!(files(&looks), [one]);
        looks.closed(one);
        assert!(files(&looks).is_empty() && looks.handles.borrow().is_empty());
        assert!(looks.due_under_lock.borrow().is_empty());
    }

    /// Regression: who got a lock during a check did not wait for it, and appended at an old end.
    #[test]
    fn a_file_is_due_until_a_check_has_ended_that_began_after_its_last_event() {
        let (looks, file) = (Looks::default(), FileId::of_numbers(0, 5));
        looks.opened(file);
        let begun = looks.one_due_under_lock(file).unwrap();
        assert_eq!(files(&looks), [file], "a check runs");
        looks.is_due(file);
        looks.is_checked(&begun);
        assert_eq!(files(&looks), [file], "something happened during the check");
        let begun = looks.one_due_under_lock(file).unwrap();
        looks.closed(file);
        looks.opened(file);
        looks.is_checked(&begun);
        assert_eq!(files(&looks), [file], "it was opened during the check");
        looks.is_checked(&looks.one_due_under_lock(file).unwrap());
        assert!(files(&looks).is_empty());
    }
}
