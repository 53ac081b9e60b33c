//! Pages that the kernel wrote back while the service did not answer, and that were taken for written.
//!
//! The kernel drops no page that it is writing back. So that it can drop all pages when the lease has run out, it is told that they are
//! written, and they are as soon as the service answers. What is lost by then every descriptor of the file hears of.
//!
//! Invariant: no other request for a file is served while it has such pages, but those for other pages that are written back.

use penstock_base::{HashMap, Ino};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use tokio::sync::Notify;

/// Bytes of one mount. Beyond that the kernel waits.
const MOST_BYTES: u64 = 64 << 20;

#[derive(Default)]
pub(crate) struct Deferred {
    last: Cell<u64>,
    bytes: Cell<u64>,
    pages: RefCell<HashMap<u64, (Ino, Range<u64>)>>,
    written: Notify,
}

/// Pages that are to be written yet, while it lives.
pub(crate) struct DeferredPages(Rc<Deferred>, u64);

impl Drop for DeferredPages {
    fn drop(&mut self) {
        let Self(all, number) = self;
        if let Some((_, bytes)) = all.pages.borrow_mut().remove(number) {
            all.bytes.set(all.bytes.get() - (bytes.end - bytes.start));
        }
        all.written.notify_waiters();
    }
}

impl Deferred {
    /// Takes these bytes for written, if there is room for that.
    pub(crate) fn take(self: &Rc<Self>, ino: Ino, bytes: Range<u64>) -> Option<DeferredPages> {
        let all = self.bytes.get() + (bytes.end - bytes.start);
        if all > MOST_BYTES {
            return None;
        }
        self.bytes.set(all);
        let number = self.last.get() + 1;
        self.last.set(number);
        self.pages.borrow_mut().insert(number, (ino, bytes));
        Some(DeferredPages(self.clone(), number))
    }

    fn overlaps(&self, ino: Ino, bytes: &Range<u64>) -> bool {
        let pages = self.pages.borrow();
        let is_in =
            |of: &Ino, other: &Range<u64>| *of == ino && other.start < bytes.end && bytes.start < other.end;
        pages.values().any(|(of, other)| is_in(of, other))
    }

    /// Waits until none of these bytes of a file is to be written yet.
    pub(crate) async fn none(&self, ino: Ino, bytes: Range<u64>) {
        loop {
            let written = self.written.notified();
            if !self.overlaps(ino, &bytes) {
                return;
            }
            written.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn who_asks_for_deferred_pages_waits_for_them() {
        let (deferred, ino) = (Rc::<Deferred>::default(), Ino(7));
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
