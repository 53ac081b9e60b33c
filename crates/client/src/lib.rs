//! The file system client: files and names on one side, messages to services on the other. The mount and the
//! benchmarks are thin users of it.
//!
//! Owns sizes and times of files that it writes until it has made them durable; does not cache data, which the
//! kernel's page cache does for a mount.
//!
//! Files that other clients use too are kept by leases.
//!
//! Invariants:
//! - one write of a file runs at a time, so a block that two writes share is merged from both;
//! - bytes of a file's last block behind its end are zeros on the target before the file grows over them;
//! - a size is sent only after the data below it was committed, so a durable size never covers data that is not;
//! - a rename over a name commits what was written to the renamed file first;
//! - a request that must be done once keeps its slot until its reply is there;
//! - what was written and is not durable is known by file: when the service was started again meanwhile, the next
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
