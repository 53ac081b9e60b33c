//! Five clients live beside each other for hours and change the same files and directories at the same time.
//! No operation waits for ever, none fails for another reason than that a name is or is not there, and at the
//! end all see the same.
//!
//! A round is a burst of operations of every client. Rounds follow each other at once, or after leases have
//! been given back for want of use, or after minutes. Kernels keep pages locked during operations, so that
//! what is called back waits for what waits for a lease.

use crate::machine::{Machine, Site};
use crate::remote::{Way, on_machine, read, restart};
use crate::shared::{end, hides_all, several};
use futures_util::future::join_all;
use penstock_base::env::timeout;
use penstock_base::{Branch, ErrorKind, FileId, LocalBoxFuture};
use penstock_client::{Client, Failure, KernelCache, Purpose, Staged};
use penstock_sim::World;
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::{
    LockChange, LockRequest, MakeRequest, ReadDirRequest, RenameRequest, SetAttrRequest,
};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// Clients with a connection. The one in the service's process does nothing.
const CLIENTS: usize = 5;
const TASKS: u64 = 4;
const DIRS: u64 = 3;
const NAMES: u64 = 3;
const PAGE: u64 = 4096;
/// No burst lasts longer, with restarts and broken connections.
const LIVENESS: Duration = Duration::from_secs(120);
/// Of simulated time that one seed lives.
const LIFE: Duration = Duration::from_secs(1800);
const SHORT_LIFE: Duration = Duration::from_secs(300);

const ENOENT: u16 = 2;
const EIO: u16 = 5;
const EEXIST: u16 = 17;
const ENOTEMPTY: u16 = 39;
const ESTALE: u16 = 116;

/// Model of a kernel that drops no page of a file during an operation that has pages of it locked.
struct Kernel {
    world: World,
    locked: RefCell<Vec<(FileId, Range<u64>)>>,
    unlocked: Notify,
}

/// Pages with these bytes of a file are locked until this is dropped.
struct Locked<'a>(&'a Kernel, (FileId, Range<u64>));

impl Kernel {
    fn of(client: &Client, world: &World) -> Rc<Self> {
        let (locked, unlocked) = (RefCell::default(), Notify::new());
        let kernel = Rc::new(Self { world: world.clone(), locked, unlocked });
        client.set_kernel_cache(Some(kernel.clone()));
        kernel
    }

    fn lock(&self, file: FileId, bytes: Range<u64>) -> Locked<'_> {
        self.locked.borrow_mut().push((file, bytes.clone()));
        Locked(self, (file, bytes))
    }

    fn is_locked(&self, file: FileId, bytes: &Range<u64>) -> bool {
        let overlaps = |other: &Range<u64>| other.start < bytes.end && bytes.start < other.end;
        self.locked.borrow().iter().any(|(locked, other)| *locked == file && overlaps(other))
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let mut locked = self.0.locked.borrow_mut();
        let at = locked.iter().position(|other| *other == self.1).unwrap();
        locked.swap_remove(at);
        drop(locked);
        self.0.unlocked.notify_waiters();
    }
}

impl KernelCache for Kernel {
    fn drop_pages(&self, file: FileId, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            self.world.env().sleep(Duration::from_micros(self.world.below(300))).await;
            while self.is_locked(file, &bytes) {
                let unlocked = self.unlocked.notified();
                if self.is_locked(file, &bytes) {
                    unlocked.await;
                }
            }
        })
    }

    hides_all!();

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        self.world.env().sleep(Duration::from_secs(1))
    }

    fn forget_attributes(&self, _file: FileId) -> LocalBoxFuture<'_, ()> {
        self.world.env().sleep(Duration::from_micros(self.world.below(500)))
    }
}

/// A client with its kernel, and what it works on.
struct Mount {
    world: World,
    client: Rc<Client>,
    kernel: Rc<Kernel>,
    dirs: Rc<Vec<FileId>>,
    /// True if the service is started again now and then.
    dies: bool,
    /// Number of operations of all mounts that succeeded.
    done: Rc<Cell<u64>>,
}

impl Mount {
    fn below(&self, most: u64) -> u64 {
        self.world.below(most)
    }

    fn dir(&self) -> FileId {
        self.dirs[self.below(DIRS) as usize]
    }

    fn name(&self) -> String {
        format!("name-{}", self.below(NAMES))
    }

    /// A burst of operations of one program.
    async fn burst(&self, owner: u64) {
        for _ in 0..1 + self.below(30) {
            match self.step(owner).await {
                Ok(()) => self.done.set(self.done.get() + 1),
                Err(failure) => {
                    let expected = [ENOENT, EEXIST, ENOTEMPTY, ESTALE].contains(&failure.errno);
                    let lives = failure.kind != ErrorKind::Ended;
                    assert!(expected && lives, "an operation failed: {failure}");
                }
            }
            if self.below(3) == 0 {
                self.world.env().sleep(Duration::from_micros(self.below(5000))).await;
            }
        }
    }

    async fn step(&self, owner: u64) -> Result<(), Failure> {
        let (client, dir, name) = (&self.client, self.dir(), self.name());
        match self.below(10) {
            0 => {
                let mode = 0o100_644;
                let name = name.into();
                let request = MakeRequest { dir: dir.ino.0, name, mode, ..MakeRequest::default() };
                client.make(Branch::MAIN, request).await.map(drop)
            }
            1 => client.unlink(dir, name.as_bytes(), false).await.map(drop),
            2 => {
                let to = self.dir();
                let request = RenameRequest {
                    dir: dir.ino.0,
                    name: name.into(),
                    new_dir: to.ino.0,
                    new_name: self.name().into(),
                    exchange: self.below(4) == 0,
                    ..RenameRequest::default()
                };
                client.rename(Branch::MAIN, request).await.map(drop)
            }
            3 => self.move_directory(dir).await,
            4 => {
                let file = client.lookup(dir, name.as_bytes()).await?.file();
                client.link(file, self.dir(), self.name().as_bytes()).await.map(drop)
            }
            5 => {
                let listing = ReadDirRequest { dir: dir.ino.0, limit: 100, ..ReadDirRequest::default() };
                client.read_dir(Branch::MAIN, listing).await?;
                client.get_attr(dir).await.map(drop)
            }
            _ => {
                let file = client.lookup(dir, name.as_bytes()).await?.file();
                client.open(file).await?;
                let outcome = self.use_file(file, owner).await;
                client.release(file).await?;
                outcome
            }
        }
    }

    /// Moves the directory that all move, from wherever it is found, to another one.
    async fn move_directory(&self, to: FileId) -> Result<(), Failure> {
        let from = self.dir();
        let name = b"moved".to_vec();
        let request = RenameRequest {
            dir: from.ino.0,
            name: name.clone(),
            new_dir: to.ino.0,
            new_name: name,
            no_replace: true,
            ..RenameRequest::default()
        };
        self.client.rename(Branch::MAIN, request).await.map(drop)
    }

    async fn use_file(&self, file: FileId, owner: u64) -> Result<(), Failure> {
        let client = &self.client;
        let at = self.below(8) * PAGE;
        match self.below(11) {
            // A program reads through the page cache: the page is locked until it is filled.
            0 | 1 => {
                let _page = self.kernel.lock(file, at..at + PAGE);
                let hold = client.hold_to_fill(file, at..at + PAGE).await?;
                hold.reader().await.read_pages(at, PAGE).await?;
                hold.serves(at..at + PAGE);
                Ok(())
            }
            // The kernel writes a changed page back.
            2 => {
                let _page = self.kernel.lock(file, at..at + PAGE);
                let hold = client.hold(file, Purpose::Page).await?;
                let size = hold.size().await?;
                if at + PAGE > size {
                    return Ok(());
                }
                let page = Staged::of(at, &[self.below(250) as u8; PAGE as usize]);
                hold.writer().await.write_page(at, page).await
            }
            3 => {
                let size = Some(self.below(9 * PAGE));
                let change = SetAttrRequest { ino: file.ino.0, size, ..SetAttrRequest::default() };
                let _pages = self.kernel.lock(file, 0..u64::MAX);
                let hold = client.hold_to_set(Branch::MAIN, &change).await?;
                hold.set_attr(change).await.map(drop)
            }
            4 => client.write(file, at + self.below(PAGE), &[7; 3000]).await,
            5 => client.append(file, &[8; 500]).await.map(drop),
            6 => match client.fsync(file).await {
                // The client in the service's process, which dies with it, may have had something.
                Err(failure) if failure.errno == EIO && self.dies => Ok(()),
                done => done,
            },
            7 => {
                let mode = Some(0o600 + self.below(0o100) as u32);
                let change = SetAttrRequest { ino: file.ino.0, mode, ..SetAttrRequest::default() };
                client.set_attr(Branch::MAIN, change).await.map(drop)
            }
            8 => client.change_space(file, at, PAGE, SpaceChange::Punch, true).await,
            9 => client.get_attr(file).await.map(drop),
            _ => {
                let lock = |change: LockChange| LockRequest {
                    ino: file.ino.0,
                    owner,
                    last: u64::MAX,
                    change: change.into(),
                    ..LockRequest::default()
                };
                let change = if self.below(2) == 0 { LockChange::Shared } else { LockChange::Exclusive };
                assert!(client.lock_waiting(lock(change), &Notify::new()).await?, "nobody interrupts it");
                let outcome = client.append(file, &[9; 100]).await;
                client.lock(&lock(LockChange::Unlock)).await?;
                outcome.map(drop)
            }
        }
    }
}

/// Returns the number of operations that succeeded.
async fn live(seed: u64, site: &Site, machine: Machine, life: Duration) -> u64 {
    let way = Way::new(&machine);
    let (mut clients, remotes) = several(&machine, &way, CLIENTS + 1).await;
    let (world, env) = (machine.world.clone(), machine.world.env());
    let mut dirs = Vec::new();
    for dir in 0..DIRS {
        let (dir, mode) = (format!("dir-{dir}").into(), 0o040_755);
        let request = MakeRequest { dir: clients[1].root().ino.0, name: dir, mode, ..MakeRequest::default() };
        dirs.push(clients[1].make(Branch::MAIN, request).await.unwrap().file());
    }
    let (name, mode) = (b"moved".to_vec(), 0o040_755);
    let request = MakeRequest { dir: dirs[0].ino.0, name, mode, ..MakeRequest::default() };
    clients[1].make(Branch::MAIN, request).await.unwrap();
    let (dirs, done) = (Rc::new(dirs), Rc::new(Cell::new(0)));
    let dies = seed.is_multiple_of(3);
    let mounts: Vec<Mount> = clients[1..]
        .iter()
        .map(|client| Mount {
            world: world.clone(),
            client: client.clone(),
            kernel: Kernel::of(client, &world),
            dirs: dirs.clone(),
            dies,
            done: done.clone(),
        })
        .collect();
    let breaks = seed.is_multiple_of(2).then(|| way.breaks());
    let mut machine = Some(machine);
    let begin = env.now();
    while env.now() - begin < life {
        let owners = 0..TASKS;
        let bursts = owners.flat_map(|owner| mounts.iter().map(move |mount| mount.burst(owner)));
        let restarts = dies && world.below(8) == 0;
        let again = async {
            if restarts {
                env.sleep(Duration::from_micros(world.below(50_000))).await;
                machine = Some(restart(site, machine.take().unwrap(), &way, Duration::ZERO).await);
            }
        };
        let round = futures_util::future::join(join_all(bursts), again);
        let ended = timeout(&env, LIVENESS, round).await.is_some();
        assert!(ended, "seed {seed}: operations wait after {:?}", env.now() - begin);
        let most = [10, 5000, 240_000][world.below(3) as usize];
        env.sleep(Duration::from_millis(world.below(most))).await;
    }
    drop(breaks);
    for dir in dirs.iter() {
        for name in 0..NAMES {
            let name = format!("name-{name}");
            let look = mounts.iter().map(async |Mount { client, .. }| {
                match client.lookup(*dir, name.as_bytes()).await {
                    Err(failure) if failure.errno == ENOENT => None,
                    found => {
                        let attr = found.unwrap();
                        let bytes = read(client, attr.file()).await;
                        Some((attr.file(), attr.mode, attr.nlink, bytes))
                    }
                }
            });
            let found = join_all(look).await;
            let same = found.windows(2).all(|pair| pair[0] == pair[1]);
            assert!(same, "seed {seed}: {name} of {dir} differs: {found:?}");
        }
    }
    drop(mounts);
    clients.iter().for_each(|client| client.set_kernel_cache(None));
    let machine = machine.unwrap();
    clients[0] = machine.client.clone();
    end(machine, clients, remotes).await;
    done.get()
}

fn hours(seeds: impl Iterator<Item = u64>, life: Duration) {
    let (mut lives, mut done) = (0, 0);
    for seed in seeds {
        let counted = Cell::new(0);
        on_machine(seed, async |site, machine| counted.set(live(seed, site, machine, life).await));
        lives += 1;
        done += counted.get();
    }
    println!("{done} operations in {:.1} simulated hours", (life * lives).as_secs_f64() / 3600.0);
    assert!(done > 0, "nothing was done");
}

#[test]
fn nothing_waits_for_ever_beside_four_others() {
    hours(0..6, SHORT_LIFE);
}

/// Full form: `PENSTOCK_SEEDS=0..200` lives 100 hours.
#[test]
#[ignore = "long: with --ignored, PENSTOCK_SEEDS says how many half hours"]
fn campaign_of_hours() {
    hours(penstock_sim::seeds(0..200), LIFE);
}
