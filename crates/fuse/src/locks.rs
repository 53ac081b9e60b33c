//! Serves advisory locks, and the ends of handles, at which locks are dropped.
//!
//! Only a request that waits for a lock can be interrupted: the others wait for no other program. The kernel
//! reports the end of an fcntl lock's owner by FLUSH, and that of a flock's owner by RELEASE. A lock of an
//! open file description is an fcntl lock whose owner only its handle knows, so all that was locked through a
//! handle is unlocked with it.

use crate::abi::{FlushIn, InterruptIn, LK_FLOCK, LkIn, LkOut, RELEASE_FLOCK_UNLOCK, ReleaseIn};
use crate::attr::errno;
use crate::device::{Answer, Request};
use crate::session::Session;
use penstock_base::FileId;
use penstock_wire::metadata::{LockChange, LockRequest};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::rc::Rc;
use tokio::sync::Notify;

const READ: u32 = 0;
const WRITE: u32 = 1;
const UNLOCK: u32 = 2;
/// The kernel's value of the last byte of a lock that reaches to the end of the file.
const END: u64 = i64::MAX as u64;

fn lock_request(request: &Request, lock: &LkIn) -> Result<LockRequest, Errno> {
    let change = match lock.kind {
        READ => LockChange::Shared,
        WRITE => LockChange::Exclusive,
        UNLOCK => LockChange::Unlock,
        _ => return Err(Errno::INVAL),
    };
    Ok(LockRequest {
        ino: request.file.ino.0,
        branch: request.file.branch.0,
        owner: lock.owner,
        first: lock.start,
        last: if lock.end >= END { u64::MAX } else { lock.end },
        change: change.into(),
        pid: lock.pid,
        uid: request.header.uid,
        flock: lock.lk_flags & LK_FLOCK != 0,
        ..LockRequest::default()
    })
}

pub(crate) async fn getlk(session: &Session, request: &Request) -> Result<Answer, Errno> {
    let lock: LkIn = request.argument()?;
    let test = LockRequest { test: true, ..lock_request(request, &lock)? };
    let found = session.client.lock(&test).await.map_err(|failure| errno(&failure))?;
    let (start, end, kind, pid) = match found {
        None => (0, 0, UNLOCK, 0),
        Some(held) => {
            let kind = if held.change() == LockChange::Exclusive { WRITE } else { READ };
            (held.first, held.last.min(END), kind, held.pid)
        }
    };
    Ok(Answer::of(&LkOut { start, end, kind, pid }))
}

pub(crate) async fn setlk(session: &Session, request: &Request, waits: bool) -> Result<Answer, Errno> {
    let lock: LkIn = request.argument()?;
    let wanted = lock_request(request, &lock)?;
    if !wanted.flock && wanted.change() != LockChange::Unlock {
        let file = request.file;
        let mut lockers = session.lockers.borrow_mut();
        lockers.entry(lock.fh).or_insert_with(|| (file, BTreeSet::new())).1.insert(lock.owner);
    }
    let got = match waits && wanted.change() != LockChange::Unlock {
        false => session.client.lock(&wanted).await.map(|conflict| conflict.is_none()),
        true => {
            let interrupted = Rc::new(Notify::new());
            session.waiting.borrow_mut().insert(request.header.unique, interrupted.clone());
            let got = session.client.lock_waiting(wanted, &interrupted).await;
            session.waiting.borrow_mut().remove(&request.header.unique);
            got
        }
    };
    match got {
        Ok(true) => {
            if lock.kind != UNLOCK {
                session.look_under_lock(request.file).await;
            }
            Ok(Answer::Done)
        }
        Ok(false) if waits => Err(Errno::INTR),
        Ok(false) => Err(Errno::AGAIN),
        Err(failure) => Err(errno(&failure)),
    }
}

/// Interrupts a request that waits for a lock. The kernel expects no reply.
pub(crate) fn interrupt(session: &Session, request: &Request) -> Result<Answer, Errno> {
    let InterruptIn { unique } = request.argument()?;
    if let Some(waiting) = session.waiting.borrow().get(&unique) {
        waiting.notify_one();
    }
    Ok(Answer::Done)
}

/// Serves close() of one descriptor: drops the owner's fcntl locks on the file, and fails if writes were
/// lost.
pub(crate) async fn flush(session: &Session, request: &Request) -> Result<Answer, Errno> {
    let FlushIn { fh, lock_owner, .. } = request.argument()?;
    let file = request.file;
    // A later lock of this owner must not be dropped when a handle ends that the owner used before.
    for (_, (_, owners)) in session.lockers.borrow_mut().iter_mut().filter(|(_, (of, _))| *of == file) {
        owners.remove(&lock_owner);
    }
    let unlocked = session.client.unlock_all(file, lock_owner, false).await;
    unlocked.map_err(|failure| errno(&failure))?;
    let told = match session.reported.borrow().get(&fh) {
        Some(descriptor) => session.client.tell_lost(file, descriptor),
        None => Ok(()),
    };
    told.map(|()| Answer::Done).map_err(|failure| errno(&failure))
}

/// Serves the last close of a handle.
pub(crate) async fn release(session: &Session, request: &Request) -> Result<Answer, Errno> {
    let ReleaseIn { fh, release_flags, lock_owner, .. } = request.argument()?;
    let file = request.file;
    let owners = session.lockers.borrow_mut().remove(&fh).map(|(_, owners)| owners);
    for owner in owners.into_iter().flatten() {
        unlock_at_end(session, file, owner, false).await;
    }
    if release_flags & RELEASE_FLOCK_UNLOCK != 0 {
        unlock_at_end(session, file, lock_owner, true).await;
    }
    session.forget_handle(fh, file);
    session.note_at_close(request).await;
    session.client.release(file).await.map(|()| Answer::Done).map_err(|failure| errno(&failure))
}

async fn unlock_at_end(session: &Session, file: FileId, owner: u64, flock: bool) {
    // Nobody receives this failure, and a session that has ended has no locks.
    if let Err(failure) = session.client.unlock_all(file, owner, flock).await {
        tracing::debug!(%failure, %file, "a lock was not given up");
    }
}
