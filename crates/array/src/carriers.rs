//! Carriers of the log in place of lost ones.
//!
//! A carrier holds log, roots and table pages: for a large array more than is copied in a moment. So they are copied while
//! they change, and what was written since is copied again, until little is left. That is copied while no write on carriers is
//! under way, and then the new set is recorded. A write that is tried again and again, because the array can lose no carrier, is not
//! waited for: it may be this copy that it waits for.
//!
//! Invariants:
//! - a member counts as a carrier only when it has had everything that an opening reads from carriers, and flushed it;
//! - a piece that was written on the carriers after its copy was begun is copied again: an attempt to write notes its
//!   pieces when it is over, however it ends;
//! - an attempt that begins after a member became a carrier goes to that member too, or is followed by one that does
//!   ([`Array::write_carriers`]);
//! - a copy counts only while every carrier that it was begun from serves, and the member it was made on: a drive that
//!   failed may have forgotten what a piece was copied from.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::descriptor::Descriptor;
use crate::salvage;
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Buf, BufMut};
use penstock_drive::{Class, DriveError, Io, Slice};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{Notify, RwLock, RwLockReadGuard};

const IO: Io = Io::new(Class::Rebuild, "carrier.copy");
/// The unit in which it is known what is copied.
const PIECE_BYTES: u64 = 64 << 10;
/// Copied at a time.
const MOST_PIECES: u64 = 16;
/// Copied while the log stands still.
const LAST_PIECES: usize = 64;
/// Rounds of copying what was written during the one before. After so many it is written faster than it is copied.
const MOST_ROUNDS: u32 = 16;
/// Until a carrier is looked for again, after one could not be made.
const AGAIN: Duration = Duration::from_secs(10);

/// The search for carriers in place of lost ones.
#[derive(Default)]
pub(crate) struct Mending {
    wanted: Cell<bool>,
    wake: Notify,
    /// Nothing is copied before this time.
    not_before: Cell<Duration>,
    /// Members that did not take a copy: others come first.
    refused: Cell<u64>,
    /// During a copy: pieces that were written since they were copied, or are not copied yet.
    left: RefCell<Option<BTreeSet<u64>>>,
    /// Held by every attempt to write on carriers.
    writing: RwLock<()>,
    /// A new one counts, and superblocks that name it may not be written.
    recording: Cell<bool>,
    /// Members that count or may count, and did not take their superblock.
    owed: RefCell<BTreeSet<usize>>,
}

impl Mending {
    /// True while it was asked for and is not done.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.get()
    }

    /// True while superblocks are written that name a new carrier.
    pub(crate) fn is_recorded_now(&self) -> bool {
        self.recording.get()
    }

    fn is_done(&self) {
        self.wanted.set(false);
        self.refused.set(0);
    }

    /// Some are missing after an attempt that took so long.
    fn pause(&self, now: Duration, took: Duration) {
        self.not_before.set(now + AGAIN.max(took));
    }

    /// Lets the task end, or look at once.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Waits until bytes may be written on a carrier, and notes them when that is over.
    pub(crate) async fn begin_write(&self, bytes: Range<u64>) -> Written<'_> {
        let attempt = self.writing.read().await;
        Written { mending: self, bytes, _attempt: attempt }
    }

    /// True if a member did not take its superblock.
    pub(crate) fn owes_superblock(&self, position: usize) -> bool {
        self.owed.borrow().contains(&position)
    }

    /// Members that did not take their superblock, as a bit mask.
    pub(crate) fn owed_superblocks(&self) -> u64 {
        self.owed.borrow().iter().map(|position| 1 << position).sum()
    }

    /// Has a superblock written as soon as that is possible. Returns whether that is news.
    pub(crate) fn owe_superblock(&self, position: usize) -> bool {
        let is_news = self.owed.borrow_mut().insert(position);
        if is_news {
            self.wake();
        }
        is_news
    }

    pub(crate) fn superblock_is_written(&self, position: usize) {
        self.owed.borrow_mut().remove(&position);
    }

    fn add(&self, bytes: &Range<u64>) {
        if let Some(left) = &mut *self.left.borrow_mut() {
            left.extend(bytes.start / PIECE_BYTES..bytes.end.div_ceil(PIECE_BYTES));
        }
    }

    fn left(&self) -> BTreeSet<u64> {
        self.left.borrow().clone().expect("a copy is under way")
    }

    /// Pieces are copied as they are from here on.
    fn begins(&self, pieces: Range<u64>) {
        let mut left = self.left.borrow_mut();
        let left = left.as_mut().expect("a copy is under way");
        for piece in pieces {
            left.remove(&piece);
        }
    }
}

/// An attempt to write on a carrier.
pub(crate) struct Written<'a> {
    mending: &'a Mending,
    bytes: Range<u64>,
    /// Given up after the bytes are noted.
    _attempt: RwLockReadGuard<'a, ()>,
}

impl Drop for Written<'_> {
    fn drop(&mut self) {
        self.mending.add(&self.bytes);
    }
}

/// A copy under way. The pieces that are left are known while it lives.
struct Copy<'a> {
    mending: &'a Mending,
    /// Carriers that it is made from, and last the member that it is made on, with their lives.
    lives: Vec<(usize, u64)>,
    sources: Sources,
    slice: Slice,
}

/// Why a copy does not go on.
enum Stop {
    /// The member did not take a part.
    Refused(DriveError),
    /// A carrier fails: its position and life.
    Source(usize, u64, DriveError),
    Unreadable,
    Interrupted,
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        self.mending.left.take();
    }
}

/// The end of an attempt to make a carrier.
enum Made {
    /// Recorded; these members did not take their superblock.
    Carrier(Vec<usize>),
    /// This member did not take its copy.
    Refused(usize),
    /// No carrier that is left can read some block.
    Unreadable,
    /// Somebody whom it was begun with was lost, or the array is closed.
    Interrupted,
}

/// The carriers that a copy is made from.
struct Sources {
    slices: Vec<Slice>,
    /// By slice: it did not answer, and is not asked again.
    silent: RefCell<Vec<bool>>,
}

impl Sources {
    /// A range, each block from a carrier that can read it, with zeros for those that none can read, which are given by number.
    ///
    /// Copies verified structures only in the sense that every one carries its own checksum: a rotten source block is
    /// found, and mended from the other carriers, by the scrub that follows a change of carriers.
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

impl Array {
    /// Lets the tasks that mend carriers and members look at them.
    pub(crate) fn want_mending(&self) {
        self.mending.wanted.set(true);
        self.mending.not_before.set(Duration::ZERO);
        self.mending.wake();
        self.resync_wake.notify_one();
    }

    /// The carriers there should be: those that still serve, and then the first active members, last those that did not
    /// take a copy.
    fn wanted_carriers(&self) -> Vec<usize> {
        let members = self.members.borrow();
        let good = |at: &usize| !members[*at].stale && members[*at].reachable().is_some();
        let desc = self.desc.borrow();
        let mut wanted: Vec<usize> = desc.carriers.iter().map(|at| usize::from(*at)).filter(good).collect();
        let refused = |at: &usize| self.mending.refused.get() & 1 << at != 0;
        let (last, first): (Vec<usize>, Vec<usize>) = (0..members.len()).filter(good).partition(refused);
        for position in first.into_iter().chain(last) {
            if wanted.len() < self.geo.carriers() && !wanted.contains(&position) {
                wanted.push(position);
            }
        }
        wanted
    }

    /// Whether a lost carrier can be replaced.
    pub(crate) fn carriers_need_mending(&self) -> bool {
        let wanted = self.wanted_carriers();
        let desc = self.desc.borrow();
        wanted.len() != desc.carriers.len() || wanted.iter().any(|at| !desc.carriers.contains(&(*at as u16)))
    }

    /// Replaces lost carriers.
    pub(crate) async fn carriers_task(self: Rc<Self>) {
        while !self.closed.get() {
            let woken = self.mending.wake.notified();
            match self.mend_carriers().await {
                Ok(true) => continue,
                Ok(false) if self.mending.is_wanted() || !self.mending.owed.borrow().is_empty() => {
                    let _ = timeout(&self.env, AGAIN, woken).await;
                    if let Err(error) = self.write_owed_superblocks().await {
                        tracing::warn!(array = self.name, %error, "lost members are not recorded yet");
                    }
                }
                Ok(false) => woken.await,
                Err(_) if self.closed.get() => {}
                Err(error) => self.stop_because(format!("carriers of the log cannot be replaced: {error}")),
            }
        }
    }

    /// Replaces one lost carrier, or notes that all are there. Returns whether to look again at once.
    async fn mend_carriers(&self) -> Result<bool, ArrayError> {
        if !self.carriers_need_mending() {
            self.mending.is_done();
            return Ok(false);
        }
        let began = self.env.now();
        let (wanted, old) = (self.wanted_carriers(), self.live_carriers());
        if began < self.mending.not_before.get() || wanted.is_empty() || old.is_empty() {
            return Ok(false);
        }
        let made = match wanted.iter().copied().find(|at| !old.contains(at)) {
            Some(to) => self.make_carrier(&old, to).await,
            // Those that are gone leave.
            None => {
                let _one_at_a_time = self.reconfig.lock().await;
                self.record_carriers_then(&wanted, || ()).await.map(Made::Carrier)
            }
        };
        let again_later = || {
            let now = self.env.now();
            self.mending.pause(now, now - began);
        };
        match made {
            Ok(Made::Carrier(unwritten)) => self.fail_unwritten(unwritten).await?,
            // Whoever was lost is about to be recorded, which wakes this task.
            Ok(Made::Interrupted) => return Ok(false),
            // Another one is asked now, or one of these again when all have refused.
            Ok(Made::Refused(by)) => {
                let refused = self.mending.refused.get() | 1 << by;
                self.mending.refused.set(refused);
                let next = self.wanted_carriers().into_iter().find(|at| !old.contains(at));
                if next.is_none_or(|at| refused & 1 << at != 0) {
                    again_later();
                }
            }
            Ok(Made::Unreadable) => {
                // A record that cannot be read leaves the log when all of it is in the strips.
                self.set_metadata_bad(true);
                again_later();
            }
            // The old set still serves.
            Err(ArrayError::Ownership { why, .. }) => {
                again_later();
                self.suspend(why).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(true)
    }

    /// Writes superblocks that were not taken. Each is owed until it is written, or its drive is gone.
    async fn write_owed_superblocks(&self) -> Result<(), ArrayError> {
        let owed = self.mending.owed.borrow().clone();
        let mut failed = Vec::new();
        for position in owed {
            if !self.write_or_owe_superblock(position).await {
                failed.push(position);
            }
        }
        self.fail_unwritten(failed).await
    }

    /// Copies what carriers hold to a member, which is one of them then.
    async fn make_carrier(&self, from: &[usize], to: usize) -> Result<Made, ArrayError> {
        let Some(copy) = self.begin_copy(from, to) else { return Ok(Made::Refused(to)) };
        for round in 1..=MOST_ROUNDS {
            if let Err(stop) = self.copy_pieces(&copy, self.mending.left()).await {
                return self.judge(&copy, stop).await;
            }
            // The first round takes long, and what is written meanwhile does not.
            if round > 1 && self.mending.left().len() <= LAST_PIECES {
                break;
            }
        }
        let one_at_a_time = self.reconfig.lock().await;
        let still = self.mending.writing.write().await;
        let stop = match self.copy_rest(&copy).await {
            Ok(()) => {
                let serve = self.wanted_carriers().into_iter().filter(|at| from.contains(at));
                let carriers: Vec<usize> = serve.chain([to]).collect();
                // From the moment in which it is one it has every write.
                return self.record_carriers_then(&carriers, || drop(still)).await.map(Made::Carrier);
            }
            Err(stop) => stop,
        };
        drop((still, one_at_a_time));
        self.judge(&copy, stop).await
    }

    /// Copies what is left, while nobody writes on carriers.
    async fn copy_rest(&self, copy: &Copy<'_>) -> Result<(), Stop> {
        self.copy_pieces(copy, self.mending.left()).await?;
        assert!(self.mending.left().is_empty(), "nobody writes on carriers now");
        // A carrier that failed a flush, and may have forgotten what was copied from it, fails this one too.
        for ((at, life), source) in copy.lives.iter().zip(&copy.sources.slices) {
            source.flush(IO).await.map_err(|error| Stop::Source(*at, *life, error))?;
        }
        if self.goes_on(copy) { Ok(()) } else { Err(Stop::Interrupted) }
    }

    fn begin_copy(&self, from: &[usize], to: usize) -> Option<Copy<'_>> {
        let slice = self.member_slice(to)?;
        let lives = from.iter().chain([&to]).map(|at| (*at, self.life(*at))).collect();
        let slices: Vec<Slice> = from.iter().map(|at| self.member_slice(*at)).collect::<Option<_>>()?;
        let sources = Sources { silent: RefCell::new(vec![false; slices.len()]), slices };
        *self.mending.left.borrow_mut() = Some(BTreeSet::new());
        self.needed_ranges().iter().for_each(|range| self.mending.add(range));
        Some(Copy { mending: &self.mending, lives, sources, slice })
    }

    /// True while everybody whom a copy was begun with serves as he did then.
    fn goes_on(&self, copy: &Copy<'_>) -> bool {
        let members = self.members.borrow();
        let serves = |at: usize| !members[at].stale && members[at].reachable().is_some();
        !self.closed.get() && copy.lives.iter().all(|(at, life)| self.life(*at) == *life && serves(*at))
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
            self.mending.begins(first..end);
            let part =
                |range: Range<u64>| range.start.max(first * PIECE_BYTES)..range.end.min(end * PIECE_BYTES);
            let ranges = self.needed_ranges().into_iter().map(part).filter(|range| !range.is_empty());
            for range in ranges.collect::<Vec<_>>() {
                let (at, len) = (range.start, (range.end - range.start) as usize);
                let (bytes, lacking) = copy.sources.read(at, len).await;
                if lacking.iter().any(|block| !self.is_spare(at + (block * BLOCK_BYTES) as u64)) {
                    let name = &self.name;
                    tracing::warn!(array = name, at, len, "no carrier of the log can read a block of these");
                    return Err(Stop::Unreadable);
                }
                copy.slice.write(at, bytes, IO).await.map_err(Stop::Refused)?;
            }
        }
        copy.slice.flush(IO).await.map_err(Stop::Refused)
    }

    /// True for the place of a table page that holds no copy which counts. Zeros there are none either.
    fn is_spare(&self, at: u64) -> bool {
        let counts = |page: u64| u64::from(self.table.borrow().place(page).0);
        self.geo.page_of(at).is_some_and(|(page, place)| counts(page) != place)
    }

    /// The outcome of a copy that does not go on. Where the member or the carrier that failed may be lost it is; otherwise the
    /// carriers that are left go on.
    async fn judge(&self, copy: &Copy<'_>, stop: Stop) -> Result<Made, ArrayError> {
        let (to, life) = *copy.lives.last().expect("it is made on a member");
        let (at, life, error, made) = match stop {
            Stop::Unreadable => return Ok(Made::Unreadable),
            Stop::Interrupted => return Ok(Made::Interrupted),
            Stop::Refused(DriveError::HostFull) => return Ok(Made::Refused(to)),
            Stop::Refused(error) => (to, life, error, Made::Refused(to)),
            Stop::Source(at, life, error) => (at, life, error, Made::Interrupted),
        };
        match self.fail_life(at, life, &error.to_string()).await {
            Err(ArrayError::Suspended(why)) => {
                tracing::warn!(array = self.name, position = at, why, "no copy of the log is made");
            }
            judged => judged?,
        }
        Ok(made)
    }

    /// Parts of what is reserved that an opening reads: what it may read of the log, roots, and pages.
    fn needed_ranges(&self) -> Vec<Range<u64>> {
        let mut needed = self.log.needed_ranges();
        needed.push(self.geo.log_bytes()..self.geo.reserved().end);
        needed
    }

    /// Records a set of carriers, if all of them serve, and does something in the same step in which it counts. Call under the
    /// reconfiguration lock. Returns members whose superblock could not be written.
    async fn record_carriers_then(
        &self,
        carriers: &[usize],
        then: impl FnOnce(),
    ) -> Result<Vec<usize>, ArrayError> {
        if carriers.iter().any(|at| self.members.borrow()[*at].stale) {
            return Ok(Vec::new());
        }
        tracing::info!(array = self.name, ?carriers, "carriers of the log replaced");
        let change = |next: &mut Descriptor| {
            next.carriers = carriers.iter().map(|at| *at as u16).collect();
            next.carriers_epoch += 1;
        };
        let then = || {
            self.mending.recording.set(true);
            then();
        };
        let recorded = self.record_then(change, then).await;
        self.mending.recording.set(false);
        let unwritten = recorded?.failed;
        // The copy is not verified yet: a rotten source block must not count as a copy.
        self.set_metadata_bad(true);
        Ok(unwritten)
    }
}
