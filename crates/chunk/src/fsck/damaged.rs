//! Finds the blocks of files that cannot be read.

use crate::ChunkError;
use crate::rows::{all_maps, read_row};
use crate::volumes::Volumes;
use penstock_array::ArrayError;
use penstock_base::{HashSet, Ino, TargetId};
use penstock_drive::{Class, Io};
use penstock_kv::{KvRead, for_each};
use std::collections::{BTreeMap, BTreeSet};

const IO: Io = Io::new(Class::Scrub, "damaged.read");

/// Damaged runs by file, each as (first block in the file, number of blocks, first block on the volume).
pub type DamagedRuns = BTreeMap<Ino, Vec<(u64, u64, u64)>>;

/// Passes each block of data that a file has to `visit`, in order: file, block of the file, block of the
/// volume.
async fn for_each_block(
    volumes: &Volumes,
    kv: &dyn KvRead,
    chunk_blocks: u32,
    mut visit: impl FnMut(Ino, u64, u64),
) -> Result<(), ChunkError> {
    for_each(kv, all_maps(), |key, value| {
        let Ok((chunk, row)) = read_row(key, value) else { return Ok(()) };
        // A check reports chunks that no file has, and extents beyond chunk or volume.
        let Some(first) = chunk.first_block(chunk_blocks) else { return Ok(()) };
        let valid = |extent| volumes.groups().valid_part(extent, chunk_blocks);
        for extent in row.extents.iter().filter(|extent| !extent.preallocated).map(valid) {
            let blocks = (first + u64::from(extent.first)..).zip(extent.block..).take(extent.count as usize);
            blocks.for_each(|(at, block)| visit(chunk.file.ino, at, block));
        }
        Ok::<_, ChunkError>(())
    })
    .await
}

/// Returns the blocks of files that cannot be read. Only stripes that a read or a scrub found unreadable
/// are considered, and each block in them is read again; and those of loans whose lender is away.
pub(crate) async fn find_damaged(
    volumes: &Volumes,
    kv: &dyn KvRead,
    chunk_blocks: u32,
) -> Result<DamagedRuns, ChunkError> {
    let stripes: HashSet<u64> = volumes.unreadable_stripes().into_iter().collect();
    let away: BTreeSet<u64> = volumes.away().into_iter().map(|(group, _)| group).collect();
    let mut damaged = DamagedRuns::new();
    if stripes.is_empty() && away.is_empty() {
        return Ok(damaged);
    }
    let (per_stripe, groups) = (volumes.stripe_blocks(), volumes.groups());
    let mut candidates: Vec<(Ino, u64, u64)> = Vec::new();
    for_each_block(volumes, kv, chunk_blocks, |ino, at, block| {
        if away.contains(&groups.of_block(block)) {
            add_block(damaged.entry(ino).or_default(), at, block);
        } else if stripes.contains(&(block / per_stripe)) {
            candidates.push((ino, at, block));
        }
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

/// The blocks of data of each file that are on loan from a target that is away.
pub(crate) async fn lost_with(
    volumes: &Volumes,
    kv: &dyn KvRead,
    chunk_blocks: u32,
    lender: TargetId,
) -> Result<BTreeMap<Ino, u64>, ChunkError> {
    let of_lender = volumes.away().into_iter().filter(|(_, of)| *of == lender);
    let (away, groups): (BTreeSet<u64>, _) = (of_lender.map(|(group, _)| group).collect(), volumes.groups());
    let mut lost = BTreeMap::new();
    if !away.is_empty() {
        for_each_block(volumes, kv, chunk_blocks, |ino, _, block| {
            if away.contains(&groups.of_block(block)) {
                *lost.entry(ino).or_default() += 1;
            }
        })
        .await?;
    }
    assert!(lost.values().all(|blocks| *blocks > 0) && (lost.is_empty() || !away.is_empty()));
    Ok(lost)
}

fn add_block(runs: &mut Vec<(u64, u64, u64)>, at: u64, block: u64) {
    match runs.last_mut() {
        Some((first, count, start)) if *first + *count == at && *start + *count == block => *count += 1,
        _ => runs.push((at, 1, block)),
    }
}

#[cfg(test)]
mod tests;
