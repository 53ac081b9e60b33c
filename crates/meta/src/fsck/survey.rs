//! Reads all rows for a diagnosis, and sums it up.

use super::diagnosis::Diagnosis;
use super::{Fsck, MetaCheck, Underway, paths};
use crate::error::MetaError;
use crate::rows::{FsRow, all_entries, all_inodes, all_queued, all_removed, all_xattrs, unknown_keys};
use futures_util::{StreamExt, stream};
use penstock_base::rank::scoped;
use penstock_base::{Ino, LocalBoxFuture, TargetId};
use penstock_chunk::{self as chunk, ChunkError, TargetCheck};
use penstock_kv::{KvRead, Range, for_each};
use penstock_session::rows::{all_results, all_sessions};
use std::collections::BTreeSet;
use std::rc::Rc;

/// Targets that are read at the same time: each needs memory for the bits of its groups.
const TARGETS_AT_A_TIME: usize = 4;

/// A check of a target that will run.
type Check<'a> = LocalBoxFuture<'a, Result<TargetCheck, ChunkError>>;

/// Names and inodes, of one moment.
struct Subject<'a> {
    rows: &'a dyn KvRead,
    fs: FsRow,
    chunk_blocks: u32,
    /// Number of targets of the store.
    count: u32,
    forgotten: &'a BTreeSet<TargetId>,
    progress: &'a Underway<'a>,
}

impl Subject<'_> {
    /// Diagnoses all rows. The checks are of the targets of the same moment, that of the names' own first.
    async fn diagnose(
        &self,
        home: (TargetId, Check<'_>),
        others: Vec<(TargetId, Check<'_>)>,
    ) -> Result<Diagnosis, MetaError> {
        let mut diagnosis = Diagnosis::new(&self.fs, self.chunk_blocks, self.count);
        self.progress.phase("chunks, extents and bitmaps");
        let of = async |(target, check)| (target, scoped(check).await);
        let all = std::iter::once(home).chain(others);
        // All run to their ends: what a target has begun, as to free blocks, it must complete.
        let checks: Vec<(TargetId, Result<TargetCheck, ChunkError>)> =
            stream::iter(all.map(of)).buffered(TARGETS_AT_A_TIME).collect().await;
        assert!(checks.len() as u64 <= u64::from(self.count), "each target is checked once");
        let mut checks = checks.into_iter();
        let (home, check) = checks.next().expect("a check of the names' own target");
        diagnosis.see_target(home, check?);
        for (target, check) in checks {
            diagnosis.see_other(target, check?);
        }
        diagnosis.check_loans(self.forgotten);
        self.each(all_queued(), |key, value| diagnosis.see_queued(key, value)).await?;
        self.progress.phase("inodes");
        self.each(all_inodes(), |key, value| diagnosis.see_inode(key, value)).await?;
        self.each(all_removed(), |key, value| diagnosis.see_removed(key, value)).await?;
        self.each(all_xattrs(), |key, value| diagnosis.see_xattr(key, value)).await?;
        self.progress.phase("names");
        self.each(all_entries(), |key, _| diagnosis.count_entry(key)).await?;
        self.each(all_entries(), |key, value| diagnosis.see_entry(key, value)).await?;
        diagnosis.check_inodes();
        self.progress.phase("reservations");
        diagnosis.check_reservations();
        self.each(all_results(), |key, value| diagnosis.see_result(key, value)).await?;
        self.each(all_sessions(), |key, value| diagnosis.see_session(key, value)).await?;
        for range in unknown_keys() {
            self.each(range, |key, value| diagnosis.see_unknown(key, value)).await?;
        }
        Ok(diagnosis)
    }

    async fn each(&self, range: Range, mut visit: impl FnMut(&[u8], &[u8])) -> Result<(), MetaError> {
        for_each(self.rows, range, |key, value| {
            self.progress.count_row();
            visit(key, value);
            Ok(())
        })
        .await
    }

    /// The result of a check, with the paths of the inodes that findings are about.
    async fn summary(&self, diagnosis: &Diagnosis) -> Result<MetaCheck, MetaError> {
        self.progress.phase("paths");
        let findings = diagnosis.findings.clone();
        let inos: BTreeSet<Ino> = findings.kept.iter().filter_map(|finding| finding.ino).collect();
        let paths = paths::find(self.rows, &inos).await?;
        let Diagnosis { inodes, entries, removed, chunks, blocks, blocks_beyond_end, .. } = *diagnosis;
        Ok(MetaCheck { inodes, entries, removed, chunks, blocks, blocks_beyond_end, findings, paths })
    }
}

/// A file system as it was at one moment.
pub(crate) struct View {
    rows: Rc<dyn KvRead>,
    fs: FsRow,
    home: (TargetId, chunk::View),
    others: Vec<(TargetId, chunk::View)>,
    chunk_blocks: u32,
    count: u32,
    forgotten: BTreeSet<TargetId>,
}

impl View {
    /// Checks everything. Changes nothing.
    pub(crate) async fn check(&self, progress: &Underway<'_>) -> Result<MetaCheck, MetaError> {
        let Self { fs, chunk_blocks, count, forgotten, .. } = self;
        let subject = Subject {
            rows: &*self.rows,
            fs: fs.clone(),
            chunk_blocks: *chunk_blocks,
            count: *count,
            forgotten,
            progress,
        };
        let others = self.others.iter().map(Self::check_of).collect();
        let diagnosis = subject.diagnose(Self::check_of(&self.home), others).await?;
        subject.summary(&diagnosis).await
    }

    fn check_of((target, view): &(TargetId, chunk::View)) -> (TargetId, Check<'_>) {
        (*target, Box::pin(view.check()))
    }
}

impl Fsck<'_> {
    /// The file system of this moment.
    pub(crate) async fn view(&self) -> Result<View, MetaError> {
        let mut others = Vec::new();
        for (target, chunks) in &self.others {
            others.push((*target, chunks.view().await?));
        }
        let fs = self.turn.fs().clone();
        Ok(View {
            rows: self.turn.kv().snapshot().await?,
            fs,
            home: (self.target.config().id, self.chunks.view().await?),
            others,
            chunk_blocks: self.chunk_blocks(),
            count: self.count,
            forgotten: self.forgotten.clone(),
        })
    }

    /// Checks everything as it is now. Changes nothing.
    pub(crate) async fn check(&self) -> Result<MetaCheck, MetaError> {
        let diagnosis = self.diagnose().await?;
        self.summary(&diagnosis).await
    }

    fn subject(&self) -> Subject<'_> {
        Subject {
            rows: self.turn.kv(),
            fs: self.turn.fs().clone(),
            chunk_blocks: self.chunk_blocks(),
            count: self.count,
            forgotten: &self.forgotten,
            progress: self.progress,
        }
    }

    /// Diagnoses all rows.
    pub(super) async fn diagnose(&self) -> Result<Diagnosis, MetaError> {
        let others = self.others.iter().map(|(target, chunks)| Self::check_of(*target, chunks)).collect();
        let home = Self::check_of(self.target.config().id, &self.chunks);
        self.subject().diagnose(home, others).await
    }

    fn check_of<'c>(target: TargetId, chunks: &'c chunk::Fsck<'_>) -> (TargetId, Check<'c>) {
        (target, Box::pin(chunks.check()))
    }

    /// The result of a check, with the paths of the inodes that findings are about.
    pub(super) async fn summary(&self, diagnosis: &Diagnosis) -> Result<MetaCheck, MetaError> {
        self.subject().summary(diagnosis).await
    }
}
