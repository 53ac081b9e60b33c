//! Calls of the service to clients that are not answered: revocations of one lease or of everything, and
//! requests to sync a file.
//!
//! After a restart every client may ask every other one to sync files, so the calls are found by session and
//! by file without a look at all of them.

use penstock_base::FileId;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// The part of a client's cache that a call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// The lease on the data of a file goes; without a file, everything.
    Data,
    /// The lease on attributes goes.
    Attributes,
    /// The file is synced, and its lease stays.
    Sync,
}

/// One call.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) session: u64,
    /// The inode; none for a revocation of everything.
    pub(super) file: Option<FileId>,
    pub(super) scope: Scope,
    pub(super) grant: u64,
    sent: bool,
    /// The waits for a sync that end with the answer: session and its number for the wait.
    tickets: Vec<(u64, u64)>,
    /// The errno of a client that could not sync.
    failed: Option<u16>,
}

impl Call {
    /// A revocation of one lease, or without a file of everything, up to this grant.
    pub(super) fn revocation(scope: Scope, session: u64, file: Option<FileId>, grant: u64) -> Self {
        Self { session, file, scope, grant, sent: false, tickets: Vec::new(), failed: None }
    }

    /// A request to sync a file, for the wait of another session.
    pub(super) fn sync(session: u64, file: FileId, grant: u64, ticket: (u64, u64)) -> Self {
        Self { tickets: vec![ticket], ..Self::revocation(Scope::Sync, session, Some(file), grant) }
    }

    /// The waits that end with the answer, and the errno of the sync; 0 if it did not fail.
    pub(super) fn into_tickets(self) -> (Vec<(u64, u64)>, u16) {
        (self.tickets, self.failed.unwrap_or_default())
    }
}

/// All calls, by number.
#[derive(Debug, Default)]
pub(super) struct Calls {
    all: BTreeMap<u64, Call>,
    /// Session and number of each.
    by_session: BTreeSet<(u64, u64)>,
    /// File, session and number of each.
    by_file: BTreeSet<(Option<FileId>, u64, u64)>,
}

impl Calls {
    /// Adds a call under a number that is higher than all before.
    pub(super) fn insert(&mut self, number: u64, call: Call) {
        assert!(self.all.last_key_value().is_none_or(|(last, _)| *last < number), "numbers rise");
        self.by_session.insert((call.session, number));
        self.by_file.insert((call.file, call.session, number));
        self.all.insert(number, call);
    }

    /// Returns a call to this session.
    pub(super) fn get(&self, session: u64, number: u64) -> Option<&Call> {
        self.all.get(&number).filter(|call| call.session == session)
    }

    /// Another wait ends with the answer to a sync of this file. Returns false if there is none that was not
    /// sent yet: one that was may be answered with an older state of the file.
    pub(super) fn share_sync(&mut self, session: u64, file: FileId, ticket: (u64, u64)) -> bool {
        let unsent = self.about(session, file).find(|(_, call)| call.scope == Scope::Sync && !call.sent);
        let Some((number, _)) = unsent else { return false };
        self.all.get_mut(&number).expect("it was found").tickets.push(ticket);
        true
    }

    /// A session waits for no sync of this file any more. A call that nobody else waits for is not made, if
    /// it was not sent yet.
    pub(super) fn withdraw_syncs(&mut self, file: FileId, waiter: u64) {
        let about = self.by_file.range((Some(file), 0, 0)..=(Some(file), u64::MAX, u64::MAX));
        for (session, number) in about.map(|(_, session, number)| (*session, *number)).collect::<Vec<_>>() {
            let call = self.all.get_mut(&number).expect("every call that is listed is there");
            if call.scope == Scope::Sync && !call.sent {
                call.tickets.retain(|(waits, _)| *waits != waiter);
                if call.tickets.is_empty() {
                    self.remove(session, number);
                }
            }
        }
    }

    /// The client could not sync, for this reason. The last one that it reports counts.
    pub(super) fn fail(&mut self, session: u64, number: u64, errno: u16) {
        if let Some(call) = self.all.get_mut(&number).filter(|call| call.session == session) {
            call.failed = Some(errno);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Removes a call to this session.
    pub(super) fn remove(&mut self, session: u64, number: u64) -> Option<Call> {
        self.get(session, number)?;
        let call = self.all.remove(&number)?;
        assert!(self.by_session.remove(&(session, number)), "every call is listed by session");
        assert!(self.by_file.remove(&(call.file, session, number)), "every call is listed by file");
        Some(call)
    }

    /// Removes all calls to a session, and returns them.
    pub(super) fn remove_all(&mut self, session: u64) -> Vec<Call> {
        let numbers: Vec<u64> = self.numbers_of(session, 0).collect();
        numbers.into_iter().filter_map(|number| self.remove(session, number)).collect()
    }

    /// The numbers of the calls to a session after a number, in order.
    pub(super) fn numbers_of(&self, session: u64, after: u64) -> impl Iterator<Item = u64> {
        let range = (Bound::Excluded((session, after)), Bound::Included((session, u64::MAX)));
        self.by_session.range(range).map(|(_, number)| *number)
    }

    fn about_file(
        &self,
        session: u64,
        file: Option<FileId>,
    ) -> impl DoubleEndedIterator<Item = (u64, &Call)> {
        let numbers = self.by_file.range((file, session, 0)..=(file, session, u64::MAX));
        numbers.map(|(_, _, number)| (*number, &self.all[number]))
    }

    /// True if a session owes everything.
    pub(super) fn owes_everything(&self, session: u64) -> bool {
        self.about_file(session, None).next().is_some()
    }

    /// Sessions that owe everything, each with the grant that its newest revocation names.
    pub(super) fn owing(&self) -> BTreeMap<u64, u64> {
        let everything = self.by_file.range((None, 0, 0)..=(None, u64::MAX, u64::MAX));
        // The newest of a session is the last.
        everything.map(|(_, session, number)| (*session, self.all[number].grant)).collect()
    }

    /// Calls to a session about one inode, the newest first.
    pub(super) fn about(&self, session: u64, file: FileId) -> impl Iterator<Item = (u64, &Call)> {
        self.about_file(session, Some(file)).rev()
    }

    /// The session of each call.
    pub(super) fn sessions(&self) -> impl Iterator<Item = u64> {
        self.by_session.iter().map(|(session, _)| *session)
    }

    /// The lowest number of a call to each session that has one.
    pub(super) fn oldest(&self) -> BTreeMap<u64, u64> {
        // The lowest of a session comes first, so it is the last that the map takes.
        self.by_session.iter().rev().copied().collect()
    }

    /// Returns the calls to a session after a number and up to another one, which count as sent.
    pub(super) fn send(&mut self, session: u64, after: u64, upto: u64) -> Vec<(u64, Call)> {
        let numbers: Vec<u64> =
            self.numbers_of(session, after).take_while(|number| *number <= upto).collect();
        let mut send = |number: u64| {
            let call = self.all.get_mut(&number).expect("listed calls are kept");
            call.sent = true;
            (number, call.clone())
        };
        numbers.into_iter().map(&mut send).collect()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// All calls, for tests.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (&u64, &Call)> {
        self.all.iter()
    }
}
