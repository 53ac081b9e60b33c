//! Measures the lease time of the session, during which this client may rely on its grants.
//!
//! The service ends a session from which it has received nothing for the lease time, and then gives its
//! grants to others. The client counts from the sending of the last request that was answered, which is
//! earlier. It uses only half of the lease time, so that the kernel has dropped its pages before the lease
//! time ends. After that half, the client answers nothing, neither from its own state nor from a reply, until
//! the service confirms that the session goes on or has ended.
//!
//! Invariant: between the end of this time and the next answer of the service, no caller gets an answer that
//! another client's change may have made wrong.

use penstock_base::Env;
use std::cell::{Cell, OnceCell};
use std::time::Duration;
use tokio::sync::Notify;

/// The client uses one part in `USED` of the lease time, and then the kernel has one part in `HIDING` to drop
/// its pages.
const USED: u32 = 2;
const HIDING: u32 = 4;
/// Longest sleep between two looks at the clock: a sleep does not count the time while the machine is
/// suspended.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

struct Lease {
    env: Env,
    length: Duration,
    /// End of the usable time. Each answered request moves it on if it was sent later than all answered
    /// before.
    until: Cell<Duration>,
}

/// Clock of a session's lease time. A session without a lease time never runs out.
#[derive(Default)]
pub(crate) struct LeaseClock {
    lease: OnceCell<Lease>,
    /// Signalled when the clock runs again or never will.
    changed: Notify,
    ran_out: Notify,
}

impl LeaseClock {
    /// Starts the clock with the answer to a request that was sent at `sent`.
    pub(crate) fn begin(&self, env: &Env, lease: Duration, sent: Duration) {
        let begun = Lease { env: env.clone(), length: lease, until: Cell::new(sent + lease / USED) };
        let begun = self.lease.set(begun);
        assert!(begun.is_ok(), "a session begins once");
    }

    /// Records that a request sent at `sent` was answered: the service knew the session after that.
    pub(crate) fn answered(&self, sent: Duration) {
        let Some(lease) = self.lease.get() else { return };
        let until = sent + lease.length / USED;
        if until > lease.until.get() {
            lease.until.set(until);
            assert!(until <= lease.env.now() + lease.length / USED, "a request is sent before its answer");
            self.changed.notify_waiters();
        }
    }

    /// Wakes all waiters, because the session has ended.
    pub(crate) fn end(&self) {
        self.changed.notify_waiters();
    }

    /// Returns the time left; `Duration::MAX` without a lease time.
    pub(crate) fn left(&self) -> Duration {
        self.lease.get().map_or(Duration::MAX, |lease| lease.until.get().saturating_sub(lease.env.now()))
    }

    pub(crate) fn runs(&self) -> bool {
        !self.left().is_zero()
    }

    /// Waits until the clock runs or `is_over` returns true.
    pub(crate) async fn running(&self, is_over: impl Fn() -> bool) {
        loop {
            let changed = self.changed.notified();
            if self.runs() || is_over() {
                return;
            }
            changed.await;
        }
    }

    /// Waits until the time has run out, and wakes [`Self::not_running`], or until `is_over` returns true.
    /// Returns the end of the time, and the time that the kernel has to drop its pages. Never returns without
    /// a lease time.
    pub(crate) async fn run_out(&self, is_over: impl Fn() -> bool) -> (Duration, Duration) {
        let Some(lease) = self.lease.get() else { return std::future::pending().await };
        while self.runs() && !is_over() {
            lease.env.sleep(self.left().min(LONGEST_SLEEP)).await;
        }
        self.ran_out.notify_waiters();
        (lease.until.get(), lease.length / HIDING)
    }

    /// True if the clock ran again after it had run out at `until`.
    pub(crate) fn ran_since(&self, until: Duration) -> bool {
        self.lease.get().is_some_and(|lease| lease.until.get() != until)
    }

    /// Waits until [`Self::run_out`] finds that the time has run out.
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
