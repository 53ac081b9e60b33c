//! Log space: a producer of entries waits here first, so that a log full of data can always be destaged.
//!
//! Invariant: the used segments, the queued data, and the most that it would take to destage every dirty
//! block in place fit in the log together, with a reserve for entries of the array itself. So destage always
//! ends: for each block it appends at most the space that is counted here, and when the last block is
//! destaged, the next checkpoint frees the whole log.
//!
//! To destage a column of a stripe in place takes its dirty blocks, its parity, and the trailers of all these
//! strips; a record may need a head of its own. At the end of a segment less than the longest entry is
//! wasted.
//!
//! Parked blocks cannot be destaged now. They are counted like others, because the strips that they lack may
//! come back at any time. They are logged again at the head, a quarter of the used segments at a time, for
//! which the reserve is enough. The cost of destaging them may be a quarter of the log. Beyond that writes
//! are refused, because waiting might never end; while a host is full they wait.
//!
//! Discards may use half of the reserve, because they give up damaged stripes. Discards and records of
//! rebuilt strips do not wait for the destage of postponed stripes, which need little more than a record when
//! they can be written. They may fill the log up to where the reserve begins, so that parked blocks can be
//! logged again in it.

use super::chain::Chain;
use crate::context::Context;
use crate::error::ArrayError;
use crate::geometry::Geometry;
use crate::queue::EntryQueue;
use crate::ranks;
use crate::stripes::Stripes;
use crate::stripes::overlay::Dirty;
use penstock_base::{BLOCK_BYTES, Stripe, rank};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Bytes of a patch, a column or a contained block besides the trailer's checksums.
const PATCH_BYTES: u64 = 40;
/// Data leaves one part in so many of the log free.
const DATA_RESERVE: u64 = 4;

/// The use of log space.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Data,
    /// An entry that frees space.
    Discard,
    /// A few bytes that free none.
    Rebuild,
}

/// The present and coming contents of the log.
#[derive(Clone, Copy, Debug, Default)]
struct Demand {
    used_segments: u64,
    /// Blocks and items of data that wait to be appended.
    queued: (u64, u64),
    /// Dirty blocks and columns that are to be destaged in place.
    dirty: Dirty,
    /// Log blocks that the running destage may take.
    destaging_blocks: u64,
    /// Stripes whose record is not durable yet, or that need no more than one.
    fresh_stripes: u64,
    /// Segments to leave free.
    reserve_segments: u64,
}

/// Log blocks that destaging so many dirty blocks and columns takes at most.
fn destage_cost(geo: &Geometry, dirty: Dirty) -> u64 {
    let patched = dirty.blocks + dirty.columns * geo.m as u64;
    let trailer_bytes = 4 * u64::from(geo.strip_blocks) + PATCH_BYTES;
    patched + (patched * trailer_bytes).div_ceil(BLOCK_BYTES as u64) + dirty.columns
}

/// Segments that so many blocks of the longest entries take.
fn segments_of(geo: &Geometry, blocks: u64) -> u64 {
    blocks.div_ceil(payload_blocks(geo) - geo.longest_entry_blocks() as u64)
}

/// Blocks of a segment behind its header.
fn payload_blocks(geo: &Geometry) -> u64 {
    u64::from(geo.segment_blocks()) - 1
}

/// True if more data may be queued beside this demand.
fn fits(geo: &Geometry, demand: Demand) -> bool {
    let (blocks, items) = demand.queued;
    if blocks > (geo.max_payload_blocks() * 8) as u64 {
        return false;
    }
    // A record of a fresh stripe is a few dozen bytes.
    let fresh = demand.fresh_stripes.div_ceil(32);
    let owed = destage_cost(geo, demand.dirty) + demand.destaging_blocks + fresh;
    // Two data records fit in a segment.
    let wanted = segments_of(geo, owed) + (2 * (blocks + items)).div_ceil(payload_blocks(geo));
    demand.used_segments + wanted + demand.reserve_segments <= geo.segments
}

/// The log space of one array.
pub(crate) struct LogSpace {
    context: Rc<Context>,
    queue: Rc<EntryQueue>,
    stripes: Rc<Stripes>,
    chain: Rc<Chain>,
    /// Log blocks that the stripes being destaged may take.
    destaging_blocks: Cell<u64>,
    /// Unwritten stripes that a full host had no space for, with the reason. Parked in the overlay as well.
    postponed: RefCell<BTreeMap<Stripe, String>>,
    /// Somebody waits for space.
    short: Cell<bool>,
}

impl LogSpace {
    pub(crate) fn new(
        context: &Rc<Context>,
        queue: &Rc<EntryQueue>,
        stripes: &Rc<Stripes>,
        chain: &Rc<Chain>,
    ) -> Rc<Self> {
        Rc::new(Self {
            context: context.clone(),
            queue: queue.clone(),
            stripes: stripes.clone(),
            chain: chain.clone(),
            destaging_blocks: Cell::new(0),
            postponed: RefCell::default(),
            short: Cell::new(false),
        })
    }

    /// Waits until the log has space for more data.
    pub(crate) async fn wait_for_data(&self) -> Result<(), ArrayError> {
        self.wait(Purpose::Data).await
    }

    /// Waits until the log has space for an entry that frees space.
    pub(crate) async fn wait_for_discard(&self) -> Result<(), ArrayError> {
        self.wait(Purpose::Discard).await
    }

    /// Waits until the log has space for the records of rebuilt strips.
    pub(crate) async fn wait_for_rebuild(&self) -> Result<(), ArrayError> {
        self.wait(Purpose::Rebuild).await
    }

    async fn wait(&self, purpose: Purpose) -> Result<(), ArrayError> {
        // Destage frees space, so nothing may wait for it with a lock that destage takes.
        rank::check(ranks::DESTAGE);
        loop {
            self.context.check_open()?;
            let has_space = match purpose {
                Purpose::Data => self.has_space(DATA_RESERVE),
                Purpose::Discard => self.has_space(2 * DATA_RESERVE) || self.has_space_beside_postponed(),
                Purpose::Rebuild => self.has_space_beside_postponed(),
            };
            if has_space {
                return Ok(());
            }
            if purpose == Purpose::Data && self.is_mostly_parked() {
                return Err(ArrayError::TooDamaged {
                    name: self.context.name.clone(),
                    blocks: self.stripes.overlay().parked().blocks,
                });
            }
            self.short.set(true);
            self.context.signals.destage.notify_one();
            self.context.signals.space.notified().await;
        }
    }

    /// True if stripes that cannot be destaged, and not for lack of space on a host, cost a quarter of the
    /// log.
    fn is_mostly_parked(&self) -> bool {
        let owed_bytes =
            destage_cost(&self.context.geo, self.stripes.overlay().parked()) * BLOCK_BYTES as u64;
        let (may_end, log) = (!self.postponed.borrow().is_empty(), self.context.geo.log());
        !may_end && owed_bytes * 4 > log.end - log.start
    }

    /// True if [`Self::wait_for_data`] fails now because of them.
    pub(crate) fn is_too_damaged(&self) -> bool {
        self.is_mostly_parked() && !self.has_space(DATA_RESERVE)
    }

    fn demand(&self) -> Demand {
        Demand {
            used_segments: self.chain.segments().used(),
            queued: self.queue.queued_data(),
            dirty: self.stripes.overlay().counts(),
            destaging_blocks: self.destaging_blocks.get(),
            fresh_stripes: self.stripes.map().pending_count(),
            reserve_segments: 0,
        }
    }

    /// True if more fits with one part in `reserve` of the log kept free.
    fn has_space(&self, reserve: u64) -> bool {
        let geo = &self.context.geo;
        fits(geo, Demand { reserve_segments: geo.segments / reserve, ..self.demand() })
    }

    /// Like [`Self::has_space`], but counts for a postponed stripe no more than its record: space for its
    /// destage in place may be long in coming. Stripes that are parked for another reason take the reserve,
    /// if they need more.
    fn has_space_beside_postponed(&self) -> bool {
        let (geo, overlay, postponed) = (&self.context.geo, self.stripes.overlay(), self.postponed.borrow());
        let (mut to_destage, mut parked) = (overlay.to_destage(), overlay.parked());
        // A stripe that was discarded and written in full since is destaged in place.
        for stripe in postponed.keys().filter(|stripe| !self.stripes.is_known_written(**stripe)) {
            let of = if overlay.is_parked(*stripe) { &mut parked } else { &mut to_destage };
            *of = *of - overlay.counts_of(*stripe);
        }
        let demand = self.demand();
        let reserve_segments = (geo.segments / DATA_RESERVE).max(segments_of(geo, destage_cost(geo, parked)));
        let fresh_stripes = demand.fresh_stripes + postponed.len() as u64;
        fits(geo, Demand { dirty: to_destage, fresh_stripes, reserve_segments, ..demand })
    }

    /// True while the part of the log is free that data leaves.
    pub(crate) fn has_reserve(&self) -> bool {
        let segments = self.context.geo.segments;
        self.chain.segments().used() + segments / DATA_RESERVE <= segments
    }

    /// True if somebody waited for space since the last call and there is still none.
    pub(crate) fn is_short(&self) -> bool {
        let short = self.short.get() && !self.has_space(DATA_RESERVE);
        self.short.set(short);
        short
    }

    /// These stripes are destaged from here on; none when destage is over.
    pub(crate) fn set_destaging(&self, stripes: &[Stripe]) {
        let overlay = self.stripes.overlay();
        let cost = |stripe: &Stripe| destage_cost(&self.context.geo, overlay.counts_of(*stripe));
        self.destaging_blocks.set(stripes.iter().map(cost).sum());
    }

    /// Postpones an unwritten stripe until the host has space again. It is parked behind all others.
    pub(crate) fn postpone(&self, stripe: Stripe, why: String) {
        self.stripes.overlay_mut().park_behind(stripe);
        let mut postponed = self.postponed.borrow_mut();
        if postponed.is_empty() {
            let array = &self.context.name;
            tracing::error!(
                array,
                why,
                "the first data of unwritten stripes stays in the log until this is over"
            );
        }
        postponed.insert(stripe, why);
    }

    /// Forgets postponed stripes except those for which `keep` holds.
    pub(crate) fn retain_postponed(&self, keep: impl Fn(Stripe) -> bool) {
        let mut postponed = self.postponed.borrow_mut();
        let any = !postponed.is_empty();
        postponed.retain(|stripe, _| keep(*stripe));
        if any && postponed.is_empty() {
            tracing::info!(array = self.context.name, "unwritten stripes are written again");
        }
    }

    /// Postponed stripes.
    pub(crate) fn postponed(&self) -> Vec<Stripe> {
        self.postponed.borrow().keys().copied().collect()
    }

    /// True if a stripe is postponed.
    pub(crate) fn has_postponed(&self) -> bool {
        !self.postponed.borrow().is_empty()
    }

    /// Why a stripe is postponed, if one is.
    pub(crate) fn why_postponed(&self) -> Option<String> {
        self.postponed.borrow().values().next().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::CreateSpec;

    /// 4+2 with a log of 32 segments of 512 blocks.
    fn geometry() -> Geometry {
        Geometry::fit(&CreateSpec::new("t", 4, 2).unwrap(), 1 << 30).unwrap()
    }

    #[test]
    fn demand_and_reserve_fit_in_the_log_or_writers_wait() {
        let geo = geometry();
        let dirty = |blocks, columns| Dirty { blocks, columns };
        let empty = Demand { used_segments: 1, reserve_segments: 8, ..Demand::default() };
        for (name, demand, expected) in [
            ("an empty log", empty, true),
            ("the reserve is free", Demand { used_segments: 24, ..empty }, true),
            ("the reserve is used", Demand { used_segments: 25, ..empty }, false),
            ("a queue longer than eight records", Demand { queued: (2033, 1), ..empty }, false),
            ("dirty blocks that cost the rest", Demand { dirty: dirty(5000, 100), ..empty }, true),
            ("dirty blocks that cost more", Demand { dirty: dirty(9000, 1000), ..empty }, false),
            ("destage under way", Demand { destaging_blocks: 10_000, ..empty }, false),
        ] {
            assert_eq!(fits(&geo, demand), expected, "{name}: {demand:?}");
        }
    }

    /// The proof at the head of the file, for every share of the log: the dirty blocks that writers could
    /// leave there can be destaged in the space that is left.
    #[test]
    fn whatever_is_let_in_can_be_destaged() {
        let geo = geometry();
        for columns in [1, 64, 1000] {
            for blocks in (0..12_000).step_by(100).filter(|blocks| *blocks >= columns) {
                let dirty = Dirty { blocks, columns };
                // The blocks lie in the log once.
                let used_segments = 1 + segments_of(&geo, blocks);
                let reserve_segments = geo.segments / DATA_RESERVE;
                if fits(&geo, Demand { used_segments, dirty, reserve_segments, ..Demand::default() }) {
                    let needed = segments_of(&geo, destage_cost(&geo, dirty));
                    assert!(
                        used_segments + needed <= geo.segments - reserve_segments,
                        "{blocks} in {columns}"
                    );
                }
            }
        }
    }
}
