//! Targets that an administrator has given up: their stacks are lost for good.
//!
//! Invariants:
//! - a target that is forgotten never serves again: work was dropped that it has not done;
//! - it stays in layouts, and its number is never given again. What files have there is lost, and reads as an
//!   error;
//! - whatever names and sizes change needs nothing of it: it counts as a target that has done all work.

use crate::other_target::{HeldFile, OtherTarget};
use penstock_base::{FileId, Ino, LocalBoxFuture, TargetId};
use penstock_chunk::{ChunkError, Cut, Owner, SpaceUsage};
use std::collections::BTreeSet;
use std::rc::Rc;

/// A target that is forgotten: it has nothing, and agrees with everything.
pub(crate) struct Forgotten(pub(crate) TargetId);

/// A file that it does not have.
struct Nothing;

impl HeldFile for Nothing {
    fn owe(&self, _: Cut) {}

    fn settle(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(async { Ok(()) })
    }
}

impl OtherTarget for Forgotten {
    fn id(&self) -> TargetId {
        self.0
    }

    fn usage(&self) -> SpaceUsage {
        SpaceUsage::default()
    }

    fn hold(self: Rc<Self>, _: FileId) -> LocalBoxFuture<'static, Box<dyn HeldFile>> {
        Box::pin(async { Box::new(Nothing) as Box<dyn HeldFile> })
    }

    fn owe(&self, _: FileId, _: Cut) {}

    fn finish(&self, _: FileId) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(async { Ok(()) })
    }

    fn remove(&self, _: FileId) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(async { Ok(()) })
    }

    fn set_owner(&self, _: FileId, _: Owner, _: u64) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(async { Ok(()) })
    }

    fn held_blocks(&self, files: Vec<FileId>) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>> {
        Box::pin(async move { Ok(vec![0; files.len()]) })
    }

    fn inodes_from(&self, _: Ino, _: Ino) -> LocalBoxFuture<'_, Result<BTreeSet<Ino>, ChunkError>> {
        Box::pin(async { Ok(BTreeSet::new()) })
    }

    fn commit_all(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(async { Ok(()) })
    }

    fn sync(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(async { Ok(()) })
    }
}
