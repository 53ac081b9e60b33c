//! The layout of an array: the member and the row of every strip, and the spare places.
//!
//! The maps are those of `penstock-layout`, in the terms of this crate. A strip lies at its *own* place until
//! it moves to a spare place of the same row ([`crate::moves::Moves`]).

use crate::error::ArrayError;
use crate::moves::{MOST_MOVED, MOST_SPARES, Moves};
use crate::place::{MemberNo, MemberSet, Position, Positions};
use penstock_base::Stripe;
use penstock_layout::{Declustered, Fixed, Place, Shape, search};
use std::ops::Range;

/// The place of a strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StripPlace {
    /// The member.
    pub member: MemberNo,
    /// The number of the strip on it.
    pub row: u64,
}

impl From<Place> for StripPlace {
    fn from(place: Place) -> Self {
        Self { member: MemberNo::new(place.member), row: place.row }
    }
}

/// The map from strips to places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Groups of as many members as a stripe has strips.
    Fixed(Fixed),
    /// Stripes that are spread over all members.
    Declustered(Box<Declustered>),
}

impl Layout {
    /// One group: as many members as a stripe has strips.
    pub fn one_group(strips: usize) -> Result<Self, ArrayError> {
        Self::groups(1, strips)
    }

    /// So many groups of `strips` members each.
    pub fn groups(groups: usize, strips: usize) -> Result<Self, ArrayError> {
        let invalid = |error: penstock_layout::LayoutError| ArrayError::Invalid(error.to_string());
        Fixed::new(groups, strips).map(Self::Fixed).map_err(invalid)
    }

    /// Stripes that are spread evenly, by base permutations that are searched for from a seed. That may take
    /// some seconds for hundreds of members.
    pub fn spread(shape: Shape, seed: u64) -> Result<Self, ArrayError> {
        let bases = search(shape, seed).map_err(|error| ArrayError::Invalid(error.to_string()))?;
        Self::declustered(shape, &bases)
    }

    /// Stripes that are spread by these base permutations.
    pub fn declustered(shape: Shape, bases: &[Vec<u8>]) -> Result<Self, ArrayError> {
        if shape.spares > MOST_SPARES {
            let why = format!("a row has at most {MOST_SPARES} spare places, not {}", shape.spares);
            return Err(ArrayError::Invalid(why));
        }
        match Declustered::new(shape, bases) {
            Ok(layout) => Ok(Self::Declustered(Box::new(layout))),
            Err(error) => Err(ArrayError::Invalid(error.to_string())),
        }
    }

    /// Members of the array.
    pub fn members(&self) -> usize {
        match self {
            Self::Fixed(fixed) => fixed.members(),
            Self::Declustered(spread) => spread.shape().members,
        }
    }

    /// All members.
    pub fn all_members(&self) -> MemberSet {
        MemberSet::first(self.members())
    }

    /// Strips of a stripe.
    pub fn strips(&self) -> usize {
        match self {
            Self::Fixed(fixed) => fixed.strips(),
            Self::Declustered(spread) => spread.shape().strips,
        }
    }

    /// The layout in a few words, for people.
    pub fn describe(&self) -> String {
        let members = self.members();
        match self {
            Self::Fixed(fixed) => match members / fixed.strips() {
                1 => format!("fixed, {members} members"),
                groups => format!("fixed, {groups} groups of {} members", fixed.strips()),
            },
            Self::Declustered(spread) => {
                let shape = spread.shape();
                let domains = match shape.domains < members {
                    true => format!(" in {} failure domains", shape.domains),
                    false => String::new(),
                };
                format!("declustered, {members} members{domains}, {} spare", shape.spares)
            }
        }
    }

    /// Spare places of a row.
    pub fn spares(&self) -> usize {
        match self {
            Self::Fixed(_) => 0,
            Self::Declustered(spread) => spread.shape().spares,
        }
    }

    /// Stripes that fit in this many rows.
    pub fn stripes(&self, rows: u64) -> u64 {
        match self {
            Self::Fixed(fixed) => fixed.stripes(rows),
            Self::Declustered(spread) => spread.stripes(rows),
        }
    }

    /// The stripes that have strips in a row with strips of this one, as far as they could take the same
    /// spare places.
    pub fn stripes_of_rows(&self, stripe: Stripe) -> Range<Stripe> {
        match self {
            Self::Declustered(spread) if spread.shape().spares > 0 => {
                let stripes = spread.stripes_of_rows(stripe.0);
                Stripe(stripes.start)..Stripe(stripes.end)
            }
            _ => stripe..stripe.next(),
        }
    }

    /// Adds members to those that are chosen, in their order, until they are so many. Those in failure
    /// domains without a chosen member come before the others.
    pub(crate) fn choose(
        &self,
        chosen: &mut Vec<MemberNo>,
        from: impl Iterator<Item = MemberNo> + Clone,
        most: usize,
    ) {
        for is_picky in [true, false] {
            for member in from.clone() {
                let is_left_out = chosen.contains(&member) || is_picky && self.shares_domain(chosen, member);
                if chosen.len() < most && !is_left_out {
                    chosen.push(member);
                }
            }
        }
    }

    /// True if one of these members is in a member's failure domain.
    pub(crate) fn shares_domain(&self, members: &[MemberNo], member: MemberNo) -> bool {
        members.iter().any(|other| self.domain(*other) == self.domain(member))
    }

    /// The failure domain of a member.
    pub fn domain(&self, member: MemberNo) -> usize {
        match self {
            Self::Fixed(_) => member.index(),
            Self::Declustered(spread) => spread.shape().domain(member.index()),
        }
    }

    /// A strip's own place.
    pub fn own_place(&self, stripe: Stripe, position: Position) -> StripPlace {
        assert!(position.index() < self.strips(), "strip {position} of {}", self.strips());
        match self {
            Self::Fixed(fixed) => fixed.place(stripe.0, position.index()),
            Self::Declustered(spread) => spread.place(stripe.0, position.index()),
        }
        .into()
    }

    /// The place of a strip of a stripe with these moves.
    pub fn place(&self, stripe: Stripe, position: Position, moves: Moves) -> StripPlace {
        match (moves.spare_of(position), self) {
            (Some(spare), Self::Declustered(spread)) => {
                spread.spare_place(stripe.0, position.index(), spare).into()
            }
            _ => self.own_place(stripe, position),
        }
    }

    /// The places of all strips of a stripe with these moves, by position.
    pub fn places(&self, stripe: Stripe, moves: Moves) -> impl Iterator<Item = StripPlace> {
        (0..self.strips()).map(move |at| self.place(stripe, Position::new(at), moves))
    }

    /// The strips of a stripe with these moves that lie on members for which `wanted` holds.
    pub fn strips_on(&self, stripe: Stripe, moves: Moves, wanted: impl Fn(MemberNo) -> bool) -> Positions {
        let on = self.places(stripe, moves).enumerate().filter(|(_, place)| wanted(place.member));
        on.map(|(at, _)| Position::new(at)).collect()
    }

    /// The most strips of one stripe that have their own places on these members.
    pub fn most_lost(&self, members: MemberSet) -> usize {
        match self {
            Self::Fixed(fixed) => {
                let group =
                    |group: usize| members.iter().filter(|at| at.index() / fixed.strips() == group).count();
                (0..fixed.members() / fixed.strips()).map(group).max().unwrap_or(0)
            }
            // Some stripe may lie on all of them, but no more strips than it may have in one domain.
            Self::Declustered(spread) => {
                let shape = spread.shape();
                let domain =
                    |domain: usize| members.iter().filter(|at| shape.domain(at.index()) == domain).count();
                let most = shape.most_in_domain();
                (0..shape.domains).map(|at| domain(at).min(most)).sum::<usize>().min(shape.strips)
            }
        }
    }

    /// The most members that an array can lose at once with a code that survives the loss of `m` strips.
    pub fn most_losable(&self, m: usize) -> usize {
        match self {
            Self::Fixed(fixed) => fixed.members() / fixed.strips() * m,
            Self::Declustered(spread) => m.max(spread.shape().members / spread.shape().domains),
        }
    }

    /// The spare place to which a strip of a stripe with these moves goes; none if there is none. `moves_of`
    /// tells the moves of another stripe, `is_taken` if a place is promised to a strip, and `is_lost` if a
    /// member cannot be used.
    pub fn find_spare(
        &self,
        stripe: Stripe,
        position: Position,
        moves: Moves,
        moves_of: impl Fn(Stripe) -> Moves,
        is_taken: impl Fn(StripPlace) -> bool,
        is_lost: impl Fn(MemberNo) -> bool,
    ) -> Option<usize> {
        let Self::Declustered(spread) = self else { return None };
        if moves.moved().len() == MOST_MOVED && moves.spare_of(position).is_none() {
            return None;
        }
        let (number, strip) = (stripe.0, position.index());
        // Its present place is taken too until the new one counts.
        let taken: Vec<usize> = spread
            .strips_of_row(number, strip)
            .filter_map(|(of, at)| {
                let moves = if of == number { moves } else { moves_of(Stripe(of)) };
                moves.spare_of(Position::new(at))
            })
            .collect();
        let is_taken = |spare: usize| {
            taken.contains(&spare) || is_taken(spread.spare_place(number, strip, spare).into())
        };
        let spare_of = |other| moves.spare_of(Position::new(other));
        spread.find_spare(number, strip, spare_of, is_taken, |member| is_lost(MemberNo::new(member)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Stripes of four strips that survive the loss of two, on twelve members.
    fn spread(domains: usize) -> Layout {
        let spares = if domains == 12 { 2 } else { 0 };
        let shape = Shape { members: 12, strips: 4, redundancy: 2, spares, domains };
        Layout::declustered(shape, &[vec![3, 4, 8, 1, 0, 7, 2, 10, 9, 11, 5, 6]]).unwrap()
    }

    fn members(numbers: &[usize]) -> MemberSet {
        numbers.iter().copied().map(MemberNo::new).collect()
    }

    #[test]
    fn the_most_that_a_stripe_loses_depends_on_groups_and_domains() {
        let groups = Layout::groups(3, 4).unwrap();
        for (lost, of_groups, of_all, of_three_domains) in [
            (&[][..], 0, 0, 0),
            (&[0], 1, 1, 1),
            (&[0, 4], 1, 2, 2),
            (&[0, 1, 4], 2, 3, 3),
            (&[0, 3, 6], 2, 3, 2),
            (&[0, 3, 6, 9], 2, 4, 2),
            (&[0, 3, 6, 9, 1], 3, 4, 3),
            (&[0, 1, 2, 3, 4], 4, 4, 4),
        ] {
            let lost = members(lost);
            let found = [&groups, &spread(12), &spread(3)].map(|layout| layout.most_lost(lost));
            assert_eq!(found, [of_groups, of_all, of_three_domains], "{lost:?}");
        }
        assert_eq!([&groups, &spread(12), &spread(3)].map(|layout| layout.most_losable(2)), [6, 2, 4]);
    }

    #[test]
    fn a_strip_in_a_spare_place_is_in_the_row_of_its_own_one() {
        let layout = spread(12);
        let mut all = BTreeSet::new();
        for stripe in (0..layout.stripes(60)).map(Stripe) {
            let moves = Moves::NONE.with(Position::new(1), Some(1));
            for (at, place) in layout.places(stripe, moves).enumerate() {
                let own = layout.own_place(stripe, Position::new(at));
                assert_eq!((place.row, place == own), (own.row, at != 1), "{stripe}");
                assert!(at == 1 || all.insert(place));
            }
        }
        // Groups have no spare places.
        let (groups, moves) = (Layout::groups(3, 4).unwrap(), Moves::NONE.with(Position::new(0), Some(0)));
        let own = groups.own_place(Stripe(5), Position::new(0));
        assert_eq!(groups.place(Stripe(5), Position::new(0), moves), own);
    }

    /// Looks for a spare place for each strip in turn, until there is none.
    #[test]
    fn spare_places_are_given_once() {
        let layout = spread(12);
        let mut all = [Moves::NONE; 5];
        let mut taken = BTreeSet::new();
        let lost = MemberNo::new(9);
        for stripe in 0..5u64 {
            for position in (0..4).map(Position::new) {
                let own = all[stripe as usize];
                let moves_of = |other: Stripe| {
                    assert!(
                        layout.stripes_of_rows(Stripe(stripe)).contains(&other),
                        "{other} beside {stripe}"
                    );
                    all[other.0 as usize]
                };
                let is_lost = |member| member == lost;
                let found = layout.find_spare(Stripe(stripe), position, own, moves_of, |_| false, is_lost);
                let Some(spare) = found else { continue };
                let promised =
                    |place| place == layout.place(Stripe(stripe), position, own.with(position, found));
                let other = layout.find_spare(Stripe(stripe), position, own, moves_of, promised, is_lost);
                assert_ne!(other, found, "a promised place is not given again");
                all[stripe as usize] = own.with(position, Some(spare));
                let place = layout.place(Stripe(stripe), position, all[stripe as usize]);
                assert!(place.member != lost && taken.insert(place), "{place:?}");
            }
        }
        // Two rows with two spare places each; one member is lost.
        assert!((2..=4).contains(&taken.len()), "{taken:?}");
    }

    #[test]
    fn impossible_layouts_are_refused() {
        let shape = Shape { members: 12, strips: 3, redundancy: 1, spares: 9, domains: 12 };
        let refused = Layout::declustered(shape, &[(0..12).collect()]).unwrap_err().to_string();
        assert!(refused.contains("at most 8 spare places"), "{refused}");
        let shape = Shape { spares: 2, ..shape };
        assert!(Layout::declustered(shape, &[vec![0; 12]]).is_err());
        assert!(Layout::groups(5, 64).is_err() && Layout::one_group(64).is_ok());
    }
}
