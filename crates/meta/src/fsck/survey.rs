//! Reads all rows for a diagnosis, and sums it up.

use super::diagnosis::Diagnosis;
use super::{Fsck, MetaCheck, paths};
use crate::error::MetaError;
use crate::rows::{all_entries, all_inodes, all_queued, all_removed, all_xattrs, unknown_keys};
use futures_util::{StreamExt, stream};
use penstock_base::Ino;
use penstock_base::rank::scoped;
use penstock_kv::{Range, for_each};
use penstock_session::rows::{all_results, all_sessions};
use std::collections::BTreeSet;

/// Targets that are read at the same time: each needs memory for the bits of its groups.
const TARGETS_AT_A_TIME: usize = 4;

impl Fsck<'_> {
    /// Checks everything, as of one moment. Changes nothing.
    pub(crate) async fn check(&self) -> Result<MetaCheck, MetaError> {
        let diagnosis = self.diagnose().await?;
        self.summary(&diagnosis).await
    }

    /// Diagnoses all rows.
    pub(super) async fn diagnose(&self) -> Result<Diagnosis, MetaError> {
        let mut diagnosis = Diagnosis::new(&self.turn.fs(), self.chunk_blocks(), self.count);
        self.progress.phase("chunks, extents and bitmaps");
        let all = std::iter::once(&self.chunks).chain(self.others.iter().map(|(_, chunks)| chunks));
        let checks = stream::iter(all.map(|chunks| scoped(chunks.check())));
        let mut checks = std::pin::pin!(checks.buffered(TARGETS_AT_A_TIME));
        let mut next = async || checks.next().await.expect("a check for each target");
        diagnosis.see_target(self.target.config().id, next().await?);
        for (target, _) in &self.others {
            diagnosis.see_other(*target, next().await?);
        }
        diagnosis.check_loans(&self.forgotten);
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
        for_each(self.turn.kv(), range, |key, value| {
            self.progress.count_row();
            visit(key, value);
            Ok(())
        })
        .await
    }

    /// The result of a check, with the paths of the inodes that findings are about.
    pub(super) async fn summary(&self, diagnosis: &Diagnosis) -> Result<MetaCheck, MetaError> {
        self.progress.phase("paths");
        let findings = diagnosis.findings.clone();
        let inos: BTreeSet<Ino> = findings.kept.iter().filter_map(|finding| finding.ino).collect();
        let paths = paths::find(self.turn.kv(), &inos).await?;
        let Diagnosis { inodes, entries, removed, chunks, blocks, blocks_beyond_end, .. } = *diagnosis;
        Ok(MetaCheck { inodes, entries, removed, chunks, blocks, blocks_beyond_end, findings, paths })
    }
}
