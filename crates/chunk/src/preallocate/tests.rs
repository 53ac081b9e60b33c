#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]

use super::*;
use crate::tests::{
    CHUNK, assert_clean, chunk_key, extent, file, fills, known, on_a_volume, preallocated, write,
};
use penstock_base::ErrorKind;

#[test]
fn blocks_without_space_get_it_and_the_others_keep_their_data() {
    // Chunk 0 has 0..4 with data and 4..6 preallocated in its row, and 5..8 dirty. Columns: a range; used
    // blocks and contents after it is preallocated; the same after it is zeroed.
    type After = (u64, &'static [u8]);
    let cases: [(Range<u64>, After, After); 6] = [
        (0..0, (8, &[1, 1, 1, 1, 0, 2, 2, 2]), (8, &[1, 1, 1, 1, 0, 2, 2, 2])),
        (0..4, (8, &[1, 1, 1, 1, 0, 2, 2, 2]), (8, &[0, 0, 0, 0, 0, 2, 2, 2])),
        (2..7, (8, &[1, 1, 1, 1, 0, 2, 2, 2]), (8, &[1, 1, 0, 0, 0, 0, 0, 2])),
        (7..12, (12, &[1, 1, 1, 1, 0, 2, 2, 2]), (12, &[1, 1, 1, 1, 0, 2, 2, 0])),
        (10..40, (38, &[1, 1, 1, 1, 0, 2, 2, 2]), (38, &[1, 1, 1, 1, 0, 2, 2, 2])),
        (0..48, (48, &[1, 1, 1, 1, 0, 2, 2, 2]), (48, &[0; 8])),
    ];
    for (blocks, kept, zeroed) in cases {
        for (zero, (used, data)) in [(false, kept), (true, zeroed)] {
            on_a_volume(async |bench| {
                let what = format!("{blocks:?}, zeros: {zero}");
                let key = chunk_key(2, 0);
                bench.put_map(key, &[extent(0, 4, 50), preallocated(4, 2, 54)]).await;
                bench.put_marks(&[50..56]).await;
                let (content, crcs) = crate::tests::blocks_of(&[1; 4]);
                bench.volume.write(50, &content, &crcs).await.unwrap();
                let target = bench.target().await;
                write(&target, key, 5, &[2; 3]).await;
                target.preallocate(file(2), blocks.clone(), zero, known(0)).await.unwrap();
                let used_now = || bench.volume.blocks() - target.usage().free_blocks;
                assert_eq!(used_now(), used, "{what}");
                for _ in 0..2 {
                    let found = fills(&target, key).await;
                    assert_eq!(found[..8], *data, "{what}");
                    assert!(found[8..].iter().all(|fill| *fill == 0), "{what}");
                    assert_clean(bench, &target).await;
                    assert_eq!(used_now(), used, "{what}: every block has one reservation or place");
                }
                // The blocks need no further space.
                for key in (0..3).map(|index| chunk_key(2, index)) {
                    let inside = target.within(key, &blocks);
                    if !inside.is_empty() {
                        write(&target, key, inside.start, &vec![9; inside.len()]).await;
                    }
                }
                assert_eq!(used_now(), used, "{what}: a write of all of it");
                assert_clean(bench, &target).await;
            });
        }
    }
}

#[test]
fn the_part_of_a_range_in_a_chunk_is_counted_from_its_start() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        for (index, blocks, expected) in [
            (0, 0..16, 0..16),
            (0, 3..40, 3..16),
            (1, 3..40, 0..16),
            (2, 3..40, 0..8),
            (3, 3..40, 0..0),
            (1, 0..5, 0..0),
            (1, 20..20, 4..4),
            (u64::MAX, 0..u64::MAX, 0..0),
        ] {
            let found = target.within(chunk_key(2, index), &blocks);
            assert_eq!(found, expected, "{blocks:?} in chunk {index}");
        }
    });
}

#[test]
fn space_is_given_to_all_of_a_range_or_to_none_of_it() {
    on_a_volume(async |bench| {
        let blocks = bench.volume.blocks();
        let (key, most) = (chunk_key(2, 0), blocks - blocks / 50);
        let target = bench.target().await;
        write(&target, key, 0, &[1; 4]).await;
        for (range, expected) in [
            (0..most + 1, false),
            (4..most + 1, false),
            (0..most + 1, false),
            // Its first four blocks have space.
            (0..most, true),
            (0..most, true),
            (most..most + 1, false),
        ] {
            let free = target.usage().free_blocks;
            match target.preallocate(file(2), range.clone(), false, known(0)).await {
                Ok(()) => assert!(expected, "{range:?}"),
                Err(error) => {
                    assert!(!expected, "{range:?}: {error}");
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{range:?}");
                    assert_eq!(target.usage().free_blocks, free, "{range:?}");
                }
            }
        }
        assert_eq!(target.usage().free_blocks, blocks / 50);
        assert_clean(bench, &target).await;
        assert_eq!(fills(&target, key).await[..5], [1, 1, 1, 1, 0]);
    });
}

#[test]
fn space_that_waits_for_a_commit_is_found() {
    on_a_volume(async |bench| {
        let blocks = bench.volume.blocks();
        let most = blocks - blocks / 50;
        let target = bench.target().await;
        target.preallocate(file(2), 0..most, false, known(0)).await.unwrap();
        target.commit(file(2), false).await.unwrap();
        target.punch(file(2), 0..most, 0).await.unwrap();
        assert_eq!(target.usage().free_blocks, blocks - most, "the rows still have all of it");
        target.preallocate(file(3), 0..most, false, known(0)).await.unwrap();
        assert_eq!(target.usage().free_blocks, blocks - most);
        target.punch(file(3), 0..most, 0).await.unwrap();
        write(&target, chunk_key(4, 0), 0, &[1; CHUNK as usize]).await;
        assert_clean(bench, &target).await;
        assert_eq!(target.usage().free_blocks, blocks - u64::from(CHUNK));
    });
}

#[test]
fn a_hole_frees_blocks_in_memory_and_on_the_volume() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        for index in [0, 1, 3] {
            write(&target, chunk_key(2, index), 0, &[1; CHUNK as usize]).await;
        }
        target.commit(file(2), false).await.unwrap();
        write(&target, chunk_key(2, 4), 0, &[2; 6]).await;
        write(&target, chunk_key(2, 0), 0, &[3; 4]).await;
        // Columns: a range, and the used blocks after its hole is committed. Each case follows the last.
        for (blocks, used) in [
            (5..5, 54),
            (0..2, 52),
            (0..2, 52),
            (15..17, 50),
            (32..48, 50),
            (50..66, 34),
            (200..u64::MAX, 34),
            (0..u64::MAX, 0),
        ] {
            target.punch(file(2), blocks.clone(), 0).await.unwrap();
            assert_clean(bench, &target).await;
            assert_eq!(bench.volume.blocks() - target.usage().free_blocks, used, "{blocks:?}");
            let found = fills(&target, chunk_key(2, 0)).await;
            assert!(
                blocks.start >= 16 || found[blocks.start as usize] == 0 || blocks.is_empty(),
                "{blocks:?}"
            );
        }
    });
}
