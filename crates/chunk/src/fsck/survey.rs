//! Survey of a target's rows: each block has one owner, and map, bits and counts agree.
//!
//! Memory: three bits for each block of the volume, and a few words for each file. The part of an extent
//! beyond its chunk or beyond the volume owns nothing.

use crate::ChunkError;
use crate::allocator::{Allocator, WrittenStripes};
use crate::free::{Bitmap, GROUP_BLOCKS, Run, Space, bits};
use crate::rows::{
    ChunkKey, Counter, Extent, FileRow, ForeignKey, MapRow, Owner, all_accounts, all_files, all_groups,
    all_maps, all_reserved, chunks_of_a_file, decode_account, decode_account_key, decode_file_key,
    decode_group, decode_group_key,
};
use penstock_array::Volume;
use penstock_base::num::to_u32;
use penstock_base::{Birth, Branch, DecodeError, FindingKind, Findings, Ino, hex};
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
    /// Keys of group rows that belong to no group of the volume.
    pub(crate) stray_groups: Vec<Vec<u8>>,
    /// There are rows of a later release, which may own blocks that this release does not know of.
    pub(crate) opaque: bool,
    /// Blocks that belong to more than one extent; `None` until there is one.
    doubled: Option<Bitmap>,
    /// The rows of accounts.
    accounts: BTreeMap<Owner, u64>,
    blocks: u64,
    chunk_blocks: u32,
}

/// Returns the part of an extent that is in its chunk and on the volume.
pub(crate) fn valid_part(extent: &Extent, chunk_blocks: u32, volume_blocks: u64) -> Extent {
    let in_chunk = extent.count.min(chunk_blocks.saturating_sub(extent.first));
    let on_volume = u64::from(in_chunk).min(volume_blocks.saturating_sub(extent.block));
    assert!(on_volume <= u64::from(in_chunk) && in_chunk <= extent.count, "a part of {extent:?}");
    Extent { count: to_u32(on_volume), ..*extent }
}

/// Takes in a row: its key and its value.
type See = fn(&mut Survey, &[u8], &[u8]);

/// Decodes a map row. Rows of other branches or births are an error: this release does not support them.
pub(crate) fn read_row(key: &[u8], value: &[u8]) -> Result<(ChunkKey, MapRow), DecodeError> {
    let (chunk, birth) = ChunkKey::decode(key)?;
    check_key("map row key", chunk.file.branch, birth)?;
    Ok((chunk, MapRow::decode(value, birth)?))
}

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

fn check_key(what: &'static str, branch: Branch, birth: Birth) -> Result<(), DecodeError> {
    match (branch, birth) {
        (Branch::MAIN, Birth::FIRST) => Ok(()),
        (Branch::MAIN, _) => Err(DecodeError::Unknown { what, field: "birth", found: birth.0 }),
        _ => Err(DecodeError::Unknown { what, field: "branch", found: branch.0 }),
    }
}

impl Survey {
    pub(crate) fn new(blocks: u64, chunk_blocks: u32) -> Self {
        Self {
            check: TargetCheck::default(),
            owned: Bitmap::new(blocks),
            marked: Bitmap::new(blocks),
            bad_groups: BTreeSet::new(),
            stray_groups: Vec::new(),
            opaque: false,
            doubled: None,
            accounts: BTreeMap::new(),
            blocks,
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
                    self.doubled.get_or_insert_with(|| Bitmap::new(self.blocks)).set(block, true);
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
        let groups = self.blocks.div_ceil(GROUP_BLOCKS);
        let Some(group) = decode_group_key(key).filter(|group| *group < groups) else {
            self.stray_groups.push(key.to_vec());
            let text = format!("row {} belongs to no allocation group of the volume", hex(key));
            return findings.add(FindingKind::BadGroupRow, None, text);
        };
        let words = match decode_group(value, Space::group_words()) {
            Ok(words) => words,
            Err(error @ DecodeError::Unknown { .. }) => {
                self.opaque = true;
                let text = format!("allocation group {group}: {error}");
                return findings.add_hopeless(FindingKind::UnknownRow, None, text);
            }
            Err(error) => {
                self.bad_groups.insert(group);
                return findings.add(
                    FindingKind::BadGroupRow,
                    None,
                    format!("allocation group {group}: {error}"),
                );
            }
        };
        for block in bits(group, &words) {
            match block < self.blocks {
                true => self.marked.set(block, true),
                false if self.bad_groups.insert(group) => findings.add(
                    FindingKind::BadGroupRow,
                    None,
                    format!("allocation group {group} marks block {block}, which the volume does not have"),
                ),
                false => {}
            }
        }
    }

    /// Returns the runs of blocks whose bit is set in `has` and not in `has_not`. Skips groups in
    /// `bad_groups`.
    pub(crate) fn only_in(&self, has: &Bitmap, has_not: &Bitmap) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for group in (0..self.blocks.div_ceil(GROUP_BLOCKS)).filter(|group| !self.bad_groups.contains(group))
        {
            let differ: Vec<u64> =
                has.group(group).iter().zip(has_not.group(group)).map(|(a, b)| a & !b).collect();
            for block in bits(group, &differ) {
                match runs.last_mut() {
                    Some((start, count)) if *start + *count == block => *count += 1,
                    _ => runs.push((block, 1)),
                }
            }
        }
        runs
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
        let mut survey = Self::new(volume.blocks(), chunk_blocks);
        let kinds: [(_, See); 5] = [
            (all_maps(), Self::see_map),
            (all_groups(), Self::see_group),
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
        let lacking = (0..space.groups()).filter(|group| !self.bad_groups.contains(group)).any(|group| {
            let words = self.marked.group(group).iter().zip(space.committed_group(group));
            words.into_iter().any(|(row, memory)| row & !memory != 0)
        });
        let findings = &mut self.check.findings;
        if lacking || !space.is_counted() {
            findings.add(
                FindingKind::WrongFreeCount,
                None,
                "free space in memory disagrees with the bitmaps",
            );
        }
    }

    async fn judge_stripes(&mut self, volume: &Volume, allocator: &Allocator) -> Result<(), ChunkError> {
        let (per_stripe, mut all, mut bare) = (volume.stripe_blocks(), WrittenStripes::new(volume), 0u64);
        // Stripes that wait to be discarded are known, and those in a discard count as used.
        let is_free = |stripe: u64| allocator.space().is_empty(stripe) && !allocator.is_idle(stripe);
        while let Some(written) = all.next().await? {
            for stripe in written {
                let mut blocks = stripe * per_stripe..(stripe + 1) * per_stripe;
                if is_free(stripe)
                    && blocks.all(|block| !self.owned.get(block) && !self.marked.get(block))
                    // It may have been discarded since it was found.
                    && !volume.is_unwritten(stripe).await?
                    && is_free(stripe)
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

/// Counts blocks of files as used whose bits say otherwise, before the first block is allocated or discarded.
/// Reads the rows only if there is a written stripe without a bit: a discard would make such a stripe
/// unreadable.
pub(crate) async fn mark_unmarked(
    volume: &Volume,
    kv: &dyn Kv,
    allocator: &Allocator,
    chunk_blocks: u32,
) -> Result<(), ChunkError> {
    let mut all = WrittenStripes::new(volume);
    loop {
        let Some(written) = all.next().await? else { return Ok(()) };
        if written.iter().any(|stripe| allocator.space().is_empty(*stripe)) {
            break;
        }
    }
    let survey = Survey::read(volume, kv, chunk_blocks).await?;
    let unmarked = survey.only_in(&survey.owned, &survey.marked);
    if !unmarked.is_empty() {
        tracing::error!("blocks of files are marked as free: `penstock fs check --repair` repairs it");
    }
    let mut space = allocator.space_mut();
    unmarked
        .iter()
        .flat_map(|(start, count)| *start..start + count)
        .for_each(|block| space.mark_owned(block));
    Ok(())
}

#[cfg(test)]
mod tests;
