//! The members of an array: which can be read, which can be written, and what happens when a write fails.
//!
//! Invariant: a write that misses a member returns only after the member is recorded as stale under the array's
//! epoch ([`crate::reconfigure`]), so a take-over never trusts a member that missed an acknowledged write.

use crate::engine::Array;
use crate::error::ArrayError;
use futures_util::future::join_all;
use penstock_base::Buf;
use penstock_drive::{DriveError, Io, Slice};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// How long a write waits before it tries a full host or a suspended array again.
const RETRY: Duration = Duration::from_millis(500);

/// One member.
pub(crate) struct Member {
    /// Its slice; none while its drive is missing.
    pub(crate) slice: Option<Slice>,
    /// Recorded as missing writes.
    pub(crate) stale: bool,
    /// Stripes written on it since its last flush.
    pub(crate) unflushed: BTreeSet<u64>,
    /// Raised when its slice is taken away: what was written before is on the old one.
    pub(crate) life: u64,
    /// Held during a flush: who finds nothing left to flush must still wait for the flush that took it.
    pub(crate) flushing: Rc<tokio::sync::Mutex<()>>,
}

impl Member {
    /// The slice, if its drive takes I/O.
    pub(crate) fn reachable(&self) -> Option<Slice> {
        self.slice.clone().filter(|slice| slice.drive().is_online())
    }
}

impl Array {
    pub(crate) fn member_slice(&self, position: usize) -> Option<Slice> {
        self.members.borrow()[position].reachable()
    }

    /// The lives of all members: compared after a write, they tell whose slice was taken away meanwhile.
    pub(crate) fn lives(&self) -> Vec<u64> {
        self.members.borrow().iter().map(|member| member.life).collect()
    }

    /// Positions whose strip of this stripe should be readable.
    pub(crate) fn readable(&self, stripe: u64) -> Vec<usize> {
        let stale = self.stale_strips(stripe);
        let members = self.members.borrow();
        (0..members.len()).filter(|at| stale & (1 << at) == 0 && members[*at].reachable().is_some()).collect()
    }

    /// Writes to a member's slice. `Ok(false)` means that the member failed and is recorded as stale.
    pub(crate) async fn write_member(
        &self,
        position: usize,
        at: u64,
        data: Buf,
        stripe: Option<u64>,
        io: Io,
    ) -> Result<bool, ArrayError> {
        loop {
            let slice = match &self.members.borrow()[position] {
                member if member.stale && member.reachable().is_none() => return Ok(false),
                Member { slice: Some(slice), .. } => slice.clone(),
                Member { slice: None, .. } => return Ok(false),
            };
            let failure = match slice.write(at, data.clone(), io).await {
                Ok(()) => {
                    if let Some(stripe) = stripe {
                        self.members.borrow_mut()[position].unflushed.insert(stripe);
                    }
                    self.resume();
                    return Ok(true);
                }
                Err(DriveError::HostFull) => {
                    self.suspend("host full".to_owned()).await?;
                    continue;
                }
                Err(error) => error,
            };
            match self.fail_member(position, &failure.to_string()).await {
                Ok(()) => return Ok(false),
                Err(ArrayError::Suspended(why)) => self.suspend(why).await?,
                Err(error) => return Err(error),
            }
        }
    }

    async fn suspend(&self, why: String) -> Result<(), ArrayError> {
        if self.closed.get() {
            return Err(ArrayError::Suspended(why));
        }
        if self.suspended.borrow().as_ref() != Some(&why) {
            tracing::error!(array = self.name, why, "writes are suspended until this is over");
        }
        *self.suspended.borrow_mut() = Some(why);
        self.env.sleep(RETRY).await;
        Ok(())
    }

    fn resume(&self) {
        if self.suspended.borrow_mut().take().is_some() {
            tracing::info!(array = self.name, "writes go on");
        }
    }

    /// Flushes all members that were written since their last flush. A member whose flush fails is stale afterwards.
    pub(crate) async fn flush_members(&self, io: Io) -> Result<(), ArrayError> {
        let positions = 0..self.geo.strips();
        let results = join_all(positions.map(|position| self.flush_member(position, io))).await;
        results.into_iter().collect()
    }

    pub(crate) async fn flush_member(&self, position: usize, io: Io) -> Result<(), ArrayError> {
        let flushing = self.members.borrow()[position].flushing.clone();
        let _one_at_a_time = flushing.lock().await;
        let (slice, covered) = {
            let mut members = self.members.borrow_mut();
            let member = &mut members[position];
            match member.reachable() {
                Some(slice) if !member.unflushed.is_empty() => (slice, std::mem::take(&mut member.unflushed)),
                _ => return Ok(()),
            }
        };
        let Err(error) = slice.flush(io).await else { return Ok(()) };
        // What the failed flush covered is unknown now, and so is all that was written meanwhile.
        self.members.borrow_mut()[position].unflushed.extend(covered);
        let recorded = self.fail_member(position, &error.to_string()).await;
        if let Err(ArrayError::Suspended(why)) = &recorded {
            // A later flush that succeeds would say nothing about these writes. Only a new opening, which redoes them
            // from the log, knows what is on the drives.
            tracing::error!(
                array = self.name,
                why,
                "a flush failed: the array stops until it is opened again"
            );
            *self.suspended.borrow_mut() = Some(format!("a flush failed: {why}; restart the instance"));
            self.stop();
        }
        recorded
    }
}
