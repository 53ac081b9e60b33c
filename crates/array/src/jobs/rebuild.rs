//! Rebuild: strips that a stripe lacks are made again, and strips in spare places are brought back.
//!
//! A strip is made from verified strips, written under a new version, flushed, read back and verified, and
//! only then recorded as valid. The table holds the progress, so a restart goes on where it was. A strip goes
//! back to where it was if that member takes I/O (resync of a member that was away, rebuild of one that was
//! replaced), else to its own place, else to a spare place of its row. All strips that a stripe lacks are
//! made in one pass over the others. Blocks of stale strips that cannot be made, because too little of the
//! others can be read, are marked as lost: one rotten block must not keep the rest of a stripe from being
//! redundant. A strip on a member that is away is not stale and may come back: it is made whole, or not made.
//!
//! The most endangered stripes come first: a round begins with those that lack most, and begins again when
//! there are some that lack more than those at hand. Strips are brought back to members that were replaced
//! when no stripe can be helped any more. Until the new place of such a strip is recorded, the old one
//! counts.
//!
//! Invariant: a strip is recorded as valid at a place only after a flush of its member in the life in which
//! it was written there, and after it was read back.

use super::rate::{Bounds, REST, Rate, RebuildRate};
use super::{JobProgress, MOST_PAUSE, RETRY};
use crate::context::Context;
use crate::durability::Durability;
use crate::error::ArrayError;
use crate::events::ArrayEvent;
use crate::format::record::Entry;
use crate::geometry::Geometry;
use crate::log::space::LogSpace;
use crate::members::{Life, Members, WhenSuspended};
use crate::moves::Moves;
use crate::place::{MemberNo, MemberSet, Position, Positions};
use crate::queue::EntryQueue;
use crate::site::Site;
use crate::stripes::Stripes;
use crate::stripes::census::StripeState;
use crate::stripes::load::{END, Unread};
use crate::stripes::promises::Target;
use crate::stripes::table::StripeTable;
use crate::strips::{Found, Part, StripWrite, Strips};
use futures_util::StreamExt;
use futures_util::future::{Either, join_all, select};
use futures_util::stream::FuturesUnordered;
use penstock_base::env::timeout;
use penstock_base::num::to_usize;
use penstock_base::rank::scoped;
use penstock_base::{BLOCK_BYTES, Stripe, Version};
use penstock_drive::Io;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Semaphore;

const IO: Io = Site::RebuildStrip.io();
const WRITE: StripWrite = StripWrite::new(Site::RebuildStrip, Site::RebuildStrip, WhenSuspended::Fail);
/// Time before lost strips without a place look for one again: others may have been freed.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// Bytes of the stripes that are read at the same time, for each member, and their bounds. As much may be
/// taken by the strips that were made of others and are not recorded yet.
const BYTES_OF_A_MEMBER: u64 = 8 << 20;
const BYTES: RangeInclusive<u64> = 64 << 20..=256 << 20;
/// Most stripes that are read at the same time.
const READ: usize = 256;
/// Most stripes that are listed as lost: a list of more helps nobody.
const MOST_LISTED: usize = 1 << 16;
/// Stripes that are found to be lost at a time.
const LISTED_AT_A_TIME: usize = 1024;
/// Stripes rebuilt between two flushes.
const BATCH: usize = 4;
/// Stripes that are worked on for one that is read: others are written, flushed, read back and recorded.
const WORKED_ON: usize = 3;
/// Most stripes that are worked on, as a part of the blocks of the log: the record of each takes one at most.
const PART_OF_LOG: u64 = 32;

/// The strips that a pass over the stripes makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Pass {
    /// Those that stripes lack which lack so many.
    Lacking(usize),
    /// Those in spare places whose own members take I/O.
    Back,
}

impl Pass {
    /// Strips of a stripe that it makes, about.
    fn strips(self) -> usize {
        match self {
            Self::Lacking(lacking) => lacking,
            Self::Back => 1,
        }
    }
}

/// A strip that was written and is not recorded yet.
struct Made {
    position: Position,
    target: Target,
    /// The member on which it was before.
    before: MemberNo,
    life: Life,
    part: Part,
}

/// The strips of one stripe that were written.
struct MadeStrips {
    version: Version,
    strips: Vec<Made>,
    /// Some strip was not written.
    is_short: bool,
    /// Why, if it was refused. The others count all the same.
    error: Option<ArrayError>,
}

impl MadeStrips {
    fn positions(&self) -> Positions {
        self.strips.iter().map(|made| made.position).collect()
    }

    /// Their moves.
    fn moves(&self) -> Moves {
        self.strips.iter().fold(Moves::NONE, |all, made| all.with(made.position, made.target.spare))
    }
}

/// Strips of one member in a round.
#[derive(Clone, Copy, Default)]
struct Tally {
    whole: bool,
    done: u64,
    failed: u64,
}

/// Nothing that is lacking can be made: strips have no place to go, or their stripes are lost. It is looked
/// at again at a time, or when something is not as it was.
struct Stuck {
    until: Duration,
    as_it_was: Shortage,
}

/// All that decides if something can be made.
#[derive(PartialEq, Eq)]
struct Shortage {
    gone: MemberSet,
    /// The stale strips of each member that takes I/O, and its strips that are in spare places. New ones of
    /// others change nothing.
    of_reachable: Vec<(MemberNo, u64, u64)>,
}

/// The progress of the rebuild.
pub(crate) struct RebuildState {
    progress: Cell<Option<JobProgress>>,
    stuck: RefCell<Option<Stuck>>,
    /// Members in the present round.
    tally: RefCell<BTreeMap<MemberNo, Tally>>,
    rate: RefCell<Rate>,
    /// Stripes that may be read at the same time.
    reading: Semaphore,
    /// Stripes of this round that could not be made because too little of them can be read.
    hopeless: Cell<u64>,
    /// Lost stripes at the last look.
    lost: Cell<u64>,
}

impl RebuildState {
    pub(crate) fn new(geo: &Geometry) -> Self {
        Self {
            progress: Cell::default(),
            stuck: RefCell::default(),
            tally: RefCell::default(),
            rate: RefCell::default(),
            reading: Semaphore::new(read_at_a_time(geo)),
            hopeless: Cell::default(),
            lost: Cell::default(),
        }
    }
}

/// Stripes that may be read at the same time.
fn read_at_a_time(geo: &Geometry) -> usize {
    let bytes = (geo.members as u64 * BYTES_OF_A_MEMBER).clamp(*BYTES.start(), *BYTES.end());
    to_usize(bytes / (geo.k as u64 * geo.strip_bytes() as u64)).clamp(BATCH, READ)
}

/// Stripes that may be worked on at the same time, each of which lacks so many strips.
fn work_at_a_time(geo: &Geometry, lacking: usize) -> usize {
    assert!(lacking > 0, "something is made");
    let read = read_at_a_time(geo);
    // Those that are not read take memory for the strips that were made.
    let all = (read * (WORKED_ON - 1)).min(read * geo.k / lacking) + read;
    let log = geo.log();
    all.min(to_usize((log.end - log.start) / BLOCK_BYTES as u64 / PART_OF_LOG)).max(BATCH)
}

/// The rebuild of one array's members.
pub(crate) struct Rebuild {
    pub(crate) context: Rc<Context>,
    pub(crate) queue: Rc<EntryQueue>,
    pub(crate) members: Rc<Members>,
    pub(crate) stripes: Rc<Stripes>,
    pub(crate) space: Rc<LogSpace>,
    pub(crate) strips: Rc<Strips>,
    pub(crate) durability: Rc<Durability>,
    pub(crate) state: RebuildState,
}

impl Rebuild {
    /// The progress of the rebuild that is running.
    pub(crate) fn progress(&self) -> Option<JobProgress> {
        self.state.progress.get()
    }

    /// Sets the rule by which it goes on.
    pub(crate) fn set_rule(&self, rule: RebuildRate) {
        self.state.rate.borrow_mut().set_rule(rule);
    }

    /// Rebuilds until the array is closed.
    pub(crate) async fn run(self: Rc<Self>) {
        let env = &self.context.env;
        // After a suspended round the next one begins behind the stripes that were tried: those that a full
        // host had no space for delay no other.
        let mut begin = Stripe(0);
        while !self.context.is_closed() {
            let woken = self.context.signals.resync.notified();
            if let Err(error) = self.stripes.counted().await {
                if !matches!(error, ArrayError::Closed) {
                    tracing::warn!(array = self.context.name, %error, "stripes cannot be counted");
                    env.sleep(RETRY).await;
                }
                continue;
            }
            if let Err(error) = self.list_newly_lost().await {
                tracing::warn!(array = self.context.name, %error, "lost stripes cannot be listed");
                env.sleep(RETRY).await;
                continue;
            }
            let stuck_until = self.stuck_until();
            if !self.has_work() {
                match stuck_until {
                    Some(until) => drop(timeout(env, until.saturating_sub(env.now()), woken).await),
                    None => woken.await,
                }
                continue;
            }
            drop(woken);
            match self.round(&mut begin).await {
                Ok(true) => {}
                Ok(false) => env.sleep(RETRY).await,
                Err(ArrayError::Closed) => break,
                Err(error) => {
                    if let ArrayError::Suspended(why) = &error {
                        self.context.report_suspended(why);
                    }
                    tracing::warn!(array = self.context.name, %error, "rebuild interrupted; it will go on");
                    env.sleep(RETRY).await;
                }
            }
        }
    }

    /// True if a strip can be made again or brought back, or if that is not known yet.
    pub(crate) fn has_work(&self) -> bool {
        if !self.stripes.is_counted() {
            return true;
        }
        if self.stuck_until().is_some() {
            return false;
        }
        let mut members = self.context.layout.all_members().iter();
        members.any(|member| self.need(member) > 0 || self.is_back(member)) || self.has_to_bring_back()
    }

    /// True if a member takes I/O and does not count yet.
    fn is_back(&self, member: MemberNo) -> bool {
        self.members.is_reachable(member) && self.members.stale().contains(member)
    }

    /// The strips of a member that may be made again.
    fn need(&self, member: MemberNo) -> u64 {
        let on = self.stripes.census().on(member);
        match self.members.is_reachable(member) {
            true => on.stale - on.lost,
            false if self.context.layout.spares() > 0 => on.strips,
            false => 0,
        }
    }

    /// The time at which it is to be looked again if anything can be made; none if that is not known now.
    fn stuck_until(&self) -> Option<Duration> {
        let stuck = self.state.stuck.borrow();
        let stuck = stuck.as_ref().filter(|stuck| self.context.env.now() < stuck.until);
        stuck.filter(|stuck| stuck.as_it_was == self.shortage()).map(|stuck| stuck.until)
    }

    fn shortage(&self) -> Shortage {
        let (census, reachable) = (self.stripes.census(), self.members.reachable());
        let of_member = |member| (member, census.on(member).stale, census.on(member).moved_away);
        Shortage { gone: self.members.gone(), of_reachable: reachable.iter().map(of_member).collect() }
    }

    fn has_to_bring_back(&self) -> bool {
        let census = self.stripes.census();
        self.members.reachable().iter().any(|member| census.on(member).moved_away > 0)
    }

    /// One pass for each number of lacking strips, from the most endangered stripes on, and one to bring
    /// strips back. Returns false if it is to be tried again later.
    async fn round(&self, begin: &mut Stripe) -> Result<bool, ArrayError> {
        let lives: Vec<Life> =
            self.context.layout.all_members().iter().map(|member| self.members.life(member)).collect();
        let (started_ns, is_from_start) = (self.context.env.wall_ns(), *begin == Stripe(0));
        let total_stripes = self.stripes.census().lacking();
        let mut progress = JobProgress { total_stripes, started_ns, ..JobProgress::default() };
        self.begin_tally();
        self.state.hopeless.set(0);
        let result = self.passes(begin, &mut progress).await;
        self.state.progress.set(None);
        self.end_tally();
        let is_done = result? && progress.failed_stripes == 0;
        let mut is_whole = is_done;
        for member in self.members.reachable().common(self.members.stale()).iter() {
            let misses = self.stripes.pending_misses_on(MemberSet::one(member));
            if self.stripes.is_counted() && self.need(member) == 0 && !misses {
                // A stripe that is being written without it lacks it from its record on.
                is_whole &= !self.stripes.in_flight_misses_on(MemberSet::one(member))
                    && self.activate(member, lives[member.index()]).await?;
            }
        }
        let failed = progress.failed_stripes;
        if is_done || progress.done_stripes > 0 || failed > self.state.hopeless.get() {
            return Ok(is_whole);
        }
        // Nothing was found that can be done, unless it was not looked at, or is new, or a member can count.
        let waits = |member| self.is_back(member) && self.need(member) == 0;
        if is_from_start && !self.context.layout.all_members().iter().any(waits) {
            let as_it_was = self.shortage();
            if failed > 0 || !self.has_something_to_make().await? {
                let until = self.context.env.now() + LOOK_AGAIN;
                self.state.stuck.replace(Some(Stuck { until, as_it_was }));
            }
        }
        // Work that nobody finds must not be looked for without a rest.
        Ok(!is_from_start || !self.has_work())
    }

    /// True if a stripe lacks a strip for which there is a place.
    async fn has_something_to_make(&self) -> Result<bool, ArrayError> {
        self.stripes.counted().await?;
        for lacking in 1..=self.worst_that_can_be_made() {
            if !self.find(Pass::Lacking(lacking), Stripe(0), 1).await?.is_empty() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Every strip of a member is valid, or nobody can make it: it counts again.
    async fn activate(&self, member: MemberNo, life: Life) -> Result<bool, ArrayError> {
        // Once a start would recognise it by its label.
        if self.members.owed_labels().contains(member)
            && let Err(error) = self.members.write_label(member).await
        {
            let name = &self.context.name;
            tracing::warn!(array = name, %member, %error, "a rebuilt member waits for its label");
            return Ok(false);
        }
        self.members.activate(member, life).await?;
        Ok(true)
    }

    /// The most strips that a stripe lacks of which strips can be made.
    fn worst_that_can_be_made(&self) -> usize {
        self.stripes.census().worst().min(self.context.geo.m)
    }

    /// Lists lost stripes if there are others than at the last look: nothing else may be left to do.
    async fn list_newly_lost(&self) -> Result<(), ArrayError> {
        let lost = self.stripes.census().lost();
        if self.state.lost.replace(lost) == lost {
            return Ok(());
        }
        self.list_lost().await.inspect_err(|_| self.state.lost.set(0))
    }

    /// Lists the stripes of which nothing can be made as unreadable.
    async fn list_lost(&self) -> Result<(), ArrayError> {
        let (most, layout, mut from) = (self.context.geo.m, &self.context.layout, Stripe(0));
        while self.stripes.census().worst() > most && self.stripes.map().unreadable().len() < MOST_LISTED {
            let gone = self.members.gone();
            let may_have = |table: &StripeTable, page| table.most_lacking_of(page, gone) > most;
            let is_lost = |stripe, state: StripeState| {
                state.lacking(layout, stripe, gone).len() > most && !self.stripes.map().is_unreadable(stripe)
            };
            let lost =
                self.stripes.find(from..END, LISTED_AT_A_TIME, Unread::Waits, may_have, is_lost).await?;
            if gone != self.members.gone() {
                from = Stripe(0);
                continue;
            }
            let Some(last) = lost.last() else { break };
            from = last.next();
            // They may have been written anew while others were looked for.
            let is_still_lost = |stripe: &Stripe| {
                let (table, at) = (self.stripes.table(), *stripe);
                let is_here = !table.lacks_page(table.page_of(at)) && table.is_written(at);
                is_here && table.state(at).lacking(layout, at, gone).len() > most
            };
            let lost: Vec<Stripe> = lost.into_iter().filter(is_still_lost).collect();
            tracing::error!(array = self.context.name, stripes = lost.len(), "too few strips are left");
            lost.into_iter().for_each(|stripe| self.stripes.list(stripe));
        }
        Ok(())
    }

    /// Returns true if all that could be done is.
    async fn passes(&self, begin: &mut Stripe, progress: &mut JobProgress) -> Result<bool, ArrayError> {
        loop {
            self.stripes.counted().await?;
            self.list_lost().await?;
            let mut level = self.worst_that_can_be_made();
            while level > 0 {
                let above = self.pass(Pass::Lacking(level), begin, progress).await?;
                // A member was lost meanwhile: its stripes come first.
                self.stripes.counted().await?;
                level = if above { self.worst_that_can_be_made() } else { level - 1 };
            }
            // Stripes whose record is on its way may lack strips of members that take I/O too: the table
            // shows them after a flush. New ones that lack members which are gone end no round.
            if !self.stripes.pending_misses_on(self.members.reachable()) {
                break;
            }
            self.durability.flush(IO.at("rebuild.flush")).await?;
        }
        if self.has_to_bring_back() {
            let mut from = Stripe(0);
            self.pass(Pass::Back, &mut from, progress).await?;
        }
        let members = self.context.layout.all_members();
        Ok(members.iter().all(|member| self.need(member) == 0) && !self.has_to_bring_back())
    }

    fn begin_tally(&self) {
        let mut tally = BTreeMap::new();
        for member in self.context.layout.all_members().iter() {
            let stripes = self.need(member);
            // A member that came back counts again after this round, also if it missed nothing.
            if stripes > 0 || self.is_back(member) {
                let whole = stripes > 0 && stripes == self.stripes.census().on(member).strips;
                tally.insert(member, Tally { whole, ..Tally::default() });
                self.context.events.push(ArrayEvent::RebuildBegun { member, stripes, whole });
            }
        }
        *self.state.tally.borrow_mut() = tally;
    }

    fn end_tally(&self) {
        for (member, Tally { whole, done, failed }) in self.state.tally.take() {
            // Stripes written meanwhile may have missed it again.
            let complete = self.need(member) == 0 && failed == 0;
            let ended = ArrayEvent::RebuildEnded { member, stripes: done, failed, whole, complete };
            self.context.events.push(ended);
        }
    }

    /// Goes over all stripes from `begin` on. Returns true if it was ended because others lack more strips.
    /// If writes are suspended, `begin` is behind the stripes that were tried; else it is the first stripe.
    async fn pass(
        &self,
        pass: Pass,
        begin: &mut Stripe,
        progress: &mut JobProgress,
    ) -> Result<bool, ArrayError> {
        let env = &self.context.env;
        let mut from = std::mem::take(begin);
        let bounds = self.bounds(pass);
        // Each batch runs to its end, whatever becomes of the others: batches hold locks of stripes.
        let mut running = FuturesUnordered::new();
        let (mut result, mut is_over, mut working, mut ended) = (Ok(()), false, 0, Vec::new());
        let endangered = self.more_endangered(pass);
        let mut above = false;
        loop {
            if self.context.is_closed() {
                result = result.and(Err(ArrayError::Closed));
            }
            // While stripes are counted anew nobody knows.
            above |= !self.stripes.is_counted() || self.more_endangered(pass) > endangered;
            let step = {
                let mut rate = self.state.rate.borrow_mut();
                rate.look(env.now(), &self.context.latency, working, bounds)
            };
            let stripes = step.stripes.clamp(1, BATCH);
            let may_begin = result.is_ok() && !is_over && !above;
            if may_begin && step.stripes == 0 && working == 0 {
                env.sleep(REST).await;
                continue;
            }
            while may_begin && working + stripes <= step.stripes && !self.context.is_closed() {
                let wait = self.state.rate.borrow().wait(env.now());
                if !wait.is_zero() {
                    if working == 0 {
                        env.sleep(wait.min(MOST_PAUSE)).await;
                    }
                    break;
                }
                let found = match beside(self.find(pass, from, stripes), &mut running, &mut ended).await {
                    Ok(found) => found,
                    Err(error) => {
                        result = Err(error);
                        break;
                    }
                };
                let Some(last) = found.last() else {
                    is_over = true;
                    break;
                };
                from = last.next();
                working += found.len();
                let made = (found.len() * pass.strips()) as u64 * self.context.geo.strip_bytes() as u64;
                self.state.rate.borrow_mut().begun(env.now(), made);
                running.push(scoped(async move {
                    let began = env.now();
                    let done = self.batch(pass, &found).await;
                    (done, found.len(), env.now().saturating_sub(began))
                }));
            }
            let batch = match ended.pop() {
                Some(batch) => Some(batch),
                None => running.next().await,
            };
            let Some((done, of, took)) = batch else {
                if result.is_ok() && !is_over && !above {
                    continue;
                }
                if matches!(result, Err(ArrayError::Suspended(_))) {
                    *begin = from;
                }
                return result.map(|()| above);
            };
            working -= of;
            match done {
                Ok(done) => {
                    let of = of as u64;
                    assert!(done <= of, "{done} of {of} stripes");
                    progress.done_stripes += done;
                    progress.failed_stripes += of - done;
                    self.state.progress.set(Some(*progress));
                }
                Err(error) => result = result.and(Err(error)),
            }
            if step.rest > 0.0 && working == 0 && result.is_ok() {
                // It works for a share of the time.
                env.sleep(took.mul_f64(step.rest).min(MOST_PAUSE)).await;
            }
        }
    }

    fn bounds(&self, pass: Pass) -> Bounds {
        let geo = &self.context.geo;
        let danger = match pass {
            Pass::Lacking(lacking) => (lacking as f64 / geo.m as f64).min(1.0),
            Pass::Back => 0.0,
        };
        Bounds { most: work_at_a_time(geo, pass.strips()), danger }
    }

    /// The number of stripes that lack more strips than those of a pass.
    fn more_endangered(&self, pass: Pass) -> u64 {
        let census = self.stripes.census();
        let level = match pass {
            Pass::Lacking(level) => level,
            Pass::Back => 0,
        };
        (level + 1..=census.worst()).map(|lacking| census.lacking_exactly(lacking)).sum()
    }

    /// The first stripes from `from` on, at most `most`, of which a pass makes strips.
    async fn find(&self, pass: Pass, from: Stripe, most: usize) -> Result<Vec<Stripe>, ArrayError> {
        assert!(most > 0, "a batch has a stripe");
        let layout = &self.context.layout;
        let may_have = |table: &StripeTable, page| match pass {
            Pass::Lacking(lacking) => table.most_lacking_of(page, self.members.gone()) >= lacking,
            Pass::Back => table.may_have_moved(page),
        };
        let is_wanted = |stripe, state: StripeState| match pass {
            Pass::Lacking(lacking) => {
                if state.stale.is_empty() && self.members.gone().is_empty() {
                    return false;
                }
                let lost = self.lacking(stripe);
                lost.len() == lacking && lost.iter().any(|at| self.can_be_made(stripe, at, state.moves))
            }
            Pass::Back => {
                let lacking = self.lacking(stripe);
                state.moves.moved().iter().any(|position| {
                    let own = layout.own_place(stripe, position).member;
                    self.members.is_reachable(own) && !lacking.contains(position)
                })
            }
        };
        self.stripes.find(from..END, most, Unread::Waits, may_have, is_wanted).await
    }

    /// Strips of a stripe that are stale, or on members that are gone.
    fn lacking(&self, stripe: Stripe) -> Positions {
        self.context.geo.all_strips().without(self.stripes.readable(stripe))
    }

    fn can_be_made(&self, stripe: Stripe, position: Position, moves: Moves) -> bool {
        self.stripes.target(stripe, position, moves).is_some()
    }

    /// Makes strips of stripes, and keeps no stripe locked while writes are suspended. Returns the number of
    /// stripes of which all are valid now.
    async fn batch(&self, pass: Pass, stripes: &[Stripe]) -> Result<u64, ArrayError> {
        self.space.wait_for_rebuild().await?;
        let mut locks = Vec::new();
        for stripe in stripes {
            locks.push(self.stripes.exclusive(*stripe).await?);
        }
        assert!(stripes.is_sorted(), "stripes are locked in their order");
        let made = join_all(stripes.iter().map(|stripe| scoped(self.make(pass, *stripe)))).await;
        let written = || made.iter().flatten().flatten();
        let targets = written().flat_map(|made| &made.strips).map(|made| made.target.place.member).collect();
        self.members.flush_members(targets, IO.at("rebuild.flush")).await?;
        let mut records = Vec::new();
        let (mut done, mut failed, mut moving) = (0, None, Vec::new());
        for (stripe, made) in stripes.iter().copied().zip(&made) {
            match made {
                Ok(Some(made)) => {
                    moving.push(self.stripes.begin_moving(stripe, made.positions(), made.moves()));
                    let valid = self.verified(stripe, made).await;
                    let is_whole = valid.len() == made.strips.len() && !made.is_short;
                    done += u64::from(is_whole);
                    if let Some(entry) = valid_entry(stripe, made.version, &valid) {
                        records.push(self.queue.push_control(entry, Vec::new()));
                    }
                    self.count(made, &valid);
                    self.note_lost_blocks(stripe, made);
                    failed = failed.or(made.error.clone());
                }
                Ok(None) => done += 1,
                Err(error @ (ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. })) => {
                    self.stripes.list(stripe);
                    self.state.hopeless.set(self.state.hopeless.get() + 1);
                    tracing::error!(array = self.context.name, %stripe, %error, "a stripe cannot be rebuilt");
                    let on = |at| self.stripes.member(stripe, at);
                    let members: MemberSet = self.lacking(stripe).iter().map(on).collect();
                    let mut tally = self.state.tally.borrow_mut();
                    tally
                        .iter_mut()
                        .filter(|(at, _)| members.contains(**at))
                        .for_each(|(_, at)| at.failed += 1);
                }
                Err(error) => failed = failed.or(Some(error.clone())),
            }
        }
        // Until its record counts nobody may write a strip again: the record names the version that is there.
        self.queue.wait_for(records).await?;
        drop(moving);
        failed.map_or(Ok(done), Err)
    }

    /// Lists a stripe some of whose blocks were lost. One that was listed before may be whole now: a scrub
    /// tells.
    fn note_lost_blocks(&self, stripe: Stripe, made: &MadeStrips) {
        let lost = made.strips.iter().map(|made| made.part.lost_columns().len()).max().unwrap_or(0);
        if lost > 0 {
            self.stripes.list(stripe);
            tracing::error!(array = self.context.name, %stripe, lost, "blocks cannot be rebuilt and are marked as lost");
            // They may be readable in a moment.
            self.stripes.want_another_try(stripe);
        } else if self.stripes.map().is_unreadable(stripe) {
            self.stripes.want_repair(stripe);
        }
    }

    fn count(&self, made: &MadeStrips, valid: &[&Made]) {
        let mut tally = self.state.tally.borrow_mut();
        for strip in &made.strips {
            if let Some(tally) = tally.get_mut(&strip.before) {
                let is_valid = valid.iter().any(|valid| valid.position == strip.position);
                *(if is_valid { &mut tally.done } else { &mut tally.failed }) += 1;
            }
        }
    }

    /// The strips that read back, on members that live as they did when these were written.
    async fn verified<'a>(&self, stripe: Stripe, made: &'a MadeStrips) -> Vec<&'a Made> {
        let io = IO.at("rebuild.verify");
        let verify = made.strips.iter().map(|strip| async move {
            let (place, at) = (strip.target.place, (stripe, strip.position));
            let reads_back = self.strips.reads_back(at, place, made.version, &strip.part, io).await;
            if !reads_back {
                let (name, position, member) = (&self.context.name, strip.position, place.member);
                tracing::warn!(array = name, %stripe, %position, %member, "a rebuilt strip does not read back");
            }
            reads_back.then_some(strip)
        });
        // All lives are compared after the last read: the record follows in the same step.
        let lives_on = |strip: &&Made| self.members.life(strip.target.place.member) == strip.life;
        join_all(verify).await.into_iter().flatten().filter(lives_on).collect()
    }

    /// Makes strips of a stripe and writes them. None if none of them is to be made any more.
    async fn make(&self, pass: Pass, stripe: Stripe) -> Result<Option<MadeStrips>, ArrayError> {
        if !self.stripes.table().is_written(stripe) {
            return Ok(None);
        }
        let moves = self.stripes.moves(stripe);
        let mut targets = match pass {
            Pass::Lacking(_) => self.lost(stripe, moves),
            Pass::Back => self.strays(stripe, moves),
        };
        if targets.is_empty() {
            return Ok(None);
        }
        let positions_of = |targets: &[(Position, Target)]| -> Vec<Position> {
            targets.iter().map(|(position, _)| *position).collect()
        };
        let positions = positions_of(&targets);
        let io = IO.at("rebuild.read");
        let distinct: Positions = positions.iter().copied().collect();
        assert_eq!(distinct.len(), targets.len(), "a strip is made once");
        let reading = self.state.reading.acquire().await.expect("it is never closed");
        let parts = match pass {
            Pass::Lacking(_) => {
                let (stale, all) = (self.stripes.stale(stripe), 0..self.context.geo.strip_blocks);
                match self.strips.recover(stripe, &positions, &all, Found::default(), io).await {
                    // Those on drives that are away are as they were, should these come back.
                    Err(ArrayError::Unreadable { .. }) if !distinct.common(stale).is_empty() => {
                        targets.retain(|(position, _)| stale.contains(*position));
                        self.strips.remake(stripe, &positions_of(&targets), io).await?
                    }
                    made => made?,
                }
            }
            Pass::Back => {
                let read = |at: &Position| self.strips.read_as_it_is(stripe, *at, io);
                join_all(positions.iter().map(read)).await.into_iter().collect::<Result<_, _>>()?
            }
        };
        drop(reading);
        assert_eq!(parts.len(), targets.len(), "every strip was made");
        let version = self.stripes.versions.next().await?;
        let mut lives = Vec::new();
        for ((position, target), part) in targets.iter().zip(&parts) {
            lives.push(scoped(self.strips.write_moved(
                (stripe, *position),
                target.place,
                part,
                version,
                WRITE,
            )));
        }
        let lives = join_all(lives).await;
        let is_short = lives.iter().any(|life| !matches!(life, Ok(Some(_))));
        let error = lives.iter().find_map(|life| life.as_ref().err().cloned());
        let made =
            targets.into_iter().zip(parts).zip(lives).filter_map(|(((position, target), part), life)| {
                let before = self.stripes.member(stripe, position);
                Some(Made { position, target, before, life: life.ok()??, part })
            });
        Ok(Some(MadeStrips { version, strips: made.collect(), is_short, error }))
    }

    /// The strips that a stripe lacks, as far as there are places for them.
    fn lost(&self, stripe: Stripe, moves: Moves) -> Vec<(Position, Target)> {
        let (mut moves, mut targets) = (moves, Vec::new());
        for position in self.lacking(stripe).iter() {
            if let Some(target) = self.stripes.target(stripe, position, moves) {
                moves = moves.with(position, target.spare);
                targets.push((position, target));
            }
        }
        targets
    }

    /// The valid strips in spare places whose own members take I/O.
    fn strays(&self, stripe: Stripe, moves: Moves) -> Vec<(Position, Target)> {
        let lacking = self.lacking(stripe);
        let valid = moves.moved().iter().filter(|position| !lacking.contains(*position));
        valid
            .filter_map(|position| {
                let target = self.stripes.target(stripe, position, moves.with(position, None))?;
                target.spare.is_none().then_some((position, target))
            })
            .collect()
    }
}

/// Does something while batches go on, since they hold what others wait for. Adds those that end to `ended`.
async fn beside<T, Batch: Future>(
    work: impl Future<Output = T>,
    running: &mut FuturesUnordered<Batch>,
    ended: &mut Vec<Batch::Output>,
) -> T {
    let mut work = pin!(work);
    while !running.is_empty() {
        match select(work.as_mut(), running.next()).await {
            Either::Left((done, _)) => return done,
            Either::Right((batch, _)) => ended.extend(batch),
        }
    }
    work.await
}

/// The record that these strips are valid; none if there are none.
fn valid_entry(stripe: Stripe, version: Version, valid: &[&Made]) -> Option<Entry> {
    let clear: Positions = valid.iter().map(|made| made.position).collect();
    assert!(version.0 != 0, "version 0 is never given");
    let moves = valid.iter().fold(Moves::NONE, |all, made| all.with(made.position, made.target.spare));
    (!clear.is_empty()).then_some(Entry::Strips { stripe, set: Positions::NONE, clear, version, moves })
}
