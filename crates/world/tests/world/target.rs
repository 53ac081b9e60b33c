//! Random operations on one storage target, over a key-value store that fails commits and flushes at random
//! and on a volume that is nearly full.
//!
//! Each operation is compared with a model of the files. After each life all blocks are compared again, the
//! check finds nothing, and every block that no file owns is free. `PENSTOCK_SEEDS=A..B` replaces the few
//! default seeds.

use crate::machine::Site;
use penstock_array::{Array, Volume};
use penstock_base::{
    BLOCK_BYTES, Buf, Class, Env, FileId, Gate, IoContext, LocalBoxFuture, TargetId, crc32c, crc32c_blocks,
};
use penstock_chunk::{Behind, ChunkError, ChunkKey, Known, Owner, Target, TargetConfig};
use penstock_kv::{Kv, KvError, KvRead, MemKv, Row, Usage, WriteSet};
use penstock_sim::World;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// Chunks of each file.
/// The context of all I/O here.
const CLIENT: IoContext = IoContext::system(Class::Client);
const CHUNKS: u64 = 4;
const FILES: u64 = 4;
const OPERATIONS: u64 = 60;
/// Openings of the target, each on what the one before left.
const LIVES: u64 = 6;

/// A store that takes its time, and fails one transaction or flush in `one_in`; none if that is zero.
struct Unreliable {
    inner: Rc<MemKv>,
    world: World,
    env: Env,
    one_in: Cell<u64>,
}

impl Unreliable {
    async fn wait(&self) {
        if self.world.below(2) == 0 {
            self.env.sleep(Duration::from_micros(self.world.below(3000))).await;
        }
    }

    fn fails(&self) -> bool {
        self.one_in.get() > 0 && self.world.below(self.one_in.get()) == 0
    }
}

impl KvRead for Unreliable {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async move {
            self.wait().await;
            self.inner.get(key).await
        })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        self.inner.get_many(keys)
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        Box::pin(async move {
            self.wait().await;
            self.inner.scan(from, until, limit).await
        })
    }

    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        Box::pin(async move {
            self.wait().await;
            self.inner.keys(from, until, limit).await
        })
    }
}

impl Kv for Unreliable {
    fn snapshot(&self) -> LocalBoxFuture<'_, Result<Rc<dyn KvRead>, KvError>> {
        self.inner.snapshot()
    }

    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async move {
            self.wait().await;
            if self.fails() {
                return Err(KvError::NoSpace { used_bytes: 1, budget_bytes: 1 });
            }
            self.inner.commit(writes).await?;
            self.wait().await;
            Ok(())
        })
    }

    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async move {
            self.commit(writes).await?;
            self.flush().await
        })
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async move {
            self.wait().await;
            match self.fails() {
                true => Err(KvError::Engine("the flush failed".to_owned())),
                false => self.inner.flush().await,
            }
        })
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}

/// A file and what its blocks must contain: each block one number over and over, zero where nothing is.
struct File {
    key: FileId,
    generation: u64,
    owner: Owner,
    blocks: Vec<u64>,
}

fn block_of(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK_BYTES / 8)
}

fn number_of(block: &[u8]) -> u64 {
    u64::from_le_bytes(block[..8].try_into().unwrap())
}

impl File {
    fn known(&self) -> Known {
        Known { truncations: self.generation, owner: self.owner }
    }

    fn set(&mut self, blocks: Range<u64>, number: impl Fn(u64) -> u64) {
        blocks.for_each(|at| self.blocks[at as usize] = number(at));
    }

    /// Compares a range with the model. With `or_zero` an operation on it failed, and each block may have
    /// become zero.
    async fn check(&mut self, target: &Target, blocks: Range<u64>, or_zero: bool, what: &str) {
        let per_chunk = u64::from(target.config().chunk_blocks);
        let mut at = blocks.start;
        while at < blocks.end {
            let index = at / per_chunk;
            let until = blocks.end.min((index + 1) * per_chunk);
            let key = ChunkKey { file: self.key, index };
            let read = target.read(key, (at % per_chunk) as u32, (until - at) as u32, CLIENT).await.unwrap();
            let found = read.gather();
            for ((block, crc), at) in found.chunks_exact(BLOCK_BYTES).zip(&read.crcs).zip(at..) {
                let number = number_of(block);
                assert!(block == block_of(number), "{what}: block {at} is torn");
                assert_eq!(crc32c(block), *crc, "{what}: the checksum of block {at}");
                if or_zero && number == 0 {
                    self.blocks[at as usize] = 0;
                }
                assert_eq!(number, self.blocks[at as usize], "{what}: {:?} block {at}", self.key);
            }
            at = until;
        }
    }
}

/// One life of the target.
struct Life<'a> {
    world: &'a World,
    target: Rc<Target>,
    next_number: &'a Cell<u64>,
    /// Number of times that each operation had each outcome.
    outcomes: &'a RefCell<BTreeMap<String, u64>>,
}

impl Life<'_> {
    fn count(&self, what: &str, outcome: &Result<(), ChunkError>) {
        let name = outcome.as_ref().map_or_else(|error| format!("{:?}", error.kind()), |()| "ok".to_owned());
        *self.outcomes.borrow_mut().entry(format!("{what} {name}")).or_default() += 1;
    }

    /// Writes a part of a chunk, or all of it. After a failure either all of it is there or nothing.
    async fn write(&self, file: &mut File, blocks: Range<u64>) {
        let per_chunk = u64::from(self.target.config().chunk_blocks);
        let (index, first) = (blocks.start / per_chunk, blocks.start % per_chunk);
        let most = per_chunk - first;
        let (first, count) = match self.world.below(6) {
            0 => (0, per_chunk),
            _ => (first, (blocks.end - blocks.start).clamp(1, most)),
        };
        let from = index * per_chunk + first;
        let number = self.next_number.replace(self.next_number.get() + count);
        let data: Vec<u8> = (0..count).flat_map(|n| block_of(number + n)).collect();
        let (key, data) = (ChunkKey { file: file.key, index }, Buf::copy_from(&data));
        let crcs = crc32c_blocks(&data);
        let result = self.target.write(key, first as u32, &data, &crcs, file.known(), CLIENT).await;
        let is_there = match &result {
            Ok(()) => true,
            Err(ChunkError::NoSpace { .. } | ChunkError::Kv(_)) => {
                let found = self.target.read(key, first as u32, 1, CLIENT).await.unwrap().gather();
                number_of(&found) == number
            }
            Err(error) => panic!("write: {error}"),
        };
        if is_there {
            file.set(from..from + count, |at| number + at - from);
        }
        self.count("write", &result);
        file.check(&self.target, from..from + count, false, "write").await;
    }

    async fn operation(&self, file: &mut File) {
        let (world, target) = (self.world, &self.target);
        let per_chunk = u64::from(target.config().chunk_blocks);
        let all = CHUNKS * per_chunk;
        let start = world.below(all);
        let end = match world.below(3) {
            0 => start + 1 + world.below(all - start),
            _ => all.min(start + 1 + world.below(40)),
        };
        let blocks = start..end;
        match world.below(13) {
            0..=5 => self.write(file, blocks).await,
            6 => {
                let result = target.preallocate(file.key, blocks.clone(), false, file.known()).await;
                self.count("preallocate", &result);
                file.check(target, blocks, false, "preallocate").await;
            }
            7 | 8 => {
                let result = target.preallocate(file.key, blocks.clone(), true, file.known()).await;
                self.count("zero", &result);
                if result.is_ok() {
                    file.set(blocks.clone(), |_| 0);
                }
                file.check(target, blocks, result.is_err(), "zero").await;
            }
            9 => {
                let result = target.punch(file.key, blocks.clone(), file.generation).await;
                self.count("punch", &result);
                result.unwrap();
                file.set(blocks.clone(), |_| 0);
                file.check(target, blocks, false, "punch").await;
            }
            10 => {
                let behind = if world.below(2) == 0 { Behind::Dropped } else { Behind::Preallocated };
                let until = if world.below(2) == 0 { u64::MAX } else { (start / per_chunk + 1) * per_chunk };
                let mut writes = WriteSet::new();
                writes.put(vec![1], vec![1]);
                let next = file.generation + 1;
                let result = target
                    .truncate(
                        file.key,
                        start..until,
                        behind,
                        Known { truncations: next, ..file.known() },
                        writes,
                    )
                    .await;
                self.count("truncate", &result);
                if result.is_ok() {
                    file.generation = next;
                    file.set(start..until.min(all), |_| 0);
                }
                file.check(target, 0..all, false, "truncate").await;
            }
            11 => {
                let owner = Owner { uid: world.below(3) as u32, ..Owner::default() };
                let result = target.set_owner(file.key, owner, WriteSet::new()).await;
                self.count("set owner", &result);
                if result.is_ok() {
                    file.owner = owner;
                }
            }
            _ => {
                let result = target.commit(file.key, world.below(2) == 0).await;
                self.count("commit", &result);
                file.check(target, blocks, false, "commit").await;
            }
        }
    }

    /// Commits at random moments until every file had its operations. Such a commit may fail, as all others.
    async fn commit_beside(&self, env: &Env, busy: &Cell<u64>) {
        while busy.get() > 0 {
            env.sleep(Duration::from_micros(self.world.below(20_000))).await;
            let result = match self.world.below(3) {
                0 => self.target.commit_all().await,
                1 => self.target.sync().await,
                _ => self.target.commit(FileId::of_numbers(0, 100 + self.world.below(FILES)), true).await,
            };
            self.count("commit beside", &result);
        }
    }
}

async fn live(
    world: &World,
    env: &Env,
    data: &Rc<Array>,
    seed: u64,
    outcomes: &RefCell<BTreeMap<String, u64>>,
) {
    let kv = Rc::new(Unreliable {
        inner: MemKv::new(1 << 30),
        world: world.clone(),
        env: env.clone(),
        one_in: Cell::new(0),
    });
    let mut files: Vec<File> = Vec::new();
    let next_number = Cell::new(1);
    for nth in 0..LIVES {
        let gate: Rc<Gate> = Rc::default();
        let volume = Volume::whole(data);
        let config = TargetConfig::for_volume(&volume, TargetId(0), nth);
        let target = Target::open(env, volume, kv.clone(), gate.clone(), config).await.unwrap();
        let all = CHUNKS * u64::from(config.chunk_blocks);
        if files.is_empty() {
            // Leaves room for about half of what the files may need.
            let usage = target.usage();
            let ballast = usage.free_blocks - usage.headroom_blocks - 1500 - seed % 4 * 600;
            let file = |n| File {
                key: FileId::of_numbers(0, 100 + n),
                generation: 0,
                owner: Owner::default(),
                blocks: vec![0; all as usize],
            };
            let ballast_file = FileId::of_numbers(0, 99);
            target.preallocate(ballast_file, 0..ballast, false, file(0).known()).await.unwrap();
            files = (0..FILES).map(file).collect();
            files.iter().take(2).for_each(|file| target.file_made(file.key));
        }
        for file in &mut files {
            file.check(&target, 0..all, false, "opened again").await;
        }
        kv.one_in.set(if nth % 2 == 0 { 6 } else { 40 });
        let life = Life { world, target: target.clone(), next_number: &next_number, outcomes };
        let busy = Cell::new(FILES);
        let operations = files.iter_mut().map(|file| async {
            for _ in 0..OPERATIONS {
                life.operation(file).await;
            }
            busy.set(busy.get() - 1);
        });
        let operations = futures_util::future::join_all(operations);
        futures_util::future::join(operations, life.commit_beside(env, &busy)).await;
        kv.one_in.set(0);
        // The first may still meet the result of a flush that failed.
        target.commit_all().await.unwrap();
        target.commit_all().await.unwrap();
        for file in &mut files {
            file.check(&target, 0..all, false, "at rest").await;
        }
        env.sleep(Duration::from_secs(1)).await;
        let quiet = gate.quiesce().await;
        let check = target.fsck(&quiet).check().await.unwrap();
        let usage = target.usage();
        assert!(check.findings.is_clean(), "seed {seed} life {nth}: {:?}", check.findings);
        assert_eq!(
            usage.free_blocks,
            usage.total_blocks - check.blocks,
            "seed {seed} life {nth}: lost blocks"
        );
        for file in &files {
            let owned = check.owners.get(&file.key.ino).copied().unwrap_or_default();
            if let Some(row) = owned.file {
                assert_eq!((row.owner, row.truncations), (file.owner, file.generation), "seed {seed}");
            }
            assert_eq!(
                target.held_blocks(&[file.key]).await.unwrap(),
                [owned.held],
                "seed {seed} life {nth}"
            );
        }
        drop(quiet);
        target.stop();
        env.sleep(Duration::from_secs(30)).await;
    }
}

#[test]
fn a_target_over_an_unreliable_store_keeps_every_block() {
    let outcomes = RefCell::default();
    for seed in penstock_sim::seeds(1..4) {
        let site = Site::new();
        let world = World::new(seed);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let arrays = machine.node.arrays();
            let data = arrays.iter().find(|array| array.name() == "data").unwrap().clone();
            live(&world, &machine.env, &data, seed, &outcomes).await;
        });
        run.unwrap();
        world.destroy();
    }
    let outcomes = outcomes.into_inner();
    let failed = |what: &str| outcomes.iter().any(|(key, _)| key.starts_with(what) && !key.ends_with("ok"));
    assert!(failed("write") && failed("commit") && failed("truncate"), "{outcomes:?}");
}
