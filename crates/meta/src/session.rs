//! Sessions: the connected clients, the inodes that each has open, and the results of their requests.
//!
//! A request that must be executed once has a sequence number, in the slot `sequence % SLOTS`. Its result is
//! kept until the client uses the slot again, so a repeat after a lost reply is answered and not executed
//! again. A repeat of a request that is still being executed waits for it. A request whose slot has been used
//! since is refused, however late it arrives.
//!
//! A session of this process lives as long as the process. A session of another process has a row and
//! survives restarts of this process. It ends when its client has been silent for the lease time, or when the
//! client ends it. Its opens and results end with it.
//!
//! Invariants:
//! - results of changes are rows of the transactions that make the changes, so a restart finds a result
//!   exactly if it finds the change;
//! - a session does not count as silent while one of its requests is being executed;
//! - no removed file is dropped until every session that survived a restart has reported its open files
//!   again, or has ended.

use crate::error::MetaError;
use crate::rows::{
    ResultRow, SessionRow, all_results, all_sessions, decode_session_key, result_key, session_key,
};
use crate::target::{MetaTarget, Request};
use penstock_base::{DecodeError, Ino, Kind as Todo};
use penstock_kv::{Kv, WriteSet, commit_apart, for_each};
use penstock_wire::names::{OpenCount, PingRequest};
use penstock_wire::{Failure, Header, Kind, SLOTS};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Default lease time of a remote client's session: the session ends after this long without a request.
pub const LEASE: Duration = Duration::from_secs(30);

/// Outcome of a request. Results that were read back after a restart are always successes.
type Outcome = Result<Vec<u8>, Failure>;

/// One client's session.
#[derive(Default)]
struct Session {
    who: SessionRow,
    /// True if it survived a restart and has not yet reported its open files again.
    owes_opens: bool,
    /// Time at which its last request arrived or ended.
    heard: Duration,
    /// Number of its requests that are being executed.
    active: u64,
    /// The last request of each slot: its sequence number and its outcome.
    results: BTreeMap<u64, (u64, Outcome)>,
    opens: BTreeMap<Ino, u64>,
}

/// A session, as shown to people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Number of the session.
    pub id: u64,
    /// Name of the client.
    pub client: String,
    /// Path at which the client mounts; empty if it does not mount.
    pub mount: String,
    /// Lease time; none for a client of this process.
    pub lease: Option<Duration>,
    /// Time since its last request; zero while a request is being executed.
    pub silent: Duration,
    /// Number of inodes that it has open.
    pub open_inodes: u64,
}

impl std::fmt::Display for SessionInfo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "session {} ({}", self.id, self.client)?;
        match self.mount.as_str() {
            "" => write!(f, ")"),
            mount => write!(f, ", mounted at {mount})"),
        }
    }
}

/// State of a request with a sequence number, by its slot.
pub(crate) enum Seen {
    /// It must be executed.
    New,
    /// It was executed before, with this outcome.
    Done(Outcome),
    /// Its slot has been used by a later request.
    Late,
}

/// All sessions, by number.
#[derive(Default)]
pub(crate) struct Sessions {
    live: BTreeMap<u64, Session>,
}

impl Sessions {
    /// Reads back the sessions of other processes, and deletes the results of all others.
    pub(crate) async fn load(kv: &dyn Kv, now: Duration) -> Result<Self, MetaError> {
        let mut sessions = Self::default();
        for_each(kv, all_sessions(), |key, value| {
            // A session whose row cannot be read ends; its client's next request fails as of an ended
            // session.
            if let (Ok(id), Ok(who)) = (decode_session_key(key), SessionRow::decode(value)) {
                let session = Session { who, owes_opens: true, heard: now, ..Session::default() };
                sessions.live.insert(id, session);
            }
            Ok::<_, MetaError>(())
        })
        .await?;
        let mut writes = WriteSet::new();
        for_each(kv, all_results(), |key, value| {
            let read = read_result(key, value).ok();
            match read.and_then(|(id, sequence, body)| Some((sessions.live.get_mut(&id)?, sequence, body))) {
                Some((session, sequence, body)) => {
                    session.results.insert(sequence % SLOTS, (sequence, Ok(body)));
                }
                None => {
                    writes.delete(key.to_vec());
                }
            }
            Ok::<_, MetaError>(())
        })
        .await?;
        commit_apart(kv, std::mem::take(writes.reclaims())).await?;
        Ok(sessions)
    }

    /// Looks up a request in its session's slots.
    pub(crate) fn find(&self, who: Request) -> Seen {
        let results = self.live.get(&who.session).map(|session| &session.results);
        match results.and_then(|results| results.get(&(who.sequence % SLOTS))) {
            Some((stored, outcome)) if *stored == who.sequence => Seen::Done(outcome.clone()),
            Some((stored, _)) if *stored > who.sequence => Seen::Late,
            _ => Seen::New,
        }
    }

    /// Adds the result's row to the transaction that executes the request.
    pub(crate) fn record(who: Request, body: &[u8], writes: &mut WriteSet) {
        let slot = who.sequence % SLOTS;
        let row = ResultRow { session: who.session, slot, sequence: who.sequence, body: body.to_vec() };
        writes.put(result_key(who.session, slot), row.encode());
    }

    /// Keeps the outcome of a request in memory.
    pub(crate) fn keep(&mut self, who: Request, outcome: &Outcome) {
        if let Some(session) = self.live.get_mut(&who.session) {
            session.results.insert(who.sequence % SLOTS, (who.sequence, outcome.clone()));
        }
    }

    /// True while removed files must stay, because clients may have them open and have not reported it yet.
    pub(crate) fn owe_opens(&self) -> bool {
        self.live.values().any(|session| session.owes_opens)
    }

    /// Numbers of all sessions.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.live.keys().copied()
    }
}

impl Session {
    fn info(&self, id: u64, now: Duration) -> SessionInfo {
        SessionInfo {
            id,
            client: self.who.client.clone(),
            mount: self.who.mount.clone(),
            lease: (self.who.lease_ms > 0).then(|| Duration::from_millis(self.who.lease_ms.into())),
            silent: if self.active > 0 { Duration::ZERO } else { now.saturating_sub(self.heard) },
            open_inodes: self.opens.len() as u64,
        }
    }
}

/// Marks one request of a session as being executed, until it is dropped.
pub struct Serving {
    meta: Rc<MetaTarget>,
    session: u64,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let now = self.meta.env.now();
        if let Some(session) = self.meta.sessions.borrow_mut().live.get_mut(&self.session) {
            session.active -= 1;
            session.heard = now;
        }
    }
}

impl MetaTarget {
    /// Notes that a request has arrived. While a request waits for other clients, only this counts as a sign
    /// of life.
    pub fn hear(&self, header: &Header) -> Result<(), Failure> {
        if header.kind == Kind::Hello {
            return Ok(());
        }
        let mut sessions = self.sessions.borrow_mut();
        sessions.live.get_mut(&header.session).ok_or_else(|| ended(header.session))?.heard = self.env.now();
        Ok(())
    }

    /// Marks a request as being executed, after `hear`. Without a session only the first exchange is served.
    pub fn begin(self: &Rc<Self>, header: &Header) -> Result<Option<Serving>, Failure> {
        if header.kind == Kind::Hello {
            return Ok(None);
        }
        let mut sessions = self.sessions.borrow_mut();
        let session = sessions.live.get_mut(&header.session).ok_or_else(|| ended(header.session))?;
        session.active += 1;
        Ok(Some(Serving { meta: self.clone(), session: header.session }))
    }

    /// Starts a session. For a client of another process `writes` gets the row that lets the session survive
    /// a restart.
    pub(crate) fn begin_session(&self, id: u64, who: SessionRow, writes: &mut WriteSet) {
        if who.lease_ms > 0 {
            writes.put(session_key(id), who.encode());
        }
        let heard = self.env.now();
        self.sessions.borrow_mut().live.insert(id, Session { who, heard, ..Session::default() });
    }

    /// Fails if the session has ended or the target has been stopped.
    pub(crate) fn check_session(&self, id: u64) -> Result<(), Failure> {
        match self.sessions.borrow().live.contains_key(&id) && !self.is_stopped() {
            true => Ok(()),
            false => Err(ended(id)),
        }
    }

    /// Removes a session that could not be recorded, and therefore never began.
    pub(crate) fn forget_session(&self, id: u64) {
        self.sessions.borrow_mut().live.remove(&id);
    }

    /// Sets the path at which a client of this process mounts; empty if it does not.
    pub fn note_mount(&self, session: u64, path: &str) {
        if let Some(found) = self.sessions.borrow_mut().live.get_mut(&session) {
            path.clone_into(&mut found.who.mount);
        }
    }

    /// Lists all sessions.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        let now = self.env.now();
        self.sessions.borrow().live.iter().map(|(id, session)| session.info(*id, now)).collect()
    }

    /// Lease time of remote clients' sessions that start from now on.
    pub fn lease(&self) -> Duration {
        self.lease.get()
    }

    /// Sets the lease time of remote clients. Sessions that exist keep theirs.
    pub fn set_lease(&self, lease: Duration) {
        self.lease.set(lease);
    }

    /// Restarts the lease time of every session, because this process was not running to receive their
    /// requests.
    pub fn renew_leases(&self) {
        let now = self.env.now();
        self.sessions.borrow_mut().live.values_mut().for_each(|session| session.heard = now);
    }

    /// Ends a session: its opens, leases and locks end, and its rows are deleted.
    pub async fn end_session(&self, id: u64) -> Result<(), MetaError> {
        // A request of this session that is changing something records its result before the session's rows
        // are deleted.
        let _one = self.changing.lock().await;
        let Some(session) = self.sessions.borrow_mut().live.remove(&id) else { return Ok(()) };
        for (ino, count) in session.opens {
            self.release_inode_times(ino, count);
        }
        self.reap_wake.notify_one();
        self.leases.borrow_mut().leave(id);
        self.end_locks(id);
        self.lease_news.notify_waiters();
        let mut writes = WriteSet::new();
        writes.delete(session_key(id));
        for slot in 0..SLOTS {
            writes.delete(result_key(id, slot));
        }
        self.commit(Request::default(), std::mem::take(writes.reclaims()), Vec::new(), &[]).await
    }

    /// Takes over the opens and locks that a client reports after a restart. `reclaimed` means that all have
    /// been reported to this start of the service: a client reports them in parts, and repeats each part
    /// until it is answered.
    pub(crate) fn reclaim(&self, session: u64, ping: &PingRequest) {
        let PingRequest { opens, reclaimed: all, locks, start } = ping;
        if *start != self.target.config().generation {
            return;
        }
        let owes = self.sessions.borrow().live.get(&session).is_some_and(|session| session.owes_opens);
        if owes {
            locks.iter().for_each(|lock| self.reclaim_lock(session, lock));
        }
        for OpenCount { ino, count } in opens {
            let (ino, count) = (Ino(*ino), u64::from(*count));
            self.set_opens(session, ino, count);
        }
        if *all && let Some(session) = self.sessions.borrow_mut().live.get_mut(&session) {
            session.owes_opens = false;
            self.reap_wake.notify_one();
        }
    }

    /// Sets the number of times that a session has an inode open, whatever it was before.
    fn set_opens(&self, session: u64, ino: Ino, count: u64) {
        let mut sessions = self.sessions.borrow_mut();
        let Some(session) = sessions.live.get_mut(&session) else { return };
        let before = match count {
            0 => session.opens.remove(&ino),
            _ => session.opens.insert(ino, count),
        };
        drop(sessions);
        let before = before.unwrap_or(0);
        match count > before {
            true => self.use_inode_times(ino, count - before),
            false if count < before => self.release_inode_times(ino, before - count),
            false => {}
        }
    }

    /// Counts one open of an inode by a session.
    pub(crate) fn open_inode(&self, session: u64, ino: Ino) {
        if let Some(session) = self.sessions.borrow_mut().live.get_mut(&session) {
            *session.opens.entry(ino).or_default() += 1;
            self.use_inode(ino);
        }
    }

    /// Ends one open of an inode by a session. Does nothing if it has none, as after a restart.
    pub(crate) fn close_inode(&self, session: u64, ino: Ino) {
        let mut sessions = self.sessions.borrow_mut();
        let Some(session) = sessions.live.get_mut(&session) else { return };
        let Some(count) = session.opens.get_mut(&ino) else { return };
        *count -= 1;
        if *count == 0 {
            session.opens.remove(&ino);
        }
        drop(sessions);
        self.release_inode(ino);
    }
}

fn ended(session: u64) -> Failure {
    Failure {
        kind: Todo::Ended,
        errno: Errno::STALE.raw_os_error() as u16,
        message: format!(
            "session {session} has ended: its client was silent for longer than its lease, or ended it"
        ),
    }
}

/// Returns session, sequence number and body of a stored result, if the row is valid and its key matches it.
pub(crate) fn read_result(key: &[u8], value: &[u8]) -> Result<(u64, u64, Vec<u8>), DecodeError> {
    let ResultRow { session, slot, sequence, body } = ResultRow::decode(value)?;
    match key == result_key(session, slot) && sequence % SLOTS == slot {
        true => Ok((session, sequence, body)),
        false => Err(DecodeError::Bad { what: "session result", why: "it is in another one's place" }),
    }
}
