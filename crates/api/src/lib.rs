//! The running instance and its REST API; the command line administers a store through REST and JSON only.
//!
//! Owns the instance (node, client, mount, jobs) on the worker, and one thread on which axum serves HTTP and
//! signals arrive. Requests reach the worker as tasks. The data path does not pass through here.
//!
//! Access is denied by default. The socket in the store's folder admits the store's user and root, as the
//! kernel reports them. TCP is optional and on loopback only: every request needs a token of the folder, and
//! Host and Origin must name the listener itself, so that a page in a browser cannot reach it. Silent
//! connections keep nobody out: headers and bodies have time limits, and connections without a valid token
//! give way to newer ones.
#![forbid(unsafe_code)]

mod error;
mod http;
mod instance;
mod metrics;
mod openapi;
mod signals;

pub use error::ServerError;
pub use http::{Server, Tokens};
pub use instance::{Instance, Job, JobState, Task};
pub use signals::on_signals;

/// Checks mount points, and removes a mount that a killed process left; empty directories are left alone.
pub use penstock_fuse::{check_mount_point, unmount_stale};
