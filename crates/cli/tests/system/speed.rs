//! First measurement of speed, interleaved with a file system that does nothing (`cargo xtask show 01.6`).
//!
//! No figure makes a test fail.

use crate::store::{Store, can_mount};
use penstock_bench::files::{Amount, Folder, Work};
use std::time::Duration;

const RUNS: usize = 5;
/// Name, workload, unit, and the number of the workload's units in one of those.
const LINES: [(&str, Work, &str, f64); 7] = [
    ("1 MiB O_DIRECT write, fsync at the end", Work::WriteDirect, "MB/s", 1e6),
    ("1 MiB O_DIRECT read", Work::ReadDirect, "MB/s", 1e6),
    ("4 KiB random read, 1 job", Work::RandomRead(1), "IOPS", 1.0),
    ("4 KiB random write, 1 job, fsync at the end", Work::RandomWrite(1), "IOPS", 1.0),
    ("create", Work::Create(0), "/s", 1.0),
    ("stat", Work::Stat(1), "/s", 1.0),
    ("unlink", Work::Unlink, "/s", 1.0),
];

fn measure(folder: &Folder) -> [f64; LINES.len()] {
    LINES.map(|(_, work, _, per_unit)| {
        folder.prepare(work).unwrap();
        folder.run(work).unwrap().rate() / per_unit
    })
}

pub fn median(mut runs: Vec<f64>) -> f64 {
    runs.sort_by(f64::total_cmp);
    runs[runs.len() / 2]
}

fn speed(mib: usize, ops: usize) {
    let store = Store::new("speed", &["--drive-size", "1G"]);
    store.up();
    let null = store.home.join("null");
    std::fs::create_dir(&null).unwrap();
    let session = penstock_fuse::mount_null(&null).unwrap();
    let amount = Amount { file_mib: mib, ops, files: ops / 4, syncs: 0, limit: Duration::from_secs(600) };
    let (mine, ceiling) = (Folder::new(&store.mount, amount, true), Folder::new(&null, amount, false));
    let runs: Vec<_> = (0..RUNS).map(|_| (measure(&mine), measure(&ceiling))).collect();
    session.umount_and_join().unwrap();
    println!("{:<46}{:>12}{:>14}{:>8}", "", "Penstock 4+2", "does nothing", "share");
    for (line, (name, _, unit, _)) in LINES.iter().enumerate() {
        let mine = median(runs.iter().map(|(mine, _)| mine[line]).collect());
        let ceiling = median(runs.iter().map(|(_, ceiling)| ceiling[line]).collect());
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
