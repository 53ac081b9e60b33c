//! What can be missing or go wrong on a GPU.

/// Why a GPU cannot do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// There is no driver, or it is too old.
    #[error("no CUDA driver: {0}")]
    NoDriver(String),

    /// The driver finds no such GPU.
    #[error("there is no GPU {wanted}: the driver finds {found}")]
    NoDevice {
        /// The number that was asked for.
        wanted: usize,
        /// How many there are.
        found: usize,
    },

    /// A call of the driver failed.
    #[error("{call} failed: {reason}")]
    Driver {
        /// The function.
        call: &'static str,
        /// What the driver says of it.
        reason: String,
    },

    /// Stripes are not inside the memory, or not of whole columns or blocks.
    #[error("{0}")]
    Shape(String),

    /// What the code itself refuses.
    #[error(transparent)]
    Code(#[from] penstock_raid::CodeError),
}
