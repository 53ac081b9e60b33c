//! Parts of the array benchmarks: drives that are no real ones, a new array on them, and data for it.

use penstock_array::ownership::MemoryOwnership;
use penstock_array::{Array, ArrayError, CreateSpec, Lacking, Roster, Volume, create, open};
use penstock_base::{BLOCK_BYTES, Buf, BufMut, DriveId, Env, Id128, crc32c_blocks};
use penstock_drive::superblock::Superblock;
use penstock_drive::{Drive, DriveHandle, Slice};
use std::rc::Rc;

/// Offset of the slice of an array on a drive.
pub(crate) const SLICE_AT: u64 = 1 << 20;

/// A drive that is online.
pub(crate) fn online(env: &Env, kind: &str, number: u64, drive: Rc<dyn Drive>) -> Rc<DriveHandle> {
    let id = DriveId(Id128::from_words(1, number + 1));
    let superblock = Superblock { drive: id, size_bytes: drive.size_bytes(), ..Superblock::default() };
    DriveHandle::online(env.clone(), format!("{kind} {number}"), drive, superblock)
}

/// A new array, opened.
pub(crate) async fn new_array(
    env: &Env,
    spec: &CreateSpec,
    slices: Vec<Slice>,
) -> Result<Rc<Array>, ArrayError> {
    let descriptor = create(env, spec, &slices).await?;
    let members = slices.into_iter().map(Some).collect();
    let ownership = Rc::new(MemoryOwnership::default());
    open(env, descriptor, members, ownership, &Roster::new(env), Lacking::Refuse).await
}

/// Data of a whole stripe, with the CRC32C of each block.
pub(crate) fn stripe_data(volume: &Volume) -> (Buf, Vec<u32>) {
    let mut data = BufMut::zeroed(volume.stripe_blocks() as usize * BLOCK_BYTES);
    for (index, word) in data.as_mut().chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    let data = data.freeze();
    let crcs = crc32c_blocks(&data);
    (data, crcs)
}
