//! Tables of coefficients and CRC remainders in the layout of `kernels/code.cu`.

use penstock_base::ZERO_BLOCK_CRC;

/// The number of threads that compute the checksum of a block together.
pub(crate) const WARP: usize = 32;

/// For each coefficient of `rows` x `k`, row by row, eight words: the coefficient times 2^bit for each bit of
/// a byte, repeated in all four bytes of the word.
pub(crate) fn products(rows: usize, k: usize, cell: impl Fn(usize, usize) -> u8) -> Vec<u32> {
    let bits = |cell: u8| std::iter::successors(Some(cell), |byte| Some(double(*byte))).take(8);
    let cells = (0..rows).flat_map(|row| (0..k).map(move |column| (row, column)));
    cells
        .flat_map(|(row, column)| bits(cell(row, column)))
        .map(|byte| u32::from(byte) * 0x0101_0101)
        .collect()
}

/// True if every row r of the coefficients holds the powers of 2^r.
pub(crate) fn are_powers(rows: usize, k: usize, cell: impl Fn(usize, usize) -> u8) -> bool {
    let power = |exponent: usize| (0..exponent).fold(1, |byte, _| double(byte));
    (0..rows).all(|row| (0..k).all(|column| cell(row, column) == power(row * column)))
}

/// Doubles a byte in GF(2^8) modulo 0x11d (docs/format/code.md).
fn double(byte: u8) -> u8 {
    (byte << 1) ^ ((byte >> 7) * 0x1d)
}

/// The tables for CRC32C: four tables that advance a remainder by one word of each lane of a warp, then for
/// each lane the factor for the words after its last one, then the CRC of a block of zeros. Remainders are
/// bit-reflected: x^0 is the highest bit.
pub(crate) fn checksums() -> Vec<u32> {
    let on = power_of_x(32 * WARP as u32);
    let moved = |byte: u32, value: u32| multiply(value << (8 * byte), on);
    let tables = (0..4).flat_map(|byte| (0..256).map(move |value| (byte, value)));
    let mut words: Vec<u32> = tables.map(|(byte, value)| moved(byte, value)).collect();
    words.extend((0..WARP as u32).map(|lane| power_of_x(32 * (WARP as u32 - lane))));
    words.push(ZERO_BLOCK_CRC);
    words
}

fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..32).rev() {
        product ^= if a >> bit & 1 != 0 { b } else { 0 };
        b = times_x(b);
    }
    product
}

fn power_of_x(exponent: u32) -> u32 {
    (0..exponent).fold(1 << 31, |power, _| times_x(power))
}

fn times_x(remainder: u32) -> u32 {
    (remainder >> 1) ^ if remainder & 1 != 0 { 0x82f6_3b78 } else { 0 }
}
