//! Transactions in memory ahead of the engine, and the batches that move them there.
//!
//! The engine takes a transaction on a thread of its own, and the hand-over costs more than the transaction.
//! So a commit goes to memory, where every later read sees it. Many commits go to the engine as one
//! transaction: after [`REST`], or when they have [`FULL_BYTES`] (less in a small store). A flush does not
//! wait for that: it appends the new changes to the [journal](crate::journal).
//!
//! Two maps hold the changes that the engine does not have yet. *Open* takes commits. *Moving* is on its way
//! to the engine. A read looks into open, then moving, then the engine.
//!
//! Invariants:
//! - Batches go to the engine one at a time and in order, and each transaction lies in one batch. So the
//!   engine holds a prefix of the transactions.
//! - A batch leaves memory only when the engine has it.
//! - Each key whose newest value is in neither the engine nor the journal is in one of the lists of
//!   unrecorded keys.
//! - A read of several rows sees one moment: no batch begins to move during the read ([`AheadKv::still`]).
//! - Memory is bounded: a commit waits while open is longer than its bound.
//!
//! Power cut: changes that were in memory and in no record are lost. Only commits after the last flush can be
//! lost.

use crate::engine::{PAGE_BYTES, PAGES_OF_A_ROW, RedbKv, changed_bytes};
use crate::journal::Journal;
use crate::merge::{Rows, merge, range_of};
use crate::snapshot::Snapshot;
use crate::{Columns, Kv, KvError, KvRead, Reserve, Row, Usage, WriteSet};
use penstock_base::env::random_id;
use penstock_base::{Env, Histogram, LocalBoxFuture};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{Mutex, Notify, RwLock};

/// A batch of this many bytes moves without waiting for [`REST`].
const FULL_BYTES: u64 = 256 << 10;
/// Commits wait while open has more than this many bytes, or more than one part in `MOST_SHARE` of the
/// volume. The bound is needed because the engine writes each page that a transaction changes to a new place
/// before it frees the old one.
const MOST_BYTES: u64 = 4 << 20;
const MOST_SHARE: u64 = 256;
/// Commits also wait while open has too many rows. Its rows may change pages for one part in
/// `MOST_PAGES_SHARE` of the volume.
const MOST_PAGES_SHARE: u64 = 10;
/// One transaction may change pages for one part in `LONGEST_SHARE` of the volume, and at least for
/// [`crate::ROWS_AT_ONCE`] rows of 4 KiB. A longer one is refused: an engine that finds no free page has
/// failed for good.
const LONGEST_SHARE: u64 = 2;
const LONGEST_BYTES: u64 = crate::ROWS_AT_ONCE as u64 * (PAGES_OF_A_ROW + 3) * PAGE_BYTES;
/// The longest time that a commit stays in open before its batch moves, unless an earlier batch is still
/// moving.
const REST: Duration = Duration::from_millis(250);

/// Changes that go to the engine together.
#[derive(Default)]
struct Batch {
    rows: Rows,
    bytes: u64,
    /// Keys that no record has, some more than once.
    unrecorded: Vec<Vec<u8>>,
}

impl Batch {
    fn is_beyond(&self, bytes: u64, rows: usize) -> bool {
        self.bytes >= bytes || self.rows.len() >= rows
    }
}

#[derive(Default)]
struct Pending {
    open: Batch,
    moving: Batch,
}

impl Pending {
    fn find(&self, key: &[u8]) -> Option<&Option<Vec<u8>>> {
        self.open.rows.get(key).or_else(|| self.moving.rows.get(key))
    }

    fn is_empty(&self) -> bool {
        self.open.rows.is_empty() && self.moving.rows.is_empty()
    }

    /// The changed rows in a range. A row in open takes precedence over one in moving.
    fn range(&self, from: &[u8], until: &[u8]) -> Rows {
        let mut rows = range_of(&self.moving.rows, from, until);
        rows.extend(range_of(&self.open.rows, from, until));
        rows
    }

    /// All changed rows.
    fn all(&self) -> Rows {
        let mut rows = self.moving.rows.clone();
        rows.extend(self.open.rows.iter().map(|(key, value)| (key.clone(), value.clone())));
        rows
    }

    /// Takes the newest values of all keys that no record has. The keys count as recorded from now on.
    fn take_unrecorded(&mut self) -> WriteSet {
        let keys: BTreeSet<Vec<u8>> =
            self.moving.unrecorded.drain(..).chain(self.open.unrecorded.drain(..)).collect();
        assert!(self.moving.unrecorded.is_empty() && self.open.unrecorded.is_empty(), "all keys are taken");
        let value = |key: Vec<u8>| {
            let value = self.find(&key).expect("a key is unrecorded only while its row is in memory").clone();
            (key, value)
        };
        WriteSet { changes: keys.into_iter().map(value).collect(), reserve: Reserve::Nothing }
    }
}

/// Durations of commits and flushes, with the time they waited for earlier ones.
#[derive(Default)]
pub struct KvLatency {
    /// Time from the start of a batch's move until the engine had it.
    pub commit: Histogram,
    /// Time of a flush, until all earlier commits were durable. Near zero if they were durable already.
    pub flush: Histogram,
}

/// A store whose commits go to memory first.
pub struct AheadKv {
    env: Env,
    engine: Rc<RedbKv>,
    journal: Journal,
    latency: KvLatency,
    pending: RefCell<Pending>,
    /// Transactions committed since this opening, and the number of them known to be durable.
    commits: Cell<u64>,
    durable: Cell<u64>,
    flushes: Cell<u64>,
    full_bytes: u64,
    most_bytes: u64,
    most_rows: usize,
    /// Bytes that the pages changed by one transaction may take.
    longest_bytes: u64,
    /// Locked shared by reads of several rows, and exclusively for the moment in which a batch begins to
    /// move.
    still: RwLock<()>,
    move_lock: Mutex<()>,
    flush_lock: Mutex<()>,
    /// Wakes the task that moves batches: open has rows.
    opened: Notify,
    /// Wakes the task that moves batches: open or the journal is long enough.
    filled: Notify,
    /// Wakes commits that wait: the engine has taken a batch.
    moved: Notify,
    failed: RefCell<Option<KvError>>,
    closed: Cell<bool>,
}

impl AheadKv {
    /// Opens a store ahead of `engine`. First applies the records of the journal that the engine does not
    /// have.
    pub async fn open(env: &Env, engine: Rc<RedbKv>) -> Result<Rc<Self>, KvError> {
        let capacity_bytes = engine.file().capacity_bytes();
        let most_bytes = MOST_BYTES.min(capacity_bytes / MOST_SHARE);
        let most_pages = capacity_bytes / MOST_PAGES_SHARE / PAGE_BYTES;
        let most_rows = (most_pages / PAGES_OF_A_ROW).max(2) as usize;
        let missed = match engine.mark() {
            Some(mark) => Journal::replay(engine.file(), mark).await?,
            None => WriteSet::new(),
        };
        let journal = Journal::new(engine.file().clone(), random_id(env));
        engine.commit(missed, journal.mark()).await?;
        engine.flush().await?;
        assert!(most_rows >= 2 && most_bytes <= MOST_BYTES, "memory takes a transaction, and is bounded");
        let ahead = Rc::new(Self {
            env: env.clone(),
            full_bytes: FULL_BYTES.min(most_bytes / 2),
            most_bytes,
            most_rows,
            longest_bytes: LONGEST_BYTES.max(capacity_bytes / LONGEST_SHARE),
            engine,
            journal,
            latency: KvLatency::default(),
            pending: RefCell::default(),
            commits: Cell::new(0),
            durable: Cell::new(0),
            flushes: Cell::new(0),
            still: RwLock::default(),
            move_lock: Mutex::default(),
            flush_lock: Mutex::default(),
            opened: Notify::new(),
            filled: Notify::new(),
            moved: Notify::new(),
            failed: RefCell::default(),
            closed: Cell::new(false),
        });
        env.spawn("kv ahead", Box::pin(ahead.clone().move_task()));
        Ok(ahead)
    }

    /// Stops the task that moves batches. Commits that are not flushed are lost.
    pub fn stop(&self) {
        self.closed.set(true);
        self.opened.notify_one();
        self.filled.notify_one();
        self.moved.notify_waiters();
    }

    /// Stops, and lets nothing be written on the volume any more: another store is made there.
    pub fn retire(&self) {
        self.stop();
        self.engine.retire();
    }

    /// The store refuses all requests from now on, also commits that wait.
    fn fail(&self, error: &KvError) {
        *self.failed.borrow_mut() = Some(error.clone());
        self.moved.notify_waiters();
    }

    /// Durations of commits and flushes since this opening.
    pub fn latency(&self) -> &KvLatency {
        &self.latency
    }

    fn check(&self) -> Result<(), KvError> {
        self.failed.borrow().clone().map_or(Ok(()), Err)
    }

    /// The error after which the store refuses all requests, if it failed. Only a new opening clears it.
    pub fn failure(&self) -> Option<String> {
        let of_engine = self.engine.failure().map(str::to_owned);
        of_engine.or_else(|| self.failed.borrow().as_ref().map(KvError::to_string))
    }

    async fn move_task(self: Rc<Self>) {
        while !self.closed.get() {
            if self.pending.borrow().open.rows.is_empty() {
                self.opened.notified().await;
                continue;
            }
            if !self.is_full() {
                let rest = std::pin::pin!(self.env.sleep(REST));
                let filled = std::pin::pin!(self.filled.notified());
                futures_util::future::select(rest, filled).await;
            }
            if !self.closed.get() && self.move_open().await.is_err() {
                // The error is stored: every later request returns it.
                return;
            }
        }
    }

    /// Rows that open may have: five times as many while the store is less than half full, without snapshots.
    fn most_rows(&self) -> usize {
        let (used, budget) = self.engine.space();
        // A snapshot keeps pages, and a long batch would end it.
        if used * 2 < budget && !self.engine.is_held() { self.most_rows * 5 } else { self.most_rows }
    }

    fn is_full(&self) -> bool {
        self.pending.borrow().open.is_beyond(self.full_bytes, self.most_rows() / 2)
            || self.journal.is_half_full()
    }

    /// Moves the open batch to the engine.
    async fn move_open(&self) -> Result<(), KvError> {
        let _in_order = self.move_lock.lock().await;
        self.check()?;
        let mark = {
            let _moment = self.still.write().await;
            let mut pending = self.pending.borrow_mut();
            assert!(pending.moving.rows.is_empty(), "one batch moves at a time");
            pending.moving = std::mem::take(&mut pending.open);
            // Every record made until now holds rows of this batch or of earlier ones.
            self.journal.mark()
        };
        let changes = self.pending.borrow().moving.rows.clone().into_iter().collect();
        let commit = self.engine.commit(WriteSet { changes, reserve: Reserve::Nothing }, mark);
        let result = self.latency.commit.time(&self.env, commit).await;
        match &result {
            Ok(()) => {
                self.pending.borrow_mut().moving = Batch::default();
                self.journal.release(mark.sequence);
            }
            // Acknowledged changes can no longer be stored, so the store refuses all requests from now on.
            Err(error) => self.fail(error),
        }
        self.moved.notify_waiters();
        result
    }

    /// Refuses a transaction if the engine might have too few free pages to apply it in one piece.
    fn check_length(&self, rows: u64, bytes: u64) -> Result<(), KvError> {
        let longest_bytes = self.longest_bytes;
        match changed_bytes(rows, bytes) > longest_bytes {
            true => Err(KvError::TooLong { rows, bytes, longest_bytes }),
            false => Ok(()),
        }
    }

    /// Bytes that the rows changed by a transaction count for after it, and before it.
    async fn newest_bytes(&self, writes: &WriteSet) -> Result<(u64, u64), KvError> {
        let keys = writes.newest().keys().map(|key| key.to_vec()).collect();
        let before = self.try_get_many(keys).await?;
        Ok(writes.newest_bytes(before.iter().map(|value| value.as_ref().map(Vec::len))))
    }

    async fn try_commit(&self, writes: WriteSet) -> Result<(), KvError> {
        let bytes = writes.bytes();
        self.check_length(writes.changes.len() as u64, bytes)?;
        loop {
            self.check()?;
            let Usage { used_bytes, budget_bytes, .. } = self.usage();
            let most_bytes = writes.reserve.most_bytes(budget_bytes);
            if used_bytes + bytes > most_bytes {
                // `usage` counts all rows in memory as new. Only the engine can tell which of them replace
                // others.
                if !self.pending.borrow().is_empty() {
                    self.move_open().await?;
                    continue;
                }
                let commits = self.commits.get();
                let (new, old) = self.newest_bytes(&writes).await?;
                if self.commits.get() != commits {
                    // Another transaction may have taken the space.
                    continue;
                }
                if new > old && used_bytes + (new - old) > most_bytes {
                    return Err(KvError::NoSpace { used_bytes, budget_bytes });
                }
            }
            if !self.pending.borrow().open.is_beyond(self.most_bytes + 1, self.most_rows()) {
                break;
            }
            let moved = self.moved.notified();
            self.check()?;
            if self.closed.get() {
                return Err(KvError::Closed);
            }
            self.filled.notify_one();
            moved.await;
        }
        let mut pending = self.pending.borrow_mut();
        pending.open.bytes += bytes;
        for (key, value) in writes.changes {
            pending.open.unrecorded.push(key.clone());
            pending.open.rows.insert(key, value);
        }
        assert!(pending.open.bytes >= pending.open.rows.len() as u64, "the bytes of a batch are counted");
        self.commits.set(self.commits.get() + 1);
        self.opened.notify_one();
        if pending.open.is_beyond(self.full_bytes, self.most_rows() / 2) {
            self.filled.notify_one();
        }
        Ok(())
    }

    /// Makes all earlier commits durable. A flush that waits for another one returns when that one has
    /// covered it.
    async fn try_flush(&self) -> Result<(), KvError> {
        let wanted = self.commits.get();
        if self.durable.get() >= wanted {
            return self.check();
        }
        let _one_at_a_time = self.flush_lock.lock().await;
        self.check()?;
        if self.durable.get() >= wanted {
            return Ok(());
        }
        let covered = self.commits.get();
        let changes = self.pending.borrow_mut().take_unrecorded();
        if !changes.is_empty() {
            match self.journal.place(changes) {
                Some(record) => {
                    // The gap of a missing record would hide all later records from replay.
                    if let Err(error) = self.journal.write(record).await {
                        self.fail(&error);
                        return Err(error);
                    }
                }
                // The ring has no space, so the engine takes the open changes. It has those of the earlier
                // batches already.
                None => self.move_open().await?,
            }
            if self.journal.is_half_full() {
                self.filled.notify_one();
            }
        }
        self.engine.flush().await?;
        assert!(self.durable.get() <= covered && wanted <= covered, "durable commits only get more");
        self.durable.set(covered);
        self.flushes.set(self.flushes.get() + 1);
        Ok(())
    }

    async fn try_get_many(&self, keys: Vec<Vec<u8>>) -> Result<Vec<Option<Vec<u8>>>, KvError> {
        self.check()?;
        let find = |key: &Vec<u8>| self.pending.borrow().find(key).cloned();
        let mut values: Vec<Option<Option<Vec<u8>>>> = keys.iter().map(find).collect();
        if values.iter().all(Option::is_some) {
            return Ok(values.into_iter().flatten().collect());
        }
        let _moment = self.still.read().await;
        // Looks again: a batch may have moved while this waited.
        values = keys.iter().map(find).collect();
        let missing = keys.into_iter().zip(&values).filter(|(_, value)| value.is_none());
        let mut found = self.engine.get_many(None, missing.map(|(key, _)| key).collect()).await?.into_iter();
        let fill = |value: Option<Option<Vec<u8>>>| value.unwrap_or_else(|| found.next().flatten());
        let values = values.into_iter().map(fill).collect();
        assert!(found.next().is_none(), "every value of the engine has its place");
        Ok(values)
    }

    async fn try_scan(
        &self,
        columns: Columns,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> Result<Vec<Row>, KvError> {
        self.check()?;
        let _moment = self.still.read().await;
        let changed = self.pending.borrow().range(&from, &until);
        let scan = async |from, until| self.engine.scan(None, columns, from, until, limit).await;
        merge(changed, scan, from, until, limit).await
    }

    async fn try_snapshot(&self) -> Result<Rc<dyn KvRead>, KvError> {
        self.check()?;
        // No batch moves or begins to, so the engine has nothing that is not among these, or before them, and
        // what it has written is what the moment has.
        let _in_order = self.move_lock.lock().await;
        self.check()?;
        let changed = self.pending.borrow().all();
        Ok(Rc::new(Snapshot::new(changed, self.engine.hold().await?, &self.engine)))
    }
}

impl KvRead for AheadKv {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async move { Ok(self.try_get_many(vec![key]).await?.pop().flatten()) })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        Box::pin(self.try_get_many(keys))
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        Box::pin(self.try_scan(Columns::KeysAndValues, from, until, limit))
    }

    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        Box::pin(async move {
            let rows = self.try_scan(Columns::Keys, from, until, limit).await?;
            Ok(rows.into_iter().map(|(key, _)| key).collect())
        })
    }
}

impl Kv for AheadKv {
    fn snapshot(&self) -> LocalBoxFuture<'_, Result<Rc<dyn KvRead>, KvError>> {
        Box::pin(self.try_snapshot())
    }

    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(self.try_commit(writes))
    }

    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async move {
            self.try_commit(writes).await?;
            self.flush().await
        })
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(self.latency.flush.time(&self.env, self.try_flush()))
    }

    fn usage(&self) -> Usage {
        let pending = self.pending.borrow();
        let (stored_bytes, budget_bytes) = self.engine.space();
        let used_bytes = stored_bytes + pending.open.bytes + pending.moving.bytes;
        Usage { used_bytes, budget_bytes, commits: self.commits.get(), flushes: self.flushes.get() }
    }
}
