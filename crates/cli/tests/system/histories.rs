//! Histories of operations through three mounts, which porcupine (`tests/linearizable`) checks for
//! linearizability, if Go is installed: files that are written in place and by renames, appends, a name that
//! is made by one only, one that is renamed to the same name by one only, and a lock.
//!
//! While a history is made, the service is killed, connections break or stand still, and mounts are stopped
//! for less than their lease time. Two programs on each mount make nothing durable: what was acknowledged
//! stays as long as the mounts live. In every fourth history a mount is killed too. Then one program on each
//! mount makes each change durable before it goes on, and of what the killed one was doing the outcome is
//! not known.

use crate::line::Line;
use crate::remote_mount::{OPTIONS, kill, mount_in, remote_sessions, send, up_alone};
use crate::store::{Random, Store, can_mount, wait_until};
use rustix::io::Errno;
use rustix::process::Signal;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::Scope;
use std::time::{Duration, Instant};

const MOUNTS: usize = 3;
/// Programs in a history go on until nothing disturbs them any more, but not longer.
const ROUNDS_MOST: u64 = 50;
const ROUNDS_LEAST: u64 = 8;
const MODELS: [(&str, &str); 6] = [
    ("register", "in place"),
    ("register", "renamed"),
    ("log", "log"),
    ("name", "name"),
    ("lock", "flock"),
    ("moved", "moved"),
];
/// Histories that are checked together.
const CHECKED: u64 = 20;
/// Errors of operations on a mount that was killed.
const DEAD: [Errno; 2] = [Errno::NOTCONN, Errno::CONNABORTED];

/// Operations with their times and outcomes, in the format that the checker reads.
struct History {
    start: Instant,
    lines: Mutex<Vec<String>>,
    /// Number of operations that were tried again because a name had changed meanwhile.
    again: AtomicU64,
}

/// The client's mount was killed.
struct Dead;

impl History {
    fn new() -> Self {
        Self { start: Instant::now(), lines: Mutex::default(), again: AtomicU64::new(0) }
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    /// Prints what happens, for whoever looks for the reason of an error.
    fn tell(&self, what: &str) {
        println!("{} ms: {what}", self.now() / 1_000_000);
    }

    fn add(&self, program: &Program, model: usize, op: &str, value: &str, times: (u64, u64), out: &str) {
        let (model, key) = MODELS[model];
        let line = serde_json::json!({
            "model": model, "key": format!("{key} {}", program.number), "client": program.client,
            "call": times.0, "return": times.1, "op": op, "value": value, "out": out,
        });
        self.lines.lock().unwrap().push(line.to_string());
    }
}

/// A program that uses one mount.
struct Program<'a> {
    history: &'a History,
    /// The number of the history.
    number: u64,
    /// The number of the program, which no other one in the history has.
    client: u64,
    folder: PathBuf,
    /// True if it makes each change durable before it goes on.
    syncs: bool,
}

impl Program<'_> {
    /// Runs an operation and records its start, its end and its outcome.
    fn note(
        &self,
        model: usize,
        op: &str,
        value: &str,
        run: impl Fn() -> std::io::Result<String>,
    ) -> Result<String, Dead> {
        let history = self.history;
        let call = history.now();
        loop {
            match run() {
                Ok(out) => {
                    history.add(self, model, op, value, (call, history.now()), &out);
                    return Ok(out);
                }
                // The file that the name meant was replaced, and dropped, between two requests of the kernel.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::STALE) && op == "read" => {
                    history.again.fetch_add(1, Relaxed);
                }
                Err(error) => {
                    let is_dead = Errno::from_io_error(&error).is_some_and(|errno| DEAD.contains(&errno));
                    assert!(
                        is_dead && self.syncs,
                        "history {}: {op} of {:?}: {error}",
                        self.number,
                        MODELS[model]
                    );
                    history.add(self, model, op, value, (call, i64::MAX as u64), "?");
                    return Err(Dead);
                }
            }
        }
    }

    /// Makes the change of a file durable, if this program is one that syncs.
    fn sync(&self, file: &File) -> std::io::Result<String> {
        if self.syncs {
            file.sync_all()?;
        }
        Ok(String::new())
    }

    fn sync_names(&self) -> std::io::Result<String> {
        if self.syncs {
            File::open(&self.folder)?.sync_all()?;
        }
        Ok(String::new())
    }

    /// Works until `over`.
    fn live(&self, over: &AtomicBool) -> Result<(), Dead> {
        let open = |name: &str| {
            // The mount may be killed at once.
            OpenOptions::new().read(true).write(true).open(self.folder.join(name)).map_err(|_| Dead)
        };
        let (register, log, lock) = (open("register")?, open("log")?, open("lock")?);
        let append = OpenOptions::new().append(true).open(self.folder.join("log")).map_err(|_| Dead)?;
        let mut random = Random(1 + self.number * 100 + self.client);
        for round in 0..ROUNDS_MOST {
            if over.load(Relaxed) && round >= ROUNDS_LEAST {
                break;
            }
            let word = format!("{}-{round:0>5}", self.client);
            let text = |file: &File, len: usize| {
                let mut bytes = vec![0; len];
                let got = file.read_at(&mut bytes, 0)?;
                Ok(String::from_utf8(bytes[..got].to_vec()).unwrap())
            };
            match random.below(3) {
                0 => self.note(0, "write", &word, || {
                    register.write_all_at(word.as_bytes(), 0)?;
                    self.sync(&register)
                })?,
                _ => self.note(0, "read", "", || text(&register, 16))?,
            };
            match random.below(4) {
                0 => self.note(1, "write", &word, || self.replace(&word))?,
                _ => self.note(1, "read", "", || std::fs::read_to_string(self.folder.join("renamed")))?,
            };
            match random.below(8) {
                0 => drop(self.note(2, "append", &word, || {
                    (&append).write_all(word.as_bytes())?;
                    self.sync(&append)
                })?),
                1 => drop(self.note(2, "read", "", || text(&log, 1 << 16))?),
                _ => {}
            }
            match random.below(2) {
                0 => self.note(3, "create", "", || self.create("name"))?,
                _ => self.note(3, "unlink", "", || self.unlink("name"))?,
            };
            match random.below(6) {
                0 => self.note(5, "create", "", || self.create("old"))?,
                1 => self.note(5, "unlink", "", || self.unlink("moved"))?,
                _ => self.note(5, "move", "", || self.rename("old", "moved"))?,
            };
            self.take_turn(&lock, random.below(2) == 0)?;
            std::thread::sleep(Duration::from_micros(random.below(20_000)));
        }
        Ok(())
    }

    fn replace(&self, word: &str) -> std::io::Result<String> {
        let new = self.folder.join(format!("new-{}", self.client));
        std::fs::write(&new, word)?;
        self.sync(&File::open(&new)?)?;
        std::fs::rename(&new, self.folder.join("renamed"))?;
        self.sync_names()
    }

    fn create(&self, name: &str) -> std::io::Result<String> {
        match OpenOptions::new().write(true).create_new(true).open(self.folder.join(name)) {
            Ok(_) => self.sync_names().map(|_| "ok".into()),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok("exists".into()),
            Err(error) => Err(error),
        }
    }

    fn unlink(&self, name: &str) -> std::io::Result<String> {
        self.found(std::fs::remove_file(self.folder.join(name)))
    }

    fn rename(&self, old: &str, new: &str) -> std::io::Result<String> {
        self.found(std::fs::rename(self.folder.join(old), self.folder.join(new)))
    }

    /// The outcome of a change of a name that may not be there.
    fn found(&self, changed: std::io::Result<()>) -> std::io::Result<String> {
        match changed {
            Ok(()) => self.sync_names().map(|_| "ok".into()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok("none".into()),
            Err(error) => Err(error),
        }
    }

    fn take_turn(&self, lock: &File, tries: bool) -> Result<(), Dead> {
        let call = self.history.now();
        let turn = || {
            let got = match tries {
                true => self.note(4, "try", "", || match lock.try_lock() {
                    Ok(()) => Ok("ok".into()),
                    Err(TryLockError::WouldBlock) => Ok("held".into()),
                    Err(TryLockError::Error(error)) => Err(error),
                })?,
                false => self.note(4, "lock", "", || lock.lock().map(|()| "ok".into()))?,
            };
            if got == "ok" {
                let begin = self.history.now();
                lock.unlock().map_err(|_| Dead)?;
                self.history.add(self, 4, "unlock", "", (begin, self.history.now()), "");
            }
            Ok(())
        };
        turn().inspect_err(|Dead| {
            self.history.add(self, 4, "gone", "", (call, i64::MAX as u64), "");
        })
    }
}

/// A store and its mounts, each behind a line of its own.
struct Site {
    store: Store,
    lines: Vec<Line>,
    mounts: Vec<PathBuf>,
    pids: Mutex<Vec<u32>>,
}

impl Site {
    fn new(name: &str) -> Self {
        let store = Store::new(name, &OPTIONS);
        up_alone(&store, &[]);
        let folder = |at: usize| store.home.join(format!("l{at}"));
        let lines = (0..MOUNTS).map(|at| Line::new(&folder(at), &store.dir)).collect();
        let mounts: Vec<PathBuf> = (0..MOUNTS).map(|at| store.home.join(format!("m{at}"))).collect();
        let pids = (0..MOUNTS).map(|at| mount_in(&folder(at), &mounts[at])).collect();
        Self { lines, mounts, pids: Mutex::new(pids), store }
    }

    fn pid(&self, at: usize) -> u32 {
        self.pids.lock().unwrap()[at]
    }

    /// Kills a mount and mounts again at its place.
    fn kill(&self, at: usize) {
        kill("-9", self.pid(at));
        let gone = Command::new("umount").arg("-l").arg(&self.mounts[at]).status().unwrap();
        assert!(gone.success());
        let pid = mount_in(&self.store.home.join(format!("l{at}")), &self.mounts[at]);
        self.pids.lock().unwrap()[at] = pid;
    }

    /// Disturbs everything once.
    fn disturb(&self, random: &mut Random, restarts: bool, history: &History) {
        let at = random.below(MOUNTS as u64) as usize;
        // Less than the lease time, which is 3 s.
        let moment = Duration::from_millis(random.below(800));
        let kind = random.below(if restarts { 4 } else { 3 });
        let what = ["its link is cut", "its link stands still", "it is stopped", "the service is killed"];
        history.tell(&format!("mount {at}, {} ms: {}", moment.as_millis(), what[kind as usize]));
        match kind {
            0 => self.lines[at].cut(),
            1 => {
                self.lines[at].set(false);
                std::thread::sleep(moment);
                self.lines[at].set(true);
            }
            2 => {
                send(Signal::STOP, self.pid(at));
                std::thread::sleep(moment);
                send(Signal::CONT, self.pid(at));
            }
            _ => {
                self.store.kill();
                up_alone(&self.store, &[]);
            }
        }
    }

    /// Makes one history. Returns its lines.
    fn history(&self, number: u64) -> (Vec<String>, u64) {
        let mut random = Random(1 + number);
        let kills = number % 4 == 3;
        let name = format!("h{number}");
        let folder = self.mounts[0].join(&name);
        std::fs::create_dir(&folder).unwrap();
        for name in ["register", "renamed", "log", "lock"] {
            std::fs::write(folder.join(name), b"").unwrap();
        }
        if kills {
            // The mount that made them may be killed.
            let synced = Command::new("sync").arg("-f").arg(&folder).status().unwrap();
            assert!(synced.success());
        }
        let (history, over) = (History::new(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let start = |client: u64, at: usize| {
                start(scope, &history, &over, (number, client), (&self.mounts[at].join(&name), kills));
            };
            (0..MOUNTS).for_each(|at| start(at as u64, at));
            if !kills {
                (0..MOUNTS).for_each(|at| start((MOUNTS + at) as u64, at));
            }
            for event in 0..1 + random.below(3) {
                std::thread::sleep(Duration::from_millis(random.below(200)));
                match kills && event == 0 {
                    true => {
                        let at = random.below(MOUNTS as u64) as usize;
                        self.kill(at);
                        start((2 * MOUNTS + at) as u64, at);
                    }
                    false => self.disturb(&mut random, number.is_multiple_of(2), &history),
                }
            }
            over.store(true, Relaxed);
        });
        std::fs::remove_dir_all(&folder).unwrap();
        history.tell("the history ends");
        let again = history.again.into_inner();
        (history.lines.into_inner().unwrap(), again)
    }

    /// Stops everything. Asserts that the store is sound.
    fn end(self) {
        for mount in &self.mounts {
            self.store.ok(&["umount", mount.to_str().unwrap()]);
        }
        self.store.audit();
        self.store.down();
    }
}

fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    history: &'scope History,
    over: &'scope AtomicBool,
    (number, client): (u64, u64),
    (folder, syncs): (&Path, bool),
) {
    let program = Program { history, number, client, folder: folder.to_owned(), syncs };
    scope.spawn(move || {
        // Its mount was killed if it ends early.
        let _ = program.live(over);
    });
}

/// The program that checks histories.
struct Checker(PathBuf);

impl Checker {
    /// Builds it. Prints SKIPPED where that cannot be done.
    fn new(test: &str, home: &Path) -> Option<Self> {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/linearizable");
        let go = |words: &[&str]| Command::new("go").args(words).current_dir(source).output();
        match go(&["mod", "download"]) {
            Ok(fetched) if fetched.status.success() => {}
            Ok(fetched) => {
                let why = String::from_utf8_lossy(&fetched.stderr).into_owned();
                eprintln!("SKIPPED {test}: porcupine cannot be fetched: {}", why.trim());
                return None;
            }
            Err(error) => {
                eprintln!("SKIPPED {test}: Go does not run: {error}");
                return None;
            }
        }
        let program = home.join("checker");
        let built = go(&["build", "-o", program.to_str().unwrap(), "."]).unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        Some(Self(program))
    }

    /// Returns what it says, and true if all histories are linearizable.
    fn run(&self, lines: &[String]) -> (String, bool) {
        let file = self.0.with_extension("json");
        std::fs::write(&file, lines.join("\n")).unwrap();
        let checked = Command::new(&self.0).arg(&file).output().unwrap();
        let said = [checked.stdout, checked.stderr].concat();
        (String::from_utf8_lossy(&said).into_owned(), checked.status.success())
    }

    fn check(&self, lines: &[String], histories: u64) {
        let (said, good) = self.run(lines);
        let bad: Vec<&str> = said.lines().filter(|line| !line.ends_with(" Ok")).collect();
        if !good {
            // For the one who looks for the reason.
            for line in &bad {
                let group = line.split(':').next().unwrap();
                let (model, key) = group.split_once(' ').unwrap();
                let of = |line: &&String| {
                    line.contains(&format!("\"model\":\"{model}\""))
                        && line.contains(&format!("\"key\":\"{key}\""))
                };
                lines.iter().filter(of).for_each(|line| println!("{line}"));
            }
        }
        assert!(good && bad.is_empty(), "{bad:#?}");
        assert_eq!(said.lines().count() as u64, histories * MODELS.len() as u64, "a line for each model");
    }
}

fn histories(test: &str, name: &str, numbers: std::ops::Range<u64>) {
    if !can_mount(test) {
        return;
    }
    let site = Site::new(name);
    let Some(checker) = Checker::new(test, &site.store.home) else { return };
    let (mut lines, mut unchecked, mut operations, mut repeated) = (Vec::new(), 0, 0, 0);
    let start = Instant::now();
    for number in numbers.clone() {
        let (more, again) = site.history(number);
        lines.extend(more);
        unchecked += 1;
        repeated += again;
        if unchecked == CHECKED || number + 1 == numbers.end {
            checker.check(&lines, unchecked);
            operations += lines.len();
            if number + 1 < numbers.end {
                lines.clear();
            }
            unchecked = 0;
            let time = start.elapsed().as_secs();
            println!("{} histories, {operations} operations, {repeated} stale, {time} s", number + 1);
        }
    }
    // It must find an error: a read of a value that was not written.
    let wrong = lines.join("\n").replacen("\"op\":\"read\",\"out\":\"", "\"op\":\"read\",\"out\":\"wrong", 1);
    assert!(!checker.run(&[wrong]).1, "the checker finds an error");
    wait_until("killed mounts are gone", || remote_sessions(&site.store) == MOUNTS);
    site.end();
}

#[test]
fn histories_over_three_mounts_are_linearizable() {
    histories("histories_over_three_mounts_are_linearizable", "hist", 0..8);
}

/// Full form: `PENSTOCK_SEEDS=A..B` makes other histories.
#[test]
#[ignore = "long: with --ignored"]
fn campaign_of_histories() {
    histories("campaign_of_histories", "histories", penstock_sim::seeds(0..2000));
}
