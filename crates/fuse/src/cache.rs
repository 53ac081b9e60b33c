//! What the kernel keeps of a mount, and how it is told to let go of it.
//!
//! Notices are sent by a thread beside the worker: the kernel takes one only when it has locked the pages that it is
//! about, which requests may hold that wait for the worker.
//!
//! A read asks for attributes first and ends at the size that the kernel then believes in. A notice to drop pages makes
//! the kernel ignore the size in the reply to every request for attributes that it sent before (`attr_version` in
//! fs/fuse/inode.c), so a read would end at an older size. Such a request cannot be told from others, so around a notice
//! the size goes to the kernel by a notice of its own ([`crate::size_notice`]) before the attributes do.

use crate::abi::{InvalInodeOut, NOTIFY_INVAL_INODE, OutHeader};
use crate::ask::Asker;
use crate::attr::{Root, VALID};
use crate::known::KnownSizes;
use crate::locked::{Locked, halves};
use crate::looks::Looks;
use crate::reads::Reads;
use crate::size_notice::SizeNotice;
use penstock_base::env::timeout;
use penstock_base::{Env, HashMap, Ino, LocalBoxFuture};
use penstock_client::{KernelCache, Store};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, oneshot};
use zerocopy::IntoBytes;

/// The kernel counts in ticks, and may be one late.
const TICKS: Duration = Duration::from_millis(50);
/// How long after a notice the kernel may still wait for attributes that it asked for before it.
const CROSSING: Duration = Duration::from_secs(1);
/// Notices at a time. Each takes a thread while a page that it is about is locked, and the pool that they come from serves
/// drives too; where all its threads are taken, the worker would wait for one, which waits for the worker.
const MOST_SENT: usize = 64;
/// Time for a notice that need not wait for anybody, and how many that do wait are left behind: each has one of the turns above.
const TRY: Duration = Duration::from_millis(300);
const MOST_LEFT: usize = 32;
/// Inodes whose notices are remembered before those that are long over are forgotten.
const MOST_NOTICED: usize = 1024;

/// Notices to drop pages of an inode.
#[derive(Clone, Copy, Default)]
struct Noticed {
    running: u32,
    ended: Duration,
}

/// The kernel's side of one mount.
pub(crate) struct Cache {
    env: Env,
    root: Root,
    device: Arc<File>,
    noticed: RefCell<HashMap<Ino, Noticed>>,
    pub(crate) reads: Rc<Reads>,
    sending: Rc<Semaphore>,
    pub(crate) locked: Rc<Locked>,
    /// Notices that wait and that nobody waits for.
    left: Rc<Cell<usize>>,
    /// Files that are open for writing.
    pub(crate) sizes: KnownSizes,
    size_notice: Arc<SizeNotice>,
    /// Files whose size is on its way to the kernel.
    telling: Rc<Telling>,
    pub(crate) looks: Looks,
    pub(crate) asker: Asker,
}

impl Cache {
    /// `device` is the mount's descriptor, or a copy of it.
    pub(crate) fn new(
        env: &Env,
        root: Root,
        device: File,
        mount: &Path,
        connection: u32,
    ) -> io::Result<Self> {
        Ok(Self {
            env: env.clone(),
            root,
            device: Arc::new(device),
            noticed: RefCell::default(),
            reads: Rc::default(),
            sending: Rc::new(Semaphore::new(MOST_SENT)),
            locked: Rc::default(),
            left: Rc::default(),
            sizes: KnownSizes::default(),
            size_notice: Arc::new(SizeNotice::new()?),
            telling: Rc::default(),
            looks: Looks::default(),
            asker: Asker::new(env, mount, connection),
        })
    }

    pub(crate) fn env(&self) -> &Env {
        &self.env
    }

    fn note(&self, ino: Ino, begins: bool) {
        let now = self.env.now();
        let mut noticed = self.noticed.borrow_mut();
        if noticed.len() >= MOST_NOTICED {
            noticed.retain(|_, notices| notices.running > 0 || now < notices.ended + CROSSING);
        }
        let notices = noticed.entry(ino).or_default();
        match begins {
            true => notices.running += 1,
            false => (notices.running, notices.ended) = (notices.running - 1, now),
        }
    }

    /// Whether the kernel may ignore attributes that it waits for.
    pub(crate) fn may_ignore_size(&self, ino: Ino) -> bool {
        let noticed = self.noticed.borrow();
        let notices = noticed.get(&ino);
        notices.is_some_and(|notices| notices.running > 0 || self.env.now() < notices.ended + CROSSING)
    }

    /// A reply says how long a file is. The kernel goes by it, unless it may ignore that.
    pub(crate) fn is_answered(&self, ino: Ino, size: u64) {
        if !self.may_ignore_size(ino) {
            self.sizes.reaches(ino, size);
        }
    }

    /// Whether a size of a file is on its way to the kernel.
    pub(crate) fn is_telling(&self, ino: Ino) -> bool {
        self.telling.files.borrow().contains_key(&ino)
    }

    /// Lets a file's size in the kernel be as the bytes of `store` end at least. Complete when the kernel has taken it; it takes it
    /// later, too, if nobody waits.
    pub(crate) fn grow(&self, ino: Ino, store: Store) -> LocalBoxFuture<'static, ()> {
        let size = store.bytes().end;
        if !self.sizes.tells(ino, size) {
            return self.none_told(ino);
        }
        let (device, nodeid, notice) =
            (self.device.clone(), self.root.outer(ino.0), self.size_notice.clone());
        let (sending, telling) = (self.sending.clone(), Telling::begins(&self.telling, ino));
        let tell = async move {
            let _turn = sending.acquire().await;
            let told = penstock_drive::runtime::blocking(move || notice.send(&device, nodeid, size));
            if let Err(error) = told.await {
                tracing::error!(%error, %ino, "the kernel does not take the size of a file: a read may end too early");
            }
            drop((store, telling));
        };
        self.env.spawn("file size", Box::pin(tell));
        self.none_told(ino)
    }

    /// Has the kernel ask for the attributes of an inode again before it uses them. Waits for no page.
    pub(crate) async fn drop_attributes(&self, ino: Ino) {
        let (device, nodeid) = (self.device.clone(), self.root.outer(ino.0));
        self.note(ino, true);
        let drop = move || notify_inval_inode(&device, nodeid, &Drops::Nothing);
        let told = penstock_drive::runtime::blocking(drop).await;
        self.note(ino, false);
        if let Err(error) = told {
            tracing::error!(%error, %ino, "the kernel does not let go of attributes: they may be old");
        }
    }

    /// Sends a notice to drop pages, to its end. Complete when the kernel has taken it.
    fn send_drop(&self, ino: Ino, bytes: Range<u64>) -> oneshot::Receiver<()> {
        let (device, nodeid, sending) = (self.device.clone(), self.root.outer(ino.0), self.sending.clone());
        let (done, taken) = oneshot::channel();
        let left = self.left.clone();
        let send = async move {
            let _turn = sending.acquire().await;
            let drop = move || notify_inval_inode(&device, nodeid, &Drops::Pages(bytes));
            if let Err(error) = penstock_drive::runtime::blocking(drop).await {
                tracing::error!(%error, %ino, "the kernel does not let go of pages: they may be old");
            }
            if done.send(()).is_err() {
                left.set(left.get() - 1);
            }
        };
        self.env.spawn("drop pages", Box::pin(send));
        taken
    }

    /// Drops pages around those that requests have locked. Where a notice waits all the same, as for a page that a program has changed and
    /// that is being written back, what lies before and behind that page is dropped. Returns whether no notice waits.
    async fn drop_around(&self, ino: Ino, size: u64) -> bool {
        let whole = 0..u64::MAX;
        let mut parts = self.locked.around(ino, &whole);
        let mut all = parts.first() == Some(&whole);
        while !parts.is_empty() {
            let until = self.env.now() + TRY;
            let sent: Vec<_> =
                parts.into_iter().map(|part| (self.send_drop(ino, part.clone()), part)).collect();
            parts = Vec::new();
            for (mut taken, part) in sent {
                if timeout(&self.env, until.saturating_sub(self.env.now()), &mut taken).await.is_some() {
                    continue;
                }
                all = false;
                if taken.try_recv().is_ok() {
                    continue;
                }
                self.left.set(self.left.get() + 1);
                drop(taken);
                match halves(&part, size) {
                    Some(halves) if self.left.get() < MOST_LEFT => {
                        parts.extend(halves.iter().flat_map(|half| self.locked.around(ino, half)));
                    }
                    _ => {
                        tracing::warn!(%ino, ?part, "pages are being written back, and may be seen as they were")
                    }
                }
            }
        }
        all
    }

    /// Waits until no size of a file is on its way to the kernel.
    pub(crate) fn none_told(&self, ino: Ino) -> LocalBoxFuture<'static, ()> {
        let telling = self.telling.clone();
        Box::pin(async move {
            loop {
                let ended = telling.ended.notified();
                if !telling.files.borrow().contains_key(&ino) {
                    return;
                }
                ended.await;
            }
        })
    }
}

/// Notices with sizes that are under way.
#[derive(Default)]
struct Telling {
    files: RefCell<HashMap<Ino, u32>>,
    ended: Notify,
}

/// One of them, while it lives.
struct Told(Rc<Telling>, Ino);

impl Telling {
    fn begins(of: &Rc<Self>, ino: Ino) -> Told {
        *of.files.borrow_mut().entry(ino).or_default() += 1;
        Told(of.clone(), ino)
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        let Self(telling, ino) = self;
        let mut files = telling.files.borrow_mut();
        let running = files.get_mut(ino).expect("a notice is known while it is under way");
        *running -= 1;
        if *running == 0 {
            files.remove(ino);
        }
        drop(files);
        telling.ended.notify_waiters();
    }
}

/// True if no notice is needed: the kernel knows nothing of the inode, or nothing at all any more.
pub(crate) fn is_needless(error: Errno) -> bool {
    matches!(error, Errno::NOENT | Errno::NODEV | Errno::NOTCONN)
}

/// What a notice has the kernel drop of an inode, with its attributes.
enum Drops {
    Pages(Range<u64>),
    Nothing,
}

fn notify_inval_inode(device: &File, nodeid: u64, what: &Drops) -> io::Result<()> {
    let (off, len) = match what {
        // A length of zero is to the end.
        Drops::Pages(bytes) => {
            let end = i64::try_from(bytes.end);
            (
                i64::try_from(bytes.start).unwrap_or(i64::MAX),
                end.map_or(0, |end| end.saturating_sub_unsigned(bytes.start)),
            )
        }
        Drops::Nothing => (-1, 0),
    };
    let notice = InvalInodeOut { ino: nodeid, off, len };
    let len = size_of::<OutHeader>() + size_of::<InvalInodeOut>();
    let header = OutHeader { len: len as u32, error: NOTIFY_INVAL_INODE, unique: 0 };
    match rustix::io::writev(device, &[IoSlice::new(header.as_bytes()), IoSlice::new(notice.as_bytes())]) {
        Err(error) if !is_needless(error) => Err(error.into()),
        _ => Ok(()),
    }
}

impl KernelCache for Cache {
    fn drop_pages(&self, ino: Ino, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        let (device, nodeid) = (self.device.clone(), self.root.outer(ino.0));
        let all = bytes == (0..u64::MAX);
        let mark = self.reads.mark();
        let known = all && self.sizes.drop_begins(ino);
        if all {
            self.looks.is_due(ino);
        }
        self.note(ino, true);
        Box::pin(async move {
            let turn = self.sending.acquire().await;
            let told = penstock_drive::runtime::blocking(move || {
                notify_inval_inode(&device, nodeid, &Drops::Pages(bytes))
            })
            .await;
            drop(turn);
            self.note(ino, false);
            if known {
                self.sizes.drop_ends(ino, told.is_err());
            }
            match told {
                Ok(()) if all => self.reads.dropped(ino, mark),
                Ok(()) => {}
                Err(error) => {
                    tracing::error!(%error, %ino, "the kernel does not let go of pages: they may be old");
                }
            }
        })
    }

    fn hide_pages(&self, ino: Ino, size: u64) -> LocalBoxFuture<'_, ()> {
        let mark = self.reads.mark();
        let known = self.sizes.drop_begins(ino);
        self.looks.is_due(ino);
        self.note(ino, true);
        Box::pin(async move {
            let all = self.drop_around(ino, size).await;
            self.note(ino, false);
            if known {
                self.sizes.drop_ends(ino, !all);
            }
            if all {
                self.reads.dropped(ino, mark);
            }
        })
    }

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        // Made here, so that the time runs from now on.
        self.env.sleep(VALID + TICKS)
    }
}
