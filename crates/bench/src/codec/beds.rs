//! The memory that one core works on: a stripe that stays in its caches, and many stripes that do not.

use penstock_base::BLOCK_BYTES;

/// Bytes of each strip of the stripe that stays in L2.
pub(super) const WARM_STRIP_BYTES: usize = 64 << 10;

/// Bytes of each strip of the stripes that come from memory.
pub(super) const COLD_STRIP_BYTES: usize = 128 << 10;

/// Distance in bytes between strips of the warm stripe. It is no power of two, so that strips do not share
/// sets of L1.
const WARM_STEP_BYTES: usize = WARM_STRIP_BYTES + BLOCK_BYTES + 5 * 64;

/// Maximum number of strips of a measured code.
const MAX_STRIPS: usize = 18;

/// The amount of memory that a core works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    cold_bytes: usize,
    /// Data bytes that a warm run processes, which takes some milliseconds.
    pub(super) warm_run_bytes: usize,
}

impl Sizes {
    pub(super) fn new(quick: bool, cores: usize) -> Self {
        match quick {
            true => Self { cold_bytes: 8 << 20, warm_run_bytes: 4 << 20 },
            // Larger than the last-level cache even if that is large; many cores share the total.
            false => {
                Self { cold_bytes: ((4 << 30) / cores).clamp(128 << 20, 1 << 30), warm_run_bytes: 256 << 20 }
            }
        }
    }
}

/// Memory that begins at a page boundary.
struct Pages {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Pages {
    /// Fills every page, so that all of them are allocated.
    fn new(len: usize) -> Self {
        let mut bytes = vec![0_u8; len + BLOCK_BYTES];
        for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
        let start = bytes.as_ptr().addr().next_multiple_of(BLOCK_BYTES) - bytes.as_ptr().addr();
        Self { bytes, start, len }
    }

    fn all(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// The memory of one core.
pub(super) struct Bed {
    pub(super) sizes: Sizes,
    cold: Pages,
    warm: Pages,
    /// The checksums of one stripe.
    pub(super) crcs: Vec<u32>,
}

impl Bed {
    pub(super) fn new(sizes: Sizes) -> Self {
        let crcs = vec![0; MAX_STRIPS * COLD_STRIP_BYTES / BLOCK_BYTES];
        let warm = Pages::new(MAX_STRIPS * WARM_STEP_BYTES);
        Self { sizes, cold: Pages::new(sizes.cold_bytes), warm, crcs }
    }

    /// All of the cold memory.
    pub(super) fn cold(&mut self) -> &mut [u8] {
        self.cold.all()
    }

    /// The first `bytes` bytes of the warm memory.
    pub(super) fn near(&mut self, bytes: usize) -> &mut [u8] {
        &mut self.warm.all()[..bytes]
    }

    /// The strips of the warm stripe, and space for their checksums.
    pub(super) fn warm_stripe(&mut self, strips: usize) -> (Vec<&mut [u8]>, &mut [u32]) {
        let steps = self.warm.all().chunks_exact_mut(WARM_STEP_BYTES).take(strips);
        (steps.map(|step| &mut step[..WARM_STRIP_BYTES]).collect(), &mut self.crcs)
    }

    /// The cold stripes in order, each as its strips, and space for the checksums of one stripe.
    pub(super) fn cold_stripes(
        &mut self,
        strips: usize,
    ) -> (impl Iterator<Item = Vec<&mut [u8]>>, &mut [u32]) {
        let stripes = self.cold.all().chunks_exact_mut(strips * COLD_STRIP_BYTES);
        (stripes.map(|stripe| stripe.chunks_exact_mut(COLD_STRIP_BYTES).collect()), &mut self.crcs)
    }
}
