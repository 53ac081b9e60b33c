//! Tests of a client on a service in memory.

mod contents;
mod losses;
mod requests;
mod service;
mod sharing;
