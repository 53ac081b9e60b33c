//! Counts by key, without those that are 0.

use std::collections::BTreeMap;

/// The number of times that each key was added and not taken away.
#[derive(Debug)]
pub(crate) struct Counts<K>(BTreeMap<K, usize>);

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Copy + Ord> Counts<K> {
    pub(crate) fn add(&mut self, key: K) {
        *self.0.entry(key).or_default() += 1;
    }

    /// Takes a key away that was added so often at least.
    pub(crate) fn take(&mut self, key: K, times: usize) {
        if times == 0 {
            return;
        }
        let count = self.0.get_mut(&key).expect("it was counted");
        *count = count.checked_sub(times).expect("it was counted so often");
        if *count == 0 {
            self.0.remove(&key);
        }
    }

    pub(crate) fn of(&self, key: K) -> usize {
        self.0.get(&key).copied().unwrap_or(0)
    }

    /// The smallest key that is there.
    pub(crate) fn first(&self) -> Option<K> {
        self.0.keys().next().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_there_until_it_was_taken_as_often_as_added() {
        let mut counts = Counts::default();
        (0..3).for_each(|_| counts.add(7));
        counts.take(7, 0);
        counts.take(7, 2);
        counts.take(8, 0);
        assert_eq!((counts.of(7), counts.of(8)), (1, 0));
        counts.add(9);
        assert_eq!(counts.first(), Some(7));
        counts.take(9, 1);
        assert_eq!((counts.of(7), counts.of(9)), (1, 0));
        counts.take(7, 1);
        assert!(counts.is_empty() && counts.of(7) == 0);
    }

    #[test]
    #[should_panic(expected = "so often")]
    fn more_is_never_taken_than_was_added() {
        let mut counts = Counts::default();
        counts.add(7);
        counts.take(7, 2);
    }
}
