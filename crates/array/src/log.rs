//! The array's log: one append stream to 1+m carriers. Format: docs/format/log.md.
//!
//! Owns the queues, the segments and the writer task. Data entries and control entries (everything else) wait in
//! two queues, each in order; control entries may use the part of the log that is kept free for them, so a log full
//! of data can always be destaged.
//!
//! Invariants:
//! - a record is durable when every carrier that is not stale has flushed it; a change of the stripe table is
//!   applied then, in log order, and its waiter told after that;
//! - a segment is used again only after a durable root no longer needs it;
//! - one append is in flight at a time, and one flush serves everybody who waits;
//! - what is queued can be appended: who brings work waits for room first ([`crate::room`]), so the writer never
//!   waits for a destage that waits for the writer;
//! - once the log is shut nobody waits for it: queues are empty and stay so.

use crate::engine::{Array, VERSION_RUN};
use crate::error::ArrayError;
use crate::format::record::{Entry, RecordHead, RecordShape, head_blocks};
use crate::format::segment::SegmentHeader;
use crate::geometry::Geometry;
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, LogSeq, Version};
use penstock_drive::{Class, Io};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use tokio::sync::{Notify, oneshot};

/// How records and headers of segments are written.
pub(crate) const IO: Io = Io::new(Class::Log, "log.append");

/// Where a record lies, so that scrub can look at it again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordPlace {
    pub(crate) offset_blocks: u32,
    pub(crate) shape: RecordShape,
}

/// A segment that replay would read.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) number: u64,
    pub(crate) first_seq: LogSeq,
    pub(crate) chain: u32,
    pub(crate) records: Vec<RecordPlace>,
}

/// What goes into one record together.
struct Item {
    entries: Vec<Entry>,
    payload: Vec<Buf>,
    done: Option<oneshot::Sender<u64>>,
    /// Segments whose entries this one replaces; released when it is durable.
    replaces: Vec<u64>,
}

/// The end of the log.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    /// Sequence of the last record.
    pub(crate) seq: LogSeq,
    /// Its chain value.
    pub(crate) chain: u32,
    /// First free block in the last segment.
    pub(crate) offset_blocks: u32,
    /// Incarnation of this opening.
    pub(crate) incarnation: u64,
    /// First record of this opening.
    pub(crate) incarnation_start: LogSeq,
}

struct FlushWaiter {
    data: u64,
    control: u64,
    done: oneshot::Sender<()>,
}

#[derive(Default)]
struct Queues {
    control: VecDeque<Item>,
    data: VecDeque<Item>,
    data_blocks: u64,
    /// Items ever queued, and ever made durable, of each kind.
    queued: (u64, u64),
    appended: (u64, u64),
    durable: (u64, u64),
    waiters: Vec<FlushWaiter>,
}

/// The log of one array.
pub(crate) struct Log {
    geo: Geometry,
    queues: RefCell<Queues>,
    pub(crate) head: RefCell<Head>,
    pub(crate) durable: RefCell<LogSeq>,
    pub(crate) segments: RefCell<VecDeque<Segment>>,
    live: RefCell<BTreeMap<u64, u64>>,
    /// Segments of applied table changes, waiting for the next checkpoint.
    applied: RefCell<Vec<u64>>,
    /// Segments to release once so many data items are durable.
    replaced: RefCell<Vec<(u64, u64)>>,
    pub(crate) wake: Notify,
    pub(crate) space: Notify,
    shut: Cell<bool>,
    /// The next record begins another segment.
    ends_segment: Cell<bool>,
    /// From where to where on every carrier a record or a header is written that is in no list yet.
    appending: Cell<Option<(u64, u64)>>,
}

impl Log {
    pub(crate) fn new(geo: Geometry, head: Head, segments: VecDeque<Segment>) -> Self {
        Self {
            geo,
            queues: RefCell::default(),
            durable: RefCell::new(head.seq),
            head: RefCell::new(head),
            segments: RefCell::new(segments),
            live: RefCell::default(),
            applied: RefCell::default(),
            replaced: RefCell::default(),
            wake: Notify::new(),
            space: Notify::new(),
            shut: Cell::new(false),
            ends_segment: Cell::new(false),
            appending: Cell::new(None),
        }
    }

    /// Keeps a segment in the log until it is released as often.
    pub(crate) fn hold(&self, segment: u64) {
        *self.live.borrow_mut().entry(segment).or_default() += 1;
    }

    pub(crate) fn release(&self, segment: u64) {
        let mut live = self.live.borrow_mut();
        let count = live.get_mut(&segment).expect("only what is held is released");
        *count -= 1;
        if *count == 0 {
            live.remove(&segment);
        }
    }

    /// The segment's last use is an applied change of the table: the next checkpoint releases it.
    pub(crate) fn release_at_checkpoint(&self, segment: u64) {
        self.applied.borrow_mut().push(segment);
    }

    pub(crate) fn take_applied(&self) -> Vec<u64> {
        std::mem::take(&mut *self.applied.borrow_mut())
    }

    pub(crate) fn put_applied(&self, segments: Vec<u64>) {
        self.applied.borrow_mut().extend(segments);
    }

    pub(crate) fn has_applied(&self) -> bool {
        !self.applied.borrow().is_empty()
    }

    /// The first segment that is still needed once `released` are not held any more.
    pub(crate) fn tail_without(&self, released: &[u64]) -> Segment {
        let mut live = self.live.borrow().clone();
        for segment in released {
            let count = live.get_mut(segment).expect("only what is held is released");
            *count -= 1;
            if *count == 0 {
                live.remove(segment);
            }
        }
        let segments = self.segments.borrow();
        let last = segments.back().expect("there is always a segment").number;
        let needed = live.keys().next().copied().unwrap_or(last).min(last);
        segments.iter().find(|segment| segment.number >= needed).expect("a needed segment is listed").clone()
    }

    /// Forgets segments before `number`.
    pub(crate) fn drop_before(&self, number: u64) {
        self.segments.borrow_mut().retain(|segment| segment.number >= number);
        self.space.notify_waiters();
        self.wake.notify_one();
    }

    /// The parts of the log that an opening may read: live segments up to their last record, and what is being appended.
    pub(crate) fn needed_ranges(&self) -> Vec<std::ops::Range<u64>> {
        let of = |segment: &Segment| {
            let at = self.geo.segment_at(segment.number);
            let end = segment
                .records
                .last()
                .map_or(1, |last| last.offset_blocks + last.shape.head_blocks + last.shape.payload_blocks);
            at..at + u64::from(end) * BLOCK_BYTES as u64
        };
        let appending = self.appending.get().map(|(from, to)| from..to);
        self.segments.borrow().iter().map(of).chain(appending).collect()
    }

    pub(crate) fn used_segments(&self) -> u64 {
        self.segments.borrow().len() as u64
    }

    /// True if the next segment has to wait for room.
    pub(crate) fn is_full(&self) -> bool {
        self.used_segments() >= self.geo.segments
    }

    pub(crate) fn used_percent(&self) -> u64 {
        self.used_segments() * 100 / self.geo.segments
    }

    /// The number of the oldest segment in use.
    pub(crate) fn first_segment(&self) -> u64 {
        self.segments.borrow().front().expect("there is always a segment").number
    }

    /// The segment behind the oldest quarter of those in use, if most of what is in use could be free.
    pub(crate) fn behind_oldest(&self, needed_blocks: u64) -> Option<u64> {
        let segments = self.segments.borrow();
        let used = segments.len() as u64;
        let sparse = used * u64::from(self.segment_blocks()) > 2 * needed_blocks;
        let first = segments.front().filter(|_| used > 2 && sparse)?;
        Some(first.number + (used / 4).max(1))
    }

    fn segment_blocks(&self) -> u32 {
        self.geo.segment_bytes / BLOCK_BYTES as u32
    }

    /// Blocks and items of data that wait to be appended.
    pub(crate) fn queued_data(&self) -> (u64, u64) {
        let queues = self.queues.borrow();
        (queues.data_blocks, queues.data.len() as u64)
    }

    /// Queues data entries that must be found together or not at all. Their order in the log is the order of these
    /// calls.
    pub(crate) fn queue_data(&self, entries: Vec<Entry>, payload: Vec<Buf>, replaces: Vec<u64>) {
        let mut queues = self.queues.borrow_mut();
        queues.data_blocks += payload.iter().map(|part| (part.len() / BLOCK_BYTES) as u64).sum::<u64>();
        queues.data.push_back(Item { entries, payload, done: None, replaces });
        queues.queued.0 += 1;
        drop(queues);
        self.wake.notify_one();
    }

    /// Queues a control entry; the receiver gets its segment once it is durable and applied.
    pub(crate) fn queue_control(&self, entry: Entry, payload: Vec<Buf>) -> oneshot::Receiver<u64> {
        let (done, receiver) = oneshot::channel();
        if self.shut.get() {
            return receiver;
        }
        let mut queues = self.queues.borrow_mut();
        queues.control.push_back(Item {
            entries: vec![entry],
            payload,
            done: Some(done),
            replaces: Vec::new(),
        });
        queues.queued.1 += 1;
        drop(queues);
        self.wake.notify_one();
        receiver
    }

    /// Empties data entries of discarded stripes that are not appended yet: replay must never meet them behind
    /// the discard. They keep their place in the queue, so that what waits for them waits no shorter.
    pub(crate) fn purge_data(&self, stripes: std::ops::Range<u64>) {
        let mut queues = self.queues.borrow_mut();
        let mut blocks = 0;
        for item in &mut queues.data {
            let whole = std::mem::take(&mut item.payload);
            let mut parts = whole.into_iter();
            for entry in &mut item.entries {
                let part = parts.next().expect("a data entry has one part of the payload");
                match entry {
                    Entry::Data { stripe, crcs, .. } if stripes.contains(stripe) => {
                        blocks += crcs.len() as u64;
                        crcs.clear();
                        item.payload.push(part.slice(0..0));
                    }
                    _ => item.payload.push(part),
                }
            }
        }
        queues.data_blocks -= blocks;
    }

    /// Waits until everything queued so far is durable.
    pub(crate) async fn flush(&self) -> Result<(), ArrayError> {
        let (data, control) = self.queues.borrow().queued;
        self.flush_upto(data, control).await
    }

    /// Waits until every control entry queued so far is durable and applied.
    pub(crate) async fn flush_control(&self) -> Result<(), ArrayError> {
        let control = self.queues.borrow().queued.1;
        self.flush_upto(0, control).await
    }

    async fn flush_upto(&self, data: u64, control: u64) -> Result<(), ArrayError> {
        if self.shut.get() {
            return Err(ArrayError::Closed);
        }
        let receiver = {
            let mut queues = self.queues.borrow_mut();
            if queues.durable.0 >= data && queues.durable.1 >= control {
                return Ok(());
            }
            let (done, receiver) = oneshot::channel();
            queues.waiters.push(FlushWaiter { data, control, done });
            receiver
        };
        self.wake.notify_one();
        receiver.await.map_err(|_| ArrayError::Closed)
    }

    /// Takes items for one record: control first, then data, as far as the last segment has room, so that at most
    /// the length of one item is wasted at its end.
    fn take_items(&self) -> Vec<Item> {
        let mut queues = self.queues.borrow_mut();
        let mut left = self.segment_blocks() - self.head.borrow().offset_blocks;
        let (mut items, mut entry_bytes, mut payload) = (Vec::new(), 0, 0);
        loop {
            let from_control = !queues.control.is_empty();
            let next = if from_control { queues.control.front() } else { queues.data.front() };
            let Some(item) = next else { break };
            let blocks = item.payload.iter().map(Buf::len).sum::<usize>() / BLOCK_BYTES;
            let bytes = entry_bytes + item.entries.iter().map(Entry::encoded_bytes).sum::<usize>();
            let total = head_blocks(bytes) + payload + blocks;
            if items.is_empty() && total as u32 > left {
                left = self.segment_blocks() - 1;
            }
            let too_long = payload + blocks > self.geo.max_payload_blocks() || total as u32 > left;
            if !items.is_empty() && too_long {
                break;
            }
            assert!((total as u32) < self.segment_blocks(), "an entry of {total} blocks fits in no segment");
            let queue = if from_control { &mut queues.control } else { &mut queues.data };
            items.extend(queue.pop_front());
            if !from_control {
                queues.data_blocks -= blocks as u64;
            }
            entry_bytes = bytes;
            payload += blocks;
        }
        items
    }

    /// Whether somebody waits for what is appended by now.
    fn wants_flush(&self) -> bool {
        let queues = self.queues.borrow();
        let (data, control) = queues.appended;
        control > queues.durable.1 || queues.waiters.iter().any(|w| w.data <= data && w.control <= control)
    }

    /// Whether somebody will wait for these items once they are appended.
    fn wants_flush_of(&self, items: &[Item]) -> bool {
        !items.is_empty()
            && (items.iter().any(|item| item.done.is_some()) || !self.queues.borrow().waiters.is_empty())
    }

    fn mark_durable(&self) {
        let mut queues = self.queues.borrow_mut();
        queues.durable = queues.appended;
        let (data, control) = queues.durable;
        let (ready, waiting) = std::mem::take(&mut queues.waiters)
            .into_iter()
            .partition::<Vec<_>, _>(|waiter| waiter.data <= data && waiter.control <= control);
        queues.waiters = waiting;
        drop(queues);
        for waiter in ready {
            // A waiter that is gone does not care.
            let _ = waiter.done.send(());
        }
        let mut replaced = self.replaced.borrow_mut();
        let due: Vec<u64> =
            replaced.iter().filter(|(target, _)| *target <= data).map(|(_, segment)| *segment).collect();
        replaced.retain(|(target, _)| *target > data);
        drop(replaced);
        due.into_iter().for_each(|segment| self.release(segment));
    }

    /// Wakes everybody who waits, after the array was closed.
    pub(crate) fn shut(&self) {
        self.wake.notify_one();
        self.space.notify_waiters();
    }

    fn fail_all(&self) {
        self.shut.set(true);
        *self.queues.borrow_mut() = Queues::default();
    }
}

impl Array {
    /// Queues a control entry and waits until it is durable and applied. Returns its segment.
    pub(crate) async fn append(&self, entry: Entry, payload: Vec<Buf>) -> Result<u64, ArrayError> {
        if self.closed.get() {
            return Err(ArrayError::Closed);
        }
        self.log.queue_control(entry, payload).await.map_err(|_| ArrayError::Closed)
    }

    pub(crate) async fn reserve_versions(&self) -> Result<(), ArrayError> {
        let reserved = Version(self.reserved_version.get().max(self.next_version.get()) + VERSION_RUN);
        self.append(Entry::Versions { reserved }, Vec::new()).await?;
        Ok(())
    }

    /// Has whatever is appended from here on lie in another segment than what was before.
    pub(crate) async fn begin_another_segment(&self) -> Result<(), ArrayError> {
        self.log.ends_segment.set(true);
        self.reserve_versions().await
    }

    /// The writer of the log.
    pub(crate) async fn log_task(self: Rc<Self>) {
        while !self.closed.get() {
            match self.log_step().await {
                Ok(true) => {}
                Ok(false) => self.log.wake.notified().await,
                Err(error) => {
                    self.stop_because(format!("the log cannot go on: {error}"));
                }
            }
        }
        self.log.fail_all();
    }

    async fn log_step(&self) -> Result<bool, ArrayError> {
        let items = self.log.take_items();
        // One write instead of a write and a flush, where nothing older waits for the flush.
        let durable =
            self.log.wants_flush_of(&items) && *self.log.durable.borrow() == self.log.head.borrow().seq;
        if !items.is_empty() {
            let io = if durable { IO.durable() } else { IO };
            self.latency.log_append.time(&self.env, self.append_record(&items, io)).await?;
        }
        let (control, data): (Vec<_>, Vec<_>) = items.into_iter().partition(|item| item.done.is_some());
        let idle = control.is_empty() && data.is_empty();
        let segment = self.log.segments.borrow().back().expect("there is always a segment").number;
        self.log.queues.borrow_mut().appended.1 += control.len() as u64;
        self.note_appended(data, segment);
        if durable || self.log.wants_flush() {
            let upto = self.log.head.borrow().seq;
            if durable {
                self.count(|counts| counts.log_flushes += 1);
            } else {
                self.latency.log_flush.time(&self.env, self.flush_carriers()).await?;
            }
            *self.log.durable.borrow_mut() = upto;
            control.iter().flat_map(|item| &item.entries).for_each(|entry| self.apply(entry, segment));
            self.log.mark_durable();
            for done in control.into_iter().filter_map(|item| item.done) {
                // A waiter that is gone does not care.
                let _ = done.send(segment);
            }
        } else if idle {
            return Ok(false);
        }
        self.log.space.notify_waiters();
        Ok(true)
    }

    fn note_appended(&self, data: Vec<Item>, segment: u64) {
        let mut queues = self.log.queues.borrow_mut();
        queues.appended.0 += data.len() as u64;
        let (appended, queued) = (queues.appended.0, queues.queued.0);
        drop(queues);
        let mut overlay = self.overlay.borrow_mut();
        let mut replaced = self.log.replaced.borrow_mut();
        for item in data {
            replaced.extend(item.replaces.into_iter().map(|segment| (appended, segment)));
            for entry in &item.entries {
                let Entry::Data { stripe, order, block, crcs } = entry else { continue };
                for at in *block..*block + crcs.len() as u32 {
                    self.log.hold(segment);
                    if !overlay.appended(*stripe, at, *order, segment) {
                        // A newer write waits in the queue: this one counts until that is durable.
                        replaced.push((queued, segment));
                    }
                }
            }
        }
    }

    /// Applies a durable entry to the stripe table.
    pub(crate) fn apply(&self, entry: &Entry, segment: u64) {
        let mut table = self.table.borrow_mut();
        let mut lacking = 0;
        self.log.hold(segment);
        match entry {
            Entry::Data { .. } => unreachable!("data entries do not change the table"),
            Entry::Fresh { stripe, version, stale, .. } => {
                // A member that failed while the record was on its way is in the pending entry and not in the record.
                let pending = self.fresh.borrow_mut().remove(stripe);
                let later = pending.map_or(0, |pending| pending.stale(&self.members.borrow()));
                table.set_fresh(*stripe, *version, *stale | later);
                lacking = *stale | later;
            }
            Entry::Destage { stripe, stale, patches, .. } => {
                let versions: Vec<_> = patches.iter().map(|p| (usize::from(p.position), p.version)).collect();
                table.set_versions(*stripe, *stale, &versions);
                lacking = *stale;
            }
            Entry::Discard { stripe, count, .. } => {
                (*stripe..stripe + count).for_each(|stripe| {
                    if table.is_written(stripe) {
                        table.set_unwritten(stripe);
                    }
                });
            }
            Entry::Versions { reserved } => self.reserved_version.set(reserved.0),
            Entry::Strips { stripe, set, clear, version } => {
                table.set_stale(*stripe, *set);
                lacking = *set;
                table.set_valid(*stripe, *clear, *version);
            }
            Entry::MemberReset { member } => {
                table.reset_member(usize::from(*member));
                // Strips of fresh stripes whose record is not written yet went with the member.
                let member = usize::from(*member);
                self.fresh.borrow_mut().values_mut().for_each(|pending| pending.lives[member] = None);
            }
        }
        if lacking != 0 {
            // Their members may be whole otherwise, and nothing else looks at them.
            self.resync_wake.notify_one();
        }
        // That of a destage is held until its strips are flushed.
        if !matches!(entry, Entry::Destage { .. }) {
            self.log.release_at_checkpoint(segment);
        }
    }

    async fn append_record(&self, items: &[Item], io: Io) -> Result<(), ArrayError> {
        let head = *self.log.head.borrow();
        let record = RecordHead {
            array: self.id,
            incarnation: head.incarnation,
            seq: head.seq.next(),
            chain: head.chain,
            durable: *self.log.durable.borrow(),
            entries: items.iter().flat_map(|item| item.entries.iter().cloned()).collect(),
        };
        let payload: Vec<Buf> = items.iter().flat_map(|item| item.payload.iter().cloned()).collect();
        let (bytes, shape) = record.encode(&payload);
        let blocks = (bytes.len() / BLOCK_BYTES) as u32;
        let ends = self.log.ends_segment.take() && head.offset_blocks > 1;
        if ends || head.offset_blocks + blocks > self.log.segment_blocks() {
            self.begin_segment(record.seq, io).await?;
        }
        let offset_blocks = self.log.head.borrow().offset_blocks;
        let number = self.log.segments.borrow().back().expect("there is always a segment").number;
        let at = self.geo.segment_at(number) + u64::from(offset_blocks) * BLOCK_BYTES as u64;
        self.log.appending.set(Some((at, at + bytes.len() as u64)));
        self.write_carriers(at, &bytes, io).await?;
        self.log.appending.set(None);
        let mut segments = self.log.segments.borrow_mut();
        let segment = segments.back_mut().expect("there is always a segment");
        segment.records.push(RecordPlace { offset_blocks, shape });
        let mut head = self.log.head.borrow_mut();
        head.seq = record.seq;
        head.chain = shape.chain;
        head.offset_blocks += blocks;
        self.count(|counts| counts.log_records += 1);
        Ok(())
    }

    /// Makes the data durable that is appended, while no control entry is.
    async fn flush_appended(&self) -> Result<(), ArrayError> {
        let upto = self.log.head.borrow().seq;
        self.latency.log_flush.time(&self.env, self.flush_carriers()).await?;
        *self.log.durable.borrow_mut() = upto;
        self.log.mark_durable();
        Ok(())
    }

    async fn begin_segment(&self, first_seq: LogSeq, io: Io) -> Result<(), ArrayError> {
        while self.log.is_full() {
            if self.closed.get() {
                return Err(ArrayError::Closed);
            }
            // What is only held until newer writes are durable, or until a checkpoint, is free after one; destage may be waiting for
            // this very append.
            self.flush_appended().await?;
            self.write_checkpoint().await?;
            if self.log.is_full() {
                self.destage_wake.notify_one();
                self.log.space.notified().await;
            }
        }
        let head = *self.log.head.borrow();
        let number = self.log.segments.borrow().back().expect("there is always a segment").number + 1;
        let at = self.geo.segment_at(number);
        self.log.appending.set(Some((at, at + BLOCK_BYTES as u64)));
        self.write_segment_header(number, first_seq, head.chain, head.incarnation, io).await?;
        self.log.appending.set(None);
        let chain = head.chain;
        self.log.segments.borrow_mut().push_back(Segment { number, first_seq, chain, records: vec![] });
        self.log.head.borrow_mut().offset_blocks = 1;
        if self.log.used_segments() * 2 > self.geo.segments {
            self.destage_wake.notify_one();
        }
        Ok(())
    }

    pub(crate) async fn write_segment_header(
        &self,
        number: u64,
        first_seq: LogSeq,
        chain: u32,
        incarnation: u64,
        io: Io,
    ) -> Result<(), ArrayError> {
        let (carriers_epoch, carriers) = {
            let desc = self.desc.borrow();
            (desc.carriers_epoch, desc.carriers.clone())
        };
        let header =
            SegmentHeader { array: self.id, number, first_seq, chain, incarnation, carriers_epoch, carriers };
        self.write_carriers(self.geo.segment_at(number), &header.encode(), io.at("log.segment")).await
    }

    /// Members that carry the log now.
    pub(crate) fn live_carriers(&self) -> Vec<usize> {
        let members = self.members.borrow();
        let desc = self.desc.borrow();
        let carriers = desc.carriers.iter().map(|carrier| usize::from(*carrier));
        carriers.filter(|at| !members[*at].stale && members[*at].slice.is_some()).collect()
    }

    /// Writes the same bytes on all carriers, those among them that became one meanwhile. Carriers that fail are stale
    /// afterwards; one at least must not.
    pub(crate) async fn write_carriers(&self, at: u64, bytes: &Buf, io: Io) -> Result<(), ArrayError> {
        let (mut written, mut landed) = (Vec::new(), false);
        loop {
            let lives = self.live_carriers().into_iter().map(|carrier| (carrier, self.life(carrier)));
            let missing: Vec<(usize, u64)> = lives.filter(|life| !written.contains(life)).collect();
            if missing.is_empty() {
                return if landed { Ok(()) } else { Err(self.no_carrier()) };
            }
            let writes = missing.iter().map(|(carrier, _)| self.write_carrier(*carrier, at, bytes, io));
            for (life, result) in missing.iter().zip(join_all(writes).await) {
                landed |= result?.is_some_and(|landed| landed == life.1);
            }
            written.extend(missing);
        }
    }

    fn no_carrier(&self) -> ArrayError {
        ArrayError::Damaged { name: self.name.clone(), what: "every copy of the log".into() }
    }

    pub(crate) async fn flush_carriers(&self) -> Result<(), ArrayError> {
        self.count(|counts| counts.log_flushes += 1);
        let flush = async |carrier: usize| {
            let life = self.life(carrier);
            let flushed = match self.member_slice(carrier) {
                None => Err("its drive is gone".to_owned()),
                Some(slice) => slice.flush(IO.at("log.flush")).await.map_err(|error| error.to_string()),
            };
            match flushed {
                Ok(()) if self.life(carrier) == life => Ok(()),
                Ok(()) => self.record_lost().await,
                Err(why) => self.fail_flush(carrier, life, &why).await,
            }
        };
        let results = join_all(self.live_carriers().into_iter().map(flush)).await;
        results.into_iter().collect::<Result<(), _>>()?;
        if self.live_carriers().is_empty() { Err(self.no_carrier()) } else { Ok(()) }
    }
}
