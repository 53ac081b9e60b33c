//! Drops the kernel's pages of a file whose lease is revoked.
//!
//! The kernel must lock a page to drop it, but a request that waits for the lease may have it locked. So all
//! pages are dropped once while the lease still serves requests. Then the lease is closed, and the pages that
//! were served meanwhile are dropped, piece by piece. A piece is skipped while a waiting request reads it
//! into pages: these pages are locked and contain nothing. If the kernel still blocks at a piece, the
//! requests that may have it locked are admitted, and the pages that they fill are dropped in the next round.
//!
//! Invariants:
//! - The lease goes in one step, at which nothing uses it and no page is left to drop. An admitted request
//!   that is not served by then waits on.
//! - Each round drops the pages of the requests admitted during the round before, and only requests that
//!   block the drop are admitted. So programs that fault pages in as fast as they can do not keep the lease.

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

/// Dropping a piece takes longer than this only if a request has a page of it locked, or if the machine is
/// busy.
const PATIENCE: Duration = Duration::from_millis(5);
/// The same limit for a FUSE notification that stores bytes into pages.
const STORE_PATIENCE: Duration = Duration::from_millis(100);
const STAYS: &str = "a lease stays while it is being revoked";

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

impl Lease {
    /// Returns the pages to drop in the next round. `None` if the lease may go; from then on it serves no
    /// request.
    fn left_to_drop(&mut self) -> Option<PageSet> {
        let served = self.served.take().unwrap_or_default();
        if served.is_empty() && self.users == 0 && self.stores == 0 {
            // An admitted request that has not arrived by now is too late.
            self.waiting.iter().for_each(|waiting| waiting.let_in.set(false));
            return None;
        }
        self.served = Some(PageSet::default());
        Some(served)
    }
}

impl Client {
    /// Drops the kernel's pages of a file whose lease is revoked, and closes the lease.
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

    /// Runs `work`, which waits for pages. Each time it has not ended after `patience`, admits the requests
    /// that may have these pages locked.
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
