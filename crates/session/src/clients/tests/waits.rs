//! Requests that wait for other clients, and the news that end the wait.

use super::*;

/// Regression: each answer woke everything that waited for any client.
#[test]
fn news_wake_the_watch_of_their_session_only() {
    with_two_clients(async |bench| {
        bench.join_both().await;
        bench.clients.begin_session(key_of(3), local(3), &mut WriteSet::new());
        bench.asker().join(3).await.unwrap();
        let watch = |session| {
            let (clients, seen) = (bench.clients.clone(), bench.asker().news(session).again);
            let request =
                WatchRequest { generation: GENERATION, wait: true, seen, ..WatchRequest::default() };
            bench.start(async move { clients.watch(session, &request.encode_to_vec()).await })
        };
        let watches = [FIRST, SECOND, 3].map(watch);
        bench.pause().await;
        let answered = || watches.iter().map(|watch| watch.borrow().is_some()).collect::<Vec<_>>();
        assert_eq!(answered(), [false, false, false]);
        bench.grant(FIRST, true).await.unwrap();
        bench.pause().await;
        assert_eq!(answered(), [false, false, false], "a lease is in the reply to its request");
        let _second = bench.start_grant(SECOND);
        bench.pause().await;
        assert_eq!(answered(), [true, false, false], "it is called");
        bench.answer_all(FIRST).await;
        bench.pause().await;
        assert_eq!(answered(), [true, true, false], "the lease has come");
        bench.clients.stop();
        bench.pause().await;
        assert_eq!(answered(), [true, true, true]);
        assert_eq!(watches[2].take().unwrap().unwrap_err().kind, ErrorKind::Ended);
    });
}

/// Regression: a report of a hundred thousand leases that nobody had looked at all that waited for each.
#[test]
fn a_report_of_leases_is_bounded_and_counts_only_those_that_are_there() {
    with_two_clients(async |bench| {
        bench.join_both().await;
        let grant = bench.grant(FIRST, true).await.unwrap();
        let waiting = bench.start_grant(SECOND);
        bench.pause().await;
        let report = async |count: usize, grant| {
            let released = ReleasedLease { ino: INO.ino.0, branch: 0, grant, attributes: false };
            let released = vec![released; count];
            let request = WatchRequest { generation: GENERATION, released, ..WatchRequest::default() };
            bench.clients.watch(FIRST, &request.encode_to_vec()).await
        };
        let refused = report(16_385, 0).await.unwrap_err();
        assert!(refused.message.contains("more than 16384"), "{refused}");
        report(16_384, grant - 1).await.unwrap();
        bench.pause().await;
        assert!(waiting.borrow().is_none(), "none of these is the lease");
        report(2, grant).await.unwrap();
        bench.pause().await;
        assert!(matches!(waiting.take(), Some(Ok(_))));
    });
}

/// Regression: a client left, and joined again before the service looked at its Watch, which had said that it
/// was alone. Nothing seemed to have changed, so it was told only at the end of the wait, after seconds.
#[test]
fn a_watch_from_before_its_session_left_is_answered() {
    with_two_clients(async |bench| {
        bench.asker().join(FIRST).await.unwrap();
        let watch = |alone| {
            let (clients, seen) = (bench.clients.clone(), bench.asker().news(FIRST).again);
            let request =
                WatchRequest { generation: GENERATION, wait: true, alone, seen, ..WatchRequest::default() };
            bench.start(async move { clients.watch(FIRST, &request.encode_to_vec()).await })
        };
        let before = watch(true);
        bench.pause().await;
        assert!(before.borrow().is_none(), "it is alone, as it says");
        bench.leave(FIRST).await;
        bench.asker().join(FIRST).await.unwrap();
        bench.pause().await;
        let is_alone = |reply: Option<Result<Vec<u8>, Failure>>| {
            WatchReply::decode(&*reply.expect("an answer").unwrap()).unwrap().alone
        };
        assert!(!is_alone(before.take()), "what it said was about the time before");
        let after = watch(false);
        bench.pause().await;
        assert!(is_alone(after.take()));
    });
}

/// Regression: a change of size that was done stayed noted if its session was the only one by then, and later
/// changes of others ignored its lease.
#[test]
fn a_change_of_size_that_is_done_is_forgotten() {
    with_two_clients(async |bench| {
        bench.join_both().await;
        bench.grant(FIRST, false).await.unwrap();
        bench.grant(SECOND, false).await.unwrap();
        let request = SetAttrRequest { ino: INO.ino.0, size: Some(5), ..Default::default() }.encode_to_vec();
        let resize = |session| bench.clients.may_resize(session, INO.branch, &request);
        assert!(resize(FIRST).unwrap_err().is_ask_again());
        bench.clients.end_session(SECOND).unwrap();
        drop(resize(FIRST).unwrap());
        assert!(!bench.clients.leases.borrow().is_anything_noted());
        bench.clients.begin_session(key_of(3), local(3), &mut WriteSet::new());
        let asker = bench.asker();
        let joining = bench.start(async move { asker.join(3).await });
        bench.pause().await;
        bench.answer_all(FIRST).await;
        bench.pause().await;
        assert_eq!(joining.take(), Some(Ok(())));
        bench.grant(FIRST, false).await.unwrap();
        assert!(resize(3).is_err(), "the first one has a lease and has answered nothing");
    });
}

/// Regression: a lease for which a session waited was granted to it after it had ended for its client.
#[test]
fn a_session_that_has_ended_for_its_client_gets_no_lease() {
    with_two_clients(async |bench| {
        bench.join_both().await;
        let clients = &bench.clients;
        clients.begin_session(key_of(3), local(3), &mut WriteSet::new());
        clients.join(3).unwrap();
        let body = LeaseRequest { ino: 7, exclusive: true, first: 0, last: u64::MAX }.encode_to_vec();
        let ask = |of| LeaseReply::decode(&clients.grant(of, INO.branch, &body).unwrap()[..]).unwrap();
        let own = ask(FIRST).grant;
        assert!(ask(SECOND).wait);
        let write = clients.begin(&Header { session: SECOND, ..Header::request(Kind::Write) }).unwrap();
        clients.bar_session(SECOND).unwrap();
        assert!(clients.begin_to_leave(SECOND) && ask(3).wait);
        let released = vec![ReleasedLease { ino: 7, grant: own, branch: 0, attributes: false }];
        let release = WatchRequest { generation: GENERATION, released, ..Default::default() };
        clients.watch(FIRST, &release.encode_to_vec()).await.unwrap();
        assert!(!bench.asker().news(3).granted.is_empty());
        drop(write);
    });
}

/// Regression: the reply to a Watch with all calls was longer than a message may be.
#[test]
fn calls_and_news_come_in_parts() {
    const CALLS: u64 = 10_000;
    recovered_after_a_restart(&[FIRST, SECOND], async |bench| {
        let clients = &bench.clients;
        clients.join(SECOND).unwrap();
        for ticket in 1..=CALLS {
            let body = GetAttrRequest { ino: 100 + ticket, ticket, lease: false }.encode_to_vec();
            assert!(clients.sync_elsewhere(SECOND, Branch::MAIN, &body).unwrap().is_some());
        }
        let watch =
            |seen| WatchRequest { generation: GENERATION, wait: true, seen, ..WatchRequest::default() };
        let (mut seen, mut calls, mut replies) = (0, Vec::new(), 0);
        while calls.len() as u64 <= CALLS {
            let reply = clients.watch(FIRST, &watch(seen).encode_to_vec()).await.unwrap();
            assert!(reply.len() < 1 << 18, "a reply of {} bytes", reply.len());
            let part = WatchReply::decode(&reply[..]).unwrap().calls;
            seen = part.last().unwrap().number;
            calls.extend(part);
            replies += 1;
        }
        assert!(replies == 3 && calls.is_sorted_by_key(|call| call.number), "{replies} replies");
        // The outcomes too.
        let answered = calls.iter().map(|call| call.number).collect();
        let answer = WatchRequest { answered, ..watch(0) };
        clients.watch(FIRST, &WatchRequest { wait: false, ..answer }.encode_to_vec()).await.unwrap();
        let (mut seen, mut told) = (0, 0);
        while told < CALLS {
            let reply = clients.watch(SECOND, &watch(seen).encode_to_vec()).await.unwrap();
            assert!(reply.len() < 1 << 18, "a reply of {} bytes", reply.len());
            let reply = WatchReply::decode(&reply[..]).unwrap();
            told += reply.synced.len() as u64;
            let calls = reply.calls.iter().map(|call| call.number);
            let last =
                reply.synced.iter().map(|synced| synced.number).chain(calls).chain([reply.again]).max();
            seen = last.unwrap();
        }
        assert_eq!(told, CALLS, "each once");
    });
}

/// Regression: a failure of one client was forgotten while the request waited for another one, which is slow.
#[test]
fn a_failed_sync_is_not_forgotten_while_another_is_waited_for() {
    const THIRD: u64 = 3;
    recovered_after_a_restart(&[FIRST, SECOND, THIRD], async |bench| {
        let clients = &bench.clients;
        let sync = |ino: u64| {
            let asker = bench.asker();
            bench.start(async move { asker.sync(SECOND, id(ino)).await })
        };
        clients.join(SECOND).unwrap();
        // The third one cannot sync any file, as on a full store. It answers each request at once.
        let fail = async || {
            let calls = bench.calls(THIRD).await;
            let syncs = calls.iter().filter(|call| call.is_sync).map(|call| call.number);
            for number in syncs.collect::<Vec<_>>() {
                let failed = vec![FailedSync { number, errno: 28 }];
                let answered = vec![number];
                let request =
                    WatchRequest { generation: GENERATION, failed, answered, ..WatchRequest::default() };
                clients.watch(THIRD, &request.encode_to_vec()).await.unwrap();
            }
        };
        let all: Vec<_> = (0..1025).map(|ino| sync(100 + ino)).collect();
        bench.pause().await;
        fail().await;
        // The first one was slow.
        bench.answer_all(FIRST).await;
        bench.pause().await;
        let results: Vec<_> = all.iter().map(|one| one.take().unwrap() == Ok(28)).collect();
        let hidden = results.iter().filter(|failed| !**failed).count();
        assert_eq!(hidden, 0, "requests that succeeded although the third client failed");
    });
}

/// The same without a restart: the second session leaves and joins again inside the turn.
#[test]
fn a_lease_that_an_answer_needs_waits_for_no_session_that_joins_again() {
    with_two_clients(async |bench| {
        let second = bench.leave_while_waiting().await;
        // It answers the revocation of the file. Alone for a moment, it is asked to give up everything; for
        // that it needs a lease.
        bench.answer_all(FIRST).await;
        bench.pause().await;
        let first = bench.start_grant(FIRST);
        bench.env.sleep(Duration::from_secs(60)).await;
        assert!(first.borrow().is_some() || second.borrow().is_some(), "both wait for each other");
    });
}

/// Both sessions owe an answer after a restart; the first one's kernel drops its pages only after a request
/// that needs a lease (`Leaving::Called` says that).
#[test]
fn a_lease_that_an_answer_needs_waits_for_no_other_answer() {
    recovered_after_a_restart(&[FIRST, SECOND], async |bench| {
        let clients = &bench.clients;
        // The second client's request comes before its answer.
        clients.join(SECOND).unwrap();
        let second = bench.start_grant(SECOND);
        bench.pause().await;
        bench.answer_all(SECOND).await;
        // The first one needs the lease to give up everything.
        clients.join(FIRST).unwrap();
        let first = bench.start_grant(FIRST);
        bench.env.sleep(Duration::from_secs(60)).await;
        assert!(second.borrow().is_none());
        assert!(first.borrow().is_some(), "it owes an answer and waits behind who waits for the answer");
    });
}

/// Regression: a session that never took the news that a lock may be free got any number of them.
#[test]
fn a_session_that_takes_no_news_of_locks_gets_a_limited_number() {
    with_two_clients(async |bench| {
        bench.join_both().await;
        let lock = |ino, owner, change: LockChange| {
            let wait = change != LockChange::Unlock;
            let request =
                LockRequest { ino, owner, last: 9, change: change.into(), wait, ..LockRequest::default() };
            bench.clients.lock(FIRST, 0, &request)
        };
        const MOST: u64 = 1 << 16;
        for ino in 1..=MOST {
            lock(ino, 1, LockChange::Exclusive).unwrap();
            assert!(lock(ino, 2, LockChange::Exclusive).unwrap().conflict.is_some());
            if ino % 2 == 0 {
                lock(ino, 1, LockChange::Unlock).unwrap();
            }
        }
        assert!(lock(MOST + 1, 1, LockChange::Exclusive).unwrap().conflict.is_none());
        assert!(lock(MOST + 1, 2, LockChange::Exclusive).unwrap().conflict.is_some());
        lock(MOST + 1, 1, LockChange::Unlock).unwrap();
        let seen = |seen| WatchRequest { generation: GENERATION, seen, ..WatchRequest::default() };
        let has_room = || {
            bench.clients.leases.borrow().has_room_beside(FIRST, bench.clients.locks.borrow().waits_of(FIRST))
        };
        assert!(!has_room(), "it was not noted that it waits");
        let mut free = bench.asker().news(FIRST).unlocked;
        assert_eq!(free.len(), 4096, "the rest comes with the next");
        free.sort_by_key(|unlocked| unlocked.number);
        bench.clients.leases.borrow_mut().news(FIRST, &seen(free[4095].number));
        assert!(has_room(), "it has taken some news");
    });
}
