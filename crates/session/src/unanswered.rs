//! Finds the sessions whose clients are heard and do not answer a call of the service.
//!
//! Others wait for the answer, so such a session must end like one that is silent. A client needs the
//! service for its answer: it syncs what it has cached. So no time counts while the service has been
//! executing one of its requests for long.
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
}

/// The oldest call of each session that owes an answer, and the time since when it has had the means to give
/// it.
#[derive(Debug, Default)]
pub(crate) struct Unanswered {
    since: BTreeMap<u64, (u64, Duration)>,
    /// Time of the last look.
    looked: Duration,
}

impl Unanswered {
    /// Takes in the sessions that owe an answer now. Returns how long each has owed the same one.
    pub(crate) fn look(&mut self, now: Duration, oldest: &BTreeMap<u64, Oldest>) -> BTreeMap<u64, Duration> {
        let looked = std::mem::replace(&mut self.looked, now);
        let known = std::mem::take(&mut self.since);
        for (session, Oldest { call, busy_since }) in oldest {
            let is_held_up = busy_since.is_some_and(|since| since <= looked);
            let since = match known.get(session) {
                Some((same, since)) if same == call && !is_held_up => *since,
                _ => now,
            };
            self.since.insert(*session, (*call, since));
        }
        assert_eq!(self.since.len(), oldest.len(), "a session that owes nothing is forgotten");
        self.since.iter().map(|(session, (_, since))| (*session, now - *since)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks once at a session that owes this call. Returns how long it has owed it, in seconds.
    fn look(unanswered: &mut Unanswered, now: u64, call: u64, busy_since: Option<u64>) -> u64 {
        let oldest = Oldest { call, busy_since: busy_since.map(Duration::from_secs) };
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
    }
}
