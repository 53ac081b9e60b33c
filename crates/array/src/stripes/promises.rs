//! Strips on their way: the places that are promised to them, and the stripes whose state in the table is not
//! the one that they will have.
//!
//! Invariants:
//! - no two strips are on their way to one place, and none to a place that another strip has. A strip keeps
//!   its old place until the new one is recorded;
//! - a stripe that is being written in full is listed until it is pending, and one whose strips go to other
//!   places until these are recorded: whoever judges if a drive may be given up asks for both.

use super::Stripes;
use super::census::StripeState;
use super::map::{Landed, not_there};
use crate::error::ArrayError;
use crate::layout::StripPlace;
use crate::members::Life;
use crate::moves::Moves;
use crate::place::{MemberNo, Position, Positions};
use penstock_base::Stripe;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// The places that are promised, and the stripes on their way.
#[derive(Default)]
pub(super) struct Promises {
    places: Rc<RefCell<BTreeSet<StripPlace>>>,
    fresh: Rc<RefCell<BTreeMap<Stripe, Landing>>>,
    moving: Rc<RefCell<BTreeMap<Stripe, MovingStrips>>>,
}

/// A stripe that is being written in full: where its strips go.
#[derive(Clone)]
struct Landing {
    /// By position, the member and its life; none for a strip that is not written.
    landed: Vec<Option<Landed>>,
    moves: Moves,
}

/// Strips of a stripe that go to other places, and its moves once that is recorded.
#[derive(Clone, Copy)]
struct MovingStrips {
    strips: Positions,
    moves: Moves,
}

impl Promises {
    /// The stripes that are being written in full, in the state that they would have now.
    pub(super) fn in_flight(&self, life_of: impl Fn(MemberNo) -> Life) -> Vec<(Stripe, StripeState)> {
        let state = |(stripe, landing): (&Stripe, &Landing)| {
            let stale = not_there(&landing.landed, &life_of);
            (*stripe, StripeState { stale, moves: landing.moves })
        };
        self.fresh.borrow().iter().map(state).collect()
    }

    /// The strips on their way to other places, by stripe, with the moves that the stripe will have.
    pub(super) fn moving(&self) -> Vec<(Stripe, Positions, Moves)> {
        let moving = self.moving.borrow();
        moving.iter().map(|(stripe, moving)| (*stripe, moving.strips, moving.moves)).collect()
    }
}

/// A stripe whose strips go to other places, until this is dropped.
pub(crate) struct Moving {
    stripe: Stripe,
    all: Rc<RefCell<BTreeMap<Stripe, MovingStrips>>>,
}

impl Drop for Moving {
    fn drop(&mut self) {
        self.all.borrow_mut().remove(&self.stripe);
    }
}

/// A place that no other strip gets while this lives.
pub(crate) struct Promise {
    place: StripPlace,
    all: Rc<RefCell<BTreeSet<StripPlace>>>,
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.all.borrow_mut().remove(&self.place);
    }
}

/// A stripe that is being written in full. While this lives no drive is given up without which it could not
/// be read, and its spare places are promised.
pub(crate) struct FreshStripe {
    stripe: Stripe,
    moves: Moves,
    _targets: Vec<Target>,
    all: Rc<RefCell<BTreeMap<Stripe, Landing>>>,
}

impl FreshStripe {
    /// Its strips that go to spare places.
    pub(crate) fn moves(&self) -> Moves {
        self.moves
    }
}

impl Drop for FreshStripe {
    fn drop(&mut self) {
        self.all.borrow_mut().remove(&self.stripe);
    }
}

/// A place to which a strip goes.
pub(crate) struct Target {
    pub(crate) place: StripPlace,
    /// The number of the spare place; none for the strip's own place.
    pub(crate) spare: Option<usize>,
    _promise: Option<Promise>,
}

impl Stripes {
    fn promise(&self, place: StripPlace) -> Promise {
        let is_new = self.promises.places.borrow_mut().insert(place);
        assert!(is_new, "{place:?} is promised twice");
        Promise { place, all: self.promises.places.clone() }
    }

    /// A spare place for a strip of a stripe with these moves.
    fn spare_for(&self, stripe: Stripe, position: Position, moves: Moves) -> Option<Target> {
        let layout = &self.context.layout;
        // A stripe whose page cannot be loaded may have any of the places.
        if layout.spares() == 0 || !self.knows_rows_of(stripe) {
            return None;
        }
        let is_lost = |member: MemberNo| !self.members.is_reachable(member);
        let is_taken = |place| self.promises.places.borrow().contains(&place);
        let moves_of = |stripe| self.moves(stripe);
        let spare = layout.find_spare(stripe, position, moves, moves_of, is_taken, is_lost)?;
        let place = layout.place(stripe, position, moves.with(position, Some(spare)));
        assert!(self.members.is_reachable(place.member), "a strip goes to a member that takes I/O");
        Some(Target { place, spare: Some(spare), _promise: Some(self.promise(place)) })
    }

    /// The place at which a strip of a written stripe can be made again: where it is, its own one, or a spare
    /// one. None if no member for it takes I/O.
    pub(crate) fn target(&self, stripe: Stripe, position: Position, moves: Moves) -> Option<Target> {
        let layout = &self.context.layout;
        let at = |spare| Target {
            place: layout.place(stripe, position, moves.with(position, spare)),
            spare,
            _promise: None,
        };
        let places = [at(moves.spare_of(position)), at(None)];
        let usable = places.into_iter().find(|target| self.members.is_reachable(target.place.member));
        usable.or_else(|| self.spare_for(stripe, position, moves))
    }

    /// Chooses the places of a stripe that is about to be written in full: spare ones for strips whose own
    /// members take no I/O, as far as there are. Refused if the stripe would lack more strips than the code
    /// can make again.
    pub(crate) fn begin_fresh(&self, stripe: Stripe) -> Result<FreshStripe, ArrayError> {
        let layout = &self.context.layout;
        let (mut moves, mut targets, mut landed) = (Moves::NONE, Vec::new(), Vec::new());
        let life = |member| (member, self.members.life(member));
        for position in self.context.geo.all_strips().iter() {
            let own = layout.own_place(stripe, position).member;
            if self.members.is_reachable(own) {
                landed.push(Some(life(own)));
                continue;
            }
            let target = self.spare_for(stripe, position, moves);
            landed.push(target.as_ref().map(|target| life(target.place.member)));
            if let Some(target) = target {
                moves = moves.with(position, target.spare);
                targets.push(target);
            }
        }
        assert_eq!(moves.moved().len(), targets.len(), "each strip that moves has a promised place");
        self.check_whole(stripe, landed.iter().filter(|strip| strip.is_none()).count())?;
        let all = self.promises.fresh.clone();
        let before = all.borrow_mut().insert(stripe, Landing { landed, moves });
        assert!(before.is_none(), "stripe {stripe} is written twice at the same time");
        Ok(FreshStripe { stripe, moves, _targets: targets, all })
    }

    /// Strips of a stripe, which is locked, are about to be recorded at other places: `moves` are theirs.
    pub(crate) fn begin_moving(&self, stripe: Stripe, strips: Positions, moves: Moves) -> Moving {
        let all = self.promises.moving.clone();
        let before = all.borrow_mut().insert(stripe, MovingStrips { strips, moves });
        assert!(before.is_none(), "strips of stripe {stripe} are moved twice at the same time");
        Moving { stripe, all }
    }
}
