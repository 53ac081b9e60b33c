//! Volumes: a range of an array's stripes as a block address space of verified 4 KiB blocks.
//!
//! Contract:
//! - `write` of up to 512 KiB within the log's record bound is atomic; it returns when the array's memory holds it
//!   in order, and is durable after a later `flush`;
//! - after a crash, the blocks written through `write` are a prefix of the calls, so a barrier needs no work;
//! - `write_fresh` writes a whole stripe that is unwritten, past the log; it counts after a later `flush`, and a
//!   crash before that leaves the stripe unwritten;
//! - `read` returns blocks that verified, with their CRC32C, or an error; unwritten stripes read as zeros.

use crate::engine::{Array, PendingFresh};
use crate::error::ArrayError;
use crate::format::record::Entry;
use crate::member::WhenSuspended;
use crate::overlay::DirtyBlock;
use crate::strip::{Erased, Part};
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, Version, ZERO_BLOCK_CRC};
use penstock_drive::{Class, Io};
use std::ops::Range;
use std::rc::Rc;

/// Verified blocks, in order.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    /// Their bytes, in runs of whole blocks.
    pub parts: Vec<Buf>,
    /// CRC32C of each block.
    pub crcs: Vec<u32>,
}

impl Blocks {
    fn push(&mut self, data: Buf, crc: u32) {
        match self.parts.last().and_then(|last| last.try_join(&data)) {
            Some(joined) => *self.parts.last_mut().expect("there is a last part") = joined,
            None => self.parts.push(data),
        }
        self.crcs.push(crc);
    }

    /// The bytes in one run; copied if they are not in one already.
    pub fn gather(&self) -> Buf {
        penstock_base::buf::gather(&self.parts)
    }
}

/// How far a discard goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// The table only: the stripes are written again at once.
    InTable,
    /// The drives hear of it as well.
    OnDrives,
}

/// A range of an array's stripes.
#[derive(Clone)]
pub struct Volume {
    array: Rc<Array>,
    stripes: Range<u64>,
}

impl Volume {
    /// The whole array as one volume.
    pub fn whole(array: &Rc<Array>) -> Self {
        Self { array: array.clone(), stripes: 0..array.geo.stripes }
    }

    /// The array below.
    pub fn array(&self) -> &Rc<Array> {
        &self.array
    }

    /// Blocks in the volume.
    pub fn blocks(&self) -> u64 {
        (self.stripes.end - self.stripes.start) * self.stripe_blocks()
    }

    /// Blocks in a stripe: the unit of `write_fresh` and `discard`.
    pub fn stripe_blocks(&self) -> u64 {
        u64::from(self.array.geo.stripe_blocks())
    }

    fn stripe(&self, stripe: u64) -> Result<u64, ArrayError> {
        let inner = self.stripes.start.checked_add(stripe).filter(|inner| self.stripes.contains(inner));
        match inner {
            Some(inner) => Ok(inner),
            None => Err(ArrayError::Invalid(format!("stripe {stripe} is beyond the volume"))),
        }
    }

    /// Pieces of a block range by stripe: (stripe of the array, first block in it, blocks).
    fn pieces(&self, block: u64, count: u64) -> Result<Vec<(u64, u32, u32)>, ArrayError> {
        if block.checked_add(count).is_none_or(|end| end > self.blocks()) {
            return Err(ArrayError::Invalid(format!("blocks {block}+{count} are beyond the volume")));
        }
        let per_stripe = self.stripe_blocks();
        let (mut at, end, mut pieces) = (block, block + count, Vec::new());
        while at < end {
            let within = at % per_stripe;
            let run = (per_stripe - within).min(end - at);
            pieces.push((self.stripes.start + at / per_stripe, within as u32, run as u32));
            at += run;
        }
        Ok(pieces)
    }

    /// Writes whole blocks through the log. `crcs` has the CRC32C of each block.
    pub async fn write(&self, block: u64, data: &Buf, crcs: &[u32]) -> Result<(), ArrayError> {
        let array = &self.array;
        array.latency.write.time(&array.env, self.write_parts(block, data, crcs)).await
    }

    async fn write_parts(&self, block: u64, data: &Buf, crcs: &[u32]) -> Result<(), ArrayError> {
        if data.len() != crcs.len() * BLOCK_BYTES {
            return Err(ArrayError::Invalid(format!("{} checksums for {} bytes", crcs.len(), data.len())));
        }
        // The whole range before the first part of it: what is refused changed nothing.
        self.pieces(block, crcs.len() as u64)?;
        let most = self.array.geo.max_payload_blocks();
        for start in (0..crcs.len()).step_by(most) {
            let range = start..crcs.len().min(start + most);
            let pieces = self.pieces(block + start as u64, range.len() as u64)?;
            self.array.wait_for_log_room().await?;
            let part = data.slice(range.start * BLOCK_BYTES..range.end * BLOCK_BYTES);
            self.array.log_data(&pieces, &part, &crcs[range]);
        }
        Ok(())
    }

    /// Writes a whole stripe that is unwritten. `crcs` has the CRC32C of each block.
    pub async fn write_fresh(&self, stripe: u64, data: &Buf, crcs: &[u32], io: Io) -> Result<(), ArrayError> {
        let stripe = self.stripe(stripe)?;
        self.array.wait_for_log_room().await?;
        if crcs.len() as u64 != self.stripe_blocks() || data.len() != crcs.len() * BLOCK_BYTES {
            return Err(ArrayError::Invalid(format!(
                "a fresh write of {} bytes is not one stripe",
                data.len()
            )));
        }
        let array = &self.array;
        array
            .latency
            .fresh
            .time(&array.env, array.write_fresh(stripe, data, crcs, io.at("fresh.strip")))
            .await
    }

    /// Reads `count` blocks from `block` on.
    pub async fn read(&self, block: u64, count: u64, io: Io) -> Result<Blocks, ArrayError> {
        let pieces = self.pieces(block, count)?;
        let reads =
            pieces.iter().map(|(stripe, first, count)| self.array.read_piece(*stripe, *first, *count, io));
        let mut whole = Blocks::default();
        for piece in self.array.latency.read.time(&self.array.env, join_all(reads)).await {
            let piece = piece?;
            whole.parts.extend(piece.parts);
            whole.crcs.extend(piece.crcs);
        }
        Ok(whole)
    }

    /// Writes made before are durable before writes made after it. The log keeps its order, so nothing is to be done.
    pub fn barrier(&self) {}

    /// Makes every write that returned before this call durable.
    pub async fn flush(&self) -> Result<(), ArrayError> {
        self.array.flush(Io::new(Class::Client, "volume.flush")).await
    }

    /// Makes whole stripes unwritten again, durably, and gives their space back to the drives where `how` says so.
    pub async fn discard(&self, stripe: u64, count: u64, how: Discard) -> Result<(), ArrayError> {
        if count == 0 {
            return Ok(());
        }
        let first = self.stripe(stripe)?;
        self.stripe(stripe.saturating_add(count - 1))?;
        self.array.wait_for_discard_room().await?;
        self.array.discard(first, count, how).await
    }

    /// Stripes of the volume that could not be read when last tried.
    pub fn unreadable_stripes(&self) -> Vec<u64> {
        let unreadable = self.array.unreadable.borrow();
        unreadable.range(self.stripes.clone()).map(|stripe| stripe - self.stripes.start).collect()
    }

    /// Whether a stripe could not be read when last tried.
    pub fn is_unreadable(&self, stripe: u64) -> bool {
        self.array.unreadable.borrow().contains(&(self.stripes.start + stripe))
    }

    /// Whether nothing is written in a stripe, not even in the log.
    pub fn is_unwritten(&self, stripe: u64) -> bool {
        let inner = self.stripes.start + stripe;
        self.array.is_unwritten(inner) && !self.array.overlay.borrow().has_stripe(inner)
    }
}

impl Array {
    /// Queues one atomic write, cut into pieces by stripe.
    fn log_data(&self, pieces: &[(u64, u32, u32)], data: &Buf, crcs: &[u32]) {
        let (mut replaces, mut entries, mut payload, mut done) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let mut overlay = self.overlay.borrow_mut();
        for (stripe, first, count) in pieces {
            let order = self.next_order();
            let range = done..done + *count as usize;
            for (block, index) in (*first..).zip(range.clone()) {
                let data = data.slice(index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES);
                let dirty = DirtyBlock { data, crc: crcs[index], order, segment: None };
                let before = overlay.insert(*stripe, block, dirty);
                replaces.extend(before.and_then(|before| before.segment));
            }
            payload.push(data.slice(range.start * BLOCK_BYTES..range.end * BLOCK_BYTES));
            done = range.end;
            entries.push(Entry::Data { stripe: *stripe, order, block: *first, crcs: crcs[range].to_vec() });
        }
        drop(overlay);
        self.count(|counts| counts.logged_blocks += crcs.len() as u64);
        self.log.queue_data(entries, payload, replaces);
    }

    async fn write_fresh(&self, stripe: u64, data: &Buf, crcs: &[u32], io: Io) -> Result<(), ArrayError> {
        let _lock = self.locks.exclusive(stripe).await;
        if !self.is_unwritten(stripe) || self.overlay.borrow().has_stripe(stripe) {
            return Err(ArrayError::Invalid(format!("stripe {stripe} is not unwritten")));
        }
        // A write through the log that comes from now on is newer than this one.
        let upto = self.order.get();
        let version = self.new_version().await?;
        let mut parts: Vec<Part> = (0..self.geo.k)
            .map(|position| {
                let bytes = self.geo.strip_bytes();
                let blocks = self.geo.strip_blocks as usize;
                let data = data.slice(position * bytes..(position + 1) * bytes);
                Part { data, crcs: crcs[position * blocks..(position + 1) * blocks].to_vec() }
            })
            .collect();
        let parity = self.encode(&parts);
        parts.extend(parity);
        let lives = self.write_stripe(stripe, &parts, version, io, WhenSuspended::Wait).await?;
        self.fresh.borrow_mut().insert(stripe, PendingFresh { version, lives, upto, contained: Vec::new() });
        self.count(|counts| counts.fresh_stripes += 1);
        Ok(())
    }

    /// Makes everything that was written before durable: strips of fresh stripes, then their records, with
    /// everything else in the log.
    pub(crate) async fn flush(&self, io: Io) -> Result<(), ArrayError> {
        if self.closed.get() {
            return Err(ArrayError::Closed);
        }
        self.flush_fresh(io).await?;
        self.log.flush().await
    }

    /// Makes the fresh stripes written before durable, and waits for nothing else: holders of stripe locks call it.
    pub(crate) async fn flush_fresh(&self, io: Io) -> Result<(), ArrayError> {
        if self.fresh.borrow().is_empty() {
            return Ok(());
        }
        let mine: Vec<u64> = self.fresh.borrow().keys().copied().collect();
        let _one_round = self.flush_lock.lock().await;
        self.commit_fresh(&mine, io).await
    }

    async fn commit_fresh(&self, mine: &[u64], io: Io) -> Result<(), ArrayError> {
        if mine.iter().all(|stripe| !self.fresh.borrow().contains_key(stripe)) {
            return Ok(());
        }
        let covered: Vec<(u64, Version)> =
            self.fresh.borrow().iter().map(|(stripe, pending)| (*stripe, pending.version)).collect();
        self.flush_members(io.at("fresh.flush")).await?;
        let records: Vec<_> = covered
            .into_iter()
            .filter_map(|(stripe, version)| {
                // A stripe that was discarded and written again meanwhile was not flushed by this round.
                let fresh = self.fresh.borrow();
                let pending = fresh.get(&stripe).filter(|pending| pending.version == version)?;
                let entry = pending.entry(stripe, &self.members.borrow());
                drop(fresh);
                Some(self.log.queue_control(entry, Vec::new()))
            })
            .collect();
        for record in records {
            record.await.map_err(|_| ArrayError::Closed)?;
        }
        Ok(())
    }

    async fn discard(&self, first: u64, count: u64, how: Discard) -> Result<(), ArrayError> {
        let mut locks = Vec::new();
        for stripe in first..first + count {
            locks.push(self.locks.exclusive(stripe).await);
        }
        // A stripe whose fresh record is on its way must not become written after the discard.
        if (first..first + count).any(|stripe| self.fresh.borrow().contains_key(&stripe)) {
            self.flush_fresh(Io::new(Class::Client, "volume.flush")).await?;
        }
        let upto = self.order.get();
        let mut released = Vec::new();
        for stripe in first..first + count {
            released.extend(self.overlay.borrow_mut().remove_upto(stripe, upto));
        }
        self.log.purge_data(first..first + count);
        let result = self.append(Entry::Discard { stripe: first, count, upto }, Vec::new()).await;
        released.into_iter().filter_map(|dirty| dirty.segment).for_each(|segment| self.log.release(segment));
        result?;
        // What could not be read there is nobody's any more.
        self.unreadable.borrow_mut().retain(|stripe| !(first..first + count).contains(stripe));
        if how == Discard::OnDrives {
            let punches = (0..self.geo.strips()).map(|position| self.punch(position, first, count));
            join_all(punches).await;
        }
        Ok(())
    }

    async fn punch(&self, position: usize, first: u64, count: u64) {
        let io = Io::new(Class::Destage, "discard.punch");
        if let Some(slice) = self.member_slice(position)
            && let Err(error) =
                slice.discard(self.geo.strip_at(first), count * self.geo.strip_slot_bytes(), io).await
        {
            tracing::debug!(array = self.name, position, %error, "space not given back");
        }
    }

    /// Reads blocks of one stripe.
    async fn read_piece(&self, stripe: u64, first: u32, count: u32, io: Io) -> Result<Blocks, ArrayError> {
        let _lock = self.locks.shared(stripe).await;
        let blocks = first..first + count;
        if self.overlay.borrow().has_stripe(stripe) {
            return self.read_overlaid(stripe, blocks, io).await;
        }
        if self.is_unwritten(stripe) {
            let parts = vec![Buf::zeroed(blocks.len() * BLOCK_BYTES)];
            return Ok(Blocks { parts, crcs: vec![ZERO_BLOCK_CRC; blocks.len()] });
        }
        let mut whole = Blocks::default();
        for (_, _, part) in self.read_columns(stripe, blocks, io).await? {
            whole.parts.push(part.data);
            whole.crcs.extend(part.crcs);
        }
        Ok(whole)
    }

    /// Reads blocks of a stripe of which some may be in the log.
    async fn read_overlaid(&self, stripe: u64, blocks: Range<u32>, io: Io) -> Result<Blocks, ArrayError> {
        let logged: Vec<Option<(Buf, u32)>> = {
            let overlay = self.overlay.borrow();
            let one = |block| overlay.get(stripe, block).map(|dirty| (dirty.data.clone(), dirty.crc));
            blocks.clone().map(one).collect()
        };
        let missing =
            blocks.clone().zip(&logged).filter(|(_, logged)| logged.is_none()).map(|(block, _)| block);
        let unwritten = self.is_unwritten(stripe);
        let parts = match unwritten {
            true => Vec::new(),
            false => self.read_columns(stripe, missing, io).await?,
        };
        let zeros = Buf::zeroed(if unwritten { BLOCK_BYTES } else { 0 });
        let mut whole = Blocks::default();
        for (block, logged) in blocks.zip(logged) {
            let (position, column) = self.geo.locate(block);
            let stored = || match parts.iter().find(|(at, ..)| *at == position) {
                Some((_, columns, part)) => {
                    let at = (column - columns.start) as usize;
                    (part.data.slice(at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES), part.crcs[at])
                }
                None => {
                    assert!(unwritten, "the strip of a missing block was read");
                    (zeros.clone(), ZERO_BLOCK_CRC)
                }
            };
            let (data, crc) = logged.unwrap_or_else(stored);
            whole.push(data, crc);
        }
        Ok(whole)
    }

    /// For each strip that the blocks touch: the columns from its first to its last one, verified. Strips that cannot
    /// be read are made from what was read here and from as few others as it takes.
    async fn read_columns(
        &self,
        stripe: u64,
        blocks: impl Iterator<Item = u32>,
        io: Io,
    ) -> Result<Vec<(usize, Range<u32>, Part)>, ArrayError> {
        let mut wanted: Vec<(usize, Range<u32>)> = Vec::new();
        for block in blocks {
            let (position, column) = self.geo.locate(block);
            match wanted.last_mut() {
                Some((at, columns)) if *at == position => columns.end = column + 1,
                _ => wanted.push((position, column..column + 1)),
            }
        }
        let reads = wanted.iter().map(|(position, columns)| self.read_part(stripe, *position, columns, io));
        let mut found: Vec<Result<Part, Erased>> = join_all(reads).await;
        while let Some(lost) = found.iter().position(Result::is_err) {
            let columns = wanted[lost].1.clone();
            let same = |index: &usize| wanted[*index].1 == columns;
            let (erased, have): (Vec<usize>, Vec<usize>) =
                (0..wanted.len()).filter(same).partition(|index| found[*index].is_err());
            let have = have.into_iter().map(|index| (wanted[index].0, found[index].clone())).collect();
            let positions: Vec<usize> = erased.iter().map(|index| wanted[*index].0).collect();
            let made = self.recover_with(stripe, &positions, &columns, have, io).await?;
            for (index, part) in erased.into_iter().zip(made) {
                if let Err(Erased::Blocks { part: rotten, .. }) = &found[index]
                    && rotten.crcs != part.crcs
                {
                    self.unreadable.borrow_mut().insert(stripe);
                    let (array, position) = (self.id, wanted[index].0);
                    return Err(ArrayError::Disagrees { array, stripe, position });
                }
                found[index] = Ok(part);
            }
        }
        if self.unreadable.borrow().contains(&stripe) {
            // These columns can be read; whether all can, only a look at the whole stripe tells.
            self.repair_queue.borrow_mut().insert(stripe);
            self.repair_wake.notify_one();
        }
        let parts = wanted.into_iter().zip(found.into_iter().flatten());
        Ok(parts.map(|((position, columns), part)| (position, columns, part)).collect())
    }
}
