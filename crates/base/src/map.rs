//! Hash maps with the same iteration order in every run, so that a seed reproduces a run.
//!
//! The standard maps take a random hash key from the operating system; these take a fixed one. Keys that a
//! user chooses freely (file names) are hashed under a secret of their file system first, which prevents
//! collision attacks.
#![allow(clippy::disallowed_types)]

use std::hash::{BuildHasherDefault, DefaultHasher};

/// A hash map with a fixed hash key.
pub type HashMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<DefaultHasher>>;
/// A hash set with a fixed hash key.
pub type HashSet<K> = std::collections::HashSet<K, BuildHasherDefault<DefaultHasher>>;
