//! The loops over strips, written once for all SIMD tiers.
//!
//! `dot` keeps the sums of one column (a few vectors) of all outputs in registers while it reads the sources
//! in pairs. So it reads each source once and writes each output once, and it loads a coefficient into
//! registers once for each column instead of once for each vector. The group's shape decides the arithmetic
//! of a pair.
//!
//! `COLD` means that the data comes from memory. The loop then prefetches sources 1 KiB ahead, because the
//! processor's own prefetcher stops at the end of each page and follows few streams. It streams outputs past
//! the caches, which saves reading every cache line before it is overwritten.
//!
//! Safety invariant: everything here reads and writes only inside the range of a [`Dot`], in whole vectors of
//! each strip, through pointers taken from slices that contain that range.

// Rows and vectors index several arrays at the same time.
#![allow(clippy::needless_range_loop)]

use super::group::Group;
use super::vector::Vector;
use crate::MAX_STRIPS;
use crate::matrix::Shape;
use std::mem::MaybeUninit;
use std::ops::Range;

/// The shapes as parameters of the loops. For `XOR_FIRST` the row of ones is moved to row 0.
pub(super) const GENERAL: u8 = 0;
pub(super) const XOR_FIRST: u8 = 1;
pub(super) const POWERS: u8 = 2;
pub(super) const ONES: u8 = 3;

/// Distance in bytes between a load and the prefetch of a cold pass.
const PREFETCH_BYTES: usize = 1024;

const LINE_BYTES: usize = 64;

/// A group in the form that the loops take: pointers to the strips, and the coefficients of each source.
pub(super) struct Dot<V: Vector, const ROWS: usize> {
    pub(super) sources: [*const u8; MAX_STRIPS],
    /// Set for the first `count` sources, except in the shape `Powers`.
    products: [MaybeUninit<[V::Product; ROWS]>; MAX_STRIPS],
    pub(super) count: usize,
    outputs: [*mut u8; ROWS],
    pub(super) strip_bytes: usize,
    pub(super) range: Range<usize>,
    /// `output_order[i]` is the output of the group that the loops handle as row i. If `reversed`, source j
    /// is the j-th from the end.
    pub(super) output_order: [usize; ROWS],
    pub(super) reversed: bool,
}

impl<V: Vector, const ROWS: usize> Dot<V, ROWS> {
    pub(super) fn new(group: &mut Group<'_, '_>) -> Self {
        let shape = group.shape();
        let (count, range) = (group.sources.len(), group.range.clone());
        assert!(group.outputs.len() == ROWS && count <= MAX_STRIPS, "shape of the group");
        assert!(range.start <= range.end && range.len().is_multiple_of(V::BYTES), "whole vectors");
        let strip_bytes = group.sources[0].len();
        assert!(range.end <= strip_bytes, "the range is inside the strips");
        assert!(
            group.sources.iter().all(|strip| strip.len() == strip_bytes),
            "source strips differ in length"
        );
        assert!(
            group.outputs.iter().all(|strip| strip.len() == strip_bytes),
            "output strips differ in length"
        );

        let mut order: [usize; ROWS] = std::array::from_fn(|row| row);
        if let Shape::OnesRow(row) = shape {
            order.swap(0, row);
        }
        let reversed = shape == Shape::Powers;
        let mut dot = Self {
            sources: [std::ptr::null(); MAX_STRIPS],
            products: [const { MaybeUninit::uninit() }; MAX_STRIPS],
            count,
            outputs: order.map(|row| group.outputs[row].as_mut_ptr()),
            strip_bytes,
            range,
            output_order: order,
            reversed,
        };
        for (at, source) in group.sources.iter().enumerate() {
            let place = if reversed { count - 1 - at } else { at };
            dot.sources[place] = source.as_ptr();
            if shape != Shape::Powers {
                let products = order.map(|row| V::product(group.matrix.cell(group.first_row + row, at)));
                dot.products[place].write(products);
            }
        }
        dot
    }

    /// True if streaming stores can go to all outputs: each one begins at a multiple of the vector size.
    pub(super) fn can_stream(&self) -> bool {
        self.outputs.iter().all(|output| (output.addr() + self.range.start).is_multiple_of(V::BYTES))
    }
}

/// Makes the range of all outputs of a group.
///
/// # Safety
///
/// The processor has the features of V. Until this returns, the sources may be read and the outputs written,
/// and nobody else writes the sources or accesses the outputs. With `COLD`, the outputs are aligned for
/// streaming stores.
#[inline(always)]
pub(super) unsafe fn dot<
    V: Vector,
    const ROWS: usize,
    const VECTORS: usize,
    const SHAPE: u8,
    const COLD: bool,
>(
    dot: &Dot<V, ROWS>,
) {
    let column_bytes = VECTORS * V::BYTES;
    let mut at = dot.range.start;
    while dot.range.end - at >= column_bytes {
        // SAFETY: guaranteed by the caller, and the column ends at or before the end of the range.
        unsafe { dot_column::<V, ROWS, VECTORS, SHAPE, COLD>(dot, at) };
        at += column_bytes;
    }
    while dot.range.end > at {
        // SAFETY: guaranteed by the caller; the range is a whole number of vectors.
        unsafe { dot_column::<V, ROWS, 1, SHAPE, COLD>(dot, at) };
        at += V::BYTES;
    }
    if COLD {
        // SAFETY: guaranteed by the caller.
        unsafe { V::fence() };
    }
}

/// Makes one column of all outputs of a group.
///
/// # Safety
///
/// As for `dot`, and the column at `at` is inside the strips.
#[inline(always)]
unsafe fn dot_column<
    V: Vector,
    const ROWS: usize,
    const VECTORS: usize,
    const SHAPE: u8,
    const COLD: bool,
>(
    dot: &Dot<V, ROWS>,
    at: usize,
) {
    // SAFETY: guaranteed by the caller; the loads are inside the column.
    unsafe {
        let mut sums = [[V::zero(); VECTORS]; ROWS];
        let mut source = 0;
        while source + 1 < dot.count {
            let (a, b) = (dot.sources[source].add(at), dot.sources[source + 1].add(at));
            if COLD {
                prefetch::<V, VECTORS>(a);
                prefetch::<V, VECTORS>(b);
            }
            let factors_a = factors::<V, ROWS, SHAPE>(dot, source);
            let factors_b = factors::<V, ROWS, SHAPE>(dot, source + 1);
            for i in 0..VECTORS {
                let a = V::load(a.add(i * V::BYTES));
                let b = V::load(b.add(i * V::BYTES));
                for row in 0..ROWS {
                    sums[row][i] =
                        add_pair::<V, SHAPE>(sums[row][i], row, a, b, factors_a[row], factors_b[row]);
                }
            }
            source += 2;
        }
        if source < dot.count {
            let a = dot.sources[source].add(at);
            if COLD {
                prefetch::<V, VECTORS>(a);
            }
            let factors = factors::<V, ROWS, SHAPE>(dot, source);
            for i in 0..VECTORS {
                let a = V::load(a.add(i * V::BYTES));
                for row in 0..ROWS {
                    sums[row][i] = add_one::<V, SHAPE>(sums[row][i], row, a, factors[row]);
                }
            }
        }
        store_column::<V, ROWS, VECTORS, COLD>(dot, at, &sums);
    }
}

/// The factors of a source in each row. In the shape `Powers`, which uses none, they are those of coefficient
/// 0.
///
/// # Safety
///
/// The processor has the features of V; `dot` has the shape `SHAPE`, and has this source.
#[inline(always)]
pub(super) unsafe fn factors<V: Vector, const ROWS: usize, const SHAPE: u8>(
    dot: &Dot<V, ROWS>,
    source: usize,
) -> [V::Factor; ROWS] {
    // SAFETY: guaranteed by the caller; `Dot::new` sets the products of every source except for `Powers`.
    unsafe {
        let products = match SHAPE {
            POWERS => [V::product(0); ROWS],
            _ => dot.products[source].assume_init(),
        };
        let mut factors = [V::factor(products[0]); ROWS];
        for row in 1..ROWS {
            factors[row] = V::factor(products[row]);
        }
        factors
    }
}

/// Loads one column of a strip.
///
/// # Safety
///
/// The processor has the features of V, and the column at `from` may be read.
#[inline(always)]
pub(super) unsafe fn load_column<V: Vector, const VECTORS: usize>(from: *const u8) -> [V; VECTORS] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut column = [V::zero(); VECTORS];
        for (i, vector) in column.iter_mut().enumerate() {
            *vector = V::load(from.add(i * V::BYTES));
        }
        column
    }
}

#[inline(always)]
pub(super) unsafe fn add_pair<V: Vector, const SHAPE: u8>(
    sum: V,
    row: usize,
    a: V,
    b: V,
    times_a: V::Factor,
    times_b: V::Factor,
) -> V {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match SHAPE {
            ONES => sum.xor3(a, b),
            POWERS | XOR_FIRST if row == 0 => sum.xor3(a, b),
            POWERS => sum.horner(row, a, b),
            _ => sum.xor3(a.times(times_a), b.times(times_b)),
        }
    }
}

#[inline(always)]
pub(super) unsafe fn add_one<V: Vector, const SHAPE: u8>(sum: V, row: usize, a: V, times: V::Factor) -> V {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match SHAPE {
            ONES => sum.xor(a),
            POWERS | XOR_FIRST if row == 0 => sum.xor(a),
            POWERS => sum.horner_once(row, a),
            _ => sum.xor(a.times(times)),
        }
    }
}

/// Prefetches one column, `PREFETCH_BYTES` after `from`.
///
/// # Safety
///
/// The processor has the features of V. `from` may be any address: a prefetch never faults.
#[inline(always)]
pub(super) unsafe fn prefetch<V: Vector, const VECTORS: usize>(from: *const u8) {
    for line in 0..(VECTORS * V::BYTES).div_ceil(LINE_BYTES) {
        // SAFETY: guaranteed by the caller. Past the end of a strip the address is nobody's, which is no
        // harm.
        unsafe { V::prefetch(from.wrapping_add(PREFETCH_BYTES + line * LINE_BYTES)) };
    }
}

/// Stores one column of all outputs.
///
/// # Safety
///
/// As for `dot_column`.
#[inline(always)]
pub(super) unsafe fn store_column<V: Vector, const ROWS: usize, const VECTORS: usize, const COLD: bool>(
    dot: &Dot<V, ROWS>,
    at: usize,
    sums: &[[V; VECTORS]; ROWS],
) {
    for (output, sums) in dot.outputs.iter().zip(sums) {
        for (i, sum) in sums.iter().enumerate() {
            // SAFETY: guaranteed by the caller; with `COLD` the output is aligned, and so is each of its
            // vectors.
            unsafe {
                match COLD {
                    true => sum.stream(output.add(at + i * V::BYTES)),
                    false => sum.store(output.add(at + i * V::BYTES)),
                }
            }
        }
    }
}

/// Adds `products[i]` times (`old` + `new`) to `outputs[i]`, over `bytes` bytes.
///
/// # Safety
///
/// The processor has the features of V. `bytes` is a whole number of vectors; that many bytes may be read
/// from `old` and `new` and written to the outputs, and nobody else accesses them meanwhile.
#[inline(always)]
pub(super) unsafe fn multiply_add<V: Vector, const ROWS: usize, const VECTORS: usize>(
    products: &[V::Product; ROWS],
    old: *const u8,
    new: *const u8,
    outputs: &[*mut u8; ROWS],
    bytes: usize,
) {
    let column_bytes = VECTORS * V::BYTES;
    let mut at = 0;
    // SAFETY: guaranteed by the caller; each column ends at or before `bytes`.
    unsafe {
        while bytes - at >= column_bytes {
            multiply_add_column::<V, ROWS, VECTORS>(products, old.add(at), new.add(at), outputs, at);
            at += column_bytes;
        }
        while bytes > at {
            multiply_add_column::<V, ROWS, 1>(products, old.add(at), new.add(at), outputs, at);
            at += V::BYTES;
        }
    }
}

/// Updates one column of all outputs. A coefficient of 1 needs no special case: stores bound this loop, not
/// products.
///
/// # Safety
///
/// As for `multiply_add`; `old` and `new` point to the column.
#[inline(always)]
unsafe fn multiply_add_column<V: Vector, const ROWS: usize, const VECTORS: usize>(
    products: &[V::Product; ROWS],
    old: *const u8,
    new: *const u8,
    outputs: &[*mut u8; ROWS],
    at: usize,
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut delta = load_column::<V, VECTORS>(old);
        for (delta, new) in delta.iter_mut().zip(load_column::<V, VECTORS>(new)) {
            *delta = delta.xor(new);
        }
        for row in 0..ROWS {
            let factor = V::factor(products[row]);
            for (i, delta) in delta.iter().enumerate() {
                let place = outputs[row].add(at + i * V::BYTES);
                V::load(place).xor(delta.times(factor)).store(place);
            }
        }
    }
}

/// Number of vectors in one step of `read` and `fill`.
const RUN_VECTORS: usize = 8;

/// Reads `bytes` bytes at `from` in runs of `RUN_VECTORS` vectors, without an incomplete last run. Returns
/// one byte of their XOR, so that the compiler keeps the loads.
///
/// # Safety
///
/// The processor has the features of V; `bytes` bytes may be read.
#[inline(always)]
pub(super) unsafe fn read<V: Vector, const COLD: bool>(from: *const u8, bytes: usize) -> u8 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut sums = [V::zero(); RUN_VECTORS];
        let mut at = 0;
        while bytes - at >= RUN_VECTORS * V::BYTES {
            if COLD {
                prefetch::<V, RUN_VECTORS>(from.add(at));
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                *sum = sum.xor(V::load(from.add(at + i * V::BYTES)));
            }
            at += RUN_VECTORS * V::BYTES;
        }
        let mut sum = V::zero();
        for part in sums {
            sum = sum.xor(part);
        }
        let mut bytes = [0; 64];
        sum.store(bytes.as_mut_ptr());
        bytes[0]
    }
}

/// Fills `bytes` bytes at `to` with zeros in runs of `RUN_VECTORS` vectors, without an incomplete last run.
/// With `COLD` the stores go past the caches.
///
/// # Safety
///
/// The processor has the features of V; `bytes` bytes may be written, and with `COLD` are aligned for
/// streaming stores.
#[inline(always)]
pub(super) unsafe fn fill<V: Vector, const COLD: bool>(to: *mut u8, bytes: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let zero = V::zero();
        let mut at = 0;
        while bytes - at >= RUN_VECTORS * V::BYTES {
            for i in 0..RUN_VECTORS {
                match COLD {
                    true => zero.stream(to.add(at + i * V::BYTES)),
                    false => zero.store(to.add(at + i * V::BYTES)),
                }
            }
            at += RUN_VECTORS * V::BYTES;
        }
        if COLD {
            V::fence();
        }
    }
}
