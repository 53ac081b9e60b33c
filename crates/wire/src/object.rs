//! The objects that requests address.

use penstock_base::{Dec, DecodeError};
use std::fmt;

/// Bits of an object's number. The 8 bits above are its kind.
const ID_BITS: u32 = 56;

/// The object of a request, and its number within its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Object {
    /// The session itself.
    Session,
    /// An array, by its number in the store.
    Array(u64),
    /// A storage target.
    Target(u64),
    /// A fileset: its metadata target.
    Fileset(u64),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Session => write!(f, "session"),
            Self::Array(id) => write!(f, "array {id}"),
            Self::Target(id) => write!(f, "target {id}"),
            Self::Fileset(id) => write!(f, "fileset {id}"),
        }
    }
}

impl Object {
    /// The target that has all data today.
    pub const FIRST_TARGET: Self = Self::Target(0);
    /// The fileset that is the file system today.
    pub const FIRST_FILESET: Self = Self::Fileset(0);

    /// Kind and number, as on the wire.
    fn parts(self) -> (u64, u64) {
        match self {
            Self::Session => (0, 0),
            Self::Array(id) => (1, id),
            Self::Target(id) => (2, id),
            Self::Fileset(id) => (3, id),
        }
    }

    /// The field of a header.
    ///
    /// # Panics
    /// If the number has more than 56 bits.
    pub fn to_u64(self) -> u64 {
        let (kind, id) = self.parts();
        assert!(id >> ID_BITS == 0, "{self:?} has a number of 56 bits");
        kind << ID_BITS | id
    }

    /// Decodes the field of a header.
    pub(crate) fn of_u64(dec: &Dec<'_>, field: u64) -> Result<Self, DecodeError> {
        let id = field & ((1 << ID_BITS) - 1);
        match field >> ID_BITS {
            0 if id == 0 => Ok(Self::Session),
            0 => Err(dec.bad("a session has no number as an object")),
            1 => Ok(Self::Array(id)),
            2 => Ok(Self::Target(id)),
            3 => Ok(Self::Fileset(id)),
            kind => Err(dec.unknown("kind of object", kind)),
        }
    }

    /// True if both are of one kind.
    pub fn is_like(self, other: Self) -> bool {
        self.parts().0 == other.parts().0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_come_back_and_others_are_refused() {
        let dec = Dec::new("test", &[]);
        let last = (1 << ID_BITS) - 1;
        for (object, wanted) in [
            (Object::Session, 0),
            (Object::Array(7), 1 << 56 | 7),
            (Object::FIRST_TARGET, 2 << 56),
            (Object::Fileset(last), (4 << 56) - 1),
        ] {
            assert_eq!(object.to_u64(), wanted);
            assert_eq!(Object::of_u64(&dec, wanted), Ok(object));
        }
        assert!(Object::of_u64(&dec, 1).is_err(), "a session with a number");
        let error = Object::of_u64(&dec, 4 << 56).unwrap_err().to_string();
        assert!(error.contains("kind of object is 4"), "{error}");
        assert!(Object::Array(1).is_like(Object::Array(2)) && !Object::Array(1).is_like(Object::Target(1)));
    }
}
