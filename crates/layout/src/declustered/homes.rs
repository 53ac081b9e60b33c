//! For tests: the places of the strips of a band after members have failed one after the other.

use super::Declustered;
use crate::shape::Place;
use std::collections::BTreeMap;

/// The places of the strips of one band.
#[derive(Debug)]
pub(super) struct Homes<'a> {
    layout: &'a Declustered,
    band: u64,
    failed: Vec<usize>,
    /// The spare place of each strip that has moved; none if it has no place.
    moved: BTreeMap<(u64, usize), Option<usize>>,
}

impl<'a> Homes<'a> {
    /// The places after these members have failed, in this order.
    pub(super) fn new(layout: &'a Declustered, band: u64, failed: &[usize]) -> Self {
        let mut homes = Self { layout, band, failed: Vec::new(), moved: BTreeMap::new() };
        failed.iter().for_each(|member| homes.fail(*member));
        homes
    }

    /// The place of a strip; none if it was lost and has no spare place.
    pub(super) fn of(&self, stripe: u64, strip: usize) -> Option<Place> {
        assert_eq!(self.layout.band_of(stripe), self.band, "the band of the stripe");
        match self.moved.get(&(stripe, strip)) {
            Some(home) => home.map(|spare| self.layout.spare_place(stripe, strip, spare)),
            None => Some(self.layout.place(stripe, strip)),
        }
    }

    fn fail(&mut self, member: usize) {
        self.failed.push(member);
        let shape = *self.layout.shape();
        let first = self.band * shape.stripes() as u64;
        for stripe in first..first + shape.stripes() as u64 {
            for strip in 0..shape.strips {
                if self.of(stripe, strip).is_none_or(|home| home.member == member) {
                    let spare_of = |place: (u64, usize)| self.moved.get(&place).copied().flatten();
                    let others =
                        || self.layout.strips_of_row(stripe, strip).filter(|at| *at != (stripe, strip));
                    let is_taken = |spare| others().any(|other| spare_of(other) == Some(spare));
                    let is_lost = |member| self.failed.contains(&member);
                    let of_stripe = |strip| spare_of((stripe, strip));
                    let found = self.layout.find_spare(stripe, strip, of_stripe, is_taken, is_lost);
                    self.moved.insert((stripe, strip), found);
                }
            }
        }
    }
}
