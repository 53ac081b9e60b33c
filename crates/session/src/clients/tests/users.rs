//! Gateways and their users.

use super::*;

/// Begins session 5, of a gateway, which a restart knows.
async fn begin_gateway(bench: &Bench) {
    let gateway = SessionRow { role: Role::Gateway, ..far(5) };
    let mut writes = WriteSet::new();
    bench.clients.begin_session(key_of(5), gateway, &mut writes);
    bench.kv.commit(writes).await.unwrap();
}

#[test]
fn a_gateway_asks_for_users_that_it_has_named_and_a_mount_for_none() {
    with_two_clients(async |bench| {
        let clients = &bench.clients;
        let gateway = SessionRow { role: Role::Gateway, ..far(5) };
        clients.begin_session(key_of(5), gateway, &mut WriteSet::new());
        let named = UserRequest { uid: 1000, gid: 100, groups: vec![7] };
        let user = clients.add_user(5, named.clone()).unwrap();
        assert_eq!(clients.add_user(FIRST, named.clone()).unwrap_err().kind, ErrorKind::Invalid);
        assert_eq!(clients.add_user(99, named).unwrap_err().kind, ErrorKind::Ended);
        let check = |session, kind, user| {
            let header = Header { session, user, ..Header::request(kind) };
            clients.check_user(&header).map_err(|failure| failure.kind)
        };
        // Columns: session, kind and user, and the outcome.
        for (session, kind, user, outcome) in [
            (FIRST, Kind::Lookup, 0, Ok(())),
            (FIRST, Kind::Lookup, 1, Err(ErrorKind::Invalid)),
            (FIRST, Kind::Read, 1, Err(ErrorKind::Invalid)),
            (5, Kind::Lookup, 0, Err(ErrorKind::Invalid)),
            (5, Kind::Read, 0, Err(ErrorKind::Invalid)),
            (5, Kind::Ping, 0, Ok(())),
            (5, Kind::StatFs, 0, Ok(())),
            (5, Kind::Lookup, user, Ok(())),
            (5, Kind::Lookup, user ^ 1, Err(ErrorKind::RefreshMap)),
            (99, Kind::Lookup, 1, Err(ErrorKind::Ended)),
        ] {
            assert_eq!(check(session, kind, user), outcome, "{session} {kind:?} {user}");
        }
        let who = |session, user| Request { session, user, ..who(session, 0) };
        assert_eq!(clients.user(who(FIRST, 0)), Ok(None));
        assert_eq!(clients.user(who(5, user)).unwrap().unwrap().uid, 1000);
        assert!(clients.user(who(5, user ^ 1)).is_err() && clients.user(who(99, 1)).is_err());
        // It reaches inodes one by one; a mount has its kernel for that.
        assert!(clients.has_reached(who(FIRST, 0), INO) && !clients.has_reached(who(5, user), INO));
        clients.reach(who(5, user), INO);
        clients.reach(who(FIRST, 0), INO);
        assert!(clients.has_reached(who(5, user), INO) && !clients.has_reached(who(5, user), id(8)));
        assert!(clients.access_of(who(5, user), INO).is_none());
        assert!(clients.open_for(who(5, user), INO, 1) && clients.access_of(who(5, user), INO) == Some(1));
        // Regression: a session reported any number of files as open at any time.
        let opens = vec![OpenCount { ino: INO.ino.0, count: 2, branch: 0, user }];
        let ping = PingRequest { opens, start: GENERATION, ..PingRequest::default() };
        assert_eq!(clients.reclaim(5, &ping), Ok(Reclaimed::default()), "it owes no report");
        let closes = [(); 2].map(|()| clients.close_for(who(5, user), INO));
        assert_eq!(closes, [true, false]);
        clients.end_session(5).unwrap();
        assert!(!clients.has_reached(who(5, user), INO));
        assert!(!clients.open_for(who(5, user), INO, 1), "it has ended");
    });
}

#[test]
fn a_gateway_has_its_role_and_users_again_after_a_restart() {
    with_two_clients(async |bench| {
        begin_gateway(bench).await;
        let named = UserRequest { uid: 1000, gid: 100, groups: vec![] };
        let user = bench.clients.add_user(5, named.clone()).unwrap();
        let later = Clients::load(&bench.env, &*bench.kv, GENERATION + 1).await.unwrap();
        let info = |clients: &Clients| {
            let info = clients.sessions().into_iter().find(|info| info.id == 5).unwrap();
            (info.role, info.users)
        };
        assert_eq!(info(&bench.clients), (Role::Gateway, 1));
        assert_eq!(info(&later), (Role::Gateway, 0), "users are named to each start");
        assert_eq!(later.add_user(5, named), Ok(user), "the number follows from the ids");
    });
}

/// After a restart a gateway reports whose locks it had. One user's are not another's.
#[test]
fn locks_of_users_are_told_apart_also_after_a_restart() {
    with_two_clients(async |bench| {
        begin_gateway(bench).await;
        let later = Clients::load(&bench.env, &*bench.kv, GENERATION).await.unwrap();
        let user = |uid| later.add_user(5, UserRequest { uid, gid: 100, groups: vec![] }).unwrap();
        let [one, other] = [user(1000), user(1001)];
        let lock = |change: LockChange| LockRequest { change: change.into(), ..exclusive_lock() };
        let locks = vec![LockRequest { user: one, ..exclusive_lock() }];
        let opens = [one, other].map(|user| OpenCount { ino: INO.ino.0, count: 1, branch: 0, user }).to_vec();
        let ping = PingRequest { opens, locks, reclaimed: true, start: GENERATION };
        assert_eq!(later.reclaim(5, &ping).unwrap().opens, [(INO, 0, 2)], "both have it open");
        let ask = |user, change| later.lock(5, user, &lock(change)).unwrap().conflict.is_some();
        assert!(ask(other, LockChange::Exclusive));
        assert!(!ask(other, LockChange::Unlock), "there is none of its own to release");
        assert!(ask(other, LockChange::Shared) && !ask(one, LockChange::Unlock));
        assert!(!ask(other, LockChange::Exclusive) && ask(one, LockChange::Shared));
        later.end_session(5).unwrap();
        later.begin_session(key_of(6), local(6), &mut WriteSet::new());
        assert!(later.lock(6, 0, &exclusive_lock()).unwrap().conflict.is_none());
    });
}
