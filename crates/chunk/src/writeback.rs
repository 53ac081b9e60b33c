//! Write-back of dirty blocks from the target's memory to the volume.
//!
//! A fully dirty chunk is written as full unwritten stripes, past the log. A chunk that is largely dirty and
//! has no hole is too, after the rest of it has been read. Everything else goes through the log: to the
//! blocks' existing volume blocks, or to small new extents if they have none.
//!
//! Invariant: the map names a new place only after the write to it returned, because a commit of the file may
//! take the map at any time, and everything in it must be written.

use crate::ChunkError;
use crate::allocator::{Allocator, Source};
use crate::cache::{Chunk, ChunkCache};
use crate::counters::TargetCounts;
use crate::fetch::fetch;
use crate::rows::{ChunkKey, Extent, is_copy};
use crate::volumes::Volumes;
use penstock_base::num::{to_u32, to_usize};
use penstock_base::{BLOCK_BYTES, Birth, Buf, ErrorKind, buf::gather};
use penstock_drive::{Class, Io};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use tokio::sync::Semaphore;

const IO: Io = Io::new(Class::Client, "chunk.write");
const REWRITE: Io = Io::new(Class::Client, "chunk.rewrite");
/// A chunk is rewritten as full stripes if at least one block in this many is dirty. Through the log, each
/// block is written about 18 times: in its record and, with parity and trailers, in its destage record, each
/// on every carrier, and then in place. A full chunk is read once and written one and a half times.
const REWRITE_PART: u32 = 8;
/// The rewrite also needs one block in this many of the volume to be free.
const ROOMY_PART: u64 = 8;
/// Most blocks in one write through the log.
const RUN_BLOCKS: u32 = 128;

/// Full chunks that are written back at the same time: enough that one is encoded while others are being
/// written.
const FULL_IN_FLIGHT: usize = 4;

/// The write-back of one target.
pub(crate) struct Writeback {
    volumes: Rc<Volumes>,
    cache: Rc<ChunkCache>,
    allocator: Rc<Allocator>,
    chunk_blocks: u32,
    in_flight: Semaphore,
    counts: Cell<TargetCounts>,
}

impl Writeback {
    pub(crate) fn new(
        volumes: &Rc<Volumes>,
        cache: &Rc<ChunkCache>,
        allocator: &Rc<Allocator>,
        chunk_blocks: u32,
    ) -> Rc<Self> {
        Rc::new(Self {
            volumes: volumes.clone(),
            cache: cache.clone(),
            allocator: allocator.clone(),
            chunk_blocks,
            in_flight: Semaphore::new(FULL_IN_FLIGHT),
            counts: Cell::default(),
        })
    }

    /// Counters of chunks that were written back.
    pub(crate) fn counts(&self) -> TargetCounts {
        self.counts.get()
    }

    fn count(&self, change: impl FnOnce(&mut TargetCounts)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    /// Writes back the dirty blocks of a chunk.
    pub(crate) async fn write_chunk(&self, key: ChunkKey) -> Result<(), ChunkError> {
        let _lock = self.cache.exclusive(key).await;
        match self.cache.peek(key) {
            Some(chunk) => self.write_locked(key, &chunk).await,
            None => Ok(()),
        }
    }

    /// Writes a chunk back when the number of concurrent write-backs permits. After a failure the blocks stay
    /// dirty; the next commit tries again and returns the error.
    pub(crate) async fn write_in_turn(self: Rc<Self>, key: ChunkKey) {
        let Ok(_turn) = self.in_flight.acquire().await else { return };
        if let Err(error) = self.write_chunk(key).await {
            tracing::warn!(%error, "a chunk could not be written back; the next commit tries again");
        }
    }

    async fn write_locked(&self, key: ChunkKey, chunk: &RefCell<Chunk>) -> Result<(), ChunkError> {
        if chunk.borrow().dirty().is_empty() {
            return Ok(());
        }
        let is_full = chunk.borrow().dirty().blocks() == self.chunk_blocks;
        if is_full || self.is_worth_rewriting(&chunk.borrow()) {
            if self.write_stripes(key, chunk).await? {
                self.count(|counts| {
                    counts.whole_chunks += 1;
                    counts.rewritten_chunks += u64::from(!is_full);
                });
                return Ok(());
            }
            self.count(|counts| counts.logged_chunks += u64::from(is_full));
        }
        // One run at a time, so that the blocks not written yet stay dirty after a failure.
        loop {
            let run = chunk.borrow().dirty().first(RUN_BLOCKS);
            let Some((first, parts, crcs)) = run else { return Ok(()) };
            self.write_run(key, chunk, first, &gather(&parts), &crcs).await?;
        }
    }

    /// True if it is cheaper to rewrite the chunk as full stripes than to write its dirty blocks. The chunk
    /// must have no holes and the volume must have free space, because the old stripes are free only after
    /// the next commit.
    fn is_worth_rewriting(&self, chunk: &Chunk) -> bool {
        let usage = self.allocator.space().usage();
        chunk.dirty().blocks() >= self.chunk_blocks / REWRITE_PART
            && usage.free_blocks >= usage.total_blocks / ROOMY_PART
            && chunk.covers(self.chunk_blocks)
    }

    /// Blocks of a chunk are written back: they are clean, and their reservations end.
    fn written(&self, key: ChunkKey, chunk: &RefCell<Chunk>, blocks: std::ops::Range<u32>) -> u64 {
        let dropped = self.cache.drop_dirty(key, chunk, blocks);
        self.allocator.release(dropped.reserved);
        dropped.blocks
    }

    /// Writes a chunk as full stripes; blocks that are not dirty are read first. Returns false, and does
    /// nothing, if too few stripes are free or some of the chunk cannot be read.
    async fn write_stripes(&self, key: ChunkKey, chunk: &RefCell<Chunk>) -> Result<bool, ChunkError> {
        let per_stripe = self.volumes.stripe_blocks();
        let wanted = u64::from(self.chunk_blocks) / per_stripe;
        let mine = chunk.borrow().dirty().reserved();
        if !self.allocator.has_beside_reservations(wanted * per_stripe, mine) {
            return Ok(false);
        }
        let io = chunk.borrow().writes_back();
        let blocks = match fetch(&self.volumes, chunk, 0, self.chunk_blocks, REWRITE.within(io)).await {
            Err(ChunkError::LenderAway { .. }) => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(false),
            blocks => blocks?,
        };
        let runs = |stripes: &[u64]| stripes.iter().map(|stripe| (stripe * per_stripe, per_stripe)).collect();
        let mut stripes = Vec::new();
        while (stripes.len() as u64) < wanted {
            // Others may have taken stripes during the read.
            match self.allocator.take_empty_stripe(mine, source_of(key)).await {
                Ok(Some(stripe)) => stripes.push(stripe),
                other => {
                    self.allocator.give_back_uncommitted(runs(&stripes));
                    return other.map(|_| false);
                }
            }
        }
        assert_eq!(blocks.crcs.len() as u64, wanted * per_stripe, "a chunk is full stripes");
        let data = blocks.gather();
        let bytes = to_usize(per_stripe) * BLOCK_BYTES;
        for (index, crcs) in blocks.crcs.chunks(to_usize(per_stripe)).enumerate() {
            let part = data.slice(index * bytes..(index + 1) * bytes);
            let written =
                self.volumes.write_fresh(key.file, stripes[index], &part, crcs, IO.within(io)).await;
            if let Err(error) = written {
                self.allocator.give_back_uncommitted(runs(&stripes));
                return Err(error);
            }
        }
        let mut back = Vec::new();
        for (index, stripe) in stripes.into_iter().enumerate() {
            let first = to_u32(index) * to_u32(per_stripe);
            let block = stripe * per_stripe;
            let extent =
                Extent { first, count: to_u32(per_stripe), block, preallocated: false, birth: Birth::FIRST };
            back.extend(chunk.borrow_mut().change(|map| map.put(extent)));
        }
        self.written(key, chunk, 0..self.chunk_blocks);
        self.allocator.give_back_uncommitted(back);
        Ok(true)
    }

    /// Writes back a run of blocks, in parts. If a part fails, the parts before it are clean.
    async fn write_run(
        &self,
        key: ChunkKey,
        chunk: &RefCell<Chunk>,
        first: u32,
        data: &Buf,
        crcs: &[u32],
    ) -> Result<(), ChunkError> {
        let mut done = 0;
        while done < crcs.len() {
            let at = first + to_u32(done);
            let (block, count, place) = self.place_of(key, chunk, at, crcs.len() - done).await?;
            let bytes = done * BLOCK_BYTES..(done + count) * BLOCK_BYTES;
            let written =
                self.volumes.write(key.file, block, &data.slice(bytes), &crcs[done..done + count]).await;
            if let Err(error) = written {
                if place == Place::New {
                    self.allocator.give_back_uncommitted(vec![(block, count as u64)]);
                }
                return Err(error);
            }
            let end = at + to_u32(count);
            match place {
                Place::Data => {}
                Place::Preallocated => chunk.borrow_mut().change(|map| map.set_preallocated(at..end, false)),
                Place::New => {
                    let new = Extent {
                        first: at,
                        count: end - at,
                        block,
                        preallocated: false,
                        birth: Birth::FIRST,
                    };
                    let back = chunk.borrow_mut().change(|map| map.put(new));
                    self.allocator.give_back_uncommitted(back);
                }
            }
            let written = self.written(key, chunk, at..end);
            assert_eq!(written, count as u64, "the chunk has been locked since they were found there");
            done += count;
        }
        Ok(())
    }

    /// Returns the volume block of a run, the number of blocks that fit there, and the kind of place. Blocks
    /// in a stripe that cannot be read get new volume blocks: changing one strip of it would require reading
    /// others.
    async fn place_of(
        &self,
        key: ChunkKey,
        chunk: &RefCell<Chunk>,
        first: u32,
        wanted: usize,
    ) -> Result<(u64, usize, Place), ChunkError> {
        let per_stripe = self.volumes.stripe_blocks();
        if self.volumes.lacks_too_much() {
            let places = (0..wanted).filter_map(|at| chunk.borrow().map().place(first + to_u32(at)));
            let stripes: BTreeSet<u64> = places.map(|(place, _)| place / per_stripe).collect();
            for stripe in stripes {
                self.volumes.look_at(stripe).await?;
            }
        }
        let unmapped = {
            let chunk = chunk.borrow();
            let readable =
                |(place, _): &(u64, bool)| self.volumes.knows_unreadable(place / per_stripe) != Some(true);
            let usable = |at: u32| chunk.map().place(at).filter(readable);
            if let Some((block, preallocated)) = usable(first) {
                let joined = |count: &usize| {
                    usable(first + to_u32(*count)) == Some((block + *count as u64, preallocated))
                };
                let kind = if preallocated { Place::Preallocated } else { Place::Data };
                return Ok((block, (0..wanted).take_while(joined).count(), kind));
            }
            (0..wanted).take_while(|count| usable(first + to_u32(*count)).is_none()).count() as u64
        };
        assert!(unmapped > 0, "the first block has no place");
        let (block, count) = self.allocator.allocate_reserved(unmapped, source_of(key)).await?;
        Ok((block, to_usize(count), Place::New))
    }
}

/// The stripes that blocks of a chunk may come from. A copy of the map is read back from the volume that its
/// anchor is on.
fn source_of(key: ChunkKey) -> Source {
    if is_copy(key.file.ino) { Source::Own } else { Source::Any }
}

/// State of the volume blocks that a run is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The map has them, with older data of the same blocks.
    Data,
    /// The map has them as preallocated.
    Preallocated,
    /// Allocated and not in the map yet.
    New,
}
