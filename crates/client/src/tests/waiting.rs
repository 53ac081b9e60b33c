//! Requests that the service answers with "wait", and the news that end the wait.

use super::service::{Service, rest, run};
use crate::{Client, Purpose};
use penstock_base::FileId;
use penstock_wire::metadata::SetAttrRequest;
use penstock_wire::{Failure, Kind};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const FILE: FileId = FileId::of_numbers(0, 5);

type Outcome<T> = Rc<RefCell<Option<Result<T, Failure>>>>;

/// Starts an operation of a client and returns the place of its outcome.
fn start<T: 'static>(
    client: &Rc<Client>,
    act: impl AsyncFnOnce(&Client) -> Result<T, Failure> + 'static,
) -> Outcome<T> {
    let (outcome, of) = (Outcome::default(), client.clone());
    let place = outcome.clone();
    let task = async move { *place.borrow_mut() = Some(act(&of).await) };
    client.session.env().spawn("test", Box::pin(task));
    outcome
}

/// A client among others, with a file of ten bytes.
async fn share(service: &Service, client: &Client) {
    service.add(FILE, &[1; 10]);
    client.open(FILE).await.unwrap();
    service.others_arrive();
    rest(client).await;
    assert!(!client.is_alone());
}

#[test]
fn a_lease_comes_in_the_news() {
    // True if the news arrive before the reply that says to wait.
    for overtakes in [false, true] {
        run(async |service, client| {
            share(service, client).await;
            service.holds_leases.set(true);
            if overtakes {
                service.lease_reply.set(Duration::from_secs(1));
            }
            let write = start(client, async |client| client.write(FILE, 0, b"new").await);
            rest(client).await;
            assert!(write.borrow().is_none(), "{overtakes}: it waits");
            service.grant(FILE, true);
            client.session.env().sleep(Duration::from_secs(2)).await;
            assert!(write.take().unwrap().is_ok(), "{overtakes}");
            assert!(client.owns(FILE).is_some());
            // The grant is used, and was asked for once.
            client.write(FILE, 0, b"again").await.unwrap();
            let asked = service.asked.borrow().iter().filter(|(kind, _)| *kind == Kind::Lease).count();
            assert_eq!(asked, 1, "{overtakes}");
        });
    }
}

#[test]
fn a_lease_that_is_called_in_the_same_news_goes_back() {
    run(async |service, client| {
        share(service, client).await;
        service.holds_leases.set(true);
        let hold = start(client, async |client| client.hold(FILE, Purpose::Write).await.map(drop));
        rest(client).await;
        service.grant(FILE, true);
        let call = service.call(FILE.ino.0);
        rest(client).await;
        assert!(service.answered.borrow().contains(&(call, true)));
        // The operation may have been admitted in between, or waits for the next grant.
        service.grant(FILE, true);
        rest(client).await;
        assert!(hold.take().unwrap().is_ok());
    });
}

#[test]
fn an_older_grant_changes_no_newer_one() {
    run(async |service, client| {
        share(service, client).await;
        service.next_grant.set(50);
        client.write(FILE, 0, b"new").await.unwrap();
        let owned = client.owns(FILE);
        assert!(format!("{owned:?}").contains("50"), "{owned:?}");
        // The news of an earlier grant come after the reply with this one.
        service.next_grant.set(20);
        assert_eq!(service.grant(FILE, false), 20);
        rest(client).await;
        assert_eq!(client.owns(FILE), owned);
    });
}

#[test]
fn a_restart_or_the_end_of_the_session_ends_every_wait() {
    for ends in [false, true] {
        run(async |service, client| {
            share(service, client).await;
            service.holds_leases.set(true);
            service.must_sync.set(true);
            let lease = start(client, async |client| client.write(FILE, 0, b"new").await);
            let attr = start(client, async |client| client.get_attr(FILE).await.map(drop));
            rest(client).await;
            service.again_for.set(Some(Kind::StatFs));
            let refused = start(client, async |client| client.stat_fs().await.map(drop));
            rest(client).await;
            assert!([&lease, &attr, &refused].iter().all(|one| one.borrow().is_none()));
            service.holds_leases.set(false);
            service.must_sync.set(false);
            service.again_for.set(None);
            match ends {
                true => service.fail(Kind::Watch, penstock_base::ErrorKind::Ended, 1),
                false => service.restart(),
            }
            client.session.env().sleep(Duration::from_secs(1)).await;
            for one in [lease, attr, refused] {
                let outcome = one.take().expect("nobody waits for news of another start");
                assert_eq!(outcome.is_err(), ends, "{outcome:?}");
            }
        });
    }
}

#[test]
fn attributes_are_asked_for_again_once_others_have_synced() {
    for errno in [0, 28] {
        run(async |service, client| {
            share(service, client).await;
            service.must_sync.set(true);
            let attr = start(client, async |client| client.get_attr(FILE).await);
            rest(client).await;
            assert!(attr.borrow().is_none());
            service.change(FILE, |attr| attr.size = 300);
            service.synced(1..=9, errno);
            rest(client).await;
            let attr = attr.take().unwrap();
            match errno {
                0 => assert_eq!(attr.unwrap().size, 300),
                _ => assert_eq!(attr.unwrap_err().errno, 28),
            }
        });
    }
}

#[test]
fn a_request_that_was_refused_is_sent_again_and_only_then() {
    run(async |service, client| {
        share(service, client).await;
        service.again_for.set(Some(Kind::SetAttr));
        let resize = start(client, async |client| {
            let request = SetAttrRequest { ino: FILE.ino.0, size: Some(3), ..SetAttrRequest::default() };
            client.set_attr(FILE.branch, request).await.map(|attr| attr.size)
        });
        client.session.env().sleep(Duration::from_secs(5)).await;
        let sent = || service.asked.borrow().iter().filter(|(kind, _)| *kind == Kind::SetAttr).count();
        assert!(resize.borrow().is_none());
        assert_eq!(sent(), 1);
        service.again();
        rest(client).await;
        assert_eq!((resize.take().unwrap().unwrap(), sent()), (3, 2));
        assert_eq!(*service.resigned.borrow(), []);
    });
}

#[test]
fn a_change_of_size_that_is_given_up_is_taken_back() {
    run(async |service, client| {
        share(service, client).await;
        service.again_for.set(Some(Kind::SetAttr));
        let request = SetAttrRequest { ino: FILE.ino.0, size: Some(3), ..SetAttrRequest::default() };
        let given_up = penstock_base::env::timeout(
            client.session.env(),
            Duration::from_secs(1),
            client.set_attr(FILE.branch, request),
        );
        assert!(given_up.await.is_none());
        service.again();
        rest(client).await;
        assert_eq!(*service.resigned.borrow(), [FILE.ino.0]);
    });
}
