//! One code k+m: makes, updates and verifies the parity strips of a stripe.
//!
//! Owns the parity matrix and the choice of kernel. Decoding is planned in `crate::plan`.
//!
//! All strips of one call have the same length; anything else is a bug of the caller and is asserted.

use crate::kernel::Kernel;
use crate::matrix::Matrix;
use crate::{CodeError, DecodePlan, MAX_PARITY, MAX_STRIPS};

/// Bytes of each strip that `verify` codes at once: the tile's parity (16 KiB at most) stays in L1.
const VERIFY_TILE_BYTES: usize = 4096;

/// The code with k data strips and m parity strips.
#[derive(Clone, Debug)]
pub struct Code {
    matrix: Matrix,
    kernel: Kernel,
}

impl Code {
    /// The code k+m, with the fastest kernel of this processor.
    ///
    /// `k` is at least 1, `m` at most [`MAX_PARITY`] (0 for no parity), `k + m` at most [`MAX_STRIPS`];
    /// anything else is [`CodeError::Geometry`].
    pub fn new(k: usize, m: usize) -> Result<Code, CodeError> {
        if k == 0 || m > MAX_PARITY || k > MAX_STRIPS - m {
            return Err(CodeError::Geometry { k, m });
        }
        Ok(Code { matrix: Matrix::parity(k, m), kernel: Kernel::fastest() })
    }

    /// The same code on a kernel of the caller's choice, for tests and benchmarks.
    ///
    /// [`CodeError::KernelUnavailable`] if this processor cannot run it.
    pub fn with_kernel(self, kernel: Kernel) -> Result<Code, CodeError> {
        if !kernel.is_available() {
            return Err(CodeError::KernelUnavailable { kernel: kernel.name() });
        }
        Ok(Code { kernel, ..self })
    }

    /// Data strips of a stripe.
    pub fn k(&self) -> usize {
        self.matrix.columns()
    }

    /// Parity strips of a stripe.
    pub fn m(&self) -> usize {
        self.matrix.rows()
    }

    /// The kernel that this code runs on.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// What a byte of data strip `column` (0..k) is multiplied by in parity strip `row` (0..m).
    pub fn coefficient(&self, row: usize, column: usize) -> u8 {
        self.matrix.cell(row, column)
    }

    /// Makes all m parity strips from all k data strips.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        self.kernel.dot(&self.matrix, data, parity);
    }

    /// Brings all m parity strips up to date, in place, after data strip `column` changed from `old` to `new`.
    ///
    /// The strips may be the same byte range of the real ones.
    pub fn update(&self, column: usize, old: &[u8], new: &[u8], parity: &mut [&mut [u8]]) {
        assert!(column < self.k(), "data strip {column} of {}", self.k());
        assert_eq!(parity.len(), self.m(), "parity strips");
        let mut coefficients = [0; MAX_PARITY];
        for (row, coefficient) in coefficients[..self.m()].iter_mut().enumerate() {
            *coefficient = self.matrix.cell(row, column);
        }
        self.kernel.multiply_add(&coefficients[..self.m()], old, new, parity);
    }

    /// Whether the parity strips agree with the data strips. Works in tiles on the stack.
    pub fn verify(&self, data: &[&[u8]], parity: &[&[u8]]) -> bool {
        assert_eq!(data.len(), self.k(), "data strips");
        assert_eq!(parity.len(), self.m(), "parity strips");
        let strip_bytes = data[0].len();
        let mut strips = data.iter().chain(parity);
        assert!(strips.all(|strip| strip.len() == strip_bytes), "strips differ in length");

        let mut scratch = [[0; VERIFY_TILE_BYTES]; MAX_PARITY];
        let mut tiles: [&[u8]; MAX_STRIPS] = [&[]; MAX_STRIPS];
        for start in (0..strip_bytes).step_by(VERIFY_TILE_BYTES) {
            let range = start..strip_bytes.min(start + VERIFY_TILE_BYTES);
            for (tile, strip) in tiles.iter_mut().zip(data) {
                *tile = &strip[range.clone()];
            }
            let mut made = scratch.each_mut().map(|tile| &mut tile[..range.len()]);
            self.kernel.dot(&self.matrix, &tiles[..self.k()], &mut made[..self.m()]);
            if made.iter().zip(parity).any(|(made, strip)| **made != strip[range.clone()]) {
                return false;
            }
        }
        true
    }

    /// How to make the strips at the positions `lost` from k of the others.
    ///
    /// [`CodeError::TooManyLost`] if more than m are lost; [`CodeError::NoSuchPosition`] or
    /// [`CodeError::RepeatedPosition`] if the list is no set of positions.
    pub fn plan(&self, lost: &[usize]) -> Result<DecodePlan, CodeError> {
        DecodePlan::from_survivors(&self.matrix, self.kernel, lost)
    }

    /// How to make the strips at the positions `wanted` from k of those at the positions `available`.
    ///
    /// A wanted strip is never a source, also when it is available: its content can be checked this way.
    /// [`CodeError::TooFewSources`] if fewer than k available strips are left; [`CodeError::NoSuchPosition`] or
    /// [`CodeError::RepeatedPosition`] if a list is no set of positions.
    pub fn plan_with(&self, available: &[usize], wanted: &[usize]) -> Result<DecodePlan, CodeError> {
        DecodePlan::from_available(&self.matrix, self.kernel, available, wanted)
    }
}
