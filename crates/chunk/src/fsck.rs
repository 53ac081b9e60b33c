//! Checks and repairs of a target.
//!
//! [`Fsck`] has the methods that are legal only while nothing else changes rows: it is made from the guard of
//! the quiet gate ([`crate::Target::fsck`]), so a repair cannot be called on a target that serves.

mod damaged;
mod loans;
mod repair;
mod survey;

pub use damaged::DamagedRuns;
pub(crate) use damaged::find_damaged;
pub use survey::{Owned, TargetCheck, TargetLoans};

use crate::ChunkError;
use crate::allocator::Allocator;
use crate::cache::ChunkCache;
use crate::commit::Commits;
use crate::lending::Lending;
use crate::volumes::Volumes;
use penstock_kv::{Kv, WriteSet};
use survey::Survey;

/// Access to a target for checks and repairs.
pub struct Fsck<'a> {
    pub(crate) volumes: &'a Volumes,
    pub(crate) kv: &'a dyn Kv,
    pub(crate) cache: &'a ChunkCache,
    pub(crate) allocator: &'a Allocator,
    pub(crate) commits: &'a Commits,
    pub(crate) lending: &'a Lending,
    pub(crate) chunk_blocks: u32,
}

impl Fsck<'_> {
    /// Reads all map rows and bitmaps.
    async fn survey(&self) -> Result<Survey, ChunkError> {
        // Written stripes that it has not come to would be findings.
        self.allocator.sweep().await?;
        // A block that waits to be free would be freed although it has an owner by then.
        self.commits.finish_syncs().await?;
        Survey::read(self.volumes, self.kv, self.chunk_blocks).await
    }

    /// Changes rows of maps. Rows of files and accounts do not follow: [`Fsck::count_files`] makes them
    /// right.
    pub async fn change_rows(&self, mut writes: WriteSet) -> Result<(), ChunkError> {
        writes.reclaims();
        Ok(self.kv.commit(writes).await?)
    }

    /// Makes repairs of this target durable: its blocks, and then its rows.
    pub async fn make_durable(&self) -> Result<(), ChunkError> {
        self.volumes.flush_all().await?;
        Ok(self.kv.flush().await?)
    }

    /// Checks all rows. The caller has made everything durable.
    pub async fn check(&self) -> Result<TargetCheck, ChunkError> {
        self.survey().await?.check(self.volumes, self.kv, self.allocator).await
    }
}
