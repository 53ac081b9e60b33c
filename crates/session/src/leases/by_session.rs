//! The files of which each session has a lease, so that what ends all leases of a session costs no look at
//! those of others.

use penstock_base::{FileId, HashSet};
use std::collections::BTreeMap;

/// Sessions with their files. A session without files is not in it.
#[derive(Debug, Default)]
pub(super) struct BySession(BTreeMap<u64, HashSet<FileId>>);

impl BySession {
    /// A session has a lease on a file.
    pub(super) fn add(&mut self, session: u64, file: FileId) {
        self.0.entry(session).or_default().insert(file);
    }

    /// A session has its lease on a file no more.
    pub(super) fn remove(&mut self, session: u64, file: FileId) {
        let files = self.0.get_mut(&session).expect("the session has a lease");
        assert!(files.remove(&file), "session {session} has a lease on {file}");
        if files.is_empty() {
            self.0.remove(&session);
        }
    }

    /// The files of a session.
    pub(super) fn files(&self, session: u64) -> impl Iterator<Item = FileId> {
        self.0.get(&session).into_iter().flatten().copied()
    }

    /// The number of files of a session.
    pub(super) fn count(&self, session: u64) -> usize {
        self.0.get(&session).map_or(0, HashSet::len)
    }

    /// The numbers of files of all sessions that have one.
    pub(super) fn counts(&self) -> impl Iterator<Item = (u64, usize)> {
        self.0.iter().map(|(session, files)| (*session, files.len()))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId::of_numbers(0, 7);

    #[test]
    fn a_session_is_there_while_it_has_files() {
        let mut all = BySession::default();
        all.add(1, FILE);
        all.add(1, FILE);
        all.add(1, FileId::of_numbers(0, 8));
        all.add(2, FILE);
        assert!(all.counts().eq([(1, 2), (2, 1)]) && all.files(2).eq([FILE]));
        all.remove(2, FILE);
        assert_eq!((all.count(1), all.count(2), all.files(2).count()), (2, 0, 0));
        assert!(all.counts().eq([(1, 2)]) && !all.is_empty());
    }

    #[test]
    #[should_panic(expected = "has a lease")]
    fn a_lease_ends_once() {
        BySession::default().remove(1, FILE);
    }
}
