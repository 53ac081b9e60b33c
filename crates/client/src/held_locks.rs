//! The advisory locks that a client owns.
//!
//! The client remembers them, to reclaim them after a restart of the service. It forgets a lock
//! before it sends the unlock, and notes one after the service granted it, so it never reclaims a lock that
//! it does not own. No lock is released while locks are being reclaimed: the release could overtake the
//! reclaim, and the lock would stay forever.

use crate::by_file::{ByFile, Listener};
use penstock_base::range_locks::{RangeLock, RangeLocks};
use penstock_base::{FileId, HashMap};
use penstock_wire::metadata::{LockChange, LockRequest};
use std::cell::RefCell;
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, Semaphore, SemaphorePermit};

/// Number of waiting requests that are repeated at a time, so that thousands of waiters leave slots to other
/// requests.
const ASKING: usize = 4;

/// The locks of a client, by file: those of fcntl and those of flock.
pub(crate) struct Locks {
    held: RefCell<HashMap<FileId, [RangeLocks<u64>; 2]>>,
    /// Those that wait for a release of a lock of a file.
    waiting: ByFile,
    asking: Semaphore,
    /// Locked shared by each request that changes a lock, and exclusively while all locks are reclaimed.
    changing: RwLock<()>,
}

impl Default for Locks {
    fn default() -> Self {
        let (held, waiting, changing) = Default::default();
        Self { held, waiting, asking: Semaphore::new(ASKING), changing }
    }
}

impl Locks {
    /// Wakes those that wait for a lock of a file.
    pub(crate) fn note_unlocked(&self, file: FileId) {
        self.waiting.wake(file);
    }

    /// Listens for released locks of a file.
    pub(crate) fn news_of(&self, file: FileId) -> Listener<'_> {
        self.waiting.listen(file)
    }

    /// Records a lock that was granted or released.
    pub(crate) fn note(&self, request: &LockRequest) {
        let mut held = self.held.borrow_mut();
        let tables = held.entry(request.file()).or_default();
        let table = &mut tables[usize::from(request.flock)];
        let LockRequest { owner, first, last, pid, uid, .. } = *request;
        match request.change() {
            LockChange::Unlock => table.clear(&owner, first, last),
            change => {
                let exclusive = change == LockChange::Exclusive;
                table.set(RangeLock { owner, first, last, exclusive, pid, uid });
            }
        }
        if tables.iter().all(RangeLocks::is_empty) {
            held.remove(&request.file());
        }
    }

    /// Forgets the locks in a range. Returns the requests that would restore all locks which overlap it.
    pub(crate) fn give_up(&self, request: &LockRequest) -> Vec<LockRequest> {
        let LockRequest { owner, first, last, .. } = *request;
        let file = request.file();
        let cut = |lock: &&RangeLock<u64>| lock.owner == owner && lock.first <= last && first <= lock.last;
        let held = self.held.borrow();
        let table = held.get(&file).map(|tables| &tables[usize::from(request.flock)]);
        let before = table.into_iter().flat_map(|table| table.iter().filter(cut));
        let before = before.map(|lock| said_again(file, lock, request.flock)).collect();
        drop(held);
        assert!(request.change() == LockChange::Unlock, "locks are given up by an unlock");
        self.note(request);
        before
    }

    /// Begins a request that changes a lock.
    pub(crate) async fn change(&self) -> RwLockReadGuard<'_, ()> {
        self.changing.read().await
    }

    /// Waits for a turn to repeat a request that waits. `None` never happens: the turns are not closed.
    pub(crate) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.asking.acquire().await.ok()
    }

    /// True if the owner has a lock of the file.
    pub(crate) fn has(&self, file: FileId, owner: u64, flock: bool) -> bool {
        let held = self.held.borrow();
        let tables = held.get(&file);
        tables.is_some_and(|tables| tables[usize::from(flock)].iter().any(|lock| lock.owner == owner))
    }

    /// Keeps the locks from changing until the result is dropped. First waits for all requests that change
    /// one.
    pub(crate) async fn still(&self) -> RwLockWriteGuard<'_, ()> {
        self.changing.write().await
    }

    /// Returns the requests that reclaim all locks.
    pub(crate) fn all(&self) -> Vec<LockRequest> {
        let held = self.held.borrow();
        let mut all = Vec::new();
        for (file, tables) in &*held {
            for (table, flock) in tables.iter().zip([false, true]) {
                all.extend(table.iter().map(|lock| said_again(*file, lock, flock)));
            }
        }
        all
    }
}

/// Returns the request that reclaims a lock.
fn said_again(file: FileId, lock: &RangeLock<u64>, flock: bool) -> LockRequest {
    LockRequest {
        ino: file.ino.0,
        branch: file.branch.0,
        owner: lock.owner,
        first: lock.first,
        last: lock.last,
        change: LockChange::holding(lock.exclusive).into(),
        pid: lock.pid,
        uid: lock.uid,
        flock,
        ..LockRequest::default()
    }
}
