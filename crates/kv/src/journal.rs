//! The journal: changes that the engine has not taken yet, durable with one write.
//!
//! A durable commit of the engine changes many pages, on a thread of its own. A flush appends one record
//! instead, to a ring at the start of the volume. The record holds the changes that neither the engine nor an
//! earlier record has. The engine takes transactions in batches later. Each batch contains a *mark*, which
//! names the last record that the batch makes void. An opening applies the records after the mark. Format:
//! docs/format/kv.md.
//!
//! Invariants:
//! - A record's number is one above that of the record before it. The record lies directly behind that one,
//!   or at the start of the ring.
//! - A mark makes void every record made before its batch was taken from memory. So each record after the
//!   mark was made after that batch was taken, and holds values at least as new. Applying these records to
//!   the state of the engine never restores an older row.
//! - The blocks of a record are overwritten only after the engine has a mark at or beyond it. The volume
//!   keeps the order of writes, so a reader that finds the newer record finds that mark too.
//!
//! Power cut: the volume keeps a prefix of its writes, so a record that is found is complete, unless it was
//! longer than one atomic write. Then its checksum fails, and the journal ends before it. No flush has
//! reported an incomplete record as durable. The contents of rows cannot pass for a record: each opening
//! draws a new random incarnation and gives it to nobody.

use crate::volume::VolumeFile;
use crate::{KvError, WriteSet};
use penstock_array::ArrayError;
use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, Dec, DecodeError, Enc, Id128, crc32c};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

const MAGIC: &[u8; 8] = b"PENKVJNL";
const FORMAT: u32 = 1;
const CRC_AT: usize = 8;
const COVERED_FROM: usize = 12;
const HEAD_BYTES: usize = 48;
const MARK_FORMAT: u8 = 1;
/// The length of a value that means: the row is deleted.
const DELETED: u32 = u32::MAX;

/// A record of the journal: the changes of one flush.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The incarnation of the opening that wrote it.
    pub incarnation: Id128,
    /// Its number; the first of an incarnation has 1.
    pub sequence: u64,
    /// The changes, in order.
    pub changes: WriteSet,
}

impl Record {
    /// The bytes of the record, not padded. On the volume, zeros fill the last block.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.raw(MAGIC).u32(0).u32(FORMAT).id(self.incarnation).u64(self.sequence);
        enc.u32(0).u32(to_u32(self.changes.changes.len()));
        assert_eq!(enc.len(), HEAD_BYTES, "the head has one length");
        for (key, value) in &self.changes.changes {
            enc.bytes(key);
            match value {
                Some(value) => enc.bytes(value),
                None => enc.u32(DELETED),
            };
        }
        let body = to_u32(enc.len() - HEAD_BYTES);
        enc.set_u32(HEAD_BYTES - 8, body);
        let crc = crc32c(&enc.as_slice()[COVERED_FROM..]);
        enc.set_u32(CRC_AT, crc);
        enc.finish()
    }

    /// Reads the record at the start of `bytes`, which may be longer.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        Framed::read(bytes)?.decode()
    }
}

/// Number of blocks that a record of this many bytes takes in the ring.
fn blocks_of(bytes: usize) -> u64 {
    bytes.div_ceil(BLOCK_BYTES) as u64
}

/// The ring as an opening reads it.
struct Ring {
    bytes: Vec<u8>,
    /// Blocks that cannot be read, with the error of the first one. They are zeros in `bytes`.
    unreadable: BTreeSet<u64>,
    why: String,
}

impl Ring {
    /// A ring of which each block was read, or could not be. Only blocks in which a record may lie that was
    /// acknowledged matter.
    fn new(blocks: Vec<Result<Buf, ArrayError>>) -> Self {
        let mut ring = Self { bytes: Vec::new(), unreadable: BTreeSet::new(), why: String::new() };
        for (number, block) in (0..).zip(blocks) {
            match block {
                Ok(block) => ring.bytes.extend_from_slice(&block),
                Err(error) => {
                    if ring.unreadable.is_empty() {
                        ring.why = error.to_string();
                    }
                    ring.unreadable.insert(number);
                    ring.bytes.resize(ring.bytes.len() + BLOCK_BYTES, 0);
                }
            }
        }
        assert!(ring.bytes.len().is_multiple_of(BLOCK_BYTES), "the ring is whole blocks");
        assert_eq!(ring.why.is_empty(), ring.unreadable.is_empty(), "an unreadable block has a reason");
        ring
    }

    /// The record with this number at a block; none if there is another one, or none. Fails if it may be
    /// there and cannot be read.
    fn record_at(&self, block: u64, wanted: (Id128, u64)) -> Result<Option<Framed<'_>>, KvError> {
        let at = usize::try_from(block).ok().and_then(|block| block.checked_mul(BLOCK_BYTES));
        let Some(bytes) = at.and_then(|at| self.bytes.get(at..)) else { return Ok(None) };
        if self.unreadable.contains(&block) {
            return Err(KvError::Corrupt(format!("journal: block {block}: {}", self.why)));
        }
        match Framed::read(bytes) {
            Ok(record) => Ok(Some(record).filter(|record| (record.incarnation, record.sequence) == wanted)),
            // Bytes that are no record end the journal: no flush reported a later record as durable. Unless
            // a part of the record cannot be read.
            Err(_) => match Framed::claims(bytes) {
                Some((incarnation, sequence, blocks))
                    if (incarnation, sequence) == wanted
                        && self.unreadable.range(block..block.saturating_add(blocks)).next().is_some() =>
                {
                    Err(KvError::Corrupt(format!("journal: record {sequence}: {}", self.why)))
                }
                _ => Ok(None),
            },
        }
    }
}

/// A record as bytes with a right checksum: it was written as a whole.
struct Framed<'a> {
    format: u32,
    incarnation: Id128,
    sequence: u64,
    count: u32,
    body: &'a [u8],
}

impl<'a> Framed<'a> {
    /// Incarnation, number and blocks of the record that begins here, as its head says, whose checksum may
    /// be wrong.
    fn claims(bytes: &[u8]) -> Option<(Id128, u64, u64)> {
        let mut dec = Dec::new("journal record", bytes);
        if dec.raw(8).ok()? != MAGIC {
            return None;
        }
        let (_crc, _format) = (dec.u32().ok()?, dec.u32().ok()?);
        let (incarnation, sequence) = (dec.id().ok()?, dec.u64().ok()?);
        Some((incarnation, sequence, blocks_of(HEAD_BYTES.saturating_add(dec.u32().ok()? as usize))))
    }

    /// Reads the record at the start of `bytes`, which may be longer. Fails if there is none.
    fn read(bytes: &'a [u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("journal record", bytes);
        if dec.raw(8)? != MAGIC {
            return Err(dec.bad("wrong magic number"));
        }
        let (crc, format) = (dec.u32()?, dec.u32()?);
        let (incarnation, sequence) = (dec.id()?, dec.counter()?);
        let (body, count) = (dec.u32()? as usize, dec.u32()?);
        let whole = bytes.get(..HEAD_BYTES.saturating_add(body)).ok_or(dec.bad("a body beyond the end"))?;
        if crc32c(&whole[COVERED_FROM..]) != crc {
            return Err(dec.bad("checksum"));
        }
        Ok(Self { format, incarnation, sequence, count, body: &whole[HEAD_BYTES..] })
    }

    /// Number of blocks that the record takes in the ring: the next one begins behind them.
    fn blocks(&self) -> u64 {
        blocks_of(HEAD_BYTES + self.body.len())
    }

    /// Reads the contents. Fails if they are of a later release.
    fn decode(&self) -> Result<Record, DecodeError> {
        let mut dec = Dec::new("journal record", self.body);
        dec.check_format(self.format, FORMAT)?;
        let mut changes = WriteSet::new();
        for _ in 0..self.count {
            let key = dec.bytes()?.to_vec();
            match dec.u32()? {
                DELETED => changes.delete(key),
                len => changes.put(key, dec.raw(len as usize)?.to_vec()),
            };
        }
        match dec.left() {
            0 => Ok(Record { incarnation: self.incarnation, sequence: self.sequence, changes }),
            _ => Err(dec.bad("bytes behind the last change")),
        }
    }
}

/// The position of the engine in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The incarnation of the records that follow.
    pub incarnation: Id128,
    /// Number of the last record that is void.
    pub sequence: u64,
    /// The block of the ring at which the next record lies, unless it lies at the start of the ring.
    pub next_block: u64,
}

impl Mark {
    /// The value of the mark's row in the engine.
    pub fn encode(&self) -> Vec<u8> {
        Enc::new().u8(MARK_FORMAT).id(self.incarnation).u64(self.sequence).u64(self.next_block).finish()
    }

    /// Reads the value of the mark's row.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("journal mark", bytes);
        match dec.u8()? {
            MARK_FORMAT => {}
            other => return Err(dec.unknown("format", other.into())),
        }
        let (incarnation, sequence, next_block) = (dec.id()?, dec.counter()?, dec.counter()?);
        match dec.left() {
            0 => Ok(Self { incarnation, sequence, next_block }),
            _ => Err(dec.bad("bytes behind the mark")),
        }
    }
}

/// Records that are not void: number, first block and number of blocks, oldest first.
type Live = VecDeque<(u64, u64, u64)>;

/// The journal of one opening.
pub(crate) struct Journal {
    file: Rc<VolumeFile>,
    incarnation: Id128,
    sequence: Cell<u64>,
    next_block: Cell<u64>,
    live: RefCell<Live>,
}

/// A record that has its blocks in the ring and is not written yet.
pub(crate) struct Placed {
    block: u64,
    bytes: Vec<u8>,
}

impl Journal {
    /// An empty journal. Its mark must reach the engine before its first record is made.
    pub(crate) fn new(file: Rc<VolumeFile>, incarnation: Id128) -> Self {
        Self { file, incarnation, sequence: Cell::new(0), next_block: Cell::new(0), live: RefCell::default() }
    }

    /// The changes of all records after `mark`, in order. Fails if one of them is of a later release.
    pub(crate) async fn replay(file: &VolumeFile, mark: Mark) -> Result<WriteSet, KvError> {
        changes_after(&Ring::new(file.read_journal().await.map_err(KvError::from)?), mark)
    }

    /// A mark that makes void all records made until now.
    pub(crate) fn mark(&self) -> Mark {
        Mark {
            incarnation: self.incarnation,
            sequence: self.sequence.get(),
            next_block: self.next_block.get(),
        }
    }

    /// The engine has the mark with this number: frees the blocks of all records up to it.
    pub(crate) fn release(&self, sequence: u64) {
        let mut live = self.live.borrow_mut();
        while live.pop_front_if(|(number, ..)| *number <= sequence).is_some() {}
        assert!(live.iter().all(|(number, ..)| *number > sequence), "records are in order");
    }

    /// True if half of the ring is in use.
    pub(crate) fn is_half_full(&self) -> bool {
        let used: u64 = self.live.borrow().iter().map(|(.., blocks)| blocks).sum();
        used * 2 >= self.file.journal_blocks()
    }

    /// Makes a record and assigns blocks to it. Returns `None` if the ring has no run of free blocks that is
    /// long enough. The record must be written before the next one is made.
    pub(crate) fn place(&self, changes: WriteSet) -> Option<Placed> {
        let sequence = self.sequence.get() + 1;
        let record = Record { incarnation: self.incarnation, sequence, changes };
        let bytes = record.encode();
        let blocks = blocks_of(bytes.len());
        let block = self.room_for(blocks)?;
        let is_apart = |(_, at, len): &(u64, u64, u64)| block + blocks <= *at || at + len <= block;
        assert!(self.live.borrow().iter().all(is_apart), "a record lies over none that is needed");
        assert!(block + blocks <= self.file.journal_blocks(), "a record lies in the ring");
        self.live.borrow_mut().push_back((sequence, block, blocks));
        self.sequence.set(sequence);
        self.next_block.set(block + blocks);
        assert!(bytes.len() as u64 <= blocks * BLOCK_BYTES as u64, "a record fits into its blocks");
        Some(Placed { block, bytes })
    }

    /// The first block of a free run of `blocks` blocks: behind the newest record, or at the start of the
    /// ring.
    fn room_for(&self, blocks: u64) -> Option<u64> {
        let (next, end) = (self.next_block.get(), self.file.journal_blocks());
        let fits = |from: u64, until: u64| (from + blocks <= until).then_some(from);
        match self.live.borrow().front() {
            None => fits(next, end).or_else(|| fits(0, end)),
            // The records wrap around the end, or fill the ring.
            Some((_, oldest, _)) if next <= *oldest => fits(next, *oldest),
            Some((_, oldest, _)) => fits(next, end).or_else(|| fits(0, *oldest)),
        }
    }

    /// Writes a record. It is durable after the volume's next flush.
    pub(crate) async fn write(&self, placed: Placed) -> Result<(), KvError> {
        let bytes = BufMut::padded_from(&placed.bytes).freeze();
        self.file.write_journal(placed.block, &bytes).await.map_err(KvError::from)
    }
}

/// The changes of all records of a ring after `mark`, in order. Fails if one of them cannot be read, or not
/// decoded: it was written as a whole, so it may have been acknowledged, and is of a later release.
fn changes_after(ring: &Ring, mark: Mark) -> Result<WriteSet, KvError> {
    let mut changes = WriteSet::new();
    let (mut sequence, mut next_block) = (mark.sequence, mark.next_block);
    loop {
        let wanted = (mark.incarnation, sequence + 1);
        // The record wrapped if it did not fit behind the one before.
        let (block, framed) = match ring.record_at(0, wanted) {
            Ok(Some(framed)) => (0, framed),
            at_start => match ring.record_at(next_block, wanted)? {
                Some(framed) => (next_block, framed),
                None => {
                    at_start?;
                    return Ok(changes);
                }
            },
        };
        let record = framed.decode()?;
        sequence += 1;
        next_block = block + framed.blocks();
        changes.append(record.changes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A ring that could be read.
    fn whole(bytes: &[u8]) -> Ring {
        Ring::new(bytes.chunks(BLOCK_BYTES).map(|block| Ok(Buf::copy_from(block))).collect())
    }

    fn record() -> Record {
        let mut changes = WriteSet::new();
        changes.put(b"key".to_vec(), b"value".to_vec()).delete(b"gone".to_vec());
        Record { incarnation: Id128([7; 16]), sequence: 9, changes }
    }

    /// The bytes on the volume. If they change, the format must have a new number.
    #[test]
    fn records_and_marks_are_as_in_the_first_release() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let bytes = record().encode();
        let wanted = "50454e4b564a4e4c CRC 01000000 07070707070707070707070707070707 0900000000000000 \
                      1c000000 02000000 03000000 6b6579 05000000 76616c7565 04000000 676f6e65 ffffffff";
        let crc = hex(&crc32c(&bytes[12..]).to_le_bytes());
        assert_eq!(hex(&bytes), wanted.replace("CRC", &crc).replace(' ', ""));
        let mark = Mark { incarnation: Id128([7; 16]), sequence: 9, next_block: 3 };
        assert_eq!(hex(&mark.encode()), "010707070707070707070707070707070709000000000000000300000000000000");
        assert_eq!(Mark::decode(&mark.encode()), Ok(mark));
    }

    #[test]
    fn a_record_comes_back_and_a_changed_one_does_not() {
        let mut bytes = record().encode();
        let end = bytes.len();
        bytes.resize(BLOCK_BYTES, 0);
        assert_eq!(end, 76);
        assert_eq!(Record::decode(&bytes), Ok(record()));
        for bit in 0..end * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Record::decode(&bytes).is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    /// Regression: a record of a later release passed for the end of the journal, and what it had was lost.
    #[test]
    fn a_record_of_a_later_release_refuses_the_journal() {
        let of = |sequence, format: u32| {
            let mut bytes = Record { sequence, ..record() }.encode();
            bytes[12..16].copy_from_slice(&format.to_le_bytes());
            let crc = crc32c(&bytes[12..]);
            bytes[8..12].copy_from_slice(&crc.to_le_bytes());
            bytes.resize(BLOCK_BYTES, 0);
            bytes
        };
        let mark = Mark { incarnation: Id128([7; 16]), sequence: 8, next_block: 0 };
        for (records, wanted) in [
            (vec![of(9, 1), of(10, 1)], Ok(4)),
            (vec![of(9, 1), of(10, 2)], Err(())),
            (vec![of(9, 2)], Err(())),
            // Left by an earlier incarnation, or by an earlier round of the ring.
            (vec![of(9, 1), of(7, 2)], Ok(2)),
        ] {
            let ring = records.concat();
            match (changes_after(&whole(&ring), mark), wanted) {
                (Ok(changes), Ok(count)) => assert_eq!(changes.changes().count(), count),
                (Err(error), Err(())) => assert!(error.to_string().contains("format is 2"), "{error}"),
                (found, wanted) => panic!("{found:?} is not {wanted:?}"),
            }
        }
    }

    /// Regression: such a record passed for the end of the journal.
    #[test]
    fn a_record_with_more_than_this_release_knows_refuses_the_journal() {
        let mut later = record().encode();
        later.extend_from_slice(b"more");
        let body = to_u32(later.len() - HEAD_BYTES);
        later[HEAD_BYTES - 8..HEAD_BYTES - 4].copy_from_slice(&body.to_le_bytes());
        let crc = crc32c(&later[COVERED_FROM..]);
        later[CRC_AT..COVERED_FROM].copy_from_slice(&crc.to_le_bytes());
        later.resize(BLOCK_BYTES, 0);
        let Record { incarnation, sequence, .. } = record();
        let mark = Mark { incarnation, sequence: sequence - 1, next_block: 0 };
        let found = changes_after(&whole(&later), mark).map(|changes| changes.changes().count());
        assert!(found.is_err(), "{found:?} changes of an acknowledged flush");
    }

    /// Regression: the blocks of a record were computed from the bytes that its rows count for, which are
    /// more than it has. A change of that count would have hidden all records but the first.
    #[test]
    fn a_record_begins_where_the_one_before_it_ends() {
        let mut changes = WriteSet::new();
        // Its bytes end just below a block's end.
        let value = vec![7; BLOCK_BYTES - HEAD_BYTES - 8 - 3];
        changes.put(b"key".to_vec(), value);
        let first = Record { changes, ..record() };
        let mut ring = first.encode();
        assert_eq!(ring.len(), BLOCK_BYTES);
        ring.extend(Record { sequence: first.sequence + 1, ..record() }.encode());
        ring.resize(3 * BLOCK_BYTES, 0);
        let mark = Mark { incarnation: first.incarnation, sequence: first.sequence - 1, next_block: 0 };
        assert_eq!(changes_after(&whole(&ring), mark).unwrap().changes().count(), 3);
    }

    /// Regression: one block of the ring that could not be read kept the store closed, whatever was in it.
    #[test]
    fn only_blocks_of_records_that_count_must_be_readable() {
        let mut changes = WriteSet::new();
        changes.put(b"key".to_vec(), vec![7; 5000]);
        let long = Record { changes, ..record() };
        let mut ring = long.encode();
        ring.resize(2 * BLOCK_BYTES, 0);
        ring.extend(Record { sequence: long.sequence + 1, ..record() }.encode());
        ring.resize(5 * BLOCK_BYTES, 0);
        let of = |bad: usize| {
            let error = || ArrayError::Invalid("it is bad".into());
            let block = |at: usize| match at == bad {
                true => Err(error()),
                false => Ok(Buf::copy_from(&ring[at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES])),
            };
            Ring::new((0..5).map(block).collect())
        };
        let mark = |sequence, next_block| Mark { incarnation: long.incarnation, sequence, next_block };
        let (first, last) = (mark(long.sequence - 1, 0), mark(long.sequence + 1, 3));
        // The head of a record, the rest of it, the next record, and the place of the one after it.
        for bad in 0..4 {
            let error = changes_after(&of(bad), first).unwrap_err().to_string();
            assert!(error.contains("it is bad"), "block {bad}: {error}");
        }
        assert_eq!(changes_after(&of(4), first).unwrap().changes().count(), 3);
        for bad in [1, 2, 4] {
            assert_eq!(changes_after(&of(bad), last).unwrap().changes().count(), 0, "block {bad}");
        }
    }
}
