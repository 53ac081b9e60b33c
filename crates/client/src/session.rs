//! A session with the services: its requests, and everything that the client knows while it lasts.
//!
//! Every reply carries the generation of the service. If it changes, acknowledged changes that were not
//! durable may be lost. A client that outlives the service has kept them, and sends them again before
//! anything else ([`crate::recovery`]). Files with a loss, in a client that keeps nothing or because the
//! service refuses what is sent again, are marked, and so are names as a whole. The next request to make them
//! durable fails with EIO, once. All this begins in the same step in which the new generation is seen, before
//! the reply that carried it is used.

use crate::direct::DirectWrites;
use crate::file_state::{FileState, Files};
use crate::held_locks::Locks;
use crate::kept::Kept;
use crate::kernel::Kernel;
use crate::last_dir::LastDir;
use crate::leases::{Leases, Ownership};
use crate::recent::RecentSyncs;
use crate::recovering::Recovery;
use crate::restarts::Restarts;
use crate::sent::{self, Covered, SentChanges};
use crate::slots::{Slot, Slots};
use crate::targets::Targets;
use crate::tickets::Tickets;
use futures_util::future::join_all;
use penstock_base::env::random_id;
use penstock_base::{
    BLOCK_BYTES, Branch, Buf, Env, ErrorKind, FileId, Histogram, KeyedLocks, Piece, Share, Span, Spread,
    TargetId, crc32c_blocks,
};
use penstock_wire::data::{
    ChunkRef, SeekRef, SpaceChange, SpaceRef, decode_found, decode_reply, encode_commit, encode_read,
    encode_seek, encode_space, encode_write,
};
use penstock_wire::metadata::{
    AttrReply, EmptyReply, HelloReply, HelloRequest, InodeRequest, LockReply, LockRequest, RepeatRequest,
    Reply, SetAttrRequest, Time,
};
use penstock_wire::{Failure, Frame, Kind, Object, Transport};
use prost::Message;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Pause between attempts to reach the service.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);
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

/// The purpose of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Errand {
    /// A caller, or the client itself. Waits while a recovery runs.
    Usual,
    /// The recovery after a restart.
    Recovery,
}

/// The addressee of a data request, and its purpose.
#[derive(Clone, Copy)]
struct To {
    errand: Errand,
    kind: Kind,
    branch: Branch,
    target: TargetId,
}

/// A search for data or a hole.
pub(crate) struct Search {
    /// True for a hole.
    pub(crate) hole: bool,
    /// First block.
    pub(crate) from: u64,
    /// The end of the range (exclusive).
    pub(crate) until: u64,
    /// Blocks in a chunk of the file.
    pub(crate) per_chunk: u32,
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
    last_dir: LastDir,
    leases: Rc<Leases>,
    kernel: Kernel,
    locks: Locks,
    direct: Rc<DirectWrites>,
    /// The I/O lock of each file: shared for reads, exclusive for writes.
    turns: KeyedLocks<FileId>,
    /// Lets one sync of a file run at a time.
    syncing: KeyedLocks<FileId>,
    sent: SentChanges,
    kept: Kept,
    recovery: Recovery,
    /// Closes that the service has not answered, by file.
    closing: RefCell<BTreeMap<FileId, u64>>,
    tickets: Tickets,
    targets: Targets,
    /// Places of requests for leases, and below of those for attributes, that wait for other clients: the
    /// service notes a limited number. The answer to a revocation may need attributes, whose wait ends
    /// without a lease of this client. So both are counted apart.
    lease_places: Semaphore,
    attribute_places: Semaphore,
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
            last_dir: LastDir::default(),
            leases: Rc::default(),
            kernel: Kernel::new(env),
            locks: Locks::default(),
            direct: Rc::default(),
            turns: KeyedLocks::default(),
            syncing: KeyedLocks::default(),
            sent: SentChanges::default(),
            kept: Kept::default(),
            recovery: Recovery::default(),
            closing: RefCell::default(),
            tickets: Tickets::default(),
            targets: Targets::default(),
            lease_places: Semaphore::new(MOST_WAITING),
            attribute_places: Semaphore::new(MOST_WAITING),
            is_closed: Cell::new(false),
            latency: ClientLatency::default(),
        });
        let (client, mount) = (name.to_owned(), mount.to_owned());
        let hello = HelloRequest { client, mount, ..HelloRequest::of_mount(random_id(env)) };
        let sent = env.now();
        let reply: HelloReply = session.ask(Kind::Hello, Branch::MAIN, &hello).await?;
        session.number.set(reply.session);
        session.targets.greeted(&reply);
        let lease = (reply.lease_ms > 0).then(|| Duration::from_millis(reply.lease_ms.into()));
        if let Some(lease) = lease {
            session.leases.clock().begin(env, lease, sent);
            session.kept.begin();
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

    /// The targets of the file system.
    pub(crate) fn targets(&self) -> &Targets {
        &self.targets
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

    /// The files with a state that is wanted, and those of which something wanted is kept, in order. A file
    /// may be kept and have no state: a change of it has failed in part, and it was closed.
    pub(crate) fn files_with_kept(
        &self,
        wanted: impl Fn(&FileState) -> bool,
        wanted_kept: impl Fn(&FileId) -> bool,
    ) -> Vec<FileId> {
        let mut files = self.files.select(wanted);
        files.extend(self.kept.files().into_iter().filter(wanted_kept));
        files.sort_unstable();
        files.dedup();
        files
    }

    /// True if a restart of the service loses something of a file, or this client sends it again then.
    pub(crate) fn is_owed(&self, file: FileId) -> bool {
        let can_lose = self.files.with(file, |state| state.can_lose()) == Some(true);
        can_lose || self.kept.mark(file).is_some()
    }

    /// Everything that is sent again after a restart.
    pub(crate) fn kept(&self) -> &Kept {
        &self.kept
    }

    /// The recovery after a restart, if one runs.
    pub(crate) fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// The closes that the service has not answered, by file.
    pub(crate) fn closing(&self) -> BTreeMap<FileId, u64> {
        self.closing.borrow().clone()
    }

    /// Sends the close of a file.
    pub(crate) async fn send_close(&self, file: FileId) -> Result<(), Failure> {
        let closing = Closing::begin(self, file);
        let closed =
            self.once::<EmptyReply>(Kind::Close, file.branch, &InodeRequest { ino: file.ino.0 }).await;
        drop(closing);
        closed.map(drop)
    }

    pub(crate) fn latency(&self) -> &ClientLatency {
        &self.latency
    }

    /// Marks the session as ended by this client.
    pub(crate) fn close(&self) {
        self.is_closed.set(true);
        self.recovery.wake();
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
        self.ask_for(Errand::Usual, kind, branch, body).await
    }

    /// [`Self::ask`], for an errand.
    pub(crate) async fn ask_for<R: Reply>(
        &self,
        errand: Errand,
        kind: Kind,
        branch: Branch,
        body: &impl Message,
    ) -> Result<R, Failure> {
        let (body, _) = self.exchange(errand, (kind, branch, 0), body.encode_to_vec(), Vec::new()).await?;
        decode(&body)
    }

    /// Sends a change again that had this sequence.
    pub(crate) async fn repeat(
        &self,
        branch: Branch,
        sequence: u64,
        request: &RepeatRequest,
    ) -> Result<(), Failure> {
        let ids = (Kind::Repeat, branch, sequence);
        self.exchange(Errand::Recovery, ids, request.encode_to_vec(), Vec::new()).await.map(drop)
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
        // A full memory must not keep anybody from freeing space.
        if !matches!(kind, Kind::Unlink | Kind::SetAttr) {
            self.kept.room().await?;
        }
        let (change, owned) = (self.last_dir.begins(self.env.now()), self.owns_all());
        let outcome: Result<(u64, R), Failure> =
            self.once_in(async || self.slots.take().await, kind, branch, body).await;
        let dir = outcome.as_ref().ok().and_then(|(_, reply)| reply.dir());
        change.ends(dir, owned.filter(|_| owned == self.owns_all()));
        let (sequence, reply) = outcome?;
        self.keep((kind, branch, sequence), body, &reply, self.sent.names());
        Ok(reply)
    }

    /// The current period as the sole client; `None` if there are others.
    pub(crate) fn owns_all(&self) -> Option<Ownership> {
        self.leases.owns_all(self.restarts.changes()).filter(|_| !self.is_over())
    }

    /// The directory that this client has changed last.
    pub(crate) fn last_dir(&self) -> &LastDir {
        &self.last_dir
    }

    /// Keeps a change that was acknowledged, under this number of the changes that were sent.
    fn keep<R: Reply>(&self, ids: (Kind, Branch, u64), body: &impl Message, reply: &R, sent: sent::Change) {
        // A client that keeps nothing need not encode the body once more.
        if let Some(change) = reply.change().filter(|_| self.kept.is_on()) {
            self.kept.add_change(ids, &body.encode_to_vec(), change, sent);
        }
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
        Ok(self.once_in(async || self.slots.take().await, kind, branch, body).await?.1)
    }

    /// Sends a request that changes locks. `begin` is called once it has a slot, and its result is kept until
    /// the answer: a recovery waits for that, and all slots may be in use by requests that wait for the
    /// recovery.
    pub(crate) async fn change_lock<T>(
        &self,
        request: &LockRequest,
        begin: impl AsyncFnOnce() -> T,
    ) -> Result<(T, Result<LockReply, Failure>), Failure> {
        let slot = self.slots.take().await?;
        let begun = begin().await;
        let ids = (Kind::Lock, request.file().branch, slot.sequence());
        let reply = self.exchange(Errand::Usual, ids, request.encode_to_vec(), Vec::new()).await;
        Ok((begun, reply.and_then(|(body, _)| decode(&body))))
    }

    /// Sends a request that must be executed once, in a slot for each attempt. Returns the sequence of the
    /// attempt that was executed, and the reply.
    async fn once_in<'a, R: Reply>(
        &'a self,
        take: impl AsyncFn() -> Result<Slot<'a>, Failure>,
        kind: Kind,
        branch: Branch,
        body: &impl Message,
    ) -> Result<(u64, R), Failure> {
        loop {
            let slot = take().await?;
            let (agains, sequence) = (self.leases.agains(), slot.sequence());
            let ids = (kind, branch, sequence);
            let done = self.exchange(Errand::Usual, ids, body.encode_to_vec(), Vec::new()).await;
            // Another client may need the slot before it proceeds.
            drop(slot);
            match done {
                Err(failure) if failure.is_ask_again() => self.leases.again_since(agains).await,
                done => return Ok((sequence, decode(&done?.0)?)),
            }
        }
    }

    /// Sends the size and time of a file that is being synced, in a reserved slot. Other clients may wait for
    /// this sync while all other requests of this client wait for them.
    pub(crate) async fn sync_once(&self, file: FileId, request: &SetAttrRequest) -> Result<(), Failure> {
        let take = async || self.slots.take_reserved().await;
        let kind = Kind::SetAttr;
        let (sequence, reply) = self.once_in::<AttrReply>(take, kind, file.branch, request).await?;
        let mut kept = request.clone();
        if reply.attr.as_ref().is_some_and(|attr| attr.truncations != request.truncations) {
            // The file was truncated since: the service took neither.
            (kept.size, kept.mtime) = (None, None);
        }
        self.keep((kind, file.branch, sequence), &kept, &reply, self.sent.next());
        Ok(())
    }

    /// Sends a read of blocks of a file to a target. Returns their checksums and the data.
    pub(crate) async fn read_at(
        &self,
        target: TargetId,
        branch: Branch,
        chunk: &ChunkRef,
    ) -> Result<(Vec<u32>, Vec<Buf>), Failure> {
        let to = To { errand: Errand::Usual, kind: Kind::Read, branch, target };
        self.data(to, encode_read(chunk), Vec::new()).await
    }

    /// Sends a read, write, commit or change of space. Returns the checksums and the data of the reply.
    async fn data(&self, to: To, body: Vec<u8>, payload: Vec<Buf>) -> Result<(Vec<u32>, Vec<Buf>), Failure> {
        let To { errand, kind, branch, target } = to;
        let object = Object::Target(target.0.into());
        let (body, payload) = self.exchange_with(errand, object, (kind, branch, 0), body, payload).await?;
        let (replier, crcs) = decode_reply(&body)?;
        // All targets and the metadata target are started together. A target with a start of its own would
        // lose writes without being noticed here.
        if self.restarts.generation() != Some(replier.generation) {
            return Err(Failure::new(ErrorKind::Internal, "reply: from a target with a start of its own"));
        }
        match replier.target == target {
            true => Ok((crcs, payload)),
            false => Err(Failure::new(ErrorKind::Internal, "reply: from another target")),
        }
    }

    /// Searches data or a hole in a file. Returns the first block, or the end of the range.
    pub(crate) async fn search(&self, file: FileId, spread: Spread, seek: Search) -> Result<u64, Failure> {
        let Search { hole, from, until, per_chunk } = seek;
        let per_chunk = u64::from(per_chunk);
        // Each target knows its own chunks only.
        let ask = async |(target, share): (TargetId, Share)| {
            let seek = SeekRef { ino: file.ino, hole, from, until, share };
            let (object, ids) = (Object::Target(target.0.into()), (Kind::Seek, file.branch, 0));
            let body = encode_seek(&seek);
            let (body, _) = self.exchange_with(Errand::Usual, object, ids, body, Vec::new()).await?;
            Ok::<_, Failure>(decode_found(&body)?)
        };
        let chunks = from / per_chunk..until.div_ceil(per_chunk);
        let found = join_all(spread.shares_within(chunks).into_iter().map(ask)).await;
        let found: Vec<u64> = found.into_iter().collect::<Result<_, Failure>>()?;
        Ok(found.into_iter().min().unwrap_or(until))
    }

    /// Writes whole blocks of a file, in its state as the service knows it.
    pub(crate) async fn send_blocks(
        &self,
        errand: Errand,
        (file, state): (FileId, &FileState),
        first: u64,
        data: &Buf,
    ) -> Result<(), Failure> {
        assert!(data.len().is_multiple_of(BLOCK_BYTES), "blocks are written as a whole");
        let crcs = crc32c_blocks(data);
        let mut done = 0;
        let mut writes = Vec::new();
        let span = Span { first, count: crcs.len() as u64 };
        for Piece { unit: chunk, blocks } in span.pieces(state.chunk_blocks()) {
            let (block, count) = (blocks.start, blocks.end - blocks.start);
            let range = done..done + count as usize;
            done = range.end;
            let (ino, truncations) = (file.ino, state.truncations());
            let request = ChunkRef { ino, chunk, block, count, truncations };
            let body = encode_write(&request, &crcs[range.clone()]);
            let payload = vec![data.slice(range.start * BLOCK_BYTES..range.end * BLOCK_BYTES)];
            let (branch, target) = (file.branch, state.spread().target_of(chunk));
            writes.push(async move {
                self.data(To { errand, kind: Kind::Write, branch, target }, body, payload).await?;
                self.targets.wrote(file, target);
                Ok(())
            });
        }
        assert_eq!(done, crcs.len(), "every block is written once");
        // Waits for all: within a process, a dropped call would interrupt the services in the middle of a
        // request.
        join_all(writes).await.into_iter().collect()
    }

    /// Changes space of a file, in its state as the service knows it.
    pub(crate) async fn send_space(
        &self,
        errand: Errand,
        (file, state): (FileId, &FileState),
        change: SpaceChange,
        blocks: Range<u64>,
    ) -> Result<(), Failure> {
        let per_chunk = u64::from(state.chunk_blocks());
        let chunks = blocks.start / per_chunk..blocks.end.div_ceil(per_chunk);
        let (from, until, truncations) = (blocks.start, blocks.end, state.truncations());
        let changes = state.spread().shares_within(chunks).into_iter().map(async |(target, share)| {
            let space = SpaceRef { ino: file.ino, change, from, until, truncations, share };
            let to = To { errand, kind: Kind::Space, branch: file.branch, target };
            self.data(to, encode_space(&space), Vec::new()).await?;
            self.targets.wrote(file, target);
            Ok(())
        });
        join_all(changes).await.into_iter().collect()
    }

    /// Commits the data of a file: it is durable at the latest after the next `Sync` request.
    pub(crate) async fn send_commit(&self, errand: Errand, file: FileId) -> Result<(), Failure> {
        let commits = self.targets.owed(file).into_iter().map(async |owed| {
            let target = owed.target;
            // The rows of other targets are in stores of their own, and the size must not be durable before
            // them.
            let body = encode_commit(file.ino, target == self.targets.home());
            let to = To { errand, kind: Kind::Commit, branch: file.branch, target };
            self.data(to, body, Vec::new()).await?;
            self.targets.committed(file, owed);
            Ok(())
        });
        join_all(commits).await.into_iter().collect()
    }

    async fn exchange(
        &self,
        errand: Errand,
        ids: (Kind, Branch, u64),
        body: Vec<u8>,
        payload: Vec<Buf>,
    ) -> Result<(Vec<u8>, Vec<Buf>), Failure> {
        self.exchange_with(errand, ids.0.object(), ids, body, payload).await
    }

    async fn exchange_with(
        &self,
        errand: Errand,
        object: Object,
        (kind, branch, sequence): (Kind, Branch, u64),
        body: Vec<u8>,
        payload: Vec<Buf>,
    ) -> Result<(Vec<u8>, Vec<Buf>), Failure> {
        self.restarts.check_lives()?;
        let mut frame = Frame::request(kind, body, payload);
        frame.header.object = object;
        frame.header.session = self.number.get();
        frame.header.sequence = sequence;
        frame.header.branch = branch.0;
        // Locks are restored after all else: then no request for one may wait for that.
        let waits = errand == Errand::Usual && !is_about_the_session(kind) && kind != Kind::Lock;
        loop {
            if waits {
                self.recovery.over().await;
                self.restarts.check_lives()?;
            }
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
            // It may have been answered before everything was sent again to the present start, and before
            // open files were reported. A file that is open from its creation was not among them: the service
            // counts it once it is asked again.
            if waits && self.kept.is_on() && self.restarts.changes() != changes {
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
            let done = act().await;
            if generation == self.restarts.generation() || self.restarts.has_ended() {
                return done;
            }
        }
    }

    /// Records that the session has ended. Logs that once, unless this client ended it.
    fn note_failure(&self, failure: &Failure) {
        if failure.kind == ErrorKind::Ended && self.restarts.end() && !self.is_closed.get() {
            tracing::error!(%failure, "every operation fails from here on: unmount and mount again");
            self.leases.clock().end();
            self.kept.end();
            self.recovery.end();
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
        self.targets.restarted();
        self.files.for_each(|file, state| {
            state.restarted();
            if state.is_mapped() {
                // The kernel's pages and its size may include changes that others have lost.
                self.kernel.drop_pages_soon(file);
            }
        });
        match self.kept.is_on() {
            true => {
                tracing::warn!("the service was started again: what was not durable is sent again");
                self.recovery.begin();
            }
            false => self.lose_everything(),
        }
        self.leases.restarted();
        self.end_waits();
    }

    /// Everything that is not durable is lost: nothing was kept.
    fn lose_everything(&self) {
        let files = self.files.select(FileState::can_lose);
        files.iter().for_each(|file| self.lose(*file));
        let names = self.sent.lose();
        if names {
            self.restarts.lose_names();
        }
        tracing::warn!(
            files = files.len(),
            names,
            "the service was started again: what was not synced is lost"
        );
    }

    /// Writes to a file that are not durable are lost. Every descriptor reports that.
    pub(crate) fn lose(&self, file: FileId) {
        self.kept.forget_file(file);
        self.targets.forget(file);
        self.files.with(file, |state| {
            state.lose();
            state.make_stale();
        });
        // The kernel's pages and its size may include lost changes.
        self.kernel.drop_pages_soon(file);
    }

    /// Nobody wants any more what was written to a file and is not durable.
    pub(crate) fn forget_writes(&self, file: FileId) {
        self.kept.forget_file(file);
        self.targets.forget(file);
        self.files.with(file, FileState::forget_writes);
    }

    /// Records that a change of a file was sent that the next `Sync` request makes durable.
    pub(crate) fn note_unsynced(&self, file: FileId) -> sent::Change {
        let change = self.sent.file(file);
        self.files.with(file, |state| state.sent(change));
        change
    }

    /// The writes to a file up to this mark were committed, and the next `Sync` request makes them durable.
    pub(crate) fn note_committed(&self, file: FileId, mark: Option<u64>) {
        let change = self.note_unsynced(file);
        self.kept.committed(file, mark, change);
    }

    /// The changes that were sent and are not durable.
    pub(crate) fn sent(&self) -> &SentChanges {
        &self.sent
    }

    /// A `Sync` request has made durable what was sent before it.
    pub(crate) fn note_synced(&self, covered: Covered<'_>) {
        let (files, upto) = covered.are_durable();
        self.kept.are_durable(upto);
        for file in files {
            self.files.with(file, |state| state.durable_upto(upto));
            self.files.forget_idle(file);
        }
    }
}

/// A close that is on its way, until this is dropped.
struct Closing<'a>(&'a Session, FileId);

impl<'a> Closing<'a> {
    fn begin(session: &'a Session, file: FileId) -> Self {
        *session.closing.borrow_mut().entry(file).or_default() += 1;
        Self(session, file)
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut closing = self.0.closing.borrow_mut();
        let count = closing.get_mut(&self.1).expect("a close ends once");
        *count -= 1;
        if *count == 0 {
            closing.remove(&self.1);
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
