//! The work of the queue: it is recorded with a change, and carried out by targets of other stacks.
//!
//! Work that a target does not do because it is away stays in the queue, and is bounded.

use crate::error::MetaError;
use crate::inode::Inode;
use crate::names::Turn;
use crate::other_target::OtherTarget;
use crate::parts::Parts;
use crate::queue::Entry;
use crate::rows::reserved::{Queued, Reserved, Work};
use crate::rows::{all_queued, decode_queued};
use futures_util::future::join_all;
use penstock_base::env::timeout;
use penstock_base::rank::scoped;
use penstock_base::{Birth, Branch, ErrorKind, FileId, TargetId};
use penstock_chunk::{Behind, ChunkError, Cut, Owner};
use penstock_kv::{WriteSet, for_each};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// Entries that are carried out before the answers are recorded.
const BATCH: usize = 256;
/// Time for more entries to come before some are carried out.
const GATHER: Duration = Duration::from_millis(100);
/// Delay before another attempt at work that failed.
const RETRY: Duration = Duration::from_secs(2);
/// Bytes that an entry takes, as the bound counts them.
const ENTRY_BYTES: u64 = 128;
/// An opening leaves out so many numbers. A crash loses fewer.
const NUMBERS_APART: u64 = 1 << 32;
/// Files at which a target may fail in a row before the rest of its work waits: the target itself has failed.
const FAILURES_MOST: usize = 8;
/// The part of the key-value store that the entries of one target may take.
const SHARE: u64 = 64;

/// Loads the entries of the last start. Truncations are owed by their targets from here on.
pub(crate) async fn load(parts: &Parts) -> Result<(), MetaError> {
    for_each(parts.names.kv(), all_queued(), |key, value| {
        // A check reports a row that cannot be read.
        let Ok((number, queued)) = decode_queued(key, value) else { return Ok(()) };
        let targets: Vec<TargetId> = queued.targets.iter().copied().map(TargetId).collect();
        if let Some((file, cut)) = cut_of(&queued) {
            let serving = targets.iter().filter_map(|target| parts.elsewhere.get(*target));
            serving.for_each(|target| target.owe(file, cut));
        }
        parts.queue.note(Some(Entry::new(number, targets)));
        Ok::<_, MetaError>(())
    })
    .await?;
    // Targets may know numbers durably that a crash has taken back here. They are not given again.
    let last = parts.names.fs().last_queued.max(parts.queue.committed());
    let (turn, mut writes) = (parts.names.turn().await, WriteSet::new());
    let number = turn.new_queued(last.saturating_add(NUMBERS_APART), &mut writes);
    turn.commit_queue(writes).await?;
    drop(turn);
    parts.flush().await?;
    parts.queue.were_given(number);
    Ok(())
}

/// The truncation of an entry, if it is one. The owner is of no consequence: it stays that of the row.
fn cut_of(queued: &Queued) -> Option<(FileId, Cut)> {
    match queued.work {
        Work::Truncate { truncations, from, keeps, .. } => {
            let behind = if keeps { Behind::Preallocated } else { Behind::Dropped };
            Some((file_of(queued), Cut { truncations, from, behind }))
        }
        _ => None,
    }
}

impl Turn<'_> {
    /// Fails, with the number of the first one, if a target that may have something of a file has too much
    /// work already.
    pub(crate) fn check_room(&self, parts: &Parts, inode: &Inode) -> Result<(), MetaError> {
        let most = most_entries(parts);
        match parts.elsewhere.reach(inode).into_iter().find(|id| parts.queue.entries_of(*id) >= most) {
            Some(target) => Err(MetaError::QueueFull { target, most }),
            None => Ok(()),
        }
    }

    /// Puts work for the targets of other stacks that may have something of a file. None if there are none.
    /// Fails, with the number of the first one, if a target has too much work already.
    pub(crate) fn queue(
        &self,
        parts: &Parts,
        inode: &Inode,
        work: impl FnOnce(u64) -> Work,
        writes: &mut WriteSet,
    ) -> Result<Option<Entry>, MetaError> {
        self.check_room(parts, inode)?;
        let targets = parts.elsewhere.reach(inode);
        if targets.is_empty() {
            return Ok(None);
        }
        let number = self.new_queued(parts.queue.committed(), writes);
        assert!(number > parts.queue.committed(), "a number is given once");
        let queued = Queued {
            branch: Branch::MAIN,
            sequence: Birth::FIRST.0,
            work: work(number),
            targets: targets.iter().map(|target| target.0).collect(),
        };
        let (key, value) = Reserved::Queued(0, number, queued).encode();
        writes.put(key, value);
        Ok(Some(Entry::new(number, targets)))
    }
}

/// The most entries of one target.
fn most_entries(parts: &Parts) -> u64 {
    (parts.names.kv().usage().budget_bytes / SHARE / ENTRY_BYTES).max(1)
}

/// Carries out the work of the queue until the parts are stopped.
pub(crate) async fn run(parts: Rc<Parts>) {
    let serves = |id| parts.elsewhere.serves(id);
    while !parts.is_stopped() {
        match parts.queue.has_fresh_work(serves) {
            true => parts.env.sleep(GATHER).await,
            // Work that has failed is tried again.
            false => _ = timeout(&parts.env, RETRY, parts.queue.woken()).await,
        }
        if !parts.is_stopped()
            && let Err(error) = pass(&parts).await
        {
            tracing::warn!(%error, "work for targets is tried again");
            parts.env.sleep(RETRY).await;
        }
    }
}

/// Waits until the targets that serve have done the work that is queued now, except such as fails.
pub(crate) async fn wait_idle(parts: &Parts) {
    let upto = parts.queue.committed();
    let serves = |id| parts.elsewhere.serves(id);
    while parts.queue.has_fresh_work_upto(upto, serves) && !parts.is_stopped() {
        parts.queue.wake();
        parts.env.sleep(Duration::from_millis(5)).await;
    }
}

/// Carries out all work of one target that is queued now. Returns false if nothing of it was done.
pub(crate) async fn carry_out(parts: &Parts, target: TargetId) -> Result<bool, MetaError> {
    let before = parts.queue.answers_of(target);
    if parts.elsewhere.serves(target) && parts.queue.entries_of(target) > 0 {
        pass(parts).await?;
    }
    Ok(parts.queue.answers_of(target) > before)
}

/// An entry as it was read.
type Read = (u64, Queued);

/// The part of a target in a pass.
#[derive(Default)]
struct Progress {
    /// Files with work that failed: what follows for them waits, and nothing else.
    failed: BTreeSet<FileId>,
    /// The first entry that it has not carried out.
    left: Option<u64>,
    /// Failures without a success in between that are not about what a file has.
    failures: usize,
}

/// The entries of one batch that a target has carried out durably.
struct Done {
    target: TargetId,
    numbers: BTreeSet<u64>,
}

/// Carries out all entries that are there now, and records the answers.
async fn pass(parts: &Parts) -> Result<(), MetaError> {
    // A target that is forgotten meanwhile is asked in the next pass, from its first entry on.
    let serving = parts.elsewhere.serving();
    let is_asked = |id| serving.iter().any(|target| target.id() == id);
    let Some(mut from) = parts.queue.first(is_asked) else { return Ok(()) };
    let upto = parts.queue.committed();
    // Before any target acts.
    parts.flush().await?;
    let mut progress: BTreeMap<TargetId, Progress> =
        serving.iter().map(|target| (target.id(), Progress::default())).collect();
    while from <= upto && !parts.is_stopped() {
        let (first, end) = (Reserved::queued_key(0, from), Reserved::queued_key(0, upto + 1));
        let rows = parts.names.kv().scan(first, end, BATCH).await?;
        // One that cannot be read cannot be carried out, and a check reports it.
        let read: Vec<Read> = rows.iter().filter_map(|(key, value)| decode_queued(key, value).ok()).collect();
        // Beyond the last row there is none.
        let last = rows.last().and_then(|(key, _)| Reserved::queued_number(key));
        let seen = if rows.len() < BATCH { upto } else { last.map_or(upto, |last| last.clamp(from, upto)) };
        assert!(read.iter().all(|(number, _)| (from..=seen).contains(number)), "{from}..={seen}");
        let work = serving.iter().zip(progress.values_mut());
        let work = work.map(|(target, progress)| scoped(work_of(parts, &**target, &read, progress)));
        let done: Vec<Done> = join_all(work).await;
        record(parts, &read, &done).await?;
        for (target, Progress { left, .. }) in &progress {
            parts.queue.done_below(*target, left.unwrap_or(seen + 1), left.is_some());
        }
        from = seen + 1;
    }
    Ok(())
}

/// Takes targets off the entries that they have carried out.
async fn record(parts: &Parts, read: &[Read], done: &[Done]) -> Result<(), MetaError> {
    let turn = parts.names.turn().await;
    let (mut writes, mut answered) = (WriteSet::new(), Vec::new());
    for (number, _) in read {
        // As it is now: another pass may have recorded answers.
        let key = Reserved::queued_key(0, *number);
        let Some(row) = turn.kv().get(key.clone()).await? else { continue };
        let (_, queued) = decode_queued(&key, &row)?;
        let has_done =
            |id: &u32| done.iter().any(|done| done.target.0 == *id && done.numbers.contains(number));
        let (gone, targets): (Vec<u32>, Vec<u32>) = queued.targets.iter().partition(|id| has_done(id));
        match targets.is_empty() {
            _ if gone.is_empty() => {}
            true => drop(writes.delete(key)),
            false => {
                let (key, value) = Reserved::Queued(0, *number, Queued { targets, ..queued }).encode();
                writes.put(key, value);
            }
        }
        answered.extend(gone.into_iter().map(TargetId));
    }
    assert_eq!(writes.is_empty(), answered.is_empty(), "each answer changes a row");
    if !writes.is_empty() {
        turn.commit_queue(writes).await?;
    }
    // Removed files wait for room since an entry of a target had none.
    let half = most_entries(parts) / 2;
    for target in answered {
        parts.queue.answered(target);
        if parts.queue.entries_of(target) == half {
            parts.removed.borrow_mut().retry_all();
            parts.wake_reaper();
        }
    }
    Ok(())
}

/// Has a target carry out its part of entries. Files at which it fails wait; others do not.
async fn work_of(parts: &Parts, other: &dyn OtherTarget, read: &[Read], progress: &mut Progress) -> Done {
    let target = other.id();
    let mut numbers = BTreeSet::new();
    for (number, queued) in read.iter().filter(|(_, queued)| queued.targets.contains(&target.0)) {
        let file = file_of(queued);
        let has_given_up = progress.failures >= FAILURES_MOST;
        if has_given_up || parts.is_stopped() || progress.failed.contains(&file) {
            continue;
        }
        match carry_out_one(other, queued).await {
            Ok(()) => {
                assert!(numbers.insert(*number), "an entry is carried out once in a pass");
                progress.failures = 0;
            }
            Err(error) => {
                tracing::warn!(%target, %file, %error, "a target could not carry out its work yet");
                progress.failed.insert(file);
                progress.failures += usize::from(error.kind() != ErrorKind::Corrupt);
            }
        }
    }
    if !numbers.is_empty()
        && let Err(error) = other.sync().await
    {
        tracing::warn!(%target, %error, "a target could not make its work durable yet");
        numbers.clear();
        progress.failures = FAILURES_MOST;
    }
    let is_left = |(number, queued): &&Read| queued.targets.contains(&target.0) && !numbers.contains(number);
    progress.left = progress.left.or(read.iter().find(is_left).map(|(number, _)| *number));
    Done { target, numbers }
}

/// The file that work is about; inode 0 for work on a branch.
fn file_of(queued: &Queued) -> FileId {
    FileId { branch: queued.branch, ino: queued.work.ino().unwrap_or_default() }
}

async fn carry_out_one(target: &dyn OtherTarget, queued: &Queued) -> Result<(), ChunkError> {
    let file = file_of(queued);
    match queued.work {
        Work::Truncate { .. } => target.finish(file).await,
        Work::Remove { .. } => target.remove(file).await,
        Work::Own { number, owner, .. } => target.set_owner(file, owner, number).await,
        Work::DropBranch => Err(ChunkError::Invalid("there is no branch to be dropped".into())),
    }
}

/// The work of a change of the owner.
pub(crate) fn own(inode: &Inode, owner: Owner) -> impl FnOnce(u64) -> Work {
    let ino = inode.ino;
    move |number| Work::Own { ino, number, owner }
}

/// The work of a truncation.
pub(crate) fn truncate(inode: &Inode, cut: Cut) -> impl FnOnce(u64) -> Work {
    let (ino, Cut { truncations, from, behind }) = (inode.ino, cut);
    move |_| Work::Truncate { ino, truncations, from, keeps: behind == Behind::Preallocated }
}

/// The work of a removal.
pub(crate) fn remove(inode: &Inode) -> impl FnOnce(u64) -> Work {
    let (ino, truncations) = (inode.ino, inode.truncations);
    move |_| Work::Remove { ino, truncations }
}
