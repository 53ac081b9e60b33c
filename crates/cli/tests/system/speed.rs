//! Line 01.6: a first feel of speed, beside a file system that does nothing, in the same run. Never a test that fails
//! on a figure.

use crate::store::{Store, can_mount};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

const RUNS: usize = 5;
const O_DIRECT: i32 = libc::O_DIRECT;

/// Memory on a page boundary, as O_DIRECT wants it.
fn aligned(bytes: usize, fill: u8) -> (Vec<u8>, usize) {
    let buffer = vec![fill; bytes + 4096];
    let skip = buffer.as_ptr().align_offset(4096);
    (buffer, skip)
}

fn open(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(O_DIRECT)
        .open(path)
        .unwrap()
}

struct Figures {
    write_mb_s: f64,
    read_mb_s: f64,
    read_iops: f64,
    write_iops: f64,
    create_s: f64,
    stat_s: f64,
    unlink_s: f64,
}

fn measure(mount: &Path, mib: usize, ops: usize) -> Figures {
    let path = mount.join("big");
    let (buffer, skip) = aligned(1 << 20, 0x5a);
    let data = &buffer[skip..skip + (1 << 20)];
    let file = open(&path);
    let start = Instant::now();
    for at in 0..mib {
        file.write_all_at(data, (at << 20) as u64).unwrap();
    }
    file.sync_all().unwrap();
    let write_mb_s = (mib << 20) as f64 / 1e6 / start.elapsed().as_secs_f64();
    let (mut buffer, skip) = aligned(1 << 20, 0);
    let start = Instant::now();
    for at in 0..mib {
        file.read_exact_at(&mut buffer[skip..skip + (1 << 20)], (at << 20) as u64).unwrap();
    }
    let read_mb_s = (mib << 20) as f64 / 1e6 / start.elapsed().as_secs_f64();
    let place = |index: usize| ((index.wrapping_mul(0x9e37_79b9) % (mib * 256)) * 4096) as u64;
    let start = Instant::now();
    (0..ops).for_each(|index| file.read_exact_at(&mut buffer[skip..skip + 4096], place(index)).unwrap());
    let read_iops = ops as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    (0..ops).for_each(|index| file.write_all_at(&buffer[skip..skip + 4096], place(index)).unwrap());
    file.sync_all().unwrap();
    let write_iops = ops as f64 / start.elapsed().as_secs_f64();
    drop(file);
    std::fs::remove_file(&path).unwrap();
    let names: Vec<_> = (0..ops / 4).map(|index| mount.join(format!("f{index}"))).collect();
    let per_second = |start: Instant| names.len() as f64 / start.elapsed().as_secs_f64();
    let start = Instant::now();
    names.iter().for_each(|name| drop(File::create(name).unwrap()));
    let create_s = per_second(start);
    let start = Instant::now();
    names.iter().for_each(|name| assert!(std::fs::metadata(name).unwrap().is_file()));
    let stat_s = per_second(start);
    let start = Instant::now();
    names.iter().for_each(|name| std::fs::remove_file(name).unwrap());
    Figures { write_mb_s, read_mb_s, read_iops, write_iops, create_s, stat_s, unlink_s: per_second(start) }
}

fn median(mut runs: Vec<f64>) -> f64 {
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 2]
}

fn speed(mib: usize, ops: usize) {
    let store = Store::new("speed", &["--drive-size", "1G"]);
    store.up();
    let null = store.home.join("null");
    std::fs::create_dir(&null).unwrap();
    let session = penstock_fuse::mount_null(&null).unwrap();
    let (mut mine, mut ceiling) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        mine.push(measure(&store.mount, mib, ops));
        ceiling.push(measure(&null, mib, ops));
    }
    session.umount_and_join().unwrap();
    type Get = fn(&Figures) -> f64;
    let lines: [(&str, &str, Get); 7] = [
        ("1 MiB O_DIRECT write, fsync at the end", "MB/s", |f| f.write_mb_s),
        ("1 MiB O_DIRECT read", "MB/s", |f| f.read_mb_s),
        ("4 KiB random read, 1 job", "IOPS", |f| f.read_iops),
        ("4 KiB random write, 1 job, fsync at the end", "IOPS", |f| f.write_iops),
        ("create", "/s", |f| f.create_s),
        ("stat", "/s", |f| f.stat_s),
        ("unlink", "/s", |f| f.unlink_s),
    ];
    println!("{:<46}{:>12}{:>14}{:>8}", "", "Penstock 4+2", "does nothing", "share");
    for (name, unit, get) in lines {
        let (mine, ceiling) =
            (median(mine.iter().map(get).collect()), median(ceiling.iter().map(get).collect()));
        println!("{name:<46}{mine:>12.0}{ceiling:>14.0}{:>7.0}%  {unit}", mine / ceiling * 100.0);
    }
    println!("medians of {RUNS} runs, interleaved; drives in {}", store.dir.display());
    store.down();
}

#[test]
fn the_speed_workloads_run() {
    if can_mount("the_speed_workloads_run") {
        speed(8, 64);
    }
}

#[test]
#[ignore = "full form: cargo xtask show 01.6 (PENSTOCK_TEST_DIR on a tmpfs takes the disk out)"]
fn show_speed() {
    if can_mount("show_speed") {
        speed(256, 8192);
    }
}
