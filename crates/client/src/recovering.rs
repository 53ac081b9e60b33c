//! The time of a recovery after a restart of the service, during which all other requests wait.

use std::cell::Cell;
use tokio::sync::Notify;

/// The recovery after a restart, if one runs.
#[derive(Default)]
pub(crate) struct Recovery {
    is_running: Cell<bool>,
    changed: Notify,
}

impl Recovery {
    /// The service was started again.
    pub(crate) fn begin(&self) {
        self.is_running.set(true);
        self.changed.notify_waiters();
    }

    /// True while it runs.
    pub(crate) fn is_running(&self) -> bool {
        self.is_running.get()
    }

    /// It is over, or the session is.
    pub(crate) fn end(&self) {
        self.is_running.set(false);
        self.changed.notify_waiters();
    }

    /// Wakes all waiters, because the session is over.
    pub(crate) fn wake(&self) {
        self.changed.notify_waiters();
    }

    /// Waits until one runs, or `is_over` returns true.
    pub(crate) async fn begun(&self, is_over: impl Fn() -> bool) {
        self.until(|| self.is_running.get() || is_over()).await;
    }

    /// Waits until none runs.
    pub(crate) async fn over(&self) {
        self.until(|| !self.is_running.get()).await;
    }

    async fn until(&self, done: impl Fn() -> bool) {
        loop {
            let changed = self.changed.notified();
            if done() {
                return;
            }
            changed.await;
        }
    }
}
