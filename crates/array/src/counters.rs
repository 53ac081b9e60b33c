//! Counters and latencies of an array's operations.

use penstock_base::Histogram;
use std::time::Duration;

/// Operations of an array since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Data blocks that went through the log.
    pub logged_blocks: u64,
    /// Full stripes written past the log.
    pub fresh_stripes: u64,
    /// Stripes destaged.
    pub destaged_stripes: u64,
    /// Destages that read the old data and parity.
    pub read_modify_writes: u64,
    /// Destages that read the unchanged data.
    pub reconstruct_writes: u64,
    /// Destages that had all data of their columns, or began a stripe.
    pub full_writes: u64,
    /// Reads that needed reconstruction.
    pub degraded_reads: u64,
    /// Blocks, trailers and metadata blocks that did not verify.
    pub checksum_errors: u64,
    /// Blocks and metadata blocks written again from redundancy.
    pub repaired_blocks: u64,
    /// Stripes whose parity disagreed while all strips verified.
    pub parity_defects: u64,
    /// Rounds that made the log durable, by a flush of the carriers or by the write itself.
    pub log_flushes: u64,
    /// Records appended to the log.
    pub log_records: u64,
    /// Checkpoints completed.
    pub checkpoints: u64,
    /// Pages of the stripe table read.
    pub table_reads: u64,
}

/// Kinds of operations that clients wait for.
pub(crate) const CLIENT_KINDS: usize = 3;

/// Latencies of an array's operations.
#[derive(Default)]
pub struct ArrayLatency {
    /// Reads of a volume.
    pub read: Histogram,
    /// Writes of a volume, until the array's memory holds them: above all, waits for log space.
    pub write: Histogram,
    /// Full stripes past the log.
    pub fresh: Histogram,
    /// Appends of a record to the log, on all carriers.
    pub log_append: Histogram,
    /// Flushes of the log.
    pub log_flush: Histogram,
}

impl ArrayLatency {
    fn of_clients(&self) -> [&Histogram; CLIENT_KINDS] {
        [&self.read, &self.write, &self.fresh]
    }

    /// Reads and writes of volumes that were served, by kind: their number, and the sum of their times.
    pub(crate) fn served(&self) -> [(u64, Duration); CLIENT_KINDS] {
        self.of_clients().map(Histogram::count_and_sum)
    }

    /// Reads and writes of volumes that are being served.
    pub(crate) fn running(&self) -> u64 {
        self.of_clients().iter().map(|kind| kind.running()).sum()
    }
}
