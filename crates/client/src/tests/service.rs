//! A service in memory: files as bytes, a log of requests, and restarts and failures on demand.

use crate::Client;
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Buf, ErrorKind, FileId, LocalBoxFuture, TargetId, crc32c_blocks};
use penstock_sim::World;
use penstock_wire::data::{
    Replier, SpaceChange, decode_commit, decode_read, decode_seek, decode_space, decode_write, encode_found,
    encode_reply,
};
use penstock_wire::metadata::{
    Attr, AttrReply, EmptyReply, GetAttrRequest, Granted, HelloReply, InodeRequest, LeaseCall, LeaseReply,
    LeaseRequest, LockReply, NameRequest, SetAttrRequest, Synced, TargetPlace, WatchReply, WatchRequest,
};
use penstock_wire::{Failure, Frame, Kind, Object, Transport};
use prost::Message;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

pub(super) const CHUNK_BLOCKS: u32 = 4;
pub(super) const BLOCK: u64 = BLOCK_BYTES as u64;

/// A file: blocks that are in the cache of the service, and attributes.
#[derive(Clone, Default)]
pub(super) struct File {
    pub(super) blocks: BTreeMap<u64, Vec<u8>>,
    /// The blocks that a commit has made durable.
    committed: BTreeMap<u64, Vec<u8>>,
    pub(super) attr: Attr,
}

impl File {
    /// The bytes up to the size.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let count = self.attr.size.div_ceil(BLOCK);
        let zeros = vec![0; BLOCK_BYTES];
        let mut bytes: Vec<u8> =
            (0..count).flat_map(|block| self.blocks.get(&block).unwrap_or(&zeros).clone()).collect();
        bytes.truncate(self.attr.size as usize);
        bytes
    }
}

/// The service and what it was asked.
pub(super) struct Service {
    world: World,
    pub(super) files: RefCell<BTreeMap<u64, File>>,
    generation: Cell<u64>,
    /// The start of the target in data replies is later by this than that of the service.
    pub(super) target_is_ahead: Cell<u64>,
    /// The requests that changed or synced something, in order.
    pub(super) log: RefCell<Vec<Kind>>,
    /// All requests with the branches in their headers.
    pub(super) asked: RefCell<Vec<(Kind, u64)>>,
    /// Kinds that fail, each with the failure and the number of times.
    failures: RefCell<Vec<(Kind, Failure, u32)>>,
    /// A restart after this many more data requests.
    pub(super) restart_in: Cell<Option<u32>>,
    alone: Cell<bool>,
    /// The calls of this start that were not answered, by their numbers.
    calls: RefCell<BTreeMap<u64, LeaseCall>>,
    /// The number of the last call of this start.
    last_call: Cell<u64>,
    /// The answers of all starts.
    pub(super) answered: RefCell<Vec<(u64, bool)>>,
    pub(super) next_grant: Cell<u64>,
    /// Time that the reply to a request of a lease takes to arrive.
    pub(super) lease_reply: Cell<Duration>,
    /// Time that a write takes.
    pub(super) write_takes: Cell<Duration>,
    /// The targets that were asked to commit, in order.
    pub(super) commits: RefCell<Vec<u64>>,
    /// The targets of reads, in order.
    pub(super) reads: RefCell<Vec<u64>>,
    /// Number of targets.
    pub(super) targets: Cell<u32>,
    /// Time that a commit takes.
    pub(super) commit_takes: Cell<Duration>,
    /// Time that the reply to a `Sync` request takes to arrive.
    pub(super) sync_reply: Cell<Duration>,
    /// It starts again when the next `Sync` request arrives.
    pub(super) restarts_at_sync: Cell<bool>,
    /// The files as the last `Sync` request has left them; a crash goes back to them.
    durable: RefCell<BTreeMap<u64, File>>,
    /// Requests and replies take any time below this, and are lost by a restart meanwhile.
    pub(super) delay_most: Cell<Duration>,
    /// Another client holds every lease: requests wait until it gives it back.
    pub(super) holds_leases: Cell<bool>,
    /// Another client must sync before attributes are known.
    pub(super) must_sync: Cell<bool>,
    /// Another client caches sizes, or everything: requests of these kinds must be sent again.
    pub(super) again_for: Cell<Option<Kind>>,
    /// The news of this start.
    news: RefCell<WatchReply>,
    /// Files of which the client does not want to change the size any more.
    pub(super) resigned: RefCell<Vec<u64>>,
}

impl Service {
    pub(super) fn new(world: &World) -> Rc<Self> {
        Rc::new(Self {
            world: world.clone(),
            files: RefCell::default(),
            generation: Cell::new(1),
            target_is_ahead: Cell::new(0),
            log: RefCell::default(),
            asked: RefCell::default(),
            failures: RefCell::default(),
            restart_in: Cell::new(None),
            alone: Cell::new(true),
            calls: RefCell::default(),
            last_call: Cell::default(),
            answered: RefCell::default(),
            next_grant: Cell::new(1),
            lease_reply: Cell::default(),
            write_takes: Cell::default(),
            commits: RefCell::default(),
            reads: RefCell::default(),
            targets: Cell::new(1),
            commit_takes: Cell::default(),
            sync_reply: Cell::default(),
            restarts_at_sync: Cell::default(),
            durable: RefCell::default(),
            delay_most: Cell::default(),
            holds_leases: Cell::default(),
            must_sync: Cell::default(),
            again_for: Cell::default(),
            news: RefCell::default(),
            resigned: RefCell::default(),
        })
    }

    /// Adds a file of these bytes.
    pub(super) fn add(&self, id: FileId, bytes: &[u8]) {
        let mut file = File::default();
        for (at, part) in (0..).zip(bytes.chunks(BLOCK_BYTES)) {
            let mut block = part.to_vec();
            block.resize(BLOCK_BYTES, 0);
            file.blocks.insert(at, block);
        }
        file.attr = Attr { ino: id.ino.0, size: bytes.len() as u64, nlink: 1, ..Attr::default() };
        file.attr.mode = 0o100_644;
        file.attr.chunk_blocks = CHUNK_BLOCKS;
        self.files.borrow_mut().insert(id.ino.0, file);
    }

    pub(super) fn bytes(&self, id: FileId) -> Vec<u8> {
        self.files.borrow()[&id.ino.0].bytes()
    }

    pub(super) fn attr(&self, id: FileId) -> Attr {
        self.files.borrow()[&id.ino.0].attr.clone()
    }

    /// Puts bytes into a block of a file, behind the back of the client.
    pub(super) fn fill(&self, id: FileId, block: u64, byte: u8) {
        let mut files = self.files.borrow_mut();
        files.get_mut(&id.ino.0).unwrap().blocks.insert(block, vec![byte; BLOCK_BYTES]);
    }

    /// Changes the attributes of a file as another client does.
    pub(super) fn change(&self, id: FileId, change: impl FnOnce(&mut Attr)) {
        change(&mut self.files.borrow_mut().get_mut(&id.ino.0).unwrap().attr);
    }

    /// Starts again: replies have another generation from now on, and calls are numbered anew.
    pub(super) fn restart(&self) {
        self.generation.set(self.generation.get() + 1);
        self.calls.take();
        self.last_call.take();
        self.news.take();
    }

    /// The next number of the news, which grants have as well.
    fn next_number(&self) -> u64 {
        let number = self.next_grant.get().max(self.last_call.get() + 1);
        self.next_grant.set(number + 1);
        self.last_call.set(number);
        number
    }

    /// The client gets a lease that it waits for.
    pub(super) fn grant(&self, file: FileId, exclusive: bool) -> u64 {
        let grant = self.next_number();
        let granted = Granted { grant, ino: file.ino.0, branch: 0, exclusive };
        self.news.borrow_mut().granted.push(granted);
        grant
    }

    /// Another client has synced, or could not, for all tickets up to this one.
    pub(super) fn synced(&self, tickets: std::ops::RangeInclusive<u64>, errno: u32) {
        for ticket in tickets {
            let number = self.next_number();
            self.news.borrow_mut().synced.push(Synced { number, ticket, errno });
        }
    }

    /// Requests may be sent again.
    pub(super) fn again(&self) {
        self.again_for.set(None);
        self.news.borrow_mut().again = self.next_number();
    }

    /// Loses what is not durable, and starts again.
    pub(super) fn crash(&self) {
        *self.files.borrow_mut() = self.durable.borrow().clone();
        self.restart();
    }

    /// Makes attributes, and the blocks that were committed, durable.
    pub(super) fn make_durable(&self) {
        let mut files = self.files.borrow().clone();
        files.values_mut().for_each(|file| file.blocks = file.committed.clone());
        *self.durable.borrow_mut() = files;
    }

    /// The size of a file after a crash.
    pub(super) fn durable_size(&self, id: FileId) -> u64 {
        self.durable.borrow()[&id.ino.0].attr.size
    }

    /// Starts again, and this client's session is the only one that survived.
    pub(super) fn restart_alone(&self) {
        self.restart();
        self.alone.set(true);
    }

    /// There are other clients, and this one owns nothing.
    pub(super) fn have_company(&self) {
        self.alone.set(false);
    }

    /// The other clients have left or ended.
    pub(super) fn become_alone(&self) {
        self.alone.set(true);
    }

    /// Lets the next `times` requests of a kind fail.
    pub(super) fn fail(&self, kind: Kind, todo: ErrorKind, times: u32) {
        let failure = Failure { kind: todo, errno: 5, message: "told to fail".into() };
        self.failures.borrow_mut().push((kind, failure, times));
    }

    /// No request fails from now on.
    pub(super) fn heal(&self) {
        self.failures.borrow_mut().clear();
    }

    /// Tells the client that it is not alone any more, and revokes all its leases.
    pub(super) fn others_arrive(&self) -> u64 {
        self.alone.set(false);
        self.call(0)
    }

    /// Revokes the lease of a file, or with 0 all leases, as far as they have been granted by now.
    pub(super) fn call(&self, ino: u64) -> u64 {
        self.make_call(ino, false)
    }

    /// Asks the client to sync a file for another one.
    pub(super) fn call_sync(&self, ino: u64) -> u64 {
        self.make_call(ino, true)
    }

    fn make_call(&self, ino: u64, is_sync: bool) -> u64 {
        let grant = self.next_grant.get() - 1;
        let number = self.last_call.get() + 1;
        self.last_call.set(number);
        self.calls
            .borrow_mut()
            .insert(number, LeaseCall { number, ino, is_sync, grant, branch: 0, attributes: false });
        number
    }

    /// Takes the log.
    pub(super) fn take_log(&self) -> Vec<Kind> {
        self.log.take()
    }

    fn failure(&self, kind: Kind) -> Option<Failure> {
        let mut failures = self.failures.borrow_mut();
        let (_, failure, times) = failures.iter_mut().find(|(of, _, times)| *of == kind && *times > 0)?;
        *times -= 1;
        Some(failure.clone())
    }

    async fn serve(&self, request: &Frame) -> Result<(Vec<u8>, Vec<Buf>), Failure> {
        let kind = request.header.kind;
        let body = &request.body[..];
        self.asked.borrow_mut().push((kind, request.header.branch));
        self.world.env().sleep(Duration::from_micros(10)).await;
        if let Some(left) = self.restart_in.get().filter(|_| matches!(kind, Kind::Write | Kind::SetAttr)) {
            self.restart_in.set(left.checked_sub(1));
            if left == 0 {
                self.restart();
            }
        }
        if kind == Kind::Write {
            self.world.env().sleep(self.write_takes.get()).await;
        }
        if kind == Kind::Commit {
            self.commits.borrow_mut().extend(target_of(request));
            self.world.env().sleep(self.commit_takes.get()).await;
        }
        if let Some(failure) = self.failure(kind) {
            return Err(failure);
        }
        if self.again_for.get() == Some(kind) {
            return Err(Failure::ask_again());
        }
        if matches!(
            kind,
            Kind::Write | Kind::Commit | Kind::SetAttr | Kind::Sync | Kind::Space | Kind::Rename
        ) {
            self.log.borrow_mut().push(kind);
        }
        let mut payload = Vec::new();
        let reply = match kind {
            Kind::Hello => {
                let place = |target| TargetPlace { target, ..TargetPlace::default() };
                let targets = (0..self.targets.get()).map(place).collect();
                HelloReply {
                    session: 7,
                    root: 1,
                    chunk_blocks: CHUNK_BLOCKS,
                    targets,
                    ..HelloReply::default()
                }
                .encode_to_vec()
            }
            Kind::Watch => self.watch(&WatchRequest::decode(body).unwrap()).await,
            Kind::Lease => {
                let _ = LeaseRequest::decode(body).unwrap();
                let reply = match self.holds_leases.get() {
                    true => LeaseReply { grant: 0, wait: true },
                    false => {
                        LeaseReply { grant: self.next_grant.replace(self.next_grant.get() + 1), wait: false }
                    }
                };
                self.world.env().sleep(self.lease_reply.get()).await;
                reply.encode_to_vec()
            }
            Kind::GetAttr if self.must_sync.get() && GetAttrRequest::decode(body).unwrap().ticket > 0 => {
                AttrReply { wait: true, ..AttrReply::default() }.encode_to_vec()
            }
            Kind::GetAttr | Kind::Open => {
                let ino = InodeRequest::decode(body).unwrap().ino;
                self.reply(ino)?
            }
            // Every name leads to the first file, and is its last one.
            Kind::Unlink => {
                let files = self.files.borrow();
                let attr = files.values().next().map(|file| Attr { nlink: 0, ..file.attr.clone() });
                let dir = files.get(&NameRequest::decode(body).unwrap().dir).map(|dir| dir.attr.clone());
                AttrReply { attr, dir, ..AttrReply::default() }.encode_to_vec()
            }
            Kind::SetAttr => self.set_attr(&SetAttrRequest::decode(body).unwrap())?,
            Kind::Read => {
                let read = decode_read(body).unwrap();
                self.reads.borrow_mut().extend(target_of(request));
                let first = read.chunk * u64::from(CHUNK_BLOCKS) + u64::from(read.block);
                let files = self.files.borrow();
                let blocks = &files[&read.ino.0].blocks;
                let zeros = vec![0; BLOCK_BYTES];
                let at = |block| Buf::copy_from(blocks.get(&block).unwrap_or(&zeros));
                payload = (first..first + u64::from(read.count)).map(at).collect();
                let crcs: Vec<u32> = payload.iter().flat_map(|part| crc32c_blocks(part)).collect();
                self.data_reply(request, &crcs)
            }
            Kind::Write => {
                let (write, crcs) = decode_write(body).unwrap();
                let data: Vec<u8> = request.payload.iter().flat_map(|part| part.to_vec()).collect();
                assert_eq!(crc32c_blocks(&data), crcs, "the checksums are those of the data");
                let mut files = self.files.borrow_mut();
                let file = files.get_mut(&write.ino.0).unwrap();
                if write.truncations < file.attr.truncations {
                    return Err(Failure::new(ErrorKind::RefreshMap, "truncated since"));
                }
                let first = write.chunk * u64::from(CHUNK_BLOCKS) + u64::from(write.block);
                for (at, block) in (first..).zip(data.chunks(BLOCK_BYTES)) {
                    file.blocks.insert(at, block.to_vec());
                }
                self.data_reply(request, &[])
            }
            Kind::Space => {
                let space = decode_space(body).unwrap();
                let mut files = self.files.borrow_mut();
                let file = files.get_mut(&space.ino.0).unwrap();
                if space.change != SpaceChange::Reserve {
                    file.blocks.retain(|block, _| !(space.from..space.until).contains(block));
                }
                self.data_reply(request, &[])
            }
            Kind::Seek => {
                let seek = decode_seek(body).unwrap();
                let files = self.files.borrow();
                let blocks = &files[&seek.ino.0].blocks;
                let found = (seek.from..seek.until).find(|block| blocks.contains_key(block) != seek.hole);
                encode_found(found.unwrap_or(seek.until))
            }
            Kind::Commit => {
                let (ino, caller_syncs_rows) = decode_commit(body).unwrap();
                assert_eq!(caller_syncs_rows, target_of(request) == Some(0));
                if let Some(file) = self.files.borrow_mut().get_mut(&ino.0) {
                    file.committed = file.blocks.clone();
                }
                self.data_reply(request, &[])
            }
            Kind::Sync => {
                if self.restarts_at_sync.take() {
                    self.restart();
                }
                self.make_durable();
                self.world.env().sleep(self.sync_reply.get()).await;
                EmptyReply {}.encode_to_vec()
            }
            Kind::Lock => LockReply::default().encode_to_vec(),
            _ => EmptyReply {}.encode_to_vec(),
        };
        Ok((reply, payload))
    }

    fn data_reply(&self, request: &Frame, crcs: &[u32]) -> Vec<u8> {
        let generation = self.generation.get() + self.target_is_ahead.get();
        let target = target_of(request).and_then(|target| u32::try_from(target).ok());
        encode_reply(Replier { target: TargetId(target.unwrap()), generation }, crcs)
    }

    fn reply(&self, ino: u64) -> Result<Vec<u8>, Failure> {
        let gone = Failure { kind: ErrorKind::Invalid, errno: 116, message: "no such inode".into() };
        let attr = self.files.borrow().get(&ino).map(|file| file.attr.clone()).ok_or(gone)?;
        Ok(AttrReply { attr: Some(attr), ..AttrReply::default() }.encode_to_vec())
    }

    fn set_attr(&self, request: &SetAttrRequest) -> Result<Vec<u8>, Failure> {
        if let Some(file) = self.files.borrow_mut().get_mut(&request.ino) {
            let attr = &mut file.attr;
            if request.known_truncations.is_some_and(|known| known != attr.truncations) {
                return Err(Failure::new(ErrorKind::RefreshMap, "truncated since"));
            }
            let is_overtaken = request.grow && request.truncations != attr.truncations;
            if let Some(size) = request.size.filter(|_| !is_overtaken) {
                if !request.grow {
                    attr.truncations += 1;
                    let end = size.min(attr.size).div_ceil(BLOCK);
                    file.blocks.retain(|block, _| *block < end);
                }
                attr.size = if request.grow { attr.size.max(size) } else { size };
            }
            attr.mode = request.mode.unwrap_or(attr.mode);
            attr.mtime = request.mtime.unwrap_or(attr.mtime);
            if request.drop_set_id {
                attr.mode &= !0o6000;
            }
        }
        self.reply(request.ino)
    }

    /// Takes the time of a message on its way.
    async fn pause(&self) {
        if !self.delay_most.get().is_zero() {
            let most = u64::try_from(self.delay_most.get().as_micros()).unwrap();
            self.world.env().sleep(Duration::from_micros(self.world.below(most))).await;
        }
    }

    /// Answers a watch at once, or after a while without news.
    async fn watch(&self, request: &WatchRequest) -> Vec<u8> {
        // The numbers of another start mean nothing to this one.
        let is_of_this_start = request.generation == self.generation.get();
        if is_of_this_start {
            for number in &request.answered {
                self.calls.borrow_mut().remove(number);
                let has_failed = request.failed.iter().any(|failed| failed.number == *number);
                self.answered.borrow_mut().push((*number, !has_failed));
            }
        }
        self.resigned.borrow_mut().extend(request.resigned.iter().map(|file| file.ino));
        if request.leaves {
            self.calls.take();
            self.news.take();
        }
        if !request.wait {
            return WatchReply { alone: request.alone, ..WatchReply::default() }.encode_to_vec();
        }
        let seen = if is_of_this_start { request.seen } else { 0 };
        let unseen =
            || self.calls.borrow().range(seen + 1..).map(|(_, call)| call.clone()).collect::<Vec<_>>();
        if unseen().is_empty() {
            self.world.env().sleep(Duration::from_millis(20)).await;
        }
        let calls = unseen();
        let is_alone = self.alone.get() && self.calls.borrow().is_empty();
        let mut news = self.news.borrow_mut();
        news.granted.retain(|granted| granted.grant > seen);
        news.synced.retain(|synced| synced.number > seen);
        WatchReply { alone: is_alone, calls, ..news.clone() }.encode_to_vec()
    }
}

impl Transport for Service {
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>> {
        Box::pin(async move {
            loop {
                self.pause().await;
                let start = self.generation.get();
                let result = self.serve(&request).await;
                if start != self.generation.get() && !self.delay_most.get().is_zero() {
                    // The reply was lost with the connection: the request is sent again.
                    continue;
                }
                let mut reply = Frame::reply(&request.header, result);
                reply.header.generation = self.generation.get();
                // It may arrive after the next restart.
                self.pause().await;
                return Ok(reply);
            }
        })
    }
}

/// The target that a request is for.
fn target_of(request: &Frame) -> Option<u64> {
    match request.header.object {
        Object::Target(target) => Some(target),
        _ => None,
    }
}

/// Runs a test with a client that is alone at its service.
pub(super) fn run(test: impl AsyncFnOnce(&Rc<Service>, &Rc<Client>)) {
    run_with_targets(1, test);
}

/// The same with a service that has several targets.
pub(super) fn run_with_targets(targets: u32, test: impl AsyncFnOnce(&Rc<Service>, &Rc<Client>)) {
    let world = World::new(1);
    let done = world.run(async {
        let service = Service::new(&world);
        service.targets.set(targets);
        let client = Client::connect(&world.env(), service.clone(), "test").await.unwrap();
        rest(&client).await;
        assert!(client.is_alone());
        let tested = timeout(&world.env(), Duration::from_secs(3600), test(&service, &client)).await;
        assert!(tested.is_some(), "a test ends within an hour of its world");
    });
    done.unwrap();
    world.destroy();
}

/// Lets background work of 100 ms be done.
pub(super) async fn rest(client: &Client) {
    client.session.env().sleep(Duration::from_millis(100)).await;
}
