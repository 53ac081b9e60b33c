//! `/lost+found`: the directory for inodes and rows that have no other place after a repair.
//!
//! It is made when it is first needed.
//!
//! Inodes without a name get the name `inode-` and their number. Before a row that cannot be read is deleted,
//! it is saved as an extended attribute of the directory, named `user.penstock.row.` and the key in
//! hexadecimal digits.

use super::Fsck;
use super::diagnosis::row_of;
use crate::error::MetaError;
use crate::inode::{DIRECTORY, Data, Inode, Layout, has_type};
use crate::names::entry_row;
use crate::rows::{Entry, encode_xattr, entry_key, xattr_key, xattr_range};
use crate::{ROOT, XATTR_MAX};
use penstock_base::{Ino, crc32c, hex};
use penstock_kv::WriteSet;

const NAME: &str = "lost+found";
const KEPT_ROW: &str = "user.penstock.row.";
/// Longest key, in bytes, that is written out in full.
const KEY_BYTES: usize = 100;
/// Most rows that are saved.
const KEPT_ROWS: usize = 1000;

impl Fsck<'_> {
    /// A new inode as a repair makes it; the caller's `mode` lets only its owner use it, except for the root
    /// directory.
    pub(super) fn blank_inode(&self, ino: Ino, mode: u32, owner: (u32, u32)) -> Inode {
        assert!(has_type(mode), "mode {mode:o} names a type of file");
        let now = self.turn.now();
        let is_dir = mode & DIRECTORY == DIRECTORY;
        let chunk_blocks = self.chunk_blocks();
        Inode {
            ino,
            mode,
            nlink: if is_dir { 2 } else { 1 },
            uid: owner.0,
            gid: owner.1,
            rdev: 0,
            size: 0,
            times: [now; 4],
            truncations: 0,
            parent: if is_dir { ROOT } else { Ino(0) },
            entries: 0,
            layout: Layout::of_one_target(chunk_blocks),
            data: if is_dir { Data::None } else { Data::Chunks },
            is_spread: false,
        }
    }

    /// Returns the directory. If there is none, `writes` makes it.
    pub(super) async fn lost_found(&self, writes: &mut WriteSet) -> Result<Inode, MetaError> {
        let mut root = self.turn.stored_inode(ROOT).await?;
        let mut name = NAME.to_owned();
        // Anything else that has the name keeps it.
        for number in 2..1000 {
            let Some((_, entry)) = self.turn.find(ROOT, name.as_bytes()).await?.entry else { break };
            if let Ok(inode) = self.turn.stored_inode(entry.ino).await
                && inode.is_dir()
            {
                return Ok(inode);
            }
            name = format!("{NAME}-{number}");
        }
        let inode = self.blank_inode(self.turn.new_ino().await?, DIRECTORY | 0o700, (root.uid, root.gid));
        let key = self.turn.new_entry_key(ROOT, name.as_bytes()).await?;
        writes.put(key, entry_row(inode.ino, DIRECTORY, name.as_bytes()));
        // A count that cannot be right is corrected in a later round.
        let _ = (root.add_entries(1), root.add_links(1));
        let (key, value) = row_of(&root);
        writes.put(key, value);
        Ok(inode)
    }

    /// Gives an inode a name in the directory, in one transaction with `writes`.
    pub(super) async fn reconnect(&self, mut inode: Inode, mut writes: WriteSet) -> Result<(), MetaError> {
        let mut dir = self.lost_found(&mut writes).await?;
        let mut name = format!("inode-{}", inode.ino);
        for number in 2..1000 {
            if self.turn.find(dir.ino, name.as_bytes()).await?.entry.is_none() {
                break;
            }
            name = format!("inode-{}-{number}", inode.ino);
        }
        let key = self.turn.new_entry_key(dir.ino, name.as_bytes()).await?;
        writes.put(key, entry_row(inode.ino, inode.type_bits(), name.as_bytes()));
        let _ = dir.add_entries(1);
        match inode.is_dir() {
            true => {
                let _ = dir.add_links(1);
                inode.parent = dir.ino;
                inode.nlink = inode.nlink.max(2);
            }
            false => inode.nlink = 1,
        }
        assert!(dir.is_dir() && inode.nlink > 0, "inode {} has a name in a directory", inode.ino);
        for inode in [&dir, &inode] {
            let (key, value) = row_of(inode);
            writes.put(key, value);
        }
        self.turn.commit_repair(writes).await
    }

    /// Moves an unreadable row into an extended attribute of the directory. Returns false if it does not fit;
    /// then the row stays where it is.
    pub(super) async fn keep_row(&self, key: &[u8]) -> Result<bool, MetaError> {
        let Some(value) = self.turn.kv().get(key.to_vec()).await? else { return Ok(true) };
        let mut writes = WriteSet::new();
        let dir = self.lost_found(&mut writes).await?;
        let (from, until) = xattr_range(dir.ino);
        if value.len() > XATTR_MAX || self.turn.kv().keys(from, until, KEPT_ROWS).await?.len() >= KEPT_ROWS {
            return Ok(false);
        }
        let name = match key.len() {
            0..=KEY_BYTES => format!("{KEPT_ROW}{}", hex(key)),
            _ => format!("{KEPT_ROW}{}.{:08x}", hex(&key[..KEY_BYTES]), crc32c(key)),
        };
        let (dir_key, dir_value) = row_of(&dir);
        writes.put(dir_key, dir_value);
        writes.put(xattr_key(dir.ino, name.as_bytes()), encode_xattr(&value));
        writes.delete(key.to_vec());
        self.turn.commit_repair(writes).await?;
        Ok(true)
    }

    /// Moves an entry to the bucket in which its name is looked for.
    pub(super) async fn rehome(&self, dir: Ino, cookie: u64) -> Result<(), MetaError> {
        let old = entry_key(dir, cookie);
        let Some(row) = self.turn.kv().get(old.clone()).await? else { return Ok(()) };
        let entry = Entry::decode(&row)?;
        let found = self.turn.find(dir, &entry.name).await?;
        let mut writes = WriteSet::new();
        writes.delete(old);
        // If the name exists there already, this entry is a duplicate and is only deleted.
        if let Some(free) = found.free {
            writes.put(entry_key(dir, free), row);
        }
        self.turn.commit_repair(writes).await
    }
}
