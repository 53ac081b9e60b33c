//! Advisory byte-range locks of one file, with fcntl semantics.
//!
//! A flock lock is a lock on the full range, in a table of its own. The service keeps the locks of all
//! clients. Each client keeps its own locks, so that it can send them again after a restart of the service.
//!
//! Invariants: ranges of one owner do not overlap; an exclusive range overlaps no range of another owner.

/// A lock on a range of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeLock<O> {
    /// The owner.
    pub owner: O,
    /// Offset of the first locked byte.
    pub first: u64,
    /// Offset of the last locked byte (inclusive).
    pub last: u64,
    /// True for an exclusive (write) lock, false for a shared (read) lock.
    pub exclusive: bool,
    /// The process that asked for the lock, for people and F_GETLK.
    pub pid: u32,
    /// The user against whose limit the lock counts.
    pub uid: u32,
}

impl<O: PartialEq> RangeLock<O> {
    fn is_cut_by(&self, owner: &O, first: u64, last: u64) -> bool {
        self.owner == *owner && self.first <= last && first <= self.last
    }
}

/// The locks of one file, of one kind (fcntl or flock).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeLocks<O>(Vec<RangeLock<O>>);

impl<O> Default for RangeLocks<O> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<O: Clone + PartialEq> RangeLocks<O> {
    /// Returns a lock that conflicts with `wanted`; none if `wanted` can be set.
    pub fn conflict(&self, wanted: &RangeLock<O>) -> Option<&RangeLock<O>> {
        self.0.iter().find(|held| {
            held.owner != wanted.owner
                && (held.exclusive || wanted.exclusive)
                && held.first <= wanted.last
                && wanted.first <= held.last
        })
    }

    /// Sets a lock that conflicts with nothing; the caller has checked. Replaces the owner's earlier locks in
    /// that range.
    pub fn set(&mut self, lock: RangeLock<O>) {
        debug_assert!(self.conflict(&lock).is_none(), "asked before");
        self.clear(&lock.owner, lock.first, lock.last);
        self.0.push(lock);
    }

    /// Unlocks a range for an owner. A lock that extends beyond the range is shortened or split in two.
    pub fn clear(&mut self, owner: &O, first: u64, last: u64) {
        let mut at = 0;
        while at < self.0.len() {
            if !self.0[at].is_cut_by(owner, first, last) {
                at += 1;
                continue;
            }
            let held = self.0.swap_remove(at);
            if held.first < first {
                self.0.push(RangeLock { last: first - 1, ..held.clone() });
            }
            if last < held.last {
                self.0.push(RangeLock { first: last + 1, ..held });
            }
        }
    }

    /// Predicts the effect of [`RangeLocks::clear`] on the number of locks: for each lock that would change,
    /// its user and the difference (-1, 0 or 1).
    pub fn growth(&self, owner: &O, first: u64, last: u64) -> impl Iterator<Item = (u32, isize)> {
        let cut = self.0.iter().filter(move |held| held.is_cut_by(owner, first, last));
        cut.map(move |held| (held.uid, isize::from(held.first < first) + isize::from(last < held.last) - 1))
    }

    /// Drops all locks of the owners for which `keep` returns false.
    pub fn retain(&mut self, keep: impl Fn(&O) -> bool) {
        self.0.retain(|held| keep(&held.owner));
    }

    /// All locks, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &RangeLock<O>> {
        self.0.iter()
    }

    /// The number of locks.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True if there are no locks.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(owner: u8, first: u64, last: u64, exclusive: bool) -> RangeLock<u8> {
        RangeLock { owner, first, last, exclusive, pid: 0, uid: 0 }
    }

    #[test]
    fn a_lock_takes_the_place_of_its_owners() {
        let mut locks = RangeLocks::default();
        locks.set(lock(1, 0, u64::MAX, true));
        locks.set(lock(1, 10, 19, false));
        assert!(locks.conflict(&lock(2, 10, 19, false)).is_none());
        assert!(locks.conflict(&lock(2, 10, 20, false)).is_some());
        assert!(locks.conflict(&lock(2, 9, 10, false)).is_some());
        assert!(locks.conflict(&lock(2, 10, 19, true)).is_some());
        locks.clear(&1, 0, 9);
        assert!(locks.conflict(&lock(2, 0, 9, true)).is_none());
        locks.clear(&1, 0, u64::MAX);
        assert!(locks.is_empty());
    }

    #[test]
    fn every_byte_has_the_lock_that_was_set_last() {
        // Compares the ranges with a model that records the lock of each byte of a small file.
        let (mut locks, mut bytes) = (RangeLocks::default(), [[None::<bool>; 8]; 3]);
        let mut state = 7u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let mut set = 0;
        for _ in 0..20_000 {
            let (owner, first) = (random(3) as u8, random(8));
            let last = first + random(8 - first);
            let range = first as usize..=last as usize;
            let grown =
                locks.len() as isize + locks.growth(&owner, first, last).map(|(_, by)| by).sum::<isize>();
            if random(3) == 0 {
                locks.clear(&owner, first, last);
                assert_eq!(locks.len() as isize, grown);
                bytes[usize::from(owner)][range].fill(None);
                continue;
            }
            let wanted = lock(owner, first, last, random(2) == 0);
            let free = (0..3).filter(|other| *other != usize::from(owner)).all(|other| {
                bytes[other][range.clone()].iter().flatten().all(|held| !*held && !wanted.exclusive)
            });
            assert_eq!(locks.conflict(&wanted).is_none(), free);
            if free {
                set += 1;
                bytes[usize::from(owner)][range].fill(Some(wanted.exclusive));
                locks.set(wanted);
            }
            let held: u64 = locks.iter().map(|held| held.last - held.first + 1).sum();
            assert_eq!(held as usize, bytes.iter().flatten().flatten().count());
        }
        assert!(set > 1000);
    }
}
