//! System tests of the real program: real processes, FUSE mounts, files, and kill -9.
//!
//! The tests need /dev/fuse; without it each prints SKIPPED. The ignored tests are the full form:
//! `cargo xtask show` runs them with `PENSTOCK_SHOW=full`, and `cargo xtask campaign` runs those named
//! `campaign_of_…`.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)]

mod bad_days;
mod beside;
mod campaign;
mod churn;
mod databases;
mod doors;
mod ends;
mod fs_check;
mod fsx;
mod given_drives;
mod histories;
mod kill;
mod lapse;
mod line;
mod mixed;
mod operations;
mod pairs;
mod permissions;
mod posix;
mod promises;
mod python;
mod real_input;
mod remote_mount;
mod renames;
mod speed;
mod stacks_cost;
mod store;
mod targets;
mod two_mounts;
