//! A check or repair from its start to its end: what waits for what.

use super::{Fsck, MetaCheck, Repair, Scope, Targets, Underway};
use crate::error::MetaError;
use crate::parts::Parts;
use crate::reaper;
use penstock_base::ErrorKind;
use std::rc::Rc;

/// The right to check or repair a file system, which one at a time has.
pub struct Checking<'a> {
    parts: &'a Rc<Parts>,
    progress: Underway<'a>,
}

impl<'a> Checking<'a> {
    pub(crate) fn new(parts: &'a Rc<Parts>, progress: Underway<'a>) -> Self {
        Self { parts, progress }
    }

    /// Checks everything as of one moment. Changes wait only until the rows of that moment are held; if the
    /// key-value stores cannot hold them long enough, until the check has finished.
    pub async fn check(&self, targets: Targets<'_>) -> Result<MetaCheck, MetaError> {
        match self.check_beside_changes(targets).await {
            Err(error) if error.is_snapshot_gone() => {
                tracing::info!(
                    "the check begins again and lets changes wait: they need the space of its rows"
                );
                self.progress.start(false);
                self.come_to_rest(targets).await?;
                let turn = self.parts.names.turn().await;
                self.commit_all(targets).await?;
                let quiet = turn.gate().quiesce().await;
                Fsck::new(&turn, self.scope(targets), &quiet, &self.progress).check().await
            }
            checked => checked,
        }
    }

    async fn check_beside_changes(&self, targets: Targets<'_>) -> Result<MetaCheck, MetaError> {
        self.progress.start(false);
        self.come_to_rest(targets).await?;
        let turn = self.parts.names.turn().await;
        self.commit_all(targets).await?;
        let view = {
            let quiet = turn.gate().quiesce().await;
            Fsck::new(&turn, self.scope(targets), &quiet, &self.progress).view().await?
        };
        drop(turn);
        view.check(&self.progress).await
    }

    /// Does most of what must be done while changes wait.
    async fn come_to_rest(&self, targets: Targets<'_>) -> Result<(), MetaError> {
        self.progress.phase("writing back");
        for target in targets.all() {
            target.sweep().await?;
        }
        self.commit_all(targets).await
    }

    async fn commit_all(&self, targets: Targets<'_>) -> Result<(), MetaError> {
        for target in targets.all() {
            match target.commit_all().await {
                // These are in no row yet.
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    tracing::warn!(%error, "some writes have no space, and are not checked");
                }
                committed => committed?,
            }
        }
        Ok(())
    }

    fn scope<'t>(&self, targets: Targets<'t>) -> Scope<'t> {
        let elsewhere = &self.parts.elsewhere;
        (targets, elsewhere.count(), elsewhere.forgotten())
    }

    /// Repairs the file system. The caller must serve no request meanwhile, and nobody may have files open,
    /// except files in the queue of removed files.
    pub async fn repair(&self, targets: Targets<'_>) -> Result<Repair, MetaError> {
        self.progress.start(true);
        let parts = self.parts;
        for target in targets.all() {
            target.sweep().await?;
        }
        let turn = parts.names.turn().await;
        for target in targets.all() {
            match target.commit_all().await {
                // There may be space for them in groups of which bits are lost.
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    let quiet = turn.gate().quiesce().await;
                    target.fsck(&quiet).mark_owned().await?;
                    drop(quiet);
                    target.commit_all().await?;
                }
                committed => committed?,
            }
        }
        let quiet = turn.gate().quiesce().await;
        let result = Fsck::new(&turn, self.scope(targets), &quiet, &self.progress).repair().await;
        reaper::queue_removed(parts).await?;
        parts.removed.borrow_mut().retry_all();
        parts.wake_reaper();
        result
    }
}
