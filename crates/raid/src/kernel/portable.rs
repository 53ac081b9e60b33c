//! The portable tier and reference of the family: a table look-up for each byte product, XOR for coefficient 1.
//!
//! The caller (`Kernel`) has asserted shapes and lengths. Each source is read once for each output; the loop of
//! coefficient 1 is left to the compiler to vectorise.

use crate::field::multiply;
use crate::matrix::Matrix;

/// `PRODUCTS[a][b]` is a * b: 64 KiB, of which a call touches 256 bytes for each distinct coefficient.
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

pub(super) fn dot(matrix: &Matrix, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
    for (row, output) in outputs.iter_mut().enumerate() {
        output.fill(0);
        for (&coefficient, source) in matrix.row(row).iter().zip(sources) {
            if coefficient == 1 {
                output.iter_mut().zip(*source).for_each(|(sum, byte)| *sum ^= byte);
            } else {
                let products = &PRODUCTS[usize::from(coefficient)];
                output.iter_mut().zip(*source).for_each(|(sum, &byte)| *sum ^= products[usize::from(byte)]);
            }
        }
    }
}

pub(super) fn multiply_add(coefficients: &[u8], old: &[u8], new: &[u8], outputs: &mut [&mut [u8]]) {
    for (&coefficient, output) in coefficients.iter().zip(outputs) {
        let deltas = old.iter().zip(new).map(|(old, new)| old ^ new);
        if coefficient == 1 {
            output.iter_mut().zip(deltas).for_each(|(sum, delta)| *sum ^= delta);
        } else {
            let products = &PRODUCTS[usize::from(coefficient)];
            output.iter_mut().zip(deltas).for_each(|(sum, delta)| *sum ^= products[usize::from(delta)]);
        }
    }
}
