#![allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]

use super::*;
use crate::rows::all_groups;
use crate::target::Target;
use crate::tests::{
    Bench, CHUNK, OWNER, STRIPE, assert_clean, blocks_of, chunk_key, extent, extents_of, fills, map_row,
    on_a_volume, preallocated,
};

use penstock_base::FindingKind as Kind;
use penstock_kv::{Kv, KvRead};
use std::rc::Rc;

/// Writes data to a part of the volume.
async fn fill(bench: &Bench, block: u64, fills: &[u8]) {
    let (data, crcs) = blocks_of(fills);
    bench.volume.write(block, &data, &crcs).await.unwrap();
}

async fn row(bench: &Bench, key: ChunkKey) -> Option<Vec<Extent>> {
    let value = bench
        .kv
        .scan(key.row(Birth::FIRST), [&key.row(Birth::FIRST)[..], &[0]].concat(), 1)
        .await
        .unwrap()
        .pop();
    value.map(|(_, value)| extents_of(&value))
}

async fn found(bench: &Bench, target: &Target) -> Vec<Kind> {
    let quiet = bench.gate.quiesce().await;
    let findings = target.fsck(&quiet).check().await.unwrap().findings;
    findings.counts.keys().copied().collect()
}

/// Applies every repair of the target in the order of the kinds of findings. The first `succeeding`
/// transactions succeed, and the others fail.
async fn try_repair(bench: &Bench, target: &Target, succeeding: u64) -> Result<Vec<ChunkKey>, ChunkError> {
    let quiet = bench.gate.quiesce().await;
    let fsck = target.fsck(&quiet);
    fsck.forget_chunks();
    bench.kv.fail_after(succeeding);
    let result = async {
        fsck.mark_owned().await?;
        fsck.trim_extents().await?;
        let failed = fsck.copy_doubles().await?;
        fsck.count_files(&BTreeMap::new(), &BTreeSet::new()).await?;
        fsck.clear_unowned().await?;
        Ok(failed)
    };
    let result = result.await;
    bench.kv.fail_after(u64::MAX);
    result
}

async fn repair(bench: &Bench, target: &Target) -> Vec<ChunkKey> {
    try_repair(bench, target, u64::MAX).await.unwrap()
}

#[test]
fn damaged_rows_and_bits_are_repaired() {
    type Rows = Vec<(u64, Vec<Extent>)>;
    type Case = (&'static str, Rows, Vec<std::ops::Range<u64>>, Vec<Kind>, Rows);
    let far = |blocks: u64| blocks - 2;
    on_a_volume(async |bench| {
        let end = bench.volume.blocks();
        let cases: Vec<Case> = vec![
            (
                "nothing",
                vec![(0, vec![extent(0, 4, 8)])],
                vec![8..12],
                vec![],
                vec![(0, vec![extent(0, 4, 8)])],
            ),
            (
                "no bits",
                vec![(0, vec![extent(0, 4, 8)]), (1, vec![preallocated(0, 2, 90)])],
                vec![9..10],
                vec![Kind::BlockNotMarked],
                vec![(0, vec![extent(0, 4, 8)]), (1, vec![preallocated(0, 2, 90)])],
            ),
            (
                "blocks of nothing",
                vec![(0, vec![extent(0, 4, 8)])],
                vec![8..12, 20..21, 64..80],
                vec![Kind::BlockNotOwned],
                vec![(0, vec![extent(0, 4, 8)])],
            ),
            (
                "extents that are too long",
                vec![(0, vec![extent(CHUNK - 1, 3, 8)]), (1, vec![extent(0, 9, far(end))])],
                vec![8..9, far(end)..end],
                vec![Kind::ExtentBeyondChunk, Kind::ExtentBeyondVolume],
                vec![(0, vec![extent(CHUNK - 1, 1, 8)]), (1, vec![extent(0, 2, far(end))])],
            ),
            (
                "extents of nothing",
                vec![(0, vec![extent(3, 0, 8), extent(4, 1, 9)]), (1, vec![extent(0, 0, 8)])],
                vec![9..10],
                vec![Kind::EmptyExtent],
                vec![(0, vec![extent(4, 1, 9)])],
            ),
        ];
        for (what, rows, marks, kinds, expected) in cases {
            for (key, _) in bench.kv.rows() {
                let mut writes = WriteSet::new();
                writes.delete(key);
                bench.kv.commit_durable(writes).await.unwrap();
            }
            for (index, extents) in &rows {
                bench.put_map(chunk_key(2, *index), extents).await;
            }
            bench.put_marks(&marks).await;
            let target = bench.target().await;
            assert_eq!(found(bench, &target).await, kinds, "{what}");
            for _ in 0..2 {
                assert_eq!(repair(bench, &target).await, [], "{what}");
                assert_clean(bench, &target).await;
                for index in 0..2 {
                    let expected = expected.iter().find(|(at, _)| *at == index);
                    let expected = expected.map(|(_, extents)| extents.clone());
                    assert_eq!(row(bench, chunk_key(2, index)).await, expected, "{what}: chunk {index}");
                }
            }
            let used: u32 = expected.iter().flat_map(|(_, extents)| extents).map(|extent| extent.count).sum();
            assert_eq!(end - target.usage().free_blocks, u64::from(used), "{what}");
            target.stop();
        }
    });
}

#[test]
fn each_owner_of_a_block_except_the_first_gets_a_copy() {
    on_a_volume(async |bench| {
        let [first, second, third] = [0, 1, 2].map(|index| chunk_key(2, index));
        bench.put_map(first, &[extent(0, 3, 40)]).await;
        bench.put_map(second, &[extent(5, 4, 41)]).await;
        // The same block twice in one chunk, once only preallocated.
        bench.put_map(third, &[extent(0, 1, 60), extent(1, 1, 60), preallocated(2, 1, 42)]).await;
        bench.put_marks(&[40..45, 60..61]).await;
        fill(bench, 40, &[1, 2, 3, 4, 5]).await;
        fill(bench, 60, &[6]).await;
        let target = bench.target().await;
        assert_eq!(found(bench, &target).await, [Kind::DoubleOwnedBlock]);
        let contents =
            async || [fills(&target, first).await, fills(&target, second).await, fills(&target, third).await];
        let before = contents().await;
        assert_eq!(repair(bench, &target).await, []);
        assert_clean(bench, &target).await;
        assert_eq!(contents().await, before);
        assert_eq!(row(bench, first).await.unwrap(), [extent(0, 3, 40)], "the first owner keeps its blocks");
        assert_eq!(bench.volume.blocks() - target.usage().free_blocks, 10);
        // A write to one of them does not show in the others.
        crate::tests::write(&target, second, 5, &[9]).await;
        target.commit_all().await.unwrap();
        assert_eq!(fills(&target, first).await[..4], [1, 2, 3, 0]);
        let rows = bench.kv.rows();
        assert_eq!(repair(bench, &target).await, []);
        assert_eq!(bench.kv.rows(), rows, "nothing is left to repair");
    });
}

/// Regression: a store that was restored from a copy of the map, and had such a block, was never served
/// again.
#[test]
fn a_block_with_two_owners_that_cannot_be_read_stays_with_the_first() {
    on_a_volume(async |bench| {
        bench.write_stripe(5, 0x77).await;
        let [first, second] = [0, 1].map(|index| chunk_key(2, index));
        // The first block can be copied, the next ones cannot.
        for key in [first, second] {
            bench.put_map(key, &[extent(0, 1, 6 * STRIPE), extent(1, 2, 5 * STRIPE)]).await;
        }
        bench.put_marks(&[5 * STRIPE..5 * STRIPE + 2, 6 * STRIPE..6 * STRIPE + 1]).await;
        fill(bench, 6 * STRIPE, &[1]).await;
        let target = bench.target().await;
        bench.corrupt(0x77);
        assert_eq!(repair(bench, &target).await, []);
        let whole = vec![extent(0, 1, 6 * STRIPE), extent(1, 2, 5 * STRIPE)];
        assert_eq!(row(bench, first).await, Some(whole));
        let copied = row(bench, second).await.unwrap();
        assert!(matches!(copied[..], [Extent { first: 0, count: 1, .. }]), "{copied:?}");
        assert_eq!(bench.volume.blocks() - target.usage().free_blocks, 4, "one block has a copy");
        assert_clean(bench, &target).await;
    });
}

#[test]
fn bad_group_rows_are_written_again_and_stray_ones_deleted() {
    on_a_volume(async |bench| {
        let blocks = bench.volume.blocks();
        let too_many = encode_group(&vec![u64::MAX; crate::rows::GROUP_WORDS]);
        for (what, bad) in [("no row", vec![]), ("half a row", vec![2; 500]), ("too many bits", too_many)] {
            bench.put_map(chunk_key(2, 0), &[extent(0, 4, 8)]).await;
            bench.put_marks(&[8..12]).await;
            bench.put_row(group_key(0), bad).await;
            bench.put_row(group_key(70), vec![1, 2]).await;
            bench.put_row([&group_key(0)[..], &[0]].concat(), vec![3]).await;
            let target = bench.target().await;
            target.allocator.load(0).await.unwrap();
            assert_eq!(target.usage().free_blocks, blocks - 256, "{what}");
            assert_eq!(found(bench, &target).await, [Kind::BadGroupRow], "{what}");
            repair(bench, &target).await;
            assert_clean(bench, &target).await;
            let (from, until) = all_groups();
            assert_eq!(
                bench.kv.keys(from, until, 9).await.unwrap(),
                [0, 1, 2, 3, 4].map(group_key),
                "{what}"
            );
            assert_eq!(blocks - target.usage().free_blocks, 4, "{what}");
            target.stop();
        }
    });
}

#[test]
fn nothing_is_freed_while_a_row_of_a_later_release_exists() {
    on_a_volume(async |bench| {
        let mut later = map_row(&[extent(0, 1, 30)]);
        later[0] = 9;
        bench.put_row(chunk_key(2, 0).row(Birth::FIRST), later).await;
        bench.put_map(chunk_key(2, 1), &[extent(0, 1, 31)]).await;
        bench.put_marks(&[30..31]).await;
        fill(bench, 30, &[1]).await;
        let target = bench.target().await;
        let quiet = bench.gate.quiesce().await;
        let fsck = target.fsck(&quiet);
        fsck.mark_owned().await.unwrap();
        fsck.clear_unowned().await.unwrap();
        assert_eq!(fsck.unowned_runs(9).await.unwrap(), []);
        assert_eq!(fsck.unreadable_rows(9).await.unwrap(), []);
        let used = bench.volume.blocks() - target.usage().free_blocks;
        assert_eq!(used, 256, "as the bit of 31 was lost, others may be too");
    });
}

#[test]
fn unowned_runs_and_unreadable_rows_are_listed_up_to_a_bound() {
    on_a_volume(async |bench| {
        // Block 3 is marked in an unwritten stripe; 8..10 and a long run from 24 on are written.
        bench.put_map(chunk_key(2, 0), &[extent(0, 1, 10)]).await;
        bench.put_map(chunk_key(2, 4), &[extent(0, 1, 11)]).await;
        bench.put_map(chunk_key(2, u64::MAX), &[extent(0, 1, 12)]).await;
        bench.put_row(chunk_key(2, 1).row(Birth::FIRST), vec![2]).await;
        bench.put_row(chunk_key(3, 1).row(Birth::FIRST), vec![]).await;
        bench.put_row(vec![0x20, 9], vec![]).await;
        bench.put_marks(&[3..4, 8..13, 24..60]).await;
        for block in [8, 30, 56] {
            fill(bench, block, &[1]).await;
        }
        let target = bench.target().await;
        let quiet = bench.gate.quiesce().await;
        let fsck = target.fsck(&quiet);
        // A run longer than a chunk is cut; a part in unwritten stripes only is left out.
        let runs = [(8, 2), (24, 16), (56, 4)];
        for most in 0..5 {
            assert_eq!(fsck.unowned_runs(most).await.unwrap(), runs[..most.min(3)], "at most {most}");
        }
        let rows = fsck.rows_of_runs(Ino(8), &runs);
        for (at, (key, value)) in rows.iter().enumerate() {
            assert_eq!(*key, chunk_key(8, at as u64).row(Birth::FIRST));
            assert_eq!(extents_of(value), [extent(0, runs[at].1 as u32, runs[at].0)]);
        }
        let bad = [vec![0x20, 9], chunk_key(2, 1).row(Birth::FIRST), chunk_key(3, 1).row(Birth::FIRST)];
        let keys = |rows: Vec<Row>| -> BTreeSet<Vec<u8>> { rows.into_iter().map(|(key, _)| key).collect() };
        assert_eq!(keys(fsck.unreadable_rows(9).await.unwrap()), BTreeSet::from(bad));
        for most in 1..4 {
            assert_eq!(fsck.unreadable_rows(most).await.unwrap().len(), most, "at most {most}");
        }
        for (index, most, expected) in
            [(0, 9, &[0, 1, 4, u64::MAX][..]), (1, 2, &[1, 4]), (5, 9, &[u64::MAX]), (0, 0, &[])]
        {
            let rows = fsck.rows_of(Ino(2), index, most).await.unwrap();
            let expected: Vec<_> =
                expected.iter().map(|index| chunk_key(2, *index).row(Birth::FIRST)).collect();
            assert_eq!(rows.into_iter().map(|(key, _)| key).collect::<Vec<_>>(), expected, "from {index} on");
        }
    });
}

#[test]
fn a_repair_that_fails_can_be_started_again() {
    // The number of transactions that succeed before one fails.
    for succeeding in 0..4 {
        on_a_volume(async |bench| {
            bench.put_map(chunk_key(2, 0), &[extent(0, 4, 8), extent(9, 20, 30)]).await;
            bench.put_map(chunk_key(2, 1), &[extent(0, 2, 10)]).await;
            bench.put_marks(&[8..9, 70..72]).await;
            bench.put_row(group_key(7), vec![1, 2]).await;
            fill(bench, 8, &[1, 2, 3, 4]).await;
            let target: Rc<Target> = bench.target().await;
            let failed = try_repair(bench, &target, succeeding).await;
            assert!(failed.is_err(), "{succeeding} transactions are not all");
            target.stop();
            // The next process repairs the rows that the failed repair left.
            let target = bench.target().await;
            assert_eq!(repair(bench, &target).await, []);
            assert_clean(bench, &target).await;
            assert_eq!(fills(&target, chunk_key(2, 1)).await[..3], [3, 4, 0]);
            assert_eq!(row(bench, chunk_key(2, 0)).await.unwrap(), [extent(0, 4, 8), extent(9, 7, 30)]);
        });
    }
}

/// Two files own a block. One gives it up, durably or not, and the commit that does so ends just before the
/// repair begins: the block waits to be free.
#[test]
fn a_block_that_waits_to_be_free_stays_with_its_other_owner() {
    on_a_volume(async |bench| {
        fill(bench, 8, &[1, 2, 3, 4]).await;
        bench.put_map(chunk_key(2, 0), &[extent(0, 4, 8)]).await;
        bench.put_map(chunk_key(3, 0), &[extent(0, 4, 8)]).await;
        bench.put_marks(&[8..12]).await;
        let target = bench.target().await;
        target.punch(crate::tests::file(2), 0..4, u64::MAX).await.unwrap();
        // As a periodic commit between the commit of the repair and the quiet gate does.
        target.commit(crate::tests::file(2), true).await.unwrap();
        assert!(repair(bench, &target).await.is_empty());
        // The periodic commit ends.
        target.sync().await.unwrap();
        // A new file gets blocks that nothing owns.
        crate::tests::write(&target, chunk_key(4, 0), 0, &[9; 12]).await;
        target.commit_all().await.unwrap();
        assert_eq!(fills(&target, chunk_key(3, 0)).await[..4], [1, 2, 3, 4]);
        assert_clean(bench, &target).await;
    });
}

/// The same process repairs again: the blocks of copies whose commit failed are free again.
#[test]
fn a_repair_that_fails_leaks_no_block() {
    for succeeding in 0..8 {
        on_a_volume(async |bench| {
            bench.put_map(chunk_key(2, 0), &[extent(0, 4, 8)]).await;
            bench.put_map(chunk_key(2, 1), &[extent(0, 2, 10)]).await;
            bench.put_marks(&[8..12]).await;
            fill(bench, 8, &[1, 2, 3, 4]).await;
            let target: Rc<Target> = bench.target().await;
            let _ = try_repair(bench, &target, succeeding).await;
            assert_eq!(repair(bench, &target).await, []);
            assert_clean(bench, &target).await;
            let used = bench.volume.blocks() - target.usage().free_blocks;
            assert_eq!(used, 6, "after {succeeding} transactions");
        });
    }
}

/// Rows of files and accounts are made again from maps and inodes; a file without an inode keeps its owner.
#[test]
fn files_are_counted_by_their_maps_and_their_inodes() {
    on_a_volume(async |bench| {
        bench.put_map(chunk_key(2, 0), &[extent(0, 4, 8)]).await;
        bench.put_map(chunk_key(3, 0), &[extent(0, 2, 40), preallocated(9, 1, 44)]).await;
        bench.put_map(chunk_key(4, 0), &[extent(0, 1, 60)]).await;
        bench.put_marks(&[8..12, 40..42, 44..45, 60..61]).await;
        let row = |blocks, truncations| FileRow { truncations, blocks, owner: OWNER, owner_number: 0 };
        for (ino, wrong) in [(2, row(9, 0)), (5, row(3, 0)), (6, row(0, 8)), (8, row(0, 4))] {
            bench.put_row(FileRow::key(FileId::main(Ino(ino)), Birth::FIRST), wrong.encode()).await;
        }
        let target = bench.target().await;
        let other = Owner { uid: 7, ..OWNER };
        let inodes = [
            (Ino(2), Known { truncations: 5, owner: other }),
            (Ino(6), Known { truncations: 9, owner: other }),
            (Ino(7), Known { truncations: 3, owner: other }),
        ];
        let quiet = bench.gate.quiesce().await;
        let fsck = target.fsck(&quiet);
        for _ in 0..2 {
            fsck.count_files(&BTreeMap::from(inodes), &BTreeSet::from([Ino(8)])).await.unwrap();
            let check = fsck.check().await.unwrap();
            assert!(check.findings.is_clean(), "{:?}", check.findings.kept);
            let rows: BTreeMap<Ino, Option<FileRow>> =
                check.owners.iter().map(|(ino, owned)| (*ino, owned.file)).collect();
            let expected = [
                (Ino(2), FileRow { owner: other, ..row(4, 5) }),
                (Ino(3), row(3, 0)),
                (Ino(4), row(1, 0)),
                (Ino(6), FileRow { owner: other, ..row(0, 9) }),
                (Ino(7), FileRow { owner: other, ..row(0, 3) }),
                // Its inode cannot be read.
                (Ino(8), row(0, 4)),
            ];
            assert_eq!(rows, expected.map(|(ino, row)| (ino, Some(row))).into_iter().collect());
            let accounts = BTreeMap::from([((Branch::MAIN, other), 4), ((Branch::MAIN, OWNER), 4)]);
            assert_eq!(target.accounts(), accounts);
        }
    });
}
