//! Reads, writes and discards of the blocks of stripes: through the log, past it, and from both.
//!
//! Invariants:
//! - whatever a read returns was verified; an unwritten stripe reads as zeros without I/O;
//! - a write through the log is in the overlay and in the queue in one step, so a read sees it and their
//!   order agree;
//! - everything here waits for log space before it takes a lock.

use crate::context::Context;
use crate::durability::Durability;
use crate::error::ArrayError;
use crate::format::record::Entry;
use crate::layout::StripPlace;
use crate::log::chain::Chain;
use crate::log::space::LogSpace;
use crate::members::Members;
use crate::moves::Moves;
use crate::place::{Position, SegmentNo};
use crate::queue::EntryQueue;
use crate::stripes::Stripes;
use crate::stripes::map::PendingFresh;
use crate::stripes::overlay::DirtyBlock;
use crate::strips::{Erased, Part, StripWrite, Strips};
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, Stripe, ZERO_BLOCK_CRC};
use penstock_drive::{Class, Io};
use std::ops::Range;
use std::rc::Rc;

/// Verified blocks, in order.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    /// Their bytes, in runs of whole blocks.
    pub parts: Vec<Buf>,
    /// CRC32C of each block.
    pub crcs: Vec<u32>,
}

impl Blocks {
    fn push(&mut self, data: Buf, crc: u32) {
        match self.parts.last().and_then(|last| last.try_join(&data)) {
            Some(joined) => *self.parts.last_mut().expect("there is a last part") = joined,
            None => self.parts.push(data),
        }
        self.crcs.push(crc);
    }

    /// The bytes in one run; copied if they are not in one already.
    pub fn gather(&self) -> Buf {
        penstock_base::buf::gather(&self.parts)
    }
}

/// The reach of a discard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// The stripe table only: the stripes will be written again soon.
    InTable,
    /// The drives get the space back as well.
    OnDrives,
}

/// Verified columns of one strip.
type Columns = (Position, Range<u32>, Part);

/// Block I/O of one array.
pub(crate) struct BlockIo {
    pub(crate) context: Rc<Context>,
    pub(crate) queue: Rc<EntryQueue>,
    pub(crate) members: Rc<Members>,
    pub(crate) stripes: Rc<Stripes>,
    pub(crate) chain: Rc<Chain>,
    pub(crate) space: Rc<LogSpace>,
    pub(crate) strips: Rc<Strips>,
    pub(crate) durability: Rc<Durability>,
}

impl BlockIo {
    /// Waits until the log has space for a write.
    pub(crate) async fn wait_for_space(&self) -> Result<(), ArrayError> {
        self.space.wait_for_data().await
    }

    /// Queues one atomic write of consecutive blocks, given by stripe.
    pub(crate) async fn write(
        &self,
        pieces: &[(Stripe, Range<u32>)],
        data: &Buf,
        crcs: &[u32],
    ) -> Result<(), ArrayError> {
        self.wait_for_space().await?;
        let (mut entries, mut payload, mut done) = (Vec::new(), Vec::new(), 0);
        let mut replaces: Vec<SegmentNo> = Vec::new();
        let mut overlay = self.stripes.overlay_mut();
        for (stripe, blocks) in pieces {
            let order = overlay.next_order();
            let range = done..done + blocks.len();
            for (block, index) in blocks.clone().zip(range.clone()) {
                let data = data.slice(index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES);
                let dirty = DirtyBlock { data, crc: crcs[index], order, segment: None };
                let before = overlay.insert(*stripe, block, dirty);
                replaces.extend(before.and_then(|before| before.segment));
            }
            payload.push(data.slice(range.start * BLOCK_BYTES..range.end * BLOCK_BYTES));
            done = range.end;
            entries.push(Entry::Data {
                stripe: *stripe,
                order,
                block: blocks.start,
                crcs: crcs[range].to_vec(),
            });
        }
        assert_eq!(done, crcs.len(), "the pieces are the whole write");
        drop(overlay);
        self.context.count(|counts| counts.logged_blocks += crcs.len() as u64);
        self.queue.push_data(entries, payload, replaces);
        Ok(())
    }

    /// Writes a full stripe past the log. The caller waited for log space.
    pub(crate) async fn write_fresh(
        &self,
        stripe: Stripe,
        data: &Buf,
        crcs: &[u32],
        io: Io,
    ) -> Result<(), ArrayError> {
        let _lock = self.stripes.exclusive(stripe).await?;
        if !self.stripes.is_unwritten(stripe) || self.stripes.overlay().has_stripe(stripe) {
            return Err(ArrayError::Invalid(format!("stripe {stripe} is not unwritten")));
        }
        // A write through the log from here on is newer than this one.
        let upto = self.stripes.overlay().order();
        let blocks = self.context.geo.strip_blocks as usize;
        let all = Part { data: data.clone(), crcs: crcs.to_vec() };
        let strip =
            |position: Position| all.columns(position.index() * blocks..(position.index() + 1) * blocks);
        let mut parts: Vec<Part> = self.context.geo.data_strips().map(strip).collect();
        let parity = self.strips.encode(&parts);
        parts.extend(parity);
        // While it waits it is not on its way: what it missed keeps no member from counting, and it keeps no
        // drive from being given up. It begins again with the members as they are then.
        while let Err(why) = self.try_fresh(stripe, &parts, upto, io).await? {
            self.context.suspend(why).await?;
        }
        self.context.count(|counts| counts.fresh_stripes += 1);
        Ok(())
    }

    /// Writes the strips of a stripe that is locked and unwritten. The inner error says why writes are
    /// suspended.
    async fn try_fresh(
        &self,
        stripe: Stripe,
        parts: &[Part],
        upto: u64,
        io: Io,
    ) -> Result<Result<(), String>, ArrayError> {
        let version = self.stripes.versions.next().await?;
        let fresh = self.stripes.begin_fresh(stripe)?;
        let moves = fresh.moves();
        let landed =
            match self.strips.write_stripe(stripe, parts, moves, version, StripWrite::fresh(io)).await {
                Err(ArrayError::Suspended(why)) if !self.context.is_closed() => return Ok(Err(why)),
                landed => landed?,
            };
        let pending = PendingFresh { version, landed, moves, upto, contained: Vec::new() };
        self.stripes.add_pending(stripe, pending)?;
        Ok(Ok(()))
    }

    /// Makes stripes unwritten again, durably. Returns those that stay as they are, because their page of the
    /// stripe table is lost.
    pub(crate) async fn discard(
        &self,
        first: Stripe,
        count: u64,
        how: Discard,
    ) -> Result<Vec<Stripe>, ArrayError> {
        self.space.wait_for_discard().await?;
        let (mut locks, mut locked, mut left) = (Vec::new(), Vec::new(), Vec::new());
        for stripe in first.run(count) {
            match self.stripes.exclusive(stripe).await {
                Ok(lock) => {
                    locks.push(lock);
                    locked.push(stripe);
                }
                Err(ArrayError::Damaged { .. }) => left.push(stripe),
                Err(error) => return Err(error),
            }
        }
        let stripes = || locked.iter().copied();
        let runs: Vec<Range<Stripe>> = locked
            .chunk_by(|one, next| one.next() == *next)
            .map(|run| run[0]..Stripe(run[0].0 + run.len() as u64))
            .collect();
        // A stripe whose fresh record is on its way must not become written after the discard.
        if stripes().any(|stripe| self.stripes.map().is_pending(stripe)) {
            self.durability.flush_fresh(Io::new(Class::Client, "volume.flush")).await?;
        }
        let upto = self.stripes.overlay().order();
        let mut removed = Vec::new();
        for stripe in stripes() {
            removed.extend(self.stripes.overlay_mut().remove_upto(stripe, upto));
        }
        let mut records = Vec::new();
        for run in runs {
            self.queue.purge_data(run.clone());
            let entry = Entry::Discard { stripe: run.start, count: run.end.0 - run.start.0, upto };
            records.push(self.queue.push_control(entry, Vec::new()));
        }
        let result = self.queue.wait_for(records).await;
        let unpin = |segment| self.chain.segments_mut().unpin(segment);
        removed.into_iter().filter_map(|dirty| dirty.segment).for_each(unpin);
        result?;
        if how == Discard::OnDrives {
            // A spare place may have been given to another strip by now.
            let own = |stripe| self.context.layout.places(stripe, Moves::NONE);
            let runs = runs_of(stripes().flat_map(own).collect());
            join_all(runs.into_iter().map(|(first, rows)| self.punch(first, rows))).await;
        }
        Ok(left)
    }

    async fn punch(&self, StripPlace { member, row }: StripPlace, rows: u64) {
        let io = Io::new(Class::Destage, "discard.punch");
        let (at, len) = (self.context.geo.strip_at(row), rows * self.context.geo.strip_slot_bytes());
        if let Some(slice) = self.members.slice(member)
            && let Err(error) = slice.discard(at, len, io).await
        {
            tracing::debug!(array = self.context.name, %member, %error, "space not given back");
        }
    }

    /// Reads blocks of one stripe.
    pub(crate) async fn read(
        &self,
        stripe: Stripe,
        blocks: Range<u32>,
        io: Io,
    ) -> Result<Blocks, ArrayError> {
        let _lock = self.stripes.shared(stripe).await?;
        if self.stripes.overlay().has_stripe(stripe) {
            return self.read_overlaid(stripe, blocks, io).await;
        }
        if self.stripes.is_unwritten(stripe) {
            let parts = vec![Buf::zeroed(blocks.len() * BLOCK_BYTES)];
            return Ok(Blocks { parts, crcs: vec![ZERO_BLOCK_CRC; blocks.len()] });
        }
        let mut all = Blocks::default();
        for (_, _, part) in self.read_columns(stripe, blocks, io).await? {
            all.parts.push(part.data);
            all.crcs.extend(part.crcs);
        }
        Ok(all)
    }

    /// Reads blocks of a stripe of which some may be in the log.
    async fn read_overlaid(&self, stripe: Stripe, blocks: Range<u32>, io: Io) -> Result<Blocks, ArrayError> {
        let logged: Vec<Option<(Buf, u32)>> = {
            let overlay = self.stripes.overlay();
            let one = |block| overlay.get(stripe, block).map(|dirty| (dirty.data.clone(), dirty.crc));
            blocks.clone().map(one).collect()
        };
        let missing =
            blocks.clone().zip(&logged).filter(|(_, logged)| logged.is_none()).map(|(block, _)| block);
        let unwritten = self.stripes.is_unwritten(stripe);
        let parts = match unwritten {
            true => Vec::new(),
            false => self.read_columns(stripe, missing, io).await?,
        };
        let zeros = Buf::zeroed(if unwritten { BLOCK_BYTES } else { 0 });
        let mut all = Blocks::default();
        for (block, logged) in blocks.zip(logged) {
            let (position, column) = self.context.geo.locate(block);
            let has = |columns: &Range<u32>| columns.contains(&column);
            let stored = || match parts.iter().find(|(at, columns, _)| *at == position && has(columns)) {
                Some((_, columns, part)) => {
                    let at = (column - columns.start) as usize;
                    (part.data.slice(at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES), part.crcs[at])
                }
                None => {
                    assert!(unwritten, "the strip of a missing block was read");
                    (zeros.clone(), ZERO_BLOCK_CRC)
                }
            };
            let (data, crc) = logged.unwrap_or_else(stored);
            all.push(data, crc);
        }
        Ok(all)
    }

    /// For each strip that these blocks, which are in order, touch: the columns from its first to its last
    /// one, verified; or only those that are wanted, if others between them cannot be read.
    async fn read_columns(
        &self,
        stripe: Stripe,
        blocks: impl Iterator<Item = u32> + Clone,
        io: Io,
    ) -> Result<Vec<Columns>, ArrayError> {
        let joined = self.columns_of(blocks.clone(), true);
        let strips = joined.len();
        let error = match self.read_ranges(stripe, joined, io).await {
            Err(error @ ArrayError::Unreadable { .. }) => error,
            read => return read,
        };
        let apart = self.columns_of(blocks, false);
        match apart.len() > strips {
            true => self.read_ranges(stripe, apart, io).await,
            false => Err(error),
        }
    }

    /// The columns of these blocks, those of a strip joined over gaps or not.
    fn columns_of(&self, blocks: impl Iterator<Item = u32>, over_gaps: bool) -> Vec<(Position, Range<u32>)> {
        let mut wanted: Vec<(Position, Range<u32>)> = Vec::new();
        for block in blocks {
            let (position, column) = self.context.geo.locate(block);
            match wanted.last_mut() {
                Some((at, columns)) if *at == position && (over_gaps || columns.end == column) => {
                    columns.end = column + 1;
                }
                _ => wanted.push((position, column..column + 1)),
            }
        }
        wanted
    }

    /// Columns of strips. Those that cannot be read are made from those that were read here and from as few
    /// others as possible.
    async fn read_ranges(
        &self,
        stripe: Stripe,
        wanted: Vec<(Position, Range<u32>)>,
        io: Io,
    ) -> Result<Vec<Columns>, ArrayError> {
        let reads = wanted.iter().map(|(position, columns)| self.strips.read(stripe, *position, columns, io));
        let mut found: Vec<Result<Part, Erased>> = join_all(reads).await;
        while let Some(lost) = found.iter().position(Result::is_err) {
            let columns = wanted[lost].1.clone();
            let same = |index: &usize| wanted[*index].1 == columns;
            let (erased, have): (Vec<usize>, Vec<usize>) =
                (0..wanted.len()).filter(same).partition(|index| found[*index].is_err());
            let have = have.into_iter().map(|index| (wanted[index].0, found[index].clone())).collect();
            let positions: Vec<Position> = erased.iter().map(|index| wanted[*index].0).collect();
            let made = self.strips.recover(stripe, &positions, &columns, have, io).await?;
            for (index, part) in erased.into_iter().zip(made) {
                if let Err(Erased::Blocks { part: rotten, .. }) = &found[index]
                    && !rotten.agrees_with(&part)
                {
                    self.stripes.list(stripe);
                    let (array, position) = (self.context.id, wanted[index].0.index());
                    return Err(ArrayError::Disagrees { array, stripe: stripe.0, position });
                }
                found[index] = Ok(part);
            }
        }
        if self.stripes.map().is_unreadable(stripe) {
            // These columns can be read. Only a scrub of the stripe tells whether all can.
            self.stripes.want_another_try(stripe);
        }
        let parts = wanted.into_iter().zip(found.into_iter().flatten());
        Ok(parts.map(|((position, columns), part)| (position, columns, part)).collect())
    }
}

/// Joins places into runs of rows of one member: the first place of each, and its rows.
fn runs_of(mut places: Vec<StripPlace>) -> Vec<(StripPlace, u64)> {
    places.sort_unstable();
    let mut runs: Vec<(StripPlace, u64)> = Vec::new();
    for place in places {
        match runs.last_mut() {
            Some((first, rows)) if first.member == place.member && first.row + *rows == place.row => {
                *rows += 1
            }
            _ => runs.push((place, 1)),
        }
    }
    runs
}
