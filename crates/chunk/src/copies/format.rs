//! Bytes of a copy of the map: its segments, and the anchor from which it is found. Byte map:
//! docs/format/map-copy.md.
//!
//! Public for the fuzzer and for tools that inspect a volume.

use super::COPIES_END;
use crate::free::Run;
use penstock_base::num::to_u32;
use penstock_base::{ArrayId, BLOCK_BYTES, Dec, DecodeError, Enc, Version, crc32c};

const ANCHOR_MAGIC: &[u8; 8] = b"PENMAPAN";
const SEGMENT_MAGIC: &[u8; 8] = b"PENMAPSG";
const FORMAT: u32 = 1;
const CRC_AT: usize = 8;
const COVERED_FROM: usize = 12;

/// Blocks in which an anchor has room.
pub const ANCHOR_BLOCKS: u64 = 16;

/// The blocks of each of some segments, in order.
pub type Pieces = Vec<Vec<Run>>;

/// The place of a copy, and the moment at which it was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anchor {
    /// The data array on which it lies.
    pub array: ArrayId,
    /// Rises from copy to copy.
    pub serial: u64,
    /// A random number, which all its segments have.
    pub id: u64,
    /// Strips that were written since it was begun have versions above this one.
    pub version: Version,
    /// The time at which it was begun, in nanoseconds since 1970.
    pub created_ns: i64,
    /// Rows in it.
    pub rows: u64,
    /// Bytes of its rows.
    pub bytes: u64,
    /// Blocks in a chunk of the file in which it lies: a segment has at most so many.
    pub chunk_blocks: u32,
    /// Segments with rows. Those with the index follow them.
    pub segments: u32,
    /// The blocks of the segments with the index.
    pub index: Pieces,
}

fn put_pieces(enc: &mut Enc, pieces: &[Vec<Run>]) {
    enc.u32(to_u32(pieces.len()));
    for runs in pieces {
        enc.u32(to_u32(runs.len()));
        for (block, count) in runs {
            enc.u64(*block).u32(to_u32(*count));
        }
    }
}

fn take_pieces(dec: &mut Dec<'_>) -> Result<Pieces, DecodeError> {
    let mut pieces = Vec::new();
    for _ in 0..dec.u32()? {
        let mut runs = Vec::new();
        for _ in 0..dec.u32()? {
            let (block, count) = (dec.counter()?, u64::from(dec.u32()?));
            if count == 0 {
                return Err(dec.bad("a run without blocks"));
            }
            runs.push((block, count));
        }
        if runs.is_empty() {
            return Err(dec.bad("a segment without blocks"));
        }
        pieces.push(runs);
    }
    Ok(pieces)
}

/// Writes magic, checksum and length around `body`.
fn seal(magic: &[u8; 8], body: &[u8]) -> Vec<u8> {
    let mut enc = Enc::with_capacity(20 + body.len());
    enc.raw(magic).u32(0).u32(FORMAT).u32(to_u32(body.len())).raw(body);
    let crc = crc32c(&enc.as_slice()[COVERED_FROM..]);
    enc.set_u32(CRC_AT, crc);
    enc.finish()
}

/// The body between magic, checksum and length; bytes behind it are zeros.
fn open<'a>(what: &'static str, magic: &[u8; 8], bytes: &'a [u8]) -> Result<Dec<'a>, DecodeError> {
    let mut dec = Dec::new(what, bytes);
    if dec.raw(8)? != magic {
        return Err(dec.bad("wrong magic number"));
    }
    let (crc, format, len) = (dec.u32()?, dec.u32()?, dec.u32()?);
    let body = dec.raw(len as usize)?;
    if crc32c(&bytes[COVERED_FROM..bytes.len() - dec.left()]) != crc {
        return Err(dec.bad("checksum"));
    }
    dec.check_format(format, FORMAT)?;
    dec.zeros("field behind the body", dec.left())?;
    Ok(Dec::new(what, body))
}

impl Anchor {
    /// The bytes of the anchor. They may be longer than [`ANCHOR_BLOCKS`]; then the copy is in too many
    /// pieces.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.id(self.array.0).u64(self.serial).u64(self.id).u64(self.version.0).i64(self.created_ns);
        enc.u64(self.rows).u64(self.bytes).u32(self.chunk_blocks).u32(self.segments);
        put_pieces(&mut enc, &self.index);
        seal(ANCHOR_MAGIC, &enc.finish())
    }

    /// Decodes an anchor.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = open("anchor of a copy of the map", ANCHOR_MAGIC, bytes)?;
        let (array, serial, id) = (ArrayId(dec.id()?), dec.counter_with_room()?, dec.u64()?);
        let (version, created_ns) = (Version(dec.counter()?), dec.i64()?);
        let (rows, len, chunk_blocks, segments) = (dec.counter()?, dec.counter()?, dec.u32()?, dec.u32()?);
        let index = take_pieces(&mut dec)?;
        dec.end()?;
        if chunk_blocks == 0 || !(1..COPIES_END).contains(&serial) {
            return Err(dec.bad("a copy without chunks or without a number"));
        }
        Ok(Self { array, serial, id, version, created_ns, rows, bytes: len, chunk_blocks, segments, index })
    }
}

/// The head of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHead {
    /// [`Anchor::id`].
    pub id: u64,
    /// Its number in the copy.
    pub number: u32,
    /// True for a part of the index, false for rows.
    pub is_index: bool,
}

/// Bytes of a segment beside its contents.
pub const SEGMENT_BYTES: usize = 20 + 8 + 4 + 4;

impl SegmentHead {
    /// The bytes of a segment with these contents, followed by zeros to the end of `blocks` blocks, or of its
    /// last block if it is longer.
    pub fn seal(&self, contents: &[u8], blocks: u32) -> Vec<u8> {
        let mut enc = Enc::with_capacity(SEGMENT_BYTES + contents.len());
        enc.u64(self.id).u32(self.number).u32(u32::from(self.is_index)).raw(contents);
        let mut bytes = seal(SEGMENT_MAGIC, &enc.finish());
        let len = bytes.len().next_multiple_of(BLOCK_BYTES).max(blocks as usize * BLOCK_BYTES);
        bytes.resize(len, 0);
        bytes
    }

    /// The head and the contents of a segment.
    pub fn open(bytes: &[u8]) -> Result<(Self, &[u8]), DecodeError> {
        let mut dec = open("segment of a copy of the map", SEGMENT_MAGIC, bytes)?;
        let (id, number, is_index) = (dec.u64()?, dec.u32()?, dec.u32()?);
        let is_index = match is_index {
            0 => false,
            1 => true,
            other => return Err(dec.unknown("kind of a segment", other.into())),
        };
        let contents = dec.raw(dec.left())?;
        Ok((Self { id, number, is_index }, contents))
    }
}

/// Adds a row to the contents of a segment.
pub fn put_row(contents: &mut Enc, key: &[u8], value: &[u8]) {
    contents.bytes(key).bytes(value);
}

/// Bytes that a row takes in a segment.
pub fn row_bytes(key: &[u8], value: &[u8]) -> usize {
    8 + key.len() + value.len()
}

/// Keys and values.
pub type Rows<'a> = Vec<(&'a [u8], &'a [u8])>;

/// The rows in the contents of a segment.
pub fn take_rows(contents: &[u8]) -> Result<Rows<'_>, DecodeError> {
    let mut dec = Dec::new("rows of a copy of the map", contents);
    let mut rows = Vec::new();
    while dec.left() > 0 {
        rows.push((dec.bytes()?, dec.bytes()?));
    }
    Ok(rows)
}

/// The contents of a segment of the index.
pub fn encode_index(pieces: &[Vec<Run>]) -> Vec<u8> {
    let mut enc = Enc::new();
    put_pieces(&mut enc, pieces);
    enc.finish()
}

/// Bytes that the pieces of one segment take in the index.
pub fn index_bytes(runs: &[Run]) -> usize {
    4 + 12 * runs.len()
}

/// Decodes the contents of a segment of the index.
pub fn decode_index(contents: &[u8]) -> Result<Pieces, DecodeError> {
    let mut dec = Dec::new("index of a copy of the map", contents);
    let pieces = take_pieces(&mut dec)?;
    dec.end()?;
    Ok(pieces)
}

/// Blocks of these runs.
pub(super) fn blocks_in(runs: &[Run]) -> u64 {
    runs.iter().map(|(_, count)| count).sum()
}

/// Stripes that the two anchors take, of so many blocks each.
pub fn anchor_stripes(stripe_blocks: u64) -> u64 {
    let stripes = 2 * ANCHOR_BLOCKS.div_ceil(stripe_blocks);
    assert!(stripes * stripe_blocks >= 2 * ANCHOR_BLOCKS, "both have room");
    stripes
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::{Id128, hex};

    fn anchor() -> Anchor {
        Anchor {
            array: ArrayId(Id128([8; 16])),
            serial: 3,
            id: 0x0102_0304_0506_0708,
            version: Version(77),
            created_ns: -5,
            rows: 9,
            bytes: 1000,
            chunk_blocks: 256,
            segments: 2,
            index: vec![vec![(5, 1), (9, 2)], vec![(1 << 40, 256)]],
        }
    }

    #[test]
    fn an_anchor_is_as_in_the_first_release() {
        let bytes = anchor().encode();
        let wanted = "50454e4d4150414e CRC 01000000 78000000 08080808080808080808080808080808 \
                      0300000000000000 0807060504030201 4d00000000000000 fbffffffffffffff 0900000000000000 \
                      e803000000000000 00010000 02000000 02000000 02000000 0500000000000000 01000000 \
                      0900000000000000 02000000 01000000 0000000000010000 00010000";
        let crc = hex(&crc32c(&bytes[COVERED_FROM..]).to_le_bytes());
        assert_eq!(hex(&bytes), wanted.replace("CRC", &crc).replace(' ', ""));
        let mut block = bytes.clone();
        block.resize(BLOCK_BYTES, 0);
        assert_eq!(Anchor::decode(&block), Ok(anchor()));
        for bit in 0..bytes.len() * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert!(Anchor::decode(&block).is_err(), "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
        block[bytes.len()] = 1;
        assert!(matches!(Anchor::decode(&block), Err(DecodeError::Unknown { .. })));
        assert!(Anchor::decode(&[0; BLOCK_BYTES]).is_err());
    }

    #[test]
    fn a_segment_is_as_in_the_first_release() {
        let head = SegmentHead { id: 7, number: 2, is_index: false };
        let mut rows = Enc::new();
        put_row(&mut rows, b"key", b"value");
        put_row(&mut rows, b"other", b"");
        let rows = rows.finish();
        assert_eq!(rows.len(), row_bytes(b"key", b"value") + row_bytes(b"other", b""));
        let bytes = head.seal(&rows, 1);
        assert_eq!((bytes.len(), head.seal(&rows, 3).len()), (BLOCK_BYTES, 3 * BLOCK_BYTES));
        let wanted = "01000000 2d000000 0700000000000000 02000000 00000000 \
                      03000000 6b6579 05000000 76616c7565 05000000 6f74686572 00000000";
        assert_eq!(hex(&bytes[12..12 + 8 + 45]), wanted.replace(' ', ""));
        let (found, contents) = SegmentHead::open(&bytes).unwrap();
        assert_eq!(found, head);
        assert_eq!(take_rows(contents), Ok(vec![(&b"key"[..], &b"value"[..]), (b"other", b"")]));
        assert!(take_rows(&contents[..contents.len() - 1]).is_err());
        let index = anchor().index;
        let sealed = SegmentHead { is_index: true, ..head }.seal(&encode_index(&index), 0);
        let (found, contents) = SegmentHead::open(&sealed).unwrap();
        assert!(found.is_index);
        assert_eq!(decode_index(contents), Ok(index.clone()));
        assert_eq!(contents.len(), 4 + index.iter().map(|runs| index_bytes(runs)).sum::<usize>());
        for bad in [vec![vec![]], vec![vec![(1, 0)]]] {
            assert!(decode_index(&encode_index(&bad)).is_err(), "{bad:?}");
        }
    }
}
