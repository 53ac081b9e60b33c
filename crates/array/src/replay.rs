//! Reading the log back: one chain of records from the root's replay position, each taken from any carrier that has
//! it whole.
//!
//! A record that no carrier has is the end of the log, unless something that was found says that it was durable:
//! then it is damage, and the array is refused. What was found beyond the end belongs to writes that nobody was told
//! of.
//!
//! A durable record is on every carrier, so one carrier that can be read and does not have it tells the end. Where no
//! carrier can be read at the place, or none has the whole of a record of which some carrier hides a part, the opening
//! stops and nothing is written.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::record::{Entry, RecordHead, RecordShape, StripPatch};
use crate::format::root::Root;
use crate::format::segment::SegmentHeader;
use crate::log::{Head, RecordPlace, Segment};
use crate::overlay::DirtyBlock;
use crate::salvage::{self, Salvaged};
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, HashMap, LogSeq, crc32c};
use penstock_drive::{Class, Io, Slice};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

const IO: Io = Io::new(Class::Log, "replay.read");

/// The log as it was found.
pub(crate) struct Found {
    pub(crate) head: Head,
    pub(crate) segments: VecDeque<Segment>,
    pub(crate) records: Vec<FoundRecord>,
    /// Structures that some carrier had wrong although they were durable.
    pub(crate) bad_copies: u64,
    /// What carriers lack of the chain.
    pub(crate) mends: Vec<Mend>,
}

/// Bytes that a carrier (by its place in the list that was read) must get before the chain may be built upon.
pub(crate) struct Mend {
    pub(crate) carrier: usize,
    pub(crate) at: u64,
    pub(crate) bytes: Buf,
}

pub(crate) struct FoundRecord {
    segment: u64,
    entries: Vec<Entry>,
    payload: Vec<Buf>,
}

/// Strip contents that must be written again.
pub(crate) type Redo = BTreeMap<u64, Vec<(StripPatch, Vec<Buf>)>>;

struct Reader<'a> {
    array: &'a Array,
    root: &'a Root,
    carriers: &'a [Slice],
    durable: LogSeq,
    bad_copies: u64,
    mends: Vec<Mend>,
    /// By carrier: it did not answer, and is not asked again.
    silent: RefCell<Vec<bool>>,
}

impl Reader<'_> {
    async fn segment(&self, number: u64) -> Vec<Salvaged> {
        self.read(self.array.geo.segment_at(number), self.array.geo.segment_bytes as usize).await
    }

    /// The same bytes of every carrier.
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
        self.array.cannot_read(format!("log record {seq}"))
    }

    /// The header of a segment; none where the log ends before it.
    fn header(
        &mut self,
        copies: &[Salvaged],
        number: u64,
        seq: LogSeq,
        chain: u32,
    ) -> Result<Option<SegmentHeader>, ArrayError> {
        let good = |copy: &Salvaged| {
            let header = SegmentHeader::decode(&copy.bytes()[..BLOCK_BYTES]).ok()?;
            let fits = header.array == self.array.id
                && header.number == number
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
        let (at, bytes) = (self.array.geo.segment_at(number), header.encode());
        self.mends.extend(lacking.into_iter().map(|carrier| Mend { carrier, at, bytes: bytes.clone() }));
        Ok(Some(header))
    }

    /// The record at `at` of segment `number`, from any copies that together have it whole; none where the log ends
    /// before it.
    #[allow(clippy::type_complexity, reason = "one caller takes it apart at once")]
    fn record(
        &mut self,
        copies: &[Salvaged],
        (number, at): (u64, usize),
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
            let fits = head.array == self.array.id && head.seq == seq && head.chain == chain && incarnation;
            (fits && head.entries.iter().all(|entry| entry.fits(&self.array.geo))).then_some((head, shape))
        };
        let found: Vec<_> = copies.iter().map(decode).collect();
        let newest = found.iter().flatten().map(|(head, _)| head.incarnation).max();
        let best = found.iter().flatten().find(|(head, _)| Some(head.incarnation) == newest).cloned();
        let Some((head, shape)) = best else {
            let ends = at >= self.array.geo.segment_bytes as usize;
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
                // A record that was durable is whole on every carrier but for m faults. One carrier that can be read and
                // has it torn says that it never was, whatever cannot be read on others.
                let blocks = (shape.head_blocks + shape.payload_blocks) as usize;
                let told = copies.iter().any(|copy| copy.has(block, blocks));
                if told && !copies.iter().all(|copy| copy.has(block, blocks)) {
                    tracing::error!(array = %self.array.name, "log record {seq} is torn on one carrier and cannot be read on another: the log ends before it");
                    self.bad_copies += 1;
                }
                return if told { Ok(None) } else { Err(self.cannot_read(seq)) };
            };
            payload.push(bytes_of(*whole).slice(place));
        }
        if seq <= self.durable.max(head.durable) {
            self.bad_copies += lacking.len() as u64;
        }
        if !lacking.is_empty() {
            let place = self.array.geo.segment_at(number) + at as u64;
            let (bytes, _) = head.encode(&payload);
            self.mends.extend(lacking.into_iter().map(|carrier| Mend {
                carrier,
                at: place,
                bytes: bytes.clone(),
            }));
        }
        self.durable = self.durable.max(head.durable);
        Ok(Some((head, shape, payload)))
    }

    /// Whether anything behind the end says that the record after `last` was durable.
    fn contradicted(&self, copies: &[Salvaged], from: usize, last: LogSeq) -> bool {
        let mut places = copies.iter().map(Salvaged::bytes).flat_map(|bytes| {
            (from..bytes.len()).step_by(BLOCK_BYTES).map(move |at| RecordHead::decode(&bytes[at..]))
        });
        places.any(|found| {
            found.is_ok_and(|(head, _)| head.array == self.array.id && head.seq > last && head.durable > last)
        })
    }

    /// The same for segments with a higher number than the last one of the chain. Where a header cannot be read, or is
    /// nothing that was written there, the records tell.
    async fn contradicted_later(&self, after: u64, last: LogSeq) -> bool {
        for number in after + 1..after + self.array.geo.segments {
            let heads = self.read(self.array.geo.segment_at(number), 2 * BLOCK_BYTES).await;
            if heads.iter().any(|copy| self.may_be_later(copy, number, last))
                && self.contradicted(&self.segment(number).await, BLOCK_BYTES, last)
            {
                return true;
            }
        }
        false
    }

    /// True if a place may hold a segment with records behind `last`, by its first two blocks.
    fn may_be_later(&self, copy: &Salvaged, number: u64, last: LogSeq) -> bool {
        match SegmentHeader::decode(&copy.bytes()[..BLOCK_BYTES]) {
            Ok(header) if header.array == self.array.id => header.number == number && header.first_seq > last,
            _ => !copy.has(0, 2) || copy.bytes().iter().any(|byte| *byte != 0),
        }
    }
}

impl Array {
    /// Reads the log from `carriers`.
    pub(crate) async fn read_log(&self, root: &Root, carriers: &[Slice]) -> Result<Found, ArrayError> {
        let mut reader = Reader {
            array: self,
            root,
            carriers,
            durable: root.durable,
            bad_copies: 0,
            mends: vec![],
            silent: RefCell::new(vec![false; carriers.len()]),
        };
        let (mut seq, mut chain) = (LogSeq(root.replay_seq.0 - 1), root.replay_chain);
        let mut number = root.replay_segment;
        let mut segments = VecDeque::new();
        let mut records = Vec::new();
        let mut offset_blocks = 1u32;
        loop {
            let copies = reader.segment(number).await;
            if reader.header(&copies, number, seq.next(), chain)?.is_none() {
                break;
            }
            let mut segment = Segment { number, first_seq: seq.next(), chain, records: Vec::new() };
            offset_blocks = 1;
            while let Some((head, shape, payload)) =
                reader.record(&copies, (number, offset_blocks as usize * BLOCK_BYTES), seq.next(), chain)?
            {
                segment.records.push(RecordPlace { offset_blocks, shape });
                records.push(FoundRecord { segment: number, entries: head.entries, payload });
                (seq, chain) = (head.seq, shape.chain);
                offset_blocks += shape.head_blocks + shape.payload_blocks;
            }
            segments.push_back(segment);
            if reader.contradicted(&copies, offset_blocks as usize * BLOCK_BYTES, seq)
                && reader.header_of_next(number + 1, seq.next(), chain).await?.is_none()
            {
                return Err(self.log_damaged(seq));
            }
            number += 1;
        }
        if seq < reader.durable || reader.contradicted_later(number - 1, seq).await {
            return Err(self.log_damaged(seq));
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

    fn log_damaged(&self, last: LogSeq) -> ArrayError {
        ArrayError::Damaged { name: self.name.clone(), what: format!("log record {} ", last.next()) }
    }

    /// Folds the records into table and overlay. Returns the strips to write again and the segments of the records
    /// that ask for it.
    pub(crate) fn fold(&self, found: Vec<FoundRecord>) -> (Redo, Vec<u64>) {
        let mut redo: Redo = BTreeMap::new();
        let mut redone = Vec::new();
        let mut void: HashMap<u64, u64> = HashMap::default();
        for record in found {
            let mut rest = &record.payload[..];
            for entry in &record.entries {
                let (payload, others) = rest.split_at(entry.payload_crcs().len());
                rest = others;
                match entry {
                    Entry::Data { stripe, order, block, crcs } => {
                        self.never_again(*order);
                        if void.get(stripe).is_none_or(|upto| order > upto) {
                            self.fold_data(*stripe, *block, *order, crcs, payload, record.segment);
                        }
                        continue;
                    }
                    Entry::Fresh { stripe, upto, contained, .. } => {
                        redo.remove(stripe);
                        self.fold_void(*stripe, *upto, &mut void);
                        self.fold_contained(*stripe, contained);
                    }
                    Entry::Discard { stripe, count, upto } => {
                        for stripe in *stripe..stripe + count {
                            redo.remove(&stripe);
                            self.fold_void(stripe, *upto, &mut void);
                        }
                    }
                    Entry::Destage { stripe, contained, patches, .. } => {
                        let changes = redo.entry(*stripe).or_default();
                        let mut rest = payload;
                        for patch in patches {
                            let (blocks, others) = rest.split_at(patch.columns.len());
                            rest = others;
                            changes.push((patch.clone(), blocks.to_vec()));
                        }
                        redone.push(record.segment);
                        self.fold_contained(*stripe, contained);
                    }
                    // A strip that was rebuilt holds what earlier records wrote into it, under a newer version.
                    Entry::Strips { stripe, clear, .. } => {
                        if let Some(changes) = redo.get_mut(stripe) {
                            changes.retain(|(patch, _)| clear & (1 << patch.position) == 0);
                        }
                    }
                    Entry::MemberReset { member } => {
                        redo.values_mut()
                            .for_each(|changes| changes.retain(|(patch, _)| patch.position != *member));
                    }
                    Entry::Versions { .. } => {}
                }
                self.apply(entry, record.segment);
            }
        }
        (redo, redone)
    }

    fn fold_data(&self, stripe: u64, block: u32, order: u64, crcs: &[u32], payload: &[Buf], segment: u64) {
        for ((at, crc), data) in (block..).zip(crcs).zip(payload) {
            let dirty = DirtyBlock { data: data.clone(), crc: *crc, order, segment: Some(segment) };
            self.log.hold(segment);
            self.fold_remove(|overlay| overlay.insert(stripe, at, dirty).into_iter().collect());
        }
    }

    fn fold_contained(&self, stripe: u64, contained: &[(u32, u64)]) {
        for (block, order) in contained {
            self.never_again(*order);
            self.fold_remove(|overlay| overlay.remove(stripe, *block, *order).into_iter().collect());
        }
    }

    /// An order that a record names is never given again. Its entry may be lost or no longer in the log, but what the record
    /// voids by that order must not be what is written after this opening.
    fn never_again(&self, order: u64) {
        self.order.set(self.order.get().max(order));
    }

    fn fold_void(&self, stripe: u64, upto: u64, void: &mut HashMap<u64, u64>) {
        self.never_again(upto);
        let entry = void.entry(stripe).or_default();
        *entry = upto.max(*entry);
        self.fold_remove(|overlay| overlay.remove_upto(stripe, upto));
    }

    fn fold_remove(&self, remove: impl FnOnce(&mut crate::overlay::Overlay) -> Vec<DirtyBlock>) {
        for removed in remove(&mut self.overlay.borrow_mut()) {
            self.log.release(removed.segment.expect("what was replayed has a segment"));
        }
    }

    /// Writes strips again from the log and flushes them.
    pub(crate) async fn redo(&self, redo: Redo) -> Result<(), ArrayError> {
        let io = Io::new(Class::Destage, "replay.redo");
        for (stripe, changes) in redo {
            let readable = self.readable(stripe).into_iter().fold(0, |mask, at| mask | 1u64 << at);
            let mut missed = self.geo.all_strips() & !readable;
            for (patch, blocks) in changes {
                missed |= self.write_patches(stripe, missed, &[patch], &blocks, io).await?;
            }
            let new = missed & !self.stale_strips(stripe);
            if new != 0 {
                self.table.borrow_mut().set_stale(stripe, new);
                drop(self.log.queue_control(Entry::stale_strips(stripe, new), Vec::new()));
            }
        }
        self.flush_members(io).await
    }
}

impl Reader<'_> {
    async fn header_of_next(
        &mut self,
        number: u64,
        seq: LogSeq,
        chain: u32,
    ) -> Result<Option<SegmentHeader>, ArrayError> {
        let copies = self.segment(number).await;
        self.header(&copies, number, seq, chain)
    }
}
