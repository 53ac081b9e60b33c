//! A group of outputs that one pass over the sources makes.

use crate::matrix::{Matrix, Shape};
use std::ops::Range;

/// A pass over a range of strips that makes a group of outputs. The outputs are the rows of the matrix from
/// `first_row` on; there are at least one and at most [`GROUP_ROWS`] of them.
pub(super) struct Group<'a, 'b> {
    pub(super) matrix: &'a Matrix,
    pub(super) first_row: usize,
    pub(super) sources: &'a [&'a [u8]],
    pub(super) outputs: &'a mut [&'b mut [u8]],
    pub(super) range: Range<usize>,
    pub(super) cold: bool,
}

impl Group<'_, '_> {
    /// The shape of the group's coefficients.
    pub(super) fn shape(&self) -> Shape {
        self.matrix.shape(self.first_row)
    }
}
