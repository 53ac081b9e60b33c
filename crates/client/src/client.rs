//! The client: opens files, and reads and writes them with a lease acquired for each call.

use crate::blocks::{end_of, stage};
use crate::direct::{Contents, Unseen};
use crate::hold::{Hold, take_durably};
use crate::kernel::KernelCache;
use crate::lease::Purpose;
use crate::leases::Ownership;
use crate::losses::Reported;
use crate::recovery::recovery_task;
use crate::session::{ClientLatency, Session};
use crate::sync::Begun;
use crate::writer::Staged;
use crate::{sync, watch};
use penstock_base::buf::gather;
use penstock_base::{Branch, Buf, Env, ErrorKind, FileId, Ino, TargetId};
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::{Attr, AttrReply, EmptyReply, InodeRequest, SetAttrRequest, Time};
use penstock_wire::{Failure, Kind, Transport};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// Bytes read and written at a time, which bounds the memory of a copy.
const PIECE_BYTES: u64 = 1 << 20;
/// Most bytes that one call copies, so that none takes long. The caller repeats the call for the rest.
pub const MOST_COPIED: u64 = 16 << 20;

/// A client of one file system.
pub struct Client {
    pub(crate) session: Rc<Session>,
    root: FileId,
}

impl Client {
    /// Begins a session. `name` identifies the client for people.
    pub async fn connect(env: &Env, transport: Rc<dyn Transport>, name: &str) -> Result<Rc<Self>, Failure> {
        Self::connect_to_mount(env, transport, name, "").await
    }

    /// Begins a session of a mount. `name` and `mount`, its path, are shown to people.
    pub async fn connect_to_mount(
        env: &Env,
        transport: Rc<dyn Transport>,
        name: &str,
        mount: &str,
    ) -> Result<Rc<Self>, Failure> {
        let (session, root, lease) = Session::begin(env, transport, name, mount).await?;
        env.spawn("client sync", Box::pin(sync::sync_task(session.clone())));
        env.spawn("client watch", Box::pin(watch::watch_task(session.clone())));
        if let Some(lease) = lease {
            env.spawn("client lease", Box::pin(watch::lease_task(session.clone(), lease)));
            env.spawn("client lapse", Box::pin(watch::lapse_task(session.clone())));
            env.spawn("client recovery", Box::pin(recovery_task(session.clone())));
        }
        Ok(Rc::new(Self { session, root }))
    }

    /// Returns the latencies of the client's requests.
    pub fn latency(&self) -> &ClientLatency {
        self.session.latency()
    }

    /// Returns the number of the session.
    pub fn session(&self) -> u64 {
        self.session.number()
    }

    /// Returns the root directory.
    pub fn root(&self) -> FileId {
        self.root
    }

    /// Returns the wall-clock time in nanoseconds since 1970.
    pub fn now(&self) -> Time {
        self.session.now()
    }

    /// Makes everything durable and ends the session.
    pub async fn close(&self) -> Result<(), Failure> {
        let result = self.sync_all().await;
        self.session.close();
        match self.session.ask::<EmptyReply>(Kind::End, Branch::MAIN, &EmptyReply {}).await {
            // The request was repeated, because the connection was lost together with the first answer.
            Err(failure) if failure.kind == ErrorKind::Ended => result,
            ended => result.and(ended.map(drop)),
        }
    }

    /// True if the session has ended.
    pub fn has_ended(&self) -> bool {
        self.session.restarts().has_ended()
    }

    /// Waits until the lease time has run out: the service does not answer, and others may change the files.
    pub async fn lapsed(&self) {
        self.session.leases().clock().not_running().await;
    }

    /// Time for which the kernel may cache names and attributes that it gets now, if no other client uses the
    /// file system.
    pub fn left_of_lease(&self) -> Duration {
        self.session.leases().clock().left()
    }

    /// Makes everything durable and gives up all leases, so that the next client need not wait for this one.
    pub async fn leave(&self) -> Result<(), Failure> {
        watch::leave(&self.session).await
    }

    /// Sets the kernel behind this client.
    pub fn set_kernel_cache(&self, cache: Option<Rc<dyn KernelCache>>) {
        self.session.kernel().set(cache);
    }

    /// Makes the kernel drop its pages of a file in the background, after the reply in progress has been
    /// sent.
    pub fn drop_pages_soon(&self, file: FileId) {
        self.session.kernel().drop_pages_soon(file);
    }

    /// True if no other client uses the file system, so that the kernel may cache names and attributes for a
    /// moment.
    pub fn is_alone(&self) -> bool {
        self.session.leases().is_alone()
    }

    /// True if the kernel may cache these attributes although there are other clients: this client has had a
    /// lease on them since they were read. Call when the kernel gets them.
    pub fn caches_attributes(&self, attr: &Attr) -> bool {
        self.caches_under(attr.file(), (attr.lease > 0).then_some(attr.lease))
    }

    /// The number of the lease on the names of a directory; none without one.
    pub fn lease_on_names(&self, dir: FileId) -> Option<u64> {
        self.session.leases().of_attributes(dir)
    }

    /// True if the kernel may cache a name although there are other clients: this client has had this lease
    /// on the directory since before it asked for the name. Call when the kernel gets it.
    pub fn caches_names(&self, dir: FileId, lease: Option<u64>) -> bool {
        self.caches_under(dir, lease)
    }

    fn caches_under(&self, file: FileId, lease: Option<u64>) -> bool {
        let (leases, now) = (self.session.leases(), self.session.env().now());
        !self.session.is_over() && lease.is_some_and(|lease| leases.uses_attributes(file, lease, now))
    }

    /// True if other clients use the file system, or did: the kernel may have sizes cached that they have
    /// changed.
    pub fn was_shared(&self) -> bool {
        self.session.leases().was_shared()
    }

    /// Returns the current period as the sole client; `None` if there are others.
    pub fn owns_all(&self) -> Option<Ownership> {
        self.session.owns_all()
    }

    /// Returns the current period in which no other client may change the file; `None` if others may.
    pub fn owns(&self, file: FileId) -> Option<Ownership> {
        self.session.leases().owns(file, self.session.restarts().changes())
    }

    /// True if the kernel may keep the pages that it has of a file which it is opening.
    pub fn keeps_pages(&self, file: FileId) -> bool {
        self.session.leases().keeps_pages(file)
    }

    /// Acquires the lease of a file for an operation.
    pub async fn hold(&self, file: FileId, purpose: Purpose) -> Result<Hold, Failure> {
        Hold::acquire(&self.session, file, purpose).await
    }

    /// Acquires the lease of a file for a read of these bytes into pages that the kernel has locked for it.
    pub async fn hold_to_fill(&self, file: FileId, bytes: Range<u64>) -> Result<Hold, Failure> {
        Hold::acquire_to_fill(&self.session, file, bytes).await
    }

    /// Acquires the lease under which these attributes are changed.
    pub async fn hold_to_set(&self, branch: Branch, request: &SetAttrRequest) -> Result<Hold, Failure> {
        // Other clients may have its mode and times cached, and only the owner of the lease may change the
        // size.
        let purpose = if request.size.is_some() { Purpose::Resize } else { Purpose::Write };
        self.hold(FileId { branch, ino: Ino(request.ino) }, purpose).await
    }

    /// Opens a file. It exists while it is open, even without a name. Returns its size in bytes.
    pub async fn open(&self, file: FileId) -> Result<u64, Failure> {
        let session = &self.session;
        let mark = session.recent().mark();
        let reply = {
            let reply: AttrReply =
                session.once(Kind::Open, file.branch, &InodeRequest { ino: file.ino.0 }).await?;
            if session.leases().covers(file) {
                let attr = session.newest(mark, reply).await?;
                session.note_open(&attr);
                return Ok(attr.size);
            }
            session.note_open(&reply.attr.clone().unwrap_or_default());
            reply
        };
        // This may wait for another client, so no lock is held here.
        let attr = match reply.may_be_unsynced {
            true => session.attributes(file).await,
            false => session.newest(mark, reply).await,
        };
        match attr {
            Ok(attr) => Ok(attr.size),
            Err(failure) => {
                self.release(file).await?;
                Err(failure)
            }
        }
    }

    /// Closes one handle of a file.
    pub async fn release(&self, file: FileId) -> Result<(), Failure> {
        self.session.files().with(file, |state| state.close());
        self.session.files().forget_idle(file);
        self.session.send_close(file).await
    }

    /// Returns files that programs have open, or of which the kernel has pages that programs change in
    /// mappings.
    pub fn open_files(&self) -> Vec<FileId> {
        self.session.open_files()
    }

    /// Releases all locks and closes all files. Call when the kernel that had them is gone: an aborted
    /// connection sends no unlocks and no closes.
    pub async fn close_all(&self) -> Result<(), Failure> {
        for lock in self.session.locks().all() {
            self.unlock_all(lock.file(), lock.owner, lock.flock).await?;
        }
        self.session.direct().close_all();
        let mut open = Vec::new();
        self.session.files().for_each(|file, state| open.push((file, state.kernel_is_gone())));
        for (file, opens) in open {
            for _ in 0..opens {
                self.release(file).await?;
            }
        }
        Ok(())
    }

    /// Counts an open handle that may write through the kernel's pages, or one less.
    pub fn note_writer(&self, file: FileId, more: bool) {
        self.session.files().with(file, |state| state.count_writer(more));
    }

    /// Records that the kernel may have pages of an open file that programs change in mappings, or none any
    /// more. While it may, every lease is exclusive: two clients that changed parts of one page would
    /// overwrite each other's changes.
    pub fn note_mapped(&self, file: FileId, mapped: bool) {
        self.session.files().with(file, |state| state.set_mapped(mapped));
    }

    /// True if the kernel may have pages of the file that programs change in mappings.
    pub fn is_mapped(&self, file: FileId) -> bool {
        self.session.files().with(file, |state| state.is_mapped()) == Some(true)
    }

    /// Records that programs of this mount may write to a file from now on, or that none may any more.
    pub fn note_open_for_writing(&self, file: FileId, open: bool) {
        let direct = self.session.direct();
        if open { direct.opened(file) } else { direct.closed(file) }
    }

    /// True if nothing of this client is left that may still alter the attributes of a file: no change of
    /// names or attributes is under way, and the file is not open here and has no unsynced writes.
    pub fn is_settled(&self, file: FileId) -> bool {
        self.session.last_dir().is_idle() && !self.session.files().contains(file)
    }

    /// True if a direct write of a file is done and the kernel may still have pages from before it.
    pub fn has_unseen_writes(&self, file: FileId) -> bool {
        self.session.direct().has_unseen(file)
    }

    /// Waits until the kernel has dropped the pages from before all direct writes of a file that are done by
    /// now.
    pub async fn direct_writes_seen(&self, file: FileId) {
        self.session.direct().all_seen(file).await;
    }

    /// Tracks the reads of these bytes into the kernel's pages until the result is dropped
    /// ([`Unseen::was_read`]).
    pub fn watch_reads(&self, file: FileId, bytes: Range<u64>) -> Unseen {
        self.session.direct().note_write(file, bytes, Contents::Any)
    }

    /// Reads up to `len` bytes at `offset`; fewer at the end of the file. The bytes are returned as runs, in
    /// order.
    pub async fn read(&self, file: FileId, offset: u64, len: u64) -> Result<Vec<Buf>, Failure> {
        let hold = self.hold(file, Purpose::Read).await?;
        hold.reader().await.read(offset, len).await
    }

    /// Returns the first offset at or behind `offset` that is data, or with `hole` the first in a hole; the
    /// end of the file counts as a hole. Fails with ENXIO if there is none.
    pub async fn seek(&self, file: FileId, offset: u64, hole: bool) -> Result<u64, Failure> {
        let hold = self.hold(file, Purpose::Read).await?;
        hold.reader().await.seek(offset, hole).await
    }

    /// Writes bytes at `offset`. They are visible when this returns, and durable after an fsync.
    pub async fn write(&self, file: FileId, offset: u64, data: &[u8]) -> Result<(), Failure> {
        let hold = self.hold(file, Purpose::Write).await?;
        hold.writer().await.write(offset, Staged::of(offset, data)).await
    }

    /// Appends bytes to the file. Returns the offset where they begin.
    pub async fn append(&self, file: FileId, data: &[u8]) -> Result<u64, Failure> {
        let hold = self.hold(file, Purpose::Write).await?;
        Ok(hold.writer().await.append(0, Staged::of(0, data)).await?.0)
    }

    /// Changes the space of `len` bytes at `offset`. Writing to preallocated space needs no further space,
    /// even after a restart, once the file is synced. The size stays with `keep_size`, and always when
    /// punching.
    pub async fn change_space(
        &self,
        file: FileId,
        offset: u64,
        len: u64,
        change: SpaceChange,
        keep_size: bool,
    ) -> Result<(), Failure> {
        // Refused before anything waits for another client.
        let range = offset..end_of(offset, len)?;
        if range.is_empty() {
            return Err(Failure::new(ErrorKind::Invalid, "a range without bytes"));
        }
        let hold = self.hold(file, Purpose::Write).await?;
        let unseen = hold.writer().await.change_space(range, change, keep_size).await?;
        if let Some(unseen) = unseen {
            hold.drop_old_pages(unseen).await;
        }
        Ok(())
    }

    /// Copies up to `len` bytes from an offset of one file to an offset of another. Returns the number of
    /// bytes copied; 0 at the end of the first file. A failure after some bytes were copied is not returned:
    /// the next call meets it again.
    pub async fn copy(&self, from: (FileId, u64), to: (FileId, u64), len: u64) -> Result<u64, Failure> {
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

    async fn copy_piece(
        &self,
        from: (FileId, u64),
        to: (FileId, u64),
        at: u64,
        len: u64,
    ) -> Result<u64, Failure> {
        let parts = self.read(from.0, from.1.saturating_add(at), len).await?;
        let offset = to.1.saturating_add(at);
        let len = parts.iter().map(Buf::len).sum();
        let staged = Staged { blocks: stage(offset, &gather(&parts)), len };
        let hold = self.hold(to.0, Purpose::Write).await?;
        hold.writer().await.write(offset, staged).await?;
        Ok(len as u64)
    }

    /// True if a file has unsynced writes.
    pub fn is_unsynced(&self, file: FileId) -> bool {
        self.session.files().with(file, |state| state.has_unsynced_writes()) == Some(true)
    }

    /// The targets that have answered writes to a file and have not committed it.
    pub fn targets_to_commit(&self, file: FileId) -> Vec<TargetId> {
        self.session.targets().written_on(file)
    }

    /// fsync: makes durable all earlier writes to the file by this client and by others, its size, and every
    /// earlier change of names. Fails, once, if earlier writes were lost.
    pub async fn fsync(&self, file: FileId) -> Result<(), Failure> {
        self.session.fsync(file).await
    }

    /// Like [`Client::fsync`], through a descriptor: fails once for each loss that it has not reported.
    pub async fn fsync_through(&self, file: FileId, descriptor: &Reported) -> Result<(), Failure> {
        self.session.fsync_through(file, descriptor).await
    }

    /// Makes every acknowledged operation on names durable. Fails, once, if one was lost.
    pub async fn sync(&self) -> Result<(), Failure> {
        let begun = Begun::now(&self.session);
        self.session.sync_names().await?;
        self.session.restarts().report_lost_names()?;
        begun.covers_others(&self.session).await
    }

    /// fsync of a directory: makes durable all writes of this client and every change of names. Lost writes
    /// to a file are reported by an fsync of that file.
    pub async fn sync_directory(&self) -> Result<(), Failure> {
        let begun = Begun::now(&self.session);
        self.session.sync_rest().await?;
        self.session.restarts().report_lost_names()?;
        begun.covers_others(&self.session).await
    }

    /// Makes everything durable that can be. Leaves losses to be reported by an fsync.
    pub async fn sync_rest(&self) -> Result<(), Failure> {
        self.session.sync_rest().await
    }

    /// Makes everything durable and reports all losses.
    pub async fn sync_all(&self) -> Result<(), Failure> {
        self.session.sync_rest().await?;
        self.session.report_all()
    }

    /// Records that a page of a file that the kernel had written back is lost.
    pub fn note_lost_page(&self, file: FileId) {
        self.session.files().with(file, |state| state.lose_part());
    }

    /// Fails a close if writes of the file were lost. The caller of close may ignore errors, for example a
    /// program that is started while another thread opens files. So the loss is reported here and stays to be
    /// reported until the last close.
    pub fn tell_lost(&self, file: FileId, descriptor: &Reported) -> Result<(), Failure> {
        self.session.tell_lost(file, descriptor)
    }

    /// For a descriptor opened now: it need not report losses that were reported before.
    pub fn reported(&self, file: FileId) -> Reported {
        self.session.reported(file)
    }

    /// Removes set-id bits or capabilities from a file, durably, before the write that requires it. A write
    /// during a restart of the service is repeated, but the removal would not be. So it is repeated here if
    /// the service restarted meanwhile.
    pub async fn take_durably<T>(&self, take: impl AsyncFn() -> Result<T, Failure>) -> Result<T, Failure> {
        take_durably(&self.session, take).await
    }
}
