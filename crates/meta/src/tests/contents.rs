//! Attributes, and sizes with the chunks behind them.

use super::bed::{Bed, errno, run};
use super::memory::CHUNK_BLOCKS;
use crate::{ChunkStore, MetaError, ROOT, STEP_CHUNKS, ops};
use penstock_base::env::random_id;
use penstock_base::{BLOCK_BYTES, Branch, ErrorKind, Id128, Ino, MAX_FILE_BYTES};
use penstock_chunk::{ChunkError, FileUse, Owner};
use penstock_session::Request;
use penstock_wire::SESSIONS;
use penstock_wire::metadata::{
    AttrReply, Change, HelloReply, HelloRequest, LeaseReply, LeaseRequest, LockChange, LockRequest,
    MakeRequest, NameRequest, OpenCount, PingRequest, ReadDirReply, ReadDirRequest, RepeatRequest,
    SetAttrRequest, StatFsReply, Time, WatchReply, WatchRequest,
};
use penstock_wire::{Failure, Header, Kind};
use prost::Message;
use rustix::io::Errno;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;

async fn set(bed: &Bed, ino: Ino, request: SetAttrRequest) -> Result<(), MetaError> {
    ops::set_attr(&bed.meta.parts, bed.who, SetAttrRequest { ino: ino.0, ..request }).await.map(drop)
}

fn size(size: u64) -> SetAttrRequest {
    SetAttrRequest { size: Some(size), ..Default::default() }
}

/// A file of `blocks` written blocks.
async fn file(bed: &Bed, name: &str, blocks: u64) -> Ino {
    let ino = bed.add(name).await.unwrap();
    for block in 0..blocks {
        bed.chunks.write(ino, block).await;
    }
    let grown = SetAttrRequest { grow: true, ..size(blocks * BLOCK) };
    set(bed, ino, grown).await.unwrap();
    ino
}

#[test]
fn a_new_size_leaves_zeros_behind_it() {
    for (to, left, size_after) in [
        (0, 0, 0),
        (1, 1, 1),
        (BLOCK, 1, BLOCK),
        (BLOCK + 1, 2, BLOCK + 1),
        (10 * BLOCK, 10, 10 * BLOCK),
        (20 * BLOCK, 10, 20 * BLOCK),
        (MAX_FILE_BYTES, 10, MAX_FILE_BYTES),
    ] {
        run(async |bed| {
            let ino = file(bed, "f", 10).await;
            // A block behind the end, as a crash leaves it.
            bed.chunks.write(ino, 12).await;
            set(bed, ino, size(to)).await.unwrap();
            let inode = bed.inode(ino).await.unwrap();
            assert_eq!((inode.size, inode.truncations), (size_after, 1), "to {to}");
            assert_eq!(bed.chunks.blocks(ino), (0..left).collect::<Vec<_>>(), "to {to}");
            bed.check(&format!("a truncation to {to}"));
        });
    }
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    run(async |bed| {
        let ino = file(bed, "f", 1).await;
        let dir = bed.add("d/").await.unwrap();
        let known = |truncations| SetAttrRequest { known_truncations: Some(truncations), ..size(0) };
        assert_eq!(errno(set(bed, ino, size(MAX_FILE_BYTES + 1)).await), Some(Errno::FBIG));
        assert_eq!(errno(set(bed, dir, size(0)).await), Some(Errno::ISDIR));
        assert_eq!(errno(set(bed, Ino(77), size(0)).await), Some(Errno::STALE));
        let refused = set(bed, ino, known(3)).await;
        let expect = matches!(refused, Err(MetaError::Chunk(ChunkError::Truncated { found: 0, sent: 3 })));
        assert!(expect, "{refused:?}");
        assert_eq!(bed.inode(ino).await.unwrap().size, BLOCK);
        set(bed, ino, known(0)).await.unwrap();
        assert_eq!(bed.inode(ino).await.unwrap().size, 0);
    });
}

#[test]
fn a_sync_from_before_a_truncation_does_not_undo_it() {
    run(async |bed| {
        let ino = file(bed, "f", 4).await;
        set(bed, ino, size(BLOCK)).await.unwrap();
        let grow = |truncations, to| SetAttrRequest {
            grow: true,
            truncations,
            mtime: Some(Time::from_ns(to as i64)),
            ..size(to)
        };
        for (truncations, to, expect) in
            [(0, 9 * BLOCK, BLOCK), (1, 3 * BLOCK, 3 * BLOCK), (1, BLOCK, 3 * BLOCK)]
        {
            set(bed, ino, grow(truncations, to)).await.unwrap();
            let inode = bed.inode(ino).await.unwrap();
            assert_eq!(inode.size, expect, "truncations {truncations} to {to}");
            assert_eq!(
                inode.times[1] == Time::from_ns(to as i64),
                truncations == 1,
                "the time goes with the size"
            );
        }
    });
}

#[test]
fn a_truncation_of_many_chunks_stops_at_sizes_between_the_two() {
    let chunks = 3 * STEP_CHUNKS as u64 + 7;
    let blocks = chunks * u64::from(CHUNK_BLOCKS);
    // A failure of each transaction on the way.
    for failure in 0..5 {
        run(async |bed| {
            let ino = bed.add("f").await.unwrap();
            for chunk in 0..chunks {
                bed.chunks.write(ino, chunk * u64::from(CHUNK_BLOCKS)).await;
            }
            set(bed, ino, SetAttrRequest { grow: true, ..size(blocks * BLOCK) }).await.unwrap();
            bed.kv.fail_after(failure);
            let result = set(bed, ino, size(5)).await;
            assert_eq!(result.is_ok(), failure >= 4, "{failure}: {result:?}");
            let inode = bed.inode(ino).await.unwrap();
            let end = inode.size.div_ceil(BLOCK);
            let (most, last) = (blocks, bed.chunks.blocks(ino).last().copied());
            assert!(end <= most && last.is_some_and(|last| last < end), "{failure}: {end} {last:?}");
            let kept = end.div_ceil(u64::from(CHUNK_BLOCKS)) as usize;
            assert_eq!(bed.chunks.blocks(ino).len(), kept, "everything before the size is there");
            if failure > 0 {
                assert!(end < most, "step {failure} shortened the file");
            }
            bed.check(&format!("failure {failure}"));
            // A repeat completes it.
            bed.meta.sync().await.unwrap();
            bed.crash().await;
            set(bed, ino, size(5)).await.unwrap();
            assert_eq!((bed.inode(ino).await.unwrap().size, bed.chunks.blocks(ino)), (5, vec![0]));
        });
    }
}

/// Regression: times after 2262 became the last one that 64 bits of nanoseconds hold.
#[test]
fn times_far_from_now_are_kept_and_impossible_ones_refused() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        for far in [
            Time { sec: 1 << 40, nsec: 5 },
            Time { sec: i64::MIN, nsec: 0 },
            Time { sec: i64::MAX, nsec: 999_999_999 },
        ] {
            set(bed, ino, SetAttrRequest { mtime: Some(far), atime: Some(far), ..Default::default() })
                .await
                .unwrap();
            bed.meta.sync().await.unwrap();
            bed.crash().await;
            let inode = bed.inode(ino).await.unwrap();
            assert_eq!((inode.times[0], inode.times[1]), (far, far));
        }
        let none = Some(Time { sec: 0, nsec: 1_000_000_000 });
        for request in [
            SetAttrRequest { atime: none, ..Default::default() },
            SetAttrRequest { mtime: none, size: Some(0), ..Default::default() },
            SetAttrRequest { ctime: none, grow: true, ..Default::default() },
        ] {
            let error = set(bed, ino, request).await.unwrap_err();
            assert!(matches!(error, MetaError::Posix(Errno::INVAL)), "{error}");
        }
    });
}

#[test]
fn attributes_change_alone() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        let requests = [
            SetAttrRequest { mode: Some(0o6711), ..Default::default() },
            SetAttrRequest { uid: Some(5), ..Default::default() },
            SetAttrRequest { gid: Some(6), ..Default::default() },
            SetAttrRequest { atime: Some(Time::from_ns(7)), ..Default::default() },
            SetAttrRequest { mtime: Some(Time::from_ns(-8)), ..Default::default() },
            SetAttrRequest { drop_set_id: true, ..Default::default() },
        ];
        for request in requests {
            set(bed, ino, request).await.unwrap();
            bed.world.pause(std::time::Duration::from_secs(1));
        }
        let inode = bed.inode(ino).await.unwrap();
        assert_eq!((inode.mode, inode.uid, inode.gid), (0o100_711, 5, 6));
        assert_eq!(
            (inode.times[0], inode.times[1], inode.truncations),
            (Time::from_ns(7), Time::from_ns(-8), 0)
        );
        assert!(inode.times[2] > inode.times[3], "the time of change follows");
    });
}

#[test]
fn statfs_counts_the_space_that_users_may_take() {
    run(async |bed| {
        let reply = StatFsReply::decode(&ops::stat_fs(&bed.meta.parts)[..]).unwrap();
        assert_eq!((reply.total_blocks, reply.free_blocks, reply.available_blocks), (1000, 600, 500));
        assert!(reply.free_inodes > 0 && reply.inodes >= reply.free_inodes);
        assert!(bed.inode(ROOT).await.unwrap().is_dir());
    });
}

/// Regression: the end of the truncation took the size for the one that its steps had left, and stopped the
/// process.
#[test]
fn a_sync_between_the_steps_of_a_truncation_and_its_end_is_seen() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        let file_blocks = (STEP_CHUNKS as u64 + 2) * u64::from(CHUNK_BLOCKS);
        for first in (0..file_blocks).step_by(CHUNK_BLOCKS as usize) {
            bed.chunks.write(ino, first).await;
        }
        let far = SetAttrRequest { ino: ino.0, size: Some(1 << 40), ..Default::default() };
        // It knows the truncate generation of the last step.
        let synced = file_blocks * BLOCK_BYTES as u64;
        let sync = SetAttrRequest {
            ino: ino.0,
            size: Some(synced),
            grow: true,
            truncations: 1,
            ..Default::default()
        };
        let parts = &bed.meta.parts;
        // Both wait here; the truncation's step is first, its end is last.
        let turn = parts.names.turn().await;
        let (truncated, synced, ()) =
            tokio::join!(ops::set_attr(parts, bed.who, far), ops::set_attr(parts, bed.who, sync), async {
                drop(turn)
            });
        synced.unwrap();
        truncated.unwrap();
        assert_eq!(bed.inode(ino).await.unwrap().size, 1 << 40);
        bed.check("a truncation and a sync");
    });
}

/// A session ends, and its leases are another client's, while its truncation goes on in steps.
#[test]
fn a_truncation_of_a_session_that_has_ended_takes_no_further_step() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        let chunks = 3 * STEP_CHUNKS as u64 + 7;
        for chunk in 0..chunks {
            bed.chunks.write(ino, chunk * u64::from(CHUNK_BLOCKS)).await;
        }
        let blocks = chunks * u64::from(CHUNK_BLOCKS);
        set(bed, ino, SetAttrRequest { grow: true, ..size(blocks * BLOCK) }).await.unwrap();
        let who = Request { sequence: 5, ..bed.who };
        let parts = &bed.meta.parts;
        let request = SetAttrRequest { ino: ino.0, known_truncations: Some(0), ..size(0) };
        // The first step waits for the turn, and the end of the session behind it.
        let turn = parts.names.turn().await;
        let (truncated, ended, ()) = tokio::join!(
            ops::set_attr(parts, who, request),
            async {
                bed.meta.end_session(who.session).await.unwrap();
                bed.inode(ino).await.unwrap().truncations
            },
            async { drop(turn) }
        );
        assert_eq!(errno(truncated), Some(Errno::STALE));
        let after = bed.inode(ino).await.unwrap();
        assert_eq!(after.truncations, ended, "a step ran after the session had ended");
    });
}

/// A request for a session of a name of its own.
fn hello(bed: &Bed) -> Vec<u8> {
    HelloRequest::of_mount(random_id(&bed.world.env())).encode_to_vec()
}

/// Starts a session of a client in another process.
async fn remote_session(bed: &Bed) -> u64 {
    let reply = bed.meta.hello(0, &hello(bed), true).await.unwrap();
    HelloReply::decode(&reply[..]).unwrap().session
}

/// Regression: the locks of a silent session were given to others before its rows were gone for good, and a
/// crash brought it back with the same locks.
#[test]
fn what_a_silent_session_held_is_free_only_when_no_crash_brings_it_back() {
    run(async |bed| {
        let session = remote_session(bed).await;
        let ino = bed.add("f").await.unwrap();
        let change = LockChange::Exclusive.into();
        let lock = LockRequest { ino: ino.0, change, last: 9, owner: 1, ..LockRequest::default() };
        let clients = bed.meta.clients();
        assert!(clients.lock(session, 0, &lock).unwrap().conflict.is_none());
        bed.world.env().sleep(Duration::from_secs(31)).await;
        bed.kv.fail_after(0);
        bed.meta.end_if_silent(session).await.unwrap_err();
        let ping = Header { session, ..Header::request(Kind::Ping) };
        assert_eq!(clients.hear(&ping).unwrap_err().kind, ErrorKind::Ended, "it has ended for its client");
        assert!(clients.request(&ping).is_err() && clients.is_in_use(session));
        assert_eq!(clients.lock(session, 0, &lock), Err(Errno::STALE));
        let other = clients.lock(bed.who.session, 0, &lock).unwrap();
        assert!(other.conflict.is_some(), "a crash could bring it back");
        bed.kv.fail_after(u64::MAX);
        assert!(bed.meta.end_if_silent(session).await.unwrap());
        assert!(clients.lock(bed.who.session, 0, &lock).unwrap().conflict.is_none());
        bed.crash().await;
        assert!(!bed.meta.clients().is_in_use(session));
    });
}

/// A session ends while one of its writes is being carried out. If others got its lease before that has
/// ended, it would be carried out after theirs.
#[test]
fn a_lease_goes_on_only_after_the_last_write_of_its_session() {
    run(async |bed| {
        let [own, other] = [remote_session(bed).await, remote_session(bed).await];
        let (ino, clients) = (bed.add("f").await.unwrap(), bed.meta.clients().clone());
        set(bed, ino, size(5 * BLOCK)).await.unwrap();
        clients.join(own).unwrap();
        assert!(clients.join(other).unwrap_err().is_ask_again());
        answer_all(bed, own).await;
        clients.join(other).unwrap();
        let lease = LeaseRequest { ino: ino.0, exclusive: true, first: 0, last: u64::MAX }.encode_to_vec();
        clients.grant(own, Branch::MAIN, &lease).unwrap();
        let before = bed.inode(ino).await.unwrap();
        let write = clients.begin(&Header { session: own, ..Header::request(Kind::Write) }).unwrap();
        bed.meta.end_session(own).await.unwrap();
        bed.meta.end_session(own).await.unwrap();
        assert!(clients.is_in_use(own) && !clients.is_live(own));
        let waits = || {
            let reply = clients.grant(other, Branch::MAIN, &lease).unwrap();
            LeaseReply::decode(&reply[..]).unwrap().wait
        };
        assert!(waits());
        bed.world.env().sleep(Duration::from_secs(60)).await;
        assert!(waits(), "the write is not over");
        // It has written behind the size that it has sent.
        bed.chunks.write(ino, 9).await;
        drop(write);
        bed.world.env().sleep(Duration::from_millis(1)).await;
        assert!(!clients.is_in_use(own) && !waits());
        let after = bed.inode(ino).await.unwrap();
        assert_eq!(after.truncations, before.truncations + 1, "a late write is refused");
        assert_eq!((after.size, after.times), (before.size, before.times));
    });
}

/// Answers all calls to a session.
async fn answer_all(bed: &Bed, session: u64) {
    let clients = bed.meta.clients();
    let watch = WatchRequest { wait: true, generation: bed.chunks.generation(), ..WatchRequest::default() };
    let news = clients.watch(session, &watch.encode_to_vec()).await.unwrap();
    let calls = WatchReply::decode(&news[..]).unwrap().calls;
    let answered = calls.iter().map(|call| call.number).collect();
    let answer = WatchRequest { wait: false, answered, ..watch };
    clients.watch(session, &answer.encode_to_vec()).await.unwrap();
}

/// Regression: a repeat of a truncation that was carried out waited for another client like a new one. It was
/// answered with "ask again", and the client sent it once more as another request: what had been written
/// meanwhile was cut off.
#[test]
fn a_repeated_truncation_gets_its_outcome_whatever_others_have() {
    run(async |bed| {
        let (ino, clients) = (bed.add("f").await.unwrap(), bed.meta.clients().clone());
        let [own, other] = [remote_session(bed).await, remote_session(bed).await];
        let cut = SetAttrRequest { ino: ino.0, ..size(5) }.encode_to_vec();
        let header = Header { session: own, sequence: 64, ..Header::request(Kind::SetAttr) };
        clients.join(own).unwrap();
        let first = bed.meta.serve(&header, &cut).await.unwrap();
        // Another client comes, this one gives up what it has without leases, and the other one gets a lease.
        assert!(clients.join(other).unwrap_err().is_ask_again());
        answer_all(bed, own).await;
        clients.join(other).unwrap();
        let lease = LeaseRequest { ino: ino.0, exclusive: true, first: 0, last: u64::MAX };
        clients.grant(other, Branch::MAIN, &lease.encode_to_vec()).unwrap();
        assert_eq!(bed.meta.serve(&header, &cut).await.unwrap(), first, "it was carried out");
        let later = Header { sequence: 65, ..header };
        assert!(bed.meta.serve(&later, &cut).await.unwrap_err().is_ask_again(), "a new one waits");
        assert_eq!(bed.inode(ino).await.unwrap().truncations, 1);
    });
}

/// A change was carried out, its reply is lost, and the service is started again. The repeat must not be
/// refused because another client owes everything: it would be sent once more as another request.
#[test]
fn a_repeat_gets_its_outcome_although_others_owe_everything() {
    run(async |bed| {
        let [own, other] = [remote_session(bed).await, remote_session(bed).await];
        let make =
            MakeRequest { dir: ROOT.0, name: b"f".to_vec(), mode: 0o100_644, ..MakeRequest::default() };
        let (header, body) =
            (Header { session: own, sequence: 64, ..Header::request(Kind::Make) }, make.encode_to_vec());
        let first = bed.meta.serve(&header, &body).await.unwrap();
        bed.meta.sync().await.unwrap();
        bed.crash().await;
        let clients = bed.meta.clients().clone();
        assert!(clients.is_in_use(other), "it may own anything");
        answer_all(bed, own).await;
        let later = Header { sequence: 65, ..header };
        assert!(bed.meta.serve(&later, &body).await.unwrap_err().is_ask_again(), "a new one waits");
        assert_eq!(bed.meta.serve(&header, &body).await.unwrap(), stored(&first), "it was carried out");
    });
}

/// Regression: a file was made and opened, the reply is lost, and the service is started again. The client
/// reported what it had open before it knew of the file, and nobody counted the open.
#[test]
fn a_file_that_was_made_before_a_restart_is_open_once_its_reply_arrives() {
    run(async |bed| {
        let own = remote_session(bed).await;
        let (name, mode) = (b"f".to_vec(), 0o100_644);
        let make = MakeRequest { dir: ROOT.0, name, mode, open: true, ..MakeRequest::default() };
        let header = Header { session: own, sequence: 64, ..Header::request(Kind::Make) };
        let first = bed.meta.serve(&header, &make.encode_to_vec()).await.unwrap();
        let file = AttrReply::decode(&first[..]).unwrap().attr.unwrap().file();
        bed.meta.serve(&header, &make.encode_to_vec()).await.unwrap();
        assert_eq!(opens(bed, own), 1, "a repeat opens nothing");
        bed.meta.sync().await.unwrap();
        bed.crash().await;
        let start = bed.chunks.generation();
        let ping = PingRequest { reclaimed: true, start, ..PingRequest::default() };
        bed.meta.clients().reclaim(own, &ping).unwrap();
        assert_eq!(opens(bed, own), 0);
        assert_eq!(bed.meta.serve(&header, &make.encode_to_vec()).await.unwrap(), stored(&first));
        assert_eq!(opens(bed, own), 1);
        bed.remove("f").await.unwrap();
        bed.world.env().sleep(Duration::from_secs(5)).await;
        assert_eq!(bed.inode(file.ino).await.unwrap().nlink, 0, "it is open, and stays");
    });
}

/// The result that is stored of a first reply, which has the directory too.
fn stored(first: &[u8]) -> Vec<u8> {
    let first = AttrReply::decode(first).unwrap();
    assert_eq!(first.dir.as_ref().map(|dir| dir.ino), Some(ROOT.0));
    AttrReply { dir: None, ..first }.encode_to_vec()
}

/// The number of inodes that a session has open.
fn opens(bed: &Bed, session: u64) -> u64 {
    let sessions = bed.meta.clients().sessions();
    sessions.into_iter().find(|info| info.id == session).unwrap().open_inodes
}

/// A repeat that would change other inodes than the first time is refused, and counted.
#[test]
fn a_repeat_on_other_inodes_is_refused_and_told() {
    run(async |bed| {
        let own = remote_session(bed).await;
        bed.meta.clients().join(own).unwrap();
        let (removed, there) = (bed.add("f").await.unwrap(), bed.add("g").await.unwrap());
        let serve = async |bed: &Bed, kind, sequence, body: Vec<u8>| {
            let header = Header { session: own, sequence, ..Header::request(kind) };
            bed.meta.serve(&header, &body).await
        };
        let name = |name: &[u8]| {
            NameRequest { dir: ROOT.0, name: name.to_vec(), ..NameRequest::default() }.encode_to_vec()
        };
        bed.meta.sync().await.unwrap();
        let reply = serve(bed, Kind::Unlink, 64, name(b"f")).await.unwrap();
        let change = AttrReply::decode(&reply[..]).unwrap().change.unwrap();
        assert_eq!(change.removed, removed.0);
        bed.crash().await;
        // Meanwhile the name means another inode.
        bed.remove("f").await.unwrap();
        bed.link(there, "f").await.unwrap();
        let kind = Kind::Unlink as u32;
        let start = bed.chunks.generation();
        let repeat = RepeatRequest { kind, body: name(b"f"), change, made: 0, start };
        let before = bed.meta.clients().unreported();
        let failure = serve(bed, Kind::Repeat, 64, repeat.encode_to_vec()).await.unwrap_err();
        assert!(failure.message.contains("other inodes"), "{failure}");
        assert_eq!(bed.meta.clients().unreported(), before + 1);
        assert_eq!(bed.inode(there).await.unwrap().nlink, 2);
        // Numbers that no start has given. Those of later changes would be too high to be repeated.
        for (number, sequence) in [(u64::MAX, 128), (1 << 62, 192)] {
            let repeat = RepeatRequest { change: Change { number, ..change }, ..repeat.clone() };
            let failure = serve(bed, Kind::Repeat, sequence, repeat.encode_to_vec()).await.unwrap_err();
            assert!(failure.message.contains("as it was made"), "{failure}");
        }
        assert_eq!(bed.meta.clients().unreported(), before + 3);
    });
}

/// The reply to a Hello is lost, and the client asks again under the same name.
#[test]
fn a_repeated_hello_begins_no_second_session() {
    run(async |bed| {
        let (request, count) = (hello(bed), bed.meta.clients().remote_count());
        let greet = async |bed: &Bed| {
            let reply = bed.meta.hello(0, &request, true).await?;
            Ok::<_, Failure>(HelloReply::decode(&reply[..]).unwrap())
        };
        let first = greet(bed).await.unwrap();
        assert_eq!(
            (greet(bed).await.unwrap(), bed.meta.clients().remote_count()),
            (first.clone(), count + 1)
        );
        bed.crash().await;
        assert_eq!(greet(bed).await.unwrap(), first, "its row names it");
        bed.kv.fail_after(0);
        bed.meta.end_session(first.session).await.unwrap_err();
        let failure = greet(bed).await.unwrap_err();
        assert_eq!(failure.errno, 116, "it has ended, and a crash may bring it back: {failure}");
        bed.kv.fail_after(u64::MAX);
        bed.meta.end_session(first.session).await.unwrap();
        assert!(greet(bed).await.unwrap().session > first.session);
    });
}

/// Regression: a session whose Hello was repeated over a restart owed a report of its opens for ever, which
/// its client knew nothing of: nobody got a lock, and no removed file was dropped.
#[test]
fn a_hello_repeated_over_a_restart_owes_nothing() {
    run(async |bed| {
        let request = hello(bed);
        bed.meta.hello(0, &request, true).await.unwrap();
        bed.crash().await;
        let ino = bed.add("f").await.unwrap();
        bed.remove("f").await.unwrap();
        assert!(bed.meta.clients().owe_opens(), "a client may have it open");
        let again = bed.meta.hello(0, &request, true).await.unwrap();
        assert!(!bed.meta.clients().owe_opens());
        let session = HelloReply::decode(&again[..]).unwrap().session;
        let lock = LockRequest { ino: ino.0, last: 9, change: 2, owner: 1, ..LockRequest::default() };
        assert!(!bed.meta.clients().lock(session, 0, &lock).unwrap().early);
        bed.world.env().sleep(Duration::from_secs(5)).await;
        assert!(bed.inode(ino).await.is_err(), "it is dropped");
        let failure = bed.meta.hello(0, &request, false).await.unwrap_err();
        assert_eq!(failure.errno, 1, "a client of this process has another name: {failure}");
        let mut other = HelloRequest::decode(&request[..]).unwrap();
        other.role = penstock_wire::metadata::ROLE_GATEWAY;
        let failure = bed.meta.hello(0, &other.encode_to_vec(), true).await.unwrap_err();
        assert_eq!(failure.errno, 1, "it is the session of another role: {failure}");
    });
}

/// Regression: a session whose Hello was repeated after its lease time was handed out and then ended.
#[test]
fn a_repeated_hello_is_a_sign_of_life() {
    run(async |bed| {
        let request = hello(bed);
        bed.meta.hello(0, &request, true).await.unwrap();
        bed.world.env().sleep(Duration::from_secs(31)).await;
        let reply = bed.meta.hello(0, &request, true).await.unwrap();
        let session = HelloReply::decode(&reply[..]).unwrap().session;
        assert!(!bed.meta.end_if_silent(session).await.unwrap());
    });
}

#[test]
fn what_a_hello_may_not_ask_for_is_refused_by_name() {
    run(async |bed| {
        let good = HelloRequest::of_mount(Id128([7; 16]));
        for (request, why) in [
            (HelloRequest { name: Vec::new(), ..good.clone() }, "16 random bytes"),
            (HelloRequest { name: vec![0; 16], ..good.clone() }, "16 random bytes"),
            (HelloRequest { name: vec![7; 17], ..good.clone() }, "16 random bytes"),
            (HelloRequest { role: 0, ..good.clone() }, "role 0"),
            (HelloRequest { role: 2, ..good.clone() }, "role 2"),
            (HelloRequest { lane: 1, ..good.clone() }, "lane 1"),
            (HelloRequest { fileset: "home".into(), ..good.clone() }, "no fileset \"home\""),
            (HelloRequest { client: "x".repeat(257), ..good }, "too long"),
        ] {
            let failure = bed.meta.hello(0, &request.encode_to_vec(), true).await.unwrap_err();
            assert!(failure.message.contains(why), "{failure}");
        }
        let (lists, session) = (OpenCount { ino: 7, count: 1, branch: 3, user: 0 }, bed.who.session);
        let ping = PingRequest { opens: vec![lists], ..PingRequest::default() }.encode_to_vec();
        let header = Header { session, ..Header::request(Kind::Ping) };
        let failure = bed.meta.serve(&header, &ping).await.unwrap_err();
        assert!(failure.message.contains("branch 3"), "{failure}");
    });
}

#[test]
fn there_are_never_more_sessions_than_the_most() {
    run(async |bed| {
        for _ in 1..SESSIONS {
            remote_session(bed).await;
        }
        // A check has the turn, and two clients come meanwhile.
        let turn = bed.meta.parts.names.turn().await;
        let hellos = [hello(bed), hello(bed)];
        let greet = |number: usize| bed.meta.hello(0, &hellos[number], true);
        let (first, second, ()) = tokio::join!(greet(0), greet(1), async { drop(turn) });
        first.unwrap();
        assert!(second.unwrap_err().message.contains("64 sessions"));
        assert_eq!(bed.meta.clients().remote_count(), SESSIONS);
    });
}

/// Regression: clients that came together all ended the same session, and all but one were refused.
#[test]
fn each_newcomer_gets_the_place_of_a_session_that_is_gone() {
    run(async |bed| {
        for _ in 0..SESSIONS {
            let session = remote_session(bed).await;
            bed.meta.clients().hung_up(session, false);
        }
        let turn = bed.meta.parts.names.turn().await;
        let hellos = [hello(bed), hello(bed), hello(bed)];
        let greet = |number: usize| bed.meta.hello(0, &hellos[number], true);
        let greeted = tokio::join!(greet(0), greet(1), greet(2), async { drop(turn) });
        let sessions = [greeted.0, greeted.1, greeted.2]
            .map(|reply| HelloReply::decode(&reply.unwrap()[..]).unwrap().session);
        assert_eq!(bed.meta.clients().remote_count(), SESSIONS);
        // Those that are there stay.
        for _ in 0..SESSIONS {
            let _may_be_refused = bed.meta.hello(0, &hello(bed), true).await;
        }
        assert!(sessions.iter().all(|session| bed.meta.clients().is_live(*session)));
    });
}

/// Regression: a report of half a million locks, each of two bytes, was kept in memory for long.
#[test]
fn a_report_is_bounded() {
    run(async |bed| {
        let session = remote_session(bed).await;
        let header = Header { session, ..Header::request(Kind::Ping) };
        let ping = PingRequest { locks: vec![LockRequest::default(); 8193], ..PingRequest::default() };
        let failure = bed.meta.serve(&header, &ping.encode_to_vec()).await.unwrap_err();
        assert!(failure.message.contains("8192 opens and locks"), "{failure}");
    });
}

#[test]
fn a_use_of_a_file_sees_a_change_of_its_owner() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        let uses = [
            bed.meta.change_contents(penstock_base::TargetId(0), ino).await.unwrap(),
            bed.meta.change_contents(penstock_base::TargetId(0), ino).await.unwrap(),
        ];
        let uid = |uid| SetAttrRequest { uid: Some(uid), ..Default::default() };
        let owners = || [uses[0].owner().uid, uses[1].owner().uid];
        assert_eq!(owners(), [0, 0]);
        set(bed, ino, uid(5)).await.unwrap();
        assert_eq!(owners(), [5, 5]);
        set(bed, ino, SetAttrRequest { size: Some(9), ..uid(6) }).await.unwrap();
        assert_eq!(owners(), [6, 6]);
        bed.kv.fail_after(0);
        set(bed, ino, uid(7)).await.unwrap_err();
        bed.kv.fail_after(u64::MAX);
        assert_eq!(owners(), [6, 6], "it was not changed");
    });
}

/// A session does not end if its client is heard again before the end has the turn.
#[test]
fn a_session_that_was_heard_while_its_end_waited_goes_on() {
    run(async |bed| {
        let session = remote_session(bed).await;
        let (clients, env) = (bed.meta.clients(), bed.world.env());
        let ping = Header { session, ..Header::request(Kind::Ping) };
        env.sleep(Duration::from_secs(31)).await;
        assert!(clients.is_silent(session));
        // A check, or another change, has the turn.
        let turn = bed.meta.parts.names.turn().await;
        let (ended, ()) = tokio::join!(bed.meta.end_if_silent(session), async {
            env.sleep(Duration::from_secs(5)).await;
            clients.hear(&ping).unwrap();
            let serving = clients.begin(&ping).unwrap();
            bed.meta.serve(&ping, &PingRequest::default().encode_to_vec()).await.unwrap();
            drop((serving, turn));
        });
        assert!(
            !ended.unwrap() && clients.is_in_use(session),
            "the service answered it, and ended it after that"
        );
        env.sleep(Duration::from_secs(31)).await;
        assert!(bed.meta.end_if_silent(session).await.unwrap() && !clients.is_in_use(session));
    });
}

/// The target counts the blocks of a file to its owner: it hears of every change of the owner, in the
/// transaction of the inode.
#[test]
fn a_change_of_the_owner_reaches_the_target_with_the_inode() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        bed.chunks.write(ino, 3).await;
        let owner = |bed: &Bed| bed.chunks.owners.borrow().get(&ino).copied();
        let mode = SetAttrRequest { mode: Some(0o600), ..Default::default() };
        set(bed, ino, mode).await.unwrap();
        assert_eq!(owner(bed), None, "the owner stays");
        set(bed, ino, SetAttrRequest { uid: Some(5), ..Default::default() }).await.unwrap();
        let of = |uid, gid| Some(Owner { uid, gid, project: 0 });
        assert_eq!(owner(bed), of(5, 0));
        set(bed, ino, SetAttrRequest { gid: Some(6), size: Some(0), ..Default::default() }).await.unwrap();
        assert_eq!(owner(bed), of(5, 6), "a truncation names it too");
        let dir = bed.add("d/").await.unwrap();
        set(bed, dir, SetAttrRequest { uid: Some(5), ..Default::default() }).await.unwrap();
        assert_eq!(bed.chunks.owners.borrow().get(&dir), None, "a directory has no blocks");
        let in_use = bed.meta.change_contents(penstock_base::TargetId(0), ino).await.unwrap();
        assert_eq!(Some(in_use.owner()), of(5, 6));
    });
}

#[test]
fn attributes_say_what_a_file_takes() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        for block in [0, 7, 90] {
            bed.chunks.write(ino, block).await;
        }
        set(bed, ino, SetAttrRequest { grow: true, ..size(91 * BLOCK) }).await.unwrap();
        let blocks = async |bed: &mut Bed| {
            let reply = ops::get_attr(&bed.meta.parts, bed.who, ino, false).await.unwrap();
            AttrReply::decode(&reply[..]).unwrap().attr.unwrap().blocks
        };
        assert_eq!(blocks(bed).await, 3);
        let cut = SetAttrRequest { ino: ino.0, ..size(8 * BLOCK) };
        let reply = ops::set_attr(&bed.meta.parts, bed.who, cut).await.unwrap();
        let told = AttrReply::decode(&reply[..]).unwrap().attr.unwrap().blocks;
        assert_eq!((told, blocks(bed).await), (2, 2), "the reply counts what the transaction left");
        let request = ReadDirRequest { dir: ROOT.0, attributes: true, limit: 9, ..Default::default() };
        let reply = ops::read_dir(&bed.meta.parts, bed.who, request).await.unwrap();
        let listed: Vec<u64> = ReadDirReply::decode(&reply[..])
            .unwrap()
            .entries
            .into_iter()
            .filter_map(|entry| entry.attr.map(|attr| attr.blocks))
            .collect();
        assert_eq!(listed, [2]);
    });
}
