//! The carriers of log, roots and table pages: the set of them, and writes that go to all of them.
//!
//! Invariant: an attempt to write that begins after a member became a carrier goes to that member too, or is
//! followed by one that does.

use super::carrier_writes::{CopyPieces, Paused};
use super::record::Reconfiguration;
use super::{Life, Members};
use crate::error::ArrayError;
use crate::format::descriptor::Descriptor;
use crate::place::{MemberNo, MemberSet};
use crate::site::Site;
use futures_util::future::join_all;
use penstock_base::Buf;
use penstock_base::rank::scoped;
use penstock_drive::Io;
use std::cell::Cell;
use std::ops::Range;
use std::time::Duration;

/// The state of the search for carriers in place of lost ones.
#[derive(Default)]
pub(crate) struct CarrierSearch {
    wanted: Cell<bool>,
    /// No copy begins before this time.
    not_before: Cell<Duration>,
    /// Members that did not take a copy: others are tried first.
    refused: Cell<MemberSet>,
    /// A new carrier counts, and labels that name it may not be written yet.
    recording: Cell<bool>,
}

impl CarrierSearch {
    /// Has the carriers looked at without delay.
    pub(super) fn want(&self) {
        self.wanted.set(true);
        self.not_before.set(Duration::ZERO);
    }

    /// True while carriers are to be looked at.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.get()
    }

    /// All carriers are there.
    pub(crate) fn done(&self) {
        self.wanted.set(false);
        self.refused.set(MemberSet::NONE);
    }

    /// Begins no copy before `time`.
    pub(crate) fn pause_until(&self, time: Duration) {
        self.not_before.set(time);
    }

    /// True if a copy may begin at `now`.
    pub(crate) fn may_begin(&self, now: Duration) -> bool {
        now >= self.not_before.get()
    }

    /// A member did not take a copy.
    pub(crate) fn refuse(&self, member: MemberNo) {
        self.refused.set(self.refused.get().with(MemberSet::one(member)));
    }

    /// Members that did not take a copy are tried again.
    pub(crate) fn forgive(&self) {
        self.refused.set(MemberSet::NONE);
    }

    /// Members that did not take a copy.
    pub(crate) fn refused(&self) -> MemberSet {
        self.refused.get()
    }
}

impl Members {
    /// The search for carriers in place of lost ones.
    pub(crate) fn search(&self) -> &CarrierSearch {
        &self.search
    }

    /// Members that carry the log now.
    pub(crate) fn live_carriers(&self) -> Vec<MemberNo> {
        let serve = self.select(|member| !member.is_stale() && member.slice().is_some());
        self.desc.borrow().carriers().filter(|at| serve.contains(*at)).collect()
    }

    /// Carriers that are reachable and not among the stale members.
    pub(crate) fn trusted_carriers(&self, stale: MemberSet) -> Vec<MemberNo> {
        let good = self.reachable().without(stale);
        self.desc.borrow().carriers().filter(|at| good.contains(*at)).collect()
    }

    /// The number of replicas of log and checkpoints that are missing. One is, while labels that name it
    /// may not be written.
    pub(crate) fn missing_carriers(&self) -> u64 {
        let active = self.active();
        let good = self.desc.borrow().carriers().filter(|carrier| active.contains(*carrier)).count();
        let wanted = self.context.geo.carriers();
        let missing = (wanted - good.min(wanted)) as u64;
        missing + u64::from(self.is_metadata_bad()) + u64::from(self.search.recording.get())
    }

    /// The carriers that there should be: all that still serve, since only labels name carriers, and what a
    /// start finds on one that left unseen would count. In place of others the first active members; those in
    /// other failure domains come first, and members that did not take a copy come last. One more, which did
    /// not refuse, if all would be in the same domain otherwise.
    pub(crate) fn wanted_carriers(&self) -> Vec<MemberNo> {
        self.wanted_beside(self.search.refused())
    }

    /// The same if these members did not take a copy.
    fn wanted_beside(&self, refused: MemberSet) -> Vec<MemberNo> {
        let (active, layout) = (self.active(), &self.context.layout);
        let mut wanted: Vec<MemberNo> =
            self.desc.borrow().carriers().filter(|at| active.contains(*at)).collect();
        let (last, first): (Vec<_>, Vec<_>) = active.iter().partition(|at| refused.contains(*at));
        for members in [&first, &last] {
            layout.choose(&mut wanted, members.iter().copied(), self.context.geo.carriers());
        }
        if let Some((one, others @ [_, ..])) = wanted.split_first()
            && others.iter().all(|other| layout.domain(*other) == layout.domain(*one))
        {
            wanted.extend(first.iter().copied().find(|member| !layout.shares_domain(&wanted, *member)));
        }
        assert!(wanted.iter().all(|at| active.contains(*at)), "{wanted:?} of {active:?}");
        wanted
    }

    /// True if a lost carrier can be replaced.
    pub(crate) fn lacks_carriers(&self) -> bool {
        self.are_others(&self.wanted_carriers())
    }

    /// True if members that did not take a copy should be carriers, and there are enough others for now.
    pub(crate) fn lacks_refused_carriers(&self) -> bool {
        !self.lacks_carriers() && self.are_others(&self.wanted_beside(MemberSet::NONE))
    }

    fn are_others(&self, wanted: &[MemberNo]) -> bool {
        let recorded: MemberSet = self.desc.borrow().carriers().collect();
        wanted.iter().copied().collect::<MemberSet>() != recorded
    }

    /// Writes the same bytes on all carriers, including members that became one meanwhile. Carriers that fail
    /// are stale afterwards; at least one must not fail.
    pub(crate) async fn write_carriers(&self, at: u64, bytes: &Buf, io: Io) -> Result<(), ArrayError> {
        let (mut written, mut landed): (Vec<(MemberNo, Life)>, bool) = (Vec::new(), false);
        loop {
            let lives = self.live_carriers().into_iter().map(|carrier| (carrier, self.life(carrier)));
            let missing: Vec<_> = lives.filter(|life| !written.contains(life)).collect();
            if missing.is_empty() {
                return if landed { Ok(()) } else { Err(self.no_carrier()) };
            }
            let writes =
                missing.iter().map(|(carrier, _)| scoped(self.write_carrier(*carrier, at, bytes, io)));
            for (life, result) in missing.iter().zip(join_all(writes).await) {
                landed |= result?.is_some_and(|landed| landed == life.1);
            }
            written.extend(missing);
        }
    }

    fn no_carrier(&self) -> ArrayError {
        ArrayError::Damaged { name: self.context.name.clone(), what: "every copy of the log".into() }
    }

    /// Flushes all carriers. A carrier that fails is stale afterwards; at least one must not fail.
    pub(crate) async fn flush_carriers(&self) -> Result<(), ArrayError> {
        self.context.count(|counts| counts.log_flushes += 1);
        let io = Site::LogAppend.io().at("log.flush");
        let flush = async |carrier: MemberNo| {
            let life = self.life(carrier);
            let flushed = match self.slice(carrier) {
                None => Err("its drive is gone".to_owned()),
                Some(slice) => slice.flush(io).await.map_err(|error| error.to_string()),
            };
            match flushed {
                Ok(()) if self.life(carrier) == life => Ok(()),
                Ok(()) => self.record_lost().await,
                Err(why) => self.fail_flush(carrier, life, &why).await,
            }
        };
        let results = join_all(self.live_carriers().into_iter().map(|carrier| scoped(flush(carrier)))).await;
        results.into_iter().collect::<Result<(), _>>()?;
        if self.live_carriers().is_empty() { Err(self.no_carrier()) } else { Ok(()) }
    }

    /// Begins a copy of these parts of carriers.
    pub(crate) fn begin_copy(&self, bytes: &[Range<u64>]) -> CopyPieces<'_> {
        self.carrier_writes.begin_copy(bytes)
    }

    /// Waits until nobody writes on carriers, and lets nobody begin.
    pub(crate) async fn pause_carrier_writes(&self) -> Paused<'_> {
        self.carrier_writes.pause().await
    }
}

impl Reconfiguration<'_> {
    /// Records a set of carriers, if all of them are active, and drops `paused` in the step in which it
    /// counts. Returns the members whose label could not be written.
    pub(crate) async fn record_carriers(
        &self,
        carriers: &[MemberNo],
        paused: Option<Paused<'_>>,
    ) -> Result<Vec<MemberNo>, ArrayError> {
        if carriers.iter().any(|at| self.members.stale().contains(*at)) {
            return Ok(Vec::new());
        }
        tracing::info!(array = self.members.context.name, ?carriers, "carriers of the log replaced");
        let change = |next: &mut Descriptor| {
            next.carriers = carriers.iter().map(|at| at.number()).collect();
            next.carriers_epoch += 1;
        };
        let then = || {
            self.members.search.recording.set(true);
            drop(paused);
        };
        let recorded = self.record_then(change, then).await;
        self.members.search.recording.set(false);
        let unwritten = recorded?.failed;
        // The copy is not verified yet: a rotten source block must not count as a copy.
        self.members.suspect_metadata();
        Ok(unwritten)
    }
}
