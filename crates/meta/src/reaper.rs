//! Reaping: removes files that have no name and no user any more.
//!
//! The queue is in rows, so a crash leaks nothing. After a start a queued file has no user, except clients of
//! other processes; they report their open files again before anything is removed. A file with many chunks is
//! dropped in steps from its end. The last step deletes its inode, its extended attributes and its row in the
//! queue.

use crate::STEP_CHUNKS;
use crate::error::MetaError;
use crate::inode::Inode;
use crate::names::partly_gone;
use crate::parts::Parts;
use crate::queue_work;
use crate::rows::{RemovedFile, RemovedState, all_removed, decode_removed, xattr_range};
use penstock_base::{ErrorKind, FileId, Ino};
use penstock_chunk::{Behind, Known, REMOVED};
use penstock_kv::{WriteSet, for_each, for_each_key};
use penstock_wire::Failure;
use std::rc::Rc;
use std::time::Duration;

/// Delay before another attempt at a file that could not be dropped.
const RETRY: Duration = Duration::from_secs(2);
/// The same if its rows are damaged, or a target has too much work: a repair, or an answer of the target,
/// queues it again at once.
const RETRY_STUCK: Duration = Duration::from_secs(600);

/// Queues the files that the last start left.
pub(crate) async fn queue_removed(parts: &Parts) -> Result<(), MetaError> {
    for_each(parts.names.kv(), all_removed(), |key, value| {
        // A check reports a row that cannot be read.
        if let Ok(RemovedFile { ino, state }) = decode_removed(key, value) {
            if state == RemovedState::PartlyGone {
                parts.restore_deletion(ino);
            }
            parts.removed.borrow_mut().push(Duration::ZERO, ino);
        }
        Ok(())
    })
    .await
}

/// Reaps the files in the queue, one after the other, until the parts are stopped.
pub(crate) async fn run(parts: Rc<Parts>) {
    while !parts.is_stopped() {
        let waits = parts.clients.owe_opens();
        let next = if waits { None } else { parts.removed.borrow().first() };
        let Some((due, ino)) = next else {
            parts.reaper_woken().await;
            continue;
        };
        let rest = due.saturating_sub(parts.env.now());
        if !rest.is_zero() {
            // A newly queued file may be due earlier, so the queue is looked at again.
            let _ = penstock_base::env::timeout(&parts.env, rest, parts.reaper_woken()).await;
            continue;
        }
        parts.removed.borrow_mut().begin(ino);
        match reap(&parts, ino).await {
            Ok(()) => parts.removed.borrow_mut().done(),
            Err(error) => {
                tracing::warn!(%ino, %error, "a removed file could not be dropped yet");
                // One for which there is no room in the queue is tried again once there is some.
                let waits_for_room = matches!(error, MetaError::QueueFull { .. });
                let is_stuck = waits_for_room || Failure::from(error).kind == ErrorKind::Corrupt;
                let delay = if is_stuck { RETRY_STUCK } else { RETRY };
                parts.removed.borrow_mut().retry(parts.env.now() + delay, is_stuck);
            }
        }
    }
}

/// Waits until all files without users have been dropped that are removed now, except those that wait for a
/// repair or for a target.
pub(crate) async fn wait_reaped(parts: &Parts) {
    let mut left = parts.removed.borrow().fresh();
    while let Some(ino) = left.pop() {
        while parts.removed.borrow().is_fresh(ino) && !parts.is_stopped() {
            parts.env.sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A file that has no name and waits to be deleted; none if it is another one. ESTALE if it is gone.
async fn if_removed(parts: &Parts, ino: Ino) -> Result<Option<Inode>, MetaError> {
    // A file with a wrong number of links is not in the queue, so damage deletes no file that has a name.
    let inode = parts.names.inode(ino).await?;
    Ok((inode.nlink == 0 && parts.names.is_queued(ino).await?).then_some(inode))
}

async fn reap(parts: &Parts, ino: Ino) -> Result<(), MetaError> {
    // In a turn, so that no name that is being given is overlooked.
    let mut turn = parts.names.turn().await;
    let inode = match if_removed(parts, ino).await {
        // Already gone: a file can be queued both by its last close and by the removal of its last name.
        Err(MetaError::Posix(_)) => None,
        inode => inode?,
    };
    let Some(inode) = inode else {
        parts.end_deletion(ino);
        return Ok(());
    };
    let known = Known { truncations: REMOVED, owner: inode.owner() };
    // A use that exists queues the file again when it ends.
    let Some(deletion) = parts.begin_deletion(ino) else { return Ok(()) };
    let file = FileId::main(ino);
    // Steps follow from the chunks that exist: the size does not give their number.
    for stop in parts.chunks.truncate_steps(file, 0, STEP_CHUNKS).await? {
        let mut writes = partly_gone(ino);
        writes.reclaims();
        parts.chunks.truncate(file, stop..u64::MAX, Behind::Dropped, known, writes).await?;
        deletion.part_is_gone();
        // Between two steps others change names, and a repair may give the file one.
        drop(turn);
        turn = parts.names.turn().await;
        if if_removed(parts, ino).await?.is_none() {
            parts.end_deletion(ino);
            return Ok(());
        }
    }
    if !turn.absent().xattrs.contains(&ino) {
        let mut attributes = WriteSet::new();
        for_each_key(turn.kv(), xattr_range(ino), |key| {
            attributes.delete(key.to_vec());
            Ok::<_, MetaError>(())
        })
        .await?;
        if !attributes.is_empty() {
            deletion.part_is_gone();
            turn.note_partly_gone(ino).await?;
            turn.delete_apart(attributes).await?;
        }
    }
    assert!(!parts.is_used(ino), "nothing uses inode {ino} while it is deleted");
    let mut others = WriteSet::new();
    let queued = turn.queue(parts, &inode, queue_work::remove(&inode), &mut others)?;
    turn.delete_inode(ino, async |mut writes| {
        writes.append(others);
        Ok(parts.chunks.truncate(file, 0..u64::MAX, Behind::Dropped, known, writes).await?)
    })
    .await?;
    parts.queue.note(queued);
    parts.end_deletion(ino);
    Ok(())
}
