//! Fuzzing of what decodes bytes from drives, messages, files and users.
//!
//! Owns the table of decoders ([`DECODERS`]) with their seeds, their checksums and what must hold for them, a
//! mutator, and a campaign that needs nothing but this crate. Formats stay in their crates.
//!
//! What must hold for any input, with assertions and overflow checks on:
//! - decoding never panics;
//! - decoding never allocates more than [`Bound`] says for the length of the input;
//! - what is accepted encodes again to bytes that decode to the same value, and, but for the fields that a target
//!   names, to the same bytes.
//!
//! A checksum hides what is behind it, so most inputs get theirs recomputed after they were changed.
#![forbid(unsafe_code)]
// It stops by the real clock and is no part of a simulation.
#![allow(clippy::disallowed_methods)]
// Checksums cover lists of ranges, and many such lists have one.
#![allow(clippy::single_range_in_vec_init)]

pub mod campaign;
pub mod check;
mod decoders;
pub mod hex;
pub mod mutate;
pub mod random;

pub use check::{Bound, Decoder, Verdict};
pub use decoders::DECODERS;

/// The decoder called `name`.
pub fn find(name: &str) -> Option<&'static Decoder> {
    DECODERS.iter().find(|decoder| decoder.name == name)
}
