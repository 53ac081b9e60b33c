//! A process beside a mount that aborts the mount's connection when its process dies.
//!
//! A thread that has the kernel drop pages waits there until they are unlocked, also when its process is killed: for requests that
//! nobody answers any more. As long as it waits it keeps its share of the device, so the kernel does not see that the file
//! system is gone, and programs hang for ever. Somebody without such a share must say so.
//!
//! The guard knows the connection from its beginning, and does nothing to another one that gets its number later.

use penstock_drive::runtime::blocking;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};
use rustix::process::Signal;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};

/// The word before the number of a connection, in the arguments of a program that calls [`guard`].
pub const GUARD: &str = "mount-guard";
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// The guard of one mount.
pub(crate) struct Guard(Child);

impl Guard {
    /// Starts this program as the guard of what is mounted at `path`. Call on the thread whose end is that of the mount.
    pub(crate) fn start(path: &Path) -> io::Result<Self> {
        // A question would go to who is starting.
        let found = rustix::fs::statx(rustix::fs::CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
        let connection = found.stx_dev_major << 20 | found.stx_dev_minor;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("penstock").args([GUARD, &connection.to_string()]).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::inherit());
        // A word from the terminal is for the mount.
        Ok(Self(command.process_group(0).spawn()?))
    }

    /// Lets it go. The connection has ended.
    pub(crate) async fn end(mut self) {
        drop(self.0.stdin.take());
        if let Err(error) = blocking(move || self.0.wait()).await {
            tracing::warn!(%error, "the guard of a mount is not waited for");
        }
    }
}

/// Waits until the parent's thread that started this process has ended, or the parent says that the mount has, and aborts
/// the connection.
pub fn guard(connection: u32) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut died = signal(SignalKind::user_defined1())?;
        // Whoever ends all processes of a service ends the mount by that, and the guard with it.
        let _ignored = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        rustix::process::set_parent_process_death_signal(Some(Signal::USR1))?;
        let mut abort = abort_file(connection)?;
        // Nothing is ever said on it: it is closed.
        let said = pipe::Receiver::from_owned_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
        tokio::select! {
            _ = died.recv() => {}
            closed = said.readable() => closed?,
        }
        abort.write_all(b"1")
    })
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
