//! The traits between clients and services: [`Transport`] carries requests, [`Service`] answers them.

use crate::header::{Failure, Frame};
use penstock_base::LocalBoxFuture;

/// Carries requests to a service and returns the replies. Within a process bodies are encoded and decoded as
/// on a network, and payload buffers pass by reference. Connections between processes implement the same
/// trait (`penstock-fabric`).
pub trait Transport {
    /// Sends a request and waits for its reply. An error means that no reply came; the service may have
    /// carried out the request.
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>>;
}

/// Answers requests that come from other processes.
pub trait Service {
    /// Carries out a request to its end and returns the reply.
    fn serve(&self, request: Frame) -> LocalBoxFuture<'_, Frame>;
}
