//! The loop over strips that also folds the CRC32C of every 4 KiB block from the same registers.
//!
//! A fold adds a column to the remainder of the bytes before it, so the state of a strip is one vector. The
//! state begins each block as zeros. The contribution of a CRC's initial value is the same for all blocks and
//! is added at the end ([`ZERO_BLOCK_CRC`]). CRC is linear: if an output is the sum of the sources, its
//! checksum is the sum of theirs.
//!
//! Safety invariant: as for `super::columns`.

use super::SourceCrcs;
use super::columns::{Dot, GENERAL, add_one, add_pair, factors, load_column, prefetch, store_column};
use super::vector::Vector;
use crate::MAX_STRIPS;
use penstock_base::{BLOCK_BYTES, ZERO_BLOCK_CRC};
use std::mem::MaybeUninit;

/// Number of vectors in a column that is folded in one step.
pub(super) const FOLD_VECTORS: usize = 4;

/// A vector that can fold CRC32C: for tiers whose carry-less multiplication is as wide as their registers.
///
/// # Safety
///
/// As for [`Vector`].
pub(super) unsafe trait Fold: Vector {
    /// Folds a column into `state`, the remainder of the bytes before it.
    unsafe fn fold(state: Self, column: &[Self; FOLD_VECTORS]) -> Self;

    /// The CRC of everything folded into `state`, from an initial value of zero and without the final XOR.
    unsafe fn residue(state: Self) -> u32;
}

/// `columns::dot` that also makes the CRC32C of every block of the outputs and, if `WANTED`, of the sources.
/// Otherwise the checksums of the sources are known.
///
/// Both lists have a checksum for each block of each strip, strip after strip in the order of the group.
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
    // SAFETY: guaranteed by the caller.
    let zero = unsafe { V::zero() };
    let mut source_states = [const { MaybeUninit::uninit() }; MAX_STRIPS];
    for block in dot.range.start / BLOCK_BYTES..dot.range.end / BLOCK_BYTES {
        for state in &mut source_states[..dot.count] {
            state.write(zero);
        }
        let mut output_states = [zero; ROWS];
        for column in 0..BLOCK_BYTES / column_bytes {
            let at = block * BLOCK_BYTES + column * column_bytes;
            // SAFETY: guaranteed by the caller; the column is inside the block.
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
                    // SAFETY: guaranteed by the caller.
                    let residue = unsafe { V::residue(state.assume_init()) };
                    crcs[source * blocks + block] = residue ^ ZERO_BLOCK_CRC;
                    residue
                }
            };
        }
        for (place, state) in output_states.iter().enumerate() {
            let residue = match is_sum::<SHAPE>(place) {
                true => sum,
                // SAFETY: guaranteed by the caller.
                false => unsafe { V::residue(*state) },
            };
            output_crcs[dot.output_order[place] * blocks + block] = residue ^ ZERO_BLOCK_CRC;
        }
    }
    if COLD {
        // SAFETY: guaranteed by the caller.
        unsafe { V::fence() };
    }
}

/// True if the output in this place is the sum of the sources, so that its CRC is the sum of theirs.
#[inline(always)]
fn is_sum<const SHAPE: u8>(place: usize) -> bool {
    place == 0 && SHAPE != GENERAL
}

/// Makes one column of all outputs of a group, and folds its checksums.
///
/// # Safety
///
/// As for `columns::dot_column`; the states of the sources are initialised.
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
    // SAFETY: guaranteed by the caller; the loads are inside the column.
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

/// Folds a column into a state.
///
/// # Safety
///
/// The processor has the features of V, and the state is initialised.
#[inline(always)]
unsafe fn fold_into<V: Fold>(state: &mut MaybeUninit<V>, column: &[V; FOLD_VECTORS]) {
    // SAFETY: guaranteed by the caller.
    unsafe { state.write(V::fold(state.assume_init(), column)) };
}
