//! A simulated machine with a store on it, for tests of the whole path: starts, lives, power cuts and checks.
//!
//! Owns disks that survive a power cut, and the assembly of one life from the client library to the drives.
//! Its tests are the whole-system tests of the services. Nothing of it is in the program.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a machine of a test that cannot start fails the test")]

use penstock_array::CreateSpec;
use penstock_array::format::descriptor::Role;
use penstock_array::ownership::MemoryOwnership;
use penstock_base::Env;
use penstock_client::Client;
use penstock_drive::{Drive, Fault, FaultyDrive, Op};
use penstock_kv::Mode;
use penstock_node::{
    Backing, Found, Holding, InProcess, Lacking, NewDrives, Node, Restore, Start, StartError, StoreSpec,
    WantedLayout, create_store, find_drives, look_for_store,
};
use penstock_sim::{CutMode, SimDisk, SimDrive, World};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// Size of each drive of a store with the code 4+2, in bytes.
pub const DISK_BYTES: u64 = 40 << 20;
const META_BYTES: u64 = 20 << 20;

/// Contents of drives, by path; drives that replace others are added.
pub type Disks = Rc<RefCell<BTreeMap<String, Rc<SimDisk>>>>;

/// Drives as they were opened in one life, by path.
pub type Opened = Rc<RefCell<BTreeMap<String, Rc<FaultyDrive>>>>;

/// A fault that a drive gets as soon as it is opened.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The operation that fails.
    pub op: Op,
    /// The number of operations of that kind before it.
    pub nth: u64,
    /// The way in which it fails.
    pub fault: Fault,
    /// The bytes of the drive to which the fault is limited.
    pub within: Range<u64>,
}

/// Planned faults, by path.
pub type Plans = Rc<RefCell<BTreeMap<String, Vec<Planned>>>>;

/// Everything that survives a power cut.
pub struct Site {
    /// Contents of its drives.
    pub disks: Disks,
    /// Faults of the next life.
    pub plans: Plans,
    /// Claims of its arrays.
    pub ownership: Rc<MemoryOwnership>,
    /// The shape of its store.
    pub spec: StoreSpec,
    /// The next starts make the key-value store anew from a copy of the map.
    pub restore: Cell<Option<Restore>>,
    /// The layout that new files in the root directory get.
    pub layout: WantedLayout,
}

/// One life of the machine: from a start to a stop or a power cut.
pub struct Machine {
    /// The world that it lives in.
    pub world: World,
    /// The runtime of its worker.
    pub env: Env,
    /// Its services.
    pub node: Rc<Node>,
    /// A client in the services' process.
    pub client: Rc<Client>,
    /// Contents of its drives.
    pub disks: Disks,
}

struct SimBacking {
    world: World,
    disks: Disks,
    plans: Plans,
    opened: Opened,
}

impl Backing for SimBacking {
    fn open(&self, path: &str) -> Result<Rc<dyn Drive>, String> {
        let disk = self.disks.borrow().get(path).cloned().ok_or_else(|| format!("{path}: no such disk"))?;
        let drive = SimDrive::new(&self.world, disk.clone());
        let world = self.world.clone();
        let drive =
            FaultyDrive::new(self.world.env(), drive).forgetting(move || disk.forget_unflushed(&world));
        let drive = Rc::new(drive);
        for plan in self.plans.borrow_mut().remove(path).unwrap_or_default() {
            drive.plant_within(plan.op, plan.nth, plan.fault, plan.within);
        }
        self.opened.borrow_mut().insert(path.to_owned(), drive.clone());
        Ok(drive)
    }

    fn look(&self, path: &str) -> Result<Found, String> {
        Ok(match self.disks.borrow().get(path) {
            None => Found::Nothing,
            Some(disk) if disk.used_blocks().is_empty() => Found::EmptyFile,
            Some(_) => Found::File,
        })
    }

    fn create(&self, path: &str, size_bytes: u64) -> Result<(), String> {
        self.disks.borrow_mut().insert(path.to_owned(), SimDisk::new(size_bytes));
        Ok(())
    }

    fn allocate(&self, path: &str, range: Range<u64>) -> Result<(), String> {
        self.disks.borrow()[path].allocate(range);
        Ok(())
    }
}

/// The path of the drive with this number.
pub fn path(number: usize) -> String {
    format!("disk{number}")
}

/// A store of so many stacks; the data slices of each have `data_bytes` bytes together.
fn spec(k: usize, m: usize, data_bytes: u64, stacks: u16) -> StoreSpec {
    let (strip_blocks, log_bytes, segment_bytes) = (8, 4 << 20, 128 << 10);
    let array = |name, k, m| {
        let spec = CreateSpec::new(name, k, m).expect("few members");
        assert!(log_bytes > 0 && u64::from(segment_bytes) < log_bytes, "the log has segments");
        CreateSpec { strip_blocks, log_bytes, segment_bytes, ..spec }
    };
    assert!(data_bytes / k as u64 >= 1 << 20, "{data_bytes} bytes on {k} data strips");
    StoreSpec {
        data: CreateSpec { first_carrier: (1 + m) % (k + m), ..array("data", k, m) },
        meta: CreateSpec { role: Role::Metadata, ..array("meta", 1, m) },
        drive_bytes: (META_BYTES + data_bytes / k as u64 / (1 << 20) * (1 << 20)) * u64::from(stacks),
        meta_slice_bytes: META_BYTES,
        names_slice_bytes: META_BYTES,
        stacks,
    }
}

impl Default for Site {
    fn default() -> Self {
        Self::new()
    }
}

impl Site {
    /// A store with the code 4+2.
    pub fn new() -> Self {
        Self::of(4, 2)
    }

    /// A store with another code and as much data as one of 4+2.
    pub fn of(k: usize, m: usize) -> Self {
        Self::with_data(k, m, (DISK_BYTES - META_BYTES) * 4)
    }

    /// A store whose data slices have `data_bytes` bytes together.
    pub fn with_data(k: usize, m: usize, data_bytes: u64) -> Self {
        Self::without_store(k, m, data_bytes).made()
    }

    /// A store with the code 4+2 and so many stacks, each with as much data as a store of one. Its files are
    /// spread over all targets, chunk by chunk.
    pub fn of_stacks(stacks: u16) -> Self {
        Self::spread((4, 2), stacks, 0)
    }

    /// The same with another code, and files on this number of targets.
    pub fn spread((k, m): (usize, usize), stacks: u16, count: u16) -> Self {
        let data_bytes = (DISK_BYTES - META_BYTES) * 4;
        let spec = spec(k, m, data_bytes, stacks);
        let layout = match stacks {
            1 => WantedLayout::default(),
            // On one target all chunks are in a row, whatever the turn.
            _ => WantedLayout { count: Some(count), turn: Some(if count == 1 { 4 } else { 1 }) },
        };
        Self { spec, layout, ..Self::without_store(k, m, data_bytes) }.made()
    }

    /// Makes the store.
    fn made(self) -> Self {
        let site = self;
        let world = World::new(3);
        world.run(site.make_store(&world)).unwrap().unwrap();
        world.destroy();
        site
    }

    /// A place for such a store, without drives.
    pub fn without_store(k: usize, m: usize, data_bytes: u64) -> Self {
        let spec = spec(k, m, data_bytes, 1);
        Self {
            disks: Rc::default(),
            plans: Rc::default(),
            ownership: Rc::default(),
            spec,
            restore: Cell::default(),
            layout: WantedLayout::default(),
        }
    }

    /// Makes the store if there is none, as a start in a folder without a record of its store does. Returns
    /// what was there.
    pub async fn make_store(&self, world: &World) -> Result<Holding, StartError> {
        let (env, opened) = (world.env(), Opened::default());
        let backing =
            SimBacking { world: world.clone(), disks: self.disks.clone(), plans: self.plans.clone(), opened };
        let there: Vec<String> = self.disks.borrow().keys().cloned().collect();
        let found = look_for_store(&env, &backing, &there, &*self.ownership).await;
        if found != Holding::Store {
            let drives = NewDrives::Files((0..self.spec.drives()).map(path).collect());
            create_store(&env, &backing, &self.spec, &drives, &found).await?;
        }
        Ok(found)
    }

    /// Size of each drive in bytes.
    pub fn disk_bytes(&self) -> u64 {
        self.spec.drive_bytes
    }

    /// Starts the store without the drives with these numbers.
    pub async fn start(&self, world: &World, lost: &[usize]) -> Result<Machine, StartError> {
        let lost: Vec<String> = lost.iter().copied().map(path).collect();
        self.start_without(world, &lost).await
    }

    /// Starts the store with all drives except those at the paths in `lost`.
    pub async fn start_without(&self, world: &World, lost: &[String]) -> Result<Machine, StartError> {
        self.start_recording(world, lost, &Opened::default()).await
    }

    /// Like [`Site::start_without`]; also puts drives into `opened` as they are opened.
    pub async fn start_recording(
        &self,
        world: &World,
        lost: &[String],
        opened: &Opened,
    ) -> Result<Machine, StartError> {
        let env = world.env();
        let disks = self.disks.clone();
        let backing: Rc<dyn Backing> = Rc::new(SimBacking {
            world: world.clone(),
            disks: disks.clone(),
            plans: self.plans.clone(),
            opened: opened.clone(),
        });
        let paths: Vec<String> = disks.borrow().keys().filter(|path| !lost.contains(path)).cloned().collect();
        let candidates = find_drives(&env, &*backing, &paths).await;
        let how = Start {
            wanted: None,
            last_paths: BTreeMap::new(),
            mode: Mode::Baton,
            lacking: Lacking::Refuse,
            // In every other start no page stays in memory that can be read again.
            machine_bytes: None,
            table_memory: (world.below(2) == 1).then_some(1),
            restore: self.restore.get(),
        };
        let node = how.open(&env, backing, candidates, self.ownership.clone()).await?;
        if self.layout != WantedLayout::default() {
            let set = node.set_layout("/", self.layout).await;
            set.map_err(|error| StartError::Refused(error.to_string()))?;
        }
        let client = Client::connect(&env, InProcess::new(node.clone()), "test")
            .await
            .map_err(|failure| StartError::Refused(failure.to_string()))?;
        // With no other client, operations begin from here on in the order in which they are requested. Other
        // clients that survived a restart are not waited for.
        if node.session_reports().len() == 1 && client.get_attr(client.root()).await.is_ok() {
            let asked = env.now();
            while !client.is_alone() {
                env.sleep(Duration::from_millis(1)).await;
                assert!(
                    env.now() < asked + Duration::from_secs(1),
                    "a client hears at once that it is alone"
                );
            }
        }
        Ok(Machine { world: world.clone(), env, node, client, disks })
    }

    /// Cuts the power: everything that runs ends, and each disk keeps some of its unflushed writes.
    pub fn cut(&self, world: &World) {
        world.destroy();
        for disk in self.disks.borrow().values() {
            disk.cut(world, CutMode::draw(world));
        }
    }

    /// A copy of the site and of its claims, with drives that can be damaged.
    pub fn duplicate(&self) -> Self {
        let disks: BTreeMap<_, _> =
            self.disks.borrow().iter().map(|(path, disk)| (path.clone(), disk.duplicate())).collect();
        Self {
            disks: Rc::new(RefCell::new(disks)),
            plans: Rc::default(),
            ownership: Rc::new((*self.ownership).clone()),
            spec: self.spec.clone(),
            restore: self.restore.clone(),
            layout: self.layout,
        }
    }
}

impl Machine {
    /// Replaces lost drives by blank ones. Returns the paths of the new drives.
    pub async fn replace_missing(&self) -> Vec<String> {
        let missing: Vec<_> = self.node.drives().into_iter().filter(|drive| !drive.is_online()).collect();
        let mut paths = Vec::new();
        for drive in &missing {
            let number = self.disks.borrow().len();
            let path = format!("new{number}");
            self.node.replace_drive(&drive.id().to_string(), Some(&path)).await.unwrap();
            paths.push(path);
        }
        paths
    }

    /// Replaces lost drives by blank ones, and waits until there is no redundancy debt.
    pub async fn rebuild(&self) {
        self.replace_missing().await;
        for array in self.node.arrays() {
            assert_eq!(array.wait_rebuilt().await, 0, "{:?}", array.report());
        }
    }

    /// Asserts everything that must hold for a store at rest.
    pub async fn audit(&self) {
        let check = self.node.check_fs().await.unwrap();
        assert!(check.clean, "{:?}", check.now);
        for array in self.node.arrays() {
            let scrub = array.scrub().await.unwrap();
            assert!(scrub.is_clean(), "{}: {scrub:?}", array.name());
        }
        // Checked twice: the first check makes everything durable, which frees the blocks of removed data.
        let check = self.node.check_fs().await.unwrap();
        let space = self.node.fs_report();
        let used = (space.total_bytes - space.free_bytes) / penstock_base::BLOCK_BYTES as u64;
        assert_eq!(used, check.blocks, "blocks that are used belong to files: {check:?}");
    }

    /// Asserts that the store is empty: no inode except the root, no used block, no written stripe.
    pub async fn check_empty(&self, free_bytes: u64) {
        let arrays = self.node.arrays().iter().filter(|array| array.role() == Role::Data);
        let arrays: Vec<_> = arrays.cloned().collect();
        let written = || arrays.iter().map(|array| array.report().stripes.1).sum::<u64>();
        // Removing and discarding are tasks of their own; a minute is more than they ever need.
        for _ in 0..600 {
            self.client.sync_all().await.unwrap();
            if written() == 0 && self.node.fs_report().free_bytes == free_bytes {
                break;
            }
            self.env.sleep(Duration::from_millis(100)).await;
        }
        let check = self.node.check_fs().await.unwrap();
        let left = (check.inodes, check.names, check.removed_files, check.chunks, check.blocks);
        assert_eq!(left, (1, 0, 0, 0, 0), "only the root is left: {check:?}");
        assert_eq!(self.node.fs_report().free_bytes, free_bytes, "all space is back");
        assert_eq!(written(), 0, "stripes without contents are discarded");
    }

    /// Stops the machine in order.
    pub async fn stop(&self) {
        self.try_stop().await.unwrap();
    }

    /// Stops the machine in order, or returns why it cannot.
    pub async fn try_stop(&self) -> Result<(), StartError> {
        self.client.close().await.unwrap();
        self.node.close().await
    }
}

/// Runs a test on a new store, which must pass all checks afterwards.
pub fn on_machine(seed: u64, test: impl AsyncFnOnce(&Machine)) {
    let site = Site::new();
    let world = World::new(seed);
    live(&site, &world, test);
}

/// Runs a life that ends with a stop, and audits the store.
fn live(site: &Site, world: &World, life: impl AsyncFnOnce(&Machine)) {
    let run = world.run(async {
        let machine = site.start(world, &[]).await.unwrap();
        life(&machine).await;
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Runs one life, cuts the power, and runs the next.
pub fn with_a_cut_between(seed: u64, before: impl AsyncFnOnce(&Machine), after: impl AsyncFnOnce(&Machine)) {
    let site = Site::new();
    let world = World::new(seed);
    let first = world.run(async { before(&site.start(&world, &[]).await.unwrap()).await });
    first.unwrap();
    site.cut(&world);
    live(&site, &World::new(seed + 1), after);
}
