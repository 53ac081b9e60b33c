//! A file under its lease: reads, writes and changes of attributes.

use crate::direct::Unseen;
use crate::lease::{Purpose, Right, Waiting};
use crate::leases::{Admission, Asking, LeaseUse, Store};
use crate::reader::Reader;
use crate::session::Session;
use crate::writer::Writer;
use futures_util::future::{Either, select};
use penstock_base::FileId;
use penstock_wire::metadata::{Attr, LeaseReply, LeaseRequest, SetAttrRequest};
use penstock_wire::{Failure, Kind};
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;

/// A file whose lease this client keeps until this is dropped. Operations on contents and attributes need
/// one.
pub struct Hold {
    session: Rc<Session>,
    file: FileId,
    lease: LeaseUse,
}

impl Hold {
    /// Acquires the lease of a file for an operation.
    pub(crate) async fn acquire(
        session: &Rc<Session>,
        file: FileId,
        purpose: Purpose,
    ) -> Result<Self, Failure> {
        let locked = match purpose {
            Purpose::Read | Purpose::Page => 0..0,
            // A write may have a page locked that it fills in part, and a change of size keeps all changed
            // pages back.
            Purpose::Write | Purpose::Resize => 0..u64::MAX,
        };
        Self::acquire_for(session, file, purpose, Waiting::new(locked, false)).await
    }

    /// Acquires the lease of a file for a read of these bytes into pages that the kernel has locked for it.
    pub(crate) async fn acquire_to_fill(
        session: &Rc<Session>,
        file: FileId,
        bytes: Range<u64>,
    ) -> Result<Self, Failure> {
        Self::acquire_for(session, file, Purpose::Read, Waiting::new(bytes, true)).await
    }

    async fn acquire_for(
        session: &Rc<Session>,
        file: FileId,
        purpose: Purpose,
        waiting: Waiting,
    ) -> Result<Self, Failure> {
        let (leases, waiting) = (session.leases(), Rc::new(waiting));
        let mut waits = None;
        let listener = leases.listen(file);
        loop {
            session.in_lease().await?;
            let changed = listener.changed();
            let is_written = session.files().with(file, |state| state.is_written_by_pages()) == Some(true);
            let right = Right::to_be(purpose != Purpose::Read || is_written);
            let admission = leases.admit(file, right, purpose, &waiting);
            if let Admission::Use(lease) = admission {
                return Ok(Self { session: session.clone(), file, lease });
            }
            waits.get_or_insert_with(|| leases.wait(file, &waiting));
            let Admission::Ask(asking) = admission else {
                changed.await;
                continue;
            };
            // The lease may come after others have got this client's present one.
            let asked = pin!(ask(session, file, asking));
            let suffices = pin!(listener.until(|| leases.suffices(file, purpose, &waiting)));
            if let Either::Left((asked, _)) = select(asked, suffices).await {
                asked?;
            }
        }
    }

    /// Waits until no other operation of this client writes, to read.
    pub async fn reader(&self) -> Reader<'_> {
        Reader::begin(&self.session, self.file).await
    }

    /// Waits until no other operation of this client reads or writes, to write.
    pub async fn writer(&self) -> Writer<'_> {
        Writer::begin(&self.session, self.file).await
    }

    /// Returns the size of the file in bytes.
    pub async fn size(&self) -> Result<u64, Failure> {
        let size = self.session.state(self.file).await?.borrow().size();
        self.session.files().forget_idle(self.file);
        Ok(size)
    }

    /// Records the bytes that the kernel may have in pages once the operation's reply is sent. Call right
    /// before that.
    pub fn serves(&self, bytes: Range<u64>) {
        self.lease.serves(bytes);
    }

    /// Begins a notification with these bytes of the file, which are known through the hold. Unlike the hold,
    /// the result may be kept while it waits for a locked page.
    pub fn store(&self, bytes: Range<u64>) -> Store {
        self.lease.store(bytes)
    }

    /// Makes the kernel drop the pages from before a direct write, which may be acknowledged then. Drops the
    /// hold first, because a page may be locked for a request that waits for the lease. The result keeps the
    /// lease as well.
    pub async fn drop_old_pages(self, unseen: Unseen) -> Store {
        let (session, file, store) = (self.session.clone(), self.file, self.lease.store(unseen.bytes()));
        drop(self);
        session.kernel().drop_pages(file, unseen.bytes()).await;
        store
    }

    /// Changes attributes of the file.
    pub async fn set_attr(&self, request: SetAttrRequest) -> Result<Attr, Failure> {
        assert_eq!(request.ino, self.file.ino.0, "a request is about the file that is held");
        let (session, dropped) = (&self.session, request.drop_set_id);
        let takes_bits = dropped && session.files().with(self.file, |state| state.has_set_id()) == Some(true);
        let attr = match takes_bits {
            true => take_durably(session, async || self.change_attr(request.clone()).await).await?,
            false => self.change_attr(request).await?,
        };
        session.files().with(self.file, |state| state.mode_set(attr.mode, dropped));
        Ok(attr)
    }

    async fn change_attr(&self, request: SetAttrRequest) -> Result<Attr, Failure> {
        let (session, file) = (&self.session, self.file);
        if let Some(size) = request.size {
            return self.writer().await.resize(request, size).await;
        }
        let mut turn = None;
        if request.mtime.is_some() {
            // A time that is set must not be overtaken by the time of an earlier write.
            turn = Some(session.turns().exclusive(file).await);
            session.sync_file(file).await?;
        }
        let mark = session.recent().mark();
        let attr = session.newest(mark, session.change_inode(Kind::SetAttr, file, &request).await?).await;
        drop(turn);
        attr
    }

    /// Removes the set-id bits from an open file before a process writes to it that may not keep them.
    /// Returns true if there were any.
    pub async fn drop_set_id(&self) -> Result<bool, Failure> {
        if !self.session.state(self.file).await?.borrow().has_set_id() {
            return Ok(false);
        }
        let request = SetAttrRequest { ino: self.file.ino.0, drop_set_id: true, ..SetAttrRequest::default() };
        self.set_attr(request).await.map(|_| true)
    }
}

/// Asks the service for a lease, and waits until it is granted, or the era has ended: then the service may
/// have forgotten it, or its number may be that of another grant.
async fn ask(session: &Session, file: FileId, asking: Asking<'_>) -> Result<(), Failure> {
    session.leases().trim(|file| session.files().contains(file) || session.is_owed(file));
    let exclusive = asking.right() == Right::Exclusive;
    let request = LeaseRequest { ino: file.ino.0, exclusive, first: 0, last: u64::MAX };
    let _place = session.place_for_lease().await;
    let era = session.era();
    let LeaseReply { grant, wait } = session.ask(Kind::Lease, file.branch, &request).await?;
    let is_over = || session.era() != era || session.is_over();
    if wait {
        asking.wait(is_over).await;
    } else if !is_over() {
        asking.granted(grant);
    }
    Ok(())
}

/// Removes set-id bits or capabilities from a file, durably, before the write that requires it. A write
/// during a restart of the service is repeated, but the removal would not be. So it is repeated here if the
/// service restarted meanwhile.
pub(crate) async fn take_durably<T>(
    session: &Session,
    take: impl AsyncFn() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let take_and_sync = async || {
        let taken = take().await?;
        session.sync_names().await?;
        Ok(taken)
    };
    session.under_one_start(take_and_sync).await
}
