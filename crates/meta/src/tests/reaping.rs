//! Reaping of removed files.

use super::bed::{Bed, FILE, errno, run, run_with};
use super::memory::CHUNK_BLOCKS;
use crate::rows::inode_key;
use crate::{ChunkStore, MetaError, ROOT, STEP_CHUNKS, ops};
use penstock_base::{Id128, Ino, Quiet};
use penstock_kv::{KvError, KvRead};
use penstock_session::Request;
use penstock_session::rows::all_results;
use penstock_wire::metadata::{HelloReply, HelloRequest, MakeRequest, OpenCount, PingRequest, XattrRequest};
use penstock_wire::{Frame, Header, Kind};
use prost::Message;
use rustix::io::Errno;
use std::time::Duration;

async fn is_gone(bed: &Bed, ino: Ino) -> bool {
    let gone = errno(bed.inode(ino).await) == Some(Errno::STALE);
    assert!(!gone || bed.chunks.blocks(ino).is_empty(), "no chunk outlives inode {ino}");
    gone
}

async fn file(bed: &Bed, name: &str, chunks: u64) -> Ino {
    let ino = bed.add(name).await.unwrap();
    for chunk in 0..chunks {
        bed.chunks.write(ino, chunk * u64::from(CHUNK_BLOCKS)).await;
    }
    ino
}

#[test]
fn a_removed_file_goes_with_its_last_user() {
    // Uses by a session's opens and by running changes, and the order in which they end.
    for (opens, changes, opens_first) in
        [(0, 0, true), (1, 0, true), (2, 0, true), (0, 2, true), (1, 1, true), (1, 1, false)]
    {
        run(async |bed| {
            let ino = file(bed, "f", 2).await;
            let mut running = Vec::new();
            for _ in 0..opens {
                bed.meta.parts.open(bed.who.session, ino).unwrap();
            }
            for _ in 0..changes {
                running.push(bed.meta.change_contents(penstock_base::TargetId(0), ino).await.unwrap());
            }
            bed.remove("f").await.unwrap();
            let close = async || {
                for _ in 0..opens {
                    assert!(!is_gone(bed, ino).await);
                    bed.meta.parts.close(bed.who.session, ino);
                    bed.world.env().sleep(Duration::from_secs(5)).await;
                }
            };
            if opens_first {
                close().await;
            }
            while let Some(change) = running.pop() {
                assert!(!is_gone(bed, ino).await);
                drop(change);
                bed.world.env().sleep(Duration::from_secs(5)).await;
            }
            if !opens_first {
                close().await;
            }
            bed.meta.wait_reaped().await;
            assert!(is_gone(bed, ino).await, "{opens} opens, {changes} changes");
            bed.check("reaping");
            let late = bed.meta.change_contents(penstock_base::TargetId(0), ino).await.map(drop);
            assert_eq!(errno(late), Some(Errno::STALE), "a late write finds no file");
        });
    }
}

#[test]
fn contents_belong_to_regular_files() {
    run(async |bed| {
        let dir = bed.add("d/").await.unwrap();
        assert!(matches!(
            bed.meta.change_contents(penstock_base::TargetId(0), dir).await,
            Err(MetaError::Request(_))
        ));
    });
}

#[test]
fn a_large_file_is_dropped_in_steps_and_a_failure_is_retried() {
    let chunks = 2 * STEP_CHUNKS as u64 + 3;
    for failure in 0..6 {
        run(async |bed| {
            let ino = file(bed, "f", chunks).await;
            bed.remove("f").await.unwrap();
            bed.kv.fail_after(failure);
            bed.world.env().sleep(Duration::from_secs(1)).await;
            // Steps, the extended attributes, and the inode: the first failure stops it, and a crash too.
            assert_eq!(is_gone(bed, ino).await, failure >= 3, "failure {failure}");
            bed.check("a failure");
            bed.kv.fail_after(u64::MAX);
            bed.meta.wait_reaped().await;
            assert!(is_gone(bed, ino).await);
            let steps = bed.chunks.truncations.borrow().len();
            assert_eq!(steps, 3, "two steps and the end");
        });
    }
}

#[test]
fn a_crash_leaks_no_removed_file() {
    run(async |bed| {
        let open = file(bed, "open", 1).await;
        let closed = file(bed, "closed", 1).await;
        bed.meta.parts.open(bed.who.session, open).unwrap();
        // The reaper cannot write any more, so that the queue is what the crash leaves.
        bed.meta.sync().await.unwrap();
        bed.remove("open").await.unwrap();
        bed.remove("closed").await.unwrap();
        bed.kv.fail_after(0);
        bed.world.env().sleep(Duration::from_secs(1)).await;
        assert!(bed.meta.sync().await.is_ok(), "a flush needs no transaction");
        bed.crash().await;
        bed.meta.wait_reaped().await;
        for ino in [open, closed] {
            assert!(is_gone(bed, ino).await, "inode {ino}");
        }
        assert_eq!(bed.diagnose().removed, 0);
        bed.check("the crash");
    });
}

#[test]
fn a_damaged_file_waits_for_a_repair_and_holds_up_no_other_one() {
    run(async |bed| {
        let (damaged, other) = (file(bed, "damaged", 1).await, file(bed, "other", 1).await);
        bed.chunks.damaged.set(Some(damaged));
        bed.remove("damaged").await.unwrap();
        bed.world.env().sleep(Duration::from_secs(1)).await;
        bed.remove("other").await.unwrap();
        bed.meta.wait_reaped().await;
        assert!(is_gone(bed, other).await && !is_gone(bed, damaged).await);
        bed.chunks.damaged.set(None);
        bed.world.env().sleep(Duration::from_secs(1000)).await;
        assert!(is_gone(bed, damaged).await, "it is tried again");
        bed.check("the second attempt");
    });
}

#[test]
fn a_full_store_takes_the_removal() {
    run_with(1, 200_000, async |bed| {
        let ino = file(bed, "f", 2).await;
        let holder = bed.add("y").await.unwrap();
        let full = loop {
            let name = format!("user.{}", bed.kv.rows().len()).into_bytes();
            let request = XattrRequest { ino: holder.0, name, value: vec![1; 1000], ..Default::default() };
            if let Err(error) = ops::set_xattr(&bed.meta.parts, bed.who, request).await {
                break error;
            }
        };
        assert!(matches!(full, MetaError::Kv(KvError::NoSpace { .. })), "{full}");
        while bed.add(&format!("{:0>250}", bed.kv.rows().len())).await.is_ok() {}
        assert!(bed.add(&"z".repeat(250)).await.is_err());
        bed.remove("f").await.unwrap();
        bed.meta.wait_reaped().await;
        assert!(is_gone(bed, ino).await);
        bed.remove("y").await.unwrap();
        bed.meta.wait_reaped().await;
        bed.add("after").await.unwrap();
        bed.check("the removal");
    });
}

/// A removed file whose deletion waits at the gate, until the guard is dropped: its attributes go first.
async fn being_reaped(bed: &Bed) -> (Ino, Quiet<'_>) {
    let ino = file(bed, "f", 1).await;
    let request = XattrRequest { ino: ino.0, name: "user.a".into(), value: vec![1], ..Default::default() };
    ops::set_xattr(&bed.meta.parts, bed.who, request).await.unwrap();
    bed.meta.parts.open(bed.who.session, ino).unwrap();
    bed.remove("f").await.unwrap();
    let quiet = bed.meta.parts.names.gate().quiesce().await;
    bed.meta.parts.close(bed.who.session, ino);
    bed.world.env().sleep(Duration::from_millis(100)).await;
    (ino, quiet)
}

/// Reports how often the client has an inode open, as after a restart.
async fn report_opens(bed: &Bed, ino: Ino, counts: &[u32]) {
    let opens =
        counts.iter().map(|count| OpenCount { ino: ino.0, count: *count, branch: 0, user: 0 }).collect();
    let ping = PingRequest { opens, start: bed.chunks.generation(), ..PingRequest::default() };
    let header = Header { session: bed.who.session, ..Frame::request(Kind::Ping, vec![], vec![]).header };
    bed.meta.serve(&header, &ping.encode_to_vec()).await.unwrap();
}

/// Regression: an open during the last waits of the reaper stopped the process.
#[test]
fn a_file_that_is_being_reaped_cannot_be_opened() {
    run(async |bed| {
        let (ino, quiet) = being_reaped(bed).await;
        assert_eq!(errno(bed.meta.parts.open(bed.who.session, ino)), Some(Errno::STALE));
        assert_eq!(
            errno(bed.meta.change_contents(penstock_base::TargetId(0), ino).await.map(drop)),
            Some(Errno::STALE)
        );
        // A client that says that it has the file open does not keep it either.
        report_opens(bed, ino, &[3]).await;
        drop(quiet);
        bed.meta.wait_reaped().await;
        assert!(is_gone(bed, ino).await);
        // Nothing ends that did not begin.
        bed.meta.parts.close(bed.who.session, ino);
        bed.meta.end_session(bed.who.session).await.unwrap();
        bed.check("reaping");
    });
}

/// Regression: a client that named an inode twice in one report of its open files, while the inode was being
/// deleted, stopped the process.
#[test]
fn a_file_that_is_being_reaped_can_be_reported_twice() {
    for counts in [[3, 5], [3, 1], [3, 0], [3, 3]] {
        run(async |bed| {
            let (ino, quiet) = being_reaped(bed).await;
            report_opens(bed, ino, &counts).await;
            drop(quiet);
            bed.meta.wait_reaped().await;
            assert!(is_gone(bed, ino).await);
            bed.meta.end_session(bed.who.session).await.unwrap();
            bed.check("reaping");
        });
    }
}

/// Regression: a file that waited for a repair was in the queue twice, and a check after the repair waited
/// for the second time.
#[test]
fn nobody_waits_for_a_file_after_the_repair_that_lets_it_go() {
    run(async |bed| {
        let ino = file(bed, "f", 1).await;
        bed.chunks.damaged.set(Some(ino));
        bed.remove("f").await.unwrap();
        let env = bed.world.env();
        env.sleep(Duration::from_secs(1)).await;
        bed.chunks.damaged.set(None);
        // As at the end of a repair.
        crate::reaper::queue_removed(&bed.meta.parts).await.unwrap();
        bed.meta.parts.wake_reaper();
        env.sleep(Duration::from_secs(1)).await;
        assert!(is_gone(bed, ino).await);
        let before = env.now();
        bed.meta.wait_reaped().await;
        assert!(env.now() - before < Duration::from_secs(1), "nothing is left to wait for");
    });
}

#[test]
fn a_queued_file_that_is_in_use_stays() {
    run(async |bed| {
        let ino = file(bed, "f", 1).await;
        bed.meta.parts.open(bed.who.session, ino).unwrap();
        bed.remove("f").await.unwrap();
        // As after a repair.
        crate::reaper::queue_removed(&bed.meta.parts).await.unwrap();
        bed.meta.parts.wake_reaper();
        bed.meta.wait_reaped().await;
        assert!(!is_gone(bed, ino).await);
        bed.meta.parts.close(bed.who.session, ino);
        bed.meta.wait_reaped().await;
        assert!(is_gone(bed, ino).await);
    });
}

/// Between two attempts at a deletion the file is half there.
#[test]
fn nothing_opens_a_file_of_which_half_is_gone() {
    run(async |bed| {
        let ino = file(bed, "f", 2 * STEP_CHUNKS as u64 + 3).await;
        let before = bed.chunks.blocks(ino).len();
        bed.remove("f").await.unwrap();
        bed.kv.fail_after(1);
        bed.world.env().sleep(Duration::from_secs(1)).await;
        assert!(!is_gone(bed, ino).await);
        assert!(bed.chunks.blocks(ino).len() < before, "a step is done");
        bed.kv.fail_after(u64::MAX);
        assert_eq!(errno(bed.meta.parts.open(bed.who.session, ino)), Some(Errno::STALE));
        bed.meta.wait_reaped().await;
        assert!(is_gone(bed, ino).await);
        assert_eq!(
            errno(bed.meta.change_contents(penstock_base::TargetId(0), ino).await.map(drop)),
            Some(Errno::STALE)
        );
    });
}

/// The session ends while its request for a file without a name waits for its turn.
#[test]
fn a_file_without_a_name_of_a_session_that_has_ended_goes() {
    run(async |bed| {
        bed.meta.end_session(bed.who.session).await.unwrap();
        let request =
            MakeRequest { dir: ROOT.0, mode: FILE, nameless: true, open: true, ..Default::default() };
        let ino = bed.make(request).await.unwrap();
        bed.meta.wait_reaped().await;
        assert!(is_gone(bed, ino).await);
    });
}

#[test]
fn a_wrong_number_of_links_deletes_no_file() {
    run(async |bed| {
        let ino = file(bed, "f", 1).await;
        let mut inode = bed.inode(ino).await.unwrap();
        inode.nlink = 0;
        bed.put_row(inode_key(ino), Some(inode.encode())).await;
        bed.meta.sync().await.unwrap();
        bed.crash().await;
        bed.meta.parts.open(bed.who.session, ino).unwrap();
        bed.meta.parts.close(bed.who.session, ino);
        bed.meta.wait_reaped().await;
        assert!(!is_gone(bed, ino).await && !bed.chunks.blocks(ino).is_empty());
    });
}

/// A second attempt that fails before its first step forgets that the first one left a part.
#[test]
fn nothing_opens_a_file_of_which_half_is_gone_after_a_second_failure() {
    run(async |bed| {
        let ino = file(bed, "f", 2 * STEP_CHUNKS as u64 + 3).await;
        let before = bed.chunks.blocks(ino).len();
        bed.remove("f").await.unwrap();
        bed.kv.fail_after(1);
        bed.world.env().sleep(Duration::from_secs(1)).await;
        assert!(bed.chunks.blocks(ino).len() < before, "a step is done");
        assert_eq!(errno(bed.meta.parts.open(bed.who.session, ino)), Some(Errno::STALE));
        // The second attempt fails at once.
        bed.world.env().sleep(Duration::from_secs(2)).await;
        bed.kv.fail_after(u64::MAX);
        assert!(!is_gone(bed, ino).await);
        assert_eq!(errno(bed.meta.parts.open(bed.who.session, ino)), Some(Errno::STALE));
    });
}

/// A repair gives a half-deleted file a name, as `Fix::Reconnect` does after the queue's row was damaged.
#[test]
fn a_repaired_file_can_be_opened() {
    run(async |bed| {
        let ino = file(bed, "f", 2 * STEP_CHUNKS as u64 + 3).await;
        bed.remove("f").await.unwrap();
        bed.kv.fail_after(1);
        bed.world.env().sleep(Duration::from_secs(1)).await;
        bed.kv.fail_after(u64::MAX);
        assert!(!is_gone(bed, ino).await);
        let names = &bed.meta.parts.names;
        {
            let turn = names.turn().await;
            let mut inode = bed.inode(ino).await.unwrap();
            inode.nlink = 1;
            bed.put_row(inode_key(ino), Some(inode.encode())).await;
            bed.put_row(crate::rows::removed_key(ino), None).await;
            turn.forget();
            crate::reaper::queue_removed(&bed.meta.parts).await.unwrap();
            bed.meta.parts.wake_reaper();
        }
        bed.meta.wait_reaped().await;
        bed.world.env().sleep(Duration::from_secs(1000)).await;
        assert!(!is_gone(bed, ino).await, "the file stays");
        assert_eq!(errno(bed.meta.parts.open(bed.who.session, ino)), None, "so it can be opened");
        assert_eq!(errno(bed.meta.change_contents(penstock_base::TargetId(0), ino).await.map(drop)), None);
    });
}

/// A file without a name gets one while its last use ends.
#[test]
fn a_file_that_gets_a_name_while_its_user_goes_can_be_opened() {
    run(async |bed| {
        let request =
            MakeRequest { dir: ROOT.0, mode: FILE, nameless: true, open: true, ..Default::default() };
        let ino = bed.make(request).await.unwrap();
        let quiet = bed.meta.parts.names.gate().quiesce().await;
        // The name is in its transaction, which waits at the gate, when the last use ends.
        let (linked, ()) = tokio::join!(bed.link(ino, "named"), async {
            bed.world.env().sleep(Duration::from_millis(10)).await;
            bed.meta.parts.close(bed.who.session, ino);
            bed.world.env().sleep(Duration::from_millis(10)).await;
            drop(quiet);
        });
        linked.unwrap();
        assert_eq!(errno(bed.meta.parts.open(bed.who.session, ino)), None);
        bed.meta.wait_reaped().await;
        assert!(!is_gone(bed, ino).await);
    });
}

/// A request that waits for its turn while its session ends leaves no row of a result, which nobody deletes.
#[test]
fn a_request_of_a_session_that_has_ended_changes_nothing() {
    run(async |bed| {
        let who = Request { sequence: 5, ..bed.who };
        let turn = bed.meta.parts.names.turn().await;
        let request = MakeRequest { dir: ROOT.0, mode: FILE, name: "f".into(), ..Default::default() };
        let (made, ()) = tokio::join!(ops::make(&bed.meta.parts, who, request), async {
            bed.meta.parts.clients.end_session(who.session).unwrap();
            drop(turn);
        });
        assert_eq!(errno(made), Some(Errno::STALE));
        let (from, until) = all_results();
        assert_eq!(bed.kv.keys(from, until, 9).await.unwrap(), [[0u8; 0]; 0]);
    });
}

/// Regression: a crash between two steps of a removal made the rest of the file look like a whole one to a
/// client that survived the crash.
#[test]
fn nothing_opens_a_file_of_which_half_is_gone_after_a_crash() {
    run(async |bed| {
        let ino = file(bed, "f", 2 * STEP_CHUNKS as u64 + 3).await;
        let before = bed.chunks.blocks(ino).len();
        // A client of another process, which knows the inode from an earlier lookup.
        let hello = HelloRequest::of_mount(Id128([9; 16]));
        let reply = bed.meta.hello(0, &hello.encode_to_vec(), true).await.unwrap();
        let remote = HelloReply::decode(&reply[..]).unwrap().session;
        bed.remove("f").await.unwrap();
        bed.kv.fail_after(1);
        bed.world.env().sleep(Duration::from_secs(3)).await;
        assert!(!is_gone(bed, ino).await && bed.chunks.blocks(ino).len() < before, "a step is done");
        bed.kv.fail_after(u64::MAX);
        bed.meta.sync().await.unwrap();
        bed.crash().await;
        assert!(bed.meta.clients().owe_opens(), "the file stays until the client has reported");
        assert_eq!(errno(bed.meta.parts.open(remote, ino)), Some(Errno::STALE));
        assert!(bed.link(ino, "again").await.is_err());
        bed.meta.end_session(remote).await.unwrap();
        bed.meta.wait_reaped().await;
        assert!(is_gone(bed, ino).await);
        bed.check("the rest is removed");
    });
}
