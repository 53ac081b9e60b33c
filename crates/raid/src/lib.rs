//! The erasure code of Penstock's arrays: k data strips and up to eight parity strips, over GF(2^8).
//!
//! Owns the field, the coefficient matrices (a format: `docs/format/code.md`), the plan for making lost
//! strips from surviving ones, and the kernels that do the arithmetic. Does not own buffers, drives, placement
//! or checksums; it has no clock, no files and no threads.
//!
//! ```text
//! code.rs    Code: encode, update, verify             matrix.rs  coefficients, inversion of up to 8 x 8
//! plan.rs    DecodePlan: which strips to read, how     kernel.rs  the one dispatch over the kernel tiers
//! field.rs   GF(2^8) scalar arithmetic                 error.rs   what a caller can get wrong
//! ```
//!
//! Invariants:
//! - Position 0..k of a stripe is a data strip, k..k+m a parity strip.
//! - Byte i of a parity strip depends on byte i of the data strips only, so any byte range of a stripe may be
//!   coded alone, and strips may have any length and any alignment.
//! - Every square submatrix of a parity matrix is invertible (the code is MDS): any k strips of a stripe make
//!   all others. `tests/code/mds.rs` checks it for every allowed geometry.
//! - Every kernel tier gives the same bytes.
//! - Unsafe code lives in the SIMD kernel modules only.

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

/// Most strips of one stripe, data and parity together.
pub const MAX_STRIPS: usize = 64;

/// Most parity strips of one stripe.
pub const MAX_PARITY: usize = 8;
