use super::*;
use crate::tests::{Random, STRIPE, Seed};
use penstock_sim::seeds;

#[test]
fn small_runs_come_from_below_and_stripes_from_above() {
    let mut space = Space::new(64 * 4, 64);
    assert_eq!(space.allocate(10, |_| true), Some((0, 10)));
    assert_eq!(space.last_empty(|_| true), Some(3));
    assert!(space.take_stripe(3));
    assert_eq!(space.allocate(100, |_| true), Some((10, 54)));
    assert_eq!(space.allocate(1, |_| true), Some((64, 1)));
    assert_eq!(space.free((0, 64)), [0]);
    assert_eq!(space.allocate(1, |_| true), Some((65, 1)));
    assert_eq!(space.last_empty(|stripe| stripe != 2), Some(0));
}

#[test]
fn a_group_is_loaded_as_its_bits_say() {
    let mut state = 7u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    for round in 0..40 {
        let mut words = vec![0u64; GROUP_WORDS];
        for word in &mut words {
            *word = match random() % 4 {
                0 => 0,
                1 => u64::MAX,
                2 => u64::MAX << (random() % 64),
                _ => random() << 31 ^ random(),
            };
        }
        // The last group may be incomplete; the last stripe may not.
        let blocks = 2 * GROUP_BLOCKS - 64 * (random() % 3);
        let mut space = Space::new(blocks, 64);
        space.load_group(round % 2, &words);
        let wanted: Vec<u64> = bits(round % 2, &words).filter(|block| *block < blocks).collect();
        let found: Vec<u64> = (0..blocks).filter(|block| space.used.get(*block)).collect();
        assert!(found == wanted && space.is_counted(), "round {round}");
        assert_eq!(space.committed_group(round % 2), space.used.group(round % 2));
    }
}

#[test]
fn a_wrong_count_is_found_and_counted_again() {
    let mut space = Space::new(64 * 4, 64);
    space.allocate(10, |_| true);
    assert!(space.is_counted());
    space.used_blocks -= 3;
    space.empty.insert(0);
    assert!(!space.is_counted());
    space.recount();
    assert!(space.is_counted());
    assert_eq!(space.usage().free_blocks, 64 * 4 - 10);
}

#[test]
fn runs_change_the_bits_that_they_cover_and_no_others() {
    for (start, count) in [(0, 1), (3, 61), (60, 8), (64, 64), (1, 300), (127, 2)] {
        let mut bitmap = Bitmap::new(GROUP_BLOCKS);
        bitmap.change((start, count), true);
        let set: Vec<u64> = (0..GROUP_BLOCKS).filter(|block| bitmap.get(*block)).collect();
        assert_eq!(set, (start..start + count).collect::<Vec<_>>());
        bitmap.change((start, count), false);
        assert!((0..GROUP_BLOCKS).all(|block| !bitmap.get(block)));
    }
}

#[test]
#[should_panic = "owned once"]
fn a_block_is_not_taken_twice() {
    let mut space = Space::new(64 * 4, 64);
    space.mark((70, 1), true);
    space.mark((64, 64), true);
}

#[test]
fn promises_keep_the_reserve_free() {
    let mut space = Space::new(6400, 64);
    let usage = space.usage();
    assert_eq!(usage.headroom_blocks, 128);
    assert!(!space.reserve(6400 - 127));
    assert!(space.reserve(6400 - 128));
    assert!(!space.reserve(1));
    // 128 blocks are free beside the reservations: two stripes. A caller can use its own reservation on
    // top of them.
    assert!(space.has_beside_reservations(128, 0) && !space.has_beside_reservations(129, 0));
    assert!(space.has_beside_reservations(192, 64) && !space.has_beside_reservations(193, 64));
    space.release(6400 - 128);
    assert!(space.reserve(1));
}

/// Plain lists of blocks, with the rules of [`Space`].
struct Plain {
    used: Vec<bool>,
    committed: Vec<bool>,
    reserved: u64,
    discarding: u64,
}

const STRIPES: u64 = 20;

impl Plain {
    fn stripe(&self, stripe: u64) -> &[bool] {
        &self.used[(stripe * STRIPE) as usize..((stripe + 1) * STRIPE) as usize]
    }

    fn is_empty(&self, stripe: u64) -> bool {
        !self.stripe(stripe).contains(&true)
    }

    fn set(&mut self, (start, count): Run, used: bool) {
        (start..start + count).for_each(|block| self.used[block as usize] = used);
    }

    fn used_blocks(&self) -> u64 {
        self.used.iter().filter(|used| **used).count() as u64
    }

    /// The run that an allocation must take: in the lowest partly used stripe, or else the lowest empty one.
    fn run(&self, wanted: u64, usable: impl Fn(u64) -> bool) -> Option<Run> {
        let partial = |stripe: &u64| !self.is_empty(*stripe) && self.stripe(*stripe).contains(&false);
        let all = || (0..STRIPES).filter(|stripe| usable(*stripe));
        let stripe = all().find(partial).or_else(|| all().find(|stripe| self.is_empty(*stripe)))?;
        let free = |block: &u64| !self.used[*block as usize];
        let blocks = stripe * STRIPE..(stripe + 1) * STRIPE;
        let start = blocks.clone().find(free)?;
        Some((start, (start..blocks.end).take_while(free).count().min(wanted as usize) as u64))
    }

    /// A run of blocks with the same state, from a random block on.
    fn random_run(&self, random: &mut Random, is: impl Fn(usize) -> bool) -> Option<Run> {
        let start = random.below(STRIPES * STRIPE);
        let most = 1 + random.below(2 * STRIPE);
        let end = (start + most).min(STRIPES * STRIPE);
        let count = (start..end).take_while(|block| is(*block as usize)).count() as u64;
        (count > 0).then_some((start, count))
    }
}

fn assert_same(space: &Space, plain: &Plain) {
    assert!(space.is_counted(), "the derived counts agree with the bits");
    let blocks = STRIPES * STRIPE;
    let free_blocks = blocks.saturating_sub(plain.used_blocks() + plain.reserved);
    let usage = SpaceUsage { total_blocks: blocks, free_blocks, headroom_blocks: blocks / 50 };
    assert_eq!(space.usage(), usage);
    assert_eq!(space.reported().free_blocks, free_blocks + plain.discarding);
    for block in 0..blocks {
        assert_eq!(space.used.get(block), plain.used[block as usize], "block {block} is used");
        assert_eq!(space.is_committed(block), plain.committed[block as usize], "block {block} is committed");
    }
    (0..STRIPES).for_each(|stripe| assert_eq!(space.is_empty(stripe), plain.is_empty(stripe)));
}

fn step(space: &mut Space, plain: &mut Plain, random: &mut Random) {
    let wanted = 1 + random.below(2 * STRIPE);
    let barred = random.below(STRIPES);
    let usable = |stripe: u64| stripe != barred;
    match random.below(10) {
        0 => {
            let free = (STRIPES * STRIPE).saturating_sub(plain.used_blocks() + plain.reserved);
            let enough = free + plain.discarding >= wanted + STRIPES * STRIPE / 50;
            assert_eq!(space.reserve(wanted), enough, "{wanted} blocks of {free}");
            plain.reserved += if enough { wanted } else { 0 };
        }
        1 => {
            let released = random.below(plain.reserved + 1);
            space.release(released);
            plain.reserved -= released;
        }
        2 | 3 => {
            let run = space.allocate(wanted, usable);
            assert_eq!(run, plain.run(wanted, usable), "{wanted} blocks without stripe {barred}");
            run.into_iter().for_each(|run| plain.set(run, true));
        }
        4 => {
            let stripe = space.last_empty(usable);
            let highest = (0..STRIPES).rev().find(|stripe| plain.is_empty(*stripe) && usable(*stripe));
            assert_eq!(stripe, highest);
            if let Some(stripe) = stripe {
                assert!(space.take_stripe(stripe));
                plain.set((stripe * STRIPE, STRIPE), true);
            }
        }
        5 => {
            let taken = space.take_stripe(barred);
            assert_eq!(taken, plain.is_empty(barred), "stripe {barred}");
            if taken {
                plain.set((barred * STRIPE, STRIPE), true);
                space.set_discarding(STRIPE);
                plain.discarding = STRIPE;
            }
        }
        6 | 7 => {
            space.set_discarding(0);
            plain.discarding = 0;
            let Some((start, count)) = plain.random_run(random, |block| plain.used[block]) else { return };
            let empty = space.free((start, count));
            plain.set((start, count), false);
            let stripes = start / STRIPE..=(start + count - 1) / STRIPE;
            assert_eq!(empty, stripes.filter(|stripe| plain.is_empty(*stripe)).collect::<Vec<_>>());
        }
        8 => {
            let used = random.below(2) == 0;
            let Some((start, count)) = plain.random_run(random, |block| plain.committed[block] != used)
            else {
                return;
            };
            let runs = [(start, count)];
            let rows =
                if used { space.commit(runs.to_vec(), &[]) } else { space.commit(Vec::new(), &runs) }.rows;
            (start..start + count).for_each(|block| plain.committed[block as usize] = used);
            assert_eq!(rows, [(0, encode_group(space.committed_group(0)))]);
        }
        _ => {
            let (block, owned) = (random.below(STRIPES * STRIPE), random.below(2) == 0);
            if owned {
                space.mark_owned(block)
            } else {
                space.mark_unowned(block)
            }
            (plain.used[block as usize], plain.committed[block as usize]) = (owned, owned);
        }
    }
}

#[test]
fn free_space_is_as_a_plain_list_of_blocks() {
    for seed in seeds(0..12) {
        let _printed = Seed(seed);
        let mut random = Random::new(seed);
        let blocks = STRIPES * STRIPE;
        let mut space = Space::new(blocks, STRIPE);
        let none = || vec![false; blocks as usize];
        let mut plain = Plain { used: none(), committed: none(), reserved: 0, discarding: 0 };
        for _ in 0..600 {
            // A discard is over before the next operation that frees blocks.
            if plain.discarding > plain.used_blocks() {
                space.set_discarding(0);
                plain.discarding = 0;
            }
            step(&mut space, &mut plain, &mut random);
            assert_same(&space, &plain);
        }
    }
}

#[test]
fn bits_are_read_as_runs_across_words() {
    let cases: [(&[u64], &[Run]); 7] = [
        (&[0, 0], &[]),
        (&[1, 0], &[(0, 1)]),
        (&[u64::MAX, u64::MAX], &[(0, 128)]),
        (&[1 << 63, 1], &[(63, 2)]),
        (&[1 << 63, 2], &[(63, 1), (65, 1)]),
        (&[0b1011, 0, 3 << 62], &[(0, 2), (3, 1), (190, 2)]),
        (&[!1, 0], &[(1, 63)]),
    ];
    for (words, expected) in cases {
        for group in [0, 3] {
            let moved: Vec<Run> =
                expected.iter().map(|(start, count)| (start + group * GROUP_BLOCKS, *count)).collect();
            assert_eq!(runs(group, words), moved, "{words:x?} in group {group}");
            let blocks: Vec<u64> = moved.iter().flat_map(|(start, count)| *start..start + count).collect();
            assert_eq!(bits(group, words).collect::<Vec<_>>(), blocks, "{words:x?} in group {group}");
        }
    }
}

#[test]
fn a_commit_returns_the_row_of_each_group_that_changed() {
    let blocks = 3 * GROUP_BLOCKS;
    let cases: [(&[Run], &[Run], &[u64]); 5] = [
        (&[], &[], &[]),
        (&[(5, 1)], &[], &[0]),
        (&[(GROUP_BLOCKS - 1, 2)], &[], &[0, 1]),
        (&[(GROUP_BLOCKS - 1, GROUP_BLOCKS + 2)], &[], &[0, 1, 2]),
        // A run may be allocated and freed in one commit.
        (&[(GROUP_BLOCKS, 4)], &[(GROUP_BLOCKS, 4)], &[1]),
    ];
    for (allocated, freed, groups) in cases {
        let mut space = Space::new(blocks, STRIPE);
        let rows = space.commit(allocated.to_vec(), freed).rows;
        let found: Vec<u64> = rows.iter().map(|(group, _)| *group).collect();
        assert_eq!(found, groups, "{allocated:?} {freed:?}");
        for (group, row) in rows {
            assert_eq!(row, encode_group(space.committed_group(group)), "group {group}");
        }
        let left = allocated.iter().filter(|run| !freed.contains(run));
        let committed: Vec<u64> = left.flat_map(|(start, count)| *start..start + count).collect();
        let all = (0..blocks).filter(|block| space.is_committed(*block));
        assert_eq!(all.collect::<Vec<_>>(), committed);
        assert_eq!(space.usage().free_blocks, blocks, "a commit allocates nothing");
    }
}

#[test]
fn bits_beyond_the_volume_are_ignored() {
    let blocks = GROUP_BLOCKS + 2 * STRIPE;
    let mut space = Space::new(blocks, STRIPE);
    space.load_group(1, &vec![u64::MAX; GROUP_WORDS]);
    assert_eq!(space.usage().free_blocks, GROUP_BLOCKS);
    assert!(space.is_counted() && space.is_committed(blocks - 1) && !space.is_committed(GROUP_BLOCKS - 1));
    assert_eq!(space.groups(), 2);
}

#[test]
fn a_space_that_does_not_add_up_stops_the_process() {
    type Case = (&'static str, fn(&mut Space));
    let cases: [Case; 7] = [
        ("a release of more than is reserved", |space| space.release(1)),
        ("free blocks are freed", |space| drop(space.free((0, 1)))),
        ("a run of no block is freed", |space| drop(space.free((0, 0)))),
        ("a run of no block is allocated", |space| assert!(space.allocate(0, |_| true).is_none())),
        ("a discard of free blocks", |space| space.set_discarding(1)),
        ("a block is committed twice", |space| drop(space.commit(vec![(0, 2), (1, 1)], &[]))),
        ("a volume of no full stripes", |_| drop(Space::new(STRIPE + 1, STRIPE))),
    ];
    for (what, change) in cases {
        let mut space = Space::new(STRIPES * STRIPE, STRIPE);
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| change(&mut space)));
        assert!(changed.is_err(), "{what}");
    }
}

#[test]
fn a_block_that_counts_as_free_stays_free() {
    for (marked, freed, expect) in [
        (&[(0, 300)][..], &[(0, 300)][..], &[(0, 300)][..]),
        (&[(0, 300)], &[(10, 5), (15, 200)], &[(10, 5), (15, 200)]),
        (&[(0, 100), (101, 100)], &[(0, 64), (90, 20)], &[(0, 64), (90, 10), (101, 9)]),
        (&[(64, 64)], &[(60, 10)], &[(64, 6)]),
        (&[(64, 64)], &[(64, 64), (127, 1)], &[(64, 64)]),
        (&[(64, 63)], &[(120, 8)], &[(120, 7)]),
        (&[(10, 1), (12, 1), (63, 2)], &[(0, 256)], &[(10, 1), (12, 1), (63, 2)]),
        (&[], &[(255, 1)], &[]),
    ] {
        let mut space = Space::new(64 * 8, 64);
        let _ = space.commit(marked.to_vec(), &[]);
        // A block that is allocated in the same transaction may be freed in it.
        let before = space.committed.words.clone();
        let all = [freed, &[(400, 3)]].concat();
        let commit = space.commit(vec![(400, 3)], &all);
        assert_eq!(commit.freed, [expect, &[(400, 3)]].concat(), "{marked:?} {freed:?}");
        for (start, count) in &all {
            assert!((*start..start + count).all(|block| !space.is_committed(block)), "{marked:?} {freed:?}");
        }
        space.undo_commit(commit);
        assert_eq!(space.committed.words, before, "{marked:?} {freed:?}");
    }
}
