//! The permissions of users for whom a session asks, as Linux decides them: mode bits, access control lists,
//! the sticky bit, ownership, and the privileges of user 0.
//!
//! A request of a trusted session has no user: its kernel has decided, and everything here permits it.
//!
//! Decisions are made in the order in which Linux makes them, so that the error is the same when several
//! things forbid an operation.

use crate::acl::{ACCESS, Acl};
use crate::error::MetaError;
use crate::inode::{FileKind, Inode, SET_GROUP_ID, STICKY};
use crate::names::Names;
use crate::parts::Parts;
use crate::rows::{decode_acl, xattr_key};
use penstock_base::{FileId, Ino};
use penstock_session::{Request, User, grants};
use penstock_wire::data::Right;
use penstock_wire::metadata::{ACCESS_READ, ACCESS_WRITE, GrantReply, set_id_bits};
use rustix::io::Errno;
use std::rc::Rc;

/// Access to an inode, as a set of the bits of one class of a mode.
pub(crate) const READ: u32 = 4;
/// To write.
pub(crate) const WRITE: u32 = 2;
/// To execute a file, or to look up names in a directory.
pub(crate) const EXECUTE: u32 = 1;

const GROUP_BITS: u32 = 0o070;
const ALL_EXECUTE: u32 = 0o111;

/// The one who asks.
pub(crate) struct Asker<'a> {
    parts: &'a Parts,
    who: Request,
    /// None for a trusted session.
    user: Option<Rc<User>>,
}

impl<'a> Asker<'a> {
    /// The one for whom a request is carried out.
    pub(crate) fn of(parts: &'a Parts, who: Request) -> Result<Self, MetaError> {
        let user = parts.clients.user(who).map_err(|_| Errno::STALE)?;
        assert_eq!(user.is_some(), who.user > 0, "only a trusted session asks for nobody");
        Ok(Self { parts, who, user })
    }

    /// The user; none for a trusted session.
    pub(crate) fn user(&self) -> Option<&User> {
        self.user.as_deref()
    }

    /// True if nothing has to be checked.
    pub(crate) fn is_trusted(&self) -> bool {
        self.user.is_none()
    }

    /// Fails with ESTALE if the user has not reached an inode by its names.
    pub(crate) fn names(&self, ino: Ino) -> Result<(), MetaError> {
        let file = FileId::main(ino);
        match self.parts.clients.has_reached(self.who, file) {
            true => Ok(()),
            false => Err(Errno::STALE.into()),
        }
    }

    /// The user has reached an inode by a name.
    pub(crate) fn reached(&self, ino: Ino) {
        assert!(ino.0 > 0, "an inode has a number");
        self.parts.clients.reach(self.who, FileId::main(ino));
    }

    /// Fails with EACCES unless the user has this access to an inode.
    pub(crate) async fn may(&self, inode: &Inode, wanted: u32) -> Result<(), MetaError> {
        assert!((1..8).contains(&wanted), "access {wanted} is wanted");
        let Some(user) = self.user() else { return Ok(()) };
        // The list is asked only if it can give more or less than the mode says.
        let acl = match user.uid != inode.uid && inode.mode & GROUP_BITS != 0 {
            true => stored(&self.parts.names, inode.ino).await?,
            false => None,
        };
        match allows(user, inode, acl.as_ref(), wanted) {
            true => Ok(()),
            false => Err(Errno::ACCESS.into()),
        }
    }

    /// Fails unless a user may open an inode with this access.
    pub(crate) async fn may_open(&self, inode: &Inode, access: u32) -> Result<(), MetaError> {
        let (reads, writes) = (access & ACCESS_READ != 0, access & ACCESS_WRITE != 0);
        if access & !(ACCESS_READ | ACCESS_WRITE) != 0 || access == 0 {
            return Err(MetaError::Request(format!("access {access}, which there is not")));
        }
        match inode.kind() {
            FileKind::Directory if writes => return Err(Errno::ISDIR.into()),
            FileKind::Symlink => return Err(Errno::LOOP.into()),
            _ => {}
        }
        self.may(inode, if reads { READ } else { 0 } | if writes { WRITE } else { 0 }).await
    }

    /// The user opens an inode with this access. ENFILE if its session has too many open.
    pub(crate) fn open(&self, ino: Ino, access: u32) -> Result<(), MetaError> {
        match self.is_trusted() || self.parts.clients.open_for(self.who, FileId::main(ino), access) {
            true => Ok(()),
            false => Err(Errno::NFILE.into()),
        }
    }

    /// The user closes an inode once. EBADF if it has not opened it.
    pub(crate) fn close(&self, ino: Ino) -> Result<(), MetaError> {
        match self.is_trusted() || self.parts.clients.close_for(self.who, FileId::main(ino)) {
            true => Ok(()),
            false => Err(Errno::BADF.into()),
        }
    }

    /// Fails with EBADF unless the user has an inode open with this access; with 0 with any.
    pub(crate) fn has_open(&self, ino: Ino, access: u32) -> Result<(), MetaError> {
        match self.parts.clients.access_of(self.who, FileId::main(ino)) {
            Some(opened) if opened & access == access => Ok(()),
            _ => Err(Errno::BADF.into()),
        }
    }

    /// The grant of a user who has opened a regular file with this access, for data requests. None for a
    /// trusted session, which needs none, and for other inodes, which have no data.
    pub(crate) fn grant(&self, inode: &Inode, access: u32) -> Option<GrantReply> {
        let user = self.user().filter(|_| inode.kind() == FileKind::Regular)?;
        assert!(access & !(ACCESS_READ | ACCESS_WRITE) == 0, "access {access} is permitted");
        let right = self.parts.grants.grant((self.who.key, user), FileId::main(inode.ino), access.into());
        Some(GrantReply { grant: right.grant, proof: right.proof.to_vec() })
    }

    /// True if a request has a grant to write to a file.
    pub(crate) fn has_grant(&self, ino: Ino, grant: Option<&GrantReply>) -> bool {
        let Some(grant) = grant.filter(|_| !self.is_trusted()) else { return false };
        let Ok(proof) = grant.proof[..].try_into() else { return false };
        self.has_right(ino, &Right { grant: grant.grant, proof }, grants::WRITE)
    }

    /// True if this is a grant of the user for a file, with these rights.
    pub(crate) fn has_right(&self, ino: Ino, right: &Right, wanted: u64) -> bool {
        let Some(user) = self.user() else { return true };
        self.parts.grants.allows((self.who.key, user), FileId::main(ino), right, wanted)
    }

    /// True if the user owns an inode, or has the privileges of an owner.
    pub(crate) fn owns(&self, inode: &Inode) -> bool {
        self.user().is_none_or(|user| user.is_root() || user.uid == inode.uid)
    }

    /// Fails with EPERM unless the user owns an inode.
    pub(crate) fn check_owns(&self, inode: &Inode) -> Result<(), MetaError> {
        if self.owns(inode) { Ok(()) } else { Err(Errno::PERM.into()) }
    }

    /// True if the user has the privileges of user 0.
    pub(crate) fn is_privileged(&self) -> bool {
        self.user().is_none_or(User::is_root)
    }

    /// Fails with EPERM unless the user has the privileges of user 0.
    pub(crate) fn check_privileged(&self) -> Result<(), MetaError> {
        if self.is_privileged() { Ok(()) } else { Err(Errno::PERM.into()) }
    }

    /// Fails unless the user may remove the name of an inode in a directory: EACCES by the permissions of the
    /// directory, EPERM by its sticky bit.
    pub(crate) async fn may_remove(&self, dir: &Inode, inode: &Inode) -> Result<(), MetaError> {
        assert!(dir.is_dir(), "names are in directories");
        self.may(dir, WRITE | EXECUTE).await?;
        let is_free = dir.mode & STICKY == 0 || self.owns(inode) || self.owns(dir);
        if is_free { Ok(()) } else { Err(Errno::PERM.into()) }
    }

    /// Fails with EPERM unless the user may give an inode another name. Who does not own it needs access to
    /// read and write, to a regular file that gives nobody rights by its set-id bits: otherwise a user could
    /// keep a file that its owner removes.
    pub(crate) async fn may_link(&self, inode: &Inode) -> Result<(), MetaError> {
        if self.owns(inode) {
            return Ok(());
        }
        if inode.kind() != FileKind::Regular || set_id_bits(inode.mode) != 0 {
            return Err(Errno::PERM.into());
        }
        self.may(inode, READ | WRITE).await.map_err(|error| match error {
            MetaError::Posix(_) => Errno::PERM.into(),
            other => other,
        })
    }

    /// Fails with EPERM unless the user may set these ids of the owner: only user 0 gives a file away, and an
    /// owner changes its group to one of its own.
    pub(crate) fn may_chown(
        &self,
        inode: &Inode,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> Result<(), MetaError> {
        let Some(user) = self.user().filter(|user| !user.is_root()) else { return Ok(()) };
        let is_owner = user.uid == inode.uid;
        let uid_stays = uid.is_none_or(|uid| is_owner && uid == inode.uid);
        let gid_is_own = gid.is_none_or(|gid| is_owner && (gid == inode.gid || user.is_in(gid)));
        if uid_stays && gid_is_own { Ok(()) } else { Err(Errno::PERM.into()) }
    }

    /// The mode that the user sets, for an inode of this group: without the set-group-id bit of a group that
    /// the user is not in.
    pub(crate) fn mode_to_set(&self, mode: u32, gid: u32) -> u32 {
        match self.user() {
            Some(user) if !user.is_root() && !user.is_in(gid) => mode & !SET_GROUP_ID,
            _ => mode,
        }
    }

    /// The mode of a file that the user makes in a directory. A file that others may execute as a group gets
    /// no set-group-id bit of a directory's group that the user is not in.
    pub(crate) fn mode_to_make(&self, mode: u32, dir: &Inode) -> u32 {
        let is_foreign = |user: &User| !user.is_root() && !user.is_in(dir.gid);
        let strips = set_id_bits(mode) & SET_GROUP_ID != 0 && dir.mode & SET_GROUP_ID != 0;
        match self.user().is_some_and(is_foreign) && strips {
            true => mode & !SET_GROUP_ID,
            false => mode,
        }
    }
}

/// The access list of an inode; none if there is only a mode.
async fn stored(names: &Names, ino: Ino) -> Result<Option<Acl>, MetaError> {
    if names.absent().acl.contains(&ino) {
        return Ok(None);
    }
    let row = names.kv().get(xattr_key(ino, ACCESS)).await?;
    Ok(row.map(|row| decode_acl(&row)).transpose()?)
}

/// True if a user has this access to an inode with this access list.
fn allows(user: &User, inode: &Inode, acl: Option<&Acl>, wanted: u32) -> bool {
    let by_class = |shift: u32| inode.mode >> shift & wanted == wanted;
    let allowed = if user.uid == inode.uid {
        by_class(6)
    } else {
        match acl.filter(|_| inode.mode & GROUP_BITS != 0) {
            Some(acl) => acl.allows(user, inode.gid, wanted),
            None if user.is_in(inode.gid) => by_class(3),
            None => by_class(0),
        }
    };
    // User 0 may do everything, but executes only files that somebody may execute.
    let executes = inode.is_dir() || wanted & EXECUTE == 0 || inode.mode & ALL_EXECUTE != 0;
    allowed || user.is_root() && executes
}

#[cfg(test)]
mod tests;
