//! The loop over strips that also folds the CRC32C of every 4 KiB block in the same registers.
//!
//! A fold carries the remainder of what came before over a column, so what is kept of a strip is one vector. It begins
//! each block with zeros; what a CRC's initial value adds is the same for all blocks and is added at the end
//! ([`ZERO_BLOCK_CRC`]). CRC is linear: the checksum of an output that is the sum of the sources is the sum of theirs.
//!
//! Safety invariant: as for `super::columns`.

use super::SourceCrcs;
use super::columns::{Dot, GENERAL, add_one, add_pair, factors, load_column, prefetch, store_column};
use super::vector::Vector;
use crate::MAX_STRIPS;
use penstock_base::{BLOCK_BYTES, ZERO_BLOCK_CRC};
use std::mem::MaybeUninit;

/// Vectors of a column, whose CRC is folded at once.
pub(super) const FOLD_VECTORS: usize = 4;

/// A vector that can fold CRC32C: for tiers whose carry-less multiplication is as wide as their registers.
///
/// # Safety
///
/// As for [`Vector`].
pub(super) unsafe trait Fold: Vector {
    /// Folds a column into `state`, the remainder of what came before it.
    unsafe fn fold(state: Self, column: &[Self; FOLD_VECTORS]) -> Self;

    /// The CRC of what was folded into `state`, begun with zeros and without final XOR.
    unsafe fn residue(state: Self) -> u32;
}

/// `columns::dot`, with the CRC32C of every block of the outputs and, if `WANTED`, of the sources; else those are known.
///
/// Both have a checksum for each block of each strip, strip after strip in the order of the group.
///
/// # Safety
///
/// As for `columns::dot`.
#[inline(always)]
pub(super) unsafe fn dot_checked<
    V: Fold,
    const ROWS: usize,
    const SHAPE: u8,
    const COLD: bool,
    const WANTED: bool,
>(
    dot: &Dot<V, ROWS>,
    source_crcs: &mut SourceCrcs<'_>,
    output_crcs: &mut [u32],
) {
    let column_bytes = FOLD_VECTORS * V::BYTES;
    let blocks = dot.strip_bytes / BLOCK_BYTES;
    let whole = |bytes: usize| bytes.is_multiple_of(BLOCK_BYTES);
    assert!(BLOCK_BYTES.is_multiple_of(column_bytes) && whole(dot.strip_bytes), "whole blocks");
    assert!(whole(dot.range.start) && whole(dot.range.end), "a range of whole blocks");
    assert!(output_crcs.len() == ROWS * blocks, "a checksum for each block of the outputs");
    assert!(source_crcs.len() == dot.count * blocks, "a checksum for each block of the sources");
    assert!(WANTED == matches!(source_crcs, SourceCrcs::Wanted(_)), "the loop for these checksums");
    // SAFETY: as this function demands.
    let zero = unsafe { V::zero() };
    let mut source_states = [const { MaybeUninit::uninit() }; MAX_STRIPS];
    for block in dot.range.start / BLOCK_BYTES..dot.range.end / BLOCK_BYTES {
        for state in &mut source_states[..dot.count] {
            state.write(zero);
        }
        let mut output_states = [zero; ROWS];
        for column in 0..BLOCK_BYTES / column_bytes {
            let at = block * BLOCK_BYTES + column * column_bytes;
            // SAFETY: as this function demands; the column is inside the block.
            unsafe {
                checked_column::<V, ROWS, SHAPE, COLD, WANTED>(
                    dot,
                    at,
                    &mut source_states,
                    &mut output_states,
                );
            }
        }
        let mut sum = 0;
        for (place, state) in source_states[..dot.count].iter().enumerate() {
            let source = if dot.reversed { dot.count - 1 - place } else { place };
            sum ^= match source_crcs {
                SourceCrcs::Known(crcs) => crcs[source * blocks + block] ^ ZERO_BLOCK_CRC,
                SourceCrcs::Wanted(crcs) => {
                    // SAFETY: as this function demands.
                    let residue = unsafe { V::residue(state.assume_init()) };
                    crcs[source * blocks + block] = residue ^ ZERO_BLOCK_CRC;
                    residue
                }
            };
        }
        for (place, state) in output_states.iter().enumerate() {
            let residue = match is_sum::<SHAPE>(place) {
                true => sum,
                // SAFETY: as this function demands.
                false => unsafe { V::residue(*state) },
            };
            output_crcs[dot.output_order[place] * blocks + block] = residue ^ ZERO_BLOCK_CRC;
        }
    }
    if COLD {
        // SAFETY: as this function demands.
        unsafe { V::fence() };
    }
}

/// Whether an output is the sum of the sources, and its CRC therefore the sum of theirs.
#[inline(always)]
fn is_sum<const SHAPE: u8>(place: usize) -> bool {
    place == 0 && SHAPE != GENERAL
}

/// # Safety
///
/// As for `columns::dot_column`; the states of the sources are set.
#[inline(always)]
unsafe fn checked_column<
    V: Fold,
    const ROWS: usize,
    const SHAPE: u8,
    const COLD: bool,
    const WANTED: bool,
>(
    dot: &Dot<V, ROWS>,
    at: usize,
    source_states: &mut [MaybeUninit<V>; MAX_STRIPS],
    output_states: &mut [V; ROWS],
) {
    // SAFETY: as this function demands; the loads are inside the column.
    unsafe {
        let mut sums = [[V::zero(); FOLD_VECTORS]; ROWS];
        let mut source = 0;
        while source + 1 < dot.count {
            let (a, b) = (dot.sources[source].add(at), dot.sources[source + 1].add(at));
            if COLD {
                prefetch::<V, FOLD_VECTORS>(a);
                prefetch::<V, FOLD_VECTORS>(b);
            }
            let (a, b) = (load_column::<V, FOLD_VECTORS>(a), load_column::<V, FOLD_VECTORS>(b));
            let factors_a = factors::<V, ROWS, SHAPE>(dot, source);
            let factors_b = factors::<V, ROWS, SHAPE>(dot, source + 1);
            for i in 0..FOLD_VECTORS {
                for row in 0..ROWS {
                    sums[row][i] =
                        add_pair::<V, SHAPE>(sums[row][i], row, a[i], b[i], factors_a[row], factors_b[row]);
                }
            }
            if WANTED {
                fold_into(&mut source_states[source], &a);
                fold_into(&mut source_states[source + 1], &b);
            }
            source += 2;
        }
        if source < dot.count {
            let a = dot.sources[source].add(at);
            if COLD {
                prefetch::<V, FOLD_VECTORS>(a);
            }
            let a = load_column::<V, FOLD_VECTORS>(a);
            let factors = factors::<V, ROWS, SHAPE>(dot, source);
            for i in 0..FOLD_VECTORS {
                for row in 0..ROWS {
                    sums[row][i] = add_one::<V, SHAPE>(sums[row][i], row, a[i], factors[row]);
                }
            }
            if WANTED {
                fold_into(&mut source_states[source], &a);
            }
        }
        store_column::<V, ROWS, FOLD_VECTORS, COLD>(dot, at, &sums);
        for row in 0..ROWS {
            if !is_sum::<SHAPE>(row) {
                output_states[row] = V::fold(output_states[row], &sums[row]);
            }
        }
    }
}

/// # Safety
///
/// The processor has the features of V, and the state is set.
#[inline(always)]
unsafe fn fold_into<V: Fold>(state: &mut MaybeUninit<V>, column: &[V; FOLD_VECTORS]) {
    // SAFETY: as this function demands.
    unsafe { state.write(V::fold(state.assume_init(), column)) };
}
