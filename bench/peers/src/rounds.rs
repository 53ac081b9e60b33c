//! Runs the workloads in rounds: in each round every peer runs every workload once.
//!
//! Peers run a workload one after the other. Each round begins with the next peer.

use crate::lines::{Caches, Line, PeerId};
use crate::peer::Peer;
use anyhow::{Context, Result, ensure};
use penstock_bench::files::{Done, Work};
use penstock_fuse::set_read_ahead;
use serde::Serialize;
use std::collections::BTreeMap;

/// One run of a workload on a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) done: Done,
    /// Processor time of the peer's processes in seconds, including work after the last reply.
    pub(crate) cpu_seconds: f64,
}

/// Median and range of a peer's samples of a workload, in the unit of the workload.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) median: f64,
    pub(crate) lowest: f64,
    pub(crate) highest: f64,
    pub(crate) runs: Vec<f64>,
    /// Median processor time of the peer's processes in seconds. 0 if the kernel does the work.
    pub(crate) cpu_seconds: f64,
    /// The same in microseconds per unit of the workload: an operation, or a million bytes.
    pub(crate) cpu_us_per_unit: f64,
}

/// All samples, by workload and peer.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    by_line: BTreeMap<(&'static str, PeerId), Vec<Sample>>,
    /// Peers that failed, with the error.
    pub(crate) failures: Vec<(PeerId, String)>,
}

/// Runs all workloads in all rounds. A peer that has failed takes no further part.
pub(crate) fn run(lines: &[Line], peers: &[Peer], rounds: usize) -> Samples {
    let mut samples = Samples::default();
    for round in 0..rounds {
        for line in lines {
            eprint!("\r\x1b[Kround {} of {rounds}: {}", round + 1, line.label);
            for turn in 0..peers.len() {
                let peer = &peers[(turn + round) % peers.len()];
                if !line.is_for(peer.id) || samples.has_failed(peer.id) {
                    continue;
                }
                match measure(line, peer) {
                    Ok(sample) => samples.by_line.entry((line.id, peer.id)).or_default().push(sample),
                    Err(error) => {
                        let what = format!("round {}, {}: {error:#}", round + 1, line.label);
                        eprintln!("\n{:?} failed in {what}", peer.id);
                        samples.failures.push((peer.id, what));
                    }
                }
            }
        }
    }
    eprintln!("\r\x1b[K{rounds} rounds done");
    samples
}

fn measure(line: &Line, peer: &Peer) -> Result<Sample> {
    ensure!(peer.processes.are_alive(), "its process has ended");
    peer.folder.prepare(line.work).context("preparing")?;
    peer.settle();
    match line.caches {
        Caches::Left => {}
        Caches::Cold => peer.drop_caches()?,
        Caches::Warm => drop(peer.folder.run(Work::Stat(1))?),
    }
    let ahead = line.read_ahead_kib.map(|kib| set_read_ahead(peer.folder.path(), kib)).transpose()?;
    let before = peer.processes.cpu_seconds();
    let done = peer.folder.run(line.work)?;
    peer.settle();
    let cpu_seconds = peer.processes.cpu_seconds() - before;
    if let Some(kib) = ahead {
        set_read_ahead(peer.folder.path(), kib)?;
    }
    Ok(Sample { done, cpu_seconds })
}

impl Samples {
    fn has_failed(&self, peer: PeerId) -> bool {
        self.failures.iter().any(|(failed, _)| *failed == peer)
    }

    /// Returns the figure of a peer for a workload, or `None` if the peer did not run it.
    pub(crate) fn figure(&self, line: &Line, peer: PeerId) -> Option<Figure> {
        let samples = self.by_line.get(&(line.id, peer))?;
        let (_, scale) = line.unit();
        let runs: Vec<f64> = samples.iter().map(|sample| sample.done.rate() / scale).collect();
        let per_unit = |sample: &Sample| sample.cpu_seconds * 1e6 / (sample.done.units / scale);
        Some(Figure {
            median: median(runs.clone()),
            lowest: runs.iter().copied().fold(f64::INFINITY, f64::min),
            highest: runs.iter().copied().fold(0.0, f64::max),
            cpu_seconds: median(samples.iter().map(|sample| sample.cpu_seconds).collect()),
            cpu_us_per_unit: median(samples.iter().map(per_unit).collect()),
            runs,
        })
    }
}

/// Returns the middle value, or the mean of the two middle values.
pub(crate) fn median(mut runs: Vec<f64>) -> f64 {
    runs.sort_by(f64::total_cmp);
    let middle = runs.len() / 2;
    match runs.len() % 2 {
        0 => (runs[middle - 1] + runs[middle]) / 2.0,
        _ => runs[middle],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lines::LINES;

    #[test]
    fn a_figure_is_the_median_in_the_unit_of_its_line() {
        let line = LINES.iter().find(|line| line.id == "write").unwrap();
        let mut samples = Samples::default();
        let of =
            |megabytes: f64| Sample { done: Done { units: megabytes * 1e6, seconds: 2.0 }, cpu_seconds: 1.0 };
        samples.by_line.insert((line.id, PeerId::Penstock), [300.0, 100.0, 200.0].map(of).to_vec());
        let figure = samples.figure(line, PeerId::Penstock).unwrap();
        assert_eq!((figure.median, figure.lowest, figure.highest), (100.0, 50.0, 150.0));
        assert_eq!(figure.cpu_us_per_unit, 5_000.0);
        assert!(samples.figure(line, PeerId::GlusterFs).is_none());
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
