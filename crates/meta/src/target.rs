//! The metadata target: opening, transactions, inode numbers, inodes in use.

use crate::cache::InodeCache;
use crate::entries::EntryCache;
use crate::error::MetaError;
use crate::inode::{Data, FileKind, Inode, Layout};
use crate::rows::{
    Entry, FsRow, bare_value, decode_entry_key, fs_key, inode_key, is_entry_key, owner_of, removed_key,
};
use crate::{LINK_MAX, ROOT};
use penstock_base::env::random_id;
use penstock_base::{BoundedSet, Env, FileKey, Gate, HashMap, Id128, Ino};
use penstock_chunk::{Target, map_range};
use penstock_kv::{Kv, WriteSet, for_each};
use penstock_session::{Clients, Request};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{Mutex, Notify};

/// Inode numbers reserved by one transaction.
const INO_RUN: u64 = 4096;

/// Properties of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsInfo {
    /// Identifier of the file system.
    pub id: Id128,
    /// Name of the file system.
    pub name: String,
    /// Time of creation in nanoseconds since 1970.
    pub created_ns: i64,
    /// Blocks in a chunk of new files.
    pub chunk_blocks: u32,
}

/// The metadata target of one fileset.
pub struct MetaTarget {
    pub(crate) env: Env,
    pub(crate) kv: Rc<dyn Kv>,
    pub(crate) target: Rc<Target>,
    pub(crate) gate: Rc<Gate>,
    pub(crate) fs: RefCell<FsRow>,
    pub(crate) next_ino: Cell<u64>,
    pub(crate) cache: RefCell<InodeCache>,
    pub(crate) entries: RefCell<EntryCache>,
    /// The sessions of all clients.
    pub(crate) clients: Rc<Clients>,
    /// Serialises operations that change something.
    pub(crate) changing: Mutex<()>,
    pub(crate) transactions: Cell<u64>,
    pub(crate) in_use: RefCell<HashMap<Ino, u64>>,
    /// Inodes known to have no access control list; below, inodes known to have no extended attribute at all.
    pub(crate) without_acl: BoundedSet<Ino>,
    pub(crate) without_xattrs: BoundedSet<Ino>,
    /// Removed files, ordered by the earliest time at which they may be dropped.
    pub(crate) reap_queue: RefCell<std::collections::BTreeSet<(Duration, Ino)>>,
    /// True while a removed file is being reaped; it is then not in the queue.
    pub(crate) reaping: Cell<bool>,
    pub(crate) reap_wake: Notify,
    pub(crate) closed: Cell<bool>,
    /// Progress of a running check or repair.
    pub(crate) progress: RefCell<Option<crate::check::CheckProgress>>,
}

impl MetaTarget {
    /// Opens the name space in `kv`, which `target` shares. An empty store gets an empty file system called
    /// `name`.
    pub async fn open(
        env: &Env,
        kv: Rc<dyn Kv>,
        target: Rc<Target>,
        gate: Rc<Gate>,
        name: &str,
    ) -> Result<Rc<Self>, MetaError> {
        let row = kv.get(fs_key()).await?;
        let fs = match row {
            Some(row) => FsRow::decode(&row)?,
            None => make_fs(env, &*kv, name, target.config().chunk_blocks).await?,
        };
        // Only now: rows of a format that this release does not know stay as they are.
        let clients = Clients::load(env, &*kv, target.config().generation).await?;
        let next_ino = highest_in_use(&*kv, fs.reserved_ino).await?;
        let meta = Rc::new(Self {
            env: env.clone(),
            kv,
            target,
            gate,
            next_ino: Cell::new(next_ino),
            fs: RefCell::new(fs),
            cache: RefCell::default(),
            entries: RefCell::default(),
            clients,
            changing: Mutex::default(),
            transactions: Cell::new(0),
            in_use: RefCell::default(),
            without_acl: BoundedSet::default(),
            without_xattrs: BoundedSet::default(),
            reap_queue: RefCell::default(),
            reaping: Cell::new(false),
            reap_wake: Notify::new(),
            closed: Cell::new(false),
            progress: RefCell::default(),
        });
        meta.queue_removed().await?;
        env.spawn("meta reap", Box::pin(meta.clone().reap_task()));
        Ok(meta)
    }

    /// The sessions of this file system.
    pub fn clients(&self) -> &Rc<Clients> {
        &self.clients
    }

    /// Properties of the file system.
    pub fn info(&self) -> FsInfo {
        let fs = self.fs.borrow();
        FsInfo { id: fs.id, name: fs.name.clone(), created_ns: fs.created_ns, chunk_blocks: fs.chunk_blocks }
    }

    /// Stops the background task and wakes all requests that wait, which then fail.
    pub fn stop(&self) {
        self.closed.set(true);
        self.reap_wake.notify_one();
        self.clients.stop();
    }

    /// True once the target has been stopped.
    pub fn is_stopped(&self) -> bool {
        self.closed.get()
    }

    pub(crate) fn now_ns(&self) -> i64 {
        self.env.wall_ns()
    }

    /// Returns an inode, from the cache or from its row. ESTALE if it does not exist.
    pub(crate) async fn inode(&self, ino: Ino) -> Result<Inode, MetaError> {
        if let Some(inode) = self.cache.borrow().get(ino) {
            return Ok(inode.clone());
        }
        let before = self.transactions.get();
        let row = self.kv.get(inode_key(ino)).await?.ok_or(Errno::STALE)?;
        let inode = Inode::decode(&row)?;
        if self.transactions.get() == before {
            self.cache.borrow_mut().put(inode.clone());
        }
        Ok(inode)
    }

    /// Returns a directory's inode. ENOTDIR if it is none.
    pub(crate) async fn directory(&self, ino: Ino) -> Result<Inode, MetaError> {
        let inode = self.inode(ino).await?;
        match inode.is_dir() {
            true => Ok(inode),
            false => Err(Errno::NOTDIR.into()),
        }
    }

    /// Allocates an inode number that no inode had before, not even one that a crash lost: clients survive a
    /// crash of the service, with the files that they had open.
    pub(crate) async fn new_ino(&self) -> Result<Ino, MetaError> {
        loop {
            let ino = self.next_ino.get() + 1;
            let reserved = self.fs.borrow().reserved_ino;
            if ino <= reserved {
                self.next_ino.set(ino);
                return Ok(Ino(ino));
            }
            // Made durable before a number of the run is used. The row only changes in place, so it may use
            // the headroom.
            let row = FsRow { reserved_ino: ino + INO_RUN, ..self.fs.borrow().clone() };
            let mut writes = WriteSet::new();
            writes.put(fs_key(), row.encode()).reclaims();
            self.kv.commit_durable(writes).await?;
            let mut fs = self.fs.borrow_mut();
            fs.reserved_ino = fs.reserved_ino.max(row.reserved_ino);
        }
    }

    /// Keeps a regular file from being reaped while its contents are being changed, and fails if it does not
    /// exist. Otherwise a late write could leave chunks of a file that is gone, and nothing would ever remove
    /// them.
    pub async fn change_contents(&self, ino: Ino) -> Result<InUse<'_>, MetaError> {
        // Counted before the inode is read, so that a removal from here on sees the user.
        self.use_inode(ino);
        let user = InUse { meta: self, ino };
        let known = self.cache.borrow().get(ino).map(Inode::kind);
        let kind = match known {
            Some(kind) => kind,
            None => self.inode(ino).await?.kind(),
        };
        match kind {
            FileKind::Regular => Ok(user),
            _ => Err(MetaError::Request(format!("inode {ino} has no contents"))),
        }
    }

    /// Commits a transaction with the inodes that it changes and, for a request with a sequence number, its
    /// result.
    pub(crate) async fn commit(
        &self,
        request: Request,
        mut writes: WriteSet,
        inodes: Vec<Inode>,
        reply: &[u8],
    ) -> Result<(), MetaError> {
        for inode in &inodes {
            assert!(inode.nlink <= LINK_MAX || inode.is_dir(), "links are counted before they are made");
            writes.put(inode_key(inode.ino), inode.encode());
        }
        Clients::record(request, reply, &mut writes);
        let entries = changed_entries(&writes)?;
        self.transactions.set(self.transactions.get() + 1);
        let result = {
            let _open = self.gate.change().await;
            self.kv.commit(writes).await
        };
        self.transactions.set(self.transactions.get() + 1);
        result?;
        for (dir, cookie, entry) in entries {
            self.entries.borrow_mut().changed(dir, cookie, entry);
        }
        self.committed(inodes);
        Ok(())
    }

    /// Puts the inodes of a committed transaction into the cache.
    pub(crate) fn committed(&self, inodes: Vec<Inode>) {
        let mut cache = self.cache.borrow_mut();
        for inode in inodes {
            // Inodes without a name too: their users still ask for them until they are reaped.
            cache.put(inode);
        }
    }

    /// Takes a name from an inode that is no directory. Taking the last name puts it into the queue of
    /// removed files.
    pub(crate) fn drop_link(&self, inode: &mut Inode, writes: &mut WriteSet) {
        inode.nlink -= 1;
        inode.times_ns[2] = self.now_ns();
        if inode.nlink == 0 {
            writes.put(removed_key(inode.ino), bare_value());
        }
    }

    /// Counts one use of an inode, which keeps it from being reaped.
    pub fn use_inode(&self, ino: Ino) {
        self.use_inode_times(ino, 1);
    }

    pub(crate) fn use_inode_times(&self, ino: Ino, times: u64) {
        *self.in_use.borrow_mut().entry(ino).or_default() += times;
    }

    /// Ends one use of an inode. The last use of an inode without a name queues it for reaping.
    pub fn release_inode(&self, ino: Ino) {
        self.release_inode_times(ino, 1);
    }

    pub(crate) fn release_inode_times(&self, ino: Ino, times: u64) {
        let mut in_use = self.in_use.borrow_mut();
        if let Some(count) = in_use.get_mut(&ino) {
            *count -= times;
            if *count == 0 {
                in_use.remove(&ino);
                drop(in_use);
                self.reap_if_removed(ino);
            }
        }
    }

    /// Makes every acknowledged operation durable.
    pub async fn sync(&self) -> Result<(), MetaError> {
        Ok(self.target.sync().await?)
    }
}

/// A use of an inode, which ends when this is dropped.
pub struct InUse<'a> {
    meta: &'a MetaTarget,
    ino: Ino,
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.meta.release_inode(self.ino);
    }
}

/// The directory entries that a transaction puts or deletes.
fn changed_entries(writes: &WriteSet) -> Result<Vec<(Ino, u64, Option<Entry>)>, MetaError> {
    let mut entries = Vec::new();
    for (key, value) in writes.changes().filter(|(key, _)| is_entry_key(key)) {
        let (dir, cookie) = decode_entry_key(key)?;
        entries.push((dir, cookie, value.map(Entry::decode).transpose()?));
    }
    Ok(entries)
}

/// Returns the number behind which inode numbers are free: the highest reserved one, or a higher one that is
/// in use.
async fn highest_in_use(kv: &dyn Kv, reserved: u64) -> Result<u64, MetaError> {
    let mut highest = reserved;
    // Only numbers of this fileset.
    let last = Ino((ROOT.0 >> 48 << 48) | ((1 << 48) - 1));
    let inodes = (inode_key(Ino(reserved + 1)), inode_key(last));
    let chunks = (map_range(FileKey::main(Ino(reserved + 1)), 0).0, map_range(FileKey::main(last), 0).0);
    for range in [inodes, chunks] {
        for_each(kv, range, |key, _| {
            if let Ok(ino) = owner_of(key, 3, true) {
                highest = highest.max(ino.0);
            }
            Ok::<_, MetaError>(())
        })
        .await?;
    }
    if highest > reserved {
        tracing::error!(
            highest,
            reserved,
            "inode numbers beyond the reserved ones are in use: `penstock fs check --repair` corrects it"
        );
    }
    Ok(highest)
}

async fn make_fs(env: &Env, kv: &dyn Kv, name: &str, chunk_blocks: u32) -> Result<FsRow, MetaError> {
    let now = env.wall_ns();
    let fs = FsRow {
        id: random_id(env),
        name: name.to_owned(),
        created_ns: now,
        secret: random_id(env),
        reserved_ino: ROOT.0 + INO_RUN,
        last_session: 0,
        chunk_blocks,
    };
    let root = Inode {
        ino: ROOT,
        mode: 0o040_755,
        nlink: 2,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        rdev: 0,
        size: 0,
        times_ns: [now; 4],
        cut: 0,
        parent: ROOT,
        entries: 0,
        layout: Layout { chunk_blocks, target: 0, replicas: 1 },
        data: Data::None,
    };
    let mut writes = WriteSet::new();
    writes.put(fs_key(), fs.encode()).put(inode_key(ROOT), root.encode());
    kv.commit(writes).await?;
    kv.flush().await?;
    Ok(fs)
}
