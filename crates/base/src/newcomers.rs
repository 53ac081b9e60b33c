//! Places for those who have connected and not yet shown that they may: few, and never a reason to turn another one away.
//!
//! Invariant: at most `places` wait. When one more comes, whoever has waited longest gives up its place, so that those
//! who hold places and say nothing cannot keep others out.

use std::collections::VecDeque;

/// Who waits, oldest first.
pub struct Newcomers<T> {
    places: usize,
    next: u64,
    waiting: VecDeque<(u64, T)>,
}

impl<T> Newcomers<T> {
    /// Nobody yet; `places` is at least 1.
    pub fn new(places: usize) -> Self {
        assert!(places > 0, "without a place nobody ever comes in");
        Self { places, next: 0, waiting: VecDeque::new() }
    }

    /// Takes a place. Returns its number, and who has to go for it.
    pub fn enter(&mut self, who: T) -> (u64, Option<T>) {
        let out = if self.waiting.len() < self.places { None } else { self.waiting.pop_front() };
        let number = self.next;
        self.next += 1;
        self.waiting.push_back((number, who));
        assert!(self.waiting.len() <= self.places);
        (number, out.map(|(_, who)| who))
    }

    /// Leaves a place; none when it was given up before.
    pub fn leave(&mut self, number: u64) -> Option<T> {
        let at = self.waiting.iter().position(|(found, _)| *found == number)?;
        self.waiting.remove(at).map(|(_, who)| who)
    }

    /// Who waits.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.iter().map(|(_, who)| who)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
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
