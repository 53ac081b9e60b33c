//! What /proc and /sys say: processor time, memory, the machine.

use crate::guard::{in_network, is_alive};
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};

/// Processes that do a peer's work.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Processes {
    /// The kernel does it.
    None,
    /// One process.
    One(u32),
    /// All of a network namespace.
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

    /// Processor time that they have used so far, user and system, all threads.
    pub(crate) fn cpu_seconds(self) -> f64 {
        self.ids().into_iter().filter_map(cpu_seconds).sum()
    }

    /// Whether all that there were still run.
    pub(crate) fn are_alive(self) -> bool {
        match self {
            Self::None => true,
            Self::One(id) => is_alive(id),
            Self::Network(inode) => !in_network(inode).is_empty(),
        }
    }

    /// Waits until they have nothing to do, for a bounded time: work behind a reply must not fall into the next line.
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
    // The fields behind the name, which is in brackets; utime and stime are fields 14 and 15 of all.
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// A line of /proc/PID/status in KiB, as VmRSS.
pub(crate) fn memory_kib(id: u32, key: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{id}/status"))?;
    let line = status.lines().find(|line| line.starts_with(key)).with_context(|| format!("no {key}"))?;
    line.split_whitespace()
        .nth(1)
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("{key} is no number"))
}

/// Processor time of the machine while something runs.
#[derive(Debug)]
pub(crate) struct Other {
    start: Instant,
    machine: f64,
    own: f64,
    processes: Vec<(Processes, f64)>,
}

impl Other {
    /// Counts from now on; processes that are looked at run already.
    pub(crate) fn start(processes: &[Processes]) -> Self {
        let (machine, own) = machine_and_own_seconds();
        let processes = processes.iter().map(|one| (*one, one.cpu_seconds())).collect();
        Self { start: Instant::now(), machine, own, processes }
    }

    /// Share of all processors that since went to neither this process nor those.
    pub(crate) fn share(&self) -> f64 {
        let (machine, own) = machine_and_own_seconds();
        let used: f64 = self.processes.iter().map(|(one, before)| one.cpu_seconds() - before).sum();
        let others = machine - self.machine - (own - self.own) - used;
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        (others / self.start.elapsed().as_secs_f64() / cores).max(0.0)
    }
}

/// Processor time of the whole machine so far, without idling, and of this process.
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
    // user, nice, system, idle, iowait, irq, softirq, steal; time of guests is in user.
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

/// The machine.
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

/// The file system type that a folder is on, as /proc/self/mountinfo names it.
pub(crate) fn filesystem_of(path: &Path) -> Result<String> {
    let path = path.canonicalize()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let mut best: Option<(usize, String)> = None;
    for line in mounts.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (Some(point), Some(kind)) = (left.split(' ').nth(4), right.split(' ').next()) else { continue };
        // Of mounts over each other the last one counts.
        if path.starts_with(point) && best.as_ref().is_none_or(|(len, _)| *len <= point.len()) {
            best = Some((point.len(), kind.to_owned()));
        }
    }
    best.map(|(_, kind)| kind).with_context(|| format!("no mount holds {}", path.display()))
}

/// Drops what the kernel keeps of a mount, names, attributes and pages, and of that mount only: a remount does.
pub(crate) fn drop_caches(mount: &Path) -> Result<()> {
    use rustix::mount::{MountFlags, mount_remount};
    let flags = MountFlags::NOATIME | MountFlags::NODEV | MountFlags::NOSUID;
    mount_remount(mount, flags, c"").with_context(|| format!("{} cannot be remounted", mount.display()))
}
