//! Arrays: slices of drives under one code, as volumes of verified 4 KiB blocks. All that is hard about drives,
//! crashes and rot is solved here; what stands on a volume sees blocks that are right or an error, and writes that
//! happened or did not.
//!
//! Owns the stripe table, the log, checkpoints, strips with their trailers, destage, rebuild and scrub. Does not own
//! drives or superblocks (`penstock-drive`), nor the decision who may write ([`ownership::Ownership`]).
//!
//! One worker thread owns an array and everything in this crate runs on it; the stripe lock orders what
//! touches one stripe. Lock order: checkpoint, reconfiguration, stripe, log.
//!
//! Power cut, step by step:
//! - data entry in the log, not flushed: the write may be lost, whole;
//! - strips of a fresh stripe written, table record not durable: the stripe is still unwritten, its strips are noise;
//! - destage record durable, strips half written: replay writes them again from the record;
//! - table pages of a checkpoint written, root not: the pages' number is above the root's, so they do not count;
//! - root written: the log before its replay segment is free.
#![forbid(unsafe_code)]

mod carriers;
mod checkpoint;
mod destage;
mod engine;
mod error;
pub mod format;
mod geometry;
mod log;
mod maintain;
mod member;
mod metascrub;
mod notes;
mod open;
mod outdated;
mod overlay;
pub mod ownership;
mod reconfigure;
mod replay;
mod room;
mod roster;
mod salvage;
mod scrub;
mod strip;
mod table;
mod volume;

pub use engine::{Array, ArrayLatency, ArrayState, Counts, MemberReport, Report};
pub use error::ArrayError;
pub use geometry::{CreateSpec, Geometry};
pub use maintain::JobProgress;
pub use notes::Note;
pub use open::{Lacking, MemberSlice, Opening, create, open};
pub use penstock_raid::MAX_PARITY;
pub use roster::Roster;
pub use scrub::{Pace, ScrubProgress, ScrubReport};
pub use volume::{Blocks, Discard, Volume};
