//! Promises to a program whose call returns: writes that are synced by their own flags, and a stop of the service.

use crate::remote_mount::{OPTIONS, mount_at, up_alone};
use crate::store::{Store, can_mount, wait_until};
use rustix::io::{IoSlice, ReadWriteFlags};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

const DSYNC: i32 = 0o10_000;
const SYNC: i32 = 0o4_010_000;
const DIRECT: i32 = 0o40_000;
const APPEND: i32 = 0o2000;

/// Files by how they are opened, and whether each write has RWF_DSYNC.
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
                // As writev: where the descriptor is.
                let written = rustix::io::pwritev2(&file, &bytes, u64::MAX, ReadWriteFlags::DSYNC).unwrap();
                assert_eq!(written, 8192);
            }
        }
    }
}

/// The kernel syncs no write by itself that passes its pages by: such writes were gone with the service.
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

/// Mounts of other processes know the size of what they wrote last. A stop of the service asks them for it before it says that
/// everything is durable, and does not say so where one gives no answer.
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
    // All of it was durable: nothing is told as lost.
    open.iter().for_each(|file| file.sync_all().unwrap());
    drop(open);
    // With nothing left open there: a process that is started closes it on its way, which would wait for the stopped one.
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

/// Programs that go on writing where a mount was, after its process was killed, do not keep it from being started again.
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
            // While nobody serves the mount these fail.
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
    // What they wrote beside the mount is not the store's.
    std::fs::remove_dir_all(&store.mount).unwrap();
    std::fs::create_dir(&store.mount).unwrap();
}
