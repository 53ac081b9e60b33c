//! Placing: from the target's memory onto the volume.
//!
//! A chunk that is wholly dirty goes to whole unwritten stripes, past the log; so does one of which much is dirty and
//! nothing is a hole, with the rest of it read. Everything else goes through the log, in place where the blocks have a
//! place and to small extents where they have none.

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
/// A chunk of which this part waits is written again as a whole. Through the log each block is written about 18 times
/// (its record and, with parity and trailers, its destage, each on every carrier, and then in place); a whole chunk
/// is read once and written one and a half times.
const REWRITE_PART: u32 = 8;
/// ... while this part of the volume is free.
const ROOMY_PART: u64 = 8;
/// Most blocks in one write through the log.
const RUN_BLOCKS: usize = 128;

impl Target {
    /// Places the blocks of a chunk that wait in memory.
    pub(crate) async fn place(&self, key: ChunkKey) -> Result<(), ChunkError> {
        let _lock = self.chunk_locks.exclusive(key).await;
        let chunk = self.chunks.borrow().get(&key).cloned();
        match chunk {
            Some(chunk) => self.place_locked(key, &chunk).await,
            None => Ok(()),
        }
    }

    /// Places a chunk when it is its turn. What fails here still waits: the next commit tries again and tells.
    pub(crate) async fn place_in_turn(self: Rc<Self>, key: ChunkKey) {
        let Ok(_turn) = self.placing.acquire().await else { return };
        if let Err(error) = self.place(key).await {
            tracing::warn!(%error, "a chunk could not be placed; the next commit tries again");
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
        // Taken piece by piece, so that what a failure leaves behind still waits.
        loop {
            let run = first_run(&chunk.borrow());
            let Some((first, blocks)) = run else { break };
            self.place_run(key, chunk, first, &blocks).await?;
        }
        Ok(())
    }

    /// Whether a chunk is better written again as a whole than block by block. It must have no holes, and there must be
    /// room: the old stripes are free only after the next commit.
    fn is_worth_rewriting(&self, chunk: &Chunk) -> bool {
        let usage = self.space.borrow().usage();
        chunk.dirty.len() as u32 >= self.config.chunk_blocks / REWRITE_PART
            && usage.free_blocks >= usage.total_blocks / ROOMY_PART
            && chunk.covers(self.config.chunk_blocks)
    }

    /// Forgets those of a range of blocks that waited: they are placed now. Returns how many.
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

    /// Writes a whole chunk as stripes, with what was placed before read again. Returns false, and does nothing, when
    /// too few stripes are free or some of it cannot be read.
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
            // Others may have taken some since.
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

    /// Places a run of blocks, in parts. Those before one that fails do not wait any more.
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
            // Only now: a commit of the file may take the map at any time, and what it takes must be written.
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

    /// Where a run of blocks goes. Blocks in a stripe that cannot be read get another place: one strip of it could not
    /// be changed without reading others.
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

    /// Allocates one run of up to `wanted` blocks, for which there is free space.
    pub(crate) async fn allocate_promised(&self, wanted: u64) -> Result<Run, ChunkError> {
        let readable = |stripe: u64| !self.volume.is_unreadable(stripe);
        let mut run = self.space.borrow_mut().allocate(wanted, readable);
        if run.is_none() {
            // What is not here now is out in a discard.
            let _no_discard = self.discarding.lock().await;
            run = self.space.borrow_mut().allocate(wanted, readable);
        }
        run.ok_or(ChunkError::NoSpace { free_blocks: 0, wanted_blocks: wanted })
    }
}

/// What is known of the place that blocks go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The map has it, with older data of the same blocks.
    Data,
    /// The map has it as reserved.
    Reserved,
    /// Allocated and not in the map yet.
    New,
}

/// The first run of adjacent dirty blocks.
fn first_run(chunk: &Chunk) -> Option<(u32, Vec<DirtyBlock>)> {
    let first = *chunk.dirty.first_key_value()?.0;
    let blocks = chunk.dirty.iter().zip(first..).take_while(|((block, _), expected)| *block == expected);
    Some((first, blocks.take(RUN_BLOCKS).map(|((_, dirty), _)| dirty.clone()).collect()))
}
