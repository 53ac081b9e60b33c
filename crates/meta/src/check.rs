//! Checking a file system, without changes: names, links, parents, counts, files against the target's chunks.

use crate::error::MetaError;
use crate::judge::Judgement;
use crate::target::MetaTarget;
use penstock_base::{Findings, Ino};
use std::collections::{BTreeMap, BTreeSet};

/// Result of a check of a file system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetaCheck {
    /// Number of inodes.
    pub inodes: u64,
    /// Number of names.
    pub entries: u64,
    /// Number of files without a name that are in use or wait to be dropped.
    pub removed: u64,
    /// Number of chunks with data.
    pub chunks: u64,
    /// Number of blocks of data.
    pub blocks: u64,
    /// Blocks behind the end of their file: written and not synced before a crash. The file's next truncation
    /// or its removal frees them.
    pub blocks_beyond_end: u64,
    /// All inconsistencies that were found.
    pub findings: Findings,
    /// Paths of the inodes that findings are about; none for an inode without a name.
    pub paths: BTreeMap<Ino, Vec<String>>,
}

/// Progress of a check or repair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckProgress {
    /// True for a repair.
    pub repair: bool,
    /// Number of the round; each round judges everything. 0 for a check.
    pub round: u64,
    /// Name of the phase.
    pub phase: &'static str,
    /// Rows of the name space read in this round.
    pub rows: u64,
}

impl MetaTarget {
    /// Checks everything as of one moment: changes wait until it has finished.
    pub async fn check(&self) -> Result<MetaCheck, MetaError> {
        let _one = self.changing.lock().await;
        self.target.commit_all().await?;
        let quiet = self.gate.quiesce().await;
        *self.progress.borrow_mut() = Some(CheckProgress::default());
        let result = async {
            let judgement = self.judge(&self.target.fsck(&quiet)).await?;
            self.summary(judgement).await
        };
        let result = result.await;
        *self.progress.borrow_mut() = None;
        result
    }

    /// Progress of a running check or repair; none if none runs.
    pub fn check_progress(&self) -> Option<CheckProgress> {
        *self.progress.borrow()
    }

    pub(crate) fn phase(&self, phase: &'static str) {
        if let Some(progress) = &mut *self.progress.borrow_mut() {
            progress.phase = phase;
        }
    }

    pub(crate) fn count_row(&self) {
        if let Some(progress) = &mut *self.progress.borrow_mut() {
            progress.rows += 1;
        }
    }

    /// Makes a result from a judgement, with the paths of the inodes that findings are about.
    pub(crate) async fn summary(&self, judgement: Judgement) -> Result<MetaCheck, MetaError> {
        let Judgement { findings, inodes, entries, removed, chunks, blocks, blocks_beyond_end, .. } =
            judgement;
        self.phase("paths");
        let inos: BTreeSet<Ino> = findings.kept.iter().filter_map(|finding| finding.ino).collect();
        let paths = self.find_paths(&inos).await?;
        Ok(MetaCheck { inodes, entries, removed, chunks, blocks, blocks_beyond_end, findings, paths })
    }
}
