//! Random lives of a target whose rows about free space are damaged between them. No file ever reads what
//! another one wrote, or anything but its own newest data; a repair gives all space back.

use crate::ChunkError;
use crate::free::{Groups, Space};
use crate::rows::{
    GROUP_WORDS, counts_key, decode_counts, decode_group, encode_counts, encode_group, group_key,
};
use crate::target::Target;
use crate::tests::{
    Bench, CHUNK, CLIENT, Random, STRIPE, Seed, assert_clean, blocks_of, chunk_key, file, fills, known,
    on_a_volume,
};
use penstock_base::ErrorKind;
use penstock_kv::{Kv, KvRead, WriteSet};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

const FILES: std::ops::Range<u64> = 2..7;
const CHUNKS: u64 = 3;
const LIVES: usize = 4;
const STEPS: usize = 25;

struct Life<'a> {
    bench: &'a Bench,
    random: RefCell<Random>,
    /// The fill of each block, by file and chunk; 0 where nothing is written.
    wanted: BTreeMap<(u64, u64), [u8; CHUNK as usize]>,
    round: u8,
    is_damaged: bool,
    /// Files only preallocate: the sweep sees nothing of it.
    only_preallocates: bool,
}

impl Life<'_> {
    fn below(&self, bound: u64) -> u64 {
        self.random.borrow_mut().below(bound)
    }

    /// A fill that no other file writes.
    fn fill_of(&mut self, ino: u64) -> u8 {
        self.round = (self.round + 1) % 40;
        1 + (ino as u8) * 40 - 80 + self.round
    }

    /// As [`penstock_meta`] does it if there is no space to commit.
    async fn commit(&self, target: &Target) {
        match target.commit_all().await {
            Err(error) if self.is_damaged && error.kind() == ErrorKind::NoSpace => {
                repair_bits(self.bench, target).await;
                target.commit_all().await.unwrap();
            }
            committed => committed.unwrap(),
        }
    }

    fn tolerate(&self, done: Result<(), ChunkError>) -> bool {
        match done {
            Err(error) if self.is_damaged && error.kind() == ErrorKind::NoSpace => false,
            done => {
                done.unwrap();
                true
            }
        }
    }

    async fn step(&mut self, target: &Target) {
        let (ino, index) = (FILES.start + self.below(FILES.end - FILES.start), self.below(CHUNKS));
        let first = self.below(CHUNK.into());
        let count = 1 + self.below(u64::from(CHUNK) - first);
        let in_file = index * u64::from(CHUNK) + first..index * u64::from(CHUNK) + first + count;
        let range = first as usize..(first + count) as usize;
        let what = if self.only_preallocates { 7 + self.below(2) } else { self.below(10) };
        match what {
            0..=4 => {
                let fill = self.fill_of(ino);
                let (data, crcs) = blocks_of(&vec![fill; count as usize]);
                let key = chunk_key(ino, index);
                let known = known(u64::MAX - 1);
                let written = target.write(key, first as u32, &data, &crcs, known, CLIENT).await;
                if self.tolerate(written) {
                    self.wanted.entry((ino, index)).or_default()[range].fill(fill);
                }
            }
            5 | 6 => {
                target.punch(file(ino), in_file, 0).await.unwrap();
                self.wanted.entry((ino, index)).or_default()[range].fill(0);
            }
            7 => _ = self.tolerate(target.preallocate(file(ino), in_file, false, known(0)).await),
            8 => self.commit(target).await,
            _ => self.bench.env.sleep(Duration::from_millis(100 + self.below(10_000))).await,
        }
    }

    async fn check(&self, target: &Target) {
        for ((ino, index), wanted) in &self.wanted {
            assert_eq!(fills(target, chunk_key(*ino, *index)).await, wanted, "file {ino}, chunk {index}");
        }
    }

    /// Damages rows about free space, as a store without redundancy may.
    async fn damage(&mut self) {
        self.is_damaged = true;
        for _ in 0..=self.below(2) {
            let group = self.below(Groups::new(self.bench.volume.blocks(), STRIPE).count());
            let (bits, counts) = (group_key(group), counts_key(0));
            let mut writes = WriteSet::new();
            match self.below(7) {
                0 => _ = writes.delete(bits),
                1 => _ = writes.put(bits, vec![1; 9]),
                2 => _ = writes.delete(counts),
                3 => _ = writes.put(counts, vec![7]),
                // Both agree that nothing is there.
                4 => {
                    writes.delete(bits);
                    let row = self.bench.kv.get(counts.clone()).await.unwrap();
                    let Some(row) = row.filter(|row| row.len() > 1) else { continue };
                    let groups = Groups::new(self.bench.volume.blocks(), STRIPE);
                    let Ok(mut all) = decode_counts(&row, groups.count() as usize) else { continue };
                    all[group as usize] = Space::new(groups.blocks(), STRIPE).free_counts(group);
                    writes.put(counts, encode_counts(&all));
                }
                _ => {
                    let row = self.bench.kv.get(bits.clone()).await.unwrap();
                    let words = row.and_then(|row| decode_group(&row, GROUP_WORDS).ok());
                    let Some(mut words) = words else { continue };
                    words[self.below(4) as usize] &= !(u64::MAX << self.below(64));
                    writes.put(bits, encode_group(&words));
                }
            }
            self.bench.kv.commit_durable(writes).await.unwrap();
        }
    }
}

async fn repair_bits(bench: &Bench, target: &Target) {
    let quiet = bench.gate.quiesce().await;
    target.fsck(&quiet).mark_owned().await.unwrap();
}

async fn lives(bench: &Bench, seed: u64) {
    let random = RefCell::new(Random::new(seed));
    let wanted = BTreeMap::new();
    let mut life = Life { bench, random, wanted, round: 0, is_damaged: false, only_preallocates: false };
    for _ in 0..LIVES {
        life.only_preallocates = life.wanted.is_empty() && life.below(2) == 0;
        let target: Rc<Target> = bench.target().await;
        for _ in 0..STEPS {
            life.step(&target).await;
        }
        life.commit(&target).await;
        life.check(&target).await;
        target.stop();
        bench.kv.crash();
        if !seed.is_multiple_of(4) {
            life.damage().await;
        }
    }
    let target = bench.target().await;
    life.check(&target).await;
    target.sweep().await.unwrap();
    {
        let quiet = bench.gate.quiesce().await;
        let fsck = target.fsck(&quiet);
        fsck.mark_owned().await.unwrap();
        fsck.clear_unowned().await.unwrap();
    }
    assert_eq!(target.suspect_groups(), 0);
    assert_clean(bench, &target).await;
    life.check(&target).await;
    for ino in FILES {
        target.punch(file(ino), 0..CHUNKS * u64::from(CHUNK), 0).await.unwrap();
    }
    target.commit_all().await.unwrap();
    target.stop();
    let target = bench.target().await;
    target.sweep().await.unwrap();
    assert_eq!((target.suspect_groups(), target.usage().free_blocks), (0, bench.volume.blocks()));
    target.stop();
}

#[test]
fn damaged_rows_of_free_space_give_no_block_to_two_files() {
    let from = std::env::var("PENSTOCK_SEEDS").ok().and_then(|from| from.parse().ok()).unwrap_or(0);
    for seed in from..from + 60 {
        let _told = Seed(seed);
        on_a_volume(async |bench| lives(bench, seed).await);
    }
}
