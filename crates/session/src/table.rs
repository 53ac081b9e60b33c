//! The table of sessions: the connected clients, the inodes that each has open, and the results of their
//! requests.
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

use crate::rows::{ResultRow, SessionRow, all_results, all_sessions, decode_session_key, result_key};
use crate::users::{Role, Users};
use penstock_base::num::to_u16;
use penstock_base::{DecodeError, ErrorKind, FileId, Id128, Ino};
use penstock_kv::{Kv, KvError, WriteSet, commit_apart, for_each};
use penstock_wire::metadata::Change;
use penstock_wire::{Failure, Kind, SLOTS};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Identifies a request, so that a repeat is answered from the slot table.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request {
    /// Number of the client's session; 0 for none.
    pub session: u64,
    /// Name of the session.
    pub key: Id128,
    /// Sequence number in the session; 0 for a request that may safely be executed twice.
    pub sequence: u64,
    /// Number of the user for whom a gateway asks; 0 for a session whose kernel has checked permissions.
    pub user: u32,
    /// The change that the request repeats after a restart; none for a new one.
    pub repeats: Option<Repeat>,
}

/// A change that a client makes again because a restart of the service may have lost it.
#[derive(Clone, Copy, Debug)]
pub struct Repeat {
    /// Its place in the order of all changes, and its time.
    pub change: Change,
    /// The inode that it made the first time.
    pub made: Option<Ino>,
}

/// Default lease time of a remote client's session: the session ends after this long without a request.
pub const LEASE: Duration = Duration::from_secs(30);

/// Most inodes that a session may report as open after a restart.
const MOST_REPORTED: usize = 1 << 20;

/// Outcome of a request. Results that were read back after a restart are always successes.
pub type Outcome = Result<Vec<u8>, Failure>;

/// One client's session.
#[derive(Default)]
struct Session {
    key: Id128,
    who: SessionRow,
    /// True once it has a row, which the next start finds.
    has_row: bool,
    /// True if it survived a restart and has not yet reported its open files again.
    owes_opens: bool,
    /// Time at which its last request arrived or ended.
    heard: Duration,
    /// Its requests that are being executed, by number.
    active: BTreeMap<u64, Active>,
    /// Those of them that change data.
    changing: u64,
    /// True from when its rows are being deleted: it has ended for its client, and not yet for others.
    is_barred: bool,
    /// True once its rows are gone: its last writes are waited for, and then it goes.
    is_leaving: bool,
    /// The last request of each slot: its sequence number and its outcome.
    results: BTreeMap<u64, (u64, Outcome)>,
    /// The slots whose results an earlier start has kept.
    read_back: BTreeSet<u64>,
    opens: BTreeMap<FileId, u64>,
    users: Users,
    gone: Gone,
    /// True while a client of another process has a connection for it.
    is_connected: bool,
}

/// Counts of the times that a session was gone. Its requests that wait since before are given up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gone {
    /// The number of times that its connection was lost.
    pub(crate) hang_ups: u64,
    /// The number of times that it has left, and might join again.
    pub(crate) departures: u64,
}

/// The least time that a client has for its answer to a call. It may have to drop and sync much, while its
/// host is busy.
const LEAST_TO_ANSWER: Duration = Duration::from_secs(10);

/// A request that is being executed.
#[derive(Clone, Copy, Debug)]
struct Active {
    begun: Duration,
    changes_data: bool,
    /// Drives may hold it up, and its session is not to blame meanwhile. The others may take long too, if
    /// their client has made them large.
    excuses: bool,
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
    /// Its role.
    pub role: Role,
    /// Number of users that a gateway has named.
    pub users: u64,
    /// True if it survived a restart and has yet to report: nobody else is served before.
    pub recovers: bool,
}

impl SessionInfo {
    /// The time after which a session that holds up others must end: its lease time, 10 s at least
    /// (`LEAST_TO_ANSWER`). None for a client of this process.
    pub(crate) fn time_to_answer(&self) -> Option<Duration> {
        self.lease.map(|lease| lease.max(LEAST_TO_ANSWER))
    }

    /// True if its client has been silent for longer than its lease.
    pub fn is_silent(&self) -> bool {
        self.lease.is_some_and(|lease| self.silent > lease)
    }
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

/// The holdings and debts of a session, as shown to people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionHoldings {
    /// Shared leases.
    pub shared_leases: u64,
    /// Exclusive leases.
    pub exclusive_leases: u64,
    /// Leases on attributes and names.
    pub attribute_leases: u64,
    /// Advisory locks.
    pub locks: u64,
    /// Calls of the service that its client has not answered.
    pub unanswered_calls: u64,
    /// Its requests that are being executed.
    pub requests: u64,
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

/// All sessions, by number and by name.
#[derive(Default)]
pub(crate) struct Sessions {
    live: BTreeMap<u64, Session>,
    names: BTreeMap<Id128, u64>,
    /// The number of the request that began last.
    last_begun: u64,
}

impl Sessions {
    /// Reads back the sessions of other processes, and deletes the results of all others.
    /// Returns them with the number of sessions that had ended with the process.
    pub(crate) async fn load(kv: &dyn Kv, now: Duration) -> Result<(Self, u64), KvError> {
        let mut sessions = Self::default();
        let mut writes = WriteSet::new();
        let mut ended = 0;
        for_each(kv, all_sessions(), |key, value| {
            // A session whose row cannot be read ends; its client's next request fails as of an ended
            // session.
            if let (Ok(name), Ok(who)) = (decode_session_key(key), SessionRow::decode(value)) {
                match sessions.contains(who.number) {
                    // Of two sessions with one number the first goes on. A check reports the other row.
                    true => tracing::error!(session = who.number, "the row of a session is damaged"),
                    false if who.lease_ms == 0 => {
                        ended += 1;
                        writes.delete(key.to_vec());
                    }
                    false => sessions.insert(name, who, now),
                }
            }
            Ok::<_, KvError>(())
        })
        .await?;
        for session in sessions.live.values_mut() {
            (session.owes_opens, session.is_connected) = (true, false);
        }
        for_each(kv, all_results(), |key, value| {
            let read = read_result(key, value).ok();
            let number = read.as_ref().and_then(|(session, ..)| sessions.names.get(session));
            match (read, number.and_then(|number| sessions.live.get_mut(number))) {
                (Some((_, sequence, body)), Some(session)) => {
                    session.results.insert(sequence % SLOTS, (sequence, Ok(body)));
                    session.read_back.insert(sequence % SLOTS);
                }
                _ => {
                    writes.delete(key.to_vec());
                }
            }
            Ok::<_, KvError>(())
        })
        .await?;
        commit_apart(kv, std::mem::take(writes.reclaims())).await?;
        Ok((sessions, ended))
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
        assert_ne!(who.sequence, 0, "a request without a sequence number has no slot");
        let slot = who.sequence % SLOTS;
        assert!(!who.key.is_nil(), "session {} has a name", who.session);
        let row = ResultRow { session: who.key, slot, sequence: who.sequence, body: body.to_vec() };
        writes.put(result_key(who.key, slot), row.encode());
    }

    /// Keeps the outcome of a request in memory.
    pub(crate) fn keep(&mut self, who: Request, outcome: &Outcome) {
        assert_ne!(who.sequence, 0, "a request without a sequence number has no slot");
        if let Some(session) = self.live.get_mut(&who.session) {
            session.results.insert(who.sequence % SLOTS, (who.sequence, outcome.clone()));
            session.read_back.remove(&(who.sequence % SLOTS));
        }
    }

    /// A connection of a session is lost, and the session `has_another` or none.
    pub(crate) fn hung_up(&mut self, id: u64, has_another: bool) {
        if let Some(session) = self.live.get_mut(&id) {
            session.gone.hang_ups += 1;
            session.is_connected = has_another;
        }
    }

    /// The number of sessions of other processes that have not ended for their clients.
    pub(crate) fn remote_count(&self) -> usize {
        self.live.values().filter(|session| session.who.lease_ms > 0 && !session.is_barred).count()
    }

    /// The session of another process that was silent for the longest time of those that have no connection,
    /// have survived no restart, and have neither opened anything nor hold anything else.
    pub(crate) fn idle(&self, holds: impl Fn(u64) -> bool) -> Option<u64> {
        let is_idle = |id: u64, session: &Session| {
            let Session { who, opens, active, users, .. } = session;
            let is_here = session.is_connected || session.is_barred || !active.is_empty();
            let owes = session.owes_opens || !opens.is_empty() || users.count() > 0;
            who.lease_ms > 0 && !is_here && !owes && !holds(id)
        };
        let idle = self.live.iter().filter(|(id, session)| is_idle(**id, session));
        idle.min_by_key(|(_, session)| session.heard).map(|(id, _)| *id)
    }

    /// A session leaves, and may join again.
    pub(crate) fn departed(&mut self, id: u64) {
        self.live.get_mut(&id).into_iter().for_each(|session| session.gone.departures += 1);
    }

    /// The times that a session was gone.
    pub(crate) fn gone(&self, id: u64) -> Gone {
        self.live.get(&id).map(|session| session.gone).unwrap_or_default()
    }

    /// True, once, if the result of a request is one that an earlier start has kept.
    pub(crate) fn take_read_back(&mut self, who: Request) -> bool {
        let session = self.live.get_mut(&who.session);
        session.is_some_and(|session| session.read_back.remove(&(who.sequence % SLOTS)))
    }

    /// True while removed files must stay, because clients may have them open and have not reported it yet.
    pub(crate) fn owe_opens(&self) -> bool {
        self.live.values().any(|session| session.owes_opens)
    }

    /// Numbers of the sessions that survived a restart and have not yet reported their open files again.
    pub(crate) fn owing(&self) -> impl Iterator<Item = u64> {
        self.live.iter().filter(|(_, session)| session.owes_opens).map(|(id, _)| *id)
    }

    /// Numbers of all sessions.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> {
        self.live.keys().copied()
    }

    pub(crate) fn contains(&self, id: u64) -> bool {
        self.live.contains_key(&id)
    }

    /// True if a session has not ended for its client.
    pub(crate) fn is_live(&self, id: u64) -> bool {
        self.live.get(&id).is_some_and(|session| !session.is_barred)
    }

    fn get_mut(&mut self, id: u64) -> Result<&mut Session, Failure> {
        self.live.get_mut(&id).filter(|session| !session.is_barred).ok_or_else(|| ended(id))
    }

    /// The name of a session; none if it has ended.
    pub(crate) fn key(&self, id: u64) -> Option<Id128> {
        self.live.get(&id).filter(|session| !session.is_barred).map(|session| session.key)
    }

    /// A session ends for its client. Returns its name; none if there is no such session, or it is leaving.
    pub(crate) fn bar(&mut self, id: u64) -> Option<Id128> {
        let session = self.live.get_mut(&id).filter(|session| !session.is_leaving)?;
        session.is_barred = true;
        Some(session.key)
    }

    /// The rows of a barred session are gone. True the first time.
    pub(crate) fn begin_to_leave(&mut self, id: u64) -> bool {
        let Some(session) = self.live.get_mut(&id) else { return false };
        assert!(session.is_barred, "session {id} leaves once it has ended for its client");
        !std::mem::replace(&mut session.is_leaving, true)
    }

    /// True if a session has a row with which a start brings it back.
    pub(crate) fn comes_back(&self, id: u64) -> bool {
        self.live.get(&id).is_some_and(|session| session.who.lease_ms > 0)
    }

    /// The row of a session, with its name, if it has to be written.
    pub(crate) fn missing_row(&self, id: u64) -> Option<(Id128, &SessionRow)> {
        self.live.get(&id).filter(|session| !session.has_row).map(|session| (session.key, &session.who))
    }

    /// A session has a row from now on.
    pub(crate) fn note_row(&mut self, id: u64) {
        if let Some(session) = self.live.get_mut(&id) {
            session.has_row = true;
        }
    }

    /// The number of the session of this name.
    pub(crate) fn named(&self, key: Id128) -> Option<u64> {
        self.names.get(&key).copied()
    }

    /// The lease time of a session in milliseconds; 0 if it has none.
    pub(crate) fn lease_ms(&self, id: u64) -> u32 {
        self.live.get(&id).map_or(0, |session| session.who.lease_ms)
    }

    /// A session starts.
    pub(crate) fn insert(&mut self, key: Id128, who: SessionRow, now: Duration) {
        let id = who.number;
        assert_eq!(self.names.insert(key, id), None, "a name is of one session");
        let is_remote = who.lease_ms > 0;
        let session = Session { key, who, heard: now, has_row: is_remote, ..Session::default() };
        let before = self.live.insert(id, Session { is_connected: is_remote, ..session });
        assert!(before.is_none(), "session {id} starts once");
    }

    /// A session ends. Returns the inodes that it has open, with the number of opens of each.
    pub(crate) fn remove(&mut self, id: u64) -> Option<BTreeMap<FileId, u64>> {
        let session = self.live.remove(&id)?;
        assert_eq!(self.names.remove(&session.key), Some(id), "session {id} has a name");
        Some(session.opens)
    }

    /// A request of a session has arrived.
    pub(crate) fn hear(&mut self, id: u64, now: Duration) -> Result<(), Failure> {
        self.get_mut(id)?.heard = now;
        Ok(())
    }

    /// A request of a session is being executed from now on. Returns its number.
    pub(crate) fn begin(&mut self, id: u64, now: Duration, kind: Kind) -> Result<u64, Failure> {
        let changes_data = matches!(kind, Kind::Write | Kind::Space);
        let excuses = !matches!(
            kind,
            Kind::Hello | Kind::Ping | Kind::Watch | Kind::User | Kind::End | Kind::Lock | Kind::Lease
        );
        let active = Active { begun: now, changes_data, excuses };
        let number = self.last_begun + 1;
        let session = self.get_mut(id)?;
        session.active.insert(number, active);
        session.changing += u64::from(active.changes_data);
        self.last_begun = number;
        Ok(number)
    }

    /// A request of a session was executed. The session may have ended meanwhile.
    pub(crate) fn end(&mut self, id: u64, number: u64, now: Duration) {
        if let Some(session) = self.live.get_mut(&id) {
            let ended = session.active.remove(&number).expect("only a request that began ends");
            session.changing -= u64::from(ended.changes_data);
            session.heard = now;
        }
    }

    /// True if no request of a session is changing data.
    pub(crate) fn is_quiet(&self, id: u64) -> bool {
        self.live.get(&id).is_none_or(|session| session.changing == 0)
    }

    /// Adds the requests of all sessions that are being executed.
    pub(crate) fn add_holdings(&self, all: &mut BTreeMap<u64, SessionHoldings>) {
        for (id, session) in &self.live {
            all.entry(*id).or_default().requests += session.active.len() as u64;
        }
    }

    /// Time at which the oldest request of a session began that is being executed and excuses it.
    pub(crate) fn busy_since(&self, id: u64) -> Option<Duration> {
        self.live.get(&id)?.active.values().find(|active| active.excuses).map(|active| active.begun)
    }

    /// Restarts the lease time of every session.
    pub(crate) fn renew_all(&mut self, now: Duration) {
        self.live.values_mut().for_each(|session| session.heard = now);
    }

    /// Sets the path at which a client of this process mounts; empty if it does not.
    pub(crate) fn set_mount(&mut self, id: u64, path: &str) {
        if let Some(session) = self.live.get_mut(&id) {
            path.clone_into(&mut session.who.mount);
        }
    }

    /// All sessions.
    pub(crate) fn infos(&self, now: Duration) -> Vec<SessionInfo> {
        self.live.iter().map(|(id, session)| session.info(*id, now)).collect()
    }

    /// True if a session survived a restart and has not reported all of its open files yet.
    pub(crate) fn owes_opens(&self, id: u64) -> bool {
        self.live.get(&id).is_some_and(|session| session.owes_opens)
    }

    /// The role of a session; none if it has ended.
    pub(crate) fn role(&self, id: u64) -> Option<Role> {
        Some(self.live.get(&id)?.who.role)
    }

    /// The users of a session.
    pub(crate) fn users(&self, id: u64) -> Option<&Users> {
        Some(&self.live.get(&id)?.users)
    }

    /// The users of a session, to add one.
    pub(crate) fn users_mut(&mut self, id: u64) -> Result<&mut Users, Failure> {
        Ok(&mut self.get_mut(id)?.users)
    }

    /// A session has reported all of its open files.
    pub(crate) fn reported_opens(&mut self, id: u64) {
        if let Some(session) = self.live.get_mut(&id) {
            session.owes_opens = false;
        }
    }

    /// The number of inodes that a session has open.
    pub(crate) fn open_inodes(&self, id: u64) -> u64 {
        self.live.get(&id).map_or(0, |session| session.opens.len() as u64)
    }

    /// Sets the number of times that a session has an inode open. Returns the number before; none if there is
    /// no such session, or it has too many open.
    pub(crate) fn set_opens(&mut self, id: u64, file: FileId, count: u64) -> Option<u64> {
        let opens = &mut self.live.get_mut(&id)?.opens;
        if opens.len() >= MOST_REPORTED && !opens.contains_key(&file) {
            return None;
        }
        let before = match count {
            0 => opens.remove(&file),
            _ => opens.insert(file, count),
        };
        Some(before.unwrap_or(0))
    }

    /// Counts one open of an inode by a session. Returns false if there is no such session.
    pub(crate) fn open(&mut self, id: u64, file: FileId) -> bool {
        let Some(session) = self.live.get_mut(&id) else { return false };
        *session.opens.entry(file).or_default() += 1;
        true
    }

    /// Ends one open of an inode by a session. Returns false if it has none, as after a restart.
    pub(crate) fn close(&mut self, id: u64, file: FileId) -> bool {
        let opens = self.live.get_mut(&id).map(|session| &mut session.opens);
        let Some((opens, count)) = opens.and_then(|opens| {
            let count = opens.get(&file).copied()?;
            Some((opens, count))
        }) else {
            return false;
        };
        assert!(count > 0, "session {id} counts no open of inode {file}");
        match count {
            1 => opens.remove(&file),
            _ => opens.insert(file, count - 1),
        };
        true
    }
}

impl Session {
    fn info(&self, id: u64, now: Duration) -> SessionInfo {
        SessionInfo {
            id,
            client: self.who.client.clone(),
            mount: self.who.mount.clone(),
            lease: (self.who.lease_ms > 0).then(|| Duration::from_millis(self.who.lease_ms.into())),
            silent: if !self.active.is_empty() { Duration::ZERO } else { now.saturating_sub(self.heard) },
            open_inodes: self.opens.len() as u64,
            role: self.who.role,
            users: self.users.count(),
            recovers: self.owes_opens,
        }
    }
}

pub(crate) fn ended(session: u64) -> Failure {
    Failure {
        kind: ErrorKind::Ended,
        errno: to_u16(Errno::STALE.raw_os_error()),
        message: format!(
            "session {session} has ended: its client was silent or owed an answer for longer than its lease, or \
             ended it"
        ),
    }
}

/// Returns session, sequence number and body of a stored result, if the row is valid and its key matches it.
pub fn read_result(key: &[u8], value: &[u8]) -> Result<(Id128, u64, Vec<u8>), DecodeError> {
    let ResultRow { session, slot, sequence, body } = ResultRow::decode(value)?;
    match key == result_key(session, slot) && sequence % SLOTS == slot {
        true => Ok((session, sequence, body)),
        false => Err(DecodeError::Bad { what: "session result", why: "it is in another one's place" }),
    }
}

#[cfg(test)]
mod tests;
