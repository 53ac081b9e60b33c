#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]

use crate::tests::{CHUNK, chunk_key, extent, file, on_a_volume, preallocated, write};
use penstock_base::Birth;
use std::ops::Range;

#[test]
fn data_and_holes_are_found_in_rows_and_in_memory() {
    on_a_volume(async |bench| {
        let chunk = u64::from(CHUNK);
        // Data in 2..4 and, beside a preallocated block, in 5..6; chunk 1 has no row; chunk 2 is full.
        bench.put_map(chunk_key(2, 0), &[extent(2, 2, 50), preallocated(4, 1, 52), extent(5, 1, 53)]).await;
        bench.put_map(chunk_key(2, 2), &[extent(0, CHUNK, 100)]).await;
        bench.put_map(chunk_key(2, 9), &[preallocated(0, CHUNK, 200)]).await;
        bench.put_map(chunk_key(3, 0), &[extent(0, 1, 300)]).await;
        bench.put_marks(&[50..54, 100..116, 200..216, 300..301]).await;
        let target = bench.target().await;
        // Dirty blocks: one behind the row's blocks, and one in a chunk without a row.
        write(&target, chunk_key(2, 0), 10, &[1]).await;
        write(&target, chunk_key(2, 3), 1, &[1]).await;
        // Columns: a range, the first block with data in it, and the first hole.
        let cases: [(Range<u64>, u64, u64); 14] = [
            (0..100, 2, 0),
            (2..100, 2, 4),
            (4..100, 5, 4),
            (5..100, 5, 6),
            (6..100, 10, 6),
            (6..10, 10, 6),
            (6..9, 9, 6),
            (10..100, 10, 11),
            (11..100, 2 * chunk, 11),
            (2 * chunk..100, 2 * chunk, 3 * chunk),
            (2 * chunk..3 * chunk, 2 * chunk, 3 * chunk),
            (3 * chunk..100, 3 * chunk + 1, 3 * chunk),
            (3 * chunk + 2..u64::MAX, u64::MAX, 3 * chunk + 2),
            (7..7, 7, 7),
        ];
        for (blocks, data, hole) in cases {
            let found = |hole| target.seek(file(2), blocks.clone(), hole);
            assert_eq!(found(false).await.unwrap(), data, "data in {blocks:?}");
            assert_eq!(found(true).await.unwrap(), hole, "a hole in {blocks:?}");
        }
        // A file without chunks is one hole.
        for (hole, expected) in [(false, 9), (true, 3)] {
            assert_eq!(target.seek(file(4), 3..9, hole).await.unwrap(), expected);
        }
    });
}

#[test]
fn a_search_reports_a_row_that_cannot_be_read_only_if_it_needs_it() {
    on_a_volume(async |bench| {
        bench.put_map(chunk_key(2, 0), &[extent(3, 1, 50)]).await;
        bench.put_row(chunk_key(2, 1).row(Birth::FIRST), vec![0xff; 7]).await;
        bench.put_marks(&[50..51]).await;
        let target = bench.target().await;
        for (blocks, hole, is_read) in
            [(0..99, false, false), (0..99, true, false), (4..99, false, true), (16..99, true, true)]
        {
            let found = target.seek(file(2), blocks.clone(), hole).await;
            assert_eq!(found.is_err(), is_read, "{blocks:?} {hole}: {found:?}");
        }
    });
}

/// Damage: a row whose key names a chunk that no file has.
#[test]
fn a_search_ends_at_a_row_of_a_chunk_that_no_file_has() {
    on_a_volume(async |bench| {
        for index in [u64::MAX, u64::MAX / u64::from(CHUNK), u64::MAX / u64::from(CHUNK) + 1] {
            bench.put_map(chunk_key(2, index), &[extent(1, 1, 50)]).await;
        }
        bench.put_marks(&[50..51]).await;
        let target = bench.target().await;
        for hole in [false, true] {
            let found = target.seek(file(2), 0..99, hole).await.unwrap();
            assert_eq!(found, if hole { 0 } else { 99 });
        }
    });
}

#[test]
fn a_search_ends_at_a_row_of_the_last_chunk() {
    on_a_volume(async |bench| {
        bench.put_map(chunk_key(2, u64::MAX), &[extent(1, 1, 50)]).await;
        bench.put_marks(&[50..51]).await;
        let target = bench.target().await;
        assert_eq!(target.seek(file(2), 0..99, false).await.unwrap(), 99);
    });
}
