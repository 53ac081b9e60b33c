//! The target itself: writes into memory, and reads from memory and volume.
//!
//! Lock order: inode, then chunk. Everything that changes rows takes the gate shared. A check takes it
//! exclusively, so it sees a consistent state.

use crate::chunk::{Chunk, DirtyBlock};
use crate::discard::Idle;
use crate::rows::{ChunkKey, Extent, all_groups, decode_group, decode_group_key, decode_map};
use crate::space::{Run, Space, SpaceUsage};
use crate::{ChunkError, DIRTY_BYTES};
use penstock_array::{Blocks, Volume};
use penstock_base::{
    BLOCK_BYTES, Buf, DecodeError, Env, HashMap, Ino, KeyedLocks, MAX_FILE_BYTES, Noted, ZERO_BLOCK_CRC,
};
use penstock_drive::{Class, Io};
use penstock_kv::{Kv, for_each};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use tokio::sync::{Mutex, Notify, RwLock, Semaphore};

const IO: Io = Io::new(Class::Client, "chunk.read");
/// Number of chunks in memory above which clean ones are evicted.
const CACHED_CHUNKS: usize = 1 << 16;
/// Full chunks that are written back at the same time: enough that one is encoded while others are being
/// written.
const PLACED_AT_ONCE: usize = 4;

/// Settings of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetConfig {
    /// Blocks in a chunk: a multiple of the stripe size.
    pub chunk_blocks: u32,
    /// Changes with every start. A client that sees another value marks its uncommitted writes as lost.
    pub generation: u64,
}

impl TargetConfig {
    /// Chunks of 1 MiB, rounded down to full stripes; at least one stripe.
    pub fn for_volume(volume: &Volume, generation: u64) -> Self {
        let stripe = volume.stripe_blocks();
        let chunk_blocks = (256 / stripe).max(1) * stripe;
        Self { chunk_blocks: chunk_blocks as u32, generation }
    }
}

/// Counters of a target since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetCounts {
    /// Blocks that clients wrote.
    pub written_blocks: u64,
    /// Blocks that clients read.
    pub read_blocks: u64,
    /// Chunks that were written as full stripes, past the log.
    pub whole_chunks: u64,
    /// Of `whole_chunks`, those that were only partly dirty; their other blocks were read first.
    pub rewritten_chunks: u64,
    /// Full chunks that went through the log, because too few full stripes were free.
    pub logged_chunks: u64,
    /// Commits of single files; commits of everything do not count.
    pub commits: u64,
    /// Stripes that were discarded, in the stripe table only or on the drives as well.
    pub discarded_stripes: u64,
}

/// The chunk store on one volume.
pub struct Target {
    pub(crate) env: Env,
    pub(crate) volume: Volume,
    pub(crate) kv: Rc<dyn Kv>,
    pub(crate) config: TargetConfig,
    pub(crate) chunks: RefCell<BTreeMap<ChunkKey, Rc<RefCell<Chunk>>>>,
    pub(crate) whole: Noted<(u64, Ino)>,
    /// Chunks with dirty blocks, keyed by the order of the first write since each was clean.
    pub(crate) waiting: RefCell<BTreeMap<u64, ChunkKey>>,
    pub(crate) chunk_locks: KeyedLocks<ChunkKey>,
    pub(crate) inode_locks: KeyedLocks<(u64, Ino)>,
    pub(crate) gate: Rc<RwLock<()>>,
    pub(crate) space: RefCell<Space>,
    pub(crate) commit_lock: Mutex<()>,
    pub(crate) dirty_blocks: Cell<u64>,
    pub(crate) order: Cell<u64>,
    /// Limits the number of full chunks that are written back at the same time.
    pub(crate) placing: Semaphore,
    /// Blocks freed by transactions that are not known to be durable.
    pub(crate) reclaim: RefCell<Vec<Run>>,
    /// Stripes that lost their last block and wait to be reused or discarded.
    pub(crate) idle: RefCell<Idle>,
    pub(crate) idle_noted: Notify,
    /// Locked while a batch of idle stripes is discarded.
    pub(crate) discarding: Mutex<()>,
    pub(crate) cuts: RefCell<HashMap<(u64, Ino), u64>>,
    /// Number of chunks in memory at which the next eviction of clean ones is tried.
    most_chunks: Cell<usize>,
    pub(crate) counts: Cell<TargetCounts>,
    pub(crate) closed: Cell<bool>,
}

impl Target {
    /// Opens the target on `volume` with its rows in `kv`. `gate` is shared with everything else that changes
    /// those rows.
    pub async fn open(
        env: &Env,
        volume: Volume,
        kv: Rc<dyn Kv>,
        gate: Rc<RwLock<()>>,
        config: TargetConfig,
    ) -> Result<Rc<Self>, ChunkError> {
        let space = load_space(&volume, &*kv).await?;
        let target = Rc::new(Self {
            env: env.clone(),
            volume,
            kv,
            config,
            chunks: RefCell::default(),
            whole: Noted::default(),
            waiting: RefCell::default(),
            chunk_locks: KeyedLocks::default(),
            inode_locks: KeyedLocks::default(),
            gate,
            space: RefCell::new(space),
            commit_lock: Mutex::default(),
            dirty_blocks: Cell::new(0),
            order: Cell::new(0),
            placing: Semaphore::new(PLACED_AT_ONCE),
            reclaim: RefCell::default(),
            idle: RefCell::default(),
            idle_noted: Notify::new(),
            discarding: Mutex::default(),
            cuts: RefCell::default(),
            most_chunks: Cell::new(CACHED_CHUNKS),
            counts: Cell::default(),
            closed: Cell::new(false),
        });
        target.hold_unmarked().await?;
        target.note_unowned();
        env.spawn("target commit", Box::pin(target.clone().commit_task()));
        env.spawn("target discard", Box::pin(target.clone().discard_task()));
        Ok(target)
    }

    /// Returns the settings that the target was opened with.
    pub fn config(&self) -> TargetConfig {
        self.config
    }

    /// Returns total, free and headroom blocks. Blocks in a running discard count as free.
    pub fn usage(&self) -> SpaceUsage {
        self.space.borrow().reported()
    }

    /// Returns the counters since the target was opened.
    pub fn counts(&self) -> TargetCounts {
        self.counts.get()
    }

    /// Returns the volume that the chunks are stored on.
    pub fn volume(&self) -> &Volume {
        &self.volume
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut TargetCounts)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    /// Returns the chunk in memory, loaded from its row if it is not there. Call under the chunk's lock.
    pub(crate) async fn chunk(&self, key: ChunkKey) -> Result<Rc<RefCell<Chunk>>, ChunkError> {
        if let Some(chunk) = self.chunks.borrow().get(&key) {
            return Ok(chunk.clone());
        }
        let row = match self.whole.contains(&(key.branch, key.ino)) {
            true => None,
            false => self.kv.get(key.row(0)).await?,
        };
        let chunk = match row {
            Some(value) => Chunk::with_map(self.known(decode_map(&value)?)?),
            None => Chunk::default(),
        };
        let mut chunks = self.chunks.borrow_mut();
        if chunks.len() >= self.most_chunks.get() {
            // Evicts clean chunks that only this map references.
            self.whole.clear();
            chunks.retain(|_, chunk| Rc::strong_count(chunk) > 1 || !chunk.borrow().is_clean());
            // If few could be evicted, the next attempt comes only after an eighth of the limit has been
            // added.
            self.most_chunks.set(CACHED_CHUNKS.max(chunks.len() + CACHED_CHUNKS / 8));
        }
        Ok(chunks.entry(key).or_insert_with(|| Rc::new(RefCell::new(chunk))).clone())
    }

    /// Returns a row's extents, or an error if one exceeds the chunk or the volume.
    fn known(&self, extents: Vec<Extent>) -> Result<Vec<Extent>, ChunkError> {
        let fits = |extent: &Extent| {
            extent.first + extent.count <= self.config.chunk_blocks
                && extent.block + u64::from(extent.count) <= self.volume.blocks()
        };
        match extents.iter().all(fits) {
            true => Ok(extents),
            false => {
                Err(DecodeError::Bad { what: "map row", why: "an extent beyond chunk or volume" }.into())
            }
        }
    }

    fn check_blocks(&self, key: ChunkKey, first: u32, count: usize) -> Result<(), ChunkError> {
        let (end, chunk_blocks) = (u64::from(first) + count as u64, u64::from(self.config.chunk_blocks));
        let end_in_file = key.index.saturating_mul(chunk_blocks).saturating_add(end);
        let is_in_a_file = end_in_file <= MAX_FILE_BYTES / BLOCK_BYTES as u64;
        match end <= chunk_blocks && count > 0 && is_in_a_file {
            true => Ok(()),
            false => {
                Err(ChunkError::Invalid(format!("blocks {first}+{count} are not in chunk {}", key.index)))
            }
        }
    }

    /// Rejects a change that was sent before the file was truncated. Call under the chunk's lock.
    pub(crate) fn check_cut(&self, key: ChunkKey, sent: u64) -> Result<(), ChunkError> {
        let found = self.cuts.borrow().get(&(key.branch, key.ino)).copied().unwrap_or(0);
        if sent < found { Err(ChunkError::Truncated { found, sent }) } else { Ok(()) }
    }

    /// Reserves blocks of free space, or fails with [`ChunkError::NoSpace`].
    pub(crate) fn promise(&self, wanted_blocks: u64) -> Result<(), ChunkError> {
        if self.space.borrow_mut().promise(wanted_blocks) {
            return Ok(());
        }
        let usage = self.usage();
        let free_blocks = usage.free_blocks.saturating_sub(usage.reserve_blocks);
        Err(ChunkError::NoSpace { free_blocks, wanted_blocks })
    }

    /// Writes complete blocks of a chunk. They are in memory when this returns, and durable after a commit.
    /// `cut` is the inode's truncate generation as the writer knows it.
    ///
    /// A chunk that becomes full is written back in the background; this call does not wait for that.
    pub async fn write(
        self: &Rc<Self>,
        key: ChunkKey,
        first: u32,
        data: &Buf,
        crcs: &[u32],
        cut: u64,
    ) -> Result<(), ChunkError> {
        self.check_blocks(key, first, crcs.len())?;
        if data.len() != crcs.len() * BLOCK_BYTES {
            return Err(ChunkError::Invalid(format!("{} checksums for {} bytes", crcs.len(), data.len())));
        }
        let complete = match self.try_write(key, first, data, crcs, cut).await {
            Err(ChunkError::NoSpace { .. }) => {
                // Freed blocks may be waiting only for a durable commit.
                self.commit_all().await?;
                self.try_write(key, first, data, crcs, cut).await?
            }
            other => other?,
        };
        if complete {
            self.env.spawn("target place", Box::pin(self.clone().place_in_turn(key)));
        }
        self.count(|counts| counts.written_blocks += crcs.len() as u64);
        while self.dirty_blocks.get() * BLOCK_BYTES as u64 > DIRTY_BYTES {
            let oldest = self.waiting.borrow().first_key_value().map(|(_, key)| *key);
            let Some(oldest) = oldest else { break };
            self.place(oldest).await?;
        }
        Ok(())
    }

    async fn try_write(
        &self,
        key: ChunkKey,
        first: u32,
        data: &Buf,
        crcs: &[u32],
        cut: u64,
    ) -> Result<bool, ChunkError> {
        let _lock = self.chunk_locks.exclusive(key).await;
        self.check_cut(key, cut)?;
        let chunk = self.chunk(key).await?;
        let blocks = first..first + crcs.len() as u32;
        let new = {
            let chunk = chunk.borrow();
            blocks.clone().filter(|block| !chunk.has_space(*block)).collect::<Vec<_>>()
        };
        self.promise(new.len() as u64)?;
        let mut chunk = chunk.borrow_mut();
        if chunk.dirty.is_empty() {
            chunk.since = self.order.get() + 1;
            self.order.set(chunk.since);
            self.waiting.borrow_mut().insert(chunk.since, key);
        }
        for (index, block) in blocks.enumerate() {
            let data = data.slice(index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES);
            let promised = new.binary_search(&block).is_ok();
            let before = chunk.dirty.insert(block, DirtyBlock { data, crc: crcs[index], promised });
            match before {
                Some(before) if before.promised => {
                    chunk.dirty.get_mut(&block).expect("it was just put there").promised = true;
                }
                Some(_) => {}
                None => self.dirty_blocks.set(self.dirty_blocks.get() + 1),
            }
        }
        Ok(chunk.dirty.len() == self.config.chunk_blocks as usize)
    }

    /// Reads blocks of a chunk. Blocks that were never written read as zeros.
    pub async fn read(&self, key: ChunkKey, first: u32, count: u32) -> Result<Blocks, ChunkError> {
        self.check_blocks(key, first, count as usize)?;
        let _lock = self.chunk_locks.shared(key).await;
        let chunk = self.chunk(key).await?;
        self.count(|counts| counts.read_blocks += u64::from(count));
        self.fetch(&chunk, first, count, IO).await
    }

    /// Reads blocks of a chunk from memory and volume. Call under the chunk's lock.
    pub(crate) async fn fetch(
        &self,
        chunk: &RefCell<Chunk>,
        first: u32,
        count: u32,
        io: Io,
    ) -> Result<Blocks, ChunkError> {
        let plan = plan_read(&chunk.borrow(), first, count);
        let reads = plan.into_iter().map(|piece| async {
            Ok::<_, ChunkError>(match piece {
                Piece::Memory(blocks) => blocks,
                Piece::Volume(block, count) => self.volume.read(block, count, io).await?,
            })
        });
        let mut whole = Blocks::default();
        for piece in futures_util::future::join_all(reads).await {
            let piece = piece?;
            whole.parts.extend(piece.parts);
            whole.crcs.extend(piece.crcs);
        }
        Ok(whole)
    }

    /// Makes the target's background tasks end.
    pub fn stop(&self) {
        self.closed.set(true);
        self.idle_noted.notify_one();
    }
}

enum Piece {
    Memory(Blocks),
    Volume(u64, u64),
}

fn plan_read(chunk: &Chunk, first: u32, count: u32) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut zeros = None;
    let (mut at, end) = (first, first + count);
    while at < end {
        let dirty = chunk.dirty.range(at..end).next();
        if let Some((_, block)) = dirty.filter(|(block, _)| **block == at) {
            push_memory(&mut pieces, block.data.clone(), block.crc);
            at += 1;
            continue;
        }
        let until = dirty.map_or(end, |(block, _)| *block);
        let (place, run) = chunk.run_at(at, until);
        match (place, pieces.last_mut()) {
            (Some(place), Some(Piece::Volume(start, count))) if *start + *count == place => {
                *count += u64::from(run);
            }
            (Some(place), _) => pieces.push(Piece::Volume(place, run.into())),
            (None, _) => {
                let zero = zeros.get_or_insert_with(|| Buf::zeroed(BLOCK_BYTES));
                (0..run).for_each(|_| push_memory(&mut pieces, zero.clone(), ZERO_BLOCK_CRC));
            }
        }
        at += run;
    }
    pieces
}

fn push_memory(pieces: &mut Vec<Piece>, data: Buf, crc: u32) {
    match pieces.last_mut() {
        Some(Piece::Memory(blocks)) => {
            blocks.parts.push(data);
            blocks.crcs.push(crc);
        }
        _ => pieces.push(Piece::Memory(Blocks { parts: vec![data], crcs: vec![crc] })),
    }
}

async fn load_space(volume: &Volume, kv: &dyn Kv) -> Result<Space, ChunkError> {
    let mut space = Space::new(volume.blocks(), volume.stripe_blocks());
    for_each(kv, all_groups(), |key, value| {
        // A row outside the volume's groups describes no block; a check reports it.
        let Some(group) = decode_group_key(key).filter(|group| *group < space.groups()) else {
            return Ok(());
        };
        match decode_group(value, Space::group_words()) {
            Ok(words) => space.load_group(group, &words),
            Err(error) => {
                tracing::error!(group, %error, "an allocation group cannot be read: all of it counts as used until `penstock fs check --repair`");
                space.load_group(group, &vec![u64::MAX; Space::group_words()]);
            }
        }
        Ok::<_, ChunkError>(())
    })
    .await?;
    Ok(space)
}
