//! What tests for `cargo xtask campaign` share: the items that are asked for, and the lines that say how they went.

use serde_json::Value;
use std::ops::Range;

/// Runs the items of `PENSTOCK_SEEDS=A..B`, or those given, and prints the figures of each.
pub fn run(otherwise: Range<u64>, run_item: impl Fn(u64) -> Value) {
    for item in penstock_sim::seeds(otherwise) {
        println!("campaign begin {item}");
        println!("campaign end {item} {}", run_item(item));
    }
}

/// A number from a variable of the environment.
pub fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).map_or(otherwise, |text| text.parse().unwrap())
}
