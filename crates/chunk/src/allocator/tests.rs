mod lives;
mod lost_bits;
mod unread_rows;

use super::*;
use crate::tests::{Bench, STRIPE, chunk_key, extent, file, known, on_a_volume};
use penstock_base::ErrorKind;

/// A target whose sweep is over.
async fn swept_target(bench: &Bench) -> Rc<crate::target::Target> {
    let target = bench.target().await;
    while !(target.is_swept() && target.is_compared()) {
        bench.env.sleep(Duration::from_millis(1)).await;
    }
    target
}

/// Three blocks of file 2 are preallocated, durably, and the process crashes.
async fn preallocate_and_crash(bench: &Bench) {
    let target = swept_target(bench).await;
    target.preallocate(file(2), 0..3, false, known(0)).await.unwrap();
    target.commit_all().await.unwrap();
    target.stop();
    bench.kv.crash();
}

/// Takes a stripe if it is empty.
async fn take(allocator: &Allocator, stripe: u64) -> bool {
    allocator.load_of(stripe).await.unwrap();
    allocator.space_mut().take_stripe(stripe)
}

/// Takes a stripe in each of five groups.
async fn take_in_each_group(allocator: &Allocator) -> [u64; 5] {
    let stripes = [0, 1, 2, 3, 4].map(|group| group * 32 + 5);
    for stripe in stripes {
        assert!(take(allocator, stripe).await);
    }
    stripes
}

async fn is_empty(allocator: &Allocator, stripe: u64) -> bool {
    allocator.load_of(stripe).await.unwrap();
    allocator.space().is_empty(stripe)
}

/// Writes stripes, marks them as used, and frees them again: they are idle then.
async fn leave_idle(bench: &Bench, allocator: &Allocator, stripes: &[u64]) {
    for stripe in stripes {
        bench.write_stripe(*stripe, 1).await;
        assert!(take(allocator, *stripe).await);
    }
    allocator.give_back(stripes.iter().map(|stripe| (stripe * STRIPE, STRIPE)).collect());
}

fn idle_stripes(bench: &Bench, allocator: &Allocator) -> Vec<u64> {
    (0..bench.stripes()).filter(|stripe| allocator.is_idle(*stripe)).collect()
}

async fn written_stripes(bench: &Bench) -> Vec<u64> {
    bench.volume.written(0, usize::MAX).await.unwrap()
}

async fn take_some_stripe(allocator: &Allocator) {
    let stripe = allocator.last_empty(|_| true, 0..u64::MAX).await.unwrap().unwrap();
    assert!(allocator.space_mut().take_stripe(stripe));
}

#[test]
fn a_reservation_leaves_the_headroom() {
    on_a_volume(async |bench| {
        let blocks = bench.volume.blocks();
        let headroom = blocks / 50;
        // Columns: blocks that others have reserved, wanted blocks, and the free blocks in the error, if any.
        for (reserved, wanted, refused) in [
            (0, 0, None),
            (0, blocks - headroom, None),
            (0, blocks - headroom + 1, Some(blocks - headroom)),
            (blocks - headroom, 0, None),
            (blocks - headroom, 1, Some(0)),
            (5, blocks, Some(blocks - headroom - 5)),
        ] {
            let allocator = bench.allocator();
            allocator.reserve(reserved).unwrap();
            match (allocator.reserve(wanted), refused) {
                (Ok(()), None) => {
                    allocator.release(reserved + wanted);
                    assert_eq!(allocator.usage().free_blocks, blocks);
                }
                (Err(error @ ChunkError::NoSpace { free_blocks, wanted_blocks }), Some(free)) => {
                    assert_eq!((free_blocks, wanted_blocks), (free, wanted));
                    assert_eq!(error.kind(), ErrorKind::NoSpace);
                    assert_eq!(allocator.usage().free_blocks, blocks - reserved, "nothing is reserved");
                }
                (found, _) => panic!("{wanted} blocks beside {reserved}: {found:?}"),
            }
        }
    });
}

#[test]
fn runs_end_with_their_stripe_until_no_block_is_left() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        for (wanted, expected) in [(3, (0, 3)), (9, (3, 5)), (20, (8, 8)), (1, (16, 1)), (1, (17, 1))] {
            assert_eq!(
                allocator.allocate_reserved(wanted, Source::Any).await.unwrap(),
                expected,
                "{wanted} blocks"
            );
        }
        let mut left = allocator.usage().free_blocks;
        while left > 0 {
            left -= allocator.allocate_reserved(left, Source::Any).await.unwrap().1;
        }
        let error = allocator.allocate_reserved(2, Source::Any).await.unwrap_err();
        assert!(matches!(error, ChunkError::NoSpace { wanted_blocks: 2, .. }), "{error}");
    });
}

#[test]
fn a_stripe_that_cannot_be_read_is_not_allocated_from() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        allocator.sweep().await.unwrap();
        bench.write_stripe(0, 9).await;
        assert_eq!(allocator.allocate_reserved(1, Source::Any).await.unwrap(), (0, 1));
        bench.corrupt(9);
        let io = penstock_drive::Io::new(penstock_drive::Class::Client, "test.read");
        assert!(bench.volume.read(0, STRIPE, io).await.is_err());
        assert_eq!(allocator.allocate_reserved(1, Source::Any).await.unwrap(), (STRIPE, 1));
    });
}

#[test]
fn only_a_stripe_that_lost_its_last_block_becomes_idle() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        for _ in 0..3 {
            allocator.allocate_reserved(STRIPE, Source::Any).await.unwrap();
        }
        for (run, expected) in
            [((0, 7), &[][..]), ((10, 9), &[]), ((8, 2), &[1]), ((7, 1), &[0, 1]), ((19, 5), &[0, 1, 2])]
        {
            allocator.give_back(vec![run]);
            assert_eq!(idle_stripes(bench, &allocator), expected, "after {run:?}");
        }
        allocator.give_back(Vec::new());
        assert_eq!(allocator.usage().free_blocks, bench.volume.blocks());
    });
}

#[test]
fn a_full_chunk_takes_stripes_that_were_written_before_first() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        leave_idle(bench, &allocator, &[2, 3, 7]).await;
        let mut taken = Vec::new();
        for _ in 0..4 {
            let stripe = allocator.take_empty_stripe(0, Source::Any).await.unwrap().unwrap();
            assert!(bench.volume.is_unwritten(stripe).await.unwrap(), "stripe {stripe} can be written");
            assert!(!is_empty(&allocator, stripe).await, "stripe {stripe} is allocated");
            taken.push(stripe);
        }
        let highest = bench.stripes() - 1;
        assert_eq!(taken, [3, 2, 7, highest]);
        assert_eq!(allocator.discarded_stripes(), 3);
        assert_eq!(idle_stripes(bench, &allocator), []);
    });
}

#[test]
fn an_idle_stripe_that_is_in_use_again_is_not_taken() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        leave_idle(bench, &allocator, &[0, 1]).await;
        assert_eq!(allocator.allocate_reserved(1, Source::Any).await.unwrap(), (0, 1));
        assert_eq!(allocator.take_empty_stripe(0, Source::Any).await.unwrap(), Some(1));
        assert_eq!(written_stripes(bench).await, [0], "the stripe in use was not discarded");
    });
}

#[test]
fn a_full_chunk_takes_no_space_that_others_have_reserved() {
    on_a_volume(async |bench| {
        let blocks = bench.volume.blocks();
        let headroom = blocks / 50;
        assert!(headroom >= STRIPE, "an empty stripe fits into the headroom");
        let full = blocks - headroom;
        // Columns: blocks reserved by all, those among them of this write, used blocks, and true if a stripe
        // is left.
        for (reserved, mine, used, expected) in [
            (full, 0, 0, true),
            (full, 0, headroom - STRIPE, true),
            (full, 0, headroom - STRIPE + 1, false),
            (full, 1, headroom - STRIPE + 1, true),
            (full, STRIPE, headroom, true),
            (full, STRIPE - 1, headroom, false),
        ] {
            let allocator = bench.allocator();
            allocator.reserve(reserved).unwrap();
            let mut left = used;
            while left > 0 {
                left -= allocator.allocate_reserved(left, Source::Any).await.unwrap().1;
            }
            let found = allocator.take_empty_stripe(mine, Source::Any).await.unwrap();
            assert_eq!(found.is_some(), expected, "{used} used, {mine} of {reserved} reserved");
        }
        // A stripe that was discarded for such a write stays idle, too.
        let allocator = bench.allocator();
        leave_idle(bench, &allocator, &[2]).await;
        assert_eq!(allocator.discard_some(Discard::InTable, 0..u64::MAX).await.unwrap(), 1);
        allocator.reserve(full).unwrap();
        for _ in 0..headroom / STRIPE {
            take_some_stripe(&allocator).await;
        }
        assert_eq!(allocator.take_empty_stripe(0, Source::Any).await.unwrap(), None);
        assert_eq!(idle_stripes(bench, &allocator), [2]);
    });
}

#[test]
fn a_batch_is_one_run_of_idle_stripes_that_are_still_empty() {
    on_a_volume(async |bench| {
        // Columns: idle stripes, those among them in use again, and the batches, as first stripe and count.
        type Case = (Vec<u64>, Vec<u64>, Vec<(u64, u64)>);
        let cases: [Case; 5] = [
            (vec![], vec![], vec![]),
            (vec![1, 2, 3, 5], vec![], vec![(1, 3), (5, 1)]),
            (vec![1, 2, 3], vec![2], vec![(1, 1), (3, 1)]),
            (vec![1, 2], vec![1, 2], vec![]),
            ((0..BATCH + 2).collect(), vec![], vec![(0, BATCH), (BATCH, 2)]),
        ];
        for (idle, used, expected) in cases {
            let allocator = bench.allocator();
            allocator.idle.borrow_mut().add(idle.clone());
            for stripe in &used {
                assert!(take(&allocator, *stripe).await);
            }
            assert_eq!(
                allocator.take_idle(Discard::OnDrives, 0..u64::MAX).await.unwrap(),
                None,
                "{idle:?} have not rested"
            );
            allocator.idle.borrow_mut().age();
            let mut batches = Vec::new();
            while let Some(batch) = allocator.take_idle(Discard::OnDrives, 0..u64::MAX).await.unwrap() {
                batches.push(batch);
            }
            assert_eq!(batches, expected, "{idle:?} without {used:?}");
            for stripe in batches.iter().flat_map(|(first, count)| *first..first + count) {
                assert!(!is_empty(&allocator, stripe).await, "nothing is allocated in stripe {stripe}");
            }
        }
    });
}

#[test]
fn a_discard_takes_no_space_that_is_reserved() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        let free = bench.volume.blocks();
        leave_idle(bench, &allocator, &[4, 5, 6]).await;
        allocator.idle.borrow_mut().age();
        allocator.reserve(free - free / 50).unwrap();
        // Two stripes and a block are free beside the reservation.
        for _ in 0..free / 50 / STRIPE - 2 {
            take_some_stripe(&allocator).await;
        }
        assert_eq!(allocator.discard_some(Discard::OnDrives, 0..u64::MAX).await.unwrap(), 2);
        assert_eq!(written_stripes(bench).await, [6]);
        assert_eq!(idle_stripes(bench, &allocator), [6]);
    });
}

#[test]
fn a_stripe_rests_before_its_space_goes_back_to_the_drives() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        bench.env.spawn("target discard", Box::pin(allocator.clone().run()));
        leave_idle(bench, &allocator, &[1, 2, 9]).await;
        bench.env.sleep(REST - Duration::from_secs(1)).await;
        assert_eq!(written_stripes(bench).await, [1, 2, 9]);
        bench.env.sleep(REST + Duration::from_secs(3)).await;
        assert_eq!(written_stripes(bench).await, []);
        assert_eq!(idle_stripes(bench, &allocator), []);
        assert_eq!(allocator.discarded_stripes(), 3);
        assert_eq!(allocator.usage().free_blocks, bench.volume.blocks());
        // After a stop nothing is discarded any more.
        leave_idle(bench, &allocator, &[3]).await;
        allocator.stop();
        bench.env.sleep(REST * 4).await;
        assert_eq!(written_stripes(bench).await, [3]);
    });
}

#[test]
fn written_stripes_without_an_owner_are_found_at_a_start() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        assert_eq!(allocator.allocate_reserved(1, Source::Any).await.unwrap(), (0, 1));
        for stripe in [0, 3, 8] {
            bench.write_stripe(stripe, 5).await;
        }
        allocator.sweep().await.unwrap();
        assert_eq!(idle_stripes(bench, &allocator), [3, 8], "stripe 0 has an owner");
    });
}

/// Before the sweep has come to a written stripe, nothing is allocated there, and it is not discarded.
#[test]
fn a_written_stripe_is_left_alone_until_its_owner_is_known() {
    on_a_volume(async |bench| {
        // Stripes 0 and 40 belong to a file, but for the last block; no bit says so.
        for stripe in [0, 1, 40] {
            bench.write_stripe(stripe, 5).await;
        }
        let most = STRIPE as u32 - 1;
        let extents = [extent(0, most, 0), extent(most, most, 40 * STRIPE)];
        bench.put_map(chunk_key(2, 0), &extents).await;
        let allocator = bench.allocator();
        for expected in [2, 3] {
            let run = allocator.allocate_reserved(STRIPE, Source::Any).await.unwrap();
            assert_eq!(run, (expected * STRIPE, STRIPE), "the first one that is unwritten");
        }
        assert_eq!(idle_stripes(bench, &allocator), []);
        allocator.sweep().await.unwrap();
        assert!(allocator.is_swept());
        assert_eq!(idle_stripes(bench, &allocator), [], "stripe 1 lies beside them");
        // All that is left in the groups of stripes 0 and 40 counts as used.
        let free = bench.volume.blocks() - 2 * 256;
        assert_eq!(allocator.usage().free_blocks, free);
        let mut left = free;
        while left > 0 {
            let (block, count) = allocator.allocate_reserved(left, Source::Any).await.unwrap();
            assert!(block >= 2 * 256, "{count} blocks from {block} on");
            left -= count;
        }
        assert!(allocator.allocate_reserved(1, Source::Any).await.is_err());
    });
}

/// A volume on which only written stripes without an owner are left: whoever needs space waits for the sweep.
#[test]
fn an_allocation_waits_for_stripes_that_the_sweep_finds() {
    on_a_volume(async |bench| {
        let last = bench.stripes() - 1;
        bench.write_stripe(last, 5).await;
        bench.put_marks(&[0..STRIPE, STRIPE..last * STRIPE]).await;
        let target = bench.target().await;
        let allocator = &target.allocator;
        assert_eq!(allocator.usage().free_blocks, STRIPE);
        assert_eq!(allocator.allocate_reserved(3, Source::Any).await.unwrap(), (last * STRIPE, 3));
        assert!(allocator.is_swept());
        target.stop();
    });
}

/// The store cannot be read for a while. Idle stripes stay idle, and nothing is lost.
#[test]
fn groups_that_cannot_be_read_fail_the_call_and_no_more() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        leave_idle(bench, &allocator, &[1, 70]).await;
        allocator.idle.borrow_mut().age();
        for group in [3, 4, 3, 4] {
            allocator.load(group).await.unwrap();
        }
        bench.kv.fail_reads(true);
        assert!(allocator.discard_some(Discard::OnDrives, 0..u64::MAX).await.is_err());
        assert!(allocator.allocate_reserved(1, Source::Any).await.is_err());
        assert!(allocator.take_empty_stripe(0, Source::Any).await.is_err());
        bench.kv.fail_reads(false);
        assert_eq!(idle_stripes(bench, &allocator), [1, 70]);
        assert_eq!(allocator.usage().free_blocks, bench.volume.blocks());
        assert_eq!(allocator.discard_some(Discard::OnDrives, 0..u64::MAX).await.unwrap(), 1);
        assert_eq!(allocator.discard_some(Discard::OnDrives, 0..u64::MAX).await.unwrap(), 1);
        assert_eq!(written_stripes(bench).await, []);
    });
}

/// Regression: a commit of rows that first makes freed blocks free fails there. Nothing was committed, and
/// the next one says that all is well.
#[test]
fn a_commit_whose_forced_sync_fails_is_completed_by_the_next_one() {
    on_a_volume(async |bench| {
        let target = swept_target(bench).await;
        let key = chunk_key(2, 0);
        // One block waits to be free, and blocks in many groups wait for a commit.
        crate::tests::write(&target, chunk_key(3, 0), 0, &[4]).await;
        target.commit_all().await.unwrap();
        target.punch(crate::tests::file(3), 0..1, 0).await.unwrap();
        target.commit(crate::tests::file(3), true).await.unwrap();
        take_in_each_group(&target.allocator).await;
        assert!(target.allocator.space_mut().is_crowded());
        crate::tests::write(&target, key, 0, &[5; 3]).await;
        bench.kv.fail_flushes(true);
        assert!(target.commit(key.file, true).await.is_err());
        bench.kv.fail_flushes(false);
        target.commit(key.file, false).await.unwrap();
        target.stop();
        bench.kv.crash();
        let target = bench.target().await;
        assert_eq!(crate::tests::fills(&target, key).await[..4], [5, 5, 5, 0]);
        target.stop();
    });
}

/// Regression: a batch of a discard is taken from two groups. While the second one is read, the stripes of
/// the first one count as used, and a write that has space is refused.
#[test]
fn blocks_about_to_be_discarded_count_as_free() {
    on_a_volume(async |bench| {
        for stripe in 28..36 {
            bench.write_stripe(stripe, 5).await;
        }
        bench.put_marks(&[0..28 * STRIPE, 36 * STRIPE..bench.volume.blocks()]).await;
        let target = swept_target(bench).await;
        let allocator = target.allocator.clone();
        assert_eq!(idle_stripes(bench, &allocator), (28..36).collect::<Vec<_>>());
        allocator.idle.borrow_mut().age();
        for group in [2, 3, 4, 2, 3, 4] {
            allocator.load(group).await.unwrap();
        }
        let in_memory = |group: u64| allocator.space().bits_in_memory(group).is_some();
        assert!(!in_memory(0) && !in_memory(1));
        let wanted = 64 - bench.volume.blocks() / 50;
        let discard = allocator.discard_some(Discard::OnDrives, 0..u64::MAX);
        let reserve = async {
            let mut refused = 0;
            for _ in 0..30 {
                match allocator.reserve(wanted) {
                    Ok(()) => allocator.release(wanted),
                    Err(_) => refused += 1,
                }
                penstock_base::env::yield_now().await;
            }
            refused
        };
        let (discarded, refused) = futures_util::future::join(discard, reserve).await;
        assert_eq!((discarded.unwrap(), refused), (8, 0), "discarded, refused");
        target.stop();
    });
}

/// Regression: many groups are in memory, and none is needed. Every commit flushes the store, since groups
/// leave the memory only when another one is read.
#[test]
fn groups_that_are_not_needed_do_not_make_each_commit_flush() {
    on_a_volume(async |bench| {
        let target = swept_target(bench).await;
        for stripe in take_in_each_group(&target.allocator).await {
            target.allocator.give_back(vec![(stripe * STRIPE, STRIPE)]);
        }
        let before = bench.kv.usage().flushes;
        for ino in 10..20 {
            crate::tests::write(&target, chunk_key(ino, 0), 0, &[5; 3]).await;
            target.commit(crate::tests::file(ino), true).await.unwrap();
        }
        let flushes = bench.kv.usage().flushes - before;
        assert!(flushes <= 1, "{flushes} flushes for 10 deferred commits");
        target.stop();
    });
}

/// Regression: a stripe is seen to be unwritten, and is written and freed again while its group is read. It
/// is taken as one that is unwritten.
#[test]
fn a_stripe_that_is_taken_is_unwritten() {
    on_a_volume(async |bench| {
        bench.put_marks(&[0..31 * STRIPE, 32 * STRIPE..bench.volume.blocks()]).await;
        let target = swept_target(bench).await;
        let allocator = target.allocator.clone();
        // `last_empty` has the group in memory, and it leaves while the table is asked: as if it had.
        let taken = async {
            allocator.idle.borrow_mut().add_reusable(31..32);
            allocator.take_empty_stripe(STRIPE, Source::Any).await
        };
        let other = async {
            let (block, count) = allocator.allocate_reserved(STRIPE, Source::Any).await?;
            let (data, crcs) = crate::tests::blocks_of(&[1; STRIPE as usize]);
            bench.volume.write(block, &data, &crcs).await?;
            allocator.give_back(vec![(block, count)]);
            Ok::<_, ChunkError>(())
        };
        let (other, taken) = futures_util::future::join(other, taken).await;
        other.unwrap();
        if let Some(stripe) = taken.unwrap() {
            assert!(bench.volume.is_unwritten(stripe).await.unwrap(), "stripe {stripe}");
        }
        target.stop();
    });
}

/// Regression: before the sweep has come to them, groups of written stripes without a bit are read, and each
/// of their stripes is looked up, by each allocation again.
#[test]
fn groups_without_a_usable_stripe_are_not_read_for_each_allocation() {
    on_a_volume(async |bench| {
        for stripe in 0..128 {
            bench.write_stripe(stripe, 5).await;
        }
        let allocator = bench.allocator();
        assert_eq!(allocator.allocate_reserved(STRIPE, Source::Any).await.unwrap(), (128 * STRIPE, STRIPE));
        let before = allocator.group_reads();
        for at in 1..5 {
            assert_eq!(
                allocator.allocate_reserved(STRIPE, Source::Any).await.unwrap(),
                ((128 + at) * STRIPE, STRIPE)
            );
        }
        let reads = allocator.group_reads() - before;
        assert!(reads <= 1, "{reads} groups read for 4 allocations");
    });
}

/// Regression: before the sweep ended, each full chunk read all groups with empty stripes again.
#[test]
fn groups_without_an_unwritten_stripe_are_not_read_for_each_full_chunk() {
    on_a_volume(async |bench| {
        for stripe in 32..bench.stripes() {
            bench.write_stripe(stripe, 5).await;
        }
        let allocator = bench.allocator();
        let mut reads = Vec::new();
        for _ in 0..5 {
            let before = allocator.group_reads();
            let taken = allocator.take_empty_stripe(0, Source::Any).await.unwrap();
            assert!(taken.is_some_and(|stripe| stripe < 32), "{taken:?}");
            reads.push(allocator.group_reads() - before);
        }
        assert!(reads[1..].iter().sum::<u64>() <= 1, "groups read for each of 5 stripes: {reads:?}");
    });
}

/// Regression: a sweep that failed began with the first stripe again.
#[test]
fn a_sweep_that_fails_goes_on_where_it_was() {
    on_a_volume(async |bench| {
        for stripe in 0..bench.stripes() - 8 {
            bench.write_stripe(stripe, 5).await;
        }
        let allocator = bench.allocator();
        let fail = async {
            while allocator.group_reads() < 4 {
                penstock_base::env::yield_now().await;
            }
            bench.kv.fail_reads(true);
        };
        let (swept, ()) = futures_util::future::join(allocator.sweep(), fail).await;
        swept.unwrap_err();
        bench.kv.fail_reads(false);
        allocator.sweep_on().await.unwrap();
        let (judged, before) = (allocator.swept.get(), allocator.group_reads());
        assert!(judged > 0, "what was found out is kept");
        allocator.sweep().await.unwrap();
        let groups = allocator.space().groups().count();
        assert!(allocator.group_reads() - before < groups, "it began again");
        assert!(allocator.is_idle(0));
    });
}
