//! Destage: writes data from the log into the strips.
//!
//! Into an unwritten stripe all strips are written with one version, flushed, and then recorded, like a fresh
//! write. Into a written stripe everything that will be written (data, parity and trailers, by groups of
//! columns) goes to the log first and is durable before the first strip is touched. Replay writes it again,
//! and never computes parity from strips that it finds after a crash.
//!
//! Oldest entries first, so that the log's tail moves. Bounds: a batch has at most [`BATCH`] stripes, and a
//! group of columns fits in a record.
//!
//! One bad block delays no other. A column that lacks too many strips cannot be destaged. The columns beside
//! it are destaged; then the stripe is parked, listed as unreadable, and passed over. When the log's tail
//! reaches the blocks of parked stripes they are logged again at the head.
//!
//! While a host is full an unwritten stripe is postponed: parked, and tried again behind all others. Its
//! blocks are logged again whether or not it is parked at that time. Only callers that want log space wait
//! for its strips. A written stripe stays locked until all its strips are written: some are new already, and
//! no others agree with them.

mod columns;

use crate::context::Context;
use crate::durability::Durability;
use crate::error::ArrayError;
use crate::format::record::Entry;
use crate::log::chain::Chain;
use crate::log::checkpoint::Checkpoints;
use crate::log::space::LogSpace;
use crate::members::{Members, WhenSuspended};
use crate::place::{Position, SegmentNo};
use crate::queue::EntryQueue;
use crate::ranks;
use crate::site::Site;
use crate::stripes::Stripes;
use crate::stripes::map::PendingFresh;
use crate::stripes::overlay::DirtyBlock;
use crate::strips::{Part, StripWrite, Strips};
use columns::{Group, column_groups, column_ranges, parts_of, within};
use futures_util::future::{join_all, select};
use penstock_base::num::to_usize;
use penstock_base::rank::{RankedMutex, scoped};
use penstock_base::{BLOCK_BYTES, BufMut, Stripe, Version, ZERO_BLOCK_CRC};
use penstock_drive::Io;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

const IO: Io = Site::DestageStrip.io();
/// No strip counts before its record, so the stripe need not stay locked while the host is full.
const FRESH: StripWrite = StripWrite::new(Site::DestageStrip, Site::DestageTrailer, WhenSuspended::Fail);
/// Stripes destaged between two flushes.
const BATCH: usize = 64;
/// Time that entries may lie in an idle log.
const IDLE: Duration = Duration::from_secs(2);
/// Time before parked stripes are tried again: the strips that they lacked may be back.
const PARKED: Duration = Duration::from_secs(60);
/// The same while a stripe is postponed because writes are suspended.
const POSTPONED: Duration = Duration::from_secs(5);
/// Pause after each round while a stripe is postponed.
const REST: Duration = Duration::from_millis(500);

/// Dirty blocks of a written stripe.
type DirtyColumns = BTreeMap<(Position, u32), DirtyBlock>;

/// A stripe whose strips are written, and the rest of its destage.
struct Written {
    stripe: Stripe,
    /// Blocks that the strips contain now.
    blocks: Vec<(u32, DirtyBlock)>,
    /// Segments of its records.
    segments: Vec<SegmentNo>,
    /// The version of a stripe that was unwritten and needs its record.
    fresh: Option<Version>,
    /// Other columns of the stripe could not be destaged.
    parked: bool,
}

/// The result of the destage of one stripe.
#[derive(Default)]
struct Outcome {
    written: Option<Written>,
    /// Why the array cannot go on.
    error: Option<ArrayError>,
}

/// The next step for a stripe.
enum Plan {
    /// Nothing of it is appended.
    Nothing,
    /// It was unwritten, and all its strips are written now.
    Written(Written),
    /// These blocks go into strips that are written.
    InPlace(DirtyColumns),
}

/// The destage of one array.
pub(crate) struct Destage {
    pub(crate) context: Rc<Context>,
    pub(crate) queue: Rc<EntryQueue>,
    pub(crate) members: Rc<Members>,
    pub(crate) stripes: Rc<Stripes>,
    pub(crate) chain: Rc<Chain>,
    pub(crate) checkpoints: Rc<Checkpoints>,
    pub(crate) space: Rc<LogSpace>,
    pub(crate) strips: Rc<Strips>,
    pub(crate) durability: Rc<Durability>,
    pub(crate) one_at_a_time: RankedMutex<()>,
}

/// The lock of [`Destage`].
pub(crate) const fn one_at_a_time() -> RankedMutex<()> {
    RankedMutex::new(ranks::DESTAGE, ())
}

impl Destage {
    /// Destages until the array is closed.
    pub(crate) async fn run(self: Rc<Self>) {
        let env = &self.context.env;
        let mut unparked_at = env.now();
        while !self.context.is_closed() {
            let before = self.stripes.overlay().order();
            select(pin!(self.context.signals.destage.notified()), env.sleep(IDLE)).await;
            if self.context.is_closed() {
                break;
            }
            let idle = self.stripes.overlay().order() == before;
            let pause = if self.space.has_postponed() { POSTPONED } else { PARKED };
            if env.now().saturating_sub(unparked_at) >= pause {
                unparked_at = env.now();
                self.stripes.overlay_mut().unpark_all();
            }
            if let Err(error) = self.destage_some(idle).await {
                tracing::error!(array = self.context.name, %error, "destage failed; it will be tried again");
                env.sleep(IDLE).await;
            }
            // Postponed stripes may have been discarded, and written in full past the log.
            self.space.retain_postponed(|stripe| {
                self.stripes.overlay().has_stripe(stripe) && !self.stripes.is_known_written(stripe)
            });
            if self.space.has_postponed() {
                // Each checkpoint wakes the callers that wait for space, and they wake this task.
                env.sleep(REST).await;
            }
        }
    }

    /// Destages until the log is half empty; all of it when nothing else is going on.
    async fn destage_some(&self, idle: bool) -> Result<(), ArrayError> {
        let one_at_a_time = self.one_at_a_time.lock().await;
        loop {
            let pressed = self.chain.used_percent() >= 50 || self.space.is_short();
            let aged = idle && self.stripes.overlay().to_destage().blocks > 0;
            if self.context.is_closed() || !(pressed || aged) {
                break;
            }
            let first = || self.chain.segments().first().number;
            let (tail, destaged) = (first(), self.destage_batch().await?);
            let moved = pressed && self.log_waiting_again() || destaged;
            if !destaged {
                // Segments that are pinned until newer writes are durable become free then.
                self.queue.flush().await?;
            }
            if pressed || !moved {
                self.checkpoints.write().await?;
            }
            // Logging parked blocks again helps only if the tail moves.
            if !moved || !destaged && first() == tail {
                break;
            }
        }
        drop(one_at_a_time);
        if idle { self.checkpoints.write().await } else { Ok(()) }
    }

    /// Destages everything and writes a checkpoint.
    pub(crate) async fn destage_all(&self) -> Result<(), ArrayError> {
        let one_at_a_time = self.one_at_a_time.lock().await;
        loop {
            // A batch that is parked entirely moved nothing, and others may be left.
            let left = self.stripes.overlay().to_destage().blocks;
            if !self.destage_batch().await? && self.stripes.overlay().to_destage().blocks == left {
                break;
            }
        }
        // Parked blocks must not keep the tail where it is: each stop and start begins another segment.
        if self.log_waiting_again() {
            self.queue.flush().await?;
        }
        drop(one_at_a_time);
        self.checkpoints.write().await
    }

    /// Destages the oldest stripes. Returns false if there were none.
    async fn destage_batch(&self) -> Result<bool, ArrayError> {
        let stripes = self.next_batch();
        assert!(stripes.len() <= BATCH, "a batch is bounded");
        self.space.set_destaging(&stripes);
        let result = self.destage_stripes(&stripes).await;
        self.space.set_destaging(&[]);
        result
    }

    async fn destage_stripes(&self, stripes: &[Stripe]) -> Result<bool, ArrayError> {
        let mut locks = Vec::new();
        // Locks are taken in the order of stripes, as a discard of several does.
        let mut lost = BTreeSet::new();
        for stripe in stripes.iter().copied().collect::<BTreeSet<_>>() {
            match self.stripes.exclusive(stripe).await {
                Ok(lock) => locks.push(lock),
                // Its page of the stripe table cannot be loaded. Others need not wait for it.
                Err(error) => {
                    tracing::error!(array = self.context.name, %stripe, %error, "a stripe cannot be destaged");
                    self.stripes.overlay_mut().park(stripe);
                    lost.insert(stripe);
                }
            }
        }
        let stripes = stripes.iter().filter(|stripe| !lost.contains(stripe));
        let results = join_all(stripes.map(|stripe| scoped(self.destage_stripe(*stripe)))).await;
        let (mut written, mut failed) = (Vec::new(), None);
        for Outcome { written: done, error } in results {
            written.extend(done);
            failed = failed.or(error);
        }
        if written.is_empty() {
            return failed.map_or(Ok(false), Err);
        }
        self.members.flush_all(IO.at("destage.flush")).await?;
        let fresh: Vec<_> = written.iter().filter_map(|done| Some((done.stripe, done.fresh?))).collect();
        self.durability.record(&fresh).await?;
        // Strips that a failing member missed are recorded as stale before the records that could redo them
        // go.
        self.queue.flush_control().await?;
        written.into_iter().for_each(|done| self.finish(done));
        drop(locks);
        failed.map_or(Ok(true), Err)
    }

    /// The oldest stripes whose records fit in half of the free log; at least one.
    fn next_batch(&self) -> Vec<Stripe> {
        let (geo, overlay) = (&self.context.geo, self.stripes.overlay());
        let free = geo.segments.saturating_sub(self.chain.segments().used() + 1);
        let mut left = to_usize(free) * geo.segment_bytes as usize / BLOCK_BYTES / 2;
        let mut batch = Vec::new();
        for stripe in overlay.oldest_stripes(BATCH) {
            let blocks = overlay.appended_of(stripe);
            let columns: BTreeSet<u32> = blocks.iter().map(|(block, _)| geo.locate(*block).1).collect();
            // Data and parity again, and for each range of columns a head with its trailers.
            let need = blocks.len() + columns.len() * geo.m + 4 * column_ranges(geo, &columns).len();
            if !batch.is_empty() && need > left {
                break;
            }
            left = left.saturating_sub(need);
            batch.push(stripe);
        }
        assert!(batch.len() == batch.iter().collect::<BTreeSet<_>>().len(), "a stripe is in a batch once");
        batch
    }

    /// The strips are flushed and all records are durable: the blocks leave the log.
    fn finish(&self, done: Written) {
        if done.fresh.is_some() {
            self.space.retain_postponed(|stripe| stripe != done.stripe);
        }
        let (mut overlay, mut segments) = (self.stripes.overlay_mut(), self.chain.segments_mut());
        for (block, dirty) in &done.blocks {
            // A newer write of the block keeps the segment of the older one until it is durable itself.
            if let Some(removed) = overlay.remove(done.stripe, *block, dirty.order) {
                segments.unpin(removed.segment.expect("only appended blocks are destaged"));
            }
        }
        if done.parked {
            overlay.park(done.stripe);
        } else if self.stripes.map().is_unreadable(done.stripe) {
            // It could be destaged. Only a scrub of the stripe tells whether all of it can be read again.
            self.stripes.want_repair(done.stripe);
        }
        done.segments.into_iter().for_each(|segment| segments.unpin_at_checkpoint(segment));
        self.context.count(|counts| counts.destaged_stripes += 1);
    }

    async fn destage_stripe(&self, stripe: Stripe) -> Outcome {
        match self.plan(stripe).await {
            Err(ArrayError::Suspended(why)) if !self.context.is_closed() => {
                self.space.postpone(stripe, why);
                Outcome::default()
            }
            Err(error) => Outcome { error: Some(error), ..Outcome::default() },
            Ok(Plan::Nothing) => Outcome::default(),
            Ok(Plan::Written(done)) => Outcome { written: Some(done), ..Outcome::default() },
            Ok(Plan::InPlace(dirty)) => self.destage_in_place(stripe, dirty).await,
        }
    }

    async fn plan(&self, stripe: Stripe) -> Result<Plan, ArrayError> {
        if self.stripes.map().is_pending(stripe) {
            // Its record is on its way; it is written in place after that.
            self.durability.flush_fresh(IO.at("destage.flush")).await?;
        }
        let blocks = self.stripes.overlay().appended_of(stripe);
        if blocks.is_empty() {
            return Ok(Plan::Nothing);
        }
        if self.stripes.is_unwritten(stripe) {
            return self.destage_fresh(stripe, blocks).await.map(Plan::Written);
        }
        let located = |(block, dirty)| (self.context.geo.locate(block), dirty);
        Ok(Plan::InPlace(blocks.into_iter().map(located).collect()))
    }

    /// Destages the columns that can be; a stripe with others is parked.
    async fn destage_in_place(&self, stripe: Stripe, dirty: DirtyColumns) -> Outcome {
        let mut groups: VecDeque<Group> = column_groups(&self.context.geo, &dirty).into();
        let mut done =
            Written { stripe, blocks: Vec::new(), segments: Vec::new(), fresh: None, parked: false };
        let mut error = None;
        while let Some(group) = groups.pop_front() {
            let part = within(&dirty, &group);
            match self.destage_columns(stripe, &group, &part).await {
                Ok(segment) => {
                    done.segments.push(segment);
                    let block = |position, column| self.context.geo.block_of(position, column);
                    done.blocks
                        .extend(part.into_iter().map(|((at, column), dirty)| (block(at, column), dirty)));
                }
                Err(why @ (ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. })) => {
                    // One of its columns lacks strips; the others need not.
                    if let Some(parts) = parts_of(&group, &part) {
                        parts.into_iter().rev().for_each(|part| groups.push_front(part));
                        continue;
                    }
                    if !done.parked {
                        self.stripes.list(stripe);
                        tracing::error!(array = self.context.name, %stripe, %why, "a stripe cannot be destaged");
                    }
                    done.parked = true;
                }
                Err(other) => {
                    error = Some(other);
                    break;
                }
            }
        }
        assert!(done.blocks.len() <= dirty.len(), "a block is destaged once");
        assert_eq!(done.segments.is_empty(), done.blocks.is_empty(), "a record holds what is destaged");
        if done.segments.is_empty() {
            if done.parked {
                self.stripes.overlay_mut().park(stripe);
            }
            return Outcome { written: None, error };
        }
        Outcome { written: Some(done), error }
    }

    /// Logs the oldest blocks again of parked and postponed stripes, if that lets the log's tail move.
    /// Returns false if there were none.
    fn log_waiting_again(&self) -> bool {
        let postponed = self.space.postponed();
        let old = {
            let overlay = self.stripes.overlay();
            let waiting: BTreeSet<Stripe> =
                overlay.parked_stripes().iter().copied().chain(postponed).collect();
            let blocks = waiting.iter().map(|stripe| overlay.counts_of(*stripe).blocks).sum();
            let segment_blocks = self.context.geo.segment_blocks();
            let Some(behind) = self.chain.segments().behind_oldest(segment_blocks, blocks) else {
                return false;
            };
            overlay.logged_before(&waiting, behind)
        };
        for (stripe, block, dirty) in &old {
            let mut overlay = self.stripes.overlay_mut();
            let order = overlay.next_order();
            let replaced = overlay.log_again(*stripe, *block, order);
            let entry = Entry::Data { stripe: *stripe, order, block: *block, crcs: vec![dirty.crc] };
            self.queue.push_data(vec![entry], vec![dirty.data.clone()], replaced.into_iter().collect());
        }
        !old.is_empty()
    }

    /// Writes all strips of an unwritten stripe from the log.
    async fn destage_fresh(
        &self,
        stripe: Stripe,
        blocks: Vec<(u32, DirtyBlock)>,
    ) -> Result<Written, ArrayError> {
        let geo = &self.context.geo;
        let blank = |_| (BufMut::zeroed(geo.strip_bytes()), vec![ZERO_BLOCK_CRC; geo.strip_blocks as usize]);
        let mut strips: Vec<(BufMut, Vec<u32>)> = (0..geo.k).map(blank).collect();
        for (block, dirty) in &blocks {
            let (position, column) = geo.locate(*block);
            let at = column as usize * BLOCK_BYTES;
            let (data, crcs) = &mut strips[position.index()];
            data.as_mut()[at..at + BLOCK_BYTES].copy_from_slice(&dirty.data);
            crcs[column as usize] = dirty.crc;
        }
        // A block whose newest write is not appended yet is not contained: its older entry stays valid.
        let contained = blocks.iter().map(|(block, dirty)| (*block, dirty.order)).collect();
        let mut parts: Vec<Part> =
            strips.into_iter().map(|(data, crcs)| Part { data: data.freeze(), crcs }).collect();
        let parity = self.strips.encode(&parts);
        parts.extend(parity);
        assert_eq!(parts.len(), geo.k + geo.m, "a stripe has k + m strips");
        let version = self.stripes.versions.next().await?;
        let fresh = self.stripes.begin_fresh(stripe)?;
        let moves = fresh.moves();
        let landed = self.strips.write_stripe(stripe, &parts, moves, version, FRESH).await?;
        let pending = PendingFresh { version, landed, moves, upto: 0, contained };
        self.stripes.add_pending(stripe, pending)?;
        drop(fresh);
        self.context.count(|counts| counts.full_writes += 1);
        Ok(Written { stripe, blocks, segments: Vec::new(), fresh: Some(version), parked: false })
    }
}
