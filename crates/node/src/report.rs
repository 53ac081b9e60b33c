//! The state of a store as plain data: what the REST API and the command line show. Keys are snake_case and end in
//! their unit.
#![allow(missing_docs)]

use crate::scrubs::ScrubRecord;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StatusReport {
    /// `ok`, `degraded`, `critical` or `failed`.
    pub health: String,
    /// Why it is not `ok`, and what else needs attention, a line each.
    pub reasons: Vec<String>,
    pub redundancy_debt_stripes: u64,
    /// Copies of logs and checkpoints that are missing.
    pub redundancy_debt_carriers: u64,
    pub store: String,
    pub version: String,
    pub pid: u32,
    pub dir: String,
    pub api_url: String,
    pub mounts: Vec<String>,
    pub started_ns: i64,
    /// How drive I/O goes to the kernel: `io_uring` or `polling`.
    pub io_path: String,
    /// How blocks are coded: the kernel in use.
    pub code_path: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
    pub spaces: Vec<SpaceReport>,
    pub drives: Vec<DriveReport>,
    pub arrays: Vec<ArrayReport>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SpaceReport {
    /// `data` or `metadata`.
    pub name: String,
    /// As in `df`: of what files may ever use.
    pub used_percent: u64,
    /// The warning that stands: 80, 90 or 95; 0 for none.
    pub warning_percent: u64,
}

/// How often an operation of a layer took how long.
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
    /// Times in nanoseconds, and how many were shorter.
    pub below: Vec<(u64, u64)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DriveReport {
    pub id: String,
    /// `online`, `failed` or `missing`.
    pub state: String,
    pub reason: String,
    pub path: String,
    pub size_bytes: u64,
    pub checksum_errors: u64,
    pub io_errors: u64,
    pub timeouts: u64,
    pub repaired_blocks: u64,
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
    /// Arrays with a slice on it.
    pub arrays: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct JobReport {
    pub done_stripes: u64,
    pub total_stripes: u64,
    pub failed_stripes: u64,
    pub started_ns: i64,
    /// Seconds to the end at the speed so far; none in the first second.
    pub remaining_s: Option<u64>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MemberReport {
    pub drive: String,
    /// `active`, `rebuilding` or `missing`.
    pub state: String,
    pub carrier: bool,
    pub stale_strips: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ArrayReport {
    pub id: String,
    pub name: String,
    /// As in `4+2`.
    pub code: String,
    /// `ok`, `degraded`, `critical`, `failed` or `suspended`.
    pub state: String,
    pub suspended: Option<String>,
    pub redundancy_debt_stripes: u64,
    pub redundancy_debt_carriers: u64,
    pub unreadable_stripes: u64,
    pub stripes: u64,
    pub written_stripes: u64,
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
    /// How the last scrub that came to its end ended.
    pub last_scrub: Option<ScrubRecord>,
    /// When the next one is due; none where scrubs are not scheduled.
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
    pub logged_chunks: u64,
    pub commits: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FsCheckReport {
    pub clean: bool,
    pub inodes: u64,
    pub names: u64,
    pub removed_files: u64,
    pub chunks: u64,
    pub blocks: u64,
    pub blocks_beyond_end: u64,
    pub problems: Vec<String>,
}
