//! Checking a file system: names, links, parents, counts, and files against the target's chunks. It changes nothing.

use crate::error::MetaError;
use crate::judge::Judgement;
use crate::target::MetaTarget;
use penstock_base::{Findings, Ino};
use std::collections::{BTreeMap, BTreeSet};

/// What a check of a file system found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetaCheck {
    /// Inodes.
    pub inodes: u64,
    /// Names.
    pub entries: u64,
    /// Files without a name that are in use or wait to be dropped.
    pub removed: u64,
    /// Chunks with data.
    pub chunks: u64,
    /// Blocks of data.
    pub blocks: u64,
    /// Blocks behind the end of their file: written and not synced before a crash; the file's next cut or removal
    /// takes them back.
    pub blocks_beyond_end: u64,
    /// What is wrong.
    pub findings: Findings,
    /// Paths of the inodes that findings are about; none for one that has no name.
    pub paths: BTreeMap<Ino, Vec<String>>,
}

/// How far a check or a repair is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckProgress {
    /// It repairs.
    pub repair: bool,
    /// How often everything was judged.
    pub round: u64,
    /// What it is at.
    pub phase: &'static str,
    /// Rows of the name space seen in this round.
    pub rows: u64,
}

impl MetaTarget {
    /// Checks everything, at one moment: changes wait meanwhile.
    pub async fn check(&self) -> Result<MetaCheck, MetaError> {
        let _one = self.changing.lock().await;
        self.target.commit_all().await?;
        let _closed = self.gate.write().await;
        *self.progress.borrow_mut() = Some(CheckProgress::default());
        let result = async {
            let judgement = self.judge().await?;
            self.summary(judgement).await
        };
        let result = result.await;
        *self.progress.borrow_mut() = None;
        result
    }

    /// How far a running check or repair is.
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

    /// What a judgement comes to, with the paths of the inodes that it names.
    pub(crate) async fn summary(&self, judgement: Judgement) -> Result<MetaCheck, MetaError> {
        let Judgement { findings, inodes, entries, removed, chunks, blocks, blocks_beyond_end, .. } =
            judgement;
        self.phase("paths");
        let inos: BTreeSet<Ino> = findings.kept.iter().filter_map(|finding| finding.ino).collect();
        let paths = self.find_paths(&inos).await?;
        Ok(MetaCheck { inodes, entries, removed, chunks, blocks, blocks_beyond_end, findings, paths })
    }
}
