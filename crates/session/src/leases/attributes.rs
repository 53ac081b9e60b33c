//! Leases on attributes: sessions may cache the attributes of an inode, and of a directory also its names,
//! since each change of those changes its attributes too.
//!
//! They come with the replies that contain attributes. Sessions share them, and one that wants to change the
//! attributes waits until the others have given theirs back. After that nobody gets one on the inode for a
//! moment ([`COOLING`]): a directory that several change would cost a call for each change. After a wait that
//! was long it takes longer: nobody may hold up each change of a directory by asking for the lease again.
//!
//! Invariants:
//! - while an inode's attributes are being changed, no other session has a lease on them or gets one;
//! - the number of a lease is that of its first grant, for as long as the session has it without a break.

use crate::by_session::BySession;
use crate::counts::Counts;
use penstock_base::{FileId, HashMap};
use std::time::Duration;

/// Most leases on attributes of one session.
const MOST: usize = 1 << 16;
/// Time after a call for which nobody gets a lease on the inode.
const COOLING: Duration = Duration::from_secs(5);
/// After a wait longer than this, nobody gets a lease for [`TIMES`] as long, up to [`LONGEST`].
const LONG: Duration = Duration::from_secs(1);
const TIMES: u32 = 10;
const LONGEST: Duration = Duration::from_secs(60);
/// The number of cooling inodes above which those that have cooled are forgotten.
const MOST_COOLING: usize = 4096;

/// All leases on attributes.
#[derive(Debug, Default)]
pub(super) struct Attributes {
    /// Session and number of each.
    held: HashMap<FileId, Vec<(u64, u64)>>,
    sessions: BySession,
    cooling: HashMap<FileId, Cooling>,
    /// Until when nobody gets a lease on any inode, because more are cooling than the table has room for.
    all_cool: Duration,
    /// The number of changes of each inode that is being changed.
    changing: Counts<FileId>,
}

/// An inode on which nobody gets a lease.
#[derive(Clone, Copy, Debug)]
struct Cooling {
    until: Duration,
    /// When the first one that still waits to change the inode began to.
    since: Option<Duration>,
}

impl Attributes {
    /// The number of the lease that a session has on an inode.
    pub(super) fn of(&self, session: u64, file: FileId) -> Option<u64> {
        let held = self.held.get(&file)?;
        held.iter().find(|(holder, _)| *holder == session).map(|(_, grant)| *grant)
    }

    /// True if a session may get a lease now, as far as other leases on attributes go.
    pub(super) fn may_be_granted(&self, session: u64, file: FileId, now: Duration) -> bool {
        let is_cooling =
            now < self.all_cool || self.cooling.get(&file).is_some_and(|cooling| now < cooling.until);
        !is_cooling && self.changing.of(file) == 0 && self.sessions.count(session) < MOST
    }

    /// A session that has no lease on an inode gets one.
    pub(super) fn grant(&mut self, session: u64, file: FileId, grant: u64) {
        assert!(self.of(session, file).is_none(), "session {session} has one lease on {file}");
        assert_eq!(self.changing.of(file), 0, "{file} is being changed");
        self.held.entry(file).or_default().push((session, grant));
        self.sessions.add(session, file);
    }

    /// The leases of other sessions on an inode, each with its session.
    pub(super) fn of_others(&self, session: u64, file: FileId) -> Vec<(u64, u64)> {
        let held = self.held.get(&file).into_iter().flatten();
        held.filter(|(holder, _)| *holder != session).copied().collect()
    }

    /// A change of an inode waits for those that have leases on it. Nobody gets one for a moment.
    pub(super) fn cool(&mut self, file: FileId, now: Duration) {
        let until = now + COOLING;
        if let Some(cooling) = self.cooling.get_mut(&file) {
            *cooling = Cooling { until: until.max(cooling.until), since: cooling.since.or(Some(now)) };
            return;
        }
        if self.cooling.len() >= MOST_COOLING {
            self.cooling.retain(|_, cooling| now < cooling.until);
        }
        match self.cooling.len() < MOST_COOLING {
            true => drop(self.cooling.insert(file, Cooling { until, since: Some(now) })),
            // A change of this inode waits, and must not be overtaken for ever.
            false => self.all_cool = until,
        }
    }

    /// A change of these inodes begins, which ends with [`Self::end_change`].
    pub(super) fn begin_change(&mut self, session: u64, files: &[FileId], now: Duration) {
        for file in files {
            assert!(self.of_others(session, *file).is_empty(), "others may cache the attributes of {file}");
            self.changing.add(*file);
            let Some(cooling) = self.cooling.get_mut(file) else { continue };
            let waited = cooling.since.take().map_or(Duration::ZERO, |since| now - since);
            if waited > LONG {
                cooling.until = cooling.until.max(now + LONGEST.min(waited * TIMES));
            }
        }
    }

    pub(super) fn end_change(&mut self, files: &[FileId]) {
        files.iter().for_each(|file| self.changing.take(*file, 1));
    }

    /// A session has given back its lease on an inode, if the number of that is not greater than `grant`.
    /// Returns true if it had one.
    pub(super) fn end(&mut self, session: u64, file: FileId, grant: u64) -> bool {
        let Some(held) = self.held.get_mut(&file) else { return false };
        let ends = |(holder, number): &(u64, u64)| *holder == session && *number <= grant;
        let Some(at) = held.iter().position(ends) else { return false };
        held.swap_remove(at);
        if held.is_empty() {
            self.held.remove(&file);
        }
        self.sessions.remove(session, file);
        true
    }

    /// A session has given back all leases up to a number. Returns their inodes.
    pub(super) fn end_all(&mut self, session: u64, grant: u64) -> Vec<FileId> {
        let ends = |file: &FileId| self.of(session, *file).is_some_and(|number| number <= grant);
        let freed: Vec<FileId> = self.sessions.files(session).filter(ends).collect();
        freed.iter().for_each(|file| assert!(self.end(session, *file, grant), "it has the lease"));
        freed
    }

    /// The only session needs none.
    pub(super) fn clear(&mut self) {
        self.held.clear();
        self.sessions.clear();
        self.cooling.clear();
        self.all_cool = Duration::ZERO;
    }

    /// True if nobody has any.
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The number of leases of each session that has one.
    pub(super) fn counts(&self) -> impl Iterator<Item = (u64, usize)> {
        self.sessions.counts()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId::of_numbers(0, 7);

    #[test]
    fn leases_are_shared_and_counted_until_they_end() {
        let mut attributes = Attributes::default();
        attributes.grant(1, FILE, 10);
        attributes.grant(2, FILE, 11);
        attributes.grant(1, FileId::of_numbers(0, 8), 12);
        assert_eq!((attributes.of(1, FILE), attributes.of(3, FILE)), (Some(10), None));
        assert_eq!(attributes.of_others(1, FILE), [(2, 11)]);
        attributes.end(1, FILE, 9);
        assert_eq!(attributes.of(1, FILE), Some(10), "an older one was given back");
        attributes.end(1, FILE, 10);
        attributes.end(1, FILE, 10);
        assert!(attributes.counts().eq([(1, 1), (2, 1)]));
        assert_eq!(attributes.end_all(1, 11), []);
        assert_eq!(attributes.end_all(1, 12), [FileId::of_numbers(0, 8)]);
        assert_eq!(attributes.end_all(2, u64::MAX), [FILE]);
        assert!(attributes.is_empty() && attributes.sessions.is_empty());
    }

    #[test]
    fn nobody_gets_a_lease_during_a_change_or_shortly_after_a_call() {
        let mut attributes = Attributes::default();
        let now = Duration::from_secs(100);
        attributes.begin_change(1, &[FILE, FILE], now);
        assert!(!attributes.may_be_granted(1, FILE, now) && !attributes.may_be_granted(2, FILE, now));
        attributes.end_change(&[FILE]);
        assert!(!attributes.may_be_granted(2, FILE, now), "another change runs");
        attributes.end_change(&[FILE]);
        assert!(attributes.may_be_granted(2, FILE, now));
        attributes.cool(FILE, now);
        assert!(!attributes.may_be_granted(2, FILE, now + COOLING - Duration::from_nanos(1)));
        assert!(attributes.may_be_granted(2, FILE, now + COOLING));
    }

    /// Regression: a session that gave its lease back just in time, and got it again, held up each change.
    #[test]
    fn who_was_waited_for_long_gets_no_lease_soon() {
        let at = Duration::from_secs;
        // Columns: the time of the wait, and that for which nobody gets a lease afterwards.
        for (waited, cools) in [(0, 5), (1, 4), (2, 20), (4, 40), (8, 60), (29, 60)] {
            let mut attributes = Attributes::default();
            attributes.cool(FILE, at(100));
            if waited > 1 {
                attributes.cool(FILE, at(101));
            }
            let begun = at(100 + waited);
            attributes.begin_change(1, &[FILE], begun);
            attributes.end_change(&[FILE]);
            assert!(!attributes.may_be_granted(2, FILE, begun + at(cools) - Duration::from_nanos(1)));
            assert!(attributes.may_be_granted(2, FILE, begun + at(cools)), "{waited}");
            // The next one waits for nobody.
            attributes.begin_change(1, &[FILE], begun + at(1));
            attributes.end_change(&[FILE]);
            assert!(attributes.may_be_granted(2, FILE, begun + at(cools)), "{waited}");
        }
    }

    #[test]
    fn what_a_session_has_and_what_cools_is_bounded() {
        let mut attributes = Attributes::default();
        let file = |number: usize| FileId::of_numbers(0, number as u64);
        (0..MOST).for_each(|number| attributes.grant(1, file(number), number as u64 + 1));
        assert!(!attributes.may_be_granted(1, file(MOST), Duration::ZERO));
        assert!(attributes.may_be_granted(2, file(MOST), Duration::ZERO));
        (0..2 * MOST_COOLING).for_each(|number| attributes.cool(file(number), Duration::ZERO));
        assert_eq!(attributes.cooling.len(), MOST_COOLING);
        let out = file(2 * MOST_COOLING - 1);
        assert!(!attributes.may_be_granted(2, out, Duration::ZERO), "the table has no room for it");
        assert!(attributes.may_be_granted(2, out, COOLING));
        attributes.cool(file(3 * MOST_COOLING), COOLING);
        assert_eq!(attributes.cooling.len(), 1, "the others have cooled");
    }
}
