//! The kernel family and its one dispatch: the arithmetic of whole strips, at the speed of the processor.
//!
//! Two primitives serve everything: `dot` makes strips as linear combinations of others (encode, decode,
//! verify), `multiply_add` folds a change of one strip into others (update).
//!
//! Invariants:
//! - every tier gives the same bytes for every length and alignment (`tests/code/kernels.rs`);
//! - shapes and lengths are asserted here, once, for every tier;
//! - the tier is chosen once per process; a tier that the processor lacks never runs.

mod portable;

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod avx512_gfni;

use crate::matrix::Matrix;
use std::sync::LazyLock;

/// A tier of the kernels. Which of them run here, [`Kernel::available`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Byte tables, on every processor; the reference for the others.
    Portable,
    /// x86-64 with AVX-512 (F, BW) and the GFNI affine instruction.
    Avx512Gfni,
}

static FASTEST: LazyLock<Kernel> =
    LazyLock::new(|| if Kernel::Avx512Gfni.is_available() { Kernel::Avx512Gfni } else { Kernel::Portable });

/// The name of the kernel that a new code runs on in this process.
pub fn kernel_name() -> &'static str {
    Kernel::fastest().name()
}

impl Kernel {
    /// The kernels that this processor runs, slowest first.
    pub fn available() -> Vec<Kernel> {
        [Kernel::Portable, Kernel::Avx512Gfni].into_iter().filter(|kernel| kernel.is_available()).collect()
    }

    /// The name of the kernel, as benchmarks and logs show it.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Portable => "portable",
            Kernel::Avx512Gfni => "avx512-gfni",
        }
    }

    /// The fastest kernel of this processor.
    pub(crate) fn fastest() -> Kernel {
        *FASTEST
    }

    pub(crate) fn is_available(self) -> bool {
        match self {
            Kernel::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512Gfni => avx512_gfni::is_available(),
            #[cfg(not(target_arch = "x86_64"))]
            Kernel::Avx512Gfni => false,
        }
    }

    /// `outputs[i]` becomes the sum over j of `matrix` cell (i, j) times `sources[j]`, byte by byte.
    pub(crate) fn dot(self, matrix: &Matrix, sources: &[&[u8]], outputs: &mut [&mut [u8]]) {
        assert_eq!(sources.len(), matrix.columns(), "source strips");
        assert_eq!(outputs.len(), matrix.rows(), "output strips");
        let strip_bytes = sources[0].len();
        assert!(sources.iter().all(|strip| strip.len() == strip_bytes), "source strips differ in length");
        assert!(outputs.iter().all(|strip| strip.len() == strip_bytes), "output strips differ in length");

        match self {
            // A mirror: nothing to compute.
            _ if sources.len() == 1 && (0..matrix.rows()).all(|row| matrix.cell(row, 0) == 1) => {
                outputs.iter_mut().for_each(|output| output.copy_from_slice(sources[0]));
            }
            Kernel::Portable => portable::dot(matrix, sources, outputs),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512Gfni => avx512_gfni::dot(matrix, sources, outputs),
            #[cfg(not(target_arch = "x86_64"))]
            Kernel::Avx512Gfni => unreachable!("a code never holds a kernel that the processor lacks"),
        }
    }

    /// `outputs[i]` grows by `coefficients[i]` times (`old` + `new`), byte by byte.
    pub(crate) fn multiply_add(self, coefficients: &[u8], old: &[u8], new: &[u8], outputs: &mut [&mut [u8]]) {
        assert_eq!(outputs.len(), coefficients.len(), "output strips");
        assert_eq!(old.len(), new.len(), "old and new strip differ in length");
        assert!(outputs.iter().all(|strip| strip.len() == old.len()), "output strips differ in length");

        match self {
            Kernel::Portable => portable::multiply_add(coefficients, old, new, outputs),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512Gfni => avx512_gfni::multiply_add(coefficients, old, new, outputs),
            #[cfg(not(target_arch = "x86_64"))]
            Kernel::Avx512Gfni => unreachable!("a code never holds a kernel that the processor lacks"),
        }
    }
}
