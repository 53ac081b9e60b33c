//! Keys of chunks that this target keeps for another one, whose map row has a [`super::Forward`] in their
//! place. This release makes none. Their values are map rows.

use super::{ChunkKey, FOREIGN};
use penstock_base::codec::{row_key, row_words};
use penstock_base::{Birth, DecodeError, FileId};

/// A chunk that this target keeps for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForeignKey {
    /// The target whose map row names the chunk.
    pub home: u32,
    /// The chunk.
    pub chunk: ChunkKey,
    /// The birth of the map row that names it.
    pub birth: Birth,
    /// The number in that row. It is never given again.
    pub number: u64,
}

impl ForeignKey {
    /// The row's key.
    pub fn row(&self) -> Vec<u8> {
        let ChunkKey { file, index } = self.chunk;
        let birth = self.birth.suffix();
        row_key(FOREIGN, &[self.home.into(), file.branch.0, file.ino.0, index, birth, self.number])
    }

    /// Decodes a row's key.
    pub fn decode(key: &[u8]) -> Result<Self, DecodeError> {
        let what = "key of another target's chunk";
        let [home, branch, ino, index, birth, number] = row_words(what, FOREIGN, key)?;
        let home = u32::try_from(home).map_err(|_| DecodeError::Bad { what, why: "a target above 2^32" })?;
        let chunk = ChunkKey { file: FileId::of_numbers(branch, ino), index };
        Ok(Self { home, chunk, birth: Birth::of_suffix(birth), number })
    }
}
