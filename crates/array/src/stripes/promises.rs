//! Places that are promised to strips on their way there, and the choice of such places.
//!
//! Invariant: no two strips are on their way to one place, and none to a place that another strip has. A
//! strip keeps its old place until the new one is recorded.

use super::Stripes;
use crate::error::ArrayError;
use crate::layout::StripPlace;
use crate::moves::Moves;
use crate::place::{MemberNo, Position};
use penstock_base::Stripe;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// The places that are promised, and the stripes that are being written in full.
#[derive(Default)]
pub(super) struct Promises {
    places: Rc<RefCell<BTreeSet<StripPlace>>>,
    fresh: Rc<RefCell<BTreeMap<Stripe, Moves>>>,
}

impl Promises {
    /// The stripes that are being written in full, with their moves.
    pub(super) fn in_flight(&self) -> Vec<(Stripe, Moves)> {
        self.fresh.borrow().iter().map(|(stripe, moves)| (*stripe, *moves)).collect()
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
    all: Rc<RefCell<BTreeMap<Stripe, Moves>>>,
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
        let (mut moves, mut targets, mut lacking) = (Moves::NONE, Vec::new(), 0);
        for position in self.context.geo.all_strips().iter() {
            if self.members.is_reachable(layout.own_place(stripe, position).member) {
                continue;
            }
            match self.spare_for(stripe, position, moves) {
                Some(target) => {
                    moves = moves.with(position, target.spare);
                    targets.push(target);
                }
                None => lacking += 1,
            }
        }
        assert_eq!(moves.moved().len(), targets.len(), "each strip that moves has a promised place");
        self.check_whole(stripe, lacking)?;
        let all = self.promises.fresh.clone();
        let before = all.borrow_mut().insert(stripe, moves);
        assert!(before.is_none(), "stripe {stripe} is written twice at the same time");
        Ok(FreshStripe { stripe, moves, _targets: targets, all })
    }
}
