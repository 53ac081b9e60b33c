//! Advisory locks of all clients: flock(2) and fcntl(2).
//!
//! No request waits here. A session that may wait is notified when something is released, and tries again. So
//! a wait for a lock occupies no request, and a client that disappears leaves nothing behind.
//!
//! Locks are in memory. After a restart each client reports its locks again. Until all clients have done so
//! or have ended, requests for new locks are answered with "ask again".

use penstock_base::range_locks::{RangeLock, RangeLocks};
use penstock_base::{HashMap, Ino};
use penstock_wire::names::{LockChange, LockReply, LockRequest};
use rustix::io::Errno;
use std::collections::BTreeSet;

/// Most locks of one file, so that nobody fills memory with them. Below: of one user in one file, so that
/// nobody keeps others from locking it. The second bound does not apply to root.
const MOST: usize = 1 << 16;
const MOST_OF_USER_IN_FILE: usize = 1 << 14;
/// Most locks of one user in a session; below, of all users except root in a session. Neither applies to
/// root.
const MOST_OF_USER: usize = 1 << 17;
const MOST_OF_SESSION: usize = 1 << 20;
const ROOT: u32 = 0;

/// Session, and the lock owner's number within it.
type Owner = (u64, u64);

#[derive(Default)]
struct FileLocks {
    /// Locks of fcntl, then locks of flock.
    tables: [RangeLocks<Owner>; 2],
    /// Sessions to notify when something is released.
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
    /// Number of locks, for each session and user that has some.
    held: HashMap<(u64, u32), usize>,
}

/// Changes of each user's number of locks; a user may be listed more than once.
type Growth = Vec<(u32, isize)>;

impl Locks {
    /// Fails with ENOLCK if a change would leave more locks than the bounds allow. Releasing a part of a lock
    /// may add one.
    fn check_bounds(&self, session: u64, table: &RangeLocks<Owner>, growth: &Growth) -> Result<(), Errno> {
        let total: isize = growth.iter().map(|(_, by)| by).sum();
        if total > 0 && table.len().saturating_add_signed(total) > MOST {
            return Err(Errno::NOLCK);
        }
        for uid in growth.iter().map(|(uid, _)| *uid).filter(|uid| *uid != ROOT) {
            let by: isize = growth.iter().filter(|(of, _)| *of == uid).map(|(_, by)| by).sum();
            if by <= 0 {
                continue;
            }
            let grown = |locks: usize| locks.saturating_add_signed(by);
            let in_file = table.iter().filter(|lock| lock.uid == uid).count();
            let of_user = self.held.get(&(session, uid)).copied().unwrap_or(0);
            let of_users = self.held.iter().filter(|((of, uid), _)| *of == session && *uid != ROOT);
            let of_session = of_users.map(|(_, locks)| locks).sum();
            if grown(in_file) > MOST_OF_USER_IN_FILE
                || grown(of_user) > MOST_OF_USER
                || grown(of_session) > MOST_OF_SESSION
            {
                return Err(Errno::NOLCK);
            }
        }
        Ok(())
    }

    /// Applies a request. Returns the reply, and true if something was released. With `granted` the lock was
    /// granted before a restart, and is granted again however many locks there are.
    pub(crate) fn change(
        &mut self,
        session: u64,
        request: &LockRequest,
        granted: bool,
    ) -> Result<(LockReply, bool), Errno> {
        let change = LockChange::try_from(request.change).map_err(|_| Errno::INVAL)?;
        if request.first > request.last {
            return Err(Errno::INVAL);
        }
        let mut file = self.files.remove(&Ino(request.ino)).unwrap_or_default();
        let result = self.change_in(&mut file, session, request, (change, granted));
        if !file.is_idle() {
            self.files.insert(Ino(request.ino), file);
        }
        result
    }

    fn change_in(
        &mut self,
        file: &mut FileLocks,
        session: u64,
        request: &LockRequest,
        (change, granted): (LockChange, bool),
    ) -> Result<(LockReply, bool), Errno> {
        let table = &mut file.tables[usize::from(request.flock)];
        let wanted = RangeLock {
            owner: (session, request.owner),
            first: request.first,
            last: request.last,
            exclusive: change == LockChange::Exclusive,
            pid: request.pid,
            uid: request.uid,
        };
        let mut reply = LockReply::default();
        let mut given_up = change == LockChange::Unlock;
        let mut growth: Growth = table.growth(&wanted.owner, wanted.first, wanted.last).collect();
        if change == LockChange::Unlock {
            self.check_bounds(session, table, &growth)?;
            table.clear(&wanted.owner, wanted.first, wanted.last);
        } else if let Some(held) = table.conflict(&wanted) {
            reply.conflict = Some(LockRequest {
                ino: request.ino,
                owner: held.owner.1,
                first: held.first,
                last: held.last,
                change: LockChange::holding(held.exclusive).into(),
                // The process id of another client's process means nothing to this one.
                pid: if held.owner.0 == session { held.pid } else { 0 },
                flock: request.flock,
                ..LockRequest::default()
            });
            if request.wait && !request.test {
                file.waiting.insert(session);
            }
            return Ok((reply, given_up));
        } else if request.test {
            return Ok((reply, given_up));
        } else {
            growth.push((wanted.uid, 1));
            if !granted {
                self.check_bounds(session, table, &growth)?;
            }
            // Replacing an exclusive lock by a shared one also releases something.
            given_up = true;
            table.set(wanted);
        }
        for (uid, by) in growth {
            let held = self.held.entry((session, uid)).or_default();
            *held = held.checked_add_signed(by).expect("only what was counted goes");
            if *held == 0 {
                self.held.remove(&(session, uid));
            }
        }
        Ok((reply, given_up))
    }

    /// Takes the sessions that wait for a lock of a file.
    pub(crate) fn take_waiting(&mut self, ino: Ino) -> BTreeSet<u64> {
        let Some(file) = self.files.get_mut(&ino) else { return BTreeSet::new() };
        let waiting = std::mem::take(&mut file.waiting);
        if file.is_idle() {
            self.files.remove(&ino);
        }
        waiting
    }

    /// Removes all locks of a session that ends. Returns the inodes whose locks changed.
    pub(crate) fn end(&mut self, session: u64) -> Vec<Ino> {
        let mut changed = Vec::new();
        self.held.retain(|(of, _), _| *of != session);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn request(owner: u64, change: LockChange) -> LockRequest {
        LockRequest { ino: 9, owner, last: 99, change: change.into(), wait: true, ..LockRequest::default() }
    }

    #[test]
    fn sessions_are_told_apart_and_told_of_each_other() {
        let mut locks = Locks::default();
        let set = |locks: &mut Locks, session, request: &LockRequest| {
            locks.change(session, request, false).unwrap().0
        };
        assert_eq!(set(&mut locks, 1, &request(5, LockChange::Exclusive)).conflict, None);
        let conflict = set(&mut locks, 2, &request(5, LockChange::Shared)).conflict.unwrap();
        assert_eq!((conflict.first, conflict.last, conflict.change()), (0, 99, LockChange::Exclusive));
        // Locks of flock and of fcntl do not conflict.
        let flock = LockRequest { flock: true, ..request(5, LockChange::Exclusive) };
        assert_eq!(set(&mut locks, 2, &flock).conflict, None);
        assert!(locks.files[&Ino(9)].waiting.contains(&2));
        assert_eq!(locks.end(1), [Ino(9)]);
        assert_eq!(set(&mut locks, 2, &request(5, LockChange::Shared)).conflict, None);
        assert_eq!(locks.end(2), [Ino(9)]);
        assert!(locks.files.is_empty() && locks.held.is_empty());
        let backwards = LockRequest { first: 100, ..request(1, LockChange::Shared) };
        assert_eq!(locks.change(1, &backwards, false), Err(Errno::INVAL));
    }

    fn byte(ino: u64, uid: u32, byte: u64, change: LockChange) -> LockRequest {
        let (first, last) = (2 * byte, 2 * byte);
        LockRequest {
            ino,
            uid,
            owner: uid.into(),
            first,
            last,
            change: change.into(),
            ..LockRequest::default()
        }
    }

    /// Regression: a user split one shared lock of a file until nobody else could lock any of it, and after a
    /// restart those locks did not come back.
    #[test]
    fn giving_up_parts_of_a_lock_is_bounded_by_user() {
        let mut locks = Locks::default();
        let whole = LockRequest { last: 1 << 40, ..byte(9, 1000, 0, LockChange::Shared) };
        assert!(locks.change(1, &whole, false).is_ok());
        let mut given_up = 0;
        while locks.change(1, &byte(9, 1000, 1 + given_up, LockChange::Unlock), false).is_ok() {
            given_up += 1;
        }
        assert_eq!(given_up, MOST_OF_USER_IN_FILE as u64 - 1);
        let exclusive = byte(9, 0, 1, LockChange::Exclusive);
        assert_eq!(locks.change(2, &exclusive, false).unwrap().0.conflict, None);
        let other = byte(9, 1001, 2, LockChange::Exclusive);
        assert_eq!(locks.change(1, &other, false).unwrap().0.conflict, None);
        // The whole lock can still be released.
        let all = LockRequest { change: LockChange::Unlock.into(), ..whole };
        assert!(locks.change(1, &all, false).is_ok());
        assert_eq!(locks.files[&Ino(9)].tables[0].len(), 2);
        assert_eq!(locks.held.get(&(1, 1000)), None);
    }

    /// Regression: one user took all locks of a mount, and root and all other users got none.
    #[test]
    fn a_user_takes_no_locks_from_others() {
        let mut locks = Locks::default();
        let files = (MOST_OF_USER / MOST_OF_USER_IN_FILE) as u64;
        for ino in 0..files {
            for at in 0..MOST_OF_USER_IN_FILE as u64 {
                assert!(locks.change(1, &byte(ino, 1000, at, LockChange::Shared), false).is_ok());
            }
        }
        let more = byte(files, 1000, 0, LockChange::Shared);
        assert_eq!(locks.change(1, &more, false), Err(Errno::NOLCK));
        assert!(!locks.files.contains_key(&Ino(files)), "what is refused leaves nothing");
        for uid in [0, 1001] {
            assert!(locks.change(1, &byte(files, uid, 0, LockChange::Shared), false).is_ok());
        }
        // A lock that was granted before a restart is restored beyond the bound.
        assert!(locks.change(1, &more, true).is_ok());
        assert_eq!(locks.held[&(1, 1000)], MOST_OF_USER + 1);
    }
}
