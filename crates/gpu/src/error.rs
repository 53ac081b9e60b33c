//! Errors of the GPU path: no driver, no such GPU, a failed driver call, unsuitable stripes.

/// The reason why a GPU cannot do the requested work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// The driver is missing, too old, or cannot be initialised.
    #[error("no CUDA driver: {0}")]
    NoDriver(String),

    /// The driver finds no such GPU.
    #[error("there is no GPU {wanted}: the driver finds {found}")]
    NoDevice {
        /// The requested number.
        wanted: usize,
        /// The number of GPUs that the driver finds.
        found: usize,
    },

    /// A call of the driver failed.
    #[error("{call} failed: {reason}")]
    Driver {
        /// The name of the call.
        call: &'static str,
        /// The driver's text for the error.
        reason: String,
    },

    /// The stripes do not suit the request: wrong sizes, outside the memory, or on another GPU.
    #[error("{0}")]
    Shape(String),

    /// The code rejects the request.
    #[error(transparent)]
    Code(#[from] penstock_raid::CodeError),
}
