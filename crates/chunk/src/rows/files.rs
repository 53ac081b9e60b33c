//! Rows of files and of accounts. Byte map: docs/format/kv.md.
//!
//! A file has a row exactly while it holds blocks or was truncated. The row of an account has the blocks of
//! all files of one owner, and changes in the transaction of the files' rows.

use super::{ACCOUNT, ChunkKey, FILE};
use penstock_base::codec::{row_key, row_words};
use penstock_base::{Birth, Branch, Dec, DecodeError, Enc, FileId};

const FORMAT: u8 = 1;
const ACCOUNT_FORMAT: u8 = 1;
/// No rows of earlier truncate generations are left that a truncation has made void.
const NOTHING_VOID: u64 = u64::MAX;
/// Most blocks that a row can say. Sums of a few of them do not overflow.
pub const MOST_BLOCKS: u64 = penstock_base::MOST_WITH_ROOM;

/// To whom the blocks of a file are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Project; 0 is none.
    pub project: u32,
}

/// A file on a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRow {
    /// The truncate generation. Changes that were sent under an earlier one are rejected.
    pub truncations: u64,
    /// Blocks that the file holds, preallocated ones included.
    pub blocks: u64,
    /// To whom they are counted.
    pub owner: Owner,
    /// The number of the change that made it the owner, by which changes that reach several targets are
    /// ordered; 0 on the target of the file's own stack.
    pub owner_number: u64,
}

impl FileRow {
    /// The key of the row of a file.
    pub fn key(file: FileId, birth: Birth) -> Vec<u8> {
        row_key(FILE, &[file.branch.0, file.ino.0, birth.suffix()])
    }

    /// Encodes the row's value.
    pub fn encode(&self) -> Vec<u8> {
        let Owner { uid, gid, project } = self.owner;
        let can_be_read = (self.truncations | self.owner_number) >> 63 == 0 && self.blocks <= MOST_BLOCKS;
        assert!(can_be_read, "{self:?} can be read back");
        let mut enc = Enc::new();
        // Below which truncate generation rows are void, and from which block on: none are.
        enc.u8(FORMAT).u64(self.truncations).u64(0).u64(NOTHING_VOID).u64(self.blocks);
        enc.u64(self.owner_number).u32(uid).u32(gid).u32(project);
        enc.finish()
    }

    /// Decodes the row's value.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("file row", value);
        let format = dec.u8()?;
        dec.check_format(format, FORMAT)?;
        let (truncations, void_below, void_from) = (dec.counter()?, dec.u64()?, dec.u64()?);
        dec.check_known("void truncate generation", void_below, 0)?;
        dec.check_known("first void block", void_from, NOTHING_VOID)?;
        let (blocks, owner_number) = (dec.counter_with_room()?, dec.counter()?);
        let owner = Owner { uid: dec.u32()?, gid: dec.u32()?, project: dec.u32()? };
        dec.end()?;
        Ok(Self { truncations, blocks, owner, owner_number })
    }
}

/// Decodes the key of a file's row.
pub fn decode_file_key(key: &[u8]) -> Result<(FileId, Birth), DecodeError> {
    let [branch, ino, birth] = row_words("file row key", FILE, key)?;
    Ok((FileId::of_numbers(branch, ino), Birth::of_suffix(birth)))
}

/// The file of which this is the key of a row: of its map, or its own. None if it is another key.
pub fn file_of_key(key: &[u8]) -> Option<FileId> {
    let of_map = ChunkKey::decode(key).map(|(chunk, _)| chunk.file);
    of_map.or(decode_file_key(key).map(|(file, _)| file)).ok()
}

/// Range of the keys of all files; the second key is excluded.
pub fn all_files() -> (Vec<u8>, Vec<u8>) {
    (vec![FILE], vec![FILE + 1])
}

impl Owner {
    /// The key of the account of this owner in a branch.
    pub fn account(&self, branch: Branch) -> Vec<u8> {
        let mut key = row_key(ACCOUNT, &[branch.0]);
        for number in [self.uid, self.gid, self.project] {
            key.extend_from_slice(&number.to_be_bytes());
        }
        key
    }
}

/// Decodes the key of an account's row.
pub fn decode_account_key(key: &[u8]) -> Result<(Branch, Owner), DecodeError> {
    let bad = DecodeError::Bad { what: "account key", why: "wrong tag or length" };
    let rest = key.strip_prefix(&[ACCOUNT]).filter(|rest| rest.len() == 20).ok_or(bad)?;
    let number = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().expect("four bytes"));
    let branch = Branch(u64::from_be_bytes(rest[..8].try_into().expect("eight bytes")));
    Ok((branch, Owner { uid: number(8), gid: number(12), project: number(16) }))
}

/// Encodes the value of an account's row: its blocks.
pub fn encode_account(blocks: u64) -> Vec<u8> {
    assert!(blocks <= MOST_BLOCKS, "{blocks} blocks can be read back");
    let mut enc = Enc::new();
    enc.u8(ACCOUNT_FORMAT).u64(blocks);
    enc.finish()
}

/// Decodes the value of an account's row.
pub fn decode_account(value: &[u8]) -> Result<u64, DecodeError> {
    let mut dec = Dec::new("account", value);
    let format = dec.u8()?;
    dec.check_format(format, ACCOUNT_FORMAT)?;
    let blocks = dec.counter_with_room()?;
    dec.end()?;
    Ok(blocks)
}

/// Range of the keys of all accounts; the second key is excluded.
pub fn all_accounts() -> (Vec<u8>, Vec<u8>) {
    (vec![ACCOUNT], vec![ACCOUNT + 1])
}
