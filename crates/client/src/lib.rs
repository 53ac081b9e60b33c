//! The file system client: calls on files and names become messages to the services.
//!
//! The mount and the benchmarks are thin users of it. It owns sizes and times of the files that it writes
//! until it has made them durable. It does not cache data; for a mount, the kernel's page cache does. Leases
//! keep files consistent that other clients use too.
//!
//! Invariants:
//! - One write of a file runs at a time, so a block that two writes share is merged from both.
//! - Bytes of a file's last block behind its end are zeros on the target before the file grows over them.
//! - A size is sent only after the data below it was committed, so a durable size never covers data that is
//!   not.
//! - A rename over an existing name first commits the data of the renamed file.
//! - A request that must be executed once keeps its slot until its reply has arrived.
//! - Writes that are not durable yet are tracked by file: if the service restarts before they are, the next
//!   fsync of the file fails, once.
#![forbid(unsafe_code)]

mod calls;
mod copy;
mod direct;
mod file;
mod lease_clock;
mod leases;
mod locks;
mod names;
mod page_set;
mod pages;
mod session;
mod settle;
mod slots;
mod space;
mod watch;

pub use copy::MOST_COPIED;
pub use direct::Unseen;
pub use file::{FileState, stage};
pub use leases::{Hold, KernelCache, Ownership, Purpose, Store};
pub use session::{Client, ClientLatency};

pub use penstock_wire::Failure;
pub use penstock_wire::names::{Attr, DirEntry, SetAttrRequest, StatFsReply};
