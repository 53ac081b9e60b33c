//! Background jobs of an array. Each owns its progress and the state that only it needs.

pub(crate) mod carriers;
pub(crate) mod count;
pub(crate) mod destage;
pub(crate) mod metadata;
pub(crate) mod rate;
pub(crate) mod rebuild;
pub(crate) mod repair;
pub(crate) mod scrub;

use std::time::Duration;

/// The longest pause of a job for the sake of other I/O. A step that took longer waited itself, as for a full
/// host.
const MOST_PAUSE: Duration = Duration::from_secs(5);
/// Time before a job tries again what failed.
const RETRY: Duration = Duration::from_secs(5);

/// The progress of a long job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// Stripes done.
    pub done_stripes: u64,
    /// Stripes among them that were done before this start.
    pub done_before: u64,
    /// Stripes to do in all.
    pub total_stripes: u64,
    /// Stripes that could not be done.
    pub failed_stripes: u64,
    /// Nanoseconds since 1970 when the job began, or went on after a start.
    pub started_ns: i64,
}
