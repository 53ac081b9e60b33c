//! The mutator: flips bits, sets numbers to their boundaries, and changes lengths, truncates and splices
//! inputs.
//!
//! It draws positions within the contents of an input: a block of 4 KiB is mostly zeros, and a change there
//! tests little.

use crate::random::Random;

/// Numbers at which decoders often fail, truncated to the width of the field.
const BOUNDARIES: [u64; 18] = [
    0,
    1,
    2,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0x8000,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x1_0000_0000,
    0x3fff_ffff_ffff_ffff,
    i64::MAX as u64,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

/// Pieces of text that have a meaning in text formats.
const WORDS: [&str; 16] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "null",
    "true",
    "-1",
    "1e999",
    "18446744073709551616",
    "\\u0000",
    "\\ud800",
    "iB",
    "+",
];

/// Changes `bytes` in one to six places, to at most `most` bytes. Takes pieces from `others`.
pub fn mutate(random: &mut Random, bytes: &mut Vec<u8>, others: &[Vec<u8>], most: usize) {
    for _ in 0..1 + random.below(6) {
        match random.below(14) {
            0..=2 => flip(random, bytes),
            3 => set(random, bytes),
            4..=6 => number(random, bytes),
            7 => near_length(random, bytes),
            8 => cut(random, bytes),
            9 => grow(random, bytes),
            10 => remove(random, bytes),
            11 => repeat(random, bytes),
            12 => splice(random, bytes, others),
            _ => word(random, bytes),
        }
        bytes.truncate(most);
    }
}

/// A random position within the contents, or, one time in eight, anywhere.
fn position(random: &mut Random, bytes: &[u8]) -> usize {
    let contents = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 9);
    match random.one_in(8) {
        true => random.below(bytes.len().max(1)),
        false => random.below(contents.clamp(1, bytes.len().max(1))),
    }
}

fn flip(random: &mut Random, bytes: &mut [u8]) {
    let at = position(random, bytes);
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1 << random.below(8);
    }
}

fn set(random: &mut Random, bytes: &mut [u8]) {
    let at = position(random, bytes);
    if let Some(byte) = bytes.get_mut(at) {
        *byte = random.word() as u8;
    }
}

/// Sets a field of 1, 2, 4 or 8 bytes to a boundary, or to its value plus or minus 1 to 16.
fn number(random: &mut Random, bytes: &mut [u8]) {
    let at = position(random, bytes);
    let width = 1 << random.below(4);
    let Some(field) = bytes.get_mut(at..at + width) else { return };
    let mut word = [0; 8];
    word[..width].copy_from_slice(field);
    let old = u64::from_le_bytes(word);
    let new = match random.below(3) {
        0 => old.wrapping_add(1 + random.below(16) as u64),
        1 => old.wrapping_sub(1 + random.below(16) as u64),
        _ => *random.pick(&BOUNDARIES),
    };
    field.copy_from_slice(&new.to_le_bytes()[..width]);
    if random.one_in(4) {
        field.reverse();
    }
}

/// Sets a field to a number close to the length of the input, or of the part behind the field, as a length
/// field has.
fn near_length(random: &mut Random, bytes: &mut [u8]) {
    let at = position(random, bytes);
    let width = 1 << random.below(4);
    let len = bytes.len();
    let Some(field) = bytes.get_mut(at..at + width) else { return };
    let left = len - at - width;
    let unit = 1 << random.below(6);
    let base = *random.pick(&[len, left, left / unit, len / unit]) as u64;
    let new = base.wrapping_add(random.below(5) as u64).wrapping_sub(2);
    field.copy_from_slice(&new.to_le_bytes()[..width]);
}

fn cut(random: &mut Random, bytes: &mut Vec<u8>) {
    let at = position(random, bytes);
    bytes.truncate(at);
}

fn grow(random: &mut Random, bytes: &mut Vec<u8>) {
    let fill = random.one_in(2);
    for _ in 0..1 + random.below(64) {
        bytes.push(if fill { random.word() as u8 } else { 0 });
    }
}

fn remove(random: &mut Random, bytes: &mut Vec<u8>) {
    let at = position(random, bytes);
    let upto = (at + 1 + random.below(32)).min(bytes.len());
    if at < upto {
        bytes.drain(at..upto);
    }
}

/// Inserts a copy of a piece of the input.
fn repeat(random: &mut Random, bytes: &mut Vec<u8>) {
    let (from, to) = (position(random, bytes), position(random, bytes));
    let upto = (from + 1 + random.below(64)).min(bytes.len());
    if from < upto {
        let piece = bytes[from..upto].to_vec();
        bytes.splice(to..to, piece);
    }
}

/// Inserts a piece of another input, or overwrites with it.
fn splice(random: &mut Random, bytes: &mut Vec<u8>, others: &[Vec<u8>]) {
    if others.is_empty() {
        return;
    }
    let other = random.pick(others);
    let from = position(random, other);
    let upto = (from + 1 + random.below(256)).min(other.len());
    if from >= upto {
        return;
    }
    let piece = other[from..upto].to_vec();
    let at = if random.one_in(2) { from.min(bytes.len()) } else { position(random, bytes) };
    let over = if random.one_in(2) { (at + piece.len()).min(bytes.len()) } else { at };
    bytes.splice(at..over, piece);
}

fn word(random: &mut Random, bytes: &mut Vec<u8>) {
    // Only for text. In binary input the other mutations have the same effect.
    if bytes.iter().take(64).any(|byte| !byte.is_ascii()) {
        return number(random, bytes);
    }
    let at = position(random, bytes);
    let word = random.pick(&WORDS).bytes();
    bytes.splice(at..at, word);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_input_can_be_changed_and_a_seed_gives_the_same_inputs() {
        let others = vec![b"other".to_vec(), Vec::new()];
        for start in [Vec::new(), vec![1], vec![0; 4096], b"{\"a\": 1}".to_vec()] {
            let run = |seed| {
                let mut random = Random::new(seed);
                let mut bytes = start.clone();
                (0..500).for_each(|_| mutate(&mut random, &mut bytes, &others, 5000));
                assert!(bytes.len() <= 5000);
                bytes
            };
            assert_eq!(run(1), run(1));
            assert_ne!(run(1), run(2));
        }
    }
}
