//! The order in which locks of a target are acquired: the first one before the turn at the name space, that
//! of loans before the gate, the others after the gate and before those of an array. Debug builds assert it
//! ([`penstock_base::rank`]).
//!
//! | rank | lock | taken by |
//! |---|---|---|
//! | turn | a file, shared by requests; several targets ascend | requests, work of another stack |
//! | loan | a loan begins or ends | whoever lacks space, the return of loans |
//! | file | one change of a file's rows at a time | commits, truncations |
//! | chunk | shared or exclusive, several of one file in ascending order | everything that touches a chunk |
//! | commit | one transaction of rows and bits at a time | commits, truncations |
//! | sweep | the look for written stripes without an owner | the sweep, allocations that lack space, checks |
//! | discard | one batch of stripes in a discard | discards, allocations that need its blocks, repairs |
//! | load | one allocation group is read at a time | everything that looks at bits |

use penstock_base::rank::Rank;

pub(crate) const TURN: Rank = Rank::new(15, "turn at a file");
pub(crate) const LOAN: Rank = Rank::new(25, "loan");
pub(crate) const FILE: Rank = Rank::new(40, "file");
pub(crate) const CHUNK: Rank = Rank::new(42, "chunk");
pub(crate) const COMMIT: Rank = Rank::new(44, "commit");
pub(crate) const SWEEP: Rank = Rank::new(45, "sweep");
pub(crate) const DISCARD: Rank = Rank::new(46, "discard");
pub(crate) const LOAD: Rank = Rank::new(47, "load");
