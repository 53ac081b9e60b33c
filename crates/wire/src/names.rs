//! Bodies of the name space, in protobuf. Field numbers are for ever.
#![allow(missing_docs)]

use prost::Message;

/// The set-id bits of a mode that fall when another writes to the file or gets it: the set-group-id bit only where the
/// group may execute it, since elsewhere it never meant another group.
pub fn set_id_bits(mode: u32) -> u32 {
    const SET_UID: u32 = 0o4000;
    const SET_GID: u32 = 0o2000;
    const GROUP_EXECUTES: u32 = 0o010;
    match mode & GROUP_EXECUTES {
        0 => mode & SET_UID,
        _ => mode & (SET_UID | SET_GID),
    }
}

/// Attributes of an inode. Times are nanoseconds since 1970.
#[derive(Clone, PartialEq, Message)]
pub struct Attr {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// Type and permission bits as in `st_mode`.
    #[prost(uint32, tag = "2")]
    pub mode: u32,
    #[prost(uint32, tag = "3")]
    pub nlink: u32,
    #[prost(uint32, tag = "4")]
    pub uid: u32,
    #[prost(uint32, tag = "5")]
    pub gid: u32,
    #[prost(uint32, tag = "6")]
    pub rdev: u32,
    #[prost(uint64, tag = "7")]
    pub size: u64,
    #[prost(int64, tag = "8")]
    pub atime_ns: i64,
    #[prost(int64, tag = "9")]
    pub mtime_ns: i64,
    #[prost(int64, tag = "10")]
    pub ctime_ns: i64,
    #[prost(int64, tag = "11")]
    pub btime_ns: i64,
    /// Truncate generation.
    #[prost(uint64, tag = "12")]
    pub cut: u64,
    /// Blocks in a chunk of this file.
    #[prost(uint32, tag = "13")]
    pub chunk_blocks: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct NameRequest {
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub name: Vec<u8>,
    /// For an unlink: the name must be a directory's.
    #[prost(bool, tag = "3")]
    pub directory: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct InodeRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct AttrReply {
    #[prost(message, optional, tag = "1")]
    pub attr: Option<Attr>,
    /// Of a file that was opened: another client may know another size and another time.
    #[prost(bool, tag = "2")]
    pub unsettled: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct SetAttrRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// Permission bits.
    #[prost(uint32, optional, tag = "2")]
    pub mode: Option<u32>,
    #[prost(uint32, optional, tag = "3")]
    pub uid: Option<u32>,
    #[prost(uint32, optional, tag = "4")]
    pub gid: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    pub size: Option<u64>,
    #[prost(int64, optional, tag = "6")]
    pub atime_ns: Option<i64>,
    #[prost(int64, optional, tag = "7")]
    pub mtime_ns: Option<i64>,
    #[prost(int64, optional, tag = "8")]
    pub ctime_ns: Option<i64>,
    /// The size only grows: it is what a writer has reached, not a truncation.
    #[prost(bool, tag = "9")]
    pub grow: bool,
    /// With `grow`: the truncate generation that the writer knew. A file that was cut since keeps its size.
    #[prost(uint64, tag = "10")]
    pub cut: u64,
    /// The set-user-id bit falls, and the set-group-id bit of what its group may execute; not those of a directory.
    #[prost(bool, tag = "11")]
    pub drop_set_id: bool,
    /// Without `grow`: the truncate generation that the size which is to change belongs to. Of another one nothing is changed.
    #[prost(uint64, optional, tag = "12")]
    pub known_cut: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct MakeRequest {
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub name: Vec<u8>,
    /// Type and permission bits.
    #[prost(uint32, tag = "3")]
    pub mode: u32,
    #[prost(uint32, tag = "4")]
    pub uid: u32,
    #[prost(uint32, tag = "5")]
    pub gid: u32,
    #[prost(uint32, tag = "6")]
    pub rdev: u32,
    /// Target of a symbolic link.
    #[prost(bytes = "vec", tag = "7")]
    pub target: Vec<u8>,
    /// The new file is open at once.
    #[prost(bool, tag = "8")]
    pub open: bool,
    /// A file without a name, which goes when its last user closes it unless it is given one before.
    #[prost(bool, tag = "9")]
    pub nameless: bool,
    /// Permissions that are not given, where the directory hands down no access control list.
    #[prost(uint32, tag = "10")]
    pub umask: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct LinkRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(uint64, tag = "2")]
    pub dir: u64,
    #[prost(bytes = "vec", tag = "3")]
    pub name: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RenameRequest {
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub name: Vec<u8>,
    #[prost(uint64, tag = "3")]
    pub new_dir: u64,
    #[prost(bytes = "vec", tag = "4")]
    pub new_name: Vec<u8>,
    /// Fail if the new name exists.
    #[prost(bool, tag = "5")]
    pub no_replace: bool,
    /// Both names exist and change places.
    #[prost(bool, tag = "6")]
    pub exchange: bool,
    /// A character device 0, 0 takes the old name.
    #[prost(bool, tag = "7")]
    pub whiteout: bool,
    /// Owner of that device.
    #[prost(uint32, tag = "8")]
    pub uid: u32,
    #[prost(uint32, tag = "9")]
    pub gid: u32,
    /// The start of the service that has what was written to the moved file; 0 for any.
    #[prost(uint64, tag = "10")]
    pub start: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct ReadDirRequest {
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    /// Entries after this cookie; 0 for all.
    #[prost(uint64, tag = "2")]
    pub after: u64,
    #[prost(uint32, tag = "3")]
    pub limit: u32,
    /// Bring the attributes too.
    #[prost(bool, tag = "4")]
    pub attributes: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct DirEntry {
    #[prost(bytes = "vec", tag = "1")]
    pub name: Vec<u8>,
    #[prost(uint64, tag = "2")]
    pub ino: u64,
    /// Type bits as in `st_mode`.
    #[prost(uint32, tag = "3")]
    pub kind: u32,
    /// Stable place of the entry in its directory.
    #[prost(uint64, tag = "4")]
    pub cookie: u64,
    #[prost(message, optional, tag = "5")]
    pub attr: Option<Attr>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ReadDirReply {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<DirEntry>,
    #[prost(bool, tag = "2")]
    pub end: bool,
    /// The directory above.
    #[prost(uint64, tag = "3")]
    pub parent: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct BytesReply {
    #[prost(bytes = "vec", tag = "1")]
    pub bytes: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct XattrRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub name: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub value: Vec<u8>,
    /// Fail if it exists.
    #[prost(bool, tag = "4")]
    pub create: bool,
    /// Fail if it does not exist.
    #[prost(bool, tag = "5")]
    pub replace: bool,
    /// With an access control list: the set-group-id bit goes.
    #[prost(bool, tag = "6")]
    pub kill_set_group_id: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct NamesReply {
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub names: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StatFsReply {
    #[prost(uint64, tag = "1")]
    pub total_blocks: u64,
    #[prost(uint64, tag = "2")]
    pub free_blocks: u64,
    #[prost(uint64, tag = "3")]
    pub available_blocks: u64,
    #[prost(uint64, tag = "4")]
    pub inodes: u64,
    #[prost(uint64, tag = "5")]
    pub free_inodes: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct HelloRequest {
    #[prost(uint32, tag = "1")]
    pub oldest_version: u32,
    #[prost(uint32, tag = "2")]
    pub newest_version: u32,
    /// Who mounts: host and process, for people.
    #[prost(string, tag = "3")]
    pub client: String,
    /// Where it mounts, for people; empty for a client that does not.
    #[prost(string, tag = "4")]
    pub mount: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct HelloReply {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    #[prost(uint64, tag = "2")]
    pub session: u64,
    /// The root directory's inode.
    #[prost(uint64, tag = "3")]
    pub root: u64,
    #[prost(uint32, tag = "4")]
    pub chunk_blocks: u32,
    /// The session ends when the service hears nothing for this long; 0 for a session that ends with its process.
    #[prost(uint32, tag = "5")]
    pub lease_ms: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct OpenCount {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// How often the client has it open, at most 2^32.
    #[prost(uint32, tag = "2")]
    pub count: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct PingRequest {
    /// After a restart of the service: what the client has open.
    #[prost(message, repeated, tag = "1")]
    pub opens: Vec<OpenCount>,
    /// Nothing that it has open is missing, with what it sent before.
    #[prost(bool, tag = "2")]
    pub reclaimed: bool,
    /// After a restart of the service: the locks that the client holds.
    #[prost(message, repeated, tag = "3")]
    pub locks: Vec<LockRequest>,
    /// The start of the service that is told this; another one knows nothing of what went before and leaves it alone.
    #[prost(uint64, tag = "4")]
    pub start: u64,
}

/// A lease that is given back, or asked for.
#[derive(Clone, PartialEq, Message)]
pub struct LeaseRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// The holder may change the file; otherwise it may keep what it reads.
    #[prost(bool, tag = "2")]
    pub exclusive: bool,
    /// First byte; always 0.
    #[prost(uint64, tag = "3")]
    pub first: u64,
    /// Last byte; always the greatest number.
    #[prost(uint64, tag = "4")]
    pub last: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct LeaseReply {
    /// The number of this grant; later ones of the same start of the service are greater.
    #[prost(uint64, tag = "1")]
    pub grant: u64,
}

/// What a client must do because of others.
#[derive(Clone, PartialEq, Message)]
pub struct LeaseCall {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// The inode; 0 for all, when the client was alone until now.
    #[prost(uint64, tag = "2")]
    pub ino: u64,
    /// Make known what was written, and keep the lease; otherwise give it back.
    #[prost(bool, tag = "3")]
    pub settle: bool,
    /// Grants up to this one are meant.
    #[prost(uint64, tag = "4")]
    pub grant: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct ReleasedLease {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(uint64, tag = "2")]
    pub grant: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchRequest {
    /// Calls with greater numbers are news.
    #[prost(uint64, tag = "1")]
    pub seen: u64,
    /// Calls that were answered.
    #[prost(uint64, repeated, tag = "2")]
    pub answered: Vec<u64>,
    #[prost(message, repeated, tag = "3")]
    pub released: Vec<ReleasedLease>,
    /// Wait for news.
    #[prost(bool, tag = "4")]
    pub wait: bool,
    /// The client believes to be alone.
    #[prost(bool, tag = "5")]
    pub alone: bool,
    /// The client keeps nothing any more, until its next request.
    #[prost(bool, tag = "6")]
    pub leaves: bool,
    /// The start of the service whose numbers these are.
    #[prost(uint64, tag = "7")]
    pub generation: u64,
    /// Calls to settle, of those answered, that could not be done.
    #[prost(message, repeated, tag = "8")]
    pub failed: Vec<FailedSettle>,
}

/// Why a client could not say what it changed of a file, or of all of them.
#[derive(Clone, PartialEq, Message)]
pub struct FailedSettle {
    /// The call.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// errno(3); 0 for none that fits.
    #[prost(uint32, tag = "2")]
    pub errno: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchReply {
    /// Nobody else uses the file system: the client needs no leases.
    #[prost(bool, tag = "1")]
    pub alone: bool,
    #[prost(message, repeated, tag = "2")]
    pub calls: Vec<LeaseCall>,
    /// Inodes on which locks that the client asked for may be free.
    #[prost(uint64, repeated, tag = "3")]
    pub unlocked: Vec<u64>,
}

/// An advisory lock.
#[derive(Clone, PartialEq, Message)]
pub struct LockRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// Who holds it, as its client tells them apart.
    #[prost(uint64, tag = "2")]
    pub owner: u64,
    #[prost(uint64, tag = "3")]
    pub first: u64,
    /// Last byte, itself locked.
    #[prost(uint64, tag = "4")]
    pub last: u64,
    #[prost(enumeration = "LockChange", tag = "5")]
    pub change: i32,
    /// The process that asks, as its host knows it.
    #[prost(uint32, tag = "6")]
    pub pid: u32,
    /// Of flock(2), which knows nothing of those of fcntl(2).
    #[prost(bool, tag = "7")]
    pub flock: bool,
    /// Only say what is in the way.
    #[prost(bool, tag = "8")]
    pub test: bool,
    /// The client will ask again when it hears that something was given up.
    #[prost(bool, tag = "9")]
    pub wait: bool,
    /// The user it counts for.
    #[prost(uint32, tag = "10")]
    pub uid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum LockChange {
    Unlock = 0,
    Shared = 1,
    Exclusive = 2,
}

impl LockChange {
    /// What sets a lock of this kind.
    pub fn holding(exclusive: bool) -> Self {
        if exclusive { Self::Exclusive } else { Self::Shared }
    }
}

#[derive(Clone, PartialEq, Message)]
pub struct LockReply {
    /// What is in the way; none when it is set, or could be.
    #[prost(message, optional, tag = "1")]
    pub conflict: Option<LockRequest>,
    /// The service was started again and does not know all locks yet: ask again.
    #[prost(bool, tag = "2")]
    pub early: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct EmptyReply {}
