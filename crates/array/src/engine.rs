//! The array in memory: what all its operations share, and what it reports about itself.

use crate::carriers::Mending;
use crate::checkpoint::CheckpointState;
use crate::error::ArrayError;
use crate::format::descriptor::Descriptor;
use crate::format::record::Entry;
use crate::geometry::Geometry;
use crate::log::Log;
use crate::maintain::JobProgress;
use crate::member::Member;
use crate::notes::Note;
use crate::overlay::Overlay;
use crate::ownership::{AcceptedLoss, Claim, Ownership};
use crate::roster::Roster;
use crate::strip::TrailerCache;
use crate::table::StripeTable;
use penstock_base::{ArrayId, Env, Histogram, KeyedLocks, Version};
use penstock_drive::{Class, Io};
use penstock_raid::Code;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use tokio::sync::{Mutex, Notify};

/// How long a close waits for a suspended array.
const CLOSE_PATIENCE: std::time::Duration = std::time::Duration::from_secs(10);

/// How many versions one log entry reserves.
pub(crate) const VERSION_RUN: u64 = 1 << 20;

/// A stripe whose strips are written and whose table record is not durable yet.
#[derive(Clone, Debug)]
pub(crate) struct PendingFresh {
    pub(crate) version: Version,
    /// By position, the life of the member under which its strip landed; none if it did not.
    pub(crate) lives: Vec<Option<u64>>,
    /// Data entries of the stripe up to here are void.
    pub(crate) upto: u64,
    /// Data entries that the strips contain.
    pub(crate) contained: Vec<(u32, u64)>,
}

impl PendingFresh {
    /// The strips that are not on their members as these stand now.
    pub(crate) fn stale(&self, members: &[Member]) -> u64 {
        let strips = (0..).zip(self.lives.iter().zip(members));
        strips.filter(|(_, (life, member))| **life != Some(member.life)).map(|(at, _)| 1u64 << at).sum()
    }

    /// The record that makes the stripe written, once its strips are flushed.
    pub(crate) fn entry(&self, stripe: u64, members: &[Member]) -> Entry {
        let Self { version, upto, contained, .. } = self.clone();
        Entry::Fresh { stripe, upto, version, stale: self.stale(members), contained }
    }
}

/// What an array did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Data blocks that went through the log.
    pub logged_blocks: u64,
    /// Whole stripes written past the log.
    pub fresh_stripes: u64,
    /// Stripes destaged, and of them those by read-modify-write, reconstruct-write and as full stripes.
    pub destaged_stripes: u64,
    /// Destages that read the old data and parity.
    pub read_modify_writes: u64,
    /// Destages that read the untouched data.
    pub reconstruct_writes: u64,
    /// Destages that had all data of their columns, or began a stripe.
    pub full_writes: u64,
    /// Reads that needed reconstruction.
    pub degraded_reads: u64,
    /// Blocks, trailers and metadata blocks that did not verify.
    pub checksum_errors: u64,
    /// Blocks and metadata blocks written again from redundancy.
    pub repaired_blocks: u64,
    /// Stripes whose parity disagreed while all strips verified.
    pub parity_defects: u64,
    /// Rounds that made the log durable, by a flush of the carriers or by the write itself.
    pub log_flushes: u64,
    /// Records appended to the log.
    pub log_records: u64,
    /// Checkpoints completed.
    pub checkpoints: u64,
}

/// How long operations of an array took.
#[derive(Default)]
pub struct ArrayLatency {
    /// Reads of a volume.
    pub read: Histogram,
    /// Writes of a volume, until the array's memory holds them: above all, waits for room in the log.
    pub write: Histogram,
    /// Whole stripes past the log.
    pub fresh: Histogram,
    /// Appends of a record to the log, on all carriers.
    pub log_append: Histogram,
    /// Flushes of the log.
    pub log_flush: Histogram,
}

impl ArrayLatency {
    /// Reads and writes of its volumes that were done.
    pub(crate) fn served(&self) -> u64 {
        [&self.read, &self.write, &self.fresh].iter().map(|done| done.count_and_sum().0).sum()
    }
}

/// One array, owned by one worker thread.
pub struct Array {
    pub(crate) env: Env,
    pub(crate) id: ArrayId,
    pub(crate) name: String,
    pub(crate) code: Code,
    pub(crate) geo: Geometry,
    pub(crate) desc: RefCell<Descriptor>,
    pub(crate) members: RefCell<Vec<Member>>,
    pub(crate) table: RefCell<StripeTable>,
    pub(crate) fresh: RefCell<BTreeMap<u64, PendingFresh>>,
    pub(crate) overlay: RefCell<Overlay>,
    pub(crate) order: Cell<u64>,
    pub(crate) log: Log,
    pub(crate) locks: KeyedLocks<u64>,
    pub(crate) trailers: RefCell<TrailerCache>,
    pub(crate) ownership: Rc<dyn Ownership>,
    pub(crate) roster: Rc<Roster>,
    pub(crate) claim: Cell<Claim>,
    /// It was taken over. Before that it records nothing.
    pub(crate) owned: Cell<bool>,
    /// Drives from the past, as its claims name them.
    pub(crate) accepted: Cell<AcceptedLoss>,
    /// Places of members for which a superblock was written in this epoch.
    pub(crate) written: Cell<u64>,
    pub(crate) reconfig: Mutex<()>,
    pub(crate) checkpoint: Mutex<CheckpointState>,
    pub(crate) flush_lock: Mutex<()>,
    pub(crate) destage_lock: Mutex<()>,
    pub(crate) version_lock: Mutex<()>,
    pub(crate) next_version: Cell<u64>,
    pub(crate) reserved_version: Cell<u64>,
    pub(crate) counts: Cell<Counts>,
    pub(crate) latency: ArrayLatency,
    pub(crate) suspended: RefCell<Option<String>>,
    /// Stripes that were never written and cannot be now, with the reason.
    pub(crate) put_off: RefCell<BTreeMap<u64, String>>,
    /// Why it stopped by itself. Nothing takes that back but a new opening.
    pub(crate) stopped: OnceCell<String>,
    pub(crate) closed: Cell<bool>,
    pub(crate) destage_wake: Notify,
    pub(crate) resync_wake: Notify,
    pub(crate) repair_queue: RefCell<BTreeSet<u64>>,
    pub(crate) repair_wake: Notify,
    pub(crate) unreadable: RefCell<BTreeSet<u64>>,
    pub(crate) rebuild: RefCell<Option<JobProgress>>,
    pub(crate) scrub: RefCell<Option<JobProgress>>,
    pub(crate) scrub_stop: Cell<bool>,
    pub(crate) notes: RefCell<VecDeque<Note>>,
    pub(crate) metadata_bad: Cell<bool>,
    pub(crate) mending: Mending,
    /// Somebody waits for room in the log.
    pub(crate) log_short: Cell<bool>,
    /// Blocks of log that the stripes being destaged may take.
    pub(crate) destaging: Cell<u64>,
}

/// An array's condition in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrayState {
    /// Every stripe has all its strips.
    Ok,
    /// Some stripe lacks strips and has redundancy left.
    Degraded,
    /// Some stripe has no redundancy left.
    Critical,
    /// Some data cannot be read.
    Failed,
    /// Writes wait.
    Suspended,
}

impl ArrayState {
    /// The state as one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Critical => "critical",
            Self::Failed => "failed",
            Self::Suspended => "suspended",
        }
    }
}

/// One member as it stands.
#[derive(Clone, Debug)]
pub struct MemberReport {
    /// Its drive.
    pub drive: penstock_base::DriveId,
    /// `active`, `rebuilding` or `missing`.
    pub state: &'static str,
    /// Whether it carries the log and checkpoints.
    pub carrier: bool,
    /// Stripes whose strip on it is not valid.
    pub stale_strips: u64,
}

/// An array as it stands.
#[derive(Clone, Debug)]
pub struct Report {
    /// The array.
    pub id: ArrayId,
    /// Its name.
    pub name: String,
    /// Data and redundancy strips.
    pub code: (usize, usize),
    /// Its condition.
    pub state: ArrayState,
    /// Why writes wait, when they do.
    pub suspended: Option<String>,
    /// Why the array stopped by itself, when it did. It serves nothing until it is opened again.
    pub stopped: Option<String>,
    /// Stripes with fewer valid strips than the code has.
    pub redundancy_debt_stripes: u64,
    /// Copies of log and checkpoint that are missing.
    pub missing_carriers: u64,
    /// Stripes that could not be read when last tried.
    pub unreadable_stripes: u64,
    /// Stripes in the array, and with data.
    pub stripes: (u64, u64),
    /// Bytes of data in a stripe.
    pub stripe_bytes: u64,
    /// Share of the log in use, in percent.
    pub log_used_percent: u64,
    /// Data blocks in the log that wait for their strips.
    pub dirty_blocks: u64,
    /// The members by position.
    pub members: Vec<MemberReport>,
    /// What it did.
    pub counts: Counts,
    /// A running rebuild.
    pub rebuild: Option<JobProgress>,
    /// A running scrub.
    pub scrub: Option<JobProgress>,
}

/// Strips of one stripe that can be lost: the state of an array follows from the worst one.
fn state_of(lost: usize, m: usize) -> ArrayState {
    match lost {
        0 => ArrayState::Ok,
        lost if lost < m => ArrayState::Degraded,
        lost if lost == m => ArrayState::Critical,
        _ => ArrayState::Failed,
    }
}

impl Array {
    /// The array's name for life.
    pub fn id(&self) -> ArrayId {
        self.id
    }

    /// The array's name for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The geometry of its slices.
    pub fn geometry(&self) -> Geometry {
        self.geo
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    /// How long its operations took.
    pub fn latency(&self) -> &ArrayLatency {
        &self.latency
    }

    /// What it did since it was opened.
    pub fn counts(&self) -> Counts {
        self.counts.get()
    }

    /// A version that was never given before.
    pub(crate) async fn new_version(&self) -> Result<Version, ArrayError> {
        let _one_at_a_time = self.version_lock.lock().await;
        if self.next_version.get() >= self.reserved_version.get() {
            self.reserve_versions().await?;
        }
        let version = self.next_version.get() + 1;
        self.next_version.set(version);
        assert!(version <= self.reserved_version.get(), "a version is used only from a reserved run");
        Ok(Version(version))
    }

    pub(crate) fn next_order(&self) -> u64 {
        let order = self.order.get() + 1;
        self.order.set(order);
        order
    }

    pub(crate) fn is_unwritten(&self, stripe: u64) -> bool {
        !self.table.borrow().is_written(stripe) && !self.fresh.borrow().contains_key(&stripe)
    }

    /// Strips that are recorded as not valid.
    pub(crate) fn stale_strips(&self, stripe: u64) -> u64 {
        match self.fresh.borrow().get(&stripe) {
            Some(pending) => pending.stale(&self.members.borrow()),
            None => self.table.borrow().stale(stripe),
        }
    }

    pub(crate) fn expected_version(&self, stripe: u64, position: usize) -> Version {
        match self.fresh.borrow().get(&stripe) {
            Some(pending) => pending.version,
            None => self.table.borrow().version(stripe, position),
        }
    }

    /// Stripes with fewer valid strips than the code has.
    pub fn redundancy_debt_stripes(&self) -> u64 {
        let (written, with_stale) = self.table.borrow().counts();
        let absent = self.members.borrow().iter().any(|member| member.reachable().is_none());
        if absent { written } else { with_stale }
    }

    /// Copies of log and checkpoints that are missing. One is, while superblocks that name it may not be written.
    pub fn missing_carriers(&self) -> u64 {
        let members = self.members.borrow();
        let desc = self.desc.borrow();
        let good = desc.carriers.iter().filter(|carrier| {
            let member = &members[usize::from(**carrier)];
            !member.stale && member.reachable().is_some()
        });
        let wanted = self.geo.carriers();
        let bad_copy = u64::from(self.metadata_bad.get());
        let missing = (wanted - good.count().min(wanted)) as u64;
        missing + bad_copy + u64::from(self.mending.is_recorded_now())
    }

    /// Why writes wait, or what they leave in the log does.
    pub fn suspended(&self) -> Option<String> {
        self.suspended.borrow().clone().or_else(|| self.put_off.borrow().values().next().cloned())
    }

    fn state(&self) -> ArrayState {
        if self.stopped.get().is_some() {
            return ArrayState::Failed;
        }
        if self.suspended().is_some() {
            return ArrayState::Suspended;
        }
        if !self.unreadable.borrow().is_empty() {
            return ArrayState::Failed;
        }
        let members = self.members.borrow();
        let absent: u64 =
            (0..).zip(members.iter()).filter(|(_, m)| m.reachable().is_none()).map(|(i, _)| 1 << i).sum();
        let worst = self.table.borrow().worst(absent) as usize;
        match state_of(worst, self.geo.m) {
            ArrayState::Ok if self.missing_carriers() > 0 || absent != 0 => ArrayState::Degraded,
            state => state,
        }
    }

    /// The array as it stands.
    pub fn report(&self) -> Report {
        let desc = self.desc.borrow();
        let table = self.table.borrow();
        let held = self.members.borrow();
        let members = held.iter().enumerate().map(|(position, member)| MemberReport {
            drive: desc.members[position].drive,
            state: match (member.reachable(), member.stale) {
                (None, _) => "missing",
                (Some(_), true) => "rebuilding",
                (Some(_), false) => "active",
            },
            carrier: desc.carriers.contains(&(position as u16)),
            stale_strips: match member.reachable() {
                None => table.counts().0,
                Some(_) => table.count_stale(1 << position),
            },
        });
        Report {
            id: self.id,
            name: self.name.clone(),
            code: (self.geo.k, self.geo.m),
            state: self.state(),
            suspended: self.suspended(),
            stopped: self.stopped.get().cloned(),
            redundancy_debt_stripes: self.redundancy_debt_stripes(),
            missing_carriers: self.missing_carriers(),
            unreadable_stripes: self.unreadable.borrow().len() as u64,
            stripes: (self.geo.stripes, table.counts().0),
            stripe_bytes: u64::from(self.geo.stripe_blocks()) * penstock_base::BLOCK_BYTES as u64,
            log_used_percent: self.log.used_percent(),
            dirty_blocks: self.overlay.borrow().blocks(),
            members: members.collect(),
            counts: self.counts.get(),
            rebuild: *self.rebuild.borrow(),
            scrub: *self.scrub.borrow(),
        }
    }

    /// Stripes that could not be read when last tried.
    pub fn unreadable_stripes(&self) -> Vec<u64> {
        self.unreadable.borrow().iter().copied().collect()
    }

    /// Whether the array survives the loss of these drives as well: of their strips, and of their copies of the log,
    /// which until carriers are mended may be the last.
    pub fn survives(&self, drives: &[penstock_base::DriveId]) -> bool {
        let (members, desc) = (self.members.borrow(), self.desc.borrow());
        let lost = |at: usize| {
            members[at].stale || members[at].reachable().is_none() || drives.contains(&desc.members[at].drive)
        };
        let all_lost = (0..members.len()).filter(|at| lost(*at)).count();
        all_lost <= self.geo.m && desc.carriers.iter().any(|carrier| !lost(usize::from(*carrier)))
    }

    /// Whether a drive holds a member that is not lost already.
    pub(crate) fn uses(&self, drive: penstock_base::DriveId) -> bool {
        self.position_of(drive).is_some_and(|at| !self.members.borrow()[at].stale)
    }

    /// The position of the member on a drive.
    pub fn position_of(&self, drive: penstock_base::DriveId) -> Option<usize> {
        self.desc.borrow().members.iter().position(|member| member.drive == drive)
    }

    /// Offset and length of the slice that a drive gives to the array.
    pub fn slice_of(&self, drive: penstock_base::DriveId) -> Option<(u64, u64)> {
        let desc = self.desc.borrow();
        desc.members.iter().find(|member| member.drive == drive).map(|member| (member.offset, member.len))
    }

    /// Whether the drive of a member is in its place; not one that is only recorded there.
    pub fn is_in_place(&self, position: usize) -> bool {
        self.members.borrow()[position].slice.is_some()
    }

    /// The kernel that codes its stripes.
    pub fn code_path(&self) -> &'static str {
        self.code.kernel().name()
    }

    /// Whether it was closed or stopped.
    pub fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// Starts the task that replaces lost carriers.
    pub(crate) fn start_carriers(self: &Rc<Self>) {
        self.env.spawn("array carriers", Box::pin(self.clone().carriers_task()));
        self.want_mending();
    }

    /// Starts the array's other tasks: log writer, destage, repair and resync.
    pub(crate) fn start(self: &Rc<Self>) {
        self.env.spawn("array log", Box::pin(self.clone().log_task()));
        self.env.spawn("array destage", Box::pin(self.clone().destage_task()));
        self.env.spawn("array repair", Box::pin(self.clone().repair_task()));
        self.env.spawn("array resync", Box::pin(self.clone().resync_task()));
    }

    /// Makes everything durable, empties the log into the strips and stops the array's tasks. An array that stays
    /// suspended is stopped as it is, and that is an error: what was flushed is in the log.
    pub async fn close(self: &Rc<Self>) -> Result<(), ArrayError> {
        let work = async {
            // The next opening needs no record from before: a bad block there is no harm. Worth a segment, but none of the reserve.
            if self.has_reserve() {
                self.begin_another_segment().await?;
            }
            self.destage_and_checkpoint().await?;
            self.write_checkpoint().await
        };
        let result =
            match futures_util::future::select(std::pin::pin!(work), std::pin::pin!(self.stuck())).await {
                futures_util::future::Either::Left((result, _)) => result,
                futures_util::future::Either::Right((why, _)) => Err(ArrayError::Suspended(why)),
            };
        self.stop();
        result
    }

    /// Returns when writes have been suspended for as long as a close waits, with the reason.
    async fn stuck(&self) -> String {
        let mut since = None;
        loop {
            self.env.sleep(CLOSE_PATIENCE / 20).await;
            let full = || self.log.is_full().then(|| "the log is full".to_owned());
            let why = self.suspended.borrow().clone().or_else(full);
            let now = self.env.now();
            match (why, since) {
                (None, _) => since = None,
                (Some(_), None) => since = Some(now),
                (Some(why), Some(began)) if now - began >= CLOSE_PATIENCE => return why,
                _ => {}
            }
        }
    }

    /// Empties the log into the strips and writes a checkpoint.
    pub async fn destage_and_checkpoint(&self) -> Result<(), ArrayError> {
        self.flush(Io::new(Class::Client, "array.close")).await?;
        self.destage_all().await
    }

    /// Stops the array for a reason that only a new opening takes away. The first reason stays.
    pub(crate) fn stop_because(&self, why: String) {
        tracing::error!(array = self.name, why, "the array stops until it is opened again");
        // A second reason follows from the first.
        let _ = self.stopped.set(why);
        self.stop();
    }

    /// Why the array stopped by itself, if it did.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.get().map(String::as_str)
    }

    /// Stops the array's tasks as they are.
    pub fn stop(&self) {
        self.closed.set(true);
        self.log.shut();
        self.destage_wake.notify_one();
        self.repair_wake.notify_one();
        self.resync_wake.notify_one();
        self.mending.wake();
    }
}
