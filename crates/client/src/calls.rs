//! Requests and their replies.

use crate::session::Client;
use penstock_base::{Buf, Kind as Todo};
use penstock_wire::{Failure, Frame, Kind};
use prost::Message;

impl Client {
    /// A request that may be repeated without harm.
    pub(crate) async fn ask<R: Message + Default>(
        &self,
        kind: Kind,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let (body, _) = self.exchange(kind, 0, body.encode_to_vec(), Vec::new()).await?;
        decode(&body)
    }

    /// A request that must be done once: it has a place in the session.
    pub(crate) async fn change<R: Message + Default>(
        &self,
        kind: Kind,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let _slot =
            self.in_flight.acquire().await.map_err(|_| Failure::new(Todo::Internal, "session is closed"))?;
        let sequence = self.sequence.get() + 1;
        self.sequence.set(sequence);
        let (body, _) = self.exchange(kind, sequence, body.encode_to_vec(), Vec::new()).await?;
        decode(&body)
    }

    /// A request of the data path.
    pub(crate) async fn data(
        &self,
        kind: Kind,
        body: Vec<u8>,
        payload: Vec<Buf>,
    ) -> Result<(Vec<u8>, Vec<Buf>), Failure> {
        self.exchange(kind, 0, body, payload).await
    }

    async fn exchange(
        &self,
        kind: Kind,
        sequence: u64,
        body: Vec<u8>,
        payload: Vec<Buf>,
    ) -> Result<(Vec<u8>, Vec<Buf>), Failure> {
        let mut frame = Frame::request(kind, body, payload);
        frame.header.session = self.session;
        frame.header.sequence = sequence;
        self.latency.of(kind).time(&self.env, self.transport.call(frame)).await?.into_result()
    }
}

fn decode<R: Message + Default>(body: &[u8]) -> Result<R, Failure> {
    R::decode(body).map_err(|error| Failure::new(Todo::Internal, format!("reply: {error}")))
}
