//! Checksums of strips that were read or written lately, so that a small read is one I/O.
//!
//! Bounded; the first entry in is the first one out. An entry counts only for the version that it was made
//! for, so a strip that is written again needs no removal.

use crate::place::Position;
use penstock_base::{HashMap, Stripe, Version};
use std::collections::VecDeque;
use std::rc::Rc;

/// Strips whose checksums are kept: 64 blocks each, 16 MiB in all.
const MOST: usize = 1 << 16;

type Key = (Stripe, Position);

/// Checksums by strip.
#[derive(Default)]
pub(super) struct TrailerCache {
    entries: HashMap<Key, (Version, Rc<Vec<u32>>)>,
    order: VecDeque<Key>,
}

impl TrailerCache {
    /// The checksums of a strip of this version.
    pub(super) fn get(&self, stripe: Stripe, position: Position, version: Version) -> Option<Rc<Vec<u32>>> {
        let (cached, crcs) = self.entries.get(&(stripe, position))?;
        (*cached == version).then(|| crcs.clone())
    }

    pub(super) fn put(&mut self, stripe: Stripe, position: Position, version: Version, crcs: Rc<Vec<u32>>) {
        if self.entries.insert((stripe, position), (version, crcs)).is_none() {
            self.order.push_back((stripe, position));
        }
        while self.order.len() > MOST {
            let oldest = self.order.pop_front().expect("the queue is longer than the bound");
            self.entries.remove(&oldest);
        }
        assert_eq!(self.order.len(), self.entries.len(), "each entry has one place in the queue");
    }

    /// The strip is to be read from its drive.
    pub(super) fn forget(&mut self, stripe: Stripe, position: Position) {
        if let Some((version, _)) = self.entries.get_mut(&(stripe, position)) {
            // Its place in the queue stays; version 0 is never given, so it matches nothing.
            *version = Version(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_counts_for_its_version_until_it_is_forgotten_or_evicted() {
        let mut cache = TrailerCache::default();
        let position = Position::new(1);
        let has = |cache: &TrailerCache, stripe, version| {
            cache.get(Stripe(stripe), position, Version(version)).is_some()
        };
        cache.put(Stripe(0), position, Version(7), Rc::default());
        assert!(has(&cache, 0, 7) && !has(&cache, 0, 8) && !has(&cache, 1, 7));
        cache.forget(Stripe(0), position);
        assert!(!has(&cache, 0, 7));
        cache.put(Stripe(0), position, Version(8), Rc::default());
        assert!(has(&cache, 0, 8));
        (1..=MOST as u64).for_each(|stripe| cache.put(Stripe(stripe), position, Version(9), Rc::default()));
        assert!(!has(&cache, 0, 8) && has(&cache, 1, 9));
    }
}
