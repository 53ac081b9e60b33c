//! Runs the same workloads on Penstock and on the file systems it is compared with, interleaved.
//!
//! `cargo xtask peers` builds and runs it. It starts the peers, runs the workloads in rounds, prints medians
//! as tables and JSON, and undoes everything: drives and bricks are on a tmpfs that it mounts itself, or in a
//! folder that it removes. The work on files is in `penstock_bench::files`, and the aims are in `lines.rs`.
//! The subcommands `layers` and `rebuild` measure Penstock alone.
#![forbid(unsafe_code)]
// It drives real processes by the real clock and is not part of a simulation.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod gluster;
mod guard;
mod layers;
mod lines;
mod many;
mod peer;
mod proc;
mod rebuild;
mod report;
mod rest;
mod rounds;
mod setup;

use anyhow::{Result, bail, ensure};
use clap::{Parser, Subcommand};
use lines::{FULL, Line, PeerId, QUICK};
use peer::{Held, Peer, Store};
use penstock_bench::files::{Amount, Work};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Size of each drive in MiB, for all workloads but `files`.
const DRIVE_MIB: u64 = 1024;
/// A run that takes longer counts as hung and is ended.
const LIMIT: Duration = Duration::from_secs(20 * 60);
const LIMIT_MANY: Duration = Duration::from_secs(2 * 60 * 60);

#[derive(Parser)]
#[command(about = "The same work on Penstock and on the file systems it is compared with")]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Number of times that each peer runs each workload
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Run only these workloads; `files` runs alone and only if it is named
    #[arg(long, value_name = "LINE", value_delimiter = ',')]
    only: Vec<String>,
    /// One round with little work, to check that everything runs
    #[arg(long)]
    quick: bool,
    /// Also write the figures to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Number of files that the workload `files` makes in one tree; a tenth as many follow in one directory
    #[arg(long, default_value_t = 1_000_000)]
    count: usize,
    /// Path of the penstock program
    #[arg(long, value_name = "FILE", default_value = "target/release/penstock")]
    program: PathBuf,
    /// Compare with this build of the program instead of with other file systems
    #[arg(long, value_name = "FILE")]
    before: Option<PathBuf>,
    /// Number of targets of each store of Penstock; by default as many as `penstock up` makes
    #[arg(long, value_name = "N")]
    targets: Option<u16>,
    /// The same for the build to compare with, which may be the same program
    #[arg(long, value_name = "N", requires = "before")]
    before_targets: Option<u16>,
    /// Run the workload `files` on the disk instead of in memory
    #[arg(long)]
    on_disk: bool,
    /// A folder on a real disk, for the workloads that sync
    #[arg(long, value_name = "DIR", default_value = "target")]
    disk: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the file system that does nothing, as one of the peers
    #[command(hide = true)]
    Nothing { mount: PathBuf },
    /// Measure the processor time of Penstock by layer
    Layers(layers::Options),
    /// Measure the rebuild of a drive, and reads during it
    Rebuild(rebuild::Options),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.command {
        Some(Command::Nothing { mount }) => peer::serve_nothing(mount),
        Some(Command::Layers(options)) => layers::run(options),
        Some(Command::Rebuild(options)) => rebuild::run(options),
        None => run(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    setup::ensure_can_mount()?;
    let program = setup::program(&args.program)?;
    let many = args.only.iter().any(|id| id == "files");
    ensure!(!many || args.only.len() == 1, "the workload files runs alone");
    let lines = if many { Vec::new() } else { report::chosen(&args.only).map_err(anyhow::Error::msg)? };
    guard::watch(if many { LIMIT_MANY } else { LIMIT })?;
    let mut held = Held::default();
    let disk = std::path::absolute(&args.disk)?.join(format!("peers-{}", std::process::id()));
    if many && args.on_disk {
        held.keep(guard::Guard::folder(&disk)?);
        return run_many(args, &program, &disk);
    }
    let memory_mib = match (many, &args.before) {
        (true, _) => many::drive_mib(args.count),
        (false, None) => 4096 - 64,
        // Two stores of the other build take the place of the bricks.
        (false, Some(_)) => 6 * 1024,
    };
    let memory = setup::memory(&mut held, memory_mib)?;
    if many {
        return run_many(args, &program, &memory);
    }
    held.keep(guard::Guard::folder(&disk)?);
    let before = args.before.as_deref().map(setup::program).transpose()?;
    let amount = if args.quick { QUICK } else { FULL };
    let targets = [args.targets, args.before_targets];
    compare(args, &lines, &Start { program, before, targets, memory, disk, amount })
}

fn run_many(args: &Args, program: &Path, home: &Path) -> Result<()> {
    let outcome = many::run(program, home, args.count, args.targets)?;
    print!("{}\n{outcome}", proc::Host::look());
    setup::write_json(args.json.as_deref(), &outcome)
}

/// Everything that is needed to start the peers.
struct Start {
    program: PathBuf,
    /// The build to compare with, if there is one.
    before: Option<PathBuf>,
    /// The numbers of targets of the stores of both.
    targets: [Option<u16>; 2],
    /// A folder on a tmpfs.
    memory: PathBuf,
    /// A folder on the disk.
    disk: PathBuf,
    amount: Amount,
}

impl Start {
    /// True if the peer takes part: with `before` all peers that are Penstock, otherwise all of this build.
    fn wants(&self, id: PeerId) -> bool {
        match self.before {
            None => id == id.today(),
            Some(_) => id.is_ours(),
        }
    }

    fn peer(&self, id: PeerId) -> Result<Peer> {
        let (program, build, targets) = match (&self.before, id == id.today()) {
            (Some(before), false) => (before, "before", self.targets[1]),
            _ => (&self.program, "now", self.targets[0]),
        };
        let store = |home: &Path, name: &str| {
            Store::start(program, home, &format!("{name}-{build}"), DRIVE_MIB, targets)
        };
        match id {
            PeerId::GlusterFs => gluster::start(&self.memory, self.amount),
            PeerId::Nothing => Peer::nothing(&self.memory, self.amount),
            PeerId::Disk => Peer::disk(&self.disk, self.amount),
            PeerId::Penstock | PeerId::Before => store(&self.memory, "store")?.into_peer(id, self.amount),
            PeerId::Degraded | PeerId::BeforeDegraded => {
                let store = store(&self.memory, "degraded")?;
                let folder = penstock_bench::files::Folder::new(&store.mount, self.amount, true);
                folder.prepare(Work::ReadDirect)?;
                store.lose_two_drives()?;
                store.into_peer(id, self.amount)
            }
            PeerId::PenstockOnDisk | PeerId::BeforeOnDisk => {
                store(&self.disk, "store")?.into_peer(id, self.amount)
            }
        }
    }
}

fn compare(args: &Args, lines: &[Line], start: &Start) -> Result<()> {
    let rounds = if args.quick { 1 } else { args.rounds as usize };
    let host = proc::Host::look();
    let (mut peers, mut skipped) = (Vec::new(), Vec::new());
    let is_wanted = |id| start.wants(id) && lines.iter().any(|line| line.is_for(id));
    let wanted = lines::PEERS.into_iter().filter(|(id, _)| is_wanted(*id));
    for (id, name) in wanted {
        eprintln!("starting: {name}");
        match start.peer(id) {
            Ok(peer) => peers.push(peer),
            Err(error) if id == PeerId::Penstock => return Err(error),
            Err(error) => {
                eprintln!("SKIPPED {name}: {error:#}");
                skipped.push((id, format!("{error:#}")));
            }
        }
    }
    let processes: Vec<_> = peers.iter().map(|peer| peer.processes).collect();
    let (begin, other) = (std::time::Instant::now(), proc::Other::start(&processes));
    let samples = rounds::run(lines, &peers, rounds);
    let other_work = other.share();
    let seconds = begin.elapsed().as_secs_f64();
    skipped.extend(samples.failures.iter().cloned());
    let outcome = report::Outcome {
        other_work,
        host,
        rounds,
        seconds,
        versions: peers.iter().map(|peer| (peer.id, peer.version.clone())).collect(),
        skipped,
        lines: lines.iter().map(|line| report::Row::new(line, &samples)).collect(),
        juicefs_recorded: lines::JUICEFS,
    };
    println!("{}", outcome.text());
    setup::write_json(args.json.as_deref(), &outcome)?;
    if outcome.skipped.iter().any(|(peer, _)| peer.is_ours()) {
        bail!("Penstock did not run all of its workloads");
    }
    Ok(())
}
