//! A small volume and a store in memory for the tests of the parts, and random numbers for their models.

use crate::allocator::Allocator;
use crate::files::Known;
use crate::free::{Bitmap, Groups, Space};

use crate::rows::{
    ChunkKey, Extent, FileRow, MapRow, Owner, counts_key, encode_account, encode_counts, encode_group,
    group_key, read_row,
};
use crate::target::{Target, TargetConfig, TargetMemory};
use crate::volumes::Volumes;
use penstock_array::ownership::MemoryOwnership;
use penstock_array::{CreateSpec, Lacking, Roster, Volume, create, open};
use penstock_base::{
    BLOCK_BYTES, Birth, Branch, Buf, Class, DriveId, Env, FileId, Gate, Id128, Ino, IoContext, Quiet, Stripe,
    TargetId, crc32c_blocks,
};
use penstock_drive::superblock::{self, Superblock};
use penstock_drive::{DriveHandle, FaultyDrive, Slice};
use penstock_kv::{Kv, MemKv, WriteSet};
use penstock_sim::{SimDisk, SimDrive, World};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Blocks in a stripe: two data strips of four blocks.
pub(crate) const STRIPE: u64 = 8;
/// Blocks in a chunk: two stripes.
pub(crate) const CHUNK: u32 = 16;
const DISK_BYTES: u64 = 7 << 20;
const SLICE_AT: u64 = 1 << 20;
/// The target's generation.
pub(crate) const GENERATION: u64 = 77;

/// The context of most I/O in tests.
pub(crate) const CLIENT: IoContext = IoContext::system(Class::Client);

/// A linear congruential generator.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Prints the seed of a model test that panics.
pub(crate) struct Seed(pub(crate) u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed is {}", self.0);
        }
    }
}

pub(crate) fn file(ino: u64) -> FileId {
    FileId::main(Ino(ino))
}

pub(crate) fn chunk_key(ino: u64, index: u64) -> ChunkKey {
    ChunkKey { file: file(ino), index }
}

/// An extent that holds data.
pub(crate) fn extent(first: u32, count: u32, block: u64) -> Extent {
    Extent { first, count, block, preallocated: false, birth: Birth::FIRST }
}

/// The owner of all files.
pub(crate) const OWNER: Owner = Owner { uid: 1000, gid: 100, project: 0 };

/// A file of which its sender knows this truncate generation.
pub(crate) fn known(truncations: u64) -> Known {
    Known { truncations, owner: OWNER }
}

/// The value of a map row of a file that was never truncated.
pub(crate) fn map_row(extents: &[Extent]) -> Vec<u8> {
    MapRow { truncations: 0, extents: extents.to_vec() }.encode(Birth::FIRST)
}

/// The extents of a map row.
pub(crate) fn extents_of(value: &[u8]) -> Vec<Extent> {
    MapRow::decode(value, Birth::FIRST).unwrap().extents
}

pub(crate) fn preallocated(first: u32, count: u32, block: u64) -> Extent {
    Extent { preallocated: true, ..extent(first, count, block) }
}

/// Blocks filled with a byte each, and their checksums.
pub(crate) fn blocks_of(fills: &[u8]) -> (Buf, Vec<u32>) {
    let bytes: Vec<u8> = fills.iter().flat_map(|fill| [*fill; BLOCK_BYTES]).collect();
    let crcs = crc32c_blocks(&bytes);
    (Buf::copy_from(&bytes), crcs)
}

/// A volume on three simulated drives, 2+1, and an empty store in memory.
pub(crate) struct Bench {
    pub(crate) env: Env,
    pub(crate) volume: Volume,
    pub(crate) kv: Rc<MemKv>,
    pub(crate) gate: Rc<Gate>,
    pub(crate) disks: Vec<Rc<SimDisk>>,
    /// The drives that these disks are.
    pub(crate) drives: Vec<Rc<FaultyDrive>>,
}

/// Runs a test on a fresh bench.
pub(crate) fn on_a_volume<T>(test: impl AsyncFnOnce(&Bench) -> T) -> T {
    on_drives_of(DISK_BYTES, None, test)
}

/// The same with drives of another size, and so many bytes of memory for the stripe table.
pub(crate) fn on_drives_of<T>(
    disk_bytes: u64,
    table_memory: Option<usize>,
    test: impl AsyncFnOnce(&Bench) -> T,
) -> T {
    let world = World::new(5);
    let outcome = world.run(async {
        let bench = Bench::new(&world, disk_bytes, table_memory).await;
        test(&bench).await
    });
    world.destroy();
    outcome.unwrap()
}

/// Runs a test on so many fresh benches, which share a gate.
pub(crate) fn on_volumes<T>(count: usize, test: impl AsyncFnOnce(&[Bench]) -> T) -> T {
    let world = World::new(5);
    let outcome = world.run(async {
        let (mut benches, gate) = (Vec::new(), Rc::<Gate>::default());
        for _ in 0..count {
            benches.push(Bench { gate: gate.clone(), ..Bench::new(&world, DISK_BYTES, None).await });
        }
        test(&benches).await
    });
    world.destroy();
    outcome.unwrap()
}

impl Bench {
    async fn new(world: &World, disk_bytes: u64, table_memory: Option<usize>) -> Self {
        let env = world.env();
        let disks: Vec<_> = (0..3).map(|_| SimDisk::new(disk_bytes)).collect();
        let faulty = |disk: &Rc<SimDisk>| FaultyDrive::new(env.clone(), SimDrive::new(world, disk.clone()));
        let drives: Vec<_> = disks.iter().map(|disk| Rc::new(faulty(disk))).collect();
        let handle = |(number, drive): (u64, &Rc<FaultyDrive>)| {
            let id = DriveId(Id128::from_words(7, number + 1));
            let sb = Superblock { drive: id, size_bytes: disk_bytes, ..Superblock::default() };
            DriveHandle::online(env.clone(), format!("disk{number}"), drive.clone(), sb)
        };
        let handles: Vec<_> = (0..).zip(&drives).map(handle).collect();
        let len = superblock::slices_end(disk_bytes) - SLICE_AT;
        let slices: Vec<_> = handles.iter().map(|handle| Slice::new(handle.clone(), SLICE_AT, len)).collect();
        let (strip_blocks, log_bytes, segment_bytes) = (STRIPE as u32 / 2, 2 << 20, 128 << 10);
        let spec =
            CreateSpec { strip_blocks, log_bytes, segment_bytes, ..CreateSpec::new("test", 2, 1).unwrap() };
        let descriptor = create(&env, &spec, &slices).await.unwrap();
        let members = slices.into_iter().map(Some).collect();
        let (claims, roster) =
            (Rc::<MemoryOwnership>::default(), Roster::with_table_memory(&env, table_memory));
        let array = open(&env, descriptor, members, claims, &roster, Lacking::Refuse).await.unwrap();
        let volume = Volume::whole(&array);
        assert_eq!(volume.stripe_blocks(), STRIPE);
        let kv = MemKv::new(1 << 24);
        kv.wait_after_reads();
        Self { env, volume, kv, gate: Rc::default(), disks, drives }
    }

    /// Stripes of the volume.
    pub(crate) fn stripes(&self) -> u64 {
        self.volume.blocks() / STRIPE
    }

    /// The volume without loans.
    pub(crate) fn volumes(&self) -> Rc<Volumes> {
        Volumes::new(self.volume.clone())
    }

    pub(crate) fn allocator(&self) -> Rc<Allocator> {
        let (kv, space): (Rc<dyn Kv>, _) = (self.kv.clone(), Space::new(self.volume.blocks(), STRIPE));
        Allocator::new(&self.env, &self.volumes(), &kv, space, CHUNK)
    }

    /// Opens the target on what the store has.
    pub(crate) async fn target(&self) -> Rc<Target> {
        self.target_of(TargetId(0)).await
    }

    /// The same with a number.
    pub(crate) async fn target_of(&self, id: TargetId) -> Rc<Target> {
        self.target_over(id, self.kv.clone()).await
    }

    /// The same over another store.
    pub(crate) async fn target_over(&self, id: TargetId, kv: Rc<dyn Kv>) -> Rc<Target> {
        let config =
            TargetConfig { id, chunk_blocks: CHUNK, generation: GENERATION, memory: TargetMemory::default() };
        Target::open(&self.env, self.volume.clone(), kv, self.gate.clone(), config).await.unwrap()
    }

    /// Puts a map row by hand, and counts the blocks of all files again.
    pub(crate) async fn put_map(&self, key: ChunkKey, extents: &[Extent]) {
        self.put_row(key.row(Birth::FIRST), map_row(extents)).await;
        let mut blocks: BTreeMap<FileId, u64> = BTreeMap::new();
        for (key, value) in self.kv.rows() {
            let Ok((chunk, row)) = read_row(&key, &value) else { continue };
            let valid =
                |extent| u64::from(Groups::new(self.volume.blocks(), STRIPE).valid_part(extent, CHUNK).count);
            *blocks.entry(chunk.file).or_default() += row.extents.iter().map(valid).sum::<u64>();
        }
        for (file, blocks) in blocks.iter().filter(|(_, blocks)| **blocks > 0) {
            let row = FileRow { truncations: 0, blocks: *blocks, owner: OWNER, owner_number: 0 };
            self.put_row(FileRow::key(*file, Birth::FIRST), row.encode()).await;
        }
        let all = blocks.values().sum::<u64>();
        if all > 0 {
            self.put_row(OWNER.account(Branch::MAIN), encode_account(all)).await;
        }
    }

    pub(crate) async fn put_row(&self, key: Vec<u8>, value: Vec<u8>) {
        let mut writes = WriteSet::new();
        writes.put(key, value);
        self.kv.commit_durable(writes).await.unwrap();
    }

    /// Marks exactly these blocks as used in the rows of the allocation groups, and counts them.
    pub(crate) async fn put_marks(&self, used: &[std::ops::Range<u64>]) {
        let groups = Groups::new(self.volume.blocks(), STRIPE);
        let mut marks = Bitmap::new(groups);
        used.iter().cloned().flatten().for_each(|block| marks.set(block, true));
        for group in 0..groups.count() {
            self.put_row(group_key(group), encode_group(marks.group(group))).await;
        }
        let counts: Vec<_> = (0..groups.count()).map(|group| marks.counts(group)).collect();
        self.put_row(counts_key(0), encode_counts(&counts)).await;
    }

    /// Writes a full stripe, each block filled with one byte.
    pub(crate) async fn write_stripe(&self, stripe: u64, fill: u8) {
        let (data, crcs) = blocks_of(&[fill; STRIPE as usize]);
        let io = penstock_drive::Io::new(penstock_drive::Class::Client, "test.fresh");
        self.volume.write_fresh(stripe, &data, &crcs, io).await.unwrap();
        self.volume.flush().await.unwrap();
    }

    /// Makes reads of these blocks of the array's volume fail, whichever strips they are made from: until
    /// [`Self::set_readable`], or until they are written.
    pub(crate) async fn set_unreadable(&self, blocks: std::ops::Range<u64>) {
        let array = self.volume.array();
        for block in blocks {
            let places = array.places(Stripe(block / STRIPE)).await.unwrap();
            for place in places {
                let column = (block % (STRIPE / 2)) * BLOCK_BYTES as u64;
                let at = SLICE_AT + array.geometry().block_at(place.row, 0) + column;
                self.drives[place.member.index()].set_unreadable(at..at + BLOCK_BYTES as u64);
            }
        }
    }

    /// Makes reads of the copies of a page of the stripe table fail.
    pub(crate) fn set_page_unreadable(&self, page: u64) {
        let geometry = self.volume.array().geometry();
        for place in 0..2 {
            let at = SLICE_AT + geometry.page_at(page, place);
            self.drives.iter().for_each(|drive| drive.set_unreadable(at..at + BLOCK_BYTES as u64));
        }
    }

    /// Ends all that cannot be read.
    pub(crate) fn set_readable(&self) {
        self.drives.iter().for_each(|drive| drive.set_readable());
    }

    /// Overwrites every copy of a block of this fill on the drives.
    pub(crate) fn corrupt(&self, fill: u8) {
        for disk in &self.disks {
            let has_it = |block: &u64| disk.peek(*block).iter().all(|byte| *byte == fill);
            let found: Vec<u64> = disk.used_blocks().into_iter().filter(has_it).collect();
            found.into_iter().for_each(|block| disk.corrupt(block, &[fill ^ 0xff; BLOCK_BYTES]));
        }
    }
}

/// Writes blocks of a chunk, each filled with one byte.
pub(crate) async fn write(target: &Target, key: ChunkKey, first: u32, fills: &[u8]) {
    let (data, crcs) = blocks_of(fills);
    target.write(key, first, &data, &crcs, known(u64::MAX - 1), CLIENT).await.unwrap();
}

/// The fill of each block of a chunk. Panics if a block has other bytes or a wrong checksum.
pub(crate) async fn fills(target: &Target, key: ChunkKey) -> Vec<u8> {
    let blocks = target.read(key, 0, CHUNK, CLIENT).await.unwrap();
    let bytes = blocks.gather();
    assert_eq!(crc32c_blocks(&bytes), blocks.crcs, "a read returns the checksums of its data");
    let fill = |block: &[u8]| {
        assert!(block.iter().all(|byte| *byte == block[0]), "a block has one fill");
        block[0]
    };
    bytes.chunks_exact(BLOCK_BYTES).map(fill).collect()
}

/// Commits everything. Panics unless a check finds nothing, and exactly the blocks of files count as used in
/// memory.
pub(crate) async fn assert_clean(bench: &Bench, target: &Target) {
    target.commit_all().await.unwrap();
    let quiet: Quiet<'_> = bench.gate.quiesce().await;
    let check = target.fsck(&quiet).check().await.unwrap();
    assert!(check.findings.is_clean(), "{:?}", check.findings.kept);
    let used_blocks = bench.volume.blocks() - target.usage().free_blocks;
    assert_eq!(used_blocks, check.blocks, "every used block belongs to a file");
    let files: Vec<FileId> = check.owners.keys().copied().map(FileId::main).collect();
    let held: Vec<u64> = check.owners.values().map(|owned| owned.held).collect();
    assert_eq!(target.held_blocks(&files).await.unwrap(), held, "files hold what their maps name");
}
