//! The simulated world: time, random numbers, tasks and drives from one seed, with power cuts.
//!
//! Owns the executor ([`World`]), drives with a live and a durable image ([`SimDisk`]), byte streams that
//! break and that pass bytes in parts of any length ([`SimLink`]), and plans for power cuts. Knows nothing of
//! arrays or files: the tests of those crates build their systems inside it.
//!
//! Invariants: one seed gives one run, to the last read. A world that is cut never polls a task again. After
//! a cut a medium holds its durable image plus any subset of the later writes, and each 512-byte sector is
//! either old or new.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod disk;
mod link;
mod seeds;
mod world;

pub use disk::{CutMode, SimDisk, SimDrive};
pub use link::SimLink;
pub use seeds::seeds;
pub use world::{Cut, CutPlan, World};
