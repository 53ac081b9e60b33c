//! Extended attributes, one row each.

use super::{SET_GROUP_ID, acl, attr_reply};
use crate::acl::is_acl;
use crate::error::MetaError;
use crate::parts::Parts;
use crate::rows::{decode_xattr, encode_xattr, xattr_key, xattr_name, xattr_range};
use crate::{NAME_MAX, XATTR_MAX};
use penstock_base::Ino;
use penstock_kv::WriteSet;
use penstock_session::Request;
use penstock_wire::metadata::{BytesReply, InodeRequest, NamesReply, XattrRequest};
use prost::Message;
use rustix::io::Errno;

/// Most extended attributes of one inode.
const MOST: usize = 1024;

/// Returns the value of an extended attribute. ENODATA if there is none.
pub(crate) async fn get_xattr(parts: &Parts, request: XattrRequest) -> Result<Vec<u8>, MetaError> {
    let ino = Ino(request.ino);
    let absent = parts.names.absent();
    if absent.xattrs.contains(&ino) || is_acl(&request.name) && absent.acl.contains(&ino) {
        return Err(Errno::NODATA.into());
    }
    let value = parts.names.kv().get(xattr_key(ino, &request.name)).await?;
    let bytes = decode_xattr(&value.ok_or(Errno::NODATA)?)?.to_vec();
    Ok(BytesReply { bytes }.encode_to_vec())
}

/// Lists the names of an inode's extended attributes.
pub(crate) async fn list_xattr(parts: &Parts, request: InodeRequest) -> Result<Vec<u8>, MetaError> {
    if parts.names.absent().xattrs.contains(&Ino(request.ino)) {
        return Ok(NamesReply::default().encode_to_vec());
    }
    let (from, until) = xattr_range(Ino(request.ino));
    let keys = parts.names.kv().keys(from, until, MOST).await?;
    let names = keys.iter().map(|key| xattr_name(key).to_vec()).collect();
    Ok(NamesReply { names }.encode_to_vec())
}

/// Sets an extended attribute, within the bounds on names, values and their number.
pub(crate) async fn set_xattr(
    parts: &Parts,
    who: Request,
    request: XattrRequest,
) -> Result<Vec<u8>, MetaError> {
    let turn = parts.turn(who).await?;
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
        if request.kill_set_group_id {
            inode.mode &= !SET_GROUP_ID;
        }
    } else {
        writes.put(key, encode_xattr(&request.value));
    }
    inode.times[2] = turn.now();
    let reply = attr_reply(parts, &inode).await?;
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
    let mut inode = turn.inode(Ino(request.ino)).await?;
    let key = xattr_key(inode.ino, &request.name);
    // A missing access control list is equivalent to the mode, so removing it succeeds.
    if !is_acl(&request.name) && turn.kv().get(key.clone()).await?.is_none() {
        return Err(Errno::NODATA.into());
    }
    let mut writes = WriteSet::new();
    writes.reclaims().delete(key);
    inode.times[2] = turn.now();
    let reply = attr_reply(parts, &inode).await?;
    turn.commit(who, writes, vec![inode], &reply).await?;
    Ok(reply)
}
