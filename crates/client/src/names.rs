//! Operations on names and attributes.

use crate::file::CUTS_MOST;
use crate::leases::{Hold, Purpose};
use crate::session::Client;
use crate::watch::lost;
use penstock_base::{Ino, Kind as Todo};
use penstock_wire::names::{
    Attr, AttrReply, BytesReply, EmptyReply, InodeRequest, LinkRequest, MakeRequest, NameRequest, NamesReply,
    ReadDirReply, ReadDirRequest, RenameRequest, SetAttrRequest, StatFsReply, XattrRequest, set_id_bits,
};
use penstock_wire::{Failure, Kind};

const BLOCK: u64 = penstock_base::BLOCK_BYTES as u64;

/// Most attempts at a rename. An attempt fails if the service restarts during it.
const RESTARTS_MOST: u32 = 64;

impl Client {
    /// Returns the attributes in a reply to a request made after `mark`, updated with this client's unsynced
    /// size and time.
    pub(crate) async fn newest(&self, mut mark: u64, reply: AttrReply) -> Result<Attr, Failure> {
        let mut attr = reply.attr.unwrap_or_default();
        while self.settled.since(mark, Ino(attr.ino)) {
            mark = self.settled.mark();
            let again: AttrReply = self.ask(Kind::GetAttr, &InodeRequest { ino: attr.ino }).await?;
            attr = again.attr.unwrap_or_default();
        }
        if let Some(state) = self.files.borrow().get(&Ino(attr.ino)) {
            state.borrow().overlay(&mut attr);
        }
        Ok(attr)
    }

    /// Returns the attributes of the inode that a name refers to.
    pub async fn lookup(&self, dir: Ino, name: &[u8]) -> Result<Attr, Failure> {
        let request = NameRequest { dir: dir.0, name: name.to_vec(), directory: false };
        let mark = self.settled.mark();
        self.newest(mark, self.ask(Kind::Lookup, &request).await?).await
    }

    /// Returns the attributes of an inode.
    pub async fn get_attr(&self, ino: Ino) -> Result<Attr, Failure> {
        let mark = self.settled.mark();
        self.newest(mark, self.ask(Kind::GetAttr, &InodeRequest { ino: ino.0 }).await?).await
    }

    /// Changes attributes.
    pub async fn set_attr(&self, request: SetAttrRequest) -> Result<Attr, Failure> {
        let _hold = self.hold_to_set(&request).await?;
        self.set_attr_held(request).await
    }

    /// Acquires the lease under which these attributes are changed.
    pub async fn hold_to_set(&self, request: &SetAttrRequest) -> Result<Hold, Failure> {
        // Other clients may have its mode and times cached, and only the owner of the lease may change the
        // size.
        let purpose = if request.size.is_some() { Purpose::Resize } else { Purpose::Write };
        self.hold(Ino(request.ino), purpose).await
    }

    /// Changes attributes. The caller owns the lease for that.
    pub async fn set_attr_held(&self, request: SetAttrRequest) -> Result<Attr, Failure> {
        let dropped = request.drop_set_id;
        let known = self.files.borrow().get(&Ino(request.ino)).cloned();
        let takes_bits = known.is_some_and(|state| dropped && state.borrow().set_id);
        let attr = match takes_bits {
            true => self.take_durably(async || self.change_attr(request.clone()).await).await?,
            false => self.change_attr(request).await?,
        };
        if let Some(state) = self.files.borrow().get(&Ino(attr.ino)) {
            let mut state = state.borrow_mut();
            // Replies may arrive in another order: only the request that dropped the bits shows that they are
            // gone.
            state.set_id = set_id_bits(attr.mode) != 0 || state.set_id && !dropped;
        }
        Ok(attr)
    }

    async fn change_attr(&self, request: SetAttrRequest) -> Result<Attr, Failure> {
        let ino = Ino(request.ino);
        let Some(size) = request.size else {
            if request.mtime_ns.is_some() {
                // A time that is set must not be overtaken by the time of an earlier write.
                let _turn = self.turns.exclusive(ino).await;
                self.settle_quietly(ino).await?;
                let mark = self.settled.mark();
                return self.newest(mark, self.change_inode(Kind::SetAttr, ino, &request).await?).await;
            }
            let mark = self.settled.mark();
            return self.newest(mark, self.change_inode(Kind::SetAttr, ino, &request).await?).await;
        };
        let _turn = self.turns.exclusive(ino).await;
        let result = self.resize(request, size).await;
        self.forget_idle(ino);
        result
    }

    /// Sets the size of a file, with all other changes of the request. The caller has the file's I/O lock.
    pub(crate) async fn resize(&self, mut request: SetAttrRequest, size: u64) -> Result<Attr, Failure> {
        request.size = Some(size);
        let ino = Ino(request.ino);
        let mut attempt = 1;
        loop {
            // While the lease is being revoked, others may change the size too.
            let shared = !self.leases.is_exclusive(ino);
            if shared {
                self.note_stale(ino);
            }
            let result = self.under_one_start(async || self.resize_once(request.clone(), size).await).await;
            if shared {
                self.note_stale(ino);
            }
            match result {
                // Truncated by another client, or by a part of this request that a start of the service did
                // before it ended.
                Err(failure) if failure.kind == Todo::RefreshMap && attempt < CUTS_MOST => attempt += 1,
                result => return result,
            }
        }
    }

    async fn resize_once(&self, mut request: SetAttrRequest, size: u64) -> Result<Attr, Failure> {
        let ino = Ino(request.ino);
        let file = self.file(ino).await?;
        let state = file.borrow().clone();
        if size > state.size && !state.size.is_multiple_of(BLOCK) {
            self.zero_tail(ino, &state).await?;
            // The zeros must be durable no later than the size.
            self.data(Kind::Commit, penstock_wire::data::encode_commit(0, ino, true), Vec::new()).await?;
        }
        // The service must know the unsynced size, because it judges a truncation by it.
        let settled = match self.settle_quietly(ino).await {
            // A full store accepts no dirty data. Truncating needs no space, and may drop part of the dirty
            // data.
            Err(failure) if failure.kind == Todo::NoSpace && size < state.settled_size => false,
            other => other.map(|()| true)?,
        };
        request.mtime_ns = request.mtime_ns.or(Some(self.env.wall_ns()));
        request.known_cut = Some(file.borrow().cut);
        let reply: Result<AttrReply, Failure> = self.change_inode(Kind::SetAttr, ino, &request).await;
        // An attribute reply that was requested earlier may arrive later; this marks it as out of date.
        self.settled.note(ino);
        if reply.is_err() {
            // Part of the change may have been done, under another truncate generation.
            file.borrow_mut().stale = true;
        }
        let attr = reply?.attr.unwrap_or_default();
        let mut state = file.borrow_mut();
        state.size = attr.size;
        state.settled_size = attr.size;
        state.cut = attr.cut;
        state.writes += 1;
        // Data that is still unsynced gets this time, not an earlier one.
        state.mtime_ns = request.mtime_ns.filter(|_| !settled);
        state.tail_clean = true;
        // The kernel learns this size from the reply.
        state.lost_end = 0;
        Ok(attr)
    }

    /// Removes the set-id bits from an open file before a process writes to it that may not keep them. The
    /// caller owns the file's lease. Returns true if there were any.
    pub async fn drop_set_id(&self, ino: Ino) -> Result<bool, Failure> {
        if !self.file(ino).await?.borrow().set_id {
            return Ok(false);
        }
        let request = SetAttrRequest { ino: ino.0, drop_set_id: true, ..SetAttrRequest::default() };
        self.set_attr_held(request).await.map(|_| true)
    }

    /// Removes set-id bits or capabilities from a file, durably, before the write that requires it. A write
    /// during a restart of the service is repeated, but the removal would not be. So it is repeated here if
    /// the service restarted meanwhile.
    pub async fn take_durably<T>(&self, take: impl AsyncFn() -> Result<T, Failure>) -> Result<T, Failure> {
        self.under_one_start(async || {
            let taken = take().await?;
            self.sync_names().await?;
            Ok(taken)
        })
        .await
    }

    /// Creates a file, directory, symbolic link or special file.
    pub async fn make(&self, request: MakeRequest) -> Result<Attr, Failure> {
        let _opening = self.opening.read().await;
        let reply: AttrReply = self.change(Kind::Make, &request).await?;
        let attr = reply.attr.unwrap_or_default();
        if request.open {
            self.note_open(&attr);
        }
        Ok(attr)
    }

    /// Adds a name to an inode.
    pub async fn link(&self, ino: Ino, dir: Ino, name: &[u8]) -> Result<Attr, Failure> {
        let request = LinkRequest { ino: ino.0, dir: dir.0, name: name.to_vec() };
        let mark = self.settled.mark();
        self.newest(mark, self.change(Kind::Link, &request).await?).await
    }

    /// Removes a name; with `directory` that of an empty directory.
    pub async fn unlink(&self, dir: Ino, name: &[u8], directory: bool) -> Result<(), Failure> {
        let request = NameRequest { dir: dir.0, name: name.to_vec(), directory };
        let attr = self.change::<AttrReply>(Kind::Unlink, &request).await?.attr.unwrap_or_default();
        if attr.nlink == 0 {
            self.forget_unused(Ino(attr.ino));
        }
        Ok(())
    }

    /// Forgets the unsynced writes of a removed file that is not open: nobody can read them any more.
    fn forget_unused(&self, ino: Ino) {
        let mut files = self.files.borrow_mut();
        if files.get(&ino).is_some_and(|state| state.borrow().opens == 0) {
            files.remove(&ino);
        }
    }

    /// Renames a file or directory. Before it replaces an existing name, it makes the data of the file
    /// durable. It fails if writes of the file were lost, because nobody else may have a descriptor that
    /// would report the loss. An fsync of the file reports the loss and permits the rename.
    pub async fn rename(&self, mut request: RenameRequest) -> Result<(), Failure> {
        for _ in 0..RESTARTS_MOST {
            let start = self.restarts.generation();
            let unsettled = !self.files.borrow().is_empty() || !self.leases.is_alone();
            if unsettled
                && let Ok(moved) = self.lookup(Ino(request.dir), &request.name).await
                && let Ok(replaced) = self.lookup(Ino(request.new_dir), &request.new_name).await
            {
                let both = [Some(moved.ino), request.exchange.then_some(replaced.ino)];
                for ino in both.into_iter().flatten().map(Ino) {
                    self.settle_everywhere(ino).await?;
                    self.refuse_lost(ino)?;
                }
            }
            // Only the start that has all the data may rename: after a later restart the data may be lost.
            request.start = start.unwrap_or_default();
            match self.change::<EmptyReply>(Kind::Rename, &request).await {
                Err(failure) if failure.kind == Todo::RefreshMap => {}
                done => return done.map(drop),
            }
        }
        Err(lost("a file or a name in a rename"))
    }

    /// Returns entries of a directory behind a cookie, with attributes.
    pub async fn read_dir(&self, request: ReadDirRequest) -> Result<ReadDirReply, Failure> {
        let mark = self.settled.mark();
        let mut reply: ReadDirReply = self.ask(Kind::ReadDir, &request).await?;
        for entry in &mut reply.entries {
            // The kernel requests omitted attributes when it needs them.
            if self.settled.since(mark, Ino(entry.ino)) {
                entry.attr = None;
            }
        }
        let files = self.files.borrow();
        for attr in reply.entries.iter_mut().filter_map(|entry| entry.attr.as_mut()) {
            if let Some(state) = files.get(&Ino(attr.ino)) {
                state.borrow().overlay(attr);
            }
        }
        Ok(reply)
    }

    /// Returns the target of a symbolic link.
    pub async fn read_link(&self, ino: Ino) -> Result<Vec<u8>, Failure> {
        Ok(self.ask::<BytesReply>(Kind::ReadLink, &InodeRequest { ino: ino.0 }).await?.bytes)
    }

    /// Returns the value of an extended attribute.
    pub async fn get_xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, Failure> {
        let request = XattrRequest { ino: ino.0, name: name.to_vec(), ..XattrRequest::default() };
        Ok(self.ask::<BytesReply>(Kind::GetXattr, &request).await?.bytes)
    }

    /// Returns the names of an inode's extended attributes.
    pub async fn list_xattr(&self, ino: Ino) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(self.ask::<NamesReply>(Kind::ListXattr, &InodeRequest { ino: ino.0 }).await?.names)
    }

    /// Sets an extended attribute.
    pub async fn set_xattr(&self, request: XattrRequest) -> Result<(), Failure> {
        self.change_inode::<AttrReply>(Kind::SetXattr, Ino(request.ino), &request).await.map(|_| ())
    }

    /// Removes an extended attribute.
    pub async fn remove_xattr(&self, ino: Ino, name: &[u8]) -> Result<(), Failure> {
        let request = XattrRequest { ino: ino.0, name: name.to_vec(), ..XattrRequest::default() };
        self.change_inode::<AttrReply>(Kind::RemoveXattr, ino, &request).await.map(|_| ())
    }

    /// Returns size and free space of the file system.
    pub async fn stat_fs(&self) -> Result<StatFsReply, Failure> {
        self.ask(Kind::StatFs, &EmptyReply {}).await
    }
}
