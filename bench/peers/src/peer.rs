//! A running peer of the comparison: its folder, and the processes that do its work.

use crate::guard::Guard;
use crate::lines::PeerId;
use crate::proc::{Processes, drop_caches};
use anyhow::{Context, Result, bail};
use penstock_bench::files::{Amount, Folder};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for the start of a peer.
pub(crate) const READY: Duration = Duration::from_secs(60);

/// Guards, undone in reverse order when they are dropped.
#[derive(Debug, Default)]
pub(crate) struct Held(Vec<Guard>);

impl Held {
    pub(crate) fn keep(&mut self, guard: Guard) {
        self.0.push(guard);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// A file system that is compared, running.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    pub(crate) version: String,
    pub(crate) folder: Folder,
    /// True if the folder is a mount of its own, whose caches can be dropped.
    pub(crate) is_mount: bool,
    pub(crate) processes: Processes,
    /// Guards of the peer, undone when it is dropped.
    pub(crate) _held: Held,
}

impl Peer {
    /// Drops the kernel's caches of the peer's mount. Fails if the peer has no mount of its own.
    pub(crate) fn drop_caches(&self) -> Result<()> {
        match self.is_mount {
            true => drop_caches(self.folder.path()),
            false => bail!("{} is no mount of its own", self.folder.path().display()),
        }
    }

    /// Makes written data durable and waits until the peer is idle.
    pub(crate) fn settle(&self) {
        // Not every file system supports fsync of a folder: the one that does nothing rejects it.
        let _ = std::fs::File::open(self.folder.path()).and_then(|folder| folder.sync_all());
        self.processes.settle();
    }

    /// Starts the FUSE file system that does nothing, in its own process so that its processor time is known.
    pub(crate) fn nothing(home: &Path, amount: Amount) -> Result<Self> {
        let mut held = Held::default();
        let mount = home.join("nothing");
        std::fs::create_dir_all(&mount)?;
        held.keep(Guard::mount(&mount)?);
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("nothing").arg(&mount).stdin(Stdio::null()).stdout(Stdio::piped());
        let (mut child, guard) = Guard::process(&mut command)?;
        held.keep(guard);
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("its output is a pipe")?).read_line(&mut line)?;
        if line.trim() != "mounted" {
            bail!("it does not mount");
        }
        Ok(Self {
            id: PeerId::Nothing,
            version: "FUSE by fuser, four threads".into(),
            folder: Folder::new(&mount, amount, false),
            is_mount: true,
            processes: Processes::One(child.id()),
            _held: held,
        })
    }

    /// Makes a folder on the disk's own file system.
    pub(crate) fn disk(home: &Path, amount: Amount) -> Result<Self> {
        let path = home.join("own");
        std::fs::create_dir_all(&path)?;
        Ok(Self {
            id: PeerId::Disk,
            version: crate::proc::filesystem_of(&path)?,
            folder: Folder::new(&path, amount, true),
            is_mount: false,
            processes: Processes::None,
            _held: Held::default(),
        })
    }
}

/// Serves the file system of [`Peer::nothing`] until the process is ended.
pub(crate) fn serve_nothing(mount: &Path) -> Result<()> {
    let session = penstock_fuse::mount_null(mount)?;
    println!("mounted");
    session.join()?;
    Ok(())
}

/// A store of Penstock that the real program runs.
#[derive(Debug)]
pub(crate) struct Store {
    program: PathBuf,
    pub(crate) dir: PathBuf,
    pub(crate) mount: PathBuf,
    drive_size: String,
    /// The default if none.
    targets: Option<u16>,
    pub(crate) process: u32,
    held: Held,
}

impl Store {
    /// Makes a store 4+2 in `home`, of so many targets, or the default, starts it and mounts it.
    pub(crate) fn start(
        program: &Path,
        home: &Path,
        name: &str,
        drive_mib: u64,
        targets: Option<u16>,
    ) -> Result<Self> {
        let mut store = Self {
            program: program.to_owned(),
            dir: home.join(name),
            mount: home.join(format!("{name}-mount")),
            drive_size: format!("{drive_mib}M"),
            targets,
            process: 0,
            held: Held::default(),
        };
        store.held.keep(Guard::folder(&store.dir)?);
        store.up()?;
        Ok(store)
    }

    /// Starts the program and waits until it serves. An earlier process must have ended.
    fn up(&mut self) -> Result<()> {
        std::fs::create_dir_all(&self.mount)?;
        let log = std::fs::File::create(self.dir.join("log"))?;
        let mut command = Command::new(&self.program);
        command.arg("up").arg(&self.dir).args([
            "--port",
            "0",
            "--code",
            "4+2",
            "--drive-size",
            &self.drive_size,
        ]);
        command.args(self.targets.iter().flat_map(|targets| ["--targets".to_owned(), targets.to_string()]));
        command.arg("--mount").arg(&self.mount);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        self.held.keep(Guard::mount(&self.mount)?);
        let (mut child, guard) = Guard::process(&mut command)?;
        self.held.keep(guard);
        self.process = child.id();
        let start = Instant::now();
        loop {
            let run = std::fs::read_to_string(self.dir.join("run.json")).unwrap_or_default();
            let run: serde_json::Value = serde_json::from_str(&run).unwrap_or_default();
            if run["pid"].as_u64() == Some(u64::from(self.process)) {
                return Ok(());
            }
            if child.try_wait()?.is_some() || start.elapsed() > READY {
                let log = std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
                let end: Vec<&str> = log.lines().rev().take(3).collect();
                bail!("Penstock does not start: {}", end.into_iter().rev().collect::<Vec<_>>().join("; "));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the process as a crash would, and starts it again. Returns the seconds until the mount answers.
    pub(crate) fn crash_and_start(&mut self) -> Result<f64> {
        let pid = rustix::process::Pid::from_raw(self.process as i32).context("it runs")?;
        rustix::process::kill_process(pid, rustix::process::Signal::KILL)?;
        // Drops the guards of the process and of its mount: the process has ended and the mount is stale.
        drop((self.held.0.pop(), self.held.0.pop()));
        let start = Instant::now();
        self.up()?;
        std::fs::metadata(&self.mount)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Runs an administrative command and returns its JSON.
    pub(crate) fn command(&self, words: &[&str]) -> Result<serde_json::Value> {
        let output =
            Command::new(&self.program).arg("--dir").arg(&self.dir).args(words).arg("--json").output()?;
        if !output.status.success() {
            bail!("penstock {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Fails two drives that hold data in every stripe, which is the worst pair for reads.
    pub(crate) fn lose_two_drives(&self) -> Result<()> {
        let drives = self.command(&["drive", "list"])?;
        for index in [1, 2] {
            let id = drives[index]["id"].as_str().context("a drive has an id")?;
            self.command(&["drive", "fail", id])?;
        }
        let health = self.command(&["status"])?["health"].clone();
        if health == "ok" {
            bail!("two drives were failed, but the store reports its health as ok");
        }
        Ok(())
    }

    pub(crate) fn into_peer(self, id: PeerId, amount: Amount) -> Result<Peer> {
        let version = Command::new(&self.program).arg("--version").output()?;
        Ok(Peer {
            id,
            version: String::from_utf8_lossy(&version.stdout).trim().to_owned(),
            folder: Folder::new(&self.mount, amount, true),
            is_mount: true,
            processes: Processes::One(self.process),
            _held: self.held,
        })
    }
}
