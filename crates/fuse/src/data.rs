//! Serves requests on file contents: open, read, write, fallocate, copy, seek and sync.

use crate::abi::{
    CopyFileRangeIn, FallocateIn, FsyncIn, LseekIn, LseekOut, OpenIn, READ_LOCKOWNER, ReadIn, WRITE_CACHE,
    WRITE_KILL_SUIDGID, WriteIn, WriteOut, op,
};
use crate::attr::errno;
use crate::deferred::Deferral;
use crate::device::{Answer, Request};
use crate::session::Session;
use futures_util::future::{Either, select};
use penstock_base::num::{to_u16, to_u32};
use penstock_base::{FileId, HeldRange};
use penstock_client::{Hold, KernelCache, MOST_COPIED, Purpose, Staged};
use penstock_wire::Failure;
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::CAPABILITY;
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use std::pin::pin;

/// `O_DSYNC`. `O_SYNC` contains its bits.
const DSYNC: u32 = libc::O_DSYNC as u32;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

impl Session {
    pub(crate) async fn open(&self, request: &Request) -> Result<Answer, Errno> {
        let OpenIn { flags, .. } = request.argument()?;
        let file = request.file;
        let size = self.client.open(file).await.map_err(|failure| errno(&failure))?;
        let opened = self.opened(file, flags, size).await.map_err(|failure| errno(&failure))?;
        Ok(Answer::of(&opened))
    }

    pub(crate) async fn read(&self, request: &mut Request) -> Result<Answer, Errno> {
        let ReadIn { offset, size, read_flags, .. } = request.argument()?;
        let file = request.file;
        let pages = read_flags & READ_LOCKOWNER == 0;
        if pages && self.cache.sizes.is_open_for_writing(file) {
            self.client.note_mapped(file, true);
        }
        let bytes = offset..offset.saturating_add(size.into());
        let hold = match pages {
            true => self.client.hold_to_fill(file, bytes.clone()).await,
            false => self.client.hold(file, Purpose::Read).await,
        };
        let hold = hold.map_err(|failure| errno(&failure))?;
        let in_flight = self.client.was_shared().then(|| self.cache.reads.begins(file, offset));
        let result = match pages {
            true => hold.reader().await.read_pages(offset, size.into()).await,
            false => hold.reader().await.read(offset, size.into()).await,
        };
        if pages && result.is_ok() && self.cache.sizes.is_open_for_writing(file) {
            // The kernel zeros what lies in this page behind the size that it knows, or never writes it back.
            let end = hold.size().await.map_err(|failure| errno(&failure))?;
            self.tell_before_read(&hold, file, end).await;
        }
        let nothing = result.as_ref().is_ok_and(|parts| parts.iter().all(|part| part.is_empty()));
        if nothing && in_flight.is_some() && pages {
            // Only for reads into pages, for which no program may be waiting.
            if self.cache.reads.refuses(file, bytes.clone()) {
                return Err(Errno::INTR);
            }
        }
        if let Some(in_flight) = in_flight {
            if nothing {
                in_flight.first().await;
            }
            request.in_flight = Some(in_flight);
        }
        hold.serves(bytes);
        request.hold = Some(hold);
        result.map(Answer::Data).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn write(&self, request: &mut Request) -> Result<Answer, Errno> {
        let WriteIn { fh, offset, write_flags, flags, .. } = request.argument()?;
        let staged = request.data.take().ok_or(Errno::IO)?;
        let len = staged.len;
        let file = request.file;
        let fail = |failure| errno(&failure);
        if write_flags & WRITE_CACHE != 0 {
            return self.write_page(request, offset, staged, write_flags).await;
        }
        let flags = OFlags::from_bits_retain(flags);
        let through_pages = self.writes_through_pages(fh, flags);
        let hold = self.client.hold(file, Purpose::Write).await.map_err(fail)?;
        if write_flags & WRITE_KILL_SUIDGID != 0 {
            self.drop_set_id(&hold, file).await.map_err(fail)?;
        }
        self.drop_capability(file).await.map_err(fail)?;
        let mut unseen = None;
        if flags.contains(OFlags::APPEND) {
            let (at, written) = hold.writer().await.append(offset, staged).await.map_err(fail)?;
            // Bytes written through the page cache are already in its pages.
            unseen = written.filter(|_| !through_pages);
            if at != offset {
                // The kernel assumes that the write went to the offset that it sent.
                self.tell_before_reply(&hold, file, at + len as u64).await;
                if through_pages {
                    // The kernel may have put the bytes into pages at the wrong offset.
                    self.client.drop_pages_soon(file);
                }
            } else if through_pages {
                self.cache.sizes.reaches(file, offset + len as u64);
            }
        } else if through_pages {
            hold.writer().await.write(offset, staged).await.map_err(fail)?;
            self.cache.sizes.reaches(file, offset + len as u64);
        } else {
            unseen = hold.writer().await.write_direct(offset, staged).await.map_err(fail)?;
        }
        // Only full pages: a page that was written in part cannot serve reads.
        let page = penstock_base::BLOCK_BYTES as u64;
        hold.serves(offset.next_multiple_of(page)..(offset + len as u64) / page * page);
        match unseen {
            Some(unseen) => request.store = Some(hold.drop_old_pages(unseen).await),
            None => request.hold = Some(hold),
        }
        // The kernel sends an FSYNC itself only after writes that go through its pages.
        if !through_pages && flags.bits() & DSYNC != 0 {
            self.sync_through(file, fh).await?;
        }
        Ok(Answer::of(&WriteOut { size: to_u32(len), padding: 0 }))
    }

    fn writes_through_pages(&self, fh: u64, flags: OFlags) -> bool {
        self.writers.borrow().contains(&fh) && !flags.contains(OFlags::DIRECT)
    }

    /// Notes the pages that a request has locked, or may have, from its arrival until the result is dropped,
    /// whatever it waits for meanwhile. None if it has none.
    pub(crate) fn note_locked(&self, request: &Request) -> Option<HeldRange<FileId>> {
        let file = request.file;
        match request.header.opcode {
            op::READ => {
                let ReadIn { offset, size, read_flags, .. } = request.argument().ok()?;
                let pages = read_flags & READ_LOCKOWNER == 0;
                let bytes = offset..offset.saturating_add(size.into());
                pages.then(|| self.cache.locked.read_begins(file, bytes))
            }
            op::WRITE => {
                let WriteIn { fh, offset, size, write_flags, flags, .. } = request.argument().ok()?;
                let pages = write_flags & WRITE_CACHE == 0
                    && self.writes_through_pages(fh, OFlags::from_bits_retain(flags));
                let bytes = offset..offset.saturating_add(size.into());
                pages.then(|| self.cache.locked.write_begins(file, bytes)).flatten()
            }
            _ => None,
        }
    }

    /// Serves a WRITE by which the kernel writes back pages. If the lease runs out first, answers at once
    /// where the data can be deferred, and writes it when the service answers.
    async fn write_page(
        &self,
        request: &mut Request,
        offset: u64,
        staged: Staged,
        write_flags: u32,
    ) -> Result<Answer, Errno> {
        let file = request.file;
        let len = staged.len;
        let written = || Answer::of(&WriteOut { size: to_u32(len), padding: 0 });
        let bytes = offset..offset.saturating_add(len as u64);
        let mark = self.cache.deferred.mark();
        let mut work = pin!(async {
            self.cache.deferred.earlier(mark, file, bytes.clone()).await;
            let hold = self.client.hold(file, Purpose::Page).await?;
            if write_flags & WRITE_KILL_SUIDGID != 0 {
                self.drop_set_id(&hold, file).await?;
            }
            hold.writer().await.write_page(offset, staged).await?;
            Ok::<_, Failure>(hold)
        });
        let done = match select(work.as_mut(), pin!(self.client.lapsed())).await {
            Either::Left((done, _)) => done,
            Either::Right(_) => {
                let deferral = self.cache.deferred.take(file, bytes.clone());
                if matches!(deferral, Deferral::Taken(_)) {
                    request.answer_early(written());
                }
                let done = work.await;
                if let (Err(failure), Deferral::Taken(_)) = (&done, deferral) {
                    if !self.client.has_ended() {
                        tracing::error!(%failure, %file, "a page that was written back while the service did not answer is lost");
                    }
                    self.client.note_lost_page(file);
                }
                done
            }
        };
        request.hold = Some(done.map_err(|failure| errno(&failure))?);
        Ok(written())
    }

    pub(crate) async fn fallocate(&self, request: &Request) -> Result<Answer, Errno> {
        let FallocateIn { offset, length, mode, .. } = request.argument()?;
        let mode = FallocateFlags::from_bits_retain(mode);
        let keep = FallocateFlags::KEEP_SIZE;
        let change = match mode.difference(keep) {
            what if what.is_empty() => SpaceChange::Reserve,
            FallocateFlags::ZERO_RANGE => SpaceChange::Zero,
            FallocateFlags::PUNCH_HOLE if mode.contains(keep) => SpaceChange::Punch,
            _ => return Err(Errno::OPNOTSUPP),
        };
        let keep_size = mode.contains(keep);
        self.drop_privileges(request, request.file).await.map_err(|failure| errno(&failure))?;
        let result = self.client.change_space(request.file, offset, length, change, keep_size).await;
        result.map(|()| Answer::Done).map_err(|failure| errno(&failure))
    }

    /// Copies between two files. Before the request the kernel has written back its pages of both files.
    /// After the reply it drops those of the second file, together with what a program has stored in them
    /// since. Where a program may do that, EOPNOTSUPP makes the kernel copy by itself, which drops nothing.
    pub(crate) async fn copy_file_range(&self, request: &Request) -> Result<Answer, Errno> {
        let CopyFileRangeIn { off_in, nodeid_out, off_out, len, flags, .. } = request.argument()?;
        if flags != 0 {
            return Err(Errno::INVAL);
        }
        let to = (self.file(nodeid_out)?, off_out);
        self.cache.deferred.none(to.0, 0..u64::MAX).await;
        self.drop_privileges(request, to.0).await.map_err(|failure| errno(&failure))?;
        let bytes = off_out..off_out.saturating_add(len.min(MOST_COPIED));
        let page = penstock_base::BLOCK_BYTES as u64;
        let whole = bytes.start.is_multiple_of(page) && bytes.end.is_multiple_of(page);
        if !whole && self.client.is_mapped(to.0) {
            return Err(Errno::OPNOTSUPP);
        }
        let reads = self.client.watch_reads(to.0, bytes.clone());
        self.cache.drop_pages(to.0, bytes).await;
        let result = self.client.copy((request.file, off_in), to, len).await;
        if reads.was_read() {
            return Err(Errno::OPNOTSUPP);
        }
        let copied = |copied: u64| Answer::of(&WriteOut { size: to_u32(copied), padding: 0 });
        result.map(copied).map_err(|failure| errno(&failure))
    }

    /// Removes set-id bits and capabilities before contents change without passing through the kernel's
    /// pages, as `file_modified` does in the kernel. Root keeps the bits. In a WRITE the kernel says if they
    /// must go.
    async fn drop_privileges(&self, request: &Request, file: FileId) -> Result<(), Failure> {
        if request.header.uid != 0 {
            let hold = self.client.hold(file, Purpose::Write).await?;
            self.drop_set_id(&hold, file).await?;
        }
        self.drop_capability(file).await
    }

    /// Clears the set-id bits, and drops the kernel's attributes, which still contain them.
    async fn drop_set_id(&self, hold: &Hold, file: FileId) -> Result<(), Failure> {
        // Boxed: it is rare, and would make each request larger.
        if Box::pin(hold.drop_set_id()).await? {
            self.cache.drop_attributes(file).await;
        }
        Ok(())
    }

    /// Removes the capabilities of a file before a write. The kernel does that itself for writes through its
    /// pages.
    async fn drop_capability(&self, file: FileId) -> Result<(), Failure> {
        let look = self.capabilities.look(self.client.owns(file));
        if self.capabilities.has_none(look, file) {
            return Ok(());
        }
        match self.client.get_xattr(file, CAPABILITY).await {
            Ok(_) => {
                let take = async || match self.client.remove_xattr(file, CAPABILITY).await {
                    // Another write may have removed it first.
                    Err(failure) if !is_nothing(&failure) => Err(failure),
                    _ => Ok(()),
                };
                self.client.take_durably(take).await?;
            }
            Err(failure) if is_nothing(&failure) => {}
            Err(failure) => return Err(failure),
        }
        self.capabilities.note_none(look, file);
        Ok(())
    }

    /// Serves SEEK_DATA and SEEK_HOLE. The kernel serves the others itself, and has written back its pages
    /// before this.
    pub(crate) async fn lseek(&self, request: &Request) -> Result<Answer, Errno> {
        let LseekIn { offset, whence, .. } = request.argument()?;
        let hole = match whence {
            SEEK_DATA => false,
            SEEK_HOLE => true,
            _ => return Err(Errno::INVAL),
        };
        let result = self.client.seek(request.file, offset, hole).await;
        result.map(|offset| Answer::of(&LseekOut { offset })).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn fsync(&self, request: &Request) -> Result<Answer, Errno> {
        let FsyncIn { fh, .. } = request.argument()?;
        self.sync_through(request.file, fh).await.map(|()| Answer::Done)
    }

    async fn sync_through(&self, file: FileId, fh: u64) -> Result<(), Errno> {
        let descriptor = self.reported.borrow().get(&fh).cloned();
        let result = match descriptor {
            Some(descriptor) => self.client.fsync_through(file, &descriptor).await,
            None => self.client.fsync(file).await,
        };
        result.map_err(|failure| errno(&failure))
    }

    /// Syncs what this client wrote before, then names: a name is never durable before the data of its file.
    pub(crate) async fn fsyncdir(&self) -> Result<Answer, Errno> {
        self.client.sync_directory().await.map(|()| Answer::Done).map_err(|failure| errno(&failure))
    }
}

/// True if the failure says that there is no such extended attribute.
fn is_nothing(failure: &Failure) -> bool {
    failure.errno == to_u16(Errno::NODATA.raw_os_error())
}
