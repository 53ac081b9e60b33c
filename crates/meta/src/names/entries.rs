//! Directory entries cached in memory, in a bounded number.
//!
//! Entries are cached by the bucket of names that share a hash, so the absence of a name is cached as well as
//! its presence. A directory that was made since the start is *whole*: a name that is not in the cache does
//! not exist.
//!
//! Invariant: a bucket changes only with the transaction that changes its rows, or is filled by a read during
//! which no transaction ran.

use crate::rows::Entry;
use penstock_base::{HashMap, Ino};
use std::collections::VecDeque;

/// Most cached buckets; one takes some 150 bytes.
const MOST: usize = 1 << 18;
/// Number of cookies in a bucket.
const BUCKET: u64 = 256;

/// Entries of one bucket with their cookies, in order of cookies.
pub(crate) type Bucket = Vec<(u64, Entry)>;

#[derive(Default)]
struct Dir {
    whole: bool,
    /// True if it was used since it was last considered for eviction.
    used: bool,
    buckets: HashMap<u64, Bucket>,
}

#[derive(Default)]
pub(crate) struct EntryCache {
    dirs: HashMap<Ino, Dir>,
    /// Directories in the order in which they are considered for eviction.
    order: VecDeque<Ino>,
    buckets: usize,
}

impl EntryCache {
    fn dir(&mut self, dir: Ino) -> &mut Dir {
        let order = &mut self.order;
        self.dirs.entry(dir).or_insert_with(|| {
            order.push_back(dir);
            Dir::default()
        })
    }

    /// The bucket that begins at cookie `first`; none if its content is not known.
    pub(crate) fn bucket(&mut self, dir: Ino, first: u64) -> Option<Bucket> {
        let dir = self.dirs.get_mut(&dir)?;
        dir.used = true;
        match dir.buckets.get(&first) {
            Some(bucket) => Some(bucket.clone()),
            None => dir.whole.then(Vec::new),
        }
    }

    /// Caches a bucket that was read.
    pub(crate) fn fill(&mut self, dir: Ino, first: u64, bucket: Bucket) {
        check(first, &bucket);
        if self.dir(dir).buckets.insert(first, bucket).is_none() {
            self.buckets += 1;
            self.evict();
        }
    }

    /// Notes a directory that is new and empty.
    pub(crate) fn made(&mut self, dir: Ino) {
        self.dir(dir).whole = true;
    }

    /// Notes that an entry was put (or, with `None`, deleted) at a cookie.
    pub(crate) fn changed(&mut self, dir: Ino, cookie: u64, entry: Option<Entry>) {
        let first = cookie / BUCKET * BUCKET;
        let Some(dir) = self.dirs.get_mut(&dir) else { return };
        if !dir.whole && !dir.buckets.contains_key(&first) {
            return;
        }
        let before = dir.buckets.len();
        let bucket = dir.buckets.entry(first).or_default();
        let place = bucket.binary_search_by_key(&cookie, |(at, _)| *at);
        match (place, entry) {
            (Ok(at), Some(entry)) => bucket[at].1 = entry,
            (Err(at), Some(entry)) => bucket.insert(at, (cookie, entry)),
            (Ok(at), None) => drop(bucket.remove(at)),
            (Err(_), None) => {}
        }
        check(first, bucket);
        if dir.whole && bucket.is_empty() {
            dir.buckets.remove(&first);
        }
        self.buckets = self.buckets + dir.buckets.len() - before;
        self.evict();
    }

    /// Evicts directories that were not used, until the bound holds.
    fn evict(&mut self) {
        while self.buckets > MOST {
            let oldest = self.order.pop_front().expect("every bucket is of a directory in the queue");
            let dir = self.dirs.get_mut(&oldest).expect("the queue names directories that are here");
            if std::mem::take(&mut dir.used) && self.order.len() > 1 {
                self.order.push_back(oldest);
                continue;
            }
            self.buckets -= dir.buckets.len();
            self.dirs.remove(&oldest);
        }
        // Whole directories without a bucket are cheap but not free.
        while self.order.len() > MOST {
            let oldest = self.order.pop_front().expect("the queue is longer than the bound");
            self.buckets -= self.dirs.remove(&oldest).map_or(0, |dir| dir.buckets.len());
        }
        assert!(self.buckets <= MOST && self.order.len() <= MOST, "the cache is bounded");
        assert_eq!(self.order.len(), self.dirs.len(), "every directory is in the queue once");
    }
}

/// Asserts that a bucket holds entries at its own cookies, in order.
fn check(first: u64, bucket: &Bucket) {
    assert!(first.is_multiple_of(BUCKET), "a bucket begins at a multiple of {BUCKET}");
    assert!(bucket.is_sorted_by(|(one, _), (other, _)| one < other), "cookies of a bucket rise");
    let ends = bucket.first().into_iter().chain(bucket.last());
    let is_inside = |(cookie, _): &(u64, Entry)| (first..first + BUCKET).contains(cookie);
    assert!(ends.into_iter().all(is_inside), "the entries are of the bucket at {first}");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> Entry {
        Entry { ino: Ino(9), kind: 0, name: name.as_bytes().to_vec() }
    }

    #[test]
    fn absence_is_known_where_it_was_seen() {
        let mut cache = EntryCache::default();
        assert_eq!(cache.bucket(Ino(1), 256), None);
        // The bucket is not cached, and one entry does not make it complete.
        cache.changed(Ino(1), 257, Some(entry("a")));
        assert_eq!(cache.bucket(Ino(1), 256), None);
        cache.fill(Ino(1), 256, vec![]);
        cache.changed(Ino(1), 257, Some(entry("a")));
        assert_eq!(cache.bucket(Ino(1), 256), Some(vec![(257, entry("a"))]));
        cache.changed(Ino(1), 257, None);
        assert_eq!(cache.bucket(Ino(1), 256), Some(vec![]));
        cache.made(Ino(2));
        assert_eq!(cache.bucket(Ino(2), 512), Some(vec![]));
        cache.changed(Ino(2), 512, Some(entry("b")));
        assert_eq!(cache.bucket(Ino(2), 512), Some(vec![(512, entry("b"))]));
        assert_eq!(cache.buckets, 2);
    }

    #[test]
    fn memory_is_bounded_and_what_is_used_stays() {
        let mut cache = EntryCache::default();
        cache.fill(Ino(1), 0, vec![]);
        for number in 0..MOST as u64 {
            cache.bucket(Ino(1), 0);
            cache.fill(Ino(2 + number / 1000), number * 256, vec![]);
        }
        assert!(cache.buckets <= MOST);
        assert!(cache.bucket(Ino(1), 0).is_some());
        assert!(cache.bucket(Ino(2), 0).is_none());
    }
}
