//! The work of the queue: it is recorded with a change, and carried out by targets of other stacks.
//!
//! Each target has a task of its own, so one that waits for its drives holds up no other one. Work that a
//! target does not do because it is away stays in the queue, and is bounded.

use crate::error::MetaError;
use crate::inode::Inode;
use crate::names::Turn;
use crate::other_target::OtherTarget;
use crate::parts::Parts;
use crate::queue::Entry;
use crate::rows::reserved::{Queued, Reserved, Work};
use crate::rows::{all_queued, decode_queued};
use penstock_base::env::timeout;
use penstock_base::{Birth, Branch, ErrorKind, FileId, TargetId};
use penstock_chunk::{Behind, ChunkError, Cut, Owner};
use penstock_kv::{WriteSet, for_each};
use std::collections::BTreeSet;
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
/// Time without any answer after which nobody waits for targets any more.
const PATIENCE: Duration = Duration::from_secs(10);
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

/// Carries out the work of a target until the parts are stopped.
pub(crate) async fn run(parts: Rc<Parts>, target: TargetId) {
    while !parts.is_stopped() {
        let upto = parts.queue.committed();
        if !parts.elsewhere.serves(target) || parts.queue.entries_of(target) == 0 {
            parts.queue.woken(target).await;
        } else if parts.queue.has_fresh_work(target, upto) {
            parts.env.sleep(GATHER).await;
        } else {
            // Work that has failed is tried again.
            timeout(&parts.env, RETRY, parts.queue.woken(target)).await;
        }
        if !parts.is_stopped()
            && let Err(error) = pass(&parts, target).await
        {
            tracing::warn!(%target, %error, "work for a target is tried again");
            parts.env.sleep(RETRY).await;
        }
    }
}

/// Waits until the targets that serve have done the work that is queued now, except such as fails. Does not
/// wait for those that do nothing, such as for drives on a full host.
pub(crate) async fn wait_idle(parts: &Parts) {
    let upto = parts.queue.committed();
    let busy = || -> Vec<TargetId> {
        let others = parts.elsewhere.others().filter(|target| parts.elsewhere.serves(*target));
        others.filter(|target| parts.queue.has_fresh_work(*target, upto)).collect()
    };
    let answers = || parts.elsewhere.others().map(|target| parts.queue.answers_of(target)).sum::<u64>();
    let (mut seen, mut since) = (answers(), parts.env.now());
    while !parts.is_stopped() && parts.env.now() < since + PATIENCE {
        let busy = busy();
        if busy.is_empty() {
            break;
        }
        busy.into_iter().for_each(|target| parts.queue.wake(target));
        parts.env.sleep(Duration::from_millis(5)).await;
        if answers() > seen {
            (seen, since) = (answers(), parts.env.now());
        }
    }
}

/// Carries out all work of one target that is queued now. Returns false if nothing of it was done.
pub(crate) async fn carry_out(parts: &Parts, target: TargetId) -> Result<bool, MetaError> {
    let before = parts.queue.answers_of(target);
    pass(parts, target).await?;
    Ok(parts.queue.answers_of(target) > before)
}

/// An entry as it was read.
type Read = (u64, Queued);

/// The progress of a pass.
#[derive(Default)]
struct Progress {
    /// Files with work that failed: what follows for them waits, and nothing else.
    failed: BTreeSet<FileId>,
    /// The first entry that was not carried out.
    left: Option<u64>,
    /// Failures without a success in between that are not about what a file has.
    failures: usize,
}

/// Has a target carry out all its entries that are there now, and records its answers. Nothing is done if it
/// does not serve.
async fn pass(parts: &Parts, target: TargetId) -> Result<(), MetaError> {
    let (Some(other), upto) = (parts.elsewhere.get(target), parts.queue.committed()) else { return Ok(()) };
    let Some(mut from) = parts.queue.due(target, upto) else { return Ok(()) };
    // Before it acts.
    parts.flush().await?;
    let mut progress = Progress::default();
    while from <= upto && !parts.is_stopped() {
        let (first, end) = (Reserved::queued_key(0, from), Reserved::queued_key(0, upto + 1));
        let rows = parts.names.kv().scan(first, end, BATCH).await?;
        // Beyond the last row there is none.
        let last = rows.last().and_then(|(key, _)| Reserved::queued_number(key));
        let seen = if rows.len() < BATCH { upto } else { last.map_or(upto, |last| last.clamp(from, upto)) };
        // One that cannot be read cannot be carried out, and a check reports it.
        let read = rows.iter().filter_map(|(key, value)| decode_queued(key, value).ok());
        let read: Vec<Read> = read.filter(|(_, queued)| queued.targets.contains(&target.0)).collect();
        assert!(read.iter().all(|(number, _)| (from..=seen).contains(number)), "{from}..={seen}");
        let done = work_of(parts, &*other, &read, &mut progress).await;
        record(parts, target, &done).await?;
        parts.queue.done_below(target, progress.left.unwrap_or(seen + 1), progress.left.is_some());
        from = seen + 1;
    }
    Ok(())
}

/// Takes a target off the entries that it has carried out durably.
async fn record(parts: &Parts, target: TargetId, done: &BTreeSet<u64>) -> Result<(), MetaError> {
    if done.is_empty() {
        return Ok(());
    }
    let turn = parts.names.turn().await;
    let (mut writes, mut answers) = (WriteSet::new(), 0);
    for number in done {
        // As it is now: other targets have answered, and another pass may have recorded this answer.
        let key = Reserved::queued_key(0, *number);
        let Some(row) = turn.kv().get(key.clone()).await? else { continue };
        let (_, mut queued) = decode_queued(&key, &row)?;
        let before = queued.targets.len();
        queued.targets.retain(|id| *id != target.0);
        match (queued.targets.len() < before, queued.targets.is_empty()) {
            (false, _) => continue,
            (true, true) => drop(writes.delete(key)),
            (true, false) => {
                let (key, value) = Reserved::Queued(0, *number, queued).encode();
                writes.put(key, value);
            }
        }
        answers += 1;
    }
    assert_eq!(writes.is_empty(), answers == 0, "each answer changes a row");
    if !writes.is_empty() {
        turn.commit_queue(writes).await?;
    }
    // Removed files wait for room since an entry of a target had none.
    let half = most_entries(parts) / 2;
    for _ in 0..answers {
        parts.queue.answered(target);
        if parts.queue.entries_of(target) == half {
            parts.removed.borrow_mut().retry_all();
            parts.wake_reaper();
        }
    }
    Ok(())
}

/// Has a target carry out entries. Files at which it fails wait; others do not. Returns the numbers of those
/// that are carried out durably.
async fn work_of(
    parts: &Parts,
    other: &dyn OtherTarget,
    read: &[Read],
    progress: &mut Progress,
) -> BTreeSet<u64> {
    let target = other.id();
    let mut numbers = BTreeSet::new();
    for (number, queued) in read {
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
    let left = read.iter().map(|(number, _)| *number).find(|number| !numbers.contains(number));
    progress.left = progress.left.or(left);
    numbers
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
