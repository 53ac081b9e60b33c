use super::*;
use crate::tests::{Bench, STRIPE, chunk_key, extent, on_a_volume};
use penstock_base::ErrorKind;

/// Takes a stripe if it is empty.
async fn take(allocator: &Allocator, stripe: u64) -> bool {
    allocator.load_of(stripe).await.unwrap();
    allocator.space_mut().take_stripe(stripe)
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
    let stripe = allocator.last_empty(|_| true).await.unwrap().unwrap();
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
            assert_eq!(allocator.allocate_reserved(wanted).await.unwrap(), expected, "{wanted} blocks");
        }
        let mut left = allocator.usage().free_blocks;
        while left > 0 {
            left -= allocator.allocate_reserved(left).await.unwrap().1;
        }
        let error = allocator.allocate_reserved(2).await.unwrap_err();
        assert!(matches!(error, ChunkError::NoSpace { wanted_blocks: 2, .. }), "{error}");
    });
}

#[test]
fn a_stripe_that_cannot_be_read_is_not_allocated_from() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        allocator.sweep().await.unwrap();
        bench.write_stripe(0, 9).await;
        assert_eq!(allocator.allocate_reserved(1).await.unwrap(), (0, 1));
        bench.corrupt(9);
        let io = penstock_drive::Io::new(penstock_drive::Class::Client, "test.read");
        assert!(bench.volume.read(0, STRIPE, io).await.is_err());
        assert_eq!(allocator.allocate_reserved(1).await.unwrap(), (STRIPE, 1));
    });
}

#[test]
fn only_a_stripe_that_lost_its_last_block_becomes_idle() {
    on_a_volume(async |bench| {
        let allocator = bench.allocator();
        for _ in 0..3 {
            allocator.allocate_reserved(STRIPE).await.unwrap();
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
            let stripe = allocator.take_empty_stripe(0).await.unwrap().unwrap();
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
        assert_eq!(allocator.allocate_reserved(1).await.unwrap(), (0, 1));
        assert_eq!(allocator.take_empty_stripe(0).await.unwrap(), Some(1));
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
                left -= allocator.allocate_reserved(left).await.unwrap().1;
            }
            let found = allocator.take_empty_stripe(mine).await.unwrap();
            assert_eq!(found.is_some(), expected, "{used} used, {mine} of {reserved} reserved");
        }
        // A stripe that was discarded for such a write stays idle, too.
        let allocator = bench.allocator();
        leave_idle(bench, &allocator, &[2]).await;
        assert_eq!(allocator.discard_some(Discard::InTable).await.unwrap(), 1);
        allocator.reserve(full).unwrap();
        for _ in 0..headroom / STRIPE {
            take_some_stripe(&allocator).await;
        }
        assert_eq!(allocator.take_empty_stripe(0).await.unwrap(), None);
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
                allocator.take_idle(Discard::OnDrives).await.unwrap(),
                None,
                "{idle:?} have not rested"
            );
            allocator.idle.borrow_mut().age();
            let mut batches = Vec::new();
            while let Some(batch) = allocator.take_idle(Discard::OnDrives).await.unwrap() {
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
        assert_eq!(allocator.discard_some(Discard::OnDrives).await.unwrap(), 2);
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
        assert_eq!(allocator.allocate_reserved(1).await.unwrap(), (0, 1));
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
            let run = allocator.allocate_reserved(STRIPE).await.unwrap();
            assert_eq!(run, (expected * STRIPE, STRIPE), "the first one that is unwritten");
        }
        assert_eq!(idle_stripes(bench, &allocator), []);
        allocator.sweep().await.unwrap();
        assert!(allocator.is_swept());
        assert_eq!(idle_stripes(bench, &allocator), [1], "nothing owns it");
        let free = bench.volume.blocks() - 2 * STRIPE - 2 * u64::from(most);
        assert_eq!(allocator.usage().free_blocks, free);
        // Groups leave the memory, but not what their rows lack.
        let groups = allocator.space().groups().count();
        for group in 0..groups {
            allocator.load(group).await.unwrap();
        }
        let mut left = free;
        while left > 0 {
            let (block, count) = allocator.allocate_reserved(left).await.unwrap();
            let is_owned =
                |block: u64| [0, 40].contains(&(block / STRIPE)) && block % STRIPE < u64::from(most);
            assert!(!(block..block + count).any(is_owned), "{count} blocks from {block} on");
            left -= count;
        }
        assert!(allocator.allocate_reserved(1).await.is_err());
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
        assert_eq!(allocator.allocate_reserved(3).await.unwrap(), (last * STRIPE, 3));
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
        assert!(allocator.discard_some(Discard::OnDrives).await.is_err());
        assert!(allocator.allocate_reserved(1).await.is_err());
        assert!(allocator.take_empty_stripe(0).await.is_err());
        bench.kv.fail_reads(false);
        assert_eq!(idle_stripes(bench, &allocator), [1, 70]);
        assert_eq!(allocator.usage().free_blocks, bench.volume.blocks());
        assert_eq!(allocator.discard_some(Discard::OnDrives).await.unwrap(), 1);
        assert_eq!(allocator.discard_some(Discard::OnDrives).await.unwrap(), 1);
        assert_eq!(written_stripes(bench).await, []);
    });
}
