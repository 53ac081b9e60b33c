//! Scrubs, one of each array at a time: requested or scheduled ones, and the record of past ones.
//!
//! `scrubs.json` in the store's folder contains, for each array, the result of its last scrub and the
//! progress of a running one, so a restart continues it and repeats a few seconds at most. The file is a
//! convenience, like `store.json`: without it a scrub is due one period after the store was made, that is at
//! once for an older store, and nothing else is lost.
//!
//! Scheduled scrubs pause after each stripe for as long as the stripe took. A requested scrub does not, and
//! replaces a scheduled one that is running.

use crate::drive_set::DriveSet;
use crate::error::AdminError;
use crate::event::{EventKind, Severity, array_object, drive_object};
use crate::events::Events;
use crate::keeper::Keeper;
use crate::report::ScrubSummary;
use crate::scrub_record::ScrubRecord;
use penstock_array::{Array, ArrayError, Pace, ScrubProgress, ScrubReport};
use penstock_base::{ArrayId, Env, KeyedLocks};
use penstock_drive::copies::Scrubbed;
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

/// Name of the file with the records in the store's folder.
pub const SCRUBS_FILE: &str = "scrubs.json";
/// Interval between checks for scrubs that are due.
const ASK: Duration = Duration::from_secs(60);
/// Interval at which the member of a running scrub is saved.
const KEEP: Duration = Duration::from_secs(5);
/// Pause after a scheduled scrub that failed.
const RETRY: Duration = Duration::from_secs(3600);
/// Most unreadable stripes that are recorded by number.
const UNREADABLE_MOST: usize = 1000;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct OfArray {
    last: Option<ScrubRecord>,
    running: Option<ScrubRecord>,
}

#[derive(Serialize, Deserialize)]
struct Contents {
    format: u32,
    arrays: BTreeMap<String, OfArray>,
}

/// The scrubs of a store's arrays.
pub(crate) struct Scrubs {
    env: Env,
    drives: Rc<DriveSet>,
    events: Rc<Events>,
    /// Time at which the store was made, in nanoseconds since 1970.
    created_ns: i64,
    records: RefCell<BTreeMap<ArrayId, OfArray>>,
    one: KeyedLocks<ArrayId>,
    /// Arrays with a running scrub that was scheduled, not requested.
    scheduled: RefCell<BTreeSet<ArrayId>>,
    keeper: RefCell<Option<Rc<dyn Keeper>>>,
    period: Cell<Option<Duration>>,
    failing: Cell<bool>,
}

fn progress_of(record: &ScrubRecord) -> ScrubProgress {
    ScrubProgress {
        next_stripe: record.next_stripe,
        started_ns: record.started_ns,
        report: ScrubReport {
            stripes: record.stripes,
            checksum_errors: record.checksum_errors,
            repaired_blocks: record.repaired_blocks,
            parity_defects: record.parity_defects,
            unreadable: record.unreadable_stripes.clone(),
        },
    }
}

/// Copies of superblocks and labels that a scrub found bad, and those of them that it repaired.
#[derive(Clone, Copy, Default)]
struct Copies {
    bad: u64,
    repaired: u64,
}

impl Copies {
    fn add(&mut self, found: &Scrubbed) {
        // A copy that could not be verified does not count as good.
        let unknown = u64::from(found.bad == 0 && found.failed.is_some());
        self.bad += found.bad + unknown;
        self.repaired += found.repaired;
    }
}

fn record_of(progress: &ScrubProgress, copies: Copies, ended_ns: i64) -> ScrubRecord {
    let ScrubProgress { next_stripe, started_ns, report } = progress;
    ScrubRecord {
        started_ns: *started_ns,
        ended_ns,
        next_stripe: *next_stripe,
        stripes: report.stripes,
        checksum_errors: report.checksum_errors.saturating_add(copies.bad),
        repaired_blocks: report.repaired_blocks.saturating_add(copies.repaired),
        parity_defects: report.parity_defects,
        unreadable_stripes: report.unreadable.iter().copied().take(UNREADABLE_MOST).collect(),
    }
}

impl Scrubs {
    /// The scrubs of the arrays on `drives`; none is scheduled. The store was made at `created_ns`.
    pub(crate) fn new(env: &Env, drives: &Rc<DriveSet>, events: &Rc<Events>, created_ns: i64) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            drives: drives.clone(),
            events: events.clone(),
            created_ns,
            records: RefCell::default(),
            one: KeyedLocks::default(),
            scheduled: RefCell::default(),
            keeper: RefCell::default(),
            period: Cell::new(None),
            failing: Cell::new(false),
        })
    }

    /// Result of the last scrub of an array; none if none has ended.
    pub(crate) fn last(&self, array: ArrayId) -> Option<ScrubRecord> {
        self.records.borrow().get(&array)?.last.clone()
    }

    fn change(&self, array: ArrayId, change: impl FnOnce(&mut OfArray)) {
        change(self.records.borrow_mut().entry(array).or_default());
    }

    fn load(&self, bytes: &[u8]) -> Result<(), String> {
        let found: Contents = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if found.format != 1 {
            return Err(format!("format {}, from a later release", found.format));
        }
        let row = |(id, record): (String, OfArray)| Some((ArrayId(id.parse().ok()?), record));
        *self.records.borrow_mut() = found.arrays.into_iter().filter_map(row).collect();
        Ok(())
    }

    async fn save(&self) {
        let Some(keeper) = self.keeper.borrow().clone() else { return };
        let row = |(id, record): (&ArrayId, &OfArray)| (id.to_string(), record.clone());
        let contents = Contents { format: 1, arrays: self.records.borrow().iter().map(row).collect() };
        let result = match serde_json::to_vec_pretty(&contents) {
            Ok(bytes) => keeper.save(bytes).await,
            Err(error) => Err(error.to_string()),
        };
        match result {
            Ok(()) => self.failing.set(false),
            Err(why) if self.failing.replace(true) => tracing::debug!(why, "scrubs not kept"),
            Err(why) => tracing::warn!(why, "scrub progress cannot be saved: a restart begins anew"),
        }
    }

    /// Saves the state of scrubs with `keeper`, and scrubs each array when `period` has passed since its last
    /// scrub; none for never.
    pub(crate) fn schedule(self: &Rc<Self>, period: Option<Duration>, keeper: Rc<dyn Keeper>) {
        let loaded = keeper.load().and_then(|bytes| bytes.map_or(Ok(()), |bytes| self.load(&bytes)));
        if let Err(why) = loaded {
            tracing::warn!(why, "past scrubs are unknown: scrubs are due by the age of the store");
        }
        *self.keeper.borrow_mut() = Some(keeper);
        self.period.set(period);
        match period {
            Some(_) => self.env.spawn("scrubs", Box::pin(self.clone().run())),
            // No task will continue an interrupted scrub.
            None => self.records.borrow_mut().values_mut().for_each(|record| record.running = None),
        }
    }

    /// Time at which the next scrub of an array is due, in nanoseconds since 1970; none if scrubs are not
    /// scheduled.
    pub(crate) fn next_ns(&self, array: ArrayId) -> Option<i64> {
        let period_ns = i64::try_from(self.period.get()?.as_nanos()).ok()?;
        let since = self.last(array).map_or(self.created_ns, |last| last.ended_ns);
        since.checked_add(period_ns)
    }

    async fn run(self: Rc<Self>) {
        let mut not_before: BTreeMap<ArrayId, Duration> = BTreeMap::new();
        while !self.drives.arrays().iter().any(|array| array.is_closed()) {
            for array in self.drives.arrays() {
                let running = self.records.borrow().get(&array.id()).and_then(|of| of.running.clone());
                let due = self.next_ns(array.id()).is_some_and(|at| at <= self.env.wall_ns());
                let waits = not_before.get(&array.id()).is_some_and(|at| self.env.now() < *at);
                if waits || !due && running.is_none() {
                    continue;
                }
                if let Err(error) = self.run_scrub(array, running, Pace::Gentle).await
                    && !matches!(error, AdminError::Array(ArrayError::Closed))
                {
                    tracing::warn!(array = array.name(), %error, "a scheduled scrub failed");
                    not_before.insert(array.id(), self.env.now() + RETRY);
                }
            }
            self.env.sleep(ASK).await;
        }
    }

    /// Scrubs an array, its labels and the superblocks of its drives, from the beginning and without pauses.
    pub(crate) async fn scrub(&self, array: &Rc<Array>) -> Result<ScrubSummary, AdminError> {
        if self.scheduled.borrow().contains(&array.id()) {
            array.stop_scrub();
        }
        let (record, superblocks_repaired) = self
            .run_scrub(array, None, Pace::Full)
            .await?
            .ok_or_else(|| AdminError::Refused("the scrub was stopped".into()))?;
        Ok(ScrubSummary {
            array: array.name().to_owned(),
            stripes: record.stripes,
            checksum_errors: record.checksum_errors,
            repaired_blocks: record.repaired_blocks,
            parity_defects: record.parity_defects,
            clean: record.is_clean(),
            unreadable_stripes: record.unreadable_stripes,
            superblocks_repaired,
        })
    }

    /// Runs one scrub and saves its progress. Returns its record and the number of copies of superblocks and
    /// labels repaired; none if it was stopped.
    async fn run_scrub(
        &self,
        array: &Rc<Array>,
        from: Option<ScrubRecord>,
        pace: Pace,
    ) -> Result<Option<(ScrubRecord, u64)>, AdminError> {
        let id = array.id();
        let _one = self.one.exclusive(id).await;
        if pace == Pace::Gentle {
            self.scheduled.borrow_mut().insert(id);
        }
        let result = self.run_alone(array, from, pace).await;
        self.scheduled.borrow_mut().remove(&id);
        let object = array_object(array);
        match &result {
            Ok(Some((record, _))) => {
                let severity = if record.is_clean() { Severity::Info } else { Severity::Warning };
                self.events.add(severity, EventKind::ScrubEnded, object, record.text());
            }
            Ok(None) => {
                let text = "scrub stopped: one that was asked for takes its place";
                self.events.add(Severity::Info, EventKind::ScrubEnded, object, text);
            }
            Err(AdminError::Array(ArrayError::Closed)) => {}
            Err(error) => {
                let text = format!("scrub ended early: {error}");
                self.events.add(Severity::Warning, EventKind::ScrubEnded, object, text);
            }
        }
        result
    }

    async fn run_alone(
        &self,
        array: &Rc<Array>,
        from: Option<ScrubRecord>,
        pace: Pace,
    ) -> Result<Option<(ScrubRecord, u64)>, AdminError> {
        let id = array.id();
        let text = match &from {
            None => "scrub begun".to_owned(),
            Some(from) => format!("scrub goes on at stripe {}", from.next_stripe),
        };
        self.events.add(Severity::Info, EventKind::ScrubBegun, array_object(array), text);
        let copies = if from.is_none() { self.scrub_copies(array).await } else { Copies::default() };
        let progress = RefCell::new(match &from {
            Some(record) => progress_of(record),
            None => ScrubProgress { started_ns: self.env.wall_ns(), ..ScrubProgress::default() },
        });
        let keep = self.keep_position(id, &progress, copies);
        let scrub = array.scrub_from(&progress, pace);
        let result = match futures_util::future::select(std::pin::pin!(scrub), std::pin::pin!(keep)).await {
            futures_util::future::Either::Left((result, _)) => result,
            futures_util::future::Either::Right((never, _)) => match never {},
        };
        let found = result?;
        let record = record_of(&progress.borrow(), copies, self.env.wall_ns());
        self.change(id, |of| {
            of.running = None;
            if found.is_some() {
                of.last = Some(record.clone());
            }
        });
        self.save().await;
        Ok(found.map(|_| (record, copies.repaired)))
    }

    /// Saves the member of a running scrub at intervals, until the caller drops the future.
    async fn keep_position(
        &self,
        array: ArrayId,
        progress: &RefCell<ScrubProgress>,
        copies: Copies,
    ) -> Infallible {
        loop {
            let record = record_of(&progress.borrow(), copies, 0);
            self.change(array, |of| of.running = Some(record));
            self.save().await;
            self.env.sleep(KEEP).await;
        }
    }

    /// Scrubs the labels of an array and the superblocks of its drives. One that cannot be repaired is told,
    /// and keeps nothing else from being scrubbed.
    async fn scrub_copies(&self, array: &Rc<Array>) -> Copies {
        let mut all = Copies::default();
        let drives = self.drives.drives();
        for drive in drives.iter().filter(|drive| drive.is_online() && array.member_on(drive.id()).is_some())
        {
            let found = drive.scrub_superblock().await;
            all.add(&found);
            if let Some(error) = &found.failed {
                let text = format!("its superblock is bad and was not repaired: {error}");
                self.events.add(Severity::Warning, EventKind::ScrubEnded, drive_object(drive.id()), text);
            }
        }
        let labels = array.scrub_labels().await;
        all.add(&labels);
        if let Some(error) = &labels.failed {
            let text = format!("a label is bad and not repaired yet: {error}");
            self.events.add(Severity::Warning, EventKind::ScrubEnded, array_object(array), text);
        }
        all
    }
}
