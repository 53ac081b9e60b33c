//! A target of another stack, as the metadata target asks it.

use penstock_base::{FileId, Ino, LocalBoxFuture, TargetId};
use penstock_chunk::{ChunkError, Cut, Hold, Owner, SpaceUsage, TargetWork};
use std::collections::BTreeSet;
use std::rc::Rc;

/// A file that is held on a target: no request about it is executed there.
pub trait HeldFile {
    /// Notes a truncation that was committed here, and is about to be durable.
    fn owe(&self, cut: Cut);

    /// Carries out the truncations that are owed. What fails is owed further: nothing else is done with the
    /// file before it is carried out.
    fn settle(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>>;
}

/// A target of another stack.
pub trait OtherTarget {
    /// Its number.
    fn id(&self) -> TargetId;

    /// Total, free and headroom blocks.
    fn usage(&self) -> SpaceUsage;

    /// Waits for the requests about a file that are executed, and keeps others away until the result is
    /// dropped.
    fn hold(self: Rc<Self>, file: FileId) -> LocalBoxFuture<'static, Box<dyn HeldFile>>;

    /// Notes a truncation that is durable here. It is carried out before anything else is done with the file.
    fn owe(&self, file: FileId, cut: Cut);

    /// Carries out what a file owes, if it owes anything.
    fn finish(&self, file: FileId) -> LocalBoxFuture<'_, Result<(), ChunkError>>;

    /// Drops all that the target has of a file whose inode is gone.
    fn remove(&self, file: FileId) -> LocalBoxFuture<'_, Result<(), ChunkError>>;

    /// Counts a file to another owner, by the change of this number.
    fn set_owner(
        &self,
        file: FileId,
        owner: Owner,
        number: u64,
    ) -> LocalBoxFuture<'_, Result<(), ChunkError>>;

    /// Blocks that each file holds.
    fn held_blocks(&self, files: Vec<FileId>) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>>;

    /// Inodes in this range of which the target has something.
    fn inodes_from(&self, first: Ino, end: Ino) -> LocalBoxFuture<'_, Result<BTreeSet<Ino>, ChunkError>>;

    /// Makes everything durable that was written. If a file fails, the others are still committed.
    fn commit_all(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>>;

    /// Makes everything durable that was carried out.
    fn sync(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>>;
}

/// A file that is held on a target of this process.
struct HeldThere {
    work: Rc<TargetWork>,
    file: FileId,
    hold: Hold,
}

impl HeldFile for HeldThere {
    fn owe(&self, cut: Cut) {
        self.work.owe(self.file, cut);
    }

    fn settle(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(self.work.settle(self.file, &self.hold))
    }
}

impl OtherTarget for TargetWork {
    fn id(&self) -> TargetId {
        self.target().config().id
    }

    fn usage(&self) -> SpaceUsage {
        self.target().usage()
    }

    fn hold(self: Rc<Self>, file: FileId) -> LocalBoxFuture<'static, Box<dyn HeldFile>> {
        Box::pin(async move {
            let hold = TargetWork::hold(&self, file).await;
            Box::new(HeldThere { work: self, file, hold }) as Box<dyn HeldFile>
        })
    }

    fn owe(&self, file: FileId, cut: Cut) {
        TargetWork::owe(self, file, cut);
    }

    fn finish(&self, file: FileId) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(TargetWork::finish(self, file))
    }

    fn remove(&self, file: FileId) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(TargetWork::remove(self, file))
    }

    fn set_owner(
        &self,
        file: FileId,
        owner: Owner,
        number: u64,
    ) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(TargetWork::set_owner_as_of(self, file, owner, number))
    }

    fn held_blocks(&self, files: Vec<FileId>) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>> {
        Box::pin(async move { self.target().held_blocks(&files).await })
    }

    fn inodes_from(&self, first: Ino, end: Ino) -> LocalBoxFuture<'_, Result<BTreeSet<Ino>, ChunkError>> {
        Box::pin(TargetWork::inodes_from(self, first, end))
    }

    fn commit_all(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(self.target().commit_all())
    }

    fn sync(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(self.target().sync())
    }
}
