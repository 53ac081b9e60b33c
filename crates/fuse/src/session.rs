//! A session with the kernel: the first exchange, then one task of the worker for each request.
//!
//! The worker that owns the client reads the device itself, so that no request changes threads. Requests in flight
//! are bounded by the kernel ([`MAX_BACKGROUND`](crate::MAX_BACKGROUND) and one for each waiting thread).

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
use penstock_drive::patience::Patience;
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

/// Time for the kernel to write back what programs stored through maps, when a mount is taken away from them.
const WRITE_BACK: Duration = Duration::from_secs(5);
/// Files of which it does so at a time.
const WRITTEN_BACK: usize = 16;
/// Requests that were received before a mount ended have so long.
const LAST_ANSWERS: Duration = Duration::from_secs(10);
/// Between two looks whether some of them wait for a lock.
const LOOK: Duration = Duration::from_millis(20);

/// Each only makes things faster, or is for access control lists; a kernel without one does without.
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

/// A mounted file system as the kernel talks to it.
pub(crate) struct Session {
    pub(crate) client: Rc<Client>,
    pub(crate) root: Root,
    /// SETXATTR has flags of its own.
    pub(crate) setxattr_ext: Cell<bool>,
    device: Rc<Device>,
    pub(crate) cache: Rc<Cache>,
    /// Files that pass the page cache by may be mapped.
    maps_direct: Cell<bool>,
    last_handle: Cell<u64>,
    /// Handles that write through the page cache.
    pub(crate) writers: RefCell<HashSet<u64>>,
    /// By handle, the file and who locked bytes of it through that handle.
    pub(crate) lockers: RefCell<HashMap<u64, (Ino, BTreeSet<u64>)>>,
    /// By handle, the losses of writes to its file that were told through it.
    pub(crate) seen_losses: RefCell<HashMap<u64, Rc<Cell<u64>>>>,
    pub(crate) capabilities: Capabilities,
    /// Requests that wait for a lock.
    pub(crate) waiting: RefCell<HashMap<u64, Rc<Notify>>>,
    latency: Rc<FuseLatency>,
    /// The last of them was answered, and the next may come soon.
    served: Notify,
    patience: Patience,
    /// The first exchange is done.
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
            patience: Patience::default(),
            begun: Notify::new(),
        })
    }

    /// Serves until the file system is unmounted.
    pub(crate) async fn run(self: Rc<Self>, env: Env) -> io::Result<()> {
        let mut inbox = Inbox::new();
        loop {
            match self.device.receive(&mut inbox)? {
                Received::Request(request) => {
                    self.patience.called();
                    match request.header.opcode {
                        op::INIT => self.init(*request),
                        _ => {
                            self.cache.serving.set(self.cache.serving.get() + 1);
                            let mut work = Box::pin(serve(self.clone(), env.clone(), *request));
                            // Most are done at once. A task is made for what waits.
                            if poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await.is_pending()
                            {
                                env.spawn("file request", work);
                            }
                        }
                    }
                    // What they left to do runs before the next is looked for.
                    yield_now().await;
                }
                Received::Empty => self.rest(&env).await?,
                Received::Unmounted => return Ok(()),
            }
        }
    }

    /// Has the kernel write back what programs have stored through maps. Requests are served meanwhile.
    pub(crate) async fn write_back(&self, env: &Env) {
        let files = self.client.open_files();
        let write_back = async |ino| self.cache.drop_pages(ino, 0..u64::MAX).await;
        let all = stream::iter(files).for_each_concurrent(WRITTEN_BACK, write_back);
        if timeout(env, WRITE_BACK, all).await.is_none() {
            tracing::warn!("what programs stored through maps is not all written back: it takes too long");
        }
    }

    /// Answers what was received, once nothing more is. Who waits for a lock is interrupted.
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

    /// Waits for a request, or for a moment in which one may be there.
    async fn rest(&self, env: &Env) -> io::Result<()> {
        if self.cache.serving.get() == 0 && self.patience.looks_on(env.now()) {
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
                // The kernel's own bound is taken when it is smaller.
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

    /// A handle for a file of this size that the kernel opened with `flags`, and what it may do with it.
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
        // The kernel keeps the end of a file as it knows it, and pages of what it writes there: not for appends, which
        // go where the end is. It lets one writer at a time through, but for who passes its pages by.
        //
        // Beside other mounts no writer has pages. One that has them locks a page while its write waits for a lease, so
        // all that it reads would need an exclusive lease too, which readers of two mounts would take from each other
        // under a lock that they share. Each time the kernel might ignore the size that it is told.
        let by_pages = !flags.intersects(OFlags::APPEND | OFlags::DIRECT) && self.client.is_alone();
        //
        // Nor has a reader of a file that somebody of this mount writes to: of several requests for the size that the kernel
        // sent before one was answered, it takes the first reply.
        let shared = !self.client.is_alone() && self.cache.sizes.is_open_for_writing(ino);
        let direct = writes || flags.contains(OFlags::DIRECT) || shared;
        if self.maps_direct.get() && !by_pages && direct {
            open_flags |= fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        } else if writes {
            self.writers.borrow_mut().insert(handle);
            self.client.note_writer(ino, true);
            if !self.client.is_alone() {
                // A shared lease from before goes while no write has a page locked.
                if let Err(failure) = self.client.hold(ino, Purpose::Write).await {
                    self.forget_handle(handle, ino);
                    self.client.release(ino).await?;
                    return Err(failure);
                }
            }
        }
        // Whoever may change pages begins with none that were read under a shared lease.
        if self.client.keeps_pages(ino) && (!writes || self.client.is_alone()) {
            open_flags |= fopen::KEEP_CACHE;
        }
        Ok(OpenOut { fh: handle, open_flags, padding: 0 })
    }

    /// Takes a handle back.
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

    /// How long the kernel may keep a name or attributes.
    pub(crate) fn valid(&self) -> Duration {
        if self.client.is_alone() { VALID.min(self.client.left_of_lease()) } else { Duration::ZERO }
    }

    /// The inode that a request is about.
    pub(crate) fn ino(&self, request: &Request) -> Ino {
        self.root.inner(request.header.nodeid)
    }

    /// Waits until a request may be served beside pages that are to be written yet.
    async fn let_in(&self, request: &Request) {
        let ino = self.ino(request);
        match request.header.opcode {
            op::RELEASE | op::INTERRUPT | op::FORGET | op::BATCH_FORGET | op::DESTROY => {}
            // It waits for its own pages.
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
            // The kernel does not ask again, and does what it can by itself.
            _ => Err(Errno::NOSYS),
        }
    }
}

/// True if the kernel writes a page back.
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
    if session.cache.serving.get() == 0 && session.patience.is_due() {
        session.served.notify_one();
    }
}

/// What an opcode counts as.
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

/// Lets the other tasks of the worker run first.
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
