//! Rows that several filesets, targets, snapshots and quotas need. Of these this release makes only queued
//! work. It decodes the others, so that a check names what a later release wrote, and changes none. Format:
//! docs/format/kv.md.
//!
//! The registry (filesets, branches, map versions) is the same in every stack's store; of two rows with
//! one key the one with the greater epoch counts, and of one epoch the one with the greater revision. A
//! clone is a fileset of its own, of the family of its parent, whose main branch is a branch of kind
//! clone. The other rows are in the store of the fileset's metadata target only.

use super::{ENTRY, ENTRY_FORMAT, decode_entry_key, entry_key};
use crate::inode::DIRECTORY;
use penstock_base::codec::{row_key, row_words};
use penstock_base::num::to_u32;
use penstock_base::{Branch, Dec, DecodeError, Enc, Id128, Ino, MOST_WITH_ROOM, PoolId};
use penstock_chunk::Owner;

const FILESET: u8 = 0x02;
const BRANCH: u8 = 0x03;
const MAP: u8 = 0x04;
const RUN: u8 = 0x05;
const QUEUED: u8 = 0x16;
const QUOTA: u8 = 0x17;
const CREDIT: u8 = 0x18;
const FORMAT: u8 = 1;
/// The highest number of a family.
const LAST_FAMILY: u32 = (1 << 24) - 1;
/// The target of a name: the root of another fileset.
const TO_FILESET: u8 = 1;
/// No limit in a quota.
const UNLIMITED: u64 = u64::MAX;

/// A row of one of these kinds, with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reserved {
    /// A fileset, by its number.
    Fileset(u64, Fileset),
    /// A branch.
    Branch(Branch, Lineage),
    /// A version of a pool's map: number of the pool and version.
    Map(u32, u32, PoolMap),
    /// Inode numbers of a fileset that may be in use since its last durable commit: the first, and how many.
    Run(u64, Ino, u32),
    /// Work for targets, by fileset and number.
    Queued(u64, u64, Queued),
    /// Limits of one part of a fileset.
    Quota(u64, Counted, Quota),
    /// Blocks of a quota that a target may use without asking.
    Credit(u64, Counted, u32, Credit),
    /// A directory entry that names another fileset: directory, cookie, fileset and name.
    Junction(Ino, u64, u64, Vec<u8>),
}

/// A row of the registry of filesets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fileset {
    /// Identifier of the file system.
    pub id: Id128,
    /// State of the fileset.
    pub state: FilesetState,
    /// Raised with every change of the row: of two rows of one epoch the one with the greater revision
    /// counts.
    pub revision: u64,
    /// Its metadata target.
    pub target: u32,
    /// The epoch of that target: rows with a greater one count.
    pub epoch: u64,
    /// Time of creation in nanoseconds since 1970.
    pub created_ns: i64,
    /// The branch that is the fileset itself.
    pub branch: Branch,
    /// Its root directory.
    pub root: Ino,
    /// The fileset, the branch and the directory with its junction; none while it is not linked. A junction
    /// that a snapshot or a clone inherits is another one.
    pub parent: Option<(u64, Branch, Ino)>,
    /// The families of its inode numbers, at least one.
    pub families: Vec<u32>,
    /// Its name.
    pub name: String,
}

/// State of a fileset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FilesetState {
    /// It exists.
    Live = 0,
    /// It is being deleted.
    Going = 1,
    /// It is gone. The row stays, so that a stack that was away does not bring it back.
    Gone = 2,
}

/// Nature of a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BranchKind {
    /// A fileset itself.
    Main = 0,
    /// A read-only cut.
    Snapshot = 1,
    /// A branch that is written from a cut on.
    Clone = 2,
}

/// State of a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BranchState {
    /// It exists.
    Whole = 0,
    /// Its cut is being made: an opening raises the sequence and drops it.
    Taking = 1,
    /// It is whole once its group is.
    Provisional = 2,
    /// It is being deleted.
    Going = 3,
    /// It is gone, like a [`FilesetState::Gone`] fileset. Its children may still need what it had.
    Gone = 4,
}

/// A row of the registry of branches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lineage {
    /// The fileset.
    pub fileset: u64,
    /// Nature of the branch.
    pub kind: BranchKind,
    /// State of the branch.
    pub state: BranchState,
    /// Raised with every change of the row, as in a [`Fileset`].
    pub revision: u64,
    /// The epoch of its metadata target: rows with a greater one count.
    pub epoch: u64,
    /// The branch from which it was made; the branch itself for a main one.
    pub parent: Branch,
    /// The sequence of the parent up to which it shows the parent.
    pub sequence: u64,
    /// The cuts of several filesets at one moment to which it belongs; nil for none.
    pub group: Id128,
    /// Time of creation in nanoseconds since 1970.
    pub created_ns: i64,
    /// The user who made it.
    pub uid: u32,
    /// Labels: names and values.
    pub labels: Vec<(String, String)>,
    /// Its name.
    pub name: String,
}

/// A version of a pool's map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolMap {
    /// The pool, which layouts of files name by its number.
    pub pool: PoolId,
    /// Its targets, in the order in which layouts count them; at least one.
    pub targets: Vec<MapTarget>,
}

/// A target in a version of a pool's map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapTarget {
    /// Number of the target. It is never given again.
    pub target: u32,
    /// Its failure domain.
    pub domain: u32,
}

/// A row of the queue of work for targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queued {
    /// The branch.
    pub branch: Branch,
    /// The sequence of the branch when the work was recorded.
    pub sequence: u64,
    /// The work.
    pub work: Work,
    /// The targets that have not yet answered durably, ascending, at least one.
    pub targets: Vec<u32>,
}

/// Work of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Make the blocks of a file read as zeros from one on, in rows of older truncate generations.
    Truncate {
        /// The file.
        ino: Ino,
        /// The truncate generation that begins.
        truncations: u64,
        /// The first block.
        from: u64,
        /// The blocks stay, as reserved ones: the file did not become shorter.
        keeps: bool,
    },
    /// Drop a file.
    Remove {
        /// The file.
        ino: Ino,
        /// The last truncate generation.
        truncations: u64,
    },
    /// Count a file to another owner.
    Own {
        /// The file.
        ino: Ino,
        /// Number of the change, which orders changes of one file.
        number: u64,
        /// The new owner.
        owner: Owner,
    },
    /// Drop what only the branch holds.
    DropBranch,
}

/// The part of a fileset that a quota limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// The whole fileset.
    All,
    /// A user's files.
    User(u32),
    /// A group's files.
    Group(u32),
    /// A project's files.
    Project(u32),
}

impl Counted {
    fn words(self) -> [u64; 2] {
        match self {
            Self::All => [0, 0],
            Self::User(id) => [1, id.into()],
            Self::Group(id) => [2, id.into()],
            Self::Project(id) => [3, id.into()],
        }
    }

    fn of_words(dec: &Dec<'_>, [kind, id]: [u64; 2]) -> Result<Self, DecodeError> {
        let id = u32::try_from(id).map_err(|_| dec.bad("an owner above 2^32"))?;
        match kind {
            0 if id == 0 => Ok(Self::All),
            0 => Err(dec.bad("a fileset with an owner")),
            1 => Ok(Self::User(id)),
            2 => Ok(Self::Group(id)),
            3 => Ok(Self::Project(id)),
            other => Err(dec.unknown("kind of quota", other)),
        }
    }
}

/// A limit, and since when its soft part is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// It may be passed for the grace time; none is no limit.
    pub soft: Option<u64>,
    /// It is never passed; none is no limit.
    pub hard: Option<u64>,
    /// Grace time in seconds.
    pub grace_s: u32,
    /// The time at which the soft limit was passed, in nanoseconds since 1970; none if it is not.
    pub passed_ns: Option<i64>,
}

/// A row of quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Blocks of 4 KiB.
    pub blocks: Limit,
    /// Inodes.
    pub inodes: Limit,
    /// Inodes in use. Blocks in use are counted by the targets.
    pub used_inodes: u64,
}

/// Blocks that a target may use without asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit {
    /// Blocks granted and not yet counted.
    pub blocks: u64,
    /// Number of the grant, which orders grants to one target.
    pub number: u64,
}

impl Reserved {
    /// The key of work, by fileset and number.
    pub(crate) fn queued_key(fileset: u64, number: u64) -> Vec<u8> {
        row_key(QUEUED, &[fileset, number])
    }

    /// The number in the key of queued work.
    pub(crate) fn queued_number(key: &[u8]) -> Option<u64> {
        row_words("queued work", QUEUED, key).ok().map(|[_, number]| number)
    }

    /// The row, for people.
    pub fn what(&self) -> &'static str {
        match self {
            Self::Fileset(..) => "a fileset of the registry",
            Self::Branch(..) => "a branch of the registry",
            Self::Map(..) => "a version of a pool's map",
            Self::Run(..) => "a run of inode numbers",
            Self::Queued(..) => "work for several targets",
            Self::Quota(..) => "a quota",
            Self::Credit(..) => "the credit of a target",
            Self::Junction(..) => "a junction to another fileset",
        }
    }

    /// Key and value of the row.
    ///
    /// # Panics
    /// If a field has a value that decoding does not accept.
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let mut enc = Enc::new();
        enc.u8(FORMAT);
        let key = match self {
            Self::Fileset(number, fileset) => {
                fileset.put(&mut enc);
                row_key(FILESET, &[*number])
            }
            Self::Branch(branch, lineage) => {
                lineage.put(&mut enc);
                row_key(BRANCH, &[branch.0])
            }
            Self::Map(pool, version, map) => {
                enc.id(map.pool.0).u32(to_u32(map.targets.len()));
                map.targets.iter().for_each(|MapTarget { target, domain }| {
                    enc.u32(*target).u32(*domain);
                });
                row_key(MAP, &[(*pool).into(), (*version).into()])
            }
            Self::Run(fileset, first, count) => {
                enc.u32(*count);
                row_key(RUN, &[*fileset, first.0])
            }
            Self::Queued(fileset, number, queued) => {
                queued.put(&mut enc);
                Self::queued_key(*fileset, *number)
            }
            Self::Quota(fileset, counted, quota) => {
                [quota.blocks, quota.inodes].iter().for_each(|limit| limit.put(&mut enc));
                enc.u64(quota.used_inodes);
                let [kind, id] = counted.words();
                row_key(QUOTA, &[*fileset, kind, id])
            }
            Self::Credit(fileset, counted, target, credit) => {
                enc.u64(credit.blocks).u64(credit.number);
                let [kind, id] = counted.words();
                row_key(CREDIT, &[*fileset, kind, id, (*target).into()])
            }
            Self::Junction(dir, cookie, fileset, name) => {
                enc.finish();
                enc.u8(ENTRY_FORMAT).u8(TO_FILESET).u64(*fileset).u32(DIRECTORY).bytes(name);
                entry_key(*dir, *cookie)
            }
        };
        let value = enc.finish();
        assert!(Self::decode(&key, &value).as_ref() == Ok(self), "{self:?} can be read");
        (key, value)
    }

    /// Decodes a row. Fails with [`DecodeError::Unknown`] if it is of none of these kinds, or has a field
    /// that is not known.
    pub fn decode(key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let tag = key.first().copied().unwrap_or_default();
        let what = match tag {
            FILESET => "row of a fileset",
            BRANCH => "row of a branch",
            MAP => "version of a map",
            RUN => "run of inode numbers",
            QUEUED => "queued work",
            QUOTA => "quota",
            CREDIT => "credit of a target",
            ENTRY => "junction",
            _ => return Err(Dec::new("row", key).unknown("kind", tag.into())),
        };
        let mut dec = Dec::new(what, value);
        let format = dec.u8()?;
        dec.check_format(format, if tag == ENTRY { ENTRY_FORMAT } else { FORMAT })?;
        let number32 = |dec: &Dec<'_>, number: u64| {
            u32::try_from(number).map_err(|_| dec.bad("a pool, version or target above 2^32"))
        };
        let row = match tag {
            FILESET => {
                let [number] = row_words(what, tag, key)?;
                Self::Fileset(number, Fileset::take(&mut dec)?)
            }
            BRANCH => {
                let [branch] = row_words(what, tag, key)?;
                Self::Branch(Branch(branch), Lineage::take(&mut dec, Branch(branch))?)
            }
            MAP => {
                let [pool, version] = row_words(what, tag, key)?;
                let id = PoolId(dec.id()?);
                let count = dec.u32()? as usize;
                if count == 0 || count.checked_mul(8) != Some(dec.left()) {
                    return Err(dec.bad("a list of another length"));
                }
                let mut targets = Vec::with_capacity(count);
                for _ in 0..count {
                    targets.push(MapTarget { target: dec.u32()?, domain: dec.u32()? });
                }
                let map = PoolMap { pool: id, targets };
                Self::Map(number32(&dec, pool)?, number32(&dec, version)?, map)
            }
            RUN => {
                let [fileset, first] = row_words(what, tag, key)?;
                let count = dec.u32()?;
                let last = count.checked_sub(1).and_then(|more| first.checked_add(more.into()));
                // Numbers of one family, so that no run reaches into another one.
                if last.is_none_or(|last| last >> 40 != first >> 40) {
                    return Err(dec.bad("a run of no numbers, or of several families"));
                }
                Self::Run(fileset, Ino(first), count)
            }
            QUEUED => {
                let [fileset, number] = row_words(what, tag, key)?;
                if !(1..=MOST_WITH_ROOM).contains(&number) {
                    return Err(dec.bad("a number that no work has"));
                }
                Self::Queued(fileset, number, Queued::take(&mut dec)?)
            }
            QUOTA => {
                let [fileset, kind, id] = row_words(what, tag, key)?;
                let (blocks, inodes) = (Limit::take(&mut dec)?, Limit::take(&mut dec)?);
                let quota = Quota { blocks, inodes, used_inodes: dec.counter()? };
                Self::Quota(fileset, Counted::of_words(&dec, [kind, id])?, quota)
            }
            ENTRY => {
                let (dir, cookie) = decode_entry_key(key)?;
                let (target, fileset, kind) = (dec.u8()?, dec.u64()?, dec.u32()?);
                dec.check_known("target of a name", target, TO_FILESET)?;
                if kind != DIRECTORY {
                    return Err(dec.bad("a fileset that is no directory"));
                }
                Self::Junction(dir, cookie, fileset, dec.bytes()?.to_vec())
            }
            _ => {
                let [fileset, kind, id, target] = row_words(what, tag, key)?;
                let credit = Credit { blocks: dec.counter()?, number: dec.counter()? };
                Self::Credit(fileset, Counted::of_words(&dec, [kind, id])?, number32(&dec, target)?, credit)
            }
        };
        dec.end()?;
        Ok(row)
    }
}

impl Fileset {
    fn put(&self, enc: &mut Enc) {
        enc.u8(self.state as u8)
            .u64(self.revision)
            .id(self.id)
            .u32(self.target)
            .u64(self.epoch)
            .i64(self.created_ns);
        enc.u64(self.branch.0).u64(self.root.0);
        let (parent, branch, dir) = self.parent.unwrap_or_default();
        enc.u8(self.parent.is_some().into()).u64(parent).u64(branch.0).u64(dir.0);
        assert!(self.families.is_sorted_by(|one, next| one < next), "families ascend: {:?}", self.families);
        enc.u32(to_u32(self.families.len()));
        self.families.iter().for_each(|family| {
            enc.u32(*family);
        });
        enc.bytes(self.name.as_bytes());
    }

    fn take(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let state = match dec.u8()? {
            0 => FilesetState::Live,
            1 => FilesetState::Going,
            2 => FilesetState::Gone,
            other => return Err(dec.unknown("state of a fileset", other.into())),
        };
        let revision = dec.counter()?;
        let (id, target, epoch) = (dec.id()?, dec.u32()?, dec.counter()?);
        let (created_ns, branch, root) = (dec.i64()?, Branch(dec.u64()?), Ino(dec.u64()?));
        let is_linked = dec.boolean("link")?;
        let parent = (dec.u64()?, Branch(dec.u64()?), Ino(dec.u64()?));
        if !is_linked && parent != Default::default() {
            return Err(dec.bad("a parent of a fileset that is not linked"));
        }
        let families = take_ascending(dec)?;
        if families.iter().any(|family| !(1..=LAST_FAMILY).contains(family)) {
            return Err(dec.bad("a family of no 24 bits"));
        }
        let parent = is_linked.then_some(parent);
        let name = dec.text()?;
        Ok(Self { id, state, revision, target, epoch, created_ns, branch, root, parent, families, name })
    }
}

/// Takes a count and that many ascending numbers, at least one.
fn take_ascending(dec: &mut Dec<'_>) -> Result<Vec<u32>, DecodeError> {
    let count = dec.u32()? as usize;
    if count == 0 || count > dec.left() / 4 {
        return Err(dec.bad("a list without members, or longer than the row"));
    }
    let mut numbers: Vec<u32> = Vec::with_capacity(count);
    for _ in 0..count {
        let number = dec.u32()?;
        if numbers.last().is_some_and(|last| *last >= number) {
            return Err(dec.bad("a list that does not ascend"));
        }
        numbers.push(number);
    }
    Ok(numbers)
}

impl Lineage {
    fn put(&self, enc: &mut Enc) {
        enc.u64(self.fileset).u8(self.kind as u8).u8(self.state as u8).u64(self.revision).u64(self.epoch);
        enc.u64(self.parent.0).u64(self.sequence).id(self.group).i64(self.created_ns);
        enc.u32(self.uid).u32(to_u32(self.labels.len()));
        self.labels.iter().for_each(|(name, value)| {
            enc.bytes(name.as_bytes()).bytes(value.as_bytes());
        });
        enc.bytes(self.name.as_bytes());
    }

    fn take(dec: &mut Dec<'_>, branch: Branch) -> Result<Self, DecodeError> {
        let fileset = dec.u64()?;
        let kind = match dec.u8()? {
            0 => BranchKind::Main,
            1 => BranchKind::Snapshot,
            2 => BranchKind::Clone,
            other => return Err(dec.unknown("kind of branch", other.into())),
        };
        let state = match dec.u8()? {
            0 => BranchState::Whole,
            1 => BranchState::Taking,
            2 => BranchState::Provisional,
            3 => BranchState::Going,
            4 => BranchState::Gone,
            other => return Err(dec.unknown("state of a branch", other.into())),
        };
        let (revision, epoch) = (dec.counter()?, dec.counter()?);
        let (parent, sequence, group) = (Branch(dec.u64()?), dec.counter()?, dec.id()?);
        if (kind == BranchKind::Main) != (parent == branch) {
            return Err(dec.bad("a parent that this kind of branch does not have"));
        }
        if state == BranchState::Provisional && group.is_nil() {
            return Err(dec.bad("a provisional branch without a group"));
        }
        let (created_ns, uid, count) = (dec.i64()?, dec.u32()?, dec.u32()? as usize);
        if count > dec.left() / 8 {
            return Err(dec.bad("more labels than bytes"));
        }
        let mut labels = Vec::with_capacity(count);
        for _ in 0..count {
            labels.push((dec.text()?, dec.text()?));
        }
        let name = dec.text()?;
        Ok(Self {
            fileset,
            kind,
            state,
            revision,
            epoch,
            parent,
            sequence,
            group,
            created_ns,
            uid,
            labels,
            name,
        })
    }
}

impl Work {
    /// The inode that it is about; none for work on a branch.
    pub(crate) fn ino(&self) -> Option<Ino> {
        match *self {
            Self::Truncate { ino, .. } | Self::Remove { ino, .. } | Self::Own { ino, .. } => Some(ino),
            Self::DropBranch => None,
        }
    }
}

impl Queued {
    fn put(&self, enc: &mut Enc) {
        enc.u64(self.branch.0).u64(self.sequence);
        match self.work {
            Work::Truncate { ino, truncations, from, keeps } => {
                enc.u8(0).u64(ino.0).u64(truncations).u64(from).u8(keeps.into());
            }
            Work::Remove { ino, truncations } => {
                enc.u8(1).u64(ino.0).u64(truncations);
            }
            Work::Own { ino, number, owner } => {
                enc.u8(2).u64(ino.0).u64(number).u32(owner.uid).u32(owner.gid).u32(owner.project);
            }
            Work::DropBranch => {
                enc.u8(3);
            }
        }
        assert!(self.targets.is_sorted_by(|one, next| one < next), "targets ascend: {:?}", self.targets);
        enc.u32(to_u32(self.targets.len()));
        self.targets.iter().for_each(|target| {
            enc.u32(*target);
        });
    }

    fn take(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let (branch, sequence) = (Branch(dec.u64()?), dec.counter()?);
        let work = match dec.u8()? {
            0 => {
                let (ino, truncations, from) = (Ino(dec.u64()?), dec.counter()?, dec.counter()?);
                if truncations == 0 {
                    return Err(dec.bad("a truncation that begins no generation"));
                }
                Work::Truncate { ino, truncations, from, keeps: dec.boolean("treatment of blocks")? }
            }
            1 => Work::Remove { ino: Ino(dec.u64()?), truncations: dec.counter()? },
            2 => {
                let (ino, number) = (Ino(dec.u64()?), dec.counter()?);
                let owner = Owner { uid: dec.u32()?, gid: dec.u32()?, project: dec.u32()? };
                Work::Own { ino, number, owner }
            }
            3 => Work::DropBranch,
            other => return Err(dec.unknown("kind of work", other.into())),
        };
        Ok(Self { branch, sequence, work, targets: take_ascending(dec)? })
    }
}

impl Limit {
    fn put(&self, enc: &mut Enc) {
        enc.u64(self.soft.unwrap_or(UNLIMITED)).u64(self.hard.unwrap_or(UNLIMITED)).u32(self.grace_s);
        enc.u8(self.passed_ns.is_some().into()).i64(self.passed_ns.unwrap_or_default());
    }

    fn take(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let mut limit = || match dec.u64()? {
            UNLIMITED => Ok(None),
            limit if limit >> 63 == 0 => Ok(Some(limit)),
            _ => Err(dec.bad("a limit above 2^63")),
        };
        let (soft, hard) = (limit()?, limit()?);
        let grace_s = dec.u32()?;
        let is_passed = dec.boolean("state of a limit")?;
        let passed_ns = dec.i64()?;
        if !is_passed && passed_ns != 0 {
            return Err(dec.bad("a time of a limit that is not passed"));
        }
        Ok(Self { soft, hard, grace_s, passed_ns: is_passed.then_some(passed_ns) })
    }
}

#[cfg(test)]
mod tests;
