//! Checks the sizes of open files that other mounts may have changed, and sends them to the kernel.
//!
//! The kernel asks for a file's size where a program reads or wants attributes. In sendfile, splice,
//! copy_file_range and page faults of a map it uses the size that it knows. A file that another mount makes
//! longer would end too early there for as long as it is open. So each file that may have grown is checked
//! within a second (`attributes`), and its size sent to the kernel.
//!
//! Invariant: an open file is due for a check, or was checked under a lease since it was opened and since the
//! kernel last dropped all its pages. A client that changes its size takes that lease first, and then all
//! pages are dropped.

use penstock_base::{FileId, HashMap, HashSet};
use std::cell::RefCell;

/// The open files of one mount with their handle counts, and the files that are due.
#[derive(Default)]
pub(crate) struct Looks {
    handles: RefCell<HashMap<FileId, u64>>,
    due: RefCell<HashSet<FileId>>,
}

impl Looks {
    /// Counts a new handle. The file becomes due.
    pub(crate) fn opened(&self, file: FileId) {
        *self.handles.borrow_mut().entry(file).or_default() += 1;
        self.due.borrow_mut().insert(file);
    }

    /// Counts a closed handle. A file without handles is no longer due.
    pub(crate) fn closed(&self, file: FileId) {
        let mut handles = self.handles.borrow_mut();
        let left = handles.get_mut(&file).expect("a file is open while it has a handle");
        *left -= 1;
        if *left == 0 {
            handles.remove(&file);
            self.due.borrow_mut().remove(&file);
        }
    }

    /// True if a file has a handle.
    pub(crate) fn is_open(&self, file: FileId) -> bool {
        self.handles.borrow().contains_key(&file)
    }

    /// Makes an open file due, because its size may change from here on without a notice.
    pub(crate) fn is_due(&self, file: FileId) {
        if self.is_open(file) {
            self.due.borrow_mut().insert(file);
        }
    }

    /// Returns true if the file was due, and takes it off the list. The caller checks it now.
    pub(crate) fn take_one(&self, file: FileId) -> bool {
        self.due.borrow_mut().remove(&file)
    }

    /// Takes all files that are due off the list.
    pub(crate) fn take(&self) -> HashSet<FileId> {
        self.due.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_open_files_are_due() {
        let (looks, one, other) = (Looks::default(), FileId::of_numbers(0, 5), FileId::of_numbers(0, 6));
        looks.is_due(one);
        assert!(looks.take().is_empty());
        looks.opened(one);
        looks.opened(one);
        looks.opened(other);
        looks.closed(one);
        looks.closed(other);
        assert_eq!(looks.take(), HashSet::from_iter([one]));
        assert!(looks.take().is_empty());
        looks.is_due(one);
        looks.is_due(other);
        assert_eq!(looks.take(), HashSet::from_iter([one]));
        looks.is_due(one);
        assert!(looks.take_one(one) && !looks.take_one(one));
        looks.is_due(one);
        looks.closed(one);
        assert!(looks.take().is_empty() && looks.handles.borrow().is_empty());
    }
}
