//! State of a store as plain data, for the REST API and the command line.
//!
//! Keys are snake_case and end in their unit.
#![allow(missing_docs)]

use crate::pool_settings::PoolSettings;
use crate::scrub_record::ScrubRecord;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StatusReport {
    /// `ok`, `degraded`, `critical` or `failed`.
    pub health: String,
    /// Reasons why it is not `ok`, and other points that need attention, one line each.
    pub reasons: Vec<String>,
    pub redundancy_debt_stripes: u64,
    /// Number of copies of logs and checkpoints that are missing.
    pub redundancy_debt_carriers: u64,
    pub store: String,
    pub version: String,
    pub pid: u32,
    pub dir: String,
    /// URL of REST over TCP; none if only the folder's socket serves it.
    pub api_url: Option<String>,
    /// Address and port for clients over TCP; none if only the folder's socket serves them.
    pub tcp_address: Option<String>,
    pub mounts: Vec<String>,
    pub sessions: Vec<SessionReport>,
    pub started_ns: i64,
    /// Interface to the kernel for drive I/O: `io_uring` or `polling`.
    pub io_path: String,
    /// Kernel in use that encodes blocks.
    pub code_path: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub spaces: Vec<SpaceReport>,
    #[serde(default)]
    pub stacks: Vec<StackReport>,
    pub drives: Vec<DriveReport>,
    pub arrays: Vec<ArrayReport>,
}

/// A client of the services.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionReport {
    pub id: u64,
    pub client: String,
    /// Path at which it mounts; empty if it does not mount.
    pub mount: String,
    /// True if its client is another process; its session then has a lease time.
    pub remote: bool,
    pub silent_ms: u64,
    pub open_inodes: u64,
    /// `mount`: its kernel checks permissions. `gateway`: the service does, for the users that it names.
    pub role: String,
    /// Number of users that a gateway has named since the last start.
    pub users: u64,
    /// True if it has yet to send again, after a restart, what that may have lost: all others wait.
    #[serde(default)]
    pub recovers: bool,
}

/// A client of the services, with what it has and owes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SessionDetails {
    #[serde(flatten)]
    pub session: SessionReport,
    /// Lease time of the session; 0 for a client of the instance's own process.
    pub lease_ms: u64,
    pub shared_leases: u64,
    pub exclusive_leases: u64,
    /// Leases on attributes, and on the names of directories.
    #[serde(default)]
    pub attribute_leases: u64,
    /// Advisory locks.
    pub locks: u64,
    /// Calls to give something back or to sync a file that its client has not answered.
    pub unanswered_calls: u64,
    /// Its requests that are being executed.
    pub requests: u64,
}

impl SessionReport {
    /// True if it is a mount of a process of its own.
    pub fn is_separate_mount(&self) -> bool {
        self.remote && !self.mount.is_empty()
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SpaceReport {
    /// `data` or `metadata`.
    pub name: String,
    /// Used share of the space that files may ever use, as in `df`.
    pub used_percent: u64,
    /// The current warning: 80, 90 or 95; 0 for none.
    pub warning_percent: u64,
}

/// A stack: a data array, a metadata array with its key-value store, and a target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackReport {
    pub stack: u16,
    pub target: u32,
    /// The worse state of its arrays, or `absent`: then all that follows is unknown.
    pub state: String,
    /// Reason why it is absent.
    pub reason: Option<String>,
    /// True for the one whose key-value store has the names.
    pub has_names: bool,
    pub arrays: Vec<String>,
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub available_bytes: u64,
    /// Bytes on the volumes of other targets that this one has on loan. Free ones among them count as free.
    pub borrowed_bytes: u64,
    /// Bytes on its volume that other targets have on loan. They count as used.
    pub lent_bytes: u64,
    pub meta_used_bytes: u64,
    pub meta_budget_bytes: u64,
    /// Bytes that clients wrote to its target and read from it since the start.
    pub written_bytes: u64,
    pub read_bytes: u64,
    /// Commits of files.
    pub commits: u64,
    /// Removals, truncations and changes of owners that its target has yet to carry out.
    pub queued_work: u64,
    pub suspect_groups: u64,
    /// The newest copy of its map; none if there is none.
    pub map_copy: Option<MapCopyReport>,
}

/// The layout of a file, or that of new files in a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutReport {
    /// From the root of the file system.
    pub path: String,
    pub inode: u64,
    pub is_directory: bool,
    /// Number of targets. In a directory 0 stands for all that there are when a file is made.
    pub count: u16,
    /// Chunks in a row on one target.
    pub turn: u16,
    pub chunk_bytes: u64,
    /// The targets of a file, in their order; none for a directory.
    pub targets: Vec<u32>,
    /// Other targets than the first one with the names may have a part of the file.
    pub is_spread: bool,
}

/// Latency distribution of one operation of a layer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LatencyReport {
    /// `fuse`, `client`, `target`, `metadata`, `kv`, `volume`, `log` or `drive`.
    pub layer: String,
    pub op: String,
    /// The array or drive; empty for other layers.
    pub object: String,
    pub count: u64,
    pub sum_ns: u64,
    pub p50_ns: u64,
    pub p90_ns: u64,
    pub p99_ns: u64,
    pub max_ns: u64,
    /// Pairs of a time in nanoseconds and the number of operations that were shorter.
    pub below: Vec<(u64, u64)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DriveReport {
    pub id: String,
    /// `online`, `failed` or `missing`.
    pub state: String,
    pub reason: String,
    pub path: String,
    /// None if the drive was not found at the start.
    pub size_bytes: Option<u64>,
    pub checksum_errors: u64,
    pub io_errors: u64,
    pub timeouts: u64,
    pub repaired_blocks: u64,
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
    /// Names of the arrays with a slice on it.
    pub arrays: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobReport {
    pub done_stripes: u64,
    pub total_stripes: u64,
    pub failed_stripes: u64,
    pub started_ns: i64,
    /// Estimated seconds to the end at the speed so far; none in the first second.
    pub remaining_s: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemberReport {
    pub drive: String,
    /// `active`, `rebuilding` or `missing`.
    pub state: String,
    pub carrier: bool,
    pub stale_strips: u64,
    /// Strips of it that are in spare places on other members.
    pub moved_strips: u64,
}

/// A pool as it would be made: `up --dry-run`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    pub drives: u64,
    pub drive_bytes: u64,
    /// As in `4+2`.
    pub code: String,
    /// The plan in one line.
    pub plan: String,
    pub targets: u64,
    pub strip_bytes: u64,
    pub stripe_bytes: u64,
    pub raw_bytes: u64,
    /// Bytes of data that fit.
    pub usable_bytes: u64,
    /// The share of the drives' space that holds data.
    pub usable_percent: f64,
    /// Bytes on the drives for each byte of data.
    pub overhead: f64,
    /// The losses that it survives.
    pub survives: String,
    /// Rates in bytes per second at which a rebuild may read and write each drive: an assumption.
    pub read_rate: u64,
    pub write_rate: u64,
    /// Seconds to make the strips of a full drive again at these rates; none if nothing can be made again.
    pub rebuild_seconds: Option<f64>,
}

/// A pool: its drives and the arrays on them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolReport {
    pub name: String,
    /// The worst state of its arrays: `ok`, `spared`, `degraded`, `critical`, `failed` or `suspended`.
    pub state: String,
    /// As in `4+2`.
    pub code: String,
    /// The place of stripes on drives, in a few words.
    pub layout: String,
    /// Targets that serve.
    #[serde(default)]
    pub targets: u64,
    pub drives: u64,
    /// Those among them that take I/O.
    pub drives_online: u64,
    /// Drives of which each one may be lost now without losing data: not all of them at once.
    pub may_be_lost: u64,
    pub strip_bytes: u64,
    pub stripe_bytes: u64,
    pub total_bytes: u64,
    pub free_bytes: u64,
    /// Stripes of all arrays that lack strips.
    pub redundancy_debt_stripes: u64,
    /// False while stripes are counted. Those that are not yet count as lacking strips.
    pub is_counted: bool,
    pub settings: PoolSettings,
    pub arrays: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ArrayReport {
    pub id: String,
    pub name: String,
    /// As in `4+2`.
    pub code: String,
    /// The place of stripes on members, in a few words.
    pub layout: String,
    /// `ok`, `spared`, `degraded`, `critical`, `failed` or `suspended`.
    pub state: String,
    pub suspended: Option<String>,
    /// Reason why the array stopped by itself; a new start may open it.
    pub stopped: Option<String>,
    pub redundancy_debt_stripes: u64,
    pub redundancy_debt_carriers: u64,
    pub unreadable_stripes: u64,
    pub stripes: u64,
    pub written_stripes: u64,
    /// False while stripes are counted. Those that are not yet count as lacking strips.
    pub is_counted: bool,
    /// Pages of the stripe table in memory.
    pub table_pages: u64,
    /// Pages of the stripe table of which no copy is left. Nothing of their stripes can be read.
    pub lost_table_pages: u64,
    /// Pages of the stripe table that were read.
    pub table_reads: u64,
    pub stripe_bytes: u64,
    pub log_used_percent: u64,
    pub dirty_bytes: u64,
    pub checksum_errors: u64,
    pub repaired_blocks: u64,
    pub parity_defects: u64,
    pub degraded_reads: u64,
    pub logged_bytes: u64,
    pub fresh_stripes: u64,
    pub destaged_stripes: u64,
    pub read_modify_writes: u64,
    pub reconstruct_writes: u64,
    pub full_writes: u64,
    pub log_records: u64,
    pub log_flushes: u64,
    pub checkpoints: u64,
    pub members: Vec<MemberReport>,
    pub rebuild: Option<JobReport>,
    pub scrub: Option<JobReport>,
    /// Record of the last scrub that ran to its end.
    pub last_scrub: Option<ScrubRecord>,
    /// Time at which the next scrub is due, in nanoseconds since 1970; none if scrubs are not scheduled.
    pub next_scrub_ns: Option<i64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScrubSummary {
    pub array: String,
    pub stripes: u64,
    pub checksum_errors: u64,
    pub repaired_blocks: u64,
    pub parity_defects: u64,
    pub unreadable_stripes: Vec<u64>,
    /// Copies of superblocks and of labels.
    pub superblocks_repaired: u64,
    pub clean: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FsReport {
    pub id: String,
    pub name: String,
    pub filesets: Vec<String>,
    pub created_ns: i64,
    pub chunk_bytes: u64,
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub available_bytes: u64,
    pub meta_used_bytes: u64,
    pub meta_budget_bytes: u64,
    pub written_bytes: u64,
    pub read_bytes: u64,
    pub whole_chunks: u64,
    pub rewritten_chunks: u64,
    pub logged_chunks: u64,
    pub commits: u64,
    /// Allocation groups that were read.
    pub group_reads: u64,
    /// All written stripes that hold nothing since the last start are found.
    pub swept: bool,
    /// Allocation groups in which nothing is allocated until a repair: marks of used blocks may be lost.
    pub suspect_groups: u64,
    /// The newest copy of the map; none if there is none.
    pub map_copy: Option<MapCopyReport>,
    /// Progress of a running check or repair.
    pub check: Option<FsCheckProgress>,
}

/// A copy of the map on the data array.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapCopyReport {
    /// Rises from copy to copy.
    pub serial: u64,
    pub created_ns: i64,
    pub rows: u64,
    /// Bytes of its rows.
    pub bytes: u64,
}

/// The outcome of a restore from a copy of the map.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapRestoreReport {
    /// The number of the target whose rows were restored.
    pub target: u32,
    pub copy: MapCopyReport,
    pub rows: u64,
    /// Blocks of 4 KiB that were written since the copy was made.
    pub newer_blocks: u64,
    /// The file that has them.
    pub newer_file: Option<FileReport>,
    /// Files with blocks that may have been written since.
    pub changed_files: u64,
    pub changed_blocks: u64,
    /// These blocks stayed in the files. Otherwise they read as zeros.
    pub changed_kept: bool,
    /// The first of these files.
    pub listed_files: Vec<FileReport>,
}

/// One inconsistency. docs/fs-check.md explains the kinds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingReport {
    pub kind: String,
    pub inode: Option<u64>,
    /// Paths of the inode from the root; none if it has no name.
    pub paths: Vec<String>,
    pub text: String,
    pub repairable: bool,
}

/// Inconsistencies: the first thousand of each kind, and the number of each kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindingsReport {
    pub findings: Vec<FindingReport>,
    pub counts: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FsCheckReport {
    /// `clean`, `mended`, `damaged`, or `incomplete` if nothing is wrong on those targets that were checked.
    pub result: String,
    /// True if nothing is wrong now on the targets that were checked.
    pub clean: bool,
    /// Targets that do not serve, and were not checked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unchecked_targets: Vec<u32>,
    pub inodes: u64,
    pub names: u64,
    pub removed_files: u64,
    pub chunks: u64,
    pub blocks: u64,
    pub blocks_beyond_end: u64,
    /// Inconsistencies that exist now.
    #[serde(flatten)]
    pub now: FindingsReport,
    /// Result of the repair; none for a check.
    pub repair: Option<FsRepairReport>,
    /// Result of the restore before the repair; none without one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub restored: Vec<MapRestoreReport>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FsRepairReport {
    /// Inconsistencies before the repair.
    pub before: FindingsReport,
    /// Number of repairs by kind, including kinds that appeared during the repair.
    pub mended: BTreeMap<String, u64>,
    /// Files whose contents a person should inspect.
    pub suspect_files: Vec<FileReport>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileReport {
    pub inode: u64,
    pub paths: Vec<String>,
}

/// Files that may have something on a target that does not serve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetFilesReport {
    pub target: u32,
    /// `absent`, or `forgotten`: then the data is lost.
    pub state: String,
    /// Reason why it does not serve.
    pub reason: String,
    /// Work that waits for it.
    pub queued_work: u64,
    /// Number of files whose layout has the target, and which are long enough to reach it.
    pub files: u64,
    /// Bytes of these files that lie there at most: holes count too.
    pub most_bytes: u64,
    /// The first ones.
    pub listed_files: Vec<FileReport>,
}

/// Progress of a running check or repair.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FsCheckProgress {
    pub repair: bool,
    /// Number of the round: a repair judges everything again after each step.
    pub round: u64,
    pub phase: String,
    /// Rows of the name space read in this round.
    pub rows: u64,
}

/// Files whose data cannot be read any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedReport {
    pub files: Vec<DamagedFile>,
    /// Targets that do not serve, and files that may have something there.
    #[serde(default)]
    pub absent_targets: Vec<TargetFilesReport>,
    pub damaged_bytes: u64,
    /// Number of stripes of the data array that could not be read when last tried.
    pub unreadable_stripes: u64,
    /// Stripes of the metadata array that could not be read; they may contain names, maps or attributes.
    pub unreadable_metadata_stripes: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedFile {
    pub inode: u64,
    /// Paths from the root; none for an open file without a name.
    pub paths: Vec<String>,
    pub ranges: Vec<DamagedRange>,
}

/// A range of bytes of a file for which reads return an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedRange {
    pub offset_bytes: u64,
    pub length_bytes: u64,
    /// The target that has it.
    #[serde(default)]
    pub target: u32,
    /// First block on the data volume of that target, in blocks of 4 KiB.
    pub volume_block: u64,
    pub blocks: u64,
}
