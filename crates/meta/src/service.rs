//! The service: a request's body in, a reply's body out.

use crate::ROOT;
use crate::error::MetaError;
use crate::rows::fs_key;
use crate::target::{MetaTarget, Request};
use penstock_base::Ino;
use penstock_kv::WriteSet;
use penstock_wire::names::{EmptyReply, HelloReply, HelloRequest, InodeRequest};
use penstock_wire::{Failure, Header, Kind, VERSION};
use prost::Message;

impl MetaTarget {
    /// Does what a request asks. A repeat of a request that was done is answered with its stored result.
    pub async fn serve(&self, header: &Header, body: &[u8]) -> Result<Vec<u8>, Failure> {
        let who = Request::from(header);
        if who.sequence != 0
            && let Some(result) = self.sessions.borrow().find(who.session, who.sequence)
        {
            return Ok(result);
        }
        Ok(self.dispatch(header.kind, who, body).await?)
    }

    async fn dispatch(&self, kind: Kind, who: Request, body: &[u8]) -> Result<Vec<u8>, MetaError> {
        match kind {
            Kind::Hello => self.hello(Message::decode(body)?).await,
            Kind::Lookup => self.lookup(Message::decode(body)?).await,
            Kind::GetAttr => self.get_attr(Message::decode(body)?).await,
            Kind::SetAttr => self.set_attr(who, Message::decode(body)?).await,
            Kind::Make => self.make(who, Message::decode(body)?).await,
            Kind::Link => self.link(who, Message::decode(body)?).await,
            Kind::Unlink => self.unlink(who, Message::decode(body)?).await,
            Kind::Rename => self.rename(who, Message::decode(body)?).await,
            Kind::ReadDir => self.read_dir(Message::decode(body)?).await,
            Kind::ReadLink => self.read_link(Message::decode(body)?).await,
            Kind::Open | Kind::Close => self.open_or_close(kind, Message::decode(body)?).await,
            Kind::GetXattr => self.get_xattr(Message::decode(body)?).await,
            Kind::SetXattr => self.set_xattr(who, Message::decode(body)?).await,
            Kind::ListXattr => self.list_xattr(Message::decode(body)?).await,
            Kind::RemoveXattr => self.remove_xattr(who, Message::decode(body)?).await,
            Kind::StatFs => Ok(self.stat_fs()),
            Kind::Sync => {
                self.sync().await?;
                Ok(EmptyReply {}.encode_to_vec())
            }
            Kind::Read | Kind::Write | Kind::Commit | Kind::FetchStrip | Kind::PlaceStrip => {
                Err(MetaError::Request(format!("{kind:?} is not for a metadata target")))
            }
        }
    }

    async fn open_or_close(&self, kind: Kind, request: InodeRequest) -> Result<Vec<u8>, MetaError> {
        let ino = Ino(request.ino);
        if kind == Kind::Close {
            self.release_inode(ino);
            return Ok(EmptyReply {}.encode_to_vec());
        }
        // Counted before the inode is read: whoever removes it now sees the user.
        self.use_inode(ino);
        let reply = self.get_attr(request).await;
        if reply.is_err() {
            self.release_inode(ino);
        }
        reply
    }

    async fn hello(&self, request: HelloRequest) -> Result<Vec<u8>, MetaError> {
        let mine = u32::from(VERSION);
        if request.oldest_version > mine || request.newest_version < mine {
            let (oldest, newest) = (request.oldest_version, request.newest_version);
            return Err(MetaError::Request(format!(
                "the client speaks versions {oldest} to {newest}, this is {mine}"
            )));
        }
        let _one = self.changing.lock().await;
        let (session, row) = {
            let mut fs = self.fs.borrow_mut();
            fs.last_session += 1;
            (fs.last_session, fs.encode())
        };
        let mut writes = WriteSet::new();
        writes.put(fs_key(), row);
        self.commit(Request::default(), writes, Vec::new(), &[]).await?;
        let chunk_blocks = self.fs.borrow().chunk_blocks;
        Ok(HelloReply { version: mine, session, root: ROOT.0, chunk_blocks }.encode_to_vec())
    }
}
