//! The traits between clients and services: [`Transport`] carries requests, [`Service`] answers them.

use crate::header::{Failure, Frame, Kind};
use crate::metadata::HelloReply;
use penstock_base::LocalBoxFuture;
use prost::Message;

/// Carries requests to a service and returns the replies. Within a process bodies are encoded and decoded as
/// on a network, and payload buffers pass by reference. Connections between processes implement the same
/// trait (`penstock-fabric`).
pub trait Transport {
    /// Sends a request and waits for its reply. An error means that no reply came; the service may have
    /// carried out the request.
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>>;
}

/// Answers requests that come from other processes. The transport binds each connection to one session, by
/// Hello, so the session in the header is that of the sender.
pub trait Service {
    /// Carries out a request to its end and returns the reply.
    fn serve(&self, request: Frame) -> LocalBoxFuture<'_, Frame>;

    /// The connections are lost over which the requests of a session have come that are being carried out,
    /// and it `has_another` or none. Those that wait for news may be given up: their client sends them again.
    fn hung_up(&self, session: u64, has_another: bool);

    /// True if a session lives. A connection of one that has ended gives its place to another.
    fn has_session(&self, session: u64) -> bool;
}

/// The number of the session that a reply to Hello gives; none if it is another reply, or a failure.
pub fn session_of_hello(reply: &Frame) -> Option<u64> {
    let is_success = reply.header.kind == Kind::Hello && reply.header.reply && reply.header.status == 0;
    let hello = HelloReply::decode(&reply.body[..]).ok().filter(|_| is_success)?;
    Some(hello.session).filter(|session| *session > 0)
}
