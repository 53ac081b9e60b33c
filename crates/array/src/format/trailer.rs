//! The trailer: the last block of a strip, which identifies and verifies it. Byte map: docs/format/strip.md.
//!
//! Its contents lie in its first sectors under a CRC of their own. For strips of up to 116 blocks that is one
//! sector, which a power cut leaves whole.

use penstock_base::num::to_u32;
use penstock_base::{ArrayId, Buf, BufMut, Dec, DecodeError, Enc, Stripe, Version, crc32c_append};

const MAGIC: &[u8; 4] = b"PTRL";
const FORMAT: u16 = 1;
const CRC_AT: usize = 44;
const CRCS_AT: usize = 48;
#[allow(clippy::cast_possible_truncation)]
/// The most blocks in a strip: as many as one trailer has space for checksums.
pub const MAX_STRIP_BLOCKS: u32 = ((penstock_base::BLOCK_BYTES - CRCS_AT) / 4) as u32;

/// Identity, version and checksums of a strip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// The array.
    pub array: ArrayId,
    /// The stripe.
    pub stripe: Stripe,
    /// Position in the stripe: data strips first, then parity.
    pub position: u16,
    /// The strip is valid only if the stripe table has this version for it.
    pub version: Version,
    /// CRC32C of each block of the strip.
    pub crcs: Vec<u32>,
}

impl Trailer {
    /// Encodes the trailer as one block.
    pub fn encode(&self) -> Buf {
        assert!(self.crcs.len() <= MAX_STRIP_BLOCKS as usize, "{} checksums have no room", self.crcs.len());
        let mut enc = Enc::new();
        enc.raw(MAGIC).u16(FORMAT).u16(self.position).id(self.array.0).u64(self.stripe.0).u64(self.version.0);
        enc.u32(to_u32(self.crcs.len())).u32(0);
        self.crcs.iter().for_each(|crc| {
            enc.u32(*crc);
        });
        let crc = crc32c_append([&enc.as_slice()[..CRC_AT], &enc.as_slice()[CRCS_AT..]]);
        enc.set_u32(CRC_AT, crc);
        BufMut::padded_from(enc.as_slice()).freeze()
    }

    /// Decodes a trailer block. The caller compares array, stripe, position and version with what it expects.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("trailer", bytes);
        if dec.raw(4)? != MAGIC {
            return Err(dec.bad("wrong magic number"));
        }
        let (format, position) = (dec.u16()?, dec.u16()?);
        let (array, stripe, version) = (ArrayId(dec.id()?), Stripe(dec.u64()?), Version(dec.u64()?));
        let (count, crc) = (dec.u32()?, dec.u32()?);
        if count > MAX_STRIP_BLOCKS {
            return Err(dec.bad("too many blocks"));
        }
        let raw = dec.raw(count as usize * 4)?;
        if crc32c_append([&bytes[..CRC_AT], raw]) != crc {
            return Err(dec.bad("checksum"));
        }
        dec.check_format(format, FORMAT)?;
        let crcs = raw.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        Ok(Self { array, stripe, position, version, crcs: crcs.collect() })
    }
}
