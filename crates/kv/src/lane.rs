//! Engine threads: redb blocks, so it runs on threads of its own, each with one job at a time.
//!
//! On a real machine there is one writer thread and some reader threads. Tasks of the worker serve their
//! requests to the volume while other tasks go on. In the simulated world there is one thread under a baton:
//! the world is blocked while the thread computes, and the thread is blocked while the world does its I/O. So
//! one seed still gives one run. Between two requests other tasks may run, for a time drawn from the seed.
//! After a power cut every request gets an error.
#![allow(clippy::disallowed_methods)]

use crate::backend::{Answer, Ask, Backend, FromLane};
use crate::damage::{Refusal, engine};
use crate::journal::Mark;
use crate::pieces;
use crate::volume::VolumeFile;
use crate::{Columns, KvError, Row, WriteSet};
use penstock_base::Env;
use redb::{Database, ReadableDatabase, ReadableTable, TableDefinition};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;
use tokio::sync::{mpsc as channel, oneshot};

const ROWS: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("rows");
const PIECES: TableDefinition<'static, &[u8], &[u8]> = TableDefinition::new("pieces");
const SIZES: TableDefinition<'static, &str, u64> = TableDefinition::new("sizes");
const MARKS: TableDefinition<'static, &str, &[u8]> = TableDefinition::new("marks");
/// The row of [`SIZES`] with the bytes that all rows count for. Older stores have a row of another name,
/// which counted less.
const COUNTED: &str = "counted";
/// The one row of [`MARKS`].
const JOURNAL: &str = "journal";
/// Cache of an engine in bytes, if nothing else is asked for.
pub const CACHE_BYTES: usize = 64 << 20;

/// The way in which engine threads and the worker or the world take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One writer thread and this many reader threads, beside the worker.
    Threads(usize),
    /// One thread, which never runs at the same time as the world.
    Baton,
}

/// The way in which an engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Engine {
    /// Its threads.
    pub mode: Mode,
    /// Its cache of pages in bytes.
    pub cache_bytes: usize,
}

impl From<Mode> for Engine {
    fn from(mode: Mode) -> Self {
        Self { mode, cache_bytes: CACHE_BYTES }
    }
}

pub(crate) enum Job {
    /// With a cache of so many bytes.
    Open(usize),
    /// Tables of this moment, to be read later.
    Hold,
    /// From these tables, or from those of now.
    Get(Option<Arc<Tables>>, Vec<Vec<u8>>),
    Scan(Option<Arc<Tables>>, Columns, Vec<u8>, Vec<u8>, usize),
    /// A transaction with the journal's mark. It is durable after the next flush of the volume.
    Commit(WriteSet, Mark),
}

#[derive(Debug)]
pub(crate) enum Outcome {
    Done { used_bytes: u64 },
    Opened { used_bytes: u64, mark: Option<Mark> },
    Held(Arc<Tables>),
    Values(Vec<Option<Vec<u8>>>),
    Rows(Vec<Row>),
}

type Reply = oneshot::Sender<Result<Outcome, KvError>>;

struct Lane {
    jobs: mpsc::Sender<(Job, Reply)>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// The engine threads of one store.
pub(crate) struct Lanes {
    env: Env,
    mode: Mode,
    file: Rc<VolumeFile>,
    writer: Lane,
    readers: Vec<Lane>,
    next_reader: std::cell::Cell<usize>,
    /// The requests of the one thread. The owner of this lock has the baton.
    baton: tokio::sync::Mutex<Option<channel::UnboundedReceiver<FromLane>>>,
}

type Shared = Arc<std::sync::OnceLock<Database>>;

impl Lanes {
    pub(crate) fn start(env: &Env, mode: Mode, file: Rc<VolumeFile>) -> std::io::Result<Self> {
        let shared: Shared = Arc::default();
        let (worker, requests) = channel::unbounded_channel();
        let writer = start_lane("kv writer", shared.clone(), worker.clone())?;
        let count = match mode {
            Mode::Threads(readers) => readers,
            Mode::Baton => 0,
        };
        let readers = (0..count)
            .map(|_| start_lane("kv reader", shared.clone(), worker.clone()))
            .collect::<Result<_, _>>()?;
        let mut baton = Some(requests);
        if mode != Mode::Baton {
            let requests = baton.take().expect("it was just put there");
            env.spawn("kv requests", Box::pin(serve(env.clone(), file.clone(), requests)));
        }
        let baton = tokio::sync::Mutex::new(baton);
        Ok(Self { env: env.clone(), mode, file, writer, readers, next_reader: Default::default(), baton })
    }

    /// Runs a job on the writer thread.
    pub(crate) async fn write(&self, job: Job) -> Result<Outcome, KvError> {
        self.run(&self.writer, job).await
    }

    /// Runs a job on a reader thread, or on the writer thread if there is none.
    pub(crate) async fn read(&self, job: Job) -> Result<Outcome, KvError> {
        let lane = match self.readers.len() {
            0 => &self.writer,
            count => {
                let next = self.next_reader.get();
                self.next_reader.set((next + 1) % count);
                &self.readers[next % count]
            }
        };
        self.run(lane, job).await
    }

    async fn run(&self, lane: &Lane, job: Job) -> Result<Outcome, KvError> {
        let (reply, mut result) = oneshot::channel();
        if self.mode != Mode::Baton {
            lane.jobs.send((job, reply)).map_err(|_| KvError::Closed)?;
            return result.await.map_err(|_| KvError::Closed)?;
        }
        self.pause().await;
        let mut guard = self.baton.lock().await;
        let requests = guard.as_mut().ok_or(KvError::Closed)?;
        lane.jobs.send((job, reply)).map_err(|_| KvError::Closed)?;
        loop {
            // The world is blocked while the engine computes.
            match requests.blocking_recv() {
                Some(FromLane::Ask(ask, answer)) => {
                    let result = answer_to(&self.file, ask).await;
                    self.pause().await;
                    answer.send(result).map_err(|_| KvError::Closed)?;
                }
                Some(FromLane::JobDone) => return result.try_recv().map_err(|_| KvError::Closed)?,
                None => return Err(KvError::Closed),
            }
        }
    }

    /// Lets the rest of the world run before a job and between two requests of a thread, as on a real
    /// machine: the log may have appended one of two writes.
    async fn pause(&self) {
        const ONE_IN: u64 = 2;
        const MOST_US: u64 = 500;
        let drawn = self.env.random();
        if drawn.is_multiple_of(ONE_IN) {
            self.env.sleep(Duration::from_micros(drawn / ONE_IN % MOST_US)).await;
        }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        // Drops the receiver first, so that a thread that is being stopped gets an error for its requests.
        if let Ok(mut baton) = self.baton.try_lock() {
            baton.take();
        }
        for lane in std::iter::once(&mut self.writer).chain(&mut self.readers) {
            lane.jobs = mpsc::channel().0;
            // On a real machine the worker must serve the last requests, so it does not wait for the thread
            // here.
            if let (Mode::Baton, Some(thread)) = (self.mode, lane.thread.take())
                && thread.join().is_err()
            {
                tracing::error!("a key-value engine thread panicked while it stopped");
            }
        }
    }
}

async fn answer_to(file: &VolumeFile, ask: Ask) -> Result<Answer, Refusal> {
    let result = match ask {
        Ask::Len => Ok(Answer::Len(file.len())),
        Ask::SetLen(len) => file.set_len(len).await.map(|()| Answer::Done),
        Ask::Read(at, len) => file.read(at, len).await.map(Answer::Bytes),
        Ask::Write(extents) => file.write_all(extents).await.map(|()| Answer::Done),
    };
    result.map_err(Refusal::from)
}

/// Serves the requests of all threads. Each runs in a task of its own, since the threads wait independently.
async fn serve(env: Env, file: Rc<VolumeFile>, mut requests: channel::UnboundedReceiver<FromLane>) {
    while let Some(request) = requests.recv().await {
        let FromLane::Ask(ask, answer) = request else { continue };
        let file = file.clone();
        let task = async move {
            // A thread that has ended does not wait for its answer.
            let _ = answer.send(answer_to(&file, ask).await);
        };
        env.spawn("kv request", Box::pin(task));
    }
}

fn start_lane(
    name: &str,
    shared: Shared,
    worker: channel::UnboundedSender<FromLane>,
) -> std::io::Result<Lane> {
    let (jobs, inbox) = mpsc::channel::<(Job, Reply)>();
    let body = move || {
        let sizes = RefCell::new(0);
        while let Ok((job, reply)) = inbox.recv() {
            // A panic inside the engine stops the store, not the arrays below it.
            let run = std::panic::AssertUnwindSafe(|| run_job(&shared, &worker, &sizes, job));
            let result =
                std::panic::catch_unwind(run).unwrap_or_else(|_| Err(KvError::Engine("it panicked".into())));
            let _ = reply.send(result);
            let _ = worker.send(FromLane::JobDone);
        }
    };
    let thread = std::thread::Builder::new().name(name.into()).spawn(body)?;
    Ok(Lane { jobs, thread: Some(thread) })
}

fn run_job(
    shared: &Shared,
    worker: &channel::UnboundedSender<FromLane>,
    size: &RefCell<u64>,
    job: Job,
) -> Result<Outcome, KvError> {
    if let Job::Open(cache_bytes) = job {
        let database = Database::builder()
            .set_cache_size(cache_bytes)
            .create_with_backend(Backend::new(worker.clone()))
            .map_err(engine)?;
        let (used_bytes, mark) = prepare(&database)?;
        *size.borrow_mut() = used_bytes;
        shared.set(database).map_err(|_| KvError::Engine("opened twice".into()))?;
        return Ok(Outcome::Opened { used_bytes, mark });
    }
    let database = shared.get().ok_or(KvError::Closed)?;
    match job {
        Job::Open(_) => unreachable!("handled above"),
        Job::Hold => Ok(Outcome::Held(Arc::new(Tables::of(database)?))),
        Job::Get(Some(tables), keys) => tables.get(&keys),
        Job::Get(None, keys) => Tables::of(database)?.get(&keys),
        Job::Scan(Some(tables), columns, from, until, limit) => tables.scan(columns, &from, &until, limit),
        Job::Scan(None, columns, from, until, limit) => {
            Tables::of(database)?.scan(columns, &from, &until, limit)
        }
        Job::Commit(writes, mark) => commit(database, &writes, mark, &mut size.borrow_mut()),
    }
}

type ReadTable = redb::ReadOnlyTable<&'static [u8], &'static [u8]>;

/// The tables of rows and of pieces, as they were at one moment. The engine uses none of their pages again
/// while they exist.
pub(crate) struct Tables {
    rows: ReadTable,
    long: ReadTable,
}

impl std::fmt::Debug for Tables {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Tables")
    }
}

impl Tables {
    fn of(database: &Database) -> Result<Self, KvError> {
        let read = database.begin_read().map_err(engine)?;
        let open = |table| read.open_table(table).map_err(engine);
        Ok(Self { rows: open(ROWS)?, long: open(PIECES)? })
    }

    fn get(&self, keys: &[Vec<u8>]) -> Result<Outcome, KvError> {
        let get = |key: &Vec<u8>| {
            let head = self.rows.get(&key[..]).map_err(engine)?;
            head.map(|head| pieces::value(&self.long, key, head.value())).transpose()
        };
        Ok(Outcome::Values(keys.iter().map(get).collect::<Result<_, KvError>>()?))
    }

    fn scan(&self, columns: Columns, from: &[u8], until: &[u8], limit: usize) -> Result<Outcome, KvError> {
        let range = self.rows.range(from..until).map_err(engine)?;
        let mut rows = Vec::new();
        for row in range.take(limit) {
            let (key, head) = row.map_err(engine)?;
            let value = match columns {
                Columns::Keys => Vec::new(),
                Columns::KeysAndValues => pieces::value(&self.long, key.value(), head.value())?,
            };
            rows.push((key.value().to_vec(), value));
        }
        Ok(Outcome::Rows(rows))
    }
}

/// Creates the tables if need be. Returns the bytes that all rows count for, and the mark.
fn prepare(database: &Database) -> Result<(u64, Option<Mark>), KvError> {
    let mut transaction = database.begin_write().map_err(engine)?;
    transaction.set_quick_repair(true);
    let found = {
        transaction.open_table(ROWS).map_err(engine)?;
        transaction.open_table(PIECES).map_err(engine)?;
        let counted = {
            let sizes = transaction.open_table(SIZES).map_err(engine)?;
            sizes.get(COUNTED).map_err(engine)?.map(|size| size.value())
        };
        let used = match counted {
            Some(used) => used,
            None => {
                let used = pieces::count(&transaction.open_table(ROWS).map_err(engine)?)?;
                transaction.open_table(SIZES).map_err(engine)?.insert(COUNTED, used).map_err(engine)?;
                used
            }
        };
        let marks = transaction.open_table(MARKS).map_err(engine)?;
        let mark = marks.get(JOURNAL).map_err(engine)?.map(|mark| Mark::decode(mark.value()));
        (used, mark.transpose()?)
    };
    transaction.commit().map_err(engine)?;
    Ok(found)
}

fn commit(database: &Database, writes: &WriteSet, mark: Mark, size: &mut u64) -> Result<Outcome, KvError> {
    let mut transaction = database.begin_write().map_err(engine)?;
    // Costs each commit a little, so that a start after a crash reads no more than one after a clean stop.
    transaction.set_quick_repair(true);
    let (mut added, mut removed) = (0u64, 0u64);
    if !writes.is_empty() {
        let mut rows = transaction.open_table(ROWS).map_err(engine)?;
        let mut long = transaction.open_table(PIECES).map_err(engine)?;
        for (key, value) in &writes.changes {
            added += value.as_ref().map_or(0, |value| pieces::row_bytes(key, value.len()));
            removed += pieces::put(&mut rows, &mut long, key, value.as_deref())?;
        }
        *size = (*size + added).saturating_sub(removed);
        transaction.open_table(SIZES).map_err(engine)?.insert(COUNTED, *size).map_err(engine)?;
    }
    let row = mark.encode();
    transaction.open_table(MARKS).map_err(engine)?.insert(JOURNAL, &row[..]).map_err(engine)?;
    transaction.commit().map_err(engine)?;
    Ok(Outcome::Done { used_bytes: *size })
}
