//! Stripes that are spread over all members, with spare places in every row.
//!
//! A *cell* is a place in a row before it is assigned to a member. The first cells hold strips, the last
//! ones are spare. Stripes follow each other through the cells of a *band*, the fewest rows that whole
//! stripes fill. One permutation assigns the cells of all rows of a band, so a stripe that goes on in the
//! next row still has its strips on different members. Slices use the base permutations in turn, and after
//! each round of them all members move on by one. So what two members have in common depends only on the
//! distance between them, a handful of base permutations makes it even, and every member has each cell
//! equally often. (Permutation development, after Schwarz, Steinberg and Burkhard, 1999.)
//!
//! A strip moves to a spare place of its row. The places are tried in turn, from another one in each band. A
//! place is taken if its member has not failed, holds no other strip of the stripe and no other strip that
//! has moved to it, and if its failure domain does not get more strips of the stripe than the code can lose,
//! now or when strips come back to their own places: a strip that has moved counts in both domains.

use crate::search::{Cells, Loads, first_spare};
use crate::shape::{LayoutError, Place, Shape, index};
use std::ops::Range;

/// A declustered layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declustered {
    shape: Shape,
    bases: Vec<Cells>,
}

/// The content of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// A strip of a stripe.
    Strip {
        /// The stripe.
        stripe: u64,
        /// The number of the strip in it.
        strip: usize,
    },
    /// The spare place of this number in its row.
    Spare(usize),
}

impl Declustered {
    /// A layout with these base permutations: each names the member of every cell. Fails if they do not fit
    /// the shape.
    pub fn new(shape: Shape, bases: &[Vec<u8>]) -> Result<Self, LayoutError> {
        shape.check()?;
        if bases.is_empty() {
            return Err(LayoutError::Shape("a layout has at least one base permutation".into()));
        }
        let cell = |(number, base): (usize, &Vec<u8>)| {
            let cells = Cells::new(&shape, base);
            cells.map_err(|why| LayoutError::Base { number, why })
        };
        let bases = bases.iter().enumerate().map(cell).collect::<Result<_, _>>()?;
        Ok(Self { shape, bases })
    }

    /// The parameters.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The base permutations, as [`Self::new`] takes them.
    pub fn bases(&self) -> Vec<Vec<u8>> {
        self.bases.iter().map(Cells::members).collect()
    }

    /// Stripes that fit in this many rows. Rows that fill no band hold none.
    pub fn stripes(&self, rows: u64) -> u64 {
        rows / self.shape.rows() as u64 * self.shape.stripes() as u64
    }

    /// The rows after which the map of members repeats itself.
    pub fn period(&self) -> u64 {
        (self.bases.len() * self.shape.members * self.shape.rows()) as u64
    }

    /// The band in which a stripe lies.
    pub fn band_of(&self, stripe: u64) -> u64 {
        stripe / self.shape.stripes() as u64
    }

    /// The place of a strip.
    ///
    /// # Panics
    /// If a stripe has no such strip.
    pub fn place(&self, stripe: u64, strip: usize) -> Place {
        let band = self.band_of(stripe);
        self.place_of(band, self.slot(stripe, strip))
    }

    /// The content of a place.
    ///
    /// # Panics
    /// If there is no such member.
    pub fn content(&self, place: Place) -> Content {
        let shape = &self.shape;
        assert!(place.member < shape.members, "member {} of {}", place.member, shape.members);
        let band = place.row / shape.rows() as u64;
        let row = index(place.row % shape.rows() as u64);
        match self.cell(band, place.member) {
            cell if cell < shape.used() => {
                let (stripe, strip) = self.strip_of(band, row * shape.used() + cell);
                Content::Strip { stripe, strip }
            }
            cell => Content::Spare(cell - shape.used()),
        }
    }

    /// The spare place with a number in the row of a strip.
    ///
    /// # Panics
    /// If there is no such strip or place.
    pub fn spare_place(&self, stripe: u64, strip: usize, spare: usize) -> Place {
        let shape = self.shape();
        assert!(spare < shape.spares, "spare place {spare} of {}", shape.spares);
        let (band, row) = (self.band_of(stripe), self.slot(stripe, strip) / shape.used());
        self.place_in(band, row, shape.used() + spare)
    }

    /// The strips with their own places in the row of a strip, that one included: stripe, and number in it.
    pub fn strips_of_row(&self, stripe: u64, strip: usize) -> impl Iterator<Item = (u64, usize)> {
        let row = self.place(stripe, strip).row;
        (0..self.shape().members).filter_map(move |member| match self.content(Place { member, row }) {
            Content::Strip { stripe, strip } => Some((stripe, strip)),
            Content::Spare(_) => None,
        })
    }

    /// The stripes that have strips in a row with a strip of this one.
    pub fn stripes_of_rows(&self, stripe: u64) -> Range<u64> {
        let Shape { strips, .. } = self.shape;
        let used = self.shape.used();
        let rows = self.slot(stripe, 0) / used..self.slot(stripe, strips - 1) / used + 1;
        let first = self.band_of(stripe) * self.shape.stripes() as u64;
        let at = |slot: usize| first + (slot / strips) as u64;
        at(rows.start * used)..at(rows.end * used - 1) + 1
    }

    /// The number of the spare place to which a lost strip moves; none if it has no place. `spare_of` tells
    /// the spare place that another strip of the stripe has moved to, `is_taken` the places that strips of
    /// the row have, and `is_lost` the members that cannot be used.
    pub fn find_spare(
        &self,
        stripe: u64,
        strip: usize,
        spare_of: impl Fn(usize) -> Option<usize>,
        is_taken: impl Fn(usize) -> bool,
        is_lost: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let shape = self.shape();
        let first = self.first_spare(self.band_of(stripe));
        let others = (0..shape.strips).filter(|other| *other != strip);
        // The present member of each other strip, and its own one, to which it will come back.
        let others: Vec<(usize, usize)> = others
            .map(|other| {
                let own = self.place(stripe, other).member;
                let moved = |spare| self.spare_place(stripe, other, spare).member;
                (spare_of(other).map_or(own, moved), own)
            })
            .collect();
        let may_take = |spare: &usize| {
            let member = self.spare_place(stripe, strip, *spare).member;
            let is_with = |other: usize| shape.domain(other) == shape.domain(member);
            // A lost strip that has not been made again yet is on a member that has failed, and counts.
            let in_domain = others.iter().filter(|(present, own)| is_with(*present) || is_with(*own));
            !is_lost(member)
                && !is_taken(*spare)
                && others.iter().all(|(present, _)| *present != member)
                && in_domain.count() < shape.most_in_domain()
        };
        let mut in_turn = (0..shape.spares).map(|turn| (first + turn) % shape.spares);
        in_turn.find(may_take)
    }

    /// The excess above the mean of what the busiest member reads and writes when one member fails, as a
    /// share of the mean, over all rows of a period. With failure domains, the members of the domain that
    /// failed are compared with each other, and so are all others.
    pub fn imbalance(&self) -> f64 {
        let mut loads = Loads::new(self.shape);
        self.bases.iter().enumerate().for_each(|(number, base)| loads.count(number, base));
        loads.imbalance()
    }

    /// The number of a strip among those of its band.
    pub(crate) fn slot(&self, stripe: u64, strip: usize) -> usize {
        assert!(strip < self.shape.strips, "strip {strip} of {}", self.shape.strips);
        index(stripe % self.shape.stripes() as u64) * self.shape.strips + strip
    }

    /// The stripe and the strip with a number of [`Self::slot`] in a band.
    pub(crate) fn strip_of(&self, band: u64, slot: usize) -> (u64, usize) {
        let Shape { strips, .. } = self.shape;
        (band * self.shape.stripes() as u64 + (slot / strips) as u64, slot % strips)
    }

    pub(crate) fn place_of(&self, band: u64, slot: usize) -> Place {
        let used = self.shape.used();
        self.place_in(band, slot / used, slot % used)
    }

    /// The place at a cell of a row of a band.
    pub(crate) fn place_in(&self, band: u64, row: usize, cell: usize) -> Place {
        let (base, turn) = self.turn(band);
        let member = (base.member(cell) + turn) % self.shape.members;
        Place { member, row: band * self.shape.rows() as u64 + row as u64 }
    }

    /// The cell of a member in all rows of a band.
    pub(crate) fn cell(&self, band: u64, member: usize) -> usize {
        let (base, turn) = self.turn(band);
        base.cell((member + self.shape.members - turn) % self.shape.members)
    }

    /// The number of the spare place that lost strips of a band try first.
    pub(crate) fn first_spare(&self, band: u64) -> usize {
        match self.shape.spares {
            0 => 0,
            spares => first_spare(index(band % self.bases.len() as u64), spares),
        }
    }

    /// The base permutation of a band, and by how much its members have moved on.
    fn turn(&self, band: u64) -> (&Cells, usize) {
        let bases = self.bases.len() as u64;
        let turn = index(band / bases % self.shape.members as u64);
        (&self.bases[index(band % bases)], turn)
    }
}

#[cfg(test)]
mod homes;
#[cfg(test)]
mod tests;
