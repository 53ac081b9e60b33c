//! Transactions in memory ahead of an engine.
//!
//! An engine takes a transaction on a thread of its own; handing it over costs more than the transaction. So a commit
//! goes to memory, where every later read sees it, and many of them go to the engine as one transaction: after
//! [`REST`], when they are [`FULL_BYTES`] long (less in a small store), or with a flush.
//!
//! Two maps hold what the engine does not have yet: *open* takes commits, *moving* is on its way to the engine. A read
//! looks into open, then moving, then the engine.
//!
//! Invariants:
//! - batches go to the engine one at a time and in order, and a transaction is wholly in one batch, so the engine
//!   holds a prefix of the transactions;
//! - a batch leaves memory only when the engine has it;
//! - a read of several rows sees one moment: no batch begins to move while it looks ([`AheadKv::still`]);
//! - memory is bounded: a commit waits while open is longer than its bound.
//!
//! Power cut: what was in memory is lost, as commits since the last flush may be.

use crate::{Kv, KvError, Row, Usage, WriteSet};
use penstock_base::{Env, LocalBoxFuture};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{Mutex, Notify, RwLock};

/// A batch of this many bytes moves at once.
const FULL_BYTES: u64 = 256 << 10;
/// Commits wait above this many bytes, or above this share of the store: the engine writes every page that a
/// transaction changes to a new place before it frees the old one.
const MOST_BYTES: u64 = 4 << 20;
const MOST_SHARE: u64 = 256;
/// A commit moves at the latest after this.
const REST: Duration = Duration::from_millis(100);

/// Changed rows; `None` is a row that is gone.
type Rows = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

#[derive(Default)]
struct Pending {
    open: Rows,
    open_bytes: u64,
    moving: Rows,
    moving_bytes: u64,
}

impl Pending {
    fn find(&self, key: &[u8]) -> Option<&Option<Vec<u8>>> {
        self.open.get(key).or_else(|| self.moving.get(key))
    }

    /// The changed rows in a range, newest first to win.
    fn range(&self, from: &[u8], until: &[u8]) -> Rows {
        let bounds = (Bound::Included(from), Bound::Excluded(until));
        let mut rows: Rows =
            self.moving.range::<[u8], _>(bounds).map(|(key, value)| (key.clone(), value.clone())).collect();
        rows.extend(self.open.range::<[u8], _>(bounds).map(|(key, value)| (key.clone(), value.clone())));
        rows
    }
}

/// A store whose commits go to memory first.
pub struct AheadKv {
    engine: Rc<dyn Kv>,
    pending: RefCell<Pending>,
    /// Transactions committed here.
    commits: Cell<u64>,
    full_bytes: u64,
    most_bytes: u64,
    /// Held shared by reads of several rows, and exclusively for the moment in which a batch begins to move.
    still: RwLock<()>,
    move_lock: Mutex<()>,
    /// Something is open.
    opened: Notify,
    /// Open is long.
    filled: Notify,
    /// A batch arrived.
    moved: Notify,
    failed: RefCell<Option<KvError>>,
    closed: Cell<bool>,
}

impl AheadKv {
    /// A store ahead of `engine`.
    pub fn new(env: &Env, engine: Rc<dyn Kv>) -> Rc<Self> {
        let most_bytes = MOST_BYTES.min(engine.usage().budget_bytes / MOST_SHARE);
        let ahead = Rc::new(Self {
            full_bytes: FULL_BYTES.min(most_bytes / 2),
            most_bytes,
            engine,
            pending: RefCell::default(),
            commits: Cell::new(0),
            still: RwLock::default(),
            move_lock: Mutex::default(),
            opened: Notify::new(),
            filled: Notify::new(),
            moved: Notify::new(),
            failed: RefCell::default(),
            closed: Cell::new(false),
        });
        env.spawn("kv ahead", Box::pin(ahead.clone().move_task(env.clone())));
        ahead
    }

    /// Stops the task that moves batches. What is committed and not flushed is lost.
    pub fn stop(&self) {
        self.closed.set(true);
        self.opened.notify_one();
        self.filled.notify_one();
    }

    fn check(&self) -> Result<(), KvError> {
        self.failed.borrow().clone().map_or(Ok(()), Err)
    }

    async fn move_task(self: Rc<Self>, env: Env) {
        while !self.closed.get() {
            if self.pending.borrow().open.is_empty() {
                self.opened.notified().await;
                continue;
            }
            if self.pending.borrow().open_bytes < self.full_bytes {
                let rest = std::pin::pin!(env.sleep(REST));
                let filled = std::pin::pin!(self.filled.notified());
                futures_util::future::select(rest, filled).await;
            }
            if !self.closed.get() && self.move_open(false).await.is_err() {
                // Everybody who asks from now on hears of it.
                return;
            }
        }
    }

    /// Moves what is open to the engine; with `flush`, durably.
    async fn move_open(&self, flush: bool) -> Result<(), KvError> {
        let _in_order = self.move_lock.lock().await;
        self.check()?;
        {
            let _moment = self.still.write().await;
            let mut pending = self.pending.borrow_mut();
            assert!(pending.moving.is_empty(), "one batch moves at a time");
            pending.moving = std::mem::take(&mut pending.open);
            pending.moving_bytes = std::mem::take(&mut pending.open_bytes);
        }
        let changes: Vec<_> =
            self.pending.borrow().moving.iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        // Whether there is room was asked when each was committed.
        let writes = WriteSet { changes, reclaims: true };
        let result = match flush {
            true => self.engine.commit_durable(writes).await,
            false => self.engine.commit(writes).await,
        };
        match &result {
            Ok(()) => {
                let mut pending = self.pending.borrow_mut();
                pending.moving.clear();
                pending.moving_bytes = 0;
            }
            // What was acknowledged cannot be kept any more: nothing is taken from now on.
            Err(error) => *self.failed.borrow_mut() = Some(error.clone()),
        }
        self.moved.notify_waiters();
        result
    }

    async fn try_commit(&self, writes: WriteSet) -> Result<(), KvError> {
        loop {
            self.check()?;
            let Usage { used_bytes, budget_bytes, .. } = self.usage();
            if !writes.reclaims && used_bytes + writes.bytes() > budget_bytes {
                if self.pending.borrow().open.is_empty() && self.pending.borrow().moving.is_empty() {
                    return Err(KvError::NoSpace { used_bytes, budget_bytes });
                }
                // Rows in memory are counted as new; the engine knows which replace others.
                self.move_open(false).await?;
                continue;
            }
            if self.pending.borrow().open_bytes <= self.most_bytes {
                break;
            }
            let moved = self.moved.notified();
            self.filled.notify_one();
            moved.await;
        }
        let bytes = writes.bytes();
        let mut pending = self.pending.borrow_mut();
        pending.open_bytes += bytes;
        pending.open.extend(writes.changes);
        self.commits.set(self.commits.get() + 1);
        self.opened.notify_one();
        if pending.open_bytes >= self.full_bytes {
            self.filled.notify_one();
        }
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
        // Again: something may have moved while this waited.
        values = keys.iter().map(find).collect();
        let missing = keys.into_iter().zip(&values).filter(|(_, value)| value.is_none());
        let mut found = self.engine.get_many(missing.map(|(key, _)| key).collect()).await?.into_iter();
        let fill = |value: Option<Option<Vec<u8>>>| value.unwrap_or_else(|| found.next().flatten());
        Ok(values.into_iter().map(fill).collect())
    }

    async fn try_scan(&self, mut from: Vec<u8>, until: Vec<u8>, limit: usize) -> Result<Vec<Row>, KvError> {
        self.check()?;
        let _moment = self.still.read().await;
        let mut changed = self.pending.borrow().range(&from, &until);
        let mut rows = Vec::new();
        loop {
            let stored = self.engine.scan(from, until.clone(), limit).await?;
            let last = stored.len() < limit;
            let end = stored.last().map(|(key, _)| key.clone());
            let mut stored = stored.into_iter().peekable();
            // Both are in order, and a changed row takes the place of the stored one.
            loop {
                let next = match (changed.first_key_value(), stored.peek()) {
                    (Some((mine, _)), Some((theirs, _))) if mine <= theirs => {
                        if mine == theirs {
                            stored.next();
                        }
                        changed.pop_first()
                    }
                    (_, Some(_)) => stored.next().map(|(key, value)| (key, Some(value))),
                    // Behind the last stored row of a full page there may be more that comes first.
                    (Some(_), None) if last => changed.pop_first(),
                    (_, None) => None,
                };
                let Some((key, value)) = next else { break };
                rows.extend(value.map(|value| (key, value)));
                if rows.len() == limit {
                    return Ok(rows);
                }
            }
            match end {
                Some(end) if !last => from = [&end[..], &[0]].concat(),
                _ => return Ok(rows),
            }
        }
    }
}

impl Kv for AheadKv {
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
        Box::pin(self.try_scan(from, until, limit))
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
        Box::pin(async move {
            self.check()?;
            let nothing = {
                let pending = self.pending.borrow();
                pending.open.is_empty() && pending.moving.is_empty()
            };
            match nothing {
                true => self.engine.flush().await,
                false => self.move_open(true).await,
            }
        })
    }

    fn usage(&self) -> Usage {
        let pending = self.pending.borrow();
        let usage = self.engine.usage();
        let used_bytes = usage.used_bytes + pending.open_bytes + pending.moving_bytes;
        Usage { used_bytes, commits: self.commits.get(), ..usage }
    }
}
