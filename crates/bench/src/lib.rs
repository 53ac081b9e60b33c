//! Benchmarks. Each line of results has a ceiling that was measured in the same run, and names the limit.
#![deny(unsafe_code)]
#![allow(clippy::disallowed_methods)]

mod array;
mod bed;
pub mod codec;
pub mod files;
mod made_kv;
pub mod model;
mod spread;
mod table;

pub use array::{ArrayBench, run_array};
pub use codec::{CodecBench, run_codec};
pub use spread::{ModelBench, run_model, run_rebuild};
pub use table::{TableBench, TableLine, run_table};

use serde::Serialize;

/// One line of results.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// The operation that was measured.
    pub name: String,
    /// The median of the runs.
    pub measured: f64,
    /// The unit of all values of the line but the ratios. `us` marks a time.
    pub unit: &'static str,
    /// The lowest and the highest run.
    pub spread: [f64; 2],
    /// The ceiling, measured in the same run and unit.
    pub ceiling: f64,
    /// Measured divided by ceiling; for a time, ceiling divided by measured.
    pub efficiency: f64,
    /// The resource that limits the operation.
    pub limit: &'static str,
    /// The median of a peer in the same runs and unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<f64>,
    /// The name of the peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_name: Option<String>,
    /// Measured divided by the peer's median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
}

impl Line {
    /// Makes a line from its runs, of which there must be at least one.
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
        // For a time, the ceiling is the shortest possible one.
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

    /// The same line with the median of a peer.
    pub fn beside(&self, peer_name: &str, peer: f64) -> Self {
        let ratio = Some(self.measured / peer);
        Self { peer: Some(peer), peer_name: Some(peer_name.into()), ratio, ..self.clone() }
    }
}
