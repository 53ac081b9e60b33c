//! Sets of pages of a file, as ranges of bytes.

use penstock_base::BLOCK_BYTES;
use penstock_base::num::to_usize;
use std::ops::Range;

pub(crate) const PAGE_BYTES: u64 = BLOCK_BYTES as u64;
/// Number of pieces that a set is split into, besides one for each of its ranges.
const MOST_PIECES: u64 = 64;

/// Pages of a file as ranges of bytes that start and end at pages, in order, and neither overlap nor touch.
#[derive(Debug, Default)]
pub(crate) struct PageSet(Vec<Range<u64>>);

/// Returns the range of the pages that contain any of these bytes.
pub(crate) fn pages(bytes: &Range<u64>) -> Range<u64> {
    let end = bytes.end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
    bytes.start / PAGE_BYTES * PAGE_BYTES..end
}

impl PageSet {
    pub(crate) fn add(&mut self, bytes: Range<u64>) {
        if bytes.is_empty() {
            return;
        }
        let mut added = pages(&bytes);
        let first = self.0.partition_point(|other| other.end < added.start);
        let after = self.0.partition_point(|other| other.start <= added.end);
        if let [joined, ..] = &self.0[first..after] {
            added.start = added.start.min(joined.start);
            added.end = added.end.max(self.0[after - 1].end);
        }
        assert!(added.start < added.end, "a range has a page");
        self.0.splice(first..after, [added]);
        let beside = &self.0[first.saturating_sub(1)..self.0.len().min(first + 2)];
        assert!(beside.is_sorted_by(|one, other| one.end < other.start), "ranges do not touch");
    }

    /// Adds these pages but keeps at most `most` ranges. If there were more, all pages between the first and
    /// the last one are added.
    pub(crate) fn add_coarsely(&mut self, bytes: Range<u64>, most: usize) {
        self.add(bytes);
        if let [first, .., last] = &self.0[..]
            && self.0.len() > most
        {
            let all = first.start..last.end;
            self.0.clear();
            self.0.push(all);
        }
        assert!(self.0.len() <= most.max(1), "a coarse set has at most {most} ranges");
    }

    pub(crate) fn remove(&mut self, bytes: &Range<u64>) {
        let removed = pages(bytes);
        let rest = |range: Range<u64>| {
            let before = range.start..range.end.min(removed.start);
            let behind = range.start.max(removed.end)..range.end;
            [before, behind].into_iter().filter(|left| !left.is_empty())
        };
        self.0 = std::mem::take(&mut self.0).into_iter().flat_map(rest).collect();
        assert!(!self.overlaps(bytes), "no page of them is left");
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if a page of the set contains any of these bytes.
    pub(crate) fn overlaps(&self, bytes: &Range<u64>) -> bool {
        let looked_at = pages(bytes);
        let first = self.0.partition_point(|range| range.end <= looked_at.start);
        !bytes.is_empty() && self.0.get(first).is_some_and(|range| range.start < looked_at.end)
    }

    /// Splits the set into pieces of equal length, at most about [`MOST_PIECES`] plus one for each range.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Range<u64>> {
        let bytes: u64 = self.0.iter().map(|range| range.end - range.start).sum();
        let longest = (bytes / MOST_PIECES).div_ceil(PAGE_BYTES).max(1) * PAGE_BYTES;
        assert!(longest.is_multiple_of(PAGE_BYTES) && longest > 0, "pieces are of whole pages");
        let cut = move |range: &Range<u64>| {
            let end = range.end;
            (range.start..end)
                .step_by(to_usize(longest))
                .map(move |at| at..end.min(at.saturating_add(longest)))
        };
        self.0.iter().flat_map(cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[Range<u64>]) -> PageSet {
        let mut set = PageSet::default();
        ranges.iter().for_each(|range| set.add(range.clone()));
        set
    }

    #[test]
    fn a_set_has_the_pages_of_what_was_added_and_not_removed() {
        let mut pages = set(&[100..200, 8192..8193, 20_000..30_000]);
        assert_eq!(pages.0, [0..4096, 8192..12_288, 16_384..32_768]);
        pages.add(4096..8192);
        assert_eq!(pages.0, [0..12_288, 16_384..32_768], "those beside each other are one");
        pages.remove(&(4096..4097));
        assert_eq!(pages.0, [0..4096, 8192..12_288, 16_384..32_768]);
        pages.remove(&(10_000..20_000));
        assert_eq!(pages.0, [0..4096, 20_480..32_768]);
        pages.remove(&(0..u64::MAX));
        assert!(pages.is_empty());
    }

    #[test]
    fn bytes_overlap_where_a_page_of_theirs_is_in_the_set() {
        let pages = set(&[4096..8192, 16_384..20_480]);
        for (bytes, wanted) in [
            (0..4096, false),
            (0..4097, true),
            (8191..8192, true),
            (8192..16_384, false),
            (8192..u64::MAX, true),
            (20_479..20_480, true),
            (20_480..u64::MAX, false),
            (5000..5000, false),
        ] {
            assert_eq!(pages.overlaps(&bytes), wanted, "{bytes:?}");
        }
    }

    #[test]
    fn a_coarse_set_stays_small() {
        let mut pages = PageSet::default();
        (0..4).for_each(|at| pages.add_coarsely(at * 8192..at * 8192 + 1, 4));
        assert_eq!(pages.0.len(), 4);
        pages.add_coarsely(100_000..100_001, 4);
        assert_eq!((pages.0.len(), &pages.0[0]), (1, &(0..102_400)));
    }
}
