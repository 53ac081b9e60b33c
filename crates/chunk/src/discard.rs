//! Giving space back: blocks to the allocator at once, and whole stripes that hold nothing to the drives.
//!
//! Nobody waits for the drives here: a stripe that lost its last block is noted and rests, because whoever deletes
//! often writes again. A whole-chunk write takes such stripes first, after a discard in the table alone, since it
//! writes there at once; the drives keep their space, and a drive file its memory or blocks. What has rested long
//! enough a background task discards on the drives, a batch at a time with a pause after each.
//!
//! Invariants: a stripe in a discard is taken in *used*, so that nobody writes there before the discard is done, and
//! never one whose blocks are promised; at most one batch is out at a time, so a write that lacks space waits for
//! that one and no longer. What the drives have not heard of is noted.
//!
//! Power cut: a written stripe that nobody owns stays written until the next start notes it. A stripe that is unwritten
//! in the table and not on the drives keeps their space until it is written again and freed.

use crate::ChunkError;
use crate::space::Run;
use crate::target::Target;
use penstock_array::{ArrayError, Discard};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// Most stripes in one batch.
const BATCH: u64 = 64;
/// Pause after a batch: with whole batches of 1 MiB stripes, about 3 GB are discarded in a second.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a stripe may at least wait to be written again before the drives hear of it; twice as long at most.
const REST: Duration = Duration::from_secs(5);

/// Stripes that hold nothing and of which the drives have not heard. Some may be in use again: who takes one looks.
#[derive(Default)]
pub(crate) struct Idle {
    /// Written in the table, noted since the last rest began.
    young: BTreeSet<u64>,
    /// Unwritten in the table.
    reusable: BTreeSet<u64>,
    /// Noted before the last rest, of both kinds.
    aged: BTreeSet<u64>,
}

impl Idle {
    pub(crate) fn contains(&self, stripe: u64) -> bool {
        [&self.young, &self.reusable, &self.aged].iter().any(|set| set.contains(&stripe))
    }

    fn is_empty(&self) -> bool {
        self.young.is_empty() && self.reusable.is_empty() && self.aged.is_empty()
    }

    /// A rest is over.
    fn age(&mut self) {
        self.aged.append(&mut self.young);
        self.aged.append(&mut self.reusable);
    }

    /// Where the next batch for a discard is taken from.
    fn source(&mut self, how: Discard) -> &mut BTreeSet<u64> {
        match how {
            Discard::InTable if !self.young.is_empty() => &mut self.young,
            _ => &mut self.aged,
        }
    }
}

impl Target {
    /// Makes runs allocatable again and notes the stripes that hold nothing now.
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

    /// Notes written stripes in which nothing is allocated: what a crash left of writes that were not committed.
    pub(crate) fn note_unowned(&self) {
        let stripes = self.volume.blocks() / self.volume.stripe_blocks();
        let space = self.space.borrow();
        let unowned =
            (0..stripes).filter(|stripe| space.is_empty(*stripe) && !self.volume.is_unwritten(*stripe));
        self.idle.borrow_mut().young.extend(unowned);
        self.idle_noted.notify_one();
    }

    /// Discards stripes that have rested, a batch at a time, for as long as the target is open.
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
                    // They are noted still.
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

    /// Takes an empty stripe for a whole write, one that was written before if there is any: none when no stripe is
    /// empty, or too little is free beside what is promised to others than the `mine` blocks of this write.
    pub(crate) async fn take_empty_stripe(&self, mine: u64) -> Result<Option<u64>, ChunkError> {
        // Asked with nothing awaited between the answer and the taking.
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

    /// Discards one run of noted stripes: with [`Discard::InTable`] any, else what has rested. Returns how many; none
    /// when nothing is noted that may be discarded.
    async fn discard_some(&self, how: Discard) -> Result<u64, ChunkError> {
        let _one = self.discarding.lock().await;
        let found = self.idle.borrow().reusable.len() as u64;
        if how == Discard::InTable && found > 0 {
            // Whoever had the lock before made them.
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

    /// Takes the first run of noted stripes that still hold nothing.
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
                // All that is free is promised to writes.
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
