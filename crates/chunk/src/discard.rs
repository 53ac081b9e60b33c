//! Giving space back: blocks to the allocator at once, and whole stripes that hold nothing to the drives.
//!
//! Nobody waits for the drives here: a stripe that lost its last block is noted, and a background task discards what
//! is noted, a batch at a time with a pause after each. A whole-chunk write that finds no unwritten stripe makes some
//! out of those noted, without the drives' part, since it writes there at once.
//!
//! Invariants: a stripe in a discard is taken in *used*, so that nobody writes there before the discard is done, and
//! never one whose blocks are promised; at most one batch is out at a time, so a write that lacks space waits for
//! that one and no longer.
//!
//! Power cut: a written stripe that nobody owns stays written until the next start notes it.

use crate::ChunkError;
use crate::space::Run;
use crate::target::Target;
use penstock_array::{ArrayError, Discard};
use std::rc::Rc;
use std::time::Duration;

/// Most stripes in one batch.
const BATCH: u64 = 64;
/// Pause after a batch: with whole batches of 1 MiB stripes, about 3 GB are discarded in a second.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a stripe may wait to be written again before the drives hear of it.
const REST: Duration = Duration::from_millis(500);

impl Target {
    /// Makes runs allocatable again and notes the stripes that hold nothing now.
    pub(crate) fn give_back(&self, runs: Vec<Run>) {
        let mut space = self.space.borrow_mut();
        let mut idle = self.idle.borrow_mut();
        for run in runs {
            idle.extend(space.free(run));
        }
        if !idle.is_empty() {
            self.idle_noted.notify_one();
        }
    }

    /// Notes written stripes in which nothing is allocated: what a crash left of writes that were not committed.
    pub(crate) fn note_unowned(&self) {
        let stripes = self.volume.blocks() / self.volume.stripe_blocks();
        let space = self.space.borrow();
        let unowned =
            (0..stripes).filter(|stripe| space.is_empty(*stripe) && !self.volume.is_unwritten(*stripe));
        self.idle.borrow_mut().extend(unowned);
        self.idle_noted.notify_one();
    }

    /// Discards noted stripes until none is left, a batch at a time.
    pub(crate) async fn discard_task(self: Rc<Self>) {
        loop {
            self.idle_noted.notified().await;
            self.env.sleep(REST).await;
            while !self.closed.get() {
                match self.discard_some(Discard::OnDrives).await {
                    Ok(0) => break,
                    Ok(_) => self.env.sleep(PAUSE).await,
                    Err(ChunkError::Array(ArrayError::Closed)) => return,
                    // They are noted still; whoever frees more tries again.
                    Err(error) => {
                        tracing::warn!(%error, "free stripes could not be discarded");
                        break;
                    }
                }
            }
            if self.closed.get() {
                return;
            }
        }
    }

    /// Discards one run of noted stripes. Returns how many; none when nothing is noted that may be discarded.
    pub(crate) async fn discard_some(&self, how: Discard) -> Result<u64, ChunkError> {
        let _one = self.discarding.lock().await;
        let per_stripe = self.volume.stripe_blocks();
        let Some((first, count)) = self.take_idle() else { return Ok(0) };
        self.space.borrow_mut().set_discarding(count * per_stripe);
        let result = self.volume.discard(first, count, how).await;
        self.space.borrow_mut().set_discarding(0);
        self.space.borrow_mut().free((first * per_stripe, count * per_stripe));
        if let Err(error) = result {
            self.idle.borrow_mut().extend(first..first + count);
            return Err(error.into());
        }
        self.count(|counts| counts.discarded_stripes += count);
        Ok(count)
    }

    /// Takes the first run of noted stripes that still are written and hold nothing.
    fn take_idle(&self) -> Option<(u64, u64)> {
        let per_stripe = self.volume.stripe_blocks();
        let mut run: Option<(u64, u64)> = None;
        loop {
            let Some(stripe) = self.idle.borrow().first().copied() else { return run };
            if run.is_some_and(|(first, count)| first + count != stripe || count == BATCH) {
                return run;
            }
            let mut space = self.space.borrow_mut();
            if space.usage().free_blocks < per_stripe {
                // All that is free is promised to writes.
                return run;
            }
            self.idle.borrow_mut().remove(&stripe);
            if !self.volume.is_unwritten(stripe) && space.take_stripe(stripe) {
                run = Some(run.map_or((stripe, 1), |(first, count)| (first, count + 1)));
            }
        }
    }
}
