//! Counts of written stripes: the strips that they lack, and the strips on members.
//!
//! Invariant: the counts are those of the stripes that were added and not removed since, each as it was then.
//! Strips that are valid are counted only on the watched members.

use crate::layout::Layout;
use crate::members::StripsOn;
use crate::moves::Moves;
use crate::place::{MemberNo, MemberSet, Position, Positions};
use penstock_base::Stripe;

/// The strips of a written stripe that are not valid, or not at their own places.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StripeState {
    pub(crate) stale: Positions,
    pub(crate) moves: Moves,
}

impl StripeState {
    /// The state in the first words of an entry.
    ///
    /// # Panics
    /// If the entry was not verified when it was read.
    pub(super) fn of(entry: &[u64]) -> Self {
        let moves = Moves::of_words(entry[1], entry[2]).expect("entries are verified when they are read");
        Self { stale: Positions::from_bits(entry[0]), moves }
    }

    /// The strips that a stripe in this state lacks without those on the `absent` members.
    pub(crate) fn lacking(self, layout: &Layout, stripe: Stripe, absent: MemberSet) -> Positions {
        self.stale.with(layout.strips_on(stripe, self.moves, |member| absent.contains(member)))
    }

    /// True if a strip on one of these members is stale.
    pub(super) fn misses_on(self, layout: &Layout, stripe: Stripe, members: MemberSet) -> bool {
        self.stale.meets(layout.strips_on(stripe, self.moves, |member| members.contains(member)))
    }

    /// True if no more than `most` strips are lacking without the `gone` members, and more are without the
    /// `absent` ones too.
    pub(crate) fn is_lost_without(
        self,
        layout: &Layout,
        stripe: Stripe,
        (gone, absent): (MemberSet, MemberSet),
        most: usize,
    ) -> bool {
        let lacks = |members| self.lacking(layout, stripe, members).len();
        lacks(gone) <= most && lacks(gone.with(absent)) > most
    }

    /// Puts the state into the first words of an entry.
    pub(super) fn put(self, entry: &mut [u64]) {
        let [moved, spares] = self.moves.words();
        entry[..3].copy_from_slice(&[self.stale.bits(), moved, spares]);
    }
}

/// Counts of the written stripes of one array.
#[derive(Clone, Debug)]
pub(crate) struct Census {
    /// Strips of a stripe that the code can make.
    redundancy: usize,
    absent: MemberSet,
    watched: MemberSet,
    written: u64,
    /// Stripes by the number of strips that are stale or on absent members.
    by_lacking: Vec<u64>,
    members: Vec<StripsOn>,
}

impl Census {
    /// No stripe is written; of one, the code can make so many strips. Strips on the `absent` members will
    /// count as lacking, and the strips on these and on the `watched` members will be counted.
    pub(crate) fn new(layout: &Layout, redundancy: usize, absent: MemberSet, watched: MemberSet) -> Self {
        Self {
            redundancy,
            absent,
            watched: watched.with(absent),
            written: 0,
            by_lacking: vec![0; layout.strips() + 1],
            members: vec![StripsOn::default(); layout.members()],
        }
    }

    /// Strips of a stripe that the code can make.
    pub(super) fn redundancy(&self) -> usize {
        self.redundancy
    }

    /// Members whose strips count as lacking.
    pub(crate) fn absent(&self) -> MemberSet {
        self.absent
    }

    /// Members on which all strips are counted.
    pub(crate) fn watched(&self) -> MemberSet {
        self.watched
    }

    /// Written stripes.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Written stripes that lack a strip.
    pub(crate) fn lacking(&self) -> u64 {
        self.written - self.by_lacking[0]
    }

    /// Written stripes that lack exactly so many strips.
    pub(crate) fn lacking_exactly(&self, strips: usize) -> u64 {
        self.by_lacking.get(strips).copied().unwrap_or(0)
    }

    /// Written stripes that lack more strips than the code can make.
    pub(crate) fn lost(&self) -> u64 {
        self.by_lacking.iter().skip(self.redundancy + 1).sum()
    }

    /// The most strips that a stripe lacks.
    pub(crate) fn worst(&self) -> usize {
        self.by_lacking.iter().rposition(|stripes| *stripes > 0).unwrap_or(0)
    }

    /// The strips on a member. Valid ones are counted only on a watched member.
    pub(crate) fn on(&self, member: MemberNo) -> StripsOn {
        self.members[member.index()]
    }

    /// So many stripes are written that lack nothing and have nothing moved. No member is watched.
    pub(super) fn add_clean(&mut self, stripes: u64) {
        assert!(self.watched.is_empty(), "strips on watched members are counted");
        self.written += stripes;
        self.by_lacking[0] += stripes;
    }

    /// A stripe is written. Returns the number of strips that it lacks.
    pub(super) fn add(&mut self, layout: &Layout, stripe: Stripe, state: StripeState) -> usize {
        self.count(layout, stripe, state, |count| *count += 1)
    }

    /// A stripe that was counted in this state is not in it any more. Returns the number of strips that it
    /// lacked.
    pub(super) fn remove(&mut self, layout: &Layout, stripe: Stripe, state: StripeState) -> usize {
        self.count(layout, stripe, state, |count| {
            *count = count.checked_sub(1).expect("it was counted");
        })
    }

    fn count(
        &mut self,
        layout: &Layout,
        stripe: Stripe,
        state: StripeState,
        change: impl Fn(&mut u64),
    ) -> usize {
        let mut lacking = 0;
        // Most stripes of most arrays have all strips where they belong.
        if !self.watched.is_empty() || state != StripeState::default() {
            for (at, place) in layout.places(stripe, state.moves).enumerate() {
                let (position, on) = (Position::new(at), &mut self.members[place.member.index()]);
                let is_stale = state.stale.contains(position);
                if self.watched.contains(place.member) {
                    change(&mut on.strips);
                }
                if is_stale {
                    change(&mut on.stale);
                    if state.stale.len() > self.redundancy {
                        change(&mut on.lost);
                    }
                }
                lacking += usize::from(is_stale || self.absent.contains(place.member));
            }
            for position in state.moves.moved().iter() {
                let own = layout.own_place(stripe, position).member;
                change(&mut self.members[own.index()].moved_away);
            }
        }
        assert!(state.stale.len() <= lacking, "a stale strip is lacking");
        change(&mut self.written);
        change(&mut self.by_lacking[lacking]);
        lacking
    }
}
