//! Placing: from the target's memory onto the volume.
//!
//! A chunk that is wholly dirty goes to whole unwritten stripes, past the log; everything else goes through the log,
//! in place where the blocks have a place and to small extents where they have none.

use crate::ChunkError;
use crate::chunk::{Chunk, DirtyBlock};
use crate::rows::{ChunkKey, Extent};
use crate::target::Target;
use penstock_array::Discard;
use penstock_base::{BLOCK_BYTES, Buf, buf::gather};
use penstock_drive::{Class, Io};
use std::cell::RefCell;
use std::rc::Rc;

const IO: Io = Io::new(Class::Client, "fresh.strip");
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
        if whole {
            if self.place_whole(key, chunk).await? {
                self.count(|counts| counts.whole_chunks += 1);
                return Ok(());
            }
            self.count(|counts| counts.logged_chunks += 1);
        }
        // Taken piece by piece, so that what a failure leaves behind still waits.
        loop {
            let run = first_run(&chunk.borrow());
            let Some((first, blocks)) = run else { break };
            self.place_run(chunk, first, &blocks).await?;
            self.placed(key, chunk, first, blocks.len());
        }
        Ok(())
    }

    /// Forgets blocks that are placed now.
    fn placed(&self, key: ChunkKey, chunk: &RefCell<Chunk>, first: u32, count: usize) {
        let mut chunk = chunk.borrow_mut();
        for block in first..first + count as u32 {
            let removed = chunk.dirty.remove(&block).expect("the chunk is locked since it was found there");
            if removed.promised {
                self.space.borrow_mut().unpromise(1);
            }
        }
        self.dirty_blocks.set(self.dirty_blocks.get() - count as u64);
        if chunk.dirty.is_empty() {
            let waited = self.waiting.borrow_mut().remove(&chunk.since);
            assert_eq!(waited, Some(key), "a chunk waits once");
        }
    }

    /// Writes a whole chunk as stripes. Returns false, and does nothing, when too few are free.
    async fn place_whole(&self, key: ChunkKey, chunk: &RefCell<Chunk>) -> Result<bool, ChunkError> {
        let per_stripe = self.volume.stripe_blocks();
        let wanted = u64::from(self.config.chunk_blocks) / per_stripe;
        let promised = chunk.borrow().dirty.values().filter(|block| block.promised).count() as u64;
        let mut stripes = Vec::new();
        if self.space.borrow().usage().free_blocks + promised < wanted * per_stripe {
            return Ok(false);
        }
        while (stripes.len() as u64) < wanted {
            let unwritten = |stripe| self.volume.is_unwritten(stripe);
            let found = self.space.borrow_mut().allocate_stripe(unwritten);
            match found {
                Some(stripe) => stripes.push(stripe),
                None if self.discard_some(Discard::InTable).await? > 0 => {}
                None => {
                    self.give_back(stripes.iter().map(|stripe| (stripe * per_stripe, per_stripe)).collect());
                    return Ok(false);
                }
            }
        }
        let blocks: Vec<(Buf, u32)> =
            chunk.borrow().dirty.values().map(|b| (b.data.clone(), b.crc)).collect();
        for (stripe, part) in stripes.iter().zip(blocks.chunks(per_stripe as usize)) {
            let data = gather(&part.iter().map(|(data, _)| data.clone()).collect::<Vec<_>>());
            let crcs: Vec<u32> = part.iter().map(|(_, crc)| *crc).collect();
            if let Err(error) = self.volume.write_fresh(*stripe, &data, &crcs, IO).await {
                let taken = stripes.iter().map(|stripe| (stripe * per_stripe, per_stripe)).collect();
                self.give_back(taken);
                return Err(error.into());
            }
        }
        let mut back = Vec::new();
        for (index, stripe) in stripes.into_iter().enumerate() {
            let first = index as u32 * per_stripe as u32;
            let extent = Extent { first, count: per_stripe as u32, block: stripe * per_stripe };
            back.extend(chunk.borrow_mut().put(extent));
        }
        self.placed(key, chunk, 0, self.config.chunk_blocks as usize);
        self.give_back(back);
        Ok(true)
    }

    async fn place_run(
        &self,
        chunk: &RefCell<Chunk>,
        first: u32,
        blocks: &[DirtyBlock],
    ) -> Result<(), ChunkError> {
        let data = gather(&blocks.iter().map(|block| block.data.clone()).collect::<Vec<_>>());
        let crcs: Vec<u32> = blocks.iter().map(|block| block.crc).collect();
        let mut done = 0;
        while done < blocks.len() {
            let at = first + done as u32;
            let (place, count, is_new) = self.place_of(chunk, at, blocks.len() - done).await?;
            let bytes = done * BLOCK_BYTES..(done + count) * BLOCK_BYTES;
            let written = self.volume.write(place, &data.slice(bytes), &crcs[done..done + count]).await;
            if let Err(error) = written {
                if is_new {
                    self.space.borrow_mut().free((place, count as u64));
                }
                return Err(error.into());
            }
            if is_new {
                // Only now: a commit of the file may take the map at any time, and what it takes must be written.
                let back = chunk.borrow_mut().put(Extent { first: at, count: count as u32, block: place });
                self.give_back(back);
            }
            done += count;
        }
        Ok(())
    }

    /// Where a run of blocks goes: its place in the map, or (true) allocated blocks that are not in the map yet. Blocks
    /// in a stripe that cannot be read get another place: one strip of it could not be changed without reading others.
    async fn place_of(
        &self,
        chunk: &RefCell<Chunk>,
        first: u32,
        wanted: usize,
    ) -> Result<(u64, usize, bool), ChunkError> {
        let readable = |stripe: u64| !self.volume.is_unreadable(stripe);
        let unmapped = {
            let chunk = chunk.borrow();
            let per_stripe = self.volume.stripe_blocks();
            let usable = |at: u32| chunk.lookup(at).filter(|place| readable(place / per_stripe));
            if let Some(place) = usable(first) {
                let joined = |count: &usize| usable(first + *count as u32) == Some(place + *count as u64);
                return Ok((place, (0..wanted).take_while(joined).count(), false));
            }
            (0..wanted).take_while(|count| usable(first + *count as u32).is_none()).count() as u64
        };
        let mut run = self.space.borrow_mut().allocate(unmapped, readable);
        if run.is_none() {
            // Free blocks were promised; what is not here now is out in a discard.
            let _no_discard = self.discarding.lock().await;
            run = self.space.borrow_mut().allocate(unmapped, readable);
        }
        let (block, count) = run.ok_or(ChunkError::NoSpace { free_blocks: 0, wanted_blocks: unmapped })?;
        Ok((block, count as usize, true))
    }
}

/// The first run of adjacent dirty blocks.
fn first_run(chunk: &Chunk) -> Option<(u32, Vec<DirtyBlock>)> {
    let first = *chunk.dirty.first_key_value()?.0;
    let blocks = chunk.dirty.iter().zip(first..).take_while(|((block, _), expected)| *block == expected);
    Some((first, blocks.take(RUN_BLOCKS).map(|((_, dirty), _)| dirty.clone()).collect()))
}
