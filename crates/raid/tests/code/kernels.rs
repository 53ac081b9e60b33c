//! Tests that every kernel tier gives the bytes of the definition, at all lengths and alignments, and writes
//! no others.

use crate::random::Random;
use crate::stripe::{encode, encode_by_definition, random_data, shared};
use penstock_raid::{Code, Kernel, MAX_PARITY, MAX_STRIPS, Residency, kernel_name};
use std::io::Write;

/// Bytes before and after each output strip that a kernel must not change; more than a column of any kernel.
const GUARD_BYTES: usize = 640;

const LARGE_LENGTHS: [usize; 12] = [511, 512, 513, 575, 767, 1023, 1024, 1025, 4095, 4096, 4097, 33_333];

/// The SIMD tiers of this processor. If there is none, prints to stderr that `test` was skipped, past the
/// test harness, which would capture the note.
fn simd(test: &str) -> Vec<Kernel> {
    let tiers: Vec<Kernel> =
        Kernel::available().into_iter().filter(|kernel| *kernel != Kernel::Portable).collect();
    if tiers.is_empty() {
        let note = format!("SKIPPED {test}: the processor has none of the instructions of a SIMD tier\n");
        std::io::stderr().write_all(note.as_bytes()).unwrap();
    }
    tiers
}

fn code_on(kernel: Kernel, k: usize, m: usize) -> Code {
    Code::new(k, m).unwrap().with_kernel(kernel).unwrap()
}

/// Strips between guards, each at a chosen distance from a multiple of 64.
struct Strips {
    buffers: Vec<Vec<u8>>,
    starts: Vec<usize>,
    strip_bytes: usize,
}

impl Strips {
    /// Strip j begins `alignment + stagger * j` bytes (modulo 64) after a multiple of 64.
    fn new(
        random: &mut Random,
        count: usize,
        strip_bytes: usize,
        alignment: usize,
        stagger: usize,
    ) -> Strips {
        let buffers: Vec<Vec<u8>> =
            (0..count).map(|_| random.bytes(GUARD_BYTES + 128 + strip_bytes + GUARD_BYTES)).collect();
        let start = |(j, buffer): (usize, &Vec<u8>)| {
            let aligned =
                (buffer.as_ptr() as usize + GUARD_BYTES).next_multiple_of(64) - buffer.as_ptr() as usize;
            aligned + (alignment + stagger * j) % 64
        };
        let starts = buffers.iter().enumerate().map(start).collect();
        Strips { buffers, starts, strip_bytes }
    }

    fn shared(&self) -> Vec<&[u8]> {
        let strips = self.buffers.iter().zip(&self.starts);
        strips.map(|(buffer, &start)| &buffer[start..start + self.strip_bytes]).collect()
    }

    /// Lets `write` fill the strips on the tier `kernel` and, from the same state, on the portable one. The
    /// entire buffers must agree, guards included.
    fn check(&mut self, label: &str, kernel: Kernel, write: impl Fn(Kernel, &mut [&mut [u8]])) {
        let mut reference = self.buffers.clone();
        let run = |buffers: &mut [Vec<u8>], kernel| {
            let strips = buffers.iter_mut().zip(&self.starts);
            let mut strips: Vec<&mut [u8]> =
                strips.map(|(buffer, &start)| &mut buffer[start..start + self.strip_bytes]).collect();
            write(kernel, &mut strips);
        };
        run(&mut reference, Kernel::Portable);
        run(&mut self.buffers, kernel);
        for (i, (made, expected)) in self.buffers.iter().zip(&reference).enumerate() {
            assert!(made == expected, "{label}: output {i} differs, {} bytes", self.strip_bytes);
        }
    }
}

/// Compares encode, decode and update of one geometry at one length and alignment with the portable tier.
fn check_against_portable(
    tier: Kernel,
    (k, m): (usize, usize),
    strip_bytes: usize,
    alignment: usize,
    stagger: usize,
) {
    let label =
        format!("{k}+{m} on {}, {strip_bytes} bytes, alignment {alignment} + {stagger} j", tier.name());
    let mut random = Random::new((strip_bytes * 64 + alignment) as u64);
    let sources = Strips::new(&mut random, k, strip_bytes, alignment, stagger);
    let mut outputs = Strips::new(&mut random, m, strip_bytes, alignment + 7 * stagger, stagger);
    let sources = sources.shared();

    for residency in [Residency::Warm, Residency::Cold] {
        outputs.check(&format!("{residency:?} encode {label}"), tier, |kernel, parity| {
            code_on(kernel, k, m).encode_with(&sources, parity, residency, None);
        });
    }
    let column = random.below(k);
    outputs.check(&format!("update {label}"), tier, |kernel, parity| {
        code_on(kernel, k, m).update(column, sources[column], sources[(column + 1) % k], parity);
    });
    // Any bytes serve as sources: decoding is just another linear combination.
    let mut positions: Vec<usize> = (0..k + m).collect();
    let lost: Vec<usize> = (0..m).map(|_| positions.swap_remove(random.below(positions.len()))).collect();
    outputs.check(&format!("decode {label}"), tier, |kernel, made| {
        code_on(kernel, k, m).plan(&lost).unwrap().decode(&sources, made);
    });
}

#[test]
fn simd_equals_portable_at_all_alignments_and_short_lengths() {
    // One geometry for each row count of the kernels, with odd and even numbers of sources, and one with two
    // groups.
    let geometries = [(5, 1), (4, 2), (7, 3), (6, 4), (3, 6)];
    for tier in simd("simd_equals_portable_at_all_alignments_and_short_lengths") {
        for strip_bytes in 0..=300 {
            for alignment in (0..64).step_by(if strip_bytes % 7 == 0 { 1 } else { 9 }) {
                for geometry in geometries {
                    check_against_portable(tier, geometry, strip_bytes, alignment, 0);
                    check_against_portable(tier, geometry, strip_bytes, alignment, 13);
                }
            }
        }
    }
}

#[test]
fn simd_equals_portable_at_larger_lengths() {
    for tier in simd("simd_equals_portable_at_larger_lengths") {
        for strip_bytes in LARGE_LENGTHS {
            for geometry in [(1, 1), (8, 1), (2, 2), (5, 2), (8, 3), (3, 3), (10, 4), (1, 4), (4, 5), (5, 8)]
            {
                for (alignment, stagger) in [(0, 0), (1, 0), (63, 0), (17, 29)] {
                    check_against_portable(tier, geometry, strip_bytes, alignment, stagger);
                }
            }
        }
    }
}

#[test]
fn simd_equals_portable_for_every_number_of_strips() {
    for tier in simd("simd_equals_portable_for_every_number_of_strips") {
        for m in 1..=MAX_PARITY {
            for k in 1..=MAX_STRIPS - m {
                check_against_portable(tier, (k, m), 333, 5, 11);
            }
        }
    }
}

#[test]
fn encode_agrees_with_the_definition() {
    for kernel in Kernel::available() {
        for (k, m) in [(1, 1), (4, 1), (4, 2), (8, 3), (10, 4), (62, 2), (61, 3), (60, 4), (6, 5), (56, 8)] {
            let data = random_data(&mut Random::new(k as u64), k, 597);
            let code = code_on(kernel, k, m);
            assert!(
                encode(&code, &data) == encode_by_definition(&code, &data),
                "{k}+{m} on {}",
                kernel.name()
            );
        }
    }
}

#[test]
fn update_agrees_with_encoding_anew() {
    for kernel in Kernel::available() {
        let mut random = Random::new(11);
        for (k, m) in [(1, 3), (4, 0), (4, 1), (4, 2), (8, 3), (10, 4), (4, 7)] {
            let code = code_on(kernel, k, m);
            for column in 0..k {
                let mut data = random_data(&mut random, k, 401);
                let mut parity = encode(&code, &data);
                let new = random.bytes(401);
                let old = std::mem::replace(&mut data[column], new.clone());
                let mut strips: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
                code.update(column, &old, &new, &mut strips);
                assert!(parity == encode(&code, &data), "{k}+{m} strip {column} on {}", kernel.name());
            }
        }
    }
}

#[test]
fn verify_sees_every_flipped_bit() {
    for kernel in Kernel::available() {
        for (k, m, strip_bytes) in [(4, 2, 4097), (10, 4, 9000), (1, 1, 100), (3, 3, 4096), (5, 8, 4096)] {
            let code = code_on(kernel, k, m);
            let mut random = Random::new(12);
            let data = random_data(&mut random, k, strip_bytes);
            let mut stripe = data.clone();
            stripe.extend(encode(&code, &data));
            let agrees = |stripe: &[Vec<u8>]| code.verify(&shared(&stripe[..k]), &shared(&stripe[k..]));
            assert!(agrees(&stripe), "{k}+{m} on {}", kernel.name());
            for position in 0..k + m {
                for byte in [0, strip_bytes - 1, random.below(strip_bytes)] {
                    stripe[position][byte] ^= 1 << random.below(8);
                    assert!(!agrees(&stripe), "{k}+{m} strip {position} byte {byte} on {}", kernel.name());
                    stripe[position][byte] = if position < k {
                        data[position][byte]
                    } else {
                        encode(&code, &data)[position - k][byte]
                    };
                }
            }
            assert!(agrees(&stripe), "the stripe is whole again");
        }
    }
}

#[test]
fn without_parity_there_is_nothing_to_do_or_to_doubt() {
    let code = Code::new(3, 0).unwrap();
    let data = random_data(&mut Random::new(13), 3, 50);
    code.encode(&shared(&data), &mut []);
    code.update(2, &data[0], &data[1], &mut []);
    assert!(code.verify(&shared(&data), &[]));
    let plan = code.plan(&[]).unwrap();
    assert_eq!(plan.sources(), [0, 1, 2]);
    plan.decode(&shared(&data), &mut []);
}

#[test]
fn dispatch_takes_the_fastest_available_kernel() {
    let available = Kernel::available();
    assert_eq!(available[0], Kernel::Portable);
    let fastest = *available.last().unwrap();
    assert_eq!(Code::new(2, 1).unwrap().kernel(), fastest);
    assert_eq!(kernel_name(), fastest.name());
    assert_eq!(code_on(Kernel::Portable, 2, 1).kernel(), Kernel::Portable);
    let every = [Kernel::Portable, Kernel::Neon, Kernel::Avx2, Kernel::Avx2Gfni, Kernel::Avx512Gfni];
    assert_eq!(every.map(Kernel::name), ["portable", "neon", "avx2", "avx2-gfni", "avx512-gfni"]);
}
