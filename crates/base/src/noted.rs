//! Things of which something is known, in a bounded set.
//!
//! Invariant: what is in it was noted and neither forgotten nor cleared since. What is not in it may have been noted too:
//! a full set begins anew.

use crate::HashSet;
use std::cell::RefCell;
use std::hash::Hash;

const MOST: usize = 1 << 16;

/// A set that may forget.
#[derive(Debug)]
pub struct Noted<K>(RefCell<HashSet<K>>);

impl<K> Default for Noted<K> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<K: Eq + Hash> Noted<K> {
    /// Whether it is known of `key`.
    pub fn contains(&self, key: &K) -> bool {
        self.0.borrow().contains(key)
    }

    /// It is known of `key` from now on.
    pub fn note(&self, key: K) {
        let mut keys = self.0.borrow_mut();
        if keys.len() >= MOST {
            keys.clear();
        }
        keys.insert(key);
    }

    /// It does not hold of `key` any more.
    pub fn forget(&self, key: &K) {
        self.0.borrow_mut().remove(key);
    }

    /// It may not hold of anything any more.
    pub fn clear(&self) {
        self.0.borrow_mut().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_set_begins_anew() {
        let noted = Noted::default();
        (0..MOST).for_each(|key| noted.note(key));
        assert!(noted.contains(&0));
        noted.forget(&0);
        assert!(!noted.contains(&0) && noted.contains(&1));
        noted.note(MOST);
        noted.note(MOST + 1);
        assert!(!noted.contains(&1) && noted.contains(&(MOST + 1)));
        noted.clear();
        assert!(!noted.contains(&(MOST + 1)));
    }
}
