//! The strips of a stripe that lie in spare places.
//!
//! A stripe has at most [`MOST_MOVED`] of them, and a row at most [`MOST_SPARES`] spare places, so that a
//! number of four bits names each.

use crate::place::{Position, Positions};

/// Most spare places of a row.
pub const MOST_SPARES: usize = 8;
/// Most strips of a stripe in spare places.
pub const MOST_MOVED: usize = 16;
const BITS: usize = 4;

/// The strips of a stripe that lie in spare places, each with the number of its place in the row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Moves {
    moved: Positions,
    /// Four bits for each of them, in ascending order.
    spares: u64,
}

impl Moves {
    /// All strips lie at their own places.
    pub const NONE: Self = Self { moved: Positions::NONE, spares: 0 };

    /// The moves that two words of a format state; none if they state no moves.
    pub fn of_words(moved: u64, spares: u64) -> Option<Self> {
        let moves = Self { moved: Positions::from_bits(moved), spares };
        let used = moves.moved.len() * BITS;
        let is_sound = moves.moved.len() <= MOST_MOVED
            && (used == 64 || spares >> used == 0)
            && moves.iter().all(|(_, spare)| spare < MOST_SPARES);
        is_sound.then_some(moves)
    }

    /// The two words that formats store.
    pub fn words(self) -> [u64; 2] {
        [self.moved.bits(), self.spares]
    }

    /// True if no strip has moved.
    pub fn is_empty(self) -> bool {
        self.moved.is_empty()
    }

    /// The strips that have moved.
    pub fn moved(self) -> Positions {
        self.moved
    }

    /// The spare place of a strip; none if it lies at its own place.
    pub fn spare_of(self, position: Position) -> Option<usize> {
        self.moved.contains(position).then(|| self.spare_at(self.rank(position)))
    }

    /// The strips that have moved, each with its spare place.
    pub fn iter(self) -> impl Iterator<Item = (Position, usize)> {
        self.moved.iter().enumerate().map(move |(rank, position)| (position, self.spare_at(rank)))
    }

    /// The same with a strip in a spare place, or at its own one; none if too many strips would have moved.
    #[must_use]
    pub fn try_with(self, position: Position, spare: Option<usize>) -> Option<Self> {
        let moved = self.moved.without(Positions::one(position)).len() + usize::from(spare.is_some());
        (moved <= MOST_MOVED).then(|| self.with(position, spare))
    }

    /// The same with a strip in a spare place, or at its own one.
    ///
    /// # Panics
    /// If no row has such a place, or too many strips have moved.
    #[must_use]
    pub fn with(self, position: Position, spare: Option<usize>) -> Self {
        let others = self.iter().filter(|(at, _)| *at != position);
        let mut all: Vec<(Position, usize)> = others.chain(spare.map(|spare| (position, spare))).collect();
        all.sort_unstable();
        assert!(all.len() <= MOST_MOVED, "{} strips of a stripe have moved", all.len());
        let mut moves = Self::NONE;
        for (rank, (position, spare)) in all.into_iter().enumerate() {
            assert!(spare < MOST_SPARES, "spare place {spare}");
            moves.moved.insert(position);
            moves.spares |= (spare as u64) << (BITS * rank);
        }
        moves
    }

    fn rank(self, position: Position) -> usize {
        (self.moved.bits() & ((1 << position.index()) - 1)).count_ones() as usize
    }

    fn spare_at(self, rank: usize) -> usize {
        (self.spares >> (BITS * rank) & 0xf) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn moves_are_a_map_from_strips_to_spare_places() {
        let (mut moves, mut model) = (Moves::NONE, BTreeMap::new());
        let mut seed = 7u64;
        for _ in 0..10_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (position, spare) = ((seed >> 33) as usize % 64, (seed >> 40) as usize % MOST_SPARES);
            if (seed >> 50).is_multiple_of(3) || model.len() == MOST_MOVED {
                moves = moves.with(Position::new(position), None);
                model.remove(&position);
            } else {
                moves = moves.with(Position::new(position), Some(spare));
                model.insert(position, spare);
            }
            assert!(moves.iter().map(|(at, spare)| (at.index(), spare)).eq(model.clone()));
            assert_eq!(moves.spare_of(Position::new(position)), model.get(&position).copied());
            assert_eq!(moves.is_empty(), model.is_empty());
            let [moved, spares] = moves.words();
            assert_eq!(Moves::of_words(moved, spares), Some(moves));
        }
    }

    #[test]
    fn words_that_state_no_moves_are_refused() {
        assert_eq!(
            Moves::of_words(0b11, 0x10),
            Some(Moves::NONE.with(Position::new(0), Some(0)).with(Position::new(1), Some(1)))
        );
        for (moved, spares) in [(0, 1), (1, 0x10), (1, 8), (u64::MAX, 0), (0x1_ffff, 0)] {
            assert_eq!(Moves::of_words(moved, spares), None, "{moved:x} {spares:x}");
        }
    }
}
