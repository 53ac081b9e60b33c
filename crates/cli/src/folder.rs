//! The store's folder: its lock, its token, and who runs on it.
//!
//! `lock` is held for the life of an instance; `token` (mode 0600) is what the REST API asks for; `run.json` says
//! where a running instance is reached and is removed when it stops.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Default folder.
pub const DEFAULT: &str = "./penstock-data";

/// Where a running instance is reached.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Run {
    pub pid: u32,
    pub api_url: String,
    pub mounts: Vec<String>,
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
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(path.join("lock"))
            .with_context(|| format!("the folder {} cannot be used", path.display()))?;
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            let who = Run::load(&path).ok().map_or(String::new(), |run| format!(" (process {})", run.pid));
            bail!(
                "{} is in use by another instance{who}\nuse it with `penstock --dir {} status`, or stop it with `penstock down {}`",
                path.display(),
                path.display(),
                path.display()
            );
        }
        Ok(Self { path, _lock: file })
    }

    /// The token: made once, 256 random bits, readable by the owner only.
    pub fn token(&self) -> Result<String> {
        let path = self.path.join("token");
        if let Ok(token) = std::fs::read_to_string(&path)
            && token.trim().len() == 64
        {
            return Ok(token.trim().to_owned());
        }
        let mut random = [0; 32];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        let token: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&path)?;
        writeln!(file, "{token}")?;
        file.sync_all()?;
        Ok(token)
    }

    /// Says where the instance is reached.
    pub fn write_run(&self, run: &Run) -> Result<()> {
        let beside = self.path.join("run.new");
        std::fs::write(&beside, serde_json::to_vec_pretty(run)?)?;
        std::fs::rename(beside, self.path.join("run.json"))?;
        Ok(())
    }

    /// The instance is gone.
    pub fn remove_run(&self) {
        if let Err(error) = std::fs::remove_file(self.path.join("run.json")) {
            tracing::debug!(%error, "run.json was not there");
        }
    }
}

/// Whether no instance holds the folder in `dir`.
pub fn is_free(dir: &Path) -> bool {
    let Ok(file) = File::open(dir.join("lock")) else { return true };
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok()
}

impl Run {
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
        let pid = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw);
        pid.is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
    }
}
