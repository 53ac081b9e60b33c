//! The header of a log segment: the part of the chain that the segment holds. Byte map: docs/format/log.md.

use super::{check_block, seal_block};
use penstock_base::{ArrayId, Buf, Dec, DecodeError, Enc, LogSeq};

const MAGIC: &[u8; 4] = b"PSEG";
const FORMAT: u32 = 2;

/// The header, in the first block of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The array.
    pub array: ArrayId,
    /// Number of the segment; each is one more than the one before. It lies at place `number % segments` of
    /// the log region.
    pub number: u64,
    /// Sequence of its first record.
    pub first_seq: LogSeq,
    /// Chain value before that record.
    pub chain: u32,
    /// The opening of the array that began the segment.
    pub incarnation: u64,
}

impl SegmentHeader {
    /// Encodes the header as one block.
    pub fn encode(&self) -> Buf {
        let mut enc = Enc::new();
        enc.raw(MAGIC).u32(0).u32(FORMAT).u32(self.chain).id(self.array.0).u64(self.number);
        enc.u64(self.first_seq.0).u64(self.incarnation);
        seal_block(&mut enc)
    }

    /// Decodes a header block.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        check_block("log segment header", MAGIC, bytes)?;
        let mut dec = Dec::new("log segment header", &bytes[8..]);
        let format = dec.u32()?;
        dec.check_format(format, FORMAT)?;
        let (chain, array, number) = (dec.u32()?, ArrayId(dec.id()?), dec.counter_with_room()?);
        let (first_seq, incarnation) = (LogSeq(dec.counter_with_room()?), dec.counter_with_room()?);
        dec.zeros("the rest of the block", dec.left())?;
        Ok(Self { array, number, first_seq, chain, incarnation })
    }
}
