//! Byte ranges that are busy for a while, such as ranges of a drive or of many files with I/O in flight.
//!
//! Invariant: a range counts as busy from the call to [`HeldRanges::hold`] until the returned [`HeldRange`]
//! is dropped.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use tokio::sync::Notify;

/// The busy ranges of several objects, each of which has a key of type `K`.
#[derive(Debug)]
pub struct HeldRanges<K> {
    ranges: RefCell<BTreeMap<u64, (K, Range<u64>)>>,
    next: Cell<u64>,
    /// The total length; a single range may be nearly 2^64 bytes long, so 64 bits do not suffice.
    bytes: Cell<u128>,
    ended: Notify,
}

/// A guard: its range is busy until the guard is dropped.
#[derive(Debug)]
pub struct HeldRange<K> {
    all: Rc<HeldRanges<K>>,
    number: u64,
}

impl<K> Default for HeldRanges<K> {
    fn default() -> Self {
        let (ranges, next, bytes, ended) = Default::default();
        Self { ranges, next, bytes, ended }
    }
}

impl<K: PartialEq> HeldRanges<K> {
    /// Marks a range of `key` as busy. Ranges may overlap.
    pub fn hold(this: &Rc<Self>, key: K, range: Range<u64>) -> HeldRange<K> {
        let number = this.next.get();
        this.next.set(number + 1);
        this.bytes.set(this.bytes.get() + u128::from(range.end - range.start));
        this.ranges.borrow_mut().insert(number, (key, range));
        HeldRange { all: this.clone(), number }
    }

    /// The total length of all busy ranges in bytes. Overlapping ranges count separately.
    pub fn bytes(&self) -> u128 {
        self.bytes.get()
    }

    /// The busy ranges of `key`, in the order of the calls to [`HeldRanges::hold`].
    pub fn of(&self, key: &K) -> Vec<Range<u64>> {
        let ranges = self.ranges.borrow();
        ranges.values().filter(|(of, _)| of == key).map(|(_, range)| range.clone()).collect()
    }

    /// True if a busy range of `key` overlaps `range`.
    pub fn overlaps(&self, key: &K, range: &Range<u64>) -> bool {
        self.overlap_before(u64::MAX, key, range)
    }

    fn overlap_before(&self, mark: u64, key: &K, range: &Range<u64>) -> bool {
        let overlap = |held: &Range<u64>| held.start < range.end && range.start < held.end;
        self.ranges.borrow().range(..mark).any(|(_, (of, held))| of == key && overlap(held))
    }

    /// The current point in time, for [`HeldRanges::wait_for_earlier`].
    pub fn mark(&self) -> u64 {
        self.next.get()
    }

    /// Waits until no busy range of `key` overlaps `range`.
    pub async fn wait_for(&self, key: &K, range: &Range<u64>) {
        self.wait_for_earlier(u64::MAX, key, range).await;
    }

    /// The same, but ignores ranges that became busy after [`HeldRanges::mark`] returned `mark`.
    pub async fn wait_for_earlier(&self, mark: u64, key: &K, range: &Range<u64>) {
        loop {
            let ended = self.ended.notified();
            if !self.overlap_before(mark, key, range) {
                return;
            }
            ended.await;
        }
    }
}

impl<K> Drop for HeldRange<K> {
    fn drop(&mut self) {
        if let Some((_, range)) = self.all.ranges.borrow_mut().remove(&self.number) {
            self.all.bytes.set(self.all.bytes.get() - u128::from(range.end - range.start));
        }
        self.all.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_range_is_free_when_all_writes_of_it_have_ended() {
        let overdue = Rc::<HeldRanges<()>>::default();
        let first = HeldRanges::hold(&overdue, (), 0..8192);
        let second = HeldRanges::hold(&overdue, (), 4096..12288);
        assert!(overdue.overlaps(&(), &(8192..12288)) && !overdue.overlaps(&(), &(12288..16384)));
        let free = 4096..8192;
        let mut wait = Box::pin(overdue.wait_for(&(), &free));
        assert!(wait.as_mut().now_or_never().is_none());
        drop(first);
        assert!(wait.as_mut().now_or_never().is_none());
        let mark = overdue.mark();
        let third = HeldRanges::hold(&overdue, (), 4096..8192);
        drop(second);
        assert!(wait.as_mut().now_or_never().is_none());
        assert!(overdue.wait_for_earlier(mark, &(), &free).now_or_never().is_some());
        drop(third);
        assert!(wait.as_mut().now_or_never().is_some());
        assert_eq!(overdue.bytes(), 0);
    }
}
