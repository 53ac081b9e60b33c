//! The segments of the log, and who still needs each of them.
//!
//! A segment is *pinned* once for each entry in it that memory still needs. The tail of the log is its first
//! pinned segment. A pin ends in one of three ways: at once; with the next checkpoint, if the entry is an
//! applied change of the stripe table; or when so many data items are durable, if newer entries replace it.
//!
//! Invariants:
//! - segments have consecutive numbers, and there is always one;
//! - only a segment of the list is pinned, and only a pinned one is unpinned;
//! - every pin that waits for a checkpoint or for durable data is counted as a pin.

use crate::format::record::RecordShape;
use crate::place::SegmentNo;
use penstock_base::{BLOCK_BYTES, LogSeq};
use std::collections::{BTreeMap, VecDeque};

/// The place of a record in its segment, so that scrub can read it again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordPlace {
    pub(crate) offset_blocks: u32,
    pub(crate) shape: RecordShape,
}

impl RecordPlace {
    /// The first block behind the record.
    fn end_blocks(&self) -> u32 {
        self.offset_blocks + self.shape.head_blocks + self.shape.payload_blocks
    }
}

/// A segment that replay would read.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) number: SegmentNo,
    pub(crate) first_seq: LogSeq,
    /// Chain value before its first record.
    pub(crate) chain: u32,
    pub(crate) records: Vec<RecordPlace>,
}

impl Segment {
    /// Bytes from its start to the end of its last record.
    pub(crate) fn used_bytes(&self) -> u64 {
        u64::from(self.records.last().map_or(1, RecordPlace::end_blocks)) * BLOCK_BYTES as u64
    }
}

/// The segments in use, oldest first.
pub(crate) struct Segments {
    list: VecDeque<Segment>,
    pins: BTreeMap<SegmentNo, u64>,
    /// Pins of applied table changes: they end with the next checkpoint.
    applied: Vec<SegmentNo>,
    /// Pins that end when so many data items are durable.
    replaced: Vec<(u64, SegmentNo)>,
}

impl Segments {
    /// Segments as an opening found them.
    ///
    /// # Panics
    /// If there is none, or their numbers are not consecutive.
    pub(crate) fn new(list: VecDeque<Segment>) -> Self {
        let this = Self { list, pins: BTreeMap::new(), applied: Vec::new(), replaced: Vec::new() };
        this.assert_consecutive();
        this
    }

    fn assert_consecutive(&self) {
        let (first, last) = (self.first().number, self.last().number);
        assert_eq!(
            last.0 - first.0 + 1,
            self.list.len() as u64,
            "segments {first} to {last} are consecutive"
        );
    }

    /// The oldest segment.
    pub(crate) fn first(&self) -> &Segment {
        self.list.front().expect("there is always a segment")
    }

    /// The segment that is appended to.
    pub(crate) fn last(&self) -> &Segment {
        self.list.back().expect("there is always a segment")
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.list.iter()
    }

    /// The segment with this number, if it is in use.
    pub(crate) fn get(&self, number: SegmentNo) -> Option<&Segment> {
        self.list.iter().find(|segment| segment.number == number)
    }

    /// The number of segments in use.
    pub(crate) fn used(&self) -> u64 {
        self.list.len() as u64
    }

    /// Begins a segment.
    pub(crate) fn push(&mut self, segment: Segment) {
        self.list.push_back(segment);
        self.assert_consecutive();
    }

    /// The first segment of an array that never logged anything gets its number.
    pub(crate) fn number_first(&mut self, number: SegmentNo) {
        assert_eq!(self.used(), 1, "an array that never logged anything has one segment");
        self.list[0].number = number;
    }

    /// A record was appended to the last segment.
    pub(crate) fn push_record(&mut self, place: RecordPlace) {
        let last = self.list.back_mut().expect("there is always a segment");
        let end = last.records.last().map_or(1, RecordPlace::end_blocks);
        assert!(
            place.offset_blocks >= end,
            "a record at {} behind one that ends at {end}",
            place.offset_blocks
        );
        last.records.push(place);
    }

    /// Keeps a segment in the log until it is unpinned as often.
    pub(crate) fn pin(&mut self, segment: SegmentNo) {
        let used = self.first().number..=self.last().number;
        assert!(used.contains(&segment), "segment {segment} is pinned and not one of {used:?}");
        *self.pins.entry(segment).or_default() += 1;
    }

    /// Ends a pin.
    pub(crate) fn unpin(&mut self, segment: SegmentNo) {
        unpin(&mut self.pins, segment);
    }

    /// A pin ends with the next checkpoint: the entry is an applied change of the table.
    pub(crate) fn unpin_at_checkpoint(&mut self, segment: SegmentNo) {
        assert!(self.pins.contains_key(&segment), "segment {segment} is not pinned");
        self.applied.push(segment);
    }

    /// A pin ends when `durable` data items are durable: newer entries replace this one.
    pub(crate) fn unpin_when_durable(&mut self, durable: u64, segment: SegmentNo) {
        assert!(self.pins.contains_key(&segment), "segment {segment} is not pinned");
        self.replaced.push((durable, segment));
    }

    /// So many data items are durable.
    pub(crate) fn data_is_durable(&mut self, durable: u64) {
        let (due, later) = std::mem::take(&mut self.replaced).into_iter().partition(|(at, _)| *at <= durable);
        self.replaced = later;
        let due: Vec<(u64, SegmentNo)> = due;
        due.into_iter().for_each(|(_, segment)| self.unpin(segment));
    }

    /// True if a checkpoint would end a pin.
    pub(crate) fn has_applied(&self) -> bool {
        !self.applied.is_empty()
    }

    /// Takes the pins that a checkpoint is going to end.
    pub(crate) fn take_applied(&mut self) -> Vec<SegmentNo> {
        std::mem::take(&mut self.applied)
    }

    /// The first segment that is still needed once the pins of `released` have ended.
    pub(crate) fn tail_without(&self, released: &[SegmentNo]) -> &Segment {
        let mut pins = self.pins.clone();
        released.iter().for_each(|segment| unpin(&mut pins, *segment));
        let last = self.last().number;
        let needed = pins.keys().next().copied().unwrap_or(last).min(last);
        self.list.iter().find(|segment| segment.number >= needed).expect("a needed segment is listed")
    }

    /// Drops segments before `number`: a durable root no longer needs them.
    pub(crate) fn drop_before(&mut self, number: SegmentNo) {
        let pinned = self.pins.keys().next();
        assert!(
            pinned.is_none_or(|pinned| *pinned >= number),
            "{pinned:?} is pinned and dropped before {number}"
        );
        self.list.retain(|segment| segment.number >= number);
        self.assert_consecutive();
    }

    /// The segment behind the oldest quarter of those in use, if most of what is in use could be free: if
    /// less than half of it is taken by `needed_blocks`.
    pub(crate) fn behind_oldest(&self, segment_blocks: u32, needed_blocks: u64) -> Option<SegmentNo> {
        let used = self.used();
        let is_sparse = used * u64::from(segment_blocks) > 2 * needed_blocks;
        (used > 2 && is_sparse).then(|| SegmentNo(self.first().number.0 + (used / 4).max(1)))
    }
}

fn unpin(pins: &mut BTreeMap<SegmentNo, u64>, segment: SegmentNo) {
    let count = pins.get_mut(&segment).expect("only a pinned segment is unpinned");
    *count -= 1;
    if *count == 0 {
        pins.remove(&segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(number: u64) -> Segment {
        Segment { number: SegmentNo(number), first_seq: LogSeq(number * 10), chain: 0, records: vec![] }
    }

    fn segments(numbers: std::ops::Range<u64>) -> Segments {
        Segments::new(numbers.map(segment).collect())
    }

    fn tail(segments: &Segments, released: &[u64]) -> u64 {
        let released: Vec<SegmentNo> = released.iter().copied().map(SegmentNo).collect();
        segments.tail_without(&released).number.0
    }

    #[test]
    fn the_tail_is_the_first_pinned_segment() {
        let mut segments = segments(5..9);
        assert_eq!(tail(&segments, &[]), 8, "the last segment stays");
        [6, 7, 6].into_iter().for_each(|number| segments.pin(SegmentNo(number)));
        assert_eq!((tail(&segments, &[]), tail(&segments, &[6]), tail(&segments, &[6, 6])), (6, 6, 7));
        segments.unpin(SegmentNo(6));
        segments.unpin(SegmentNo(6));
        assert_eq!(tail(&segments, &[]), 7);
        segments.drop_before(SegmentNo(7));
        assert_eq!((segments.used(), segments.first().number.0), (2, 7));
    }

    #[test]
    fn a_replaced_entry_is_needed_until_the_newer_one_is_durable() {
        let mut segments = segments(1..4);
        segments.pin(SegmentNo(1));
        segments.pin(SegmentNo(2));
        segments.unpin_when_durable(10, SegmentNo(1));
        segments.unpin_when_durable(11, SegmentNo(2));
        for (durable, expected) in [(9, 1), (10, 2), (12, 3)] {
            segments.data_is_durable(durable);
            assert_eq!(tail(&segments, &[]), expected, "{durable} items are durable");
        }
    }

    #[test]
    fn a_failed_checkpoint_ends_no_pin() {
        let mut segments = segments(1..3);
        segments.pin(SegmentNo(1));
        segments.unpin_at_checkpoint(SegmentNo(1));
        let released = segments.take_applied();
        assert!(!segments.has_applied());
        assert_eq!(segments.tail_without(&released).number, SegmentNo(2));
        assert_eq!(tail(&segments, &[]), 1, "they end when the checkpoint is durable");
    }

    #[test]
    fn the_oldest_quarter_is_worth_moving_while_most_of_the_log_is_free() {
        for (used, needed, expected) in [(2, 0, None), (8, 1000, Some(3)), (3, 0, Some(2)), (8, 2048, None)] {
            assert_eq!(
                segments(1..1 + used).behind_oldest(512, needed),
                expected.map(SegmentNo),
                "{used} {needed}"
            );
        }
    }

    #[test]
    #[should_panic(expected = "is pinned and dropped")]
    fn a_pinned_segment_is_never_dropped() {
        let mut segments = segments(1..4);
        segments.pin(SegmentNo(2));
        segments.drop_before(SegmentNo(3));
    }

    #[test]
    #[should_panic(expected = "only a pinned segment is unpinned")]
    fn a_pin_ends_once() {
        let mut segments = segments(1..2);
        segments.pin(SegmentNo(1));
        segments.unpin(SegmentNo(1));
        segments.unpin(SegmentNo(1));
    }
}
