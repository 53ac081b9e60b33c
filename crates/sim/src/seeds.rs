//! The seeds that a campaign runs.

use std::ops::Range;

/// Returns the range in `PENSTOCK_SEEDS=A..B`, or `otherwise` if the variable is unset.
///
/// # Panics
/// If the variable is something else than two numbers.
pub fn seeds(otherwise: Range<u64>) -> Range<u64> {
    match std::env::var("PENSTOCK_SEEDS") {
        Ok(given) => parse(&given).expect("PENSTOCK_SEEDS is A..B, two numbers"),
        Err(_) => otherwise,
    }
}

fn parse(text: &str) -> Option<Range<u64>> {
    let (from, to) = text.split_once("..")?;
    Some(from.parse().ok()?..to.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn only_two_numbers_are_a_range_of_seeds() {
        assert_eq!(parse("5..7"), Some(5..7));
        for text in ["", "5", "5..", "..7", "5..x", "5...7"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
