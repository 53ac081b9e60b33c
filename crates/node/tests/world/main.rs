//! The whole path in the simulated world, from client library to drives.
#![allow(clippy::unwrap_used, missing_docs)]

mod cuts;
mod damaged;
mod files;
mod lives;
mod load;
mod machine;
mod model;
mod plant;
mod regress;
mod remote;
mod repair;
mod rot;
mod scrubs;
mod shared;
mod space;
