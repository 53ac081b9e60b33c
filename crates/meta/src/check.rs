//! Checking the name space: names, links, parents, counts, and files against the target's chunks.

use crate::ROOT;
use crate::error::MetaError;
use crate::inode::Inode;
use crate::rows::{Entry, Range, all_entries, all_inodes, all_removed, decode_entry_key, removed_ino};
use crate::target::MetaTarget;
use penstock_base::{BLOCK_BYTES, HashMap, HashSet, Ino};

/// What a check of a file system found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetaCheck {
    /// Inodes.
    pub inodes: u64,
    /// Names.
    pub entries: u64,
    /// Files without a name that are in use or wait to be dropped.
    pub removed: u64,
    /// Chunks with data.
    pub chunks: u64,
    /// Blocks of data.
    pub blocks: u64,
    /// Blocks behind the end of their file: written and not synced before a crash; the file's next cut or removal
    /// takes them back.
    pub blocks_beyond_end: u64,
    /// What is wrong, a line each.
    pub problems: Vec<String>,
}

#[derive(Default)]
struct Names {
    /// Names of each inode.
    links: HashMap<Ino, u32>,
    /// Entries and directories in each directory.
    children: HashMap<Ino, (u64, u32)>,
    /// The directory that holds each directory's name.
    parents: HashMap<Ino, Ino>,
}

impl MetaTarget {
    /// Checks everything, at one moment: changes wait meanwhile.
    pub async fn check(&self) -> Result<MetaCheck, MetaError> {
        let _one = self.changing.lock().await;
        self.target.commit_all().await?;
        let _closed = self.gate.write().await;
        let target = self.target.check().await?;
        let mut check = MetaCheck {
            chunks: target.chunks,
            blocks: target.blocks,
            problems: target.problems.clone(),
            ..MetaCheck::default()
        };
        let mut removed: HashSet<Ino> = HashSet::default();
        self.each(all_removed(), |key, _| {
            removed.extend(removed_ino(key));
            Ok(())
        })
        .await?;
        check.removed = removed.len() as u64;
        let names = self.check_entries(&mut check).await?;
        let mut known: HashSet<Ino> = HashSet::default();
        let mut inodes = Vec::new();
        self.each(all_inodes(), |_, value| {
            inodes.push(Inode::decode(value)?);
            Ok(())
        })
        .await?;
        for inode in &inodes {
            check.inodes += 1;
            known.insert(inode.ino);
            check_inode(inode, &names, &removed, &mut check.problems);
            let owned = target.owners.get(&(0, inode.ino)).copied().unwrap_or(0);
            check.blocks_beyond_end += owned.saturating_sub(inode.size.div_ceil(BLOCK_BYTES as u64));
        }
        for ino in names.links.keys().chain(&removed).filter(|ino| !known.contains(ino)) {
            check.problems.push(format!("inode {ino} has a name or waits to be dropped, and does not exist"));
        }
        for (_, ino) in target.owners.keys().filter(|(_, ino)| !known.contains(ino)) {
            check.problems.push(format!("inode {ino} has chunks and does not exist"));
        }
        Ok(check)
    }

    async fn check_entries(&self, check: &mut MetaCheck) -> Result<Names, MetaError> {
        let mut names = Names::default();
        let mut problems = Vec::new();
        self.each(all_entries(), |key, value| {
            let (dir, _) = decode_entry_key(key)?;
            let entry = Entry::decode(value)?;
            check.entries += 1;
            *names.links.entry(entry.ino).or_default() += 1;
            let (entries, dirs) = names.children.entry(dir).or_default();
            *entries += 1;
            if entry.kind == 0o040_000 {
                *dirs += 1;
                if let Some(other) = names.parents.insert(entry.ino, dir) {
                    problems.push(format!("directory {} has names in {dir} and in {other}", entry.ino));
                }
            }
            Ok(())
        })
        .await?;
        check.problems.extend(problems);
        Ok(names)
    }

    async fn each(
        &self,
        (mut from, until): Range,
        mut visit: impl FnMut(&[u8], &[u8]) -> Result<(), MetaError>,
    ) -> Result<(), MetaError> {
        loop {
            let rows = self.kv.scan(from, until.clone(), 1024).await?;
            let Some((last, _)) = rows.last() else { return Ok(()) };
            from = [&last[..], &[0]].concat();
            for (key, value) in &rows {
                visit(key, value)?;
            }
        }
    }
}

fn check_inode(inode: &Inode, names: &Names, removed: &HashSet<Ino>, problems: &mut Vec<String>) {
    let ino = inode.ino;
    let links = names.links.get(&ino).copied().unwrap_or(0);
    let (entries, dirs) = names.children.get(&ino).copied().unwrap_or((0, 0));
    let wanted = match inode.is_dir() {
        true if links == 0 && ino != ROOT => 0,
        true => 2 + dirs,
        false => links,
    };
    if inode.nlink != wanted {
        problems.push(format!("inode {ino} says {} links and has {wanted}", inode.nlink));
    }
    if inode.is_dir() && inode.entries != entries {
        problems.push(format!("directory {ino} says {} entries and has {entries}", inode.entries));
    }
    if !inode.is_dir() && entries > 0 {
        problems.push(format!("inode {ino} is no directory and has {entries} entries"));
    }
    if inode.is_dir() && ino != ROOT && links > 0 && names.parents.get(&ino) != Some(&inode.parent) {
        problems.push(format!("directory {ino} says its parent is {}", inode.parent));
    }
    if ino != ROOT && (links == 0) != removed.contains(&ino) {
        problems.push(format!("inode {ino} has {links} names, and the queue of removed files disagrees"));
    }
}
