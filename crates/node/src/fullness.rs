//! Fullness of the store, and the warnings at 80, 90 and 95 %.
//!
//! A warning is over when usage has fallen more than [`BACK_PERCENT`] below its level, so that usage which
//! varies around a level does not fill the list of events. Percentages are those of `df`: used blocks as a
//! share of the blocks that files may ever use, without the headroom for deletes. Fullness is no loss of
//! redundancy and does not change the health.

use crate::event::{EventKind, Severity};
use crate::events::Events;
use crate::report::SpaceReport;
use penstock_chunk::SpaceUsage;
use penstock_kv::Usage;
use std::cell::Cell;

/// Percentages at which a warning is raised.
const LEVELS: [u64; 3] = [80, 90, 95];
/// Percentage points below its level at which a warning is still kept.
const BACK_PERCENT: u64 = 5;

/// The current warnings: the number of [`LEVELS`] that have been reached, for data and for metadata.
#[derive(Default)]
pub(crate) struct Warnings([Cell<usize>; 2]);

/// Returns the number of levels that count as reached, from the number before and the current usage.
fn next_level(level: usize, used_percent: u64) -> usize {
    let reached = LEVELS.iter().filter(|at| used_percent >= **at).count();
    let held = LEVELS[..level].iter().filter(|at| used_percent + BACK_PERCENT >= **at).count();
    reached.max(held)
}

fn warning_percent(level: usize) -> u64 {
    level.checked_sub(1).map_or(0, |index| LEVELS[index])
}

impl Warnings {
    /// Reports of data and metadata, with the current warnings.
    pub(crate) fn report(&self, space: SpaceUsage, rows: Usage) -> Vec<SpaceReport> {
        let usable_blocks = space.total_blocks.saturating_sub(space.headroom_blocks);
        let used_blocks = space.total_blocks.saturating_sub(space.free_blocks).min(usable_blocks);
        let parts = [("data", used_blocks, usable_blocks), ("metadata", rows.used_bytes, rows.budget_bytes)];
        let percent = |used: u64, of: u64| (u128::from(used) * 100 / u128::from(of.max(1))).min(100) as u64;
        let report = |((name, used, of), level): ((&str, u64, u64), &Cell<usize>)| SpaceReport {
            name: name.to_owned(),
            used_percent: percent(used, of),
            warning_percent: warning_percent(level.get()),
        };
        parts.into_iter().zip(&self.0).map(report).collect()
    }

    /// Adds events for levels that have been reached, and for warnings that are over.
    pub(crate) fn watch(&self, spaces: Vec<SpaceReport>, object: &str, events: &Events) {
        for (space, level) in spaces.into_iter().zip(&self.0) {
            let (before, now) = (level.get(), next_level(level.get(), space.used_percent));
            level.set(now);
            let text = format!("{} is {} % full", space.name, space.used_percent);
            if now > before {
                let severity = if now == LEVELS.len() { Severity::Error } else { Severity::Warning };
                events.add(severity, EventKind::Full, object, text);
            } else if now < before {
                let text = format!("{text}: below {} % again", warning_percent(now + 1));
                events.add(Severity::Info, EventKind::FullOver, object, text);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::next_level;

    #[test]
    fn a_level_is_passed_once_and_left_five_percent_below() {
        let steps = [
            (0, 0),
            (79, 0),
            (80, 1),
            (79, 1),
            (81, 1),
            (75, 1),
            (74, 0),
            (96, 3),
            (90, 3),
            (89, 2),
            (85, 2),
            (84, 1),
            (100, 3),
            (0, 0),
        ];
        let mut level = 0;
        for (used_percent, expected) in steps {
            level = next_level(level, used_percent);
            assert_eq!(level, expected, "at {used_percent} %");
        }
    }
}
