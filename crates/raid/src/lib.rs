//! The erasure code of Penstock's arrays: k data strips and up to eight parity strips, over GF(2^8).
//!
//! Owns the field, the coefficient matrices (a format: `docs/format/code.md`), the plans for making lost
//! strips from surviving ones, and the kernels that do the arithmetic and compute checksums in the same pass.
//! Does not own buffers, drives, placement or stored checksums. It has no clock, no files and no threads.
//!
//! ```text
//! code.rs    Code: encode, update, verify, locate      matrix.rs  coefficients, inversion of up to 8 x 8
//! plan.rs    DecodePlan: which strips to read, how     kernel.rs  the one dispatch over the kernel tiers
//! field.rs   GF(2^8) scalar arithmetic                 error.rs   errors of codes and plans
//! ```
//!
//! Invariants:
//! - Positions 0..k of a stripe are data strips, positions k..k+m parity strips.
//! - Byte i of a parity strip depends only on byte i of the data strips. So any byte range of a stripe may be
//!   coded alone, and strips may have any length and any alignment.
//! - Every square submatrix of a parity matrix is invertible (the code is MDS), so any k strips of a stripe
//!   determine all others. `tests/code/mds.rs` checks every minor for m <= 4. For larger m it checks every
//!   cell against the Cauchy matrix of the proof, and a sample of minors.
//! - Every kernel tier gives the same bytes.
//! - Unsafe code is only in the SIMD kernel modules.

#![deny(unsafe_code)]

mod code;
mod error;
mod field;
mod kernel;
mod matrix;
mod plan;

pub use code::{Code, Fault, Traffic};
pub use error::CodeError;
pub use kernel::{Checksums, Kernel, Residency, SourceCrcs, kernel_name};
pub use plan::DecodePlan;

/// Maximum number of strips of one stripe, data and parity together.
pub const MAX_STRIPS: usize = 64;

/// Maximum number of parity strips of one stripe.
pub const MAX_PARITY: usize = 8;
