//! Shared code of the tests for `cargo xtask campaign`: the choice of items, and the lines that report them.

use serde_json::Value;
use std::ops::Range;

/// Runs the items of `PENSTOCK_SEEDS=A..B`, or of `otherwise`, and prints the figures of each.
pub fn run(otherwise: Range<u64>, run_item: impl Fn(u64) -> Value) {
    for item in penstock_sim::seeds(otherwise) {
        println!("campaign begin {item}");
        println!("campaign end {item} {}", run_item(item));
    }
}

/// Returns the number in an environment variable, or `otherwise` if it is not set.
pub fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}
