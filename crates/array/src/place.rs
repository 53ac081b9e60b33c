//! Numbers of strips in their stripe, of members in their array, and of log segments.

use crate::set::{Numbered, Set};
use penstock_base::num::to_u8;
use penstock_layout::MOST_MEMBERS;
use penstock_raid::MAX_STRIPS;
use std::fmt;

/// The number of a strip in its stripe: 0..k data, k..k+m redundancy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Position(u8);

/// The number of a member in its array.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct MemberNo(u8);

/// Strips of one stripe. Formats store them as a mask, where bit `n` stands for position `n`.
pub type Positions = Set<Position, { MAX_STRIPS / 64 }>;

/// Members of one array. Formats store them as a list.
pub type MemberSet = Set<MemberNo, { MOST_MEMBERS / 64 }>;

macro_rules! number {
    ($number:ident, $what:literal, $most:ident) => {
        impl $number {
            /// The one with this number.
            ///
            /// # Panics
            /// If the number is too high.
            pub fn new(number: usize) -> Self {
                assert!(number < $most, concat!($what, " {} of at most {}"), number, $most);
                Self(to_u8(number))
            }

            /// The one with a number from a drive; none if it is too high.
            pub fn of_number(number: u16) -> Option<Self> {
                (usize::from(number) < $most).then(|| Self::new(usize::from(number)))
            }

            /// The number, for lists.
            pub fn index(self) -> usize {
                usize::from(self.0)
            }

            /// The number as formats store it.
            pub fn number(self) -> u16 {
                u16::from(self.0)
            }
        }

        impl Numbered for $number {
            fn new(number: usize) -> Self {
                Self::new(number)
            }

            fn index(self) -> usize {
                self.index()
            }
        }

        impl From<u16> for $number {
            fn from(number: u16) -> Self {
                Self::new(usize::from(number))
            }
        }

        impl fmt::Display for $number {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(Position, "position", MAX_STRIPS);
number!(MemberNo, "member", MOST_MEMBERS);

impl Positions {
    /// Every position that a stripe can have.
    pub const ALL: Self = Self::from_words([u64::MAX]);

    /// The set whose mask is `bits`.
    pub const fn from_bits(bits: u64) -> Self {
        Self::from_words([bits])
    }

    /// The mask.
    pub const fn bits(self) -> u64 {
        self.words()[0]
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
