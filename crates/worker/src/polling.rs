//! Adaptive polling: a worker polls for its next call for a short time before it sleeps.
//!
//! Waking a thread that sleeps on another processor takes longer than serving a small request, and ten times
//! as long in a virtual machine. While callers come back soon after each answer, the worker polls for them
//! instead of sleeping.
//!
//! Invariant: a polling period ends after [`LONGEST`]. After unsuccessful periods only one call in [`RARELY`]
//! is followed by one.

use std::cell::Cell;
use std::time::Duration;

/// The longest polling period. It allows for the time that the caller needs to wake up on the answer to its
/// last call.
const LONGEST: Duration = Duration::from_micros(100);
/// Without credit, one call in this many is followed by a polling period.
const RARELY: u32 = 64;
/// Credit that a successful polling period earns. Every period costs [`PRICE`], so polling continues while at
/// least two periods in three find a call.
const GAIN: u32 = 3;
const PRICE: u32 = 2;
const MOST_CREDIT: u32 = 16;

/// The polling state of a worker for one source of calls.
#[derive(Default)]
pub struct Polling {
    credit: Cell<u32>,
    /// The number of calls since the last polling period.
    calls_since: Cell<u32>,
    since: Cell<Option<Duration>>,
    resting: Cell<bool>,
}

impl Polling {
    /// Notes that a call has arrived.
    pub fn called(&self) {
        self.resting.set(false);
        self.calls_since.set(self.calls_since.get().saturating_add(1));
        if self.since.take().is_some() {
            self.credit.set((self.credit.get() + GAIN).min(MOST_CREDIT));
        }
    }

    /// Called when there is nothing to do, with the current time. True if the worker should poll again, false
    /// if it should sleep until a call comes.
    pub fn continues(&self, now: Duration) -> bool {
        if !self.resting.replace(true) {
            if !self.is_due() {
                return false;
            }
            self.calls_since.set(0);
            self.credit.set(self.credit.get().saturating_sub(PRICE));
            self.since.set(Some(now));
        }
        let continues = self.since.get().is_some_and(|since| now.saturating_sub(since) < LONGEST);
        if !continues {
            self.since.set(None);
        }
        continues
    }

    /// True if an idle time that begins now begins with a polling period: recent ones were successful, or the
    /// next trial is due.
    pub fn is_due(&self) -> bool {
        self.credit.get() >= PRICE || self.calls_since.get() >= RARELY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates `times` idle times, each of which ends with a call after `gap`. Returns the number that
    /// began with a polling period, and the number of periods that found the call.
    fn rests(polling: &Polling, times: u32, gap: Duration) -> (u32, u32) {
        let (mut began, mut found) = (0, 0);
        for _ in 0..times {
            let mut now = Duration::ZERO;
            while now < gap && polling.continues(now) {
                now += Duration::from_micros(1);
            }
            began += u32::from(now > Duration::ZERO);
            found += u32::from(now >= gap);
            polling.called();
        }
        (began, found)
    }

    #[test]
    fn a_worker_polls_while_that_pays_and_sleeps_when_it_does_not() {
        let polling = Polling::default();
        let (began, found) = rests(&polling, 200, Duration::from_micros(40));
        assert_eq!(began, found);
        assert!(began > 130, "{began} polling periods");
        // Callers take longer: a few polling periods use up the credit, then there are hardly any.
        let (began, found) = rests(&polling, 1_000, Duration::from_millis(1));
        assert_eq!(found, 0);
        assert!(began < 30, "{began} polling periods");
        let (_, found) = rests(&polling, 200, Duration::from_micros(40));
        assert!(found > 130, "{found} polling periods found a call");
    }
}
