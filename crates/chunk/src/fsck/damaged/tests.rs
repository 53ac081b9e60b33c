#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]

use super::*;
use crate::tests::{CHUNK, STRIPE, chunk_key, extent, on_a_volume, preallocated};
use penstock_base::Birth;
use penstock_drive::Io;

#[test]
fn blocks_that_follow_each_other_in_file_and_on_the_volume_are_one_run() {
    let mut runs = Vec::new();
    for (at, block) in [(0, 10), (1, 11), (2, 13), (3, 14), (5, 15), (6, 16), (9, 1)] {
        add_block(&mut runs, at, block);
    }
    assert_eq!(runs, [(0, 2, 10), (2, 2, 13), (5, 2, 15), (9, 1, 1)]);
}

#[test]
fn damaged_blocks_of_files_are_found_where_a_read_failed() {
    on_a_volume(async |bench| {
        let io = Io::new(Class::Client, "test.read");
        let chunk = u64::from(CHUNK);
        // Stripes 2 and 3 will be unreadable, stripe 4 stays. Blocks of them belong to two files.
        for (stripe, fill) in [(2, 0x42), (3, 0x43), (4, 0x44)] {
            bench.write_stripe(stripe, fill).await;
        }
        bench.put_map(chunk_key(2, 0), &[extent(0, 2, 2 * STRIPE), extent(2, 1, 4 * STRIPE)]).await;
        bench
            .put_map(chunk_key(2, 3), &[extent(4, 4, 3 * STRIPE - 2), preallocated(8, 1, 3 * STRIPE + 4)])
            .await;
        bench.put_map(chunk_key(5, 0), &[extent(0, 1, 3 * STRIPE + 5)]).await;
        bench.put_row(chunk_key(6, 0).row(Birth::FIRST), vec![1, 2]).await;
        bench.put_marks(&[2 * STRIPE..4 * STRIPE + 1]).await;
        let target = bench.target().await;
        assert!(target.damaged().await.unwrap().is_empty());
        bench.corrupt(0x42);
        bench.corrupt(0x43);
        assert!(target.damaged().await.unwrap().is_empty(), "nobody has tried to read them");
        let mut expected = DamagedRuns::new();
        for (stripe, runs) in [
            (2, [(2, vec![(0, 2, 2 * STRIPE), (3 * chunk + 4, 2, 3 * STRIPE - 2)])].as_slice()),
            (
                3,
                &[
                    (2, vec![(0, 2, 2 * STRIPE), (3 * chunk + 4, 4, 3 * STRIPE - 2)]),
                    (5, vec![(0, 1, 3 * STRIPE + 5)]),
                ],
            ),
        ] {
            assert!(bench.volume.read(stripe * STRIPE, STRIPE, io).await.is_err());
            expected.extend(runs.iter().map(|(ino, runs)| (Ino(*ino), runs.clone())));
            assert_eq!(target.damaged().await.unwrap(), expected, "stripe {stripe} was read");
        }
    });
}

/// Damage: a row whose key names a chunk that no file has.
#[test]
fn a_row_of_a_chunk_that_no_file_has_does_not_stop_the_list_of_damage() {
    on_a_volume(async |bench| {
        let io = Io::new(Class::Client, "test.read");
        bench.write_stripe(2, 0x42).await;
        bench.put_map(chunk_key(2, u64::MAX), &[extent(1, 1, 50)]).await;
        bench.put_map(chunk_key(3, 0), &[extent(0, 1, 2 * STRIPE)]).await;
        bench.put_marks(&[2 * STRIPE..3 * STRIPE, 50..51]).await;
        let target = bench.target().await;
        bench.corrupt(0x42);
        assert!(bench.volume.read(2 * STRIPE, STRIPE, io).await.is_err());
        assert_eq!(target.damaged().await.unwrap().len(), 1);
    });
}
