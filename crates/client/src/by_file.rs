//! Wakes tasks that wait for a change of one file, at a cost that does not depend on those that wait for
//! other files.

use penstock_base::{FileId, HashMap};
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use tokio::sync::Notify;

/// The listeners of each file.
#[derive(Default)]
pub(crate) struct ByFile(RefCell<HashMap<FileId, Weak<Notify>>>);

impl ByFile {
    /// Listens for changes of a file, until the result is dropped.
    pub(crate) fn listen(&self, file: FileId) -> Listener<'_> {
        let mut listeners = self.0.borrow_mut();
        let known = listeners.get(&file).and_then(Weak::upgrade);
        let changed = known.unwrap_or_else(|| {
            let new = Rc::<Notify>::default();
            listeners.insert(file, Rc::downgrade(&new));
            new
        });
        Listener { all: self, file, changed }
    }

    /// Wakes those that wait for a change of a file.
    pub(crate) fn wake(&self, file: FileId) {
        let listened = self.0.borrow().get(&file).and_then(Weak::upgrade);
        if let Some(changed) = listened {
            changed.notify_waiters();
        }
    }

    /// Wakes all.
    pub(crate) fn wake_all(&self) {
        let all: Vec<_> = self.0.borrow().values().filter_map(Weak::upgrade).collect();
        all.into_iter().for_each(|changed| changed.notify_waiters());
    }
}

/// A listener for changes of a file.
pub(crate) struct Listener<'a> {
    all: &'a ByFile,
    file: FileId,
    changed: Rc<Notify>,
}

impl Listener<'_> {
    /// Completes when the file changes after this call.
    pub(crate) fn changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.changed.notified()
    }

    /// Waits until `done` is true. It is asked now, and after each change of the file.
    pub(crate) async fn until(&self, done: impl Fn() -> bool) {
        loop {
            let changed = self.changed();
            if done() {
                return;
            }
            changed.await;
        }
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        if Rc::strong_count(&self.changed) == 1 {
            let last = self.all.0.borrow_mut().remove(&self.file);
            assert!(last.is_some(), "a file is listed while anybody listens");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_change_wakes_those_that_wait_for_its_file() {
        let files = ByFile::default();
        let [one, other] = [7, 8].map(|ino| files.listen(FileId::of_numbers(0, ino)));
        let second = files.listen(one.file);
        let waits = [&one, &second, &other].map(Listener::changed);
        files.wake(one.file);
        let woken = waits.map(|wait| wait.now_or_never().is_some());
        assert_eq!(woken, [true, true, false]);
        let waits = [&one, &other].map(Listener::changed);
        files.wake_all();
        assert!(waits.into_iter().all(|wait| wait.now_or_never().is_some()));
        drop((one, other));
        assert_eq!(files.0.borrow().len(), 1, "one still listens");
        drop(second);
        assert!(files.0.borrow().is_empty());
    }
}
