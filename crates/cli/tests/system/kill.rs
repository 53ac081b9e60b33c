//! Kills the service with kill -9 at random moments under a mixed load with fsync (`cargo xtask show 01.2`).

use crate::campaign;
use crate::store::{Random, Store, can_mount};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Expected state of one writer's files: contents as last synced, and all contents since.
#[derive(Default)]
struct Writer {
    synced: BTreeMap<String, Vec<u8>>,
    /// All states of a file since its last sync. Each byte may have its value from any of them.
    touched: BTreeMap<String, Vec<Vec<u8>>>,
    acknowledged: u64,
}

impl Writer {
    /// Writes until the mount is gone.
    fn run(mut self, folder: PathBuf, seed: u64) -> Self {
        let mut random = Random(seed | 1);
        while self.step(&folder, &mut random).is_ok() {}
        self
    }

    fn step(&mut self, folder: &Path, random: &mut Random) -> std::io::Result<()> {
        let name = format!("w{}", random.below(12));
        let path = folder.join(&name);
        let now = self.touched.get(&name).and_then(|states| states.last()).or(self.synced.get(&name));
        let now = now.cloned().unwrap_or_default();
        match random.below(10) {
            0 => {
                // Replaces the file by rename: afterwards either the old or the new one is there, complete.
                let mut bytes = vec![0; 1 + random.below(100_000) as usize];
                random.fill(&mut bytes);
                let beside = folder.join(format!("{name}.new"));
                std::fs::write(&beside, &bytes)?;
                let file = std::fs::File::open(&beside)?;
                file.sync_all()?;
                self.touched.entry(name.clone()).or_default().push(bytes.clone());
                std::fs::rename(&beside, &path)?;
                std::fs::File::open(folder)?.sync_all()?;
                self.synced.insert(name.clone(), bytes);
                self.touched.remove(&name);
            }
            1..=6 => {
                let offset = random.below(now.len() as u64 + 1) as usize;
                let mut bytes = vec![0; [50, 4096, 9000, 200_000][random.below(4) as usize]];
                random.fill(&mut bytes);
                let mut next = now;
                next.resize(next.len().max(offset + bytes.len()), 0);
                next[offset..offset + bytes.len()].copy_from_slice(&bytes);
                self.touched.entry(name.clone()).or_default().push(next);
                let mut file =
                    std::fs::File::options().create(true).truncate(false).write(true).open(&path)?;
                file.seek(SeekFrom::Start(offset as u64))?;
                file.write_all(&bytes)?;
            }
            _ => {
                let Some(bytes) = self.touched.get(&name).and_then(|states| states.last()).cloned() else {
                    return Ok(());
                };
                std::fs::File::open(&path)?.sync_all()?;
                self.acknowledged += 1;
                self.synced.insert(name.clone(), bytes);
                self.touched.remove(&name);
            }
        }
        Ok(())
    }

    /// Asserts that everything acknowledged is there. Returns the state that was found, for the next round.
    fn check(&self, folder: &Path) -> Self {
        let mut found = Self { acknowledged: self.acknowledged, ..Self::default() };
        for (name, synced) in &self.synced {
            let bytes = std::fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
            match self.touched.get(name) {
                None => assert!(
                    bytes == *synced,
                    "{name} is as it was synced ({} and {} bytes)",
                    bytes.len(),
                    synced.len()
                ),
                Some(states) => {
                    let shortest = states.iter().chain([synced]).map(Vec::len).min().unwrap();
                    assert!(bytes.len() >= shortest, "{name}: {} of {shortest} bytes", bytes.len());
                    for (at, byte) in bytes.iter().enumerate() {
                        let old = synced.get(at);
                        let was_there =
                            Some(byte) == old || states.iter().any(|state| state.get(at) == Some(byte));
                        // A byte that was never synced may be zero.
                        assert!(
                            was_there || (old.is_none() && *byte == 0),
                            "{name}: byte {at} was never there"
                        );
                    }
                }
            }
            found.synced.insert(name.clone(), bytes);
        }
        for name in self.touched.keys().filter(|name| !self.synced.contains_key(*name)) {
            if let Ok(bytes) = std::fs::read(folder.join(name)) {
                found.synced.insert(name.clone(), bytes);
            }
        }
        found
    }
}

/// Kills the service `count` times on one store. Returns the number of acknowledged fsyncs.
fn kills(count: u64, seed: u64) -> u64 {
    let store = Store::new("kill", &["--drive-size", "512M"]);
    store.up();
    let free_bytes = store.free_bytes();
    let mut writers: Vec<Writer> = (0..3).map(|_| Writer::default()).collect();
    let mut random = Random(99 + seed);
    for round in 0..count {
        let threads: Vec<_> = std::mem::take(&mut writers)
            .into_iter()
            .enumerate()
            .map(|(number, writer)| {
                let folder = store.mount.join(format!("d{number}"));
                if round == 0 {
                    std::fs::create_dir(&folder).unwrap();
                    std::fs::File::open(&store.mount).unwrap().sync_all().unwrap();
                }
                let seed = seed * 100_000 + round * 10 + number as u64 + 7;
                std::thread::spawn(move || writer.run(folder, seed))
            })
            .collect();
        std::thread::sleep(Duration::from_millis(200 + random.below(3000)));
        store.kill();
        let states: Vec<Writer> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        // The mount of the killed process is stale; `up` removes it.
        store.up();
        writers = states
            .iter()
            .enumerate()
            .map(|(number, state)| state.check(&store.mount.join(format!("d{number}"))))
            .collect();
        store.audit();
        let acknowledged: u64 = writers.iter().map(|writer| writer.acknowledged).sum();
        println!(
            "kill {}: {acknowledged} fsyncs acknowledged so far, all there; check and scrub clean",
            round + 1
        );
        assert!(acknowledged > 0, "the load syncs");
    }
    store.check_empty(free_bytes);
    store.down();
    writers.iter().map(|writer| writer.acknowledged).sum()
}

#[test]
fn kill_9_loses_nothing_that_was_synced() {
    if can_mount("kill_9_loses_nothing_that_was_synced") {
        kills(3, 0);
    }
}

#[test]
#[ignore = "full form: cargo xtask show 01.2"]
fn show_kill() {
    if can_mount("show_kill") {
        kills(20, 0);
    }
}

#[test]
#[ignore = "full form: cargo xtask campaign kills"]
fn campaign_of_kills() {
    if can_mount("campaign_of_kills") {
        let count = campaign::number("PENSTOCK_KILLS", 10);
        campaign::run(0..1, |seed| json!({ "kills": count, "fsyncs": kills(count, seed) }));
    }
}
