//! Leases on inodes: what each client may cache of a file, and the revocations that make it give that up.
//!
//! A shared lease lets a client cache what it has read. An exclusive lease also lets it change size and time
//! of the file before it sends them. The service cannot send anything unasked, so each client keeps one
//! `Watch` request waiting here, and the replies carry its revocations. A request for something that others
//! own waits until they have answered, or their sessions have ended.
//!
//! A client that is the only one needs no leases ([`Leases::alone`]). The first request of a second client
//! waits until the first one has given up everything. After a restart the service does not know who owns
//! which lease: with several sessions, each must give up everything before anything is granted.
//!
//! A change of size may come from a session that has only a shared lease which is being revoked, because its
//! kernel does not drop pages that programs have changed before the change of size is answered. Every other
//! session gives its lease back first. The exception is two such changes that wait for each other: then the
//! second to arrive does not wait.
//!
//! Invariants:
//! - an exclusive lease of one session and any lease of another session on the same inode never exist at the
//!   same time;
//! - a session that has not answered a revocation of its lease on an inode is granted no other lease on it;
//! - nothing is granted, and nobody joins, while another session has not answered a revocation of everything;
//! - a session is done with a stop of the service only when it has no lease and has answered every revocation
//!   of everything;
//! - a revocation names the newest grant that it covers, and grant numbers rise, so a client knows that a
//!   grant which arrives late is void. The numbers start again with each start of the service and mean
//!   nothing to another start;
//! - no request waits for an answer while it has something locked that the answer may need: no lock of a
//!   service, and no turn except that for the inode's next lease.

mod calls;

use crate::table::SessionHoldings;
use calls::{Call, Calls};
use penstock_base::{FileId, HashMap};
use penstock_wire::metadata::{FileRef, LeaseCall, WatchReply, WatchRequest};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Failed sync requests that are remembered for the requests that wait for them.
const MOST_FAILED: usize = 1024;
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    exclusive: bool,
    grant: u64,
}

/// All leases, and the revocations that are not yet answered.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// Sessions that own leases or may cache something.
    joined: BTreeSet<u64>,
    /// The only session in `joined`, if it knows or may know that it is the only one.
    alone: Option<u64>,
    held: HashMap<FileId, BTreeMap<u64, Held>>,
    calls: Calls,
    /// Inodes that sessions which owe everything have given up alone.
    given_up: BTreeSet<(u64, FileId)>,
    /// Last number given to a grant or a revocation.
    last: u64,
    /// Sync requests that failed recently, by number, with their errno.
    failed: VecDeque<(u64, u16)>,
    /// The highest number of a failed request that is not remembered any more.
    forgotten: u64,
    /// Inodes on which a session may try again to get a lock.
    unlocked: BTreeMap<u64, BTreeSet<FileId>>,
    /// Number of changes of size that wait for the leases of others, by inode and session.
    resizing: BTreeMap<(FileId, u64), u32>,
    /// While the service stops: the sessions that were asked to give up everything.
    closing: Option<BTreeMap<u64, Leaving>>,
}

/// State of a session that gives up everything because the service stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaving {
    /// It was asked. It still gets leases: its kernel drops what was read without a lease only after requests
    /// that need one.
    Called,
    /// It was asked again, because it got leases meanwhile. It gets none any more.
    CalledAgain,
    /// It has no unsynced changes, and is granted nothing any more.
    Done,
    /// It could not sync everything, or its session ended before it reported that it did.
    Failed,
}

impl Leases {
    /// State after a restart: each of these sessions may own any lease.
    pub(crate) fn restored(sessions: impl Iterator<Item = u64>) -> Self {
        let mut leases = Self { joined: sessions.collect(), ..Self::default() };
        match leases.joined.len() {
            1 => leases.alone = leases.joined.first().copied(),
            _ => leases.joined.clone().into_iter().for_each(|session| leases.call_everything(session)),
        }
        leases
    }

    /// True if a session owns leases or may cache something.
    pub(crate) fn has_joined(&self, session: u64) -> bool {
        self.joined.contains(&session)
    }

    /// A change of size by a session begins to wait.
    pub(crate) fn begin_resize(&mut self, file: FileId, session: u64) {
        *self.resizing.entry((file, session)).or_default() += 1;
    }

    /// A change of size that waited goes on, or is given up.
    pub(crate) fn end_resize(&mut self, file: FileId, session: u64) {
        let waiting = self.resizing.get_mut(&(file, session)).expect("it is counted while it waits");
        assert!(*waiting > 0, "a change of size ends once");
        *waiting -= 1;
        if *waiting == 0 {
            self.resizing.remove(&(file, session));
        }
    }

    /// True if another session may have a newer size and time of a file than the service.
    pub(crate) fn is_unsynced_elsewhere(&self, session: u64, file: FileId) -> bool {
        !self.may_be_unsynced_at(session, file).is_empty()
    }

    /// The other sessions that may have a newer size and time of a file than the service, each with a grant:
    /// one with an exclusive lease, and those that owe everything, because they may still own what an earlier
    /// start granted.
    fn may_be_unsynced_at(&self, session: u64, file: FileId) -> BTreeMap<u64, u64> {
        let mut sessions = self.calls.owing();
        sessions.remove(&session);
        sessions.extend(self.held_by_others(session, file, |held| held.exclusive));
        sessions
    }

    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The latest number and the session that is alone: a change of either must wake the waiting requests.
    pub(crate) fn to_tell(&self) -> (u64, Option<u64>) {
        (self.last, self.alone)
    }

    fn call_everything(&mut self, session: u64) {
        let grant = self.last;
        let number = self.next();
        self.calls.insert(number, Call { session, file: None, is_sync: false, grant, sent: false });
        self.given_up.retain(|(other, _)| *other != session);
    }

    /// Begins a stop: revokes everything from every session. A session gets leases only until it has answered
    /// the last revocation.
    pub(crate) fn close(&mut self) {
        self.closing = Some(self.joined.iter().map(|session| (*session, Leaving::Called)).collect());
        self.alone = None;
        self.joined.clone().into_iter().for_each(|session| self.call_everything(session));
    }

    /// A session has reported that it caches nothing any more.
    pub(crate) fn done(&mut self, session: u64) {
        if let Some(leaving) = self.leaving(session).filter(|leaving| **leaving != Leaving::Failed) {
            *leaving = Leaving::Done;
        }
    }

    pub(crate) fn leaving(&mut self, session: u64) -> Option<&mut Leaving> {
        self.closing.as_mut()?.get_mut(&session)
    }

    /// A session has given up everything. If it got leases meanwhile, a stop asks it once more.
    fn gave_up_everything(&mut self, session: u64) {
        // An older revocation may be answered after this one was made. Only the last answer covers all leases
        // that it got.
        if self.calls.owes_everything(session) {
            return;
        }
        let has_leases = self.held.values().any(|holders| holders.contains_key(&session));
        let Some(leaving) = self.leaving(session) else { return };
        *leaving = match *leaving {
            Leaving::Called if has_leases => Leaving::CalledAgain,
            Leaving::Failed => Leaving::Failed,
            Leaving::CalledAgain => {
                assert!(!has_leases, "session {session} got leases after its last revocation");
                Leaving::Done
            }
            _ => Leaving::Done,
        };
        if *leaving == Leaving::CalledAgain {
            self.call_everything(session);
        }
    }

    /// True unless the service stops and this session may not get leases any more.
    fn may_have_leases(&self, session: u64) -> bool {
        self.closing.as_ref().is_none_or(|all| all.get(&session) == Some(&Leaving::Called))
    }

    fn owes_everything(&self, wanted: impl Fn(u64) -> bool) -> bool {
        self.calls.owing().into_keys().any(wanted)
    }

    /// Lets a session take part. Returns false if it must wait.
    pub(crate) fn join(&mut self, session: u64) -> bool {
        if self.alone == Some(session) {
            return true;
        }
        if self.joined.insert(session)
            && let Some(other) = self.alone.take()
        {
            self.call_everything(other);
        }
        self.assert_alone();
        if self.calls.owes_everything(session) {
            // It still owns what it had, until it answers.
            return true;
        }
        if self.closing.is_some() || self.owes_everything(|_| true) {
            return false;
        }
        self.note_alone();
        true
    }

    /// If one session is left and no revocation is open, it is alone and needs no leases.
    fn note_alone(&mut self) {
        if self.joined.len() == 1 && self.calls.is_empty() && self.closing.is_none() {
            self.alone = self.joined.first().copied();
            self.held.clear();
        }
        self.assert_alone();
    }

    /// A session that is alone is the only one, and has no leases.
    fn assert_alone(&self) {
        assert!(
            self.alone.is_none_or(|alone| self.joined.len() == 1 && self.joined.contains(&alone)),
            "{:?} is alone among {:?}",
            self.alone,
            self.joined
        );
        assert!(
            self.alone.is_none() || self.held.is_empty(),
            "{:?} are granted to a session alone",
            self.held
        );
    }

    /// A session caches nothing any more. Unless it has ended, it may join again.
    pub(crate) fn leave(&mut self, session: u64) {
        self.joined.remove(&session);
        self.unlocked.remove(&session);
        if self.alone == Some(session) {
            self.alone = None;
        }
        self.held.retain(|_, holders| {
            holders.remove(&session);
            !holders.is_empty()
        });
        self.calls.remove_all(session);
        self.given_up.retain(|(other, _)| *other != session);
        // It ended without an answer, and nobody will answer for it any more.
        if let Some(leaving @ (Leaving::Called | Leaving::CalledAgain)) = self.leaving(session) {
            *leaving = Leaving::Failed;
        }
        self.note_alone();
    }

    /// Lets a session take part, and returns true if no other one owes everything.
    pub(crate) fn may_ask(&mut self, session: u64) -> bool {
        let joined = self.join(session);
        assert!(self.has_joined(session), "session {session} takes part from now on");
        joined && !self.owes_everything(|other| other != session)
    }

    /// Grants a lease and returns its number, or revokes the leases that conflict with it. A session that has
    /// not joined gets none.
    pub(crate) fn try_grant(&mut self, session: u64, file: FileId, exclusive: bool) -> Option<u64> {
        if !self.joined.contains(&session)
            || !self.may_have_leases(session)
            || self.owes_everything(|other| other != session)
            || self.is_called(session, file, 0)
        {
            return None;
        }
        let in_the_way = self.held_by_others(session, file, |held| exclusive || held.exclusive);
        if in_the_way.is_empty() {
            let grant = self.next();
            assert!(self.alone.is_none_or(|alone| alone == session), "{:?} is alone", self.alone);
            if self.alone != Some(session) {
                let holders = self.held.entry(file).or_default();
                holders.insert(session, Held { exclusive, grant });
                assert!(
                    holders.len() == 1 || holders.values().all(|held| !held.exclusive),
                    "{holders:?} of inode {file}"
                );
            }
            return Some(grant);
        }
        self.call_back(file, &in_the_way);
        None
    }

    /// Lets a session change a file's size, or revokes the leases of others. Another session's lease is no
    /// obstacle if that session waits here too.
    pub(crate) fn try_resize(&mut self, session: u64, file: FileId) -> Option<()> {
        let own = self.held.get(&file).and_then(|holders| holders.get(&session));
        if self.alone == Some(session) || own.is_some_and(|own| own.exclusive) {
            return Some(());
        }
        // After a restart other sessions may own any lease. One that waits here too for the same inode is no
        // obstacle. One that waits for another inode may wait for this session: it gives up this inode alone.
        let is_free =
            |other: u64| self.resizing.contains_key(&(file, other)) || self.given_up.contains(&(other, file));
        let waits = |other: u64| self.resizing.keys().any(|(_, session)| *session == other);
        let mut owing: Vec<(u64, u64)> = self.calls.owing().into_iter().collect();
        owing.retain(|(other, _)| *other != session && !is_free(*other));
        if !owing.is_empty() {
            owing.retain(|(other, _)| waits(*other));
            self.call_back(file, &owing);
            return None;
        }
        let others = self.held_by_others(session, file, |_| true);
        self.call_back(file, &others);
        others.iter().all(|(other, _)| self.resizing.contains_key(&(file, *other))).then_some(())
    }

    pub(crate) fn held_by_others(
        &self,
        session: u64,
        file: FileId,
        which: impl Fn(&Held) -> bool,
    ) -> Vec<(u64, u64)> {
        let holders = self.held.get(&file).into_iter().flatten();
        let others = holders.filter(|(other, held)| **other != session && which(held));
        others.map(|(other, held)| (*other, held.grant)).collect()
    }

    /// True if a session has a revocation open that covers this grant or a later one.
    fn is_called(&self, session: u64, file: FileId, grant: u64) -> bool {
        self.calls.about(session, file).any(|(_, call)| !call.is_sync && call.grant >= grant)
    }

    fn call_back(&mut self, file: FileId, holders: &[(u64, u64)]) {
        for (session, grant) in holders.iter().copied() {
            if !self.is_called(session, file, grant) {
                let number = self.next();
                self.calls
                    .insert(number, Call { session, file: Some(file), is_sync: false, grant, sent: false });
            }
        }
    }

    /// Asks other sessions that may have unsynced changes of a file to sync them. Returns the numbers of the
    /// requests to wait for.
    pub(crate) fn call_sync(&mut self, session: u64, file: FileId) -> Vec<u64> {
        let others = self.may_be_unsynced_at(session, file);
        others.into_iter().map(|(other, grant)| self.call_sync_of(other, file, grant)).collect()
    }

    fn call_sync_of(&mut self, session: u64, file: FileId, grant: u64) -> u64 {
        // A request that has been sent may be answered with an older state of the file, so only one not yet
        // sent is shared.
        if let Some((number, _)) =
            self.calls.about(session, file).find(|(_, call)| call.is_sync && !call.sent)
        {
            return number;
        }
        let number = self.next();
        self.calls.insert(number, Call { session, file: Some(file), is_sync: true, grant, sent: false });
        number
    }

    /// A session reports, before its answer, that it could not sync, or could not give up everything.
    pub(crate) fn failed(&mut self, session: u64, number: u64, errno: u32) {
        let Some(call) = self.calls.get(session, number) else { return };
        match (call.is_sync, call.file) {
            (true, _) => {
                if self.failed.len() >= MOST_FAILED
                    && let Some((number, _)) = self.failed.pop_front()
                {
                    self.forgotten = self.forgotten.max(number);
                }
                self.failed.push_back((number, u16::try_from(errno).unwrap_or_default()));
                assert!(self.failed.len() <= MOST_FAILED, "{} failed requests", self.failed.len());
            }
            (false, None) => {
                if let Some(leaving) = self.leaving(session) {
                    *leaving = Leaving::Failed;
                }
            }
            (false, Some(_)) => {}
        }
    }

    /// Result of a sync request: none until it is answered, and an errno if it failed.
    pub(crate) fn synced(&self, number: u64) -> Option<Result<(), u16>> {
        if self.calls.contains(number) {
            return None;
        }
        match self.failed.iter().find(|(failed, _)| *failed == number) {
            Some((_, errno)) => Some(Err(*errno)),
            // It may be one of those that failed.
            None if number <= self.forgotten => Some(Err(0)),
            None => Some(Ok(())),
        }
    }

    pub(crate) fn answered(&mut self, session: u64, number: u64) {
        let Some(call) = self.calls.remove(session, number) else { return };
        match call.file {
            _ if call.is_sync => {}
            Some(file) => {
                self.drop_held(session, file, call.grant);
                if self.calls.owes_everything(session) {
                    self.given_up.insert((session, file));
                }
            }
            None => {
                if !self.calls.owes_everything(session) {
                    self.given_up.retain(|(other, _)| *other != session);
                }
                self.held.retain(|_, holders| {
                    if holders.get(&session).is_some_and(|held| held.grant <= call.grant) {
                        holders.remove(&session);
                    }
                    !holders.is_empty()
                });
                self.gave_up_everything(session);
            }
        }
        self.note_alone();
    }

    pub(crate) fn drop_held(&mut self, session: u64, file: FileId, grant: u64) {
        let Some(holders) = self.held.get_mut(&file) else { return };
        if holders.get(&session).is_some_and(|held| held.grant <= grant) {
            holders.remove(&session);
        }
        if holders.is_empty() {
            self.held.remove(&file);
        }
    }

    /// Adds the leases of all sessions, and the calls that they have not answered.
    pub(crate) fn add_holdings(&self, all: &mut BTreeMap<u64, SessionHoldings>) {
        for (session, held) in self.held.values().flatten() {
            let SessionHoldings { shared_leases, exclusive_leases, .. } = all.entry(*session).or_default();
            *(if held.exclusive { exclusive_leases } else { shared_leases }) += 1;
        }
        self.calls.sessions().for_each(|session| all.entry(session).or_default().unanswered_calls += 1);
    }

    /// The number of the oldest call to each session that is not answered.
    pub(crate) fn oldest_calls(&self) -> BTreeMap<u64, u64> {
        self.calls.oldest()
    }

    /// True if several sessions take part.
    pub(crate) fn are_shared(&self) -> bool {
        self.joined.len() > 1
    }

    /// Notes that a session may try again to lock byte ranges of an inode.
    pub(crate) fn note_unlocked(&mut self, session: u64, file: FileId) {
        self.unlocked.entry(session).or_default().insert(file);
    }

    /// News for a session; none if there are none.
    pub(crate) fn news(&mut self, session: u64, request: &WatchRequest) -> Option<WatchReply> {
        let alone = self.alone == Some(session);
        if request.alone && !alone && !self.calls.owes_everything(session) {
            // The client believes that it is alone and is not. Without a revocation it would repeat the
            // question for ever.
            self.call_everything(session);
        }
        let call = |(number, call): (u64, Call)| {
            let FileId { branch, ino } = call.file.unwrap_or(FileId::of_numbers(0, 0));
            LeaseCall { number, ino: ino.0, is_sync: call.is_sync, grant: call.grant, branch: branch.0 }
        };
        let calls: Vec<LeaseCall> = self.calls.send(session, request.seen).into_iter().map(call).collect();
        let unlocked = self.unlocked.remove(&session).into_iter().flatten();
        let unlocked: Vec<FileRef> =
            unlocked.map(|file| FileRef { ino: file.ino.0, branch: file.branch.0 }).collect();
        let nothing = calls.is_empty() && unlocked.is_empty() && alone == request.alone;
        (!nothing).then_some(WatchReply { alone, calls, unlocked })
    }
}

#[cfg(test)]
mod tests;
