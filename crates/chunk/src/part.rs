//! A range of blocks of a file, in the chunks that a target has of it.

use penstock_base::Share;
use std::ops::Range;

/// Blocks of a file, in the chunks of a share. A range alone means all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The blocks, counted from the start of the file.
    pub blocks: Range<u64>,
    /// The chunks that count. Blocks in others are not meant.
    pub share: Share,
}

impl From<Range<u64>> for Part {
    fn from(blocks: Range<u64>) -> Self {
        Self { blocks, share: Share::ALL }
    }
}

impl Part {
    /// The number of its blocks, with chunks of `per_chunk` blocks.
    pub(crate) fn len(&self, per_chunk: u32) -> u64 {
        self.share.blocks_within(&self.blocks, per_chunk)
    }

    /// The indices of the chunks with its blocks.
    pub(crate) fn chunks(&self, per_chunk: u32) -> impl Iterator<Item = u64> + use<> {
        let per_chunk = u64::from(per_chunk);
        self.share.within(self.blocks.start / per_chunk..self.blocks.end.div_ceil(per_chunk))
    }
}
