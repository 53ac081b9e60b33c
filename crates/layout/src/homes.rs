//! The places of the strips of a slice after members have failed.
//!
//! A strip of a failed member moves to a spare place of its row. The places are tried in turn, from another
//! one in each row. A place is taken if its member has not failed, holds no other lost strip in that row and
//! no other strip of the stripe, and if its failure domain does not get more strips of the stripe than the
//! code can lose. A strip whose new member fails moves on.
//!
//! The failures are taken one after the other, in their order: what an earlier one has moved stays where it
//! is, so that strips that were made again in spare places are found there.

use crate::declustered::Declustered;
use crate::search::first_spare;
use crate::shape::Place;
use std::collections::BTreeMap;

/// The places of the strips of one slice.
#[derive(Debug)]
pub struct Homes<'a> {
    layout: &'a Declustered,
    slice: u64,
    failed: Vec<usize>,
    /// The spare place of each strip that has moved, by its number in the slice; none if it has no place.
    moved: BTreeMap<usize, Option<usize>>,
}

impl<'a> Homes<'a> {
    /// The places after these members have failed, in this order.
    pub fn new(layout: &'a Declustered, slice: u64, failed: &[usize]) -> Self {
        let mut homes = Self { layout, slice, failed: Vec::new(), moved: BTreeMap::new() };
        failed.iter().for_each(|member| homes.fail(*member));
        homes
    }

    /// The place of a strip; none if it was lost and has no spare place.
    ///
    /// # Panics
    /// If the stripe is not in this slice.
    pub fn of(&self, stripe: u64, strip: usize) -> Option<Place> {
        assert_eq!(self.layout.slice_of(stripe), self.slice, "the slice of the stripe");
        self.at(self.layout.slot(stripe, strip))
    }

    /// The strip that has moved to a spare place of a row of the slice, as the numbers of its stripe and in
    /// it.
    pub fn in_spare(&self, row: usize, spare: usize) -> Option<(u64, usize)> {
        self.slot_in_spare(row, spare).map(|slot| self.layout.strip_of(self.slice, slot))
    }

    fn slot_in_spare(&self, row: usize, spare: usize) -> Option<usize> {
        let used = self.layout.shape().used();
        let mut moved = self.moved.range(row * used..(row + 1) * used);
        moved.find(|(_, home)| **home == Some(spare)).map(|(slot, _)| *slot)
    }

    fn at(&self, slot: usize) -> Option<Place> {
        match self.moved.get(&slot) {
            Some(home) => home.map(|spare| self.spare(slot, spare)),
            None => Some(self.layout.place_of(self.slice, slot)),
        }
    }

    /// A spare place in the row of a strip.
    fn spare(&self, slot: usize, spare: usize) -> Place {
        let used = self.layout.shape().used();
        self.layout.place_in(self.slice, slot / used, used + spare)
    }

    fn fail(&mut self, member: usize) {
        if self.failed.contains(&member) {
            return;
        }
        self.failed.push(member);
        let (shape, column) = (*self.layout.shape(), self.layout.column(self.slice, member));
        for row in 0..shape.rows() {
            let lost = match column.checked_sub(shape.used()) {
                None => Some(row * shape.used() + column),
                Some(spare) => self.slot_in_spare(row, spare),
            };
            if let Some(slot) = lost {
                // It leaves its place before it looks for another one.
                self.moved.insert(slot, None);
                let found = (0..shape.spares)
                    .map(|turn| (first_spare(row, shape.spares) + turn) % shape.spares)
                    .find(|spare| self.may_take(slot, *spare));
                self.moved.insert(slot, found);
            }
        }
    }

    fn may_take(&self, slot: usize, spare: usize) -> bool {
        let (shape, place) = (self.layout.shape(), self.spare(slot, spare));
        let row = slot / shape.used();
        if self.failed.contains(&place.member) || self.slot_in_spare(row, spare).is_some() {
            return false;
        }
        let first = slot / shape.strips * shape.strips;
        let others = (first..first + shape.strips).filter(|other| *other != slot);
        let mut in_domain = 1;
        for other in others.filter_map(|other| self.at(other)) {
            if other.member == place.member {
                return false;
            }
            // A lost strip that has not been made again yet is on a member that has failed.
            in_domain += usize::from(shape.domain(other.member) == shape.domain(place.member));
        }
        in_domain <= shape.most_in_domain()
    }
}
