//! A store in memory, for tests of the layers above: no volume, no thread, no time.
//!
//! It behaves like the engine on a volume as far as callers can tell: order, atomic transactions, budget and
//! headroom, and after a crash exactly the flushed transactions ([`MemKv::crash`]).

use crate::{Kv, KvError, KvRead, Row, Usage, WriteSet, pieces};
use penstock_base::LocalBoxFuture;
use penstock_base::env::yield_now;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

type Rows = BTreeMap<Vec<u8>, Vec<u8>>;

/// Rows in memory.
pub struct MemKv {
    rows: RefCell<Rows>,
    durable: RefCell<Rows>,
    budget_bytes: u64,
    commits: Cell<u64>,
    flushes: Cell<u64>,
    /// Transactions that still succeed; none if all do.
    until_failure: Cell<Option<u64>>,
    fails_reads: Cell<bool>,
    fails_flushes: Cell<bool>,
    waits_after_reads: Cell<bool>,
}

fn told_to_fail() -> KvError {
    KvError::Engine("told to fail".to_owned())
}

impl MemKv {
    /// An empty store with a budget in bytes of rows.
    pub fn new(budget_bytes: u64) -> Rc<Self> {
        Self::with_rows(Rows::new(), budget_bytes)
    }

    fn with_rows(rows: Rows, budget_bytes: u64) -> Rc<Self> {
        Rc::new(Self {
            rows: RefCell::new(rows),
            durable: RefCell::default(),
            budget_bytes,
            commits: Cell::new(0),
            flushes: Cell::new(0),
            until_failure: Cell::new(None),
            fails_reads: Cell::new(false),
            fails_flushes: Cell::new(false),
            waits_after_reads: Cell::new(false),
        })
    }

    /// Lets `transactions` more succeed; those after them fail with [`KvError::Engine`] and change nothing.
    pub fn fail_after(&self, transactions: u64) {
        self.until_failure.set(Some(transactions));
    }

    /// Lets all reads fail with [`KvError::Engine`], or none.
    pub fn fail_reads(&self, fails: bool) {
        self.fails_reads.set(fails);
    }

    /// Lets all flushes fail with [`KvError::Engine`], or none.
    pub fn fail_flushes(&self, fails: bool) {
        self.fails_flushes.set(fails);
    }

    /// Lets other tasks run between a read by key and its return, so that transactions may follow before the
    /// caller sees what was read. Otherwise nothing here waits.
    pub fn wait_after_reads(&self) {
        self.waits_after_reads.set(true);
    }

    async fn wait_after_read(&self) {
        if self.waits_after_reads.get() {
            yield_now().await;
        }
    }

    fn check_reads(&self) -> Result<(), KvError> {
        if self.fails_reads.get() { Err(told_to_fail()) } else { Ok(()) }
    }

    /// Forgets everything that was not flushed, as a crash does, and lets transactions succeed again.
    pub fn crash(&self) {
        *self.rows.borrow_mut() = self.durable.borrow().clone();
        self.until_failure.set(None);
    }

    /// All rows, in order.
    pub fn rows(&self) -> Vec<Row> {
        self.rows.borrow().iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    /// All rows that a crash leaves, in order.
    pub fn durable_rows(&self) -> Vec<Row> {
        self.durable.borrow().iter().map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    fn used_bytes(&self) -> u64 {
        self.rows.borrow().iter().map(|(key, value)| pieces::row_bytes(key, value.len())).sum()
    }

    fn apply(&self, writes: &WriteSet) -> Result<(), KvError> {
        if let Some(left) = self.until_failure.get() {
            let left = left.checked_sub(1).ok_or_else(told_to_fail)?;
            self.until_failure.set(Some(left));
        }
        let used_bytes = self.used_bytes();
        let (new_bytes, old_bytes) = {
            let (rows, newest) = (self.rows.borrow(), writes.newest());
            writes.newest_bytes(newest.keys().map(|key| rows.get(*key).map(Vec::len)))
        };
        let most_bytes = writes.reserve.most_bytes(self.budget_bytes);
        if new_bytes > old_bytes && used_bytes + (new_bytes - old_bytes) > most_bytes {
            return Err(KvError::NoSpace { used_bytes, budget_bytes: self.budget_bytes });
        }
        let mut rows = self.rows.borrow_mut();
        for (key, value) in writes.changes() {
            match value {
                Some(value) => drop(rows.insert(key.to_vec(), value.to_vec())),
                None => drop(rows.remove(key)),
            }
        }
        drop(rows);
        assert_eq!(self.used_bytes() + old_bytes, used_bytes + new_bytes, "the budget counts rows otherwise");
        self.commits.set(self.commits.get() + 1);
        Ok(())
    }

    fn make_durable(&self) {
        self.durable.borrow_mut().clone_from(&self.rows.borrow());
        self.flushes.set(self.flushes.get() + 1);
    }

    fn range(&self, from: Vec<u8>, until: Vec<u8>, limit: usize) -> Vec<Row> {
        if from >= until {
            return Vec::new();
        }
        let rows = self.rows.borrow();
        rows.range(from..until).take(limit).map(|(key, value)| (key.clone(), value.clone())).collect()
    }
}

impl KvRead for MemKv {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async move {
            self.check_reads()?;
            let found = self.rows.borrow().get(&key).cloned();
            self.wait_after_read().await;
            Ok(found)
        })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        Box::pin(async move {
            self.check_reads()?;
            let found = {
                let rows = self.rows.borrow();
                keys.iter().map(|key| rows.get(key).cloned()).collect()
            };
            self.wait_after_read().await;
            Ok(found)
        })
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        Box::pin(async move {
            self.check_reads()?;
            Ok(self.range(from, until, limit))
        })
    }

    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        Box::pin(async move {
            self.check_reads()?;
            Ok(self.range(from, until, limit).into_iter().map(|(key, _)| key).collect())
        })
    }
}

impl Kv for MemKv {
    fn snapshot(&self) -> LocalBoxFuture<'_, Result<Rc<dyn KvRead>, KvError>> {
        Box::pin(async {
            self.check_reads()?;
            let rows: Rc<dyn KvRead> = Self::with_rows(self.rows.borrow().clone(), self.budget_bytes);
            Ok(rows)
        })
    }

    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async move { self.apply(&writes) })
    }

    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async move {
            self.apply(&writes)?;
            self.make_durable();
            Ok(())
        })
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async move {
            if self.fails_flushes.get() {
                return Err(told_to_fail());
            }
            self.make_durable();
            Ok(())
        })
    }

    fn usage(&self) -> Usage {
        Usage {
            used_bytes: self.used_bytes(),
            budget_bytes: self.budget_bytes,
            commits: self.commits.get(),
            flushes: self.flushes.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn now<T>(future: impl Future<Output = T>) -> T {
        future.now_or_never().expect("a store in memory never waits")
    }

    fn put(kv: &MemKv, key: &str, bytes: usize) -> Result<(), KvError> {
        let mut writes = WriteSet::new();
        writes.put(key.into(), vec![7; bytes]);
        now(kv.commit(writes))
    }

    fn keys(kv: &MemKv) -> Vec<String> {
        kv.rows().into_iter().map(|(key, _)| String::from_utf8(key).unwrap()).collect()
    }

    #[test]
    fn a_crash_keeps_exactly_the_flushed_transactions() {
        let kv = MemKv::new(1 << 20);
        put(&kv, "b", 1).unwrap();
        put(&kv, "a", 1).unwrap();
        now(kv.flush()).unwrap();
        let mut writes = WriteSet::new();
        writes.delete("a".into()).put("c".into(), vec![]);
        now(kv.commit(writes)).unwrap();
        assert_eq!(keys(&kv), ["b", "c"]);
        kv.crash();
        assert_eq!(keys(&kv), ["a", "b"]);
        assert_eq!(now(kv.keys("a".into(), "b".into(), 9)).unwrap(), [b"a".to_vec()]);
        assert_eq!(now(kv.scan("b".into(), "a".into(), 9)).unwrap(), []);
    }

    #[test]
    fn a_full_store_takes_what_frees_space() {
        let kv = MemKv::new(1000);
        put(&kv, "a", 800).unwrap();
        put(&kv, "a", 700).unwrap();
        assert!(matches!(put(&kv, "b", 800), Err(KvError::NoSpace { .. })));
        let mut writes = WriteSet::new();
        writes.put("b".into(), vec![7; 800]).reclaims();
        now(kv.commit(writes)).unwrap();
        assert_eq!((keys(&kv).len(), kv.usage().commits), (2, 3));
    }

    #[test]
    fn a_failed_transaction_changes_nothing() {
        let kv = MemKv::new(1 << 20);
        kv.fail_after(1);
        put(&kv, "a", 1).unwrap();
        assert!(matches!(put(&kv, "b", 1), Err(KvError::Engine(_))));
        assert_eq!(keys(&kv), ["a"]);
        kv.crash();
        put(&kv, "b", 1).unwrap();
        assert_eq!(keys(&kv), ["b"]);
    }
}
