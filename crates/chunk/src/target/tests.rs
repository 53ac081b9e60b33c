use crate::rows::ChunkKey;
use crate::target::{Target, TargetConfig};
use crate::tests::{
    Bench, CHUNK, GENERATION, Random, STRIPE, Seed, assert_clean, blocks_of, chunk_key, extent, file, fills,
    on_a_volume, write,
};
use crate::{Behind, ChunkError};
use penstock_kv::{Kv, WriteSet};
use penstock_sim::seeds;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

#[test]
fn a_chunk_is_full_stripes_of_about_a_mebibyte() {
    on_a_volume(async |bench| {
        let config = TargetConfig::for_volume(&bench.volume, 5);
        assert_eq!(config, TargetConfig { chunk_blocks: 256, generation: 5 });
        let target = bench.target().await;
        assert_eq!(target.config(), TargetConfig { chunk_blocks: CHUNK, generation: GENERATION });
    });
}

#[test]
fn an_unreadable_group_counts_as_used_and_a_stray_one_as_nothing() {
    // Columns: an allocation group, its row, and the number of used blocks.
    let all = crate::free::Space::group_words();
    let word = |word: u64| crate::rows::encode_group(&[vec![word], vec![0; all - 1]].concat());
    on_a_volume(async |bench| {
        let blocks = bench.volume.blocks();
        for (group, row, used) in [
            (0, word(0b1011), 3),
            (0, vec![], blocks),
            (0, vec![1, 2], blocks),
            (0, vec![9; 5000], blocks),
            (1, word(0b1011), 0),
            (u64::MAX, word(1), 0),
        ] {
            for (key, _) in bench.kv.rows() {
                let mut writes = WriteSet::new();
                writes.delete(key);
                bench.kv.commit(writes).await.unwrap();
            }
            let what = format!("group {group}: {} bytes", row.len());
            bench.put_row(crate::rows::group_key(group), row).await;
            let target = bench.target().await;
            assert_eq!(blocks - target.usage().free_blocks, used, "{what}");
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
        assert_eq!(bench.volume.blocks() - target.usage().free_blocks, STRIPE);
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
            match target.write(chunk_key(2, chunks), 0, &data, &crcs, 0).await {
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
            5 => self.target.preallocate(key.file, blocks, false, 0).await.unwrap(),
            6 => {
                self.target.preallocate(key.file, blocks, true, 0).await.unwrap();
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
        let done = self.target.truncate(key.file, from..u64::MAX, behind, 0, writes).await;
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

#[test]
fn a_random_life_reads_what_was_written_and_loses_nothing_that_was_committed() {
    for seed in seeds(0..6) {
        let _printed = Seed(seed);
        on_a_volume(async |bench| {
            let target = bench.target().await;
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
            for ino in 1..=FILES {
                let (all, writes) = (0..u64::MAX, WriteSet::new());
                life.target.truncate(file(ino), all, Behind::Dropped, 1, writes).await.unwrap();
            }
            assert_clean(bench, &life.target).await;
            assert_eq!(life.target.usage().free_blocks, bench.volume.blocks());
        });
    }
}
