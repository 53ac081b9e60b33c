//! Hash maps whose order is the same in every run, so that one seed reproduces one run.
//!
//! The standard maps take a random key from the operating system. These take a fixed one; keys that a user
//! chooses freely (file names) are hashed under a secret of their file system before they get here.
#![allow(clippy::disallowed_types)]

use std::hash::{BuildHasherDefault, DefaultHasher};

/// A hash map with a fixed seed.
pub type HashMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<DefaultHasher>>;
/// A hash set with a fixed seed.
pub type HashSet<K> = std::collections::HashSet<K, BuildHasherDefault<DefaultHasher>>;
