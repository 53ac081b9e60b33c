//! Gives space back: freed blocks to the allocator immediately, and empty stripes to the drives later.
//!
//! No operation waits for the drives. A stripe that lost its last block first rests, because programs that
//! delete often write again. A write of a full chunk takes such stripes first, after a discard in the stripe
//! table alone; the drives keep their space, and a drive file its memory or blocks. A background task
//! discards the stripes that have rested long enough on the drives, one batch at a time with a pause after
//! each.
//!
//! Invariants:
//! - A stripe in a discard is marked in *used*, so that nothing is written there before the discard is done.
//! - A discard never takes blocks that are reserved.
//! - At most one batch is in flight, so a write that lacks space waits for that batch and no longer.
//! - Every empty stripe that is not yet discarded on the drives is in [`Idle`].
//!
//! Power cut: a written stripe that nothing owns stays written until the next start finds it. A stripe that
//! is unwritten in the table but was not discarded on the drives keeps its space there until it is written
//! and freed again.

use crate::ChunkError;
use crate::space::Run;
use crate::target::Target;
use penstock_array::{ArrayError, Discard};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// Most stripes in one batch.
const BATCH: u64 = 64;
/// Pause after a batch: with full batches of 1 MiB stripes, about 3 GB are discarded per second.
const PAUSE: Duration = Duration::from_millis(20);
/// Shortest time that a stripe rests before it is discarded on the drives. The longest is about twice that.
const REST: Duration = Duration::from_secs(5);

/// Empty stripes that are not discarded on the drives yet. Some may be in use again: whoever takes one must
/// check.
#[derive(Default)]
pub(crate) struct Idle {
    /// Written in the table; added since the last rest began.
    young: BTreeSet<u64>,
    /// Unwritten in the table; added since the last rest began.
    reusable: BTreeSet<u64>,
    /// Added before the last rest began, of both kinds.
    aged: BTreeSet<u64>,
}

impl Idle {
    pub(crate) fn contains(&self, stripe: u64) -> bool {
        [&self.young, &self.reusable, &self.aged].iter().any(|set| set.contains(&stripe))
    }

    fn is_empty(&self) -> bool {
        self.young.is_empty() && self.reusable.is_empty() && self.aged.is_empty()
    }

    /// Ends a rest: everything may now be discarded on the drives.
    fn age(&mut self) {
        self.aged.append(&mut self.young);
        self.aged.append(&mut self.reusable);
    }

    /// Returns the set that the next batch of a discard is taken from.
    fn source(&mut self, how: Discard) -> &mut BTreeSet<u64> {
        match how {
            Discard::InTable if !self.young.is_empty() => &mut self.young,
            _ => &mut self.aged,
        }
    }
}

impl Target {
    /// Frees runs for allocation and adds the stripes that are empty now to the idle ones.
    pub(crate) fn give_back(&self, runs: Vec<Run>) {
        let mut space = self.space.borrow_mut();
        let mut idle = self.idle.borrow_mut();
        for run in runs {
            idle.young.extend(space.free(run));
        }
        if !idle.young.is_empty() {
            self.idle_noted.notify_one();
        }
    }

    /// Adds written stripes in which nothing is allocated: leftovers of writes that a crash kept from being
    /// committed.
    pub(crate) fn note_unowned(&self) {
        let stripes = self.volume.blocks() / self.volume.stripe_blocks();
        let space = self.space.borrow();
        let unowned =
            (0..stripes).filter(|stripe| space.is_empty(*stripe) && !self.volume.is_unwritten(*stripe));
        self.idle.borrow_mut().young.extend(unowned);
        self.idle_noted.notify_one();
    }

    /// Discards stripes that have rested, one batch at a time, until the target is closed.
    pub(crate) async fn discard_task(self: Rc<Self>) {
        loop {
            while self.idle.borrow().is_empty() && !self.closed.get() {
                self.idle_noted.notified().await;
            }
            self.env.sleep(REST).await;
            while !self.closed.get() {
                match self.discard_some(Discard::OnDrives).await {
                    Ok(0) => break,
                    Ok(_) => self.env.sleep(PAUSE).await,
                    Err(ChunkError::Array(ArrayError::Closed)) => return,
                    // The stripes are still in [`Idle`].
                    Err(error) => {
                        tracing::warn!(%error, "free stripes could not be discarded; it will be tried again");
                        break;
                    }
                }
            }
            if self.closed.get() {
                return;
            }
            self.idle.borrow_mut().age();
        }
    }

    /// Takes an empty stripe for a write of a full chunk, preferably one that was written before. `None` if
    /// no stripe is empty, or if too few blocks are free beside the reservations of others; `mine` blocks are
    /// reserved for this write.
    pub(crate) async fn take_empty_stripe(&self, mine: u64) -> Result<Option<u64>, ChunkError> {
        // Nothing is awaited between this test and the allocation that relies on it.
        let is_room = || self.space.borrow().has_beside_promises(self.volume.stripe_blocks(), mine);
        while is_room() {
            let reusable = self.idle.borrow_mut().reusable.pop_last();
            if let Some(stripe) = reusable {
                if self.volume.is_unwritten(stripe) && self.space.borrow_mut().take_stripe(stripe) {
                    return Ok(Some(stripe));
                }
                continue;
            }
            if self.discard_some(Discard::InTable).await? == 0 {
                let unwritten = |stripe| self.volume.is_unwritten(stripe);
                let found = || self.space.borrow_mut().allocate_stripe(unwritten);
                return Ok(is_room().then(found).flatten());
            }
        }
        Ok(None)
    }

    /// Discards one run of idle stripes: any with [`Discard::InTable`], else only rested ones. Returns the
    /// number of stripes available or discarded; 0 if none may be discarded.
    async fn discard_some(&self, how: Discard) -> Result<u64, ChunkError> {
        let _one = self.discarding.lock().await;
        let found = self.idle.borrow().reusable.len() as u64;
        if how == Discard::InTable && found > 0 {
            // A caller that had the lock before discarded these in the table.
            return Ok(found);
        }
        let per_stripe = self.volume.stripe_blocks();
        let Some((first, count)) = self.take_idle(how) else { return Ok(0) };
        self.space.borrow_mut().set_discarding(count * per_stripe);
        let result = self.volume.discard(first, count, how).await;
        self.space.borrow_mut().set_discarding(0);
        self.space.borrow_mut().free((first * per_stripe, count * per_stripe));
        let mut idle = self.idle.borrow_mut();
        if let Err(error) = result {
            idle.aged.extend(first..first + count);
            return Err(error.into());
        }
        if how == Discard::InTable {
            idle.reusable.extend(first..first + count);
        }
        self.count(|counts| counts.discarded_stripes += count);
        Ok(count)
    }

    /// Takes the first run of idle stripes that are still empty, as first stripe and count.
    fn take_idle(&self, how: Discard) -> Option<(u64, u64)> {
        let per_stripe = self.volume.stripe_blocks();
        let mut idle = self.idle.borrow_mut();
        let mut space = self.space.borrow_mut();
        let mut run: Option<(u64, u64)> = None;
        loop {
            let Some(stripe) = idle.source(how).first().copied() else { return run };
            if run.is_some_and(|(first, count)| first + count != stripe || count == BATCH) {
                return run;
            }
            if space.usage().free_blocks < per_stripe {
                // All free blocks are reserved for writes.
                return run;
            }
            idle.source(how).remove(&stripe);
            if space.take_stripe(stripe) {
                run = Some(run.map_or((stripe, 1), |(first, count)| (first, count + 1)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_rest_before_the_drives_hear_of_them() {
        let mut idle = Idle::default();
        idle.young.extend([1, 2]);
        assert!(idle.source(Discard::OnDrives).is_empty() && idle.contains(2));
        assert_eq!(idle.source(Discard::InTable).pop_first(), Some(1));
        idle.reusable.insert(1);
        idle.age();
        assert_eq!(idle.source(Discard::OnDrives).iter().copied().collect::<Vec<_>>(), [1, 2]);
        idle.young.insert(3);
        assert_eq!(idle.source(Discard::InTable).first(), Some(&3), "what is warm goes first");
    }
}
