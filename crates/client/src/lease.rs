//! The lease of one file, as a state machine without I/O.
//!
//! ```text
//!            grant            revoke          pages dropped once        nothing uses it
//! Right::None ──▶ Phase::Kept ──▶ Phase::Serving ──▶ Phase::Closed ──▶ Right::None, Phase::Kept
//! ```
//!
//! A lease that is being revoked still serves, because the kernel may keep a page locked for a request that
//! must be answered before the page can be dropped. After `Closed` it serves only requests that block the
//! drop of pages. If the service was started again meanwhile, `Closed` leads back to `Kept`.

use crate::page_set::{PageSet, pages};
use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

/// The operation that a lease is acquired for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To read.
    Read,
    /// To change contents or attributes.
    Write,
    /// To write back a page that a program has changed in memory. The release of the lease may be waiting for
    /// this.
    Page,
    /// To change the size. Until it has the answer, the kernel neither sends nor drops a changed page of the
    /// file.
    Resize,
}

/// The right that a lease gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Right {
    /// No lease.
    #[default]
    None,
    /// To cache reads.
    Shared,
    /// To change the file, too.
    Exclusive,
}

impl Right {
    /// The right that an operation needs.
    pub(crate) fn to_be(exclusive: bool) -> Self {
        if exclusive { Self::Exclusive } else { Self::Shared }
    }
}

/// The progress of a revocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    /// The lease is not being revoked.
    #[default]
    Kept,
    /// It is being revoked, and serves requests until it is closed.
    Serving,
    /// Pages are being dropped: it serves only requests that block this.
    Closed,
}

/// A request that waits for a lease.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// Range of bytes whose pages the kernel may have locked for the request.
    locked: Range<u64>,
    /// The request is a read into these pages, so they contain nothing yet.
    reads: bool,
    let_in: Cell<bool>,
}

impl Waiting {
    pub(crate) fn new(locked: Range<u64>, reads: bool) -> Self {
        Self { locked, reads, let_in: Cell::new(false) }
    }

    /// True if the request is served although the lease is closed.
    pub(crate) fn is_let_in(&self) -> bool {
        self.let_in.get()
    }

    fn overlaps(&self, bytes: &Range<u64>) -> bool {
        self.locked.start < bytes.end && bytes.start < self.locked.end
    }

    fn fills(&self, bytes: &Range<u64>) -> bool {
        let end = pages(&self.locked).end;
        self.reads && !self.is_let_in() && self.locked.start <= bytes.start && bytes.end <= end
    }
}

/// Start of a revocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Revocation {
    /// Another one runs, and must end first.
    Busy,
    /// There is no lease of that grant.
    Nothing,
    /// It has begun.
    Begun,
}

/// The lease of one file.
#[derive(Default)]
pub(crate) struct Lease {
    right: Right,
    phase: Phase,
    grant: u64,
    /// Grants up to this one are revoked.
    void: u64,
    /// Number of grants that have arrived.
    grants: u64,
    users: u64,
    waiting: Vec<Rc<Waiting>>,
    is_asking: bool,
    /// Number of FUSE notifications that are storing bytes into pages; like a drop, they wait for locked
    /// pages.
    stores: u64,
    /// Bytes that may have got into pages since the drop of pages began; `None` if none is running.
    served: Option<PageSet>,
    /// The kernel has no page from before this lease.
    is_clean: bool,
}

impl Lease {
    /// True if it gives this right or a greater one.
    pub(crate) fn covers(&self, right: Right) -> bool {
        self.right >= right && self.right != Right::None
    }

    /// True if it gives the exclusive right and is not being revoked.
    pub(crate) fn owns(&self) -> bool {
        self.covers(Right::Exclusive) && !self.is_revoked()
    }

    /// True if it is being revoked.
    pub(crate) fn is_revoked(&self) -> bool {
        self.phase != Phase::Kept
    }

    /// The number of its grant.
    pub(crate) fn grant(&self) -> u64 {
        self.grant
    }

    /// Requests that use it.
    pub(crate) fn users(&self) -> u64 {
        self.users
    }

    /// FUSE notifications that are storing bytes into pages.
    pub(crate) fn stores(&self) -> u64 {
        self.stores
    }

    /// True if nothing needs this entry, except for its right.
    pub(crate) fn is_idle(&self) -> bool {
        self.users == 0
            && self.stores == 0
            && self.waiting.is_empty()
            && !self.is_revoked()
            && !self.is_asking
    }

    /// True if an operation that needs `right` may use it now.
    pub(crate) fn admits(&self, right: Right, purpose: Purpose, let_in: bool) -> bool {
        self.covers(right) && self.serves(purpose, let_in) || self.suffices(purpose, let_in)
    }

    /// True if a request is served under a lease that is being revoked, although it would request another one
    /// otherwise: the kernel may keep a page locked for it that must be dropped first.
    pub(crate) fn suffices(&self, purpose: Purpose, let_in: bool) -> bool {
        let waits = purpose == Purpose::Write;
        self.is_revoked() && self.covers(Right::Shared) && self.serves(purpose, let_in) && !waits
    }

    /// True if a running drop of pages permits the request.
    fn serves(&self, purpose: Purpose, let_in: bool) -> bool {
        self.phase != Phase::Closed || let_in || purpose == Purpose::Page
    }

    /// Counts one user more.
    pub(crate) fn begin_use(&mut self) {
        assert!(self.covers(Right::Shared), "a lease is used while it is held");
        self.users += 1;
    }

    /// Counts one user less. Returns true if a revocation waits for this.
    pub(crate) fn end_use(&mut self) -> bool {
        assert!(self.users > 0, "every use ends once");
        self.users -= 1;
        self.users == 0 && self.is_revoked()
    }

    /// Counts one notification more that stores bytes into pages.
    pub(crate) fn begin_store(&mut self) {
        self.stores += 1;
    }

    /// Counts one notification less; it stored these bytes.
    pub(crate) fn end_store(&mut self, bytes: Range<u64>) {
        assert!(self.stores > 0, "every store ends once");
        self.stores -= 1;
        self.serve(bytes);
    }

    /// The kernel may have these bytes in pages from now on.
    pub(crate) fn serve(&mut self, bytes: Range<u64>) {
        if let Some(served) = &mut self.served {
            served.add(bytes);
        }
    }

    /// Adds a request that waits.
    pub(crate) fn begin_waiting(&mut self, waiting: &Rc<Waiting>) {
        self.waiting.push(waiting.clone());
    }

    /// Removes a request that waits no more.
    pub(crate) fn end_waiting(&mut self, waiting: &Rc<Waiting>) {
        self.waiting.retain(|other| !Rc::ptr_eq(other, waiting));
    }

    /// Begins to ask the service for a lease. False if it is being asked already, or a revocation runs.
    pub(crate) fn begin_to_ask(&mut self) -> bool {
        let asks = !self.is_asking && !self.is_revoked();
        self.is_asking |= asks;
        asks
    }

    /// The service has answered, or nobody waits for the answer any more.
    pub(crate) fn end_asking(&mut self) {
        self.is_asking = false;
    }

    /// The number of grants that have arrived, valid or not.
    pub(crate) fn grants(&self) -> u64 {
        self.grants
    }

    /// Takes a grant of the service, unless it was revoked before it arrived, or a newer one has arrived.
    /// Grants up to `void` are revoked. One that arrives during a revocation is not taken either: it would go
    /// with that. The service learns it when it wants the lease back.
    pub(crate) fn granted(&mut self, right: Right, grant: u64, void: u64) {
        assert!(right != Right::None, "a grant gives a right");
        self.grants += 1;
        if grant <= self.void.max(void).max(self.grant) || self.is_revoked() {
            return;
        }
        if self.right == Right::None {
            self.is_clean = false;
        }
        (self.right, self.grant) = (right, grant);
    }

    /// True if the kernel may keep the pages that it has of the file, which it is opening. Asked again, the
    /// answer is yes: the kernel drops them after a no.
    pub(crate) fn keeps_pages(&mut self) -> bool {
        self.covers(Right::Shared) && !self.is_revoked() && std::mem::replace(&mut self.is_clean, true)
    }

    /// Begins to revoke the lease, if its grant is not later than `grant`.
    pub(crate) fn begin_to_revoke(&mut self, grant: u64) -> Revocation {
        if self.is_revoked() {
            return Revocation::Busy;
        }
        self.void = self.void.max(grant);
        if self.right == Right::None || self.grant > grant {
            return Revocation::Nothing;
        }
        self.phase = Phase::Serving;
        Revocation::Begun
    }

    /// Pages are dropped from now on; those that get served meanwhile are recorded.
    pub(crate) fn begin_to_drop(&mut self) {
        assert!(self.phase == Phase::Serving, "pages are dropped for a revocation");
        self.served = Some(PageSet::default());
    }

    /// Serves only requests that block the drop of pages from now on.
    pub(crate) fn close(&mut self) {
        assert!(self.phase == Phase::Serving, "a revocation closes a lease once");
        self.phase = Phase::Closed;
    }

    /// Returns the pages to drop in the next round. `None` if the lease may go; from then on it serves no
    /// request.
    pub(crate) fn left_to_drop(&mut self) -> Option<PageSet> {
        assert!(self.phase == Phase::Closed, "rounds begin when the lease is closed");
        let served = self.served.take().unwrap_or_default();
        if served.is_empty() && self.users == 0 && self.stores == 0 {
            // An admitted request that has not arrived by now is too late.
            self.waiting.iter().for_each(|waiting| waiting.let_in.set(false));
            return None;
        }
        self.served = Some(PageSet::default());
        Some(served)
    }

    /// True if a request that waits reads into these pages: they are locked and contain nothing.
    pub(crate) fn is_filled(&self, bytes: &Range<u64>) -> bool {
        self.waiting.iter().any(|waiting| waiting.fills(bytes))
    }

    /// Admits the requests that may have these pages locked.
    pub(crate) fn let_in(&mut self, bytes: &Range<u64>) {
        let waiting = self.waiting.iter().filter(|waiting| waiting.overlaps(bytes));
        waiting.for_each(|waiting| waiting.let_in.set(true));
    }

    /// The lease is gone.
    pub(crate) fn revoked(&mut self) {
        assert!(self.phase == Phase::Closed, "a lease goes after its pages");
        (self.right, self.phase, self.served) = (Right::None, Phase::Kept, None);
    }

    /// Takes a revocation back: the lease serves all requests again.
    pub(crate) fn keep(&mut self) {
        assert!(self.phase == Phase::Closed, "a revocation is taken back where it would end");
        (self.phase, self.served) = (Phase::Kept, None);
    }

    /// Gives the right back without dropping pages: the kernel is gone, or drops them when it opens the file
    /// again.
    pub(crate) fn drop_right(&mut self) {
        self.right = Right::None;
    }

    /// Forgets the numbers of grants, because a new start of the service counts anew. Any revocation of it
    /// applies to this lease.
    pub(crate) fn restarted(&mut self) {
        (self.void, self.grant) = (0, 0);
    }
}

#[cfg(test)]
mod tests;
