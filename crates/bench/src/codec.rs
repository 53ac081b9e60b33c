//! Benchmark of the erasure code alone: each operation beside a ceiling, and beside ISA-L if it is installed.
//!
//! Kernels, ceilings and peers are measured in the same rounds, one after the other, so that other work on
//! the machine affects all of them alike. The results are medians, in 10^9 bytes of *data* (k strips) per
//! second.
//!
//! - **Warm**: one stripe with strips of 64 KiB is coded repeatedly in L2. Its strips lie 68 KiB and five
//!   cache lines apart, because strips at a power of two apart share sets of L1. The ceiling is the lower of
//!   two. One is a model of L2 from the reads and writes measured there, which it takes as not overlapping:
//!   `k / (k / read + m / write)`. The other is the rate of products measured in L1, divided by the number of
//!   rows that take products. A pass with checksums is compared with the model of L2 alone.
//! - **Cold**: stripes with strips of 128 KiB are coded one after the other, more of them than the caches
//!   hold. The ceiling is the same pass without its arithmetic: every output is the XOR of the sources.
//! - **Update**: single blocks of 4 KiB change, cold ones in scattered order. The ceiling is a model: the old
//!   and the new block and m blocks of parity are read, and m blocks are written back.

mod beds;
mod cases;
pub(crate) mod isal;
pub mod picture;

use crate::Line;
use beds::{Bed, Sizes};
use cases::{Case, Op, Warmth};
use penstock_raid::{Code, CodeError, Kernel};
use picture::{Column, Roofline};
use std::time::Instant;

/// The parameters of a run.
#[derive(Clone, Debug)]
pub struct CodecBench {
    /// The kernel; if `None`, the fastest one of this processor.
    pub kernel: Option<Kernel>,
    /// The number of measured rounds, of which the medians are taken.
    pub rounds: usize,
    /// Only checks that every case runs: uses little memory, and the results mean nothing.
    pub quick: bool,
    /// If set, measures only the ceilings and the lines whose name contains this text.
    pub only: Option<String>,
}

/// The codes that are measured.
const GEOMETRIES: [(usize, usize); 7] = [(4, 1), (8, 1), (4, 2), (8, 2), (16, 2), (8, 3), (10, 4)];

/// Measures the lines of one geometry at a time, on a fixed number of cores.
struct Lines<'a> {
    bench: &'a CodecBench,
    cores: usize,
    beds: Vec<Bed>,
    isal: Option<&'a isal::Isal>,
}

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Codec {
    /// All lines.
    pub lines: Vec<Line>,
    /// The rates of one core and its ceilings.
    pub roofline: Roofline,
}

/// Medians of the rates of memory, L2 and products, in GB/s.
#[derive(Clone, Copy, Debug)]
struct Limits {
    read: f64,
    write: f64,
    l2_read: f64,
    l2_write: f64,
    products: f64,
}

/// Runs the benchmark. Passes to `progress` the name of each part before it is measured.
pub fn run_codec(bench: &CodecBench, progress: &mut dyn FnMut(&str)) -> Result<Codec, CodeError> {
    let kernel = bench.kernel.or_else(|| Kernel::available().last().copied());
    let kernel = kernel.expect("the portable kernel runs everywhere");
    let all_cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let isal = isal::Isal::load();
    let mut result = Codec { lines: Vec::new(), roofline: Roofline::new(kernel.name()) };
    for cores in [1, all_cores].iter().take(if all_cores > 1 { 2 } else { 1 }) {
        let sizes = Sizes::new(bench.quick, *cores);
        let beds = (0..*cores).map(|_| Bed::new(sizes)).collect();
        let mut lines = Lines { bench, cores: *cores, beds, isal: isal.as_ref() };
        progress(&format!("ceilings of memory and ports, {}", cores_name(*cores)));
        lines.memory(kernel, &mut result.lines);
        for (k, m) in GEOMETRIES {
            progress(&format!("{k}+{m}, {}", cores_name(*cores)));
            let code = Code::new(k, m)?.with_kernel(kernel)?;
            lines.geometry(&code, &mut result)?;
        }
    }
    Ok(result)
}

/// The kernels that run on this processor, with their names.
pub fn kernels() -> Vec<(&'static str, Kernel)> {
    Kernel::available().into_iter().map(|kernel| (kernel.name(), kernel)).collect()
}

fn cores_name(cores: usize) -> String {
    if cores == 1 { "1 core".into() } else { format!("{cores} cores") }
}

fn median(runs: &[f64]) -> f64 {
    let mut runs = runs.to_vec();
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 2]
}

impl Lines<'_> {
    /// Measures the ceilings by themselves.
    fn memory(&mut self, kernel: Kernel, result: &mut Vec<Line>) {
        let ops = [
            ("L1 read", "L1", Op::ReadNear(32 << 10)),
            ("L1 write", "L1", Op::FillNear(32 << 10)),
            ("L2 read", "L2", Op::ReadNear(512 << 10)),
            ("L2 write", "L2", Op::FillNear(512 << 10)),
            ("memory read", "memory", Op::ReadFar),
            (
                "memory write, ordinary stores",
                "memory: lines are read before they are written",
                Op::FillFar(false),
            ),
            ("memory write, streaming stores", "memory", Op::FillFar(true)),
            ("products in L1, of bytes with coefficients", "the processor's port for them", Op::Products),
        ];
        let cases: Vec<Case> = ops.iter().map(|(.., op)| Case::limit(kernel, *op)).collect();
        let runs = self.rounds(&cases);
        for ((name, limit, _), runs) in ops.iter().zip(runs) {
            let ceiling = median(&runs);
            result.push(Line::new(
                format!("{name}, {}", cores_name(self.cores)),
                "GB/s",
                runs,
                ceiling,
                limit,
            ));
        }
    }

    /// Measures all lines of one code.
    fn geometry(&mut self, code: &Code, result: &mut Codec) -> Result<(), CodeError> {
        let (k, m) = (code.k(), code.m());
        let kernel = code.kernel();
        let limits =
            [Op::ReadFar, Op::FillFar(false), Op::ReadNear(512 << 10), Op::FillNear(512 << 10), Op::Products];
        let mut cases: Vec<Case> = limits.iter().map(|op| Case::limit(kernel, *op)).collect();
        let mut ops = vec![Op::Encode, Op::EncodeChecked];
        ops.extend((1..=m.min(3)).map(Op::Decode));
        ops.push(Op::Update);
        // For each line the indices of its own case, of the case of its ceiling and of the cases of its
        // peers.
        let mut wanted = Vec::new();
        for warmth in [Warmth::Warm, Warmth::Cold] {
            for op in &ops {
                let name = format!("{k}+{m} {}, {}, {}", op.name(), warmth.name(), cores_name(self.cores));
                if self.bench.only.as_ref().is_some_and(|only| !name.contains(only)) {
                    continue;
                }
                let own = cases.len();
                cases.push(Case::own(code, *op, warmth)?);
                let twin = match (warmth, op) {
                    (Warmth::Cold, Op::Encode | Op::EncodeChecked | Op::Decode(_)) => {
                        cases.push(Case::twin(code, *op));
                        Some(cases.len() - 1)
                    }
                    _ => None,
                };
                let peers = self.isal.map_or(Vec::new(), |isal| Case::peers(isal, code, *op, warmth));
                let peers: Vec<(usize, &str)> = peers
                    .into_iter()
                    .map(|(name, case)| {
                        cases.push(case);
                        (cases.len() - 1, name)
                    })
                    .collect();
                wanted.push((name, *op, warmth, own, twin, peers));
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let runs = self.rounds(&cases);
        let medians: Vec<f64> = runs.iter().map(|runs| median(runs)).collect();
        let [read, write, l2_read, l2_write, products] = std::array::from_fn(|at| medians[at]);
        let limits = Limits { read, write, l2_read, l2_write, products };
        let mut column = Column::new(k, m);
        for (name, op, warmth, own, twin, peers) in wanted {
            let (ceiling, limit) = match twin {
                Some(twin) => (medians[twin], Warmth::Cold.limit()),
                None => limits.ceiling(op, warmth, k, m),
            };
            column.add(op, warmth, medians[own], ceiling, peers.first().map(|(at, _)| medians[*at]));
            let line = Line::new(name, "GB/s", runs[own].clone(), ceiling, limit);
            match peers.is_empty() {
                true => result.lines.push(line),
                false => result.lines.extend(peers.iter().map(|(at, peer)| line.beside(peer, medians[*at]))),
            }
        }
        if self.cores == 1 {
            result.roofline.products = products;
            result.roofline.columns.push(column);
        }
        Ok(())
    }

    /// The rates of each case in each round, in GB/s over all cores.
    fn rounds(&mut self, cases: &[Case]) -> Vec<Vec<f64>> {
        let mut runs = vec![Vec::new(); cases.len()];
        // The first round is a warm-up for memory and tables, and is not counted.
        for round in 0..=self.bench.rounds {
            for (case, runs) in cases.iter().zip(&mut runs) {
                let rate = self.rate(case);
                if round > 0 {
                    runs.push(rate);
                }
            }
        }
        runs
    }

    fn rate(&mut self, case: &Case) -> f64 {
        let one = |bed: &mut Bed| {
            let start = Instant::now();
            let bytes = case.run(bed);
            bytes as f64 / 1e9 / start.elapsed().as_secs_f64()
        };
        match &mut self.beds[..] {
            [bed] => one(bed),
            beds => std::thread::scope(|scope| {
                let threads: Vec<_> = beds.iter_mut().map(|bed| scope.spawn(move || one(bed))).collect();
                threads.into_iter().map(|thread| thread.join().expect("a case does not panic")).sum()
            }),
        }
    }
}

impl Limits {
    /// The ceiling in GB/s and the resource that sets it. Reads and writes are taken as not overlapping, and
    /// each row that is no plain sum takes products.
    fn ceiling(&self, op: Op, warmth: Warmth, k: usize, m: usize) -> (f64, &'static str) {
        let made = if let Op::Decode(lost) = op { lost } else { m };
        // When encoding, one row is a plain sum. For one lost strip, the only row is one.
        let rows = match op {
            Op::Decode(lost) if lost > 1 => lost,
            Op::Encode | Op::EncodeChecked => m - 1,
            _ => 0,
        };
        let (k, m, made) = (k as f64, m as f64, made as f64);
        let (read, write) = match warmth {
            Warmth::Warm => (self.l2_read, self.l2_write),
            Warmth::Cold => (self.read, self.write),
        };
        if op == Op::Update {
            // The written blocks were read before, so only their write-back is added.
            let back = (1.0 / write - 1.0 / read).max(0.0);
            return (1.0 / ((2.0 + m) / read + m * back), warmth.limit());
        }
        let memory = k / (k / read + made / write);
        let ports = if rows == 0 { f64::INFINITY } else { self.products / rows as f64 };
        match op {
            Op::EncodeChecked => (memory, "the ports of products and carry-less products"),
            _ if ports < memory => (ports, "the port of products"),
            _ => (memory, warmth.limit()),
        }
    }
}
