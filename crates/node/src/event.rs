//! An event, and the names of the objects that events are about.

use penstock_array::Array;
use penstock_base::DriveId;
use serde::{Deserialize, Serialize};

/// Most events that are kept in memory.
pub(crate) const IN_MEMORY: usize = 1000;

/// Importance of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// For information.
    Info,
    /// Redundancy, speed or space is less than it should be.
    Warning,
    /// A person must act.
    Error,
}

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The instance runs.
    Started,
    /// The instance stopped and everything is durable.
    Stopped,
    /// The instance stopped but could not make everything durable.
    StopFailed,
    /// The instance could not start.
    StartFailed,
    /// The previous instance ended without stopping: killed, crashed or without power.
    UncleanEnd,
    /// A drive failed, or was failed by an administrator.
    DriveFailed,
    /// A drive that belongs to the store was not found.
    DriveMissing,
    /// A drive that was found was not used.
    DriveUnused,
    /// A drive that was missing or failed is in use again.
    DriveBack,
    /// A drive has contents from before the last start, and is rebuilt from the others.
    DriveOutdated,
    /// An administrator had an array start without drives that have data which no other drive has.
    LossAccepted,
    /// A stack did not open, and the others serve without its data.
    StackAbsent,
    /// An administrator had a target forgotten that does not serve: its data is lost.
    TargetForgotten,
    /// A blank drive replaced another one.
    DriveReplaced,
    /// A drive has become much slower than the others.
    DriveSlow,
    /// A slow drive is as fast as the others again.
    DriveSlowOver,
    /// Reconstruction of a lost drive's strips began.
    RebuildBegun,
    /// Reconstruction of a lost drive's strips ended, completely or not.
    RebuildEnded,
    /// Bringing a returned drive's strips up to date began.
    ResyncBegun,
    /// Bringing a returned drive's strips up to date ended, completely or not.
    ResyncEnded,
    /// A scrub began, or continued after a restart.
    ScrubBegun,
    /// A scrub ended.
    ScrubEnded,
    /// Blocks were reconstructed from redundancy and written again.
    BlocksRepaired,
    /// An array was suspended: writes to it wait.
    ArraySuspended,
    /// A suspended array accepts writes again.
    ArrayResumed,
    /// An array's state changed.
    ArrayState,
    /// The store cannot continue by itself: the instance ends, so that its supervisor starts it again.
    StoreFailed,
    /// The store's health changed.
    Health,
    /// Data or metadata reached 80, 90 or 95 % of its space.
    Full,
    /// Usage of data or metadata fell more than 5 percentage points below a level that it had reached.
    FullOver,
    /// The file system was mounted.
    Mounted,
    /// The file system was unmounted.
    Unmounted,
    /// A remote client was silent for longer than its lease time, and its session was ended.
    SessionEnded,
    /// Locks that a client had before a restart are another one's.
    LocksLost,
    /// A stripe cannot be read.
    StripeUnreadable,
    /// A file has data that cannot be read.
    FileDamaged,
    /// A repair of the file system ended.
    FsRepaired,
    /// A copy of the map was made.
    MapCopied,
    /// A copy of the map could not be made.
    MapCopyFailed,
    /// The key-value store was made anew from a copy of the map.
    MapRestored,
    /// Lines of the event files could not be read and were skipped.
    EventsTorn,
    /// Events were lost because they could not be written in time.
    EventsLost,
    /// A kind that a later release added.
    #[serde(other)]
    Unknown,
}

/// One event. Format in files: docs/format/events.md.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Number of the event; numbers continue over restarts.
    pub seq: u64,
    /// Time in nanoseconds since 1970.
    pub time_ns: i64,
    /// Importance.
    pub severity: Severity,
    /// Kind of the event.
    pub kind: EventKind,
    /// Object of the event: `node`, `drive ID`, `array NAME`, `fs NAME` or `inode NUMBER`.
    pub object: String,
    /// Description in one sentence.
    pub text: String,
}

/// A drive's name as the object of an event.
pub(crate) fn drive_object(id: DriveId) -> String {
    format!("drive {id}")
}

/// An array's name as the object of an event.
pub(crate) fn array_object(array: &Array) -> String {
    format!("array {}", array.name())
}
