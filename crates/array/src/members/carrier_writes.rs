//! Writes on carriers while a copy of what carriers hold is under way.
//!
//! A copy covers pieces of 64 KiB. Each attempt to write on a carrier adds its pieces to those that are left
//! to copy when it is over, however it ends. The end of a copy waits until no attempt is in flight and lets
//! none begin.
//!
//! Invariant: a piece that was written on the carriers after a copy began is copied again before the copy
//! counts.

use crate::ranks;
use penstock_base::rank::{self, Held};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The unit in which it is known what is copied.
pub(crate) const PIECE_BYTES: u64 = 64 << 10;

/// Writes on the carriers of one array.
#[derive(Default)]
pub(crate) struct CarrierWrites {
    /// During a copy: pieces that are not copied yet, or were written since.
    left: RefCell<Option<BTreeSet<u64>>>,
    /// Held shared by each attempt to write.
    attempts: RwLock<()>,
}

impl CarrierWrites {
    /// Waits until these bytes may be written on a carrier. The attempt lasts until the result is dropped.
    pub(crate) async fn begin(&self, bytes: Range<u64>) -> Attempt<'_> {
        rank::check(ranks::CARRIER_WRITE);
        let shared = self.attempts.read().await;
        Attempt { writes: self, bytes, _shared: shared, _held: Held::new(ranks::CARRIER_WRITE, 0) }
    }

    /// Waits until no attempt is in flight, and lets none begin.
    pub(crate) async fn pause(&self) -> Paused<'_> {
        rank::check(ranks::CARRIER_WRITE);
        let exclusive = self.attempts.write().await;
        Paused { _exclusive: exclusive, _held: Held::new(ranks::CARRIER_WRITE, 0) }
    }

    /// Begins a copy of these bytes. It is under way until the result is dropped.
    pub(crate) fn begin_copy(&self, bytes: &[Range<u64>]) -> CopyPieces<'_> {
        let before = self.left.borrow_mut().replace(BTreeSet::new());
        assert!(before.is_none(), "one copy at a time");
        bytes.iter().for_each(|bytes| self.add(bytes));
        CopyPieces(self)
    }

    fn add(&self, bytes: &Range<u64>) {
        if let Some(left) = &mut *self.left.borrow_mut() {
            left.extend(bytes.start / PIECE_BYTES..bytes.end.div_ceil(PIECE_BYTES));
        }
    }
}

/// An attempt to write on a carrier.
pub(crate) struct Attempt<'a> {
    writes: &'a CarrierWrites,
    bytes: Range<u64>,
    /// Dropped after the pieces are added.
    _shared: RwLockReadGuard<'a, ()>,
    _held: Held,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.writes.add(&self.bytes);
    }
}

/// While it lives nobody writes on carriers.
pub(crate) struct Paused<'a> {
    _exclusive: RwLockWriteGuard<'a, ()>,
    _held: Held,
}

/// The pieces of a copy that is under way.
pub(crate) struct CopyPieces<'a>(&'a CarrierWrites);

impl CopyPieces<'_> {
    /// The pieces that are left to copy.
    pub(crate) fn left(&self) -> BTreeSet<u64> {
        self.0.left.borrow().clone().expect("a copy is under way")
    }

    /// Pieces are copied as they are from here on.
    pub(crate) fn begin(&self, pieces: Range<u64>) {
        let mut left = self.0.left.borrow_mut();
        let left = left.as_mut().expect("a copy is under way");
        for piece in pieces {
            left.remove(&piece);
        }
    }
}

impl Drop for CopyPieces<'_> {
    fn drop(&mut self) {
        self.0.left.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn left(copy: &CopyPieces<'_>) -> Vec<u64> {
        copy.left().into_iter().collect()
    }

    #[test]
    fn a_piece_that_is_written_during_a_copy_is_left_again() {
        let writes = CarrierWrites::default();
        let copy = writes.begin_copy(std::slice::from_ref(&(0..3 * PIECE_BYTES)));
        assert_eq!(left(&copy), [0, 1, 2]);
        let attempt = writes.begin(PIECE_BYTES..PIECE_BYTES + 4096).now_or_never().unwrap();
        copy.begin(0..3);
        assert_eq!(left(&copy), [0u64; 0]);
        assert!(writes.pause().now_or_never().is_none(), "an attempt is in flight");
        drop(attempt);
        assert_eq!(left(&copy), [1]);
        let paused = writes.pause().now_or_never().unwrap();
        assert!(writes.begin(0..1).now_or_never().is_none(), "nobody writes now");
        drop((paused, copy));
        // Without a copy nothing is remembered.
        drop(writes.begin(0..1).now_or_never().unwrap());
        assert_eq!(left(&writes.begin_copy(&[])), [0u64; 0]);
    }
}
