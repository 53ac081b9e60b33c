use super::*;
use crate::rows::session_key;
use futures_util::FutureExt;
use penstock_kv::MemKv;

fn id(ino: u64) -> FileId {
    FileId::of_numbers(0, ino)
}

fn table() -> Sessions {
    let mut sessions = Sessions::default();
    sessions.insert(key_of(7), row(7), Duration::ZERO);
    sessions
}

fn key_of(number: u64) -> Id128 {
    Id128::from_words(9, number)
}

fn row(number: u64) -> SessionRow {
    SessionRow { number, ..SessionRow::default() }
}

fn request(sequence: u64) -> Request {
    Request { session: 7, key: key_of(7), sequence, user: 0, repeats: None }
}

#[test]
fn a_repeat_is_answered_until_its_slot_is_used_again() {
    let mut sessions = table();
    sessions.keep(request(1), &Ok(vec![1]));
    for (sequence, expected) in [(1, "done"), (2, "new"), (1 + SLOTS, "new")] {
        let found = match sessions.find(request(sequence)) {
            Seen::New => "new",
            Seen::Done(outcome) => {
                assert_eq!(outcome, Ok(vec![1]));
                "done"
            }
            Seen::Late => "late",
        };
        assert_eq!(found, expected, "request {sequence}");
    }
    sessions.keep(request(1 + SLOTS), &Ok(vec![2]));
    assert!(matches!(sessions.find(request(1)), Seen::Late));
    assert!(
        matches!(
            sessions.find(Request { session: 8, key: key_of(8), sequence: 1, user: 0, repeats: None }),
            Seen::New
        ),
        "no such session"
    );
}

#[test]
fn a_session_is_silent_only_while_nothing_of_it_is_executed() {
    let mut sessions = table();
    let silent = |sessions: &Sessions, now| sessions.infos(Duration::from_secs(now))[0].silent.as_secs();
    assert_eq!(silent(&sessions, 5), 5);
    let at = Duration::from_secs;
    let ping = sessions.begin(7, at(3), Kind::Ping).unwrap();
    let first = sessions.begin(7, at(4), Kind::Read).unwrap();
    let second = sessions.begin(7, at(5), Kind::Read).unwrap();
    assert_eq!(sessions.busy_since(7), Some(at(4)));
    sessions.end(7, first, Duration::from_secs(6));
    assert_eq!(sessions.busy_since(7), Some(at(5)));
    assert_eq!(silent(&sessions, 9), 0, "another request is executed");
    sessions.end(7, second, Duration::from_secs(10));
    assert_eq!(sessions.busy_since(7), None, "a ping is no excuse");
    sessions.end(7, ping, Duration::from_secs(10));
    assert_eq!(silent(&sessions, 12), 2);
    assert_eq!(sessions.begin(8, at(10), Kind::Read).unwrap_err().kind, ErrorKind::Ended);
}

#[test]
fn a_session_that_leaves_is_quiet_once_its_last_write_has_ended() {
    let mut sessions = table();
    let at = Duration::from_secs;
    let writes =
        [sessions.begin(7, at(1), Kind::Write).unwrap(), sessions.begin(7, at(1), Kind::Write).unwrap()];
    let read = sessions.begin(7, at(1), Kind::Read).unwrap();
    sessions.bar(7).unwrap();
    assert!(!sessions.is_quiet(7) && !sessions.is_live(7));
    assert!(sessions.begin(7, at(2), Kind::Write).is_err(), "it begins nothing any more");
    assert!(sessions.begin_to_leave(7) && !sessions.begin_to_leave(7), "once");
    for (number, quiet) in [(writes[1], false), (writes[0], true), (read, true)] {
        sessions.end(7, number, at(3));
        assert_eq!(sessions.is_quiet(7), quiet, "after {number}");
    }
    assert!(sessions.is_quiet(8) && !sessions.begin_to_leave(8), "there is no such session");
}

#[test]
fn opens_are_counted_by_session_and_reported_in_parts() {
    let mut sessions = table();
    let ino = id(3);
    assert!(sessions.open(7, ino) && sessions.open(7, ino) && !sessions.open(8, ino));
    assert_eq!(sessions.set_opens(7, ino, 5), Some(2));
    assert!(sessions.close(7, ino));
    assert_eq!(sessions.set_opens(7, ino, 1), Some(4));
    assert!(sessions.close(7, ino) && !sessions.close(7, ino));
    sessions.open(7, id(4));
    assert_eq!(sessions.remove(7), Some(BTreeMap::from([(id(4), 1)])));
    assert_eq!(sessions.remove(7), None);
}

fn now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("a store in memory never waits")
}

/// Loads the sessions from a store with these rows. Returns them with the keys that are left.
fn load(rows: &[(Vec<u8>, Vec<u8>)]) -> (Sessions, Vec<Vec<u8>>) {
    let kv = MemKv::new(1 << 20);
    let mut writes = WriteSet::new();
    for (key, value) in rows {
        writes.put(key.clone(), value.clone());
    }
    now(kv.commit(writes)).unwrap();
    let sessions = now(Sessions::load(&*kv, Duration::from_secs(100))).unwrap();
    (sessions.0, kv.rows().into_iter().map(|(key, _)| key).collect())
}

fn session_row(id: u64) -> (Vec<u8>, Vec<u8>) {
    let who = SessionRow { client: "far".into(), mount: "/m".into(), lease_ms: 5000, ..row(id) };
    (session_key(key_of(id)), who.encode())
}

fn result_row(session: u64, sequence: u64) -> (Vec<u8>, Vec<u8>) {
    let slot = sequence % SLOTS;
    let row = ResultRow { session: key_of(session), slot, sequence, body: vec![sequence as u8] };
    (result_key(key_of(session), slot), row.encode())
}

#[test]
fn sessions_and_their_results_come_back_and_bad_rows_do_not() {
    let moved = |from: (Vec<u8>, Vec<u8>), key: Vec<u8>| (key, from.1);
    let cut = |from: (Vec<u8>, Vec<u8>)| (from.0, from.1[..from.1.len() - 1].to_vec());
    let other_slot = ResultRow { session: key_of(7), slot: 4, sequence: 3, body: vec![] };
    type Case = (&'static str, Vec<(Vec<u8>, Vec<u8>)>, Vec<u64>, Vec<u64>);
    // Columns: rows, the sessions that are loaded, and the requests of session 7 that were executed.
    let cases: Vec<Case> = vec![
        ("nothing", vec![], vec![], vec![]),
        ("two sessions", vec![session_row(7), session_row(9)], vec![7, 9], vec![]),
        (
            "results in two slots",
            vec![session_row(7), result_row(7, 3), result_row(7, SLOTS)],
            vec![7],
            vec![3, SLOTS],
        ),
        ("a result of a session that has ended", vec![session_row(7), result_row(8, 3)], vec![7], vec![]),
        ("a session row that ends early", vec![cut(session_row(7)), result_row(7, 3)], vec![], vec![]),
        ("no session row", vec![(session_key(key_of(7)), vec![]), session_row(9)], vec![9], vec![]),
        ("a session key that is too long", vec![moved(session_row(7), vec![0x15; 20])], vec![], vec![]),
        ("a session key that is too short", vec![moved(session_row(7), vec![0x15, 1])], vec![], vec![]),
        ("a result that ends early", vec![session_row(7), cut(result_row(7, 3))], vec![7], vec![]),
        (
            "two sessions of one number",
            vec![session_row(7), (session_key(key_of(8)), session_row(7).1)],
            vec![7],
            vec![],
        ),
        (
            "a result in another slot",
            vec![session_row(7), moved(result_row(7, 3), result_key(key_of(7), 4))],
            vec![7],
            vec![],
        ),
        (
            "a result of another session",
            vec![session_row(7), session_row(8), moved(result_row(8, 3), result_key(key_of(7), 3))],
            vec![7, 8],
            vec![],
        ),
        (
            "a sequence number of another slot",
            vec![session_row(7), (result_key(key_of(7), 4), other_slot.encode())],
            vec![7],
            vec![],
        ),
    ];
    for (what, rows, ids, done) in cases {
        let (sessions, left) = load(&rows);
        assert_eq!(sessions.numbers().collect::<Vec<_>>(), ids, "{what}");
        for sequence in [3, 4, 5, SLOTS] {
            let found = sessions.find(request(sequence));
            match found {
                Seen::Done(outcome) => {
                    assert!(done.contains(&sequence), "{what}: request {sequence}");
                    assert_eq!(outcome, Ok(vec![sequence as u8]), "{what}");
                }
                _ => assert!(!done.contains(&sequence), "{what}: request {sequence}"),
            }
        }
        let results = left.iter().filter(|key| key[0] == 0x14).count();
        assert_eq!(results, done.len(), "{what}: other results are deleted");
        let sessions_left = left.iter().filter(|key| key[0] == 0x15).count();
        let given = rows.iter().filter(|(key, _)| key[0] == 0x15).count();
        assert_eq!(sessions_left, given, "{what}: a check reports bad session rows");
    }
}

#[test]
fn a_session_that_survived_owes_its_opens_until_all_are_reported() {
    let (mut sessions, _) = load(&[session_row(7), session_row(9)]);
    sessions.insert(key_of(10), row(10), Duration::ZERO);
    for (reported, owing) in [(None, vec![7, 9]), (Some(9), vec![7]), (Some(9), vec![7]), (Some(8), vec![7])]
    {
        reported.into_iter().for_each(|id| sessions.reported_opens(id));
        let found: Vec<u64> = (0..12).filter(|id| sessions.owes_opens(*id)).collect();
        assert_eq!((found, sessions.owe_opens()), (owing, true), "after {reported:?}");
    }
    sessions.remove(7);
    assert!(!sessions.owe_opens(), "a session that has ended reports nothing any more");
}

#[test]
fn a_recorded_result_is_read_back_from_its_own_key_only() {
    for sequence in [1, SLOTS - 1, SLOTS, 5 * SLOTS + 3, u64::MAX] {
        let mut writes = WriteSet::new();
        Sessions::record(request(sequence), b"body", &mut writes);
        let [(key, Some(value))] = writes.changes().collect::<Vec<_>>()[..] else { panic!("one row") };
        assert_eq!(key, result_key(key_of(7), sequence % SLOTS));
        assert_eq!(read_result(key, value), Ok((key_of(7), sequence, b"body".to_vec())));
        assert!(
            read_result(&result_key(key_of(7), (sequence % SLOTS + 1) % SLOTS), value).is_err(),
            "request {sequence}"
        );
        assert!(read_result(&result_key(key_of(8), sequence % SLOTS), value).is_err(), "request {sequence}");
        for len in 0..value.len() {
            assert!(read_result(key, &value[..len]).is_err(), "the first {len} bytes");
        }
    }
}

#[test]
fn people_see_clients_with_their_lease_and_their_silence() {
    let (mut sessions, _) = load(&[session_row(7)]);
    let local = SessionRow { client: "here".into(), ..row(8) };
    sessions.insert(key_of(8), local, Duration::from_secs(103));
    sessions.open(8, id(3));
    sessions.open(8, id(3));
    sessions.set_mount(9, "/nobody");
    let infos = sessions.infos(Duration::from_secs(105));
    let [far, here] = &infos[..] else { panic!("two sessions") };
    assert_eq!(far.to_string(), "session 7 (far, mounted at /m)");
    assert_eq!((far.lease, far.silent.as_secs(), far.open_inodes), (Some(Duration::from_secs(5)), 5, 0));
    assert_eq!(here.to_string(), "session 8 (here)");
    assert_eq!((here.lease, here.silent.as_secs(), here.open_inodes), (None, 2, 1));
    sessions.set_mount(8, "/n");
    sessions.renew_all(Duration::from_secs(106));
    for info in sessions.infos(Duration::from_secs(106)) {
        assert_eq!(info.silent, Duration::ZERO, "{info}");
    }
    assert_eq!(sessions.infos(Duration::ZERO)[1].to_string(), "session 8 (here, mounted at /n)");
}
