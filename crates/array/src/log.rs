//! The array's log: one append stream to 1+m carriers, with checkpoints. Format: docs/format/log.md.
//!
//! `segments` and `space` are pure: which segments are needed, and who may queue more. `chain` is the log as
//! it lies on carriers; `writer` appends to it; `checkpoint` makes its oldest part free; `replay` reads it
//! back at an opening and `fold` applies it to memory.

pub(crate) mod chain;
pub(crate) mod checkpoint;
pub(crate) mod fold;
pub(crate) mod mends;
pub(crate) mod replay;
mod segments;
mod sound;
pub(crate) mod space;
pub(crate) mod writer;
