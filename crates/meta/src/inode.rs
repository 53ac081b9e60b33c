//! Inodes and their rows. Format: docs/format/kv.md.

use penstock_base::{Dec, DecodeError, Enc, Ino, Spread, TargetId};
use penstock_chunk::Owner;
use penstock_wire::metadata::{Attr, FileLayout, Time, set_id_bits};

const FORMAT: u8 = 2;
/// The flag of an inode of which other targets than that of the names' stack may have something.
const SPREAD: u32 = 1;
/// Chunks in a row on one target, unless asked for otherwise: 4 MiB, so that smaller files lie on one.
const DEFAULT_TURN: u16 = 4;
/// Most links that decoding accepts. No inode can have reached it, and adding further links never overflows.
const NLINK_MAX: u32 = u32::MAX / 2;
const MISCOUNTED: DecodeError =
    DecodeError::Bad { what: "inode", why: "its links, entries or truncate generation cannot be right" };
/// Type bits of a directory's mode.
pub(crate) const DIRECTORY: u32 = 0o040_000;
/// A mode's bit by which a program runs with the file's group, and a directory gives its group to new inodes.
pub(crate) const SET_GROUP_ID: u32 = 0o2000;
/// A directory's bit by which only owners remove names.
pub(crate) const STICKY: u32 = 0o1000;
const TYPE_MASK: u32 = 0o170_000;
/// FIFO, character device, directory, block device, regular file, symbolic link, socket.
const TYPES: [u32; 7] = [0o010_000, 0o020_000, DIRECTORY, 0o060_000, 0o100_000, 0o120_000, 0o140_000];

/// True if a mode is one of the seven file types plus permission bits.
pub(crate) fn has_type(mode: u32) -> bool {
    TYPES.contains(&(mode & !0o7777))
}

/// True if a mode is that of a character or block device.
pub(crate) fn is_device(mode: u32) -> bool {
    [0o020_000, 0o060_000].contains(&(mode & TYPE_MASK))
}

/// True if a mode is that of a directory.
pub(crate) fn is_directory(mode: u32) -> bool {
    mode & TYPE_MASK == DIRECTORY
}

/// Type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, FIFO or socket, which only the kernel interprets.
    Special,
}

/// Layout of a file on targets, copied into the inode when it is made. Chunk i lies on the
/// ((i / `turn`) mod `count`)-th target from `first` on, in that version of the pool's map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of the pool; 0, the only one today.
    pub pool: u32,
    /// Version of the pool's map of targets; 0, the targets of all stacks in their order.
    pub map_version: u32,
    /// The first target. That in a directory is of no consequence: one is chosen for each new file.
    pub first: u32,
    /// Number of targets. In a directory 0 stands for all that there are when a file is made.
    pub count: u16,
    /// Chunks in a row on one target.
    pub turn: u16,
    /// Blocks in a chunk.
    pub chunk_blocks: u32,
    /// Copies across failure domains; 1 today.
    pub replicas: u8,
}

impl Layout {
    /// The layout of a file on one target.
    pub fn of_one_target(chunk_blocks: u32) -> Self {
        Self { pool: 0, map_version: 0, first: 0, count: 1, turn: 1, chunk_blocks, replicas: 1 }
    }

    /// The layout that the directories of a new store of several targets have: files lie on all of them.
    pub fn of_all_targets(chunk_blocks: u32) -> Self {
        Self { count: 0, turn: DEFAULT_TURN, ..Self::of_one_target(chunk_blocks) }
    }

    /// The targets of a file in a store with so many; none if it fits none.
    pub(crate) fn spread(&self, targets: u32) -> Option<Spread> {
        Spread::new(TargetId(self.first), self.count, self.turn, targets)
    }

    /// As sent to clients; none for the first target alone.
    fn told(&self) -> Option<FileLayout> {
        let Self { pool, map_version, first, count, turn, replicas, .. } = *self;
        let (count, turn, replicas) = (count.into(), turn.into(), replicas.into());
        ((first, count) != (0, 1)).then_some(FileLayout { pool, map_version, first, count, turn, replicas })
    }

    fn encode(&self, enc: &mut Enc) {
        enc.u32(self.pool).u32(self.map_version).u32(self.first).u16(self.count).u16(self.turn);
        enc.u32(self.chunk_blocks).u8(self.replicas);
    }

    fn decode(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let (pool, map_version, first) = (dec.u32()?, dec.u32()?, dec.u32()?);
        let (count, turn, chunk_blocks, replicas) = (dec.u16()?, dec.u16()?, dec.u32()?, dec.u8()?);
        dec.check_known("pool of the layout", pool, 0)?;
        dec.check_known("map version of the layout", map_version, 0)?;
        dec.check_known("replicas of the layout", replicas, 1)?;
        match (chunk_blocks, turn) {
            (0, _) => Err(dec.bad("chunks without blocks")),
            (_, 0) => Err(dec.bad("turns without chunks")),
            _ => Ok(Self { pool, map_version, first, count, turn, chunk_blocks, replicas }),
        }
    }
}

/// Location of an inode's data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Data {
    /// The inode has no data.
    None,
    /// In the row itself: the target of a symbolic link.
    Inline(Vec<u8>),
    /// In chunks on targets.
    Chunks,
}

/// An inode, as stored in its row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    /// Inode number.
    pub ino: Ino,
    /// Type and permission bits.
    pub mode: u32,
    /// Number of names. A directory also counts its own `.` and the `..` of each of its directories.
    pub nlink: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Device number of a device file.
    pub rdev: u32,
    /// Size in bytes.
    pub size: u64,
    /// Times of access, modification, change and birth.
    pub times: [Time; 4],
    /// Truncate generation: raised by each truncation.
    pub truncations: u64,
    /// Parent directory, for a directory; else 0.
    pub parent: Ino,
    /// Number of entries, for a directory.
    pub entries: u64,
    /// Layout of the data on targets.
    pub layout: Layout,
    /// Location of the data.
    pub data: Data,
    /// Other targets than that of the names' stack may have something of it.
    pub is_spread: bool,
}

impl Inode {
    /// All chunks of the file are on one target of another stack than that of the names.
    pub(crate) fn set_only_target(&mut self, target: TargetId) {
        self.layout = Layout { first: target.0, ..Layout::of_one_target(self.layout.chunk_blocks) };
        self.is_spread = true;
    }

    /// Type of the inode.
    pub fn kind(&self) -> FileKind {
        match self.mode & TYPE_MASK {
            0o100_000 => FileKind::Regular,
            DIRECTORY => FileKind::Directory,
            0o120_000 => FileKind::Symlink,
            _ => FileKind::Special,
        }
    }

    /// True for a directory.
    pub fn is_dir(&self) -> bool {
        self.kind() == FileKind::Directory
    }

    /// Type bits of the mode.
    pub fn type_bits(&self) -> u32 {
        self.mode & TYPE_MASK
    }

    /// Replaces the permission bits.
    pub fn set_permissions(&mut self, mode: u32) {
        self.mode = self.type_bits() | mode & 0o7777;
    }

    /// Clears the set-user-id and set-group-id bits that a write clears, unless the inode is a directory.
    pub fn drop_set_id(&mut self) {
        if !self.is_dir() {
            self.mode &= !set_id_bits(self.mode);
        }
    }

    /// Counts one link more or less. Fails if the row's count cannot be right.
    pub(crate) fn add_links(&mut self, more: i32) -> Result<(), DecodeError> {
        let nlink = self.nlink.checked_add_signed(more).filter(|nlink| *nlink <= NLINK_MAX);
        self.nlink = nlink.ok_or(MISCOUNTED)?;
        Ok(())
    }

    /// Counts one entry more or less. Fails if the row's count cannot be right.
    pub(crate) fn add_entries(&mut self, more: i64) -> Result<(), DecodeError> {
        let entries = self.entries.checked_add_signed(more).filter(|entries| entries >> 63 == 0);
        self.entries = entries.ok_or(MISCOUNTED)?;
        Ok(())
    }

    /// Raises the truncate generation. Fails if the row's generation cannot be right.
    pub(crate) fn count_truncation(&mut self) -> Result<(), DecodeError> {
        let truncations = self.truncations.checked_add(1).filter(|truncations| truncations >> 63 == 0);
        self.truncations = truncations.ok_or(MISCOUNTED)?;
        Ok(())
    }

    /// To whom its blocks are counted.
    pub fn owner(&self) -> Owner {
        Owner { uid: self.uid, gid: self.gid, project: 0 }
    }

    /// Attributes as sent to clients, of an inode whose contents hold `blocks` blocks.
    pub fn attr(&self, blocks: u64) -> Attr {
        let [atime, mtime, ctime, btime] = self.times;
        let Self { mode, nlink, uid, gid, rdev, size, truncations, .. } = *self;
        let chunk_blocks = self.layout.chunk_blocks;
        Attr {
            ino: self.ino.0,
            mode,
            nlink,
            uid,
            gid,
            rdev,
            size,
            atime,
            mtime,
            ctime,
            btime,
            truncations,
            chunk_blocks,
            blocks,
            branch: 0,
            layout: if self.kind() == FileKind::Regular { self.layout.told() } else { None },
            lease: 0,
        }
    }

    /// Encodes the row's value.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.u8(FORMAT)
            .u64(self.ino.0)
            .u32(self.mode)
            .u32(self.nlink)
            .u32(self.uid)
            .u32(self.gid)
            // The project, which quotas will need: none. Then the device, and flags.
            .u32(0)
            .u32(self.rdev)
            .u32(if self.is_spread { SPREAD } else { 0 });
        enc.u64(self.size);
        self.times.iter().for_each(|time| {
            enc.i64(time.sec).u32(time.nsec);
        });
        enc.u64(self.truncations).u64(self.parent.0).u64(self.entries);
        self.layout.encode(&mut enc);
        match &self.data {
            Data::None => enc.u8(0),
            Data::Inline(bytes) => enc.u8(1).bytes(bytes),
            Data::Chunks => enc.u8(2),
        };
        enc.finish()
    }

    /// Decodes the value of the row of inode `ino`. An error if it is another inode's: a change of that one
    /// would follow from a request for this one.
    pub(crate) fn decode_at(ino: Ino, value: &[u8]) -> Result<Self, DecodeError> {
        let inode = Self::decode(value)?;
        match inode.ino == ino {
            true => Ok(inode),
            false => Err(DecodeError::Bad { what: "inode", why: "its row is in another one's place" }),
        }
    }

    /// Decodes a row's value.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("inode", value);
        let format = dec.u8()?;
        dec.check_format(format, FORMAT)?;
        let (ino, mode, nlink) = (Ino(dec.u64()?), dec.u32()?, dec.u32()?);
        let (uid, gid, project) = (dec.u32()?, dec.u32()?, dec.u32()?);
        dec.check_known("project", project, 0)?;
        let (rdev, flags, size) = (dec.u32()?, dec.u32()?, dec.u64()?);
        dec.check_known("flags", flags & !SPREAD, 0)?;
        let mut times = [Time::default(); 4];
        for time in &mut times {
            *time = Time { sec: dec.i64()?, nsec: dec.u32()? };
            if !time.is_valid() {
                return Err(dec.bad("a time with more than a second of nanoseconds"));
            }
        }
        let (truncations, parent, entries) = (dec.counter()?, Ino(dec.u64()?), dec.counter()?);
        let layout = Layout::decode(&mut dec)?;
        if nlink > NLINK_MAX {
            return Err(dec.bad("too many links"));
        }
        let data = match dec.u8()? {
            0 => Data::None,
            1 => Data::Inline(dec.bytes()?.to_vec()),
            2 => Data::Chunks,
            other => return Err(dec.unknown("data", other.into())),
        };
        dec.end()?;
        let is_spread = flags & SPREAD != 0;
        Ok(Self {
            ino,
            mode,
            nlink,
            uid,
            gid,
            rdev,
            size,
            times,
            truncations,
            parent,
            entries,
            layout,
            data,
            is_spread,
        })
    }
}
