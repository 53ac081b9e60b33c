//! Checks of inodes against the names, chunks and queue rows that refer to them.

use super::trace::{Brief, Trace};
use super::{Diagnosis, Field, Fix, Stage};
use crate::ROOT;
use crate::inode::FileKind;
use crate::rows::{entry_key, removed_key};
use penstock_base::{BLOCK_BYTES, FindingKind as Kind, Ino, MAX_FILE_BYTES};
use penstock_chunk::{FileRow, Known};
use std::collections::{BTreeMap, BTreeSet};

impl Diagnosis {
    /// Checks every inode, after all rows have been seen.
    pub(crate) fn check_inodes(&mut self) {
        self.enter(Stage::Checked);
        self.trace(ROOT);
        let traces = std::mem::take(&mut self.traces);
        for (ino, trace) in &traces {
            match trace.row {
                _ if trace.opaque => {}
                Some(row) => {
                    self.check_names(*ino, trace, &row);
                    self.check_data(*ino, trace, &row);
                }
                None => self.check_gone(*ino, trace),
            }
        }
        self.check_cycles(&traces);
        self.check_others(&traces);
        assert!(self.traces.is_empty(), "a check adds no inode");
        self.traces = traces;
    }

    fn check_gone(&mut self, ino: Ino, trace: &Trace) {
        if ino == ROOT {
            let text = "the root directory does not exist".to_owned();
            self.wrong(Kind::MissingRoot, ino, text, Fix::MakeRoot);
        } else if trace.has_data() {
            let text = format!(
                "inode {ino} does not exist and has {} chunks, {} entries{}",
                trace.owned.chunks,
                trace.children,
                if trace.xattrs { " and extended attributes" } else { "" }
            );
            self.wrong(Kind::MissingInode, ino, text, Fix::Remake(ino));
        } else if trace.queued {
            let text = format!("inode {ino} waits to be dropped and does not exist");
            self.wrong(Kind::QueuedWithoutInode, ino, text, Fix::Drop(removed_key(ino)));
        } else if trace.owned.file.is_some() {
            let text = format!("inode {ino} does not exist and has a row of a file");
            self.wrong(Kind::WrongFileRow, ino, text, Fix::CountFiles);
        }
    }

    fn check_names(&mut self, ino: Ino, trace: &Trace, row: &Brief) {
        let holder = trace.holder(ino);
        if trace.is_dir() {
            for (dir, cookie) in trace.holders.iter().filter(|place| Some(**place) != holder) {
                let text = format!("directory {ino} has another name, in {dir}");
                self.wrong(Kind::DirectoryExtraName, ino, text, Fix::Drop(entry_key(*dir, *cookie)));
            }
        } else if ino == ROOT {
            let text = "the root is no directory".to_owned();
            return self.wrong(Kind::MissingRoot, ino, text, Fix::MakeRoot);
        }
        let names = if trace.is_dir() { u32::from(holder.is_some()) } else { trace.names };
        if names == 0 && ino != ROOT {
            if !(trace.queued && row.nlink == 0 && trace.children == 0) {
                let text = format!("inode {ino} has no name and was not removed");
                self.wrong(Kind::OrphanInode, ino, text, Fix::Reconnect(ino));
            }
            return;
        }
        if trace.queued {
            let text = format!("inode {ino} has {names} names and waits to be dropped");
            self.wrong(Kind::NamedAndQueued, ino, text, Fix::Drop(removed_key(ino)));
        }
        if trace.unsure {
            return;
        }
        let links = if trace.is_dir() { 2 + trace.subdirs } else { names };
        if row.nlink != links {
            let text = format!("inode {ino} says {} links and has {links}", row.nlink);
            self.wrong(Kind::WrongLinkCount, ino, text, Fix::Inode(ino, Field::Links(links)));
        }
        if trace.is_dir() {
            self.check_directory(ino, trace, row, holder.map_or(ROOT, |(dir, _)| dir));
        }
    }

    fn check_directory(&mut self, ino: Ino, trace: &Trace, row: &Brief, parent: Ino) {
        if row.entries != trace.children {
            let text = format!("directory {ino} says {} entries and has {}", row.entries, trace.children);
            self.wrong(Kind::WrongEntryCount, ino, text, Fix::Inode(ino, Field::Entries(trace.children)));
        }
        if row.parent != parent {
            let text = format!("directory {ino} says its parent is {}, and it is {parent}", row.parent);
            self.wrong(Kind::WrongParent, ino, text, Fix::Inode(ino, Field::Parent(parent)));
        }
    }

    fn check_data(&mut self, ino: Ino, trace: &Trace, row: &Brief) {
        let (wanted, size) = match row.kind {
            FileKind::Regular => (2, row.size.min(MAX_FILE_BYTES)),
            FileKind::Symlink => (1, row.inline_bytes),
            FileKind::Directory | FileKind::Special => (0, row.size),
        };
        let (owned, chunk_blocks) = (&trace.owned, self.chunk_blocks);
        if row.data != wanted {
            let text = format!("inode {ino} holds its data in a way that its type does not");
            self.wrong(Kind::WrongInodeData, ino, text, Fix::Inode(ino, Field::Data));
        } else if row.size != size {
            let text = format!("inode {ino} says a size of {}, which cannot be", row.size);
            let size = match row.kind {
                FileKind::Regular => owned.end_block.saturating_mul(BLOCK_BYTES as u64).min(MAX_FILE_BYTES),
                _ => size,
            };
            self.wrong(Kind::WrongSize, ino, text, Fix::Inode(ino, Field::Size(size)));
        }
        if row.chunk_blocks != chunk_blocks {
            let text = format!("inode {ino} says chunks of {} blocks, not {chunk_blocks}", row.chunk_blocks);
            self.wrong(Kind::WrongLayout, ino, text, Fix::Inode(ino, Field::ChunkBlocks(chunk_blocks)));
        }
        if row.kind != FileKind::Regular && owned.chunks > 0 {
            let text = format!("inode {ino} is no regular file and has {} chunks", owned.chunks);
            self.wrong(Kind::ChunksOfNonFile, ino, text, Fix::MoveChunks(ino, false));
        } else {
            self.check_file_row(ino, row, owned.file, owned.truncations);
        }
        self.blocks_beyond_end += owned.blocks.saturating_sub(row.size.div_ceil(BLOCK_BYTES as u64));
    }

    /// Checks the row of a file on the target, whose maps know truncate generations up to `truncations`. The
    /// target compares the row with the maps.
    fn check_file_row(&mut self, ino: Ino, row: &Brief, file: Option<FileRow>, truncations: u64) {
        if row.kind != FileKind::Regular {
            if file.is_some() {
                let text = format!("inode {ino} is no regular file and has a row of a file");
                self.wrong(Kind::WrongFileRow, ino, text, Fix::CountFiles);
            }
            return;
        }
        let Known { truncations: of_inode, owner } = row.known;
        if of_inode < truncations {
            let text = format!("inode {ino} was truncated {of_inode} times, and its maps know {truncations}");
            // The row may know of later truncations than any map.
            let field = Field::Truncations(file.map_or(0, |file| file.truncations).max(truncations));
            return self.wrong(Kind::WrongFileRow, ino, text, Fix::Inode(ino, field));
        }
        match file {
            None if of_inode > 0 => {
                let text = format!("file {ino} was truncated {of_inode} times and has no row on the target");
                self.wrong(Kind::WrongFileRow, ino, text, Fix::CountFiles);
            }
            Some(file) if (file.owner, file.truncations) != (owner, of_inode) => {
                let text = format!(
                    "the row of file {ino} says owner {:?} and {} truncations, its inode {owner:?} and {of_inode}",
                    file.owner, file.truncations
                );
                self.wrong(Kind::WrongFileRow, ino, text, Fix::CountFiles);
            }
            _ => {}
        }
    }

    /// Walks upwards from each directory. A walk that comes back to itself has found a cycle, of which one
    /// name is removed. The directory that loses its name is then an orphan.
    fn check_cycles(&mut self, traces: &BTreeMap<Ino, Trace>) {
        let mut done: BTreeSet<Ino> = BTreeSet::new();
        for (start, _) in traces.iter().filter(|(_, trace)| trace.is_dir()) {
            let mut walk = Vec::new();
            let mut at = *start;
            while done.insert(at) {
                walk.push(at);
                match traces.get(&at).and_then(|trace| trace.holder(at)) {
                    Some((above, _)) => at = above,
                    None => break,
                }
            }
            // The walk met itself: it ended neither at a directory without a name nor where an earlier walk
            // had been.
            let Some(begin) = walk.iter().position(|ino| *ino == at) else { continue };
            let Some((dir, cookie)) = traces.get(&at).and_then(|trace| trace.holder(at)) else { continue };
            let round = &walk[begin..];
            let text = format!("{} directories contain each other, from inode {at} on", round.len());
            self.wrong(Kind::DirectoryCycle, at, text, Fix::Drop(entry_key(dir, cookie)));
        }
    }
}
