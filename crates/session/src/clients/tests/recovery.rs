//! The recovery after a restart: changes come again in their order, and all else waits.

use super::*;
use penstock_wire::metadata::{Change, RepeatRequest};

type Log = Rc<RefCell<Vec<u64>>>;

/// A session repeats the change of this number, which takes a moment. Adds it to the log when it is done.
async fn repeat(clients: Rc<Clients>, env: Env, session: u64, number: u64, log: Log) {
    let header = Header { session, ..Header::request(Kind::Repeat) };
    let change = Change { number, ..Change::default() };
    let start = GENERATION;
    let kind = Kind::Make as u32;
    let body = RepeatRequest { kind, body: Vec::new(), change, made: 0, start }.encode_to_vec();
    clients.hear(&header).unwrap();
    let Ok(turn) = clients.turn_to_repeat(&header, &body).await else { return };
    env.sleep(Duration::from_millis(1)).await;
    log.borrow_mut().push(number);
    drop(turn);
}

impl Bench {
    /// A session repeats these changes, one after the other, and then reports.
    fn start_recovery(&self, session: u64, numbers: &'static [u64], log: &Log) {
        let (clients, env, log) = (self.clients.clone(), self.env.clone(), log.clone());
        self.start(async move {
            for number in numbers {
                env.sleep(Duration::from_millis(number % 7)).await;
                repeat(clients.clone(), env.clone(), session, *number, log.clone()).await;
            }
            report(&clients, session);
        });
    }
}

#[test]
fn changes_of_all_sessions_are_repeated_in_one_order() {
    after_a_restart(&[FIRST, SECOND, 3], async |bench| {
        let log = Log::default();
        bench.start_recovery(FIRST, &[2, 3, 9, 20], &log);
        bench.start_recovery(SECOND, &[1, 5, 8, 21], &log);
        bench.pause().await;
        assert_eq!(*log.borrow(), [], "the third one may have an earlier change");
        assert!(bench.clients.join(FIRST).unwrap_err().is_ask_again(), "nothing else is served");
        bench.start_recovery(3, &[4], &log);
        bench.env.sleep(Duration::from_secs(1)).await;
        assert_eq!(*log.borrow(), [1, 2, 3, 4, 5, 8, 9, 20, 21]);
        assert!(!bench.clients.owe_opens() && bench.clients.unreported() == 0);
        bench.clients.join(FIRST).unwrap();
        let news = bench.asker().news(FIRST);
        assert!(news.again > 0, "it was told to ask again: {news:?}");
    });
}

#[test]
fn a_session_that_ends_or_does_nothing_holds_up_nobody_for_ever() {
    after_a_restart(&[FIRST, SECOND, 3], async |bench| {
        let (clients, log) = (&bench.clients, Log::default());
        bench.start_recovery(FIRST, &[2], &log);
        // The second one waits for a change of its own when it ends.
        bench.start(repeat(clients.clone(), bench.env.clone(), SECOND, 1, log.clone()));
        bench.pause().await;
        assert!(clients.stuck_in_recovery().is_empty(), "it has just begun");
        for _ in 0..8 {
            bench.env.sleep(Duration::from_secs(4)).await;
            // The third one pings, and does nothing else.
            clients.hear(&Header { session: 3, ..Header::request(Kind::Ping) }).unwrap();
        }
        let stuck: Vec<u64> = clients.stuck_in_recovery().iter().map(|info| info.id).collect();
        assert_eq!(stuck, [3], "the others wait for it");
        clients.end_session(SECOND).unwrap();
        assert_eq!(*log.borrow(), []);
        clients.end_session(3).unwrap();
        bench.pause().await;
        assert_eq!(*log.borrow(), [2]);
        assert_eq!(clients.unreported(), 2);
        clients.join(FIRST).unwrap();
    });
}

/// A session that has reported repeats what it has had an answer to, which its slot knows.
#[test]
fn a_session_that_has_reported_gets_no_turn() {
    after_a_restart(&[FIRST, SECOND], async |bench| {
        let log = Log::default();
        report(&bench.clients, FIRST);
        repeat(bench.clients.clone(), bench.env.clone(), FIRST, 7, log.clone()).await;
        assert_eq!(*log.borrow(), [7], "it does not wait for the other one");
        let lock = Header { session: SECOND, ..Header::request(Kind::Lock) };
        assert!(bench.clients.early_lock(&lock).is_some());
        assert!(bench.clients.early_lock(&Header { session: FIRST, ..lock }).is_none());
    });
}

/// A session in a random recovery: the numbers that it repeats, and when it ends without a report.
struct Survivor {
    session: u64,
    numbers: Vec<u64>,
    ends_after: Option<usize>,
}

fn random_survivors(world: &World) -> Vec<Survivor> {
    let sessions = 1 + world.below(5);
    let mut survivors: Vec<Survivor> = (1..=sessions)
        .map(|session| {
            let ends_after = (world.below(4) == 0).then(|| world.below(6) as usize);
            Survivor { session, numbers: Vec::new(), ends_after }
        })
        .collect();
    for number in 1..=world.below(40) {
        survivors[world.below(sessions) as usize].numbers.push(number);
    }
    survivors
}

/// However slow the sessions are and whichever of them end, no change is repeated after a later one.
#[test]
fn no_order_of_arrival_changes_the_order_of_changes() {
    let (mut repeated, mut unreported) = (0, 0);
    for seed in penstock_sim::seeds(0..200) {
        let world = World::new(seed);
        let outcome = world.run(async {
            let (env, kv) = (world.env(), MemKv::new(1 << 20));
            let survivors = random_survivors(&world);
            let mut writes = WriteSet::new();
            for survivor in &survivors {
                writes.put(session_key(key_of(survivor.session)), far(survivor.session).encode());
            }
            kv.commit(writes).await.unwrap();
            let clients = Clients::load(&env, &*kv, GENERATION).await.unwrap();
            let (log, count, ends) = (
                Log::default(),
                survivors.len(),
                survivors.iter().filter(|survivor| survivor.ends_after.is_some()).count() as u64,
            );
            let (left, spawner) = (Rc::new(Cell::new(count)), env.clone());
            for Survivor { session, numbers, ends_after } in survivors {
                let (clients, env, log, world, left) =
                    (clients.clone(), env.clone(), log.clone(), world.clone(), left.clone());
                let live = async move {
                    for (at, number) in numbers.iter().enumerate() {
                        if ends_after == Some(at) {
                            break;
                        }
                        env.sleep(Duration::from_micros(world.below(4000))).await;
                        // The connection may break: the request is given up soon, and has come again.
                        let lost = repeat(clients.clone(), env.clone(), session, *number, Log::default());
                        let patience = Duration::from_micros(world.below(6000));
                        let again = repeat(clients.clone(), env.clone(), session, *number, log.clone());
                        match world.below(3) {
                            0 => {
                                let lost = timeout(&env, patience, lost);
                                futures_util::future::join(lost, again).await;
                            }
                            _ => again.await,
                        }
                    }
                    env.sleep(Duration::from_micros(world.below(4000))).await;
                    match ends_after {
                        Some(_) => _ = clients.end_session(session),
                        None => report(&clients, session),
                    }
                    left.set(left.get() - 1);
                };
                spawner.spawn("survivor", Box::pin(live));
            }
            env.sleep(Duration::from_secs(5)).await;
            assert_eq!(left.get(), 0, "seed {seed}: somebody waits for ever");
            let log = log.borrow();
            assert!(log.is_sorted(), "seed {seed}: {log:?}");
            assert!(!clients.owe_opens() && clients.unreported() == ends, "seed {seed}");
            (log.len() as u64, ends)
        });
        world.destroy();
        let (changes, ends) = outcome.unwrap();
        (repeated, unreported) = (repeated + changes, unreported + ends);
    }
    assert!(repeated > 1000 && unreported > 50, "{repeated} changes, {unreported} sessions ended");
}

/// A client of the service's own process ends with it, and the next start knows that there was one.
#[test]
fn a_session_of_the_process_leaves_a_row_for_the_next_start() {
    with_two_clients(async |bench| {
        let (clients, kv) = (&bench.clients, &bench.kv);
        let load = async |generation| Clients::load(&bench.env, &**kv, generation).await.unwrap();
        assert_eq!(load(GENERATION + 1).await.unreported(), 0, "it has asked for nothing");
        let row = clients.missing_row(FIRST).expect("it has none yet");
        kv.commit(row).await.unwrap();
        clients.note_row(FIRST);
        assert!(clients.missing_row(FIRST).is_none() && !clients.comes_back(FIRST));
        let next = load(GENERATION + 1).await;
        assert_eq!((next.unreported(), next.sessions().len(), next.owe_opens()), (1, 0, false));
        assert_eq!(load(GENERATION + 2).await.unreported(), 0, "each start is told of the one before it");
        // One that ends in order takes its row along.
        kv.commit(clients.missing_row(SECOND).unwrap()).await.unwrap();
        kv.commit(clients.bar_session(SECOND).unwrap()).await.unwrap();
        assert_eq!(load(GENERATION + 3).await.unreported(), 0);
    });
}

#[test]
fn a_repeat_for_another_start_gets_no_turn() {
    after_a_restart(&[FIRST], async |bench| {
        let header = Header { session: FIRST, ..Header::request(Kind::Repeat) };
        let body = |number, start| {
            let change = Change { number, ..Change::default() };
            RepeatRequest { kind: 0, body: Vec::new(), change, made: 0, start }.encode_to_vec()
        };
        for (number, start, kind) in [
            (1, GENERATION + 1, ErrorKind::RefreshMap),
            (1, 0, ErrorKind::RefreshMap),
            (0, GENERATION, ErrorKind::Invalid),
        ] {
            let refused = bench.clients.turn_to_repeat(&header, &body(number, start)).await;
            assert_eq!(refused.map(drop).unwrap_err().kind, kind, "{number} of {start}");
        }
        assert!(bench.clients.turn_to_repeat(&header, &body(1, GENERATION)).await.unwrap().is_some());
    });
}

/// A session that has not reported makes contents again, and gets nothing else.
#[test]
fn only_a_recovery_is_served_before_all_have_reported() {
    after_a_restart(&[FIRST, SECOND], async |bench| {
        let clients = &bench.clients;
        let may = |session: u64, kind: Kind, ticket: u64| {
            let header = Header { session, ..Header::request(kind) };
            let body = GetAttrRequest { ino: 7, ticket, lease: false }.encode_to_vec();
            match clients.join_for(&header, &body) {
                Ok(()) => true,
                Err(failure) => {
                    assert!(failure.is_ask_again(), "{kind:?}: {failure}");
                    false
                }
            }
        };
        let recovers = |session: u64| {
            [Kind::Repeat, Kind::Write, Kind::Space, Kind::Commit, Kind::GetAttr]
                .map(|kind| may(session, kind, 0))
        };
        let others = |session: u64| {
            [Kind::Read, Kind::Seek, Kind::Lookup, Kind::Make, Kind::Open, Kind::Lease, Kind::ReadDir]
                .map(|kind| may(session, kind, 0))
        };
        assert_eq!((recovers(FIRST), others(FIRST)), ([true; 5], [false; 7]));
        assert!(!may(FIRST, Kind::GetAttr, 1), "it may have to wait for others");
        report(clients, FIRST);
        assert_eq!((recovers(FIRST), others(FIRST)), ([false; 5], [false; 7]), "the other one has not");
        assert_eq!((recovers(SECOND), others(SECOND)), ([true; 5], [false; 7]));
        // A new session waits as well.
        clients.begin_session(key_of(3), far(3), &mut WriteSet::new());
        assert_eq!((recovers(3), others(3)), ([false; 5], [false; 7]));
        report(clients, SECOND);
        // Each owes an answer to the revocation of everything, and may do what it needs for that.
        for session in [FIRST, SECOND] {
            assert!(bench.asker().news(session).again > 0, "session {session} may ask again");
            assert_eq!((recovers(session), others(session)), ([true; 5], [true; 7]));
            bench.answer_all(session).await;
        }
        assert!(bench.asker().news(3).again > 0);
        assert_eq!(others(3), [true; 7]);
    });
}

/// Whoever waits for the end of a recovery learns that the service stops.
#[test]
fn a_stop_ends_the_wait_for_a_turn() {
    after_a_restart(&[FIRST, SECOND], async |bench| {
        let log = Log::default();
        let waits = bench.start(repeat(bench.clients.clone(), bench.env.clone(), FIRST, 5, log.clone()));
        bench.pause().await;
        assert!(waits.borrow().is_none());
        bench.clients.stop();
        bench.pause().await;
        assert!(waits.borrow().is_some() && log.borrow().is_empty());
    });
}

/// Regression: requests that waited stayed when their connection was lost, so a client that connected again
/// and again filled the memory with them.
#[test]
fn few_requests_of_a_client_that_connects_again_and_again_wait() {
    after_a_restart(&[FIRST, SECOND], async |bench| {
        let (clients, log) = (&bench.clients, Log::default());
        let turn = || bench.start(repeat(clients.clone(), bench.env.clone(), FIRST, 5, log.clone()));
        let mut turns = Vec::new();
        for _ in 0..20 {
            turns.push(turn());
            bench.pause().await;
            clients.hung_up(FIRST, false);
        }
        let waiting = turns.iter().filter(|turn| turn.borrow().is_none()).count();
        assert_eq!(waiting, 8);
        assert!(turns[12..].iter().all(|turn| turn.borrow().is_none()), "the last ones wait");
        report(clients, SECOND);
        bench.pause().await;
        assert!(turns.iter().all(|turn| turn.borrow().is_some()));
        assert!(!log.borrow().is_empty() && log.borrow().iter().all(|number| *number == 5));
        report(clients, FIRST);
        let watch = || {
            let request = WatchRequest {
                seen: u64::MAX,
                wait: true,
                generation: GENERATION,
                ..WatchRequest::default()
            };
            let clients = clients.clone();
            bench.start(async move { clients.watch(FIRST, &request.encode_to_vec()).await })
        };
        bench.asker().news(FIRST);
        let lost = watch();
        bench.pause().await;
        clients.hung_up(SECOND, false);
        bench.pause().await;
        assert!(lost.borrow().is_none(), "that was the connection of another one");
        clients.hung_up(FIRST, false);
        bench.pause().await;
        assert!(lost.borrow().as_ref().is_some_and(Result::is_err));
    });
}

/// Regression: a client that reported the same again and again held up a recovery for ever, and one that was
/// told nothing of it lost a lock that another one claimed.
#[test]
fn what_is_reported_once_more_is_no_progress() {
    after_a_restart(&[FIRST, SECOND], async |bench| {
        let opens = vec![OpenCount { ino: INO.ino.0, branch: 0, count: 1, user: 0 }];
        let locks = vec![exclusive_lock()];
        let ping = PingRequest { opens, locks, start: GENERATION, ..PingRequest::default() };
        let stuck = || {
            let all = bench.clients.stuck_in_recovery();
            all.iter().map(|info| info.id).collect::<Vec<u64>>()
        };
        assert_eq!(bench.clients.reclaim(FIRST, &ping).unwrap().opens, [(INO, 0, 1)]);
        for _ in 0..8 {
            bench.env.sleep(Duration::from_secs(5)).await;
            let again = bench.clients.reclaim(FIRST, &ping).unwrap();
            assert_eq!((again.opens, again.refused_locks), (vec![(INO, 1, 1)], 0));
            let mut other = ping.clone();
            other.opens[0].count = 5;
            assert_eq!(bench.clients.reclaim(FIRST, &other).unwrap().opens, [(INO, 1, 5)]);
            bench.clients.reclaim(FIRST, &ping).unwrap();
        }
        assert_eq!(stuck(), [FIRST, SECOND]);
        let late = PingRequest { opens: vec![], ..ping };
        for _ in 0..2 {
            assert_eq!(bench.clients.reclaim(SECOND, &late).unwrap().refused_locks, 1);
        }
        assert_eq!(stuck(), [FIRST, SECOND]);
        assert_eq!(bench.clients.take_lost_locks(), [(SECOND, 1)].into());
        assert!(bench.clients.take_lost_locks().is_empty());
    });
}

/// Regression: a session that took turns and changed nothing, or that did something from time to time, held
/// up a recovery for ever.
#[test]
fn neither_turns_nor_what_is_done_for_show_holds_up_a_recovery_for_ever() {
    let stuck =
        |bench: &Bench| bench.clients.stuck_in_recovery().iter().map(|info| info.id).collect::<Vec<_>>();
    after_a_restart(&[FIRST, SECOND], async |bench| {
        report(&bench.clients, SECOND);
        for number in 1..8 {
            bench.env.sleep(Duration::from_secs(5)).await;
            let header = Header { session: FIRST, ..Header::request(Kind::Repeat) };
            let change = Change { number, ..Change::default() };
            let turn = RepeatRequest { change, start: GENERATION, ..RepeatRequest::default() };
            drop(bench.clients.turn_to_repeat(&header, &turn.encode_to_vec()).await.unwrap());
        }
        assert_eq!(stuck(bench), [FIRST]);
    });
    after_a_restart(&[FIRST, SECOND], async |bench| {
        report(&bench.clients, SECOND);
        let mut looks = 0;
        while stuck(bench).is_empty() {
            bench.env.sleep(Duration::from_secs(6)).await;
            match looks % 2 {
                0 => repeat(bench.clients.clone(), bench.env.clone(), FIRST, looks + 1, Log::default()).await,
                _ => {
                    let commit = Header { session: FIRST, ..Header::request(Kind::Commit) };
                    bench.clients.join_for(&commit, &[]).unwrap();
                }
            }
            looks += 1;
        }
        assert_eq!(looks, 50, "ten lease times of 30 s, in looks");
    });
}

/// The host was suspended: then nobody could do anything.
#[test]
fn a_suspended_service_ends_no_recovery() {
    after_a_restart(&[FIRST, SECOND], async |bench| {
        bench.env.sleep(Duration::from_secs(100)).await;
        assert_eq!(bench.clients.stuck_in_recovery().len(), 2);
        assert!(bench.clients.unanswered().is_empty(), "no call counts before that");
        bench.clients.renew_leases();
        assert!(bench.clients.stuck_in_recovery().is_empty());
        bench.env.sleep(Duration::from_secs(20)).await;
        let ping = PingRequest { start: GENERATION, ..PingRequest::default() };
        bench.clients.reclaim(FIRST, &ping).unwrap();
        let ping = PingRequest { locks: vec![exclusive_lock()], ..ping };
        bench.clients.reclaim(SECOND, &ping).unwrap();
        bench.env.sleep(Duration::from_secs(15)).await;
        let stuck: Vec<u64> = bench.clients.stuck_in_recovery().iter().map(|info| info.id).collect();
        assert_eq!(stuck, [FIRST], "a ping alone is no part of a recovery");
    });
}

/// Regression: a session ended while the service was executing its request for longer than its lease time,
/// and one that only asked for attributes held up all others.
#[test]
fn a_request_that_is_executed_is_no_fault_of_its_session_and_a_question_is_no_progress() {
    after_a_restart(&[FIRST, SECOND], async |bench| {
        let clients = &bench.clients;
        let write = Header { session: FIRST, ..Header::request(Kind::Write) };
        clients.join_for(&write, &[]).unwrap();
        let writing = clients.begin(&write).unwrap();
        let question = Header { session: SECOND, ..Header::request(Kind::GetAttr) };
        for _ in 0..10 {
            bench.env.sleep(Duration::from_secs(4)).await;
            let body = GetAttrRequest { ino: 7, ..GetAttrRequest::default() }.encode_to_vec();
            clients.join_for(&question, &body).unwrap();
        }
        let stuck = || clients.stuck_in_recovery().iter().map(|info| info.id).collect::<Vec<_>>();
        assert_eq!(stuck(), [SECOND]);
        drop(writing);
        assert_eq!(stuck(), [FIRST, SECOND]);
        clients.join_for(&write, &[]).unwrap();
        assert_eq!(stuck(), [SECOND]);
    });
}

/// A change that is refused is lost: then an fsync of another client that spans the restart must not succeed.
#[test]
fn losses_are_counted_for_other_clients() {
    after_a_restart(&[FIRST], async |bench| {
        bench.clients.note_refused_repeat();
        report(&bench.clients, FIRST);
        assert_eq!(bench.clients.unreported(), 1);
    });
}
