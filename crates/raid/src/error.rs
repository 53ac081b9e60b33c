//! Errors of codes and decode plans: bad geometry, too many lost strips, bad positions, a kernel that cannot
//! run.

use crate::{MAX_PARITY, MAX_STRIPS};

/// The reason why a code or a plan cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodeError {
    /// The geometry is outside the bounds for which the code is proved.
    #[error(
        "there is no code {k}+{m}: it needs at least 1 data strip, at most {MAX_PARITY} parity strips and at \
         most {MAX_STRIPS} strips in all"
    )]
    Geometry {
        /// The requested number of data strips.
        k: usize,
        /// The requested number of parity strips.
        m: usize,
    },

    /// More strips of the stripe are lost than it has parity strips.
    #[error("{lost} strips of a stripe are lost, at most {allowed} can be made again")]
    TooManyLost {
        /// The number of lost strips.
        lost: usize,
        /// The number of lost strips that the code survives: m.
        allowed: usize,
    },

    /// Fewer than k strips can be read.
    #[error("{available} strips of a stripe can be read besides the wanted ones, {required} are required")]
    TooFewSources {
        /// The number of available strips that are not wanted.
        available: usize,
        /// The number of strips that decoding reads: k.
        required: usize,
    },

    /// A position is outside the stripe.
    #[error("there is no strip at position {position}: a stripe of this code has {strips} strips")]
    NoSuchPosition {
        /// The position in the caller's list.
        position: usize,
        /// The number of strips of a stripe, k + m.
        strips: usize,
    },

    /// One list contains a position twice.
    #[error("position {position} is named twice")]
    RepeatedPosition {
        /// The repeated position.
        position: usize,
    },

    /// This processor cannot run the requested kernel.
    #[error("the {kernel} kernel does not run on this processor")]
    KernelUnavailable {
        /// The name of the kernel, as `Kernel::name` returns it.
        kernel: &'static str,
    },
}
