//! Requests and their replies.

use crate::session::Client;
use penstock_base::{Buf, Ino, Kind as Todo};
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

    /// A request that changes something and must be done once: it has a slot in the session.
    pub(crate) async fn change<R: Message + Default>(
        &self,
        kind: Kind,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let reply = self.once(kind, body).await?;
        self.restarts.changed();
        Ok(reply)
    }

    /// The same, of an inode's attributes. Where the file is known, every fsync of it tells of a loss as well.
    pub(crate) async fn change_inode<R: Message + Default>(
        &self,
        kind: Kind,
        ino: Ino,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let reply = self.change(kind, body).await?;
        self.note_unsynced(ino);
        Ok(reply)
    }

    /// The same, for what is in memory only and need not become durable.
    pub(crate) async fn once<R: Message + Default>(
        &self,
        kind: Kind,
        body: &impl Message,
    ) -> Result<R, Failure> {
        loop {
            let slot = self.slots.take().await?;
            let done = self.exchange(kind, slot.sequence(), body.encode_to_vec(), Vec::new()).await;
            // Another client may need the slot before it goes on.
            drop(slot);
            match done {
                Err(failure) if failure.is_ask_again() => {}
                done => return decode(&done?.0),
            }
        }
    }

    /// The same, to settle a file: other clients may wait for that, and this client for them with all it asks otherwise.
    pub(crate) async fn settle_once<R: Message + Default>(
        &self,
        kind: Kind,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let slot = self.slots.take_reserved().await?;
        let (body, _) = self.exchange(kind, slot.sequence(), body.encode_to_vec(), Vec::new()).await?;
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
        self.check_lives()?;
        let mut frame = Frame::request(kind, body, payload);
        frame.header.session = self.session;
        frame.header.sequence = sequence;
        loop {
            let sent = self.env.now();
            let called = self.transport.call(frame.clone());
            let reply = self.latency.of(kind).time(&self.env, called).await?;
            let start = reply.header.generation;
            self.note_generation(start);
            let result = reply.into_result();
            match &result {
                Ok(_) => self.leases.clock.answered(sent),
                Err(failure) => self.note_failure(failure),
            }
            if !is_about_the_session(kind) {
                self.in_lease().await?;
            }
            // It may have waited over a restart. What an earlier start granted or counted is nothing to the present one: such a
            // reply is as good as lost.
            if start == 0 || self.restarts.generation() == Some(start) {
                return result;
            }
        }
    }

    /// Waits while this client may not go by what it was granted. Fails when its session has ended.
    pub(crate) async fn in_lease(&self) -> Result<(), Failure> {
        self.leases.clock.running(|| self.has_ended() || self.closed.get()).await;
        self.check_lives()
    }
}

/// True for a request whose answer says nothing of files.
fn is_about_the_session(kind: Kind) -> bool {
    matches!(kind, Kind::Hello | Kind::Ping | Kind::Watch | Kind::End)
}

fn decode<R: Message + Default>(body: &[u8]) -> Result<R, Failure> {
    R::decode(body).map_err(|error| Failure::new(Todo::Internal, format!("reply: {error}")))
}
