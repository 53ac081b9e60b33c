//! A log record: a head of full blocks with entries, and then the payload blocks. Byte map:
//! docs/format/log.md.
//!
//! The head's CRC covers the entries, and the entries hold the CRC32C of every payload block. So the chain
//! value (the head's CRC) identifies the complete record.

use crate::moves::Moves;
use crate::place::{MemberNo, Position, Positions};
use penstock_base::num::{to_u16, to_u32};
use penstock_base::{
    ArrayId, BLOCK_BYTES, Buf, BufMut, Dec, DecodeError, Enc, LogSeq, MOST_WITH_ROOM, Stripe, Version, crc32c,
};
use penstock_raid::MAX_STRIPS;

const MAGIC: &[u8; 4] = b"PREC";
const FORMAT: u16 = 2;
const HEADER_BYTES: usize = 64;
/// The field of an entry that says what it is.
const ENTRY_KIND: &str = "entry kind";

/// New contents of one strip in a destage entry: some of its blocks, and its complete new trailer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripPatch {
    /// Position in the stripe.
    pub position: Position,
    /// Its new version.
    pub version: Version,
    /// Columns whose blocks are in the payload, ascending.
    pub columns: Vec<u16>,
    /// CRC32C of every block of the strip.
    pub crcs: Vec<u32>,
}

/// A statement of a record. Payload blocks follow in the order of the entries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Data blocks of one stripe, to be destaged later.
    Data {
        /// The stripe.
        stripe: Stripe,
        /// Number of this entry among all data entries of the array. The greater number is the newer write.
        order: u64,
        /// First data block within the stripe.
        block: u32,
        /// CRC32C of each block.
        crcs: Vec<u32>,
    },
    /// All strips of a stripe that was unwritten have been written in full, with one version.
    Fresh {
        /// The stripe.
        stripe: Stripe,
        /// Data entries of this stripe with an order up to this one are void.
        upto: u64,
        /// The version of every strip.
        version: Version,
        /// Strips that were not written.
        stale: Positions,
        /// Strips that were written to spare places.
        moves: Moves,
        /// Data blocks that the strips contain, each with the order up to which its data entries are void.
        contained: Vec<(u32, u64)>,
    },
    /// New contents for strips of a written stripe, logged before they are written.
    Destage {
        /// The stripe.
        stripe: Stripe,
        /// Strips that will not be written.
        stale: Positions,
        /// Data blocks that the patches contain, each with the order up to which its data entries are void.
        contained: Vec<(u32, u64)>,
        /// The strips' new contents.
        patches: Vec<StripPatch>,
    },
    /// Stripes that are unwritten from now on.
    Discard {
        /// First stripe.
        stripe: Stripe,
        /// Number of stripes.
        count: u64,
        /// Data entries of these stripes with an order up to this one are void.
        upto: u64,
    },
    /// Reserves versions: those up to `reserved` may be given from now on.
    Versions {
        /// The last version of the reserved run.
        reserved: Version,
    },
    /// Strips that became stale, or valid again.
    Strips {
        /// The stripe.
        stripe: Stripe,
        /// Strips that are stale from now on.
        set: Positions,
        /// Strips that are valid again.
        clear: Positions,
        /// Version of those that are valid again.
        version: Version,
        /// Those among them that are in spare places from now on; the others are at their own ones.
        moves: Moves,
    },
    /// All strips of a member are stale, because its slice starts blank.
    MemberReset {
        /// The member.
        member: MemberNo,
    },
}

impl Entry {
    fn encode(&self, enc: &mut Enc) {
        match self {
            Self::Data { stripe, order, block, crcs } => {
                enc.u8(1).u64(stripe.0).u64(*order).u32(*block);
                encode_crcs(enc, crcs);
            }
            Self::Fresh { stripe, upto, version, stale, moves, contained } => {
                enc.u8(2).u64(stripe.0).u64(*upto).u64(version.0).u64(stale.bits());
                encode_moves(enc, *moves);
                encode_contained(enc, contained);
            }
            Self::Destage { stripe, stale, contained, patches } => {
                enc.u8(3).u64(stripe.0).u64(stale.bits());
                encode_contained(enc, contained);
                enc.u16(to_u16(patches.len()));
                for patch in patches {
                    enc.u16(patch.position.number()).u64(patch.version.0).u32(to_u32(patch.columns.len()));
                    patch.columns.iter().for_each(|column| {
                        enc.u16(*column);
                    });
                    encode_crcs(enc, &patch.crcs);
                }
            }
            Self::Discard { stripe, count, upto } => {
                enc.u8(4).u64(stripe.0).u64(*count).u64(*upto);
            }
            Self::Versions { reserved } => {
                enc.u8(5).u64(reserved.0);
            }
            Self::Strips { stripe, set, clear, version, moves } => {
                enc.u8(6).u64(stripe.0).u64(set.bits()).u64(clear.bits()).u64(version.0);
                encode_moves(enc, *moves);
            }
            Self::MemberReset { member } => {
                enc.u8(7).u16(member.number());
            }
        }
    }

    fn decode(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        Ok(match dec.u8()? {
            1 => Self::Data {
                stripe: Stripe(dec.u64()?),
                order: dec.counter_with_room()?,
                block: dec.u32()?,
                crcs: decode_crcs(dec)?,
            },
            2 => Self::Fresh {
                stripe: Stripe(dec.u64()?),
                upto: dec.counter_with_room()?,
                version: Version(dec.counter_with_room()?),
                stale: Positions::from_bits(dec.u64()?),
                moves: decode_moves(dec)?,
                contained: decode_contained(dec)?,
            },
            3 => Self::decode_destage(dec)?,
            4 => Self::Discard {
                stripe: Stripe(dec.u64()?),
                count: dec.u64()?,
                upto: dec.counter_with_room()?,
            },
            5 => Self::Versions { reserved: Version(dec.counter_with_room()?) },
            6 => Self::Strips {
                stripe: Stripe(dec.u64()?),
                set: Positions::from_bits(dec.u64()?),
                clear: Positions::from_bits(dec.u64()?),
                version: Version(dec.counter_with_room()?),
                moves: decode_moves(dec)?,
            },
            7 => {
                let number = dec.u16()?;
                let member = MemberNo::of_number(number).ok_or(dec.unknown("member", number.into()))?;
                Self::MemberReset { member }
            }
            // 8 is reserved for rows: records of a key-value store in the log of a data array.
            kind => return Err(dec.unknown(ENTRY_KIND, u64::from(kind))),
        })
    }

    fn decode_destage(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let (stripe, stale) = (Stripe(dec.u64()?), Positions::from_bits(dec.u64()?));
        let contained = decode_contained(dec)?;
        let patch_count = dec.u16()?;
        let mut patches = Vec::new();
        for _ in 0..patch_count {
            let (position, version, count) =
                (decode_position(dec)?, Version(dec.counter_with_room()?), dec.u32()?);
            let columns = (0..count).map(|_| dec.u16()).collect::<Result<Vec<_>, _>>()?;
            let crcs = decode_crcs(dec)?;
            if columns.iter().any(|column| usize::from(*column) >= crcs.len()) {
                return Err(dec.bad("a column beyond the strip"));
            }
            if !columns.is_sorted_by(|before, after| before < after) {
                return Err(dec.bad("columns that do not ascend"));
            }
            patches.push(StripPatch { position, version, columns, crcs });
        }
        Ok(Self::Destage { stripe, stale, contained, patches })
    }

    /// The highest order or version in the entry.
    pub(crate) fn highest(&self) -> u64 {
        let of = |contained: &[(u32, u64)]| contained.iter().map(|(_, order)| *order).max().unwrap_or(0);
        match self {
            Self::Data { order, .. } => *order,
            Self::Fresh { upto, version, contained, .. } => of(contained).max(*upto).max(version.0),
            Self::Destage { contained, patches, .. } => {
                patches.iter().map(|patch| patch.version.0).fold(of(contained), u64::max)
            }
            Self::Discard { upto, .. } => *upto,
            Self::Versions { reserved } => reserved.0,
            Self::Strips { version, .. } => version.0,
            Self::MemberReset { .. } => 0,
        }
    }

    /// CRC32C of each payload block of this entry, in order.
    pub fn payload_crcs(&self) -> Vec<u32> {
        match self {
            Self::Data { crcs, .. } => crcs.clone(),
            Self::Destage { patches, .. } => {
                let of_patch = |patch: &StripPatch| {
                    patch.columns.iter().map(|column| patch.crcs[usize::from(*column)]).collect::<Vec<_>>()
                };
                patches.iter().flat_map(of_patch).collect()
            }
            _ => Vec::new(),
        }
    }

    /// The entry that strips of a stripe became stale.
    pub fn stale_strips(stripe: Stripe, set: Positions) -> Self {
        Self::Strips { stripe, set, clear: Positions::NONE, version: Version(0), moves: Moves::NONE }
    }

    /// Bytes of the entry in a record's head.
    pub fn encoded_bytes(&self) -> usize {
        let mut enc = Enc::new();
        self.encode(&mut enc);
        enc.len()
    }
}

/// Decodes a position and rejects one that no stripe can have.
fn decode_position(dec: &mut Dec<'_>) -> Result<Position, DecodeError> {
    let number = dec.u16()?;
    match usize::from(number) < MAX_STRIPS {
        true => Ok(Position::from(number)),
        false => Err(dec.unknown("position", number.into())),
    }
}

fn encode_moves(enc: &mut Enc, moves: Moves) {
    moves.words().into_iter().for_each(|word| {
        enc.u64(word);
    });
}

fn decode_moves(dec: &mut Dec<'_>) -> Result<Moves, DecodeError> {
    let (moved, spares) = (dec.u64()?, dec.u64()?);
    Moves::of_words(moved, spares).ok_or(dec.bad("strips in spare places that there are not"))
}

fn encode_contained(enc: &mut Enc, contained: &[(u32, u64)]) {
    enc.u32(to_u32(contained.len()));
    for (block, order) in contained {
        enc.u32(*block).u64(*order);
    }
}

fn decode_contained(dec: &mut Dec<'_>) -> Result<Vec<(u32, u64)>, DecodeError> {
    let count = dec.u32()?;
    (0..count).map(|_| Ok((dec.u32()?, dec.counter_with_room()?))).collect()
}

fn encode_crcs(enc: &mut Enc, crcs: &[u32]) {
    enc.u32(to_u32(crcs.len()));
    crcs.iter().for_each(|crc| {
        enc.u32(*crc);
    });
}

fn decode_crcs(dec: &mut Dec<'_>) -> Result<Vec<u32>, DecodeError> {
    let count = dec.u32()?;
    if count as usize * 4 > dec.left() {
        return Err(dec.bad("more checksums than bytes"));
    }
    (0..count).map(|_| dec.u32()).collect()
}

/// The head of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordHead {
    /// The array.
    pub array: ArrayId,
    /// The opening of the array that wrote the record.
    pub incarnation: u64,
    /// Sequence of the record in the log.
    pub seq: LogSeq,
    /// Chain value of the record before it.
    pub chain: u32,
    /// Records up to this sequence were durable when this one was written.
    pub durable: LogSeq,
    /// Its statements, in the order in which they apply.
    pub entries: Vec<Entry>,
}

/// Lengths of a record's parts, and the value that the next record must chain to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordShape {
    /// Blocks of the head.
    pub head_blocks: u32,
    /// Blocks of payload behind the head.
    pub payload_blocks: u32,
    /// The record's chain value: the CRC32C of its head.
    pub chain: u32,
}

/// The number of blocks of a head with entries of `entry_bytes` bytes.
pub fn head_blocks(entry_bytes: usize) -> usize {
    (HEADER_BYTES + entry_bytes).div_ceil(BLOCK_BYTES)
}

impl RecordHead {
    /// Encodes the record, with its payload behind the head, and returns its shape.
    pub fn encode(&self, payload: &[Buf]) -> (Buf, RecordShape) {
        let mut entries = Enc::new();
        self.entries.iter().for_each(|entry| entry.encode(&mut entries));
        let head_blocks = head_blocks(entries.len());
        let payload_blocks = payload.iter().map(Buf::len).sum::<usize>() / BLOCK_BYTES;
        let mut head = Enc::new();
        head.raw(MAGIC).u32(0).id(self.array.0).u64(self.incarnation).u64(self.seq.0).u32(self.chain);
        head.u16(u16::try_from(head_blocks).expect("a head is shorter than a segment"))
            .u16(FORMAT)
            .u64(self.durable.0)
            .u32(to_u32(payload_blocks));
        head.u32(u32::try_from(entries.len()).expect("entries are shorter than 4 GiB"))
            .raw(entries.as_slice());
        let chain = crc32c(&head.as_slice()[8..]);
        head.set_u32(4, chain);
        let mut record = BufMut::zeroed((head_blocks + payload_blocks) * BLOCK_BYTES);
        record.as_mut()[..head.len()].copy_from_slice(head.as_slice());
        let mut at = head_blocks * BLOCK_BYTES;
        for part in payload {
            record.as_mut()[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        (
            record.freeze(),
            RecordShape { head_blocks: to_u32(head_blocks), payload_blocks: to_u32(payload_blocks), chain },
        )
    }

    /// True if the next opening can decode its numbers.
    pub(crate) fn has_room(&self) -> bool {
        let entries = self.entries.iter().map(Entry::highest).max().unwrap_or(0);
        entries.max(self.seq.0).max(self.incarnation) <= MOST_WITH_ROOM
    }

    /// The length in blocks that the head at the start of `bytes` claims, unverified. `None` if there is no
    /// head.
    pub fn claimed_head_blocks(bytes: &[u8]) -> Option<usize> {
        let mut dec = Dec::new("log record", bytes);
        if dec.raw(4).ok()? != MAGIC {
            return None;
        }
        dec.raw(40).ok()?;
        dec.u16().ok().map(usize::from)
    }

    /// Decodes a head at the start of `bytes` (the rest of a segment). Does not verify the payload.
    pub fn decode(bytes: &[u8]) -> Result<(Self, RecordShape), DecodeError> {
        let (head, shape, raw) = Self::decode_without_entries(bytes)?;
        let entries = Self::decode_entries(raw)?;
        if entries.iter().map(|entry| entry.payload_crcs().len()).sum::<usize>()
            != shape.payload_blocks as usize
        {
            return Err(DecodeError::Bad { what: "log record", why: "entries and payload do not agree" });
        }
        Ok((Self { entries, ..head }, shape))
    }

    /// Decodes a whole head with an entry of a kind that this release does not know, without its entries, and
    /// names the kind. None for everything else.
    pub(crate) fn decode_unknown(bytes: &[u8]) -> Option<(Self, DecodeError)> {
        let (head, _, raw) = Self::decode_without_entries(bytes).ok()?;
        let error = Self::decode_entries(raw).err()?;
        matches!(error, DecodeError::Unknown { field: ENTRY_KIND, .. }).then_some((head, error))
    }

    fn decode_entries(raw: &[u8]) -> Result<Vec<Entry>, DecodeError> {
        let mut dec = Dec::new("log record entries", raw);
        let mut entries = Vec::new();
        while dec.left() > 0 {
            entries.push(Entry::decode(&mut dec)?);
        }
        Ok(entries)
    }

    /// Returns the head without its entries, the shape, and the bytes of the entries.
    fn decode_without_entries(bytes: &[u8]) -> Result<(Self, RecordShape, &[u8]), DecodeError> {
        let mut dec = Dec::new("log record", bytes);
        if dec.raw(4)? != MAGIC {
            return Err(dec.bad("wrong magic number"));
        }
        let (chain, array) = (dec.u32()?, ArrayId(dec.id()?));
        let (incarnation, seq, before) =
            (dec.counter_with_room()?, LogSeq(dec.counter_with_room()?), dec.u32()?);
        let (head_blocks, format) = (u32::from(dec.u16()?), dec.u16()?);
        let (durable, payload_blocks, entry_bytes) =
            (LogSeq(dec.counter_with_room()?), dec.u32()?, dec.u32()? as usize);
        let raw = dec.raw(entry_bytes)?;
        if crc32c(&bytes[8..HEADER_BYTES + entry_bytes]) != chain {
            return Err(dec.bad("checksum"));
        }
        dec.check_format(format, FORMAT)?;
        let total = (head_blocks as usize).saturating_add(payload_blocks as usize);
        if total > bytes.len() / BLOCK_BYTES || head_blocks as usize != self::head_blocks(entry_bytes) {
            return Err(dec.bad("lengths do not agree"));
        }
        let head = Self { array, incarnation, seq, chain: before, durable, entries: Vec::new() };
        Ok((head, RecordShape { head_blocks, payload_blocks, chain }, raw))
    }
}
