//! Map rows and accounts that cannot be read: what they own is neither given to others nor discarded.
#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]

use super::{preallocate_and_crash, swept_target};
use crate::allocator::Source;
use crate::rows::{Counts, GROUP_WORDS, counts_key, decode_counts, encode_group, group_key};
use crate::target::Target;
use crate::tests::{Bench, STRIPE, chunk_key, extent, known, map_row, on_a_volume};
use penstock_base::{Birth, Branch};
use penstock_kv::KvRead;

const LATER: u8 = 9;
const DAMAGED: u8 = 0;

/// A row of one extent that this release cannot read: of a later one, or damaged.
async fn put_unread(bench: &Bench, index: u64, format: u8, first: u64, count: u32) {
    let row = match format {
        DAMAGED => vec![2],
        _ => {
            let mut row = map_row(&[extent(0, count, first)]);
            row[0] = format;
            row
        }
    };
    bench.put_row(chunk_key(2, index).row(Birth::FIRST), row).await;
}

async fn mark_owned(bench: &Bench, target: &Target) {
    let quiet = bench.gate.quiesce().await;
    target.fsck(&quiet).mark_owned().await.unwrap();
}

/// All blocks that can be allocated, taken.
async fn take_all(target: &Target) -> Vec<(u64, u64)> {
    let mut taken = Vec::new();
    while target.allocator.reserve(1).is_ok() {
        taken.push(target.allocator.allocate_reserved(1, Source::Any).await.unwrap());
    }
    taken
}

fn meets((start, count): (u64, u64), blocks: std::ops::Range<u64>) -> bool {
    start < blocks.end && blocks.start < start + count
}

/// Regression: the row of a full group cannot be read, and a repair wrote it with the blocks of those map
/// rows alone that can be read.
#[test]
fn a_repair_frees_no_block_whose_owner_cannot_be_read() {
    for format in [LATER, DAMAGED] {
        on_a_volume(async |bench| {
            put_unread(bench, 0, format, 16, 16).await;
            bench.put_map(chunk_key(2, 1), &[extent(0, 16, 32)]).await;
            for stripe in [2, 3, 4, 5] {
                bench.write_stripe(stripe, 7).await;
            }
            bench.put_marks(&[0..256]).await;
            bench.put_row(group_key(0), vec![1, 2]).await;
            let target = swept_target(bench).await;
            mark_owned(bench, &target).await;
            let quiet = bench.gate.quiesce().await;
            let unowned = target.fsck(&quiet).unowned_runs(99).await.unwrap();
            drop(quiet);
            match format {
                LATER => assert_eq!(unowned, [], "it may own them"),
                _ => assert_eq!(unowned, [(16, 16)], "they are kept for /lost+found"),
            }
            let taken = take_all(&target).await;
            assert!(!taken.is_empty() && taken.iter().all(|run| !meets(*run, 16..48)), "{format}");
            target.stop();
        });
    }
}

/// Regression: bits were lost and counts were not. A repair counted again, and the blocks of a row of a later
/// release were free.
#[test]
fn a_repair_forgets_no_lost_bits_beside_a_later_release() {
    on_a_volume(async |bench| {
        put_unread(bench, 0, LATER, 16, 16).await;
        bench.put_marks(&[0..256]).await;
        let half = [vec![0, u64::MAX, u64::MAX, u64::MAX], vec![0; GROUP_WORDS - 4]].concat();
        bench.put_row(group_key(0), encode_group(&half)).await;
        for _ in 0..2 {
            let target = swept_target(bench).await;
            mark_owned(bench, &target).await;
            let row = bench.kv.get(counts_key(0)).await.unwrap().unwrap();
            assert_eq!(decode_counts(&row, 5).unwrap()[0], Counts::SUSPECT);
            let taken = take_all(&target).await;
            assert!(!taken.is_empty() && taken.iter().all(|run| !meets(*run, 0..256)));
            target.stop();
            bench.kv.crash();
        }
    });
}

/// Regression: bits and counts of a stripe were lost, and the row that owns it could not be read. The sweep
/// found no owner, and had the stripe discarded.
#[test]
fn the_sweep_discards_nothing_beside_a_row_that_cannot_be_read() {
    for format in [LATER, DAMAGED] {
        on_a_volume(async |bench| {
            put_unread(bench, 0, format, 3 * STRIPE, STRIPE as u32).await;
            bench.write_stripe(3, 7).await;
            bench.put_marks(&[]).await;
            let target = swept_target(bench).await;
            target.allocator.discard_some(penstock_array::Discard::InTable, 0..u64::MAX).await.unwrap();
            assert!(!bench.volume.written(3, 1).await.unwrap().is_empty(), "{format}: it is discarded");
            assert!(take_all(&target).await.iter().all(|run| !meets(*run, 3 * STRIPE..4 * STRIPE)));
            target.stop();
        });
    }
}

/// Regression: an account that cannot be read counted as none, so that lost bits and counts of preallocated
/// blocks were not noticed.
#[test]
fn extents_are_compared_beside_an_account_that_cannot_be_read() {
    on_a_volume(async |bench| {
        preallocate_and_crash(bench).await;
        bench.put_row(known(0).owner.account(Branch::MAIN), vec![1]).await;
        bench.put_marks(&[]).await;
        let target = swept_target(bench).await;
        assert_eq!(target.suspect_groups(), 1);
        target.stop();
    });
}

/// Regression: a repair freed what the sweep had protected: a stripe whose bits are lost, and whose map row
/// is damaged.
#[test]
fn a_repair_keeps_what_the_sweep_has_found_for_a_damaged_row() {
    for lost_counts in [true, false] {
        on_a_volume(async |bench| {
            put_unread(bench, 0, DAMAGED, 3 * STRIPE, STRIPE as u32).await;
            bench.write_stripe(3, 7).await;
            match lost_counts {
                true => bench.put_marks(&[]).await,
                false => {
                    bench.put_marks(&[3 * STRIPE..4 * STRIPE]).await;
                    bench.put_row(group_key(0), encode_group(&[0; GROUP_WORDS])).await;
                }
            }
            let target = swept_target(bench).await;
            assert_eq!(target.suspect_groups(), 1, "it is protected until the repair");
            mark_owned(bench, &target).await;
            let quiet = bench.gate.quiesce().await;
            let unowned = target.fsck(&quiet).unowned_runs(99).await.unwrap();
            drop(quiet);
            assert!(unowned.iter().any(|run| meets(*run, 3 * STRIPE..4 * STRIPE)), "{unowned:?}");
            let taken = take_all(&target).await;
            assert!(!taken.is_empty() && taken.iter().all(|run| !meets(*run, 3 * STRIPE..4 * STRIPE)));
            target.stop();
        });
    }
}
