//! Pages that the kernel has locked for requests which are not answered.
//!
//! A notice to drop pages waits for each of them in turn. Where nobody answers, what lies between them is dropped by notices of
//! its own.

use penstock_base::{HeldRange, HeldRanges, Ino};
use std::ops::Range;
use std::rc::Rc;

const PAGE: u64 = 4096;

/// The requests of one mount that have pages locked.
#[derive(Default)]
pub(crate) struct Locked(Rc<HeldRanges<Ino>>);

impl Locked {
    /// A request about these bytes begins. It has ended when the result is dropped.
    pub(crate) fn begins(&self, ino: Ino, bytes: Range<u64>) -> HeldRange<Ino> {
        HeldRanges::hold(&self.0, ino, bytes)
    }

    /// The parts of some whole pages that no request has locked.
    pub(crate) fn around(&self, ino: Ino, bytes: &Range<u64>) -> Vec<Range<u64>> {
        let pages = |bytes: Range<u64>| {
            bytes.start / PAGE * PAGE..bytes.end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
        };
        let mut locked: Vec<Range<u64>> = self.0.of(&ino).into_iter().map(pages).collect();
        locked.sort_unstable_by_key(|bytes| bytes.start);
        let (mut free, mut from) = (Vec::new(), bytes.start);
        for part in locked {
            free.push(from..part.start.min(bytes.end));
            from = from.max(part.end);
        }
        free.push(from..bytes.end);
        free.retain(|part| !part.is_empty());
        free
    }
}

/// Halves of a range of pages whose first changes lie below `size`, where it can be halved: the pages behind, of which there should be
/// none, are one part.
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
    fn what_lies_between_locked_pages_is_found() {
        let locked = Locked::default();
        let (ino, all) = (Ino(7), 0..u64::MAX);
        let around = |bytes: &Range<u64>| -> Vec<(u64, u64)> {
            locked.around(ino, bytes).into_iter().map(|part| (part.start, part.end)).collect()
        };
        assert_eq!(around(&all), [(0, u64::MAX)]);
        let first = locked.begins(ino, 4096..8192);
        let _part = locked.begins(ino, 20_000..20_001);
        let _same = locked.begins(ino, 5000..6000);
        let _other = locked.begins(Ino(8), 0..1 << 20);
        assert_eq!(around(&all), [(0, 4096), (8192, 16_384), (20_480, u64::MAX)]);
        assert_eq!(around(&(8192..12_288)), [(8192, 12_288)]);
        assert_eq!(around(&(4096..12_288)), [(8192, 12_288)]);
        drop(first);
        let _to_the_end = locked.begins(ino, 4096..u64::MAX);
        assert_eq!(around(&all), [(0, 4096)]);
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
