//! Operations that add, find and remove names: lookup, make, link, unlink.

use super::{acl, changed_reply, encode_attr, with_directory};
use crate::access::{Asker, EXECUTE, WRITE};
use crate::error::MetaError;
use crate::inode::{Data, FileKind, Inode, SET_GROUP_ID, is_device, is_directory};
use crate::names::{Turn, entry_row};
use crate::parts::Parts;
use crate::rows::{RemovedState, decode_removed, entry_key, removed_key};
use crate::{LINK_MAX, PATH_MAX};
use penstock_base::{FileId, Ino};
use penstock_kv::WriteSet;
use penstock_session::Request;
use penstock_wire::metadata::{ACCESS_READ, ACCESS_WRITE, AttrReply, LinkRequest, MakeRequest, NameRequest};
use prost::Message;
use rustix::io::Errno;

/// Returns the attributes of the inode that a name refers to.
pub(crate) async fn lookup(parts: &Parts, who: Request, request: NameRequest) -> Result<Vec<u8>, MetaError> {
    let (names, asker) = (&parts.names, Asker::of(parts, who)?);
    asker.names(Ino(request.dir))?;
    let dir = names.directory(Ino(request.dir)).await?;
    asker.may(&dir, EXECUTE).await?;
    let (_, entry) = names.entry(dir.ino, &request.name).await?;
    let attr = parts.attr_leased(who, entry.ino, request.lease).await?;
    asker.reached(entry.ino);
    Ok(encode_attr(attr))
}

/// Makes a file, directory, symbolic link, special file, or a file without a name (O_TMPFILE).
pub(crate) async fn make(parts: &Parts, who: Request, request: MakeRequest) -> Result<Vec<u8>, MetaError> {
    let turn = parts.turn(who).await?;
    let asker = Asker::of(parts, who)?;
    asker.names(Ino(request.dir))?;
    let mut dir = turn.directory(Ino(request.dir)).await?;
    if dir.nlink == 0 {
        return Err(Errno::NOENT.into());
    }
    let request = may_make(&asker, &turn, &dir, request).await?;
    let mut writes = WriteSet::new();
    let ino = turn.ino_to_make().await?;
    let mut inode = new_inode(parts, &turn, ino, &dir, &request)?;
    acl::inherit(&turn, &dir, &mut inode, request.umask, &mut writes).await?;
    if request.nameless {
        // In the queue of removed files from the beginning, so that a crash leaks nothing. Its open keeps
        // it from being reaped.
        if inode.kind() != FileKind::Regular || !request.open {
            return Err(Errno::INVAL.into());
        }
        inode.nlink = 0;
        turn.queue_removed(&inode, RemovedState::Nameless, &mut writes);
    } else {
        let key = turn.new_entry_key(dir.ino, &request.name).await?;
        writes.put(key, entry_row(inode.ino, inode.type_bits(), &request.name));
        dir.add_entries(1)?;
        if inode.is_dir() {
            dir.add_links(1)?;
        }
        dir.times[1] = inode.times[3];
        dir.times[2] = inode.times[3];
    }
    assert_eq!(request.nameless, inode.nlink == 0, "a new inode without a name is in the queue");
    let opened = request.open.then_some(ACCESS_READ | ACCESS_WRITE);
    let reply = AttrReply {
        attr: Some(inode.attr(0)),
        grant: opened.and_then(|access| asker.grant(&inode, access)),
        change: Some(turn.change_of(&[dir.ino, inode.ino], None)?),
        ..AttrReply::default()
    };
    let mut reply = reply.encode_to_vec();
    let (ino, is_dir, dir_after) = (inode.ino, inode.is_dir(), dir.attr(0));
    parts.made(who.session, ino);
    turn.commit(who, writes, vec![dir, inode], &reply).await?;
    with_directory(&mut reply, dir_after);
    parts.made(who.session, ino);
    if is_dir {
        turn.directory_made(ino);
    }
    if request.open && who.repeats.is_none() {
        parts.open(who.session, ino)?;
        asker.open(ino, ACCESS_READ | ACCESS_WRITE)?;
    }
    asker.reached(ino);
    Ok(reply)
}

/// Fails with EEXIST if a directory has a name.
async fn check_free(turn: &Turn<'_>, dir: &Inode, name: &[u8]) -> Result<(), MetaError> {
    match turn.find(dir.ino, name).await?.entry {
        None => Ok(()),
        Some(_) => Err(Errno::EXIST.into()),
    }
}

/// Fails unless the one who asks may make this inode in a directory. Returns the request with the owner and
/// the mode that the inode gets.
async fn may_make(
    asker: &Asker<'_>,
    turn: &Turn<'_>,
    dir: &Inode,
    mut request: MakeRequest,
) -> Result<MakeRequest, MetaError> {
    assert!(dir.is_dir() && dir.nlink > 0, "the directory exists");
    let Some(user) = asker.user() else { return Ok(request) };
    (request.uid, request.gid) = (user.uid, user.gid);
    asker.may(dir, EXECUTE).await?;
    if !request.nameless {
        check_free(turn, dir, &request.name).await?;
    }
    asker.may(dir, WRITE | EXECUTE).await?;
    if is_device(request.mode) {
        asker.check_privileged()?;
    }
    if !is_directory(request.mode) {
        request.mode = asker.mode_to_make(request.mode, dir);
    }
    Ok(request)
}

/// The inode of a new name in `dir`. Fails for a mode that names no type of file.
pub(super) fn new_inode(
    parts: &Parts,
    turn: &Turn<'_>,
    ino: Ino,
    dir: &Inode,
    request: &MakeRequest,
) -> Result<Inode, MetaError> {
    if !crate::inode::has_type(request.mode) {
        return Err(MetaError::Request(format!("mode {:o} names no type of file", request.mode)));
    }
    let now = turn.now();
    let mut inode = Inode {
        ino,
        mode: request.mode,
        nlink: 1,
        uid: request.uid,
        gid: request.gid,
        rdev: request.rdev,
        size: 0,
        times: [now; 4],
        truncations: 0,
        parent: Ino(0),
        entries: 0,
        layout: dir.layout,
        data: Data::None,
        is_spread: false,
    };
    inode.layout = parts.elsewhere.layout_of_new(&dir.layout, inode.kind(), parts.chunks.usage());
    parts.chunks.file_made(FileId::main(inode.ino));
    if dir.mode & SET_GROUP_ID != 0 {
        inode.gid = dir.gid;
    }
    match inode.kind() {
        FileKind::Directory => {
            inode.nlink = 2;
            inode.parent = dir.ino;
            inode.mode |= dir.mode & SET_GROUP_ID;
        }
        FileKind::Symlink => {
            if request.target.len() > PATH_MAX {
                return Err(Errno::NAMETOOLONG.into());
            }
            if request.target.is_empty() {
                return Err(Errno::NOENT.into());
            }
            if request.target.contains(&0) {
                return Err(Errno::INVAL.into());
            }
            inode.size = request.target.len() as u64;
            inode.data = Data::Inline(request.target.clone());
        }
        FileKind::Regular => inode.data = Data::Chunks,
        FileKind::Special => {}
    }
    Ok(inode)
}

/// Adds a name to an inode. One that has no name may get one only if it never had any. A kernel knows that
/// only of the names that it has removed itself.
pub(crate) async fn link(parts: &Parts, who: Request, request: LinkRequest) -> Result<Vec<u8>, MetaError> {
    let turn = parts.turn(who).await?;
    let asker = Asker::of(parts, who)?;
    asker.names(Ino(request.ino))?;
    asker.names(Ino(request.dir))?;
    let mut inode = turn.inode(Ino(request.ino)).await?;
    let mut dir = turn.directory(Ino(request.dir)).await?;
    if !asker.is_trusted() {
        asker.may(&dir, EXECUTE).await?;
        check_free(&turn, &dir, &request.name).await?;
        if inode.nlink == 0 {
            // Its names were removed. A file that was made without one gets a name through a mount only.
            return Err(Errno::NOENT.into());
        }
        asker.may_link(&inode).await?;
        asker.may(&dir, WRITE | EXECUTE).await?;
    }
    match inode.nlink {
        _ if inode.is_dir() => return Err(Errno::PERM.into()),
        // Its client reports what it has open after all repeats.
        0 if !parts.is_used(inode.ino) && who.repeats.is_none() => return Err(Errno::NOENT.into()),
        0 if !is_nameless(parts, inode.ino).await? => return Err(Errno::NOENT.into()),
        LINK_MAX.. => return Err(Errno::MLINK.into()),
        _ if dir.nlink == 0 => return Err(Errno::NOENT.into()),
        _ => {}
    }
    let key = turn.new_entry_key(dir.ino, &request.name).await?;
    let mut writes = WriteSet::new();
    writes.put(key, entry_row(inode.ino, inode.type_bits(), &request.name));
    if inode.nlink == 0 {
        writes.delete(removed_key(inode.ino));
    }
    let now = turn.now();
    inode.add_links(1)?;
    inode.times[2] = now;
    dir.add_entries(1)?;
    dir.times[1] = now;
    dir.times[2] = now;
    let reply = changed_reply(parts, turn.change_of(&[dir.ino, inode.ino], None)?, &inode).await?;
    turn.commit(who, writes, vec![dir, inode], &reply).await?;
    Ok(reply)
}

/// True for a file that was made without a name and has had none.
async fn is_nameless(parts: &Parts, ino: Ino) -> Result<bool, MetaError> {
    let key = removed_key(ino);
    let row = parts.names.kv().get(key.clone()).await?;
    let removed = row.map(|row| decode_removed(&key, &row)).transpose()?;
    Ok(removed.is_some_and(|removed| removed.state == RemovedState::Nameless))
}

/// Removes a name. A directory must be empty.
pub(crate) async fn unlink(parts: &Parts, who: Request, request: NameRequest) -> Result<Vec<u8>, MetaError> {
    let turn = parts.turn(who).await?;
    let asker = Asker::of(parts, who)?;
    asker.names(Ino(request.dir))?;
    let mut dir = turn.directory(Ino(request.dir)).await?;
    asker.may(&dir, EXECUTE).await?;
    let (cookie, entry) = turn.entry(dir.ino, &request.name).await?;
    let mut inode = turn.inode(entry.ino).await?;
    asker.may_remove(&dir, &inode).await?;
    match (request.directory, inode.is_dir()) {
        (true, false) => return Err(Errno::NOTDIR.into()),
        (false, true) => return Err(Errno::ISDIR.into()),
        (true, true) if inode.entries > 0 => return Err(Errno::NOTEMPTY.into()),
        _ => {}
    }
    let mut writes = WriteSet::new();
    writes.reclaims().delete(entry_key(dir.ino, cookie));
    let now = turn.now();
    dir.add_entries(-1)?;
    dir.times[1] = now;
    dir.times[2] = now;
    let ino = inode.ino;
    turn.remove_name(&mut dir, &mut inode, &mut writes)?;
    let change = turn.change_of(&[dir.ino, inode.ino], (inode.nlink == 0).then_some(ino))?;
    let mut reply = changed_reply(parts, change, &inode).await?;
    let dir_after = dir.attr(0);
    turn.commit(who, writes, vec![dir, inode], &reply).await?;
    with_directory(&mut reply, dir_after);
    parts.reap_if_removed(ino);
    Ok(reply)
}
