//! redb on a volume as a [`Kv`].

use crate::lane::{Job, Lanes, Mode, Outcome};
use crate::volume::VolumeFile;
use crate::{Kv, KvError, Row, Usage, WriteSet};
use penstock_array::Volume;
use penstock_base::{Env, Histogram, LocalBoxFuture};
use std::cell::Cell;
use std::rc::Rc;

/// A B-tree's pages are at least half full, and a tenth of the rest is for transactions that reclaim.
fn budget(capacity_bytes: u64) -> u64 {
    capacity_bytes / 2 / 10 * 9
}

/// How long commits and flushes took, waits for those before them included.
#[derive(Default)]
pub struct KvLatency {
    /// Commits of the engine: batches of what was committed to memory before.
    pub commit: Histogram,
    /// Flushes, until what was committed before is durable; at once where nothing was.
    pub flush: Histogram,
}

/// An ordered key-value store in redb on a volume.
pub struct RedbKv {
    env: Env,
    latency: KvLatency,
    lanes: Lanes,
    file: Rc<VolumeFile>,
    usage: Cell<Usage>,
    committed: Cell<u64>,
    durable: Cell<u64>,
    flush_lock: tokio::sync::Mutex<()>,
    broken: Cell<bool>,
}

impl RedbKv {
    /// Opens the store on `volume`; an empty volume gets an empty store.
    pub async fn open(env: &Env, volume: Volume, mode: Mode) -> Result<Rc<Self>, KvError> {
        let engine = |error: penstock_array::ArrayError| KvError::Engine(error.to_string());
        let file = Rc::new(VolumeFile::open(volume).await.map_err(engine)?);
        let lanes = Lanes::start(env, mode, file.clone())
            .map_err(|error| KvError::Engine(format!("no thread: {error}")))?;
        let used_bytes = match lanes.write(Job::Open).await? {
            Outcome::Done { used_bytes } => used_bytes,
            other => return Err(KvError::Engine(format!("unexpected {other:?}"))),
        };
        file.flush().await.map_err(engine)?;
        let budget_bytes = budget(file.capacity_bytes());
        Ok(Rc::new(Self {
            env: env.clone(),
            latency: KvLatency::default(),
            lanes,
            file,
            usage: Cell::new(Usage { used_bytes, budget_bytes, ..Usage::default() }),
            committed: Cell::new(0),
            durable: Cell::new(0),
            flush_lock: tokio::sync::Mutex::default(),
            broken: Cell::new(false),
        }))
    }

    /// How long its commits and flushes took.
    pub fn latency(&self) -> &KvLatency {
        &self.latency
    }

    fn note(&self, change: impl FnOnce(&mut Usage)) {
        let mut usage = self.usage.get();
        change(&mut usage);
        self.usage.set(usage);
    }

    /// An engine that failed once is not used again: what it holds in memory is not known any more.
    fn check(&self) -> Result<(), KvError> {
        match self.broken.get() {
            true => Err(KvError::Engine("it failed before".into())),
            false => Ok(()),
        }
    }

    fn watch<T>(&self, result: Result<T, KvError>) -> Result<T, KvError> {
        if let Err(KvError::Engine(why)) = &result
            && !self.broken.replace(true)
        {
            tracing::error!(why, "the key-value engine failed; the services that use it stop");
        }
        result
    }

    fn check_room(&self, writes: &WriteSet) -> Result<(), KvError> {
        let Usage { used_bytes, budget_bytes, .. } = self.usage.get();
        match writes.reclaims || used_bytes + writes.bytes() <= budget_bytes {
            true => Ok(()),
            false => Err(KvError::NoSpace { used_bytes, budget_bytes }),
        }
    }

    /// Runs a transaction; `durable` is not on the volume before its flush.
    async fn transact(&self, writes: WriteSet, durable: bool) -> Result<(), KvError> {
        self.check()?;
        self.check_room(&writes)?;
        let empty = writes.is_empty();
        match self.watch(self.lanes.write(Job::Commit(writes, durable)).await)? {
            Outcome::Done { used_bytes } => self.note(|usage| {
                usage.used_bytes = used_bytes;
                usage.commits += u64::from(!empty);
            }),
            other => return Err(KvError::Engine(format!("unexpected {other:?}"))),
        }
        self.committed.set(self.committed.get() + 1);
        Ok(())
    }

    async fn try_flush(&self, writes: WriteSet) -> Result<(), KvError> {
        let wanted = self.committed.get();
        if writes.is_empty() && self.durable.get() >= wanted {
            return Ok(());
        }
        // Whoever waited here may find that the one before made its commits durable too.
        let _one_at_a_time = self.flush_lock.lock().await;
        if writes.is_empty() && self.durable.get() >= wanted {
            return Ok(());
        }
        self.transact(writes, true).await?;
        let covered = self.committed.get();
        self.watch(self.file.flush().await.map_err(|error| KvError::Engine(error.to_string())))?;
        self.durable.set(covered);
        self.note(|usage| usage.flushes += 1);
        Ok(())
    }
}

impl Kv for RedbKv {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async move { Ok(self.get_many(vec![key]).await?.pop().flatten()) })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        Box::pin(async move {
            self.check()?;
            match self.watch(self.lanes.read(Job::Get(keys)).await)? {
                Outcome::Values(values) => Ok(values),
                other => Err(KvError::Engine(format!("unexpected {other:?}"))),
            }
        })
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        Box::pin(async move {
            self.check()?;
            match self.watch(self.lanes.read(Job::Scan(from, until, limit)).await)? {
                Outcome::Rows(rows) => Ok(rows),
                other => Err(KvError::Engine(format!("unexpected {other:?}"))),
            }
        })
    }

    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(self.latency.commit.time(&self.env, self.transact(writes, false)))
    }

    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(self.latency.flush.time(&self.env, self.try_flush(writes)))
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(self.latency.flush.time(&self.env, self.try_flush(WriteSet::new())))
    }

    fn usage(&self) -> Usage {
        self.usage.get()
    }
}
