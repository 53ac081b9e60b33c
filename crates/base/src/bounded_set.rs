//! A bounded set of keys for which a fact holds.
//!
//! Invariant: a key in the set was inserted, and neither removed nor cleared since. Absence proves nothing: a
//! full set is cleared before the next key is added.

use crate::HashSet;
use std::cell::RefCell;
use std::hash::Hash;

const MOST: usize = 1 << 16;

/// A set of at most 65,536 keys that may lose keys.
#[derive(Debug)]
pub struct BoundedSet<K>(RefCell<HashSet<K>>);

impl<K> Default for BoundedSet<K> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<K: Eq + Hash> BoundedSet<K> {
    /// True if the fact is known to hold for `key`.
    pub fn contains(&self, key: &K) -> bool {
        self.0.borrow().contains(key)
    }

    /// Adds `key`: the fact holds for it from now on. Clears the set first if it is full.
    pub fn insert(&self, key: K) {
        let mut keys = self.0.borrow_mut();
        if keys.len() >= MOST {
            keys.clear();
        }
        keys.insert(key);
    }

    /// Removes `key`: the fact does not hold for it any more.
    pub fn remove(&self, key: &K) {
        self.0.borrow_mut().remove(key);
    }

    /// Removes all keys: the fact may not hold for any of them any more.
    pub fn clear(&self) {
        self.0.borrow_mut().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_set_begins_anew() {
        let set = BoundedSet::default();
        (0..MOST).for_each(|key| set.insert(key));
        assert!(set.contains(&0));
        set.remove(&0);
        assert!(!set.contains(&0) && set.contains(&1));
        set.insert(MOST);
        set.insert(MOST + 1);
        assert!(!set.contains(&1) && set.contains(&(MOST + 1)));
        set.clear();
        assert!(!set.contains(&(MOST + 1)));
    }
}
