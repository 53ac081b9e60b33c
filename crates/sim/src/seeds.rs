//! The seeds that a campaign runs.

use std::ops::Range;

/// Returns the range in `PENSTOCK_SEEDS=A..B`, or `otherwise` if the variable is unset or has no `..`.
///
/// # Panics
/// If A or B is not a number.
pub fn seeds(otherwise: Range<u64>) -> Range<u64> {
    let given = std::env::var("PENSTOCK_SEEDS").ok();
    match given.as_deref().and_then(|range| range.split_once("..")) {
        Some((from, to)) => {
            let number = |text: &str| text.parse().expect("PENSTOCK_SEEDS is A..B, two numbers");
            number(from)..number(to)
        }
        None => otherwise,
    }
}
