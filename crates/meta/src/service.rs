//! The metadata service: dispatches requests by kind, from an encoded request to an encoded reply.

use crate::ROOT;
use crate::error::MetaError;
use crate::rows::fs_key;
use crate::target::MetaTarget;
use penstock_base::Ino;
use penstock_kv::WriteSet;
use penstock_session::rows::SessionRow;
use penstock_session::{Request, Slot};
use penstock_wire::names::{AttrReply, EmptyReply, HelloReply, HelloRequest, InodeRequest, PingRequest};
use penstock_wire::{Failure, Header, Kind, VERSION};
use prost::Message;

/// Longest client name, and below longest mount path, that a client may send, in bytes.
const NAME_BYTES: usize = 256;
const PATH_BYTES: usize = 4096;
/// Most sessions that exist at the same time. Each is a row until it ends.
const MOST_SESSIONS: usize = 1024;

impl MetaTarget {
    /// Executes a request. A repeat of a request that was executed is answered with its stored result.
    pub async fn serve(&self, header: &Header, body: &[u8]) -> Result<Vec<u8>, Failure> {
        let who = Request::from(header);
        if who.sequence == 0 {
            return Ok(self.dispatch(header.kind, who, body).await?);
        }
        match self.clients.slot(who).await? {
            Slot::Done(outcome) => outcome,
            Slot::Execute(slot) => {
                let outcome = self.dispatch(header.kind, who, body).await.map_err(Failure::from);
                slot.keep(&outcome);
                outcome
            }
        }
    }

    async fn dispatch(&self, kind: Kind, who: Request, body: &[u8]) -> Result<Vec<u8>, MetaError> {
        match kind {
            Kind::Ping => {
                self.reclaim(who.session, &PingRequest::decode(body)?);
                Ok(EmptyReply {}.encode_to_vec())
            }
            Kind::End => {
                self.clients.done(who.session);
                self.end_session(who.session).await?;
                // Without the flush a crash would bring the session back, and all other clients would wait
                // for its lease to end.
                self.kv.flush().await?;
                Ok(EmptyReply {}.encode_to_vec())
            }
            Kind::Lookup => self.lookup(Message::decode(body)?).await,
            Kind::GetAttr => self.get_attr(Message::decode(body)?).await,
            Kind::SetAttr => self.set_attr(who, Message::decode(body)?).await,
            Kind::Make => self.make(who, Message::decode(body)?).await,
            Kind::Link => self.link(who, Message::decode(body)?).await,
            Kind::Unlink => self.unlink(who, Message::decode(body)?).await,
            Kind::Rename => self.rename(who, Message::decode(body)?).await,
            Kind::ReadDir => self.read_dir(Message::decode(body)?).await,
            Kind::ReadLink => self.read_link(Message::decode(body)?).await,
            Kind::Open | Kind::Close => self.open_or_close(kind, who, Message::decode(body)?).await,
            Kind::GetXattr => self.get_xattr(Message::decode(body)?).await,
            Kind::SetXattr => self.set_xattr(who, Message::decode(body)?).await,
            Kind::ListXattr => self.list_xattr(Message::decode(body)?).await,
            Kind::RemoveXattr => self.remove_xattr(who, Message::decode(body)?).await,
            Kind::Lock => Ok(self.clients.lock(who.session, &Message::decode(body)?)?.encode_to_vec()),
            Kind::StatFs => Ok(self.stat_fs()),
            Kind::Sync => {
                self.sync().await?;
                Ok(EmptyReply {}.encode_to_vec())
            }
            Kind::Hello
            | Kind::Watch
            | Kind::Lease
            | Kind::Closing
            | Kind::Read
            | Kind::Write
            | Kind::Commit
            | Kind::Seek
            | Kind::Space
            | Kind::FetchStrip
            | Kind::PlaceStrip => Err(MetaError::Request(format!("{kind:?} is not for a metadata target"))),
        }
    }

    async fn open_or_close(
        &self,
        kind: Kind,
        who: Request,
        request: InodeRequest,
    ) -> Result<Vec<u8>, MetaError> {
        let ino = Ino(request.ino);
        if kind == Kind::Close {
            self.close_inode(who.session, ino);
            return Ok(EmptyReply {}.encode_to_vec());
        }
        // Counted before the inode is read, so that a removal from here on sees the user.
        self.open_inode(who.session, ino);
        match self.inode(ino).await {
            Ok(inode) => {
                let (attr, unsettled) =
                    (Some(inode.attr()), self.clients.is_unsynced_elsewhere(who.session, ino));
                Ok(AttrReply { attr, unsettled }.encode_to_vec())
            }
            Err(error) => {
                self.close_inode(who.session, ino);
                Err(error)
            }
        }
    }

    /// Serves the first exchange, which starts a session. With `remote` (a client of another process) it has
    /// a lease time.
    pub async fn hello(&self, body: &[u8], remote: bool) -> Result<Vec<u8>, Failure> {
        Ok(self.first_exchange(Message::decode(body).map_err(MetaError::from)?, remote).await?)
    }

    async fn first_exchange(&self, request: HelloRequest, remote: bool) -> Result<Vec<u8>, MetaError> {
        let mine = u32::from(VERSION);
        if request.oldest_version > mine || request.newest_version < mine {
            let (oldest, newest) = (request.oldest_version, request.newest_version);
            return Err(MetaError::Request(format!(
                "the client speaks versions {oldest} to {newest}, this is {mine}"
            )));
        }
        if request.client.len() > NAME_BYTES || request.mount.len() > PATH_BYTES {
            return Err(MetaError::Request("the name of a client or of its mount is too long".into()));
        }
        if remote && self.clients.count() >= MOST_SESSIONS {
            return Err(MetaError::Request(format!("there are {MOST_SESSIONS} sessions, which is the most")));
        }
        let _one = self.changing.lock().await;
        let (session, row) = {
            let mut fs = self.fs.borrow_mut();
            fs.last_session += 1;
            // Behind damage that a check finds, numbers above the last one may be in use.
            while self.clients.is_in_use(fs.last_session) {
                fs.last_session += 1;
            }
            (fs.last_session, fs.encode())
        };
        let mut writes = WriteSet::new();
        writes.put(fs_key(), row);
        let lease_ms = if remote { self.clients.lease().as_millis() as u32 } else { 0 };
        let who = SessionRow { client: request.client, mount: request.mount, lease_ms };
        self.clients.begin_session(session, who, &mut writes);
        let committed = self.commit(Request::default(), writes, Vec::new(), &[]).await;
        // If a crash lost the number, it would be given to a second client while the first one still uses it.
        let durable = async || if remote { Ok(self.kv.flush().await?) } else { Ok(()) };
        let begun = match committed {
            Ok(()) => durable().await,
            failed => failed,
        };
        if let Err(error) = begun {
            self.clients.forget_session(session);
            return Err(error);
        }
        let chunk_blocks = self.fs.borrow().chunk_blocks;
        Ok(HelloReply { version: mine, session, root: ROOT.0, chunk_blocks, lease_ms }.encode_to_vec())
    }
    /// Ends a session: its opens, leases and locks end, and its rows are deleted.
    pub async fn end_session(&self, id: u64) -> Result<(), MetaError> {
        // A request of this session that is changing something records its result before the session's rows
        // are deleted.
        let _one = self.changing.lock().await;
        let Some((opens, writes)) = self.clients.end_session(id) else { return Ok(()) };
        for (ino, count) in opens {
            self.release_inode_times(ino, count);
        }
        self.reap_wake.notify_one();
        self.commit(Request::default(), writes, Vec::new(), &[]).await
    }

    /// Takes over the opens and locks that a client reports after a restart.
    fn reclaim(&self, session: u64, ping: &PingRequest) {
        for (ino, before, now) in self.clients.reclaim(session, ping) {
            match now > before {
                true => self.use_inode_times(ino, now - before),
                false if now < before => self.release_inode_times(ino, before - now),
                false => {}
            }
        }
        if ping.reclaimed {
            // Removed files may be dropped once all clients have reported.
            self.reap_wake.notify_one();
        }
    }

    /// Counts one open of an inode by a session.
    pub(crate) fn open_inode(&self, session: u64, ino: Ino) {
        if self.clients.open(session, ino) {
            self.use_inode(ino);
        }
    }

    /// Ends one open of an inode by a session. Does nothing if it has none, as after a restart.
    pub(crate) fn close_inode(&self, session: u64, ino: Ino) {
        if self.clients.close(session, ino) {
            self.release_inode(ino);
        }
    }
}
