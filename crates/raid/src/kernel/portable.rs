//! The portable tier, which is the reference for all others and runs on every processor.
//!
//! A product is a table look-up for each byte; coefficient 1 is an XOR; the powers of P+Q and P+Q+R use
//! Horner's rule on eight bytes at a time. The caller (`Kernel`) has asserted shapes and lengths. Each source
//! is read once for each output. The compiler vectorises the loops without tables.

use super::group::Group;
use super::tier::Tier;
use crate::field::multiply;
use crate::matrix::Shape;
use std::ops::Range;

/// `PRODUCTS[a][b]` is a * b. The table has 64 KiB; a call touches 256 bytes of it for each distinct
/// coefficient.
static PRODUCTS: [[u8; 256]; 256] = products();

const fn products() -> [[u8; 256]; 256] {
    let mut table = [[0; 256]; 256];
    let mut a = 0;
    while a < 256 {
        let mut b = 0;
        while b < 256 {
            table[a][b] = multiply(a as u8, b as u8);
            b += 1;
        }
        a += 1;
    }
    table
}

pub(super) const TIER: Tier = Tier {
    is_available: || true,
    vector_bytes: 1,
    dot,
    dot_checked: None,
    multiply_add: |coefficients, old, new, outputs, bytes| {
        multiply_add(coefficients, old, new, outputs, 0..bytes);
    },
    read: |bytes, _cold| bytes.iter().fold(0, |sum, byte| sum ^ byte),
    fill: |bytes, _cold| bytes.fill(0),
};

pub(super) fn dot(group: &mut Group<'_, '_>) {
    let powers = group.shape() == Shape::Powers;
    for (row, output) in group.outputs.iter_mut().enumerate() {
        let output = &mut output[group.range.clone()];
        output.fill(0);
        let cells = group.matrix.row(group.first_row + row);
        let sources = cells.iter().zip(group.sources.iter().map(|source| &source[group.range.clone()]));
        match powers && row > 0 {
            true => sources.rev().for_each(|(_, source)| horner(row, output, source)),
            false => sources.for_each(|(&coefficient, source)| add_product(coefficient, source, output)),
        }
    }
}

fn add_product(coefficient: u8, source: &[u8], output: &mut [u8]) {
    if coefficient == 1 {
        output.iter_mut().zip(source).for_each(|(sum, byte)| *sum ^= byte);
    } else {
        let products = &PRODUCTS[usize::from(coefficient)];
        output.iter_mut().zip(source).for_each(|(sum, &byte)| *sum ^= products[usize::from(byte)]);
    }
}

/// Sets `output` to `output` times 2^power, plus `source`.
fn horner(power: usize, output: &mut [u8], source: &[u8]) {
    let (words, rest) = output.as_chunks_mut::<8>();
    let (source_words, source_rest) = source.as_chunks::<8>();
    for (word, source) in words.iter_mut().zip(source_words) {
        let times = (0..power).fold(u64::from_le_bytes(*word), |word, _| double(word));
        *word = (times ^ u64::from_le_bytes(*source)).to_le_bytes();
    }
    for (byte, source) in rest.iter_mut().zip(source_rest) {
        *byte = (0..power).fold(*byte, |byte, _| multiply(byte, 2)) ^ source;
    }
}

/// Doubles each of eight bytes: shifts it, and reduces it by 0x1d where its highest bit drops out.
fn double(word: u64) -> u64 {
    let carries = word >> 7 & 0x0101_0101_0101_0101;
    ((word & 0x7f7f_7f7f_7f7f_7f7f) << 1) ^ (carries * 0x1d)
}

/// `Kernel::multiply_add` over one byte range.
pub(super) fn multiply_add(
    coefficients: &[u8],
    old: &[u8],
    new: &[u8],
    outputs: &mut [&mut [u8]],
    range: Range<usize>,
) {
    for (&coefficient, output) in coefficients.iter().zip(outputs) {
        let output = &mut output[range.clone()];
        let deltas = old[range.clone()].iter().zip(&new[range.clone()]).map(|(old, new)| old ^ new);
        if coefficient == 1 {
            output.iter_mut().zip(deltas).for_each(|(sum, delta)| *sum ^= delta);
        } else {
            let products = &PRODUCTS[usize::from(coefficient)];
            output.iter_mut().zip(deltas).for_each(|(sum, delta)| *sum ^= products[usize::from(delta)]);
        }
    }
}
