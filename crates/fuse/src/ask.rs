//! Questions for the size of a file that the kernel puts to this process because this process put them to the kernel.
//!
//! In a fault of a map the kernel asks for no size, and what a program stores in a page behind the end that the kernel knows is
//! never written back. A notice of the new end is over only when it has had the page, which the kernel has locked for the read
//! that is to be answered. The reply to a question for attributes needs no page. So before that read is
//! answered a thread asks for the file's attributes through the mount, by its handle, and the kernel passes the question on.
//!
//! Invariant: a question from here is answered from what is known under the lease of who caused it, and waits for no notice.
#![allow(unsafe_code)]

use futures_util::future::{Either, select};
use penstock_base::env::timeout;
use penstock_base::{Env, HashMap, HashSet};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};

/// From the answer until the kernel has taken it.
const TAKEN: Duration = Duration::from_millis(2);
/// Longer than any answer takes, but where all threads that may ask wait.
const MOST_ASKED: Duration = Duration::from_secs(2);
/// Threads that ask at a time.
const MOST_ASKING: usize = 16;
/// `FILEID_INO64_GEN` of the kernel's exportfs.h, by which FUSE names an inode in handles.
const INO64_GEN: i32 = 0x81;

/// Threads of this process that ask, by their ids.
#[derive(Clone, Default)]
struct Threads(Arc<Mutex<HashSet<u32>>>);

impl Threads {
    fn with<T>(&self, act: impl FnOnce(&mut HashSet<u32>) -> T) -> T {
        // The set is whole whoever panicked.
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Asks through one mount.
pub(crate) struct Asker {
    env: Env,
    mount: PathBuf,
    threads: Threads,
    turns: Arc<Semaphore>,
    /// By inode as the kernel knows it, who waits for the answer.
    waiting: RefCell<HashMap<u64, Rc<Notify>>>,
    /// This process may not open by handle.
    refused: Cell<bool>,
}

impl Asker {
    pub(crate) fn new(env: &Env, mount: &Path) -> Self {
        Self {
            env: env.clone(),
            mount: mount.to_owned(),
            threads: Threads::default(),
            turns: Arc::new(Semaphore::new(MOST_ASKING)),
            waiting: RefCell::default(),
            refused: Cell::new(false),
        }
    }

    /// True if a request came from a thread that asks. It is answered now, if so.
    pub(crate) fn answers(&self, thread: u32, nodeid: u64) -> bool {
        let asked = self.threads.with(|threads| threads.contains(&thread));
        if asked && let Some(waiting) = self.waiting.borrow().get(&nodeid) {
            waiting.notify_waiters();
        }
        asked
    }

    /// Has the kernel ask for the attributes of the inode that it knows by this number, and take the answer.
    pub(crate) async fn ask(&self, nodeid: u64) {
        if self.refused.get() {
            return;
        }
        let turn = self.turns.clone().acquire_owned().await;
        let (mount, threads) = (self.mount.clone(), self.threads.clone());
        let answered = self.waiting.borrow_mut().entry(nodeid).or_default().clone();
        let taken = pin!(async {
            answered.notified().await;
            // Of another size the kernel drops all pages, and waits for the one that is being read; it knows the size then.
            self.env.sleep(TAKEN).await;
        });
        let asked = pin!(penstock_drive::runtime::blocking(move || {
            let result = ask(&mount, nodeid, &threads);
            drop(turn);
            result
        }));
        let end = timeout(&self.env, MOST_ASKED, select(taken, asked)).await;
        if Rc::strong_count(&answered) == 2 {
            self.waiting.borrow_mut().remove(&nodeid);
        }
        match end {
            Some(Either::Left(_) | Either::Right((Ok(()), _))) => {}
            Some(Either::Right((Err(error), _))) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.refused.set(true);
                tracing::info!(
                    "this user may not open files by handle: what a program stores through a map in what another mount added may be lost"
                );
            }
            Some(Either::Right((Err(error), _))) => {
                tracing::warn!(%error, nodeid, "the kernel was not told the size of a mapped file");
            }
            None => tracing::warn!(nodeid, "the kernel does not ask for the size of a mapped file"),
        }
    }
}

fn ask(mount: &Path, nodeid: u64, threads: &Threads) -> io::Result<()> {
    let root = rustix::fs::open(mount, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let file = open_by_handle(&root, nodeid)?;
    // SAFETY: it takes nothing and cannot fail.
    let thread = unsafe { libc::gettid() } as u32;
    threads.with(|threads| threads.insert(thread));
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let asked = rustix::fs::statx(&file, c"", flags, StatxFlags::BASIC_STATS);
    threads.with(|threads| threads.remove(&thread));
    asked?;
    Ok(())
}

/// A file handle as FUSE makes it: the inode's number in two halves, and its generation, which is always 0 here.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    high: u32,
    low: u32,
    generation: u32,
}

fn open_by_handle(root: &OwnedFd, nodeid: u64) -> io::Result<OwnedFd> {
    let bytes = (size_of::<Handle>() - 2 * size_of::<u32>()) as u32;
    let (high, low) = ((nodeid >> 32) as u32, nodeid as u32);
    let mut handle = Handle { bytes, kind: INO64_GEN, high, low, generation: 0 };
    // SAFETY: `handle` is laid out as `struct file_handle` with as many bytes behind it as it says, and outlives the call.
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
    // SAFETY: the descriptor is new, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}
