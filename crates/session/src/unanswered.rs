//! Finds the sessions whose clients are heard and do not answer a call of the service.
//!
//! Others wait for the answer, so such a session must end like one that is silent. A client needs the
//! service for its answer: it syncs what it has cached. So no time counts while the service has been
//! executing one of its requests for long, up to twenty times the time that others have.
//!
//! A client may also need the answer of another one before it can give its own. Only the one on which the
//! others wait must end. So no time counts for a session that waits itself while there is another one that
//! has owed an answer since the last look and does not wait, up to four times the time that others have:
//! nobody else may excuse it for ever. If all wait, they wait for each other, and one of them ends: that
//! with the oldest call.
//!
//! A client that answers each call late, but in time, would still hold up the others for ever. So late time
//! is added up: that of a call which is the oldest of its session at two looks in a row. It goes again with
//! time in which nothing is late, at the same rate, and stays while the session is excused.
//!
//! Owns no calls and no sessions: it compares what it is shown from time to time. The time of a call is known
//! only up to the interval between two looks.

use std::collections::BTreeMap;
use std::time::Duration;

/// The oldest call to a session that it has not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Oldest {
    /// Number of the call.
    pub(crate) call: u64,
    /// Time at which the oldest request of the session began that is being executed; none if there is none.
    pub(crate) busy_since: Option<Duration>,
    /// True if the session waits for others with something that may hold up its answer.
    pub(crate) waits: bool,
}

/// The oldest call to a session.
#[derive(Clone, Copy, Debug)]
struct Owed {
    call: u64,
    /// The time that counts began then.
    since: Duration,
    /// The same without the excuse of waiting.
    first: Duration,
    /// The same without any excuse.
    begun: Duration,
}

/// A session that is late again and again must end when its late time is so many times that which it has for
/// one answer.
const MOST_LATE: u32 = 2;

/// The excuse of a session that waits itself counts for this many times the time that others have.
const MOST_EXCUSED: u32 = 4;

/// The same for the excuse that a request is being executed, which may be the fault of the drives.
const MOST_HELD_UP: u32 = 20;

/// The oldest call of each session that owes an answer, and the time since when it has had the means to give
/// it.
#[derive(Debug, Default)]
pub(crate) struct Unanswered {
    since: BTreeMap<u64, Owed>,
    /// The late time of each session that has some.
    late: BTreeMap<u64, Duration>,
    /// Time of the last look.
    looked: Duration,
}

impl Unanswered {
    /// The time of these sessions begins anew: another one, for which they may have waited, has ended.
    pub(crate) fn begin_anew(&mut self, now: Duration, sessions: impl Iterator<Item = u64>) {
        for session in sessions {
            self.since.entry(session).and_modify(|owed| owed.since = now);
        }
    }

    /// Takes in the sessions that owe an answer now, as [`Self::look`] does, and returns those that must end.
    /// `limit` returns the time that a session has; none for one that cannot end. Of those that are overdue
    /// all must end that wait for nobody, else the one with the oldest call.
    pub(crate) fn must_end(
        &mut self,
        now: Duration,
        oldest: &BTreeMap<u64, Oldest>,
        limit: impl Fn(u64) -> Option<Duration>,
    ) -> Vec<u64> {
        let owed = self.look(now, oldest);
        let is_overdue = |session: &u64| {
            limit(*session).is_some_and(|limit| owed[session] > limit || self.is_often_late(*session, limit))
        };
        let overdue: Vec<u64> = oldest.keys().copied().filter(is_overdue).collect();
        let culprits: Vec<u64> = overdue.iter().copied().filter(|session| !oldest[session].waits).collect();
        match culprits.is_empty() {
            true => overdue.into_iter().min_by_key(|session| oldest[session].call).into_iter().collect(),
            false => culprits,
        }
    }

    /// True if a session that has `limit` for an answer has been late again and again.
    fn is_often_late(&self, session: u64, limit: Duration) -> bool {
        self.late.get(&session).is_some_and(|late| *late > limit * MOST_LATE)
    }

    /// Takes in the sessions that owe an answer now. Returns how long each has owed the same one.
    fn look(&mut self, now: Duration, oldest: &BTreeMap<u64, Oldest>) -> BTreeMap<u64, Duration> {
        let looked = std::mem::replace(&mut self.looked, now);
        assert!(looked <= now, "a look follows the one before");
        let known = std::mem::take(&mut self.since);
        // One that has just been called is not stuck: it will answer.
        let is_stuck = |(session, one): (&u64, &Oldest)| {
            !one.waits && known.get(session).is_some_and(|owed| owed.call == one.call)
        };
        let is_another_stuck = oldest.iter().any(is_stuck);
        let mut before = std::mem::take(&mut self.late);
        for (session, Oldest { call, busy_since, waits }) in oldest {
            let is_held_up = busy_since.is_some_and(|since| since <= looked);
            let is_excused = *waits && is_another_stuck;
            let same = known.get(session).filter(|owed| owed.call == *call);
            if same.is_some() {
                let late = before.remove(session).unwrap_or_default();
                let more = if is_held_up || is_excused { Duration::ZERO } else { now - looked };
                self.late.insert(*session, late + more);
            }
            let owed = match same {
                Some(owed) if is_held_up => Owed { since: now, first: now, ..*owed },
                Some(owed) if is_excused => Owed { since: now, ..*owed },
                Some(owed) => *owed,
                None => Owed { call: *call, since: now, first: now, begun: now },
            };
            self.since.insert(*session, owed);
        }
        let left = before.into_iter().map(|(session, late)| (session, late.saturating_sub(now - looked)));
        self.late.extend(left);
        self.late.retain(|_, late| !late.is_zero());
        assert_eq!(self.since.len(), oldest.len(), "a session that owes nothing is forgotten");
        let counted = |owed: &Owed| {
            let excused = ((now - owed.first) / MOST_EXCUSED).max((now - owed.begun) / MOST_HELD_UP);
            (now - owed.since).max(excused)
        };
        self.since.iter().map(|(session, owed)| (*session, counted(owed))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks once at a session that owes this call. Returns how long it has owed it, in seconds.
    fn look(unanswered: &mut Unanswered, now: u64, call: u64, busy_since: Option<u64>) -> u64 {
        let oldest = Oldest { call, busy_since: busy_since.map(Duration::from_secs), waits: false };
        unanswered.look(Duration::from_secs(now), &BTreeMap::from([(7, oldest)]))[&7].as_secs()
    }

    #[test]
    fn a_call_is_owed_from_the_first_look_at_it_until_another_one_is_the_oldest() {
        let mut unanswered = Unanswered::default();
        assert_eq!(look(&mut unanswered, 100, 5, None), 0);
        assert_eq!(look(&mut unanswered, 106, 5, None), 6);
        assert_eq!(look(&mut unanswered, 112, 5, None), 12);
        assert_eq!(look(&mut unanswered, 118, 6, None), 0, "call 5 was answered");
        assert!(unanswered.look(Duration::from_secs(124), &BTreeMap::new()).is_empty());
        assert_eq!(look(&mut unanswered, 130, 6, None), 0, "nothing was owed in between");
    }

    #[test]
    fn no_time_counts_while_the_service_is_executing_a_request_for_long() {
        let mut unanswered = Unanswered::default();
        look(&mut unanswered, 100, 5, None);
        assert_eq!(look(&mut unanswered, 106, 5, Some(105)), 6, "it began since the last look");
        assert_eq!(look(&mut unanswered, 112, 5, Some(105)), 0, "it is held up");
        assert_eq!(look(&mut unanswered, 118, 5, Some(117)), 6);
        for now in (124..700).step_by(6) {
            look(&mut unanswered, now, 5, Some(100));
        }
        assert_eq!(look(&mut unanswered, 702, 5, Some(100)), 30, "not for ever");
    }

    fn owes(call: u64, waits: bool) -> Oldest {
        Oldest { call, busy_since: None, waits }
    }

    /// Regression: a session that could not answer before another one did ended together with it.
    #[test]
    fn no_time_counts_for_a_session_that_waits_for_the_one_that_must_end() {
        let mut unanswered = Unanswered::default();
        let both = BTreeMap::from([(7, owes(5, true)), (8, owes(6, false))]);
        for now in [100, 106, 112] {
            let owed = unanswered.look(Duration::from_secs(now), &both);
            assert_eq!((owed[&7].as_secs(), owed[&8].as_secs()), ((now - 100) / 4, now - 100));
        }
        // One that answers, and is called again, is no reason.
        for (now, call) in [(200, 20), (206, 21), (212, 22)] {
            let others = BTreeMap::from([(7, owes(15, true)), (8, owes(call, false))]);
            let owed = unanswered.look(Duration::from_secs(now), &others);
            assert_eq!((owed[&7].as_secs(), owed[&8].as_secs()), (now - 200, 0));
        }
        unanswered.look(Duration::from_secs(300), &both);
        let five = |_| Some(Duration::from_secs(5));
        assert_eq!(unanswered.must_end(Duration::from_secs(306), &both, five), [8]);
        // The other one is gone, and it has its time.
        let alone = BTreeMap::from([(7, owes(5, true))]);
        assert_eq!(unanswered.look(Duration::from_secs(312), &alone)[&7].as_secs(), 6);
        unanswered.begin_anew(Duration::from_secs(318), [7].into_iter());
        assert_eq!(unanswered.look(Duration::from_secs(318), &alone)[&7].as_secs(), 4);
    }

    /// Regression: a client that answered each call late excused another one for ever.
    #[test]
    fn two_hostile_clients_excuse_each_other_for_a_limited_time() {
        let mut unanswered = Unanswered::default();
        let mut owed = Duration::ZERO;
        for look in 0..100 {
            let now = Duration::from_secs(1000 + 6 * look);
            let all = BTreeMap::from([(7, owes(5, true)), (8, owes(100 + look / 5, false))]);
            owed = unanswered.look(now, &all)[&7];
            unanswered.begin_anew(now, [7].into_iter());
        }
        assert_eq!(owed.as_secs(), 99 * 6 / 4);
    }

    /// Regression: a client that answered each call just in time, and was called again at once, held up the
    /// others for ever.
    #[test]
    fn a_session_that_is_late_again_and_again_must_end() {
        let limit = Duration::from_secs(30);
        // Columns: looks in which a call is owed, pause after that in looks, and the look at which it is
        // often late. The first look at a call finds nothing late.
        // The end of another session does not make up for it.
        for (looks, pause, often) in
            [(5, 0, Some(17)), (1, 0, None), (5, 5, None), (3, 1, None), (4, 0, Some(19))]
        {
            let mut unanswered = Unanswered::default();
            let at = (0..200).find(|look| {
                let (call, at) = (look / (looks + pause), look % (looks + pause));
                let owed = (at < looks).then_some((7, owes(100 + call, false)));
                unanswered.look(Duration::from_secs(1000 + 6 * look), &owed.into_iter().collect());
                unanswered.begin_anew(Duration::from_secs(1000 + 6 * look), [7].into_iter());
                unanswered.is_often_late(7, limit)
            });
            assert_eq!(at, often, "{looks} looks, pause {pause}");
        }
    }

    /// Two clients that wait in turns for what the other one holds.
    #[test]
    fn late_time_stays_while_a_session_is_excused() {
        let (limit, mut unanswered) = (Duration::from_secs(30), Unanswered::default());
        let often = (0..100).find(|look| {
            let (turn, call) = (look / 4 % 2 == 0, 100 + look / 4 * 2);
            let both = BTreeMap::from([(7, owes(call, turn)), (8, owes(call + 1, !turn))]);
            unanswered.look(Duration::from_secs(1000 + 6 * look), &both);
            unanswered.is_often_late(7, limit)
        });
        assert_eq!(often, Some(71));
    }

    #[test]
    fn of_sessions_that_wait_for_each_other_one_ends() {
        let mut unanswered = Unanswered::default();
        let all = BTreeMap::from([(7, owes(6, true)), (8, owes(5, true))]);
        unanswered.look(Duration::from_secs(100), &all);
        let owed = unanswered.look(Duration::from_secs(106), &all);
        assert_eq!((owed[&7].as_secs(), owed[&8].as_secs()), (6, 6));
        let limit = |session| (session != 9).then_some(Duration::from_secs(5));
        assert_eq!(
            unanswered.must_end(Duration::from_secs(112), &all, limit),
            [8],
            "its call is the older one"
        );
        let endless = BTreeMap::from([(9, owes(1, false))]);
        for now in [112, 200, 300] {
            assert!(unanswered.must_end(Duration::from_secs(now), &endless, limit).is_empty());
        }
    }
}
