//! Operations on names and attributes.

use crate::client::Client;
use crate::restarts::lost;
use penstock_base::{Branch, ErrorKind, FileId, Ino};
use penstock_wire::metadata::{
    Attr, AttrReply, BytesReply, EmptyReply, FoundNames, LinkRequest, MakeRequest, NameRequest, NamesReply,
    ReadDirReply, ReadDirRequest, RenameReply, RenameRequest, SetAttrRequest, StatFsReply, XattrRequest,
};
use penstock_wire::{Failure, Kind};

const ENOENT: u16 = 2;
/// Most attempts at a rename. An attempt fails if the service restarts during it, or the names change.
const RESTARTS_MOST: u32 = 64;

impl Client {
    /// Returns the attributes of the inode that a name refers to.
    pub async fn lookup(&self, dir: FileId, name: &[u8]) -> Result<Attr, Failure> {
        let lease = self.session.kernel().is_there();
        let request = NameRequest { dir: dir.ino.0, name: name.to_vec(), directory: false, lease };
        let (mark, era) = (self.session.recent().mark(), self.session.era());
        let reply: AttrReply = self.session.ask(Kind::Lookup, dir.branch, &request).await?;
        self.session.take_leases(era, &reply.attr);
        self.session.newest(mark, reply).await
    }

    /// Like [`Client::lookup`]; `None` if there is no such name.
    async fn find(&self, dir: FileId, name: &[u8]) -> Result<Option<Attr>, Failure> {
        match self.lookup(dir, name).await {
            Ok(attr) => Ok(Some(attr)),
            Err(failure) if failure.errno == ENOENT => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Returns the attributes of an inode.
    pub async fn get_attr(&self, file: FileId) -> Result<Attr, Failure> {
        self.session.attributes(file).await
    }

    /// Changes attributes.
    pub async fn set_attr(&self, branch: Branch, request: SetAttrRequest) -> Result<Attr, Failure> {
        self.hold_to_set(branch, &request).await?.set_attr(request).await
    }

    /// Creates a file, directory, symbolic link or special file.
    pub async fn make(&self, branch: Branch, request: MakeRequest) -> Result<Attr, Failure> {
        let reply: AttrReply = self.session.change(Kind::Make, branch, &request).await?;
        let attr = reply.attr.unwrap_or_default();
        if request.open {
            self.session.note_open(&attr);
        }
        Ok(attr)
    }

    /// Adds a name to an inode.
    pub async fn link(&self, file: FileId, dir: FileId, name: &[u8]) -> Result<Attr, Failure> {
        let request = LinkRequest { ino: file.ino.0, dir: dir.ino.0, name: name.to_vec() };
        let mark = self.session.recent().mark();
        self.session.newest(mark, self.session.change(Kind::Link, dir.branch, &request).await?).await
    }

    /// Removes a name; with `directory` that of an empty directory. Returns the attributes of the inode after
    /// that: without links if it was the last name.
    pub async fn unlink(&self, dir: FileId, name: &[u8], directory: bool) -> Result<Attr, Failure> {
        let request = NameRequest { dir: dir.ino.0, name: name.to_vec(), directory, lease: false };
        // The state of the file stays: others may have it open, be opening it or give it a name, or a crash
        // may bring its name back. Then size and data that are not sent yet are still wanted, and so are
        // losses.
        let reply: AttrReply = self.session.change(Kind::Unlink, dir.branch, &request).await?;
        let mut attr = reply.attr.ok_or_else(|| Failure::new(ErrorKind::Internal, "reply: no attributes"))?;
        self.session.files().overlay(&mut attr);
        Ok(attr)
    }

    /// Renames a file or directory. Before it replaces an existing name, it makes the data of the file
    /// durable. It fails if writes of the file were lost, because nobody else may have a descriptor that
    /// would report the loss. An fsync of the file reports the loss and permits the rename.
    ///
    /// Returns the attributes of the inode that was replaced, if there was one, after that.
    pub async fn rename(&self, branch: Branch, mut request: RenameRequest) -> Result<Option<Attr>, Failure> {
        for _ in 0..RESTARTS_MOST {
            let start = self.session.restarts().generation();
            let may_be_unsynced = !self.session.files().is_empty() || !self.is_alone();
            request.found = None;
            if may_be_unsynced {
                let moved = self
                    .find(FileId { branch, ino: Ino(request.dir) }, &request.name)
                    .await?
                    .map_or(0, |attr| attr.ino);
                let replaced = self
                    .find(FileId { branch, ino: Ino(request.new_dir) }, &request.new_name)
                    .await?
                    .map_or(0, |attr| attr.ino);
                if moved > 0 && replaced > 0 {
                    let both = [Some(moved), request.exchange.then_some(replaced)];
                    for file in both.into_iter().flatten().map(|ino| FileId { branch, ino: Ino(ino) }) {
                        self.session.sync_everywhere(file).await?;
                        self.session.refuse_lost(file)?;
                    }
                }
                // Another client may change the names from here on: then look again.
                request.found = Some(FoundNames { moved, replaced });
            }
            // Only the start that has all the data may rename: after a later restart the data may be lost.
            request.start = start.unwrap_or_default();
            match self.session.change::<RenameReply>(Kind::Rename, branch, &request).await {
                Err(failure) if failure.kind == ErrorKind::RefreshMap => {}
                done => {
                    let mut replaced = done?.replaced;
                    if let Some(attr) = &mut replaced {
                        self.session.files().overlay(attr);
                    }
                    return Ok(replaced);
                }
            }
        }
        Err(lost("a file or a name in a rename"))
    }

    /// Returns entries of a directory behind a cookie, with attributes.
    pub async fn read_dir(
        &self,
        branch: Branch,
        mut request: ReadDirRequest,
    ) -> Result<ReadDirReply, Failure> {
        request.lease = request.attributes && self.session.kernel().is_there();
        let (mark, era) = (self.session.recent().mark(), self.session.era());
        let mut reply: ReadDirReply = self.session.ask(Kind::ReadDir, branch, &request).await?;
        self.session.take_leases(era, reply.entries.iter().filter_map(|entry| entry.attr.as_ref()));
        for entry in &mut reply.entries {
            // The kernel requests omitted attributes when it needs them.
            if self.session.recent().since(mark, entry.file()) {
                entry.attr = None;
            }
        }
        for attr in reply.entries.iter_mut().filter_map(|entry| entry.attr.as_mut()) {
            self.session.files().overlay(attr);
        }
        Ok(reply)
    }

    /// Returns the target of a symbolic link.
    pub async fn read_link(&self, file: FileId) -> Result<Vec<u8>, Failure> {
        Ok(self.session.ask_about::<BytesReply>(Kind::ReadLink, file).await?.bytes)
    }

    /// Returns the value of an extended attribute.
    pub async fn get_xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>, Failure> {
        let request = XattrRequest { ino: file.ino.0, name: name.to_vec(), ..XattrRequest::default() };
        Ok(self.session.ask::<BytesReply>(Kind::GetXattr, file.branch, &request).await?.bytes)
    }

    /// Returns the names of an inode's extended attributes.
    pub async fn list_xattr(&self, file: FileId) -> Result<Vec<Vec<u8>>, Failure> {
        Ok(self.session.ask_about::<NamesReply>(Kind::ListXattr, file).await?.names)
    }

    /// Sets an extended attribute.
    pub async fn set_xattr(&self, branch: Branch, request: XattrRequest) -> Result<(), Failure> {
        let file = FileId { branch, ino: Ino(request.ino) };
        self.session.change_inode::<AttrReply>(Kind::SetXattr, file, &request).await.map(|_| ())
    }

    /// Removes an extended attribute.
    pub async fn remove_xattr(&self, file: FileId, name: &[u8]) -> Result<(), Failure> {
        let request = XattrRequest { ino: file.ino.0, name: name.to_vec(), ..XattrRequest::default() };
        self.session.change_inode::<AttrReply>(Kind::RemoveXattr, file, &request).await.map(|_| ())
    }

    /// Returns size and free space of the file system.
    pub async fn stat_fs(&self) -> Result<StatFsReply, Failure> {
        self.session.ask(Kind::StatFs, Branch::MAIN, &EmptyReply {}).await
    }
}
