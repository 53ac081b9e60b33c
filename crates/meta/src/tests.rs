//! Tests of the name space on a store and a chunk store in memory: no drives, no time that passes.

mod bed;
mod contents;
mod damage;
mod hello;
mod links;
mod memory;
mod model;
mod others;
mod reaping;
mod rename;
mod xattrs;
