//! The workload `files`: very many files in one tree, then a tenth as many in one directory, and the removal
//! of a hundredth as many files of 1 MiB.
//!
//! It shows effects that take longer than seconds: a creation rate that falls as the tree grows, the memory
//! of the process, the time of a start after a crash, and the time until space is back. The files of the tree
//! are empty: only names and inodes count.

use crate::peer::Store;
use crate::proc::memory_kib;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The number of files in a directory of the tree.
const PER_DIRECTORY: usize = 1000;
const PARTS: usize = 10;
/// One file of 1 MiB for so many others.
const PER_LARGE: usize = 100;

/// A file that is removed again has so many bytes.
const LARGE_BYTES: usize = 1 << 20;
/// Longest time until the space of removed files is back.
const SPACE_BACK: Duration = Duration::from_secs(120);

/// The results of the workload.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    /// Targets of the store.
    targets: usize,
    tree: Growth,
    one_directory: Growth,
    removal: Removal,
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

/// The removal of files of 1 MiB.
#[derive(Debug, Serialize)]
struct Removal {
    files: usize,
    /// Files written and removed per second.
    written_per_second: f64,
    removed_per_second: f64,
    /// Bytes that the files took of the free ones.
    taken_bytes: u64,
    /// Time from the end of the removal until all of these were free again, but for a hundredth; none if they
    /// were not within two minutes.
    back_seconds: Option<f64>,
    /// Bytes that were not free again in the end.
    left_bytes: u64,
    resident_kib: u64,
}

/// Returns the MiB that each drive needs for so many files, at least 1024. Metadata takes an eighth of three
/// drives, at least half of it is for the names, and rows take a quarter of that.
pub(crate) fn drive_mib(count: usize) -> u64 {
    let of_names = count as u64 * 11 / 10 * 8 * 3 / 1024;
    // Four drives of six have data.
    let of_files = ((count / PER_LARGE * LARGE_BYTES) as u64 / 4 * 5 / 4) >> 20;
    (of_names + of_files).max(1024)
}

/// Runs the workload on a new store in `home`.
pub(crate) fn run(program: &Path, home: &Path, count: usize, targets: Option<u16>) -> Result<Outcome> {
    ensure!(count >= PARTS * PARTS, "--count is at least {}", PARTS * PARTS);
    let mut store = Store::start(program, home, "many", drive_mib(count), targets)?;
    let stacks = store.command(&["stack", "list"])?;
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
    let removal = remove(&store, count / PER_LARGE)?;
    Ok(Outcome {
        targets: stacks.as_array().context("a list of stacks")?.len(),
        tree: in_tree,
        one_directory: in_flat,
        removal,
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

/// Writes files of 1 MiB, removes them, and waits for their space.
fn remove(store: &Store, files: usize) -> Result<Removal> {
    let free = || {
        let fs = store.command(&["fs", "show"])?;
        fs["free_bytes"].as_u64().context("the free bytes of the file system")
    };
    let folder = store.mount.join("large");
    std::fs::create_dir(&folder)?;
    let (before, data) = (free()?, vec![7; LARGE_BYTES]);
    let path = |index: usize| folder.join(index.to_string());
    let sync = || std::fs::File::open(&store.mount)?.sync_all();
    let start = Instant::now();
    for index in 0..files {
        std::fs::write(path(index), &data)?;
    }
    sync()?;
    let written_per_second = files as f64 / start.elapsed().as_secs_f64();
    eprintln!("large files: written, {written_per_second:.0} files/s");
    let taken_bytes = before.saturating_sub(free()?);
    let start = Instant::now();
    for index in 0..files {
        std::fs::remove_file(path(index))?;
    }
    sync()?;
    let removed_per_second = files as f64 / start.elapsed().as_secs_f64();
    eprintln!("large files: removed, {removed_per_second:.0} files/s");
    let end = Instant::now();
    let left = || Ok::<_, anyhow::Error>(before.saturating_sub(free()?));
    let mut back_seconds = None;
    while back_seconds.is_none() && end.elapsed() < SPACE_BACK {
        match left()? <= taken_bytes / 100 {
            true => back_seconds = Some(end.elapsed().as_secs_f64()),
            false => std::thread::sleep(Duration::from_millis(100)),
        }
    }
    let (left_bytes, resident_kib) = (left()?, memory_kib(store.process, "VmRSS")?);
    Ok(Removal {
        files,
        written_per_second,
        removed_per_second,
        taken_bytes,
        back_seconds,
        left_bytes,
        resident_kib,
    })
}

impl std::fmt::Display for Removal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let back =
            self.back_seconds.map_or("not within 2 minutes".into(), |after| format!("{after:.1} s later"));
        write!(
            f,
            "{} files of 1 MiB: written at {:.0} /s, removed at {:.0} /s; {} MiB are free again {back}, {} are not; {} MiB resident",
            self.files,
            self.written_per_second,
            self.removed_per_second,
            self.taken_bytes >> 20,
            self.left_bytes >> 20,
            self.resident_kib >> 10
        )
    }
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
        writeln!(f, "targets       {}", self.targets)?;
        writeln!(f, "tree          {}", self.tree)?;
        writeln!(f, "one directory {}", self.one_directory)?;
        writeln!(f, "removal       {}", self.removal)?;
        let resident = [self.resident_kib, self.resident_after_start_kib].map(|kib| kib >> 10);
        writeln!(
            f,
            "memory        {} MiB before kill -9, {} MiB after the next start",
            resident[0], resident[1]
        )?;
        writeln!(f, "start         {:.2} s after kill -9, until the mount answers", self.start_seconds)
    }
}
