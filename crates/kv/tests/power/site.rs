//! Three simulated drives with a mirrored array, which survive power cuts.

use penstock_array::format::descriptor::Descriptor;
use penstock_array::ownership::MemoryOwnership;
use penstock_array::{CreateSpec, FoundLabel, Lacking, Roster, Volume, create, open, read_label};
use penstock_base::{DriveId, Id128};
use penstock_drive::superblock::{self, SliceEntry, Superblock};
use penstock_drive::{DriveHandle, Slice};
use penstock_sim::{CutMode, SimDisk, SimDrive, World};
use std::collections::BTreeMap;
use std::rc::Rc;

const DISK_BYTES: u64 = 12 << 20;
const SLICE_AT: u64 = 1 << 20;

/// The parts of a test that survive a power cut: the media of the drives, and the claims.
pub struct Site {
    disk_bytes: u64,
    disks: Vec<Rc<SimDisk>>,
    ownership: Rc<MemoryOwnership>,
}

fn slice_of(handle: &Rc<DriveHandle>, bytes: u64) -> Slice {
    Slice::new(handle.clone(), SLICE_AT, superblock::slices_end(bytes) - SLICE_AT)
}

impl Site {
    /// Changes a bit of every copy of these blocks on the drives. Returns the number of copies.
    pub fn damage(&self, which: impl Fn(&[u8]) -> bool) -> usize {
        let mut damaged = 0;
        for disk in &self.disks {
            for block in disk.used_blocks() {
                let mut bytes = disk.peek(block).to_vec();
                if which(&bytes) {
                    bytes[100] ^= 1;
                    disk.corrupt(block, &bytes);
                    damaged += 1;
                }
            }
        }
        damaged
    }

    pub fn new() -> Self {
        Self::of(DISK_BYTES)
    }

    /// A mirrored array on three new drives of this size in bytes.
    pub fn of(disk_bytes: u64) -> Self {
        let m = 2;
        let (strip_blocks, log_bytes, segment_bytes) = (8, 3 << 20, 128 << 10);
        let spec =
            CreateSpec { strip_blocks, log_bytes, segment_bytes, ..CreateSpec::new("meta", 1, m).unwrap() };
        let world = World::new(1);
        let env = world.env();
        let disks: Vec<_> = (0..=m).map(|_| SimDisk::new(disk_bytes)).collect();
        let made = world.run(async {
            let handle = |(number, disk): (usize, &Rc<SimDisk>)| {
                let drive = DriveId(Id128::from_words(7, number as u64 + 1));
                let sb = Superblock { drive, size_bytes: disk_bytes, ..Default::default() };
                DriveHandle::online(env.clone(), "disk".into(), SimDrive::new(&world, disk.clone()), sb)
            };
            let handles: Vec<_> = disks.iter().enumerate().map(handle).collect();
            let slices: Vec<Slice> = handles.iter().map(|handle| slice_of(handle, disk_bytes)).collect();
            let descriptor = create(&env, &spec, &slices).await.unwrap();
            for (position, (handle, slice)) in handles.iter().zip(&slices).enumerate() {
                let (offset, len) = (slice.offset(), slice.len());
                let row =
                    SliceEntry { array: descriptor.array, member: position as u16, extent: 0, offset, len };
                handle.put_slices(&[row]).await.unwrap();
            }
        });
        made.unwrap();
        world.destroy();
        Self { disks, disk_bytes, ownership: Rc::default() }
    }

    /// Opens the array without the drives in `lost`.
    pub async fn open(&self, world: &World, lost: &[usize]) -> Volume {
        let env = world.env();
        let mut handles: BTreeMap<DriveId, Rc<DriveHandle>> = BTreeMap::new();
        let mut found = Vec::new();
        for (number, disk) in self.disks.iter().enumerate().filter(|(number, _)| !lost.contains(number)) {
            let drive = SimDrive::new(world, disk.clone());
            let Ok(superblock) = superblock::read(&*drive).await else { continue };
            let (id, array) = (superblock.drive, superblock.slices[0].array);
            let handle = DriveHandle::online(env.clone(), format!("disk{number}"), drive, superblock);
            if let Ok(FoundLabel::Label(label)) = read_label(&slice_of(&handle, self.disk_bytes), array).await
            {
                found.push(label.descriptor().unwrap());
            }
            handles.insert(id, handle);
        }
        let descriptor = Descriptor::newest(found).unwrap();
        let members = descriptor
            .members
            .iter()
            .map(|member| handles.get(&member.drive).map(|handle| slice_of(handle, self.disk_bytes)));
        let members = members.collect();
        let roster = Roster::new(&env);
        let ownership = self.ownership.clone();
        let array = open(&env, descriptor, members, ownership, &roster, Lacking::Refuse).await.unwrap();
        Volume::whole(&array)
    }

    pub fn cut(&self, world: &World) {
        world.destroy();
        self.disks.iter().for_each(|disk| disk.cut(world, CutMode::draw(world)));
    }
}
