//! Rebuild and resync of members: one job for both.
//!
//! Every strip of the member that the table marks stale is reconstructed from verified strips, written under
//! a new version, flushed, read back and verified, and only then recorded as valid. The table holds the
//! progress, so a restart goes on where it was.

use super::{JobProgress, MOST_PAUSE, RETRY};
use crate::context::Context;
use crate::durability::Durability;
use crate::error::ArrayError;
use crate::events::ArrayEvent;
use crate::format::record::Entry;
use crate::log::space::LogSpace;
use crate::members::{Members, WhenSuspended};
use crate::place::{Position, Positions};
use crate::queue::EntryQueue;
use crate::site::Site;
use crate::stripes::Stripes;
use crate::strips::{Part, StripWrite, Strips};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use penstock_base::rank::scoped;
use penstock_base::{Stripe, Version};
use penstock_drive::Io;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const IO: Io = Site::RebuildStrip.io();
const WRITE: StripWrite = StripWrite::new(Site::RebuildStrip, Site::RebuildStrip, WhenSuspended::Fail);
/// Time without other I/O after which the rebuild counts as alone.
const CALM: Duration = Duration::from_millis(100);

/// The size of the job's steps.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Steps {
    /// Stripes rebuilt between two flushes.
    stripes: usize,
    /// Batches in flight: some read while others write and verify.
    batches: usize,
}

const ALONE: Steps = Steps { stripes: 4, batches: 4 };
/// Beside other I/O, which waits for a stripe as long as its batch takes.
const BESIDE: Steps = Steps { stripes: 2, batches: 1 };

/// The rebuild of one array's members.
pub(crate) struct Rebuild {
    pub(crate) context: Rc<Context>,
    pub(crate) queue: Rc<EntryQueue>,
    pub(crate) members: Rc<Members>,
    pub(crate) stripes: Rc<Stripes>,
    pub(crate) space: Rc<LogSpace>,
    pub(crate) strips: Rc<Strips>,
    pub(crate) durability: Rc<Durability>,
    pub(crate) progress: Cell<Option<JobProgress>>,
}

impl Rebuild {
    /// The progress of the rebuild that is running.
    pub(crate) fn progress(&self) -> Option<JobProgress> {
        self.progress.get()
    }

    /// Rebuilds members that are back or were replaced, until the array is closed.
    pub(crate) async fn run(self: Rc<Self>) {
        // The next search begins behind the member that was tried last, so that a stripe which cannot be made
        // delays no other member.
        let mut from = 0;
        // By member, the stripe behind those that a full host had no space for: they delay no other stripe.
        let mut behind = BTreeMap::new();
        while !self.context.is_closed() {
            let Some(position) = self.next_member(from) else {
                self.context.signals.resync.notified().await;
                continue;
            };
            from = position.index() + 1;
            match self.rebuild_member(position, behind.entry(position).or_default()).await {
                Ok(true) => {}
                Ok(false) => self.context.env.sleep(RETRY).await,
                Err(ArrayError::Closed) => break,
                Err(error) => {
                    if let ArrayError::Suspended(why) = &error {
                        self.context.report_suspended(why);
                    }
                    let name = &self.context.name;
                    tracing::warn!(array = name, %position, %error, "rebuild interrupted; it will go on");
                    self.context.env.sleep(RETRY).await;
                }
            }
        }
    }

    /// True if a member can be rebuilt, at least in part.
    pub(crate) fn has_work(&self) -> bool {
        self.next_member(0).is_some()
    }

    /// A reachable member that is stale, or that missed single strips: the first one in turn from number
    /// `from` on.
    fn next_member(&self, from: usize) -> Option<Position> {
        let (reachable, stale, table) =
            (self.members.reachable(), self.members.stale(), self.stripes.table());
        let missed = |position| table.counts().1 > 0 && table.count_stale(Positions::one(position)) > 0;
        let all = self.context.geo.strips();
        let mut in_turn = (from..all).chain(0..from.min(all)).map(Position::new);
        in_turn.find(|position| {
            reachable.contains(*position) && (stale.contains(*position) || missed(*position))
        })
    }

    /// Rebuilds one member, from a stripe on that it moves. Returns true if no strip of it is stale now.
    async fn rebuild_member(&self, position: Position, from: &mut Stripe) -> Result<bool, ArrayError> {
        let (strip, life) = (Positions::one(position), self.members.life(position));
        let total = self.stripes.table().count_stale(strip);
        let started_ns = self.context.env.wall_ns();
        let mut progress = JobProgress { total_stripes: total, started_ns, ..JobProgress::default() };
        self.progress.set(Some(progress));
        let whole = total > 0 && total == self.stripes.table().counts().0;
        self.context.events.push(ArrayEvent::RebuildBegun { position, stripes: total, whole });
        let result = self.rebuild_stale(position, from, &mut progress).await;
        self.progress.set(None);
        // Stripes written meanwhile may have missed it again.
        let complete = matches!(result, Ok(true)) && self.stripes.table().count_stale(strip) == 0;
        let (stripes, failed) = (progress.done_stripes, progress.failed_stripes);
        let ended = ArrayEvent::RebuildEnded { position, stripes, failed, whole, complete };
        self.context.events.push(ended);
        result?;
        if complete && self.members.stale().contains(position) {
            // It counts once a start would recognise it by its label.
            if self.members.owed_labels().contains(position)
                && let Err(error) = self.members.write_label(position).await
            {
                let name = &self.context.name;
                tracing::warn!(array = name, %position, %error, "a rebuilt member waits for its label");
                return Ok(false);
            }
            self.members.activate(position, life).await?;
        }
        Ok(complete)
    }

    /// Rebuilds every stale strip of a member, from a stripe on. Returns false if one failed. After a
    /// suspended round the next one begins behind the stripes that were tried.
    async fn rebuild_stale(
        &self,
        position: Position,
        begin: &mut Stripe,
        progress: &mut JobProgress,
    ) -> Result<bool, ArrayError> {
        let strip = Positions::one(position);
        let (env, latency) = (&self.context.env, &self.context.latency);
        let mut from = std::mem::take(begin);
        let (mut served, mut disturbed) = (latency.served(), None);
        // Each batch runs to its end, whatever becomes of the others: batches hold locks of stripes.
        let mut running = FuturesUnordered::new();
        let mut result = Ok(true);
        loop {
            if self.context.is_closed() || self.members.slice(position).is_none() {
                result = result.and(Ok(false));
            }
            if latency.served() != served {
                (served, disturbed) = (latency.served(), Some(env.now()));
            }
            let is_beside = disturbed.is_some_and(|at| env.now().saturating_sub(at) < CALM);
            let steps = if is_beside { BESIDE } else { ALONE };
            while running.len() < steps.batches && matches!(result, Ok(true)) {
                let found = self.find_stale(from, strip, steps.stripes);
                let Some(last) = found.last() else { break };
                from = last.next();
                running.push(scoped(async move {
                    let began = env.now();
                    let done = self.rebuild_batch(position, &found).await;
                    (done, found.len() as u64, env.now().saturating_sub(began))
                }));
            }
            let Some((done, of, took)) = running.next().await else {
                // Stripes whose record is on its way may have missed it too: the table shows them after a
                // flush.
                if self.stripes.pending_misses(strip) && matches!(result, Ok(true)) {
                    self.durability.flush(IO.at("rebuild.flush")).await?;
                    from = Stripe(0);
                    continue;
                }
                if matches!(result, Err(ArrayError::Suspended(_))) {
                    *begin = from;
                }
                return result.map(|whole| whole && progress.failed_stripes == 0);
            };
            match done {
                Ok(done) => {
                    assert!(done <= of, "{done} of {of} stripes");
                    progress.done_stripes += done;
                    progress.failed_stripes += of - done;
                    self.progress.set(Some(*progress));
                }
                Err(error) => result = result.and(Err(error)),
            }
            if is_beside && running.is_empty() && result.is_ok() {
                // Other I/O waits for the same drives: it gets them for as long.
                env.sleep(took.min(MOST_PAUSE)).await;
            }
        }
    }

    /// The first stripes from `from` on, at most `most`, that lack a strip.
    fn find_stale(&self, from: Stripe, strip: Positions, most: usize) -> Vec<Stripe> {
        assert!(most > 0, "a batch has a stripe");
        let table = self.stripes.table();
        let next = |at| table.find_written(at, |stale| stale.meets(strip));
        std::iter::successors(next(from), |stripe| next(stripe.next())).take(most).collect()
    }

    /// Rebuilds strips, and keeps no stripe locked while writes are suspended. Returns the number of strips
    /// that are valid now.
    async fn rebuild_batch(&self, position: Position, stripes: &[Stripe]) -> Result<u64, ArrayError> {
        self.space.wait_for_rebuild().await?;
        let life = self.members.life(position);
        let mut locks = Vec::new();
        for stripe in stripes {
            locks.push(self.stripes.locks.exclusive(stripe.0).await);
        }
        let rebuild = |stripe: &Stripe| scoped(self.rebuild_strip(*stripe, position));
        let written = join_all(stripes.iter().map(rebuild)).await;
        self.members.flush(position, IO.at("rebuild.flush")).await?;
        let io = IO.at("rebuild.verify");
        let verify = stripes.iter().zip(&written).map(|(stripe, written)| async move {
            match written {
                Ok(Some((version, part))) => {
                    self.strips.reads_back(*stripe, position, *version, part, io).await
                }
                _ => false,
            }
        });
        let verified = join_all(verify).await;
        assert!(verified.len() == stripes.len(), "every strip is read back");
        let mut records = Vec::new();
        let (mut done, mut failed) = (0, None);
        for ((stripe, written), verified) in stripes.iter().copied().zip(written).zip(verified) {
            match written {
                Ok(Some((version, _))) if verified => {
                    if self.members.life(position) != life {
                        failed =
                            failed.or(Some(ArrayError::Invalid(format!("member {position} was replaced"))));
                        continue;
                    }
                    let (set, clear) = (Positions::NONE, Positions::one(position));
                    let entry = Entry::Strips { stripe, set, clear, version };
                    records.push(self.queue.push_control(entry, Vec::new()));
                    done += 1;
                }
                Ok(None) => done += 1,
                Ok(Some(_)) => {
                    let name = &self.context.name;
                    tracing::warn!(array = name, %stripe, %position, "a rebuilt strip does not read back");
                }
                Err(error @ (ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. })) => {
                    self.stripes.map_mut().set_unreadable(stripe);
                    tracing::error!(array = self.context.name, %stripe, %error, "a stripe cannot be rebuilt");
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        // Until its record counts nobody may write a strip again: the record names the version that is there.
        self.queue.wait_for(records).await?;
        failed.map_or(Ok(done), Err)
    }

    /// Makes a strip and writes it. None if it is valid already.
    async fn rebuild_strip(
        &self,
        stripe: Stripe,
        position: Position,
    ) -> Result<Option<(Version, Part)>, ArrayError> {
        let is_written = self.stripes.table().is_written(stripe);
        if !is_written || !self.stripes.stale(stripe).contains(position) {
            return Ok(None);
        }
        let all = 0..self.context.geo.strip_blocks;
        let part = self.strips.recover_one(stripe, position, &all, IO.at("rebuild.read")).await?;
        let version = self.stripes.versions.next().await?;
        match self.strips.write_strip(stripe, position, &part, version, WRITE).await? {
            Some(_) => Ok(Some((version, part))),
            None => Err(ArrayError::Invalid(format!("member {position} failed while it was rebuilt"))),
        }
    }
}
