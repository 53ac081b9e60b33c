//! The workloads of the comparison: the work, the peers that run it, and the aims.

use penstock_bench::files::{Amount, Work};
use serde::Serialize;
use std::time::Duration;

/// A file system, or a build of Penstock, that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum PeerId {
    /// Penstock 4+2 on drives in memory.
    Penstock,
    /// GlusterFS 4+2 on bricks in the same memory.
    GlusterFs,
    /// The FUSE file system that does nothing.
    Nothing,
    /// Penstock with two data drives failed.
    Degraded,
    /// A folder on the disk's own file system.
    Disk,
    /// Penstock with its drives in a folder on the same disk.
    PenstockOnDisk,
    /// [`PeerId::Penstock`] of the build that `--before` names.
    Before,
    /// [`PeerId::Degraded`] of that build.
    BeforeDegraded,
    /// [`PeerId::PenstockOnDisk`] of that build.
    BeforeOnDisk,
}

/// Peers that are Penstock: the one of this build, and the same of the build before.
pub(crate) const BUILDS: [(PeerId, PeerId); 3] = [
    (PeerId::Penstock, PeerId::Before),
    (PeerId::Degraded, PeerId::BeforeDegraded),
    (PeerId::PenstockOnDisk, PeerId::BeforeOnDisk),
];

impl PeerId {
    /// Returns the peer of this build that runs the same workloads.
    pub(crate) fn today(self) -> Self {
        BUILDS.into_iter().find(|(_, before)| *before == self).map_or(self, |(today, _)| today)
    }

    /// True for Penstock, of either build.
    pub(crate) fn is_ours(self) -> bool {
        BUILDS.into_iter().any(|(today, _)| today == self.today())
    }
}

/// All peers with their names in the tables, in order.
pub(crate) const PEERS: [(PeerId, &str); 9] = [
    (PeerId::Penstock, "Penstock"),
    (PeerId::GlusterFs, "GlusterFS"),
    (PeerId::Nothing, "does nothing"),
    (PeerId::Degraded, "two drives lost"),
    (PeerId::Disk, "the disk's own"),
    (PeerId::PenstockOnDisk, "Penstock on disk"),
    (PeerId::Before, "the build before"),
    (PeerId::BeforeDegraded, "the build before, two drives lost"),
    (PeerId::BeforeOnDisk, "the build before, on disk"),
];

const MEMORY: &[PeerId] = &[PeerId::Penstock, PeerId::GlusterFs, PeerId::Nothing];
const READ: &[PeerId] = &[PeerId::Penstock, PeerId::GlusterFs, PeerId::Nothing, PeerId::Degraded];
const SYNC: &[PeerId] =
    &[PeerId::Penstock, PeerId::GlusterFs, PeerId::Nothing, PeerId::Disk, PeerId::PenstockOnDisk];

/// State of the mount's caches before a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caches {
    /// As the workload before left them.
    Left,
    /// Dropped.
    Cold,
    /// Filled by a `stat` of every file.
    Warm,
}

/// One workload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Line {
    /// The name for `--only`.
    pub(crate) id: &'static str,
    pub(crate) label: &'static str,
    pub(crate) work: Work,
    pub(crate) caches: Caches,
    /// Read-ahead of the kernel in KiB, if it is raised for this workload.
    pub(crate) read_ahead_kib: Option<u64>,
    pub(crate) peers: &'static [PeerId],
    /// The aims for this workload; empty if there are none.
    pub(crate) aims: &'static [Aim],
}

/// An aim: the figure of `of` is at least `ratio` times that of `against`.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Aim {
    pub(crate) of: PeerId,
    pub(crate) against: PeerId,
    pub(crate) ratio: f64,
}

const fn gluster(ratio: f64) -> Aim {
    Aim { of: PeerId::Penstock, against: PeerId::GlusterFs, ratio }
}

const fn nothing(ratio: f64) -> Aim {
    Aim { of: PeerId::Penstock, against: PeerId::Nothing, ratio }
}

const fn disk(ratio: f64) -> Aim {
    Aim { of: PeerId::PenstockOnDisk, against: PeerId::Disk, ratio }
}

const DEGRADED: Aim = Aim { of: PeerId::Degraded, against: PeerId::Penstock, ratio: 0.7 };

impl Line {
    const fn new(id: &'static str, label: &'static str, work: Work, aims: &'static [Aim]) -> Self {
        let peers = match work {
            Work::ReadDirect | Work::ReadBuffered | Work::RandomRead(_) => READ,
            Work::WriteSync(_) => SYNC,
            _ => MEMORY,
        };
        Self { id, label, work, caches: Caches::Left, read_ahead_kib: None, peers, aims }
    }

    const fn caches(self, caches: Caches) -> Self {
        Self { caches, ..self }
    }

    /// True if the peer runs this workload.
    pub(crate) fn is_for(&self, peer: PeerId) -> bool {
        self.peers.contains(&peer.today())
    }

    /// Returns the unit of the figures, and the number of units of work (bytes or operations) in one of it.
    pub(crate) fn unit(&self) -> (&'static str, f64) {
        match self.work {
            Work::WriteDirect | Work::ReadDirect | Work::ReadBuffered => ("MB/s", 1e6),
            _ => ("/s", 1.0),
        }
    }
}

/// All workloads, in the order in which they run. A workload may use the files that the one before left.
pub(crate) const LINES: [Line; 14] = [
    Line::new(
        "write",
        "1 MiB write, O_DIRECT, fsync at the end",
        Work::WriteDirect,
        &[gluster(8.0), nothing(0.35)],
    ),
    Line::new("read", "1 MiB read, O_DIRECT", Work::ReadDirect, &[gluster(8.0), nothing(0.5), DEGRADED]),
    Line::new("buffered", "buffered read, cold", Work::ReadBuffered, &[gluster(8.0), DEGRADED])
        .caches(Caches::Cold),
    Line {
        read_ahead_kib: Some(4096),
        ..Line::new(
            "ahead",
            "buffered read, cold, 4 MiB read-ahead",
            Work::ReadBuffered,
            &[gluster(8.0), DEGRADED],
        )
        .caches(Caches::Cold)
    },
    Line::new(
        "randread",
        "4 KiB random read, 1 job",
        Work::RandomRead(1),
        &[gluster(8.0), nothing(0.5), DEGRADED],
    ),
    Line::new(
        "randread16",
        "4 KiB random read, 16 jobs",
        Work::RandomRead(16),
        &[gluster(8.0), nothing(0.5), DEGRADED],
    ),
    Line::new("randwrite", "4 KiB random write, 1 job", Work::RandomWrite(1), &[gluster(8.0)]),
    Line::new("randwrite16", "4 KiB random write, 16 jobs", Work::RandomWrite(16), &[gluster(8.0)]),
    Line::new("create", "create, write 4 KiB, close", Work::Create(4096), &[gluster(20.0)]),
    Line::new("stat", "stat, cold", Work::Stat(1), &[gluster(8.0)]).caches(Caches::Cold),
    Line::new("statwarm", "stat, warm", Work::Stat(50), &[gluster(8.0)]).caches(Caches::Warm),
    Line::new("unlink", "unlink", Work::Unlink, &[gluster(8.0)]),
    Line::new("fsync", "4 KiB write and fsync, 1 job", Work::WriteSync(1), &[gluster(8.0), disk(0.5)]),
    Line::new("fsync16", "4 KiB write and fsync, 16 jobs", Work::WriteSync(16), &[gluster(8.0), disk(1.0)]),
];

/// The amount of work of each workload.
pub(crate) const FULL: Amount =
    Amount { file_mib: 256, ops: 20_000, files: 4_000, syncs: 4_000, limit: Duration::from_millis(2_500) };
pub(crate) const QUICK: Amount =
    Amount { file_mib: 32, ops: 500, files: 200, syncs: 100, limit: Duration::from_millis(500) };

/// Figures of JuiceFS that were recorded elsewhere and not measured here, in the units of the workloads.
pub(crate) const JUICEFS: [(&str, f64); 7] = [
    ("write", 335.0),
    ("read", 2_048.0),
    ("randread", 14_100.0),
    ("randwrite", 2_600.0),
    ("create", 726.0),
    ("stat", 11_464.0),
    ("unlink", 1_671.0),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aims_speak_of_peers_that_run_the_line() {
        for line in LINES {
            for aim in line.aims {
                assert!(line.peers.contains(&aim.of) && line.peers.contains(&aim.against), "{}", line.id);
            }
        }
        for (id, _) in JUICEFS {
            assert!(LINES.iter().any(|line| line.id == id), "{id}");
        }
    }
}
