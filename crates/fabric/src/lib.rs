//! Connections between processes: frames over a byte stream, the first exchange, a server, and a reconnecting
//! client.
//!
//! Format: docs/format/wire.md.
//!
//! This crate owns framing, limits and access control. It does not interpret requests, with one exception:
//! payload comes from the memory of another process, so every block is verified against its checksum in the
//! body when a frame is received. Frames that this crate hands on contain only verified blocks.
//!
//! Framing and the first exchange do no I/O. They run over a [`Link`], which is a socket on a worker or a
//! simulated stream.
//!
//! Invariants:
//! - a length is checked against its limit before it is used;
//! - payload is received into block-aligned memory, and sent without a copy;
//! - any protocol error closes the connection, with a reason that both ends log;
//! - a connection has at most [`REQUESTS`] requests, and at most [`BYTES`] in them or in their replies, until
//!   the replies are sent, and all connections of a session together have twice as much;
//! - control traffic, which keeps a session alive and answers the calls of the service, is counted apart: at
//!   most [`CONTROL`] requests, with at most [`CONTROL_BYTES`] of bodies.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod client;
mod frame;
pub mod greeting;
mod link;
pub mod local;
mod server;
mod socket;
mod speakers;

pub use client::{Credential, Dial, Dialled, Remote};
pub use frame::{FrameError, Outbox, Receiver};
pub use greeting::Token;
pub use link::Link;
pub use server::{Door, Server};
pub use socket::{Listener, LocalListener, check_address, dial, dial_local};

use penstock_wire::Kind;
use std::time::Duration;

/// Longest body of a message in bytes.
pub const BODY_BYTES: usize = 1 << 20;
/// Longest payload of a message in bytes.
pub const PAYLOAD_BYTES: usize = 4 << 20;
/// The most requests of a connection in flight, until their replies are sent.
pub const REQUESTS: usize = 128;
/// The most requests of control traffic of a connection in flight. They are counted apart from [`REQUESTS`],
/// because other clients wait for the answers, and the session ends without them.
pub const CONTROL: usize = 1024;
/// The most bytes of bodies of [`CONTROL`] requests.
pub const CONTROL_BYTES: usize = 8 << 20;
/// The most bytes in [`REQUESTS`] or in their replies.
pub const BYTES: usize = 32 << 20;
/// The most connections of a server with a session that lives.
pub const CONNECTIONS: usize = penstock_wire::SESSIONS;
/// The most connections of a server in the first exchange, and those after it without a session. One more
/// closes the oldest of them.
pub const NEWCOMERS: usize = 64;
/// Time limit for the first exchange, and for Hello after it.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// Time limit for sending: a connection that accepts no data for this long is closed.
pub const SEND_PATIENCE: Duration = Duration::from_secs(60);

/// True for control traffic. One such request waits for news; no other request waits for another client.
fn is_control(kind: Kind) -> bool {
    matches!(kind, Kind::Watch | Kind::Ping)
}
