//! Requests: repeats, attributes that are out of date, and states that are forgotten.

use super::service::run;
use penstock_base::{ErrorKind, Ino};
use penstock_wire::Kind;
use penstock_wire::metadata::{LockChange, LockRequest, SetAttrRequest, Time};

const INO: Ino = Ino(5);

#[test]
fn attributes_are_those_of_unsynced_writes() {
    run(async |service, client| {
        service.add(INO, &[1; 100]);
        client.write(INO, 200, b"x").await.unwrap();
        let attr = client.get_attr(INO).await.unwrap();
        assert_eq!((attr.size, service.attr(INO).size), (201, 100));
        assert!(attr.mtime > Time::default() && service.attr(INO).mtime == Time::default());
        client.fsync(INO).await.unwrap();
        assert_eq!(service.attr(INO).size, 201);
        assert_eq!(service.attr(INO).mtime, attr.mtime, "the time of the write");
        // A time that is set is not overtaken by a write before it.
        client.write(INO, 0, b"y").await.unwrap();
        let set = SetAttrRequest { ino: INO.0, mtime: Some(Time::from_ns(77)), ..SetAttrRequest::default() };
        client.set_attr(set).await.unwrap();
        client.fsync(INO).await.unwrap();
        assert_eq!(service.attr(INO).mtime, Time::from_ns(77));
    });
}

#[test]
fn states_are_forgotten_when_nothing_needs_them() {
    run(async |service, client| {
        service.add(INO, &[1; 100]);
        let knows = || client.session.files().contains(INO);
        client.read(INO, 0, 10).await.unwrap();
        assert!(!knows(), "a read leaves nothing");
        client.open(INO).await.unwrap();
        client.write(INO, 0, b"x").await.unwrap();
        client.release(INO).await.unwrap();
        assert!(knows(), "it is not synced");
        client.fsync(INO).await.unwrap();
        assert!(!knows());
        assert_eq!(client.open_files(), []);
    });
}

#[test]
fn set_id_bits_fall_durably_before_a_write() {
    run(async |service, client| {
        service.add(INO, &[1; 100]);
        service.change(INO, |attr| attr.mode = 0o104_755);
        client.open(INO).await.unwrap();
        service.take_log();
        let hold = client.hold(INO, crate::Purpose::Write).await.unwrap();
        assert!(hold.drop_set_id().await.unwrap());
        assert_eq!(service.take_log(), [Kind::SetAttr, Kind::Sync]);
        assert!(!hold.drop_set_id().await.unwrap(), "there are none any more");
        assert_eq!(service.attr(INO).mode, 0o100_755);
    });
}

#[test]
fn a_session_that_ended_fails_everything() {
    run(async |service, client| {
        service.add(INO, &[1; 100]);
        service.fail(Kind::GetAttr, ErrorKind::Ended, 1);
        assert_eq!(client.get_attr(INO).await.unwrap_err().kind, ErrorKind::Ended);
        assert!(client.has_ended());
        assert_eq!(client.read(INO, 0, 1).await.unwrap_err().kind, ErrorKind::Ended);
        assert_eq!(client.write(INO, 0, b"x").await.unwrap_err().errno, 116);
    });
}

#[test]
fn a_lock_that_the_service_refuses_to_release_is_kept() {
    run(async |service, client| {
        let lock = |change: LockChange| LockRequest {
            ino: INO.0,
            owner: 3,
            first: 0,
            last: 99,
            change: change.into(),
            ..LockRequest::default()
        };
        let held = || client.session.locks().all().len();
        assert_eq!(client.lock(&lock(LockChange::Exclusive)).await.unwrap(), None);
        assert_eq!(held(), 1);
        let test = LockRequest { test: true, owner: 4, ..lock(LockChange::Exclusive) };
        client.lock(&test).await.unwrap();
        assert_eq!(held(), 1, "a test takes nothing");
        service.fail(Kind::Lock, ErrorKind::NoSpace, 1);
        let part = LockRequest { first: 10, last: 19, ..lock(LockChange::Unlock) };
        assert!(client.lock(&part).await.is_err());
        assert_eq!(held(), 1, "it is whole again");
        client.lock(&part).await.unwrap();
        assert_eq!(held(), 2, "both parts beside it are left");
        client.unlock_all(INO, 3, true).await.unwrap();
        assert_eq!(held(), 2, "locks of flock are others");
        client.unlock_all(INO, 3, false).await.unwrap();
        assert_eq!(held(), 0);
    });
}

#[test]
fn a_client_that_leaves_has_nothing_left_to_sync() {
    run(async |service, client| {
        service.add(INO, &[1; 100]);
        client.open(INO).await.unwrap();
        client.write(INO, 0, b"x").await.unwrap();
        client.lock(&LockRequest { ino: INO.0, owner: 3, last: 9, ..LockRequest::default() }).await.unwrap();
        client.close_all().await.unwrap();
        client.leave().await.unwrap();
        assert!(!client.is_alone() && !client.is_unsynced(INO) && service.bytes(INO)[0] == b'x');
        assert!(client.session.locks().all().is_empty());
        client.close().await.unwrap();
    });
}
