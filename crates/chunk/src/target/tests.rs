use crate::rows::{ChunkKey, FileRow, Owner, encode_account};
use crate::target::{Target, TargetConfig, TargetMemory};
use crate::tests::{
    Bench, CHUNK, CLIENT, GENERATION, OWNER, Random, STRIPE, Seed, assert_clean, blocks_of, chunk_key,
    extent, file, fills, known, on_a_volume, write,
};
use crate::{Behind, ChunkError, Known, Knows, WantedRow};
use penstock_base::rank::scoped;
use penstock_base::{Birth, Branch, Class, FileId, FindingKind as Kind, Ino, IoContext, TargetId};
use penstock_kv::{Kv, KvRead, WriteSet};
use penstock_sim::seeds;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

#[test]
fn a_chunk_is_full_stripes_of_about_a_mebibyte() {
    on_a_volume(async |bench| {
        let memory = TargetMemory::default();
        let config = TargetConfig::for_volume(&bench.volume, TargetId(3), 5);
        assert_eq!(config, TargetConfig { id: TargetId(3), chunk_blocks: 256, generation: 5, memory });
        let target = bench.target().await;
        assert_eq!(
            target.config(),
            TargetConfig { id: TargetId(0), chunk_blocks: CHUNK, generation: GENERATION, memory }
        );
    });
}

#[test]
fn an_unreadable_group_counts_as_used_and_a_stray_one_as_nothing() {
    // Columns: an allocation group, its row, and the number of used blocks once the first group is read.
    let all = crate::rows::GROUP_WORDS;
    let word = |word: u64| crate::rows::encode_group(&[vec![word], vec![0; all - 1]].concat());
    on_a_volume(async |bench| {
        let blocks = bench.volume.blocks();
        for (group, row, used) in [
            (0, word(0b1011), 256),
            (0, vec![], 256),
            (0, vec![1, 2], 256),
            (0, vec![9; 5000], 256),
            (100, word(0b1011), 0),
            (u64::MAX, word(1), 0),
        ] {
            for (key, _) in bench.kv.rows() {
                let mut writes = WriteSet::new();
                writes.delete(key);
                bench.kv.commit(writes).await.unwrap();
            }
            let what = format!("group {group}: {} bytes", row.len());
            bench.put_marks(&[]).await;
            bench.put_row(crate::rows::group_key(group), row).await;
            let target = bench.target().await;
            assert_eq!(target.usage().free_blocks, blocks, "nothing is counted in the rows");
            target.allocator.load(0).await.unwrap();
            assert_eq!(blocks - target.usage().free_blocks, used, "{what}");
            target.stop();
            // Nothing is free in groups whose counts cannot be read.
            bench.put_row(crate::rows::counts_key(0), vec![7]).await;
            let target = bench.target().await;
            assert_eq!(target.usage().free_blocks, 0, "{what}");
            target.stop();
        }
    });
}

#[test]
fn blocks_of_files_that_no_bit_marks_are_not_given_away() {
    on_a_volume(async |bench| {
        bench.write_stripe(3, 7).await;
        let key = chunk_key(2, 0);
        bench.put_map(key, &[extent(0, STRIPE as u32, 3 * STRIPE)]).await;
        let target = bench.target().await;
        target.allocator.sweep().await.unwrap();
        assert_eq!(bench.volume.blocks() - target.usage().free_blocks, 256, "all of the group");
        bench.env.sleep(Duration::from_secs(30)).await;
        assert_eq!(fills(&target, key).await[..9], [7, 7, 7, 7, 7, 7, 7, 7, 0]);
    });
}

#[test]
fn a_full_target_takes_overwrites_and_frees_space() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let (data, crcs) = blocks_of(&[1; CHUNK as usize]);
        let mut chunks = 0;
        let refused = loop {
            match target.write(chunk_key(2, chunks), 0, &data, &crcs, known(0), CLIENT).await {
                Ok(()) => chunks += 1,
                Err(error) => break error,
            }
        };
        assert!(matches!(refused, ChunkError::NoSpace { wanted_blocks: 16, .. }), "{refused}");
        let most = bench.volume.blocks() - bench.volume.blocks() / 50;
        assert_eq!(chunks, most / u64::from(CHUNK), "only the headroom is left");
        assert_clean(bench, &target).await;
        for index in [0, chunks - 1] {
            write(&target, chunk_key(2, index), 3, &[2; 4]).await;
        }
        assert_clean(bench, &target).await;
        // The blocks of the punched chunk become free with the commit that the write itself makes.
        target.punch(file(2), 0..CHUNK.into(), 0).await.unwrap();
        write(&target, chunk_key(3, 0), 0, &[3; CHUNK as usize]).await;
        assert_clean(bench, &target).await;
        assert_eq!(fills(&target, chunk_key(2, chunks - 1)).await[2..8], [1, 2, 2, 2, 2, 1]);
        assert_eq!(fills(&target, chunk_key(3, 0)).await, [3; CHUNK as usize]);
    });
}

/// A target in a random life, and the contents that its chunks may have.
struct Life<'a> {
    bench: &'a Bench,
    target: Rc<Target>,
    random: Random,
    /// The contents as a reader sees them.
    now: BTreeMap<ChunkKey, [u8; CHUNK as usize]>,
    /// For each block, the fills that it may have after a crash.
    allowed: BTreeMap<(ChunkKey, usize), BTreeSet<u8>>,
    round: u64,
}

const FILES: u64 = 2;
const CHUNKS: u64 = 3;

fn all_keys() -> impl Iterator<Item = ChunkKey> {
    (1..=FILES).flat_map(|ino| (0..CHUNKS).map(move |index| chunk_key(ino, index)))
}

impl Life<'_> {
    fn set(&mut self, key: ChunkKey, at: usize, fill: u8) {
        self.now.get_mut(&key).unwrap()[at] = fill;
        self.allowed.entry((key, at)).or_default().insert(fill);
    }

    /// Only the present contents may be there after a crash.
    fn settle(&mut self, keys: impl Iterator<Item = ChunkKey>) {
        for key in keys {
            for at in 0..CHUNK as usize {
                self.allowed.insert((key, at), BTreeSet::from([self.now[&key][at]]));
            }
        }
    }

    async fn step(&mut self) {
        self.round += 1;
        let key = chunk_key(1 + self.random.below(FILES), self.random.below(CHUNKS));
        let first = self.random.below(CHUNK.into()) as u32;
        let count = match self.random.below(4) {
            0 => CHUNK - first,
            _ => 1 + self.random.below((CHUNK - first).into()) as u32,
        };
        let in_file = key.index * u64::from(CHUNK) + u64::from(first);
        let blocks = in_file..in_file + u64::from(count);
        let inside = first as usize..(first + count) as usize;
        match self.random.below(12) {
            0..=3 => {
                let fill = (self.round % 250) as u8 + 1;
                let first = if self.random.below(3) == 0 { 0 } else { first };
                let count = if first == 0 { CHUNK } else { count };
                write(&self.target, key, first, &vec![fill; count as usize]).await;
                (first..first + count).for_each(|at| self.set(key, at as usize, fill));
            }
            4 => {
                self.target.punch(key.file, blocks, 0).await.unwrap();
                inside.for_each(|at| self.set(key, at, 0));
            }
            5 => self.target.preallocate(key.file, blocks, false, known(0)).await.unwrap(),
            6 => {
                self.target.preallocate(key.file, blocks, true, known(0)).await.unwrap();
                inside.for_each(|at| self.set(key, at, 0));
            }
            7 => self.truncate(key, first).await,
            8 => {
                self.target.commit(key.file, false).await.unwrap();
                self.settle(all_keys().filter(|other| other.file == key.file));
            }
            9 => {
                self.bench.kv.fail_after(self.random.below(2));
                let _may_fail = self.target.commit(key.file, false).await;
                self.bench.kv.fail_after(u64::MAX);
            }
            10 => self.bench.env.sleep(Duration::from_millis(self.random.below(4000))).await,
            _ => self.crash().await,
        }
    }

    async fn truncate(&mut self, key: ChunkKey, first: u32) {
        let behind = if self.random.below(2) == 0 { Behind::Dropped } else { Behind::Preallocated };
        let from = key.index * u64::from(CHUNK) + u64::from(first);
        let fails = self.random.below(3) == 0;
        self.bench.kv.fail_after(if fails { 0 } else { u64::MAX });
        let writes = WriteSet::new();
        let done = self.target.truncate(key.file, from..u64::MAX, behind, known(0), writes).await;
        self.bench.kv.fail_after(u64::MAX);
        if done.is_err() {
            return assert!(fails, "{done:?}");
        }
        for other in all_keys().filter(|other| other.file == key.file && other.index >= key.index) {
            let first = if other == key { first as usize } else { 0 };
            (first..CHUNK as usize).for_each(|at| self.set(other, at, 0));
        }
    }

    async fn crash(&mut self) {
        // The write-backs of full chunks end first, because the volume below goes on.
        self.bench.env.sleep(Duration::from_secs(1)).await;
        self.target.stop();
        self.bench.kv.crash();
        self.target = self.bench.target().await;
        for key in all_keys() {
            let found = fills(&self.target, key).await;
            for (at, fill) in found.iter().enumerate() {
                let allowed = &self.allowed[&(key, at)];
                assert!(allowed.contains(fill), "block {at} of {key:?} is {fill}, not one of {allowed:?}");
            }
            self.now.insert(key, found.try_into().unwrap());
        }
        assert_clean(self.bench, &self.target).await;
        self.settle(all_keys());
    }

    async fn assert_same(&self) {
        for key in all_keys() {
            assert_eq!(fills(&self.target, key).await, self.now[&key], "{key:?} in round {}", self.round);
        }
    }
}

/// The file that leaves only holes.
const FILLER: u64 = 9;

/// Leaves holes of ten blocks in all allocation groups, of which few are in memory.
async fn fill_but_for_holes(bench: &Bench, target: &Target) {
    let most = bench.volume.blocks() - bench.volume.blocks() / 50;
    target.preallocate(file(FILLER), 0..most, false, known(0)).await.unwrap();
    target.commit_all().await.unwrap();
    for first in (0..most).step_by(40) {
        target.punch(file(FILLER), first..most.min(first + 10), 0).await.unwrap();
    }
    target.commit_all().await.unwrap();
}

#[test]
fn a_random_life_reads_what_was_written_and_loses_nothing_that_was_committed() {
    for seed in seeds(0..6) {
        let _printed = Seed(seed);
        on_a_volume(async |bench| {
            let target = bench.target().await;
            if seed % 2 == 1 {
                fill_but_for_holes(bench, &target).await;
            }
            let now = all_keys().map(|key| (key, [0; CHUNK as usize])).collect();
            let (random, allowed) = (Random::new(seed), BTreeMap::new());
            let mut life = Life { bench, target, random, now, allowed, round: 0 };
            life.settle(all_keys());
            for _ in 0..150 {
                life.step().await;
                life.assert_same().await;
            }
            life.crash().await;
            // After both files are removed, all space is free.
            for ino in (1..=FILES).chain([FILLER]) {
                let (all, writes) = (0..u64::MAX, WriteSet::new());
                life.target.truncate(file(ino), all, Behind::Dropped, known(1), writes).await.unwrap();
            }
            assert_clean(bench, &life.target).await;
            assert_eq!(life.target.usage().free_blocks, bench.volume.blocks());
        });
    }
}

/// Regression: a write took the owner from the metadata target when it arrived. When it went on after a
/// change of the owner, and nothing of the file was in memory any more, the old owner came back.
#[test]
fn a_write_that_waits_counts_its_blocks_to_the_owner_at_its_begin() {
    struct Sent(Cell<Owner>);
    impl Knows for &Sent {
        fn known(&self) -> Known {
            Known { truncations: 0, owner: self.0.get() }
        }
    }
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let (other, sent) = (Owner { uid: 7, ..OWNER }, Sent(Cell::new(OWNER)));
        let reading = target.cache.shared(chunk_key(2, 0)).await;
        let (data, crcs) = blocks_of(&[1]);
        let waiting = scoped(target.write(chunk_key(2, 0), 0, &data, &crcs, &sent, CLIENT));
        let change = async {
            target.set_owner(file(2), other, WriteSet::new()).await.unwrap();
            sent.0.set(other);
            // Another file needs the room.
            target.cache.drop_files_from(1);
            write(&target, chunk_key(3, 0), 0, &[1]).await;
            drop(reading);
        };
        let (written, ()) = futures_util::future::join(waiting, scoped(change)).await;
        written.unwrap();
        target.commit_all().await.unwrap();
        let row = bench.kv.get(FileRow::key(file(2), Birth::FIRST)).await.unwrap().unwrap();
        assert_eq!(FileRow::decode(&row).unwrap().owner, other);
        assert_clean(bench, &target).await;
    });
}

#[test]
fn blocks_are_counted_to_the_owner_of_their_file() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let other = Owner { uid: 7, ..OWNER };
        let held = async |ino| target.held_blocks(&[file(ino), file(9)]).await.unwrap();
        write(&target, chunk_key(2, 0), 0, &[1; 6]).await;
        write(&target, chunk_key(2, 5), 3, &[1]).await;
        target.preallocate(file(3), 4..8, false, known(0)).await.unwrap();
        assert_eq!((held(2).await, held(3).await), (vec![7, 0], vec![4, 0]), "before a commit");
        assert!(target.accounts().is_empty());
        write(&target, chunk_key(3, 0), 4, &[2; 5]).await;
        assert_eq!(held(3).await[0], 5, "one of them has no place yet");
        assert_clean(bench, &target).await;
        assert_eq!(target.accounts(), BTreeMap::from([((Branch::MAIN, OWNER), 12)]));
        target.set_owner(file(3), other, WriteSet::new()).await.unwrap();
        let split = BTreeMap::from([((Branch::MAIN, OWNER), 7), ((Branch::MAIN, other), 5)]);
        assert_eq!(target.accounts(), split);
        assert_clean(bench, &target).await;
        bench.kv.fail_after(0);
        target.set_owner(file(3), OWNER, WriteSet::new()).await.unwrap_err();
        target.punch(file(3), 0..5, 0).await.unwrap();
        target.commit(file(3), false).await.unwrap_err();
        bench.kv.fail_after(u64::MAX);
        assert_eq!((target.accounts(), held(3).await[0]), (split, 4), "nothing was committed");
        target.commit_all().await.unwrap();
        // A file without blocks counts its first ones to the last owner that was named.
        target.set_owner(file(4), other, WriteSet::new()).await.unwrap();
        write(&target, chunk_key(4, 0), 0, &[1]).await;
        assert_clean(bench, &target).await;
        target.stop();
        let target = bench.target().await;
        let split = BTreeMap::from([((Branch::MAIN, OWNER), 7), ((Branch::MAIN, other), 5)]);
        assert_eq!(target.accounts(), split, "after a restart");
        assert_eq!(target.held_blocks(&[2, 3, 4, 9].map(file)).await.unwrap(), [7, 4, 1, 0]);
        let writes = WriteSet::new();
        target.truncate(file(2), 3..u64::MAX, Behind::Dropped, known(1), writes).await.unwrap();
        assert_eq!(target.held_blocks(&[file(2)]).await.unwrap(), [3]);
        assert_eq!(target.accounts()[&(Branch::MAIN, OWNER)], 3);
        assert_clean(bench, &target).await;
    });
}

#[test]
fn the_row_of_a_file_may_be_read_by_its_reader() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        write(&target, chunk_key(2, 0), 0, &[1; 6]).await;
        assert_eq!(target.held_or_row(file(2)).unwrap(), 6, "known before there is a row");
        target.commit_all().await.unwrap();
        target.stop();
        let target = bench.target().await;
        let read = async |wanted: &WantedRow| bench.kv.get(wanted.key.clone()).await.unwrap();
        let (first, second) =
            (target.held_or_row(file(2)).unwrap_err(), target.held_or_row(file(3)).unwrap_err());
        assert_eq!(target.held_by_row(&first, read(&first).await), 6);
        assert_eq!(target.held_by_row(&second, read(&second).await), 0, "a file without a row");
        assert_eq!(target.held_or_row(file(2)).unwrap(), 6, "it is in memory from now on");
        assert_eq!(target.held_by_row(&first, None), 6, "what is in memory is newer than a row");

        // Between the reading of a row and its arrival the file changes and leaves memory.
        let late = target.held_or_row(file(4)).unwrap_err();
        let row = read(&late).await;
        write(&target, chunk_key(4, 0), 0, &[1; 3]).await;
        target.commit_all().await.unwrap();
        target.cache.evict_clean();
        target.held_by_row(&late, row);
        let again = target.held_or_row(file(4)).unwrap_err();
        assert_eq!(target.held_by_row(&again, read(&again).await), 3, "a late row is not kept");
    });
}

/// Regression: a stat took a row that cannot be read for none, and the next write replaced it.
#[test]
fn a_row_that_cannot_be_read_is_not_taken_for_none() {
    on_a_volume(async |bench| {
        let key = FileRow::key(file(2), Birth::FIRST);
        bench.put_row(key.clone(), vec![9]).await;
        let target = bench.target().await;
        let wanted = target.held_or_row(file(2)).unwrap_err();
        assert_eq!(target.held_by_row(&wanted, bench.kv.get(key.clone()).await.unwrap()), 0);
        assert_eq!(target.held_blocks(&[file(2)]).await.unwrap(), [0]);
        let (data, crcs) = blocks_of(&[1]);
        let refused = target.write(chunk_key(2, 0), 0, &data, &crcs, known(1), CLIENT).await.unwrap_err();
        assert!(matches!(refused, ChunkError::Row(_)), "{refused}");
        target.commit_all().await.unwrap();
        assert_eq!(bench.kv.get(key).await.unwrap(), Some(vec![9]));
    });
}

/// Blocks of one file, and rows that say something else of it.
#[test]
fn wrong_rows_of_files_and_accounts_are_found_and_counted_again() {
    let row = |truncations, blocks, owner| FileRow { truncations, blocks, owner, owner_number: 0 }.encode();
    let key = FileRow::key(file(2), Birth::FIRST);
    let lone = FileRow::key(file(5), Birth::FIRST);
    let cases = [
        ("too few blocks", key.clone(), row(0, 1, OWNER), vec![Kind::WrongFileRow, Kind::WrongAccount]),
        ("another owner", key.clone(), row(0, 4, Owner::default()), vec![Kind::WrongAccount]),
        ("no row", key.clone(), vec![1, 2], vec![Kind::BadFileRow, Kind::WrongFileRow, Kind::WrongAccount]),
        ("a row of nothing", lone.clone(), row(0, 0, OWNER), vec![Kind::WrongFileRow]),
        ("blocks of nothing", lone, row(3, 5, OWNER), vec![Kind::WrongFileRow, Kind::WrongAccount]),
        ("another account", OWNER.account(Branch::MAIN), encode_account(7), vec![Kind::WrongAccount]),
        ("no account", OWNER.account(Branch::MAIN), vec![1], vec![Kind::BadFileRow, Kind::WrongAccount]),
        (
            "an account of nobody",
            Owner::default().account(Branch::MAIN),
            encode_account(7),
            vec![Kind::WrongAccount],
        ),
        ("a later birth", FileRow::key(file(2), Birth(2)), row(0, 4, OWNER), vec![Kind::UnknownRow]),
    ];
    for (what, key, value, expected) in cases {
        on_a_volume(async |bench| {
            let target = bench.target().await;
            write(&target, chunk_key(2, 0), 0, &[1; 4]).await;
            target.commit_all().await.unwrap();
            bench.put_row(key, value).await;
            let quiet = bench.gate.quiesce().await;
            let fsck = target.fsck(&quiet);
            let found = async || -> Vec<Kind> {
                fsck.check().await.unwrap().findings.counts.keys().copied().collect()
            };
            assert_eq!(found().await, expected, "{what}");
            fsck.forget_chunks();
            fsck.count_files(&BTreeMap::from([(Ino(2), known(0))]), &BTreeSet::new()).await.unwrap();
            let left = if expected == [Kind::UnknownRow] { expected } else { Vec::new() };
            assert_eq!(found().await, left, "{what}");
            drop(quiet);
            if left.is_empty() {
                assert_eq!(target.accounts(), BTreeMap::from([((Branch::MAIN, OWNER), 4)]), "{what}");
                write(&target, chunk_key(2, 0), 2, &[1; 9]).await;
                assert_clean(bench, &target).await;
            }
        });
    }
}

/// A file of the model: the owner and the truncate generation that were committed last.
#[derive(Clone, Copy, Default)]
struct Named {
    owner: Owner,
    truncations: u64,
}

/// Owners and generations change while files are written, cut and removed, transactions fail, and the store
/// loses what is not durable: rows of files, maps and accounts agree at every start.
#[test]
fn rows_of_files_and_accounts_agree_after_every_crash() {
    for seed in seeds(0..6) {
        let _printed = Seed(seed);
        on_a_volume(async |bench| {
            let mut random = Random::new(seed);
            let mut files = [Named::default(); 4];
            for life in 0..12 {
                let target = bench.target().await;
                assert_clean(bench, &target).await;
                for step in 0..20 {
                    bench.kv.fail_after(if random.below(4) == 0 { 0 } else { u64::MAX });
                    let at = random.below(4) as usize;
                    change(&target, file(at as u64 + 2), &mut files[at], &mut random).await;
                    bench.kv.fail_after(u64::MAX);
                    if step % 7 == 6 {
                        assert_clean(bench, &target).await;
                    }
                }
                target.commit_all().await.unwrap();
                for (ino, named) in (2..).zip(&files) {
                    let value = bench.kv.get(FileRow::key(file(ino), Birth::FIRST)).await.unwrap();
                    let row = value.map(|value| FileRow::decode(&value).unwrap());
                    let held = target.held_blocks(&[file(ino)]).await.unwrap()[0];
                    assert_eq!(row.map_or(0, |row| row.blocks), held, "life {life}, file {ino}");
                    if let Some(row) = row {
                        let expected = (named.owner, named.truncations);
                        assert_eq!((row.owner, row.truncations), expected, "life {life}, file {ino}");
                    }
                }
                bench.kv.flush().await.unwrap();
                // Changes that are not durable are lost with their rows, or none of them.
                write(&target, chunk_key(2, 0), 0, &[9; 5]).await;
                target.commit(file(2), true).await.unwrap();
                target.stop();
                bench.kv.crash();
            }
        });
    }
}

/// One random change of a file.
async fn change(target: &Target, of: FileId, named: &mut Named, random: &mut Random) {
    let known = Known { truncations: named.truncations, owner: named.owner };
    let key = ChunkKey { file: of, index: random.below(3) };
    let from = random.below(u64::from(CHUNK) - 4) as u32;
    let blocks = key.index * u64::from(CHUNK) + u64::from(from)..(key.index + 1) * u64::from(CHUNK);
    match random.below(7) {
        0 | 1 => {
            let (data, crcs) = blocks_of(&[7; 4]);
            let _ = target.write(key, from, &data, &crcs, known, CLIENT).await;
        }
        2 => drop(target.preallocate(of, blocks, random.below(2) == 0, known).await),
        3 => drop(target.punch(of, blocks, known.truncations).await),
        4 => {
            let next = Known { truncations: named.truncations + 1, ..known };
            let cut = target.truncate(of, blocks.start..u64::MAX, Behind::Dropped, next, WriteSet::new());
            if cut.await.is_ok() {
                named.truncations += 1;
            }
        }
        5 => {
            let owner = Owner { uid: random.below(3) as u32, gid: random.below(2) as u32, project: 0 };
            if target.set_owner(of, owner, WriteSet::new()).await.is_ok() {
                named.owner = owner;
            }
        }
        _ => drop(target.commit(of, random.below(2) == 0).await),
    }
}

/// Regression: a file left memory between the moment at which its owner was named and its first write, if
/// very many files were in use. The commit of that write stopped the process.
#[test]
fn the_owner_of_a_first_write_is_known_until_it_is_committed() {
    for is_reserved in [false, true] {
        on_a_volume(async |bench| {
            let target = bench.target().await;
            target.cache.drop_files_from(1);
            let key = chunk_key(2, 0);
            let (data, crcs) = blocks_of(&[7; 4]);
            let locked = target.cache.exclusive(key).await;
            let first = async {
                match is_reserved {
                    true => target.preallocate(key.file, 0..4, false, known(0)).await.unwrap(),
                    false => target.write(key, 0, &data, &crcs, known(0), CLIENT).await.unwrap(),
                }
            };
            let others = async {
                target.read(chunk_key(3, 0), 0, 1, CLIENT).await.unwrap();
                target.file_removed(file(3));
                target.read(chunk_key(4, 0), 0, 1, CLIENT).await.unwrap();
                drop(locked);
            };
            tokio::join!(first, others);
            assert_clean(bench, &target).await;
            assert_eq!(target.accounts(), BTreeMap::from([((Branch::MAIN, OWNER), 4)]));
        });
    }
}

/// Regression: a write of a chunk that a truncation had not listed survived behind the new end of the file.
#[test]
fn a_write_beside_a_truncation_comes_before_it_or_is_refused() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let (data, crcs) = blocks_of(&[1; 2]);
        let write = |index, truncations| {
            target.write(chunk_key(2, index), 0, &data, &crcs, known(truncations), CLIENT)
        };
        write(0, 0).await.unwrap();
        let locked = target.cache.shared(chunk_key(2, 0)).await;
        let cut = target.truncate(file(2), 0..u64::MAX, Behind::Dropped, known(1), WriteSet::new());
        let beside = async {
            write(1, 0).await.unwrap_err();
            drop(locked);
        };
        tokio::join!(async { cut.await.unwrap() }, beside);
        assert_eq!(fills(&target, chunk_key(2, 1)).await, [0; CHUNK as usize]);
        write(1, 1).await.unwrap();
        assert_clean(bench, &target).await;
    });
}

/// Regression: a change of the owner, or a truncation, that failed took the owner away from a first write
/// that came during it, and the commit of that write stopped the process.
#[test]
fn a_first_write_beside_a_failed_change_of_the_owner_keeps_its_owner() {
    for is_truncation in [false, true] {
        on_a_volume(async |bench| {
            let target = bench.target().await;
            let (data, crcs) = blocks_of(&[1; 2]);
            let other = Owner { uid: 7, ..OWNER };
            let mut writes = WriteSet::new();
            writes.put(vec![1], vec![1]);
            // Another file's commit is under way, and waits for this lock.
            let busy = target.commits.hold().await;
            let change = async {
                let changed = match is_truncation {
                    true => {
                        let known = Known { truncations: 1, owner: other };
                        target.truncate(file(2), 0..u64::MAX, Behind::Preallocated, known, writes).await
                    }
                    false => target.set_owner(file(2), other, writes).await,
                };
                changed.unwrap_err();
            };
            let first = async {
                target.write(chunk_key(2, 0), 0, &data, &crcs, known(1), CLIENT).await.unwrap();
                bench.kv.fail_after(0);
                drop(busy);
            };
            tokio::join!(change, first);
            bench.kv.fail_after(u64::MAX);
            assert_clean(bench, &target).await;
            assert_eq!(target.accounts(), BTreeMap::from([((Branch::MAIN, OWNER), 2)]));
        });
    }
}

/// Regression: a removal whose account could not be read stopped the process, again after each start.
#[test]
fn a_file_is_removed_whatever_its_account_says() {
    for account in [vec![9, 9], encode_account(3)] {
        on_a_volume(async |bench| {
            bench.put_map(chunk_key(2, 0), &[extent(0, 5, 10)]).await;
            bench.put_marks(&[10..12, 12..15]).await;
            bench.put_row(OWNER.account(Branch::MAIN), account).await;
            let target = bench.target().await;
            let writes = WriteSet::new();
            target
                .truncate(file(2), 0..u64::MAX, Behind::Dropped, known(crate::REMOVED), writes)
                .await
                .unwrap();
            target.file_removed(file(2));
            assert_clean(bench, &target).await;
        });
    }
}

#[test]
fn reads_and_write_backs_reach_the_drives_in_the_context_of_their_request() {
    on_a_volume(async |bench| {
        let target = bench.target().await;
        let of = |tenant, wanted_by| IoContext { tenant, wanted_by, ..CLIENT };
        let last = |site| -> Vec<Option<IoContext>> {
            let contexts = bench.disks.iter().map(|disk| disk.last_context(site));
            contexts.filter(Option::is_some).collect()
        };
        let (data, crcs) = blocks_of(&[7; CHUNK as usize]);
        let (soon, later) = (Some(Duration::from_secs(5)), Some(Duration::from_secs(9)));
        target.write(chunk_key(2, 0), 0, &data, &crcs, known(0), of(3, soon)).await.unwrap();
        target.commit(file(2), false).await.unwrap();
        let writes = last("fresh.strip");
        assert_eq!(writes.len(), 3, "a full stripe is on every drive");
        assert!(writes.iter().all(|context| *context == Some(of(3, None))), "{writes:?}");
        let target = bench.target().await;
        target.read(chunk_key(2, 0), 0, CHUNK, of(4, later)).await.unwrap();
        let reads = last("chunk.read");
        assert!(!reads.is_empty() && reads.iter().all(|context| *context == Some(of(4, later))), "{reads:?}");
        // A part of a chunk goes through the log, with the writes of others.
        let (data, crcs) = blocks_of(&[8]);
        target.write(chunk_key(2, 0), 0, &data, &crcs, known(0), of(5, soon)).await.unwrap();
        target.commit(file(2), false).await.unwrap();
        let appends = last("log.append");
        assert!(!appends.is_empty());
        assert!(appends.iter().flatten().all(|context| (context.tenant, context.class) == (0, Class::Log)));
    });
}
