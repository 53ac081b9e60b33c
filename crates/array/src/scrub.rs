//! Scrub: every strip of every written stripe is read and verified, parity is computed and compared, and what is
//! wrong is written again from what is right.
//!
//! A scrub can be stopped and gone on with. Stripes written behind its position meanwhile are verified by the next one.
//!
//! A repair keeps the strip's version: the bytes are those that the version names. Parity that disagrees while all
//! strips verify is a defect of ours: it is reported and kept.

use crate::engine::{Array, Counts};
use crate::error::ArrayError;
use crate::maintain::{JobProgress, MOST_PAUSE};
use crate::member::WhenSuspended;
use crate::strip::{Erased, Part, parts_to_keep};
use penstock_base::{BLOCK_BYTES, HashMap};
use penstock_drive::{Class, Io};
use penstock_raid::Fault;
use std::cell::RefCell;

const IO: Io = Io::new(Class::Scrub, "scrub.repair");

/// What a scrub found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Stripes verified.
    pub stripes: u64,
    /// Blocks, trailers and metadata blocks that were not what was written.
    pub checksum_errors: u64,
    /// Blocks and metadata blocks written again.
    pub repaired_blocks: u64,
    /// Stripes whose parity disagreed while all strips verified.
    pub parity_defects: u64,
    /// Stripes that cannot be read.
    pub unreadable: Vec<u64>,
}

impl ScrubReport {
    /// Whether nothing was wrong.
    pub fn is_clean(&self) -> bool {
        self.checksum_errors == 0 && self.parity_defects == 0 && self.unreadable.is_empty()
    }
}

/// How far a scrub is. Whoever keeps it over a restart can go on with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubProgress {
    /// The stripe to go on with.
    pub next_stripe: u64,
    /// Nanoseconds since 1970 when it began.
    pub started_ns: i64,
    /// What it found so far.
    pub report: ScrubReport,
}

/// How much of the array's time a scrub takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// One stripe after the other.
    Full,
    /// After each stripe a rest as long as the stripe took.
    Gentle,
}

impl Array {
    /// Scrubs the whole array: metadata first, then every written stripe.
    pub async fn scrub(&self) -> Result<ScrubReport, ArrayError> {
        let progress = RefCell::default();
        let report = self.scrub_from(&progress, Pace::Full).await?;
        Ok(report.expect("nobody else stops this scrub"))
    }

    /// Scrubs metadata and every written stripe from `progress` on, which moves along. None when it was stopped on the
    /// way ([`Array::stop_scrub`]). One scrub at a time: the caller sees to it.
    pub async fn scrub_from(
        &self,
        progress: &RefCell<ScrubProgress>,
        pace: Pace,
    ) -> Result<Option<ScrubReport>, ArrayError> {
        self.scrub_stop.set(false);
        let result = self.scrub_all(progress, pace).await;
        *self.scrub.borrow_mut() = None;
        Ok(result?.then(|| progress.borrow().report.clone()))
    }

    /// Makes a running scrub end before its next stripe.
    pub fn stop_scrub(&self) {
        self.scrub_stop.set(true);
    }

    /// Returns whether it came to the end.
    async fn scrub_all(&self, progress: &RefCell<ScrubProgress>, pace: Pace) -> Result<bool, ArrayError> {
        let base = (self.counts(), progress.borrow().report.clone());
        let mut job = JobProgress {
            done_stripes: base.1.stripes,
            done_before: base.1.stripes,
            total_stripes: self.table.borrow().counts().0,
            failed_stripes: base.1.unreadable.len() as u64,
            started_ns: self.env.wall_ns(),
        };
        *self.scrub.borrow_mut() = Some(job);
        self.scrub_metadata().await?;
        loop {
            self.tally(&mut progress.borrow_mut().report, &base);
            let from = progress.borrow().next_stripe;
            let next = self.table.borrow().find_written(from, |_| true);
            let Some(stripe) = next else { return Ok(true) };
            let began = self.env.now();
            match self.scrub_stripe(stripe).await {
                Ok(()) => {}
                Err(ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. }) => {
                    job.failed_stripes += 1;
                    progress.borrow_mut().report.unreadable.push(stripe);
                }
                // The same stripe again, unless it is to stop.
                Err(ArrayError::Suspended(why)) => {
                    self.suspend(why).await?;
                    match self.scrub_stop.get() {
                        true => return Ok(false),
                        false => continue,
                    }
                }
                Err(error) => return Err(error),
            }
            job.done_stripes += 1;
            progress.borrow_mut().report.stripes = job.done_stripes;
            progress.borrow_mut().next_stripe = stripe + 1;
            self.tally(&mut progress.borrow_mut().report, &base);
            *self.scrub.borrow_mut() = Some(job);
            if self.closed.get() {
                return Err(ArrayError::Closed);
            }
            if self.scrub_stop.get() {
                return Ok(false);
            }
            if pace == Pace::Gentle {
                let took = self.env.now().saturating_sub(began);
                self.env.sleep(took.min(MOST_PAUSE)).await;
            }
        }
    }

    /// What was found until now: what was before this start, and what the array has counted since.
    fn tally(&self, report: &mut ScrubReport, (before, found): &(Counts, ScrubReport)) {
        let now = self.counts();
        report.checksum_errors = found.checksum_errors + now.checksum_errors - before.checksum_errors;
        report.repaired_blocks = found.repaired_blocks + now.repaired_blocks - before.repaired_blocks;
        report.parity_defects = found.parity_defects + now.parity_defects - before.parity_defects;
    }

    /// Verifies one stripe and repairs it. Fails while writes are suspended, and does not hold it then.
    pub(crate) async fn scrub_stripe(&self, stripe: u64) -> Result<(), ArrayError> {
        let _lock = self.locks.exclusive(stripe).await;
        if self.is_unwritten(stripe) {
            return Ok(());
        }
        let whole = 0..self.geo.strip_blocks;
        let positions = self.readable(stripe);
        for position in &positions {
            self.trailers.borrow_mut().forget(stripe, *position);
        }
        let mut found = match self.prove_whole(stripe, &positions).await {
            Ok(()) => {
                self.unreadable.borrow_mut().remove(&stripe);
                return Ok(());
            }
            Err(kept) => kept,
        };
        let again: Vec<usize> = positions.iter().copied().filter(|at| !found.contains_key(at)).collect();
        found.extend(self.read_parts(stripe, &again, &whole, IO.at("scrub.read")).await);
        let bad: Vec<usize> = positions.iter().copied().filter(|at| found[at].is_err()).collect();
        if bad.is_empty() {
            self.unreadable.borrow_mut().remove(&stripe);
            self.check_parity(stripe, &positions, &found);
            return Ok(());
        }
        let made = self.recover(stripe, &bad, &whole, IO.at("scrub.read")).await.inspect_err(|_| {
            self.unreadable.borrow_mut().insert(stripe);
        })?;
        for (position, part) in bad.iter().zip(&made) {
            let erased = found[position].as_ref().expect_err("it is bad");
            self.repair_strip(stripe, *position, erased, part).await?;
        }
        self.flush_members(IO.at("scrub.flush")).await?;
        self.unreadable.borrow_mut().remove(&stripe);
        Ok(())
    }

    async fn repair_strip(
        &self,
        stripe: u64,
        position: usize,
        erased: &Erased,
        part: &Part,
    ) -> Result<(), ArrayError> {
        let repaired = match erased {
            Erased::Unreachable | Erased::Strip => {
                let version = self.expected_version(stripe, position);
                match self.write_strip(stripe, position, part, version, IO, WhenSuspended::Fail).await? {
                    Some(_) => u64::from(self.geo.strip_blocks) + 1,
                    None => 0,
                }
            }
            Erased::Blocks { part: rotten, bad } => {
                if rotten.crcs != part.crcs {
                    return Err(ArrayError::Disagrees { array: self.id, stripe, position });
                }
                let mut repaired = 0;
                for column in bad {
                    let bytes = column * BLOCK_BYTES..(column + 1) * BLOCK_BYTES;
                    let block = (self.geo.block_at(stripe, *column as u32), part.data.slice(bytes));
                    let landed =
                        self.write_in_strip(stripe, position, block, IO, WhenSuspended::Fail).await?;
                    repaired += u64::from(landed.is_some());
                }
                repaired
            }
        };
        self.count(|counts| counts.repaired_blocks += repaired);
        if let Some(slice) = &self.members.borrow()[position].slice {
            slice.drive().count_repaired(repaired);
        }
        tracing::info!(array = self.name, stripe, position, repaired, "strip repaired");
        Ok(())
    }

    /// Proves all strips of a stripe in the one pass that also computes parity. Where they are not all there and what
    /// their trailers say, returns those that need no second read.
    async fn prove_whole(
        &self,
        stripe: u64,
        positions: &[usize],
    ) -> Result<(), HashMap<usize, Result<Part, Erased>>> {
        if positions.len() < self.geo.strips() {
            return Err(HashMap::default());
        }
        let whole = 0..self.geo.strip_blocks;
        let found = self.read_unproved_parts(stripe, positions, &whole, IO.at("scrub.read")).await;
        let Some(parts) = found.iter().map(|part| part.as_ref().ok()).collect::<Option<Vec<&Part>>>() else {
            return Err(parts_to_keep(positions, found));
        };
        let strips: Vec<&[u8]> = parts.iter().map(|part| &part.data[..]).collect();
        let (data, parity) = strips.split_at(self.geo.k);
        let mut crcs = vec![0; parts.len() * whole.len()];
        let agrees = self.code.verify_checked(data, parity, &mut crcs);
        let proved = parts.iter().flat_map(|part| &part.crcs).eq(&crcs);
        if !proved {
            return Err(parts_to_keep(positions, found));
        }
        if !agrees {
            self.note_parity_defect(stripe, data, parity);
        }
        Ok(())
    }

    fn check_parity(&self, stripe: u64, positions: &[usize], found: &HashMap<usize, Result<Part, Erased>>) {
        if positions.len() < self.geo.strips() {
            return;
        }
        let strips: Vec<&[u8]> =
            positions.iter().filter_map(|at| Some(&found[at].as_ref().ok()?.data[..])).collect();
        let (data, parity) = strips.split_at(self.geo.k);
        if !self.code.verify(data, parity) {
            self.note_parity_defect(stripe, data, parity);
        }
    }

    fn note_parity_defect(&self, stripe: u64, data: &[&[u8]], parity: &[&[u8]]) {
        self.count(|counts| counts.parity_defects += 1);
        // What is written there says that all is right, so which strip is odd only tells where to look for the defect.
        let odd = match self.code.locate(data, parity) {
            Fault::Strip(position) => {
                format!("strip {position} is the one that the others do not agree with")
            }
            Fault::Unlocated | Fault::None => "no single strip explains it".to_owned(),
        };
        tracing::error!(
            array = self.name,
            stripe,
            "parity disagrees with data that verifies, and {odd}: a defect, kept as it is"
        );
    }
}
