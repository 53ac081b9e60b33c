//! Advisory locks of all clients: flock(2) and fcntl(2).
//!
//! No request waits here. A session that may wait is notified when something is released, and tries again. So
//! a wait for a lock occupies no request, and a client that disappears leaves nothing behind.
//!
//! Locks are in memory. After a restart each client reports its locks again. Until all clients have done so
//! or have ended, requests for new locks are answered with "ask again".

use crate::by_session::BySession;
use crate::table::SessionHoldings;
use penstock_base::range_locks::{RangeLock, RangeLocks};
use penstock_base::{FileId, HashMap};
use penstock_wire::metadata::{LockChange, LockReply, LockRequest};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};

/// Most locks of one file, so that nobody fills memory with them. Below: of one user in one file, so that
/// nobody keeps others from locking it. The second bound does not apply to root.
const MOST: usize = 1 << 16;
const MOST_OF_USER_IN_FILE: usize = 1 << 14;
/// Most locks of one user in a session, which does not apply to root; below, of all users except root in a
/// session, and of root.
const MOST_OF_USER: usize = 1 << 17;
const MOST_OF_SESSION: usize = 1 << 20;
const ROOT: u32 = 0;

/// Session, the user for whom a gateway asks (else 0), and the lock owner's number, which both choose.
type Owner = (u64, u32, u64);

#[derive(Default)]
struct FileLocks {
    /// Locks of fcntl, then locks of flock.
    tables: [RangeLocks<Owner>; 2],
    /// Sessions to notify when something is released.
    waiting: BTreeSet<u64>,
}

impl FileLocks {
    /// The number of locks of both kinds.
    fn count(&self) -> usize {
        self.tables.iter().map(RangeLocks::len).sum()
    }

    fn has_locks_of(&self, session: u64) -> bool {
        self.tables.iter().any(|table| table.iter().any(|lock| lock.owner.0 == session))
    }

    fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.tables.iter().all(RangeLocks::is_empty)
    }
}

/// All locks, by inode.
#[derive(Default)]
pub(crate) struct Locks {
    files: HashMap<FileId, FileLocks>,
    /// Number of locks, for each session and user that has some.
    held: BTreeMap<(u64, u32), usize>,
    /// The sums of each session, of root and of all others.
    sums: BTreeMap<u64, [usize; 2]>,
    /// The files of each session with locks of it, and below those where it waits for one.
    locked: BySession,
    waiting: BySession,
}

/// Changes of each user's number of locks; a user may be listed more than once.
type Growth = Vec<(u32, isize)>;

impl Locks {
    /// Adds the locks of all sessions.
    pub(crate) fn add_holdings(&self, all: &mut BTreeMap<u64, SessionHoldings>) {
        for ((session, _), locks) in &self.held {
            all.entry(*session).or_default().locks += *locks as u64;
        }
    }

    /// Fails with ENOLCK if a change would leave more locks than the bounds allow. Releasing a part of a lock
    /// may add one. Those that were `granted` before a restart are not counted by user.
    fn check_bounds(
        &self,
        session: u64,
        table: &RangeLocks<Owner>,
        growth: &Growth,
        granted: bool,
    ) -> Result<(), Errno> {
        let total: isize = growth.iter().map(|(_, by)| by).sum();
        if total > 0 && table.len().saturating_add_signed(total) > MOST {
            return Err(Errno::NOLCK);
        }
        for uid in growth.iter().map(|(uid, _)| *uid) {
            let by: isize = growth.iter().filter(|(of, _)| *of == uid).map(|(_, by)| by).sum();
            if by <= 0 {
                continue;
            }
            let grown = |locks: usize| locks.saturating_add_signed(by);
            let of_session = self.sums_of(session)[usize::from(uid != ROOT)];
            let in_file = || table.iter().filter(|lock| lock.uid == uid).count();
            let is_bounded = uid != ROOT && !granted;
            if grown(of_session) > MOST_OF_SESSION
                || is_bounded
                    && (grown(self.held_by(session, uid)) > MOST_OF_USER
                        || grown(in_file()) > MOST_OF_USER_IN_FILE)
            {
                return Err(Errno::NOLCK);
            }
        }
        Ok(())
    }

    /// Applies a request. Returns the reply, and true if something was released. With `granted` the lock was
    /// granted before a restart, and is granted again however many its user has.
    pub(crate) fn change_for(
        &mut self,
        (session, user): (u64, u32),
        request: &LockRequest,
        granted: bool,
    ) -> Result<(LockReply, bool), Errno> {
        let change = LockChange::try_from(request.change).map_err(|_| Errno::INVAL)?;
        if request.first > request.last {
            return Err(Errno::INVAL);
        }
        let id = request.file();
        let mut file = self.files.remove(&id).unwrap_or_default();
        let before = file.count();
        let result = self.change_in(&mut file, (session, user), request, (change, granted));
        assert!(result.is_ok() || file.count() == before, "a refused change changes nothing");
        if !file.is_idle() {
            self.files.insert(id, file);
        }
        result
    }

    fn change_in(
        &mut self,
        file: &mut FileLocks,
        (session, user): (u64, u32),
        request: &LockRequest,
        (change, granted): (LockChange, bool),
    ) -> Result<(LockReply, bool), Errno> {
        let table = &mut file.tables[usize::from(request.flock)];
        let before = table.len();
        let wanted = RangeLock {
            owner: (session, user, request.owner),
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
            self.check_bounds(session, table, &growth, granted)?;
            table.clear(&wanted.owner, wanted.first, wanted.last);
        } else if let Some(held) = table.conflict(&wanted) {
            reply.conflict = Some(LockRequest {
                ino: request.ino,
                owner: held.owner.2,
                first: held.first,
                last: held.last,
                change: LockChange::holding(held.exclusive).into(),
                // The process id of another client's process means nothing to this one.
                pid: if held.owner.0 == session { held.pid } else { 0 },
                flock: request.flock,
                ..LockRequest::default()
            });
            if request.wait && !request.test && file.waiting.insert(session) {
                self.waiting.add(session, request.file());
            }
            return Ok((reply, given_up));
        } else if request.test {
            return Ok((reply, given_up));
        } else {
            growth.push((wanted.uid, 1));
            self.check_bounds(session, table, &growth, granted)?;
            // Replacing an exclusive lock by a shared one also releases something.
            given_up = true;
            table.set(wanted);
        }
        let grown: isize = growth.iter().map(|(_, by)| by).sum();
        debug_assert_eq!(
            table.len().checked_signed_diff(before),
            Some(grown),
            "the locks of a file grow as predicted"
        );
        for (uid, by) in growth {
            let grow = |count: &mut usize| {
                *count = count.checked_add_signed(by).expect("only what was counted goes");
                *count == 0
            };
            if grow(self.held.entry((session, uid)).or_default()) {
                self.held.remove(&(session, uid));
            }
            let sums = self.sums.entry(session).or_default();
            if grow(&mut sums[usize::from(uid != ROOT)]) && *sums == [0, 0] {
                self.sums.remove(&session);
            }
        }
        match grown > 0 || file.has_locks_of(session) {
            true => self.locked.add(session, request.file()),
            false => self.locked.discard(session, request.file()),
        }
        Ok((reply, given_up))
    }

    #[cfg(test)]
    fn change(
        &mut self,
        session: u64,
        request: &LockRequest,
        granted: bool,
    ) -> Result<(LockReply, bool), Errno> {
        self.change_for((session, 0), request, granted)
    }

    /// The numbers of locks of a session, of root and of all others.
    fn sums_of(&self, session: u64) -> [usize; 2] {
        self.sums.get(&session).copied().unwrap_or_default()
    }

    /// The number of locks of a session.
    pub(crate) fn held_in(&self, session: u64) -> u64 {
        self.sums_of(session).into_iter().sum::<usize>() as u64
    }

    /// The number of files on which a session waits for a lock.
    pub(crate) fn waits_of(&self, session: u64) -> usize {
        self.waiting.count(session)
    }

    /// The number of locks of a user in a session.
    pub(crate) fn held_by(&self, session: u64, uid: u32) -> usize {
        self.held.get(&(session, uid)).copied().unwrap_or(0)
    }

    /// Takes the sessions that wait for a lock of a file.
    pub(crate) fn take_waiting(&mut self, id: FileId) -> BTreeSet<u64> {
        let Some(file) = self.files.get_mut(&id) else { return BTreeSet::new() };
        let waiting = std::mem::take(&mut file.waiting);
        waiting.iter().for_each(|session| self.waiting.remove(*session, id));
        if file.is_idle() {
            self.files.remove(&id);
        }
        waiting
    }

    /// Removes all locks of a session that ends. Returns the inodes whose locks changed.
    pub(crate) fn end(&mut self, session: u64) -> Vec<FileId> {
        let held = self.held_in(session);
        let users: Vec<(u64, u32)> =
            self.held.range((session, 0)..=(session, u32::MAX)).map(|(user, _)| *user).collect();
        for user in users {
            self.held.remove(&user);
        }
        self.sums.remove(&session);
        for id in self.waiting.take(session) {
            let file = self.files.get_mut(&id).expect("a file on which somebody waits is listed");
            file.waiting.remove(&session);
            if file.is_idle() {
                self.files.remove(&id);
            }
        }
        let mut removed = 0;
        let mut changed = Vec::new();
        for id in self.locked.take(session) {
            let file = self.files.get_mut(&id).expect("a file with locks is listed");
            let before = file.count();
            file.tables.iter_mut().for_each(|table| table.retain(|owner| owner.0 != session));
            removed += before - file.count();
            changed.push(id);
            if file.is_idle() {
                self.files.remove(&id);
            }
        }
        assert_eq!(removed as u64, held, "all locks of session {session} were counted");
        changed
    }
}

#[cfg(test)]
mod tests;
