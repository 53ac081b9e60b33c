//! How long a worker looks for its next call before it sleeps.
//!
//! To wake a thread that sleeps on another processor takes longer than a small request, in a virtual machine ten times
//! as long. While callers come back soon after each answer, the worker looks on for them instead.
//!
//! Invariant: a look ends after [`LOOK`], and after looks in vain only one call in [`RARELY`] is followed by one.

use std::cell::Cell;
use std::time::Duration;

/// The longest look: a caller is woken by the answer to its last call, and that too takes its time.
const LOOK: Duration = Duration::from_micros(100);
/// With no credit, one call in this many is followed by a look.
const RARELY: u32 = 64;
/// A look that found a call gives this much credit, and every one costs [`PRICE`]: two in three must find one.
const GAIN: u32 = 3;
const PRICE: u32 = 2;
const MOST_CREDIT: u32 = 16;

/// Whether a worker looks on. Belongs to one source of calls.
#[derive(Default)]
pub struct Patience {
    credit: Cell<u32>,
    /// Calls since the last look.
    unlooked: Cell<u32>,
    looking: Cell<Option<Duration>>,
    resting: Cell<bool>,
}

impl Patience {
    /// A call was found.
    pub fn called(&self) {
        self.resting.set(false);
        self.unlooked.set(self.unlooked.get().saturating_add(1));
        if self.looking.take().is_some() {
            self.credit.set((self.credit.get() + GAIN).min(MOST_CREDIT));
        }
    }

    /// There is nothing to do at `now`: whether to look again at once, rather than sleep until a call comes.
    pub fn looks_on(&self, now: Duration) -> bool {
        if !self.resting.replace(true) {
            if !self.is_due() {
                return false;
            }
            self.unlooked.set(0);
            self.credit.set(self.credit.get().saturating_sub(PRICE));
            self.looking.set(Some(now));
        }
        let looks = self.looking.get().is_some_and(|since| now.saturating_sub(since) < LOOK);
        if !looks {
            self.looking.set(None);
        }
        looks
    }

    /// Whether a rest that begins now begins with a look: looks have paid lately, or it is time to try again.
    pub fn is_due(&self) -> bool {
        self.credit.get() >= PRICE || self.unlooked.get() >= RARELY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rests `times`, in each of which a call comes after `gap`; how many began with a look, and how many found it.
    fn rests(patience: &Patience, times: u32, gap: Duration) -> (u32, u32) {
        let (mut began, mut found) = (0, 0);
        for _ in 0..times {
            let mut now = Duration::ZERO;
            while now < gap && patience.looks_on(now) {
                now += Duration::from_micros(1);
            }
            began += u32::from(now > Duration::ZERO);
            found += u32::from(now >= gap);
            patience.called();
        }
        (began, found)
    }

    #[test]
    fn a_worker_looks_on_while_that_pays_and_sleeps_when_it_does_not() {
        let patience = Patience::default();
        let (began, found) = rests(&patience, 200, Duration::from_micros(40));
        assert_eq!(began, found);
        assert!(began > 130, "{began} looks");
        // Callers take longer: a few looks spend the credit, then hardly any are made.
        let (began, found) = rests(&patience, 1_000, Duration::from_millis(1));
        assert_eq!(found, 0);
        assert!(began < 30, "{began} looks");
        let (_, found) = rests(&patience, 200, Duration::from_micros(40));
        assert!(found > 130, "{found} looks found a call");
    }
}
