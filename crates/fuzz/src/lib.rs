//! Fuzzing of the decoders of bytes from drives, messages, files and users.
//!
//! Owns the table of decoders ([`DECODERS`]) with their seeds, their checksums and their properties, a
//! mutator, and a campaign that needs nothing but this crate. Formats stay in their crates.
//!
//! These properties must hold for any input, with assertions and overflow checks on:
//! - Decoding never panics.
//! - Decoding never allocates more than [`Bound`] allows for the length of the input.
//! - An accepted input encodes again to bytes that decode to the same value. They are the same bytes, except
//!   for the fields that a decoder names.
//!
//! A wrong checksum hides the checks after it, so most inputs get their checksum recomputed after a mutation.
#![forbid(unsafe_code)]
// It stops by the real clock and is no part of a simulation.
#![allow(clippy::disallowed_methods)]
// A checksum covers a list of ranges, and many lists have a single range.
#![allow(clippy::single_range_in_vec_init)]

pub mod campaign;
pub mod check;
mod decoders;
pub mod hex;
pub mod mutate;
pub mod random;

pub use check::{Bound, Decoder, Verdict};
pub use decoders::DECODERS;

/// Returns the decoder with this name.
pub fn find(name: &str) -> Option<&'static Decoder> {
    DECODERS.iter().find(|decoder| decoder.name == name)
}
