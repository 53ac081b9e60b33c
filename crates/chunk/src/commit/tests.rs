use super::*;
use crate::rows::{Extent, all_groups, all_maps, decode_group, map_range};
use crate::target::Target;
use crate::tests::{
    Bench, CHUNK, STRIPE, assert_clean, chunk_key, extent, extents_of, file, fills, known, on_a_volume,
    preallocated, write,
};
use penstock_base::{Birth, ErrorKind};
use penstock_kv::KvRead;

/// The extents in a chunk's row; `None` if there is no row.
async fn row(bench: &Bench, key: ChunkKey) -> Option<Vec<Extent>> {
    let value = bench.kv.get(key.row(Birth::FIRST)).await.unwrap();
    value.map(|value| extents_of(&value))
}

/// Blocks that the rows mark as used.
async fn marked(bench: &Bench) -> u64 {
    let (from, until) = all_groups();
    let rows = bench.kv.scan(from, until, usize::MAX).await.unwrap();
    let words = |value: &[u8]| decode_group(value, crate::rows::GROUP_WORDS).unwrap();
    rows.iter().flat_map(|(_, value)| words(value)).map(|word| u64::from(word.count_ones())).sum()
}

/// Stops a target, loses everything that its store has not flushed, and opens it again.
async fn crash(bench: &Bench, target: Rc<Target>) -> Rc<Target> {
    target.stop();
    bench.kv.crash();
    bench.target().await
}

#[test]
fn a_commit_is_durable_unless_it_is_deferred() {
    on_a_volume(async |bench| {
        // A deferred commit becomes durable with the next flush of the store. Columns: deferred, flushed, and
        // the fill after a crash.
        for (deferred, flushed, expected) in [(false, false, 4), (true, false, 0), (true, true, 4)] {
            let target = bench.target().await;
            let key = chunk_key(10 + u64::from(deferred) + 2 * u64::from(flushed), 0);
            write(&target, key, 2, &[4; 3]).await;
            target.commit(key.file, deferred).await.unwrap();
            if flushed {
                bench.kv.flush().await.unwrap();
            }
            let target = crash(bench, target).await;
            let found = fills(&target, key).await;
            assert_eq!(found[1..6], [0, expected, expected, expected, 0], "{deferred} {flushed}");
            assert_clean(bench, &target).await;
        }
    });
}

#[test]
fn rows_and_bits_change_together() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let key = chunk_key(2, 1);
        assert_eq!((row(bench, key).await, marked(bench).await), (None, 0));
        write(&target, key, 0, &[1; 3]).await;
        assert_eq!((row(bench, key).await, marked(bench).await), (None, 0), "it is in memory only");
        target.commit(key.file, false).await.unwrap();
        assert_eq!(row(bench, key).await.unwrap(), [extent(0, 3, 0)]);
        assert_eq!(marked(bench).await, 3);
        // An overwrite in place changes neither.
        let commits = bench.kv.usage().commits;
        write(&target, key, 1, &[2]).await;
        target.commit(key.file, false).await.unwrap();
        assert_eq!(bench.kv.usage().commits, commits);
        target.preallocate(key.file, 16..21, false, known(0)).await.unwrap();
        target.commit(key.file, false).await.unwrap();
        assert_eq!(row(bench, key).await.unwrap(), [extent(0, 3, 0), preallocated(3, 2, 3)]);
        assert_eq!(marked(bench).await, 5);
        target.punch(key.file, 16..32, 0).await.unwrap();
        target.commit(key.file, false).await.unwrap();
        assert_eq!((row(bench, key).await, marked(bench).await), (None, 0));
        assert_eq!(target.usage().free_blocks, bench.volume.blocks());
    });
}

#[test]
fn freed_blocks_are_free_once_the_commit_is_durable() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let key = chunk_key(2, 0);
        write(&target, key, 0, &[1; 5]).await;
        target.commit(key.file, false).await.unwrap();
        let used = target.usage().free_blocks;
        target.punch(key.file, 1..4, 0).await.unwrap();
        assert_eq!(target.usage().free_blocks, used, "the row still has them");
        target.commit(key.file, true).await.unwrap();
        assert_eq!(target.usage().free_blocks, used, "after a crash the row may have them again");
        target.sync().await.unwrap();
        assert_eq!(target.usage().free_blocks, used + 3);
        target.sync().await.unwrap();
        assert_eq!(target.usage().free_blocks, used + 3, "they are freed once");
    });
}

#[test]
fn blocks_freed_before_a_commit_are_free_at_once() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let key = chunk_key(2, 0);
        target.preallocate(key.file, 0..6, false, known(0)).await.unwrap();
        write(&target, key, 8, &[1; 2]).await;
        assert_eq!(target.usage().free_blocks, bench.volume.blocks() - 8);
        target.punch(key.file, 2..9, 0).await.unwrap();
        assert_eq!(target.usage().free_blocks, bench.volume.blocks() - 3);
        assert_clean(bench, &target).await;
        assert_eq!(row(bench, key).await.unwrap().iter().map(|extent| extent.count).sum::<u32>(), 3);
    });
}

/// A change of a chunk that has 0..8 with data and 8..12 preallocated in its row.
type Change = (&'static str, fn(Rc<Target>) -> penstock_base::LocalBoxFuture<'static, ()>);

#[test]
fn a_commit_that_failed_is_completed_by_the_next_one() {
    const KEY: ChunkKey = ChunkKey { file: FileId { branch: penstock_base::Branch(0), ino: INO }, index: 0 };
    const INO: penstock_base::Ino = penstock_base::Ino(7);
    let changes: [Change; 7] = [
        ("new blocks", |target| Box::pin(async move { write(&target, KEY, 12, &[5; 2]).await })),
        ("blocks in place", |target| Box::pin(async move { write(&target, KEY, 3, &[6; 2]).await })),
        ("preallocated blocks", |target| Box::pin(async move { write(&target, KEY, 9, &[6; 2]).await })),
        ("a full chunk", |target| {
            Box::pin(async move { write(&target, KEY, 0, &[7; CHUNK as usize]).await })
        }),
        ("a hole", |target| Box::pin(async move { target.punch(KEY.file, 2..10, 0).await.unwrap() })),
        ("no chunk", |target| Box::pin(async move { target.punch(KEY.file, 0..16, 0).await.unwrap() })),
        ("zeros", |target| {
            Box::pin(async move { target.preallocate(KEY.file, 4..14, true, known(0)).await.unwrap() })
        }),
    ];
    for (what, change) in changes {
        on_a_volume(async |bench| {
            let target = bench.target().await;
            write(&target, KEY, 0, &[1; 8]).await;
            target.preallocate(KEY.file, 8..12, false, known(0)).await.unwrap();
            target.commit(KEY.file, false).await.unwrap();
            let before = row(bench, KEY).await;
            change(target.clone()).await;
            let wanted = fills(&target, KEY).await;
            bench.kv.fail_after(0);
            for _ in 0..2 {
                match target.commit(KEY.file, false).await {
                    Ok(()) => assert_eq!(what, "blocks in place", "all others change the row"),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Internal, "{what}"),
                }
                assert_eq!(row(bench, KEY).await, before, "{what}");
                assert_eq!(fills(&target, KEY).await, wanted, "{what}");
            }
            bench.kv.fail_after(u64::MAX);
            assert_clean(bench, &target).await;
            let used = marked(bench).await;
            assert_eq!(target.usage().free_blocks, bench.volume.blocks() - used, "{what}");
            let target = crash(bench, target).await;
            assert_eq!(fills(&target, KEY).await, wanted, "{what}");
            assert_eq!(target.usage().free_blocks, bench.volume.blocks() - used, "{what}");
        });
    }
}

#[test]
fn rows_of_many_chunks_are_committed_in_steps() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        for (chunks, transactions) in [(1, 1), (ROWS_TOGETHER, 1), (ROWS_TOGETHER + 1, 2)] {
            let ino = 50 + chunks as u64;
            for index in 0..chunks as u64 {
                write(&target, chunk_key(ino, index), 0, &[3]).await;
            }
            let before = bench.kv.usage().commits;
            target.commit(file(ino), false).await.unwrap();
            assert_eq!(bench.kv.usage().commits - before, transactions, "{chunks} chunks");
        }
        let (from, until) = all_maps();
        let rows = bench.kv.scan(from, until, usize::MAX).await.unwrap();
        assert_eq!(rows.len(), 2 * ROWS_TOGETHER + 2);
        // A step fails: the chunks of those before it are committed, all others later.
        for succeeding in 0..2 {
            let ino = 9 + succeeding;
            for index in 0..=ROWS_TOGETHER as u64 {
                write(&target, chunk_key(ino, index), 0, &[4]).await;
            }
            let (from, until) = map_range(file(ino), 0);
            let rows = async || bench.kv.keys(from.clone(), until.clone(), usize::MAX).await.unwrap().len();
            bench.kv.fail_after(succeeding);
            assert!(target.commit(file(ino), false).await.is_err());
            assert_eq!(rows().await, succeeding as usize * ROWS_TOGETHER);
            bench.kv.fail_after(u64::MAX);
            assert_clean(bench, &target).await;
            assert_eq!(rows().await, ROWS_TOGETHER + 1);
        }
    });
}

#[test]
fn everything_is_committed_without_a_request_within_two_intervals() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let keys = [chunk_key(2, 0), chunk_key(3, 5)];
        for key in keys {
            write(&target, key, 0, &[8; 2]).await;
        }
        bench.env.sleep(INTERVAL * 2).await;
        let target = crash(bench, target).await;
        for key in keys {
            assert_eq!(fills(&target, key).await[..3], [8, 8, 0], "{key:?}");
        }
    });
}

#[test]
fn full_chunks_are_written_as_stripes_and_others_through_the_log() {
    on_a_volume(async |bench| {
        // Columns: first block and number of blocks of a write to a full chunk; whole, rewritten and logged
        // chunks.
        for (first, count, expected) in
            [(0, CHUNK, (1, 0, 0)), (0, 2, (1, 1, 0)), (3, 1, (0, 0, 0)), (0, CHUNK - 1, (1, 1, 0))]
        {
            let target = bench.target().await;
            let key = chunk_key(2, u64::from(first + 100 * count));
            write(&target, key, 0, &[1; CHUNK as usize]).await;
            target.commit(key.file, false).await.unwrap();
            let before = target.counts();
            write(&target, key, first, &vec![2; count as usize]).await;
            target.commit(key.file, false).await.unwrap();
            let after = target.counts();
            let found = (
                after.whole_chunks - before.whole_chunks,
                after.rewritten_chunks - before.rewritten_chunks,
                after.logged_chunks - before.logged_chunks,
            );
            assert_eq!(found, expected, "{first}+{count}");
            let stripes = row(bench, key).await.unwrap().iter().map(|extent| u64::from(extent.count)).sum();
            assert_eq!(2 * STRIPE, stripes, "the chunk is still full");
            assert_clean(bench, &target).await;
            target.stop();
        }
    });
}

/// A commit of everything that runs beside another one says that all is committed only if it is.
#[test]
fn a_commit_of_everything_waits_for_changes_that_another_commit_has_taken() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let key = chunk_key(2, 0);
        write(&target, key, 0, &[1; 3]).await;
        bench.kv.fail_after(0);
        let periodic = Rc::new(RefCell::new(None));
        let (place, other) = (periodic.clone(), target.clone());
        bench
            .env
            .spawn("periodic", Box::pin(async move { *place.borrow_mut() = Some(other.commit_all().await) }));
        // Until the changes are taken.
        let dirty =
            || target.commits.cache.dirty_blocks() > 0 || !target.commits.cache.changed_files().is_empty();
        while dirty() {
            bench.env.sleep(Duration::from_nanos(100)).await;
        }
        assert!(periodic.borrow().is_none(), "it runs");
        let result = target.commit_all().await;
        // As a repair does next: nothing may be in memory only.
        let _quiet = bench.gate.quiesce().await;
        assert!(result.is_err() || target.commits.cache.changed_files().is_empty(), "{result:?}");
    });
}
