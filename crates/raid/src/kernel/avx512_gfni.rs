//! The AVX-512 tier: one GFNI affine instruction multiplies 64 bytes by a constant, VPCLMULQDQ folds CRC32C.
//!
//! One `vpternlogq` is a sum of three. VPCLMULQDQ runs on another port than the affine instruction. Every
//! processor with AVX-512 and GFNI has VPCLMULQDQ too (Intel from Ice Lake, AMD from Zen 4 on).
//!
//! Folding follows Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ" (Intel,
//! 2009), in the bit-reflected form.

use super::SourceCrcs;
use super::columns;
use super::folding::{self, Fold};
use super::gfni::AFFINE;
use super::group::Group;
use super::tier::{Tier, tier};
use super::vector::Vector;
use std::arch::x86_64::*;

/// The `vpternlogq` truth table of a three-way XOR.
const XOR3: i32 = 0x96;

/// True if the processor and the operating system support this tier.
fn is_available() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("gfni")
        && is_x86_feature_detected!("vpclmulqdq")
        && is_x86_feature_detected!("sse4.2")
}

#[derive(Clone, Copy)]
struct Zmm(__m512i);

tier! {
    vector: Zmm,
    features: "avx512f,avx512bw,gfni,vpclmulqdq,sse4.2",
    // 16 sums, two vectors of a pair, 8 coefficients and two products fit the 32 registers.
    columns: 8, 4, 4, 4,
    checked: true,
}

// SAFETY: each operation does what its name says and uses only the features of the tier.
unsafe impl Vector for Zmm {
    const BYTES: usize = size_of::<__m512i>();
    type Product = u64;
    type Factor = __m512i;

    #[inline(always)]
    fn product(coefficient: u8) -> u64 {
        AFFINE[usize::from(coefficient)]
    }

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm512_setzero_si512()) }
    }

    #[inline(always)]
    unsafe fn load(from: *const u8) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm512_loadu_si512(from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_storeu_si512(to.cast(), self.0) }
    }

    #[inline(always)]
    unsafe fn stream(self, to: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_stream_si512(to.cast(), self.0) }
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
        unsafe { Self(_mm512_xor_si512(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn xor3(self, a: Self, b: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm512_ternarylogic_epi64::<XOR3>(self.0, a.0, b.0)) }
    }

    #[inline(always)]
    unsafe fn factor(product: u64) -> __m512i {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_set1_epi64(product.cast_signed()) }
    }

    #[inline(always)]
    unsafe fn times(self, factor: __m512i) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { Self(_mm512_gf2p8affine_epi64_epi8::<0>(self.0, factor)) }
    }

    #[inline(always)]
    unsafe fn double(self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { self.times(Self::factor(AFFINE[2])) }
    }

    #[inline(always)]
    unsafe fn horner(self, power: usize, a: Self, b: Self) -> Self {
        // As one sum: self * 4^power + a * 2^power + b. SAFETY: guaranteed by the caller.
        unsafe {
            let (once, twice) = (Self::factor(AFFINE[1 << power]), Self::factor(AFFINE[1 << (2 * power)]));
            self.times(twice).xor3(a.times(once), b)
        }
    }

    #[inline(always)]
    unsafe fn horner_once(self, power: usize, a: Self) -> Self {
        // SAFETY: guaranteed by the caller.
        unsafe { self.times(Self::factor(AFFINE[1 << power])).xor(a) }
    }
}

/// The factors that move a 128-bit lane ahead by `bytes` bytes: for its low and for its high half.
const fn over(bytes: usize) -> [u64; 2] {
    [power_of_x(8 * bytes + 32), power_of_x(8 * bytes - 32)]
}

/// x^exponent modulo the polynomial of CRC32C, bit-reflected and shifted left by one, as a carry-less product
/// needs it.
const fn power_of_x(exponent: usize) -> u64 {
    let mut power: u32 = 1;
    let mut i = 0;
    while i < exponent {
        power = if power >> 31 != 0 { power << 1 ^ 0x1edc_6f41 } else { power << 1 };
        i += 1;
    }
    (power.reverse_bits() as u64) << 1
}

#[repr(C, align(64))]
struct Lanes([[u64; 2]; 4]);

/// Factors that move a lane over one to four vectors: index i is for i + 1 vectors.
static OVER_VECTORS: [Lanes; 4] =
    [Lanes([over(64); 4]), Lanes([over(128); 4]), Lanes([over(192); 4]), Lanes([over(256); 4])];

/// Factors that move each lane over the lanes that follow it in its vector. The last lane has none to pass;
/// its factors are zeros, so that its products are zero.
static OVER_LANES: Lanes = Lanes([over(48), over(32), over(16), [0; 2]]);

impl Zmm {
    /// The products of both halves of each lane with their factors: (low, high).
    #[inline(always)]
    unsafe fn carried(self, lanes: &Lanes) -> (Self, Self) {
        // SAFETY: guaranteed by the caller; `lanes` is 64 aligned bytes.
        unsafe {
            let factors = _mm512_load_si512(lanes.0.as_ptr().cast());
            let low = _mm512_clmulepi64_epi128::<0x00>(self.0, factors);
            let high = _mm512_clmulepi64_epi128::<0x11>(self.0, factors);
            (Self(low), Self(high))
        }
    }
}

// SAFETY: as for `Vector`.
unsafe impl Fold for Zmm {
    #[inline(always)]
    unsafe fn fold(state: Self, column: &[Self; folding::FOLD_VECTORS]) -> Self {
        // Moves each of the first three vectors to the place of the last one, and the state over all four.
        // Only the fold of the state depends on the previous column; the others are independent. SAFETY:
        // guaranteed by the caller.
        unsafe {
            let mut sum = column[3];
            for (i, vector) in column[..3].iter().enumerate() {
                let (low, high) = vector.carried(&OVER_VECTORS[2 - i]);
                sum = sum.xor3(low, high);
            }
            let (low, high) = state.carried(&OVER_VECTORS[3]);
            sum.xor3(low, high)
        }
    }

    #[inline(always)]
    unsafe fn residue(state: Self) -> u32 {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (low, high) = state.carried(&OVER_LANES);
            // The last lane (two 64-bit words) is added unchanged; its factors are zeros.
            let last = _mm512_maskz_mov_epi64(0b1100_0000, state.0);
            let lanes = low.xor3(high, Self(last)).0;
            let half = _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
            let lane = _mm_xor_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
            let (first, second) = (_mm_cvtsi128_si64(lane), _mm_extract_epi64::<1>(lane));
            _mm_crc32_u64(_mm_crc32_u64(0, first.cast_unsigned()), second.cast_unsigned()) as u32
        }
    }
}
