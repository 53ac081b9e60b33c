//! Rows of the target in the key-value store. Format: docs/format/kv.md.
//!
//! Public for the fuzzer and for tools that inspect a store; only this crate writes rows.

use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Birth, Branch, Dec, DecodeError, Enc, FileKey, Ino, MAX_FILE_BYTES};

/// First byte of a map row's key.
const MAP: u8 = 0x20;
/// First byte of an allocation group's key.
const GROUP: u8 = 0x21;
const FORMAT: u8 = 1;

/// Identifies a chunk: a fixed-size piece of a file of a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey {
    /// The file.
    pub file: FileKey,
    /// Index of the chunk in the file.
    pub index: u64,
}

/// A run of blocks of a chunk on the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First block in the chunk.
    pub first: u32,
    /// Number of blocks.
    pub count: u32,
    /// First block on the volume.
    pub block: u64,
    /// Preallocated: the blocks belong to the file, contain none of its data yet, and read as zeros.
    pub preallocated: bool,
}

/// Transform of an extent whose data is stored as written.
const PLAIN: u8 = 0;
/// Transform of a preallocated extent, which reads as zeros.
const PREALLOCATED: u8 = 1;

impl ChunkKey {
    /// Returns the row's key. It is big-endian, so that the chunks of a file are in order. The inverted birth
    /// comes last, so that the rows of one chunk from different snapshots will be adjacent, the newest first.
    pub fn row(&self, birth: Birth) -> Vec<u8> {
        let mut key = vec![MAP];
        for word in [self.file.branch.0, self.file.ino.0, self.index, birth.suffix()] {
            key.extend_from_slice(&word.to_be_bytes());
        }
        key
    }

    /// The first block of the chunk in its file; none for a chunk that no file has, which only a damaged row
    /// names.
    pub(crate) fn first_block(&self, chunk_blocks: u32) -> Option<u64> {
        (self.index < chunks_of_a_file(chunk_blocks)).then(|| self.index * u64::from(chunk_blocks))
    }

    /// Decodes a row's key into the chunk and its birth.
    pub fn decode(key: &[u8]) -> Result<(Self, Birth), DecodeError> {
        let bad = DecodeError::Bad { what: "map row key", why: "wrong length" };
        let words: Vec<u64> = key
            .get(1..)
            .filter(|rest| rest.len() == 32 && key[0] == MAP)
            .ok_or(bad)?
            .chunks_exact(8)
            .map(|word| u64::from_be_bytes(word.try_into().expect("eight bytes")))
            .collect();
        let file = FileKey { branch: Branch(words[0]), ino: Ino(words[1]) };
        Ok((Self { file, index: words[2] }, Birth::of_suffix(words[3])))
    }
}

/// Returns the number of chunks in a file of the maximum size.
pub fn chunks_of_a_file(chunk_blocks: u32) -> u64 {
    MAX_FILE_BYTES.div_ceil(u64::from(chunk_blocks) * BLOCK_BYTES as u64)
}

/// Returns the range of keys of the rows of a file's chunks from `index` on; the second key is excluded.
pub fn map_range(file: FileKey, index: u64) -> (Vec<u8>, Vec<u8>) {
    let row = ChunkKey { file, index }.row(Birth(u64::MAX));
    let until = after_all_with(&row[..17]);
    (row, until)
}

/// Returns the first key behind all keys that begin with `prefix`, whose first byte is a tag below 255.
fn after_all_with(prefix: &[u8]) -> Vec<u8> {
    let mut key = prefix.to_vec();
    while key.pop_if(|byte| *byte == u8::MAX).is_some() {}
    if let Some(last) = key.last_mut() {
        *last += 1;
    }
    key
}

/// Returns the range of keys of all map rows; the second key is excluded.
pub fn all_maps() -> (Vec<u8>, Vec<u8>) {
    (vec![MAP], vec![MAP + 1])
}

/// Encodes the value of a map row. With compression, the stored length will differ from `count`.
pub fn encode_map(extents: &[Extent]) -> Vec<u8> {
    let mut enc = Enc::new();
    enc.u8(FORMAT).u32(to_u32(extents.len()));
    for extent in extents {
        enc.u32(extent.first).u32(extent.count).u64(extent.block);
        enc.u8(if extent.preallocated { PREALLOCATED } else { PLAIN }).u32(extent.count);
    }
    enc.finish()
}

/// Decodes the value of a map row. Fails if extents overlap, are out of order, or have an end that overflows.
pub fn decode_map(value: &[u8]) -> Result<Vec<Extent>, DecodeError> {
    let mut dec = Dec::new("map row", value);
    let format = dec.u8()?;
    dec.check_format(format, FORMAT)?;
    let count = dec.u32()?;
    let mut extents: Vec<Extent> = Vec::new();
    for _ in 0..count {
        let (first, count, block) = (dec.u32()?, dec.u32()?, dec.u64()?);
        let (transform, stored) = (dec.u8()?, dec.u32()?);
        let preallocated = match transform {
            PLAIN | PREALLOCATED if stored == count => transform == PREALLOCATED,
            _ => return Err(dec.unknown("transform", transform.into())),
        };
        if first.checked_add(count).is_none() || block.checked_add(count.into()).is_none() {
            return Err(dec.bad("an extent without an end"));
        }
        if extents.last().is_some_and(|last| last.first + last.count > first) {
            return Err(dec.bad("extents overlap"));
        }
        extents.push(Extent { first, count, block, preallocated });
    }
    Ok(extents)
}

/// Returns the key of an allocation group's row.
pub fn group_key(group: u64) -> Vec<u8> {
    let mut key = vec![GROUP];
    key.extend_from_slice(&group.to_be_bytes());
    key
}

/// Returns the range of keys of all allocation groups; the second key is excluded.
pub fn all_groups() -> (Vec<u8>, Vec<u8>) {
    (vec![GROUP], vec![GROUP + 1])
}

/// Encodes the value of an allocation group's row: one bit per block, set if the block is used.
pub fn encode_group(words: &[u64]) -> Vec<u8> {
    let mut enc = Enc::new();
    enc.u8(FORMAT);
    words.iter().for_each(|word| {
        enc.u64(*word);
    });
    enc.finish()
}

/// Decodes the value of an allocation group's row of `words` words.
pub fn decode_group(value: &[u8], words: usize) -> Result<Vec<u64>, DecodeError> {
    let mut dec = Dec::new("allocation group", value);
    let format = dec.u8()?;
    dec.check_format(format, FORMAT)?;
    (0..words).map(|_| dec.u64()).collect()
}

/// Returns the group that a row's key names; `None` if it is no key of an allocation group.
pub fn decode_group_key(key: &[u8]) -> Option<u64> {
    key.first().filter(|tag| **tag == GROUP)?;
    Some(u64::from_be_bytes(key.get(1..)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{chunk_key, extent};

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn rows_come_back() {
        let key = ChunkKey { file: FileKey { branch: Branch(1), ino: Ino(2) }, index: 3 };
        assert_eq!(ChunkKey::decode(&key.row(Birth(4))), Ok((key, Birth(4))));
        let extents = [extent(0, 2, 9), Extent { preallocated: true, ..extent(5, 1, 77) }];
        assert_eq!(decode_map(&encode_map(&extents)).as_deref(), Ok(&extents[..]));
        assert!(decode_map(&encode_map(&[extents[1], extents[0]])).is_err());
        assert!(decode_map(&[2]).is_err());
    }

    #[test]
    fn keys_and_rows_are_as_in_the_first_release() {
        let key = ChunkKey { file: FileKey::main(Ino((1 << 40) | 7)), index: 3 };
        let (zero, first) = ("0000000000000000", "fffffffffffffffe");
        assert_eq!(hex(&key.row(Birth::FIRST)), format!("20{zero}00000100000000070000000000000003{first}"));
        assert_eq!(hex(&group_key(0x0102)), "210000000000000102");
        assert_eq!(decode_group_key(&group_key(0x0102)), Some(0x0102));

        let extents = [extent(0, 2, 9), extent(5, 1, 1 << 40)];
        let wanted = "01 02000000 00000000 02000000 0900000000000000 00 02000000 \
                      05000000 01000000 0000000000010000 00 01000000"
            .replace(' ', "");
        assert_eq!(hex(&encode_map(&extents)), wanted);
        assert_eq!(decode_map(&encode_map(&extents)).as_deref(), Ok(&extents[..]));
        assert_eq!(hex(&encode_map(&[])), "0100000000");
        let preallocated = [Extent { preallocated: true, ..extent(5, 1, 9) }];
        let wanted = "01 01000000 05000000 01000000 0900000000000000 01 01000000".replace(' ', "");
        assert_eq!(hex(&encode_map(&preallocated)), wanted);
        let mut unknown = encode_map(&preallocated);
        unknown[21] = 2;
        assert!(decode_map(&unknown).unwrap_err().to_string().contains("transform"));

        let words = [1, 0x0102_0304_0506_0708];
        assert_eq!(hex(&encode_group(&words)), "0101000000000000000807060504030201");
        assert_eq!(decode_group(&encode_group(&words), 2).as_deref(), Ok(&words[..]));
    }

    /// Regression test: the ends of extents were computed with sums that may overflow.
    #[test]
    fn extents_without_an_end_are_refused() {
        let good = extent(1, 1, 1);
        for bad in [
            Extent { first: u32::MAX, ..good },
            Extent { count: u32::MAX, ..good },
            Extent { block: u64::MAX, ..good },
        ] {
            assert!(decode_map(&encode_map(&[bad, good])).is_err(), "{bad:?}");
            assert!(decode_map(&encode_map(&[bad])).is_err(), "{bad:?}");
        }
    }

    /// Regression test: the end of a range of keys was computed as the inode number plus one, which
    /// overflowed for the last.
    #[test]
    fn the_last_inode_has_a_range_of_chunks() {
        let last = ChunkKey { file: FileKey::main(Ino(u64::MAX)), index: u64::MAX };
        let (from, until) = map_range(last.file, 7);
        assert!(from < last.row(Birth(u64::MAX)) && last.row(Birth(u64::MAX)) < until);
        assert!(
            until
                <= ChunkKey { file: FileKey { branch: Branch(1), ino: Ino(0) }, index: 0 }.row(Birth::FIRST)
        );
        let (_, until) = map_range(FileKey::main(Ino(6)), 0);
        assert!(until <= ChunkKey { file: FileKey::main(Ino(7)), index: 0 }.row(Birth::FIRST));
        assert_eq!(decode_group_key(&[&[MAP], &group_key(1)[1..]].concat()), None);
    }

    #[test]
    fn bytes_that_are_no_row_are_refused() {
        let map = encode_map(&[extent(0, 2, 9), extent(5, 1, 77)]);
        let changed = |at: usize, byte: u8| {
            let mut row = map.clone();
            row[at] = byte;
            row
        };
        // Offsets in a row: 0 format, 1 count, then extents of 21 bytes with the transform in byte 16.
        for (what, row, unknown) in [
            ("nothing", vec![], false),
            ("another format", changed(0, 2), true),
            ("more extents than bytes", changed(1, 3), false),
            ("very many extents", changed(4, 0xff), false),
            ("an unknown transform", changed(5 + 16, 2), true),
            ("another stored length", changed(5 + 17, 3), true),
            ("extents in the wrong order", changed(5, 6), false),
            ("extents that overlap", changed(5 + 21, 1), false),
        ] {
            let error = decode_map(&row).expect_err(what);
            assert_eq!(matches!(error, DecodeError::Unknown { .. }), unknown, "{what}: {error}");
        }
        for len in 0..map.len() {
            assert!(decode_map(&map[..len]).is_err(), "the first {len} bytes");
        }
        assert_eq!(
            decode_map(&changed(1, 1)).unwrap(),
            [extent(0, 2, 9)],
            "bytes behind the row are ignored"
        );
        let group = encode_group(&[1, 2]);
        for len in 0..group.len() {
            assert!(decode_group(&group[..len], 2).is_err(), "the first {len} bytes");
        }
        assert!(decode_group(&group, 3).is_err(), "a group has all its words");
    }

    #[test]
    fn keys_of_other_rows_are_refused() {
        let key = chunk_key(2, 3).row(Birth(4));
        assert_eq!(ChunkKey::decode(&key), Ok((chunk_key(2, 3), Birth(4))));
        for len in 0..key.len() {
            assert!(ChunkKey::decode(&key[..len]).is_err(), "the first {len} bytes");
            assert_eq!(decode_group_key(&key[..len]), None, "the first {len} bytes");
        }
        let longer = [&key[..], &[0]].concat();
        let other_tag = [&[GROUP], &key[1..]].concat();
        for key in [longer, other_tag] {
            assert!(ChunkKey::decode(&key).is_err(), "{key:?}");
        }
        let group = group_key(5);
        for len in 0..group.len() {
            assert_eq!(decode_group_key(&group[..len]), None, "the first {len} bytes");
        }
        assert_eq!(decode_group_key(&[&group[..], &[0]].concat()), None);
    }

    #[test]
    fn a_range_has_the_rows_of_its_file_from_its_chunk_on() {
        for (ino, index) in [(2, 0), (2, 7), (255, 1), (u64::MAX, 0), (2, u64::MAX)] {
            let (from, until) = map_range(FileKey::main(Ino(ino)), index);
            let (first, end) = all_maps();
            assert!(first <= from && from < until && until <= end, "{ino} from {index} on");
            for (other, at, birth) in [(ino, index, 0), (ino, index, 9), (ino, u64::MAX, u64::MAX)] {
                let row = chunk_key(other, at).row(Birth(birth));
                assert!(from <= row && row < until, "chunk {at} of {other} is in the range");
            }
            let before = index.checked_sub(1).map(|index| chunk_key(ino, index).row(Birth(u64::MAX)));
            assert!(before.is_none_or(|row| row < from), "{ino} from {index} on");
            let next = ino.checked_add(1).map(|ino| chunk_key(ino, 0).row(Birth::FIRST));
            assert!(next.is_none_or(|row| until <= row), "{ino} from {index} on");
        }
    }
}
