//! Replay: reads the log back as one chain of records from the root's replay position, each taken from any
//! carrier that has it complete.
//!
//! A record that no carrier has is the end of the log, unless another structure proves that it was durable:
//! then the log is damaged, and the array is refused. Records beyond the end belong to writes that were never
//! acknowledged.
//!
//! A durable record is on every carrier, so one carrier that can be read and does not have it proves the end.
//! If no carrier can be read at the place, the opening stops and nothing is written. A record that is torn on
//! a carrier which can be read in full was never durable, whatever other carriers hide.
//!
//! A record behind the end that an opening could not see may have the number and the chain that the next one
//! gets. If that lies at the same place, it is written over. If it begins the next segment, it has the higher
//! incarnation, and the record left behind does not count. The header of that segment tells nothing: it may
//! be from before both.
//!
//! A record that can be read may lie in a cache alone, also one that was durable and that an earlier opening
//! or a scrub has repaired: a flush may have failed and lost it, and a drive tells that only once. So every
//! record is written again on all carriers.

use super::chain::Head;
use super::mends::Mend;
use super::segments::{RecordPlace, Segment};
use super::sound::is_sound;
use crate::context::Context;
use crate::error::ArrayError;
use crate::format::MOST_AHEAD;
use crate::format::record::{Entry, RecordHead, RecordShape};
use crate::format::root::Root;
use crate::format::segment::SegmentHeader;
use crate::place::SegmentNo;
use crate::salvage::{self, Salvaged};
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, LogSeq, crc32c};
use penstock_drive::{Class, Io, Slice};
use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};

const IO: Io = Io::new(Class::Log, "replay.read");

/// The log as it was found.
pub(crate) struct Found {
    pub(crate) head: Head,
    pub(crate) segments: VecDeque<Segment>,
    pub(crate) records: Vec<FoundRecord>,
    /// Durable structures that some carrier had wrong.
    pub(crate) bad_copies: u64,
    /// Parts of the chain that carriers must get before it may be continued.
    pub(crate) mends: Vec<Mend>,
}

/// A record with its payload.
pub(crate) struct FoundRecord {
    pub(crate) seq: LogSeq,
    pub(crate) segment: SegmentNo,
    pub(crate) entries: Vec<Entry>,
    pub(crate) payload: Vec<Buf>,
}

struct Reader<'a> {
    context: &'a Context,
    root: &'a Root,
    carriers: &'a [Slice],
    durable: LogSeq,
    /// The highest order or version that the root and the records so far have. A copy of a record that is far
    /// ahead of it is damaged.
    highest: u64,
    bad_copies: u64,
    mends: Vec<Mend>,
    /// Records at the start of the segment behind the present one.
    next_records: Vec<RecordHead>,
    /// By carrier, true if it did not answer. It is not asked again.
    silent: RefCell<Vec<bool>>,
}

impl Reader<'_> {
    async fn segment(&self, number: SegmentNo) -> Vec<Salvaged> {
        self.read(self.context.geo.segment_at(number), self.context.geo.segment_bytes as usize).await
    }

    /// Reads the same bytes from every carrier.
    async fn read(&self, at: u64, len: usize) -> Vec<Salvaged> {
        let one = |(number, carrier)| async move {
            if self.silent.borrow()[number] {
                return Salvaged::nothing(len);
            }
            let found = salvage::read(carrier, at, len, IO).await;
            self.silent.borrow_mut()[number] = !found.answered();
            found
        };
        join_all(self.carriers.iter().enumerate().map(one)).await
    }

    fn cannot_read(&self, seq: LogSeq) -> ArrayError {
        self.context.cannot_read(format!("log record {seq}"))
    }

    /// True if a later opening, which did not see this record, put another one in its place, into the next
    /// segment.
    fn is_left_behind(&self, head: &RecordHead) -> bool {
        self.next_records.iter().any(|next| {
            next.array == self.context.id
                && (next.seq, next.chain) == (head.seq, head.chain)
                && (head.incarnation + 1..=self.root.incarnation).contains(&next.incarnation)
        })
    }

    /// The header of a segment; none if the log ends before it.
    fn header(
        &mut self,
        copies: &[Salvaged],
        number: SegmentNo,
        seq: LogSeq,
        chain: u32,
    ) -> Result<Option<SegmentHeader>, ArrayError> {
        let good = |copy: &Salvaged| {
            let header = SegmentHeader::decode(&copy.bytes()[..BLOCK_BYTES]).ok()?;
            let fits = header.array == self.context.id
                && header.number == number.0
                && header.first_seq == seq
                && header.chain == chain
                && header.incarnation <= self.root.incarnation;
            fits.then_some(header)
        };
        let found: Vec<_> = copies.iter().map(good).collect();
        let Some(header) = found.iter().flatten().next().cloned() else {
            let told = copies.iter().any(|copy| copy.has(0, 1));
            return if told { Ok(None) } else { Err(self.cannot_read(seq)) };
        };
        let lacking: Vec<usize> = (0..found.len()).filter(|at| found[*at].is_none()).collect();
        if header.first_seq <= self.durable {
            self.bad_copies += lacking.len() as u64;
        }
        let (at, bytes) = (self.context.geo.segment_at(number), header.encode());
        let whole = (0..found.len()).filter(|carrier| found[*carrier].is_some()).collect();
        self.mends.push(Mend { at, bytes, lacking, whole, durable: Vec::new(), is_needed: true });
        Ok(Some(header))
    }

    /// The record at `at` of segment `number`, from copies that together have it complete; none if the log
    /// ends before it.
    #[allow(clippy::type_complexity, reason = "one caller takes it apart at once")]
    fn record(
        &mut self,
        copies: &[Salvaged],
        (number, at): (SegmentNo, usize),
        seq: LogSeq,
        chain: u32,
    ) -> Result<Option<(RecordHead, RecordShape, Vec<Buf>)>, ArrayError> {
        let block = at / BLOCK_BYTES;
        let decode = |copy: &Salvaged| {
            let (head, shape) = RecordHead::decode(copy.bytes().get(at..)?).ok()?;
            let incarnation = match head.seq >= self.root.incarnation_start {
                true => head.incarnation == self.root.incarnation,
                false => head.incarnation <= self.root.incarnation,
            };
            let fits = head.array == self.context.id
                && head.seq == seq
                && head.chain == chain
                && incarnation
                && head.durable < head.seq
                && !self.is_left_behind(&head);
            let is_near = |entry: &Entry| entry.highest() <= self.highest.saturating_add(MOST_AHEAD);
            let mut entries = head.entries.iter();
            (fits
                && entries
                    .all(|entry| is_sound(entry, &self.context.geo, &self.context.layout) && is_near(entry)))
            .then_some((head, shape))
        };
        let found: Vec<_> = copies.iter().map(decode).collect();
        let newest = found.iter().flatten().map(|(head, _)| head.incarnation).max();
        let best = found.iter().flatten().find(|(head, _)| Some(head.incarnation) == newest).cloned();
        let Some((head, shape)) = best else {
            // A record of a later release is not the end of the log.
            let mut unknown =
                copies.iter().filter_map(|copy| RecordHead::decode_unknown(copy.bytes().get(at..)?));
            let fits =
                |head: &RecordHead| (head.array, head.seq, head.chain) == (self.context.id, seq, chain);
            if let Some((_, error)) = unknown.find(|(head, _)| fits(head)) {
                return Err(error.into());
            }
            let ends = at >= self.context.geo.segment_bytes as usize;
            let told = copies.iter().any(|copy| {
                let claimed = copy.bytes().get(at..).and_then(RecordHead::claimed_head_blocks);
                copy.has(block, claimed.unwrap_or(1).max(1))
            });
            return if ends || told { Ok(None) } else { Err(self.cannot_read(seq)) };
        };
        let has_head =
            |carrier: &usize| found[*carrier].as_ref().is_some_and(|(_, other)| other.chain == shape.chain);
        let good: Vec<usize> = (0..copies.len()).filter(has_head).collect();
        let bytes_of = |carrier: usize| copies[carrier].bytes();
        let mut lacking: BTreeSet<usize> =
            (0..copies.len()).filter(|carrier| !good.contains(carrier)).collect();
        let mut payload = Vec::new();
        let first = at + shape.head_blocks as usize * BLOCK_BYTES;
        for (index, crc) in head.entries.iter().flat_map(Entry::payload_crcs).enumerate() {
            let place = first + index * BLOCK_BYTES..first + (index + 1) * BLOCK_BYTES;
            let (whole, rotten): (Vec<usize>, Vec<usize>) =
                good.iter().partition(|carrier| crc32c(&bytes_of(**carrier)[place.clone()]) == crc);
            lacking.extend(rotten);
            let Some(whole) = whole.first() else {
                // A durable record is complete on every carrier but for m faults. One carrier that can be
                // read and has it torn proves that it never was durable, whatever other carriers hide.
                let blocks = (shape.head_blocks + shape.payload_blocks) as usize;
                let told = copies.iter().any(|copy| copy.has(block, blocks));
                if told && !copies.iter().all(|copy| copy.has(block, blocks)) {
                    tracing::error!(array = %self.context.name, "log record {seq} is torn on one carrier and cannot be read on another: the log ends before it");
                    self.bad_copies += 1;
                }
                return if told { Ok(None) } else { Err(self.cannot_read(seq)) };
            };
            payload.push(bytes_of(*whole).slice(place));
        }
        if seq <= self.durable.max(head.durable) {
            self.bad_copies += lacking.len() as u64;
        }
        let whole: Vec<usize> = (0..copies.len()).filter(|carrier| !lacking.contains(carrier)).collect();
        let bytes = match whole.first() {
            Some(carrier) => bytes_of(*carrier).slice(at..first + payload.len() * BLOCK_BYTES),
            None => head.encode(&payload).0,
        };
        let place = self.context.geo.segment_at(number) + at as u64;
        let lacking = lacking.into_iter().collect();
        self.mends.push(Mend { at: place, bytes, lacking, whole, durable: Vec::new(), is_needed: true });
        self.highest = head.entries.iter().map(Entry::highest).fold(self.highest, u64::max);
        self.durable = self.durable.max(head.durable);
        Ok(Some((head, shape, payload)))
    }

    /// True if a record behind the end proves that the record after `last` was durable.
    fn contradicted(&self, copies: &[Salvaged], from: usize, last: LogSeq) -> bool {
        let mut places = copies.iter().map(Salvaged::bytes).flat_map(|bytes| {
            (from..bytes.len()).step_by(BLOCK_BYTES).map(move |at| RecordHead::decode(&bytes[at..]))
        });
        places.any(|found| {
            found.is_ok_and(|(head, _)| {
                head.array == self.context.id && head.seq > last && head.durable > last
            })
        })
    }

    /// Like [`Self::contradicted`], for segments with a higher number than the last one of the chain. If a
    /// header cannot be read, or is none that was written there, the records decide.
    async fn contradicted_later(&self, after: SegmentNo, last: LogSeq) -> bool {
        for number in (after.0 + 1..after.0 + self.context.geo.segments).map(SegmentNo) {
            let heads = self.read(self.context.geo.segment_at(number), 2 * BLOCK_BYTES).await;
            if heads.iter().any(|copy| self.may_be_later(copy, number, last))
                && self.contradicted(&self.segment(number).await, BLOCK_BYTES, last)
            {
                return true;
            }
        }
        false
    }

    /// True if the place of a segment may hold records behind `last`, by its first two blocks.
    fn may_be_later(&self, copy: &Salvaged, number: SegmentNo, last: LogSeq) -> bool {
        match SegmentHeader::decode(&copy.bytes()[..BLOCK_BYTES]) {
            Ok(header) if header.array == self.context.id => {
                header.number == number.0 && header.first_seq > last
            }
            _ => !copy.has(0, 2) || copy.bytes().iter().any(|byte| *byte != 0),
        }
    }
}

/// Reads the log from `carriers`, from the root's replay position on.
pub(crate) async fn read_log(
    context: &Context,
    root: &Root,
    carriers: &[Slice],
) -> Result<Found, ArrayError> {
    let mut reader = Reader {
        context,
        root,
        carriers,
        durable: root.durable,
        highest: root.order.max(root.versions_reserved.0),
        bad_copies: 0,
        mends: vec![],
        next_records: vec![],
        silent: RefCell::new(vec![false; carriers.len()]),
    };
    let (mut seq, mut chain) = (LogSeq(root.replay_seq.0 - 1), root.replay_chain);
    let mut number = SegmentNo(root.replay_segment);
    let mut segments = VecDeque::new();
    let mut records = Vec::new();
    let mut offset_blocks = 1u32;
    let mut copies = reader.segment(number).await;
    loop {
        if reader.header(&copies, number, seq.next(), chain)?.is_none() {
            break;
        }
        let next = reader.segment(number.next()).await;
        let first_of = |copy: &Salvaged| RecordHead::decode(copy.bytes().get(BLOCK_BYTES..)?).ok();
        reader.next_records = next.iter().filter_map(first_of).map(|(head, _)| head).collect();
        let mut segment = Segment { number, first_seq: seq.next(), chain, records: Vec::new() };
        offset_blocks = 1;
        while let Some((head, shape, payload)) =
            reader.record(&copies, (number, offset_blocks as usize * BLOCK_BYTES), seq.next(), chain)?
        {
            segment.records.push(RecordPlace { offset_blocks, shape });
            records.push(FoundRecord { seq: head.seq, segment: number, entries: head.entries, payload });
            (seq, chain) = (head.seq, shape.chain);
            offset_blocks += shape.head_blocks + shape.payload_blocks;
        }
        segments.push_back(segment);
        if reader.contradicted(&copies, offset_blocks as usize * BLOCK_BYTES, seq)
            && reader.header(&next, number.next(), seq.next(), chain)?.is_none()
        {
            return Err(log_damaged(context, seq));
        }
        (number, copies) = (number.next(), next);
    }
    if seq < reader.durable || reader.contradicted_later(SegmentNo(number.0 - 1), seq).await {
        return Err(log_damaged(context, seq));
    }
    let head = Head {
        seq,
        chain,
        offset_blocks,
        incarnation: root.incarnation,
        incarnation_start: root.incarnation_start,
    };
    Ok(Found { head, segments, records, bad_copies: reader.bad_copies, mends: reader.mends })
}

fn log_damaged(context: &Context, last: LogSeq) -> ArrayError {
    ArrayError::Damaged { name: context.name.clone(), what: format!("log record {}", last.next()) }
}
