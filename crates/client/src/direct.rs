//! Direct writes: writes that bypass the kernel's page cache.
//!
//! Before it sends a direct write, the kernel writes back and drops its pages of these bytes; after it, it
//! does nothing. In between, a program may fault a page in with the bytes from before the write. From then on
//! readers would see these old bytes. If another program of the mount stores to other bytes of the page, the
//! kernel writes all of it back, over the direct write.
//!
//! So the client tracks which pages the kernel reads while a file is open for writing. A direct write to such
//! pages has them dropped once more before it is acknowledged. If an older page is written back meanwhile,
//! the client puts the bytes of the direct write into it.
//!
//! Invariants:
//! - The following are recorded under the file's I/O lock: the ranges that the kernel reads into pages or
//!   writes back, and the direct writes.
//! - After a direct write is acknowledged, the kernel has no page that was read before it.
//! - No page that was read before a direct write changes a byte of it.
//!
//! Not covered: before Linux 6.16 the kernel may drop a page while it still writes back a copy of it.

use crate::page_set::{PAGE_BYTES, PageSet, pages};
use penstock_base::num::to_usize;
use penstock_base::{FileId, HashMap};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use tokio::sync::Notify;

/// Most ranges of pages that are tracked for a file; above that, they are merged into one.
const MOST_RANGES: usize = 64;

/// Files that are open for writing on this mount.
#[derive(Default)]
pub(crate) struct DirectWrites {
    files: RefCell<HashMap<FileId, File>>,
    seen: Notify,
}

#[derive(Default)]
struct File {
    /// Pages that the kernel may have read since the last direct write to them.
    read: PageSet,
    /// Direct writes that are not seen yet, in the order in which they were done.
    writes: Vec<Rc<Write>>,
}

/// A direct write, kept until the kernel has dropped the pages from before it.
struct Write {
    bytes: Range<u64>,
    contents: Contents,
    /// Pages of the write that were read after it.
    fresh: RefCell<PageSet>,
}

pub(crate) enum Contents {
    Bytes(Vec<u8>),
    Zeros,
    /// The contents are not known: pages that are written back stay as they are.
    Any,
}

/// A finished direct write while the kernel may still have pages from before it; dropping this ends that.
pub struct Unseen {
    writes: Rc<DirectWrites>,
    file: FileId,
    write: Rc<Write>,
}

impl DirectWrites {
    fn with<T>(&self, file: FileId, act: impl FnOnce(&mut File) -> T) -> Option<T> {
        self.files.borrow_mut().get_mut(&file).map(act)
    }

    /// Programs of this mount may write to a file from now on.
    pub(crate) fn opened(&self, file: FileId) {
        self.files.borrow_mut().entry(file).or_default();
    }

    /// No program of this mount may write to a file any more.
    pub(crate) fn closed(&self, file: FileId) {
        self.files.borrow_mut().remove(&file);
    }

    /// Forgets all files: none is open for writing any more.
    pub(crate) fn close_all(&self) {
        self.files.borrow_mut().clear();
    }

    /// Records that the kernel reads these bytes into pages.
    pub(crate) fn note_read(&self, file: FileId, bytes: &Range<u64>) {
        self.with(file, |known| {
            known.read.add_coarsely(bytes.clone(), MOST_RANGES);
            known.writes.iter().for_each(|write| write.note_read(bytes));
        });
    }

    /// True if the kernel may have a page that contains any of these bytes.
    pub(crate) fn may_be_read(&self, file: FileId, bytes: &Range<u64>) -> bool {
        let looked_at = pages(bytes);
        let unseen = |write: &Rc<Write>| {
            let written = pages(&write.bytes);
            written.start < looked_at.end && looked_at.start < written.end
        };
        self.with(file, |known| known.read.overlaps(bytes) || known.writes.iter().any(unseen)) == Some(true)
    }

    /// Records that a direct write of these bytes is done. Keep the result until the kernel has dropped the
    /// older pages.
    pub(crate) fn note_write(self: &Rc<Self>, file: FileId, bytes: Range<u64>, contents: Contents) -> Unseen {
        let len = bytes.end - bytes.start;
        assert!(
            !matches!(&contents, Contents::Bytes(kept) if kept.len() as u64 != len),
            "all bytes are kept"
        );
        let write = Rc::new(Write { bytes, contents, fresh: RefCell::default() });
        self.with(file, |known| {
            known.read.remove(&write.bytes);
            known.writes.push(write.clone());
        });
        Unseen { writes: self.clone(), file, write }
    }

    /// True if a direct write of a file is done and the kernel may still have pages from before it.
    pub(crate) fn has_unseen(&self, file: FileId) -> bool {
        self.with(file, |known| !known.writes.is_empty()) == Some(true)
    }

    /// Waits until the kernel has dropped the pages from before all direct writes of a file that are done by
    /// now.
    pub(crate) async fn all_seen(&self, file: FileId) {
        let writes = self.with(file, |known| known.writes.clone()).unwrap_or_default();
        for write in writes {
            loop {
                let seen = self.seen.notified();
                let is_there = |known: &mut File| known.writes.iter().any(|other| Rc::ptr_eq(other, &write));
                if self.with(file, is_there) != Some(true) {
                    break;
                }
                seen.await;
            }
        }
    }

    /// Puts the bytes of direct writes into a page that the kernel read before them and writes back now.
    pub(crate) fn renew(&self, file: FileId, offset: u64, back: &mut [u8]) {
        self.with(file, |known| known.writes.iter().for_each(|write| write.renew(offset, back)));
    }
}

impl Write {
    fn note_read(&self, bytes: &Range<u64>) {
        let written = pages(&self.bytes);
        self.fresh.borrow_mut().add(bytes.start.max(written.start)..bytes.end.min(written.end));
    }

    fn renew(&self, offset: u64, back: &mut [u8]) {
        let (from, until) = (self.bytes.start.max(offset), self.bytes.end.min(offset + back.len() as u64));
        if from >= until {
            return;
        }
        for page in pages(&(from..until)).step_by(to_usize(PAGE_BYTES)) {
            let part = page.max(from)..until.min(page + PAGE_BYTES);
            if self.fresh.borrow().overlaps(&part) {
                continue;
            }
            let into = &mut back[to_usize(part.start - offset)..to_usize(part.end - offset)];
            let at = to_usize(part.start - self.bytes.start);
            match &self.contents {
                Contents::Bytes(bytes) => into.copy_from_slice(&bytes[at..at + into.len()]),
                Contents::Zeros => into.fill(0),
                Contents::Any => {}
            }
        }
    }
}

impl Unseen {
    /// The bytes of the write.
    pub(crate) fn bytes(&self) -> Range<u64> {
        self.write.bytes.clone()
    }

    /// True if the kernel has read any of the pages since the write.
    pub fn was_read(&self) -> bool {
        self.write.fresh.borrow().overlaps(&self.write.bytes)
    }
}

impl Drop for Unseen {
    fn drop(&mut self) {
        let Self { writes, file, write } = self;
        writes.with(*file, |known| known.writes.retain(|other| !Rc::ptr_eq(other, write)));
        writes.seen.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId::of_numbers(0, 5);
    const PAGE: usize = PAGE_BYTES as usize;

    fn open() -> Rc<DirectWrites> {
        let writes = Rc::new(DirectWrites::default());
        writes.opened(FILE);
        writes
    }

    fn write(writes: &Rc<DirectWrites>, at: u64, bytes: &[u8]) -> Unseen {
        writes.note_write(FILE, at..at + bytes.len() as u64, Contents::Bytes(bytes.to_vec()))
    }

    /// The first nine bytes of the first and of the second page as they reach the file.
    fn written_back(writes: &DirectWrites, with: u8) -> [Vec<u8>; 2] {
        let mut back = vec![with; 2 * PAGE];
        writes.renew(FILE, 0, &mut back);
        [back[..9].to_vec(), back[PAGE..PAGE + 9].to_vec()]
    }

    #[test]
    fn a_page_that_was_read_after_a_write_keeps_its_bytes() {
        let writes = open();
        writes.note_read(FILE, &(0..2 * PAGE_BYTES));
        let bytes = vec![1; PAGE + 2];
        let first = write(&writes, 4, &bytes);
        let second = writes.note_write(FILE, 6..8, Contents::Zeros);
        assert_eq!(written_back(&writes, 9), [[9, 9, 9, 9, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1, 9, 9, 9]]);
        writes.note_read(FILE, &(PAGE_BYTES..PAGE_BYTES + 1));
        assert!(first.was_read() && !second.was_read());
        assert_eq!(written_back(&writes, 9), [[9, 9, 9, 9, 1, 1, 0, 0, 1], [9; 9]]);
        drop(first);
        assert_eq!(written_back(&writes, 9), [[9, 9, 9, 9, 9, 9, 0, 0, 9], [9; 9]]);
        writes.note_read(FILE, &(0..1));
        assert_eq!(written_back(&writes, 9), [[9; 9], [9; 9]]);
    }

    #[test]
    fn pages_count_until_a_write_of_them_is_seen() {
        let writes = open();
        let may = |bytes: Range<u64>| writes.may_be_read(FILE, &bytes);
        assert!(!may(0..1));
        writes.note_read(FILE, &(0..100));
        assert!(may(200..300) && !may(PAGE_BYTES..u64::MAX));
        let unseen = write(&writes, 10, &[1]);
        assert!(may(200..300), "the kernel may have the page still");
        drop(unseen);
        assert!(!may(200..300));
        writes.note_read(FILE, &(0..100));
        writes.opened(FILE);
        assert!(may(0..1));
        writes.closed(FILE);
        assert!(!may(0..1) && writes.files.borrow().is_empty());
        writes.note_read(FILE, &(0..100));
        assert!(writes.files.borrow().is_empty(), "nobody may write to it");
    }
}
