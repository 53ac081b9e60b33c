//! The facts that all parts of an array share: its identity, geometry and layout, its counters, and whether
//! it runs.
//!
//! Invariants:
//! - an array that was closed or stopped never runs again: only a new opening does;
//! - the first reason of a stop stays, because later ones follow from it.

use crate::counters::{ArrayLatency, Counts};
use crate::error::ArrayError;
use crate::events::Events;
use crate::geometry::Geometry;
use crate::layout::Layout;
use penstock_base::{ArrayId, Env};
use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// Time between two attempts of a write that waits for a full host or a suspended array.
const RETRY: Duration = Duration::from_millis(500);

/// Wake-ups of the array's tasks. Each is `notify_one` unless said otherwise: one task waits on it.
#[derive(Default)]
pub(crate) struct Signals {
    /// The log writer: entries were queued, or segments became free.
    pub(crate) log: Notify,
    /// Everybody who waits for log space (`notify_waiters`).
    pub(crate) space: Notify,
    /// Destage: log space is short.
    pub(crate) destage: Notify,
    /// Repair: a stripe or a copy of metadata is bad.
    pub(crate) repair: Notify,
    /// Resync: a reachable member has stale strips.
    pub(crate) resync: Notify,
    /// Replacement of carriers: a carrier was lost, or a label is owed.
    pub(crate) carriers: Notify,
    /// The count of stripes: some are not counted.
    pub(crate) count: Notify,
}

impl Signals {
    fn wake_all(&self) {
        self.log.notify_one();
        self.space.notify_waiters();
        self.destage.notify_one();
        self.repair.notify_one();
        self.resync.notify_one();
        self.carriers.notify_one();
        self.count.notify_one();
    }
}

/// Facts and counters of one array.
pub(crate) struct Context {
    pub(crate) env: Env,
    pub(crate) id: ArrayId,
    /// The array's name, for people.
    pub(crate) name: String,
    pub(crate) geo: Geometry,
    pub(crate) layout: Rc<Layout>,
    pub(crate) latency: ArrayLatency,
    pub(crate) signals: Signals,
    pub(crate) events: Events,
    counts: Cell<Counts>,
    closed: Cell<bool>,
    stopped: OnceCell<String>,
    suspended: RefCell<Option<String>>,
}

impl Context {
    pub(crate) fn new(env: &Env, id: ArrayId, name: &str, geo: Geometry, layout: Rc<Layout>) -> Rc<Self> {
        assert_eq!(
            (geo.members, geo.strips()),
            (layout.members(), layout.strips()),
            "the geometry of the layout"
        );
        Rc::new(Self {
            env: env.clone(),
            id,
            name: name.to_owned(),
            geo,
            layout,
            latency: ArrayLatency::default(),
            signals: Signals::default(),
            events: Events::default(),
            counts: Cell::default(),
            closed: Cell::new(false),
            stopped: OnceCell::new(),
            suspended: RefCell::default(),
        })
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts.get()
    }

    pub(crate) fn count(&self, change: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.get();
        change(&mut counts);
        self.counts.set(counts);
    }

    /// True once the array was closed or stopped.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.get()
    }

    /// An error [`ArrayError::Closed`] once the array was closed or stopped.
    pub(crate) fn check_open(&self) -> Result<(), ArrayError> {
        if self.is_closed() { Err(ArrayError::Closed) } else { Ok(()) }
    }

    /// Ends the array's tasks, each at its next step.
    pub(crate) fn stop(&self) {
        self.closed.set(true);
        self.signals.wake_all();
    }

    /// Stops the array for a reason that only a new opening takes away.
    pub(crate) fn stop_because(&self, why: String) {
        tracing::error!(array = self.name, why, "the array stops until it is opened again");
        // The first reason stays: a later one follows from it.
        let _ = self.stopped.set(why);
        self.stop();
    }

    /// The error that a structure cannot be read now.
    pub(crate) fn cannot_read(&self, what: String) -> ArrayError {
        ArrayError::CannotRead { name: self.name.clone(), what }
    }

    /// The error that a structure is damaged on all carriers.
    pub(crate) fn damaged(&self, what: String) -> ArrayError {
        ArrayError::Damaged { name: self.name.clone(), what }
    }

    /// Why the array stopped by itself, if it did.
    pub(crate) fn stopped(&self) -> Option<&str> {
        self.stopped.get().map(String::as_str)
    }

    /// Why writes wait, if they do.
    pub(crate) fn suspended(&self) -> Option<String> {
        self.suspended.borrow().clone()
    }

    /// Reports that writes are suspended, and waits before the next attempt. Fails once the array is closed.
    pub(crate) async fn suspend(&self, why: String) -> Result<(), ArrayError> {
        if self.is_closed() {
            return Err(ArrayError::Suspended(why));
        }
        self.report_suspended(&why);
        self.env.sleep(RETRY).await;
        Ok(())
    }

    /// Reports why writes are suspended, until one lands.
    pub(crate) fn report_suspended(&self, why: &str) {
        if self.suspended.borrow().as_deref() != Some(why) {
            tracing::error!(array = self.name, why, "writes are suspended until this is over");
        }
        *self.suspended.borrow_mut() = Some(why.to_owned());
    }

    /// A write landed: writes are not suspended.
    pub(crate) fn resume(&self) {
        if self.suspended.borrow_mut().take().is_some() {
            tracing::info!(array = self.name, "writes go on");
        }
    }
}
