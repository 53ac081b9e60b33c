//! The store's folder: its lock, its token, and who runs on it.
//!
//! `lock` is held for the life of an instance and names its process; `run.json` says where a running instance is reached
//! and has another name when it stops. `api.sock` and `data.sock` are the doors for this machine; tokens (mode 0600) are
//! made where a listener on TCP asks for them.
//!
//! A killed process is not gone at once: its locks on the folder and on the drives fall when its last thread has ended
//! and the kernel has finished its I/O. Whoever starts the store again waits for that, and only for that: a lock of a
//! process that lives is refused at once.

use anyhow::{Context, Result, bail};
use penstock_base::hex;
use penstock_fabric::greeting::{TOKEN_BYTES, nonce};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a process that is ending may keep its locks.
pub const ENDING: Duration = Duration::from_secs(20);

/// What `run.json` is called while nothing runs: it keeps its space, so that a full host does not keep the store from being
/// started.
const SPARE: &str = "run.spare";
/// `run.json` has a multiple of this length, lines without anything at its end.
const RUN_BYTES: usize = 4096;
/// Bytes of the reason why a stop failed, so that `run.json` does not grow by it.
const REASON_BYTES: usize = 1000;
/// SIGKILL among the signals of a process, and the kernel's flag of one that is ending.
const SIGKILL: u64 = 1 << 8;
const PF_EXITING: u64 = 4;
/// Tokens: for administration over TCP, for metrics only, and for the data path, where nobody sends it.
pub const ADMIN_TOKEN: &str = "token";
pub const METRICS_TOKEN: &str = "token.metrics";
pub const DATA_TOKEN: &str = "token.data";
/// Default folder.
pub const DEFAULT: &str = "./penstock-data";

/// Where a running instance is reached.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub pid: u32,
    /// REST over TCP, where it was asked for.
    pub api_url: Option<String>,
    /// Clients of other processes over TCP, where it was asked for.
    pub tcp_address: Option<String>,
    pub mounts: Vec<String>,
    /// The end of its stop. None of one that runs, or ended without a stop.
    #[serde(default)]
    pub stop: Option<Stop>,
}

/// The end of the stop of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    Durable,
    /// Not everything is, for this reason.
    NotDurable(String),
}

/// A locked folder.
pub struct Folder {
    pub path: PathBuf,
    _lock: File,
}

impl Folder {
    /// Makes the folder if need be, and locks it.
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
        // In place, so that a full host does not keep the store from being started.
        let pid = std::process::id().to_string();
        file.write_all(pid.as_bytes()).and_then(|()| file.set_len(pid.len() as u64))?;
        Ok(Self { path, _lock: file })
    }

    /// A token: made once, 256 random bits, readable by the owner only.
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

    /// Says where the instance is reached.
    pub fn write_run(&self, run: &Run) -> Result<()> {
        let (spare, named) = (self.path.join(SPARE), self.path.join("run.json"));
        if !spare.exists() && named.exists() {
            std::fs::rename(&named, &spare)?;
        }
        run.write(&spare)?;
        std::fs::rename(spare, named)?;
        Ok(())
    }

    /// The instance is gone, or will be in a moment. Says for who asked for its stop how that ended.
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
            tracing::warn!(%error, "how the stop ended is not noted");
        }
        self.remove_run();
    }

    /// Nothing runs.
    pub fn remove_run(&self) {
        if let Err(error) = std::fs::rename(self.path.join("run.json"), self.path.join(SPARE)) {
            tracing::debug!(%error, "run.json was not there");
        }
    }
}

/// The end of the last instance's stop. None where it ended without one.
pub fn last_stop(dir: &Path) -> Option<Stop> {
    Run::read(&dir.join(SPARE)).ok()?.stop
}

/// Whether no instance holds the folder in `dir`.
pub fn is_free(dir: &Path) -> bool {
    let Ok(file) = File::open(dir.join("lock")) else { return true };
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

impl Run {
    fn read(path: &Path) -> Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(path)?)?)
    }

    /// Writes over what stands at `path`, in place and padded, so that a full host does not refuse it.
    fn write(&self, path: &Path) -> Result<()> {
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.resize(bytes.len().next_multiple_of(RUN_BYTES), b'\n');
        let mut file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        file.write_all(&bytes)?;
        file.set_len(bytes.len() as u64)?;
        Ok(())
    }

    /// Reads `run.json` in `dir`.
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

    /// Whether its process lives.
    pub fn is_alive(&self) -> bool {
        process_lives(self.pid)
    }
}

/// Whether a process lives: one that was killed does not, although it ends only when the kernel has finished its I/O, nor
/// one that has ended and waits for its parent.
fn process_lives(pid: u32) -> bool {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let (stat, status) = (read("stat"), read("status"));
    // What follows the name, which is in brackets and may hold anything: state, five numbers, flags.
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
