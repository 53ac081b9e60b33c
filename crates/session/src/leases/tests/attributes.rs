//! Tests of leases on attributes.

use super::*;

/// The revocations of leases on attributes of an inode, as session and number.
fn attribute_calls(leases: &Leases, file: FileId) -> Vec<(u64, u64)> {
    let calls = leases.calls.iter().filter(|(_, call)| call.file == Some(file));
    calls
        .filter(|(_, call)| call.scope == Scope::Attributes)
        .map(|(number, call)| (call.session, *number))
        .collect()
}

#[test]
fn a_change_of_attributes_waits_for_all_that_may_cache_them() {
    const DIR: FileId = FileId::of_numbers(0, 7);
    const FILE: FileId = FileId::of_numbers(0, 8);
    let now = Duration::from_secs(100);
    let mut leases = three_sessions();
    let first = leases.grant_attributes(FIRST, DIR, now);
    let third = leases.grant_attributes(THIRD, DIR, now);
    assert!(0 < first && first < third);
    assert_eq!(leases.grant_attributes(FIRST, DIR, now), first, "it has not changed meanwhile");
    leases.grant_attributes(SECOND, FILE, now);
    assert_eq!(leases.ask_to_change(SECOND, &[DIR, FILE], now), Asked::Waits);
    assert_eq!(leases.ask_to_change(SECOND, &[DIR, FILE], now), Asked::Waits);
    let [(FIRST, one), (THIRD, other)] = attribute_calls(&leases, DIR)[..] else { panic!("one call each") };
    assert_eq!(attribute_calls(&leases, FILE), [], "its own");
    assert_eq!(leases.grant_attributes(FIRST, DIR, now), 0, "it has been called");
    leases.answered(FIRST, one);
    assert_eq!(news(&mut leases, SECOND).again, 0, "the third one has not answered");
    assert_eq!(leases.grant_attributes(FIRST, DIR, now), 0, "somebody wants to change it");
    leases.answered(THIRD, other);
    assert!(news(&mut leases, SECOND).again > 0);
    assert_eq!(leases.ask_to_change(SECOND, &[DIR, FILE], now), Asked::Now(()));
    let later = now + Duration::from_secs(3600);
    assert_eq!(leases.grant_attributes(FIRST, FILE, later), 0, "it is being changed");
    leases.end_change(&[DIR, FILE]);
    assert!(leases.grant_attributes(FIRST, FILE, later) > third);
    assert!(!leases.is_anything_noted());
}

#[test]
fn an_exclusive_lease_and_the_attributes_of_others_exclude_each_other() {
    const FILE: FileId = FileId::of_numbers(0, 7);
    let now = Duration::from_secs(100);
    let mut leases = two_sessions();
    assert!(leases.grant_attributes(FIRST, FILE, now) > 0);
    assert!(leases.try_grant(SECOND, FILE, false).is_some(), "a reader changes nothing");
    assert_eq!(leases.ask(SECOND, FILE, true), Asked::Waits);
    let [(FIRST, call)] = attribute_calls(&leases, FILE)[..] else { panic!("one call") };
    assert_eq!(leases.grant_attributes(FIRST, FILE, now), 0);
    leases.answered(FIRST, call);
    assert_eq!(news(&mut leases, SECOND).granted.len(), 1);
    assert_eq!(leases.grant_attributes(FIRST, FILE, now), 0, "another one may have newer ones");
    assert!(leases.grant_attributes(SECOND, FILE, now) > 0);
    assert_eq!(leases.ask_to_resize(FIRST, FILE), Asked::Waits);
    assert_eq!(attribute_calls(&leases, FILE).len(), 1, "it may cache the size");
}

/// Regression: a client answered a call later than the time for which nobody else gets a lease. Another one
/// had got one meanwhile and was not called, and who wanted to change the inode waited for as long as it was
/// looked at.
#[test]
fn nobody_gets_a_lease_while_another_one_waits_to_change_the_inode() {
    const FILE: FileId = FileId::of_numbers(0, 7);
    let now = Duration::from_secs(100);
    let mut leases = three_sessions();
    assert!(leases.grant_attributes(FIRST, FILE, now) > 0);
    assert_eq!(leases.ask_to_change(SECOND, &[FILE], now), Asked::Waits);
    let later = now + Duration::from_secs(60);
    assert_eq!(leases.grant_attributes(THIRD, FILE, later), 0);
    let [(FIRST, call)] = attribute_calls(&leases, FILE)[..] else { panic!("one call") };
    // The client that waits may get one itself.
    assert!(leases.grant_attributes(SECOND, FILE, later) > 0);
    leases.answered(FIRST, call);
    assert!(news(&mut leases, SECOND).again > 0);
    assert_eq!(leases.ask_to_change(SECOND, &[FILE], later), Asked::Now(()));
}

/// The end of a session, a release and a time alone end leases on attributes.
#[test]
fn leases_on_attributes_end_with_their_session() {
    const FILE: FileId = FileId::of_numbers(0, 7);
    let now = Duration::from_secs(100);
    let mut leases = two_sessions();
    leases.grant_attributes(FIRST, FILE, now);
    assert_eq!(leases.ask_to_change(SECOND, &[FILE], now), Asked::Waits);
    leases.leave(FIRST);
    assert!(news(&mut leases, SECOND).alone && leases.attributes.is_empty());
    assert_eq!(leases.ask_to_change(SECOND, &[FILE], now), Asked::Now(()));
    leases.end_change(&[FILE]);
    assert_eq!(leases.grant_attributes(SECOND, FILE, now), 0, "it needs none");
    let mut leases = two_sessions();
    let grant = leases.grant_attributes(FIRST, FILE, now);
    assert_eq!(leases.ask_to_change(SECOND, &[FILE], now), Asked::Waits);
    leases.release(FIRST, FILE, grant, false);
    assert_eq!(news(&mut leases, SECOND).again, 0, "that was of the data");
    leases.release(FIRST, FILE, grant, true);
    assert!(news(&mut leases, SECOND).again > 0);
}

#[test]
fn what_is_waited_for_is_bounded_and_shown() {
    let now = Duration::from_secs(100);
    let mut leases = two_sessions();
    for ino in 0..MOST_WAITING as u64 + 1 {
        // More than one session may have at the same time.
        let session = if ino < MOST_WAITING as u64 { FIRST } else { THIRD };
        if session == THIRD {
            assert!(leases.join(THIRD));
        }
        assert!(leases.grant_attributes(session, id(ino + 1), now) > 0, "{ino}");
    }
    assert_eq!(leases.grant_attributes(FIRST, id(1 << 40), now), 0, "it has the most");
    let mut all = BTreeMap::new();
    leases.add_holdings(&mut all);
    assert_eq!(all[&FIRST].attribute_leases, MOST_WAITING as u64);
    assert_eq!(all[&THIRD].attribute_leases, 1);
    for ino in 0..MOST_WAITING as u64 {
        assert_eq!(leases.ask_to_change(SECOND, &[id(ino + 1)], now), Asked::Waits);
    }
    assert_eq!(leases.ask_to_change(SECOND, &[id(MOST_WAITING as u64 + 1)], now), Asked::TooMany);
    leases.leave(FIRST);
    assert!(news(&mut leases, SECOND).again > 0);
    assert_eq!(leases.ask_to_change(SECOND, &[id(MOST_WAITING as u64 + 1)], now), Asked::Waits);
    leases.leave(SECOND);
    assert!(!leases.is_anything_noted());
}

/// After a restart others may cache names without a lease that the service knows.
#[test]
fn names_are_changed_after_all_others_have_given_up_everything() {
    let mut leases = recovered([FIRST, SECOND].into_iter());
    assert_eq!(leases.ask_to_change_names(FIRST), Asked::Waits);
    assert_eq!(leases.grant_attributes(FIRST, id(7), Duration::ZERO), 0, "the other one may change it");
    for number in calls_of(&leases, FIRST) {
        leases.answered(FIRST, number);
    }
    assert_eq!(leases.ask_to_change_names(FIRST), Asked::Waits, "the other one owes it");
    assert_eq!(leases.ask_to_change_names(SECOND), Asked::Now(()));
    for number in calls_of(&leases, SECOND) {
        leases.answered(SECOND, number);
    }
    assert!(news(&mut leases, FIRST).again > 0);
    assert_eq!(leases.ask_to_change_names(FIRST), Asked::Now(()));
    assert!(leases.grant_attributes(FIRST, id(7), Duration::ZERO) > 0);
}

/// Clients, with the leases that they believe to have, and the service.
struct Model {
    leases: Leases,
    now: Duration,
    /// By session and inode: the number of the lease.
    believed: BTreeMap<(u64, FileId), u64>,
    /// Replies with leases that have not arrived: session, inode, number.
    replies: Vec<(u64, FileId, u64)>,
    /// Calls that were received and not answered: session, number.
    heard: Vec<(u64, u64)>,
    /// The newest revoked number of each session.
    void: BTreeMap<u64, u64>,
    changing: Vec<(u64, FileId)>,
}

const SESSIONS: u64 = 4;
const INODES: u64 = 3;

impl Model {
    fn step(&mut self, draw: &mut impl FnMut(u64) -> u64) {
        let (session, file) = (1 + draw(SESSIONS), id(7 + draw(INODES)));
        match draw(9) {
            0 | 1 => {
                let grant = self.leases.grant_attributes(session, file, self.now);
                self.replies.push((session, file, grant));
            }
            2 => {
                let at = draw(self.replies.len().max(1) as u64) as usize;
                if at < self.replies.len() {
                    let (session, file, grant) = self.replies.remove(at);
                    let is_void = grant <= self.void.get(&session).copied().unwrap_or(0);
                    let older = self.believed.get(&(session, file)).is_some_and(|held| *held > grant);
                    if !is_void && !older {
                        self.believed.insert((session, file), grant);
                    }
                }
            }
            3 => {
                if self.leases.ask_to_change(session, &[file], self.now) == Asked::Now(()) {
                    self.changing.push((session, file));
                }
            }
            4 => self.end_change(),
            5 => self.hear(session),
            6 => self.answer(draw(self.heard.len().max(1) as u64) as usize),
            7 => {
                if let Some(grant) = self.believed.remove(&(session, file)) {
                    let void = self.void.entry(session).or_default();
                    *void = grant.max(*void);
                    self.leases.release(session, file, grant, true);
                }
            }
            _ => self.now += Duration::from_millis(draw(8000)),
        }
        for (changer, file) in &self.changing {
            let others = self.believed.keys().filter(|(other, held)| other != changer && held == file);
            assert_eq!(others.count(), 0, "session {changer} changes {file}, which others cache");
        }
    }

    fn end_change(&mut self) {
        if let Some((_, file)) = self.changing.pop() {
            self.leases.end_change(&[file]);
        }
    }

    /// A session receives its calls.
    fn hear(&mut self, session: u64) {
        for call in news(&mut self.leases, session).calls {
            assert!(call.attributes, "nothing else is leased");
            let file = FileId::of_numbers(call.branch, call.ino);
            let void = self.void.entry(session).or_default();
            *void = call.grant.max(*void);
            if self.believed.get(&(session, file)).is_some_and(|held| *held <= call.grant) {
                self.believed.remove(&(session, file));
            }
            if !self.heard.contains(&(session, call.number)) {
                self.heard.push((session, call.number));
            }
        }
    }

    fn answer(&mut self, at: usize) {
        if at < self.heard.len() {
            let (session, number) = self.heard.remove(at);
            self.leases.answered(session, number);
        }
    }
}

/// In random orders of grants, late replies, calls, answers and releases nobody changes attributes that
/// another client may show, and every change can be made once all have answered.
#[test]
fn nobody_changes_what_another_one_caches() {
    for seed in seeds(0..200) {
        let world = penstock_sim::World::new(seed);
        let mut draw = |most| world.below(most);
        let mut leases = three_sessions();
        assert!(leases.join(SESSIONS));
        let mut model = Model {
            leases,
            now: Duration::from_secs(100),
            believed: BTreeMap::new(),
            replies: Vec::new(),
            heard: Vec::new(),
            void: BTreeMap::new(),
            changing: Vec::new(),
        };
        (0..400).for_each(|_| model.step(&mut draw));
        while !model.changing.is_empty() {
            model.end_change();
        }
        for session in 1..=SESSIONS {
            for file in (0..INODES).map(|ino| id(7 + ino)) {
                model.leases.ask_to_change(session, &[file], model.now);
            }
        }
        for session in 1..=SESSIONS {
            model.hear(session);
        }
        while !model.heard.is_empty() {
            model.answer(0);
        }
        for file in (0..INODES).map(|ino| id(7 + ino)) {
            assert_eq!(model.leases.ask_to_change(1, &[file], model.now), Asked::Now(()), "seed {seed}");
        }
    }
}
