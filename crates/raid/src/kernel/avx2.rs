//! The tiers on 32-byte registers: products by byte shuffles (any processor with AVX2), or by the affine
//! instruction on processors that have GFNI without AVX-512.

use super::columns;
use super::group::Group;
use super::tier::{Tier, tier};
use super::vector::Vector;
use std::arch::x86_64::*;

/// The operations that are the same in both tiers.
macro_rules! plain_operations {
    () => {
        const BYTES: usize = size_of::<__m256i>();

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe { Self(_mm256_setzero_si256()) }
        }

        #[inline(always)]
        unsafe fn load(from: *const u8) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe { Self(_mm256_loadu_si256(from.cast())) }
        }

        #[inline(always)]
        unsafe fn store(self, to: *mut u8) {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm256_storeu_si256(to.cast(), self.0) }
        }

        #[inline(always)]
        unsafe fn stream(self, to: *mut u8) {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm256_stream_si256(to.cast(), self.0) }
        }

        #[inline(always)]
        unsafe fn fence() {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm_sfence() }
        }

        #[inline(always)]
        unsafe fn prefetch(from: *const u8) {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
        }

        #[inline(always)]
        unsafe fn xor(self, other: Self) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe { Self(_mm256_xor_si256(self.0, other.0)) }
        }
    };
}

pub(super) mod shuffle {
    //! Products as the sum of two look-ups, one for the low and one for the high half of each byte.

    use super::*;
    use crate::kernel::vector::{HALF_BYTES, HalfBytes};

    /// True if the processor and the operating system support this tier.
    fn is_available() -> bool {
        is_x86_feature_detected!("avx2")
    }

    #[derive(Clone, Copy)]
    struct Ymm(__m256i);

    tier! {
        vector: Ymm,
        features: "avx2",
        // There are 16 registers. Two tables for each row leave few of them for sums.
        columns: 4, 2, 2, 2,
        checked: false,
    }

    // SAFETY: each operation does what its name says and uses only the features of the tier.
    unsafe impl Vector for Ymm {
        type Product = &'static HalfBytes;
        type Factor = (__m256i, __m256i);

        plain_operations!();

        #[inline(always)]
        fn product(coefficient: u8) -> &'static HalfBytes {
            &HALF_BYTES[usize::from(coefficient)]
        }

        #[inline(always)]
        unsafe fn factor(product: &'static HalfBytes) -> (__m256i, __m256i) {
            // SAFETY: guaranteed by the caller; each table is 16 aligned bytes.
            unsafe {
                let low = _mm_load_si128(product.low.as_ptr().cast());
                let high = _mm_load_si128(product.high.as_ptr().cast());
                (_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high))
            }
        }

        #[inline(always)]
        unsafe fn times(self, (low, high): (__m256i, __m256i)) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let half = _mm256_set1_epi8(0x0f);
                let low = _mm256_shuffle_epi8(low, _mm256_and_si256(self.0, half));
                let high = _mm256_shuffle_epi8(high, _mm256_and_si256(_mm256_srli_epi64::<4>(self.0), half));
                Self(_mm256_xor_si256(low, high))
            }
        }

        #[inline(always)]
        unsafe fn double(self) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let carries = _mm256_cmpgt_epi8(_mm256_setzero_si256(), self.0);
                let reduction = _mm256_and_si256(carries, _mm256_set1_epi8(0x1d));
                Self(_mm256_xor_si256(_mm256_add_epi8(self.0, self.0), reduction))
            }
        }
    }
}

pub(super) mod gfni {
    //! Products as one affine instruction on 32 bytes.

    use super::*;
    use crate::kernel::gfni::AFFINE;

    /// True if the processor and the operating system support this tier.
    fn is_available() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("gfni")
    }

    #[derive(Clone, Copy)]
    struct Ymm(__m256i);

    tier! {
        vector: Ymm,
        features: "avx2,gfni",
        columns: 4, 4, 2, 2,
        checked: false,
    }

    // SAFETY: each operation does what its name says and uses only the features of the tier.
    unsafe impl Vector for Ymm {
        type Product = u64;
        type Factor = __m256i;

        plain_operations!();

        #[inline(always)]
        fn product(coefficient: u8) -> u64 {
            AFFINE[usize::from(coefficient)]
        }

        #[inline(always)]
        unsafe fn factor(product: u64) -> __m256i {
            // SAFETY: guaranteed by the caller.
            unsafe { _mm256_set1_epi64x(product.cast_signed()) }
        }

        #[inline(always)]
        unsafe fn times(self, factor: __m256i) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe { Self(_mm256_gf2p8affine_epi64_epi8::<0>(self.0, factor)) }
        }

        #[inline(always)]
        unsafe fn double(self) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe { self.times(Self::factor(AFFINE[2])) }
        }

        #[inline(always)]
        unsafe fn horner_once(self, power: usize, a: Self) -> Self {
            // SAFETY: guaranteed by the caller.
            unsafe { self.times(Self::factor(AFFINE[1 << power])).xor(a) }
        }
    }
}
