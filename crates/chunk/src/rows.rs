//! Rows of the target in the key-value store. Format: docs/format/kv.md.
//!
//! Public for the fuzzer and for tools that inspect a store; only this crate writes rows.

mod counters;
mod files;
mod loans;
mod map;
#[cfg(test)]
mod tests;

pub use counters::Counter;
pub use files::{
    FileRow, MOST_BLOCKS, Owner, all_accounts, all_files, decode_account, decode_account_key,
    decode_file_key, encode_account, file_of_key,
};
pub use loans::{Borrowed, Lent, LentKey, Loan, all_lent, all_loans};
pub use map::{Extent, MapRow};

use penstock_base::codec::{row_key, row_words};
use penstock_base::{BLOCK_BYTES, Birth, Branch, Dec, DecodeError, Enc, FileId, Ino, MAX_FILE_BYTES};

/// First byte of a map row's key.
const MAP: u8 = 0x20;
/// First byte of an allocation group's key.
const GROUP: u8 = 0x21;
/// First byte of a file row's key.
const FILE: u8 = 0x22;
/// First byte of the key of an account's row.
const ACCOUNT: u8 = 0x23;
/// First byte of the key of a loan to another target.
const LENT: u8 = 0x24;
/// First byte of the key of a family's sequence.
const SEQUENCE: u8 = 0x25;
/// The key of the counter of loans.
const LOANS: u8 = 0x26;
/// First byte of the key of a row with counts of allocation groups.
const COUNTS: u8 = 0x27;
/// First byte of the key of a loan of another target.
const LOAN: u8 = 0x28;
/// The first tag behind those of a target.
pub const END: u8 = 0x29;
/// Groups of 32,768 blocks, whatever the stripes, had format 1.
const GROUP_FORMAT: u8 = 2;
const COUNTS_FORMAT: u8 = 1;
/// Words of 64 bits in a group's row.
pub const GROUP_WORDS: usize = 512;
/// Groups whose counts are in one row.
pub const GROUPS_IN_A_ROW: u64 = 128;

/// Identifies a chunk: a fixed-size piece of a file of a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkKey {
    /// The file.
    pub file: FileId,
    /// Index of the chunk in the file.
    pub index: u64,
}

impl ChunkKey {
    /// Returns the row's key. It is big-endian, so that the chunks of a file are in order. The inverted birth
    /// comes last, so that the rows of one chunk from different snapshots will be adjacent, the newest first.
    pub fn row(&self, birth: Birth) -> Vec<u8> {
        row_key(MAP, &[self.file.branch.0, self.file.ino.0, self.index, birth.suffix()])
    }

    /// The first block of the chunk in its file; none for a chunk that no file has, which only a damaged row
    /// names.
    pub(crate) fn first_block(&self, chunk_blocks: u32) -> Option<u64> {
        (self.index < chunks_of_a_file(chunk_blocks)).then(|| self.index * u64::from(chunk_blocks))
    }

    /// Decodes a row's key into the chunk and its birth.
    pub fn decode(key: &[u8]) -> Result<(Self, Birth), DecodeError> {
        let [branch, ino, index, birth] = row_words("map row key", MAP, key)?;
        Ok((Self { file: FileId::of_numbers(branch, ino), index }, Birth::of_suffix(birth)))
    }
}

/// Inode numbers below this one are of copies of the map: each is the serial number of one.
pub(crate) const COPIES_END: u64 = 1 << 40;

/// True for the number of a copy of the map, which has blocks and no inode.
pub fn is_copy(ino: Ino) -> bool {
    ino.0 < COPIES_END
}

/// Decodes a map row. Rows of other branches or births are an error: this release does not support them.
pub(crate) fn read_row(key: &[u8], value: &[u8]) -> Result<(ChunkKey, MapRow), DecodeError> {
    let (chunk, birth) = ChunkKey::decode(key)?;
    check_key("map row key", chunk.file.branch, birth)?;
    Ok((chunk, MapRow::decode(value, birth)?))
}

/// Refuses the rows of other branches or births: this release does not support them.
pub(crate) fn check_key(what: &'static str, branch: Branch, birth: Birth) -> Result<(), DecodeError> {
    match (branch, birth) {
        (Branch::MAIN, Birth::FIRST) => Ok(()),
        (Branch::MAIN, _) => Err(DecodeError::Unknown { what, field: "birth", found: birth.0 }),
        _ => Err(DecodeError::Unknown { what, field: "branch", found: branch.0 }),
    }
}

/// Returns the number of chunks in a file of the maximum size.
pub fn chunks_of_a_file(chunk_blocks: u32) -> u64 {
    MAX_FILE_BYTES.div_ceil(u64::from(chunk_blocks) * BLOCK_BYTES as u64)
}

/// Returns the range of keys of the rows of a file's chunks from `index` on; the second key is excluded.
pub fn map_range(file: FileId, index: u64) -> (Vec<u8>, Vec<u8>) {
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

/// Range of the keys of rows that this release does not make: sequences of families.
pub fn all_reserved() -> (Vec<u8>, Vec<u8>) {
    (vec![SEQUENCE], vec![LOANS])
}

/// Range of the keys of the counter of loans.
pub fn all_counters() -> (Vec<u8>, Vec<u8>) {
    (vec![LOANS], vec![LOANS + 1])
}

/// Returns the key of an allocation group's row.
pub fn group_key(group: u64) -> Vec<u8> {
    row_key(GROUP, &[group])
}

/// Returns the range of keys of all allocation groups; the second key is excluded.
pub fn all_groups() -> (Vec<u8>, Vec<u8>) {
    (vec![GROUP], vec![GROUP + 1])
}

/// Encodes the value of an allocation group's row: one bit per block, set if the block is used.
pub fn encode_group(words: &[u64]) -> Vec<u8> {
    let mut enc = Enc::with_capacity(1 + 8 * words.len());
    enc.u8(GROUP_FORMAT);
    words.iter().for_each(|word| {
        enc.u64(*word);
    });
    enc.finish()
}

/// Decodes the value of an allocation group's row of `words` words.
pub fn decode_group(value: &[u8], words: usize) -> Result<Vec<u64>, DecodeError> {
    let mut dec = Dec::new("allocation group", value);
    let format = dec.u8()?;
    dec.check_format(format, GROUP_FORMAT)?;
    let found = (0..words).map(|_| dec.u64()).collect::<Result<_, _>>()?;
    dec.end()?;
    Ok(found)
}

/// Returns the group that a row's key names; `None` if it is no key of an allocation group.
pub fn decode_group_key(key: &[u8]) -> Option<u64> {
    row_words("allocation group key", GROUP, key).ok().map(|[group]| group)
}

/// Counts of an allocation group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Used blocks.
    pub used: u16,
    /// Stripes without a used block.
    pub empty: u16,
}

impl Counts {
    /// Some bits of the group may be lost. No group has so many empty stripes.
    pub const SUSPECT: Self = Self { used: u16::MAX, empty: u16::MAX };
}

/// The key of the row with the counts of groups `row` * [`GROUPS_IN_A_ROW`] and those that follow.
pub fn counts_key(row: u64) -> Vec<u8> {
    row_key(COUNTS, &[row])
}

/// The row that a key names; none if it is no key of counts.
pub fn decode_counts_key(key: &[u8]) -> Option<u64> {
    row_words("key of group counts", COUNTS, key).ok().map(|[row]| row)
}

/// The range of keys of all counts; the second key is excluded.
pub fn all_counts() -> (Vec<u8>, Vec<u8>) {
    (vec![COUNTS], vec![COUNTS + 1])
}

/// Encodes the counts of consecutive groups.
pub fn encode_counts(counts: &[Counts]) -> Vec<u8> {
    let mut enc = Enc::with_capacity(1 + 4 * counts.len());
    enc.u8(COUNTS_FORMAT);
    for Counts { used, empty } in counts {
        enc.u16(*used).u16(*empty);
    }
    enc.finish()
}

/// Decodes the counts of so many groups.
pub fn decode_counts(value: &[u8], groups: usize) -> Result<Vec<Counts>, DecodeError> {
    let mut dec = Dec::new("group counts", value);
    let format = dec.u8()?;
    dec.check_format(format, COUNTS_FORMAT)?;
    let found =
        (0..groups).map(|_| Ok(Counts { used: dec.u16()?, empty: dec.u16()? })).collect::<Result<_, _>>()?;
    dec.end()?;
    Ok(found)
}
