//! Survey of a target's rows: each block has one owner, and map, bits and counts agree.
//!
//! Memory: at most three bits for each block of the volume and two for each that others have on loan, less
//! where all blocks of a group are alike, and a few words for each file. The part of an extent
//! beyond its chunk or beyond the volume owns nothing.

use crate::ChunkError;
use crate::allocator::{Allocator, STRIPES_AT_A_TIME};
use crate::free::{Bitmap, Counts, Groups, Run, Space, set_bits};
use crate::free::{fits, is_on, may_be_borrowed, runs_of};
use crate::rows::{
    Borrowed, ChunkKey, Counter, Extent, FileRow, GROUP_WORDS, GROUPS_IN_A_ROW, Lent, LentKey, MapRow, Owner,
    all_accounts, all_counters, all_counts, all_files, all_groups, all_lent, all_loans, all_maps,
    all_reserved, check_key, chunks_of_a_file, decode_account, decode_account_key, decode_counts,
    decode_counts_key, decode_file_key, decode_group, decode_group_key, read_row,
};
use crate::volumes::Volumes;
use penstock_base::num::{to_u32, to_usize};
use penstock_base::{Birth, DecodeError, FindingKind, Findings, Ino, TargetId, hex};
use penstock_kv::{KvRead, for_each};
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
    /// Its loans in both directions.
    pub loans: TargetLoans,
}

/// The loans of a target in both directions, as a check finds them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetLoans {
    /// Those from others, by their allocation groups; none for a row that cannot be read.
    pub borrowed: BTreeMap<u64, Option<Borrowed>>,
    /// Lender and number of those that have no row here: nothing of them was committed yet, or they begin or
    /// end just now.
    pub unrecorded: BTreeSet<(TargetId, u64)>,
    /// Those to others.
    pub lent: BTreeMap<LentKey, Lent>,
    /// Keys of rows of such loans that cannot be read.
    pub bad_lent: Vec<Vec<u8>>,
    /// The row with the numbers of loans cannot be read.
    pub has_bad_numbers: bool,
}

/// Contents of the rows of a target, as a check and a repair use them.
pub(crate) struct Survey {
    pub(crate) check: TargetCheck,
    pub(crate) owned: Bitmap,
    /// Blocks that others have on loan.
    pub(crate) lent: Bitmap,
    /// Those of them that files have too.
    lent_and_owned: Bitmap,
    pub(crate) marked: Bitmap,
    /// Groups whose row cannot be read or marks blocks that the volume does not have.
    pub(crate) bad_groups: BTreeSet<u64>,
    /// Rows of counts some of whose groups have a row.
    pub(crate) counted_rows: BTreeSet<u64>,
    /// Keys of rows that belong to no group.
    pub(crate) stray_groups: Vec<Vec<u8>>,
    /// There are rows of a later release, or of loans to others, which own blocks that nobody can name.
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
            lent: Bitmap::new(groups),
            lent_and_owned: Bitmap::new(groups),
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
            let valid = self.valid(extent);
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
                if self.lent.get(block) {
                    self.lent_and_owned.set(block, true);
                }
                self.own(block);
            }
        }
        if far {
            let text =
                format!("chunk {} of inode {} is beyond the maximum file size", chunk.index, chunk.file.ino);
            self.check.findings.add(FindingKind::ChunkBeyondLimit, chunk.file.ino, text);
        }
    }

    /// The part of an extent that is in its chunk, and on the volume or in a loan.
    pub(crate) fn valid(&self, extent: &Extent) -> Extent {
        let valid = self.groups.valid_part(extent, self.chunk_blocks);
        let mut count = 0;
        for (group, (at, part)) in self.groups.parts((valid.block, valid.count.into())) {
            let end = match self.check.loans.borrowed.get(&group) {
                _ if group < self.groups.own() => u64::MAX,
                Some(Some(borrowed)) => u64::from(borrowed.loan.stripes) * self.groups.stripe_blocks(),
                // Its row cannot be read, and may be made again.
                Some(None) => u64::MAX,
                None => 0,
            };
            let fits = part.min(end.saturating_sub(at));
            count += fits;
            if fits < part {
                break;
            }
        }
        Extent { count: to_u32(count), ..valid }
    }

    /// Takes in the row of a loan of another target.
    fn see_loan(&mut self, key: &[u8], value: &[u8]) {
        let group = Borrowed::group_of(key).ok().filter(|group| may_be_borrowed(*group, self.groups));
        let borrowed =
            Borrowed::decode(value).and_then(|borrowed| match fits(&borrowed.0.loan, self.groups) {
                true => Ok(borrowed),
                false => Err(DecodeError::Bad { what: "row of a loan", why: "more blocks than a group has" }),
            });
        let error = match (group, borrowed) {
            (Some(group), Ok((borrowed, bits))) => {
                let lent = u64::from(borrowed.loan.stripes) * self.groups.stripe_blocks();
                self.check.loans.borrowed.insert(group, Some(borrowed));
                return self.mark(group, &bits, lent);
            }
            (group, borrowed) => {
                self.check.loans.borrowed.extend(group.map(|group| (group, None)));
                self.bad_groups.extend(group);
                borrowed.err().map_or("it names no group".into(), |error| error.to_string())
            }
        };
        if group.is_none() {
            self.stray_groups.push(key.to_vec());
        }
        let text = format!("row {} of a loan: {error}", hex(key));
        self.check.findings.add(
            if group.is_some() { FindingKind::BadLoanRow } else { FindingKind::BadGroupRow },
            None,
            text,
        );
    }

    /// Takes in the row of a loan to another target: its blocks have an owner.
    fn see_lent(&mut self, key: &[u8], value: &[u8]) {
        let lent = LentKey::decode(key).and_then(|key| Ok((key, Lent::decode(value)?)));
        let lent = lent.and_then(|(key, lent)| match is_on(&lent.loan, self.groups) {
            true => Ok((key, lent)),
            false => Err(DecodeError::Bad { what: "row of a loan", why: "blocks beyond the volume" }),
        });
        match lent {
            Ok((key, lent)) => {
                let runs = runs_of(&lent.loan, self.groups.stripe_blocks());
                for block in runs.into_iter().flat_map(|(first, count)| first..first + count) {
                    self.own(block);
                    self.lent.set(block, true);
                }
                self.check.loans.lent.insert(key, lent);
            }
            Err(error) => {
                // Nobody knows which blocks it owns.
                self.opaque = true;
                self.check.loans.bad_lent.push(key.to_vec());
                let text = format!("row {} of a loan to another target: {error}", hex(key));
                self.check.findings.add(FindingKind::BadLoanRow, None, text);
            }
        }
    }

    /// True if a file has a block, whoever else has it.
    pub(crate) fn file_has(&self, block: u64) -> bool {
        if self.lent.get(block) { self.lent_and_owned.get(block) } else { self.owned.get(block) }
    }

    fn own(&mut self, block: u64) {
        if self.owned.get(block) {
            self.doubled.get_or_insert_with(|| Bitmap::new(self.groups)).set(block, true);
        }
        self.owned.set(block, true);
    }

    /// Takes in the counter of loans.
    fn see_counter(&mut self, key: &[u8], value: &[u8]) {
        if let Err(error) = Counter::decode(key, value) {
            let text = format!("row {}: {error}", hex(key));
            self.check.loans.has_bad_numbers = true;
            match error {
                DecodeError::Unknown { .. } => {
                    self.check.findings.add_hopeless(FindingKind::BadLoanRow, None, text)
                }
                _ => self.check.findings.add(FindingKind::BadLoanRow, None, text),
            }
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
        let parts = row.extents.iter().map(|extent| self.valid(extent));
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
        let Some(group) = decode_group_key(key).filter(|group| *group < self.groups.own()) else {
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
        self.mark(group, &words, u64::MAX);
    }

    /// Marks the blocks of a group, which has so many at most.
    fn mark(&mut self, group: u64, words: &[u64], most: u64) {
        let range = self.groups.range(group);
        let range = range.start..range.end.min(range.start.saturating_add(most));
        let findings = &mut self.check.findings;
        for block in set_bits(words).map(|at| range.start + at) {
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
    pub(crate) async fn read(
        volumes: &Volumes,
        kv: &dyn KvRead,
        chunk_blocks: u32,
    ) -> Result<Self, ChunkError> {
        let own = volumes.groups().with_borrowed(0);
        let mut last = own.own();
        for_each(kv, all_loans(), |key, _| {
            let group = Borrowed::group_of(key).ok().filter(|group| may_be_borrowed(*group, own));
            last = last.max(group.map_or(0, |group| group + 1));
            Ok::<_, ChunkError>(())
        })
        .await?;
        let mut survey = Self::new(own.with_borrowed(last - own.own()), chunk_blocks);
        let kinds: [(_, See); 9] = [
            (all_loans(), Self::see_loan),
            (all_lent(), Self::see_lent),
            (all_counters(), Self::see_counter),
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

    /// Completes the check: blocks with two owners, bits against extents, and memory against both. `space` is
    /// that of the moment of the rows, as are the loans that may have none.
    pub(crate) async fn check(
        mut self,
        volumes: &Volumes,
        kv: &dyn KvRead,
        (space, may_lack_rows): (&Space, BTreeSet<(TargetId, u64)>),
        allocator: &Allocator,
    ) -> Result<TargetCheck, ChunkError> {
        if self.doubled.is_some() {
            let see = |key: &[u8], value: &[u8]| {
                self.see_double(key, value);
                Ok::<_, ChunkError>(())
            };
            for_each(kv, all_maps(), see).await?;
        }
        self.check.loans.unrecorded = may_lack_rows;
        self.judge_bits();
        self.judge_counts();
        self.judge_memory(space);
        self.judge_stripes(volumes, allocator).await?;
        Ok(self.check)
    }

    fn judge_memory(&mut self, space: &Space) {
        let is_wrong = |group: u64| match space.bits_in_memory(group) {
            Some(memory) => {
                self.marked.group(group).iter().zip(memory).any(|(row, memory)| row & !memory != 0)
            }
            None => space.known_counts(group) != space.counts_of(group, self.marked.group(group)),
        };
        let known = self.readable_groups().filter(|group| *group < space.groups().count());
        let is_wrong = known.into_iter().any(|group| is_wrong(group) || space.is_suspect(group));
        let is_miscounted = |group: &u64| {
            let counts = self.counts.get(group).copied().unwrap_or(Some(space.free_counts(*group)));
            counts.is_some_and(|counts| counts != self.marked.counts(*group))
        };
        let own = self.readable_groups().filter(|group| *group < self.groups.own());
        let miscounted = own.filter(is_miscounted).count();
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

    async fn judge_stripes(&mut self, volumes: &Volumes, allocator: &Allocator) -> Result<(), ChunkError> {
        let (per_stripe, mut from, mut bare) = (volumes.stripe_blocks(), 0, 0u64);
        let end = self.groups.stripes_of(0..self.groups.count()).end;
        loop {
            let written = volumes.written(from, STRIPES_AT_A_TIME).await?;
            let Some(last) = written.last() else { break };
            from = last + 1;
            // A loan of which nothing was committed has no row yet.
            for stripe in written.into_iter().filter(|stripe| *stripe < end) {
                let mut blocks = stripe * per_stripe..(stripe + 1) * per_stripe;
                // Of now: stripes on their way to a write or a discard count as used, and those that wait
                // for a discard are known.
                if blocks.all(|block| !self.owned.get(block) && !self.marked.get(block))
                    && allocator.is_left_behind(stripe).await?
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
