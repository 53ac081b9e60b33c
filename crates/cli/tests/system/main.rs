//! The real program: real processes, real FUSE mounts, real files, kill -9.
//!
//! Needs /dev/fuse; where that is missing each test prints SKIPPED. `PENSTOCK_SHOW=full` with the ignored tests is the
//! full form (`cargo xtask show`); those named `campaign_of_…` are for `cargo xtask campaign`.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)]

mod bad_days;
mod campaign;
mod churn;
mod databases;
mod doors;
mod ends;
mod fs_check;
mod fsx;
mod kill;
mod lapse;
mod mixed;
mod operations;
mod pairs;
mod posix;
mod promises;
mod python;
mod real_input;
mod remote_mount;
mod speed;
mod store;
mod two_mounts;
