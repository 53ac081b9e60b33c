//! Parts of strips: columns that were read, with their checksums, or the reason why they cannot be used.

use crate::place::Position;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, HashMap, ZERO_BLOCK_CRC, crc32c};
use penstock_raid::{Checksums, DecodePlan, Residency, SourceCrcs};
use std::ops::Range;

/// The checksum of a block that could not be made when its strip was. The block is zeros, so that it does not
/// verify and counts as an erasure. A block that verifies may have it by chance.
const LOST_CRC: u32 = !ZERO_BLOCK_CRC;

/// Columns of a strip.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) data: Buf,
    /// CRC32C of each column, by the trailer.
    pub(crate) crcs: Vec<u32>,
}

/// Why columns of a strip cannot be used.
#[derive(Clone, Debug)]
pub(crate) enum Erased {
    /// The member is not there, or did not answer.
    Unreachable,
    /// The trailer is bad, or of another version: the whole strip counts as lost.
    Strip,
    /// The trailer is good and some columns do not agree with it.
    Blocks {
        /// All columns that were read, with the trailer's checksums.
        part: Part,
        /// The bad columns, relative to the part.
        bad: Vec<usize>,
    },
}

/// The same columns of several strips.
pub(crate) type Found = HashMap<Position, Result<Part, Erased>>;

impl Part {
    /// Columns that could not be made.
    pub(crate) fn lost(columns: usize) -> Self {
        Self { data: Buf::zeroed(columns * BLOCK_BYTES), crcs: vec![LOST_CRC; columns] }
    }

    /// The columns that are marked as lost.
    pub(crate) fn lost_columns(&self) -> Vec<usize> {
        let blocks = self.data.chunks_exact(BLOCK_BYTES).zip(&self.crcs).enumerate();
        let is_lost = |(block, crc): (&[u8], &u32)| *crc == LOST_CRC && crc32c(block) != LOST_CRC;
        blocks.filter(|(_, column)| is_lost(*column)).map(|(at, _)| at).collect()
    }

    /// True if columns that were made have the checksums of these, but for those that were lost then or are
    /// lost now.
    pub(crate) fn agrees_with(&self, made: &Part) -> bool {
        assert_eq!(self.crcs.len(), made.crcs.len(), "the same columns");
        if self.crcs == made.crcs {
            return true;
        }
        let lost = [self.lost_columns(), made.lost_columns()].concat();
        (0..made.crcs.len()).all(|at| self.crcs[at] == made.crcs[at] || lost.contains(&at))
    }

    /// Part of an unproved strip, proved: every column agrees with its checksum.
    pub(crate) fn prove(self) -> Result<Self, Erased> {
        match self.bad_columns() {
            bad if bad.is_empty() => Ok(self),
            bad => Err(Erased::Blocks { part: self, bad }),
        }
    }

    pub(super) fn bad_columns(&self) -> Vec<usize> {
        assert_eq!(self.data.len(), self.crcs.len() * BLOCK_BYTES, "a checksum for each column");
        let blocks = self.data.chunks_exact(BLOCK_BYTES).zip(&self.crcs).enumerate();
        blocks.filter(|(_, (block, crc))| crc32c(block) != **crc).map(|(at, _)| at).collect()
    }

    /// The same part with some columns of another one.
    pub(crate) fn with_columns_of(self, other: &Part, columns: &[usize]) -> Self {
        assert_eq!(self.crcs.len(), other.crcs.len(), "the same columns");
        let (mut data, mut crcs) = (BufMut::zeroed(self.data.len()), self.crcs);
        data.as_mut().copy_from_slice(&self.data);
        for column in columns {
            let bytes = column * BLOCK_BYTES..(column + 1) * BLOCK_BYTES;
            data.as_mut()[bytes.clone()].copy_from_slice(&other.data[bytes]);
            crcs[*column] = other.crcs[*column];
        }
        Self { data: data.freeze(), crcs }
    }

    /// Some of the columns, relative to the part.
    pub(crate) fn columns(&self, columns: Range<usize>) -> Self {
        Self {
            data: self.data.slice(columns.start * BLOCK_BYTES..columns.end * BLOCK_BYTES),
            crcs: self.crcs[columns].to_vec(),
        }
    }
}

/// Bytes of these columns.
pub(super) fn bytes_of(columns: &Range<u32>) -> usize {
    columns.len() * BLOCK_BYTES
}

/// After a combined pass that verifies and codes fails, keeps the strips that verify alone and those that
/// were unreachable. Corrupt ones are dropped, so that the next reader reads them again and reports them.
pub(crate) fn parts_to_keep(positions: &[Position], parts: Vec<Result<Part, Erased>>) -> Found {
    let keep = |part: &Result<Part, Erased>| match part {
        Ok(part) => part.bad_columns().is_empty(),
        Err(erased) => matches!(erased, Erased::Unreachable),
    };
    positions.iter().copied().zip(parts).filter(|(_, part)| keep(part)).collect()
}

/// New strips of `columns` blocks each, with the checksums that `code` makes beside them.
pub(super) fn make_parts(
    count: usize,
    columns: usize,
    code: impl FnOnce(&mut [&mut [u8]], &mut [u32]),
) -> Vec<Part> {
    let mut made: Vec<BufMut> = (0..count).map(|_| BufMut::recycled(columns * BLOCK_BYTES)).collect();
    let mut crcs = vec![0; count * columns];
    code(&mut made.iter_mut().map(AsMut::as_mut).collect::<Vec<_>>(), &mut crcs);
    let parts = made.into_iter().zip(crcs.chunks(columns.max(1)));
    parts.map(|(data, crcs)| Part { data: data.freeze(), crcs: crcs.to_vec() }).collect()
}

/// The strips that a plan makes of its sources, `columns` blocks of each, with checksums.
pub(super) fn make(
    plan: &DecodePlan,
    sources: &[&[u8]],
    columns: usize,
    source_crcs: SourceCrcs<'_>,
) -> Vec<Part> {
    make_parts(plan.lost().len(), columns, |made, crcs| {
        let checksums = Checksums { sources: source_crcs, outputs: crcs };
        plan.decode_with(sources, made, Residency::Warm, Some(checksums));
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    fn part(crcs: &[u32]) -> Part {
        Part { data: Buf::zeroed(crcs.len() * BLOCK_BYTES), crcs: crcs.to_vec() }
    }

    #[test]
    fn columns_are_proved_one_by_one() {
        assert!(part(&[ZERO_BLOCK_CRC; 3]).prove().is_ok());
        match part(&[ZERO_BLOCK_CRC, 1, ZERO_BLOCK_CRC, 2]).prove() {
            Err(Erased::Blocks { bad, part }) => assert_eq!((bad, part.crcs.len()), (vec![1, 3], 4)),
            other => panic!("{other:?}"),
        }
        assert_eq!(part(&[1, 2, 3]).columns(1..3).crcs, [2, 3]);
    }

    #[test]
    fn lost_columns_do_not_verify_and_agree_with_what_is_made_later() {
        match Part::lost(2).prove() {
            Err(Erased::Blocks { bad, part }) => {
                assert_eq!((&bad, &part.lost_columns()), (&vec![0, 1], &bad))
            }
            other => panic!("{other:?}"),
        }
        let agree = |one: &[u32], other: &[u32]| part(one).agrees_with(&part(other));
        assert!(agree(&[LOST_CRC, 5], &[7, 5]) && agree(&[7, 5], &[LOST_CRC, 5]));
        assert!(!agree(&[4, LOST_CRC], &[5, 5]));
    }

    #[test]
    fn corrupt_strips_are_read_again_and_others_are_not() {
        let positions = [0, 1, 2, 3].map(Position::new);
        let parts =
            vec![Ok(part(&[ZERO_BLOCK_CRC])), Ok(part(&[1])), Err(Erased::Unreachable), Err(Erased::Strip)];
        let kept = parts_to_keep(&positions, parts);
        let mut kept: Vec<usize> = kept.keys().map(|position| position.index()).collect();
        kept.sort_unstable();
        assert_eq!(kept, [0, 2]);
    }
}
