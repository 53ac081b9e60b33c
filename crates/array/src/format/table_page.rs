//! A page of the stripe table. Byte map: docs/format/stripe-table.md.
//!
//! Every entry has the same size, so that a checkpoint has space for the worst case: a stale mask, the strips
//! in spare places, and one version per strip. A stripe is unwritten when all its versions are 0; no strip is
//! ever given version 0.

use super::{check_block, seal_block};
use crate::moves::Moves;
use crate::place::Positions;
use penstock_base::num::to_u32;
use penstock_base::{ArrayId, BLOCK_BYTES, Buf, Dec, DecodeError, Enc};
use penstock_raid::MAX_STRIPS;

const MAGIC: &[u8; 4] = b"PTBL";
const FORMAT: u16 = 2;
const HEADER_BYTES: usize = 48;

/// Pages that one I/O of 1 MiB reads or writes.
pub(crate) const PAGES_IN_A_PIECE: u64 = 256;

/// Entries in one page for stripes of `strips` strips.
pub fn entries_per_page(strips: usize) -> usize {
    (BLOCK_BYTES - HEADER_BYTES) / entry_bytes(strips)
}

/// Words of an entry: the stale mask, two words of moves, and versions.
pub(crate) const fn entry_words(strips: usize) -> usize {
    3 + strips
}

fn entry_bytes(strips: usize) -> usize {
    8 * entry_words(strips)
}

/// The entry of a stripe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableEntry {
    /// Strips that are not valid.
    pub stale: Positions,
    /// Strips in spare places.
    pub moves: Moves,
    /// The version of each strip; 0 for all of an unwritten stripe.
    pub versions: Vec<u64>,
}

/// A page of the stripe table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePage {
    /// The array.
    pub array: ArrayId,
    /// Number of the page.
    pub index: u64,
    /// The checkpoint that wrote it.
    pub checkpoint: u64,
    /// Strips in a stripe.
    pub strips: u16,
    /// The entries, in order of their stripes: for each a stale mask, the words of its moves, then the
    /// version of each strip.
    pub words: Vec<u64>,
}

impl TablePage {
    /// Encodes the page as one block.
    pub fn encode(&self) -> Buf {
        let mut enc = Enc::new();
        enc.raw(MAGIC).u32(0).id(self.array.0).u64(self.index).u64(self.checkpoint);
        enc.u16(self.strips).u16(FORMAT).u32(to_u32(self.words.len()));
        assert_eq!(enc.len(), HEADER_BYTES);
        self.words.iter().for_each(|word| {
            enc.u64(*word);
        });
        seal_block(&mut enc)
    }

    /// The entry at an index; none if the page has no such entry.
    pub fn entry(&self, at: usize) -> Option<TableEntry> {
        let words = self.words.chunks_exact(entry_words(self.strips.into())).nth(at)?;
        let moves = Moves::of_words(words[1], words[2])?;
        Some(TableEntry { stale: Positions::from_bits(words[0]), moves, versions: words[3..].to_vec() })
    }

    /// Decodes a page's block.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        check_block("stripe table page", MAGIC, bytes)?;
        let mut dec = Dec::new("stripe table page", &bytes[8..]);
        let (array, index, checkpoint) =
            (ArrayId(dec.id()?), dec.counter_with_room()?, dec.counter_with_room()?);
        let (strips, format, count) = (dec.u16()?, dec.u16()?, dec.u32()?);
        dec.check_format(format, FORMAT)?;
        let words: Vec<u64> = (0..count).map(|_| dec.u64()).collect::<Result<_, _>>()?;
        dec.zeros("the rest of the block", dec.left())?;
        if !(1..=MAX_STRIPS).contains(&usize::from(strips)) {
            return Err(dec.unknown("strips", strips.into()));
        }
        let len = entry_words(strips.into());
        let beyond = !(u64::MAX >> (MAX_STRIPS - usize::from(strips)));
        let is_sound = |entry: &[u64]| {
            entry.len() == len
                && (entry[0] | entry[1]) & beyond == 0
                && Moves::of_words(entry[1], entry[2]).is_some()
        };
        if !words.chunks(len).all(is_sound) {
            return Err(dec.bad("entries that are not of so many strips"));
        }
        Ok(Self { array, index, checkpoint, strips, words })
    }
}
