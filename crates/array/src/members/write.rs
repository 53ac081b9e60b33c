//! Writes and flushes of members, and the judgement of a failed one.

use super::{Life, Members};
use crate::error::ArrayError;
use crate::place::{MemberNo, MemberSet, Position};
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

/// A strip that is written.
#[derive(Clone, Copy)]
pub(crate) struct StripOf {
    pub(crate) stripe: Stripe,
    pub(crate) position: Position,
    /// The array takes it to be on the member, or will once its stripe is recorded. Otherwise it is being
    /// moved to the member, or made again there.
    pub(crate) counts: bool,
}

/// The structure that a write to a member belongs to.
enum Structure {
    /// A part of a slice that is not listed below.
    Member(WhenSuspended),
    /// A part of log, roots or pages: all carriers have it.
    Carrier,
    /// A strip.
    Strip(StripOf, WhenSuspended),
}

impl Members {
    /// Writes to a member's slice. Returns the life in which the write landed; none if the member is recorded
    /// as stale instead.
    pub(crate) async fn write(
        &self,
        member: MemberNo,
        (at, data): (u64, Buf),
        io: Io,
        when: WhenSuspended,
    ) -> Result<Option<Life>, ArrayError> {
        self.write_at(member, at, data, Structure::Member(when), io).await
    }

    /// Writes a part of a strip on a member.
    pub(crate) async fn write_strip(
        &self,
        strip: StripOf,
        member: MemberNo,
        (at, data): (u64, Buf),
        io: Io,
        when: WhenSuspended,
    ) -> Result<Option<Life>, ArrayError> {
        self.write_at(member, at, data, Structure::Strip(strip, when), io).await
    }

    /// Writes a part of what carriers hold. While the array can lose no carrier it tries again without end,
    /// and between two attempts another member may become a carrier.
    pub(super) async fn write_carrier(
        &self,
        member: MemberNo,
        at: u64,
        data: &Buf,
        io: Io,
    ) -> Result<Option<Life>, ArrayError> {
        self.write_at(member, at, data.clone(), Structure::Carrier, io).await
    }

    async fn write_at(
        &self,
        member: MemberNo,
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
                let one = &self.members.borrow()[member.index()];
                if one.is_stale() && !one.is_reachable() {
                    return Ok(None);
                }
                let Some(slice) = one.slice() else { return Ok(None) };
                (slice.clone(), one.life())
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
                Ok(()) if self.life(member) == life => {
                    if let Structure::Strip(StripOf { stripe, position, counts }, _) = structure {
                        self.members.borrow_mut()[member.index()].landed(stripe, position, counts);
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
            match self.fail_life(member, life, &failure).await {
                Ok(()) => return Ok(None),
                Err(ArrayError::Suspended(why)) => suspend(why).await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Flushes all members that were written since their last flush. A member whose flush fails is stale
    /// afterwards.
    pub(crate) async fn flush_all(&self, io: Io) -> Result<(), ArrayError> {
        self.flush_members(self.context.layout.all_members(), io).await
    }

    /// Flushes these members, each if it was written since its last flush.
    pub(crate) async fn flush_members(&self, members: MemberSet, io: Io) -> Result<(), ArrayError> {
        let flush = |member| scoped(self.flush(member, io));
        join_all(members.iter().map(flush)).await.into_iter().collect()
    }

    /// Flushes a member if it was written since its last flush.
    pub(crate) async fn flush(&self, member: MemberNo, io: Io) -> Result<(), ArrayError> {
        let flushing = self.members.borrow()[member.index()].flushing();
        let _one_at_a_time = flushing.lock().await;
        let (slice, life, covered) = {
            let one = &self.members.borrow()[member.index()];
            if !one.needs_flush() {
                return Ok(());
            }
            (one.reachable(), one.life(), one.last_write())
        };
        let flushed = match slice {
            Some(slice) => slice.flush(io).await.map_err(|error| error.to_string()),
            None => Err("its drive is gone".to_owned()),
        };
        match flushed {
            Ok(()) if self.life(member) == life => {
                self.members.borrow_mut()[member.index()].flushed(covered);
                Ok(())
            }
            // The strips that the flush covered were recorded as stale when the life ended.
            Ok(()) => self.record_lost().await,
            Err(why) => self.fail_flush(member, life, &why).await,
        }
    }

    /// A member could not be flushed in a life: it becomes stale, or the array stops. A later flush that
    /// succeeds would prove nothing about the writes of this one; only a new opening, which redoes them from
    /// the log, knows what is on the drives.
    pub(super) async fn fail_flush(&self, member: MemberNo, life: Life, why: &str) -> Result<(), ArrayError> {
        let recorded = self.fail_life(member, life, why).await;
        if let Err(ArrayError::Suspended(why)) = &recorded {
            self.context.stop_because(format!("a flush failed: {why}"));
        }
        recorded
    }
}
