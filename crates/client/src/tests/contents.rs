//! Reads, writes and changes of size: bytes as a plain vector has them.

use super::service::{BLOCK, CHUNK_BLOCKS, run, run_with_targets};
use penstock_base::{Branch, ErrorKind, FileId};
use penstock_wire::Kind;
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::{FileLayout, SetAttrRequest};
use std::time::Duration;

const FILE: FileId = FileId::of_numbers(0, 5);

fn size(size: u64) -> SetAttrRequest {
    SetAttrRequest { ino: FILE.ino.0, size: Some(size), ..SetAttrRequest::default() }
}

async fn read(client: &crate::Client, offset: u64, len: u64) -> Vec<u8> {
    let parts = client.read(FILE, offset, len).await.unwrap();
    parts.iter().flat_map(|part| part.to_vec()).collect()
}

#[test]
fn writes_change_the_bytes_that_they_cover_and_no_others() {
    // Writes of (offset, length) to files of a length, over ends of blocks, chunks and the file.
    for (before, offset, len) in [
        (0, 0, 1),
        (0, 5000, 10),
        (100, 0, 50),
        (100, 90, 20),
        (4096, 4095, 2),
        (10_000, 4096, 4096),
        (10_000, 9_999, 1),
        (10_000, 20_000, 30_000),
        (50_000, 1, 49_998),
        (16_384, 16_384, 1),
        (16_383, 40_000, 3),
    ] {
        run(async |service, client| {
            let mut model = vec![1; before];
            service.add(FILE, &model);
            // A crash left a block behind the end.
            service.fill(FILE, (before as u64).div_ceil(BLOCK) + 1, 9);
            let data: Vec<u8> = (0..len).map(|at| (at % 251) as u8 + 2).collect();
            model.resize(model.len().max(offset + len), 0);
            model[offset..offset + len].copy_from_slice(&data);
            client.write(FILE, offset as u64, &data).await.unwrap();
            let case = format!("{len} at {offset} of {before}");
            assert_eq!(read(client, 0, 1 << 20).await, model, "{case}");
            assert_eq!(
                read(client, offset as u64, 3).await,
                model[offset..model.len().min(offset + 3)],
                "{case}"
            );
            client.fsync(FILE).await.unwrap();
            assert_eq!(service.bytes(FILE), model, "{case}");
        });
    }
}

#[test]
fn a_new_size_leaves_zeros() {
    for (before, after) in
        [(100, 0), (100, 10), (10, 100), (4096, 8192), (5000, 4097), (20_000, 70_000), (7, 7)]
    {
        run(async |service, client| {
            let mut model = vec![3; before];
            service.add(FILE, &[]);
            client.write(FILE, 0, &model).await.unwrap();
            let attr = client.set_attr(Branch::MAIN, size(after as u64)).await.unwrap();
            assert_eq!(attr.size, after as u64);
            model.resize(after, 0);
            assert_eq!(read(client, 0, 1 << 20).await, model, "{before} to {after}");
            client.write(FILE, 90_000, b"x").await.unwrap();
            model.resize(90_000, 0);
            model.push(b'x');
            assert_eq!(read(client, 0, 1 << 20).await, model, "{before} to {after}");
            client.fsync(FILE).await.unwrap();
            assert_eq!(service.bytes(FILE), model, "{before} to {after}");
        });
    }
}

#[test]
fn space_is_zeroed_and_preallocated() {
    use SpaceChange::{Punch, Reserve, Zero};
    for (change, offset, len, keep_size) in [
        (Punch, 10, 20, true),
        (Punch, 4096, 8192, true),
        (Punch, 100, 30_000, true),
        (Zero, 0, 4097, false),
        (Zero, 9_000, 5_000, false),
        (Zero, 9_000, 5_000, true),
        (Reserve, 9_000, 50_000, false),
        (Reserve, 0, 50_000, true),
    ] {
        run(async |service, client| {
            let mut model = vec![3; 10_000];
            service.add(FILE, &model);
            client.change_space(FILE, offset, len, change, keep_size).await.unwrap();
            let end = (offset + len) as usize;
            if change != Reserve {
                model[offset as usize..end.min(10_000)].fill(0);
            }
            if change != Punch && !keep_size {
                model.resize(end.max(10_000), 0);
            }
            let case = format!("{change:?} {len} at {offset}, {keep_size}");
            assert_eq!(read(client, 0, 1 << 20).await, model, "{case}");
            client.fsync(FILE).await.unwrap();
            assert_eq!(service.bytes(FILE), model, "{case}");
        });
    }
    run(async |service, client| {
        service.add(FILE, &[]);
        for (offset, len, errno) in [(0, 0, 0), (u64::MAX, 1, 27), (1 << 63, 1, 27)] {
            let failed = client.change_space(FILE, offset, len, Punch, true).await.unwrap_err();
            assert_eq!((failed.kind, failed.errno), (ErrorKind::Invalid, errno), "{len} at {offset}");
        }
    });
}

#[test]
fn data_and_holes_are_found() {
    run(async |service, client| {
        service.add(FILE, &[1; 4096]);
        client.write(FILE, 40_000, b"x").await.unwrap();
        for (offset, hole, expect) in [
            (0, false, Ok(0)),
            (10, true, Ok(4096)),
            (5000, false, Ok(36_864)),
            (40_000, true, Ok(40_001)),
            (40_001, false, Err(6)),
            (50_000, true, Err(6)),
        ] {
            let found = client.seek(FILE, offset, hole).await.map_err(|failure| failure.errno);
            assert_eq!(found, expect, "from {offset}, hole {hole}");
        }
    });
}

#[test]
fn appends_go_to_the_end_and_copies_stop_there() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        service.add(FileId::of_numbers(0, 6), &[2; 50]);
        assert_eq!(client.append(FILE, b"abc").await.unwrap(), 100);
        assert_eq!(client.append(FILE, b"de").await.unwrap(), 103);
        assert_eq!(client.copy((FileId::of_numbers(0, 6), 10), (FILE, 105), 1000).await.unwrap(), 40);
        assert_eq!(client.copy((FileId::of_numbers(0, 6), 50), (FILE, 0), 10).await.unwrap(), 0);
        let expected = [&[1; 100][..], b"abcde", &[2; 40]].concat();
        assert_eq!(read(client, 0, 1000).await, expected);
    });
}

#[test]
fn a_size_is_sent_after_the_data_below_it() {
    use Kind::{Commit, SetAttr, Sync, Write};
    run(async |service, client| {
        service.add(FILE, &[1; 8192]);
        client.write(FILE, 8192, &[2; 4096]).await.unwrap();
        assert_eq!(service.take_log(), [Write]);
        client.fsync(FILE).await.unwrap();
        let log = service.take_log();
        assert_eq!(log[..3], [Commit, SetAttr, Sync], "the file grew: {log:?}");
        // A write inside covers no new data: both are sent at the same time.
        client.write(FILE, 0, &[3; 4096]).await.unwrap();
        client.fsync(FILE).await.unwrap();
        let mut log = service.take_log();
        assert_eq!(log.remove(0), Write);
        log[..2].sort_by_key(|kind| *kind as u16);
        assert!(log[..2].contains(&Commit) && log[..2].contains(&SetAttr), "{log:?}");
        // A commit that fails keeps the size back.
        client.write(FILE, 12_288, &[4; 4096]).await.unwrap();
        service.fail(Commit, ErrorKind::NoSpace, 1);
        service.take_log();
        assert_eq!(client.fsync(FILE).await.unwrap_err().kind, ErrorKind::NoSpace);
        assert!(!service.take_log().contains(&SetAttr) && client.is_unsynced(FILE));
        assert_eq!((service.attr(FILE).size, client.get_attr(FILE).await.unwrap().size), (12_288, 16_384));
        client.fsync(FILE).await.unwrap();
        assert_eq!(service.attr(FILE).size, 16_384);
    });
}

#[test]
fn a_write_that_meets_a_truncation_is_repeated_on_the_new_file() {
    run(async |service, client| {
        service.add(FILE, &[1; 10_000]);
        client.write(FILE, 0, b"a").await.unwrap();
        // Another client truncates the file, which this one has not heard of.
        service.change(FILE, |attr| (attr.truncations, attr.size) = (7, 10));
        service.fill(FILE, 0, 5);
        client.write(FILE, 20, b"bc").await.unwrap();
        client.fsync(FILE).await.unwrap();
        let expected = [&[5; 10][..], &[0; 10], b"bc"].concat();
        assert_eq!(service.bytes(FILE), expected);
    });
}

/// Chunks take turns on two targets.
const ON_TWO: FileLayout = FileLayout { map_version: 0, pool: 0, first: 0, count: 2, turn: 1, replicas: 1 };
const CHUNK: u64 = CHUNK_BLOCKS as u64 * BLOCK;

#[test]
fn a_commit_that_overtakes_a_write_does_not_stand_for_it() {
    run_with_targets(2, async |service, client| {
        service.add(FILE, &[1]);
        service.change(FILE, |attr| attr.layout = Some(ON_TWO));
        client.write(FILE, 0, &[2; 10]).await.unwrap();
        service.write_takes.set(Duration::from_secs(1));
        let sync = async {
            client.session.env().sleep(Duration::from_millis(500)).await;
            client.fsync(FILE).await.unwrap();
        };
        let (written, ()) = futures_util::future::join(client.write(FILE, CHUNK, &[3; 10]), sync).await;
        written.unwrap();
        service.commits.take();
        client.fsync(FILE).await.unwrap();
        assert_eq!(service.commits.take(), [0, 1], "the one that was written to is asked");
        client.write(FILE, 0, &[4; 10]).await.unwrap();
        client.fsync(FILE).await.unwrap();
        assert_eq!(service.commits.take(), [0], "and then no more");
    });
}

#[test]
fn a_write_that_failed_on_a_target_keeps_no_sync_from_succeeding() {
    run_with_targets(2, async |service, client| {
        service.add(FILE, &[1]);
        service.change(FILE, |attr| attr.layout = Some(ON_TWO));
        service.fail(Kind::Write, ErrorKind::Internal, 1);
        assert!(client.write(FILE, CHUNK, &[3; 10]).await.is_err(), "as on a target that is away");
        client.write(FILE, 0, &[4; 10]).await.unwrap();
        client.fsync(FILE).await.unwrap();
        assert_eq!(service.commits.take(), [0]);
    });
}

/// A file that is made again after a restart may get other targets than before.
#[test]
fn a_file_that_was_made_again_is_read_where_it_lies_now() {
    run_with_targets(2, async |service, client| {
        service.add(FILE, &[1; 2 * CHUNK as usize]);
        assert_eq!(read(client, CHUNK, 1).await, [1]);
        service.change(FILE, |attr| attr.layout = Some(ON_TWO));
        service.restart();
        client.write(FILE, 0, &[2; 10]).await.unwrap();
        client.write(FILE, CHUNK, &[3; 10]).await.unwrap();
        service.commits.take();
        client.fsync(FILE).await.unwrap();
        assert_eq!(service.commits.take(), [0, 1]);
        assert_eq!(read(client, CHUNK, 1).await, [3]);
        assert_eq!(service.reads.take().last(), Some(&1));
    });
}
