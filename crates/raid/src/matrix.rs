//! Coefficient matrices of up to 8 rows: the parity matrices that define the code, and the inversion of small
//! ones.
//!
//! The parity matrix of a geometry is a format (`docs/format/code.md`). If one cell changes, every array
//! written before becomes unreadable after a failure.
//!
//! Invariants of a parity matrix:
//! - row 0 is all ones, so parity strip 0 is the XOR of the data strips;
//! - column 0 is all ones, so every parity strip of a code with k = 1 is a mirror;
//! - the matrix for k data strips is the first k columns of the one for k + 1;
//! - the matrices for 5 to 7 parity strips are the first rows of the one for 8; the one for 4 stands alone;
//! - every square submatrix is invertible. For m <= 3 the minors are Vandermonde determinants of distinct
//!   points 2^j times a monomial, nonzero for j < 255. A Cauchy matrix has no zero minor, and scaling its
//!   rows and columns by nonzero factors keeps that property.

use crate::field::{invert, multiply, power_of_two};
use crate::{MAX_PARITY, MAX_STRIPS};

/// Rows of coefficients, one row for each output strip and one column for each source strip.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    rows: usize,
    columns: usize,
    /// Cells outside `rows` x `columns` are zero and never read.
    cells: [[u8; MAX_STRIPS]; MAX_PARITY],
    /// The shapes of rows 0 to 3 and of rows 4 to 7. `General` until [`Matrix::shaped`] sets them.
    shapes: [Shape; MAX_PARITY / GROUP_ROWS],
}

/// Maximum number of rows in a group that a kernel makes in one pass, limited by the registers for their
/// sums.
pub(crate) const GROUP_ROWS: usize = 4;

/// A property of the rows of a group that lets a kernel compute less. `General` is right for every group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Every product is computed.
    General,
    /// This row of the group is all ones: the kernel adds the sources to it without products.
    OnesRow(usize),
    /// Row r of the group holds the powers of 2^r, as in P, P+Q and P+Q+R. Horner's rule over the sources in
    /// falling order takes one constant for a row instead of one for each source.
    Powers,
    /// All rows are ones: every output is the same sum.
    Ones,
}

impl Matrix {
    /// A matrix of zeros.
    pub(crate) fn zero(rows: usize, columns: usize) -> Matrix {
        assert!(rows <= MAX_PARITY && columns <= MAX_STRIPS, "{rows} x {columns} matrix is too large");
        let shapes = [Shape::General; MAX_PARITY / GROUP_ROWS];
        Matrix { rows, columns, cells: [[0; MAX_STRIPS]; MAX_PARITY], shapes }
    }

    /// A matrix of ones.
    pub(crate) fn ones(rows: usize, columns: usize) -> Matrix {
        let mut matrix = Matrix::zero(rows, columns);
        for row in 0..rows {
            matrix.cells[row][..columns].fill(1);
        }
        matrix.shaped()
    }

    /// The parity matrix of the code k+m: cell (i, j) is the coefficient of data strip j in parity strip i.
    pub(crate) fn parity(k: usize, m: usize) -> Matrix {
        let mut matrix = Matrix::zero(m, k);
        for row in 0..m {
            for column in 0..k {
                *matrix.cell_mut(row, column) = match m {
                    0..=3 => power_of_two(row * column),
                    4 => cauchy(4, row, column),
                    _ => cauchy(8, row, column),
                };
            }
        }
        matrix.shaped()
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn row(&self, row: usize) -> &[u8] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &self.cells[row][..self.columns]
    }

    /// Returns the matrix with the shapes of its groups set. To be called when all cells are final.
    pub(crate) fn shaped(mut self) -> Matrix {
        for group in 0..self.rows.div_ceil(GROUP_ROWS) {
            let rows = group * GROUP_ROWS..self.rows.min((group + 1) * GROUP_ROWS);
            let is_ones = |row: &usize| self.row(*row).iter().all(|&cell| cell == 1);
            let is_powers = |row: &usize| {
                let mut cells = self.row(*row).iter().enumerate();
                cells.all(|(column, &cell)| cell == power_of_two((row - rows.start) * column))
            };
            self.shapes[group] = if rows.len() <= 3 && rows.clone().all(|row| is_powers(&row)) {
                Shape::Powers
            } else if rows.clone().all(|row| is_ones(&row)) {
                Shape::Ones
            } else {
                let ones = rows.clone().find(is_ones);
                ones.map_or(Shape::General, |row| Shape::OnesRow(row - rows.start))
            };
        }
        self
    }

    /// The shape of the group that begins with row `first_row`, a multiple of `GROUP_ROWS`.
    pub(crate) fn shape(&self, first_row: usize) -> Shape {
        assert!(first_row.is_multiple_of(GROUP_ROWS) && first_row < self.rows, "a group begins there");
        self.shapes[first_row / GROUP_ROWS]
    }

    pub(crate) fn cell(&self, row: usize, column: usize) -> u8 {
        self.row(row)[column]
    }

    pub(crate) fn cell_mut(&mut self, row: usize, column: usize) -> &mut u8 {
        assert!(row < self.rows && column < self.columns, "cell {row}, {column} is outside the matrix");
        &mut self.cells[row][column]
    }
}

/// A cell of a parity matrix of more than 3 rows: the Cauchy matrix 1 / (x_i + y_j) with x_i = i and y_j =
/// `points` + j, its rows and columns scaled so that row 0 and column 0 are all ones: (x_i + y_0) (x_0 + y_j)
/// / ((x_i + y_j) (x_0 + y_0)). There are at most `points` rows.
fn cauchy(points: usize, row: usize, column: usize) -> u8 {
    // At most 64 columns keep y_j below 72, and x_i < points <= y_j, so no sum is zero.
    assert!(row < points && points <= MAX_PARITY && column < MAX_STRIPS, "a cell of the proved matrices");
    let x = |i: usize| i as u8;
    let y = |j: usize| (points + j) as u8;
    let numerator = multiply(x(row) ^ y(0), x(0) ^ y(column));
    let denominator = multiply(x(row) ^ y(column), x(0) ^ y(0));
    multiply(numerator, invert(denominator))
}

/// A square matrix of up to 8 rows. Cells outside its size are never read.
pub(crate) type Square = [[u8; MAX_PARITY]; MAX_PARITY];

/// The inverse of the first `size` rows and columns of `square`, by Gauss-Jordan elimination.
///
/// `square` must be a submatrix of a parity matrix. Those are all invertible, so a missing pivot is a bug and
/// panics.
pub(crate) fn invert_square(mut square: Square, size: usize) -> Square {
    let mut inverse: Square = [[0; MAX_PARITY]; MAX_PARITY];
    for (i, row) in inverse.iter_mut().enumerate() {
        row[i] = 1;
    }
    for column in 0..size {
        let pivot_row = (column..size).find(|&row| square[row][column] != 0);
        let pivot_row = pivot_row.expect("a square submatrix of a parity matrix is invertible");
        square.swap(column, pivot_row);
        inverse.swap(column, pivot_row);

        let scale = invert(square[column][column]);
        for i in 0..size {
            square[column][i] = multiply(square[column][i], scale);
            inverse[column][i] = multiply(inverse[column][i], scale);
        }
        for row in (0..size).filter(|&row| row != column) {
            let factor = square[row][column];
            for i in 0..size {
                square[row][i] ^= multiply(factor, square[column][i]);
                inverse[row][i] ^= multiply(factor, inverse[column][i]);
            }
        }
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inverse_times_square_is_the_identity() {
        // The columns are far apart, and a zero on the diagonal forces a row swap.
        let mut square = [[0; MAX_PARITY]; MAX_PARITY];
        for (row, cells) in [[0, 1, 1, 1], [1, 0, 7, 9], [1, 3, 5, 0], [1, 250, 17, 4]].iter().enumerate() {
            square[row][..4].copy_from_slice(cells);
        }
        for size in 2..=4 {
            let inverse = invert_square(square, size);
            for cell in 0..size * size {
                let (i, j) = (cell / size, cell % size);
                let product = (0..size).fold(0, |sum, t| sum ^ multiply(inverse[i][t], square[t][j]));
                assert_eq!(product, u8::from(i == j), "size {size}, cell {i}, {j}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "is invertible")]
    fn singular_square_is_a_bug() {
        let mut square = [[0; MAX_PARITY]; MAX_PARITY];
        for cells in &mut square[..2] {
            cells[..2].copy_from_slice(&[1, 2]);
        }
        let _ = invert_square(square, 2);
    }
}
