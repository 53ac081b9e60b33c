//! Restarts of the service: writes that may be lost are reported, once, and no others.

use super::service::{rest, run};
use penstock_base::env::timeout;
use penstock_base::{Branch, ErrorKind, FileId};
use penstock_wire::Kind;
use penstock_wire::metadata::{MakeRequest, RenameRequest, SetAttrRequest};
use std::time::Duration;

const FILE: FileId = FileId::of_numbers(0, 5);
const EIO: u16 = 5;

#[test]
fn an_fsync_reports_writes_that_a_restart_may_have_lost() {
    // The work before the restart, and the errors of two fsyncs after it.
    for (write, sync_file, sync, lost) in [
        (false, false, false, false),
        (true, false, false, true),
        // The size was sent and is not durable.
        (true, true, false, true),
        (true, true, true, false),
    ] {
        run(async |service, client| {
            service.add(FILE, &[1; 100]);
            client.open(FILE).await.unwrap();
            if write {
                client.write(FILE, 0, b"new").await.unwrap();
            }
            if sync_file {
                client.session.sync_file(FILE).await.unwrap();
            }
            if sync {
                client.fsync(FILE).await.unwrap();
            }
            service.restart();
            client.get_attr(FILE).await.unwrap();
            let errno = client.fsync(FILE).await.err().map(|failure| failure.errno);
            assert_eq!(errno, lost.then_some(EIO), "write {write}, sent {sync_file}, synced {sync}");
            assert!(client.fsync(FILE).await.is_ok(), "once");
        });
    }
}

#[test]
fn every_descriptor_reports_a_loss_once() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        let (first, second) = (client.reported(FILE), client.reported(FILE));
        client.write(FILE, 0, b"new").await.unwrap();
        service.restart();
        client.get_attr(FILE).await.unwrap();
        // A descriptor that is opened now reports a loss that nobody has.
        let third = client.reported(FILE);
        for descriptor in [&first, &second, &third] {
            assert_eq!(client.fsync_through(FILE, descriptor).await.unwrap_err().errno, EIO);
            client.fsync_through(FILE, descriptor).await.unwrap();
        }
        let fourth = client.reported(FILE);
        client.fsync_through(FILE, &fourth).await.unwrap();
        assert!(client.tell_lost(FILE, &fourth).is_ok());
    });
}

#[test]
fn a_close_reports_a_loss_and_leaves_it_to_others() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        client.open(FILE).await.unwrap();
        let descriptor = client.reported(FILE);
        client.write(FILE, 0, b"new").await.unwrap();
        service.restart();
        client.get_attr(FILE).await.unwrap();
        assert_eq!(client.tell_lost(FILE, &descriptor).unwrap_err().errno, EIO);
        client.release(FILE).await.unwrap();
        assert_eq!(
            client.tell_lost(FILE, &descriptor).unwrap_err().errno,
            EIO,
            "the other handle reports it too"
        );
        client.release(FILE).await.unwrap();
        assert!(client.fsync(FILE).await.is_ok(), "the last close was told");
    });
}

#[test]
fn names_that_a_restart_may_have_lost_are_reported_once() {
    run(async |service, client| {
        service.add(FILE, &[]);
        let mode = SetAttrRequest { ino: FILE.ino.0, mode: Some(0o100_600), ..SetAttrRequest::default() };
        client.set_attr(Branch::MAIN, mode.clone()).await.unwrap();
        client.sync().await.unwrap();
        service.restart();
        client.get_attr(FILE).await.unwrap();
        client.sync().await.unwrap();
        client.set_attr(Branch::MAIN, mode).await.unwrap();
        service.restart();
        client.get_attr(FILE).await.unwrap();
        assert_eq!(client.sync().await.unwrap_err().errno, EIO);
        client.sync().await.unwrap();
        // A sync that fails leaves the change to be synced, and then to be lost.
        client.make(Branch::MAIN, MakeRequest::default()).await.unwrap();
        service.fail(Kind::Sync, ErrorKind::Internal, 1);
        assert!(client.sync().await.is_err());
        service.restart();
        client.get_attr(FILE).await.unwrap();
        assert_eq!(client.sync().await.unwrap_err().errno, EIO);
    });
}

#[test]
fn a_write_during_a_restart_is_repeated_under_one_start() {
    for after in 0..4 {
        run(async |service, client| {
            service.add(FILE, &[1; 100]);
            // The first data requests of the new start do not know what the old one acknowledged.
            service.restart_in.set(Some(after));
            client.write(FILE, 9_000, b"new").await.unwrap();
            client.write(FILE, 20_000, b"more").await.unwrap();
            let synced = client.fsync(FILE).await;
            let bytes = service.bytes(FILE);
            let has = |at: usize, part: &[u8]| bytes.get(at..at + part.len()) == Some(part);
            assert!(
                synced.is_err() || has(9_000, b"new") && has(20_000, b"more"),
                "after {after}: {synced:?}"
            );
        });
    }
}

#[test]
fn a_rename_waits_for_the_data_and_refuses_a_lost_file() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        client.write(FILE, 0, b"new").await.unwrap();
        let rename = || RenameRequest { dir: 1, new_dir: 1, name: b"a".to_vec(), ..RenameRequest::default() };
        client.rename(Branch::MAIN, rename()).await.unwrap();
        assert!(service.take_log().contains(&Kind::Rename));
        // A start that ends during the rename makes it begin again.
        service.fail(Kind::Rename, ErrorKind::RefreshMap, 2);
        client.rename(Branch::MAIN, rename()).await.unwrap();
        service.fail(Kind::Rename, ErrorKind::RefreshMap, 1000);
        assert_eq!(client.rename(Branch::MAIN, rename()).await.unwrap_err().errno, EIO);
    });
}

/// A page that was written back while the service did not answer is lost, and what was written besides is
/// not. Regression: the size of an append was never sent, and the next fsync succeeded without it.
#[test]
fn a_lost_page_takes_nothing_else_with_it() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        client.write(FILE, 100, b"appended").await.unwrap();
        client.note_lost_page(FILE);
        assert_eq!(client.fsync(FILE).await.unwrap_err().errno, EIO, "the page");
        client.fsync(FILE).await.unwrap();
        assert_eq!(service.attr(FILE).size, 108);
        assert_eq!(service.bytes(FILE)[100..], *b"appended");
    });
}

/// A restart loses the removal of a file's name as well as what was written to it. Regression: the client had
/// forgotten the file, so no fsync and no rename heard of the loss.
#[test]
fn a_file_whose_removal_is_lost_tells_what_else_is() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.write(FILE, 0, b"new").await.unwrap();
        client.unlink(FileId::of_numbers(0, 1), b"a", false).await.unwrap();
        service.restart();
        client.stat_fs().await.unwrap();
        assert_eq!(client.session.refuse_lost(FILE).unwrap_err().errno, EIO, "a rename of the file");
        client.open(FILE).await.unwrap();
        assert_eq!(client.fsync(FILE).await.unwrap_err().errno, EIO);
    });
}

#[test]
fn the_periodic_sync_makes_writes_durable_and_reports_nothing() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        client.write(FILE, 0, b"new").await.unwrap();
        for _ in 0..60 {
            rest(client).await;
        }
        assert!(!client.is_unsynced(FILE) && service.bytes(FILE).starts_with(b"new"));
        client.write(FILE, 0, b"two").await.unwrap();
        service.restart();
        for _ in 0..60 {
            rest(client).await;
        }
        assert_eq!(client.fsync(FILE).await.unwrap_err().errno, EIO, "the loss is still to be reported");
    });
}

/// A `Sync` request covers what was sent before it. The size and time of a file are sent again while it is in
/// flight, and a restart loses that, unless another client has the file by then.
#[test]
fn a_change_sent_during_a_sync_is_not_counted_as_durable() {
    for wanted_by_another in [false, true] {
        run(async |service, client| {
            service.add(FILE, &[1; 100]);
            client.open(FILE).await.unwrap();
            if wanted_by_another {
                service.others_arrive();
                rest(client).await;
            }
            client.append(FILE, b"first").await.unwrap();
            client.session.sync_file(FILE).await.unwrap();
            // A program syncs a directory, or another file.
            service.sync_reply.set(Duration::from_secs(1));
            let other = client.clone();
            let syncing = async move { other.sync().await.unwrap() };
            client.session.env().spawn("sync", Box::pin(syncing));
            rest(client).await;
            client.append(FILE, b"second").await.unwrap();
            match wanted_by_another {
                true => _ = service.call(FILE.ino.0),
                false => client.session.sync_file(FILE).await.unwrap(),
            }
            rest(client).await;
            assert_eq!(service.attr(FILE).size, 111, "the size was sent, after the `Sync` request");
            client.session.env().sleep(Duration::from_secs(2)).await;
            service.restart();
            client.get_attr(FILE).await.unwrap();
            let errno = client.fsync(FILE).await.err().map(|failure| failure.errno);
            // Another client gets the file only once it is durable.
            let wanted = (!wanted_by_another).then_some(EIO);
            assert_eq!(errno, wanted, "by another: {wanted_by_another}");
        });
    }
}

/// A client that leaves says that everything is durable after it.
#[test]
fn a_sync_reports_a_loss_that_its_own_request_meets() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        client.append(FILE, b"second").await.unwrap();
        service.restarts_at_sync.set(true);
        let failure = client.sync_all().await.expect_err("the service was started again before the answer");
        assert_eq!(failure.errno, EIO);
    });
}

/// Regression: a change that the request of a sync covered was never durable again if its caller went away.
#[test]
fn a_sync_that_was_given_up_leaves_its_files_to_the_next() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        client.append(FILE, b"second").await.unwrap();
        client.session.sync_file(FILE).await.unwrap();
        service.sync_reply.set(Duration::from_secs(1));
        let env = client.session.env().clone();
        assert!(timeout(&env, Duration::from_millis(500), client.sync()).await.is_none());
        service.sync_reply.set(Duration::ZERO);
        client.fsync(FILE).await.unwrap();
        service.restart();
        client.get_attr(FILE).await.unwrap();
        client.fsync(FILE).await.expect("it was durable");
    });
}
