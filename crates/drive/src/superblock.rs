//! The superblock of a drive: its identity and its slice table, in two copies ([`crate::copies`]).
//!
//! Format: docs/format/superblock.md.
//!
//! Invariants: copy 0 lies in the first 64 KiB of the drive and copy 1 in its last 64 KiB. Slices lie between
//! the two and do not overlap. Nothing is written to a drive whose superblock is not understood. What an
//! array's owner changes is not here: it is in the labels of its slices.

use crate::copies::{self, COPY_BYTES, FoundCopies, Holder, Kind, MOST_BODY_BYTES, Sites, TwoCopies};
use crate::{Class, Drive, DriveError, Io};
use penstock_base::num::{to_u16, to_usize};
use penstock_base::{
    ArrayId, Buf, BufMut, Dec, DecodeError, DriveId, Enc, Features, MOST_STACKS, PoolId, StoreId,
};

/// Slices start on a multiple of this many bytes.
pub const SLICE_ALIGN_BYTES: u64 = 1024 * 1024;
/// Version of the format.
pub const FORMAT_VERSION: u32 = 3;
/// Most rows of the slice table.
pub const MOST_SLICES: usize = (MOST_BODY_BYTES - FIXED_BYTES) / ROW_BYTES;

const KIND: Kind = Kind { what: "superblock", magic: b"PENSTOCK", version: FORMAT_VERSION };
/// Bytes of the body before the slice table.
const FIXED_BYTES: usize = 72;
/// Bytes of a row of the slice table.
const ROW_BYTES: usize = 48;
/// Smallest drive in bytes that has space for both copies and a slice between them.
const SMALLEST_BYTES: u64 = 4 * SLICE_ALIGN_BYTES;

/// A row of the slice table: a range of the drive that belongs to an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceEntry {
    /// The array to which the slice belongs.
    pub array: ArrayId,
    /// The position of the slice among the array's members.
    pub member: u16,
    /// The number of the range among those of the member; 0 is the one with the label.
    pub extent: u16,
    /// First byte on the drive, a multiple of [`SLICE_ALIGN_BYTES`].
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl SliceEntry {
    fn overlaps(&self, other: &Self) -> bool {
        self.offset < other.offset + other.len && other.offset < self.offset + self.len
    }
}

/// The contents of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The store that the drive belongs to.
    pub store: StoreId,
    /// The drive's identifier.
    pub drive: DriveId,
    /// The pool that the drive belongs to.
    pub pool: PoolId,
    /// Sequence number, raised with every update.
    pub seq: u64,
    /// Size of the drive in bytes.
    pub size_bytes: u64,
    /// Time when the drive joined the store, in nanoseconds since 1970.
    pub created_ns: i64,
    /// Feature bits: with several stacks those of [`Features::of_stacks`].
    pub features: Features,
    /// Stacks of the store.
    pub stacks: u16,
    /// The slice table.
    pub slices: Vec<SliceEntry>,
}

impl Default for Superblock {
    fn default() -> Self {
        Self {
            store: StoreId::default(),
            drive: DriveId::default(),
            pool: PoolId::default(),
            seq: 0,
            size_bytes: 0,
            created_ns: 0,
            features: Features::default(),
            stacks: 1,
            slices: Vec::new(),
        }
    }
}

/// The reason why a drive's superblock cannot be read or used.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SuperblockError {
    /// Both copies are zeros.
    #[error("the drive is blank")]
    Blank,
    /// Neither copy is a superblock.
    #[error("no Penstock superblock; it holds something else or was damaged in both places")]
    Foreign,
    /// A copy has a version or feature that this release does not know.
    #[error("written by a later release: {0}")]
    Future(DecodeError),
    /// A copy has a version from before the first release.
    #[error(
        "made before the first release, with superblock version {0}: such a store is not read any more; copy its data with the program that made it"
    )]
    Past(u64),
    /// The drive is smaller than when it joined the store, or too small for a superblock.
    #[error("the drive has {found} bytes and had {wanted} when it joined the store")]
    Shrunk {
        /// The size in bytes that it must have.
        wanted: u64,
        /// The size in bytes that it has.
        found: u64,
    },
    /// The drive cannot be read.
    #[error(transparent)]
    Drive(#[from] DriveError),
}

/// The reason why slices are not entered in a slice table.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SliceTableError {
    /// The table has a bound.
    #[error("the slice table of drive {drive} has room for {MOST_SLICES} slices, not for {wanted}")]
    Full {
        /// The drive.
        drive: DriveId,
        /// Rows that it would have.
        wanted: usize,
    },
    /// Two arrays would use the same bytes, or the slice is not between the superblocks.
    #[error("the slice {offset}+{len} does not fit on drive {drive}: {why}")]
    Place {
        /// The drive.
        drive: DriveId,
        /// First byte.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// The drive did not take its superblock.
    #[error(transparent)]
    Drive(#[from] DriveError),
}

impl Superblock {
    /// Decodes one copy.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        <Self as TwoCopies>::decode(bytes)
    }

    /// Encodes one copy. Panics if there are more than [`MOST_SLICES`] slices.
    pub fn encode(&self) -> Buf {
        <Self as TwoCopies>::encode(self)
    }

    /// Enters slices of one array in the table, in place of those that the array had on this drive. Changes
    /// nothing if one of them does not fit.
    pub(crate) fn put_slices(&mut self, slices: &[SliceEntry]) -> Result<(), SliceTableError> {
        let is_replaced = |old: &SliceEntry| slices.iter().any(|slice| slice.array == old.array);
        let mut rows: Vec<SliceEntry> =
            self.slices.iter().filter(|old| !is_replaced(old)).chain(slices).copied().collect();
        if rows.len() > MOST_SLICES {
            return Err(SliceTableError::Full { drive: self.drive, wanted: rows.len() });
        }
        if let Some((row, why)) = misplaced(&rows, self.size_bytes) {
            return Err(SliceTableError::Place { drive: self.drive, offset: row.offset, len: row.len, why });
        }
        self.slices.clear();
        self.slices.append(&mut rows);
        assert!(slices.iter().all(|slice| self.slices.contains(slice)), "each slice has a row");
        Ok(())
    }

    fn decode_body(body: &[u8], seq: u64, features: Features) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("superblock body", body);
        let (store, drive, pool) = (StoreId(dec.id()?), DriveId(dec.id()?), PoolId(dec.id()?));
        let (size_bytes, created_ns) = (dec.u64()?, dec.i64()?);
        let (count, stacks) = (dec.u16()?, dec.u16()?);
        if !(1..=MOST_STACKS).contains(&stacks) {
            return Err(dec.unknown("stacks", stacks.into()));
        }
        features.check_stacks(&dec, stacks > 1)?;
        dec.zeros("padding", 4)?;
        if size_bytes < SMALLEST_BYTES {
            return Err(dec.bad("a drive too small for its superblocks"));
        }
        let mut slices = Vec::new();
        for _ in 0..count {
            let (array, member, extent) = (ArrayId(dec.id()?), dec.u16()?, dec.u16()?);
            dec.zeros("padding of a slice", 4)?;
            slices.push(SliceEntry { array, member, extent, offset: dec.u64()?, len: dec.u64()? });
            let fence = dec.u64()?;
            dec.check_known("fence of a slice", fence, 0)?;
        }
        dec.end()?;
        if let Some((_, why)) = misplaced(&slices, size_bytes) {
            return Err(dec.bad(why));
        }
        if slices.iter().any(|slice| slice.extent == 0 && slice.len < 2 * COPY_BYTES as u64) {
            return Err(dec.bad("a slice without room for its label"));
        }
        Ok(Self { store, drive, pool, seq, size_bytes, created_ns, features, stacks, slices })
    }
}

impl TwoCopies for Superblock {
    const SITES: Sites = Sites {
        read: "superblock.read",
        again: "superblock.again",
        copies: ["superblock.copy0", "superblock.copy1"],
    };

    fn seq(&self) -> u64 {
        self.seq
    }

    fn encode(&self) -> Buf {
        let mut body = Enc::new();
        body.id(self.store.0).id(self.drive.0).id(self.pool.0).u64(self.size_bytes).i64(self.created_ns);
        body.u16(to_u16(self.slices.len())).u16(self.stacks).u32(0);
        assert_eq!(body.len(), FIXED_BYTES, "the slice table follows");
        for slice in &self.slices {
            body.id(slice.array.0).u16(slice.member).u16(slice.extent).u32(0);
            // The epoch below which the drive's node refuses I/O on the slice: no node refuses any yet.
            body.u64(slice.offset).u64(slice.len).u64(0);
        }
        copies::seal(&KIND, self.seq, &self.features, body.as_slice())
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (seq, features, body) = copies::unseal(&KIND, bytes)?;
        Self::decode_body(body, seq, features)
    }

    fn is_same(&self, found: &Self) -> bool {
        (self.store, self.drive) == (found.store, found.drive)
    }
}

/// A slice that is not between the superblocks, or lies on another one.
fn misplaced(slices: &[SliceEntry], size_bytes: u64) -> Option<(SliceEntry, &'static str)> {
    let end = slices_end(size_bytes);
    let is_inside = |slice: &SliceEntry| {
        slice.offset >= SLICE_ALIGN_BYTES
            && slice.offset.is_multiple_of(SLICE_ALIGN_BYTES)
            && slice.len > 0
            && slice.offset.checked_add(slice.len).is_some_and(|last| last <= end)
    };
    if let Some(slice) = slices.iter().find(|slice| !is_inside(slice)) {
        return Some((*slice, "a slice that is not between the superblocks"));
    }
    let mut ordered: Vec<&SliceEntry> = slices.iter().collect();
    ordered.sort_by_key(|slice| slice.offset);
    let beside = ordered.windows(2).find(|pair| pair[0].overlaps(pair[1]));
    beside.map(|pair| (*pair[1], "a slice on another slice"))
}

/// End (exclusive, in bytes) of the space for slices on a drive of `size_bytes`.
pub fn slices_end(size_bytes: u64) -> u64 {
    (size_bytes - COPY_BYTES as u64) / SLICE_ALIGN_BYTES * SLICE_ALIGN_BYTES
}

/// A drive before it has a handle.
struct Bare<'a>(&'a dyn Drive);

impl Holder for Bare<'_> {
    async fn read(&self, at: u64, len: usize, io: Io) -> Result<Buf, DriveError> {
        self.0.read(at, BufMut::zeroed(len), io).await.map(BufMut::freeze)
    }

    async fn write(&self, at: u64, data: Buf, io: Io) -> Result<(), DriveError> {
        self.0.write(at, data, io).await
    }

    async fn flush(&self, io: Io) -> Result<(), DriveError> {
        self.0.flush(io).await
    }
}

/// Reads both copies and returns the valid one with the higher sequence. Fails if a copy is of another
/// version, or if the drive has become smaller.
pub async fn read(drive: &dyn Drive) -> Result<Superblock, SuperblockError> {
    let size = drive.size_bytes();
    if size < SMALLEST_BYTES {
        return Err(SuperblockError::Shrunk { wanted: SMALLEST_BYTES, found: size });
    }
    let mut found = copies::read(&Bare(drive), copies::places(size), |_: &Superblock| true).await;
    // On a drive that has grown, the other copy is where the drive ended before.
    if let Some(before) = found.best.as_ref().map(|best| best.size_bytes).filter(|before| *before < size) {
        found = copies::read(&Bare(drive), copies::places(before), |_: &Superblock| true).await;
    }
    match found {
        FoundCopies { unknown: Some(DecodeError::Unknown { field: "version", found, .. }), .. }
            if found < u64::from(FORMAT_VERSION) =>
        {
            Err(SuperblockError::Past(found))
        }
        FoundCopies { unknown: Some(error), .. } => Err(SuperblockError::Future(error)),
        FoundCopies { best: Some(found), .. } if found.size_bytes > size => {
            Err(SuperblockError::Shrunk { wanted: found.size_bytes, found: size })
        }
        FoundCopies { best: Some(found), .. } => Ok(found),
        FoundCopies { unread: Some(error), .. } => Err(error.into()),
        FoundCopies { blank: 2, .. } => Err(SuperblockError::Blank),
        FoundCopies { .. } => Err(SuperblockError::Foreign),
    }
}

/// True if a drive has something in front of the first slice or behind the last one, whatever it is.
/// Everything that uses a drive leaves a trace there: partition tables, file systems, and managers of volumes
/// and RAID. [`SuperblockError::Blank`] says less: btrfs begins behind the place of a superblock.
pub async fn is_used(drive: &dyn Drive) -> Result<bool, DriveError> {
    let (io, size) = (Io::new(Class::Meta, "superblock.traces"), drive.size_bytes());
    if size < SMALLEST_BYTES {
        return Ok(false);
    }
    for (at, end) in [(0, SLICE_ALIGN_BYTES), (slices_end(size), size)] {
        let found = drive.read(at, BufMut::zeroed(to_usize(end - at)), io).await?;
        if found.as_ref().iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Writes zeros over both copies: the drive is blank again.
pub async fn clear(drive: &dyn Drive) -> Result<(), DriveError> {
    let io = Io::new(Class::Meta, "superblock.clear");
    for place in copies::places(drive.size_bytes()) {
        drive.write(place, BufMut::zeroed(COPY_BYTES).freeze(), io).await?;
    }
    drive.flush(io).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::{Id128, crc32c};

    fn sample() -> Superblock {
        let array = ArrayId(Id128([3; 16]));
        let slice = SliceEntry { array, member: 2, extent: 0, offset: 1 << 20, len: 2 << 20 };
        Superblock {
            store: StoreId(Id128([1; 16])),
            drive: DriveId(Id128([2; 16])),
            pool: PoolId(Id128([4; 16])),
            seq: 5,
            size_bytes: 8 << 20,
            created_ns: 6,
            features: Features::default(),
            stacks: 1,
            slices: vec![slice],
        }
    }

    /// A change of these bytes needs a new format version.
    #[test]
    fn golden_bytes_come_back_and_every_bit_is_covered() {
        let bytes = sample().encode();
        assert_eq!(bytes.len(), COPY_BYTES);
        assert_eq!(crc32c(&bytes), GOLDEN, "{:#010x}", crc32c(&bytes));
        assert_eq!(Superblock::decode(&bytes), Ok(sample()));
        let body_end = 64 + FIXED_BYTES + ROW_BYTES;
        for bit in 0..body_end * 8 {
            let mut flipped = bytes.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&flipped).is_err(), "bit {bit}");
        }
    }

    const GOLDEN: u32 = 0xeebe_0aa9;

    #[test]
    fn unknown_versions_and_feature_bits_are_refused_by_name() {
        let mut later = sample();
        later.features.incompatible = 4;
        let error = Superblock::decode(&later.encode()).unwrap_err().to_string();
        assert!(error.contains("feature bits is 4"), "{error}");
    }

    /// Regression: a bit that flipped there passed for a field of a later release, and refused the start.
    #[test]
    fn other_bytes_behind_the_header_are_damage() {
        for at in 56..64 {
            let mut bytes = sample().encode().to_vec();
            bytes[at] = 64;
            assert!(matches!(Superblock::decode(&bytes), Err(DecodeError::Bad { .. })), "byte {at}");
        }
    }

    #[test]
    fn several_stacks_have_a_feature_and_a_bound() {
        let of = |stacks| Superblock { stacks, features: Features::of_stacks(stacks > 1), ..sample() };
        for (superblock, why) in [
            (of(2), None),
            (of(MOST_STACKS), None),
            (of(0), Some("stacks is 0")),
            (of(MOST_STACKS + 1), Some("stacks is 65")),
            (Superblock { features: Features::default(), ..of(2) }, Some("without their feature")),
        ] {
            let decoded = Superblock::decode(&superblock.encode());
            match why {
                None => assert_eq!(decoded, Ok(superblock)),
                Some(why) => assert!(decoded.unwrap_err().to_string().contains(why)),
            }
        }
    }

    /// Regression: any size was used to compute the offset of copy 1, and any sequence was incremented by an
    /// update.
    #[test]
    fn sizes_and_counters_that_break_arithmetic_are_refused() {
        let small = Superblock { size_bytes: 4096, slices: Vec::new(), ..sample() };
        assert!(Superblock::decode(&small.encode()).is_err());
        assert!(Superblock::decode(&Superblock { seq: u64::MAX, ..sample() }.encode()).is_err());
    }

    /// Regression: descriptors that did not fit made the encoder panic after the arrays had been written.
    #[test]
    fn a_slice_table_takes_what_fits_and_nothing_else() {
        let mut superblock = Superblock { size_bytes: 4 << 40, slices: Vec::new(), ..sample() };
        let slice = |number: u64| SliceEntry {
            array: ArrayId(Id128::from_words(7, number)),
            member: 0,
            extent: 0,
            offset: (1 + number) << 20,
            len: 1 << 20,
        };
        for number in 0..MOST_SLICES as u64 {
            superblock.put_slices(&[slice(number)]).unwrap();
        }
        assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock.clone()));
        let full = superblock.put_slices(&[slice(MOST_SLICES as u64)]).unwrap_err();
        assert!(matches!(full, SliceTableError::Full { .. }), "{full}");
        // The array's own rows make room.
        superblock.put_slices(&[SliceEntry { len: 1 << 10, ..slice(3) }]).unwrap();
        let other = ArrayId(Id128([8; 16]));
        for (offset, len) in
            [(1 << 20, 1 << 21), (0, 1 << 20), (3 << 19, 1 << 20), (1 << 42, 1 << 20), (1 << 20, 0)]
        {
            let mut roomy = Superblock { slices: vec![slice(1)], ..superblock.clone() };
            let misplaced = SliceEntry { array: other, member: 0, extent: 0, offset, len };
            let error = roomy.put_slices(&[misplaced]).unwrap_err();
            assert!(matches!(error, SliceTableError::Place { .. }), "{offset}+{len}: {error}");
            assert_eq!(roomy.slices, [slice(1)], "nothing was changed");
        }
    }

    #[test]
    fn a_superblock_from_before_the_first_release_is_refused_by_name() {
        let mut bytes = sample().encode().to_vec();
        bytes[8] = 1;
        let crc = crc32c(&bytes[..52]);
        bytes[52..56].copy_from_slice(&crc.to_le_bytes());
        let drive = crate::MemoryDrive::new(8 << 20);
        let read = async {
            let io = Io::new(crate::Class::Meta, "test");
            drive.write(0, Buf::copy_from(&bytes), io).await.unwrap();
            read(&drive).await
        };
        let found = penstock_worker::block_on(read).expect("a worker");
        assert!(matches!(found, Err(SuperblockError::Past(1))), "{found:?}");
    }

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        penstock_worker::block_on(work).expect("a worker")
    }

    /// Regression: on a drive that had grown, only copy 0 was looked at, and an update found no newer copy.
    #[test]
    fn the_newer_copy_on_a_drive_that_has_grown_counts() {
        let drive = crate::MemoryDrive::new(16 << 20);
        let io = Io::new(crate::Class::Meta, "test");
        let newer = Superblock { seq: 6, ..sample() };
        block_on(async {
            for (place, copy) in copies::places(8 << 20).into_iter().zip([sample(), newer.clone()]) {
                drive.write(place, copy.encode(), io).await.unwrap();
            }
        });
        assert_eq!(block_on(read(&drive)).unwrap(), newer);
    }

    /// Regression: btrfs begins at 64 KiB, and a drive with it counted as blank.
    #[test]
    fn a_drive_with_something_behind_the_superblock_is_used() {
        let size = (16 << 20) + 4096;
        for (at, is_used) in
            [(64 << 10, true), ((1 << 20) - 4096, true), (1 << 20, false), (size - 4096, true)]
        {
            let drive = crate::MemoryDrive::new(size as usize);
            let io = Io::new(crate::Class::Meta, "test");
            assert!(!block_on(super::is_used(&drive)).unwrap());
            block_on(drive.write(at, Buf::copy_from(&[1; 4096]), io)).unwrap();
            assert_eq!(block_on(super::is_used(&drive)).unwrap(), is_used, "{at}");
            if at > 0 && at < size - 65536 {
                assert!(matches!(block_on(read(&drive)), Err(SuperblockError::Blank)));
            }
        }
    }

    #[test]
    fn noise_never_panics() {
        let mut state = 1u64;
        for _ in 0..2000 {
            let noise: Vec<u8> = (0..512)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .collect();
            assert!(Superblock::decode(&noise).is_err());
        }
    }
}
