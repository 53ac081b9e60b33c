//! Runs a mixed load on two mounts. Contents are not checked while it runs: the mounts must not hang, and
//! must agree at the end.

use crate::remote_mount::{mount_at, up_alone};
use crate::store::can_mount;
use crate::two_mounts::{end, two};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PROGRAM: &str = include_str!("mixed.py");
const PROGRAMS: usize = 20;
/// A program that runs this much longer than planned is considered hung.
const PATIENCE: Duration = Duration::from_secs(120);
const BETWEEN_KILLS: Duration = Duration::from_secs(4);
const FILES: [&str; 3] = ["one", "two", "three"];

/// The kernel's numbers of the FUSE connections. Call before anything can hang.
fn connections(mounts: &[PathBuf; 2]) -> Vec<u64> {
    use std::os::unix::fs::MetadataExt;
    mounts.iter().map(|mount| rustix::fs::minor(mount.metadata().unwrap().dev()).into()).collect()
}

/// Aborts all requests of hung mounts, so that their programs can end.
fn abort(connections: &[u64], control: &Path) {
    std::fs::create_dir_all(control).unwrap();
    let mounted = Command::new("mount").args(["-t", "fusectl", "none"]).arg(control).status();
    for connection in connections {
        let told = std::fs::write(control.join(connection.to_string()).join("abort"), "1");
        eprintln!("connection {connection}: {mounted:?} {told:?}");
    }
    drop(Command::new("umount").arg(control).status());
}

fn ended(programs: &mut [Child]) -> bool {
    programs.iter_mut().all(|program| program.try_wait().unwrap().is_some())
}

fn mixed_load(name: &str, seconds: u64, seed: usize, kills: bool) {
    if !can_mount(name) {
        return;
    }
    if !Command::new("python3").arg("-V").output().is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED {name}: no python3");
        return;
    }
    let (store, mounts, _) = two(name);
    if kills {
        // The instance's own mount would end with the instance.
        store.ok(&["umount", mounts[0].to_str().unwrap()]);
        mount_at(&store, &mounts[0]);
    }
    let connections = connections(&mounts);
    FILES.iter().for_each(|file| std::fs::write(mounts[0].join(file), [1; 50_000]).unwrap());
    let start = Instant::now();
    let program = |number: usize| {
        let mut program = Command::new("python3");
        program.args(["-c", PROGRAM]).arg(&mounts[number % 2]);
        program.args([seconds.to_string(), (seed + number).to_string()]);
        program.arg(if kills { "kills" } else { "" });
        let output = File::create(store.home.join(format!("program-{number}"))).unwrap();
        program.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
        program.spawn().unwrap()
    };
    let mut programs: Vec<Child> = (0..PROGRAMS).map(program).collect();
    let mut next_kill = BETWEEN_KILLS;
    let patience = Duration::from_secs(seconds) + PATIENCE;
    while !ended(&mut programs) {
        if start.elapsed() > patience {
            abort(&connections, &store.home.join("control"));
            panic!("programs hang on two mounts");
        }
        std::thread::sleep(Duration::from_millis(100));
        if kills && start.elapsed() > next_kill {
            store.kill();
            up_alone(&store, &[]);
            next_kill = start.elapsed() + BETWEEN_KILLS;
        }
    }
    let mut deeds = 0;
    for (number, program) in programs.iter_mut().enumerate() {
        let said = std::fs::read_to_string(store.home.join(format!("program-{number}"))).unwrap();
        assert!(program.wait().unwrap().success(), "program {number}: {said}");
        deeds += said.split(' ').next().and_then(|count| count.parse::<u64>().ok()).unwrap();
    }
    for file in FILES {
        let found = mounts.each_ref().map(|mount| std::fs::read(mount.join(file)).unwrap());
        assert!(found[0] == found[1], "{file}: {} and {} bytes", found[0].len(), found[1].len());
        for mount in &mounts {
            let synced = File::open(mount.join(file)).unwrap().sync_all();
            assert!(synced.is_ok() || kills, "{synced:?}");
        }
    }
    eprintln!("{deeds} operations in {:?}", start.elapsed());
    assert!(deeds > 0);
    if kills {
        store.ok(&["umount", mounts[0].to_str().unwrap()]);
        store.ok(&["umount", mounts[1].to_str().unwrap()]);
        store.ok(&["down"]);
        return;
    }
    end(&store, &mounts);
}

#[test]
fn two_mounts_go_on_under_a_mixed_load() {
    mixed_load("two_mounts_go_on_under_a_mixed_load", 8, 0, false);
}

/// Regression: after a restart the service did not know the mounts' leases. Each mount dropped pages that
/// were locked for reads which waited for the other one.
#[test]
fn two_mounts_go_on_under_a_mixed_load_and_kills_of_the_service() {
    mixed_load("two_mounts_go_on_under_a_mixed_load_and_kills_of_the_service", 20, 500, true);
}

#[test]
#[ignore = "long: with --ignored, PENSTOCK_SECONDS says how long"]
fn campaign_of_mixed_load() {
    let seconds = std::env::var("PENSTOCK_SECONDS").map_or(600, |text| text.parse().unwrap());
    mixed_load("campaign_of_mixed_load", seconds / 2, 1000, false);
    mixed_load("campaign_of_mixed_load", seconds / 2, 2000, true);
}
