//! Layout of a store over its drives, and making a store.
//!
//! drive = superblock | metadata slice | data slice | superblock
//!
//! Arrays with their labels are written first and superblocks last, so a power cut while a store is made
//! leaves drives without superblocks, which are never taken for a store.

use crate::backing::{Backing, Found, read_superblock};
use crate::error::StartError;
use crate::holding::Holding;
use crate::plan::Plan;
use penstock_array::format::descriptor::Role;
use penstock_array::{ArrayError, CreateSpec, Geometry, create};
use penstock_base::env::random_id;
use penstock_base::num::{to_u16, to_u32};
use penstock_base::{BLOCK_BYTES, DriveId, Env, PoolId, StoreId};
use penstock_drive::superblock::{self, SLICE_ALIGN_BYTES, SliceEntry, Superblock, SuperblockError};
use penstock_drive::{DriveHandle, Slice};
use std::ops::Range;
use std::rc::Rc;

/// Smallest drive in bytes: two logs, their tables and some stripes must fit.
pub const MIN_DRIVE_BYTES: u64 = 256 << 20;
const STRIP_BLOCKS: u32 = 64;
/// Least bytes of a metadata slice.
const LEAST_META_BYTES: u64 = 96 << 20;
/// Data blocks in a stripe (1 MiB), if the bounds on strips allow it.
const STRIPE_BLOCKS: usize = 256;

/// Segments of a log, or more if the code needs more.
const SEGMENTS: u64 = 32;

/// Parameters of a store to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreSpec {
    /// Parameters of the data array.
    pub data: CreateSpec,
    /// Parameters of the metadata array.
    pub meta: CreateSpec,
    /// Size of each drive in bytes.
    pub drive_bytes: u64,
    /// Size of a metadata slice in bytes.
    pub meta_slice_bytes: u64,
}

impl StoreSpec {
    /// A store of this plan on drives of `drive_bytes` each. Refused if they are too small.
    pub fn new(plan: &Plan, drive_bytes: u64) -> Result<Self, StartError> {
        let (k, m) = plan.code();
        if drive_bytes < MIN_DRIVE_BYTES {
            return Err(StartError::Refused(format!(
                "drives of {drive_bytes} bytes are too small: a store needs {} MiB each",
                MIN_DRIVE_BYTES >> 20
            )));
        }
        let strip_blocks = match STRIPE_BLOCKS.is_multiple_of(k) && STRIPE_BLOCKS / k <= 256 {
            true => to_u32((STRIPE_BLOCKS / k).min(STRIP_BLOCKS as usize)),
            false => STRIP_BLOCKS,
        };
        let log_bytes = (drive_bytes / 16).clamp(16 << 20, 64 << 20) / (1 << 20) * (1 << 20);
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
        // All drives together have as much as an eighth of each of 1+m drives.
        let share = drive_bytes / 8 * (1 + m) as u64 / plan.drives() as u64;
        let meta_slice_bytes = share.max(LEAST_META_BYTES) / SLICE_ALIGN_BYTES * SLICE_ALIGN_BYTES;
        // Two arrays carry their logs on different drives if there are enough.
        let (first_of_data, meta) = ((1 + m) % plan.drives(), plan.metadata());
        let mut spec = Self {
            data: array("data", Role::Data, plan, strip_blocks, first_of_data)?,
            meta: array("meta", Role::Metadata, &meta, STRIP_BLOCKS, 0)?,
            drive_bytes,
            meta_slice_bytes,
        };
        assert!(meta_slice_bytes < drive_bytes, "a metadata slice of {meta_slice_bytes} bytes");
        spec.meta.log_bytes = log_bytes.min(meta_slice_bytes / 4 / (1 << 20) * (1 << 20));
        let slices = [spec.meta_slice(), spec.data_slice()].map(|slice| slice.end - slice.start);
        for (array, slice_bytes) in [&mut spec.meta, &mut spec.data].into_iter().zip(slices) {
            fit_log(array, slice_bytes)?;
        }
        Ok(spec)
    }

    /// Number of drives.
    pub fn drives(&self) -> usize {
        self.data.layout.members()
    }

    fn meta_slice(&self) -> Range<u64> {
        SLICE_ALIGN_BYTES..SLICE_ALIGN_BYTES + self.meta_slice_bytes
    }

    fn data_slice(&self) -> Range<u64> {
        self.meta_slice().end..superblock::slices_end(self.drive_bytes)
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

/// Makes a store on drives at `paths`, where nothing exists or the drives are blank. Returns its identifier.
/// If `found` says that the making of a store was interrupted, its drives are made again.
pub async fn create_store(
    env: &Env,
    backing: &dyn Backing,
    spec: &StoreSpec,
    paths: &[String],
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
    if paths.len() != spec.drives() {
        return Err(StartError::Refused(format!(
            "code {}+{} is to lie on {} drives and {} are given",
            spec.data.k,
            spec.data.m,
            spec.drives(),
            paths.len()
        )));
    }
    for path in paths {
        if backing.look(path).map_err(StartError::Refused)? == Found::Nothing {
            continue;
        }
        let drive = backing.open(path).map_err(StartError::Refused)?;
        let is_free = match read_superblock(env, &*drive).await {
            Some(Err(SuperblockError::Blank | SuperblockError::Shrunk { found: 0, .. })) => true,
            Some(Ok(_)) if *found == Holding::Unfinished => {
                // If this is cut as well, the drive is not taken for one of the store that is made now.
                superblock::clear(&*drive)
                    .await
                    .map_err(|error| StartError::Refused(format!("{path}: {error}")))?;
                true
            }
            _ => false,
        };
        if !is_free {
            return Err(StartError::Refused(format!(
                "{path} exists and is not blank, or does not answer; nothing was changed"
            )));
        }
    }
    let mut handles = Vec::new();
    for path in paths {
        backing.create(path, spec.drive_bytes).map_err(StartError::Refused)?;
        let drive = backing.open(path).map_err(StartError::Refused)?;
        let superblock = Superblock {
            store,
            drive: DriveId(random_id(env)),
            pool,
            size_bytes: drive.size_bytes(),
            created_ns: env.wall_ns(),
            ..Superblock::default()
        };
        handles.push(DriveHandle::online(env.clone(), path.clone(), drive, superblock));
    }
    let mut tables: Vec<Vec<SliceEntry>> = vec![Vec::new(); handles.len()];
    for (array_spec, range) in [(&spec.meta, spec.meta_slice()), (&spec.data, spec.data_slice())] {
        let array_spec = CreateSpec { pool, ..array_spec.clone() };
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
