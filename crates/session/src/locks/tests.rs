use super::*;
use penstock_sim::seeds;

fn id(ino: u64) -> FileId {
    FileId::of_numbers(0, ino)
}

fn request(owner: u64, change: LockChange) -> LockRequest {
    LockRequest { ino: 9, owner, last: 99, change: change.into(), wait: true, ..LockRequest::default() }
}

#[test]
fn sessions_are_told_apart_and_told_of_each_other() {
    let mut locks = Locks::default();
    let set =
        |locks: &mut Locks, session, request: &LockRequest| locks.change(session, request, false).unwrap().0;
    assert_eq!(set(&mut locks, 1, &request(5, LockChange::Exclusive)).conflict, None);
    let conflict = set(&mut locks, 2, &request(5, LockChange::Shared)).conflict.unwrap();
    assert_eq!((conflict.first, conflict.last, conflict.change()), (0, 99, LockChange::Exclusive));
    // Locks of flock and of fcntl do not conflict.
    let flock = LockRequest { flock: true, ..request(5, LockChange::Exclusive) };
    assert_eq!(set(&mut locks, 2, &flock).conflict, None);
    assert!(locks.files[&id(9)].waiting.contains(&2));
    assert_eq!(locks.end(1), [id(9)]);
    assert_eq!(set(&mut locks, 2, &request(5, LockChange::Shared)).conflict, None);
    assert_eq!(locks.end(2), [id(9)]);
    assert!(locks.files.is_empty() && locks.held.is_empty());
    let backwards = LockRequest { first: 100, ..request(1, LockChange::Shared) };
    assert_eq!(locks.change(1, &backwards, false), Err(Errno::INVAL));
}

fn byte(ino: u64, uid: u32, byte: u64, change: LockChange) -> LockRequest {
    let (first, last) = (2 * byte, 2 * byte);
    LockRequest { ino, uid, owner: uid.into(), first, last, change: change.into(), ..LockRequest::default() }
}

/// Regression: a user split one shared lock of a file until nobody else could lock any of it, and after a
/// restart those locks did not come back.
#[test]
fn giving_up_parts_of_a_lock_is_bounded_by_user() {
    let mut locks = Locks::default();
    let whole = LockRequest { last: 1 << 40, ..byte(9, 1000, 0, LockChange::Shared) };
    assert!(locks.change(1, &whole, false).is_ok());
    let mut given_up = 0;
    while locks.change(1, &byte(9, 1000, 1 + given_up, LockChange::Unlock), false).is_ok() {
        given_up += 1;
    }
    assert_eq!(given_up, MOST_OF_USER_IN_FILE as u64 - 1);
    let exclusive = byte(9, 0, 1, LockChange::Exclusive);
    assert_eq!(locks.change(2, &exclusive, false).unwrap().0.conflict, None);
    let other = byte(9, 1001, 2, LockChange::Exclusive);
    assert_eq!(locks.change(1, &other, false).unwrap().0.conflict, None);
    // The whole lock can still be released.
    let all = LockRequest { change: LockChange::Unlock.into(), ..whole };
    assert!(locks.change(1, &all, false).is_ok());
    assert_eq!(locks.files[&id(9)].tables[0].len(), 2);
    assert_eq!(locks.held.get(&(1, 1000)), None);
}

/// Regression: one user took all locks of a mount, and root and all other users got none.
/// Regression: a user of a gateway released the lock of another one by its owner's number.
#[test]
fn users_of_one_session_have_owners_of_their_own() {
    let mut locks = Locks::default();
    let request = |change: LockChange| LockRequest {
        ino: 7,
        owner: 1,
        last: u64::MAX,
        change: change.into(),
        ..LockRequest::default()
    };
    let mut ask = |user, change| locks.change_for((1, user), &request(change), false).unwrap().0.conflict;
    assert_eq!(ask(5, LockChange::Exclusive), None);
    assert_eq!(ask(6, LockChange::Unlock), None);
    assert!(ask(6, LockChange::Exclusive).is_some(), "the other one still has it");
    assert_eq!(ask(5, LockChange::Unlock), None);
    assert_eq!(ask(6, LockChange::Exclusive), None);
}

#[test]
fn a_user_takes_no_locks_from_others() {
    let mut locks = Locks::default();
    let files = (MOST_OF_USER / MOST_OF_USER_IN_FILE) as u64;
    for ino in 0..files {
        for at in 0..MOST_OF_USER_IN_FILE as u64 {
            assert!(locks.change(1, &byte(ino, 1000, at, LockChange::Shared), false).is_ok());
        }
    }
    let more = byte(files, 1000, 0, LockChange::Shared);
    assert_eq!(locks.change(1, &more, false), Err(Errno::NOLCK));
    assert!(!locks.files.contains_key(&id(files)), "what is refused leaves nothing");
    for uid in [0, 1001] {
        assert!(locks.change(1, &byte(files, uid, 0, LockChange::Shared), false).is_ok());
    }
    // A lock that was granted before a restart is restored beyond the bound.
    assert!(locks.change(1, &more, true).is_ok());
    assert_eq!(locks.held[&(1, 1000)], MOST_OF_USER + 1);
}

/// Regression: the locks of root had no bound, and neither had those that a session said it had before a
/// restart.
#[test]
fn the_locks_of_root_and_those_before_a_restart_are_bounded() {
    let mut locks = Locks::default();
    let at = |number: u64| byte(number / 64, 0, number % 64, LockChange::Shared);
    for number in 0..MOST_OF_SESSION as u64 {
        assert!(locks.change(1, &at(number), number % 2 == 0).is_ok());
    }
    for granted in [false, true] {
        assert_eq!(locks.change(1, &at(MOST_OF_SESSION as u64), granted), Err(Errno::NOLCK));
        assert!(locks.change(2, &at(0), granted).is_ok(), "another session");
    }
    assert!(locks.change(1, &byte(3, 1000, 0, LockChange::Shared), false).is_ok(), "another user");
}

#[test]
fn a_request_that_makes_no_sense_changes_nothing() {
    let mut locks = Locks::default();
    let held = byte(9, 1000, 1, LockChange::Exclusive);
    assert!(locks.change(1, &held, false).is_ok());
    let good = byte(9, 1000, 1, LockChange::Shared);
    for (what, request) in [
        ("backwards", LockRequest { first: 3, last: 2, ..good.clone() }),
        ("far backwards", LockRequest { first: u64::MAX, last: 0, ..good.clone() }),
        ("no change", LockRequest { change: -1, ..good.clone() }),
        ("an unknown change", LockRequest { change: 3, ..good.clone() }),
        ("an unknown change of another file", LockRequest { change: i32::MAX, ino: 10, ..good.clone() }),
    ] {
        for granted in [false, true] {
            assert_eq!(locks.change(1, &request, granted), Err(Errno::INVAL), "{what}");
        }
        assert_eq!((locks.files.len(), locks.files[&id(9)].count()), (1, 1), "{what}");
        assert!(locks.files[&id(9)].waiting.is_empty(), "{what}");
    }
}

#[test]
fn a_conflict_names_the_lock_that_is_in_the_way() {
    let mut locks = Locks::default();
    let held = LockRequest { first: 10, last: 19, pid: 77, ..request(5, LockChange::Exclusive) };
    assert!(locks.change(1, &held, false).is_ok());
    // Columns: session, owner, first and last byte, and the pid in the reply if the lock of session 1
    // conflicts.
    for (session, owner, first, last, expected) in [
        (1, 5, 0, 99, None),
        (1, 6, 0, 99, Some(77)),
        (2, 5, 0, 99, Some(0)),
        (2, 5, 19, 19, Some(0)),
        (2, 5, 20, 99, None),
        (2, 5, 0, 9, None),
    ] {
        let wanted = LockRequest { first, last, test: true, ..request(owner, LockChange::Shared) };
        let (reply, released) = locks.change(session, &wanted, false).unwrap();
        let found = reply.conflict.as_ref().map(|conflict| conflict.pid);
        assert_eq!((found, released), (expected, false), "{session} {owner} {first}..={last}");
        if let Some(conflict) = reply.conflict {
            assert_eq!((conflict.first, conflict.last, conflict.owner), (10, 19, 5));
        }
    }
    assert!(locks.files[&id(9)].waiting.is_empty(), "a test waits for nothing");
    assert_eq!(locks.files[&id(9)].count(), 1, "a test sets nothing");
}

#[test]
fn only_sessions_that_may_wait_are_told_of_a_release() {
    let mut locks = Locks::default();
    let set =
        |locks: &mut Locks, session, request: &LockRequest| locks.change(session, request, false).unwrap();
    set(&mut locks, 1, &request(5, LockChange::Exclusive));
    set(&mut locks, 2, &request(5, LockChange::Shared));
    set(&mut locks, 3, &LockRequest { wait: false, ..request(5, LockChange::Shared) });
    set(&mut locks, 4, &request(5, LockChange::Exclusive));
    assert_eq!(locks.end(4), [], "it had no lock");
    let shared = request(5, LockChange::Shared);
    assert!(set(&mut locks, 1, &shared).1, "a shared lock in place of an exclusive one releases something");
    assert_eq!(locks.take_waiting(id(9)), BTreeSet::from([2]));
    assert_eq!(locks.take_waiting(id(9)), BTreeSet::new(), "it is told once");
    assert_eq!(locks.take_waiting(id(10)), BTreeSet::new());
    assert!(set(&mut locks, 1, &request(5, LockChange::Unlock)).1);
    assert!(locks.files.is_empty(), "a file without locks is forgotten");
    // A session that waits keeps the file in memory until it is told or ends.
    set(&mut locks, 1, &request(5, LockChange::Exclusive));
    set(&mut locks, 2, &request(5, LockChange::Shared));
    assert_eq!(locks.end(1), [id(9)]);
    assert_eq!(locks.files.len(), 1);
    assert_eq!(locks.take_waiting(id(9)), BTreeSet::from([2]));
    assert!(locks.files.is_empty());
}

/// The lock on each of a few bytes, by inode, kind, session and owner: exclusive or not, and its user.
type Bytes = [Option<(bool, u32)>; 8];
type Model = std::collections::BTreeMap<(u64, bool, u64, u64), Bytes>;

/// True if a request conflicts with a lock of another owner.
fn conflicts(model: &Model, session: u64, request: &LockRequest) -> bool {
    let exclusive = request.change() == LockChange::Exclusive;
    let others = model.iter().filter(|((ino, flock, of, owner), _)| {
        (*ino, *flock) == (request.ino, request.flock) && (*of, *owner) != (session, request.owner)
    });
    others.into_iter().any(|(_, bytes)| {
        let inside = &bytes[request.first as usize..=request.last as usize];
        inside.iter().flatten().any(|(held, _)| *held || exclusive)
    })
}

#[test]
fn locks_are_as_a_plain_list_of_bytes() {
    for seed in seeds(0..8) {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let (mut locks, mut model) = (Locks::default(), Model::new());
        for round in 0..3000 {
            let what = format!("seed {seed}, round {round}");
            let session = 1 + below(2);
            if below(60) == 0 {
                let mut changed = locks.end(session);
                changed.sort();
                let had = |ino: &u64| {
                    let mine = model.iter().filter(|((of, _, by, _), _)| (of, by) == (ino, &session));
                    mine.into_iter().any(|(_, bytes)| bytes.iter().any(Option::is_some))
                };
                let expected: Vec<FileId> = (1..3).filter(had).map(id).collect();
                assert_eq!(changed, expected, "{what}");
                model.retain(|(_, _, of, _), _| *of != session);
            } else {
                let first = below(8);
                let change =
                    [LockChange::Shared, LockChange::Exclusive, LockChange::Unlock][below(3) as usize];
                let request = LockRequest {
                    ino: 1 + below(2),
                    owner: below(2),
                    first,
                    last: first + below(8 - first),
                    change: change.into(),
                    flock: below(2) == 0,
                    test: below(5) == 0,
                    uid: 1000 + below(2) as u32,
                    ..LockRequest::default()
                };
                let in_the_way = change != LockChange::Unlock && conflicts(&model, session, &request);
                let (reply, _) = locks.change(session, &request, below(2) == 0).unwrap();
                assert_eq!(reply.conflict.is_some(), in_the_way, "{what}: {request:?}");
                // A test of an unlock is an unlock: it conflicts with nothing.
                if !in_the_way && (!request.test || change == LockChange::Unlock) {
                    let of = (request.ino, request.flock, session, request.owner);
                    let bytes = model.entry(of).or_default();
                    let lock = (change != LockChange::Unlock)
                        .then_some((change == LockChange::Exclusive, request.uid));
                    bytes[first as usize..=request.last as usize].fill(lock);
                }
            }
            assert_same(&locks, &model, &what);
        }
    }
}

/// Compares every byte, and the counts of locks with the tables.
fn assert_same(locks: &Locks, model: &Model, what: &str) {
    let mut found = Model::new();
    let mut counts: BTreeMap<(u64, u32), usize> = BTreeMap::new();
    let mut locked = BTreeSet::new();
    let mut waiting = BTreeSet::new();
    for (ino, file) in &locks.files {
        waiting.extend(file.waiting.iter().map(|session| (*session, *ino)));
        for (flock, table) in [false, true].into_iter().zip(&file.tables) {
            for lock in table.iter() {
                let (session, _, owner) = lock.owner;
                *counts.entry((session, lock.uid)).or_default() += 1;
                locked.insert((session, *ino));
                let bytes = found.entry((ino.ino.0, flock, session, owner)).or_default();
                for byte in lock.first..=lock.last {
                    let before = bytes[byte as usize].replace((lock.exclusive, lock.uid));
                    assert_eq!(before, None, "{what}: one lock of an owner on a byte");
                }
            }
        }
    }
    let expected = model.iter().filter(|(_, bytes)| bytes.iter().any(Option::is_some));
    assert_eq!(found, expected.map(|(of, bytes)| (*of, *bytes)).collect(), "{what}");
    assert_eq!(locks.held, counts, "{what}");
    let mut sums: BTreeMap<u64, [usize; 2]> = BTreeMap::new();
    for ((session, uid), count) in &counts {
        sums.entry(*session).or_default()[usize::from(*uid != ROOT)] += count;
    }
    assert_eq!(locks.sums, sums, "{what}");
    for (list, files) in [(&locks.locked, locked), (&locks.waiting, waiting)] {
        let sessions = list.counts().map(|(session, _)| session);
        let listed = sessions.flat_map(|session| list.files(session).map(move |file| (session, file)));
        assert_eq!(listed.collect::<BTreeSet<_>>(), files, "{what}");
    }
    assert!(locks.files.values().all(|file| !file.is_idle()), "{what}: a file without locks is forgotten");
}
