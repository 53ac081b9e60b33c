//! Which seeds a campaign runs.

use std::ops::Range;

/// The seeds of `PENSTOCK_SEEDS=A..B`, or those given.
///
/// # Panics
/// When the variable has a range of something else than numbers.
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
