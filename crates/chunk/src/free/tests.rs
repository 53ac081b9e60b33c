use super::*;
use crate::rows::{GROUP_WORDS, decode_group};
use crate::tests::{Random, STRIPE, Seed};
use penstock_sim::seeds;

/// Blocks in a full group.
const GROUP_BLOCKS: u64 = 256;

/// A space, and the rows of its groups.
struct Bed {
    space: Space,
    rows: BTreeMap<u64, Vec<u64>>,
}

impl Bed {
    fn new(blocks: u64, stripe_blocks: u64) -> Self {
        Self { space: Space::new(blocks, stripe_blocks), rows: BTreeMap::new() }
    }

    /// Has a group in memory.
    fn need(&mut self, group: u64) {
        if !self.space.has(group) {
            let words = self.rows.get(&group).cloned().unwrap_or_else(|| vec![0; GROUP_WORDS]);
            assert!(self.space.load(group, &words), "group {group} is as it was counted");
        }
    }

    /// Has the groups of a run in memory, for as long as the caller loads no others.
    fn need_run(&mut self, run: Run) -> Vec<u64> {
        let groups: Vec<u64> = self.space.groups().of_runs(&[run]).collect();
        for group in &groups {
            self.need(*group);
            self.space.pin(*group, true);
        }
        groups.iter().for_each(|group| self.space.pin(*group, false));
        groups
    }

    /// As the allocator does it.
    fn allocate(&mut self, wanted: u64, usable: impl Fn(u64) -> bool) -> Option<Run> {
        for kind in [Kind::Partial, Kind::Empty] {
            let (mut from, count) = (0, self.space.groups().count());
            while let Some(group) = self.space.next_group(kind, from..count) {
                self.need(group);
                if let Some(stripe) = self.space.first_in(group, kind, &usable) {
                    return Some(self.space.allocate(stripe, wanted));
                }
                from = group + 1;
            }
        }
        None
    }

    fn last_empty(&mut self, usable: impl Fn(u64) -> bool) -> Option<u64> {
        let mut until = self.space.groups().count();
        while let Some(group) = self.space.last_usable_group(until) {
            self.need(group);
            if let Some(found) = self.space.last_empty_in(group, &usable) {
                return Some(found);
            }
            until = group;
        }
        None
    }

    fn take_stripe(&mut self, stripe: u64) -> bool {
        self.need(self.space.groups().of_stripe(stripe));
        self.space.take_stripe(stripe)
    }

    fn free(&mut self, run: Run) -> Vec<u64> {
        self.need_run(run);
        self.space.free(run)
    }

    fn is_used(&mut self, block: u64) -> bool {
        let group = self.space.groups().of_block(block);
        self.need(group);
        self.space.group(group).is_used(block - self.space.groups().range(group).start)
    }

    fn is_committed(&mut self, block: u64) -> bool {
        let group = self.space.groups().of_block(block);
        self.need(group);
        self.space.group(group).is_committed(block - self.space.groups().range(group).start)
    }

    /// Ends a commit: its rows are there. Returns the numbers of the groups whose rows changed.
    fn end(&mut self, commit: SpaceCommit) -> Vec<u64> {
        let mut changed = Vec::new();
        for (key, value) in &commit.rows {
            if let Some(group) = crate::rows::decode_group_key(key) {
                self.rows.insert(group, decode_group(value, GROUP_WORDS).unwrap());
                changed.push(group);
            }
        }
        let of_counts = commit.rows.iter().filter(|(key, _)| *key == counts_key(0)).count();
        assert_eq!(of_counts, usize::from(!changed.is_empty()), "the groups are counted in one row");
        self.space.end_commit(commit);
        changed
    }
}

#[test]
fn small_runs_come_from_below_and_stripes_from_above() {
    let mut bed = Bed::new(64 * 4, 64);
    assert_eq!(bed.allocate(10, |_| true), Some((0, 10)));
    assert_eq!(bed.last_empty(|_| true), Some(3));
    assert!(bed.take_stripe(3));
    assert_eq!(bed.allocate(100, |_| true), Some((10, 54)));
    assert_eq!(bed.allocate(1, |_| true), Some((64, 1)));
    assert_eq!(bed.free((0, 64)), [0]);
    assert_eq!(bed.allocate(1, |_| true), Some((65, 1)));
    assert_eq!(bed.last_empty(|stripe| stripe != 2), Some(0));
}

#[test]
fn groups_are_full_stripes() {
    for (blocks, stripe_blocks, ends) in [
        (256, 64, &[256][..]),
        (264, 8, &[256, 264]),
        (960, 96, &[192, 384, 576, 768, 960]),
        (960 + 96, 96, &[192, 384, 576, 768, 960, 1056]),
        (500, 250, &[250, 500]),
    ] {
        let groups = Groups::new(blocks, stripe_blocks);
        let all: Vec<u64> = (0..groups.count()).map(|group| groups.range(group).end).collect();
        assert_eq!(all, ends);
        for block in 0..blocks {
            let group = groups.of_block(block);
            assert!(groups.range(group).contains(&block));
            assert!(groups.stripes(group).contains(&(block / stripe_blocks)));
            assert_eq!(groups.of_stripe(block / stripe_blocks), group);
        }
        let parts: Vec<(u64, Run)> = groups.parts((3, blocks - 4)).collect();
        let whole: Vec<u64> = parts
            .iter()
            .flat_map(|(group, (at, count))| {
                let first = groups.range(*group).start + at;
                first..first + count
            })
            .collect();
        assert!(whole.into_iter().eq(3..blocks - 1), "{parts:?}");
        assert!(groups.parts((5, 0)).next().is_none());
    }
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
        let group = round % 2;
        let range = space.groups().range(group);
        let wanted: Vec<u64> =
            set_bits(&words).filter(|at| *at < range.end - range.start).map(|at| range.start + at).collect();
        space.set_counts(group, space.counts_of(group, &words));
        assert!(space.load(group, &words), "it is as it was counted");
        let found: Vec<u64> =
            range.clone().filter(|block| space.group(group).is_used(block - range.start)).collect();
        assert!(found == wanted && space.is_counted(), "round {round}");
        assert_eq!(space.usage().free_blocks, blocks - wanted.len() as u64);
        assert_eq!(space.counts(group), space.counts_of(group, &words));
        assert!(space.is_possible(group, space.counts(group)));
    }
}

#[test]
fn counts_that_no_group_can_have_are_known() {
    // A group of 4 stripes of 64 blocks.
    let space = Space::new(GROUP_BLOCKS, 64);
    for (used, empty, expected) in [
        (0, 4, true),
        (1, 3, true),
        (64, 3, true),
        (65, 3, false),
        (4, 0, true),
        (3, 0, false),
        (256, 0, true),
        (257, 0, false),
        (0, 5, false),
        (0, 3, false),
        (1, 4, false),
    ] {
        assert_eq!(space.is_possible(0, Counts { used, empty }), expected, "{used} used, {empty} empty");
    }
}

#[test]
fn a_wrong_count_is_found() {
    let mut bed = Bed::new(64 * 4, 64);
    bed.allocate(10, |_| true);
    assert!(bed.space.is_counted());
    bed.space.group_mut(0).miscount();
    assert!(!bed.space.is_counted());
    let mut bed = Bed::new(64 * 4, 64);
    bed.space.used_blocks += 1;
    assert!(!bed.space.is_counted());
}

#[test]
fn runs_change_the_bits_that_they_cover_and_no_others() {
    for (start, count) in [(0, 1), (3, 61), (60, 8), (64, 64), (1, 300), (127, 2)] {
        let mut words = vec![0; GROUP_WORDS];
        bits::change(&mut words, (start, count), true);
        assert!(set_bits(&words).eq(start..start + count));
        bits::change(&mut words, (start, count), false);
        assert!(set_bits(&words).next().is_none());
    }
}

#[test]
#[should_panic = "owned once"]
fn a_block_is_not_taken_twice() {
    let mut bed = Bed::new(64 * 4, 64);
    bed.need(0);
    bed.space.mark((70, 1), true);
    bed.space.mark((64, 64), true);
}

/// Bits that are not in the row stay in memory, and so do groups that are needed.
#[test]
fn a_group_leaves_the_memory_when_its_row_has_all_of_it() {
    let mut bed = Bed::new(8 * GROUP_BLOCKS, 64);
    let has = |bed: &Bed, group: u64| bed.space.bits_in_memory(group).is_some();
    let others = |bed: &mut Bed| (4..8).for_each(|group| (0..3).for_each(|_| bed.need(group)));
    for group in 0..4 {
        bed.need(group);
    }
    assert!(bed.take_stripe(0), "group 0 has an allocated stripe");
    bed.need(1);
    bed.space.pin(1, true);
    bed.need(2);
    assert!(bed.take_stripe(8), "and so has group 2");
    others(&mut bed);
    assert_eq!([0, 1, 2, 3].map(|group| has(&bed, group)), [true, true, true, false]);
    for group in [4, 5] {
        bed.need(group);
        bed.space.pin(group, true);
    }
    assert!(bed.space.is_crowded());
    [4, 5].into_iter().for_each(|group| bed.space.pin(group, false));
    let commit = bed.space.commit(vec![(0, 64)], &[]);
    others(&mut bed);
    assert!(has(&bed, 0), "its row is on its way");
    bed.end(commit);
    bed.space.pin(1, false);
    assert_eq!(bed.free((8 * 64, 64)), [8]);
    others(&mut bed);
    assert_eq!([0, 1, 2, 3].map(|group| has(&bed, group)), [false; 4]);
    assert!(!bed.space.is_crowded());
    // Freed, and not to be allocated before that is durable.
    bed.need(0);
    let commit = bed.space.commit(Vec::new(), &[(0, 64)]);
    bed.end(commit);
    others(&mut bed);
    assert!(has(&bed, 0) && bed.is_used(0) && !bed.is_committed(0));
    assert_eq!(bed.free((0, 64)), [0]);
    assert_eq!(bed.space.usage().free_blocks, 8 * GROUP_BLOCKS);
}

/// Regression: a suspect group left the memory with blocks that waited to be committed, or to be free.
#[test]
fn a_suspect_group_stays_while_blocks_of_it_are_on_their_way() {
    let mut bed = Bed::new(8 * GROUP_BLOCKS, 64);
    let others = |bed: &mut Bed| (4..8).for_each(|group| (0..3).for_each(|_| bed.need(group)));
    let has = |bed: &Bed| bed.space.bits_in_memory(0).is_some();
    let run = bed.allocate(3, |_| true).unwrap();
    bed.space.suspect(0);
    others(&mut bed);
    assert!(has(&bed));
    let commit = bed.space.commit(vec![run], &[]);
    bed.end(commit);
    others(&mut bed);
    assert!(!has(&bed), "its row has all of it");
    bed.need(0);
    assert_eq!(bed.space.counts(0), Counts { used: 256, empty: 0 });
    let commit = bed.space.commit(Vec::new(), &[run]);
    assert_eq!(commit.freed, [run]);
    bed.end(commit);
    others(&mut bed);
    assert!(has(&bed), "the blocks wait to be free");
    assert_eq!(bed.space.free(run), []);
    others(&mut bed);
    assert!(!has(&bed));
}

/// Nothing that was free in a suspect group is allocated, whether or not it is in memory, until a repair.
#[test]
fn nothing_is_allocated_in_a_suspect_group() {
    let mut bed = Bed::new(4 * GROUP_BLOCKS, 64);
    let words = |blocks: Range<u64>| {
        let mut words = vec![0; GROUP_WORDS];
        bits::change(&mut words, (blocks.start, blocks.end - blocks.start), true);
        words
    };
    bed.rows.insert(0, words(3..70));
    assert!(!bed.space.load(0, &words(3..70)), "it is not as it was counted");
    assert!(bed.space.is_suspect(0) && bed.space.counts(0) == Counts { used: 256, empty: 0 });
    bed.space.suspect(1);
    assert_eq!(bed.space.usage().free_blocks, 2 * GROUP_BLOCKS);
    for _ in 0..3 {
        (0..4).for_each(|group| bed.need(group));
    }
    assert_eq!(bed.allocate(9, |_| true), Some((2 * GROUP_BLOCKS, 9)));
    // The row of counts says so, and its blocks become free when their files give them up.
    let first = bed.need_run((3, 67));
    assert_eq!(first, [0]);
    let commit = bed.space.commit(Vec::new(), &[(3, 67)]);
    let counts = crate::rows::decode_counts(&commit.rows[1].1, 4).unwrap();
    assert_eq!(counts[..2], [Counts::SUSPECT; 2]);
    assert!(!bed.space.is_possible(0, counts[0]) && bed.space.is_possible(2, counts[2]));
    bed.end(commit);
    assert_eq!(bed.free((3, 67)), []);
    assert_eq!(bed.allocate(100, |_| true), Some((3, 61)));
    assert_eq!(bed.free((3, 61)), []);
    // A repair has looked at all owners.
    for (group, used) in [(0, 5..9), (1, 0..256)] {
        bed.rows.insert(group, words(used.clone()));
        bed.space.reload(group, &words(used.clone()));
        assert!(!bed.space.is_suspect(group) && bed.space.is_counted());
        assert_eq!(u64::from(bed.space.counts(group).used), used.end - used.start);
    }
}

#[test]
fn promises_keep_the_reserve_free() {
    let mut space = Space::new(6400, 64);
    let usage = space.usage();
    assert_eq!(usage.headroom_blocks, 128);
    assert!(!space.reserve(6400 - 127));
    assert!(space.reserve(6400 - 128));
    assert!(!space.reserve(1) && space.reserve(0));
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

/// Three groups.
const STRIPES: u64 = 75;

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

fn assert_same(bed: &mut Bed, plain: &Plain) {
    let space = &bed.space;
    assert!(space.is_counted(), "the derived counts agree with the bits");
    let blocks = STRIPES * STRIPE;
    let free_blocks = blocks.saturating_sub(plain.used_blocks() + plain.reserved);
    let usage = SpaceUsage { total_blocks: blocks, free_blocks, headroom_blocks: blocks / 50 };
    assert_eq!(space.usage(), usage);
    assert_eq!(space.reported().free_blocks, free_blocks + plain.discarding);
    for block in 0..blocks {
        assert_eq!(bed.is_used(block), plain.used[block as usize], "block {block} is used");
        assert_eq!(bed.is_committed(block), plain.committed[block as usize], "block {block} is committed");
    }
    for stripe in 0..STRIPES {
        bed.need(bed.space.groups().of_stripe(stripe));
        assert_eq!(bed.space.is_empty(stripe), plain.is_empty(stripe));
    }
}

fn step(bed: &mut Bed, plain: &mut Plain, random: &mut Random) {
    let wanted = 1 + random.below(2 * STRIPE);
    let barred = random.below(STRIPES);
    let usable = |stripe: u64| stripe != barred;
    match random.below(10) {
        0 => {
            let free = (STRIPES * STRIPE).saturating_sub(plain.used_blocks() + plain.reserved);
            let enough = free + plain.discarding >= wanted + STRIPES * STRIPE / 50;
            assert_eq!(bed.space.reserve(wanted), enough, "{wanted} blocks of {free}");
            plain.reserved += if enough { wanted } else { 0 };
        }
        1 => {
            let released = random.below(plain.reserved + 1);
            bed.space.release(released);
            plain.reserved -= released;
        }
        2 | 3 => {
            let run = bed.allocate(wanted, usable);
            assert_eq!(run, plain.run(wanted, usable), "{wanted} blocks without stripe {barred}");
            run.into_iter().for_each(|run| plain.set(run, true));
        }
        4 => {
            let stripe = bed.last_empty(usable);
            let highest = (0..STRIPES).rev().find(|stripe| plain.is_empty(*stripe) && usable(*stripe));
            assert_eq!(stripe, highest);
            if let Some(stripe) = stripe {
                assert!(bed.take_stripe(stripe));
                plain.set((stripe * STRIPE, STRIPE), true);
            }
        }
        5 => {
            let taken = bed.take_stripe(barred);
            assert_eq!(taken, plain.is_empty(barred), "stripe {barred}");
            if taken {
                plain.set((barred * STRIPE, STRIPE), true);
                bed.space.set_discarding(STRIPE);
                plain.discarding = STRIPE;
            }
        }
        6 | 7 => {
            bed.space.set_discarding(0);
            plain.discarding = 0;
            let Some((start, count)) = plain.random_run(random, |block| plain.used[block]) else { return };
            let empty = bed.free((start, count));
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
            let groups = bed.need_run((start, count));
            let runs = [(start, count)];
            let commit = match used {
                true => bed.space.commit(runs.to_vec(), &[]),
                false => bed.space.commit(Vec::new(), &runs),
            };
            (start..start + count).for_each(|block| plain.committed[block as usize] = used);
            assert_eq!(bed.end(commit), groups);
        }
        _ => {
            let (block, owned) = (random.below(STRIPES * STRIPE), random.below(2) == 0);
            let group = bed.space.groups().of_block(block);
            bed.need(group);
            let range = bed.space.groups().range(group);
            let mut words = bed.space.bits_in_memory(group).unwrap().to_vec();
            if bits::get(&words, block - range.start) != owned {
                bits::change(&mut words, (block - range.start, 1), owned);
                (plain.used[block as usize], plain.committed[block as usize]) = (owned, owned);
            }
            // As a repair does, which has written the row.
            bed.space.reload(group, &words);
            bed.rows.insert(group, words);
        }
    }
}

#[test]
fn free_space_is_as_a_plain_list_of_blocks() {
    for seed in seeds(0..12) {
        let _printed = Seed(seed);
        let mut random = Random::new(seed);
        let blocks = STRIPES * STRIPE;
        let mut bed = Bed::new(blocks, STRIPE);
        let none = || vec![false; blocks as usize];
        let mut plain = Plain { used: none(), committed: none(), reserved: 0, discarding: 0 };
        for _ in 0..600 {
            // A discard is over before the next operation that frees blocks.
            if plain.discarding > plain.used_blocks() {
                bed.space.set_discarding(0);
                plain.discarding = 0;
            }
            step(&mut bed, &mut plain, &mut random);
            assert_same(&mut bed, &plain);
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
        assert_eq!(bits::runs_within(words, 0, 64 * words.len() as u64), expected, "{words:x?}");
        assert!(set_bits(words).eq(expected.iter().flat_map(|(start, count)| *start..start + count)));
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
        let mut bed = Bed::new(blocks, STRIPE);
        (0..3).for_each(|group| bed.need(group));
        let commit = bed.space.commit(allocated.to_vec(), freed);
        for (key, row) in commit.rows.iter().filter(|(key, _)| *key != counts_key(0)) {
            let group = crate::rows::decode_group_key(key).unwrap();
            assert_eq!(*row, encode_group(bed.space.committed_group(group)), "group {group}");
        }
        let counts = bed.space.committed_counts(0);
        assert_eq!(bed.end(commit), groups, "{allocated:?} {freed:?}");
        let left = allocated.iter().filter(|run| !freed.contains(run));
        let committed: Vec<u64> = left.flat_map(|(start, count)| *start..start + count).collect();
        let all: Vec<u64> = (0..blocks).filter(|block| bed.is_committed(*block)).collect();
        assert_eq!(all, committed);
        let in_first = committed.iter().filter(|block| **block < GROUP_BLOCKS).count();
        assert_eq!(usize::from(counts.used), in_first, "the row counts what is committed");
        assert_eq!(bed.space.usage().free_blocks, blocks, "a commit allocates nothing");
    }
}

#[test]
fn bits_beyond_the_volume_are_ignored() {
    let blocks = GROUP_BLOCKS + 2 * STRIPE;
    let mut bed = Bed::new(blocks, STRIPE);
    bed.rows.insert(1, vec![u64::MAX; GROUP_WORDS]);
    bed.space.load(1, &[u64::MAX; GROUP_WORDS]);
    assert_eq!(bed.space.usage().free_blocks, GROUP_BLOCKS);
    assert!(bed.space.is_counted() && bed.is_committed(blocks - 1) && !bed.is_committed(GROUP_BLOCKS - 1));
    assert_eq!(bed.space.groups().count(), 2);
}

#[test]
fn a_space_that_does_not_add_up_stops_the_process() {
    type Case = (&'static str, fn(&mut Space));
    let cases: [Case; 10] = [
        ("a release of more than is reserved", |space| space.release(1)),
        ("free blocks are freed", |space| drop(space.free((0, 1)))),
        ("a run of no block is freed", |space| drop(space.free((0, 0)))),
        ("a run of no block is allocated", |space| _ = space.allocate(0, 0)),
        ("a stripe of a group that is not in memory", |space| _ = space.is_empty(STRIPES - 1)),
        ("a group is loaded twice", |space| _ = space.load(0, &[0; GROUP_WORDS])),
        ("counts that no group can have", |space| space.set_counts(0, Counts { used: 1, empty: 32 })),
        ("a discard of free blocks", |space| space.set_discarding(1)),
        ("a block is committed twice", |space| drop(space.commit(vec![(0, 2), (1, 1)], &[]))),
        ("a volume of no full stripes", |_| drop(Space::new(STRIPE + 1, STRIPE))),
    ];
    for (what, change) in cases {
        let mut space = Space::new(STRIPES * STRIPE, STRIPE);
        space.load(0, &[0; GROUP_WORDS]);
        let changed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| change(&mut space)));
        assert!(changed.is_err(), "{what}");
    }
}

#[test]
fn a_block_that_counts_as_free_stays_free() {
    for (marked, freed, expect) in [
        (&[(0, 300)][..], &[(0, 300)][..], &[(0, 300)][..]),
        (&[(0, 300)], &[(10, 5), (15, 200)], &[(10, 205)]),
        (&[(0, 100), (101, 100)], &[(0, 64), (90, 20)], &[(0, 64), (90, 10), (101, 9)]),
        (&[(64, 64)], &[(60, 10)], &[(64, 6)]),
        (&[(64, 64)], &[(64, 64), (127, 1)], &[(64, 64)]),
        (&[(64, 63)], &[(120, 8)], &[(120, 7)]),
        (&[(10, 1), (12, 1), (63, 2)], &[(0, 256)], &[(10, 1), (12, 1), (63, 2)]),
        (&[], &[(255, 1)], &[]),
    ] {
        let mut space = Space::new(64 * 8, 64);
        (0..2).for_each(|group| assert!(space.load(group, &[0; GROUP_WORDS])));
        let commit = space.commit(marked.to_vec(), &[]);
        space.end_commit(commit);
        // A block that is allocated in the same transaction may be freed in it.
        let words = |space: &Space| [0, 1].map(|group| space.committed_group(group).to_vec());
        let before = words(&space);
        let all = [freed, &[(400, 3)]].concat();
        let commit = space.commit(vec![(400, 3)], &all);
        assert_eq!(commit.freed, [expect, &[(400, 3)]].concat(), "{marked:?} {freed:?}");
        for (start, count) in &all {
            let is_set = |block: u64| bits::get(&words(&space)[usize::from(block >= 256)], block % 256);
            assert!(!(*start..start + count).any(is_set), "{marked:?} {freed:?}");
        }
        space.undo_commit(commit);
        assert_eq!(words(&space), before, "{marked:?} {freed:?}");
    }
}

fn borrowed(stripes: u32, gaps: &[(u32, u32)]) -> Borrowed {
    let loan = crate::rows::Loan { stripe: 3, stripes, gaps: gaps.to_vec() };
    Borrowed { lender: penstock_base::TargetId(1), number: 1, loan }
}

/// The blocks of a loan are a group behind those of the volume, which lacks all that the loan does not have.
#[test]
fn a_loan_is_a_group_of_its_own() {
    let mut bed = Bed::new(GROUP_BLOCKS + 64, 64);
    let group = bed.space.group_for_loan();
    assert_eq!(group, 2);
    let before = bed.space.usage();
    bed.space.add_loan(group, borrowed(2, &[(0, 10), (70, 58)]), &[0; GROUP_WORDS]);
    let (first, blocks) = (2 * GROUP_BLOCKS, 128 - 68);
    assert_eq!(bed.space.usage(), SpaceUsage { free_blocks: before.free_blocks + blocks, ..before });
    assert_eq!((bed.space.borrowed_blocks(), bed.space.used_blocks()), (blocks, 0));
    bed.need(group);
    assert_eq!(bed.space.counts(group), Counts { used: 256 - 60, empty: 0 }, "both stripes have gaps");
    assert!(bed.space.is_counted() && bed.space.idle_loans() == [group]);
    let groups = bed.space.groups();
    assert_eq!((groups.blocks_in(1), groups.blocks_in(2), groups.count()), (64, 256, 3));
    for (run, there) in [
        ((GROUP_BLOCKS, 64), 64),
        ((GROUP_BLOCKS, 65), 64),
        ((GROUP_BLOCKS + 64, 1), 0),
        ((2 * GROUP_BLOCKS - 1, 1), 0),
        ((first, 256), 256),
        ((first + 250, 10), 6),
        ((u64::MAX, 1), 0),
    ] {
        assert_eq!(groups.have_of(run), there, "{run:?}");
    }
    // Every block of it is given once, and those in the gaps never.
    let mut given = Vec::new();
    while let Some(stripe) = bed.space.first_in(group, Kind::Partial, |_| true) {
        let run = bed.space.allocate(stripe, 100);
        given.push((run.0 - first, run.1));
    }
    assert_eq!(given, [(10, 54), (64, 6)]);
    assert!(bed.space.idle_loans().is_empty());
    let runs: Vec<Run> = given.iter().map(|(at, count)| (first + at, *count)).collect();
    let commit = bed.space.commit(runs.clone(), &[]);
    let (key, row) = &commit.rows[0];
    assert_eq!((commit.rows.len(), *key == Borrowed::key(group)), (1, true), "one row, and no counts");
    let (loan, bits) = Borrowed::decode(row).unwrap();
    assert_eq!(loan, borrowed(2, &[(0, 10), (70, 58)]));
    assert_eq!(bits::runs_within(&bits, 0, 256), [(10, 60)]);
    bed.end(commit);
    // The same from its row.
    let mut again = Space::new(GROUP_BLOCKS + 64, 64);
    again.add_loan(group, loan, &bits);
    assert_eq!((again.usage(), again.counts(group)), (bed.space.usage(), bed.space.counts(group)));
    assert!(again.load(group, &bits), "it is as it was counted");
    assert_eq!(again.used_blocks(), 60);
    let commit = again.commit(Vec::new(), &runs);
    assert!(again.idle_loans().is_empty(), "its blocks wait to be free");
    _ = again.end_commit(commit);
    for run in runs {
        assert_eq!(again.free(run), [], "a stripe with gaps is never empty");
    }
    assert_eq!(again.idle_loans(), [group]);
    again.end_loan(group);
    assert_eq!((again.usage(), again.borrowed_blocks(), again.group_for_loan()), (before, 0, group));
    assert!(again.is_counted());
}

/// Loans of which reservations need the blocks stay, and groups of loans that have ended are used again.
#[test]
fn loans_stay_while_they_are_needed() {
    let mut bed = Bed::new(GROUP_BLOCKS, 64);
    bed.space.add_loan(1, borrowed(1, &[]), &[0; GROUP_WORDS]);
    bed.space.add_loan(4, borrowed(2, &[]), &[0; GROUP_WORDS]);
    assert_eq!((bed.space.group_for_loan(), bed.space.groups().count()), (2, 5));
    assert_eq!(bed.space.usage().free_blocks, GROUP_BLOCKS + 3 * 64);
    assert_eq!(bed.space.idle_loans(), [1, 4]);
    assert!(bed.space.reserve(GROUP_BLOCKS + 64 - 5));
    assert_eq!(bed.space.idle_loans(), [1], "with the other one too few would be left");
    bed.space.release(GROUP_BLOCKS + 64 - 5);
    bed.need(4);
    assert!(bed.take_stripe(16), "the first stripe of the second loan");
    assert_eq!(bed.space.idle_loans(), [1]);
    assert!(!bed.take_stripe(4 + 1), "a stripe behind a loan is none");
    let commit = bed.space.commit(vec![(4 * GROUP_BLOCKS, 64)], &[]);
    bed.space.undo_commit(commit);
    assert_eq!(bed.free((4 * GROUP_BLOCKS, 64)), [16]);
    assert_eq!(bed.space.idle_loans(), [1, 4]);
    bed.space.end_loan(1);
    bed.space.drop_loan(4);
    assert!(bed.space.loans().is_empty() && bed.space.is_counted());
    assert_eq!(bed.space.usage().free_blocks, GROUP_BLOCKS);
}

/// A repair gives a group of a loan the bits that it has, and what the loan lacks stays away.
#[test]
fn a_suspect_loan_is_repaired() {
    let mut bed = Bed::new(GROUP_BLOCKS, 64);
    bed.space.add_loan(1, borrowed(2, &[(0, 4)]), &[0; GROUP_WORDS]);
    bed.space.suspect(1);
    assert_eq!(bed.space.usage().free_blocks, GROUP_BLOCKS);
    assert!(bed.space.idle_loans().is_empty(), "nobody knows who has its blocks");
    bed.need(1);
    let mut words = vec![0; GROUP_WORDS];
    bits::change(&mut words, (4, 20), true);
    bed.space.reload(1, &words);
    assert_eq!(bed.space.usage().free_blocks, GROUP_BLOCKS + 128 - 4 - 20);
    assert_eq!(bed.space.counts(1), Counts { used: 128 + 24, empty: 1 });
    assert!(bed.space.is_counted());
    let run = bed.space.allocate(4, 100);
    assert_eq!(run, (GROUP_BLOCKS + 24, 40), "behind what is used");
}
