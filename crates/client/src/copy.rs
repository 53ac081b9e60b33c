//! Copies data between files within the process.

use crate::file::stage;
use crate::session::Client;
use penstock_base::buf::gather;
use penstock_base::{Buf, Ino};
use penstock_wire::Failure;

/// Bytes read and written at a time, which bounds the memory of a copy.
const PIECE_BYTES: u64 = 1 << 20;
/// Most bytes that one call copies, so that none takes long. The caller repeats the call for the rest.
pub const MOST_COPIED: u64 = 16 << 20;

impl Client {
    /// Copies up to `len` bytes from an offset of one file to an offset of another. Returns the number of
    /// bytes copied; 0 at the end of the first file. A failure after some bytes were copied is not returned:
    /// the next call meets it again.
    pub async fn copy(&self, from: (Ino, u64), to: (Ino, u64), len: u64) -> Result<u64, Failure> {
        let len = len.min(MOST_COPIED);
        let mut done = 0;
        while done < len {
            match self.copy_piece(from, to, done, PIECE_BYTES.min(len - done)).await {
                Ok(0) => break,
                Ok(copied) => done += copied,
                Err(failure) if done == 0 => return Err(failure),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    async fn copy_piece(&self, from: (Ino, u64), to: (Ino, u64), at: u64, len: u64) -> Result<u64, Failure> {
        let parts = self.read(from.0, from.1.saturating_add(at), len).await?;
        let copied = parts.iter().map(Buf::len).sum::<usize>();
        let offset = to.1.saturating_add(at);
        self.write_staged(to.0, offset, stage(offset, &gather(&parts)), copied).await?;
        Ok(copied as u64)
    }
}
