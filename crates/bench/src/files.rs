//! Workloads on the files of a folder, the same for every file system that is compared.
//!
//! Owns the workloads and their measurement. The caller chooses the folder and is responsible for caches and
//! rounds. Every 4 KiB block that is written begins with its number, and reads check it, so a file system
//! that answers fast but wrong fails. A workload ends when its count is reached or its time is over,
//! whichever comes first; the rate counts the completed work. All files lie in the folder itself, because the
//! file system that does nothing has only one directory.

mod timed;

pub use timed::{Phase, Timed};

use penstock_base::{BLOCK_BYTES, BufMut};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Length in bytes of each file that is written and synced block by block.
const SYNCED_BYTES: usize = 4 * MIB;

/// A workload. Rates are bytes per second if it moves whole MiB, else operations per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Writes a new file in steps of 1 MiB past the page cache, and syncs it at the end.
    WriteDirect,
    /// Reads the file in steps of 1 MiB past the page cache.
    ReadDirect,
    /// Reads the file from start to end through the page cache.
    ReadBuffered,
    /// Reads 4 KiB blocks at places spread over the file, past the page cache, with this many threads.
    RandomRead(usize),
    /// Overwrites 4 KiB blocks in the same way, and syncs at the end.
    RandomWrite(usize),
    /// Creates files, each filled with this many bytes and closed.
    Create(usize),
    /// Reads the attributes of all created files by name, this many times.
    Stat(usize),
    /// Removes the created files.
    Unlink,
    /// Overwrites and syncs 4 KiB at a time in a file of 4 MiB, with this many threads, each in a file of its
    /// own.
    WriteSync(usize),
}

/// The amount of work.
#[derive(Clone, Copy, Debug)]
pub struct Amount {
    /// Length of the file that is read and written, in MiB.
    pub file_mib: usize,
    /// The number of random reads or writes, the sum over all threads.
    pub ops: usize,
    /// The number of files created.
    pub files: usize,
    /// The number of synced writes, the sum over all threads.
    pub syncs: usize,
    /// A workload ends early when it has taken this long.
    pub limit: Duration,
}

/// The result of a workload.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// Bytes or operations, as [`Work`] defines.
    pub units: f64,
    /// The duration in seconds.
    pub seconds: f64,
}

impl Done {
    /// Units per second.
    pub fn rate(&self) -> f64 {
        self.units / self.seconds
    }
}

/// A folder to work in.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    amount: Amount,
    verify: bool,
    /// The number of files that [`Work::Create`] made and [`Work::Unlink`] has not removed.
    created: AtomicUsize,
}

/// Decides when a workload must end.
struct Clock {
    start: Instant,
    limit: Duration,
}

impl Clock {
    fn is_over(&self) -> bool {
        self.start.elapsed() > self.limit
    }
}

impl Folder {
    /// Works in the folder at `path`, which must exist. `verify` is false for a file system that does not
    /// keep written data.
    pub fn new(path: &Path, amount: Amount, verify: bool) -> Self {
        Self { path: path.to_owned(), amount, verify, created: AtomicUsize::new(0) }
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the files that `work` needs or removes those in its way, outside the measurement.
    pub fn prepare(&self, work: Work) -> io::Result<()> {
        match work {
            Work::WriteDirect => remove(&self.big()),
            Work::ReadDirect | Work::ReadBuffered | Work::RandomRead(_) | Work::RandomWrite(_) => {
                let wanted = (self.amount.file_mib * MIB) as u64;
                if std::fs::metadata(self.big()).is_ok_and(|found| found.len() >= wanted) {
                    return Ok(());
                }
                remove(&self.big())?;
                self.write_big(Duration::MAX).map(drop)
            }
            Work::Create(_) if self.created() > 0 => self.unlink(Duration::MAX).map(drop),
            Work::Stat(_) | Work::Unlink if self.created() == 0 => {
                self.create(BLOCK_BYTES, Duration::MAX).map(drop)
            }
            Work::Create(_) | Work::Stat(_) | Work::Unlink => Ok(()),
            Work::WriteSync(jobs) => (0..jobs).try_for_each(|job| {
                let path = self.synced(job);
                if path.exists() {
                    return Ok(());
                }
                let file = open(&path, rustix::fs::OFlags::empty())?;
                for at in 0..SYNCED_BYTES / MIB {
                    file.write_all_at(stamped(at * MIB, MIB).as_ref(), (at * MIB) as u64)?;
                }
                file.sync_all()
            }),
        }
    }

    /// Runs `work` and measures it.
    pub fn run(&self, work: Work) -> io::Result<Done> {
        let limit = self.amount.limit;
        let start = Instant::now();
        let units = match work {
            Work::WriteDirect => self.write_big(limit)?,
            Work::ReadDirect => self.read_big(rustix::fs::OFlags::DIRECT)?,
            Work::ReadBuffered => self.read_big(rustix::fs::OFlags::empty())?,
            Work::RandomRead(jobs) => self.spread(jobs, false)?,
            Work::RandomWrite(jobs) => self.spread(jobs, true)?,
            Work::Create(bytes) => self.create(bytes, limit)?,
            Work::Stat(passes) => self.stat(passes)?,
            Work::Unlink => self.unlink(limit)?,
            Work::WriteSync(jobs) => self.write_sync(jobs)?,
        };
        Ok(Done { units: units as f64, seconds: start.elapsed().as_secs_f64() })
    }

    fn created(&self) -> usize {
        self.created.load(Ordering::Relaxed)
    }

    fn big(&self) -> PathBuf {
        self.path.join("big")
    }

    fn synced(&self, job: usize) -> PathBuf {
        self.path.join(format!("synced{job}"))
    }

    fn name(&self, index: usize) -> PathBuf {
        self.path.join(format!("f{index}"))
    }

    fn clock(&self, limit: Duration) -> Clock {
        Clock { start: Instant::now(), limit }
    }

    fn write_big(&self, limit: Duration) -> io::Result<usize> {
        let clock = self.clock(limit);
        let file = open(&self.big(), rustix::fs::OFlags::DIRECT)?;
        let mut buffer = BufMut::zeroed(MIB);
        let mut at = 0;
        while at < self.amount.file_mib * MIB && !clock.is_over() {
            stamp(buffer.as_mut(), at);
            file.write_all_at(buffer.as_ref(), at as u64)?;
            at += MIB;
        }
        file.sync_all()?;
        Ok(at)
    }

    fn read_big(&self, flags: rustix::fs::OFlags) -> io::Result<usize> {
        let clock = self.clock(self.amount.limit);
        let file = open(&self.big(), flags)?;
        let mut buffer = BufMut::zeroed(MIB);
        let mut at = 0;
        while at < self.amount.file_mib * MIB && !clock.is_over() {
            file.read_exact_at(buffer.as_mut(), at as u64)?;
            self.check(buffer.as_ref(), at)?;
            at += MIB;
        }
        Ok(at)
    }

    /// Random reads or writes. All threads together use the same places for every number of threads.
    fn spread(&self, jobs: usize, write: bool) -> io::Result<usize> {
        let clock = self.clock(self.amount.limit);
        let blocks = self.amount.file_mib * (MIB / BLOCK_BYTES);
        let job = |job: usize| -> io::Result<usize> {
            let file = open(&self.big(), rustix::fs::OFlags::DIRECT)?;
            let mut buffer = BufMut::zeroed(BLOCK_BYTES);
            let mut done = 0;
            for index in (job..self.amount.ops).step_by(jobs) {
                let at = place(index, blocks) * BLOCK_BYTES;
                if write {
                    stamp(buffer.as_mut(), at);
                    file.write_all_at(buffer.as_ref(), at as u64)?;
                } else {
                    file.read_exact_at(buffer.as_mut(), at as u64)?;
                    self.check(buffer.as_ref(), at)?;
                }
                done += 1;
                if clock.is_over() {
                    break;
                }
            }
            if write {
                file.sync_all()?;
            }
            Ok(done)
        };
        together(jobs, job)
    }

    fn create(&self, bytes: usize, limit: Duration) -> io::Result<usize> {
        let clock = self.clock(limit);
        let contents = vec![0x5a; bytes];
        let mut index = 0;
        while index < self.amount.files && !clock.is_over() {
            let file = OpenOptions::new().write(true).create_new(true).open(self.name(index))?;
            file.write_all_at(&contents, 0)?;
            drop(file);
            index += 1;
            self.created.store(index, Ordering::Relaxed);
        }
        Ok(index)
    }

    fn stat(&self, passes: usize) -> io::Result<usize> {
        let clock = self.clock(self.amount.limit);
        let names: Vec<PathBuf> = (0..self.created()).map(|index| self.name(index)).collect();
        let mut done = 0;
        for name in std::iter::repeat_n(&names, passes).flatten() {
            if !std::fs::metadata(name)?.is_file() {
                return Err(io::Error::other(format!("{} is no file", name.display())));
            }
            done += 1;
            if clock.is_over() {
                break;
            }
        }
        Ok(done)
    }

    /// Removes the files from the last one back, so that the remaining ones are still numbered from zero.
    fn unlink(&self, limit: Duration) -> io::Result<usize> {
        let clock = self.clock(limit);
        let before = self.created();
        while self.created() > 0 && !clock.is_over() {
            let last = self.created() - 1;
            std::fs::remove_file(self.name(last))?;
            self.created.store(last, Ordering::Relaxed);
        }
        Ok(before - self.created())
    }

    fn write_sync(&self, jobs: usize) -> io::Result<usize> {
        let clock = self.clock(self.amount.limit);
        let job = |job: usize| -> io::Result<usize> {
            let file = open(&self.synced(job), rustix::fs::OFlags::empty())?;
            let mut buffer = BufMut::zeroed(BLOCK_BYTES);
            let mut done = 0;
            for index in (job..self.amount.syncs).step_by(jobs) {
                let at = place(index, SYNCED_BYTES / BLOCK_BYTES) * BLOCK_BYTES;
                stamp(buffer.as_mut(), at);
                file.write_all_at(buffer.as_ref(), at as u64)?;
                file.sync_all()?;
                done += 1;
                if clock.is_over() {
                    break;
                }
            }
            Ok(done)
        };
        together(jobs, job)
    }

    fn check(&self, bytes: &[u8], at: usize) -> io::Result<()> {
        let wrong = |(number, block): &(usize, &[u8])| block[..8] != mark(at, *number);
        match bytes.chunks_exact(BLOCK_BYTES).enumerate().find(wrong) {
            Some((number, _)) if self.verify => {
                let at = at + number * BLOCK_BYTES;
                Err(io::Error::other(format!("{}: the block at {at} is wrong", self.big().display())))
            }
            _ => Ok(()),
        }
    }
}

/// Spreads indices over `blocks` in scattered order. Indices below `blocks` hardly ever collide.
fn place(index: usize, blocks: usize) -> usize {
    index.wrapping_mul(0x9e37_79b9) % blocks
}

/// The first bytes of a block: its number, counted from one so that a block of zeros is wrong.
fn mark(at: usize, number: usize) -> [u8; 8] {
    ((at / BLOCK_BYTES + number + 1) as u64).to_le_bytes()
}

fn stamp(bytes: &mut [u8], at: usize) {
    for (number, block) in bytes.chunks_exact_mut(BLOCK_BYTES).enumerate() {
        block[..8].copy_from_slice(&mark(at, number));
    }
}

fn stamped(at: usize, len: usize) -> BufMut {
    let mut buffer = BufMut::zeroed(len);
    stamp(buffer.as_mut(), at);
    buffer
}

fn open(path: &Path, flags: rustix::fs::OFlags) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).custom_flags(flags.bits() as i32);
    options.open(path)
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Runs `job` on `jobs` threads at the same time, and returns the sum of their results.
fn together(jobs: usize, job: impl Fn(usize) -> io::Result<usize> + Sync) -> io::Result<usize> {
    if jobs == 1 {
        return job(0);
    }
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs)
            .map(|number| {
                scope.spawn({
                    let job = &job;
                    move || job(number)
                })
            })
            .collect();
        let mut sum = 0;
        for thread in threads {
            sum += thread.join().map_err(|_| io::Error::other("a thread of the work panicked"))??;
        }
        Ok(sum)
    })
}
