//! `cargo xtask rebuild`: how fast a drive is made again, beside what the drives allow, and what readers feel of it.
//!
//! In each round drives are failed and replaced one after the other: alone, then beside readers of either kind, who
//! also read as long without a rebuild. A rebuild begins when the instance says so and ends when it no longer does;
//! only reads within that time count. What the drives allow is copied between failing and replacing. Only drives that
//! carry no metadata are taken, so that one array is rebuilt.

mod copies;
mod report;

use crate::peer::{Held, Store};
use crate::proc::{Host, Other, Processes};
use crate::rest::Rest;
use crate::{guard, setup};
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use penstock_bench::files::{Amount, Folder, Phase, Timed, Work};
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Data strips, of six drives.
const K: usize = 4;
/// Drives without metadata, which is on the first three.
const DRIVES: [usize; 3] = [3, 4, 5];
/// At least this share of what the drives allow.
const AIM: f64 = 0.8;
/// How often the instance is asked how far it is.
const POLL: Duration = Duration::from_millis(10);
const LIMIT: Duration = Duration::from_secs(60 * 60);
/// How long one rebuild may take.
const PATIENCE: Duration = Duration::from_secs(10 * 60);

/// Who reads meanwhile: name, bytes of a read, threads.
const READERS: [(&str, usize, usize); 2] =
    [("4 KiB random reads, 4 jobs", 4 << 10, 4), ("1 MiB random reads, 1 job", 1 << 20, 1)];

#[derive(Args)]
pub(crate) struct Options {
    /// How often everything is done
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// MiB of each of the six drives; most of them is filled
    #[arg(long, value_name = "MIB", default_value_t = 1536, value_parser = clap::value_parser!(u64).range(512..))]
    drive_mib: u64,
    /// Small drives in one round: does everything run?
    #[arg(long)]
    quick: bool,
    /// Drives in a folder of this one instead of memory
    #[arg(long, value_name = "DIR")]
    disk: Option<PathBuf>,
    /// Write the figures here too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The penstock program
    #[arg(long, value_name = "FILE", default_value = "target/release/penstock")]
    program: PathBuf,
}

/// One rebuild, or more of them together.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Rebuilt {
    strip_bytes: f64,
    seconds: f64,
}

impl Rebuilt {
    fn add(&mut self, more: Self) {
        self.strip_bytes += more.strip_bytes;
        self.seconds += more.seconds;
    }

    fn rate(&self) -> f64 {
        self.strip_bytes / self.seconds
    }
}

/// What readers got.
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
    /// Threads of the copies, and how fast those were.
    copies: Vec<(usize, Rebuilt)>,
    /// In the order of the readers.
    beside: Vec<Beside>,
}

/// Everything that a run found.
#[derive(Serialize)]
struct Outcome {
    host: Host,
    /// The file system of the drives.
    drives: String,
    drive_mib: u64,
    data_mib: usize,
    /// Share of all processors that went to neither the store nor the readers and copies.
    other_work: f64,
    readers: [(&'static str, usize, usize); READERS.len()],
    rounds: Vec<Round>,
}

struct Bed {
    rest: Rest,
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

/// Most of what is free, in MiB.
fn data_mib(mount: &Path) -> Result<usize> {
    let found = rustix::fs::statvfs(mount)?;
    Ok(((found.f_bavail * found.f_frsize * 85 / 100) >> 20) as usize)
}

impl Bed {
    fn make(program: &Path, home: &Path, drive_mib: u64) -> Result<Self> {
        let store = Store::start(program, home, "store", drive_mib)?;
        let data_mib = data_mib(&store.mount)?;
        let amount = Amount { file_mib: data_mib, ops: 0, files: 0, syncs: 0, limit: Duration::MAX };
        let folder = Folder::new(&store.mount, amount, true);
        eprintln!("writing {data_mib} MiB");
        folder.prepare(Work::ReadDirect)?;
        let rest = Rest::of(&store.dir)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut threads = vec![1, cores, 4 * cores];
        threads.dedup();
        let bed = Self { rest, store, folder, data_mib, threads };
        // Once for nothing: the host gives its memory to who touches it first.
        for drive in DRIVES {
            bed.fail(drive)?;
            bed.rebuild(drive, &Phase::default())?;
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
            self.fail(drive)?;
            settle();
            for (threads, copied) in &mut round.copies {
                copied.add(self.copy(drive, *threads)?);
            }
            eprint!("\r\x1b[K{name}: rebuild alone");
            round.alone.add(self.rebuild(drive, &Phase::default())?);
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
                    self.fail(drive)?;
                    rebuilt.add(self.rebuild(drive, phase)?);
                }
                Ok((rebuilt.seconds, rebuilt))
            })?;
            round.beside.push(Beside { without, with, rebuilt });
        }
        Ok(round)
    }

    /// Reads while `work` goes on, which says when times count and for how many seconds they did.
    fn read<T>(
        &self,
        (_, bytes, jobs): (&str, usize, usize),
        work: impl FnOnce(&Phase) -> Result<(f64, T)>,
    ) -> Result<(Felt, T)> {
        let phase = Phase::default();
        std::thread::scope(|scope| {
            let readers = scope.spawn(|| self.folder.read_while(bytes, jobs, &phase));
            // The readers find their pace first.
            std::thread::sleep(Duration::from_millis(300));
            let worked = work(&phase);
            phase.end();
            let times = readers.join().map_err(|_| anyhow!("a reader panicked"))??;
            let (seconds, value) = worked?;
            Ok((Felt::new(&times, seconds), value))
        })
    }

    fn drive(&self, index: usize) -> Result<Value> {
        Ok(self.rest.get("/v1/drives")?[index].clone())
    }

    /// Takes a drive out of service.
    fn fail(&self, index: usize) -> Result<()> {
        let drive = self.drive(index)?;
        self.rest.post(&format!("/v1/drives/{}/fail", id(&drive)?))?;
        Ok(())
    }

    /// Replaces a failed drive and waits until it is whole; meanwhile times count.
    fn rebuild(&self, index: usize, phase: &Phase) -> Result<Rebuilt> {
        let drive = self.drive(index)?;
        let begun = Instant::now();
        self.rest.post(&format!("/v1/drives/{}/replace", id(&drive)?))?;
        let mut seen: Option<(Instant, Rebuilt)> = None;
        loop {
            let array = self.rest.get("/v1/arrays/data")?;
            ensure!(begun.elapsed() < PATIENCE, "the rebuild does not end");
            let job = &array["rebuild"];
            match &mut seen {
                None if job.is_null() => {
                    ensure!(
                        array["state"] != "ok",
                        "the rebuild was over before it was seen: take larger drives"
                    );
                }
                None => {
                    phase.count();
                    let stripes = job["total_stripes"].as_f64().context("a rebuild counts stripes")?;
                    let stripe_bytes = array["stripe_bytes"].as_f64().context("an array has stripes")?;
                    let strip_bytes = stripes * stripe_bytes / K as f64;
                    seen = Some((Instant::now(), Rebuilt { strip_bytes, seconds: 0.0 }));
                }
                Some((start, rebuilt)) if job.is_null() => {
                    phase.wait();
                    rebuilt.seconds = start.elapsed().as_secs_f64();
                    break;
                }
                Some(_) => {}
            }
            std::thread::sleep(POLL);
        }
        while self.rest.get("/v1/arrays/data")?["state"] != "ok" {
            ensure!(begun.elapsed() < PATIENCE, "the array does not become whole");
            std::thread::sleep(POLL);
        }
        seen.map(|(_, rebuilt)| rebuilt).context("it was seen")
    }

    /// Copies what a rebuild of a failed drive reads and writes.
    fn copy(&self, index: usize, threads: usize) -> Result<Rebuilt> {
        let array = self.rest.get("/v1/arrays/data")?;
        let strips = array["written_stripes"].as_u64().context("an array counts stripes")? as usize;
        let path = |index: usize| -> Result<PathBuf> {
            let drive = self.drive(index)?;
            Ok(PathBuf::from(drive["path"].as_str().context("a drive has a path")?))
        };
        let others = (0..DRIVES.len() * 2).filter(|other| *other != index).take(K);
        let from = others.map(path).collect::<Result<Vec<PathBuf>>>()?;
        let seconds = copies::run(&from, &path(index)?, strips, threads)?;
        Ok(Rebuilt { strip_bytes: (strips * copies::STRIP_BYTES) as f64, seconds })
    }
}

fn id(drive: &Value) -> Result<&str> {
    drive["id"].as_str().context("a drive has an id")
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
