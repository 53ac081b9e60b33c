//! Tests of the erasure code against definitions of their own, on every kernel that the processor runs.
//!
//! ```text
//! mds.rs       minors and cells of the parity matrices   golden.rs   parity bytes computed elsewhere
//! erasures.rs  every erasure pattern of small codes      kernels.rs  SIMD tiers against the portable one
//! errors.rs    rejected requests, messages, panics       field.rs    the tests' own field arithmetic
//! checksums.rs checksums in the same pass, wrong strips  random.rs   reproducible pseudo-random bytes
//! stripe.rs    stripes as vectors of strips
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
