//! A page of the stripe table's index. Byte map: docs/format/stripe-table.md.
//!
//! An index page names the pages below it: where the committed copy of each lies, and the CRC that it must
//! have. The root names the topmost one. So the root proves the whole table, and an older copy of a page
//! never passes for the newest one.

use super::{check_block, seal_block};
use penstock_base::num::to_u16;
use penstock_base::{ArrayId, BLOCK_BYTES, Buf, Dec, DecodeError, Enc, crc32c};
use penstock_raid::MAX_STRIPS;

const MAGIC: &[u8; 4] = b"PTBX";
const FORMAT: u16 = 1;
const HEADER_BYTES: usize = 48;
const REF_BYTES: usize = 24;

/// Pages that one index page names.
pub const REFS_PER_PAGE: u64 = ((BLOCK_BYTES - HEADER_BYTES) / REF_BYTES) as u64;

/// Names the committed copy of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRef {
    /// The checkpoint that wrote it.
    pub checkpoint: u64,
    /// Written stripes in the page, or below it. There is no page without any.
    pub written: u64,
    /// The CRC32C in the page's own header.
    pub crc: u32,
    /// Its place, 0 or 1.
    pub place: u8,
    /// The most strips that are stale in one of these stripes.
    pub most_stale: u8,
    /// A strip of these stripes is in a spare place.
    pub has_moves: bool,
}

impl PageRef {
    /// No page: none of its stripes is written.
    pub const NONE: Self =
        Self { checkpoint: 0, written: 0, crc: 0, place: 0, most_stale: 0, has_moves: false };

    /// True if there is no page.
    pub fn is_none(&self) -> bool {
        self.written == 0
    }

    /// True if a block is the named copy of the page.
    pub(crate) fn names(&self, block: &[u8]) -> bool {
        // Both kinds of pages have their checkpoint there.
        let is_of_checkpoint = block.get(32..40) == Some(&self.checkpoint.to_le_bytes());
        let says_so = block.get(4..8) == Some(&self.crc.to_le_bytes());
        !self.is_none() && is_of_checkpoint && says_so && crc32c(&block[8..]) == self.crc
    }

    pub(crate) fn encode(&self, enc: &mut Enc) {
        enc.u64(self.checkpoint).u64(self.written).u32(self.crc);
        enc.u8(self.place).u8(self.most_stale).u8(self.has_moves.into()).u8(0);
    }

    pub(crate) fn decode(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let (checkpoint, written, crc) = (dec.counter_with_room()?, dec.counter_with_room()?, dec.u32()?);
        let (place, most_stale, moves, zero) = (dec.u8()?, dec.u8()?, dec.u8()?, dec.u8()?);
        let found = Self { checkpoint, written, crc, place, most_stale, has_moves: moves == 1 };
        let is_sound = place < 2 && usize::from(most_stale) <= MAX_STRIPS && moves < 2 && zero == 0;
        match is_sound && (!found.is_none() || found == Self::NONE) {
            true => Ok(found),
            false => Err(dec.bad("a reference to a page that there cannot be")),
        }
    }
}

/// A page of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexPage {
    /// The array.
    pub array: ArrayId,
    /// Number of the page, counted on from those of the table.
    pub index: u64,
    /// The checkpoint that wrote it.
    pub checkpoint: u64,
    /// 1 if it names pages of the table, and one more than the level of the pages that it names otherwise.
    pub level: u8,
    /// The pages below it, in their order.
    pub refs: Vec<PageRef>,
}

impl IndexPage {
    /// Encodes the page as one block.
    pub fn encode(&self) -> Buf {
        assert!(self.refs.len() as u64 <= REFS_PER_PAGE, "{} references in a page", self.refs.len());
        let mut enc = Enc::new();
        enc.raw(MAGIC).u32(0).id(self.array.0).u64(self.index).u64(self.checkpoint);
        enc.u16(FORMAT).u8(self.level).u8(0).u16(to_u16(self.refs.len())).u16(0);
        assert_eq!(enc.len(), HEADER_BYTES);
        self.refs.iter().for_each(|page| page.encode(&mut enc));
        seal_block(&mut enc)
    }

    /// Decodes a page's block.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        check_block("stripe index page", MAGIC, bytes)?;
        let mut dec = Dec::new("stripe index page", &bytes[8..]);
        let (array, index, checkpoint) =
            (ArrayId(dec.id()?), dec.counter_with_room()?, dec.counter_with_room()?);
        let format = dec.u16()?;
        dec.check_format(format, FORMAT)?;
        let (level, zero, count, also_zero) = (dec.u8()?, dec.u8()?, dec.u16()?, dec.u16()?);
        if level == 0 || zero != 0 || also_zero != 0 || u64::from(count) > REFS_PER_PAGE {
            return Err(dec.bad("no header of an index page"));
        }
        let refs = (0..count).map(|_| PageRef::decode(&mut dec)).collect::<Result<_, _>>()?;
        dec.zeros("the rest of the block", dec.left())?;
        Ok(Self { array, index, checkpoint, level, refs })
    }
}

/// The reference that names these pages together, but for the copy of the page in which they stand.
pub(crate) fn sum(refs: &[PageRef]) -> PageRef {
    refs.iter().fold(PageRef::NONE, |all, page| PageRef {
        written: all.written.saturating_add(page.written),
        most_stale: all.most_stale.max(page.most_stale),
        has_moves: all.has_moves || page.has_moves,
        ..all
    })
}

/// The place that does not hold the named copy.
pub(crate) fn other_place(page: PageRef) -> u8 {
    u8::from(!page.is_none() && page.place == 0)
}
