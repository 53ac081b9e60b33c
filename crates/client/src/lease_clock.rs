//! The time in which this client may go by what it was granted.
//!
//! The service ends a session that it has not heard of for the length of its lease, and grants what it had to others. The client
//! counts from when it sent the last request that was answered, which is earlier, and only half of the lease, so that the kernel
//! has dropped its pages by the end of it. Then nothing is answered, neither by what is known here nor by a reply, until the service
//! says that the session goes on, or that it has ended.
//!
//! Invariant: between the end of this time and the next answer of the service nobody is told anything that another client may have
//! changed.

use penstock_base::Env;
use std::cell::{Cell, OnceCell};
use std::time::Duration;
use tokio::sync::Notify;

/// One part in so many of the lease is used. In the next the kernel drops its pages.
const USED: u32 = 2;
const HIDING: u32 = 4;
/// A sleep does not count the time in which the machine is suspended, so the clock is looked at again after this.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

struct Lease {
    env: Env,
    length: Duration,
    /// When it runs out, unless a request is answered that is sent later than all that were.
    until: Cell<Duration>,
}

/// Without a lease it never runs out.
#[derive(Default)]
pub(crate) struct LeaseClock {
    lease: OnceCell<Lease>,
    /// It runs again, or never will.
    changed: Notify,
    ran_out: Notify,
}

impl LeaseClock {
    /// Begins with the answer to a request that was sent at `sent`.
    pub(crate) fn begin(&self, env: &Env, lease: Duration, sent: Duration) {
        let begun = Lease { env: env.clone(), length: lease, until: Cell::new(sent + lease / USED) };
        let begun = self.lease.set(begun);
        assert!(begun.is_ok(), "a session begins once");
    }

    /// A request that was sent at `sent` was answered: the service knew the session later than that.
    pub(crate) fn answered(&self, sent: Duration) {
        let Some(lease) = self.lease.get() else { return };
        let until = sent + lease.length / USED;
        if until > lease.until.get() {
            lease.until.set(until);
            self.changed.notify_waiters();
        }
    }

    /// The session has ended: nobody waits for more.
    pub(crate) fn end(&self) {
        self.changed.notify_waiters();
    }

    /// The rest of it.
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

    /// Waits until it has run out, and tells who waits for that, or until `is_over`. Returns when that was, and how long the kernel has to
    /// drop its pages. Never without a lease.
    pub(crate) async fn run_out(&self, is_over: impl Fn() -> bool) -> (Duration, Duration) {
        let Some(lease) = self.lease.get() else { return std::future::pending().await };
        while self.runs() && !is_over() {
            lease.env.sleep(self.left().min(LONGEST_SLEEP)).await;
        }
        self.ran_out.notify_waiters();
        (lease.until.get(), lease.length / HIDING)
    }

    /// True if it ran again since it ran out at `until`.
    pub(crate) fn ran_since(&self, until: Duration) -> bool {
        self.lease.get().is_some_and(|lease| lease.until.get() != until)
    }

    /// Waits until [`Self::run_out`] finds that it has.
    pub(crate) async fn not_running(&self) {
        loop {
            let ran_out = self.ran_out.notified();
            if !self.runs() {
                return;
            }
            ran_out.await;
        }
    }
}
