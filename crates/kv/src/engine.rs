//! The engine: redb on a volume, with its space budget.

use crate::journal::Mark;
use crate::lane::{Engine, Job, Lanes, Outcome, Tables};
use crate::moment::Moment;
use crate::volume::VolumeFile;
use crate::{Columns, KvError, Row, WriteSet};
use penstock_array::Volume;
use penstock_base::Env;
use std::cell::{Cell, OnceCell, RefCell};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

/// The bytes of rows that a file of `capacity_bytes` may hold: a quarter of it.
///
/// Rows are short compared with a page, and each counts with its share of the pages above it
/// ([`crate::pieces`]). redb merges a page that is less than a third full with its neighbour (`page_size / 3`
/// in its btree_mutator.rs). So rows take at most three times the bytes that they count for. The last quarter
/// is for transactions that free space, for pages that become free only after the next transaction, and for
/// separator keys that are longer than the average key.
fn budget(capacity_bytes: u64) -> u64 {
    capacity_bytes / BUDGET_PART
}

const BUDGET_PART: u64 = 4;

/// Pause between two looks if a read of one page of rows has ended.
const READ_ENDS: Duration = Duration::from_millis(1);

/// A row may change a page of its own and one branch page above it, and the pages of three transactions exist
/// at the same time.
pub(crate) const PAGES_OF_A_ROW: u64 = 2 * 3;
pub(crate) const PAGE_BYTES: u64 = 4096;

/// Bytes that the pages changed by a transaction may take, which has so many rows with so many bytes.
pub(crate) fn changed_bytes(rows: u64, bytes: u64) -> u64 {
    rows * PAGES_OF_A_ROW * PAGE_BYTES + 3 * bytes
}

/// Size of a region of redb's file (`MAX_USABLE_REGION_SPACE` in its page_manager.rs).
const REGION_BYTES: u64 = 4 << 30;

/// The longest length that redb's file can reach from `len` bytes within a volume of `capacity_bytes`.
///
/// redb doubles the file up to one region and then adds regions. It allocates pages anywhere in the file. So
/// a file that is longer than the volume has pages that cannot be written, even if few are in use.
fn reach(len: u64, capacity_bytes: u64) -> u64 {
    let grown = |len: u64| if len < REGION_BYTES { len * 2 } else { len + REGION_BYTES };
    let mut len = len;
    while len > 0 && grown(len) <= capacity_bytes {
        len = grown(len);
    }
    // The file is longer than the volume: only its length before the last step may be writable.
    while len > capacity_bytes {
        len = if len <= REGION_BYTES { len / 2 } else { len - REGION_BYTES };
    }
    len
}

/// An ordered key-value store in redb on a volume.
pub struct RedbKv {
    env: Env,
    lanes: Lanes,
    file: Rc<VolumeFile>,
    /// The mark that an earlier opening has stored, and that of the last transaction.
    mark: Option<Mark>,
    newest_mark: Cell<Option<Mark>>,
    used_bytes: Cell<u64>,
    moments: RefCell<Vec<Weak<Moment>>>,
    /// The error after which the engine is not used any more.
    broken: OnceCell<String>,
}

impl RedbKv {
    /// Opens the store on `volume`. An empty volume gets an empty store.
    pub async fn open(env: &Env, volume: Volume, engine: Engine) -> Result<Rc<Self>, KvError> {
        assert!(engine.cache_bytes > 0, "an engine has a cache");
        let file = Rc::new(VolumeFile::open(volume).await?);
        let lanes = Lanes::start(env, engine.mode, file.clone())
            .map_err(|error| KvError::Engine(format!("no thread: {error}")))?;
        let opened = async {
            match lanes.write(Job::Open(engine.cache_bytes)).await? {
                Outcome::Opened { used_bytes, mark } => {
                    file.flush().await?;
                    Ok((used_bytes, mark))
                }
                other => Err(KvError::Engine(format!("unexpected {other:?}"))),
            }
        };
        // Otherwise it may write when it closes, which is later.
        let (used_bytes, mark) = opened.await.inspect_err(|_| file.retire())?;
        Ok(Rc::new(Self {
            env: env.clone(),
            lanes,
            file,
            mark,
            newest_mark: Cell::new(mark),
            used_bytes: Cell::new(used_bytes),
            moments: RefCell::default(),
            broken: OnceCell::new(),
        }))
    }

    /// Returns an error once the engine has failed: its state in memory is unknown from then on.
    fn check(&self) -> Result<(), KvError> {
        match self.broken.get() {
            Some(why) => Err(KvError::Engine(format!("it failed before: {why}"))),
            None => Ok(()),
        }
    }

    /// The engine writes nothing any more, not even when it is closed.
    pub fn retire(&self) {
        self.file.retire();
    }

    /// The error after which the engine is not used any more, if there was one.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    fn watch<T>(&self, result: Result<T, KvError>) -> Result<T, KvError> {
        if let Err(KvError::Engine(why) | KvError::Corrupt(why)) = &result
            && self.broken.set(why.clone()).is_ok()
        {
            tracing::error!(why, "the key-value engine failed; the services that use it stop");
        }
        result
    }

    /// Runs a transaction that also stores the journal's mark. When this returns, its writes have their place
    /// in the volume's order, but are not durable. Does not check the space: that was done when the changes
    /// went to memory.
    pub(crate) async fn commit(&self, writes: WriteSet, mark: Mark) -> Result<(), KvError> {
        self.check()?;
        self.keep_pages_for(&writes).await?;
        self.store(writes, mark).await
    }

    async fn store(&self, writes: WriteSet, mark: Mark) -> Result<(), KvError> {
        match self.watch(self.lanes.write(Job::Commit(writes, mark)).await)? {
            Outcome::Done { used_bytes } => self.used_bytes.set(used_bytes),
            other => return Err(KvError::Engine(format!("unexpected {other:?}"))),
        }
        self.newest_mark.set(Some(mark));
        Ok(())
    }

    /// Holds the rows of this moment. No transaction may begin meanwhile.
    pub(crate) async fn hold(&self) -> Result<Rc<Moment>, KvError> {
        self.check()?;
        match self.watch(self.lanes.read(Job::Hold).await)? {
            Outcome::Held(tables) => {
                let moment = Rc::new(Moment::new(tables, self.used_bytes.get(), self.file.written_bytes()));
                let mut moments = self.moments.borrow_mut();
                moments.retain(|moment| moment.strong_count() > 0);
                moments.push(Rc::downgrade(&moment));
                Ok(moment)
            }
            other => Err(KvError::Engine(format!("unexpected {other:?}"))),
        }
    }

    /// True if somebody may read the rows of an earlier moment.
    pub(crate) fn is_held(&self) -> bool {
        self.moments.borrow().iter().filter_map(Weak::upgrade).any(|moment| moment.is_held())
    }

    /// Gives up the moments that are held, if the engine might run out of free pages within this transaction.
    async fn keep_pages_for(&self, writes: &WriteSet) -> Result<(), KvError> {
        let held = || -> Vec<Rc<Moment>> {
            let all = self.moments.borrow();
            all.iter().filter_map(Weak::upgrade).filter(|moment| moment.is_held()).collect()
        };
        let (_, budget_bytes) = self.space();
        // A commit of the caller before this one has needed as much.
        let needed = 2 * changed_bytes(writes.changes().count() as u64, writes.bytes());
        let most = held().iter().map(|moment| moment.most_bytes(self.file.written_bytes())).max();
        if most.is_none_or(|most| most + needed <= BUDGET_PART * budget_bytes) {
            return Ok(());
        }
        tracing::info!("a snapshot of the key-value store is given up: changes need its space");
        while let Some(moment) = held().first() {
            let tables = moment.give_up();
            // A read may have them yet. Nobody begins another one.
            while tables.strong_count() > 0 {
                self.env.sleep(READ_ENDS).await;
            }
        }
        assert!(!self.is_held(), "no moment is held while pages are made free");
        // Pages are free in the transaction after the one that finds nobody who reads them.
        for _ in 0..2 {
            if let Some(mark) = self.newest_mark.get() {
                self.store(WriteSet::new(), mark).await?;
            }
        }
        Ok(())
    }

    /// Makes everything written to the volume durable.
    pub(crate) async fn flush(&self) -> Result<(), KvError> {
        self.check()?;
        self.watch(self.file.flush().await.map_err(KvError::from))
    }

    /// The values of several keys, as they were at one moment: of `tables`, or of now.
    pub(crate) async fn get_many(
        &self,
        tables: Option<Arc<Tables>>,
        keys: Vec<Vec<u8>>,
    ) -> Result<Vec<Option<Vec<u8>>>, KvError> {
        self.check()?;
        match self.watch(self.lanes.read(Job::Get(tables, keys)).await)? {
            Outcome::Values(values) => Ok(values),
            other => Err(KvError::Engine(format!("unexpected {other:?}"))),
        }
    }

    /// Up to `limit` rows with `from <= key < until`, in order of the keys. The values are empty if only keys
    /// are read.
    pub(crate) async fn scan(
        &self,
        tables: Option<Arc<Tables>>,
        columns: Columns,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> Result<Vec<Row>, KvError> {
        self.check()?;
        match self.watch(self.lanes.read(Job::Scan(tables, columns, from, until, limit)).await)? {
            Outcome::Rows(rows) => Ok(rows),
            other => Err(KvError::Engine(format!("unexpected {other:?}"))),
        }
    }

    /// The mark that the last transaction of an earlier opening stored; none in a new store.
    pub(crate) fn mark(&self) -> Option<Mark> {
        self.mark
    }

    /// The volume below, with the journal's ring.
    pub(crate) fn file(&self) -> &Rc<VolumeFile> {
        &self.file
    }

    /// Bytes that all rows count for, and the budget for them.
    pub(crate) fn space(&self) -> (u64, u64) {
        (self.used_bytes.get(), budget(reach(self.file.len(), self.file.capacity_bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_grows_no_further_than_its_volume() {
        let mib = 1 << 20;
        assert_eq!(reach(mib, 83 * mib), 64 * mib);
        assert_eq!(reach(43 * mib, 83 * mib), 43 * mib);
        assert_eq!(reach(100 * mib, 83 * mib), 50 * mib, "one that is too long has no more room for that");
        assert_eq!(reach(mib, 20 << 30), 20 << 30);
        assert_eq!(reach(mib, 21 << 30), 20 << 30);
    }
}
