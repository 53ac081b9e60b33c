//! The files on which each session has something, a lease, a lock or a request that waits, so that what ends
//! all that a session has costs no look at others.

use penstock_base::{FileId, HashSet};
use std::collections::BTreeMap;

/// Sessions with their files. A session without files is not in it.
#[derive(Debug, Default)]
pub(crate) struct BySession(BTreeMap<u64, HashSet<FileId>>);

impl BySession {
    /// A session has something on a file.
    pub(crate) fn add(&mut self, session: u64, file: FileId) {
        self.0.entry(session).or_default().insert(file);
    }

    /// A session has nothing on a file any more.
    pub(crate) fn remove(&mut self, session: u64, file: FileId) {
        let files = self.0.get_mut(&session).expect("the session has files");
        assert!(files.remove(&file), "session {session} has file {file}");
        if files.is_empty() {
            self.0.remove(&session);
        }
    }

    /// A session has nothing on a file, if it had anything.
    pub(crate) fn discard(&mut self, session: u64, file: FileId) {
        if self.0.get(&session).is_some_and(|files| files.contains(&file)) {
            self.remove(session, file);
        }
    }

    /// Removes a session, and returns its files.
    pub(crate) fn take(&mut self, session: u64) -> HashSet<FileId> {
        self.0.remove(&session).unwrap_or_default()
    }

    /// The files of a session.
    pub(crate) fn files(&self, session: u64) -> impl Iterator<Item = FileId> {
        self.0.get(&session).into_iter().flatten().copied()
    }

    /// The number of files of a session.
    pub(crate) fn count(&self, session: u64) -> usize {
        self.0.get(&session).map_or(0, HashSet::len)
    }

    /// The numbers of files of all sessions that have one.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (u64, usize)> {
        self.0.iter().map(|(session, files)| (*session, files.len()))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn clear(&mut self) {
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
        all.discard(2, FILE);
        all.discard(1, FILE);
        all.discard(1, FILE);
        assert_eq!(all.take(1), HashSet::from_iter([FileId::of_numbers(0, 8)]));
        assert!(all.take(1).is_empty() && all.is_empty());
    }

    #[test]
    #[should_panic(expected = "has files")]
    fn a_file_goes_once() {
        BySession::default().remove(1, FILE);
    }
}
