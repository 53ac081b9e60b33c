//! Requests: repeats, attributes that are out of date, and states that are forgotten.

use super::service::{Service, rest, run};
use penstock_base::{Branch, ErrorKind, FileId};
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::{LockChange, LockRequest, SetAttrRequest, Time};
use penstock_wire::{Kind, Object};

const FILE: FileId = FileId::of_numbers(0, 5);

#[test]
fn attributes_are_those_of_unsynced_writes() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.write(FILE, 200, b"x").await.unwrap();
        let attr = client.get_attr(FILE).await.unwrap();
        assert_eq!((attr.size, service.attr(FILE).size), (201, 100));
        assert!(attr.mtime > Time::default() && service.attr(FILE).mtime == Time::default());
        client.fsync(FILE).await.unwrap();
        assert_eq!(service.attr(FILE).size, 201);
        assert_eq!(service.attr(FILE).mtime, attr.mtime, "the time of the write");
        // A time that is set is not overtaken by a write before it.
        client.write(FILE, 0, b"y").await.unwrap();
        let set =
            SetAttrRequest { ino: FILE.ino.0, mtime: Some(Time::from_ns(77)), ..SetAttrRequest::default() };
        client.set_attr(Branch::MAIN, set).await.unwrap();
        client.fsync(FILE).await.unwrap();
        assert_eq!(service.attr(FILE).mtime, Time::from_ns(77));
    });
}

#[test]
fn a_target_with_a_start_of_its_own_is_refused() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.write(FILE, 0, b"x").await.unwrap();
        service.target_is_ahead.set(1);
        let refused = [
            client.write(FILE, 0, b"y").await.unwrap_err(),
            client.read(FILE, 0, 1).await.unwrap_err(),
            client.fsync(FILE).await.unwrap_err(),
            client.change_space(FILE, 0, 4096, SpaceChange::Punch, true).await.unwrap_err(),
        ];
        for failure in refused {
            assert_eq!(failure.message, "reply: from a target with a start of its own");
        }
        assert!(client.is_unsynced(FILE), "nothing counts as durable");
    });
}

#[test]
fn requests_about_a_file_name_its_branch() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        service.asked.take();
        let older = FileId::of_numbers(9, FILE.ino.0);
        let names = SetAttrRequest { ino: older.ino.0, mode: Some(0o100_600), ..SetAttrRequest::default() };
        // The service in memory has no branches, so the results mean nothing.
        client.open(older).await.unwrap();
        client.write(older, 0, &[2; 10]).await.unwrap();
        client.read(older, 0, 10).await.unwrap();
        client.set_attr(older.branch, names).await.unwrap();
        client.change_space(older, 0, 4096, SpaceChange::Reserve, true).await.unwrap();
        client.fsync(older).await.unwrap();
        client.seek(older, 0, true).await.unwrap();
        let lock =
            LockRequest { ino: older.ino.0, branch: older.branch.0, last: 9, ..LockRequest::default() };
        client.lock(&lock).await.unwrap();
        client.release(older).await.unwrap();
        let of_a_file = |kind: &Kind| kind.object() != Object::Session && *kind != Kind::Sync;
        let asked = service.asked.take();
        let asked: Vec<_> = asked.into_iter().filter(|(kind, _)| of_a_file(kind)).collect();
        for kind in [Kind::Open, Kind::Write, Kind::Read, Kind::Space, Kind::Commit, Kind::Seek, Kind::Close]
        {
            assert!(asked.iter().any(|(of, _)| *of == kind), "{kind:?}");
        }
        assert!(asked.iter().all(|(_, branch)| *branch == 9), "{asked:?}");
        let unsynced = [FILE, older].map(|file| client.is_unsynced(file));
        assert_eq!(unsynced, [false, false]);
        client.write(older, 0, b"x").await.unwrap();
        assert!(client.is_unsynced(older) && !client.is_unsynced(FILE), "states of two files");
    });
}

#[test]
fn states_are_forgotten_when_nothing_needs_them() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        let knows = || client.session.files().contains(FILE);
        client.read(FILE, 0, 10).await.unwrap();
        assert!(!knows(), "a read leaves nothing");
        client.open(FILE).await.unwrap();
        client.write(FILE, 0, b"x").await.unwrap();
        client.release(FILE).await.unwrap();
        assert!(knows(), "it is not synced");
        client.fsync(FILE).await.unwrap();
        assert!(!knows());
        assert_eq!(client.open_files(), []);
    });
}

#[test]
fn set_id_bits_fall_durably_before_a_write() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        service.change(FILE, |attr| attr.mode = 0o104_755);
        client.open(FILE).await.unwrap();
        service.take_log();
        let hold = client.hold(FILE, crate::Purpose::Write).await.unwrap();
        assert!(hold.drop_set_id().await.unwrap());
        assert_eq!(service.take_log(), [Kind::SetAttr, Kind::Sync]);
        assert!(!hold.drop_set_id().await.unwrap(), "there are none any more");
        assert_eq!(service.attr(FILE).mode, 0o100_755);
    });
}

#[test]
fn a_session_that_ended_fails_everything() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        service.fail(Kind::GetAttr, ErrorKind::Ended, 1);
        assert_eq!(client.get_attr(FILE).await.unwrap_err().kind, ErrorKind::Ended);
        assert!(client.has_ended());
        assert_eq!(client.read(FILE, 0, 1).await.unwrap_err().kind, ErrorKind::Ended);
        assert_eq!(client.write(FILE, 0, b"x").await.unwrap_err().errno, 116);
    });
}

#[test]
fn a_lock_that_the_service_refuses_to_release_is_kept() {
    run(async |service, client| {
        let lock = |change: LockChange| LockRequest {
            ino: FILE.ino.0,
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
        client.unlock_all(FILE, 3, true).await.unwrap();
        assert_eq!(held(), 2, "locks of flock are others");
        client.unlock_all(FILE, 3, false).await.unwrap();
        assert_eq!(held(), 0);
    });
}

#[test]
fn a_client_that_leaves_has_nothing_left_to_sync() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        client.write(FILE, 0, b"x").await.unwrap();
        client
            .lock(&LockRequest { ino: FILE.ino.0, owner: 3, last: 9, ..LockRequest::default() })
            .await
            .unwrap();
        client.close_all().await.unwrap();
        client.leave().await.unwrap();
        assert!(!client.is_alone() && !client.is_unsynced(FILE) && service.bytes(FILE)[0] == b'x');
        assert!(client.session.locks().all().is_empty());
        client.close().await.unwrap();
    });
}

/// The kernel asks for a directory after each name that it has removed.
#[test]
fn a_directory_is_known_from_the_reply_to_its_change_while_nobody_else_changes_it() {
    const DIR: FileId = FileId::of_numbers(0, 9);
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        service.add(DIR, &[]);
        let asked = |service: &Service| {
            service.asked.take().iter().filter(|(kind, _)| *kind == Kind::GetAttr).count()
        };
        let nlink = |nlink| service.change(DIR, |attr| attr.nlink = nlink);
        let found = async || client.get_attr(DIR).await.unwrap().nlink;
        service.become_alone();
        rest(client).await;
        service.asked.take();
        nlink(2);
        assert_eq!((found().await, asked(service)), (2, 1));
        client.unlink(DIR, b"name", false).await.unwrap();
        nlink(3);
        assert_eq!((found().await, found().await, asked(service)), (2, 2, 0), "the service is not asked");
        client.unlink(DIR, b"name", false).await.unwrap();
        assert_eq!((found().await, asked(service)), (3, 0));
        let times =
            SetAttrRequest { ino: DIR.ino.0, mtime: Some(Time::from_ns(7)), ..SetAttrRequest::default() };
        client.set_attr(Branch::MAIN, times).await.unwrap();
        assert_eq!((found().await, asked(service)), (3, 1), "its times were changed");
        client.unlink(DIR, b"name", false).await.unwrap();
        service.others_arrive();
        rest(client).await;
        nlink(4);
        asked(service);
        assert_eq!((found().await, asked(service)), (4, 1), "others may have changed it");
    });
}
