//! Tests that any k strips determine all others: no minor of a parity matrix is zero.
//!
//! A stripe that lost data strips U is decodable from the parity rows R exactly if the minor (R, U) is
//! nonzero. The matrix for k data strips is a prefix of the one for the largest k, so the minors of the
//! largest matrix include all others. For m <= 4 the tests compute all of them. For m of 5 to 8 they check
//! every cell against the Cauchy matrix, whose minors are nonzero, and compute a sample of minors.

use crate::field::{invert, multiply, power};
use crate::random::Random;
use crate::stripe::subsets;
use penstock_raid::{Code, MAX_PARITY, MAX_STRIPS};

/// The rows and columns of a square submatrix.
type Minor = (Vec<usize>, Vec<usize>);

/// A 64 KiB table of `multiply`, for more than half a million determinants.
struct Products(Vec<[u8; 256]>);

impl Products {
    fn new() -> Products {
        Products((0..=255).map(|a| std::array::from_fn(|b| multiply(a, b as u8))).collect())
    }

    fn multiply(&self, a: u8, b: u8) -> u8 {
        self.0[usize::from(a)][usize::from(b)]
    }

    /// The determinant by expansion along the first of `rows`. In this field minus is plus, so there are no
    /// signs.
    fn determinant(&self, matrix: &[Vec<u8>], rows: &[usize], columns: &[usize]) -> u8 {
        let Some((&row, rows)) = rows.split_first() else {
            return 1;
        };
        let mut sum = 0;
        for (i, &column) in columns.iter().enumerate() {
            let mut others = [0; MAX_PARITY];
            let others = &mut others[..columns.len() - 1];
            others[..i].copy_from_slice(&columns[..i]);
            others[i..].copy_from_slice(&columns[i + 1..]);
            sum ^= self.multiply(matrix[row][column], self.determinant(matrix, rows, others));
        }
        sum
    }

    /// The number of minors that were computed, and the first that is zero.
    fn zero_minor(&self, matrix: &[Vec<u8>]) -> (usize, Option<Minor>) {
        let mut count = 0;
        for size in 1..=matrix.len() {
            let all_columns = subsets(matrix[0].len(), size);
            for rows in subsets(matrix.len(), size) {
                for columns in &all_columns {
                    count += 1;
                    if self.determinant(matrix, &rows, columns) == 0 {
                        return (count, Some((rows, columns.clone())));
                    }
                }
            }
        }
        (count, None)
    }
}

fn parity_matrix(code: &Code) -> Vec<Vec<u8>> {
    (0..code.m()).map(|row| (0..code.k()).map(|column| code.coefficient(row, column)).collect()).collect()
}

#[test]
fn no_minor_of_any_geometry_is_zero() {
    let products = Products::new();
    // The sum over s of C(m, s) C(64 - m, s): every choice of rows and columns.
    for (m, minors) in [(1, 63), (2, 2015), (3, 41_663), (4, 635_375)] {
        let code = Code::new(MAX_STRIPS - m, m).unwrap();
        assert_eq!(products.zero_minor(&parity_matrix(&code)), (minors, None), "{}+{m}", code.k());
    }
}

#[test]
fn smaller_codes_are_prefixes_of_the_largest() {
    for m in 0..=MAX_PARITY {
        let largest = parity_matrix(&Code::new(MAX_STRIPS - m, m).unwrap());
        for k in 1..=MAX_STRIPS - m {
            let code = Code::new(k, m).unwrap();
            assert_eq!((code.k(), code.m()), (k, m));
            for (row, cells) in parity_matrix(&code).iter().enumerate() {
                assert_eq!(*cells, largest[row][..k], "{k}+{m} row {row}");
            }
        }
    }
}

#[test]
fn row_and_column_0_are_ones() {
    for m in 1..=MAX_PARITY {
        let matrix = parity_matrix(&Code::new(MAX_STRIPS - m, m).unwrap());
        assert!(matrix[0].iter().all(|&cell| cell == 1), "row 0 of m = {m}");
        assert!(matrix.iter().all(|row| row[0] == 1), "column 0 of m = {m}");
    }
}

#[test]
fn cells_follow_the_formulas_of_the_format() {
    for m in 1..=3 {
        for (row, cells) in parity_matrix(&Code::new(MAX_STRIPS - m, m).unwrap()).iter().enumerate() {
            for (column, &cell) in cells.iter().enumerate() {
                assert_eq!(cell, power(power(2, row), column), "m = {m}, cell {row}, {column}");
            }
        }
    }
    for (m, points) in [(4, 4), (5, 8), (6, 8), (7, 8), (8, 8)] {
        for (row, cells) in parity_matrix(&Code::new(MAX_STRIPS - m, m).unwrap()).iter().enumerate() {
            for (column, &cell) in cells.iter().enumerate() {
                let cauchy = |i: usize, j: usize| cauchy(points, i, j);
                let scaled = multiply(cauchy(row, column), cauchy(0, 0));
                let by = multiply(invert(cauchy(row, 0)), invert(cauchy(0, column)));
                assert_eq!(cell, multiply(scaled, by), "m = {m}, cell {row}, {column}");
            }
        }
    }
}

/// A cell of the unscaled matrix. All `i` and `points + j` are distinct as long as i < points.
fn cauchy(points: usize, i: usize, j: usize) -> u8 {
    invert(i as u8 ^ (points + j) as u8)
}

/// The minor (rows, columns) is the determinant of the Cauchy matrix times the factors of its rows and
/// columns. That determinant is a product of differences over a product of sums, and has no zero factor.
#[test]
fn minors_of_five_to_eight_rows_are_those_of_a_cauchy_matrix() {
    let (products, mut random) = (Products::new(), Random::new(7));
    for m in 5..=MAX_PARITY {
        let matrix = parity_matrix(&Code::new(MAX_STRIPS - m, m).unwrap());
        for _ in 0..400 {
            let size = 1 + random.below(m);
            let (rows, columns) = (sample(&mut random, m, size), sample(&mut random, MAX_STRIPS - m, size));
            let mut expected = 1;
            let mut times = |factor| expected = multiply(expected, factor);
            for (i, &row) in rows.iter().enumerate() {
                for (j, &column) in columns.iter().enumerate() {
                    times(cauchy(8, row, column));
                    if j > i {
                        times(row as u8 ^ rows[j] as u8);
                        times((8 + columns[i]) as u8 ^ (8 + column) as u8);
                    }
                }
                times(multiply(invert(cauchy(8, row, 0)), cauchy(8, 0, 0)));
                times(invert(cauchy(8, 0, columns[i])));
            }
            assert_ne!(expected, 0, "no factor is zero");
            assert_eq!(
                products.determinant(&matrix, &rows, &columns),
                expected,
                "m = {m}: {rows:?} {columns:?}"
            );
        }
    }
}

fn sample(random: &mut Random, below: usize, count: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..below).collect();
    let mut sample: Vec<usize> = (0..count).map(|_| all.swap_remove(random.below(all.len()))).collect();
    sample.sort_unstable();
    sample
}

#[test]
fn five_to_seven_rows_are_the_first_of_eight() {
    let eight = parity_matrix(&Code::new(MAX_STRIPS - 8, 8).unwrap());
    for m in 5..8 {
        let fewer = parity_matrix(&Code::new(MAX_STRIPS - 8, m).unwrap());
        assert_eq!(fewer, eight[..m], "m = {m}");
    }
}

/// Shows why m = 4 is not simply a fourth row 8^j: the check must find the zero minor.
#[test]
fn four_vandermonde_rows_fail_from_22_data_strips() {
    let products = Products::new();
    let rows =
        |k| -> Vec<Vec<u8>> { (0..4).map(|i| (0..k).map(|j| power(power(2, i), j)).collect()).collect() };
    assert_eq!(products.zero_minor(&rows(21)).1, None);
    assert_eq!(products.zero_minor(&rows(22)).1, Some((vec![0, 1, 3], vec![0, 10, 21])));
}
