//! Latencies of all layers as plain data, and detection of slow drives.

use crate::event::{EventKind, Severity, drive_object};
use crate::events::Events;
use crate::report::LatencyReport;
use crate::stack::Stack;
use penstock_array::Array;
use penstock_base::{DriveId, Histogram};
use penstock_drive::DriveHandle;
use penstock_wire::Kind;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Length of the window over which drives are compared.
const WINDOW: Duration = Duration::from_secs(10);
/// A drive is slow if its mean is above `SLOW` and above `SLOW_TIMES` times the median of the other drives.
const SLOW: Duration = Duration::from_millis(100);
const SLOW_TIMES: u32 = 4;
/// A window with fewer I/Os than this is not judged.
const FEWEST: u64 = 10;
/// Windows in a row that are not slow, after which a drive is no longer slow.
const WELL_WINDOWS: u32 = 3;

/// Times that the services took for requests.
#[derive(Default)]
pub(crate) struct ServiceLatency {
    read: Histogram,
    write: Histogram,
    commit: Histogram,
    names: Histogram,
}

impl ServiceLatency {
    pub(crate) fn of(&self, kind: Kind) -> &Histogram {
        match kind {
            Kind::Read => &self.read,
            Kind::Write => &self.write,
            Kind::Commit => &self.commit,
            _ => &self.names,
        }
    }
}

impl LatencyReport {
    /// Makes a report of a histogram. `object` names the array or drive, and is empty for other layers.
    pub fn new(layer: &str, op: &str, object: &str, histogram: &Histogram) -> Self {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let (count, sum) = histogram.count_and_sum();
        Self {
            layer: layer.to_owned(),
            op: op.to_owned(),
            object: object.to_owned(),
            count,
            sum_ns: ns(sum),
            p50_ns: ns(histogram.quantile(500)),
            p90_ns: ns(histogram.quantile(900)),
            p99_ns: ns(histogram.quantile(990)),
            max_ns: ns(histogram.max()),
            below: histogram.cumulative(),
        }
    }
}

/// The slow drives, each with the number of windows in a row in which it was not slow.
#[derive(Default)]
pub(crate) struct SlowDrives {
    last: Option<Duration>,
    before: BTreeMap<DriveId, (u64, Duration)>,
    slow: BTreeMap<DriveId, u32>,
}

/// Returns the drives that are slow, from the means of one window.
fn slow_ones(means: &[(DriveId, Duration)]) -> Vec<DriveId> {
    let is_slow = |(id, mean): &&(DriveId, Duration)| {
        let mut others: Vec<Duration> =
            means.iter().filter(|(other, _)| other != id).map(|(_, mean)| *mean).collect();
        others.sort();
        others.get(others.len() / 2).is_some_and(|median| *mean > SLOW && *mean > *median * SLOW_TIMES)
    };
    means.iter().filter(is_slow).map(|(id, _)| *id).collect()
}

fn count_and_sum(drive: &DriveHandle) -> (u64, Duration) {
    let latency = drive.latency();
    let all = [&latency.read, &latency.write, &latency.flush].map(Histogram::count_and_sum);
    all.into_iter().fold((0, Duration::ZERO), |(count, sum), (more, time)| (count + more, sum + time))
}

impl SlowDrives {
    /// Means of the window that has ended, for drives with enough I/Os.
    fn means(&mut self, drives: &[Rc<DriveHandle>]) -> Vec<(DriveId, Duration)> {
        let mut means = Vec::new();
        let mut now = BTreeMap::new();
        for drive in drives.iter().filter(|drive| drive.is_online()) {
            let (count, sum) = count_and_sum(drive);
            let (old_count, old_sum) = self.before.get(&drive.id()).copied().unwrap_or_default();
            let (ios, time) = (count - old_count, sum - old_sum);
            if ios >= FEWEST {
                means.push((drive.id(), time.div_f64(ios as f64)));
            }
            now.insert(drive.id(), (count, sum));
        }
        self.before = now;
        means
    }

    /// Evaluates one window. Returns the drives that have become slow, with their means, and the drives that
    /// no longer are.
    fn look(&mut self, means: &[(DriveId, Duration)]) -> (Vec<(DriveId, Duration)>, Vec<DriveId>) {
        let slow = slow_ones(means);
        let new = means.iter().filter(|(id, _)| slow.contains(id) && !self.slow.contains_key(id));
        let new: Vec<(DriveId, Duration)> = new.copied().collect();
        for (id, well) in &mut self.slow {
            *well = if slow.contains(id) { 0 } else { *well + 1 };
        }
        let over = self.slow.iter().filter(|(_, well)| **well >= WELL_WINDOWS).map(|(id, _)| *id);
        let over: Vec<DriveId> = over.collect();
        self.slow.retain(|id, _| !over.contains(id));
        self.slow.extend(new.iter().map(|(id, _)| (*id, 0)));
        (new, over)
    }

    pub(crate) fn is_slow(&self, id: DriveId) -> bool {
        self.slow.contains_key(&id)
    }
}

impl SlowDrives {
    /// Adds events for drives that have become much slower than the others, and for slow drives that have
    /// recovered.
    pub(crate) fn watch(&mut self, now: Duration, drives: &[Rc<DriveHandle>], events: &Events) {
        if self.last.is_some_and(|last| now < last + WINDOW) {
            return;
        }
        self.last = Some(now);
        let means = self.means(drives);
        let (new, over) = self.look(&means);
        for (id, mean) in new {
            let text =
                format!("I/O takes {} ms on average, much more than on the other drives", mean.as_millis());
            events.add(Severity::Warning, EventKind::DriveSlow, drive_object(id), text);
        }
        for id in over {
            let text = "I/O takes about as long as on the other drives again";
            events.add(Severity::Info, EventKind::DriveSlowOver, drive_object(id), text);
        }
    }
}

/// Latencies of the services, the key-value stores, the arrays and the drives.
pub(crate) fn latencies(
    service: &ServiceLatency,
    stacks: &[Stack],
    arrays: &[Rc<Array>],
    drives: &[Rc<DriveHandle>],
) -> Vec<LatencyReport> {
    let mut reports = vec![
        LatencyReport::new("target", "read", "", &service.read),
        LatencyReport::new("target", "write", "", &service.write),
        LatencyReport::new("target", "commit", "", &service.commit),
        LatencyReport::new("metadata", "request", "", &service.names),
    ];
    for stack in stacks {
        // The name of its array, if there are several.
        let object = if stacks.len() > 1 { stack.arrays.meta.name().to_owned() } else { String::new() };
        let latency = stack.kv.latency();
        reports.push(LatencyReport::new("kv", "commit", &object, &latency.commit));
        reports.push(LatencyReport::new("kv", "flush", &object, &latency.flush));
    }
    for array in arrays {
        let latency = array.latency();
        for (layer, op, histogram) in [
            ("volume", "read", &latency.read),
            ("volume", "write", &latency.write),
            ("volume", "write_fresh", &latency.fresh),
            ("log", "append", &latency.log_append),
            ("log", "flush", &latency.log_flush),
        ] {
            reports.push(LatencyReport::new(layer, op, array.name(), histogram));
        }
    }
    for drive in drives {
        let (latency, id) = (drive.latency(), drive.id().to_string());
        for (op, histogram) in [("read", &latency.read), ("write", &latency.write), ("flush", &latency.flush)]
        {
            reports.push(LatencyReport::new("drive", op, &id, histogram));
        }
    }
    reports
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::Id128;

    fn means(ms: &[u64]) -> Vec<(DriveId, Duration)> {
        let one = |(id, ms): (u64, &u64)| (DriveId(Id128::from_words(0, id)), Duration::from_millis(*ms));
        (0..).zip(ms).map(one).collect()
    }

    #[test]
    fn a_slow_drive_is_slow_in_itself_and_among_the_others() {
        let slow = |ms: &[u64]| {
            let means = means(ms);
            let found = slow_ones(&means);
            (0..means.len()).filter(|at| found.contains(&means[*at].0)).collect::<Vec<_>>()
        };
        assert_eq!(slow(&[1, 2, 900, 3]), [2]);
        assert_eq!(slow(&[1, 2, 99, 3]), [0; 0]);
        assert_eq!(slow(&[300, 400, 900, 300]), [0; 0]);
        assert_eq!(slow(&[1, 700, 900, 3, 2]), [1, 2]);
        assert_eq!(slow(&[900]), [0; 0]);
        assert_eq!(slow(&[]), [0; 0]);
    }

    #[test]
    fn slowness_is_told_once_and_over_after_three_good_windows() {
        let mut drives = SlowDrives::default();
        let (bad, good) = (means(&[1, 500, 1]), means(&[1, 1, 1]));
        let steps = [
            (&bad, 1, 0),
            (&bad, 0, 0),
            (&good, 0, 0),
            (&bad, 0, 0),
            (&good, 0, 0),
            (&good, 0, 0),
            (&good, 0, 1),
            (&good, 0, 0),
            (&bad, 1, 0),
        ];
        for (step, (means, new, over)) in steps.into_iter().enumerate() {
            let found = drives.look(means);
            assert_eq!((found.0.len(), found.1.len()), (new, over), "step {step}");
        }
    }
}
