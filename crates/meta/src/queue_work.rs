//! The work of the queue: it is recorded with a change, and carried out by targets of other stacks.
//!
//! Work that a target does not do because it is away stays in the queue, and is bounded.

use crate::elsewhere::OtherTarget;
use crate::error::MetaError;
use crate::inode::Inode;
use crate::names::Turn;
use crate::parts::Parts;
use crate::queue::Entry;
use crate::rows::reserved::{Queued, Reserved, Work};
use crate::rows::{all_queued, decode_queued};
use futures_util::future::join_all;
use penstock_base::env::timeout;
use penstock_base::rank::scoped;
use penstock_base::{Birth, Branch, FileId, TargetId};
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
    let last = parts.names.fs().last_queued;
    parts.queue.were_given(last.max(parts.queue.committed()));
    Ok(())
}

/// The truncation of an entry, if it is one. The owner is of no consequence: it stays that of the row.
fn cut_of(queued: &Queued) -> Option<(FileId, Cut)> {
    match queued.work {
        Work::Truncate { ino, truncations, from, keeps } => {
            let behind = if keeps { Behind::Preallocated } else { Behind::Dropped };
            Some((FileId { branch: queued.branch, ino }, Cut { truncations, from, behind }))
        }
        _ => None,
    }
}

impl Turn<'_> {
    /// Puts work for the targets of other stacks that may have something of a file. None if there are none.
    /// Fails, with the number of the first one, if a target has too much work already.
    pub(crate) fn queue(
        &self,
        parts: &Parts,
        inode: &Inode,
        work: impl FnOnce(u64) -> Work,
        writes: &mut WriteSet,
    ) -> Result<Option<Entry>, MetaError> {
        let targets = parts.elsewhere.reach(inode);
        if targets.is_empty() {
            return Ok(None);
        }
        let most = (self.kv().usage().budget_bytes / SHARE / ENTRY_BYTES).max(1);
        if let Some(target) = targets.iter().find(|target| parts.queue.entries_of(**target) >= most) {
            return Err(MetaError::QueueFull { target: *target, most });
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

/// Carries out the work of the queue until the parts are stopped.
pub(crate) async fn run(parts: Rc<Parts>) {
    let serves = |id: TargetId| parts.elsewhere.get(id).is_some();
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

/// Waits until the targets that serve have no work, except such as fails.
pub(crate) async fn wait_idle(parts: &Parts) {
    let serves = |id: TargetId| parts.elsewhere.get(id).is_some();
    while parts.queue.has_fresh_work(serves) && !parts.is_stopped() {
        parts.queue.wake();
        parts.env.sleep(Duration::from_millis(5)).await;
    }
}

/// Carries out all work of one target that is queued now. Returns false if there was none, or some fails.
pub(crate) async fn carry_out(parts: &Parts, target: TargetId) -> Result<bool, MetaError> {
    let upto = parts.queue.committed();
    let mut has_done = false;
    while let Some(before) = parts.queue.due(target, upto) {
        if parts.elsewhere.get(target).is_none() {
            return Ok(false);
        }
        pass(parts).await?;
        if parts.queue.due(target, upto) == Some(before) {
            return Ok(false);
        }
        has_done = true;
    }
    Ok(has_done)
}

/// An entry as it was read.
type Read = (u64, Queued);

/// The part of a target in a pass.
struct Done {
    target: TargetId,
    /// The entries that it has carried out durably.
    numbers: BTreeSet<u64>,
    is_stuck: bool,
}

/// Carries out some entries, and records the answers.
async fn pass(parts: &Parts) -> Result<(), MetaError> {
    let Some(from) = parts.queue.first(|id| parts.elsewhere.get(id).is_some()) else { return Ok(()) };
    let upto = parts.queue.committed();
    let (first, end) = (Reserved::queued_key(0, from), Reserved::queued_key(0, upto + 1));
    let rows = parts.names.kv().scan(first, end, BATCH).await?;
    // One that cannot be read cannot be carried out, and a check reports it.
    let read: Vec<Read> = rows.iter().filter_map(|(key, value)| decode_queued(key, value).ok()).collect();
    // Beyond the last row there is none.
    let seen = if rows.len() < BATCH { upto } else { read.last().map_or(upto, |(number, _)| *number) };
    assert!(seen <= upto && read.iter().all(|(number, _)| (from..=seen).contains(number)), "{from}..={seen}");
    // Before any target acts.
    parts.flush().await?;
    let work = parts.elsewhere.serving().map(|target| scoped(work_of(parts, &**target, &read)));
    let done: Vec<Done> = join_all(work).await;
    record(parts, &read, &done).await?;
    for Done { target, numbers, is_stuck } in done {
        let is_left =
            |(number, queued): &&Read| queued.targets.contains(&target.0) && !numbers.contains(number);
        let next = read.iter().find(is_left).map_or(seen + 1, |(number, _)| *number);
        parts.queue.done_below(target, next, is_stuck);
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
    answered.into_iter().for_each(|target| parts.queue.answered(target));
    Ok(())
}

/// Has a target carry out its part of entries, up to the first one that fails.
async fn work_of(parts: &Parts, other: &dyn OtherTarget, read: &[Read]) -> Done {
    let target = other.id();
    let (mut numbers, mut failed) = (BTreeSet::new(), None);
    for (number, queued) in read.iter().filter(|(_, queued)| queued.targets.contains(&target.0)) {
        if parts.is_stopped() {
            break;
        }
        match carry_out_one(other, queued).await {
            Ok(()) => assert!(numbers.insert(*number), "an entry is carried out once in a pass"),
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    if !numbers.is_empty()
        && let Err(error) = other.sync().await
    {
        (failed, numbers) = (Some(error), BTreeSet::new());
    }
    if let Some(error) = &failed {
        tracing::warn!(%target, %error, "a target could not carry out its work yet");
    }
    Done { target, numbers, is_stuck: failed.is_some() }
}

async fn carry_out_one(target: &dyn OtherTarget, queued: &Queued) -> Result<(), ChunkError> {
    let file = |ino| FileId { branch: queued.branch, ino };
    match queued.work {
        Work::Truncate { ino, .. } => target.finish(file(ino)).await,
        Work::Remove { ino, .. } => target.remove(file(ino)).await,
        Work::Own { ino, number, owner } => target.set_owner(file(ino), owner, number).await,
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
