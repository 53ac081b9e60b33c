//! The superblock of a drive, in two copies: its identity, its slice table and the descriptors of its arrays.
//!
//! Format: docs/format/superblock.md.
//!
//! Invariants: copy 0 lies in the first 64 KiB of the drive and copy 1 in its last 64 KiB. Both contain the
//! same bytes after an update. A copy is written only while the other is valid and durable, so a power cut
//! leaves at least one valid. The valid copy with the higher sequence wins. Nothing is written to a drive
//! whose superblock is not understood.

use crate::{Class, Drive, DriveError, Io};
use futures_util::future::join;
use penstock_base::num::{to_u16, to_u32};
use penstock_base::{ArrayId, Buf, BufMut, Dec, DecodeError, DriveId, Enc, StoreId, crc32c};

/// Space for each copy in bytes.
pub const SUPERBLOCK_BYTES: usize = 64 * 1024;
/// Slices start on a multiple of this many bytes.
pub const SLICE_ALIGN_BYTES: u64 = 1024 * 1024;
/// Version of the format.
pub const FORMAT_VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"PENSTOCK";
const HEADER_BYTES: usize = 64;
/// Smallest drive in bytes that has space for both copies and a slice between them.
const SMALLEST_BYTES: u64 = 4 * SLICE_ALIGN_BYTES;
/// Incompatible features that this release understands.
const KNOWN_INCOMPATIBLE: u64 = 0;

/// Feature bits. A release that does not know a bit may use the drive only as the class of the bit permits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Features with which an older release may read and write.
    pub compatible: u64,
    /// Features with which an older release may only read. This release knows none and refuses the drive.
    pub read_only_compatible: u64,
    /// Features with which an older release must not use the drive.
    pub incompatible: u64,
}

/// A row of the slice table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceEntry {
    /// The array to which the slice belongs.
    pub array: ArrayId,
    /// The position of the slice among the array's members.
    pub member: u16,
    /// Raised whenever the slice begins blank, such as after a replacement.
    pub generation: u64,
    /// First byte on the drive.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// The descriptor of an array, which is on every drive that has a slice of it. The array crate defines the
/// bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayEntry {
    /// The array.
    pub array: ArrayId,
    /// Revision of the descriptor; the highest is the newest.
    pub revision: u64,
    /// The encoded descriptor.
    pub descriptor: Vec<u8>,
}

/// The contents of a superblock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Superblock {
    /// The store that the drive belongs to.
    pub store: StoreId,
    /// The drive's identifier.
    pub drive: DriveId,
    /// Sequence number, raised with every update.
    pub seq: u64,
    /// Size of the drive in bytes.
    pub size_bytes: u64,
    /// Time when the drive joined the store, in nanoseconds since 1970.
    pub created_ns: i64,
    /// Feature bits.
    pub features: Features,
    /// The slice table.
    pub slices: Vec<SliceEntry>,
    /// Descriptors of the arrays that the slices belong to.
    pub arrays: Vec<ArrayEntry>,
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

impl Superblock {
    /// Encodes one copy.
    pub fn encode(&self) -> Buf {
        let mut body = Enc::new();
        body.id(self.store.0).id(self.drive.0).u64(self.size_bytes).i64(self.created_ns);
        body.u16(to_u16(self.slices.len())).u16(to_u16(self.arrays.len())).u32(0);
        for slice in &self.slices {
            body.id(slice.array.0).u16(slice.member).u16(0).u32(0);
            body.u64(slice.generation).u64(slice.offset).u64(slice.len);
        }
        for array in &self.arrays {
            body.id(array.array.0).u64(array.revision).bytes(&array.descriptor);
        }
        let mut whole = Enc::new();
        whole.raw(MAGIC).u32(FORMAT_VERSION).u32(to_u32(body.len())).u64(self.seq);
        whole.u64(self.features.compatible).u64(self.features.read_only_compatible);
        whole.u64(self.features.incompatible).u32(crc32c(body.as_slice()));
        let header_crc = crc32c(whole.as_slice());
        whole.u32(header_crc).pad_to(HEADER_BYTES).raw(body.as_slice());
        assert!(whole.len() <= SUPERBLOCK_BYTES, "a superblock of {} bytes has no room", whole.len());
        let mut buf = BufMut::zeroed(SUPERBLOCK_BYTES);
        buf.as_mut()[..whole.len()].copy_from_slice(whole.as_slice());
        buf.freeze()
    }

    /// Decodes one copy.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("superblock", bytes);
        if dec.raw(8)? != MAGIC {
            return Err(dec.bad("wrong magic number"));
        }
        let (version, body_bytes, seq) = (dec.u32()?, dec.u32()? as usize, dec.counter()?);
        let features =
            Features { compatible: dec.u64()?, read_only_compatible: dec.u64()?, incompatible: dec.u64()? };
        let (body_crc, header_crc) = (dec.u32()?, dec.u32()?);
        if crc32c(&bytes[..HEADER_BYTES - 12]) != header_crc {
            return Err(dec.bad("header checksum"));
        }
        if version != FORMAT_VERSION {
            return Err(dec.unknown("version", u64::from(version)));
        }
        let unknown = (features.incompatible & !KNOWN_INCOMPATIBLE) | features.read_only_compatible;
        if unknown != 0 {
            return Err(dec.unknown("feature bits", unknown));
        }
        if body_bytes > SUPERBLOCK_BYTES - HEADER_BYTES {
            return Err(dec.bad("a body longer than the space for it"));
        }
        let body = bytes
            .get(HEADER_BYTES..HEADER_BYTES + body_bytes)
            .filter(|body| crc32c(body) == body_crc)
            .ok_or(dec.bad("body checksum"))?;
        Self::decode_body(body, seq, features)
    }

    fn decode_body(body: &[u8], seq: u64, features: Features) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("superblock body", body);
        let (store, drive) = (StoreId(dec.id()?), DriveId(dec.id()?));
        let (size_bytes, created_ns) = (dec.u64()?, dec.i64()?);
        let (slice_count, array_count, _) = (dec.u16()?, dec.u16()?, dec.u32()?);
        if size_bytes < SMALLEST_BYTES {
            return Err(dec.bad("a drive too small for its superblocks"));
        }
        let mut slices = Vec::new();
        for _ in 0..slice_count {
            let (array, member) = (ArrayId(dec.id()?), dec.u16()?);
            dec.raw(6)?;
            slices.push(SliceEntry {
                array,
                member,
                generation: dec.counter_with_room()?,
                offset: dec.u64()?,
                len: dec.u64()?,
            });
        }
        let mut arrays = Vec::new();
        for _ in 0..array_count {
            let (array, revision) = (ArrayId(dec.id()?), dec.counter_with_room()?);
            arrays.push(ArrayEntry { array, revision, descriptor: dec.bytes()?.to_vec() });
        }
        for slice in &slices {
            let end = slice.offset.checked_add(slice.len).ok_or(dec.bad("a slice that wraps around"))?;
            if end > size_bytes {
                return Err(dec.bad("a slice beyond the end of the drive"));
            }
        }
        Ok(Self { store, drive, seq, size_bytes, created_ns, features, slices, arrays })
    }
}

/// End (exclusive, in bytes) of the space for slices on a drive of `size_bytes`.
pub fn slices_end(size_bytes: u64) -> u64 {
    (size_bytes - SUPERBLOCK_BYTES as u64) / SLICE_ALIGN_BYTES * SLICE_ALIGN_BYTES
}

fn places(size_bytes: u64) -> [u64; 2] {
    [0, (size_bytes - SUPERBLOCK_BYTES as u64) / 4096 * 4096]
}

const IO: Io = Io::new(Class::Meta, "superblock.read");
const WRITE_SITES: [&str; 2] = ["superblock.copy0", "superblock.copy1"];

/// Reads both copies and returns the valid one with the higher sequence. Fails if a copy is of a later
/// release, or if the drive has become smaller.
pub async fn read(drive: &dyn Drive) -> Result<Superblock, SuperblockError> {
    let size = drive.size_bytes();
    if size < SMALLEST_BYTES {
        return Err(SuperblockError::Shrunk { wanted: SMALLEST_BYTES, found: size });
    }
    let mut best: Option<Superblock> = None;
    let (mut future, mut blank, mut broken) = (None, 0, None);
    for place in places(size) {
        let bytes = match drive.read(place, BufMut::zeroed(SUPERBLOCK_BYTES), IO).await {
            Ok(bytes) => bytes,
            Err(error) => {
                broken = Some(error);
                continue;
            }
        };
        match Superblock::decode(bytes.as_ref()) {
            Ok(found) if best.as_ref().is_none_or(|best| best.seq < found.seq) => best = Some(found),
            Ok(_) => {}
            Err(error @ DecodeError::Unknown { .. }) => future = Some(error),
            Err(_) if bytes.as_ref().iter().all(|byte| *byte == 0) => blank += 1,
            Err(_) => {}
        }
    }
    match (best, future, broken) {
        (_, Some(error), _) => Err(SuperblockError::Future(error)),
        (Some(found), _, _) if found.size_bytes > size => {
            Err(SuperblockError::Shrunk { wanted: found.size_bytes, found: size })
        }
        (Some(found), _, _) => Ok(found),
        (None, _, Some(error)) => Err(error.into()),
        (None, _, None) if blank == 2 => Err(SuperblockError::Blank),
        (None, _, None) => Err(SuperblockError::Foreign),
    }
}

/// The state of a copy. The order is the order of writing: the least valuable copy first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Bad,
    /// It could not be read, and may be the only valid copy.
    Unread,
    /// A valid superblock with this sequence number.
    Whole(u64),
}

/// The drive on which the copies of a superblock lie.
pub(crate) trait Holder {
    async fn read(&self, at: u64, len: usize, io: Io) -> Result<Buf, DriveError>;
    async fn write(&self, at: u64, data: Buf, io: Io) -> Result<(), DriveError>;
    async fn flush(&self, io: Io) -> Result<(), DriveError>;
}

/// Writes both copies, the first durable before the second is written. The less valuable copy is written
/// first: after an earlier power cut the other may be the only valid one of the latest sequence. That one is
/// written again before: it may lie in a cache alone, after a flush of an earlier process that failed.
pub(crate) async fn write(drive: &impl Holder, superblock: &Superblock) -> Result<(), DriveError> {
    let places = places(superblock.size_bytes);
    let standing = async |place| match drive.read(place, SUPERBLOCK_BYTES, IO).await {
        Ok(bytes) => match Superblock::decode(&bytes) {
            Ok(found) => (Standing::Whole(found.seq), Some(bytes)),
            Err(_) => (Standing::Bad, None),
        },
        Err(_) => (Standing::Unread, None),
    };
    let ((first, first_bytes), (last, last_bytes)) = join(standing(places[0]), standing(places[1])).await;
    let (order, kept) = if first > last { ([1, 0], first_bytes) } else { ([0, 1], last_bytes) };
    // If the other copy is not valid, this one is the only one, and is not touched.
    if let Some(kept) = kept
        && first.min(last) > Standing::Unread
    {
        drive.write(places[order[1]], kept, IO.at("superblock.again")).await?;
    }
    drive.flush(IO).await?;
    let bytes = superblock.encode();
    for copy in order {
        let io = IO.at(WRITE_SITES[copy]);
        drive.write(places[copy], bytes.clone(), io).await?;
        drive.flush(io).await?;
    }
    Ok(())
}

/// Returns the numbers of the copies that are unreadable or differ from `expected`.
pub(crate) async fn bad_copies(drive: &impl Holder, expected: &Superblock) -> Result<Vec<usize>, DriveError> {
    let wanted = expected.encode();
    let mut bad = Vec::new();
    for (copy, place) in places(expected.size_bytes).into_iter().enumerate() {
        match drive.read(place, SUPERBLOCK_BYTES, IO.at("superblock.scrub")).await {
            Ok(found) if found[..] == wanted[..] => {}
            Ok(_) | Err(DriveError::Io { .. }) => bad.push(copy),
            Err(error) => return Err(error),
        }
    }
    Ok(bad)
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::Id128;

    fn sample() -> Superblock {
        let array = ArrayId(Id128([3; 16]));
        let slice = SliceEntry { array, member: 2, generation: 4, offset: 1 << 20, len: 2 << 20 };
        Superblock {
            store: StoreId(Id128([1; 16])),
            drive: DriveId(Id128([2; 16])),
            seq: 5,
            size_bytes: 8 << 20,
            created_ns: 6,
            features: Features::default(),
            slices: vec![slice],
            arrays: vec![ArrayEntry { array, revision: 7, descriptor: b"descriptor".to_vec() }],
        }
    }

    /// A change of these bytes needs a new format version.
    #[test]
    fn golden_bytes_come_back_and_every_bit_is_covered() {
        let bytes = sample().encode();
        assert_eq!(bytes.len(), SUPERBLOCK_BYTES);
        assert_eq!(crc32c(&bytes), GOLDEN, "{:#010x}", crc32c(&bytes));
        assert_eq!(Superblock::decode(&bytes), Ok(sample()));
        let body_end = HEADER_BYTES + 56 + 48 + 28 + 10;
        // Bytes 56 to 64 pad the header.
        for bit in (0..body_end * 8).filter(|bit| !(56 * 8..64 * 8).contains(bit)) {
            let mut flipped = bytes.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&flipped).is_err(), "bit {bit}");
        }
    }

    const GOLDEN: u32 = 0xb3a0_d6f1;

    #[test]
    fn unknown_versions_and_feature_bits_are_refused_by_name() {
        let mut later = sample();
        later.features.incompatible = 4;
        let error = Superblock::decode(&later.encode()).unwrap_err().to_string();
        assert!(error.contains("feature bits is 4"), "{error}");
    }

    /// Regression: any size was used to compute the offset of copy 1, and any sequence was incremented by an
    /// update.
    #[test]
    fn sizes_and_counters_that_break_arithmetic_are_refused() {
        let small = Superblock { size_bytes: 4096, slices: Vec::new(), ..sample() };
        assert!(Superblock::decode(&small.encode()).is_err());
        assert!(Superblock::decode(&Superblock { seq: u64::MAX, ..sample() }.encode()).is_err());
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
