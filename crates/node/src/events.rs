//! What happened, for people: numbered events, the last ones in memory, all of them in files where a process keeps
//! some ([`EventFiles`]). Writing them is never in the way of the worker: a task hands batches to a thread.
//!
//! Invariants: a number is never given twice in a store's folder; the order of events is the order of their numbers;
//! what overflows the memory before it is written is lost, and an event says how much.

use crate::event_files::{EventFiles, Kept};
use penstock_base::Env;
use penstock_drive::runtime::blocking;
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// Events in memory.
pub(crate) const IN_MEMORY: usize = 1000;
/// Pause before a write that failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// How much an event matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Good to know.
    Info,
    /// Redundancy, speed or space is less than it should be.
    Warning,
    /// A person must act.
    Error,
}

/// What kind of thing happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The instance runs.
    Started,
    /// The instance stopped and everything is durable.
    Stopped,
    /// The instance stopped and could not make everything durable.
    StopFailed,
    /// The instance did not come up.
    StartFailed,
    /// The instance before this one ended without stopping: killed, crashed or without power.
    UncleanEnd,
    /// A drive failed, or was failed by an administrator.
    DriveFailed,
    /// A drive that the store names was not found.
    DriveMissing,
    /// Something in a drive's place was not used.
    DriveUnused,
    /// A drive that was missing or failed is in use again.
    DriveBack,
    /// A drive was as it had been a while ago, and is made again from the others.
    DriveOutdated,
    /// An array was started without drives that have what no other has, by the word of an administrator.
    LossAccepted,
    /// A blank drive took the place of another one.
    DriveReplaced,
    /// A drive answers much more slowly than the others.
    DriveSlow,
    /// A slow drive answers as the others do.
    DriveSlowOver,
    /// A lost drive's strips are being reconstructed.
    RebuildBegun,
    /// They are, or could not all be.
    RebuildEnded,
    /// A returned drive's strips are being brought up to date.
    ResyncBegun,
    /// They are, or could not all be.
    ResyncEnded,
    /// A scrub began or went on after a restart.
    ScrubBegun,
    /// A scrub ended.
    ScrubEnded,
    /// Blocks were written again from redundancy.
    BlocksRepaired,
    /// Writes to an array wait.
    ArraySuspended,
    /// They go on.
    ArrayResumed,
    /// An array's state changed.
    ArrayState,
    /// The store cannot go on by itself: the instance ends, so that its supervisor starts it again.
    StoreFailed,
    /// The store's health changed.
    Health,
    /// A store of blocks or rows passed 80, 90 or 95 % of its space.
    Full,
    /// It fell well below that again.
    FullOver,
    /// The file system was mounted.
    Mounted,
    /// The file system was unmounted.
    Unmounted,
    /// A client of another process was silent for longer than its lease: its session has ended.
    SessionEnded,
    /// A stripe cannot be read.
    StripeUnreadable,
    /// A file has data that cannot be read.
    FileDamaged,
    /// A repair of the file system ended.
    FsRepaired,
    /// Lines of the event files could not be read and were skipped.
    EventsTorn,
    /// Events were lost because they could not be written in time.
    EventsLost,
    /// A kind of a later release.
    #[serde(other)]
    Unknown,
}

/// One event. Format in files: docs/format/events.md.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Its number; goes on over restarts.
    pub seq: u64,
    /// Nanoseconds since 1970.
    pub time_ns: i64,
    /// How much it matters.
    pub severity: Severity,
    /// What kind of thing happened.
    pub kind: EventKind,
    /// What it happened to: `node`, `drive ID`, `array NAME`, `fs NAME` or `inode NUMBER`.
    pub object: String,
    /// One sentence.
    pub text: String,
}

/// The list of events.
pub struct Events {
    env: Env,
    seq: Cell<u64>,
    /// Number of the last event in the files.
    kept: Cell<u64>,
    keeping: Cell<bool>,
    recent: RefCell<VecDeque<Event>>,
    wake: Notify,
    written: Notify,
}

impl Events {
    /// An empty list, in memory only.
    pub fn new(env: &Env) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            seq: Cell::new(0),
            kept: Cell::new(0),
            keeping: Cell::new(false),
            recent: RefCell::default(),
            wake: Notify::new(),
            written: Notify::new(),
        })
    }

    /// Adds an event.
    pub fn add(
        &self,
        severity: Severity,
        kind: EventKind,
        object: impl Into<String>,
        text: impl Into<String>,
    ) {
        let seq = self.seq.get() + 1;
        self.seq.set(seq);
        let (object, text) = (object.into(), text.into());
        let event = Event { seq, time_ns: self.env.wall_ns(), severity, kind, object, text };
        let mut recent = self.recent.borrow_mut();
        if recent.len() >= IN_MEMORY {
            recent.pop_front();
        }
        recent.push_back(event);
        self.wake.notify_one();
    }

    /// Events behind a number from memory, oldest first, at most `limit`. None where older ones may be in files.
    pub fn after(&self, seq: u64, limit: usize) -> Option<Vec<Event>> {
        let recent = self.recent.borrow();
        let first = recent.front().map_or(1, |event| event.seq);
        if self.keeping.get() && first > 1 && seq + 1 < first {
            return None;
        }
        Some(recent.iter().filter(|event| event.seq > seq).take(limit).cloned().collect())
    }

    /// The newest event of a drive, array or the like, among those in memory that `fits`.
    pub(crate) fn newest(&self, fits: impl Fn(&Event) -> bool) -> Option<Event> {
        self.recent.borrow().iter().rev().find(|event| fits(event)).cloned()
    }

    /// Keeps all events in files from now on. Those that were added before get numbers behind the ones in the files:
    /// to be called before anybody sees a number.
    pub fn keep_in(self: &Rc<Self>, found: Kept) {
        let Kept { files, recent: mut before, next_seq, .. } = found;
        let mut recent = self.recent.borrow_mut();
        let new = std::mem::take(&mut *recent);
        self.kept.set(next_seq - 1);
        let mut seq = next_seq - 1;
        for mut event in new {
            seq += 1;
            event.seq = seq;
            before.push(event);
        }
        self.seq.set(seq);
        *recent = before.split_off(before.len().saturating_sub(IN_MEMORY)).into();
        drop(recent);
        self.keeping.set(true);
        self.wake.notify_one();
        self.env.spawn("events", Box::pin(self.clone().keep_task(files)));
    }

    async fn keep_task(self: Rc<Self>, mut files: EventFiles) {
        let mut failing = false;
        loop {
            let batch = self.unkept();
            let Some(last) = batch.last().map(|event| event.seq) else {
                self.wake.notified().await;
                continue;
            };
            let (back, result) = blocking(move || {
                let result = files.append(&batch);
                (files, result)
            })
            .await;
            files = back;
            match result {
                Ok(()) => {
                    self.kept.set(last);
                    failing = false;
                    self.written.notify_waiters();
                }
                Err(error) => {
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "events cannot be written and are tried again");
                    }
                    self.env.sleep(RETRY).await;
                }
            }
        }
    }

    /// Events that are not in the files, with one that says how many were lost where the memory was too short.
    fn unkept(&self) -> Vec<Event> {
        let kept = self.kept.get();
        let recent = self.recent.borrow();
        let mut batch: Vec<Event> = recent.iter().filter(|event| event.seq > kept).cloned().collect();
        if let Some(first) = batch.first()
            && first.seq > kept + 1
        {
            let text = format!("{} events before this one could not be written", first.seq - kept - 1);
            let lost = Event {
                seq: first.seq - 1,
                time_ns: first.time_ns,
                severity: Severity::Warning,
                kind: EventKind::EventsLost,
                object: "node".into(),
                text,
            };
            batch.insert(0, lost);
        }
        batch
    }

    /// Waits until everything added so far is in the files, for at most `patience`. Returns whether it is.
    pub async fn wait_kept(&self, patience: Duration) -> bool {
        let (wanted, end) = (self.seq.get(), self.env.now() + patience);
        while self.keeping.get() && self.kept.get() < wanted {
            let left = end.saturating_sub(self.env.now());
            let written = self.written.notified();
            if left.is_zero() || penstock_base::env::timeout(&self.env, left, written).await.is_none() {
                return self.kept.get() >= wanted;
            }
        }
        true
    }
}
