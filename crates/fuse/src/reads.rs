//! Orders and refuses reads of pages behind the end of a file, so that no reader sees zeros before the end.
//!
//! After another mount truncated a file, the kernel may believe in a larger size, and also reads pages behind
//! the end. It takes a short reply as the end of the file: the read's offset plus the bytes of the reply. Of
//! reads that it sent together only the first short reply counts (`fuse_read_update_size` in fs/fuse/file.c).
//! So when a read behind the end was answered before the read across the end, the file seemed to end at the
//! offset of the first one, with zeros from its real end up to there. Two readers share the read-ahead
//! window, so either read may be sent first, and the other one late.
//!
//! So the first read of a page behind the end is refused. It is read-ahead, which nobody waits for, and a
//! refusal changes no size. A program that needs such a page has the kernel read it alone. That read is
//! answered, after all reads before it.
//!
//! Invariants:
//! - A page is refused once until it is read again or dropped, and never when there is no room to remember
//!   it.
//! - A read with an empty answer is answered after all reads that begin at smaller offsets and were in flight
//!   before its answer was known. None of these waits for it, or for a lease.

use penstock_base::{FileId, HashMap};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use tokio::sync::Notify;

/// The most refused ranges that are remembered of one file.
const MOST_REFUSED: usize = 64;
/// The most files with refused ranges.
const MOST_FILES: usize = 4096;

#[derive(Clone, Copy)]
struct Read {
    number: u64,
    offset: u64,
}

/// A range of pages that was refused. `number` is the number of the last read that had begun by then.
struct Refused {
    number: u64,
    bytes: Range<u64>,
}

/// The reads of one mount that have their lease and are not answered yet, and the refused ranges.
#[derive(Default)]
pub(crate) struct Reads {
    last: Cell<u64>,
    files: RefCell<HashMap<FileId, Vec<Read>>>,
    refused: RefCell<HashMap<FileId, Vec<Refused>>>,
    answered: Notify,
}

/// A read in flight. It counts as answered when this is dropped.
pub(crate) struct InFlight {
    reads: Rc<Reads>,
    file: FileId,
    read: Read,
}

impl Reads {
    /// Registers a read at `offset`.
    pub(crate) fn begins(self: &Rc<Self>, file: FileId, offset: u64) -> InFlight {
        let read = Read { number: self.last.get() + 1, offset };
        self.last.set(read.number);
        self.files.borrow_mut().entry(file).or_default().push(read);
        InFlight { reads: self.clone(), file, read }
    }

    /// Returns true if a read of pages that found nothing must be refused: its pages were not refused since
    /// they were last read or dropped, and there is room to remember them.
    pub(crate) fn refuses(&self, file: FileId, bytes: Range<u64>) -> bool {
        let mut refused = self.refused.borrow_mut();
        if !refused.contains_key(&file) && refused.len() >= MOST_FILES {
            return false;
        }
        let ranges = refused.entry(file).or_default();
        let again = ranges.iter().any(|range| range.bytes.start < bytes.end && bytes.start < range.bytes.end);
        if !again {
            let room = ranges.len() < MOST_REFUSED;
            if room {
                ranges.push(Refused { number: self.last.get(), bytes });
            }
            return room;
        }
        let rest = |Refused { number, bytes: range }| {
            let (before, behind) =
                (range.start..range.end.min(bytes.start), range.start.max(bytes.end)..range.end);
            [before, behind].into_iter().map(move |bytes| Refused { number, bytes })
        };
        let kept = std::mem::take(ranges).into_iter().flat_map(rest).filter(|range| !range.bytes.is_empty());
        *ranges = kept.collect();
        if ranges.is_empty() {
            refused.remove(&file);
        }
        false
    }

    /// Returns a mark for [`Reads::dropped`].
    pub(crate) fn mark(&self) -> u64 {
        self.last.get()
    }

    /// The kernel has dropped all pages of a file that it had at the mark. Forgets what was refused before
    /// that.
    pub(crate) fn dropped(&self, file: FileId, mark: u64) {
        let mut refused = self.refused.borrow_mut();
        if let Some(ranges) = refused.get_mut(&file) {
            ranges.retain(|range| range.number > mark);
            if ranges.is_empty() {
                refused.remove(&file);
            }
        }
    }

    fn waits(&self, file: FileId, before: u64, offset: u64) -> bool {
        let files = self.files.borrow();
        let of = |other: &Read| other.number <= before && other.offset < offset;
        files.get(&file).is_some_and(|reads| reads.iter().any(of))
    }
}

impl InFlight {
    /// Waits until all reads that are in flight now and begin at a smaller offset are answered.
    pub(crate) async fn first(&self) {
        let before = self.reads.last.get();
        loop {
            let answered = self.reads.answered.notified();
            if !self.reads.waits(self.file, before, self.read.offset) {
                return;
            }
            answered.await;
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut files = self.reads.files.borrow_mut();
        let reads = files.get_mut(&self.file).expect("a read is known until it is answered");
        reads.retain(|read| read.number != self.read.number);
        if reads.is_empty() {
            files.remove(&self.file);
        }
        drop(files);
        self.reads.answered.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_read_behind_the_end_is_answered_after_those_before_it() {
        let (reads, file) = (Rc::new(Reads::default()), FileId::of_numbers(0, 5));
        let behind = reads.begins(file, 16_384);
        let over = reads.begins(file, 0);
        let elsewhere = reads.begins(FileId::of_numbers(0, 6), 16_384);
        assert!(over.first().now_or_never().is_some());
        assert!(elsewhere.first().now_or_never().is_some());
        let mut waits = Box::pin(behind.first());
        assert!(waits.as_mut().now_or_never().is_none());
        let later = reads.begins(file, 4096);
        drop(over);
        assert!(waits.as_mut().now_or_never().is_some(), "one that came later is not waited for");
        drop(waits);
        drop((behind, later, elsewhere));
        assert!(reads.files.borrow().is_empty());
    }

    #[test]
    fn a_page_behind_the_end_is_refused_once() {
        let (reads, file) = (Reads::default(), FileId::of_numbers(0, 5));
        assert!(reads.refuses(file, 24_576..32_768));
        assert!(!reads.refuses(file, 24_576..28_672), "it is read again");
        assert!(reads.refuses(file, 24_576..28_672), "another time it is ahead again");
        assert!(!reads.refuses(file, 28_672..32_768));
        reads.dropped(file, reads.mark());
        assert!(reads.refuses(file, 24_576..28_672));
        for page in 100..200 {
            let at = page * 4096;
            assert_eq!(reads.refuses(file, at..at + 4096), page < 163, "page {page}");
        }
        let (reads, mark) = (Rc::new(reads), 0);
        drop(reads.begins(file, 0));
        assert!(reads.refuses(FileId::of_numbers(0, 6), 0..4096));
        reads.dropped(file, mark);
        reads.dropped(FileId::of_numbers(0, 6), mark);
        assert!(reads.refuses(file, 409_600..413_696), "it was dropped");
        assert!(!reads.refuses(FileId::of_numbers(0, 6), 0..4096), "refused after the mark, it may be there");
    }
}
