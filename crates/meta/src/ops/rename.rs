//! rename(2) and renameat2(2) in all cases.
//!
//! Refused are: a directory into itself or below itself (EINVAL), a directory over a file (ENOTDIR), a file
//! over a directory (EISDIR), anything over a directory with entries (ENOTEMPTY). If both names refer to one
//! inode, nothing happens.

use super::links::new_inode;
use crate::access::{Asker, EXECUTE, WRITE};
use crate::error::MetaError;
use crate::inode::Inode;
use crate::names::{Names, Turn, check_name, entry_row};
use crate::parts::Parts;
use crate::rows::{Entry, entry_key};
use penstock_base::Ino;
use penstock_kv::WriteSet;
use penstock_session::Request;
use penstock_wire::metadata::{FoundNames, MakeRequest, RenameReply, RenameRequest};
use prost::Message;
use rustix::io::Errno;
use std::collections::{BTreeMap, btree_map};

const CHARACTER_DEVICE: u32 = 0o020_000;

/// The inodes that a rename changes, each once, even if it has several roles.
#[derive(Default)]
struct Touched {
    inodes: BTreeMap<Ino, Inode>,
}

impl Touched {
    async fn load(&mut self, names: &Names, ino: Ino) -> Result<(), MetaError> {
        if let btree_map::Entry::Vacant(place) = self.inodes.entry(ino) {
            place.insert(names.inode(ino).await?);
        }
        Ok(())
    }

    fn get(&mut self, ino: Ino) -> &mut Inode {
        self.inodes.get_mut(&ino).expect("it was loaded")
    }
}

/// Renames a name, replaces another one, or exchanges two.
pub(crate) async fn rename(
    parts: &Parts,
    who: Request,
    request: RenameRequest,
) -> Result<Vec<u8>, MetaError> {
    let is_repeat = who.repeats.is_some();
    if request.start != 0 && request.start != parts.chunks.generation() && !is_repeat {
        return Err(MetaError::Restarted);
    }
    let turn = parts.turn(who).await?;
    let asker = Asker::of(parts, who)?;
    let (from_dir, to_dir) = (Ino(request.dir), Ino(request.new_dir));
    asker.names(from_dir)?;
    asker.names(to_dir)?;
    if request.whiteout {
        asker.check_privileged()?;
    }
    check_name(&request.new_name)?;
    if request.exchange && (request.no_replace || request.whiteout) {
        return Err(Errno::INVAL.into());
    }
    let mut touched = Touched::default();
    touched.load(&turn, turn.directory(from_dir).await?.ino).await?;
    touched.load(&turn, turn.directory(to_dir).await?.ino).await?;
    if touched.get(to_dir).nlink == 0 {
        return Err(Errno::NOENT.into());
    }
    asker.may(touched.get(from_dir), EXECUTE).await?;
    asker.may(touched.get(to_dir), EXECUTE).await?;
    let (from_cookie, moved) = turn.entry(from_dir, &request.name).await?;
    let to = turn.find(to_dir, &request.new_name).await?;
    let there = to.entry.as_ref().map_or(0, |(_, entry)| entry.ino.0);
    let is_synced = |found: FoundNames| {
        // It does not matter which file a synced one replaces, so that many who rename to one name do not
        // keep each other from it.
        let replaces_as_found = if request.exchange { found.replaced == there } else { found.replaced > 0 };
        found.moved == moved.ino.0 && (replaces_as_found || there == 0)
    };
    if request.found.is_some_and(|found| !is_synced(found)) && !is_repeat {
        return Err(MetaError::Renamed);
    }
    touched.load(&turn, moved.ino).await?;
    if !asker.is_trusted() {
        let other = to.entry.as_ref().map(|(_, entry)| entry.ino);
        may_rename(&asker, &turn, &mut touched, &request, (moved.ino, other)).await?;
    }
    refuse_loop(&turn, touched.get(moved.ino), to_dir).await?;
    let mut writes = WriteSet::new();
    let mut removed = None;
    match (to.entry, to.free) {
        (Some(_), _) if request.no_replace => return Err(Errno::EXIST.into()),
        (None, _) if request.exchange => return Err(Errno::NOENT.into()),
        // The first time there were two inodes.
        (Some((_, other)), _) if other.ino == moved.ino && is_repeat => return Err(MetaError::Differs),
        (Some((_, other)), _) if other.ino == moved.ino => {
            return Ok(RenameReply::default().encode_to_vec());
        }
        (Some((to_cookie, other)), _) => {
            touched.load(&turn, other.ino).await?;
            if request.exchange {
                refuse_loop(&turn, touched.get(other.ino), from_dir).await?;
                writes.put(entry_key(from_dir, from_cookie), renamed(&other, &request.name));
                moved_to(&turn, &mut touched, &other, to_dir, from_dir)?;
            } else {
                refuse_replace(&mut touched, moved.ino, other.ino)?;
                removed = Some(other.ino);
                writes.delete(entry_key(from_dir, from_cookie));
                replaced(&turn, &mut touched, &other, (from_dir, to_dir), &mut writes)?;
            }
            writes.put(entry_key(to_dir, to_cookie), renamed(&moved, &request.new_name));
        }
        (None, free) => {
            writes.delete(entry_key(from_dir, from_cookie));
            writes.put(entry_key(to_dir, free.ok_or(Errno::NOSPC)?), renamed(&moved, &request.new_name));
            touched.get(from_dir).add_entries(-1)?;
            touched.get(to_dir).add_entries(1)?;
        }
    }
    let gone = removed.filter(|ino| touched.get(*ino).nlink == 0);
    // Without a whiteout: that gets another number when it is repeated. A file that was replaced, and is not
    // there any more, harms nobody.
    let replaces = if there == 0 { turn.first_removed().unwrap_or(Ino(0)) } else { Ino(there) };
    let change = turn.change_of(&[from_dir, to_dir, moved.ino, replaces], gone)?;
    if request.whiteout {
        let ino = turn.new_ino().await?;
        leave_whiteout((parts, &turn), ino, &mut touched, &request, from_cookie, &mut writes)?;
    }
    moved_to(&turn, &mut touched, &moved, from_dir, to_dir)?;
    let now = turn.now();
    for dir in [from_dir, to_dir] {
        touched.get(dir).times[1] = now;
        touched.get(dir).times[2] = now;
    }
    assert!(touched.inodes.len() <= 5, "two directories, the moved inode, another one and a whiteout");
    let replaced = match removed {
        Some(ino) => Some(parts.attr(touched.get(ino)).await?),
        None => None,
    };
    let reply = RenameReply { replaced, change: Some(change) }.encode_to_vec();
    turn.commit(who, writes, touched.inodes.into_values().collect(), &reply).await?;
    if let Some(ino) = removed {
        parts.reap_if_removed(ino);
    }
    Ok(reply)
}

/// Fails unless a user may rename an inode, and remove or move another one from the new name.
async fn may_rename(
    asker: &Asker<'_>,
    names: &Names,
    touched: &mut Touched,
    request: &RenameRequest,
    (moved, other): (Ino, Option<Ino>),
) -> Result<(), MetaError> {
    let (from_dir, to_dir) = (Ino(request.dir), Ino(request.new_dir));
    assert!(!asker.is_trusted(), "a kernel has checked that of a mount");
    match other {
        Some(_) if request.no_replace => return Err(Errno::EXIST.into()),
        None if request.exchange => return Err(Errno::NOENT.into()),
        _ => refuse_loop(names, touched.get(moved), to_dir).await?,
    }
    if other == Some(moved) {
        return Ok(());
    }
    if let Some(other) = other {
        touched.load(names, other).await?;
        if touched.get(other).is_dir() && names.is_above(other, from_dir).await? {
            return Err(if request.exchange { Errno::INVAL } else { Errno::NOTEMPTY }.into());
        }
    }
    let moved = touched.get(moved).clone();
    let [from, to] = [from_dir, to_dir].map(|dir| touched.get(dir).clone());
    asker.may_remove(&from, &moved).await?;
    let other = other.map(|other| touched.get(other).clone());
    match &other {
        None => asker.may(&to, WRITE | EXECUTE).await?,
        Some(other) => {
            asker.may_remove(&to, other).await?;
            match (moved.is_dir(), other.is_dir()) {
                (true, false) if !request.exchange => return Err(Errno::NOTDIR.into()),
                (false, true) if !request.exchange => return Err(Errno::ISDIR.into()),
                _ => {}
            }
        }
    }
    // A directory that gets another parent changes itself.
    let changed = [Some(moved), other.filter(|_| request.exchange)];
    for inode in changed.into_iter().flatten().filter(|inode| inode.is_dir() && from_dir != to_dir) {
        asker.may(&inode, WRITE).await?;
    }
    Ok(())
}

/// Puts a character device 0, 0 at the old name: union file systems read it as "the name does not exist
/// here".
fn leave_whiteout(
    (parts, turn): (&Parts, &Turn<'_>),
    ino: Ino,
    touched: &mut Touched,
    request: &RenameRequest,
    cookie: u64,
    writes: &mut WriteSet,
) -> Result<(), MetaError> {
    let RenameRequest { dir, uid, gid, .. } = *request;
    let device = MakeRequest { dir, mode: CHARACTER_DEVICE, uid, gid, ..MakeRequest::default() };
    let from_dir = touched.get(Ino(dir));
    let inode = new_inode(parts, turn, ino, from_dir, &device)?;
    from_dir.add_entries(1)?;
    let row = entry_row(inode.ino, inode.type_bits(), &request.name);
    writes.put(entry_key(from_dir.ino, cookie), row);
    touched.inodes.insert(ino, inode);
    Ok(())
}

async fn refuse_loop(names: &Names, inode: &Inode, into: Ino) -> Result<(), MetaError> {
    let ino = inode.ino;
    match inode.is_dir() && names.is_above(ino, into).await? {
        true => Err(Errno::INVAL.into()),
        false => Ok(()),
    }
}

/// Takes the name from the replaced inode. `dirs` are the old and the new directory of the moved one.
fn replaced(
    turn: &Turn<'_>,
    touched: &mut Touched,
    other: &Entry,
    dirs: (Ino, Ino),
    writes: &mut WriteSet,
) -> Result<(), MetaError> {
    touched.get(dirs.0).add_entries(-1)?;
    let mut gone = touched.get(other.ino).clone();
    turn.remove_name(touched.get(dirs.1), &mut gone, writes)?;
    *touched.get(other.ino) = gone;
    Ok(())
}

/// Updates a moved inode, and for a directory its parent and the link counts of both directories.
fn moved_to(
    turn: &Turn<'_>,
    touched: &mut Touched,
    entry: &Entry,
    from: Ino,
    to: Ino,
) -> Result<(), MetaError> {
    let now = turn.now();
    let inode = touched.get(entry.ino);
    inode.times[2] = now;
    if inode.is_dir() && from != to {
        inode.parent = to;
        touched.get(from).add_links(-1)?;
        touched.get(to).add_links(1)?;
    }
    Ok(())
}

fn renamed(entry: &Entry, name: &[u8]) -> Vec<u8> {
    entry_row(entry.ino, entry.kind, name)
}

fn refuse_replace(touched: &mut Touched, moved: Ino, other: Ino) -> Result<(), MetaError> {
    let moved_is_dir = touched.get(moved).is_dir();
    let other = touched.get(other);
    match (moved_is_dir, other.is_dir()) {
        (true, false) => Err(Errno::NOTDIR.into()),
        (false, true) => Err(Errno::ISDIR.into()),
        (true, true) if other.entries > 0 => Err(Errno::NOTEMPTY.into()),
        _ => Ok(()),
    }
}
