//! The tier of 64-bit Arm: a product is the sum of two table look-ups, one for each half of a byte.
//!
//! NEON is part of every 64-bit Arm processor. Stable Rust offers neither prefetch nor streaming stores for
//! it, so a cold pass runs like a warm one.

use super::columns;
use super::group::Group;
use super::tier::{Tier, tier};
use super::vector::{HALF_BYTES, HalfBytes, Vector};
use std::arch::aarch64::*;

/// Always true: NEON is part of the base architecture.
fn is_available() -> bool {
    true
}

#[derive(Clone, Copy)]
struct Quad(uint8x16_t);

tier! {
    vector: Quad,
    features: "neon",
    columns: 8, 4, 4, 2,
    checked: false,
}

// SAFETY: each operation does what its name says.
unsafe impl Vector for Quad {
    const BYTES: usize = size_of::<uint8x16_t>();
    type Product = &'static HalfBytes;
    type Factor = (uint8x16_t, uint8x16_t);

    #[inline(always)]
    fn product(coefficient: u8) -> &'static HalfBytes {
        &HALF_BYTES[usize::from(coefficient)]
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(vdupq_n_u8(0)) }
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(vld1q_u8(from)) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { vst1q_u8(to, self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.store(to) }
    }

    #[inline(always)]
    unsafe fn fence() {}

    #[inline(always)]
    unsafe fn prefetch(_from: *const u8) {}

    #[inline(always)]
    unsafe fn xor(self, other: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(veorq_u8(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn factor(product: &'static HalfBytes) -> (uint8x16_t, uint8x16_t) {
        // SAFETY: guaranteed by the caller; each table is 16 bytes.
        unsafe { (vld1q_u8(product.low.as_ptr()), vld1q_u8(product.high.as_ptr())) }
    }

    #[inline(always)]
    unsafe fn times(self, (low, high): (uint8x16_t, uint8x16_t)) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let low = vqtbl1q_u8(low, vandq_u8(self.0, vdupq_n_u8(0x0f)));
            let high = vqtbl1q_u8(high, vshrq_n_u8::<4>(self.0));
            Self(veorq_u8(low, high))
        }
    }

    #[inline(always)]
    unsafe fn double(self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let carries = vreinterpretq_u8_s8(vshrq_n_s8::<7>(vreinterpretq_s8_u8(self.0)));
            let reduction = vandq_u8(carries, vdupq_n_u8(0x1d));
            Self(veorq_u8(vshlq_n_u8::<1>(self.0), reduction))
        }
    }
}
