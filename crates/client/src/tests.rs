//! Tests of a client on a service in memory.

mod contents;
mod durability;
mod losses;
mod requests;
mod service;
mod sharing;
mod waiting;
