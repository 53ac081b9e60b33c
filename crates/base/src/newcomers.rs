//! A bounded set of connections that have not authenticated yet; a new one evicts the oldest.
//!
//! Invariant: at most `places` connections wait. When one more arrives, the one that has waited longest is
//! evicted, so that silent connections cannot keep others out.

use std::collections::VecDeque;

/// The waiting connections, oldest first. `T` is a handle to one.
pub struct Newcomers<T> {
    places: usize,
    next: u64,
    waiting: VecDeque<(u64, T)>,
}

impl<T> Newcomers<T> {
    /// An empty set with `places` places, at least 1.
    pub fn new(places: usize) -> Self {
        assert!(places > 0, "at least one place is needed");
        Self { places, next: 0, waiting: VecDeque::new() }
    }

    /// Adds `who`. Returns its number, and the connection that was evicted for it, which the caller must
    /// close.
    pub fn enter(&mut self, who: T) -> (u64, Option<T>) {
        let out = if self.waiting.len() < self.places { None } else { self.waiting.pop_front() };
        let number = self.next;
        self.next += 1;
        self.waiting.push_back((number, who));
        assert!(self.waiting.len() <= self.places);
        (number, out.map(|(_, who)| who))
    }

    /// Removes and returns the connection with this number; none if it was evicted or removed before.
    pub fn leave(&mut self, number: u64) -> Option<T> {
        let at = self.waiting.iter().position(|(found, _)| *found == number)?;
        self.waiting.remove(at).map(|(_, who)| who)
    }

    /// The waiting connections, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.iter().map(|(_, who)| who)
    }

    /// The number of waiting connections.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// True if no connection waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_longest_makes_room_and_who_left_is_not_sent_away() {
        let mut newcomers = Newcomers::new(2);
        let (first, out) = newcomers.enter("first");
        assert_eq!(out, None);
        let (second, out) = newcomers.enter("second");
        assert_eq!(out, None);
        let (third, out) = newcomers.enter("third");
        assert_eq!(out, Some("first"));
        assert_eq!(newcomers.leave(first), None, "it has no place any more");
        assert_eq!(newcomers.leave(second), Some("second"));
        let (_, out) = newcomers.enter("fourth");
        assert_eq!((out, newcomers.len()), (None, 2));
        assert_eq!(newcomers.leave(third), Some("third"));
        assert_eq!(newcomers.iter().collect::<Vec<_>>(), [&"fourth"]);
    }
}
