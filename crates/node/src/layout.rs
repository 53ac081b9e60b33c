//! Layout of a store over its drives, and making a store.
//!
//! drive = superblock | metadata slice, data slice of stack 0 | those of stack 1 | ... | superblock
//!
//! Each stack has a metadata array and a data array on the drives. The carriers of their logs begin at
//! another drive for each array, so that flushes are spread over all drives.
//!
//! Arrays with their labels are written first and superblocks last, so a power cut while a store is made
//! leaves drives without superblocks, which are never taken for a store.

use crate::backing::{ANSWER, Backing, Found, check_blank, read_superblock};
use crate::error::StartError;
use crate::holding::Holding;
use crate::plan::Plan;
use crate::report::PlanReport;
use penstock_array::format::descriptor::Role;
use penstock_array::{ArrayError, CreateSpec, Geometry, create};
use penstock_base::env::random_id;
use penstock_base::num::{to_u16, to_u32};
use penstock_base::{BLOCK_BYTES, DriveId, Env, Features, MOST_STACKS, PoolId, StackNo, StoreId};
use penstock_drive::superblock::{self, SLICE_ALIGN_BYTES, SliceEntry, Superblock, SuperblockError};
use penstock_drive::{Drive, DriveHandle, Slice};
use std::ops::Range;
use std::rc::Rc;

/// Smallest drive in bytes: two logs, their tables and some stripes must fit.
pub const MIN_DRIVE_BYTES: u64 = 256 << 20;
/// Most data blocks in a strip, unless asked for.
const STRIP_BLOCKS: u32 = 64;
/// The same of codes with more than eight data strips. With fewer blocks trailers would take much of the
/// space, and with more a stripe would have many MiB.
const LONG_STRIP_BLOCKS: u32 = 32;
/// Least bytes of a metadata slice.
const LEAST_META_BYTES: u64 = 96 << 20;
/// Data blocks in a stripe (1 MiB), if the bounds on strips allow it.
const STRIPE_BLOCKS: usize = 256;

/// Most data bytes of a strip.
const MOST_STRIP_BYTES: u64 = 1 << 20;

/// Segments of a log, or more if the code needs more.
const SEGMENTS: u64 = 32;

/// Least bytes of a drive that each stack gets, unless asked for more stacks.
const STACK_BYTES: u64 = 2 << 30;

/// The stacks of a store if nothing is said of them: one for each core that it may use, as far as each has
/// 2 GiB of a drive, and a power of two, so that they can be moved between cores evenly.
pub fn default_stacks(cores: usize, drive_bytes: u64) -> u16 {
    let most = (cores as u64).min(MOST_STACKS.into()).min(drive_bytes / STACK_BYTES).max(1);
    to_u16(1_u64 << most.ilog2())
}

/// Parameters of a store to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSpec {
    /// Parameters of the data array of the first stack.
    pub data: CreateSpec,
    /// Parameters of the metadata array of the first stack.
    pub meta: CreateSpec,
    /// Size of each drive in bytes.
    pub drive_bytes: u64,
    /// Size of a metadata slice in bytes, but for the first stack.
    pub meta_slice_bytes: u64,
    /// That of the first stack, which has all names.
    pub names_slice_bytes: u64,
    /// Number of stacks.
    pub stacks: u16,
}

/// An array of a store to be made.
struct NewArray {
    spec: CreateSpec,
    /// The bytes of each drive that it gets.
    slice: Range<u64>,
}

impl StoreSpec {
    /// A store of this plan on drives of `drive_bytes` each, with strips of a suitable size. Refused if the
    /// drives are too small.
    pub fn new(plan: &Plan, drive_bytes: u64) -> Result<Self, StartError> {
        Self::with_stacks(plan, drive_bytes, None, 1)
    }

    /// The same with strips of so many bytes of data in data arrays, if given, and with so many stacks.
    pub fn with_stacks(
        plan: &Plan,
        drive_bytes: u64,
        strip_bytes: Option<u64>,
        stacks: u16,
    ) -> Result<Self, StartError> {
        let (k, m) = plan.code();
        let block = BLOCK_BYTES as u64;
        if let Some(bytes) = strip_bytes
            && !(bytes.is_power_of_two() && (block..=MOST_STRIP_BYTES).contains(&bytes))
        {
            return Err(StartError::Refused(format!(
                "a strip has 4 KiB to 1 MiB of data, and that is a power of two, not {bytes} bytes"
            )));
        }
        if !(1..=MOST_STACKS).contains(&stacks) {
            return Err(StartError::Refused(format!("a store has 1 to {MOST_STACKS} targets, not {stacks}")));
        }
        let least = MIN_DRIVE_BYTES * u64::from(stacks);
        if drive_bytes < least {
            return Err(StartError::Refused(format!(
                "drives of {drive_bytes} bytes are too small: a store of {stacks} targets needs {} MiB each",
                least >> 20
            )));
        }
        // The part of a drive that a stack has.
        let part_bytes = drive_bytes / u64::from(stacks);
        let strip_blocks = match STRIPE_BLOCKS.is_multiple_of(k) {
            true => to_u32(STRIPE_BLOCKS / k).clamp(LONG_STRIP_BLOCKS, STRIP_BLOCKS),
            false if k < STRIPE_BLOCKS / LONG_STRIP_BLOCKS as usize => STRIP_BLOCKS,
            false => LONG_STRIP_BLOCKS,
        };
        let strip_blocks = strip_bytes.map_or(strip_blocks, |bytes| to_u32(bytes / block));
        let log_bytes = (part_bytes / 16).clamp(16 << 20, 64 << 20) / (1 << 20) * (1 << 20);
        let array = |name: &str, role, plan: &Plan, strip_blocks, first_carrier| {
            let (k, m) = plan.code();
            let layout = plan.layout()?;
            // The pool is drawn when the store is made.
            let spec = CreateSpec { layout, ..CreateSpec::new(name, k, m)? };
            Ok::<_, ArrayError>(CreateSpec {
                role,
                strip_blocks,
                log_bytes,
                segment_bytes: 0,
                first_carrier,
                ..spec
            })
        };
        // All drives together have as much as an eighth of each of 1+m drives: one half for the maps of all
        // stacks, and one for the names.
        let share = part_bytes / 8 * (1 + m) as u64 / plan.drives() as u64;
        let slice =
            |halves: u64| (share * halves / 2).max(LEAST_META_BYTES) / SLICE_ALIGN_BYTES * SLICE_ALIGN_BYTES;
        let (meta_slice_bytes, names_slice_bytes) = (slice(1), slice(1 + u64::from(stacks)));
        // Two arrays carry their logs on different drives if there are enough.
        let (first_of_data, meta) = ((1 + m) % plan.drives(), plan.metadata());
        let mut spec = Self {
            data: array("data", Role::Data, plan, strip_blocks, first_of_data)?,
            meta: array("meta", Role::Metadata, &meta, STRIP_BLOCKS, 0)?,
            drive_bytes,
            meta_slice_bytes,
            names_slice_bytes,
            stacks,
        };
        let least_meta = if stacks == 1 { names_slice_bytes } else { meta_slice_bytes };
        assert!(least_meta < part_bytes && meta_slice_bytes <= names_slice_bytes, "{spec:?}");
        spec.meta.log_bytes = log_bytes.min(least_meta / 4 / (1 << 20) * (1 << 20));
        let slices = [least_meta, spec.data_slice_bytes()];
        for (array, slice_bytes) in [&mut spec.meta, &mut spec.data].into_iter().zip(slices) {
            fit_log(array, slice_bytes)?;
        }
        Ok(spec)
    }

    /// Bytes of data that fit into the data arrays.
    pub fn data_bytes(&self) -> Result<u64, StartError> {
        let geometry = Geometry::fit(&self.data, self.data_slice_bytes())?;
        let bytes = geometry.stripes * u64::from(geometry.stripe_blocks()) * BLOCK_BYTES as u64;
        Ok(bytes * u64::from(self.stacks))
    }

    /// The store in figures, as it would be made by this plan. A rebuild may read and write each drive at
    /// these rates, in bytes per second.
    pub fn report(&self, plan: &Plan, read_rate: u64, write_rate: u64) -> Result<PlanReport, StartError> {
        let (usable_bytes, drives) = (self.data_bytes()?, plan.drives() as u64);
        let raw_bytes = drives * self.drive_bytes;
        let stripe_bytes = u64::from(self.data.strip_blocks) * (self.data.k * BLOCK_BYTES) as u64;
        let full = (self.data_slice_bytes() * u64::from(self.stacks)) as f64;
        Ok(PlanReport {
            drives,
            drive_bytes: self.drive_bytes,
            code: format!("{}+{}", self.data.k, self.data.m),
            plan: plan.describe(),
            targets: self.stacks.into(),
            strip_bytes: stripe_bytes / self.data.k as u64,
            stripe_bytes,
            raw_bytes,
            usable_bytes,
            usable_percent: 100.0 * usable_bytes as f64 / raw_bytes as f64,
            overhead: raw_bytes as f64 / usable_bytes as f64,
            survives: plan.survives(),
            read_rate,
            write_rate,
            rebuild_seconds: plan.rebuild_seconds(full, read_rate as f64, write_rate as f64),
        })
    }

    /// Number of drives.
    pub fn drives(&self) -> usize {
        self.data.layout.members()
    }

    /// Bytes of a data slice, which all stacks have alike.
    fn data_slice_bytes(&self) -> u64 {
        let stacks = u64::from(self.stacks);
        let of_metadata = self.names_slice_bytes + (stacks - 1) * self.meta_slice_bytes;
        let bytes = superblock::slices_end(self.drive_bytes) - SLICE_ALIGN_BYTES - of_metadata;
        bytes / stacks / SLICE_ALIGN_BYTES * SLICE_ALIGN_BYTES
    }

    /// The arrays of a stack, that of the metadata first.
    fn arrays_of(&self, stack: StackNo) -> [NewArray; 2] {
        assert!(stack.0 < self.stacks, "a store of {} stacks has no stack {stack}", self.stacks);
        let (of_data, number) = (self.data_slice_bytes(), u64::from(stack.0));
        let (begin, of_meta) = match number.checked_sub(1) {
            None => (SLICE_ALIGN_BYTES, self.names_slice_bytes),
            Some(before) => {
                let first = SLICE_ALIGN_BYTES + self.names_slice_bytes + of_data;
                (first + before * (self.meta_slice_bytes + of_data), self.meta_slice_bytes)
            }
        };
        let (data_at, end) = (begin + of_meta, begin + of_meta + of_data);
        assert!(end <= superblock::slices_end(self.drive_bytes), "{begin}..{end} of {self:?}");
        [(&self.meta, begin..data_at), (&self.data, data_at..end)].map(|(spec, slice)| {
            let (members, turn) = (spec.layout.members(), usize::from(stack.0) * (1 + spec.m));
            let name = match self.stacks {
                1 => spec.name.clone(),
                _ => format!("{}.{stack}", spec.name),
            };
            let first_carrier = (spec.first_carrier + turn) % members;
            NewArray { spec: CreateSpec { stack, name, first_carrier, ..spec.clone() }, slice }
        })
    }
}

/// Divides the log into segments. On small drives a wide code gets a longer log than others, up to a quarter
/// of the slice.
fn fit_log(array: &mut CreateSpec, slice_bytes: u64) -> Result<(), ArrayError> {
    let segments = Geometry::fewest_segments(array).max(SEGMENTS);
    loop {
        array.segment_bytes = to_u32(array.log_bytes / segments) / to_u32(BLOCK_BYTES) * to_u32(BLOCK_BYTES);
        match Geometry::fit(array, slice_bytes) {
            Err(_) if 8 * array.log_bytes <= slice_bytes => array.log_bytes *= 2,
            fitted => return fitted.map(drop),
        }
    }
}

fn cut(drive: &Rc<DriveHandle>, range: &Range<u64>) -> Slice {
    Slice::new(drive.clone(), range.start, range.end - range.start)
}

/// Allocates labels and metadata of a slice on the host.
pub(crate) fn allocate(
    backing: &dyn Backing,
    path: &str,
    geometry: &Geometry,
    offset: u64,
    len: u64,
) -> Result<(), String> {
    let mut ranges = geometry.reserved(len).into_iter();
    ranges.try_for_each(|range| backing.allocate(path, offset + range.start..offset + range.end))
}

/// The drives of a store to be made, in the order of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewDrives {
    /// Files that are made, at paths that nobody else uses. Blank ones of a store whose making was
    /// interrupted are made again.
    Files(Vec<String>),
    /// Block devices and empty files that exist.
    Given(Vec<String>),
}

impl NewDrives {
    /// Their paths.
    pub fn paths(&self) -> &[String] {
        let (Self::Files(paths) | Self::Given(paths)) = self;
        paths
    }
}

/// Refuses drives that are not blank, or not there if they are given, and changes nothing. Returns the drives
/// that the interrupted making of a store left, with their paths.
async fn refuse_used<'a>(
    env: &Env,
    backing: &dyn Backing,
    drives: &'a NewDrives,
    found: &Holding,
) -> Result<Vec<(&'a String, Rc<dyn Drive>)>, StartError> {
    let are_given = matches!(drives, NewDrives::Given(_));
    let mut to_clear = Vec::new();
    for path in drives.paths() {
        let what = backing.look(path).map_err(StartError::Refused)?;
        match what {
            Found::Nothing if are_given => {
                return Err(StartError::Refused(format!("there is nothing at {path}; nothing was changed")));
            }
            Found::Nothing => continue,
            Found::EmptyFile | Found::File | Found::Device => {}
        }
        let drive = backing.open(path).map_err(StartError::Refused)?;
        let read = read_superblock(env, &*drive).await;
        let is_free = match read.ok_or_else(|| format!("{path}: no answer within {ANSWER:?}")) {
            // A file with contents may have some that are not seen at its ends.
            Ok(Err(SuperblockError::Blank))
                if are_given && what == Found::File && *found != Holding::Unfinished =>
            {
                Err(format!("{path} is a file with contents"))
            }
            Ok(Err(SuperblockError::Blank)) => check_blank(env, path, &*drive).await,
            Ok(Err(SuperblockError::Shrunk { found: 0, .. })) => Ok(()),
            Ok(Ok(_)) if *found == Holding::Unfinished => {
                to_clear.push((path, drive.clone()));
                Ok(())
            }
            Ok(Ok(known)) => Err(format!("{path} is drive {} of store {}", known.drive, known.store)),
            Ok(Err(error)) => Err(format!("{path}: {error}")),
            Err(why) => Err(why),
        };
        if let Err(why) = is_free {
            let advice = match what {
                Found::Device => "write zeros over the first and the last 2 MiB of the device",
                _ => "remove the file; `truncate --size SIZE FILE` makes an empty one",
            };
            return Err(StartError::Refused(format!(
                "{why}; nothing was changed. If nobody wants what is there, {advice}"
            )));
        }
    }
    Ok(to_clear)
}

/// Refuses drives that a store cannot be made on, as [`create_store`] would, and changes nothing.
pub async fn check_new_drives(
    env: &Env,
    backing: &dyn Backing,
    drives: &NewDrives,
) -> Result<(), StartError> {
    refuse_used(env, backing, drives, &Holding::Nothing).await.map(drop)
}

/// Makes a store on drives where nothing exists or the drives are blank. Returns its identifier. If `found`
/// says that the making of a store was interrupted, its drives are made again.
pub async fn create_store(
    env: &Env,
    backing: &dyn Backing,
    spec: &StoreSpec,
    drives: &NewDrives,
    found: &Holding,
) -> Result<StoreId, StartError> {
    match found {
        Holding::Nothing | Holding::Unfinished => {}
        Holding::Store => return Err(StartError::Refused("there is a store already".into())),
        Holding::Other(why) => {
            return Err(StartError::Refused(format!(
                "a store is not made over files that are there already: {why}\nmove them away, or name another folder"
            )));
        }
    }
    let (store, pool) = (StoreId(random_id(env)), PoolId(random_id(env)));
    let paths = drives.paths();
    let are_given = matches!(drives, NewDrives::Given(_));
    if paths.len() != spec.drives() {
        return Err(StartError::Refused(format!(
            "code {}+{} is to lie on {} drives and {} are given",
            spec.data.k,
            spec.data.m,
            spec.drives(),
            paths.len()
        )));
    }
    let to_clear = refuse_used(env, backing, drives, found).await?;
    for (path, drive) in to_clear {
        // If this is cut as well, the drive is not taken for one of the store that is made now.
        superblock::clear(&*drive).await.map_err(|error| StartError::Refused(format!("{path}: {error}")))?;
    }
    let mut handles = Vec::new();
    for path in paths {
        if !are_given {
            backing.create(path, spec.drive_bytes).map_err(StartError::Refused)?;
        }
        let drive = backing.open(path).map_err(StartError::Refused)?;
        let superblock = Superblock {
            store,
            drive: DriveId(random_id(env)),
            pool,
            size_bytes: drive.size_bytes(),
            created_ns: env.wall_ns(),
            stacks: spec.stacks,
            features: Features::of_stacks(spec.stacks > 1),
            ..Superblock::default()
        };
        handles.push(DriveHandle::online(env.clone(), path.clone(), drive, superblock));
    }
    let mut tables: Vec<Vec<SliceEntry>> = vec![Vec::new(); handles.len()];
    let arrays = (0..spec.stacks).flat_map(|stack| spec.arrays_of(StackNo(stack)));
    for NewArray { spec: array_spec, slice: range } in arrays {
        let array_spec = CreateSpec { pool, ..array_spec };
        let members = handles.iter().take(array_spec.layout.members());
        let slices: Vec<Slice> = members.map(|drive| cut(drive, &range)).collect();
        let geometry = Geometry::fit(&array_spec, slices[0].len())?;
        for slice in &slices {
            allocate(backing, slice.drive().path(), &geometry, slice.offset(), slice.len())
                .map_err(StartError::Refused)?;
        }
        let descriptor = create(env, &array_spec, &slices).await?;
        for (member, slice) in slices.iter().enumerate() {
            tables[member].push(SliceEntry {
                array: descriptor.array,
                member: to_u16(member),
                extent: 0,
                offset: slice.offset(),
                len: slice.len(),
            });
        }
    }
    assert!(tables.iter().all(|table| !table.is_empty()), "each drive has a slice of the data array");
    for (drive, table) in handles.iter().zip(tables) {
        drive.put_slices(&table).await.map_err(|error| StartError::Refused(error.to_string()))?;
    }
    Ok(store)
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_array::MAX_PARITY;

    /// Regression: with more than five strips of parity no store could be made, although up to eight are
    /// supported.
    #[test]
    fn a_store_of_every_code_can_be_made() {
        let codes = (0..=MAX_PARITY).flat_map(|m| (1..=64 - m).map(move |k| (k, m)));
        for (k, m) in codes {
            let plan = Plan::of_code(k + m, k, m).unwrap();
            // The search for layouts takes longest.
            let sizes: &[u64] =
                if k % 9 == 1 { &[MIN_DRIVE_BYTES, 1 << 30, 1 << 40] } else { &[MIN_DRIVE_BYTES] };
            for drive_bytes in sizes {
                let spec = StoreSpec::new(&plan, *drive_bytes);
                let mib = drive_bytes >> 20;
                spec.unwrap_or_else(|error| panic!("{k}+{m} on drives of {mib} MiB: {error}"));
            }
        }
    }

    #[test]
    fn a_store_has_a_stack_for_each_core_as_far_as_its_drives_have_room() {
        const GIB: u64 = 1 << 30;
        for (cores, drive_bytes, stacks) in [
            (1, 1 << 40, 1),
            (2, 4 * GIB, 2),
            (2, 4 * GIB - 1, 1),
            (7, 1 << 40, 4),
            (64, 16 * GIB, 8),
            (64, 1 << 40, 64),
            (256, 16 << 40, 64),
            (64, MIN_DRIVE_BYTES, 1),
        ] {
            assert_eq!(default_stacks(cores, drive_bytes), stacks, "{cores} cores, {drive_bytes} bytes");
        }
        // Half of the metadata is for the names, however many stacks there are, and slices follow each other.
        let spec =
            |stacks| StoreSpec::with_stacks(&Plan::of_code(6, 4, 2).unwrap(), 1 << 40, None, stacks).unwrap();
        let one = spec(1);
        for stacks in [2, 8, 64] {
            let spec = spec(stacks);
            let of_names = spec.names_slice_bytes as f64 / one.names_slice_bytes as f64;
            assert!((0.5..0.76).contains(&of_names), "{stacks}: {of_names}");
            let mut at = SLICE_ALIGN_BYTES;
            for NewArray { slice, .. } in (0..stacks).flat_map(|stack| spec.arrays_of(StackNo(stack))) {
                assert_eq!(slice.start, at, "{stacks} stacks");
                at = slice.end;
            }
        }
        // Little of the space is lost by that.
        let bytes = |stacks| {
            let plan = Plan::of_code(6, 4, 2).unwrap();
            StoreSpec::with_stacks(&plan, 4 * GIB, None, stacks).unwrap().data_bytes().unwrap() as f64
        };
        assert!(bytes(2) > 0.97 * bytes(1), "{} of {}", bytes(2), bytes(1));
    }

    #[test]
    fn a_store_has_strips_of_the_size_that_is_asked_for() {
        let plan = Plan::of_code(6, 4, 2).unwrap();
        for kib in [4, 8, 64, 128, 1024] {
            let spec = StoreSpec::with_stacks(&plan, 1 << 40, Some(kib << 10), 1).unwrap();
            assert_eq!(u64::from(spec.data.strip_blocks) * 4, kib);
            let raw = 6u64 << 40;
            let share = spec.data_bytes().unwrap() as f64 / raw as f64;
            // A trailer block for each strip, and the rest of a drive for metadata.
            let expected = 4.0 / 6.0 * (kib as f64 / (kib as f64 + 4.0));
            assert!((0.8..1.0).contains(&(share / expected)), "{kib} KiB: {share} of {expected}");
        }
        for bytes in [0, 512, 4095, 4097, 12 << 10, 2 << 20, u64::MAX] {
            assert!(StoreSpec::with_stacks(&plan, 1 << 40, Some(bytes), 1).is_err(), "{bytes}");
        }
    }

    #[test]
    fn a_store_of_many_drives_can_be_made() {
        for drives in [1, 2, 3, 5, 12, 24, 40] {
            let plan = Plan::for_drives(drives).unwrap();
            for drive_bytes in [MIN_DRIVE_BYTES, 1 << 43] {
                let spec = StoreSpec::new(&plan, drive_bytes).unwrap();
                assert_eq!((spec.drives(), spec.meta.layout.members()), (drives, drives));
            }
        }
    }
}
