//! Mounting and unmounting.
//!
//! Root mounts directly; an ordinary user goes through fusermount3. A mount point that a killed process left behind
//! answers ENOTCONN; it is unmounted (lazily) before the new mount, because nothing can be lost on it.

use crate::attr::Root;
use crate::fs::{Job, PenstockFs};
use fuser::{Config, MountOption, SessionACL};
use penstock_base::Env;
use penstock_client::Client;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Threads that read requests.
const THREADS: usize = 4;

/// A mount does not come about.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The mount point cannot be used; says what to do.
    #[error("{0}")]
    Refused(String),
    /// The kernel or fusermount3 refuses.
    #[error("mounting at {path} failed: {source}{hint}")]
    Failed {
        /// The mount point.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
        /// What to do about it.
        hint: &'static str,
    },
}

/// A mounted file system.
pub struct Mount {
    path: PathBuf,
    session: Option<fuser::BackgroundSession>,
}

/// Whether a mount point is the remains of a process that was killed.
pub fn is_stale(path: &Path) -> bool {
    let not_connected = rustix::io::Errno::NOTCONN.raw_os_error();
    // The kernel may still answer from the attributes that it keeps; a listing goes to the process.
    let answer = std::fs::metadata(path).and_then(|_| std::fs::read_dir(path).map(|_| ()));
    answer.is_err_and(|error| error.raw_os_error() == Some(not_connected))
}

/// Unmounts the remains of a process that was killed.
pub fn unmount_stale(path: &Path) -> io::Result<()> {
    let lazily = rustix::mount::UnmountFlags::DETACH;
    if rustix::mount::unmount(path, lazily).is_ok() {
        return Ok(());
    }
    let status = Command::new("fusermount3").arg("-u").arg("-z").arg(path).status()?;
    match status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!("fusermount3 -u -z {} failed", path.display()))),
    }
}

/// Makes sure that `path` is an empty directory that nothing is mounted on; makes it if it does not exist.
pub fn check_mount_point(path: &Path) -> Result<(), MountError> {
    let refused = |why: String| Err(MountError::Refused(why));
    let at = path.display();
    if is_stale(path) {
        tracing::warn!(path = %at, "unmounting what a killed process left");
        if let Err(error) = unmount_stale(path) {
            return refused(format!(
                "{at} is the mount of a process that was killed, and cannot be unmounted: {error}"
            ));
        }
    }
    match std::fs::File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return refused(
                "/dev/fuse may not be opened by this user: have an administrator run chmod 666 /dev/fuse"
                    .into(),
            );
        }
        Err(error) => {
            return refused(format!(
                "/dev/fuse is missing or cannot be opened ({error}): load the fuse module (modprobe fuse), or leave out --mount"
            ));
        }
    }
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return std::fs::create_dir_all(path)
                .or_else(|error| refused(format!("the mount point {at} cannot be made: {error}")));
        }
        Err(error) => return refused(format!("the mount point {at} cannot be used: {error}")),
        Ok(found) if !found.is_dir() => return refused(format!("the mount point {at} is not a directory")),
        Ok(_) => {}
    }
    let mut entries = match std::fs::read_dir(path) {
        Ok(entries) => entries,
        Err(error) => return refused(format!("the mount point {at} cannot be read: {error}")),
    };
    match entries.next() {
        Some(_) => refused(format!("the mount point {at} is not empty: empty it or name another directory")),
        None => Ok(()),
    }
}

impl Mount {
    /// Mounts the file system of `client` at `path`. `env` is the worker that owns the client.
    pub fn start(env: &Env, client: &Rc<Client>, path: &Path) -> Result<Self, MountError> {
        check_mount_point(path)?;
        let (jobs, inbox) = unbounded_channel();
        env.spawn("mount", Box::pin(serve(env.clone(), client.clone(), inbox)));
        let fs = PenstockFs { jobs, root: Root(client.root()) };
        let session = fuser::spawn_mount(fs, path, &config("penstock"))
            .map_err(|source| MountError::Failed { path: path.to_owned(), hint: hint(&source), source })?;
        Ok(Self { path: path.to_owned(), session: Some(session) })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts. A mount in use is refused and given back, or with `force` detached: its open files get errors. Must
    /// not be called on the worker: requests on their way need it.
    pub fn stop(mut self, force: bool) -> (io::Result<()>, Option<Self>) {
        let Some(session) = self.session.take() else { return (Ok(()), None) };
        match unmount(&self.path) {
            Ok(()) => (session.join(), None),
            Err(_) if force => {
                tracing::warn!(path = %self.path.display(), "the mount is in use and is detached");
                // Its thread ends with the last open file, or with the process.
                let result = unmount_stale(&self.path);
                drop(session);
                (result, None)
            }
            Err(error) => {
                self.session = Some(session);
                (Err(io::Error::other(format!("{} is in use: {error}", self.path.display()))), Some(self))
            }
        }
    }
}

/// Unmounts what is not in use.
fn unmount(path: &Path) -> io::Result<()> {
    match rustix::mount::unmount(path, rustix::mount::UnmountFlags::empty()) {
        Err(rustix::io::Errno::PERM) => {
            let output = Command::new("fusermount3").arg("-u").arg(path).output()?;
            match output.status.success() {
                true => Ok(()),
                false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
            }
        }
        // Somebody else unmounted it.
        Err(rustix::io::Errno::INVAL) => Ok(()),
        other => Ok(other?),
    }
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; install fuse3 (fusermount3), or run as root",
        io::ErrorKind::PermissionDenied => "; ordinary users need fusermount3 from the package fuse3",
        _ => "",
    }
}

/// Mount options: permissions by the kernel; visible to all users where that is allowed.
pub(crate) fn config(name: &str) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(name.into()),
        MountOption::Subtype(name.into()),
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
    ];
    config.acl = if rustix::process::geteuid().is_root() { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    config
}

/// Takes jobs from the threads and runs each as a task of the worker.
async fn serve(env: Env, client: Rc<Client>, mut inbox: UnboundedReceiver<Job>) {
    while let Some(job) = inbox.recv().await {
        env.spawn("file request", job(client.clone()));
    }
}
