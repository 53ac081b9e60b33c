//! The same work on Penstock and on the file systems it is compared with, interleaved, with medians.
//!
//! `cargo xtask peers` builds and runs it. It sets the peers up, runs the lines in rounds, prints tables and JSON, and
//! undoes everything: drives and bricks lie on a tmpfs that it mounts itself, or in a folder that it removes. What is
//! done to files is `penstock_bench::files`; what is aimed at is in `lines.rs`.
#![forbid(unsafe_code)]
// It drives real processes by the real clock and is no part of a simulation.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod gluster;
mod guard;
mod lines;
mod many;
mod peer;
mod proc;
mod report;
mod rounds;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};
use lines::{FULL, Line, PeerId, QUICK};
use peer::{Held, Peer, Store};
use penstock_bench::files::{Amount, Work};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Drives on which the lines run.
const DRIVE_MIB: u64 = 1024;
/// A run that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(20 * 60);
const LIMIT_MANY: Duration = Duration::from_secs(2 * 60 * 60);

#[derive(Parser)]
#[command(about = "The same work on Penstock and on the file systems it is compared with")]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// How often each peer does each line
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    rounds: u64,
    /// Only these lines; `files` runs alone and only when it is named
    #[arg(long, value_name = "LINE", value_delimiter = ',')]
    only: Vec<String>,
    /// Little work in one round: does everything run?
    #[arg(long)]
    quick: bool,
    /// Write the figures here too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Files of the line `files` in one tree; a tenth as many follow in one directory
    #[arg(long, default_value_t = 1_000_000)]
    count: usize,
    /// The penstock program
    #[arg(long, value_name = "FILE", default_value = "target/release/penstock")]
    program: PathBuf,
    /// A folder on a real disk, for the lines that wait for one
    #[arg(long, value_name = "DIR", default_value = "target")]
    disk: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// What the peer that does nothing runs
    #[command(hide = true)]
    Nothing { mount: PathBuf },
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.command {
        Some(Command::Nothing { mount }) => peer::serve_nothing(mount),
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
    ensure!(
        rustix::process::geteuid().is_root(),
        "mounting a tmpfs and starting GlusterFS take root: run it as root"
    );
    ensure!(Path::new("/dev/fuse").exists(), "/dev/fuse is missing: load the fuse module (modprobe fuse)");
    let program =
        args.program.canonicalize().with_context(|| format!("no program {}", args.program.display()))?;
    let many = args.only.iter().any(|id| id == "files");
    ensure!(!many || args.only.len() == 1, "the line files runs alone");
    let lines = if many { Vec::new() } else { report::chosen(&args.only).map_err(anyhow::Error::msg)? };
    guard::watch(if many { LIMIT_MANY } else { LIMIT })?;
    let mut held = Held::default();
    let memory_mib = if many { many::drive_mib(args.count) } else { 4096 - 64 };
    let memory = memory(&mut held, memory_mib)?;
    if many {
        let outcome = many::run(&program, &memory, args.count)?;
        print!("{}\n{outcome}", proc::Host::look());
        return write_json(args, &outcome);
    }
    let disk = std::path::absolute(&args.disk)?.join(format!("peers-{}", std::process::id()));
    held.keep(guard::Guard::folder(&disk)?);
    compare(args, &lines, &Start { program, memory, disk, amount: if args.quick { QUICK } else { FULL } })
}

/// A tmpfs of its own, which takes everything away that lies on it.
fn memory(held: &mut Held, mib: u64) -> Result<PathBuf> {
    use rustix::mount::{MountFlags, mount};
    // Sockets lie below it, and their paths must be short.
    let path = std::env::temp_dir().join(format!("peers-{}", std::process::id()));
    held.keep(guard::Guard::folder(&path)?);
    held.keep(guard::Guard::mount(&path)?);
    let size = std::ffi::CString::new(format!("size={mib}m,mode=700"))?;
    mount("none", &path, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, size.as_c_str())
        .context("a tmpfs cannot be mounted")?;
    Ok(path)
}

/// What it takes to start the peers.
struct Start {
    program: PathBuf,
    /// On a tmpfs.
    memory: PathBuf,
    /// On the disk.
    disk: PathBuf,
    amount: Amount,
}

impl Start {
    fn peer(&self, id: PeerId) -> Result<Peer> {
        let store = |home: &Path, name: &str| Store::start(&self.program, home, name, DRIVE_MIB);
        match id {
            PeerId::Penstock => store(&self.memory, "store")?.into_peer(id, self.amount),
            PeerId::GlusterFs => gluster::start(&self.memory, self.amount),
            PeerId::Nothing => Peer::nothing(&self.memory, self.amount),
            PeerId::Degraded => {
                let store = store(&self.memory, "degraded")?;
                let folder = penstock_bench::files::Folder::new(&store.mount, self.amount, true);
                folder.prepare(Work::ReadDirect)?;
                store.lose_two_drives()?;
                store.into_peer(id, self.amount)
            }
            PeerId::Disk => Peer::disk(&self.disk, self.amount),
            PeerId::PenstockOnDisk => store(&self.disk, "store")?.into_peer(id, self.amount),
        }
    }
}

fn compare(args: &Args, lines: &[Line], start: &Start) -> Result<()> {
    let rounds = if args.quick { 1 } else { args.rounds as usize };
    let host = proc::Host::look();
    let (mut peers, mut skipped) = (Vec::new(), Vec::new());
    let wanted = lines::PEERS.into_iter().filter(|(id, _)| lines.iter().any(|line| line.peers.contains(id)));
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
    let used = || peers.iter().map(|peer| peer.processes.cpu_seconds()).sum::<f64>();
    let (begin, busy, used_before) = (Instant::now(), proc::machine_and_own_seconds(), used());
    let samples = rounds::run(lines, &peers, rounds);
    let seconds = begin.elapsed().as_secs_f64();
    let (machine, own) = proc::machine_and_own_seconds();
    let others = machine - busy.0 - (own - busy.1) - (used() - used_before);
    skipped.extend(samples.failures.iter().cloned());
    let outcome = report::Outcome {
        other_work: (others / seconds / host.cores().max(1) as f64).max(0.0),
        host,
        rounds,
        seconds,
        versions: peers.iter().map(|peer| (peer.id, peer.version.clone())).collect(),
        skipped,
        lines: lines.iter().map(|line| report::Row::new(line, &samples)).collect(),
        juicefs_recorded: lines::JUICEFS,
    };
    println!("{}", outcome.text());
    write_json(args, &outcome)?;
    let ours = [PeerId::Penstock, PeerId::Degraded, PeerId::PenstockOnDisk];
    if outcome.skipped.iter().any(|(peer, _)| ours.contains(peer)) {
        bail!("Penstock did not run all of its lines");
    }
    Ok(())
}

fn write_json(args: &Args, outcome: &impl serde::Serialize) -> Result<()> {
    let Some(path) = &args.json else { return Ok(()) };
    let json = serde_json::to_string_pretty(outcome)? + "\n";
    std::fs::write(path, json).with_context(|| format!("{} cannot be written", path.display()))
}
