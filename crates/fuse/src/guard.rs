//! A process beside a mount that aborts the mount's connection when its process dies.
//!
//! A thread that has the kernel drop pages waits there until they are unlocked, also when its process is killed: for requests that
//! nobody answers any more. As long as it waits it keeps its share of the device, so the kernel does not see that the file
//! system is gone, and programs hang for ever. Somebody without such a share must say so.
//!
//! The guard knows the connection from its beginning, and does nothing to another one that gets its number later.

use penstock_base::{Env, env::timeout};
use penstock_drive::runtime::Readiness;
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

/// The word before the number of a connection, in the arguments of a program that calls [`guard`].
pub const GUARD: &str = "mount-guard";
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// After a guard was killed, or could not be started, until there is another one: so long at first, then ever longer.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MOST: Duration = Duration::from_secs(60);

/// Time for a guard that is not needed any more to end.
const LAST_STEPS: Duration = Duration::from_secs(5);

/// The guard of one mount.
pub(crate) struct Guard {
    connection: u32,
    child: RefCell<Option<Child>>,
}

/// The number of the connection of what is mounted at `path`.
pub(crate) fn connection_of(path: &Path) -> io::Result<u32> {
    connection_at(rustix::fs::CWD, path, AtFlags::empty())
}

/// The same of a path below a directory.
pub(crate) fn connection_at(dir: impl AsFd, path: impl Arg, flags: AtFlags) -> io::Result<u32> {
    // A question would go to who is starting.
    let found = rustix::fs::statx(dir, path, flags | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(found.stx_dev_major << 20 | found.stx_dev_minor)
}

/// Starts this program as the guard of a connection. Call on the thread whose end is that of the mount.
fn start(connection: u32) -> io::Result<Child> {
    let thread = std::fs::read_link("/proc/thread-self")?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("penstock").args([GUARD, &connection.to_string()]).arg(thread).current_dir("/");
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::inherit());
    // A word from the terminal is for the mount.
    command.process_group(0).spawn()
}

impl Guard {
    /// Starts one. Call on the thread whose end is that of the mount.
    pub(crate) fn new(connection: u32) -> io::Result<Self> {
        Ok(Self { connection, child: RefCell::new(Some(start(connection)?)) })
    }

    /// Starts another one whenever it is killed. Call on the thread that called [`Self::new`]. Returns when it has ended by
    /// itself, which it does only where it cannot abort the connection.
    pub(crate) async fn keep(&self, env: &Env) {
        let mut pause = PAUSE;
        loop {
            let why = match self.lost().await {
                // It has said why.
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
            match start(self.connection) {
                Ok(child) => *self.child.borrow_mut() = Some(child),
                Err(error) => tracing::warn!(connection = self.connection, %error, "it cannot be started"),
            }
        }
    }

    /// Waits until it ends.
    async fn lost(&self) -> io::Result<ExitStatus> {
        let none = || io::Error::other("there is none");
        let process = {
            let child = self.child.borrow();
            pidfd_open(Pid::from_child(child.as_ref().ok_or_else(none)?), PidfdFlags::empty())?
        };
        Readiness::new(process)?.readable().await?;
        self.child.take().ok_or_else(none)?.wait()
    }

    /// Lets it go. The connection has ended.
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
            tracing::warn!(%error, "it cannot be killed");
        }
        timeout(env, LAST_STEPS, self.lost()).await;
    }
}

/// True once the thread that is `thread` below /proc has ended. A process whose other threads wait in the kernel keeps its
/// first one as a zombie.
fn has_ended(thread: &Path) -> io::Result<bool> {
    match std::fs::read_to_string(Path::new("/proc").join(thread).join("stat")) {
        Ok(stat) => Ok(stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X']))),
        // The second where it ends while it is read.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Waits until the parent's thread that started this process, `thread` below /proc, has ended, or the parent says that the
/// mount has, and aborts the connection.
pub fn guard(connection: u32, thread: &Path) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut died = signal(SignalKind::user_defined1())?;
        // Whoever ends all processes of a service ends the mount by that, and the guard with it.
        let _ignored = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        rustix::process::set_parent_process_death_signal(Some(Signal::USR1))?;
        let mut abort = abort_file(connection)?;
        // Before it was asked for the signal did not come.
        if has_ended(thread)? {
            return abort.write_all(b"1");
        }
        // Nothing is ever said on it: it is closed.
        let said = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
        tokio::select! {
            _ = died.recv() => {}
            closed = said.readable() => closed?,
        }
        abort.write_all(b"1")
    })
}

/// Ends a connection: who waits in the kernel for its process gets errors.
pub(crate) fn abort(connection: u32) -> io::Result<()> {
    abort_file(connection)?.write_all(b"1")
}

/// The file by which a connection is aborted. Where nobody has mounted that file system, root does it for himself.
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
    use penstock_drive::runtime::{Worker, block_on};

    /// One that cannot abort the connection, as that of an ordinary user where nobody has mounted what it needs, was started
    /// again every second.
    #[test]
    fn a_guard_that_ends_by_itself_is_not_started_again() {
        let env = Worker::env().unwrap();
        let kept = async {
            // This program takes the word for a test that it does not have.
            let guard = Guard::new(1).unwrap();
            timeout(&env, Duration::from_secs(60), guard.keep(&env)).await
        };
        assert!(block_on(kept).unwrap().is_some(), "another one was started");
    }
}
