//! The parts of clients that are in use by a request, until it drops them.

use super::{Clients, SlotKey};
use crate::table::{Outcome, Request};
use penstock_base::FileId;
use penstock_base::locks::Exclusive;
use penstock_base::rank::RankedKey;
use std::rc::Rc;

/// A change of the attributes of inodes that is being carried out, until this is dropped.
#[must_use]
pub struct Changing {
    pub(super) clients: Rc<Clients>,
    pub(super) files: Vec<FileId>,
}

impl std::fmt::Debug for Changing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Changing({:?})", self.files)
    }
}

impl Drop for Changing {
    fn drop(&mut self) {
        self.clients.leases.borrow_mut().end_change(&self.files);
    }
}

/// One request of a session that is being executed, until it is dropped.
pub struct Serving {
    pub(super) clients: Rc<Clients>,
    pub(super) session: u64,
    pub(super) number: u64,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let now = self.clients.env.now();
        self.clients.sessions.borrow_mut().end(self.session, self.number, now);
        self.clients.ended.notify_waiters();
    }
}

/// The turn of a session to repeat a change, or a request that waits for it, until it is dropped.
pub struct RepeatTurn {
    pub(super) clients: Rc<Clients>,
    pub(super) session: u64,
    pub(super) number: u64,
    /// False for one that only waits for its turn.
    pub(super) is_change: bool,
    /// False while the request waits. It may be given up with its connection.
    pub(super) has_come: bool,
}

impl Drop for RepeatTurn {
    fn drop(&mut self) {
        let is_new = {
            let mut recovery = self.clients.recovery.borrow_mut();
            recovery.wants_no_more(self.session, self.number);
            self.has_come && self.is_change && recovery.has_made(self.session, self.number)
        };
        if is_new {
            self.clients.progressed(self.session);
        }
        self.clients.recovers.notify_waiters();
    }
}

/// The slot of a request with a sequence number.
pub enum Slot<'a> {
    /// The request must be executed. It owns the slot until its outcome is kept.
    Execute(Owned<'a>),
    /// It was executed before, with this outcome.
    Done(Outcome),
}

/// A slot that a request owns while it is executed.
pub struct Owned<'a> {
    pub(super) clients: &'a Clients,
    pub(super) who: Request,
    pub(super) _slot: RankedKey<Exclusive<SlotKey>>,
}

impl Owned<'_> {
    /// Keeps the outcome for repeats of the request.
    pub fn keep(self, outcome: &Outcome) {
        self.clients.sessions.borrow_mut().keep(self.who, outcome);
    }
}
