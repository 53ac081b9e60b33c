//! Repairing a file system.
//!
//! Works in rounds. Each round makes a diagnosis of everything, and then does the repairs of the first kind
//! that has findings. Kinds are ordered so that everything a repair relies on has been repaired before it
//! ([`FindingKind`]). First of all, every block of a file is marked as used, so that no later allocation
//! overlaps one.
//!
//! Invariants:
//! - each repair is one transaction, or several, each of which leaves a file system that the next diagnosis
//!   can repair further, so a repair that a power cut interrupts is finished by the next one;
//! - nothing that contains data is deleted: it gets a name in `/lost+found`.

use super::diagnosis::{Diagnosis, Field, Fix, LoanFix, Local, row_of};
use super::{Fsck, MetaCheck, paths};
use crate::error::MetaError;
use crate::inode::{DIRECTORY, Data, FileKind, Inode};
use crate::rows::removed_key;
use crate::{LINK_MAX, ROOT};
use penstock_base::num::number_by_time;
use penstock_base::{BLOCK_BYTES, FileId, FindingKind as Kind, Ino, MAX_FILE_BYTES, TargetId};
use penstock_chunk::{self as chunk, ChunkKey, Lent, MapRow, Owned, chunks_of_a_file};
use penstock_kv::WriteSet;
use std::collections::{BTreeMap, BTreeSet};

/// Most chunks moved, and rows saved, in one transaction.
const BATCH: usize = penstock_kv::ROWS_AT_ONCE / 2 - 16;
/// Rounds after which a repair gives up. Each round repairs something, so that many are never needed.
const MOST_ROUNDS: u64 = 100_000;
const REGULAR: u32 = 0o100_000;

/// Result of a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repair {
    /// Result of the check before the repair.
    pub before: MetaCheck,
    /// Number of repairs by kind of finding, including findings that appeared or changed during the repair.
    pub mended: BTreeMap<Kind, u64>,
    /// Files whose contents a person should inspect, with their paths.
    pub suspects: BTreeMap<Ino, Vec<String>>,
    /// Result of the check after the repair.
    pub after: MetaCheck,
}

/// True if a finding of this kind means that the contents of the file may be wrong.
fn is_suspect(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::DoubleOwnedBlock
            | Kind::BadMapRow
            | Kind::ExtentBeyondChunk
            | Kind::ExtentBeyondVolume
            | Kind::MissingInode
            | Kind::WrongInodeData
            | Kind::WrongLayout
            | Kind::WrongSize
    )
}

impl Fsck<'_> {
    /// Repairs the file system. Nobody may have files open, except files in the queue of removed files.
    pub(crate) async fn repair(&self) -> Result<Repair, MetaError> {
        self.chunks.forget_chunks();
        self.others.iter().for_each(|(_, chunks)| chunks.forget_chunks());
        self.turn.forget();
        let result = self.repair_rounds().await;
        if result.is_err() {
            self.chunks.give_up_repair();
            self.others.iter().for_each(|(_, chunks)| chunks.give_up_repair());
        }
        // The caches must not keep a state from before the repair, even if it failed.
        self.chunks.forget_chunks();
        self.others.iter().for_each(|(_, chunks)| chunks.forget_chunks());
        self.turn.forget();
        result
    }

    async fn repair_rounds(&self) -> Result<Repair, MetaError> {
        let mut repair = Repair::default();
        let mut suspects = BTreeSet::new();
        // Kinds of which a round left as many findings as before, with the same repairs.
        let mut stuck: BTreeSet<Kind> = BTreeSet::new();
        let mut last: Option<(Kind, u64, Vec<Fix>)> = None;
        for round in 1..MOST_ROUNDS {
            self.progress.round(round);
            let diagnosis = self.diagnose().await?;
            if let Some((kind, count, fixes)) = last
                && diagnosis.findings.count(kind) >= count
                && diagnosis.fixes.get(&kind) == Some(&fixes)
            {
                stuck.insert(kind);
            }
            let kept = &diagnosis.findings.kept;
            suspects.extend(kept.iter().filter(|found| is_suspect(found.kind)).filter_map(|found| found.ino));
            if round == 1 {
                repair.before = self.summary(&diagnosis).await?;
            }
            let next = diagnosis.fixes.iter().find(|(kind, _)| !stuck.contains(kind));
            let Some((kind, fixes)) = next.map(|(kind, fixes)| (*kind, fixes.clone())) else {
                self.chunks.settle_loans().await?;
                for (_, chunks) in &self.others {
                    chunks.settle_loans().await?;
                }
                repair.suspects = paths::find(self.turn.kv(), &suspects).await?;
                repair.after = self.summary(&diagnosis).await?;
                break;
            };
            last = Some((kind, diagnosis.findings.count(kind), fixes.clone()));
            self.progress.phase(kind.word());
            for fix in fixes {
                match self.fix(fix, &diagnosis).await {
                    Ok(()) => *repair.mended.entry(kind).or_default() += 1,
                    // A row that this release does not read is in the way of this repair, and of no other.
                    Err(MetaError::Row(error)) => {
                        tracing::error!(kind = kind.word(), %error, "a repair cannot be made");
                    }
                    Err(error) => return Err(error),
                }
            }
            self.chunks.make_durable().await?;
            for (_, chunks) in &self.others {
                chunks.make_durable().await?;
            }
        }
        Ok(repair)
    }

    async fn fix(&self, fix: Fix, diagnosis: &Diagnosis) -> Result<(), MetaError> {
        let mut writes = WriteSet::new();
        match fix {
            Fix::MarkOwned => self.chunks.mark_owned().await?,
            Fix::ReserveInodes(highest) => self.turn.reserve_inodes(highest).await?,
            Fix::ReserveSessions(session) => self.turn.reserve_sessions(session).await?,
            Fix::MakeRoot => {
                let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
                let mut root = self.blank_inode(ROOT, DIRECTORY | 0o755, owner);
                root.entries = diagnosis.traces.get(&ROOT).map_or(0, |trace| trace.children);
                let (key, value) = row_of(&root);
                writes.put(key, value);
            }
            Fix::Put(key, value) => drop(writes.put(key, value)),
            Fix::Drop(key) => drop(writes.delete(key)),
            Fix::Keep(key) => drop(self.keep_row(&key).await?),
            Fix::MapRows => self.repair_map_rows().await?,
            Fix::Extents => self.chunks.trim_extents().await?,
            Fix::Remake(ino) => self.remake(ino, None, diagnosis).await?,
            Fix::Rehome(dir, cookie) => self.rehome(dir, cookie).await?,
            Fix::Reconnect(ino) => {
                writes.delete(removed_key(ino));
                return self.reconnect(self.turn.stored_inode(ino).await?, writes).await;
            }
            Fix::Inode(ino, field) => {
                let (key, value) = row_of(&corrected(self.turn.stored_inode(ino).await?, field));
                writes.put(key, value);
            }
            Fix::CopyDoubles => drop(self.chunks.copy_doubles().await?),
            Fix::MoveChunks(ino, far) => self.move_chunks(ino, far).await?,
            Fix::CountFiles => self.chunks.count_files(&diagnosis.files(), &diagnosis.opaque()).await?,
            Fix::ClearUnowned => self.chunks.clear_unowned().await?,
            Fix::On(target, local) => self.fix_on(target, local, diagnosis).await?,
            Fix::Take(target, ino) => self.take_chunks(target, ino).await?,
            Fix::Adopt(target, ino, owned) => self.remake(ino, Some((target, owned)), diagnosis).await?,
            Fix::Loan(fix) => self.fix_loan(fix).await?,
        }
        self.turn.commit_repair(writes).await
    }

    async fn fix_loan(&self, fix: LoanFix) -> Result<(), MetaError> {
        match fix {
            LoanFix::Relend { lender, key, lent } => {
                let (there, borrower) = (self.any(lender), self.any(key.borrower));
                match there.may_lend(key, &lent).await? {
                    true => {
                        let group = lent.group;
                        there.put_lent(key, lent).await?;
                        borrower.loan_is_there(group);
                    }
                    false => borrower.drop_loan(lent.group).await?,
                }
            }
            LoanFix::DropLent { lender, key, lent } => self.drop_lent(lender, key, lent).await?,
            LoanFix::PutLoan { borrower, group, borrowed } => {
                self.any(borrower).put_loan(group, borrowed).await?;
            }
            LoanFix::DropLoan { borrower, group } => self.any(borrower).drop_loan(group).await?,
            LoanFix::PutNumbers { borrower, highest } => {
                let now_s = u32::try_from(self.turn.now_ns() / 1_000_000_000).unwrap_or(u32::MAX);
                self.any(borrower).put_numbers(highest.max(number_by_time(now_s))).await?;
            }
        }
        Ok(())
    }

    /// Ends a loan that its borrower does not have. What is written in its blocks may be of the borrower: it
    /// gets a file of its own.
    async fn drop_lent(&self, lender: TargetId, key: Vec<u8>, lent: Option<Lent>) -> Result<(), MetaError> {
        let chunks = self.any(lender);
        let runs = match &lent {
            Some(lent) => chunks.written_of(lent).await?,
            None => Vec::new(),
        };
        if runs.is_empty() {
            return Ok(chunks.drop_lent(key, WriteSet::new()).await?);
        }
        let (to, mut writes) = (self.turn.new_ino().await?, WriteSet::new());
        let rows = chunks.rows_of_runs(to, &runs);
        let size = rows.len() as u64 * self.chunk_bytes();
        rows.into_iter().for_each(|(key, value)| _ = writes.put(key, value));
        chunks.drop_lent(key, writes).await?;
        let elsewhere = (lender != self.target.config().id).then_some(lender);
        self.new_file_on(elsewhere, size, WriteSet::new(), to).await
    }

    /// A target that serves.
    fn any(&self, target: TargetId) -> &chunk::Fsck<'_> {
        if target == self.target.config().id { &self.chunks } else { self.other(target) }
    }

    fn other(&self, target: TargetId) -> &chunk::Fsck<'_> {
        let found = self.others.iter().find(|(id, _)| *id == target);
        &found.expect("a finding is about a target that serves").1
    }

    async fn fix_on(&self, target: TargetId, local: Local, diagnosis: &Diagnosis) -> Result<(), MetaError> {
        let chunks = self.other(target);
        match local {
            Local::MarkOwned => chunks.mark_owned().await?,
            Local::Extents => chunks.trim_extents().await?,
            Local::CopyDoubles => drop(chunks.copy_doubles().await?),
            Local::CountFiles => {
                // It has rows only of files of which it has something.
                let here = chunks.check().await?.owners;
                let mut files = diagnosis.files();
                files.retain(|ino, _| here.contains_key(ino));
                chunks.count_files(&files, &diagnosis.opaque()).await?;
            }
            Local::ClearUnowned => chunks.clear_unowned().await?,
        }
        Ok(())
    }

    /// Gives chunks of another target that cannot belong to their inode new files, which lie on that target
    /// alone. A repair that is interrupted finds the chunks again, under the number of the new file.
    async fn take_chunks(&self, target: TargetId, ino: Ino) -> Result<(), MetaError> {
        let chunks = self.other(target);
        loop {
            let rows = chunks.rows_of(ino, 0, BATCH).await?;
            if rows.is_empty() {
                return Ok(());
            }
            let (mut moves, mut end) = (WriteSet::new(), 0);
            let to = self.turn.new_ino().await?;
            for (key, value) in rows {
                let (chunk, birth) = ChunkKey::decode(&key)?;
                end = end.max(chunk.index.saturating_add(1));
                let row = MapRow { truncations: 0, ..MapRow::decode(&value, birth)? };
                let moved = ChunkKey { file: FileId { ino: to, ..chunk.file }, index: chunk.index };
                moves.put(moved.row(birth), row.encode(birth)).delete(key);
            }
            chunks.change_rows(moves).await?;
            self.new_file_on(Some(target), end.saturating_mul(self.chunk_bytes()), WriteSet::new(), to)
                .await?;
        }
    }

    /// Makes a file in lost+found for chunks whose rows `writes` puts.
    async fn new_file(&self, size: u64, writes: WriteSet, ino: Ino) -> Result<(), MetaError> {
        self.new_file_on(None, size, writes, ino).await
    }

    /// The same, on another target if one is given.
    async fn new_file_on(
        &self,
        target: Option<TargetId>,
        size: u64,
        mut writes: WriteSet,
        ino: Ino,
    ) -> Result<(), MetaError> {
        let root = self.turn.stored_inode(ROOT).await?;
        let mut inode = self.blank_inode(ino, REGULAR | 0o600, (root.uid, root.gid));
        if let Some(target) = target {
            inode.set_only_target(target);
        }
        inode.size = size.min(MAX_FILE_BYTES);
        writes.reclaims();
        self.reconnect(inode, writes).await
    }

    fn chunk_bytes(&self) -> u64 {
        u64::from(self.chunk_blocks()) * BLOCK_BYTES as u64
    }

    /// Repairs map rows that cannot be read and extents beyond their chunk. It is unknown which blocks these
    /// own, so all blocks that are marked as used and owned by nothing are collected in files before the rows
    /// are deleted.
    async fn repair_map_rows(&self) -> Result<(), MetaError> {
        loop {
            let runs = self.chunks.unowned_runs(BATCH).await?;
            if runs.is_empty() {
                break;
            }
            let mut writes = WriteSet::new();
            let ino = self.turn.new_ino().await?;
            for (key, value) in self.chunks.rows_of_runs(ino, &runs) {
                writes.put(key, value);
            }
            self.new_file(runs.len() as u64 * self.chunk_bytes(), writes, ino).await?;
        }
        loop {
            let rows = self.chunks.unreadable_rows(BATCH).await?;
            let mut kept = false;
            for (key, _) in &rows {
                kept |= self.keep_row(key).await?;
            }
            if !kept {
                break;
            }
        }
        Ok(self.chunks.trim_extents().await?)
    }

    /// Gives a missing inode a row again: a directory if it has entries, or else a file as long as its
    /// chunks. An inode in the queue of removed files stays there. All chunks lie on another target if one is
    /// given, with what it has.
    async fn remake(
        &self,
        ino: Ino,
        elsewhere: Option<(TargetId, Owned)>,
        diagnosis: &Diagnosis,
    ) -> Result<(), MetaError> {
        let trace = diagnosis.traces.get(&ino).cloned().unwrap_or_default();
        let owned = elsewhere.map_or(trace.owned, |(_, owned)| owned);
        let root = self.turn.stored_inode(ROOT).await?;
        let mode = if trace.children > 0 { DIRECTORY | 0o700 } else { REGULAR | 0o600 };
        // The target may know whose it was.
        let owner = owned.file.map_or((root.uid, root.gid), |row| (row.owner.uid, row.owner.gid));
        let mut inode = self.blank_inode(ino, mode, owner);
        if let Some((target, _)) = elsewhere {
            inode.set_only_target(target);
        }
        let file = owned.file.map_or(0, |row| row.truncations);
        inode.truncations = if inode.is_dir() { 0 } else { file.max(owned.truncations) };
        let (links, queued) = trace.names_and_queue();
        match inode.is_dir() {
            true => inode.entries = trace.children,
            false => {
                inode.size = owned.end_block.saturating_mul(BLOCK_BYTES as u64).min(MAX_FILE_BYTES);
                inode.nlink = if queued && links == 0 { 0 } else { links.max(1) };
            }
        }
        let mut writes = WriteSet::new();
        let (key, value) = row_of(&inode);
        writes.put(key, value);
        self.turn.commit_repair(writes).await
    }

    /// Moves chunks that cannot belong to their inode into new files.
    async fn move_chunks(&self, ino: Ino, far: bool) -> Result<(), MetaError> {
        let first = if far { chunks_of_a_file(self.chunk_blocks()) } else { 0 };
        loop {
            let rows = self.chunks.rows_of(ino, first, BATCH).await?;
            if rows.is_empty() {
                return Ok(());
            }
            let mut writes = WriteSet::new();
            let to = self.turn.new_ino().await?;
            let mut end = 0;
            for (at, (key, value)) in (0..).zip(rows) {
                let (chunk, birth) = ChunkKey::decode(&key)?;
                let index = if far { at } else { chunk.index };
                end = end.max(index.saturating_add(1));
                // The new file was never truncated.
                let row = MapRow { truncations: 0, ..MapRow::decode(&value, birth)? };
                let moved = ChunkKey { file: FileId { ino: to, ..chunk.file }, index };
                writes.put(moved.row(birth), row.encode(birth)).delete(key);
            }
            assert!(end > 0, "chunks were moved");
            self.new_file(end.saturating_mul(self.chunk_bytes()), writes, to).await?;
        }
    }
}

/// Returns an inode with one field corrected.
fn corrected(mut inode: Inode, field: Field) -> Inode {
    match field {
        Field::Parent(parent) => inode.parent = parent,
        Field::Links(links) => {
            // Names beyond the limit are names all the same.
            inode.nlink = links;
            if links > LINK_MAX && !inode.is_dir() {
                tracing::warn!(ino = %inode.ino, links, "an inode has more names than this release makes");
            }
        }
        Field::Entries(entries) => inode.entries = entries,
        Field::Size(size) => inode.size = size,
        Field::ChunkBlocks(blocks) => inode.layout.chunk_blocks = blocks,
        Field::Truncations(truncations) => inode.truncations = truncations,
        Field::Spread => inode.is_spread = true,
        Field::Data => match inode.kind() {
            FileKind::Regular => inode.data = Data::Chunks,
            FileKind::Directory | FileKind::Special => inode.data = Data::None,
            // Its target is lost, and a link without a target is none, so it becomes an empty file.
            FileKind::Symlink => {
                inode.mode = REGULAR | (inode.mode & 0o777);
                inode.data = Data::Chunks;
            }
        },
    }
    inode
}
