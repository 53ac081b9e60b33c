//! Data requests: reads, writes, commits, space and searches, from their bodies to replies.
//!
//! Owns no sessions: the caller decides who may ask. The uses of a file belong to the metadata target, which
//! the caller brings as [`FileUses`].

use crate::work::{TargetWork, Turn};
use crate::{AsOf, ChunkError, ChunkKey, Known, Knows, Owner, Part, Target, TargetConfig};
use penstock_base::{Branch, Buf, ErrorKind, FileId, Ino, IoContext, LocalBoxFuture, Share, TargetId};
use penstock_wire::data::{
    ChunkRef, Replier, SpaceChange, SpaceRef, decode_commit, decode_read, decode_seek, decode_space,
    decode_write, encode_found, encode_reply,
};
use penstock_wire::{Failure, Frame, Kind};
use std::rc::Rc;

/// A use of a file: it lasts until it is dropped.
pub trait FileUse {
    /// The owner of the file as its metadata target knows it now.
    fn owner(&self) -> Owner;

    /// The metadata target as it is now, if it is of another stack than the target that asks.
    fn as_of(&self) -> AsOf;

    /// The chunks that the target that asks has of the file.
    fn share(&self) -> Share;
}

/// The rest of the node, as data requests need it.
pub trait FileUses {
    /// Waits until a target may change its part of the contents of a file. It may until the result is
    /// dropped; the error says why not.
    fn change_contents(
        &self,
        target: TargetId,
        ino: Ino,
    ) -> LocalBoxFuture<'_, Result<Box<dyn FileUse + '_>, Failure>>;

    /// Has work that waits for a target carried out that lacks space. Returns false if there was none.
    fn make_space(&self, target: TargetId) -> LocalBoxFuture<'_, bool>;

    /// A read of a chunk found data that cannot be reconstructed.
    fn damaged(&self, ino: Ino, chunk: u64, why: &str);
}

/// Body and payload of a reply, or the error reply.
type Outcome = Result<(Vec<u8>, Vec<Buf>), Failure>;

/// The data service of one target.
pub struct Service {
    target: Rc<Target>,
    /// None for the target of the names' own stack, whose rows change together with the names.
    work: Option<Rc<TargetWork>>,
}

fn failure(error: &ChunkError) -> Failure {
    Failure::new(error.kind(), error)
}

/// The layout of a file was changed since its client asked for it.
fn elsewhere() -> Failure {
    Failure::new(ErrorKind::RefreshMap, "the chunks lie on other targets")
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

    fn as_of(&self) -> AsOf {
        self.of.as_of()
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
        Self { target: target.clone(), work: None }
    }

    /// The service of a target with work of another stack.
    pub fn with_work(work: &Rc<TargetWork>) -> Self {
        Self { target: work.target().clone(), work: Some(work.clone()) }
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

    fn replier(&self) -> Replier {
        let TargetConfig { id, generation, .. } = self.target.config();
        Replier { target: id, generation }
    }

    /// The reply to a request that returns no data.
    fn done(&self) -> Outcome {
        Ok((encode_reply(self.replier(), &[]), Vec::new()))
    }

    async fn read(&self, request: &Frame, io: IoContext, uses: &dyn FileUses) -> Outcome {
        let chunk = decode_read(&request.body)?;
        let _turn = self.turn(request, chunk.ino).await?;
        let read = self.target.read(key(request, &chunk), chunk.block, chunk.count, io).await;
        let blocks = read.map_err(|error| {
            if error.kind() == ErrorKind::Corrupt {
                uses.damaged(chunk.ino, chunk.chunk, &error.to_string());
            }
            failure(&error)
        })?;
        Ok((encode_reply(self.replier(), &blocks.crcs), blocks.parts))
    }

    async fn write(&self, request: &Frame, io: IoContext, uses: &dyn FileUses) -> Outcome {
        let (chunk, crcs) = decode_write(&request.body)?;
        // The node asks the metadata target if the file exists.
        let of = uses.change_contents(self.target.config().id, chunk.ino).await?;
        if !of.share().has(chunk.chunk) {
            return Err(elsewhere());
        }
        let data = penstock_base::buf::gather(&request.payload);
        let write = async || {
            let _turn = self.turn(request, chunk.ino).await?;
            let known = Sent { truncations: chunk.truncations, of: &*of };
            let write = self.target.write(key(request, &chunk), chunk.block, &data, &crcs, known, io);
            write.await.map_err(|error| failure(&error))
        };
        self.with_space(uses, write).await?;
        self.done()
    }

    /// Makes a change, and makes it once more if space is lacking and other work for the target brings some.
    async fn with_space(
        &self,
        uses: &dyn FileUses,
        change: impl AsyncFn() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        match change().await {
            Err(failure) if failure.kind == ErrorKind::NoSpace => {
                match uses.make_space(self.target.config().id).await {
                    true => change().await,
                    false => Err(failure),
                }
            }
            changed => changed,
        }
    }

    /// Waits for the turn of a request about a file.
    async fn turn(&self, request: &Frame, ino: Ino) -> Result<Option<Turn>, Failure> {
        match &self.work {
            Some(work) => work.turn(file(request, ino)).await.map(Some).map_err(|error| failure(&error)),
            None => Ok(None),
        }
    }

    async fn commit(&self, request: &Frame) -> Outcome {
        let (ino, deferred) = decode_commit(&request.body)?;
        self.target.commit(file(request, ino), deferred).await.map_err(|error| failure(&error))?;
        self.done()
    }

    async fn seek(&self, request: &Frame) -> Outcome {
        let seek = decode_seek(&request.body)?;
        let part = Part { blocks: seek.from..seek.until, share: seek.share };
        let _turn = self.turn(request, seek.ino).await?;
        let found = self.target.seek(file(request, seek.ino), part, seek.hole).await;
        Ok((encode_found(found.map_err(|error| failure(&error))?), Vec::new()))
    }

    async fn space(&self, request: &Frame, uses: &dyn FileUses) -> Outcome {
        let SpaceRef { ino, change, from, until, truncations, share } = decode_space(&request.body)?;
        let of = uses.change_contents(self.target.config().id, ino).await?;
        if of.share() != share {
            return Err(elsewhere());
        }
        let change = async || {
            let _turn = self.turn(request, ino).await?;
            let known = Sent { truncations, of: &*of };
            let (file, part) = (file(request, ino), Part { blocks: from..until, share });
            let changed = match change {
                SpaceChange::Reserve => self.target.preallocate(file, part, false, known).await,
                SpaceChange::Zero => self.target.preallocate(file, part, true, known).await,
                SpaceChange::Punch => self.target.punch(file, part, truncations).await,
            };
            changed.map_err(|error| failure(&error))
        };
        self.with_space(uses, change).await?;
        self.done()
    }
}

#[cfg(test)]
mod tests;
