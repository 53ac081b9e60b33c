//! Dropping the kernel's pages of a file whose lease goes.
//!
//! The kernel drops a page when it has locked it, and a request may have it locked that waits for the lease. So pages are
//! dropped once while the lease still serves, and then, with the lease closed, those that were served meanwhile, piece by
//! piece. A piece is left out where a request waits that reads it into pages: they are locked, and nothing is in
//! them. Where the kernel is stuck at a piece all the same, the requests that may have it locked are let in, and what they are
//! served is dropped in the next round.
//!
//! Invariants:
//! - a lease goes in the step in which nothing of it is in use and nothing is left to drop; who was let in and is not served by
//!   then waits on;
//! - each round drops what was let in during the one before, and nobody is let in but who is in the way: programs that
//!   fault pages in as fast as they can do not keep the lease.

use crate::leases::Lease;
use crate::page_set::{PageSet, pages};
use crate::session::Client;
use penstock_base::Ino;
use penstock_base::env::timeout;
use std::cell::Cell;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Dropping a piece takes longer than this when a page of it is locked for a request, or when the machine is busy.
const PATIENCE: Duration = Duration::from_millis(5);
/// The same for a notice that a store of bytes waits for.
const STORE_PATIENCE: Duration = Duration::from_millis(100);
const STAYS: &str = "a called lease stays";

/// A request that waits for a lease.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// Bytes that the kernel may have locked pages of for it.
    locked: Range<u64>,
    /// It reads them: there is nothing in these pages.
    reads: bool,
    let_in: Cell<bool>,
}

impl Waiting {
    pub(crate) fn new(locked: Range<u64>, reads: bool) -> Self {
        Self { locked, reads, let_in: Cell::new(false) }
    }

    /// It is served under a lease that is closed.
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

impl Lease {
    /// The pages to drop in the next round. None when the lease may go: from here on nobody is served.
    fn left_to_drop(&mut self) -> Option<PageSet> {
        let served = self.served.take().unwrap_or_default();
        if served.is_empty() && self.users == 0 && self.stores == 0 {
            // A request that was let in and has not come yet would be too late.
            self.waiting.iter().for_each(|waiting| waiting.let_in.set(false));
            return None;
        }
        self.served = Some(PageSet::default());
        Some(served)
    }
}

impl Client {
    /// Drops the kernel's pages of a file whose lease is called, and closes the lease.
    pub(crate) async fn drop_kernel_pages(&self, ino: Ino) {
        let (leases, cache) = (&self.leases, self.leases.kernel_cache());
        if let Some(cache) = &cache {
            leases.change(ino, |lease| lease.expect(STAYS).served = Some(PageSet::default()));
            cache.drop_pages(ino, 0..u64::MAX).await;
        }
        leases.change(ino, |lease| lease.expect(STAYS).closed = true);
        leases.changed.notify_waiters();
        loop {
            self.until(|leases| leases.number(ino, |lease| lease.users) == 0).await;
            let stored = self.until(|leases| leases.number(ino, |lease| lease.stores) == 0);
            self.let_in_while(ino, &(0..u64::MAX), STORE_PATIENCE, stored).await;
            let left = leases.change(ino, |lease| lease.expect(STAYS).left_to_drop());
            let Some(served) = left else { return };
            let Some(cache) = &cache else { continue };
            for piece in served.pieces() {
                let fills = |waiting: &Rc<Waiting>| waiting.fills(&piece);
                if !leases.change(ino, |lease| lease.expect(STAYS).waiting.iter().any(fills)) {
                    let dropped = cache.drop_pages(ino, piece.clone());
                    self.let_in_while(ino, &piece, PATIENCE, dropped).await;
                }
            }
        }
    }

    /// Does something that waits for pages, and lets those requests in that may have them locked.
    async fn let_in_while(
        &self,
        ino: Ino,
        bytes: &Range<u64>,
        patience: Duration,
        work: impl Future<Output = ()>,
    ) {
        let mut work = pin!(work);
        while timeout(&self.env, patience, &mut work).await.is_none() {
            self.leases.change(ino, |lease| {
                let waiting = lease.iter().flat_map(|lease| &lease.waiting);
                waiting
                    .filter(|waiting| waiting.overlaps(bytes))
                    .for_each(|waiting| waiting.let_in.set(true));
            });
            self.leases.changed.notify_waiters();
        }
    }
}
