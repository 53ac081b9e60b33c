//! `cargo xtask rebuild`: measures the rebuild of a drive against plain copies, and its effect on readers.
//!
//! In each round the drives are failed and replaced one after the other: first alone, then beside each kind
//! of reader. The readers also run for as long without a rebuild. A rebuild lasts from the time the instance
//! first reports it until it no longer does, and only reads within that time count. Between failing and
//! replacing a drive, plain copies measure the rate that the drives allow. Only drives that carry no metadata
//! are used, so that one array is rebuilt.

mod copies;
mod drives;
mod report;

pub(crate) use drives::{DRIVES, Drives};

use crate::peer::{Held, Store};
use crate::proc::{Host, Other, Processes};
use crate::{guard, setup};
use anyhow::{Result, anyhow};
use clap::Args;
use drives::{K, Rebuilt};
use penstock_bench::files::{Amount, Folder, Phase, Timed, Work};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The aim: the rate of a rebuild as a share of the fastest plain copies.
const AIM: f64 = 0.8;
const LIMIT: Duration = Duration::from_secs(60 * 60);

/// Kinds of readers: name, bytes per read, threads.
const READERS: [(&str, usize, usize); 2] =
    [("4 KiB random reads, 4 jobs", 4 << 10, 4), ("1 MiB random reads, 1 job", 1 << 20, 1)];

#[derive(Args)]
pub(crate) struct Options {
    /// Number of rounds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Size of each of the six drives in MiB; most of it is filled
    #[arg(long, value_name = "MIB", default_value_t = 1536, value_parser = clap::value_parser!(u64).range(512..))]
    drive_mib: u64,
    /// One round with small drives, to check that everything runs
    #[arg(long)]
    quick: bool,
    /// Put the drives in a folder of this one instead of in memory
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,
    /// Also write the figures to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Path of the penstock program
    #[arg(long, value_name = "FILE", default_value = "target/release/penstock")]
    program: PathBuf,
}

/// The rate of readers, and the times of their reads in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
struct Felt {
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    worst_us: f64,
    reads: usize,
}

/// Readers without and with a rebuild, and the rebuild beside them.
#[derive(Clone, Copy, Debug, Serialize)]
struct Beside {
    without: Felt,
    with: Felt,
    rebuilt: Rebuilt,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Round {
    alone: Rebuilt,
    /// The number of threads of the copies, and the speed that they reached.
    copies: Vec<(usize, Rebuilt)>,
    /// One entry for each kind of reader, in the order of `READERS`.
    beside: Vec<Beside>,
}

/// All results of a run, as printed and written as JSON.
#[derive(Serialize)]
struct Outcome {
    host: Host,
    /// The type of the file system that the drives are on.
    drives: String,
    drive_mib: u64,
    data_mib: usize,
    /// Share (0 to 1) of all processor time that went neither to the store nor to readers and copies.
    other_work: f64,
    readers: [(&'static str, usize, usize); READERS.len()],
    rounds: Vec<Round>,
}

struct Bed {
    drives: Drives,
    store: Store,
    folder: Folder,
    data_mib: usize,
    threads: Vec<usize>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    setup::ensure_can_mount()?;
    let program = setup::program(&options.program)?;
    guard::watch(LIMIT)?;
    let mut held = Held::default();
    let drive_mib = if options.quick { 512 } else { options.drive_mib };
    let home = match &options.disk {
        None => setup::memory(&mut held, drive_mib * 6 + 256)?,
        Some(disk) => {
            let home = std::path::absolute(disk)?.join(format!("rebuild-{}", std::process::id()));
            held.keep(guard::Guard::folder(&home)?);
            home
        }
    };
    let host = Host::look();
    let bed = Bed::make(&program, &home, drive_mib)?;
    let other = Other::start(&[Processes::One(bed.store.process)]);
    let count = if options.quick { 1 } else { options.rounds };
    let mut rounds = Vec::new();
    for round in 1..=count {
        rounds.push(bed.round(&format!("round {round} of {count}"))?);
    }
    eprintln!("\r\x1b[K{count} rounds done");
    let outcome = Outcome {
        host,
        drives: crate::proc::filesystem_of(&home)?,
        drive_mib,
        data_mib: bed.data_mib,
        other_work: other.share(),
        readers: READERS,
        rounds,
    };
    print!("{}", outcome.text());
    setup::write_json(options.json.as_deref(), &outcome)
}

/// Returns the amount of data to write in MiB: 85 % of the space that is available.
fn data_mib(mount: &Path) -> Result<usize> {
    let found = rustix::fs::statvfs(mount)?;
    Ok(((found.f_bavail * found.f_frsize * 85 / 100) >> 20) as usize)
}

impl Bed {
    fn make(program: &Path, home: &Path, drive_mib: u64) -> Result<Self> {
        let store = Store::start(program, home, "store", drive_mib, None)?;
        let data_mib = data_mib(&store.mount)?;
        let amount = Amount { file_mib: data_mib, ops: 0, files: 0, syncs: 0, limit: Duration::MAX };
        let folder = Folder::new(&store.mount, amount, true);
        eprintln!("writing {data_mib} MiB");
        folder.prepare(Work::ReadDirect)?;
        let drives = Drives::of(&store)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut threads = vec![1, cores, 4 * cores];
        threads.dedup();
        let bed = Self { drives, store, folder, data_mib, threads };
        // A first rebuild of each drive does not count: the machine's host provides memory slowly at first.
        for drive in DRIVES {
            bed.drives.fail(drive)?;
            bed.drives.rebuild(drive, &Phase::default())?;
        }
        Ok(bed)
    }

    fn round(&self, name: &str) -> Result<Round> {
        let mut round = Round {
            copies: self.threads.iter().map(|n| (*n, Rebuilt::default())).collect(),
            ..Round::default()
        };
        let settle = || Processes::One(self.store.process).settle();
        for drive in DRIVES {
            eprint!("\r\x1b[K{name}: copies");
            self.drives.fail(drive)?;
            settle();
            // A first copy does not count. Each counted one, like the rebuild after them, then writes to
            // memory that was just freed.
            self.copy(drive, 1)?;
            for (threads, copied) in &mut round.copies {
                copied.add(self.copy(drive, *threads)?);
            }
            eprint!("\r\x1b[K{name}: rebuild alone");
            round.alone.add(self.drives.rebuild(drive, &Phase::default())?);
            settle();
        }
        for reader in READERS {
            eprint!("\r\x1b[K{name}: {}", reader.0);
            let (without, ()) = self.read(reader, |phase| {
                phase.count();
                std::thread::sleep(Duration::from_secs_f64(round.alone.seconds));
                Ok((round.alone.seconds, ()))
            })?;
            eprint!("\r\x1b[K{name}: {} and rebuild", reader.0);
            let (with, rebuilt) = self.read(reader, |phase| {
                let mut rebuilt = Rebuilt::default();
                for drive in DRIVES {
                    self.drives.fail(drive)?;
                    rebuilt.add(self.drives.rebuild(drive, phase)?);
                }
                Ok((rebuilt.seconds, rebuilt))
            })?;
            round.beside.push(Beside { without, with, rebuilt });
        }
        Ok(round)
    }

    /// Reads while `work` runs. `work` decides when times count, and returns for how many seconds they did.
    fn read<T>(
        &self,
        (_, bytes, jobs): (&str, usize, usize),
        work: impl FnOnce(&Phase) -> Result<(f64, T)>,
    ) -> Result<(Felt, T)> {
        let phase = Phase::default();
        std::thread::scope(|scope| {
            let readers = scope.spawn(|| self.folder.read_while(bytes, jobs, &phase));
            // The readers reach a steady rate first.
            std::thread::sleep(Duration::from_millis(300));
            let worked = work(&phase);
            phase.end();
            let times = readers.join().map_err(|_| anyhow!("a reader panicked"))??;
            let (seconds, value) = worked?;
            Ok((Felt::new(&times, seconds), value))
        })
    }

    /// Copies as many strips as the rebuild of a failed drive reads and writes.
    fn copy(&self, index: usize, threads: usize) -> Result<Rebuilt> {
        let strips = self.drives.strips()?;
        let others = (0..K + 2).filter(|other| *other != index).take(K);
        let from = others.map(|other| self.drives.path(other)).collect::<Result<Vec<PathBuf>>>()?;
        let own = Processes::One(std::process::id());
        let before = own.cpu_seconds();
        let seconds = copies::run(&from, &self.drives.path(index)?, strips, threads)?;
        let cpu_seconds = own.cpu_seconds() - before;
        Ok(Rebuilt { strip_bytes: (strips * copies::STRIP_BYTES) as f64, seconds, cpu_seconds })
    }
}

impl Felt {
    fn new(times: &Timed, seconds: f64) -> Self {
        let us = |per_mille: usize| times.quantile(per_mille).as_secs_f64() * 1e6;
        Self {
            per_second: times.count() as f64 / seconds,
            p50_us: us(500),
            p99_us: us(990),
            p999_us: us(999),
            worst_us: us(1000),
            reads: times.count(),
        }
    }
}
