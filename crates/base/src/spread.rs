//! The spread of a file's chunks over storage targets.
//!
//! Chunk i lies on the ((i / turn) mod count)-th target from the first one on, in the order of a map of
//! targets that begins again after its last one.

use crate::TargetId;
use std::ops::Range;

/// The targets over which the chunks of a file are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// The place of the first target in the map.
    first: u32,
    /// Number of targets.
    count: u16,
    /// Chunks in a row on one target.
    turn: u16,
    /// Number of targets in the map.
    targets: u32,
}

impl Spread {
    /// A file whose chunks are all on one target, in a map of so many.
    ///
    /// # Panics
    /// If the map does not have the target.
    pub fn of_one(target: TargetId, targets: u32) -> Self {
        Self::new(target, 1, 1, targets).expect("the map has the target")
    }

    /// `turn` chunks in a row on each of `count` targets, from `first` on, in a map of the targets 0 to
    /// `targets`. None if the map does not have so many, or a number is 0.
    pub fn new(first: TargetId, count: u16, turn: u16, targets: u32) -> Option<Self> {
        let fits = first.0 < targets && (1..=targets).contains(&count.into()) && turn > 0;
        // On one target all chunks are in a row.
        let turn = if count == 1 { 1 } else { turn };
        fits.then_some(Self { first: first.0, count, turn, targets })
    }

    /// The target with this chunk.
    pub fn target_of(&self, chunk: u64) -> TargetId {
        let place = chunk / u64::from(self.turn) % u64::from(self.count);
        assert!(place < self.count.into(), "place {place} of {}", self.count);
        self.at(u16::try_from(place).expect("below the count"))
    }

    fn at(&self, place: u16) -> TargetId {
        let sum = u64::from(self.first) + u64::from(place);
        TargetId(u32::try_from(sum % u64::from(self.targets)).expect("below the number of targets"))
    }

    /// The targets, in their order.
    pub fn all(&self) -> impl Iterator<Item = TargetId> + use<> {
        let spread = *self;
        (0..self.count).map(move |place| spread.at(place))
    }

    /// The part of the file that a target has; none if it has none.
    pub fn share_of(&self, target: TargetId) -> Option<Share> {
        let place = (0..self.count).find(|place| self.at(*place) == target)?;
        Some(Share { turn: self.turn, count: self.count, place })
    }

    /// The targets that have some of these chunks, each with its part of the file.
    pub fn shares_within(&self, chunks: Range<u64>) -> Vec<(TargetId, Share)> {
        let shares = (0..self.count).map(|place| (self.at(place), Share { place, ..self.first_share() }));
        shares.filter(|(_, share)| share.next(chunks.start) < chunks.end).collect()
    }

    fn first_share(&self) -> Share {
        Share { turn: self.turn, count: self.count, place: 0 }
    }
}

/// The chunks of a file that one of its targets has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    turn: u16,
    count: u16,
    place: u16,
}

impl Share {
    /// All chunks: the file is on one target.
    pub const ALL: Self = Self { turn: 1, count: 1, place: 0 };

    /// The share of the target at a place among `count`, with `turn` chunks in a row on each. None if there
    /// is no such place, or a number is 0.
    pub fn new(turn: u16, count: u16, place: u16) -> Option<Self> {
        // The same share has the same numbers.
        let turn = if count == 1 { turn.min(1) } else { turn };
        (turn > 0 && place < count).then_some(Self { turn, count, place })
    }

    /// Turn, count and place.
    pub fn numbers(self) -> [u16; 3] {
        [self.turn, self.count, self.place]
    }

    /// The first chunk of the share that is not before this one; `u64::MAX` if there is none.
    pub fn next(self, chunk: u64) -> u64 {
        let (turn, count, place) = (u64::from(self.turn), u64::from(self.count), u64::from(self.place));
        let row = chunk / turn;
        match row % count {
            here if here == place => chunk,
            here => {
                let rows = row + (place + count - here) % count;
                rows.saturating_mul(turn)
            }
        }
    }

    /// True if the share has this chunk.
    pub fn has(self, chunk: u64) -> bool {
        self.next(chunk) == chunk
    }

    /// The number of its chunks below this one.
    fn count_below(self, chunk: u64) -> u64 {
        let (turn, place) = (u64::from(self.turn), u64::from(self.place));
        let round = turn * u64::from(self.count);
        assert!(place * turn < round, "a share is a part of each round");
        chunk / round * turn + (chunk % round).saturating_sub(place * turn).min(turn)
    }

    /// The number of blocks in this range that lie in its chunks, which have `per_chunk` blocks.
    pub fn blocks_within(self, blocks: &Range<u64>, per_chunk: u32) -> u64 {
        let per_chunk = u64::from(per_chunk);
        let below = |block: u64| {
            let (chunk, rest) = (block / per_chunk, block % per_chunk);
            self.count_below(chunk) * per_chunk + if self.has(chunk) { rest } else { 0 }
        };
        assert!(blocks.start <= blocks.end && per_chunk > 0, "{blocks:?} of {per_chunk} in a chunk");
        below(blocks.end) - below(blocks.start)
    }

    /// These chunks, without those of other targets.
    pub fn within(self, chunks: Range<u64>) -> impl Iterator<Item = u64> {
        let mut at = chunks.start;
        std::iter::from_fn(move || {
            at = self.next(at);
            let here = (at < chunks.end).then_some(at);
            at = at.saturating_add(1);
            here
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_lies_on_one_target_of_the_file() {
        for (first, count, turn, targets) in
            [(0, 1, 1, 1), (2, 1, 1, 4), (3, 3, 2, 4), (0, 16, 4, 16), (5, 7, 3, 64)]
        {
            let spread = Spread::new(TargetId(first), count, turn, targets).unwrap();
            let all: Vec<TargetId> = spread.all().collect();
            assert_eq!(all.len(), usize::from(count));
            for chunk in 0..200 {
                let place = (chunk / u64::from(turn) % u64::from(count)) as u32;
                let target = TargetId((first + place) % targets);
                assert_eq!(spread.target_of(chunk), target);
                for id in (0..targets).map(TargetId) {
                    let has = spread.share_of(id).is_some_and(|share| share.has(chunk));
                    assert_eq!(has, id == target, "chunk {chunk}, target {id}, {spread:?}");
                }
            }
        }
    }

    #[test]
    fn shares_divide_a_range() {
        let spread = Spread::new(TargetId(1), 3, 2, 5).unwrap();
        for range in [0..0, 0..1, 0..6, 3..4, 1..30, 7..9] {
            let shares = spread.shares_within(range.clone());
            let mut chunks: Vec<u64> =
                shares.iter().flat_map(|(_, share)| share.within(range.clone())).collect();
            chunks.sort_unstable();
            assert_eq!(chunks, range.clone().collect::<Vec<_>>());
            assert!(shares.iter().all(|(_, share)| share.within(range.clone()).next().is_some()));
            let blocks = range.start * 4 + 1..range.end * 4 + 3;
            for (_, share) in spread.shares_within(0..6) {
                let expected = blocks.clone().filter(|block| share.has(block / 4)).count() as u64;
                assert_eq!(share.blocks_within(&blocks, 4), expected, "{blocks:?} of {share:?}");
            }
        }
        assert_eq!(Share::ALL.next(u64::MAX), u64::MAX);
        assert_eq!(Share::new(4, 2, 0).unwrap().next(u64::MAX - 1), u64::MAX, "no number is left");
    }

    #[test]
    fn what_does_not_fit_into_a_map_is_none() {
        for (first, count, turn, targets) in [(0, 0, 1, 1), (1, 1, 1, 1), (0, 2, 1, 1), (0, 1, 0, 1)] {
            assert_eq!(Spread::new(TargetId(first), count, turn, targets), None);
        }
        assert_eq!((Share::new(0, 1, 0), Share::new(1, 1, 1)), (None, None));
        assert_eq!(Spread::of_one(TargetId(3), 4).all().collect::<Vec<_>>(), [TargetId(3)]);
    }
}
