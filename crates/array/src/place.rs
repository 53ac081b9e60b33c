//! Positions of strips in their stripe, sets of positions, and numbers of log segments.

use penstock_base::num::to_u8;
use penstock_raid::MAX_STRIPS;
use std::fmt;

/// The number of a strip in its stripe, and of the member that holds it: 0..k data, k..k+m parity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Position(u8);

impl Position {
    /// The position with this number.
    ///
    /// # Panics
    /// If no stripe has so many strips.
    pub fn new(number: usize) -> Self {
        assert!(number < MAX_STRIPS, "position {number} of at most {MAX_STRIPS}");
        Self(to_u8(number))
    }

    /// The position with a number from a drive; none if no stripe has so many strips.
    pub fn of_number(number: u16) -> Option<Self> {
        (usize::from(number) < MAX_STRIPS).then(|| Self::new(usize::from(number)))
    }

    /// The number, for lists of members.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The number as formats store it.
    pub fn number(self) -> u16 {
        u16::from(self.0)
    }
}

impl From<u16> for Position {
    fn from(number: u16) -> Self {
        Self::new(usize::from(number))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A set of positions. Formats store strips of a stripe as a mask, where bit `n` stands for position `n`, and
/// members as a list.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Positions(u64);

impl Positions {
    /// No position.
    pub const NONE: Self = Self(0);
    /// Every position that a stripe can have.
    pub const ALL: Self = Self(u64::MAX);

    /// The set whose mask is `bits`.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The mask.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Positions 0 to `count` - 1.
    pub fn first(count: usize) -> Self {
        assert!((1..=MAX_STRIPS).contains(&count), "{count} strips");
        Self(u64::MAX >> (MAX_STRIPS - count))
    }

    /// One position.
    pub fn one(position: Position) -> Self {
        Self(1 << position.0)
    }

    /// True if `position` is in the set.
    pub fn contains(self, position: Position) -> bool {
        self.0 & 1 << position.0 != 0
    }

    /// True if no position is in the set.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The number of positions.
    pub fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The positions of both sets.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The positions that are not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// True if a position is in both sets.
    pub fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Adds a position.
    pub fn insert(&mut self, position: Position) {
        *self = self.with(Self::one(position));
    }

    /// The positions, ascending.
    pub fn iter(self) -> impl Iterator<Item = Position> {
        (0..to_u8(MAX_STRIPS)).map(Position).filter(move |position| self.contains(*position))
    }
}

impl FromIterator<Position> for Positions {
    fn from_iter<T: IntoIterator<Item = Position>>(positions: T) -> Self {
        positions.into_iter().fold(Self::NONE, |set, position| set.with(Self::one(position)))
    }
}

impl fmt::Debug for Positions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(Position::index)).finish()
    }
}

/// The number of a log segment. It rises by one; the segment lies at the number modulo the count of segments.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SegmentNo(pub u64);

impl SegmentNo {
    /// The segment after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for SegmentNo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(numbers: &[usize]) -> Positions {
        numbers.iter().copied().map(Position::new).collect()
    }

    #[test]
    fn sets_of_positions() {
        for (one, other, with, without, meets) in [
            (&[][..], &[][..], &[][..], &[][..], false),
            (&[0, 3], &[3, 63], &[0, 3, 63], &[0], true),
            (&[1], &[2], &[1, 2], &[1], false),
        ] {
            let (one, other) = (set(one), set(other));
            assert_eq!(
                (one.with(other), one.without(other), one.meets(other)),
                (set(with), set(without), meets)
            );
            assert_eq!(one.iter().collect::<Positions>(), one);
            assert_eq!(one.len(), one.iter().count());
            assert_eq!(Positions::from_bits(one.bits()), one);
        }
        assert_eq!(Positions::first(3), set(&[0, 1, 2]));
        assert_eq!(Positions::first(64), Positions::ALL);
        assert!(Positions::NONE.is_empty() && !set(&[63]).is_empty());
    }
}
