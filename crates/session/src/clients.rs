//! The clients of a node: their sessions, and the waits of their requests for each other.
//!
//! Invariants:
//! - no request waits here with anything locked that another client's answer may need;
//! - only `Watch` waits, for news of its own session, and in a recovery a change that is repeated, for its
//!   turn. Both end when the session ends or the service stops;
//! - whoever changes the leases wakes exactly the sessions that have news by that ([`Clients::change`]).

mod guards;

use crate::leases::{Asked, Leases, Leaving, now_or_again, too_many};
use crate::locks::Locks;
use crate::recovery::{MOST_REPEATED_BYTES, Reclaimed, Recovery, Refused};
use crate::rows::{SessionRow, result_key, session_key};
use crate::table::{LEASE, Request, Seen, SessionHoldings, SessionInfo, Sessions, ended};
use crate::unanswered::{Oldest, Unanswered};
use crate::users::{Role, User};
use guards::Owned;
pub use guards::{Changing, RepeatTurn, Serving, Slot};
use penstock_base::env::timeout;
use penstock_base::rank::{LockKey, Rank, RankedLocks};
use penstock_base::{Branch, Env, ErrorKind, FileId, Id128};
use penstock_kv::{Kv, KvError, WriteSet};
use penstock_wire::metadata::{
    AttrReply, GetAttrRequest, LeaseReply, LeaseRequest, LockChange, LockReply, LockRequest, PingRequest,
    RepeatRequest, SetAttrRequest, UserRequest, WatchReply, WatchRequest,
};
use penstock_wire::{Failure, Header, Kind, SESSIONS, SLOTS};
use prost::Message;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// A `Watch` request is answered after this time even without news, so that its client sees that the service
/// is alive.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// A session may be the one for which the others wait in a recovery for so many lease times in all.
const MOST_SHARE: u32 = 10;

/// Most leases and answers in one Watch. Clients send some 8,192.
const MOST_TOLD: usize = 1 << 14;

/// Before everything that a request locks while it is executed.
const SLOT: Rank = Rank::new(10, "slot");

/// A slot of a session: session and number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct SlotKey(u64, u64);

impl LockKey for SlotKey {
    fn order(&self) -> u64 {
        self.1
    }
}

/// True for a kind of request after which its session may own leases or cache something.
pub fn joins(kind: Kind) -> bool {
    kind != Kind::Hello && !is_about_session(kind)
}

/// True for a kind of request of a session that is about no file and for no user.
fn is_about_session(kind: Kind) -> bool {
    matches!(kind, Kind::Ping | Kind::End | Kind::Watch | Kind::User | Kind::Sync | Kind::StatFs)
}

/// The error of a request whose body is not allowed.
fn refused(why: impl std::fmt::Display) -> Failure {
    Failure { kind: ErrorKind::Invalid, errno: 0, message: format!("request: {why}") }
}

/// Fails unless all files of a list are of the branch that there is.
fn check_branches(mut branches: impl Iterator<Item = u64>) -> Result<(), String> {
    match branches.find(|branch| *branch != 0) {
        None => Ok(()),
        Some(branch) => Err(format!("a file of branch {branch}, which does not exist")),
    }
}

/// All clients of one node.
pub struct Clients {
    env: Env,
    /// Number of this start of the service.
    generation: u64,
    sessions: RefCell<Sessions>,
    leases: RefCell<Leases>,
    locks: RefCell<Locks>,
    /// Wakes the Watch request of each session.
    watching: RefCell<BTreeMap<u64, Rc<Notify>>>,
    /// Notified when leases change, for a stop.
    changed: Notify,
    /// Notified when a request has been executed.
    ended: Notify,
    /// Owned by the running request of a slot, by session and slot.
    slots: RankedLocks<SlotKey>,
    unanswered: RefCell<Unanswered>,
    recovery: RefCell<Recovery>,
    /// Notified when a change may be repeated that waits for others.
    recovers: Notify,
    /// Lease time of a remote client's session.
    lease: Cell<Duration>,
    stopped: Cell<bool>,
}

impl Clients {
    /// Reads back the sessions of other processes, and deletes the results of all others. `generation` is the
    /// number of this start of the service.
    pub async fn load(env: &Env, kv: &dyn Kv, generation: u64) -> Result<Rc<Self>, KvError> {
        assert!(generation > 0, "0 is the number of no start");
        let (sessions, ended) = Sessions::load(kv, env.now()).await?;
        let mut recovery = Recovery::new(ended);
        recovery.begin_anew(sessions.owing(), env.now());
        Ok(Rc::new(Self {
            env: env.clone(),
            generation,
            leases: RefCell::new(Leases::restored(sessions.numbers())),
            sessions: RefCell::new(sessions),
            locks: RefCell::default(),
            watching: RefCell::default(),
            changed: Notify::new(),
            ended: Notify::new(),
            slots: RankedLocks::new(SLOT),
            unanswered: RefCell::default(),
            recovery: RefCell::new(recovery),
            recovers: Notify::new(),
            lease: Cell::new(LEASE),
            stopped: Cell::new(false),
        }))
    }

    /// Fails all requests that wait, and those to come.
    pub fn stop(&self) {
        self.stopped.set(true);
        self.watching.borrow().values().for_each(|watching| watching.notify_waiters());
        self.changed.notify_waiters();
        self.recovers.notify_waiters();
    }

    /// True once it was stopped.
    pub fn is_stopped(&self) -> bool {
        self.stopped.get()
    }

    /// Notes that a request has arrived. While a request waits for other clients, only this counts as a sign
    /// of life.
    pub fn hear(&self, header: &Header) -> Result<(), Failure> {
        let Header { kind, session, .. } = *header;
        if kind == Kind::Hello {
            return Ok(());
        }
        self.sessions.borrow_mut().hear(session, self.env.now())
    }

    /// Marks a request as being executed, after [`Self::hear`]. Without a session only the first exchange is
    /// served.
    pub fn begin(self: &Rc<Self>, header: &Header) -> Result<Option<Serving>, Failure> {
        if header.kind == Kind::Hello {
            return Ok(None);
        }
        let session = header.session;
        let number = self.sessions.borrow_mut().begin(session, self.env.now(), header.kind)?;
        Ok(Some(Serving { clients: self.clone(), session, number }))
    }

    /// Waits for the slot of a request. A repeat that arrives while the request is being executed waits for
    /// its result.
    pub async fn slot(&self, who: Request) -> Result<Slot<'_>, Failure> {
        assert!(who.sequence != 0, "a request without a sequence number has no slot");
        let slot = self.slots.exclusive(SlotKey(who.session, who.sequence % SLOTS)).await;
        match self.sessions.borrow().find(who) {
            Seen::New => Ok(Slot::Execute(Owned { clients: self, who, _slot: slot })),
            Seen::Done(outcome) => Ok(Slot::Done(outcome)),
            // Its change is durable, for a later one of the slot is.
            Seen::Late if who.repeats.is_some() => Ok(Slot::Done(Ok(Vec::new()))),
            Seen::Late => {
                let why = format!("request {} comes after its slot was used again", who.sequence);
                Err(Failure::new(ErrorKind::Invalid, why))
            }
        }
    }

    /// Waits until a session that has survived a restart may repeat the change of this number: no other
    /// session can repeat an earlier one any more. None if the session has reported everything to this start
    /// and repeats what is done.
    pub async fn turn_to_repeat(
        self: &Rc<Self>,
        header: &Header,
        body: &[u8],
    ) -> Result<Option<RepeatTurn>, Failure> {
        let RepeatRequest { kind, change, start, .. } = RepeatRequest::decode(body).map_err(refused)?;
        let (session, number) = (header.session, change.number);
        if number == 0 {
            return Err(refused("a change is numbered from 1"));
        }
        if start != self.generation {
            let why = "a change is repeated to the start of the service for which it is meant";
            return Err(Failure::new(ErrorKind::RefreshMap, why));
        }
        if !self.owes_opens(session) {
            return Ok(None);
        }
        assert!(self.owe_opens(), "session {session} owes its report");
        if body.len() > MOST_REPEATED_BYTES {
            return Err(refused("no change is that long"));
        }
        let request = self.recovery.borrow_mut().wants(session, number);
        self.recovers.notify_waiters();
        let mut turn =
            RepeatTurn { clients: self.clone(), session, number, is_change: kind != 0, has_come: false };
        loop {
            let changed = self.recovers.notified();
            self.check_session(session)?;
            if self.recovery.borrow().is_given_up(session, request) {
                return Err(Failure::new(ErrorKind::Retry, "the same was asked again and again since"));
            }
            if self.recovery.borrow().is_next(number, self.sessions.borrow().owing()) {
                turn.has_come = true;
                return Ok(Some(turn));
            }
            changed.await;
        }
    }

    /// A session that survived a restart does its part of the recovery.
    fn progressed(&self, session: u64) {
        if self.owes_opens(session) {
            self.recovery.borrow_mut().progressed(session, self.env.now());
        }
    }

    /// A session has reported everything after a restart, or has ended. Others may go on with the last one.
    fn end_recovery_of(&self, session: u64, has_reported: bool) {
        // A gateway keeps nothing that it could send again.
        let has_reported = has_reported && self.sessions.borrow().role(session) != Some(Role::Gateway);
        assert!(!self.owes_opens(session), "session {session} has reported or ended");
        self.recovery.borrow_mut().end(session, has_reported);
        self.recovers.notify_waiters();
        if !self.owe_opens() {
            self.change(Leases::end_recovery);
        }
    }

    /// A session could not make a change again.
    pub fn note_refused_repeat(&self) {
        self.recovery.borrow_mut().refused();
    }

    /// Number of sessions that survived the restart and ended without a report: what they had acknowledged
    /// and the restart has lost is not there.
    pub fn unreported(&self) -> u64 {
        self.recovery.borrow().unreported()
    }

    /// Sessions that survived a restart and must end, because all others wait for them: they have done
    /// nothing to recover for longer than their lease time, 10 s at least (`LEAST_TO_ANSWER`), or something
    /// for ten times as long. To be called several times in a lease time.
    pub fn stuck_in_recovery(&self) -> Vec<SessionInfo> {
        let mut infos = self.sessions();
        let sessions = self.sessions.borrow();
        let mut recovery = self.recovery.borrow_mut();
        recovery.look(self.env.now(), &sessions.owing().collect(), |id| sessions.busy_since(id));
        drop(recovery);
        infos.retain(|info| self.is_stuck_in_recovery(info));
        infos
    }

    /// True if this session, that survived a restart, does nothing to recover, or has done something for too
    /// long.
    pub fn is_stuck_in_recovery(&self, info: &SessionInfo) -> bool {
        let Some(limit) = info.time_to_answer() else { return false };
        let recovery = self.recovery.borrow();
        let is_idle =
            self.env.now().checked_sub(limit).is_some_and(|since| recovery.is_stuck(info.id, since));
        // The service may be suspended: a request that is being executed is no fault of its session.
        let is_busy = self.sessions.borrow().busy_since(info.id).is_some();
        self.owes_opens(info.id) && (is_idle && !is_busy || recovery.held_up_by(info.id) > limit * MOST_SHARE)
    }

    /// Takes over the opens and locks that a client reports after a restart. `reclaimed` means that all have
    /// been reported to this start of the service: a client reports them in parts, and repeats each part
    /// until it is answered. Fails if one is of a branch that does not exist.
    pub fn reclaim(&self, session: u64, ping: &PingRequest) -> Result<Reclaimed, String> {
        let PingRequest { opens, reclaimed: all, locks, start } = ping;
        let branches = opens.iter().map(|open| open.branch);
        check_branches(branches.chain(locks.iter().map(|lock| lock.branch)))?;
        if *start != self.generation || !self.owes_opens(session) {
            // It is about another start, or has reported everything before. What is opened since is counted
            // with Open.
            return Ok(Reclaimed::default());
        }
        let mut reclaimed = Reclaimed::default();
        for lock in locks {
            if let Err(Refused) = self.reclaim_lock(session, lock) {
                reclaimed.refused_locks += 1;
                let place = (lock.file(), lock.owner, lock.first);
                self.recovery.borrow_mut().loses_lock(session, place);
            }
        }
        let mut sessions = self.sessions.borrow_mut();
        // An inode that is named twice counts once, or once for each user.
        let mut counts: BTreeMap<FileId, u64> = BTreeMap::new();
        for open in opens {
            let count = match sessions.role(session) {
                Some(Role::Gateway) => {
                    let users = sessions.users_mut(session).ok();
                    users.and_then(|users| users.set_opens(open.user, open.file(), open.count.into()))
                }
                _ => Some(open.count.into()),
            };
            counts.extend(count.map(|count| (open.file(), count)));
        }
        for (file, count) in counts {
            let before = sessions.set_opens(session, file, count);
            reclaimed.opens.extend(before.map(|before| (file, before, count)));
        }
        if *all {
            sessions.reported_opens(session);
        }
        let told = sessions.open_inodes(session) + self.locks.borrow().held_in(session);
        drop(sessions);
        // Nothing that is told once more is progress.
        if self.recovery.borrow_mut().has_told(session, told) || *all {
            self.progressed(session);
        }
        if *all {
            self.end_recovery_of(session, true);
        }
        Ok(reclaimed)
    }

    /// Takes the sessions that lost locks over a restart, with the numbers of locks.
    pub fn take_lost_locks(&self) -> BTreeMap<u64, usize> {
        self.recovery.borrow_mut().take_lost_locks()
    }

    /// Restores a lock that a session had before a restart. It is refused if another session has said that
    /// the lock was its own, or if there are too many.
    fn reclaim_lock(&self, session: u64, request: &LockRequest) -> Result<(), Refused> {
        match self.locks.borrow_mut().change_for((session, request.user), request, true) {
            Ok((LockReply { conflict: None, .. }, _)) => Ok(()),
            result => {
                tracing::debug!(session, file = request.ino, ?result, "a lock cannot be restored");
                Err(Refused)
            }
        }
    }

    /// The connection is lost over which the requests of a session have come, and it `has_another` or none:
    /// those that wait for news are given up. Its client sends them again.
    pub fn hung_up(&self, session: u64, has_another: bool) {
        self.sessions.borrow_mut().hung_up(session, has_another);
        self.wake(session);
    }

    /// A session that may end to make room for one of this name, if there is neither room nor such a one: it
    /// has no connection, and nothing that it could lose.
    pub fn in_the_way_of(&self, name: Id128) -> Option<u64> {
        let sessions = self.sessions.borrow();
        let has_room = sessions.remote_count() < SESSIONS || sessions.named(name).is_some();
        let holds = |id| self.leases.borrow().has_joined(id) || self.locks.borrow().held_in(id) > 0;
        if has_room { None } else { sessions.idle(holds) }
    }

    /// Adds the result's row to the transaction that executes a request; none for a request without a
    /// sequence number.
    pub fn record(who: Request, body: &[u8], writes: &mut WriteSet) {
        if who.sequence != 0 {
            Sessions::record(who, body, writes);
        }
    }

    /// The request with this header. An error if its session has ended, as it may while a request waits.
    pub fn request(&self, header: &Header) -> Result<Request, Failure> {
        let session = header.session;
        let key = self.sessions.borrow().key(session).ok_or_else(|| ended(session))?;
        Ok(Request { session, key, sequence: header.sequence, user: header.user, repeats: None })
    }

    /// Fails unless a request names a user exactly if its session is one of several users, and one that the
    /// session has named to this start of the service.
    pub fn check_user(&self, header: &Header) -> Result<(), Failure> {
        let Header { kind, session, user, .. } = *header;
        let sessions = self.sessions.borrow();
        let (Some(role), Some(users)) = (sessions.role(session), sessions.users(session)) else {
            return Err(ended(session));
        };
        let why = match (role, user) {
            (Role::Mount, 0) => return Ok(()),
            (Role::Mount, _) => format!("{kind:?}: the session asks for no user"),
            (Role::Gateway, 0) if is_about_session(kind) => return Ok(()),
            (Role::Gateway, 0) => format!("{kind:?}: a gateway asks for a user"),
            (Role::Gateway, _) if users.get(user).is_some() => return Ok(()),
            // The service may have been started again.
            (Role::Gateway, _) => {
                let why = format!("{kind:?}: user {user} must be named again");
                return Err(Failure::new(ErrorKind::RefreshMap, why));
            }
        };
        Err(Failure::new(ErrorKind::Invalid, why))
    }

    /// A session names a user. Returns its number.
    pub fn add_user(&self, session: u64, request: UserRequest) -> Result<u32, Failure> {
        let mut sessions = self.sessions.borrow_mut();
        match sessions.role(session) {
            Some(Role::Gateway) => sessions.users_mut(session)?.add(request).map_err(refused),
            Some(Role::Mount) => Err(refused("a mount asks for no users")),
            None => Err(ended(session)),
        }
    }

    /// The user for whom a request is carried out; none if its session is trusted. Fails if the session has
    /// ended: then nothing says who asks.
    pub fn user(&self, who: Request) -> Result<Option<Rc<User>>, Failure> {
        if who.user == 0 {
            return Ok(None);
        }
        let sessions = self.sessions.borrow();
        let user = sessions.users(who.session).and_then(|users| users.get(who.user).cloned());
        user.map(Some).ok_or_else(|| ended(who.session))
    }

    /// A user has reached an inode by a name.
    pub fn reach(&self, who: Request, file: FileId) {
        if let Some(users) = self.sessions.borrow().users(who.session).filter(|_| who.user > 0) {
            users.reach(who.user, file);
        }
    }

    /// True if a request may name an inode: its session is trusted, or its user has reached the inode.
    pub fn has_reached(&self, who: Request, file: FileId) -> bool {
        let sessions = self.sessions.borrow();
        who.user == 0 || sessions.users(who.session).is_some_and(|users| users.has_reached(who.user, file))
    }

    /// A user opens an inode with this access. Returns false if its session has too many open.
    pub fn open_for(&self, who: Request, file: FileId, access: u32) -> bool {
        let mut sessions = self.sessions.borrow_mut();
        // A session that has ended opens nothing any more, which the caller learns from its own count.
        sessions.users_mut(who.session).is_ok_and(|users| users.open(who.user, file, access))
    }

    /// A user closes an inode once. Returns false if it has not opened it.
    pub fn close_for(&self, who: Request, file: FileId) -> bool {
        self.sessions.borrow_mut().users_mut(who.session).is_ok_and(|users| users.close(who.user, file))
    }

    /// The access with which a user has an inode open; none if it has not.
    pub fn access_of(&self, who: Request, file: FileId) -> Option<u32> {
        self.sessions.borrow().users(who.session)?.access(who.user, file)
    }

    /// A client says Hello again under the name of its session: it has not had the reply, so it has nothing
    /// open, and nothing to report after a restart. Returns number and lease time in milliseconds; none if
    /// there is no session of this name. ESTALE if it has ended, EPERM if it is that of another client or of
    /// another role.
    pub fn greeted_again(&self, key: Id128, role: Role, remote: bool) -> Result<Option<(u64, u32)>, Errno> {
        let mut sessions = self.sessions.borrow_mut();
        let Some(number) = sessions.named(key) else { return Ok(None) };
        let lease_ms = sessions.lease_ms(number);
        if (lease_ms > 0) != remote || sessions.role(number) != Some(role) {
            return Err(Errno::PERM);
        }
        sessions.hear(number, self.env.now()).map_err(|_| Errno::STALE)?;
        let owed = sessions.owes_opens(number);
        sessions.reported_opens(number);
        drop(sessions);
        if owed {
            self.end_recovery_of(number, true);
        }
        Ok(Some((number, lease_ms)))
    }

    /// A client says Hello over another connection, to go on with its session. Returns the lease time in
    /// milliseconds. Fails with Ended unless the session of this name has this number and lives, and is one
    /// of another process if `remote` is true.
    pub fn goes_on(&self, key: Id128, number: u64, remote: bool) -> Result<u32, Failure> {
        let mut sessions = self.sessions.borrow_mut();
        let lease_ms = sessions.lease_ms(number);
        if sessions.named(key) != Some(number) || (lease_ms > 0) != remote {
            return Err(ended(number));
        }
        sessions.hear(number, self.env.now())?;
        Ok(lease_ms)
    }

    /// Starts a session under this name. For a client of another process `writes` gets the row that lets the
    /// session survive a restart. Its lease time begins when the result is dropped, with the reply to Hello:
    /// until then the client waits.
    ///
    /// # Panics
    /// If there is a session of this name.
    pub fn begin_session(self: &Rc<Self>, key: Id128, who: SessionRow, writes: &mut WriteSet) -> Serving {
        let session = who.number;
        assert_ne!(session, 0, "0 is the number of no session");
        if who.lease_ms > 0 {
            // Whoever wants to free space must be able to begin.
            writes.put(session_key(key), who.encode()).reclaims();
        }
        let mut sessions = self.sessions.borrow_mut();
        sessions.insert(key, who, self.env.now());
        let number = sessions.begin(session, self.env.now(), Kind::Hello).expect("it was just inserted");
        Serving { clients: self.clone(), session, number }
    }

    /// Ends a session for its client: its requests fail from now on, and it keeps its opens, leases and locks
    /// until [`Self::end_session`]. Returns the transaction that deletes its rows; none if there is no such
    /// session.
    ///
    /// Only once that is durable may others get what the session held: a crash would otherwise bring it back,
    /// with a lock that somebody else has by then.
    pub fn bar_session(&self, id: u64) -> Option<WriteSet> {
        let key = self.sessions.borrow_mut().bar(id)?;
        self.change(|leases| leases.bar(id));
        self.wake(id);
        let mut writes = WriteSet::new();
        writes.delete(session_key(key));
        for slot in 0..SLOTS {
            writes.delete(result_key(key, slot));
        }
        writes.reclaims();
        Some(writes)
    }

    /// The rows of a barred session are gone, and it leaves. True the first time.
    pub fn begin_to_leave(&self, id: u64) -> bool {
        self.sessions.borrow_mut().begin_to_leave(id)
    }

    /// Waits until no request of a barred session is changing data. Only then may others get its leases: a
    /// write that was on its way would be carried out after theirs.
    pub async fn quiet(&self, id: u64) {
        loop {
            let ended = self.ended.notified();
            if self.sessions.borrow().is_quiet(id) {
                return;
            }
            ended.await;
        }
    }

    /// The files of which a session has an exclusive lease: it may have written behind the size that is known
    /// here.
    pub fn written_by(&self, id: u64) -> Vec<FileId> {
        self.leases.borrow().exclusive_of(id)
    }

    /// Ends a session with its leases and locks. Returns the inodes that it had open with the number of
    /// opens; none if there is no such session.
    pub fn end_session(&self, id: u64) -> Option<BTreeMap<FileId, u64>> {
        let owed_opens = self.owes_opens(id);
        let opens = self.sessions.borrow_mut().remove(id)?;
        // Others may have waited for it before they could answer.
        if self.leases.borrow().oldest_call(id).is_some() {
            let leases = self.leases.borrow();
            let sessions = self.sessions.borrow();
            let waiting = sessions.numbers().filter(|other| leases.holds_up(*other));
            self.unanswered.borrow_mut().begin_anew(self.env.now(), waiting);
        }
        self.change(|leases| leases.leave(id));
        assert!(!self.leases.borrow().has_joined(id), "session {id} has ended");
        if owed_opens {
            self.end_recovery_of(id, false);
        }
        let changed = self.locks.borrow_mut().end(id);
        changed.into_iter().for_each(|file| self.notify_unlocked(file));
        self.wake(id);
        self.watching.borrow_mut().remove(&id);
        Some(opens)
    }

    /// A session reports that it caches nothing any more, and ends.
    pub fn done(&self, session: u64) {
        self.change(|leases| leases.done(session));
    }

    /// The number of sessions of other processes that have not ended for their clients.
    pub fn remote_count(&self) -> usize {
        self.sessions.borrow().remote_count()
    }

    /// True if a session has this number.
    pub fn is_in_use(&self, session: u64) -> bool {
        self.sessions.borrow().contains(session)
    }

    /// True if a session has not ended for its client.
    pub fn is_live(&self, session: u64) -> bool {
        self.sessions.borrow().is_live(session)
    }

    /// True if a session has a row with which a start brings it back.
    pub fn comes_back(&self, session: u64) -> bool {
        self.sessions.borrow().comes_back(session)
    }

    /// The transaction that writes the row of a session of this process, before its first request about
    /// files: the next start must know that there was one, whose changes may be lost. None if it has one.
    pub fn missing_row(&self, session: u64) -> Option<WriteSet> {
        let sessions = self.sessions.borrow();
        let (name, row) = sessions.missing_row(session)?;
        let mut writes = WriteSet::new();
        writes.put(session_key(name), row.encode()).reclaims();
        Some(writes)
    }

    /// A session has a row from now on.
    pub fn note_row(&self, session: u64) {
        self.sessions.borrow_mut().note_row(session);
    }

    /// Sets the path at which a client of this process mounts; empty if it does not.
    pub fn set_mount(&self, session: u64, path: &str) {
        self.sessions.borrow_mut().set_mount(session, path);
    }

    /// Lists all sessions.
    pub fn sessions(&self) -> Vec<SessionInfo> {
        self.sessions.borrow().infos(self.env.now())
    }

    /// Returns the holdings and debts of all sessions.
    pub fn holdings(&self) -> BTreeMap<u64, SessionHoldings> {
        let mut all = BTreeMap::new();
        self.leases.borrow().add_holdings(&mut all);
        self.locks.borrow().add_holdings(&mut all);
        self.sessions.borrow().add_holdings(&mut all);
        all
    }

    /// True if there is such a session and its client has been silent for longer than its lease.
    pub fn is_silent(&self, session: u64) -> bool {
        self.sessions().iter().any(|info| info.id == session && info.is_silent())
    }

    /// Sessions of other processes whose clients have owed an answer to one call for longer than their lease
    /// time, and 10 s at least (`LEAST_TO_ANSWER`). Each is returned with the number of the call. To be
    /// called several times in a lease time.
    pub fn unanswered(&self) -> Vec<(SessionInfo, u64)> {
        if self.owe_opens() {
            // The answers need what is not served during a recovery.
            self.unanswered.take();
            return Vec::new();
        }
        let calls = self.leases.borrow().oldest_calls();
        let sessions = self.sessions.borrow();
        let oldest = |(session, call): (u64, u64)| {
            let waits = self.leases.borrow().holds_up(session);
            (session, Oldest { call, busy_since: sessions.busy_since(session), waits })
        };
        let oldest: BTreeMap<u64, Oldest> = calls.into_iter().map(oldest).collect();
        let infos = sessions.infos(self.env.now()).into_iter();
        let mut infos: BTreeMap<u64, SessionInfo> = infos.map(|info| (info.id, info)).collect();
        let limit = |session| infos.get(&session).and_then(SessionInfo::time_to_answer);
        let to_end = self.unanswered.borrow_mut().must_end(self.env.now(), &oldest, limit);
        to_end.into_iter().filter_map(|id| Some((infos.remove(&id)?, oldest[&id].call))).collect()
    }

    /// True if a session has not answered a call yet.
    pub fn owes_answer(&self, session: u64, call: u64) -> bool {
        self.leases.borrow().oldest_call(session) == Some(call)
    }

    /// Lease time of remote clients' sessions that start from now on.
    pub fn lease(&self) -> Duration {
        self.lease.get()
    }

    /// Sets the lease time of remote clients. Sessions that exist keep theirs.
    pub fn set_lease(&self, lease: Duration) {
        self.lease.set(lease);
    }

    /// Restarts the lease time of every session, and the time for answers to calls, because this process was
    /// not running to receive their requests.
    pub fn renew_leases(&self) {
        self.sessions.borrow_mut().renew_all(self.env.now());
        self.unanswered.take();
        self.recovery.borrow_mut().begin_anew(self.sessions.borrow().owing(), self.env.now());
    }

    /// True while removed files must stay, because clients may have them open and have not reported it yet.
    pub fn owe_opens(&self) -> bool {
        self.sessions.borrow().owe_opens()
    }

    /// True if a session survived a restart and has not reported everything yet.
    pub fn owes_opens(&self, session: u64) -> bool {
        self.sessions.borrow().owes_opens(session)
    }

    /// True if several sessions take part in leases.
    pub fn are_shared(&self) -> bool {
        self.leases.borrow().are_shared()
    }

    /// Counts one open of an inode by a session. Returns false if there is no such session.
    pub fn open(&self, session: u64, file: FileId) -> bool {
        self.sessions.borrow_mut().open(session, file)
    }

    /// True, once, if the result of a request is one that an earlier start has kept. The caller has found it.
    pub fn take_read_back(&self, who: Request) -> bool {
        self.sessions.borrow_mut().take_read_back(who)
    }

    /// Ends one open of an inode by a session. Returns false if it has none, as after a restart.
    pub fn close(&self, session: u64, file: FileId) -> bool {
        self.sessions.borrow_mut().close(session, file)
    }

    /// Forgets that a session has an inode open: the inode is gone.
    pub fn forget_opens(&self, session: u64, file: FileId) {
        self.sessions.borrow_mut().set_opens(session, file, 0);
    }

    /// Fails if the session has ended or the service was stopped.
    fn check_session(&self, id: u64) -> Result<(), Failure> {
        match self.sessions.borrow().is_live(id) && !self.is_stopped() {
            true => Ok(()),
            false => Err(ended(id)),
        }
    }

    /// Changes the leases, and wakes the sessions that have news by that.
    fn change<T>(&self, change: impl FnOnce(&mut Leases) -> T) -> T {
        let mut leases = self.leases.borrow_mut();
        let changed = change(&mut leases);
        let told = leases.take_told();
        drop(leases);
        told.into_iter().for_each(|session| self.wake(session));
        self.changed.notify_waiters();
        changed
    }

    /// Wakes the Watch request of a session.
    fn wake(&self, session: u64) {
        if let Some(watching) = self.watching.borrow().get(&session) {
            watching.notify_waiters();
        }
    }

    /// Lets a session take part. Otherwise fails with [`Failure::ask_again`]: other sessions have not given
    /// up yet what they cached without leases. The client will be told when to ask again.
    pub fn join(&self, session: u64) -> Result<(), Failure> {
        self.check_session(session)?;
        now_or_again(self.change(|leases| leases.ask_to_join(session)))
    }

    /// [`Self::join`], for a request that may be a part of the recovery after a restart: its session makes
    /// its changes again, and the contents of its files.
    pub fn join_for(&self, header: &Header, body: &[u8]) -> Result<(), Failure> {
        let recovers = match header.kind {
            Kind::Repeat | Kind::Write | Kind::Space | Kind::Commit => true,
            Kind::GetAttr => GetAttrRequest::decode(body).map_err(refused)?.ticket == 0,
            _ => false,
        };
        match recovers && self.owes_opens(header.session) {
            true => {
                if matches!(header.kind, Kind::Write | Kind::Space | Kind::Commit) {
                    self.progressed(header.session);
                }
                self.check_session(header.session)
            }
            false => self.join(header.session),
        }
    }

    /// Makes every session sync its changes and stop changing anything, before the service stops. Returns the
    /// sessions that failed to, that did not finish within `limit`, or that ended meanwhile, limited to those
    /// for which `is_connected` returns true (it takes a session number).
    pub async fn revoke_everything(
        &self,
        limit: Duration,
        is_connected: impl Fn(u64) -> bool,
    ) -> Vec<SessionInfo> {
        let takes_part = |info: &SessionInfo| {
            self.leases.borrow().has_joined(info.id) && self.is_live(info.id) && is_connected(info.id)
        };
        let asked: Vec<SessionInfo> = self.sessions().into_iter().filter(takes_part).collect();
        self.change(Leases::close);
        let leaving = |info: &SessionInfo| self.leases.borrow_mut().leaving(info.id).copied();
        let answered = async {
            let waits = [Leaving::Called, Leaving::CalledAgain].map(Some);
            loop {
                let changed = self.changed.notified();
                if !asked.iter().any(|info| waits.contains(&leaving(info))) {
                    return;
                }
                changed.await;
            }
        };
        timeout(&self.env, limit, answered).await;
        asked.into_iter().filter(|info| leaving(info) != Some(Leaving::Done)).collect()
    }

    /// Asks other sessions to sync the file of a GetAttr request. Returns the reply if the client must wait
    /// for the news of its ticket; none if there is no session to ask, or the client wants none to be asked.
    pub fn sync_elsewhere(
        &self,
        session: u64,
        branch: Branch,
        body: &[u8],
    ) -> Result<Option<Vec<u8>>, Failure> {
        self.check_session(session)?;
        let GetAttrRequest { ino, ticket, .. } = GetAttrRequest::decode(body).map_err(refused)?;
        if ticket == 0 {
            return Ok(None);
        }
        let file = FileId::of_numbers(branch.0, ino);
        match self.change(|leases| leases.ask_to_sync(session, file, ticket)) {
            Asked::Now(()) => Ok(None),
            Asked::Waits => Ok(Some(AttrReply { wait: true, ..AttrReply::default() }.encode_to_vec())),
            Asked::TooMany => Err(too_many()),
        }
    }

    /// Grants a lease, or says in the reply that the client must wait for it.
    pub fn grant(&self, session: u64, branch: Branch, body: &[u8]) -> Result<Vec<u8>, Failure> {
        self.check_session(session)?;
        let request = LeaseRequest::decode(body).map_err(refused)?;
        if request.first != 0 || request.last != u64::MAX {
            return Err(refused("a lease on a part of a file: this release has leases on whole files only"));
        }
        let file = FileId::of_numbers(branch.0, request.ino);
        let reply = match self.change(|leases| leases.ask(session, file, request.exclusive)) {
            Asked::Now(grant) => LeaseReply { grant, wait: false },
            Asked::Waits => LeaseReply { grant: 0, wait: true },
            Asked::TooMany => return Err(too_many()),
        };
        Ok(reply.encode_to_vec())
    }

    /// Grants a session a lease on the attributes of an inode, unless others change them or want to. Returns
    /// its number; 0 for none. The caller reads the attributes after that.
    pub fn grant_attributes(&self, session: u64, file: FileId) -> u64 {
        if !self.is_live(session) {
            return 0;
        }
        self.leases.borrow_mut().grant_attributes(session, file, self.env.now())
    }

    /// Lets a session change the attributes of inodes until the result is dropped. Otherwise fails with
    /// [`Failure::ask_again`]: others may cache them. The client will be told when to ask again.
    pub fn may_change(self: &Rc<Self>, session: u64, files: Vec<FileId>) -> Result<Changing, Failure> {
        let now = self.env.now();
        now_or_again(self.change(|leases| leases.ask_to_change(session, &files, now)))?;
        Ok(Changing { clients: self.clone(), files })
    }

    /// Lets a session change names. Otherwise fails with [`Failure::ask_again`]: after a restart others have
    /// not given up yet what they cached before. The client will be told when to ask again.
    pub fn may_change_names(&self, session: u64) -> Result<(), Failure> {
        now_or_again(self.change(|leases| leases.ask_to_change_names(session)))
    }

    /// Lets a change of attributes be made. Otherwise fails with [`Failure::ask_again`]: a change of size
    /// waits until no other session caches the old state. The client will be told when to ask again. Until
    /// the result of a change of size is dropped, nobody caches the attributes.
    pub fn may_resize(
        self: &Rc<Self>,
        session: u64,
        branch: Branch,
        body: &[u8],
    ) -> Result<Option<Changing>, Failure> {
        let request = SetAttrRequest::decode(body).map_err(refused)?;
        if request.size.is_none() || request.grow {
            return Ok(None);
        }
        self.check_session(session)?;
        let file = FileId::of_numbers(branch.0, request.ino);
        // The session may have left since it asked, and joins again.
        let ask = |leases: &mut Leases| match leases.ask_to_join(session) {
            Asked::Now(()) => leases.ask_to_resize(session, file),
            waits => waits,
        };
        now_or_again(self.change(ask))?;
        self.may_change(session, vec![file]).map(Some)
    }

    /// True if another session may have a newer size and time of a file than the service.
    pub fn is_unsynced_elsewhere(&self, session: u64, file: FileId) -> bool {
        self.leases.borrow().is_unsynced_elsewhere(session, file)
    }

    /// Takes a client's answers, and waits for news for it.
    pub async fn watch(&self, session: u64, body: &[u8]) -> Result<Vec<u8>, Failure> {
        let mut request = WatchRequest::decode(body).map_err(refused)?;
        let leases = request.released.iter().map(|lease| lease.branch);
        check_branches(leases.chain(request.resigned.iter().map(|file| file.branch))).map_err(refused)?;
        let WatchRequest { answered, failed, released, resigned, .. } = &request;
        if answered.len() + failed.len() + released.len() + resigned.len() > MOST_TOLD {
            return Err(refused(format_args!("more than {MOST_TOLD} leases and answers in one report")));
        }
        if request.generation != self.generation {
            // The request's numbers are from another start of the service.
            let WatchRequest { wait, alone, leaves, .. } = request;
            request = WatchRequest { wait, alone, leaves, ..WatchRequest::default() };
        }
        self.change(|leases| {
            for released in &request.released {
                leases.release(session, released.file(), released.grant, released.attributes);
            }
            request.resigned.iter().for_each(|file| leases.resign(session, file.file()));
            request.failed.iter().for_each(|call| leases.failed(session, call.number, call.errno));
            request.answered.iter().for_each(|number| leases.answered(session, *number));
            if request.leaves {
                leases.done(session);
                leases.leave(session);
                self.sessions.borrow_mut().departed(session);
                self.wake(session);
            }
        });
        // It may wait for a while, and needs nothing of this.
        let request = WatchRequest {
            seen: request.seen,
            wait: request.wait,
            alone: request.alone,
            ..WatchRequest::default()
        };
        let nothing = WatchReply { alone: request.alone, ..WatchReply::default() };
        if !request.wait {
            return Ok(nothing.encode_to_vec());
        }
        let longest = self.lease().min(LONGEST_WAIT * 3) / 3;
        let reply = timeout(&self.env, longest, self.news(session, &request)).await.unwrap_or(Ok(nothing))?;
        Ok(reply.encode_to_vec())
    }

    /// Waits for news for a session.
    async fn news(&self, session: u64, request: &WatchRequest) -> Result<WatchReply, Failure> {
        let before = self.sessions.borrow().gone(session);
        loop {
            self.check_session(session)?;
            let gone = self.sessions.borrow().gone(session);
            if gone.departures != before.departures {
                // It may have joined again, and be alone, but has not been since it asked.
                return Ok(WatchReply::default());
            }
            if gone.hang_ups != before.hang_ups {
                return Err(Failure::new(ErrorKind::Retry, "the connection is lost over which it has come"));
            }
            let watching = self.watching.borrow_mut().entry(session).or_default().clone();
            let woken = watching.notified();
            if let Some(news) = self.change(|leases| leases.news(session, request)) {
                return Ok(news);
            }
            woken.await;
        }
    }

    /// The reply to a request for a lock of a session that has not reported yet which locks it had before a
    /// restart: it must ask again. Its slot is left alone: the session may have to repeat an earlier request
    /// of it.
    pub fn early_lock(&self, header: &Header) -> Option<Vec<u8>> {
        let is_early = header.kind == Kind::Lock && self.owes_opens(header.session);
        is_early.then(|| LockReply { early: true, ..LockReply::default() }.encode_to_vec())
    }

    /// Sets, tests or releases an advisory lock. ESTALE if the session has ended. ENOLCK if it has too many
    /// locks.
    pub fn lock(&self, session: u64, user: u32, request: &LockRequest) -> Result<LockReply, Errno> {
        // A session that ended since this request was heard gets none: nobody would ever release it.
        if !self.is_live(session) {
            return Err(Errno::STALE);
        }
        if self.owe_opens() && request.change != i32::from(LockChange::Unlock) {
            return Ok(LockReply { early: true, ..LockReply::default() });
        }
        // Its waits and the outcomes that it has not taken are bounded together. Of more it is not told: it
        // asks again from time to time.
        let may_wait = self.leases.borrow().has_room_beside(session, self.locks.borrow().waits_of(session));
        let wanted = LockRequest { wait: request.wait && may_wait, ..request.clone() };
        let (reply, given_up) = self.locks.borrow_mut().change_for((session, user), &wanted, false)?;
        if given_up {
            self.notify_unlocked(request.file());
        }
        Ok(reply)
    }

    fn notify_unlocked(&self, file: FileId) {
        let waiting = self.locks.borrow_mut().take_waiting(file);
        if !waiting.is_empty() {
            self.change(|leases| {
                waiting.into_iter().for_each(|session| leases.note_unlocked(session, file));
            });
        }
    }
}

#[cfg(test)]
mod tests;
