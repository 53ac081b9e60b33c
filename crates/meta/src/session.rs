//! Sessions: who is there, what each has open, and the results of its requests.
//!
//! A request that must be done once has a sequence, in the slot `sequence % SLOTS`. Its result is kept until the client
//! uses the slot again, so that a repeat after a lost reply is answered and not done twice; one that is still being
//! done is waited for; one whose slot was used since is refused, however late it comes.
//!
//! A session of this process lives as long as the process. One of another process has a row, lives over restarts of
//! this one, and ends when nothing is heard of its client for the lease time, or when the client says so. With it end
//! its opens and its results.
//!
//! Invariants: results of changes are rows of the transaction that does them, so that a restart knows them as far as
//! it knows the changes; a session is not silent while a request of it is being done; until every session that came
//! over a restart has opened again what it had open, or has ended, no removed file is dropped.

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

/// After this long without a word a session of another process ends, unless something else was set.
pub const LEASE: Duration = Duration::from_secs(30);

/// What came of a request; results of this session that a restart has read back succeeded.
type Outcome = Result<Vec<u8>, Failure>;

/// One client.
#[derive(Default)]
struct Session {
    who: SessionRow,
    /// It came over a restart, and has not opened again what it had open.
    owes_opens: bool,
    /// When a request of it last came or ended.
    heard: Duration,
    /// Requests that are being done.
    active: u64,
    /// The last request of each slot, and what came of it.
    results: BTreeMap<u64, (u64, Outcome)>,
    opens: BTreeMap<Ino, u64>,
}

/// A session as people see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Its number.
    pub id: u64,
    /// Who it is.
    pub client: String,
    /// Where it mounts; empty when it does not.
    pub mount: String,
    /// How long its client may be silent; none for a client of this process.
    pub lease: Option<Duration>,
    /// Since when nothing was heard of it.
    pub silent: Duration,
    /// Inodes that it has open.
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

/// What is known of a request that must be done once.
pub(crate) enum Seen {
    /// It is to be done.
    New,
    /// It was done.
    Done(Outcome),
    /// Its slot was used since.
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
            // What cannot be read ends: its client is told.
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

    /// What is known of a request.
    pub(crate) fn find(&self, who: Request) -> Seen {
        let results = self.live.get(&who.session).map(|session| &session.results);
        match results.and_then(|results| results.get(&(who.sequence % SLOTS))) {
            Some((stored, outcome)) if *stored == who.sequence => Seen::Done(outcome.clone()),
            Some((stored, _)) if *stored > who.sequence => Seen::Late,
            _ => Seen::New,
        }
    }

    /// Adds the result's row to the transaction that does the request.
    pub(crate) fn record(who: Request, body: &[u8], writes: &mut WriteSet) {
        let slot = who.sequence % SLOTS;
        let row = ResultRow { session: who.session, slot, sequence: who.sequence, body: body.to_vec() };
        writes.put(result_key(who.session, slot), row.encode());
    }

    /// Keeps what came of a request.
    pub(crate) fn keep(&mut self, who: Request, outcome: &Outcome) {
        if let Some(session) = self.live.get_mut(&who.session) {
            session.results.insert(who.sequence % SLOTS, (who.sequence, outcome.clone()));
        }
    }

    /// Whether files without a name must wait for clients that may have them open.
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

/// While it lives a request of a session is being done.
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
    /// Notes that a request has come. While it waits for other clients that says nothing more of its own.
    pub fn hear(&self, header: &Header) -> Result<(), Failure> {
        if header.kind == Kind::Hello {
            return Ok(());
        }
        let mut sessions = self.sessions.borrow_mut();
        sessions.live.get_mut(&header.session).ok_or_else(|| ended(header.session))?.heard = self.env.now();
        Ok(())
    }

    /// Notes that a request that was heard is being done. Without a session only the first exchange is served.
    pub fn begin(self: &Rc<Self>, header: &Header) -> Result<Option<Serving>, Failure> {
        if header.kind == Kind::Hello {
            return Ok(None);
        }
        let mut sessions = self.sessions.borrow_mut();
        let session = sessions.live.get_mut(&header.session).ok_or_else(|| ended(header.session))?;
        session.active += 1;
        Ok(Some(Serving { meta: self.clone(), session: header.session }))
    }

    /// Begins a session; the writes make it outlive this process where its client does.
    pub(crate) fn begin_session(&self, id: u64, who: SessionRow, writes: &mut WriteSet) {
        if who.lease_ms > 0 {
            writes.put(session_key(id), who.encode());
        }
        let heard = self.env.now();
        self.sessions.borrow_mut().live.insert(id, Session { who, heard, ..Session::default() });
    }

    /// Fails where a session has ended, or everything does.
    pub(crate) fn check_session(&self, id: u64) -> Result<(), Failure> {
        match self.sessions.borrow().live.contains_key(&id) && !self.is_stopped() {
            true => Ok(()),
            false => Err(ended(id)),
        }
    }

    /// A session that could not be recorded has not begun.
    pub(crate) fn forget_session(&self, id: u64) {
        self.sessions.borrow_mut().live.remove(&id);
    }

    /// Notes where a client of this process mounts; nowhere when that is empty.
    pub fn note_mount(&self, session: u64, path: &str) {
        if let Some(found) = self.sessions.borrow_mut().live.get_mut(&session) {
            path.clone_into(&mut found.who.mount);
        }
    }

    /// All sessions.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        let now = self.env.now();
        self.sessions.borrow().live.iter().map(|(id, session)| session.info(*id, now)).collect()
    }

    /// How long a client of another process may be silent.
    pub fn lease(&self) -> Duration {
        self.lease.get()
    }

    /// Sets how long a client of another process may be silent. Sessions that are there keep what they were given.
    pub fn set_lease(&self, lease: Duration) {
        self.lease.set(lease);
    }

    /// Gives every session the whole lease again: this process was not there to hear them.
    pub fn renew_leases(&self) {
        let now = self.env.now();
        self.sessions.borrow_mut().live.values_mut().for_each(|session| session.heard = now);
    }

    /// Ends a session: its opens end, and its rows go.
    pub async fn end_session(&self, id: u64) -> Result<(), MetaError> {
        // Whoever is in the middle of a change of this session records its result before its rows are deleted.
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

    /// What a session has open and locked, as its client knows it after a restart. With `reclaimed` nothing is missing: of what
    /// was told to this start, for a client says it in parts, and each is asked again until somebody answers.
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

    /// Sets how often a session has an inode open, whatever was known.
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

    /// Notes that a session uses an inode.
    pub(crate) fn open_inode(&self, session: u64, ino: Ino) {
        if let Some(session) = self.sessions.borrow_mut().live.get_mut(&session) {
            *session.opens.entry(ino).or_default() += 1;
            self.use_inode(ino);
        }
    }

    /// Notes that a session ends one use of an inode. What it has not open, as after a restart, it does not close.
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

/// Session, sequence and body of a stored result, if it is one and stands in its place.
pub(crate) fn read_result(key: &[u8], value: &[u8]) -> Result<(u64, u64, Vec<u8>), DecodeError> {
    let ResultRow { session, slot, sequence, body } = ResultRow::decode(value)?;
    match key == result_key(session, slot) && sequence % SLOTS == slot {
        true => Ok((session, sequence, body)),
        false => Err(DecodeError::Bad { what: "session result", why: "it is in another one's place" }),
    }
}
