//! A chunk store in memory: each chunk is a row with the numbers of its written blocks.

use crate::ChunkStore;
use penstock_base::{Birth, DecodeError, FileId, Ino, LocalBoxFuture};
use penstock_chunk::{
    Behind, ChunkError, ChunkKey, FileRow, Known, Owned, Owner, REMOVED, SpaceUsage, TargetCheck, WantedRow,
    all_maps, map_range,
};
use penstock_kv::{Kv, MemKv, WriteSet};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

pub(super) const CHUNK_BLOCKS: u32 = 4;

/// Chunks of 4 blocks in the rows of a store.
pub(super) struct MemChunks {
    kv: Rc<MemKv>,
    generation: u64,
    /// The truncations, each with its file, first block and generation.
    pub(super) truncations: RefCell<Vec<(Ino, u64, u64)>>,
    /// A file with a map row that cannot be read, so that it cannot be truncated.
    pub(super) damaged: Cell<Option<Ino>>,
    /// Files that are known to be new and not removed.
    pub(super) made: RefCell<BTreeSet<Ino>>,
    /// Owners that were named.
    pub(super) owners: RefCell<BTreeMap<Ino, Owner>>,
}

impl MemChunks {
    pub(super) fn new(kv: &Rc<MemKv>, generation: u64) -> Rc<Self> {
        let (truncations, damaged, made, owners) = Default::default();
        Rc::new(Self { kv: kv.clone(), generation, truncations, damaged, made, owners })
    }

    fn rows(&self, range: penstock_kv::Range) -> Vec<(ChunkKey, BTreeSet<u32>)> {
        let rows = self.kv.rows().into_iter().filter(|(key, _)| (&range.0..&range.1).contains(&key));
        let blocks = |value: Vec<u8>| value.iter().map(|block| u32::from(*block)).collect();
        rows.map(|(key, value)| (ChunkKey::decode(&key).unwrap().0, blocks(value))).collect()
    }

    fn put(writes: &mut WriteSet, key: ChunkKey, blocks: &BTreeSet<u32>) {
        match blocks.is_empty() {
            true => writes.delete(key.row(Birth::FIRST)),
            false => writes.put(key.row(Birth::FIRST), blocks.iter().map(|block| *block as u8).collect()),
        };
    }

    /// Writes a block of a file.
    pub(super) async fn write(&self, ino: Ino, block: u64) {
        let file = FileId::main(ino);
        let per = u64::from(CHUNK_BLOCKS);
        let key = ChunkKey { file, index: block / per };
        let rows = self.rows(map_range(file, key.index));
        let mut blocks =
            rows.into_iter().find(|(at, _)| *at == key).map(|(_, blocks)| blocks).unwrap_or_default();
        blocks.insert((block % per) as u32);
        let mut writes = WriteSet::new();
        Self::put(&mut writes, key, &blocks);
        self.kv.commit(writes).await.unwrap();
    }

    /// The written blocks of a file.
    pub(super) fn blocks(&self, ino: Ino) -> Vec<u64> {
        let rows = self.rows(map_range(FileId::main(ino), 0));
        let at = |(key, blocks): (ChunkKey, BTreeSet<u32>)| {
            blocks.into_iter().map(move |block| key.index * u64::from(CHUNK_BLOCKS) + u64::from(block))
        };
        rows.into_iter().flat_map(at).collect()
    }

    /// A check of this store, which has no bitmaps and so no findings.
    pub(super) fn check(&self) -> TargetCheck {
        let mut owners: BTreeMap<Ino, Owned> = BTreeMap::new();
        for (key, blocks) in self.rows(all_maps()) {
            let owned = owners.entry(key.file.ino).or_default();
            let end =
                key.index * u64::from(CHUNK_BLOCKS) + blocks.last().map_or(0, |last| u64::from(*last) + 1);
            owned.chunks += 1;
            owned.blocks += blocks.len() as u64;
            owned.end_block = owned.end_block.max(end);
        }
        // The last truncation of each file that is not being removed.
        let truncations = self.truncations.borrow();
        for (ino, _, generation) in truncations.iter().filter(|(_, _, generation)| *generation != REMOVED) {
            let owner = self.owners.borrow()[ino];
            let owned = owners.entry(*ino).or_default();
            owned.file =
                Some(FileRow { truncations: *generation, blocks: owned.blocks, owner, owner_number: 0 });
        }
        for (ino, ..) in truncations.iter().filter(|(_, _, generation)| *generation == REMOVED) {
            owners.remove(ino);
        }
        TargetCheck { owners, ..TargetCheck::default() }
    }
}

impl ChunkStore for MemChunks {
    fn chunk_blocks(&self) -> u32 {
        CHUNK_BLOCKS
    }

    fn generation(&self) -> u64 {
        self.generation
    }

    fn usage(&self) -> SpaceUsage {
        SpaceUsage { total_blocks: 1000, free_blocks: 600, headroom_blocks: 100 }
    }

    fn file_made(&self, file: FileId) {
        self.made.borrow_mut().insert(file.ino);
    }

    fn file_removed(&self, file: FileId) {
        self.made.borrow_mut().remove(&file.ino);
    }

    fn held_blocks(&self, files: Vec<FileId>) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>> {
        let held = files.into_iter().map(|file| self.blocks(file.ino).len() as u64).collect();
        Box::pin(async move { Ok(held) })
    }

    fn held_or_row(&self, file: FileId) -> Result<u64, WantedRow> {
        Ok(self.blocks(file.ino).len() as u64)
    }

    fn held_by_row(&self, _: &WantedRow, _: Option<Vec<u8>>) -> u64 {
        unreachable!("no row is wanted")
    }

    fn set_owner(
        &self,
        file: FileId,
        owner: Owner,
        writes: WriteSet,
    ) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(async move {
            self.kv.commit(writes).await?;
            self.owners.borrow_mut().insert(file.ino, owner);
            Ok(())
        })
    }

    fn truncate(
        &self,
        file: FileId,
        blocks: Range<u64>,
        _behind: Behind,
        known: Known,
        mut writes: WriteSet,
    ) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        let per = u64::from(CHUNK_BLOCKS);
        assert!(blocks.end == u64::MAX || blocks.end.is_multiple_of(per), "{blocks:?} end with a chunk");
        for (key, mut of_chunk) in self.rows(map_range(file, blocks.start / per)) {
            of_chunk.retain(|block| !blocks.contains(&(key.index * per + u64::from(*block))));
            Self::put(&mut writes, key, &of_chunk);
        }
        Box::pin(async move {
            if self.damaged.get() == Some(file.ino) {
                return Err(DecodeError::Bad { what: "map row", why: "it is damaged" }.into());
            }
            self.kv.commit(writes).await?;
            self.truncations.borrow_mut().push((file.ino, blocks.start, known.truncations));
            self.owners.borrow_mut().insert(file.ino, known.owner);
            Ok(())
        })
    }

    fn truncate_steps(
        &self,
        file: FileId,
        first_block: u64,
        most: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>> {
        let per = u64::from(CHUNK_BLOCKS);
        let keys: Vec<u64> =
            self.rows(map_range(file, first_block / per)).iter().map(|(key, _)| key.index).collect();
        let stops = keys.iter().rev().skip(most - 1).step_by(most).map(|index| index * per);
        let stops = stops.filter(|stop| *stop > first_block).collect();
        Box::pin(async move { Ok(stops) })
    }

    fn commit_all(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        self.sync()
    }

    fn sync(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(async move { Ok(self.kv.flush().await?) })
    }
}
