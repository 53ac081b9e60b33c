//! Connections between processes: frames over a stream of bytes, the first exchange, a server and a client that
//! connects again. Format: docs/format/wire.md.
//!
//! Owns framing, bounds, and who may connect. Knows nothing of what requests mean, but for one thing: payload comes from
//! another memory here, so every block is verified against the checksum that the body has for it, where frames are
//! received, and whoever takes a frame from this crate has verified blocks.
//!
//! Framing and the first exchange are pure; a [`Link`] is the stream below them, a socket on a worker or a simulated one.
//!
//! Invariants: no length is believed before it is bounded; payload is received into block-aligned memory and sent from
//! where it lies; whatever is wrong closes the connection, with a reason that both sides log; a connection holds at most
//! [`REQUESTS`] requests, and of their payloads and replies at most [`BYTES`], until their replies are sent; of those that wait
//! for other clients [`WAITING`], with [`WAITING_BYTES`] of bodies.
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

/// Longest body of a message.
pub const BODY_BYTES: usize = 1 << 20;
/// Longest payload of a message.
pub const PAYLOAD_BYTES: usize = 4 << 20;
/// Requests of one connection that are being done or wait for their replies to be sent.
pub const REQUESTS: usize = 128;
/// Requests of one connection that wait for other clients, or for news. They are counted apart from [`REQUESTS`], for which
/// those clients may wait. A client that has more of them waits with the rest.
pub const WAITING: usize = 1 << 16;
/// Bodies of [`WAITING`] requests: each of a kind that is short from any client that needs so many.
pub const WAITING_BYTES: usize = 32 << 20;
/// Payload of [`REQUESTS`] and of their replies.
pub const BYTES: usize = 32 << 20;
/// Connections of one server that were let in.
pub const CONNECTIONS: usize = 64;
/// Connections of one server that wait to be let in; one more, and the oldest of them is closed.
pub const NEWCOMERS: usize = 64;
/// Time for the first exchange.
pub const HANDSHAKE: Duration = Duration::from_secs(5);
/// A connection that takes nothing of what is to be sent for this long is closed.
pub const SEND_PATIENCE: Duration = Duration::from_secs(60);

/// True for a request that may wait for another client, or for news, with nothing else held. Somebody may wait for any other.
fn may_wait(kind: Kind) -> bool {
    matches!(kind, Kind::GetAttr | Kind::Lease | Kind::Watch | Kind::Ping)
}
