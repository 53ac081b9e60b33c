//! Errors of arrays and volumes, and how a caller must react to each.

use penstock_base::{ArrayId, DecodeError, ErrorKind};
use penstock_drive::DriveError;
use std::collections::BTreeSet;

/// The reason why an operation on an array or volume failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ArrayError {
    /// Fewer strips of a stripe verified than the code needs.
    #[error("array {array} stripe {stripe}: {good} strips can be read and {wanted} are needed")]
    Unreadable {
        /// The array.
        array: ArrayId,
        /// The stripe.
        stripe: u64,
        /// Strips that verified.
        good: usize,
        /// Strips that the code needs.
        wanted: usize,
    },
    /// A reconstructed block does not agree with the checksum of the lost strip's trailer.
    #[error("array {array} stripe {stripe}: reconstruction of strip {position} disagrees with its checksum")]
    Disagrees {
        /// The array.
        array: ArrayId,
        /// The stripe.
        stripe: u64,
        /// The strip.
        position: usize,
    },
    /// More members are missing than the code survives, so the array does not open.
    #[error("array {name}: {missing} of {members} members are missing and it survives {allowed}: {which}")]
    TooManyMissing {
        /// Name of the array.
        name: String,
        /// Members missing.
        missing: usize,
        /// Members in all.
        members: usize,
        /// Members that may be missing.
        allowed: usize,
        /// The missing drives.
        which: String,
    },
    /// Stripes would be lost that can be read with drives that are absent or have older contents.
    #[error(
        "array {name}: {stripes} stripes cannot be read without {which}; nothing was changed: bring these drives back as they were last, or give up what only they have (`penstock up --accept-loss`)"
    )]
    WouldLose {
        /// Name of the array.
        name: String,
        /// Stripes with too few strips left.
        stripes: u64,
        /// The drives that are needed.
        which: String,
    },
    /// No carrier that is here returns pages of the stripe table, which the opening needs.
    #[error(
        "array {name}: {} of the stripe table cannot be read on any drive that has them, and up to {stripes} stripes with them{also}; nothing was changed: try again, bring missing drives back, or give these stripes up (`penstock up --accept-loss`)",
        pages_text(pages)
    )]
    PagesLost {
        /// Name of the array.
        name: String,
        /// The pages.
        pages: BTreeSet<u64>,
        /// The most stripes that are written there.
        stripes: u64,
        /// Other stripes that would be lost, or nothing.
        also: String,
    },
    /// The labels of drives cannot be read now, and the array does not open without these drives.
    #[error(
        "array {name}: the labels of drives {which} cannot be read now, and without these drives: {why}. Try again, or use them as they are and give up what they lack (`penstock up --accept-loss`)"
    )]
    LabelsUnread {
        /// Name of the array.
        name: String,
        /// The drives.
        which: String,
        /// Why the array does not open without them.
        why: String,
    },
    /// The drives that are here know an earlier generation of a member than coordination does. Its slice was
    /// replaced or created anew since.
    #[error(
        "array {name}: member {member} was replaced or made again, and the drives that are here are from before that; nothing was changed: bring back the drive that is in its place now, or another one of the array as it was last"
    )]
    Replaced {
        /// Name of the array.
        name: String,
        /// The member.
        member: usize,
    },
    /// A required structure is damaged on all carriers.
    #[error("array {name}: {what} is damaged on all carriers; nothing was changed")]
    Damaged {
        /// Name of the array.
        name: String,
        /// The structure.
        what: String,
    },
    /// A structure that decides what the array holds cannot be read now; it may exist on drives that do not
    /// answer.
    #[error(
        "array {name}: {what} cannot be read now; nothing was changed: try again, or bring the missing drives back"
    )]
    CannotRead {
        /// Name of the array.
        name: String,
        /// The structure.
        what: String,
    },
    /// The log holds too many blocks of stripes that cannot be read, so it accepts no more data.
    #[error(
        "array {name}: {blocks} written blocks wait in the log for stripes that cannot be read; `penstock fs damaged` names the files to remove or write anew"
    )]
    TooDamaged {
        /// Name of the array.
        name: String,
        /// Blocks in the log.
        blocks: u64,
    },
    /// More members failed at the same time than the code survives. A common cause is assumed, and no member
    /// was recorded as stale.
    #[error("array is suspended: {0}")]
    Suspended(String),
    /// Another owner has a newer epoch.
    #[error("array {array}: another owner holds epoch {found}, this one has {mine}")]
    Fenced {
        /// The array.
        array: ArrayId,
        /// The epoch that coordination has.
        found: u64,
        /// The epoch of this owner.
        mine: u64,
    },
    /// Coordination cannot read or record the owner of the array.
    #[error("ownership of array {array}: {why}")]
    Ownership {
        /// The array.
        array: ArrayId,
        /// The failure.
        why: String,
    },
    /// The request is not valid: a range or a length is wrong, or the geometry is impossible.
    #[error("{0}")]
    Invalid(String),
    /// The array was closed, or the process is stopping.
    #[error("the array is closed")]
    Closed,
    /// A drive failed, and redundancy could not hide it.
    #[error(transparent)]
    Drive(#[from] DriveError),
    /// A structure did not decode.
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

/// Pages by their numbers, for people.
fn pages_text(pages: &BTreeSet<u64>) -> String {
    let numbers = pages.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    format!("page{} {numbers}", if pages.len() == 1 { "" } else { "s" })
}

impl ArrayError {
    /// The reaction that the caller must have.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unreadable { .. }
            | Self::Disagrees { .. }
            | Self::Damaged { .. }
            | Self::TooDamaged { .. }
            | Self::Decode(_) => ErrorKind::Corrupt,
            Self::TooManyMissing { .. }
            | Self::WouldLose { .. }
            | Self::PagesLost { .. }
            | Self::LabelsUnread { .. }
            | Self::Replaced { .. }
            | Self::CannotRead { .. }
            | Self::Suspended(_)
            | Self::Ownership { .. } => ErrorKind::Retry,
            Self::Fenced { .. } => ErrorKind::Fenced,
            Self::Invalid(_) => ErrorKind::Invalid,
            Self::Closed | Self::Drive(_) => ErrorKind::Internal,
        }
    }
}
