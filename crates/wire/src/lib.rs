//! Messages between clients and services: a header, a body, and a payload that is framed without a copy.
//!
//! Format: docs/format/wire.md.
//!
//! Bodies of the data path (read, write, commit, seek, space) have a fixed little-endian layout and may grow
//! at the end. All others are protobuf. The body contains the CRC32C of each block of the payload. This crate
//! has no I/O.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

pub mod data;
mod header;
pub mod metadata;
mod object;
pub mod transport;
mod version;

pub use header::{Failure, Frame, HEADER_BYTES, Header, Kind};
pub use object::Object;
pub use transport::{Service, Transport, session_of_hello};
pub use version::Version;

/// Number of slots of a session. A request with a sequence uses slot `sequence % SLOTS`, and the service
/// keeps its result. A slot has one request in flight at a time, and each use of it raises the sequence by
/// `SLOTS`.
pub const SLOTS: u64 = 64;
/// The most sessions of clients in other processes. Each has a place for its connection.
pub const SESSIONS: usize = 64;

#[cfg(test)]
mod tests;
