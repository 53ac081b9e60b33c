//! Dispatch over the kernel tiers, which do the arithmetic of strips with the vector instructions of the
//! processor.
//!
//! There are two primitives. `dot` makes strips as linear combinations of other strips (encode, decode,
//! verify, syndromes) and, on request, the CRC32C of all their blocks in the same pass. `multiply_add` adds a
//! change of one strip to other strips (update). `docs/kernels.md` describes how they work.
//!
//! ```text
//! kernel.rs   dispatch, groups of four outputs, the tail of a strip that is shorter than a vector
//! group.rs    one pass over the sources, and its shape        portable.rs the reference tier
//! columns.rs  the loops over strips, once for all SIMD tiers  tier.rs     entry points of a tier
//! folding.rs  the same loops with checksums                   gfni.rs     coefficients as bit matrices
//! vector.rs   the vector operations that a SIMD tier defines
//! avx512_gfni.rs, avx2.rs (shuffles; GFNI), neon.rs: the SIMD tiers
//! ```
//!
//! Invariants:
//! - every tier gives the same bytes and checksums for every length and alignment (`tests/code/kernels.rs`);
//! - shapes and lengths are asserted here, once, for every tier;
//! - the default tier is chosen once per process; a tier that the processor lacks never runs.

mod group;
mod portable;
mod tier;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[allow(unsafe_code)]
mod columns;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[allow(unsafe_code)]
mod vector;

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod folding;

#[cfg(target_arch = "x86_64")]
mod gfni;

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx2;

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx512_gfni;

#[cfg(target_arch = "aarch64")]
#[allow(unsafe_code)]
mod neon;

use crate::matrix::{GROUP_ROWS, Matrix};
use group::Group;
use penstock_base::{BLOCK_BYTES, crc32c};
use std::ops::Range;
use std::sync::LazyLock;
use tier::Tier;

/// Bytes of each strip that all groups process before the next tile begins. With 64 strips a tile of the
/// stripe is 1 MiB, which fits the L2 of current server processors.
const TILE_BYTES: usize = 16 << 10;

/// A tier of the kernels. [`Kernel::available`] lists the tiers that run on this processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Byte tables, on every processor. The reference for the other tiers.
    Portable,
    /// 64-bit Arm: table look-ups on 16 bytes.
    Neon,
    /// x86-64 with AVX2: byte shuffles on 32 bytes.
    Avx2,
    /// x86-64 with AVX2 and the GFNI affine instruction, on 32 bytes.
    Avx2Gfni,
    /// x86-64 with AVX-512 (F, BW), the GFNI affine instruction and VPCLMULQDQ, on 64 bytes. Folds checksums
    /// from the same registers.
    Avx512Gfni,
}

/// All tiers, slowest first.
const ALL: [Kernel; 5] = [Kernel::Portable, Kernel::Neon, Kernel::Avx2, Kernel::Avx2Gfni, Kernel::Avx512Gfni];

static FASTEST: LazyLock<Kernel> =
    LazyLock::new(|| *Kernel::available().last().expect("the portable kernel runs everywhere"));

/// The caller's hint where the bytes of a pass are. It changes the speed, never the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// The sources are in the caches, or the outputs are read again soon.
    #[default]
    Warm,
    /// The sources are in memory, and no processor reads the outputs soon. If all outputs begin at multiples
    /// of 64 bytes, tiers that can do so prefetch the sources and store the outputs past the caches.
    Cold,
}

/// The checksums that a pass makes: the CRC32C of each 4 KiB block. Strips must then be a whole number of
/// blocks.
///
/// Checksums are in strip order: those of all blocks of the first strip, then those of the second, and so on.
#[derive(Debug)]
pub struct Checksums<'a> {
    /// Checksums of the strips that the pass reads.
    pub sources: SourceCrcs<'a>,
    /// Receives the checksums of the strips that the pass makes.
    pub outputs: &'a mut [u32],
}

/// The checksums of the strips that a pass reads.
#[derive(Debug)]
pub enum SourceCrcs<'a> {
    /// The caller provides them, and they must be right: the checksum of an output that is the sum of the
    /// sources is computed from them.
    Known(&'a [u32]),
    /// The pass computes them.
    Wanted(&'a mut [u32]),
}

impl SourceCrcs<'_> {
    fn len(&self) -> usize {
        match self {
            SourceCrcs::Known(crcs) => crcs.len(),
            SourceCrcs::Wanted(crcs) => crcs.len(),
        }
    }
}

/// The name of the kernel that a new code runs on in this process.
pub fn kernel_name() -> &'static str {
    Kernel::fastest().name()
}

impl Kernel {
    /// The kernels that this processor runs, slowest first.
    pub fn available() -> Vec<Kernel> {
        ALL.into_iter().filter(|kernel| kernel.is_available()).collect()
    }

    /// The name of the kernel in benchmarks and log messages.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Portable => "portable",
            Kernel::Neon => "neon",
            Kernel::Avx2 => "avx2",
            Kernel::Avx2Gfni => "avx2-gfni",
            Kernel::Avx512Gfni => "avx512-gfni",
        }
    }

    /// The fastest kernel of this processor.
    pub(crate) fn fastest() -> Kernel {
        *FASTEST
    }

    /// The functions of this kernel; `None` if it belongs to another architecture.
    fn tier(self) -> Option<&'static Tier> {
        match self {
            Kernel::Portable => Some(&portable::TIER),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => Some(&avx2::shuffle::TIER),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2Gfni => Some(&avx2::gfni::TIER),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512Gfni => Some(&avx512_gfni::TIER),
            #[cfg(target_arch = "aarch64")]
            Kernel::Neon => Some(&neon::TIER),
            #[allow(unreachable_patterns)]
            _ => None,
        }
    }

    /// The functions of this kernel. Panics if it belongs to another architecture.
    fn running(self) -> &'static Tier {
        self.tier().expect("a code never holds a kernel that the processor lacks")
    }

    pub(crate) fn is_available(self) -> bool {
        self.tier().is_some_and(|tier| (tier.is_available)())
    }

    /// Sets `outputs[i]` to the sum over j of `matrix` cell (i, j) times `sources[j]`, byte by byte.
    pub(crate) fn dot(
        self,
        matrix: &Matrix,
        sources: &[&[u8]],
        outputs: &mut [&mut [u8]],
        residency: Residency,
        checksums: Option<Checksums<'_>>,
    ) {
        assert_eq!(sources.len(), matrix.columns(), "source strips");
        assert_eq!(outputs.len(), matrix.rows(), "output strips");
        let strip_bytes = sources[0].len();
        assert!(sources.iter().all(|strip| strip.len() == strip_bytes), "source strips differ in length");
        assert!(outputs.iter().all(|strip| strip.len() == strip_bytes), "output strips differ in length");
        if let Some(checksums) = &checksums {
            let blocks = strip_bytes / BLOCK_BYTES;
            assert!(strip_bytes.is_multiple_of(BLOCK_BYTES), "a checksum covers a whole block");
            assert_eq!(checksums.sources.len(), sources.len() * blocks, "checksums of the sources");
            assert_eq!(checksums.outputs.len(), outputs.len() * blocks, "checksums of the outputs");
        }

        let mirror = sources.len() == 1 && (0..matrix.rows()).all(|row| matrix.cell(row, 0) == 1);
        match checksums {
            _ if mirror => copy(sources[0], outputs, checksums),
            Some(checksums) => self.dot_checked(matrix, sources, outputs, residency, checksums),
            // A single group needs no tiles: it reads each source once.
            None if outputs.len() <= GROUP_ROWS => {
                self.dot_range(matrix, sources, outputs, residency, 0..strip_bytes);
            }
            None => {
                for range in tiles(strip_bytes, TILE_BYTES) {
                    self.dot_range(matrix, sources, outputs, residency, range);
                }
            }
        }
    }

    /// Makes one byte range of all outputs, one group after the other.
    fn dot_range(
        self,
        matrix: &Matrix,
        sources: &[&[u8]],
        outputs: &mut [&mut [u8]],
        residency: Residency,
        range: Range<usize>,
    ) {
        let tier = self.running();
        let whole = range.start..range.end - range.len() % tier.vector_bytes;
        for (at, outputs) in outputs.chunks_mut(GROUP_ROWS).enumerate() {
            let cold = residency == Residency::Cold;
            let first_row = at * GROUP_ROWS;
            let mut group = Group { matrix, first_row, sources, outputs, range: whole.clone(), cold };
            (tier.dot)(&mut group);
            if whole.end < range.end {
                group.range = whole.end..range.end;
                portable::dot(&mut group);
            }
        }
    }

    /// Makes all outputs and the checksums of every block, in one pass over memory.
    fn dot_checked(
        self,
        matrix: &Matrix,
        sources: &[&[u8]],
        outputs: &mut [&mut [u8]],
        residency: Residency,
        mut checksums: Checksums<'_>,
    ) {
        let strip_bytes = sources[0].len();
        match self.running().dot_checked {
            Some(dot_checked) if !outputs.is_empty() => {
                let blocks = strip_bytes / BLOCK_BYTES;
                let tile_bytes = if outputs.len() > GROUP_ROWS { TILE_BYTES } else { strip_bytes };
                for range in tiles(strip_bytes, tile_bytes) {
                    let groups =
                        outputs.chunks_mut(GROUP_ROWS).zip(checksums.outputs.chunks_mut(GROUP_ROWS * blocks));
                    for (at, (outputs, output_crcs)) in groups.enumerate() {
                        let cold = residency == Residency::Cold;
                        let (first_row, range) = (at * GROUP_ROWS, range.clone());
                        let mut group = Group { matrix, first_row, sources, outputs, range, cold };
                        match &mut checksums.sources {
                            SourceCrcs::Wanted(crcs) if at > 0 => {
                                let mut known = SourceCrcs::Known(crcs);
                                dot_checked(&mut group, &mut known, output_crcs);
                            }
                            crcs => dot_checked(&mut group, crcs, output_crcs),
                        }
                    }
                }
            }
            // The other tiers compute the checksums of a block of every strip while the block is still in L1.
            _ => {
                for range in tiles(strip_bytes, BLOCK_BYTES) {
                    self.dot_range(matrix, sources, outputs, Residency::Warm, range.clone());
                    check_blocks(sources, outputs, &mut checksums, range);
                }
            }
        }
    }

    /// Measures reading, for benchmarks: reads `bytes` and returns a byte that depends on them. A SIMD tier
    /// skips a tail that is shorter than eight vectors.
    pub fn read(self, bytes: &[u8], residency: Residency) -> u8 {
        (self.running().read)(bytes, residency == Residency::Cold)
    }

    /// Measures writing, for benchmarks: fills `bytes` with zeros, past the caches if they are cold and
    /// aligned. A SIMD tier skips a tail that is shorter than eight vectors.
    pub fn fill(self, bytes: &mut [u8], residency: Residency) {
        (self.running().fill)(bytes, residency == Residency::Cold);
    }

    /// Adds `coefficients[i]` times (`old` + `new`) to `outputs[i]`, byte by byte.
    pub(crate) fn multiply_add(self, coefficients: &[u8], old: &[u8], new: &[u8], outputs: &mut [&mut [u8]]) {
        assert_eq!(outputs.len(), coefficients.len(), "output strips");
        assert_eq!(old.len(), new.len(), "old and new strip differ in length");
        assert!(outputs.iter().all(|strip| strip.len() == old.len()), "output strips differ in length");

        let tier = self.running();
        let whole = old.len() - old.len() % tier.vector_bytes;
        for (coefficients, outputs) in coefficients.chunks(GROUP_ROWS).zip(outputs.chunks_mut(GROUP_ROWS)) {
            (tier.multiply_add)(coefficients, old, new, outputs, whole);
            portable::multiply_add(coefficients, old, new, outputs, whole..old.len());
        }
    }
}

/// Consecutive ranges of at most `tile_bytes` bytes that cover a strip.
pub(crate) fn tiles(strip_bytes: usize, tile_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    (0..strip_bytes).step_by(tile_bytes.max(1)).map(move |at| at..strip_bytes.min(at + tile_bytes))
}

/// The pass of a mirror: copies the source to every output.
fn copy(source: &[u8], outputs: &mut [&mut [u8]], checksums: Option<Checksums<'_>>) {
    outputs.iter_mut().for_each(|output| output.copy_from_slice(source));
    let Some(checksums) = checksums else { return };
    let own = match checksums.sources {
        SourceCrcs::Known(crcs) => crcs,
        SourceCrcs::Wanted(crcs) => {
            crcs.iter_mut()
                .zip(source.chunks_exact(BLOCK_BYTES))
                .for_each(|(crc, block)| *crc = crc32c(block));
            crcs
        }
    };
    if !own.is_empty() {
        checksums.outputs.chunks_exact_mut(own.len()).for_each(|crcs| crcs.copy_from_slice(own));
    }
}

/// Computes the checksums of one block of every strip.
fn check_blocks(
    sources: &[&[u8]],
    outputs: &[&mut [u8]],
    checksums: &mut Checksums<'_>,
    range: Range<usize>,
) {
    let (block, blocks) = (range.start / BLOCK_BYTES, sources[0].len() / BLOCK_BYTES);
    if let SourceCrcs::Wanted(crcs) = &mut checksums.sources {
        for (strip, source) in sources.iter().enumerate() {
            crcs[strip * blocks + block] = crc32c(&source[range.clone()]);
        }
    }
    for (strip, output) in outputs.iter().enumerate() {
        checksums.outputs[strip * blocks + block] = crc32c(&output[range.clone()]);
    }
}
