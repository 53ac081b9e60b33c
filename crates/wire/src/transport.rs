//! How frames get from a client to a service.

use crate::header::{Failure, Frame};
use penstock_base::LocalBoxFuture;

/// Carries requests and brings replies. In one process bodies are encoded and decoded as on a network, and payload
/// buffers pass by reference; TCP stands behind the same trait (`penstock-fabric`).
pub trait Transport {
    /// Sends a request and waits for its reply. An error means that no reply came; the request may have been done.
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>>;
}

/// What answers requests that come from other processes.
pub trait Service {
    /// Does what a request asks, to its end, and gives the reply.
    fn serve(&self, request: Frame) -> LocalBoxFuture<'_, Frame>;
}
