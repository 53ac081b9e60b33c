//! Opens, reads and writes files, and keeps the state of open ones.

use crate::direct::{Contents, Unseen};
use crate::leases::Purpose;
use crate::session::Client;
use crate::watch::lost;
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, Ino, Kind as Todo, MAX_FILE_BYTES, crc32c_blocks};
use penstock_wire::data::{
    ChunkRef, SeekRef, decode_found, decode_reply, encode_read, encode_seek, encode_write,
};
use penstock_wire::names::{Attr, AttrReply, InodeRequest, SetAttrRequest, set_id_bits};
use penstock_wire::{Failure, Kind};
use std::cell::RefCell;
use std::rc::Rc;

pub(crate) const BLOCK: u64 = BLOCK_BYTES as u64;
/// Most attempts at a change. An attempt fails if another client truncates the file during it.
pub(crate) const CUTS_MOST: u32 = 64;
const ENXIO: u16 = 6;
const EFBIG: u16 = 27;

/// State of a file that is open or has unsynced writes.
#[derive(Clone, Debug)]
pub struct FileState {
    /// Size in bytes, including unsynced writes.
    pub size: u64,
    /// Size in bytes that the service has.
    pub settled_size: u64,
    /// Truncate generation of the inode.
    pub cut: u64,
    /// Number of blocks in a chunk of the file.
    pub chunk_blocks: u32,
    /// Modification time of unsynced writes; `None` if there are none.
    pub mtime_ns: Option<i64>,
    /// Counts writes: if a sync finds it changed at its end, the file stays unsynced.
    pub writes: u64,
    /// Number of open handles.
    pub opens: u64,
    /// Number of open handles that may write through the kernel's pages.
    pub writers: u64,
    /// The kernel has pages of the file that a program may change in a mapping.
    pub mapped: bool,
    /// The target has nothing behind the last block of the file.
    pub tail_clean: bool,
    /// The mode has set-id bits, which a write may have to remove.
    pub set_id: bool,
    /// Changes were sent to the service and no `Sync` request has completed since: a restart of the service
    /// may lose them.
    pub unsynced: bool,
    /// Number of times that writes of the file were lost.
    pub losses: u64,
    /// No fsync has reported the last loss yet.
    pub lost: bool,
    /// A close has reported the last loss.
    pub lost_told: bool,
    /// End of the file at the time when writes to it, by any client, may have been lost. The kernel may still
    /// have this end, and a page that a program changed there is outside the file now.
    pub lost_end: u64,
    /// The state may be out of date: the service restarted, or no lease covers the file.
    pub stale: bool,
}

impl FileState {
    fn of(attr: &Attr) -> Self {
        let Attr { size, cut, mode, .. } = *attr;
        // If the service sends no chunk size, requests that it refuses are better than a division by zero.
        let chunk_blocks = attr.chunk_blocks.max(1);
        let (settled_size, set_id) = (size, set_id_bits(mode) != 0);
        Self {
            size,
            settled_size,
            cut,
            chunk_blocks,
            mtime_ns: None,
            writes: 0,
            opens: 0,
            writers: 0,
            mapped: false,
            tail_clean: false,
            set_id,
            unsynced: false,
            losses: 0,
            lost: false,
            lost_told: false,
            lost_end: 0,
            stale: false,
        }
    }

    /// Records that unsynced writes are lost.
    pub(crate) fn lose(&mut self) {
        self.unsynced = false;
        self.mtime_ns = None;
        self.writes += 1;
        self.losses += 1;
        self.lost = true;
        self.note_lost_end();
    }

    /// Records the present end, because the file may be shorter from now on without the kernel knowing.
    pub(crate) fn note_lost_end(&mut self) {
        self.lost_end = self.lost_end.max(self.size);
    }

    /// Replaces size and times that a service sent by those of unsynced writes. Does nothing if the state is
    /// stale.
    pub(crate) fn overlay(&self, attr: &mut Attr) {
        if self.stale {
            return;
        }
        attr.size = self.size;
        if let Some(mtime_ns) = self.mtime_ns {
            attr.mtime_ns = mtime_ns;
            attr.ctime_ns = attr.ctime_ns.max(mtime_ns);
        }
    }
}

impl Client {
    /// Returns the state of a file, fetched if it is unknown or stale. The caller owns the file's lease.
    pub(crate) async fn file(&self, ino: Ino) -> Result<Rc<RefCell<FileState>>, Failure> {
        if let Some(state) = self.files.borrow().get(&ino).filter(|state| !state.borrow().stale) {
            return Ok(state.clone());
        }
        let reply: AttrReply = self.ask(Kind::GetAttr, &InodeRequest { ino: ino.0 }).await?;
        let state = FileState::of(&reply.attr.unwrap_or_default());
        if let Some(known) = self.files.borrow().get(&ino) {
            let mut known = known.borrow_mut();
            if known.stale {
                if known.mtime_ns.is_some() && known.cut == state.cut && known.size > state.size {
                    // Cannot happen: the state becomes stale only after its writes were synced or counted as
                    // lost.
                    tracing::error!(%ino, "unsynced writes of a stale file are lost");
                    known.lose();
                }
                (known.size, known.settled_size, known.cut) = (state.size, state.size, state.cut);
                (known.tail_clean, known.stale, known.set_id) = (false, false, state.set_id);
            }
        }
        Ok(self.files.borrow_mut().entry(ino).or_insert_with(|| Rc::new(RefCell::new(state))).clone())
    }

    /// Marks the state of a file as stale.
    pub(crate) fn note_stale(&self, ino: Ino) {
        if let Some(state) = self.files.borrow().get(&ino) {
            state.borrow_mut().stale = true;
        }
    }

    /// Opens a file. It exists while it is open, even without a name. Returns its size in bytes.
    pub async fn open(&self, ino: Ino) -> Result<u64, Failure> {
        let mark = self.settled.mark();
        let reply = {
            let _opening = self.opening.read().await;
            let reply: AttrReply = self.once(Kind::Open, &InodeRequest { ino: ino.0 }).await?;
            if self.leases.covers(ino) {
                let attr = self.newest(mark, reply).await?;
                self.note_open(&attr);
                return Ok(attr.size);
            }
            self.note_open(&reply.attr.clone().unwrap_or_default());
            reply
        };
        // This may wait for another client, so no lock is held here.
        let attr = match reply.unsettled {
            true => self.get_attr(ino).await,
            false => self.newest(mark, reply).await,
        };
        match attr {
            Ok(attr) => Ok(attr.size),
            Err(failure) => {
                self.release(ino).await?;
                Err(failure)
            }
        }
    }

    pub(crate) fn note_open(&self, attr: &Attr) {
        let mut files = self.files.borrow_mut();
        let stale = !self.leases.covers(Ino(attr.ino));
        let new = || Rc::new(RefCell::new(FileState { stale, ..FileState::of(attr) }));
        files.entry(Ino(attr.ino)).or_insert_with(new).borrow_mut().opens += 1;
    }

    /// Counts an open handle that may write through the kernel's pages, or one less.
    pub fn note_writer(&self, ino: Ino, more: bool) {
        if let Some(state) = self.files.borrow().get(&ino) {
            let mut state = state.borrow_mut();
            state.writers = if more { state.writers + 1 } else { state.writers.saturating_sub(1) };
        }
    }

    /// Records that the kernel may have pages of an open file that programs change in mappings, or none any
    /// more. While it may, every lease is exclusive: two clients that changed parts of one page would
    /// overwrite each other's changes.
    pub fn note_mapped(&self, ino: Ino, mapped: bool) {
        if let Some(state) = self.files.borrow().get(&ino) {
            state.borrow_mut().mapped = mapped;
        }
    }

    /// True if the kernel may have pages of the file that programs change in mappings.
    pub fn is_mapped(&self, ino: Ino) -> bool {
        self.files.borrow().get(&ino).is_some_and(|state| state.borrow().mapped)
    }

    /// Closes one handle of a file.
    pub async fn release(&self, ino: Ino) -> Result<(), Failure> {
        let _opening = self.opening.read().await;
        if let Some(state) = self.files.borrow().get(&ino) {
            let mut state = state.borrow_mut();
            state.opens = state.opens.saturating_sub(1);
            if state.opens == 0 {
                state.lost_end = 0;
                if state.lost_told {
                    (state.lost, state.lost_told) = (false, false);
                }
            }
        }
        self.forget_idle(ino);
        let _: penstock_wire::names::EmptyReply =
            self.once(Kind::Close, &InodeRequest { ino: ino.0 }).await?;
        Ok(())
    }

    /// Forgets a file that is not open, has no unsynced change and no unreported loss, and is not in use by
    /// an operation.
    pub(crate) fn forget_idle(&self, ino: Ino) {
        let mut files = self.files.borrow_mut();
        let idle = files.get(&ino).is_some_and(|state| {
            let known = state.borrow();
            let idle = known.opens == 0 && known.mtime_ns.is_none();
            idle && !known.lost && !known.unsynced && Rc::strong_count(state) == 1
        });
        if idle {
            files.remove(&ino);
        }
    }

    /// Reads up to `len` bytes at `offset`; fewer at the end of the file. The bytes are returned as runs, in
    /// order.
    pub async fn read(&self, ino: Ino, offset: u64, len: u64) -> Result<Vec<Buf>, Failure> {
        let _hold = self.hold(ino, Purpose::Read).await?;
        self.read_held(ino, offset, len).await
    }

    /// Like [`Client::read`], for a caller that owns the file's lease.
    pub async fn read_held(&self, ino: Ino, offset: u64, len: u64) -> Result<Vec<Buf>, Failure> {
        let _turn = self.turns.shared(ino).await;
        let parts = self.read_locked(ino, offset, len).await;
        self.forget_idle(ino);
        parts
    }

    /// Like [`Client::read_held`], for a read into the kernel's pages, which is recorded for direct writes.
    pub async fn read_pages_held(&self, ino: Ino, offset: u64, len: u64) -> Result<Vec<Buf>, Failure> {
        let _turn = self.turns.shared(ino).await;
        let parts = self.read_locked(ino, offset, len).await;
        self.direct.note_read(ino, &(offset..offset.saturating_add(len)));
        self.forget_idle(ino);
        parts
    }

    /// Like [`Client::read_held`], for a caller that has the file's I/O lock as well.
    pub(crate) async fn read_locked(&self, ino: Ino, offset: u64, len: u64) -> Result<Vec<Buf>, Failure> {
        let state = self.file(ino).await?.borrow().clone();
        let end = state.size.min(offset.saturating_add(len));
        if offset >= end {
            return Ok(Vec::new());
        }
        let (first, last) = (offset / BLOCK, end.div_ceil(BLOCK));
        let parts = self.read_blocks(ino, &state, first, last - first).await?;
        Ok(trim(parts, (offset - first * BLOCK) as usize, (end - offset) as usize))
    }

    /// Returns the size of a file in bytes. The caller owns its lease.
    pub async fn size_held(&self, ino: Ino) -> Result<u64, Failure> {
        let size = self.file(ino).await?.borrow().size;
        self.forget_idle(ino);
        Ok(size)
    }

    /// Reads whole blocks. They were verified when they left the volume, in this process.
    async fn read_blocks(
        &self,
        ino: Ino,
        state: &FileState,
        first: u64,
        count: u64,
    ) -> Result<Vec<Buf>, Failure> {
        let reads =
            pieces(state.chunk_blocks, first, count).into_iter().map(|(chunk, block, count)| async move {
                let request = ChunkRef { branch: 0, ino, chunk, block, count, snapshot: 0, cut: state.cut };
                let (body, payload) = self.data(Kind::Read, encode_read(&request), Vec::new()).await?;
                let (_, crcs) = decode_reply(&body)?;
                let found = payload.iter().map(Buf::len).sum::<usize>();
                match found == count as usize * BLOCK_BYTES && crcs.len() == count as usize {
                    true => Ok(payload),
                    false => Err(Failure::new(
                        Todo::Internal,
                        format!("a reply of {found} bytes to a read of {count} blocks"),
                    )),
                }
            });
        let parts: Vec<Vec<Buf>> = join_all(reads).await.into_iter().collect::<Result<_, _>>()?;
        Ok(parts.into_iter().flatten().collect())
    }

    /// Returns the first offset at or behind `offset` that is data, or with `hole` the first in a hole; the
    /// end of the file counts as a hole. Fails with ENXIO if there is none.
    pub async fn seek(&self, ino: Ino, offset: u64, hole: bool) -> Result<u64, Failure> {
        let _hold = self.hold(ino, Purpose::Read).await?;
        let _turn = self.turns.shared(ino).await;
        let size = self.file(ino).await?.borrow().size;
        self.forget_idle(ino);
        let nothing = |what: &str| Failure {
            kind: Todo::Invalid,
            errno: ENXIO,
            message: format!("{what} from {offset} on in a file of {size} bytes"),
        };
        if offset >= size {
            return Err(nothing("nothing"));
        }
        let seek = SeekRef { branch: 0, ino, hole, from: offset / BLOCK, until: size.div_ceil(BLOCK) };
        let (body, _) = self.data(Kind::Seek, encode_seek(&seek), Vec::new()).await?;
        let found = decode_found(&body)?.saturating_mul(BLOCK).clamp(offset, size);
        if !hole && found == size { Err(nothing("no data")) } else { Ok(found) }
    }

    /// Returns the contents of one block, with zeros behind the end of the file.
    async fn read_block(&self, ino: Ino, state: &FileState, block: u64) -> Result<BufMut, Failure> {
        let mut whole = BufMut::zeroed(BLOCK_BYTES);
        let inside = state.size.saturating_sub(block * BLOCK).min(BLOCK) as usize;
        if inside > 0 {
            let found = penstock_base::buf::gather(&self.read_blocks(ino, state, block, 1).await?);
            whole.as_mut()[..inside].copy_from_slice(&found[..inside]);
        }
        Ok(whole)
    }

    /// Writes bytes at `offset`. They are visible when this returns, and durable after an fsync.
    pub async fn write(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<(), Failure> {
        self.write_staged(ino, offset, stage(offset, data), data.len()).await
    }

    /// Writes `len` bytes at `offset`; [`stage`] has put them into whole blocks.
    pub async fn write_staged(
        &self,
        ino: Ino,
        offset: u64,
        staged: BufMut,
        len: usize,
    ) -> Result<(), Failure> {
        let _hold = self.hold(ino, Purpose::Write).await?;
        self.write_held(ino, offset, staged, len).await
    }

    /// Like [`Client::write_staged`], for a caller that owns the file's lease.
    pub async fn write_held(&self, ino: Ino, offset: u64, staged: BufMut, len: usize) -> Result<(), Failure> {
        let _turn = self.turns.exclusive(ino).await;
        self.write_locked(ino, offset, staged, len).await
    }

    /// Like [`Client::write_held`], for a direct write. If the kernel may have pages from before it, the
    /// caller gets an [`Unseen`] and must not acknowledge the write before [`Client::drop_old_pages`].
    pub async fn write_direct_held(
        &self,
        ino: Ino,
        offset: u64,
        staged: BufMut,
        len: usize,
    ) -> Result<Option<Unseen>, Failure> {
        let _turn = self.turns.exclusive(ino).await;
        self.write_direct_locked(ino, offset, staged, len).await
    }

    /// Like [`Client::write_direct_held`], for a caller that has the file's I/O lock as well.
    async fn write_direct_locked(
        &self,
        ino: Ino,
        offset: u64,
        staged: BufMut,
        len: usize,
    ) -> Result<Option<Unseen>, Failure> {
        let (skip, bytes) = ((offset % BLOCK) as usize, offset..offset.saturating_add(len as u64));
        let kept = self.direct.may_be_read(ino, &bytes).then(|| staged.as_ref()[skip..skip + len].to_vec());
        self.write_locked(ino, offset, staged, len).await?;
        Ok(kept.map(|kept| self.direct.note_write(ino, bytes, Contents::Bytes(kept))))
    }

    /// Appends bytes to the file. Returns the offset where they begin.
    pub async fn append(&self, ino: Ino, data: &[u8]) -> Result<u64, Failure> {
        let _hold = self.hold(ino, Purpose::Write).await?;
        Ok(self.append_held(ino, 0, stage(0, data), data.len()).await?.0)
    }

    /// Appends `len` bytes as a direct write. They are staged for `offset`, the end of the file as the caller
    /// knew it. The caller owns the file's lease. Returns the offset where they begin.
    pub async fn append_held(
        &self,
        ino: Ino,
        offset: u64,
        staged: BufMut,
        len: usize,
    ) -> Result<(u64, Option<Unseen>), Failure> {
        let _turn = self.turns.exclusive(ino).await;
        let size = self.file(ino).await?.borrow().size;
        let skip = (offset % BLOCK) as usize;
        let staged = match size == offset {
            true => staged,
            false => stage(size, &staged.as_ref()[skip..skip + len]),
        };
        Ok((size, self.write_direct_locked(ino, size, staged, len).await?))
    }

    /// Writes back a page that was changed in memory, up to the end of the file; the file does not grow. The
    /// caller owns the file's lease.
    pub async fn write_page_held(
        &self,
        ino: Ino,
        offset: u64,
        staged: BufMut,
        len: usize,
    ) -> Result<(), Failure> {
        let _turn = self.turns.exclusive(ino).await;
        self.write_within(ino, offset, staged, len, true).await
    }

    pub(crate) async fn write_locked(
        &self,
        ino: Ino,
        offset: u64,
        staged: BufMut,
        len: usize,
    ) -> Result<(), Failure> {
        self.write_within(ino, offset, staged, len, false).await
    }

    async fn write_within(
        &self,
        ino: Ino,
        offset: u64,
        mut staged: BufMut,
        mut len: usize,
        only_inside: bool,
    ) -> Result<(), Failure> {
        let (skip, asked) = ((offset % BLOCK) as usize, len as u64);
        let mut attempt = 1;
        loop {
            let file = self.file(ino).await?;
            let inside = file.borrow().size.saturating_sub(offset);
            if only_inside && inside < len as u64 {
                len = inside as usize;
                staged = stage(offset, &staged.as_ref()[skip..skip + len]);
            }
            let cut = |state: &FileState| match only_inside && state.lost_end > state.size && inside < asked {
                true => Err(lost(&format!("the end of inode {ino}"))),
                false => Ok(()),
            };
            if len == 0 {
                return cut(&file.borrow());
            }
            if only_inside {
                self.direct.renew(ino, offset, &mut staged.as_mut()[skip..skip + len]);
            }
            let generation = self.restarts.generation();
            let filled = self.fill_ends(ino, &file, offset, &mut staged, len).await;
            let written = staged.freeze();
            let result = match filled {
                Ok(()) => self.write_filled(ino, &file, offset / BLOCK, &written).await,
                failed => failed,
            };
            match result {
                Err(failure) if failure.kind == Todo::RefreshMap && attempt < CUTS_MOST => {
                    // Another client truncated the file, which is possible under a shared lease that is being
                    // revoked.
                    file.borrow_mut().stale = true;
                    attempt += 1;
                }
                result => result?,
            }
            // Acknowledged under one start of the service; otherwise repeated.
            if generation == self.restarts.generation() && !file.borrow().stale {
                let mut state = file.borrow_mut();
                state.size = state.size.max(offset + len as u64);
                state.mtime_ns = Some(self.env.wall_ns());
                state.writes += 1;
                return cut(&state);
            }
            staged = stage(offset, &written[skip..skip + len]);
        }
    }

    /// Completes staged bytes to whole blocks with the file's own bytes around them, and makes the bytes
    /// between the end of the file and the write read as zeros.
    async fn fill_ends(
        &self,
        ino: Ino,
        file: &RefCell<FileState>,
        offset: u64,
        staged: &mut BufMut,
        len: usize,
    ) -> Result<(), Failure> {
        let mut state = file.borrow().clone();
        let end = end_of(offset, len as u64)?;
        let (first, last) = (offset / BLOCK, end.div_ceil(BLOCK));
        if staged.len() as u64 != (last - first) * BLOCK {
            return Err(Failure::new(Todo::Invalid, "bytes are not staged for this offset"));
        }
        if !state.tail_clean && state.size.div_ceil(BLOCK) < first {
            self.clean_tail(ino, file).await?;
            state = file.borrow().clone();
        }
        if !state.size.is_multiple_of(BLOCK) && state.size / BLOCK < first {
            self.zero_tail(ino, &state).await?;
        }
        let skip = (offset - first * BLOCK) as usize;
        if skip > 0 {
            let old = self.read_block(ino, &state, first).await?;
            staged.as_mut()[..skip].copy_from_slice(&old.as_ref()[..skip]);
        }
        if !end.is_multiple_of(BLOCK) && end < state.size {
            let old = self.read_block(ino, &state, last - 1).await?;
            let (from, within) = (skip + len, (end % BLOCK) as usize);
            staged.as_mut()[from..].copy_from_slice(&old.as_ref()[within..]);
        }
        Ok(())
    }

    async fn write_filled(
        &self,
        ino: Ino,
        file: &RefCell<FileState>,
        first: u64,
        blocks: &Buf,
    ) -> Result<(), Failure> {
        let state = file.borrow().clone();
        // After a failure, some blocks may be written, also behind the end of the file.
        let failed = |_: &Failure| file.borrow_mut().tail_clean = false;
        self.write_blocks(ino, &state, first, blocks).await.inspect_err(failed)
    }

    /// Drops all that a crash or a failed write left behind the last block, before the file grows with a hole
    /// there.
    async fn clean_tail(&self, ino: Ino, file: &RefCell<FileState>) -> Result<(), Failure> {
        self.settle_quietly(ino).await?;
        let size = file.borrow().size;
        let request = SetAttrRequest { ino: ino.0, size: Some(size), ..SetAttrRequest::default() };
        let reply: AttrReply = self.change_inode(Kind::SetAttr, ino, &request).await?;
        self.settled.note(ino);
        let mut state = file.borrow_mut();
        state.cut = reply.attr.unwrap_or_default().cut;
        state.tail_clean = true;
        Ok(())
    }

    /// Zeroes the bytes of the last block behind the end of the file, before the file grows over them.
    pub(crate) async fn zero_tail(&self, ino: Ino, state: &FileState) -> Result<(), Failure> {
        let block = state.size / BLOCK;
        let whole = self.read_block(ino, state, block).await?;
        self.write_blocks(ino, state, block, &whole.freeze()).await
    }

    async fn write_blocks(&self, ino: Ino, state: &FileState, first: u64, data: &Buf) -> Result<(), Failure> {
        let crcs = crc32c_blocks(data);
        let mut done = 0;
        let mut writes = Vec::new();
        for (chunk, block, count) in pieces(state.chunk_blocks, first, crcs.len() as u64) {
            let range = done..done + count as usize;
            done = range.end;
            let request = ChunkRef { branch: 0, ino, chunk, block, count, snapshot: 0, cut: state.cut };
            let body = encode_write(&request, &crcs[range.clone()]);
            let payload = vec![data.slice(range.start * BLOCK_BYTES..range.end * BLOCK_BYTES)];
            writes.push(self.data(Kind::Write, body, payload));
        }
        // Waits for all: within a process, a dropped call would interrupt the services in the middle of a
        // request.
        join_all(writes).await.into_iter().try_for_each(|result| result.map(|_| ()))
    }
}

/// Returns the end of `len` bytes at `offset`. Fails with EFBIG if it is above the maximum file size.
pub(crate) fn end_of(offset: u64, len: u64) -> Result<u64, Failure> {
    offset.checked_add(len).filter(|end| *end <= MAX_FILE_BYTES).ok_or(Failure {
        kind: Todo::Invalid,
        errno: EFBIG,
        message: "file too large".into(),
    })
}

/// Copies bytes for `offset` into whole blocks, with zeros around them.
pub fn stage(offset: u64, data: &[u8]) -> BufMut {
    let skip = (offset % BLOCK) as usize;
    let end = skip + data.len();
    let mut staged = BufMut::recycled(end.next_multiple_of(BLOCK_BYTES));
    let bytes = staged.as_mut();
    bytes[..skip].fill(0);
    bytes[skip..end].copy_from_slice(data);
    bytes[end..].fill(0);
    staged
}

/// Splits a range of blocks at chunk boundaries. Returns (chunk, first block in it, number of blocks) for
/// each part.
fn pieces(chunk_blocks: u32, first: u64, count: u64) -> Vec<(u64, u32, u32)> {
    let per_chunk = u64::from(chunk_blocks);
    let (mut at, end, mut pieces) = (first, first + count, Vec::new());
    while at < end {
        let within = at % per_chunk;
        let run = (per_chunk - within).min(end - at);
        pieces.push((at / per_chunk, within as u32, run as u32));
        at += run;
    }
    pieces
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
    fn ranges_are_cut_at_chunks() {
        assert_eq!(pieces(256, 250, 10), [(0, 250, 6), (1, 0, 4)]);
        assert_eq!(pieces(256, 512, 256), [(2, 0, 256)]);
    }

    #[test]
    fn runs_are_trimmed_at_both_ends() {
        let parts = vec![Buf::copy_from(&[1, 2, 3]), Buf::copy_from(&[4, 5])];
        let kept: Vec<u8> = trim(parts, 1, 3).iter().flat_map(|part| part.to_vec()).collect();
        assert_eq!(kept, [2, 3, 4]);
    }
}
