//! One member: its slice, whether it is recorded as stale, and its life.
//!
//! A member has a *life*: a number that is raised when its drive is latched and when its slice is replaced. A
//! strip is on its member if it landed and was flushed under the present life. A late answer to an I/O of an
//! earlier life changes nothing.
//!
//! Invariant: every strip that was written in a life and not flushed is in `unflushed` until that life ends;
//! then the caller records it as stale, if it counts. A strip that is being moved here, or made again, does
//! not count before its record, which follows a flush.

use super::labels::Labelling;
use crate::place::Position;
use crate::ranks;
use penstock_base::Stripe;
use penstock_base::rank::RankedMutex;
use penstock_drive::Slice;
use std::collections::BTreeMap;
use std::rc::Rc;

/// The number of a life; see the module.
pub(crate) type Life = u64;

/// A strip that was written and not flushed.
struct Unflushed {
    /// The number of its last write.
    write: u64,
    /// The array takes it to be on this member: its loss is to be recorded.
    counts: bool,
}

/// One member of an array.
pub(crate) struct Member {
    /// None while its drive is missing.
    slice: Option<Slice>,
    /// Recorded as missing writes.
    stale: bool,
    life: Life,
    /// The present life began when the drive was latched.
    latched: bool,
    /// Strips written in this life and not flushed since.
    unflushed: BTreeMap<(Stripe, Position), Unflushed>,
    /// Writes of strips in all lives.
    writes: u64,
    /// Held during a flush, so that a flush whose strips another one covers waits for that one.
    flushing: Rc<RankedMutex<()>>,
    /// The labels of the slice.
    labelling: Rc<Labelling>,
}

impl Member {
    pub(crate) fn new(slice: Option<Slice>, stale: bool) -> Self {
        Self {
            slice,
            stale,
            life: 0,
            latched: false,
            unflushed: BTreeMap::new(),
            writes: 0,
            flushing: Rc::new(RankedMutex::new(ranks::MEMBER_FLUSH, ())),
            labelling: Rc::new(Labelling::new()),
        }
    }

    /// The slice, also if its drive is latched.
    pub(crate) fn slice(&self) -> Option<&Slice> {
        self.slice.as_ref()
    }

    /// The slice, if its drive takes I/O.
    pub(crate) fn reachable(&self) -> Option<Slice> {
        self.slice.clone().filter(|slice| slice.drive().is_online())
    }

    /// True if its drive takes I/O.
    pub(crate) fn is_reachable(&self) -> bool {
        self.slice.as_ref().is_some_and(|slice| slice.drive().is_online())
    }

    /// True if it is recorded as missing writes.
    pub(crate) fn is_stale(&self) -> bool {
        self.stale
    }

    /// The record about it changed.
    pub(crate) fn set_stale(&mut self, stale: bool) {
        self.stale = stale;
    }

    /// True if its drive is gone and no record says so yet.
    pub(crate) fn is_newly_lost(&self) -> bool {
        !self.stale && !self.is_reachable()
    }

    pub(crate) fn life(&self) -> Life {
        self.life
    }

    /// A strip landed in this life. `counts` says that the array takes it to be on this member.
    pub(crate) fn landed(&mut self, stripe: Stripe, position: Position, counts: bool) {
        self.writes += 1;
        let before = self.unflushed.get(&(stripe, position)).is_some_and(|before| before.counts);
        let strip = Unflushed { write: self.writes, counts: counts || before };
        self.unflushed.insert((stripe, position), strip);
    }

    /// True if there is something to flush, or to find out that its drive is gone.
    pub(crate) fn needs_flush(&self) -> bool {
        !self.unflushed.is_empty() || self.is_newly_lost()
    }

    /// The number of the last write: a flush that begins now covers it.
    pub(crate) fn last_write(&self) -> u64 {
        self.writes
    }

    /// A flush that covers writes up to this number returned in the life in which it began.
    pub(crate) fn flushed(&mut self, covered: u64) {
        assert!(covered <= self.writes, "a flush covers write {covered} of {}", self.writes);
        self.unflushed.retain(|_, strip| strip.write > covered);
    }

    pub(crate) fn flushing(&self) -> Rc<RankedMutex<()>> {
        self.flushing.clone()
    }

    pub(crate) fn labelling(&self) -> Rc<Labelling> {
        self.labelling.clone()
    }

    /// Its drive was latched. Returns the strips that count and that the ended life may have lost; none if
    /// the life that began with the latch lasts already.
    pub(crate) fn latch(&mut self) -> Option<Vec<(Stripe, Position)>> {
        if std::mem::replace(&mut self.latched, true) {
            return None;
        }
        Some(self.end_life())
    }

    fn end_life(&mut self) -> Vec<(Stripe, Position)> {
        self.life += 1;
        let unflushed = std::mem::take(&mut self.unflushed).into_iter();
        unflushed.filter(|(_, strip)| strip.counts).map(|(place, _)| place).collect()
    }

    /// Takes the slice away: nothing that is in flight to it counts.
    pub(crate) fn remove_slice(&mut self) {
        self.end_life();
        self.slice = None;
    }

    /// Puts a slice in the place of one that was removed.
    pub(crate) fn put_slice(&mut self, slice: Slice) {
        assert!(self.unflushed.is_empty(), "strips of another slice are not flushed");
        self.slice = Some(slice);
        self.labelling = Rc::new(Labelling::new());
        self.latched = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_covers_the_writes_before_it() {
        let mut member = Member::new(None, true);
        let at = Position::new(3);
        [1, 2, 1].into_iter().for_each(|stripe| member.landed(Stripe(stripe), at, true));
        let covered = member.last_write();
        member.landed(Stripe(2), at, true);
        member.flushed(covered);
        assert!(member.needs_flush());
        assert_eq!(member.latch(), Some(vec![(Stripe(2), at)]));
    }

    #[test]
    fn a_latched_drive_ends_a_life_once() {
        let mut member = Member::new(None, false);
        member.landed(Stripe(7), Position::new(0), true);
        let life = member.life();
        assert_eq!(member.latch(), Some(vec![(Stripe(7), Position::new(0))]));
        assert_eq!((member.latch(), member.life()), (None, life + 1));
        member.remove_slice();
        assert_eq!(member.life(), life + 2);
    }

    /// A strip that is on its way to the member counts elsewhere until it is recorded here.
    #[test]
    fn a_strip_on_its_way_is_not_missed() {
        let mut member = Member::new(None, false);
        let at = Position::new(1);
        member.landed(Stripe(1), at, false);
        member.landed(Stripe(2), at, true);
        member.landed(Stripe(2), at, false);
        assert!(member.needs_flush());
        assert_eq!(member.latch(), Some(vec![(Stripe(2), at)]));
    }
}
