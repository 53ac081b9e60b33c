//! Tests databases on mounts while the service is killed: everything reported as committed must survive.

use crate::campaign;
use crate::remote_mount::{OPTIONS, mount_at, up_alone};
use crate::store::{Store, can_mount};
use std::fs::File;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const SQLITE: &str = include_str!("sqlite.py");
const POSTGRES: &str = include_str!("postgres.py");
const POSTGRES_PROGRAMS: &str = "/usr/lib/postgresql";
const BETWEEN_KILLS: Duration = Duration::from_secs(5);
/// A program that runs this much longer than planned is considered hung.
const PATIENCE: Duration = Duration::from_secs(300);

fn runs(program: &str, words: &[&str]) -> bool {
    let output = Command::new(program).args(words).output();
    output.is_ok_and(|output| output.status.success())
}

/// Kills and restarts the service `kills` times, then waits for the programs.
fn kill_under(store: &Store, kills: u64, programs: &mut [Child]) {
    for _ in 0..kills {
        std::thread::sleep(BETWEEN_KILLS);
        store.kill();
        up_alone(store, &[]);
    }
    let start = Instant::now();
    while !programs.iter_mut().all(|program| program.try_wait().unwrap().is_some()) {
        assert!(start.elapsed() < PATIENCE, "a database hangs");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Seconds that a program runs: enough for `kills` kills, with a margin before and after them.
fn seconds(kills: u64) -> String {
    (BETWEEN_KILLS.as_secs() * (kills + 1) + kills).to_string()
}

fn sqlite(store: &Store, database: &Path, words: [&str; 3]) -> Child {
    let mut program = Command::new("python3");
    program.args(["-c", SQLITE]).arg(database).args(words);
    let output = File::create(store.home.join(format!("said-{}", words[0]))).unwrap();
    program.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output).spawn().unwrap()
}

/// Runs two SQLite writers on each of three mounts.
fn sqlite_on_three_mounts(name: &str, kills: u64) {
    if !can_mount(name) {
        return;
    }
    if !runs("python3", &["-c", "import sqlite3"]) {
        eprintln!("SKIPPED {name}: no python3 with sqlite3");
        return;
    }
    let store = Store::new(name, &OPTIONS);
    up_alone(&store, &[]);
    let mounts: [PathBuf; 3] = [store.mount.clone(), store.home.join("other"), store.home.join("third")];
    for mount in &mounts {
        mount_at(&store, mount);
    }
    let said = |who: &str| std::fs::read_to_string(store.home.join(format!("said-{who}"))).unwrap();
    let made = sqlite(&store, &mounts[0].join("db"), ["maker", "make", ""]).wait().unwrap();
    assert!(made.success(), "{}", said("maker"));
    let notes = |who: &str| store.home.join(format!("notes-{who}")).display().to_string();
    let writers = ["a", "b", "c", "d", "e", "f"];
    let run = |seconds: &str| -> Vec<Child> {
        let writer = |(number, who): (usize, &&str)| {
            sqlite(&store, &mounts[number % 3].join("db"), [who, seconds, &notes(who)])
        };
        writers.iter().enumerate().map(writer).collect()
    };
    let outcome = |mut programs: Vec<Child>| {
        for (program, who) in programs.iter_mut().zip(writers) {
            assert!(program.wait().unwrap().success(), "{who}: {}", said(who));
            eprintln!("{who}: {}", said(who).trim());
        }
    };
    let mut programs = run(&seconds(kills));
    kill_under(&store, kills, &mut programs);
    outcome(programs);
    outcome(run("check"));
    for mount in &mounts {
        store.ok(&["umount", mount.to_str().unwrap()]);
    }
    store.audit();
    store.down();
}

/// Runs Postgres on a mount with its own process, which outlives the service. Skips where there is no
/// Postgres.
fn postgres(name: &str, kills: u64) {
    if !can_mount(name) {
        return;
    }
    let newest = || {
        let found = std::fs::read_dir(POSTGRES_PROGRAMS).ok()?;
        let mut versions: Vec<PathBuf> = found.map(|entry| entry.unwrap().path().join("bin")).collect();
        versions.sort();
        versions.pop().filter(|programs| programs.join("initdb").exists())
    };
    let Some(programs) = newest() else {
        eprintln!("SKIPPED {name}: no Postgres in {POSTGRES_PROGRAMS}");
        return;
    };
    let number = |words: &[&str]| -> Option<u32> {
        let output = Command::new("id").args(words).arg("postgres").output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    };
    let (Some(uid), Some(gid), true) =
        (number(&["-u"]), number(&["-g"]), rustix::process::geteuid().is_root())
    else {
        eprintln!("SKIPPED {name}: not root, or no user postgres");
        return;
    };
    let store = Store::new(name, &OPTIONS);
    up_alone(&store, &[]);
    mount_at(&store, &store.mount);
    let (data, notes) =
        (store.mount.join("data"), std::env::temp_dir().join(format!("{name}-{}", std::process::id())));
    std::fs::create_dir(&data).unwrap();
    File::create(&notes).unwrap();
    [&data, &notes].into_iter().for_each(|path| chown(path, Some(uid), Some(gid)).unwrap());
    let output = File::create(store.home.join("said")).unwrap();
    let mut program = Command::new("setpriv");
    program.args([format!("--reuid={uid}"), format!("--regid={gid}"), "--clear-groups".into()]);
    // The system's Python, which other users can execute.
    program
        .args(["/usr/bin/python3", "-c", POSTGRES])
        .arg(&data)
        .arg(seconds(kills))
        .arg(&notes)
        .arg(&programs);
    let program = program.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
    let mut running = [program.current_dir("/").spawn().unwrap()];
    // initdb does not tolerate storage that loses writes: killing begins after it has finished.
    while running[0].try_wait().unwrap().is_none() && notes.metadata().unwrap().len() == 0 {
        std::thread::sleep(Duration::from_millis(100));
    }
    kill_under(&store, kills, &mut running);
    let said = std::fs::read_to_string(store.home.join("said")).unwrap();
    std::fs::remove_file(&notes).unwrap();
    assert!(running[0].wait().unwrap().success(), "{said}");
    eprintln!("{}", said.trim());
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    store.audit();
    store.down();
}

#[test]
fn sqlite_keeps_its_commits_from_three_mounts_over_kills() {
    sqlite_on_three_mounts("sqlite_keeps_its_commits_from_three_mounts_over_kills", 2);
}

#[test]
#[ignore = "long: with --ignored, PENSTOCK_KILLS says how many kills"]
fn campaign_of_sqlite() {
    sqlite_on_three_mounts("campaign_of_sqlite", campaign::number("PENSTOCK_KILLS", 20));
}

#[test]
#[ignore = "long, and needs Postgres: with --ignored, PENSTOCK_KILLS says how many kills"]
fn campaign_of_postgres() {
    postgres("campaign_of_postgres", campaign::number("PENSTOCK_KILLS", 20));
}
