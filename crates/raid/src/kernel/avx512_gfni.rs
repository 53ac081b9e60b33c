//! The AVX-512 tier: a product by a constant is one GFNI affine instruction on 64 bytes.
//!
//! Shape of `dot`: a column of 512 bytes (one output) or 256 bytes (two to four) is held in registers for all
//! outputs while the sources pass by in pairs; `vpternlogq` adds both products of a pair at once, and a row of
//! ones is added without any product. So each source is read once, each output written once, and a matrix is
//! broadcast once for each column instead of each vector.
//!
//! Every load and store has a mask: what is left of a strip after its columns needs one, and where the mask is a
//! constant of ones the compiler makes plain moves. Stores are ordinary ones: parity is soon read again
//! (checksums, drives).
//!
//! Follows the shape of ISA-L's `gf_Nvect_dot_prod_avx512_gfni`, with wider columns.
//!
//! Safety invariant: the functions below `dot` and `multiply_add` read and write `strip_bytes` bytes of each
//! strip and no byte outside, through pointers that these two took from slices of exactly that length.

use crate::field::multiply;
use crate::matrix::Matrix;
use crate::{MAX_PARITY, MAX_STRIPS};
use std::arch::x86_64::*;

/// Bytes of one vector register.
const VECTOR_BYTES: usize = size_of::<__m512i>();

/// Vectors of a column for two to four outputs: 16 sums, 8 source vectors, 2 matrices and 2 products fit the
/// 32 registers.
const VECTORS: usize = 4;

/// Vectors of a column for one output.
const VECTORS_SINGLE: usize = 8;

/// `vpternlogq` truth table of a three-way XOR.
const XOR3: i32 = 0x96;

/// `AFFINE[a]` is the bit matrix of "times a" as the affine instruction takes it.
static AFFINE: [u64; 256] = affine_table();

/// Bit i of a product is the parity of byte 7 - i of the matrix and the operand. Bit j of that byte is
/// therefore bit i of a * 2^j.
const fn affine_table() -> [u64; 256] {
    let mut table = [0; 256];
    let mut a = 0;
    while a < 256 {
        let mut j = 0;
        while j < 8 {
            let product = multiply(a as u8, 1 << j) as u64;
            let mut i = 0;
            while i < 8 {
                table[a] |= (product >> i & 1) << (8 * (7 - i) + j);
                i += 1;
            }
            j += 1;
        }
        a += 1;
    }
    table
}

/// Whether processor and operating system support this tier.
pub(super) fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("gfni")
}

/// See `Kernel::dot`, which has asserted the shape.
pub(super) fn dot(matrix: &Matrix, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
    match outputs.len() {
        0 => {}
        1 => dot_rows::<1, VECTORS_SINGLE>(matrix, sources, outputs),
        2 => dot_rows::<2, VECTORS>(matrix, sources, outputs),
        3 => dot_rows::<3, VECTORS>(matrix, sources, outputs),
        4 => dot_rows::<4, VECTORS>(matrix, sources, outputs),
        rows => unreachable!("{rows} outputs, at most {MAX_PARITY}"),
    }
}

/// See `Kernel::multiply_add`, which has asserted the shape.
pub(super) fn multiply_add(coefficients: &[u8], old: &[u8], new: &[u8], outputs: &mut [&mut [u8]]) {
    match outputs.len() {
        0 => {}
        1 => multiply_add_rows::<1>(coefficients, old, new, outputs),
        2 => multiply_add_rows::<2>(coefficients, old, new, outputs),
        3 => multiply_add_rows::<3>(coefficients, old, new, outputs),
        4 => multiply_add_rows::<4>(coefficients, old, new, outputs),
        rows => unreachable!("{rows} outputs, at most {MAX_PARITY}"),
    }
}

/// What `dot_strips` works on: pointers to `strip_bytes` bytes each, and a matrix for each source and output.
struct Dot<'a, const ROWS: usize> {
    sources: &'a [&'a [u8]],
    matrices: &'a [[u64; ROWS]],
    outputs: [*mut u8; ROWS],
    strip_bytes: usize,
}

fn dot_rows<const ROWS: usize, const COLUMN_VECTORS: usize>(
    matrix: &Matrix,
    sources: &[&[u8]],
    outputs: &mut [&mut [u8]],
) {
    assert!(is_available(), "a code never holds a kernel that the processor lacks");
    assert!(outputs.len() == ROWS && sources.len() <= MAX_STRIPS, "shape of the matrix");
    let strip_bytes = sources[0].len();
    assert!(sources.iter().all(|strip| strip.len() == strip_bytes), "source strips differ in length");
    assert!(outputs.iter().all(|strip| strip.len() == strip_bytes), "output strips differ in length");

    // A row of ones, if there is one, is worked on as row 0.
    let xor_row = (0..ROWS).find(|&row| matrix.row(row).iter().all(|&coefficient| coefficient == 1));
    let mut order: [usize; ROWS] = std::array::from_fn(|row| row);
    order.swap(0, xor_row.unwrap_or(0));

    let mut matrices = [[0; ROWS]; MAX_STRIPS];
    for (i, &row) in order.iter().enumerate() {
        for (of_source, &coefficient) in matrices.iter_mut().zip(matrix.row(row)) {
            of_source[i] = AFFINE[usize::from(coefficient)];
        }
    }
    let dot = Dot {
        sources,
        matrices: &matrices[..sources.len()],
        outputs: order.map(|row| outputs[row].as_mut_ptr()),
        strip_bytes,
    };
    // SAFETY: the features are there and every source and output has `strip_bytes` bytes, both asserted above;
    // the outputs are borrowed exclusively until this function returns.
    unsafe {
        if xor_row.is_some() {
            dot_strips::<ROWS, COLUMN_VECTORS, true>(&dot);
        } else {
            dot_strips::<ROWS, COLUMN_VECTORS, false>(&dot);
        }
    }
}

/// # Safety
///
/// The processor has the features; every source and output of `dot` has `strip_bytes` bytes, and nobody else
/// has access to the outputs.
#[target_feature(enable = "avx512f,avx512bw,gfni")]
unsafe fn dot_strips<const ROWS: usize, const COLUMN_VECTORS: usize, const XOR: bool>(dot: &Dot<'_, ROWS>) {
    let column_bytes = COLUMN_VECTORS * VECTOR_BYTES;
    let mut offset = 0;
    while dot.strip_bytes - offset >= column_bytes {
        // SAFETY: as this function demands, and `offset + column_bytes <= strip_bytes`.
        unsafe { dot_column::<ROWS, COLUMN_VECTORS, XOR>(dot, offset, u64::MAX) };
        offset += column_bytes;
    }
    while offset < dot.strip_bytes {
        // SAFETY: as this function demands, and the mask covers no byte at or after `strip_bytes`.
        unsafe { dot_column::<ROWS, 1, XOR>(dot, offset, tail_mask(dot.strip_bytes - offset)) };
        offset += VECTOR_BYTES;
    }
}

/// One column of all outputs, from all sources.
///
/// # Safety
///
/// As for `dot_strips`, and the bytes in `mask` of each vector of the column at `offset` are inside the strips.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
unsafe fn dot_column<const ROWS: usize, const COLUMN_VECTORS: usize, const XOR: bool>(
    dot: &Dot<'_, ROWS>,
    offset: usize,
    mask: u64,
) {
    let mut sums = [[_mm512_setzero_si512(); COLUMN_VECTORS]; ROWS];
    let mut source_pairs = dot.sources.chunks_exact(2);
    let mut matrix_pairs = dot.matrices.chunks_exact(2);
    for (source, matrices) in source_pairs.by_ref().zip(matrix_pairs.by_ref()) {
        // SAFETY: the column is inside both sources, by this function's own condition.
        let (a, b): ([__m512i; COLUMN_VECTORS], [__m512i; COLUMN_VECTORS]) = unsafe {
            (
                load_column(source[0].as_ptr().add(offset), mask),
                load_column(source[1].as_ptr().add(offset), mask),
            )
        };
        for row in 0..ROWS {
            let times_a = _mm512_set1_epi64(matrices[0][row].cast_signed());
            let times_b = _mm512_set1_epi64(matrices[1][row].cast_signed());
            for i in 0..COLUMN_VECTORS {
                let (a, b) = if XOR && row == 0 {
                    (a[i], b[i])
                } else {
                    (
                        _mm512_gf2p8affine_epi64_epi8::<0>(a[i], times_a),
                        _mm512_gf2p8affine_epi64_epi8::<0>(b[i], times_b),
                    )
                };
                sums[row][i] = _mm512_ternarylogic_epi64::<XOR3>(sums[row][i], a, b);
            }
        }
    }
    if let ([source], [matrices]) = (source_pairs.remainder(), matrix_pairs.remainder()) {
        // SAFETY: the column is inside the source, by this function's own condition.
        let a: [__m512i; COLUMN_VECTORS] = unsafe { load_column(source.as_ptr().add(offset), mask) };
        for row in 0..ROWS {
            let times_a = _mm512_set1_epi64(matrices[row].cast_signed());
            for i in 0..COLUMN_VECTORS {
                let a =
                    if XOR && row == 0 { a[i] } else { _mm512_gf2p8affine_epi64_epi8::<0>(a[i], times_a) };
                sums[row][i] = _mm512_xor_si512(sums[row][i], a);
            }
        }
    }
    for (output, sums) in dot.outputs.iter().zip(&sums) {
        // SAFETY: the column is inside the output, by this function's own condition.
        unsafe { store_column(output.add(offset), sums, mask) };
    }
}

fn multiply_add_rows<const ROWS: usize>(
    coefficients: &[u8],
    old: &[u8],
    new: &[u8],
    outputs: &mut [&mut [u8]],
) {
    assert!(is_available(), "a code never holds a kernel that the processor lacks");
    assert!(coefficients.len() == ROWS && outputs.len() == ROWS, "one coefficient for each output");
    let strip_bytes = old.len();
    assert_eq!(new.len(), strip_bytes, "old and new strip differ in length");
    assert!(outputs.iter().all(|strip| strip.len() == strip_bytes), "output strips differ in length");

    let matrices: [u64; ROWS] = std::array::from_fn(|row| AFFINE[usize::from(coefficients[row])]);
    let outputs: [*mut u8; ROWS] = std::array::from_fn(|row| outputs[row].as_mut_ptr());
    // SAFETY: the features are there and all strips have `strip_bytes` bytes, both asserted above; the outputs
    // are borrowed exclusively until this function returns.
    unsafe { multiply_add_strips(&matrices, old, new, &outputs) };
}

/// # Safety
///
/// The processor has the features; `new` and every output have as many bytes as `old`, and nobody else has
/// access to the outputs.
#[target_feature(enable = "avx512f,avx512bw,gfni")]
unsafe fn multiply_add_strips<const ROWS: usize>(
    matrices: &[u64; ROWS],
    old: &[u8],
    new: &[u8],
    outputs: &[*mut u8; ROWS],
) {
    let strip_bytes = old.len();
    let mut offset = 0;
    while strip_bytes - offset >= VECTORS * VECTOR_BYTES {
        // SAFETY: as this function demands, and the column ends at or before `strip_bytes`.
        unsafe { multiply_add_column::<ROWS, VECTORS>(matrices, old, new, outputs, offset, u64::MAX) };
        offset += VECTORS * VECTOR_BYTES;
    }
    while offset < strip_bytes {
        let mask = tail_mask(strip_bytes - offset);
        // SAFETY: as this function demands, and the mask covers no byte at or after `strip_bytes`.
        unsafe { multiply_add_column::<ROWS, 1>(matrices, old, new, outputs, offset, mask) };
        offset += VECTOR_BYTES;
    }
}

/// One column of all outputs. A coefficient 1 needs no case of its own: stores bound this loop, not products.
///
/// # Safety
///
/// As for `multiply_add_strips`, and the bytes in `mask` of each vector of the column at `offset` are inside
/// the strips.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
unsafe fn multiply_add_column<const ROWS: usize, const COLUMN_VECTORS: usize>(
    matrices: &[u64; ROWS],
    old: &[u8],
    new: &[u8],
    outputs: &[*mut u8; ROWS],
    offset: usize,
    mask: u64,
) {
    // SAFETY: the column is inside both strips, by this function's own condition.
    let (mut delta, new): ([__m512i; COLUMN_VECTORS], [__m512i; COLUMN_VECTORS]) =
        unsafe { (load_column(old.as_ptr().add(offset), mask), load_column(new.as_ptr().add(offset), mask)) };
    for i in 0..COLUMN_VECTORS {
        delta[i] = _mm512_xor_si512(delta[i], new[i]);
    }
    for row in 0..ROWS {
        let times = _mm512_set1_epi64(matrices[row].cast_signed());
        // SAFETY: the column is inside the output, by this function's own condition.
        let mut sums: [__m512i; COLUMN_VECTORS] = unsafe { load_column(outputs[row].add(offset), mask) };
        for i in 0..COLUMN_VECTORS {
            sums[i] = _mm512_xor_si512(sums[i], _mm512_gf2p8affine_epi64_epi8::<0>(delta[i], times));
        }
        // SAFETY: as for the load.
        unsafe { store_column(outputs[row].add(offset), &sums, mask) };
    }
}

/// A mask of the first `rest_bytes` bytes of a vector, all of them if there are more.
fn tail_mask(rest_bytes: usize) -> u64 {
    if rest_bytes >= VECTOR_BYTES { u64::MAX } else { (1 << rest_bytes) - 1 }
}

/// # Safety
///
/// The processor has the features, and the bytes in `mask` of each vector of the column at `start` may be read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn load_column<const COLUMN_VECTORS: usize>(start: *const u8, mask: u64) -> [__m512i; COLUMN_VECTORS] {
    let mut column = [_mm512_setzero_si512(); COLUMN_VECTORS];
    for (i, vector) in column.iter_mut().enumerate() {
        // SAFETY: vector i of the column is inside it, and the load touches the bytes in the mask only.
        *vector = unsafe { _mm512_maskz_loadu_epi8(mask, start.add(i * VECTOR_BYTES).cast()) };
    }
    column
}

/// # Safety
///
/// The processor has the features, and the bytes in `mask` of each vector of the column at `start` may be
/// written.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn store_column<const COLUMN_VECTORS: usize>(
    start: *mut u8,
    column: &[__m512i; COLUMN_VECTORS],
    mask: u64,
) {
    for (i, &vector) in column.iter().enumerate() {
        // SAFETY: vector i of the column is inside it, and the store touches the bytes in the mask only.
        unsafe { _mm512_mask_storeu_epi8(start.add(i * VECTOR_BYTES).cast(), mask, vector) };
    }
}
