//! The connection that speaks for a session.
//!
//! A client whose connection broke sends everything that has no reply again over the next one, and goes on. What it had sent before may come
//! all the same, later. A request with a sequence is told by that; a change of data has none, and would put old bytes in the
//! place of what was written since.
//!
//! Invariants:
//! - once a session was heard over a connection, what comes over an older one is not done;
//! - a change of data begins when those of its session that came over older connections have ended.
//!
//! There is an entry for the last session of each connection, and for sessions with changes that are being done.

use penstock_wire::Kind;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use tokio::sync::Notify;

#[derive(Default)]
pub(crate) struct Speakers {
    sessions: RefCell<BTreeMap<u64, Rc<Speaker>>>,
}

/// A connection as it speaks for one session.
struct Speaker {
    connection: u64,
    /// Told when a newer connection speaks for the session.
    over: Rc<Notify>,
    /// The connection is closed, or speaks for another session.
    left: Cell<bool>,
    /// Changes of data that came over it and have not ended.
    changes: Cell<u64>,
    ended: Notify,
    before: Option<Rc<Speaker>>,
}

/// A change of data, until it has ended.
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
    /// Itself, and those before it.
    fn all(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |speaker| speaker.before.as_deref())
    }
}

impl Speakers {
    /// A request came over a connection, which is told by `over` when a newer one speaks for the session. Fails where one does.
    /// A change of data waits for its turn.
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

    /// True if a connection speaks for a session.
    pub(crate) fn speaks(&self, session: u64) -> bool {
        self.sessions.borrow().get(&session).is_some_and(|speaker| !speaker.left.get())
    }

    /// A connection speaks for a session no more.
    pub(crate) fn leave(&self, session: u64, connection: u64) {
        if let Some(speaker) = self.sessions.borrow().get(&session)
            && speaker.connection == connection
        {
            speaker.left.set(true);
        }
        self.forget(session);
    }

    /// Forgets who spoke for a session, if nothing of it is being done and nobody does any more.
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

/// The client has gone on over a newer connection.
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
        // One without changes stands between them.
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
