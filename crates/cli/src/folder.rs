//! The store's folder: its lock, its tokens, and `run.json`, which describes the running instance.
//!
//! An instance holds `lock` while it lives and writes its process id into it. `run.json` contains the
//! addresses of a running instance; it is renamed when the instance stops. `api.sock` and `data.sock` serve
//! this machine. Tokens (mode 0600) are created when a TCP listener needs them.
//!
//! A killed process does not end immediately: its locks on the folder and the drives are released when its
//! last thread has ended and the kernel has finished its I/O. A new start waits for that only. A lock of a
//! live process is an error without waiting.

use anyhow::{Context, Result, bail};
use penstock_base::hex;
use penstock_fabric::greeting::{TOKEN_BYTES, nonce};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time that an ending process may keep its locks.
pub const ENDING: Duration = Duration::from_secs(20);

/// Log of the background process, and of the previous one.
pub const LOGS: [&str; 2] = ["penstock.log", "penstock.1.log"];
/// Name of `run.json` while no instance runs. The file keeps its blocks, so that the store can start when the
/// host is full.
const SPARE: &str = "run.spare";
/// The length of `run.json` is a multiple of this; newlines fill it up.
const RUN_BYTES: usize = 4096;
/// Maximum length in bytes of the recorded reason of a failed stop, which bounds the size of `run.json`.
const REASON_BYTES: usize = 1000;
/// Bit of SIGKILL in a process's masks of pending signals, and the kernel's flag of a process that is ending.
const SIGKILL: u64 = 1 << 8;
const PF_EXITING: u64 = 4;
/// Token files: for administration over TCP, for metrics only, and for the data path, where it is proven but
/// never sent.
pub const ADMIN_TOKEN: &str = "token";
pub const METRICS_TOKEN: &str = "token.metrics";
pub const DATA_TOKEN: &str = "token.data";
/// Folder of the store if none is named.
pub const DEFAULT: &str = "./penstock-data";

/// Returns the store's folder from a command's own argument and `--dir`, of which at most one may be given.
pub fn named(argument: Option<PathBuf>, dir: Option<PathBuf>) -> Result<PathBuf> {
    match (argument, dir) {
        (Some(argument), Some(dir)) if argument != dir => {
            bail!("two folders are named, {} and by --dir {}: name one", argument.display(), dir.display())
        }
        (argument, dir) => Ok(argument.or(dir).unwrap_or_else(|| DEFAULT.into())),
    }
}

/// Contents of `run.json`: the process of the instance and its addresses.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub pid: u32,
    /// URL of REST over TCP. None without `--port`.
    pub api_url: Option<String>,
    /// Address for remote clients over TCP. None without `--tcp`.
    pub tcp_address: Option<String>,
    pub mounts: Vec<String>,
    /// Outcome of the stop. None while the instance runs, or if it ended without a stop.
    #[serde(default)]
    pub stop: Option<Stop>,
}

/// Outcome of the stop of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    Durable,
    /// Some data is not durable, for this reason.
    NotDurable(String),
}

/// A folder with its lock held until this is dropped.
pub struct Folder {
    pub path: PathBuf,
    _lock: File,
}

impl Folder {
    /// Creates the folder if it does not exist, and locks it. Fails if another live process holds the lock,
    /// or after [`ENDING`].
    pub fn lock(path: &Path) -> Result<Self> {
        std::fs::create_dir_all(path)
            .with_context(|| format!("the folder {} cannot be made", path.display()))?;
        let path = path.canonicalize()?;
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(path.join("lock"))
            .with_context(|| format!("the folder {} cannot be used", path.display()))?;
        let start = Instant::now();
        while rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            let holder = std::fs::read_to_string(path.join("lock")).unwrap_or_default().trim().parse().ok();
            if holder.is_some_and(process_lives) || start.elapsed() > ENDING {
                let who = holder.map_or(String::new(), |pid: u32| format!(" (process {pid})"));
                bail!(
                    "{} is in use by another instance{who}\nuse it with `penstock --dir {} status`, or stop it with `penstock down {}`",
                    path.display(),
                    path.display(),
                    path.display()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        // Writes in place, so that the store can start when the host is full.
        let pid = std::process::id().to_string();
        file.write_all(pid.as_bytes()).and_then(|()| file.set_len(pid.len() as u64))?;
        Ok(Self { path, _lock: file })
    }

    /// Returns the token in the file `name`. Creates 256 random bits on first use, readable by the owner
    /// only. Replaces a token that other users could read.
    pub fn token(&self, name: &str) -> Result<String> {
        let path = self.path.join(name);
        let cannot = || format!("the token {} cannot be kept", path.display());
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true).mode(0o600);
        let mut file = options.open(&path).with_context(cannot)?;
        let mode = file.metadata()?.permissions().mode();
        if mode & 0o077 != 0 {
            tracing::warn!("{} could be read by others: it is replaced", path.display());
            file.set_permissions(Permissions::from_mode(0o600)).with_context(cannot)?;
            file.set_len(0)?;
        }
        let mut found = String::new();
        if file.read_to_string(&mut found).is_ok() && found.trim().len() == TOKEN_BYTES {
            return Ok(found.trim().to_owned());
        }
        let token = hex(&nonce().context("no random bytes")?);
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{token}").and_then(|()| file.sync_all()).with_context(cannot)?;
        Ok(token)
    }

    /// Publishes the running instance in `run.json`.
    pub fn write_run(&self, run: &Run) -> Result<()> {
        let (spare, named) = (self.path.join(SPARE), self.path.join("run.json"));
        if !spare.exists() && named.exists() {
            std::fs::rename(&named, &spare)?;
        }
        run.write(&spare)?;
        std::fs::rename(spare, named)?;
        Ok(())
    }

    /// Records the outcome of the stop for the process that asked for it, and withdraws `run.json`. Called
    /// when the instance is about to end.
    pub fn end_run(&self, stop: Result<(), &str>) {
        let named = self.path.join("run.json");
        if !named.exists() {
            return;
        }
        let stop = match stop {
            Ok(()) => Stop::Durable,
            Err(why) => Stop::NotDurable(why[..why.floor_char_boundary(REASON_BYTES)].to_owned()),
        };
        let said = Run::read(&named).and_then(|run| Run { stop: Some(stop), ..run }.write(&named));
        if let Err(error) = said {
            tracing::warn!(%error, "run.json does not record how the stop ended");
        }
        self.remove_run();
    }

    /// Withdraws `run.json`: no instance runs.
    pub fn remove_run(&self) {
        if let Err(error) = std::fs::rename(self.path.join("run.json"), self.path.join(SPARE)) {
            tracing::debug!(%error, "run.json was not there");
        }
    }
}

/// Returns the outcome of the last instance's stop. None if it ended without one.
pub fn last_stop(dir: &Path) -> Option<Stop> {
    Run::read(&dir.join(SPARE)).ok()?.stop
}

/// True if no instance holds the lock of the folder `dir`.
pub fn is_free(dir: &Path) -> bool {
    let Ok(file) = File::open(dir.join("lock")) else { return true };
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

impl Run {
    fn read(path: &Path) -> Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }

    /// Overwrites the file at `path` in place, padded, so that this works when the host is full.
    fn write(&self, path: &Path) -> Result<()> {
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.resize(bytes.len().next_multiple_of(RUN_BYTES), b'\n');
        let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        file.write_all(&bytes)?;
        file.set_len(bytes.len() as u64)?;
        Ok(())
    }

    /// Reads `run.json` in `dir`. Fails with advice if no instance runs.
    pub fn load(dir: &Path) -> Result<Self> {
        let bytes = match std::fs::read(dir.join("run.json")) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                bail!("no instance runs on {}; `penstock up {}` starts one", dir.display(), dir.display())
            }
            Err(error) => {
                return Err(error).with_context(|| format!("{}/run.json cannot be read", dir.display()));
            }
        };
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// True if the instance's process is alive.
    pub fn is_alive(&self) -> bool {
        process_lives(self.pid)
    }
}

/// True if the process is alive. A killed process is not, although it ends only when the kernel has finished
/// its I/O; nor is a zombie that waits for its parent.
fn process_lives(pid: u32) -> bool {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let (stat, status) = (read("stat"), read("status"));
    // After the name, which is in brackets and may contain any byte, follow the state, five numbers and the
    // flags.
    let mut words = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let state = words.next().unwrap_or("X");
    let flags: u64 = words.nth(5).and_then(|flags| flags.parse().ok()).unwrap_or(0);
    let pending = ["SigPnd:", "ShdPnd:"].iter().any(|name| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name));
        mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
            .is_some_and(|mask| mask & SIGKILL != 0)
    });
    !matches!(state, "Z" | "X" | "x") && flags & PF_EXITING == 0 && !pending
}
