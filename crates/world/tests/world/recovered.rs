//! Restarts of the service lose nothing that was acknowledged, as long as the clients live.
//!
//! Clients change files and names in turn, each after the other's reply, so that a model knows exactly what
//! must be there. The service is killed at any time, also during an operation and during a recovery.

use crate::machine::{Machine, Site};
use crate::remote::{Way, on_machine, restart};
use crate::shared::{end, several};
use penstock_base::{Branch, FileId, LocalBoxFuture};
use penstock_client::{Client, Failure, Purpose};
use penstock_fabric::Remote;
use penstock_sim::World;
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::{
    Attr, LockChange, LockRequest, MakeRequest, ReadDirRequest, RenameRequest, SetAttrRequest, Time,
    XattrRequest,
};
use penstock_wire::{Frame, Kind, Transport};
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

const CLIENTS: usize = 4;
const NAMES: u64 = 6;
const STEPS: usize = 150;

/// An inode as it must be.
#[derive(Clone, Debug, Default, PartialEq)]
struct Node {
    bytes: Vec<u8>,
    mode: u32,
    links: u32,
    value: Option<Vec<u8>>,
    mtime: Option<Time>,
    made: Time,
}

/// Everything that must be there.
#[derive(Default)]
struct Model {
    names: BTreeMap<String, FileId>,
    nodes: BTreeMap<FileId, Node>,
    /// Open files, with the number of the client.
    open: Vec<(usize, FileId)>,
    /// Files that were made without a name and have none.
    nameless: BTreeSet<FileId>,
}

impl Model {
    fn node(&mut self, file: FileId) -> &mut Node {
        self.nodes.get_mut(&file).unwrap()
    }

    fn unlinked(&mut self, file: FileId) {
        self.node(file).links -= 1;
        self.forget(file);
    }

    /// Forgets an inode that nothing refers to.
    fn forget(&mut self, file: FileId) {
        if self.nodes[&file].links == 0 && !self.open.iter().any(|(_, open)| *open == file) {
            self.nodes.remove(&file);
        }
    }

    fn write(&mut self, file: FileId, at: usize, bytes: &[u8]) {
        let node = self.node(file);
        node.mtime = None;
        let end = at + bytes.len();
        if node.bytes.len() < end {
            node.bytes.resize(end, 0);
        }
        node.bytes[at..end].copy_from_slice(bytes);
    }
}

/// The world in which a model is followed.
struct Run {
    world: World,
    clients: Vec<Rc<Client>>,
    model: Model,
}

impl Run {
    fn below(&self, most: u64) -> u64 {
        self.world.below(most)
    }

    fn name(&self) -> String {
        format!("name-{}", self.below(NAMES))
    }

    /// A file with or without a name, for a client that has it open or opens it.
    async fn some_file(&mut self, who: usize) -> Option<FileId> {
        let files: Vec<FileId> = self.model.nodes.keys().copied().collect();
        let file = *files.get(self.below(files.len().max(1) as u64) as usize)?;
        let is_open = self.model.open.contains(&(who, file));
        if !is_open && self.model.nodes[&file].links == 0 {
            return None;
        }
        if !is_open {
            self.clients[who].open(file).await.unwrap();
            self.model.open.push((who, file));
        }
        Some(file)
    }

    async fn step(&mut self) {
        // The first client is of the service's own process, and dies with it.
        let who = 1 + self.below(CLIENTS as u64 - 1) as usize;
        let client = self.clients[who].clone();
        let root = client.root();
        let kind = self.below(16);
        match kind {
            0..3 => self.make(who).await,
            3..8 => {
                let Some(file) = self.some_file(who).await else { return };
                let (at, len) = (self.below(60_000), 1 + self.below(20_000) as usize);
                let bytes = vec![1 + self.below(250) as u8; len];
                let at = match kind {
                    3 => client.append(file, &bytes).await.unwrap(),
                    _ => {
                        client.write(file, at, &bytes).await.unwrap();
                        at
                    }
                };
                self.model.write(file, at as usize, &bytes);
            }
            8 => {
                let Some(file) = self.some_file(who).await else { return };
                let (size, sets_time) = (self.below(60_000), self.below(2) == 0);
                let time = sets_time.then(|| Time::from_ns(self.below(1 << 60) as i64));
                let request = SetAttrRequest {
                    ino: file.ino.0,
                    size: (!sets_time).then_some(size),
                    mtime: time,
                    mode: (self.below(3) == 0).then_some(0o100_600 + self.below(0o100) as u32),
                    ..SetAttrRequest::default()
                };
                client.set_attr(Branch::MAIN, request.clone()).await.unwrap();
                let node = self.model.node(file);
                node.mode = request.mode.unwrap_or(node.mode);
                node.mtime = time;
                if !sets_time {
                    node.bytes.resize(size as usize, 0);
                }
            }
            9 => {
                let Some(file) = self.some_file(who).await else { return };
                let (from, len) = (self.below(60_000), 1 + self.below(30_000));
                let change = if self.below(2) == 0 { SpaceChange::Punch } else { SpaceChange::Zero };
                client.change_space(file, from, len, change, true).await.unwrap();
                let node = self.model.node(file);
                let end = node.bytes.len().min((from + len) as usize);
                if (from as usize) < end {
                    node.bytes[from as usize..end].fill(0);
                }
                node.mtime = None;
            }
            10 => self.rename(who).await,
            11 => {
                let (from, to) = (self.name(), self.name());
                // A file that was made without a name, or one that has one.
                let nameless = self
                    .model
                    .open
                    .iter()
                    .find(|(opener, file)| *opener == who && self.model.nameless.contains(file));
                let named = self.model.names.get(&from).copied();
                let Some(file) = nameless.map(|(_, file)| *file).or(named) else { return };
                if self.model.names.contains_key(&to) {
                    return;
                }
                self.model.nameless.remove(&file);
                client.link(file, root, to.as_bytes()).await.unwrap();
                self.model.names.insert(to, file);
                self.model.node(file).links += 1;
            }
            12 => {
                let name = self.name();
                let Some(file) = self.model.names.remove(&name) else { return };
                client.unlink(root, name.as_bytes(), false).await.unwrap();
                self.model.unlinked(file);
            }
            13 => {
                let Some(file) = self.some_file(who).await else { return };
                let value = vec![self.below(250) as u8; self.below(3000) as usize];
                let request = XattrRequest {
                    ino: file.ino.0,
                    name: b"user.v".into(),
                    value: value.clone(),
                    ..XattrRequest::default()
                };
                client.set_xattr(Branch::MAIN, request).await.unwrap();
                self.model.node(file).value = Some(value);
            }
            14 => match self.below(4) {
                0 => client.sync_all().await.unwrap(),
                1 => _ = client.sync().await,
                2 => self.world.env().sleep(Duration::from_millis(self.below(7000))).await,
                _ => {
                    let Some(file) = self.some_file(who).await else { return };
                    // It may tell that the client of the service's process had something, which is not here.
                    let _ = client.fsync(file).await;
                }
            },
            _ => {
                let at = self.model.open.iter().position(|(opener, _)| *opener == who);
                let Some(at) = at else { return };
                let (_, file) = self.model.open.swap_remove(at);
                client.release(file).await.unwrap();
                self.model.forget(file);
            }
        }
    }

    async fn make(&mut self, who: usize) {
        let (client, name) = (self.clients[who].clone(), self.name());
        if self.model.names.contains_key(&name) {
            return;
        }
        let (nameless, open) = (self.below(8) == 0, self.below(2) == 0);
        let request = MakeRequest {
            dir: client.root().ino.0,
            name: if nameless { Vec::new() } else { name.clone().into() },
            mode: 0o100_644,
            open: open || nameless,
            nameless,
            ..MakeRequest::default()
        };
        let attr = client.make(Branch::MAIN, request).await.unwrap();
        let links = u32::from(!nameless);
        let node =
            Node { mode: attr.mode, links, mtime: Some(attr.mtime), made: attr.btime, ..Node::default() };
        self.model.nodes.insert(attr.file(), node);
        if nameless {
            self.model.nameless.insert(attr.file());
        }
        if open || nameless {
            self.model.open.push((who, attr.file()));
        }
        if !nameless {
            self.model.names.insert(name, attr.file());
        }
    }

    async fn rename(&mut self, who: usize) {
        let (client, from, to) = (self.clients[who].clone(), self.name(), self.name());
        let root = client.root().ino.0;
        let exchange = self.below(4) == 0;
        let Some(file) = self.model.names.get(&from).copied() else { return };
        let other = self.model.names.get(&to).copied();
        if exchange && other.is_none() || other == Some(file) {
            return;
        }
        let request = RenameRequest {
            dir: root,
            name: from.clone().into(),
            new_dir: root,
            new_name: to.clone().into(),
            exchange,
            ..RenameRequest::default()
        };
        client.rename(Branch::MAIN, request).await.unwrap();
        self.model.names.remove(&from);
        self.model.names.insert(to, file);
        match (other, exchange) {
            (Some(other), true) => _ = self.model.names.insert(from, other),
            (Some(other), false) => self.model.unlinked(other),
            (None, _) => {}
        }
    }

    /// Compares everything with the model, through one client, or its open files only.
    async fn check(&self, who: usize, why: &str) {
        let client = &self.clients[who];
        let listing = ReadDirRequest { dir: client.root().ino.0, limit: 100, ..ReadDirRequest::default() };
        let entries = client.read_dir(Branch::MAIN, listing).await.unwrap().entries;
        let found: BTreeMap<String, FileId> = entries
            .iter()
            .map(|entry| (String::from_utf8(entry.name.clone()).unwrap(), entry.file()))
            .filter(|(name, _)| name.starts_with("name-"))
            .collect();
        assert_eq!(found, self.model.names, "{why}: names");
        for (file, node) in &self.model.nodes {
            if node.links == 0 && !self.model.open.contains(&(who, *file)) {
                continue;
            }
            let attr: Attr = client.get_attr(*file).await.unwrap();
            let wanted = (node.bytes.len() as u64, node.mode, node.links, node.made);
            assert_eq!((attr.size, attr.mode, attr.nlink, attr.btime), wanted, "{why}: {file}");
            assert!(
                node.mtime.is_none_or(|time| attr.mtime == time),
                "{why}: {file}: {:?} {node:?}",
                attr.mtime
            );
            let hold = client.hold(*file, Purpose::Read).await.unwrap();
            let parts = hold.reader().await.read(0, 1 << 20).await.unwrap();
            let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
            let differs = bytes.iter().zip(&node.bytes).position(|(found, wanted)| found != wanted);
            assert!(bytes == node.bytes, "{why}: {file} differs at {differs:?}, {} bytes", bytes.len());
            let value = client.get_xattr(*file, b"user.v").await.ok();
            assert_eq!(value, node.value, "{why}: {file}");
        }
    }
}

async fn live(seed: u64, site: &Site, machine: Machine) -> u32 {
    let way = Way::new(&machine);
    let (clients, remotes) = several(&machine, &way, CLIENTS).await;
    let world = machine.world.clone();
    let mut run = Run { world: world.clone(), clients, model: Model::default() };
    let (mut machine, mut restarts) = (Some(machine), 0);
    for step in 0..STEPS {
        let delay = Duration::from_micros(world.below(3000));
        match world.below(12) {
            0 => {
                // During an operation, and sometimes once more during the recovery.
                let twice = world.below(3) == 0;
                let again = async {
                    world.env().sleep(delay).await;
                    let mut next = restart(site, machine.take().unwrap(), &way, Duration::ZERO).await;
                    restarts += 1;
                    if twice {
                        world.env().sleep(Duration::from_micros(world.below(30_000))).await;
                        next = restart(site, next, &way, Duration::ZERO).await;
                        restarts += 1;
                    }
                    machine = Some(next);
                };
                futures_util::future::join(run.step(), again).await;
                run.clients[0] = machine.as_ref().unwrap().client.clone();
                if world.below(2) == 0 {
                    let who = world.below(CLIENTS as u64) as usize;
                    run.check(who, &format!("seed {seed}, step {step}, client {who}")).await;
                }
            }
            _ => run.step().await,
        }
    }
    for who in 0..CLIENTS {
        run.check(who, &format!("seed {seed}, at the end, client {who}")).await;
    }
    while let Some((who, file)) = run.model.open.pop() {
        run.clients[who].release(file).await.unwrap();
    }
    let machine = machine.unwrap();
    let sessions = machine.node.session_reports();
    assert!(sessions.iter().all(|session| session.open_inodes == 0), "seed {seed}: something stays open");
    end(machine, run.clients, remotes).await;
    restarts
}

#[test]
fn what_was_acknowledged_is_there_after_every_restart() {
    let mut restarts = 0;
    for seed in penstock_sim::seeds(0..12) {
        let counted = Cell::new(0);
        on_machine(seed, async |site, machine| counted.set(live(seed, site, machine).await));
        restarts += counted.get();
    }
    assert!(restarts > 0, "{restarts} restarts");
}

/// More requests than a session has slots are on their way when the service is killed, and so are requests
/// for locks. Regression: a lock waited for a slot, all slots waited for the end of the recovery, and that
/// for the lock.
#[test]
fn a_recovery_ends_however_many_requests_wait_for_it() {
    on_machine(300, async |site, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 2).await;
        let client = clients[1].clone();
        let env = machine.world.env();
        let file = crate::remote::make(&client, "locked").await.unwrap();
        let done = Rc::new(Cell::new(0));
        const TASKS: u64 = 800;
        for task in 0..TASKS {
            let (client, done) = (client.clone(), done.clone());
            let work = async move {
                for round in 0..5 {
                    if task % 2 == 0 {
                        let made = crate::remote::make(&client, &format!("{task}-{round}")).await.unwrap();
                        client.release(made).await.unwrap();
                    } else {
                        for change in [LockChange::Shared, LockChange::Unlock] {
                            let owner = task;
                            let change = change.into();
                            let (ino, last) = (file.ino.0, 9);
                            let lock = LockRequest { ino, owner, change, last, ..LockRequest::default() };
                            assert_eq!(client.lock(&lock).await.unwrap(), None);
                        }
                    }
                }
                done.set(done.get() + 1);
            };
            env.spawn("work", Box::pin(work));
        }
        env.sleep(Duration::from_millis(3)).await;
        assert!(done.get() < TASKS, "they are on their way");
        let machine = restart(site, machine, &way, Duration::from_millis(10)).await;
        for _ in 0..60 {
            env.sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(done.get(), TASKS, "requests wait for ever");
        client.release(file).await.unwrap();
        end(machine, vec![client.clone(), client], remotes).await;
    });
}

/// A connection on which the first reply to a creation is lost for a while, and all others are late.
struct Lossy {
    remote: Rc<Remote>,
    loses: Cell<bool>,
    again: Notify,
    others: Notify,
}

impl Transport for Lossy {
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>> {
        Box::pin(async move {
            let kind = request.header.kind;
            let reply = self.remote.call(request.clone()).await;
            match kind {
                Kind::Make if self.loses.get() => {
                    self.again.notified().await;
                    self.remote.call(request).await
                }
                _ if self.loses.get() => {
                    self.others.notified().await;
                    reply
                }
                _ => reply,
            }
        })
    }
}

/// The service dies after it has made a file durable that is open from the start, before the reply arrives,
/// and the client's lease time runs out. Regression: the reply of the next start waited for the lease time
/// while open files were reported, and the file was not among them. Another client removed the name, and what
/// was open was gone.
#[test]
fn a_file_that_was_made_while_the_service_died_stays_open() {
    on_machine(301, async |site, machine| {
        let way = Way::new(&machine);
        let (mut clients, remotes) = several(&machine, &way, 2).await;
        let remote = Remote::connect(&machine.env, way.clone()).await.unwrap();
        let (loses, again, others) = (Cell::new(false), Notify::new(), Notify::new());
        let lossy = Rc::new(Lossy { remote, loses, again, others });
        let client = Client::connect(&machine.env, lossy.clone(), "lossy").await.unwrap();
        // From here on it takes part.
        client.release(crate::remote::make(&client, "before").await.unwrap()).await.unwrap();
        lossy.loses.set(true);
        let env = machine.world.env();
        let (made, maker) = (Rc::new(Cell::new(None)), client.clone());
        let result = made.clone();
        let work = async move { result.set(Some(crate::remote::make(&maker, "made").await.unwrap())) };
        env.spawn("make", Box::pin(work));
        env.sleep(Duration::from_secs(1)).await;
        let other = crate::remote::make(&clients[1], "other").await.unwrap();
        clients[1].fsync(other).await.unwrap();
        clients[1].release(other).await.unwrap();
        env.sleep(penstock_session::LEASE * 3 / 4).await;
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        lossy.again.notify_waiters();
        env.sleep(Duration::from_secs(1)).await;
        assert!(made.get().is_none(), "the reply waits for the lease time");
        lossy.loses.set(false);
        lossy.others.notify_waiters();
        env.sleep(penstock_session::LEASE).await;
        let file = made.get().expect("it is made");
        clients[1].unlink(clients[1].root(), b"made", false).await.unwrap();
        env.sleep(Duration::from_secs(5)).await;
        client.write(file, 0, b"there").await.unwrap();
        client.fsync(file).await.unwrap();
        assert_eq!(crate::remote::read(&client, file).await, b"there");
        client.release(file).await.unwrap();
        clients.push(client);
        end(machine, clients, remotes).await;
        lossy.remote.close();
    });
}
