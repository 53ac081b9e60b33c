//! Access control lists of inodes: setting a list sets the permission bits, a chmod changes the list, and new
//! inodes inherit the default list of their directory. A list that is equivalent to the mode is not stored.

use crate::acl::{ACCESS, Acl, DEFAULT};
use crate::error::MetaError;
use crate::inode::{FileKind, Inode};
use crate::names::Turn;
use crate::rows::{decode_acl, encode_xattr, xattr_key};
use penstock_base::Ino;
use penstock_kv::WriteSet;
use rustix::io::Errno;

/// The list of an inode, by attribute name. Call only while nothing else changes the file system.
async fn stored(turn: &Turn<'_>, ino: Ino, name: &[u8]) -> Result<Option<Acl>, MetaError> {
    if turn.absent().acl.contains(&ino) {
        return Ok(None);
    }
    let mut rows = turn.kv().get_many(vec![xattr_key(ino, ACCESS), xattr_key(ino, DEFAULT)]).await?;
    if rows.iter().all(Option::is_none) {
        turn.absent().acl.insert(ino);
    }
    let row = rows.swap_remove(usize::from(name == DEFAULT));
    Ok(row.map(|row| decode_acl(&row)).transpose()?)
}

/// Gives a new inode the lists and permissions that its directory's default list says, or else applies
/// its maker's umask.
pub(super) async fn inherit(
    turn: &Turn<'_>,
    dir: &Inode,
    inode: &mut Inode,
    umask: u32,
    writes: &mut WriteSet,
) -> Result<(), MetaError> {
    if inode.kind() == FileKind::Symlink {
        turn.absent().xattrs.insert(inode.ino);
        return Ok(());
    }
    let Some(default) = stored(turn, dir.ino, DEFAULT).await? else {
        inode.mode &= !(umask & 0o777);
        turn.absent().acl.insert(inode.ino);
        turn.absent().xattrs.insert(inode.ino);
        return Ok(());
    };
    let mut access = default.clone();
    access.limit(inode.mode);
    inode.mode = access.mode(inode.mode);
    if !access.is_plain() {
        writes.put(xattr_key(inode.ino, ACCESS), encode_xattr(&access.encode()));
    }
    if inode.is_dir() {
        writes.put(xattr_key(inode.ino, DEFAULT), encode_xattr(&default.encode()));
    }
    Ok(())
}

/// Changes the list of an inode to agree with its new mode.
pub(super) async fn chmod(turn: &Turn<'_>, inode: &Inode, writes: &mut WriteSet) -> Result<(), MetaError> {
    if let Some(mut acl) = stored(turn, inode.ino, ACCESS).await? {
        acl.set_mode(inode.mode);
        writes.put(xattr_key(inode.ino, ACCESS), encode_xattr(&acl.encode()));
    }
    Ok(())
}

/// Sets a list, and for the access list the inode's permission bits.
pub(super) fn set(
    turn: &Turn<'_>,
    inode: &mut Inode,
    name: &[u8],
    value: &[u8],
    writes: &mut WriteSet,
) -> Result<(), MetaError> {
    let mut acl = Acl::decode(value)?;
    if name == DEFAULT && !inode.is_dir() {
        return Err(Errno::ACCESS.into());
    }
    if name == ACCESS {
        inode.mode = acl.mode(inode.mode);
    }
    let key = xattr_key(inode.ino, name);
    match name == ACCESS && acl.is_plain() {
        true => writes.delete(key),
        false => writes.put(key, encode_xattr(&acl.encode())),
    };
    turn.absent().acl.remove(&inode.ino);
    Ok(())
}
