use super::*;
use crate::tests::{Random, Seed};
use penstock_sim::seeds;

fn data(blocks: u32, fill: u8) -> (Buf, Vec<u32>) {
    (Buf::copy_from(&vec![fill; blocks as usize * BLOCK_BYTES]), vec![u32::from(fill); blocks as usize])
}

fn insert(dirty: &mut DirtyRuns, first: u32, blocks: u32, fill: u8, reserved: &[Range<u32>]) -> u64 {
    let (data, crcs) = data(blocks, fill);
    dirty.insert(first, &data, &crcs, reserved)
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
fn a_full_chunk_is_one_run() {
    let mut dirty = DirtyRuns::default();
    assert_eq!(insert(&mut dirty, 0, 256, 1, &[0..256]), 256);
    let (first, parts, crcs) = dirty.first(u32::MAX).unwrap();
    assert_eq!((first, parts.len(), crcs.len(), dirty.reserved()), (0, 1, 256, 256));
    assert_eq!(dirty.first(100).unwrap().2.len(), 100);
}

/// Random writes and drops, each compared with a plain list of blocks.
#[test]
fn runs_are_as_single_blocks_would_be() {
    for seed in seeds(0..8) {
        let _printed = Seed(seed);
        compare_with_single_blocks(&mut Random::new(seed));
    }
}

fn compare_with_single_blocks(random: &mut Random) {
    const BLOCKS: u32 = 24;
    let mut below = |bound: u32| random.below(bound.into()) as u32;
    let mut dirty = DirtyRuns::default();
    // By block: its fill, and whether it has a reservation.
    let mut plain: Vec<Option<(u8, bool)>> = vec![None; BLOCKS as usize];
    for round in 0..1500u32 {
        let first = below(BLOCKS);
        let count = 1 + below(BLOCKS - first);
        let blocks = first..first + count;
        if below(3) > 0 {
            let fill = (round % 250 + 1) as u8;
            // Some of the blocks that are not dirty need a reservation.
            let reserved: Vec<Range<u32>> =
                dirty.gaps(blocks.clone()).into_iter().filter(|_| below(2) == 0).collect();
            let new = insert(&mut dirty, first, count, fill, &reserved);
            assert_eq!(new, blocks.clone().filter(|block| plain[*block as usize].is_none()).count() as u64);
            for block in blocks {
                let had = plain[block as usize].is_some_and(|(_, reserved)| reserved);
                let has = had || reserved.iter().any(|range| range.contains(&block));
                plain[block as usize] = Some((fill, has));
            }
        } else {
            let dropped = dirty.remove(blocks.clone());
            let gone: Vec<_> = blocks.filter_map(|block| plain[block as usize].take()).collect();
            let reserved = gone.iter().filter(|(_, reserved)| *reserved).count() as u64;
            assert_eq!(dropped, Dropped { blocks: gone.len() as u64, reserved });
        }
        assert_eq!(dirty.blocks() as usize, plain.iter().flatten().count());
        assert_eq!(dirty.reserved() as usize, plain.iter().flatten().filter(|(_, has)| *has).count());
        for (block, expected) in (0..).zip(&plain) {
            let found = dirty.get(block, block + 1).map(|(data, crcs)| (data[0], crcs));
            assert_eq!(found, expected.map(|(fill, _)| (fill, vec![u32::from(fill)])));
            let next = (block..BLOCKS).find(|block| plain[*block as usize].is_some());
            assert_eq!(dirty.next(block, BLOCKS), next);
        }
        let first = (0..BLOCKS).find(|block| plain[*block as usize].is_some());
        let run = dirty.first(7);
        assert_eq!(run.as_ref().map(|(first, ..)| *first), first);
        if let Some((first, parts, crcs)) = run {
            let length = plain[first as usize..].iter().take_while(|block| block.is_some()).count().min(7);
            assert_eq!(crcs.len(), length);
            assert_eq!(parts.iter().map(Buf::len).sum::<usize>(), length * BLOCK_BYTES);
        }
    }
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
#[should_panic(expected = "are not dirty")]
fn a_dirty_block_gets_no_second_reservation() {
    let mut dirty = DirtyRuns::default();
    insert(&mut dirty, 0, 2, 1, &[0..2]);
    insert(&mut dirty, 1, 2, 2, &[1..3]);
}

/// Runs of 2..5, 5..6 and 9..12; the blocks of the second one have a reservation.
fn three_runs() -> DirtyRuns {
    let mut dirty = DirtyRuns::default();
    insert(&mut dirty, 2, 3, 1, &[]);
    insert(&mut dirty, 5, 1, 2, &[Range { start: 5, end: 6 }]);
    insert(&mut dirty, 9, 3, 3, &[]);
    dirty
}

#[test]
fn gaps_are_the_blocks_between_runs() {
    let cases: [(Range<u32>, &[Range<u32>]); 9] = [
        (0..16, &[0..2, 6..9, 12..16]),
        (0..2, &[Range { start: 0, end: 2 }]),
        (2..6, &[]),
        (3..4, &[]),
        (4..10, &[Range { start: 6, end: 9 }]),
        (5..7, &[Range { start: 6, end: 7 }]),
        (11..13, &[Range { start: 12, end: 13 }]),
        (7..7, &[]),
        (20..30, &[Range { start: 20, end: 30 }]),
    ];
    let dirty = three_runs();
    for (blocks, expected) in cases {
        assert_eq!(dirty.gaps(blocks.clone()), expected, "{blocks:?}");
    }
}

#[test]
fn a_search_for_a_dirty_block_ends_before_its_end() {
    let dirty = three_runs();
    for (block, end, expected) in [
        (0, 16, Some(2)),
        (0, 3, Some(2)),
        (0, 2, None),
        (3, 16, Some(3)),
        (3, 3, None),
        (6, 9, None),
        (6, 10, Some(9)),
        (12, 16, None),
        (11, u32::MAX, Some(11)),
    ] {
        assert_eq!(dirty.next(block, end), expected, "from {block} to {end}");
    }
}

#[test]
fn data_is_returned_up_to_the_end_of_its_run() {
    let dirty = three_runs();
    // Columns: first block, end, and the fill and number of blocks found.
    for (block, end, expected) in [
        (2, 16, Some((1, 3))),
        (3, 16, Some((1, 2))),
        (3, 4, Some((1, 1))),
        (5, 16, Some((2, 1))),
        (6, 16, None),
        (10, 11, Some((3, 1))),
        (12, 16, None),
    ] {
        let found = dirty.get(block, end).map(|(data, crcs)| {
            assert_eq!(data.len(), crcs.len() * BLOCK_BYTES);
            assert!(crcs.iter().all(|crc| *crc == u32::from(data[0])), "checksums belong to the data");
            (data[0], crcs.len())
        });
        assert_eq!(found, expected, "from {block} to {end}");
    }
}

#[test]
fn the_first_run_spans_adjacent_writes_up_to_its_bound() {
    let dirty = three_runs();
    for (most, parts, blocks) in [(1, 1, 1), (3, 1, 3), (4, 2, 4), (5, 2, 4), (u32::MAX, 2, 4)] {
        let (first, data, crcs) = dirty.first(most).unwrap();
        assert_eq!((first, data.len(), crcs.len()), (2, parts, blocks), "at most {most}");
    }
    assert!(DirtyRuns::default().first(1).is_none());
}

#[test]
fn a_dropped_block_passes_its_reservation_to_the_caller() {
    // Columns: a range; the blocks dropped, and those with a reservation; the same of the blocks left.
    for (blocks, dropped, left) in [
        (0..2, (0, 0), (7, 1)),
        (3..4, (1, 0), (6, 1)),
        (4..6, (2, 1), (5, 0)),
        (5..10, (2, 1), (5, 0)),
        (0..u32::MAX, (7, 1), (0, 0)),
    ] {
        let mut dirty = three_runs();
        let found = dirty.remove(blocks.clone());
        assert_eq!((found.blocks, found.reserved), dropped, "{blocks:?}");
        assert_eq!((dirty.blocks(), dirty.reserved()), left, "{blocks:?}");
        assert_eq!(dirty.is_empty(), left.0 == 0, "{blocks:?}");
        assert_eq!(dirty.remove(blocks.clone()), Dropped::default(), "{blocks:?} again");
    }
}

#[test]
fn a_write_over_dirty_blocks_keeps_their_reservations() {
    let mut dirty = three_runs();
    assert_eq!(insert(&mut dirty, 0, 12, 9, &[6..9, 0..2]), 5, "five blocks were not dirty");
    assert_eq!((dirty.blocks(), dirty.reserved()), (12, 6));
    for (block, expected) in [(0, 1), (2, 0), (4, 0), (5, 1), (8, 1), (9, 0), (11, 0)] {
        assert_eq!(dirty.remove(block..block + 1).reserved, expected, "block {block}");
    }
}

#[test]
fn parts_of_a_write_that_do_not_fit_together_are_refused() {
    let try_insert = |blocks: u32, crcs: usize, reserved: &[Range<u32>]| {
        let mut dirty = three_runs();
        let (data, _) = data(blocks, 1);
        let insert = || dirty.insert(0, &data, &vec![1; crcs], reserved);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(insert)).is_ok()
    };
    let cases: [(u32, usize, &[Range<u32>], bool); 6] = [
        (2, 2, &[], true),
        (2, 2, &[Range { start: 0, end: 2 }], true),
        (2, 3, &[], false),
        (3, 2, &[], false),
        (3, 3, &[Range { start: 1, end: 3 }], false),
        (3, 3, &[Range { start: 2, end: 3 }], false),
    ];
    for (blocks, crcs, reserved, expected) in cases {
        assert_eq!(try_insert(blocks, crcs, reserved), expected, "{blocks} {crcs} {reserved:?}");
    }
}
