//! Waits until the kernel knows the size of a file, before a read of a mapped page is answered.
//!
//! In a page fault of a map the kernel asks for no size, and it never writes back stores behind the end that
//! it knows. A notice sets the new end at once, but then waits for the page that the end lies in. The kernel
//! may have locked that page for the read that is to be answered. So a thread opens the file by handle
//! through the mount, and polls its size with statx(2) until the kernel knows the end; then the read is
//! answered. A reply to a request for attributes would not do: when the kernel gets a new size in it, it
//! truncates its pages there, and zeros what was written behind that end meanwhile.
//!
//! Under a lock that a program has just got, the size must also become smaller: the thread makes the kernel
//! ask.
#![allow(unsafe_code)]

use crate::guard::connection_at;
use crate::mounts::places_of;
use penstock_base::Env;
use penstock_base::env::timeout;
use penstock_base::num::to_u32;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Time between two polls of the size. `SHOULD_KNOW` is the wait where this process may not open files by
/// handle: the kernel should know the size by then.
const PAUSE: Duration = Duration::from_micros(50);
const SHOULD_KNOW: Duration = Duration::from_millis(2);
/// The wait where no path leads to the mount.
const UNSEEN: Duration = Duration::from_millis(50);
/// Time limit for polling. No notice takes that long, unless all threads that send notices wait.
const MOST_LOOKED: Duration = Duration::from_secs(2);
/// The most files that are polled at the same time.
const MOST_LOOKING: usize = 16;
/// `FILEID_INO64_GEN` of the kernel's exportfs.h, the type of FUSE's file handles.
const INO64_GEN: i32 = 0x81;

/// Polls file sizes through one mount.
pub(crate) struct Asker {
    env: Env,
    mount: PathBuf,
    /// The connection number of the mount.
    connection: u32,
    turns: Semaphore,
    /// The same for questions, so that many locks keep no read of a page waiting.
    questions: Semaphore,
    /// True if this process may not open files by handle.
    refused: Cell<bool>,
    /// True if the last poll did not find the mount. It was logged, and is not logged again.
    unseen: Cell<bool>,
}

impl Asker {
    pub(crate) fn new(env: &Env, mount: &Path, connection: u32) -> Self {
        let (turns, questions) = (Semaphore::new(MOST_LOOKING), Semaphore::new(MOST_LOOKING));
        Self {
            env: env.clone(),
            mount: mount.to_owned(),
            connection,
            turns,
            questions,
            refused: Cell::new(false),
            unseen: Cell::new(false),
        }
    }

    /// Waits until the kernel knows that a file has `size` bytes, which a notice is sending it, or should
    /// know it. `nodeid` is the kernel's number of the inode.
    pub(crate) async fn until_known(&self, nodeid: u64, size: u64) {
        if self.refused.get() {
            return self.env.sleep(SHOULD_KNOW).await;
        }
        match timeout(&self.env, MOST_LOOKED, self.look_until(nodeid, size)).await {
            Some(Ok(())) => self.unseen.set(false),
            Some(Err(error)) => {
                self.cannot_look(nodeid, &error);
                if !self.refused.get() {
                    self.env.sleep(UNSEEN).await;
                }
            }
            None => {
                tracing::warn!(nodeid, size, "the kernel does not take the size of a mapped file");
            }
        }
    }

    /// Makes the kernel ask for a file's attributes until it goes by the size in the reply. A notice tells it
    /// of a larger size only. Returns false if it is worth another attempt later; true also where this
    /// process may not do it. The kernel must have nothing locked that the reply to that request needs.
    pub(crate) async fn until_asked(&self, nodeid: u64) -> bool {
        if self.refused.get() {
            return true;
        }
        match timeout(&self.env, MOST_LOOKED, self.ask_until(nodeid)).await {
            Some(Ok(())) => self.unseen.set(false),
            Some(Err(error)) => {
                self.cannot_look(nodeid, &error);
                return self.refused.get();
            }
            None => {
                tracing::warn!(nodeid, "the kernel does not take the size of a file");
                return false;
            }
        }
        true
    }

    fn cannot_look(&self, nodeid: u64, error: &io::Error) {
        if error.kind() == io::ErrorKind::PermissionDenied {
            self.refused.set(true);
            tracing::info!(
                "this user may not open files by handle: stores through a map behind the end of a file that another mount made longer may be lost"
            );
        } else if !self.unseen.replace(true) {
            tracing::warn!(
                %error,
                nodeid,
                "no path leads to the mount: stores through a map behind the end of a file that another mount made longer may be lost"
            );
        }
    }

    /// Opens a file by its handle.
    async fn open(&self, nodeid: u64) -> io::Result<Arc<OwnedFd>> {
        let (mount, connection) = (self.mount.clone(), self.connection);
        let opened = penstock_worker::blocking(move || {
            // The mount may have been moved, or a directory above it renamed.
            let root = match open_root(&mount, connection)? {
                Some(root) => Some(root),
                None => places_of(connection)?.iter().find_map(|place| open_root(place, connection).ok()?),
            };
            open_by_handle(&root.ok_or_else(|| io::Error::other("no path leads to it"))?, nodeid)
        });
        opened.await.map(Arc::new)
    }

    async fn look_until(&self, nodeid: u64, size: u64) -> io::Result<()> {
        let _turn = self.turns.acquire().await;
        let file = self.open(nodeid).await?;
        loop {
            let file = file.clone();
            if penstock_worker::blocking(move || size_of_open(&file, AtFlags::STATX_DONT_SYNC)).await? >= size
            {
                return Ok(());
            }
            self.env.sleep(PAUSE).await;
        }
    }

    async fn ask_until(&self, nodeid: u64) -> io::Result<()> {
        let _turn = self.questions.acquire().await;
        let file = self.open(nodeid).await?;
        loop {
            let file = file.clone();
            let is_taken = move || {
                let asked = size_of_open(&file, AtFlags::STATX_FORCE_SYNC)?;
                Ok::<_, io::Error>(size_of_open(&file, AtFlags::STATX_DONT_SYNC)? == asked)
            };
            if penstock_worker::blocking(is_taken).await? {
                return Ok(());
            }
            self.env.sleep(PAUSE).await;
        }
    }
}

/// The size of an open file. `sync` says if the kernel asks the mount for it.
fn size_of_open(file: &OwnedFd, sync: AtFlags) -> io::Result<u64> {
    Ok(rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH | sync, StatxFlags::SIZE)?.stx_size)
}

/// `struct file_handle` as FUSE fills it: the inode number in two halves, and its generation, which is always
/// 0 here.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    high: u32,
    low: u32,
    generation: u32,
}

/// Opens the root of the mount with this connection. None if `place` does not show it.
fn open_root(place: &Path, connection: u32) -> io::Result<Option<OwnedFd>> {
    let root = match rustix::fs::open(place, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        found => found?,
    };
    Ok((connection_at(&root, c"", AtFlags::EMPTY_PATH)? == connection).then_some(root))
}

fn open_by_handle(root: &OwnedFd, nodeid: u64) -> io::Result<OwnedFd> {
    let bytes = to_u32(size_of::<Handle>() - 2 * size_of::<u32>());
    let (high, low) = (to_u32(nodeid >> 32), to_u32(nodeid & u64::from(u32::MAX)));
    let mut handle = Handle { bytes, kind: INO64_GEN, high, low, generation: 0 };
    // SAFETY: `handle` is laid out as `struct file_handle`, is followed by as many bytes as it says, and
    // outlives the call.
    let opened = unsafe {
        libc::open_by_handle_at(
            root.as_raw_fd(),
            std::ptr::from_mut(&mut handle).cast(),
            libc::O_PATH | libc::O_CLOEXEC,
        )
    };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}
