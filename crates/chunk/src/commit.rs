//! Commits files: data durable on the volume, then map rows and bits in one transaction.
//!
//! Once that transaction is durable too, the blocks that it freed are reused.

use crate::ChunkError;
use crate::chunk::{Changes, Chunk};
use crate::rows::{ChunkKey, encode_map, group_key};
use crate::space::Run;
use crate::target::Target;
use futures_util::future::join_all;
use penstock_base::Ino;
use penstock_kv::WriteSet;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// Longest time between a write and its durable commit.
const INTERVAL: Duration = Duration::from_secs(5);
/// Files whose rows are committed concurrently.
const COMMITTED_AT_ONCE: usize = 64;
/// Chunks of a file whose rows change in one transaction.
const COMMITTED_TOGETHER: usize = 64;

impl Target {
    /// Makes everything written to a file durable. With `deferred`, the rows are only committed, and the
    /// caller makes the shared key-value store durable next.
    pub async fn commit(&self, branch: u64, ino: Ino, deferred: bool) -> Result<(), ChunkError> {
        let keys = self.keys_of(branch, ino, |chunk| !chunk.is_clean());
        for key in &keys {
            self.place(*key).await?;
        }
        self.commit_inode(branch, ino).await?;
        self.count(|counts| counts.commits += 1);
        if deferred { Ok(()) } else { self.sync().await }
    }

    /// Makes everything durable. If a file fails, the others are still committed before the error is
    /// returned.
    pub async fn commit_all(&self) -> Result<(), ChunkError> {
        let waiting: Vec<ChunkKey> = self.waiting.borrow().values().copied().collect();
        // A failure does not keep the other chunks and files from being committed.
        let mut result = Ok(());
        for key in waiting {
            result = result.and(self.place(key).await.map(drop));
        }
        let changed: BTreeSet<(u64, Ino)> = {
            let chunks = self.chunks.borrow();
            chunks
                .iter()
                .filter(|(_, chunk)| chunk.borrow().changed)
                .map(|(key, _)| (key.branch, key.ino))
                .collect()
        };
        // Concurrently, so that one flush serves many files.
        let changed: Vec<(u64, Ino)> = changed.into_iter().collect();
        for some in changed.chunks(COMMITTED_AT_ONCE) {
            let commits = some.iter().map(|(branch, ino)| self.commit_inode(*branch, *ino));
            result = result.and(join_all(commits).await.into_iter().collect());
        }
        self.volume.flush().await?;
        self.sync().await?;
        result
    }

    pub(crate) fn keys_of(
        &self,
        branch: u64,
        ino: Ino,
        wanted: impl Fn(&crate::chunk::Chunk) -> bool,
    ) -> Vec<ChunkKey> {
        let chunks = self.chunks.borrow();
        let first = ChunkKey { branch, ino, index: 0 };
        let last = ChunkKey { branch, ino, index: u64::MAX };
        chunks.range(first..=last).filter(|(_, chunk)| wanted(&chunk.borrow())).map(|(key, _)| *key).collect()
    }

    /// Flushes the volume, then commits those rows of a file that were changed before the flush. One call per
    /// file runs at a time, so that an older row never overwrites a newer one.
    async fn commit_inode(&self, branch: u64, ino: Ino) -> Result<(), ChunkError> {
        let _open = self.gate.read().await;
        let _lock = self.inode_locks.exclusive((branch, ino)).await;
        let mut changes = Vec::new();
        for key in self.keys_of(branch, ino, |chunk| chunk.changed) {
            let chunk = self.chunks.borrow().get(&key).cloned();
            changes.extend(chunk.and_then(|chunk| Chunk::take_changes(&chunk, key)));
        }
        if let Err(error) = self.volume.flush().await {
            changes.into_iter().for_each(Changes::put_back);
            return Err(error.into());
        }
        // Each step is a transaction of its own: one that changes very many rows does not fit into a small
        // store.
        let mut changes = changes.into_iter();
        loop {
            let step: Vec<Changes> = changes.by_ref().take(COMMITTED_TOGETHER).collect();
            if step.is_empty() {
                return Ok(());
            }
            if let Err(error) = self.commit_rows(step, WriteSet::new()).await {
                changes.for_each(Changes::put_back);
                return Err(error);
            }
        }
    }

    /// Commits rows whose data is durable, with `writes` in the same transaction.
    pub(crate) async fn commit_rows(
        &self,
        changes: Vec<Changes>,
        mut writes: WriteSet,
    ) -> Result<(), ChunkError> {
        if changes.is_empty() && writes.is_empty() {
            return Ok(());
        }
        let _order = self.commit_lock.lock().await;
        let allocated: Vec<Run> =
            changes.iter().flat_map(|change| change.allocated.iter().copied()).collect();
        let freed: Vec<Run> = changes.iter().flat_map(|change| change.freed.iter().copied()).collect();
        // A hole splits an extent in two, and so does a write into the middle of a preallocated one; very
        // many of them make rows grow without bound. So only a commit that frees at least as many blocks as
        // it allocates may use part of the headroom.
        let blocks = |runs: &[Run]| runs.iter().map(|(_, count)| count).sum::<u64>();
        if blocks(&allocated) <= blocks(&freed) {
            writes.changes_what_is_there();
        }
        for change in &changes {
            match change.map.is_empty() {
                true if !change.had_row => {}
                true => drop(writes.delete(change.key.row(0))),
                false => drop(writes.put(change.key.row(0), encode_map(&change.map))),
            }
        }
        for (group, row) in self.space.borrow_mut().commit(&allocated, &freed) {
            writes.put(group_key(group), row);
        }
        match self.kv.commit(writes).await {
            Ok(()) => {
                self.reclaim.borrow_mut().extend(freed);
                Ok(())
            }
            Err(error) => {
                // A run in both lists was allocated and then freed; undo in the opposite order.
                self.space.borrow_mut().commit(&freed, &[]);
                self.space.borrow_mut().commit(&[], &allocated);
                changes.into_iter().for_each(Changes::put_back);
                Err(error.into())
            }
        }
    }

    /// Makes committed rows durable, and the blocks that they freed available again.
    pub async fn sync(&self) -> Result<(), ChunkError> {
        let freed = std::mem::take(&mut *self.reclaim.borrow_mut());
        if let Err(error) = self.kv.flush().await {
            self.reclaim.borrow_mut().extend(freed);
            return Err(error.into());
        }
        self.give_back(freed);
        Ok(())
    }

    /// Commits everything every few seconds ([`INTERVAL`]) until the target is closed.
    pub(crate) async fn commit_task(self: Rc<Self>) {
        while !self.closed.get() {
            self.env.sleep(INTERVAL).await;
            if self.closed.get() {
                break;
            }
            if let Err(error) = self.commit_all().await {
                tracing::error!(%error, "a periodic commit failed; it will be tried again");
            }
        }
    }
}
