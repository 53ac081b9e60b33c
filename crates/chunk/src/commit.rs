//! Commits files: data durable on the volume, then map rows and bits in one transaction.
//!
//! Invariants:
//! - a map row enters the key-value store only after the data that it points to is durable on the volume;
//! - a map row, the bits of its blocks, the row of its file and the account of the owner change in one
//!   transaction;
//! - a freed block counts as used until the transaction that freed it is durable.

use crate::ChunkError;
use crate::accounts::Accounts;
use crate::allocator::Allocator;
use crate::cache::{Changes, ChunkCache};
use crate::files::FileState;
use crate::free::Run;
use crate::ranks;
use crate::rows::{ChunkKey, FileRow, MapRow};
use crate::volumes::Volumes;
use crate::writeback::Writeback;
use futures_util::future::join_all;
use penstock_base::locks::Exclusive;
#[cfg(test)]
use penstock_base::rank::RankedGuard;
use penstock_base::rank::{RankedKey, RankedLocks, RankedMutex, scoped};
use penstock_base::{Birth, Env, ErrorKind, FileId, Gate};
use penstock_kv::{Kv, WriteSet};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::RwLock;

/// Longest time between a write and its durable commit.
const INTERVAL: Duration = Duration::from_secs(5);
/// Files whose rows are committed concurrently.
const FILES_IN_FLIGHT: usize = 64;
/// Chunks of a file whose rows change in one transaction.
const ROWS_TOGETHER: usize = 64;

/// The commits of one target.
pub(crate) struct Commits {
    pub(crate) env: Env,
    pub(crate) volumes: Rc<Volumes>,
    pub(crate) kv: Rc<dyn Kv>,
    pub(crate) gate: Rc<Gate>,
    pub(crate) cache: Rc<ChunkCache>,
    pub(crate) allocator: Rc<Allocator>,
    pub(crate) writeback: Rc<Writeback>,
    pub(crate) accounts: Accounts,
    /// One change of a file's rows runs at a time, so that an older row never overwrites a newer one.
    files: RankedLocks<FileId>,
    one_at_a_time: RankedMutex<()>,
    /// Shared by syncs that run: each has taken blocks that wait to be free.
    syncing: RwLock<()>,
    /// Blocks freed by transactions that are not known to be durable.
    reclaim: RefCell<Vec<Run>>,
    closed: Cell<bool>,
}

impl Commits {
    pub(crate) fn new(
        env: &Env,
        volumes: &Rc<Volumes>,
        kv: &Rc<dyn Kv>,
        gate: &Rc<Gate>,
        cache: &Rc<ChunkCache>,
        allocator: &Rc<Allocator>,
        writeback: &Rc<Writeback>,
    ) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            volumes: volumes.clone(),
            kv: kv.clone(),
            gate: gate.clone(),
            cache: cache.clone(),
            allocator: allocator.clone(),
            writeback: writeback.clone(),
            accounts: Accounts::default(),
            files: RankedLocks::new(ranks::FILE),
            one_at_a_time: RankedMutex::new(ranks::COMMIT, ()),
            syncing: RwLock::default(),
            reclaim: RefCell::default(),
            closed: Cell::new(false),
        })
    }

    /// Makes [`Self::run`] end.
    pub(crate) fn stop(&self) {
        self.closed.set(true);
    }

    /// True once it was stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.closed.get()
    }

    /// Keeps transactions from being committed.
    #[cfg(test)]
    pub(crate) async fn hold(&self) -> RankedGuard<'_, ()> {
        self.one_at_a_time.lock().await
    }

    /// Waits for the right to change the rows of a file.
    pub(crate) async fn lock(&self, file: FileId) -> RankedKey<Exclusive<FileId>> {
        self.files.exclusive(file).await
    }

    /// Makes everything written to a file durable. With `deferred`, the rows are only committed, and the
    /// caller makes the shared key-value store durable next.
    pub(crate) async fn commit(&self, file: FileId, deferred: bool) -> Result<(), ChunkError> {
        for key in self.cache.keys_of(file, |chunk| !chunk.is_clean()) {
            self.writeback.write_chunk(key).await?;
        }
        self.commit_file(file).await?;
        if deferred { Ok(()) } else { self.sync().await }
    }

    /// Makes the blocks available that were freed and wait only for a durable commit.
    pub(crate) async fn make_space(&self) -> Result<(), ChunkError> {
        match self.commit_all().await {
            // A file with damaged rows keeps its own blocks, and no others.
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!(%error, "a commit of all files for their freed blocks failed");
                Ok(())
            }
            result => result,
        }
    }

    /// Makes everything durable. If a file fails, the others are still committed before the error is
    /// returned.
    pub(crate) async fn commit_all(&self) -> Result<(), ChunkError> {
        let dirty: Vec<ChunkKey> = self.cache.all_dirty();
        // A failure does not keep the other chunks and files from being committed.
        let mut result = Ok(());
        for key in dirty {
            result = result.and(self.writeback.write_chunk(key).await);
        }
        // Concurrently, so that one flush serves many files.
        let mut changed = self.cache.changed_files();
        // Changes that another commit has taken count too: it may fail.
        changed.extend(self.files.keys());
        let changed: Vec<FileId> = changed.into_iter().collect();
        for some in changed.chunks(FILES_IN_FLIGHT) {
            let commits = some.iter().map(|file| scoped(self.commit_file(*file)));
            result = result.and(join_all(commits).await.into_iter().collect());
        }
        result = result.and(self.volumes.flush_all().await);
        // Rows that are committed have their data on the volumes.
        self.sync().await?;
        result
    }

    /// Flushes the volume, then commits those rows of a file that were changed before the flush.
    async fn commit_file(&self, file: FileId) -> Result<(), ChunkError> {
        let _changing = self.gate.change().await;
        let _lock = self.lock(file).await;
        let changed = self.cache.keys_of(file, |chunk| chunk.map().is_changed()).into_iter();
        let changes: Vec<Changes> =
            changed.filter_map(|key| Changes::take(key, &self.cache.peek(key)?)).collect();
        if let Err(error) = self.volumes.flush(file).await {
            changes.into_iter().for_each(Changes::put_back);
            return Err(error);
        }
        // Each step is a transaction of its own: one that changes very many rows does not fit into a small
        // store.
        let mut changes = changes.into_iter();
        loop {
            let step: Vec<Changes> = changes.by_ref().take(ROWS_TOGETHER).collect();
            if step.is_empty() {
                return Ok(());
            }
            let state = step[0].file();
            if let Err(error) = self.commit_rows(file, &state, step, WriteSet::new()).await {
                changes.for_each(Changes::put_back);
                return Err(error);
            }
        }
    }

    /// Commits rows of a file whose data is durable, and the row of the file, with `writes` in the same
    /// transaction. The caller has the lock of the file.
    pub(crate) async fn commit_rows(
        &self,
        file: FileId,
        state: &FileState,
        changes: Vec<Changes>,
        writes: WriteSet,
    ) -> Result<(), ChunkError> {
        let committed = self.try_commit_rows(file, state, &changes, writes).await;
        if committed.is_err() {
            changes.into_iter().for_each(Changes::put_back);
        }
        committed
    }

    /// The same, and leaves the changes to the caller.
    async fn try_commit_rows(
        &self,
        file: FileId,
        state: &FileState,
        changes: &[Changes],
        mut writes: WriteSet,
    ) -> Result<(), ChunkError> {
        assert!(changes.iter().all(|change| change.key.file == file), "the changes are of one file");
        if self.allocator.space_mut().is_crowded() && !self.reclaim.borrow().is_empty() {
            // Blocks that wait to be free keep many groups in memory.
            self.sync().await?;
        }
        let _one_at_a_time = self.one_at_a_time.lock().await;
        let allocated: Vec<Run> =
            changes.iter().flat_map(|change| change.map.allocated.iter().copied()).collect();
        let freed: Vec<Run> = changes.iter().flat_map(|change| change.map.freed.iter().copied()).collect();
        // Those of allocated blocks are in memory: a group stays there while blocks wait to be committed.
        let _groups = self.allocator.pin_groups(&freed).await?;
        let blocks = |runs: &[Run]| runs.iter().map(|(_, count)| count).sum::<u64>();
        let old = state.row();
        let new = state.next_row(blocks(&allocated), blocks(&freed))?;
        if changes.is_empty() && writes.is_empty() && old == new {
            return Ok(());
        }
        // A hole splits an extent in two, and so does a write into the middle of a preallocated one; very
        // many of them make rows grow without bound. So only a commit that frees at least as many blocks as
        // it allocates may use part of the headroom.
        if blocks(&allocated) <= blocks(&freed) {
            writes.changes_what_is_there();
        }
        let truncations = new.map_or(0, |row| row.truncations);
        assert!(old.is_none_or(|old| new.is_none() || old.truncations <= truncations), "{old:?} to {new:?}");
        for change in changes {
            let key = change.key.row(Birth::FIRST);
            match change.map.extents.is_empty() {
                true if !change.map.had_row => {}
                true => drop(writes.delete(key)),
                false => {
                    let extents = change.map.extents.clone();
                    writes.put(key, MapRow { truncations, extents }.encode(Birth::FIRST));
                }
            }
        }
        let file_row = FileRow::key(file, Birth::FIRST);
        match new {
            _ if old == new => {}
            Some(row) => drop(writes.put(file_row, row.encode())),
            None => drop(writes.delete(file_row)),
        }
        let account = self.accounts.change(file.branch, old, new, &mut writes);
        match self.commit_bits(allocated, &freed, writes).await {
            Ok(()) => {
                state.committed(new);
                Ok(())
            }
            Err(error) => {
                self.accounts.undo(account);
                Err(error)
            }
        }
    }

    /// Commits `writes` together with blocks that are used or free from then on. The groups of freed ones are
    /// in memory.
    async fn commit_bits(
        &self,
        allocated: Vec<Run>,
        freed: &[Run],
        mut writes: WriteSet,
    ) -> Result<(), ChunkError> {
        let mut space = self.allocator.space_mut().commit(allocated, freed);
        std::mem::take(&mut space.rows).into_iter().for_each(|(key, row)| _ = writes.put(key, row));
        match self.kv.commit(writes).await {
            Ok(()) => {
                self.reclaim.borrow_mut().extend(self.allocator.space_mut().end_commit(space));
                Ok(())
            }
            Err(error) => {
                self.allocator.space_mut().undo_commit(space);
                Err(error.into())
            }
        }
    }

    /// Commits `writes` together with blocks that no file has: allocated ones, which are free again if it
    /// fails, and freed ones. The caller has passed the gate.
    pub(crate) async fn commit_runs(
        &self,
        allocated: Vec<Run>,
        freed: &[Run],
        writes: WriteSet,
    ) -> Result<(), ChunkError> {
        let committed = async {
            let _one_at_a_time = self.one_at_a_time.lock().await;
            let _groups = self.allocator.pin_groups(freed).await?;
            self.commit_bits(allocated.clone(), freed, writes).await
        };
        let committed = committed.await;
        if committed.is_err() {
            self.allocator.give_back_uncommitted(allocated);
        }
        committed
    }

    /// Makes committed rows durable, and the blocks that they freed available again.
    pub(crate) async fn sync(&self) -> Result<(), ChunkError> {
        let _syncing = self.syncing.read().await;
        self.sync_rows().await
    }

    /// Waits until no freed block waits for a durable commit, so that nothing but its caller frees blocks.
    /// The caller lets nothing change rows.
    pub(crate) async fn finish_syncs(&self) -> Result<(), ChunkError> {
        let _alone = self.syncing.write().await;
        self.sync_rows().await?;
        assert!(self.reclaim.borrow().is_empty(), "nothing is freed while the gate is quiet");
        Ok(())
    }

    async fn sync_rows(&self) -> Result<(), ChunkError> {
        let freed = std::mem::take(&mut *self.reclaim.borrow_mut());
        if let Err(error) = self.kv.flush().await {
            self.reclaim.borrow_mut().extend(freed);
            return Err(error.into());
        }
        self.allocator.give_back(freed);
        Ok(())
    }

    /// Commits everything every 5 s ([`INTERVAL`]) until the target is closed.
    pub(crate) async fn run(self: Rc<Self>) {
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

#[cfg(test)]
mod tests;
