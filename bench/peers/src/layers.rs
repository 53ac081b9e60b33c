//! `cargo xtask layers`: the processor time of Penstock for each byte or operation, by layer.
//!
//! A store with drives in memory does some lines of the comparison while perf looks, every 200 us of processor time, at
//! the calls that are open. Each sample is given twice: to the layer whose code ran, and to the layer on whose
//! behalf it ran, which is the same but for the kernel, the allocator and the C library. What the samples add up to
//! stands beside what /proc says of the process, and what no rule knows has a row of its own.

mod layer;
mod perf;
mod program;

use crate::lines::Line;
use crate::peer::{Held, Peer, Store};
use crate::proc::{Host, Other};
use crate::report::table;
use crate::rounds::median;
use crate::{guard, lines, report, setup};
use anyhow::{Context, Result};
use clap::Args;
use layer::Layer;
use penstock_bench::files::{Amount, Work};
use perf::{Recording, Sample};
use program::Program;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Lines without `--only`.
const ORDINARY: [&str; 6] = ["write", "read", "randread", "randread16", "randwrite", "randwrite16"];
const FULL: Amount =
    Amount { file_mib: 1024, ops: 40_000, files: 8_000, syncs: 8_000, limit: Duration::from_secs(4) };
const DRIVE_MIB: u64 = 1024;
/// The tmpfs; what the drives do not use of it is not there.
const MEMORY_MIB: u64 = 8 * 1024;
const LIMIT: Duration = Duration::from_secs(30 * 60);

#[derive(Args)]
pub(crate) struct Options {
    /// How often each line runs
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// These lines of the comparison
    #[arg(long, value_name = "LINE", value_delimiter = ',', default_values = ORDINARY)]
    only: Vec<String>,
    /// Little work in one round: does everything run?
    #[arg(long)]
    quick: bool,
    /// Also list this many functions of each line, the dearest first
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    top: usize,
    /// Write the figures here too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The penstock program, with line tables and frame pointers
    #[arg(long, value_name = "FILE", default_value = "target/layers/release/penstock")]
    program: PathBuf,
}

/// Seconds by layer.
type Seconds = BTreeMap<Layer, f64>;

/// One line once.
#[derive(Default)]
struct Round {
    units: f64,
    /// What /proc says of the process.
    process: f64,
    /// The same in a run at which nobody looked, for each unit.
    unlooked: f64,
    /// By the layer whose code ran.
    own: Seconds,
    /// By the layer on whose behalf it ran.
    behalf: Seconds,
    /// The kernel's part of the caller's time.
    caller: f64,
    functions: BTreeMap<(Layer, String), f64>,
}

/// What a run found.
#[derive(Serialize)]
struct Outcome {
    host: Host,
    rounds: u64,
    /// Share of all processors that went to neither the store nor the work: perf and whatever else ran.
    other_work: f64,
    step_us: u128,
    lines: Vec<Column>,
}

/// One line. Figures are medians of the rounds, in `unit`.
#[derive(Serialize)]
struct Column {
    id: &'static str,
    label: &'static str,
    unit: &'static str,
    rows: Vec<Row>,
    /// All samples of the process.
    sum: f64,
    /// What /proc says of the process.
    process: f64,
    /// The same in runs at which nobody looked.
    unlooked: f64,
    /// Samples over /proc: median, lowest and highest.
    covered: [f64; 3],
    /// Share of the samples that is attributed to a layer.
    attributed: f64,
    /// Not of the process: the kernel's part of the caller's time.
    caller: f64,
    functions: Vec<Function>,
}

#[derive(Serialize)]
struct Row {
    layer: Layer,
    own: f64,
    behalf: f64,
}

#[derive(Serialize)]
struct Function {
    layer: Layer,
    name: String,
    cost: f64,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    setup::ensure_can_mount()?;
    perf::ensure_there()?;
    let binary = setup::program(&options.program)?;
    let mut program = Program::open(&binary)?;
    let lines = report::chosen(&options.only).map_err(anyhow::Error::msg)?;
    guard::watch(LIMIT)?;
    let mut held = Held::default();
    let memory = setup::memory(&mut held, MEMORY_MIB)?;
    let host = Host::look();
    let amount = if options.quick { lines::QUICK } else { FULL };
    let store = Store::start(&binary, &memory, "store", DRIVE_MIB)?;
    let peer = store.into_peer(lines::PeerId::Penstock, amount)?;
    let rounds = if options.quick { 1 } else { options.rounds };
    let mut found: Vec<Vec<Round>> = lines.iter().map(|_| Vec::new()).collect();
    let other = Other::start(&[peer.processes]);
    for round in 1..=rounds {
        for (line, rows) in lines.iter().zip(&mut found) {
            eprint!("\r\x1b[Kround {round} of {rounds}: {}", line.label);
            let (units, process) = work(line, &peer)?;
            let unlooked = process / units;
            rows.push(Round { unlooked, ..record(line, &peer, &memory, &mut program)? });
        }
    }
    eprintln!("\r\x1b[K{rounds} rounds done");
    let other_work = other.share();
    let lines =
        lines.iter().zip(&found).map(|(line, rounds)| Column::new(line, rounds, options.top)).collect();
    let outcome = Outcome { host, rounds, other_work, step_us: perf::STEP.as_micros(), lines };
    print!("{}", outcome.text());
    setup::write_json(options.json.as_deref(), &outcome)
}

/// Does a line; gives what was done, and the processor time of the process.
fn work(line: &Line, peer: &Peer) -> Result<(f64, f64)> {
    // A read is short: it is done more than once, so that there are samples enough.
    let passes = if line.work == Work::ReadDirect { 3 } else { 1 };
    peer.folder.prepare(line.work).context("preparing")?;
    peer.settle();
    let before = peer.processes.cpu_seconds();
    let mut units = 0.0;
    for _ in 0..passes {
        units += peer.folder.run(line.work)?.units;
    }
    peer.settle();
    Ok((units, peer.processes.cpu_seconds() - before))
}

fn record(line: &Line, peer: &Peer, folder: &Path, program: &mut Program) -> Result<Round> {
    peer.folder.prepare(line.work).context("preparing")?;
    peer.settle();
    let own = std::process::id();
    let mut processes = peer.processes.ids();
    processes.push(own);
    let recording = Recording::start(&processes, folder)?;
    let (units, process) = work(line, peer)?;
    let data = recording.stop()?;
    let mut round = Round { units, process, ..Round::default() };
    perf::read(&data, |sample| match sample.process == own {
        true if sample.frames.first().is_some_and(perf::Frame::is_kernel) => {
            round.caller += perf::STEP.as_secs_f64()
        }
        true => {}
        false => round.take(sample, program),
    })?;
    Ok(round)
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

/// The layer whose code ran, the layer on whose behalf, and what tells where.
fn attribute(sample: &Sample, program: &mut Program) -> (Layer, Layer, String) {
    let kernel = sample.frames.iter().take_while(|frame| frame.is_kernel()).count();
    let (inside, outside) = sample.frames.split_at(kernel);
    let is_ours = |frame: &perf::Frame| frame.object.ends_with("/penstock");
    // A caller's place is behind its call, which may be the last thing of its line.
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
            // The C library keeps no chain of its calls; only what it does without calls of its own can be followed.
            (own, caller.unwrap_or(own), format!("{symbol} for {by}"))
        }
        _ => (Layer::Unknown, Layer::Unknown, symbol.to_owned()),
    }
}

impl Column {
    fn new(line: &Line, rounds: &[Round], top: usize) -> Self {
        let (unit, scale) = match line.unit() {
            ("MB/s", _) => ("s/GB", 1e9),
            _ => ("us", 1e6),
        };
        let cost = |of: &dyn Fn(&Round) -> f64| {
            median(rounds.iter().map(|round| of(round) * scale / round.units).collect())
        };
        let share = |of: &dyn Fn(&Round) -> f64| rounds.iter().map(of).collect::<Vec<f64>>();
        let at = |seconds: &Seconds, layer: Layer| seconds.get(&layer).copied().unwrap_or(0.0);
        let rows = Layer::ALL.into_iter().map(|(layer, _)| Row {
            layer,
            own: cost(&|round| at(&round.own, layer)),
            behalf: cost(&|round| at(&round.behalf, layer)),
        });
        let covered = share(&|round| round.sum() / round.process);
        let [low, high] =
            covered.iter().fold([f64::INFINITY, 0.0], |[low, high], one| [one.min(low), one.max(high)]);
        let mut functions: Vec<Function> = rounds
            .iter()
            .flat_map(|round| round.functions.keys())
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .map(|key| Function {
                layer: key.0,
                name: key.1.clone(),
                cost: cost(&|round| round.functions.get(key).copied().unwrap_or(0.0)),
            })
            .collect();
        functions.sort_by(|a, b| b.cost.total_cmp(&a.cost));
        functions.truncate(top);
        Self {
            id: line.id,
            label: line.label,
            unit,
            rows: rows.collect(),
            sum: cost(&Round::sum),
            process: cost(&|round| round.process),
            unlooked: cost(&|round| round.unlooked * round.units),
            covered: [median(covered), low, high],
            attributed: median(share(&|round| 1.0 - at(&round.own, Layer::Unknown) / round.sum())),
            caller: cost(&|round| round.caller),
            functions,
        }
    }

    fn cell(&self, cost: f64) -> String {
        match self.unit {
            "us" => format!("{cost:.2}"),
            _ => format!("{cost:.3}"),
        }
    }
}

impl Outcome {
    /// Tables as Markdown.
    fn text(&self) -> String {
        let mut out = format!(
            "{}\nother work, perf among it, took {:.0} % of the processors; medians of {} rounds; a sample every {} us\n",
            self.host,
            self.other_work * 100.0,
            self.rounds,
            self.step_us
        );
        let head: Vec<String> =
            self.lines.iter().map(|line| format!("{}, {}", line.label, line.unit)).collect();
        let head: Vec<&str> = std::iter::once("").chain(head.iter().map(String::as_str)).collect();
        let row = |name: &str, cell: &dyn Fn(&Column) -> String| {
            std::iter::once(name.to_owned()).chain(self.lines.iter().map(cell)).collect::<Vec<String>>()
        };
        let layers = |pick: &dyn Fn(&Row) -> f64| -> Vec<Vec<String>> {
            let named = Layer::ALL.into_iter().enumerate();
            // A layer that nothing was found of has no row; the one for nothing always has.
            let named = named.filter(|(index, (layer, _))| {
                *layer == Layer::Unknown || self.lines.iter().any(|line| pick(&line.rows[*index]) > 0.0)
            });
            named.map(|(index, (_, name))| row(name, &|line| line.cell(pick(&line.rows[index])))).collect()
        };
        let mut own = layers(&|row| row.own);
        own.push(row("all samples", &|line| line.cell(line.sum)));
        own.push(row("the process by /proc", &|line| line.cell(line.process)));
        own.push(row("covered", &|line| {
            let [median, low, high] = line.covered.map(|share| share * 100.0);
            format!("{median:.0} % ({low:.0} to {high:.0})")
        }));
        own.push(row("the process by /proc, without perf", &|line| line.cell(line.unlooked)));
        own.push(row("not sampled", &|line| line.cell(line.process - line.sum)));
        own.push(row("beside it, the kernel for the caller", &|line| line.cell(line.caller)));
        table(&mut out, "Processor time, by the layer whose code ran", &head, own);
        table(
            &mut out,
            "The same, with the kernel and the C library given to the layer that called them, where that is known",
            &head,
            layers(&|row| row.behalf),
        );
        for line in self.lines.iter().filter(|line| !line.functions.is_empty()) {
            let rows = line.functions.iter().map(|function| {
                let layer = Layer::ALL[function.layer as usize].1;
                vec![line.cell(function.cost), layer.to_owned(), format!("`{}`", function.name)]
            });
            table(&mut out, line.label, &[line.unit, "layer", "function"], rows.collect());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(units: f64, own: &[(Layer, f64)]) -> Round {
        let own: Seconds = own.iter().copied().collect();
        let process = own.values().sum::<f64>() * 2.0;
        Round { units, process, behalf: own.clone(), own, ..Round::default() }
    }

    #[test]
    fn a_column_holds_medians_in_its_unit() {
        let line = report::chosen(&["write".into()]).unwrap()[0];
        let rounds =
            [1.0, 3.0, 2.0].map(|seconds| round(1e9, &[(Layer::Array, seconds), (Layer::Unknown, seconds)]));
        let column = Column::new(&line, &rounds, 0);
        assert_eq!((column.unit, column.sum, column.process), ("s/GB", 4.0, 8.0));
        assert_eq!((column.covered, column.attributed), ([0.5; 3], 0.5));
        assert_eq!(column.rows[Layer::Array as usize].own, 2.0);
        let line = report::chosen(&["randread".into()]).unwrap()[0];
        let column = Column::new(&line, &[round(1000.0, &[(Layer::Kv, 0.5)])], 0);
        assert_eq!((column.unit, column.cell(column.sum)), ("us", "500.00".to_owned()));
    }

    #[test]
    fn the_ordinary_lines_exist() {
        assert_eq!(report::chosen(&ORDINARY.map(String::from)).unwrap().len(), ORDINARY.len());
    }
}
