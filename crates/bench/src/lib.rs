//! Benchmarks. Each line names what it measured, the ceiling measured in the same run, and what limits it.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods)]

mod array;
pub mod files;

pub use array::{ArrayBench, run_array};

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
    /// Measured over ceiling.
    pub efficiency: f64,
    /// What limits it.
    pub limit: &'static str,
}

impl Line {
    /// A line from its runs.
    pub(crate) fn new(
        name: impl Into<String>,
        unit: &'static str,
        mut runs: Vec<f64>,
        ceiling: f64,
        limit: &'static str,
    ) -> Self {
        runs.sort_by(f64::total_cmp);
        let measured = runs[runs.len() / 2];
        let spread = [runs[0], runs[runs.len() - 1]];
        Self { name: name.into(), measured, unit, spread, ceiling, efficiency: measured / ceiling, limit }
    }
}
