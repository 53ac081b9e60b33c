//! Writes and flushes of members, and the judgement of a failed one.

use super::{Life, Members};
use crate::error::ArrayError;
use crate::place::Position;
use futures_util::future::join_all;
use penstock_base::rank::scoped;
use penstock_base::{Buf, Stripe};
use penstock_drive::{DriveError, Io};

/// The behaviour of a write while a host is full, or while more drives fail than the array may lose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WhenSuspended {
    /// It waits, and its caller keeps its locks.
    Wait,
    /// It fails with [`ArrayError::Suspended`]. For contents that another member has, or nobody reads
    /// meanwhile. A full host is waited for, except for strips: it says nothing about the place.
    Fail,
}

/// The structure that a write to a member belongs to.
enum Structure {
    /// A part of a slice that is not listed below.
    Member(WhenSuspended),
    /// A part of log, roots or pages: all carriers have it.
    Carrier,
    /// A strip.
    Strip(Stripe, WhenSuspended),
}

impl Members {
    /// Writes to a member's slice. Returns the life in which the write landed; none if the member is recorded
    /// as stale instead.
    pub(crate) async fn write(
        &self,
        position: Position,
        (at, data): (u64, Buf),
        io: Io,
        when: WhenSuspended,
    ) -> Result<Option<Life>, ArrayError> {
        self.write_at(position, at, data, Structure::Member(when), io).await
    }

    /// Writes a part of the strip that a member has of `stripe`.
    pub(crate) async fn write_strip(
        &self,
        stripe: Stripe,
        position: Position,
        (at, data): (u64, Buf),
        io: Io,
        when: WhenSuspended,
    ) -> Result<Option<Life>, ArrayError> {
        self.write_at(position, at, data, Structure::Strip(stripe, when), io).await
    }

    /// Writes a part of what carriers hold. While the array can lose no carrier it tries again without end,
    /// and between two attempts another member may become a carrier.
    pub(super) async fn write_carrier(
        &self,
        position: Position,
        at: u64,
        data: &Buf,
        io: Io,
    ) -> Result<Option<Life>, ArrayError> {
        self.write_at(position, at, data.clone(), Structure::Carrier, io).await
    }

    async fn write_at(
        &self,
        position: Position,
        at: u64,
        data: Buf,
        structure: Structure,
        io: Io,
    ) -> Result<Option<Life>, ArrayError> {
        loop {
            let attempt = match structure {
                Structure::Carrier => Some(self.carrier_writes.begin(at..at + data.len() as u64).await),
                Structure::Member(_) | Structure::Strip(..) => None,
            };
            let (slice, life) = {
                let member = &self.members.borrow()[position.index()];
                if member.is_stale() && member.reachable().is_none() {
                    return Ok(None);
                }
                let Some(slice) = member.slice() else { return Ok(None) };
                (slice.clone(), member.life())
            };
            let written = slice.write(at, data.clone(), io).await;
            drop(attempt);
            let suspend = async |why: String| match structure {
                Structure::Member(WhenSuspended::Fail) | Structure::Strip(_, WhenSuspended::Fail) => {
                    Err(ArrayError::Suspended(why))
                }
                _ => self.context.suspend(why).await,
            };
            let failure = match written {
                Ok(()) if self.life(position) == life => {
                    if let Structure::Strip(stripe, _) = structure {
                        self.members.borrow_mut()[position.index()].landed(stripe);
                    }
                    self.context.resume();
                    return Ok(Some(life));
                }
                Ok(()) => "the drive failed meanwhile".to_owned(),
                Err(DriveError::HostFull) => {
                    let why = "host full".to_owned();
                    match structure {
                        Structure::Strip(..) => suspend(why).await?,
                        Structure::Member(_) | Structure::Carrier => self.context.suspend(why).await?,
                    }
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

    /// Flushes all members that were written since their last flush. A member whose flush fails is stale
    /// afterwards.
    pub(crate) async fn flush_all(&self, io: Io) -> Result<(), ArrayError> {
        let flush = |position| scoped(self.flush(position, io));
        join_all(self.context.geo.all_strips().iter().map(flush)).await.into_iter().collect()
    }

    /// Flushes a member if it was written since its last flush.
    pub(crate) async fn flush(&self, position: Position, io: Io) -> Result<(), ArrayError> {
        let flushing = self.members.borrow()[position.index()].flushing();
        let _one_at_a_time = flushing.lock().await;
        let (slice, life, covered) = {
            let member = &self.members.borrow()[position.index()];
            if !member.needs_flush() {
                return Ok(());
            }
            (member.reachable(), member.life(), member.last_write())
        };
        let flushed = match slice {
            Some(slice) => slice.flush(io).await.map_err(|error| error.to_string()),
            None => Err("its drive is gone".to_owned()),
        };
        match flushed {
            Ok(()) if self.life(position) == life => {
                self.members.borrow_mut()[position.index()].flushed(covered);
                Ok(())
            }
            // The strips that the flush covered were recorded as stale when the life ended.
            Ok(()) => self.record_lost().await,
            Err(why) => self.fail_flush(position, life, &why).await,
        }
    }

    /// A member could not be flushed in a life: it becomes stale, or the array stops. A later flush that
    /// succeeds would prove nothing about the writes of this one; only a new opening, which redoes them from
    /// the log, knows what is on the drives.
    pub(super) async fn fail_flush(
        &self,
        position: Position,
        life: Life,
        why: &str,
    ) -> Result<(), ArrayError> {
        let recorded = self.fail_life(position, life, why).await;
        if let Err(ArrayError::Suspended(why)) = &recorded {
            self.context.stop_because(format!("a flush failed: {why}"));
        }
        recorded
    }
}
