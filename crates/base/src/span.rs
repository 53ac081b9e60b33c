//! Runs of blocks, and their pieces in units of one length: in the chunks of a file, in the stripes of an
//! array.

use crate::num::to_u32;
use std::ops::Range;

/// A run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first block.
    pub first: u64,
    /// Number of blocks.
    pub count: u64,
}

/// The part of a span in one unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of the unit.
    pub unit: u64,
    /// Blocks of the unit.
    pub blocks: Range<u32>,
}

impl Span {
    /// The block behind the last one; none if it is above 2^64.
    pub fn end(self) -> Option<u64> {
        self.first.checked_add(self.count)
    }

    /// Splits the span at the ends of units of `per_unit` blocks.
    ///
    /// # Panics
    /// If the span ends above 2^64, or a unit has no block.
    pub fn pieces(self, per_unit: u32) -> Vec<Piece> {
        let (per, end) = (u64::from(per_unit), self.end().expect("a span ends below 2^64"));
        assert!(per > 0, "a unit has a block");
        let (mut at, mut pieces) = (self.first, Vec::new());
        while at < end {
            let within = at % per;
            let run = (per - within).min(end - at);
            // Both are at most `per_unit`.
            pieces.push(Piece { unit: at / per, blocks: to_u32(within)..to_u32(within + run) });
            at += run;
        }
        assert_eq!(at, end.max(self.first), "the pieces cover the span");
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_split_at_the_ends_of_units() {
        type Case = (u32, u64, u64, &'static [(u64, Range<u32>)]);
        let cases: [Case; 7] = [
            (256, 250, 10, &[(0, 250..256), (1, 0..4)]),
            (256, 512, 256, &[(2, 0..256)]),
            (4, 3, 6, &[(0, 3..4), (1, 0..4), (2, 0..1)]),
            (1, 7, 2, &[(7, 0..1), (8, 0..1)]),
            (256, 9, 0, &[]),
            (u32::MAX, 0, 5, &[(0, 0..5)]),
            (3, u64::MAX - 1, 1, &[((u64::MAX - 1) / 3, 2..3)]),
        ];
        for (per_unit, first, count, wanted) in cases {
            let found = Span { first, count }.pieces(per_unit);
            let wanted = wanted.iter().map(|(unit, blocks)| Piece { unit: *unit, blocks: blocks.clone() });
            assert_eq!(found, wanted.collect::<Vec<_>>(), "{first}+{count} by {per_unit}");
        }
    }

    #[test]
    #[should_panic(expected = "a span ends below 2^64")]
    fn a_span_that_wraps_around_has_no_pieces() {
        Span { first: u64::MAX, count: 2 }.pieces(4);
    }
}
