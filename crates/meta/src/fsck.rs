//! Checks and repairs of a file system: names, links, parents, counts, files against the target's chunks.
//!
//! [`Fsck`] is made from the guard of the quiet gate, so a repair cannot be called on a file system that
//! serves changes. A check needs it only to take a [`View`], and reads that while changes go on.

mod checking;
pub(crate) mod diagnosis;
mod lost_found;
pub(crate) mod paths;
mod repair;
mod survey;

pub use checking::Checking;
pub use repair::Repair;

use crate::names::Turn;
use penstock_base::{Findings, Ino, Quiet, TargetId};
use penstock_chunk::{self as chunk, Target};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use tokio::sync::{Mutex, MutexGuard};

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
    /// Number of the round; each round checks everything. 0 for a check.
    pub round: u64,
    /// Name of the phase.
    pub phase: &'static str,
    /// Rows of the name space read in this round.
    pub rows: u64,
}

/// The turn to check or repair, which one at a time has, and its progress.
#[derive(Default)]
pub(crate) struct Progress {
    now: RefCell<Option<CheckProgress>>,
    one: Mutex<()>,
}

impl Progress {
    /// Waits until no check or repair runs, and begins one. It ends when the guard is dropped.
    pub(crate) async fn begin(&self) -> Underway<'_> {
        let one = self.one.lock().await;
        let before = self.now.replace(Some(CheckProgress::default()));
        assert!(before.is_none(), "one check or repair runs at a time");
        Underway { progress: &self.now, _one: one }
    }

    /// The progress so far.
    pub(crate) fn get(&self) -> Option<CheckProgress> {
        *self.now.borrow()
    }
}

/// A check or repair that runs.
pub(crate) struct Underway<'a> {
    progress: &'a RefCell<Option<CheckProgress>>,
    _one: MutexGuard<'a, ()>,
}

impl Underway<'_> {
    fn change(&self, change: impl FnOnce(&mut CheckProgress)) {
        if let Some(progress) = self.progress.borrow_mut().as_mut() {
            change(progress);
        }
    }

    /// Begins from the start.
    pub(crate) fn start(&self, repair: bool) {
        self.change(|progress| *progress = CheckProgress { repair, ..CheckProgress::default() });
    }

    fn round(&self, round: u64) {
        self.change(|progress| (progress.round, progress.rows) = (round, 0));
    }

    pub(crate) fn phase(&self, phase: &'static str) {
        self.change(|progress| progress.phase = phase);
    }

    fn count_row(&self) {
        self.change(|progress| progress.rows += 1);
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        *self.progress.borrow_mut() = None;
    }
}

/// The targets of a file system.
#[derive(Clone, Copy)]
pub struct Targets<'a> {
    /// The one of the names' own stack.
    pub home: &'a Target,
    /// Those of other stacks that serve.
    pub others: &'a [Rc<Target>],
}

impl Targets<'_> {
    /// All of them.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Target> {
        std::iter::once(self.home).chain(self.others.iter().map(|target| &**target))
    }
}

/// Subject of a check or repair: the targets that serve, their number in the store, and the forgotten ones.
pub(crate) type Scope<'a> = (Targets<'a>, u32, BTreeSet<TargetId>);

/// Access to a file system that nothing else changes, for repairs, and for checks that must stop changes.
pub(crate) struct Fsck<'a> {
    turn: &'a Turn<'a>,
    target: &'a Target,
    chunks: chunk::Fsck<'a>,
    /// The targets of other stacks that serve.
    others: Vec<(TargetId, chunk::Fsck<'a>)>,
    /// Number of targets of the store.
    count: u32,
    /// Those that are forgotten.
    forgotten: BTreeSet<TargetId>,
    progress: &'a Underway<'a>,
}

impl<'a> Fsck<'a> {
    /// For a file system and the targets that store its chunks.
    pub(crate) fn new(
        turn: &'a Turn<'a>,
        (targets, count, forgotten): Scope<'a>,
        quiet: &'a Quiet<'_>,
        progress: &'a Underway<'a>,
    ) -> Self {
        assert!(quiet.is_of(turn.gate()), "names and chunks share one gate");
        let Targets { home, others } = targets;
        let others = others.iter().map(|target| (target.config().id, target.fsck(quiet))).collect();
        Self { turn, target: home, chunks: home.fsck(quiet), others, count, forgotten, progress }
    }

    fn chunk_blocks(&self) -> u32 {
        self.target.config().chunk_blocks
    }
}
