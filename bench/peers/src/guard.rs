//! Undoes everything that a run made, however it ends: ends processes, unmounts, removes folders.
//!
//! Each [`Guard`] undoes one thing when it is dropped, also after an error. One list contains all live
//! guards, so that Ctrl-C and the time limit undo them too, latest first. The process then ends. The list
//! stays locked meanwhile, so a thread that wants to start something more waits for the end.

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, set_child_subreaper, waitpid};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time for a process to end after SIGTERM before it is killed.
const ORDERLY: Duration = Duration::from_secs(5);
/// Time for the kernel to end a killed process.
const ENDING: Duration = Duration::from_secs(20);

#[derive(Clone, Debug)]
enum Undo {
    /// A child of this process.
    Process(u32),
    /// Every process in this network namespace, by the namespace's inode.
    Network(u64),
    Mount(PathBuf),
    Folder(PathBuf),
}

static HELD: Mutex<BTreeMap<u64, Undo>> = Mutex::new(BTreeMap::new());

/// Undoes one thing when it is dropped.
#[derive(Debug)]
pub(crate) struct Guard(u64);

impl Guard {
    /// Makes a folder, which is removed with everything in it.
    pub(crate) fn folder(path: &Path) -> Result<Self> {
        Self::around(|| {
            std::fs::create_dir_all(path).with_context(|| format!("{} cannot be made", path.display()))?;
            Ok(((), Undo::Folder(path.to_owned())))
        })
        .map(|((), guard)| guard)
    }

    /// Guards a path: dropping the guard unmounts the file system that is mounted there.
    pub(crate) fn mount(path: &Path) -> Result<Self> {
        Self::around(|| Ok(((), Undo::Mount(path.to_owned())))).map(|((), guard)| guard)
    }

    /// Starts a program in a process group of its own, so that Ctrl-C ends it only through its guard.
    pub(crate) fn process(command: &mut Command) -> Result<(Child, Self)> {
        use std::os::unix::process::CommandExt;
        Self::around(|| {
            let child = command.process_group(0).spawn().with_context(|| {
                format!("{} cannot be started", Path::new(command.get_program()).display())
            })?;
            let id = child.id();
            Ok((child, Undo::Process(id)))
        })
    }

    /// Guards a network namespace, given by its inode: dropping the guard ends every process in it.
    pub(crate) fn network(inode: u64) -> Result<Self> {
        Self::around(|| Ok(((), Undo::Network(inode)))).map(|((), guard)| guard)
    }

    fn around<T>(begin: impl FnOnce() -> Result<(T, Undo)>) -> Result<(T, Self)> {
        let mut held = HELD.lock().expect("no holder panics");
        let (begun, undo) = begin()?;
        let number = held.last_key_value().map_or(0, |(number, _)| number + 1);
        held.insert(number, undo);
        Ok((begun, Self(number)))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let undo = HELD.lock().expect("no holder panics").remove(&self.0);
        if let Some(undo) = undo {
            undo.run();
        }
    }
}

/// Undoes everything in the list and ends the process.
pub(crate) fn abandon(why: &str) -> ! {
    let mut held = HELD.lock().expect("no holder panics");
    eprintln!("{why}: cleaning up");
    while let Some((_, undo)) = held.pop_last() {
        undo.run();
    }
    std::process::exit(1);
}

/// Watches for Ctrl-C, SIGTERM and the time limit, on threads of its own, and adopts orphaned processes.
pub(crate) fn watch(limit: Duration) -> Result<()> {
    // Any process id enables it.
    set_child_subreaper(Some(Pid::INIT))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (interrupt, terminate) = runtime.block_on(async {
        use tokio::signal::unix::{SignalKind, signal};
        anyhow::Ok((signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?))
    })?;
    std::thread::spawn(move || {
        let (mut interrupt, mut terminate) = (interrupt, terminate);
        runtime.block_on(async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        abandon("interrupted");
    });
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        abandon(&format!("not done within {} s", limit.as_secs()));
    });
    Ok(())
}

impl Undo {
    fn run(self) {
        match self {
            Self::Process(id) => end(|| if is_alive(id) { vec![id] } else { vec![] }),
            Self::Network(inode) => end(|| in_network(inode)),
            Self::Mount(path) => unmount(&path),
            Self::Folder(path) => {
                if let Err(error) = std::fs::remove_dir_all(&path) {
                    eprintln!("warning: {} was not removed: {error}", path.display());
                }
            }
        }
    }
}

/// Ends processes with SIGTERM, then with SIGKILL.
fn end(alive: impl Fn() -> Vec<u32>) {
    let mut left = alive();
    let all = left.clone();
    for (signal, bound) in [(Signal::TERM, ORDERLY), (Signal::KILL, ENDING)] {
        for id in &left {
            if let Some(pid) = Pid::from_raw(*id as i32) {
                // The process may have ended by itself.
                let _ = kill_process(pid, signal);
            }
        }
        let start = Instant::now();
        while !left.is_empty() && start.elapsed() < bound {
            std::thread::sleep(Duration::from_millis(20));
            left = alive();
        }
    }
    // Children of this process, including adopted ones, remain as zombies until they are waited for.
    for id in all {
        let _ = Pid::from_raw(id as i32).map(|pid| waitpid(Some(pid), WaitOptions::NOHANG));
    }
    if !left.is_empty() {
        eprintln!("warning: processes {left:?} do not end");
    }
}

fn unmount(path: &Path) {
    use rustix::mount::{UnmountFlags, unmount};
    let start = Instant::now();
    loop {
        match unmount(path, UnmountFlags::empty()) {
            // Nothing is mounted there, or nothing any more.
            Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => return,
            Err(_) if start.elapsed() < Duration::from_secs(2) => {
                std::thread::sleep(Duration::from_millis(50));
            }
            Err(_) => break,
        }
    }
    if let Err(error) = unmount(path, UnmountFlags::DETACH) {
        eprintln!("warning: {} was not unmounted: {error}", path.display());
    }
}

/// True if a process runs. A zombie does not.
pub(crate) fn is_alive(id: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let state = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X' | 'x'))
}

/// Returns the inode of a process's network namespace, or `None` if there is no such process.
pub(crate) fn network_of(id: u32) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(format!("/proc/{id}/ns/net")).ok().map(|found| found.ino())
}

/// Returns the ids of the processes that are alive in a network namespace.
pub(crate) fn in_network(inode: u64) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.filter(|id| network_of(*id) == Some(inode) && is_alive(*id)).collect()
}
