//! Room in the log: who brings work for it waits here first, so that a log full of data can always be destaged.
//!
//! Invariant: what is used, what is queued, and what it would take at most to destage every dirty block in place
//! fit in the log together, with a reserve for what the array itself appends. The proof that destage ends: it never
//! appends more than is counted here for the blocks it takes, and with the last of them the whole log is free at the
//! next checkpoint.
//!
//! To destage a column of a stripe in place takes its dirty blocks, its parity, and the trailers of all these strips;
//! a record may need a head of its own. At the end of a segment less than the longest entry is wasted.
//!
//! Blocks of parked stripes cannot be destaged now, and are counted like the others: what their stripes lack may be back
//! at any time. They are logged again at the head, a quarter of the used segments at a time, for which the reserve has
//! room. What it would take to destage them may be a quarter of the log; beyond that writes are refused instead of waiting
//! for what does not come; while a host is full they wait. Discards may use half of the reserve: they are what gives damaged stripes up.

use crate::engine::Array;
use crate::error::ArrayError;
use penstock_base::BLOCK_BYTES;

/// Bytes of a patch, a column or a contained block besides the trailer's checksums.
const PATCH_BYTES: u64 = 40;
/// Data leaves one part in so many of the log free.
const DATA_RESERVE: u64 = 4;

/// What room is wanted for.
#[derive(Clone, Copy, PartialEq)]
enum For {
    Data,
    /// An entry that frees space.
    Discard,
    /// Some bytes that free none.
    Rebuild,
}

impl Array {
    /// Blocks of log that destaging `blocks` dirty blocks in `columns` columns takes at most.
    pub(crate) fn destage_cost(&self, (blocks, columns): (u64, u64)) -> u64 {
        let patched = blocks + columns * self.geo.m as u64;
        let trailer_bytes = 4 * u64::from(self.geo.strip_blocks) + PATCH_BYTES;
        patched + (patched * trailer_bytes).div_ceil(BLOCK_BYTES as u64) + columns
    }

    /// Whether more fits with one part in `reserve` of the log kept free.
    fn has_log_room(&self, reserve: u64) -> bool {
        let geo = &self.geo;
        let (queued, items) = self.log.queued_data();
        if queued > (geo.max_payload_blocks() * 8) as u64 {
            return false;
        }
        let dirty = self.overlay.borrow().counts();
        // Each record of fresh stripes is a few dozen bytes.
        let fresh = (self.fresh.borrow().len() as u64).div_ceil(32);
        let segment = u64::from(geo.segment_bytes) / BLOCK_BYTES as u64 - 1;
        let longest = geo.longest_entry_blocks() as u64;
        let owed = self.destage_cost(dirty) + self.destaging.get() + fresh;
        // Two data records fit in a segment.
        let wanted = owed.div_ceil(segment - longest) + (2 * (queued + items)).div_ceil(segment);
        self.log.used_segments() + wanted + geo.segments / reserve <= geo.segments
    }

    /// Waits until the log has room for more data.
    pub(crate) async fn wait_for_log_room(&self) -> Result<(), ArrayError> {
        self.wait_for_room(For::Data).await
    }

    /// Waits until the log has room for an entry that frees space.
    pub(crate) async fn wait_for_discard_room(&self) -> Result<(), ArrayError> {
        self.wait_for_room(For::Discard).await
    }

    /// Waits until the log has room for the record of a rebuilt strip.
    pub(crate) async fn wait_for_rebuild_room(&self) -> Result<(), ArrayError> {
        self.wait_for_room(For::Rebuild).await
    }

    /// Whether the part of the log that data leaves free is.
    pub(crate) fn has_reserve(&self) -> bool {
        self.log.used_segments() + self.geo.segments / DATA_RESERVE <= self.geo.segments
    }

    async fn wait_for_room(&self, what: For) -> Result<(), ArrayError> {
        loop {
            if self.closed.get() {
                return Err(ArrayError::Closed);
            }
            let has_room = match what {
                For::Data => self.has_log_room(DATA_RESERVE),
                For::Discard => self.has_log_room(2 * DATA_RESERVE),
                // What is put off needs room for its destage, which may be long in coming. A few bytes need not wait for that.
                For::Rebuild if !self.put_off.borrow().is_empty() => self.has_reserve(),
                For::Rebuild => self.has_log_room(DATA_RESERVE),
            };
            if has_room {
                return Ok(());
            }
            let parked = self.overlay.borrow().parked();
            let owed_bytes = self.destage_cost(parked) * BLOCK_BYTES as u64;
            let may_end = !self.put_off.borrow().is_empty();
            if what != For::Discard && !may_end && owed_bytes * 4 > self.geo.log_bytes() {
                return Err(ArrayError::TooDamaged { name: self.name.clone(), blocks: parked.0 });
            }
            self.log_short.set(true);
            self.destage_wake.notify_one();
            self.log.space.notified().await;
        }
    }

    /// Whether somebody waited for room since the last call and there is still none.
    pub(crate) fn is_log_short(&self) -> bool {
        let short = self.log_short.get() && !self.has_log_room(DATA_RESERVE);
        self.log_short.set(short);
        short
    }
}
