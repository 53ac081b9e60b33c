//! What can go wrong with an array, and what the caller must do.

use penstock_base::{ArrayId, DecodeError, Kind};
use penstock_drive::DriveError;

/// An operation on an array or volume did not happen.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ArrayError {
    /// Fewer strips are left than the code needs.
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
    /// A block was reconstructed, and it is not what was written.
    #[error("array {array} stripe {stripe}: reconstruction of strip {position} disagrees with its checksum")]
    Disagrees {
        /// The array.
        array: ArrayId,
        /// The stripe.
        stripe: u64,
        /// The strip.
        position: usize,
    },
    /// Too many members are missing to open the array.
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
        /// The drives.
        which: String,
    },
    /// Stripes would be lost that are whole with drives that are not here, or not as they were last.
    #[error(
        "array {name}: {stripes} stripes cannot be read without {which}; nothing was changed: bring these drives back as they were last, or give up what only they have (`penstock up --accept-loss`)"
    )]
    WouldLose {
        /// Name of the array.
        name: String,
        /// Stripes that too few strips are left of.
        stripes: u64,
        /// The drives.
        which: String,
    },
    /// The drives that are here know only the drive that was in a place before the one that counts, or what
    /// was on it before that was made again.
    #[error(
        "array {name}: member {position} was replaced or made again, and the drives that are here are from before that; nothing was changed: bring back the drive that is in its place now, or another one of the array as it was last"
    )]
    Replaced {
        /// Name of the array.
        name: String,
        /// The member.
        position: usize,
    },
    /// A structure that must be there cannot be read from any carrier.
    #[error("array {name}: {what} is damaged on all carriers; nothing was changed")]
    Damaged {
        /// Name of the array.
        name: String,
        /// The structure.
        what: String,
    },
    /// Something that decides what the array holds cannot be read: it may be there.
    #[error(
        "array {name}: {what} cannot be read now; nothing was changed: try again, or bring the missing drives back"
    )]
    CannotRead {
        /// Name of the array.
        name: String,
        /// The structure.
        what: String,
    },
    /// Too many blocks wait in the log for stripes that cannot be read.
    #[error(
        "array {name}: {blocks} written blocks wait in the log for stripes that cannot be read; `penstock fs damaged` names the files to remove or write anew"
    )]
    TooDamaged {
        /// Name of the array.
        name: String,
        /// Blocks that wait.
        blocks: u64,
    },
    /// More members failed at once than the code survives: taken as a common cause, nothing was recorded.
    #[error("array is suspended: {0}")]
    Suspended(String),
    /// Another owner has a newer epoch.
    #[error("array {array}: another owner holds epoch {found}, this one has {mine}")]
    Fenced {
        /// The array.
        array: ArrayId,
        /// The epoch on record.
        found: u64,
        /// Our epoch.
        mine: u64,
    },
    /// Who may own the array cannot be read or recorded.
    #[error("ownership of array {array}: {why}")]
    Ownership {
        /// The array.
        array: ArrayId,
        /// What failed.
        why: String,
    },
    /// The request makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// The array was closed or the machine stops.
    #[error("the array is closed")]
    Closed,
    /// A drive failed in a way that the array could not absorb.
    #[error(transparent)]
    Drive(#[from] DriveError),
    /// Bytes that must be right are not.
    #[error(transparent)]
    Decode(#[from] DecodeError),
}

impl ArrayError {
    /// What the caller must do.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Unreadable { .. }
            | Self::Disagrees { .. }
            | Self::Damaged { .. }
            | Self::TooDamaged { .. }
            | Self::Decode(_) => Kind::Corrupt,
            Self::TooManyMissing { .. }
            | Self::WouldLose { .. }
            | Self::Replaced { .. }
            | Self::CannotRead { .. }
            | Self::Suspended(_)
            | Self::Ownership { .. } => Kind::Retry,
            Self::Fenced { .. } => Kind::Fenced,
            Self::Invalid(_) => Kind::Invalid,
            Self::Closed | Self::Drive(_) => Kind::Internal,
        }
    }
}
