//! Errors of a start and of an administrator's requests.

use crate::report::MapRestoreReport;
use penstock_array::ArrayError;

/// Reason why a store does not start.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StartError {
    /// The request cannot be done; nothing was changed.
    #[error("{0}")]
    Refused(String),
    /// A restore is possible, and was not confirmed: nothing was restored.
    #[error("{why}")]
    Unconfirmed {
        /// Why it is necessary, and what may be lost by it.
        why: String,
        /// A number that names the copies that would be used.
        copies: u64,
        /// The report for each target, had it been done. Files have no paths yet.
        previews: Vec<MapRestoreReport>,
    },
    /// No drive of a store was found.
    #[error("no drive of a store was found: {0}")]
    NoStore(String),
    /// An array cannot be opened.
    #[error(transparent)]
    Array(#[from] ArrayError),
    /// The key-value store cannot be opened.
    #[error(transparent)]
    Kv(#[from] penstock_kv::KvError),
    /// The target cannot be opened.
    #[error(transparent)]
    Chunk(#[from] penstock_chunk::ChunkError),
    /// The name space cannot be opened.
    #[error(transparent)]
    Meta(#[from] penstock_meta::MetaError),
}

/// Reason why an administrator's request was not done.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdminError {
    /// The named object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The request is refused; the store was not changed.
    #[error("{0}")]
    Refused(String),
    /// An array failed.
    #[error(transparent)]
    Array(#[from] ArrayError),
    /// The file system failed.
    #[error(transparent)]
    Meta(#[from] penstock_meta::MetaError),
}
