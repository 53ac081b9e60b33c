//! Listing a directory, and reading a symbolic link.

use crate::access::{Asker, EXECUTE, READ};
use crate::error::MetaError;
use crate::inode::{Data, FileKind, Inode};
use crate::parts::Parts;
use crate::rows::{Entry, decode_entry_key, entry_range, inode_key};
use penstock_base::{FileId, Ino};
use penstock_session::Request;
use penstock_wire::metadata::{BytesReply, DirEntry, InodeRequest, ReadDirReply, ReadDirRequest};
use prost::Message;
use rustix::io::Errno;

/// Most entries in one reply.
const MOST: u32 = 1024;

/// Lists entries behind a cookie, in the order of cookies.
pub(crate) async fn read_dir(
    parts: &Parts,
    who: Request,
    request: ReadDirRequest,
) -> Result<Vec<u8>, MetaError> {
    let (names, asker) = (&parts.names, Asker::of(parts, who)?);
    asker.names(Ino(request.dir))?;
    let dir = names.directory(Ino(request.dir)).await?;
    asker.may(&dir, READ).await?;
    // A user who may not look names up in the directory learns only them.
    let may_look = match asker.may(&dir, EXECUTE).await {
        Err(MetaError::Posix(_)) => false,
        other => other.map(|()| true)?,
    };
    let limit = request.limit.clamp(1, MOST) as usize;
    let (from, until) = entry_range(dir.ino, request.after.saturating_add(1), u64::MAX);
    let rows = names.kv().scan(from, until, limit).await?;
    let mut entries = Vec::new();
    for (key, value) in &rows {
        let (_, cookie) = decode_entry_key(key)?;
        let Entry { ino, kind, name } = Entry::decode(value)?;
        entries.push(DirEntry { name, ino: ino.0, kind, cookie, attr: None, branch: 0 });
    }
    assert!(entries.len() <= limit, "a reply has at most {limit} entries");
    assert!(entries.is_sorted_by(|one, other| one.cookie < other.cookie), "entries are in order of cookies");
    if request.attributes && may_look {
        // Before the attributes are read.
        let lease = |entry: &DirEntry| parts.lease_attributes(who, Ino(entry.ino), request.lease);
        let leases: Vec<u64> = entries.iter().map(lease).collect();
        add_attributes(parts, &mut entries).await?;
        for (entry, lease) in entries.iter_mut().zip(leases) {
            entry.attr.iter_mut().for_each(|attr| attr.lease = lease);
        }
        entries.iter().filter(|entry| entry.attr.is_some()).for_each(|entry| asker.reached(Ino(entry.ino)));
    }
    Ok(ReadDirReply { end: rows.len() < limit, entries, parent: dir.parent.0, parent_branch: 0 }
        .encode_to_vec())
}

async fn add_attributes(parts: &Parts, entries: &mut [DirEntry]) -> Result<(), MetaError> {
    let rows =
        parts.names.kv().get_many(entries.iter().map(|entry| inode_key(Ino(entry.ino))).collect()).await?;
    // An entry whose inode has been removed since has no attributes, nor has one whose inode cannot be read.
    // The client asks for them by number and gets the error.
    let decode = |(ino, row): (u64, Option<Vec<u8>>)| parts.names.decode_inode(Ino(ino), &row?).ok();
    let inodes: Vec<Option<Inode>> = entries.iter().map(|entry| entry.ino).zip(rows).map(decode).collect();
    let is_file = |inode: &&Inode| inode.kind() == FileKind::Regular;
    let files = inodes.iter().flatten().filter(is_file).map(|inode| FileId::main(inode.ino)).collect();
    let all: Vec<&Inode> = inodes.iter().flatten().filter(is_file).collect();
    let elsewhere = match all.iter().any(|inode| inode.is_spread) {
        true => parts.elsewhere.held_blocks(&all).await?,
        false => vec![0; all.len()],
    };
    let here = parts.chunks.held_blocks(files).await?;
    let mut held = here.into_iter().zip(elsewhere).map(|(here, elsewhere)| here + elsewhere);
    for (entry, inode) in entries.iter_mut().zip(&inodes) {
        let blocks = if inode.as_ref().filter(is_file).is_some() { held.next() } else { None };
        entry.attr = inode.as_ref().map(|inode| inode.attr(blocks.unwrap_or(0)));
    }
    assert!(held.next().is_none(), "each file has its blocks");
    Ok(())
}

/// Returns the target of a symbolic link. EINVAL for any other inode.
pub(crate) async fn read_link(
    parts: &Parts,
    who: Request,
    request: InodeRequest,
) -> Result<Vec<u8>, MetaError> {
    Asker::of(parts, who)?.names(Ino(request.ino))?;
    match parts.names.inode(Ino(request.ino)).await?.data {
        Data::Inline(bytes) => Ok(BytesReply { bytes }.encode_to_vec()),
        _ => Err(Errno::INVAL.into()),
    }
}
