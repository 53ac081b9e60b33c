//! The leases on files that sessions have.
//!
//! Invariants:
//! - a file has one exclusive lease, or any number of shared ones;
//! - the files by session are exactly those of the leases;
//! - a session has [`MOST`] leases at most.

use crate::by_session::BySession;
use penstock_base::{FileId, HashMap};
use std::collections::BTreeMap;

/// Most leases on files of one session. A mount has them on files that are open or not synced yet, and on a
/// few thousand others.
pub(crate) const MOST: usize = 1 << 17;

/// A lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) exclusive: bool,
    pub(crate) grant: u64,
}

/// All leases on files.
#[derive(Debug, Default)]
pub(crate) struct HeldLeases {
    files: HashMap<FileId, BTreeMap<u64, Held>>,
    sessions: BySession,
}

impl HeldLeases {
    /// The leases on a file, by session.
    pub(super) fn on(&self, file: FileId) -> impl Iterator<Item = (u64, Held)> {
        self.files.get(&file).into_iter().flatten().map(|(session, held)| (*session, *held))
    }

    /// The lease of a session on a file.
    pub(super) fn of(&self, session: u64, file: FileId) -> Option<Held> {
        self.files.get(&file)?.get(&session).copied()
    }

    /// True if a session may get a lease on a file beside those that it has, and that it `waits` for.
    pub(super) fn has_room(&self, session: u64, file: FileId, waits: usize) -> bool {
        self.sessions.count(session) + waits < MOST || self.of(session, file).is_some()
    }

    /// A session gets a lease on a file, in place of one that it may have.
    pub(super) fn grant(&mut self, session: u64, file: FileId, held: Held) {
        assert!(self.has_room(session, file, 0), "session {session} has {MOST} leases");
        let holders = self.files.entry(file).or_default();
        holders.insert(session, held);
        assert!(
            holders.len() == 1 || holders.values().all(|held| !held.exclusive),
            "{holders:?} of inode {file}"
        );
        self.sessions.add(session, file);
    }

    /// The lease of a session on a file ends, if its number is not greater than `grant`. Returns true if it
    /// did.
    pub(super) fn end(&mut self, session: u64, file: FileId, grant: u64) -> bool {
        let Some(holders) = self.files.get_mut(&file) else { return false };
        if holders.get(&session).is_none_or(|held| held.grant > grant) {
            return false;
        }
        holders.remove(&session);
        if holders.is_empty() {
            self.files.remove(&file);
        }
        self.sessions.remove(session, file);
        true
    }

    /// All leases of a session with numbers up to `grant` end. Returns their files.
    pub(super) fn end_all(&mut self, session: u64, grant: u64) -> Vec<FileId> {
        let mut files: Vec<FileId> = self.sessions.files(session).collect();
        files.retain(|file| self.end(session, *file, grant));
        files
    }

    /// True if a session has a lease.
    pub(super) fn has_any(&self, session: u64) -> bool {
        self.sessions.count(session) > 0
    }

    /// The files of which a session has an exclusive lease.
    pub(super) fn exclusive_of(&self, session: u64) -> Vec<FileId> {
        let is_exclusive = |file: &FileId| self.of(session, *file).is_some_and(|held| held.exclusive);
        self.sessions.files(session).filter(is_exclusive).collect()
    }

    /// All leases, each with its session.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, Held)> {
        self.files.values().flatten().map(|(session, held)| (*session, *held))
    }

    /// The only session needs none.
    pub(super) fn clear(&mut self) {
        self.files.clear();
        self.sessions.clear();
    }

    /// True if nobody has any.
    pub(super) fn is_empty(&self) -> bool {
        assert_eq!(self.files.is_empty(), self.sessions.is_empty(), "one lease is in both tables");
        self.files.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId::of_numbers(0, 7);
    const OTHER: FileId = FileId::of_numbers(0, 8);

    #[test]
    fn leases_end_by_file_and_by_session() {
        let mut all = HeldLeases::default();
        let held = |grant, exclusive| Held { exclusive, grant };
        all.grant(1, FILE, held(10, false));
        all.grant(2, FILE, held(11, false));
        all.grant(1, OTHER, held(12, true));
        assert_eq!(all.exclusive_of(1), [OTHER]);
        assert!(!all.end(1, FILE, 9) && !all.end(3, FILE, 99) && all.end(2, FILE, 11));
        all.grant(1, FILE, held(13, true));
        assert_eq!(all.of(1, FILE).map(|held| held.grant), Some(13), "in place of the shared one");
        assert_eq!(all.end_all(1, 12), [OTHER]);
        assert!(all.end_all(2, u64::MAX).is_empty() && all.has_any(1) && !all.has_any(2));
        assert_eq!(all.end_all(1, 13), [FILE]);
        assert!(all.is_empty());
    }

    #[test]
    fn the_leases_of_a_session_are_bounded() {
        let mut all = HeldLeases::default();
        let file = |number: usize| FileId::of_numbers(0, number as u64);
        (0..MOST).for_each(|number| all.grant(1, file(number), Held { exclusive: true, grant: 1 }));
        assert!(
            !all.has_room(1, file(MOST), 0) && all.has_room(1, file(0), 9) && all.has_room(2, file(1), 9)
        );
        all.end(1, file(5), 1);
        assert!(all.has_room(1, file(MOST), 0) && !all.has_room(1, file(MOST), 1));
    }

    /// A list of leases, which needs no index.
    #[derive(Default)]
    struct Model(Vec<(u64, FileId, Held)>);

    impl Model {
        fn may_grant(&self, session: u64, file: FileId, exclusive: bool) -> bool {
            let is_in_the_way = |held: &(u64, FileId, Held)| {
                held.1 == file && held.0 != session && (exclusive || held.2.exclusive)
            };
            !self.0.iter().any(is_in_the_way)
        }

        fn end(&mut self, is_over: impl Fn(u64, FileId) -> bool, grant: u64) -> Vec<FileId> {
            let ended = self.0.extract_if(.., |held| is_over(held.0, held.1) && held.2.grant <= grant);
            let mut files: Vec<FileId> = ended.map(|held| held.1).collect();
            files.sort();
            files
        }

        fn assert_shown_by(&self, all: &HeldLeases) {
            assert_eq!((all.all().count(), all.is_empty()), (self.0.len(), self.0.is_empty()));
            for (session, file, held) in &self.0 {
                let shown = all.of(*session, *file).map(|shown| (shown.exclusive, shown.grant));
                assert_eq!(shown, Some((held.exclusive, held.grant)));
                assert!(all.on(*file).any(|(other, _)| other == *session) && all.has_any(*session));
                assert_eq!(all.exclusive_of(*session).contains(file), held.exclusive);
            }
        }
    }

    fn run(seed: u64) {
        let mut state = seed;
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let (mut all, mut model) = (HeldLeases::default(), Model::default());
        for grant in 1..400 {
            let (session, file) = (1 + below(4), FileId::of_numbers(0, below(6)));
            match below(8) {
                0..=4 => {
                    let held = Held { exclusive: below(2) == 0, grant };
                    if model.may_grant(session, file, held.exclusive) {
                        all.grant(session, file, held);
                        model.end(|other, of| (other, of) == (session, file), u64::MAX);
                        model.0.push((session, file, held));
                    }
                }
                5 | 6 => {
                    let upto = grant - below(grant);
                    let ended = model.end(|other, of| (other, of) == (session, file), upto);
                    assert_eq!(all.end(session, file, upto), !ended.is_empty());
                }
                _ => {
                    let upto = if below(2) == 0 { u64::MAX } else { grant - below(grant) };
                    let mut ended = all.end_all(session, upto);
                    ended.sort();
                    assert_eq!(ended, model.end(|other, _| other == session, upto));
                }
            }
            model.assert_shown_by(&all);
        }
        all.clear();
        Model::default().assert_shown_by(&all);
    }

    #[test]
    fn leases_are_those_of_a_list() {
        penstock_sim::seeds(0..100).for_each(run);
    }
}
