//! Survey of a target's rows: each block has one owner, and map, bits and counts agree.
//!
//! Memory: at most three bits for each block of the volume, less where all blocks of a group are alike, and a
//! few words for each file. The part of an extent
//! beyond its chunk or beyond the volume owns nothing.

use crate::ChunkError;
use crate::allocator::{Allocator, STRIPES_AT_A_TIME};
use crate::free::{Bitmap, Counts, Groups, Run, set_bits};
use crate::rows::{
    ChunkKey, Counter, Extent, FileRow, ForeignKey, GROUP_WORDS, GROUPS_IN_A_ROW, MapRow, Owner,
    all_accounts, all_counts, all_files, all_groups, all_maps, all_reserved, check_key, chunks_of_a_file,
    decode_account, decode_account_key, decode_counts, decode_counts_key, decode_file_key, decode_group,
    decode_group_key, read_row, valid_part,
};
use penstock_array::Volume;
use penstock_base::num::to_usize;
use penstock_base::{Birth, DecodeError, FindingKind, Findings, Ino, hex};
use penstock_kv::{Kv, for_each};
use std::collections::{BTreeMap, BTreeSet};

/// The chunks and blocks of one inode on a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owned {
    /// Number of map rows.
    pub chunks: u64,
    /// Number of blocks with data; preallocated ones do not count.
    pub blocks: u64,
    /// Block of the file behind its last one with data; rows in `far_chunks` do not count.
    pub end_block: u64,
    /// Number of map rows beyond the maximum file size.
    pub far_chunks: u64,
    /// Number of blocks, preallocated ones included.
    pub held: u64,
    /// The highest truncate generation of a map row.
    pub truncations: u64,
    /// The row of the file, if it has one that can be read.
    pub file: Option<FileRow>,
}

/// Result of a check of a target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetCheck {
    /// Number of map rows that could be read.
    pub chunks: u64,
    /// Number of blocks that rows point to, preallocated ones included.
    pub blocks: u64,
    /// Faults that the check found.
    pub findings: Findings,
    /// Chunks and blocks of each inode that has any.
    pub owners: BTreeMap<Ino, Owned>,
}

/// Contents of the rows of a target, as a check and a repair use them.
pub(crate) struct Survey {
    pub(crate) check: TargetCheck,
    pub(crate) owned: Bitmap,
    pub(crate) marked: Bitmap,
    /// Groups whose row cannot be read or marks blocks that the volume does not have.
    pub(crate) bad_groups: BTreeSet<u64>,
    /// Rows of counts some of whose groups have a row.
    pub(crate) counted_rows: BTreeSet<u64>,
    /// Keys of group rows that belong to no group of the volume.
    pub(crate) stray_groups: Vec<Vec<u8>>,
    /// There are rows of a later release, which may own blocks that this release does not know of.
    pub(crate) opaque: bool,
    /// There are map rows that cannot be read. Blocks that they owned are marked, unless their bits are lost.
    pub(crate) has_bad_maps: bool,
    /// Blocks that belong to more than one extent; `None` until there is one.
    doubled: Option<Bitmap>,
    /// The rows of accounts.
    accounts: BTreeMap<Owner, u64>,
    /// By group, the counts of its row, if that can be read.
    counts: BTreeMap<u64, Option<Counts>>,
    pub(crate) groups: Groups,
    blocks: u64,
    chunk_blocks: u32,
}

/// Takes in a row: its key and its value.
type See = fn(&mut Survey, &[u8], &[u8]);

/// Decodes the row of a file, like [`read_row`].
fn read_file_row(key: &[u8], value: &[u8]) -> Result<(Ino, FileRow), DecodeError> {
    let (file, birth) = decode_file_key(key)?;
    check_key("file row key", file.branch, birth)?;
    Ok((file.ino, FileRow::decode(value)?))
}

/// Decodes the row of an account, like [`read_row`].
fn read_account(key: &[u8], value: &[u8]) -> Result<(Owner, u64), DecodeError> {
    let (branch, owner) = decode_account_key(key)?;
    check_key("account key", branch, Birth::FIRST)?;
    Ok((owner, decode_account(value)?))
}

/// The blocks of these files by owner; none for an owner without blocks.
pub(super) fn accounts_of(files: impl Iterator<Item = FileRow>) -> BTreeMap<Owner, u64> {
    let mut accounts: BTreeMap<Owner, u64> = BTreeMap::new();
    for row in files.filter(|row| row.blocks > 0) {
        let account = accounts.entry(row.owner).or_default();
        *account = account.saturating_add(row.blocks);
    }
    accounts
}

impl Survey {
    pub(crate) fn new(groups: Groups, chunk_blocks: u32) -> Self {
        Self {
            check: TargetCheck::default(),
            owned: Bitmap::new(groups),
            marked: Bitmap::new(groups),
            bad_groups: BTreeSet::new(),
            counted_rows: BTreeSet::new(),
            stray_groups: Vec::new(),
            opaque: false,
            has_bad_maps: false,
            doubled: None,
            accounts: BTreeMap::new(),
            counts: BTreeMap::new(),
            groups,
            blocks: groups.blocks(),
            chunk_blocks,
        }
    }

    fn see_map(&mut self, key: &[u8], value: &[u8]) {
        let (chunk, MapRow { truncations, extents }) = match read_row(key, value) {
            Ok(row) => row,
            Err(error) => return self.see_bad_map(key, &error),
        };
        self.check.chunks += 1;
        let first_block = chunk.index.saturating_mul(u64::from(self.chunk_blocks));
        let far = chunk.index >= chunks_of_a_file(self.chunk_blocks);
        let owner = self.check.owners.entry(chunk.file.ino).or_default();
        owner.chunks += 1;
        owner.truncations = owner.truncations.max(truncations);
        owner.far_chunks += u64::from(far);
        for extent in &extents {
            let valid = valid_part(extent, self.chunk_blocks, self.blocks);
            self.judge_extent(chunk, extent, &valid);
            let owner = self.check.owners.entry(chunk.file.ino).or_default();
            self.check.blocks += u64::from(valid.count);
            owner.held += u64::from(valid.count);
            if !extent.preallocated {
                owner.blocks += u64::from(valid.count);
            }
            if !far && !extent.preallocated && valid.count > 0 {
                owner.end_block = owner.end_block.max(first_block + u64::from(valid.first + valid.count));
            }
            for block in valid.block..valid.block + u64::from(valid.count) {
                if self.owned.get(block) {
                    self.doubled.get_or_insert_with(|| Bitmap::new(self.groups)).set(block, true);
                }
                self.owned.set(block, true);
            }
        }
        if far {
            let text =
                format!("chunk {} of inode {} is beyond the maximum file size", chunk.index, chunk.file.ino);
            self.check.findings.add(FindingKind::ChunkBeyondLimit, chunk.file.ino, text);
        }
    }

    fn see_bad_map(&mut self, key: &[u8], error: &DecodeError) {
        let ino = ChunkKey::decode(key).ok().map(|(chunk, _)| chunk.file.ino);
        let text = format!("map row {}: {error}", hex(key));
        let findings = &mut self.check.findings;
        if let DecodeError::Unknown { .. } = error {
            self.opaque = true;
            return findings.add_hopeless(FindingKind::UnknownRow, ino, text);
        }
        self.has_bad_maps = true;
        findings.add(FindingKind::BadMapRow, ino, text);
    }

    fn judge_extent(&mut self, chunk: ChunkKey, extent: &Extent, valid: &Extent) {
        let of = format!("chunk {} of inode {}", chunk.index, chunk.file.ino);
        let kind = match extent {
            _ if extent.count == 0 => FindingKind::EmptyExtent,
            _ if extent.first + extent.count > self.chunk_blocks => FindingKind::ExtentBeyondChunk,
            _ if valid.count < extent.count => FindingKind::ExtentBeyondVolume,
            _ => return,
        };
        let Extent { first, count, block, .. } = extent;
        let text = format!("{of}: blocks {first}+{count} at {block}");
        self.check.findings.add(kind, chunk.file.ino, text);
    }

    fn see_double(&mut self, key: &[u8], value: &[u8]) {
        let (Ok((chunk, row)), Some(doubled)) = (read_row(key, value), &self.doubled) else { return };
        let parts = row.extents.iter().map(|extent| valid_part(extent, self.chunk_blocks, self.blocks));
        let blocks = parts.flat_map(|part| part.block..part.block + u64::from(part.count));
        let shared: Vec<u64> = blocks.filter(|block| doubled.get(*block)).collect();
        if let Some(first) = shared.first() {
            let text = format!(
                "chunk {} of inode {}: {} of its blocks have another owner too, the first is {first}",
                chunk.index,
                chunk.file.ino,
                shared.len()
            );
            self.check.findings.add(FindingKind::DoubleOwnedBlock, chunk.file.ino, text);
        }
    }

    /// Takes in the row of a file, after all map rows.
    fn see_file(&mut self, key: &[u8], value: &[u8]) {
        match read_file_row(key, value) {
            Ok((ino, row)) => self.check.owners.entry(ino).or_default().file = Some(row),
            Err(error) => {
                self.see_bad_count(key, decode_file_key(key).ok().map(|(file, _)| file.ino), &error)
            }
        }
    }

    fn see_account(&mut self, key: &[u8], value: &[u8]) {
        match read_account(key, value) {
            Ok((owner, blocks)) => drop(self.accounts.insert(owner, blocks)),
            Err(error) => self.see_bad_count(key, None, &error),
        }
    }

    /// Reports a row that only counts what other rows say. A later release gives its fields other values only
    /// with a feature bit, and a store with one does not start here. So this is damage, and it can be counted
    /// again; but for a key with a branch or a birth, whose files are not known here.
    fn see_bad_count(&mut self, key: &[u8], ino: Option<Ino>, error: &DecodeError) {
        let text = format!("row {}: {error}", hex(key));
        let findings = &mut self.check.findings;
        match error {
            DecodeError::Unknown { field: "branch" | "birth", .. } => {
                self.opaque = true;
                findings.add_hopeless(FindingKind::UnknownRow, ino, text);
            }
            _ => findings.add(FindingKind::BadFileRow, ino, text),
        }
    }

    /// Reports a row that this release does not make.
    fn see_reserved(&mut self, key: &[u8], value: &[u8]) {
        self.opaque = true;
        let what = match Counter::decode(key, value) {
            Ok(_) => "a counter that this release does not use".into(),
            Err(_) if ForeignKey::decode(key).is_ok() => "a chunk of another target".into(),
            Err(error) => error.to_string(),
        };
        let text = format!("row {}: {what}", hex(key));
        self.check.findings.add_hopeless(FindingKind::UnknownRow, None, text);
    }

    /// Adds a finding about blocks. It cannot be mended if they may belong to a row that this release does
    /// not decode.
    fn add_unless_opaque(&mut self, kind: FindingKind, ino: Option<Ino>, text: String) {
        match self.opaque {
            true => self.check.findings.add_hopeless(kind, ino, text),
            false => self.check.findings.add(kind, ino, text),
        }
    }

    /// Compares the rows of files with their maps, and accounts with the rows of files.
    fn judge_counts(&mut self) {
        let mut findings: Vec<(FindingKind, Option<Ino>, String)> = Vec::new();
        let accounts = accounts_of(self.check.owners.values().filter_map(|owned| owned.file));
        for (ino, owned) in &self.check.owners {
            let (blocks, truncations) = owned.file.map_or((0, 0), |row| (row.blocks, row.truncations));
            let is_needless = owned.file.is_some() && blocks == 0 && truncations == 0;
            if blocks != owned.held || truncations < owned.truncations || is_needless {
                let text = format!(
                    "the row of file {ino} has {blocks} blocks and truncate generation {truncations}, its maps have {} and {}",
                    owned.held, owned.truncations
                );
                findings.push((FindingKind::WrongFileRow, Some(*ino), text));
            }
        }
        if accounts != self.accounts {
            let owners: BTreeSet<&Owner> = accounts.keys().chain(self.accounts.keys()).collect();
            let differs = |owner: &&&Owner| accounts.get(**owner) != self.accounts.get(**owner);
            for owner in owners.iter().filter(differs) {
                let [found, right] = [&self.accounts, &accounts].map(|all| all.get(*owner).unwrap_or(&0));
                let Owner { uid, gid, project } = owner;
                let text = format!(
                    "user {uid}, group {gid}, project {project}: {found} blocks are counted and files have {right}"
                );
                findings.push((FindingKind::WrongAccount, None, text));
            }
        }
        for (kind, ino, text) in findings {
            self.add_unless_opaque(kind, ino, text);
        }
    }

    fn see_group(&mut self, key: &[u8], value: &[u8]) {
        let findings = &mut self.check.findings;
        let Some(group) = decode_group_key(key).filter(|group| *group < self.groups.count()) else {
            self.stray_groups.push(key.to_vec());
            let text = format!("row {} belongs to no allocation group of the volume", hex(key));
            return findings.add(FindingKind::BadGroupRow, None, text);
        };
        self.counted_rows.insert(group / GROUPS_IN_A_ROW);
        let words = match decode_group(value, GROUP_WORDS) {
            Ok(words) => words,
            // A later release has another format only with a feature bit, and then nothing starts here.
            Err(error) => {
                self.bad_groups.insert(group);
                return findings.add(
                    FindingKind::BadGroupRow,
                    None,
                    format!("allocation group {group}: {error}"),
                );
            }
        };
        let range = self.groups.range(group);
        for block in set_bits(&words).map(|at| range.start + at) {
            match range.contains(&block) {
                true => self.marked.set(block, true),
                false if self.bad_groups.insert(group) => findings.add(
                    FindingKind::BadGroupRow,
                    None,
                    format!("allocation group {group} marks block {block}, which it does not have"),
                ),
                false => {}
            }
        }
    }

    fn see_counts(&mut self, key: &[u8], value: &[u8]) {
        let range = decode_counts_key(key).and_then(|row| self.groups.counted_in(row));
        let Some(range) = range else {
            let text = format!("row {} counts no allocation group of the volume", hex(key));
            return self.check.findings.add(FindingKind::BadGroupRow, None, text);
        };
        let first = range.start;
        match decode_counts(value, to_usize(range.end - first)) {
            Ok(counts) => self.counts.extend(range.zip(counts.into_iter().map(Some))),
            Err(error) => {
                self.counts.extend(range.map(|group| (group, None)));
                let text = format!("counts of allocation groups from {first} on: {error}");
                self.check.findings.add(FindingKind::BadGroupRow, None, text);
            }
        }
    }

    /// Groups but for these whose row of counts does not have as many bits as there are.
    pub(crate) fn miscounted_groups(&self, but: &BTreeSet<u64>) -> BTreeSet<u64> {
        let counted = self.counts.iter().filter_map(|(group, counts)| Some((*group, (*counts)?)));
        let is_miscounted =
            |(group, counts): &(u64, Counts)| !but.contains(group) && *counts != self.marked.counts(*group);
        counted.filter(is_miscounted).map(|(group, _)| group).collect()
    }

    /// Returns the runs of blocks whose bit is set in `has` and not in `has_not`. Skips groups in
    /// `bad_groups`.
    pub(crate) fn only_in(&self, has: &Bitmap, has_not: &Bitmap) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        self.readable_groups().for_each(|group| has.only_here(has_not, group, &mut runs));
        runs
    }

    /// Groups whose row can be read, and those without a row.
    fn readable_groups(&self) -> impl Iterator<Item = u64> {
        (0..self.groups.count()).filter(|group| !self.bad_groups.contains(group))
    }

    fn judge_bits(&mut self) {
        for (first, count) in self.only_in(&self.owned, &self.marked) {
            let text = format!("{count} blocks from {first} on belong to files and are marked as free");
            self.check.findings.add(FindingKind::BlockNotMarked, None, text);
        }
        for (first, count) in self.only_in(&self.marked, &self.owned) {
            let text = format!("{count} blocks from {first} on are marked as used and belong to no file");
            self.add_unless_opaque(FindingKind::BlockNotOwned, None, text);
        }
    }
}

impl Survey {
    /// Reads all map rows and bitmaps.
    pub(crate) async fn read(volume: &Volume, kv: &dyn Kv, chunk_blocks: u32) -> Result<Self, ChunkError> {
        let mut survey = Self::new(Groups::new(volume.blocks(), volume.stripe_blocks()), chunk_blocks);
        let kinds: [(_, See); 6] = [
            (all_maps(), Self::see_map),
            (all_groups(), Self::see_group),
            (all_counts(), Self::see_counts),
            (all_files(), Self::see_file),
            (all_accounts(), Self::see_account),
            (all_reserved(), Self::see_reserved),
        ];
        for (range, see) in kinds {
            for_each(kv, range, |key, value| {
                see(&mut survey, key, value);
                Ok::<_, ChunkError>(())
            })
            .await?;
        }
        Ok(survey)
    }

    /// Completes the check: blocks with two owners, bits against extents, and memory against both.
    pub(crate) async fn check(
        mut self,
        volume: &Volume,
        kv: &dyn Kv,
        allocator: &Allocator,
    ) -> Result<TargetCheck, ChunkError> {
        if self.doubled.is_some() {
            let see = |key: &[u8], value: &[u8]| {
                self.see_double(key, value);
                Ok::<_, ChunkError>(())
            };
            for_each(kv, all_maps(), see).await?;
        }
        self.judge_bits();
        self.judge_counts();
        self.judge_memory(allocator);
        self.judge_stripes(volume, allocator).await?;
        Ok(self.check)
    }

    fn judge_memory(&mut self, allocator: &Allocator) {
        let space = allocator.space();
        let is_wrong = |group: u64| match space.bits_in_memory(group) {
            Some(memory) => {
                self.marked.group(group).iter().zip(memory).any(|(row, memory)| row & !memory != 0)
            }
            None => space.counts(group) != self.marked.counts(group),
        };
        let is_wrong = self.readable_groups().any(|group| is_wrong(group) || space.is_suspect(group));
        let is_miscounted = |group: &u64| {
            let counts = self.counts.get(group).copied().unwrap_or(Some(space.free_counts(*group)));
            counts.is_some_and(|counts| counts != self.marked.counts(*group))
        };
        let miscounted = self.readable_groups().filter(is_miscounted).count();
        let findings = &mut self.check.findings;
        if is_wrong || !space.is_counted() {
            findings.add(
                FindingKind::WrongFreeCount,
                None,
                "free space in memory disagrees with the bitmaps",
            );
        }
        if miscounted > 0 {
            let text = format!("{miscounted} allocation groups are not as they are counted");
            findings.add(FindingKind::WrongFreeCount, None, text);
        }
    }

    async fn judge_stripes(&mut self, volume: &Volume, allocator: &Allocator) -> Result<(), ChunkError> {
        let (per_stripe, mut from, mut bare) = (volume.stripe_blocks(), 0, 0u64);
        loop {
            let written = volume.written(from, STRIPES_AT_A_TIME).await?;
            let Some(last) = written.last() else { break };
            from = last + 1;
            for stripe in written {
                let mut blocks = stripe * per_stripe..(stripe + 1) * per_stripe;
                // Stripes that wait to be discarded are known, and those in a discard count as used.
                if blocks.all(|block| !self.owned.get(block) && !self.marked.get(block))
                    && allocator.is_bare(stripe).await?
                {
                    bare += 1;
                }
            }
        }
        if bare > 0 {
            let text = format!("{bare} stripes are written and hold nothing");
            self.check.findings.add(FindingKind::WrittenFreeStripe, None, text);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
