//! Reads of a file.

use crate::blocks::{BLOCK, Blocks};
use crate::session::Search;
use crate::session::Session;
use penstock_base::locks::Shared;
use penstock_base::{Buf, ErrorKind, FileId};
use penstock_wire::Failure;

const ENXIO: u16 = 6;

/// The right to read a file: its lease and its I/O lock, shared.
pub struct Reader<'a> {
    blocks: Blocks<'a>,
    _turn: Shared<FileId>,
}

impl<'a> Reader<'a> {
    /// Waits for the file's I/O lock. The caller owns its lease.
    pub(crate) async fn begin(session: &'a Session, file: FileId) -> Self {
        let turn = session.turns().shared(file).await;
        Self { blocks: Blocks { session, file }, _turn: turn }
    }

    /// Reads up to `len` bytes at `offset`; fewer at the end of the file. The bytes are returned as runs, in
    /// order.
    pub async fn read(&self, offset: u64, len: u64) -> Result<Vec<Buf>, Failure> {
        self.blocks.session.refuse_untold(self.blocks.file)?;
        self.blocks.read_bytes(offset, len).await
    }

    /// Like [`Reader::read`], for a read into the kernel's pages, which is recorded for direct writes.
    pub async fn read_pages(&self, offset: u64, len: u64) -> Result<Vec<Buf>, Failure> {
        let Blocks { session, file } = self.blocks;
        session.refuse_untold(file)?;
        let parts = self.blocks.read_bytes(offset, len).await;
        session.direct().note_read(file, &(offset..offset.saturating_add(len)));
        parts
    }

    /// Returns the first offset at or behind `offset` that is data, or with `hole` the first in a hole; the
    /// end of the file counts as a hole. Fails with ENXIO if there is none.
    pub async fn seek(&self, offset: u64, hole: bool) -> Result<u64, Failure> {
        let Blocks { session, file } = self.blocks;
        let nothing = |what: &str, size: u64| Failure {
            kind: ErrorKind::Invalid,
            errno: ENXIO,
            message: format!("{what} from {offset} on in a file of {size} bytes"),
        };
        // A file that was made again in a restart may lie on other targets.
        let search = session.under_one_start(async || {
            let state = session.state(file).await?.borrow().clone();
            let size = state.size();
            if offset >= size {
                return Err(nothing("nothing", size));
            }
            let (from, until, per_chunk) = (offset / BLOCK, size.div_ceil(BLOCK), state.chunk_blocks());
            assert!(from < until, "an offset inside the file is in a block of it");
            let search = Search { hole, from, until, per_chunk };
            Ok((size, session.search(file, state.spread(), search).await?))
        });
        let (size, found) = search.await?;
        let found = found.saturating_mul(BLOCK).clamp(offset, size);
        assert!((offset..=size).contains(&found), "an offset is found inside the file");
        if !hole && found == size { Err(nothing("no data", size)) } else { Ok(found) }
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.blocks.session.files().forget_idle(self.blocks.file);
    }
}
