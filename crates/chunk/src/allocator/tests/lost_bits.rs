//! Bits of files that are lost: none of the blocks that they stood for is given to another file.
#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]

use super::{preallocate_and_crash, swept_target};
use crate::allocator::Source;
use crate::rows::{Counts, counts_key, encode_counts, group_key};
use crate::target::Target;
use crate::tests::{Bench, CLIENT, blocks_of, chunk_key, extent, file, known, on_a_volume, preallocated};
use penstock_array::Discard;
use penstock_base::ErrorKind;
use penstock_kv::Kv;

/// Files as they are in these tests: file 2 has group 0, a chunk for each two stripes.
async fn fill_group_0(bench: &Bench, blocks: u64) {
    for stripe in 0..32 {
        bench.write_stripe(stripe, 7).await;
    }
    for index in 0..16u64 {
        let count = blocks.saturating_sub(16 * index).min(16) as u32;
        if count > 0 {
            bench.put_map(chunk_key(2, index), &[extent(0, count, 16 * index)]).await;
        }
    }
}

async fn assert_file_2(target: &Target, blocks: u64, but: &[u64]) {
    for index in 0..16u64 {
        let found = crate::tests::fills(target, chunk_key(2, index)).await;
        for (block, fill) in (16 * index..).zip(found) {
            if block < blocks && !but.contains(&block) {
                assert_eq!(fill, 7, "block {block} of file 2 has data of another file");
            }
        }
    }
}

async fn write_durably(target: &Target, ino: u64, fills: &[u8]) {
    crate::tests::write(target, chunk_key(ino, 0), 0, fills).await;
    target.commit_all().await.unwrap();
}

async fn lose_row(bench: &Bench, key: Vec<u8>) {
    let mut writes = penstock_kv::WriteSet::new();
    writes.delete(key);
    bench.kv.commit_durable(writes).await.unwrap();
}

/// Regression: the row of a group is lost, and it has no empty stripe by its counts: the sweep passes it
/// over, and what is in it is given to others.
#[test]
fn a_group_without_its_row_is_not_given_to_others() {
    on_a_volume(async |bench| {
        fill_group_0(bench, 255).await;
        bench.put_marks(&[0..255]).await;
        lose_row(bench, crate::rows::group_key(0)).await;
        let target = swept_target(bench).await;
        write_durably(&target, 3, &[9; 3]).await;
        assert_file_2(&target, 255, &[]).await;
        target.stop();
    });
}

/// Regression: the same for a group that was full; the deletion of a block brings it into memory.
#[test]
fn a_full_group_without_its_row_is_not_given_to_others() {
    on_a_volume(async |bench| {
        fill_group_0(bench, 256).await;
        bench.put_marks(&[0..256]).await;
        lose_row(bench, crate::rows::group_key(0)).await;
        let target = swept_target(bench).await;
        target.punch(crate::tests::file(2), 255..256, 0).await.unwrap();
        target.commit_all().await.unwrap();
        write_durably(&target, 3, &[9; 3]).await;
        assert_file_2(&target, 255, &[]).await;
        target.stop();
    });
}

/// Regression: bits are lost in a stripe that keeps others. The load sees that the counts disagree, and goes
/// on.
#[test]
fn a_group_that_is_not_as_counted_is_not_allocated_from() {
    on_a_volume(async |bench| {
        fill_group_0(bench, 7).await;
        bench.put_marks(&[0..7]).await;
        let words = [vec![0b111], vec![0; crate::rows::GROUP_WORDS - 1]].concat();
        bench.put_row(crate::rows::group_key(0), crate::rows::encode_group(&words)).await;
        let target = swept_target(bench).await;
        write_durably(&target, 3, &[9; 3]).await;
        assert_file_2(&target, 7, &[]).await;
        target.stop();
    });
}

/// Regression: the bits of a stripe are lost, rows and counts agree. The first start counts its blocks as
/// used in memory. A commit in another group writes the row of counts with them, but not the bits. After the
/// second start the sweep passes over the group.
#[test]
fn lost_bits_that_one_sweep_found_count_after_the_next_start() {
    on_a_volume(async |bench| {
        fill_group_0(bench, 256).await;
        // Others, so that as many count as used as files have.
        bench.put_marks(&[0..248, 600..608]).await;
        let target = swept_target(bench).await;
        assert_eq!(target.usage().free_blocks, bench.volume.blocks() - 256 - 8, "it is owned in memory");
        write_durably(&target, 3, &[8; 1]).await;
        target.stop();
        let target = swept_target(bench).await;
        target.punch(crate::tests::file(2), 0..1, 0).await.unwrap();
        target.commit_all().await.unwrap();
        write_durably(&target, 4, &[9; 15]).await;
        assert_file_2(&target, 256, &[0]).await;
        target.stop();
    });
}

/// Regression: the counts of a group were missing with its bits, so both said that all is free. Preallocated
/// blocks are in no written stripe, and the sweep did not see them.
#[test]
fn preallocated_blocks_are_not_given_to_others_without_bits_and_counts() {
    on_a_volume(async |bench| {
        preallocate_and_crash(bench).await;
        lose_row(bench, group_key(0)).await;
        lose_row(bench, counts_key(0)).await;
        let target = bench.target().await;
        write_durably(&target, 3, &[9; 3]).await;
        assert_eq!(target.suspect_groups(), 1);
        write_durably(&target, 2, &[7; 3]).await;
        assert_eq!(crate::tests::fills(&target, chunk_key(3, 0)).await[..3], [9; 3]);
        repair_bits(bench, &target).await;
        assert_eq!(target.suspect_groups(), 0);
        target.stop();
    });
}

async fn repair_bits(bench: &Bench, target: &Target) {
    let quiet = bench.gate.quiesce().await;
    target.fsck(&quiet).mark_owned().await.unwrap();
}

/// Regression: without its row of counts all of a group counted as free. Writes were taken for which there
/// was no space once the group was read, and neither a check nor a repair could begin.
#[test]
fn a_missing_row_of_counts_promises_no_space() {
    on_a_volume(async |bench| {
        let target = swept_target(bench).await;
        let most = bench.volume.blocks() - bench.volume.blocks() / 50;
        target.preallocate(file(9), 0..most - 100, false, known(0)).await.unwrap();
        target.commit_all().await.unwrap();
        target.stop();
        bench.kv.crash();
        lose_row(bench, counts_key(0)).await;
        let target = swept_target(bench).await;
        let (data, crcs) = blocks_of(&[5; 16]);
        let refused = target.write(chunk_key(3, 0), 0, &data, &crcs, known(0), CLIENT).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::NoSpace);
        target.commit_all().await.unwrap();
        repair_bits(bench, &target).await;
        write_durably(&target, 3, &[5; 16]).await;
        target.stop();
    });
}

/// Regression: blocks that were allocated in a group before its bits were found lost counted as free after a
/// repair, though they were not committed yet.
#[test]
fn a_repair_of_bits_keeps_what_waits_to_be_committed() {
    on_a_volume(async |bench| {
        let target = swept_target(bench).await;
        let allocator = &target.allocator;
        target.preallocate(file(2), 0..3, false, known(0)).await.unwrap();
        target.commit_all().await.unwrap();
        allocator.reserve(2).unwrap();
        let run = allocator.allocate_reserved(2, Source::Any).await.unwrap();
        let group = allocator.space().groups().of_stripe(run.0 / crate::tests::STRIPE);
        allocator.space_mut().suspect(group);
        repair_bits(bench, &target).await;
        allocator.reserve(2).unwrap();
        let other = allocator.allocate_reserved(2, Source::Any).await.unwrap();
        assert!(other.0 >= run.0 + run.1 || other.0 + other.1 <= run.0, "{run:?} and {other:?}");
        target.stop();
    });
}

/// Regression: a repair deleted the row of counts of groups that were all free again, whose rows of bits
/// stay. The next start took that for damage.
#[test]
fn a_repair_of_groups_that_are_free_again_leaves_nothing_suspect() {
    on_a_volume(async |bench| {
        let target = swept_target(bench).await;
        write_durably(&target, 2, &[7; 3]).await;
        target.punch(file(2), 0..16, 0).await.unwrap();
        target.commit_all().await.unwrap();
        {
            let quiet = bench.gate.quiesce().await;
            let fsck = target.fsck(&quiet);
            fsck.mark_owned().await.unwrap();
            fsck.clear_unowned().await.unwrap();
        }
        target.stop();
        let target = swept_target(bench).await;
        assert_eq!((target.suspect_groups(), target.usage().free_blocks), (0, bench.volume.blocks()));
        target.stop();
        // As earlier repairs left it.
        lose_row(bench, counts_key(0)).await;
        let target = swept_target(bench).await;
        assert_eq!((target.suspect_groups(), target.usage().free_blocks), (0, bench.volume.blocks()));
        target.stop();
    });
}

/// Regression: a group that was suspect before a start counts as full, and hid that blocks of others are
/// marked as free.
#[test]
fn a_suspect_group_does_not_hide_what_others_lack() {
    on_a_volume(async |bench| {
        bench.put_map(chunk_key(2, 0), &[preallocated(0, 3, 0)]).await;
        bench.put_map(chunk_key(3, 0), &[preallocated(0, 3, 600)]).await;
        bench.put_marks(&[]).await;
        let space = crate::free::Space::new(bench.volume.blocks(), crate::tests::STRIPE);
        let free = (1..space.groups().count()).map(|group| space.free_counts(group));
        let counts: Vec<_> = [Counts::SUSPECT].into_iter().chain(free).collect();
        bench.put_row(counts_key(0), encode_counts(&counts)).await;
        let target = swept_target(bench).await;
        assert_eq!(target.suspect_groups(), 2);
        target.stop();
    });
}

/// Regression: stripes were discarded before it was known that no file has blocks without bits there.
#[test]
fn nothing_is_discarded_before_extents_are_compared() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        allocator.sweep().await.unwrap();
        super::leave_idle(bench, &allocator, &[3]).await;
        allocator.must_compare();
        bench.kv.fail_reads(true);
        allocator.discard_some(Discard::InTable, 0..u64::MAX).await.unwrap_err();
        bench.kv.fail_reads(false);
        assert_eq!(allocator.discard_some(Discard::InTable, 0..u64::MAX).await.unwrap(), 1);
    });
}

/// Regression: a group became suspect while stripes of it were being discarded, which were free afterwards.
#[test]
fn a_stripe_that_is_discarded_in_a_suspect_group_counts_as_used() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        assert!(super::take(&allocator, 3).await);
        allocator.space_mut().suspect(0);
        _ = allocator.space_mut().free_uncommitted((3 * crate::tests::STRIPE, crate::tests::STRIPE));
        assert!(!allocator.space().is_empty(3));
        let words = vec![0; crate::rows::GROUP_WORDS];
        allocator.space_mut().reload(0, &words);
        assert!(allocator.space().is_empty(3), "a repair frees it");
    });
}
