//! A guard process that aborts a mount's FUSE connection when the process that serves the mount dies.
//!
//! A thread that has the kernel drop pages waits in the kernel until they are unlocked, even after its
//! process is killed. The pages are locked for requests that nobody answers any more. While it waits it keeps
//! the device open, so the kernel does not notice that the file system is dead, and programs hang for ever. A
//! process that does not have the device open must abort the connection.
//!
//! The guard opens the connection's abort file at the start, so it does nothing to a later connection that
//! gets the same number.

use penstock_base::{Env, env::timeout};
use penstock_worker::Readiness;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use rustix::path::Arg;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};

/// The argument before the connection number, for a program that then calls [`guard`].
pub const GUARD: &str = "mount-guard";
/// The argument behind the thread, if its process ends when the file system is unmounted.
pub const ENDS: &str = "--ends";
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// Pause before a guard is started again after it was killed or could not be started. It doubles each time up
/// to `PAUSE_MOST`.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MOST: Duration = Duration::from_secs(60);

/// Time limit for a guard to end after the connection has ended.
const LAST_STEPS: Duration = Duration::from_secs(5);

/// The guard process of one mount, as the process that serves the mount sees it.
pub(crate) struct Guard {
    connection: u32,
    /// The process that serves the mount ends with it.
    ends: bool,
    child: RefCell<Option<Child>>,
}

/// Returns the connection number of the file system mounted at `path`.
pub(crate) fn connection_of(path: &Path) -> io::Result<u32> {
    connection_at(rustix::fs::CWD, path, AtFlags::empty())
}

/// Returns the connection number of the file system that a path below a directory lies on.
pub(crate) fn connection_at(dir: impl AsFd, path: impl Arg, flags: AtFlags) -> io::Result<u32> {
    // Without DONT_SYNC the kernel would send a request to the mount, whose process is still starting.
    let found = rustix::fs::statx(dir, path, flags | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(found.stx_dev_major << 20 | found.stx_dev_minor)
}

/// Starts this program as the guard of a connection. Call it on the thread that serves the mount: the guard
/// acts when that thread ends.
fn start(connection: u32, ends: bool) -> io::Result<Child> {
    let thread = std::fs::read_link("/proc/thread-self")?;
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("penstock")
        .args([GUARD, &connection.to_string()])
        .arg(thread)
        .args(ends.then_some(ENDS))
        .current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::inherit());
    // In a process group of its own: signals from the terminal are for the mount's process only.
    command.process_group(0).spawn()
}

impl Guard {
    /// Starts a guard. Call it on the thread that serves the mount: the guard acts when that thread ends.
    /// `ends` says that the process of that thread ends with the mount.
    pub(crate) fn new(connection: u32, ends: bool) -> io::Result<Self> {
        Ok(Self { connection, ends, child: RefCell::new(Some(start(connection, ends)?)) })
    }

    /// Starts another guard whenever one is killed. Call it on the thread that called [`Self::new`]. Returns
    /// when a guard exits by itself, which it does only where it cannot abort the connection.
    pub(crate) async fn keep(&self, env: &Env) {
        let mut pause = PAUSE;
        loop {
            let why = match self.lost().await {
                // The guard has written the reason to standard error.
                Ok(status) if status.signal().is_none() => return,
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            };
            tracing::warn!(
                connection = self.connection,
                why,
                "the guard of a mount is gone, and another one is started"
            );
            env.sleep(pause).await;
            pause = (2 * pause).min(PAUSE_MOST);
            match start(self.connection, self.ends) {
                Ok(child) => *self.child.borrow_mut() = Some(child),
                Err(error) => tracing::warn!(connection = self.connection, %error, "the guard cannot start"),
            }
        }
    }

    /// Waits until the guard process ends.
    async fn lost(&self) -> io::Result<ExitStatus> {
        let none = || io::Error::other("there is none");
        let process = {
            let child = self.child.borrow();
            pidfd_open(Pid::from_child(child.as_ref().ok_or_else(none)?), PidfdFlags::empty())?
        };
        Readiness::new(process)?.readable().await?;
        self.child.take().ok_or_else(none)?.wait()
    }

    /// Ends the guard after the connection has ended.
    pub(crate) async fn end(self, env: &Env) {
        if let Some(child) = &mut *self.child.borrow_mut() {
            drop(child.stdin.take());
        }
        if timeout(env, LAST_STEPS, self.lost()).await.is_some() {
            return;
        }
        tracing::warn!("the guard of a mount does not end and is killed");
        if let Some(child) = &mut *self.child.borrow_mut()
            && let Err(error) = child.kill()
        {
            tracing::warn!(%error, "the guard cannot be killed");
        }
        timeout(env, LAST_STEPS, self.lost()).await;
    }
}

/// Returns the fields of `stat` behind the name of a process or thread, a path below /proc: its state, its
/// parent and numbers (proc_pid_stat(5)).
pub(crate) fn stat_of(process: &Path) -> io::Result<String> {
    let stat = std::fs::read_to_string(process.join("stat"))?;
    // The name is in brackets and may contain any byte.
    Ok(stat.rsplit(") ").next().unwrap_or_default().to_owned())
}

/// True once the thread, a path below /proc, has ended. A zombie counts as ended: a process whose other
/// threads wait in the kernel keeps its first thread as one.
fn has_ended(thread: &Path) -> io::Result<bool> {
    match stat_of(&Path::new("/proc").join(thread)) {
        Ok(stat) => Ok(stat.starts_with(['Z', 'X'])),
        // ESRCH if the thread ends while its file is read.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Waits until the parent's thread that started this process (`thread`, a path below /proc) has ended, or
/// until the parent closes standard input because the mount has ended. Then aborts the connection.
pub fn guard(connection: u32, thread: &Path) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut died = signal(SignalKind::user_defined1())?;
        // Ignored: a signal to all processes of a service ends the mount's process, and then the guard.
        let _ignored = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        rustix::process::set_parent_process_death_signal(Some(Signal::USR1))?;
        let mut abort = abort_file(connection)?;
        // The thread may have ended before the signal was requested. Then no signal comes.
        if has_ended(thread)? {
            return abort.write_all(b"1");
        }
        // The parent sends nothing through the pipe. It only closes it.
        let said = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
        tokio::select! {
            _ = died.recv() => {}
            closed = said.readable() => closed?,
        }
        abort.write_all(b"1")
    })
}

/// Aborts a connection. Programs that wait in the kernel for its process get errors.
pub(crate) fn abort(connection: u32) -> io::Result<()> {
    abort_file(connection)?.write_all(b"1")
}

/// Opens the file that aborts a connection. Where the control file system is not mounted, root mounts it
/// privately.
fn abort_file(connection: u32) -> io::Result<File> {
    let name = format!("{connection}/abort");
    match File::options().write(true).open(Path::new(CONNECTIONS).join(&name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    let control = rustix::mount::fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_create(&control)?;
    let root = rustix::mount::fsmount(&control, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
    Ok(rustix::fs::openat(root, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_worker::{Worker, block_on};

    /// A guard that cannot abort the connection must not be started again every second. An ordinary user's
    /// guard cannot where nobody has mounted the control file system.
    #[test]
    fn a_guard_that_ends_by_itself_is_not_started_again() {
        let env = Worker::env().unwrap();
        let kept = async {
            // The test program takes the argument for the name of a test that does not exist, and exits.
            let guard = Guard::new(1, false).unwrap();
            timeout(&env, Duration::from_secs(60), guard.keep(&env)).await
        };
        assert!(block_on(kept).unwrap().is_some(), "another one was started");
    }
}
