//! The file system client: calls on files and names become messages to the services.
//!
//! The mount and the benchmarks are thin users of it. It owns sizes and times of the files that it writes
//! until it has made them durable. It does not cache data; for a mount, the kernel's page cache does. Leases
//! keep files consistent that other clients use too.
//!
//! A [`Client`] gives a [`Hold`] of a file, which keeps its lease; a hold gives a [`Reader`] or a [`Writer`],
//! which have the file's I/O lock. Below them lies the session: its requests, the states of files, leases and
//! locks, each a type with its own state.
//!
//! Invariants:
//! - One write of a file runs at a time, so a block that two writes share is merged from both.
//! - Bytes of a file's last block behind its end are zeros on the target before the file grows over them.
//! - A size is sent only after the data below it was committed, so a durable size never covers data that is
//!   not.
//! - A rename over an existing name first commits the data of the renamed file.
//! - A request that must be executed once keeps its slot until its reply has arrived.
//! - What is acknowledged and not durable yet is kept, within a bound, and sent again if the service
//!   restarts. If that fails, the next fsync of the file fails, once through each descriptor.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod attribute_leases;
mod blocks;
mod by_file;
mod client;
mod direct;
mod fetch;
mod file_state;
mod held_locks;
mod hold;
mod kept;
mod kernel;
mod last_dir;
mod lease;
mod lease_clock;
mod leases;
mod locks;
mod losses;
mod names;
mod page_set;
mod reader;
mod recent;
mod recovering;
mod recovery;
mod restarts;
mod revoke;
mod sent;
mod session;
mod slots;
mod space;
mod sync;
mod targets;
mod tickets;
mod watch;
mod writer;

pub use blocks::stage;
pub use client::{Client, MOST_COPIED};
pub use direct::Unseen;
pub use hold::Hold;
pub use kernel::KernelCache;
pub use lease::Purpose;
pub use leases::{Ownership, Store};
pub use losses::Reported;
pub use reader::Reader;
pub use session::ClientLatency;
pub use writer::{Staged, Writer};

pub use penstock_wire::Failure;
pub use penstock_wire::metadata::{Attr, DirEntry, SetAttrRequest, StatFsReply};

#[cfg(test)]
mod tests;
