//! Data requests: reads, writes, commits, space and searches, from their bodies to replies.
//!
//! Owns no sessions: the caller decides who may ask. The uses of a file belong to the metadata target, which
//! the caller brings as [`FileUses`].

use crate::{ChunkError, ChunkKey, Known, Knows, Owner, Target};
use penstock_base::{Branch, Buf, ErrorKind, FileId, Ino, IoContext, LocalBoxFuture};
use penstock_wire::data::{
    ChunkRef, SpaceChange, SpaceRef, decode_commit, decode_read, decode_seek, decode_space, decode_write,
    encode_found, encode_reply,
};
use penstock_wire::{Failure, Frame, Kind};
use std::rc::Rc;

/// A use of a file: it lasts until it is dropped.
pub trait FileUse {
    /// The owner of the file as its metadata target knows it now.
    fn owner(&self) -> Owner;
}

/// The rest of the node, as data requests need it.
pub trait FileUses {
    /// Waits until the contents of a file may change. They may until the result is dropped; the error says
    /// why not.
    fn change_contents(&self, ino: Ino) -> LocalBoxFuture<'_, Result<Box<dyn FileUse + '_>, Failure>>;

    /// A read of a chunk found data that cannot be reconstructed.
    fn damaged(&self, ino: Ino, chunk: u64, why: &str);
}

/// Body and payload of a reply, or the error reply.
type Outcome = Result<(Vec<u8>, Vec<Buf>), Failure>;

/// The data service of one target.
pub struct Service {
    target: Rc<Target>,
}

fn failure(error: &ChunkError) -> Failure {
    Failure::new(error.kind(), error)
}

/// The truncate generation in a request, and the file in use, which names the owner.
struct Sent<'a> {
    truncations: u64,
    of: &'a dyn FileUse,
}

impl Knows for Sent<'_> {
    fn known(&self) -> Known {
        Known { truncations: self.truncations, owner: self.of.owner() }
    }
}

/// The file of a request for this inode.
fn file(request: &Frame, ino: Ino) -> FileId {
    FileId { branch: Branch(request.header.branch), ino }
}

fn key(request: &Frame, chunk: &ChunkRef) -> ChunkKey {
    ChunkKey { file: file(request, chunk.ino), index: chunk.chunk }
}

impl Service {
    /// The service of `target`.
    pub fn new(target: &Rc<Target>) -> Self {
        Self { target: target.clone() }
    }

    /// Executes a data request, for whom and for what `io` says. None for requests of other kinds.
    pub async fn serve(&self, request: &Frame, io: IoContext, uses: &dyn FileUses) -> Option<Outcome> {
        Some(match request.header.kind {
            Kind::Read => self.read(request, io, uses).await,
            Kind::Write => self.write(request, io, uses).await,
            Kind::Commit => self.commit(request).await,
            Kind::Seek => self.seek(request).await,
            Kind::Space => self.space(request, uses).await,
            _ => return None,
        })
    }

    /// The reply to a request that returns no data.
    fn done(&self) -> Outcome {
        Ok((encode_reply(self.target.config().generation, &[]), Vec::new()))
    }

    async fn read(&self, request: &Frame, io: IoContext, uses: &dyn FileUses) -> Outcome {
        let chunk = decode_read(&request.body)?;
        let read = self.target.read(key(request, &chunk), chunk.block, chunk.count, io).await;
        let blocks = read.map_err(|error| {
            if error.kind() == ErrorKind::Corrupt {
                uses.damaged(chunk.ino, chunk.chunk, &error.to_string());
            }
            failure(&error)
        })?;
        Ok((encode_reply(self.target.config().generation, &blocks.crcs), blocks.parts))
    }

    async fn write(&self, request: &Frame, io: IoContext, uses: &dyn FileUses) -> Outcome {
        let (chunk, crcs) = decode_write(&request.body)?;
        // The node asks the metadata target if the file exists.
        let of = uses.change_contents(chunk.ino).await?;
        let data = penstock_base::buf::gather(&request.payload);
        let known = Sent { truncations: chunk.truncations, of: &*of };
        let write = self.target.write(key(request, &chunk), chunk.block, &data, &crcs, known, io);
        write.await.map_err(|error| failure(&error))?;
        self.done()
    }

    async fn commit(&self, request: &Frame) -> Outcome {
        let (ino, deferred) = decode_commit(&request.body)?;
        self.target.commit(file(request, ino), deferred).await.map_err(|error| failure(&error))?;
        self.done()
    }

    async fn seek(&self, request: &Frame) -> Outcome {
        let seek = decode_seek(&request.body)?;
        let found = self.target.seek(file(request, seek.ino), seek.from..seek.until, seek.hole).await;
        Ok((encode_found(found.map_err(|error| failure(&error))?), Vec::new()))
    }

    async fn space(&self, request: &Frame, uses: &dyn FileUses) -> Outcome {
        let SpaceRef { ino, change, from, until, truncations } = decode_space(&request.body)?;
        let of = uses.change_contents(ino).await?;
        let known = Sent { truncations, of: &*of };
        let file = file(request, ino);
        let changed = match change {
            SpaceChange::Reserve => self.target.preallocate(file, from..until, false, known).await,
            SpaceChange::Zero => self.target.preallocate(file, from..until, true, known).await,
            SpaceChange::Punch => self.target.punch(file, from..until, truncations).await,
        };
        changed.map_err(|error| failure(&error))?;
        self.done()
    }
}

#[cfg(test)]
mod tests;
