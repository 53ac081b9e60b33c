//! Requests that wait for other clients: for leases, in the order of their arrival, to change a size or other
//! attributes, to take part, and for others to sync.
//!
//! A session waits for one lease on a file at a time. A request for more than the first one asked for keeps
//! its place. Everything here is counted by session, so that none fills the memory.

use crate::by_session::BySession;
use crate::counts::Counts;
use penstock_base::{FileId, HashMap};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most requests of a session that wait.
pub(crate) const MOST_WAITING: usize = 1 << 16;

/// A request for a lease that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) session: u64,
    pub(super) exclusive: bool,
}

/// The wait of one GetAttr request for the syncs of others.
#[derive(Clone, Copy, Debug)]
struct Ticket {
    file: FileId,
    /// Calls that are not answered.
    left: usize,
    /// Of a client that could not sync.
    errno: u16,
}

/// Changes that wait, by file and by session.
#[derive(Debug, Default)]
struct Changes {
    by_file: BTreeSet<(FileId, u64)>,
    by_session: BySession,
}

impl Changes {
    /// A session waits to change a file. Returns false if it did before.
    fn add(&mut self, file: FileId, session: u64) -> bool {
        let is_new = self.by_file.insert((file, session));
        if is_new {
            self.by_session.add(session, file);
        }
        is_new
    }

    /// A session does not wait any more to change a file. Returns false if it did not.
    fn remove(&mut self, file: FileId, session: u64) -> bool {
        let was_there = self.by_file.remove(&(file, session));
        if was_there {
            self.by_session.remove(session, file);
        }
        was_there
    }

    /// The sessions that wait to change a file.
    fn sessions(&self, file: FileId) -> Vec<u64> {
        self.by_file.range((file, 0)..=(file, u64::MAX)).map(|(_, session)| *session).collect()
    }

    fn files(&self) -> impl Iterator<Item = FileId> {
        self.by_file.iter().map(|(file, _)| *file)
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.by_file.is_empty() && self.by_session.is_empty()
    }
}

/// All requests that wait.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    leases: HashMap<FileId, VecDeque<Wanted>>,
    wanting: BySession,
    /// Changes of size.
    resizing: Changes,
    /// Changes of other attributes and of names.
    changing: Changes,
    joining: BTreeSet<u64>,
    /// By session and number of the client.
    tickets: BTreeMap<(u64, u64), Ticket>,
    /// The number of requests of each session, except to take part.
    counts: Counts<u64>,
}

impl Waiting {
    /// True if a session may wait for one thing more, beside this many outcomes that it has not taken.
    pub(super) fn has_room(&self, session: u64, outcomes: usize) -> bool {
        self.counts.of(session) + outcomes < MOST_WAITING
    }

    /// The number of things for which a session waits.
    pub(super) fn count(&self, session: u64) -> usize {
        self.counts.of(session)
    }

    /// A session waits for a lease.
    pub(super) fn want(&mut self, file: FileId, wanted: Wanted) {
        let queue = self.leases.entry(file).or_default();
        match queue.iter_mut().find(|other| other.session == wanted.session) {
            Some(same) => same.exclusive |= wanted.exclusive,
            None => {
                queue.push_back(wanted);
                self.wanting.add(wanted.session, file);
                self.counts.add(wanted.session);
            }
        }
    }

    /// True if a session waits for an exclusive lease on a file.
    pub(super) fn wants_exclusive(&self, file: FileId, session: u64) -> bool {
        self.first(file, |other| other == session).is_some_and(|wanted| wanted.exclusive)
    }

    /// The first request for a lease on a file of those that are wanted.
    pub(super) fn first(&self, file: FileId, is_wanted: impl Fn(u64) -> bool) -> Option<Wanted> {
        self.leases.get(&file)?.iter().find(|wanted| is_wanted(wanted.session)).copied()
    }

    /// A session waits for no lease on a file any more. Returns true if it did.
    pub(super) fn end_want(&mut self, file: FileId, session: u64) -> bool {
        let Some(queue) = self.leases.get_mut(&file) else { return false };
        let before = queue.len();
        queue.retain(|wanted| wanted.session != session);
        let ended = before - queue.len();
        if queue.is_empty() {
            self.leases.remove(&file);
        }
        assert!(ended <= 1, "session {session} waits once for a lease on {file}");
        if ended == 1 {
            self.wanting.remove(session, file);
            self.counts.take(session, 1);
        }
        ended == 1
    }

    /// The files on whose leases, sizes or attributes somebody waits.
    pub(super) fn files(&self) -> BTreeSet<FileId> {
        self.leases.keys().copied().chain(self.resizing.files()).chain(self.changing.files()).collect()
    }

    /// A session waits to change the size of a file.
    pub(super) fn resize(&mut self, file: FileId, session: u64) {
        if self.resizing.add(file, session) {
            self.counts.add(session);
        }
    }

    /// A session changes the size of a file now, or does not want to any more.
    pub(super) fn end_resize(&mut self, file: FileId, session: u64) {
        if self.resizing.remove(file, session) {
            self.counts.take(session, 1);
        }
    }

    /// True if a session waits to change the size of this file.
    pub(super) fn resizes(&self, file: FileId, session: u64) -> bool {
        self.resizing.by_file.contains(&(file, session))
    }

    /// True if a session waits to change the size of any file.
    pub(super) fn resizes_any(&self, session: u64) -> bool {
        self.resizing.by_session.count(session) > 0
    }

    /// The sessions that wait to change the size of a file.
    pub(super) fn resizers(&self, file: FileId) -> Vec<u64> {
        self.resizing.sessions(file)
    }

    /// A session waits to change the attributes of an inode.
    pub(super) fn change(&mut self, file: FileId, session: u64) {
        if self.changing.add(file, session) {
            self.counts.add(session);
        }
    }

    /// A session does not wait to change the attributes of an inode any more.
    pub(super) fn end_change(&mut self, file: FileId, session: u64) {
        if self.changing.remove(file, session) {
            self.counts.take(session, 1);
        }
    }

    /// The sessions that wait to change the attributes of an inode.
    pub(super) fn changers(&self, file: FileId) -> Vec<u64> {
        self.changing.sessions(file)
    }

    /// A session waits to take part.
    pub(super) fn join(&mut self, session: u64) {
        self.joining.insert(session);
    }

    /// Takes the sessions that wait to take part.
    pub(super) fn take_joining(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.joining)
    }

    /// A session waits for this many syncs of a file by others. Each of them counts: it is a call.
    pub(super) fn begin_ticket(&mut self, session: u64, ticket: u64, file: FileId, left: usize) {
        assert!(left > 0, "there is something to wait for");
        (0..left).for_each(|_| self.counts.add(session));
        let before = self.tickets.insert((session, ticket), Ticket { file, left, errno: 0 });
        assert!(before.is_none(), "a ticket is begun once");
    }

    /// True if a session waits under this number.
    pub(super) fn has_ticket(&self, session: u64, ticket: u64) -> bool {
        self.tickets.contains_key(&(session, ticket))
    }

    /// The files for whose syncs a session waits.
    pub(super) fn synced(&self, session: u64) -> BTreeSet<FileId> {
        self.tickets_of(session).map(|(_, ticket)| ticket.file).collect()
    }

    fn tickets_of(&self, session: u64) -> impl Iterator<Item = (u64, Ticket)> {
        let tickets = self.tickets.range((session, 0)..=(session, u64::MAX));
        tickets.map(|((_, number), ticket)| (*number, *ticket))
    }

    /// One of the syncs for a ticket has ended. Returns the errno, 0 for none, if it was the last.
    pub(super) fn end_sync(&mut self, session: u64, ticket: u64, errno: u16) -> Option<u16> {
        let waits = self.tickets.get_mut(&(session, ticket))?;
        waits.left -= 1;
        waits.errno = if waits.errno == 0 { errno } else { waits.errno };
        let Ticket { left, errno, .. } = *waits;
        self.counts.take(session, 1);
        if left > 0 {
            return None;
        }
        self.tickets.remove(&(session, ticket));
        Some(errno)
    }

    /// True if any request waits, except to take part.
    #[cfg(test)]
    pub(super) fn is_anything_noted(&self) -> bool {
        let changes = !self.resizing.is_empty() || !self.changing.is_empty();
        let wants = !self.leases.is_empty() || !self.wanting.is_empty();
        let nothing = !wants && !changes && self.tickets.is_empty();
        !nothing || !self.counts.is_empty()
    }

    /// True if a session waits for others with something that may hold up its own answers: its kernel keeps
    /// pages back during a change of size, and a lease is in use while attributes are asked for.
    pub(super) fn holds_up(&self, session: u64) -> bool {
        self.resizes_any(session) || self.tickets_of(session).next().is_some()
    }

    /// A session waits for nothing any more. Returns the files for which it did.
    pub(super) fn end(&mut self, session: u64) -> BTreeSet<FileId> {
        let mut files: BTreeSet<FileId> = self.wanting.files(session).collect();
        files.iter().for_each(|file| assert!(self.end_want(*file, session), "it waits for {file}"));
        let resized: Vec<FileId> = self.resizing.by_session.files(session).collect();
        resized.iter().for_each(|file| self.end_resize(*file, session));
        files.extend(resized);
        let changed: Vec<FileId> = self.changing.by_session.files(session).collect();
        changed.into_iter().for_each(|file| self.end_change(file, session));
        self.joining.remove(&session);
        for (number, ticket) in self.tickets_of(session).collect::<Vec<_>>() {
            self.tickets.remove(&(session, number));
            self.counts.take(session, ticket.left);
        }
        assert_eq!(self.counts.of(session), 0, "session {session} waits for nothing");
        files
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId::of_numbers(0, 7);

    #[test]
    fn requests_for_a_lease_keep_their_order_and_count_once() {
        let mut waiting = Waiting::default();
        let wanted = |session, exclusive| Wanted { session, exclusive };
        waiting.want(FILE, wanted(1, false));
        waiting.want(FILE, wanted(2, true));
        waiting.want(FILE, wanted(1, true));
        assert_eq!(waiting.first(FILE, |_| true), Some(wanted(1, true)), "it keeps its place");
        assert_eq!(waiting.first(FILE, |session| session != 1), Some(wanted(2, true)));
        assert!(waiting.end_want(FILE, 1) && !waiting.end_want(FILE, 1));
        assert_eq!(waiting.first(FILE, |_| true), Some(wanted(2, true)));
        assert_eq!(waiting.end(2), BTreeSet::from([FILE]));
        assert!(waiting.leases.is_empty() && waiting.counts.is_empty());
    }

    #[test]
    fn a_ticket_ends_with_its_last_sync_and_the_first_error() {
        let mut waiting = Waiting::default();
        waiting.begin_ticket(1, 9, FILE, 3);
        assert!(waiting.has_ticket(1, 9) && !waiting.has_ticket(2, 9));
        assert_eq!((waiting.count(1), waiting.synced(1)), (3, BTreeSet::from([FILE])));
        assert_eq!(waiting.end_sync(1, 9, 0), None);
        assert_eq!(waiting.end_sync(1, 9, 28), None);
        assert_eq!(waiting.end_sync(1, 9, 5), Some(28));
        assert_eq!(waiting.end_sync(1, 9, 5), None, "it has ended");
        assert!(waiting.counts.is_empty());
    }

    #[test]
    fn what_a_session_waits_for_is_bounded_and_ends_with_it() {
        let mut waiting = Waiting::default();
        for number in 0..MOST_WAITING as u64 {
            assert!(waiting.has_room(1, 0));
            match number % 4 {
                0 => waiting.want(FileId::of_numbers(0, number), Wanted { session: 1, exclusive: true }),
                1 => waiting.resize(FileId::of_numbers(0, number), 1),
                2 => waiting.change(FileId::of_numbers(0, number), 1),
                _ => waiting.begin_ticket(1, number, FILE, 1),
            }
        }
        assert!(!waiting.has_room(1, 0) && waiting.has_room(2, 0));
        waiting.join(1);
        waiting.end(1);
        assert!(waiting.has_room(1, 0) && waiting.take_joining().is_empty());
        assert!(waiting.tickets.is_empty() && waiting.resizing.is_empty() && waiting.leases.is_empty());
        assert!(waiting.changing.is_empty() && !waiting.is_anything_noted());
    }
}
