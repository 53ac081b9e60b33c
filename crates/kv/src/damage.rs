//! Damage of the contents of a store, told from everything else that may be wrong: of the volume below, and
//! through redb.

use crate::KvError;
use penstock_array::ArrayError;
use std::io;

/// True if the contents of the drives cannot be read, or are not what was written; false if a drive, the host
/// or this process is the reason.
fn is_damage(error: &ArrayError) -> bool {
    use ArrayError::{Damaged, Decode, Disagrees, Unreadable};
    matches!(error, Unreadable { .. } | Disagrees { .. } | Damaged { .. } | Decode(_))
}

impl From<ArrayError> for KvError {
    fn from(error: ArrayError) -> Self {
        match error {
            ArrayError::Decode(error) => error.into(),
            error if is_damage(&error) => Self::Corrupt(error.to_string()),
            error => Self::Engine(error.to_string()),
        }
    }
}

/// Why a request was not carried out.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    /// The contents of the drives cannot be read, or are not what was written.
    pub(crate) is_damage: bool,
    pub(crate) why: String,
}

impl From<ArrayError> for Refusal {
    fn from(error: ArrayError) -> Self {
        Self { is_damage: is_damage(&error), why: error.to_string() }
    }
}

impl From<Refusal> for io::Error {
    fn from(Refusal { is_damage, why }: Refusal) -> Self {
        let kind = if is_damage { io::ErrorKind::InvalidData } else { io::ErrorKind::Other };
        io::Error::new(kind, why)
    }
}

/// The error of redb, with its kind: errors of the backend come back as they were given ([`Refusal`]).
pub(crate) fn engine(error: impl Into<redb::Error>) -> KvError {
    match error.into() {
        redb::Error::Corrupted(why) => KvError::Corrupt(why),
        redb::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => {
            KvError::Corrupt(error.to_string())
        }
        error => KvError::Engine(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::ArrayId;

    /// Regression: a store was made anew from an old copy because no thread could be started.
    #[test]
    fn damage_is_told_from_what_may_pass() {
        let unreadable =
            || ArrayError::Unreadable { array: ArrayId::default(), stripe: 1, good: 2, wanted: 3 };
        let through_redb = |error: ArrayError| engine(redb::StorageError::Io(Refusal::from(error).into()));
        for (error, is_lost) in [
            (through_redb(unreadable()), true),
            (KvError::from(unreadable()), true),
            (engine(redb::StorageError::Corrupted("a page".into())), true),
            (through_redb(ArrayError::Suspended("the host is full".into())), false),
            (KvError::from(ArrayError::Closed), false),
            (engine(redb::StorageError::PreviousIo), false),
        ] {
            assert_eq!(matches!(error, KvError::Corrupt(_)), is_lost, "{error}");
        }
    }
}
