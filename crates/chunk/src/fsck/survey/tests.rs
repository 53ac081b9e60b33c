use super::*;
use crate::allocator::Source;
use crate::rows::{encode_group, group_key};
use crate::tests::{
    CHUNK, STRIPE, assert_clean, chunk_key, extent, map_row, on_a_volume, preallocated, write,
};
use FindingKind as Kind;
use penstock_base::Birth;

const BLOCKS: u64 = 104;
/// Blocks in an allocation group.
const GROUP_BLOCKS: u64 = 256;

/// A row of a chunk of inode 2.
fn map(index: u64, extents: &[Extent]) -> (Vec<u8>, Vec<u8>) {
    (chunk_key(2, index).row(Birth::FIRST), map_row(extents))
}

/// The row of an allocation group in which these blocks are marked.
fn group(number: u64, blocks: &[u64]) -> (Vec<u8>, Vec<u8>) {
    let mut words = vec![0; GROUP_WORDS];
    blocks.iter().for_each(|block| words[(block / 64) as usize] |= 1 << (block % 64));
    (group_key(number), encode_group(&words))
}

/// The survey of a small volume with these rows.
fn survey(rows: &[(Vec<u8>, Vec<u8>)]) -> Survey {
    let mut survey = Survey::new(Groups::new(BLOCKS, STRIPE), CHUNK);
    for (key, value) in rows {
        match decode_group_key(key) {
            Some(_) => survey.see_group(key, value),
            None => survey.see_map(key, value),
        }
    }
    rows.iter().for_each(|(key, value)| survey.see_double(key, value));
    survey.judge_bits();
    survey
}

#[test]
fn every_kind_of_damage_in_rows_is_found() {
    let far = chunks_of_a_file(CHUNK);
    let later = |mut row: (Vec<u8>, Vec<u8>)| {
        row.1[0] = 9;
        row
    };
    let good = || map(0, &[extent(0, 2, 5)]);
    type Case = (&'static str, Vec<(Vec<u8>, Vec<u8>)>, Vec<(Kind, u64)>);
    let cases: Vec<Case> = vec![
        ("nothing", vec![], vec![]),
        ("a good file", vec![good(), group(0, &[5, 6])], vec![]),
        ("no bits", vec![good()], vec![(Kind::BlockNotMarked, 1)]),
        (
            "bits in two parts are lacking",
            vec![map(0, &[extent(0, 3, 5)]), group(0, &[6])],
            vec![(Kind::BlockNotMarked, 2)],
        ),
        ("an unowned block", vec![good(), group(0, &[5, 6, 7])], vec![(Kind::BlockNotOwned, 1)]),
        (
            "two owners",
            vec![good(), map(1, &[extent(3, 2, 6)]), group(0, &[5, 6, 7])],
            vec![(Kind::DoubleOwnedBlock, 2)],
        ),
        (
            "two owners in one chunk",
            vec![map(0, &[extent(0, 1, 5), preallocated(1, 1, 5)]), group(0, &[5])],
            vec![(Kind::DoubleOwnedBlock, 1)],
        ),
        ("an empty extent", vec![map(0, &[extent(3, 0, 5)])], vec![(Kind::EmptyExtent, 1)]),
        (
            "an extent beyond the chunk",
            vec![map(0, &[extent(CHUNK - 1, 3, 5)]), group(0, &[5])],
            vec![(Kind::ExtentBeyondChunk, 1)],
        ),
        (
            "an extent behind the chunk",
            vec![map(0, &[extent(u32::MAX - 3, 3, 5)])],
            vec![(Kind::ExtentBeyondChunk, 1)],
        ),
        (
            "an extent beyond the volume",
            vec![map(0, &[extent(0, 3, BLOCKS - 1)]), group(0, &[BLOCKS - 1])],
            vec![(Kind::ExtentBeyondVolume, 1)],
        ),
        (
            "an extent behind the volume",
            vec![map(0, &[extent(0, 3, u64::MAX - 3)])],
            vec![(Kind::ExtentBeyondVolume, 1)],
        ),
        (
            "a chunk behind the longest file",
            vec![map(far, &[extent(0, 1, 5)]), group(0, &[5])],
            vec![(Kind::ChunkBeyondLimit, 1)],
        ),
        (
            "the chunk with the highest index",
            vec![map(u64::MAX, &[extent(CHUNK - 1, 1, 5)]), group(0, &[5])],
            vec![(Kind::ChunkBeyondLimit, 1)],
        ),
        ("the last chunk", vec![map(far - 1, &[extent(CHUNK - 1, 1, 5)]), group(0, &[5])], vec![]),
        ("no map", vec![(chunk_key(2, 0).row(Birth::FIRST), vec![2, 0])], vec![(Kind::BadMapRow, 1)]),
        ("a key that is too short", vec![(vec![0x20, 1], good().1)], vec![(Kind::BadMapRow, 1)]),
        ("a map of a later release", vec![later(good())], vec![(Kind::UnknownRow, 1)]),
        ("a later birth", vec![(chunk_key(2, 0).row(Birth(2)), good().1)], vec![(Kind::UnknownRow, 1)]),
        (
            "an unowned block beside an unknown row",
            vec![later(good()), group(0, &[7])],
            vec![(Kind::BlockNotOwned, 1), (Kind::UnknownRow, 1)],
        ),
        ("no group of the volume", vec![group(1, &[])], vec![(Kind::BadGroupRow, 1)]),
        ("a group that ends early", vec![good(), (group_key(0), vec![2; 9])], vec![(Kind::BadGroupRow, 1)]),
        ("a group with another format", vec![later(group(0, &[5]))], vec![(Kind::BadGroupRow, 1)]),
        (
            "bits beyond the volume",
            vec![good(), group(0, &[5, 6, BLOCKS, BLOCKS + 5])],
            vec![(Kind::BadGroupRow, 1)],
        ),
    ];
    for (what, rows, expected) in cases {
        let found = survey(&rows).check.findings;
        let counts: Vec<(Kind, u64)> = found.counts.iter().map(|(kind, count)| (*kind, *count)).collect();
        let mut expected = expected;
        expected.sort();
        assert_eq!(counts, expected, "{what}: {:?}", found.kept);
        let is_unknown = |kind: Kind| kind == Kind::UnknownRow;
        let opaque = expected.iter().any(|(kind, _)| is_unknown(*kind));
        for finding in &found.kept {
            let waits = is_unknown(finding.kind) || opaque && finding.kind == Kind::BlockNotOwned;
            assert_eq!(finding.repairable, !waits, "{what}: {}", finding.text);
        }
    }
}

#[test]
fn only_the_valid_part_of_an_extent_owns_blocks() {
    for (given, expected) in [
        (extent(0, 4, 5), 4),
        (extent(0, 0, 5), 0),
        (extent(CHUNK - 2, 4, 5), 2),
        (extent(CHUNK, 4, 5), 0),
        (extent(0, 4, BLOCKS - 3), 3),
        (extent(0, 4, BLOCKS), 0),
        (extent(CHUNK - 2, 9, BLOCKS - 1), 1),
        (extent(u32::MAX, 0, u64::MAX), 0),
        (preallocated(0, u32::MAX, 0), CHUNK),
    ] {
        let part = Groups::new(BLOCKS, STRIPE).valid_part(&given, CHUNK);
        assert_eq!(part, Extent { count: expected, ..given });
    }
}

#[test]
fn the_blocks_and_the_end_of_a_file_are_counted() {
    let end = u64::from(CHUNK);
    let far = chunks_of_a_file(CHUNK);
    // Columns: rows of one file, and the counts of it.
    type Row<'a> = (u64, &'a [Extent]);
    let owned = |chunks, blocks, held, end_block, far_chunks| Owned {
        chunks,
        blocks,
        held,
        end_block,
        far_chunks,
        ..Owned::default()
    };
    let cases: [(&[Row<'_>], Owned); 6] = [
        (&[(0, &[])], owned(1, 0, 0, 0, 0)),
        (&[(0, &[extent(0, 2, 5)])], owned(1, 2, 2, 2, 0)),
        (
            &[(0, &[extent(0, 2, 5)]), (3, &[extent(1, 2, 9), preallocated(9, 4, 20)])],
            owned(2, 4, 8, 3 * end + 3, 0),
        ),
        (&[(2, &[preallocated(0, 4, 20)])], owned(1, 0, 4, 0, 0)),
        (&[(1, &[extent(CHUNK - 1, 9, 5)])], owned(1, 1, 1, 2 * end, 0)),
        (
            &[(0, &[extent(0, 1, 5)]), (far, &[extent(0, 1, 6)]), (u64::MAX, &[extent(3, 1, 7)])],
            owned(3, 3, 3, 1, 2),
        ),
    ];
    for (rows, expected) in cases {
        let rows: Vec<_> = rows.iter().map(|(index, extents)| map(*index, extents)).collect();
        let check = survey(&rows).check;
        assert_eq!(check.owners, BTreeMap::from([(Ino(2), expected)]));
        assert_eq!(check.chunks, expected.chunks);
    }
}

#[test]
fn blocks_in_one_bitmap_and_not_in_another_are_runs() {
    let (far, groups) = (GROUP_BLOCKS, Groups::new(3 * GROUP_BLOCKS, STRIPE));
    let cases: [(&[u64], &[u64], &[Run]); 6] = [
        (&[], &[1], &[]),
        (&[1, 2, 3], &[], &[(1, 3)]),
        (&[1, 2, 3], &[2], &[(1, 1), (3, 1)]),
        (&[63, 64, 65], &[65], &[(63, 2)]),
        (&[far - 1, far, far + 1], &[], &[(far - 1, 3)]),
        (&[0, far], &[0], &[(far, 1)]),
    ];
    for (has, has_not, expected) in cases {
        let mut survey = Survey::new(groups, CHUNK);
        let bitmap = |blocks: &[u64]| {
            let mut bitmap = Bitmap::new(groups);
            blocks.iter().for_each(|block| bitmap.set(*block, true));
            bitmap
        };
        assert_eq!(survey.only_in(&bitmap(has), &bitmap(has_not)), expected, "{has:?} {has_not:?}");
        survey.bad_groups.insert(1);
        let runs = survey.only_in(&bitmap(has), &bitmap(has_not));
        assert!(runs.iter().all(|(start, count)| start + count <= far), "group 1 is left out: {runs:?}");
    }
}

#[test]
fn counts_in_memory_and_written_stripes_are_compared_with_the_rows() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        write(&target, chunk_key(2, 0), 0, &[1; 3]).await;
        assert_clean(bench, &target).await;
        let quiet = bench.gate.quiesce().await;
        let check = async || {
            let found = target.fsck(&quiet).check().await.unwrap().findings;
            found.counts.keys().copied().collect::<Vec<_>>()
        };
        assert_eq!(check().await, []);
        // A written stripe that is not in the allocator's set of idle stripes.
        bench.write_stripe(9, 1).await;
        assert_eq!(check().await, [Kind::WrittenFreeStripe]);
        target.allocator.sweep_again().await.unwrap();
        assert_eq!(check().await, [], "it waits to be discarded");
        // Memory lacks a block that the rows mark.
        target.allocator.load(0).await.unwrap();
        let words = target.allocator.space().bits_in_memory(0).unwrap().to_vec();
        let mut fewer = words.clone();
        fewer[0] ^= 1 << words[0].trailing_zeros();
        target.allocator.space_mut().reload(0, &fewer);
        assert_eq!(check().await, [Kind::WrongFreeCount]);
        target.allocator.space_mut().reload(0, &words);
        assert_eq!(check().await, []);
        // Nothing is allocated in a group, and nothing is wrong any more.
        target.allocator.space_mut().suspect(1);
        assert_eq!(check().await, [Kind::WrongFreeCount]);
        target.fsck(&quiet).mark_owned().await.unwrap();
        assert_eq!(check().await, []);
        // The rows count the groups in another way, or so that nobody can read it.
        let (key, value) = bench.kv.rows().into_iter().find(|(key, _)| key[0] == 0x27).unwrap();
        let mut wrong = value.clone();
        wrong[1] ^= 1;
        for (wrong, kind) in [(wrong, Kind::WrongFreeCount), (vec![1, 2], Kind::BadGroupRow)] {
            bench.put_row(key.clone(), wrong).await;
            assert_eq!(check().await, [kind]);
            target.fsck(&quiet).mark_owned().await.unwrap();
            assert_eq!(check().await, []);
        }
        // Blocks that are used in memory only belong to writes that are not committed.
        let run = target.allocator.allocate_reserved(STRIPE, Source::Any).await.unwrap();
        assert_eq!(check().await, []);
        target.allocator.give_back(vec![run]);
    });
}
