//! Tests of checksums made in the coding pass, and of locating a silently wrong strip by syndromes.

use crate::random::Random;
use crate::stripe::{encode, exclusive, random_data, shared};
use penstock_base::{BLOCK_BYTES, crc32c_blocks};
use penstock_raid::{Checksums, Code, Fault, Kernel, Residency, SourceCrcs};

fn crcs_of(strips: &[Vec<u8>]) -> Vec<u32> {
    strips.iter().flat_map(|strip| crc32c_blocks(strip)).collect()
}

fn code_on(kernel: Kernel, k: usize, m: usize) -> Code {
    Code::new(k, m).unwrap().with_kernel(kernel).unwrap()
}

const GEOMETRIES: [(usize, usize); 11] =
    [(1, 2), (3, 0), (5, 1), (4, 1), (4, 2), (7, 2), (8, 3), (10, 4), (3, 5), (6, 8), (61, 2)];

#[test]
fn encode_makes_the_checksums_of_all_strips() {
    for kernel in Kernel::available() {
        for (k, m) in GEOMETRIES {
            for blocks in [0, 1, 2, 5] {
                for residency in [Residency::Warm, Residency::Cold] {
                    check_encode(&code_on(kernel, k, m), blocks, residency);
                }
            }
        }
    }
}

fn check_encode(code: &Code, blocks: usize, residency: Residency) {
    let label = format!("{}+{} on {}, {blocks} blocks", code.k(), code.m(), code.kernel().name());
    let data = random_data(&mut Random::new(blocks as u64), code.k(), blocks * BLOCK_BYTES);
    let parity = encode(code, &data);
    for known in [false, true] {
        let mut made = vec![vec![0x5a; blocks * BLOCK_BYTES]; code.m()];
        let mut of_data = if known { crcs_of(&data) } else { vec![7; code.k() * blocks] };
        let mut of_parity = vec![7; code.m() * blocks];
        let sources = match known {
            true => SourceCrcs::Known(&of_data),
            false => SourceCrcs::Wanted(&mut of_data),
        };
        let checksums = Checksums { sources, outputs: &mut of_parity };
        code.encode_with(&shared(&data), &mut exclusive(&mut made), residency, Some(checksums));
        assert!(made == parity, "{label}: parity");
        assert_eq!(of_data, crcs_of(&data), "{label}: checksums of the data, known {known}");
        assert_eq!(of_parity, crcs_of(&parity), "{label}: checksums of the parity, known {known}");
    }
}

#[test]
fn decode_makes_the_checksums_of_all_strips() {
    for kernel in Kernel::available() {
        let mut random = Random::new(21);
        for (k, m) in GEOMETRIES {
            let code = code_on(kernel, k, m);
            let mut stripe = random_data(&mut random, k, 3 * BLOCK_BYTES);
            stripe.extend(encode(&code, &stripe));
            for _ in 0..6 {
                let mut positions: Vec<usize> = (0..k + m).collect();
                let count = random.below(m + 1);
                let lost: Vec<usize> =
                    (0..count).map(|_| positions.swap_remove(random.below(positions.len()))).collect();
                let plan = code.plan(&lost).unwrap();
                let sources: Vec<Vec<u8>> = plan.sources().iter().map(|at| stripe[*at].clone()).collect();
                let expected: Vec<Vec<u8>> = lost.iter().map(|at| stripe[*at].clone()).collect();
                let mut made = vec![vec![0; 3 * BLOCK_BYTES]; lost.len()];
                let (mut of_sources, mut of_made) = (vec![0; k * 3], vec![0; lost.len() * 3]);
                let checksums =
                    Checksums { sources: SourceCrcs::Wanted(&mut of_sources), outputs: &mut of_made };
                plan.decode_with(
                    &shared(&sources),
                    &mut exclusive(&mut made),
                    Residency::Cold,
                    Some(checksums),
                );
                let label = format!("{k}+{m} without {lost:?} on {}", kernel.name());
                assert!(made == expected, "{label}");
                assert_eq!(of_sources, crcs_of(&sources), "{label}");
                assert_eq!(of_made, crcs_of(&expected), "{label}");
            }
        }
    }
}

#[test]
fn verify_makes_the_checksums_of_what_is_there() {
    for kernel in Kernel::available() {
        for (k, m) in [(4, 2), (3, 0), (10, 4), (2, 8)] {
            let code = code_on(kernel, k, m);
            let mut random = Random::new(22);
            let mut stripe = random_data(&mut random, k, 4 * BLOCK_BYTES);
            stripe.extend(encode(&code, &stripe));
            let mut crcs = vec![0; (k + m) * 4];
            assert!(code.verify_checked(&shared(&stripe[..k]), &shared(&stripe[k..]), &mut crcs));
            assert_eq!(crcs, crcs_of(&stripe), "{k}+{m} on {}", kernel.name());
            for position in 0..if m == 0 { 0 } else { k + m } {
                let byte = random.below(4 * BLOCK_BYTES);
                stripe[position][byte] ^= 0x10;
                let agrees = code.verify_checked(&shared(&stripe[..k]), &shared(&stripe[k..]), &mut crcs);
                assert!(!agrees, "{k}+{m} strip {position} on {}", kernel.name());
                assert_eq!(crcs, crcs_of(&stripe), "{k}+{m} strip {position} on {}", kernel.name());
                stripe[position][byte] ^= 0x10;
            }
        }
    }
}

#[test]
#[should_panic(expected = "a checksum covers a whole block")]
fn checksums_of_half_a_block_are_a_bug() {
    let checksums = Checksums { sources: SourceCrcs::Known(&[]), outputs: &mut [] };
    let strip = [0; 100];
    Code::new(1, 1).unwrap().encode_with(&[&strip], &mut [&mut [0; 100]], Residency::Warm, Some(checksums));
}

fn locate(code: &Code, stripe: &[Vec<u8>]) -> Fault {
    code.locate(&shared(&stripe[..code.k()]), &shared(&stripe[code.k()..]))
}

#[test]
fn one_wrong_strip_is_found() {
    let mut random = Random::new(23);
    for (k, m) in [(1, 2), (4, 2), (62, 2), (8, 3), (10, 4), (5, 8)] {
        let code = Code::new(k, m).unwrap();
        let mut stripe = random_data(&mut random, k, 9000);
        stripe.extend(encode(&code, &stripe));
        assert_eq!(locate(&code, &stripe), Fault::None, "{k}+{m}");
        for position in 0..k + m {
            let right = stripe[position].clone();
            stripe[position][8999] ^= 1;
            assert_eq!(locate(&code, &stripe), Fault::Strip(position), "{k}+{m}, its last bit");
            stripe[position] = random.bytes(9000);
            assert_eq!(locate(&code, &stripe), Fault::Strip(position), "{k}+{m}, all of it");
            stripe[position] = right;
        }
    }
}

#[test]
fn several_wrong_strips_are_not_taken_for_one() {
    let mut random = Random::new(24);
    for (k, m) in [(4, 2), (8, 3), (5, 8)] {
        let code = Code::new(k, m).unwrap();
        let mut stripe = random_data(&mut random, k, 9000);
        stripe.extend(encode(&code, &stripe));
        // Errors in different bytes name different strips. With errors in all bytes no single strip explains
        // all.
        let mut apart = stripe.clone();
        apart[0][17] ^= 4;
        apart[k][8000] ^= 4;
        assert_eq!(locate(&code, &apart), Fault::Unlocated, "{k}+{m}");
        apart[k][17] ^= 9;
        apart[0] = random.bytes(9000);
        assert_eq!(locate(&code, &apart), Fault::Unlocated, "{k}+{m}");
    }
}

#[test]
fn without_a_second_parity_strip_nothing_is_located() {
    let code = Code::new(4, 1).unwrap();
    let mut stripe = random_data(&mut Random::new(25), 4, 100);
    stripe.extend(encode(&code, &stripe));
    assert_eq!(locate(&code, &stripe), Fault::None);
    stripe[2][50] ^= 1;
    assert_eq!(locate(&code, &stripe), Fault::Unlocated);
}

/// 1+m codes are mirrors: if one of three copies differs, the two that agree are right.
#[test]
fn the_odd_one_of_three_copies_is_found() {
    let code = Code::new(1, 2).unwrap();
    let strip = Random::new(26).bytes(5000);
    for position in 0..3 {
        let mut stripe = vec![strip.clone(); 3];
        stripe[position][4000] ^= 0x80;
        assert_eq!(locate(&code, &stripe), Fault::Strip(position));
    }
}
