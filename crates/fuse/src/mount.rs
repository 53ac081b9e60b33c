//! Mounts and unmounts the file system.
//!
//! Root mounts directly; an ordinary user goes through fusermount3. A mount point that a killed process left
//! behind answers ENOTCONN. It is unmounted (lazily) before the new mount, because nothing can be lost on it.

use crate::cache::Cache;
use crate::device::Device;
use crate::guard::{Guard, connection_of};
use crate::latency::FuseLatency;
use crate::mounts::KIND;
use crate::nodes::Nodes;
use crate::probe::{Answer, Found, look, probe};
use crate::read_ahead::{KIB, set_read_ahead};
use crate::session::Session;
use futures_util::future::{Either, join, select};
use penstock_base::{Env, env::timeout};
use penstock_client::Client;
use penstock_worker::blocking;
use rustix::fs::{AtFlags, CWD, FileType, OFlags, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::convert::Infallible;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot::{self, error::TryRecvError};

const DEVICE: &str = "/dev/fuse";
const NAME: &str = "penstock";
/// The most stale mounts at one mount point that are unmounted before the new mount.
const STALE_MOST: usize = 8;

/// Time limit for looking at a mount point and unmounting it. The path may lie below a mount that does not
/// answer.
const TAKE_OFF: Duration = Duration::from_secs(10);
/// The time within which those who only look at a mount, as `df` does, let go of it.
const A_LOOK: Duration = Duration::from_secs(2);
/// Time limit for the session to end after its mount was unmounted.
const LAST_WORDS: Duration = Duration::from_secs(10);
/// Time limit for the session to end where the mount point does not show the mount any more.
const LAST_MOMENT: Duration = Duration::from_secs(1);

/// Reasons why a mount fails.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The mount point cannot be used. The message says what to do.
    #[error("{0}")]
    Refused(String),
    /// The kernel or fusermount3 refused the mount.
    #[error("mounting at {path} failed: {source}{hint}")]
    Failed {
        /// The mount point.
        path: PathBuf,
        /// The error of the kernel or of fusermount3.
        source: io::Error,
        /// A remedy to append to the message, or an empty string.
        hint: &'static str,
    },
}

/// A mounted file system, while its session lives.
pub struct Mount {
    path: PathBuf,
    /// The connection number. No other mount has it while this session lives.
    connection: u32,
    /// Ends the session although the kernel still has the mount.
    end: oneshot::Sender<()>,
    /// Closed when the session has ended.
    ended: oneshot::Receiver<()>,
}

/// Returns a mount point as the kernel names it: absolute, without symbolic links and without a final slash.
/// Errors of the file system mounted there are ignored, because its process may be dead.
pub fn mount_point(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return path.canonicalize() };
    let place = match parent.canonicalize() {
        Ok(parent) => parent.join(name),
        // The parent directory does not exist yet and is created together with the mount point.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(parent.join(name)),
        Err(error) => return Err(error),
    };
    // Without DONT_SYNC the kernel would ask the process of a mount, which may not answer.
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    match statx(CWD, &place, flags, StatxFlags::TYPE) {
        Ok(found) if FileType::from_raw_mode(found.stx_mode.into()).is_symlink() => place.canonicalize(),
        _ => Ok(place),
    }
}

/// Unmounts, lazily, the mount of a process that was killed.
pub fn unmount_stale(path: &Path) -> io::Result<()> {
    // The path is the mount point itself. NOFOLLOW, because somebody may replace it by a symbolic link to
    // elsewhere.
    let lazily = UnmountFlags::DETACH | UnmountFlags::NOFOLLOW;
    if rustix::mount::unmount(path, lazily).is_ok() {
        return Ok(());
    }
    let status = Command::new("fusermount3").arg("-u").arg("-z").arg(path).status()?;
    match status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!("fusermount3 -u -z {} failed", path.display()))),
    }
}

/// Checks that `path` can be mounted on. It may be an empty directory, a path that does not exist, which is
/// created as a directory, or the stale mount of a killed process. A stale mount stays until [`Mount::start`]
/// replaces it, so that programs do not write into the directory below it. Asks a mount as [`probe`] does.
pub fn check_mount_point(path: &Path) -> Result<(), MountError> {
    let refused = |why: String| Err(MountError::Refused(why));
    let at = path.display();
    match std::fs::File::options().read(true).write(true).open(DEVICE) {
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
    match probe(path) {
        Ok(None) => {}
        Ok(Some(Answer::Stale)) => return Ok(()),
        Ok(Some(Answer::Serves)) => {
            return refused(format!(
                "a file system of Penstock is mounted at {at} already: `penstock umount {at}` unmounts it"
            ));
        }
        Ok(Some(Answer::Silent)) => {
            return refused(format!(
                "a file system of Penstock is mounted at {at} and does not answer, because its instance does \
                 not: start that instance, or name another directory"
            ));
        }
        Err(error) => return refused(format!("the mount point {at} cannot be used: {error}")),
    }
    match look(path) {
        Ok(Found::Empty) => Ok(()),
        Ok(Found::Full) => {
            refused(format!("the mount point {at} is not empty: empty it or name another directory"))
        }
        Ok(Found::NoDirectory) => refused(format!("the mount point {at} is not a directory")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => std::fs::create_dir_all(path)
            .or_else(|error| refused(format!("the mount point {at} cannot be made: {error}"))),
        Err(error) => refused(format!("the mount point {at} cannot be used: {error}")),
    }
}

/// Like [`check_mount_point`], and unmounts stale mounts. If programs have written into the directory by
/// then, the new mount covers their files.
fn clear_mount_point(path: &Path) -> Result<(), MountError> {
    let at = path.display();
    let refused = |error: io::Error| {
        MountError::Refused(format!(
            "{at} is the mount of a process that was killed, and cannot be unmounted: {error}"
        ))
    };
    let mut unmounted = false;
    // For a moment after a mount's process is killed, the kernel may still answer from its cache.
    for _ in 0..STALE_MOST {
        match probe(path).map_err(refused)? {
            Some(Answer::Stale) => {}
            None if unmounted && matches!(look(path), Ok(Found::Full)) => {
                tracing::warn!(path = %at, "something was written here while nothing was mounted; the mount covers it");
                return Ok(());
            }
            _ => break,
        }
        tracing::warn!(path = %at, "unmounting what a killed process left");
        unmount_stale(path).map_err(refused)?;
        unmounted = true;
    }
    check_mount_point(path)
}

/// Options of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// The source of the mount, as `findmnt` and `df` show it and `umount` accepts it.
    pub source: String,
    /// If true, the kernel refuses every change (EROFS).
    pub read_only: bool,
    /// If true, this program runs [`crate::guard()`] when it is called with [`crate::GUARD`].
    pub guarded: bool,
    /// If true, this process ends when the file system is unmounted.
    pub ends: bool,
}

impl Default for MountOptions {
    fn default() -> Self {
        Self { source: NAME.to_owned(), read_only: false, guarded: false, ends: false }
    }
}

impl Mount {
    /// Mounts the file system of `client` at `path`. `env` is the worker that owns the client. The times of
    /// requests are recorded in `latency`. The worker calls `on_end` once the kernel has released the mount,
    /// whoever unmounted it.
    pub async fn start(
        env: &Env,
        client: &Rc<Client>,
        path: &Path,
        options: &MountOptions,
        latency: &Rc<FuseLatency>,
        on_end: impl FnOnce() + 'static,
    ) -> Result<Self, MountError> {
        let failed = |source| MountError::Failed { path: path.to_owned(), hint: hint(&source), source };
        let (at, wanted) = (path.to_owned(), options.clone());
        // On another thread: the path may lead through a mount that this worker serves, or through one that
        // does not answer.
        let mounted = blocking(move || {
            clear_mount_point(&at)?;
            let file = match rustix::process::geteuid().is_root() {
                true => mount(&at, &wanted),
                false => mount_as_user(&at, &wanted),
            };
            Ok::<_, MountError>(file.and_then(|file| {
                let flags = rustix::fs::fcntl_getfl(&file)?;
                rustix::fs::fcntl_setfl(&file, flags | OFlags::NONBLOCK)?;
                Ok((file, connection_of(&at)?))
            }))
        });
        let (file, connection) = mounted.await?.map_err(failed)?;
        let device = Device::new(file).map_err(failed)?;
        let copy = device.copy().map_err(failed)?;
        let cache = Rc::new(
            Cache::new(env, Rc::new(Nodes::new(client.root(), env.random())), copy, path, connection)
                .map_err(failed)?,
        );
        let guard = options.guarded.then(|| Guard::new(connection, options.ends)).transpose().unwrap_or_else(
            |error| {
                let path = path.display();
                tracing::warn!(%path, %error, "no guard: programs may hang if this process is killed");
                None
            },
        );
        client.set_kernel_cache(Some(cache.clone()));
        let session = Session::new(client.clone(), device, cache, latency.clone());
        let (ending, ended) = oneshot::channel();
        env.spawn("mount read-ahead", Box::pin(raise_read_ahead(session.clone(), path.to_owned())));
        let looks = crate::attributes::look_at_sizes(session.clone(), env.clone());
        let run = crate::serve::run(session.clone(), env.clone());
        let (end, to_end) = oneshot::channel();
        let (client, env_of_mount, at) = (client.clone(), env.clone(), path.display().to_string());
        let serve = async move {
            let keep = async {
                if let Some(guard) = &guard {
                    guard.keep(&env_of_mount).await;
                    tracing::warn!(path = at, "no guard: programs may hang if this process is killed");
                }
                std::future::pending::<Infallible>().await
            };
            let told = async {
                match to_end.await {
                    Ok(()) => session.write_back(&env_of_mount).await,
                    // The `Mount` was dropped, so nobody can ask for the end.
                    Err(_) => std::future::pending().await,
                }
            };
            let ended = match select(select(pin!(run), pin!(told)), pin!(join(looks, keep))).await {
                Either::Left((Either::Left((ended, _)), _)) => ended,
                Either::Left((Either::Right(((), _)), _)) => Ok(()),
                Either::Right(((never, _), _)) => match never {},
            };
            if let Err(error) = ended {
                tracing::error!(%error, "the mount stopped");
            }
            session.finish(&env_of_mount).await;
            client.set_kernel_cache(None);
            if let Some(guard) = guard {
                guard.end(&env_of_mount).await;
            }
            on_end();
            drop(ending);
        };
        env.spawn("mount", Box::pin(serve));
        Ok(Self { path: path.to_owned(), connection, end, ended })
    }

    /// Returns the mount point.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until somebody else has unmounted it. After that there is nothing to stop.
    pub async fn ended(&mut self) {
        // The channel is always closed without a value.
        let _ = (&mut self.ended).await;
    }

    /// True once the session has ended.
    fn has_ended(&mut self) -> bool {
        self.ended.try_recv() == Err(TryRecvError::Closed)
    }

    /// Unmounts. A mount in use is an error, and the mount is handed back. With `force` it is ended all the
    /// same: requests that were received are answered, and from then on its open files get errors. After this
    /// returns nothing more is written through the mount.
    pub async fn stop(mut self, env: &Env, force: bool) -> (io::Result<()>, Option<Self>) {
        let (path, connection) = (self.path.clone(), self.connection);
        // On another thread: the worker must serve requests in flight until the kernel has released the
        // mount.
        let off = timeout(env, TAKE_OFF, blocking(move || take_off(&path, connection, force))).await;
        let off = off.unwrap_or_else(|| {
            let why = format!("its mount point does not answer within {} s", TAKE_OFF.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, why))
        });
        if force {
            // A copy of the mount elsewhere, or files open at a lazy unmount, may keep the session alive. It
            // may also have ended by itself.
            let _ = self.end.send(());
            // The channel is always closed without a value.
            let _ = self.ended.await;
            let off = off.map(|was_there| {
                if !was_there {
                    let path = self.path.display();
                    tracing::warn!(%path, "the mount has ended; its mount point did not show it and is left as it is");
                }
            });
            return (off, None);
        }
        let at = self.path.display().to_string();
        let why = match off {
            Ok(was_there) => {
                let patience = if was_there { LAST_WORDS } else { LAST_MOMENT };
                timeout(env, patience, self.ended()).await;
                match was_there {
                    true => {
                        format!("{at} is unmounted, but a bind mount or another mount name space has it too")
                    }
                    false => format!(
                        "{at} does not show this mount: another file system is mounted over it, or it was moved, or \
                         detached while in use"
                    ),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                format!("{at} is not unmounted: {error}")
            }
            Err(error) => format!("{at} is in use: {error}"),
        };
        match self.has_ended() {
            true => (Ok(()), None),
            false => (Err(io::Error::other(why)), Some(self)),
        }
    }
}

/// Sets the kernel's read-ahead once the mount answers. An ordinary user may not; then the kernel's default
/// stays.
async fn raise_read_ahead(session: Rc<Session>, path: PathBuf) {
    session.begun.notified().await;
    drop(session);
    let at = path.display().to_string();
    let set = blocking(move || set_read_ahead(&path, KIB)).await;
    if let Err(error) = set {
        tracing::info!(path = at, %error, "the kernel reads ahead as far as it does by itself");
    }
}

/// Mounts as root: visible to all users, and the kernel checks permissions.
fn mount(path: &Path, wanted: &MountOptions) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(OFlags::CLOEXEC.bits().cast_signed())
        .open(DEVICE)?;
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let options = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions,allow_other",
        file.as_raw_fd(),
        uid.as_raw(),
        gid.as_raw()
    );
    let options = CString::new(options)?;
    let read_only = if wanted.read_only { MountFlags::RDONLY } else { MountFlags::empty() };
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME | read_only;
    rustix::mount::mount(&*wanted.source, path, KIND, flags, &*options)?;
    Ok(file)
}

/// Mounts through fusermount3, which sends the descriptor back over a socket. The socket is its standard
/// input, so that it inherits no other descriptor.
fn mount_as_user(path: &Path, wanted: &MountOptions) -> io::Result<File> {
    let (mine, theirs) = UnixStream::pair()?;
    // An unescaped comma would end the option.
    let source = wanted.source.replace('\\', "\\\\").replace(',', "\\,");
    let access = if wanted.read_only { "ro" } else { "rw" };
    let child = Command::new("fusermount3")
        .arg("-o")
        .arg(format!("fsname={source},subtype={NAME},{access},default_permissions,noatime,nosuid,nodev"))
        .arg("--")
        .arg(path)
        .env("_FUSE_COMMFD", "0")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let received = receive_descriptor(&mine);
    let output = child.wait_with_output()?;
    match received? {
        Some(descriptor) if output.status.success() => Ok(File::from(descriptor)),
        _ => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

fn receive_descriptor(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [io::IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let descriptor = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Ok(descriptor)
}

/// Unmounts the mount with this connection. Returns false, and unmounts nothing, if `path` does not show it.
/// With `force` it also unmounts a mount in use.
fn take_off(path: &Path, connection: u32, force: bool) -> io::Result<bool> {
    // Somebody may have mounted another file system over it.
    if connection_of(path).ok() != Some(connection) {
        return Ok(false);
    }
    let unmounted = match force {
        true => unmount_now(path).or_else(|_| {
            tracing::warn!(path = %path.display(), "the mount is in use and is detached from the programs that use it");
            unmount_stale(path)
        }),
        false => unmount(path),
    };
    unmounted.map(|()| true)
}

/// Unmounts a mount that is not in use. Fails if it is in use for longer than a look at it takes. Waits for
/// that on this thread.
#[allow(clippy::disallowed_methods, reason = "no worker thread calls this")]
pub fn unmount(path: &Path) -> io::Result<()> {
    let begin = Instant::now();
    loop {
        match unmount_now(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && begin.elapsed() < A_LOOK => {
                std::thread::sleep(A_LOOK / 20);
            }
            done => return done,
        }
    }
}

fn unmount_now(path: &Path) -> io::Result<()> {
    match rustix::mount::unmount(path, UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => {
            let output = Command::new("fusermount3").arg("-u").arg(path).output()?;
            let why = String::from_utf8_lossy(&output.stderr);
            match output.status.success() {
                true => Ok(()),
                false if why.contains("busy") => Err(Errno::BUSY.into()),
                false => Err(io::Error::other(why.trim().to_owned())),
            }
        }
        // Somebody else has unmounted it.
        Err(Errno::INVAL) => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_is_named_as_the_kernel_does() {
        let home = std::env::temp_dir().join(format!("mount-point-{}", std::process::id()));
        std::fs::create_dir_all(home.join("real/deep")).unwrap();
        let home = home.canonicalize().unwrap();
        std::os::unix::fs::symlink("real", home.join("link")).unwrap();
        let real = home.join("real");
        let names = ["real", "real/", "real/.", "link", "link/", "link/../real/", "real/deep/.."];
        let found = names.map(|name| (name, mount_point(&home.join(name)).unwrap()));
        let new = ["new/", "real/new", "none/new/"].map(|name| mount_point(&home.join(name)).unwrap());
        std::fs::remove_dir_all(&home).unwrap();
        for (name, place) in found {
            assert_eq!(place.as_os_str(), real.as_os_str(), "{name}");
        }
        assert_eq!(new, [home.join("new"), real.join("new"), home.join("none/new")]);
    }
}
