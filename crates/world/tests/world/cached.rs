//! Kernels cache names and attributes beside other clients, under leases, and never show anything old.
//!
//! One task changes names and attributes through one client after the other; the others read all the time,
//! from the caches of model kernels where those may be used. What a read shows must have been so at a moment
//! between its begin and its end.

use crate::machine::{Machine, Site};
use crate::remote::{Way, on_machine, restart};
use crate::shared::{end, hides_all, several};
use penstock_base::{Branch, FileId, LocalBoxFuture};
use penstock_client::{Attr, Client, KernelCache};
use penstock_sim::World;
use penstock_wire::metadata::{MakeRequest, RenameRequest, SetAttrRequest, XattrRequest};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

const CLIENTS: usize = 4;
const DIRS: u64 = 2;
const NAMES: u64 = 4;
const STEPS: usize = 120;
const VALID: Duration = Duration::from_secs(1);
const ENOENT: u16 = 2;
const ESTALE: u16 = 116;

type Name = (FileId, String);

/// Model of a kernel's cache of names and attributes, each with the time until which it is used.
struct Names {
    world: World,
    client: Rc<Client>,
    names: RefCell<BTreeMap<Name, (FileId, Duration)>>,
    attrs: RefCell<BTreeMap<FileId, (Attr, Duration)>>,
    /// Number of changes by programs of this kernel. It takes in no reply to a request from before one.
    changes: Cell<u64>,
    /// Number of times that something was used although there were other clients.
    shared_hits: Cell<u64>,
}

impl KernelCache for Names {
    fn drop_pages(&self, _file: FileId, _bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        self.world.env().sleep(VALID)
    }

    fn forget_attributes(&self, file: FileId) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            self.world.env().sleep(Duration::from_micros(self.world.below(500))).await;
            self.attrs.borrow_mut().remove(&file);
            self.names.borrow_mut().retain(|(dir, _), _| *dir != file);
        })
    }

    hides_all!();
}

impl Names {
    fn of(client: &Rc<Client>, world: &World) -> Rc<Self> {
        let names = Rc::new(Self {
            world: world.clone(),
            client: client.clone(),
            names: RefCell::default(),
            attrs: RefCell::default(),
            changes: Cell::new(0),
            shared_hits: Cell::new(0),
        });
        client.set_kernel_cache(Some(names.clone()));
        names
    }

    fn now(&self) -> Duration {
        self.world.env().now()
    }

    fn valid(&self) -> Duration {
        self.now() + VALID.min(self.client.left_of_lease())
    }

    fn hit<T: Clone>(&self, kept: Option<&(T, Duration)>) -> Option<T> {
        let (kept, _) = kept.filter(|(_, until)| self.now() < *until)?;
        self.shared_hits.set(self.shared_hits.get() + u64::from(!self.client.is_alone()));
        Some(kept.clone())
    }

    /// A program of this kernel has changed something.
    fn changed(&self) {
        self.changes.set(self.changes.get() + 1);
        self.attrs.take();
        self.names.take();
    }

    /// Keeps attributes that were asked for after so many changes, if that is allowed.
    fn keep(&self, attr: &Attr, changes: u64) -> bool {
        let may = self.client.is_alone() || self.client.caches_attributes(attr);
        if may && self.changes.get() == changes {
            self.attrs.borrow_mut().insert(attr.file(), (attr.clone(), self.valid()));
        }
        may && self.changes.get() == changes
    }

    async fn attr(&self, file: FileId) -> Result<Attr, u16> {
        let kept = self.hit(self.attrs.borrow().get(&file));
        if let Some(attr) = kept {
            return Ok(attr);
        }
        let changes = self.changes.get();
        let attr = self.client.get_attr(file).await.map_err(|failure| failure.errno)?;
        self.keep(&attr, changes);
        Ok(attr)
    }

    /// Returns the inode of a name, and its attributes or the errno for them. None if there is no such name.
    async fn stat(&self, name: &Name) -> Option<(FileId, Result<Attr, u16>)> {
        self.attr(name.0).await.unwrap();
        let kept = self.hit(self.names.borrow().get(name));
        if let Some(file) = kept {
            return Some((file, self.attr(file).await));
        }
        let (changes, lease) = (self.changes.get(), self.client.lease_on_names(name.0));
        let attr = match self.client.lookup(name.0, name.1.as_bytes()).await {
            Err(failure) if failure.errno == ENOENT => return None,
            found => found.unwrap(),
        };
        let may = self.client.is_alone() || self.client.caches_names(name.0, lease);
        if may && self.changes.get() == changes {
            self.names.borrow_mut().insert(name.clone(), (attr.file(), self.valid()));
        }
        match self.keep(&attr, changes) {
            true => Some((attr.file(), Ok(attr))),
            // A kernel asks for attributes that it may not keep when a program wants them.
            false => Some((attr.file(), self.attr(attr.file()).await)),
        }
    }
}

/// The values of something, each with the times when the change to it began and was acknowledged.
struct History<T>(Vec<(Duration, Duration, T)>);

impl<T: PartialEq + std::fmt::Debug> History<T> {
    /// Fails unless the value was this at a moment between two times.
    fn check(&self, (begin, end): (Duration, Duration), found: &T, why: &str) {
        let was = |at: usize| {
            let ends = self.0.get(at + 1).map_or(Duration::MAX, |(_, acknowledged, _)| *acknowledged);
            self.0[at].2 == *found && self.0[at].0 <= end && begin <= ends
        };
        let all = (0..self.0.len()).any(was);
        assert!(all, "{why}: {found:?} between {begin:?} and {end:?} of {:?}", self.0);
    }
}

/// A name as a client saw it within a time.
struct Seen {
    time: (Duration, Duration),
    name: Name,
    found: Option<(FileId, Result<Attr, u16>)>,
    who: usize,
}

/// The facts about one inode that a stat shows.
struct File {
    mode: History<u32>,
    links: History<u32>,
    size: History<u64>,
}

/// Everything that was so at any time.
#[derive(Default)]
struct Past {
    names: BTreeMap<Name, History<Option<FileId>>>,
    files: BTreeMap<FileId, File>,
}

impl Past {
    fn now(&self, name: &Name) -> Option<FileId> {
        self.names[name].0.last().unwrap().2
    }

    fn check(&self, Seen { time, name, found, who }: &Seen, why: &str) {
        let (time, why) = (*time, format!("{why}, client {who}, {name:?}"));
        self.names[name].check(time, &found.as_ref().map(|(file, _)| *file), &why);
        let Some((file, attr)) = found else { return };
        let past = &self.files[file];
        match attr {
            Ok(attr) => {
                past.mode.check(time, &attr.mode, &format!("{why}: mode of {file}"));
                past.links.check(time, &attr.nlink, &format!("{why}: links of {file}"));
                past.size.check(time, &attr.size, &format!("{why}: size of {file}"));
            }
            Err(ESTALE) => past.links.check(time, &0, &format!("{why}: {file} is gone")),
            Err(errno) => panic!("{why}: errno {errno}"),
        }
    }
}

/// The world in which names are cached.
struct Run {
    world: World,
    clients: Vec<Rc<Client>>,
    kernels: Vec<Rc<Names>>,
    dirs: Vec<FileId>,
    past: RefCell<Past>,
    /// Checked at the end: a change may be seen before its reply arrives.
    seen: RefCell<Vec<Seen>>,
    is_over: Cell<bool>,
    /// The only client whose readers run.
    only: Cell<Option<usize>>,
    reading: Cell<usize>,
}

/// A change that is acknowledged when this is told the outcome.
struct Change(Duration);

impl Run {
    fn below(&self, most: u64) -> u64 {
        self.world.below(most)
    }

    fn begin(&self) -> Change {
        Change(self.world.env().now())
    }

    fn name(&self) -> Name {
        (self.dirs[self.below(DIRS) as usize], format!("name-{}", self.below(NAMES)))
    }

    fn renamed(&self, change: &Change, name: &Name, file: Option<FileId>) {
        let now = self.world.env().now();
        self.past.borrow_mut().names.get_mut(name).unwrap().0.push((change.0, now, file));
    }

    fn changed(&self, change: &Change, file: FileId, act: impl FnOnce(&mut File, Duration, Duration)) {
        let now = self.world.env().now();
        act(self.past.borrow_mut().files.get_mut(&file).unwrap(), change.0, now);
    }

    fn add_links(&self, change: &Change, file: FileId, more: i32) {
        self.changed(change, file, |file, from, to| {
            let links = file.links.0.last().unwrap().2;
            file.links.0.push((from, to, links.checked_add_signed(more).unwrap()));
        });
    }

    /// Reads all the time through one client.
    async fn read(self: Rc<Self>, who: usize) {
        let env = self.world.env();
        while !self.is_over.get() {
            if self.only.get().is_none_or(|only| only == who) {
                self.reading.set(self.reading.get() + 1);
                let (name, begin) = (self.name(), env.now());
                let found = self.kernels[who].stat(&name).await;
                let time = (begin, env.now());
                self.seen.borrow_mut().push(Seen { time, name, found, who });
                self.reading.set(self.reading.get() - 1);
            }
            env.sleep(Duration::from_micros(self.below(20_000))).await;
        }
    }

    /// Everybody but one client leaves for a while.
    async fn leave_one(&self) {
        let env = self.world.env();
        let only = self.below(CLIENTS as u64 - 1) as usize + 1;
        self.only.set(Some(only));
        while self.reading.get() > 0 {
            env.sleep(Duration::from_millis(5)).await;
        }
        for (who, client) in self.clients.iter().enumerate().filter(|(who, _)| *who != only && *who > 0) {
            // It may tell that something was lost with the client of the service's process.
            let _ = client.leave().await;
            // A mount leaves when it has ended, and its kernel has nothing any more.
            self.kernels[who].changed();
        }
        env.sleep(Duration::from_millis(self.below(4000))).await;
        self.only.set(None);
    }

    async fn step(&self) {
        let who = 1 + self.below(CLIENTS as u64 - 1) as usize;
        let (client, name) = (self.clients[who].clone(), self.name());
        let there = self.past.borrow().now(&name);
        match (self.below(12), there) {
            (0..3, None) => self.make(&client, &name).await,
            (0 | 1, Some(file)) => {
                let change = self.begin();
                client.unlink(name.0, name.1.as_bytes(), false).await.unwrap();
                self.renamed(&change, &name, None);
                self.add_links(&change, file, -1);
            }
            (2 | 3, Some(file)) => {
                let to = self.name();
                let other = self.past.borrow().now(&to);
                if other == Some(file) {
                    return;
                }
                let request = RenameRequest {
                    dir: name.0.ino.0,
                    name: name.1.clone().into(),
                    new_dir: to.0.ino.0,
                    new_name: to.1.clone().into(),
                    ..RenameRequest::default()
                };
                let change = self.begin();
                client.rename(Branch::MAIN, request).await.unwrap();
                self.renamed(&change, &name, None);
                self.renamed(&change, &to, Some(file));
                other.into_iter().for_each(|other| self.add_links(&change, other, -1));
            }
            (4, Some(file)) => {
                let to = self.name();
                if self.past.borrow().now(&to).is_none() {
                    let change = self.begin();
                    client.link(file, to.0, to.1.as_bytes()).await.unwrap();
                    self.renamed(&change, &to, Some(file));
                    self.add_links(&change, file, 1);
                }
            }
            (5 | 6, Some(file)) => {
                let mode = 0o600 + self.below(0o100) as u32;
                let request =
                    SetAttrRequest { ino: file.ino.0, mode: Some(mode), ..SetAttrRequest::default() };
                let change = self.begin();
                client.set_attr(Branch::MAIN, request).await.unwrap();
                let mode = mode | 0o100_000;
                self.changed(&change, file, |file, from, to| file.mode.0.push((from, to, mode)));
            }
            (7, Some(file)) => {
                let size = self.below(50_000);
                let request =
                    SetAttrRequest { ino: file.ino.0, size: Some(size), ..SetAttrRequest::default() };
                let change = self.begin();
                client.set_attr(Branch::MAIN, request).await.unwrap();
                self.changed(&change, file, |file, from, to| file.size.0.push((from, to, size)));
            }
            (8 | 9, Some(file)) => {
                client.open(file).await.unwrap();
                let change = self.begin();
                let bytes = vec![1; 1 + self.below(5000) as usize];
                let end = client.append(file, &bytes).await.unwrap() + bytes.len() as u64;
                self.changed(&change, file, |file, from, to| file.size.0.push((from, to, end)));
                self.kernels[who].changed();
                client.release(file).await.unwrap();
            }
            (10, Some(file)) => {
                let (ino, name, value) = (file.ino.0, b"user.v".to_vec(), vec![1; 10]);
                let request = XattrRequest { ino, name, value, ..XattrRequest::default() };
                client.set_xattr(Branch::MAIN, request).await.unwrap();
            }
            _ => self.world.env().sleep(Duration::from_millis(self.below(3000))).await,
        }
        self.kernels[who].changed();
    }

    async fn make(&self, client: &Client, name: &Name) {
        let change = self.begin();
        let (dir, mode) = (name.0.ino.0, 0o100_644);
        let request = MakeRequest { dir, name: name.1.clone().into(), mode, ..MakeRequest::default() };
        let attr = client.make(Branch::MAIN, request).await.unwrap();
        let now = self.world.env().now();
        let file = File {
            mode: History(vec![(change.0, now, attr.mode)]),
            links: History(vec![(change.0, now, 1)]),
            size: History(vec![(change.0, now, 0)]),
        };
        self.past.borrow_mut().files.insert(attr.file(), file);
        self.renamed(&change, name, Some(attr.file()));
    }
}

async fn live(seed: u64, site: &Site, machine: Machine) -> u64 {
    let way = Way::new(&machine);
    let (clients, remotes) = several(&machine, &way, CLIENTS).await;
    let world = machine.world.clone();
    let mut past = Past::default();
    let mut dirs = Vec::new();
    for dir in 0..DIRS {
        let (name, mode) = (format!("dir-{dir}").into(), 0o040_755);
        let request = MakeRequest { dir: clients[1].root().ino.0, name, mode, ..MakeRequest::default() };
        let dir = clients[1].make(Branch::MAIN, request).await.unwrap().file();
        dirs.push(dir);
        for name in 0..NAMES {
            past.names
                .insert((dir, format!("name-{name}")), History(vec![(Duration::ZERO, Duration::ZERO, None)]));
        }
    }
    let kernels: Vec<Rc<Names>> = clients.iter().map(|client| Names::of(client, &world)).collect();
    let run = Rc::new(Run {
        world: world.clone(),
        clients,
        kernels,
        dirs,
        past: RefCell::new(past),
        seen: RefCell::default(),
        is_over: Cell::new(false),
        only: Cell::new(None),
        reading: Cell::new(0),
    });
    for who in (1..CLIENTS).chain(1..CLIENTS) {
        world.env().spawn("reader", Box::pin(run.clone().read(who)));
    }
    let breaks = seed.is_multiple_of(2).then(|| way.breaks());
    let mut machine = Some(machine);
    for _ in 0..STEPS {
        let delay = Duration::from_micros(world.below(3000));
        match world.below(40) {
            0 if seed.is_multiple_of(3) => {
                let again = async {
                    world.env().sleep(delay).await;
                    machine = Some(restart(site, machine.take().unwrap(), &way, Duration::ZERO).await);
                };
                futures_util::future::join(run.step(), again).await;
            }
            1 => run.leave_one().await,
            _ => run.step().await,
        }
    }
    run.is_over.set(true);
    drop(breaks);
    world.env().sleep(Duration::from_secs(2)).await;
    for seen in run.seen.borrow().iter() {
        run.past.borrow().check(seen, &format!("seed {seed}"));
    }
    let hits = run.kernels.iter().map(|kernel| kernel.shared_hits.get()).sum();
    let machine = machine.unwrap();
    let mut clients = run.clients.clone();
    clients[0] = machine.client.clone();
    end(machine, clients, remotes).await;
    hits
}

#[test]
fn kernels_show_nothing_old_beside_other_clients() {
    let mut hits = 0;
    for seed in penstock_sim::seeds(0..12) {
        let counted = Cell::new(0);
        on_machine(seed, async |site, machine| counted.set(live(seed, site, machine).await));
        hits += counted.get();
    }
    assert!(hits > 0, "nothing was cached beside other clients");
}
