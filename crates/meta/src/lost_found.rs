//! `/lost+found`: where a repair puts what has no place of its own. It is made when it is first needed.
//!
//! Inodes without a name get the name `inode-` and their number. Rows that cannot be read become extended attributes
//! of the directory, `user.penstock.row.` and the key in hexadecimal digits, before they go.

use crate::dirs::entry_row;
use crate::error::MetaError;
use crate::inode::{Data, Inode, Layout};
use crate::judge::{DIRECTORY, row_of};
use crate::rows::{entry_key, inode_key, xattr_key, xattr_range};
use crate::target::MetaTarget;
use crate::{ROOT, XATTR_MAX};
use penstock_base::{Ino, crc32c, hex};
use penstock_kv::WriteSet;
use rustix::io::Errno;

const NAME: &str = "lost+found";
const KEPT_ROW: &str = "user.penstock.row.";
/// Longest key that is written out in full.
const KEY_BYTES: usize = 100;
/// Rows that are kept.
const KEPT_ROWS: usize = 1000;

impl MetaTarget {
    /// An inode as its row says, past the cache.
    pub(crate) async fn stored_inode(&self, ino: Ino) -> Result<Inode, MetaError> {
        let row = self.kv.get(inode_key(ino)).await?.ok_or(Errno::STALE)?;
        Ok(Inode::decode(&row)?)
    }

    /// An inode as a repair makes it: nobody but its owner may use it.
    pub(crate) fn blank_inode(&self, ino: Ino, mode: u32, owner: (u32, u32)) -> Inode {
        let now = self.now_ns();
        let is_dir = mode & DIRECTORY == DIRECTORY;
        let chunk_blocks = self.target.config().chunk_blocks;
        Inode {
            ino,
            mode,
            nlink: if is_dir { 2 } else { 1 },
            uid: owner.0,
            gid: owner.1,
            rdev: 0,
            size: 0,
            times_ns: [now; 4],
            cut: 0,
            parent: if is_dir { ROOT } else { Ino(0) },
            entries: 0,
            layout: Layout { chunk_blocks, target: 0, replicas: 1 },
            data: if is_dir { Data::None } else { Data::Chunks },
        }
    }

    /// The directory, made by `writes` where there is none.
    pub(crate) async fn lost_found(&self, writes: &mut WriteSet) -> Result<Inode, MetaError> {
        let mut root = self.stored_inode(ROOT).await?;
        let mut name = NAME.to_owned();
        // Whatever else has the name keeps it.
        for number in 2..1000 {
            let Some((_, entry)) = self.find(ROOT, name.as_bytes()).await?.entry else { break };
            if let Ok(inode) = self.stored_inode(entry.ino).await
                && inode.is_dir()
            {
                return Ok(inode);
            }
            name = format!("{NAME}-{number}");
        }
        let inode = self.blank_inode(self.new_ino().await?, DIRECTORY | 0o700, (root.uid, root.gid));
        let key = self.new_entry_key(ROOT, name.as_bytes()).await?;
        writes.put(key, entry_row(inode.ino, DIRECTORY, name.as_bytes()));
        root.entries += 1;
        root.nlink += 1;
        let (key, value) = row_of(&root);
        writes.put(key, value);
        Ok(inode)
    }

    /// Gives an inode a name in the directory, with `writes` in the same transaction.
    pub(crate) async fn reconnect(&self, mut inode: Inode, mut writes: WriteSet) -> Result<(), MetaError> {
        let mut dir = self.lost_found(&mut writes).await?;
        let mut name = format!("inode-{}", inode.ino);
        for number in 2..1000 {
            if self.find(dir.ino, name.as_bytes()).await?.entry.is_none() {
                break;
            }
            name = format!("inode-{}-{number}", inode.ino);
        }
        let key = self.new_entry_key(dir.ino, name.as_bytes()).await?;
        writes.put(key, entry_row(inode.ino, inode.type_bits(), name.as_bytes()));
        dir.entries += 1;
        match inode.is_dir() {
            true => {
                dir.nlink += 1;
                inode.parent = dir.ino;
                inode.nlink = inode.nlink.max(2);
            }
            false => inode.nlink = 1,
        }
        for inode in [&dir, &inode] {
            let (key, value) = row_of(inode);
            writes.put(key, value);
        }
        self.commit_repair(writes).await
    }

    /// Moves an unreadable row into an extended attribute of the directory. Returns false when it does not fit: then it
    /// stays where it is.
    pub(crate) async fn keep_row(&self, key: &[u8]) -> Result<bool, MetaError> {
        let Some(value) = self.kv.get(key.to_vec()).await? else { return Ok(true) };
        let mut writes = WriteSet::new();
        let dir = self.lost_found(&mut writes).await?;
        let (from, until) = xattr_range(dir.ino);
        if value.len() > XATTR_MAX || self.kv.keys(from, until, KEPT_ROWS).await?.len() >= KEPT_ROWS {
            return Ok(false);
        }
        let name = match key.len() {
            0..=KEY_BYTES => format!("{KEPT_ROW}{}", hex(key)),
            _ => format!("{KEPT_ROW}{}.{:08x}", hex(&key[..KEY_BYTES]), crc32c(key)),
        };
        let (dir_key, dir_value) = row_of(&dir);
        writes.put(dir_key, dir_value);
        writes.put(xattr_key(dir.ino, name.as_bytes()), value);
        writes.delete(key.to_vec());
        self.commit_repair(writes).await?;
        Ok(true)
    }

    /// Commits what a repair changes. It may use the reserve: it must not fail for want of space that it gives back.
    pub(crate) async fn commit_repair(&self, mut writes: WriteSet) -> Result<(), MetaError> {
        if writes.is_empty() {
            return Ok(());
        }
        self.transactions.set(self.transactions.get() + 1);
        let result = self.kv.commit(std::mem::take(writes.reclaims())).await;
        // Entries may be among the rows, with keys that say nothing.
        self.entries.take();
        result?;
        Ok(())
    }

    /// Moves an entry to where its name is looked for.
    pub(crate) async fn rehome(&self, dir: Ino, cookie: u64) -> Result<(), MetaError> {
        let old = entry_key(dir, cookie);
        let Some(row) = self.kv.get(old.clone()).await? else { return Ok(()) };
        let entry = crate::rows::Entry::decode(&row)?;
        let found = self.find(dir, &entry.name).await?;
        let mut writes = WriteSet::new();
        writes.delete(old);
        // Where the name stands already, this one is its double.
        if let Some(free) = found.free {
            writes.put(entry_key(dir, free), row);
        }
        self.commit_repair(writes).await
    }
}
