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
pub use transport::Transport;

/// Version of the messages of this release. Two adjacent versions work together.
pub const VERSION: u16 = 1;

#[cfg(test)]
mod tests;
