//! Keys of the name space's rows. Format: docs/format/kv.md. All numbers in keys are big-endian.
//!
//! Keys of what snapshots will keep have the branch after their tag and end in the birth, so that generations lie next
//! to each other; today both are 0. The queue of removed files and the results of sessions belong to no snapshot.

use penstock_base::{Dec, DecodeError, Enc, Id128, Ino};

const FS: u8 = 0x01;
const INODE: u8 = 0x10;
const ENTRY: u8 = 0x11;
const XATTR: u8 = 0x12;
const REMOVED: u8 = 0x13;
const RESULT: u8 = 0x14;
const FORMAT: u8 = 1;

/// Rows with `from <= key < until`.
pub(crate) type Range = (Vec<u8>, Vec<u8>);

fn key(tag: u8, words: &[u64]) -> Vec<u8> {
    let mut key = vec![tag];
    words.iter().for_each(|word| key.extend_from_slice(&word.to_be_bytes()));
    key
}

/// The row of the file system.
pub(crate) fn fs_key() -> Vec<u8> {
    vec![FS]
}

/// An inode's row.
pub(crate) fn inode_key(ino: Ino) -> Vec<u8> {
    key(INODE, &[0, ino.0, 0])
}

/// All inodes.
pub(crate) fn all_inodes() -> Range {
    (vec![INODE], vec![INODE + 1])
}

/// A directory entry's row, at its cookie.
pub(crate) fn entry_key(dir: Ino, cookie: u64) -> Vec<u8> {
    key(ENTRY, &[0, dir.0, cookie, 0])
}

/// Whether a key is a directory entry's.
pub(crate) fn is_entry_key(key: &[u8]) -> bool {
    key.first() == Some(&ENTRY)
}

/// Entries of a directory with `from <= cookie < until`.
pub(crate) fn entry_range(dir: Ino, from: u64, until: u64) -> Range {
    (key(ENTRY, &[0, dir.0, from]), key(ENTRY, &[0, dir.0, until]))
}

/// All directory entries.
pub(crate) fn all_entries() -> Range {
    (vec![ENTRY], vec![ENTRY + 1])
}

/// Directory and cookie of an entry's key.
pub(crate) fn decode_entry_key(key: &[u8]) -> Result<(Ino, u64), DecodeError> {
    let bad = DecodeError::Bad { what: "directory entry key", why: "wrong length" };
    let words: &[u8; 32] = key.get(1..).and_then(|rest| rest.try_into().ok()).ok_or(bad)?;
    let word = |at: usize| u64::from_be_bytes(words[at * 8..(at + 1) * 8].try_into().expect("eight bytes"));
    Ok((Ino(word(1)), word(2)))
}

/// An extended attribute's row: the name, which has no NUL, ends in one, and then comes the birth.
pub(crate) fn xattr_key(ino: Ino, name: &[u8]) -> Vec<u8> {
    [&key(XATTR, &[0, ino.0])[..], name, &[0], &0u64.to_be_bytes()].concat()
}

/// All extended attributes of an inode.
pub(crate) fn xattr_range(ino: Ino) -> Range {
    (key(XATTR, &[0, ino.0]), key(XATTR, &[0, ino.0 + 1]))
}

/// The name in an extended attribute's key.
pub(crate) fn xattr_name(key: &[u8]) -> &[u8] {
    key.get(17..key.len().saturating_sub(9)).unwrap_or_default()
}

/// The value of rows whose keys say everything: only their format.
pub(crate) fn bare_value() -> Vec<u8> {
    vec![FORMAT]
}

/// The row of a file that has no name any more.
pub(crate) fn removed_key(ino: Ino) -> Vec<u8> {
    key(REMOVED, &[0, ino.0])
}

/// All files without a name.
pub(crate) fn all_removed() -> Range {
    (vec![REMOVED], vec![REMOVED + 1])
}

/// The inode in the key of a file without a name.
pub(crate) fn removed_ino(key: &[u8]) -> Option<Ino> {
    Some(Ino(u64::from_be_bytes(key.get(9..17)?.try_into().ok()?)))
}

/// The stored result of a session's request.
pub(crate) fn result_key(session: u64, slot: u64) -> Vec<u8> {
    key(RESULT, &[session, slot])
}

/// All stored results.
pub(crate) fn all_results() -> Range {
    (vec![RESULT], vec![RESULT + 1])
}

/// The file system's own row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FsRow {
    pub(crate) id: Id128,
    pub(crate) name: String,
    pub(crate) created_ns: i64,
    /// Secret of the hash that places names in directories.
    pub(crate) secret: Id128,
    /// Inode numbers up to here may be in use.
    pub(crate) reserved_ino: u64,
    /// Sessions up to here may exist.
    pub(crate) last_session: u64,
    pub(crate) chunk_blocks: u32,
}

impl FsRow {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.u8(FORMAT).id(self.id).i64(self.created_ns).id(self.secret).u64(self.reserved_ino);
        enc.u64(self.last_session).u32(self.chunk_blocks).bytes(self.name.as_bytes());
        enc.finish()
    }

    pub(crate) fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("file system row", value);
        let format = dec.u8()?;
        if format != FORMAT {
            return Err(dec.unknown("format", format.into()));
        }
        let (id, created_ns, secret) = (dec.id()?, dec.i64()?, dec.id()?);
        let (reserved_ino, last_session, chunk_blocks) = (dec.u64()?, dec.u64()?, dec.u32()?);
        let name = String::from_utf8_lossy(dec.bytes()?).into_owned();
        Ok(Self { id, name, created_ns, secret, reserved_ino, last_session, chunk_blocks })
    }
}

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) ino: Ino,
    /// Type bits of the inode's mode.
    pub(crate) kind: u32,
    pub(crate) name: Vec<u8>,
}

impl Entry {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.u8(FORMAT).u64(self.ino.0).u32(self.kind).bytes(&self.name);
        enc.finish()
    }

    pub(crate) fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("directory entry", value);
        let format = dec.u8()?;
        if format != FORMAT {
            return Err(dec.unknown("format", format.into()));
        }
        Ok(Self { ino: Ino(dec.u64()?), kind: dec.u32()?, name: dec.bytes()?.to_vec() })
    }
}
