//! Layout of a store over its drives, and making a store.
//!
//! drive = superblock | metadata slice (the first 1+m drives) | data slice | superblock
//!
//! Arrays with their labels are written first and superblocks last, so a power cut while a store is made
//! leaves drives without superblocks, which are never taken for a store.

use crate::backing::{Backing, Found, read_superblock};
use crate::error::StartError;
use crate::holding::Holding;
use penstock_array::format::descriptor::Role;
use penstock_array::{ArrayError, CreateSpec, Geometry, MAX_PARITY, create};
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
    /// A store on drives of `drive_bytes` each, with the code k+m. Refused if the code or the drive size is
    /// out of bounds.
    pub fn new(k: usize, m: usize, drive_bytes: u64) -> Result<Self, StartError> {
        if k == 0 || k + m > 64 || m > MAX_PARITY {
            return Err(StartError::Refused(format!(
                "code {k}+{m}: 1 to 64 strips, at most {MAX_PARITY} of them redundancy"
            )));
        }
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
        let array = |name: &str, role, k, strip_blocks| {
            Ok::<_, ArrayError>(CreateSpec {
                // The pool is drawn when the store is made.
                role,
                strip_blocks,
                log_bytes: (drive_bytes / 16).clamp(16 << 20, 64 << 20) / (1 << 20) * (1 << 20),
                segment_bytes: 0,
                ..CreateSpec::new(name, k, m)?
            })
        };
        let meta_slice_bytes = (drive_bytes / 8).max(96 << 20) / SLICE_ALIGN_BYTES * SLICE_ALIGN_BYTES;
        let mut spec = Self {
            data: array("data", Role::Data, k, strip_blocks)?,
            meta: array("meta", Role::Metadata, 1, STRIP_BLOCKS)?,
            drive_bytes,
            meta_slice_bytes,
        };
        let slices = [spec.meta_slice(), spec.data_slice()].map(|slice| slice.end - slice.start);
        for (array, slice_bytes) in [&mut spec.meta, &mut spec.data].into_iter().zip(slices) {
            fit_log(array, slice_bytes)?;
        }
        Ok(spec)
    }

    /// Number of drives.
    pub fn drives(&self) -> usize {
        self.data.k + self.data.m
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
            "code {}+{} takes {} drives and {} are given",
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
    let meta_members = spec.meta.k + spec.meta.m;
    // The first members of an array carry its log. The members of the data array begin behind those of
    // `meta`, so that the same drives do not carry both logs if there are enough.
    let meta_drives: Vec<usize> = (0..meta_members).collect();
    let data_drives: Vec<usize> = (0..handles.len()).map(|at| (at + meta_members) % handles.len()).collect();
    let mut tables: Vec<Vec<SliceEntry>> = vec![Vec::new(); handles.len()];
    for (array_spec, drives, range) in
        [(&spec.meta, &meta_drives, spec.meta_slice()), (&spec.data, &data_drives, spec.data_slice())]
    {
        let array_spec = CreateSpec { pool, ..array_spec.clone() };
        let slices: Vec<Slice> = drives.iter().map(|drive| cut(&handles[*drive], &range)).collect();
        let geometry = Geometry::fit(&array_spec, slices[0].len())?;
        for slice in &slices {
            allocate(backing, slice.drive().path(), &geometry, slice.offset(), slice.len())
                .map_err(StartError::Refused)?;
        }
        let descriptor = create(env, &array_spec, &slices).await?;
        for (position, (drive, slice)) in drives.iter().zip(&slices).enumerate() {
            tables[*drive].push(SliceEntry {
                array: descriptor.array,
                member: to_u16(position),
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

    /// Regression: with more than five strips of parity no store could be made, although up to eight are
    /// supported.
    #[test]
    fn a_store_of_every_code_can_be_made() {
        for drive_bytes in [MIN_DRIVE_BYTES, 1 << 30, 1 << 40] {
            for (k, m) in (0..=MAX_PARITY).flat_map(|m| (1..=64 - m).map(move |k| (k, m))) {
                let spec = StoreSpec::new(k, m, drive_bytes);
                let mib = drive_bytes >> 20;
                spec.unwrap_or_else(|error| panic!("{k}+{m} on drives of {mib} MiB: {error}"));
            }
        }
    }
}
