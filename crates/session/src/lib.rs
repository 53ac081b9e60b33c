//! Sessions: who is connected, what each client may cache, has open and has locked, and the results of its
//! requests.
//!
//! Serves both the metadata service and the data service of a node, which asks it first: whether a request
//! may be executed, whether it must wait for other clients, and whether it was executed before.
//!
//! Owns sessions, slots, leases and advisory locks. Does not own names or inodes: it counts opens by inode
//! number, and its callers keep the inodes. It writes no transaction of its own: rows of sessions and results
//! are part of the transactions of its callers.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod by_session;
mod clients;
mod counts;
pub mod grants;
mod leases;
mod locks;
mod recovery;
pub mod rows;
mod table;
mod unanswered;
mod users;

pub use clients::{Changing, Clients, RepeatTurn, Serving, Slot, joins};
pub use recovery::Reclaimed;
pub use table::{LEASE, Outcome, Repeat, Request, SessionHoldings, SessionInfo, read_result};
pub use users::{Role, User};
