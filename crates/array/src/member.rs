//! The members of an array: which can be read, which can be written, and what happens when a write or flush fails.
//!
//! Invariants:
//! - A write that misses a member returns only after the member is recorded as stale under the array's epoch
//!   ([`crate::reconfigure`]), so a take-over never trusts a member that missed an acknowledged write.
//! - A member has a *life*, raised when its drive is latched and when it is replaced. A strip is on its member if it
//!   landed and was flushed under the present life. A late answer of an earlier life changes nothing of the present one.
//! - When a life ends, every strip that it wrote and did not flush is recorded as stale.

use crate::carriers::Mending;
use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::record::Entry;
use futures_util::future::join_all;
use penstock_base::Buf;
use penstock_drive::{DriveError, Io, Slice};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// How long a write waits before it tries a full host or a suspended array again.
const RETRY: Duration = Duration::from_millis(500);

/// The way of a strip's write while a host is full, or more drives fail than the array may record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WhenSuspended {
    /// It waits, with what its caller holds.
    Wait,
    /// It fails with [`ArrayError::Suspended`]. For strips of which nobody reads what stands there meanwhile.
    Fail,
}

/// The structure that a write to a member belongs to.
enum Target<'a> {
    /// Something that this member alone has.
    Member,
    /// A part of the log or the metadata: all carriers have it.
    Carrier(&'a Mending),
    /// A strip.
    Strip(u64, WhenSuspended),
}

/// One member.
#[derive(Default)]
pub(crate) struct Member {
    /// Its slice; none while its drive is missing.
    pub(crate) slice: Option<Slice>,
    /// Recorded as missing writes.
    pub(crate) stale: bool,
    /// Raised when its drive is latched and when its slice is replaced.
    pub(crate) life: u64,
    /// The present life was raised for a latched drive.
    ended: bool,
    /// Stripes written on it and not flushed since, with the number of the write.
    unflushed: BTreeMap<u64, u64>,
    /// Writes of strips so far.
    writes: u64,
    /// Held during a flush, so that a flush whose strips another one covers waits for that one.
    flushing: Rc<tokio::sync::Mutex<()>>,
}

impl Member {
    pub(crate) fn new(slice: Option<Slice>, stale: bool) -> Self {
        Self { slice, stale, ..Self::default() }
    }

    /// The slice, if its drive takes I/O.
    pub(crate) fn reachable(&self) -> Option<Slice> {
        self.slice.clone().filter(|slice| slice.drive().is_online())
    }

    /// Whether its drive is gone and no record says so yet.
    pub(crate) fn is_newly_lost(&self) -> bool {
        !self.stale && self.reachable().is_none()
    }

    fn note_write(&mut self, stripe: u64) {
        self.writes += 1;
        self.unflushed.insert(stripe, self.writes);
    }

    /// Begins another life. Returns the stripes whose strips the last one may not have kept.
    fn end_life(&mut self) -> BTreeMap<u64, u64> {
        self.life += 1;
        std::mem::take(&mut self.unflushed)
    }

    /// Takes the slice away: nothing that is still on its way to it counts.
    pub(crate) fn remove_slice(&mut self) {
        self.end_life();
        self.slice = None;
    }

    /// Puts another slice in its place.
    pub(crate) fn put_slice(&mut self, slice: Slice) {
        self.slice = Some(slice);
        self.ended = false;
    }
}

impl Array {
    pub(crate) fn member_slice(&self, position: usize) -> Option<Slice> {
        self.members.borrow()[position].reachable()
    }

    /// The present life of a member.
    pub(crate) fn life(&self, position: usize) -> u64 {
        self.members.borrow()[position].life
    }

    /// Positions whose strip of this stripe should be readable.
    pub(crate) fn readable(&self, stripe: u64) -> Vec<usize> {
        let stale = self.stale_strips(stripe);
        let members = self.members.borrow();
        (0..members.len()).filter(|at| stale & (1 << at) == 0 && members[*at].reachable().is_some()).collect()
    }

    /// Writes to a member's slice. Returns the life under which the write landed; none when the member is recorded as
    /// stale instead.
    pub(crate) async fn write_member(
        &self,
        position: usize,
        at: u64,
        data: Buf,
        io: Io,
    ) -> Result<Option<u64>, ArrayError> {
        self.write_at(position, at, data, Target::Member, io).await
    }

    /// Writes a part of the strip that a member has of `stripe`.
    pub(crate) async fn write_in_strip(
        &self,
        stripe: u64,
        position: usize,
        (at, data): (u64, Buf),
        io: Io,
        when: WhenSuspended,
    ) -> Result<Option<u64>, ArrayError> {
        self.write_at(position, at, data, Target::Strip(stripe, when), io).await
    }

    /// Writes what carriers hold. It does so again and again where the array can lose no carrier, and between these attempts
    /// another member may become one.
    pub(crate) async fn write_carrier(
        &self,
        position: usize,
        at: u64,
        data: &Buf,
        io: Io,
    ) -> Result<Option<u64>, ArrayError> {
        self.write_at(position, at, data.clone(), Target::Carrier(&self.mending), io).await
    }

    async fn write_at(
        &self,
        position: usize,
        at: u64,
        data: Buf,
        target: Target<'_>,
        io: Io,
    ) -> Result<Option<u64>, ArrayError> {
        loop {
            let attempt = match target {
                Target::Carrier(mending) => Some(mending.begin_write(at..at + data.len() as u64).await),
                Target::Member | Target::Strip(..) => None,
            };
            let (slice, life) = match &self.members.borrow()[position] {
                member if member.stale && member.reachable().is_none() => return Ok(None),
                Member { slice: Some(slice), life, .. } => (slice.clone(), *life),
                Member { slice: None, .. } => return Ok(None),
            };
            let written = slice.write(at, data.clone(), io).await;
            drop(attempt);
            let suspend = async |why: String| match target {
                Target::Strip(_, WhenSuspended::Fail) => Err(ArrayError::Suspended(why)),
                _ => self.suspend(why).await,
            };
            let failure = match written {
                Ok(()) if self.life(position) == life => {
                    if let Target::Strip(stripe, _) = target {
                        self.members.borrow_mut()[position].note_write(stripe);
                    }
                    self.resume();
                    return Ok(Some(life));
                }
                Ok(()) => "the drive failed meanwhile".to_owned(),
                Err(DriveError::HostFull) => {
                    suspend("host full".to_owned()).await?;
                    continue;
                }
                Err(error) => error.to_string(),
            };
            match self.fail_life(position, life, &failure).await {
                Ok(()) => return Ok(None),
                Err(ArrayError::Suspended(why)) => suspend(why).await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits a moment before something is tried again, and says why.
    pub(crate) async fn suspend(&self, why: String) -> Result<(), ArrayError> {
        if self.closed.get() {
            return Err(ArrayError::Suspended(why));
        }
        self.note_suspended(&why);
        self.env.sleep(RETRY).await;
        Ok(())
    }

    /// Says why writes wait, until one lands.
    pub(crate) fn note_suspended(&self, why: &str) {
        if self.suspended.borrow().as_deref() != Some(why) {
            tracing::error!(array = self.name, why, "writes are suspended until this is over");
        }
        *self.suspended.borrow_mut() = Some(why.to_owned());
    }

    pub(crate) fn resume(&self) {
        if self.suspended.borrow_mut().take().is_some() {
            tracing::info!(array = self.name, "writes go on");
        }
    }

    /// Ends the life of a member whose drive is latched: strips that were not flushed under it are stale.
    pub(crate) fn note_latched(&self, position: usize) {
        let unflushed = {
            let mut members = self.members.borrow_mut();
            let member = &mut members[position];
            if std::mem::replace(&mut member.ended, true) {
                return;
            }
            member.end_life()
        };
        for stripe in unflushed.into_keys() {
            // Not waited for: until it is durable the strip's version proves the same. Of a stripe that is not written
            // yet it says nothing; the fresh record, made from lives, does.
            drop(self.log.queue_control(Entry::stale_strips(stripe, 1 << position), Vec::new()));
        }
        self.want_mending();
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
        let (slice, life, covered) = {
            let members = self.members.borrow();
            let member = &members[position];
            if member.unflushed.is_empty() && !member.is_newly_lost() {
                return Ok(());
            }
            (member.reachable(), member.life, member.writes)
        };
        let flushed = match slice {
            Some(slice) => slice.flush(io).await.map_err(|error| error.to_string()),
            None => Err("its drive is gone".to_owned()),
        };
        match flushed {
            Ok(()) if self.life(position) == life => {
                self.members.borrow_mut()[position].unflushed.retain(|_, write| *write > covered);
                Ok(())
            }
            // What the flush covered was recorded as stale when the life ended.
            Ok(()) => self.record_lost().await,
            Err(why) => self.fail_flush(position, life, &why).await,
        }
    }

    /// A member could not be flushed under `life`: it is stale, or the array stops. A later flush that succeeds would say
    /// nothing about the writes of this one; only a new opening, which redoes them from the log, knows what is on the
    /// drives.
    pub(crate) async fn fail_flush(&self, position: usize, life: u64, why: &str) -> Result<(), ArrayError> {
        let recorded = self.fail_life(position, life, why).await;
        if let Err(ArrayError::Suspended(why)) = &recorded {
            self.stop_because(format!("a flush failed: {why}"));
        }
        recorded
    }
}
