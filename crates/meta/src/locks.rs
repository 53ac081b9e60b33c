//! Advisory locks of all clients: flock(2) and fcntl(2).
//!
//! Nobody waits here. Whoever may wait is told that something was given up, and asks again; so a lock that is waited
//! for holds no request, and a client that goes away leaves nothing behind.
//!
//! Locks are in memory. After a restart each client says its own again, and until all have done so or have ended,
//! everybody else is told to ask again.

use crate::error::MetaError;
use crate::target::MetaTarget;
use penstock_base::range_locks::{RangeLock, RangeLocks};
use penstock_base::{HashMap, Ino};
use penstock_wire::names::{LockChange, LockReply, LockRequest};
use prost::Message;
use rustix::io::Errno;
use std::collections::BTreeSet;

/// Locks of one file at most, so that nobody fills memory with them.
const MOST: usize = 1 << 16;
/// Locks that one session may hold.
const MOST_OF_ONE: usize = 1 << 20;

/// A session and who it is within.
type Owner = (u64, u64);

#[derive(Default)]
struct FileLocks {
    /// Of fcntl, and of flock.
    tables: [RangeLocks<Owner>; 2],
    /// Sessions to be told when something is given up.
    waiting: BTreeSet<u64>,
}

impl FileLocks {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.tables.iter().all(RangeLocks::is_empty)
    }
}

/// All locks, by inode.
#[derive(Default)]
pub(crate) struct Locks {
    files: HashMap<Ino, FileLocks>,
    /// Locks that each session holds.
    held: HashMap<u64, usize>,
}

impl Locks {
    /// What a request comes to; and whether something was given up.
    fn change(&mut self, session: u64, request: &LockRequest) -> Result<(LockReply, bool), Errno> {
        let change = LockChange::try_from(request.change).map_err(|_| Errno::INVAL)?;
        if request.first > request.last {
            return Err(Errno::INVAL);
        }
        let held = self.held.get(&session).copied().unwrap_or(0);
        let file = self.files.entry(Ino(request.ino)).or_default();
        let table = &mut file.tables[usize::from(request.flock)];
        let wanted = RangeLock {
            owner: (session, request.owner),
            first: request.first,
            last: request.last,
            exclusive: change == LockChange::Exclusive,
            pid: request.pid,
        };
        let before = table.len();
        let mut reply = LockReply::default();
        let mut given_up = change == LockChange::Unlock;
        if change == LockChange::Unlock {
            table.clear(&wanted.owner, wanted.first, wanted.last);
        } else if let Some(held) = table.conflict(&wanted) {
            reply.conflict = Some(LockRequest {
                ino: request.ino,
                owner: held.owner.1,
                first: held.first,
                last: held.last,
                change: LockChange::holding(held.exclusive).into(),
                // A process of another client means nothing where this one asks.
                pid: if held.owner.0 == session { held.pid } else { 0 },
                flock: request.flock,
                ..LockRequest::default()
            });
            if request.wait && !request.test {
                file.waiting.insert(session);
            }
        } else if !request.test {
            if table.len() >= MOST || held >= MOST_OF_ONE {
                return Err(Errno::NOLCK);
            }
            // A shared one in the place of an exclusive one gives something up too.
            given_up = true;
            table.set(wanted);
        }
        // Only this session's change.
        match (held + table.len()).saturating_sub(before) {
            0 => _ = self.held.remove(&session),
            held => _ = self.held.insert(session, held),
        }
        Ok((reply, given_up))
    }

    /// A session ends.
    fn end(&mut self, session: u64) -> Vec<Ino> {
        let mut changed = Vec::new();
        self.held.remove(&session);
        for (ino, file) in &mut self.files {
            let before = file.tables.each_ref().map(RangeLocks::len);
            file.tables.iter_mut().for_each(|table| table.retain(|owner| owner.0 != session));
            file.waiting.remove(&session);
            if before != file.tables.each_ref().map(RangeLocks::len) {
                changed.push(*ino);
            }
        }
        self.files.retain(|_, file| !file.is_idle());
        changed
    }
}

impl MetaTarget {
    /// Sets, tests or gives up a lock.
    pub(crate) fn lock(&self, session: u64, request: &LockRequest) -> Result<Vec<u8>, MetaError> {
        if self.sessions.borrow().owe_opens() && request.change != i32::from(LockChange::Unlock) {
            return Ok(LockReply { early: true, ..LockReply::default() }.encode_to_vec());
        }
        let ino = Ino(request.ino);
        let (reply, given_up) = self.locks.borrow_mut().change(session, request)?;
        if given_up {
            self.tell_unlocked(ino);
        }
        self.forget_idle_locks(ino);
        Ok(reply.encode_to_vec())
    }

    /// Takes back a lock that a session held before a restart.
    pub(crate) fn reclaim_lock(&self, session: u64, request: &LockRequest) {
        let result = self.locks.borrow_mut().change(session, request);
        if !matches!(&result, Ok((LockReply { conflict: None, .. }, _))) {
            tracing::error!(
                session,
                ino = request.ino,
                ?result,
                "a lock that a client held cannot be taken back"
            );
        }
    }

    pub(crate) fn end_locks(&self, session: u64) {
        let changed = self.locks.borrow_mut().end(session);
        changed.into_iter().for_each(|ino| self.tell_unlocked(ino));
    }

    fn tell_unlocked(&self, ino: Ino) {
        let waiting = match self.locks.borrow_mut().files.get_mut(&ino) {
            Some(file) => std::mem::take(&mut file.waiting),
            None => return,
        };
        if !waiting.is_empty() {
            let mut leases = self.leases.borrow_mut();
            waiting.into_iter().for_each(|session| leases.note_unlocked(session, ino));
            self.lease_news.notify_waiters();
        }
    }

    fn forget_idle_locks(&self, ino: Ino) {
        let mut locks = self.locks.borrow_mut();
        if locks.files.get(&ino).is_some_and(FileLocks::is_idle) {
            locks.files.remove(&ino);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(owner: u64, change: LockChange) -> LockRequest {
        LockRequest { ino: 9, owner, last: 99, change: change.into(), wait: true, ..LockRequest::default() }
    }

    #[test]
    fn sessions_are_told_apart_and_told_of_each_other() {
        let mut locks = Locks::default();
        let set =
            |locks: &mut Locks, session, request: &LockRequest| locks.change(session, request).unwrap().0;
        assert_eq!(set(&mut locks, 1, &request(5, LockChange::Exclusive)).conflict, None);
        let conflict = set(&mut locks, 2, &request(5, LockChange::Shared)).conflict.unwrap();
        assert_eq!((conflict.first, conflict.last, conflict.change()), (0, 99, LockChange::Exclusive));
        // flock knows nothing of them.
        let flock = LockRequest { flock: true, ..request(5, LockChange::Exclusive) };
        assert_eq!(set(&mut locks, 2, &flock).conflict, None);
        assert!(locks.files[&Ino(9)].waiting.contains(&2));
        assert_eq!(locks.end(1), [Ino(9)]);
        assert_eq!(set(&mut locks, 2, &request(5, LockChange::Shared)).conflict, None);
        assert_eq!(locks.end(2), [Ino(9)]);
        assert!(locks.files.is_empty() && locks.held.is_empty());
        let backwards = LockRequest { first: 100, ..request(1, LockChange::Shared) };
        assert_eq!(locks.change(1, &backwards), Err(Errno::INVAL));
    }
}
