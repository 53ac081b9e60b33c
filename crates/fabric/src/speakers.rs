//! The current connection of each session: requests that arrive late over an older connection are ignored.
//!
//! After a loss of its connection a client sends every request without a reply again over the next one, and
//! continues. Requests that it sent over the old connection may still arrive later. Those with a sequence are
//! recognised as repeats. A change of data has no sequence, and would overwrite newer data with old.
//!
//! Invariants:
//! - once Hello has bound a session to a connection, requests of that session over older ones are not served;
//! - a change of data begins after the changes of its session that came over older connections have ended.
//!
//! There is an entry for the session of each connection, and for each session with changes in flight.

use penstock_wire::Kind;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use tokio::sync::Notify;

#[derive(Default)]
pub(crate) struct Speakers {
    sessions: RefCell<BTreeMap<u64, Rc<Speaker>>>,
}

/// A connection of one session, with a link to the session's older ones that still have changes in flight.
struct Speaker {
    connection: u64,
    /// Signalled when the session has a newer connection.
    over: Rc<Notify>,
    /// True if the connection is closed.
    left: Cell<bool>,
    /// The number of changes of data that came over it and are in flight.
    changes: Cell<u64>,
    ended: Notify,
    before: Option<Rc<Speaker>>,
}

/// A guard for a change of data in flight.
pub(crate) struct Change {
    speakers: Rc<Speakers>,
    session: u64,
    speaker: Rc<Speaker>,
}

/// True for a request that changes data and has no sequence.
fn is_change(kind: Kind) -> bool {
    matches!(kind, Kind::Write | Kind::Space)
}

impl Speaker {
    /// This connection and its predecessors, newest first.
    fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |speaker| speaker.before.as_deref())
    }
}

impl Speakers {
    /// Notes that a request of `session` came over a connection, which becomes the current one of the
    /// session. `over` is signalled when a newer one replaces it. Fails if a newer one already has. For a
    /// change of data, returns a guard whose [`Change::turn`] the caller must await.
    pub(crate) fn hear(
        self: &Rc<Self>,
        session: u64,
        (connection, over): (u64, &Rc<Notify>),
        kind: Kind,
    ) -> Result<Option<Change>, Newer> {
        let mut sessions = self.sessions.borrow_mut();
        let speaker = match sessions.get(&session) {
            Some(speaker) if speaker.connection > connection => return Err(Newer),
            Some(speaker) if speaker.connection == connection => {
                speaker.left.set(false);
                speaker.clone()
            }
            found => {
                if let Some(speaker) = found {
                    speaker.over.notify_one();
                }
                let mut before = found.cloned();
                while let Some(idle) = before.take_if(|speaker| speaker.changes.get() == 0) {
                    before.clone_from(&idle.before);
                }
                let (left, changes, ended) = Default::default();
                let over = over.clone();
                let speaker = Rc::new(Speaker { connection, over, left, changes, ended, before });
                sessions.insert(session, speaker.clone());
                speaker
            }
        };
        Ok(is_change(kind).then(|| {
            speaker.changes.set(speaker.changes.get() + 1);
            Change { speakers: self.clone(), session, speaker }
        }))
    }

    /// True if a session has an open connection.
    pub(crate) fn speaks(&self, session: u64) -> bool {
        self.sessions.borrow().get(&session).is_some_and(|speaker| !speaker.left.get())
    }

    /// Notes that a connection is closed. Returns true if it was the current one of a session.
    pub(crate) fn leave(&self, session: u64, connection: u64) -> bool {
        let sessions = self.sessions.borrow();
        let current = sessions.get(&session).filter(|speaker| speaker.connection == connection);
        current.into_iter().for_each(|speaker| speaker.left.set(true));
        let is_current = current.is_some();
        drop(sessions);
        self.forget(session);
        is_current
    }

    /// Removes the entry of a session without a connection and without changes in flight.
    fn forget(&self, session: u64) {
        let mut sessions = self.sessions.borrow_mut();
        let is_over = |speaker: &Rc<Speaker>| {
            speaker.left.get() && speaker.all().all(|speaker| speaker.changes.get() == 0)
        };
        if sessions.get(&session).is_some_and(is_over) {
            sessions.remove(&session);
        }
    }
}

/// The error that the client has switched to a newer connection.
#[derive(Debug)]
pub(crate) struct Newer;

impl Change {
    /// Waits until the changes of its session that came over older connections have ended.
    pub(crate) async fn turn(&self) {
        for older in self.speaker.all().skip(1) {
            loop {
                let ended = older.ended.notified();
                if older.changes.get() == 0 {
                    break;
                }
                ended.await;
            }
        }
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        self.speaker.changes.set(self.speaker.changes.get() - 1);
        self.speaker.ended.notify_waiters();
        self.speakers.forget(self.session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const SESSION: u64 = 9;

    fn hear(speakers: &Rc<Speakers>, connection: u64, kind: Kind) -> Result<Option<Change>, Newer> {
        speakers.hear(SESSION, (connection, &Rc::default()), kind)
    }

    fn change(speakers: &Rc<Speakers>, connection: u64) -> Change {
        hear(speakers, connection, Kind::Write).unwrap().unwrap()
    }

    #[test]
    fn a_change_waits_for_those_of_older_connections() {
        let speakers = Rc::new(Speakers::default());
        let (first, second) = (change(&speakers, 1), change(&speakers, 1));
        assert!(first.turn().now_or_never().is_some() && second.turn().now_or_never().is_some());
        speakers.leave(SESSION, 1);
        // A connection without changes lies between them.
        assert!(hear(&speakers, 2, Kind::Read).unwrap().is_none());
        let third = change(&speakers, 3);
        assert!(hear(&speakers, 1, Kind::Read).is_err() && hear(&speakers, 2, Kind::Ping).is_err());
        drop(first);
        assert!(third.turn().now_or_never().is_none());
        drop(second);
        assert!(third.turn().now_or_never().is_some());
    }

    #[test]
    fn who_has_left_is_forgotten_when_its_changes_have_ended() {
        let speakers = Rc::new(Speakers::default());
        let old = change(&speakers, 1);
        let new = change(&speakers, 2);
        speakers.leave(SESSION, 2);
        drop(new);
        speakers.leave(SESSION, 1);
        assert_eq!(speakers.sessions.borrow().len(), 1, "an older change is being done");
        drop(old);
        assert!(speakers.sessions.borrow().is_empty());
        assert!(hear(&speakers, 3, Kind::Read).unwrap().is_none());
        speakers.leave(SESSION, 3);
        assert!(speakers.sessions.borrow().is_empty());
    }
}
