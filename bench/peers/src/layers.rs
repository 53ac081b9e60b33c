//! `cargo xtask layers`: measures the processor time of Penstock per byte or operation, by layer.
//!
//! A store with drives in memory runs some workloads of the comparison. About every millisecond perf samples
//! the calls that are open on each processor. Each sample is attributed twice: to the layer whose code ran,
//! and to the layer on whose behalf it ran. The two differ only for the kernel, the allocator and the C
//! library. The sum of the samples is shown beside the time of the process in /proc. Samples that no rule
//! attributes have a row of their own.

mod layer;
mod perf;
mod program;
mod report;

use crate::lines::Line;
use crate::peer::{Held, Peer, Store};
use crate::proc::{Host, Other};
use crate::rebuild::{DRIVES, Drives};
use crate::{guard, lines, setup};
use anyhow::{Context, Result};
use clap::Args;
use layer::Layer;
use penstock_bench::files::{Amount, Phase, Work};
use perf::{Recording, Sample};
use program::Program;
use report::{Column, Outcome};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

/// Workloads that run without `--only`.
const ORDINARY: [&str; 7] = ["write", "read", "randread", "randread16", "randwrite", "randwrite16", REBUILD];
/// The workload that is not part of the comparison.
const REBUILD: &str = "rebuild";
const FULL: Amount =
    Amount { file_mib: 1024, ops: 40_000, files: 8_000, syncs: 8_000, limit: Duration::from_secs(4) };
const DRIVE_MIB: u64 = 1024;
/// Size of the tmpfs in MiB. Memory that the drives do not use is not allocated.
const MEMORY_MIB: u64 = 8 * 1024;
const LIMIT: Duration = Duration::from_secs(30 * 60);

#[derive(Args)]
pub(crate) struct Options {
    /// Number of times that each workload runs
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Run these workloads: those of the comparison, and `rebuild`
    #[arg(long, value_name = "LINE", value_delimiter = ',', default_values = ORDINARY)]
    only: Vec<String>,
    /// One round with little work, to check that everything runs
    #[arg(long)]
    quick: bool,
    /// Also list this many functions of each workload, the most expensive first
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    top: usize,
    /// Also write the figures to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Path of the penstock program, with line tables and frame pointers
    #[arg(long, value_name = "FILE", default_value = "target/layers/release/penstock")]
    program: PathBuf,
}

/// A workload that is sampled.
#[derive(Clone, Copy)]
struct Subject {
    id: &'static str,
    label: &'static str,
    /// Unit of the figures. A figure is seconds * `scale` / units of work.
    unit: &'static str,
    scale: f64,
    /// `None` for the rebuild: drives are failed, replaced and rebuilt, one after the other.
    work: Option<Work>,
}

impl Subject {
    fn chosen(only: &[String]) -> Result<Vec<Self>> {
        let (rebuild, lines): (Vec<String>, Vec<String>) = only.iter().cloned().partition(|id| id == REBUILD);
        let mut subjects = Vec::new();
        if !lines.is_empty() {
            subjects.extend(crate::report::chosen(&lines).map_err(anyhow::Error::msg)?.iter().map(Self::of));
        }
        if !rebuild.is_empty() {
            let label = "rebuild, for each GB of strips made again";
            subjects.push(Self { id: REBUILD, label, unit: "s/GB", scale: 1e9, work: None });
        }
        Ok(subjects)
    }

    fn of(line: &Line) -> Self {
        let (unit, scale) = match line.unit() {
            ("MB/s", _) => ("s/GB", 1e9),
            _ => ("us", 1e6),
        };
        Self { id: line.id, label: line.label, unit, scale, work: Some(line.work) }
    }
}

/// The store that is sampled, and the line tables of its program.
struct Bed {
    peer: Peer,
    drives: Drives,
    /// The folder for perf's files.
    folder: PathBuf,
    program: Program,
}

/// Processor time in seconds, by layer.
type Seconds = BTreeMap<Layer, f64>;

/// One run of a workload with perf. Times are in seconds.
#[derive(Default)]
struct Round {
    units: f64,
    /// Processor time of the process as in /proc.
    process: f64,
    /// The same per unit of work, in a run without perf.
    unlooked: f64,
    /// Time by the layer whose code ran.
    own: Seconds,
    /// Time by the layer on whose behalf it ran.
    behalf: Seconds,
    /// The kernel's part of the time of this process, which makes the calls.
    caller: f64,
    functions: BTreeMap<(Layer, String), f64>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    setup::ensure_can_mount()?;
    perf::ensure_there()?;
    let binary = setup::program(&options.program)?;
    let program = Program::open(&binary)?;
    let subjects = Subject::chosen(&options.only)?;
    guard::watch(LIMIT)?;
    let mut held = Held::default();
    let memory = setup::memory(&mut held, MEMORY_MIB)?;
    let host = Host::look();
    let amount = if options.quick { lines::QUICK } else { FULL };
    let store = Store::start(&binary, &memory, "store", DRIVE_MIB, None)?;
    let drives = Drives::of(&store)?;
    let peer = store.into_peer(lines::PeerId::Penstock, amount)?;
    let mut bed = Bed { peer, drives, folder: memory, program };
    let rounds = if options.quick { 1 } else { options.rounds };
    let mut found: Vec<Vec<Round>> = subjects.iter().map(|_| Vec::new()).collect();
    let other = Other::start(&[bed.peer.processes]);
    for round in 1..=rounds {
        for (subject, rows) in subjects.iter().zip(&mut found) {
            eprint!("\r\x1b[Kround {round} of {rounds}: {}", subject.label);
            bed.prepare(*subject)?;
            let (units, process) = bed.work(*subject)?;
            let unlooked = process / units;
            rows.push(Round { unlooked, ..bed.record(*subject)? });
        }
    }
    eprintln!("\r\x1b[K{rounds} rounds done");
    let other_work = other.share();
    let lines = subjects.iter().zip(&found);
    let lines = lines.map(|(subject, rounds)| Column::new(*subject, rounds, options.top)).collect();
    let outcome = Outcome { host, rounds, other_work, step_us: perf::STEP.as_micros(), lines };
    print!("{}", outcome.text());
    setup::write_json(options.json.as_deref(), &outcome)
}

impl Bed {
    fn prepare(&self, subject: Subject) -> Result<()> {
        self.peer.folder.prepare(subject.work.unwrap_or(Work::ReadDirect)).context("preparing")?;
        self.peer.settle();
        Ok(())
    }

    /// Runs a workload. Returns the units of work done, and the processor time of the store in seconds.
    fn work(&self, subject: Subject) -> Result<(f64, f64)> {
        let before = self.peer.processes.cpu_seconds();
        let mut units = 0.0;
        match subject.work {
            // One read of the file is short, so three are done to get enough samples.
            Some(Work::ReadDirect) => {
                for _ in 0..3 {
                    units += self.peer.folder.run(Work::ReadDirect)?.units;
                }
            }
            Some(work) => units += self.peer.folder.run(work)?.units,
            None => {
                for drive in DRIVES {
                    self.drives.fail(drive)?;
                    units += self.drives.rebuild(drive, &Phase::default())?.strip_bytes;
                }
            }
        }
        self.peer.settle();
        Ok((units, self.peer.processes.cpu_seconds() - before))
    }

    fn record(&mut self, subject: Subject) -> Result<Round> {
        self.prepare(subject)?;
        let own = std::process::id();
        let mut processes = self.peer.processes.ids();
        processes.push(own);
        let recording = Recording::start(&self.folder)?;
        let (units, process) = self.work(subject)?;
        let data = recording.stop()?;
        let mut round = Round { units, process, ..Round::default() };
        let program = &mut self.program;
        perf::read(&data, &processes, |sample| match sample.process == own {
            true if sample.frames.first().is_some_and(perf::Frame::is_kernel) => {
                round.caller += perf::STEP.as_secs_f64()
            }
            true => {}
            false => round.take(sample, program),
        })?;
        Ok(round)
    }
}

impl Round {
    fn take(&mut self, sample: &Sample, program: &mut Program) {
        let (own, behalf, function) = attribute(sample, program);
        let step = perf::STEP.as_secs_f64();
        *self.own.entry(own).or_default() += step;
        *self.behalf.entry(behalf).or_default() += step;
        *self.functions.entry((own, function)).or_default() += step;
    }

    fn sum(&self) -> f64 {
        self.own.values().sum()
    }
}

/// Returns the layer whose code ran, the layer on whose behalf it ran, and the name of the place.
fn attribute(sample: &Sample, program: &mut Program) -> (Layer, Layer, String) {
    let kernel = sample.frames.iter().take_while(|frame| frame.is_kernel()).count();
    let (inside, outside) = sample.frames.split_at(kernel);
    let is_ours = |frame: &perf::Frame| frame.object.ends_with("/penstock");
    // The address of a caller is behind its call, which may be the last instruction of its source line.
    let mut places =
        outside.iter().enumerate().filter(|(_, frame)| is_ours(frame)).map(|(index, frame)| {
            program.at(if kernel == 0 && index == 0 { frame.at } else { frame.at - 1 })
        });
    let found = places.find(|place| place.layer.is_some());
    let caller = found.as_ref().and_then(|place| place.layer);
    let by = found.map_or("a caller that is not known".into(), |place| place.function);
    let innermost = sample.frames.first();
    let symbol = innermost.map_or("unknown", |frame| frame.symbol.as_str());
    if !inside.is_empty() {
        let functions: Vec<&str> = inside.iter().map(|frame| frame.symbol.as_str()).collect();
        return (
            layer::of_kernel(&functions),
            caller.unwrap_or(Layer::Unknown),
            format!("{symbol} for {by}"),
        );
    }
    match innermost {
        Some(frame) if is_ours(frame) => {
            let layer = caller.unwrap_or(Layer::Unknown);
            (layer, layer, by.to_string())
        }
        Some(frame) if frame.object.starts_with('/') || frame.object == "[vdso]" => {
            let own = layer::of_libc(symbol);
            // The C library keeps no frame pointers. Its caller is found only if the function makes no calls
            // of its own.
            (own, caller.unwrap_or(own), format!("{symbol} for {by}"))
        }
        _ => (Layer::Unknown, Layer::Unknown, symbol.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ordinary_lines_exist() {
        assert_eq!(Subject::chosen(&ORDINARY.map(String::from)).unwrap().len(), ORDINARY.len());
        assert_eq!(Subject::chosen(&[REBUILD.into()]).unwrap().len(), 1);
        assert!(Subject::chosen(&["nonsense".into()]).is_err());
    }
}
