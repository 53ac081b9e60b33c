//! Errors of operations on the name space, and their mapping to error replies.

use penstock_base::num::to_u16;
use penstock_base::{ArrayId, ErrorKind, PoolId, TargetId};
use penstock_chunk::ChunkError;
use penstock_kv::KvError;
use penstock_wire::Failure;
use rustix::io::Errno;

/// Reason that an operation on the name space was not done.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MetaError {
    /// An error for which POSIX has a number.
    #[error("{0}")]
    Posix(Errno),
    /// The key-value store failed.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// The storage target failed.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// A row cannot be decoded.
    #[error(transparent)]
    Row(#[from] penstock_base::DecodeError),
    /// The rows are those of another data array.
    #[error("the rows name blocks of array {data} in pool {pool}, and the data is that of array {wanted}")]
    Foreign {
        /// The pool that the rows belong to.
        pool: PoolId,
        /// The array that the rows belong to.
        data: ArrayId,
        /// The array that was opened with them.
        wanted: ArrayId,
    },
    /// The request relies on something from before the last start of the service.
    #[error("the service was started again")]
    Restarted,
    /// The names of a rename are not those that its client looked at any more.
    #[error("a name of the rename was changed meanwhile")]
    Renamed,
    /// A change that is repeated after a restart would concern other inodes than the first time.
    #[error("the change would be made to other inodes than the first time")]
    Differs,
    /// A target that may have a part of the file does not serve.
    #[error("target {target}, which may have a part of the file, does not serve")]
    Absent {
        /// The target.
        target: TargetId,
    },
    /// A target has as much work waiting for it as the store has room for.
    #[error(
        "target {target} has {most} entries of work waiting for it, and no more fit: it must serve first"
    )]
    QueueFull {
        /// The target.
        target: TargetId,
        /// Most entries.
        most: u64,
    },
    /// The file was spread over other targets meanwhile. Nothing was done.
    #[error("the file was spread over other targets meanwhile")]
    Spread,
    /// Other clients may cache what the request changes. Nothing was done.
    #[error("the service waits for another client")]
    Waits,
    /// The request's body cannot be decoded or is not allowed.
    #[error("request: {0}")]
    Request(String),
}

impl From<Errno> for MetaError {
    fn from(errno: Errno) -> Self {
        Self::Posix(errno)
    }
}

impl From<prost::DecodeError> for MetaError {
    fn from(error: prost::DecodeError) -> Self {
        Self::Request(error.to_string())
    }
}

impl From<MetaError> for Failure {
    fn from(error: MetaError) -> Self {
        let (kind, errno) = match &error {
            MetaError::Waits => return Self::ask_again(),
            MetaError::Posix(errno) => (ErrorKind::Invalid, Some(*errno)),
            MetaError::Absent { .. } => (ErrorKind::Internal, Some(Errno::IO)),
            MetaError::QueueFull { .. } => (ErrorKind::NoSpace, Some(Errno::NOSPC)),
            MetaError::Kv(error) => (error.kind(), None),
            MetaError::Chunk(error) => (error.kind(), None),
            MetaError::Row(_) | MetaError::Foreign { .. } => (ErrorKind::Corrupt, None),
            MetaError::Restarted | MetaError::Renamed | MetaError::Differs | MetaError::Spread => {
                (ErrorKind::RefreshMap, None)
            }
            MetaError::Request(_) => (ErrorKind::Invalid, None),
        };
        let errno = errno.map_or(0, |errno| to_u16(errno.raw_os_error()));
        Self { kind, errno, message: error.to_string() }
    }
}

impl MetaError {
    /// True if a key-value store could not hold the rows of a moment as long as they were read.
    pub(crate) fn is_snapshot_gone(&self) -> bool {
        let error = match self {
            Self::Kv(error) | Self::Chunk(ChunkError::Kv(error)) => error,
            _ => return false,
        };
        matches!(error, KvError::SnapshotGone)
    }
}
