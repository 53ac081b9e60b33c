//! Advisory locks, which the service keeps for all clients.
//!
//! The client remembers its own locks, to reclaim them after a restart of the service. It forgets a lock
//! before it sends the unlock, and notes one after the service granted it, so it never reclaims a lock that
//! it does not own. No lock is released while locks are being reclaimed: the release could overtake the
//! reclaim, and the lock would stay forever.

use crate::session::Client;
use penstock_base::range_locks::{RangeLock, RangeLocks};
use penstock_base::{HashMap, Ino};
use penstock_wire::names::{LockChange, LockReply, LockRequest};
use penstock_wire::{Failure, Kind};
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::sync::{Notify, RwLock, RwLockWriteGuard, Semaphore};

/// Pause before a request is repeated while the service does not know all locks yet.
const EARLY: Duration = Duration::from_millis(50);
/// A request that waits for a lock is repeated after this, in case the client is not notified of a release.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Number of waiting requests that are repeated at a time, so that thousands of waiters leave slots to other
/// requests.
const ASKING: usize = 4;

/// The locks of a client, by inode: those of fcntl and those of flock.
pub(crate) struct Locks {
    held: RefCell<HashMap<Ino, [RangeLocks<u64>; 2]>>,
    /// Waiters by file, notified when a lock of the file is released.
    waiting: RefCell<HashMap<Ino, Weak<Notify>>>,
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
    pub(crate) fn note_unlocked(&self, ino: Ino) {
        if let Some(news) = self.waiting.borrow().get(&ino).and_then(Weak::upgrade) {
            news.notify_waiters();
        }
    }

    /// Registers a waiter, which is notified of released locks of a file until it is dropped.
    fn news_of(&self, ino: Ino) -> News<'_> {
        let mut waiting = self.waiting.borrow_mut();
        let known = waiting.get(&ino).and_then(Weak::upgrade);
        let told = known.unwrap_or_else(|| {
            let new = Rc::<Notify>::default();
            waiting.insert(ino, Rc::downgrade(&new));
            new
        });
        News { locks: self, ino, told }
    }

    fn note(&self, request: &LockRequest) {
        let mut held = self.held.borrow_mut();
        let tables = held.entry(Ino(request.ino)).or_default();
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
            held.remove(&Ino(request.ino));
        }
    }

    /// Forgets the locks in a range. Returns the requests that would restore all locks which overlap it.
    fn give_up(&self, request: &LockRequest) -> Vec<LockRequest> {
        let LockRequest { owner, first, last, .. } = *request;
        let ino = Ino(request.ino);
        let cut = |lock: &&RangeLock<u64>| lock.owner == owner && lock.first <= last && first <= lock.last;
        let held = self.held.borrow();
        let table = held.get(&ino).map(|tables| &tables[usize::from(request.flock)]);
        let before = table.into_iter().flat_map(|table| table.iter().filter(cut));
        let before = before.map(|lock| said_again(ino, lock, request.flock)).collect();
        drop(held);
        self.note(request);
        before
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
        for (ino, tables) in &*held {
            for (table, flock) in tables.iter().zip([false, true]) {
                all.extend(table.iter().map(|lock| said_again(*ino, lock, flock)));
            }
        }
        all
    }
}

/// Returns the request that reclaims a lock.
fn said_again(ino: Ino, lock: &RangeLock<u64>, flock: bool) -> LockRequest {
    LockRequest {
        ino: ino.0,
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

/// A waiter for a lock of a file.
struct News<'a> {
    locks: &'a Locks,
    ino: Ino,
    told: Rc<Notify>,
}

impl Drop for News<'_> {
    fn drop(&mut self) {
        if Rc::strong_count(&self.told) == 1 {
            self.locks.waiting.borrow_mut().remove(&self.ino);
        }
    }
}

impl Client {
    /// Sets, tests or releases a lock. Returns the lock that conflicts, or `None`.
    pub async fn lock(&self, request: &LockRequest) -> Result<Option<LockRequest>, Failure> {
        let unlocks = request.change() == LockChange::Unlock;
        loop {
            let changing = self.locks.changing.read().await;
            let before = if unlocks { self.locks.give_up(request) } else { Vec::new() };
            let reply: Result<LockReply, Failure> = self.once(Kind::Lock, request).await;
            if reply.is_err() {
                // The service kept the locks, because it lacks space for the remaining parts.
                before.iter().for_each(|lock| self.locks.note(lock));
            }
            let reply = reply?;
            if reply.early {
                drop(changing);
                self.env.sleep(EARLY).await;
                continue;
            }
            if reply.conflict.is_none() && !request.test && !unlocks {
                self.locks.note(request);
            }
            return Ok(reply.conflict);
        }
    }

    /// Sets a lock once it is free. Returns false if `interrupted` is notified first.
    pub async fn lock_waiting(
        &self,
        mut request: LockRequest,
        interrupted: &Notify,
    ) -> Result<bool, Failure> {
        request.wait = true;
        let news = self.locks.news_of(Ino(request.ino));
        let mut first = true;
        loop {
            let told = news.told.notified();
            {
                let turn = self.locks.asking.acquire();
                let _turn = match first {
                    true => None,
                    false => tokio::select! {
                        biased;
                        () = interrupted.notified() => return Ok(false),
                        turn = turn => turn.ok(),
                    },
                };
                first = false;
                if self.lock(&request).await?.is_none() {
                    return Ok(true);
                }
            }
            tokio::select! {
                biased;
                () = told => {}
                () = self.env.sleep(ASK_AGAIN) => {}
                () = interrupted.notified() => return Ok(false),
            }
        }
    }

    /// Releases all locks of an owner on a file. Sends nothing if there are none.
    pub async fn unlock_all(&self, ino: Ino, owner: u64, flock: bool) -> Result<(), Failure> {
        let holds = self
            .locks
            .held
            .borrow()
            .get(&ino)
            .is_some_and(|tables| tables[usize::from(flock)].iter().any(|lock| lock.owner == owner));
        if !holds {
            return Ok(());
        }
        let request = LockRequest {
            ino: ino.0,
            owner,
            last: u64::MAX,
            change: LockChange::Unlock.into(),
            flock,
            ..LockRequest::default()
        };
        self.lock(&request).await.map(drop)
    }
}
