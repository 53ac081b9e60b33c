//! The simulated world: time, chance, tasks and drives from one seed, with power cuts.
//!
//! Owns the executor ([`World`]), drives with a live and a durable image ([`SimDisk`]), streams of bytes that come in
//! parts and break ([`SimLink`]), and cut plans. Knows nothing
//! of arrays or files: the tests of those crates build their systems inside it.
//!
//! Invariants: one seed gives one run, to the last read; a world that is cut never polls a task again; what a disk
//! holds after a cut is its durable image plus any subset of the later writes, each 512-byte sector whole.
#![forbid(unsafe_code)]

mod disk;
mod link;
mod seeds;
mod world;

pub use disk::{CutMode, SimDisk, SimDrive};
pub use link::SimLink;
pub use seeds::seeds;
pub use world::{Cut, CutPlan, World};
