//! Benchmarks. Each line names what it measured, the ceiling measured in the same run, and what limits it.
#![deny(unsafe_code)]
#![allow(clippy::disallowed_methods)]

mod array;
pub mod codec;
pub mod files;
mod table;

pub use array::{ArrayBench, run_array};
pub use codec::{CodecBench, run_codec};
pub use table::{TableBench, TableLine, run_table};

use serde::Serialize;

/// One line of a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// What was done.
    pub name: String,
    /// The median of the runs.
    pub measured: f64,
    /// Its unit.
    pub unit: &'static str,
    /// The lowest and the highest run.
    pub spread: [f64; 2],
    /// The ceiling, measured in the same run and unit.
    pub ceiling: f64,
    /// Measured over ceiling; of a time, ceiling over measured.
    pub efficiency: f64,
    /// What limits it.
    pub limit: &'static str,
    /// The median of a peer in the same runs, in the same unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<f64>,
    /// Who that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_name: Option<String>,
    /// Measured over the peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
}

impl Line {
    /// A line from its runs.
    pub fn new(
        name: impl Into<String>,
        unit: &'static str,
        mut runs: Vec<f64>,
        ceiling: f64,
        limit: &'static str,
    ) -> Self {
        runs.sort_by(f64::total_cmp);
        let measured = runs[runs.len() / 2];
        let spread = [runs[0], runs[runs.len() - 1]];
        // Of a time the ceiling is the shortest.
        let efficiency = if unit == "us" { ceiling / measured } else { measured / ceiling };
        Self {
            name: name.into(),
            measured,
            unit,
            spread,
            ceiling,
            efficiency,
            limit,
            peer: None,
            peer_name: None,
            ratio: None,
        }
    }

    /// The same line beside what a peer did.
    pub fn beside(&self, peer_name: &str, peer: f64) -> Self {
        let ratio = Some(self.measured / peer);
        Self { peer: Some(peer), peer_name: Some(peer_name.into()), ratio, ..self.clone() }
    }
}
