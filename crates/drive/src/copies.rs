//! Structures that lie on a drive in two copies of 64 KiB each: superblocks, and labels of slices.
//!
//! A copy is a header of 64 bytes and a body; the header is the same for all kinds ([`seal`], [`unseal`]).
//! Format: docs/format/superblock.md.
//!
//! Invariants: both copies contain the same bytes after an update. A copy is written only while the other is
//! valid and durable, so a power cut leaves at least one valid. The valid copy with the higher sequence
//! counts. A copy that a former use of the place left does not count.

use crate::{Class, DriveError, Io};
use futures_util::future::join;
use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, Dec, DecodeError, Enc, Features, crc32c};

/// Space for each copy in bytes.
pub const COPY_BYTES: usize = 64 * 1024;
/// Longest body of a copy in bytes.
pub const MOST_BODY_BYTES: usize = COPY_BYTES - HEADER_BYTES;

const HEADER_BYTES: usize = 64;
/// The CRC of the header covers the bytes before itself.
const HEADER_CRC_AT: usize = 52;

/// A kind of structure, as its header names it.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// Its name in errors.
    pub what: &'static str,
    /// The first bytes of each copy.
    pub magic: &'static [u8; 8],
    /// The version that this release reads and writes.
    pub version: u32,
}

/// Makes the bytes of a copy. Panics if the body is longer than [`MOST_BODY_BYTES`].
pub fn seal(kind: &Kind, seq: u64, features: &Features, body: &[u8]) -> Buf {
    assert!(body.len() <= MOST_BODY_BYTES, "a {} of {} bytes has no room", kind.what, body.len());
    let mut header = Enc::new();
    header.raw(kind.magic).u32(kind.version).u32(to_u32(body.len())).u64(seq);
    features.encode(&mut header);
    header.u32(crc32c(body));
    assert_eq!(header.len(), HEADER_CRC_AT, "the CRC of the header follows");
    let header_crc = crc32c(header.as_slice());
    header.u32(header_crc).pad_to(HEADER_BYTES);
    let mut buf = BufMut::zeroed(COPY_BYTES);
    buf.as_mut()[..HEADER_BYTES].copy_from_slice(header.as_slice());
    buf.as_mut()[HEADER_BYTES..HEADER_BYTES + body.len()].copy_from_slice(body);
    buf.freeze()
}

/// Verifies a copy. Returns its sequence, its features and its body. The version and the feature bits are
/// checked before the body, so a later release is told from damage.
pub fn unseal<'a>(kind: &Kind, bytes: &'a [u8]) -> Result<(u64, Features, &'a [u8]), DecodeError> {
    let mut dec = Dec::new(kind.what, bytes);
    if dec.raw(8)? != kind.magic {
        return Err(dec.bad("wrong magic number"));
    }
    let (version, body_bytes, seq) = (dec.u32()?, dec.u32()? as usize, dec.u64()?);
    let features = Features::decode(&mut dec)?;
    let (body_crc, header_crc) = (dec.u32()?, dec.u32()?);
    if crc32c(&bytes[..HEADER_CRC_AT]) != header_crc {
        return Err(dec.bad("header checksum"));
    }
    if version != kind.version {
        return Err(dec.unknown("version", u64::from(version)));
    }
    features.check(&dec)?;
    if seq >> 63 != 0 {
        return Err(dec.bad("a counter above 2^63"));
    }
    // No checksum covers it, so nothing tells a later release here: other bytes are damage.
    if dec.raw(HEADER_BYTES - HEADER_CRC_AT - 4)?.iter().any(|byte| *byte != 0) {
        return Err(dec.bad("bytes behind the header"));
    }
    if body_bytes > MOST_BODY_BYTES {
        return Err(dec.bad("a body longer than the space for it"));
    }
    let body = bytes
        .get(HEADER_BYTES..HEADER_BYTES + body_bytes)
        .filter(|body| crc32c(body) == body_crc)
        .ok_or(dec.bad("body checksum"))?;
    Ok((seq, features, body))
}

/// The names of the places in the code that read and write the copies of a kind.
#[derive(Clone, Copy, Debug)]
pub struct Sites {
    /// Reads.
    pub read: &'static str,
    /// The first write, of the copy that stays valid, as it was.
    pub again: &'static str,
    /// The writes of copies 0 and 1, and the flush after each.
    pub copies: [&'static str; 2],
}

/// A structure with two copies.
pub trait TwoCopies: Sized {
    /// The sites of reads and writes of its copies.
    const SITES: Sites;

    /// Raised with every update.
    fn seq(&self) -> u64;

    /// The bytes of a copy.
    fn encode(&self) -> Buf;

    /// Decodes a copy.
    fn decode(bytes: &[u8]) -> Result<Self, DecodeError>;

    /// True if `found` is an update of the same structure, and not what a former use of the place left.
    fn is_same(&self, found: &Self) -> bool;
}

/// A range of a drive that contains copies.
pub trait Holder {
    /// Reads `len` bytes at offset `at`.
    fn read(&self, at: u64, len: usize, io: Io) -> impl Future<Output = Result<Buf, DriveError>>;

    /// Writes `data` at offset `at`; durable after a flush.
    fn write(&self, at: u64, data: Buf, io: Io) -> impl Future<Output = Result<(), DriveError>>;

    /// Makes earlier writes durable.
    fn flush(&self, io: Io) -> impl Future<Output = Result<(), DriveError>>;
}

/// Offsets of the copies in a range of `len` bytes: at its start, and at the last multiple of 4 KiB that
/// leaves space for the other.
pub fn places(len: u64) -> [u64; 2] {
    assert!(len >= 2 * COPY_BYTES as u64, "{len} bytes have no room for two copies");
    [0, (len - COPY_BYTES as u64) / 4096 * 4096]
}

const fn io(site: &'static str) -> Io {
    Io::new(Class::Meta, site)
}

/// The contents of both places of a structure.
pub struct FoundCopies<T> {
    /// The copy that counts.
    pub best: Option<T>,
    /// A copy of a version or with features that this release does not know.
    pub unknown: Option<DecodeError>,
    /// A copy that can be read and is damaged.
    pub damaged: Option<DecodeError>,
    /// A place that cannot be read.
    pub unread: Option<DriveError>,
    /// Places that contain zeros, or a copy that a former use left.
    pub blank: usize,
}

/// Reads both copies. Those that `is_wanted` refuses are what a former use of the places left.
pub async fn read<T: TwoCopies>(
    holder: &impl Holder,
    places: [u64; 2],
    is_wanted: impl Fn(&T) -> bool,
) -> FoundCopies<T> {
    let read = |place: u64| ReadCopy::read(holder, place, T::SITES.read);
    let (first, last) = join(read(places[0]), read(places[1])).await;
    let mut found = FoundCopies { best: None, unknown: None, damaged: None, unread: None, blank: 0 };
    for ReadCopy { bytes, lacking } in [first, last] {
        match (T::decode(&bytes), lacking) {
            // Of two different structures the first counts: it is the one that is written first.
            (Ok(copy), _)
                if !is_wanted(&copy) || found.best.as_ref().is_some_and(|best: &T| !best.is_same(&copy)) =>
            {
                found.blank += 1;
            }
            (Ok(copy), _) if found.best.as_ref().is_none_or(|best: &T| best.seq() < copy.seq()) => {
                found.best = Some(copy);
            }
            (Ok(_), _) => {}
            (Err(error @ DecodeError::Unknown { .. }), _) => found.unknown = Some(error),
            (Err(_), Some(error)) => found.unread = Some(error),
            (Err(_), None) if bytes.iter().all(|byte: &u8| *byte == 0) => found.blank += 1,
            (Err(error), None) => found.damaged = Some(error),
        }
    }
    found
}

/// The bytes of a copy. A structure ends long before its place does, so it can be whole although blocks
/// behind it cannot be read.
struct ReadCopy {
    /// The blocks before the first one that the drive does not return, and zeros behind them.
    bytes: Buf,
    /// Why the drive does not return the rest.
    lacking: Option<DriveError>,
}

impl ReadCopy {
    async fn read(holder: &impl Holder, place: u64, site: &'static str) -> Self {
        let error = match holder.read(place, COPY_BYTES, io(site)).await {
            Ok(bytes) => return Self { bytes, lacking: None },
            Err(error) => error,
        };
        let mut bytes = BufMut::zeroed(COPY_BYTES);
        // A drive that does not answer is not asked again.
        if matches!(error, DriveError::Io { .. }) {
            for at in (0..COPY_BYTES).step_by(BLOCK_BYTES) {
                let Ok(block) = holder.read(place + at as u64, BLOCK_BYTES, io(site)).await else { break };
                bytes.as_mut()[at..at + BLOCK_BYTES].copy_from_slice(&block);
            }
        }
        Self { bytes: bytes.freeze(), lacking: Some(error) }
    }
}

/// The state of a copy. The order is the order of writing: the least valuable copy first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    /// Not a copy of the structure.
    Bad,
    /// It could not be read, and may be the only valid copy.
    Unread,
    /// A valid copy with this sequence number.
    Whole(u64),
}

/// Writes both copies, the first durable before the second is written. The less valuable copy is written
/// first: after an earlier power cut the other may be the only valid one of the latest sequence. That one is
/// written again before: it may lie in a cache alone, after a flush of an earlier process that failed.
pub async fn write<T: TwoCopies>(
    holder: &impl Holder,
    places: [u64; 2],
    structure: &T,
) -> Result<(), DriveError> {
    let standing = async |place: u64| {
        let ReadCopy { bytes, lacking } = ReadCopy::read(holder, place, T::SITES.read).await;
        match (T::decode(&bytes), lacking) {
            (Ok(found), _) if structure.is_same(&found) => (Standing::Whole(found.seq()), Some(bytes)),
            (Err(_), Some(_)) => (Standing::Unread, None),
            _ => (Standing::Bad, None),
        }
    };
    let ((first, first_bytes), (last, last_bytes)) = join(standing(places[0]), standing(places[1])).await;
    let (order, kept) = if first > last { ([1, 0], first_bytes) } else { ([0, 1], last_bytes) };
    // If the other copy is not valid, this one is the only one, and is not touched.
    if let Some(kept) = kept
        && first.min(last) > Standing::Unread
    {
        holder.write(places[order[1]], kept, io(T::SITES.again)).await?;
    }
    holder.flush(io(T::SITES.again)).await?;
    let bytes = structure.encode();
    for copy in order {
        let io = io(T::SITES.copies[copy]);
        holder.write(places[copy], bytes.clone(), io).await?;
        holder.flush(io).await?;
    }
    Ok(())
}

/// The findings of a scrub of two copies.
#[derive(Clone, Debug, Default)]
pub struct Scrubbed {
    /// Copies that were bad.
    pub bad: u64,
    /// Copies of them that are good now.
    pub repaired: u64,
    /// Why a copy could not be verified or written again; none if both are good now.
    pub failed: Option<DriveError>,
}

/// Verifies both copies, and rewrites both if one is unreadable or differs from `expected`.
pub async fn scrub<T: TwoCopies>(holder: &impl Holder, places: [u64; 2], expected: &T) -> Scrubbed {
    let (wanted, mut found) = (expected.encode(), Scrubbed::default());
    for place in places {
        match holder.read(place, COPY_BYTES, io(T::SITES.read)).await {
            Ok(bytes) if bytes[..] == wanted[..] => {}
            Ok(_) | Err(DriveError::Io { .. }) => found.bad += 1,
            Err(error) => found.failed = Some(error),
        }
    }
    if found.bad > 0 && found.failed.is_none() {
        match write(holder, places, expected).await {
            Ok(()) => found.repaired = found.bad,
            Err(error) => found.failed = Some(error),
        }
    }
    found
}
