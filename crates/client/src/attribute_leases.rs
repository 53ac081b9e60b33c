//! Leases on attributes: while one lasts, no other client changes the attributes of an inode, and for a
//! directory its names, so the kernel may cache them.
//!
//! They come with replies that contain attributes. Each has the number of its first grant, for as long as the
//! service has it without a break. So attributes that were read under the number of the present lease are
//! still right when they reach the kernel.
//!
//! Invariant: a lease that was revoked or given back is not taken from a reply that arrives late. The service
//! may believe that this client has it: it is told that it has not.

use penstock_base::{FileId, HashMap};
use penstock_wire::metadata::{Attr, ReleasedLease};
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// Most leases on attributes.
const MOST: usize = 1 << 15;
/// Time after the last use of a lease after which it is given back. The kernel has nothing by it then.
const IDLE: Duration = Duration::from_secs(3);
/// Time between two looks for idle leases.
const LOOK: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug)]
struct Held {
    grant: u64,
    /// The time of its last grant or use.
    used: Duration,
}

/// The leases on attributes of a client.
#[derive(Default)]
pub(crate) struct AttributeLeases {
    held: RefCell<HashMap<FileId, Held>>,
    /// Grants up to this one that arrive late are void.
    void: Cell<u64>,
    looked: Cell<Duration>,
}

impl AttributeLeases {
    /// Takes the lease in a reply. Returns it if it is given back at once.
    pub(crate) fn take(&self, attr: &Attr, now: Duration) -> Option<ReleasedLease> {
        let (file, grant) = (attr.file(), attr.lease);
        let mut all = self.held.borrow_mut();
        let held = all.get(&file).copied();
        if grant == 0 || held.is_some_and(|held| grant < held.grant) {
            return None;
        }
        let is_held = held.is_some_and(|held| grant == held.grant);
        if !is_held && (grant <= self.void.get() || all.len() >= MOST) {
            return Some(self.release(file, grant));
        }
        all.insert(file, Held { grant, used: now });
        assert!(all.len() <= MOST, "the leases are bounded");
        None
    }

    /// The number of the lease on an inode; none without one.
    pub(crate) fn of(&self, file: FileId) -> Option<u64> {
        self.held.borrow().get(&file).map(|held| held.grant)
    }

    /// True if the lease of this number lasts. The kernel gets something under it now.
    pub(crate) fn is_used(&self, file: FileId, grant: u64, now: Duration) -> bool {
        let mut all = self.held.borrow_mut();
        let Some(held) = all.get_mut(&file).filter(|held| held.grant == grant) else { return false };
        assert!(held.used <= now, "time goes on");
        held.used = now;
        true
    }

    /// The lease on an inode is revoked, if its number is not greater than `grant`.
    pub(crate) fn revoke(&self, file: FileId, grant: u64) {
        self.void.set(self.void.get().max(grant));
        let mut all = self.held.borrow_mut();
        if all.get(&file).is_some_and(|held| held.grant <= grant) {
            all.remove(&file);
        }
    }

    /// All leases are gone, and grants up to this one are void.
    pub(crate) fn void_all(&self, grant: u64) {
        self.void.set(self.void.get().max(grant));
        self.held.borrow_mut().clear();
    }

    /// The service was started again: all leases are gone, and grants are numbered anew.
    pub(crate) fn restarted(&self) {
        self.held.borrow_mut().clear();
        self.void.set(0);
    }

    /// Gives back the leases that were not used for [`IDLE`]. Looks for them every [`LOOK`] only.
    pub(crate) fn release_idle(&self, now: Duration) -> Vec<ReleasedLease> {
        if now < self.looked.get() + LOOK {
            return Vec::new();
        }
        assert!(now >= self.looked.get(), "time goes on");
        self.looked.set(now);
        let idle: Vec<(FileId, Held)> =
            self.held.borrow_mut().extract_if(|_, held| held.used + IDLE <= now).collect();
        idle.into_iter().map(|(file, held)| self.release(file, held.grant)).collect()
    }

    fn release(&self, file: FileId, grant: u64) -> ReleasedLease {
        assert!(grant > 0, "grants are numbered from 1");
        self.void.set(self.void.get().max(grant));
        ReleasedLease { ino: file.ino.0, branch: file.branch.0, grant, attributes: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(ino: u64, lease: u64) -> Attr {
        Attr { ino, lease, ..Attr::default() }
    }

    const FILE: FileId = FileId::of_numbers(0, 7);

    #[test]
    fn attributes_count_under_the_present_lease_only() {
        let (leases, now) = (AttributeLeases::default(), Duration::from_secs(100));
        assert!(leases.take(&attr(7, 0), now).is_none() && leases.of(FILE).is_none());
        assert!(leases.take(&attr(7, 5), now).is_none());
        assert!(leases.is_used(FILE, 5, now) && !leases.is_used(FILE, 4, now));
        leases.revoke(FILE, 4);
        assert_eq!(leases.of(FILE), Some(5), "an older one was revoked");
        leases.revoke(FILE, 5);
        let late = leases.take(&attr(7, 5), now).expect("a late reply is void");
        assert_eq!((late.ino, late.grant, late.attributes), (7, 5, true));
        assert!(leases.take(&attr(7, 9), now).is_none());
        assert!(leases.take(&attr(7, 8), now).is_none(), "from before the present one");
        assert!(leases.is_used(FILE, 9, now) && !leases.is_used(FILE, 8, now));
    }

    #[test]
    fn a_void_grant_of_another_inode_is_given_back() {
        let leases = AttributeLeases::default();
        leases.take(&attr(8, 3), Duration::ZERO);
        leases.revoke(FILE, 6);
        assert!(leases.take(&attr(9, 5), Duration::ZERO).is_some());
        assert!(leases.take(&attr(8, 3), Duration::ZERO).is_none(), "it lasts");
        leases.void_all(10);
        assert!(leases.of(FileId::of_numbers(0, 8)).is_none());
        leases.restarted();
        assert!(leases.take(&attr(8, 1), Duration::ZERO).is_none() && leases.of(FILE).is_none());
    }

    #[test]
    fn idle_leases_are_given_back_and_all_are_bounded() {
        let leases = AttributeLeases::default();
        let start = Duration::from_secs(100);
        assert!((1..=MOST as u64).all(|number| leases.take(&attr(number, number), start).is_none()));
        assert!(leases.take(&attr(MOST as u64 + 1, MOST as u64 + 1), start).is_some());
        let later = start + IDLE;
        assert!(leases.is_used(FILE, 7, later));
        assert_eq!(leases.release_idle(later).len(), MOST - 1);
        assert_eq!(leases.of(FILE), Some(7));
        assert!(leases.release_idle(later + IDLE).len() == 1 && leases.release_idle(later + IDLE).is_empty());
    }
}
