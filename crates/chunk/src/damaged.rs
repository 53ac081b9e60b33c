//! Finds the blocks of files that cannot be read.

use crate::ChunkError;
use crate::rows::all_maps;
use crate::target::Target;
use crate::verify::read_row;
use penstock_array::ArrayError;
use penstock_base::{HashSet, Ino};
use penstock_drive::{Class, Io};
use penstock_kv::for_each;
use std::collections::BTreeMap;

const IO: Io = Io::new(Class::Scrub, "damaged.read");

/// Damaged runs by file, each as (first block in the file, number of blocks, first block on the volume).
pub type DamagedRuns = BTreeMap<Ino, Vec<(u64, u64, u64)>>;

impl Target {
    /// Returns the blocks of files that cannot be read. Only stripes that a read or a scrub found unreadable
    /// are considered, and each block in them is read again.
    pub async fn damaged(&self) -> Result<DamagedRuns, ChunkError> {
        let stripes: HashSet<u64> = self.volume.unreadable_stripes().into_iter().collect();
        let mut damaged = DamagedRuns::new();
        if stripes.is_empty() {
            return Ok(damaged);
        }
        let per_stripe = self.volume.stripe_blocks();
        let mut candidates: Vec<(Ino, u64, u64)> = Vec::new();
        for_each(&*self.kv, all_maps(), |key, value| {
            let Ok((chunk, extents)) = read_row(key, value) else { return Ok(()) };
            let first = chunk.index.saturating_mul(u64::from(self.config.chunk_blocks));
            for extent in extents.into_iter().filter(|extent| !extent.reserved) {
                let blocks =
                    (first + u64::from(extent.first)..).zip(extent.block..).take(extent.count as usize);
                let inside = blocks.filter(|(_, block)| stripes.contains(&(block / per_stripe)));
                candidates.extend(inside.map(|(at, block)| (chunk.ino, at, block)));
            }
            Ok::<_, ChunkError>(())
        })
        .await?;
        for (ino, at, block) in candidates {
            match self.volume.read(block, 1, IO).await {
                Ok(_) => {}
                Err(ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. }) => {
                    add_block(damaged.entry(ino).or_default(), at, block);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(damaged)
    }
}

fn add_block(runs: &mut Vec<(u64, u64, u64)>, at: u64, block: u64) {
    match runs.last_mut() {
        Some((first, count, start)) if *first + *count == at && *start + *count == block => *count += 1,
        _ => runs.push((at, 1, block)),
    }
}
