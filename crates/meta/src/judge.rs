//! Judging the rows of a file system: finds every inconsistency, and the repair for each.
//!
//! Reads all rows. For each inode number it keeps a few words in memory, but no name and no attribute. A
//! judgement is made as of one moment: the caller prevents all changes of rows. Rows of a later release are
//! reported and left alone, and nothing that may depend on them is judged.

use crate::dirs::{SAME_HASH, check_name};
use crate::error::MetaError;
use crate::inode::{Data, FileKind, Inode};
use crate::rows::{
    Entry, all_entries, all_inodes, all_removed, all_xattrs, decode_entry_key, decode_inode_key,
    decode_removed, decode_xattr_key, entry_key, inode_key, owner_of, removed_key, unknown_keys,
};
use crate::target::MetaTarget;
use crate::{ROOT, XATTR_MAX};
use penstock_base::{BLOCK_BYTES, DecodeError, FindingKind as Kind, Findings, Ino, MAX_FILE_BYTES, hex};
use penstock_chunk::{Fsck, Owned, TargetCheck};
use penstock_kv::{Range, for_each};
use penstock_session::read_result;
use penstock_session::rows::{SessionRow, all_results, all_sessions, decode_session_key};
use std::collections::{BTreeMap, BTreeSet};

/// Type bits of a directory.
pub(crate) const DIRECTORY: u32 = 0o040_000;
/// Most repairs of one kind that are kept. A repair judges again after it has done them.
const KEPT_MENDS: usize = 1 << 14;

/// The repair of one inconsistency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mend {
    /// Mark blocks that have an owner as used, and make group rows and free counts right.
    MarkOwned,
    /// Reserve inode numbers up to this one.
    ReserveInodes(u64),
    /// Count sessions up to this one.
    ReserveSessions(u64),
    /// Make a new root directory.
    MakeRoot,
    /// Give the row (key) this value.
    Put(Vec<u8>, Vec<u8>),
    /// Delete the row.
    Drop(Vec<u8>),
    /// Delete the row, after saving it in lost+found.
    Keep(Vec<u8>),
    /// Collect the blocks of unreadable map rows in files, delete those rows, and cut extents to their chunk.
    MapRows,
    /// Cut extents to the volume, and delete empty ones.
    Extents,
    /// Make a missing inode again, from the rows that belong to it.
    Remake(Ino),
    /// Move an entry (directory, cookie) to the bucket in which its name is looked for.
    Rehome(Ino, u64),
    /// Give an inode a name in lost+found.
    Reconnect(Ino),
    /// Correct a field of an inode.
    Inode(Ino, Field),
    /// Copy blocks that have several owners, so that each owner has its own.
    CopyDoubles,
    /// Move chunks to new inodes; with true only the chunks beyond the largest file offset.
    MoveChunks(Ino, bool),
    /// Mark blocks without an owner as free.
    ClearUnowned,
}

/// The correct value of an inode's field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    Parent(Ino),
    Links(u32),
    Entries(u64),
    Data,
    Size(u64),
    ChunkBlocks(u32),
}

/// The parts of an inode's row that are needed to judge it.
#[derive(Clone, Copy, Debug)]
struct Brief {
    kind: FileKind,
    type_bits: u32,
    nlink: u32,
    size: u64,
    parent: Ino,
    entries: u64,
    chunk_blocks: u32,
    /// As numbered in the row: 0 none, 1 inline, 2 chunks.
    data: u8,
    inline_bytes: u64,
}

/// Everything that is known of one inode number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace {
    row: Option<Brief>,
    /// A row exists, but it cannot be decoded.
    opaque: bool,
    queued: bool,
    xattrs: bool,
    pub(crate) owned: Owned,
    /// Number of names, if it is no directory.
    names: u32,
    /// Directory and cookie of each name, if it is a directory.
    holders: Vec<(Ino, u64)>,
    /// Rows of entries in it; below, how many of these are directories.
    pub(crate) children: u64,
    subdirs: u32,
    /// True if some of its entries are from a later release.
    unsure: bool,
}

impl Trace {
    fn is_known(&self) -> bool {
        self.row.is_some() || self.opaque
    }

    /// True if data belongs to it.
    fn has_data(&self) -> bool {
        self.owned.chunks > 0 || self.xattrs || self.children > 0
    }

    fn is_dir(&self) -> bool {
        self.row.is_some_and(|row| row.kind == FileKind::Directory)
    }
}

/// All findings, and the repairs for them.
#[derive(Default)]
pub(crate) struct Judgement {
    pub(crate) findings: Findings,
    pub(crate) mends: BTreeMap<Kind, Vec<Mend>>,
    pub(crate) traces: BTreeMap<Ino, Trace>,
    pub(crate) inodes: u64,
    pub(crate) entries: u64,
    pub(crate) removed: u64,
    pub(crate) chunks: u64,
    pub(crate) blocks: u64,
    pub(crate) blocks_beyond_end: u64,
}

impl Judgement {
    fn wrong(&mut self, kind: Kind, ino: Ino, text: String, mend: Mend) {
        self.findings.add(kind, ino, text);
        self.mend(kind, mend);
    }

    fn mend(&mut self, kind: Kind, mend: Mend) {
        let mends = self.mends.entry(kind).or_default();
        if mends.len() < KEPT_MENDS {
            mends.push(mend);
        }
    }

    fn unknown(&mut self, ino: Option<Ino>, text: String) {
        self.findings.add_hopeless(Kind::UnknownRow, ino, text);
    }

    fn trace(&mut self, ino: Ino) -> &mut Trace {
        self.traces.entry(ino).or_default()
    }

    /// Adds an unreadable row as a finding. Returns false for a row of a later release, which is left alone.
    fn unreadable(&mut self, kind: Kind, key: &[u8], error: &DecodeError, mend: Mend) -> bool {
        let ino = owner_of(key, 2, false).ok();
        let text = format!("row {}: {error}", hex(key));
        if let DecodeError::Unknown { .. } = error {
            self.unknown(ino, text);
            return false;
        }
        self.findings.add(kind, ino, text);
        self.mend(kind, mend);
        true
    }

    fn see_inode(&mut self, key: &[u8], value: &[u8]) {
        self.inodes += 1;
        let ino = match decode_inode_key(key) {
            Ok(ino) => ino,
            Err(error) => {
                self.unreadable(Kind::BadInodeRow, key, &error, Mend::Keep(key.to_vec()));
                return;
            }
        };
        let inode = match Inode::decode(value) {
            Ok(inode) => inode,
            // Only its attributes are lost, and a new root directory takes its place.
            Err(DecodeError::Bad { .. } | DecodeError::Short { .. }) if ino == ROOT => return,
            Err(error) => {
                self.unreadable(Kind::BadInodeRow, key, &error, Mend::Keep(key.to_vec()));
                self.trace(ino).opaque = true;
                return;
            }
        };
        if inode.ino != ino {
            let text = format!("the row of inode {ino} says that it is inode {}", inode.ino);
            let right = Inode { ino, ..inode.clone() }.encode();
            self.wrong(Kind::WrongInodeNumber, ino, text, Mend::Put(key.to_vec(), right));
        }
        let (data, inline_bytes) = match &inode.data {
            Data::None => (0, 0),
            Data::Inline(bytes) => (1, bytes.len() as u64),
            Data::Chunks => (2, 0),
        };
        self.trace(ino).row = Some(Brief {
            kind: inode.kind(),
            type_bits: inode.type_bits(),
            nlink: inode.nlink,
            size: inode.size,
            parent: inode.parent,
            entries: inode.entries,
            chunk_blocks: inode.layout.chunk_blocks,
            data,
            inline_bytes,
        });
    }

    fn see_removed(&mut self, key: &[u8], value: &[u8]) {
        self.removed += 1;
        match decode_removed(key, value) {
            Ok(ino) => self.trace(ino).queued = true,
            Err(error) => drop(self.unreadable(Kind::BadQueueRow, key, &error, Mend::Drop(key.to_vec()))),
        }
    }

    fn see_xattr(&mut self, key: &[u8], value: &[u8]) {
        match decode_xattr_key(key) {
            Ok(ino) if value.len() <= XATTR_MAX => self.trace(ino).xattrs = true,
            Ok(ino) => {
                let text = format!("an extended attribute of inode {ino} has {} bytes", value.len());
                self.findings.add_hopeless(Kind::BadXattrRow, ino, text);
            }
            Err(error) => drop(self.unreadable(Kind::BadXattrRow, key, &error, Mend::Keep(key.to_vec()))),
        }
    }

    fn see_target(&mut self, check: TargetCheck) {
        (self.chunks, self.blocks) = (check.chunks, check.blocks);
        for (ino, owned) in check.owners {
            self.trace(ino).owned = owned;
            if owned.far_chunks > 0 {
                self.mend(Kind::ChunkBeyondLimit, Mend::MoveChunks(ino, true));
            }
        }
        for finding in check.findings.kept.iter().filter(|finding| finding.repairable) {
            let mend = match finding.kind {
                Kind::BlockNotMarked | Kind::BadGroupRow | Kind::WrongFreeCount => Mend::MarkOwned,
                Kind::BadMapRow | Kind::ExtentBeyondChunk => Mend::MapRows,
                Kind::EmptyExtent | Kind::ExtentBeyondVolume => Mend::Extents,
                Kind::DoubleOwnedBlock => Mend::CopyDoubles,
                Kind::BlockNotOwned | Kind::WrittenFreeStripe => Mend::ClearUnowned,
                _ => continue,
            };
            self.mends.entry(finding.kind).or_insert_with(|| vec![mend]);
        }
        self.findings = check.findings;
    }

    /// Counts an entry's row. Entries are judged after all have been counted.
    fn count_entry(&mut self, key: &[u8]) {
        self.entries += 1;
        if let Ok((dir, _)) = decode_entry_key(key) {
            self.trace(dir).children += 1;
        }
    }

    fn judge_inodes(&mut self, chunk_blocks: u32) {
        self.trace(ROOT);
        let traces = std::mem::take(&mut self.traces);
        for (ino, trace) in &traces {
            match trace.row {
                _ if trace.opaque => {}
                Some(row) => {
                    self.judge_names(*ino, trace, &row);
                    self.judge_data(*ino, trace, &row, chunk_blocks);
                }
                None => self.judge_gone(*ino, trace),
            }
        }
        self.judge_cycles(&traces);
        self.traces = traces;
    }

    fn judge_gone(&mut self, ino: Ino, trace: &Trace) {
        if ino == ROOT {
            let text = "the root directory does not exist".to_owned();
            self.wrong(Kind::MissingRoot, ino, text, Mend::MakeRoot);
        } else if trace.has_data() {
            let text = format!(
                "inode {ino} does not exist and has {} chunks, {} entries{}",
                trace.owned.chunks,
                trace.children,
                if trace.xattrs { " and extended attributes" } else { "" }
            );
            self.wrong(Kind::MissingInode, ino, text, Mend::Remake(ino));
        } else if trace.queued {
            let text = format!("inode {ino} waits to be dropped and does not exist");
            self.wrong(Kind::QueuedWithoutInode, ino, text, Mend::Drop(removed_key(ino)));
        }
    }

    fn judge_names(&mut self, ino: Ino, trace: &Trace, row: &Brief) {
        let holder = trace.holder(ino);
        if trace.is_dir() {
            for (dir, cookie) in trace.holders.iter().filter(|place| Some(**place) != holder) {
                let text = format!("directory {ino} has another name, in {dir}");
                self.wrong(Kind::DirectoryExtraName, ino, text, Mend::Drop(entry_key(*dir, *cookie)));
            }
        } else if ino == ROOT {
            let text = "the root is no directory".to_owned();
            return self.wrong(Kind::MissingRoot, ino, text, Mend::MakeRoot);
        }
        let names = if trace.is_dir() { u32::from(holder.is_some()) } else { trace.names };
        if names == 0 && ino != ROOT {
            if !(trace.queued && row.nlink == 0 && trace.children == 0) {
                let text = format!("inode {ino} has no name and was not removed");
                self.wrong(Kind::OrphanInode, ino, text, Mend::Reconnect(ino));
            }
            return;
        }
        if trace.queued {
            let text = format!("inode {ino} has {names} names and waits to be dropped");
            self.wrong(Kind::NamedAndQueued, ino, text, Mend::Drop(removed_key(ino)));
        }
        if trace.unsure {
            return;
        }
        let links = if trace.is_dir() { 2 + trace.subdirs } else { names };
        if row.nlink != links {
            let text = format!("inode {ino} says {} links and has {links}", row.nlink);
            self.wrong(Kind::WrongLinkCount, ino, text, Mend::Inode(ino, Field::Links(links)));
        }
        if trace.is_dir() {
            self.judge_directory(ino, trace, row, holder.map_or(ROOT, |(dir, _)| dir));
        }
    }

    fn judge_directory(&mut self, ino: Ino, trace: &Trace, row: &Brief, parent: Ino) {
        if row.entries != trace.children {
            let text = format!("directory {ino} says {} entries and has {}", row.entries, trace.children);
            self.wrong(Kind::WrongEntryCount, ino, text, Mend::Inode(ino, Field::Entries(trace.children)));
        }
        if row.parent != parent {
            let text = format!("directory {ino} says its parent is {}, and it is {parent}", row.parent);
            self.wrong(Kind::WrongParent, ino, text, Mend::Inode(ino, Field::Parent(parent)));
        }
    }

    fn judge_data(&mut self, ino: Ino, trace: &Trace, row: &Brief, chunk_blocks: u32) {
        let (wanted, size) = match row.kind {
            FileKind::Regular => (2, row.size.min(MAX_FILE_BYTES)),
            FileKind::Symlink => (1, row.inline_bytes),
            FileKind::Directory | FileKind::Special => (0, row.size),
        };
        let owned = &trace.owned;
        if row.data != wanted {
            let text = format!("inode {ino} holds its data in a way that its type does not");
            self.wrong(Kind::WrongInodeData, ino, text, Mend::Inode(ino, Field::Data));
        } else if row.size != size {
            let text = format!("inode {ino} says a size of {}, which cannot be", row.size);
            let size = match row.kind {
                FileKind::Regular => owned.end_block.saturating_mul(BLOCK_BYTES as u64).min(MAX_FILE_BYTES),
                _ => size,
            };
            self.wrong(Kind::WrongSize, ino, text, Mend::Inode(ino, Field::Size(size)));
        }
        if row.chunk_blocks != chunk_blocks {
            let text = format!("inode {ino} says chunks of {} blocks, not {chunk_blocks}", row.chunk_blocks);
            self.wrong(Kind::WrongLayout, ino, text, Mend::Inode(ino, Field::ChunkBlocks(chunk_blocks)));
        }
        if row.kind != FileKind::Regular && owned.chunks > 0 {
            let text = format!("inode {ino} is no regular file and has {} chunks", owned.chunks);
            self.wrong(Kind::ChunksOfNonFile, ino, text, Mend::MoveChunks(ino, false));
        }
        self.blocks_beyond_end += owned.blocks.saturating_sub(row.size.div_ceil(BLOCK_BYTES as u64));
    }

    /// Walks upwards from each directory. A walk that comes back to itself has found a cycle, of which one
    /// name is removed. The directory that loses its name is then an orphan.
    fn judge_cycles(&mut self, traces: &BTreeMap<Ino, Trace>) {
        let mut done: BTreeSet<Ino> = BTreeSet::new();
        for (start, _) in traces.iter().filter(|(_, trace)| trace.is_dir()) {
            let mut walk = Vec::new();
            let mut at = *start;
            while done.insert(at) {
                walk.push(at);
                match traces.get(&at).and_then(|trace| trace.holder(at)) {
                    Some((above, _)) => at = above,
                    None => break,
                }
            }
            // The walk met itself: it ended neither at a directory without a name nor where an earlier walk
            // had been.
            let Some(begin) = walk.iter().position(|ino| *ino == at) else { continue };
            let Some((dir, cookie)) = traces.get(&at).and_then(|trace| trace.holder(at)) else { continue };
            let round = &walk[begin..];
            let text = format!("{} directories contain each other, from inode {at} on", round.len());
            self.wrong(Kind::DirectoryCycle, at, text, Mend::Drop(entry_key(dir, cookie)));
        }
    }
}

impl Trace {
    /// Directory and cookie of the one name of a directory that counts: the name in its row's parent, or else
    /// the first.
    fn holder(&self, ino: Ino) -> Option<(Ino, u64)> {
        if ino == ROOT {
            return None;
        }
        let parent = self.row.map(|row| row.parent);
        let in_parent = self.holders.iter().find(|(dir, _)| Some(*dir) == parent);
        in_parent.or(self.holders.first()).copied()
    }
}

/// Names in the bucket (directory and hash) that is being read.
#[derive(Default)]
struct Bucket {
    place: (Ino, u64),
    names: Vec<Vec<u8>>,
}

impl MetaTarget {
    /// Judges all rows.
    pub(crate) async fn judge(&self, fsck: &Fsck<'_>) -> Result<Judgement, MetaError> {
        let mut judgement = Judgement::default();
        self.phase("chunks, extents and bitmaps");
        judgement.see_target(fsck.check().await?);
        self.phase("inodes");
        self.each(all_inodes(), |key, value| judgement.see_inode(key, value)).await?;
        self.each(all_removed(), |key, value| judgement.see_removed(key, value)).await?;
        self.each(all_xattrs(), |key, value| judgement.see_xattr(key, value)).await?;
        self.phase("names");
        self.each(all_entries(), |key, _| judgement.count_entry(key)).await?;
        let mut bucket = Bucket::default();
        self.each(all_entries(), |key, value| self.judge_entry(&mut judgement, &mut bucket, key, value))
            .await?;
        judgement.judge_inodes(self.target.config().chunk_blocks);
        self.phase("reservations");
        self.judge_reservations(&mut judgement);
        self.each(all_results(), |key, value| self.judge_result(&mut judgement, key, value)).await?;
        self.each(all_sessions(), |key, value| self.judge_session(&mut judgement, key, value)).await?;
        for range in unknown_keys() {
            self.each(range, |key, _| {
                judgement.unknown(None, format!("row {} is of no kind that this release knows", hex(key)));
            })
            .await?;
        }
        Ok(judgement)
    }

    async fn each(&self, range: Range, mut visit: impl FnMut(&[u8], &[u8])) -> Result<(), MetaError> {
        for_each(&*self.kv, range, |key, value| {
            self.count_row();
            visit(key, value);
            Ok(())
        })
        .await
    }

    fn judge_entry(&self, judgement: &mut Judgement, bucket: &mut Bucket, key: &[u8], value: &[u8]) {
        let read = owner_of(key, 4, true).and_then(|_| Ok((decode_entry_key(key)?, Entry::decode(value)?)));
        let ((dir, cookie), entry) = match read {
            Ok(row) => row,
            Err(error) => {
                let known = judgement.unreadable(Kind::BadEntryRow, key, &error, Mend::Keep(key.to_vec()));
                if let (false, Ok((dir, _))) = (known, decode_entry_key(key)) {
                    judgement.trace(dir).unsure = true;
                }
                return;
            }
        };
        let ino = entry.ino;
        let drop_it = Mend::Drop(key.to_vec());
        let name = String::from_utf8_lossy(&entry.name).into_owned();
        let holds = judgement.trace(dir).known_dir();
        if holds == Some(false) {
            let text = format!("the name {name:?} is in inode {dir}, which is no directory");
            return judgement.wrong(Kind::EntryWithoutDirectory, ino, text, drop_it);
        }
        if check_name(&entry.name).is_err() {
            let text = format!("{name:?} in directory {dir} can be no name");
            return judgement.wrong(Kind::BadEntryName, ino, text, drop_it);
        }
        let target = judgement.traces.get(&ino);
        if target.is_none_or(|trace| !trace.is_known() && !trace.has_data()) && ino != ROOT {
            let text = format!("{name:?} in directory {dir} is inode {ino}, which does not exist");
            return judgement.wrong(Kind::DanglingEntry, ino, text, drop_it);
        }
        if cookie / SAME_HASH * SAME_HASH != self.first_cookie(&entry.name) {
            let text = format!("{name:?} in directory {dir} is not where it is looked for");
            judgement.wrong(Kind::MisplacedEntry, ino, text, Mend::Rehome(dir, cookie));
        }
        if bucket.place != (dir, cookie / SAME_HASH) {
            *bucket = Bucket { place: (dir, cookie / SAME_HASH), names: Vec::new() };
        }
        if bucket.names.contains(&entry.name) {
            let text = format!("directory {dir} has the name {name:?} twice");
            return judgement.wrong(Kind::DuplicateName, ino, text, drop_it);
        }
        bucket.names.push(entry.name.clone());
        let row = judgement.traces.get(&ino).and_then(|trace| trace.row);
        if let Some(row) = row.filter(|row| row.type_bits != entry.kind) {
            let text = format!("{name:?} in directory {dir} says another type than inode {ino}");
            let right = Entry { kind: row.type_bits, ..entry.clone() }.encode();
            judgement.wrong(Kind::WrongEntryKind, ino, text, Mend::Put(key.to_vec(), right));
        }
        match row.map_or(entry.kind, |row| row.type_bits) == DIRECTORY {
            true => {
                judgement.trace(ino).holders.push((dir, cookie));
                judgement.trace(dir).subdirs += 1;
            }
            false => judgement.trace(ino).names += 1,
        }
    }

    fn judge_reservations(&self, judgement: &mut Judgement) {
        let of_fileset = |ino: &Ino| ino.0 >> 48 == ROOT.0 >> 48;
        let used = |(ino, trace): &(&Ino, &Trace)| of_fileset(ino) && (trace.is_known() || trace.has_data());
        let highest = judgement.traces.iter().filter(used).map(|(ino, _)| ino.0).max().unwrap_or(0);
        let reserved = self.fs.borrow().reserved_ino;
        if highest > reserved {
            let text = format!("inode {highest} is in use and numbers are reserved up to {reserved}");
            judgement.wrong(Kind::InodeReservationTooLow, Ino(highest), text, Mend::ReserveInodes(highest));
        }
    }

    fn judge_result(&self, judgement: &mut Judgement, key: &[u8], value: &[u8]) {
        let session = read_result(key, value).map(|(session, _, _)| session);
        self.judge_session_number(judgement, key, session, "has a result");
    }

    fn judge_session(&self, judgement: &mut Judgement, key: &[u8], value: &[u8]) {
        let session = SessionRow::decode(value).and_then(|_| decode_session_key(key));
        self.judge_session_number(judgement, key, session, "is kept");
    }

    fn judge_session_number(
        &self,
        judgement: &mut Judgement,
        key: &[u8],
        session: Result<u64, DecodeError>,
        what: &str,
    ) {
        let last = self.fs.borrow().last_session;
        match session {
            Ok(session) if session > last => {
                let text = format!("session {session} {what} and sessions are counted up to {last}");
                judgement.findings.add(Kind::SessionReservationTooLow, None, text);
                judgement.mend(Kind::SessionReservationTooLow, Mend::ReserveSessions(session));
            }
            Ok(_) => {}
            Err(error) => {
                judgement.unreadable(Kind::BadSessionRow, key, &error, Mend::Drop(key.to_vec()));
            }
        }
    }
}

impl Trace {
    /// Number of names, and true if it is in the queue of removed files.
    pub(crate) fn names_and_queue(&self) -> (u32, bool) {
        (self.names, self.queued)
    }

    /// True for a directory; none if the type is not known.
    fn known_dir(&self) -> Option<bool> {
        self.row.map(|_| self.is_dir())
    }
}

/// Key and value of an inode's row.
pub(crate) fn row_of(inode: &Inode) -> (Vec<u8>, Vec<u8>) {
    (inode_key(inode.ino), inode.encode())
}
