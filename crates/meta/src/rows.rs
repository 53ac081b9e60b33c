//! Keys and values of the name space's rows in the key-value store. Format: docs/format/kv.md.
//!
//! All numbers in keys are big-endian. In keys of rows that snapshots will keep, the branch follows the tag
//! and the inverted birth is last, so that versions of one row are adjacent, the newest first; today the
//! branch is 0 and the birth the first. The queue of removed files belongs to no snapshot. Rows of sessions
//! are in `penstock-session`.
//!
//! Public for the fuzzer and for tools that inspect a store. Only this crate writes rows.

pub mod reserved;

use crate::NAME_MAX;
use crate::acl::Acl;
use penstock_base::codec::{row_key, row_words};
use penstock_base::features::STACKS;
use penstock_base::num::to_u32;
use penstock_base::{
    ArrayId, Birth, Dec, DecodeError, Enc, Features, Id128, Ino, MOST_STACKS, PoolId, StackNo, TargetId,
};
use penstock_kv::Range;
use reserved::{Queued, Reserved};
use std::collections::BTreeSet;

const STORE: u8 = 0x00;
const FS: u8 = 0x01;
const GONE: u8 = 0x06;
const INODE: u8 = 0x10;
const ENTRY: u8 = 0x11;
const XATTR: u8 = 0x12;
const REMOVED: u8 = 0x13;
const FORMAT: u8 = 1;
/// Format of an extended attribute's value.
const XATTR_FORMAT: u8 = 1;
/// Format of a directory entry's value.
const ENTRY_FORMAT: u8 = 2;
/// The end of the keys of this release.
const FIRST: u64 = Birth::FIRST.suffix();

/// Key of the row of the key-value store itself.
pub fn store_key() -> Vec<u8> {
    row_key(STORE, &[])
}

/// Key of the file system's own row: of the first fileset, the only one today.
pub fn fs_key() -> Vec<u8> {
    row_key(FS, &[0])
}

/// Key of the row that names the targets of the pool that are forgotten: of the only pool today.
pub fn gone_key() -> Vec<u8> {
    row_key(GONE, &[0])
}

/// Encodes the value of the row that names forgotten targets.
pub fn encode_gone(targets: &BTreeSet<TargetId>) -> Vec<u8> {
    let mut enc = Enc::new();
    enc.u8(FORMAT).u32(to_u32(targets.len()));
    targets.iter().for_each(|target| _ = enc.u32(target.0));
    enc.finish()
}

/// Decodes the value of the row that names forgotten targets.
pub fn decode_gone(value: &[u8]) -> Result<BTreeSet<TargetId>, DecodeError> {
    let mut dec = Dec::new("forgotten targets", value);
    let format = dec.u8()?;
    dec.check_format(format, FORMAT)?;
    let count = dec.u32()? as usize;
    if count.checked_mul(4) != Some(dec.left()) {
        return Err(dec.bad("a list of another length"));
    }
    let mut targets = BTreeSet::new();
    for _ in 0..count {
        let target = TargetId(dec.u32()?);
        if targets.last().is_some_and(|last| *last >= target) || target.0 >= MOST_STACKS.into() {
            return Err(dec.bad("targets out of order, or above the highest"));
        }
        targets.insert(target);
    }
    dec.end()?;
    Ok(targets)
}

/// Key of an inode's row.
pub fn inode_key(ino: Ino) -> Vec<u8> {
    row_key(INODE, &[0, ino.0, FIRST])
}

/// Range of all inode rows.
pub fn all_inodes() -> Range {
    (vec![INODE], vec![INODE + 1])
}

/// Key of a directory entry's row, at its cookie.
pub fn entry_key(dir: Ino, cookie: u64) -> Vec<u8> {
    row_key(ENTRY, &[0, dir.0, cookie, FIRST])
}

/// True if a key is a directory entry's.
pub(crate) fn is_entry_key(key: &[u8]) -> bool {
    key.first() == Some(&ENTRY)
}

/// Range of a directory's entries with `from <= cookie < until`.
pub fn entry_range(dir: Ino, from: u64, until: u64) -> Range {
    (row_key(ENTRY, &[0, dir.0, from]), row_key(ENTRY, &[0, dir.0, until]))
}

/// Range of all directory entries.
pub fn all_entries() -> Range {
    (vec![ENTRY], vec![ENTRY + 1])
}

/// Returns directory and cookie from an entry's key.
pub fn decode_entry_key(key: &[u8]) -> Result<(Ino, u64), DecodeError> {
    let dec = Dec::new("directory entry key", key);
    let [branch, dir, cookie, birth] = row_words("directory entry key", ENTRY, key)?;
    match (branch, birth) {
        (0, FIRST) => Ok((Ino(dir), cookie)),
        (0, birth) => Err(dec.unknown("birth", Birth::of_suffix(birth).0)),
        (branch, _) => Err(dec.unknown("branch", branch)),
    }
}

/// Key of an extended attribute's row: inode, name, a NUL (names contain none), and the birth.
pub fn xattr_key(ino: Ino, name: &[u8]) -> Vec<u8> {
    [&row_key(XATTR, &[0, ino.0])[..], name, &[0], &FIRST.to_be_bytes()].concat()
}

/// Range of all extended attributes of an inode.
pub fn xattr_range(ino: Ino) -> Range {
    let from = row_key(XATTR, &[0, ino.0]);
    let until = ino.0.checked_add(1).map_or(vec![XATTR + 1], |next| row_key(XATTR, &[0, next]));
    (from, until)
}

/// Returns the name from an extended attribute's key; empty if the key is too short.
pub fn xattr_name(key: &[u8]) -> &[u8] {
    key.get(17..key.len().saturating_sub(9)).unwrap_or_default()
}

/// Encodes the value of an extended attribute's row.
pub fn encode_xattr(value: &[u8]) -> Vec<u8> {
    [&[XATTR_FORMAT], value].concat()
}

/// Decodes the value of an extended attribute's row.
pub fn decode_xattr(row: &[u8]) -> Result<&[u8], DecodeError> {
    let mut dec = Dec::new("extended attribute", row);
    let format = dec.u8()?;
    dec.check_format(format, XATTR_FORMAT)?;
    dec.raw(dec.left())
}

/// Decodes the value of an attribute that is an access control list.
pub(crate) fn decode_acl(row: &[u8]) -> Result<Acl, DecodeError> {
    let bad = DecodeError::Bad { what: "access control list", why: "not one that can be set" };
    Acl::decode(decode_xattr(row)?).map_err(|_| bad)
}

/// Range of all extended attributes.
pub(crate) fn all_xattrs() -> Range {
    (vec![XATTR], vec![XATTR + 1])
}

/// Ranges of keys that no row of this release has.
pub(crate) fn unknown_keys() -> [Range; 6] {
    let end = vec![0xff; 64];
    [
        ([&store_key()[..], &[0]].concat(), fs_key()),
        ([&fs_key()[..], &[0]].concat(), gone_key()),
        ([&gone_key()[..], &[0]].concat(), vec![INODE]),
        (all_queued().1, vec![0x20]),
        (vec![penstock_chunk::rows::END], end.clone()),
        (end, vec![0xff; 256]),
    ]
}

/// Returns the inode from the key of a row that belongs to an inode. The key has at least `words` numbers, of
/// which the first is the branch and the second the inode, and with `birth` it ends in the birth. Branch and
/// birth must be 0.
pub(crate) fn owner_of(key: &[u8], words: usize, birth: bool) -> Result<Ino, DecodeError> {
    let what = "key";
    let len = 1 + words * 8;
    let bad = DecodeError::Bad { what, why: "wrong length" };
    if key.len() < len || words < 2 {
        return Err(bad);
    }
    let word = |at: usize| u64::from_be_bytes(key[at..at + 8].try_into().expect("eight bytes"));
    let suffix = if birth { word(key.len() - 8) } else { FIRST };
    match (word(1), suffix) {
        (0, FIRST) => Ok(Ino(word(9))),
        (0, other) => Err(DecodeError::Unknown { what, field: "birth", found: Birth::of_suffix(other).0 }),
        (found, _) => Err(DecodeError::Unknown { what, field: "branch", found }),
    }
}

/// Returns the inode from an inode's key.
pub(crate) fn decode_inode_key(key: &[u8]) -> Result<Ino, DecodeError> {
    match key.len() {
        25 => owner_of(key, 3, true),
        _ => Err(DecodeError::Bad { what: "inode key", why: "wrong length" }),
    }
}

/// Returns the inode from an extended attribute's key, if the key is valid.
pub(crate) fn decode_xattr_key(key: &[u8]) -> Result<Ino, DecodeError> {
    let name = xattr_name(key);
    let ends = key.len() > 9 && key[key.len() - 9] == 0;
    match (1..=NAME_MAX).contains(&name.len()) && ends && !name.contains(&0) {
        true => owner_of(key, 3, true),
        false => Err(DecodeError::Bad { what: "extended attribute key", why: "no name" }),
    }
}

/// A row of the queue of removed files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemovedFile {
    /// The inode.
    pub ino: Ino,
    /// Its state.
    pub state: RemovedState,
}

/// The state of a removed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovedState {
    /// Its last name was removed.
    Removed,
    /// Some of its blocks or attributes are gone: nobody may use the rest.
    PartlyGone,
    /// It was made without a name, and has had none.
    Nameless,
}

impl RemovedFile {
    /// The value of the row.
    pub fn encode(&self) -> Vec<u8> {
        let state = match self.state {
            RemovedState::Removed => 0,
            RemovedState::PartlyGone => 1,
            RemovedState::Nameless => 2,
        };
        vec![FORMAT, state]
    }
}

/// Returns a row of the queue of removed files, if key and value are valid.
pub fn decode_removed(key: &[u8], value: &[u8]) -> Result<RemovedFile, DecodeError> {
    let mut dec = Dec::new("removed file", value);
    let format = dec.u8()?;
    dec.check_format(format, FORMAT)?;
    let state = match dec.u8()? {
        0 => RemovedState::Removed,
        1 => RemovedState::PartlyGone,
        2 => RemovedState::Nameless,
        other => return Err(dec.unknown("state", other.into())),
    };
    dec.end()?;
    let [branch, ino] = row_words("removed file", REMOVED, key)?;
    dec.check_known("branch", branch, 0)?;
    Ok(RemovedFile { ino: Ino(ino), state })
}

/// Key of an inode's row in the queue of removed files.
pub fn removed_key(ino: Ino) -> Vec<u8> {
    row_key(REMOVED, &[0, ino.0])
}

/// Range of the queue of removed files.
pub fn all_removed() -> Range {
    (vec![REMOVED], vec![REMOVED + 1])
}

/// Range of the queue of work for targets.
pub fn all_queued() -> Range {
    (Reserved::queued_key(0, 0), Reserved::queued_key(1, 0))
}

/// Returns a row of the queue of work for targets, with its number.
pub fn decode_queued(key: &[u8], value: &[u8]) -> Result<(u64, Queued), DecodeError> {
    match Reserved::decode(key, value)? {
        Reserved::Queued(0, number, queued) => Ok((number, queued)),
        _ => Err(Dec::new("queued work", key).bad("of another fileset")),
    }
}

/// The format of a store whose target uses all of the data array.
const STORE_FORMAT: u8 = 1;
/// The format with the stripes that it does not use.
const STORE_FORMAT_2: u8 = 2;

/// The stack that a key-value store and its target belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Home {
    /// The pool.
    pub pool: PoolId,
    /// The data array of the stack, with the blocks that rows name.
    pub data: ArrayId,
    /// The number of the stack.
    pub stack: StackNo,
    /// The target.
    pub target: TargetId,
    /// The store has several stacks: its files may lie on several targets.
    pub is_one_of_several: bool,
}

impl Home {
    /// The features of a new store.
    pub(crate) fn features(&self) -> Features {
        Features::of_stacks(self.is_one_of_several)
    }

    /// True for the stack with the names of the file system.
    pub fn has_names(&self) -> bool {
        self.stack == StackNo::FIRST
    }
}

/// The row of a key-value store: whose rows it has, and what a release must know to change them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreRow {
    /// Features of all rows of the store.
    pub features: Features,
    /// The arrays that it belongs to.
    pub home: Home,
    /// Stripes at the end of the data array that the target does not use: for the anchors of copies of the
    /// map. None in stores that were made before there were copies.
    pub kept_stripes: u16,
    /// The rows come from a copy of the map, and the file system was not repaired since. Nobody may use it.
    pub is_unrepaired: bool,
}

impl StoreRow {
    /// Encodes the row's value.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.u8(if self.kept_stripes == 0 { STORE_FORMAT } else { STORE_FORMAT_2 });
        self.features.encode(&mut enc);
        enc.id(self.home.pool.0).id(self.home.data.0).u16(self.home.stack.0).u32(self.home.target.0);
        if self.kept_stripes > 0 {
            enc.u16(self.kept_stripes).u8(self.is_unrepaired.into());
        }
        enc.finish()
    }

    /// Decodes the row's value.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("row of the store", value);
        let format = dec.u8()?;
        if format != STORE_FORMAT {
            dec.check_format(format, STORE_FORMAT_2)?;
        }
        let features = Features::decode(&mut dec)?;
        features.check(&dec)?;
        let (pool, data) = (PoolId(dec.id()?), ArrayId(dec.id()?));
        let (stack, target) = (StackNo(dec.u16()?), TargetId(dec.u32()?));
        let is_one_of_several = features.incompatible & STACKS != 0;
        if stack.0 >= MOST_STACKS {
            return Err(dec.unknown("stack", stack.0.into()));
        }
        features.check_stacks(&dec, stack != StackNo::FIRST)?;
        dec.check_known("target", target.0, stack.target().0)?;
        let home = Home { pool, data, stack, target, is_one_of_several };
        let (kept_stripes, is_unrepaired) = match format {
            STORE_FORMAT => (0, false),
            _ => (dec.u16()?, dec.boolean("repair")?),
        };
        dec.end()?;
        match format != STORE_FORMAT && kept_stripes == 0 {
            true => Err(dec.bad("no stripe is kept")),
            false => Ok(Self { features, home, kept_stripes, is_unrepaired }),
        }
    }
}

const FS_FORMAT: u8 = 2;
/// The family of the first fileset.
const FAMILY: u32 = 1;

/// The file system's own row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsRow {
    /// Identifier of the file system.
    pub id: Id128,
    /// Name of the file system.
    pub name: String,
    /// Time of creation in nanoseconds since 1970.
    pub created_ns: i64,
    /// Secret key of the hash that makes directory cookies from names.
    pub secret: Id128,
    /// Highest reserved inode number: numbers up to it may be in use.
    pub reserved_ino: u64,
    /// Highest session number that was given.
    pub last_session: u64,
    /// Blocks in a chunk of new files.
    pub chunk_blocks: u32,
    /// Highest number that was given in the queue of work for targets.
    pub last_queued: u64,
}

impl FsRow {
    /// Encodes the row's value.
    ///
    /// # Panics
    /// If a number is none that decoding accepts.
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.chunk_blocks > 0, "chunks have blocks");
        assert!((self.reserved_ino | self.last_session | self.last_queued) >> 63 == 0, "numbers can be read");
        let mut enc = Enc::new();
        enc.u8(FS_FORMAT);
        // The metadata target and its epoch: there is one.
        enc.u32(FAMILY).u32(0).u64(0);
        enc.u64(Birth::FIRST.0).u64(self.last_queued);
        enc.id(self.id).i64(self.created_ns).id(self.secret).u64(self.reserved_ino);
        enc.u64(self.last_session).u32(self.chunk_blocks).bytes(self.name.as_bytes());
        enc.finish()
    }

    /// Decodes the row's value.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("file system row", value);
        let format = dec.u8()?;
        dec.check_format(format, FS_FORMAT)?;
        let (family, target, epoch) = (dec.u32()?, dec.u32()?, dec.u64()?);
        dec.check_known("family", family, FAMILY)?;
        dec.check_known("metadata target", target, 0)?;
        dec.check_known("epoch of the metadata target", epoch, 0)?;
        let (sequence, last_queued) = (dec.u64()?, dec.counter_with_room()?);
        dec.check_known("sequence", sequence, Birth::FIRST.0)?;
        let (id, created_ns, secret) = (dec.id()?, dec.i64()?, dec.id()?);
        let (reserved_ino, last_session, chunk_blocks) = (dec.counter()?, dec.counter()?, dec.u32()?);
        let name = dec.text()?;
        dec.end()?;
        if chunk_blocks == 0 {
            return Err(dec.bad("chunks without blocks"));
        }
        Ok(Self { id, name, created_ns, secret, reserved_ino, last_session, chunk_blocks, last_queued })
    }
}

/// The target of a name: an inode of the same fileset.
const TO_INODE: u8 = 0;

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The inode to which the name refers.
    pub ino: Ino,
    /// Type bits of the inode's mode.
    pub kind: u32,
    /// The name.
    pub name: Vec<u8>,
}

impl Entry {
    /// Encodes the row's value.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.u8(ENTRY_FORMAT).u8(TO_INODE).u64(self.ino.0).u32(self.kind).bytes(&self.name);
        enc.finish()
    }

    /// Decodes the row's value.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("directory entry", value);
        let format = dec.u8()?;
        dec.check_format(format, ENTRY_FORMAT)?;
        // 1 is reserved for junctions: the root of another fileset.
        let target = dec.u8()?;
        dec.check_known("target of a name", target, TO_INODE)?;
        let entry = Self { ino: Ino(dec.u64()?), kind: dec.u32()?, name: dec.bytes()?.to_vec() };
        dec.end()?;
        Ok(entry)
    }
}

#[cfg(test)]
mod tests;
