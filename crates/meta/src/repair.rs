//! Repairing a file system.
//!
//! Works in rounds. Each round judges everything, and then does the repairs of the first kind that has
//! findings. Kinds are ordered so that everything a repair relies on has been repaired before it
//! ([`FindingKind`]). First of all, every block of a file is marked as used, so that no later allocation
//! overlaps one.
//!
//! Invariants:
//! - each repair is one transaction, or several, each of which leaves a file system that the next judgement
//!   can repair further, so a repair that a power cut interrupts is finished by the next one;
//! - nothing that contains data is deleted: it gets a name in `/lost+found`.

use crate::check::{CheckProgress, MetaCheck};
use crate::error::MetaError;
use crate::inode::{Data, FileKind, Inode};
use crate::judge::{DIRECTORY, Field, Judgement, Mend, row_of};
use crate::rows::{FsRow, fs_key, removed_key};
use crate::target::MetaTarget;
use crate::{LINK_MAX, ROOT};
use penstock_base::{BLOCK_BYTES, FileKey, FindingKind as Kind, Ino, MAX_FILE_BYTES};
use penstock_chunk::{ChunkKey, Fsck, chunks_of_a_file};
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
            | Kind::WrongSize
    )
}

impl MetaTarget {
    /// Repairs the file system. The caller must serve no request meanwhile, and nobody may have files open,
    /// except files in the queue of removed files.
    pub async fn repair(&self) -> Result<Repair, MetaError> {
        let _one = self.changing.lock().await;
        self.target.commit_all().await?;
        let quiet = self.gate.quiesce().await;
        let fsck = self.target.fsck(&quiet);
        *self.progress.borrow_mut() = Some(CheckProgress { repair: true, ..CheckProgress::default() });
        fsck.forget_chunks();
        self.entries.take();
        let result = self.repair_rounds(&fsck).await;
        *self.progress.borrow_mut() = None;
        // The caches must not keep a state from before the repair, even if it failed.
        fsck.forget_chunks();
        self.cache.borrow_mut().clear();
        self.entries.take();
        self.transactions.set(self.transactions.get() + 1);
        self.queue_removed().await?;
        self.reap_wake.notify_one();
        result
    }

    async fn repair_rounds(&self, fsck: &Fsck<'_>) -> Result<Repair, MetaError> {
        let mut repair = Repair::default();
        let mut suspects = BTreeSet::new();
        // Kinds of which a round left as many findings as before.
        let mut stuck: BTreeSet<Kind> = BTreeSet::new();
        let mut last: Option<(Kind, u64)> = None;
        for round in 1..MOST_ROUNDS {
            if let Some(progress) = &mut *self.progress.borrow_mut() {
                (progress.round, progress.rows) = (round, 0);
            }
            let judgement = self.judge(fsck).await?;
            if let Some((kind, count)) = last
                && judgement.findings.count(kind) >= count
            {
                stuck.insert(kind);
            }
            let kept = &judgement.findings.kept;
            suspects.extend(kept.iter().filter(|found| is_suspect(found.kind)).filter_map(|found| found.ino));
            if round == 1 {
                repair.before = self.summary_of(&judgement).await?;
            }
            let next = judgement.mends.iter().find(|(kind, _)| !stuck.contains(kind));
            let Some((kind, mends)) = next.map(|(kind, mends)| (*kind, mends.clone())) else {
                repair.suspects = self.find_paths(&suspects).await?;
                repair.after = self.summary(judgement).await?;
                break;
            };
            last = Some((kind, judgement.findings.count(kind)));
            self.phase(kind.word());
            *repair.mended.entry(kind).or_default() += mends.len() as u64;
            for mend in mends {
                self.mend(mend, &judgement, fsck).await?;
            }
            self.target.volume().flush().await.map_err(penstock_chunk::ChunkError::from)?;
            self.kv.flush().await?;
        }
        Ok(repair)
    }

    async fn summary_of(&self, judgement: &Judgement) -> Result<MetaCheck, MetaError> {
        let part = Judgement {
            findings: judgement.findings.clone(),
            mends: BTreeMap::new(),
            traces: BTreeMap::new(),
            ..*judgement
        };
        self.summary(part).await
    }

    async fn mend(&self, mend: Mend, judgement: &Judgement, fsck: &Fsck<'_>) -> Result<(), MetaError> {
        let mut writes = WriteSet::new();
        match mend {
            Mend::MarkOwned => fsck.mark_owned().await?,
            Mend::ReserveInodes(highest) => {
                self.next_ino.set(self.next_ino.get().max(highest));
                self.put_fs(|fs| fs.reserved_ino = fs.reserved_ino.max(highest)).await?;
            }
            Mend::ReserveSessions(session) => {
                self.put_fs(|fs| fs.last_session = fs.last_session.max(session)).await?;
            }
            Mend::MakeRoot => {
                let owner = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
                let mut root = self.blank_inode(ROOT, DIRECTORY | 0o755, owner);
                root.entries = judgement.traces.get(&ROOT).map_or(0, |trace| trace.children);
                let (key, value) = row_of(&root);
                writes.put(key, value);
            }
            Mend::Put(key, value) => drop(writes.put(key, value)),
            Mend::Drop(key) => drop(writes.delete(key)),
            Mend::Keep(key) => drop(self.keep_row(&key).await?),
            Mend::MapRows => self.mend_map_rows(fsck).await?,
            Mend::Extents => fsck.trim_extents().await?,
            Mend::Remake(ino) => self.remake(ino, judgement).await?,
            Mend::Rehome(dir, cookie) => self.rehome(dir, cookie).await?,
            Mend::Reconnect(ino) => {
                writes.delete(removed_key(ino));
                return self.reconnect(self.stored_inode(ino).await?, writes).await;
            }
            Mend::Inode(ino, field) => {
                let (key, value) = row_of(&mended(self.stored_inode(ino).await?, field));
                writes.put(key, value);
            }
            Mend::CopyDoubles => drop(fsck.copy_doubles().await?),
            Mend::MoveChunks(ino, far) => self.move_chunks(ino, far, fsck).await?,
            Mend::ClearUnowned => fsck.clear_unowned().await?,
        }
        self.commit_repair(writes).await
    }

    async fn put_fs(&self, change: impl FnOnce(&mut FsRow)) -> Result<(), MetaError> {
        let mut fs = self.fs.borrow().clone();
        change(&mut fs);
        let mut writes = WriteSet::new();
        writes.put(fs_key(), fs.encode());
        *self.fs.borrow_mut() = fs;
        self.commit_repair(writes).await
    }

    /// Makes a file in lost+found for chunks whose rows `writes` puts.
    async fn new_file(&self, size: u64, mut writes: WriteSet, ino: Ino) -> Result<(), MetaError> {
        let root = self.stored_inode(ROOT).await?;
        let mut inode = self.blank_inode(ino, REGULAR | 0o600, (root.uid, root.gid));
        inode.size = size.min(MAX_FILE_BYTES);
        writes.reclaims();
        self.reconnect(inode, writes).await
    }

    fn chunk_bytes(&self) -> u64 {
        u64::from(self.target.config().chunk_blocks) * BLOCK_BYTES as u64
    }

    /// Repairs map rows that cannot be read and extents beyond their chunk. It is unknown which blocks these
    /// own, so all blocks that are marked as used and owned by nothing are collected in files before the rows
    /// are deleted.
    async fn mend_map_rows(&self, fsck: &Fsck<'_>) -> Result<(), MetaError> {
        loop {
            let runs = fsck.unowned_runs(BATCH).await?;
            if runs.is_empty() {
                break;
            }
            let mut writes = WriteSet::new();
            let ino = self.new_ino().await?;
            for (key, value) in fsck.rows_of_runs(ino, &runs) {
                writes.put(key, value);
            }
            self.new_file(runs.len() as u64 * self.chunk_bytes(), writes, ino).await?;
        }
        loop {
            let rows = fsck.unreadable_rows(BATCH).await?;
            let mut kept = false;
            for (key, _) in &rows {
                kept |= self.keep_row(key).await?;
            }
            if !kept {
                break;
            }
        }
        Ok(fsck.trim_extents().await?)
    }

    /// Gives a missing inode a row again: a directory if it has entries, or else a file as long as its
    /// chunks. An inode in the queue of removed files stays there.
    async fn remake(&self, ino: Ino, judgement: &Judgement) -> Result<(), MetaError> {
        let Some(trace) = judgement.traces.get(&ino) else { return Ok(()) };
        let root = self.stored_inode(ROOT).await?;
        let mode = if trace.children > 0 { DIRECTORY | 0o700 } else { REGULAR | 0o600 };
        let mut inode = self.blank_inode(ino, mode, (root.uid, root.gid));
        let (links, queued) = trace.names_and_queue();
        match inode.is_dir() {
            true => inode.entries = trace.children,
            false => {
                inode.size = trace.owned.end_block.saturating_mul(BLOCK_BYTES as u64).min(MAX_FILE_BYTES);
                inode.nlink = if queued && links == 0 { 0 } else { links.max(1) };
            }
        }
        let mut writes = WriteSet::new();
        let (key, value) = row_of(&inode);
        writes.put(key, value);
        self.commit_repair(writes).await
    }

    /// Moves chunks that cannot belong to their inode into new files.
    async fn move_chunks(&self, ino: Ino, far: bool, fsck: &Fsck<'_>) -> Result<(), MetaError> {
        let first = if far { chunks_of_a_file(self.target.config().chunk_blocks) } else { 0 };
        loop {
            let rows = fsck.rows_of(ino, first, BATCH).await?;
            if rows.is_empty() {
                return Ok(());
            }
            let mut writes = WriteSet::new();
            let to = self.new_ino().await?;
            let mut end = 0;
            for (at, (key, value)) in (0..).zip(rows) {
                let (chunk, birth) = ChunkKey::decode(&key)?;
                let index = if far { at } else { chunk.index };
                end = end.max(index + 1);
                writes
                    .put(ChunkKey { file: FileKey { ino: to, ..chunk.file }, index }.row(birth), value)
                    .delete(key);
            }
            self.new_file(end.saturating_mul(self.chunk_bytes()), writes, to).await?;
        }
    }
}

/// Returns an inode with one field corrected.
fn mended(mut inode: Inode, field: Field) -> Inode {
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
