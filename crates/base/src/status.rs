//! What a caller must do about an error, whatever went wrong below.

/// An error's kind at the edge of a service, named by what the caller must do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Kind {
    /// The same request may succeed later.
    Retry = 1,
    /// The caller's map or snapshot sequence is old: fetch it and ask again.
    RefreshMap = 2,
    /// The caller's epoch is stale: it is no longer the owner.
    Fenced = 3,
    /// No space left; deletes still work.
    NoSpace = 4,
    /// Stored bytes are not what was written and could not be reconstructed.
    Corrupt = 5,
    /// The request makes no sense.
    Invalid = 6,
    /// The caller may not do this.
    Denied = 7,
    /// A fault of this system that the caller cannot mend.
    Internal = 8,
    /// The caller's session has ended: what it had open and had not made durable is gone.
    Ended = 9,
}

impl Kind {
    /// Reads a kind as it travels on the wire.
    pub fn from_u16(raw: u16) -> Option<Self> {
        use Kind::*;
        [Retry, RefreshMap, Fenced, NoSpace, Corrupt, Invalid, Denied, Internal, Ended]
            .into_iter()
            .find(|kind| *kind as u16 == raw)
    }
}
