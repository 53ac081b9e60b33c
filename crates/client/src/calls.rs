//! Sends requests to the services and decodes their replies.

use crate::session::Client;
use penstock_base::{Buf, Ino, Kind as Todo};
use penstock_wire::{Failure, Frame, Kind};
use prost::Message;

impl Client {
    /// Sends a request that may be repeated without harm.
    pub(crate) async fn ask<R: Message + Default>(
        &self,
        kind: Kind,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let (body, _) = self.exchange(kind, 0, body.encode_to_vec(), Vec::new()).await?;
        decode(&body)
    }

    /// Sends a request that makes a change and must be executed once: it has a slot in the session. The
    /// change is durable after the next `Sync` request.
    pub(crate) async fn change<R: Message + Default>(
        &self,
        kind: Kind,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let reply = self.once(kind, body).await?;
        self.restarts.changed();
        Ok(reply)
    }

    /// Sends a change of an inode's attributes. If a restart loses the change, every fsync of the file
    /// reports that, provided that its state is known here.
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

    /// Sends a request that must be executed once, for state in memory only that need not become durable.
    pub(crate) async fn once<R: Message + Default>(
        &self,
        kind: Kind,
        body: &impl Message,
    ) -> Result<R, Failure> {
        loop {
            let slot = self.slots.take().await?;
            let done = self.exchange(kind, slot.sequence(), body.encode_to_vec(), Vec::new()).await;
            // Another client may need the slot before it proceeds.
            drop(slot);
            match done {
                Err(failure) if failure.is_ask_again() => {}
                done => return decode(&done?.0),
            }
        }
    }

    /// Sends the size and time of a file that is being synced, in a reserved slot. Other clients may wait for
    /// this sync while all other requests of this client wait for them.
    pub(crate) async fn settle_once<R: Message + Default>(
        &self,
        kind: Kind,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let slot = self.slots.take_reserved().await?;
        let (body, _) = self.exchange(kind, slot.sequence(), body.encode_to_vec(), Vec::new()).await?;
        decode(&body)
    }

    /// Sends a request of the data path.
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
            // The request may have waited across a restart. Grants and counts of an earlier start mean
            // nothing to the present one, so such a reply is treated as lost.
            if start == 0 || self.restarts.generation() == Some(start) {
                return result;
            }
        }
    }

    /// Waits while the session's lease time has run out. Fails if the session has ended.
    pub(crate) async fn in_lease(&self) -> Result<(), Failure> {
        self.leases.clock.running(|| self.has_ended() || self.closed.get()).await;
        self.check_lives()
    }
}

/// True for a request whose answer has no information about files.
fn is_about_the_session(kind: Kind) -> bool {
    matches!(kind, Kind::Hello | Kind::Ping | Kind::Watch | Kind::End)
}

fn decode<R: Message + Default>(body: &[u8]) -> Result<R, Failure> {
    R::decode(body).map_err(|error| Failure::new(Todo::Internal, format!("reply: {error}")))
}
