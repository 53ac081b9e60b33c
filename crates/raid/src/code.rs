//! One code k+m: encodes, updates and verifies the parity strips of a stripe, and locates one silently wrong
//! strip.
//!
//! Owns the parity matrix and the choice of kernel. `crate::plan` plans decoding.
//!
//! All strips of one call must have the same length. The code asserts this: anything else is a bug of the
//! caller.

use crate::field::multiply;
use crate::kernel::{Checksums, Kernel, Residency, SourceCrcs, tiles};
use crate::matrix::Matrix;
use crate::{CodeError, DecodePlan, MAX_PARITY, MAX_STRIPS};
use penstock_base::{BLOCK_BYTES, crc32c};
use std::ops::Range;

/// Bytes of each strip that `verify` encodes in one step. The parity of one tile (at most 32 KiB) stays in
/// L1.
const VERIFY_TILE_BYTES: usize = BLOCK_BYTES;

/// The parity of one tile.
type Scratch = [[u8; VERIFY_TILE_BYTES]; MAX_PARITY];

fn scratch() -> Scratch {
    [[0; VERIFY_TILE_BYTES]; MAX_PARITY]
}

/// A pass with the memory traffic of a code's pass but only sums as arithmetic, for benchmarks: see
/// [`Code::traffic`].
#[derive(Clone, Debug)]
pub struct Traffic {
    matrix: Matrix,
    kernel: Kernel,
}

impl Traffic {
    /// Sets every output to the sum of the sources.
    pub fn run(&self, sources: &[&[u8]], outputs: &mut [&mut [u8]], residency: Residency) {
        self.kernel.dot(&self.matrix, sources, outputs, residency, None);
    }
}

/// The result of comparing a stripe's parity with its data by syndromes. The syndrome of a parity strip is
/// the sum of its actual and its expected bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Parity agrees with the data.
    None,
    /// One wrong strip, at this position, explains every byte that disagrees.
    ///
    /// With m = 2, two strips that are wrong in the same bytes can look like one other wrong strip. Each
    /// further parity strip makes this 256 times less likely for each such byte.
    Strip(usize),
    /// No single strip explains the disagreement, or m is below 2, where no strip can be located.
    Unlocated,
}

/// The code with k data strips and m parity strips.
#[derive(Clone, Debug)]
pub struct Code {
    matrix: Matrix,
    kernel: Kernel,
}

impl Code {
    /// The code k+m, with the fastest kernel of this processor.
    ///
    /// Returns [`CodeError::Geometry`] unless `k` is at least 1, `m` at most [`MAX_PARITY`] (0 for no parity)
    /// and `k + m` at most [`MAX_STRIPS`].
    pub fn new(k: usize, m: usize) -> Result<Code, CodeError> {
        if k == 0 || m > MAX_PARITY || k > MAX_STRIPS - m {
            return Err(CodeError::Geometry { k, m });
        }
        Ok(Code { matrix: Matrix::parity(k, m), kernel: Kernel::fastest() })
    }

    /// The same code on a kernel of the caller's choice, for tests and benchmarks.
    ///
    /// Returns [`CodeError::KernelUnavailable`] if this processor cannot run the kernel.
    pub fn with_kernel(self, kernel: Kernel) -> Result<Code, CodeError> {
        if !kernel.is_available() {
            return Err(CodeError::KernelUnavailable { kernel: kernel.name() });
        }
        Ok(Code { kernel, ..self })
    }

    /// The number of data strips of a stripe.
    pub fn k(&self) -> usize {
        self.matrix.columns()
    }

    /// The number of parity strips of a stripe.
    pub fn m(&self) -> usize {
        self.matrix.rows()
    }

    /// The kernel that this code runs on.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// The coefficient of data strip `column` (0..k) in parity strip `row` (0..m).
    pub fn coefficient(&self, row: usize, column: usize) -> u8 {
        self.matrix.cell(row, column)
    }

    /// Makes all m parity strips from all k data strips.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        self.encode_with(data, parity, Residency::Warm, None);
    }

    /// As [`Code::encode`], with a hint where the data is, and with the checksums of all strips if
    /// `checksums` is given.
    pub fn encode_with(
        &self,
        data: &[&[u8]],
        parity: &mut [&mut [u8]],
        residency: Residency,
        checksums: Option<Checksums<'_>>,
    ) {
        self.kernel.dot(&self.matrix, data, parity, residency, checksums);
    }

    /// A pass that moves as much memory as a pass of this code that makes `made` strips from k, without its
    /// arithmetic.
    pub fn traffic(&self, made: usize) -> Traffic {
        assert!(made <= MAX_PARITY, "{made} strips of one pass");
        Traffic { matrix: Matrix::ones(made, self.k()), kernel: self.kernel }
    }

    /// Updates all m parity strips in place after data strip `column` changed from `old` to `new`.
    ///
    /// The slices may cover any byte range of the strips, the same range in all of them.
    pub fn update(&self, column: usize, old: &[u8], new: &[u8], parity: &mut [&mut [u8]]) {
        assert!(column < self.k(), "data strip {column} of {}", self.k());
        assert_eq!(parity.len(), self.m(), "parity strips");
        let mut coefficients = [0; MAX_PARITY];
        for (row, coefficient) in coefficients[..self.m()].iter_mut().enumerate() {
            *coefficient = self.matrix.cell(row, column);
        }
        self.kernel.multiply_add(&coefficients[..self.m()], old, new, parity);
    }

    /// True if the parity strips agree with the data strips. Works in tiles on the stack.
    pub fn verify(&self, data: &[&[u8]], parity: &[&[u8]]) -> bool {
        let mut made = scratch();
        self.tiles(data, parity).all(|range| {
            self.encode_tile(data, &range, &mut made, None);
            made.iter().zip(parity).all(|(made, strip)| made[..range.len()] == strip[range.clone()])
        })
    }

    /// As [`Code::verify`], and stores the CRC32C of every block in `crcs` in the same pass over memory: data
    /// strips first, then parity strips, each with its blocks in order. Strips must be a whole number of
    /// blocks.
    pub fn verify_checked(&self, data: &[&[u8]], parity: &[&[u8]], crcs: &mut [u32]) -> bool {
        let (k, blocks) = (self.k(), data[0].len() / BLOCK_BYTES);
        assert!(data[0].len().is_multiple_of(BLOCK_BYTES), "a checksum covers a whole block");
        assert_eq!(crcs.len(), (k + self.m()) * blocks, "checksums of all strips");
        let (mut agrees, mut made) = (true, scratch());
        for (block, range) in self.tiles(data, parity).enumerate() {
            let (mut of_data, mut of_made) = ([0; MAX_STRIPS], [0; MAX_PARITY]);
            let sources = SourceCrcs::Wanted(&mut of_data[..k]);
            let checksums = Checksums { sources, outputs: &mut of_made[..self.m()] };
            self.encode_tile(data, &range, &mut made, Some(checksums));
            for (strip, crc) in of_data[..k].iter().enumerate() {
                crcs[strip * blocks + block] = *crc;
            }
            for (row, strip) in parity.iter().enumerate() {
                let same = made[row] == strip[range.clone()];
                agrees &= same;
                // Equal bytes have equal checksums.
                crcs[(k + row) * blocks + block] =
                    if same { of_made[row] } else { crc32c(&strip[range.clone()]) };
            }
        }
        agrees
    }

    /// Finds the wrong strip when parity disagrees with data and no checksum names a strip: see [`Fault`].
    pub fn locate(&self, data: &[&[u8]], parity: &[&[u8]]) -> Fault {
        let (mut fault, mut syndromes) = (Fault::None, scratch());
        for range in self.tiles(data, parity) {
            self.encode_tile(data, &range, &mut syndromes, None);
            for (syndrome, strip) in syndromes.iter_mut().zip(parity) {
                syndrome.iter_mut().zip(&strip[range.clone()]).for_each(|(sum, byte)| *sum ^= byte);
            }
            let rows: Vec<&[u8]> = syndromes[..self.m()].iter().map(|row| &row[..range.len()]).collect();
            fault = match (fault, self.locate_in(&rows)) {
                (fault, Fault::None) => fault,
                (Fault::None, found) => found,
                (fault, found) if found == fault => fault,
                _ => return Fault::Unlocated,
            };
        }
        fault
    }

    /// Locates the fault in one tile from its syndromes, one for each parity strip.
    ///
    /// An error e in data strip j makes the syndrome of each row r equal to c(r, j) e, byte by byte. An error
    /// in parity strip r makes only the syndrome of row r nonzero. No two positions explain the same byte,
    /// because in an MDS code any two columns of (C | I) with two or more rows are independent.
    fn locate_in(&self, syndromes: &[&[u8]]) -> Fault {
        let (k, m) = (self.k(), self.m());
        let bytes = syndromes.first().map_or(0, |row| row.len());
        let wrong = (0..bytes).find(|&byte| syndromes.iter().any(|row| row[byte] != 0));
        let Some(first) = wrong else { return Fault::None };
        let explains = |position: usize, byte: usize| match position.checked_sub(k) {
            // Row 0 is all ones, so its syndrome is the error itself.
            None => (0..m).all(|row| {
                syndromes[row][byte] == multiply(self.matrix.cell(row, position), syndromes[0][byte])
            }),
            Some(parity) => (0..m).all(|row| row == parity || syndromes[row][byte] == 0),
        };
        let candidates = if m >= 2 { 0..k + m } else { 0..0 };
        match candidates.into_iter().find(|&position| explains(position, first)) {
            Some(strip) if (first..bytes).all(|byte| explains(strip, byte)) => Fault::Strip(strip),
            _ => Fault::Unlocated,
        }
    }

    /// The byte ranges that `verify` and `locate` process one at a time. Asserts the shape of the stripe.
    fn tiles(&self, data: &[&[u8]], parity: &[&[u8]]) -> impl Iterator<Item = Range<usize>> + use<> {
        assert_eq!(data.len(), self.k(), "data strips");
        assert_eq!(parity.len(), self.m(), "parity strips");
        let strip_bytes = data[0].len();
        let mut strips = data.iter().chain(parity);
        assert!(strips.all(|strip| strip.len() == strip_bytes), "strips differ in length");
        tiles(strip_bytes, VERIFY_TILE_BYTES)
    }

    /// Encodes one range of the data strips into `made`.
    fn encode_tile(
        &self,
        data: &[&[u8]],
        range: &Range<usize>,
        made: &mut Scratch,
        checksums: Option<Checksums<'_>>,
    ) {
        let mut tiles: [&[u8]; MAX_STRIPS] = [&[]; MAX_STRIPS];
        for (tile, strip) in tiles.iter_mut().zip(data) {
            *tile = &strip[range.clone()];
        }
        let mut made = made.each_mut().map(|tile| &mut tile[..range.len()]);
        self.encode_with(&tiles[..self.k()], &mut made[..self.m()], Residency::Warm, checksums);
    }

    /// Plans how to make the strips at the positions `lost` from k of the others.
    ///
    /// Returns [`CodeError::TooManyLost`] if more than m strips are lost, [`CodeError::NoSuchPosition`] for a
    /// position outside the stripe, and [`CodeError::RepeatedPosition`] for a position that is listed twice.
    pub fn plan(&self, lost: &[usize]) -> Result<DecodePlan, CodeError> {
        DecodePlan::from_survivors(&self.matrix, self.kernel, lost)
    }

    /// Plans how to make the strips at the positions `wanted` from k of the strips at the positions
    /// `available`.
    ///
    /// A wanted strip is never a source, even if it is available, so its content can be checked against the
    /// others. Returns [`CodeError::TooFewSources`] if fewer than k available strips are not wanted,
    /// [`CodeError::NoSuchPosition`] for a position outside the stripe, and [`CodeError::RepeatedPosition`]
    /// for a position that is listed twice.
    pub fn plan_with(&self, available: &[usize], wanted: &[usize]) -> Result<DecodePlan, CodeError> {
        DecodePlan::from_available(&self.matrix, self.kernel, available, wanted)
    }
}
