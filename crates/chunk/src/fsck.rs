//! Checks and repairs of a target.
//!
//! [`Fsck`] has the methods that are legal only while nothing else changes rows: it is made from the guard of
//! the quiet gate ([`crate::Target::fsck`]), so a repair cannot be called on a target that serves. A [`View`]
//! is taken with it, and is checked while changes go on.

mod damaged;
mod loans;
mod repair;
mod survey;

pub use damaged::DamagedRuns;
pub(crate) use damaged::{find_damaged, lost_with};
pub use survey::{Owned, TargetCheck, TargetLoans};

use crate::ChunkError;
use crate::allocator::Allocator;
use crate::cache::ChunkCache;
use crate::commit::Commits;
use crate::free::Space;
use crate::lending::Lending;
use crate::volumes::Volumes;
use penstock_base::TargetId;
use penstock_kv::{Kv, KvRead, WriteSet};
use std::collections::BTreeSet;
use std::rc::Rc;
use survey::Survey;

/// Access to a target for checks and repairs.
pub struct Fsck<'a> {
    pub(crate) volumes: &'a Rc<Volumes>,
    pub(crate) kv: &'a dyn Kv,
    pub(crate) cache: &'a ChunkCache,
    pub(crate) allocator: &'a Rc<Allocator>,
    pub(crate) commits: &'a Commits,
    pub(crate) lending: &'a Lending,
    pub(crate) chunk_blocks: u32,
}

/// A target as it was at one moment: its rows, and a copy of its free space in memory. Which stripes are
/// written is looked up later.
pub struct View {
    volumes: Rc<Volumes>,
    allocator: Rc<Allocator>,
    rows: Rc<dyn KvRead>,
    space: Space,
    may_lack_rows: BTreeSet<(TargetId, u64)>,
    chunk_blocks: u32,
}

impl View {
    /// Checks all rows.
    pub async fn check(&self) -> Result<TargetCheck, ChunkError> {
        let survey = Survey::read(&self.volumes, &*self.rows, self.chunk_blocks).await?;
        let of_moment = (&self.space, self.may_lack_rows.clone());
        survey.check(&self.volumes, &*self.rows, of_moment, &self.allocator).await
    }
}

impl Fsck<'_> {
    /// Waits for what would be findings although nothing is wrong.
    async fn come_to_rest(&self) -> Result<(), ChunkError> {
        // Written stripes that it has not come to.
        self.allocator.sweep().await?;
        // A block that waits to be free would be freed although it has an owner by then.
        self.commits.finish_syncs().await
    }

    /// The target of this moment. The caller has made everything durable.
    pub async fn view(&self) -> Result<View, ChunkError> {
        loop {
            self.come_to_rest().await?;
            let rows = self.kv.snapshot().await?;
            // A lender that goes on brings stripes back, which are not known yet.
            if self.allocator.is_swept() {
                return Ok(View {
                    volumes: self.volumes.clone(),
                    allocator: self.allocator.clone(),
                    rows,
                    space: self.allocator.space().clone(),
                    may_lack_rows: self.lending.may_lack_rows(),
                    chunk_blocks: self.chunk_blocks,
                });
            }
        }
    }

    /// Reads all map rows and bitmaps.
    async fn survey(&self) -> Result<Survey, ChunkError> {
        self.come_to_rest().await?;
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
        let survey = self.survey().await?;
        let space = self.allocator.space().clone();
        let of_moment = (&space, self.lending.may_lack_rows());
        survey.check(self.volumes, self.kv, of_moment, self.allocator).await
    }
}
