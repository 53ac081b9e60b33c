//! The client's state and its session with the services.

use crate::direct::DirectWrites;
use crate::file::FileState;
use crate::leases::Leases;
use crate::locks::Locks;
use crate::settle::Settled;
use crate::slots::Slots;
use crate::watch::Restarts;
use penstock_base::{Env, HashMap, Histogram, Ino, KeyedLocks, Kind as Todo};
use penstock_wire::names::{EmptyReply, HelloReply, HelloRequest};
use penstock_wire::{Failure, Transport, VERSION};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::RwLock;

/// Latencies of requests, from sending to the reply.
#[derive(Default)]
pub struct ClientLatency {
    /// Reads of chunks.
    pub read: Histogram,
    /// Writes of chunks.
    pub write: Histogram,
    /// Commits of files, by fsync or by the periodic sync.
    pub commit: Histogram,
    /// All other requests: names, attributes, leases, locks and the session itself.
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
    pub(crate) slots: Slots,
    pub(crate) restarts: Restarts,
    pub(crate) root: Ino,
    pub(crate) files: RefCell<HashMap<Ino, Rc<RefCell<FileState>>>>,
    pub(crate) settled: Settled,
    pub(crate) leases: Rc<Leases>,
    pub(crate) locks: Locks,
    /// The I/O lock of each file: shared for reads, exclusive for writes.
    pub(crate) turns: KeyedLocks<Ino>,
    pub(crate) direct: Rc<DirectWrites>,
    /// Lets one sync of a file run at a time.
    pub(crate) settling: KeyedLocks<Ino>,
    /// Files with changes that were sent since the last `Sync` request.
    pub(crate) unsynced: RefCell<Vec<Ino>>,
    /// Locked shared while a file is opened or closed, and exclusively while the open files are reclaimed.
    pub(crate) opening: RwLock<()>,
    pub(crate) closed: Cell<bool>,
    pub(crate) latency: ClientLatency,
}

impl Client {
    /// Begins a session. `name` identifies the client for people.
    pub async fn connect(env: &Env, transport: Rc<dyn Transport>, name: &str) -> Result<Rc<Self>, Failure> {
        Self::connect_to_mount(env, transport, name, "").await
    }

    /// Begins a session of a mount. `name` and `mount`, its path, are shown to people.
    pub async fn connect_to_mount(
        env: &Env,
        transport: Rc<dyn Transport>,
        name: &str,
        mount: &str,
    ) -> Result<Rc<Self>, Failure> {
        let mut client = Self {
            env: env.clone(),
            transport,
            session: 0,
            slots: Slots::new(),
            restarts: Restarts::default(),
            root: Ino(0),
            files: RefCell::default(),
            settled: Settled::default(),
            leases: Rc::default(),
            locks: Locks::default(),
            turns: KeyedLocks::default(),
            direct: Rc::default(),
            settling: KeyedLocks::default(),
            unsynced: RefCell::default(),
            opening: RwLock::default(),
            closed: Cell::new(false),
            latency: ClientLatency::default(),
        };
        let version = u32::from(VERSION);
        let hello = HelloRequest {
            oldest_version: version,
            newest_version: version,
            client: name.to_owned(),
            mount: mount.to_owned(),
        };
        let sent = env.now();
        let reply: HelloReply = client.ask(penstock_wire::Kind::Hello, &hello).await?;
        client.session = reply.session;
        client.root = Ino(reply.root);
        let client = Rc::new(client);
        env.spawn("client settle", Box::pin(client.clone().settle_task()));
        env.spawn("client watch", Box::pin(client.clone().watch_task()));
        if reply.lease_ms > 0 {
            let lease = Duration::from_millis(reply.lease_ms.into());
            client.leases.clock.begin(env, lease, sent);
            env.spawn("client lease", Box::pin(client.clone().lease_task(lease)));
            env.spawn("client lapse", Box::pin(client.clone().lapse_task()));
        }
        Ok(client)
    }

    /// Returns the latencies of the client's requests.
    pub fn latency(&self) -> &ClientLatency {
        &self.latency
    }

    /// Returns the number of the session.
    pub fn session(&self) -> u64 {
        self.session
    }

    /// Returns the inode of the root directory.
    pub fn root(&self) -> Ino {
        self.root
    }

    /// Returns the wall-clock time in nanoseconds since 1970.
    pub fn now_ns(&self) -> i64 {
        self.env.wall_ns()
    }

    /// Makes everything durable and ends the session.
    pub async fn close(&self) -> Result<(), Failure> {
        let result = self.sync_all().await;
        self.closed.set(true);
        match self.ask::<EmptyReply>(penstock_wire::Kind::End, &EmptyReply {}).await {
            // The request was repeated, because the connection was lost together with the first answer.
            Err(failure) if failure.kind == Todo::Ended => result,
            ended => result.and(ended.map(drop)),
        }
    }
}
