//! The kernel's caches of one mount: sends the notices that drop pages and attributes or set sizes.
//!
//! A thread beside the worker sends notices. The kernel takes a notice only when it has locked the pages that
//! the notice is about. Requests that wait for the worker may have these pages locked.
//!
//! A read asks for attributes first, and ends at the size that the kernel then believes in. A notice to drop
//! pages makes the kernel ignore the size in the reply to every older request for attributes (`attr_version`
//! in fs/fuse/inode.c), so a read would end at an older size. Such requests cannot be recognised. So around a
//! notice the size goes to the kernel by a notice of its own ([`crate::size_notice`]) before the attributes
//! do.

use crate::MAX_BACKGROUND;
use crate::ask::Asker;
use crate::attr::{TICKS, VALID};
use crate::deferred::Deferred;
use crate::given::{AllGiven, Name};
use crate::guard::abort;
use crate::hide::{Left, Part, hide};
use crate::known::KnownSizes;
use crate::last_found::LastFound;
use crate::last_lookups::LastLookups;
use crate::locked::Locked;
use crate::looks::Looks;
use crate::nodes::Nodes;
use crate::notices::{Drops, drop_pages_now, notify_expire, notify_inval_inode};
use crate::reads::Reads;
use crate::size_notice::SizeNotice;
use penstock_base::env::timeout;
use penstock_base::{Env, FileId, HashMap, LocalBoxFuture};
use penstock_client::{KernelCache, Store};
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, oneshot};

/// The time after a notice for which the kernel may still wait for attributes that it requested before it.
const CROSSING: Duration = Duration::from_secs(1);
/// The most notices at the same time. Each takes a thread while a page that it is about is locked. The thread
/// comes from the pool that serves drives too. With all its threads taken, the worker would wait for one of
/// them, and they wait for the worker.
const MOST_SENT: usize = 64;
/// The number of remembered inodes above which inodes without recent notices are forgotten.
const MOST_NOTICED: usize = 1024;

/// The notices of one inode: the number that are running, and the time when the last one ended.
#[derive(Clone, Copy, Default)]
struct Noticed {
    running: u32,
    ended: Duration,
}

/// The kernel's caches of one mount, and the tables that say what they may contain.
pub(crate) struct Cache {
    env: Env,
    nodes: Rc<Nodes>,
    device: Arc<File>,
    noticed: RefCell<HashMap<FileId, Noticed>>,
    pub(crate) reads: Rc<Reads>,
    sending: Rc<Semaphore>,
    pub(crate) locked: Locked,
    pub(crate) deferred: Deferred,
    /// The number of requests that were received and not answered.
    pub(crate) serving: Cell<usize>,
    connection: u32,
    /// Files that are open for writing.
    pub(crate) sizes: KnownSizes,
    size_notice: Arc<SizeNotice>,
    /// Files whose size is being sent to the kernel.
    telling: Rc<Telling>,
    pub(crate) looks: Looks,
    pub(crate) asker: Asker,
    /// The names and attributes that the kernel got under leases.
    pub(crate) given: AllGiven,
    pub(crate) last_lookups: LastLookups,
    pub(crate) last_found: LastFound,
    /// True if the kernel knows notices that let names expire.
    expires: Cell<bool>,
}

impl Cache {
    /// Creates the tables of a mount. `device` is the mount's descriptor, or a duplicate of it.
    pub(crate) fn new(
        env: &Env,
        nodes: Rc<Nodes>,
        device: File,
        mount: &Path,
        connection: u32,
    ) -> io::Result<Self> {
        Ok(Self {
            env: env.clone(),
            nodes,
            device: Arc::new(device),
            noticed: RefCell::default(),
            reads: Rc::default(),
            sending: Rc::new(Semaphore::new(MOST_SENT)),
            locked: Locked::default(),
            deferred: Deferred::default(),
            serving: Cell::new(0),
            connection,
            sizes: KnownSizes::default(),
            size_notice: Arc::new(SizeNotice::new()?),
            telling: Rc::default(),
            looks: Looks::default(),
            asker: Asker::new(env, mount, connection),
            given: AllGiven::new(env),
            last_lookups: LastLookups::default(),
            last_found: LastFound::default(),
            expires: Cell::new(false),
        })
    }

    pub(crate) fn env(&self) -> &Env {
        &self.env
    }

    /// The nodes of the mount.
    pub(crate) fn nodes(&self) -> &Rc<Nodes> {
        &self.nodes
    }

    fn note(&self, file: FileId, begins: bool) {
        let now = self.env.now();
        let mut noticed = self.noticed.borrow_mut();
        if noticed.len() >= MOST_NOTICED {
            noticed.retain(|_, notices| notices.running > 0 || now < notices.ended + CROSSING);
        }
        let notices = noticed.entry(file).or_default();
        match begins {
            true => notices.running += 1,
            false => (notices.running, notices.ended) = (notices.running - 1, now),
        }
    }

    /// True if the kernel may ignore the size in a reply to a request for attributes, because of a notice.
    pub(crate) fn may_ignore_size(&self, file: FileId) -> bool {
        let noticed = self.noticed.borrow();
        let notices = noticed.get(&file);
        notices.is_some_and(|notices| notices.running > 0 || self.env.now() < notices.ended + CROSSING)
    }

    /// Records the size in a reply, which the kernel takes unless it may ignore it.
    pub(crate) fn is_answered(&self, file: FileId, size: u64) {
        self.sizes.is_answered(file, size, self.may_ignore_size(file));
    }

    /// True if a size of the file is being sent to the kernel.
    pub(crate) fn is_telling(&self, file: FileId) -> bool {
        self.telling.files.borrow().contains_key(&file)
    }

    /// Makes the kernel's size of a file at least the end of the bytes of `store`. Completes when the kernel
    /// has taken it. The notice is sent even if the result is dropped.
    pub(crate) fn grow(&self, file: FileId, store: Store) -> LocalBoxFuture<'static, ()> {
        let size = store.bytes().end;
        let Some(nodeid) = self.nodes.node(file).filter(|_| self.sizes.tells(file, size)) else {
            return self.none_told(file);
        };
        let (device, notice) = (self.device.clone(), self.size_notice.clone());
        let (sending, telling) = (self.sending.clone(), Telling::begins(&self.telling, file));
        let tell = async move {
            let _turn = sending.acquire().await;
            let told = penstock_worker::blocking(move || notice.send(&device, nodeid, size));
            if let Err(error) = told.await {
                tracing::error!(%error, %file, "the kernel does not take the size of a file: a read may end too early");
            }
            drop((store, telling));
        };
        self.env.spawn("file size", Box::pin(tell));
        self.none_told(file)
    }

    /// The kernel knows notices that let names expire.
    pub(crate) fn knows_expiry(&self) {
        self.expires.set(true);
    }

    /// Makes the kernel ask for names before it uses them again. The kernel may have their directory locked
    /// for a request that waits for another client, which waits for this.
    fn expire_names(&self, names: Vec<Name>) -> impl Future<Output = ()> + 'static {
        let (device, sending) = (self.device.clone(), self.sending.clone());
        let named = |(dir, name)| Some((self.nodes.node(dir)?, name));
        let names: Vec<(u64, Box<[u8]>)> = names.into_iter().filter_map(named).collect();
        let (expired, done) = oneshot::channel();
        let expire = async move {
            let _turn = sending.acquire().await;
            let expire = move || names.iter().try_for_each(|(dir, name)| notify_expire(&device, *dir, name));
            match penstock_worker::blocking(expire).await {
                // Nobody may wait any more.
                Ok(()) => drop(expired.send(())),
                Err(error) => tracing::error!(%error, "the kernel does not let names expire"),
            }
        };
        self.env.spawn("names expire", Box::pin(expire));
        async move {
            if done.await.is_err() {
                // They expire by themselves.
                std::future::pending().await
            }
        }
    }

    /// Makes the kernel request the attributes of an inode again before it uses them. Waits for no page.
    pub(crate) async fn drop_attributes(&self, file: FileId) {
        let Some(nodeid) = self.nodes.node(file) else { return };
        let device = self.device.clone();
        self.note(file, true);
        let drop = move || notify_inval_inode(&device, nodeid, &Drops::Nothing);
        let told = penstock_worker::blocking(drop).await;
        self.note(file, false);
        if let Err(error) = told {
            tracing::error!(%error, %file, "the kernel does not drop the attributes of a file: they may be stale");
        }
    }

    /// Drops parts of files from the kernel's cache within a time limit. A page may remain that no program
    /// sees, because a request has it locked. Fails if other pages remain.
    async fn hide_parts(&self, parts: Vec<Part>, within: Duration) -> io::Result<()> {
        let device = self.device.clone();
        let mut left = penstock_worker::blocking(move || hide(&device, parts, within)).await?;
        if left.retain(|part| self.may_be_seen(part)) {
            // Write-backs may end in time, or requests may arrive that explain the locked pages.
            left = penstock_worker::blocking(move || Left::wait(left)).await?;
        }
        match left.retain(|part| self.may_be_seen(part)) {
            true => Err(io::Error::other("pages are left that no request is known to have locked")),
            false => Ok(()),
        }
    }

    fn may_be_seen(&self, page: &Part) -> bool {
        // The kernel forgets a file only without its pages.
        let Some(file) = self.nodes.file(page.nodeid) else { return false };
        let held_back = self.serving.get() >= usize::from(MAX_BACKGROUND);
        !self.locked.is_locked(file, &page.bytes, held_back) || self.deferred.refuses(file, &page.bytes)
    }

    /// Waits until no size of the file is being sent to the kernel.
    pub(crate) fn none_told(&self, file: FileId) -> LocalBoxFuture<'static, ()> {
        let telling = self.telling.clone();
        Box::pin(async move {
            loop {
                let ended = telling.ended.notified();
                if !telling.files.borrow().contains_key(&file) {
                    return;
                }
                ended.await;
            }
        })
    }
}

/// The size notices in flight: the files with their numbers of notices.
#[derive(Default)]
struct Telling {
    files: RefCell<HashMap<FileId, u32>>,
    ended: Notify,
}

/// A size notice in flight. It ends when this is dropped.
struct Told(Rc<Telling>, FileId);

impl Telling {
    fn begins(of: &Rc<Self>, file: FileId) -> Told {
        *of.files.borrow_mut().entry(file).or_default() += 1;
        Told(of.clone(), file)
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let Self(telling, file) = self;
        let mut files = telling.files.borrow_mut();
        let running = files.get_mut(file).expect("a notice is known while it is under way");
        *running -= 1;
        if *running == 0 {
            files.remove(file);
        }
        drop(files);
        telling.ended.notify_waiters();
    }
}

impl KernelCache for Cache {
    fn drop_pages(&self, file: FileId, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        let (device, node) = (self.device.clone(), self.nodes.node(file));
        let all = bytes == (0..u64::MAX);
        let mark = self.reads.mark();
        let known = all && self.sizes.drop_begins(file);
        if all {
            self.looks.is_due(file);
        }
        self.note(file, true);
        Box::pin(async move {
            let turn = self.sending.acquire().await;
            let pages = bytes.clone();
            let told = match node {
                Some(nodeid) => {
                    penstock_worker::blocking(move || drop_pages_now(&device, nodeid, pages)).await
                }
                // The kernel does not know the file.
                None => Ok(()),
            };
            drop(turn);
            // The kernel has dropped these pages, but deferred data may still be on its way to the client.
            self.deferred.none(file, bytes).await;
            self.note(file, false);
            if known {
                self.sizes.drop_ends(file, told.is_err());
            }
            if all {
                // Until now the lease may have served a check.
                self.looks.is_due(file);
            }
            match told {
                Ok(()) if all => self.reads.dropped(file, mark),
                Ok(()) => {}
                Err(error) => {
                    tracing::error!(%error, %file, "the kernel does not drop the pages of a file: they may be stale");
                }
            }
        })
    }

    fn hide_pages<'a>(
        &'a self,
        files: Vec<(FileId, u64)>,
        within: Duration,
        lasts: &'a dyn Fn() -> bool,
    ) -> LocalBoxFuture<'a, ()> {
        let mark = self.reads.mark();
        let mut parts = Vec::new();
        let mut known = Vec::new();
        for (file, size) in &files {
            if self.sizes.drop_begins(*file) {
                known.push(*file);
            }
            self.looks.is_due(*file);
            self.note(*file, true);
            if let Some(nodeid) = self.nodes.node(*file) {
                let seen = self.locked.seen(*file).into_iter();
                parts.extend(seen.map(|bytes| Part { nodeid, bytes, size: *size }));
            }
        }
        Box::pin(async move {
            let hidden = self.hide_parts(parts, within).await;
            let failed = hidden.is_err();
            if let Err(why) = hidden
                && lasts()
            {
                tracing::error!(%why, "the mount is ended: its lease has run out, and the kernel cannot drop its pages in time");
                let connection = self.connection;
                if let Err(error) = penstock_worker::blocking(move || abort(connection)).await {
                    tracing::error!(%error, "the mount cannot be ended: programs may see stale pages");
                }
            }
            for (file, _) in files {
                self.note(file, false);
                if !failed {
                    self.reads.dropped(file, mark);
                }
            }
            // Sizes that the kernel knew are sent again.
            known.into_iter().for_each(|file| self.sizes.drop_ends(file, failed));
        })
    }

    fn forget_attributes(&self, file: FileId) -> LocalBoxFuture<'_, ()> {
        let forgetting = self.given.forget(file);
        Box::pin(async move {
            let Some(forgetting) = forgetting else { return };
            let Some(settled) = forgetting.settled() else { return };
            self.env.sleep(settled.saturating_sub(self.env.now())).await;
            self.drop_attributes(file).await;
            let (names, end) = forgetting.names();
            let rest = || end.saturating_sub(self.env.now());
            let Some(names) = names.filter(|names| self.expires.get() || names.is_empty()) else {
                return self.env.sleep(rest()).await;
            };
            let mut told: Vec<Name> = names.into_iter().map(|name| (file, name)).collect();
            while !told.is_empty() {
                timeout(&self.env, rest(), self.expire_names(told)).await;
                told = forgetting.take_moved();
            }
        })
    }

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        // The timer is made here, so that the time runs from this call on.
        self.env.sleep(VALID + TICKS)
    }
}
