//! Benchmarks of an array on model drives: its efficiency against what theory leaves of the drives, and its
//! rebuild against the formula.

use crate::Line;
use crate::bed::{SLICE_AT, new_array, online, stripe_data};
use crate::model::{ModelDrive, Sheet};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use penstock_array::{Array, ArrayError, ArrayState, CreateSpec, Layout, MemberNo, Volume};
use penstock_base::{BLOCK_BYTES, Buf, Env, crc32c_blocks};
use penstock_drive::{Class, Io, Slice};
use penstock_layout::Shape;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const IO: Io = Io::new(Class::Client, "bench");
const RUNS: usize = 3;
/// Time of a run of reads or small writes.
const RUN: Duration = Duration::from_secs(3);
/// Bytes of whole stripes in flight, and the least number of them: of few, most wait for one slow group.
const IN_FLIGHT: usize = 64 << 20;
const LEAST_IN_FLIGHT: usize = 32;
/// Small reads in flight for each drive.
const READS: usize = 160;
/// Small writes in flight, each followed by a flush.
const WRITES: usize = 512;
/// Reads in flight beside a rebuild.
const BESIDE: usize = 4;
/// Time before something is lost.
const BEFORE: Duration = Duration::from_secs(1);

/// The measured array.
#[derive(Clone, Copy, Debug)]
pub struct ModelBench {
    /// Data strips.
    pub k: usize,
    /// Redundancy strips.
    pub m: usize,
    /// Drives of the array.
    pub drives: usize,
    /// Spare places of a row; none for groups of k+m drives.
    pub spares: Option<usize>,
    /// Data blocks of a strip.
    pub strip_blocks: u32,
    /// The drives, before they are slowed.
    pub sheet: Sheet,
    /// The factor by which time is stretched.
    pub slower: f64,
    /// Bytes of each drive that are filled.
    pub fill_bytes: u64,
}

impl ModelBench {
    fn spec(&self) -> Result<CreateSpec, ArrayError> {
        let strips = self.k + self.m;
        let layout = match self.spares {
            None if !self.drives.is_multiple_of(strips) => {
                let why = format!("{} drives do not divide into groups of {strips}", self.drives);
                return Err(ArrayError::Invalid(why));
            }
            None => Layout::groups(self.drives / strips, strips)?,
            Some(spares) => {
                let (members, domains) = (self.drives, self.drives);
                let shape = Shape { members, strips, redundancy: self.m, spares, domains };
                Layout::spread(shape, 1)?
            }
        };
        let spec = CreateSpec::new("bench", self.k, self.m)?;
        Ok(CreateSpec { layout, strip_blocks: self.strip_blocks, ..spec })
    }

    fn sheet(&self) -> Sheet {
        self.sheet.slower(self.slower)
    }
}

/// The contents of the stripes.
#[derive(Clone, Copy)]
enum Contents {
    /// Different words.
    Words,
    /// Zeros, which take no memory on the drives. They are verified, decoded and coded like anything else.
    Zeros,
}

impl Contents {
    /// A stripe with its checksums.
    fn of_stripe(self, volume: &Volume) -> (Buf, Vec<u32>) {
        match self {
            Self::Words => stripe_data(volume),
            Self::Zeros => {
                let data = Buf::zeroed(volume.stripe_blocks() as usize * BLOCK_BYTES);
                let crcs = crc32c_blocks(&data);
                (data, crcs)
            }
        }
    }
}

struct Bed {
    env: Env,
    bench: ModelBench,
    array: Rc<Array>,
    volume: Volume,
    stripes: u64,
    data: Buf,
    crcs: Vec<u32>,
    random: Cell<u64>,
    drives: RefCell<Vec<Rc<ModelDrive>>>,
    slice_bytes: u64,
}

/// Tasks of a stopped array end later, and so long they have its drives.
impl Drop for Bed {
    fn drop(&mut self) {
        self.array.stop();
        self.drives.borrow().iter().for_each(|drive| drive.give_up());
    }
}

impl Bed {
    /// An array whose stripes are to be filled with this.
    async fn new(
        env: &Env,
        bench: ModelBench,
        spec: &CreateSpec,
        contents: Contents,
    ) -> Result<Self, ArrayError> {
        // The rest holds the log, the table, and rows that are left free.
        let slice_bytes = bench.fill_bytes + spec.log_bytes + (32 << 20);
        let drives = RefCell::default();
        let slices: Vec<Slice> =
            (0..bench.drives).map(|_| new_slice(env, bench.sheet(), &drives, slice_bytes)).collect();
        let array = new_array(env, spec, slices).await?;
        let volume = Volume::whole(&array);
        let (data, crcs) = contents.of_stripe(&volume);
        let geometry = array.geometry();
        let rows = (bench.fill_bytes / geometry.strip_slot_bytes()).min(geometry.rows);
        let stripes = array.layout().stripes(rows);
        assert!(stripes > 0 && stripes <= geometry.stripes, "{stripes} stripes of {}", geometry.stripes);
        let (env, random) = (env.clone(), Cell::new(7));
        Ok(Self { env, bench, array, volume, stripes, data, crcs, random, drives, slice_bytes })
    }

    /// Writes all stripes before something is measured, and takes no time on the drives.
    async fn prepare(&self) -> Result<(), ArrayError> {
        let set = |takes_time| self.drives.borrow().iter().for_each(|drive| drive.set_takes_time(takes_time));
        set(false);
        self.fill().await?;
        self.array.destage_and_checkpoint().await?;
        set(true);
        Ok(())
    }

    fn blank_slice(&self) -> Slice {
        new_slice(&self.env, self.bench.sheet(), &self.drives, self.slice_bytes)
    }

    /// A number below a bound.
    fn below(&self, bound: u64) -> u64 {
        self.random.set(self.random.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99));
        (self.random.get() >> 33) % bound
    }

    /// Whole stripes in flight.
    fn wide(&self) -> usize {
        (IN_FLIGHT / self.data.len()).max(LEAST_IN_FLIGHT)
    }

    /// Writes all stripes in full, and makes them durable. Returns GB/s.
    async fn fill(&self) -> Result<f64, ArrayError> {
        let start = self.env.now();
        let write = |stripe| self.volume.write_fresh(stripe, &self.data, &self.crcs, IO);
        let mut running = FuturesUnordered::new();
        for stripe in 0..self.stripes {
            running.push(write(stripe));
            if running.len() == self.wide() {
                running.next().await.transpose()?;
            }
        }
        while running.next().await.transpose()?.is_some() {}
        self.volume.flush().await?;
        let bytes = self.data.len() as f64 * self.stripes as f64;
        Ok(bytes / 1e9 / (self.env.now() - start).as_secs_f64())
    }

    /// Does `one` over and over, so many at the same time. Returns how often it was done in a second, from
    /// the moment on when the first ones are done. Nothing of it is left to the drives when this returns: it
    /// would take their time from what is measured next.
    async fn rate<F: Future<Output = Result<(), ArrayError>>>(
        &self,
        at_a_time: usize,
        one: impl Fn(u64) -> F,
    ) -> Result<f64, ArrayError> {
        assert!(at_a_time > 0, "somebody works");
        let (mut running, mut begun) = (FuturesUnordered::new(), 0);
        let mut done = 0u64;
        let mut started = None;
        loop {
            while running.len() < at_a_time {
                running.push(one(begun));
                begun += 1;
            }
            running.next().await.transpose()?;
            done += 1;
            let now = self.env.now();
            if done == at_a_time as u64 {
                started = Some(now);
            }
            if let Some(start) = started
                && now - start >= RUN
            {
                while running.next().await.transpose()?.is_some() {}
                return Ok((done - at_a_time as u64) as f64 / (now - start).as_secs_f64());
            }
        }
    }

    /// GB/s of reading whole stripes.
    async fn read_all(&self) -> Result<f64, ArrayError> {
        let per_stripe = self.volume.stripe_blocks();
        let read = |number: u64| async move {
            self.volume.read(number % self.stripes * per_stripe, per_stripe, IO).await.map(drop)
        };
        Ok(self.rate(self.wide(), read).await? * self.data.len() as f64 / 1e9)
    }

    /// Thousands a second of reads of 4 KiB.
    async fn read_small(&self) -> Result<f64, ArrayError> {
        let blocks = self.stripes * self.volume.stripe_blocks();
        let read = |_| async move { self.volume.read(self.below(blocks), 1, IO).await.map(drop) };
        Ok(self.rate(READS * self.bench.drives, read).await? / 1e3)
    }

    /// Thousands a second of durable writes of 4 KiB.
    async fn write_small(&self) -> Result<f64, ArrayError> {
        let blocks = self.stripes * self.volume.stripe_blocks();
        let block = self.data.slice(0..BLOCK_BYTES);
        let write = |_| {
            let block = block.clone();
            async move {
                self.volume.write(self.below(blocks), &block, &self.crcs[..1]).await?;
                self.volume.flush().await
            }
        };
        Ok(self.rate(WRITES, write).await? / 1e3)
    }
}

fn new_slice(env: &Env, sheet: Sheet, drives: &RefCell<Vec<Rc<ModelDrive>>>, slice_bytes: u64) -> Slice {
    let number = drives.borrow().len() as u64;
    let model = Rc::new(ModelDrive::new(env, sheet, (slice_bytes + 2 * SLICE_AT) as usize));
    drives.borrow_mut().push(model.clone());
    let handle = online(env, "model", number, model);
    Slice::new(handle, SLICE_AT, slice_bytes)
}

/// The rates that theory leaves of healthy or lost drives.
struct Theory {
    bench: ModelBench,
    sheet: Sheet,
}

impl Theory {
    /// GB/s of reading: a stripe needs any k of its strips. All groups are read alike, so the one with the
    /// lost drives has the say.
    fn read(&self, lost: usize) -> f64 {
        let group = self.group();
        self.sheet.gbps[0] * self.bench.drives as f64 * (group - lost as f64) / group
    }

    /// Drives that share the stripes of a lost one.
    fn group(&self) -> f64 {
        match self.bench.spares {
            Some(_) => self.bench.drives as f64,
            None => (self.bench.k + self.bench.m) as f64,
        }
    }

    /// GB/s of writing whole stripes.
    fn write(&self) -> f64 {
        let (k, m) = (self.bench.k as f64, self.bench.m as f64);
        self.sheet.gbps[1] * self.bench.drives as f64 * k / (k + m)
    }

    /// Thousands of reads a second. One that hits a lost drive reads k others. Both of two lost drives are in
    /// one group, which has the most work.
    fn read_small(&self, lost: usize) -> f64 {
        let (drives, k, group) = (self.bench.drives as f64, self.bench.k as f64, self.group());
        let (left, lost) = (group - lost as f64, lost as f64);
        // Of the reads of a group, the share of its lost drives costs k I/Os.
        let ios_per_read = (left + lost * k) / group;
        self.sheet.kiops[0] * drives / group * left / ios_per_read
    }

    /// Thousands of writes a second: each writes a data block and m blocks of redundancy in place.
    fn write_small(&self) -> f64 {
        self.sheet.kiops[1] * self.bench.drives as f64 / (1.0 + self.bench.m as f64)
    }
}

/// Measures sequential and random I/O. Returns one line for each operation, its ceiling what theory leaves.
pub async fn run_model(env: &Env, bench: ModelBench) -> Result<Vec<Line>, ArrayError> {
    let spec = bench.spec()?;
    let bed = Bed::new(env, bench, &spec, Contents::Words).await?;
    let theory = Theory { bench, sheet: bench.sheet() };
    let (mut fills, mut reads, mut small_reads, mut small_writes) = (vec![], vec![], vec![], vec![]);
    for run in 0..RUNS {
        if run > 0 {
            for first in (0..bed.stripes).step_by(64) {
                let count = 64.min(bed.stripes - first);
                bed.volume.discard(first, count, penstock_array::Discard::InTable).await?;
            }
        }
        fills.push(bed.fill().await?);
        reads.push(bed.read_all().await?);
        small_reads.push(bed.read_small().await?);
        small_writes.push(bed.write_small().await?);
    }
    let gbps = |name: &str, runs, ceiling| Line::new(name, "GB/s", runs, ceiling, "drives");
    let kiops = |name: &str, runs, ceiling, limit| Line::new(name, "kIOPS", runs, ceiling, limit);
    let mut lines = vec![
        gbps("read of whole stripes", reads, theory.read(0)),
        gbps("write of whole stripes", fills, theory.write()),
        kiops("read of 4 KiB", small_reads, theory.read_small(0), "drives"),
        kiops("durable write of 4 KiB", small_writes, theory.write_small(), "log on its carriers"),
    ];
    for lost in 1..=bench.m.min(2) {
        bed.array.fail_member(MemberNo::new(lost - 1), "benchmark").await?;
        if bench.spares.is_some() {
            bed.array.wait_rebuilt().await;
        }
        let (mut reads, mut small_reads) = (vec![], vec![]);
        for _ in 0..RUNS {
            reads.push(bed.read_all().await?);
            small_reads.push(bed.read_small().await?);
        }
        let name = |what: &str| format!("{what}, {lost} of {} drives lost", bench.drives);
        lines.push(gbps(&name("read of whole stripes"), reads, theory.read(lost)));
        lines.push(kiops(&name("read of 4 KiB"), small_reads, theory.read_small(lost), "drives"));
    }
    Ok(lines)
}

/// Latencies of reads in milliseconds.
#[derive(Default)]
struct Latencies(Vec<f64>);

impl Latencies {
    fn percentile(&mut self, share: f64) -> f64 {
        self.0.sort_by(f64::total_cmp);
        let last = self.0.len().saturating_sub(1);
        self.0.get((last as f64 * share) as usize).copied().unwrap_or(0.0)
    }
}

/// The course of a rebuild.
struct Course {
    /// Seconds until no stripe lacked a strip.
    seconds: f64,
    /// Seconds in which a stripe had no redundancy left.
    critical: f64,
    before: Latencies,
    beside: Latencies,
}

impl Bed {
    /// Reads of 4 KiB, a few at a time, until `is_over`. Returns the moments at which they began, and their
    /// latencies.
    async fn reads_beside(
        &self,
        at_a_time: usize,
        is_over: &Cell<bool>,
    ) -> Result<Vec<(Duration, f64)>, ArrayError> {
        let blocks = self.stripes * self.volume.stripe_blocks();
        let one = || async {
            let mut latencies = Vec::new();
            while !is_over.get() {
                let began = self.env.now();
                self.volume.read(self.below(blocks), 1, IO).await?;
                latencies.push((began, (self.env.now() - began).as_secs_f64() * 1e3));
            }
            Ok::<_, ArrayError>(latencies)
        };
        let all = futures_util::future::join_all((0..at_a_time).map(|_| one())).await;
        let all: Vec<Vec<_>> = all.into_iter().collect::<Result<_, _>>()?;
        Ok(all.concat())
    }

    /// Lets something be lost after a while, and watches the rebuild, beside so many reads at a time, until
    /// no stripe lacks a strip.
    async fn watch(
        &self,
        reads: usize,
        after: Duration,
        lose: impl AsyncFnOnce() -> Result<(), ArrayError>,
    ) -> Result<Course, ArrayError> {
        let is_over = Cell::new(false);
        let watch = async {
            self.env.sleep(after).await;
            let start = self.env.now();
            if let Err(error) = lose().await {
                is_over.set(true);
                return Err(error);
            }
            let (mut critical, mut last) = (0.0, start);
            loop {
                self.env.sleep(Duration::from_millis(2)).await;
                let (now, report) = (self.env.now(), self.array.report());
                if report.state == ArrayState::Critical {
                    critical += (now - last).as_secs_f64();
                }
                last = now;
                if report.redundancy_debt_stripes == 0 {
                    is_over.set(true);
                    return Ok((start, critical, (now - start).as_secs_f64()));
                }
            }
        };
        let (watched, reads) = futures_util::future::join(watch, self.reads_beside(reads, &is_over)).await;
        let (start, critical, seconds) = watched?;
        assert!(critical <= seconds, "critical for {critical} of {seconds} s");
        let (before, beside): (Vec<_>, Vec<_>) = reads?.into_iter().partition(|(began, _)| *began < start);
        let latencies =
            |reads: Vec<(Duration, f64)>| Latencies(reads.into_iter().map(|read| read.1).collect());
        Ok(Course { seconds, critical, before: latencies(before), beside: latencies(beside) })
    }

    /// Bytes of strips, trailers among them, on a member.
    fn bytes_on(&self, member: usize) -> f64 {
        let lost = |stripe: &u64| {
            let places = self.array.layout().places(penstock_base::Stripe(*stripe), Default::default());
            places.filter(|place| place.member.index() == member).count() > 0
        };
        let strips = (0..self.stripes).filter(lost).count();
        assert!(strips > 0, "a member has strips");
        strips as f64 * self.array.geometry().strip_slot_bytes() as f64
    }
}

/// Measures rebuilds: into spare space, or onto a replaced drive if there is none. The ceilings of times are
/// those of the formula.
pub async fn run_rebuild(env: &Env, bench: ModelBench) -> Result<Vec<Line>, ArrayError> {
    let (sheet, spec) = (bench.sheet(), bench.spec()?);
    assert_eq!(spec.layout.members(), bench.drives, "every drive is a member");
    let [read, write] = sheet.gbps.map(|gbps| gbps * 1e9);
    let (mut alone, mut beside, mut formula) = (Vec::new(), Vec::new(), 0.0);
    let (mut calm, mut busy) = (Latencies::default(), Latencies::default());
    let (mut both, mut critical) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        for reads in [0, BESIDE] {
            let bed = Bed::new(env, bench, &spec, Contents::Zeros).await?;
            bed.prepare().await?;
            let bytes = bed.bytes_on(0);
            formula = match bench.spares {
                Some(_) => bytes * (bench.k as f64 / read + 1.0 / write) / (bench.drives - 1) as f64,
                None => bytes / write,
            };
            let lose = async || {
                bed.array.fail_member(MemberNo::new(0), "benchmark").await?;
                match bench.spares {
                    Some(_) => Ok(()),
                    None => bed.array.replace_member(MemberNo::new(0), bed.blank_slice()).await,
                }
            };
            let course = bed.watch(reads, BEFORE, lose).await?;
            match reads {
                0 => alone.push(course.seconds),
                _ => {
                    beside.push(course.seconds);
                    calm.0.extend(course.before.0);
                    busy.0.extend(course.beside.0);
                }
            }
        }
        if bench.spares.is_some() && bench.m > 1 {
            let bed = Bed::new(env, bench, &spec, Contents::Zeros).await?;
            bed.prepare().await?;
            bed.array.fail_member(MemberNo::new(0), "benchmark").await?;
            let lose = async || bed.array.fail_member(MemberNo::new(1), "benchmark").await;
            let course = bed.watch(0, Duration::from_secs_f64(formula * 0.3), lose).await?;
            both.push(course.seconds);
            critical.push(course.critical);
        }
    }
    let seconds = |name: &str, runs: Vec<f64>, ceiling: f64, limit| {
        Line::new(name, "us", runs.into_iter().map(|run| run * 1e6).collect(), ceiling * 1e6, limit)
    };
    let ms = |name: &str, value: f64, ceiling: f64| {
        Line::new(name, "us", vec![value * 1e3], ceiling * 1e3, "the same reads before")
    };
    let mut lines = vec![
        seconds("rebuild alone", alone, formula, "drives"),
        seconds("rebuild beside reads", beside, formula, "drives"),
        ms("median of reads beside it", busy.percentile(0.5), calm.percentile(0.5)),
        ms("99th percentile of reads beside it", busy.percentile(0.99), calm.percentile(0.99)),
    ];
    if !both.is_empty() {
        // Stripes on both drives, as a share of those on one.
        let share = (bench.k + bench.m - 1) as f64 / (bench.drives - 1) as f64;
        lines.push(seconds("two drives, the second after 30 %", both, 1.7 * formula, "drives"));
        lines.push(seconds("some stripe without redundancy", critical, share * formula, "drives"));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn theory(k: usize, m: usize, drives: usize, spares: Option<usize>) -> Theory {
        let (sheet, slower, fill_bytes) = (Sheet::GEN5, 1.0, 64 << 20);
        Theory {
            bench: ModelBench { k, m, drives, spares, strip_blocks: 32, sheet, slower, fill_bytes },
            sheet,
        }
    }

    /// The theory of RAID 6 over six drives in the sources' first table.
    #[test]
    fn theory_is_that_of_the_sources() {
        let found = theory(4, 2, 6, None);
        let all = [found.read(0), found.write(), found.read_small(0), found.write_small()];
        for (found, wanted) in all.into_iter().zip([87.0, 37.2, 6126.0, 970.0]) {
            assert!((found - wanted).abs() < wanted / 1000.0, "{found} is not {wanted}");
        }
    }

    #[test]
    fn lost_drives_leave_less() {
        // Each of six reads costs one I/O of five drives, and the lost one's four.
        assert!((theory(4, 2, 6, None).read_small(1) - 1021.0 * 5.0 / (9.0 / 6.0)).abs() < 1.0);
        // The other group waits for the one that lost a drive.
        assert!((theory(8, 2, 20, None).read(1) - 14.5 * 18.0).abs() < 0.1);
        assert!((theory(8, 2, 60, Some(2)).read(1) - 14.5 * 59.0).abs() < 0.1);
    }

    #[test]
    fn percentiles_are_of_what_was_measured() {
        let mut latencies = Latencies((1..=100).rev().map(f64::from).collect());
        assert_eq!((latencies.percentile(0.5), latencies.percentile(1.0)), (50.0, 100.0));
        assert_eq!(Latencies::default().percentile(0.5), 0.0);
    }

    #[test]
    fn groups_take_a_multiple_of_their_strips() {
        assert!(theory(4, 2, 7, None).bench.spec().is_err());
        assert_eq!(theory(4, 2, 12, None).bench.spec().unwrap().layout.members(), 12);
        assert_eq!(theory(4, 2, 9, Some(1)).bench.spec().unwrap().layout.spares(), 1);
    }
}
