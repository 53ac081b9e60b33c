//! Destage: from the log into the strips.
//!
//! Into an unwritten stripe all strips are written with one version, flushed, and then recorded, like a fresh write.
//! Into a written stripe everything that will be written (data, parity and trailers, by ranges of columns) goes to
//! the log first and is durable before the first strip is touched: replay writes it again and never computes parity
//! from strips found after a crash.
//!
//! Oldest entries first, so that the log's tail moves. What bounds it: a batch has at most [`BATCH`] stripes, and a
//! range of columns fits in a record.
//!
//! One bad block stops nobody else. A column that lacks too many strips cannot be destaged: the columns beside it are, and
//! then its stripe is parked, listed as unreadable, and passed over. When the log's tail reaches the blocks of parked
//! stripes they are logged again at the head.
//!
//! While a host is full an unwritten stripe is put off: parked, and tried again behind all others; its blocks are logged again
//! whether it is parked at the time or not. Nobody waits for its strips but who wants room in the log. A
//! written one is held until its strips are there: some of them are, and no others agree with those.

use crate::engine::{Array, PendingFresh};
use crate::error::ArrayError;
use crate::format::record::{Entry, StripPatch};
use crate::member::WhenSuspended;
use crate::overlay::DirtyBlock;
use crate::strip::{Part, one_life};
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, ZERO_BLOCK_CRC, crc32c_blocks};
use penstock_drive::{Class, Io};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

const IO: Io = Io::new(Class::Destage, "destage.strip");
/// Stripes destaged between two flushes.
const BATCH: usize = 16;
/// How long entries may lie in an idle log.
const IDLE: Duration = Duration::from_secs(2);
/// How long a stripe that could not be destaged is passed over: what it lacked may be back.
const PARKED: Duration = Duration::from_secs(60);
/// The same while one is put off because writes are suspended.
const PUT_OFF: Duration = Duration::from_secs(5);
/// After each round while one is put off.
const REST: Duration = Duration::from_millis(500);

/// What a stripe's destage leaves to do once its strips are flushed.
struct Written {
    stripe: u64,
    blocks: Vec<(u32, DirtyBlock)>,
    segments: Vec<u64>,
    fresh: bool,
    /// Other columns of the stripe could not be destaged.
    parked: bool,
}

/// What became of a stripe that was to be destaged.
#[derive(Default)]
struct Outcome {
    written: Option<Written>,
    /// Why the array cannot go on.
    error: Option<ArrayError>,
}

type Dirty = BTreeMap<(usize, u32), DirtyBlock>;

impl Array {
    pub(crate) async fn destage_task(self: Rc<Self>) {
        let mut parked_at = self.env.now();
        while !self.closed.get() {
            let pause = self.env.sleep(IDLE);
            let before = self.order.get();
            futures_util::future::select(std::pin::pin!(self.destage_wake.notified()), pause).await;
            if self.closed.get() {
                break;
            }
            let idle = self.order.get() == before;
            let pause = if self.put_off.borrow().is_empty() { PARKED } else { PUT_OFF };
            if self.env.now().saturating_sub(parked_at) >= pause {
                parked_at = self.env.now();
                self.overlay.borrow_mut().unpark_all();
            }
            let result = self.destage_some(idle).await;
            if let Err(error) = result {
                tracing::error!(array = self.name, %error, "destage failed; it will be tried again");
                self.env.sleep(IDLE).await;
            }
            // They may have been discarded, and written whole past the log.
            self.keep_put_off(|stripe| self.overlay.borrow().has_stripe(stripe) && self.is_unwritten(stripe));
            if !self.put_off.borrow().is_empty() {
                // Each checkpoint wakes those who wait for room, and they wake this task.
                self.env.sleep(REST).await;
            }
        }
    }

    /// Parks a stripe until writes are not suspended any more.
    fn put_off(&self, stripe: u64, why: String) {
        self.overlay.borrow_mut().park_behind(stripe, self.next_order());
        let mut put_off = self.put_off.borrow_mut();
        if put_off.is_empty() {
            let array = &self.name;
            tracing::error!(
                array,
                why,
                "what is written first in a stripe stays in the log until this is over"
            );
        }
        put_off.insert(stripe, why);
    }

    /// Forgets stripes that were put off but for these.
    fn keep_put_off(&self, keep: impl Fn(u64) -> bool) {
        let mut put_off = self.put_off.borrow_mut();
        let any = !put_off.is_empty();
        put_off.retain(|stripe, _| keep(*stripe));
        if any && put_off.is_empty() {
            tracing::info!(array = self.name, "new stripes are written again");
        }
    }

    /// Destages until the log is half empty; all of it when nothing else is going on.
    async fn destage_some(&self, idle: bool) -> Result<(), ArrayError> {
        let one = self.destage_lock.lock().await;
        loop {
            let pressed = self.log.used_percent() >= 50 || self.is_log_short();
            let aged = idle && self.overlay.borrow().to_destage().0 > 0;
            if self.closed.get() || !(pressed || aged) {
                break;
            }
            let (tail, destaged) = (self.log.first_segment(), self.destage_batch().await?);
            let moved = pressed && self.log_waiting_again() || destaged;
            if !destaged {
                // What newer writes replaced is free once those are durable.
                self.log.flush().await?;
            }
            if pressed || !moved {
                self.write_checkpoint().await?;
            }
            // Logging parked blocks again helps only where the tail follows.
            if !moved || !destaged && self.log.first_segment() == tail {
                break;
            }
        }
        drop(one);
        if idle { self.write_checkpoint().await } else { Ok(()) }
    }

    /// Destages everything and writes a checkpoint.
    pub(crate) async fn destage_all(&self) -> Result<(), ArrayError> {
        let _one = self.destage_lock.lock().await;
        loop {
            // A batch that is wholly parked moved nothing, and others may be left.
            let left = self.overlay.borrow().to_destage().0;
            if !self.destage_batch().await? && self.overlay.borrow().to_destage().0 == left {
                break;
            }
        }
        // Parked blocks do not keep the tail where it is: who stops, and starts again, begins another segment each time.
        if self.log_waiting_again() {
            self.log.flush().await?;
        }
        drop(_one);
        self.write_checkpoint().await
    }

    /// Destages the oldest stripes. Returns whether there were any.
    async fn destage_batch(&self) -> Result<bool, ArrayError> {
        let stripes = self.next_batch();
        let cost = |stripe: &u64| self.destage_cost(self.overlay.borrow().counts_of(*stripe));
        self.destaging.set(stripes.iter().map(cost).sum());
        let result = self.destage_stripes(&stripes).await;
        self.destaging.set(0);
        result
    }

    async fn destage_stripes(&self, stripes: &[u64]) -> Result<bool, ArrayError> {
        let mut locks = Vec::new();
        // Locks are taken in the order of stripes, as a discard of several does.
        for stripe in stripes.iter().copied().collect::<BTreeSet<_>>() {
            locks.push(self.locks.exclusive(stripe).await);
        }
        let results = join_all(stripes.iter().map(|stripe| self.destage_stripe(*stripe))).await;
        let (mut written, mut failed) = (Vec::new(), None);
        for Outcome { written: done, error } in results {
            written.extend(done);
            failed = failed.or(error);
        }
        if written.is_empty() {
            return failed.map_or(Ok(false), Err);
        }
        self.flush_members(IO.at("destage.flush")).await?;
        let fresh: Vec<u64> = written.iter().filter(|done| done.fresh).map(|done| done.stripe).collect();
        self.record_fresh(&fresh).await?;
        // Strips that a failing member missed are recorded as stale before the records that could redo them go.
        self.log.flush_control().await?;
        for done in written {
            self.finish(done);
        }
        drop(locks);
        failed.map_or(Ok(true), Err)
    }

    /// The oldest stripes whose records fit in half of what is free in the log; one at least.
    fn next_batch(&self) -> Vec<u64> {
        let overlay = self.overlay.borrow();
        let free = self.geo.segments.saturating_sub(self.log.used_segments() + 1);
        let mut room = free as usize * self.geo.segment_bytes as usize / BLOCK_BYTES / 2;
        let mut batch = Vec::new();
        for stripe in overlay.oldest_stripes(BATCH) {
            let blocks = overlay.appended_of(stripe);
            let columns: BTreeSet<u32> = blocks.iter().map(|(block, _)| self.geo.locate(*block).1).collect();
            // Data and parity again, and for each range of columns a head with its trailers.
            let need = blocks.len() + columns.len() * self.geo.m + 4 * self.column_ranges(&columns).len();
            if !batch.is_empty() && need > room {
                break;
            }
            room = room.saturating_sub(need);
            batch.push(stripe);
        }
        batch
    }

    async fn record_fresh(&self, stripes: &[u64]) -> Result<(), ArrayError> {
        let records: Vec<_> = stripes
            .iter()
            .filter_map(|stripe| {
                let entry = self.fresh.borrow().get(stripe)?.entry(*stripe, &self.members.borrow());
                Some(self.log.queue_control(entry, Vec::new()))
            })
            .collect();
        for record in records {
            record.await.map_err(|_| ArrayError::Closed)?;
        }
        Ok(())
    }

    fn finish(&self, done: Written) {
        if done.fresh {
            self.keep_put_off(|stripe| stripe != done.stripe);
        }
        let mut overlay = self.overlay.borrow_mut();
        for (block, dirty) in &done.blocks {
            // A newer write of the block keeps the older one's segment until it is durable itself.
            if let Some(removed) = overlay.remove(done.stripe, *block, dirty.order) {
                self.log.release(removed.segment.expect("only appended blocks are destaged"));
            }
        }
        if done.parked {
            overlay.park(done.stripe);
        } else if self.unreadable.borrow().contains(&done.stripe) {
            // It could be destaged: whether all of it can be read again, only a look at the whole tells.
            self.repair_queue.borrow_mut().insert(done.stripe);
            self.repair_wake.notify_one();
        }
        done.segments.into_iter().for_each(|segment| self.log.release_at_checkpoint(segment));
        self.count(|counts| counts.destaged_stripes += 1);
    }

    async fn destage_stripe(&self, stripe: u64) -> Outcome {
        match self.prepare_destage(stripe).await {
            Err(ArrayError::Suspended(why)) if !self.closed.get() => {
                self.put_off(stripe, why);
                Outcome::default()
            }
            Err(error) => Outcome { error: Some(error), ..Outcome::default() },
            Ok(Err(done)) => Outcome { written: done, ..Outcome::default() },
            Ok(Ok(dirty)) => self.destage_in_place(stripe, dirty).await,
        }
    }

    /// The dirty blocks of a written stripe; otherwise what was done for an unwritten one.
    async fn prepare_destage(&self, stripe: u64) -> Result<Result<Dirty, Option<Written>>, ArrayError> {
        if self.fresh.borrow().contains_key(&stripe) {
            // Its record is on its way; it will be written in place after that.
            self.flush_fresh(IO.at("destage.flush")).await?;
        }
        let blocks = self.overlay.borrow().appended_of(stripe);
        if blocks.is_empty() {
            return Ok(Err(None));
        }
        if self.is_unwritten(stripe) {
            return self.destage_fresh(stripe, blocks).await.map(|done| Err(Some(done)));
        }
        Ok(Ok(blocks.into_iter().map(|(block, dirty)| (self.geo.locate(block), dirty)).collect()))
    }

    /// Destages the columns that can be; a stripe with others is parked.
    async fn destage_in_place(&self, stripe: u64, dirty: Dirty) -> Outcome {
        let columns: BTreeSet<u32> = dirty.keys().map(|(_, column)| *column).collect();
        let mut ranges: VecDeque<Range<u32>> = self.column_ranges(&columns).into();
        let mut done =
            Written { stripe, blocks: Vec::new(), segments: Vec::new(), fresh: false, parked: false };
        let mut error = None;
        while let Some(range) = ranges.pop_front() {
            let within = dirty.iter().filter(|((_, column), _)| range.contains(column));
            let part: Dirty = within.map(|(place, block)| (*place, block.clone())).collect();
            match self.destage_columns(stripe, range.clone(), &part).await {
                Ok(segment) => {
                    done.segments.push(segment);
                    let number = |position: usize, column| position as u32 * self.geo.strip_blocks + column;
                    done.blocks
                        .extend(part.into_iter().map(|((at, column), block)| (number(at, column), block)));
                }
                // One of its columns lacks strips; the others need not.
                Err(ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. }) if range.len() > 1 => {
                    let single = columns.range(range).map(|column| *column..column + 1);
                    single.rev().for_each(|column| ranges.push_front(column));
                }
                Err(why @ (ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. })) => {
                    if !done.parked {
                        self.unreadable.borrow_mut().insert(stripe);
                        tracing::error!(array = self.name, stripe, %why, "a stripe cannot be destaged");
                    }
                    done.parked = true;
                }
                Err(other) => {
                    error = Some(other);
                    break;
                }
            }
        }
        if done.segments.is_empty() {
            if done.parked {
                self.overlay.borrow_mut().park(stripe);
            }
            return Outcome { written: None, error };
        }
        Outcome { written: Some(done), error }
    }

    /// Logs the oldest blocks again of stripes that are parked or put off, where that lets the log's tail move. Returns true if there
    /// were any.
    fn log_waiting_again(&self) -> bool {
        let overlay = self.overlay.borrow();
        let waiting: BTreeSet<u64> =
            overlay.parked_stripes().iter().chain(self.put_off.borrow().keys()).copied().collect();
        let blocks = waiting.iter().map(|stripe| overlay.counts_of(*stripe).0).sum();
        let Some(behind) = self.log.behind_oldest(blocks) else {
            return false;
        };
        let old = overlay.logged_before(&waiting, behind);
        drop(overlay);
        for (stripe, block, dirty) in &old {
            let order = self.next_order();
            let replaced = self.overlay.borrow_mut().log_again(*stripe, *block, order);
            let entry = Entry::Data { stripe: *stripe, order, block: *block, crcs: vec![dirty.crc] };
            self.log.queue_data(vec![entry], vec![dirty.data.clone()], replaced.into_iter().collect());
        }
        !old.is_empty()
    }

    /// Cuts the touched columns into ranges whose blocks of all strips fit in a record.
    fn column_ranges(&self, columns: &BTreeSet<u32>) -> Vec<Range<u32>> {
        let most = ((self.geo.destage_payload_blocks() / self.geo.strips()) as u32).max(1);
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for column in columns {
            match ranges.last_mut() {
                Some(range) if column + 1 - range.start <= most && column - range.end <= most / 4 => {
                    range.end = column + 1
                }
                _ => ranges.push(*column..column + 1),
            }
        }
        ranges
    }

    async fn destage_fresh(
        &self,
        stripe: u64,
        blocks: Vec<(u32, DirtyBlock)>,
    ) -> Result<Written, ArrayError> {
        let bytes = self.geo.strip_bytes();
        let strip_blocks = self.geo.strip_blocks as usize;
        let mut strips: Vec<(BufMut, Vec<u32>)> =
            (0..self.geo.k).map(|_| (BufMut::zeroed(bytes), vec![ZERO_BLOCK_CRC; strip_blocks])).collect();
        for (block, dirty) in &blocks {
            let (position, column) = self.geo.locate(*block);
            let at = column as usize * BLOCK_BYTES;
            let (data, crcs) = &mut strips[position];
            data.as_mut()[at..at + BLOCK_BYTES].copy_from_slice(&dirty.data);
            crcs[column as usize] = dirty.crc;
        }
        // A block whose newest write is not appended yet is not contained, and what the log has of it stays valid.
        let contained = blocks.iter().map(|(block, dirty)| (*block, dirty.order)).collect();
        let mut parts: Vec<Part> =
            strips.into_iter().map(|(data, crcs)| Part { data: data.freeze(), crcs }).collect();
        let parity = self.encode(&parts);
        parts.extend(parity);
        let version = self.new_version().await?;
        // No strip counts before the record, so the stripe need not be held until they all are there.
        let lives = self.write_stripe(stripe, &parts, version, IO, WhenSuspended::Fail).await?;
        self.fresh.borrow_mut().insert(stripe, PendingFresh { version, lives, upto: 0, contained });
        self.count(|counts| counts.full_writes += 1);
        Ok(Written { stripe, blocks, segments: Vec::new(), fresh: true, parked: false })
    }

    /// Logs and writes one range of columns in place. Returns the segment of its record.
    async fn destage_columns(
        &self,
        stripe: u64,
        range: Range<u32>,
        dirty: &Dirty,
    ) -> Result<u64, ArrayError> {
        let patched = self.new_columns(stripe, &range, dirty).await?;
        let version = self.new_version().await?;
        // What cannot be written now is stale from this record on.
        let readable = self.readable(stripe).into_iter().fold(0, |mask, position| mask | 1u64 << position);
        let stale = self.geo.all_strips() & !readable;
        let mut patches = Vec::new();
        let mut payload = Vec::new();
        for (position, new) in patched.into_iter().filter(|(position, _)| stale & (1 << position) == 0) {
            let touched: Vec<u16> = match position < self.geo.k {
                true => {
                    range.clone().filter(|c| dirty.contains_key(&(position, *c))).map(|c| c as u16).collect()
                }
                false => {
                    range.clone().filter(|c| dirty.keys().any(|(_, d)| d == c)).map(|c| c as u16).collect()
                }
            };
            let crcs = self.whole_crcs(stripe, position, &range, &touched, &new.crcs).await?;
            for column in &touched {
                let at = (u32::from(*column) - range.start) as usize * BLOCK_BYTES;
                payload.push(new.data.slice(at..at + BLOCK_BYTES));
            }
            patches.push(StripPatch { position: position as u16, version, columns: touched, crcs });
        }
        // What no strip can take stays in the log; replay would refuse an entry that voids it.
        if patches.is_empty() {
            let (array, good) = (self.id, readable.count_ones() as usize);
            return Err(ArrayError::Unreadable { array, stripe, good, wanted: self.geo.k });
        }
        let contained = dirty.iter().map(|((position, column), block)| {
            (*position as u32 * self.geo.strip_blocks + column, block.order)
        });
        let entry =
            Entry::Destage { stripe, stale, contained: contained.collect(), patches: patches.clone() };
        let segment = self.append(entry, payload.clone()).await?;
        let missed = self.write_patches(stripe, stale, &patches, &payload, IO).await?;
        if missed != 0 {
            drop(self.log.queue_control(Entry::stale_strips(stripe, missed), Vec::new()));
        }
        Ok(segment)
    }

    /// New contents of the range for every strip that changes: dirty data strips, and all parity.
    async fn new_columns(
        &self,
        stripe: u64,
        range: &Range<u32>,
        dirty: &Dirty,
    ) -> Result<Vec<(usize, Part)>, ArrayError> {
        let touched: BTreeSet<usize> = dirty.keys().map(|(position, _)| *position).collect();
        let whole = |position: usize| range.clone().all(|column| dirty.contains_key(&(position, column)));
        let untouched = (0..self.geo.k).filter(|position| !whole(*position)).count();
        // Read-modify-write reads the touched data and the parity; reconstruct-write what is not wholly new.
        let modify = touched.len() + self.geo.m < untouched;
        let needed: Vec<usize> = match modify {
            // Without parity nothing depends on what is overwritten.
            _ if self.geo.m == 0 => Vec::new(),
            true => touched.iter().copied().chain(self.geo.k..self.geo.strips()).collect(),
            false => (0..self.geo.k).filter(|position| !whole(*position)).collect(),
        };
        let mut old: BTreeMap<usize, Part> = BTreeMap::new();
        let reads = needed.iter().map(|position| self.read_or_recover(stripe, *position, range));
        for (position, part) in needed.iter().zip(join_all(reads).await) {
            old.insert(*position, part?);
        }
        let blank =
            Part { data: Buf::zeroed(range.len() * BLOCK_BYTES), crcs: vec![ZERO_BLOCK_CRC; range.len()] };
        let new_data =
            |position: usize| overlay_part(old.get(&position).unwrap_or(&blank), position, range, dirty);
        let mut result: Vec<(usize, Part)> = touched.iter().map(|at| (*at, new_data(*at))).collect();
        if modify && self.geo.m > 0 {
            self.count(|counts| counts.read_modify_writes += 1);
            result.extend(self.modified_parity(&old, &result));
        } else {
            self.count(|counts| {
                if needed.is_empty() { counts.full_writes += 1 } else { counts.reconstruct_writes += 1 }
            });
            let all: Vec<Part> = (0..self.geo.k).map(new_data).collect();
            let parity = self.encode(&all);
            result.extend((self.geo.k..).zip(parity));
        }
        Ok(result)
    }

    fn modified_parity(&self, old: &BTreeMap<usize, Part>, new: &[(usize, Part)]) -> Vec<(usize, Part)> {
        let mut parity: Vec<BufMut> = (self.geo.k..self.geo.strips())
            .map(|position| {
                let mut buf = BufMut::zeroed(old[&position].data.len());
                buf.as_mut().copy_from_slice(&old[&position].data);
                buf
            })
            .collect();
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(AsMut::as_mut).collect();
        for (position, part) in new {
            // As `encode` does; the old parts were proved when they were read.
            assert_eq!(crc32c_blocks(&part.data), part.crcs, "memory holds what was written");
            self.code.update(*position, &old[position].data, &part.data, &mut outputs);
        }
        let parts = parity.into_iter().map(|buf| {
            let data = buf.freeze();
            let crcs = crc32c_blocks(&data);
            Part { data, crcs }
        });
        (self.geo.k..).zip(parts).collect()
    }

    async fn read_or_recover(
        &self,
        stripe: u64,
        position: usize,
        range: &Range<u32>,
    ) -> Result<Part, ArrayError> {
        match self.read_part(stripe, position, range, IO.at("destage.read")).await {
            Ok(part) => Ok(part),
            Err(_) => Ok(self.recover(stripe, &[position], range, IO.at("destage.read")).await?.remove(0)),
        }
    }

    /// The checksums of the whole strip once the touched columns of the range hold `new`.
    async fn whole_crcs(
        &self,
        stripe: u64,
        position: usize,
        range: &Range<u32>,
        touched: &[u16],
        new: &[u32],
    ) -> Result<Vec<u32>, ArrayError> {
        let all = self.geo.strip_blocks as usize;
        // With parity all of the range was read or made, also what is not touched.
        if range.len() == all && self.geo.m > 0 {
            return Ok(new.to_vec());
        }
        let mut crcs = match touched.len() == all {
            true => vec![0; all],
            false => self.strip_crcs(stripe, position).await?,
        };
        for column in touched {
            crcs[usize::from(*column)] = new[usize::from(*column) - range.start as usize];
        }
        Ok(crcs)
    }

    /// Writes patches into the strips that are not stale. Returns the strips that were missed.
    pub(crate) async fn write_patches(
        &self,
        stripe: u64,
        stale: u64,
        patches: &[StripPatch],
        payload: &[Buf],
        io: Io,
    ) -> Result<u64, ArrayError> {
        let mut writes = Vec::new();
        let mut rest = payload;
        for patch in patches {
            let (blocks, others) = rest.split_at(patch.columns.len());
            rest = others;
            if stale & (1 << patch.position) == 0 {
                writes.push(self.write_patch(stripe, patch, blocks, io));
            }
        }
        let results = join_all(writes).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(results.into_iter().fold(0, |missed, one| missed | one))
    }

    async fn write_patch(
        &self,
        stripe: u64,
        patch: &StripPatch,
        blocks: &[Buf],
        io: Io,
    ) -> Result<u64, ArrayError> {
        let position = usize::from(patch.position);
        let mut writes = Vec::new();
        let mut at = 0;
        while at < blocks.len() {
            let run = run_length(&patch.columns[at..]);
            let data = penstock_base::buf::gather(&blocks[at..at + run]);
            let place = self.geo.block_at(stripe, u32::from(patch.columns[at]));
            writes.push(self.write_in_strip(stripe, position, (place, data), io, WhenSuspended::Wait));
            at += run;
        }
        let trailer =
            self.write_trailer(stripe, position, &patch.crcs, patch.version, io, WhenSuspended::Wait);
        let (blocks, trailer) = futures_util::future::join(join_all(writes), trailer).await;
        let landed = blocks.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(match one_life(landed.into_iter().chain([trailer?])) {
            Some(_) => 0,
            None => 1 << patch.position,
        })
    }

    /// The checksums of a strip's blocks: from its trailer, or computed from its reconstruction.
    async fn strip_crcs(&self, stripe: u64, position: usize) -> Result<Vec<u32>, ArrayError> {
        if let Some(crcs) = self.trailer_crcs(stripe, position, IO.at("destage.read")).await {
            return Ok(crcs);
        }
        let whole = 0..self.geo.strip_blocks;
        Ok(self.recover(stripe, &[position], &whole, IO.at("destage.read")).await?.remove(0).crcs)
    }
}

fn run_length(columns: &[u16]) -> usize {
    let first = columns[0];
    columns.iter().zip(first..).take_while(|(column, expected)| *column == expected).count()
}

/// `old` with the dirty blocks of its strip put in.
fn overlay_part(
    old: &Part,
    position: usize,
    range: &Range<u32>,
    dirty: &BTreeMap<(usize, u32), DirtyBlock>,
) -> Part {
    let mut data = BufMut::zeroed(old.data.len());
    data.as_mut().copy_from_slice(&old.data);
    let mut crcs = old.crcs.clone();
    for (index, column) in range.clone().enumerate() {
        if let Some(block) = dirty.get(&(position, column)) {
            data.as_mut()[index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES].copy_from_slice(&block.data);
            crcs[index] = block.crc;
        }
    }
    Part { data: data.freeze(), crcs }
}
