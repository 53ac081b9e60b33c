//! A client's session with the services.

use crate::file::FileState;
use crate::settle::Settled;
use penstock_base::{Env, HashMap, Histogram, Ino, KeyedLocks};
use penstock_wire::names::{HelloReply, HelloRequest};
use penstock_wire::{Failure, Transport, VERSION};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use tokio::sync::Semaphore;

/// Requests with a sequence that may be on their way at once: the services keep as many results.
const IN_FLIGHT: usize = 64;

/// How long requests took, from sending to the reply.
#[derive(Default)]
pub struct ClientLatency {
    /// Reads of chunks.
    pub read: Histogram,
    /// Writes of chunks.
    pub write: Histogram,
    /// Commits of files, by fsync or from time to time.
    pub commit: Histogram,
    /// Everything about names and attributes.
    pub names: Histogram,
}

impl ClientLatency {
    pub(crate) fn of(&self, kind: penstock_wire::Kind) -> &Histogram {
        match kind {
            penstock_wire::Kind::Read => &self.read,
            penstock_wire::Kind::Write => &self.write,
            penstock_wire::Kind::Commit => &self.commit,
            _ => &self.names,
        }
    }
}

/// A client of one file system.
pub struct Client {
    pub(crate) env: Env,
    pub(crate) transport: Rc<dyn Transport>,
    pub(crate) session: u64,
    pub(crate) sequence: Cell<u64>,
    pub(crate) in_flight: Semaphore,
    pub(crate) root: Ino,
    pub(crate) files: RefCell<HashMap<Ino, Rc<RefCell<FileState>>>>,
    pub(crate) settled: Settled,
    pub(crate) locks: KeyedLocks<Ino>,
    pub(crate) closed: Cell<bool>,
    pub(crate) latency: ClientLatency,
}

impl Client {
    /// Begins a session. `name` says who mounts, for people.
    pub async fn connect(env: &Env, transport: Rc<dyn Transport>, name: &str) -> Result<Rc<Self>, Failure> {
        let mut client = Self {
            env: env.clone(),
            transport,
            session: 0,
            sequence: Cell::new(0),
            in_flight: Semaphore::new(IN_FLIGHT),
            root: Ino(0),
            files: RefCell::default(),
            settled: Settled::default(),
            locks: KeyedLocks::default(),
            closed: Cell::new(false),
            latency: ClientLatency::default(),
        };
        let version = u32::from(VERSION);
        let hello =
            HelloRequest { oldest_version: version, newest_version: version, client: name.to_owned() };
        let reply: HelloReply = client.ask(penstock_wire::Kind::Hello, &hello).await?;
        client.session = reply.session;
        client.root = Ino(reply.root);
        let client = Rc::new(client);
        env.spawn("client settle", Box::pin(client.clone().settle_task()));
        Ok(client)
    }

    /// How long its requests took.
    pub fn latency(&self) -> &ClientLatency {
        &self.latency
    }

    /// The root directory.
    pub fn root(&self) -> Ino {
        self.root
    }

    /// Nanoseconds since 1970.
    pub fn now_ns(&self) -> i64 {
        self.env.wall_ns()
    }

    /// Makes everything durable and ends the session's task.
    pub async fn close(&self) -> Result<(), Failure> {
        let result = self.sync_all().await;
        self.closed.set(true);
        result
    }
}
