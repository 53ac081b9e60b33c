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
use crate::members::Life;
use crate::moves::Moves;
use crate::place::{MemberNo, Position, Positions};
use penstock_base::{Stripe, Version};
use std::collections::{BTreeMap, BTreeSet};

/// The member on which a strip landed, and its life then.
pub(crate) type Landed = (MemberNo, Life);

/// The strips that are not on their members, which have these lives now.
pub(super) fn not_there(landed: &[Option<Landed>], life_of: impl Fn(MemberNo) -> Life) -> Positions {
    let is_there = |landed: &Option<Landed>| landed.is_some_and(|(member, life)| life_of(member) == life);
    let strips = landed.iter().enumerate().filter(|(_, landed)| !is_there(landed));
    strips.map(|(at, _)| Position::new(at)).collect()
}

/// A stripe whose strips are written and whose record is not durable yet.
#[derive(Clone, Debug)]
pub(crate) struct PendingFresh {
    pub(crate) version: Version,
    /// By position, where and in which life its strip landed; none if it did not land.
    pub(crate) landed: Vec<Option<Landed>>,
    /// Strips that were written to spare places.
    pub(crate) moves: Moves,
    /// Data entries of the stripe up to this order are void.
    pub(crate) upto: u64,
    /// Data entries that the strips contain: block and order.
    pub(crate) contained: Vec<(u32, u64)>,
}

impl PendingFresh {
    /// The strips that are not on their members, which have these lives now.
    pub(super) fn stale(&self, life_of: impl Fn(MemberNo) -> Life) -> Positions {
        not_there(&self.landed, life_of)
    }

    /// The record that makes the stripe written, once its strips are flushed.
    fn entry(&self, stripe: Stripe, life_of: impl Fn(MemberNo) -> Life) -> Entry {
        let Self { version, moves, upto, contained, .. } = self.clone();
        Entry::Fresh { stripe, upto, version, stale: self.stale(life_of), moves, contained }
    }
}

/// The state of all stripes of an array.
pub(crate) struct StripeMap {
    table: StripeTable,
    pending: BTreeMap<Stripe, PendingFresh>,
    /// Stripes that could not be read when last tried.
    unreadable: BTreeSet<Stripe>,
    unreadable_changes: u64,
}

impl StripeMap {
    pub(crate) fn new(table: StripeTable) -> Self {
        Self { table, pending: BTreeMap::new(), unreadable: BTreeSet::new(), unreadable_changes: 0 }
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

    /// True if a stripe's strips are written, false if not; none if its page would have to be loaded.
    pub(crate) fn knows_written(&self, stripe: Stripe) -> Option<bool> {
        match self.pending.contains_key(&stripe) {
            true => Some(true),
            false => self.table.knows_written(stripe),
        }
    }

    /// Strips that are not valid.
    pub(crate) fn stale(&self, stripe: Stripe, life_of: impl Fn(MemberNo) -> Life) -> Positions {
        match self.pending.get(&stripe) {
            Some(pending) => pending.stale(life_of),
            None => self.table.stale(stripe),
        }
    }

    /// Strips in spare places.
    pub(crate) fn moves(&self, stripe: Stripe) -> Moves {
        self.pending.get(&stripe).map_or_else(|| self.table.moves(stripe), |pending| pending.moves)
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
    pub(crate) fn pending_entry(
        &self,
        stripe: Stripe,
        version: Version,
        life_of: impl Fn(MemberNo) -> Life,
    ) -> Option<Entry> {
        let pending = self.pending.get(&stripe).filter(|pending| pending.version == version)?;
        Some(pending.entry(stripe, life_of))
    }

    /// True if a pending stripe lacks one of these strips.
    pub(crate) fn pending_misses(&self, strips: Positions, life_of: impl Fn(MemberNo) -> Life) -> bool {
        self.pending.values().any(|pending| pending.stale(&life_of).meets(strips))
    }

    /// Applies a durable record to the table. Returns the strips that it marks stale: nothing else looks at
    /// these.
    ///
    /// # Panics
    /// For a data entry, which does not change the table.
    pub(crate) fn apply(&mut self, entry: &Entry, life_of: impl Fn(MemberNo) -> Life) -> Positions {
        match entry {
            Entry::Data { .. } => unreachable!("data entries do not change the table"),
            Entry::Fresh { stripe, version, stale, moves, .. } => {
                // A member that failed while the record was on its way is in the pending entry and not in the
                // record.
                let pending = self.pending.remove(stripe);
                let later = pending.map_or(Positions::NONE, |pending| pending.stale(life_of));
                let stale = stale.with(later);
                self.table.set_fresh(*stripe, *version, stale, *moves);
                self.set_readable(*stripe);
                stale
            }
            Entry::Destage { stripe, stale, patches, .. } => {
                let versions: Vec<_> = patches.iter().map(|patch| (patch.position, patch.version)).collect();
                self.table.set_versions(*stripe, *stale, &versions);
                *stale
            }
            Entry::Discard { stripe, count, .. } => {
                // Those of lost pages stay as they are. All others are in memory, or nothing is written.
                let is_here = |stripe| !self.table.lacks_page(self.table.page_of(stripe));
                let stripes = stripe.run(*count);
                let written = stripes.filter(|stripe| is_here(*stripe) && self.table.is_written(*stripe));
                for stripe in written.collect::<Vec<_>>() {
                    self.table.set_unwritten(stripe);
                }
                Positions::NONE
            }
            Entry::Versions { .. } => Positions::NONE,
            Entry::Strips { stripe, set, clear, version, moves } => {
                self.table.set_stale(*stripe, *set);
                self.table.set_valid(*stripe, *clear, *version, *moves);
                *set
            }
            Entry::MemberReset { member } => {
                self.table.reset_member(*member);
                // Strips of pending stripes were lost with the member too.
                let strips = self.pending.values_mut().flat_map(|pending| &mut pending.landed);
                strips
                    .filter(|landed| landed.is_some_and(|(on, _)| on == *member))
                    .for_each(|strip| *strip = None);
                Positions::NONE
            }
        }
    }

    /// A stripe could not be read.
    pub(crate) fn set_unreadable(&mut self, stripe: Stripe) {
        self.unreadable_changes += u64::from(self.unreadable.insert(stripe));
    }

    /// All of a stripe could be read.
    pub(crate) fn set_readable(&mut self, stripe: Stripe) {
        self.unreadable_changes += u64::from(self.unreadable.remove(&stripe));
    }

    /// Rises whenever a stripe could not be read for the first time, or can be read again.
    pub(crate) fn unreadable_changes(&self) -> u64 {
        self.unreadable_changes
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
    use crate::table_memory::TableMemory;
    use std::rc::Rc;

    /// A stripe whose strips are on the members with their numbers.
    const S: Stripe = Stripe(6);

    fn map() -> StripeMap {
        let spec = CreateSpec::new("t", 4, 2).unwrap();
        let geometry = Geometry::fit(&spec, 400 << 20).unwrap();
        StripeMap::new(StripeTable::new(&geometry, &Rc::new(spec.layout), &TableMemory::new(None)))
    }

    fn pending(version: u64, lives: [Option<u64>; 6]) -> PendingFresh {
        let landed = |(at, life): (usize, &Option<u64>)| life.map(|life| (MemberNo::new(at), life));
        let landed = lives.iter().enumerate().map(landed).collect();
        PendingFresh { version: Version(version), landed, moves: Moves::NONE, upto: 0, contained: vec![] }
    }

    fn first_lives(_: MemberNo) -> u64 {
        1
    }

    fn set(numbers: &[usize]) -> Positions {
        numbers.iter().copied().map(Position::new).collect()
    }

    /// The answers of a map: unwritten, stale strips, version of the first strip.
    fn state(map: &StripeMap) -> (bool, Positions, u64) {
        (map.is_unwritten(S), map.stale(S, first_lives), map.version(S, Position::new(0)).0)
    }

    #[test]
    fn a_stripe_goes_from_unwritten_over_pending_to_written_and_back() {
        let mut map = map();
        assert_eq!(state(&map), (true, Positions::NONE, 0));
        map.add_pending(S, pending(9, [Some(1), None, Some(1), Some(1), Some(1), Some(1)]));
        assert_eq!(state(&map), (false, set(&[1]), 9));
        let entry = map.pending_entry(S, Version(9), first_lives).unwrap();
        assert!(map.pending_entry(S, Version(8), first_lives).is_none());
        assert_eq!(map.apply(&entry, first_lives), set(&[1]));
        assert_eq!(state(&map), (false, set(&[1]), 9));
        map.apply(&Entry::Discard { stripe: Stripe(0), count: 9, upto: 1 }, first_lives);
        assert_eq!(state(&map), (true, Positions::NONE, 0));
    }

    #[test]
    fn a_member_that_fails_while_the_record_is_on_its_way_lacks_the_strip() {
        let mut map = map();
        map.add_pending(S, pending(9, [Some(1); 6]));
        let entry = map.pending_entry(S, Version(9), first_lives).unwrap();
        let later = |member: MemberNo| if member.index() == 2 { 2 } else { 1 };
        assert_eq!(map.stale(S, later), set(&[2]));
        assert!(map.pending_misses(set(&[2]), later) && !map.pending_misses(set(&[1]), later));
        assert_eq!(map.apply(&entry, later), set(&[2]));
        assert_eq!(map.stale(S, first_lives), set(&[2]), "a record outlives the lives of members");
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
                moves: Moves::NONE,
                contained: vec![],
            },
            first_lives,
        );
        map.add_pending(S, pending(9, [Some(1); 6]));
        map.apply(&Entry::MemberReset { member: MemberNo::new(4) }, first_lives);
        assert_eq!((map.stale(Stripe(0), first_lives), map.stale(S, first_lives)), (set(&[4]), set(&[4])));
        assert_eq!(map.stale(Stripe(1), first_lives), Positions::NONE, "unwritten stripes lack nothing");
    }

    #[test]
    #[should_panic(expected = "is written or has a record on its way")]
    fn a_stripe_is_written_fresh_once() {
        let mut map = map();
        map.add_pending(S, pending(9, [Some(1); 6]));
        map.add_pending(S, pending(10, [Some(1); 6]));
    }
}
