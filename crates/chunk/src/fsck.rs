//! Checks and repairs of a target.
//!
//! [`Fsck`] has the methods that are legal only while nothing else changes rows: it is made from the guard of the quiet
//! gate ([`crate::Target::fsck`]), so a repair cannot be called on a target that serves.

mod damaged;
mod repair;
mod survey;

pub use damaged::DamagedRuns;
pub(crate) use damaged::find_damaged;
pub(crate) use survey::mark_unmarked;
pub use survey::{Owned, TargetCheck, chunks_of_a_file};

use crate::ChunkError;
use crate::target::Target;
use survey::Survey;

/// Access to a target for checks and repairs.
pub struct Fsck<'a> {
    target: &'a Target,
}

impl<'a> Fsck<'a> {
    pub(crate) fn new(target: &'a Target) -> Self {
        Self { target }
    }

    /// Reads all map rows and bitmaps.
    async fn survey(&self) -> Result<Survey, ChunkError> {
        let Target { volume, kv, config, .. } = self.target;
        Survey::read(volume, &**kv, config.chunk_blocks).await
    }

    /// Checks all rows. The caller has made everything durable.
    pub async fn check(&self) -> Result<TargetCheck, ChunkError> {
        let Target { volume, kv, allocator, .. } = self.target;
        self.survey().await?.check(volume, &**kv, allocator).await
    }
}
