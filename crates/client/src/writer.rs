//! Changes of a file's contents.
//!
//! Invariants: see the crate. A change is acknowledged under one start of the service; one that spans a
//! restart is repeated.

use crate::blocks::{BLOCK, Blocks, end_of, stage};
use crate::direct::{Contents, Unseen};
use crate::file_state::FileState;
use crate::restarts::lost;
use crate::session::Session;
use penstock_base::locks::Exclusive;
use penstock_base::num::to_usize;
use penstock_base::{Buf, BufMut, ErrorKind, FileId};
use penstock_wire::Failure;
use penstock_wire::metadata::{Attr, AttrReply, SetAttrRequest};
use std::cell::RefCell;

/// Most attempts at a change. An attempt fails if another client truncates the file during it.
pub(crate) const TRUNCATIONS_MOST: u32 = 64;

/// Bytes to write, in whole blocks with zeros around them ([`stage`]).
pub struct Staged {
    /// The blocks.
    pub blocks: BufMut,
    /// Number of bytes.
    pub len: usize,
}

impl Staged {
    /// Stages bytes for `offset`.
    pub fn of(offset: u64, data: &[u8]) -> Self {
        Self { blocks: stage(offset, data), len: data.len() }
    }
}

/// The right to change a file: its lease, exclusive if there are others, and its I/O lock.
pub struct Writer<'a> {
    pub(crate) blocks: Blocks<'a>,
    _turn: Exclusive<FileId>,
}

/// The end of a write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// The file may grow.
    Grows,
    /// The write ends at the end of the file.
    Inside,
}

impl<'a> Writer<'a> {
    /// Waits for the file's I/O lock. The caller owns its lease.
    pub(crate) async fn begin(session: &'a Session, file: FileId) -> Self {
        let turn = session.turns().exclusive(file).await;
        Self { blocks: Blocks { session, file }, _turn: turn }
    }

    /// Writes staged bytes at `offset`. They are visible when this returns, and durable after an fsync.
    pub async fn write(&self, offset: u64, staged: Staged) -> Result<(), Failure> {
        self.write_within(offset, staged, Extent::Grows).await
    }

    /// Like [`Writer::write`], for a direct write. If the kernel may have pages from before it, the caller
    /// gets an [`Unseen`] and must not acknowledge the write before [`crate::Hold::drop_old_pages`].
    pub async fn write_direct(&self, offset: u64, staged: Staged) -> Result<Option<Unseen>, Failure> {
        let Blocks { session, file } = self.blocks;
        let len = staged.len;
        let (skip, bytes) = ((offset % BLOCK) as usize, offset..offset.saturating_add(len as u64));
        let may_be_read = session.direct().may_be_read(file, &bytes);
        let kept = may_be_read.then(|| staged.blocks.as_ref()[skip..skip + len].to_vec());
        self.write(offset, staged).await?;
        Ok(kept.map(|kept| session.direct().note_write(file, bytes, Contents::Bytes(kept))))
    }

    /// Appends bytes as a direct write. They are staged for `offset`, the end of the file as the caller knew
    /// it. Returns the offset where they begin.
    pub async fn append(&self, offset: u64, staged: Staged) -> Result<(u64, Option<Unseen>), Failure> {
        let size = self.blocks.session.state(self.blocks.file).await?.borrow().size();
        let skip = (offset % BLOCK) as usize;
        let staged = match size == offset {
            true => staged,
            false => Staged::of(size, &staged.blocks.as_ref()[skip..skip + staged.len]),
        };
        Ok((size, self.write_direct(size, staged).await?))
    }

    /// Writes back a page that was changed in memory, up to the end of the file; the file does not grow.
    pub async fn write_page(&self, offset: u64, staged: Staged) -> Result<(), Failure> {
        self.write_within(offset, staged, Extent::Inside).await
    }

    async fn write_within(&self, offset: u64, staged: Staged, extent: Extent) -> Result<(), Failure> {
        let Blocks { session, file } = self.blocks;
        let Staged { blocks: mut staged, mut len } = staged;
        let (skip, asked) = ((offset % BLOCK) as usize, len as u64);
        let only_inside = extent == Extent::Inside;
        let mut attempt = 1;
        loop {
            let known = session.state(file).await?;
            let inside = known.borrow().size().saturating_sub(offset);
            if only_inside && inside < len as u64 {
                len = to_usize(inside);
                staged = stage(offset, &staged.as_ref()[skip..skip + len]);
            }
            let check_end =
                |state: &FileState| match only_inside && state.lost_end() > state.size() && inside < asked {
                    true => Err(lost(&format!("the end of inode {file}"))),
                    false => Ok(()),
                };
            if len == 0 {
                return check_end(&known.borrow());
            }
            if only_inside {
                session.direct().renew(file, offset, &mut staged.as_mut()[skip..skip + len]);
            }
            let generation = session.restarts().generation();
            let filled = self.fill_ends(&known, offset, &mut staged, len).await;
            let written = staged.freeze();
            let result = match filled {
                Ok(()) => self.write_filled(&known, offset / BLOCK, &written).await,
                failed => failed,
            };
            match result {
                // The answer of another start of the service means nothing to this one.
                Err(_) if generation != session.restarts().generation() && !session.is_over() => {}
                Err(failure) if failure.kind == ErrorKind::RefreshMap && attempt < TRUNCATIONS_MOST => {
                    // Another client truncated the file, which is possible under a shared lease that is being
                    // revoked.
                    known.borrow_mut().make_stale();
                    attempt += 1;
                }
                result => result?,
            }
            // Acknowledged under one start of the service; otherwise repeated.
            if generation == session.restarts().generation() && !known.borrow().is_stale() {
                let mut state = known.borrow_mut();
                state.wrote(offset + len as u64, session.now());
                return check_end(&state);
            }
            staged = stage(offset, &written[skip..skip + len]);
        }
    }

    /// Completes staged bytes to whole blocks with the file's own bytes around them, and makes the bytes
    /// between the end of the file and the write read as zeros.
    async fn fill_ends(
        &self,
        known: &RefCell<FileState>,
        offset: u64,
        staged: &mut BufMut,
        len: usize,
    ) -> Result<(), Failure> {
        let mut state = known.borrow().clone();
        let end = end_of(offset, len as u64)?;
        let (first, last) = (offset / BLOCK, end.div_ceil(BLOCK));
        assert!(len > 0 && first < last, "a write has a byte");
        if staged.len() as u64 != (last - first) * BLOCK {
            return Err(Failure::new(ErrorKind::Invalid, "bytes are not staged for this offset"));
        }
        if !state.has_clean_tail() && state.size().div_ceil(BLOCK) < first {
            self.clean_tail(known).await?;
            state = known.borrow().clone();
        }
        if !state.size().is_multiple_of(BLOCK) && state.size() / BLOCK < first {
            self.blocks.zero_tail(&state).await?;
        }
        let skip = to_usize(offset - first * BLOCK);
        if skip > 0 {
            let old = self.blocks.read_one(&state, first).await?;
            staged.as_mut()[..skip].copy_from_slice(&old.as_ref()[..skip]);
        }
        if !end.is_multiple_of(BLOCK) && end < state.size() {
            let old = self.blocks.read_one(&state, last - 1).await?;
            let (from, within) = (skip + len, (end % BLOCK) as usize);
            staged.as_mut()[from..].copy_from_slice(&old.as_ref()[within..]);
        }
        Ok(())
    }

    async fn write_filled(
        &self,
        known: &RefCell<FileState>,
        first: u64,
        blocks: &Buf,
    ) -> Result<(), Failure> {
        let state = known.borrow().clone();
        let failed = |_: &Failure| known.borrow_mut().write_failed();
        self.blocks.write(&state, first, blocks).await.inspect_err(failed)
    }

    /// Drops all that a crash or a failed write left behind the last block, before the file grows with a hole
    /// there.
    async fn clean_tail(&self, known: &RefCell<FileState>) -> Result<(), Failure> {
        let Blocks { session, file } = self.blocks;
        session.sync_file(file).await?;
        let size = known.borrow().size();
        let request = SetAttrRequest { ino: file.ino.0, size: Some(size), ..SetAttrRequest::default() };
        let reply: AttrReply = session.change_size(file, &request).await?;
        session.recent().add(file);
        session.kept().truncate(file, size.div_ceil(BLOCK), true);
        known.borrow_mut().cleaned(reply.attr.unwrap_or_default().truncations);
        Ok(())
    }

    /// Sets the size of the file, with all other changes of the request.
    pub(crate) async fn resize(&self, mut request: SetAttrRequest, size: u64) -> Result<Attr, Failure> {
        let Blocks { session, file } = self.blocks;
        assert_eq!(request.ino, file.ino.0, "a request is about the file that is locked");
        request.size = Some(size);
        let mut attempt = 1;
        loop {
            // While the lease is being revoked, others may change the size too.
            let make_stale = || session.files().with(file, |state| state.make_stale());
            let shared = !session.leases().is_exclusive(file);
            if shared {
                make_stale();
            }
            let result =
                session.under_one_start(async || self.resize_once(request.clone(), size).await).await;
            if shared {
                make_stale();
            }
            match result {
                // Truncated by another client, or by a part of this request that a start of the service did
                // before it ended.
                Err(failure) if failure.kind == ErrorKind::RefreshMap && attempt < TRUNCATIONS_MOST => {
                    attempt += 1
                }
                result => return result,
            }
        }
    }

    async fn resize_once(&self, mut request: SetAttrRequest, size: u64) -> Result<Attr, Failure> {
        let Blocks { session, file } = self.blocks;
        let known = session.state(file).await?;
        let state = known.borrow().clone();
        if size > state.size() && !state.size().is_multiple_of(BLOCK) {
            self.blocks.zero_tail(&state).await?;
            // The zeros must be durable no later than the size.
            session.commit(file).await?;
        }
        // The service must know the unsynced size, because it judges a truncation by it.
        let synced = match session.sync_file(file).await {
            // A full store accepts no dirty data. Truncating needs no space, and may drop part of the dirty
            // data.
            Err(failure) if failure.kind == ErrorKind::NoSpace && size < state.sent_size() => false,
            other => other.map(|()| true)?,
        };
        request.mtime = request.mtime.or(Some(session.now()));
        request.known_truncations = Some(known.borrow().truncations());
        let reply: Result<AttrReply, Failure> = session.change_size(file, &request).await;
        // An attribute reply that was requested earlier may arrive later; this marks it as out of date.
        session.recent().add(file);
        if reply.is_err() {
            // Part of the change may have been done, under another truncate generation.
            known.borrow_mut().make_stale();
        }
        let attr = reply?.attr.unwrap_or_default();
        // The service has dropped everything behind the smaller size.
        session.kept().truncate(file, state.size().min(size).div_ceil(BLOCK), size < state.size());
        // Data that is still unsynced gets this time, not an earlier one.
        known.borrow_mut().resized(&attr, request.mtime.filter(|_| !synced));
        Ok(attr)
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        self.blocks.session.files().forget_idle(self.blocks.file);
    }
}
