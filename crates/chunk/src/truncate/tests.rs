use super::*;
use crate::rows::{FileRow, Owner, all_files};
use crate::tests::{
    CHUNK, CLIENT, OWNER, assert_clean, blocks_of, chunk_key, extent, file, fills, known, on_a_volume,
    preallocated, write,
};
use penstock_base::{Birth, Branch, ErrorKind};
use penstock_kv::KvRead;
use std::time::Duration;

#[test]
fn a_size_frees_blocks_only_if_it_is_smaller() {
    for (size, before, expected) in [
        (0, 1, Behind::Dropped),
        (1, 1, Behind::Preallocated),
        (2, 1, Behind::Preallocated),
        (0, 0, Behind::Preallocated),
        (u64::MAX - 1, u64::MAX, Behind::Dropped),
    ] {
        assert_eq!(Behind::of(size, before), expected, "{before} to {size}");
    }
}

#[test]
fn steps_stop_at_chunks_that_exist_and_never_change_more_than_asked() {
    on_a_volume(async |bench| {
        let chunk = u64::from(CHUNK);
        for index in [0, 1, 4, 6] {
            bench.put_map(chunk_key(2, index), &[extent(0, 1, 10 + index)]).await;
        }
        bench.put_map(chunk_key(1, 50), &[]).await;
        bench.put_map(chunk_key(3, 0), &[]).await;
        bench.put_marks(&[10..12, 14..15, 16..17]).await;
        let target = bench.target().await;
        // A chunk in memory counts like one with a row.
        write(&target, chunk_key(2, 9), 0, &[1]).await;
        let cases: [(u64, usize, &[u64]); 10] = [
            (0, 1, &[9, 6, 4, 1]),
            (0, 2, &[6, 1]),
            (0, 3, &[4]),
            (0, 5, &[]),
            (0, 100, &[]),
            (chunk, 1, &[9, 6, 4]),
            (chunk - 1, 1, &[9, 6, 4, 1]),
            (4 * chunk + 1, 2, &[6]),
            (9 * chunk, 1, &[]),
            (u64::MAX, 1, &[]),
        ];
        for (first_block, most, expected) in cases {
            let stops = target.truncate_steps(file(2), first_block, most).await.unwrap();
            let expected: Vec<u64> = expected.iter().map(|index| index * chunk).collect();
            assert_eq!(stops, expected, "to {first_block} in steps of {most}");
        }
        assert_eq!(target.truncate_steps(file(4), 0, 1).await.unwrap(), []);
        // Regression: the last step freed all blocks of a file without a first chunk, and so deleted its row
        // before its inode was gone.
        for index in [3, 5] {
            write(&target, chunk_key(5, index), 0, &[1]).await;
        }
        assert_eq!(target.truncate_steps(file(5), 0, 1).await.unwrap(), [5 * chunk]);
        assert_eq!(target.truncate_steps(file(5), 0, 2).await.unwrap(), []);
        // Regression: chunks that were punched hold nothing, and their rows are still to be deleted.
        target.commit_all().await.unwrap();
        target.punch(file(5), 0..6 * chunk, 0).await.unwrap();
        assert_eq!(target.truncate_steps(file(5), 0, 1).await.unwrap(), [5 * chunk]);
    });
}

#[test]
fn blocks_behind_the_end_read_as_zeros_and_are_kept_or_freed() {
    const D: u8 = 5;
    // Chunk 0 has 0..6 with data and 6..8 preallocated in its row, and 7..10 dirty; chunk 1 has 0..2 in its
    // row; chunk 3 has 0..2 dirty. Columns: the range to truncate and its treatment; the used blocks of
    // chunks 0 and 1 after it, and the blocks with data in each of them.
    let chunk = u64::from(CHUNK);
    type Case = (Range<u64>, Behind, u64, [Range<usize>; 2]);
    let cases: [Case; 7] = [
        (0..u64::MAX, Behind::Dropped, 0, [0..0, 0..0]),
        (0..u64::MAX, Behind::Preallocated, 10, [0..0, 0..0]),
        (3..u64::MAX, Behind::Dropped, 3, [0..3, 0..0]),
        (3..u64::MAX, Behind::Preallocated, 10, [0..3, 0..0]),
        (3..chunk, Behind::Dropped, 5, [0..3, 0..2]),
        (chunk + 1..u64::MAX, Behind::Dropped, 11, [0..10, 0..1]),
        (2 * chunk..u64::MAX, Behind::Dropped, 12, [0..10, 0..2]),
    ];
    for (blocks, behind, used, data) in cases {
        on_a_volume(async |bench| {
            let what = format!("{blocks:?} {behind:?}");
            let [first, second, last] = [0, 1, 3].map(|index| chunk_key(2, index));
            bench.put_map(first, &[extent(0, 6, 50), preallocated(6, 2, 56)]).await;
            bench.put_map(second, &[extent(0, 2, 70)]).await;
            bench.put_marks(&[50..58, 70..72]).await;
            let (content, crcs) = blocks_of(&[D; 6]);
            bench.volume.write(50, &content, &crcs).await.unwrap();
            let (content, crcs) = blocks_of(&[D; 2]);
            bench.volume.write(70, &content, &crcs).await.unwrap();
            let target = bench.target().await;
            write(&target, first, 7, &[D; 3]).await;
            write(&target, last, 0, &[D; 2]).await;
            let mut writes = WriteSet::new();
            writes.put(vec![0x70], vec![1]);
            let behind_all = blocks.end == u64::MAX;
            target.truncate(file(2), blocks.clone(), behind, known(4), writes).await.unwrap();
            assert_eq!(bench.kv.get(vec![0x70]).await.unwrap(), Some(vec![1]), "{what}");
            for (key, data) in [(first, data[0].clone()), (second, data[1].clone())] {
                let found = fills(&target, key).await;
                let mut expected: Vec<u8> =
                    (0..CHUNK as usize).map(|at| D * u8::from(data.contains(&at))).collect();
                if key == first && data.end == 10 {
                    expected[6] = 0;
                }
                assert_eq!(found, expected, "{what}: chunk {}", key.index);
            }
            assert_eq!(fills(&target, last).await[0], if behind_all { 0 } else { D }, "{what}");
            assert_clean(bench, &target).await;
            let used_now = bench.volume.blocks() - target.usage().free_blocks;
            assert_eq!(used_now, used + if behind_all { 0 } else { 2 }, "{what}");
        });
    }
}

#[test]
fn a_write_from_before_a_truncation_is_refused() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let key = chunk_key(2, 0);
        let (data, crcs) = blocks_of(&[1]);
        let write = |generation| target.write(key, 0, &data, &crcs, known(generation), CLIENT);
        let truncate = |generation| {
            target.truncate(key.file, 0..u64::MAX, Behind::Dropped, known(generation), WriteSet::new())
        };
        // Columns: the generation of a truncation, and the lowest generation of a write that is accepted.
        for (truncated, lowest) in [(None, 0), (Some(3), 3), (Some(5), 5), (Some(4), 5), (Some(9), 9)] {
            if let Some(generation) = truncated {
                truncate(generation).await.unwrap();
            }
            write(lowest).await.unwrap();
            write(lowest + 1).await.unwrap();
            let Some(sent) = lowest.checked_sub(1) else { continue };
            let refusals = [
                write(sent).await,
                target.punch(key.file, 0..1, sent).await,
                target.preallocate(key.file, 0..1, true, known(sent)).await,
            ];
            for error in refusals.map(|result| result.unwrap_err()) {
                assert_eq!(error.kind(), ErrorKind::RefreshMap);
                let ChunkError::Truncated { found, sent: with } = error else { panic!("{error}") };
                assert_eq!((found, with), (lowest, sent));
            }
        }
        truncate(REMOVED).await.unwrap();
        write(u64::MAX - 1).await.unwrap_err();
        let (from, until) = all_files();
        assert_eq!(bench.kv.keys(from, until, 9).await.unwrap().len(), 0, "a removed file has no row");
        target.file_removed(key.file);
        write(0).await.unwrap();
    });
}

/// Regression: a target forgot the truncate generation of a file when it was opened again.
#[test]
fn a_write_from_before_a_truncation_is_refused_after_a_restart() {
    for is_written in [false, true] {
        on_a_volume(async |bench| {
            let target = bench.target().await;
            let key = chunk_key(2, 0);
            if is_written {
                write(&target, key, 0, &[1; 6]).await;
            }
            target.truncate(key.file, 2..u64::MAX, Behind::Dropped, known(7), WriteSet::new()).await.unwrap();
            target.commit_all().await.unwrap();
            target.stop();
            let target = bench.target().await;
            let (data, crcs) = blocks_of(&[3]);
            let late = target.write(key, 0, &data, &crcs, known(6), CLIENT).await;
            assert!(matches!(late, Err(ChunkError::Truncated { found: 7, sent: 6 })), "{late:?}");
            target.write(key, 0, &data, &crcs, known(7), CLIENT).await.unwrap();
            assert_clean(bench, &target).await;
        });
    }
}

#[test]
fn a_truncation_that_cannot_be_committed_changes_nothing() {
    for behind in [Behind::Dropped, Behind::Preallocated] {
        on_a_volume(async |bench| {
            let target = bench.target().await;
            let key = chunk_key(2, 0);
            write(&target, key, 0, &[1; 6]).await;
            target.commit(key.file, false).await.unwrap();
            target.preallocate(key.file, 6..9, false, known(0)).await.unwrap();
            write(&target, key, 8, &[2; 4]).await;
            let (before, free) = (fills(&target, key).await, target.usage().free_blocks);
            bench.kv.fail_after(0);
            let writes = WriteSet::new();
            let result = target.truncate(key.file, 2..u64::MAX, behind, known(7), writes).await;
            assert_eq!(result.unwrap_err().kind(), ErrorKind::Internal);
            bench.kv.fail_after(u64::MAX);
            assert_eq!(fills(&target, key).await, before, "{behind:?}");
            assert_eq!(target.usage().free_blocks, free, "{behind:?}");
            // A write with the older truncate generation is accepted.
            let (data, crcs) = blocks_of(&[3]);
            target.write(key, 3, &data, &crcs, known(0), CLIENT).await.unwrap();
            assert_clean(bench, &target).await;
            target.truncate(key.file, 2..u64::MAX, behind, known(7), WriteSet::new()).await.unwrap();
            assert_eq!(fills(&target, key).await[..3], [1, 1, 0], "{behind:?}");
            assert_clean(bench, &target).await;
        });
    }
}

#[test]
fn blocks_that_no_row_has_are_free_after_a_truncation_at_once() {
    // 0..20 are preallocated and 14..16 of them dirty; 24..26 are dirty. Columns: the first block to drop,
    // and the used blocks after the truncation.
    for (first_block, used) in [(26, 22), (25, 21), (20, 20), (10, 10), (0, 0)] {
        on_a_volume(async |bench| {
            let target = bench.target().await;
            let key = chunk_key(2, 0);
            target.preallocate(key.file, 0..20, false, known(0)).await.unwrap();
            write(&target, key, 14, &[1; 2]).await;
            write(&target, chunk_key(2, 1), 8, &[1; 2]).await;
            let writes = WriteSet::new();
            target
                .truncate(key.file, first_block..u64::MAX, Behind::Dropped, known(0), writes)
                .await
                .unwrap();
            assert_eq!(bench.volume.blocks() - target.usage().free_blocks, used, "to {first_block}");
            assert_clean(bench, &target).await;
            assert_eq!(bench.volume.blocks() - target.usage().free_blocks, used, "to {first_block}");
        });
    }
}

/// A damaged row may name a chunk that no file has. The removal of the file takes it too.
#[test]
fn a_removed_file_leaves_no_row() {
    for index in [1, 1 << 59, (1 << 60) - 1, 1 << 60, u64::MAX - 1, u64::MAX] {
        on_a_volume(async |bench| {
            bench.put_map(chunk_key(2, index), &[extent(0, 1, 10)]).await;
            bench.put_marks(&[10..11, 20..21]).await;
            let target = bench.target().await;
            target
                .truncate(file(2), 0..u64::MAX, Behind::Dropped, known(u64::MAX), WriteSet::new())
                .await
                .unwrap();
            let left = bench.kv.get(chunk_key(2, index).row(Birth::FIRST)).await.unwrap();
            assert_eq!(left, None, "chunk {index}");
        });
    }
}

/// A truncation names the owner as well: one that cannot be committed changes neither.
#[test]
fn a_truncation_counts_to_the_owner_that_it_names() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let (key, other) = (chunk_key(2, 0), Owner { uid: 7, ..OWNER });
        write(&target, key, 0, &[1; 6]).await;
        target.commit_all().await.unwrap();
        let account = |owner| target.accounts().get(&(Branch::MAIN, owner)).copied().unwrap_or(0);
        let cut = |blocks: u64, truncations| {
            let known = Known { truncations, owner: other };
            target.truncate(key.file, blocks..u64::MAX, Behind::Dropped, known, WriteSet::new())
        };
        bench.kv.fail_after(0);
        cut(4, 1).await.unwrap_err();
        bench.kv.fail_after(u64::MAX);
        assert_eq!((account(OWNER), account(other)), (6, 0));
        assert_eq!(target.held_blocks(&[key.file]).await.unwrap(), [6]);
        assert_clean(bench, &target).await;
        cut(4, 1).await.unwrap();
        assert_eq!((account(OWNER), account(other)), (0, 4));
        assert_clean(bench, &target).await;
        // A file without blocks keeps its truncate generation, and counts to nobody.
        cut(0, 2).await.unwrap();
        assert_eq!((account(OWNER), account(other)), (0, 0));
        let value = bench.kv.get(FileRow::key(key.file, Birth::FIRST)).await.unwrap().unwrap();
        let row = FileRow::decode(&value).unwrap();
        assert_eq!(row, FileRow { truncations: 2, blocks: 0, owner: other, owner_number: 0 });
        assert_clean(bench, &target).await;
    });
}

/// Regression: a hole that was read is a chunk in memory without a row. It took the place of the first chunk,
/// and the step before the last one deleted the row of the file.
#[test]
fn a_removal_in_steps_keeps_the_row_of_the_file_to_the_end() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let row = async || bench.kv.get(FileRow::key(file(5), Birth::FIRST)).await.unwrap();
        let cut = |from, generation| {
            target.truncate(file(5), from..u64::MAX, Behind::Dropped, known(generation), WriteSet::new())
        };
        cut(0, 3).await.unwrap();
        for index in [3, 4, 5] {
            write(&target, chunk_key(5, index), 0, &[7; 4]).await;
        }
        target.commit_all().await.unwrap();
        assert_eq!(fills(&target, chunk_key(5, 0)).await, [0; CHUNK as usize]);
        for stop in target.truncate_steps(file(5), 0, 1).await.unwrap() {
            cut(stop, REMOVED).await.unwrap();
            let found = FileRow::decode(&row().await.expect("the inode is there")).unwrap();
            assert_eq!(found.truncations, 3);
        }
        cut(0, REMOVED).await.unwrap();
        assert_eq!(row().await, None);
    });
}

/// Regression: changes that a commit has taken were not counted. If it fails, they come back.
#[test]
fn chunks_whose_commit_fails_are_truncated_in_steps() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        for index in 0..6 {
            write(&target, chunk_key(5, index), 0, &[7; 4]).await;
        }
        target.commit_all().await.unwrap();
        target.punch(file(5), 0..6 * u64::from(CHUNK), 0).await.unwrap();
        let hold = target.commits.hold().await;
        let steps = async {
            bench.env.sleep(Duration::from_millis(100)).await;
            // The commit has the changes, and waits.
            let fail = async {
                bench.kv.fail_after(0);
                drop(hold);
            };
            tokio::join!(target.truncate_steps(file(5), 0, 1), fail).0
        };
        let (committed, steps) = tokio::join!(target.commit(file(5), true), steps);
        committed.unwrap_err();
        bench.kv.fail_after(u64::MAX);
        let stops: Vec<u64> = (1..6).rev().map(|index| index * u64::from(CHUNK)).collect();
        assert_eq!(steps.unwrap(), stops, "six rows are to be deleted, one in a step");
    });
}
