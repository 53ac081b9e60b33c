//! Events for people: numbered, the last ones in memory, and all of them in files if the process keeps files.
//!
//! Writing the files ([`EventFiles`]) never blocks the worker: a task passes batches to a thread.
//!
//! Invariants:
//! - a number is never given twice in a store's folder;
//! - the order of events is the order of their numbers;
//! - events that overflow the memory before they are written are lost, and an event reports how many.

use crate::event::{Event, EventKind, IN_MEMORY, Severity};
use crate::event_files::{EventFiles, Kept};
use penstock_base::Env;
use penstock_worker::blocking;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// Pause before a failed write is retried.
const RETRY: Duration = Duration::from_secs(5);

/// The list of events.
pub struct Events {
    env: Env,
    seq: Cell<u64>,
    /// Number of the last event that is in the files.
    kept: Cell<u64>,
    keeping: Cell<bool>,
    recent: RefCell<VecDeque<Event>>,
    wake: Notify,
    written: Notify,
}

impl Events {
    /// Makes an empty list, in memory only.
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

    /// Adds an event, with the next number and the current time.
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

    /// Returns at most `limit` events with numbers above `seq` from memory, oldest first. None if some of
    /// them may be only in files.
    pub fn after(&self, seq: u64, limit: usize) -> Option<Vec<Event>> {
        let recent = self.recent.borrow();
        let first = recent.front().map_or(1, |event| event.seq);
        if self.keeping.get() && first > 1 && seq + 1 < first {
            return None;
        }
        Some(recent.iter().filter(|event| event.seq > seq).take(limit).cloned().collect())
    }

    /// The newest event in memory for which `fits` is true.
    pub(crate) fn newest(&self, fits: impl Fn(&Event) -> bool) -> Option<Event> {
        self.recent.borrow().iter().rev().find(|event| fits(event)).cloned()
    }

    /// Writes all events to files from now on. Events that were added before get numbers behind those in the
    /// files, so this must be called before anybody sees a number.
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

    /// Events that are not yet in the files. If some overflowed the memory, an event that reports their
    /// number comes first.
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

    /// Waits until everything added so far is in the files, for at most `patience`. Returns true if it is.
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
