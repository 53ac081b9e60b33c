//! A session with the services: its requests, and everything that the client knows while it lasts.
//!
//! Every reply carries the generation of the service. If it changes, acknowledged changes that were not
//! durable may be lost. The client keeps no copy of them. It marks the files, and names as a whole, and the
//! next request to make them durable fails with EIO, once. Marks are set in the same step in which the new
//! generation is seen, before the reply that carried it is used.

use crate::direct::DirectWrites;
use crate::file_state::Files;
use crate::held_locks::Locks;
use crate::kernel::Kernel;
use crate::leases::Leases;
use crate::recent::RecentSyncs;
use crate::restarts::Restarts;
use crate::sent::{Covered, SentChanges};
use crate::slots::{Slot, Slots};
use crate::tickets::Tickets;
use penstock_base::env::random_id;
use penstock_base::{Branch, Buf, Env, ErrorKind, FileId, Histogram, KeyedLocks};
use penstock_wire::data::decode_reply;
use penstock_wire::metadata::{HelloReply, HelloRequest, InodeRequest, Reply, SetAttrRequest, Time};
use penstock_wire::{Failure, Frame, Kind, Transport};
use prost::Message;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{RwLock, Semaphore, SemaphorePermit};

/// Most requests for leases, and most for attributes, that wait for other clients at the same time.
const MOST_WAITING: usize = 1 << 14;

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
    fn of(&self, kind: Kind) -> &Histogram {
        match kind {
            Kind::Read => &self.read,
            Kind::Write => &self.write,
            Kind::Commit => &self.commit,
            _ => &self.names,
        }
    }
}

/// The time between two events that void what was begun before: the service is started again, or the client
/// leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Era {
    start: Option<u64>,
    /// A start may become the newest one again, when a late reply of another one had been taken for it.
    changes: u64,
    times_left: u64,
}

impl Era {
    /// The generation of the service's start, 0 before the first reply.
    pub(crate) fn generation(self) -> u64 {
        self.start.unwrap_or_default()
    }
}

/// A session of a client. Its parts own their state; this sends requests and takes in the generations of
/// replies.
pub(crate) struct Session {
    env: Env,
    transport: Rc<dyn Transport>,
    number: Cell<u64>,
    slots: Slots,
    restarts: Restarts,
    files: Files,
    recent: RecentSyncs,
    leases: Rc<Leases>,
    kernel: Kernel,
    locks: Locks,
    direct: Rc<DirectWrites>,
    /// The I/O lock of each file: shared for reads, exclusive for writes.
    turns: KeyedLocks<FileId>,
    /// Lets one sync of a file run at a time.
    syncing: KeyedLocks<FileId>,
    sent: SentChanges,
    tickets: Tickets,
    /// Places of requests for leases, and below of those for attributes, that wait for other clients: the
    /// service notes a limited number. The answer to a revocation may need attributes, whose wait ends
    /// without a lease of this client. So both are counted apart.
    lease_places: Semaphore,
    attribute_places: Semaphore,
    /// Locked shared while a file is opened or closed, and exclusively while the open files are reclaimed.
    opening: RwLock<()>,
    is_closed: Cell<bool>,
    latency: ClientLatency,
}

impl Session {
    /// Begins a session of a client with this name, at this mount point. Returns it, its root directory and
    /// its lease time, if it has one.
    pub(crate) async fn begin(
        env: &Env,
        transport: Rc<dyn Transport>,
        name: &str,
        mount: &str,
    ) -> Result<(Rc<Self>, FileId, Option<Duration>), Failure> {
        let session = Rc::new(Self {
            env: env.clone(),
            transport,
            number: Cell::new(0),
            slots: Slots::new(),
            restarts: Restarts::default(),
            files: Files::default(),
            recent: RecentSyncs::default(),
            leases: Rc::default(),
            kernel: Kernel::new(env),
            locks: Locks::default(),
            direct: Rc::default(),
            turns: KeyedLocks::default(),
            syncing: KeyedLocks::default(),
            sent: SentChanges::default(),
            tickets: Tickets::default(),
            lease_places: Semaphore::new(MOST_WAITING),
            attribute_places: Semaphore::new(MOST_WAITING),
            opening: RwLock::default(),
            is_closed: Cell::new(false),
            latency: ClientLatency::default(),
        });
        let (client, mount) = (name.to_owned(), mount.to_owned());
        let hello = HelloRequest { client, mount, ..HelloRequest::of_mount(random_id(env)) };
        let sent = env.now();
        let reply: HelloReply = session.ask(Kind::Hello, Branch::MAIN, &hello).await?;
        session.number.set(reply.session);
        let lease = (reply.lease_ms > 0).then(|| Duration::from_millis(reply.lease_ms.into()));
        if let Some(lease) = lease {
            session.leases.clock().begin(env, lease, sent);
        }
        Ok((session, reply.root(), lease))
    }

    /// The time that a file is changed at now.
    pub(crate) fn now(&self) -> Time {
        Time::from_ns(self.env().wall_ns())
    }

    pub(crate) fn env(&self) -> &Env {
        &self.env
    }

    /// The number of the session.
    pub(crate) fn number(&self) -> u64 {
        self.number.get()
    }

    /// The present era.
    pub(crate) fn era(&self) -> Era {
        Era {
            start: self.restarts.generation(),
            changes: self.restarts.changes(),
            times_left: self.leases.times_left(),
        }
    }

    pub(crate) fn restarts(&self) -> &Restarts {
        &self.restarts
    }

    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    pub(crate) fn recent(&self) -> &RecentSyncs {
        &self.recent
    }

    pub(crate) fn leases(&self) -> &Rc<Leases> {
        &self.leases
    }

    pub(crate) fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    pub(crate) fn locks(&self) -> &Locks {
        &self.locks
    }

    pub(crate) fn direct(&self) -> &Rc<DirectWrites> {
        &self.direct
    }

    /// The I/O lock of each file.
    pub(crate) fn turns(&self) -> &KeyedLocks<FileId> {
        &self.turns
    }

    /// The lock of each file under which one sync runs at a time.
    pub(crate) fn syncing(&self) -> &KeyedLocks<FileId> {
        &self.syncing
    }

    /// The waits for other clients to sync a file.
    pub(crate) fn tickets(&self) -> &Tickets {
        &self.tickets
    }

    /// Waits for a place to wait for a lease.
    pub(crate) async fn place_for_lease(&self) -> SemaphorePermit<'_> {
        self.lease_places.acquire().await.expect("it is never closed")
    }

    /// Waits for a place to wait for the attributes that other clients have not sent.
    pub(crate) async fn place_for_attributes(&self) -> SemaphorePermit<'_> {
        self.attribute_places.acquire().await.expect("it is never closed")
    }

    /// The lock under which files are opened, closed and reclaimed.
    pub(crate) fn opening(&self) -> &RwLock<()> {
        &self.opening
    }

    pub(crate) fn latency(&self) -> &ClientLatency {
        &self.latency
    }

    /// Marks the session as ended by this client.
    pub(crate) fn close(&self) {
        self.is_closed.set(true);
        self.end_waits();
    }

    /// True if this client has ended the session, or the service has.
    pub(crate) fn is_over(&self) -> bool {
        self.is_closed.get() || self.restarts.has_ended()
    }

    /// Sends a request that may be repeated without harm.
    pub(crate) async fn ask<R: Reply>(
        &self,
        kind: Kind,
        branch: Branch,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let (body, _) = self.exchange(kind, branch, 0, body.encode_to_vec(), Vec::new()).await?;
        decode(&body)
    }

    /// Sends a request about a file that may be repeated without harm.
    pub(crate) async fn ask_about<R: Reply>(&self, kind: Kind, file: FileId) -> Result<R, Failure> {
        self.ask(kind, file.branch, &InodeRequest { ino: file.ino.0 }).await
    }

    /// Sends a request that makes a change and must be executed once: it has a slot in the session. The
    /// change is durable after the next `Sync` request.
    pub(crate) async fn change<R: Reply>(
        &self,
        kind: Kind,
        branch: Branch,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let reply = self.once(kind, branch, body).await?;
        self.sent.names();
        Ok(reply)
    }

    /// Sends a change of an inode's attributes. If a restart loses the change, every fsync of the file
    /// reports that, provided that its state is known here.
    pub(crate) async fn change_inode<R: Reply>(
        &self,
        kind: Kind,
        file: FileId,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let reply = self.change(kind, file.branch, body).await?;
        self.note_unsynced(file);
        Ok(reply)
    }

    /// Sends a change of a file's size. The service may have to wait until other clients have given up their
    /// leases.
    pub(crate) async fn change_size<R: Reply>(
        &self,
        file: FileId,
        request: &SetAttrRequest,
    ) -> Result<R, Failure> {
        let wish = self.leases.wish(file);
        let reply = self.change_inode(Kind::SetAttr, file, request).await;
        wish.answered();
        reply
    }

    /// Sends a request that must be executed once, for state in memory only that need not become durable.
    pub(crate) async fn once<R: Reply>(
        &self,
        kind: Kind,
        branch: Branch,
        body: &impl Message,
    ) -> Result<R, Failure> {
        self.once_in(async || self.slots.take().await, kind, branch, body).await
    }

    /// Sends a request that must be executed once, in a slot for each attempt.
    async fn once_in<'a, R: Reply>(
        &'a self,
        take: impl AsyncFn() -> Result<Slot<'a>, Failure>,
        kind: Kind,
        branch: Branch,
        body: &impl Message,
    ) -> Result<R, Failure> {
        loop {
            let slot = take().await?;
            let agains = self.leases.agains();
            let done = self.exchange(kind, branch, slot.sequence(), body.encode_to_vec(), Vec::new()).await;
            // Another client may need the slot before it proceeds.
            drop(slot);
            match done {
                Err(failure) if failure.is_ask_again() => self.leases.again_since(agains).await,
                done => return decode(&done?.0),
            }
        }
    }

    /// Sends the size and time of a file that is being synced, in a reserved slot. Other clients may wait for
    /// this sync while all other requests of this client wait for them.
    pub(crate) async fn sync_once<R: Reply>(
        &self,
        kind: Kind,
        branch: Branch,
        body: &impl Message,
    ) -> Result<R, Failure> {
        self.once_in(async || self.slots.take_reserved().await, kind, branch, body).await
    }

    /// Sends a read, write, commit or change of space. Returns the checksums and the data of the reply.
    pub(crate) async fn data(
        &self,
        kind: Kind,
        branch: Branch,
        body: Vec<u8>,
        payload: Vec<Buf>,
    ) -> Result<(Vec<u32>, Vec<Buf>), Failure> {
        let (body, payload) = self.exchange(kind, branch, 0, body, payload).await?;
        let (generation, crcs) = decode_reply(&body)?;
        // The target and the metadata target are started together. A target with a start of its own would
        // lose writes without being noticed here.
        match self.restarts.generation() == Some(generation) {
            true => Ok((crcs, payload)),
            false => Err(Failure::new(ErrorKind::Internal, "reply: from a target with a start of its own")),
        }
    }

    /// Sends a search for data or a hole. Returns the body of the reply.
    pub(crate) async fn search(&self, branch: Branch, body: Vec<u8>) -> Result<Vec<u8>, Failure> {
        Ok(self.exchange(Kind::Seek, branch, 0, body, Vec::new()).await?.0)
    }

    async fn exchange(
        &self,
        kind: Kind,
        branch: Branch,
        sequence: u64,
        body: Vec<u8>,
        payload: Vec<Buf>,
    ) -> Result<(Vec<u8>, Vec<Buf>), Failure> {
        self.restarts.check_lives()?;
        let mut frame = Frame::request(kind, body, payload);
        frame.header.session = self.number.get();
        frame.header.sequence = sequence;
        frame.header.branch = branch.0;
        loop {
            let (sent, changes) = (self.env.now(), self.restarts.changes());
            let agains = self.leases.agains();
            let called = self.transport.call(frame.clone());
            let reply = self.latency.of(kind).time(&self.env, called).await?;
            let start = reply.header.generation;
            self.note_generation(start, changes);
            let result = reply.into_result();
            match &result {
                Ok(_) => self.leases.clock().answered(sent),
                Err(failure) => self.note_failure(failure),
            }
            if !is_about_the_session(kind) {
                self.in_lease().await?;
            }
            // The request may have waited across a restart. Grants and counts of an earlier start mean
            // nothing to the present one, so such a reply is treated as lost.
            if start != 0 && self.restarts.generation() != Some(start) {
                continue;
            }
            match result {
                Err(failure) if failure.is_ask_again() && sequence == 0 => {
                    self.leases.again_since(agains).await;
                    self.restarts.check_lives()?;
                }
                result => return result,
            }
        }
    }

    /// Waits while the session's lease time has run out. Fails if the session has ended.
    pub(crate) async fn in_lease(&self) -> Result<(), Failure> {
        self.leases.clock().running(|| self.is_over()).await;
        self.restarts.check_lives()
    }

    /// Runs several requests under one start of the service, because a restart may lose the first ones. They
    /// are repeated if the service restarted meanwhile.
    pub(crate) async fn under_one_start<T>(
        &self,
        act: impl AsyncFn() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        loop {
            let generation = self.restarts.generation();
            let done = act().await?;
            if generation == self.restarts.generation() {
                return Ok(done);
            }
        }
    }

    /// Records that the session has ended. Logs that once, unless this client ended it.
    fn note_failure(&self, failure: &Failure) {
        if failure.kind == ErrorKind::Ended && self.restarts.end() && !self.is_closed.get() {
            tracing::error!(%failure, "every operation fails from here on: unmount and mount again");
            self.leases.clock().end();
            self.end_waits();
            // The kernel uses pages that it has without asking the client.
            self.open_files().into_iter().for_each(|file| self.kernel.drop_pages_soon(file));
        }
    }

    /// Ends all waits for news of the service, because the era has ended.
    pub(crate) fn end_waits(&self) {
        self.tickets.end_all();
        self.leases.notify_all();
    }

    /// Files that programs have open, or of which the kernel has pages that programs change in mappings.
    pub(crate) fn open_files(&self) -> Vec<FileId> {
        self.files.select(|state| state.opens() > 0 || state.is_mapped())
    }

    /// Takes in the generation in a reply to a request that was sent after `changes` changes of it, and marks
    /// losses if the service restarted.
    fn note_generation(&self, generation: u64, changes: u64) {
        if !self.restarts.is_restart(generation, changes) {
            return;
        }
        let mut files = 0;
        self.files.for_each(|file, state| {
            // The end may result from a lost write of another client.
            state.note_lost_end();
            state.make_stale();
            let loses = state.can_lose();
            if loses {
                state.lose();
                files += 1;
            }
            if loses || state.is_mapped() {
                // The kernel's pages and its size may include lost changes.
                self.kernel.drop_pages_soon(file);
            }
        });
        let names = self.sent.lose();
        self.restarts.restarted(names);
        self.leases.restarted();
        self.end_waits();
        tracing::warn!(files, names, "the service was started again: what was not synced may be lost");
    }

    /// Records that a change of a file was sent that the next `Sync` request makes durable.
    pub(crate) fn note_unsynced(&self, file: FileId) {
        self.files.with(file, |state| state.sent(self.sent.file(file)));
    }

    /// The changes that were sent and are not durable.
    pub(crate) fn sent(&self) -> &SentChanges {
        &self.sent
    }

    /// A `Sync` request has made durable what was sent before it.
    pub(crate) fn note_synced(&self, covered: Covered<'_>) {
        let (files, upto) = covered.are_durable();
        for file in files {
            self.files.with(file, |state| state.durable_upto(upto));
            self.files.forget_idle(file);
        }
    }
}

/// True for a request whose answer has no information about files.
fn is_about_the_session(kind: Kind) -> bool {
    matches!(kind, Kind::Hello | Kind::Ping | Kind::Watch | Kind::End)
}

fn decode<R: Reply>(body: &[u8]) -> Result<R, Failure> {
    let failed = |why: String| Failure::new(ErrorKind::Internal, format!("reply: {why}"));
    let reply = R::decode(body).map_err(|error| failed(error.to_string()))?;
    match reply.unknown() {
        None => Ok(reply),
        Some(what) => Err(failed(format!("{what}, which this release does not know"))),
    }
}
