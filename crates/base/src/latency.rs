//! Latency histograms with fixed logarithmic buckets, for use on one worker thread.
//!
//! Recording takes a few instructions: no allocation, no lock. Each power of two of nanoseconds is divided
//! into four buckets, so a quantile is known to a quarter of its power of two (25 %). Times below 1 µs share
//! the first bucket, and times of 68.7 s and more share the last.

use crate::Env;
use crate::num::to_usize;
use futures_util::FutureExt;
use std::cell::Cell;
use std::future::Future;
use std::time::Duration;

/// The first bucket ends at 2^10 ns, the last one with an end at 2^36 ns.
const FIRST_POWER: u32 = 10;
const LAST_POWER: u32 = 36;
const PARTS: usize = 4;
/// The number of buckets, including the last one, which has no upper end.
const BUCKETS: usize = (LAST_POWER - FIRST_POWER) as usize * PARTS + 2;

/// A distribution of durations: counts per bucket, the sum and the maximum.
pub struct Histogram {
    counts: [Cell<u64>; BUCKETS],
    sum_ns: Cell<u64>,
    max_ns: Cell<u64>,
    running: Cell<u64>,
}

/// A piece of work that is under way, until this is dropped.
#[must_use]
pub struct Running<'a>(&'a Cell<u64>);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Default for Histogram {
    fn default() -> Self {
        let counts = [const { Cell::new(0) }; BUCKETS];
        Self { counts, sum_ns: Cell::new(0), max_ns: Cell::new(0), running: Cell::new(0) }
    }
}

/// The bucket of a time. Bucket 0 is below 2^10 ns; each other one includes its lower end and excludes its
/// upper.
fn bucket(ns: u64) -> usize {
    let Some(power) = ns.checked_ilog2().filter(|power| *power >= FIRST_POWER) else { return 0 };
    if power >= LAST_POWER {
        return BUCKETS - 1;
    }
    let part = to_usize(ns >> (power - 2)) % PARTS;
    1 + (power - FIRST_POWER) as usize * PARTS + part
}

/// The upper end of a bucket in nanoseconds; none for the last.
fn end_ns(bucket: usize) -> Option<u64> {
    match bucket {
        0 => Some(1 << FIRST_POWER),
        bucket if bucket == BUCKETS - 1 => None,
        bucket => {
            let (power, part) = (FIRST_POWER as usize + (bucket - 1) / PARTS, (bucket - 1) % PARTS);
            Some(((PARTS + part + 1) as u64) << (power - 2))
        }
    }
}

impl Histogram {
    /// Counts one time.
    pub fn record(&self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let count = &self.counts[bucket(ns)];
        count.set(count.get() + 1);
        self.sum_ns.set(self.sum_ns.get().saturating_add(ns));
        self.max_ns.set(self.max_ns.get().max(ns));
    }

    /// Runs `work` and counts its duration, whether it succeeds or fails. Dropped work is not counted.
    pub fn time<T>(&self, env: &Env, work: impl Future<Output = T>) -> impl Future<Output = T> {
        // Not an async function: that would keep `work` twice, as its argument and while it runs, and copy
        // all of its state.
        let (began, running) = (env.now(), self.run());
        work.inspect(move |_| {
            self.record(env.now().saturating_sub(began));
            drop(running);
        })
    }

    /// A piece of work is under way, until the result is dropped.
    pub fn run(&self) -> Running<'_> {
        self.running.set(self.running.get() + 1);
        Running(&self.running)
    }

    /// The number of pieces of work that are under way.
    pub fn running(&self) -> u64 {
        self.running.get()
    }

    /// The number of times recorded, and their sum.
    pub fn count_and_sum(&self) -> (u64, Duration) {
        (self.counts.iter().map(Cell::get).sum(), Duration::from_nanos(self.sum_ns.get()))
    }

    /// The longest time recorded; zero if there is none.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max_ns.get())
    }

    /// The quantile `per_mille`: a share of `per_mille` ‰ of all times is not longer. At most 25 % too high;
    /// zero if nothing was counted.
    pub fn quantile(&self, per_mille: u64) -> Duration {
        let total = self.count_and_sum().0;
        let wanted = (total * per_mille).div_ceil(1000);
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count.get();
            if total > 0 && below >= wanted {
                return Duration::from_nanos(end_ns(bucket).unwrap_or(u64::MAX).min(self.max_ns.get()));
            }
        }
        Duration::ZERO
    }

    /// For every second power of two from 2^10 to 2^36 ns: that time in nanoseconds, and the number of
    /// shorter times.
    pub fn cumulative(&self) -> Vec<(u64, u64)> {
        let mut rows = Vec::new();
        let mut below = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            below += count.get();
            if let Some(end) = end_ns(bucket).filter(|end| end.is_power_of_two() && end.ilog2() % 2 == 0) {
                rows.push((end, below));
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_in_its_bucket() {
        let mut last = 0;
        for power in 0..40 {
            for ns in [
                (1_u64 << power) - 1,
                1 << power,
                (1 << power) + 1,
                (1 << power) * 5 / 4,
                (1 << power) * 7 / 4,
            ] {
                let at = bucket(ns);
                assert!(end_ns(at).is_none_or(|end| ns < end), "{ns} is below the end of bucket {at}");
                assert!(at == 0 || end_ns(at - 1).is_some_and(|end| ns >= end), "{ns} is in bucket {at}");
                assert!(at >= last || ns + 1 == 1 << power, "buckets rise");
                last = at.max(last);
            }
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_sums_and_rows() {
        let histogram = Histogram::default();
        assert_eq!(histogram.quantile(500), Duration::ZERO);
        for us in 1..=1000 {
            histogram.record(Duration::from_micros(us));
        }
        assert_eq!(histogram.count_and_sum(), (1000, Duration::from_micros(500_500)));
        assert_eq!(histogram.max(), Duration::from_millis(1));
        for (per_mille, us) in [(500, 500), (900, 900), (990, 990), (1000, 1000)] {
            let found = histogram.quantile(per_mille).as_nanos();
            assert!((us * 1000..=us * 1250).contains(&found), "{per_mille}: {found}");
        }
        let rows = histogram.cumulative();
        assert_eq!((rows[0], rows.len()), ((1024, 1), 14));
        assert_eq!(rows[1], (4096, 4));
        assert_eq!(rows.last(), Some(&(1 << 36, 1000)));
        histogram.record(Duration::from_secs(100));
        assert_eq!(histogram.quantile(1000), Duration::from_secs(100));
        assert_eq!(histogram.cumulative().last(), Some(&(1 << 36, 1000)));
    }
}
