//! Test helper: a store in its own folder, run by the real program and removed when it is dropped.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

static NEXT: AtomicU32 = AtomicU32::new(0);
const LIVENESS: Duration = Duration::from_secs(120);

/// True if this machine can mount. Prints SKIPPED if not.
pub fn can_mount(test: &str) -> bool {
    let fuse = Path::new("/dev/fuse").exists();
    let helper = is_root() || Path::new("/usr/bin/fusermount3").exists();
    if !fuse || !helper {
        eprintln!("SKIPPED {test}: no /dev/fuse, or no fusermount3 for an ordinary user");
    }
    fuse && helper
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A size with a unit, such as `256M`, so many times.
fn times(size: &str, targets: &str) -> String {
    let (number, unit) = size.split_at(size.len() - 1);
    let [number, targets] = [number, targets].map(|text| text.parse::<u64>().expect("a number"));
    format!("{}{unit}", number * targets)
}

pub struct Store {
    pub home: PathBuf,
    pub dir: PathBuf,
    pub mount: PathBuf,
    options: Vec<String>,
}

impl Store {
    /// Creates a folder for a store. No instance runs yet. With `PENSTOCK_TEST_TARGETS` it gets that number
    /// of targets, each as large as the only one would be, unless the options say a number.
    pub fn new(name: &str, options: &[&str]) -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let base = std::env::var_os("PENSTOCK_TEST_DIR")
            .map_or(PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
        let home = base.join(format!("{name}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&home).unwrap();
        let mut options: Vec<String> = options.iter().map(|word| (*word).to_owned()).collect();
        if let Ok(targets) = std::env::var("PENSTOCK_TEST_TARGETS")
            && !options.iter().any(|word| word == "--targets")
        {
            if let Some(at) = options.iter().position(|word| word == "--drive-size") {
                options[at + 1] = times(&options[at + 1], &targets);
            }
            options.extend(["--targets".to_owned(), targets]);
        }
        Self { dir: home.join("store"), mount: home.join("mnt"), home, options }
    }

    pub fn program() -> Command {
        Command::new(env!("CARGO_BIN_EXE_penstock"))
    }

    /// Runs a command on the store.
    pub fn run(&self, words: &[&str]) -> Output {
        Self::program().arg("--dir").arg(&self.dir).args(words).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a command that must succeed. Returns its standard output.
    pub fn ok(&self, words: &[&str]) -> String {
        let output = self.run(words);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{words:?}: {out}{err}\n{}", self.log());
        out.into_owned()
    }

    pub fn json(&self, words: &[&str]) -> Value {
        let mut words = words.to_vec();
        words.push("--json");
        serde_json::from_str(&self.ok(&words)).unwrap()
    }

    pub fn up_output(&self, more: &[&str]) -> Output {
        let mut command = Self::program();
        command
            .arg("up")
            .arg(&self.dir)
            .arg("--mount")
            .arg(&self.mount)
            .arg("--detach")
            .args(&self.options)
            .args(more);
        command.stdin(Stdio::null()).output().unwrap()
    }

    /// Starts the store and mounts it.
    pub fn up(&self) {
        let output = self.up_output(&[]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned() + &self.log();
        assert!(output.status.success(), "{text}");
    }

    pub fn down(&self) {
        self.ok(&["down"]);
        assert!(!self.dir.join("run.json").exists(), "a stopped instance leaves no run.json");
    }

    /// Stops the instance and asserts that its log contains no error.
    pub fn down_in_peace(&self) {
        self.down();
        let log = self.log();
        assert!(!log.is_empty() && !log.contains("ERROR"), "{log}");
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("penstock.log")).unwrap_or_default()
    }

    pub fn pid(&self) -> Option<u32> {
        let run = std::fs::read(self.dir.join("run.json")).ok()?;
        Some(serde_json::from_slice::<Value>(&run).ok()?["pid"].as_u64()? as u32)
    }

    /// Sends kill -9 and waits until the process is gone.
    pub fn kill(&self) {
        let pid = self.pid().expect("it runs");
        assert!(Command::new("kill").arg("-9").arg(pid.to_string()).status().unwrap().success());
        wait_until("the process is gone", || !is_alive(pid));
    }

    pub fn drives(&self) -> Vec<(String, PathBuf)> {
        let drives = self.json(&["drive", "list"]);
        let one = |drive: &Value| {
            (drive["id"].as_str().unwrap().to_owned(), drive["path"].as_str().unwrap().into())
        };
        drives.as_array().unwrap().iter().map(one).collect()
    }

    pub fn replace_missing(&self) {
        let drives = self.json(&["drive", "list"]);
        for drive in drives.as_array().unwrap().iter().filter(|drive| drive["state"] != "online") {
            self.ok(&["drive", "replace", drive["id"].as_str().unwrap(), "--yes"]);
        }
        self.ok(&["array", "rebuild", "--wait"]);
        wait_until("the store is whole", || self.json(&["status"])["health"] == "ok");
    }

    /// Has the instance mount at a path, through its REST API.
    pub fn mount_by_rest(&self, path: &Path) -> Result<(), String> {
        let body = format!("{{\"path\": \"{}\"}}", path.display());
        let mut curl = Command::new("curl");
        curl.args([
            "-sS",
            "--fail-with-body",
            "--max-time",
            "60",
            "-H",
            "Content-Type: application/json",
            "-d",
            &body,
        ]);
        curl.arg("--unix-socket").arg(self.dir.join("api.sock")).arg("http://localhost/v1/mounts");
        let output = curl.stdin(Stdio::null()).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&said).into_owned()) }
    }

    pub fn free_bytes(&self) -> u64 {
        self.json(&["status"])["free_bytes"].as_u64().unwrap()
    }

    /// Removes all files. Asserts that all space is free again and nothing else is left.
    pub fn check_empty(&self, free_bytes: u64) {
        shell(&format!("rm -rf {0}/* && sync -f {0}", self.mount.display()));
        let written = || {
            let arrays = self.json(&["array", "list"]);
            let is_data = |array: &&Value| array["name"].as_str().unwrap().starts_with("data");
            let data = arrays.as_array().unwrap().iter().filter(is_data);
            data.map(|array| array["written_stripes"].as_u64().unwrap()).sum::<u64>()
        };
        wait_until("all space is back", || self.free_bytes() == free_bytes && written() == 0);
        let check = self.json(&["fs", "check"]);
        let left = ["inodes", "names", "removed_files", "chunks", "blocks"].map(|key| check[key].clone());
        assert_eq!(left, [1, 0, 0, 0, 0].map(Value::from), "only the root is left: {check}");
        self.audit();
    }

    /// Asserts everything that holds for a store at rest: clean check, clean scrub, full redundancy.
    pub fn audit(&self) {
        let check = self.json(&["fs", "check"]);
        assert_eq!(check["clean"], true, "{check}");
        let scrubs = self.json(&["array", "scrub", "--wait"]);
        assert!(scrubs.as_array().unwrap().iter().all(|scrub| scrub["clean"] == true), "{scrubs}");
        let status = self.json(&["status"]);
        let debt = ["redundancy_debt_stripes", "redundancy_debt_carriers"].map(|key| status[key].clone());
        assert_eq!(debt, [0, 0].map(Value::from), "{status}");
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(pid) = self.pid()
            && is_alive(pid)
        {
            let _ = Command::new("kill").arg("-9").arg(pid.to_string()).status();
            wait_until("the process is gone", || !is_alive(pid));
        }
        // Unmounts the mounts of separate processes too; these end when they are unmounted.
        let home = self.home.display().to_string();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let here =
            mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(|at| at.starts_with(&home));
        for at in here {
            if !Command::new("umount").args(["-l", at]).status().is_ok_and(|status| status.success()) {
                let _ = Command::new("fusermount3").args(["-u", "-z", at]).status();
            }
        }
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

/// Asserts that the command was refused in one to three lines that contain `words`.
pub fn refused(output: &Output, words: &[&str]) {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "it was refused: {text}");
    let lines: Vec<&str> =
        text.lines().filter(|line| !line.contains(" WARN ") && !line.contains("making a store")).collect();
    assert!((1..=3).contains(&lines.len()), "one to three lines: {text}");
    for word in words {
        assert!(text.contains(word), "the message has `{word}`: {text}");
    }
}

pub fn signal(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

pub fn is_alive(pid: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    state.is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim_start().starts_with('Z'))
}

/// Waits until `done` returns true. Panics after [`LIVENESS`], which is generous for every machine.
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LIVENESS, "{what}: never within {LIVENESS:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a shell script that must succeed. Returns its standard output.
pub fn shell(script: &str) -> String {
    let output = Command::new("bash").arg("-c").arg(format!("set -euo pipefail\n{script}")).output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}\n{err}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the SHA-256 of every file below a folder, by relative path.
pub fn manifest(folder: &Path) -> String {
    shell(&format!("cd {} && find . -type f -print0 | sort -z | xargs -0 -r sha256sum", folder.display()))
}

/// Pseudo-random numbers from a seed other than 0 (xorshift and a multiplication).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        bytes.iter_mut().for_each(|byte| *byte = self.below(256) as u8);
    }
}
