use super::*;
use crate::rows::decode_file_key;
use crate::tests::{
    Bench, CHUNK, GENERATION, OWNER, Random, STRIPE, Seed, assert_clean, fills, known, on_a_volume,
    on_drives_of, write,
};
use crate::{ChunkKey, TargetConfig};
use penstock_base::{Gate, TargetId};
use penstock_kv::{Kv, MemKv};
use std::collections::BTreeMap;

/// Inode numbers of files begin here.
const FIRST: u64 = COPIES_END + 1;
/// The number that a restore gives to the file of newer blocks.
const NEWER: u64 = COPIES_END + 1000;
/// A row of the name space.
const NAME: [u8; 3] = [0x10, 1, 2];
/// A row that no copy has.
const SESSION: [u8; 2] = [0x15, 9];
/// The row that is written last.
const STORE: [u8; 1] = [0];

/// Keeps all rows of the name space, and the store's own for the end.
#[derive(Default)]
struct Rows(Vec<(Vec<u8>, Vec<u8>)>);

impl Names for Rows {
    fn loans(&self) -> Option<u64> {
        None
    }

    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<Option<Vec<u8>>, DecodeError> {
        if key == STORE {
            self.0.push((key.to_vec(), value.to_vec()));
            return Ok(None);
        }
        Ok(Some(value.to_vec()))
    }

    fn number(&self) -> Result<Ino, DecodeError> {
        Ok(Ino(NEWER))
    }

    fn last(&self) -> Result<WriteSet, DecodeError> {
        let mut writes = WriteSet::new();
        for (key, value) in &self.0 {
            writes.put(key.clone(), value.clone());
        }
        match writes.is_empty() {
            true => Err(DecodeError::Bad { what: "copy", why: "without the row of the store" }),
            false => Ok(writes),
        }
    }
}

fn key(file: u64, index: u64) -> ChunkKey {
    ChunkKey { file: FileId::main(Ino(FIRST + file)), index }
}

/// A bench whose volume ends before the anchors, and these.
fn parts(bench: &Bench) -> (Bench, Volume) {
    let (volume, anchors) = bench.volume.split_end(anchor_stripes(STRIPE));
    (
        Bench {
            volume,
            env: bench.env.clone(),
            kv: bench.kv.clone(),
            gate: Rc::default(),
            disks: bench.disks.clone(),
            drives: bench.drives.clone(),
        },
        anchors,
    )
}

async fn copy(copies: &Copies) -> Anchor {
    copies.make(|key| key != SESSION).await.unwrap()
}

/// A copy that cannot be written.
async fn fail(bench: &Bench, copies: &Copies) {
    bench.kv.fail_after(0);
    assert!(copies.make(|_| true).await.is_err());
    bench.kv.fail_after(u64::MAX);
}

/// Two copies of some rows. They are in their strips, so that reads go to the drives.
async fn two_copies(bench: &Bench, anchors: &Volume) -> (Rc<Target>, Rc<Copies>, [Anchor; 2]) {
    bench.put_row(STORE.to_vec(), vec![7]).await;
    let target = bench.target().await;
    let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
    let both = [copy(&copies).await, copy(&copies).await];
    bench.volume.array().destage_and_checkpoint().await.unwrap();
    (target, copies, both)
}

/// The first block of a copy's rows.
async fn first_block(copies: &Copies, of: &Anchor) -> u64 {
    copies.pieces_of(file_of(of.serial), 0, 1).await.unwrap()[0][0].0
}

/// Writes other bytes in the place of a copy's rows.
async fn spoil(bench: &Bench, copies: &Copies, of: &Anchor) {
    let (data, crcs) = crate::tests::blocks_of(&[9]);
    bench.volume.write(first_block(copies, of).await, &data, &crcs).await.unwrap();
    bench.volume.array().destage_and_checkpoint().await.unwrap();
}

/// The blocks of the array on which an anchor lies.
fn blocks_of_anchor(bench: &Bench, anchors: &Volume, slot: usize) -> std::ops::Range<u64> {
    let (first, count) = place_of(anchors, slot);
    let first = bench.volume.blocks() + first;
    first..first + count
}

/// The serial number of the copy that a restore would take.
async fn usable(bench: &Bench, anchors: &Volume) -> u64 {
    find_one(bench, anchors).await.anchor().serial
}

/// The numbers of all copies that have blocks.
fn kept(bench: &Bench) -> Vec<u64> {
    let files = bench.kv.rows().into_iter().filter_map(|(key, _)| decode_file_key(&key).ok());
    files.map(|(file, _)| file.ino.0).filter(|number| *number < COPIES_END).collect()
}

fn how_of(newer: Newer) -> How {
    How { newer, may_lack: false }
}

async fn find_one(bench: &Bench, anchors: &Volume) -> Found {
    find(&bench.volume, anchors).await.unwrap_or_else(|error| panic!("{error}"))
}

/// A restore into an empty store.
async fn restored_rows(bench: &Bench, found: &Found, how: How) -> (Rc<MemKv>, Result<Restored, ChunkError>) {
    let kv = MemKv::new(1 << 24);
    let done = restore(found, &bench.volume, &*kv, &mut Rows::default(), how).await;
    (kv, done)
}

/// Loses the key-value store, restores it, and repairs the target.
async fn restored(bench: &Bench, anchors: &Volume, how: Newer) -> (Bench, Rc<Target>, Restored) {
    let (kv, done) = restored_rows(bench, &find_one(bench, anchors).await, how_of(how)).await;
    let done = done.unwrap();
    let bench = Bench {
        kv,
        gate: Rc::<Gate>::default(),
        env: bench.env.clone(),
        volume: bench.volume.clone(),
        disks: bench.disks.clone(),
        drives: bench.drives.clone(),
    };
    let target = bench.target().await;
    assert!(target.suspect_groups() > 0, "nothing is allocated before a repair");
    {
        let quiet = bench.gate.quiesce().await;
        let fsck = target.fsck(&quiet);
        fsck.mark_owned().await.unwrap();
        assert_eq!(fsck.copy_doubles().await.unwrap(), []);
        let files = (0..10).map(|file| (Ino(FIRST + file), known(0))).collect();
        fsck.count_files(&files, &BTreeSet::new()).await.unwrap();
        fsck.clear_unowned().await.unwrap();
    }
    assert_clean(&bench, &target).await;
    (bench, target, done)
}

#[test]
fn files_come_back_but_for_blocks_that_were_written_since() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        for (key, value) in [(&NAME[..], 5), (&SESSION, 6), (&STORE, 7)] {
            bench.put_row(key.to_vec(), vec![value]).await;
        }
        let target = bench.target().await;
        for file in 0..4 {
            write(&target, key(file, 0), 0, &[10 + file as u8; CHUNK as usize]).await;
        }
        write(&target, key(0, 1), 0, &[20; CHUNK as usize]).await;
        target.commit_all().await.unwrap();
        let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        assert_eq!(copies.newest(), None);
        let anchor = copy(&copies).await;
        assert_eq!((anchor.serial, copies.newest()), (1, Some(anchor.clone())));
        // The first file is written over in part, the second one removed, and its space given to a third.
        write(&target, key(0, 0), 3, &[50; 2]).await;
        target.commit_all().await.unwrap();
        let removed = Known { truncations: REMOVED, owner: OWNER };
        let file = key(1, 0).file;
        target.truncate(file, 0..u64::MAX, Behind::Dropped, removed, WriteSet::new()).await.unwrap();
        target.file_removed(file);
        target.sync().await.unwrap();
        let mut other = 0;
        while target.usage().free_blocks > u64::from(CHUNK) * 4 {
            write(&target, key(9, other), 0, &[60; CHUNK as usize]).await;
            target.commit_all().await.unwrap();
            other += 1;
        }
        target.stop();

        let (bench, target, done) = restored(&bench, &anchors, Newer::AreCollected).await;
        assert_eq!(done.copy, anchor);
        let rows: BTreeMap<Vec<u8>, Vec<u8>> = bench.kv.rows().into_iter().collect();
        assert_eq!((rows.get(&NAME[..]), rows.get(&SESSION[..])), (Some(&vec![5]), None));
        assert_eq!(rows.get(&STORE[..]), Some(&vec![7]));
        for file in [2, 3] {
            assert_eq!(fills(&target, key(file, 0)).await, [10 + file as u8; CHUNK as usize], "file {file}");
        }
        // Its other chunk was not written over.
        assert_eq!(fills(&target, key(0, 1)).await, [20; CHUNK as usize]);
        let first = fills(&target, key(0, 0)).await;
        assert!(first.iter().all(|fill| [0, 10].contains(fill)) && first[3..5] == [0, 0], "{first:?}");
        assert_eq!(fills(&target, key(1, 0)).await, [0; CHUNK as usize], "its blocks are another file's");
        let lacking = first.iter().filter(|fill| **fill == 0).count() as u64;
        let listed = BTreeMap::from([(Ino(FIRST), lacking), (Ino(FIRST + 1), u64::from(CHUNK))]);
        assert_eq!((done.changed.listed, done.changed.blocks), (listed, lacking + u64::from(CHUNK)));
        // Nothing is lost: the newer blocks are in a file of their own.
        assert_eq!(done.newer, Some(Ino(NEWER)));
        let mut found: BTreeMap<u8, u64> = BTreeMap::new();
        for index in 0..done.newer_blocks.div_ceil(CHUNK.into()) {
            for fill in fills(&target, ChunkKey { file: FileId::main(Ino(NEWER)), index }).await {
                *found.entry(fill).or_default() += 1;
            }
        }
        assert_eq!((found[&50], found[&60]), (2, other * u64::from(CHUNK)));

        // The copy is there still, and the next one takes the other anchor.
        let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        assert_eq!(copies.newest(), Some(anchor));
        assert_eq!(copy(&copies).await.serial, 2);
        assert_clean(&bench, &target).await;
        target.stop();
    });
}

/// Of two copies one is whole at any time, and no more space is taken than by two.
#[test]
fn copies_take_turns() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        bench.put_row(STORE.to_vec(), vec![7]).await;
        let target = bench.target().await;
        write(&target, key(0, 0), 0, &[1; 5]).await;
        target.commit_all().await.unwrap();
        let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        let free = target.usage().free_blocks;
        for serial in 1..=5 {
            assert_eq!(copy(&copies).await.serial, serial);
            assert_clean(&bench, &target).await;
            let found = find_one(&bench, &anchors).await;
            assert_eq!(found.anchor().serial, serial);
        }
        assert_eq!(free - target.usage().free_blocks, 4 * u64::from(CHUNK), "two copies of two segments");
        // A copy that fails leaves the newest one, and no space that nobody owns.
        fail(&bench, &copies).await;
        let found = find_one(&bench, &anchors).await;
        assert_eq!(found.anchor().serial, 5);
        assert_eq!(copy(&copies).await.serial, 6);
        assert_clean(&bench, &target).await;
        let numbers = |kv: &MemKv| {
            kv.rows()
                .iter()
                .filter_map(|(key, _)| decode_file_key(key).ok())
                .map(|(file, _)| file.ino.0)
                .collect::<Vec<_>>()
        };
        assert_eq!(numbers(&bench.kv), [5, 6, FIRST]);
        target.stop();
        // After a start the anchors say which ones there are.
        let target = bench.target().await;
        let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        assert_eq!(copy(&copies).await.serial, 7);
        assert_eq!(numbers(&bench.kv), [6, 7, FIRST]);
        target.stop();
    });
}

/// A damaged copy is not used: the other one is, or the error says why there is none.
#[test]
fn a_copy_with_a_bad_block_is_not_used() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        let refused = find(&bench.volume, &anchors).await.err().unwrap().to_string();
        assert!(refused.contains("no copy of the map"), "{refused}");
        bench.put_row(STORE.to_vec(), vec![7]).await;
        let target = bench.target().await;
        let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        let (first, second) = (copy(&copies).await, copy(&copies).await);
        spoil(&bench, &copies, &second).await;
        let found = find_one(&bench, &anchors).await;
        assert_eq!(found.anchor(), &first);
        // Other bytes in the place of the anchor of the first one.
        let (data, crcs) = crate::tests::blocks_of(&[9]);
        anchors.write(place_of(&anchors, 0).0, &data, &crcs).await.unwrap();
        anchors.flush().await.unwrap();
        let refused = find(&bench.volume, &anchors).await.err().unwrap().to_string();
        assert!(refused.contains("copy 2: segment of a copy of the map: wrong magic"), "{refused}");
        assert!(refused.contains("anchor of a copy of the map: wrong magic"), "{refused}");
        target.stop();
    });
}

/// The files as the test knows them: by file and chunk, the fill of each block.
type Model = BTreeMap<(u64, u64), [u8; CHUNK as usize]>;

async fn change(random: &mut Random, target: &Target, model: &mut Model, next: &mut u8) {
    let (file, index) = (random.below(4), random.below(3));
    if random.below(6) == 0 {
        let file_id = key(file, 0).file;
        let generation = Known { truncations: REMOVED, owner: OWNER };
        target.truncate(file_id, 0..u64::MAX, Behind::Dropped, generation, WriteSet::new()).await.unwrap();
        target.file_removed(file_id);
        model.retain(|(other, _), _| *other != file);
    } else {
        let first = random.below(u64::from(CHUNK)) as usize;
        let count = 1 + random.below((CHUNK as usize - first) as u64) as usize;
        let (first, count) = if random.below(3) == 0 { (0, CHUNK as usize) } else { (first, count) };
        *next = if *next == u8::MAX { 1 } else { *next + 1 };
        write(target, key(file, index), first as u32, &vec![*next; count]).await;
        model.entry((file, index)).or_insert([0; CHUNK as usize])[first..first + count].fill(*next);
    }
    match random.below(3) {
        0 => target.commit_all().await.unwrap(),
        1 => target.sync().await.unwrap(),
        _ => {}
    }
}

/// Changes before, during and after a copy. No file shows anything but its own contents: those of the copy,
/// or newer ones that were written beside it, or zeros where the restore says that blocks are lacking.
fn lives(seed: u64) {
    on_a_volume(async |bench| {
        let (_seed, mut random) = (Seed(seed), Random::new(seed));
        let (bench, anchors) = parts(bench);
        bench.put_row(STORE.to_vec(), vec![7]).await;
        let memory = crate::TargetMemory::default();
        let config = TargetConfig { id: TargetId(0), chunk_blocks: CHUNK, generation: GENERATION, memory };
        let kv: Rc<dyn Kv> = bench.kv.clone();
        let target =
            Target::open(&bench.env, bench.volume.clone(), kv, bench.gate.clone(), config).await.unwrap();
        let (mut model, mut next) = (Model::new(), 0);
        for _ in 0..random.below(40) {
            change(&mut random, &target, &mut model, &mut next).await;
        }
        target.commit_all().await.unwrap();
        let (before, copies) = (model.clone(), Copies::open(&bench.env, &target, anchors.clone()).await);
        let make = copies.make(|_| true);
        let changes = async {
            let mut all = vec![model.clone()];
            for _ in 0..random.below(6) {
                change(&mut random, &target, &mut model, &mut next).await;
                all.push(model.clone());
            }
            all
        };
        let (made, mut all) = futures_util::future::join(make, changes).await;
        made.unwrap();
        for _ in 0..random.below(30) {
            change(&mut random, &target, &mut model, &mut next).await;
            all.push(model.clone());
        }
        target.commit_all().await.unwrap();
        target.stop();
        let how = if random.below(2) == 0 { Newer::AreCollected } else { Newer::Stay };
        let (_, target, done) = restored(&bench, &anchors, how).await;
        for ((file, index), at_copy) in &before {
            let found = fills(&target, key(*file, *index)).await;
            let lacks = done.changed.listed.contains_key(&Ino(FIRST + file));
            for (block, (fill, old)) in found.iter().zip(at_copy).enumerate() {
                let now = |model: &Model| model.get(&(*file, *index)).map_or(0, |chunk| chunk[block]);
                let own = all.iter().any(|model| now(model) == *fill);
                assert!(
                    own || *fill == 0 && lacks || fill == old || how == Newer::Stay && lacks,
                    "block {block} of {file}, chunk {index}: {fill} for {old}"
                );
            }
        }
        // All contents of now are somewhere.
        let mut newer: BTreeMap<u8, u64> = BTreeMap::new();
        for index in 0..done.newer_blocks.div_ceil(CHUNK.into()) {
            for fill in fills(&target, ChunkKey { file: FileId::main(Ino(NEWER)), index }).await {
                *newer.entry(fill).or_default() += 1;
            }
        }
        let mut shown = BTreeSet::new();
        for (file, index) in (0..4).flat_map(|file| (0..3).map(move |index| (file, index))) {
            shown.extend(fills(&target, key(file, index)).await);
        }
        let shown = if how == Newer::Stay { shown } else { BTreeSet::new() };
        for ((file, index), chunk) in &model {
            let found = fills(&target, key(*file, *index)).await;
            for (block, fill) in chunk.iter().enumerate().filter(|(_, fill)| **fill != 0) {
                let is_there = found[block] == *fill || newer.contains_key(fill) || shown.contains(fill);
                assert!(is_there, "block {block} of {file}, chunk {index}: {fill} is lost");
            }
        }
        target.stop();
    });
}

#[test]
fn no_file_shows_the_contents_of_another_after_a_restore() {
    penstock_sim::seeds(1..60).for_each(lives);
}

/// Regression: the anchor of the other copy stayed, and its blocks, which were others' by then, were left out
/// by the next restore.
#[test]
fn blocks_of_the_other_copy_belong_to_others_after_a_restore() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        bench.put_row(STORE.to_vec(), vec![7]).await;
        for row in 0..200 {
            bench.put_row([&NAME[..], &[row]].concat(), vec![row; 1000]).await;
        }
        let target = bench.target().await;
        let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        let (_, second) = (copy(&copies).await, copy(&copies).await);
        target.stop();
        let (bench, target, done) = restored(&bench, &anchors, Newer::AreCollected).await;
        assert_eq!(done.copy, second);
        let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        assert_eq!(copies.known.borrow().iter().flatten().count(), 1, "the other one is free");
        // The blocks of the first copy are given to a file.
        let mut number = 0;
        while target.usage().free_blocks > u64::from(CHUNK) * 2 {
            write(&target, key(9, number), 0, &[100 + (number % 100) as u8; CHUNK as usize]).await;
            target.commit_all().await.unwrap();
            number += 1;
        }
        target.sync().await.unwrap();
        target.stop();
        let (_, target, done) = restored(&bench, &anchors, Newer::AreCollected).await;
        assert_eq!((done.copy, done.newer_blocks), (second, number * u64::from(CHUNK)));
        target.stop();
    });
}

/// Regression: the only copy that was whole gave way to a new one, which failed.
#[test]
fn the_only_copy_that_is_whole_is_not_given_up() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        bench.put_row(STORE.to_vec(), vec![7]).await;
        let target = bench.target().await;
        let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        let (_, second) = (copy(&copies).await, copy(&copies).await);
        spoil(&bench, &copies, &second).await;
        fail(&bench, &copies).await;
        let found = find_one(&bench, &anchors).await;
        assert_eq!(found.anchor().serial, 1);
        assert_eq!(copy(&copies).await.serial, 3);
        assert_clean(&bench, &target).await;
        target.stop();
    });
}

/// Two copies, the second of which has an anchor of a later release.
async fn second_is_of_a_later_release(bench: &Bench, anchors: &Volume) -> (Rc<Target>, Rc<Copies>) {
    bench.put_row(STORE.to_vec(), vec![7]).await;
    let target = bench.target().await;
    let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
    let (_, second) = (copy(&copies).await, copy(&copies).await);
    let mut bytes = second.encode();
    bytes[12] = 2; // its format
    let crc = penstock_base::crc32c(&bytes[12..]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    write_anchor(anchors, 1, padded(&bytes).unwrap()).await.unwrap();
    (target, copies)
}

fn is_of_a_later_release<T>(found: &Result<T, ChunkError>) -> bool {
    matches!(found, Err(ChunkError::Row(DecodeError::Unknown { .. })))
}

/// It was passed over by a restore, which made it void, and the next copy was written over it.
#[test]
fn a_copy_of_a_later_release_is_neither_passed_over_nor_written_over() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        let (target, copies) = second_is_of_a_later_release(&bench, &anchors).await;
        assert!(is_of_a_later_release(&copies.make(|_| true).await));
        target.stop();
        assert!(is_of_a_later_release(&find(&bench.volume, &anchors).await));
        assert!(is_of_a_later_release(&read_anchor(&anchors, 1).await));
    });
}

/// Regression: a segment of a later release was taken for damage, and its copy was written over.
#[test]
fn a_copy_with_segments_of_a_later_release_is_not_written_over() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        let (target, copies, [_, second]) = two_copies(&bench, &anchors).await;
        let block = first_block(&copies, &second).await;
        let mut bytes = bench.volume.read(block, 1, IO).await.unwrap().gather().to_vec();
        let len = u32::from_le_bytes(bytes[16..20].try_into().unwrap()) as usize;
        bytes[12] = 2; // its format
        let crc = penstock_base::crc32c(&bytes[12..20 + len]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        let (data, crcs) = (Buf::copy_from(&bytes), crc32c_blocks(&bytes));
        bench.volume.write(block, &data, &crcs).await.unwrap();
        bench.volume.flush().await.unwrap();
        assert!(is_of_a_later_release(&find(&bench.volume, &anchors).await), "a restore refuses");
        assert!(is_of_a_later_release(&copies.make(|_| true).await), "it is not written over");
        assert!(is_of_a_later_release(&find(&bench.volume, &anchors).await), "it is there still");
        target.stop();
    });
}

/// Regression: a page of the stripe table that could not be read for a moment cost files the blocks of its
/// stripes, which a repair then freed.
#[test]
fn a_page_that_cannot_be_read_for_a_moment_costs_no_file_its_contents() {
    on_drives_of(48 << 20, Some(1), async |bench| {
        let (bench, anchors) = parts(bench);
        bench.put_row(STORE.to_vec(), vec![7]).await;
        let target = bench.target().await;
        for index in 0..100 {
            write(&target, key(0, index), 0, &[10 + index as u8; CHUNK as usize]).await;
        }
        target.commit_all().await.unwrap();
        let copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        copy(&copies).await;
        // Newer ones, of which only the stripes tell.
        for index in 100..120 {
            write(&target, key(1, index), 0, &[10 + index as u8; CHUNK as usize]).await;
        }
        target.sync().await.unwrap();
        bench.volume.array().destage_and_checkpoint().await.unwrap();
        target.stop();
        let how = how_of(Newer::AreCollected);
        let whole = restored_rows(&bench, &find_one(&bench, &anchors).await, how).await.1.unwrap();
        assert_eq!((whole.changed.files, whole.newer_blocks), (0, 20 * u64::from(CHUNK)));
        let (mut refused, mut gone) = (0, 0);
        for page in 0..bench.volume.array().geometry().table_pages() {
            let found = find_one(&bench, &anchors).await;
            bench.set_page_unreadable(page);
            let seen = preview(&found, &bench.volume, &mut Rows::default(), how).await;
            // With the consent to lose what cannot be read, it is lost.
            let how = How { may_lack: seen.is_err(), ..how };
            let done = restored_rows(&bench, &found, how).await.1;
            bench.set_readable();
            match (seen, done) {
                (Ok(seen), Ok(done)) => {
                    let both = [seen, done].map(|done| (done.changed, done.newer_blocks));
                    assert_eq!(
                        both,
                        [0; 2].map(|_| (whole.changed.clone(), whole.newer_blocks)),
                        "page {page}"
                    );
                }
                (Err(error), done) => {
                    assert!(error.to_string().contains("stripe table"), "page {page}: {error}");
                    refused += 1;
                    let is_less =
                        |done: Restored| done.changed.files > 0 || done.newer_blocks < whole.newer_blocks;
                    gone += u64::from(done.is_ok_and(is_less));
                }
                (Ok(_), Err(error)) => panic!("page {page}: {error}"),
            }
        }
        assert!(refused > 1 && gone > 1, "{refused} refused, {gone} with losses");
    });
}

/// Makes that fail or end in the middle, damaged copies and anchors, and restarts. A copy that was whole
/// stays until a newer one is.
fn makes(seed: u64) {
    on_a_volume(async |bench| {
        let (_seed, mut random) = (Seed(seed), Random::new(seed));
        let (bench, anchors) = parts(bench);
        bench.put_row(STORE.to_vec(), vec![7]).await;
        for row in 0..random.below(120) as u8 {
            bench.put_row([&NAME[..], &[row]].concat(), vec![row; 1000]).await;
        }
        let mut target = bench.target().await;
        let mut copies = Copies::open(&bench.env, &target, anchors.clone()).await;
        let (spoiled, crcs) = crate::tests::blocks_of(&[9]);
        let mut chunk = 0;
        for step in 0..25 {
            let before = find(&bench.volume, &anchors).await.ok().map(|found| found.anchor().serial);
            let (mut restarts, mut damages) = (false, false);
            match random.below(9) {
                0 | 1 => assert!(copies.make(|_| true).await.is_ok(), "in step {step}"),
                2 | 3 => {
                    let after = Duration::from_micros(random.below(60_000));
                    let stop = async {
                        bench.env.sleep(after).await;
                        target.stop();
                    };
                    let _ = futures_util::future::join(copies.make(|_| true), stop).await;
                    restarts = true;
                }
                4 => {
                    bench.kv.fail_after(random.below(30));
                    let _ = copies.make(|_| true).await;
                    bench.kv.fail_after(u64::MAX);
                }
                5 => {
                    target.stop();
                    restarts = true;
                }
                6 => {
                    let both = [read_anchor(&anchors, 0).await, read_anchor(&anchors, 1).await];
                    if let [Ok(one), Ok(other)] = &both {
                        let victim = if random.below(2) == 0 { one } else { other };
                        bench.volume.write(victim.index[0][0].0, &spoiled, &crcs).await.unwrap();
                        damages = true;
                    }
                }
                7 => {
                    let slot = random.below(2) as usize;
                    anchors.write(place_of(&anchors, slot).0, &spoiled, &crcs).await.unwrap();
                    damages = true;
                }
                _ => {
                    for _ in 0..random.below(6) {
                        chunk = (chunk + 1) % 20;
                        write(&target, key(8, chunk), 0, &[60; CHUNK as usize]).await;
                        target.sync().await.unwrap();
                    }
                }
            }
            bench.volume.flush().await.unwrap();
            if restarts {
                target = bench.target().await;
                copies = Copies::open(&bench.env, &target, anchors.clone()).await;
            }
            let after = find(&bench.volume, &anchors).await.ok().map(|found| found.anchor().serial);
            assert!(damages || after >= before, "step {step}: {before:?} to {after:?}");
        }
        for _ in 0..2 {
            copies.make(|_| true).await.unwrap();
        }
        assert_clean(&bench, &target).await;
        target.stop();
    });
}

#[test]
fn a_whole_copy_stays_whatever_happens_to_makes() {
    penstock_sim::seeds(1..40).for_each(makes);
}

/// Regression: an anchor of which some blocks were lost was written in part, and could not be read
/// afterwards.
#[test]
fn an_anchor_is_written_in_a_place_that_cannot_be_read() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        let (target, copies, _) = two_copies(&bench, &anchors).await;
        // Nobody undoes that: the place is readable again once it is written.
        for slot in [0, 1] {
            bench.set_unreadable(blocks_of_anchor(&bench, &anchors, slot)).await;
            let serial = copy(&copies).await.serial;
            bench.volume.array().destage_and_checkpoint().await.unwrap();
            assert_eq!(read_anchor(&anchors, slot).await.unwrap().serial, serial, "anchor {slot}");
            assert_eq!(usable(&bench, &anchors).await, serial);
        }
        assert_clean(&bench, &target).await;
        target.stop();
    });
}

/// Regression: with two anchors that could not be read both copies were freed, or no copy was ever made
/// again.
#[test]
fn copies_whose_anchors_cannot_be_read_are_freed_after_the_next_one() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        let (target, copies, [_, second]) = two_copies(&bench, &anchors).await;
        for slot in [0, 1] {
            bench.set_unreadable(blocks_of_anchor(&bench, &anchors, slot)).await;
        }
        fail(&bench, &copies).await;
        assert_eq!(kept(&bench), [1, 2]);
        let third = copy(&copies).await;
        let of_now = kept(&bench);
        assert!([1, 2, third.serial].iter().all(|serial| of_now.contains(serial)), "any may have an anchor");
        bench.set_readable();
        assert_eq!(usable(&bench, &anchors).await, third.serial);
        spoil(&bench, &copies, &third).await;
        assert_eq!(usable(&bench, &anchors).await, second.serial, "its anchor was not written over");
        let fourth = copy(&copies).await;
        assert_eq!(kept(&bench), [2, fourth.serial]);
        assert_clean(&bench, &target).await;
        target.stop();
    });
}

/// Regression: the older copy was damaged and the newer one could not be read for a moment, and both were
/// given up before a third one was there.
#[test]
fn two_copies_that_cannot_be_read_stay_until_there_is_a_third_one() {
    on_a_volume(async |bench| {
        let (bench, anchors) = parts(bench);
        let (target, copies, [first, second]) = two_copies(&bench, &anchors).await;
        spoil(&bench, &copies, &first).await;
        let at = first_block(&copies, &second).await;
        bench.set_unreadable(at..at + 1).await;
        fail(&bench, &copies).await;
        bench.set_readable();
        assert_eq!(usable(&bench, &anchors).await, second.serial);
        bench.set_unreadable(at..at + 1).await;
        let third = copy(&copies).await;
        bench.set_readable();
        assert!(kept(&bench).contains(&2), "only the next one frees it");
        let fourth = copy(&copies).await;
        assert_eq!(kept(&bench), [third.serial, fourth.serial]);
        assert_clean(&bench, &target).await;
        target.stop();
    });
}

/// Regression: one anchor could not be read for a moment, and the copy of the other one was damaged: it gave
/// way, and the copy of the first one was freed.
#[test]
fn a_copy_whose_anchor_cannot_be_read_is_not_freed_beside_a_damaged_one() {
    for unread in [0, 1] {
        on_a_volume(async |bench| {
            let (bench, anchors) = parts(bench);
            let (target, copies, both) = two_copies(&bench, &anchors).await;
            spoil(&bench, &copies, &both[1 - unread]).await;
            bench.set_unreadable(blocks_of_anchor(&bench, &anchors, unread)).await;
            fail(&bench, &copies).await;
            bench.set_readable();
            assert_eq!(usable(&bench, &anchors).await, both[unread].serial);
            bench.set_unreadable(blocks_of_anchor(&bench, &anchors, unread)).await;
            let third = copy(&copies).await;
            bench.set_readable();
            spoil(&bench, &copies, &third).await;
            assert_eq!(usable(&bench, &anchors).await, both[unread].serial);
            target.stop();
        });
    }
}

/// Regression: while the page of the stripe table with the anchors was lost, each copy that was tried stayed,
/// and they filled the volume.
#[test]
fn copies_that_no_anchor_can_name_are_freed() {
    on_drives_of(48 << 20, Some(1), async |bench| {
        let (bench, anchors) = parts(bench);
        let (target, copies, [_, second]) = two_copies(&bench, &anchors).await;
        // Others take the memory of the page.
        for index in 0..100 {
            write(&target, key(0, index), 0, &[10; CHUNK as usize]).await;
        }
        target.commit_all().await.unwrap();
        bench.volume.array().destage_and_checkpoint().await.unwrap();
        for stripe in 0..200 {
            bench.volume.read(stripe * STRIPE, 1, IO).await.unwrap();
        }
        let array = bench.volume.array().clone();
        bench.set_page_unreadable(array.geometry().table_pages() - 1);
        for _ in 0..3 {
            let error = copies.make(|_| true).await.unwrap_err().to_string();
            assert!(error.contains("stripe table"), "{error}");
        }
        assert_eq!(kept(&bench), [1, 2]);
        bench.set_readable();
        assert_eq!(usable(&bench, &anchors).await, second.serial);
        let third = copy(&copies).await;
        assert_eq!(kept(&bench), [2, third.serial]);
        target.stop();
    });
}
