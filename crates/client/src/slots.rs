//! Slots of a session, which identify requests that must be executed once: a repeat gets the stored result.
//!
//! Slot `n` issues the sequences `n + SLOTS`, `n + 2 * SLOTS` and so on, for one request at a time. The
//! service keeps one result for each slot. So it has the result of every request that may still be repeated,
//! however slow that one is.

use penstock_base::ErrorKind;
use penstock_base::num::to_usize;
use penstock_wire::{Failure, SLOTS};
use std::cell::RefCell;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Slots that are reserved for syncing files.
const RESERVED: usize = 8;
const _: () = assert!(RESERVED < to_usize(SLOTS), "slots are left for other requests");

/// The slots of a session.
pub(crate) struct Slots {
    /// The last sequence of each free slot. The slot that was used last is used first.
    free: RefCell<Vec<u64>>,
    permits: Semaphore,
    /// For requests that other clients may wait for while they keep the requests in all other slots waiting.
    reserved: Semaphore,
}

/// A slot in use; dropping it frees the slot.
pub(crate) struct Slot<'a> {
    slots: &'a Slots,
    sequence: u64,
    _permit: SemaphorePermit<'a>,
}

impl Slots {
    pub(crate) fn new() -> Self {
        Self {
            free: RefCell::new((0..SLOTS).rev().collect()),
            permits: Semaphore::new(to_usize(SLOTS) - RESERVED),
            reserved: Semaphore::new(RESERVED),
        }
    }

    /// Waits for a slot.
    pub(crate) async fn take(&self) -> Result<Slot<'_>, Failure> {
        self.take_of(&self.permits).await
    }

    /// Waits for one of the slots that are reserved for syncing files.
    pub(crate) async fn take_reserved(&self) -> Result<Slot<'_>, Failure> {
        self.take_of(&self.reserved).await
    }

    async fn take_of<'a>(&'a self, permits: &'a Semaphore) -> Result<Slot<'a>, Failure> {
        let closed = |_| Failure::new(ErrorKind::Internal, "session is closed");
        let permit = permits.acquire().await.map_err(closed)?;
        let last = self.free.borrow_mut().pop().expect("there is a slot for each permit");
        assert!(last < u64::MAX - SLOTS, "sequences do not wrap around");
        Ok(Slot { slots: self, sequence: last + SLOTS, _permit: permit })
    }
}

impl Slot<'_> {
    /// Returns the sequence of the slot's request.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        // Runs before the permit is dropped, so that there is a free slot for each permit.
        let mut free = self.slots.free.borrow_mut();
        free.push(self.sequence);
        assert!(free.len() as u64 <= SLOTS, "a slot is freed once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::collections::BTreeSet;

    fn take(slots: &Slots) -> Slot<'_> {
        slots.take().now_or_never().expect("a slot is free").unwrap()
    }

    #[test]
    fn a_slow_request_keeps_its_slot_while_others_go_on() {
        let slots = Slots::new();
        let slow = take(&slots);
        let mut sequences = BTreeSet::new();
        for _ in 0..1000 {
            let other = take(&slots);
            assert_ne!(other.sequence() % SLOTS, slow.sequence() % SLOTS, "one request in a slot");
            assert!(sequences.insert(other.sequence()), "no sequence twice");
        }
        assert!(*sequences.last().unwrap() > slow.sequence() + SLOTS, "they are far beyond the slow one");
        let reserved = || slots.take_reserved().now_or_never();
        let mut all: Vec<_> = (1..SLOTS - RESERVED as u64).map(|_| take(&slots)).collect();
        assert!(slots.take().now_or_never().is_none(), "all others are in use");
        all.extend((0..RESERVED).map(|_| reserved().expect("they are kept").unwrap()));
        assert!(reserved().is_none(), "all slots are in use");
        let places: BTreeSet<u64> = all.iter().map(|slot| slot.sequence() % SLOTS).collect();
        assert_eq!(places.len() as u64, SLOTS - 1);
        drop(slow);
        assert!(slots.take().now_or_never().is_some());
    }
}
