//! Looks at the sizes of open files that other mounts may have changed.
//!
//! The kernel asks for the size of a file where a program reads or wants attributes. In sendfile, splice, copy_file_range and
//! faults of a map it goes by the size that it knows, so a file that another mount makes longer would end too early there for
//! as long as it is open. So what may have grown is looked at again within [`EVERY`], and the kernel is told its size.
//!
//! Invariant: a file that is open is due, or has been looked at under a lease since it was opened and since the kernel last
//! dropped all its pages. Whoever changes its size takes that lease first, and then all pages are dropped.

use crate::session::Session;
use futures_util::{StreamExt, stream};
use penstock_base::{Env, HashMap, HashSet, Ino};
use std::cell::RefCell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

/// As long as names and attributes may be old.
const EVERY: Duration = crate::attr::VALID;
/// A look may wait for another mount's lease.
const AT_A_TIME: usize = 8;

/// Files of one mount that are open, and those that are due.
#[derive(Default)]
pub(crate) struct Looks {
    handles: RefCell<HashMap<Ino, u64>>,
    due: RefCell<HashSet<Ino>>,
}

impl Looks {
    /// A handle is there.
    pub(crate) fn opened(&self, ino: Ino) {
        *self.handles.borrow_mut().entry(ino).or_default() += 1;
        self.due.borrow_mut().insert(ino);
    }

    /// One is gone.
    pub(crate) fn closed(&self, ino: Ino) {
        let mut handles = self.handles.borrow_mut();
        let left = handles.get_mut(&ino).expect("a file is open while it has a handle");
        *left -= 1;
        if *left == 0 {
            handles.remove(&ino);
            self.due.borrow_mut().remove(&ino);
        }
    }

    /// The size may change from here on, and nobody tells.
    pub(crate) fn is_due(&self, ino: Ino) {
        if self.handles.borrow().contains_key(&ino) {
            self.due.borrow_mut().insert(ino);
        }
    }

    /// True if it was due; it is looked at now.
    pub(crate) fn take_one(&self, ino: Ino) -> bool {
        self.due.borrow_mut().remove(&ino)
    }

    fn take(&self) -> HashSet<Ino> {
        self.due.take()
    }
}

/// Looks for as long as the mount is there.
pub(crate) async fn run(session: Rc<Session>, env: Env) -> Infallible {
    loop {
        env.sleep(EVERY).await;
        if !session.client.was_shared() {
            continue;
        }
        let due = session.cache.looks.take();
        stream::iter(due).for_each_concurrent(AT_A_TIME, |ino| session.look_at_size(ino)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_open_files_are_due() {
        let (looks, one, other) = (Looks::default(), Ino(5), Ino(6));
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
