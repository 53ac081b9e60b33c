//! Calls of the service to clients that are not answered: revocations of one lease or of everything, and
//! requests to sync a file.
//!
//! After a restart every client may ask every other one to sync files, so the calls are found by session and
//! by file without a look at all of them.

use penstock_base::FileId;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// One call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) session: u64,
    /// The inode; none for a revocation of everything.
    pub(super) file: Option<FileId>,
    pub(super) is_sync: bool,
    pub(super) grant: u64,
    pub(super) sent: bool,
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
        self.all.insert(number, call);
        self.by_session.insert((call.session, number));
        self.by_file.insert((call.file, call.session, number));
    }

    /// Returns a call to this session.
    pub(super) fn get(&self, session: u64, number: u64) -> Option<&Call> {
        self.all.get(&number).filter(|call| call.session == session)
    }

    /// True if a call is not answered.
    pub(super) fn contains(&self, number: u64) -> bool {
        self.all.contains_key(&number)
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

    /// Removes all calls to a session.
    pub(super) fn remove_all(&mut self, session: u64) {
        let numbers: Vec<u64> = self.numbers_of(session, 0).collect();
        numbers.into_iter().for_each(|number| _ = self.remove(session, number));
    }

    fn numbers_of(&self, session: u64, after: u64) -> impl Iterator<Item = u64> {
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

    /// Returns the calls to a session after a number, which count as sent.
    pub(super) fn send(&mut self, session: u64, after: u64) -> Vec<(u64, Call)> {
        let numbers: Vec<u64> = self.numbers_of(session, after).collect();
        let mut send = |number: u64| {
            let call = self.all.get_mut(&number).expect("listed calls are kept");
            call.sent = true;
            (number, *call)
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
