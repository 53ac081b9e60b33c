//! Leases on inodes: what each client may cache of a file, and the revocations that make it give that up.
//!
//! A shared lease lets a client cache what it has read. An exclusive lease also lets it change size and time
//! of the file before it sends them. The service cannot send anything unasked, so each client keeps one
//! `Watch` request waiting here, and the replies carry its revocations.
//!
//! No other request waits in the service. One for something that others own is answered at once with "wait",
//! and noted ([`waiting`]). Once they have answered, or their sessions have ended, the outcome is in the news
//! of the session that asked ([`news`]): the lease, the end of a sync, or that it may ask again.
//!
//! Attributes, and the names of a directory, have leases of their own ([`attributes`]): others may change
//! them while this client has the data, and the other way round.
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
//! - an exclusive lease of one session and any lease of another session on the same inode, also on its
//!   attributes, never exist at the same time;
//! - a session that has not answered a revocation of its lease on an inode is granted no other lease on it;
//! - nothing is granted, and nobody joins, while another session has not answered a revocation of everything;
//! - a session is done with a stop of the service only when it has no lease and has answered every revocation
//!   of everything;
//! - a revocation names the newest grant that it covers, and grant numbers rise, so a client knows that a
//!   grant which arrives late is void. The numbers start again with each start of the service and mean
//!   nothing to another start;
//! - requests for a lease on an inode are granted in the order of their arrival, except that one whose
//!   session owes everything does not wait behind those that wait for its answer;
//! - whatever may let a request go on that waits is followed by a look at it (`serve_waiting`), in the same
//!   call, and a session with news is in `told`.
//!
//! The cost of a request or an answer does not depend on how many others wait, except when everything was
//! revoked.

mod attributes;
mod calls;
mod held;
mod news;
mod waiting;

use crate::table::SessionHoldings;
use attributes::Attributes;
use calls::{Call, Calls, Scope};
use held::{Held, HeldLeases, MOST as MOST_LEASES};
use news::News;
use penstock_base::{ErrorKind, FileId};
use penstock_wire::Failure;
use penstock_wire::metadata::{LeaseCall, WatchReply, WatchRequest};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use waiting::{MOST_WAITING, Waiting, Wanted};

const EIO: u16 = 5;
/// Most calls and news in one reply: some 200 KiB. A server counts a reply to Watch for more than that.
const MOST_AT_ONCE: usize = 4096;

/// Answer to a request that may have to wait for other clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked<T> {
    /// It need not.
    Now(T),
    /// It must: the outcome will be in the news of its session.
    Waits,
    /// The session has so many requests that wait, or leases, that this one is not noted.
    TooMany,
}

/// All leases, and the revocations that are not yet answered.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// Sessions that own leases or may cache something.
    joined: BTreeSet<u64>,
    /// The only session in `joined`, if it knows or may know that it is the only one.
    alone: Option<u64>,
    held: HeldLeases,
    attributes: Attributes,
    calls: Calls,
    /// Inodes that sessions which owe everything have given up alone.
    given_up: BTreeSet<(u64, FileId)>,
    /// Last number given to a grant or a revocation.
    last: u64,
    waiting: Waiting,
    /// Sessions that have ended for their clients, and keep what they hold until their last writes are over.
    barred: BTreeSet<u64>,
    /// By session.
    news: BTreeMap<u64, News>,
    /// Sessions with news or calls that their Watch requests have not been woken for.
    told: BTreeSet<u64>,
    /// Sessions that survived a restart have not made again what it may have lost: nobody takes part.
    is_recovering: bool,
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
        let joined: BTreeSet<u64> = sessions.collect();
        let mut leases = Self { is_recovering: !joined.is_empty(), joined, ..Self::default() };
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

    /// Takes the sessions whose Watch requests may have an answer now.
    pub(crate) fn take_told(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.told)
    }

    /// Calls a session, under the next number.
    fn call(&mut self, call: Call) {
        let number = self.next();
        self.told.insert(call.session);
        self.calls.insert(number, call);
    }

    /// Adds to the news of a session, under the next number.
    fn tell(&mut self, session: u64, item: impl FnOnce(&mut News, u64)) {
        let number = self.next();
        item(self.news.entry(session).or_default(), number);
        self.told.insert(session);
    }

    fn call_everything(&mut self, session: u64) {
        self.call(Call::revocation(Scope::Data, session, None, self.last));
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
        let has_leases = self.held.has_any(session);
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

    /// Lets a session take part, or notes that it waits.
    pub(crate) fn ask_to_join(&mut self, session: u64) -> Asked<()> {
        match self.join(session) {
            true => Asked::Now(()),
            false => {
                self.waiting.join(session);
                Asked::Waits
            }
        }
    }

    /// All sessions that survived a restart have made again what it may have lost, or have ended.
    pub(crate) fn end_recovery(&mut self) {
        self.is_recovering = false;
        // Also those that owe an answer for which they need what they ask for.
        self.tell_joining();
    }

    /// Lets a session take part. Returns false if it must wait.
    fn join(&mut self, session: u64) -> bool {
        if self.is_recovering {
            return false;
        }
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
        if self.alone.is_none() && self.joined.len() == 1 && self.calls.is_empty() && self.closing.is_none() {
            self.alone = self.joined.first().copied();
            self.told.extend(self.alone);
            self.held.clear();
            self.attributes.clear();
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
            self.alone.is_none() || self.held.is_empty() && self.attributes.is_empty(),
            "{:?} and {:?} are granted to a session alone",
            self.held,
            self.attributes
        );
    }

    /// A session has ended for its client. It keeps what it holds until it leaves, and gets nothing more.
    pub(crate) fn bar(&mut self, session: u64) {
        self.barred.insert(session);
        self.end_waits(session).into_iter().for_each(|file| self.serve_waiting(file));
    }

    /// A session waits for nothing any more. Returns the files for which it did.
    fn end_waits(&mut self, session: u64) -> BTreeSet<FileId> {
        self.waiting.synced(session).into_iter().for_each(|file| self.calls.withdraw_syncs(file, session));
        self.waiting.end(session)
    }

    /// A session caches nothing any more. Unless it has ended, it may join again.
    pub(crate) fn leave(&mut self, session: u64) {
        self.joined.remove(&session);
        self.barred.remove(&session);
        self.news.remove(&session);
        self.told.remove(&session);
        if self.alone == Some(session) {
            self.alone = None;
        }
        let mut freed = self.end_waits(session);
        freed.extend(self.held.end_all(session, u64::MAX));
        freed.extend(self.attributes.end_all(session, u64::MAX));
        let owed_everything = self.calls.owes_everything(session);
        for call in self.calls.remove_all(session) {
            freed.extend(call.file);
            // Nobody has a newer state of the file any more.
            let (tickets, _) = call.into_tickets();
            self.end_syncs(tickets, 0);
        }
        self.given_up.retain(|(other, _)| *other != session);
        // It ended without an answer, and nobody will answer for it any more.
        if let Some(leaving @ (Leaving::Called | Leaving::CalledAgain)) = self.leaving(session) {
            *leaving = Leaving::Failed;
        }
        self.note_alone();
        match owed_everything {
            true => self.serve_all_waiting(),
            false => freed.into_iter().for_each(|file| self.serve_waiting(file)),
        }
        self.serve_joining();
    }

    /// Grants a lease, or notes that the session waits for it and revokes those in the way. The session takes
    /// part.
    pub(crate) fn ask(&mut self, session: u64, file: FileId, exclusive: bool) -> Asked<u64> {
        if self.alone != Some(session) && !self.held.has_room(session, file, self.waiting.count(session)) {
            return Asked::TooMany;
        }
        // A request for less than the session waits for already is a part of that.
        let exclusive = exclusive || self.waiting.wants_exclusive(file, session);
        let waits = self.waiting.first(file, |other| other != session && self.may_get_leases(other));
        if waits.is_none()
            && let Some(grant) = self.try_grant(session, file, exclusive)
        {
            // An earlier request of the session may wait for the news.
            self.end_want(session, file, exclusive, grant);
            return Asked::Now(grant);
        }
        if !self.has_room(session) {
            return Asked::TooMany;
        }
        self.waiting.want(file, Wanted { session, exclusive });
        Asked::Waits
    }

    /// True if one more request of a session may wait. News that it has not taken count too.
    fn has_room(&self, session: u64) -> bool {
        self.has_room_beside(session, 0)
    }

    /// The same, beside this many of its requests that wait elsewhere.
    pub(crate) fn has_room_beside(&self, session: u64, others: usize) -> bool {
        let news = self.news.get(&session).map_or(0, News::len);
        self.waiting.has_room(session, news + others)
    }

    /// False if a session gets no lease at all: another one owes everything, or it has left, or the service
    /// stops and this one has given up everything.
    fn may_get_leases(&self, session: u64) -> bool {
        self.joined.contains(&session)
            && !self.barred.contains(&session)
            && self.may_have_leases(session)
            && !self.owes_everything(|other| other != session)
    }

    /// Looks again at the requests that wait for a file or for its attributes.
    fn serve_waiting(&mut self, file: FileId) {
        while let Some(Wanted { session, exclusive }) =
            self.waiting.first(file, |session| self.may_get_leases(session))
        {
            let Some(grant) = self.try_grant(session, file, exclusive) else { break };
            self.end_want(session, file, exclusive, grant);
        }
        for session in self.waiting.resizers(file) {
            if self.try_resize(session, file).is_some() {
                self.tell(session, News::again);
            }
        }
        for session in self.waiting.changers(file) {
            let others = self.attributes.of_others(session, file);
            if others.is_empty() {
                self.waiting.end_change(file, session);
                self.tell(session, News::again);
            } else {
                self.call_back(Scope::Attributes, file, &others);
            }
        }
    }

    /// A session gets a lease for which it may have waited.
    fn end_want(&mut self, session: u64, file: FileId, exclusive: bool, grant: u64) {
        if self.waiting.end_want(file, session) {
            self.news.entry(session).or_default().grant(grant, file, exclusive);
            self.told.insert(session);
        }
    }

    /// Looks again at all requests that wait, after an answer to a revocation of everything.
    fn serve_all_waiting(&mut self) {
        self.waiting.files().into_iter().for_each(|file| self.serve_waiting(file));
    }

    /// Lets sessions ask again that wait to take part, if they may now.
    fn serve_joining(&mut self) {
        if !self.is_recovering && self.closing.is_none() && !self.owes_everything(|_| true) {
            self.tell_joining();
        }
    }

    fn tell_joining(&mut self) {
        for session in self.waiting.take_joining() {
            self.tell(session, News::again);
        }
    }

    /// Grants a lease and returns its number, or revokes the leases that conflict with it. A session that has
    /// not joined gets none.
    fn try_grant(&mut self, session: u64, file: FileId, exclusive: bool) -> Option<u64> {
        if !self.may_get_leases(session) || self.is_called(Scope::Data, session, file, 0) {
            return None;
        }
        let in_the_way = self.held_by_others(session, file, |held| exclusive || held.exclusive);
        let know = if exclusive { self.attributes.of_others(session, file) } else { Vec::new() };
        if in_the_way.is_empty() && know.is_empty() {
            let grant = self.next();
            assert!(self.alone.is_none_or(|alone| alone == session), "{:?} is alone", self.alone);
            if self.alone != Some(session) {
                self.held.grant(session, file, Held { exclusive, grant });
            }
            return Some(grant);
        }
        self.call_back(Scope::Data, file, &in_the_way);
        self.call_back(Scope::Attributes, file, &know);
        None
    }

    /// Lets a session change a file's size, or notes that it waits to do so.
    pub(crate) fn ask_to_resize(&mut self, session: u64, file: FileId) -> Asked<()> {
        if !self.has_room(session) {
            return Asked::TooMany;
        }
        let (waited, waited_for_any) =
            (self.waiting.resizes(file, session), self.waiting.resizes_any(session));
        self.waiting.resize(file, session);
        if self.try_resize(session, file).is_some() {
            self.waiting.end_resize(file, session);
            return Asked::Now(());
        }
        // Another one that waits for this session's lease can go on.
        match self.calls.owes_everything(session) {
            _ if waited => {}
            true if !waited_for_any => self.serve_all_waiting(),
            _ => self.serve_waiting(file),
        }
        Asked::Waits
    }

    /// A session does not want to change the size of a file any more.
    pub(crate) fn resign(&mut self, session: u64, file: FileId) {
        self.waiting.end_resize(file, session);
    }

    /// Returns a value if a session may change a file's size; otherwise revokes the leases of others. Another
    /// session's lease is no obstacle if that session waits here too.
    fn try_resize(&mut self, session: u64, file: FileId) -> Option<()> {
        let own = self.held.of(session, file);
        if self.alone == Some(session) || own.is_some_and(|own| own.exclusive) {
            return Some(());
        }
        // After a restart other sessions may own any lease. One that waits here too for the same inode is no
        // obstacle. One that waits for another inode may wait for this session: it gives up this inode alone.
        let is_free =
            |other: u64| self.waiting.resizes(file, other) || self.given_up.contains(&(other, file));
        let mut owing: Vec<(u64, u64)> = self.calls.owing().into_iter().collect();
        owing.retain(|(other, _)| *other != session && !is_free(*other));
        if !owing.is_empty() {
            owing.retain(|(other, _)| self.waiting.resizes_any(*other));
            self.call_back(Scope::Data, file, &owing);
            return None;
        }
        let others = self.held_by_others(session, file, |_| true);
        let know = self.attributes.of_others(session, file);
        self.call_back(Scope::Data, file, &others);
        self.call_back(Scope::Attributes, file, &know);
        let is_free = know.is_empty() && others.iter().all(|(other, _)| self.waiting.resizes(file, *other));
        is_free.then_some(())
    }

    pub(crate) fn held_by_others(
        &self,
        session: u64,
        file: FileId,
        which: impl Fn(&Held) -> bool,
    ) -> Vec<(u64, u64)> {
        let others = self.held.on(file).filter(|(other, held)| *other != session && which(held));
        others.map(|(other, held)| (other, held.grant)).collect()
    }

    /// True if a session has a revocation open that covers this grant or a later one.
    fn is_called(&self, scope: Scope, session: u64, file: FileId, grant: u64) -> bool {
        self.calls.about(session, file).any(|(_, call)| call.scope == scope && call.grant >= grant)
    }

    fn call_back(&mut self, scope: Scope, file: FileId, holders: &[(u64, u64)]) {
        for (session, grant) in holders.iter().copied() {
            if !self.is_called(scope, session, file, grant) {
                self.call(Call::revocation(scope, session, Some(file), grant));
            }
        }
    }

    /// Grants a session that takes part a lease on the attributes of an inode, unless others want to change
    /// them. Returns its number; 0 for none. Call before the attributes are read.
    pub(crate) fn grant_attributes(&mut self, session: u64, file: FileId, now: Duration) -> u64 {
        if self.alone.is_some() {
            return 0;
        }
        if let Some(grant) = self.attributes.of(session, file) {
            // A session that has been called may still have a reply on its way under the same number.
            return if self.is_called(Scope::Attributes, session, file, grant) { 0 } else { grant };
        }
        let is_wanted = self.waiting.first(file, |other| other != session).is_some()
            || self.waiting.resizers(file).iter().any(|other| *other != session)
            || self.waiting.changers(file).iter().any(|other| *other != session);
        let may = self.may_get_leases(session)
            && !self.calls.owes_everything(session)
            && !is_wanted
            && self.held_by_others(session, file, |held| held.exclusive).is_empty()
            && !self.is_called(Scope::Attributes, session, file, 0)
            && self.attributes.may_be_granted(session, file, now);
        if !may {
            return 0;
        }
        let grant = self.next();
        self.attributes.grant(session, file, grant);
        grant
    }

    /// Lets a session change the attributes of inodes, until [`Self::end_change`], or notes that it waits
    /// until no other session caches them.
    pub(crate) fn ask_to_change(&mut self, session: u64, files: &[FileId], now: Duration) -> Asked<()> {
        let know = |file: &FileId| (*file, self.attributes.of_others(session, *file));
        let known: Vec<_> = files.iter().map(know).filter(|(_, others)| !others.is_empty()).collect();
        if known.is_empty() {
            self.attributes.begin_change(session, files, now);
            return Asked::Now(());
        }
        if !self.has_room(session) {
            return Asked::TooMany;
        }
        for (file, others) in known {
            self.attributes.cool(file, now);
            self.call_back(Scope::Attributes, file, &others);
            self.waiting.change(file, session);
        }
        Asked::Waits
    }

    /// A change that [`Self::ask_to_change`] has let begin has ended.
    pub(crate) fn end_change(&mut self, files: &[FileId]) {
        self.attributes.end_change(files);
    }

    /// Lets a session change names, or notes that it waits: after a restart others may cache names without a
    /// lease that the service knows.
    pub(crate) fn ask_to_change_names(&mut self, session: u64) -> Asked<()> {
        if !self.owes_everything(|other| other != session) {
            return Asked::Now(());
        }
        self.waiting.join(session);
        Asked::Waits
    }

    /// Asks other sessions that may have unsynced changes of a file to sync them. The outcome comes under the
    /// number `ticket` of the session, unless there is none to ask.
    pub(crate) fn ask_to_sync(&mut self, session: u64, file: FileId, ticket: u64) -> Asked<()> {
        let others = self.may_be_unsynced_at(session, file);
        if others.is_empty() {
            return Asked::Now(());
        }
        if self.waiting.has_ticket(session, ticket) {
            return Asked::Waits;
        }
        if !self.has_room_beside(session, others.len() - 1) {
            return Asked::TooMany;
        }
        self.waiting.begin_ticket(session, ticket, file, others.len());
        for (other, grant) in others {
            if !self.calls.share_sync(other, file, (session, ticket)) {
                self.call(Call::sync(other, file, grant, (session, ticket)));
            }
        }
        Asked::Waits
    }

    /// A sync has ended on which these tickets waited.
    fn end_syncs(&mut self, tickets: Vec<(u64, u64)>, errno: u16) {
        for (session, ticket) in tickets {
            if let Some(errno) = self.waiting.end_sync(session, ticket, errno) {
                self.tell(session, |news, number| news.sync(number, ticket, errno));
            }
        }
    }

    /// A session reports, before its answer, that it could not sync, or could not give up everything.
    pub(crate) fn failed(&mut self, session: u64, number: u64, errno: u32) {
        let Some(call) = self.calls.get(session, number) else { return };
        match (call.scope, call.file) {
            (Scope::Sync, _) => {
                let errno = u16::try_from(errno).ok().filter(|errno| *errno > 0).unwrap_or(EIO);
                self.calls.fail(session, number, errno);
            }
            (_, None) => {
                if let Some(leaving) = self.leaving(session) {
                    *leaving = Leaving::Failed;
                }
            }
            (_, Some(_)) => {}
        }
    }

    pub(crate) fn answered(&mut self, session: u64, number: u64) {
        let Some(call) = self.calls.remove(session, number) else { return };
        let was_revoked = (call.scope != Scope::Sync).then_some(call.file);
        match call.file {
            _ if call.scope == Scope::Sync => {
                let (tickets, errno) = call.into_tickets();
                self.end_syncs(tickets, errno);
            }
            Some(file) if call.scope == Scope::Attributes => {
                self.attributes.end(session, file, call.grant);
            }
            Some(file) => {
                self.held.end(session, file, call.grant);
                if self.calls.owes_everything(session) {
                    self.given_up.insert((session, file));
                }
            }
            None => {
                if !self.calls.owes_everything(session) {
                    self.given_up.retain(|(other, _)| *other != session);
                }
                self.held.end_all(session, call.grant);
                self.attributes.end_all(session, call.grant);
                self.gave_up_everything(session);
            }
        }
        self.note_alone();
        match was_revoked {
            None => {}
            Some(Some(file)) => self.serve_waiting(file),
            Some(None) => self.serve_all_waiting(),
        }
        // The answer may have been the last one, or the session is alone now.
        self.serve_joining();
    }

    /// A session has released a lease of its own accord, on the attributes of an inode or on its data.
    pub(crate) fn release(&mut self, session: u64, file: FileId, grant: u64, attributes: bool) {
        let has_ended = match attributes {
            true => self.attributes.end(session, file, grant),
            false => self.held.end(session, file, grant),
        };
        if has_ended {
            self.serve_waiting(file);
        }
    }

    /// Adds the leases of all sessions, and the calls that they have not answered.
    pub(crate) fn add_holdings(&self, all: &mut BTreeMap<u64, SessionHoldings>) {
        for (session, held) in self.held.all() {
            let SessionHoldings { shared_leases, exclusive_leases, .. } = all.entry(session).or_default();
            *(if held.exclusive { exclusive_leases } else { shared_leases }) += 1;
        }
        for (session, count) in self.attributes.counts() {
            all.entry(session).or_default().attribute_leases += count as u64;
        }
        self.calls.sessions().for_each(|session| all.entry(session).or_default().unanswered_calls += 1);
    }

    /// The files of which a session has an exclusive lease.
    pub(crate) fn exclusive_of(&self, session: u64) -> Vec<FileId> {
        self.held.exclusive_of(session)
    }

    /// True if a session waits for others with something that may hold up its own answers.
    pub(crate) fn holds_up(&self, session: u64) -> bool {
        self.waiting.holds_up(session)
    }

    /// The number of the oldest call to a session that is not answered.
    pub(crate) fn oldest_call(&self, session: u64) -> Option<u64> {
        self.calls.numbers_of(session, 0).next()
    }

    /// The number of the oldest call to each session that is not answered.
    pub(crate) fn oldest_calls(&self) -> BTreeMap<u64, u64> {
        self.calls.oldest()
    }

    /// True if a request of anybody is noted that waits.
    #[cfg(test)]
    pub(crate) fn is_anything_noted(&self) -> bool {
        self.waiting.is_anything_noted()
    }

    /// True if several sessions take part.
    pub(crate) fn are_shared(&self) -> bool {
        self.joined.len() > 1
    }

    /// Notes that a session may try again to lock byte ranges of an inode.
    pub(crate) fn note_unlocked(&mut self, session: u64, file: FileId) {
        self.tell(session, |news, number| news.unlock(number, file));
    }

    /// The number up to which calls and news of a session fit in one reply. The rest comes with the next one,
    /// so what the session reports as seen is all that it was sent.
    fn part(&self, session: u64, seen: u64) -> u64 {
        // No more of a kind can count.
        let most = MOST_AT_ONCE + 1;
        let news = self.news.get(&session).map(|news| news.numbers(most).collect());
        let mut numbers: Vec<u64> = news.unwrap_or_default();
        numbers.extend(self.calls.numbers_of(session, seen).take(most));
        if numbers.len() <= MOST_AT_ONCE {
            return u64::MAX;
        }
        *numbers.select_nth_unstable(MOST_AT_ONCE - 1).1
    }

    /// News for a session; none if there are none.
    pub(crate) fn news(&mut self, session: u64, request: &WatchRequest) -> Option<WatchReply> {
        // One that says so and is not has been told with the revocation of everything. It is not asked again:
        // while it does not answer, nobody else gets anything.
        let alone = self.alone == Some(session);
        let call = |(number, call): (u64, Call)| {
            let FileId { branch, ino } = call.file.unwrap_or(FileId::of_numbers(0, 0));
            let (is_sync, attributes) = (call.scope == Scope::Sync, call.scope == Scope::Attributes);
            LeaseCall { number, ino: ino.0, is_sync, grant: call.grant, branch: branch.0, attributes }
        };
        if let Some(news) = self.news.get_mut(&session) {
            news.seen(request.seen);
        }
        let upto = self.part(session, request.seen);
        let calls: Vec<LeaseCall> =
            self.calls.send(session, request.seen, upto).into_iter().map(call).collect();
        let mut reply = WatchReply::default();
        if let Some(news) = self.news.get_mut(&session) {
            reply = news.reply(upto);
            if news.is_empty() {
                self.news.remove(&session);
            }
        }
        let nothing = calls.is_empty() && !self.news.contains_key(&session) && alone == request.alone;
        (!nothing).then_some(WatchReply { alone, calls, ..reply })
    }
}

/// The error of a session whose requests all wait for others, or which has too many leases.
pub(crate) fn too_many() -> Failure {
    let why = format!(
        "request: {MOST_WAITING} requests of the session wait for other clients, or it has {MOST_LEASES} leases, which is the most"
    );
    Failure { kind: ErrorKind::Invalid, errno: 0, message: why }
}

/// Fails with [`Failure::ask_again`] if a request must wait.
pub(crate) fn now_or_again(asked: Asked<()>) -> Result<(), Failure> {
    match asked {
        Asked::Now(()) => Ok(()),
        Asked::Waits => Err(Failure::ask_again()),
        Asked::TooMany => Err(too_many()),
    }
}

#[cfg(test)]
mod tests;
