use super::*;
use crate::tests::{Bench, CHUNK, OWNER, assert_clean, chunk_key, file, fills, known, on_a_volume, write};
use penstock_base::env::timeout;
use penstock_kv::KvRead;
use std::time::Duration;

const BLOCKS: u64 = CHUNK as u64;

fn cut(truncations: u64, from: u64) -> Cut {
    Cut { truncations, from, behind: Behind::Dropped }
}

/// Runs a test on a fresh target and its work.
fn on_a_target(test: impl AsyncFnOnce(&Bench, Rc<Target>, Rc<TargetWork>)) {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let work = TargetWork::new(&target);
        test(bench, target, work).await;
    });
}

/// Another life of the target, on what is durable.
async fn restarted(bench: &Bench, target: Rc<Target>) -> Rc<Target> {
    target.stop();
    bench.kv.crash();
    bench.target().await
}

#[test]
fn a_truncation_that_comes_again_takes_nothing_that_was_written_since() {
    on_a_target(async |bench, target, work| {
        for index in 0..3 {
            write(&target, chunk_key(2, index), 0, &[1, 1, 1]).await;
        }
        target.commit(file(2), false).await.unwrap();
        let again = cut(5, BLOCKS + 1);
        work.owe(file(2), again);
        work.finish(file(2)).await.unwrap();
        assert_eq!(fills(&target, chunk_key(2, 1)).await[..3], [1, 0, 0]);
        assert_eq!(fills(&target, chunk_key(2, 2)).await[..1], [0]);
        let (data, crcs) = crate::tests::blocks_of(&[7]);
        for key in [chunk_key(2, 1), chunk_key(2, 2)] {
            target.write(key, 2, &data, &crcs, known(5), crate::tests::CLIENT).await.unwrap();
        }
        // In this life it is known to be done; in the next one rows tell it.
        work.finish(file(2)).await.unwrap();
        target.commit(file(2), false).await.unwrap();
        let target = restarted(bench, target).await;
        let work = TargetWork::new(&target);
        work.owe(file(2), again);
        assert!(work.turn(file(2)).await.is_ok(), "it is carried out before anything else is done");
        assert_eq!(fills(&target, chunk_key(2, 0)).await[..3], [1, 1, 1]);
        assert_eq!(fills(&target, chunk_key(2, 1)).await[..3], [1, 0, 7]);
        assert_eq!(fills(&target, chunk_key(2, 2)).await[..3], [0, 0, 7]);
        assert_clean(bench, &target).await;
    });
}

#[test]
fn a_truncation_that_a_crash_has_undone_is_carried_out_before_a_file_is_served() {
    on_a_target(async |bench, target, work| {
        for index in 0..3 {
            write(&target, chunk_key(2, index), 0, &[1, 1, 1]).await;
        }
        target.commit(file(2), false).await.unwrap();
        for (truncations, from) in [(3, 2 * BLOCKS), (4, 1)] {
            work.owe(file(2), cut(truncations, from));
            work.finish(file(2)).await.unwrap();
        }
        // Not durable: the target made nothing durable since.
        let target = restarted(bench, target).await;
        let work = TargetWork::new(&target);
        work.owe(file(2), cut(4, 1));
        work.owe(file(2), cut(3, 2 * BLOCKS));
        drop(work.turn(file(2)).await.unwrap());
        assert_eq!(fills(&target, chunk_key(2, 0)).await[..3], [1, 0, 0]);
        assert_eq!(fills(&target, chunk_key(2, 1)).await[..3], [0, 0, 0]);
        let (data, crcs) = crate::tests::blocks_of(&[7]);
        let late = target.write(chunk_key(2, 0), 0, &data, &crcs, known(3), crate::tests::CLIENT).await;
        assert!(matches!(late, Err(ChunkError::Truncated { found: 4, sent: 3 })), "{late:?}");
        target.sync().await.unwrap();
        assert_clean(bench, &target).await;
    });
}

#[test]
fn a_file_that_is_removed_leaves_nothing_and_may_be_removed_again() {
    on_a_target(async |bench, target, work| {
        for index in [0, 7, 900] {
            write(&target, chunk_key(2, index), 0, &[1]).await;
        }
        write(&target, chunk_key(3, 0), 0, &[1]).await;
        target.commit_all().await.unwrap();
        let found = work.inodes_from(Ino(0), Ino(9)).await.unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [Ino(2), Ino(3)]);
        work.owe(file(2), cut(3, 0));
        for _ in 0..2 {
            work.remove(file(2)).await.unwrap();
            target.sync().await.unwrap();
            let found = work.inodes_from(Ino(0), Ino(9)).await.unwrap();
            assert_eq!(found.into_iter().collect::<Vec<_>>(), [Ino(3)]);
        }
        assert_eq!(target.held_blocks(&[file(2), file(3)]).await.unwrap(), [0, 1]);
        assert_clean(bench, &target).await;
    });
}

#[test]
fn requests_about_a_file_wait_while_it_is_held() {
    on_a_target(async |bench, _, work| {
        let soon = Duration::from_millis(10);
        let running = work.turn(file(2)).await.unwrap();
        assert!(timeout(&bench.env, soon, work.hold(file(2))).await.is_none(), "a request is executed");
        drop(running);
        let hold = work.hold(file(2)).await;
        assert!(timeout(&bench.env, soon, work.turn(file(2))).await.is_none());
        drop(work.turn(file(3)).await.unwrap());
        drop(hold);
        drop(work.turn(file(2)).await.unwrap());
    });
}

/// A truncation of a file of which a target has nothing leaves no row, and is not forgotten: whoever writes
/// next brings the generation along.
#[test]
fn a_target_without_a_part_of_a_file_learns_the_generation_from_the_next_write() {
    struct Told(u64);
    impl crate::Knows for Told {
        fn known(&self) -> Known {
            known(self.0)
        }

        fn as_of(&self) -> crate::AsOf {
            crate::AsOf { queued: 9, truncations: 6 }
        }
    }
    on_a_target(async |bench, target, work| {
        work.owe(file(2), cut(6, 0));
        work.finish(file(2)).await.unwrap();
        target.commit_all().await.unwrap();
        assert!(bench.kv.get(FileRow::key(file(2), Birth::FIRST)).await.unwrap().is_none());
        let (data, crcs) = crate::tests::blocks_of(&[7]);
        let write = async |sent: u64| {
            target.write(chunk_key(2, 0), 0, &data, &crcs, Told(sent), crate::tests::CLIENT).await
        };
        assert!(matches!(write(5).await, Err(ChunkError::Truncated { found: 6, sent: 5 })));
        write(6).await.unwrap();
        target.commit(file(2), false).await.unwrap();
        let row = bench.kv.get(FileRow::key(file(2), Birth::FIRST)).await.unwrap().unwrap();
        let row = FileRow::decode(&row).unwrap();
        assert_eq!((row.truncations, row.owner, row.owner_number), (6, OWNER, 9));
        // Changes of the owner up to there are in what was named.
        let other = Owner { uid: 7, ..OWNER };
        for (number, uid) in [(8, OWNER.uid), (9, OWNER.uid), (10, 7), (10, 7), (9, 7)] {
            work.set_owner_as_of(file(2), other, number).await.unwrap();
            let row = bench.kv.get(FileRow::key(file(2), Birth::FIRST)).await.unwrap().unwrap();
            assert_eq!(FileRow::decode(&row).unwrap().owner.uid, uid, "change {number}");
        }
        assert_clean(bench, &target).await;
    });
}

#[test]
fn a_truncation_of_a_file_that_was_only_read_gives_it_to_nobody() {
    on_a_target(async |bench, target, work| {
        // A hole of a file of which nothing is here.
        assert_eq!(fills(&target, chunk_key(2, 1)).await[..1], [0]);
        work.owe(file(2), cut(5, 0));
        work.finish(file(2)).await.unwrap();
        assert!(work.inodes_from(file(2).ino, Ino(file(2).ino.0 + 1)).await.unwrap().is_empty());
        let (data, crcs) = crate::tests::blocks_of(&[7]);
        target.write(chunk_key(2, 1), 0, &data, &crcs, known(5), crate::tests::CLIENT).await.unwrap();
        target.commit(file(2), false).await.unwrap();
        let state = target.cache.file(file(2)).await.unwrap();
        assert_eq!((state.owner(), state.truncations()), (Some(OWNER), 5));
        assert_clean(bench, &target).await;
    });
}

#[test]
fn a_change_of_the_owner_waits_for_a_truncation() {
    on_a_target(async |bench, target, work| {
        write(&target, chunk_key(2, 0), 0, &[1, 1]).await;
        target.commit(file(2), false).await.unwrap();
        let hold = work.hold(file(2)).await;
        work.owe(file(2), cut(5, 1));
        let owner = Owner { uid: 77, ..OWNER };
        let soon = timeout(&bench.env, Duration::from_secs(1), work.set_owner_as_of(file(2), owner, 6)).await;
        assert!(soon.is_none(), "the file is held");
        drop(hold);
        work.set_owner_as_of(file(2), owner, 6).await.unwrap();
        assert_eq!(fills(&target, chunk_key(2, 0)).await[..2], [1, 0], "it was owed");
        let state = target.cache.file(file(2)).await.unwrap();
        assert_eq!((state.owner(), state.truncations()), (Some(owner), 5));
        assert_clean(bench, &target).await;
    });
}

/// Regression: a chunk whose first row was being committed was neither changed in memory nor in a row, and a
/// truncation left it out.
#[test]
fn a_truncation_finds_a_chunk_whose_first_row_is_on_its_way() {
    on_a_target(async |bench, target, work| {
        for index in 0..3 {
            write(&target, chunk_key(2, index), 0, &[1, 1]).await;
        }
        work.owe(file(2), cut(5, BLOCKS));
        let commit = target.commit(file(2), false);
        // It runs up to the flush of its data.
        let mut commit = std::pin::pin!(commit);
        let begun = timeout(&bench.env, Duration::from_nanos(1), &mut commit).await.is_some();
        let chunk = target.cache.peek(chunk_key(2, 2)).unwrap();
        assert!(!begun && chunk.borrow().is_clean(), "its changes were taken");
        let (cut, committed) = futures_util::future::join(work.finish(file(2)), commit).await;
        cut.unwrap();
        committed.unwrap();
        assert_eq!(fills(&target, chunk_key(2, 0)).await[..2], [1, 1]);
        for index in 1..3 {
            assert_eq!(fills(&target, chunk_key(2, index)).await[..2], [0, 0], "chunk {index}");
        }
        target.sync().await.unwrap();
        assert_clean(bench, &target).await;
    });
}
