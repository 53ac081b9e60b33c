//! Long-term test of a store that is 90 % full, and at times entirely full.
//!
//! Creates, overwrites, appends to and removes files. Prints throughput, memory and space over time. Asserts
//! only results that do not depend on the machine.

use crate::campaign;
use crate::store::{Random, Store, can_mount};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;
/// Rows of the printed table between two fillings of the store.
const ROWS_BETWEEN: u32 = 6;
/// In shorter runs caches are still filling, so memory growth is not asserted.
const WARM: Duration = Duration::from_secs(600);

/// Expected contents of a file: one number for each block, which is repeated through the block.
type Contents = Vec<u64>;

struct Churn {
    store: Store,
    random: Random,
    files: BTreeMap<u64, Contents>,
    /// Number of files created so far, and the next number to write into a block.
    made: u64,
    stamp: u64,
    blocks: u64,
    /// Number of blocks that files may fill.
    target: u64,
    steps: u64,
    written: u64,
    checked: u64,
}

fn block_of(stamp: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat(BLOCK as usize / 8)
}

impl Churn {
    fn path(&self, number: u64) -> PathBuf {
        self.store.mount.join(format!("c{}/f{number}", number % 8))
    }

    /// Writes `count` blocks of a file, each with its own number, from block `first`.
    fn write(&mut self, number: u64, first: u64, count: u64) -> std::io::Result<()> {
        let file = File::options().create(true).truncate(false).write(true).open(self.path(number))?;
        let stamps: Vec<u64> = (0..count).map(|at| self.stamp + at).collect();
        self.stamp += count;
        let bytes: Vec<u8> = stamps.iter().flat_map(|stamp| block_of(*stamp)).collect();
        file.write_all_at(&bytes, first * BLOCK)?;
        let contents = self.files.entry(number).or_default();
        let before = contents.len();
        contents.resize(before.max((first + count) as usize), 0);
        self.blocks += (contents.len() - before) as u64;
        contents[first as usize..(first + count) as usize].copy_from_slice(&stamps);
        self.written += count * BLOCK;
        if self.random.below(20) == 0 {
            file.sync_all()?;
        }
        Ok(())
    }

    fn some_file(&mut self) -> u64 {
        let skip = self.random.below(self.files.len() as u64) as usize;
        *self.files.keys().nth(skip).unwrap()
    }

    fn some_length(&mut self) -> u64 {
        let most = [1, 4, 32, 256, 2048][self.random.below(5) as usize];
        1 + self.random.below(most)
    }

    fn check(&mut self, number: u64) {
        let bytes = std::fs::read(self.path(number)).unwrap();
        let contents = &self.files[&number];
        let right =
            bytes.chunks(BLOCK as usize).zip(contents).all(|(block, stamp)| block == block_of(*stamp));
        assert!(bytes.len() as u64 == contents.len() as u64 * BLOCK && right, "file {number} is as written");
        self.checked += bytes.len() as u64;
    }

    fn remove(&mut self, number: u64) {
        std::fs::remove_file(self.path(number)).unwrap();
        self.blocks -= self.files.remove(&number).unwrap().len() as u64;
    }

    /// Removes random files until `blocks` more blocks fit.
    fn make_room(&mut self, blocks: u64) {
        while self.blocks + blocks > self.target {
            let number = self.some_file();
            self.remove(number);
        }
    }

    /// Runs one random operation. It always has enough space.
    fn step(&mut self) {
        let length = self.some_length();
        self.steps += 1;
        let done = match self.random.below(10) {
            _ if self.files.len() < 10 => self.make(length),
            0..=4 => {
                self.make_room(length);
                self.make(length)
            }
            5 => {
                self.make_room(length);
                let number = self.some_file();
                let end = self.files[&number].len() as u64;
                self.write(number, end, length)
            }
            6 => {
                let number = self.some_file();
                self.check(number);
                Ok(())
            }
            _ => {
                let number = self.some_file();
                let blocks = self.files[&number].len() as u64;
                let first = self.random.below(blocks);
                self.write(number, first, length.min(blocks - first))
            }
        };
        let used = self.blocks * 100 / self.target;
        done.unwrap_or_else(|error| panic!("at {used} % of what it may use: {error}"));
    }

    fn make(&mut self, length: u64) -> std::io::Result<()> {
        self.made += 1;
        self.write(self.made, 0, length)
    }

    fn space(&self) -> Value {
        self.store.json(&["fs", "list"])[0].clone()
    }

    fn available(&self) -> u64 {
        self.space()["available_bytes"].as_u64().unwrap()
    }

    /// Fills the store until ENOSPC and frees the space again. Returns the bytes that were available at
    /// ENOSPC.
    fn fill(&mut self) -> u64 {
        let path = self.store.mount.join("ballast");
        let file = File::create(&path).unwrap();
        let bytes = block_of(1).repeat((MIB / BLOCK) as usize);
        let mut end = 0;
        let error = loop {
            if let Err(error) = file.write_all_at(&bytes, end).and_then(|()| file.sync_data()) {
                break error;
            }
            end += MIB;
        };
        assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
        let left = self.available();
        assert!(left < 8 * MIB, "full although {left} bytes are available");
        let number = self.some_file();
        self.check(number);
        drop(file);
        std::fs::remove_file(&path).unwrap();
        // Freed space is usable when its removal is durable; a write waits for that.
        let file = File::create(&path).unwrap();
        for at in (0..end / 2).step_by(MIB as usize) {
            file.write_all_at(&bytes, at).unwrap_or_else(|error| panic!("space is back: {error}"));
        }
        file.sync_all().unwrap();
        std::fs::remove_file(&path).unwrap();
        left
    }

    fn resident_bytes(&self) -> u64 {
        let pid = self.store.pid().expect("it runs");
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

fn churn(length: Duration, rows: u32, seed: u64) -> Value {
    let store = Store::new("churn", &["--drive-size", "256M"]);
    store.up();
    let free_bytes = store.free_bytes();
    (0..8).for_each(|dir| std::fs::create_dir(store.mount.join(format!("c{dir}"))).unwrap());
    let (random, files) = (Random(seed + 1), BTreeMap::new());
    let (made, stamp, blocks, steps, written, checked) = (0, 2, 0, 0, 0, 0);
    let mut churn = Churn { store, random, files, made, stamp, blocks, target: 0, steps, written, checked };
    churn.target = churn.available() / BLOCK * 9 / 10;
    println!("  second      MB/s   op/s  files  used %  RSS MiB  metadata MiB  left at ENOSPC");
    let fill_blocks = churn.target * 98 / 100;
    while churn.blocks < fill_blocks {
        churn.step();
    }
    let begun = Instant::now();
    let (mut resident, mut rates, mut fulls) = (Vec::new(), Vec::new(), 0);
    for row in 1..=rows {
        let (before, steps, since) = (churn.written, churn.steps, Instant::now());
        while since.elapsed() < length / rows {
            churn.step();
        }
        let seconds = since.elapsed().as_secs_f64();
        let rate = (churn.written - before) as f64 / seconds / 1e6;
        let steps = (churn.steps - steps) as f64 / seconds;
        let space = churn.space();
        let full = row.is_multiple_of(ROWS_BETWEEN).then(|| churn.fill());
        fulls += u64::from(full.is_some());
        let rss = churn.resident_bytes();
        let bytes = |key: &str| space[key].as_u64().unwrap();
        println!(
            "{:8} {rate:9.1} {steps:6.0} {:6} {:7.1} {:8} {:13} {:>15}",
            begun.elapsed().as_secs(),
            churn.files.len(),
            100.0 - bytes("available_bytes") as f64 * 100.0 / bytes("total_bytes") as f64,
            rss / MIB,
            bytes("meta_used_bytes") / MIB,
            full.map_or(String::new(), |left| format!("{} KiB", left / 1024)),
        );
        resident.push(rss);
        rates.push(rate);
    }
    let half = resident.len() / 2;
    let most = |part: &[u64]| part.iter().copied().max().unwrap();
    let (first, second) = (most(&resident[..half]), most(&resident[half..]));
    assert!(length < WARM || second < first + first / 4, "memory grows: {} to {} bytes", first, second);
    let numbers: Vec<u64> = churn.files.keys().copied().collect();
    numbers.into_iter().for_each(|number| churn.check(number));
    churn.store.audit();
    churn.store.down();
    churn.store.up();
    let numbers: Vec<u64> = churn.files.keys().copied().collect();
    numbers.into_iter().for_each(|number| churn.check(number));
    churn.store.check_empty(free_bytes);
    churn.store.down();
    let mean = |part: &[f64]| (part.iter().sum::<f64>() / part.len() as f64 * 10.0).round() / 10.0;
    json!({
        "written_bytes": churn.written,
        "checked_bytes": churn.checked,
        "files_made": churn.made,
        "full_stores": fulls,
        "mb_per_s_of_quarters": rates.chunks(rates.len() / 4).map(mean).collect::<Vec<_>>(),
        "resident_bytes_of_halves": [first, second],
    })
}

#[test]
fn a_store_that_is_nearly_full_is_written_on_and_on() {
    if can_mount("a_store_that_is_nearly_full_is_written_on_and_on") {
        churn(Duration::from_secs(4), 8, 1);
    }
}

#[test]
#[ignore = "full form: cargo xtask campaign churn"]
fn campaign_of_churn() {
    if can_mount("campaign_of_churn") {
        let seconds = campaign::number("PENSTOCK_CHURN_S", 60);
        campaign::run(0..1, |seed| churn(Duration::from_secs(seconds), 60, seed));
    }
}
