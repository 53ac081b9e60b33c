//! Defers pages that the kernel writes back while the service does not answer, until it answers again.
//!
//! The kernel drops no page under write-back. So that it can drop all pages when the lease has run out, its
//! write-backs are answered as done, and the pages are written as soon as the service answers. If they are
//! lost by then, every descriptor of the file reports the loss.
//!
//! Invariants:
//! - While a file has deferred pages, only write-backs of its pages are served.
//! - A second write-back of a page is written after the deferred data of the first one.

use penstock_base::{FileId, HeldRange, HeldRanges};
use std::ops::Range;
use std::rc::Rc;

/// The most bytes that a mount defers. Beyond that a write-back is refused: its pages stay, and programs see
/// them.
const MOST_BYTES: u64 = 64 << 20;

#[derive(Default)]
pub(crate) struct Deferred {
    taken: Rc<HeldRanges<FileId>>,
    refused: Rc<HeldRanges<FileId>>,
}

/// A write-back that is done after the kernel was answered (`Taken`), or that must keep its pages because
/// there is no memory to defer it (`Refused`). It ends when this is dropped.
pub(crate) enum Deferral {
    Taken(#[expect(dead_code, reason = "held until it is dropped")] HeldRange<FileId>),
    Refused(#[expect(dead_code, reason = "held until it is dropped")] HeldRange<FileId>),
}

impl Deferred {
    /// Defers the write-back of these bytes, or refuses it if 64 MiB are deferred already.
    pub(crate) fn take(&self, file: FileId, bytes: Range<u64>) -> Deferral {
        let has_room = self.taken.bytes() + u128::from(bytes.end - bytes.start) <= u128::from(MOST_BYTES);
        match has_room {
            true => Deferral::Taken(HeldRanges::hold(&self.taken, file, bytes)),
            false => Deferral::Refused(HeldRanges::hold(&self.refused, file, bytes)),
        }
    }

    /// Returns a mark for [`Deferred::earlier`].
    pub(crate) fn mark(&self) -> u64 {
        self.taken.mark()
    }

    /// Waits until no data of these bytes that was deferred before the mark is left to write.
    pub(crate) async fn earlier(&self, mark: u64, file: FileId, bytes: Range<u64>) {
        self.taken.wait_for_earlier(mark, &file, &bytes).await;
    }

    /// Waits until no deferred data of these bytes is left to write.
    pub(crate) async fn none(&self, file: FileId, bytes: Range<u64>) {
        self.taken.wait_for(&file, &bytes).await;
    }

    /// True if a write-back of some of these bytes was refused and is not done yet.
    pub(crate) fn refuses(&self, file: FileId, bytes: &Range<u64>) -> bool {
        self.refused.overlaps(&file, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn who_asks_for_deferred_pages_waits_for_them() {
        let (deferred, file) = (Deferred::default(), FileId::of_numbers(0, 7));
        let first = deferred.take(file, 0..4096);
        let second = deferred.take(file, 8192..12_288);
        let waits = |file, bytes| deferred.none(file, bytes).now_or_never().is_none();
        assert!(waits(file, 0..u64::MAX) && waits(file, 4000..5000) && !waits(file, 4096..8192));
        assert!(!waits(FileId::of_numbers(0, 8), 0..u64::MAX));
        drop(first);
        assert!(waits(file, 0..u64::MAX) && !waits(file, 0..4096));
        drop(second);
        assert!(!waits(file, 0..u64::MAX));
    }

    #[test]
    fn what_there_is_no_room_for_is_refused_until_it_is_done() {
        let (deferred, file) = (Deferred::default(), FileId::of_numbers(0, 7));
        let first = deferred.take(file, 0..4096);
        let refused = deferred.take(FileId::of_numbers(0, 8), 0..MOST_BYTES);
        assert!(matches!((&first, &refused), (Deferral::Taken(_), Deferral::Refused(_))));
        assert!(
            deferred.refuses(FileId::of_numbers(0, 8), &(4096..8192)) && !deferred.refuses(file, &(0..4096))
        );
        assert!(deferred.none(FileId::of_numbers(0, 8), 0..u64::MAX).now_or_never().is_some());
        drop((first, refused));
        assert!(!deferred.refuses(FileId::of_numbers(0, 8), &(4096..8192)));
        assert!(matches!(deferred.take(file, 0..MOST_BYTES), Deferral::Taken(_)));
    }

    #[test]
    fn a_page_that_is_written_back_again_comes_after_what_was_taken_of_it() {
        let (deferred, file) = (Deferred::default(), FileId::of_numbers(0, 7));
        let first = deferred.take(file, 0..4096);
        let mark = deferred.mark();
        let _again = deferred.take(file, 0..4096);
        let waits = || deferred.earlier(mark, file, 0..4096).now_or_never().is_none();
        assert!(waits());
        drop(first);
        assert!(!waits());
    }
}
