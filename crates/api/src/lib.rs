//! The running instance and its REST API: administration is REST and JSON, and the command line uses nothing else.
//!
//! Owns the instance (node, client, mount, jobs) on the worker, and one thread on which axum serves HTTP and signals
//! arrive. Requests reach the worker as tasks; nothing of the data path is here.
//!
//! Doors are closed: the socket in the store's folder serves the store's user and root, whom the kernel names. Over TCP,
//! where it was asked for, the listener is on loopback only, every request needs a token of the folder, and Host and
//! Origin must name the listener itself, so that a page in a browser cannot reach it. Whoever says nothing keeps nobody
//! out: headers and bodies have their time, and connections without a token give way to newer ones.
#![forbid(unsafe_code)]

mod http;
mod instance;
mod metrics;
mod openapi;
mod signals;

pub use http::{Server, ServerError, Tokens};
pub use instance::{Instance, Job, JobState, Task};
pub use signals::on_signals;

/// Removes a mount that a killed process left; empty directories are left alone.
pub use penstock_fuse::{check_mount_point, is_stale, unmount_stale};
