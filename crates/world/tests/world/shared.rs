//! Tests of several clients of one file system: each sees the changes of the others, also after failures.

use crate::machine::{Machine, Site};
use crate::remote::{Way, make, on_machine, read, request_of, restart};
use futures_util::future::join_all;
use penstock_base::{Branch, ErrorKind, FileId, LocalBoxFuture};
use penstock_client::{Client, Failure, KernelCache, Purpose, Staged};
use penstock_fabric::Remote;
use penstock_sim::World;
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::{LockChange, LockRequest, RenameRequest, SetAttrRequest, Time, WatchRequest};
use penstock_wire::{Frame, Kind, Transport};
use prost::Message;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

const EIO: u16 = 5;
const EEXIST: u16 = 17;
const RECORD: usize = 16;

/// Connects a client over a connection of its own.
async fn join(machine: &Machine, way: &Rc<Way>) -> (Rc<Client>, Rc<Remote>) {
    let remote = Remote::connect(&machine.env, way.clone()).await.unwrap();
    (Client::connect(&machine.env, remote.clone(), "another").await.unwrap(), remote)
}

pub(crate) async fn several(
    machine: &Machine,
    way: &Rc<Way>,
    count: usize,
) -> (Vec<Rc<Client>>, Vec<Rc<Remote>>) {
    let (mut clients, mut remotes) = (vec![machine.client.clone()], Vec::new());
    for _ in 1..count {
        let (client, remote) = join(machine, way).await;
        clients.push(client);
        remotes.push(remote);
    }
    (clients, remotes)
}

pub(crate) async fn end(machine: Machine, clients: Vec<Rc<Client>>, remotes: Vec<Rc<Remote>>) {
    for client in &clients[1..] {
        client.close().await.unwrap();
    }
    remotes.iter().for_each(|remote| remote.close());
    machine.audit().await;
    machine.stop().await;
}

pub(crate) async fn open(client: &Client, name: &str) -> FileId {
    let file = client.lookup(client.root(), name.as_bytes()).await.unwrap().file();
    client.open(file).await.unwrap();
    file
}

/// A connection over which nothing can be repeated after a restart, as long as it says so: everything that
/// was not durable is lost.
pub struct Forgetful {
    remote: Rc<Remote>,
    pub forgets: Cell<bool>,
}

impl Transport for Forgetful {
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>> {
        Box::pin(async move {
            let kind = request.header.kind;
            if self.forgets.get() && matches!(kind, Kind::Repeat | Kind::Write | Kind::Space) {
                return Err(Failure::new(ErrorKind::Internal, "it was forgotten"));
            }
            self.remote.call(request).await
        })
    }
}

/// Connects a client that can forget.
pub async fn join_forgetful(machine: &Machine, way: &Rc<Way>) -> (Rc<Client>, Rc<Forgetful>) {
    let remote = Remote::connect(&machine.env, way.clone()).await.unwrap();
    let forgetful = Rc::new(Forgetful { remote, forgets: Cell::new(false) });
    (Client::connect(&machine.env, forgetful.clone(), "forgetful").await.unwrap(), forgetful)
}

impl Forgetful {
    /// Starts the service again, and loses what the client had not made durable.
    async fn restart(&self, site: &Site, machine: Machine, way: &Rc<Way>, client: &Client) -> Machine {
        self.forgets.set(true);
        let machine = restart(site, machine, way, Duration::ZERO).await;
        client.get_attr(client.root()).await.unwrap();
        self.forgets.set(false);
        machine
    }
}

/// Model of a kernel's page cache: full files, until pages of them must be dropped.
pub struct Pages {
    world: World,
    files: RefCell<BTreeMap<FileId, Vec<u8>>>,
    /// True while a size is being changed; no page is dropped then.
    resizing: Cell<bool>,
    resized: Notify,
}

/// Drops all pages of files, if none of them is locked for long.
pub async fn drop_all(cache: &impl KernelCache, files: Vec<(FileId, u64)>) {
    for (file, _) in files {
        cache.drop_pages(file, 0..u64::MAX).await;
    }
}

/// The `hide_pages` of a model kernel: it drops all pages of the files.
macro_rules! hides_all {
    () => {
        fn hide_pages<'a>(
            &'a self,
            files: Vec<(penstock_base::FileId, u64)>,
            _within: std::time::Duration,
            _lasts: &'a dyn Fn() -> bool,
        ) -> penstock_base::LocalBoxFuture<'a, ()> {
            Box::pin(crate::shared::drop_all(self, files))
        }
    };
}
pub(crate) use hides_all;

impl KernelCache for Pages {
    fn drop_pages(&self, file: FileId, _bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            self.world.env().sleep(Duration::from_micros(self.world.below(300))).await;
            while self.resizing.get() {
                let resized = self.resized.notified();
                if self.resizing.get() {
                    resized.await;
                }
            }
            self.files.borrow_mut().remove(&file);
        })
    }

    hides_all!();

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        self.world.env().sleep(Duration::from_secs(1))
    }
}

impl Pages {
    pub fn of(client: &Client, world: &World) -> Rc<Self> {
        let (resizing, resized) = (Cell::new(false), Notify::new());
        let pages = Rc::new(Self { world: world.clone(), files: RefCell::default(), resizing, resized });
        client.set_kernel_cache(Some(pages.clone()));
        pages
    }

    /// Reads as a program does: from cached pages if there are any.
    pub async fn try_read(&self, client: &Client, file: FileId, len: u64) -> Result<Vec<u8>, Failure> {
        if let Some(kept) = self.files.borrow().get(&file) {
            return Ok(kept.clone());
        }
        let hold = client.hold(file, Purpose::Read).await?;
        let parts = hold.reader().await.read(0, len).await?;
        let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
        self.files.borrow_mut().insert(file, bytes.clone());
        hold.serves(0..len);
        Ok(bytes)
    }

    async fn read(&self, client: &Client, file: FileId, len: u64) -> Vec<u8> {
        self.try_read(client, file, len).await.unwrap()
    }

    async fn resize(&self, client: &Client, file: FileId, size: u64) {
        self.resizing.set(true);
        let change = SetAttrRequest { ino: file.ino.0, size: Some(size), ..SetAttrRequest::default() };
        let hold = client.hold_to_set(Branch::MAIN, &change).await.unwrap();
        assert_eq!(hold.set_attr(change).await.unwrap().size, size);
        if let Some(kept) = self.files.borrow_mut().get_mut(&file) {
            kept.resize(size as usize, 0);
        }
        self.resizing.set(false);
        self.resized.notify_waiters();
        drop(hold);
    }

    async fn write(&self, client: &Client, file: FileId, bytes: &[u8]) {
        let hold = client.hold(file, Purpose::Write).await.unwrap();
        hold.writer().await.write(0, Staged::of(0, bytes)).await.unwrap();
        if let Some(kept) = self.files.borrow_mut().get_mut(&file) {
            *kept = bytes.to_vec();
        }
        hold.serves(0..bytes.len() as u64);
    }
}

#[test]
fn appends_of_all_clients_are_there_once_and_in_their_order() {
    on_machine(90, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        make(&clients[0], "log").await.unwrap();
        let breaks = way.breaks();
        let writers = clients.iter().enumerate().map(|(who, client)| async move {
            let file = open(client, "log").await;
            for number in 0..40u64 {
                let record = [(who as u64).to_le_bytes(), number.to_le_bytes()].concat();
                let at = client.append(file, &record).await.unwrap();
                let seen = client.get_attr(file).await.unwrap().size;
                assert!(seen >= at + RECORD as u64, "{seen} after an append at {at}");
                let back = client.read(file, at, RECORD as u64).await.unwrap();
                assert_eq!(penstock_base::buf::gather(&back)[..], record[..]);
            }
            client.release(file).await.unwrap();
        });
        futures_util::future::join_all(writers).await;
        drop(breaks);
        let file = open(&clients[1], "log").await;
        let all = read(&clients[1], file).await;
        assert_eq!(all.len(), 3 * 40 * RECORD);
        let mut next = [0u64; 3];
        for record in all.chunks(RECORD) {
            let who = u64::from_le_bytes(record[..8].try_into().unwrap()) as usize;
            assert_eq!(record[8..], next[who].to_le_bytes());
            next[who] += 1;
        }
        clients[1].release(file).await.unwrap();
        end(machine, clients, remotes).await;
    });
}

/// A write or a read of the register, with its start and end time.
struct Event {
    value: u64,
    from: u64,
    until: u64,
}

#[test]
fn a_read_finds_what_was_written_last_also_in_pages() {
    for seed in 91..97 {
        on_machine(seed, async |_, machine| {
            let way = Way::new(&machine);
            let (clients, remotes) = several(&machine, &way, 3).await;
            make(&clients[0], "register").await.unwrap();
            let breaks = (seed % 2 == 0).then(|| way.breaks());
            let (clock, writes, reads) =
                (Cell::new(1u64), RefCell::new(Vec::new()), RefCell::new(Vec::new()));
            let tick = || clock.replace(clock.get() + 1);
            writes.borrow_mut().push(Event { value: 0, from: 0, until: 0 });
            let world = &machine.world;
            let lives = clients.iter().map(|client| {
                let (tick, writes, reads) = (&tick, &writes, &reads);
                async move {
                    let pages = Pages::of(client, world);
                    let file = open(client, "register").await;
                    for _ in 0..60 {
                        world.env().sleep(Duration::from_micros(world.below(800))).await;
                        let from = tick();
                        if world.below(3) == 0 {
                            pages.write(client, file, &from.to_le_bytes()).await;
                            writes.borrow_mut().push(Event { value: from, from, until: tick() });
                        } else {
                            let found = pages.read(client, file, 8).await;
                            let value = found.try_into().map_or(0, u64::from_le_bytes);
                            reads.borrow_mut().push(Event { value, from, until: tick() });
                        }
                    }
                    client.release(file).await.unwrap();
                    client.set_kernel_cache(None);
                }
            });
            futures_util::future::join_all(lives).await;
            drop(breaks);
            let writes = writes.take();
            for read in reads.take() {
                let write = writes.iter().find(|write| write.value == read.value).unwrap();
                assert!(write.from < read.until, "a value from the future");
                let newer = writes.iter().find(|other| other.from > write.until && other.until < read.from);
                assert!(
                    newer.is_none(),
                    "{} was read after {} was written",
                    read.value,
                    newer.unwrap().value
                );
            }
            end(machine, clients, remotes).await;
        });
    }
}

fn lock(file: FileId, owner: u64, change: LockChange) -> LockRequest {
    LockRequest { ino: file.ino.0, owner, last: u64::MAX, change: change.into(), ..LockRequest::default() }
}

#[test]
fn a_lock_keeps_all_others_out_and_outlives_a_restart() {
    on_machine(97, async |site, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        make(&clients[0], "counter").await.unwrap();
        let never = Notify::new();
        let count = async |client: &Rc<Client>, owner: u64, rounds: u64| {
            let file = open(client, "counter").await;
            for _ in 0..rounds {
                assert!(client.lock_waiting(lock(file, owner, LockChange::Exclusive), &never).await.unwrap());
                let bytes = read(client, file).await;
                let value = bytes.try_into().map_or(0, u64::from_le_bytes);
                client.write(file, 0, &(value + 1).to_le_bytes()).await.unwrap();
                client.lock(&lock(file, owner, LockChange::Unlock)).await.unwrap();
            }
            client.release(file).await.unwrap();
        };
        let breaks = way.breaks();
        futures_util::future::join_all(clients.iter().map(|client| count(client, 1, 20))).await;
        drop(breaks);
        let file = open(&clients[1], "counter").await;
        assert_eq!(read(&clients[1], file).await, 60u64.to_le_bytes());
        clients[1].fsync(file).await.unwrap();
        // A lock that one client owns across a restart of the service is not granted to another.
        assert_eq!(clients[1].lock(&lock(file, 7, LockChange::Exclusive)).await.unwrap(), None);
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        let conflict = clients[2].lock(&lock(file, 7, LockChange::Shared)).await.unwrap();
        assert_eq!(conflict.unwrap().change(), LockChange::Exclusive);
        assert_eq!(read(&clients[2], file).await, 60u64.to_le_bytes());
        // The owner of the lock disappears without releasing it.
        let waits = clients[2].lock_waiting(lock(file, 7, LockChange::Exclusive), &never);
        let gone = async {
            way.server.borrow_mut().take();
            remotes[0].close();
            way.lead_to(&machine);
        };
        assert!(futures_util::future::join(waits, gone).await.0.unwrap());
        let rest = vec![machine.client.clone(), clients[2].clone()];
        clients[2].release(file).await.unwrap();
        clients[2].fsync(file).await.unwrap();
        end(machine, rest, remotes).await;
    });
}

#[test]
fn a_name_is_made_by_one() {
    on_machine(98, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        for round in 0..20 {
            let name = format!("one-{round}");
            let made = clients.iter().map(|client| make(client, &name));
            let made = futures_util::future::join_all(made).await;
            assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1);
            let lost = made.iter().filter_map(|made| made.as_ref().err());
            assert!(lost.into_iter().all(|failure| failure.errno == EEXIST));
            for (client, made) in clients.iter().zip(made) {
                if let Ok(file) = made {
                    client.release(file).await.unwrap();
                }
            }
        }
        end(machine, clients, remotes).await;
    });
}

/// Regression: leases from before a restart had higher numbers than all leases that the service granted
/// since. The clients kept them when they were revoked, and two clients had an exclusive lease on one file.
#[test]
fn clients_that_shared_a_file_agree_after_a_restart() {
    for seed in 110..114 {
        on_machine(seed, async |site, machine| {
            let way = Way::new(&machine);
            let (clients, remotes) = several(&machine, &way, 3).await;
            make(&clients[0], "register").await.unwrap();
            let mut machine = machine;
            let (one, other) = (&clients[1], &clients[2]);
            let pages = [Pages::of(one, &machine.world), Pages::of(other, &machine.world)];
            let inos = [open(one, "register").await, open(other, "register").await];
            let mut value = 0u64;
            for life in 0..3 {
                for round in 0..12 {
                    let (writer, reader) = if round % 2 == 0 { (0, 1) } else { (1, 0) };
                    value += 1;
                    pages[writer].write(&clients[1 + writer], inos[writer], &value.to_le_bytes()).await;
                    // After a restart the loss of names that were made before is reported once.
                    let synced = clients[1 + writer].fsync(inos[writer]).await;
                    assert!(synced.is_ok() || round < 2, "life {life} round {round}: {synced:?}");
                    let found = pages[reader].read(&clients[1 + reader], inos[reader], 8).await;
                    assert_eq!(found, value.to_le_bytes(), "life {life} round {round}");
                }
                machine = restart(site, machine, &way, Duration::ZERO).await;
            }
            for (client, file) in clients[1..].iter().zip(inos) {
                client.set_kernel_cache(None);
                client.release(file).await.unwrap();
            }
            let clients = vec![machine.client.clone(), one.clone(), other.clone()];
            end(machine, clients, remotes).await;
        });
    }
}

/// Regression: two clients request, many at a time, files that the other one has not synced. Each waits for
/// the other, which needs slots for the sync. 160 opens by any user ended both sessions, and lost everything
/// that was not synced.
#[test]
fn many_that_wait_for_each_other_are_served() {
    on_machine(116, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let all = 300u64;
        let bytes = |number: u64| vec![number as u8; 100 + number as usize];
        let mut files = [Vec::new(), Vec::new()];
        for round in 0..3 {
            for (client, files) in clients[1..].iter().zip(&mut files) {
                files.clear();
                for number in 0..all {
                    let file =
                        make(client, &format!("{round} {number} of {}", client.session())).await.unwrap();
                    client.write(file, 0, &bytes(number)).await.unwrap();
                    files.push(file);
                }
            }
            let ask = |(at, number): (usize, u64)| {
                let (client, file) = (&clients[1 + at], files[1 - at][number as usize]);
                async move {
                    let size = match round {
                        0 => client.get_attr(file).await.unwrap().size,
                        1 => {
                            let size = client.open(file).await.unwrap();
                            client.release(file).await.unwrap();
                            size
                        }
                        _ => client.set_attr(Branch::MAIN, size_of(file, 100 + number)).await.unwrap().size,
                    };
                    assert_eq!(size, 100 + number);
                }
            };
            let asked = (0..all).flat_map(|number| [(0, number), (1, number)]).map(ask);
            let done =
                penstock_base::env::timeout(&machine.env, Duration::from_secs(20), join_all(asked)).await;
            assert!(done.is_some(), "round {round}: they wait for each other");
        }
        for (client, files) in clients[1..].iter().zip(&files) {
            assert_eq!(read(client, files[7]).await, bytes(7));
        }
        end(machine, clients, remotes).await;
    });
}

/// Restarts the service `delay` microseconds after a change of a client has begun. Also returns the change's
/// result, and true if the change was running during the restart.
async fn restart_during(
    site: &Site,
    machine: Machine,
    way: &Rc<Way>,
    delay: u64,
    change: impl Future<Output = Result<(), Failure>> + 'static,
) -> (Machine, Result<(), Failure>, bool) {
    let done = Rc::new(RefCell::new(None));
    let (outcome, env) = (done.clone(), machine.env.clone());
    env.spawn("change", Box::pin(async move { *outcome.borrow_mut() = Some(change.await) }));
    env.sleep(Duration::from_micros(delay)).await;
    let met = done.borrow().is_none();
    let machine = restart(site, machine, way, Duration::ZERO).await;
    while done.borrow().is_none() {
        env.sleep(Duration::from_micros(100)).await;
    }
    let result = done.take().expect("it was just there");
    (machine, result, met)
}

/// Regression: a client's state of a file can be old even if it is the only client. A change of size is made
/// in steps, and is repeated if some of the steps were made before a restart. fallocate failed in that case.
#[test]
fn space_of_a_file_is_changed_though_a_part_of_that_was_done_before() {
    on_machine(118, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 2).await;
        let client = &clients[1];
        let file = make(client, "file").await.unwrap();
        client.write(file, 0, &[1; 5000]).await.unwrap();
        client.fsync(file).await.unwrap();
        let steps = |sequence, size| {
            let step = SetAttrRequest { known_truncations: None, ..size_of(file, size) };
            machine
                .node
                .serve(request_of(client.session(), sequence, Kind::SetAttr, step.encode_to_vec()), true)
        };
        for (at, change) in (0..).zip([SpaceChange::Reserve, SpaceChange::Zero, SpaceChange::Reserve]) {
            let size = client.get_attr(file).await.unwrap().size;
            steps(1000 + at, size).await.into_result().unwrap();
            client.change_space(file, 0, size + 1000, change, false).await.unwrap();
            assert_eq!(client.get_attr(file).await.unwrap().size, size + 1000);
        }
        steps(1010, client.get_attr(file).await.unwrap().size).await.into_result().unwrap();
        client.change_space(file, 0, 4096, SpaceChange::Punch, true).await.unwrap();
        assert_eq!(read(client, file).await, [0; 8000]);
        client.release(file).await.unwrap();
        end(machine, clients, remotes).await;
    });
}

/// Regression: a change of a file needs several requests, and the service restarts between two of them.
/// Either the change is complete, or an fsync must report that it is not. The first part was lost and the
/// rest acknowledged, and the fsync reported nothing.
#[test]
fn what_straddles_a_restart_is_done_again_or_told() {
    on_machine(117, async |site, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let (client, mut machine) = (clients[1].clone(), machine);
        let (old, mut straddled) = (vec![b'a'; 12_288], 0);
        let file = make(&client, "file").await.unwrap();
        for (delay, grows) in (0..150).flat_map(|delay| [(delay, false), (delay, true)]) {
            client.set_attr(Branch::MAIN, size_of(file, 0)).await.unwrap();
            client.write(file, 0, &old).await.unwrap();
            if grows {
                client.set_attr(Branch::MAIN, size_of(file, 10_000)).await.unwrap();
            }
            let _ = client.sync_all().await;
            client.fsync(file).await.unwrap();
            let changer = client.clone();
            let change = async move {
                match grows {
                    true => changer.set_attr(Branch::MAIN, size_of(file, 12_288)).await.map(|_| ()),
                    false => changer.change_space(file, 100, 12_000, SpaceChange::Zero, true).await,
                }
            };
            let (result, met);
            (machine, result, met) = restart_during(site, machine, &way, delay, change).await;
            straddled += u32::from(met);
            client.get_attr(client.root()).await.unwrap();
            let zeros = if grows { 10_000..12_288 } else { 100..12_100 };
            if result.and(client.fsync(file).await).is_ok() {
                let found = read(&client, file).await;
                assert!(found[zeros].iter().all(|byte| *byte == 0), "grows {grows}, after {delay} us");
            }
        }
        assert!(straddled > 20, "{straddled} changes met a restart");
        client.release(file).await.unwrap();
        let clients = vec![machine.client.clone(), client, clients[2].clone()];
        end(machine, clients, remotes).await;
    });
}

/// Regression: a file whose contents were lost in a crash must keep its own name until the loss has been
/// reported. A rename put it over a durable file and succeeded, and both files' contents were lost.
#[test]
fn a_file_that_lost_its_contents_takes_no_other_name() {
    on_machine(118, async |site, machine| {
        let way = Way::new(&machine);
        let (client, forgetful) = join_forgetful(&machine, &way).await;
        let mut machine = machine;
        let (old, new) = (vec![b'o'; 9_000], vec![b'n'; 9_000]);
        let mut refused = 0;
        for delay in 0..100 {
            let names = [format!("target {delay}"), format!("new {delay}")];
            let target = make(&client, &names[0]).await.unwrap();
            client.write(target, 0, &old).await.unwrap();
            let moved = make(&client, &names[1]).await.unwrap();
            let _ = client.sync_all().await;
            client.fsync(target).await.unwrap();
            client.write(moved, 0, &new).await.unwrap();
            client.release(moved).await.unwrap();
            let root = client.root().ino.0;
            let rename = RenameRequest {
                dir: root,
                name: names[1].clone().into(),
                new_dir: root,
                new_name: names[0].clone().into(),
                ..RenameRequest::default()
            };
            let (renamer, request) = (client.clone(), rename.clone());
            let first = async move { renamer.rename(Branch::MAIN, request).await.map(drop) };
            let result;
            forgetful.forgets.set(true);
            (machine, result, _) = restart_during(site, machine, &way, delay, first).await;
            client.get_attr(client.root()).await.unwrap();
            forgetful.forgets.set(false);
            let found = open(&client, &names[0]).await;
            let bytes = read(&client, found).await;
            assert!(bytes == old || bytes == new, "after {delay} us: {} bytes, {result:?}", bytes.len());
            if found == target && result.is_err() {
                refused += 1;
                assert!(client.rename(Branch::MAIN, rename.clone()).await.is_err(), "nobody was told yet");
                assert!(client.fsync(moved).await.is_err());
                client.rename(Branch::MAIN, rename).await.unwrap();
            }
            for file in [target, found] {
                client.release(file).await.unwrap();
            }
        }
        assert!(refused > 10, "{refused} were refused");
        // A rename that had been acknowledged may be lost too.
        let _ = client.sync_all().await;
        end(machine, vec![client.clone(), client], vec![forgetful.remote.clone()]).await;
    });
}

fn size_of(file: FileId, size: u64) -> SetAttrRequest {
    SetAttrRequest { ino: file.ino.0, size: Some(size), ..SetAttrRequest::default() }
}

/// Regression: an fsync covered the writes of its own client but not those of another client. After a crash
/// the old bytes were there.
#[test]
fn an_fsync_covers_what_another_client_wrote() {
    on_machine(120, async |site, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let file = make(&clients[1], "file").await.unwrap();
        clients[1].write(file, 0, &[1; 10_000]).await.unwrap();
        clients[1].fsync(file).await.unwrap();
        let other = open(&clients[2], "file").await;
        clients[1].write(file, 5000, &[2; 10_000]).await.unwrap();
        clients[2].fsync(other).await.unwrap();
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        let found = read(
            &machine.client,
            machine.client.lookup(machine.client.root(), b"file").await.unwrap().file(),
        )
        .await;
        assert!(found.len() == 15_000 && found[..5000] == [1; 5000] && found[5000..] == [2; 10_000]);
        clients[1].fsync(file).await.unwrap();
        clients[1].release(file).await.unwrap();
        clients[2].release(other).await.unwrap();
        let clients = vec![machine.client.clone(), clients[1].clone(), clients[2].clone()];
        end(machine, clients, remotes).await;
    });
}

/// A file loses its last name while another client has it open. Regression: the client that removed it
/// forgot the size that it had not sent yet, so the other one neither read its bytes nor made them durable,
/// and wrote over them.
#[test]
fn a_removed_file_keeps_what_was_written_while_another_client_has_it_open() {
    on_machine(127, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let file = make(&clients[1], "file").await.unwrap();
        clients[1].write(file, 0, &[1; 5000]).await.unwrap();
        clients[1].fsync(file).await.unwrap();
        open(&clients[2], "file").await;
        clients[1].append(file, &[2; 100]).await.unwrap();
        clients[1].release(file).await.unwrap();
        clients[1].unlink(machine.client.root(), b"file", false).await.unwrap();
        let found = read(&clients[2], file).await;
        assert!(found.len() == 5100 && found[..5000] == [1; 5000] && found[5000..] == [2; 100]);
        assert_eq!(clients[2].append(file, &[3; 50]).await.unwrap(), 5100);
        clients[2].fsync(file).await.unwrap();
        clients[2].release(file).await.unwrap();
        end(machine, clients, remotes).await;
    });
}

/// A program opens a file while another one on the same mount removes its name. Regression: the size that was
/// not sent yet was forgotten between the two, and the open file lacked what had been appended.
#[test]
fn a_file_that_is_opened_while_it_is_removed_has_its_last_append() {
    on_machine(128, async |_, machine| {
        let (client, root) = (&machine.client, machine.client.root());
        let mut opened = 0;
        for round in 0..100 {
            let file = make(client, "file").await.unwrap();
            client.write(file, 0, &[1; 5000]).await.unwrap();
            client.fsync(file).await.unwrap();
            client.append(file, &[2; 100]).await.unwrap();
            client.release(file).await.unwrap();
            let (removed, open) =
                futures_util::future::join(client.unlink(root, b"file", false), client.open(file)).await;
            removed.unwrap();
            if open.is_ok() {
                opened += 1;
                let found = read(client, file).await;
                assert_eq!((found.len(), found[5000..] == [2; 100]), (5100, true), "round {round}");
                client.release(file).await.unwrap();
            }
        }
        assert!(opened > 10, "{opened} of 100 were opened in time");
        let clients = vec![machine.client.clone()];
        end(machine, clients, Vec::new()).await;
    });
}

/// Regression: when several files lost writes in a restart, one fsync reported the loss for all of them. So
/// did an fsync of a directory.
#[test]
fn every_file_that_lost_writes_hears_of_it() {
    on_machine(121, async |site, machine| {
        let way = Way::new(&machine);
        let (mut clients, mut remotes) = several(&machine, &way, 2).await;
        let (one, forgetful) = join_forgetful(&machine, &way).await;
        clients.insert(1, one.clone());
        remotes.push(forgetful.remote.clone());
        let mut inos = Vec::new();
        for name in ["f1", "f2", "f3", "f4"] {
            let file = make(&one, name).await.unwrap();
            one.write(file, 0, &[1; 4096]).await.unwrap();
            one.fsync(file).await.unwrap();
            inos.push(file);
        }
        for file in &inos[..3] {
            one.write(*file, 4096, &[2; 4096]).await.unwrap();
        }
        // Another client looks at two of the files: their size and time are sent for it, but they are not
        // synced.
        for name in ["f1", "f2"] {
            let file = clients[2].lookup(clients[2].root(), name.as_bytes()).await.unwrap().file();
            assert_eq!(clients[2].get_attr(file).await.unwrap().size, 8192);
        }
        let machine = forgetful.restart(site, machine, &way, &one).await;
        assert!(one.sync_directory().await.is_err(), "sizes that were sent are lost");
        one.sync_directory().await.unwrap();
        let through = one.reported(inos[0]);
        for file in &inos[..3] {
            assert_eq!(one.fsync(*file).await.unwrap_err().errno, EIO, "{file}");
        }
        for file in &inos {
            one.fsync(*file).await.unwrap();
        }
        // A descriptor that was open all the time also gets the error, although another descriptor has had
        // it.
        assert_eq!(one.fsync_through(inos[0], &through).await.unwrap_err().errno, EIO);
        one.fsync_through(inos[0], &through).await.unwrap();
        for file in inos {
            one.release(file).await.unwrap();
        }
        let clients = vec![machine.client.clone(), one, clients[2].clone()];
        end(machine, clients, remotes).await;
    });
}

/// Regression: a sync sent the time of the last write, which replaced the time of a later change of the mode.
#[test]
fn the_time_of_a_change_never_goes_back() {
    on_machine(122, async |_, machine| {
        let client = machine.client.clone();
        let file = make(&client, "file").await.unwrap();
        client.write(file, 0, &[1; 100]).await.unwrap();
        machine.env.sleep(Duration::from_millis(300)).await;
        let change = SetAttrRequest { ino: file.ino.0, mode: Some(0o600), ..SetAttrRequest::default() };
        let changed = client.set_attr(Branch::MAIN, change).await.unwrap().ctime;
        client.fsync(file).await.unwrap();
        assert_eq!(client.get_attr(file).await.unwrap().ctime, changed);
        client.release(file).await.unwrap();
        end(machine, vec![client], Vec::new()).await;
    });
}

/// Regression: a time that a program set was overwritten by the time of the write before it, which was sent
/// because another client looked at the file.
#[test]
fn a_time_that_was_set_stays() {
    for seed in 300..312 {
        on_machine(seed, async |_, machine| {
            let way = Way::new(&machine);
            let (clients, remotes) = several(&machine, &way, 3).await;
            let file = make(&clients[1], "file").await.unwrap();
            let world = &machine.world;
            for round in 0..60i64 {
                let pause = || world.env().sleep(Duration::from_micros(world.below(600)));
                let set = async {
                    clients[1].write(file, round as u64 * 100, &[1; 100]).await.unwrap();
                    pause().await;
                    let mtime = Some(Time::from_ns(round * 1_000_000_007));
                    let change = SetAttrRequest { ino: file.ino.0, mtime, ..SetAttrRequest::default() };
                    clients[1].set_attr(Branch::MAIN, change).await.unwrap();
                };
                let look = async {
                    for _ in 0..4 {
                        pause().await;
                        clients[2].get_attr(file).await.unwrap();
                    }
                };
                futures_util::future::join(set, look).await;
                for client in &clients {
                    let found = client.get_attr(file).await.unwrap().mtime;
                    assert_eq!(found, Time::from_ns(round * 1_000_000_007), "seed {seed}, round {round}");
                }
            }
            clients[1].release(file).await.unwrap();
            end(machine, clients, remotes).await;
        });
    }
}

/// Regression: a number at its limit in a request ended the process.
#[test]
fn numbers_at_their_limits_are_answered() {
    on_machine(123, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 2).await;
        let watch = WatchRequest { seen: u64::MAX, answered: vec![u64::MAX], ..WatchRequest::default() };
        let request = request_of(clients[1].session(), 0, Kind::Watch, watch.encode_to_vec());
        let reply = machine.node.serve(request, true).await;
        assert!(reply.into_result().is_ok());
        end(machine, clients, remotes).await;
    });
}

/// Regression: removing a file walked through its size, 4 GiB at a time. For a file of 4 EiB that took the
/// only worker a day.
#[test]
fn huge_files_without_data_are_removed_at_once() {
    on_machine(124, async |_, machine| {
        let client = machine.client.clone();
        for (name, write) in [("empty", false), ("some", true)] {
            let file = make(&client, name).await.unwrap();
            let size = SetAttrRequest { ino: file.ino.0, size: Some(1 << 62), ..SetAttrRequest::default() };
            client.set_attr(Branch::MAIN, size).await.unwrap();
            if write {
                for at in [0, 1 << 40, (1 << 62) - 4096] {
                    client.write(file, at, &[7; 4096]).await.unwrap();
                }
                client.fsync(file).await.unwrap();
            }
            client.unlink(client.root(), name.as_bytes(), false).await.unwrap();
            client.release(file).await.unwrap();
        }
        end(machine, vec![client], Vec::new()).await;
    });
}

/// Model of a kernel that unlocks a page only after the data that it sends from the page has been accepted.
struct Locked {
    taken: Cell<bool>,
    news: Notify,
}

impl KernelCache for Locked {
    fn drop_pages(&self, _ino: FileId, _bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            while !self.taken.get() {
                let news = self.news.notified();
                if !self.taken.get() {
                    news.await;
                }
            }
        })
    }

    hides_all!();

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// Operation of a program during which its kernel keeps pages of the file that must be dropped.
#[derive(Clone, Copy, Debug)]
enum Deed {
    Page,
    Resize(u64),
    /// The kernel keeps no page for this one.
    Write,
}

/// Regression: two clients may read a file, and the kernel of each drops no page before something has been
/// accepted or answered: a changed page that is being sent, or a change of size, during which no pages are
/// written. The shared lease of the client that is second to request the right to change the file is revoked.
/// That revocation waited for the answer to the client's own request.
#[test]
fn what_keeps_pages_does_not_wait_for_a_lease_that_waits_for_them() {
    let deeds = [
        [Deed::Page, Deed::Page],
        [Deed::Resize(5000), Deed::Page],
        [Deed::Resize(5000), Deed::Resize(20_000)],
        [Deed::Resize(20_000), Deed::Resize(5000)],
        [Deed::Resize(5000), Deed::Write],
    ];
    for (seed, deeds) in (0..40).zip(deeds.into_iter().cycle()) {
        on_machine(140 + seed, async |_, machine| {
            let way = Way::new(&machine);
            let (clients, remotes) = several(&machine, &way, 3).await;
            let file = make(&clients[1], "file").await.unwrap();
            clients[1].write(file, 0, &[1; 9000]).await.unwrap();
            let other = open(&clients[2], "file").await;
            assert_eq!(read(&clients[2], other).await, [1; 9000]);
            assert_eq!(read(&clients[1], file).await, [1; 9000]);
            let done = Rc::new(Cell::new(0));
            for (client, deed) in clients[1..].iter().zip(deeds) {
                let taken = matches!(deed, Deed::Write);
                let kernel = Rc::new(Locked { taken: Cell::new(taken), news: Notify::new() });
                client.set_kernel_cache(Some(kernel.clone()));
                let (client, done) = (client.clone(), done.clone());
                let work = async move {
                    let hold = match deed {
                        Deed::Page => {
                            let hold = client.hold(file, Purpose::Page).await.unwrap();
                            let page = Staged::of(4096, &[2; 4096]);
                            hold.writer().await.write_page(4096, page).await.unwrap();
                            Some(hold)
                        }
                        Deed::Resize(size) => {
                            let change = SetAttrRequest {
                                ino: file.ino.0,
                                size: Some(size),
                                ..SetAttrRequest::default()
                            };
                            let hold = client.hold_to_set(Branch::MAIN, &change).await.unwrap();
                            assert_eq!(hold.set_attr(change).await.unwrap().size, size);
                            Some(hold)
                        }
                        Deed::Write => {
                            client.write(file, 0, &[3; 100]).await.unwrap();
                            None
                        }
                    };
                    kernel.taken.set(true);
                    kernel.news.notify_waiters();
                    drop(hold);
                    done.set(done.get() + 1);
                };
                machine.env.spawn("deed", Box::pin(work));
            }
            machine.env.sleep(Duration::from_secs(600)).await;
            assert_eq!(done.get(), 2, "seed {seed}: both are done, of {deeds:?}");
            let found = read(&clients[1], file).await;
            assert_eq!(read(&clients[2], file).await, found, "of {deeds:?}");
            assert_eq!(read(&clients[0], open(&clients[0], "file").await).await, found, "of {deeds:?}");
            clients[0].release(file).await.unwrap();
            let sizes = deeds.iter().filter_map(|deed| match deed {
                Deed::Resize(size) => Some(*size as usize),
                _ => None,
            });
            let sizes: Vec<usize> = sizes.collect();
            assert!(sizes.contains(&found.len()) || sizes.is_empty() && found.len() == 9000, "{deeds:?}");
            // Bytes that one change of size has cut off do not return with the other.
            assert!(found.iter().skip(9000).all(|byte| *byte == 0), "of {deeds:?}");
            let kept = found.iter().skip(5000).take(4000);
            assert!(found.len() < 20_000 || sizes.len() < 2 || kept.clone().all(|byte| *byte != 2));
            clients.iter().for_each(|client| client.set_kernel_cache(None));
            clients[1].release(file).await.unwrap();
            clients[2].release(file).await.unwrap();
            end(machine, clients, remotes).await;
        });
    }
}

/// Reads end at the last truncation of the file, also in pages, while leases are revoked and the truncating
/// kernel drops no page.
#[test]
fn a_read_ends_where_the_file_was_cut_last_also_in_pages() {
    for seed in 200..210 {
        on_machine(seed, async |_, machine| {
            let way = Way::new(&machine);
            let (clients, remotes) = several(&machine, &way, 6).await;
            let file = make(&clients[0], "cut").await.unwrap();
            let (clock, cuts) = (Cell::new(1u64), RefCell::new(vec![(0, 0, 0)]));
            let tick = || clock.replace(clock.get() + 1);
            let world = &machine.world;
            let lives = clients.iter().enumerate().map(|(who, client)| {
                let (tick, cuts) = (&tick, &cuts);
                async move {
                    let pages = Pages::of(client, world);
                    let mine = open(client, "cut").await;
                    for _ in 0..60 {
                        world.env().sleep(Duration::from_micros(world.below(300))).await;
                        let from = tick();
                        match (who, world.below(3)) {
                            (1, 0) => {
                                pages.resize(client, file, from * 16).await;
                                cuts.borrow_mut().push((from * 16, from, tick()));
                            }
                            (2, 0) => {
                                let hold = client.hold(file, Purpose::Write).await.unwrap();
                                // Within the size, which does not change under this lease: the write does not
                                // change the size.
                                let inside = client.get_attr(file).await.unwrap().size > 0;
                                let bytes = Staged::of(0, &[who as u8; 1]);
                                if inside {
                                    hold.writer().await.write(0, bytes).await.unwrap();
                                }
                                drop(hold);
                                pages.files.borrow_mut().remove(&file);
                            }
                            _ => {
                                let found = pages.read(client, file, 1 << 20).await.len() as u64;
                                let until = tick();
                                let cuts = cuts.borrow();
                                // A truncation that is not recorded yet is still running.
                                let Some(cut) = cuts.iter().find(|cut| cut.0 == found) else { continue };
                                assert!(cut.1 < until);
                                let newer = cuts.iter().find(|other| other.1 > cut.2 && other.2 < from);
                                assert_eq!(newer, None, "seed {seed}: {found} was found by {who} at {from}");
                            }
                        }
                    }
                    client.release(mine).await.unwrap();
                    client.set_kernel_cache(None);
                }
            });
            futures_util::future::join_all(lives).await;
            assert!(cuts.borrow().len() > 5);
            clients[0].release(file).await.unwrap();
            end(machine, clients, remotes).await;
        });
    }
}

/// Regression: the growth of a file was lost, and the loss was reported. Then a program stored again through
/// its mapping, which the kernel still had. That data was cut off at the end of the file, and msync and fsync
/// succeeded.
#[test]
fn a_page_behind_an_end_that_was_lost_is_refused() {
    on_machine(119, async |site, machine| {
        let way = Way::new(&machine);
        let (client, forgetful) = join_forgetful(&machine, &way).await;
        let file = make(&client, "file").await.unwrap();
        client.write(file, 0, &[b'o'; 300_000]).await.unwrap();
        client.fsync(file).await.unwrap();
        client.set_attr(Branch::MAIN, size_of(file, 1 << 20)).await.unwrap();
        let machine = forgetful.restart(site, machine, &way, &client).await;
        assert_eq!(client.read(file, 0, 4096).await.unwrap_err().errno, EIO, "nobody was told");
        assert_eq!(client.fsync(file).await.unwrap_err().errno, EIO);
        client.fsync(file).await.unwrap();
        let store = async |at: u64| {
            let page = [b'n'; 4096];
            let hold = client.hold(file, Purpose::Page).await.unwrap();
            let stored = hold.writer().await.write_page(at, Staged::of(at, &page)).await;
            stored.map_err(|failure| failure.errno)
        };
        // Stores completely behind the end, across it, and before it.
        assert_eq!(store(897_024).await, Err(EIO));
        assert_eq!(store(897_024).await, Err(EIO));
        assert_eq!(store(299_008).await, Err(EIO));
        assert_eq!(store(294_912).await, Ok(()));
        let bytes = read(&client, file).await;
        assert_eq!(
            (bytes.len(), bytes[294_911], bytes[294_912], bytes[299_999]),
            (300_000, b'o', b'n', b'n')
        );
        // The kernel is notified of this size, so pages that it has behind another client's end are dropped.
        client.set_attr(Branch::MAIN, size_of(file, 400_000)).await.unwrap();
        assert_eq!(store(897_024).await, Ok(()));
        client.fsync(file).await.unwrap();
        client.release(file).await.unwrap();
        end(machine, vec![client.clone(), client], vec![forgetful.remote.clone()]).await;
    });
}

/// Regression: changes of attributes that were acknowledged before are durable after an fsync of any file,
/// and that fsync must report their loss. It did not if the changed file was known.
#[test]
fn an_fsync_of_another_file_tells_that_attributes_were_lost() {
    on_machine(120, async |site, machine| {
        let way = Way::new(&machine);
        let (client, forgetful) = join_forgetful(&machine, &way).await;
        let mut machine = machine;
        let changed = make(&client, "changed").await.unwrap();
        let other = make(&client, "other").await.unwrap();
        for size in [None, Some(10_000)] {
            client.sync().await.unwrap();
            let mode = size.is_none().then_some(0o100_600);
            let change = SetAttrRequest { ino: changed.ino.0, mode, size, ..SetAttrRequest::default() };
            client.set_attr(Branch::MAIN, change).await.unwrap();
            machine = forgetful.restart(site, machine, &way, &client).await;
            assert_eq!(client.fsync(other).await.unwrap_err().errno, EIO, "{size:?}");
            client.fsync(other).await.unwrap();
            assert_eq!(client.fsync(changed).await.unwrap_err().errno, EIO, "its own fsync tells as well");
        }
        client.release(changed).await.unwrap();
        client.release(other).await.unwrap();
        end(machine, vec![client.clone(), client], vec![forgetful.remote.clone()]).await;
    });
}

/// Regression: a user's write is repeated by the client after a restart. The set-id bits and capabilities
/// that the write had removed before the restart came back, and were not removed again.
#[test]
fn what_a_write_takes_from_a_file_is_durable_before_the_write() {
    on_machine(121, async |site, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 2).await;
        let client = clients[1].clone();
        let file = make(&client, "program").await.unwrap();
        let change = SetAttrRequest { ino: file.ino.0, mode: Some(0o106_777), ..SetAttrRequest::default() };
        client.set_attr(Branch::MAIN, change).await.unwrap();
        client.sync().await.unwrap();
        assert!(client.hold(file, Purpose::Write).await.unwrap().drop_set_id().await.unwrap());
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        client.write(file, 0, b"changed").await.unwrap();
        client.fsync(file).await.unwrap();
        assert_eq!(client.get_attr(file).await.unwrap().mode & 0o6000, 0);
        client.release(file).await.unwrap();
        end(machine, clients, remotes).await;
    });
}

/// Regression: a mount that had ended in order was there again after a crash soon after, and all others
/// waited for its lease time.
#[test]
fn a_client_that_ended_is_not_waited_for_after_a_crash() {
    on_machine(122, async |site, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let file = make(&clients[1], "file").await.unwrap();
        clients[1].sync().await.unwrap();
        make(&clients[2], "another").await.unwrap();
        clients[2].close().await.unwrap();
        remotes[1].close();
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        for number in 0..3 {
            let began = machine.env.now();
            let made = make(&clients[1], &format!("after-{number}")).await.unwrap();
            clients[1].release(made).await.unwrap();
            let took = machine.env.now() - began;
            assert!(took < Duration::from_secs(5), "{took:?}");
            machine.env.sleep(Duration::from_secs(1)).await;
        }
        clients[1].release(file).await.unwrap();
        end(machine, clients[..2].to_vec(), remotes).await;
    });
}

/// Regression: one client made a file longer, and another one had it mapped. The growth was lost, and data
/// that the other one stored there was cut off, although its msync and fsync succeeded. Now nobody sees a
/// growth that is not durable.
#[test]
fn a_growth_that_another_client_has_seen_is_not_lost() {
    on_machine(123, async |site, machine| {
        let way = Way::new(&machine);
        let (mut clients, mut remotes) = several(&machine, &way, 2).await;
        let (grows, forgetful) = join_forgetful(&machine, &way).await;
        let maps = clients[1].clone();
        clients.push(grows.clone());
        remotes.push(forgetful.remote.clone());
        let file = make(&grows, "file").await.unwrap();
        grows.write(file, 0, &[b'o'; 4096]).await.unwrap();
        grows.fsync(file).await.unwrap();
        assert_eq!(open(&maps, "file").await, file);
        grows.set_attr(Branch::MAIN, size_of(file, 65_536)).await.unwrap();
        assert_eq!(read(&maps, file).await.len(), 65_536);
        drop(maps.hold(file, Purpose::Page).await.unwrap());
        let machine = forgetful.restart(site, machine, &way, &grows).await;
        let page = [b'n'; 4096];
        let hold = maps.hold(file, Purpose::Page).await.unwrap();
        let stored = hold.writer().await.write_page(40_960, Staged::of(40_960, &page)).await;
        drop(hold);
        assert_eq!(stored, Ok(()));
        maps.fsync(file).await.unwrap();
        let found = read(&maps, file).await;
        assert!(found.len() == 65_536 && found[40_960..45_056] == page);
        maps.release(file).await.unwrap();
        grows.release(file).await.unwrap();
        end(machine, clients, remotes).await;
    });
}

/// Regression: set-id bits were removed under one start of the service, and the next start, which still had
/// them, made the write durable.
#[test]
fn what_a_write_takes_is_taken_again_over_a_restart() {
    on_machine(124, async |site, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 2).await;
        let (client, mut machine, mut straddled) = (clients[1].clone(), machine, 0);
        let file = make(&client, "program").await.unwrap();
        for delay in (0..180).step_by(4) {
            let change =
                SetAttrRequest { ino: file.ino.0, mode: Some(0o106_777), ..SetAttrRequest::default() };
            client.set_attr(Branch::MAIN, change).await.unwrap();
            while client.sync().await.is_err() {}
            let taker = client.clone();
            let take = async move { taker.hold(file, Purpose::Write).await?.drop_set_id().await.map(drop) };
            let (result, met);
            (machine, result, met) = restart_during(site, machine, &way, delay, take).await;
            result.unwrap();
            straddled += u32::from(met);
            // Everything that the restart can lose is lost by now.
            machine = restart(site, machine, &way, Duration::ZERO).await;
            assert_eq!(client.get_attr(file).await.unwrap().mode & 0o6000, 0, "after {delay} us");
        }
        assert!(straddled > 10, "{straddled}");
        while client.sync().await.is_err() {}
        let _ = client.fsync(file).await;
        client.release(file).await.unwrap();
        end(machine, clients, remotes).await;
    });
}

/// A connection to a service on which the replies to requests of one kind arrive late.
struct Late {
    remote: Rc<Remote>,
    kind: Kind,
    held: Cell<bool>,
    let_go: Notify,
}

impl Transport for Late {
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>> {
        Box::pin(async move {
            let kind = request.header.kind;
            let reply = self.remote.call(request).await;
            if kind == self.kind && self.held.get() {
                self.let_go.notified().await;
            }
            reply
        })
    }
}

/// Regression: a reply waited at its client while the service restarted, as if behind a lease that had
/// expired. The client took the lease in it for one of the new start, which did not know that lease and
/// revoked it from nobody.
#[test]
fn what_another_start_granted_is_nothing_to_the_next() {
    on_machine(98, async |site, machine| {
        let way = Way::new(&machine);
        let (writer, remote) = join(&machine, &way).await;
        let late = Rc::new(Late {
            remote: Remote::connect(&machine.env, way.clone()).await.unwrap(),
            kind: Kind::Lease,
            held: Cell::new(false),
            let_go: Notify::new(),
        });
        let client = Client::connect(&machine.env, late.clone(), "late").await.unwrap();
        let file = make(&writer, "file").await.unwrap();
        open(&client, "file").await;
        let mut size = 0;
        let append = async |size: u64| {
            writer.write(file, size, b"!").await.unwrap();
            // A loss is reported once here too.
            drop(writer.fsync(file).await);
        };
        // Raises the grant numbers far above those of a new start.
        for _ in 0..10 {
            append(size).await;
            size += 1;
            assert_eq!(read(&client, file).await.len() as u64, size);
        }
        append(size).await;
        size += 1;
        late.held.set(true);
        let (asking, done) = (client.clone(), Rc::new(Cell::new(false)));
        let ends = done.clone();
        machine.env.spawn(
            "ask",
            Box::pin(async move {
                drop(asking.read(file, 0, 100).await);
                ends.set(true);
            }),
        );
        machine.env.sleep(Duration::from_secs(1)).await;
        assert!(!done.get(), "its lease is on the way");
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        machine.env.sleep(penstock_session::LEASE / 2).await;
        late.held.set(false);
        late.let_go.notify_waiters();
        while !done.get() {
            machine.env.sleep(Duration::from_millis(1)).await;
        }
        for _ in 0..8 {
            append(size).await;
            size += 1;
            assert_eq!(read(&client, file).await.len() as u64, size, "nothing old is read");
        }
        client.release(file).await.unwrap();
        writer.release(file).await.unwrap();
        drop(client.sync().await);
        drop(writer.sync().await);
        for client in [&client, &writer] {
            client.close().await.unwrap();
        }
        [&remote, &late.remote].iter().for_each(|remote| remote.close());
        machine.audit().await;
        machine.stop().await;
    });
}

/// A kernel that takes a while to drop pages, of which some can be read.
struct SlowKernel(World, Duration, Option<Rc<Pages>>);

impl KernelCache for SlowKernel {
    fn drop_pages(&self, file: FileId, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            self.0.env().sleep(self.1).await;
            if let Some(pages) = &self.2 {
                pages.drop_pages(file, bytes).await;
            }
        })
    }

    fn hide_pages<'a>(
        &'a self,
        files: Vec<(FileId, u64)>,
        _within: Duration,
        _lasts: &'a dyn Fn() -> bool,
    ) -> LocalBoxFuture<'a, ()> {
        Box::pin(async {
            if self.2.is_some() {
                drop_all(self, files).await;
            }
        })
    }

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

impl SlowKernel {
    /// A kernel that takes `time` to drop pages, of which none can be read.
    fn of(way: &Way, time: Duration) -> Rc<Self> {
        Rc::new(Self(way.world.clone(), time, None))
    }
}

async fn until_alone(client: &Client, machine: &Machine) {
    while !client.is_alone() {
        machine.env.sleep(Duration::from_millis(1)).await;
    }
}

/// Appends to a file of a known size again and again for `time`. Returns its size afterwards.
async fn append_for(
    client: &Client,
    machine: &Machine,
    (file, mut size): (FileId, u64),
    time: Duration,
    pause: Duration,
) -> u64 {
    let until = machine.env.now() + time;
    while machine.env.now() < until {
        let at = client.append(file, &[7; 100]).await.unwrap();
        assert_eq!(at, size, "an append finds an earlier end");
        size += 100;
        machine.env.sleep(pause).await;
    }
    size
}

/// The service starts again while a client gives a lease up for the client in the service's process. That one
/// is gone, and what the first one writes from then on is not lost.
#[test]
fn what_is_written_alone_after_a_restart_is_not_lost_to_a_revocation_before_it() {
    on_machine(99, async |site, machine| {
        let way = Way::new(&machine);
        let (client, remote) = join(&machine, &way).await;
        client.set_kernel_cache(Some(SlowKernel::of(&way, Duration::from_secs(3))));
        let file = make(&client, "file").await.unwrap();
        open(&machine.client, "file").await;
        machine.env.sleep(Duration::from_secs(10)).await;
        client.append(file, &[7; 100]).await.unwrap();
        client.fsync(file).await.unwrap();
        client.append(file, &[7; 100]).await.unwrap();
        // The other client wants the lease.
        let other = machine.client.clone();
        machine.env.spawn("other", Box::pin(async move { drop(other.read(file, 0, 1).await) }));
        machine.env.sleep(Duration::from_secs(1)).await;
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        until_alone(&client, &machine).await;
        // The restart loses the append that was not synced, and that is told.
        drop(client.fsync(file).await);
        client.fsync(file).await.unwrap();
        let size = client.get_attr(file).await.unwrap().size;
        let pause = Duration::from_micros(200);
        let size = append_for(&client, &machine, (file, size), Duration::from_secs(6), pause).await;
        let synced = client.fsync(file).await;
        let mut wrong = 0;
        for at in (0..size).step_by(1 << 20) {
            let parts = client.read(file, at, 1 << 20).await.unwrap();
            wrong += parts.iter().flat_map(|part| part.to_vec()).filter(|byte| *byte != 7).count();
        }
        assert_eq!((wrong, synced), (0, Ok(())), "bytes that are not what was appended, and the fsync");
        client.close().await.unwrap();
        remote.close();
        machine.stop().await;
    });
}

/// The mount of the client in the service's process ends while that client gives up everything for another
/// one, which ends, too. What the next mount writes is not lost.
#[test]
fn what_the_next_mount_writes_is_not_lost_to_a_revocation_of_the_mount_before() {
    on_machine(97, async |_, machine| {
        let (way, mine) = (Way::new(&machine), machine.client.clone());
        let file = make(&mine, "file").await.unwrap();
        mine.sync().await.unwrap();
        mine.set_kernel_cache(Some(Pages::of(&mine, &machine.world)));
        until_alone(&mine, &machine).await;
        // Another client arrives, and waits for the names that the kernel may have.
        let (other, remote) = join(&machine, &way).await;
        let asking = other.clone();
        machine.env.spawn("other", Box::pin(async move { drop(asking.get_attr(asking.root()).await) }));
        machine.env.sleep(Duration::from_millis(100)).await;
        // As `Instance::hand_mount_over` does once the kernel has released the mount.
        mine.set_kernel_cache(None);
        mine.close_all().await.unwrap();
        mine.leave().await.unwrap();
        machine.env.sleep(Duration::from_millis(100)).await;
        other.close().await.unwrap();
        remote.close();
        mine.open(file).await.unwrap();
        until_alone(&mine, &machine).await;
        let pause = Duration::from_micros(500);
        append_for(&mine, &machine, (file, 0), Duration::from_secs(3), pause).await;
        assert_eq!(mine.fsync(file).await, Ok(()));
        mine.release(file).await.unwrap();
        machine.stop().await;
    });
}

/// Regression: after a restart two clients own what they had until they have given it up. Meanwhile one did
/// not see what the other wrote, and its fsync did not cover that.
#[test]
fn an_fsync_after_a_restart_covers_what_is_written_under_an_earlier_lease() {
    on_machine(131, async |site, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let (one, other) = (clients[1].clone(), clients[2].clone());
        for client in [&one, &other] {
            client.set_kernel_cache(Some(SlowKernel::of(&way, Duration::from_secs(3))));
        }
        let (file, own) = (make(&one, "file").await.unwrap(), make(&other, "own").await.unwrap());
        assert_eq!(open(&other, "file").await, file);
        other.write(own, 0, &[1; 100]).await.unwrap();
        one.write(file, 0, &[1; 10_000]).await.unwrap();
        one.fsync(file).await.unwrap();
        other.fsync(own).await.unwrap();
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        // Any request shows the restart to a client.
        let stats = join_all([&one, &other].map(|client| client.stat_fs())).await;
        assert!(stats.iter().all(Result::is_ok));
        machine.env.sleep(Duration::from_millis(100)).await;
        one.write(file, 5000, &[2; 10_000]).await.unwrap();
        assert_eq!(other.get_attr(file).await.unwrap().size, 15_000);
        other.fsync(file).await.unwrap();
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        let root = machine.client.root();
        let found = machine.client.lookup(root, b"file").await.unwrap();
        assert_eq!(read(&machine.client, found.file()).await.len(), 15_000);
        one.fsync(file).await.unwrap();
        one.release(file).await.unwrap();
        other.release(file).await.unwrap();
        other.release(own).await.unwrap();
        let clients = vec![machine.client.clone(), one, other];
        end(machine, clients, remotes).await;
    });
}

/// A connection on which requests of one kind wait before they are sent.
struct Early {
    remote: Rc<Remote>,
    kind: Kind,
    held: Cell<bool>,
    let_go: Notify,
}

impl Transport for Early {
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>> {
        Box::pin(async move {
            if request.header.kind == self.kind && self.held.get() {
                self.let_go.notified().await;
            }
            self.remote.call(request).await
        })
    }
}

/// A sync through a descriptor that is open on a file, or of its directory.
#[derive(Clone, Copy, PartialEq)]
enum Synced {
    File,
    Directory,
}

/// The service starts again while an fsync of one mount waits for its `Sync` request. The fsync has had
/// another mount sync what it wrote, and the restart loses that. The other one ends with the service if
/// `is_own`: then this one is alone at the next start.
fn fsync_over_a_restart(reads: bool, is_own: bool, synced: Synced) {
    let what = format!("reads {reads}, own {is_own}, directory {}", synced == Synced::Directory);
    on_machine(141, async |site, machine| {
        let way = Way::new(&machine);
        let (writer, remote) = join(&machine, &way).await;
        let (writer, ended) = match is_own {
            true => (machine.client.clone(), writer),
            false => (writer, machine.client.clone()),
        };
        ended.close().await.unwrap();
        let early = Rc::new(Early {
            remote: Remote::connect(&machine.env, way.clone()).await.unwrap(),
            kind: Kind::Sync,
            held: Cell::new(false),
            let_go: Notify::new(),
        });
        let client = Client::connect(&machine.env, early.clone(), "early").await.unwrap();
        let file = make(&writer, "file").await.unwrap();
        writer.write(file, 0, &[1; 100]).await.unwrap();
        writer.fsync(file).await.unwrap();
        assert_eq!(open(&client, "file").await, file);
        let descriptor = client.reported(file);
        client.fsync_through(file, &descriptor).await.unwrap();
        writer.write(file, 100, &[2; 10_000]).await.unwrap();
        if reads {
            // It has a lease now. The writer has given its own up: its size is sent and not yet durable.
            assert_eq!(read(&client, file).await.len(), 10_100);
        }
        early.held.set(true);
        let result = Rc::new(RefCell::new(None));
        let (syncing, told, descriptor) = (client.clone(), result.clone(), Rc::new(descriptor));
        let reported = descriptor.clone();
        let fsync = async move {
            let result = match synced {
                Synced::File => syncing.fsync_through(file, &reported).await,
                Synced::Directory => syncing.sync_directory().await,
            };
            *told.borrow_mut() = Some(result);
        };
        machine.env.spawn("fsync", Box::pin(fsync));
        machine.env.sleep(Duration::from_millis(100)).await;
        assert!(result.borrow().is_none(), "its Sync request is on the way");
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        early.held.set(false);
        early.let_go.notify_waiters();
        while result.borrow().is_none() {
            machine.env.sleep(Duration::from_millis(1)).await;
        }
        let root = machine.client.root();
        let found = machine.client.lookup(root, b"file").await.unwrap();
        let len = read(&machine.client, found.file()).await.len();
        match result.take().unwrap() {
            // The writer has sent again what it wrote.
            Ok(()) => assert!(!is_own && len == 10_100, "{what}: {len} bytes"),
            Err(error) => {
                assert!(is_own && error.message.contains("other clients"), "{what}: {error}");
                // A reader gets the file only once it is durable.
                let is_there = len == if reads { 10_100 } else { 100 };
                assert!(is_there || synced == Synced::Directory, "{what}: {len} bytes");
            }
        }
        assert_eq!(client.fsync_through(file, &descriptor).await, Ok(()), "it is told once");
        drop(remote);
        machine.stop().await;
    });
}

/// Regression: the next start had nothing to make durable, and the fsync succeeded.
#[test]
fn an_fsync_that_spans_a_restart_does_not_succeed_over_a_loss_of_others() {
    fsync_over_a_restart(false, false, Synced::File);
    fsync_over_a_restart(true, false, Synced::File);
    fsync_over_a_restart(true, true, Synced::File);
    fsync_over_a_restart(true, false, Synced::Directory);
    fsync_over_a_restart(true, true, Synced::Directory);
}

/// Two clients owe everything after a restart, and one of them truncates a file of its own. The other one
/// truncates a file that both have read. Regression: it did not wait for the pages of the first one.
#[test]
fn a_truncation_after_a_restart_waits_for_a_client_that_truncates_another_file() {
    on_machine(142, async |site, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let (one, other) = (clients[1].clone(), clients[2].clone());
        let slow = Duration::from_secs(3);
        one.set_kernel_cache(Some(SlowKernel::of(&way, slow)));
        let pages = Pages::of(&other, &way.world);
        other.set_kernel_cache(Some(Rc::new(SlowKernel(way.world.clone(), slow, Some(pages.clone())))));
        let (file, own) = (make(&one, "file").await.unwrap(), make(&other, "own").await.unwrap());
        assert_eq!(open(&other, "file").await, file);
        one.write(file, 0, &[1; 10_000]).await.unwrap();
        one.fsync(file).await.unwrap();
        other.write(own, 0, &[1; 10_000]).await.unwrap();
        other.fsync(own).await.unwrap();
        // Both have a shared lease from here on.
        assert_eq!(pages.read(&other, file, 10_000).await.len(), 10_000);
        assert_eq!(read(&one, file).await.len(), 10_000);
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        let stats = join_all([&one, &other].map(|client| client.stat_fs())).await;
        assert!(stats.iter().all(Result::is_ok));
        machine.env.sleep(Duration::from_millis(100)).await;
        let truncation =
            |file: FileId, size| SetAttrRequest { ino: file.ino.0, size: Some(size), ..Default::default() };
        let (truncates, done) = (other.clone(), Rc::new(Cell::new(false)));
        let is_done = done.clone();
        let truncate_own = async move {
            truncates.set_attr(Branch::MAIN, truncation(own, 50)).await.unwrap();
            is_done.set(true);
        };
        machine.env.spawn("own", Box::pin(truncate_own));
        machine.env.sleep(Duration::from_millis(50)).await;
        one.set_attr(Branch::MAIN, truncation(file, 0)).await.unwrap();
        assert_eq!(pages.try_read(&other, file, 10_000).await.map(|bytes| bytes.len()), Ok(0));
        while !done.get() {
            machine.env.sleep(Duration::from_millis(10)).await;
        }
        drop((one, other, clients, remotes));
        machine.stop().await;
    });
}

/// Regression: a program of one mount truncated a file, for which the service waited for another mount that
/// had died. Its own mount could not answer a call meanwhile, and lost its session with the dead one.
#[test]
fn who_waits_for_a_dead_client_does_not_end_with_it() {
    for seed in 4200..4204 {
        on_machine(seed, async |_, machine| {
            machine.env.sleep(Duration::from_millis((seed - 4200) * 1400)).await;
            let (way, other_way) = (Way::new(&machine), Way::new(&machine));
            let file = make(&machine.client, "file").await.unwrap();
            machine.client.write(file, 0, &[1; 8192]).await.unwrap();
            machine.client.release(file).await.unwrap();
            machine.client.leave().await.unwrap();
            let (one, one_remote) = join(&machine, &way).await;
            let one_pages = Pages::of(&one, &machine.world);
            open(&one, "file").await;
            let (other, other_remote) = join(&machine, &other_way).await;
            let other_pages = Pages::of(&other, &machine.world);
            open(&other, "file").await;
            one_pages.read(&one, file, 8192).await;
            other_pages.read(&other, file, 8192).await;
            // The kernel of the first one has begun to truncate, and drops no page until it has the answer.
            one_pages.resizing.set(true);
            let writing = other.clone();
            machine.env.spawn("write", Box::pin(async move { drop(writing.write(file, 0, b"new").await) }));
            machine.env.sleep(Duration::from_millis(20)).await;
            drop(other_way.server.borrow_mut().take());
            other_way.links.borrow().iter().for_each(|link| link.cut());
            let change = SetAttrRequest { ino: file.ino.0, size: Some(8000), ..Default::default() };
            let hold = one.hold_to_set(Branch::MAIN, &change).await.unwrap();
            let done = hold.set_attr(change).await;
            assert!(done.is_ok(), "seed {seed}: it waited for the other one only: {done:?}");
            one_pages.resizing.set(false);
            one_pages.resized.notify_waiters();
            drop(hold);
            machine.env.sleep(penstock_session::LEASE * 2).await;
            assert!(!one.has_ended(), "seed {seed}");
            one.close().await.unwrap();
            [one_remote, other_remote].iter().for_each(|remote| remote.close());
        });
    }
}
