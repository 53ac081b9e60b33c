//! Tests of the erasure code against definitions of their own, on every kernel that the processor runs.
//!
//! ```text
//! mds.rs       every minor of every parity matrix       golden.rs   parity bytes computed elsewhere
//! erasures.rs  every erasure pattern of small codes     kernels.rs  SIMD tier against the portable one
//! errors.rs    what is refused, and how                 field.rs    field arithmetic of the tests' own
//! checksums.rs checksums in the same pass, wrong strips
//! ```

#![allow(clippy::unwrap_used)]

mod checksums;
mod erasures;
mod errors;
mod field;
mod golden;
mod kernels;
mod mds;
mod random;
mod stripe;
