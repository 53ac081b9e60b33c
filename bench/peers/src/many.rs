//! The workload `files`: very many files in one tree, then a tenth as many in one directory.
//!
//! It shows effects that take longer than seconds: a creation rate that falls as the tree grows, the memory
//! of the process, and the time of a start after a crash. Files are empty: only names and inodes count.

use crate::peer::Store;
use crate::proc::memory_kib;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The number of files in a directory of the tree.
const PER_DIRECTORY: usize = 1000;
const PARTS: usize = 10;

/// The results of the workload.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    tree: Growth,
    one_directory: Growth,
    /// Resident memory of the killed process before the kill, and of the process started after it.
    resident_kib: u64,
    resident_after_start_kib: u64,
    /// Time from the start of the program after kill -9 until the mount answers.
    start_seconds: f64,
}

#[derive(Debug, Serialize)]
struct Growth {
    files: usize,
    /// Files created per second in each tenth.
    rates: Vec<f64>,
    resident_kib: u64,
}

/// Returns the MiB that each drive needs for so many files, at least 1024. Metadata takes an eighth of three
/// drives, and rows at most half of it.
pub(crate) fn drive_mib(count: usize) -> u64 {
    (count as u64 * 11 / 10 * 8 / 1024).max(1024)
}

/// Runs the workload on a new store in `home`.
pub(crate) fn run(program: &Path, home: &Path, count: usize) -> Result<Outcome> {
    ensure!(count >= PARTS * PARTS, "--count is at least {}", PARTS * PARTS);
    let mut store = Store::start(program, home, "many", drive_mib(count))?;
    let tree = store.mount.join("tree");
    let name = |index: usize| tree.join((index / PER_DIRECTORY).to_string()).join(index.to_string());
    std::fs::create_dir(&tree)?;
    let in_tree = grow(&store, count, "tree", |index| {
        if index % PER_DIRECTORY == 0 {
            std::fs::create_dir(name(index).parent().context("it is in a directory")?)?;
        }
        Ok(name(index))
    })?;
    let flat = store.mount.join("flat");
    std::fs::create_dir(&flat)?;
    let in_flat = grow(&store, count / PARTS, "one directory", |index| Ok(flat.join(index.to_string())))?;
    let resident_kib = memory_kib(store.process, "VmRSS")?;
    let start_seconds = store.crash_and_start()?;
    let resident_after_start_kib = memory_kib(store.process, "VmRSS")?;
    // Everything was synced before the kill.
    for index in (0..count).step_by((count / 1000).max(1)) {
        let path = name(index);
        std::fs::metadata(&path).with_context(|| format!("{} is gone after the kill", path.display()))?;
    }
    let listed = std::fs::read_dir(&flat)?.count();
    ensure!(listed == count / PARTS, "{listed} files are listed after the kill, of {}", count / PARTS);
    Ok(Outcome {
        tree: in_tree,
        one_directory: in_flat,
        resident_kib,
        resident_after_start_kib,
        start_seconds,
    })
}

fn grow(
    store: &Store,
    count: usize,
    what: &str,
    mut path: impl FnMut(usize) -> Result<PathBuf>,
) -> Result<Growth> {
    let mut rates = Vec::new();
    for part in 0..PARTS {
        let range = part * count / PARTS..(part + 1) * count / PARTS;
        let (start, files) = (Instant::now(), range.len());
        for index in range {
            std::fs::File::create_new(path(index)?)?;
        }
        std::fs::File::open(&store.mount)?.sync_all()?;
        rates.push(files as f64 / start.elapsed().as_secs_f64());
        eprintln!("{what}: {} of {PARTS} parts, {:.0} files/s", part + 1, rates[part]);
    }
    Ok(Growth { files: count, rates, resident_kib: memory_kib(store.process, "VmRSS")? })
}

impl std::fmt::Display for Growth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (first, last) = (self.rates[0], self.rates[self.rates.len() - 1]);
        write!(
            f,
            "{} files: {first:.0} /s in the first tenth, {last:.0} /s in the last ({:.0} %), {} MiB resident",
            self.files,
            last / first * 100.0,
            self.resident_kib >> 10
        )
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "tree          {}", self.tree)?;
        writeln!(f, "one directory {}", self.one_directory)?;
        let resident = [self.resident_kib, self.resident_after_start_kib].map(|kib| kib >> 10);
        writeln!(
            f,
            "memory        {} MiB before kill -9, {} MiB after the next start",
            resident[0], resident[1]
        )?;
        writeln!(f, "start         {:.2} s after kill -9, until the mount answers", self.start_seconds)
    }
}
