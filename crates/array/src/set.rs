//! Sets of small numbers.

use std::fmt;
use std::marker::PhantomData;

/// A thing with a number below the size of a set.
pub trait Numbered: Copy {
    /// The one with this number.
    fn new(number: usize) -> Self;

    /// Its number.
    fn index(self) -> usize;
}

/// A set of things with numbers below 64 times `WORDS`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Set<T, const WORDS: usize>([u64; WORDS], PhantomData<T>);

impl<T, const WORDS: usize> Set<T, WORDS> {
    /// The empty set.
    pub const NONE: Self = Self([0; WORDS], PhantomData);

    pub(crate) const fn from_words(words: [u64; WORDS]) -> Self {
        Self(words, PhantomData)
    }

    pub(crate) const fn words(&self) -> [u64; WORDS] {
        self.0
    }

    fn combine(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        let mut words = self.0;
        words.iter_mut().zip(other.0).for_each(|(word, other)| *word = with(*word, other));
        Self(words, PhantomData)
    }

    /// True if nothing is in the set.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    /// The number of things in the set.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The things in both sets together.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        self.combine(other, |one, other| one | other)
    }

    /// The things that are not in `other`.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        self.combine(other, |one, other| one & !other)
    }

    /// The things that are in both sets.
    #[must_use]
    pub fn common(self, other: Self) -> Self {
        self.combine(other, |one, other| one & other)
    }

    /// True if something is in both sets.
    pub fn meets(self, other: Self) -> bool {
        self.0.iter().zip(other.0).any(|(one, other)| one & other != 0)
    }
}

impl<T: Numbered, const WORDS: usize> Set<T, WORDS> {
    /// Numbers 0 to `count` - 1.
    ///
    /// # Panics
    /// If no set has so many.
    pub fn first(count: usize) -> Self {
        assert!((1..=64 * WORDS).contains(&count), "{count} of at most {}", 64 * WORDS);
        (0..count).map(T::new).collect()
    }

    /// One thing.
    pub fn one(thing: T) -> Self {
        let mut words = [0; WORDS];
        words[thing.index() / 64] = 1 << (thing.index() % 64);
        Self(words, PhantomData)
    }

    /// True if `thing` is in the set.
    pub fn contains(&self, thing: T) -> bool {
        self.0[thing.index() / 64] & 1 << (thing.index() % 64) != 0
    }

    /// Puts a thing in.
    pub fn insert(&mut self, thing: T) {
        self.0[thing.index() / 64] |= 1 << (thing.index() % 64);
    }

    /// The things in the set, by ascending number.
    pub fn iter(self) -> impl Iterator<Item = T> {
        let bits = |(at, word): (usize, u64)| {
            let next = |rest: &u64| Some(rest & (rest - 1)).filter(|rest| *rest != 0);
            let first = Some(word).filter(|word| *word != 0);
            std::iter::successors(first, next).map(move |rest| 64 * at + rest.trailing_zeros() as usize)
        };
        self.0.into_iter().enumerate().flat_map(bits).map(T::new)
    }
}

impl<T, const WORDS: usize> Default for Set<T, WORDS> {
    fn default() -> Self {
        Self::NONE
    }
}

impl<T: Numbered, const WORDS: usize> FromIterator<T> for Set<T, WORDS> {
    fn from_iter<I: IntoIterator<Item = T>>(things: I) -> Self {
        let mut set = Self::NONE;
        things.into_iter().for_each(|thing| set.insert(thing));
        set
    }
}

impl<T: Numbered, const WORDS: usize> fmt::Debug for Set<T, WORDS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(T::index)).finish()
    }
}

#[cfg(test)]
mod tests {
    use crate::place::{MemberNo, MemberSet, Position, Positions};
    use std::collections::BTreeSet;

    fn set(numbers: &[usize]) -> Positions {
        numbers.iter().copied().map(Position::new).collect()
    }

    #[test]
    fn sets_of_positions() {
        for (one, other, with, without, common) in [
            (&[][..], &[][..], &[][..], &[][..], &[][..]),
            (&[0, 3], &[3, 63], &[0, 3, 63], &[0], &[3]),
            (&[1], &[2], &[1, 2], &[1], &[]),
        ] {
            let (one, other) = (set(one), set(other));
            let found = (one.with(other), one.without(other), one.common(other));
            assert_eq!(found, (set(with), set(without), set(common)));
            assert_eq!(one.meets(other), !common.is_empty());
            assert_eq!(one.iter().collect::<Positions>(), one);
            assert_eq!(one.len(), one.iter().count());
            assert_eq!(Positions::from_bits(one.bits()), one);
        }
        assert_eq!(Positions::first(3), set(&[0, 1, 2]));
        assert_eq!(Positions::first(64), Positions::ALL);
        assert!(Positions::NONE.is_empty() && !set(&[63]).is_empty());
    }

    #[test]
    fn sets_of_members_cross_words() {
        let numbers = [0, 63, 64, 127, 128, 255];
        let members: MemberSet = numbers.iter().copied().map(MemberNo::new).collect();
        assert!(members.iter().map(MemberNo::index).eq(numbers));
        assert_eq!(members.len(), numbers.len());
        let found = (0..256).filter(|at| members.contains(MemberNo::new(*at)));
        assert_eq!(found.collect::<BTreeSet<_>>(), BTreeSet::from(numbers));
        assert_eq!(MemberSet::first(256).without(members).len(), 250);
        assert_eq!(MemberNo::of_number(256), None);
    }
}
