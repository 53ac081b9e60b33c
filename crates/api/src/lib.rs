//! The running instance and its REST API: administration is REST and JSON, and the command line uses nothing else.
//!
//! Owns the instance (node, client, mount, jobs) on the worker, and one thread on which axum serves HTTP and signals
//! arrive. Requests reach the worker as tasks; nothing of the data path is here.
//!
//! Doors are closed: the listener is on loopback only, every request needs the token of the store's folder, and Host
//! and Origin must name the listener itself, so that a page in a browser cannot reach it.
#![forbid(unsafe_code)]

mod http;
mod instance;
mod metrics;
mod openapi;
mod signals;

pub use http::{Server, ServerError};
pub use instance::{Instance, Job, JobState, Task};
pub use signals::on_signals;

/// Removes a mount that a killed process left; empty directories are left alone.
pub use penstock_fuse::{check_mount_point, is_stale, unmount_stale};
