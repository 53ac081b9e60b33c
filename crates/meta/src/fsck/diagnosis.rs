//! The diagnosis of a file system: every inconsistency of its rows, and the repair for each.
//!
//! It is shown all rows, as of one moment, and reads nothing itself. For each inode number it keeps a few
//! words in memory, but no name and no attribute. Rows of a later release are reported and left alone, and
//! nothing that may depend on them is checked.

mod elsewhere;
mod entries;
mod inodes;
mod loans;
mod trace;

pub(crate) use elsewhere::Local;
pub(crate) use loans::LoanFix;
pub(crate) use trace::Trace;

use crate::inode::{Data, FileKind, Inode};
use crate::rows::reserved::Reserved;
use crate::rows::{
    FsRow, decode_entry_key, decode_inode_key, decode_removed, decode_xattr, decode_xattr_key, inode_key,
    owner_of,
};
use crate::{LAST_INO, ROOT, XATTR_MAX};
use elsewhere::Others;
use entries::Bucket;
use loans::Loans;
use penstock_base::{DecodeError, FindingKind as Kind, Findings, Id128, Ino, TargetId, hex};
use penstock_chunk::copies::is_copy;
use penstock_chunk::{Known, Owned, TargetCheck};
use penstock_session::read_result;
use penstock_session::rows::{SessionRow, decode_session_key};
use std::collections::{BTreeMap, BTreeSet};
use trace::Brief;

/// Most repairs of one kind that are kept. A repair makes a new diagnosis after it has done them.
const KEPT_FIXES: usize = 1 << 14;

/// The repair of one inconsistency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fix {
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
    /// Make the rows of files and accounts right.
    CountFiles,
    /// Mark blocks without an owner as free.
    ClearUnowned,
    /// Repair rows of a target of another stack.
    On(TargetId, Local),
    /// Move the chunks that a target of another stack has of an inode into new files.
    Take(TargetId, Ino),
    /// Make a missing inode again, of which only this target has chunks.
    Adopt(TargetId, Ino, Owned),
    /// Make the rows of a loan between targets agree.
    Loan(LoanFix),
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
    Truncations(u64),
    Spread,
}

/// The order in which a diagnosis is shown the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// All rows of inodes and of what belongs to them, and the keys of all entries.
    #[default]
    Inodes,
    /// The entries, which refer to inodes.
    Entries,
    /// Inodes are checked, and then nothing is added to them.
    Checked,
}

/// All findings, and the repairs for them.
#[derive(Default)]
pub(crate) struct Diagnosis {
    /// Of the file system's own row.
    secret: Id128,
    reserved_ino: u64,
    last_session: u64,
    /// Numbers of the sessions that were seen.
    sessions: BTreeSet<u64>,
    /// Blocks in a chunk.
    chunk_blocks: u32,
    /// Number of targets of the store.
    targets: u32,
    bucket: Bucket,
    stage: Stage,
    others: Others,
    loans: Loans,
    /// The highest inode number of which another target has something.
    highest_elsewhere: u64,
    pub(crate) findings: Findings,
    pub(crate) fixes: BTreeMap<Kind, Vec<Fix>>,
    pub(crate) traces: BTreeMap<Ino, Trace>,
    pub(crate) inodes: u64,
    pub(crate) entries: u64,
    pub(crate) removed: u64,
    pub(crate) chunks: u64,
    pub(crate) blocks: u64,
    pub(crate) blocks_beyond_end: u64,
}

impl Diagnosis {
    /// A diagnosis without findings, of a file system with this row, this many blocks in a chunk, and so many
    /// targets.
    pub(crate) fn new(fs: &FsRow, chunk_blocks: u32, targets: u32) -> Self {
        let FsRow { secret, reserved_ino, last_session, .. } = *fs;
        Self { secret, reserved_ino, last_session, chunk_blocks, targets, ..Self::default() }
    }

    /// Goes on to a stage.
    ///
    /// # Panics
    /// If a later stage has begun.
    fn enter(&mut self, stage: Stage) {
        assert!(self.stage <= stage, "{stage:?} are shown before {:?}", self.stage);
        self.stage = stage;
    }

    fn wrong(&mut self, kind: Kind, ino: Ino, text: String, fix: Fix) {
        self.findings.add(kind, ino, text);
        self.fix(kind, fix);
    }

    fn fix(&mut self, kind: Kind, fix: Fix) {
        let fixes = self.fixes.entry(kind).or_default();
        // One count makes all rows right.
        let counts = matches!(fix, Fix::CountFiles | Fix::On(..));
        let is_known = counts && fixes.contains(&fix);
        if fixes.len() < KEPT_FIXES && !is_known {
            fixes.push(fix);
        }
    }

    /// Adds a row of no kind that this release uses.
    pub(crate) fn see_unknown(&mut self, key: &[u8], value: &[u8]) {
        let text = match Reserved::decode(key, value) {
            Ok(row) => format!("row {} is {}, which this release does not use", hex(key), row.what()),
            Err(error) => format!("row {}: {error}", hex(key)),
        };
        self.unknown(None, text);
    }

    fn unknown(&mut self, ino: Option<Ino>, text: String) {
        self.findings.add_hopeless(Kind::UnknownRow, ino, text);
    }

    fn trace(&mut self, ino: Ino) -> &mut Trace {
        self.traces.entry(ino).or_default()
    }

    /// Adds an unreadable row of an inode as a finding. Returns false for a row of a later release, which is
    /// left alone.
    fn unreadable(&mut self, kind: Kind, key: &[u8], error: &DecodeError, fix: Fix) -> bool {
        self.unreadable_of(owner_of(key, 2, false).ok(), kind, key, error, fix)
    }

    /// Adds an unreadable row of a session as a finding.
    fn unreadable_session(&mut self, key: &[u8], error: &DecodeError) {
        self.unreadable_of(None, Kind::BadSessionRow, key, error, Fix::Drop(key.to_vec()));
    }

    fn unreadable_of(
        &mut self,
        ino: Option<Ino>,
        kind: Kind,
        key: &[u8],
        error: &DecodeError,
        fix: Fix,
    ) -> bool {
        let text = format!("row {}: {error}", hex(key));
        if let DecodeError::Unknown { .. } = error {
            self.unknown(ino, text);
            return false;
        }
        self.findings.add(kind, ino, text);
        self.fix(kind, fix);
        true
    }

    /// Takes in an inode's row.
    pub(crate) fn see_inode(&mut self, key: &[u8], value: &[u8]) {
        self.enter(Stage::Inodes);
        self.inodes += 1;
        let ino = match decode_inode_key(key) {
            Ok(ino) => ino,
            Err(error) => {
                self.unreadable(Kind::BadInodeRow, key, &error, Fix::Keep(key.to_vec()));
                return;
            }
        };
        let inode = match Inode::decode(value) {
            Ok(inode) => inode,
            // Only its attributes are lost, and a new root directory takes its place.
            Err(DecodeError::Bad { .. } | DecodeError::Short { .. }) if ino == ROOT => return,
            Err(error) => {
                self.unreadable(Kind::BadInodeRow, key, &error, Fix::Keep(key.to_vec()));
                self.trace(ino).opaque = true;
                return;
            }
        };
        if inode.ino != ino {
            let text = format!("the row of inode {ino} says that it is inode {}", inode.ino);
            let right = Inode { ino, ..inode.clone() }.encode();
            self.wrong(Kind::WrongInodeNumber, ino, text, Fix::Put(key.to_vec(), right));
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
            known: Known { truncations: inode.truncations, owner: inode.owner() },
            is_spread: inode.is_spread,
            spread: inode.layout.spread(self.targets),
        });
    }

    /// Takes in a row of the queue of removed files.
    pub(crate) fn see_removed(&mut self, key: &[u8], value: &[u8]) {
        self.enter(Stage::Inodes);
        self.removed += 1;
        match decode_removed(key, value) {
            Ok(removed) => self.trace(removed.ino).queued = true,
            Err(error) => drop(self.unreadable(Kind::BadQueueRow, key, &error, Fix::Drop(key.to_vec()))),
        }
    }

    /// Takes in an extended attribute's row.
    pub(crate) fn see_xattr(&mut self, key: &[u8], value: &[u8]) {
        self.enter(Stage::Inodes);
        let decoded = decode_xattr_key(key).and_then(|ino| Ok((ino, decode_xattr(value)?.len())));
        match decoded {
            Ok((ino, ..=XATTR_MAX)) => self.trace(ino).xattrs = true,
            Ok((ino, len)) => {
                let text = format!("an extended attribute of inode {ino} has {len} bytes");
                self.findings.add_hopeless(Kind::BadXattrRow, ino, text);
            }
            Err(error) => drop(self.unreadable(Kind::BadXattrRow, key, &error, Fix::Keep(key.to_vec()))),
        }
    }

    /// Takes in the check of the chunk store.
    pub(crate) fn see_target(&mut self, target: TargetId, check: TargetCheck) {
        self.enter(Stage::Inodes);
        self.loans.see(target, check.loans);
        self.chunks += check.chunks;
        self.blocks += check.blocks;
        // Copies of the map have no inode.
        for (ino, owned) in check.owners.into_iter().filter(|(ino, _)| !is_copy(*ino)) {
            self.trace(ino).owned = owned;
            if owned.far_chunks > 0 {
                self.fix(Kind::ChunkBeyondLimit, Fix::MoveChunks(ino, true));
            }
        }
        for finding in check.findings.kept.iter().filter(|finding| finding.repairable) {
            let fix = match finding.kind {
                Kind::BlockNotMarked | Kind::BadGroupRow | Kind::WrongFreeCount => Fix::MarkOwned,
                Kind::BadMapRow | Kind::ExtentBeyondChunk => Fix::MapRows,
                Kind::EmptyExtent | Kind::ExtentBeyondVolume => Fix::Extents,
                Kind::DoubleOwnedBlock => Fix::CopyDoubles,
                Kind::BadFileRow | Kind::WrongFileRow | Kind::WrongAccount => Fix::CountFiles,
                Kind::BlockNotOwned | Kind::WrittenFreeStripe => Fix::ClearUnowned,
                _ => continue,
            };
            self.fixes.entry(finding.kind).or_insert_with(|| vec![fix]);
        }
        check.findings.kept.into_iter().for_each(|finding| self.findings.push(finding));
        for (kind, count) in check.findings.counts {
            // Beyond those that are kept.
            let known = self.findings.counts.entry(kind).or_default();
            *known = (*known).max(count);
        }
    }

    /// Regular files, as their inodes know them.
    pub(crate) fn files(&self) -> BTreeMap<Ino, Known> {
        let file = |(ino, trace): (&Ino, &Trace)| {
            let row = trace.row.filter(|row| row.kind == FileKind::Regular)?;
            Some((*ino, row.known))
        };
        self.traces.iter().filter_map(file).collect()
    }

    /// Inodes with a row that cannot be decoded.
    pub(crate) fn opaque(&self) -> BTreeSet<Ino> {
        self.traces.iter().filter(|(_, trace)| trace.opaque).map(|(ino, _)| *ino).collect()
    }

    /// Counts an entry's row. Entries are checked after all have been counted.
    pub(crate) fn count_entry(&mut self, key: &[u8]) {
        self.enter(Stage::Inodes);
        self.entries += 1;
        if let Ok((dir, _)) = decode_entry_key(key) {
            self.trace(dir).children += 1;
        }
    }

    /// Checks that the numbers in use are reserved, after all inodes have been seen.
    pub(crate) fn check_reservations(&mut self) {
        self.enter(Stage::Checked);
        let used = |(_, trace): &(&Ino, &Trace)| trace.is_known() || trace.has_data();
        let highest = self.traces.range(ROOT..=LAST_INO).filter(used).map(|(ino, _)| ino.0).max();
        let highest = highest.unwrap_or(0).max(self.highest_elsewhere);
        let reserved = self.reserved_ino;
        if highest > reserved {
            let text = format!("inode {highest} is in use and numbers are reserved up to {reserved}");
            self.wrong(Kind::InodeReservationTooLow, Ino(highest), text, Fix::ReserveInodes(highest));
        }
    }

    /// Takes in the row of a stored result. One of a session that has ended is deleted by the next start.
    pub(crate) fn see_result(&mut self, key: &[u8], value: &[u8]) {
        if let Err(error) = read_result(key, value) {
            self.unreadable_session(key, &error);
        }
    }

    /// Takes in a session's row.
    pub(crate) fn see_session(&mut self, key: &[u8], value: &[u8]) {
        let last = self.last_session;
        match decode_session_key(key).and_then(|_| SessionRow::decode(value)) {
            Ok(SessionRow { number, .. }) if number > last => {
                let text = format!("session {number} is kept and sessions are counted up to {last}");
                self.findings.add(Kind::SessionReservationTooLow, None, text);
                self.fix(Kind::SessionReservationTooLow, Fix::ReserveSessions(number));
            }
            Ok(SessionRow { number, .. }) if !self.sessions.insert(number) => {
                let text = format!("row {}: another session has the number {number} too", hex(key));
                self.findings.add(Kind::BadSessionRow, None, text);
                self.fix(Kind::BadSessionRow, Fix::Drop(key.to_vec()));
            }
            Ok(_) => {}
            Err(error) => self.unreadable_session(key, &error),
        }
    }
}

/// Key and value of an inode's row.
pub(crate) fn row_of(inode: &Inode) -> (Vec<u8>, Vec<u8>) {
    (inode_key(inode.ino), inode.encode())
}
