//! Reads processor time, memory, the machine and its mounts from /proc, and drops the caches of a mount.

use crate::guard::{in_network, is_alive};
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// The processes that do the work of a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Processes {
    /// The kernel does the work.
    None,
    /// One process, by its id.
    One(u32),
    /// All processes in a network namespace, by the namespace's inode.
    Network(u64),
}

impl Processes {
    pub(crate) fn ids(self) -> Vec<u32> {
        match self {
            Self::None => Vec::new(),
            Self::One(id) => vec![id],
            Self::Network(inode) => in_network(inode),
        }
    }

    /// Processor time in seconds that the processes have used so far, user and system, all threads.
    pub(crate) fn cpu_seconds(self) -> f64 {
        self.ids().into_iter().filter_map(cpu_seconds).sum()
    }

    /// True if the process is alive, or at least one process of the namespace.
    pub(crate) fn are_alive(self) -> bool {
        match self {
            Self::None => true,
            Self::One(id) => is_alive(id),
            Self::Network(inode) => !in_network(inode).is_empty(),
        }
    }

    /// Waits until the processes are idle, at most 2 s: late work must not fall into the next workload.
    pub(crate) fn settle(self) {
        const STEP: Duration = Duration::from_millis(100);
        let start = Instant::now();
        let mut before = self.cpu_seconds();
        while start.elapsed() < Duration::from_secs(2) {
            std::thread::sleep(STEP);
            let now = self.cpu_seconds();
            if now - before < 0.011 {
                return;
            }
            before = now;
        }
    }
}

fn cpu_seconds(id: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The fields after the name, which is in brackets. Of all fields, utime and stime are 14 and 15.
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// Returns the value of a line of /proc/PID/status in KiB, for example VmRSS.
pub(crate) fn memory_kib(id: u32, key: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
    let line = status.lines().find(|line| line.starts_with(key)).with_context(|| format!("no {key}"))?;
    line.split_whitespace()
        .nth(1)
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("{key} is no number"))
}

/// The processor time of the machine over an interval.
#[derive(Debug)]
pub(crate) struct Other {
    start: Instant,
    machine: f64,
    own: f64,
    processes: Vec<(Processes, f64)>,
}

impl Other {
    /// Starts the interval. `processes` must already be running.
    pub(crate) fn start(processes: &[Processes]) -> Self {
        let (machine, own) = machine_and_own_seconds();
        let processes = processes.iter().map(|one| (*one, one.cpu_seconds())).collect();
        Self { start: Instant::now(), machine, own, processes }
    }

    /// Share (0 to 1) of all processor time since the start that went neither to this process nor to those.
    pub(crate) fn share(&self) -> f64 {
        let (machine, own) = machine_and_own_seconds();
        let used: f64 = self.processes.iter().map(|(one, before)| one.cpu_seconds() - before).sum();
        let others = machine - self.machine - (own - self.own) - used;
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        (others / self.start.elapsed().as_secs_f64() / cores).max(0.0)
    }
}

/// Returns the processor time in seconds of the whole machine so far, without idle time, and of this process.
fn machine_and_own_seconds() -> (f64, f64) {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<f64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|word| word.parse().ok())
        .collect();
    // The fields are user, nice, system, idle, iowait, irq, softirq, steal. Guest time is in user.
    let busy: f64 = fields
        .iter()
        .take(8)
        .enumerate()
        .filter(|(index, _)| !matches!(index, 3 | 4))
        .map(|(_, ticks)| ticks)
        .sum();
    (
        busy / rustix::param::clock_ticks_per_second() as f64,
        cpu_seconds(std::process::id()).unwrap_or_default(),
    )
}

/// Description of the machine and its load, printed with the figures.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Host {
    cpu: String,
    cores: usize,
    memory_gib: u64,
    kernel: String,
    load_before: String,
}

impl Host {
    pub(crate) fn look() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, key: &str| {
            text.lines()
                .find(|line| line.starts_with(key))
                .and_then(|line| line.split(':').nth(1))
                .unwrap_or("unknown")
                .trim()
                .to_owned()
        };
        let memory_kib: u64 = field(&read("/proc/meminfo"), "MemTotal")
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok())
            .unwrap_or(0);
        Self {
            cpu: field(&read("/proc/cpuinfo"), "model name"),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_gib: (memory_kib + (1 << 19)) >> 20,
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            load_before: read("/proc/loadavg").split_whitespace().take(3).collect::<Vec<_>>().join(" "),
        }
    }
}

impl std::fmt::Display for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}, {} cores, {} GiB, Linux {}; load before: {}",
            self.cpu, self.cores, self.memory_gib, self.kernel, self.load_before
        )
    }
}

/// Returns the type of the file system that a folder is on, as in /proc/self/mountinfo.
pub(crate) fn filesystem_of(path: &Path) -> Result<String> {
    let path = path.canonicalize()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let mut best: Option<(usize, String)> = None;
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (Some(point), Some(kind)) = (left.split(' ').nth(4), right.split(' ').next()) else { continue };
        // If several mounts are on one folder, the last one counts.
        if path.starts_with(point) && best.as_ref().is_none_or(|(len, _)| *len <= point.len()) {
            best = Some((point.len(), kind.to_owned()));
        }
    }
    best.map(|(_, kind)| kind).with_context(|| format!("no mount holds {}", path.display()))
}

/// Drops the names, attributes and pages that the kernel caches for this mount only. A remount does that.
pub(crate) fn drop_caches(mount: &Path) -> Result<()> {
    use rustix::mount::{MountFlags, mount_remount};
    let flags = MountFlags::NOATIME | MountFlags::NODEV | MountFlags::NOSUID;
    mount_remount(mount, flags, c"").with_context(|| format!("{} cannot be remounted", mount.display()))
}
