//! The comparison of extents and bits at a start at which files have more blocks than are counted as used.
//!
//! Then bits and counts of some blocks are lost together, so that no group disagrees with its counts, and
//! preallocated blocks are in no written stripe that the sweep would find. The groups of blocks that a file
//! owns and no bit marks are suspect. Nothing is allocated or discarded before it is over. The same is done
//! at each start that finds a suspect group, which counts as full and would hide what others lack.
//!
//! Files go on to change. A block becomes free in memory only after the row that gave it up is durable. So if
//! a block is free, and a row that is read later owns it, its bit is lost.

use super::Allocator;
use crate::ChunkError;
use crate::free::{Run, is_on, runs_of};
use crate::rows::{Lent, LentKey, all_lent, all_maps, read_row};
use penstock_array::ArrayError;
use penstock_kv::Pages;

impl Allocator {
    /// Files have more blocks than are counted as used, or may have blocks of loans that were dropped.
    pub(crate) fn must_compare(&self) {
        self.is_compared.set(false);
        self.has_strays.set(true);
    }

    /// True if rows of files may name blocks of a borrowed group without a loan. A loan of that group would
    /// give them to others.
    pub(crate) fn has_strays(&self) -> bool {
        self.has_strays.get()
    }

    /// Somebody has looked at all rows, or a loan was dropped.
    pub(crate) fn set_strays(&self, has_strays: bool) {
        self.has_strays.set(has_strays);
    }

    /// True if no comparison must be made, or it is over.
    pub(crate) fn is_compared(&self) -> bool {
        self.is_compared.get()
    }

    /// A repair has marked all blocks of files.
    pub(crate) fn set_compared(&self) {
        self.is_compared.set(true);
    }

    /// Compares, if that must be done and is not over. After an error it may be called again.
    pub(crate) async fn compare(&self) -> Result<(), ChunkError> {
        if self.is_compared.get() {
            return Ok(());
        }
        let _one = self.sweeping.lock().await;
        let mut has_strays = false;
        for range in [all_maps(), all_lent()] {
            has_strays |= self.compare_rows(range).await?;
        }
        // A repair may have gone on meanwhile, which says itself what it has found.
        if !self.is_compared.replace(true) {
            self.has_strays.set(has_strays);
        }
        Ok(())
    }

    /// Compares the blocks of all rows of a range with their bits, unless a repair does. Returns true if one
    /// names blocks of a borrowed group without a loan.
    async fn compare_rows(&self, range: penstock_kv::Range) -> Result<bool, ChunkError> {
        let (mut pages, mut has_strays) = (Pages::new(&*self.kv, range), false);
        while !self.is_compared.get() {
            if self.closed.get() {
                return Err(ArrayError::Closed.into());
            }
            let rows = pages.next().await?;
            for (key, value) in &rows {
                has_strays |= self.names_no_loan(key, value);
                for run in self.runs_of(key, value) {
                    self.compare_run(key, run).await?;
                }
            }
            if rows.is_empty() {
                break;
            }
        }
        Ok(has_strays)
    }

    /// True if a row of a map names blocks behind the volume that are in no loan.
    fn names_no_loan(&self, key: &[u8], value: &[u8]) -> bool {
        let Ok((_, row)) = read_row(key, value) else { return false };
        let space = self.space();
        let is_stray = |block: u64| {
            let group = space.groups().of_block(block);
            group >= space.groups().own() && !space.loans().contains_key(&group)
        };
        row.extents.iter().any(|extent| {
            extent.count > 0
                && [extent.block, extent.block.saturating_add(u64::from(extent.count) - 1)]
                    .into_iter()
                    .any(is_stray)
        })
    }

    /// The runs that the row of a map owns, or that of a loan to another target; none if it cannot be read,
    /// which a check reports.
    pub(super) fn runs_of(&self, key: &[u8], value: &[u8]) -> Vec<Run> {
        if LentKey::decode(key).is_ok() {
            let groups = self.space().groups();
            let lent = Lent::decode(value).ok().filter(|lent| is_on(&lent.loan, groups));
            return lent.map_or(Vec::new(), |lent| runs_of(&lent.loan, groups.stripe_blocks()));
        }
        let Ok((_, row)) = read_row(key, value) else { return Vec::new() };
        let groups = self.space().groups();
        let parts = row.extents.iter().map(|extent| groups.valid_part(extent, self.chunk_blocks));
        parts.filter(|part| part.count > 0).map(|part| (part.block, part.count.into())).collect()
    }

    async fn compare_run(&self, key: &[u8], run: Run) -> Result<(), ChunkError> {
        let parts: Vec<(u64, Run)> = self.space().groups().parts(run).collect();
        for (group, (at, count)) in parts {
            // So are suspect ones.
            if self.space().is_full(group) {
                continue;
            }
            self.load(group).await?;
            let free = self.space().free_in(group, (at, count));
            if free.is_empty() {
                continue;
            }
            let row = self.kv.get(key.to_vec()).await?;
            let runs = row.map(|row| self.runs_of(key, &row)).unwrap_or_default();
            let is_owned =
                |block: &u64| runs.iter().any(|(start, count)| (*start..start + count).contains(block));
            // A repair may have marked them meanwhile.
            if free.iter().any(is_owned) && !self.is_compared.get() {
                self.suspect(group);
            }
        }
        Ok(())
    }
}
