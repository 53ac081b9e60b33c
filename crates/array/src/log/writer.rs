//! The writer of the log: one task that appends records to all carriers and makes them durable.
//!
//! Invariants:
//! - a record is durable when every carrier that is not stale has flushed it. Its change of the stripe table
//!   is applied then, in log order, and its caller told after that;
//! - a segment is used again only after a durable root no longer needs it;
//! - one append is in flight at a time, and one flush serves everybody who waits.
//!
//! Power cut: an entry that was appended and not flushed may be lost, with everything behind it.

use super::chain::{Chain, LogSegment};
use super::checkpoint::Checkpoints;
use super::segments::RecordPlace;
use crate::context::Context;
use crate::error::ArrayError;
use crate::format::record::{Entry, RecordHead};
use crate::format::segment::SegmentHeader;
use crate::members::Members;
use crate::place::SegmentNo;
use crate::queue::{Count, EntryQueue, Item};
use crate::site::Site;
use crate::stripes::{Pin, Stripes};
use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Buf, LogSeq};
use penstock_drive::Io;
use std::cell::Cell;
use std::rc::Rc;

/// Pins the segment of an entry that was applied, for as long as the entry is needed.
pub(crate) fn pin_applied(chain: &Chain, entry: &Entry, segment: SegmentNo) {
    let mut segments = chain.segments_mut();
    segments.pin(segment);
    // The segment of a destage stays pinned until its strips are flushed.
    if !matches!(entry, Entry::Destage { .. }) {
        segments.unpin_at_checkpoint(segment);
    }
}

/// The writer of one array's log.
pub(crate) struct LogWriter {
    context: Rc<Context>,
    queue: Rc<EntryQueue>,
    members: Rc<Members>,
    stripes: Rc<Stripes>,
    chain: Rc<Chain>,
    checkpoints: Rc<Checkpoints>,
    /// The next record begins another segment.
    ends_segment: Cell<bool>,
}

impl LogWriter {
    pub(crate) fn new(
        context: &Rc<Context>,
        queue: &Rc<EntryQueue>,
        members: &Rc<Members>,
        stripes: &Rc<Stripes>,
        chain: &Rc<Chain>,
        checkpoints: &Rc<Checkpoints>,
    ) -> Rc<Self> {
        Rc::new(Self {
            context: context.clone(),
            queue: queue.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            chain: chain.clone(),
            checkpoints: checkpoints.clone(),
            ends_segment: Cell::new(false),
        })
    }

    /// Puts everything that is appended from here on into another segment than all before it.
    pub(crate) async fn begin_another_segment(&self) -> Result<(), ArrayError> {
        self.ends_segment.set(true);
        self.stripes.versions.reserve().await
    }

    /// Appends until the array is closed.
    pub(crate) async fn run(self: Rc<Self>) {
        while !self.context.is_closed() {
            match self.step().await {
                Ok(true) => {}
                Ok(false) => self.context.signals.log.notified().await,
                Err(error) => self.context.stop_because(format!("the log cannot go on: {error}")),
            }
        }
        self.queue.shut();
    }

    /// Appends one record and flushes if somebody waits. Returns false if there was nothing to do.
    async fn step(&self) -> Result<bool, ArrayError> {
        self.bound_unsaved_pages().await?;
        let items = self.queue.take(self.chain.free_blocks());
        let entries = items.iter().filter(|item| item.reply.is_some()).flat_map(|item| &item.entries);
        let _pages = self.pin(entries.collect()).await?;
        // One durable write instead of a write and a flush, where nothing older waits for the flush.
        let durable = self.queue.wants_flush_of(&items) && self.chain.durable() == self.chain.head().seq;
        if !items.is_empty() {
            let io = if durable { Site::LogAppend.io().durable() } else { Site::LogAppend.io() };
            self.context.latency.log_append.time(&self.context.env, self.append(&items, io)).await?;
        }
        let (control, data): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| item.reply.is_some());
        let idle = control.is_empty() && data.is_empty();
        let segment = self.chain.segments().last().number;
        let more = Count { data: data.len() as u64, control: control.len() as u64 };
        let (appended, queued) = self.queue.mark_appended(more);
        self.pin_data(&data, (appended, queued), segment);
        if durable || self.queue.wants_flush() {
            let upto = self.chain.head().seq;
            if durable {
                self.context.count(|counts| counts.log_flushes += 1);
            } else {
                self.flush_carriers().await?;
            }
            self.chain.set_durable(upto);
            for entry in control.iter().flat_map(|item| &item.entries) {
                self.stripes.apply(entry);
                pin_applied(&self.chain, entry, segment);
            }
            self.mark_durable();
            for reply in control.into_iter().filter_map(|item| item.reply) {
                // A caller that went away waits for nothing.
                let _ = reply.send(segment);
            }
        } else if idle {
            return Ok(false);
        }
        self.context.signals.space.notify_waiters();
        Ok(true)
    }

    /// Writes a checkpoint if so many pages of the table were changed that they would take too much memory,
    /// now or at the next opening.
    async fn bound_unsaved_pages(&self) -> Result<(), ArrayError> {
        match self.stripes.has_too_many_unsaved() {
            true => self.checkpoints.write().await,
            false => Ok(()),
        }
    }

    /// The pages that these entries change: they are applied in the step in which they are durable. Waits
    /// while a page cannot be read.
    async fn pin(&self, entries: Vec<&Entry>) -> Result<Vec<Pin>, ArrayError> {
        loop {
            match self.stripes.pin_entries(entries.iter().copied()).await {
                Err(error @ ArrayError::CannotRead { .. }) => self.context.suspend(error.to_string()).await?,
                pinned => return pinned,
            }
        }
    }

    async fn flush_carriers(&self) -> Result<(), ArrayError> {
        self.context.latency.log_flush.time(&self.context.env, self.members.flush_carriers()).await
    }

    fn mark_durable(&self) {
        let data = self.queue.mark_durable();
        self.chain.segments_mut().data_is_durable(data);
    }

    /// Pins the segment of data entries that were just appended, once for each block.
    fn pin_data(&self, data: &[Item], (appended, queued): (u64, u64), segment: SegmentNo) {
        let (mut overlay, mut segments) = (self.stripes.overlay_mut(), self.chain.segments_mut());
        for item in data {
            item.replaces.iter().for_each(|replaced| segments.unpin_when_durable(appended, *replaced));
            for entry in &item.entries {
                let Entry::Data { stripe, order, block, crcs } = entry else {
                    unreachable!("control entries have a queue of their own")
                };
                for at in *block..*block + to_u32(crcs.len()) {
                    segments.pin(segment);
                    if !overlay.appended(*stripe, at, *order, segment) {
                        // A newer write waits in the queue: this one counts until that is durable.
                        segments.unpin_when_durable(queued, segment);
                    }
                }
            }
        }
    }

    async fn append(&self, items: &[Item], io: Io) -> Result<(), ArrayError> {
        let head = self.chain.head();
        let record = RecordHead {
            array: self.context.id,
            incarnation: head.incarnation,
            seq: head.seq.next(),
            chain: head.chain,
            durable: self.chain.durable(),
            entries: items.iter().flat_map(|item| item.entries.iter().cloned()).collect(),
        };
        if !record.has_room() {
            // Damaged metadata brought the numbers there. A log that goes on ends here at the next opening.
            return Err(self.context.damaged("the highest number in the log".into()));
        }
        let payload: Vec<Buf> = items.iter().flat_map(|item| item.payload.iter().cloned()).collect();
        let (bytes, shape) = record.encode(&payload);
        let ends = self.ends_segment.take() && head.offset_blocks > 1;
        if ends || to_u32(bytes.len() / BLOCK_BYTES) > self.chain.free_blocks() {
            self.begin_segment(record.seq, io).await?;
        }
        let offset_blocks = self.chain.head().offset_blocks;
        let number = self.chain.segments().last().number;
        let at = self.context.geo.segment_at(number) + u64::from(offset_blocks) * BLOCK_BYTES as u64;
        let end = at + bytes.len() as u64;
        let segment_end = self.context.geo.segment_at(number) + u64::from(self.context.geo.segment_bytes);
        assert!(end <= segment_end, "a record ends at {end} in a segment that ends at {segment_end}");
        self.chain.begin_append(at..end);
        self.members.write_carriers(at, &bytes, io).await?;
        self.chain.appended(record.seq, RecordPlace { offset_blocks, shape });
        self.context.count(|counts| counts.log_records += 1);
        Ok(())
    }

    /// Makes appended data durable, while no control entry is appended.
    async fn flush_appended(&self) -> Result<(), ArrayError> {
        let upto = self.chain.head().seq;
        self.flush_carriers().await?;
        self.chain.set_durable(upto);
        self.mark_durable();
        Ok(())
    }

    async fn begin_segment(&self, first_seq: LogSeq, io: Io) -> Result<(), ArrayError> {
        while self.chain.is_full() {
            self.context.check_open()?;
            // A segment that is pinned only until newer writes are durable, or until a checkpoint, is free
            // after one. Destage may be waiting for this very append.
            self.flush_appended().await?;
            self.checkpoints.write().await?;
            if self.chain.is_full() {
                self.context.signals.destage.notify_one();
                self.context.signals.space.notified().await;
            }
        }
        let chain = self.chain.head().chain;
        let number = self.chain.segments().last().number.next();
        let at = self.context.geo.segment_at(number);
        self.chain.begin_append(at..at + BLOCK_BYTES as u64);
        self.write_segment_header(number, first_seq, io).await?;
        self.chain.began_segment(LogSegment { number, first_seq, chain, records: vec![] });
        if self.chain.segments().used() * 2 > self.context.geo.segments {
            self.context.signals.destage.notify_one();
        }
        Ok(())
    }

    /// Writes the header of a segment whose first record is `first_seq`, the next one.
    pub(crate) async fn write_segment_header(
        &self,
        number: SegmentNo,
        first_seq: LogSeq,
        io: Io,
    ) -> Result<(), ArrayError> {
        let head = self.chain.head();
        let header = SegmentHeader {
            array: self.context.id,
            number: number.0,
            first_seq,
            chain: head.chain,
            incarnation: head.incarnation,
        };
        let at = self.context.geo.segment_at(number);
        self.members.write_carriers(at, &header.encode(), io.at(Site::LogSegment.name())).await
    }
}
