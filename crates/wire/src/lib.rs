//! Messages between clients and services: a fixed header, a body, and a payload that is never copied to be framed.
//! Format: docs/format/wire.md.
//!
//! Data-path bodies (read, write, commit) are fixed and little-endian and may grow at the end; all others are
//! protobuf. The payload is covered by the CRC32C of its blocks, which the body carries. Pure: no I/O.
#![forbid(unsafe_code)]

pub mod data;
mod header;
pub mod names;
pub mod transport;

pub use header::{Failure, Frame, HEADER_BYTES, Header, Kind};
pub use transport::{Service, Transport};

/// Requests of one session whose results are kept: a request with a sequence stands in slot `sequence % SLOTS`, which
/// has one request at a time, and each use of a slot adds `SLOTS`.
pub const SLOTS: u64 = 64;

/// Version of the messages of this release. Two adjacent versions work together.
pub const VERSION: u16 = 1;

#[cfg(test)]
mod tests;
