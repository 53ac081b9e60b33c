//! The trait that a SIMD tier implements: one vector of bytes and the operations on it that the loops use.
//!
//! The loops over strips (`super::columns`) are written once, for any [`Vector`]. The loops and all
//! operations here are `#[inline(always)]`, so that they become part of one function of the tier, which
//! enables the processor's features: only in such a function do the intrinsics compile to single
//! instructions.
//!
//! Invariant: in every tier `times` multiplies each byte by a coefficient in GF(2^8) (`tests/code/kernels.rs`
//! compares all tiers with the portable one).

use crate::field::multiply;

/// A register of bytes.
///
/// # Safety
///
/// All operations may be called only if the processor has the tier's features.
pub(super) unsafe trait Vector: Copy {
    /// Bytes of one vector. Streaming stores need addresses that are multiples of it.
    const BYTES: usize;

    /// A coefficient in the form that a pass keeps in memory.
    type Product: Copy;

    /// A coefficient in registers.
    type Factor: Copy;

    fn product(coefficient: u8) -> Self::Product;

    unsafe fn zero() -> Self;

    /// # Safety
    ///
    /// `BYTES` bytes at `from` may be read.
    unsafe fn load(from: *const u8) -> Self;

    /// # Safety
    ///
    /// `BYTES` bytes at `to` may be written.
    unsafe fn store(self, to: *mut u8);

    /// Stores past the caches if the tier can. [`Vector::fence`] must follow.
    ///
    /// # Safety
    ///
    /// `BYTES` bytes at `to`, a multiple of `BYTES`, may be written.
    unsafe fn stream(self, to: *mut u8);

    /// Orders streaming stores before all later stores, as other processors see them.
    unsafe fn fence();

    /// Prefetches the cache line at `from`, which may be any address.
    unsafe fn prefetch(from: *const u8);

    unsafe fn xor(self, other: Self) -> Self;

    #[inline(always)]
    unsafe fn xor3(self, a: Self, b: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { self.xor(a).xor(b) }
    }

    unsafe fn factor(product: Self::Product) -> Self::Factor;

    unsafe fn times(self, factor: Self::Factor) -> Self;

    /// Multiplies each byte by 2.
    unsafe fn double(self) -> Self;

    /// Two steps of Horner's rule with the factor `2^power`: `(self * 2^power + a) * 2^power + b`.
    #[inline(always)]
    unsafe fn horner(self, power: usize, a: Self, b: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { self.horner_once(power, a).horner_once(power, b) }
    }

    /// One step of Horner's rule: `self * 2^power + a`.
    #[inline(always)]
    unsafe fn horner_once(self, power: usize, a: Self) -> Self {
        let mut sum = self;
        for _ in 0..power {
            // SAFETY: guaranteed by the caller.
            sum = unsafe { sum.double() };
        }
        // SAFETY: guaranteed by the caller.
        unsafe { sum.xor(a) }
    }
}

/// The products of one coefficient with all low and with all high half bytes: the tables of a byte shuffle.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub(super) struct HalfBytes {
    pub(super) low: [u8; 16],
    pub(super) high: [u8; 16],
}

/// `HALF_BYTES[a]` is for the coefficient a. The table has 8 KiB; a pass touches 32 bytes of it for each
/// distinct coefficient.
pub(super) static HALF_BYTES: [HalfBytes; 256] = half_bytes();

const fn half_bytes() -> [HalfBytes; 256] {
    let mut table = [HalfBytes { low: [0; 16], high: [0; 16] }; 256];
    let mut a = 0;
    while a < 256 {
        let mut half = 0;
        while half < 16 {
            table[a].low[half] = multiply(a as u8, half as u8);
            table[a].high[half] = multiply(a as u8, (half << 4) as u8);
            half += 1;
        }
        a += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes products as the shuffling tiers do, for every byte and coefficient, without their
    /// instructions.
    #[test]
    fn two_look_ups_of_half_bytes_are_a_product() {
        for a in 0..=255_u8 {
            let table = &HALF_BYTES[usize::from(a)];
            for b in 0..=255_u8 {
                let product = table.low[usize::from(b & 15)] ^ table.high[usize::from(b >> 4)];
                assert_eq!(product, multiply(a, b), "{a} * {b}");
            }
        }
    }
}
