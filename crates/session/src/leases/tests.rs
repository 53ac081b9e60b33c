mod attributes;

use super::*;
use penstock_sim::seeds;
use penstock_wire::metadata::Granted;

fn id(ino: u64) -> FileId {
    FileId::of_numbers(0, ino)
}

const FIRST: u64 = 1;
const SECOND: u64 = 2;
const THIRD: u64 = 3;

/// The leases after a restart that these sessions survived, and after their recovery.
fn recovered(sessions: impl Iterator<Item = u64>) -> Leases {
    let mut leases = Leases::restored(sessions);
    leases.end_recovery();
    leases
}

fn calls_of(leases: &Leases, session: u64) -> Vec<u64> {
    let calls = leases.calls.iter().filter(|(_, call)| call.session == session && call.file.is_none());
    calls.map(|(number, _)| *number).collect()
}

/// Regression: a session was alone and was asked to give up everything, first because another one joined
/// and then because the service stopped. The answer to the older request was taken for the answer to the
/// newer one, so the stop did not wait for changes made under leases that it got in between.
#[test]
fn a_stop_waits_for_the_answers_to_all_calls() {
    let mut leases = recovered([FIRST].into_iter());
    assert!(leases.join(FIRST));
    assert!(!leases.join(SECOND));
    leases.close();
    let [for_another, for_the_stop] = calls_of(&leases, FIRST)[..] else { panic!("two calls") };
    for number in calls_of(&leases, SECOND) {
        leases.answered(SECOND, number);
    }
    assert_eq!(leases.leaving(SECOND).copied(), Some(Leaving::Done));
    leases.try_grant(FIRST, id(7), true).expect("it may need one to answer");
    leases.answered(FIRST, for_another);
    assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::Called));
    leases.answered(FIRST, for_the_stop);
    assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::CalledAgain));
    assert_eq!(leases.try_grant(FIRST, id(8), true), None);
    let [last] = calls_of(&leases, FIRST)[..] else { panic!("one call") };
    leases.answered(FIRST, last);
    assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::Done));
    assert_eq!(leases.try_grant(FIRST, id(9), true), None);
}

#[test]
fn a_stop_hears_of_what_could_not_be_made_known() {
    let mut leases = recovered([FIRST].into_iter());
    leases.close();
    let [call] = calls_of(&leases, FIRST)[..] else { panic!("one call") };
    leases.failed(FIRST, call, 5);
    leases.answered(FIRST, call);
    leases.done(FIRST);
    assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::Failed));
}

/// Regression: the stop waited until its timeout for an answer of a session that had ended.
#[test]
fn a_stop_waits_for_no_session_that_has_ended() {
    let mut leases = recovered([FIRST, SECOND].into_iter());
    leases.close();
    leases.leave(FIRST);
    leases.done(SECOND);
    leases.leave(SECOND);
    assert_eq!(leases.leaving(FIRST).copied(), Some(Leaving::Failed));
    assert_eq!(leases.leaving(SECOND).copied(), Some(Leaving::Done));
}

/// Model of one client and the service during a stop.
struct Stop {
    leases: Leases,
    /// True if the client has changed something since it last gave up everything.
    keeps: bool,
    /// Revocations that have reached the client; below, its answers that are on their way.
    heard: BTreeSet<u64>,
    answers: Vec<u64>,
    inodes: u64,
}

/// An event that may come next.
#[derive(Clone, Copy, Debug)]
enum Step {
    Grant,
    Hear,
    AnswerArrives,
    LastAnswerArrives,
    OtherJoins,
    Close,
}

impl Stop {
    /// Applies an event. Returns false if it cannot happen now.
    fn take(&mut self, step: Step) -> bool {
        match step {
            Step::Grant => {
                self.inodes += 1;
                let granted = self.leases.try_grant(FIRST, id(self.inodes), true).is_some();
                self.keeps |= granted;
                granted
            }
            Step::Hear => {
                let next = calls_of(&self.leases, FIRST).into_iter().find(|call| !self.heard.contains(call));
                let Some(call) = next else { return false };
                self.heard.insert(call);
                self.answers.push(call);
                self.keeps = false;
                true
            }
            Step::AnswerArrives if !self.answers.is_empty() => {
                let answer = self.answers.remove(0);
                self.leases.answered(FIRST, answer);
                true
            }
            // It overtakes the others on another connection.
            Step::LastAnswerArrives if self.answers.len() > 1 => {
                let answer = self.answers.pop().expect("there are two");
                self.leases.answered(FIRST, answer);
                true
            }
            Step::OtherJoins if !self.leases.joined.contains(&SECOND) => {
                self.leases.join(SECOND);
                true
            }
            Step::Close if self.leases.closing.is_none() => {
                self.leases.close();
                let others = calls_of(&self.leases, SECOND);
                others.into_iter().for_each(|call| self.leases.answered(SECOND, call));
                true
            }
            _ => false,
        }
    }
}

/// In every order of events: a client that a stop takes for done caches nothing and gets nothing, and the
/// stop does not wait for a client that has answered everything that it has received.
#[test]
fn a_stop_is_done_with_a_client_that_keeps_nothing_in_every_order() {
    const STEPS: [Step; 6] = [
        Step::Grant,
        Step::Hear,
        Step::AnswerArrives,
        Step::LastAnswerArrives,
        Step::OtherJoins,
        Step::Close,
    ];
    let (mut orders, mut done) = (0, 0);
    let mut left: Vec<Vec<Step>> = vec![Vec::new()];
    while let Some(order) = left.pop() {
        let mut stop = Stop {
            leases: recovered([FIRST].into_iter()),
            // It was alone, and needed no lease for what it changed.
            keeps: true,
            heard: BTreeSet::new(),
            answers: Vec::new(),
            inodes: 0,
        };
        if !order.iter().all(|step| stop.take(*step)) {
            continue;
        }
        orders += 1;
        if order.len() < 9 {
            left.extend(STEPS.map(|step| [&order[..], &[step]].concat()));
        }
        if stop.leases.leaving(FIRST).copied() == Some(Leaving::Done) {
            done += 1;
            assert!(!stop.keeps, "{order:?}");
            assert_eq!(stop.leases.try_grant(FIRST, id(0), true), None, "{order:?}");
        }
        // The client goes on until it has received and answered everything.
        while stop.take(Step::Hear) || stop.take(Step::AnswerArrives) {}
        let waits = [Leaving::Called, Leaving::CalledAgain].map(Some);
        assert!(!waits.contains(&stop.leases.leaving(FIRST).copied()), "{order:?} leaves it waiting");
    }
    assert!(orders > 1000 && done > 100, "{orders} orders, {done} of them done");
}

/// Two sessions that take part and know that they are not alone.
fn three_sessions() -> Leases {
    let mut leases = two_sessions();
    assert!(leases.join(THIRD));
    leases
}

fn two_sessions() -> Leases {
    let mut leases = Leases::default();
    assert!(leases.join(FIRST));
    assert!(!leases.join(SECOND));
    for number in calls_of(&leases, FIRST) {
        leases.answered(FIRST, number);
    }
    assert!(leases.join(SECOND));
    leases
}

/// The revocations of leases on an inode, as session and number.
fn revocations(leases: &Leases, ino: FileId) -> Vec<(u64, u64)> {
    let calls = leases.calls.iter().filter(|(_, call)| call.file == Some(ino) && call.scope == Scope::Data);
    calls.map(|(number, call)| (call.session, *number)).collect()
}

#[test]
fn exclusive_leases_exclude_all_others_and_shared_ones_do_not() {
    const INO: FileId = FileId::of_numbers(0, 7);
    // Columns: the lease of the first session, the session and the kind of lease that it wants, and true if
    // that is granted.
    for (held, session, exclusive, granted) in [
        (None, SECOND, false, true),
        (None, SECOND, true, true),
        (Some(false), SECOND, false, true),
        (Some(false), SECOND, true, false),
        (Some(true), SECOND, false, false),
        (Some(true), SECOND, true, false),
        (Some(true), FIRST, false, true),
        (Some(false), FIRST, true, true),
    ] {
        let what = format!("{held:?}, then {exclusive} for session {session}");
        let mut leases = two_sessions();
        let first = held.map(|exclusive| leases.try_grant(FIRST, INO, exclusive).unwrap());
        let found = leases.try_grant(session, INO, exclusive);
        assert_eq!(found.is_some(), granted, "{what}");
        assert!(leases.try_grant(session, id(8), true).is_some(), "{what}: another inode");
        if granted {
            assert!(found > first, "{what}: numbers rise");
            assert_eq!(revocations(&leases, INO), [], "{what}");
            continue;
        }
        // A repeat sends no second revocation, and nothing is granted to the one that has to answer.
        assert_eq!(leases.try_grant(session, INO, exclusive), None, "{what}");
        let [(FIRST, number)] = revocations(&leases, INO)[..] else { panic!("{what}: one revocation") };
        assert_eq!(leases.try_grant(FIRST, INO, false), None, "{what}");
        leases.answered(SECOND, number);
        assert_eq!(leases.try_grant(session, INO, exclusive), None, "{what}: the wrong session answers");
        leases.answered(FIRST, number);
        assert!(leases.try_grant(session, INO, exclusive).is_some(), "{what}");
        assert_eq!(leases.is_unsynced_elsewhere(FIRST, INO), exclusive, "{what}");
    }
}

#[test]
fn a_release_counts_only_for_the_grant_that_it_names() {
    const INO: FileId = FileId::of_numbers(0, 7);
    let mut leases = two_sessions();
    let old = leases.try_grant(FIRST, INO, true).unwrap();
    let new = leases.try_grant(FIRST, INO, true).unwrap();
    for (session, grant, kept) in [(FIRST, old, true), (SECOND, new, true), (FIRST, new, false)] {
        leases.release(session, INO, grant, false);
        assert_eq!(leases.is_unsynced_elsewhere(SECOND, INO), kept, "session {session} releases {grant}");
    }
    leases.release(FIRST, INO, u64::MAX, false);
    assert!(leases.held.is_empty());
}

#[test]
fn a_change_of_size_waits_for_others_unless_they_wait_too() {
    const INO: FileId = FileId::of_numbers(0, 7);
    // Columns: the leases of both sessions, true if the second one waits to change the size, and true if the
    // first one may change it.
    for (first, second, waits, expected) in [
        (None, None, false, true),
        (Some(true), None, false, true),
        (Some(false), None, false, true),
        (Some(false), Some(false), false, false),
        (Some(false), Some(false), true, true),
        (None, Some(true), false, false),
        (None, Some(true), true, true),
    ] {
        let what = format!("{first:?} {second:?} {waits}");
        let mut leases = two_sessions();
        for (session, lease) in [(FIRST, first), (SECOND, second)] {
            lease
                .into_iter()
                .for_each(|exclusive| assert!(leases.try_grant(session, INO, exclusive).is_some()));
        }
        if waits {
            leases.waiting.resize(INO, SECOND);
        }
        let asked = leases.ask_to_resize(FIRST, INO);
        assert_eq!(asked, if expected { Asked::Now(()) } else { Asked::Waits }, "{what}");
        for (session, number) in revocations(&leases, INO) {
            assert_eq!(session, SECOND, "{what}: its own lease stays");
            leases.answered(SECOND, number);
        }
        assert_eq!(news(&mut leases, FIRST).again > 0, !expected, "{what}: it is told to ask again");
        assert_eq!(leases.ask_to_resize(FIRST, INO), Asked::Now(()), "{what}: after the answer");
        assert_eq!(leases.waiting.resizers(INO).len(), usize::from(waits), "{what}");
        leases.resign(SECOND, INO);
        assert_eq!(leases.waiting.resizers(INO), [], "{what}");
    }
}

/// All news for a session that has seen none.
fn news(leases: &mut Leases, session: u64) -> WatchReply {
    leases.news(session, &WatchRequest::default()).unwrap_or_default()
}

/// The calls to sync a file, as session and number.
fn syncs(leases: &Leases, file: FileId) -> Vec<(u64, u64)> {
    let calls = leases.calls.iter().filter(|(_, call)| call.file == Some(file) && call.scope == Scope::Sync);
    calls.map(|(number, call)| (call.session, *number)).collect()
}

/// The outcomes of a session's tickets, as ticket and errno.
fn outcomes(leases: &mut Leases, session: u64) -> Vec<(u64, u32)> {
    news(leases, session).synced.iter().map(|synced| (synced.ticket, synced.errno)).collect()
}

#[test]
fn a_sync_is_asked_of_the_session_with_an_exclusive_lease() {
    const INO: FileId = FileId::of_numbers(0, 7);
    let mut leases = two_sessions();
    assert_eq!(leases.ask_to_sync(SECOND, INO, 1), Asked::Now(()), "nobody has a lease");
    leases.try_grant(FIRST, INO, false).unwrap();
    assert_eq!(leases.ask_to_sync(SECOND, INO, 1), Asked::Now(()), "a shared lease has no unsynced changes");
    leases.try_grant(FIRST, INO, true).unwrap();
    assert_eq!(leases.ask_to_sync(FIRST, INO, 1), Asked::Now(()), "its own changes");
    // Columns: the errno that the client reports, and the one that the other hears; 0 for none.
    for (round, (reported, expected)) in
        (0..).zip([(None, 0), (Some(5), 5), (Some(65_535), 65_535), (Some(65_536), 5), (Some(0), 5)])
    {
        let [first, second, later] = [1, 2, 3].map(|ticket| 10 * round + ticket);
        for ticket in [first, second, first] {
            assert_eq!(leases.ask_to_sync(SECOND, INO, ticket), Asked::Waits);
        }
        let [(FIRST, number)] = syncs(&leases, INO)[..] else { panic!("one call, as it was not sent yet") };
        leases.news(FIRST, &WatchRequest::default()).unwrap();
        assert_eq!(leases.ask_to_sync(SECOND, INO, later), Asked::Waits);
        let [_, (FIRST, last)] = syncs(&leases, INO)[..] else {
            panic!("the answer to the first may be older than this request")
        };
        leases.failed(SECOND, number, 9);
        reported.into_iter().for_each(|errno| leases.failed(FIRST, number, errno));
        assert_eq!(outcomes(&mut leases, SECOND), [], "it is not answered");
        leases.answered(FIRST, number);
        assert_eq!(outcomes(&mut leases, SECOND), [(first, expected), (second, expected)], "{reported:?}");
        leases.answered(FIRST, last);
        let told = outcomes(&mut leases, SECOND);
        assert_eq!(told, [(first, expected), (second, expected), (later, 0)], "kept until they are seen");
        leases.news(SECOND, &WatchRequest { seen: u64::MAX, ..WatchRequest::default() });
        assert_eq!(outcomes(&mut leases, SECOND), []);
    }
    assert!(leases.is_unsynced_elsewhere(SECOND, INO), "a sync ends no lease");
    assert_eq!(leases.ask_to_sync(SECOND, INO, 99), Asked::Waits);
    leases.leave(FIRST);
    assert_eq!(outcomes(&mut leases, SECOND), [(99, 0)], "nobody has a newer state");
    assert_eq!(leases.ask_to_sync(SECOND, INO, 100), Asked::Now(()));
}

/// Regression: after a restart nobody was asked, although every session may own any lease.
#[test]
fn a_sync_is_asked_of_all_that_owe_everything() {
    const INO: FileId = FileId::of_numbers(0, 7);
    let mut leases = recovered([FIRST, SECOND, 3].into_iter());
    assert!(leases.is_unsynced_elsewhere(SECOND, INO));
    for ticket in [1, 2] {
        assert_eq!(leases.ask_to_sync(SECOND, INO, ticket), Asked::Waits);
    }
    assert_eq!(syncs(&leases, INO).len(), 2, "they were not sent yet");
    let calls = leases.news(FIRST, &WatchRequest::default()).unwrap().calls;
    assert!(calls.iter().any(|call| call.is_sync));
    let asked: Vec<u64> = leases.calls.iter().map(|(number, _)| *number).collect();
    for session in [FIRST, 3] {
        assert_eq!(outcomes(&mut leases, SECOND), [], "both must answer");
        asked.iter().for_each(|number| leases.answered(session, *number));
    }
    assert_eq!(outcomes(&mut leases, SECOND), [(1, 0), (2, 0)]);
    assert!(!leases.is_unsynced_elsewhere(SECOND, INO));
    assert!(leases.is_unsynced_elsewhere(FIRST, INO), "the second still owes");
}

/// Regression: after a restart each sync that a session asked for was a call to every other one, and only the
/// requests were bounded: twelve sessions took 2.8 GB. Calls that nobody waits for any more stayed.
#[test]
fn each_call_for_a_sync_counts_and_goes_with_the_last_that_waits() {
    let sessions = 12;
    let mut leases = recovered(1..=sessions);
    let before = leases.calls.iter().count();
    let each = MOST_WAITING as u64 / (sessions - 1);
    for ino in 0..each {
        assert_eq!(leases.ask_to_sync(FIRST, id(ino), ino), Asked::Waits);
    }
    assert_eq!(leases.ask_to_sync(FIRST, id(each), each), Asked::TooMany);
    assert!(leases.calls.iter().count() - before <= MOST_WAITING);
    assert_eq!(leases.ask_to_sync(SECOND, id(0), 1), Asked::Waits);
    leases.leave(FIRST);
    assert_eq!(syncs(&leases, id(0)).len() as u64, sessions - 2, "the second session waits for them");
    assert!(syncs(&leases, id(1)).is_empty() && leases.ask_to_sync(SECOND, id(1), 2) == Asked::Waits);
}

#[test]
fn a_lease_is_granted_in_the_order_of_requests_as_soon_as_it_is_free() {
    const INO: FileId = FileId::of_numbers(0, 7);
    let mut leases = three_sessions();
    leases.ask(FIRST, INO, true);
    assert_eq!(leases.ask(SECOND, INO, true), Asked::Waits);
    assert_eq!(leases.ask(THIRD, INO, false), Asked::Waits);
    assert_eq!(leases.ask(FIRST, INO, false), Asked::Waits, "others came before");
    let granted = |leases: &mut Leases, session| -> Vec<bool> {
        news(leases, session).granted.iter().map(|granted| granted.exclusive).collect()
    };
    let answer = |leases: &mut Leases, session| {
        let [(of, number)] = revocations(leases, INO)[..] else { panic!("one owns the lease") };
        assert_eq!(of, session);
        leases.answered(session, number);
    };
    leases.take_told();
    answer(&mut leases, FIRST);
    assert_eq!(leases.take_told(), BTreeSet::from([SECOND]), "nobody else is woken");
    assert_eq!([SECOND, THIRD, FIRST].map(|of| granted(&mut leases, of).len()), [1, 0, 0]);
    // The next one in turn is looked at when the one before has its lease.
    answer(&mut leases, SECOND);
    assert_eq!(granted(&mut leases, THIRD), [false]);
    assert_eq!(granted(&mut leases, FIRST), [false], "shared leases do not exclude each other");
    let all = news(&mut leases, SECOND);
    let seen = WatchRequest { seen: all.granted[0].grant, ..WatchRequest::default() };
    assert_eq!(leases.news(SECOND, &seen), None);
}

#[test]
fn a_session_that_waits_to_take_part_is_told_when_it_may() {
    // Ways in which the first session gives up everything.
    for way in ["answer", "leave"] {
        let mut leases = Leases::default();
        assert_eq!(leases.ask_to_join(FIRST), Asked::Now(()));
        assert_eq!(leases.ask_to_join(SECOND), Asked::Waits);
        assert_eq!(leases.ask_to_join(3), Asked::Waits);
        leases.take_told();
        assert_eq!([SECOND, 3].map(|session| news(&mut leases, session).again), [0, 0], "{way}");
        match way {
            "answer" => calls_of(&leases, FIRST).into_iter().for_each(|call| leases.answered(FIRST, call)),
            _ => leases.leave(FIRST),
        }
        assert!(leases.take_told().is_superset(&BTreeSet::from([SECOND, 3])), "{way}");
        for session in [SECOND, 3] {
            assert!(news(&mut leases, session).again > 0, "{way}");
            assert_eq!(leases.ask_to_join(session), Asked::Now(()), "{way}");
        }
    }
}

/// Each of two sessions has a lease on one file and waits for a change of its size, which its kernel answers
/// before it drops pages.
#[test]
fn changes_of_size_that_wait_for_each_other_go_on() {
    const INO: FileId = FileId::of_numbers(0, 7);
    let mut leases = two_sessions();
    for session in [FIRST, SECOND] {
        assert!(matches!(leases.ask(session, INO, false), Asked::Now(_)));
    }
    assert_eq!(leases.ask_to_resize(FIRST, INO), Asked::Waits);
    assert_eq!(news(&mut leases, FIRST).again, 0);
    assert_eq!(leases.ask_to_resize(SECOND, INO), Asked::Now(()), "the other one waits too");
    for (session, number) in revocations(&leases, INO) {
        leases.answered(session, number);
    }
    assert!(news(&mut leases, FIRST).again > 0);
    assert_eq!(leases.ask_to_resize(FIRST, INO), Asked::Now(()));
    // One that was given up stands in nobody's way, and lets nobody pass.
    for session in [FIRST, SECOND] {
        assert!(matches!(leases.ask(session, INO, false), Asked::Now(_)));
    }
    assert_eq!(leases.ask_to_resize(FIRST, INO), Asked::Waits);
    leases.resign(FIRST, INO);
    assert_eq!(leases.ask_to_resize(SECOND, INO), Asked::Waits);
}

/// A stop waits for the answer of one session, which needs a lease for it. Another one that has given up
/// everything waits for the same lease, and gets none any more.
#[test]
fn who_gets_nothing_any_more_stands_in_nobodys_way() {
    const INO: FileId = FileId::of_numbers(0, 7);
    let mut leases = two_sessions();
    assert!(leases.join(3));
    assert!(matches!(leases.ask(3, INO, true), Asked::Now(_)));
    assert_eq!(leases.ask(SECOND, INO, true), Asked::Waits);
    assert_eq!(leases.ask(FIRST, INO, true), Asked::Waits);
    leases.close();
    for session in [SECOND, 3] {
        for call in calls_of(&leases, session) {
            leases.answered(session, call);
        }
    }
    assert_eq!(leases.leaving(SECOND).copied(), Some(Leaving::Done));
    for (session, number) in revocations(&leases, INO) {
        leases.answered(session, number);
    }
    assert_eq!(news(&mut leases, FIRST).granted.len(), 1, "it needs it for its answer");
    assert_eq!(news(&mut leases, SECOND).granted, []);
}

/// The same session asks for less while its request for more waits, as after a lost reply.
#[test]
fn a_request_for_less_does_not_end_the_wait_for_more() {
    const INO: FileId = FileId::of_numbers(0, 7);
    let mut leases = two_sessions();
    for session in [FIRST, SECOND] {
        assert!(matches!(leases.ask(session, INO, false), Asked::Now(_)));
    }
    assert_eq!(leases.ask(FIRST, INO, true), Asked::Waits);
    assert_eq!(leases.ask(FIRST, INO, false), Asked::Waits);
    for (session, number) in revocations(&leases, INO) {
        assert_eq!(session, SECOND);
        leases.answered(session, number);
    }
    let granted = news(&mut leases, FIRST).granted;
    assert!(matches!(granted[..], [Granted { exclusive: true, .. }]), "{granted:?}");
    // Both requests are served by it, and a later one is a grant of its own.
    let Asked::Now(later) = leases.ask(FIRST, INO, true) else { panic!("it has the lease") };
    assert!(later > granted[0].grant);
    assert_eq!(news(&mut leases, FIRST).granted, granted, "nobody waits for the later one");
}

/// A session ends while others wait for its lease, to change a size, and for its sync.
#[test]
fn all_that_wait_for_a_session_go_on_when_it_ends() {
    const INO: FileId = FileId::of_numbers(0, 7);
    let mut leases = three_sessions();
    leases.ask(FIRST, INO, true);
    assert_eq!(leases.ask_to_sync(SECOND, INO, 5), Asked::Waits);
    assert_eq!(leases.ask_to_resize(THIRD, INO), Asked::Waits);
    assert_eq!(leases.ask(SECOND, INO, false), Asked::Waits);
    let again = news(&mut leases, THIRD).again;
    leases.leave(FIRST);
    assert_eq!(outcomes(&mut leases, SECOND), [(5, 0)]);
    assert_eq!(news(&mut leases, SECOND).granted.len(), 1);
    // The size is changed once the second one has given back what it got before.
    for (session, number) in revocations(&leases, INO) {
        leases.answered(session, number);
    }
    assert!(news(&mut leases, THIRD).again > again);
    assert_eq!(leases.ask_to_resize(THIRD, INO), Asked::Now(()));
    assert!(leases.exclusive_of(SECOND).is_empty() && leases.calls.is_empty());
}

/// Regression: a session got leases on any number of files.
#[test]
fn a_session_that_has_too_many_leases_is_told_so() {
    let mut leases = two_sessions();
    for ino in 0..MOST_LEASES as u64 {
        assert!(matches!(leases.ask(FIRST, id(ino), ino % 2 == 0), Asked::Now(_)));
    }
    let last = id(MOST_LEASES as u64);
    assert_eq!(leases.ask(FIRST, last, false), Asked::TooMany);
    assert!(matches!(leases.ask(FIRST, id(1), true), Asked::Now(_)), "in place of one that it has");
    assert!(matches!(leases.ask(SECOND, last, false), Asked::Now(_)), "the other has none");
    // Those that it waits for count: each may come at any time.
    let Asked::Now(grant) = leases.ask(FIRST, id(7), true) else { panic!("it has the lease") };
    leases.release(FIRST, id(7), grant, false);
    assert_eq!(leases.ask(FIRST, last, true), Asked::Waits);
    assert_eq!(leases.ask(FIRST, id(7), true), Asked::TooMany);
    for (session, number) in revocations(&leases, last) {
        leases.answered(session, number);
    }
    assert_eq!(leases.exclusive_of(FIRST).len(), MOST_LEASES / 2 + 2, "all even ones, 1 and the last");
    // A session that is alone needs no leases.
    leases.leave(SECOND);
    assert!(matches!(leases.ask(FIRST, id(7), true), Asked::Now(_)));
}

/// Regression: a session that left was looked for in the leases of all others. The leases of others, and the
/// requests that wait for them, are as before.
#[test]
fn a_session_that_leaves_ends_its_own_leases_only() {
    let mut leases = three_sessions();
    for ino in 0..10 {
        assert!(matches!(leases.ask(FIRST, id(ino), true), Asked::Now(_)));
        assert!(matches!(leases.ask(SECOND, id(10 + ino), false), Asked::Now(_)));
    }
    assert_eq!(leases.ask(THIRD, id(3), false), Asked::Waits);
    leases.leave(THIRD);
    leases.leave(THIRD);
    assert_eq!((leases.exclusive_of(FIRST).len(), leases.held_by_others(0, id(12), |_| true).len()), (10, 1));
    leases.leave(SECOND);
    assert!(leases.held_by_others(0, id(12), |_| true).is_empty());
}

#[test]
fn a_session_that_waits_for_too_much_is_told_so() {
    let mut leases = two_sessions();
    for ino in 0..2 + MOST_WAITING as u64 {
        leases.ask(FIRST, id(ino), true);
    }
    for ino in 0..MOST_WAITING as u64 {
        assert_eq!(leases.ask(SECOND, id(ino), true), Asked::Waits);
    }
    let last = id(1 + MOST_WAITING as u64);
    assert_eq!(leases.ask(SECOND, last, true), Asked::TooMany);
    assert_eq!(leases.ask_to_sync(SECOND, last, 1), Asked::TooMany);
    assert_eq!(leases.ask_to_resize(SECOND, last), Asked::TooMany);
    leases.leave(FIRST);
    assert!(matches!(leases.ask(SECOND, last, true), Asked::Now(_)));
}

#[test]
fn news_are_sent_once_and_only_to_their_session() {
    const INO: FileId = FileId::of_numbers(0, 7);
    let mut leases = two_sessions();
    let grant = leases.try_grant(FIRST, INO, true).unwrap();
    assert_eq!(leases.try_grant(SECOND, INO, true), None);
    let [(FIRST, number)] = revocations(&leases, INO)[..] else { panic!("one revocation") };
    leases.note_unlocked(FIRST, id(9));
    leases.note_unlocked(FIRST, id(8));
    let ask = |leases: &mut Leases, session, seen| {
        let request = WatchRequest { seen, wait: true, ..WatchRequest::default() };
        leases.news(session, &request).map(|reply| {
            assert!(!reply.alone);
            let calls: Vec<_> = reply.calls.iter().map(|call| (call.number, call.ino, call.grant)).collect();
            (calls, reply.unlocked.iter().map(|file| file.ino).collect::<Vec<_>>())
        })
    };
    let call = (number, INO.ino.0, grant);
    // The released locks have later numbers than the call.
    // Columns: session, last number seen, and the revocations and inodes with released locks in the reply.
    for (session, seen, expected) in [
        (SECOND, 0, None),
        (FIRST, 0, Some((vec![call], vec![9, 8]))),
        (FIRST, 0, Some((vec![call], vec![9, 8]))),
        (FIRST, number - 1, Some((vec![call], vec![9, 8]))),
        (FIRST, number, Some((vec![], vec![9, 8]))),
        (FIRST, number + 1, Some((vec![], vec![8]))),
        (FIRST, number + 2, None),
        (FIRST, u64::MAX, None),
    ] {
        assert_eq!(ask(&mut leases, session, seen), expected, "session {session} has seen {seen}");
    }
    // Regression: one that believed to be alone was asked to give up everything, each time that it said so,
    // and nobody else got a lease meanwhile.
    let request = WatchRequest { alone: true, seen: number, ..WatchRequest::default() };
    for _ in 0..2 {
        let reply = leases.news(FIRST, &request).unwrap();
        assert!(!reply.alone && reply.calls.is_empty(), "{reply:?}");
    }
    assert!(!leases.calls.owes_everything(FIRST));
}

#[test]
fn after_a_restart_several_sessions_give_up_everything_and_one_does_not() {
    for sessions in 0..4 {
        let mut leases = Leases::restored(1..=sessions);
        assert!((1..=sessions).all(|session| !leases.join(session)), "nobody takes part in a recovery");
        leases.end_recovery();
        let called = leases.calls.len() as u64;
        assert_eq!(called, if sessions == 1 { 0 } else { sessions }, "{sessions} sessions");
        assert_eq!(leases.alone, (sessions == 1).then_some(1));
        for session in 1..=sessions {
            assert!(leases.has_joined(session) && leases.join(session), "it still owns what it had");
            let others_owe = sessions > 1;
            assert_eq!(leases.try_grant(session, id(7), true).is_none(), others_owe, "{sessions} sessions");
        }
        assert_eq!(leases.join(9), sessions == 0, "{sessions} sessions");
        for session in 1..=sessions {
            for number in calls_of(&leases, session) {
                leases.answered(session, number);
            }
        }
        assert!(leases.join(9) && leases.try_grant(9, id(7), true).is_some(), "{sessions} sessions");
        assert_eq!(leases.are_shared(), sessions > 0);
    }
}

/// A client as it sees itself.
#[derive(Debug, Default)]
struct Client {
    joined: bool,
    alone: bool,
    /// By inode, its lease: exclusive or not, and the grant.
    leases: BTreeMap<FileId, (bool, u64)>,
    seen: u64,
    /// The newest grant that was revoked, by inode, and of all inodes.
    revoked: BTreeMap<FileId, u64>,
    revoked_all: u64,
    answers: Vec<u64>,
    /// Grants on their way to it.
    late: Vec<(FileId, bool, u64)>,
    /// Inodes for whose leases it waits.
    waits: BTreeSet<FileId>,
}

impl Client {
    /// True if no grant on an inode is on its way.
    fn is_synced(&self, ino: FileId) -> bool {
        self.late.iter().all(|(late, ..)| *late != ino)
    }

    /// A client has one request for a lease on an inode at a time, and none for less than it has.
    fn may_ask(&self, ino: FileId, exclusive: bool) -> bool {
        let covered = self.leases.get(&ino).is_some_and(|(has, _)| *has || !exclusive);
        self.joined && !self.alone && self.is_synced(ino) && !covered && !self.waits.contains(&ino)
    }

    /// Takes a grant, unless it was revoked meanwhile, or a newer one has arrived.
    fn take(&mut self, ino: FileId, exclusive: bool, grant: u64) {
        let revoked = self.revoked.get(&ino).copied().unwrap_or(0).max(self.revoked_all);
        let newest = self.leases.get(&ino).map_or(0, |(_, grant)| *grant);
        if grant > revoked && grant > newest {
            self.leases.insert(ino, (exclusive, grant));
        }
    }
}

/// The service and its clients, with messages in any order.
struct Model {
    leases: Leases,
    clients: BTreeMap<u64, Client>,
    random: u64,
}

const SESSIONS: u64 = 3;

impl Model {
    fn below(&mut self, bound: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % bound
    }

    fn hear(&mut self, session: u64) {
        let client = self.clients.get_mut(&session).unwrap();
        let request = WatchRequest { alone: client.alone, seen: client.seen, ..WatchRequest::default() };
        let Some(reply) = self.leases.news(session, &request) else { return };
        for granted in &reply.granted {
            client.waits.remove(&granted.file());
            client.take(granted.file(), granted.exclusive, granted.grant);
        }
        let news = reply.granted.iter().map(|granted| granted.grant).chain([reply.again]);
        let last = client.seen;
        client.seen = client.seen.max(news.max().unwrap_or(0));
        for call in reply.calls {
            assert!(call.number > last, "numbers rise");
            client.seen = client.seen.max(call.number);
            client.answers.push(call.number);
            if call.ino == 0 {
                client.revoked_all = client.revoked_all.max(call.grant);
                client.leases.retain(|_, (_, grant)| *grant > call.grant);
            } else {
                let newest = client.revoked.entry(id(call.ino)).or_default();
                *newest = call.grant.max(*newest);
                client.leases.retain(|ino, (_, grant)| *ino != id(call.ino) || *grant > call.grant);
            }
        }
        client.alone = reply.alone;
    }

    fn answer(&mut self, session: u64) {
        let count = self.clients[&session].answers.len() as u64;
        if count > 0 {
            let at = self.below(count) as usize;
            let number = self.clients.get_mut(&session).unwrap().answers.swap_remove(at);
            self.leases.answered(session, number);
        }
    }

    /// A grant reaches its client, which ignores it if it was revoked meanwhile.
    fn arrive(&mut self, session: u64) {
        let client = self.clients.get_mut(&session).unwrap();
        if let Some((ino, exclusive, grant)) = client.late.pop() {
            client.take(ino, exclusive, grant);
        }
    }

    fn step(&mut self) {
        let session = 1 + self.below(SESSIONS);
        let ino = id(5 + self.below(2));
        match self.below(16) {
            0..=2 => {
                let joined = self.leases.ask_to_join(session) == Asked::Now(());
                self.clients.get_mut(&session).unwrap().joined |= joined;
            }
            3..=6 => {
                let exclusive = self.below(2) == 0;
                if self.clients[&session].may_ask(ino, exclusive) {
                    let client = self.clients.get_mut(&session).unwrap();
                    match self.leases.ask(session, ino, exclusive) {
                        Asked::Now(grant) => client.late.push((ino, exclusive, grant)),
                        Asked::Waits => drop(client.waits.insert(ino)),
                        Asked::TooMany => panic!("{SESSIONS} clients want two files"),
                    }
                }
            }
            7 | 8 => self.arrive(session),
            9..=11 => self.hear(session),
            12 | 13 => self.answer(session),
            14 if self.clients[&session].is_synced(ino) => {
                if let Some((_, grant)) = self.clients.get_mut(&session).unwrap().leases.remove(&ino) {
                    self.leases.release(session, ino, grant, false);
                }
            }
            15 if self.below(6) == 0 => {
                self.leases.leave(session);
                self.clients.insert(session, Client::default());
            }
            _ => {}
        }
    }

    /// No two clients believe in rights that exclude each other.
    fn assert_exclusive(&self) {
        for (session, client) in &self.clients {
            for (other, theirs) in self.clients.iter().filter(|(other, _)| *other != session) {
                let what = || format!("{session}: {client:?}, {other}: {theirs:?}");
                assert!(!client.alone || !theirs.joined && theirs.leases.is_empty(), "{}", what());
                for (ino, (exclusive, _)) in &client.leases {
                    assert!(!exclusive || !theirs.leases.contains_key(ino), "{}", what());
                }
            }
        }
    }

    /// Everything is heard and answered until nothing is left.
    fn drain(&mut self) {
        for _ in 0..20 {
            for session in 1..=SESSIONS {
                self.hear(session);
                while !self.clients[&session].answers.is_empty() {
                    self.answer(session);
                }
            }
        }
        assert!(self.leases.calls.is_empty(), "{:?}", self.leases.calls);
        for (session, client) in &self.clients {
            assert!(client.waits.is_empty(), "{session} waits for ever: {client:?}");
        }
    }
}

#[test]
fn clients_never_believe_in_leases_that_exclude_each_other() {
    for seed in seeds(0..200) {
        let clients = (1..=SESSIONS).map(|session| (session, Client::default())).collect();
        let mut model =
            Model { leases: Leases::default(), clients, random: seed.wrapping_mul(0x9e37_79b9) + 1 };
        for _ in 0..400 {
            model.step();
            let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.assert_exclusive()));
            assert!(checked.is_ok(), "the seed is {seed}");
        }
        // Each session gets an exclusive lease once the others have answered.
        for session in 1..=SESSIONS {
            model.leases.join(session);
            model.drain();
            assert!(model.leases.join(session), "seed {seed}: session {session} joins");
            if model.leases.ask(session, id(5), true) == Asked::Waits {
                model.clients.get_mut(&session).unwrap().waits.insert(id(5));
            }
            model.drain();
        }
    }
}

#[test]
fn a_session_is_alone_once_it_has_answered_everything() {
    let mut leases = Leases::default();
    assert!(leases.join(FIRST) && leases.join(FIRST));
    assert_eq!(leases.alone, Some(FIRST));
    assert!(!leases.join(SECOND));
    leases.leave(SECOND);
    assert_eq!(leases.alone, None, "a revocation of everything is not answered");
    let [number] = calls_of(&leases, FIRST)[..] else { panic!("one revocation") };
    leases.answered(FIRST, number);
    assert_eq!(leases.alone, Some(FIRST));
    // It needs no lease, and its next request of one leaves none behind.
    let grant = leases.try_grant(FIRST, id(7), true).unwrap();
    assert!(leases.try_grant(FIRST, id(8), true).unwrap() > grant, "numbers rise");
    assert!(leases.held.is_empty() && !leases.are_shared());
    leases.close();
    assert_eq!(leases.alone, None, "it must give up everything when the service stops");
}

/// Regression: it got one, and the session that was alone since then knew nothing of it.
#[test]
fn a_session_that_has_left_gets_no_lease() {
    let mut leases = Leases::default();
    let ino = id(7);
    assert!(leases.join(FIRST));
    assert!(!leases.join(SECOND));
    for call in calls_of(&leases, FIRST) {
        leases.answered(FIRST, call);
    }
    assert!(leases.join(SECOND));
    leases.try_grant(FIRST, ino, true).unwrap();
    assert_eq!(leases.try_grant(SECOND, ino, true), None, "it waits");
    let revocation = *leases.calls.iter().find(|(_, call)| call.session == FIRST).unwrap().0;
    leases.leave(SECOND);
    leases.answered(FIRST, revocation);
    assert_eq!(leases.alone, Some(FIRST), "the first session is alone");
    assert_eq!(leases.try_grant(SECOND, ino, true), None, "it has left");
    leases.leave(99);
    assert!(!leases.join(SECOND), "the first session must give up everything");
}

#[test]
fn a_session_that_ends_owes_nothing_any_more() {
    let mut leases = Leases::default();
    assert!(leases.join(FIRST));
    assert!(!leases.join(SECOND), "the first one is asked to give up everything");
    leases.leave(FIRST);
    assert!(leases.join(SECOND));
    assert_eq!(leases.alone, Some(SECOND), "it is alone");
    assert!(leases.try_grant(SECOND, id(7), true).is_some());
}

#[test]
fn a_session_that_is_left_during_a_stop_is_not_alone() {
    let mut leases = recovered([FIRST, SECOND].into_iter());
    leases.close();
    for session in [FIRST, SECOND] {
        for call in calls_of(&leases, session) {
            leases.answered(session, call);
        }
    }
    leases.leave(SECOND);
    assert_eq!(leases.alone, None);
    assert_eq!(leases.try_grant(FIRST, id(7), true), None, "it has given up everything");
}

#[test]
fn a_session_that_left_hears_nothing_from_before() {
    let mut leases = Leases::default();
    leases.join(FIRST);
    leases.note_unlocked(FIRST, id(7));
    leases.leave(FIRST);
    leases.join(FIRST);
    let news = leases.news(FIRST, &WatchRequest { alone: true, ..WatchRequest::default() });
    assert_eq!(news, None);
}
