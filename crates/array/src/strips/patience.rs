//! Since when strips are bad that nobody can make: errors of a moment are told from lasting ones.
//!
//! Invariant: what is bad counts as lost for good only after it was found so several times, over several
//! minutes, without a look in between that found it good, each time on a drive that answered other reads at
//! that moment: one that gives errors for more, as behind a loose cable, says nothing of its strips. Before
//! that, nothing is written over the bytes, or moved without them. Bounded: if there is no room, those are
//! forgotten that count as lost, which they do again if they are still bad.

use crate::members::Life;
use crate::place::Position;
use penstock_base::Stripe;
use std::collections::BTreeMap;
use std::time::Duration;

/// A strip counts as lost when it was bad for so long,
const LASTING: Duration = Duration::from_secs(180);
/// and was found so in so many looks,
const LOOKS: u32 = 3;
/// of which each counts that is so long after the one before.
const APART: Duration = Duration::from_secs(30);
/// Strips that nobody found bad for so long are forgotten.
const FORGOTTEN: Duration = Duration::from_secs(3600);
/// Strips that are known at most.
const MOST: usize = 4096;

/// The part of a strip that is bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Bad {
    /// Its trailer, and so all of it.
    Trailer,
    /// All blocks, while its trailer is good.
    AllBlocks,
    /// The block of a column.
    Block(u32),
}

type Key = (Stripe, Position, Bad);

/// A look at a drive.
#[derive(Clone, Copy)]
pub(super) struct Look {
    pub(super) at: Duration,
    /// The life of the member.
    pub(super) life: Life,
}

#[derive(Clone, Copy)]
struct Since {
    first: Duration,
    last: Look,
    looks: u32,
}

impl Since {
    /// True if this look is the first one after too long a time, or in another life.
    fn is_over(self, look: Look) -> bool {
        look.at.saturating_sub(self.last.at) >= FORGOTTEN || look.life != self.last.life
    }

    /// True if this look is long enough after the last one.
    fn is_apart(self, look: Look) -> bool {
        look.at.saturating_sub(self.last.at) >= APART
    }

    fn is_lasting(self) -> bool {
        self.looks >= LOOKS && self.last.at - self.first >= LASTING
    }
}

/// Strips that were found bad.
#[derive(Default)]
pub(super) struct Patience {
    since: BTreeMap<Key, Since>,
}

impl Patience {
    /// Something was found bad. Returns true if that will not pass.
    pub(super) fn found_bad(&mut self, key: Key, look: Look) -> bool {
        if self.since.len() >= MOST && !self.since.contains_key(&key) && !self.makes_room(look.at) {
            return false;
        }
        let new = Since { first: look.at, last: look, looks: 1 };
        let since = self.since.entry(key).or_insert(new);
        if since.is_over(look) {
            *since = new;
        } else if since.is_apart(look) {
            since.last = look;
            since.looks += 1;
        }
        since.is_lasting()
    }

    /// True if this look would count.
    pub(super) fn counts(&self, key: Key, look: Look) -> bool {
        self.since.get(&key).is_none_or(|since| since.is_over(look) || since.is_apart(look))
    }

    /// Forgets what was not looked at for long, or else the one of what counts as lost that was not looked at
    /// for longest.
    fn makes_room(&mut self, now: Duration) -> bool {
        self.since.retain(|_, since| now.saturating_sub(since.last.at) < FORGOTTEN);
        if self.since.len() >= MOST {
            let lasting = self.since.iter().filter(|(_, since)| since.is_lasting());
            let Some(key) = lasting.min_by_key(|(_, since)| since.last.at).map(|(key, _)| *key) else {
                return false;
            };
            self.since.remove(&key);
        }
        assert!(self.since.len() < MOST, "there is room");
        true
    }

    /// True if it was found bad for long enough.
    pub(super) fn is_lasting(&self, at: Key) -> bool {
        self.since.get(&at).is_some_and(|since| since.is_lasting())
    }

    /// It was found good.
    pub(super) fn found_good(&mut self, at: Key) {
        if !self.since.is_empty() {
            self.since.remove(&at);
        }
    }

    /// All blocks of a strip were found good.
    pub(super) fn found_whole(&mut self, stripe: Stripe, position: Position) {
        let blocks = (stripe, position, Bad::AllBlocks)..=(stripe, position, Bad::Block(u32::MAX));
        let known: Vec<Key> = self.since.range(blocks).map(|(key, _)| *key).collect();
        known.into_iter().for_each(|key| self.found_good(key));
    }

    /// All of a strip was written: whatever was bad is not there any more.
    pub(super) fn written(&mut self, stripe: Stripe, position: Position) {
        self.found_good((stripe, position, Bad::Trailer));
        self.found_whole(stripe, position);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(stripe: u64) -> Key {
        (Stripe(stripe), Position::new(2), Bad::Trailer)
    }

    fn look(second: u64) -> Look {
        Look { at: Duration::from_secs(second), life: 1 }
    }

    fn found_at(patience: &mut Patience, seconds: &[u64]) -> Vec<bool> {
        seconds.iter().map(|second| patience.found_bad(key(7), look(*second))).collect()
    }

    #[test]
    fn a_strip_is_lost_after_several_looks_over_several_minutes() {
        let mut patience = Patience::default();
        assert_eq!(found_at(&mut patience, &[0, 1, 29, 200]), [false; 4], "two looks");
        assert_eq!(found_at(&mut patience, &[230, 231]), [true, true]);
        assert!(patience.is_lasting(key(7)) && !patience.is_lasting(key(8)));
        patience.found_good(key(7));
        assert!(!patience.is_lasting(key(7)));
        assert_eq!(found_at(&mut patience, &[300, 330, 360, 479, 510]), [false, false, false, false, true]);
    }

    #[test]
    fn what_was_bad_long_ago_does_not_count_and_no_more_than_a_bound_are_known() {
        let mut patience = Patience::default();
        assert_eq!(found_at(&mut patience, &[0, 100, 4_000, 4_200]), [false; 4]);
        for stripe in 100..2 * MOST as u64 {
            assert!(!patience.found_bad(key(stripe), look(4_300)));
        }
        assert_eq!(patience.since.len(), MOST);
        // Those are forgotten first that nobody looked at again.
        assert!(!patience.found_bad(key(1 << 40), look(8_000)));
        assert_eq!(patience.since.len(), 1);
    }

    #[test]
    fn blocks_of_a_strip_are_told_apart() {
        let mut patience = Patience::default();
        let at = |column| (Stripe(7), Position::new(2), Bad::Block(column));
        for (second, column) in [(0, 3), (100, 3), (200, 5)] {
            assert!(!patience.found_bad(at(column), look(second)));
        }
        assert!(patience.found_bad(at(3), look(230)) && !patience.found_bad(at(5), look(231)));
        patience.found_bad(key(7), look(231));
        patience.found_whole(Stripe(7), Position::new(2));
        assert!(!patience.is_lasting(at(3)) && patience.since.len() == 1, "its trailer is another thing");
        patience.written(Stripe(7), Position::new(2));
        assert!(patience.since.is_empty());
    }

    #[test]
    fn looks_count_that_are_apart_and_in_one_life() {
        let mut patience = Patience::default();
        let expected = [(0, true), (29, false), (30, true), (59, false), (4_000, true)];
        for (second, counts) in expected {
            assert_eq!(patience.counts(key(7), look(second)), counts, "at {second} s");
            patience.found_bad(key(7), look(second));
        }
        let other = Look { life: 2, ..look(4_001) };
        assert!(patience.counts(key(7), other) && patience.counts(key(8), look(4_001)));
        for second in [4_100, 4_250] {
            patience.found_bad(key(7), look(second));
        }
        assert!(patience.is_lasting(key(7)));
        assert!(!patience.found_bad(key(7), Look { life: 2, ..look(4_300) }), "another life");
    }

    /// Regression: strips that nobody can make and that are found bad again and again left no room, and no
    /// other one ever counted as lost.
    #[test]
    fn lost_strips_leave_room_for_others() {
        let mut patience = Patience::default();
        for round in 0..5 {
            for stripe in 100..100 + MOST as u64 {
                patience.found_bad(key(stripe), look(round * 200));
            }
        }
        assert_eq!(found_at(&mut patience, &[1_000, 1_100, 1_200]), [false, false, true]);
        assert_eq!(patience.since.len(), MOST);
    }
}
