//! Versions of strips: one counter for the array, of which no number is ever given twice.
//!
//! Invariant: a version is given only from a run whose record is durable, so after a crash the counter goes
//! on behind every version that a strip may have.

use crate::error::ArrayError;
use crate::format::record::Entry;
use crate::queue::EntryQueue;
use crate::ranks;
use penstock_base::Version;
use penstock_base::rank::RankedMutex;
use std::cell::Cell;
use std::rc::Rc;

/// Versions that one log record reserves.
const RUN: u64 = 1 << 20;

/// The counter.
pub(crate) struct Versions {
    queue: Rc<EntryQueue>,
    one_at_a_time: RankedMutex<()>,
    last: Cell<u64>,
    reserved: Cell<u64>,
}

impl Versions {
    pub(crate) fn new(queue: &Rc<EntryQueue>) -> Self {
        Self {
            queue: queue.clone(),
            one_at_a_time: RankedMutex::new(ranks::VERSIONS, ()),
            last: Cell::new(0),
            reserved: Cell::new(0),
        }
    }

    /// A version that was never given before. Waits for the log once per run of versions.
    pub(crate) async fn next(&self) -> Result<Version, ArrayError> {
        let _one_at_a_time = self.one_at_a_time.lock().await;
        if self.last.get() >= self.reserved.get() {
            self.reserve().await?;
        }
        let version = self.last.get() + 1;
        assert!(version <= self.reserved.get(), "a version is given only from a reserved run");
        self.last.set(version);
        Ok(Version(version))
    }

    /// No version above this one was given yet.
    pub(crate) fn last(&self) -> Version {
        Version(self.last.get())
    }

    /// Makes the record of another run durable.
    pub(crate) async fn reserve(&self) -> Result<(), ArrayError> {
        let reserved = Version(self.reserved.get().max(self.last.get()) + RUN);
        self.queue.append(Entry::Versions { reserved }, Vec::new()).await?;
        Ok(())
    }

    /// Versions up to here may be given: the root or a durable record says so.
    pub(crate) fn set_reserved(&self, reserved: Version) {
        self.reserved.set(reserved.0);
    }

    /// Versions up to here may have been given.
    pub(crate) fn reserved(&self) -> Version {
        Version(self.reserved.get())
    }

    /// All versions that were reserved before an opening count as given.
    pub(crate) fn skip_reserved(&self) {
        assert_eq!(self.last.get(), 0, "only an opening skips versions");
        self.last.set(self.reserved.get());
    }
}
