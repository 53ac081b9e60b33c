//! Writes that their callers gave up and that the drive may still do: their ranges are reserved until they end.
//!
//! What bounds it: a caller gives up only after a deadline, and then latches the drive or writes the same range again,
//! which waits here.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use tokio::sync::Notify;

/// The ranges of overdue writes, in bytes of the drive.
#[derive(Default)]
pub(crate) struct Overdue {
    ranges: RefCell<BTreeMap<u64, Range<u64>>>,
    next: Cell<u64>,
    ended: Notify,
}

/// Reserves a range until it is dropped.
pub(crate) struct Held {
    overdue: Rc<Overdue>,
    number: u64,
}

impl Overdue {
    /// Reserves `range`.
    pub(crate) fn hold(this: &Rc<Self>, range: Range<u64>) -> Held {
        let number = this.next.get();
        this.next.set(number + 1);
        this.ranges.borrow_mut().insert(number, range);
        Held { overdue: this.clone(), number }
    }

    /// Whether a reserved range overlaps `range`.
    pub(crate) fn overlaps(&self, range: &Range<u64>) -> bool {
        self.ranges.borrow().values().any(|held| held.start < range.end && range.start < held.end)
    }

    /// Waits until no reserved range overlaps `range`.
    pub(crate) async fn wait_for(&self, range: &Range<u64>) {
        loop {
            let ended = self.ended.notified();
            if !self.overlaps(range) {
                return;
            }
            ended.await;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.overdue.ranges.borrow_mut().remove(&self.number);
        self.overdue.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_range_is_free_when_all_writes_of_it_have_ended() {
        let overdue = Rc::<Overdue>::default();
        let first = Overdue::hold(&overdue, 0..8192);
        let second = Overdue::hold(&overdue, 4096..12288);
        assert!(overdue.overlaps(&(8192..12288)) && !overdue.overlaps(&(12288..16384)));
        let mut wait = Box::pin(overdue.wait_for(&(4096..8192)));
        assert!(wait.as_mut().now_or_never().is_none());
        drop(first);
        assert!(wait.as_mut().now_or_never().is_none());
        drop(second);
        assert!(wait.as_mut().now_or_never().is_some());
    }
}
