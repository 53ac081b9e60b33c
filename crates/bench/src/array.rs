//! Benchmark of an array on memory drives: the cost of the array engine without real drives.
//!
//! The ceiling is a plain copy of the same bytes between buffers of the same size, measured between the runs,
//! because every operation moves each byte through memory at least once.

use crate::Line;
use crate::bed::{SLICE_AT, new_array, online, stripe_data};
use penstock_array::{Array, ArrayError, CreateSpec, MemberNo, Volume};
use penstock_base::{BLOCK_BYTES, Buf, Env};
use penstock_drive::{Class, DriveHandle, Io, MemoryDrive, Slice};
use std::rc::Rc;
use std::time::Instant;

const IO: Io = Io::new(Class::Client, "bench");
const RUNS: usize = 5;
const DRIVE_BYTES: usize = 320 << 20;

/// The code of the measured array.
#[derive(Clone, Copy, Debug)]
pub struct ArrayBench {
    /// The number of data strips.
    pub k: usize,
    /// The number of parity strips.
    pub m: usize,
}

struct Bed {
    array: Rc<Array>,
    volume: Volume,
    drives: Vec<Rc<DriveHandle>>,
    data: Buf,
    crcs: Vec<u32>,
}

async fn bed(env: &Env, bench: ArrayBench) -> Result<Bed, ArrayError> {
    let drive = |number| online(env, "memory", number, Rc::new(MemoryDrive::new(DRIVE_BYTES)));
    let drives: Vec<Rc<DriveHandle>> = (0..(bench.k + bench.m) as u64).map(drive).collect();
    let len = penstock_drive::superblock::slices_end(DRIVE_BYTES as u64) - SLICE_AT;
    let slices = drives.iter().map(|drive| Slice::new(drive.clone(), SLICE_AT, len)).collect();
    let array = new_array(env, &CreateSpec::new("bench", bench.k, bench.m)?, slices).await?;
    let volume = Volume::whole(&array);
    let (data, crcs) = stripe_data(&volume);
    Ok(Bed { array, volume, drives, data, crcs })
}

/// GB/s of copying `count` buffers of `bytes` bytes to as many others, so that caches do not help.
fn copy_ceiling(bytes: usize, count: usize) -> f64 {
    let from: Vec<Vec<u8>> = (0..count).map(|fill| vec![fill as u8 | 1; bytes]).collect();
    let mut to: Vec<Vec<u8>> = (0..count).map(|_| vec![1; bytes]).collect();
    let start = Instant::now();
    for (from, to) in from.iter().zip(&mut to) {
        to.copy_from_slice(from);
    }
    let rate = rate(bytes * count, start);
    assert!(to.iter().zip(&from).all(|(to, from)| to[bytes - 1] == from[bytes - 1]), "the copy was made");
    rate
}

fn rate(bytes: usize, start: Instant) -> f64 {
    bytes as f64 / 1e9 / start.elapsed().as_secs_f64()
}

/// Runs the benchmark on the worker that calls it. Returns one line for each operation.
pub async fn run_array(env: &Env, bench: ArrayBench) -> Result<Vec<Line>, ArrayError> {
    let bed = bed(env, bench).await?;
    let stripe_bytes = bed.data.len();
    let stripes = (bed.volume.blocks() / bed.volume.stripe_blocks()).min(192);
    let mut ceilings = Vec::new();
    let (mut writes, mut reads, mut small_reads, mut small_writes, mut degraded) =
        (vec![], vec![], vec![], vec![], vec![]);
    for run in 0..RUNS {
        ceilings.push(copy_ceiling(stripe_bytes, stripes as usize));
        if run > 0 {
            bed.volume.discard(0, stripes, penstock_array::Discard::OnDrives).await?;
        }
        let start = Instant::now();
        for stripe in 0..stripes {
            bed.volume.write_fresh(stripe, &bed.data, &bed.crcs, IO).await?;
        }
        bed.volume.flush().await?;
        writes.push(rate(stripe_bytes * stripes as usize, start));
        reads.push(read_all(&bed, stripes).await?);
        small_reads.push(read_small(&bed, stripes).await?);
        small_writes.push(write_small(&bed, stripes).await?);
    }
    if bench.m > 0 {
        bed.array.fail_member(MemberNo::new(0), "benchmark").await?;
        for _ in 0..RUNS {
            degraded.push(read_all(&bed, stripes).await?);
        }
    }
    ceilings.sort_by(f64::total_cmp);
    let copy = ceilings[RUNS / 2];
    let (k, m) = (bench.k, bench.m);
    let mib = stripe_bytes >> 20;
    let mut lines = vec![
        Line::new("copy (ceiling)", "GB/s", ceilings, copy, "memory"),
        Line::new(
            format!("{k}+{m} write of whole stripes ({mib} MiB)"),
            "GB/s",
            writes,
            copy,
            "memory passes: code, check, drive",
        ),
        Line::new(
            format!("{k}+{m} read of whole stripes ({mib} MiB)"),
            "GB/s",
            reads,
            copy,
            "memory passes: drive, check",
        ),
        Line::new(
            format!("{k}+{m} read of 4 KiB"),
            "kIOPS",
            small_reads,
            copy * 1e6 / 4096.0,
            "processor: one I/O and its bookkeeping",
        ),
        Line::new(
            format!("{k}+{m} write of 4 KiB through the log, flushed in batches of 64"),
            "kIOPS",
            small_writes,
            copy * 1e6 / 4096.0,
            "memory passes: log on every carrier",
        ),
    ];
    if m > 0 {
        lines.push(Line::new(
            format!("{k}+{m} read with one member lost"),
            "GB/s",
            degraded,
            copy,
            "decoding and checks",
        ));
    }
    bed.array.stop();
    assert!(!bed.drives.is_empty(), "drives live as long as the array");
    Ok(lines)
}

async fn read_all(bed: &Bed, stripes: u64) -> Result<f64, ArrayError> {
    let per_stripe = bed.volume.stripe_blocks();
    let start = Instant::now();
    for stripe in 0..stripes {
        let blocks = bed.volume.read(stripe * per_stripe, per_stripe, IO).await?;
        assert_eq!(blocks.crcs.len() as u64, per_stripe, "all blocks came");
    }
    Ok(rate(bed.data.len() * stripes as usize, start))
}

const SMALL: u64 = 4096;

async fn read_small(bed: &Bed, stripes: u64) -> Result<f64, ArrayError> {
    let blocks = stripes * bed.volume.stripe_blocks();
    let start = Instant::now();
    for index in 0..SMALL {
        bed.volume.read(index.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks, 1, IO).await?;
    }
    Ok(SMALL as f64 / 1e3 / start.elapsed().as_secs_f64())
}

async fn write_small(bed: &Bed, stripes: u64) -> Result<f64, ArrayError> {
    let blocks = stripes * bed.volume.stripe_blocks();
    let start = Instant::now();
    for index in 0..SMALL {
        let block = bed.data.slice(0..BLOCK_BYTES);
        bed.volume.write(index.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks, &block, &bed.crcs[..1]).await?;
        if index % 64 == 63 {
            bed.volume.flush().await?;
        }
    }
    Ok(SMALL as f64 / 1e3 / start.elapsed().as_secs_f64())
}
