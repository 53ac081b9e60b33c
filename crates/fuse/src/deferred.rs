//! Pages that the kernel wrote back while the service did not answer, and that were taken for written.
//!
//! The kernel drops no page that it is writing back. So that it can drop all pages when the lease has run out, it is told that they are
//! written, and they are as soon as the service answers. What is lost by then every descriptor of the file hears of.
//!
//! Invariant: no other request for a file is served while it has such pages, but those for other pages that are written back.

use penstock_base::{HeldRange, HeldRanges, Ino};
use std::ops::Range;
use std::rc::Rc;

/// Bytes of one mount. Beyond that the kernel waits.
const MOST_BYTES: u64 = 64 << 20;

#[derive(Default)]
pub(crate) struct Deferred(Rc<HeldRanges<Ino>>);

impl Deferred {
    /// Takes these bytes for written, if there is room for that. They are when the result is dropped.
    pub(crate) fn take(&self, ino: Ino, bytes: Range<u64>) -> Option<HeldRange<Ino>> {
        let has_room = self.0.bytes() + u128::from(bytes.end - bytes.start) <= u128::from(MOST_BYTES);
        has_room.then(|| HeldRanges::hold(&self.0, ino, bytes))
    }

    /// Waits until none of these bytes of a file is to be written yet.
    pub(crate) async fn none(&self, ino: Ino, bytes: Range<u64>) {
        self.0.wait_for(&ino, &bytes).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn who_asks_for_deferred_pages_waits_for_them() {
        let (deferred, ino) = (Deferred::default(), Ino(7));
        let first = deferred.take(ino, 0..4096).unwrap();
        let second = deferred.take(ino, 8192..12_288).unwrap();
        let waits = |ino, bytes| deferred.none(ino, bytes).now_or_never().is_none();
        assert!(waits(ino, 0..u64::MAX) && waits(ino, 4000..5000) && !waits(ino, 4096..8192));
        assert!(!waits(Ino(8), 0..u64::MAX));
        assert!(deferred.take(Ino(8), 0..MOST_BYTES).is_none());
        drop(first);
        assert!(waits(ino, 0..u64::MAX) && !waits(ino, 0..4096));
        drop(second);
        assert!(!waits(ino, 0..u64::MAX) && deferred.take(ino, 0..MOST_BYTES).is_some());
    }
}
