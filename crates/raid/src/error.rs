//! Operating errors of the code: what a caller, a configuration or too many failures can ask for in vain.

use crate::{MAX_PARITY, MAX_STRIPS};

/// Why a code or a plan cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodeError {
    /// The geometry is outside what the code is proved for.
    #[error(
        "there is no code {k}+{m}: it needs at least 1 data strip, at most {MAX_PARITY} parity strips and at \
         most {MAX_STRIPS} strips in all"
    )]
    Geometry {
        /// Data strips asked for.
        k: usize,
        /// Parity strips asked for.
        m: usize,
    },

    /// More strips of the stripe are lost than it has parity strips.
    #[error("{lost} strips of a stripe are lost, at most {allowed} can be made again")]
    TooManyLost {
        /// How many strips are lost.
        lost: usize,
        /// How many lost strips the code survives: m.
        allowed: usize,
    },

    /// Fewer strips can be read than decoding takes.
    #[error("{available} strips of a stripe can be read besides the wanted ones, {required} are required")]
    TooFewSources {
        /// How many available strips are not wanted ones.
        available: usize,
        /// How many strips decoding reads: k.
        required: usize,
    },

    /// A position is outside the stripe.
    #[error("there is no strip at position {position}: a stripe of this code has {strips} strips")]
    NoSuchPosition {
        /// The position that was named.
        position: usize,
        /// k + m.
        strips: usize,
    },

    /// A position is named twice in one list.
    #[error("position {position} is named twice")]
    RepeatedPosition {
        /// The position that was named twice.
        position: usize,
    },

    /// This processor cannot run the kernel that was asked for.
    #[error("the {kernel} kernel does not run on this processor")]
    KernelUnavailable {
        /// The name of the kernel.
        kernel: &'static str,
    },
}
