//! What can go wrong with a name, as POSIX says it.

use penstock_base::Kind;
use penstock_chunk::ChunkError;
use penstock_kv::KvError;
use penstock_wire::Failure;
use rustix::io::Errno;

/// An operation on the name space did not happen.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MetaError {
    /// POSIX has a number for it.
    #[error("{0}")]
    Posix(Errno),
    /// The store below failed.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// The target failed.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// A row is not what was written.
    #[error(transparent)]
    Row(#[from] penstock_base::DecodeError),
    /// It goes by something that was done under another start of the service.
    #[error("the service was started again")]
    Restarted,
    /// The request cannot be read.
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
            MetaError::Posix(errno) => (Kind::Invalid, Some(*errno)),
            MetaError::Kv(error) => (error.kind(), None),
            MetaError::Chunk(error) => (error.kind(), None),
            MetaError::Row(_) => (Kind::Corrupt, None),
            MetaError::Restarted => (Kind::RefreshMap, None),
            MetaError::Request(_) => (Kind::Invalid, None),
        };
        let errno = errno.map_or(0, |errno| errno.raw_os_error() as u16);
        Self { kind, errno, message: error.to_string() }
    }
}
