//! Space of files: preallocate, zero and punch ranges.

use crate::blocks::{BLOCK, Blocks};
use crate::direct::{Contents, Unseen};
use crate::session::Errand;
use crate::writer::{Staged, TRUNCATIONS_MOST, Writer};
use penstock_base::num::to_usize;
use penstock_base::{ErrorKind, MAX_FILE_BYTES};
use penstock_wire::Failure;
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::SetAttrRequest;
use std::ops::Range;

impl Writer<'_> {
    /// Changes the space of a range of bytes that is not empty and in a file. Writing to preallocated space
    /// needs no further space, even after a restart, once the file is synced. The size stays with
    /// `keep_size`, and always when punching. If the kernel may have pages from before it, the caller gets an
    /// [`Unseen`].
    pub async fn change_space(
        &self,
        range: Range<u64>,
        change: SpaceChange,
        keep_size: bool,
    ) -> Result<Option<Unseen>, Failure> {
        assert!(range.start < range.end && range.end <= MAX_FILE_BYTES, "{range:?} is in a file");
        let Blocks { session, file } = self.blocks;
        let (offset, end) = (range.start, range.end);
        let mut attempt = 1;
        let size = loop {
            let (known, generation) = (session.state(file).await?, session.restarts().generation());
            let size = known.borrow().size();
            match self.change_within(offset..end, change, size).await {
                // The answer of another start of the service means nothing to this one.
                Err(_) if generation != session.restarts().generation() && !session.is_over() => continue,
                Err(failure) if failure.kind == ErrorKind::RefreshMap && attempt < TRUNCATIONS_MOST => {
                    known.borrow_mut().make_stale();
                    attempt += 1;
                    continue;
                }
                result => result?,
            }
            let mut state = known.borrow_mut();
            // Acknowledged under one start of the service; otherwise repeated.
            if generation == session.restarts().generation() && !state.is_stale() {
                state.changed(session.now());
                break size;
            }
        };
        let zeroed = change != SpaceChange::Reserve && session.direct().may_be_read(file, &(offset..end));
        let unseen = zeroed.then(|| session.direct().note_write(file, offset..end, Contents::Zeros));
        if !keep_size && change != SpaceChange::Punch && end > size {
            let request = SetAttrRequest { ino: file.ino.0, ..SetAttrRequest::default() };
            self.resize(request, end).await?;
        }
        Ok(unseen)
    }

    /// Changes the space of a range of a file of `size` bytes. The size stays.
    async fn change_within(&self, range: Range<u64>, change: SpaceChange, size: u64) -> Result<(), Failure> {
        let (offset, end) = (range.start, range.end);
        if change != SpaceChange::Punch {
            self.change_blocks(offset / BLOCK..end.div_ceil(BLOCK), SpaceChange::Reserve).await?;
        }
        if change != SpaceChange::Reserve {
            let inner = inner_blocks(range, size);
            // The rest of the range lies in blocks that it covers only in part.
            let (head, tail) = (offset..end.min(inner.start * BLOCK), offset.max(inner.end * BLOCK)..end);
            if !inner.is_empty() {
                self.change_blocks(inner, change).await?;
            }
            for part in [head, tail] {
                self.zero_bytes(part.start..part.end.min(size)).await?;
            }
        }
        Ok(())
    }

    async fn change_blocks(&self, blocks: Range<u64>, change: SpaceChange) -> Result<(), Failure> {
        let Blocks { session, file } = self.blocks;
        let state = session.state(file).await?.borrow().clone();
        session.kept().room().await?;
        session.send_space(Errand::Usual, (file, &state), change, blocks.clone()).await?;
        session.kept().add_space((file, state.truncations()), change, blocks);
        Ok(())
    }

    /// Writes zeros over the range, which is in at most two blocks. Does nothing if it reads as zeros
    /// already, so that holes stay holes.
    async fn zero_bytes(&self, bytes: Range<u64>) -> Result<(), Failure> {
        if bytes.is_empty() {
            return Ok(());
        }
        let len = bytes.end - bytes.start;
        assert!(len <= 2 * BLOCK, "whole blocks are zeroed without a write");
        let found = self.blocks.read_bytes(bytes.start, len).await?;
        if found.iter().all(|part| part.iter().all(|byte| *byte == 0)) {
            return Ok(());
        }
        self.write(bytes.start, Staged::of(bytes.start, &vec![0; to_usize(len)])).await
    }
}

/// Returns the blocks that a range covers completely; bytes behind the end of the file need not be covered.
/// If the result is empty, the range lies in one block, or in two that are both kept.
fn inner_blocks(bytes: Range<u64>, size: u64) -> Range<u64> {
    let until = bytes.end / BLOCK;
    let until = if bytes.end >= size { until.max(size.div_ceil(BLOCK)) } else { until };
    bytes.start.div_ceil(BLOCK)..until
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_block_of_a_file_is_covered_up_to_its_end() {
        for (bytes, size, wanted) in [
            (0..4096, 10_000, 0..1),
            (1..8192, 10_000, 1..2),
            (100..4096, 10_000, 1..1),
            (4000..4200, 10_000, 1..1),
            (4096..10_000, 10_000, 1..3),
            (4096..9_999, 10_000, 1..2),
            (8192..50_000, 10_000, 2..12),
            (10_000..20_000, 10_000, 3..4),
        ] {
            assert_eq!(inner_blocks(bytes.clone(), size), wanted, "{bytes:?} of {size}");
        }
    }
}
