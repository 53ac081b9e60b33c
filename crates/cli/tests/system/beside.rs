//! Rates of a mount beside others: an idle mount, 1,000 connections that say nothing, and 1,000 hostile ones
//! (`cargo xtask show 14.5`).
//!
//! A hostile connection greets and then does something every second, and connects again when it is closed:
//! random bytes, the begin of a message of the largest size, requests of sessions that are another's, and
//! Hello with a key that is not known.
//!
//! No figure makes a test fail.

use crate::remote_mount::mount_at;
use crate::speed::median;
use crate::store::{Random, Store, can_mount};
use penstock_bench::files::{Amount, Folder, Work};
use penstock_fabric::greeting::{Greeting, NONCE_BYTES};
use penstock_fabric::local;
use penstock_wire::{Frame, Header, Kind, Version};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const RUNS: usize = 5;
/// Name, workload, unit, and the number of the workload's units in one of those.
const LINES: [(&str, Work, f64); 9] = [
    ("stat of the same files, again and again", Work::Stat(20), 1.0),
    ("create, 4 KiB", Work::Create(4096), 1.0),
    ("stat of new files", Work::Stat(1), 1.0),
    ("unlink", Work::Unlink, 1.0),
    ("4 KiB write and fsync", Work::WriteSync(1), 1.0),
    ("4 KiB random read, 1 job", Work::RandomRead(1), 1.0),
    ("4 KiB random read, 8 jobs", Work::RandomRead(8), 1.0),
    ("1 MiB O_DIRECT write", Work::WriteDirect, 1e6),
    ("1 MiB O_DIRECT read", Work::ReadDirect, 1e6),
];
const LOOKUPS: [&str; 3] =
    ["lookup of names that are there", "lookup of a name that is not", "scandir and stat"];
const ALL: usize = LINES.len() + LOOKUPS.len();
const FILES: usize = 500;
const SCANS: usize = 60;

/// The others that are there while the mount works.
#[derive(Clone, Copy, Debug)]
enum Beside {
    Nobody,
    IdleMount,
    Silent(usize),
    Hostile(usize),
}

/// Connections that stay until this is dropped.
struct Connections<'a> {
    over: &'a AtomicBool,
}

impl Drop for Connections<'_> {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
    }
}

/// One hostile connection: does the next thing. False if it was closed.
fn attack(stream: &mut UnixStream, random: &mut Random) -> bool {
    let request = |kind: Kind, session: u64, body: Vec<u8>| {
        let mut frame = Frame::request(kind, body, Vec::new());
        frame.header.session = session;
        let mut bytes = frame.header.encode(Version::NEWEST, &frame.body);
        bytes.extend(frame.body);
        bytes
    };
    let mut noise = vec![0; 300];
    random.fill(&mut noise);
    let bytes = match random.below(4) {
        0 => noise,
        1 => {
            let header =
                Header { body_bytes: 1 << 20, payload_bytes: 4 << 20, ..Header::request(Kind::Write) };
            header.encode(Version::NEWEST, &[])
        }
        2 => request(Kind::GetAttr, 1 + random.below(9), noise),
        _ => request(Kind::Hello, random.below(u64::MAX), noise),
    };
    stream.write_all(&bytes).is_ok() && !matches!(stream.read(&mut [0; 4096]), Ok(0))
}

/// Keeps `count` connections, and makes each of them attack if they are hostile. Returns the number of
/// attacks.
fn keep(dir: &Path, count: usize, hostile: bool, over: &AtomicBool) -> u64 {
    let connect = || {
        let mut stream = local::connect(dir, local::DATA).ok()?;
        stream.set_nonblocking(true).ok()?;
        if hostile {
            stream.write_all(&Greeting::new([7; NONCE_BYTES]).encode()).ok()?;
        }
        Some(stream)
    };
    let mut random = Random(7);
    let mut all: Vec<Option<UnixStream>> = (0..count).map(|_| connect()).collect();
    let (mut attacks, mut next) = (0, Instant::now());
    while !over.load(Relaxed) {
        if hostile {
            for one in &mut all {
                let lives = one.as_mut().is_some_and(|stream| attack(stream, &mut random));
                attacks += 1;
                if !lives {
                    *one = connect();
                }
            }
        }
        next += Duration::from_millis(if hostile { 1000 } else { 100 });
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    attacks
}

fn lookups(folder: &Path) -> [f64; LOOKUPS.len()] {
    let per_second = |count: usize, act: &dyn Fn(usize)| {
        let start = Instant::now();
        (0..count).for_each(act);
        count as f64 / start.elapsed().as_secs_f64()
    };
    let name = |at: usize| folder.join(format!("look-{}", at % FILES));
    (0..FILES).for_each(|at| drop(std::fs::File::create(name(at)).unwrap()));
    // Others have seen the names made, and the kernel forgets what it has.
    std::thread::sleep(Duration::from_millis(1500));
    let there =
        per_second(100 * FILES, &|at| assert!(std::fs::symlink_metadata(name(at)).unwrap().is_file()));
    let missing = per_second(20 * FILES, &|_| assert!(std::fs::metadata(folder.join("missing")).is_err()));
    let scans = per_second(SCANS, &|_| {
        for entry in std::fs::read_dir(folder).unwrap() {
            // A file of the workloads may be among them, and stays.
            entry.unwrap().metadata().unwrap();
        }
    });
    [there, missing, scans * FILES as f64]
}

fn measure(folder: &Folder) -> [f64; ALL] {
    let mut rates = [0.0; ALL];
    for (at, (_, work, per_unit)) in LINES.into_iter().enumerate() {
        folder.prepare(work).unwrap();
        rates[at] = folder.run(work).unwrap().rate() / per_unit;
    }
    rates[LINES.len()..].copy_from_slice(&lookups(folder.path()));
    rates
}

struct Bench {
    store: Store,
    other: PathBuf,
    amount: Amount,
    /// Number of things that hostile connections did.
    attacks: AtomicU64,
}

impl Bench {
    fn measure(&self, beside: Beside) -> [f64; ALL] {
        let path = self.store.mount.join("work");
        std::fs::create_dir(&path).unwrap();
        let folder = Folder::new(&path, self.amount, true);
        let over = AtomicBool::new(false);
        let rates = std::thread::scope(|scope| {
            let _connections = Connections { over: &over };
            let (count, hostile) = match beside {
                Beside::Silent(count) => (count, false),
                Beside::Hostile(count) => (count, true),
                Beside::Nobody | Beside::IdleMount => (0, false),
            };
            if matches!(beside, Beside::IdleMount) {
                mount_at(&self.store, &self.other);
            }
            if count > 0 {
                let over = &over;
                scope.spawn(move || {
                    let attacks = keep(&self.store.dir, count, hostile, over);
                    self.attacks.fetch_add(attacks, Relaxed);
                });
                std::thread::sleep(Duration::from_millis(500));
            }
            measure(&folder)
        });
        if matches!(beside, Beside::IdleMount) {
            self.store.ok(&["umount", self.other.to_str().unwrap()]);
        }
        std::fs::remove_dir_all(&path).unwrap();
        rates
    }
}

fn beside(runs: usize, connections: usize, amount: Amount) {
    let store = Store::new("beside", &["--drive-size", "1G"]);
    store.up();
    let other = store.home.join("other");
    let bench = Bench { store, other, amount, attacks: AtomicU64::new(0) };
    let others = [Beside::IdleMount, Beside::Silent(connections), Beside::Hostile(connections)];
    let mut shares = [const { Vec::new() }; 3].map(|_: Vec<f64>| vec![Vec::new(); ALL]);
    let mut alone = vec![Vec::new(); ALL];
    for _ in 0..runs {
        for (at, beside) in others.into_iter().enumerate() {
            // In pairs, because the machine may be busy with other things at any time.
            let (mine, theirs) = (bench.measure(Beside::Nobody), bench.measure(beside));
            for line in 0..ALL {
                alone[line].push(mine[line]);
                shares[at][line].push(theirs[line] / mine[line]);
            }
        }
    }
    let names = LINES.iter().map(|(name, ..)| *name).chain(LOOKUPS);
    println!("{:<38}{:>12}{:>12}{:>10}{:>10}", "", "alone, /s", "idle mount", "silent", "hostile");
    for (line, name) in names.enumerate() {
        let share = |at: usize| median(shares[at][line].clone()) * 100.0;
        let rate = median(alone[line].clone());
        println!("{name:<38}{rate:>12.0}{:>11.0}%{:>9.0}%{:>9.0}%", share(0), share(1), share(2));
    }
    let attacks = bench.attacks.load(Relaxed);
    println!("medians of {runs} pairs; {connections} connections; {attacks} attacks");
    assert!(attacks > 0, "nobody attacked");
    assert_eq!(bench.store.json(&["status"])["health"], "ok");
    bench.store.audit();
    bench.store.down();
}

#[test]
fn a_mount_works_beside_silent_and_hostile_connections() {
    if can_mount("a_mount_works_beside_silent_and_hostile_connections") {
        let amount = Amount { file_mib: 8, ops: 64, files: 64, syncs: 16, limit: Duration::from_secs(600) };
        beside(1, 200, amount);
    }
}

#[test]
#[ignore = "full form: cargo xtask show 14.5"]
fn show_beside() {
    if can_mount("show_beside") {
        let amount = Amount {
            file_mib: 128,
            ops: 4096,
            files: 4 * FILES,
            syncs: 200,
            limit: Duration::from_secs(600),
        };
        beside(RUNS, 1000, amount);
    }
}
