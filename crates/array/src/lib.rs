//! Arrays: slices of drives under one code, as volumes of verified 4 KiB blocks. Everything hard about
//! drives, crashes and rot is solved here; the layers above see blocks that are right or an error, and writes
//! that happened or did not.
//!
//! Owns the stripe table, the log, checkpoints, strips with their trailers, destage, rebuild and scrub. Does
//! not own drives or superblocks (`penstock-drive`), nor the decision who may write
//! ([`ownership::Ownership`]).
//!
//! The parts, each standing on those above it:
//!
//! | part | owns |
//! |---|---|
//! | `context` | identity, geometry, layout, counters, whether the array runs |
//! | `queue` | entries that wait for the log |
//! | `members` | slices with their labels and lives, the claim, who carries the log |
//! | `stripes` | the stripe map, versions, the overlay of dirty blocks, stripe locks |
//! | `log` | segments, log space, the writer, checkpoints, replay |
//! | `strips` | reads with proof, reconstruction, writes with trailers |
//! | `durability`, `block_io` | the order of flushes; reads, writes and discards of blocks |
//! | `jobs` | destage, rebuild, repair, scrub, replacement of carriers |
//! | `array`, `volume`, `open` | the facade, ranges of blocks, making and opening |
//!
//! One worker thread owns an array and everything in this crate runs on it; the stripe lock orders what
//! touches one stripe. The order of locks is in `ranks`.
//!
//! Power cut, step by step:
//! - data entry in the log, not flushed: the write may be lost, in full;
//! - strips of a fresh stripe written, table record not durable: the stripe is still unwritten, its strips
//!   are noise;
//! - destage record durable, strips half written: replay writes them again from the record;
//! - table pages of a checkpoint written, root not: the root before names the other places;
//! - root written: the log before its replay segment is free.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod array;
mod block_io;
mod context;
mod counters;
mod durability;
mod error;
mod events;
pub mod format;
mod geometry;
mod jobs;
pub mod layout;
mod log;
mod members;
pub mod moves;
mod open;
pub mod page_tree;
pub mod place;
mod queue;
mod ranks;
mod report;
mod salvage;
mod set;
mod site;
mod stripes;
mod strips;
mod table_memory;
#[cfg(test)]
mod test_env;
mod volume;

pub use array::Array;
pub use block_io::{Blocks, Discard};
pub use counters::{ArrayLatency, Counts};
pub use error::ArrayError;
pub use events::ArrayEvent;
pub use geometry::{CreateSpec, Geometry};
pub use jobs::JobProgress;
pub use jobs::rate::RebuildRate;
pub use jobs::scrub::{Pace, ScrubProgress, ScrubReport};
pub use layout::{Layout, StripPlace};
pub use members::labels::{FoundLabel, clear_label, read_label};
pub use members::ownership::Lacking;
pub use members::{MemberReport, Roster, ownership};
pub use open::{MemberSlice, Opening, create, open};
pub use penstock_raid::MAX_PARITY;
pub use place::{MemberNo, MemberSet, Position, Positions};
pub use report::{ArrayState, Report};
pub use site::Site;
pub use stripes::changes::BlockChanges;
pub use table_memory::TABLE_BYTES;
pub use volume::Volume;
