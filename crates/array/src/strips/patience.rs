//! Since when strips are bad that nobody can make: errors of a moment are told from lasting ones.
//!
//! Invariant: what is bad counts as lost for good only after it was found so several times, over several
//! minutes, without a look in between that found it good. Before that, nothing is written over its bytes, or
//! moved without them. Bounded: what there is no room for stays as an error of the moment.

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
const FORGOTTEN: Duration = Duration::from_secs(6 * 3600);
/// Strips that are known at most.
const MOST: usize = 4096;

/// The part of a strip that is bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Bad {
    /// Its trailer, and so all of it.
    Trailer,
    /// All blocks, while its trailer is good.
    AllBlocks,
    /// Some blocks.
    SomeBlocks,
}

type Key = (Stripe, Position, Bad);

#[derive(Clone, Copy)]
struct Since {
    first: Duration,
    last: Duration,
    looks: u32,
}

impl Since {
    fn is_lasting(self) -> bool {
        self.looks >= LOOKS && self.last - self.first >= LASTING
    }
}

/// Strips that were found bad.
#[derive(Default)]
pub(super) struct Patience {
    since: BTreeMap<Key, Since>,
}

impl Patience {
    /// Something was found bad. Returns true if that will not pass.
    pub(super) fn found_bad(&mut self, at: Key, now: Duration) -> bool {
        if self.since.len() >= MOST && !self.since.contains_key(&at) {
            self.since.retain(|_, since| now.saturating_sub(since.last) < FORGOTTEN);
            if self.since.len() >= MOST {
                return false;
            }
        }
        let new = Since { first: now, last: now, looks: 1 };
        let since = self.since.entry(at).or_insert(new);
        if now.saturating_sub(since.last) >= FORGOTTEN {
            *since = new;
        } else if now.saturating_sub(since.last) >= APART {
            since.last = now;
            since.looks += 1;
        }
        since.is_lasting()
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

    /// A strip was written: whatever was bad is not there any more.
    pub(super) fn written(&mut self, stripe: Stripe, position: Position) {
        for bad in [Bad::Trailer, Bad::AllBlocks, Bad::SomeBlocks] {
            self.found_good((stripe, position, bad));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(stripe: u64) -> Key {
        (Stripe(stripe), Position::new(2), Bad::Trailer)
    }

    fn found_at(patience: &mut Patience, seconds: &[u64]) -> Vec<bool> {
        let found = |second: &u64| patience.found_bad(key(7), Duration::from_secs(*second));
        seconds.iter().map(found).collect()
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
        assert_eq!(found_at(&mut patience, &[0, 100, 24_000, 24_200]), [false; 4]);
        for stripe in 100..2 * MOST as u64 {
            assert!(!patience.found_bad(key(stripe), Duration::from_secs(24_300)));
        }
        assert_eq!(patience.since.len(), MOST);
        // Those are forgotten first that nobody looked at again.
        assert!(!patience.found_bad(key(1 << 40), Duration::from_secs(48_000)));
        assert_eq!(patience.since.len(), 1);
    }
}
