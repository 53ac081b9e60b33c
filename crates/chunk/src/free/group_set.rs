//! A set of groups: a bit for each, and a bit for each word of those.

use penstock_base::num::to_usize;
use std::ops::Range;

/// A set of groups, of which the first and the last in a range are found without a look at each.
#[derive(Clone)]
pub(super) struct GroupSet {
    words: Vec<u64>,
    /// The words that are not 0.
    upper: Vec<u64>,
}

/// The place of a bit: its word, and its mask there.
fn place(at: u64) -> (usize, u64) {
    (to_usize(at / 64), 1 << (at % 64))
}

/// The first set bit of a word at or after `from`, which is a bit of it.
fn first_of(word: u64, from: u64) -> Option<u64> {
    let bits = word & (u64::MAX << (from % 64));
    (bits != 0).then(|| from / 64 * 64 + u64::from(bits.trailing_zeros()))
}

/// The last set bit of a word before `until`, which is a bit of it.
fn last_of(word: u64, until: u64) -> Option<u64> {
    let bits = word & ((1 << (until % 64)) - 1);
    (bits != 0).then(|| until / 64 * 64 + u64::from(63 - bits.leading_zeros()))
}

/// The first set bit at or after one.
fn first(words: &[u64], from: u64) -> Option<u64> {
    let at = to_usize(from / 64);
    let next = || {
        (at + 1..words.len()).find(|at| words[*at] != 0).and_then(|at| first_of(words[at], 64 * at as u64))
    };
    first_of(*words.get(at)?, from).or_else(next)
}

/// The last set bit before one.
fn last(words: &[u64], until: u64) -> Option<u64> {
    let at = to_usize(until / 64);
    let before = || (0..at.min(words.len())).rev().find(|at| words[*at] != 0);
    let in_word = words.get(at).and_then(|word| last_of(*word, until));
    in_word.or_else(|| before().map(|at| 64 * at as u64 + u64::from(63 - words[at].leading_zeros())))
}

impl GroupSet {
    /// The empty set, of groups below `count`.
    pub(super) fn new(count: u64) -> Self {
        let words = to_usize(count.div_ceil(64));
        Self { words: vec![0; words], upper: vec![0; words.div_ceil(64)] }
    }

    /// Makes room for groups below `count`. It never has less than it had.
    pub(super) fn grow(&mut self, count: u64) {
        let words = self.words.len().max(to_usize(count.div_ceil(64)));
        self.words.resize(words, 0);
        self.upper.resize(words.div_ceil(64), 0);
    }

    pub(super) fn set(&mut self, group: u64, is_in: bool) {
        let (at, bit) = place(group);
        match is_in {
            true => self.words[at] |= bit,
            false => self.words[at] &= !bit,
        }
        let (above, upper) = place(at as u64);
        match self.words[at] {
            0 => self.upper[above] &= !upper,
            _ => self.upper[above] |= upper,
        }
    }

    /// The first group of a range that is in the set.
    pub(super) fn first(&self, range: Range<u64>) -> Option<u64> {
        let word = range.start / 64;
        let in_word = self.words.get(to_usize(word)).and_then(|word| first_of(*word, range.start));
        let next =
            || first(&self.upper, word + 1).and_then(|word| first_of(self.words[to_usize(word)], 64 * word));
        in_word.or_else(next).filter(|at| *at < range.end)
    }

    /// The last group before one that is in the set.
    pub(super) fn last(&self, until: u64) -> Option<u64> {
        let in_word = self.words.get(to_usize(until / 64)).and_then(|word| last_of(*word, until));
        let before = || last(&self.upper, until / 64);
        in_word.or_else(|| {
            before().map(|word| 64 * word + u64::from(63 - self.words[to_usize(word)].leading_zeros()))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_set_of_groups_is_as_a_plain_set() {
        let mut state = 3u64;
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        for count in [1, 63, 64, 65, 4096, 4097, 20_000] {
            let (mut set, mut plain) = (GroupSet::new(count), BTreeSet::new());
            for round in 0..2000 {
                let group = below(count);
                let is_in = below(if round < 1000 { 3 } else { 50 }) == 0;
                set.set(group, is_in);
                match is_in {
                    true => _ = plain.insert(group),
                    false => _ = plain.remove(&group),
                }
                let (from, until) = (below(count + 1), below(count + 1));
                let expected = plain.range(from..until.max(from)).next().copied();
                assert_eq!(set.first(from..until), expected, "{from}..{until} of {plain:?}");
                assert_eq!(set.last(until), plain.range(..until).next_back().copied(), "before {until}");
            }
        }
    }
}
