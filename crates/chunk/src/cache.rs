//! Chunks in memory, and the order in which dirty ones are written back.
//!
//! Invariants:
//! - a chunk with dirty blocks or with changes that are not committed is in memory, whatever its row says;
//! - a chunk is in the queue exactly while it has dirty blocks, at the order of its first write since it was
//!   clean;
//! - for a *complete* file, each chunk that has a row is in memory, and so is the file if it has one, so no
//!   rows are looked up for it. A file is complete from the creation of its inode on, until chunks or files
//!   are evicted.

use crate::ChunkError;
use crate::dirty::{DirtyRuns, Dropped};
use crate::files::FileState;
use crate::free::Groups;
use crate::map::{ChunkMap, MapChanges};
use crate::ranks;
use crate::rows::{ChunkKey, Extent, FileRow, MapRow, map_range};
use penstock_base::locks::{Exclusive, Shared};
use penstock_base::rank::{LockKey, RankedKey, RankedLocks};
use penstock_base::{Birth, BoundedSet, Buf, Class, DecodeError, FileId, HashMap, IoContext};
use penstock_kv::{Kv, for_each_key};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

/// Number of chunks in memory above which clean ones are evicted, unless something else is asked for.
pub(crate) const MOST: usize = 1 << 16;

/// One chunk.
#[derive(Default)]
pub(crate) struct Chunk {
    file: Rc<FileState>,
    map: ChunkMap,
    dirty: DirtyRuns,
    /// Order of the first write since the chunk was clean; the lowest is written back first.
    since: u64,
    /// The tenant that wrote to it last.
    tenant: u32,
}

/// Blocks of a chunk that are written: their bytes with the CRC32C of each block.
pub(crate) struct NewBlocks<'a> {
    pub(crate) first: u32,
    pub(crate) data: &'a Buf,
    pub(crate) crcs: &'a [u32],
    /// The tenant that writes them.
    pub(crate) tenant: u32,
}

impl Chunk {
    /// A clean chunk of a file.
    pub(crate) fn of_map(map: ChunkMap, file: &Rc<FileState>) -> Self {
        Self { map, file: file.clone(), ..Self::default() }
    }

    /// The file.
    pub(crate) fn file(&self) -> &Rc<FileState> {
        &self.file
    }

    /// The places of its blocks on the volume.
    pub(crate) fn map(&self) -> &ChunkMap {
        &self.map
    }

    /// Its blocks in memory.
    pub(crate) fn dirty(&self) -> &DirtyRuns {
        &self.dirty
    }

    /// The write-back of its blocks, charged to the tenant that wrote last.
    pub(crate) fn writes_back(&self) -> IoContext {
        IoContext { tenant: self.tenant, ..IoContext::system(Class::Client) }
    }

    /// Changes the map, and counts the blocks that the file holds.
    pub(crate) fn change<T>(&mut self, change: impl FnOnce(&mut ChunkMap) -> T) -> T {
        let before = self.map.blocks();
        let result = change(&mut self.map);
        self.file.count(before, self.map.blocks());
        result
    }

    /// Changes the dirty blocks, and counts those that the file has reserved.
    pub(crate) fn change_dirty<T>(&mut self, change: impl FnOnce(&mut DirtyRuns) -> T) -> T {
        let before = self.dirty.reserved();
        let result = change(&mut self.dirty);
        self.file.count(before, self.dirty.reserved());
        result
    }

    /// Blocks of a range that are neither dirty nor have a volume block: writing them needs free space.
    pub(crate) fn without_space(&self, blocks: Range<u32>) -> Vec<Range<u32>> {
        let gaps = self.dirty.gaps(blocks).into_iter();
        gaps.flat_map(|gap| self.map.unplaced(gap)).collect()
    }

    /// Blocks of a range that are not dirty and whose volume blocks are lost: written anew, they get others.
    pub(crate) fn with_lost_space(
        &self,
        blocks: Range<u32>,
        is_lost: impl Fn(u64) -> bool,
    ) -> Vec<Range<u32>> {
        let gaps = self.dirty.gaps(blocks).into_iter().flatten();
        let lost = gaps.filter(|at| self.map.place(*at).is_some_and(|(block, _)| is_lost(block)));
        lost.map(|at| at..at + 1).collect()
    }

    /// True if a block contains written data, in memory or on the volume.
    pub(crate) fn is_data(&self, block: u32) -> bool {
        self.dirty.contains(block) || self.map.lookup(block).is_some()
    }

    /// True if each of its first `count` blocks contains data.
    pub(crate) fn covers(&self, count: u32) -> bool {
        (0..count).all(|block| self.is_data(block))
    }

    /// True if the row describes all that memory has.
    pub(crate) fn is_clean(&self) -> bool {
        self.dirty.is_empty() && !self.map.is_changed()
    }
}

impl LockKey for ChunkKey {
    fn order(&self) -> u64 {
        self.index
    }
}

/// A chunk in memory. Its lock in [`ChunkCache`] orders what touches it.
pub(crate) type Cached = Rc<RefCell<Chunk>>;

/// The uncommitted changes of one chunk, taken by a commit.
///
/// They keep a reference to the chunk. Until the rows are committed, the map exists only in memory, so the
/// chunk must not be evicted although it counts as clean.
pub(crate) struct Changes {
    pub(crate) key: ChunkKey,
    pub(crate) map: MapChanges,
    chunk: Cached,
}

impl Changes {
    /// Takes the changes that a commit must make durable; none if the map equals the row.
    pub(crate) fn take(key: ChunkKey, chunk: &Cached) -> Option<Self> {
        let map = chunk.borrow_mut().map.take_changes()?;
        Some(Self { key, map, chunk: chunk.clone() })
    }

    /// The file of the chunk.
    pub(crate) fn file(&self) -> Rc<FileState> {
        self.chunk.borrow().file.clone()
    }

    /// Returns changes to the chunk after their commit failed.
    pub(crate) fn put_back(self) {
        self.chunk.borrow_mut().map.put_back(self.map);
    }
}

/// The row of a file that its reader lacks.
#[derive(Debug)]
pub struct WantedRow {
    file: FileId,
    /// Its key.
    pub key: Vec<u8>,
    /// Files dropped from memory before it is read.
    dropped: u64,
}

impl WantedRow {
    /// The file.
    pub(crate) fn file(&self) -> FileId {
        self.file
    }
}

/// The chunks of one target that are in memory.
pub(crate) struct ChunkCache {
    kv: Rc<dyn Kv>,
    chunk_blocks: u32,
    groups: Rc<Cell<Groups>>,
    chunks: RefCell<BTreeMap<ChunkKey, Cached>>,
    locks: RankedLocks<ChunkKey>,
    files: RefCell<HashMap<FileId, Rc<FileState>>>,
    /// Number of chunks, and of files, above which those leave that are not needed.
    most: usize,
    /// Number of files in memory at which the next eviction of unused ones is tried.
    evict_files_at: Cell<usize>,
    /// Raised whenever states of files are dropped from memory.
    dropped_files: Cell<u64>,
    complete: BoundedSet<FileId>,
    /// Chunks with dirty blocks.
    queue: RefCell<BTreeMap<u64, ChunkKey>>,
    order: Cell<u64>,
    dirty_blocks: Cell<u64>,
    /// Number of chunks in memory at which the next eviction of clean ones is tried.
    evict_at: Cell<usize>,
}

impl ChunkCache {
    /// A cache of at most `most` clean chunks.
    pub(crate) fn new(kv: &Rc<dyn Kv>, chunk_blocks: u32, groups: Rc<Cell<Groups>>, most: usize) -> Rc<Self> {
        Rc::new(Self {
            kv: kv.clone(),
            chunk_blocks,
            groups,
            chunks: RefCell::default(),
            locks: RankedLocks::new(ranks::CHUNK),
            files: RefCell::default(),
            most,
            evict_files_at: Cell::new(most),
            dropped_files: Cell::new(0),
            complete: BoundedSet::default(),
            queue: RefCell::default(),
            order: Cell::new(0),
            dirty_blocks: Cell::new(0),
            evict_at: Cell::new(most),
        })
    }

    /// Waits for a chunk's lock, to read it.
    pub(crate) async fn shared(&self, key: ChunkKey) -> RankedKey<Shared<ChunkKey>> {
        self.locks.shared(key).await
    }

    /// Waits for a chunk's lock, to change it.
    pub(crate) async fn exclusive(&self, key: ChunkKey) -> RankedKey<Exclusive<ChunkKey>> {
        self.locks.exclusive(key).await
    }

    /// The number of dirty blocks of all chunks.
    pub(crate) fn dirty_blocks(&self) -> u64 {
        self.dirty_blocks.get()
    }

    /// The chunk that has been dirty for the longest time.
    pub(crate) fn oldest_dirty(&self) -> Option<ChunkKey> {
        self.queue.borrow().first_key_value().map(|(_, key)| *key)
    }

    /// All chunks with dirty blocks, oldest first.
    pub(crate) fn all_dirty(&self) -> Vec<ChunkKey> {
        self.queue.borrow().values().copied().collect()
    }

    /// Files with changes that are not committed.
    pub(crate) fn changed_files(&self) -> BTreeSet<FileId> {
        let chunks = self.chunks.borrow();
        let changed = chunks.iter().filter(|(_, chunk)| chunk.borrow().map().is_changed());
        changed.map(|(key, _)| key.file).collect()
    }

    /// A chunk, if it is in memory.
    pub(crate) fn peek(&self, key: ChunkKey) -> Option<Cached> {
        self.chunks.borrow().get(&key).cloned()
    }

    /// A chunk, loaded from its row if it is not in memory. Call under the chunk's lock.
    pub(crate) async fn get(&self, key: ChunkKey) -> Result<Cached, ChunkError> {
        if let Some(chunk) = self.peek(key) {
            return Ok(chunk);
        }
        let (file, row) = self.file_and(key.file, Some(key.row(Birth::FIRST))).await?;
        let map = match row {
            Some(value) => ChunkMap::of_row(self.checked(MapRow::decode(&value, Birth::FIRST)?.extents)?),
            None => ChunkMap::default(),
        };
        self.evict();
        let chunk = Chunk::of_map(map, &file);
        let mut chunks = self.chunks.borrow_mut();
        Ok(chunks.entry(key).or_insert_with(|| Rc::new(RefCell::new(chunk))).clone())
    }

    /// A file, loaded from its row if it is not in memory.
    pub(crate) async fn file(&self, file: FileId) -> Result<Rc<FileState>, ChunkError> {
        Ok(self.file_and(file, None).await?.0)
    }

    /// A file, and another row of it, which is read at the same time.
    async fn file_and(
        &self,
        file: FileId,
        other: Option<Vec<u8>>,
    ) -> Result<(Rc<FileState>, Option<Vec<u8>>), ChunkError> {
        loop {
            let known = self.files.borrow().get(&file).cloned();
            let is_complete = self.complete.contains(&file);
            let dropped = self.dropped_files.get();
            let own = known.is_none().then(|| FileRow::key(file, Birth::FIRST));
            let keys = own.into_iter().chain(other.clone()).filter(|_| !is_complete);
            let keys: Vec<Vec<u8>> = keys.collect();
            let mut rows = if keys.is_empty() { Vec::new() } else { self.kv.get_many(keys).await? };
            let other = if other.is_some() { rows.pop().flatten() } else { None };
            if let Some(state) = known {
                return Ok((state, other));
            }
            let row = rows.pop().flatten().map(|value| FileRow::decode(&value)).transpose()?;
            if dropped != self.dropped_files.get() {
                // A state of the file may have come and gone, and the row with it.
                continue;
            }
            if let Some(state) = self.files.borrow().get(&file) {
                // Another task has loaded it, and may have changed it since: it is newer than the row.
                return Ok((state.clone(), other));
            }
            if self.files.borrow().len() >= self.evict_files_at.get() {
                self.complete.clear();
                self.drop_files();
                self.evict_files_at.set(self.most.max(self.files.borrow().len() + self.most / 8));
            }
            let state = Rc::new(FileState::of_row(row));
            let before = self.files.borrow_mut().insert(file, state.clone());
            assert!(before.is_none(), "a file has one state");
            return Ok((state, other));
        }
    }

    /// Blocks that a file holds, if that is known without its row.
    pub(crate) fn held(&self, file: FileId) -> Option<u64> {
        let held = self.files.borrow().get(&file).map(|state| state.held());
        held.or_else(|| self.complete.contains(&file).then_some(0))
    }

    /// Blocks that a file holds, or the row to be read for that.
    pub(crate) fn held_or_row(&self, file: FileId) -> Result<u64, WantedRow> {
        self.held(file).ok_or_else(|| WantedRow {
            file,
            key: FileRow::key(file, Birth::FIRST),
            dropped: self.dropped_files.get(),
        })
    }

    /// Takes a file into memory whose row was read, unless it may have changed meanwhile. Returns the blocks
    /// that it holds.
    pub(crate) fn take_row(&self, wanted: &WantedRow, row: Option<FileRow>) -> u64 {
        if let Some(state) = self.files.borrow().get(&wanted.file) {
            return state.held();
        }
        let state = FileState::of_row(row);
        let held = state.held();
        let has_room = self.files.borrow().len() < self.evict_files_at.get();
        if has_room && wanted.dropped == self.dropped_files.get() {
            self.files.borrow_mut().insert(wanted.file, Rc::new(state));
        }
        held
    }

    /// Drops unused files from memory as soon as there are this many.
    #[cfg(test)]
    pub(crate) fn drop_files_from(&self, most: usize) {
        self.evict_files_at.set(most);
    }

    /// Drops the states of files that nobody uses: those are as their rows.
    fn drop_files(&self) {
        let of_chunks = |chunk: &Cached| Rc::strong_count(&chunk.borrow().file) > 1;
        assert!(self.chunks.borrow().values().next().is_none_or(of_chunks), "a chunk shares its file");
        let mut files = self.files.borrow_mut();
        files.retain(|_, state| Rc::strong_count(state) > 1);
        self.dropped_files.set(self.dropped_files.get() + 1);
    }

    /// A row's extents, or an error if one exceeds the chunk or the volume.
    fn checked(&self, extents: Vec<Extent>) -> Result<Vec<Extent>, ChunkError> {
        let groups = self.groups.get();
        let fits = |extent: &Extent| {
            extent.first <= self.chunk_blocks && groups.valid_part(extent, self.chunk_blocks) == *extent
        };
        match extents.iter().all(fits) {
            true => Ok(extents),
            false => {
                Err(DecodeError::Bad { what: "map row", why: "an extent beyond chunk or volume" }.into())
            }
        }
    }

    /// Evicts clean chunks that only this cache references, if there are too many.
    fn evict(&self) {
        let mut chunks = self.chunks.borrow_mut();
        if chunks.len() < self.evict_at.get() {
            return;
        }
        self.complete.clear();
        chunks.retain(|_, chunk| Rc::strong_count(chunk) > 1 || !chunk.borrow().is_clean());
        // If few could be evicted, the next attempt comes only after an eighth of the limit has been added.
        self.evict_at.set(self.most.max(chunks.len() + self.most / 8));
    }

    /// Evicts all clean chunks, because rows are about to change past the cache.
    pub(crate) fn evict_clean(&self) {
        self.complete.clear();
        self.chunks.borrow_mut().retain(|_, chunk| !chunk.borrow().is_clean());
        self.drop_files();
    }

    /// An inode is new: no inode had its number before, and it has no chunk.
    pub(crate) fn file_made(&self, file: FileId) {
        self.complete.insert(file);
    }

    /// A file was removed: drops its empty chunks and its state.
    pub(crate) fn file_removed(&self, file: FileId) {
        self.complete.remove(&file);
        let empty = self.keys_of(file, |chunk| chunk.is_clean() && chunk.map.is_empty());
        empty.iter().for_each(|key| drop(self.chunks.borrow_mut().remove(key)));
        let state = self.files.borrow().get(&file).cloned();
        let Some(state) = state else { return };
        // It may have been given a name again.
        state.stays();
        // Here and in the list: nobody else uses it.
        if Rc::strong_count(&state) == 2 {
            self.files.borrow_mut().remove(&file);
            self.dropped_files.set(self.dropped_files.get() + 1);
        }
    }

    /// Chunks of a file that are in memory and for which `wanted` holds.
    pub(crate) fn keys_of(&self, file: FileId, wanted: impl Fn(&Chunk) -> bool) -> Vec<ChunkKey> {
        let chunks = self.chunks.borrow();
        let all = ChunkKey { file, index: 0 }..=ChunkKey { file, index: u64::MAX };
        chunks.range(all).filter(|(_, chunk)| wanted(&chunk.borrow())).map(|(key, _)| *key).collect()
    }

    /// Chunks of a file with these indices that have a row or are in memory; all from the start on if the end
    /// is `u64::MAX`.
    pub(crate) async fn keys_within(
        &self,
        file: FileId,
        indices: Range<u64>,
    ) -> Result<BTreeSet<ChunkKey>, ChunkError> {
        let known = self.keys_of(file, |_| true).into_iter();
        let wanted =
            |key: &ChunkKey| indices.contains(&key.index) || indices.end == u64::MAX && key.index == u64::MAX;
        let mut keys: BTreeSet<ChunkKey> = known.filter(wanted).collect();
        if self.complete.contains(&file) {
            return Ok(keys);
        }
        let (from, mut until) = map_range(file, indices.start);
        if indices.end < u64::MAX {
            until = map_range(file, indices.end).0;
        }
        for_each_key(&*self.kv, (from, until), |key| {
            keys.insert(ChunkKey::decode(key)?.0);
            Ok::<_, ChunkError>(())
        })
        .await?;
        Ok(keys)
    }

    /// The first chunk of a file, from `from` on, that has a row or is in memory.
    pub(crate) async fn next_key(&self, from: ChunkKey) -> Result<Option<ChunkKey>, ChunkError> {
        let last = ChunkKey { index: u64::MAX, ..from };
        let in_memory = self.chunks.borrow().range(from..=last).next().map(|(key, _)| *key);
        if self.complete.contains(&from.file) {
            return Ok(in_memory);
        }
        let (start, until) = map_range(from.file, from.index);
        let row = self.kv.scan(start, until, 1).await?.pop();
        let stored = row.map(|(key, _)| ChunkKey::decode(&key)).transpose()?.map(|(key, _)| key);
        Ok(in_memory.into_iter().chain(stored).min())
    }

    /// Makes blocks of a chunk dirty; `reserved` as for [`DirtyRuns::insert`]. Returns true if the chunk is
    /// full of dirty blocks now.
    pub(crate) fn write(
        &self,
        key: ChunkKey,
        chunk: &RefCell<Chunk>,
        new: &NewBlocks<'_>,
        reserved: &[Range<u32>],
    ) -> bool {
        let mut chunk = chunk.borrow_mut();
        if chunk.dirty.is_empty() {
            chunk.since = self.order.get() + 1;
            self.order.set(chunk.since);
            self.queue.borrow_mut().insert(chunk.since, key);
        }
        chunk.tenant = new.tenant;
        let more = chunk.change_dirty(|dirty| dirty.insert(new.first, new.data, new.crcs, reserved));
        self.dirty_blocks.set(self.dirty_blocks.get() + more);
        assert!(chunk.dirty.blocks() <= self.chunk_blocks, "dirty blocks are in the chunk");
        self.assert_counted(chunk.dirty.blocks());
        chunk.dirty.blocks() == self.chunk_blocks
    }

    /// Drops the dirty blocks of a range.
    pub(crate) fn drop_dirty(&self, key: ChunkKey, chunk: &RefCell<Chunk>, blocks: Range<u32>) -> Dropped {
        let mut chunk = chunk.borrow_mut();
        let dropped = chunk.change_dirty(|dirty| dirty.remove(blocks));
        if dropped.blocks > 0 {
            assert!(dropped.blocks <= self.dirty_blocks.get(), "{dropped:?} of {:?}", self.dirty_blocks);
            self.dirty_blocks.set(self.dirty_blocks.get() - dropped.blocks);
            if chunk.dirty.is_empty() {
                let queued = self.queue.borrow_mut().remove(&chunk.since);
                assert_eq!(queued, Some(key), "a dirty chunk is queued once");
            }
            self.assert_counted(chunk.dirty.blocks());
        }
        dropped
    }

    /// Checks the count of all dirty blocks against the queue and one chunk, which has `blocks` of them.
    fn assert_counted(&self, blocks: u32) {
        let (all, queued) = (self.dirty_blocks.get(), self.queue.borrow().len() as u64);
        assert!(
            all >= u64::from(blocks) && (queued..=queued * u64::from(self.chunk_blocks)).contains(&all),
            "{all} dirty blocks in {queued} chunks, {blocks} of them in one"
        );
    }
}

#[cfg(test)]
mod tests;
