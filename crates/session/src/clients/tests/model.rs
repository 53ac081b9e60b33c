//! A random model of clients: joins, grants, changes of size, answers, ends and stops in every order.

use super::*;

/// One client of the model.
#[derive(Default)]
struct View {
    held: BTreeMap<FileId, (bool, u64)>,
    /// Grants up to these are revoked, of a file and of all files.
    void: BTreeMap<FileId, u64>,
    void_all: u64,
}

impl View {
    /// True if a grant was revoked before it arrived, or a newer one did.
    fn is_void(&self, file: FileId, grant: u64) -> bool {
        let present = self.held.get(&file).map_or(0, |(_, grant)| *grant);
        grant <= present || grant <= self.void.get(&file).copied().unwrap_or(0).max(self.void_all)
    }

    fn revoke(&mut self, call: &LeaseCall) {
        match call.ino {
            0 => self.void_all = self.void_all.max(call.grant),
            _ => {
                let void = self.void.entry(call.file()).or_default();
                *void = call.grant.max(*void);
            }
        }
        self.held.retain(|ino, (_, grant)| (call.ino != 0 && call.ino != ino.ino.0) || *grant > call.grant);
    }
}

/// Session, kind and outcome of a request.
type Waiter = (u64, &'static str, Rc<RefCell<Option<bool>>>);

type Views = Rc<RefCell<BTreeMap<u64, View>>>;

fn model(seed: u64) -> (u64, u64) {
    let world = World::new(seed);
    let outcome = world.run(async {
        let (env, kv) = (world.env(), MemKv::new(1 << 20));
        let restart = seed.is_multiple_of(3);
        if restart {
            let mut writes = WriteSet::new();
            for id in 1..=1 + seed % 4 {
                writes.put(session_key(key_of(id)), far(id).encode());
            }
            kv.commit(writes).await.unwrap();
        }
        let clients = Clients::load(&env, &*kv, GENERATION).await.unwrap();
        let bench = Bench { env: env.clone(), kv, clients: clients.clone(), lefts: Lefts::default() };
        let views: Views = Rc::default();
        let mut next_id = 1;
        if restart {
            for id in 1..=1 + seed % 4 {
                views.borrow_mut().insert(id, View::default());
                next_id = id + 1;
                if seed.is_multiple_of(2) {
                    report(&clients, id);
                }
            }
        }
        let mut waiters: Vec<Waiter> = Vec::new();
        let below = |most: u64| env.random() % most;
        let mut closed = false;
        let mut granted = 0;
        let steps = 40 + below(120);
        for _ in 0..steps {
            if views.borrow().len() < 2 || (below(40) == 0 && views.borrow().len() < 4) {
                clients.begin_session(key_of(next_id), local(next_id), &mut WriteSet::new());
                views.borrow_mut().insert(next_id, View::default());
                next_id += 1;
            }
            let ids: Vec<u64> = views.borrow().keys().copied().collect();
            let session = ids[below(ids.len() as u64) as usize];
            let ino = id(7 + below(2));
            match below(16) {
                0..=3 => {
                    let (asker, views, exclusive) = (bench.asker(), views.clone(), below(2) == 0);
                    let task = async move {
                        let Ok(grant) = asker.grant(session, ino, exclusive).await else { return false };
                        let mut views = views.borrow_mut();
                        if views.get(&session).is_none_or(|view| view.is_void(ino, grant)) {
                            return false;
                        }
                        for (other, view) in views.iter().filter(|(other, _)| **other != session) {
                            if let Some((other_exclusive, other_grant)) = view.held.get(&ino) {
                                assert!(
                                    !exclusive && !other_exclusive,
                                    "seed {seed}: {session} got {ino} by {grant}, {other} has it by {other_grant}"
                                );
                            }
                        }
                        views.get_mut(&session).unwrap().held.insert(ino, (exclusive, grant));
                        true
                    };
                    waiters.push((session, "grant", bench.start(task)));
                }
                4 => {
                    let asker = bench.asker();
                    waiters.push((session, "join", bench.start(async move { asker.join(session).await.is_ok() })));
                }
                5 | 6 => {
                    let asker = bench.asker();
                    let task = async move { asker.resize(session, ino).await.is_ok() };
                    waiters.push((session, "resize", bench.start(task)));
                }
                7 => {
                    let asker = bench.asker();
                    let task = async move { asker.sync(session, ino).await.is_ok() };
                    waiters.push((session, "sync", bench.start(task)));
                }
                8..=10 => {
                    let calls = bench.calls(session).await;
                    if !calls.is_empty() {
                        let call = calls[below(calls.len() as u64) as usize].clone();
                        answer(&bench, &views, session, &call, below(4) == 0).await;
                    }
                }
                11 if below(3) == 0 => {
                    views.borrow_mut().get_mut(&session).unwrap().held.clear();
                    bench.leave(session).await;
                }
                12 if below(4) == 0 => {
                    views.borrow_mut().remove(&session);
                    clients.end_session(session).unwrap();
                }
                13 => {
                    let taken = views.borrow_mut().get_mut(&session).unwrap().held.remove(&ino);
                    if let Some((_, grant)) = taken {
                        // Another request of the same client may find it in the news later.
                        views.borrow_mut().get_mut(&session).unwrap().void.insert(ino, grant);
                        let released = vec![ReleasedLease { ino: ino.ino.0, grant, branch: 0, attributes: false }];
                        let request = WatchRequest { generation: GENERATION, released, ..Default::default() };
                        clients.watch(session, &request.encode_to_vec()).await.unwrap();
                    }
                }
                15 if below(4) == 0 => report(&clients, session),
                14 if seed.is_multiple_of(2) && !closed && below(12) == 0 => {
                    closed = true;
                    let clients = clients.clone();
                    let task = async move {
                        clients.revoke_everything(Duration::from_secs(3600), |_| true).await;
                        true
                    };
                    waiters.push((0, "close", bench.start(task)));
                }
                _ => env.sleep(Duration::from_millis(below(30))).await,
            }
        }
        views.borrow().keys().for_each(|session| report(&clients, *session));
        for _ in 0..300 {
            let ids: Vec<u64> = views.borrow().keys().copied().collect();
            for session in ids {
                for call in bench.calls(session).await {
                    answer(&bench, &views, session, &call, false).await;
                }
            }
            env.sleep(Duration::from_millis(7)).await;
        }
        let close_waits = waiters.iter().any(|(_, kind, place)| *kind == "close" && place.borrow().is_none());
        assert!(!close_waits, "seed {seed}: the stop waits for ever");
        let waiting = || -> Vec<(u64, &'static str)> {
            let left = waiters.iter().filter(|(_, _, place)| place.borrow().is_none());
            left.map(|(session, kind, _)| (*session, *kind)).collect()
        };
        if !closed {
            assert_eq!(waiting(), [], "seed {seed}: {:?}", clients.leases.borrow());
            let noted = clients.leases.borrow().is_anything_noted();
            assert!(!noted, "seed {seed}: somebody waits for nothing: {:?}", clients.leases.borrow());
        }
        clients.stop();
        env.sleep(Duration::from_secs(1)).await;
        assert_eq!(waiting(), [], "seed {seed}: after the stop");
        for (_, kind, place) in &waiters {
            granted += u64::from(*kind == "grant" && *place.borrow() == Some(true));
        }
        (granted, waiters.len() as u64)
    });
    world.destroy();
    outcome.unwrap()
}

async fn answer(bench: &Bench, views: &Views, session: u64, call: &LeaseCall, fails: bool) {
    if !call.is_sync {
        views.borrow_mut().get_mut(&session).unwrap().revoke(call);
    }
    let failed = if fails { vec![FailedSync { number: call.number, errno: 5 }] } else { Vec::new() };
    let request =
        WatchRequest { generation: GENERATION, answered: vec![call.number], failed, ..Default::default() };
    bench.clients.watch(session, &request.encode_to_vec()).await.unwrap();
}

#[test]
fn clients_in_every_order() {
    let mut sum = (0, 0);
    for seed in penstock_sim::seeds(0..400) {
        let (granted, all) = model(seed);
        sum = (sum.0 + granted, sum.1 + all);
    }
    assert!(sum.0 > 0 && sum.0 < sum.1, "{} of {} requests were granted", sum.0, sum.1);
}
