//! Decode plans: which k strips to read, and the coefficients that make the lost strips from them.
//!
//! Invariants of a plan:
//! - The sources are k distinct positions in rising order, none of them lost, so data strips come first. Of
//!   the parity strips they include the lowest: one lost data strip is made from the other data strips and
//!   the XOR strip alone.
//! - Every coefficient is nonzero, because in an MDS code no strip is determined by fewer than k others.
//!
//! A plan depends on positions only, never on content, so one plan serves every stripe with the same losses.
//! Making a plan costs about e^2 k multiplications for e unread data strips, since only an e x e system is
//! solved.

use crate::field::multiply;
use crate::kernel::{Checksums, Kernel, Residency};
use crate::matrix::{Matrix, Square, invert_square};
use crate::{CodeError, MAX_PARITY};

/// A plan for making some strips of a stripe from k others. Made by [`Code::plan`](crate::Code::plan) or
/// [`Code::plan_with`](crate::Code::plan_with).
#[derive(Clone, Debug)]
pub struct DecodePlan {
    sources: Vec<usize>,
    lost: Vec<usize>,
    /// Row i makes `lost[i]`; column j belongs to `sources[j]`.
    matrix: Matrix,
    kernel: Kernel,
}

impl DecodePlan {
    /// The positions to read: exactly k, in rising order, data strips first.
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// The positions that the plan makes, in the order of the caller's list.
    pub fn lost(&self) -> &[usize] {
        &self.lost
    }

    /// The coefficient of source `column` (0..k) in the strip `lost()[row]`.
    pub fn coefficient(&self, row: usize, column: usize) -> u8 {
        self.matrix.cell(row, column)
    }

    /// Makes the strips at `lost()` into `out` from the strips at `sources()`, each in that order.
    ///
    /// All slices have the same length. They may cover any byte range of the strips, the same range in all of
    /// them.
    pub fn decode(&self, sources: &[&[u8]], out: &mut [&mut [u8]]) {
        self.decode_with(sources, out, Residency::Warm, None);
    }

    /// As [`DecodePlan::decode`], with a hint where the sources are, and with the checksums of all strips if
    /// `checksums` is given.
    pub fn decode_with(
        &self,
        sources: &[&[u8]],
        out: &mut [&mut [u8]],
        residency: Residency,
        checksums: Option<Checksums<'_>>,
    ) {
        self.kernel.dot(&self.matrix, sources, out, residency, checksums);
    }

    /// A plan that reads the first k positions that are not lost.
    pub(crate) fn from_survivors(
        parity: &Matrix,
        kernel: Kernel,
        lost: &[usize],
    ) -> Result<DecodePlan, CodeError> {
        let strips = parity.columns() + parity.rows();
        let lost_set = position_set(lost, strips)?;
        if lost.len() > parity.rows() {
            return Err(CodeError::TooManyLost { lost: lost.len(), allowed: parity.rows() });
        }
        Ok(DecodePlan::new(parity, kernel, !lost_set, lost))
    }

    /// A plan that reads the first k positions that are available and not wanted.
    pub(crate) fn from_available(
        parity: &Matrix,
        kernel: Kernel,
        available: &[usize],
        wanted: &[usize],
    ) -> Result<DecodePlan, CodeError> {
        let strips = parity.columns() + parity.rows();
        let usable_set = position_set(available, strips)? & !position_set(wanted, strips)?;
        let usable = usable_set.count_ones() as usize;
        if usable < parity.columns() {
            return Err(CodeError::TooFewSources { available: usable, required: parity.columns() });
        }
        Ok(DecodePlan::new(parity, kernel, usable_set, wanted))
    }

    /// A plan that reads the first k positions of `usable_set` (bit i for position i), which has at least k
    /// and none of `lost`.
    fn new(parity: &Matrix, kernel: Kernel, usable_set: u64, lost: &[usize]) -> DecodePlan {
        let (k, m) = (parity.columns(), parity.rows());
        let sources: Vec<usize> =
            (0..k + m).filter(|&position| usable_set >> position & 1 != 0).take(k).collect();
        assert_eq!(sources.len(), k, "a plan reads exactly k strips");
        assert!(lost.len() <= m, "k sources leave m positions");

        let unread: Vec<usize> = (0..k).filter(|position| !sources.contains(position)).collect();
        let unread_rows = unread_data(parity, &sources, &unread);
        let mut matrix = Matrix::zero(lost.len(), k);
        for (row, &position) in lost.iter().enumerate() {
            for column in 0..k {
                *matrix.cell_mut(row, column) = if position < k {
                    let of = unread.iter().position(|&data| data == position);
                    unread_rows.cell(of.expect("a lost data strip is not a source"), column)
                } else {
                    parity_cell(parity, position - k, &sources, &unread, &unread_rows, column)
                };
                assert!(matrix.cell(row, column) != 0, "a source without effect: the code is not MDS");
            }
        }
        DecodePlan { sources, lost: lost.to_vec(), matrix: matrix.shaped(), kernel }
    }
}

/// The positions as a bit set.
fn position_set(positions: &[usize], strips: usize) -> Result<u64, CodeError> {
    let mut set = 0_u64;
    for &position in positions {
        if position >= strips {
            return Err(CodeError::NoSuchPosition { position, strips });
        }
        if set >> position & 1 != 0 {
            return Err(CodeError::RepeatedPosition { position });
        }
        set |= 1 << position;
    }
    Ok(set)
}

/// Rows that make the data strips at the positions `unread` from the sources.
///
/// Let A be the columns `unread` of the e parity rows among the sources, and B their other columns. Then A
/// unread + B data = parity, so unread = A^-1 parity + A^-1 B data (minus is plus).
fn unread_data(parity: &Matrix, sources: &[usize], unread: &[usize]) -> Matrix {
    let k = parity.columns();
    let parity_rows: Vec<usize> = sources.iter().filter_map(|position| position.checked_sub(k)).collect();
    assert_eq!(parity_rows.len(), unread.len(), "each unread data strip has its parity strip");

    let mut square: Square = [[0; MAX_PARITY]; MAX_PARITY];
    for (i, &row) in parity_rows.iter().enumerate() {
        for (j, &column) in unread.iter().enumerate() {
            square[i][j] = parity.cell(row, column);
        }
    }
    let inverse = invert_square(square, unread.len());

    let mut made = Matrix::zero(unread.len(), k);
    for (i, inverse_row) in inverse.iter().enumerate().take(unread.len()) {
        for (column, &position) in sources.iter().enumerate() {
            *made.cell_mut(i, column) = if position < k {
                let products = parity_rows
                    .iter()
                    .zip(inverse_row)
                    .map(|(&row, &a)| multiply(a, parity.cell(row, position)));
                products.fold(0, |sum, product| sum ^ product)
            } else {
                let of = parity_rows.iter().position(|&row| row == position - k);
                inverse_row[of.expect("parity_rows has every parity source")]
            };
        }
    }
    made
}

/// The coefficient of source `column` in the parity strip `row`: its own coefficient if it is a data strip,
/// plus its share through the unread data strips.
fn parity_cell(
    parity: &Matrix,
    row: usize,
    sources: &[usize],
    unread: &[usize],
    unread_rows: &Matrix,
    column: usize,
) -> u8 {
    let position = sources[column];
    let own = if position < parity.columns() { parity.cell(row, position) } else { 0 };
    let products = unread
        .iter()
        .enumerate()
        .map(|(i, &data)| multiply(parity.cell(row, data), unread_rows.cell(i, column)));
    products.fold(own, |sum, product| sum ^ product)
}
