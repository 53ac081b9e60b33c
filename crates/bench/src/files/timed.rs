//! Timed reads that go on until the caller ends them, and count only while the caller measures.

use super::{Folder, MIB, open, place, together};
use penstock_base::BufMut;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

const WAITING: u8 = 0;
const COUNTING: u8 = 1;
const OVER: u8 = 2;

/// The phase of the reads: not counting, counting or over. One thread sets it, the reading threads check it.
#[derive(Debug, Default)]
pub struct Phase(AtomicU8);

impl Phase {
    /// Reads count from now on.
    pub fn count(&self) {
        self.0.store(COUNTING, Ordering::SeqCst);
    }

    /// Reads do not count from now on.
    pub fn wait(&self) {
        self.0.store(WAITING, Ordering::SeqCst);
    }

    /// Ends the reads.
    pub fn end(&self) {
        self.0.store(OVER, Ordering::SeqCst);
    }

    fn now(&self) -> u8 {
        self.0.load(Ordering::SeqCst)
    }
}

/// The durations of reads.
#[derive(Clone, Debug, Default)]
pub struct Timed {
    /// In rising order.
    sorted: Vec<Duration>,
}

impl Timed {
    /// Takes durations in any order.
    pub fn new(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        Self { sorted: times }
    }

    /// The number of reads.
    pub fn count(&self) -> usize {
        self.sorted.len()
    }

    /// The duration that `per_mille` thousandths of the reads did not exceed; zero if there were none.
    pub fn quantile(&self, per_mille: usize) -> Duration {
        let below = (self.sorted.len() * per_mille).div_ceil(1000);
        self.sorted.get(below.saturating_sub(1)).copied().unwrap_or_default()
    }
}

impl Folder {
    /// Reads `bytes` at a time at places spread over the file, past the page cache, with `jobs` threads,
    /// until the phase ends. A read counts if it began and ended while the phase was counting.
    pub fn read_while(&self, bytes: usize, jobs: usize, phase: &Phase) -> io::Result<Timed> {
        let all = Mutex::new(Vec::new());
        let blocks = self.amount.file_mib * MIB / bytes;
        let job = |job: usize| -> io::Result<usize> {
            let file = open(&self.big(), rustix::fs::OFlags::DIRECT)?;
            let mut buffer = BufMut::zeroed(bytes);
            let mut times = Vec::new();
            let mut index = job;
            loop {
                let before = phase.now();
                if before == OVER {
                    break;
                }
                let at = place(index, blocks) * bytes;
                let start = Instant::now();
                file.read_exact_at(buffer.as_mut(), at as u64)?;
                let took = start.elapsed();
                if (before, phase.now()) == (COUNTING, COUNTING) {
                    times.push(took);
                }
                self.check(buffer.as_ref(), at)?;
                index += jobs;
            }
            let done = times.len();
            all.lock().map_err(|_| io::Error::other("a thread of the work panicked"))?.append(&mut times);
            Ok(done)
        };
        together(jobs, job)?;
        let all = all.into_inner().map_err(|_| io::Error::other("a thread of the work panicked"))?;
        Ok(Timed::new(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_times_that_were_taken() {
        let times = Timed::new((1..=200).rev().map(Duration::from_micros).collect());
        for (per_mille, us) in [(0, 1), (5, 1), (500, 100), (990, 198), (1000, 200)] {
            assert_eq!(times.quantile(per_mille), Duration::from_micros(us), "{per_mille}");
        }
        assert_eq!((times.count(), Timed::default().quantile(500)), (200, Duration::ZERO));
    }
}
