//! Benchmark of the stripe table of a large array, and of the free space on it: the cost of opening the array
//! and its target, their memory, and a report.
//!
//! The drives keep only what is written. They generate the pages of the table when they are read, by the same
//! code that encodes them, with every stripe marked as written, and have the index over them. So an array of
//! any size can be opened.

use crate::bed::{SLICE_AT, online};
use crate::made_kv::MadeKv;
use penstock_array::format::index_page::{IndexPage, PageRef};
use penstock_array::format::root::Root;
use penstock_array::format::table_page::TablePage;
use penstock_array::ownership::MemoryOwnership;
use penstock_array::page_tree::PageTree;
use penstock_array::{Array, ArrayError, CreateSpec, Geometry, Lacking, Roster, Volume, create, open};
use penstock_base::{ArrayId, BLOCK_BYTES, Buf, BufMut, Env, Gate, LocalBoxFuture, Stripe};
use penstock_chunk::{Target, TargetConfig};
use penstock_drive::{Class, Drive, DriveError, Io, Slice};
use serde::Serialize;
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

const IO: Io = Io::new(Class::Meta, "bench");
const BLOCK: u64 = BLOCK_BYTES as u64;
/// The number of timed reports, of which the median is returned.
const LOOKS: usize = 1001;
/// Stripes whose places are asked for, all over the array.
const STRIPES: u64 = 100_000;

/// The measured array.
#[derive(Clone, Copy, Debug)]
pub struct TableBench {
    /// The number of data strips.
    pub k: usize,
    /// The number of parity strips.
    pub m: usize,
    /// Data in the array, in TiB.
    pub tib: u64,
}

/// The results for one table.
#[derive(Clone, Debug, Serialize)]
pub struct TableLine {
    /// Data in the array, in TiB.
    pub tib: u64,
    /// The number of stripes, all of them written.
    pub stripes: u64,
    /// Size of the table on each carrier in MiB, both places.
    pub table_mib: u64,
    /// Seconds that it took to create the empty array.
    pub create_s: f64,
    /// Seconds that it took to open the array.
    pub open_s: f64,
    /// Seconds that it took to open a target on it, all of whose blocks are used but for a few stripes.
    pub target_s: f64,
    /// Seconds after which the target had found these stripes, in the background.
    pub swept_s: f64,
    /// Peak of the added memory in MiB until then, with that of the array, and what earlier openings left.
    pub swept_mib: u64,
    /// Resident memory in MiB that the open array adds to the process.
    pub memory_mib: u64,
    /// Peak of the added memory in MiB while the array opened.
    pub peak_mib: u64,
    /// The same after pages all over the table were needed.
    pub used_mib: u64,
    /// Pages of the table in memory then.
    pub used_pages: u64,
    /// Seconds that it took to open the array without a drive, until all strips on it were counted.
    pub counted_s: f64,
    /// Peak of the added memory in MiB until then.
    pub counted_mib: u64,
    /// Median time in microseconds of one report of the array, which the watch requests twice a second.
    pub report_us: f64,
}

/// The stripe table of every drive.
struct Made {
    array: ArrayId,
    geometry: Geometry,
    tree: PageTree,
    index: BTreeMap<u64, Buf>,
    top: PageRef,
}

impl Made {
    fn new(array: ArrayId, geometry: Geometry) -> Self {
        let (tree, index, top) = (geometry.page_tree(), BTreeMap::new(), PageRef::NONE);
        let mut made = Self { array, geometry, tree, index, top };
        let mut named: BTreeMap<u64, Vec<PageRef>> = BTreeMap::new();
        for index in 0..made.tree.pages() {
            let (block, written) = match named.remove(&index) {
                None => (made.leaf(index), made.stripes_in(index)),
                Some(refs) => {
                    let written = refs.iter().map(|page| page.written).sum();
                    let level = made.tree.level(index);
                    let block = IndexPage { array, index, checkpoint: 0, level, refs }.encode();
                    made.index.insert(index, block.clone());
                    (block, written)
                }
            };
            let crc = u32::from_le_bytes(block[4..8].try_into().expect("four bytes"));
            let page = PageRef { written, crc, ..PageRef::NONE };
            match made.tree.parent(index) {
                Some((parent, _)) => named.entry(parent).or_default().push(page),
                None => made.top = page,
            }
        }
        made
    }

    fn stripes_in(&self, page: u64) -> u64 {
        let per_page = self.geometry.stripes_per_page();
        per_page.min(self.geometry.stripes - page * per_page)
    }

    fn leaf(&self, index: u64) -> Buf {
        let strips = self.geometry.strips();
        let entry = [[0; 3].as_slice(), &vec![1; strips]].concat();
        let words = entry.repeat(self.stripes_in(index) as usize);
        TablePage { array: self.array, index, checkpoint: 0, strips: strips as u16, words }.encode()
    }

    /// The page at an offset of a slice; none if no page lies there at the first place.
    fn block(&self, offset: u64) -> Option<Buf> {
        let (page, place) = self.geometry.page_of(offset)?;
        let block = || self.index.get(&page).cloned().unwrap_or_else(|| self.leaf(page));
        (place == 0).then(block)
    }
}

struct MadeDrive {
    size_bytes: u64,
    made: Rc<OnceCell<Made>>,
    written: RefCell<BTreeMap<u64, Buf>>,
}

impl Drive for MadeDrive {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read(&self, at: u64, mut buf: BufMut, _io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>> {
        Box::pin(async move {
            let written = self.written.borrow();
            for (block, bytes) in (at / BLOCK..).zip(buf.as_mut().chunks_exact_mut(BLOCK_BYTES)) {
                let page = || self.made.get()?.block((block * BLOCK).checked_sub(SLICE_AT)?);
                match written.get(&block).cloned().or_else(page) {
                    Some(found) => bytes.copy_from_slice(&found),
                    None => bytes.fill(0),
                }
            }
            Ok(buf)
        })
    }

    fn write(&self, at: u64, data: Buf, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let mut written = self.written.borrow_mut();
            for index in 0..data.len() / BLOCK_BYTES {
                let bytes = data.slice(index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES);
                written.insert(at / BLOCK + index as u64, bytes);
            }
            Ok(())
        })
    }

    fn flush(&self, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async { Ok(()) })
    }

    fn discard(&self, _at: u64, _len: u64, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async { Ok(()) })
    }
}

/// Resident memory of this process in MiB: now, and the peak since the last [`forget_peak`].
fn memory_mib() -> Result<[u64; 2], ArrayError> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(|error| invalid(&error.to_string()))?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib >> 10)
    };
    match (field("VmRSS:"), field("VmHWM:")) {
        (Some(now), Some(most)) => Ok([now, most]),
        _ => Err(invalid("/proc/self/status says nothing of memory")),
    }
}

fn forget_peak() -> Result<(), ArrayError> {
    std::fs::write("/proc/self/clear_refs", "5").map_err(|error| invalid(&error.to_string()))
}

fn invalid(why: &str) -> ArrayError {
    ArrayError::Invalid(format!("benchmark: {why}"))
}

/// Slices of drives that are just large enough.
fn slices(env: &Env, bench: TableBench, made: &Rc<OnceCell<Made>>) -> Result<Vec<Slice>, ArrayError> {
    let spec = CreateSpec::new("bench", bench.k, bench.m)?;
    let stripes = (bench.tib << 40) / (bench.k as u64 * u64::from(spec.strip_blocks) * BLOCK);
    // Strips with their trailers, the table, the log, and a margin.
    let slot = u64::from(spec.strip_blocks + 1) * BLOCK;
    let bytes = (stripes * slot + stripes / 16 * BLOCK + (1 << 30)).next_multiple_of(SLICE_AT);
    let drive = |number: u64| {
        let drive = MadeDrive { size_bytes: bytes, made: made.clone(), written: RefCell::default() };
        let handle = online(env, "made", number, Rc::new(drive));
        Slice::new(handle, SLICE_AT, bytes - 2 * SLICE_AT)
    };
    Ok((0..(bench.k + bench.m) as u64).map(drive).collect())
}

/// Opens a target on a full array. Returns the seconds that it took, and those until it had found all written
/// stripes that hold nothing.
async fn open_target(env: &Env, array: &Rc<Array>) -> Result<(f64, f64), ArrayError> {
    let start = Instant::now();
    let volume = Volume::whole(array);
    let rows = Rc::new(MadeKv::new(volume.blocks(), volume.stripe_blocks()));
    let config = TargetConfig::for_volume(&volume, penstock_base::TargetId(0), 1);
    let free_blocks = rows.empty_stripes() * volume.stripe_blocks();
    let opened = Target::open(env, volume, rows, Rc::<Gate>::default(), config).await;
    let target = opened.map_err(|error| invalid(&error.to_string()))?;
    let target_s = start.elapsed().as_secs_f64();
    if target.usage().free_blocks != free_blocks {
        return Err(invalid("the space that was opened is not the one that was made"));
    }
    while !target.is_swept() {
        env.sleep(Duration::from_millis(1)).await;
    }
    let swept_s = start.elapsed().as_secs_f64();
    target.stop();
    Ok((target_s, swept_s))
}

/// Runs the benchmark on the worker that calls it.
pub async fn run_table(env: &Env, bench: TableBench) -> Result<TableLine, ArrayError> {
    let made: Rc<OnceCell<Made>> = Rc::default();
    let slices = slices(env, bench, &made)?;
    let spec = CreateSpec::new("bench", bench.k, bench.m)?;
    let geometry = Geometry::fit(&spec, slices[0].len())?;
    let start = Instant::now();
    let descriptor = create(env, &spec, &slices).await?;
    let create_s = start.elapsed().as_secs_f64();
    let table = made.get_or_init(|| Made::new(descriptor.array, geometry));
    for carrier in &slices[..geometry.carriers()] {
        let mut root = Root::decode(&carrier.read(geometry.root_at(0), BLOCK_BYTES, IO).await?)?;
        root.table = table.top;
        carrier.write(geometry.root_at(0), root.encode(), IO).await?;
    }
    forget_peak()?;
    let [before, _] = memory_mib()?;
    let start = Instant::now();
    let members: Vec<Option<Slice>> = slices.iter().cloned().map(Some).collect();
    let ownership = Rc::new(MemoryOwnership::default());
    let open_now = async |members: Vec<Option<Slice>>| -> Result<Rc<Array>, ArrayError> {
        let roster = Roster::new(env);
        open(env, descriptor.clone(), members, ownership.clone(), &roster, Lacking::Refuse).await
    };
    let array = open_now(members.clone()).await?;
    let open_s = start.elapsed().as_secs_f64();
    let [now, most] = memory_mib()?;
    let mut looks = Vec::with_capacity(LOOKS);
    for _ in 0..LOOKS {
        let start = Instant::now();
        let report = array.report();
        looks.push(start.elapsed().as_secs_f64() * 1e6);
        if report.stripes.1 != geometry.stripes {
            return Err(invalid("the table that was opened is not the one that was made"));
        }
    }
    looks.sort_by(f64::total_cmp);
    // The golden ratio spreads them over the array.
    let spread = |number: u64| (number * 0x9e37_79b9) % geometry.stripes;
    for number in 0..STRIPES {
        array.places(Stripe(spread(number))).await?;
    }
    let [_, used] = memory_mib()?;
    let used_pages = array.report().table_pages.0;
    array.stop();
    drop(array);
    forget_peak()?;
    let start = Instant::now();
    let without_last = members[..members.len() - 1].iter().cloned().chain([None]).collect();
    let array = open_now(without_last).await?;
    while !array.report().is_counted {
        env.sleep(Duration::from_millis(1)).await;
    }
    let counted_s = start.elapsed().as_secs_f64();
    if array.report().redundancy_debt_stripes != geometry.stripes {
        return Err(invalid("each stripe has a strip on the drive that is missing"));
    }
    let [_, counted] = memory_mib()?;
    array.stop();
    drop(array);
    // Last, because it discards the stripes.
    forget_peak()?;
    let array = open_now(members).await?;
    let (target_s, swept_s) = open_target(env, &array).await?;
    let [_, swept] = memory_mib()?;
    array.stop();
    Ok(TableLine {
        tib: bench.tib,
        stripes: geometry.stripes,
        table_mib: (2 * geometry.pages() * BLOCK) >> 20,
        create_s,
        open_s,
        target_s,
        swept_s,
        swept_mib: swept.saturating_sub(before),
        memory_mib: now.saturating_sub(before),
        peak_mib: most.saturating_sub(before),
        used_mib: used.saturating_sub(before),
        used_pages,
        counted_s,
        counted_mib: counted.saturating_sub(before),
        report_us: looks[LOOKS / 2],
    })
}
