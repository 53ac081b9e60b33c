//! Names: the rows of the name space with their caches, and the one transaction that changes them.
//!
//! Everybody may read. Changes need a [`Turn`]: one exists at a time, so operations that change something
//! follow each other.
//!
//! Invariants:
//! - a cache holds a row as of the last transaction: it is filled after the transaction that wrote the row,
//!   or from a read during which no transaction began or ended;
//! - a number of an inode is given once, also if a crash loses the inode: numbers are reserved durably before
//!   the first one of a run is used.

mod cache;
mod dirs;
mod entries;

pub(crate) use dirs::{SAME_HASH, check_name, entry_row, first_cookie};

use crate::FileKind;
use crate::error::MetaError;
use crate::inode::{Data, Inode};
use crate::rows::{
    Entry, FsRow, RemovedFile, RemovedState, StoreRow, decode_entry_key, fs_key, inode_key, is_entry_key,
    removed_key, store_key,
};
use crate::{LAST_INO, ROOT};
use cache::InodeCache;
use entries::EntryCache;
use penstock_base::rank::{Rank, RankedGuard, RankedMutex};
use penstock_base::{BoundedSet, DecodeError, Env, FileId, Gate, Ino};
use penstock_kv::{Kv, WriteSet, commit_apart};
use penstock_session::rows::LAST_SESSION;
use penstock_session::{Clients, Repeat, Request};
use penstock_wire::metadata::{Change, Time};
use rustix::io::Errno;
use std::cell::{Cell, Ref, RefCell};
use std::collections::BTreeSet;
use std::ops::Deref;
use std::rc::Rc;

/// Before the gate.
const TURN: Rank = Rank::new(20, "turn");
/// Inode numbers reserved by one transaction.
pub(crate) const INO_RUN: u64 = 4096;

/// The rows of one file system.
pub(crate) struct Names {
    env: Env,
    kv: Rc<dyn Kv>,
    gate: Rc<Gate>,
    fs: RefCell<FsRow>,
    last_ino: Cell<u64>,
    /// The last number that an earlier start may have given.
    given_before: u64,
    /// Lost numbers that are not made again: a target has something of them that it cannot drop.
    never_made: RefCell<BTreeSet<Ino>>,
    inodes: RefCell<InodeCache>,
    entries: RefCell<EntryCache>,
    absent: Absent,
    /// Grows when a transaction begins, and when it ends.
    transactions: Cell<u64>,
    /// Number of the last change.
    last_change: Cell<u64>,
    turn: RankedMutex<()>,
}

/// Rows that are known not to exist.
#[derive(Default)]
pub(crate) struct Absent {
    /// Inodes without an access control list.
    pub(crate) acl: BoundedSet<Ino>,
    /// Inodes without any extended attribute.
    pub(crate) xattrs: BoundedSet<Ino>,
}

/// The right to change the name space.
pub(crate) struct Turn<'a> {
    names: &'a Names,
    change: Change,
    /// The change as it was the first time, if it is repeated.
    repeats: Option<Repeat>,
    /// The clients, and the session that makes the change; none for the service itself.
    asks: Option<(&'a Rc<Clients>, u64)>,
    _one: RankedGuard<'a, ()>,
}

impl Names {
    /// The rows in `kv`. `fs` is its own row; inode numbers up to `last_ino` are taken.
    pub(crate) fn new(env: &Env, kv: Rc<dyn Kv>, gate: Rc<Gate>, fs: FsRow, last_ino: u64) -> Self {
        assert!((ROOT.0..=LAST_INO.0).contains(&last_ino), "{last_ino} is an inode of this fileset");
        assert!(last_ino >= fs.reserved_ino, "reserved numbers are taken");
        Self {
            env: env.clone(),
            kv,
            gate,
            fs: RefCell::new(fs),
            last_ino: Cell::new(last_ino),
            given_before: last_ino,
            never_made: RefCell::default(),
            inodes: RefCell::default(),
            entries: RefCell::default(),
            absent: Absent::default(),
            transactions: Cell::new(0),
            last_change: Cell::new(0),
            turn: RankedMutex::new(TURN, ()),
        }
    }

    /// Waits for the right to change something.
    pub(crate) async fn turn(&self) -> Turn<'_> {
        self.turn_for(None, None).await
    }

    /// Waits for the right to make a change for a session, or to repeat one, which keeps its number and its
    /// time.
    pub(crate) async fn turn_for<'a>(
        &'a self,
        repeats: Option<Repeat>,
        asks: Option<(&'a Rc<Clients>, u64)>,
    ) -> Turn<'a> {
        let one = self.turn.lock().await;
        assert!(self.transactions.get().is_multiple_of(2), "a turn begins between two transactions");
        let last = self.last_change.get();
        let change = match repeats {
            None => {
                let time = Time::from_ns(self.env.wall_ns());
                Change { number: last + 1, time, ..Change::default() }
            }
            Some(Repeat { change, .. }) => change,
        };
        self.last_change.set(last.max(change.number));
        Turn { names: self, change, repeats, asks, _one: one }
    }

    /// The file system's own row.
    pub(crate) fn fs(&self) -> Ref<'_, FsRow> {
        self.fs.borrow()
    }

    /// A number that a crash has lost is not given to the same file again.
    pub(crate) fn never_make(&self, ino: Ino) {
        self.never_made.borrow_mut().insert(ino);
    }

    /// The store, for reads.
    pub(crate) fn kv(&self) -> &dyn Kv {
        &*self.kv
    }

    /// The gate that every transaction passes.
    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Rows that are known not to exist.
    pub(crate) fn absent(&self) -> &Absent {
        &self.absent
    }

    /// Nanoseconds since 1970 by the clock of the machine; 0 before.
    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.env.wall_ns()).unwrap_or(0)
    }

    /// The time at which something is changed now.
    pub(crate) fn now(&self) -> Time {
        Time::from_ns(self.env.wall_ns())
    }

    /// Returns an inode, from the cache or from its row. ESTALE if it does not exist.
    pub(crate) async fn inode(&self, ino: Ino) -> Result<Inode, MetaError> {
        if let Some(inode) = self.inodes.borrow().get(ino) {
            return Ok(inode.clone());
        }
        let before = self.transactions.get();
        let row = self.kv.get(inode_key(ino)).await?;
        self.take_inode(ino, row, before)
    }

    /// Returns an inode as [`Names::inode`] does and, if it is a regular file, another row, which is read at
    /// the same time.
    pub(crate) async fn inode_and(
        &self,
        ino: Ino,
        other: Vec<u8>,
    ) -> Result<(Inode, Option<Vec<u8>>), MetaError> {
        let known = self.inodes.borrow().get(ino).cloned();
        if let Some(inode) = known {
            let other = match inode.kind() {
                FileKind::Regular => self.kv.get(other).await?,
                _ => None,
            };
            return Ok((inode, other));
        }
        let before = self.transactions.get();
        let mut rows = self.kv.get_many(vec![inode_key(ino), other]).await?;
        assert_eq!(rows.len(), 2, "a row for each key");
        let other = rows.pop().flatten();
        let inode = self.take_inode(ino, rows.pop().flatten(), before)?;
        let other = other.filter(|_| inode.kind() == FileKind::Regular);
        Ok((inode, other))
    }

    /// Decodes an inode's row, and caches it if no transaction has begun or ended since the count was
    /// `before`.
    fn take_inode(&self, ino: Ino, row: Option<Vec<u8>>, before: u64) -> Result<Inode, MetaError> {
        let inode = self.decode_inode(ino, &row.ok_or(Errno::STALE)?)?;
        if self.is_unchanged(before) {
            self.inodes.borrow_mut().put(inode.clone());
        }
        Ok(inode)
    }

    /// Decodes the row of an inode for a client. An error if no client may use it.
    pub(crate) fn decode_inode(&self, ino: Ino, row: &[u8]) -> Result<Inode, DecodeError> {
        let inode = Inode::decode_at(ino, row)?;
        self.check_layout(&inode)?;
        Ok(inode)
    }

    /// Refuses an inode whose client would find blocks at wrong places. A check reports it.
    fn check_layout(&self, inode: &Inode) -> Result<(), DecodeError> {
        match inode.data == Data::Chunks && inode.layout.chunk_blocks != self.fs.borrow().chunk_blocks {
            true => {
                let why = "chunks of a size that the target does not have";
                Err(DecodeError::Bad { what: "inode", why })
            }
            false => Ok(()),
        }
    }

    /// True if an opening after a crash would look for what targets have of this inode: it was made not long
    /// ago.
    pub(crate) fn is_looked_for(&self, ino: Ino) -> bool {
        // One run less than an opening looks through: the next one may be reserved just now.
        ino.0 > first_looked_for(self.fs.borrow().reserved_ino).0 + INO_RUN
    }

    /// Number of names of an inode, if it is in the cache.
    pub(crate) fn cached_links(&self, ino: Ino) -> Option<u32> {
        self.inodes.borrow().get(ino).map(|inode| inode.nlink)
    }

    /// Reads an inode from its row, past the cache. ESTALE if it does not exist.
    pub(crate) async fn stored_inode(&self, ino: Ino) -> Result<Inode, MetaError> {
        let row = self.kv.get(inode_key(ino)).await?.ok_or(Errno::STALE)?;
        Ok(Inode::decode_at(ino, &row)?)
    }

    /// True if an inode is in the queue of removed files.
    pub(crate) async fn is_queued(&self, ino: Ino) -> Result<bool, MetaError> {
        Ok(self.kv.get(removed_key(ino)).await?.is_some())
    }

    /// Returns a directory's inode. ENOTDIR if it is none.
    pub(crate) async fn directory(&self, ino: Ino) -> Result<Inode, MetaError> {
        let inode = self.inode(ino).await?;
        if inode.is_dir() { Ok(inode) } else { Err(Errno::NOTDIR.into()) }
    }

    /// Adds a compatible feature to the row of the store, in a transaction of the caller.
    pub(crate) async fn note_feature(&self, compatible: u64, writes: &mut WriteSet) -> Result<(), MetaError> {
        let row = self
            .kv
            .get(store_key())
            .await?
            .ok_or(DecodeError::Bad { what: "row of the store", why: "it is missing" })?;
        let mut store = StoreRow::decode(&row)?;
        if store.features.compatible & compatible != compatible {
            store.features.compatible |= compatible;
            writes.put(store_key(), store.encode());
        }
        Ok(())
    }

    /// True if no transaction has begun or ended since the count was `before`.
    fn is_unchanged(&self, before: u64) -> bool {
        self.transactions.get() == before
    }

    /// Forgets everything that is cached of rows, for a repair, which changes rows behind the caches.
    pub(crate) fn forget(&self) {
        // So that no read that is running fills a cache.
        self.transactions.set(self.transactions.get() + 2);
        self.inodes.borrow_mut().clear();
        self.entries.take();
        self.absent.acl.clear();
        self.absent.xattrs.clear();
    }
}

impl Deref for Turn<'_> {
    type Target = Names;

    fn deref(&self) -> &Names {
        self.names
    }
}

impl Turn<'_> {
    /// The change that is made to these inodes, in the order of their roles, of which one loses its last
    /// name. Fails if it is repeated and was made to others the first time, or to these in other roles: names
    /// that it depends on may be lost, so that it would destroy what nobody meant.
    pub(crate) fn change_of(&self, inodes: &[Ino], removed: Option<Ino>) -> Result<Change, MetaError> {
        let touched = digest(inodes);
        let removed = removed.map_or(0, |ino| ino.0);
        match self.repeats {
            Some(Repeat { change: first, .. })
                if first.touched != touched || removed > 0 && first.removed != removed =>
            {
                Err(MetaError::Differs)
            }
            _ => Ok(Change { touched, removed, ..self.change }),
        }
    }

    /// The inode that lost its last name by the change the first time, if it is repeated.
    pub(crate) fn first_removed(&self) -> Option<Ino> {
        let removed = self.repeats.map_or(0, |repeat| repeat.change.removed);
        (removed > 0).then_some(Ino(removed))
    }

    /// The truncate generation that a truncation which is repeated left the first time; 0 for others. Writes
    /// that know it are sent again.
    pub(crate) fn first_truncations(&self) -> u64 {
        self.repeats.map_or(0, |repeat| repeat.change.truncations)
    }

    /// The time of the change that is made.
    pub(crate) fn now(&self) -> Time {
        self.change.time
    }

    /// The number for the inode that the change makes: a new one, or that of the first time if the change is
    /// repeated.
    pub(crate) async fn ino_to_make(&self) -> Result<Ino, MetaError> {
        let Some(ino) = self.repeats.and_then(|repeat| repeat.made) else { return self.new_ino().await };
        let was_given = (ROOT.0 + 1..=self.given_before).contains(&ino.0);
        let may_be = !self.never_made.borrow().contains(&ino);
        match was_given && may_be && self.kv.get(inode_key(ino)).await?.is_none() {
            true => Ok(ino),
            false => Err(MetaError::Request(format!("inode {ino} cannot be made again"))),
        }
    }

    /// Allocates an inode number that no inode had before, not even one that a crash lost: clients survive a
    /// crash of the service, with the files that they had open.
    pub(crate) async fn new_ino(&self) -> Result<Ino, MetaError> {
        let ino = self.last_ino.get() + 1;
        if ino > LAST_INO.0 {
            return Err(Errno::NOSPC.into());
        }
        let reserved = self.fs.borrow().reserved_ino;
        if ino > reserved {
            // Made durable before a number of the run is used. The row only changes in place, so it may use
            // the headroom.
            let reserved_ino = (ino + INO_RUN).min(LAST_INO.0);
            let row = FsRow { reserved_ino, ..self.fs.borrow().clone() };
            let mut writes = WriteSet::new();
            writes.put(fs_key(), row.encode()).reclaims();
            self.kv.commit_durable(writes).await?;
            *self.fs.borrow_mut() = row;
        }
        assert!(ino <= self.fs.borrow().reserved_ino, "inode number {ino} is reserved before it is used");
        self.last_ino.set(ino);
        Ok(Ino(ino))
    }

    /// Gives the number of a new session. Its row is a change of the caller's transaction.
    pub(crate) fn new_session(&self, writes: &mut WriteSet, is_in_use: impl Fn(u64) -> bool) -> u64 {
        let mut fs = self.fs.borrow_mut();
        // Behind damage that a check finds, numbers above the last one may be in use, or the last one is the
        // highest that there is. Then the numbers begin again.
        loop {
            fs.last_session = if fs.last_session < LAST_SESSION { fs.last_session + 1 } else { 1 };
            if !is_in_use(fs.last_session) {
                break;
            }
        }
        writes.put(fs_key(), fs.encode());
        fs.last_session
    }

    /// Commits a transaction with the inodes that it changes and, for a request with a sequence number, its
    /// result. Fails with [`MetaError::Waits`], and does nothing, while other clients may cache the
    /// attributes of one of them.
    pub(crate) async fn commit(
        &self,
        request: Request,
        writes: WriteSet,
        inodes: Vec<Inode>,
        reply: &[u8],
    ) -> Result<(), MetaError> {
        self.commit_by(request, writes, inodes, reply, async |writes| {
            let _open = self.gate.change().await;
            Ok(self.kv.commit(writes).await?)
        })
        .await
    }

    /// Like `commit`, for a transaction that `commit` applies together with changes of its own. It passes the
    /// gate.
    pub(crate) async fn commit_by(
        &self,
        request: Request,
        mut writes: WriteSet,
        inodes: Vec<Inode>,
        reply: &[u8],
        commit: impl AsyncFnOnce(WriteSet) -> Result<(), MetaError>,
    ) -> Result<(), MetaError> {
        let files = inodes.iter().map(|inode| FileId::main(inode.ino)).collect();
        let may_change = self.asks.map(|(clients, session)| clients.may_change(session, files));
        let _changing = may_change.transpose().map_err(|failure| match failure.is_ask_again() {
            true => MetaError::Waits,
            false => MetaError::Request(failure.message),
        })?;
        for inode in &inodes {
            writes.put(inode_key(inode.ino), inode.encode());
        }
        Clients::record(request, reply, &mut writes);
        let entries = changed_entries(&writes)?;
        self.transact(commit(writes)).await?;
        for (dir, cookie, entry) in entries {
            self.entries.borrow_mut().changed(dir, cookie, entry);
        }
        let mut cache = self.inodes.borrow_mut();
        // Inodes without a name too: their users still ask for them until they are reaped.
        inodes.into_iter().for_each(|inode| cache.put(inode));
        Ok(())
    }

    /// Gives the number of new work for targets, above those that were `committed`. The row of the file
    /// system is a change of the caller's transaction.
    pub(crate) fn new_queued(&self, committed: u64, writes: &mut WriteSet) -> u64 {
        let mut fs = self.fs.borrow_mut();
        fs.last_queued = fs.last_queued.max(committed) + 1;
        writes.put(fs_key(), fs.encode());
        fs.last_queued
    }

    /// Commits answers of targets to work of the queue.
    pub(crate) async fn commit_queue(&self, mut writes: WriteSet) -> Result<(), MetaError> {
        writes.reclaims();
        let _open = self.gate.change().await;
        self.transact(async { Ok(self.kv.commit(writes).await?) }).await
    }

    /// Deletes rows that need not go together, in several transactions. They may use the headroom.
    pub(crate) async fn delete_apart(&self, mut rows: WriteSet) -> Result<(), MetaError> {
        rows.reclaims();
        let _open = self.gate.change().await;
        self.transact(async { Ok(commit_apart(&*self.kv, rows).await?) }).await
    }

    /// Records that a part of a removed file is about to go, before its attributes do.
    pub(crate) async fn note_partly_gone(&self, ino: Ino) -> Result<(), MetaError> {
        let mut writes = partly_gone(ino);
        writes.reclaims();
        let _open = self.gate.change().await;
        self.transact(async { Ok(self.kv.commit(writes).await?) }).await
    }

    /// Deletes an inode in a transaction that `commit` applies together with the removal of its chunks. The
    /// inode has no name, and its other rows are gone.
    pub(crate) async fn delete_inode(
        &self,
        ino: Ino,
        commit: impl AsyncFnOnce(WriteSet) -> Result<(), MetaError>,
    ) -> Result<(), MetaError> {
        let mut writes = WriteSet::new();
        writes.reclaims().delete(removed_key(ino)).delete(inode_key(ino));
        self.transact(commit(writes)).await?;
        self.inodes.borrow_mut().remove(ino);
        Ok(())
    }

    /// Counts a transaction while it runs.
    async fn transact(&self, work: impl Future<Output = Result<(), MetaError>>) -> Result<(), MetaError> {
        let running = Running::begin(&self.transactions);
        let result = work.await;
        drop(running);
        result
    }

    /// Commits changes of a repair. They may use the headroom, because a repair must not fail for lack of
    /// space that it would free.
    pub(crate) async fn commit_repair(&self, mut writes: WriteSet) -> Result<(), MetaError> {
        if writes.is_empty() {
            return Ok(());
        }
        writes.reclaims();
        let result = self.transact(async { Ok(self.kv.commit(writes).await?) }).await;
        // The changes may include entries, and some of their keys cannot be decoded.
        self.entries.take();
        result
    }

    /// Reserves inode numbers up to `highest`, in a transaction of a repair.
    pub(crate) async fn reserve_inodes(&self, highest: u64) -> Result<(), MetaError> {
        assert!(highest <= LAST_INO.0, "{highest} is an inode of this fileset");
        self.last_ino.set(self.last_ino.get().max(highest));
        self.repair_fs(|fs| fs.reserved_ino = fs.reserved_ino.max(highest)).await
    }

    /// Counts sessions up to `session`, in a transaction of a repair.
    pub(crate) async fn reserve_sessions(&self, session: u64) -> Result<(), MetaError> {
        assert!(session <= LAST_SESSION, "{session} is a session");
        self.repair_fs(|fs| fs.last_session = fs.last_session.max(session)).await
    }

    async fn repair_fs(&self, change: impl FnOnce(&mut FsRow)) -> Result<(), MetaError> {
        let mut writes = WriteSet::new();
        change(&mut self.fs.borrow_mut());
        writes.put(fs_key(), self.fs.borrow().encode());
        self.commit_repair(writes).await
    }

    /// Notes a directory that is new and empty.
    pub(crate) fn directory_made(&self, dir: Ino) {
        self.entries.borrow_mut().made(dir);
    }

    /// Takes one name from an inode; `dir` is the directory that contained it. Taking the last name puts the
    /// inode into the queue of removed files.
    pub(crate) fn remove_name(
        &self,
        dir: &mut Inode,
        inode: &mut Inode,
        writes: &mut WriteSet,
    ) -> Result<(), MetaError> {
        if inode.is_dir() {
            dir.add_links(-1)?;
            inode.nlink = 1;
        }
        inode.add_links(-1)?;
        inode.times[2] = self.now();
        if inode.nlink == 0 {
            self.queue_removed(inode, RemovedState::Removed, writes);
        }
        Ok(())
    }

    /// Puts an inode without a name into the queue of removed files.
    pub(crate) fn queue_removed(&self, inode: &Inode, state: RemovedState, writes: &mut WriteSet) {
        assert!(inode.nlink == 0, "an inode that is removed has no name");
        let row = RemovedFile { ino: inode.ino, state };
        writes.put(removed_key(row.ino), row.encode());
    }
}

/// The number behind which an opening looks for inodes that a crash has lost, with numbers reserved up to
/// this one. A run is reserved durably when the one before it is used up, and everything that was committed
/// before is durable with that.
pub(crate) fn first_looked_for(reserved: u64) -> Ino {
    Ino(reserved.saturating_sub(3 * INO_RUN))
}

/// A digest of inode numbers in their order: FNV-1a.
fn digest(inodes: &[Ino]) -> u64 {
    let bytes = inodes.iter().flat_map(|ino| ino.0.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The change that says of a removed file that a part of it is gone.
pub(crate) fn partly_gone(ino: Ino) -> WriteSet {
    let mut writes = WriteSet::new();
    writes.put(removed_key(ino), RemovedFile { ino, state: RemovedState::PartlyGone }.encode());
    writes
}

/// A transaction that runs. The count becomes even again if it is abandoned.
struct Running<'a>(&'a Cell<u64>);

impl<'a> Running<'a> {
    fn begin(transactions: &'a Cell<u64>) -> Self {
        assert!(transactions.get().is_multiple_of(2), "one transaction runs at a time");
        transactions.set(transactions.get() + 1);
        Self(transactions)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
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
