//! The parts of a metadata target, as its operations see them.

use crate::chunks::ChunkStore;
use crate::elsewhere::Elsewhere;
use crate::error::MetaError;
use crate::fresh::Fresh;
use crate::inode::{FileKind, Inode};
use crate::names::{Names, Turn};
use crate::queue::Queue;
use crate::uses::{IsGoing, RemovedFiles, Uses};
use penstock_base::{DecodeError, Env, FileId, Ino, Share, TargetId};
use penstock_chunk::{AsOf, FileUse, Owner};
use penstock_kv::WriteSet;
use penstock_session::grants::GrantKey;
use penstock_session::{Clients, Request};
use penstock_wire::metadata::Attr;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// Delay before a removed file is dropped, if several clients use the file system.
const GRACE: Duration = Duration::from_secs(2);

/// Inodes that were marked, each with the number of the last mark.
#[derive(Default)]
struct Marks {
    of: BTreeMap<Ino, u64>,
    last: u64,
}

/// Names, contents, clients, and the uses of inodes by clients.
pub(crate) struct Parts {
    pub(crate) env: Env,
    pub(crate) names: Names,
    pub(crate) chunks: Rc<dyn ChunkStore>,
    /// The targets of other stacks.
    pub(crate) elsewhere: Elsewhere,
    /// Their work.
    pub(crate) queue: Queue,
    /// The sessions of all clients.
    pub(crate) clients: Rc<Clients>,
    /// The key of grants to users.
    pub(crate) grants: GrantKey,
    /// Removed files that wait to be reaped.
    pub(crate) removed: RefCell<RemovedFiles>,
    uses: RefCell<Uses>,
    fresh: RefCell<Fresh>,
    reap_wake: Notify,
    /// Inodes with changes that must be durable before other targets act by them, which are not known to be.
    marks: RefCell<Marks>,
    stopped: Cell<bool>,
}

impl Parts {
    pub(crate) fn new(
        env: &Env,
        names: Names,
        (chunks, elsewhere): (Rc<dyn ChunkStore>, Elsewhere),
        clients: Rc<Clients>,
    ) -> Rc<Self> {
        let grants = GrantKey::new(names.fs().secret);
        Rc::new(Self {
            env: env.clone(),
            grants,
            names,
            chunks,
            elsewhere,
            queue: Queue::default(),
            clients,
            removed: RefCell::default(),
            uses: RefCell::default(),
            fresh: RefCell::default(),
            reap_wake: Notify::new(),
            marks: RefCell::default(),
            stopped: Cell::new(false),
        })
    }

    /// Stops the reaper, and wakes all requests that wait, which then fail.
    pub(crate) fn stop(&self) {
        self.stopped.set(true);
        self.wake_reaper();
        self.queue.wake_all();
        self.clients.stop();
    }

    /// True once the parts have been stopped.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.get()
    }

    /// Makes the reaper look at the queue of removed files again.
    pub(crate) fn wake_reaper(&self) {
        self.reap_wake.notify_one();
    }

    /// Waits until the reaper is told to look at the queue.
    pub(crate) async fn reaper_woken(&self) {
        self.reap_wake.notified().await;
    }

    /// Queues a file to be reaped, if it has no name and no user.
    pub(crate) fn reap_if_removed(&self, ino: Ino) {
        let nameless = self.names.cached_links(ino).is_none_or(|links| links == 0);
        if nameless && !self.is_used(ino) {
            // Another client may have looked up its name just before the removal, and be about to open it.
            let due = if self.clients.are_shared() { self.env.now() + GRACE } else { Duration::ZERO };
            self.removed.borrow_mut().push(due, ino);
            self.wake_reaper();
        }
    }

    /// True if a client has the inode open, or its contents are being changed.
    pub(crate) fn is_used(&self, ino: Ino) -> bool {
        self.uses.borrow().contains(ino)
    }

    /// The owner of an inode or its truncate generation was changed: uses of it see the new ones.
    pub(crate) fn note_change(&self, inode: &Inode) {
        self.uses.borrow_mut().note_change(inode.ino, inode.owner(), inode.truncations);
    }

    /// Counts uses of an inode, which keep it from being reaped. ESTALE if it is being deleted.
    pub(crate) fn begin_uses(&self, ino: Ino, times: u64) -> Result<(), MetaError> {
        self.uses.borrow_mut().begin(ino, times).map_err(|IsGoing| Errno::STALE.into())
    }

    /// Ends uses of an inode. The last use of an inode without a name queues it for reaping.
    pub(crate) fn end_uses(&self, ino: Ino, times: u64) {
        let was_last = self.uses.borrow_mut().end(ino, times);
        if was_last {
            self.reap_if_removed(ino);
        }
    }

    /// Waits for the right to change something for a request. ESTALE if its session has ended: nobody would
    /// delete the row of its result.
    pub(crate) async fn turn(&self, who: Request) -> Result<Turn<'_>, MetaError> {
        // All have seen a change before that is repeated after a restart.
        let asks = (who.session > 0 && who.repeats.is_none()).then_some((&self.clients, who.session));
        let turn = self.names.turn_for(who.repeats, asks).await;
        match who.sequence == 0 || self.clients.is_live(who.session) {
            true => Ok(turn),
            false => Err(Errno::STALE.into()),
        }
    }

    /// A session makes an inode: before its row is written, and after that.
    pub(crate) fn made(&self, session: u64, ino: Ino) {
        self.fresh.borrow_mut().made(session, ino);
    }

    /// Runs `flush`, which makes all rows durable that were written before it.
    pub(crate) async fn durably<E>(&self, flush: impl Future<Output = Result<(), E>>) -> Result<(), MetaError>
    where
        MetaError: From<E>,
    {
        let (upto, marked) = (self.fresh.borrow().last(), self.marks.borrow().last);
        flush.await?;
        self.fresh.borrow_mut().are_durable(upto);
        self.marks.borrow_mut().of.retain(|_, mark| *mark > marked);
        Ok(())
    }

    /// An inode is changed in a transaction, or was just now: that must be durable before a target of another
    /// stack acts by the inode, or a crash may leave the target ahead of it.
    pub(crate) fn mark(&self, ino: Ino) {
        if self.elsewhere.are_several() {
            let mut marks = self.marks.borrow_mut();
            marks.last += 1;
            let last = marks.last;
            marks.of.insert(ino, last);
        }
    }

    /// Makes all rows durable.
    pub(crate) async fn flush(&self) -> Result<(), MetaError> {
        self.durably(self.names.kv().flush()).await
    }

    /// Makes an inode durable that another session has made just now, before this one opens it: what it
    /// writes would have no place after a crash with which the other client ends.
    pub(crate) async fn settle(&self, session: u64, ino: Ino) -> Result<(), MetaError> {
        let is_fresh = self.fresh.borrow().is_by_another(session, ino);
        if is_fresh { self.flush().await } else { Ok(()) }
    }

    /// Keeps new uses of an inode away until the result is dropped; none if it is in use.
    pub(crate) fn begin_deletion(&self, ino: Ino) -> Option<Deletion<'_>> {
        let begun = self.uses.borrow_mut().begin_deletion(ino);
        begun.then(|| Deletion { parts: self, ino })
    }

    /// A part of an inode was gone before this start: nobody may use it before the rest is gone too.
    pub(crate) fn restore_deletion(&self, ino: Ino) {
        self.uses.borrow_mut().restore_deletion(ino);
    }

    /// An inode is gone, or stays although its deletion had begun.
    pub(crate) fn end_deletion(&self, ino: Ino) {
        if self.uses.borrow_mut().end_deletion(ino) {
            self.chunks.file_removed(FileId::main(ino));
        }
    }

    /// Counts one open of an inode by a session; none by a session that has ended. ESTALE if the inode is
    /// being deleted.
    pub(crate) fn open(&self, session: u64, ino: Ino) -> Result<(), MetaError> {
        if !self.clients.open(session, FileId::main(ino)) {
            // A new file without a name then has no user who would queue it.
            self.reap_if_removed(ino);
            return Ok(());
        }
        let begun = self.begin_uses(ino, 1);
        if begun.is_err() {
            self.clients.close(session, FileId::main(ino));
        }
        begun
    }

    /// Ends one open of an inode by a session. Does nothing if it has none, as after a restart.
    pub(crate) fn close(&self, session: u64, ino: Ino) {
        if self.clients.close(session, FileId::main(ino)) {
            self.end_uses(ino, 1);
        }
    }

    /// The attributes of an inode that the caller is about to commit.
    pub(crate) async fn attr(&self, inode: &Inode) -> Result<Attr, MetaError> {
        if inode.kind() != FileKind::Regular {
            return Ok(inode.attr(0));
        }
        let blocks = match self.chunks.held_or_row(FileId::main(inode.ino)) {
            Ok(blocks) => blocks,
            Err(wanted) => {
                let row = self.names.kv().get(wanted.key.clone()).await?;
                self.chunks.held_by_row(&wanted, row)
            }
        };
        Ok(inode.attr(blocks + self.held_elsewhere(inode).await?))
    }

    /// Blocks that a file holds on targets of other stacks.
    async fn held_elsewhere(&self, inode: &Inode) -> Result<u64, MetaError> {
        match inode.is_spread {
            true => Ok(self.elsewhere.held_blocks(&[inode]).await?.into_iter().sum()),
            false => Ok(0),
        }
    }

    /// The attributes of an inode as it is.
    pub(crate) async fn attr_now(&self, ino: Ino) -> Result<Attr, MetaError> {
        let blocks = match self.chunks.held_or_row(FileId::main(ino)) {
            Ok(blocks) => blocks,
            Err(wanted) => {
                let (inode, row) = self.names.inode_and(ino, wanted.key.clone()).await?;
                match inode.kind() {
                    FileKind::Regular => self.chunks.held_by_row(&wanted, row),
                    _ => 0,
                }
            }
        };
        let mut inode = self.names.inode(ino).await?;
        let elsewhere = self.held_elsewhere(&inode).await?;
        if inode.is_spread {
            // It may have been changed while its blocks were counted.
            inode = self.names.inode(ino).await?;
        }
        Ok(inode.attr(blocks + elsewhere))
    }

    /// The attributes of an inode as it is, with `lease` under a lease of the session that asks, if it gets
    /// one.
    pub(crate) async fn attr_leased(&self, who: Request, ino: Ino, lease: bool) -> Result<Attr, MetaError> {
        let lease = self.lease_attributes(who, ino, lease);
        Ok(Attr { lease, ..self.attr_now(ino).await? })
    }

    /// Grants the session that asks a lease on attributes, if it `wants` one. Returns its number; 0 for none,
    /// as for the users of a gateway.
    pub(crate) fn lease_attributes(&self, who: Request, ino: Ino, wants: bool) -> u64 {
        match wants && who.user == 0 {
            true => self.clients.grant_attributes(who.session, FileId::main(ino)),
            false => 0,
        }
    }

    /// Keeps a regular file from being reaped while a target changes its part of the contents, and fails if
    /// the file does not exist. Otherwise a late write could leave chunks of a file that is gone, and nothing
    /// would ever remove them. A crash leaves none either: a target of another stack changes nothing before
    /// the inode says durably that it may have a part, or an opening would look for the part.
    pub(crate) async fn change_contents(&self, target: TargetId, ino: Ino) -> Result<InUse<'_>, MetaError> {
        // Counted before the inode is read, so that a removal from here on sees the user.
        self.begin_uses(ino, 1)?;
        let mut user = InUse {
            parts: self,
            ino,
            owner: Owner::default(),
            truncations: 0,
            share: Share::ALL,
            is_elsewhere: false,
        };
        let inode = self.names.inode(ino).await?;
        (user.owner, user.truncations) = (inode.owner(), inode.truncations);
        user.is_elsewhere = target != self.elsewhere.home();
        if inode.kind() != FileKind::Regular {
            return Err(MetaError::Request(format!("inode {ino} has no contents")));
        }
        let why = "a layout that fits no map of targets";
        let spread =
            self.elsewhere.spread_of(&inode.layout).ok_or(DecodeError::Bad { what: "inode", why })?;
        user.share = spread.share_of(target).ok_or(MetaError::Spread)?;
        if user.is_elsewhere {
            Box::pin(self.spread(&inode)).await?;
        }
        Ok(user)
    }

    /// Marks a file as one that may have a part on targets of other stacks.
    async fn spread(&self, inode: &Inode) -> Result<(), MetaError> {
        let ino = inode.ino;
        if !inode.is_spread {
            let turn = self.names.turn().await;
            let mut inode = turn.inode(ino).await?;
            if !inode.is_spread {
                inode.is_spread = true;
                // Without truncations, what a target has of a file that a crash loses is found and dropped.
                let must_be_durable = inode.truncations > 0 || !self.names.is_looked_for(ino);
                let mut writes = WriteSet::new();
                writes.changes_what_is_there();
                if must_be_durable {
                    // Before others can see it, and after that: a flush in between may not cover it.
                    self.mark(ino);
                }
                turn.commit(Request::default(), writes, vec![inode], &[]).await?;
                if must_be_durable {
                    self.mark(ino);
                }
            }
        }
        let is_marked = self.marks.borrow().of.contains_key(&ino);
        if is_marked { self.flush().await } else { Ok(()) }
    }
}

/// An attempt to delete an inode, until this is dropped.
pub(crate) struct Deletion<'a> {
    parts: &'a Parts,
    ino: Ino,
}

impl Deletion<'_> {
    /// A part of the inode is gone: nobody may use it before the rest is gone too, or it gets a name.
    pub(crate) fn part_is_gone(&self) {
        self.parts.uses.borrow_mut().part_is_gone(self.ino);
    }
}

impl Drop for Deletion<'_> {
    fn drop(&mut self) {
        self.parts.uses.borrow_mut().end_attempt(self.ino);
    }
}

/// A use of an inode, which ends when this is dropped.
pub struct InUse<'a> {
    parts: &'a Parts,
    ino: Ino,
    /// As of when the inode was read.
    owner: Owner,
    truncations: u64,
    /// The chunks that the target has.
    share: Share,
    /// A target of another stack uses it.
    is_elsewhere: bool,
}

impl InUse<'_> {
    /// The owner and the truncate generation.
    fn now(&self) -> (Owner, u64) {
        self.parts.uses.borrow().last_change(self.ino).unwrap_or((self.owner, self.truncations))
    }
}

impl FileUse for InUse<'_> {
    fn owner(&self) -> Owner {
        self.now().0
    }

    fn as_of(&self) -> AsOf {
        match self.is_elsewhere {
            true => AsOf { queued: self.parts.queue.committed(), truncations: self.now().1 },
            false => AsOf::default(),
        }
    }

    fn share(&self) -> Share {
        self.share
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.parts.end_uses(self.ino, 1);
    }
}
