//! Leases: the right to cache a file, here and in the kernel, while other clients use it too.
//!
//! Every operation on a file's contents uses the file's lease, shared or exclusive. It does so from before it
//! looks at the file's state until after its reply has gone to the kernel, which puts pages of the reply into
//! its cache. When the service revokes a lease, the kernel drops its pages, the file is synced, and then the
//! lease is released.
//!
//! The sole client of a service needs no leases. Then the kernel may cache names and attributes for a moment
//! ([`crate::KernelCache::names_expire`]); with other clients present it needs a lease for them too
//! ([`crate::attribute_leases`]).
//!
//! The kernel locks a page while it waits for a read of it, or for a write of a part of it, and dropping a
//! page waits for that lock. Three rules keep this from ending in a deadlock:
//! - While pages are dropped, the lease still serves the requests that block the drop (`revoke`).
//! - A file that this client has open for writing through its pages gets no shared lease, because a write
//!   would have to wait for the exclusive one.
//! - A read under a shared lease that is being revoked does not wait for the exclusive lease that it would
//!   request otherwise. Neither do the write-back of a page and a change of size, during which the kernel
//!   keeps changed pages back ([`Purpose`]); the service makes other clients drop all that the new size makes
//!   wrong.
//!
//! Invariants:
//! - A lease is released only if no operation uses it, the kernel has no page of the file, and the file is
//!   synced.
//! - Once grant n has been revoked, a grant numbered n or lower that arrives late is ignored.
//! - The state of a file that no lease covers is stale: it is fetched before it is used. Under a shared lease
//!   that is being revoked, others may change the size. A write carries the truncate generation that it
//!   knows, and is repeated if that is out of date.

use crate::attribute_leases::AttributeLeases;
use crate::by_file::{ByFile, Listener};
use crate::lease::{Lease, Purpose, Revocation, Right, Waiting};
use crate::lease_clock::LeaseClock;
use penstock_base::{BoundedSet, FileId, HashMap};
use penstock_wire::metadata::{Attr, FileRef, ReleasedLease};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// Most leases that are kept for files that are not open, in case they are opened again.
const MOST_IDLE: usize = 4096;
/// Most leases, and most files, that one request reports.
const MOST_REPORTED: usize = 4096;
const STAYS: &str = "a lease stays while it is used, waited for or revoked";

/// A period in which no other client may change a file, or any file, and the service does not restart, which
/// could undo this client's changes. Facts observed in it are valid until its end. No period occurs twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// While this is the sole client.
    Alone {
        /// Number of changes of the service's start that this client has seen.
        start: u64,
        /// Number of times that this client has become the sole one.
        time: u64,
    },
    /// While an exclusive lease lasts.
    Lease {
        /// Number of changes of the service's start that this client has seen. Each start numbers grants
        /// anew.
        start: u64,
        /// The number of the lease's grant.
        grant: u64,
    },
}

/// All leases of a client.
#[derive(Default)]
pub(crate) struct Leases {
    clock: LeaseClock,
    is_alone: Cell<bool>,
    /// Number of times that this client became the sole one.
    times_alone: Cell<u64>,
    /// Number of times that this client has left.
    times_left: Cell<u64>,
    /// It has met other clients.
    met_others: Cell<bool>,
    /// It was the sole client, and the kernel may have pages of files without a lease.
    was_unleased: Cell<bool>,
    /// Operations in progress without a lease.
    busy: Cell<u64>,
    table: RefCell<HashMap<FileId, Lease>>,
    attributes: AttributeLeases,
    void: Cell<u64>,
    /// The newest grant of a lease that was released because there were many. Older ones that arrive late
    /// may be of the same file.
    trimmed: Cell<u64>,
    /// Wakes what waits for the lease of a file.
    changed: ByFile,
    /// Notified when the last operation without a lease ends.
    no_use: Notify,
    /// Number of times that refused requests may be sent again, and their wake-up.
    agains: Cell<u64>,
    again: Notify,
    /// The last number of the service's news that was seen.
    seen: Cell<u64>,
    released: RefCell<Vec<ReleasedLease>>,
    /// Files whose size nobody here wants to change any more.
    resigned: RefCell<Vec<FileId>>,
    /// While this is the sole client: the kernel may have pages from a time with others, except of the files
    /// in `kept`.
    is_soiled: Cell<bool>,
    kept: BoundedSet<FileId>,
}

/// Use of a file's lease by an operation; the lease is kept until this is dropped.
pub(crate) struct LeaseUse {
    leases: Rc<Leases>,
    /// None for the sole client, which needs no lease.
    file: Option<FileId>,
}

/// Admission of an operation.
pub(crate) enum Admission<'a> {
    /// It may begin.
    Use(LeaseUse),
    /// It asks the service for a lease.
    Ask(Asking<'a>),
    /// It waits until something changes.
    Wait,
}

impl LeaseUse {
    /// Records the bytes that the kernel may have in pages once the operation's reply is sent. Call right
    /// before that.
    pub(crate) fn serves(&self, bytes: Range<u64>) {
        if let Some(file) = self.file {
            self.leases.with(file, |lease| lease.serve(bytes));
        }
    }

    /// Begins a notification with these bytes of the file, which are known through the lease. Unlike the use,
    /// the result may be kept while it waits for a locked page.
    pub(crate) fn store(&self, bytes: Range<u64>) -> Store {
        if let Some(file) = self.file {
            self.leases.with(file, Lease::begin_store).expect(STAYS);
        }
        Store { leases: self.leases.clone(), file: self.file, bytes }
    }
}

impl Drop for LeaseUse {
    fn drop(&mut self) {
        match self.file {
            None => {
                let left = self.leases.busy.get().checked_sub(1).expect("every use ends once");
                self.leases.busy.set(left);
                if left == 0 {
                    self.leases.no_use.notify_waiters();
                }
            }
            Some(file) => {
                if self.leases.with(file, Lease::end_use).expect(STAYS) {
                    self.leases.notify(file);
                }
            }
        }
    }
}

/// A FUSE notification that puts bytes into the kernel's pages or removes them. Unlike a use of a lease it
/// may wait for a page that is locked for a request which waits for the lease. So the lease serves such
/// requests until the notification ends.
pub struct Store {
    leases: Rc<Leases>,
    file: Option<FileId>,
    bytes: Range<u64>,
}

impl Store {
    /// Returns the range of bytes of the file.
    pub fn bytes(&self) -> Range<u64> {
        self.bytes.clone()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(file) = self.file {
            self.leases.with(file, |lease| lease.end_store(self.bytes.clone())).expect(STAYS);
            self.leases.notify(file);
        }
    }
}

/// A request that waits for a lease, until this is dropped.
pub(crate) struct Waits<'a>(&'a Leases, FileId, &'a Rc<Waiting>);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let Self(leases, file, waiting) = self;
        leases.with(*file, |lease| lease.end_waiting(waiting)).expect(STAYS);
    }
}

/// A lease that the service is being asked for, until this is dropped, also if no request waits for the lease
/// any more.
pub(crate) struct Asking<'a> {
    leases: &'a Leases,
    file: FileId,
    right: Right,
    /// The number of grants that had arrived before.
    grants: u64,
}

impl Asking<'_> {
    /// The right that is asked for.
    pub(crate) fn right(&self) -> Right {
        self.right
    }

    /// Takes the grant of the service, which must be of the present era.
    pub(crate) fn granted(self, grant: u64) {
        self.leases.granted(self.file, self.right, grant);
    }

    /// Waits until a grant has arrived in the service's news, or is not needed any more: this is the sole
    /// client, or `is_over` is true, which must wake all that wait ([`Leases::notify_all`]).
    pub(crate) async fn wait(&self, is_over: impl Fn() -> bool) {
        let grants = || self.leases.with(self.file, |lease| lease.grants());
        let is_served = || grants() != Some(self.grants);
        self.leases.until(self.file, || is_served() || self.leases.is_alone.get() || is_over()).await;
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.leases.with(self.file, Lease::end_asking);
        self.leases.notify(self.file);
    }
}

/// A change of size that is sent to the service. If this is dropped before the service has answered it, the
/// service must not wait for it to come again.
pub(crate) struct Wish<'a> {
    leases: &'a Leases,
    file: Option<FileId>,
}

impl Wish<'_> {
    /// The service has answered.
    pub(crate) fn answered(mut self) {
        assert!(self.file.take().is_some(), "it is answered once");
    }
}

impl Drop for Wish<'_> {
    fn drop(&mut self) {
        self.leases.resigned.borrow_mut().extend(self.file);
    }
}

impl Leases {
    /// The clock of the session's lease time.
    pub(crate) fn clock(&self) -> &LeaseClock {
        &self.clock
    }

    /// True if no other client uses the file system.
    pub(crate) fn is_alone(&self) -> bool {
        self.is_alone.get() && self.clock.runs()
    }

    /// True if this client told the service that it knows that it is the sole one.
    pub(crate) fn says_alone(&self) -> bool {
        self.is_alone.get()
    }

    /// True if other clients use the file system, or did: the kernel may have sizes cached that they have
    /// changed.
    pub(crate) fn was_shared(&self) -> bool {
        !self.is_alone.get() || self.is_soiled.get()
    }

    /// True if no other client may change the file.
    pub(crate) fn is_exclusive(&self, file: FileId) -> bool {
        self.clock.runs() && (self.is_alone.get() || self.has(file, Right::Exclusive))
    }

    /// True if this client may use its state of the file.
    pub(crate) fn covers(&self, file: FileId) -> bool {
        self.clock.runs() && (self.is_alone.get() || self.has(file, Right::Shared))
    }

    /// True if there is a lease that gives this right, even while the lease time has run out.
    pub(crate) fn has(&self, file: FileId, right: Right) -> bool {
        self.with(file, |lease| lease.covers(right)) == Some(true)
    }

    /// Returns the current period as the sole client, in a start of the service; `None` if there are others.
    pub(crate) fn owns_all(&self, start: u64) -> Option<Ownership> {
        let time = self.times_alone.get();
        self.is_alone().then_some(Ownership::Alone { start, time })
    }

    /// Returns the current period in which no other client may change the file; `None` if others may.
    pub(crate) fn owns(&self, file: FileId, start: u64) -> Option<Ownership> {
        let of_lease = || {
            let owned = |lease: &mut Lease| lease.owns().then_some(lease.grant());
            let grant = self.with(file, owned).flatten().filter(|_| self.clock.runs())?;
            Some(Ownership::Lease { start, grant })
        };
        self.owns_all(start).or_else(of_lease)
    }

    /// True if the kernel may keep the pages that it has of a file which it is opening.
    pub(crate) fn keeps_pages(&self, file: FileId) -> bool {
        if !self.clock.runs() {
            return false;
        }
        if self.is_alone.get() {
            if !self.is_soiled.get() || self.kept.contains(&file) {
                return true;
            }
            self.kept.insert(file);
            return false;
        }
        self.with(file, Lease::keeps_pages) == Some(true)
    }

    /// Reads or changes a lease. `None` if there is no entry of the file.
    pub(crate) fn with<T>(&self, file: FileId, act: impl FnOnce(&mut Lease) -> T) -> Option<T> {
        self.table.borrow_mut().get_mut(&file).map(act)
    }

    /// Admits an operation that needs a right to a file, or says what it must do.
    pub(crate) fn admit(
        self: &Rc<Self>,
        file: FileId,
        right: Right,
        purpose: Purpose,
        waiting: &Waiting,
    ) -> Admission<'_> {
        if self.is_alone.get() {
            self.busy.set(self.busy.get() + 1);
            return Admission::Use(LeaseUse { leases: self.clone(), file: None });
        }
        let mut table = self.table.borrow_mut();
        let lease = table.entry(file).or_default();
        if lease.admits(right, purpose, waiting.is_let_in()) {
            lease.begin_use();
            return Admission::Use(LeaseUse { leases: self.clone(), file: Some(file) });
        }
        if lease.begin_to_ask() {
            let grants = lease.grants();
            Admission::Ask(Asking { leases: self, file, right, grants })
        } else {
            Admission::Wait
        }
    }

    /// True if a request may use a lease that is being revoked.
    pub(crate) fn suffices(&self, file: FileId, purpose: Purpose, waiting: &Waiting) -> bool {
        self.with(file, |lease| lease.suffices(purpose, waiting.is_let_in())) == Some(true)
    }

    /// Registers a request that waits for a lease.
    pub(crate) fn wait<'a>(&'a self, file: FileId, waiting: &'a Rc<Waiting>) -> Waits<'a> {
        self.table.borrow_mut().entry(file).or_default().begin_waiting(waiting);
        Waits(self, file, waiting)
    }

    /// Takes a grant of the service, which must be of the present era.
    pub(crate) fn granted(&self, file: FileId, right: Right, grant: u64) {
        assert!(grant > 0, "grants are numbered from 1");
        self.meet_others();
        let void = self.void.get().max(self.trimmed.get());
        self.table.borrow_mut().entry(file).or_default().granted(right, grant, void);
        self.notify(file);
    }

    /// Listens for changes of a file's lease.
    pub(crate) fn listen(&self, file: FileId) -> Listener<'_> {
        self.changed.listen(file)
    }

    /// Wakes everything that waits for a change of a file's lease.
    pub(crate) fn notify(&self, file: FileId) {
        self.changed.wake(file);
    }

    /// Wakes everything that waits for the service or for a lease.
    pub(crate) fn notify_all(&self) {
        self.changed.wake_all();
        self.note_again();
    }

    /// Waits until `done` is true. It is asked again after each change of the file's lease.
    pub(crate) async fn until(&self, file: FileId, done: impl Fn() -> bool) {
        self.listen(file).until(done).await;
    }

    /// Number of times that refused requests may be sent again, for [`Self::again_since`].
    pub(crate) fn agains(&self) -> u64 {
        self.agains.get()
    }

    /// Refused requests may be sent again.
    pub(crate) fn note_again(&self) {
        self.agains.set(self.agains.get() + 1);
        self.again.notify_waiters();
    }

    /// Waits until a request may be sent again that was sent after this number of times, and refused.
    pub(crate) async fn again_since(&self, agains: u64) {
        loop {
            let again = self.again.notified();
            if self.agains.get() != agains {
                return;
            }
            again.await;
        }
    }

    /// A change of a file's size begins, which the service may tell to come again.
    pub(crate) fn wish(&self, file: FileId) -> Wish<'_> {
        // An older wish that was given up must not take this one back.
        self.resigned.borrow_mut().retain(|resigned| *resigned != file);
        Wish { leases: self, file: Some(file) }
    }

    /// Begins to revoke the lease of a file, if its grant is not later than `grant`.
    pub(crate) fn begin_to_revoke(&self, file: FileId, grant: u64) -> Revocation {
        self.table.borrow_mut().entry(file).or_default().begin_to_revoke(grant)
    }

    /// Releases leases that are not needed when there are many: those of files without any state here.
    pub(crate) fn trim(&self, is_known: impl Fn(FileId) -> bool) {
        let mut table = self.table.borrow_mut();
        if table.len() <= MOST_IDLE {
            return;
        }
        let mut released = self.released.borrow_mut();
        table.retain(|file, lease| {
            let is_kept = !lease.is_idle() || is_known(*file);
            if !is_kept && lease.covers(Right::Shared) {
                let (ino, branch) = (file.ino.0, file.branch.0);
                self.trimmed.set(self.trimmed.get().max(lease.grant()));
                released.push(ReleasedLease { ino, branch, grant: lease.grant(), attributes: false });
            }
            is_kept
        });
        // The kernel may have pages of these files; it drops them when it opens the files again.
        self.is_soiled.set(true);
    }

    /// Takes the lease on attributes in a reply of the present era.
    pub(crate) fn take_attributes(&self, attr: &Attr, now: Duration) {
        if !self.is_alone.get() {
            self.released.borrow_mut().extend(self.attributes.take(attr, now));
        }
    }

    /// Gives back the leases on attributes that were not used for long.
    pub(crate) fn release_idle_attributes(&self, now: Duration) {
        self.released.borrow_mut().extend(self.attributes.release_idle(now));
    }

    /// The lease on the attributes of an inode, or on the names of a directory, is revoked up to this grant.
    pub(crate) fn revoke_attributes(&self, file: FileId, grant: u64) {
        self.attributes.revoke(file, grant);
    }

    /// The number of the lease on the attributes of an inode, or on the names of a directory; none without.
    pub(crate) fn of_attributes(&self, file: FileId) -> Option<u64> {
        self.attributes.of(file)
    }

    /// True if the lease of this number on attributes or names lasts. The kernel gets some of them now.
    pub(crate) fn uses_attributes(&self, file: FileId, grant: u64, now: Duration) -> bool {
        self.clock.runs() && self.attributes.is_used(file, grant, now)
    }

    /// Takes leases that were released and not reported to the service, as many as one request may report.
    pub(crate) fn take_released(&self) -> Vec<ReleasedLease> {
        let mut released = self.released.borrow_mut();
        let left = released.len().saturating_sub(MOST_REPORTED);
        released.split_off(left)
    }

    /// True if there is more to report than one request may.
    pub(crate) fn has_more_to_report(&self) -> bool {
        !self.released.borrow().is_empty() || !self.resigned.borrow().is_empty()
    }

    /// Takes the files whose size nobody wants to change any more.
    pub(crate) fn take_resigned(&self) -> Vec<FileRef> {
        let mut resigned = self.resigned.borrow_mut();
        let left = resigned.len().saturating_sub(MOST_REPORTED);
        resigned
            .split_off(left)
            .into_iter()
            .map(|file| FileRef { ino: file.ino.0, branch: file.branch.0 })
            .collect()
    }

    /// The last number of the service's news that was seen.
    pub(crate) fn seen(&self) -> u64 {
        self.seen.get()
    }

    /// Records a number of the service's news.
    pub(crate) fn saw(&self, number: u64) {
        self.seen.set(self.seen.get().max(number));
    }

    /// This is the sole client from now on.
    pub(crate) fn become_alone(&self) {
        if !self.is_alone.replace(true) {
            self.times_alone.set(self.times_alone.get() + 1);
            self.was_unleased.set(true);
            self.attributes.void_all(0);
            self.kept.clear();
            self.notify_all();
        }
    }

    /// Another client arrives: new operations request leases from now on.
    pub(crate) fn become_shared(&self) {
        self.is_alone.set(false);
        self.meet_others();
    }

    /// There are other clients, or were.
    pub(crate) fn meet_others(&self) {
        self.met_others.set(true);
    }

    /// True unless this client has been the sole one all the time.
    pub(crate) fn has_met_others(&self) -> bool {
        self.met_others.get() || !self.is_alone.get()
    }

    /// Voids all grants up to `grant`, because all leases are given up.
    pub(crate) fn void_all(&self, grant: u64) {
        self.is_soiled.set(true);
        self.void.set(self.void.get().max(grant));
        self.attributes.void_all(grant);
        self.notify_all();
    }

    /// Waits until no operation runs without a lease.
    pub(crate) async fn no_unleased_use(&self) {
        loop {
            let ended = self.no_use.notified();
            if self.busy.get() == 0 {
                return;
            }
            ended.await;
        }
    }

    /// True if the kernel may have pages of files without a lease.
    pub(crate) fn was_unleased(&self) -> bool {
        self.was_unleased.get()
    }

    /// The number of times that this client became the sole one, for [`Self::all_leased`].
    pub(crate) fn times_alone(&self) -> u64 {
        self.times_alone.get()
    }

    /// The kernel has no page of a file without a lease any more, of those that it may have got until this
    /// client had become the sole one for the last of `times`. If it has become that again since, as after a
    /// restart of the service, the kernel may have others.
    pub(crate) fn all_leased(&self, times: u64) {
        if self.times_alone.get() == times {
            self.was_unleased.set(false);
        }
    }

    /// Files with leases, each with the number of its grant.
    pub(crate) fn grants(&self) -> Vec<(FileId, u64)> {
        self.table.borrow().iter().map(|(file, lease)| (*file, lease.grant())).collect()
    }

    /// Number of times that this client has left. What the service granted before the last time is void.
    pub(crate) fn times_left(&self) -> u64 {
        self.times_left.get()
    }

    /// Drops all leases, because this client leaves.
    pub(crate) fn leave(&self) {
        self.times_left.set(self.times_left.get() + 1);
        self.is_alone.set(false);
        self.attributes.void_all(0);
        self.table.borrow_mut().retain(|_, lease| {
            lease.drop_right();
            !lease.is_idle()
        });
        self.resigned.take();
        self.notify_all();
    }

    /// Resets the numbers after a restart of the service, which counts anew. Leases owned now were granted by
    /// another start, and any revocation of the new one applies to them.
    pub(crate) fn restarted(&self) {
        self.seen.set(0);
        self.void.set(0);
        self.trimmed.set(0);
        self.attributes.restarted();
        self.released.borrow_mut().clear();
        if !self.is_alone.get() {
            // The kernel may have pages with what others wrote and the restart has lost.
            self.is_soiled.set(true);
            self.kept.clear();
        }
        self.resigned.take();
        self.table.borrow_mut().values_mut().for_each(Lease::restarted);
        self.notify_all();
    }
}

#[cfg(test)]
mod tests;
