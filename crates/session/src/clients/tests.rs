use super::*;
use crate::recovery::Reclaimed;
use crate::rows::{all_results, all_sessions};
use penstock_kv::{KvRead, MemKv};
use penstock_sim::World;
use penstock_wire::Kind;
use penstock_wire::metadata::{
    FailedSync, Granted, LeaseCall, LockChange, LockReply, LockRequest, OpenCount, PingRequest,
    ReleasedLease, Unlocked,
};

fn id(ino: u64) -> FileId {
    FileId::of_numbers(0, ino)
}

mod model;
mod recovery;
mod users;
mod waits;

const GENERATION: u64 = 4;
const FIRST: u64 = 1;
const SECOND: u64 = 2;
const INO: FileId = FileId::of_numbers(0, 7);

/// A node with its clients.
struct Bench {
    env: Env,
    kv: Rc<MemKv>,
    clients: Rc<Clients>,
    lefts: Lefts,
}

/// Number of times that each session has left.
type Lefts = Rc<RefCell<BTreeMap<u64, u64>>>;

/// Runs a test on a node to which two local clients are connected.
fn with_two_clients<T>(test: impl AsyncFnOnce(&Bench) -> T) -> T {
    let world = World::new(9);
    let outcome = world.run(async {
        let (env, kv) = (world.env(), MemKv::new(1 << 20));
        let clients = Clients::load(&env, &*kv, GENERATION).await.unwrap();
        for id in [FIRST, SECOND] {
            clients.begin_session(key_of(id), local(id), &mut WriteSet::new());
        }
        test(&Bench { env, kv, clients, lefts: Lefts::default() }).await
    });
    world.destroy();
    outcome.unwrap()
}

impl Bench {
    /// Starts a task and returns the place of its outcome.
    fn start<T: 'static>(&self, task: impl Future<Output = T> + 'static) -> Rc<RefCell<Option<T>>> {
        let outcome = Rc::new(RefCell::new(None));
        let place = outcome.clone();
        self.env.spawn("test", Box::pin(async move { *place.borrow_mut() = Some(task.await) }));
        outcome
    }

    async fn pause(&self) {
        self.env.sleep(Duration::from_millis(10)).await;
    }

    /// Lets both clients take part, so that they need leases.
    async fn join_both(&self) {
        self.clients.join(FIRST).unwrap();
        let asker = self.asker();
        let joining = self.start(async move { asker.join(SECOND).await });
        self.pause().await;
        self.answer_all(FIRST).await;
        self.pause().await;
        assert_eq!(joining.take(), Some(Ok(())));
    }

    /// The revocations for a session that are not answered.
    async fn calls(&self, session: u64) -> Vec<LeaseCall> {
        let request = WatchRequest { generation: GENERATION, ..WatchRequest::default() };
        let news = self.clients.leases.borrow_mut().news(session, &request);
        news.map_or_else(Vec::new, |reply| reply.calls)
    }

    async fn answer_all(&self, session: u64) {
        let answered = self.calls(session).await.iter().map(|call| call.number).collect();
        let request = WatchRequest { generation: GENERATION, answered, ..WatchRequest::default() };
        self.clients.watch(session, &request.encode_to_vec()).await.unwrap();
    }

    fn asker(&self) -> Asker {
        Asker { env: self.env.clone(), clients: self.clients.clone(), lefts: self.lefts.clone() }
    }

    async fn grant(&self, session: u64, exclusive: bool) -> Result<u64, Failure> {
        self.asker().grant(session, INO, exclusive).await
    }

    /// Starts a request of a lease.
    fn start_grant(&self, session: u64) -> Rc<RefCell<Option<Result<u64, Failure>>>> {
        let asker = self.asker();
        self.start(async move { asker.grant(session, INO, true).await })
    }

    /// The second client leaves while its request of the lease that the first one owns waits.
    async fn leave_while_waiting(&self) -> Rc<RefCell<Option<Result<u64, Failure>>>> {
        self.join_both().await;
        self.grant(FIRST, true).await.unwrap();
        let waiting = self.start_grant(SECOND);
        self.pause().await;
        self.leave(SECOND).await;
        waiting
    }

    /// A client gives up everything, until it asks for something again.
    async fn leave(&self, session: u64) {
        let leaving = WatchRequest { generation: GENERATION, leaves: true, ..WatchRequest::default() };
        self.clients.watch(session, &leaving.encode_to_vec()).await.unwrap();
        *self.lefts.borrow_mut().entry(session).or_default() += 1;
    }
}

/// Asks as a client does: it waits for the news that its request is about.
#[derive(Clone)]
struct Asker {
    env: Env,
    clients: Rc<Clients>,
    lefts: Lefts,
}

impl Asker {
    fn news(&self, session: u64) -> WatchReply {
        let request = WatchRequest { generation: GENERATION, ..WatchRequest::default() };
        self.clients.leases.borrow_mut().news(session, &request).unwrap_or_default()
    }

    /// Waits until `found` is in the news of a session, or it has left: then none.
    async fn until<T>(
        &self,
        session: u64,
        found: impl Fn(WatchReply) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        let lefts = || self.lefts.borrow().get(&session).copied();
        let before = lefts();
        loop {
            self.clients.check_session(session)?;
            if lefts() != before {
                return Ok(None);
            }
            if let Some(found) = found(self.news(session)) {
                return Ok(Some(found));
            }
            self.env.sleep(Duration::from_millis(1)).await;
        }
    }

    /// Asks until the request is not refused any more.
    async fn again<T>(&self, session: u64, ask: impl Fn() -> Result<T, Failure>) -> Result<T, Failure> {
        loop {
            let before = self.news(session).again;
            match ask() {
                Err(failure) if failure.is_ask_again() => {
                    self.until(session, |news| (news.again != before).then_some(())).await?;
                }
                other => return other,
            }
        }
    }

    async fn join(&self, session: u64) -> Result<(), Failure> {
        self.again(session, || self.clients.join(session)).await
    }

    async fn grant(&self, session: u64, file: FileId, exclusive: bool) -> Result<u64, Failure> {
        let request = LeaseRequest { ino: file.ino.0, exclusive, first: 0, last: u64::MAX };
        let granted = |news: WatchReply, before: u64| {
            let suffices = |granted: &&Granted| granted.file() == file && (granted.exclusive || !exclusive);
            let grants = news.granted.iter().filter(suffices).filter(|granted| granted.grant > before);
            grants.map(|granted| granted.grant).max()
        };
        loop {
            self.join(session).await?;
            let before = granted(self.news(session), 0).unwrap_or_default();
            let reply = self.clients.grant(session, file.branch, &request.encode_to_vec())?;
            let LeaseReply { grant, wait } = LeaseReply::decode(&reply[..]).unwrap();
            if !wait {
                return Ok(grant);
            }
            if let Some(grant) = self.until(session, |news| granted(news, before)).await? {
                return Ok(grant);
            }
        }
    }

    /// Returns the errno of another client, 0 if all have synced.
    async fn sync(&self, session: u64, file: FileId) -> Result<u32, Failure> {
        let ticket = 1 + self.env.random() % (1 << 40);
        let body = GetAttrRequest { ino: file.ino.0, ticket, lease: false }.encode_to_vec();
        self.join(session).await?;
        let Some(reply) = self.clients.sync_elsewhere(session, file.branch, &body)? else { return Ok(0) };
        assert!(AttrReply::decode(&reply[..]).unwrap().wait);
        let outcome = |news: WatchReply| {
            let outcome = news.synced.iter().find(|synced| synced.ticket == ticket)?;
            Some(outcome.errno)
        };
        Ok(self.until(session, outcome).await?.unwrap_or_default())
    }

    async fn resize(&self, session: u64, file: FileId) -> Result<(), Failure> {
        let request = SetAttrRequest { ino: file.ino.0, size: Some(5), ..Default::default() };
        let ask = || self.clients.may_resize(session, file.branch, &request.encode_to_vec()).map(drop);
        self.again(session, ask).await
    }
}

/// A request of the exclusive lock on the first ten bytes.
fn exclusive_lock() -> LockRequest {
    let change = LockChange::Exclusive.into();
    LockRequest { ino: INO.ino.0, change, last: 9, owner: 1, ..LockRequest::default() }
}

fn who(session: u64, sequence: u64) -> Request {
    Request { session, key: Id128::NIL, sequence, user: 0, repeats: None }
}

/// A client of this process.
fn local(number: u64) -> SessionRow {
    SessionRow { number, ..SessionRow::default() }
}

/// A client of another process.
fn far(number: u64) -> SessionRow {
    SessionRow { client: "host".into(), mount: "/m".into(), lease_ms: 30_000, ..local(number) }
}

/// The name of a session whose row a test puts by hand.
fn key_of(number: u64) -> Id128 {
    Id128::from_words(9, number)
}

#[test]
fn only_requests_that_may_cache_something_make_a_session_take_part() {
    for (kind, expected) in [
        (Kind::Hello, false),
        (Kind::Ping, false),
        (Kind::End, false),
        (Kind::Watch, false),
        (Kind::Sync, false),
        (Kind::StatFs, false),
        (Kind::Read, true),
        (Kind::Write, true),
        (Kind::Lease, true),
        (Kind::Rename, true),
    ] {
        assert_eq!(joins(kind), expected, "{kind:?}");
    }
}

#[test]
fn a_session_that_does_not_exist_gets_nothing() {
    with_two_clients(async |bench| {
        let clients = &bench.clients;
        for session in [0, 3, u64::MAX] {
            let header = Header { session, ..Header::request(Kind::Read) };
            let failures = [
                clients.hear(&header).unwrap_err(),
                clients.begin(&header).map(drop).unwrap_err(),
                clients.join(session).unwrap_err(),
                bench.grant(session, true).await.unwrap_err(),
                clients
                    .watch(session, &WatchRequest { wait: true, ..Default::default() }.encode_to_vec())
                    .await
                    .unwrap_err(),
            ];
            for failure in failures {
                assert_eq!(failure.kind, ErrorKind::Ended, "session {session}: {failure}");
            }
            assert!(
                !clients.is_in_use(session) && !clients.open(session, INO) && !clients.close(session, INO)
            );
            assert!(clients.end_session(session).is_none());
            let ping = PingRequest {
                start: GENERATION,
                opens: vec![OpenCount { ino: 7, count: 1, branch: 0, user: 0 }],
                ..Default::default()
            };
            assert_eq!(clients.reclaim(session, &ping).unwrap(), Reclaimed::default());
            // The first exchange needs no session.
            let hello = Header { session, ..Header::request(Kind::Hello) };
            assert!(clients.hear(&hello).is_ok() && clients.begin(&hello).unwrap().is_none());
        }
        assert_eq!(clients.sessions().len(), 2);
    });
}

/// Regression: a client that said Hello and went, again and again, kept all others out.
#[test]
fn a_session_without_connection_and_holdings_makes_room() {
    with_two_clients(async |bench| {
        let clients = &bench.clients;
        let most = SESSIONS as u64;
        let begin = |number| drop(clients.begin_session(key_of(number), far(number), &mut WriteSet::new()));
        let newcomer = key_of(999);
        (10..9 + most).for_each(begin);
        assert_eq!(clients.in_the_way_of(newcomer), None, "there is room: two are of this process");
        begin(9 + most);
        assert_eq!(clients.in_the_way_of(newcomer), None, "their Hellos are answered now");
        clients.hung_up(20, false);
        assert_eq!(clients.in_the_way_of(key_of(10)), None, "it has a session");
        assert_eq!(clients.in_the_way_of(newcomer), Some(20));
        // Each of these has something that it could lose, or is there.
        clients.hung_up(20, true);
        assert_eq!(clients.in_the_way_of(newcomer), None);
        for number in 10..20 {
            bench.env.sleep(Duration::from_millis(1)).await;
            clients.hear(&Header { session: number, ..Header::request(Kind::Ping) }).unwrap();
            clients.hung_up(number, false);
        }
        clients.open(10, INO);
        clients.join(11).unwrap();
        clients.lock(12, 0, &exclusive_lock()).unwrap();
        let _active = clients.begin(&Header { session: 13, ..Header::request(Kind::Ping) }).unwrap();
        clients.bar_session(14);
        assert_eq!(clients.in_the_way_of(newcomer), None, "one has ended for its client");
        begin(1000);
        assert_eq!(clients.in_the_way_of(newcomer), Some(15), "silent for the longest time");
        clients.end_session(15);
        assert_eq!(clients.in_the_way_of(newcomer), None);
    });
}

#[test]
fn a_request_in_execution_is_no_silence() {
    with_two_clients(async |bench| {
        let silent = |id: u64| bench.clients.sessions()[id as usize - 1].silent.as_secs();
        let header = Header { session: FIRST, ..Header::request(Kind::Read) };
        let serving = bench.clients.begin(&header).unwrap().unwrap();
        bench.env.sleep(Duration::from_secs(9)).await;
        assert_eq!((silent(FIRST), silent(SECOND)), (0, 9));
        drop(serving);
        bench.env.sleep(Duration::from_secs(4)).await;
        assert_eq!((silent(FIRST), silent(SECOND)), (4, 13));
        bench.clients.hear(&Header { session: SECOND, ..header }).unwrap();
        assert_eq!((silent(FIRST), silent(SECOND)), (4, 0));
        bench.clients.renew_leases();
        assert_eq!((silent(FIRST), silent(SECOND)), (0, 0));
        // The session may end while its request is executed.
        let serving = bench.clients.begin(&header).unwrap().unwrap();
        bench.clients.end_session(FIRST).unwrap();
        drop(serving);
        assert_eq!(bench.clients.sessions().len(), 1);
    });
}

#[test]
fn a_repeat_waits_for_the_request_and_gets_its_outcome() {
    with_two_clients(async |bench| {
        let clients = bench.clients.clone();
        let Slot::Execute(owned) = clients.slot(who(FIRST, 5)).await.unwrap() else { panic!("it is new") };
        let repeat = bench.start({
            let clients = clients.clone();
            async move {
                match clients.slot(who(FIRST, 5)).await {
                    Ok(Slot::Done(outcome)) => Some(outcome),
                    _ => None,
                }
            }
        });
        bench.pause().await;
        assert!(repeat.borrow().is_none(), "it waits");
        for other in [who(FIRST, 6), who(SECOND, 5)] {
            assert!(matches!(clients.slot(other).await, Ok(Slot::Execute(_))), "{other:?} has another slot");
        }
        owned.keep(&Ok(vec![1]));
        bench.pause().await;
        assert_eq!(repeat.take(), Some(Some(Ok(vec![1]))));
        // A request that must be sent again has no outcome: the slot stays as it was.
        let Slot::Execute(dropped) = clients.slot(who(FIRST, 5 + SLOTS)).await.unwrap() else {
            panic!("new")
        };
        drop(dropped);
        assert!(matches!(clients.slot(who(FIRST, 5)).await, Ok(Slot::Done(Ok(_)))));
        let Slot::Execute(owned) = clients.slot(who(FIRST, 5 + SLOTS)).await.unwrap() else { panic!("new") };
        owned.keep(&Err(Failure::new(ErrorKind::NoSpace, "full")));
        let Slot::Done(outcome) = clients.slot(who(FIRST, 5 + SLOTS)).await.unwrap() else { panic!("done") };
        assert_eq!(outcome.unwrap_err().kind, ErrorKind::NoSpace, "a failure is an outcome too");
        let late = clients.slot(who(FIRST, 5)).await.err().unwrap();
        assert_eq!(late.kind, ErrorKind::Invalid, "{late}");
    });
}

#[test]
fn a_session_of_another_process_survives_a_restart_until_it_ends() {
    with_two_clients(async |bench| {
        let mut writes = WriteSet::new();
        bench.clients.begin_session(key_of(5), far(5), &mut writes);
        bench.clients.begin_session(key_of(6), local(6), &mut writes);
        assert_eq!(writes.changes().count(), 1, "a client of this process has no row");
        let request = |session| {
            bench.clients.request(&Header { session, sequence: 3, ..Header::request(Kind::SetAttr) })
        };
        assert_eq!(request(7).unwrap_err().kind, ErrorKind::Ended, "it ended while its request waited");
        let (third, other) = (request(5).unwrap(), request(6).unwrap());
        assert!(third.key != other.key && !third.key.is_nil(), "each has a name of its own");
        Clients::record(third, b"three", &mut writes);
        Clients::record(who(5, 0), b"nothing", &mut writes);
        bench.kv.commit(writes).await.unwrap();
        let later = Clients::load(&bench.env, &*bench.kv, GENERATION + 1).await.unwrap();
        assert_eq!((later.sessions().len(), later.is_in_use(5), later.owe_opens()), (1, true, true));
        assert!(matches!(later.slot(who(5, 3)).await, Ok(Slot::Done(Ok(body))) if body == b"three"));
        assert!(later.open(5, INO) && later.open(5, INO) && later.open(5, id(8)));
        let writes = later.bar_session(5).unwrap();
        assert!(!later.is_live(5) && later.is_in_use(5), "others must not have its locks yet");
        let opens = later.end_session(5).unwrap();
        assert_eq!(opens, BTreeMap::from([(INO, 2), (id(8), 1)]));
        bench.kv.commit(writes).await.unwrap();
        for (from, until) in [all_sessions(), all_results()] {
            assert_eq!(bench.kv.keys(from, until, 9).await.unwrap(), [[0u8; 0]; 0]);
        }
        assert!(!later.owe_opens(), "nobody is left to report anything");
    });
}

#[test]
fn a_client_reports_its_opens_and_locks_to_the_start_that_asks_for_them() {
    with_two_clients(async |bench| {
        let mut writes = WriteSet::new();
        bench.clients.begin_session(key_of(5), far(5), &mut writes);
        bench.kv.commit(writes).await.unwrap();
        let clients = Clients::load(&bench.env, &*bench.kv, GENERATION).await.unwrap();
        clients.begin_session(key_of(6), local(6), &mut WriteSet::new());
        let lock = |change: LockChange| LockRequest {
            ino: 7,
            last: 9,
            change: change.into(),
            ..LockRequest::default()
        };
        let early = |request: &LockRequest| clients.lock(6, 0, request).unwrap().early;
        assert!(early(&lock(LockChange::Shared)) && !early(&lock(LockChange::Unlock)));
        let ping = |start, opens: &[(u64, u32)], reclaimed| PingRequest {
            opens: opens
                .iter()
                .map(|(ino, count)| OpenCount { ino: *ino, count: *count, branch: 0, user: 0 })
                .collect(),
            locks: vec![lock(LockChange::Exclusive)],
            start,
            reclaimed,
        };
        // Columns: the start to which the client reports, its opens, true if these are all; the changes, and
        // true if the client owes more.
        let changed = |ino, before, now| (id(ino), before, now);
        for (start, opens, reclaimed, expected, owes) in [
            (GENERATION - 1, &[(7, 2)][..], true, vec![], true),
            (GENERATION, &[(7, 2), (8, 1)], false, vec![changed(7, 0, 2), changed(8, 0, 1)], true),
            (GENERATION, &[(7, 1)], false, vec![changed(7, 2, 1)], true),
            (GENERATION, &[(8, 0)], true, vec![changed(8, 1, 0)], false),
            (GENERATION, &[], true, vec![], false),
        ] {
            let found = clients.reclaim(5, &ping(start, opens, reclaimed)).unwrap().opens;
            assert_eq!(found, expected, "{start} {opens:?}");
            assert_eq!(clients.owe_opens(), owes, "{start} {opens:?}");
        }
        assert!(!early(&lock(LockChange::Shared)));
        let reply = clients.lock(6, 0, &lock(LockChange::Shared)).unwrap();
        assert!(reply.conflict.is_some(), "the lock of session 5 is there again");
        clients.end_session(5).unwrap();
        assert_eq!(clients.lock(6, 0, &lock(LockChange::Shared)).unwrap(), LockReply::default());
    });
}

#[test]
fn bodies_that_make_no_sense_are_refused() {
    with_two_clients(async |bench| {
        bench.join_both().await;
        let clients = &bench.clients;
        let part = |first, last| LeaseRequest { ino: 7, exclusive: true, first, last }.encode_to_vec();
        let garbage = || vec![0xff; 5];
        for (what, result) in [
            ("a lease", clients.grant(FIRST, Branch::MAIN, &garbage()).map(drop)),
            ("a lease on a part", clients.grant(FIRST, Branch::MAIN, &part(1, u64::MAX)).map(drop)),
            ("a lease up to a byte", clients.grant(FIRST, Branch::MAIN, &part(0, 4096)).map(drop)),
            ("an empty lease", clients.grant(FIRST, Branch::MAIN, &[]).map(drop)),
            ("a watch", clients.watch(FIRST, &garbage()).await.map(drop)),
            ("a sync", clients.sync_elsewhere(FIRST, Branch::MAIN, &garbage()).map(drop)),
            ("a change of size", clients.may_resize(FIRST, Branch::MAIN, &garbage()).map(drop)),
        ] {
            assert_eq!(result.unwrap_err().kind, ErrorKind::Invalid, "{what}");
        }
        for (change, first, last) in [(9, 0, 9), (-1, 0, 9), (LockChange::Shared.into(), 9, 8)] {
            let request = LockRequest { ino: 7, change, first, last, ..LockRequest::default() };
            assert_eq!(clients.lock(FIRST, 0, &request), Err(Errno::INVAL), "{change} {first}..={last}");
        }
    });
}

#[test]
fn a_lease_is_granted_once_the_others_have_given_theirs_back() {
    // Ways in which the first session loses its lease.
    for way in ["answer", "release", "leave", "end"] {
        with_two_clients(async |bench| {
            bench.join_both().await;
            let grant = bench.grant(FIRST, true).await.unwrap();
            let second = bench.start_grant(SECOND);
            bench.pause().await;
            assert!(second.borrow().is_none(), "{way}: it waits");
            assert!(bench.clients.is_unsynced_elsewhere(SECOND, INO));
            let calls = bench.calls(FIRST).await;
            let [call] = &calls[..] else { panic!("{way}: one revocation, not {calls:?}") };
            assert_eq!((call.ino, call.grant, call.is_sync), (INO.ino.0, grant, false), "{way}");
            let request = WatchRequest { generation: GENERATION, ..WatchRequest::default() };
            // Numbers of another start mean nothing.
            let other = WatchRequest { generation: 9, answered: vec![call.number], ..request.clone() };
            bench.clients.watch(FIRST, &other.encode_to_vec()).await.unwrap();
            bench.pause().await;
            assert!(second.borrow().is_none(), "{way}: it still waits");
            let request = match way {
                "answer" => WatchRequest { answered: vec![call.number], ..request },
                "release" => WatchRequest {
                    released: vec![ReleasedLease { ino: INO.ino.0, grant, branch: 0, attributes: false }],
                    ..request
                },
                "leave" => WatchRequest { leaves: true, ..request },
                _ => {
                    bench.clients.end_session(FIRST).unwrap();
                    WatchRequest { generation: GENERATION, ..WatchRequest::default() }
                }
            };
            bench.clients.watch(FIRST, &request.encode_to_vec()).await.unwrap();
            bench.pause().await;
            let granted = second.take().unwrap().unwrap();
            assert!(granted > grant, "{way}: numbers rise");
            assert!(!bench.clients.is_unsynced_elsewhere(SECOND, INO), "{way}");
        });
    }
}

#[test]
fn a_watch_is_answered_with_news_or_after_a_third_of_the_lease_time() {
    with_two_clients(async |bench| {
        bench.join_both().await;
        bench.clients.set_lease(Duration::from_secs(6));
        let watch = async |seen| {
            let request =
                WatchRequest { generation: GENERATION, wait: true, seen, ..WatchRequest::default() };
            let asked = bench.env.now();
            let reply = bench.clients.watch(FIRST, &request.encode_to_vec()).await.unwrap();
            let reply = WatchReply::decode(&reply[..]).unwrap();
            (reply, (bench.env.now() - asked).as_secs())
        };
        let (reply, waited) = watch(0).await;
        assert_eq!((reply, waited), (WatchReply::default(), 2), "no news");
        bench.grant(FIRST, true).await.unwrap();
        let _second = bench.start_grant(SECOND);
        let (reply, waited) = watch(0).await;
        assert_eq!((reply.calls.len(), waited), (1, 0));
        let (reply, waited) = watch(reply.calls[0].number).await;
        assert_eq!((reply, waited), (WatchReply::default(), 2), "it has seen the revocation");
        // Very long lease times do not make a client wait longer than ten seconds.
        bench.clients.set_lease(Duration::from_secs(3600));
        assert_eq!(watch(u64::MAX).await.1, 10);
        let request = WatchRequest { generation: GENERATION, ..WatchRequest::default() };
        let reply = bench.clients.watch(FIRST, &request.encode_to_vec()).await.unwrap();
        assert_eq!(WatchReply::decode(&reply[..]), Ok(WatchReply::default()), "it does not want to wait");
    });
}

#[test]
fn a_released_lock_is_news_for_the_session_that_waits() {
    with_two_clients(async |bench| {
        bench.join_both().await;
        let lock = |change: LockChange| LockRequest {
            ino: 7,
            last: 9,
            wait: true,
            change: change.into(),
            ..LockRequest::default()
        };
        assert_eq!(bench.clients.lock(FIRST, 0, &lock(LockChange::Exclusive)), Ok(LockReply::default()));
        assert!(bench.clients.lock(SECOND, 0, &lock(LockChange::Shared)).unwrap().conflict.is_some());
        let watching = bench.start({
            let clients = bench.clients.clone();
            // It has heard that it may take part.
            let seen = bench.asker().news(SECOND).again;
            let request =
                WatchRequest { generation: GENERATION, wait: true, seen, ..WatchRequest::default() };
            async move { clients.watch(SECOND, &request.encode_to_vec()).await }
        });
        bench.pause().await;
        assert!(watching.borrow().is_none());
        bench.clients.end_session(FIRST).unwrap();
        bench.pause().await;
        let reply = WatchReply::decode(&watching.take().unwrap().unwrap()[..]).unwrap();
        assert!(matches!(reply.unlocked[..], [Unlocked { ino: 7, branch: 0, .. }]), "{reply:?}");
        assert_eq!(bench.clients.lock(SECOND, 0, &lock(LockChange::Shared)), Ok(LockReply::default()));
    });
}

#[test]
fn a_sync_elsewhere_ends_with_the_result_of_the_other_client() {
    // Columns: the errno that the other client reports, if any, and the errno that the one that waits hears.
    for (reported, expected) in [(None, 0), (Some(28), 28), (Some(0), 5), (Some(70_000), 5)] {
        with_two_clients(async |bench| {
            bench.join_both().await;
            let body = |ticket| GetAttrRequest { ino: INO.ino.0, ticket, lease: false }.encode_to_vec();
            let asks = |session, ticket| {
                bench.clients.sync_elsewhere(session, Branch::MAIN, &body(ticket)).unwrap().is_some()
            };
            assert!(!asks(SECOND, 1), "there is nothing to sync");
            bench.grant(FIRST, true).await.unwrap();
            assert!(!asks(FIRST, 2), "its own changes");
            assert!(!asks(SECOND, 0), "it takes what there is");
            let asker = bench.asker();
            let syncing = bench.start(async move { asker.sync(SECOND, INO).await });
            bench.pause().await;
            let calls = bench.calls(FIRST).await;
            let [call] = &calls[..] else { panic!("one request, not {calls:?}") };
            assert!(call.is_sync && syncing.borrow().is_none(), "{reported:?}: it waits");
            let number = call.number;
            let failed = reported.into_iter().map(|errno| FailedSync { number, errno }).collect();
            let answered = vec![number];
            let request =
                WatchRequest { generation: GENERATION, failed, answered, ..WatchRequest::default() };
            bench.clients.watch(FIRST, &request.encode_to_vec()).await.unwrap();
            bench.pause().await;
            assert_eq!(syncing.take(), Some(Ok(expected)), "{reported:?}");
        });
    }
}

#[test]
fn a_change_of_size_is_asked_again_when_the_leases_of_others_are_back() {
    with_two_clients(async |bench| {
        let body =
            |size, grow| SetAttrRequest { ino: INO.ino.0, size, grow, ..Default::default() }.encode_to_vec();
        bench.clients.may_resize(FIRST, Branch::MAIN, &body(Some(0), false)).unwrap();
        bench.join_both().await;
        bench.grant(SECOND, true).await.unwrap();
        // Columns: size, growth, and true if the request must be sent again.
        for (size, grow, again) in [(None, false, false), (Some(9), true, false), (Some(9), false, true)] {
            let result = bench.clients.may_resize(FIRST, Branch::MAIN, &body(size, grow));
            assert_eq!(result.err().is_some_and(|failure| failure.is_ask_again()), again, "{size:?} {grow}");
        }
        let before = bench.asker().news(FIRST).again;
        assert!(bench.clients.leases.borrow().is_unsynced_elsewhere(FIRST, INO));
        bench.answer_all(SECOND).await;
        assert!(bench.asker().news(FIRST).again > before);
        bench.clients.may_resize(FIRST, Branch::MAIN, &body(Some(9), false)).unwrap();
    });
}

#[test]
fn a_stop_names_the_sessions_that_did_not_give_up_everything() {
    // Columns: the answer of the second session, and true if the stop names it.
    for (way, expected) in
        [("done", false), ("failed", true), ("silent", true), ("ended", true), ("away", false)]
    {
        with_two_clients(async |bench| {
            bench.join_both().await;
            let stopping = bench.start({
                let clients = bench.clients.clone();
                async move {
                    let named =
                        clients.revoke_everything(Duration::from_secs(3), |id| way != "away" || id == FIRST);
                    named.await.iter().map(|info| info.id).collect::<Vec<_>>()
                }
            });
            bench.pause().await;
            bench.answer_all(FIRST).await;
            match way {
                "done" => bench.answer_all(SECOND).await,
                "failed" => {
                    let number = bench.calls(SECOND).await[0].number;
                    let (failed, answered) = (vec![FailedSync { number, errno: 5 }], vec![number]);
                    let request =
                        WatchRequest { generation: GENERATION, failed, answered, ..WatchRequest::default() };
                    bench.clients.watch(SECOND, &request.encode_to_vec()).await.unwrap();
                }
                "ended" => drop(bench.clients.end_session(SECOND)),
                _ => {}
            }
            bench.pause().await;
            assert_eq!(stopping.borrow().is_none(), way == "silent", "{way}: only silence is waited for");
            bench.env.sleep(Duration::from_secs(4)).await;
            assert_eq!(stopping.take().unwrap().contains(&SECOND), expected, "{way}");
            assert!(!bench.clients.is_stopped());
        });
    }
}

#[test]
fn a_session_goes_on_by_its_number_and_name() {
    with_two_clients(async |bench| {
        let clients = &bench.clients;
        clients.begin_session(key_of(5), far(5), &mut WriteSet::new());
        clients.begin_session(key_of(6), far(6), &mut WriteSet::new());
        assert_eq!(clients.goes_on(key_of(5), 5, true), Ok(30_000));
        // Columns: name, number, and true for a client of another process.
        for (key, number, remote) in
            [(5, 6, true), (6, 5, true), (9, 5, true), (5, 9, true), (5, 5, false), (FIRST, FIRST, true)]
        {
            let refused = clients.goes_on(key_of(key), number, remote).unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Ended, "{key} {number} {remote}");
        }
        clients.bar_session(5).unwrap();
        assert_eq!(clients.goes_on(key_of(5), 5, true).unwrap_err().kind, ErrorKind::Ended);
    });
}

#[test]
fn requests_that_wait_fail_when_the_service_stops() {
    with_two_clients(async |bench| {
        bench.join_both().await;
        bench.grant(FIRST, true).await.unwrap();
        let waiting = bench.start_grant(SECOND);
        bench.pause().await;
        assert!(waiting.borrow().is_none());
        bench.clients.stop();
        bench.pause().await;
        assert_eq!(waiting.take().unwrap().unwrap_err().kind, ErrorKind::Ended);
        assert!(bench.clients.is_stopped());
        assert_eq!(bench.clients.join(FIRST).unwrap_err().kind, ErrorKind::Ended);
    });
}

/// Regression: a lease was granted to a session that had left while it waited. Then another session was alone
/// although a lease existed, and the process stopped.
#[test]
fn a_session_that_leaves_while_it_waits_for_a_lease_joins_again() {
    with_two_clients(async |bench| {
        let clients = &bench.clients;
        let waiting = bench.leave_while_waiting().await;
        // The first session is alone now, until the second one asks again.
        for _ in 0..3 {
            bench.answer_all(FIRST).await;
            bench.pause().await;
        }
        assert!(matches!(waiting.take(), Some(Ok(_))), "the second session has its lease");
        assert!(clients.are_shared() && clients.is_unsynced_elsewhere(FIRST, INO));
        // A third one comes and goes.
        clients.begin_session(key_of(3), local(3), &mut WriteSet::new());
        clients.end_session(3);
        // The first one gets the lease back, by a revocation of the second.
        let again = bench.start_grant(FIRST);
        bench.pause().await;
        assert!(again.borrow().is_none());
        bench.answer_all(SECOND).await;
        bench.pause().await;
        assert!(matches!(again.take(), Some(Ok(_))));
    });
}

#[test]
fn a_lock_request_of_a_session_that_has_ended_sets_no_lock() {
    with_two_clients(async |bench| {
        let clients = &bench.clients;
        let header = Header { session: SECOND, ..Header::request(Kind::Lock) };
        clients.hear(&header).unwrap();
        let serving = clients.begin(&header).unwrap();
        // The request waits for a repair to end; its session is ended.
        clients.end_session(SECOND).unwrap();
        let exclusive = exclusive_lock();
        assert_eq!(clients.lock(SECOND, 0, &exclusive), Err(Errno::STALE));
        drop(serving);
        assert!(clients.lock(FIRST, 0, &exclusive).unwrap().conflict.is_none());
    });
}

/// Regression: a row without a lease time, which is damage, made a session that never ended.
#[test]
fn a_row_of_a_session_without_a_lease_time_keeps_nobody_waiting() {
    for lease_ms in [0, u32::MAX] {
        let world = World::new(9);
        let outcome = world.run(async {
            let (env, kv) = (world.env(), MemKv::new(1 << 20));
            let mut writes = WriteSet::new();
            writes.put(session_key(key_of(5)), SessionRow { lease_ms, ..far(5) }.encode());
            kv.commit(writes).await.unwrap();
            let clients = Clients::load(&env, &*kv, GENERATION).await.unwrap();
            clients.begin_session(key_of(FIRST), local(FIRST), &mut WriteSet::new());
            clients.join(FIRST).unwrap();
            assert!(!clients.is_in_use(5) && !clients.owe_opens());
        });
        world.destroy();
        outcome.unwrap();
    }
}

#[test]
fn a_session_that_owes_no_report_sets_no_lock_by_one() {
    with_two_clients(async |bench| {
        let clients = &bench.clients;
        let lock = exclusive_lock();
        let ping = PingRequest { locks: vec![lock.clone()], start: GENERATION, ..PingRequest::default() };
        clients.reclaim(SECOND, &ping).unwrap();
        assert!(clients.lock(FIRST, 0, &lock).unwrap().conflict.is_none());
    });
}

#[test]
fn news_that_a_client_saw_before_a_restart_hide_none() {
    with_two_clients(async |bench| {
        let clients = &bench.clients;
        clients.join(FIRST).unwrap();
        let asker = bench.asker();
        let joining = bench.start(async move { asker.join(SECOND).await });
        bench.pause().await;
        let request = WatchRequest {
            generation: GENERATION - 1,
            seen: 1 << 40,
            wait: true,
            alone: true,
            ..WatchRequest::default()
        };
        let reply = clients.watch(FIRST, &request.encode_to_vec()).await.unwrap();
        let calls = WatchReply::decode(&reply[..]).unwrap().calls;
        assert_eq!(calls.len(), 1, "it is asked to give up everything");
        assert!(joining.borrow().is_none());
    });
}

/// Regression: on a store whose rows were full nobody could begin a session to remove something.
#[test]
fn a_session_begins_when_the_rows_are_full() {
    with_two_clients(async |bench| {
        let mut number = 0;
        for size in [10_000, 100, 0] {
            loop {
                number += 1;
                let mut writes = WriteSet::new();
                writes.put(format!("fill {number}").into_bytes(), vec![7; size]);
                if bench.kv.commit(writes).await.is_err() {
                    break;
                }
            }
        }
        let mut writes = WriteSet::new();
        let _serving = bench.clients.begin_session(key_of(3), far(3), &mut writes);
        bench.kv.commit(writes).await.unwrap();
    });
}

/// Runs a test on a service that has just started again and knows these sessions.
fn after_a_restart(sessions: &[u64], test: impl AsyncFnOnce(&Bench)) {
    let world = World::new(9);
    let outcome = world.run(async {
        let (env, kv) = (world.env(), MemKv::new(1 << 20));
        let mut writes = WriteSet::new();
        for id in sessions {
            writes.put(session_key(key_of(*id)), far(*id).encode());
        }
        kv.commit(writes).await.unwrap();
        let clients = Clients::load(&env, &*kv, GENERATION).await.unwrap();
        test(&Bench { env, kv, clients, lefts: Lefts::default() }).await;
    });
    world.destroy();
    outcome.unwrap();
}

/// Like [`after_a_restart`], once all sessions have reported what they had.
fn recovered_after_a_restart(sessions: &[u64], test: impl AsyncFnOnce(&Bench)) {
    after_a_restart(sessions, async |bench| {
        sessions.iter().for_each(|session| report(&bench.clients, *session));
        test(bench).await;
    });
}

/// A session that survived a restart reports that it had nothing.
fn report(clients: &Clients, session: u64) {
    let ping = PingRequest { reclaimed: true, start: GENERATION, ..PingRequest::default() };
    clients.reclaim(session, &ping).unwrap();
}
