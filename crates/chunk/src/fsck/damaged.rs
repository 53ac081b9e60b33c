//! Finds the blocks of files that cannot be read.

use crate::ChunkError;
use crate::rows::{all_maps, read_row};
use crate::volumes::Volumes;
use penstock_array::ArrayError;
use penstock_base::{HashSet, Ino};
use penstock_drive::{Class, Io};
use penstock_kv::{Kv, for_each};
use std::collections::BTreeMap;

const IO: Io = Io::new(Class::Scrub, "damaged.read");

/// Damaged runs by file, each as (first block in the file, number of blocks, first block on the volume).
pub type DamagedRuns = BTreeMap<Ino, Vec<(u64, u64, u64)>>;

/// Returns the blocks of files that cannot be read. Only stripes that a read or a scrub found unreadable
/// are considered, and each block in them is read again.
pub(crate) async fn find_damaged(
    volumes: &Volumes,
    kv: &dyn Kv,
    chunk_blocks: u32,
) -> Result<DamagedRuns, ChunkError> {
    let stripes: HashSet<u64> = volumes.unreadable_stripes().into_iter().collect();
    let mut damaged = DamagedRuns::new();
    if stripes.is_empty() {
        return Ok(damaged);
    }
    let per_stripe = volumes.stripe_blocks();
    let mut candidates: Vec<(Ino, u64, u64)> = Vec::new();
    for_each(kv, all_maps(), |key, value| {
        let Ok((chunk, row)) = read_row(key, value) else { return Ok(()) };
        // A check reports chunks that no file has, and extents beyond chunk or volume.
        let Some(first) = chunk.first_block(chunk_blocks) else { return Ok(()) };
        let valid = |extent| volumes.groups().valid_part(extent, chunk_blocks);
        for extent in row.extents.iter().filter(|extent| !extent.preallocated).map(valid) {
            let blocks = (first + u64::from(extent.first)..).zip(extent.block..).take(extent.count as usize);
            let inside = blocks.filter(|(_, block)| stripes.contains(&(block / per_stripe)));
            candidates.extend(inside.map(|(at, block)| (chunk.file.ino, at, block)));
        }
        Ok::<_, ChunkError>(())
    })
    .await?;
    for (ino, at, block) in candidates {
        match volumes.read(block, 1, IO).await {
            Ok(_) => {}
            Err(ChunkError::Array(ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. })) => {
                add_block(damaged.entry(ino).or_default(), at, block);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(damaged)
}

fn add_block(runs: &mut Vec<(u64, u64, u64)>, at: u64, block: u64) {
    match runs.last_mut() {
        Some((first, count, start)) if *first + *count == at && *start + *count == block => *count += 1,
        _ => runs.push((at, 1, block)),
    }
}

#[cfg(test)]
mod tests;
