//! Attributes: reading and changing them, truncating a file, and statfs.

use super::xattr::has_capabilities;
use super::{acl, encode_attr, encode_changed};
use crate::STEP_CHUNKS;
use crate::access::{Asker, WRITE};
use crate::elsewhere::Held;
use crate::error::MetaError;
use crate::inode::{FileKind, Inode};
use crate::parts::Parts;
use crate::queue_work;
use crate::rows::xattr_key;
use penstock_base::{BLOCK_BYTES, FileId, Ino, MAX_FILE_BYTES};
use penstock_chunk::{Behind, ChunkError, Cut, Known, SpaceUsage};
use penstock_kv::WriteSet;
use penstock_session::Request;
use penstock_wire::metadata::{CAPABILITY, Change, SetAttrRequest, StatFsReply, Time};
use prost::Message;
use rustix::io::Errno;

/// Bytes of rows that an inode with its name takes, as statfs estimates it.
const INODE_BYTES: u64 = 512;

/// Blocks behind the end of a file that read as zeros, while the inode's truncate generation and size are
/// these.
#[derive(Clone, Copy)]
struct Cleared {
    truncations: u64,
    size: u64,
    /// The first of these blocks.
    from: u64,
}

impl Cleared {
    /// The block from which on everything is cleared already. A write there since then would know this
    /// truncate generation, and would need the lease of the truncating client; a sync changes the size.
    fn until(self, truncations: u64, size: u64) -> u64 {
        if (self.truncations, self.size) == (truncations, size) { self.from } else { u64::MAX }
    }
}

/// Returns an inode's attributes, with a lease on them if that is asked for.
pub(crate) async fn get_attr(
    parts: &Parts,
    who: Request,
    ino: Ino,
    lease: bool,
) -> Result<Vec<u8>, MetaError> {
    Asker::of(parts, who)?.names(ino)?;
    Ok(encode_attr(parts.attr_leased(who, ino, lease).await?))
}

/// Changes attributes. With a new size, everything behind the new end and behind the old one reads as
/// zeros, in the same transaction. If a file has many chunks there, most of them are cleared before in
/// steps, each a transaction of its own, so that other requests can change names meanwhile.
///
/// The part of a truncation on targets of other stacks is done there before the reply, and after the
/// transaction is durable: no client meets the file there in between.
pub(crate) async fn set_attr(
    parts: &Parts,
    who: Request,
    request: SetAttrRequest,
) -> Result<Vec<u8>, MetaError> {
    loop {
        let held = match request.size.filter(|_| !request.grow) {
            Some(_) => hold_elsewhere(parts, Ino(request.ino)).await?,
            None => None,
        };
        match Box::pin(set_attr_held(parts, who, request.clone(), held)).await {
            Err(MetaError::Spread) => continue,
            done => return done,
        }
    }
}

/// Holds a file on the targets of other stacks that may have something of it; none if there are none.
async fn hold_elsewhere(parts: &Parts, ino: Ino) -> Result<Option<Held>, MetaError> {
    if !parts.elsewhere.are_several() {
        return Ok(None);
    }
    let reach = parts.elsewhere.reach(&parts.names.inode(ino).await?);
    match reach.is_empty() {
        true => Ok(None),
        false => Ok(Some(parts.elsewhere.hold(FileId::main(ino), &reach).await?)),
    }
}

async fn set_attr_held(
    parts: &Parts,
    who: Request,
    request: SetAttrRequest,
    held: Option<Held>,
) -> Result<Vec<u8>, MetaError> {
    let times = [request.atime, request.mtime, request.ctime];
    if !times.iter().flatten().all(Time::is_valid) {
        return Err(Errno::INVAL.into());
    }
    let asker = Asker::of(parts, who)?;
    let request = match asker.is_trusted() {
        true => request,
        false => may_set(parts, who, request).await?,
    };
    if !asker.is_trusted() && changes_nothing(&request) {
        // It would set the change time, for which no right was asked.
        return Ok(encode_attr(parts.attr_leased(who, Ino(request.ino), false).await?));
    }
    // A change that is repeated was accepted once, with other generations.
    let is_repeat = who.repeats.is_some();
    let mut known_truncations = request.known_truncations.filter(|_| !request.grow && !is_repeat);
    let mut cleared = None;
    if let Some(size) = request.size.filter(|_| !request.grow) {
        cleared = clear_behind(parts, who, Ino(request.ino), size, &mut known_truncations).await?;
    }
    let turn = parts.turn(who).await?;
    let mut inode = turn.inode(Ino(request.ino)).await?;
    // Again in the turn: another request may have changed the inode since.
    check_change(&asker, &inode, &request).await?;
    check_truncations(&inode, known_truncations)?;
    let until = cleared.map_or(u64::MAX, |cleared| cleared.until(inode.truncations, inode.size));
    let now = turn.now();
    let mut writes = WriteSet::new();
    // A sync of file contents that need no new blocks begins with this transaction, so it may use a part
    // of the headroom.
    writes.changes_what_is_there();
    if request.drop_set_id {
        inode.drop_set_id();
        if !asker.is_trusted() && has_capabilities(parts, inode.ino).await? {
            // The kernel of a mount asks for that itself.
            writes.delete(xattr_key(inode.ino, CAPABILITY));
        }
    }
    if let Some(mode) = request.mode {
        inode.set_permissions(asker.mode_to_set(mode, request.gid.unwrap_or(inode.gid)));
        acl::chmod(&turn, &inode, &mut writes).await?;
    }
    let owner_before = inode.owner();
    if !asker.is_trusted() && request.gid.or(request.uid).is_some() && !inode.is_dir() {
        // Linux also takes the set-group-id bit of a group that the user is not in.
        inode.mode = asker.mode_to_set(inode.mode, inode.gid);
    }
    inode.uid = request.uid.unwrap_or(inode.uid);
    inode.gid = request.gid.unwrap_or(inode.gid);
    let overtaken = request.grow && request.truncations != inode.truncations && !is_repeat;
    let [atime, mtime, ctime, _] = &mut inode.times;
    *atime = request.atime.unwrap_or(*atime);
    if !overtaken {
        *mtime = request.mtime.unwrap_or(*mtime);
    }
    // A sync reports writes from the past; the file may have been changed otherwise since.
    *ctime = request.ctime.map_or(now, |told| if request.grow { told.max(*ctime) } else { told });
    let mut truncated_to = None;
    if let Some(size) = request.size.filter(|_| !overtaken) {
        match inode.kind() {
            FileKind::Regular if size > MAX_FILE_BYTES => return Err(Errno::FBIG.into()),
            FileKind::Regular => {}
            FileKind::Directory => return Err(Errno::ISDIR.into()),
            _ => return Err(Errno::INVAL.into()),
        }
        if !request.grow {
            // Also if the file grows: data that a crash left behind its end must not become part of its
            // contents.
            inode.count_truncation()?;
            inode.truncations = inode.truncations.max(turn.first_truncations());
            truncated_to = Some((size.min(inode.size), Behind::of(size, inode.size)));
        }
        inode.size = if request.grow { size.max(inode.size) } else { size };
    }
    let mut attr = parts.attr(&inode).await?;
    let (file, owner) = (FileId::main(inode.ino), inode.owner());
    let change = turn.change_of(&[inode.ino], None)?;
    let Some((size, behind)) = truncated_to else {
        let reply = encode_changed(change, attr);
        match inode.kind() == FileKind::Regular && owner != owner_before {
            // Its blocks are counted to the new owner in the same transaction.
            true => {
                let queued = turn.queue(parts, &inode, queue_work::own(&inode, owner), &mut writes)?;
                turn.commit_by(who, writes, vec![inode.clone()], &reply, async |writes| {
                    parts.chunks.set_owner(file, owner, writes).await?;
                    // At once: a write that waits may find nothing of the file in memory.
                    parts.note_change(&inode);
                    parts.mark(inode.ino);
                    parts.queue.note(queued);
                    Ok(())
                })
                .await?;
            }
            false => turn.commit(who, writes, vec![inode], &reply).await?,
        }
        return Ok(reply);
    };
    if behind == Behind::Dropped {
        // As long as the transaction is not committed, nobody has counted what it leaves.
        attr.blocks = attr.blocks.min(size.div_ceil(BLOCK_BYTES as u64));
    }
    let change = Change { truncations: inode.truncations, ..change };
    let reply = encode_changed(change, attr.clone());
    let first_block = size.div_ceil(BLOCK_BYTES as u64);
    assert!(first_block <= until, "the steps stopped behind the new end");
    let known = Known { truncations: inode.truncations, owner };
    if held.as_ref().map(Held::targets).unwrap_or_default() != parts.elsewhere.reach(&inode) {
        return Err(MetaError::Spread);
    }
    let cut = Cut { truncations: inode.truncations, from: first_block, behind };
    let queued = turn.queue(parts, &inode, queue_work::truncate(&inode, cut), &mut writes)?;
    turn.commit_by(who, writes, vec![inode.clone()], &reply, async |writes| {
        parts.chunks.truncate(file, first_block..until, behind, known, writes).await?;
        parts.note_change(&inode);
        parts.queue.note(queued);
        if let Some(held) = &held {
            held.owe(cut);
        }
        Ok(())
    })
    .await?;
    drop(turn);
    if let Some(held) = held {
        if let Err(error) = parts.flush().await {
            // They must not act on it, and nobody may meet what they have. The store has failed.
            std::mem::forget(held);
            return Err(error);
        }
        held.settle().await?;
        drop(held);
        return Ok(encode_changed(change, parts.attr_now(file.ino).await?));
    }
    // The stored reply has the most blocks that may be left, because it was written with them. Now they are
    // counted.
    if let Ok(blocks) = parts.chunks.held_or_row(file) {
        attr.blocks = blocks;
    }
    Ok(encode_changed(change, attr))
}

/// Fails unless a user may make this change. Returns the request with what follows from it: a user sets no
/// change time, and a change of the owner or of the contents takes set-id bits away.
pub(crate) async fn may_set(
    parts: &Parts,
    who: Request,
    mut request: SetAttrRequest,
) -> Result<SetAttrRequest, MetaError> {
    let asker = Asker::of(parts, who)?;
    asker.names(Ino(request.ino))?;
    let inode = parts.names.inode(Ino(request.ino)).await?;
    check_change(&asker, &inode, &request).await?;
    let now = Some(parts.names.now());
    if request.touch {
        (request.atime, request.mtime) = (now, now);
    } else if request.grow {
        // A writer says that it has written, and not when.
        request.mtime = request.mtime.and(now);
    }
    request.ctime = None;
    let changes_owner = request.uid.is_some() || request.gid.is_some();
    request.drop_set_id |= changes_owner || request.size.is_some() && !asker.is_privileged();
    Ok(request)
}

/// True for a request of a user that sets nothing, as chown(2) with -1 for both.
fn changes_nothing(request: &SetAttrRequest) -> bool {
    let SetAttrRequest { mode, uid, gid, size, atime, mtime, touch, drop_set_id, .. } = request;
    let ids = mode.or(*uid).or(*gid);
    ids.is_none() && size.is_none() && atime.or(*mtime).is_none() && !touch && !drop_set_id
}

/// Fails unless the one who asks may make this change of an inode.
async fn check_change(asker: &Asker<'_>, inode: &Inode, request: &SetAttrRequest) -> Result<(), MetaError> {
    if asker.is_trusted() {
        return Ok(());
    }
    if [request.uid, request.gid].contains(&Some(u32::MAX)) {
        // The number that means nobody.
        return Err(Errno::INVAL.into());
    }
    asker.may_chown(inode, request.uid, request.gid)?;
    if request.mode.is_some() {
        asker.check_owns(inode)?;
    }
    let writes = asker.has_grant(inode.ino, request.grant.as_ref());
    // A writer reports the time of its writes together with the size.
    let sets_times = request.atime.is_some() || request.mtime.is_some() && !(request.grow && writes);
    if sets_times && !request.touch {
        asker.check_owns(inode)?;
    }
    if request.touch && !asker.owns(inode) && !writes {
        asker.may(inode, WRITE).await?;
    }
    // Taking set-id bits away is the duty of everybody who writes.
    if request.size.is_some() {
        match inode.kind() {
            FileKind::Regular => {}
            FileKind::Directory => return Err(Errno::ISDIR.into()),
            _ => return Err(Errno::INVAL.into()),
        }
    }
    let changes_owner = request.uid.is_some() || request.gid.is_some();
    let changes_contents = request.size.is_some() || request.drop_set_id && !changes_owner;
    if changes_contents && !writes {
        asker.may(inode, WRITE).await?;
    }
    Ok(())
}

/// Makes everything behind the end of a file read as zeros, and voids writes that know its present truncate
/// generation. Size, times and reserved space stay. Does nothing for an inode that is gone or no regular
/// file.
pub(crate) async fn cut_tail(parts: &Parts, ino: Ino) -> Result<(), MetaError> {
    let inode = match parts.names.inode(ino).await {
        Err(MetaError::Posix(Errno::STALE)) => return Ok(()),
        found => found?,
    };
    if inode.kind() != FileKind::Regular || inode.nlink == 0 && !parts.is_used(ino) {
        return Ok(());
    }
    let [_, _, ctime, _] = inode.times;
    let request = SetAttrRequest {
        ino: ino.0,
        size: Some(inode.size),
        ctime: Some(ctime),
        known_truncations: Some(inode.truncations),
        ..SetAttrRequest::default()
    };
    set_attr(parts, Request::default(), request).await.map(drop)
}

/// Clears blocks behind a new size of a file, and behind the old one, until one transaction suffices for
/// the rest. A crash in between leaves a file that is made shorter with a size between the two, and with
/// all its data up to there; otherwise the old size. Returns the blocks that were cleared.
async fn clear_behind(
    parts: &Parts,
    who: Request,
    ino: Ino,
    size: u64,
    known_truncations: &mut Option<u64>,
) -> Result<Option<Cleared>, MetaError> {
    let block = BLOCK_BYTES as u64;
    let before = parts.names.inode(ino).await?;
    if before.kind() != FileKind::Regular || size > MAX_FILE_BYTES {
        return Ok(None);
    }
    let behind = Behind::of(size, before.size);
    let first_block = size.min(before.size).div_ceil(block);
    let mut cleared: Option<Cleared> = None;
    for stop in parts.chunks.truncate_steps(FileId::main(ino), first_block, STEP_CHUNKS).await? {
        let turn = parts.turn(who).await?;
        let mut inode = turn.inode(ino).await?;
        if inode.nlink == 0 && !parts.is_used(ino) {
            return Ok(None);
        }
        check_truncations(&inode, *known_truncations)?;
        if inode.size > before.size || Behind::of(size, inode.size) != behind {
            // Another request has changed the file meanwhile.
            return Ok(None);
        }
        if cleared.is_none() {
            // Before something is lost of a file that stays.
            turn.check_room(parts, &inode)?;
        }
        let until = cleared.map_or(u64::MAX, |cleared| cleared.until(inode.truncations, inode.size));
        inode.count_truncation()?;
        *known_truncations = known_truncations.map(|_| inode.truncations);
        if behind == Behind::Dropped {
            inode.size = inode.size.min(stop.saturating_mul(block));
        }
        assert!(stop > first_block, "a step stops behind the new end");
        let (file, truncations, size) = (FileId::main(ino), inode.truncations, inode.size);
        let known = Known { truncations, owner: inode.owner() };
        // Only the transaction of the request itself records its result.
        turn.commit_by(Request::default(), WriteSet::new(), vec![inode], &[], async |writes| {
            parts.chunks.truncate(file, stop..until, behind, known, writes).await?;
            parts.mark(ino);
            Ok(())
        })
        .await?;
        cleared = Some(Cleared { truncations, size, from: stop });
    }
    Ok(cleared)
}

/// Usage of the file system: blocks as the targets count them, inodes as estimated from the space in the
/// key-value store.
pub(crate) fn stat_fs(parts: &Parts) -> Vec<u8> {
    let elsewhere = parts.elsewhere.serving().into_iter().map(|target| target.usage());
    let space: SpaceUsage = elsewhere.chain([parts.chunks.usage()]).sum();
    let rows = parts.names.kv().usage();
    let free_inodes = rows.budget_bytes.saturating_sub(rows.used_bytes) / INODE_BYTES;
    StatFsReply {
        total_blocks: space.total_blocks,
        free_blocks: space.free_blocks,
        available_blocks: space.available_blocks(),
        inodes: rows.used_bytes / INODE_BYTES + free_inodes,
        free_inodes,
    }
    .encode_to_vec()
}

/// Refuses a change from a client that knows the file as of another truncate generation.
fn check_truncations(inode: &Inode, known: Option<u64>) -> Result<(), MetaError> {
    match known {
        Some(sent) if sent != inode.truncations => {
            Err(ChunkError::Truncated { found: inode.truncations, sent }.into())
        }
        _ => Ok(()),
    }
}
