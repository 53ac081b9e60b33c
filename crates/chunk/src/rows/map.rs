//! The value of a map row: the extents of a chunk. Byte map: docs/format/kv.md.

use penstock_base::num::to_u32;
use penstock_base::{Birth, Dec, DecodeError, Enc};

const FORMAT: u8 = 2;
/// The blocks are in allocation groups of this target.
const HERE: u8 = 0;
/// State of an extent with data, stored as written.
const DATA: u8 = 0;
/// State of a preallocated extent, which reads as zeros.
const PREALLOCATED: u8 = 1;
/// Added to the state of an extent that is older than its row: its birth follows.
const OLDER: u8 = 0x80;

/// A run of blocks of a chunk on the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First block in the chunk.
    pub first: u32,
    /// Number of blocks.
    pub count: u32,
    /// First block on the volume.
    pub block: u64,
    /// Preallocated: the blocks belong to the file, contain none of its data yet, and read as zeros.
    pub preallocated: bool,
    /// The moment at which the blocks were written. They are overwritten in place only if no snapshot has
    /// seen them.
    pub birth: Birth,
}

/// The map of a chunk whose blocks are on this target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapRow {
    /// The truncate generation of the file under which the row was written. A truncation removes only rows of
    /// earlier ones.
    pub truncations: u64,
    /// In order of their blocks, without overlap.
    pub extents: Vec<Extent>,
}

fn decode_head(dec: &mut Dec<'_>) -> Result<(u8, u64), DecodeError> {
    let format = dec.u8()?;
    dec.check_format(format, FORMAT)?;
    Ok((dec.u8()?, dec.counter()?))
}

impl MapRow {
    /// Encodes the value of a row of this birth.
    ///
    /// # Panics
    /// If an extent is younger than the row.
    pub fn encode(&self, birth: Birth) -> Vec<u8> {
        assert!(self.truncations >> 63 == 0, "a generation that can be read");
        let mut enc = Enc::new();
        enc.u8(FORMAT).u8(HERE).u64(self.truncations).u32(to_u32(self.extents.len()));
        for extent in &self.extents {
            assert!(extent.birth <= birth, "{extent:?} is younger than its row, {birth:?}");
            let state = if extent.preallocated { PREALLOCATED } else { DATA };
            enc.u32(extent.first).u32(extent.count).u64(extent.block);
            match extent.birth < birth {
                true => enc.u8(state | OLDER).u64(extent.birth.0),
                false => enc.u8(state),
            };
        }
        enc.finish()
    }

    /// Decodes the value of a row of this birth. Fails if extents overlap, are out of order, or have an end
    /// that overflows, and with [`DecodeError::Unknown`] if the blocks are somewhere else.
    pub fn decode(value: &[u8], birth: Birth) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("map row", value);
        let (place, truncations) = decode_head(&mut dec)?;
        dec.check_known("place of a chunk", place, HERE)?;
        let count = dec.u32()?;
        let mut extents: Vec<Extent> = Vec::new();
        for _ in 0..count {
            let extent = Self::decode_extent(&mut dec, birth)?;
            if extents.last().is_some_and(|last| last.first + last.count > extent.first) {
                return Err(dec.bad("extents overlap"));
            }
            extents.push(extent);
        }
        dec.end()?;
        Ok(Self { truncations, extents })
    }

    fn decode_extent(dec: &mut Dec<'_>, of_row: Birth) -> Result<Extent, DecodeError> {
        let (first, count, block, state) = (dec.u32()?, dec.u32()?, dec.u64()?, dec.u8()?);
        let birth = if state & OLDER != 0 { Birth(dec.u64()?) } else { of_row };
        let preallocated = match state & !OLDER {
            DATA => false,
            PREALLOCATED => true,
            _ => return Err(dec.unknown("state of an extent", state.into())),
        };
        if state & OLDER != 0 && birth >= of_row {
            return Err(dec.bad("an extent that is not older than its row"));
        }
        if first.checked_add(count).is_none() || block.checked_add(count.into()).is_none() {
            return Err(dec.bad("an extent without an end"));
        }
        Ok(Extent { first, count, block, preallocated, birth })
    }
}
