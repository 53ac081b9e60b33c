//! The cases that are timed: one operation over the memory of a core, by our kernels or by a peer.

use super::beds::{Bed, COLD_STRIP_BYTES, WARM_STRIP_BYTES};
use super::isal::Isal;
use penstock_base::BLOCK_BYTES;
use penstock_raid::{Checksums, Code, CodeError, Kernel, Residency, SourceCrcs};
use std::hint::black_box;

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    /// Reads this many bytes repeatedly.
    ReadNear(usize),
    /// Writes this many bytes repeatedly.
    FillNear(usize),
    /// Reads the cold memory.
    ReadFar,
    /// Writes the cold memory, past the caches if true.
    FillFar(bool),
    /// Multiplies data that is in L1.
    Products,
    Encode,
    /// Encodes with the checksums of all strips.
    EncodeChecked,
    /// Decodes with this many data strips lost.
    Decode(usize),
    /// Updates parity after a change of one block.
    Update,
}

impl Op {
    pub(super) fn name(self) -> String {
        match self {
            Op::Encode => "encode".into(),
            Op::EncodeChecked => "encode with checksums".into(),
            Op::Decode(lost) => format!("decode {lost} lost"),
            Op::Update => "update of a block".into(),
            Op::ReadNear(_) | Op::FillNear(_) | Op::ReadFar | Op::FillFar(_) => "memory".into(),
            Op::Products => "products".into(),
        }
    }
}

/// The place of the data: caches or memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Warmth {
    Warm,
    Cold,
}

impl Warmth {
    pub(super) fn name(self) -> &'static str {
        match self {
            Warmth::Warm => "warm",
            Warmth::Cold => "cold",
        }
    }

    pub(super) fn limit(self) -> &'static str {
        match self {
            Warmth::Warm => "L2: its reads and writes",
            Warmth::Cold => "memory: the reads that a core has under way",
        }
    }

    fn residency(self) -> Residency {
        match self {
            Warmth::Warm => Residency::Warm,
            Warmth::Cold => Residency::Cold,
        }
    }
}

type Strips<'a> = Vec<&'a mut [u8]>;

/// Works on the memory of a core, and returns the number of data bytes that it processed.
pub(super) struct Case(Box<dyn Fn(&mut Bed) -> usize + Sync>);

impl Case {
    pub(super) fn run(&self, bed: &mut Bed) -> usize {
        (self.0)(bed)
    }

    /// A case that measures the rate of memory or of products by itself.
    pub(super) fn limit(kernel: Kernel, op: Op) -> Self {
        if op == Op::Products {
            return Self::products(kernel);
        }
        Self(Box::new(move |bed| {
            let run_bytes = bed.sizes.warm_run_bytes;
            match op {
                Op::ReadNear(bytes) => {
                    for _ in 0..run_bytes / bytes {
                        black_box(kernel.read(black_box(bed.near(bytes)), Residency::Warm));
                    }
                    run_bytes / bytes * bytes
                }
                Op::FillNear(bytes) => {
                    for _ in 0..run_bytes / bytes {
                        kernel.fill(black_box(bed.near(bytes)), Residency::Warm);
                    }
                    run_bytes / bytes * bytes
                }
                Op::ReadFar => {
                    black_box(kernel.read(bed.cold(), Residency::Cold));
                    bed.cold().len()
                }
                Op::FillFar(stream) => {
                    kernel.fill(bed.cold(), if stream { Residency::Cold } else { Residency::Warm });
                    bed.cold().len()
                }
                _ => unreachable!("an operation on memory"),
            }
        }))
    }

    /// Products of four general rows. One strip of 4 KiB serves as every source, so that all data is in L1
    /// and a call is long. Counts the bytes that were multiplied.
    fn products(kernel: Kernel) -> Self {
        const K: usize = 28;
        let code = Code::new(K, 4).and_then(|code| code.with_kernel(kernel)).expect("the kernel is there");
        let plan = code.plan(&[0, 1, 2, 3]).expect("four of four");
        Self(Box::new(move |bed| {
            let rounds = (bed.sizes.warm_run_bytes / (K * BLOCK_BYTES)).max(1);
            let (mut strips, _) = bed.warm_stripe(5);
            let (made, source) = strips.split_at_mut(4);
            let sources = [&source[0][..BLOCK_BYTES]; K];
            let mut made: Vec<&mut [u8]> = made.iter_mut().map(|strip| &mut strip[..BLOCK_BYTES]).collect();
            for _ in 0..rounds {
                plan.decode(black_box(&sources), &mut made);
            }
            rounds * K * BLOCK_BYTES * 4
        }))
    }

    /// A case of our own kernels.
    pub(super) fn own(code: &Code, op: Op, warmth: Warmth) -> Result<Self, CodeError> {
        let (k, m) = (code.k(), code.m());
        let residency = warmth.residency();
        let code = code.clone();
        Ok(match op {
            Op::Encode => Self::of_stripes(k, m, warmth, move |strips, _| {
                let (data, parity) = strips.split_at_mut(k);
                code.encode_with(&shared(data), parity, residency, None);
            }),
            Op::EncodeChecked => Self::of_stripes(k, m, warmth, move |strips, crcs| {
                let blocks = strips[0].len() / BLOCK_BYTES;
                let (of_data, of_parity) = crcs[..(k + m) * blocks].split_at_mut(k * blocks);
                let checksums = Checksums { sources: SourceCrcs::Wanted(of_data), outputs: of_parity };
                let (data, parity) = strips.split_at_mut(k);
                code.encode_with(&shared(data), parity, residency, Some(checksums));
            }),
            Op::Decode(lost) => {
                let plan = code.plan(&(0..lost).collect::<Vec<_>>())?;
                // The first strips are lost; the plan reads the k strips after them.
                Self::of_stripes(k, m, warmth, move |strips, _| {
                    let (made, sources) = strips.split_at_mut(lost);
                    plan.decode_with(&shared(&sources[..k]), made, residency, None);
                })
            }
            Op::Update => Self::of_blocks(k, m, warmth, move |old, new, parity| {
                code.update(1, old, new, parity);
            }),
            _ => unreachable!("an operation of the code"),
        })
    }

    /// The memory traffic of a cold pass without its arithmetic.
    pub(super) fn twin(code: &Code, op: Op) -> Self {
        let (k, m) = (code.k(), code.m());
        match op {
            Op::Decode(lost) => {
                let traffic = code.traffic(lost);
                Self::of_stripes(k, m, Warmth::Cold, move |strips, _| {
                    let (made, sources) = strips.split_at_mut(lost);
                    traffic.run(&shared(&sources[..k]), made, Residency::Cold);
                })
            }
            _ => {
                let traffic = code.traffic(m);
                Self::of_stripes(k, m, Warmth::Cold, move |strips, _| {
                    let (data, parity) = strips.split_at_mut(k);
                    traffic.run(&shared(data), parity, Residency::Cold);
                })
            }
        }
    }

    /// The functions of ISA-L for the same operation, with their names.
    pub(super) fn peers(isal: &Isal, code: &Code, op: Op, warmth: Warmth) -> Vec<(&'static str, Self)> {
        let (k, m) = (code.k(), code.m());
        let isal = *isal;
        let cell = |row: usize, column: usize| code.coefficient(row, column);
        match op {
            Op::Encode => {
                let tables = isal.tables(k, m, cell);
                let mut peers = vec![(
                    "ISA-L ec_encode_data",
                    Self::of_stripes(k, m, warmth, move |strips, _| {
                        let (data, parity) = strips.split_at_mut(k);
                        isal.encode(&tables, &shared(data), parity);
                    }),
                )];
                let simple = move |strips: &mut Strips<'_>, _: &mut [u32]| isal.simple_parity(k, strips);
                match m {
                    1 => peers.push(("ISA-L xor_gen", Self::of_stripes(k, m, warmth, simple))),
                    2 => peers.push(("ISA-L pq_gen", Self::of_stripes(k, m, warmth, simple))),
                    _ => {}
                }
                peers
            }
            Op::EncodeChecked => {
                let tables = isal.tables(k, m, cell);
                let case = Self::of_stripes(k, m, warmth, move |strips, crcs| {
                    let (data, parity) = strips.split_at_mut(k);
                    isal.encode(&tables, &shared(data), parity);
                    let blocks = strips.iter().flat_map(|strip| strip.chunks_exact(BLOCK_BYTES));
                    crcs.iter_mut().zip(blocks).for_each(|(crc, block)| *crc = isal.crc32c(block));
                });
                vec![("ISA-L ec_encode_data, then crc32_iscsi", case)]
            }
            Op::Decode(lost) => {
                let plan = code.plan(&(0..lost).collect::<Vec<_>>()).expect("no more than m are lost");
                let tables = isal.tables(k, lost, |row, column| plan.coefficient(row, column));
                let case = Self::of_stripes(k, m, warmth, move |strips, _| {
                    let (made, sources) = strips.split_at_mut(lost);
                    isal.encode(&tables, &shared(&sources[..k]), made);
                });
                vec![("ISA-L ec_encode_data", case)]
            }
            Op::Update => {
                let tables = isal.tables(k, m, cell);
                let case = Self::of_blocks(k, m, warmth, move |old, new, parity| {
                    isal.update(&tables, k, 1, old, new, parity);
                });
                vec![("ISA-L xor_gen, then ec_encode_data_update", case)]
            }
            _ => Vec::new(),
        }
    }

    fn of_stripes(
        k: usize,
        m: usize,
        warmth: Warmth,
        run: impl Fn(&mut Strips<'_>, &mut [u32]) + Sync + 'static,
    ) -> Self {
        Self(Box::new(move |bed| match warmth {
            Warmth::Warm => {
                let rounds = (bed.sizes.warm_run_bytes / (k * WARM_STRIP_BYTES)).max(1);
                let (mut strips, crcs) = bed.warm_stripe(k + m);
                (0..rounds).for_each(|_| run(black_box(&mut strips), crcs));
                rounds * k * WARM_STRIP_BYTES
            }
            Warmth::Cold => {
                let (stripes, crcs) = bed.cold_stripes(k + m);
                stripes.map(|mut strips| run(&mut strips, crcs)).count() * k * COLD_STRIP_BYTES
            }
        }))
    }

    /// A case over single blocks: block by block, strip 1 changes to the content of strip 0.
    fn of_blocks(
        k: usize,
        m: usize,
        warmth: Warmth,
        run: impl Fn(&[u8], &[u8], &mut [&mut [u8]]) + Sync + 'static,
    ) -> Self {
        let one = move |strips: &mut Strips<'_>, block: usize| {
            let range = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
            let (data, parity) = strips.split_at_mut(k);
            let mut parity: Vec<&mut [u8]> =
                parity.iter_mut().map(|strip| &mut strip[range.clone()]).collect();
            run(&data[1][range.clone()], &data[0][range.clone()], &mut parity);
        };
        Self(Box::new(move |bed| match warmth {
            Warmth::Warm => {
                let blocks = bed.sizes.warm_run_bytes / 4 / BLOCK_BYTES;
                let (mut strips, _) = bed.warm_stripe(k + m);
                (0..blocks)
                    .for_each(|block| one(black_box(&mut strips), block % (WARM_STRIP_BYTES / BLOCK_BYTES)));
                blocks * BLOCK_BYTES
            }
            Warmth::Cold => {
                let (stripes, _) = bed.cold_stripes(k + m);
                let mut stripes: Vec<Strips<'_>> = stripes.collect();
                let per_strip = COLD_STRIP_BYTES / BLOCK_BYTES;
                let all = stripes.len() * per_strip;
                for at in scattered(all) {
                    one(&mut stripes[at / per_strip], at % per_strip);
                }
                all * BLOCK_BYTES
            }
        }))
    }
}

/// All numbers below `count`, each once, in an order that no prefetcher follows.
fn scattered(count: usize) -> impl Iterator<Item = usize> {
    // Multiples of a step that has no divisor in common with the count.
    let near = (count as f64 * 0.618) as usize | 1;
    let step = (near..).find(|step| gcd(*step, count) == 1).expect("some number has no common divisor");
    (0..count).map(move |index| index * step % count)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn shared<'a>(strips: &'a [&mut [u8]]) -> Vec<&'a [u8]> {
    strips.iter().map(|strip| &**strip).collect()
}

#[cfg(test)]
mod tests {
    use super::scattered;

    #[test]
    fn scattered_numbers_are_all_numbers() {
        for count in [1, 2, 3, 6, 55, 768, 1000, 4096] {
            let mut all: Vec<usize> = scattered(count).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..count), "{count}");
        }
    }
}
