//! A small array on simulated disks, and a model of the data that it must hold.

use penstock_array::MemberNo;
use penstock_array::Site as WriteSite;
use penstock_array::format::descriptor::{Descriptor, Role};
use penstock_array::format::label::Label;
use penstock_array::ownership::MemoryOwnership;
use penstock_array::{
    Array, ArrayError, CreateSpec, FoundLabel, Geometry, Lacking, Layout, Roster, Volume, create, open,
    read_label,
};
use penstock_base::{ArrayId, BLOCK_BYTES, Buf, BufMut, DriveId, Env, Id128, PoolId, crc32c_blocks};
use penstock_drive::copies::COPY_BYTES;
use penstock_drive::superblock::{self, SliceEntry, Superblock};
use penstock_drive::{Class, Drive, DriveHandle, FaultyDrive, Io, Slice};
use penstock_layout::Shape;
use penstock_sim::{CutMode, CutPlan, SimDisk, SimDrive, World};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

pub const IO: Io = Io::new(Class::Client, "test");
pub const DISK_BYTES: u64 = 32 << 20;
pub const SLICE_AT: u64 = 1 << 20;
/// The first copy of a label on a drive.
pub const LABEL: Range<u64> = SLICE_AT..LOG_AT;
pub const LOG_AT: u64 = SLICE_AT + COPY_BYTES as u64;

/// Prepares a drive, given its number, before the array is opened.
pub type Prepare = Box<dyn Fn(usize, &FaultyDrive)>;

/// The state that survives a power cut: disks and coordination.
pub struct Site {
    pub disks: Vec<Rc<SimDisk>>,
    pub ownership: Rc<MemoryOwnership>,
    pub spec: CreateSpec,
    /// Prepares each drive, given its number, before the array is opened.
    pub prepare: Prepare,
    /// The reaction of an opening to data that only absent drives have.
    pub lacking: Lacking,
}

/// One life of the machine.
pub struct Machine {
    pub world: World,
    pub env: Env,
    pub disks: Vec<Rc<SimDisk>>,
    pub drives: Vec<Option<Rc<FaultyDrive>>>,
    pub handles: Vec<Option<Rc<DriveHandle>>>,
    pub array: Rc<Array>,
    pub volume: Volume,
    /// Positions whose disk was replaced.
    pub replaced: RefCell<BTreeSet<usize>>,
}

pub fn spec(k: usize, m: usize) -> CreateSpec {
    CreateSpec {
        stack: penstock_base::StackNo::FIRST,
        pool: PoolId::default(),
        name: "test".into(),
        role: Role::Data,
        k,
        m,
        layout: Layout::one_group(k + m).unwrap(),
        first_carrier: 0,
        strip_blocks: 8,
        log_bytes: 3 << 20,
        segment_bytes: 128 << 10,
    }
}

/// A drive whose failed flushes lose the writes that they should have made durable.
fn forgetting(world: &World, drive: FaultyDrive, disk: &Rc<SimDisk>) -> FaultyDrive {
    let (world, disk) = (world.clone(), disk.clone());
    drive.forgetting(move || disk.forget_unflushed(&world))
}

/// So many members with so many spare places in a row, for stripes of k+m strips.
pub fn spread(k: usize, m: usize, members: usize, spares: usize) -> CreateSpec {
    let shape = Shape { members, strips: k + m, redundancy: m, spares, domains: members };
    CreateSpec { layout: Layout::spread(shape, 1).unwrap(), ..spec(k, m) }
}

pub fn slice_bytes() -> u64 {
    superblock::slices_end(DISK_BYTES) - SLICE_AT
}

pub fn slice_of(handle: &Rc<DriveHandle>) -> Slice {
    Slice::new(handle.clone(), SLICE_AT, slice_bytes())
}

/// The range of log, roots and table pages on a drive.
pub fn metadata_of(geometry: &Geometry) -> Range<u64> {
    SLICE_AT + geometry.metadata().start..SLICE_AT + geometry.metadata().end
}

/// The range of the log on a drive.
pub fn log_of(geometry: &Geometry) -> Range<u64> {
    SLICE_AT + geometry.log().start..SLICE_AT + geometry.log().end
}

/// The label of the slice on a drive with this superblock.
pub async fn label_on(env: &Env, drive: Rc<dyn Drive>, superblock: &Superblock) -> Option<Label> {
    let entry = superblock.slices.first()?;
    let handle = DriveHandle::online(env.clone(), "look".into(), drive, superblock.clone());
    match read_label(&slice_of(&handle), entry.array).await {
        Ok(FoundLabel::Label(label)) => Some(label),
        _ => None,
    }
}

/// The label on a disk, and its drive's superblock.
pub fn label_of(disk: &Rc<SimDisk>) -> Option<(Superblock, Label)> {
    let world = World::new(1);
    let found = world.run(async {
        let drive = SimDrive::new(&world, disk.clone());
        let superblock = superblock::read(&*drive).await.ok()?;
        let label = label_on(&world.env(), drive, &superblock).await?;
        Some((superblock, label))
    });
    world.destroy();
    found.unwrap()
}

impl Site {
    /// A site on these disks, with their present contents.
    pub fn of(disks: Vec<Rc<SimDisk>>, spec: CreateSpec) -> Self {
        Self { disks, ownership: Rc::default(), spec, prepare: Box::new(|_, _| ()), lacking: Lacking::Refuse }
    }

    /// A site on new disks with an empty array.
    pub fn new(spec: CreateSpec) -> Self {
        let world = World::new(1);
        let env = world.env();
        let disks: Vec<_> = (0..spec.layout.members()).map(|_| SimDisk::new(DISK_BYTES)).collect();
        let site = Self::of(disks, spec);
        world
            .run(async {
                let mut handles = Vec::new();
                for (number, disk) in site.disks.iter().enumerate() {
                    let drive = SimDrive::new(&world, disk.clone());
                    let sb =
                        Superblock { drive: drive_id(number), size_bytes: DISK_BYTES, ..Default::default() };
                    handles.push(DriveHandle::online(env.clone(), format!("disk{number}"), drive, sb));
                }
                let slices: Vec<Slice> = handles.iter().map(slice_of).collect();
                let descriptor = create(&env, &site.spec, &slices).await.unwrap();
                for (position, handle) in handles.iter().enumerate() {
                    handle.put_slices(&[row(descriptor.array, position)]).await.unwrap();
                }
            })
            .unwrap();
        world.destroy();
        site
    }

    /// Opens the array in `world`, without the disks in `lost`. In every other opening no page of the stripe
    /// table stays in memory that can be read again.
    pub async fn open(&self, world: &World, lost: &[usize]) -> Result<Machine, ArrayError> {
        let memory = (world.below(2) == 1).then_some(1);
        let roster = Roster::with_table_memory(&world.env(), memory);
        self.open_with(world, lost, &roster).await
    }

    /// Like [`Self::open`], with a roster that several arrays may share.
    pub async fn open_with(
        &self,
        world: &World,
        lost: &[usize],
        roster: &Rc<Roster>,
    ) -> Result<Machine, ArrayError> {
        let env = world.env();
        let mut drives = Vec::new();
        let mut handles: BTreeMap<DriveId, Rc<DriveHandle>> = BTreeMap::new();
        let mut descriptors = Vec::new();
        for (number, disk) in self.disks.iter().enumerate() {
            if lost.contains(&number) {
                drives.push(None);
                continue;
            }
            let inner = SimDrive::new(world, disk.clone());
            let drive = Rc::new(forgetting(world, FaultyDrive::new(env.clone(), inner), disk));
            (self.prepare)(number, &drive);
            drives.push(Some(drive.clone()));
            let Ok(found) = superblock::read(&*drive).await else { continue };
            let label = label_on(&env, drive.clone(), &found).await;
            descriptors.extend(label.and_then(|label| label.descriptor().ok()));
            let drive: Rc<dyn Drive> = drive;
            handles
                .insert(found.drive, DriveHandle::online(env.clone(), format!("disk{number}"), drive, found));
        }
        let descriptor = Descriptor::newest(descriptors).expect("some disk has a label");
        let used: Vec<_> =
            descriptor.members.iter().map(|member| handles.get(&member.drive).cloned()).collect();
        let members = used.iter().map(|handle| handle.as_ref().map(slice_of)).collect();
        let array = open(&env, descriptor, members, self.ownership.clone(), roster, self.lacking).await?;
        let volume = Volume::whole(&array);
        Ok(Machine {
            world: world.clone(),
            env,
            disks: self.disks.clone(),
            drives,
            handles: used,
            array,
            volume,
            replaced: RefCell::default(),
        })
    }

    /// Cuts the power: each disk keeps a random part of its unflushed writes.
    pub fn cut(&self, world: &World) {
        world.destroy();
        for disk in &self.disks {
            disk.cut(world, CutMode::draw(world));
        }
    }

    /// Puts a blank disk in the place of a lost one.
    pub fn replace(&mut self, number: usize) {
        self.disks[number] = SimDisk::new(DISK_BYTES);
    }
}

impl Machine {
    /// True if the drive of a member failed in this life.
    pub fn latched(&self, position: usize) -> bool {
        self.handles[position].as_ref().is_some_and(|handle| !handle.is_online())
    }

    /// Puts a blank drive in the place of member `position`.
    pub async fn replace(&self, disk: &Rc<SimDisk>, position: usize, life: u64) -> Result<(), ArrayError> {
        let drive = SimDrive::new(&self.world, disk.clone());
        let id = DriveId(Id128::from_words(life, position as u64 + 100));
        let sb = Superblock { drive: id, size_bytes: DISK_BYTES, ..Default::default() };
        let handle = DriveHandle::online(self.env.clone(), "new".into(), drive, sb);
        let rows = [row(self.array.id(), position)];
        handle.put_slices(&rows).await.map_err(|error| ArrayError::Invalid(error.to_string()))?;
        self.array.replace_member(MemberNo::new(position), slice_of(&handle)).await?;
        self.replaced.borrow_mut().insert(position);
        Ok(())
    }
}

thread_local! {
    /// Distinguishes the drives of one site from those of another.
    pub static BASE: Cell<u64> = const { Cell::new(7) };
}

/// The row of a slice table.
pub fn row(array: ArrayId, position: usize) -> SliceEntry {
    SliceEntry { array, member: position as u16, extent: 0, offset: SLICE_AT, len: slice_bytes() }
}

fn drive_id(number: usize) -> DriveId {
    DriveId(Id128::from_words(BASE.get(), number as u64 + 1))
}

/// A block whose bytes are derived from `tag`; zeros for 0.
pub fn block_of(tag: u64) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK_BYTES];
    if tag != 0 {
        for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&(tag.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ index as u64).to_le_bytes());
        }
        bytes[..8].copy_from_slice(&tag.to_le_bytes());
    }
    bytes
}

pub fn buf_of(tags: &[u64]) -> (Buf, Vec<u32>) {
    let mut buf = BufMut::zeroed(tags.len() * BLOCK_BYTES);
    for (part, tag) in buf.as_mut().chunks_exact_mut(BLOCK_BYTES).zip(tags) {
        part.copy_from_slice(&block_of(*tag));
    }
    let buf = buf.freeze();
    let crcs = crc32c_blocks(&buf);
    (buf, crcs)
}

/// The tag of each of `count` blocks from `from` on. Panics if a block has bytes that were never written.
pub async fn tags(volume: &Volume, from: u64, count: u64) -> Result<Vec<u64>, ArrayError> {
    let blocks = volume.read(from, count, IO).await?;
    let bytes = blocks.gather();
    assert_eq!(crc32c_blocks(&bytes), blocks.crcs, "a read brings the checksums of what it brings");
    let tag = |block: &[u8]| {
        let tag = u64::from_le_bytes(block[..8].try_into().unwrap());
        assert_eq!(block, block_of(tag), "a block is whole");
        tag
    };
    Ok(bytes.chunks_exact(BLOCK_BYTES).map(tag).collect())
}

/// The writes to the part of the volume that goes through the log, in order.
#[derive(Default)]
pub struct LoggedModel {
    pub ops: Vec<(u64, Vec<u64>)>,
    pub durable: usize,
}

impl LoggedModel {
    /// True if `found` is the state after a prefix of the writes that contains all durable ones.
    pub fn allows(&self, found: &[u64]) -> bool {
        let mut state = vec![0; found.len()];
        for (index, (block, tags)) in self.ops.iter().enumerate() {
            if index >= self.durable && state == found {
                return true;
            }
            for (at, tag) in (*block as usize..).zip(tags) {
                state[at] = *tag;
            }
        }
        state == found
    }
}

impl LoggedModel {
    /// Describes the difference between the found state and the prefix that is nearest to it.
    fn nearest(&self, found: &[u64]) -> String {
        let mut state = vec![0; found.len()];
        let mut best = (usize::MAX, String::new());
        for index in 0..=self.ops.len() {
            let wrong: Vec<_> = (0..found.len()).filter(|at| state[*at] != found[*at]).collect();
            if wrong.len() < best.0 {
                let shown: Vec<_> = wrong.iter().map(|at| (*at, found[*at], state[*at])).collect();
                best = (
                    wrong.len(),
                    format!(
                        "prefix {index} of {}, durable {}; (block, found, wanted) {shown:?}",
                        self.ops.len(),
                        self.durable
                    ),
                );
            }
            if let Some((block, tags)) = self.ops.get(index) {
                (*block as usize..).zip(tags).for_each(|(at, tag)| state[at] = *tag);
            }
        }
        best.1
    }
}

/// The contents that each full stripe may have: the durable one and every one begun since.
#[derive(Default)]
pub struct FreshModel {
    /// By stripe: contents (tag of its first block; 0 is unwritten), the durable one first.
    pub may: BTreeMap<u64, Vec<u64>>,
}

/// A load that runs until the world is cut or `rounds` are over.
pub struct Load {
    pub logged: RefCell<LoggedModel>,
    pub fresh: RefCell<FreshModel>,
    pub next_tag: Cell<u64>,
    pub rounds: u64,
    /// Calls of `write_fresh` that have not returned.
    writing_fresh: Cell<u64>,
}

pub const LOGGED_STRIPES: u64 = 6;
pub const FRESH_STRIPES: u64 = 6;

impl Load {
    pub fn new(rounds: u64) -> Self {
        Self {
            logged: RefCell::default(),
            fresh: RefCell::default(),
            next_tag: Cell::new(1),
            rounds,
            writing_fresh: Cell::new(0),
        }
    }

    /// Flushes the volume and asserts that the drives were flushed for it.
    ///
    /// A flush must cover every write that returned before it began: log records (`log.append`) and the
    /// headers of their segments (`log.segment`) on the carriers, and strips of fresh stripes (`fresh.strip`)
    /// with their trailers (`fresh.trailer`) on all members. It need not cover destage, checkpoints, rebuild
    /// and repair, because the log keeps their contents until they are flushed themselves; nor strips of a
    /// `write_fresh` that has not returned; nor anything on a member that is recorded as stale.
    async fn flush(&self, machine: &Machine) -> Result<(), ArrayError> {
        let marks: Vec<u64> = machine.disks.iter().map(|disk| disk.order()).collect();
        let in_flight = self.writing_fresh.get() > 0;
        machine.volume.flush().await?;
        let report = machine.array.report();
        for (position, member) in report.members.iter().enumerate() {
            // A late write to a disk that was replaced does not matter.
            if member.state != "active" || machine.replaced.borrow().contains(&position) {
                continue;
            }
            let owed = machine.disks[position].unflushed_before(marks[position]);
            let is_one_of = |site: &str, sites: &[WriteSite]| sites.iter().any(|of| of.name() == site);
            let is_owed = |site: &str| {
                is_one_of(site, &[WriteSite::LogAppend, WriteSite::LogSegment])
                    || !in_flight && is_one_of(site, &[WriteSite::FreshStrip, WriteSite::FreshTrailer])
            };
            let owed: Vec<_> = owed.into_iter().filter(|site| is_owed(site)).collect();
            assert!(owed.is_empty(), "a flush returned and member {position} has not flushed {owed:?}");
        }
        Ok(())
    }

    fn tag(&self) -> u64 {
        let tag = self.next_tag.get();
        self.next_tag.set(tag + 1);
        tag
    }

    /// Writes through the log, with flushes.
    pub async fn run_logged(&self, machine: &Machine) -> Result<(), ArrayError> {
        let world = &machine.world;
        let blocks = LOGGED_STRIPES * machine.volume.stripe_blocks();
        for _ in 0..self.rounds {
            let count = if world.below(8) == 0 { 1 + world.below(12) } else { 1 + world.below(2) };
            let block = world.below(blocks - count);
            let tags: Vec<u64> = (0..count).map(|_| self.tag()).collect();
            // A write that is longer than a record is several writes, in order.
            let atomic = machine.array.geometry().max_payload_blocks();
            for (part, tags) in (block..).step_by(atomic).zip(tags.chunks(atomic)) {
                self.logged.borrow_mut().ops.push((part, tags.to_vec()));
            }
            let (data, crcs) = buf_of(&tags);
            machine.volume.write(block, &data, &crcs).await?;
            if world.below(5) == 0 {
                let upto = self.logged.borrow().ops.len();
                self.flush(machine).await?;
                let mut logged = self.logged.borrow_mut();
                logged.durable = logged.durable.max(upto);
            }
            if world.below(20) == 0 {
                machine.env.sleep(std::time::Duration::from_millis(world.below(5000))).await;
            }
        }
        Ok(())
    }

    /// Writes and discards full stripes.
    pub async fn run_fresh(&self, machine: &Machine) -> Result<(), ArrayError> {
        let world = &machine.world;
        for _ in 0..self.rounds / 4 {
            let stripe = LOGGED_STRIPES + world.below(FRESH_STRIPES);
            let written = self.fresh.borrow().may.get(&stripe).is_some_and(|may| *may.last().unwrap() != 0);
            if written {
                self.fresh.borrow_mut().may.get_mut(&stripe).unwrap().push(0);
                machine.volume.discard(stripe, 1, penstock_array::Discard::OnDrives).await?;
                self.fresh.borrow_mut().may.insert(stripe, vec![0]);
                continue;
            }
            let tag = self.tag();
            self.next_tag.set(tag + machine.volume.stripe_blocks());
            let tags: Vec<u64> = (tag..tag + machine.volume.stripe_blocks()).collect();
            self.fresh.borrow_mut().may.entry(stripe).or_insert_with(|| vec![0]).push(tag);
            let (data, crcs) = buf_of(&tags);
            self.writing_fresh.set(self.writing_fresh.get() + 1);
            machine.volume.write_fresh(stripe, &data, &crcs, IO).await?;
            self.writing_fresh.set(self.writing_fresh.get() - 1);
            if world.below(2) == 0 {
                self.flush(machine).await?;
                self.fresh.borrow_mut().may.insert(stripe, vec![tag]);
            }
        }
        Ok(())
    }

    /// Checks the array's contents at the start of a life. The contents found become the durable state of the
    /// model.
    pub async fn settle(&self, machine: &Machine) -> Result<(), ArrayError> {
        self.check(machine).await?;
        let per_stripe = machine.volume.stripe_blocks();
        let found = tags(&machine.volume, 0, LOGGED_STRIPES * per_stripe).await?;
        *self.logged.borrow_mut() = LoggedModel { ops: vec![(0, found)], durable: 1 };
        for stripe in LOGGED_STRIPES..LOGGED_STRIPES + FRESH_STRIPES {
            let first = tags(&machine.volume, stripe * per_stripe, 1).await?[0];
            self.fresh.borrow_mut().may.insert(stripe, vec![first]);
        }
        self.writing_fresh.set(0);
        Ok(())
    }

    /// Checks that the array's contents are among those that the model allows.
    pub async fn check(&self, machine: &Machine) -> Result<(), ArrayError> {
        let per_stripe = machine.volume.stripe_blocks();
        let found = tags(&machine.volume, 0, LOGGED_STRIPES * per_stripe).await?;
        {
            let logged = self.logged.borrow();
            assert!(
                logged.allows(&found),
                "no prefix that holds all flushed writes: {}",
                logged.nearest(&found)
            );
        }
        let fresh = self.fresh.borrow().may.clone();
        for (stripe, may) in &fresh {
            let found = tags(&machine.volume, stripe * per_stripe, per_stripe).await?;
            let whole = found
                .iter()
                .enumerate()
                .all(|(at, tag)| found[0] == 0 && *tag == 0 || *tag == found[0] + at as u64);
            assert!(whole && may.contains(&found[0]), "stripe {stripe} holds {} of {may:?}", found[0]);
        }
        Ok(())
    }
}

/// Plans a power cut at write `nth` of a site, counted from 0.
pub fn plan(site: &str, nth: u64) -> CutPlan {
    CutPlan { site: site.to_owned(), nth }
}

/// A block that no test writes.
pub const NOISE: [u8; BLOCK_BYTES] = [0x5a; BLOCK_BYTES];

/// Writes a full stripe of blocks with tags from `tag` on.
pub async fn write_fresh(machine: &Machine, stripe: u64, tag: u64) -> Result<(), ArrayError> {
    let (data, crcs) = buf_of(&(tag..tag + machine.volume.stripe_blocks()).collect::<Vec<_>>());
    machine.volume.write_fresh(stripe, &data, &crcs, IO).await
}

/// Writes one block.
pub async fn write(machine: &Machine, block: u64, tag: u64) -> Result<(), ArrayError> {
    let (data, crcs) = buf_of(&[tag]);
    machine.volume.write(block, &data, &crcs).await
}
