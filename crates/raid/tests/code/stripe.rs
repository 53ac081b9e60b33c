//! Stripes as vectors of strips, for tests that do not depend on where the bytes lie.

use crate::field::multiply;
use crate::random::Random;
use penstock_raid::{Code, DecodePlan};

pub(crate) fn shared(strips: &[Vec<u8>]) -> Vec<&[u8]> {
    strips.iter().map(Vec::as_slice).collect()
}

pub(crate) fn exclusive(strips: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    strips.iter_mut().map(Vec::as_mut_slice).collect()
}

pub(crate) fn random_data(random: &mut Random, k: usize, strip_bytes: usize) -> Vec<Vec<u8>> {
    (0..k).map(|_| random.bytes(strip_bytes)).collect()
}

/// The parity strips made by `Code::encode`, into buffers whose previous content must not matter.
pub(crate) fn encode(code: &Code, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut parity = vec![vec![0xa5; data[0].len()]; code.m()];
    code.encode(&shared(data), &mut exclusive(&mut parity));
    parity
}

/// The parity strips by definition: sums of products, one byte at a time.
pub(crate) fn encode_by_definition(code: &Code, data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let byte = |row, i: usize| {
        data.iter().enumerate().fold(0, |sum, (j, strip)| sum ^ multiply(code.coefficient(row, j), strip[i]))
    };
    (0..code.m()).map(|row| (0..data[0].len()).map(|i| byte(row, i)).collect()).collect()
}

/// The strips that `plan` makes of a stripe, from its sources only.
pub(crate) fn decode(plan: &DecodePlan, stripe: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let sources: Vec<&[u8]> = plan.sources().iter().map(|&position| stripe[position].as_slice()).collect();
    let mut made = vec![vec![0x5a; stripe[0].len()]; plan.lost().len()];
    plan.decode(&sources, &mut exclusive(&mut made));
    made
}

/// All sets of `size` of the numbers below `bound`, each in rising order.
pub(crate) fn subsets(bound: usize, size: usize) -> Vec<Vec<usize>> {
    let mut sets = vec![];
    let mut set: Vec<usize> = (0..size).collect();
    if size > bound {
        return sets;
    }
    loop {
        sets.push(set.clone());
        let Some(last) = (0..size).rev().find(|&i| set[i] < bound - size + i) else {
            return sets;
        };
        set[last] += 1;
        for i in last + 1..size {
            set[i] = set[i - 1] + 1;
        }
    }
}

#[test]
fn subsets_are_all_there() {
    assert_eq!(subsets(4, 2), [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
    assert_eq!(subsets(3, 0), [[0_usize; 0]]);
    assert_eq!(subsets(2, 3).len(), 0);
    assert_eq!(subsets(14, 4).len(), 1001);
}
