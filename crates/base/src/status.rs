//! Kinds of errors at the edge of a service, by the action that the caller must take.

/// The kind of an error, named by the action that the caller must take. The numbers travel on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ErrorKind {
    /// The same request may succeed later.
    Retry = 1,
    /// The caller's map, snapshot sequence or truncate generation is old: fetch the new one and repeat the
    /// request.
    RefreshMap = 2,
    /// The caller's epoch is stale: it is no longer the owner.
    Fenced = 3,
    /// No space left; deletes still work.
    NoSpace = 4,
    /// Stored bytes are not what was written and could not be reconstructed.
    Corrupt = 5,
    /// The request is malformed or violates the protocol.
    Invalid = 6,
    /// The caller lacks the permission.
    Denied = 7,
    /// An internal error that the caller cannot fix.
    Internal = 8,
    /// The caller's session has ended: its open files are closed, and its unsynced data is lost.
    Ended = 9,
}

impl ErrorKind {
    /// Decodes the number on the wire; none if this release does not know it.
    pub fn from_u16(raw: u16) -> Option<Self> {
        use ErrorKind::*;
        [Retry, RefreshMap, Fenced, NoSpace, Corrupt, Invalid, Denied, Internal, Ended]
            .into_iter()
            .find(|kind| *kind as u16 == raw)
    }
}
