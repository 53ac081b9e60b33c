//! A fuzzing run: mutated inputs, drawn from a seed, through one decoder.

use crate::check::{Decoder, Verdict};
use crate::hex;
use crate::mutate::mutate;
use crate::random::Random;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// The most accepted inputs that are kept for further mutation, besides the seeds.
const POOL: usize = 64;
/// One input in this many keeps its old checksum, so that the check of checksums is tested too.
const UNSEALED: usize = 8;

/// The bounds of a campaign. It ends at the first one reached.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most inputs.
    pub executions: u64,
    /// The longest time. It is checked every 64 inputs.
    pub time: Duration,
}

/// Counts of a campaign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Inputs tried.
    pub executions: u64,
    /// Inputs that the decoder accepted.
    pub accepted: u64,
}

/// An input for which a property is violated.
#[derive(Debug, thiserror::Error)]
#[error("{decoder}: {why}\ninput: {}", hex::encode(input))]
pub struct Failure {
    /// Name of the decoder.
    pub decoder: &'static str,
    /// The input.
    pub input: Vec<u8>,
    /// The property that is violated, as text.
    pub why: String,
}

/// Checks one input. A panic counts as a failure.
pub fn execute(decoder: &Decoder, input: &[u8]) -> Result<Verdict, Failure> {
    let result = catch_unwind(AssertUnwindSafe(|| (decoder.check)(input))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    });
    result.map_err(|why| Failure { decoder: decoder.name, input: input.to_vec(), why })
}

/// Runs `decoder` until a limit or a failure. One seed gives one sequence of inputs.
pub fn run(decoder: &Decoder, seed: u64, limits: Limits) -> Result<Totals, Failure> {
    let start = Instant::now();
    let mut random = Random::new(seed);
    let seeds = (decoder.seeds)();
    for seed in &seeds {
        if execute(decoder, seed)? == Verdict::Refused {
            let why = "a valid encoding is refused".to_owned();
            return Err(Failure { decoder: decoder.name, input: seed.clone(), why });
        }
    }
    let mut pool = seeds.clone();
    let mut totals = Totals::default();
    let mut input = Vec::new();
    while totals.executions < limits.executions {
        if totals.executions.is_multiple_of(64) && start.elapsed() >= limits.time {
            break;
        }
        let begin = if random.one_in(2) { random.pick(&seeds) } else { random.pick(&pool) };
        input.clone_from(begin);
        mutate(&mut random, &mut input, &pool, decoder.most_bytes);
        if !random.one_in(UNSEALED) {
            (decoder.seal)(&mut input);
        }
        totals.executions += 1;
        if execute(decoder, &input)? == Verdict::Accepted {
            totals.accepted += 1;
            match pool.len() < seeds.len() + POOL {
                true => pool.push(input.clone()),
                false => {
                    let at = seeds.len() + random.below(POOL);
                    pool[at].clone_from(&input);
                }
            }
        }
    }
    Ok(totals)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{SAME, agrees, unsealed};

    fn broken(bytes: &[u8]) -> Result<Verdict, String> {
        let decode = |bytes: &[u8]| match bytes {
            [first, _] if *first >= 0x80 => panic!("the upper half"),
            [first, second] => Ok((*first, *second)),
            _ => Err(()),
        };
        agrees(bytes, &SAME, decode, |value| vec![value.0, value.1])
    }

    /// The fuzzer finds the defect and prints the input. The same seed gives the same run again.
    #[test]
    fn a_broken_decoder_is_found_and_its_input_printed() {
        let decoder = Decoder {
            name: "broken",
            most_bytes: 16,
            seeds: || vec![vec![1, 2]],
            seal: unsealed,
            check: broken,
        };
        let limits = Limits { executions: 100_000, time: Duration::MAX };
        let failure = run(&decoder, 1, limits).unwrap_err();
        assert_eq!(failure.why, "panicked: the upper half");
        assert!(failure.to_string().contains(&hex::encode(&failure.input)));
        assert_eq!(run(&decoder, 1, limits).unwrap_err().input, failure.input);
        assert!(execute(&decoder, &failure.input).is_err());
    }
}
