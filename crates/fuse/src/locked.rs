//! Tracks which pages the requests in flight have locked in the kernel, or may have.
//!
//! A READ into pages has all of them locked, and no program sees them before it is answered. A WRITE through
//! pages has at most one folio locked: the last one that it reaches, if it fills that one only in part.
//! Programs see the other folios (`fuse_fill_write_pages` in fs/fuse/file.c). Where the WRITE begins on a
//! page boundary, the locked bytes are its last page. Where it begins within a page, they are the full range,
//! because the request then ends with its first folio, unless programs saw that folio before.
//!
//! When the kernel queues requests because too many are in flight, a page may remain because its write-back
//! is queued, which the mount never receives. Then no WRITE explains why a page remains.
//!
//! A notice to drop pages waits for each locked page in turn. While no request is answered, the pages between
//! them are dropped by notices of their own.

use penstock_base::{FileId, HeldRange, HeldRanges};
use std::ops::Range;
use std::rc::Rc;

const PAGE: u64 = 4096;

/// The requests in flight of one mount that may have pages locked.
#[derive(Default)]
pub(crate) struct Locked {
    reads: Rc<HeldRanges<FileId>>,
    writes: Rc<HeldRanges<FileId>>,
}

impl Locked {
    /// Registers a READ of these bytes into pages. It has ended when the result is dropped.
    pub(crate) fn read_begins(&self, file: FileId, bytes: Range<u64>) -> HeldRange<FileId> {
        HeldRanges::hold(&self.reads, file, bytes)
    }

    /// Registers a WRITE of these bytes through pages. It has ended when the result is dropped. None if it
    /// has no page locked.
    pub(crate) fn write_begins(&self, file: FileId, bytes: Range<u64>) -> Option<HeldRange<FileId>> {
        let first = match (bytes.start.is_multiple_of(PAGE), bytes.end.is_multiple_of(PAGE)) {
            (false, _) => bytes.start,
            (true, false) => bytes.end / PAGE * PAGE,
            (true, true) => return None,
        };
        Some(HeldRanges::hold(&self.writes, file, first..bytes.end))
    }

    /// Returns the pages of a file that programs may see: all but those of READs. Pages that a WRITE may have
    /// locked are ranges of their own.
    pub(crate) fn seen(&self, file: FileId) -> Vec<Range<u64>> {
        let reads: Vec<Range<u64>> = self.reads.of(&file).into_iter().map(whole_pages).collect();
        let writes: Vec<Range<u64>> = self.writes.of(&file).into_iter().map(whole_pages).collect();
        let mut cuts = vec![0, u64::MAX];
        cuts.extend(reads.iter().chain(&writes).flat_map(|bytes| [bytes.start, bytes.end]));
        cuts.sort_unstable();
        cuts.dedup();
        let parts = cuts.windows(2).map(|ends| ends[0]..ends[1]);
        parts.filter(|part| !reads.iter().any(|read| overlap(read, part))).collect()
    }

    /// True if one of these pages may remain because a request has it locked. `held_back` means that the
    /// kernel may queue requests that the mount does not receive; then WRITEs do not count.
    pub(crate) fn is_locked(&self, file: FileId, pages: &Range<u64>, held_back: bool) -> bool {
        self.reads.overlaps(&file, pages) || !held_back && self.writes.overlaps(&file, pages)
    }
}

fn whole_pages(bytes: Range<u64>) -> Range<u64> {
    bytes.start / PAGE * PAGE..bytes.end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Halves a range of pages of a file of `size` bytes. The first cut is at the end of the file; the pages
/// behind it, of which there should be none, stay one range. None if the range cannot be halved.
pub(crate) fn halves(bytes: &Range<u64>, size: u64) -> Option<[Range<u64>; 2]> {
    let end = size.checked_next_multiple_of(PAGE)?;
    let middle = match bytes.start < end && end < bytes.end {
        true => end,
        false => bytes.start + (bytes.end - bytes.start) / 2 / PAGE * PAGE,
    };
    let halvable = middle > bytes.start && bytes.start < end;
    halvable.then_some([bytes.start..middle, middle..bytes.end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_are_seen_but_those_of_reads() {
        let locked = Locked::default();
        let file = FileId::of_numbers(0, 7);
        let seen = || -> Vec<(u64, u64)> {
            locked.seen(file).into_iter().map(|part| (part.start, part.end)).collect()
        };
        assert_eq!(seen(), [(0, u64::MAX)]);
        let first = locked.read_begins(file, 4096..8192);
        let _part = locked.read_begins(file, 20_000..20_001);
        let same = locked.read_begins(file, 5000..6000);
        let _other = locked.read_begins(FileId::of_numbers(0, 8), 0..1 << 20);
        assert_eq!(seen(), [(0, 4096), (8192, 16_384), (20_480, u64::MAX)]);
        drop(first);
        assert_eq!(seen(), [(0, 4096), (8192, 16_384), (20_480, u64::MAX)]);
        drop(same);
        assert_eq!(seen(), [(0, 16_384), (20_480, u64::MAX)]);
        let _to_the_end = locked.read_begins(file, 4096..u64::MAX);
        assert_eq!(seen(), [(0, 4096)]);
    }

    #[test]
    fn a_write_has_at_most_what_it_fills_in_part() {
        let locked = Locked::default();
        let (file, page) = (FileId::of_numbers(0, 7), |number: u64| number * 4096..(number + 1) * 4096);
        assert!(locked.write_begins(file, 4096..12_288).is_none());
        // Pages 1 and 2 are filled entirely.
        let end = locked.write_begins(file, 4096..13_000);
        let seen: Vec<(u64, u64)> =
            locked.seen(file).into_iter().map(|part| (part.start, part.end)).collect();
        assert_eq!(seen, [(0, 12_288), (12_288, 16_384), (16_384, u64::MAX)]);
        let of = |number| locked.is_locked(file, &page(number), false);
        assert_eq!([0, 1, 2, 3, 4].map(of), [false, false, false, true, false]);
        assert!(
            !locked.is_locked(file, &page(3), true)
                && !locked.is_locked(FileId::of_numbers(0, 8), &page(3), false)
        );
        drop(end);
        assert!(!of(3));
        // A folio of several pages that is filled except for its beginning.
        let _begin = locked.write_begins(file, 5000..12_288);
        assert_eq!([0, 1, 2, 3].map(of), [false, true, true, false]);
        let _read = locked.read_begins(file, page(0));
        assert!(locked.is_locked(file, &page(0), true));
    }

    #[test]
    fn halves_end_with_single_pages() {
        assert_eq!(halves(&(0..u64::MAX), 10_000), Some([0..12_288, 12_288..u64::MAX]));
        assert_eq!(halves(&(0..12_288), 10_000), Some([0..4096, 4096..12_288]));
        assert_eq!(halves(&(4096..12_288), 10_000), Some([4096..8192, 8192..12_288]));
        assert_eq!(halves(&(4096..8192), 10_000), None);
        assert_eq!(halves(&(12_288..u64::MAX), 10_000), None);
        assert_eq!(halves(&(0..u64::MAX), 0), None);
    }
}
