//! Copies of the map: when they are made, and the restore of a store that has lost its key-value store.

mod restore;

pub use restore::{Consent, Restore};
pub(crate) use restore::{Opened, Restorable, Restoring, with_copy};

use crate::error::AdminError;
use crate::event::{EventKind, Severity};
use crate::events::Events;
use crate::report::{FileReport, MapCopyReport, MapRestoreReport};
use penstock_base::rank::scoped;
use penstock_base::{Env, Ino, TargetId};
use penstock_chunk::copies::{Anchor, Copies, Newer, Restored};
use penstock_meta::{MetaError, is_copied};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::RwLock;

/// Time from a start to the first look if a copy is due: a start has other work.
const FIRST: Duration = Duration::from_secs(600);
/// Interval between looks, and pause after a copy that failed.
const ASK: Duration = Duration::from_secs(600);

fn report_of(copy: &Anchor) -> MapCopyReport {
    MapCopyReport { serial: copy.serial, created_ns: copy.created_ns, rows: copy.rows, bytes: copy.bytes }
}

/// The copies of one store.
pub struct MapCopies {
    env: Env,
    events: Rc<Events>,
    /// The file system's name as the object of an event.
    fs: String,
    /// None in a store that has no place for them.
    copies: Option<Rc<Copies>>,
    /// Held while a copy is made: a repair lets nothing be written beside it.
    serving: Rc<RwLock<()>>,
    is_failing: Cell<bool>,
    /// A copy is wanted at once.
    is_wanted: Cell<bool>,
}

impl MapCopies {
    pub(crate) fn new(
        env: &Env,
        events: &Rc<Events>,
        fs: &str,
        (copies, serving): (Option<Rc<Copies>>, &Rc<RwLock<()>>),
    ) -> Rc<Self> {
        let (env, events, fs) = (env.clone(), events.clone(), format!("fs {fs}"));
        let (is_failing, is_wanted) = Default::default();
        Rc::new(Self { env, events, fs, copies, serving: serving.clone(), is_failing, is_wanted })
    }

    /// True while a copy is being made.
    pub(crate) fn is_making(&self) -> bool {
        self.copies.as_ref().is_some_and(|copies| copies.is_making())
    }

    /// The newest copy; none if there is none.
    pub fn newest(&self) -> Option<MapCopyReport> {
        Some(report_of(&self.copies.as_ref()?.newest()?))
    }

    /// Makes a copy now.
    pub async fn make(&self) -> Result<MapCopyReport, AdminError> {
        let Some(copies) = &self.copies else {
            return Err(AdminError::Refused(
                "this store was made by a release without copies of the map, and has no place for them"
                    .into(),
            ));
        };
        if copies.is_making() {
            return Err(AdminError::Refused("a copy of the map is being made".into()));
        }
        let _no_repair = self.serving.read().await;
        match scoped(copies.make(is_copied)).await {
            Ok(copy) => {
                self.is_failing.set(false);
                self.is_wanted.set(false);
                let text = format!("copy {} of the map has {} rows", copy.serial, copy.rows);
                self.events.add(Severity::Info, EventKind::MapCopied, &*self.fs, text);
                Ok(report_of(&copy))
            }
            Err(error) => {
                // Once, however often it is tried again.
                if !self.is_failing.replace(true) {
                    let text = format!("no copy of the map could be made: {error}");
                    self.events.add(Severity::Warning, EventKind::MapCopyFailed, &*self.fs, text);
                }
                Err(MetaError::from(error).into())
            }
        }
    }

    /// Makes a copy when `period` has passed since the last one.
    pub fn schedule(self: &Rc<Self>, period: Duration) {
        if self.copies.is_none() {
            return;
        }
        let (env, copies) = (self.env.clone(), Rc::downgrade(self));
        let work = async move {
            env.sleep(FIRST).await;
            while let Some(copies) = copies.upgrade() {
                if copies.is_due(period)
                    && let Err(error) = copies.make().await
                {
                    tracing::warn!(%error, "a copy of the map will be tried again");
                }
                drop(copies);
                env.sleep(ASK).await;
            }
        };
        self.env.spawn("map copies", Box::pin(work));
    }

    /// The newest copy lacks something that the next restore must know: the next look makes another one.
    pub(crate) fn want(&self) {
        self.is_wanted.set(true);
    }

    fn is_due(&self, period: Duration) -> bool {
        if self.is_wanted.get() {
            return true;
        }
        let Some(last) = self.newest() else { return true };
        let age = self.env.wall_ns().saturating_sub(last.created_ns);
        // One of the future says that the clock was set back.
        u64::try_from(age).map_or(true, |age| Duration::from_nanos(age) >= period)
    }
}

/// The restores that a repair belongs to.
#[derive(Default)]
pub(crate) struct Restores {
    /// Those of this start, by target.
    pub(crate) now: Vec<(TargetId, Restored)>,
    /// Targets that an earlier one made anew, and nobody has repaired.
    pub(crate) earlier: Vec<TargetId>,
    /// The repair may do without targets that are away.
    pub(crate) may_lack: bool,
}

impl Restores {
    /// True if a target was made anew and is not repaired yet.
    pub(crate) fn has(&self, target: TargetId) -> bool {
        self.earlier.contains(&target) || self.now.iter().any(|(now, _)| *now == target)
    }

    /// True if no target was made anew, or all are repaired.
    pub(crate) fn are_none(&self) -> bool {
        self.now.is_empty() && self.earlier.is_empty()
    }

    /// Adds a target that was opened.
    pub(crate) fn add(&mut self, target: TargetId, now: Option<Restored>, is_unrepaired: bool) {
        match now {
            Some(restored) => self.now.push((target, restored)),
            None if is_unrepaired => self.earlier.push(target),
            None => {}
        }
    }
}

/// The report of the restore of a target; `paths` has the paths of files.
pub(crate) fn restore_report(
    target: TargetId,
    restored: &Restored,
    mut paths: BTreeMap<Ino, Vec<String>>,
) -> MapRestoreReport {
    let mut file = |ino: Ino| FileReport { inode: ino.0, paths: paths.remove(&ino).unwrap_or_default() };
    MapRestoreReport {
        target: target.0,
        copy: report_of(&restored.copy),
        rows: restored.rows,
        newer_blocks: restored.newer_blocks,
        newer_file: restored.newer.map(&mut file),
        changed_files: restored.changed.files,
        changed_blocks: restored.changed.blocks,
        changed_kept: restored.how == Newer::Stay,
        listed_files: restored.changed.listed.keys().copied().map(file).collect(),
    }
}

/// The files that a report of a restore lists.
pub(crate) fn listed_in(restored: &Restored) -> BTreeSet<Ino> {
    restored.changed.listed.keys().copied().chain(restored.newer).collect()
}
