//! Reads and writes of whole blocks of a file.

use crate::file_state::FileState;
use crate::session::{Errand, Session};
use futures_util::future::join_all;
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, ErrorKind, FileId, MAX_FILE_BYTES, Piece, Span};
use penstock_wire::Failure;
use penstock_wire::data::ChunkRef;

pub(crate) const BLOCK: u64 = BLOCK_BYTES as u64;
const EFBIG: u16 = 27;

/// The blocks of one file, for a caller that owns its lease and its I/O lock.
pub(crate) struct Blocks<'a> {
    pub(crate) session: &'a Session,
    pub(crate) file: FileId,
}

impl Blocks<'_> {
    /// Reads up to `len` bytes at `offset`; fewer at the end of the file. The bytes are returned as runs, in
    /// order.
    pub(crate) async fn read_bytes(&self, offset: u64, len: u64) -> Result<Vec<Buf>, Failure> {
        // A file that was made again in a restart may lie on other targets.
        let read = self.session.under_one_start(async || {
            let state = self.session.state(self.file).await?.borrow().clone();
            let end = state.size().min(offset.saturating_add(len));
            if offset >= end {
                return Ok(None);
            }
            let (first, last) = (offset / BLOCK, end.div_ceil(BLOCK));
            assert!(first < last, "{offset}..{end} has a byte");
            Ok(Some((end, first, self.read(&state, first, last - first).await?)))
        });
        let Some((end, first, parts)) = read.await? else { return Ok(Vec::new()) };
        let parts = trim(parts, to_usize(offset - first * BLOCK), to_usize(end - offset));
        assert_eq!(
            parts.iter().map(|part| part.len() as u64).sum::<u64>(),
            end - offset,
            "all bytes are there"
        );
        Ok(parts)
    }

    /// Reads whole blocks. The volume verified them; between processes the transport verifies them again.
    async fn read(&self, state: &FileState, first: u64, count: u64) -> Result<Vec<Buf>, Failure> {
        let truncations = state.truncations();
        let read = async |Piece { unit: chunk, blocks }: Piece| {
            let (block, count) = (blocks.start, blocks.end - blocks.start);
            let request = ChunkRef { ino: self.file.ino, chunk, block, count, truncations };
            let (target, branch) = (state.spread().target_of(chunk), self.file.branch);
            let (crcs, payload) = self.session.read_at(target, branch, &request).await?;
            let found = payload.iter().map(Buf::len).sum::<usize>();
            match found == count as usize * BLOCK_BYTES && crcs.len() == count as usize {
                true => Ok(payload),
                false => Err(Failure::new(
                    ErrorKind::Internal,
                    format!("a reply of {found} bytes to a read of {count} blocks"),
                )),
            }
        };
        let reads = Span { first, count }.pieces(state.chunk_blocks()).into_iter().map(read);
        let parts: Vec<Vec<Buf>> = join_all(reads).await.into_iter().collect::<Result<_, _>>()?;
        Ok(parts.into_iter().flatten().collect())
    }

    /// Returns the contents of one block, with zeros behind the end of the file.
    pub(crate) async fn read_one(&self, state: &FileState, block: u64) -> Result<BufMut, Failure> {
        let mut whole = BufMut::zeroed(BLOCK_BYTES);
        let inside = state.size().saturating_sub(block * BLOCK).min(BLOCK) as usize;
        if inside > 0 {
            let found = penstock_base::buf::gather(&self.read(state, block, 1).await?);
            whole.as_mut()[..inside].copy_from_slice(&found[..inside]);
        }
        Ok(whole)
    }

    /// Writes whole blocks.
    pub(crate) async fn write(&self, state: &FileState, first: u64, data: &Buf) -> Result<(), Failure> {
        let Self { session, file } = *self;
        session.kept().room().await?;
        session.send_blocks(Errand::Usual, (file, state), first, data).await?;
        session.kept().add_blocks((file, state.truncations()), first, data);
        Ok(())
    }

    /// Zeroes the bytes of the last block behind the end of the file, before the file grows over them.
    pub(crate) async fn zero_tail(&self, state: &FileState) -> Result<(), Failure> {
        let block = state.size() / BLOCK;
        let whole = self.read_one(state, block).await?;
        self.write(state, block, &whole.freeze()).await
    }
}

/// Returns the end of `len` bytes at `offset`. Fails with EFBIG if it is above the maximum file size.
pub(crate) fn end_of(offset: u64, len: u64) -> Result<u64, Failure> {
    offset.checked_add(len).filter(|end| *end <= MAX_FILE_BYTES).ok_or(Failure {
        kind: ErrorKind::Invalid,
        errno: EFBIG,
        message: "file too large".into(),
    })
}

/// Copies bytes for `offset` into whole blocks, with zeros around them.
pub fn stage(offset: u64, data: &[u8]) -> BufMut {
    let skip = (offset % BLOCK) as usize;
    let end = skip + data.len();
    let mut staged = BufMut::recycled(end.next_multiple_of(BLOCK_BYTES));
    assert!(staged.len() - end < BLOCK_BYTES, "no block without bytes is staged");
    let bytes = staged.as_mut();
    bytes[..skip].fill(0);
    bytes[skip..end].copy_from_slice(data);
    bytes[end..].fill(0);
    staged
}

/// Returns `len` bytes from `skip` on.
fn trim(parts: Vec<Buf>, mut skip: usize, mut len: usize) -> Vec<Buf> {
    let mut kept = Vec::new();
    for part in parts {
        let start = skip.min(part.len());
        let end = (start + len).min(part.len());
        skip -= start;
        len -= end - start;
        if end > start {
            kept.push(part.slice(start..end));
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_trimmed_at_both_ends() {
        let parts = || vec![Buf::copy_from(&[1, 2, 3]), Buf::copy_from(&[4, 5])];
        for (skip, len, wanted) in [
            (1, 3, &[2, 3, 4][..]),
            (0, 5, &[1, 2, 3, 4, 5]),
            (3, 2, &[4, 5]),
            (4, 9, &[5]),
            (2, 0, &[]),
            (0, 1, &[1]),
        ] {
            let kept: Vec<u8> = trim(parts(), skip, len).iter().flat_map(|part| part.to_vec()).collect();
            assert_eq!(kept, wanted, "{len} from {skip}");
        }
    }

    #[test]
    fn bytes_are_staged_with_zeros_around_them() {
        for (offset, len, blocks) in
            [(0, 1, 1), (4095, 2, 2), (8192, 4096, 1), (4096 + 10, 4086, 1), (3, 0, 1)]
        {
            let staged = stage(offset, &vec![7; len]);
            let skip = (offset % BLOCK) as usize;
            assert_eq!(staged.len(), blocks * BLOCK_BYTES, "{len} at {offset}");
            let is_data = |at: usize| (skip..skip + len).contains(&at);
            assert!(
                staged.as_ref().iter().enumerate().all(|(at, byte)| *byte == if is_data(at) { 7 } else { 0 })
            );
        }
    }

    #[test]
    fn a_file_has_a_largest_end() {
        for (offset, len, fits) in [
            (0, MAX_FILE_BYTES, true),
            (MAX_FILE_BYTES, 0, true),
            (1, MAX_FILE_BYTES, false),
            (u64::MAX, 1, false),
        ] {
            assert_eq!(end_of(offset, len).is_ok(), fits, "{len} at {offset}");
        }
        assert_eq!(end_of(u64::MAX, 1).unwrap_err().errno, EFBIG);
    }
}
