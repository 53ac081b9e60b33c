//! The state of every stripe: the stripe table, and the stripes whose record is on its way to the log.
//!
//! Invariants:
//! - a stripe with a pending record is unwritten in the table: the record makes it written;
//! - a change of the table follows a durable record, so what the map answers outlives a power cut once the
//!   record of a pending stripe is durable too.
//!
//! Pure: it neither waits nor does I/O. A pending stripe remembers the lives of its members; the caller
//! brings their present lives.

use super::table::StripeTable;
use crate::format::record::Entry;
use crate::place::{Position, Positions};
use penstock_base::{Stripe, Version};
use std::collections::{BTreeMap, BTreeSet};

/// A stripe whose strips are written and whose record is not durable yet.
#[derive(Clone, Debug)]
pub(crate) struct PendingFresh {
    pub(crate) version: Version,
    /// By position, the life of the member under which its strip landed; none if it did not land.
    pub(crate) lives: Vec<Option<u64>>,
    /// Data entries of the stripe up to this order are void.
    pub(crate) upto: u64,
    /// Data entries that the strips contain: block and order.
    pub(crate) contained: Vec<(u32, u64)>,
}

impl PendingFresh {
    /// The strips that are not on their members, which have these lives now.
    fn stale(&self, lives: &[u64]) -> Positions {
        assert_eq!(self.lives.len(), lives.len(), "a life for each strip");
        let strips = self.lives.iter().zip(lives).enumerate();
        strips.filter(|(_, (landed, now))| **landed != Some(**now)).map(|(at, _)| Position::new(at)).collect()
    }

    /// The record that makes the stripe written, once its strips are flushed.
    fn entry(&self, stripe: Stripe, lives: &[u64]) -> Entry {
        let Self { version, upto, contained, .. } = self.clone();
        Entry::Fresh { stripe, upto, version, stale: self.stale(lives), contained }
    }
}

/// The state of all stripes of an array.
pub(crate) struct StripeMap {
    table: StripeTable,
    pending: BTreeMap<Stripe, PendingFresh>,
    /// Stripes that could not be read when last tried.
    unreadable: BTreeSet<Stripe>,
}

impl StripeMap {
    pub(crate) fn new(table: StripeTable) -> Self {
        Self { table, pending: BTreeMap::new(), unreadable: BTreeSet::new() }
    }

    pub(crate) fn table(&self) -> &StripeTable {
        &self.table
    }

    /// The table, for openings and checkpoints. Everything else changes it by [`Self::apply`].
    pub(crate) fn table_mut(&mut self) -> &mut StripeTable {
        &mut self.table
    }

    /// True if nothing is written in the stripe's strips: it reads as zeros without I/O.
    pub(crate) fn is_unwritten(&self, stripe: Stripe) -> bool {
        !self.table.is_written(stripe) && !self.pending.contains_key(&stripe)
    }

    /// Strips that are not valid.
    pub(crate) fn stale(&self, stripe: Stripe, lives: &[u64]) -> Positions {
        match self.pending.get(&stripe) {
            Some(pending) => pending.stale(lives),
            None => self.table.stale(stripe),
        }
    }

    /// The version that a valid strip has.
    pub(crate) fn version(&self, stripe: Stripe, position: Position) -> Version {
        match self.pending.get(&stripe) {
            Some(pending) => pending.version,
            None => self.table.version(stripe, position),
        }
    }

    /// All strips of an unwritten stripe were written. It counts once its record is durable.
    pub(crate) fn add_pending(&mut self, stripe: Stripe, pending: PendingFresh) {
        assert!(self.is_unwritten(stripe), "stripe {stripe} is written or has a record on its way");
        assert!(pending.version.0 != 0, "version 0 is never given");
        self.pending.insert(stripe, pending);
    }

    /// True while the stripe's record is on its way.
    pub(crate) fn is_pending(&self, stripe: Stripe) -> bool {
        self.pending.contains_key(&stripe)
    }

    /// Stripes whose record is on its way, with their versions.
    pub(crate) fn pending(&self) -> impl Iterator<Item = (Stripe, Version)> {
        self.pending.iter().map(|(stripe, pending)| (*stripe, pending.version))
    }

    /// The number of stripes whose record is on its way.
    pub(crate) fn pending_count(&self) -> u64 {
        self.pending.len() as u64
    }

    /// The record of a pending stripe as its members stand now; none if the stripe is not pending under
    /// `version`.
    pub(crate) fn pending_entry(&self, stripe: Stripe, version: Version, lives: &[u64]) -> Option<Entry> {
        let pending = self.pending.get(&stripe).filter(|pending| pending.version == version)?;
        Some(pending.entry(stripe, lives))
    }

    /// True if a pending stripe lacks one of these strips.
    pub(crate) fn pending_misses(&self, strips: Positions, lives: &[u64]) -> bool {
        self.pending.values().any(|pending| pending.stale(lives).meets(strips))
    }

    /// Applies a durable record to the table. Returns the strips that it marks stale: nothing else looks at
    /// these.
    ///
    /// # Panics
    /// For a data entry, which does not change the table.
    pub(crate) fn apply(&mut self, entry: &Entry, lives: &[u64]) -> Positions {
        match entry {
            Entry::Data { .. } => unreachable!("data entries do not change the table"),
            Entry::Fresh { stripe, version, stale, .. } => {
                // A member that failed while the record was on its way is in the pending entry and not in the
                // record.
                let pending = self.pending.remove(stripe);
                let later = pending.map_or(Positions::NONE, |pending| pending.stale(lives));
                let stale = stale.with(later);
                self.table.set_fresh(*stripe, *version, stale);
                stale
            }
            Entry::Destage { stripe, stale, patches, .. } => {
                let versions: Vec<_> = patches.iter().map(|patch| (patch.position, patch.version)).collect();
                self.table.set_versions(*stripe, *stale, &versions);
                *stale
            }
            Entry::Discard { stripe, count, .. } => {
                for stripe in
                    stripe.run(*count).filter(|stripe| self.table.is_written(*stripe)).collect::<Vec<_>>()
                {
                    self.table.set_unwritten(stripe);
                }
                Positions::NONE
            }
            Entry::Versions { .. } => Positions::NONE,
            Entry::Strips { stripe, set, clear, version } => {
                self.table.set_stale(*stripe, *set);
                self.table.set_valid(*stripe, *clear, *version);
                *set
            }
            Entry::MemberReset { member } => {
                self.table.reset_member(*member);
                // Strips of pending stripes were lost with the member too.
                self.pending.values_mut().for_each(|pending| pending.lives[member.index()] = None);
                Positions::NONE
            }
        }
    }

    /// A stripe could not be read.
    pub(crate) fn set_unreadable(&mut self, stripe: Stripe) {
        self.unreadable.insert(stripe);
    }

    /// All of a stripe could be read.
    pub(crate) fn set_readable(&mut self, stripe: Stripe) {
        self.unreadable.remove(&stripe);
    }

    /// True if the stripe could not be read when last tried.
    pub(crate) fn is_unreadable(&self, stripe: Stripe) -> bool {
        self.unreadable.contains(&stripe)
    }

    /// Stripes that could not be read when last tried.
    pub(crate) fn unreadable(&self) -> &BTreeSet<Stripe> {
        &self.unreadable
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::{CreateSpec, Geometry};

    const LIVES: [u64; 6] = [1; 6];
    const S: Stripe = Stripe(3);

    fn map() -> StripeMap {
        StripeMap::new(StripeTable::new(&Geometry::fit(&CreateSpec::new("t", 4, 2), 400 << 20).unwrap()))
    }

    fn pending(version: u64, lives: [Option<u64>; 6]) -> PendingFresh {
        PendingFresh { version: Version(version), lives: lives.to_vec(), upto: 0, contained: vec![] }
    }

    fn set(numbers: &[usize]) -> Positions {
        numbers.iter().copied().map(Position::new).collect()
    }

    /// The answers of a map: unwritten, stale strips, version of the first strip.
    fn state(map: &StripeMap, lives: &[u64]) -> (bool, Positions, u64) {
        (map.is_unwritten(S), map.stale(S, lives), map.version(S, Position::new(0)).0)
    }

    #[test]
    fn a_stripe_goes_from_unwritten_over_pending_to_written_and_back() {
        let mut map = map();
        assert_eq!(state(&map, &LIVES), (true, Positions::NONE, 0));
        map.add_pending(S, pending(9, [Some(1), None, Some(1), Some(1), Some(1), Some(1)]));
        assert_eq!(state(&map, &LIVES), (false, set(&[1]), 9));
        let entry = map.pending_entry(S, Version(9), &LIVES).unwrap();
        assert!(map.pending_entry(S, Version(8), &LIVES).is_none());
        assert_eq!(map.apply(&entry, &LIVES), set(&[1]));
        assert_eq!(state(&map, &LIVES), (false, set(&[1]), 9));
        map.apply(&Entry::Discard { stripe: Stripe(0), count: 5, upto: 1 }, &LIVES);
        assert_eq!(state(&map, &LIVES), (true, Positions::NONE, 0));
    }

    #[test]
    fn a_member_that_fails_while_the_record_is_on_its_way_lacks_the_strip() {
        let mut map = map();
        map.add_pending(S, pending(9, [Some(1); 6]));
        let entry = map.pending_entry(S, Version(9), &LIVES).unwrap();
        let later = [1, 1, 2, 1, 1, 1];
        assert_eq!(map.stale(S, &later), set(&[2]));
        assert!(map.pending_misses(set(&[2]), &later) && !map.pending_misses(set(&[1]), &later));
        assert_eq!(map.apply(&entry, &later), set(&[2]));
        assert_eq!(map.stale(S, &LIVES), set(&[2]), "a record outlives the lives of members");
    }

    #[test]
    fn a_reset_member_lacks_pending_and_written_strips() {
        let mut map = map();
        map.apply(
            &Entry::Fresh {
                stripe: Stripe(0),
                upto: 0,
                version: Version(1),
                stale: set(&[]),
                contained: vec![],
            },
            &LIVES,
        );
        map.add_pending(S, pending(9, [Some(1); 6]));
        map.apply(&Entry::MemberReset { member: Position::new(4) }, &LIVES);
        assert_eq!((map.stale(Stripe(0), &LIVES), map.stale(S, &LIVES)), (set(&[4]), set(&[4])));
        assert_eq!(map.stale(Stripe(1), &LIVES), Positions::NONE, "unwritten stripes lack nothing");
    }

    #[test]
    #[should_panic(expected = "is written or has a record on its way")]
    fn a_stripe_is_written_fresh_once() {
        let mut map = map();
        map.add_pending(S, pending(9, [Some(1); 6]));
        map.add_pending(S, pending(10, [Some(1); 6]));
    }
}
