//! The stripes of an array: their state, their dirty blocks in the log, their versions and locks.
//!
//! Owns the stripe map, the overlay, the version counter, the stripe locks, promised places and the queue of
//! stripes to repair. Does not own strips: what lies on drives is [`crate::strips`].

pub(crate) mod census;
pub(crate) mod changes;
mod count;
pub(crate) mod index;
pub(crate) mod load;
pub(crate) mod map;
pub(crate) mod overlay;
pub(crate) mod pages;
mod pins;
pub(crate) mod promises;
pub(crate) mod table;
mod versions;

use crate::context::Context;
use crate::error::ArrayError;
use crate::format::record::Entry;
use crate::layout::StripPlace;
use crate::members::{Loss, Members};
use crate::moves::Moves;
use crate::place::{MemberNo, MemberSet, Position, Positions};
use crate::queue::EntryQueue;
use crate::ranks;
use crate::table_memory::{PagesInMemory, TableMemory};
use census::{Census, StripeState};
use load::OpenedFrom;
use map::{PendingFresh, StripeMap};
use overlay::Overlay;
use penstock_base::rank::RankedLocks;
use penstock_base::{Stripe, Version};
pub(crate) use pins::Pin;
use pins::Pins;
use promises::Promises;
use std::cell::{Ref, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;
use table::StripeTable;
use versions::Versions;

/// Time before a read has a stripe that is listed as unreadable scrubbed again.
const ANOTHER_TRY: Duration = Duration::from_secs(60);
/// Stripes of which it is known when they were tried, and that wait for another try.
const MOST_TRIED: usize = 4096;

/// The stripes of one array.
pub(crate) struct Stripes {
    context: Rc<Context>,
    members: Rc<Members>,
    map: RefCell<StripeMap>,
    overlay: RefCell<Overlay>,
    /// Stripes in which something bad was found.
    to_repair: RefCell<BTreeSet<Stripe>>,
    /// When stripes that are listed as unreadable were tried again.
    tried_at: RefCell<BTreeMap<Stripe, Duration>>,
    newly_listed: RefCell<Vec<Stripe>>,
    promises: Promises,
    pub(crate) versions: Versions,
    /// Whoever writes strips of a stripe holds its lock exclusively; a reader holds it shared.
    locks: RankedLocks,
    pins: Pins,
    /// The page of each stripe whose record is on its way: a record must find it.
    pending_pages: RefCell<BTreeMap<Stripe, Pin>>,
    memory: Rc<TableMemory>,
    /// While the array is being opened.
    opening: RefCell<Option<OpenedFrom>>,
}

impl Stripes {
    pub(crate) fn new(
        context: &Rc<Context>,
        members: &Rc<Members>,
        queue: &Rc<EntryQueue>,
        memory: &Rc<TableMemory>,
    ) -> Rc<Self> {
        let this = Rc::new(Self {
            context: context.clone(),
            members: members.clone(),
            map: RefCell::new(StripeMap::new(StripeTable::new(&context.geo, &context.layout, memory))),
            overlay: RefCell::new(Overlay::new(context.geo.strip_blocks)),
            to_repair: RefCell::default(),
            tried_at: RefCell::default(),
            newly_listed: RefCell::default(),
            promises: Promises::default(),
            versions: Versions::new(queue),
            locks: RankedLocks::new(ranks::STRIPE),
            pins: Pins::default(),
            pending_pages: RefCell::default(),
            memory: memory.clone(),
            opening: RefCell::default(),
        });
        let pages: Rc<dyn PagesInMemory> = this.clone();
        memory.enter(&pages);
        let stripes = Rc::downgrade(&this);
        members.set_loss_test(Box::new(move |loss| {
            // An array that goes away loses nothing more.
            stripes.upgrade().is_some_and(|stripes| stripes.loses(loss))
        }));
        this
    }

    /// True if a stripe that has enough strips without the members that are gone has not without the others
    /// that are to be lost. Also true while it is not known: pages of the table may not be in memory.
    fn loses(&self, loss: &Loss) -> bool {
        self.refresh_count();
        if loss.is_within_layout && !self.may_lack_beyond(loss.lost) {
            return false;
        }
        let (layout, most) = (&self.context.layout, self.context.geo.m);
        let (gone, all) = (loss.gone, loss.gone.with(loss.taken));
        let loses = |stripe, state: StripeState| state.is_lost_without(layout, stripe, (gone, all), most);
        // A strip on its way to another place counts as lost if either place is: it may be at either when
        // that is recorded.
        let loses_moving = |(stripe, strips, moves): (Stripe, Positions, Moves)| {
            let state = self.state(stripe);
            let new = layout.strips_on(stripe, moves, |member| all.contains(member)).common(strips);
            state.lacking(layout, stripe, gone).len() <= most
                && state.lacking(layout, stripe, all).with(new).len() > most
        };
        self.promises.moving().into_iter().any(loses_moving)
            || self.map().pending().any(|(stripe, _)| loses(stripe, self.state(stripe)))
            || self.in_flight().into_iter().any(|(stripe, state)| loses(stripe, state))
            || self.table().may_lose(gone, all, most)
    }

    /// True if a stripe may lack a strip on another member than these.
    fn may_lack_beyond(&self, members: MemberSet) -> bool {
        let others = self.context.layout.all_members().without(members);
        self.table().may_lack_beyond(members)
            || self.pending_misses_on(others)
            || self.in_flight_misses_on(others)
    }

    fn state(&self, stripe: Stripe) -> StripeState {
        StripeState { stale: self.stale(stripe), moves: self.moves(stripe) }
    }

    fn in_flight(&self) -> Vec<(Stripe, StripeState)> {
        self.promises.in_flight(|member| self.members.life(member))
    }

    /// The state of all stripes. Let go of it before the next wait.
    pub(crate) fn map(&self) -> Ref<'_, StripeMap> {
        self.map.borrow()
    }

    /// The same, to change it.
    pub(crate) fn map_mut(&self) -> RefMut<'_, StripeMap> {
        self.map.borrow_mut()
    }

    /// The stripe table.
    pub(crate) fn table(&self) -> Ref<'_, StripeTable> {
        Ref::map(self.map.borrow(), StripeMap::table)
    }

    /// The stripe table, for openings and checkpoints.
    pub(crate) fn table_mut(&self) -> RefMut<'_, StripeTable> {
        RefMut::map(self.map.borrow_mut(), StripeMap::table_mut)
    }

    /// The dirty blocks.
    pub(crate) fn overlay(&self) -> Ref<'_, Overlay> {
        self.overlay.borrow()
    }

    /// The dirty blocks, to change them.
    pub(crate) fn overlay_mut(&self) -> RefMut<'_, Overlay> {
        self.overlay.borrow_mut()
    }

    /// True if it is known that a stripe's strips are written.
    pub(crate) fn is_known_written(&self, stripe: Stripe) -> bool {
        self.map.borrow().knows_written(stripe) == Some(true)
    }

    /// True if nothing is written in the stripe's strips.
    pub(crate) fn is_unwritten(&self, stripe: Stripe) -> bool {
        self.map.borrow().is_unwritten(stripe)
    }

    /// Strips that are not valid.
    pub(crate) fn stale(&self, stripe: Stripe) -> Positions {
        self.map.borrow().stale(stripe, |member| self.members.life(member))
    }

    /// Strips in spare places.
    pub(crate) fn moves(&self, stripe: Stripe) -> Moves {
        self.map.borrow().moves(stripe)
    }

    /// The place of a strip.
    pub(crate) fn place(&self, stripe: Stripe, position: Position) -> StripPlace {
        self.context.layout.place(stripe, position, self.moves(stripe))
    }

    /// The member on which a strip lies.
    pub(crate) fn member(&self, stripe: Stripe, position: Position) -> MemberNo {
        self.place(stripe, position).member
    }

    /// Strips that lie on these members.
    pub(crate) fn strips_on(&self, stripe: Stripe, members: MemberSet) -> Positions {
        self.context.layout.strips_on(stripe, self.moves(stripe), |member| members.contains(member))
    }

    /// The version that a valid strip has.
    pub(crate) fn version(&self, stripe: Stripe, position: Position) -> Version {
        self.map.borrow().version(stripe, position)
    }

    /// Strips that should be readable: valid, and on a member that takes I/O.
    pub(crate) fn readable(&self, stripe: Stripe) -> Positions {
        let is_reachable = |member| self.members.is_reachable(member);
        let reachable = self.context.layout.strips_on(stripe, self.moves(stripe), is_reachable);
        reachable.without(self.stale(stripe))
    }

    /// True if a pending stripe lacks a strip on one of these members.
    pub(crate) fn pending_misses_on(&self, members: MemberSet) -> bool {
        let (map, layout) = (self.map(), &self.context.layout);
        let mut pending = map.pending();
        pending.any(|(stripe, _)| self.state(stripe).misses_on(layout, stripe, members))
    }

    /// True if a stripe that is being written in full lacks a strip on one of these members.
    pub(crate) fn in_flight_misses_on(&self, members: MemberSet) -> bool {
        let layout = &self.context.layout;
        self.in_flight().into_iter().any(|(stripe, state)| state.misses_on(layout, stripe, members))
    }

    /// True if the record of a pending stripe would lack one of these strips.
    pub(crate) fn pending_misses(&self, strips: Positions) -> bool {
        self.map.borrow().pending_misses(strips, |member| self.members.life(member))
    }

    /// All strips of an unwritten stripe were written. It counts once its record is durable.
    /// Refused if too many were missed: nobody could read it.
    pub(crate) fn add_pending(&self, stripe: Stripe, pending: PendingFresh) -> Result<(), ArrayError> {
        let lacking = pending.stale(|member| self.members.life(member)).len();
        self.check_whole(stripe, lacking)?;
        let page = self.table().page_of(stripe);
        assert!(!self.table().lacks_page(page), "the stripe is locked");
        self.pending_pages.borrow_mut().insert(stripe, self.pins.pin(page..page + 1));
        self.map.borrow_mut().add_pending(stripe, pending);
        if lacking > 0 {
            // A member may be back for which its place was chosen.
            self.context.signals.resync.notify_one();
        }
        Ok(())
    }

    /// An error if a stripe that lacks so many strips cannot be read.
    fn check_whole(&self, stripe: Stripe, lacking: usize) -> Result<(), ArrayError> {
        match lacking > self.context.geo.m {
            true => Err(ArrayError::Suspended(format!("stripe {stripe} would lack {lacking} strips"))),
            false => Ok(()),
        }
    }

    /// The record of a pending stripe as its members stand now; none if it is not pending under `version`.
    /// Refused if nobody could read it: nothing may say that it is durable.
    pub(crate) fn pending_entry(
        &self,
        stripe: Stripe,
        version: Version,
    ) -> Result<Option<Entry>, ArrayError> {
        let map = self.map.borrow();
        let entry = map.pending_entry(stripe, version, |member| self.members.life(member));
        if entry.is_some() {
            self.check_whole(stripe, self.stale(stripe).len())?;
        }
        Ok(entry)
    }

    /// Applies a durable record.
    pub(crate) fn apply(&self, entry: &Entry) {
        if let Entry::Versions { reserved } = entry {
            self.versions.set_reserved(*reserved);
        }
        let lost = self.lost_pages_of(entry);
        let only_marks = matches!(entry, Entry::Strips { clear, .. } if clear.is_empty());
        if self.opening.borrow().is_none() && only_marks && !lost.is_empty() {
            // Its page may come back. Then the versions of its strips tell that they are stale.
            return;
        }
        // An opening that may not give them up has ended before.
        lost.into_iter().for_each(|page| self.give_up_lost(page));
        let lacking = self.map.borrow_mut().apply(entry, |member| self.members.life(member));
        match entry {
            Entry::Fresh { stripe, .. } => drop(self.pending_pages.borrow_mut().remove(stripe)),
            // Nobody owns the blocks that could not be read there any more.
            Entry::Discard { stripe, count, .. } => {
                let range = *stripe..Stripe(stripe.0 + count);
                let listed: Vec<Stripe> = self.map().unreadable().range(range).copied().collect();
                listed.into_iter().for_each(|stripe| self.list_readable(stripe));
            }
            _ => {}
        }
        // The members whose places it was not written to may be back by now.
        let has_moved = matches!(entry, Entry::Fresh { moves, .. } if !moves.moved().is_empty());
        if !lacking.is_empty() || has_moved {
            // They may have everything else, and then nothing but resync looks at them.
            self.context.signals.resync.notify_one();
        }
    }

    /// Lists a stripe of which only so many strips are good as unreadable. Returns the error.
    pub(crate) fn list_unreadable(&self, stripe: Stripe, good: usize) -> ArrayError {
        self.list(stripe);
        let (array, wanted) = (self.context.id, self.context.geo.k);
        ArrayError::Unreadable { array, stripe: stripe.0, good, wanted }
    }

    /// Something of a stripe could not be read. It is tried again soon.
    pub(crate) fn list(&self, stripe: Stripe) {
        if self.map().is_unreadable(stripe) {
            return;
        }
        self.map_mut().set_unreadable(stripe);
        let mut newly_listed = self.newly_listed.borrow_mut();
        if newly_listed.len() < MOST_TRIED {
            newly_listed.push(stripe);
            self.context.signals.repair.notify_one();
        }
    }

    /// Takes the stripes that were listed since the last call. Of very many some are missing, which are tried
    /// when their turn comes.
    pub(crate) fn take_newly_listed(&self) -> Vec<Stripe> {
        std::mem::take(&mut *self.newly_listed.borrow_mut())
    }

    /// All of a stripe that was asked for could be read. It stays listed if it lacks too many strips.
    pub(crate) fn list_readable(&self, stripe: Stripe) {
        if !self.is_lost(stripe) {
            self.map_mut().set_readable(stripe);
        }
    }

    /// True if a stripe lacks more strips than the code can make, or if its page of the table is lost. False
    /// if its page is not in memory.
    pub(crate) fn is_lost(&self, stripe: Stripe) -> bool {
        let page = self.table().page_of(stripe);
        match self.table().lacks_page(page) {
            true => self.table().is_lost(page),
            false => {
                let readable = self.readable(stripe).len();
                !self.is_unwritten(stripe) && readable < self.context.geo.k
            }
        }
    }

    /// True if what the table says of a stripe is in memory.
    pub(crate) fn has_page_of(&self, stripe: Stripe) -> bool {
        let table = self.table();
        !table.lacks_page(table.page_of(stripe))
    }

    /// True if some stripe may lack more strips than the code can make.
    pub(crate) fn lacks_too_much(&self) -> bool {
        !self.is_counted() || self.census().worst() > self.context.geo.m || self.table().has_lost_pages()
    }

    /// Has a stripe scrubbed of which a drive did not return all, or that is listed as unreadable, unless
    /// that was tried a moment ago or many stripes wait: what could not be read may be readable now.
    pub(crate) fn want_another_try(&self, stripe: Stripe) {
        let now = self.context.env.now();
        let mut tried_at = self.tried_at.borrow_mut();
        if tried_at.len() >= MOST_TRIED {
            tried_at.retain(|_, at| now.saturating_sub(*at) < ANOTHER_TRY);
        }
        if tried_at.len() >= MOST_TRIED || self.to_repair.borrow().len() >= MOST_TRIED {
            return;
        }
        if tried_at.get(&stripe).is_some_and(|at| now.saturating_sub(*at) < ANOTHER_TRY) {
            return;
        }
        tried_at.insert(stripe, now);
        drop(tried_at);
        self.want_repair(stripe);
    }

    /// The first stripes from `from` on, at most `most`, that are listed as unreadable and have enough
    /// strips.
    pub(crate) fn listed_from(&self, from: Stripe, most: usize) -> Vec<Stripe> {
        let map = self.map();
        let listed = map.unreadable().range(from..).filter(|stripe| !self.is_lost(**stripe));
        listed.take(most).copied().collect()
    }

    /// Has a stripe scrubbed: something bad was found in it.
    pub(crate) fn want_repair(&self, stripe: Stripe) {
        self.to_repair.borrow_mut().insert(stripe);
        self.context.signals.repair.notify_one();
    }

    /// Takes the first stripe to repair.
    pub(crate) fn next_to_repair(&self) -> Option<Stripe> {
        self.to_repair.borrow_mut().pop_first()
    }

    /// A stripe was scrubbed: what was found bad meanwhile is repaired.
    pub(crate) fn repaired(&self, stripe: Stripe) {
        self.to_repair.borrow_mut().remove(&stripe);
    }

    /// Puts stripes back whose repair must wait.
    pub(crate) fn repair_later(&self, mut stripes: BTreeSet<Stripe>) {
        self.to_repair.borrow_mut().append(&mut stripes);
    }

    /// Counts of the written stripes, with the members that are gone now, as far as they are counted.
    pub(crate) fn census(&self) -> Ref<'_, Census> {
        self.refresh_count();
        Ref::map(self.map.borrow(), |map| map.table().census())
    }

    /// The number of written stripes with fewer valid strips than the code has. Stripes that are not counted
    /// yet are among them.
    pub(crate) fn redundancy_debt(&self) -> u64 {
        let (counted, lacking) = {
            let census = self.census();
            (census.written(), census.lacking())
        };
        lacking + (self.table().written() - counted)
    }
}
