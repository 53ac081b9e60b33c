//! Health of the file system: checking and repairing it, and listing the files whose data is lost.
//!
//! A repair suspends the service: it waits for requests that are running, and later requests wait until it
//! has ended. This crate does not manage mounts. The owner of a mount removes it first, because the kernel
//! caches names that a repair may change.

use crate::error::AdminError;
use crate::event::{EventKind, Severity};
use crate::map_copies::{listed_in, restore_report};
use crate::node::Node;
use crate::report::{
    DamagedFile, DamagedRange, DamagedReport, FileReport, FindingReport, FindingsReport, FsCheckProgress,
    FsCheckReport, FsRepairReport, MapCopyReport, MapRestoreReport,
};
use crate::stack::Stack;
use penstock_array::format::descriptor::Role;
use penstock_base::rank::scoped;
use penstock_base::{BLOCK_BYTES, FindingKind, Ino, TargetId};
use penstock_chunk::Target;
use penstock_chunk::copies::is_copy;
use penstock_meta::{MetaCheck, MetaError, Targets, set_repaired};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

const BLOCK: u64 = BLOCK_BYTES as u64;
fn findings(check: &MetaCheck) -> FindingsReport {
    let report = |finding: &penstock_base::Finding| FindingReport {
        kind: finding.kind.word().to_owned(),
        inode: finding.ino.map(|ino| ino.0),
        paths: finding.ino.and_then(|ino| check.paths.get(&ino).cloned()).unwrap_or_default(),
        text: finding.text.clone(),
        repairable: finding.repairable,
    };
    FindingsReport {
        findings: check.findings.kept.iter().map(report).collect(),
        counts: check.findings.counts.iter().map(|(kind, count)| (kind.word().to_owned(), *count)).collect(),
    }
}

fn report(check: &MetaCheck, repair: Option<FsRepairReport>, unchecked_targets: Vec<u32>) -> FsCheckReport {
    let clean = check.findings.is_clean();
    let mended = repair.as_ref().is_some_and(|repair| !repair.mended.is_empty());
    let result = match (clean, mended) {
        (false, _) => "damaged",
        _ if !unchecked_targets.is_empty() => "incomplete",
        (true, true) => "mended",
        (true, false) => "clean",
    };
    FsCheckReport {
        result: result.to_owned(),
        clean,
        unchecked_targets,
        inodes: check.inodes,
        names: check.entries,
        removed_files: check.removed,
        chunks: check.chunks,
        blocks: check.blocks,
        blocks_beyond_end: check.blocks_beyond_end,
        now: findings(check),
        repair,
        restored: Vec::new(),
    }
}

impl Node {
    /// Checks the file system: names, links, chunks, extents and bitmaps against each other.
    pub async fn check_fs(&self) -> Result<FsCheckReport, AdminError> {
        self.meta.wait_reaped().await;
        let others = self.other_targets();
        let targets = Targets { home: &self.home().target, others: &others };
        let check = scoped(self.meta.check(targets)).await?;
        Ok(report(&check, None, self.unchecked()))
    }

    /// Numbers of the targets that do not serve, and may serve another time.
    fn unchecked(&self) -> Vec<u32> {
        self.away().iter().map(|away| away.number.target().0).collect()
    }

    /// The targets of other stacks than that of the names.
    fn other_targets(&self) -> Vec<Rc<Target>> {
        self.stacks[1..].iter().map(|stack| stack.target.clone()).collect()
    }

    /// Checks and repairs the file system. Requests wait meanwhile. Refused while the file system is mounted.
    pub async fn repair_fs(&self) -> Result<FsCheckReport, AdminError> {
        if self.stacks.iter().any(|stack| stack.copies.is_making()) {
            let why = "nothing was repaired: a copy of names and maps is being made; try again later";
            return Err(AdminError::Refused(why.into()));
        }
        // It would not be looked at again when it comes back, and names that were set back know less than it.
        if let Some(absent) = self.away().first()
            && self.restores.has(self.home().target_id())
            && !self.restores.may_lack
        {
            return Err(AdminError::Refused(format!(
                "target {} is away, and restored names are not repaired without it: {}\nbring back its drives; --accept-loss goes on without it",
                absent.number.target(),
                absent.why
            )));
        }
        self.refuse_while_mounted()?;
        // Requests do not wait for a check to end.
        let checking = self.meta.begin_check().await;
        let _out_of_use = self.serving.write().await;
        self.refuse_while_mounted()?;
        self.meta.wait_reaped().await;
        let others = self.other_targets();
        let targets = Targets { home: &self.home().target, others: &others };
        let repair = scoped(checking.repair(targets)).await?;
        let file = |(ino, paths): (Ino, Vec<String>)| FileReport { inode: ino.0, paths };
        let done = FsRepairReport {
            before: findings(&repair.before),
            mended: repair.mended.iter().map(|(kind, count)| (kind.word().to_owned(), *count)).collect(),
            suspect_files: repair.suspects.into_iter().map(file).collect(),
        };
        // A write to one owner of a block would show in the other.
        if repair.after.findings.count(FindingKind::DoubleOwnedBlock) == 0 {
            for stack in self.stacks.iter().rev() {
                scoped(set_repaired(&*stack.kv)).await?;
            }
        }
        let mut report = report(&repair.after, Some(done), self.unchecked());
        report.restored = self.restored().await?;
        let severity = if report.clean { Severity::Info } else { Severity::Error };
        self.events.add(
            severity,
            EventKind::FsRepaired,
            self.fs_object(),
            format!("repair: {}", report.result),
        );
        Ok(report)
    }

    /// The reports of the restores that this start has made, by target.
    pub async fn restored(&self) -> Result<Vec<MapRestoreReport>, AdminError> {
        let mut reports = Vec::new();
        for (target, restored) in &self.restores.now {
            let paths = self.meta.find_paths(&listed_in(restored)).await?;
            reports.push(restore_report(*target, restored, paths));
        }
        Ok(reports)
    }

    /// The targets that an earlier restore has made anew and nobody had repaired at this start, with the
    /// newest copy of the map of each.
    pub fn restored_earlier(&self) -> Vec<(TargetId, Option<MapCopyReport>)> {
        let earlier = |stack: &&Stack| self.restores.earlier.contains(&stack.target_id());
        let newest = |stack: &Stack| (stack.target_id(), stack.copies.newest());
        self.stacks.iter().filter(earlier).map(newest).collect()
    }

    /// An earlier report of a restore with the paths that its files have now.
    pub async fn with_paths(&self, mut report: MapRestoreReport) -> Result<MapRestoreReport, AdminError> {
        let all = || report.listed_files.iter().chain(&report.newer_file);
        let mut paths = self.meta.find_paths(&all().map(|file| Ino(file.inode)).collect()).await?;
        for file in report.listed_files.iter_mut().chain(&mut report.newer_file) {
            file.paths = paths.remove(&Ino(file.inode)).unwrap_or_default();
        }
        Ok(report)
    }

    /// Progress of a running check or repair; none if none runs.
    pub(crate) fn check_progress(&self) -> Option<FsCheckProgress> {
        let progress = self.meta.check_progress()?;
        Some(FsCheckProgress {
            repair: progress.repair,
            round: progress.round,
            phase: progress.phase.to_owned(),
            rows: progress.rows,
        })
    }

    /// Lists files whose data cannot be read any more, from the stripes that reads or scrubs found
    /// unreadable.
    pub async fn damaged_fs(&self) -> Result<DamagedReport, AdminError> {
        let mut ranges: BTreeMap<Ino, Vec<DamagedRange>> = BTreeMap::new();
        for stack in &self.stacks {
            for (ino, runs) in stack.target.damaged().await.map_err(MetaError::from)? {
                // Copies of the map are no files of users, and are made again.
                if is_copy(ino) {
                    continue;
                }
                let range = |(first, blocks, volume_block): (u64, u64, u64)| DamagedRange {
                    offset_bytes: first * BLOCK,
                    length_bytes: blocks * BLOCK,
                    target: stack.target_id().0,
                    volume_block,
                    blocks,
                };
                ranges.entry(ino).or_default().extend(runs.into_iter().map(range));
            }
        }
        let inos: BTreeSet<Ino> = ranges.keys().copied().collect();
        let mut paths = self.meta.find_paths(&inos).await?;
        let file = |(ino, mut ranges): (Ino, Vec<DamagedRange>)| {
            ranges.sort_by_key(|range| range.offset_bytes);
            DamagedFile { inode: ino.0, paths: paths.remove(&ino).unwrap_or_default(), ranges }
        };
        let files: Vec<DamagedFile> = ranges.into_iter().map(file).collect();
        let mut absent_targets = Vec::new();
        for absent in self.absent() {
            absent_targets.push(self.files_on(absent.number.target().0).await?);
        }
        Ok(DamagedReport {
            absent_targets,
            damaged_bytes: files.iter().flat_map(|file| &file.ranges).map(|range| range.length_bytes).sum(),
            files,
            unreadable_stripes: self.unreadable(Role::Data).len() as u64,
            unreadable_metadata_stripes: self
                .unreadable(Role::Metadata)
                .into_iter()
                .map(|(_, stripe)| stripe)
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::Findings;
    use std::collections::BTreeMap as Map;

    #[test]
    fn a_result_says_what_was_and_what_is() {
        let mut check = MetaCheck::default();
        let done = |mended: &[(&str, u64)]| FsRepairReport {
            before: FindingsReport::default(),
            mended: mended.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect::<Map<_, _>>(),
            suspect_files: Vec::new(),
        };
        assert_eq!(report(&check, None, Vec::new()).result, "clean");
        let incomplete = report(&check, None, vec![2]);
        assert_eq!((incomplete.result.as_str(), incomplete.clean), ("incomplete", true));
        assert_eq!(report(&check, Some(done(&[])), Vec::new()).result, "clean");
        assert_eq!(report(&check, Some(done(&[("orphan_inode", 1)])), Vec::new()).result, "mended");
        let mut findings = Findings::default();
        findings.add(FindingKind::OrphanInode, Ino(7), "lost");
        check.findings = findings;
        assert_eq!(report(&check, Some(done(&[("orphan_inode", 1)])), Vec::new()).result, "damaged");
    }
}
