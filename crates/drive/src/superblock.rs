//! The superblock: what a drive says about itself, kept twice. Format: docs/format/superblock.md.
//!
//! Invariants: copy 0 lies in the first 64 KiB of the drive and copy 1 in its last 64 KiB; both hold the same bytes
//! after an update. One is written only when the other is whole and durable, so that power cuts leave at least one whole. The
//! valid copy with the higher sequence wins. Nothing is written on a drive whose superblock is not understood.

use crate::handle::DriveHandle;
use crate::{Class, Drive, DriveError, Io};
use futures_util::future::join;
use penstock_base::{ArrayId, Buf, BufMut, Dec, DecodeError, DriveId, Enc, StoreId, crc32c};

/// Space reserved for each copy.
pub const SUPERBLOCK_BYTES: usize = 64 * 1024;
/// Slices start on a multiple of this.
pub const SLICE_ALIGN_BYTES: u64 = 1024 * 1024;
/// The layout of this structure.
pub const FORMAT_VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"PENSTOCK";
const HEADER_BYTES: usize = 64;
/// Smallest drive that has room for both copies and a slice between them.
const SMALLEST_BYTES: u64 = 4 * SLICE_ALIGN_BYTES;
/// Incompatible features that this release understands.
const KNOWN_INCOMPATIBLE: u64 = 0;

/// Feature bits: what an older release may do with the drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// An older release may read and write.
    pub compatible: u64,
    /// An older release may read.
    pub read_only_compatible: u64,
    /// An older release must not touch the drive.
    pub incompatible: u64,
}

/// A row of the slice table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SliceEntry {
    /// The array it belongs to.
    pub array: ArrayId,
    /// Its position among the array's members.
    pub member: u16,
    /// Raised whenever the slice starts a new life (blank after a replacement).
    pub generation: u64,
    /// First byte on the drive.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// What the array that owns a slice keeps on every drive it uses. The bytes belong to the array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayEntry {
    /// The array.
    pub array: ArrayId,
    /// Higher is newer.
    pub revision: u64,
    /// The array's descriptor.
    pub descriptor: Vec<u8>,
}

/// The superblock's contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Superblock {
    /// The store that the drive belongs to.
    pub store: StoreId,
    /// The drive's own name.
    pub drive: DriveId,
    /// Raised with every update.
    pub seq: u64,
    /// Size of the drive.
    pub size_bytes: u64,
    /// Nanoseconds since 1970 when the drive joined the store.
    pub created_ns: i64,
    /// Feature bits.
    pub features: Features,
    /// The slice table.
    pub slices: Vec<SliceEntry>,
    /// Descriptors of the arrays that the slices belong to.
    pub arrays: Vec<ArrayEntry>,
}

/// A drive cannot be used as what it is.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SuperblockError {
    /// Both places hold zeros.
    #[error("the drive is blank")]
    Blank,
    /// Neither place holds a superblock.
    #[error("no Penstock superblock; it holds something else or was damaged in both places")]
    Foreign,
    /// A later release wrote it.
    #[error("written by a later release: {0}")]
    Future(DecodeError),
    /// The drive is smaller than when it joined.
    #[error("the drive has {found} bytes and had {wanted} when it joined the store")]
    Shrunk {
        /// Bytes then.
        wanted: u64,
        /// Bytes now.
        found: u64,
    },
    /// It cannot be read.
    #[error(transparent)]
    Drive(#[from] DriveError),
}

impl Superblock {
    /// The bytes of one copy.
    pub fn encode(&self) -> Buf {
        let mut body = Enc::new();
        body.id(self.store.0).id(self.drive.0).u64(self.size_bytes).i64(self.created_ns);
        body.u16(self.slices.len() as u16).u16(self.arrays.len() as u16).u32(0);
        for slice in &self.slices {
            body.id(slice.array.0).u16(slice.member).u16(0).u32(0);
            body.u64(slice.generation).u64(slice.offset).u64(slice.len);
        }
        for array in &self.arrays {
            body.id(array.array.0).u64(array.revision).bytes(&array.descriptor);
        }
        let mut whole = Enc::new();
        whole.raw(MAGIC).u32(FORMAT_VERSION).u32(body.len() as u32).u64(self.seq);
        whole.u64(self.features.compatible).u64(self.features.read_only_compatible);
        whole.u64(self.features.incompatible).u32(crc32c(body.as_slice()));
        let header_crc = crc32c(whole.as_slice());
        whole.u32(header_crc).pad_to(HEADER_BYTES).raw(body.as_slice());
        assert!(whole.len() <= SUPERBLOCK_BYTES, "a superblock of {} bytes has no room", whole.len());
        let mut buf = BufMut::zeroed(SUPERBLOCK_BYTES);
        buf.as_mut()[..whole.len()].copy_from_slice(whole.as_slice());
        buf.freeze()
    }

    /// Reads one copy.
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
            return Err(dec.bad("a body longer than its place"));
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
                generation: dec.counter()?,
                offset: dec.u64()?,
                len: dec.u64()?,
            });
        }
        let mut arrays = Vec::new();
        for _ in 0..array_count {
            let (array, revision) = (ArrayId(dec.id()?), dec.counter()?);
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

/// First byte behind the space that slices may use on a drive of `size_bytes`.
pub fn slices_end(size_bytes: u64) -> u64 {
    (size_bytes - SUPERBLOCK_BYTES as u64) / SLICE_ALIGN_BYTES * SLICE_ALIGN_BYTES
}

fn places(size_bytes: u64) -> [u64; 2] {
    [0, (size_bytes - SUPERBLOCK_BYTES as u64) / 4096 * 4096]
}

const IO: Io = Io::new(Class::Meta, "superblock.read");
const WRITE_SITES: [&str; 2] = ["superblock.copy0", "superblock.copy1"];

/// Finds the superblock of a drive.
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

/// The state of a copy, the one that is missed least first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Bad,
    /// It may be the only whole one.
    Unread,
    /// A superblock with this sequence number.
    Whole(u64),
}

/// Writes both copies, each durable before the next, and that first which is no whole one of the latest: a power cut may have
/// left only the other.
pub(crate) async fn write(drive: &DriveHandle, superblock: &Superblock) -> Result<(), DriveError> {
    // A copy may have been written by a process that ended before its flush.
    drive.flush(IO).await?;
    let places = places(superblock.size_bytes);
    let standing = async |place| match drive.read(place, SUPERBLOCK_BYTES, IO).await {
        Ok(found) => Superblock::decode(&found).map_or(Standing::Bad, |found| Standing::Whole(found.seq)),
        Err(_) => Standing::Unread,
    };
    let (first, last) = join(standing(places[0]), standing(places[1])).await;
    let order = if first > last { [1, 0] } else { [0, 1] };
    let bytes = superblock.encode();
    for copy in order {
        let io = IO.at(WRITE_SITES[copy]);
        drive.write(places[copy], bytes.clone(), io).await?;
        drive.flush(io).await?;
    }
    Ok(())
}

/// Which of the two copies do not hold `expected`.
pub(crate) async fn bad_copies(drive: &DriveHandle, expected: &Superblock) -> Result<Vec<usize>, DriveError> {
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

    /// The bytes on a drive; a change of them is a new version.
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

    /// The place of copy 1 was computed from any size, and an update counted on from any sequence.
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
