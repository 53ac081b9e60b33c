//! Stripes that are spread over all members, with spare places in every row.
//!
//! A *column* is a place in a row before it is assigned to a member. The first columns hold strips, the last
//! ones are spare. Stripes follow each other through the columns of a *slice*, the fewest rows that whole
//! stripes fill. One permutation assigns the columns of all rows of a slice, so a stripe that goes on in the
//! next row still has its strips on different members. Slices use the base permutations in turn, and after
//! each round of them all members move on by one. So what two members have in common depends only on the
//! distance between them, a handful of base permutations makes it even, and every member has each column
//! equally often. (Permutation development, after Schwarz, Steinberg and Burkhard, 1999.)

use crate::search::{Columns, Loads};
use crate::shape::{LayoutError, Place, Shape, index};

/// A declustered layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declustered {
    shape: Shape,
    bases: Vec<Columns>,
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
    /// A layout with these base permutations: each names the member of every column. Fails if they do not fit
    /// the shape.
    pub fn new(shape: Shape, bases: &[Vec<u8>]) -> Result<Self, LayoutError> {
        shape.check()?;
        if bases.is_empty() {
            return Err(LayoutError::Shape("a layout has at least one base permutation".into()));
        }
        let column = |(number, base): (usize, &Vec<u8>)| {
            let columns = Columns::new(&shape, base);
            columns.map_err(|why| LayoutError::Base { number, why })
        };
        let bases = bases.iter().enumerate().map(column).collect::<Result<_, _>>()?;
        Ok(Self { shape, bases })
    }

    /// The parameters.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The base permutations, as [`Self::new`] takes them.
    pub fn bases(&self) -> Vec<Vec<u8>> {
        self.bases.iter().map(Columns::members).collect()
    }

    /// Stripes that fit in this many rows. Rows that fill no slice hold none.
    pub fn stripes(&self, rows: u64) -> u64 {
        rows / self.shape.rows() as u64 * self.shape.stripes() as u64
    }

    /// The rows after which the map of members repeats itself.
    pub fn period(&self) -> u64 {
        (self.bases.len() * self.shape.members * self.shape.rows()) as u64
    }

    /// The slice in which a stripe lies.
    pub fn slice_of(&self, stripe: u64) -> u64 {
        stripe / self.shape.stripes() as u64
    }

    /// The place of a strip.
    ///
    /// # Panics
    /// If a stripe has no such strip.
    pub fn place(&self, stripe: u64, strip: usize) -> Place {
        let slice = self.slice_of(stripe);
        self.place_of(slice, self.slot(stripe, strip))
    }

    /// The content of a place.
    ///
    /// # Panics
    /// If there is no such member.
    pub fn content(&self, place: Place) -> Content {
        let shape = &self.shape;
        assert!(place.member < shape.members, "member {} of {}", place.member, shape.members);
        let slice = place.row / shape.rows() as u64;
        let row = index(place.row % shape.rows() as u64);
        match self.column(slice, place.member) {
            column if column < shape.used() => {
                let (stripe, strip) = self.strip_of(slice, row * shape.used() + column);
                Content::Strip { stripe, strip }
            }
            column => Content::Spare(column - shape.used()),
        }
    }

    /// The excess above the mean of what the busiest member reads and writes when one member fails, as a
    /// share of the mean, over all rows of a period. With failure domains, the members of the domain that
    /// failed are compared with each other, and so are all others.
    pub fn imbalance(&self) -> f64 {
        let mut loads = Loads::new(self.shape);
        self.bases.iter().for_each(|base| loads.count(base));
        loads.imbalance()
    }

    /// The number of a strip among those of its slice.
    pub(crate) fn slot(&self, stripe: u64, strip: usize) -> usize {
        assert!(strip < self.shape.strips, "strip {strip} of {}", self.shape.strips);
        index(stripe % self.shape.stripes() as u64) * self.shape.strips + strip
    }

    /// The stripe and the strip with a number of [`Self::slot`] in a slice.
    pub(crate) fn strip_of(&self, slice: u64, slot: usize) -> (u64, usize) {
        let Shape { strips, .. } = self.shape;
        (slice * self.shape.stripes() as u64 + (slot / strips) as u64, slot % strips)
    }

    pub(crate) fn place_of(&self, slice: u64, slot: usize) -> Place {
        let used = self.shape.used();
        self.place_in(slice, slot / used, slot % used)
    }

    /// The place at a column of a row of a slice.
    pub(crate) fn place_in(&self, slice: u64, row: usize, column: usize) -> Place {
        let (base, turn) = self.turn(slice);
        let member = (base.member(column) + turn) % self.shape.members;
        Place { member, row: slice * self.shape.rows() as u64 + row as u64 }
    }

    /// The column of a member in all rows of a slice.
    pub(crate) fn column(&self, slice: u64, member: usize) -> usize {
        let (base, turn) = self.turn(slice);
        base.column((member + self.shape.members - turn) % self.shape.members)
    }

    /// The base permutation of a slice, and by how much its members have moved on.
    fn turn(&self, slice: u64) -> (&Columns, usize) {
        let bases = self.bases.len() as u64;
        let turn = index(slice / bases % self.shape.members as u64);
        (&self.bases[index(slice % bases)], turn)
    }
}

#[cfg(test)]
mod tests;
