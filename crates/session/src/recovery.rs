//! The recovery after a restart of the service: its clients make again what they had changed and the restart
//! may have lost.
//!
//! Each client has kept its changes that are not durable, with their numbers in the order of all changes. It
//! sends them again one after the other. A change may depend on one of another client, so they are made in
//! the order of their numbers: one waits until each other session that has not finished has sent one of its
//! own, and none of those has a smaller number. Blocks of files need no order: a client had made durable what
//! it wrote before it gave a lease to another one.
//!
//! Nothing else is served meanwhile that may show names or files. So nobody sees the time before a change
//! that had been acknowledged.
//!
//! Invariants:
//! - a change is repeated only when no smaller number can come any more, unless its session has ended;
//! - a change is wanted as long as one request for it is here, however many came and were given up before. It
//!   waits also while its connection is lost: links that break all the time are never all there;
//! - a session that makes no progress, and does not wait for others, ends: the others wait for it. So does
//!   one for which they have waited for long in all: what it does may be for show, and go on for ever.

use crate::counts::Counts;
use penstock_base::FileId;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Longest request for a change that a client makes again: more than the longest extended attribute.
pub(crate) const MOST_REPEATED_BYTES: usize = 256 << 10;

/// The part of what a client has reported after a restart that was new.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Inodes with the number of opens before and now.
    pub opens: Vec<(FileId, u64, u64)>,
    /// The number of locks that another session has said to be its own, or that are too many.
    pub refused_locks: u64,
}

/// A lock that a session does not get back.
pub(crate) struct Refused;

/// File, owner and first byte of a lock.
pub(crate) type LockPlace = (FileId, u64, u64);

/// Most locks of a session that are remembered because it did not get them back.
const MOST_REFUSED: usize = 4096;

/// Time in which a session is excused counts for one part in so many.
const SHARE_OF_EXCUSED: u32 = 4;

/// Most requests of a session that wait for their turn. A client has one, and sends it again over each new
/// connection.
const MOST_WAITING: u64 = 8;

/// The state of the recovery that is the same for all sessions, and what each waits with.
#[derive(Default)]
pub(crate) struct Recovery {
    /// The numbers of the changes that each session wants to make next, by requests: a request is sent once
    /// more over another connection, and one that was late may be there too.
    wanted: BTreeMap<u64, Counts<u64>>,
    /// The number of such requests that have come from each session.
    came: BTreeMap<u64, u64>,
    /// The most opens and locks that each session has reported so far.
    told: BTreeMap<u64, u64>,
    /// The last change that each session has made.
    made: BTreeMap<u64, u64>,
    /// When each session was last heard with something that is a part of it.
    progress: BTreeMap<u64, Duration>,
    /// The locks that each session had before the restart and could not get back.
    lost_locks: BTreeMap<u64, BTreeSet<LockPlace>>,
    /// The time for which the others have waited for each session, known up to the time between two looks.
    held_up: BTreeMap<u64, Duration>,
    /// Time of the last look.
    looked: Duration,
    /// Sessions that ended without a report, and changes that could not be made again.
    unreported: u64,
}

impl Recovery {
    /// The recovery of a start before which this number of sessions ended with the process.
    pub(crate) fn new(ended: u64) -> Self {
        Self { unreported: ended, ..Self::default() }
    }

    /// A request of a session wants to make this change now. Returns the number of the request, for
    /// [`Self::is_given_up`].
    pub(crate) fn wants(&mut self, session: u64, number: u64) -> u64 {
        assert!(number > 0, "changes are numbered from 1");
        self.wanted.entry(session).or_default().add(number);
        let came = self.came.entry(session).or_default();
        *came += 1;
        *came
    }

    /// True if so many have come after this request that its client waits for another one.
    pub(crate) fn is_given_up(&self, session: u64, request: u64) -> bool {
        self.came.get(&session).is_some_and(|came| {
            assert!(*came >= request, "request {request} of session {session} has come");
            came - request >= MOST_WAITING
        })
    }

    /// Such a request has ended.
    pub(crate) fn wants_no_more(&mut self, session: u64, number: u64) {
        // The session may have ended, or reported, before it.
        let Some(wanted) = self.wanted.get_mut(&session) else { return };
        wanted.take(number, 1);
        if wanted.is_empty() {
            self.wanted.remove(&session);
        }
    }

    /// True if no session of these can have a smaller number.
    pub(crate) fn is_next(&self, number: u64, mut owing: impl Iterator<Item = u64>) -> bool {
        let smallest = |session| self.wanted.get(&session).and_then(Counts::first);
        owing.all(|session| smallest(session).is_some_and(|smallest| smallest >= number))
    }

    /// A session has made the change of this number. Returns true if it is later than all before.
    pub(crate) fn has_made(&mut self, session: u64, number: u64) -> bool {
        let last = self.made.entry(session).or_default();
        assert!(number > 0, "changes are numbered from 1");
        let is_new = number > *last;
        *last = number.max(*last);
        is_new
    }

    /// A session has reported this number of opens and locks. Returns true if it is more than ever.
    pub(crate) fn has_told(&mut self, session: u64, count: u64) -> bool {
        let most = self.told.entry(session).or_default();
        let is_new = count > *most;
        *most = count.max(*most);
        is_new
    }

    /// A session does not get back a lock. More than `MOST_REFUSED` of one session are not counted.
    pub(crate) fn loses_lock(&mut self, session: u64, place: LockPlace) {
        let lost = self.lost_locks.entry(session).or_default();
        if lost.len() < MOST_REFUSED {
            lost.insert(place);
        }
    }

    /// Takes the sessions that have lost locks, with the numbers of locks.
    pub(crate) fn take_lost_locks(&mut self) -> BTreeMap<u64, usize> {
        let lost = std::mem::take(&mut self.lost_locks);
        lost.into_iter().map(|(session, locks)| (session, locks.len())).collect()
    }

    /// A change could not be made again.
    pub(crate) fn refused(&mut self) {
        self.unreported += 1;
    }

    /// A session was heard with a part of its recovery.
    pub(crate) fn progressed(&mut self, session: u64, now: Duration) {
        self.progress.insert(session, now);
    }

    /// The time of these sessions begins at `now`: the process was not running before, or not able to hear
    /// them.
    pub(crate) fn begin_anew(&mut self, owing: impl Iterator<Item = u64>, now: Duration) {
        owing.for_each(|session| self.progressed(session, now));
        self.looked = now;
    }

    /// Counts the time since the last look for the sessions of `owing`, those that have not finished, for
    /// which the others wait now: a quarter for one with a request that has been executed since before
    /// (`busy_since`), for that may be the fault of the drives, but not for ever. Those that are in the way
    /// together share the time, as they share the drives.
    pub(crate) fn look(
        &mut self,
        now: Duration,
        owing: &BTreeSet<u64>,
        busy_since: impl Fn(u64) -> Option<Duration>,
    ) {
        let looked = std::mem::replace(&mut self.looked, now);
        assert!(looked <= now, "a look follows the one before");
        let waits_for_others = |session: u64| {
            let wanted = self.wanted.get(&session).and_then(Counts::first);
            wanted.is_some_and(|number| !self.is_next(number, owing.iter().copied()))
        };
        let in_the_way: Vec<u64> =
            owing.iter().copied().filter(|session| !waits_for_others(*session)).collect();
        let together = u32::try_from(in_the_way.len()).unwrap_or(u32::MAX);
        for session in in_the_way {
            let is_held_up = busy_since(session).is_some_and(|since| since <= looked);
            let share = if is_held_up { SHARE_OF_EXCUSED } else { 1 };
            *self.held_up.entry(session).or_default() += (now - looked) / share / together;
        }
    }

    /// The time for which the others have waited for a session in all.
    pub(crate) fn held_up_by(&self, session: u64) -> Duration {
        self.held_up.get(&session).copied().unwrap_or_default()
    }

    /// True if a session has made no progress since `since` and does not wait for others.
    pub(crate) fn is_stuck(&self, session: u64, since: Duration) -> bool {
        !self.wanted.contains_key(&session)
            && self.progress.get(&session).is_none_or(|progressed| *progressed < since)
    }

    /// A session has reported everything, or has ended.
    pub(crate) fn end(&mut self, session: u64, has_reported: bool) {
        self.wanted.remove(&session);
        self.came.remove(&session);
        self.told.remove(&session);
        self.made.remove(&session);
        self.progress.remove(&session);
        self.held_up.remove(&session);
        self.unreported += u64::from(!has_reported);
    }

    /// Number of sessions that ended without a report.
    pub(crate) fn unreported(&self) -> u64 {
        self.unreported
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_smallest_number_is_next_once_all_have_said_theirs() {
        let mut recovery = Recovery::default();
        let owing = || [1, 2, 3].into_iter();
        recovery.wants(1, 5);
        recovery.wants(2, 9);
        assert!(!recovery.is_next(5, owing()), "the third one has said nothing");
        recovery.wants(3, 7);
        assert!(recovery.is_next(5, owing()) && !recovery.is_next(7, owing()));
        recovery.has_made(1, 5);
        recovery.wants_no_more(1, 5);
        assert!(!recovery.is_next(7, owing()), "the first one may have a 6");
        assert!(recovery.is_next(7, [2, 3].into_iter()), "it has reported");
        // A repeat of a change that was made does not take the next one back.
        recovery.wants(1, 8);
        recovery.wants(1, 5);
        assert!(!recovery.has_made(1, 5));
        recovery.wants_no_more(1, 5);
        assert!(recovery.is_next(7, owing()));
        assert!(recovery.has_made(3, 7));
        recovery.end(3, true);
        assert!(recovery.is_next(8, [1, 2].into_iter()) && !recovery.is_next(9, [1, 2].into_iter()));
        assert_eq!(recovery.unreported(), 0);
    }

    /// Regression: a request that waited for its turn was given up with its connection after it had come
    /// again over the next one, and the session was taken for one that wants nothing.
    #[test]
    fn a_change_is_wanted_until_all_requests_for_it_have_ended() {
        let mut recovery = Recovery::default();
        recovery.wants(1, 5);
        recovery.wants(1, 5);
        recovery.wants_no_more(1, 5);
        assert!(recovery.is_next(5, [1].into_iter()) && !recovery.is_stuck(1, s(0)));
        recovery.wants_no_more(1, 5);
        assert!(!recovery.is_next(5, [1].into_iter()) && recovery.is_stuck(1, s(0)));
        // The session reports, or ends, while a late request waits.
        recovery.wants(1, 5);
        recovery.end(1, true);
        recovery.wants_no_more(1, 5);
    }

    #[test]
    fn a_session_is_stuck_that_does_nothing_and_waits_for_nobody() {
        let mut recovery = Recovery::new(3);
        assert!(recovery.is_stuck(1, s(0)), "it was never heard");
        recovery.progressed(1, s(10));
        for (since, is_stuck) in [(s(5), false), (s(10), false), (s(11), true)] {
            assert_eq!(recovery.is_stuck(1, since), is_stuck, "{since:?}");
        }
        recovery.wants(1, 4);
        assert!(!recovery.is_stuck(1, s(100)), "it waits for others");
        recovery.has_made(1, 4);
        recovery.wants_no_more(1, 4);
        assert!(recovery.is_stuck(1, s(100)));
        recovery.end(1, false);
        assert_eq!(recovery.unreported(), 4, "three had ended with the process");
    }
    /// Regression: a session that did something from time to time, whatever it was, held up the others for
    /// ever.
    #[test]
    fn the_time_counts_in_which_the_others_wait_for_a_session() {
        let mut recovery = Recovery::default();
        let owing = BTreeSet::from([1, 2, 3]);
        recovery.begin_anew(owing.iter().copied(), s(100));
        let busy = |session| (session == 3).then_some(s(99));
        let held_up = |recovery: &Recovery| [1, 2, 3].map(|session| recovery.held_up_by(session).as_secs());
        recovery.look(s(112), &owing, busy);
        assert_eq!(held_up(&recovery), [4, 4, 1], "a request of the third one takes long");
        recovery.wants(1, 5);
        recovery.wants(2, 9);
        recovery.wants(3, 7);
        recovery.look(s(118), &owing, |_| None);
        assert_eq!(held_up(&recovery), [10, 4, 1], "it is the turn of the first one");
        recovery.has_made(1, 5);
        recovery.wants_no_more(1, 5);
        recovery.wants(1, 10);
        recovery.progressed(1, s(119));
        recovery.look(s(124), &owing, |_| None);
        assert_eq!(held_up(&recovery), [10, 4, 7], "and of the third one");
        recovery.begin_anew(owing.iter().copied(), s(200));
        recovery.look(s(206), &owing, |_| Some(s(203)));
        assert_eq!(held_up(&recovery), [10, 4, 13], "what has begun since the last look is no excuse");
        recovery.end(3, true);
        recovery.look(s(212), &BTreeSet::from([1, 2]), |_| None);
        assert_eq!(held_up(&recovery), [10, 10, 0]);
    }
}
