//! Writes dirty blocks back from the target's memory to the volume.
//!
//! A fully dirty chunk is written as full unwritten stripes, past the log. A chunk that is largely dirty and
//! has no hole is too, after the rest of it has been read. Everything else goes through the log: to the
//! blocks' existing volume blocks, or to small new extents if they have none.

use crate::ChunkError;
use crate::chunk::{Chunk, DirtyBlock};
use crate::rows::{ChunkKey, Extent};
use crate::space::Run;
use crate::target::Target;
use penstock_base::{BLOCK_BYTES, Kind, buf::gather};
use penstock_drive::{Class, Io};
use std::cell::RefCell;
use std::rc::Rc;

const IO: Io = Io::new(Class::Client, "fresh.strip");
const REWRITE: Io = Io::new(Class::Client, "chunk.rewrite");
/// A chunk is rewritten as full stripes if at least one block in this many is dirty. Through the log, each
/// block is written about 18 times: in its record and, with parity and trailers, in its destage record, each
/// on every carrier, and then in place. A full chunk is read once and written one and a half times.
const REWRITE_PART: u32 = 8;
/// The rewrite also needs one block in this many of the volume to be free.
const ROOMY_PART: u64 = 8;
/// Most blocks in one write through the log.
const RUN_BLOCKS: usize = 128;

impl Target {
    /// Writes back the dirty blocks of a chunk.
    pub(crate) async fn place(&self, key: ChunkKey) -> Result<(), ChunkError> {
        let _lock = self.chunk_locks.exclusive(key).await;
        let chunk = self.chunks.borrow().get(&key).cloned();
        match chunk {
            Some(chunk) => self.place_locked(key, &chunk).await,
            None => Ok(()),
        }
    }

    /// Writes a chunk back when the number of concurrent write-backs permits. After a failure the blocks stay
    /// dirty; the next commit tries again and returns the error.
    pub(crate) async fn place_in_turn(self: Rc<Self>, key: ChunkKey) {
        let Ok(_turn) = self.placing.acquire().await else { return };
        if let Err(error) = self.place(key).await {
            tracing::warn!(%error, "a chunk could not be written back; the next commit tries again");
        }
    }

    async fn place_locked(&self, key: ChunkKey, chunk: &RefCell<Chunk>) -> Result<(), ChunkError> {
        if chunk.borrow().dirty.is_empty() {
            return Ok(());
        }
        let whole = chunk.borrow().dirty.len() == self.config.chunk_blocks as usize;
        if whole || self.is_worth_rewriting(&chunk.borrow()) {
            if self.place_whole(key, chunk).await? {
                self.count(|counts| {
                    counts.whole_chunks += 1;
                    counts.rewritten_chunks += u64::from(!whole);
                });
                return Ok(());
            }
            self.count(|counts| counts.logged_chunks += u64::from(whole));
        }
        // One run at a time, so that the blocks not written yet stay dirty after a failure.
        loop {
            let run = first_run(&chunk.borrow());
            let Some((first, blocks)) = run else { break };
            self.place_run(key, chunk, first, &blocks).await?;
        }
        Ok(())
    }

    /// True if it is cheaper to rewrite the chunk as full stripes than to write its dirty blocks. The chunk
    /// must have no holes and the volume must have free space, because the old stripes are free only after
    /// the next commit.
    fn is_worth_rewriting(&self, chunk: &Chunk) -> bool {
        let usage = self.space.borrow().usage();
        chunk.dirty.len() as u32 >= self.config.chunk_blocks / REWRITE_PART
            && usage.free_blocks >= usage.total_blocks / ROOMY_PART
            && chunk.covers(self.config.chunk_blocks)
    }

    /// Drops the dirty blocks of a range after they have been written back. Returns the number dropped.
    fn placed(&self, key: ChunkKey, chunk: &RefCell<Chunk>, first: u32, count: usize) -> u64 {
        let mut chunk = chunk.borrow_mut();
        let (mut removed, mut promised) = (0, 0);
        for block in first..first + count as u32 {
            if let Some(block) = chunk.dirty.remove(&block) {
                removed += 1;
                promised += u64::from(block.promised);
            }
        }
        self.space.borrow_mut().unpromise(promised);
        self.dirty_blocks.set(self.dirty_blocks.get() - removed);
        if chunk.dirty.is_empty() {
            let waited = self.waiting.borrow_mut().remove(&chunk.since);
            assert_eq!(waited, Some(key), "a chunk waits once");
        }
        removed
    }

    /// Writes a chunk as full stripes; blocks that are not dirty are read first. Returns false, and does
    /// nothing, if too few stripes are free or some of the chunk cannot be read.
    async fn place_whole(&self, key: ChunkKey, chunk: &RefCell<Chunk>) -> Result<bool, ChunkError> {
        let per_stripe = self.volume.stripe_blocks();
        let wanted = u64::from(self.config.chunk_blocks) / per_stripe;
        let promised = chunk.borrow().dirty.values().filter(|block| block.promised).count() as u64;
        if !self.space.borrow().has_beside_promises(wanted * per_stripe, promised) {
            return Ok(false);
        }
        let blocks = match self.fetch(chunk, 0, self.config.chunk_blocks, REWRITE).await {
            Err(error) if error.kind() == Kind::Corrupt => return Ok(false),
            blocks => blocks?,
        };
        let runs = |stripes: &[u64]| stripes.iter().map(|stripe| (stripe * per_stripe, per_stripe)).collect();
        let mut stripes = Vec::new();
        while (stripes.len() as u64) < wanted {
            // Others may have taken stripes during the read.
            match self.take_empty_stripe(promised).await {
                Ok(Some(stripe)) => stripes.push(stripe),
                other => {
                    self.give_back(runs(&stripes));
                    return other.map(|_| false);
                }
            }
        }
        let data = blocks.gather();
        let bytes = per_stripe as usize * BLOCK_BYTES;
        for (index, crcs) in blocks.crcs.chunks(per_stripe as usize).enumerate() {
            let part = data.slice(index * bytes..(index + 1) * bytes);
            if let Err(error) = self.volume.write_fresh(stripes[index], &part, crcs, IO).await {
                self.give_back(runs(&stripes));
                return Err(error.into());
            }
        }
        let mut back = Vec::new();
        for (index, stripe) in stripes.into_iter().enumerate() {
            let first = index as u32 * per_stripe as u32;
            let block = stripe * per_stripe;
            let extent = Extent { first, count: per_stripe as u32, block, reserved: false };
            back.extend(chunk.borrow_mut().put(extent));
        }
        self.placed(key, chunk, 0, self.config.chunk_blocks as usize);
        self.give_back(back);
        Ok(true)
    }

    /// Writes back a run of blocks, in parts. If a part fails, the parts before it are clean.
    async fn place_run(
        &self,
        key: ChunkKey,
        chunk: &RefCell<Chunk>,
        first: u32,
        blocks: &[DirtyBlock],
    ) -> Result<(), ChunkError> {
        let data = gather(&blocks.iter().map(|block| block.data.clone()).collect::<Vec<_>>());
        let crcs: Vec<u32> = blocks.iter().map(|block| block.crc).collect();
        let mut done = 0;
        while done < blocks.len() {
            let at = first + done as u32;
            let (place, count, kind) = self.place_of(chunk, at, blocks.len() - done).await?;
            let bytes = done * BLOCK_BYTES..(done + count) * BLOCK_BYTES;
            let written = self.volume.write(place, &data.slice(bytes), &crcs[done..done + count]).await;
            if let Err(error) = written {
                if kind == Place::New {
                    self.space.borrow_mut().free((place, count as u64));
                }
                return Err(error.into());
            }
            // Not before the write: a commit of the file may take the map at any time, and all it takes must
            // be written.
            let end = at + count as u32;
            match kind {
                Place::Data => {}
                Place::Reserved => chunk.borrow_mut().set_reserved(at..end, false),
                Place::New => {
                    let new = Extent { first: at, count: end - at, block: place, reserved: false };
                    let back = chunk.borrow_mut().put(new);
                    self.give_back(back);
                }
            }
            let placed = self.placed(key, chunk, at, count);
            assert_eq!(placed, count as u64, "the chunk is locked since they were found there");
            done += count;
        }
        Ok(())
    }

    /// Returns the volume block of a run, the number of blocks that fit there, and the kind of place. Blocks
    /// in a stripe that cannot be read get new volume blocks: changing one strip of it would require reading
    /// others.
    async fn place_of(
        &self,
        chunk: &RefCell<Chunk>,
        first: u32,
        wanted: usize,
    ) -> Result<(u64, usize, Place), ChunkError> {
        let unmapped = {
            let chunk = chunk.borrow();
            let per_stripe = self.volume.stripe_blocks();
            let readable = |(place, _): &(u64, bool)| !self.volume.is_unreadable(place / per_stripe);
            let usable = |at: u32| chunk.place(at).filter(readable);
            if let Some((place, reserved)) = usable(first) {
                let joined =
                    |count: &usize| usable(first + *count as u32) == Some((place + *count as u64, reserved));
                let kind = if reserved { Place::Reserved } else { Place::Data };
                return Ok((place, (0..wanted).take_while(joined).count(), kind));
            }
            (0..wanted).take_while(|count| usable(first + *count as u32).is_none()).count() as u64
        };
        let (block, count) = self.allocate_promised(unmapped).await?;
        Ok((block, count as usize, Place::New))
    }

    /// Allocates one run of up to `wanted` blocks. The caller has reserved them, so they are free or in a
    /// discard.
    pub(crate) async fn allocate_promised(&self, wanted: u64) -> Result<Run, ChunkError> {
        let readable = |stripe: u64| !self.volume.is_unreadable(stripe);
        let mut run = self.space.borrow_mut().allocate(wanted, readable);
        if run.is_none() {
            // The missing blocks are in a running discard.
            let _no_discard = self.discarding.lock().await;
            run = self.space.borrow_mut().allocate(wanted, readable);
        }
        run.ok_or(ChunkError::NoSpace { free_blocks: 0, wanted_blocks: wanted })
    }
}

/// State of the volume blocks that a run is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The map has them, with older data of the same blocks.
    Data,
    /// The map has them as preallocated.
    Reserved,
    /// Allocated and not in the map yet.
    New,
}

/// Returns the first run of adjacent dirty blocks: its first block and at most [`RUN_BLOCKS`] blocks.
fn first_run(chunk: &Chunk) -> Option<(u32, Vec<DirtyBlock>)> {
    let first = *chunk.dirty.first_key_value()?.0;
    let blocks = chunk.dirty.iter().zip(first..).take_while(|((block, _), expected)| *block == expected);
    Some((first, blocks.take(RUN_BLOCKS).map(|((_, dirty), _)| dirty.clone()).collect()))
}
