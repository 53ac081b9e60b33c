//! The cost of having several stacks, as a table: start, memory, rounds of a sync, small files, space.

use crate::speed::median;
use crate::store::{Store, can_mount};
use serde_json::Value;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::time::{Duration, Instant};

/// The numbers of stacks that are compared.
const STACKS: [u32; 5] = [1, 2, 4, 8, 16];

/// The amount of work that is measured.
struct Amount {
    drive_size: &'static str,
    rounds: usize,
    files: usize,
    syncs: usize,
}

/// The figures of one store.
#[derive(Clone, Copy, Default)]
struct Figures {
    make: Duration,
    start: Duration,
    resident_mib: f64,
    /// After the files were written.
    busy_mib: f64,
    files_per_second: f64,
    /// Milliseconds of a 4 KiB write with a sync.
    sync_ms: f64,
    /// Rounds by sync in which a log was made durable, and writes to drives.
    log_flushes: f64,
    drive_writes: f64,
    usable_gib: f64,
}

fn sum(list: &Value, field: &str) -> u64 {
    list.as_array().unwrap().iter().map(|one| one[field].as_u64().unwrap()).sum()
}

fn resident_mib(store: &Store) -> f64 {
    let pid = store.pid().expect("it runs");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
    let kib: f64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib / 1024.0
}

fn timed(act: impl FnOnce()) -> Duration {
    let begin = Instant::now();
    act();
    begin.elapsed()
}

fn measure(stacks: u32, amount: &Amount) -> Figures {
    let targets = stacks.to_string();
    let store = Store::new("stacks-cost", &["--drive-size", amount.drive_size, "--targets", &targets]);
    let make = timed(|| store.up());
    store.down();
    let start = timed(|| store.up());
    let idle_mib = resident_mib(&store);
    let folder = store.mount.join("files");
    std::fs::create_dir(&folder).unwrap();
    let files = timed(|| {
        (0..amount.files).for_each(|at| std::fs::write(folder.join(at.to_string()), [7; 4096]).unwrap());
    });
    let counts = || {
        (sum(&store.json(&["array", "list"]), "log_flushes"), sum(&store.json(&["drive", "list"]), "writes"))
    };
    let mut file = File::create(store.mount.join("synced")).unwrap();
    file.write_all(&[1; 4096]).unwrap();
    file.sync_all().unwrap();
    let before = counts();
    let syncs = (0..amount.syncs).map(|_| {
        timed(|| {
            file.seek(SeekFrom::Start(0)).unwrap();
            file.write_all(&[2; 4096]).unwrap();
            file.sync_all().unwrap();
        })
    });
    let sync_ms = median(syncs.map(|time| time.as_secs_f64() * 1e3).collect());
    let after = counts();
    let by_sync = |before: u64, after: u64| (after - before) as f64 / amount.syncs as f64;
    let figures = Figures {
        make,
        start,
        resident_mib: idle_mib,
        busy_mib: resident_mib(&store),
        files_per_second: amount.files as f64 / files.as_secs_f64(),
        sync_ms,
        log_flushes: by_sync(before.0, after.0),
        drive_writes: by_sync(before.1, after.1),
        usable_gib: store.json(&["fs", "show"])["total_bytes"].as_u64().unwrap() as f64 / (1u64 << 30) as f64,
    };
    drop(file);
    store.down();
    figures
}

/// Prints the table: medians of rounds, in each of which every number of stacks is measured once.
fn table(amount: &Amount) {
    let mut all: Vec<Vec<Figures>> = vec![Vec::new(); STACKS.len()];
    for _ in 0..amount.rounds {
        STACKS.iter().zip(&mut all).for_each(|(stacks, all)| all.push(measure(*stacks, amount)));
    }
    println!(
        "| Stacks | make | start | MiB, idle | MiB, busy | files/s | write and fsync | log flushes | drive writes | usable GiB |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (stacks, all) in STACKS.iter().zip(&all) {
        let of = |figure: fn(&Figures) -> f64| median(all.iter().map(figure).collect());
        println!(
            "| {stacks} | {:.0} ms | {:.0} ms | {:.0} | {:.0} | {:.0} | {:.2} ms | {:.2} | {:.2} | {:.2} |",
            of(|f| f.make.as_secs_f64() * 1e3),
            of(|f| f.start.as_secs_f64() * 1e3),
            of(|f| f.resident_mib),
            of(|f| f.busy_mib),
            of(|f| f.files_per_second),
            of(|f| f.sync_ms),
            of(|f| f.log_flushes),
            of(|f| f.drive_writes),
            of(|f| f.usable_gib),
        );
    }
    println!("\n| Stacks | usable, 6 drives of 4 GiB | usable, 24 drives of 1 TiB |\n|---|---|---|");
    for stacks in STACKS.iter().chain(&[32, 64]) {
        let usable = |drives: &str, size: &str| -> String {
            let words = [
                "up",
                "--dry-run",
                "--json",
                "--drives",
                drives,
                "--drive-size",
                size,
                "--targets",
                &stacks.to_string(),
            ];
            let output = Store::program().args(words).output().unwrap();
            match serde_json::from_slice::<Value>(&output.stdout) {
                Ok(plan) => format!("{:.1} %", plan["usable_percent"].as_f64().unwrap()),
                Err(_) => "too small".to_owned(),
            }
        };
        println!("| {stacks} | {} | {} |", usable("6", "4G"), usable("24", "1T"));
    }
}

/// Every column is a figure of a store that ran: a short form of the table.
#[test]
fn the_cost_of_stacks_is_measured() {
    if can_mount("the_cost_of_stacks_is_measured") {
        let amount = Amount { drive_size: "512M", rounds: 1, files: 20, syncs: 5 };
        for stacks in [1, 2] {
            let figures = measure(stacks, &amount);
            let (logs, drives) = (figures.log_flushes, figures.drive_writes);
            assert!(
                logs >= 1.0 && drives >= 1.0,
                "a sync reaches the drives: {logs} log flushes and {drives} writes"
            );
            assert!(figures.usable_gib > 0.5 && figures.resident_mib > 1.0 && figures.files_per_second > 0.0);
        }
    }
}

#[test]
#[ignore = "full form: cargo xtask show 16.2"]
fn show_stacks_cost() {
    if can_mount("show_stacks_cost") {
        table(&Amount { drive_size: "4G", rounds: 3, files: 4000, syncs: 500 });
    }
}
