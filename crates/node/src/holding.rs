//! The contents of the drives of a folder before a store is made on them.

/// The contents of the drives of a folder without a record of its store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    /// Blank drives, or none.
    Nothing,
    /// Drives of a store.
    Store,
    /// Drives of a store whose making was interrupted: it was never opened, and some drives do not belong to
    /// it yet. It is made again over them.
    Unfinished,
    /// Something else, which a new store must not overwrite: the reason.
    Other(String),
}
