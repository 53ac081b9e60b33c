//! Scrub: every strip of every written stripe is read and verified, parity is computed and compared, and
//! whatever is wrong is written again from strips that are right.
//!
//! A scrub can be stopped and gone on with. Stripes written behind its position meanwhile are verified by the
//! next one.
//!
//! A repair keeps the strip's version: the bytes are those that the version names. Blocks that nobody can
//! make delay no others. Where a trailer is written that differs from the one before, because blocks were
//! marked as lost and can be made now, a record says that the strip is valid, so that no redo brings the
//! marks back. Parity that disagrees while all strips verify is a defect of ours: it is reported and kept.

use super::metadata::MetadataScrub;
use super::{JobProgress, MOST_PAUSE};
use crate::context::Context;
use crate::counters::Counts;
use crate::error::ArrayError;
use crate::format::record::{Entry, StripPatch};
use crate::log::space::LogSpace;
use crate::members::{Life, Members, WhenSuspended};
use crate::moves::Moves;
use crate::place::{Position, Positions};
use crate::queue::EntryQueue;
use crate::site::Site;
use crate::stripes::Stripes;
use crate::stripes::load::{END, Unread};
use crate::strips::{Erased, Part, StripWrite, Strips};
use penstock_base::num::{to_u16, to_u32};
use penstock_base::{Buf, Stripe};
use penstock_drive::Io;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

const IO: Io = Site::ScrubRepair.io();
const WRITE: StripWrite = StripWrite::new(Site::ScrubRepair, Site::ScrubRepair, WhenSuspended::Fail);

/// The findings of a scrub.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Stripes verified.
    pub stripes: u64,
    /// Blocks, trailers and metadata blocks that did not verify.
    pub checksum_errors: u64,
    /// Blocks and metadata blocks written again.
    pub repaired_blocks: u64,
    /// Stripes whose parity disagreed while all strips verified.
    pub parity_defects: u64,
    /// Stripes that cannot be read.
    pub unreadable: Vec<u64>,
}

impl ScrubReport {
    /// True if nothing was wrong.
    pub fn is_clean(&self) -> bool {
        self.checksum_errors == 0 && self.parity_defects == 0 && self.unreadable.is_empty()
    }
}

/// The position of a scrub. A caller that keeps it over a restart can go on from there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubProgress {
    /// The stripe to go on with.
    pub next_stripe: u64,
    /// Nanoseconds since 1970 when the scrub began.
    pub started_ns: i64,
    /// The findings so far.
    pub report: ScrubReport,
}

/// The share of the array's time that a scrub takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// One stripe after the other.
    Full,
    /// After each stripe a rest as long as the stripe took.
    Gentle,
}

/// The scrub of one array.
pub(crate) struct Scrub {
    pub(crate) context: Rc<Context>,
    pub(crate) members: Rc<Members>,
    pub(crate) stripes: Rc<Stripes>,
    pub(crate) strips: Rc<Strips>,
    pub(crate) queue: Rc<EntryQueue>,
    pub(crate) space: Rc<LogSpace>,
    pub(crate) metadata: Rc<MetadataScrub>,
    pub(crate) progress: Cell<Option<JobProgress>>,
    pub(crate) stop: Cell<bool>,
}

impl Scrub {
    /// The progress of the scrub that is running.
    pub(crate) fn progress(&self) -> Option<JobProgress> {
        self.progress.get()
    }

    /// Makes a running scrub end before its next stripe.
    pub(crate) fn stop(&self) {
        self.stop.set(true);
    }

    /// Scrubs metadata and every written stripe from `progress` on, which moves along. None if it was stopped
    /// on the way. The caller sees to it that one scrub runs at a time.
    pub(crate) async fn run_from(
        &self,
        progress: &RefCell<ScrubProgress>,
        pace: Pace,
    ) -> Result<Option<ScrubReport>, ArrayError> {
        self.stop.set(false);
        let result = self.scrub_all(progress, pace).await;
        self.progress.set(None);
        Ok(result?.then(|| progress.borrow().report.clone()))
    }

    /// Returns false if it was stopped before the end.
    async fn scrub_all(&self, progress: &RefCell<ScrubProgress>, pace: Pace) -> Result<bool, ArrayError> {
        let base = (self.context.counts(), progress.borrow().report.clone());
        let mut job = JobProgress {
            done_stripes: base.1.stripes,
            done_before: base.1.stripes,
            total_stripes: self.stripes.table().written(),
            failed_stripes: base.1.unreadable.len() as u64,
            started_ns: self.context.env.wall_ns(),
        };
        self.progress.set(Some(job));
        self.metadata.scrub().await?;
        loop {
            self.tally(&mut progress.borrow_mut().report, &base);
            let from = Stripe(progress.borrow().next_stripe);
            let next = self.stripes.find(from..END, 1, Unread::Fails, |_, _| true, |_, _| true).await?;
            let Some(stripe) = next.first().copied() else {
                self.list_lost(&mut progress.borrow_mut().report);
                return Ok(true);
            };
            assert!(stripe >= from, "a scrub goes forward");
            let began = self.context.env.now();
            match self.scrub_stripe(stripe).await {
                Ok(()) => {}
                Err(ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. }) => {
                    job.failed_stripes += 1;
                    progress.borrow_mut().report.unreadable.push(stripe.0);
                }
                // The same stripe again, unless it is to stop.
                Err(ArrayError::Suspended(why)) => {
                    self.context.suspend(why).await?;
                    match self.stop.get() {
                        true => return Ok(false),
                        false => continue,
                    }
                }
                Err(error) => return Err(error),
            }
            // A damaged record may have any count.
            job.done_stripes = job.done_stripes.saturating_add(1);
            progress.borrow_mut().report.stripes = job.done_stripes;
            progress.borrow_mut().next_stripe = stripe.next().0;
            self.tally(&mut progress.borrow_mut().report, &base);
            self.progress.set(Some(job));
            self.context.check_open()?;
            if self.stop.get() {
                return Ok(false);
            }
            if pace == Pace::Gentle {
                let took = self.context.env.now().saturating_sub(began);
                self.context.env.sleep(took.min(MOST_PAUSE)).await;
            }
        }
    }

    /// Lists the stripes of lost pages of the table as unreadable.
    fn list_lost(&self, report: &mut ScrubReport) {
        let (map, table) = (self.stripes.map(), self.stripes.table());
        let lost = map.unreadable().iter().filter(|stripe| table.is_lost(table.page_of(**stripe)));
        let listed: BTreeSet<u64> = report.unreadable.iter().copied().collect();
        report.unreadable.extend(lost.map(|stripe| stripe.0).filter(|stripe| !listed.contains(stripe)));
    }

    /// The findings until now: those before this start, and those that the array has counted since.
    fn tally(&self, report: &mut ScrubReport, (before, found): &(Counts, ScrubReport)) {
        let now = self.context.counts();
        assert!(now.checksum_errors >= before.checksum_errors, "counts only rise");
        // A damaged record may have any count.
        let sum = |found: u64, now: u64, before: u64| found.saturating_add(now - before);
        report.checksum_errors = sum(found.checksum_errors, now.checksum_errors, before.checksum_errors);
        report.repaired_blocks = sum(found.repaired_blocks, now.repaired_blocks, before.repaired_blocks);
        report.parity_defects = sum(found.parity_defects, now.parity_defects, before.parity_defects);
    }

    /// Verifies one stripe and repairs it. Fails while writes are suspended, and does not keep it locked
    /// then.
    pub(crate) async fn scrub_stripe(&self, stripe: Stripe) -> Result<(), ArrayError> {
        match self.scrub_locked(stripe, MayLog(false)).await? {
            Done::All => Ok(()),
            // Nobody may wait for space in the log with the lock of a stripe.
            Done::NeedsLog => {
                self.space.wait_for_rebuild().await?;
                let done = self.scrub_locked(stripe, MayLog(true)).await?;
                assert_eq!(done, Done::All, "there is space in the log");
                Ok(())
            }
        }
    }

    async fn scrub_locked(&self, stripe: Stripe, may_log: MayLog) -> Result<Done, ArrayError> {
        let _lock = self.stripes.exclusive(stripe).await?;
        if self.stripes.is_unwritten(stripe) {
            self.stripes.list_readable(stripe);
            return Ok(Done::All);
        }
        let readable = self.stripes.readable(stripe);
        if readable.len() < self.context.geo.k {
            return Err(self.stripes.list_unreadable(stripe, readable.len()));
        }
        let (all, io) = (0..self.context.geo.strip_blocks, IO.at("scrub.read"));
        readable.iter().for_each(|position| self.strips.forget_trailer(stripe, position));
        let mut found = match self.strips.prove_stripe(stripe, readable, io).await {
            Ok(()) => {
                self.stripes.list_readable(stripe);
                return Ok(Done::All);
            }
            Err(kept) => kept,
        };
        let again: Vec<Position> = readable.iter().filter(|at| !found.contains_key(at)).collect();
        found.extend(self.strips.read_parts(stripe, &again, &all, io).await);
        let bad: Vec<Position> = readable.iter().filter(|at| found[at].is_err()).collect();
        if bad.is_empty() {
            self.stripes.list_readable(stripe);
            if readable == self.context.geo.all_strips() {
                let parts = readable.iter().filter_map(|at| found[&at].as_ref().ok());
                self.strips.check_parity(stripe, &parts.map(|part| &part.data[..]).collect::<Vec<_>>());
            }
            return Ok(Done::All);
        }
        let made = self.strips.make_bad(stripe, &bad, &mut found, io).await;
        let made = made.inspect_err(|_| self.stripes.list(stripe))?;
        assert_eq!(made.len(), bad.len(), "every bad strip was made again, as far as it can be");
        let mut repairs = Vec::new();
        for (position, part) in bad.iter().copied().zip(&made) {
            let repair = Repair::of(found[&position].as_ref(), part);
            let repair = repair.ok_or_else(|| self.disagrees(stripe, position))?;
            // A trailer that cannot be read now, or is read wrong, may be right, and all blocks with it.
            let may_be_right = match &found[&position] {
                Err(Erased::Unreachable) => true,
                Err(Erased::Strip) => !self.strips.is_trailer_lost(stripe, position),
                _ => false,
            };
            if part.lost_columns().is_empty() || !may_be_right {
                repairs.push((position, repair));
            }
        }
        if !may_log.0 && repairs.iter().any(|(_, repair)| repair.writes_trailer()) {
            return Ok(Done::NeedsLog);
        }
        let mut repaired = Ok(());
        for (position, repair) in repairs {
            repaired = self.repair_strip(stripe, position, repair).await;
            if repaired.is_err() {
                break;
            }
        }
        // Those that were written count as they are, whatever became of the others.
        self.members.flush_all(IO.at("scrub.flush")).await?;
        repaired?;
        if made.iter().any(|part| !part.lost_columns().is_empty()) {
            return Err(self.stripes.list_unreadable(stripe, readable.len() - bad.len()));
        }
        self.stripes.list_readable(stripe);
        Ok(Done::All)
    }

    fn disagrees(&self, stripe: Stripe, position: Position) -> ArrayError {
        self.stripes.list(stripe);
        ArrayError::Disagrees { array: self.context.id, stripe: stripe.0, position: position.index() }
    }

    async fn repair_strip(
        &self,
        stripe: Stripe,
        position: Position,
        repair: Repair,
    ) -> Result<(), ArrayError> {
        let version = self.stripes.version(stripe, position);
        let life = self.members.life(self.stripes.member(stripe, position));
        let writes_trailer = repair.writes_trailer();
        let (is_missed, repaired) = match repair {
            Repair::Nothing => return Ok(()),
            Repair::Strip(part) => {
                let landed = self.strips.write_strip(stripe, position, &part, version, WRITE).await?;
                (landed.is_none(), part.crcs.len() as u64 + 1)
            }
            Repair::Part { part, columns } => {
                let payload: Vec<Buf> = columns.iter().map(|at| part.columns(*at..at + 1).data).collect();
                let repaired = columns.len() as u64;
                let columns = columns.into_iter().map(to_u16).collect();
                let patches = [StripPatch { position, version, columns, crcs: part.crcs }];
                let none = Positions::NONE;
                let missed = self.strips.write_patches(stripe, none, &patches, &payload, WRITE).await?;
                (missed != none, repaired)
            }
            Repair::Blocks { part, columns } => {
                let mut repaired = 0;
                for column in columns {
                    let block = part.columns(column..column + 1).data;
                    let landed =
                        self.strips.write_columns(stripe, position, to_u32(column), block, WRITE).await?;
                    repaired += u64::from(landed.is_some());
                }
                (false, repaired)
            }
        };
        if is_missed {
            return Ok(());
        }
        if writes_trailer {
            self.members.flush_all(IO.at("scrub.flush")).await?;
            self.forget_records(stripe, position, life).await?;
        }
        self.context.count(|counts| counts.repaired_blocks += repaired);
        self.members.count_repaired(self.stripes.member(stripe, position), repaired);
        tracing::info!(array = self.context.name, %stripe, %position, repaired, "strip repaired");
        Ok(())
    }

    /// Records that a strip is valid as it is, of which a trailer was written that records in the log do not
    /// have: a redo would bring the older one back.
    async fn forget_records(&self, stripe: Stripe, position: Position, life: Life) -> Result<(), ArrayError> {
        let place = self.stripes.place(stripe, position);
        if self.stripes.map().is_pending(stripe) || self.members.life(place.member) != life {
            return Ok(());
        }
        let (set, clear) = (Positions::NONE, Positions::one(position));
        let version = self.stripes.version(stripe, position);
        let moves = Moves::NONE.with(position, self.stripes.moves(stripe).spare_of(position));
        self.queue.append(Entry::Strips { stripe, set, clear, version, moves }, Vec::new()).await.map(drop)
    }
}

/// Entries may be put into the log, which has space for them.
#[derive(Clone, Copy)]
struct MayLog(bool);

/// The outcome for a stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Done {
    All,
    /// Nothing was repaired: that takes an entry in the log.
    NeedsLog,
}

/// The repair of a strip.
#[derive(Debug)]
enum Repair {
    /// None of its bad blocks can be made.
    Nothing,
    /// All of it is written again.
    Strip(Part),
    /// These columns are written again, and the trailer. Other bytes stay as they are.
    Part { part: Part, columns: Vec<usize> },
    /// These columns are written again.
    Blocks { part: Part, columns: Vec<usize> },
}

impl Repair {
    /// The repair of what was found by what could be made. None if they disagree.
    fn of(found: Result<&Part, &Erased>, made: &Part) -> Option<Self> {
        let hopeless = made.lost_columns();
        let all = 0..made.crcs.len();
        let made_of = |columns: &mut dyn Iterator<Item = usize>| -> Vec<usize> {
            columns.filter(|column| !hopeless.contains(column)).collect()
        };
        let (rotten, bad) = match found {
            // Read block by block, it is good.
            Ok(_) => return Some(Self::Nothing),
            Err(Erased::Unreachable | Erased::Strip) => {
                let columns = made_of(&mut all.clone());
                return Some(match (hopeless.is_empty(), columns.is_empty()) {
                    (true, _) => Self::Strip(made.clone()),
                    // Nothing is gained, and the trailer may have been read wrong.
                    (_, true) => Self::Nothing,
                    _ => Self::Part { part: made.clone(), columns },
                });
            }
            Err(Erased::Blocks { part, bad }) => (part, bad),
        };
        if !rotten.agrees_with(made) {
            return None;
        }
        let columns = made_of(&mut bad.iter().copied());
        let marked = made_of(&mut rotten.lost_columns().into_iter());
        Some(match (columns.is_empty(), marked.is_empty()) {
            (true, _) => Self::Nothing,
            (_, true) => Self::Blocks { part: made.clone(), columns },
            _ => {
                let crcs = all.map(|at| if hopeless.contains(&at) { rotten.crcs[at] } else { made.crcs[at] });
                Self::Part { part: Part { data: made.data.clone(), crcs: crcs.collect() }, columns }
            }
        })
    }

    /// True if the trailer is written, which records in the log may have otherwise.
    fn writes_trailer(&self) -> bool {
        matches!(self, Self::Strip(_) | Self::Part { .. })
    }
}
