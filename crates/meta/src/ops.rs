//! Operations that add, find and remove names: lookup, make, link, unlink.

use crate::dirs::entry_row;
use crate::error::MetaError;
use crate::inode::{Data, FileKind, Inode, Layout};
use crate::rows::{entry_key, inode_key, removed_key};
use crate::target::MetaTarget;
use crate::{LINK_MAX, PATH_MAX};
use penstock_base::{FileKey, Ino};
use penstock_kv::WriteSet;
use penstock_session::Request;
use penstock_wire::names::{AttrReply, LinkRequest, MakeRequest, NameRequest};
use prost::Message;
use rustix::io::Errno;

pub(crate) const SET_GROUP_ID: u32 = 0o2000;

/// Encodes a reply with an inode's attributes.
pub(crate) fn attr_reply(inode: &Inode) -> Vec<u8> {
    AttrReply { attr: Some(inode.attr()), unsettled: false }.encode_to_vec()
}

impl MetaTarget {
    /// Returns the attributes of the inode that a name refers to.
    pub(crate) async fn lookup(&self, request: NameRequest) -> Result<Vec<u8>, MetaError> {
        let dir = self.directory(Ino(request.dir)).await?;
        let (_, entry) = self.entry(dir.ino, &request.name).await?;
        Ok(attr_reply(&self.inode(entry.ino).await?))
    }

    /// Makes a file, directory, symbolic link, special file, or a file without a name (O_TMPFILE).
    pub(crate) async fn make(&self, who: Request, request: MakeRequest) -> Result<Vec<u8>, MetaError> {
        let _one = self.changing.lock().await;
        let mut dir = self.directory(Ino(request.dir)).await?;
        if dir.nlink == 0 {
            return Err(Errno::NOENT.into());
        }
        let mut writes = WriteSet::new();
        let mut inode = self.new_inode(self.new_ino().await?, &dir, &request)?;
        self.inherit_acl(&dir, &mut inode, request.umask, &mut writes).await?;
        if request.nameless {
            // In the queue of removed files from the beginning, so that a crash leaks nothing. Its open keeps
            // it from being reaped.
            if inode.kind() != FileKind::Regular || !request.open {
                return Err(Errno::INVAL.into());
            }
            self.drop_link(&mut inode, &mut writes);
        } else {
            let key = self.new_entry_key(dir.ino, &request.name).await?;
            writes.put(key, entry_row(inode.ino, inode.type_bits(), &request.name));
            dir.entries += 1;
            if inode.is_dir() {
                dir.nlink += 1;
            }
            dir.times_ns[1] = inode.times_ns[3];
            dir.times_ns[2] = inode.times_ns[3];
        }
        let reply = attr_reply(&inode);
        let (ino, is_dir) = (inode.ino, inode.is_dir());
        self.commit(who, writes, vec![dir, inode], &reply).await?;
        if is_dir {
            self.entries.borrow_mut().made(ino);
        }
        if request.open {
            self.open_inode(who.session, ino);
        }
        Ok(reply)
    }

    pub(crate) fn new_inode(&self, ino: Ino, dir: &Inode, request: &MakeRequest) -> Result<Inode, MetaError> {
        if !crate::inode::has_type(request.mode) {
            return Err(MetaError::Request(format!("mode {:o} names no type of file", request.mode)));
        }
        let now = self.now_ns();
        let layout = Layout { chunk_blocks: self.fs.borrow().chunk_blocks, target: 0, replicas: 1 };
        let mut inode = Inode {
            ino,
            mode: request.mode,
            nlink: 1,
            uid: request.uid,
            gid: request.gid,
            rdev: request.rdev,
            size: 0,
            times_ns: [now; 4],
            cut: 0,
            parent: Ino(0),
            entries: 0,
            layout,
            data: Data::None,
        };
        self.target.file_made(FileKey::main(inode.ino));
        if dir.mode & SET_GROUP_ID != 0 {
            inode.gid = dir.gid;
        }
        match inode.kind() {
            FileKind::Directory => {
                inode.nlink = 2;
                inode.parent = dir.ino;
                inode.mode |= dir.mode & SET_GROUP_ID;
            }
            FileKind::Symlink => {
                if request.target.len() > PATH_MAX {
                    return Err(Errno::NAMETOOLONG.into());
                }
                inode.size = request.target.len() as u64;
                inode.data = Data::Inline(request.target.clone());
            }
            FileKind::Regular => inode.data = Data::Chunks,
            FileKind::Special => {}
        }
        Ok(inode)
    }

    /// Adds a name to an inode. An inode without a name that is in use was made without one: the kernel
    /// refuses to link an inode whose names were removed.
    pub(crate) async fn link(&self, who: Request, request: LinkRequest) -> Result<Vec<u8>, MetaError> {
        let _one = self.changing.lock().await;
        let mut inode = self.inode(Ino(request.ino)).await?;
        let mut dir = self.directory(Ino(request.dir)).await?;
        match inode.nlink {
            _ if inode.is_dir() => return Err(Errno::PERM.into()),
            0 if !self.in_use.borrow().contains_key(&inode.ino) => return Err(Errno::NOENT.into()),
            LINK_MAX.. => return Err(Errno::MLINK.into()),
            _ if dir.nlink == 0 => return Err(Errno::NOENT.into()),
            _ => {}
        }
        let key = self.new_entry_key(dir.ino, &request.name).await?;
        let mut writes = WriteSet::new();
        writes.put(key, entry_row(inode.ino, inode.type_bits(), &request.name));
        if inode.nlink == 0 {
            writes.delete(removed_key(inode.ino));
        }
        let now = self.now_ns();
        inode.nlink += 1;
        inode.times_ns[2] = now;
        dir.entries += 1;
        dir.times_ns[1] = now;
        dir.times_ns[2] = now;
        let reply = attr_reply(&inode);
        self.commit(who, writes, vec![dir, inode], &reply).await?;
        Ok(reply)
    }

    /// Removes a name. A directory must be empty.
    pub(crate) async fn unlink(&self, who: Request, request: NameRequest) -> Result<Vec<u8>, MetaError> {
        let _one = self.changing.lock().await;
        let mut dir = self.directory(Ino(request.dir)).await?;
        let (cookie, entry) = self.entry(dir.ino, &request.name).await?;
        let mut inode = self.inode(entry.ino).await?;
        match (request.directory, inode.is_dir()) {
            (true, false) => return Err(Errno::NOTDIR.into()),
            (false, true) => return Err(Errno::ISDIR.into()),
            (true, true) if inode.entries > 0 => return Err(Errno::NOTEMPTY.into()),
            _ => {}
        }
        let mut writes = WriteSet::new();
        writes.reclaims().delete(entry_key(dir.ino, cookie));
        let now = self.now_ns();
        dir.entries -= 1;
        dir.times_ns[1] = now;
        dir.times_ns[2] = now;
        let ino = inode.ino;
        self.remove_name(&mut dir, &mut inode, &mut writes);
        let reply = attr_reply(&inode);
        self.commit(who, writes, vec![dir, inode], &reply).await?;
        self.reap_if_removed(ino);
        Ok(reply)
    }

    /// Takes one name from an inode; `dir` is the directory that contained it.
    pub(crate) fn remove_name(&self, dir: &mut Inode, inode: &mut Inode, writes: &mut WriteSet) {
        if inode.is_dir() {
            dir.nlink -= 1;
            inode.nlink = 1;
        }
        self.drop_link(inode, writes);
    }

    /// Deletes an inode's row. Its other rows must be gone, or be deleted in the same transaction.
    pub(crate) fn delete_inode(&self, ino: Ino, writes: &mut WriteSet) {
        writes.delete(inode_key(ino));
    }
}
