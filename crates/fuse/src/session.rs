//! The state of a FUSE session: INIT, handles, and the end of a mount.

use crate::abi::{InitIn, InitInExt, InitOut, MAJOR, MINOR, OLDEST_MINOR, OpenOut, fopen, init};
use crate::attr::VALID;
use crate::cache::Cache;
use crate::capabilities::Capabilities;
use crate::device::{Answer, Device, Request};
use crate::latency::FuseLatency;
use crate::nodes::Nodes;
use crate::{CONGESTION, MAX_BACKGROUND, MAX_WRITE_BYTES};
use futures_util::{StreamExt, stream};
use penstock_base::env::timeout;
use penstock_base::num::to_u16;
use penstock_base::{BLOCK_BYTES, Env, FileId, HashMap, HashSet};
use penstock_client::{Attr, Client, Failure, KernelCache, Purpose, Reported};
use penstock_worker::Polling;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
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
    | init::DONT_MASK
    | init::POSIX_ACL
    | init::SETXATTR_EXT
    // Without it the kernel asks for an extended attribute before every write.
    | init::HANDLE_KILLPRIV_V2
    | init::POSIX_LOCKS
    | init::FLOCK_LOCKS
    | init::INIT_EXT;

/// A directory, and the lease on its names at a moment.
#[derive(Clone, Copy)]
pub(crate) struct NamesOf {
    dir: FileId,
    lease: Option<u64>,
}

/// The state of one session with the kernel.
pub(crate) struct Session {
    pub(crate) client: Rc<Client>,
    /// True if the kernel sends the longer SETXATTR argument, which has flags of its own.
    pub(crate) setxattr_ext: Cell<bool>,
    pub(crate) device: Rc<Device>,
    pub(crate) cache: Rc<Cache>,
    pub(crate) nodes: Rc<Nodes>,
    /// True if files that bypass the page cache may be mapped.
    maps_direct: Cell<bool>,
    last_handle: Cell<u64>,
    /// Handles that write through the page cache.
    pub(crate) writers: RefCell<HashSet<u64>>,
    /// By handle: the file, and the lock owners that locked bytes of it through that handle.
    pub(crate) lockers: RefCell<HashMap<u64, (FileId, BTreeSet<u64>)>>,
    /// By handle: the losses that were reported through it.
    pub(crate) reported: RefCell<HashMap<u64, Rc<Reported>>>,
    pub(crate) capabilities: Capabilities,
    /// By request number: requests that wait for a lock, and the signal that interrupts the wait.
    pub(crate) waiting: RefCell<HashMap<u64, Rc<Notify>>>,
    pub(crate) latency: Rc<FuseLatency>,
    /// Notified when the last request in flight was answered and polling for the next one is due.
    pub(crate) served: Notify,
    pub(crate) polling: Polling,
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
        Rc::new(Self {
            client,
            setxattr_ext: Cell::new(false),
            device,
            nodes: cache.nodes().clone(),
            cache,
            maps_direct: Cell::new(false),
            last_handle: Cell::new(0),
            writers: RefCell::default(),
            lockers: RefCell::default(),
            reported: RefCell::default(),
            capabilities: Capabilities::default(),
            waiting: RefCell::default(),
            latency,
            served: Notify::new(),
            polling: Polling::default(),
            begun: Notify::new(),
        })
    }

    /// Has the kernel write back what programs have stored through maps of open files. Requests are served
    /// meanwhile, for 5 s at most (`WRITE_BACK`).
    pub(crate) async fn write_back(&self, env: &Env) {
        let files = self.client.open_files();
        let write_back = async |file| self.cache.drop_pages(file, 0..u64::MAX).await;
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

    /// Serves INIT, the first request.
    pub(crate) fn init(&self, request: Request) {
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
            if more & init::HAS_EXPIRE_ONLY != 0 {
                self.cache.knows_expiry();
            }
            Ok(Answer::of(&InitOut {
                major: MAJOR,
                minor: MINOR.min(kernel.minor),
                // The kernel takes the smaller of this and its own bound.
                max_readahead: MAX_WRITE_BYTES.min(kernel.max_readahead),
                flags: WANTED & kernel.flags,
                flags2: more & (init::DIRECT_IO_ALLOW_MMAP | init::HAS_EXPIRE_ONLY),
                max_background: MAX_BACKGROUND,
                congestion_threshold: CONGESTION,
                max_write: MAX_WRITE_BYTES,
                time_gran: 1,
                max_pages: to_u16(MAX_WRITE_BYTES as usize / BLOCK_BYTES),
                ..InitOut::default()
            }))
        });
        request.answer(result);
        self.begun.notify_one();
    }

    /// Creates a handle for a file of `size` bytes that the kernel opened with `flags`. The result contains
    /// the caching that the kernel may use. On failure the handle is gone and the file released.
    pub(crate) async fn opened(&self, file: FileId, flags: u32, size: u64) -> Result<OpenOut, Failure> {
        let flags = OFlags::from_bits_retain(flags);
        let handle = self.last_handle.get() + 1;
        self.last_handle.set(handle);
        self.reported.borrow_mut().insert(handle, Rc::new(self.client.reported(file)));
        let mut open_flags = 0;
        let writes = flags & OFlags::ACCMODE != OFlags::RDONLY;
        self.cache.looks.opened(file);
        if writes {
            let known = if self.cache.may_ignore_size(file) { 0 } else { size };
            self.cache.sizes.opened(handle, file, known);
            self.client.note_open_for_writing(file, true);
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
        // open for writing. If the kernel has sent several requests for the size at once, it uses the first
        // reply and ignores the others.
        let shared = !self.client.is_alone() && self.cache.sizes.is_open_for_writing(file);
        let direct = writes || flags.contains(OFlags::DIRECT) || shared;
        if self.maps_direct.get() && !by_pages && direct {
            open_flags |= fopen::DIRECT_IO | fopen::PARALLEL_DIRECT_WRITES;
        } else if writes {
            self.writers.borrow_mut().insert(handle);
            self.client.note_writer(file, true);
            if !self.client.is_alone() {
                // Gives up an older shared lease now, while no write has a page locked.
                if let Err(failure) = self.client.hold(file, Purpose::Write).await {
                    self.forget_handle(handle, file);
                    self.client.release(file).await?;
                    return Err(failure);
                }
            }
        }
        // A handle that may change pages starts without pages that were read under a shared lease.
        if self.client.keeps_pages(file) && (!writes || self.client.is_alone()) {
            open_flags |= fopen::KEEP_CACHE;
        }
        Ok(OpenOut { fh: handle, open_flags, padding: 0 })
    }

    /// Forgets a handle and all that was noted for it.
    pub(crate) fn forget_handle(&self, handle: u64, file: FileId) {
        self.reported.borrow_mut().remove(&handle);
        self.cache.sizes.closed(handle);
        self.cache.looks.closed(file);
        if !self.cache.sizes.is_open_for_writing(file) {
            self.client.note_mapped(file, false);
            self.client.note_open_for_writing(file, false);
        }
        if self.writers.borrow_mut().remove(&handle) {
            self.client.note_writer(file, false);
        }
    }

    /// The time for which the kernel may keep these attributes, which it gets now: 1 s at most, no longer
    /// than the rest of the session's lease time, and zero without a lease on them while there are other
    /// mounts.
    ///
    /// Those of an open file it does not keep beside other mounts: it goes by the size in a reply, and by
    /// notices, in an order of its own.
    pub(crate) fn valid(&self, attr: &Attr) -> Duration {
        if self.client.is_alone() {
            return self.longest();
        }
        match !self.cache.looks.is_open(attr.file()) && self.client.caches_attributes(attr) {
            true => {
                self.cache.given.attributes(attr.file());
                self.longest()
            }
            false => Duration::ZERO,
        }
    }

    /// The lease on the names of a directory, for [`Self::valid_name`].
    pub(crate) fn names_of(&self, dir: FileId) -> NamesOf {
        NamesOf { dir, lease: self.client.lease_on_names(dir) }
    }

    /// The time for which the kernel may keep a name that it gets now, as [`Self::valid`] for attributes. The
    /// name was asked for after `names` was made.
    ///
    /// Zero for a name that a rename moves: the kernel takes the time along to the new name.
    pub(crate) fn valid_name(&self, names: NamesOf, name: &[u8]) -> Duration {
        if self.client.is_alone() {
            return self.longest();
        }
        if self.cache.given.does_move(names.dir, name) {
            return Duration::ZERO;
        }
        match self.client.caches_names(names.dir, names.lease) {
            true => {
                self.cache.given.name(names.dir, name);
                self.longest()
            }
            false => Duration::ZERO,
        }
    }

    fn longest(&self) -> Duration {
        VALID.min(self.client.left_of_lease())
    }
}
