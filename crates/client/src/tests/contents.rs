//! Reads, writes and changes of size: bytes as a plain vector has them.

use super::service::{BLOCK, run};
use penstock_base::{ErrorKind, Ino};
use penstock_wire::Kind;
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::SetAttrRequest;

const INO: Ino = Ino(5);

fn size(size: u64) -> SetAttrRequest {
    SetAttrRequest { ino: INO.0, size: Some(size), ..SetAttrRequest::default() }
}

async fn read(client: &crate::Client, offset: u64, len: u64) -> Vec<u8> {
    let parts = client.read(INO, offset, len).await.unwrap();
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
            service.add(INO, &model);
            // A crash left a block behind the end.
            service.fill(INO, (before as u64).div_ceil(BLOCK) + 1, 9);
            let data: Vec<u8> = (0..len).map(|at| (at % 251) as u8 + 2).collect();
            model.resize(model.len().max(offset + len), 0);
            model[offset..offset + len].copy_from_slice(&data);
            client.write(INO, offset as u64, &data).await.unwrap();
            let case = format!("{len} at {offset} of {before}");
            assert_eq!(read(client, 0, 1 << 20).await, model, "{case}");
            assert_eq!(
                read(client, offset as u64, 3).await,
                model[offset..model.len().min(offset + 3)],
                "{case}"
            );
            client.fsync(INO).await.unwrap();
            assert_eq!(service.bytes(INO), model, "{case}");
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
            service.add(INO, &[]);
            client.write(INO, 0, &model).await.unwrap();
            let attr = client.set_attr(size(after as u64)).await.unwrap();
            assert_eq!(attr.size, after as u64);
            model.resize(after, 0);
            assert_eq!(read(client, 0, 1 << 20).await, model, "{before} to {after}");
            client.write(INO, 90_000, b"x").await.unwrap();
            model.resize(90_000, 0);
            model.push(b'x');
            assert_eq!(read(client, 0, 1 << 20).await, model, "{before} to {after}");
            client.fsync(INO).await.unwrap();
            assert_eq!(service.bytes(INO), model, "{before} to {after}");
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
            service.add(INO, &model);
            client.change_space(INO, offset, len, change, keep_size).await.unwrap();
            let end = (offset + len) as usize;
            if change != Reserve {
                model[offset as usize..end.min(10_000)].fill(0);
            }
            if change != Punch && !keep_size {
                model.resize(end.max(10_000), 0);
            }
            let case = format!("{change:?} {len} at {offset}, {keep_size}");
            assert_eq!(read(client, 0, 1 << 20).await, model, "{case}");
            client.fsync(INO).await.unwrap();
            assert_eq!(service.bytes(INO), model, "{case}");
        });
    }
    run(async |service, client| {
        service.add(INO, &[]);
        for (offset, len, errno) in [(0, 0, 0), (u64::MAX, 1, 27), (1 << 63, 1, 27)] {
            let failed = client.change_space(INO, offset, len, Punch, true).await.unwrap_err();
            assert_eq!((failed.kind, failed.errno), (ErrorKind::Invalid, errno), "{len} at {offset}");
        }
    });
}

#[test]
fn data_and_holes_are_found() {
    run(async |service, client| {
        service.add(INO, &[1; 4096]);
        client.write(INO, 40_000, b"x").await.unwrap();
        for (offset, hole, expect) in [
            (0, false, Ok(0)),
            (10, true, Ok(4096)),
            (5000, false, Ok(36_864)),
            (40_000, true, Ok(40_001)),
            (40_001, false, Err(6)),
            (50_000, true, Err(6)),
        ] {
            let found = client.seek(INO, offset, hole).await.map_err(|failure| failure.errno);
            assert_eq!(found, expect, "from {offset}, hole {hole}");
        }
    });
}

#[test]
fn appends_go_to_the_end_and_copies_stop_there() {
    run(async |service, client| {
        service.add(INO, &[1; 100]);
        service.add(Ino(6), &[2; 50]);
        assert_eq!(client.append(INO, b"abc").await.unwrap(), 100);
        assert_eq!(client.append(INO, b"de").await.unwrap(), 103);
        assert_eq!(client.copy((Ino(6), 10), (INO, 105), 1000).await.unwrap(), 40);
        assert_eq!(client.copy((Ino(6), 50), (INO, 0), 10).await.unwrap(), 0);
        let expected = [&[1; 100][..], b"abcde", &[2; 40]].concat();
        assert_eq!(read(client, 0, 1000).await, expected);
    });
}

#[test]
fn a_size_is_sent_after_the_data_below_it() {
    use Kind::{Commit, SetAttr, Sync, Write};
    run(async |service, client| {
        service.add(INO, &[1; 8192]);
        client.write(INO, 8192, &[2; 4096]).await.unwrap();
        assert_eq!(service.take_log(), [Write]);
        client.fsync(INO).await.unwrap();
        let log = service.take_log();
        assert_eq!(log[..3], [Commit, SetAttr, Sync], "the file grew: {log:?}");
        // A write inside covers no new data: both are sent at the same time.
        client.write(INO, 0, &[3; 4096]).await.unwrap();
        client.fsync(INO).await.unwrap();
        let mut log = service.take_log();
        assert_eq!(log.remove(0), Write);
        log[..2].sort_by_key(|kind| *kind as u16);
        assert!(log[..2].contains(&Commit) && log[..2].contains(&SetAttr), "{log:?}");
        // A commit that fails keeps the size back.
        client.write(INO, 12_288, &[4; 4096]).await.unwrap();
        service.fail(Commit, ErrorKind::NoSpace, 1);
        service.take_log();
        assert_eq!(client.fsync(INO).await.unwrap_err().kind, ErrorKind::NoSpace);
        assert!(!service.take_log().contains(&SetAttr) && client.is_unsynced(INO));
        assert_eq!((service.attr(INO).size, client.get_attr(INO).await.unwrap().size), (12_288, 16_384));
        client.fsync(INO).await.unwrap();
        assert_eq!(service.attr(INO).size, 16_384);
    });
}

#[test]
fn a_write_that_meets_a_truncation_is_repeated_on_the_new_file() {
    run(async |service, client| {
        service.add(INO, &[1; 10_000]);
        client.write(INO, 0, b"a").await.unwrap();
        // Another client truncates the file, which this one has not heard of.
        service.change(INO, |attr| (attr.truncations, attr.size) = (7, 10));
        service.fill(INO, 0, 5);
        client.write(INO, 20, b"bc").await.unwrap();
        client.fsync(INO).await.unwrap();
        let expected = [&[5; 10][..], &[0; 10], b"bc"].concat();
        assert_eq!(service.bytes(INO), expected);
    });
}
