//! Message bodies of the name space, in protobuf. Field numbers never change.
#![allow(missing_docs)]

use penstock_base::{FileId, Id128};
use prost::Message;

/// Returns the set-id bits of `mode` that must be cleared when a non-owner writes to the file or its owner
/// changes. The set-group-id bit is included only with group-execute permission: without it the bit does not
/// grant a group.
pub fn set_id_bits(mode: u32) -> u32 {
    const SET_UID: u32 = 0o4000;
    const SET_GID: u32 = 0o2000;
    const GROUP_EXECUTES: u32 = 0o010;
    match mode & GROUP_EXECUTES {
        0 => mode & SET_UID,
        _ => mode & (SET_UID | SET_GID),
    }
}

/// The extended attribute that gives a program capabilities (capabilities(7)).
pub const CAPABILITY: &[u8] = b"security.capability";

/// Nanoseconds in a second: the end of [`Time::nsec`].
pub const NSEC_END: u32 = 1_000_000_000;

/// A time: seconds since 1970, which may be negative, and nanoseconds after that, which may not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Message)]
pub struct Time {
    #[prost(sint64, tag = "1")]
    pub sec: i64,
    /// Below [`NSEC_END`].
    #[prost(uint32, tag = "2")]
    pub nsec: u32,
}

impl Time {
    /// The time that is `ns` nanoseconds after 1970.
    pub fn from_ns(ns: i64) -> Self {
        let end = i64::from(NSEC_END);
        let nsec = u32::try_from(ns.rem_euclid(end)).expect("below a second");
        Self { sec: ns.div_euclid(end), nsec }
    }

    /// True if the nanoseconds are below a second.
    pub fn is_valid(&self) -> bool {
        self.nsec < NSEC_END
    }
}

/// The targets over which a file is spread, as its inode says.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct FileLayout {
    #[prost(uint32, tag = "1")]
    pub pool: u32,
    #[prost(uint32, tag = "2")]
    pub map_version: u32,
    #[prost(uint32, tag = "3")]
    pub first: u32,
    #[prost(uint32, tag = "4")]
    pub count: u32,
    #[prost(uint32, tag = "5")]
    pub turn: u32,
    #[prost(uint32, tag = "6")]
    pub replicas: u32,
}

/// Attributes of an inode.
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
    #[prost(message, required, tag = "8")]
    pub atime: Time,
    #[prost(message, required, tag = "9")]
    pub mtime: Time,
    #[prost(message, required, tag = "10")]
    pub ctime: Time,
    #[prost(message, required, tag = "11")]
    pub btime: Time,
    /// Truncate generation.
    #[prost(uint64, tag = "12")]
    pub truncations: u64,
    /// Blocks in a chunk of this file.
    #[prost(uint32, tag = "13")]
    pub chunk_blocks: u32,
    /// Blocks of 4 KiB that its contents hold.
    #[prost(uint64, tag = "14")]
    pub blocks: u64,
    /// The branch; 0 is the file system itself.
    #[prost(uint64, tag = "15")]
    pub branch: u64,
    /// The targets with the data; none for the one alone that shares the key-value store of the names.
    #[prost(message, optional, tag = "16")]
    pub layout: Option<FileLayout>,
    /// In the reply to a request with `lease`: the number of the session's lease on the attributes, and on
    /// the names of a directory; 0 for none.
    #[prost(uint64, tag = "17")]
    pub lease: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct NameRequest {
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub name: Vec<u8>,
    /// For an unlink: fail unless the name is a directory's.
    #[prost(bool, tag = "3")]
    pub directory: bool,
    /// For a lookup: grant a lease on the attributes of the inode, if nobody wants to change them.
    #[prost(bool, tag = "4")]
    pub lease: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct InodeRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
}

/// A request for attributes.
#[derive(Clone, PartialEq, Message)]
pub struct GetAttrRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// A number of the client, under which it waits if other clients must sync the file first. With 0 it
    /// takes what the service has.
    #[prost(uint64, tag = "2")]
    pub ticket: u64,
    /// Grant a lease on the attributes, if nobody wants to change them.
    #[prost(bool, tag = "3")]
    pub lease: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct AttrReply {
    #[prost(message, optional, tag = "1")]
    pub attr: Option<Attr>,
    /// In the reply to an open: another client may have a size and a time of this file that it has not sent.
    #[prost(bool, tag = "2")]
    pub may_be_unsynced: bool,
    /// In the reply to a GetAttr with a ticket: other clients were asked to sync the file. A
    /// [`WatchReply::synced`] says when they have; then the client asks again, without a ticket.
    #[prost(bool, tag = "3")]
    pub wait: bool,
    /// In the reply to an open of a regular file by a user, also one that it made.
    #[prost(message, optional, tag = "4")]
    pub grant: Option<GrantReply>,
    /// In the reply to a change.
    #[prost(message, optional, tag = "5")]
    pub change: Option<Change>,
    /// In the reply to a Make or an Unlink: the directory after it. A stored result does without it.
    #[prost(message, optional, tag = "6")]
    pub dir: Option<Attr>,
}

/// A change that was carried out, for a client that may have to send it again after a restart.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Change {
    /// The place of the change in the order of all changes, from 1.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// The time that it counts as made at.
    #[prost(message, required, tag = "2")]
    pub time: Time,
    /// A digest of the numbers of the inodes that it changed, in the order of their roles.
    #[prost(uint64, tag = "3")]
    pub touched: u64,
    /// The inode that lost its last name by it; 0 for none.
    #[prost(uint64, tag = "4")]
    pub removed: u64,
    /// Of a truncation: the truncate generation after it; 0 for any other change.
    #[prost(uint64, tag = "5")]
    pub truncations: u64,
}

/// A change that was acknowledged by an earlier start of the service, and may be lost. The sequence in the
/// header is that of the first time.
#[derive(Clone, PartialEq, Message)]
pub struct RepeatRequest {
    /// The kind of the message that made the change. 0, without a sequence: only wait until all clients have
    /// repeated what came before the change.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Its body.
    #[prost(bytes = "vec", tag = "2")]
    pub body: Vec<u8>,
    /// The change in the reply to it.
    #[prost(message, required, tag = "3")]
    pub change: Change,
    /// The inode that it made; 0 for none.
    #[prost(uint64, tag = "4")]
    pub made: u64,
    /// The generation of the service that is meant. Another one has yet to get what came before.
    #[prost(uint64, tag = "5")]
    pub start: u64,
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
    #[prost(message, optional, tag = "6")]
    pub atime: Option<Time>,
    #[prost(message, optional, tag = "7")]
    pub mtime: Option<Time>,
    #[prost(message, optional, tag = "8")]
    pub ctime: Option<Time>,
    /// The size is the end of the last write, not a truncation: it only grows.
    #[prost(bool, tag = "9")]
    pub grow: bool,
    /// With `grow`: the truncate generation that the writer knew. If the file was truncated since, its size
    /// and modification time stay.
    #[prost(uint64, tag = "10")]
    pub truncations: u64,
    /// Clear the bits that [`set_id_bits`] returns, unless the inode is a directory.
    #[prost(bool, tag = "11")]
    pub drop_set_id: bool,
    /// Without `grow`: the truncate generation on which the change is based. Nothing changes if the inode has
    /// another one.
    #[prost(uint64, optional, tag = "12")]
    pub known_truncations: Option<u64>,
    /// From a user: set the times of access and modification to the service's time. Permitted to all who may
    /// write.
    #[prost(bool, tag = "13")]
    pub touch: bool,
    /// From a user: the grant under which it changes the size.
    #[prost(message, optional, tag = "14")]
    pub grant: Option<GrantReply>,
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
    /// Open the new file in the same request.
    #[prost(bool, tag = "8")]
    pub open: bool,
    /// Create a file without a name. It is removed when its last user closes it, unless it got a name before.
    #[prost(bool, tag = "9")]
    pub nameless: bool,
    /// Permission bits to clear, unless the directory has a default access control list.
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
    /// Exchange both names, which must exist.
    #[prost(bool, tag = "6")]
    pub exchange: bool,
    /// Put a whiteout, a character device 0, 0, in place of the old name.
    #[prost(bool, tag = "7")]
    pub whiteout: bool,
    /// Owner of the whiteout.
    #[prost(uint32, tag = "8")]
    pub uid: u32,
    #[prost(uint32, tag = "9")]
    pub gid: u32,
    /// The generation of the service that has the data written to the moved file; 0 for any. A service of
    /// another generation rejects the request with RefreshMap.
    #[prost(uint64, tag = "10")]
    pub start: u64,
    /// The inodes that the client found and made durable as far as that is needed. A service that finds
    /// others rejects the request with RefreshMap; without this it does not compare.
    #[prost(message, optional, tag = "11")]
    pub found: Option<FoundNames>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RenameReply {
    /// The inode that was replaced, as it is after that.
    #[prost(message, optional, tag = "1")]
    pub replaced: Option<Attr>,
    /// None if both names were of one inode, and nothing was changed.
    #[prost(message, optional, tag = "2")]
    pub change: Option<Change>,
}

/// The inodes of the two names of a rename; 0 for a name that does not exist.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct FoundNames {
    #[prost(uint64, tag = "1")]
    pub moved: u64,
    #[prost(uint64, tag = "2")]
    pub replaced: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct ReadDirRequest {
    #[prost(uint64, tag = "1")]
    pub dir: u64,
    /// List only entries after this cookie; 0 for all.
    #[prost(uint64, tag = "2")]
    pub after: u64,
    #[prost(uint32, tag = "3")]
    pub limit: u32,
    /// Include the attributes of each entry.
    #[prost(bool, tag = "4")]
    pub attributes: bool,
    /// Grant leases on these attributes.
    #[prost(bool, tag = "5")]
    pub lease: bool,
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
    /// Stable position of the entry in its directory.
    #[prost(uint64, tag = "4")]
    pub cookie: u64,
    #[prost(message, optional, tag = "5")]
    pub attr: Option<Attr>,
    /// The branch of the inode.
    #[prost(uint64, tag = "6")]
    pub branch: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct ReadDirReply {
    #[prost(message, repeated, tag = "1")]
    pub entries: Vec<DirEntry>,
    #[prost(bool, tag = "2")]
    pub end: bool,
    /// The parent directory, and its branch.
    #[prost(uint64, tag = "3")]
    pub parent: u64,
    #[prost(uint64, tag = "4")]
    pub parent_branch: u64,
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
    /// Fail if the attribute exists.
    #[prost(bool, tag = "4")]
    pub create: bool,
    /// Fail if the attribute does not exist.
    #[prost(bool, tag = "5")]
    pub replace: bool,
    /// With an access control list: clear the set-group-id bit of the mode.
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
    /// Name of the session: 16 random bytes, which nobody else knows. A repeat with the name of a session
    /// begins no other one.
    #[prost(bytes = "vec", tag = "1")]
    pub name: Vec<u8>,
    /// Host and process of the client, for people.
    #[prost(string, tag = "2")]
    pub client: String,
    /// Mount point, for people; empty for a client that does not mount.
    #[prost(string, tag = "3")]
    pub mount: String,
    /// The role that the client asks for ([`ROLE_MOUNT`]).
    #[prost(uint32, tag = "4")]
    pub role: u32,
    /// The fileset that is asked for; empty for the file system itself.
    #[prost(string, tag = "5")]
    pub fileset: String,
    /// One of several connections of the session; 0 is the only one.
    #[prost(uint32, tag = "6")]
    pub lane: u32,
}

impl HelloRequest {
    /// The request of a mount for a session of this name.
    pub fn of_mount(name: Id128) -> Self {
        Self { name: name.0.to_vec(), role: ROLE_MOUNT, ..Self::default() }
    }
}

/// The role of a client whose kernel checks permissions.
pub const ROLE_MOUNT: u32 = 1;
/// The role of a client that asks for several users, whose permissions the service checks.
pub const ROLE_GATEWAY: u32 = 3;

/// A user for whom a session asks.
#[derive(Clone, PartialEq, Message)]
pub struct UserRequest {
    #[prost(uint32, tag = "1")]
    pub uid: u32,
    /// The group of files that the user makes.
    #[prost(uint32, tag = "2")]
    pub gid: u32,
    /// All other groups.
    #[prost(uint32, repeated, tag = "3")]
    pub groups: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct UserReply {
    /// The number by which headers name the user, until the service is started again.
    #[prost(uint32, tag = "1")]
    pub user: u32,
}

/// A request to open an inode.
#[derive(Clone, PartialEq, Message)]
pub struct OpenRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// From a user: the access that is wanted, [`ACCESS_READ`] and [`ACCESS_WRITE`].
    #[prost(uint32, tag = "2")]
    pub access: u32,
}

/// Access to read.
pub const ACCESS_READ: u32 = 1;
/// Access to write.
pub const ACCESS_WRITE: u32 = 2;

/// The right to ask for the data of a file.
#[derive(Clone, PartialEq, Message)]
pub struct GrantReply {
    #[prost(fixed64, tag = "1")]
    pub grant: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub proof: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct HelloReply {
    /// The number by which the requests of this connection name the session.
    #[prost(uint64, tag = "1")]
    pub session: u64,
    /// The root directory's inode, and its branch.
    #[prost(uint64, tag = "2")]
    pub root: u64,
    #[prost(uint64, tag = "3")]
    pub branch: u64,
    #[prost(uint32, tag = "4")]
    pub chunk_blocks: u32,
    /// Lease time of the session in milliseconds: it ends when the client is silent for this long. 0 for a
    /// session that ends with its process.
    #[prost(uint32, tag = "5")]
    pub lease_ms: u32,
    /// The targets that may have data of the file system: first the one that shares the key-value store of
    /// the names.
    #[prost(message, repeated, tag = "6")]
    pub targets: Vec<TargetPlace>,
    /// The number of the fileset, which requests address.
    #[prost(uint64, tag = "7")]
    pub fileset: u64,
}

/// A target, and where a client reaches it.
#[derive(Clone, PartialEq, Message)]
pub struct TargetPlace {
    #[prost(uint32, tag = "1")]
    pub target: u32,
    /// Addresses, the best first; none for the connection over which this came.
    #[prost(string, repeated, tag = "2")]
    pub addresses: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct OpenCount {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// The number of times that the client has it open; 0 if not at all.
    #[prost(uint32, tag = "2")]
    pub count: u32,
    #[prost(uint64, tag = "3")]
    pub branch: u64,
    /// From a gateway: the user who has it open.
    #[prost(uint32, tag = "4")]
    pub user: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct PingRequest {
    /// After a restart of the service: inodes that the client has open.
    #[prost(message, repeated, tag = "1")]
    pub opens: Vec<OpenCount>,
    /// The list of opens and locks, together with earlier pings to this start of the service, is complete.
    #[prost(bool, tag = "2")]
    pub reclaimed: bool,
    /// After a restart of the service: locks that the client owns.
    #[prost(message, repeated, tag = "3")]
    pub locks: Vec<LockRequest>,
    /// The generation of the service that the client reports this to. A service of another generation ignores
    /// opens and locks: it lacks the earlier parts.
    #[prost(uint64, tag = "4")]
    pub start: u64,
}

/// A request for a lease.
#[derive(Clone, PartialEq, Message)]
pub struct LeaseRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// The owner may also keep a size and a time that it has not sent; otherwise it may only cache reads.
    #[prost(bool, tag = "2")]
    pub exclusive: bool,
    /// First byte; must be 0: leases are on full files.
    #[prost(uint64, tag = "3")]
    pub first: u64,
    /// Last byte; must be 2^64-1.
    #[prost(uint64, tag = "4")]
    pub last: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct LeaseReply {
    /// The number of this grant; 0 with `wait`. Numbers rise within one start of the service.
    #[prost(uint64, tag = "1")]
    pub grant: u64,
    /// Others hold it. A [`WatchReply::granted`] gives it when they have given theirs back.
    #[prost(bool, tag = "2")]
    pub wait: bool,
}

/// A revocation: a client must give a lease back, or sync a file, because another client waits.
#[derive(Clone, PartialEq, Message)]
pub struct LeaseCall {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// The inode; 0 revokes everything, also state that the client keeps without a lease.
    #[prost(uint64, tag = "2")]
    pub ino: u64,
    /// True: sync the file and keep the lease. False: sync the file and give the lease back.
    #[prost(bool, tag = "3")]
    pub is_sync: bool,
    /// Revokes grants with this number and smaller ones.
    #[prost(uint64, tag = "4")]
    pub grant: u64,
    #[prost(uint64, tag = "5")]
    pub branch: u64,
    /// It revokes the lease on the inode's attributes, and on the names of a directory.
    #[prost(bool, tag = "6")]
    pub attributes: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct ReleasedLease {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(uint64, tag = "2")]
    pub grant: u64,
    #[prost(uint64, tag = "3")]
    pub branch: u64,
    /// It is a lease on attributes.
    #[prost(bool, tag = "4")]
    pub attributes: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchRequest {
    /// The greatest number of anything in replies that the client has received.
    #[prost(uint64, tag = "1")]
    pub seen: u64,
    /// Numbers of revocations that the client has carried out.
    #[prost(uint64, repeated, tag = "2")]
    pub answered: Vec<u64>,
    #[prost(message, repeated, tag = "3")]
    pub released: Vec<ReleasedLease>,
    /// Reply only when there is news, or after a time limit.
    #[prost(bool, tag = "4")]
    pub wait: bool,
    /// The client believes that it is the only one.
    #[prost(bool, tag = "5")]
    pub alone: bool,
    /// The client has given up all cached state and all leases, until its next request.
    #[prost(bool, tag = "6")]
    pub leaves: bool,
    /// The generation of the service that gave these numbers. Another one ignores them.
    #[prost(uint64, tag = "7")]
    pub generation: u64,
    /// Those of the `answered` revocations for which the sync failed.
    #[prost(message, repeated, tag = "8")]
    pub failed: Vec<FailedSync>,
    /// Files of which the client no longer wants to change the size, although it was told to ask again.
    #[prost(message, repeated, tag = "9")]
    pub resigned: Vec<FileRef>,
}

/// The error of a client that could not sync a file, or all files, for a revocation.
#[derive(Clone, PartialEq, Message)]
pub struct FailedSync {
    /// The number of the revocation.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// errno(3); 0 if none fits.
    #[prost(uint32, tag = "2")]
    pub errno: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchReply {
    /// No other client uses the file system: the client needs no leases.
    #[prost(bool, tag = "1")]
    pub alone: bool,
    #[prost(message, repeated, tag = "2")]
    pub calls: Vec<LeaseCall>,
    /// Files with locks that the client waits for and that may be free now.
    #[prost(message, repeated, tag = "3")]
    pub unlocked: Vec<Unlocked>,
    /// Leases that the client waited for.
    #[prost(message, repeated, tag = "4")]
    pub granted: Vec<Granted>,
    /// GetAttr requests for which others have synced the file, or could not.
    #[prost(message, repeated, tag = "5")]
    pub synced: Vec<Synced>,
    /// Requests that failed with EAGAIN before this number was given may succeed now; 0 for none.
    #[prost(uint64, tag = "6")]
    pub again: u64,
}

/// A file in a list.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct FileRef {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(uint64, tag = "2")]
    pub branch: u64,
}

/// A file with a lock that was released.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Unlocked {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    #[prost(uint64, tag = "2")]
    pub branch: u64,
    #[prost(uint64, tag = "3")]
    pub number: u64,
}

/// A lease that a client waited for.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Granted {
    /// The number of the grant.
    #[prost(uint64, tag = "1")]
    pub grant: u64,
    #[prost(uint64, tag = "2")]
    pub ino: u64,
    #[prost(uint64, tag = "3")]
    pub branch: u64,
    #[prost(bool, tag = "4")]
    pub exclusive: bool,
}

/// The end of a wait for others to sync a file.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub struct Synced {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// The number that the client gave its request.
    #[prost(uint64, tag = "2")]
    pub ticket: u64,
    /// errno(3) of a client that could not sync; 0 if all have.
    #[prost(uint32, tag = "3")]
    pub errno: u32,
}

/// An advisory lock: a request to set, release or test it, or a lock in the way of one.
#[derive(Clone, PartialEq, Message)]
pub struct LockRequest {
    #[prost(uint64, tag = "1")]
    pub ino: u64,
    /// The owner, a number that its client chooses.
    #[prost(uint64, tag = "2")]
    pub owner: u64,
    #[prost(uint64, tag = "3")]
    pub first: u64,
    /// Last byte (inclusive).
    #[prost(uint64, tag = "4")]
    pub last: u64,
    #[prost(enumeration = "LockChange", tag = "5")]
    pub change: i32,
    /// The process that asks, as its host numbers it.
    #[prost(uint32, tag = "6")]
    pub pid: u32,
    /// True for a flock(2) lock. Locks of flock(2) and of fcntl(2) never conflict.
    #[prost(bool, tag = "7")]
    pub flock: bool,
    /// Test only: report a conflicting lock and set nothing.
    #[prost(bool, tag = "8")]
    pub test: bool,
    /// On a conflict, report in Watch when the lock may be free: the client will ask again.
    #[prost(bool, tag = "9")]
    pub wait: bool,
    /// The user against whose limit the lock counts.
    #[prost(uint32, tag = "10")]
    pub uid: u32,
    /// In a list: the branch of the file.
    #[prost(uint64, tag = "11")]
    pub branch: u64,
    /// In a list from a gateway: the user whose lock it is.
    #[prost(uint32, tag = "12")]
    pub user: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum LockChange {
    Unlock = 0,
    Shared = 1,
    Exclusive = 2,
}

impl LockChange {
    /// The change that sets an exclusive or a shared lock.
    pub fn holding(exclusive: bool) -> Self {
        if exclusive { Self::Exclusive } else { Self::Shared }
    }
}

#[derive(Clone, PartialEq, Message)]
pub struct LockReply {
    /// A conflicting lock; none if the lock was set, or in a test could be set.
    #[prost(message, optional, tag = "1")]
    pub conflict: Option<LockRequest>,
    /// The service has restarted and does not have all locks yet: the client must ask again.
    #[prost(bool, tag = "2")]
    pub early: bool,
}

/// The reply to a Ping.
#[derive(Clone, PartialEq, Message)]
pub struct PingReply {
    /// Number of sessions that survived the last restart of the service and ended without a report: what they
    /// had acknowledged and the restart has lost is not there.
    #[prost(uint64, tag = "1")]
    pub unreported: u64,
    /// Number of the locks in the request that the session does not get back: another one has said that they
    /// were its own.
    #[prost(uint64, tag = "2")]
    pub refused_locks: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct EmptyReply {}

macro_rules! name_files {
    ($($message:ident),* $(,)?) => {
        $(impl $message {
            /// The file that this is about.
            pub fn file(&self) -> FileId {
                FileId::of_numbers(self.branch, self.ino)
            }
        })*
    };
}

name_files!(Attr, DirEntry, FileRef, Granted, LeaseCall, LockRequest, OpenCount, ReleasedLease, Unlocked);

impl HelloReply {
    /// The root directory.
    pub fn root(&self) -> FileId {
        FileId::of_numbers(self.branch, self.root)
    }
}

impl ReadDirReply {
    /// The parent directory of the one that was read.
    pub fn parent(&self) -> FileId {
        FileId::of_numbers(self.parent_branch, self.parent)
    }
}

/// A reply, as a client takes it.
pub trait Reply: Message + Default {
    /// The part of the reply that a client of this release does not know, and must not ignore.
    fn unknown(&self) -> Option<&'static str> {
        None
    }

    /// The change that was carried out, and the inode that was made or changed; 0 for none.
    fn change(&self) -> Option<(Change, u64)> {
        None
    }

    /// The directory that was changed, after that.
    fn dir(&self) -> Option<&Attr> {
        None
    }
}

impl Attr {
    fn unknown(&self) -> Option<&'static str> {
        match (self.branch, &self.layout) {
            (0, None) => None,
            (0, Some(FileLayout { pool: 0, map_version: 0, replicas: 1, .. })) => None,
            (0, Some(_)) => Some("a file on targets of another map, or with several copies"),
            _ => Some("an inode of another branch"),
        }
    }
}

impl Reply for AttrReply {
    fn unknown(&self) -> Option<&'static str> {
        self.attr.as_ref()?.unknown()
    }

    fn change(&self) -> Option<(Change, u64)> {
        Some((self.change?, self.attr.as_ref().map_or(0, |attr| attr.ino)))
    }

    fn dir(&self) -> Option<&Attr> {
        self.dir.as_ref()
    }
}

impl Reply for RenameReply {
    fn unknown(&self) -> Option<&'static str> {
        self.replaced.as_ref()?.unknown()
    }

    fn change(&self) -> Option<(Change, u64)> {
        Some((self.change?, 0))
    }
}

impl Reply for ReadDirReply {
    fn unknown(&self) -> Option<&'static str> {
        let elsewhere = self.parent_branch != 0 || self.entries.iter().any(|entry| entry.branch != 0);
        let attributes =
            || self.entries.iter().filter_map(|entry| entry.attr.as_ref()).find_map(Attr::unknown);
        if elsewhere { Some("an entry of another branch") } else { attributes() }
    }
}

impl Reply for HelloReply {
    fn unknown(&self) -> Option<&'static str> {
        let is_here = |place: &TargetPlace| place.addresses.is_empty();
        let knows_targets = !self.targets.is_empty() && self.targets.iter().all(is_here);
        let knows = (self.branch, self.fileset) == (0, 0) && knows_targets;
        (!knows).then_some("a file system on targets of other machines, or a part of one")
    }
}

impl Reply for WatchReply {
    fn unknown(&self) -> Option<&'static str> {
        let calls = self.calls.iter().map(|call| call.branch);
        let granted = self.granted.iter().map(|lease| lease.branch);
        let mut branches = calls.chain(granted).chain(self.unlocked.iter().map(|file| file.branch));
        branches.any(|branch| branch != 0).then_some("a file of another branch")
    }
}

impl Reply for LockReply {
    fn unknown(&self) -> Option<&'static str> {
        self.conflict.as_ref().filter(|lock| lock.branch != 0).map(|_| "a lock of another branch")
    }
}

impl Reply for EmptyReply {}

impl Reply for PingReply {}
impl Reply for UserReply {}
impl Reply for BytesReply {}
impl Reply for NamesReply {}
impl Reply for StatFsReply {}
impl Reply for LeaseReply {}
