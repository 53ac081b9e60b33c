//! Reads of a chunk's blocks, from memory and from the volume.

use crate::ChunkError;
use crate::cache::Chunk;
use crate::volumes::Volumes;
use penstock_array::Blocks;
use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Buf, ZERO_BLOCK_CRC};
use penstock_drive::Io;
use std::cell::RefCell;

/// Reads blocks of a chunk from memory and volume. Call under the chunk's lock.
pub(crate) async fn fetch(
    volumes: &Volumes,
    chunk: &RefCell<Chunk>,
    first: u32,
    count: u32,
    io: Io,
) -> Result<Blocks, ChunkError> {
    let plan = plan_read(&chunk.borrow(), first, count);
    let reads = plan.into_iter().map(|piece| async {
        Ok::<_, ChunkError>(match piece {
            Piece::Memory(blocks) => blocks,
            Piece::Volume(block, count) => volumes.read(block, count, io).await?,
        })
    });
    let mut all = Blocks::default();
    for piece in futures_util::future::join_all(reads).await {
        let piece = piece?;
        all.parts.extend(piece.parts);
        all.crcs.extend(piece.crcs);
    }
    assert_eq!(to_u32(all.crcs.len()), count, "every block was read");
    Ok(all)
}

/// Adjacent blocks of a chunk, by the place of their data.
enum Piece {
    Memory(Blocks),
    /// First block on the volume, and the number of blocks.
    Volume(u64, u64),
}

fn plan_read(chunk: &Chunk, first: u32, count: u32) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut zeros = None;
    let (mut at, end) = (first, first + count);
    while at < end {
        if let Some((data, crcs)) = chunk.dirty().get(at, end) {
            at += to_u32(crcs.len());
            push_memory(&mut pieces, data, &crcs);
            continue;
        }
        let until = chunk.dirty().next(at, end).unwrap_or(end);
        let (place, run) = chunk.map().run_at(at, until);
        match (place, pieces.last_mut()) {
            (Some(place), Some(Piece::Volume(start, count))) if *start + *count == place => {
                *count += u64::from(run);
            }
            (Some(place), _) => pieces.push(Piece::Volume(place, run.into())),
            (None, _) => {
                let zero = zeros.get_or_insert_with(|| Buf::zeroed(BLOCK_BYTES));
                (0..run).for_each(|_| push_memory(&mut pieces, zero.clone(), &[ZERO_BLOCK_CRC]));
            }
        }
        at += run;
    }
    pieces
}

fn push_memory(pieces: &mut Vec<Piece>, data: Buf, crcs: &[u32]) {
    match pieces.last_mut() {
        Some(Piece::Memory(blocks)) => {
            blocks.parts.push(data);
            blocks.crcs.extend(crcs);
        }
        _ => pieces.push(Piece::Memory(Blocks { parts: vec![data], crcs: crcs.to_vec() })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::ChunkMap;
    use crate::tests::{CHUNK, Random, Seed, extent, preallocated};
    use penstock_sim::seeds;
    use std::rc::Rc;

    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "a list of ranges")]
    fn a_read_joins_neighbours_and_prefers_memory() {
        let map = ChunkMap::of_row(vec![extent(0, 4, 100), extent(4, 2, 104), extent(8, 2, 300)]);
        let mut chunk = Chunk::of_map(map, &Rc::default());
        let data = Buf::copy_from(&[7; 2 * BLOCK_BYTES]);
        chunk.change_dirty(|dirty| dirty.insert(2, &data, &[1, 2], &[]));
        let plan = |first, count| -> Vec<String> {
            let show = |piece: &Piece| match piece {
                Piece::Memory(blocks) => format!("memory {:?}", blocks.crcs),
                Piece::Volume(block, count) => format!("volume {block}+{count}"),
            };
            plan_read(&chunk, first, count).iter().map(show).collect()
        };
        assert_eq!(plan(0, 6), ["volume 100+2", "memory [1, 2]", "volume 104+2"]);
        assert_eq!(plan(3, 1), ["memory [2]"]);
        let zero = format!("memory [{ZERO_BLOCK_CRC}, {ZERO_BLOCK_CRC}]");
        assert_eq!(plan(5, 4), ["volume 105+1", &zero, "volume 300+1"]);
        assert_eq!(plan(4, 1), ["volume 104+1"]);
    }

    #[test]
    fn every_block_is_planned_once_and_in_order() {
        let map = ChunkMap::of_row(vec![extent(0, 4, 100), preallocated(4, 2, 104), extent(8, 2, 300)]);
        for seed in seeds(0..4) {
            let _printed = Seed(seed);
            let mut random = Random::new(seed);
            let mut chunk = Chunk::of_map(map.clone(), &Rc::default());
            for round in 1..200u32 {
                let first = random.below(CHUNK.into()) as u32;
                let count = 1 + random.below((CHUNK - first).into()) as u32;
                if random.below(2) == 0 {
                    let data = Buf::zeroed(count as usize * BLOCK_BYTES);
                    chunk.change_dirty(|dirty| dirty.insert(first, &data, &vec![round; count as usize], &[]));
                } else {
                    chunk.change_dirty(|dirty| dirty.remove(first..first + count));
                }
                // Each block by the place of its data: a checksum in memory or a block of the volume.
                let expected =
                    (first..first + count).map(|block| match chunk.dirty().get(block, block + 1) {
                        Some((_, crcs)) => Err(crcs[0]),
                        None => chunk.map().lookup(block).ok_or(ZERO_BLOCK_CRC),
                    });
                let plan = plan_read(&chunk, first, count);
                let found = plan.iter().flat_map(|piece| match piece {
                    Piece::Memory(blocks) => blocks.crcs.iter().map(|crc| Err(*crc)).collect::<Vec<_>>(),
                    Piece::Volume(block, count) => (*block..block + count).map(Ok).collect(),
                });
                assert_eq!(found.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{first}+{count}");
                let bytes = |piece: &Piece| match piece {
                    Piece::Memory(blocks) => {
                        let bytes: usize = blocks.parts.iter().map(Buf::len).sum();
                        bytes == blocks.crcs.len() * BLOCK_BYTES
                    }
                    Piece::Volume(_, count) => *count > 0,
                };
                assert!(plan.iter().all(bytes), "each piece has its data");
            }
        }
    }
}
