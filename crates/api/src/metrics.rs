//! Metrics in the text format of Prometheus (exposition format 0.0.4).

use penstock_node::{FsReport, LatencyReport, SpaceReport, StatusReport};
use std::fmt::Write;

struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = write!(self.0, "# HELP penstock_{name} {help}\n# TYPE penstock_{name} {kind}\n");
    }

    fn sample(&mut self, name: &str, labels: &str, value: u64) {
        let _ = match labels.is_empty() {
            true => writeln!(self.0, "penstock_{name} {value}"),
            false => writeln!(self.0, "penstock_{name}{{{labels}}} {value}"),
        };
    }

    /// Writes metrics of each of these things, with the labels of the thing.
    fn metrics<T>(&mut self, metrics: &[Metric<T>], of: &[T], labels: impl Fn(&T) -> String) {
        let of: Vec<(&T, String)> = of.iter().map(|one| (one, labels(one))).collect();
        for (name, kind, help, get) in metrics {
            self.family(name, kind, help);
            for (one, labels) in &of {
                self.sample(name, labels, get(one));
            }
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// A metric of each of several things: its name, kind, help text and value.
type Metric<T> = (&'static str, &'static str, &'static str, fn(&T) -> u64);

const SPACES: [Metric<SpaceReport>; 2] = [
    ("space_used_percent", "gauge", "Used share of the space that files can use", |space| space.used_percent),
    ("space_warning_percent", "gauge", "Fullness warning in effect: 80, 90 or 95; 0 for none", |space| {
        space.warning_percent
    }),
];

/// All metrics as text.
pub(crate) fn text(status: &StatusReport, fs: &FsReport, latencies: &[LatencyReport]) -> String {
    let mut text = Text(String::new());
    text.family("health", "gauge", "0 ok, 1 degraded, 2 critical, 3 failed");
    let rank = ["ok", "degraded", "critical", "failed"].iter().position(|word| *word == status.health);
    text.sample("health", "", rank.map_or(3, |rank| rank as u64));
    for (name, help, value) in [
        ("redundancy_debt_stripes", "Stripes that lack strips", status.redundancy_debt_stripes),
        (
            "redundancy_debt_carriers",
            "Copies of logs and checkpoints that are missing",
            status.redundancy_debt_carriers,
        ),
        ("fs_total_bytes", "Size of the file system", fs.total_bytes),
        ("fs_free_bytes", "Free space of the file system", fs.free_bytes),
        ("fs_meta_used_bytes", "Bytes of metadata rows", fs.meta_used_bytes),
        ("fs_meta_budget_bytes", "Bytes that metadata rows may take", fs.meta_budget_bytes),
        (
            "fs_suspect_groups",
            "Allocation groups that are not used until a repair: marks of used blocks may be lost",
            fs.suspect_groups,
        ),
        (
            "fs_map_copy_timestamp_seconds",
            "Time of the last copy of names and maps, in seconds since 1970; 0 without one",
            fs.map_copy.as_ref().map_or(0, |copy| copy.created_ns.max(0).cast_unsigned() / 1_000_000_000),
        ),
        ("fs_swept", "1 once all written stripes that hold nothing are found", fs.swept.into()),
    ] {
        text.family(name, "gauge", help);
        text.sample(name, "", value);
    }
    for (name, help, value) in [
        ("fs_written_bytes_total", "Bytes that clients wrote", fs.written_bytes),
        ("fs_read_bytes_total", "Bytes that clients read", fs.read_bytes),
        ("fs_commits_total", "Commits of files", fs.commits),
        ("fs_whole_chunks_total", "Chunks written as whole stripes", fs.whole_chunks),
        (
            "fs_rewritten_chunks_total",
            "Of them, chunks whose unwritten part was read first",
            fs.rewritten_chunks,
        ),
        ("fs_logged_chunks_total", "Whole chunks that took the log", fs.logged_chunks),
        ("fs_group_reads_total", "Allocation groups that were read", fs.group_reads),
    ] {
        text.family(name, "counter", help);
        text.sample(name, "", value);
    }
    text.metrics(&SPACES, &status.spaces, |space| format!("space=\"{}\"", escaped(&space.name)));
    stacks(&mut text, status);
    drives(&mut text, status);
    arrays(&mut text, status);
    histograms(&mut text, latencies);
    text.0
}

/// Writes one histogram for each layer, operation and object that has a count.
fn histograms(text: &mut Text, latencies: &[LatencyReport]) {
    let name = "latency_seconds";
    text.family(name, "histogram", "How long operations took, by layer, operation and array or drive");
    let seconds = |ns: u64| ns as f64 / 1e9;
    for latency in latencies.iter().filter(|latency| latency.count > 0) {
        let LatencyReport { layer, op, object, .. } = latency;
        let labels = format!("layer=\"{layer}\",op=\"{op}\",object=\"{}\"", escaped(object));
        for (ns, below) in &latency.below {
            text.sample(&format!("{name}_bucket"), &format!("{labels},le=\"{}\"", seconds(*ns)), *below);
        }
        text.sample(&format!("{name}_bucket"), &format!("{labels},le=\"+Inf\""), latency.count);
        // Writing to a string cannot fail.
        let _ = writeln!(text.0, "penstock_{name}_sum{{{labels}}} {}", seconds(latency.sum_ns));
        text.sample(&format!("{name}_count"), &labels, latency.count);
    }
}

fn drives(text: &mut Text, status: &StatusReport) {
    let metrics: [Metric<penstock_node::DriveReport>; 10] = [
        ("drive_online", "gauge", "Whether the drive takes I/O", |drive| u64::from(drive.state == "online")),
        ("drive_read_bytes_total", "counter", "Bytes read", |drive| drive.read_bytes),
        ("drive_write_bytes_total", "counter", "Bytes written", |drive| drive.write_bytes),
        ("drive_reads_total", "counter", "Reads", |drive| drive.reads),
        ("drive_writes_total", "counter", "Writes", |drive| drive.writes),
        ("drive_flushes_total", "counter", "Flushes", |drive| drive.flushes),
        ("drive_io_errors_total", "counter", "I/Os that failed", |drive| drive.io_errors),
        ("drive_timeouts_total", "counter", "I/Os without an answer in time", |drive| drive.timeouts),
        ("drive_checksum_errors_total", "counter", "Contents that were not what was written", |drive| {
            drive.checksum_errors
        }),
        ("drive_repaired_blocks_total", "counter", "Blocks written again from redundancy", |drive| {
            drive.repaired_blocks
        }),
    ];
    text.metrics(&metrics, &status.drives, |drive| {
        format!("drive=\"{}\",path=\"{}\"", drive.id, escaped(&drive.path))
    });
}

fn stacks(text: &mut Text, status: &StatusReport) {
    let metrics: [Metric<penstock_node::StackReport>; 11] = [
        ("stack_serves", "gauge", "Whether the stack serves", |stack| u64::from(stack.reason.is_none())),
        ("target_total_bytes", "gauge", "Size of the target", |stack| stack.total_bytes),
        ("target_free_bytes", "gauge", "Free space of the target", |stack| stack.free_bytes),
        ("target_borrowed_bytes", "gauge", "Space of other targets on loan", |stack| stack.borrowed_bytes),
        ("target_lent_bytes", "gauge", "Space that other targets have on loan", |stack| stack.lent_bytes),
        ("target_queued_work", "gauge", "Removals, truncations and changes of owners yet to do", |stack| {
            stack.queued_work
        }),
        ("target_written_bytes_total", "counter", "Bytes that clients wrote", |stack| stack.written_bytes),
        ("target_read_bytes_total", "counter", "Bytes that clients read", |stack| stack.read_bytes),
        ("target_commits_total", "counter", "Commits of files", |stack| stack.commits),
        ("stack_meta_used_bytes", "gauge", "Bytes of rows in its key-value store", |stack| {
            stack.meta_used_bytes
        }),
        ("stack_meta_budget_bytes", "gauge", "Bytes that these rows may take", |stack| {
            stack.meta_budget_bytes
        }),
    ];
    text.metrics(&metrics, &status.stacks, |stack| format!("stack=\"{}\"", stack.stack));
}

fn arrays(text: &mut Text, status: &StatusReport) {
    let metrics: [Metric<penstock_node::ArrayReport>; 23] = [
        ("array_redundancy_debt_stripes", "gauge", "Stripes that lack strips", |array| {
            array.redundancy_debt_stripes
        }),
        ("array_unreadable_stripes", "gauge", "Stripes that cannot be read", |array| {
            array.unreadable_stripes
        }),
        ("array_suspended", "gauge", "Whether writes wait", |array| u64::from(array.suspended.is_some())),
        ("array_stripes", "gauge", "Stripes", |array| array.stripes),
        ("array_written_stripes", "gauge", "Stripes with data", |array| array.written_stripes),
        ("array_stripes_counted", "gauge", "Whether all stripes are counted", |array| {
            u64::from(array.is_counted)
        }),
        ("array_table_pages", "gauge", "Pages of the stripe table in memory", |array| array.table_pages),
        ("array_lost_table_pages", "gauge", "Pages of the stripe table without a copy", |array| {
            array.lost_table_pages
        }),
        ("array_table_reads_total", "counter", "Pages of the stripe table read", |array| array.table_reads),
        ("array_log_used_percent", "gauge", "Share of the log in use", |array| array.log_used_percent),
        ("array_dirty_bytes", "gauge", "Bytes in the log that wait for their strips", |array| {
            array.dirty_bytes
        }),
        ("array_checksum_errors_total", "counter", "Contents that did not verify", |array| {
            array.checksum_errors
        }),
        ("array_repaired_blocks_total", "counter", "Blocks repaired", |array| array.repaired_blocks),
        ("array_parity_defects_total", "counter", "Stripes with wrong parity", |array| array.parity_defects),
        ("array_degraded_reads_total", "counter", "Reads by reconstruction", |array| array.degraded_reads),
        ("array_logged_bytes_total", "counter", "Bytes that took the log", |array| array.logged_bytes),
        ("array_fresh_stripes_total", "counter", "Stripes written past the log", |array| array.fresh_stripes),
        ("array_destaged_stripes_total", "counter", "Stripes destaged", |array| array.destaged_stripes),
        ("array_log_records_total", "counter", "Records appended", |array| array.log_records),
        ("array_log_flushes_total", "counter", "Rounds that made the log durable", |array| array.log_flushes),
        ("array_checkpoints_total", "counter", "Checkpoints", |array| array.checkpoints),
        ("array_last_scrub_timestamp_seconds", "gauge", "When the last scrub ended; 0 for never", |array| {
            array.last_scrub.as_ref().map_or(0, |scrub| scrub.ended_ns.max(0).cast_unsigned() / 1_000_000_000)
        }),
        ("array_scrub_done_percent", "gauge", "How far a running scrub is; 100 while none runs", |array| {
            array.scrub.as_ref().map_or(100, |job| job.done_stripes * 100 / job.total_stripes.max(1))
        }),
    ];
    text.metrics(&metrics, &status.arrays, |array| format!("array=\"{}\"", escaped(&array.name)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::Histogram;
    use std::time::Duration;

    #[test]
    fn a_histogram_is_written_as_prometheus_reads_it() {
        let histogram = Histogram::default();
        for us in [1, 5, 2000] {
            histogram.record(Duration::from_micros(us));
        }
        let reports = [
            LatencyReport::new("drive", "read", "a\"b", &histogram),
            LatencyReport::new("fuse", "read", "", &Histogram::default()),
        ];
        let mut text = Text(String::new());
        histograms(&mut text, &reports);
        let labels = r#"layer="drive",op="read",object="a\"b""#;
        for line in [
            "# TYPE penstock_latency_seconds histogram".to_owned(),
            format!("penstock_latency_seconds_bucket{{{labels},le=\"0.000001024\"}} 1"),
            format!("penstock_latency_seconds_bucket{{{labels},le=\"0.000016384\"}} 2"),
            format!("penstock_latency_seconds_bucket{{{labels},le=\"+Inf\"}} 3"),
            format!("penstock_latency_seconds_sum{{{labels}}} 0.002006"),
            format!("penstock_latency_seconds_count{{{labels}}} 3"),
        ] {
            assert!(text.0.lines().any(|found| found == line), "{line} in {}", text.0);
        }
        assert!(!text.0.contains("fuse"), "what was never used has no rows");
    }
}
