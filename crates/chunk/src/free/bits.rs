//! Bits of blocks in words of 64.

use super::{Run, push_run};
use penstock_base::num::{to_u32, to_usize};

/// Sets or clears the bits of a run. Panics if one of them has the new value already.
pub(super) fn change(words: &mut [u64], (start, count): Run, is_set: bool) {
    let (mut at, end) = (start, start + count);
    while at < end {
        let (word, bit) = (&mut words[to_usize(at / 64)], at % 64);
        let part = (64 - bit).min(end - at);
        let mask = (u64::MAX >> (64 - part)) << bit;
        let found = if is_set { *word & mask } else { !*word & mask };
        assert_eq!(found, 0, "each of the blocks {at}+{part} is owned once");
        *word ^= mask;
        at += part;
    }
}

/// True if the bit of a block is set.
pub(super) fn get(words: &[u64], block: u64) -> bool {
    words[to_usize(block / 64)] & (1 << (block % 64)) != 0
}

/// The set bits, in order.
pub(super) fn set_bits(words: &[u64]) -> impl Iterator<Item = u64> {
    (0..).step_by(64).zip(words).flat_map(|(first, word)| {
        let word = *word;
        (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| first + bit)
    })
}

/// The runs of set bits between `from` and `until`, in order. Works by runs of bits, not bit by bit.
pub(super) fn runs_within(words: &[u64], from: u64, until: u64) -> Vec<Run> {
    let mut runs = Vec::new();
    let mut at = from;
    while at < until {
        let word = words[to_usize(at / 64)] >> (at % 64);
        let in_word = (64 - at % 64).min(until - at);
        let clear = u64::from(word.trailing_zeros()).min(in_word);
        at += clear;
        let set = u64::from((word.checked_shr(to_u32(clear)).unwrap_or(0)).trailing_ones());
        let set = set.min(in_word - clear);
        if set > 0 {
            push_run(&mut runs, (at, set));
        }
        at += set;
    }
    runs
}
