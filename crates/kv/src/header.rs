//! The header of the key-value volume: the lengths of the journal and of redb's file. Byte map:
//! docs/format/kv.md.
//!
//! Public for the fuzzer and for tools that inspect a volume. Nothing else outside this crate reads it.

use penstock_base::{BLOCK_BYTES, Dec, DecodeError, Enc, crc32c};

const MAGIC: &[u8; 8] = b"PENKVVOL";
const FORMAT: u32 = 2;
const CRC_AT: usize = 8;
const COVERED: std::ops::Range<usize> = 12..40;

/// The contents of block 0 of the volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeHeader {
    /// Length of redb's file in bytes. It may exceed the volume.
    pub len: u64,
    /// The longest length that the file ever had, in bytes.
    pub longest: u64,
    /// Blocks of the journal, which lies before the file.
    pub journal_blocks: u64,
}

impl VolumeHeader {
    /// The header's 40 bytes. Zeros fill the rest of the block.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.raw(MAGIC).u32(0).u32(FORMAT).u64(self.len).u64(self.longest).u64(self.journal_blocks);
        let crc = crc32c(&enc.as_slice()[COVERED]);
        enc.set_u32(CRC_AT, crc);
        enc.finish()
    }

    /// Reads block 0. A block of zeros is an empty file without a journal.
    pub fn decode(block: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("key-value volume header", block);
        if block.len() == BLOCK_BYTES && block.iter().all(|byte| *byte == 0) {
            return Ok(Self::default());
        }
        if dec.raw(8)? != MAGIC {
            return Err(dec.bad("wrong magic number"));
        }
        let crc = dec.u32()?;
        let (format, len, longest) = (dec.u32()?, dec.u64()?, dec.u64()?);
        let journal_blocks = dec.counter()?;
        dec.zeros("field behind the header", dec.left())?;
        if crc32c(&block[COVERED]) != crc {
            return Err(dec.bad("checksum"));
        }
        if len > longest {
            return Err(dec.bad("a length above the longest"));
        }
        match format {
            FORMAT => Ok(Self { len, longest, journal_blocks }),
            other => Err(dec.unknown("format", other.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes on the volume. If they change, the format must have a new number.
    #[test]
    fn the_header_is_as_in_the_first_release() {
        let header = VolumeHeader { len: 1 << 20, longest: 4 << 20, journal_blocks: 60 };
        let hex: String = header.encode().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "50454e4b56564f4cba9812c202000000000010000000000000004000000000003c00000000000000");
        let mut block = header.encode();
        block.resize(BLOCK_BYTES, 0);
        assert_eq!(VolumeHeader::decode(&block), Ok(header));
        for bit in 0..40 * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert!(VolumeHeader::decode(&block).is_err(), "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(VolumeHeader::decode(&[0; BLOCK_BYTES]), Ok(VolumeHeader::default()));
        assert!(
            VolumeHeader::decode(&VolumeHeader { len: 2, longest: 1, journal_blocks: 1 }.encode()).is_err()
        );
    }
}
