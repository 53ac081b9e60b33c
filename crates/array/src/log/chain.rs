//! The log as it lies on carriers: its segments, its end, and the records that are durable.
//!
//! Invariants:
//! - the last durable record is never behind the last appended one;
//! - `appending` covers every byte of a write on carriers that no segment lists yet, so that a copy of the
//!   log for a new carrier misses nothing.
//!
//! Read by the writer, checkpoints, scrub and copies of carriers; changed by the writer and checkpoints.

use super::segments::{RecordPlace, Segment, Segments};
use crate::context::Context;
use crate::place::SegmentNo;
use penstock_base::LogSeq;
use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

pub(crate) use super::segments::Segment as LogSegment;

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

/// The log of one array.
pub(crate) struct Chain {
    context: Rc<Context>,
    head: Cell<Head>,
    durable: Cell<LogSeq>,
    segments: RefCell<Segments>,
    appending: Cell<Option<(u64, u64)>>,
}

impl Chain {
    /// A log before its replay: nothing is known of it.
    pub(crate) fn new(context: &Rc<Context>) -> Rc<Self> {
        let head =
            Head { seq: LogSeq(0), chain: 0, offset_blocks: 1, incarnation: 0, incarnation_start: LogSeq(1) };
        let nothing = Segment { number: SegmentNo(0), first_seq: LogSeq(1), chain: 0, records: vec![] };
        Rc::new(Self {
            context: context.clone(),
            head: Cell::new(head),
            durable: Cell::new(head.seq),
            segments: RefCell::new(Segments::new(VecDeque::from([nothing]))),
            appending: Cell::new(None),
        })
    }

    /// The log as replay found it. What it found counts as durable: the root of this opening says so.
    pub(crate) fn found(&self, head: Head, segments: VecDeque<Segment>) {
        self.head.set(head);
        self.durable.set(head.seq);
        *self.segments.borrow_mut() = Segments::new(segments);
    }

    pub(crate) fn head(&self) -> Head {
        self.head.get()
    }

    /// Records up to here are durable.
    pub(crate) fn durable(&self) -> LogSeq {
        self.durable.get()
    }

    /// Records up to `seq` are durable now.
    pub(crate) fn set_durable(&self, seq: LogSeq) {
        assert!(
            seq >= self.durable.get() && seq <= self.head.get().seq,
            "record {seq} of {:?}",
            self.head.get()
        );
        self.durable.set(seq);
    }

    /// The segments. Let go of them before the next wait.
    pub(crate) fn segments(&self) -> Ref<'_, Segments> {
        self.segments.borrow()
    }

    /// The segments, to pin and unpin them.
    pub(crate) fn segments_mut(&self) -> RefMut<'_, Segments> {
        self.segments.borrow_mut()
    }

    /// Blocks that are free in the last segment.
    pub(crate) fn free_blocks(&self) -> u32 {
        self.context.geo.segment_blocks() - self.head.get().offset_blocks
    }

    /// True if the next segment has to wait until one becomes free.
    pub(crate) fn is_full(&self) -> bool {
        self.segments.borrow().used() >= self.context.geo.segments
    }

    /// Segments in use, in percent of those that there are.
    pub(crate) fn used_percent(&self) -> u64 {
        self.segments.borrow().used() * 100 / self.context.geo.segments
    }

    /// These bytes of each carrier are being written. If that fails the array stops.
    pub(crate) fn begin_append(&self, bytes: Range<u64>) {
        assert!(self.appending.get().is_none(), "one append is in flight at a time");
        self.appending.set(Some((bytes.start, bytes.end)));
    }

    /// A record that was begun is on all carriers.
    pub(crate) fn appended(&self, seq: LogSeq, place: RecordPlace) {
        self.appending.set(None);
        self.segments.borrow_mut().push_record(place);
        let head = self.head.get();
        assert_eq!(head.seq.next(), seq, "records follow each other");
        let blocks = place.shape.head_blocks + place.shape.payload_blocks;
        self.head.set(Head {
            seq,
            chain: place.shape.chain,
            offset_blocks: place.offset_blocks + blocks,
            ..head
        });
    }

    /// A segment whose header was begun is on all carriers.
    pub(crate) fn began_segment(&self, segment: Segment) {
        self.appending.set(None);
        self.segments.borrow_mut().push(segment);
        self.head.set(Head { offset_blocks: 1, ..self.head.get() });
    }

    /// Drops segments before `number`, and wakes everybody who waits for log space.
    pub(crate) fn drop_before(&self, number: SegmentNo) {
        self.segments.borrow_mut().drop_before(number);
        self.context.signals.space.notify_waiters();
        self.context.signals.log.notify_one();
    }

    /// The parts of the log on a slice that an opening may read: segments up to their last record, and the
    /// bytes that are being appended.
    pub(crate) fn needed_ranges(&self) -> Vec<Range<u64>> {
        let of = |segment: &Segment| {
            let at = self.context.geo.segment_at(segment.number);
            at..at + segment.used_bytes()
        };
        let appending = self.appending.get().map(|(from, to)| from..to);
        self.segments.borrow().iter().map(of).chain(appending).collect()
    }
}
