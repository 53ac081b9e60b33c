//! UNIX sockets in a store's folder, for clients on this node.
//!
//! Each end asks the kernel for the user of the other. A server accepts its own user and root. A client
//! continues only if the server runs as the folder's owner or as root. The mode of the socket (0600) keeps
//! other users away before that.

use rustix::fs::{Mode, OFlags};
use rustix::net::sockopt::socket_peercred;
use std::fmt;
use std::fs::Permissions;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Name of the data path's socket in a store's folder.
pub const DATA: &str = "data.sock";
/// Name of the REST API's socket in a store's folder.
pub const API: &str = "api.sock";

/// The process at the other end, as reported by the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// The process id.
    pub pid: i32,
    /// The effective user id.
    pub uid: u32,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of user {}", self.pid, self.uid)
    }
}

impl Peer {
    /// Returns the process that connected, or for a client's stream the process that listens.
    pub fn of(stream: &impl AsFd) -> io::Result<Self> {
        let found = socket_peercred(stream)?;
        Ok(Self { pid: found.pid.as_raw_nonzero().get(), uid: found.uid.as_raw() })
    }

    /// True if a server accepts this peer: it is root or this process's own user.
    pub fn may_enter(&self) -> bool {
        self.uid == 0 || self.uid == rustix::process::geteuid().as_raw()
    }
}

/// Opens the folder, and returns it with a path to the socket through its descriptor. The path of a socket
/// has at most 107 bytes; that of the folder may be longer.
fn through(dir: &Path, name: &str) -> io::Result<(OwnedFd, PathBuf)> {
    let dir = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let path = PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()));
    Ok((dir, path))
}

/// Listens at `name` in `dir`. The caller has the folder's lock, so no other instance listens there. A socket
/// left by a killed instance is replaced; any other file of that name is left alone and is an error.
pub fn listen(dir: &Path, name: &str) -> Result<UnixListener, String> {
    let fail = |error: io::Error| format!("listening at {}: {error}", dir.join(name).display());
    let (_dir, path) = through(dir, name).map_err(fail)?;
    match std::fs::symlink_metadata(&path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(&path).map_err(fail)?,
        Ok(_) => return Err(format!("{} is in the way: move it", dir.join(name).display())),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(fail(error)),
    }
    let listener = UnixListener::bind(&path).map_err(fail)?;
    std::fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(fail)?;
    Ok(listener)
}

/// Removes the socket. Later attempts to connect fail with `NotFound`.
pub fn remove(dir: &Path, name: &str) {
    if let Err(error) = std::fs::remove_file(dir.join(name)) {
        tracing::debug!(%error, name, "the socket was not there");
    }
}

/// Connects to `name` in `dir`. Fails unless the listener runs as the folder's owner or as root.
pub fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    let (held, path) = through(dir, name)?;
    let owner = rustix::fs::fstat(&held)?.st_uid;
    let stream = UnixStream::connect(path)?;
    let peer = Peer::of(&stream)?;
    match peer.uid == 0 || peer.uid == owner {
        true => Ok(stream),
        false => Err(io::Error::new(
            ErrorKind::PermissionDenied,
            format!("{peer} listens there, neither the folder's owner nor root"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_folder_of_any_length_has_a_door_for_its_user_only() {
        let home = std::env::temp_dir().join(format!("penstock-local-{}", std::process::id()));
        let dir = home.join("d".repeat(200));
        std::fs::create_dir_all(&dir).unwrap();
        let refused = connect(&dir, DATA).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotFound);
        drop(listen(&dir, DATA).unwrap());
        assert_eq!(connect(&dir, DATA).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        // A socket left by a killed instance is replaced.
        let listener = listen(&dir, DATA).unwrap();
        let mode = std::fs::metadata(dir.join(DATA)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut mine = connect(&dir, DATA).unwrap();
        let (mut theirs, _) = listener.accept().unwrap();
        mine.write_all(b"here").unwrap();
        let mut bytes = [0; 4];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"here");
        let peer = Peer::of(&theirs).unwrap();
        assert!(peer.may_enter() && peer.pid == std::process::id() as i32, "{peer}");
        assert!(Peer { pid: 1, uid: 0 }.may_enter());
        assert!(!Peer { pid: 1, uid: rustix::process::geteuid().as_raw() ^ 77 }.may_enter());
        remove(&dir, DATA);
        std::fs::write(dir.join(DATA), b"a file").unwrap();
        assert!(listen(&dir, DATA).unwrap_err().contains("in the way"));
        std::fs::remove_dir_all(&home).unwrap();
    }
}
