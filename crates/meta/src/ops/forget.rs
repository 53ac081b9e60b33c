//! Giving up targets that are lost, and what files have there.

use crate::error::MetaError;
use crate::inode::{FileKind, Inode};
use crate::parts::Parts;
use crate::rows::{all_inodes, decode_gone, encode_gone, gone_key};
use penstock_base::{BLOCK_BYTES, Ino, TargetId};
use penstock_kv::{Kv, WriteSet, for_each};
use std::collections::{BTreeMap, BTreeSet};

/// The targets that are forgotten, in the store with the names. Fails if the row cannot be read: a target
/// that serves again would have what was removed and cut since.
pub async fn forgotten_targets(kv: &dyn Kv) -> Result<BTreeSet<TargetId>, MetaError> {
    match kv.get(gone_key()).await? {
        Some(row) => Ok(decode_gone(&row)?),
        None => Ok(BTreeSet::new()),
    }
}

/// Forgets a target of another stack that does not serve, durably. The work that waits for it is dropped
/// next.
pub(crate) async fn forget(parts: &Parts, target: TargetId) -> Result<(), MetaError> {
    let is_done = || parts.elsewhere.forgotten().contains(&target);
    assert!(parts.elsewhere.is_absent(target) || is_done(), "target {target} does not serve");
    let turn = parts.names.turn().await;
    let mut gone = forgotten_targets(turn.kv()).await?;
    gone.insert(target);
    let mut writes = WriteSet::new();
    writes.put(gone_key(), encode_gone(&gone));
    turn.commit_queue(writes).await?;
    drop(turn);
    parts.flush().await?;
    // Another request may have been first.
    if !is_done() {
        parts.elsewhere.forget(target);
    }
    parts.queue.wake(target);
    // Removed files may have waited for room in its queue.
    parts.removed.borrow_mut().retry_all();
    parts.wake_reaper();
    Ok(())
}

/// Files that have a part on a target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FilesOn {
    /// Number of files.
    pub files: u64,
    /// Bytes of these files that lie there at most: holes count too.
    pub most_bytes: u64,
    /// The first ones.
    pub listed: BTreeSet<Ino>,
}

/// Files that may have something on a target of another stack, of which so many are listed. Others have
/// `on_loan` from it: so many blocks of each file.
pub(crate) async fn files_on(
    parts: &Parts,
    target: TargetId,
    on_loan: &BTreeMap<Ino, u64>,
    most: usize,
) -> Result<FilesOn, MetaError> {
    let mut found = FilesOn::default();
    for_each(parts.names.kv(), all_inodes(), |_, row| {
        // A check reports what is no inode.
        let Ok(inode) = Inode::decode(row) else { return Ok(()) };
        let blocks = on_loan.get(&inode.ino).copied().unwrap_or(0);
        let bytes = bytes_on(parts, &inode, target).saturating_add(blocks * BLOCK_BYTES as u64);
        if bytes > 0 {
            found.files += 1;
            found.most_bytes = found.most_bytes.saturating_add(bytes);
            if found.listed.len() < most {
                found.listed.insert(inode.ino);
            }
        }
        Ok::<_, MetaError>(())
    })
    .await?;
    assert!(found.listed.len() as u64 <= found.files.min(most as u64), "they are among the files");
    Ok(found)
}

/// The bytes of a file that lie on a target, if nothing of it is a hole.
fn bytes_on(parts: &Parts, inode: &Inode, target: TargetId) -> u64 {
    if inode.kind() != FileKind::Regular || !inode.is_spread {
        return 0;
    }
    let spread = parts.elsewhere.spread_of(&inode.layout);
    let Some(share) = spread.and_then(|spread| spread.share_of(target)) else { return 0 };
    let block = BLOCK_BYTES as u64;
    let blocks = share.blocks_within(&(0..inode.size.div_ceil(block)), inode.layout.chunk_blocks);
    (blocks * block).min(inode.size)
}
