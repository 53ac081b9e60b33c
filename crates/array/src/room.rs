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
//! Their records, and those of rebuilt strips, wait for no room for stripes that are put off: these need little more than a record when
//! they can be written. Up to where the reserve begins, so that what is parked can be logged again in it.

use crate::engine::Array;
use crate::error::ArrayError;
use penstock_base::BLOCK_BYTES;

/// Bytes of a patch, a column or a contained block besides the trailer's checksums.
const PATCH_BYTES: u64 = 40;
/// Data leaves one part in so many of the log free.
const DATA_RESERVE: u64 = 4;

/// The purpose of room.
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
        self.has_room_beside(self.overlay.borrow().counts(), 0, self.geo.segments / reserve)
    }

    /// The same where what is put off for a full host is not counted, but for its record when it is written: room for its destage in
    /// place may be long in coming. What is parked for another reason takes the reserve, if it needs more.
    fn has_room_but_for_put_off(&self) -> bool {
        let (overlay, put_off) = (self.overlay.borrow(), self.put_off.borrow());
        let (mut to_destage, mut parked) = (overlay.to_destage(), overlay.parked());
        // One that was discarded and written whole since is destaged in place.
        for stripe in put_off.keys().filter(|stripe| self.is_unwritten(**stripe)) {
            let (blocks, columns) = overlay.counts_of(*stripe);
            let of = if overlay.is_parked(*stripe) { &mut parked } else { &mut to_destage };
            *of = (of.0 - blocks, of.1 - columns);
        }
        let reserve = (self.geo.segments / DATA_RESERVE).max(self.segments_of(self.destage_cost(parked)));
        self.has_room_beside(to_destage, put_off.len() as u64, reserve)
    }

    /// Segments that so many blocks of the longest entries take.
    fn segments_of(&self, blocks: u64) -> u64 {
        blocks.div_ceil(self.blocks_of_segment() - self.geo.longest_entry_blocks() as u64)
    }

    fn blocks_of_segment(&self) -> u64 {
        u64::from(self.geo.segment_bytes) / BLOCK_BYTES as u64 - 1
    }

    /// True if more fits beside what it takes to destage so many dirty blocks and columns in place, and so many stripes that are new, with
    /// a reserve of segments.
    fn has_room_beside(&self, dirty: (u64, u64), new: u64, reserve: u64) -> bool {
        let geo = &self.geo;
        let (queued, items) = self.log.queued_data();
        if queued > (geo.max_payload_blocks() * 8) as u64 {
            return false;
        }
        // Each record of fresh stripes is a few dozen bytes.
        let fresh = (self.fresh.borrow().len() as u64 + new).div_ceil(32);
        let owed = self.destage_cost(dirty) + self.destaging.get() + fresh;
        // Two data records fit in a segment.
        let wanted = self.segments_of(owed) + (2 * (queued + items)).div_ceil(self.blocks_of_segment());
        self.log.used_segments() + wanted + reserve <= geo.segments
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

    /// True while the part of the log is free that data leaves.
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
                For::Discard => self.has_log_room(2 * DATA_RESERVE) || self.has_room_but_for_put_off(),
                For::Rebuild => self.has_room_but_for_put_off(),
            };
            if has_room {
                return Ok(());
            }
            let parked = self.overlay.borrow().parked();
            let owed_bytes = self.destage_cost(parked) * BLOCK_BYTES as u64;
            let may_end = !self.put_off.borrow().is_empty();
            if what == For::Data && !may_end && owed_bytes * 4 > self.geo.log_bytes() {
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
