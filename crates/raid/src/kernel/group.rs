//! A group of outputs: what one pass over the sources makes.

use crate::matrix::{Matrix, Shape};
use std::ops::Range;

/// A pass over a range of strips that makes a group of outputs: rows `first_row` on of the matrix, as many as
/// there are `outputs`: at least one, at most [`GROUP_ROWS`].
pub(super) struct Group<'a, 'b> {
    pub(super) matrix: &'a Matrix,
    pub(super) first_row: usize,
    pub(super) sources: &'a [&'a [u8]],
    pub(super) outputs: &'a mut [&'b mut [u8]],
    pub(super) range: Range<usize>,
    pub(super) cold: bool,
}

impl Group<'_, '_> {
    /// What is special about the coefficients.
    pub(super) fn shape(&self) -> Shape {
        self.matrix.shape(self.first_row)
    }
}
