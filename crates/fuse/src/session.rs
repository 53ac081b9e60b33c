//! A FUSE session: performs INIT, then serves each request of the kernel as a future on the worker.
//!
//! The worker that owns the client reads the device itself, so that no request changes threads. The kernel
//! bounds the requests in flight: [`MAX_BACKGROUND`](crate::MAX_BACKGROUND), and one for each waiting thread.

use crate::abi::{
    InitIn, InitInExt, InitOut, MAJOR, MINOR, OLDEST_MINOR, OpenOut, WRITE_CACHE, WriteIn, fopen, init, op,
};
use crate::attr::{Root, VALID};
use crate::cache::Cache;
use crate::capabilities::Capabilities;
use crate::device::{Answer, Device, Inbox, Received, Request};
use crate::latency::{FuseLatency, Op};
use crate::{CONGESTION, MAX_BACKGROUND, MAX_WRITE_BYTES};
use futures_util::future::{Either, select};
use futures_util::{StreamExt, stream};
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Env, HashMap, HashSet, Ino};
use penstock_client::{Client, Failure, KernelCache, Purpose};
use penstock_worker::Polling;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;
use tokio::sync::Notify;

/// Time limit for the kernel to write back what programs stored through maps, when a mount in use is ended.
const WRITE_BACK: Duration = Duration::from_secs(5);
/// The most files that are written back at the same time when a mount ends.
const WRITTEN_BACK: usize = 16;
/// Time limit for answering the requests that were received before a mount ended.
const LAST_ANSWERS: Duration = Duration::from_secs(10);
/// Time between two interruptions of the requests that wait for a lock, when a mount ends.
const LOOK: Duration = Duration::from_millis(20);

/// INIT flags that are accepted where the kernel offers them. Each is for speed, or for access control lists,
/// set-id bits or locks. The mount also works on a kernel without them.
const WANTED: u32 = init::ASYNC_READ
    | init::BIG_WRITES
    | init::DO_READDIRPLUS
    | init::READDIRPLUS_AUTO
    | init::ASYNC_DIO
    | init::PARALLEL_DIROPS
    | init::MAX_PAGES
    | init::CACHE_SYMLINKS
    | init::NO_OPENDIR_SUPPORT
    | init::DONT_MASK
    | init::POSIX_ACL
    | init::SETXATTR_EXT
    // Without it the kernel asks for an extended attribute before every write.
    | init::HANDLE_KILLPRIV_V2
    | init::POSIX_LOCKS
    | init::FLOCK_LOCKS
    | init::INIT_EXT;

/// The state of one session with the kernel.
pub(crate) struct Session {
    pub(crate) client: Rc<Client>,
    pub(crate) root: Root,
    /// True if the kernel sends the longer SETXATTR argument, which has flags of its own.
    pub(crate) setxattr_ext: Cell<bool>,
    device: Rc<Device>,
    pub(crate) cache: Rc<Cache>,
    /// True if files that bypass the page cache may be mapped.
    maps_direct: Cell<bool>,
    last_handle: Cell<u64>,
    /// Handles that write through the page cache.
    pub(crate) writers: RefCell<HashSet<u64>>,
    /// By handle: the file, and the lock owners that locked bytes of it through that handle.
    pub(crate) lockers: RefCell<HashMap<u64, (Ino, BTreeSet<u64>)>>,
    /// By handle: the number of losses of the file's writes that were reported through it.
    pub(crate) seen_losses: RefCell<HashMap<u64, Rc<Cell<u64>>>>,
    pub(crate) capabilities: Capabilities,
    /// By request number: requests that wait for a lock, and the signal that interrupts the wait.
    pub(crate) waiting: RefCell<HashMap<u64, Rc<Notify>>>,
    latency: Rc<FuseLatency>,
    /// Notified when the last request in flight was answered and polling for the next one is due.
    served: Notify,
    polling: Polling,
    /// Notified when INIT is done.
    pub(crate) begun: Notify,
}

impl Session {
    pub(crate) fn new(
        client: Rc<Client>,
        device: Rc<Device>,
        cache: Rc<Cache>,
        latency: Rc<FuseLatency>,
    ) -> Rc<Self> {
        let root = Root(client.root());
        Rc::new(Self {
            client,
            root,
            setxattr_ext: Cell::new(false),
            device,
            cache,
            maps_direct: Cell::new(false),
            last_handle: Cell::new(0),
            writers: RefCell::default(),
            lockers: RefCell::default(),
            seen_losses: RefCell::default(),
            capabilities: Capabilities::default(),
            waiting: RefCell::default(),
            latency,
            served: Notify::new(),
            polling: Polling::default(),
            begun: Notify::new(),
        })
    }

    /// Serves requests until the file system is unmounted.
    pub(crate) async fn run(self: Rc<Self>, env: Env) -> io::Result<()> {
        let mut inbox = Inbox::new();
        loop {
            match self.device.receive(&mut inbox)? {
                Received::Request(request) => {
                    self.polling.called();
                    match request.header.opcode {
                        op::INIT => self.init(*request),
                        _ => {
                            self.cache.serving.set(self.cache.serving.get() + 1);
                            let mut work = Box::pin(serve(self.clone(), env.clone(), *request));
                            // Most requests end in the first poll. Only those that wait become tasks.
                            if poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await.is_pending()
                            {
                                env.spawn("file request", work);
                            }
                        }
                    }
                    // Work that the request left to other tasks runs before the next request is received.
                    yield_now().await;
                }
                Received::Empty => self.rest(&env).await?,
                Received::Unmounted => return Ok(()),
            }
        }
    }

    /// Has the kernel write back what programs have stored through maps of open files. Requests are served
    /// meanwhile, for 5 s at most (`WRITE_BACK`).
    pub(crate) async fn write_back(&self, env: &Env) {
        let files = self.client.open_files();
        let write_back = async |ino| self.cache.drop_pages(ino, 0..u64::MAX).await;
        let all = stream::iter(files).for_each_concurrent(WRITTEN_BACK, write_back);
        if timeout(env, WRITE_BACK, all).await.is_none() {
            tracing::warn!("some stores through maps are not written back: it takes too long");
        }
    }

    /// Waits until all received requests are answered, for 10 s at most. Nothing more is received by then.
    /// Requests that wait for a lock are interrupted.
    pub(crate) async fn finish(&self, env: &Env) {
        let until = env.now() + LAST_ANSWERS;
        while self.cache.serving.get() > 0 {
            if env.now() >= until {
                let requests = self.cache.serving.get();
                tracing::warn!(requests, "requests that take too long are given up");
                return;
            }
            self.waiting.borrow().values().for_each(|waiting| waiting.notify_one());
            timeout(env, LOOK, self.served.notified()).await;
        }
    }

    /// Waits for a request. Returns early while polling for the next one pays.
    async fn rest(&self, env: &Env) -> io::Result<()> {
        if self.cache.serving.get() == 0 && self.polling.continues(env.now()) {
            yield_now().await;
            return Ok(());
        }
        let readable = pin!(self.device.readable());
        match select(readable, pin!(self.served.notified())).await {
            Either::Left((readable, _)) => readable,
            Either::Right(_) => Ok(()),
        }
    }

    fn init(&self, request: Request) {
        let result = request.argument::<InitIn>().and_then(|kernel| {
            if kernel.major != MAJOR || kernel.minor < OLDEST_MINOR {
                tracing::error!(
                    major = kernel.major,
                    minor = kernel.minor,
                    "this kernel's FUSE is too old: {MAJOR}.{OLDEST_MINOR} is needed"
                );
                return Err(Errno::PROTO);
            }
            self.setxattr_ext.set(kernel.flags & init::SETXATTR_EXT != 0);
            let more = match kernel.flags & init::INIT_EXT {
                0 => 0,
                _ => request.argument::<InitInExt>()?.flags2,
            };
            self.maps_direct.set(more & init::DIRECT_IO_ALLOW_MMAP != 0);
            Ok(Answer::of(&InitOut {
                major: MAJOR,
                minor: MINOR.min(kernel.minor),
                // The kernel takes the smaller of this and its own bound.
                max_readahead: MAX_WRITE_BYTES.min(kernel.max_readahead),
                flags: WANTED & kernel.flags,
                flags2: more & init::DIRECT_IO_ALLOW_MMAP,
                max_background: MAX_BACKGROUND,
                congestion_threshold: CONGESTION,
                max_write: MAX_WRITE_BYTES,
                time_gran: 1,
                max_pages: (MAX_WRITE_BYTES as usize / BLOCK_BYTES) as u16,
                ..InitOut::default()
            }))
        });
        request.answer(result);
        self.begun.notify_one();
    }

    /// Creates a handle for a file of `size` bytes that the kernel opened with `flags`. The result contains
    /// the caching that the kernel may use. On failure the handle is gone and the file released.
    pub(crate) async fn opened(&self, ino: Ino, flags: u32, size: u64) -> Result<OpenOut, Failure> {
        let flags = OFlags::from_bits_retain(flags);
        let handle = self.last_handle.get() + 1;
        self.last_handle.set(handle);
        let seen = Rc::new(Cell::new(self.client.losses_told(ino)));
        self.seen_losses.borrow_mut().insert(handle, seen);
        let mut open_flags = 0;
        let writes = flags & OFlags::ACCMODE != OFlags::RDONLY;
        self.cache.looks.opened(ino);
        if writes {
            let known = if self.cache.may_ignore_size(ino) { 0 } else { size };
            self.cache.sizes.opened(handle, ino, known);
            self.client.note_open_for_writing(ino, true);
        }
        // A handle for writing uses the page cache only while this mount is alone, and never with O_APPEND or
        // O_DIRECT. The kernel writes at the end of the file that it knows, and keeps pages of that, but an
        // append goes to the real end. The kernel serialises writers of a file, except for direct I/O.
        //
        // Beside other mounts no writer uses pages. A writer with pages locks a page while its write waits
        // for a lease, so its reads would need an exclusive lease too. Readers on two mounts, under a lock
        // that they share, would take that lease from each other, and each time the kernel might ignore the
        // size that it is sent.
        let by_pages = !flags.intersects(OFlags::APPEND | OFlags::DIRECT) && self.client.is_alone();
        // Beside other mounts a reader does not use pages either while a program of this mount has the file
        // open for writing. Of several requests for the size that the kernel sent before one was answered, it
        // takes the first reply.
        let shared = !self.client.is_alone() && self.cache.sizes.is_open_for_writing(ino);
        let direct = writes || flags.contains(OFlags::DIRECT) || shared;
        if self.maps_direct.get() && !by_pages && direct {
            open_flags |= fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        } else if writes {
            self.writers.borrow_mut().insert(handle);
            self.client.note_writer(ino, true);
            if !self.client.is_alone() {
                // Gives up an older shared lease now, while no write has a page locked.
                if let Err(failure) = self.client.hold(ino, Purpose::Write).await {
                    self.forget_handle(handle, ino);
                    self.client.release(ino).await?;
                    return Err(failure);
                }
            }
        }
        // A handle that may change pages starts without pages that were read under a shared lease.
        if self.client.keeps_pages(ino) && (!writes || self.client.is_alone()) {
            open_flags |= fopen::KEEP_CACHE;
        }
        Ok(OpenOut { fh: handle, open_flags, padding: 0 })
    }

    /// Forgets a handle and all that was noted for it.
    pub(crate) fn forget_handle(&self, handle: u64, ino: Ino) {
        self.seen_losses.borrow_mut().remove(&handle);
        self.cache.sizes.closed(handle);
        self.cache.looks.closed(ino);
        if !self.cache.sizes.is_open_for_writing(ino) {
            self.client.note_mapped(ino, false);
            self.client.note_open_for_writing(ino, false);
        }
        if self.writers.borrow_mut().remove(&handle) {
            self.client.note_writer(ino, false);
        }
    }

    /// The time for which the kernel may keep a name or attributes: 1 s at most, no longer than the rest of
    /// the lease, and zero while there are other mounts.
    pub(crate) fn valid(&self) -> Duration {
        if self.client.is_alone() { VALID.min(self.client.left_of_lease()) } else { Duration::ZERO }
    }

    /// Returns the inode that a request is about.
    pub(crate) fn ino(&self, request: &Request) -> Ino {
        self.root.inner(request.header.nodeid)
    }

    /// Waits until the file of a request has no deferred pages, unless the request must not wait for them.
    async fn let_in(&self, request: &Request) {
        let ino = self.ino(request);
        match request.header.opcode {
            op::RELEASE | op::INTERRUPT | op::FORGET | op::BATCH_FORGET | op::DESTROY => {}
            // A write-back waits only for its own pages, in `write_page`.
            op::WRITE if is_write_back(request) => {}
            _ => self.cache.deferred.none(ino, 0..u64::MAX).await,
        }
    }

    async fn dispatch(&self, request: &mut Request) -> Result<Answer, Errno> {
        let _locked = self.note_locked(request);
        self.let_in(request).await;
        match request.header.opcode {
            op::LOOKUP => self.lookup(request).await,
            op::GETATTR => self.getattr(request).await,
            op::SETATTR => self.setattr(request).await,
            op::READLINK => self.readlink(request).await,
            op::SYMLINK => self.symlink(request).await,
            op::MKNOD => self.mknod(request).await,
            op::MKDIR => self.mkdir(request).await,
            op::UNLINK => self.unlink(request, false).await,
            op::RMDIR => self.unlink(request, true).await,
            op::RENAME => self.rename(request).await,
            op::RENAME2 => self.rename2(request).await,
            op::LINK => self.link(request).await,
            op::OPEN => self.open(request).await,
            op::CREATE => self.create(request, false).await,
            op::TMPFILE => self.create(request, true).await,
            op::STATX => self.statx(request).await,
            op::RELEASE => self.release(request).await,
            op::FLUSH => self.flush(request).await,
            op::GETLK => self.getlk(request).await,
            op::SETLK => self.setlk(request, false).await,
            op::SETLKW => self.setlk(request, true).await,
            op::INTERRUPT => self.interrupt(request),
            op::READ => self.read(request).await,
            op::WRITE => self.write(request).await,
            op::FALLOCATE => self.fallocate(request).await,
            op::COPY_FILE_RANGE => self.copy_file_range(request).await,
            op::LSEEK => self.lseek(request).await,
            op::FSYNC => self.fsync(request).await,
            op::FSYNCDIR => self.fsyncdir().await,
            op::READDIR => self.readdir(request).await,
            op::READDIRPLUS => self.readdirplus(request).await,
            op::STATFS => self.statfs().await,
            op::SETXATTR => self.setxattr(request).await,
            op::GETXATTR => self.getxattr(request).await,
            op::LISTXATTR => self.listxattr(request).await,
            op::REMOVEXATTR => self.removexattr(request).await,
            op::DESTROY | op::FORGET | op::BATCH_FORGET => Ok(Answer::Done),
            // After ENOSYS the kernel does not ask again, and does without or does the work itself.
            _ => Err(Errno::NOSYS),
        }
    }
}

/// True for a WRITE by which the kernel writes back pages.
fn is_write_back(request: &Request) -> bool {
    request.argument::<WriteIn>().is_ok_and(|write| write.write_flags & WRITE_CACHE != 0)
}

async fn serve(session: Rc<Session>, env: Env, mut request: Request) {
    let op = operation(request.header.opcode);
    let work = async {
        let result = session.dispatch(&mut request).await;
        request.answer(result);
    };
    match op {
        Some(op) => session.latency.of(op).time(&env, work).await,
        None => work.await,
    }
    session.cache.serving.set(session.cache.serving.get() - 1);
    if session.cache.serving.get() == 0 && session.polling.is_due() {
        session.served.notify_one();
    }
}

/// Returns the operation that an opcode is counted as, or None if its time is not recorded.
fn operation(opcode: u32) -> Option<Op> {
    Some(match opcode {
        op::LOOKUP => Op::Lookup,
        op::GETATTR | op::STATX => Op::GetAttr,
        op::SETATTR => Op::SetAttr,
        op::READLINK => Op::ReadLink,
        op::SYMLINK | op::MKNOD | op::MKDIR => Op::Make,
        op::UNLINK | op::RMDIR => Op::Unlink,
        op::RENAME | op::RENAME2 => Op::Rename,
        op::LINK => Op::Link,
        op::OPEN => Op::Open,
        op::CREATE | op::TMPFILE => Op::Create,
        op::READ => Op::Read,
        op::WRITE => Op::Write,
        op::LSEEK => Op::Seek,
        op::COPY_FILE_RANGE => Op::Copy,
        op::FALLOCATE => Op::Fallocate,
        op::RELEASE | op::FLUSH => Op::Release,
        op::GETLK | op::SETLK => Op::Lock,
        op::FSYNC | op::FSYNCDIR => Op::Fsync,
        op::READDIR | op::READDIRPLUS => Op::ReadDir,
        op::STATFS => Op::StatFs,
        op::SETXATTR | op::GETXATTR | op::LISTXATTR | op::REMOVEXATTR => Op::Xattr,
        _ => return None,
    })
}

/// Lets the other tasks of the worker run once.
async fn yield_now() {
    let mut yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
