use super::*;
use crate::tests::{Random, Seed, extent, preallocated};
use penstock_base::Birth;
use penstock_sim::seeds;
use std::collections::BTreeSet;

#[test]
fn a_row_of_empty_extents_is_deleted_with_the_rest() {
    let empty = |first| extent(first, 0, 9);
    let mut map = ChunkMap::of_row(vec![empty(0), Extent { count: 2, ..empty(4) }, empty(6)]);
    map.put(extent(6, 1, 70));
    assert_eq!(map.extents.len(), 2);
    let mut none = ChunkMap::of_row(vec![empty(3)]);
    assert_eq!(none.take_changes(), None);
    assert_eq!(none.remove(0, u32::MAX), []);
    let changes = none.take_changes().unwrap();
    assert!(changes.had_row && changes.extents.is_empty() && changes.freed.is_empty());
    assert_eq!((none.remove(0, u32::MAX).len(), none.take_changes()), (0, None));
}

#[test]
fn blocks_become_preallocated_and_data_again() {
    let mut map = ChunkMap::of_row(vec![extent(0, 8, 100)]);
    map.set_preallocated(8..9, true);
    assert!(!map.changed, "nothing has a place there");
    map.set_preallocated(2..5, true);
    assert!(map.changed);
    assert_eq!(map.extents, [extent(0, 2, 100), preallocated(2, 3, 102), extent(5, 3, 105)]);
    assert_eq!([map.lookup(1), map.lookup(2), map.lookup(5)], [Some(101), None, Some(105)]);
    assert_eq!(map.place(4), Some((104, true)));
    assert_eq!(map.place(8), None);
    map.set_preallocated(0..4, false);
    assert_eq!(map.extents[1], preallocated(4, 1, 104));
    map.set_preallocated(4..5, false);
    assert_eq!(map.extents, [extent(0, 8, 100)], "whole again");
    assert!(map.freed.is_empty() && map.allocated.is_empty(), "no block changed hands");
}

#[test]
fn a_map_changes_and_says_what_falls_out() {
    let mut map = ChunkMap::of_row(vec![extent(0, 8, 100)]);
    assert!(map.put(extent(2, 2, 200)).is_empty());
    assert_eq!(map.freed, [(102, 2)]);
    assert_eq!([map.lookup(1), map.lookup(2), map.lookup(4)], [Some(101), Some(200), Some(104)]);
    assert_eq!([map.run_at(0, 8), map.run_at(3, 8)], [(Some(100), 2), (Some(201), 1)]);
    assert_eq!([map.run_at(5, 7), map.run_at(8, 20)], [(Some(105), 2), (None, 12)]);
    // Blocks allocated since the last commit are returned for immediate reuse.
    assert_eq!(map.remove(3, 3), [(201, 1)]);
    assert_eq!(map.freed, [(102, 4)]);
    assert_eq!(map.allocated, [(200, 1)]);
    assert_eq!([map.lookup(3), map.lookup(6)], [None, Some(106)]);
    assert!(map.put(extent(3, 1, 201)).is_empty());
    assert_eq!(map.extents[1], extent(2, 2, 200));
}

#[test]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
fn blocks_without_a_place_are_found() {
    let map = ChunkMap::of_row(vec![extent(2, 2, 100), extent(6, 1, 50)]);
    for (blocks, expected) in [
        (0..10, vec![0..2, 4..6, 7..10]),
        (2..4, vec![]),
        (3..7, vec![4..6]),
        (5..6, vec![5..6]),
        (8..8, vec![]),
    ] {
        assert_eq!(map.unplaced(blocks.clone()), expected, "{blocks:?}");
    }
}

#[test]
fn a_truncation_that_could_not_be_committed_leaves_nothing() {
    let mut map = ChunkMap::of_row(vec![extent(0, 8, 100)]);
    map.put(extent(8, 2, 200));
    let before = map.clone();
    assert_eq!(map.remove(4, u32::MAX), [(200, 2)]);
    let changes = map.take_changes().unwrap();
    assert_eq!((&changes.freed[..], changes.had_row), (&[(104, 4)][..], true));
    assert_eq!(map.take_changes(), None);
    map.put_back(changes);
    map = before.clone();
    assert_eq!(map, before);
    assert_eq!(map.take_changes().unwrap().allocated, [(200, 2)]);
}

#[test]
fn changes_come_back_after_a_failed_commit() {
    let mut map = ChunkMap::default();
    assert_eq!(map.take_changes(), None);
    map.put(extent(3, 2, 50));
    let changes = map.take_changes().unwrap();
    assert_eq!((&changes.allocated[..], changes.had_row), (&[(50, 2)][..], false));
    map.put(extent(5, 1, 52));
    map.put_back(changes);
    let changes = map.take_changes().unwrap();
    assert_eq!((changes.extents, changes.had_row), (vec![extent(3, 3, 50)], false));
    assert_eq!(changes.allocated, [(52, 1), (50, 2)]);
}

#[test]
fn extents_are_joined_only_where_all_blocks_follow_each_other() {
    let cases: [(&[Extent], usize); 8] = [
        (&[], 0),
        (&[extent(0, 2, 10), extent(2, 2, 12)], 1),
        (&[extent(0, 2, 10), extent(2, 2, 13)], 2),
        (&[extent(0, 2, 10), extent(3, 2, 12)], 2),
        (&[extent(0, 2, 10), preallocated(2, 2, 12)], 2),
        (&[preallocated(0, 2, 10), preallocated(2, 2, 12)], 1),
        (&[extent(0, 1, 10), extent(1, 1, 11), extent(2, 1, 12)], 1),
        (&[extent(0, 2, 12), extent(2, 2, 10)], 2),
    ];
    for (extents, expected) in cases {
        let joined = joined(extents.to_vec());
        assert_eq!(joined.len(), expected, "{extents:?}");
        let blocks = |extents: &[Extent]| extents.iter().map(|extent| extent.count).sum::<u32>();
        assert_eq!(blocks(&joined), blocks(extents), "{extents:?}");
    }
}

#[test]
fn a_removed_block_is_given_back_only_if_no_row_has_it() {
    // The row has 0..8 at 100; 8..12 was allocated at 200 and 2..4 at 300 since. Columns: a range to remove,
    // the runs to give back now, and those that the next commit frees beside 102..104.
    let cases: [(Range<u32>, &[Run], &[Run]); 7] = [
        (0..1, &[], &[(100, 1)]),
        (2..4, &[(300, 2)], &[]),
        (1..3, &[(300, 1)], &[(101, 1)]),
        (3..6, &[(301, 1)], &[(104, 2)]),
        (7..9, &[(200, 1)], &[(107, 1)]),
        (12..20, &[], &[]),
        (0..20, &[(300, 2), (200, 4)], &[(100, 2), (104, 4)]),
    ];
    for (blocks, back, freed) in cases {
        let mut map = ChunkMap::of_row(vec![extent(0, 8, 100)]);
        map.put(extent(8, 4, 200));
        map.put(extent(2, 2, 300));
        assert_eq!(map.remove(blocks.start, blocks.end - blocks.start), back, "{blocks:?}");
        let found = map.take_changes().unwrap().freed;
        let blocks_of = |runs: &[Run]| -> BTreeSet<u64> {
            runs.iter().flat_map(|(start, count)| *start..start + count).collect()
        };
        assert_eq!(blocks_of(&found), &blocks_of(freed) | &blocks_of(&[(102, 2)]), "{blocks:?}");
    }
}

/// Blocks of the chunk in the model.
const BLOCKS: u32 = 20;

/// For each block of a chunk, its volume block and true if that is only preallocated.
type Places = [Option<(u64, bool)>; BLOCKS as usize];

/// A chunk as a list of blocks, its row, and the blocks of the volume that must not be allocated again.
struct Plain {
    map: ChunkMap,
    places: Places,
    /// The row in the store; `None` if there is none.
    row: Option<Places>,
    /// Blocks that the bits in the store mark as used.
    bits: BTreeSet<u64>,
    used: BTreeSet<u64>,
    /// Changes that a commit has taken, with the places at that time.
    taken: Option<(MapChanges, Places)>,
}

fn blocks_in(places: &Places) -> BTreeSet<u64> {
    places.iter().flatten().map(|(block, _)| *block).collect()
}

impl Plain {
    fn give_back(&mut self, runs: &[Run]) {
        for block in runs.iter().flat_map(|(start, count)| *start..start + count) {
            assert!(self.used.remove(&block), "block {block} is given back once");
            assert!(!self.bits.contains(&block), "block {block} belongs to the row");
            assert!(!blocks_in(&self.places).contains(&block), "block {block} is still mapped");
        }
    }

    fn put(&mut self, random: &mut Random, blocks: Range<u32>) {
        let count = u64::from(blocks.end - blocks.start);
        let from = random.below(40);
        let is_free = |start: &u64| (*start..start + count).all(|block| !self.used.contains(&block));
        let start = (from..).find(is_free).unwrap();
        let new = Extent {
            first: blocks.start,
            count: count as u32,
            block: start,
            preallocated: random.below(4) == 0,
            birth: Birth::FIRST,
        };
        self.used.extend(start..start + count);
        let back = self.map.put(new);
        for (at, block) in blocks.zip(start..) {
            self.places[at as usize] = Some((block, new.preallocated));
        }
        self.give_back(&back);
    }

    /// Commits the taken changes, or lets the commit fail.
    fn commit(&mut self, succeeds: bool) {
        let Some((changes, places)) = self.taken.take() else { return };
        assert_eq!(changes.had_row, self.row.is_some());
        if !succeeds {
            return self.map.put_back(changes);
        }
        for block in changes.allocated.iter().flat_map(|(start, count)| *start..start + count) {
            assert!(self.bits.insert(block), "block {block} is marked once");
        }
        for block in changes.freed.iter().flat_map(|(start, count)| *start..start + count) {
            assert!(self.bits.remove(&block) && self.used.remove(&block), "block {block} is freed once");
        }
        let row = blocks_in(&places);
        assert_eq!(self.bits, row, "the bits agree with the row");
        self.row = (!row.is_empty()).then_some(places);
    }

    fn step(&mut self, random: &mut Random) {
        let first = random.below(BLOCKS.into()) as u32;
        let blocks = first..first + 1 + random.below((BLOCKS - first).into()) as u32;
        match random.below(9) {
            0..=2 => self.put(random, blocks),
            3 | 4 => {
                let back = self.map.remove(blocks.start, blocks.end - blocks.start);
                blocks.for_each(|at| self.places[at as usize] = None);
                self.give_back(&back);
            }
            5 => {
                let preallocated = random.below(2) == 0;
                self.map.set_preallocated(blocks.clone(), preallocated);
                for (_, is) in self.places[blocks.start as usize..blocks.end as usize].iter_mut().flatten() {
                    *is = preallocated;
                }
            }
            6 => self.commit(random.below(3) > 0),
            7 if self.taken.is_none() => {
                let changed = self.map.is_changed();
                self.taken = self.map.take_changes().map(|changes| (changes, self.places));
                assert_eq!(self.taken.is_some(), changed);
                assert!(!self.map.is_changed());
            }
            8 if self.taken.is_none() => {
                // A truncation that cannot be committed.
                let before = self.map.clone();
                drop(self.map.remove(first, u32::MAX));
                self.map.take_changes().into_iter().for_each(|changes| self.map.put_back(changes));
                self.map = before;
            }
            _ => {}
        }
    }

    fn assert_same(&self) {
        self.map.assert_ordered();
        assert_eq!(joined(self.map.extents.clone()), self.map.extents, "extents are joined");
        let data = |at: u32| self.places[at as usize].filter(|(_, is)| !is).map(|(block, _)| block);
        for at in 0..BLOCKS {
            assert_eq!(self.map.place(at), self.places[at as usize], "block {at}");
            assert_eq!(self.map.lookup(at), data(at), "block {at}");
            let (start, count) = self.map.run_at(at, BLOCKS);
            for next in 0..count {
                let expected = start.map(|start| start + u64::from(next));
                assert_eq!(data(at + next), expected, "block {next} of the run from {at} on");
            }
            let unplaced = self.map.unplaced(at..BLOCKS);
            let unplaced: Vec<u32> = unplaced.into_iter().flatten().collect();
            let expected = (at..BLOCKS).filter(|at| self.places[*at as usize].is_none());
            assert_eq!(unplaced, expected.collect::<Vec<_>>(), "from block {at} on");
        }
        let needed = &blocks_in(&self.places) | &self.bits;
        assert!(needed.is_subset(&self.used), "{needed:?} and {:?}", self.used);
    }
}

#[test]
fn a_map_is_as_a_plain_list_of_blocks_and_loses_no_block() {
    for seed in seeds(0..12) {
        let _printed = Seed(seed);
        let mut random = Random::new(seed);
        let mut plain = Plain {
            map: ChunkMap::default(),
            places: [None; BLOCKS as usize],
            row: None,
            bits: BTreeSet::new(),
            used: BTreeSet::new(),
            taken: None,
        };
        for _ in 0..1500 {
            plain.step(&mut random);
            plain.assert_same();
        }
        plain.commit(true);
        plain.taken = plain.map.take_changes().map(|changes| (changes, plain.places));
        plain.commit(true);
        assert_eq!(plain.used, blocks_in(&plain.places), "no block is lost");
        assert_eq!(plain.bits, plain.used);
    }
}
