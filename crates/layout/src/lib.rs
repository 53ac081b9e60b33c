//! The layouts of arrays: on which member the strips of a stripe lie, and in which row of it.
//!
//! Owns the map from (stripe, strip) to (member, row) and back, the spare places that lost strips move to,
//! and the search for good maps. Does not own drives, sizes in bytes, or what is stored. It has no clock, no
//! files and no threads.
//!
//! ```text
//! fixed.rs        groups of as many members as a stripe has strips
//! declustered.rs  stripes that are spread over all members, with spare places in every row
//! search.rs       base permutations with an even load
//! ```
//!
//! Invariants:
//! - No two strips of a stripe lie on one member, and no more than the code can lose in one failure domain.
//! - The map is a bijection: every place of a band of rows is one strip or one spare place.
//! - The map depends on its parameters alone, which are stored with the array. What a release adds does not
//!   change the map of an array that exists.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod declustered;
mod fixed;
mod search;
mod shape;

pub use declustered::{Content, Declustered};
pub use fixed::Fixed;
pub use search::search;
pub use shape::{LayoutError, MOST_MEMBERS, MOST_STRIPS, Place, Shape};
