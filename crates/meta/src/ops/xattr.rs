//! Extended attributes, one row each.

use super::{acl, changed_reply};
use crate::access::{Asker, READ, WRITE};
use crate::acl::{ACCESS, DEFAULT, is_acl};
use crate::error::MetaError;
use crate::inode::{FileKind, Inode, SET_GROUP_ID, STICKY};
use crate::parts::Parts;
use crate::rows::{decode_xattr, encode_xattr, xattr_key, xattr_name, xattr_range};
use crate::{NAME_MAX, XATTR_MAX};
use penstock_base::Ino;
use penstock_kv::WriteSet;
use penstock_session::Request;
use penstock_wire::metadata::{BytesReply, CAPABILITY, InodeRequest, NamesReply, XattrRequest};
use prost::Message;
use rustix::io::Errno;

/// Most extended attributes of one inode.
const MOST: usize = 1024;

/// Attributes for user 0 only, and below those that security modules keep.
const TRUSTED: &[u8] = b"trusted.";
const SECURITY: &[u8] = b"security.";
const USER: &[u8] = b"user.";

/// True if a file gives capabilities of user 0 to whoever executes it.
pub(crate) async fn has_capabilities(parts: &Parts, ino: Ino) -> Result<bool, MetaError> {
    if parts.names.absent().xattrs.contains(&ino) {
        return Ok(false);
    }
    Ok(parts.names.kv().get(xattr_key(ino, CAPABILITY)).await?.is_some())
}

/// Fails unless the one who asks may read an attribute.
async fn may_read(asker: &Asker<'_>, inode: &Inode, name: &[u8]) -> Result<(), MetaError> {
    let has_users = matches!(inode.kind(), FileKind::Regular | FileKind::Directory);
    match name {
        name if name.starts_with(TRUSTED) && !asker.is_privileged() => Err(Errno::NODATA.into()),
        name if name.starts_with(USER) && !has_users => Err(Errno::NODATA.into()),
        name if name.starts_with(USER) => asker.may(inode, READ).await,
        // Lists and what security modules keep may be read by everybody who reaches the inode.
        _ => Ok(()),
    }
}

/// Fails unless the one who asks may set or remove an attribute.
async fn may_write(asker: &Asker<'_>, inode: &Inode, name: &[u8]) -> Result<(), MetaError> {
    if asker.is_trusted() {
        return Ok(());
    }
    if is_acl(name) {
        return asker.check_owns(inode);
    }
    if name.starts_with(TRUSTED) || name.starts_with(SECURITY) {
        return asker.check_privileged();
    }
    if !name.starts_with(USER) {
        return Err(Errno::OPNOTSUPP.into());
    }
    match inode.kind() {
        FileKind::Directory if inode.mode & STICKY != 0 => asker.check_owns(inode)?,
        FileKind::Regular | FileKind::Directory => {}
        _ => return Err(Errno::PERM.into()),
    }
    asker.may(inode, WRITE).await
}

/// Returns the value of an extended attribute. ENODATA if there is none.
pub(crate) async fn get_xattr(
    parts: &Parts,
    who: Request,
    request: XattrRequest,
) -> Result<Vec<u8>, MetaError> {
    let ino = Ino(request.ino);
    let asker = Asker::of(parts, who)?;
    asker.names(ino)?;
    if !asker.is_trusted() {
        may_read(&asker, &parts.names.inode(ino).await?, &request.name).await?;
    }
    let absent = parts.names.absent();
    if absent.xattrs.contains(&ino) || is_acl(&request.name) && absent.acl.contains(&ino) {
        return Err(Errno::NODATA.into());
    }
    let value = parts.names.kv().get(xattr_key(ino, &request.name)).await?;
    let bytes = decode_xattr(&value.ok_or(Errno::NODATA)?)?.to_vec();
    Ok(BytesReply { bytes }.encode_to_vec())
}

/// Lists the names of an inode's extended attributes.
pub(crate) async fn list_xattr(
    parts: &Parts,
    who: Request,
    request: InodeRequest,
) -> Result<Vec<u8>, MetaError> {
    let asker = Asker::of(parts, who)?;
    asker.names(Ino(request.ino))?;
    if parts.names.absent().xattrs.contains(&Ino(request.ino)) {
        return Ok(NamesReply::default().encode_to_vec());
    }
    let (from, until) = xattr_range(Ino(request.ino));
    let keys = parts.names.kv().keys(from, until, MOST).await?;
    let names = keys.iter().map(|key| xattr_name(key).to_vec());
    let is_shown = |name: &Vec<u8>| asker.is_privileged() || !name.starts_with(TRUSTED);
    let names = names.filter(is_shown).collect();
    Ok(NamesReply { names }.encode_to_vec())
}

/// Sets an extended attribute, within the bounds on names, values and their number.
pub(crate) async fn set_xattr(
    parts: &Parts,
    who: Request,
    request: XattrRequest,
) -> Result<Vec<u8>, MetaError> {
    let turn = parts.turn(who).await?;
    let asker = Asker::of(parts, who)?;
    asker.names(Ino(request.ino))?;
    if request.name.is_empty() || request.name.len() > NAME_MAX {
        return Err(Errno::RANGE.into());
    }
    if request.name.contains(&0) {
        return Err(Errno::INVAL.into());
    }
    if request.value.len() > XATTR_MAX {
        return Err(Errno::TOOBIG.into());
    }
    let mut inode = turn.inode(Ino(request.ino)).await?;
    if request.name == DEFAULT && !inode.is_dir() {
        return Err(Errno::ACCESS.into());
    }
    may_write(&asker, &inode, &request.name).await?;
    let key = xattr_key(inode.ino, &request.name);
    let exists = turn.kv().get(key.clone()).await?.is_some();
    if request.create && exists {
        return Err(Errno::EXIST.into());
    }
    if request.replace && !exists {
        return Err(Errno::NODATA.into());
    }
    if !exists {
        let (from, until) = xattr_range(inode.ino);
        if turn.kv().keys(from, until, MOST).await?.len() >= MOST {
            return Err(Errno::NOSPC.into());
        }
    }
    let mut writes = WriteSet::new();
    turn.absent().xattrs.remove(&inode.ino);
    if is_acl(&request.name) {
        acl::set(&turn, &mut inode, &request.name, &request.value, &mut writes)?;
        if request.name == ACCESS {
            inode.mode = asker.mode_to_set(inode.mode, inode.gid);
        }
        if request.kill_set_group_id {
            inode.mode &= !SET_GROUP_ID;
        }
    } else {
        writes.put(key, encode_xattr(&request.value));
    }
    inode.times[2] = turn.now();
    let reply = changed_reply(parts, turn.change_of(&[inode.ino], None)?, &inode).await?;
    turn.commit(who, writes, vec![inode], &reply).await?;
    Ok(reply)
}

/// Removes an extended attribute. ENODATA if there is none.
pub(crate) async fn remove_xattr(
    parts: &Parts,
    who: Request,
    request: XattrRequest,
) -> Result<Vec<u8>, MetaError> {
    let turn = parts.turn(who).await?;
    let asker = Asker::of(parts, who)?;
    asker.names(Ino(request.ino))?;
    let mut inode = turn.inode(Ino(request.ino)).await?;
    if !asker.is_trusted() && request.name == DEFAULT && !inode.is_dir() {
        // There is none to remove, which Linux says without a look at the owner.
        return changed_reply(parts, turn.change_of(&[inode.ino], None)?, &inode).await;
    }
    may_write(&asker, &inode, &request.name).await?;
    let key = xattr_key(inode.ino, &request.name);
    // A missing access control list is equivalent to the mode, so removing it succeeds.
    if !is_acl(&request.name) && turn.kv().get(key.clone()).await?.is_none() {
        return Err(Errno::NODATA.into());
    }
    let mut writes = WriteSet::new();
    writes.reclaims().delete(key);
    inode.times[2] = turn.now();
    let reply = changed_reply(parts, turn.change_of(&[inode.ino], None)?, &inode).await?;
    turn.commit(who, writes, vec![inode], &reply).await?;
    Ok(reply)
}
