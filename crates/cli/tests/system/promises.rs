//! Tests of durability on return of a call: writes with sync flags, and a stop of the service.

use crate::remote_mount::{OPTIONS, mount_at, up_alone};
use crate::store::{Store, can_mount, wait_until};
use rustix::io::{IoSlice, ReadWriteFlags};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

const DSYNC: i32 = 0o10_000;
const SYNC: i32 = 0o4_010_000;
const DIRECT: i32 = 0o40_000;
const APPEND: i32 = 0o2000;

/// Files by open flags; the last field is true if each write passes RWF_DSYNC.
const WAYS: [(&str, i32, bool); 9] = [
    ("sync", SYNC, false),
    ("dsync", DSYNC, false),
    ("rwf-dsync", 0, true),
    ("append-sync", APPEND | SYNC, false),
    ("append-dsync", APPEND | DSYNC, false),
    ("append-rwf-dsync", APPEND, true),
    ("direct-sync", DIRECT | SYNC, false),
    ("direct-dsync", DIRECT | DSYNC, false),
    ("direct-rwf-dsync", DIRECT, true),
];

fn write_in_all_ways(mount: &Path) {
    let open = |name: &str, flags| {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).custom_flags(flags).open(mount.join(name)).unwrap()
    };
    let files = WAYS.map(|(name, flags, by_call)| (open(name, flags), by_call));
    File::open(mount).unwrap().sync_all().unwrap();
    for (mut file, by_call) in files {
        match by_call {
            false => file.write_all(&[7; 8192]).unwrap(),
            true => {
                let bytes = [IoSlice::new(&[7; 8192])];
                // Writes at the descriptor's position, as writev does.
                let written = rustix::io::pwritev2(&file, &bytes, u64::MAX, ReadWriteFlags::DSYNC).unwrap();
                assert_eq!(written, 8192);
            }
        }
    }
}

/// Regression: the kernel does not sync direct writes itself, so such writes were lost when the service was
/// killed.
#[test]
fn writes_with_sync_flags_are_durable_when_they_return() {
    if !can_mount("writes_with_sync_flags_are_durable_when_they_return") {
        return;
    }
    for beside_another in [false, true] {
        let store = Store::new(&format!("flags-{beside_another}"), &OPTIONS);
        store.up();
        let other = store.home.join("other");
        if beside_another {
            mount_at(&store, &other);
        }
        write_in_all_ways(&store.mount);
        store.kill();
        store.up();
        for (name, ..) in WAYS {
            let found = std::fs::read(store.mount.join(name)).unwrap();
            assert!(
                found == [7; 8192],
                "{name}, beside another mount: {beside_another}: {} bytes",
                found.len()
            );
        }
        if beside_another {
            store.ok(&["umount", other.to_str().unwrap()]);
        }
        store.down();
    }
}

/// Mounts in other processes have the newest sizes of the files they wrote. A stop has them sync before it
/// reports that everything is durable, and reports failure if one does not answer.
#[test]
fn a_stop_makes_durable_what_mounts_keep() {
    if !can_mount("a_stop_makes_durable_what_mounts_keep") {
        return;
    }
    let store = Store::new("stop", &OPTIONS);
    up_alone(&store, &[]);
    let pid = mount_at(&store, &store.mount);
    let other = store.home.join("other");
    mount_at(&store, &other);
    let write = |mount: &Path, name: &str| {
        let mut file = File::create(mount.join(name)).unwrap();
        file.write_all(&[3; 100_000]).unwrap();
        file
    };
    let open = [write(&store.mount, "open"), write(&other, "open-elsewhere")];
    drop([write(&store.mount, "closed"), write(&other, "closed-elsewhere")]);
    store.ok(&["down"]);
    up_alone(&store, &[]);
    for name in ["open", "closed", "open-elsewhere", "closed-elsewhere"] {
        let found = std::fs::read(other.join(name)).unwrap();
        assert!(found == [3; 100_000], "{name}: {} bytes", found.len());
    }
    // Everything was durable, so no loss is reported.
    open.iter().for_each(|file| file.sync_all().unwrap());
    drop(open);
    // Keeps no file open there: a child process closes its inherited descriptors, which would wait for the
    // stopped mount.
    drop(write(&store.mount, "lost"));
    let signal = |signal: &str| {
        assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
    };
    signal("-STOP");
    let output = store.run(&["down"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    signal("-CONT");
    assert!(!output.status.success() && said.contains("did not write back"), "{said}");
    up_alone(&store, &[]);
    for mount in [&other, &store.mount] {
        store.ok(&["umount", mount.to_str().unwrap()]);
    }
    store.ok(&["down"]);
}

const LINE: usize = 16;

fn line(number: u64) -> Vec<u8> {
    format!("{number:>15}\n").into_bytes()
}

/// Appends lines to a file by pwrite, with an fsync after every 40, until one fails or `over` is set. Returns
/// the number of lines written.
fn write_lines(path: &Path, over: &AtomicBool) -> u64 {
    let file = OpenOptions::new().create(true).read(true).write(true).truncate(true).open(path).unwrap();
    let mut taken = 0;
    while !over.load(Relaxed) {
        if file.write_all_at(&line(taken), taken * LINE as u64).is_err() {
            break;
        }
        taken += 1;
        if taken % 40 == 0 && file.sync_all().is_err() {
            break;
        }
    }
    taken
}

fn has_lines(path: &Path, taken: u64) {
    let found = std::fs::read(path).unwrap();
    let wrong = (0..taken).find(|number| {
        let at = *number as usize * LINE;
        found.get(at..at + LINE) != Some(&line(*number)[..])
    });
    let lines = found.len() / LINE;
    assert_eq!(wrong, None, "{}: of {taken} lines this is wrong first; it has {lines}", path.display());
}

/// Runs programs that write to files of `mount` while `stop` runs. Returns the number of lines that each file
/// took.
fn write_over(mount: &Path, stop: impl FnOnce()) -> Vec<u64> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let write = |number| write_lines(&mount.join(format!("lines{number}")), &over);
        let writers: Vec<_> = (0..4).map(|number| scope.spawn(move || write(number))).collect();
        std::thread::sleep(Duration::from_secs(1));
        stop();
        over.store(true, Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    })
}

/// Regression: a mount in use was only detached when the service or its own process stopped, and kept
/// accepting writes. Those after the last sync were lost, and the middle of files became zeros although an
/// fsync had succeeded.
#[test]
fn a_mount_that_is_stopped_in_use_loses_nothing() {
    if !can_mount("a_mount_that_is_stopped_in_use_loses_nothing") {
        return;
    }
    let store = Store::new("in-use", &OPTIONS);
    let check = |taken: Vec<u64>| {
        assert!(taken.iter().all(|taken| *taken > 0), "{taken:?}");
        for (number, taken) in taken.into_iter().enumerate() {
            has_lines(&store.mount.join(format!("lines{number}")), taken);
        }
    };
    for _ in 0..3 {
        store.up();
        let taken = write_over(&store.mount, || drop(store.ok(&["down"])));
        store.up();
        check(taken);
        store.down();
    }
    store.up();
    let other = store.home.join("other");
    for _ in 0..2 {
        let pid = mount_at(&store, &other);
        let taken = write_over(&other, || {
            assert!(Command::new("kill").arg(pid.to_string()).status().unwrap().success());
            wait_until("its session has ended", || {
                let sessions = store.json(&["status"])["sessions"].clone();
                sessions.as_array().unwrap().iter().all(|session| session["remote"] == false)
            });
        });
        check(taken);
    }
    store.down();
}

/// Regression: on a lone mount, a page that the kernel had locked for a read or a write waited for a lease,
/// which the stopping service refused.
#[test]
fn a_stop_waits_for_no_program_of_a_lone_mount() {
    if !can_mount("a_stop_waits_for_no_program_of_a_lone_mount") {
        return;
    }
    let store = Store::new("lone", &OPTIONS);
    up_alone(&store, &[]);
    mount_at(&store, &store.mount);
    let big = store.mount.join("big");
    std::fs::write(&big, vec![5; 8 << 20]).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(Relaxed) {
                    assert_eq!(std::fs::read(&big).unwrap().len(), 8 << 20);
                }
            });
        }
        // Programs continue after the next start, with whatever outcome of the stops; the outcome is checked
        // below.
        let mut stops = Vec::new();
        let taken = write_over(&store.mount, || {
            for _ in 0..2 {
                stops.push(store.run(&["down"]));
                up_alone(&store, &[]);
            }
        });
        over.store(true, Relaxed);
        assert!(stops.iter().all(|stop| stop.status.success()), "{stops:?}");
        for (number, taken) in taken.into_iter().enumerate() {
            let path = store.mount.join(format!("lines{number}"));
            // Everything was durable, so no loss is reported.
            File::open(&path).unwrap().sync_all().unwrap();
            has_lines(&path, taken);
        }
    });
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    store.ok(&["down"]);
}

/// Programs that go on writing at the mount point after the mount's process was killed do not prevent a new
/// mount.
#[test]
fn a_start_takes_the_place_of_a_mount_whose_programs_go_on() {
    if !can_mount("a_start_takes_the_place_of_a_mount_whose_programs_go_on") {
        return;
    }
    let store = Store::new("goes-on", &OPTIONS);
    store.up();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..3 {
            let (file, over) = (store.mount.join(format!("log{number}")), &over);
            // These writes fail while nothing is mounted.
            scope.spawn(move || {
                while !over.load(Relaxed) {
                    let _ = std::fs::write(&file, b"entry");
                }
            });
        }
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(300));
            store.kill();
            store.up();
        }
        over.store(true, Relaxed);
    });
    wait_until("a file of theirs", || store.mount.join("log0").exists());
    store.down();
    // Files that they wrote below the mount point do not belong to the store.
    std::fs::remove_dir_all(&store.mount).unwrap();
    std::fs::create_dir(&store.mount).unwrap();
}
