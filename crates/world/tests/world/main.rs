//! Tests of the whole path in the simulated world, from the client library to the drives.
#![allow(clippy::unwrap_used, missing_docs)]

mod beside;
mod built_on;
mod cached;
mod campaign;
mod cuts;
mod damaged;
mod direct;
mod faults;
mod files;
mod flushed;
mod full;
mod golden;
mod hours;
mod lapse;
mod load;
mod loans;
mod map_copies;
mod map_copies_of_stacks;
mod mischief;
mod model;
mod plant;
mod recovered;
mod refused;
mod regress;
mod remote;
mod repair;
mod replaced;
mod rot;
mod scrubs;
mod serve;
mod shared;
mod space;
mod stacks;
mod target;
mod users;

use penstock_world as machine;
