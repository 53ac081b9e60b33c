//! Leases on inodes: what a client may keep of a file, and when it must say what it keeps back.
//!
//! A shared lease lets a client keep what it read, an exclusive one also change size and time of the file before it
//! tells them. Nobody can be told without being asked: each client keeps one request waiting here (`Watch`), whose
//! reply brings the calls for it. Whoever wants what others hold waits until they have answered, or their sessions
//! have ended.
//!
//! A client that nobody else is beside asks for nothing ([`Leases::alone`]). The first request of a second one waits
//! until it has given up everything. After a restart nothing is known of who holds what: where there are several
//! sessions, each gives up everything before anything is granted.
//!
//! A change of size may come from a session whose lease is shared and on its way back: its kernel drops no page that
//! programs have changed before the change is answered. Whoever else has a lease gives it back first, and only where two such
//! changes wait for each other the second to come does not wait.
//!
//! Invariants:
//! - an exclusive lease of one session and any of another on one inode never exist together;
//! - a session that has not answered a call for an inode's lease is granted no other one on it;
//! - nothing is granted, and nobody joins, while another session has not answered a call to give up everything;
//! - a session is done with a stop only when it has no lease and has answered every call to give up everything;
//! - a call names the newest grant it means, and numbers of grants rise: a grant that comes late to its client is
//!   known to be void. They begin again with each start of the service, and mean nothing to another one;
//! - nobody waits for an answer while it holds what the answer may need: no lock of a service, and no turn but that
//!   of the inode's next lease.

use crate::error::MetaError;
use crate::session::SessionInfo;
use crate::target::MetaTarget;
use penstock_base::env::timeout;
use penstock_base::{HashMap, Ino, Kind as Todo};
use penstock_wire::names::{
    InodeRequest, LeaseCall, LeaseReply, LeaseRequest, SetAttrRequest, WatchReply, WatchRequest,
};
use penstock_wire::{Failure, Kind};
use prost::Message;
use rustix::io::Errno;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

/// Calls to settle that failed and are remembered for those who wait for them.
const MOST_FAILED: usize = 1024;
/// A request with a slot waits no longer for other clients before it is to be asked again.
const SLOT_WAIT: Duration = Duration::from_millis(100);
/// A waiting request is answered after this even without news, so that its client sees that the service lives.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug)]
struct Held {
    exclusive: bool,
    grant: u64,
}

#[derive(Clone, Copy, Debug)]
struct Call {
    session: u64,
    /// None for everything.
    ino: Option<Ino>,
    settle: bool,
    grant: u64,
    sent: bool,
}

/// Who holds what.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// Sessions that keep something, or may.
    joined: BTreeSet<u64>,
    /// The only one of them, when it knows or may know that it is.
    alone: Option<u64>,
    held: HashMap<Ino, BTreeMap<u64, Held>>,
    calls: BTreeMap<u64, Call>,
    /// Numbers grants and calls.
    last: u64,
    /// Calls to settle that could not be done, lately, with their errno.
    failed: VecDeque<(u64, u16)>,
    /// Inodes on which a session may try a lock again.
    unlocked: BTreeMap<u64, BTreeSet<Ino>>,
    /// Changes of size that wait for the leases of others, by inode and session.
    resizing: BTreeMap<(Ino, u64), u32>,
    /// Once the service stops: the sessions that it has asked for everything.
    closing: Option<BTreeMap<u64, Leaving>>,
}

/// A session that gives up everything for a stop of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    /// It was asked. What it read without a lease its kernel gives up only after requests that need one: it gets leases.
    Called,
    /// It was asked again, for the leases that it got meanwhile. It gets none.
    CalledAgain,
    /// It has nothing that only it knows, and gets nothing any more.
    Done,
    /// It could not make everything known, or durable, or has ended before it said that it did.
    Failed,
}

/// A change of size that waits, while it lives.
struct Resizing<'a>(&'a RefCell<Leases>, (Ino, u64));

impl Drop for Resizing<'_> {
    fn drop(&mut self) {
        let mut leases = self.0.borrow_mut();
        let waiting = leases.resizing.get_mut(&self.1).expect("it is counted while it waits");
        *waiting -= 1;
        if *waiting == 0 {
            leases.resizing.remove(&self.1);
        }
    }
}

impl Leases {
    /// After a restart: each of these sessions may hold anything.
    pub(crate) fn restored(sessions: impl Iterator<Item = u64>) -> Self {
        let mut leases = Self { joined: sessions.collect(), ..Self::default() };
        match leases.joined.len() {
            1 => leases.alone = leases.joined.first().copied(),
            _ => leases.joined.clone().into_iter().for_each(|session| leases.call_everything(session)),
        }
        leases
    }

    fn next(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The latest call, and who is alone: sessions wait to hear of these.
    fn to_tell(&self) -> (u64, Option<u64>) {
        (self.last, self.alone)
    }

    fn call_everything(&mut self, session: u64) {
        let grant = self.last;
        let number = self.next();
        self.calls.insert(number, Call { session, ino: None, settle: false, grant, sent: false });
    }

    /// Has every session give up everything, and lets none of them do anything after that.
    fn close(&mut self) {
        self.closing = Some(self.joined.iter().map(|session| (*session, Leaving::Called)).collect());
        self.alone = None;
        self.joined.clone().into_iter().for_each(|session| self.call_everything(session));
    }

    /// A session has said that it keeps nothing any more.
    pub(crate) fn is_done(&mut self, session: u64) {
        if let Some(leaving) = self.leaving(session).filter(|leaving| **leaving != Leaving::Failed) {
            *leaving = Leaving::Done;
        }
    }

    fn leaving(&mut self, session: u64) -> Option<&mut Leaving> {
        self.closing.as_mut()?.get_mut(&session)
    }

    /// A session has given up everything. Where it got leases meanwhile, a stop asks once more.
    fn gave_up_everything(&mut self, session: u64) {
        // An older call may be answered after this one was made: only the last answer knows of all that it got.
        if self.owes_everything(|other| other == session) {
            return;
        }
        let has_leases = self.held.values().any(|holders| holders.contains_key(&session));
        let Some(leaving) = self.leaving(session) else { return };
        *leaving = match *leaving {
            Leaving::Called if has_leases => Leaving::CalledAgain,
            Leaving::Failed => Leaving::Failed,
            _ => Leaving::Done,
        };
        if *leaving == Leaving::CalledAgain {
            self.call_everything(session);
        }
    }

    /// True if a stop of the service lets a session have leases, or there is none.
    fn may_have_leases(&self, session: u64) -> bool {
        self.closing.as_ref().is_none_or(|all| all.get(&session) == Some(&Leaving::Called))
    }

    fn owes_everything(&self, wanted: impl Fn(u64) -> bool) -> bool {
        self.calls.values().any(|call| call.ino.is_none() && wanted(call.session))
    }

    /// Lets a session take part. Returns whether it may go on.
    fn join(&mut self, session: u64) -> bool {
        if self.alone == Some(session) {
            return true;
        }
        if self.joined.insert(session)
            && let Some(other) = self.alone.take()
        {
            self.call_everything(other);
        }
        if self.owes_everything(|other| other == session) {
            // It has what it had, until it answers.
            return true;
        }
        if self.closing.is_some() || self.owes_everything(|_| true) {
            return false;
        }
        self.note_alone();
        true
    }

    /// The last one is alone.
    fn note_alone(&mut self) {
        if self.joined.len() == 1 && self.calls.is_empty() && self.closing.is_none() {
            self.alone = self.joined.first().copied();
            self.held.clear();
        }
    }

    /// A session keeps nothing any more. Without its end it may join again.
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
        self.calls.retain(|_, call| call.session != session);
        // It was ended without a word: nobody answers for it any more.
        if let Some(leaving @ (Leaving::Called | Leaving::CalledAgain)) = self.leaving(session) {
            *leaving = Leaving::Failed;
        }
        self.note_alone();
    }

    /// Grants a lease, or calls those back that are in the way.
    fn try_grant(&mut self, session: u64, ino: Ino, exclusive: bool) -> Option<u64> {
        if !self.may_have_leases(session)
            || self.owes_everything(|other| other != session)
            || self.is_called(session, ino, 0)
        {
            return None;
        }
        let in_the_way = self.held_by_others(session, ino, |held| exclusive || held.exclusive);
        if in_the_way.is_empty() {
            let grant = self.next();
            if self.alone != Some(session) {
                self.held.entry(ino).or_default().insert(session, Held { exclusive, grant });
            }
            return Some(grant);
        }
        self.call_back(ino, &in_the_way);
        None
    }

    /// Lets a session change a file's size, or calls the leases of others back. One that waits here too does not keep it.
    fn try_resize(&mut self, session: u64, ino: Ino) -> Option<()> {
        let own = self.held.get(&ino).and_then(|holders| holders.get(&session));
        if self.alone == Some(session) || own.is_some_and(|own| own.exclusive) {
            return Some(());
        }
        // After a restart others may hold anything, but for those that wait here too.
        let waits = |other: u64| self.resizing.keys().any(|(_, session)| *session == other);
        if self.owes_everything(|other| other != session && !waits(other)) {
            return None;
        }
        let others = self.held_by_others(session, ino, |_| true);
        self.call_back(ino, &others);
        others.iter().all(|(other, _)| self.resizing.contains_key(&(ino, *other))).then_some(())
    }

    fn held_by_others(&self, session: u64, ino: Ino, which: impl Fn(&Held) -> bool) -> Vec<(u64, u64)> {
        let holders = self.held.get(&ino).into_iter().flatten();
        let others = holders.filter(|(other, held)| **other != session && which(held));
        others.map(|(other, held)| (*other, held.grant)).collect()
    }

    /// Whether a session was called to give back a lease of this grant or a later one.
    fn is_called(&self, session: u64, ino: Ino, grant: u64) -> bool {
        let called = |call: &Call| {
            call.session == session && call.ino == Some(ino) && !call.settle && call.grant >= grant
        };
        self.calls.values().any(called)
    }

    fn call_back(&mut self, ino: Ino, holders: &[(u64, u64)]) {
        for (session, grant) in holders.iter().copied() {
            if !self.is_called(session, ino, grant) {
                let number = self.next();
                self.calls
                    .insert(number, Call { session, ino: Some(ino), settle: false, grant, sent: false });
            }
        }
    }

    /// Asks whoever else may have changed a file to make its changes known. Returns the call to wait for.
    fn call_settle(&mut self, session: u64, ino: Ino) -> Option<u64> {
        let holders = self.held.get(&ino)?;
        let (other, held) = holders.iter().find(|(other, held)| **other != session && held.exclusive)?;
        let (other, grant) = (*other, held.grant);
        let waits = |(_, call): &(&u64, &Call)| {
            call.session == other && call.ino == Some(ino) && call.settle && !call.sent
        };
        // One that its client has may be answered with what was known before.
        if let Some((number, _)) = self.calls.iter().find(waits) {
            return Some(*number);
        }
        let number = self.next();
        self.calls.insert(number, Call { session: other, ino: Some(ino), settle: true, grant, sent: false });
        Some(number)
    }

    /// A call to settle, or to give up everything, could not be done. Before it is answered.
    fn failed(&mut self, session: u64, number: u64, errno: u32) {
        let Some(call) = self.calls.get(&number).filter(|call| call.session == session) else { return };
        match (call.settle, call.ino) {
            (true, _) => {
                if self.failed.len() >= MOST_FAILED {
                    self.failed.pop_front();
                }
                self.failed.push_back((number, u16::try_from(errno).unwrap_or_default()));
            }
            (false, None) => {
                if let Some(leaving) = self.leaving(session) {
                    *leaving = Leaving::Failed;
                }
            }
            (false, Some(_)) => {}
        }
    }

    /// Whether a call to settle was answered, and how.
    fn settled(&self, number: u64) -> Option<Result<(), u16>> {
        if self.calls.contains_key(&number) {
            return None;
        }
        let failed = self.failed.iter().find(|(failed, _)| *failed == number);
        Some(failed.map_or(Ok(()), |(_, errno)| Err(*errno)))
    }

    fn answered(&mut self, session: u64, number: u64) {
        if self.calls.get(&number).is_none_or(|call| call.session != session) {
            return;
        }
        let call = self.calls.remove(&number).expect("it was just found");
        match call.ino {
            _ if call.settle => {}
            Some(ino) => self.drop_held(session, ino, call.grant),
            None => {
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

    fn drop_held(&mut self, session: u64, ino: Ino, grant: u64) {
        let Some(holders) = self.held.get_mut(&ino) else { return };
        if holders.get(&session).is_some_and(|held| held.grant <= grant) {
            holders.remove(&session);
        }
        if holders.is_empty() {
            self.held.remove(&ino);
        }
    }

    /// Whether several sessions take part.
    pub(crate) fn are_shared(&self) -> bool {
        self.joined.len() > 1
    }

    /// A session may try again to lock an inode's bytes.
    pub(crate) fn note_unlocked(&mut self, session: u64, ino: Ino) {
        self.unlocked.entry(session).or_default().insert(ino);
    }

    /// What a session must hear.
    fn news(&mut self, session: u64, request: &WatchRequest) -> Option<WatchReply> {
        let alone = self.alone == Some(session);
        if request.alone && !alone && !self.owes_everything(|other| other == session) {
            // It believes what is not so, and would ask again and again.
            self.call_everything(session);
        }
        let mut calls = Vec::new();
        for (number, call) in self.calls.range_mut((Bound::Excluded(request.seen), Bound::Unbounded)) {
            if call.session == session {
                call.sent = true;
                let ino = call.ino.map_or(0, |ino| ino.0);
                calls.push(LeaseCall { number: *number, ino, settle: call.settle, grant: call.grant });
            }
        }
        let unlocked: Vec<u64> =
            self.unlocked.remove(&session).into_iter().flatten().map(|ino| ino.0).collect();
        let nothing = calls.is_empty() && unlocked.is_empty() && alone == request.alone;
        (!nothing).then_some(WatchReply { alone, calls, unlocked })
    }
}

/// Whether a request makes its session one that may keep something.
pub fn joins(kind: Kind) -> bool {
    !matches!(kind, Kind::Hello | Kind::Ping | Kind::End | Kind::Watch | Kind::Sync | Kind::StatFs)
}

impl MetaTarget {
    /// Waits until a session may take part: others have given up what they kept without asking. Call before anything
    /// is locked.
    pub async fn join(&self, session: u64) -> Result<(), Failure> {
        self.wait_for(session, |leases| leases.join(session).then_some(())).await
    }

    /// Has every session make durable what it keeps and do nothing more, before the service stops. Returns those that could
    /// not, have not done so after `patience`, or were given up meanwhile, of those that are connected, as `is_connected` says
    /// of a number.
    pub async fn call_everything_back(
        &self,
        patience: Duration,
        is_connected: impl Fn(u64) -> bool,
    ) -> Vec<SessionInfo> {
        let takes_part =
            |info: &SessionInfo| self.leases.borrow().joined.contains(&info.id) && is_connected(info.id);
        let asked: Vec<SessionInfo> = self.sessions().into_iter().filter(takes_part).collect();
        self.leases.borrow_mut().close();
        self.lease_news.notify_waiters();
        let leaving = |info: &SessionInfo| self.leases.borrow_mut().leaving(info.id).copied();
        let answered = async {
            let waits = [Leaving::Called, Leaving::CalledAgain].map(Some);
            while asked.iter().any(|info| waits.contains(&leaving(info))) {
                self.lease_news.notified().await;
            }
        };
        timeout(&self.env, patience, answered).await;
        asked.into_iter().filter(|info| leaving(info) != Some(Leaving::Done)).collect()
    }

    /// Waits until what another session has changed of the inode that a request is about is known here. Call before
    /// anything is locked.
    pub async fn settle_elsewhere(&self, session: u64, body: &[u8]) -> Result<(), Failure> {
        let ino = Ino(InodeRequest::decode(body).map_err(MetaError::from)?.ino);
        let Some(number) = self.leases.borrow_mut().call_settle(session, ino) else { return Ok(()) };
        self.lease_news.notify_waiters();
        let settled = self.wait_for(session, |leases| leases.settled(number)).await?;
        settled.map_err(|errno| Failure {
            kind: Todo::Internal,
            errno: if errno == 0 { Errno::IO.raw_os_error() as u16 } else { errno },
            message: "another client cannot make known what it changed of the file".into(),
        })
    }

    /// Grants a lease once nobody is in the way.
    pub async fn grant(&self, session: u64, body: &[u8]) -> Result<Vec<u8>, Failure> {
        let request = LeaseRequest::decode(body).map_err(MetaError::from)?;
        if request.first != 0 || request.last != u64::MAX {
            let why = "a lease on a part of a file: this release has them on whole files".to_owned();
            return Err(MetaError::Request(why).into());
        }
        let ino = Ino(request.ino);
        let _turn = self.lease_turns.exclusive(ino).await;
        let granted =
            self.wait_for(session, |leases| leases.try_grant(session, ino, request.exclusive)).await?;
        Ok(LeaseReply { grant: granted }.encode_to_vec())
    }

    /// Waits until a change of attributes may be made: of a size, until nobody else keeps what was before. Call before
    /// anything is locked.
    pub async fn may_resize(&self, session: u64, body: &[u8]) -> Result<(), Failure> {
        if !self.leases.borrow().are_shared() {
            return Ok(());
        }
        let request = SetAttrRequest::decode(body).map_err(MetaError::from)?;
        if request.size.is_none() || request.grow {
            return Ok(());
        }
        let ino = Ino(request.ino);
        *self.leases.borrow_mut().resizing.entry((ino, session)).or_default() += 1;
        let _waiting = Resizing(&self.leases, (ino, session));
        // Another one that waits for this one goes on.
        self.lease_news.notify_waiters();
        let wait = self.wait_for(session, |leases| leases.try_resize(session, ino));
        // Its client may need the slot to settle what another waits for.
        timeout(&self.env, SLOT_WAIT, wait).await.unwrap_or_else(|| Err(Failure::ask_again()))
    }

    /// True if another session may know another size and another time of a file.
    pub(crate) fn is_unsettled(&self, session: u64, ino: Ino) -> bool {
        !self.leases.borrow().held_by_others(session, ino, |held| held.exclusive).is_empty()
    }

    async fn wait_for<T>(
        &self,
        session: u64,
        mut attempt: impl FnMut(&mut Leases) -> Option<T>,
    ) -> Result<T, Failure> {
        loop {
            let news = self.lease_news.notified();
            self.check_session(session)?;
            let (calls, alone) = self.leases.borrow().to_tell();
            let value = attempt(&mut self.leases.borrow_mut());
            let (calls_now, alone_now) = self.leases.borrow().to_tell();
            if alone_now != alone || value.is_none() && calls_now != calls {
                self.lease_news.notify_waiters();
            }
            match value {
                Some(value) => return Ok(value),
                None => news.await,
            }
        }
    }

    /// Takes a client's answers, and waits for what it must hear.
    pub async fn watch(&self, session: u64, body: &[u8]) -> Result<Vec<u8>, Failure> {
        let mut request = WatchRequest::decode(body).map_err(MetaError::from)?;
        if request.generation != self.target.config().generation {
            // Its numbers are of another start.
            request.seen = 0;
            request.answered.clear();
            request.failed.clear();
            request.released.clear();
        }
        {
            let mut leases = self.leases.borrow_mut();
            for released in &request.released {
                leases.drop_held(session, Ino(released.ino), released.grant);
            }
            request.failed.iter().for_each(|call| leases.failed(session, call.number, call.errno));
            request.answered.iter().for_each(|number| leases.answered(session, *number));
            if request.leaves {
                leases.is_done(session);
                leases.leave(session);
            }
        }
        if !request.answered.is_empty() || !request.released.is_empty() || request.leaves {
            self.lease_news.notify_waiters();
        }
        let nothing = WatchReply { alone: request.alone, ..WatchReply::default() };
        if !request.wait {
            return Ok(nothing.encode_to_vec());
        }
        let longest = self.lease().min(LONGEST_WAIT * 3) / 3;
        let wait = self.wait_for(session, |leases| leases.news(session, &request));
        let reply = timeout(&self.env, longest, wait).await.unwrap_or(Ok(nothing))?;
        Ok(reply.encode_to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u64 = 1;
    const SECOND: u64 = 2;

    fn calls_of(leases: &Leases, session: u64) -> Vec<u64> {
        let calls = leases.calls.iter().filter(|(_, call)| call.session == session && call.ino.is_none());
        calls.map(|(number, _)| *number).collect()
    }

    /// One session was alone and is called for the sake of another, and then for a stop. What it gets until the last answer it must
    /// give up too: an answer to the older call was taken for that, and the stop did not wait for what it had written.
    #[test]
    fn a_stop_waits_for_the_answers_to_all_calls() {
        let mut leases = Leases::restored([FIRST].into_iter());
        assert!(leases.join(FIRST));
        assert!(!leases.join(SECOND));
        leases.close();
        let [for_another, for_the_stop] = calls_of(&leases, FIRST)[..] else { panic!("two calls") };
        for number in calls_of(&leases, SECOND) {
            leases.answered(SECOND, number);
        }
        assert_eq!(leases.leaving(SECOND).copied(), Some(Leaving::Done));
        leases.try_grant(FIRST, Ino(7), true).expect("it may need one to answer");
        leases.answered(FIRST, for_another);
        assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::Called));
        leases.answered(FIRST, for_the_stop);
        assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::CalledAgain));
        assert_eq!(leases.try_grant(FIRST, Ino(8), true), None);
        let [last] = calls_of(&leases, FIRST)[..] else { panic!("one call") };
        leases.answered(FIRST, last);
        assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::Done));
        assert_eq!(leases.try_grant(FIRST, Ino(9), true), None);
    }

    #[test]
    fn a_stop_hears_of_what_could_not_be_made_known() {
        let mut leases = Leases::restored([FIRST].into_iter());
        leases.close();
        let [call] = calls_of(&leases, FIRST)[..] else { panic!("one call") };
        leases.failed(FIRST, call, 5);
        leases.answered(FIRST, call);
        leases.is_done(FIRST);
        assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::Failed));
    }

    /// The stop waited to its end for an answer of nobody.
    #[test]
    fn a_stop_waits_for_no_session_that_has_ended() {
        let mut leases = Leases::restored([FIRST, SECOND].into_iter());
        leases.close();
        leases.leave(FIRST);
        leases.is_done(SECOND);
        leases.leave(SECOND);
        assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::Failed));
        assert_eq!(leases.leaving(SECOND).copied(), Some(Leaving::Done));
    }

    /// A client and the service while that stops.
    struct Stop {
        leases: Leases,
        /// It has changed something since it last gave up everything.
        keeps: bool,
        /// Calls that have come to it, and answers that are on their way.
        heard: BTreeSet<u64>,
        answers: Vec<u64>,
        inodes: u64,
    }

    /// An event that may come next.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Grant,
        Hear,
        AnswerArrives,
        LastAnswerArrives,
        OtherJoins,
        Close,
    }

    impl Stop {
        /// Returns false where that cannot happen now.
        fn take(&mut self, step: Step) -> bool {
            match step {
                Step::Grant => {
                    self.inodes += 1;
                    let granted = self.leases.try_grant(FIRST, Ino(self.inodes), true).is_some();
                    self.keeps |= granted;
                    granted
                }
                Step::Hear => {
                    let next =
                        calls_of(&self.leases, FIRST).into_iter().find(|call| !self.heard.contains(call));
                    let Some(call) = next else { return false };
                    self.heard.insert(call);
                    self.answers.push(call);
                    self.keeps = false;
                    true
                }
                Step::AnswerArrives if !self.answers.is_empty() => {
                    let answer = self.answers.remove(0);
                    self.leases.answered(FIRST, answer);
                    true
                }
                // Over another connection.
                Step::LastAnswerArrives if self.answers.len() > 1 => {
                    let answer = self.answers.pop().expect("there are two");
                    self.leases.answered(FIRST, answer);
                    true
                }
                Step::OtherJoins if !self.leases.joined.contains(&SECOND) => {
                    self.leases.join(SECOND);
                    true
                }
                Step::Close if self.leases.closing.is_none() => {
                    self.leases.close();
                    let others = calls_of(&self.leases, SECOND);
                    others.into_iter().for_each(|call| self.leases.answered(SECOND, call));
                    true
                }
                _ => false,
            }
        }
    }

    /// Whatever the order: a client that a stop takes for done keeps nothing and gets nothing, and one that has answered all that it
    /// heard is not waited for.
    #[test]
    fn a_stop_is_done_with_a_client_that_keeps_nothing_in_every_order() {
        const STEPS: [Step; 6] = [
            Step::Grant,
            Step::Hear,
            Step::AnswerArrives,
            Step::LastAnswerArrives,
            Step::OtherJoins,
            Step::Close,
        ];
        let (mut orders, mut done) = (0, 0);
        let mut left: Vec<Vec<Step>> = vec![Vec::new()];
        while let Some(order) = left.pop() {
            let mut stop = Stop {
                leases: Leases::restored([FIRST].into_iter()),
                // It was alone, and asked for nothing that it changed.
                keeps: true,
                heard: BTreeSet::new(),
                answers: Vec::new(),
                inodes: 0,
            };
            if !order.iter().all(|step| stop.take(*step)) {
                continue;
            }
            orders += 1;
            if order.len() < 9 {
                left.extend(STEPS.map(|step| [&order[..], &[step]].concat()));
            }
            if stop.leases.leaving(FIRST).copied() == Some(Leaving::Done) {
                done += 1;
                assert!(!stop.keeps, "{order:?}");
                assert_eq!(stop.leases.try_grant(FIRST, Ino(0), true), None, "{order:?}");
            }
            // It goes on until it has heard and answered everything.
            while stop.take(Step::Hear) || stop.take(Step::AnswerArrives) {}
            let waits = [Leaving::Called, Leaving::CalledAgain].map(Some);
            assert!(!waits.contains(&stop.leases.leaving(FIRST).copied()), "{order:?} leaves it waiting");
        }
        assert!(orders > 1000 && done > 100, "{orders} orders, {done} of them done");
    }
}
