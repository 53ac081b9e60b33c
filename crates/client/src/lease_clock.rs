//! The time in which this client may go by what it was granted.
//!
//! The service ends a session that it has not heard of for the length of its lease, and grants what it had to others. The client
//! counts from when it sent the last request that was answered, which is earlier, and only a part of the lease, so that the kernel
//! has dropped its pages by the end of it. Then nothing is answered, neither by what is known here nor by a reply, until the service
//! says that the session goes on, or that it has ended.
//!
//! Invariant: between the end of this time and the next answer of the service nobody is told anything that another client may have
//! changed.

use penstock_base::Env;
use std::cell::{Cell, OnceCell};
use std::time::Duration;
use tokio::sync::Notify;

/// Quarters of the lease that are used.
const USED: u32 = 3;

struct Lease {
    env: Env,
    used: Duration,
    /// When it runs out, unless a request is answered that is sent later than all that were.
    until: Cell<Duration>,
}

/// Without a lease it never runs out.
#[derive(Default)]
pub(crate) struct LeaseClock {
    lease: OnceCell<Lease>,
    /// It runs again, or never will.
    changed: Notify,
}

impl LeaseClock {
    /// Begins with the answer to a request that was sent at `sent`.
    pub(crate) fn begin(&self, env: &Env, lease: Duration, sent: Duration) {
        let used = lease / 4 * USED;
        let begun = self.lease.set(Lease { env: env.clone(), used, until: Cell::new(sent + used) });
        assert!(begun.is_ok(), "a session begins once");
    }

    /// A request that was sent at `sent` was answered: the service knew the session later than that.
    pub(crate) fn answered(&self, sent: Duration) {
        let Some(lease) = self.lease.get() else { return };
        let until = sent + lease.used;
        if until > lease.until.get() {
            lease.until.set(until);
            self.changed.notify_waiters();
        }
    }

    /// The session has ended: nobody waits for more.
    pub(crate) fn end(&self) {
        self.changed.notify_waiters();
    }

    /// What is left of it.
    pub(crate) fn left(&self) -> Duration {
        self.lease.get().map_or(Duration::MAX, |lease| lease.until.get().saturating_sub(lease.env.now()))
    }

    pub(crate) fn runs(&self) -> bool {
        !self.left().is_zero()
    }

    /// Waits until it runs, or `is_over`.
    pub(crate) async fn running(&self, is_over: impl Fn() -> bool) {
        loop {
            let changed = self.changed.notified();
            if self.runs() || is_over() {
                return;
            }
            changed.await;
        }
    }

    /// Waits until it has run out, or `is_over`.
    pub(crate) async fn run_out(&self, is_over: impl Fn() -> bool) {
        while let Some(lease) = self.lease.get().filter(|_| self.runs() && !is_over()) {
            lease.env.sleep(self.left()).await;
        }
    }
}
