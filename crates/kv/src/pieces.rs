//! Values as redb stores them: short ones in their row, long ones in pieces of one size.
//!
//! No row in redb is long compared with a page, so pages stay at least a third full. Format:
//! docs/format/kv.md.
//!
//! Invariant: a row whose value is in pieces has all of them, and no piece exists without its row. Both
//! change in one transaction.

use crate::KvError;
use crate::damage::engine;
use penstock_base::num::to_u32;
use redb::{ReadableTable, Table};

/// Longest value that stays in its row, and the length of every piece but the last, in bytes.
pub(crate) const PIECE_BYTES: usize = 1000;
/// Bytes that redb stores beside each row: the ends of its key and of its value.
const ROW_BYTES: u64 = 8;
/// Bytes that redb stores beside each key of a branch page: the checksum and number of a child page, and the
/// key's end.
const BRANCH_BYTES: u64 = 28;
/// Bytes of rows below which redb merges a leaf page (`page_size / 3` in its btree_mutator.rs).
const LEAF_BYTES: u64 = 4096 / 3;
const WHOLE: u8 = 0;
const IN_PIECES: u8 = 1;

type Bytes = &'static [u8];

/// The value in a row of redb: the bytes themselves, or the length of a value that is in pieces.
enum Head<'a> {
    Whole(&'a [u8]),
    InPieces(usize),
}

impl<'a> Head<'a> {
    fn decode(bytes: &'a [u8]) -> Result<Self, KvError> {
        match bytes.split_first() {
            Some((&WHOLE, value)) => Ok(Self::Whole(value)),
            Some((&IN_PIECES, len)) if len.len() == 4 => {
                Ok(Self::InPieces(u32::from_le_bytes([len[0], len[1], len[2], len[3]]) as usize))
            }
            _ => Err(KvError::Corrupt("a row whose value is neither whole nor in pieces".into())),
        }
    }

    fn of(value: &[u8]) -> Vec<u8> {
        match value.len() <= PIECE_BYTES {
            true => [&[WHOLE], value].concat(),
            false => [&[IN_PIECES], &to_u32(value.len()).to_le_bytes()[..]].concat(),
        }
    }

    /// Bytes of the value, and number of pieces besides the row.
    fn sizes(&self) -> (usize, usize) {
        match self {
            Self::Whole(value) => (value.len(), 0),
            Self::InPieces(len) => (*len, len.div_ceil(PIECE_BYTES)),
        }
    }
}

/// The key of a piece. The pieces of one row lie together and in order, with none of another row between
/// them.
fn piece_key(key: &[u8], number: usize) -> Vec<u8> {
    [&to_u32(key.len()).to_be_bytes()[..], key, &to_u32(number).to_be_bytes()[..]].concat()
}

/// Bytes that a row with this key and value counts for: with the bytes that redb stores beside it, the keys
/// of its pieces, and its share of the branch pages.
pub(crate) fn row_bytes(key: &[u8], value_bytes: usize) -> u64 {
    let (key, value) = (key.len() as u64, value_bytes as u64);
    if value_bytes <= PIECE_BYTES {
        return with_branches(key, key + value + ROW_BYTES);
    }
    let pieces = value_bytes.div_ceil(PIECE_BYTES) as u64;
    let piece_key = key + 8;
    with_branches(key, key + ROW_BYTES) + with_branches(piece_key, value + pieces * (piece_key + ROW_BYTES))
}

/// Bytes of rows with keys of `key` bytes, plus their share of the branch pages. Each leaf holds at least a
/// third of a page and takes one key and [`BRANCH_BYTES`] in the branch page above. The branch pages above
/// that one take a third more.
fn with_branches(key: u64, bytes: u64) -> u64 {
    bytes + bytes * (key + BRANCH_BYTES) * 4 / 3 / LEAF_BYTES
}

/// Puts a row, or removes it if `value` is `None`. Returns the bytes that the old row counted for, 0 if there
/// was none.
pub(crate) fn put(
    rows: &mut Table<'_, Bytes, Bytes>,
    pieces: &mut Table<'_, Bytes, Bytes>,
    key: &[u8],
    value: Option<&[u8]>,
) -> Result<u64, KvError> {
    let before = match value {
        Some(value) => rows.insert(key, &Head::of(value)[..]),
        None => rows.remove(key),
    };
    let (before_bytes, before_pieces) = match before.map_err(engine)? {
        Some(head) => {
            let (bytes, count) = Head::decode(head.value())?.sizes();
            (row_bytes(key, bytes), count)
        }
        None => (0, 0),
    };
    let long = value.filter(|value| value.len() > PIECE_BYTES).unwrap_or_default();
    let mut count = 0;
    for (number, piece) in long.chunks(PIECE_BYTES).enumerate() {
        pieces.insert(&piece_key(key, number)[..], piece).map_err(engine)?;
        count = number + 1;
    }
    assert_eq!(count, long.len().div_ceil(PIECE_BYTES), "a long value is in pieces");
    for number in count..before_pieces {
        pieces.remove(&piece_key(key, number)[..]).map_err(engine)?;
    }
    Ok(before_bytes)
}

/// Bytes that all rows of a table count for.
pub(crate) fn count(rows: &impl ReadableTable<Bytes, Bytes>) -> Result<u64, KvError> {
    let mut all = 0;
    for row in rows.iter().map_err(engine)? {
        let (key, head) = row.map_err(engine)?;
        all += row_bytes(key.value(), Head::decode(head.value())?.sizes().0);
    }
    Ok(all)
}

/// The value of a row as it was put, joined from its pieces if need be.
pub(crate) fn value(
    pieces: &impl ReadableTable<Bytes, Bytes>,
    key: &[u8],
    head: &[u8],
) -> Result<Vec<u8>, KvError> {
    let len = match Head::decode(head)? {
        Head::Whole(value) => return Ok(value.to_vec()),
        Head::InPieces(len) => len,
    };
    assert!(len <= u32::MAX as usize, "a length has four bytes");
    let (from, until) = (piece_key(key, 0), piece_key(key, len.div_ceil(PIECE_BYTES)));
    let mut value = Vec::with_capacity(len);
    for piece in pieces.range(&from[..]..&until[..]).map_err(engine)? {
        value.extend_from_slice(piece.map_err(engine)?.1.value());
    }
    match value.len() == len {
        true => Ok(value),
        false => Err(KvError::Corrupt(format!("a row of {len} bytes has pieces of {} bytes", value.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redb::{Database, ReadableDatabase, TableDefinition, backends::InMemoryBackend};

    const ROWS: TableDefinition<'static, Bytes, Bytes> = TableDefinition::new("rows");
    const PIECES: TableDefinition<'static, Bytes, Bytes> = TableDefinition::new("pieces");

    #[test]
    fn values_of_any_length_come_back_and_leave_nothing_behind() {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        let lengths = [0, 1, 999, 1000, 1001, 2000, 2001, 65_536, 3, 4096, 0];
        for (from, to) in lengths.iter().zip(&lengths[1..]) {
            let transaction = database.begin_write().unwrap();
            {
                let (mut rows, mut pieces) =
                    (transaction.open_table(ROWS).unwrap(), transaction.open_table(PIECES).unwrap());
                let bytes = |len: usize| (0..len).map(|at| (at * 7 + len) as u8).collect::<Vec<_>>();
                // A neighbour whose key continues where this one ends.
                put(&mut rows, &mut pieces, b"key\0\0\0\0", Some(&bytes(3000))).unwrap();
                put(&mut rows, &mut pieces, b"key", Some(&bytes(*from))).unwrap();
                let before = put(&mut rows, &mut pieces, b"key", Some(&bytes(*to))).unwrap();
                assert_eq!(before, row_bytes(b"key", *from));
            }
            transaction.commit().unwrap();
            let read = database.begin_read().unwrap();
            let (rows, pieces) = (read.open_table(ROWS).unwrap(), read.open_table(PIECES).unwrap());
            let head = rows.get(&b"key"[..]).unwrap().unwrap();
            let found = value(&pieces, b"key", head.value()).unwrap();
            assert_eq!(found, (0..*to).map(|at| (at * 7 + to) as u8).collect::<Vec<_>>());
        }
        let transaction = database.begin_write().unwrap();
        {
            let (mut rows, mut pieces) =
                (transaction.open_table(ROWS).unwrap(), transaction.open_table(PIECES).unwrap());
            for key in [&b"key"[..], b"key\0\0\0\0", b"none"] {
                put(&mut rows, &mut pieces, key, None).unwrap();
            }
            assert!(rows.first().unwrap().is_none() && pieces.first().unwrap().is_none());
        }
        transaction.commit().unwrap();
    }
}
