//! Replacement of lost carriers of the log.
//!
//! A carrier holds log, roots and table pages: for a large array more than is copied in a moment. So they are
//! copied while they change, and pieces that were written since are copied again, until few are left. Those
//! are copied while no write on carriers is in flight, and then the new set is recorded. The copy does not
//! wait for a write that is tried again because the array can lose no further carrier: that write may succeed
//! only after the copy has made a new carrier.
//!
//! Invariants:
//! - a member counts as a carrier only after it took everything that an opening reads from carriers, and
//!   flushed it;
//! - a copy counts only while every carrier that it was begun from serves, and the member that it is made on:
//!   a drive that failed may have forgotten a piece that was copied from it.

use crate::context::Context;
use crate::error::ArrayError;
use crate::log::chain::Chain;
use crate::members::carrier_writes::{CopyPieces, PIECE_BYTES};
use crate::members::{Life, Members};
use crate::place::MemberNo;
use crate::salvage;
use crate::site::Site;
use crate::stripes::Stripes;
use penstock_base::env::timeout;
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, BufMut};
use penstock_drive::{DriveError, Io, Slice};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

const IO: Io = Site::CarrierCopy.io();
/// Pieces copied with one I/O.
const MOST_PIECES: u64 = 16;
/// Pieces copied while the log stands still.
const LAST_PIECES: usize = 64;
/// Rounds of copying what was written during the round before. After so many it is written faster than it is
/// copied.
const MOST_ROUNDS: u32 = 16;
/// Time before the next attempt after a carrier could not be made.
const AGAIN: Duration = Duration::from_secs(10);

/// A copy under way.
struct Copy<'a> {
    pieces: CopyPieces<'a>,
    /// Carriers that it is made from, and last the member that it is made on, with their lives.
    lives: Vec<(MemberNo, Life)>,
    sources: Sources,
    /// The slice that it is made on.
    slice: Slice,
}

/// Why a copy does not go on.
enum Stop {
    /// The member did not take a part.
    Refused(DriveError),
    /// A carrier fails: its member and life.
    Source(MemberNo, Life, DriveError),
    /// No carrier can read some block.
    Unreadable,
    /// A member that takes part was lost, or the array is closed.
    Interrupted,
}

/// The end of an attempt to make a carrier.
enum Made {
    /// Recorded; these members did not take their label.
    Carrier(Vec<MemberNo>),
    /// This member did not take its copy.
    Refused(MemberNo),
    /// No carrier that is left can read some block.
    Unreadable,
    /// A member that took part was lost, or the array is closed.
    Interrupted,
}

/// The carriers that a copy is made from.
struct Sources {
    slices: Vec<Slice>,
    /// By slice: it did not answer, and is not asked again.
    silent: RefCell<Vec<bool>>,
}

impl Sources {
    /// A range, each block from a carrier that can read it. Blocks that no carrier can read are zeros, and
    /// their numbers are returned.
    ///
    /// Nothing is verified here: every structure carries its own checksum. The scrub that follows a change of
    /// carriers finds a rotten source block, and repairs it from the other carriers.
    async fn read(&self, at: u64, len: usize) -> (Buf, Vec<usize>) {
        let mut whole = BufMut::zeroed(len);
        let mut lacking: Vec<usize> = (0..len / BLOCK_BYTES).collect();
        for (number, slice) in self.slices.iter().enumerate() {
            if self.silent.borrow()[number] {
                continue;
            }
            let found = salvage::read(slice, at, len, IO).await;
            if !found.lacks_some() {
                return (found.bytes().clone(), Vec::new());
            }
            self.silent.borrow_mut()[number] = !found.answered();
            lacking.retain(|block| {
                let bytes = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
                if found.has(*block, 1) {
                    whole.as_mut()[bytes.clone()].copy_from_slice(&found.bytes()[bytes]);
                }
                !found.has(*block, 1)
            });
            if lacking.is_empty() {
                break;
            }
        }
        (whole.freeze(), lacking)
    }
}

/// The replacement of one array's carriers.
pub(crate) struct CarrierReplacement {
    pub(crate) context: Rc<Context>,
    pub(crate) members: Rc<Members>,
    pub(crate) stripes: Rc<Stripes>,
    pub(crate) chain: Rc<Chain>,
}

impl CarrierReplacement {
    /// Replaces lost carriers until the array is closed.
    pub(crate) async fn run(self: Rc<Self>) {
        while !self.context.is_closed() {
            let woken = self.context.signals.carriers.notified();
            let wants_more = || self.members.search().is_wanted() || !self.members.owed_labels().is_empty();
            match self.replace_one().await {
                Ok(true) => continue,
                Ok(false) if wants_more() => {
                    let _ = timeout(&self.context.env, AGAIN, woken).await;
                    if let Err(error) = self.members.write_owed_labels().await {
                        tracing::warn!(array = self.context.name, %error, "lost members are not recorded yet");
                    }
                }
                Ok(false) => woken.await,
                Err(_) if self.context.is_closed() => {}
                Err(error) => {
                    self.context.stop_because(format!("carriers of the log cannot be replaced: {error}"))
                }
            }
        }
    }

    /// Replaces one lost carrier. Returns true if it is to be called again without delay.
    async fn replace_one(&self) -> Result<bool, ArrayError> {
        let (members, search) = (&self.members, self.members.search());
        let began = self.context.env.now();
        if members.lacks_refused_carriers() {
            if search.may_begin(began) {
                search.forgive();
            }
            return Ok(search.may_begin(began));
        }
        if !members.lacks_carriers() {
            search.done();
            return Ok(false);
        }
        let (wanted, old) = (members.wanted_carriers(), members.live_carriers());
        if !search.may_begin(began) || wanted.is_empty() || old.is_empty() {
            return Ok(false);
        }
        let made = match wanted.iter().copied().find(|at| !old.contains(at)) {
            Some(to) => self.make_carrier(&old, to).await,
            // Carriers that are gone leave the set.
            None => members.reconfigure().await.record_carriers(&wanted, None).await.map(Made::Carrier),
        };
        let again_later = || {
            let now = self.context.env.now();
            search.pause_until(now + AGAIN.max(now - began));
        };
        match made {
            Ok(Made::Carrier(unwritten)) => members.fail_unwritten(unwritten).await?,
            // The lost member is about to be recorded, which wakes this task.
            Ok(Made::Interrupted) => return Ok(false),
            // Another member is tried now, or one of these again when all have refused.
            Ok(Made::Refused(by)) => {
                search.refuse(by);
                let next = members.wanted_carriers().into_iter().find(|at| !old.contains(at));
                if next.is_none_or(|at| search.refused().contains(at)) {
                    again_later();
                }
            }
            Ok(Made::Unreadable) => {
                // A record that cannot be read leaves the log when all of it is in the strips.
                members.suspect_metadata();
                again_later();
            }
            // The old set still serves.
            Err(ArrayError::Ownership { why, .. }) => {
                again_later();
                self.context.suspend(why).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Copies everything that carriers hold to a member, and records it as a carrier.
    async fn make_carrier(&self, from: &[MemberNo], to: MemberNo) -> Result<Made, ArrayError> {
        let Some(copy) = self.begin_copy(from, to) else { return Ok(Made::Refused(to)) };
        for round in 1..=MOST_ROUNDS {
            if let Err(stop) = self.copy_pieces(&copy, copy.pieces.left()).await {
                return self.judge(&copy, stop).await;
            }
            // The first round takes long, and little is written during the later ones.
            if round > 1 && copy.pieces.left().len() <= LAST_PIECES {
                break;
            }
        }
        let reconfiguration = self.members.reconfigure().await;
        let paused = self.members.pause_carrier_writes().await;
        let stop = match self.copy_rest(&copy).await {
            Ok(()) => {
                let serve = self.members.wanted_carriers().into_iter().filter(|at| from.contains(at));
                let carriers: Vec<MemberNo> = serve.chain([to]).collect();
                // From the step on in which it is recorded it gets every write.
                return reconfiguration.record_carriers(&carriers, Some(paused)).await.map(Made::Carrier);
            }
            Err(stop) => stop,
        };
        drop((paused, reconfiguration));
        self.judge(&copy, stop).await
    }

    /// Copies the pieces that are left, while nobody writes on carriers.
    async fn copy_rest(&self, copy: &Copy<'_>) -> Result<(), Stop> {
        self.copy_pieces(copy, copy.pieces.left()).await?;
        assert!(copy.pieces.left().is_empty(), "nobody writes on carriers now");
        // A carrier that failed a flush may have forgotten pieces that were copied from it. It fails this one
        // too.
        for ((at, life), source) in copy.lives.iter().zip(&copy.sources.slices) {
            source.flush(IO).await.map_err(|error| Stop::Source(*at, *life, error))?;
        }
        if self.goes_on(copy) { Ok(()) } else { Err(Stop::Interrupted) }
    }

    fn begin_copy(&self, from: &[MemberNo], to: MemberNo) -> Option<Copy<'_>> {
        let slice = self.members.slice(to)?;
        let lives = from.iter().chain([&to]).map(|at| (*at, self.members.life(*at))).collect();
        let slices: Vec<Slice> = from.iter().map(|at| self.members.slice(*at)).collect::<Option<_>>()?;
        let sources = Sources { silent: RefCell::new(vec![false; slices.len()]), slices };
        Some(Copy { pieces: self.members.begin_copy(&self.needed_ranges()), lives, sources, slice })
    }

    /// True while every member that takes part serves in the life in which the copy began.
    fn goes_on(&self, copy: &Copy<'_>) -> bool {
        let active = self.members.active();
        let serves = |(at, life): &(MemberNo, Life)| active.contains(*at) && self.members.life(*at) == *life;
        !self.context.is_closed() && copy.lives.iter().all(serves)
    }

    /// Copies pieces as they are now, and flushes them.
    async fn copy_pieces(&self, copy: &Copy<'_>, pieces: BTreeSet<u64>) -> Result<(), Stop> {
        let mut pieces = pieces.into_iter().peekable();
        while let Some(first) = pieces.next() {
            if !self.goes_on(copy) {
                return Err(Stop::Interrupted);
            }
            let mut end = first + 1;
            while end < first + MOST_PIECES && pieces.next_if_eq(&end).is_some() {
                end += 1;
            }
            copy.pieces.begin(first..end);
            for range in self.needed_in(first * PIECE_BYTES..end * PIECE_BYTES) {
                let (at, len) = (range.start, to_usize(range.end - range.start));
                let (bytes, lacking) = copy.sources.read(at, len).await;
                if lacking.iter().any(|block| !self.is_spare(at + (block * BLOCK_BYTES) as u64)) {
                    let name = &self.context.name;
                    tracing::warn!(array = name, at, len, "no carrier of the log can read a block of these");
                    return Err(Stop::Unreadable);
                }
                copy.slice.write(at, bytes, IO).await.map_err(Stop::Refused)?;
            }
        }
        copy.slice.flush(IO).await.map_err(Stop::Refused)
    }

    /// True for a place of a page that holds no copy which counts, or one that no carrier has any more. Zeros
    /// there do not count either.
    fn is_spare(&self, at: u64) -> bool {
        let table = self.stripes.table();
        let counts = |page: u64, place: u64| {
            let named = table.index().page(page);
            !named.is_none() && u64::from(named.place) == place && !table.is_lost(page)
        };
        self.context.geo.page_of(at).is_some_and(|(page, place)| !counts(page, place))
    }

    /// The outcome of a copy that does not go on. If the member or the carrier that failed may be lost, it
    /// is; otherwise the carriers that are left go on.
    async fn judge(&self, copy: &Copy<'_>, stop: Stop) -> Result<Made, ArrayError> {
        let (to, life) = *copy.lives.last().expect("it is made on a member");
        let (at, life, error, made) = match stop {
            Stop::Unreadable => return Ok(Made::Unreadable),
            Stop::Interrupted => return Ok(Made::Interrupted),
            Stop::Refused(DriveError::HostFull) => return Ok(Made::Refused(to)),
            Stop::Refused(error) => (to, life, error, Made::Refused(to)),
            Stop::Source(at, life, error) => (at, life, error, Made::Interrupted),
        };
        match self.members.fail_life(at, life, &error.to_string()).await {
            Err(ArrayError::Suspended(why)) => {
                tracing::warn!(array = self.context.name, member = %at, why, "no copy of the log is made");
            }
            judged => judged?,
        }
        Ok(made)
    }

    /// The parts of a carrier that an opening reads: the log as far as it may read it, roots, and both places
    /// of pages in use.
    fn needed_ranges(&self) -> Vec<Range<u64>> {
        let (geo, table) = (&self.context.geo, self.stripes.table());
        let mut needed = self.chain.needed_ranges();
        needed.push(geo.roots());
        let in_use: BTreeSet<u64> = table.index().named().chain(table.index().writing()).collect();
        for place in 0..2 {
            needed.extend(in_use.iter().map(|page| block_at(geo.page_at(*page, place))));
        }
        needed
    }

    /// The needed parts of a range.
    fn needed_in(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let (geo, table) = (&self.context.geo, self.stripes.table());
        let part = |part: Range<u64>| part.start.max(range.start)..part.end.min(range.end);
        let mut needed: Vec<_> =
            self.chain.needed_ranges().into_iter().chain([geo.roots()]).map(part).collect();
        let is_in_use = |at: &u64| geo.page_of(*at).is_some_and(|(page, _)| table.index().is_in_use(page));
        let blocks: Vec<u64> = (range.start..range.end).step_by(BLOCK_BYTES).filter(is_in_use).collect();
        let runs = blocks.chunk_by(|one, next| block_at(*one).end == *next);
        needed.extend(runs.map(|run| run[0]..block_at(run[run.len() - 1]).end));
        needed.retain(|range| !range.is_empty());
        needed
    }
}

fn block_at(at: u64) -> Range<u64> {
    at..at + BLOCK_BYTES as u64
}
