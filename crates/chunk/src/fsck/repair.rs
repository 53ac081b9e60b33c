//! Repairs a target: bits from extents, extents within their bounds, copies of blocks with two owners.
//!
//! Nothing is dirty in memory and no request is served. Each function reads the rows again, commits bounded
//! write sets, and does nothing if nothing is wrong, so an interrupted repair can be started again.
//! [`Fsck::mark_owned`] comes first: nothing is allocated while a block of a file counts as free.

use super::Fsck;
use super::survey::{Owned, Survey, accounts_of};
use crate::ChunkError;
use crate::Known;
use crate::accounts::Accounts;
use crate::allocator::Source;
use crate::free::Run;
use crate::map::joined;
use crate::rows::{
    Borrowed, ChunkKey, Counts, Extent, FileRow, MapRow, Owner, all_accounts, all_counts, all_files,
    all_maps, counts_key, encode_account, encode_counts, encode_group, group_key, map_range, read_row,
};
use penstock_base::num::to_u32;
use penstock_base::{Birth, Branch, DecodeError, ErrorKind, FileId, Ino};
use penstock_drive::{Class, Io};
use penstock_kv::{Pages, ROWS_AT_ONCE, Row, WriteSet, commit_apart, for_each};
use std::collections::{BTreeMap, BTreeSet};

const IO: Io = Io::new(Class::Meta, "repair.read");

impl Fsck<'_> {
    /// Evicts the clean chunks from memory, because their rows are about to change.
    pub fn forget_chunks(&self) {
        self.cache.evict_clean();
    }

    pub(super) async fn commit_repair(&self, writes: &mut WriteSet) -> Result<(), ChunkError> {
        if !writes.is_empty() {
            // A repair may free space, so it must not fail for lack of it.
            writes.reclaims();
            self.kv.commit(std::mem::take(writes)).await?;
        }
        Ok(())
    }

    /// Marks every block that a file owns, rewrites groups whose row cannot be read, deletes rows of no
    /// group, and counts all groups again.
    pub async fn mark_owned(&self) -> Result<(), ChunkError> {
        let mut survey = self.survey().await?;
        let unmarked = survey.only_in(&survey.owned, &survey.marked);
        let mut groups: BTreeSet<u64> = survey.groups.of_runs(&unmarked).collect();
        let mut bad = std::mem::take(&mut survey.bad_groups);
        if survey.opaque || survey.has_bad_maps {
            // Rows that are not known may own blocks whose bits are lost.
            let lacking = survey.miscounted_groups(&bad).into_iter().chain(groups.iter().copied());
            let mut space = self.allocator.space_mut();
            match survey.opaque {
                // Nothing will tell any more.
                true => lacking.for_each(|group| space.suspect(group)),
                // [`Self::unowned_runs`] finds their blocks among all blocks of the groups.
                false => {
                    let suspect = (0..survey.groups.count()).filter(|group| space.is_suspect(*group));
                    bad.extend(lacking.chain(suspect));
                }
            }
            for block in bad.iter().flat_map(|group| survey.groups.range(*group)) {
                survey.marked.set(block, true);
            }
        }
        assert!(bad.iter().all(|group| *group < survey.groups.count()), "groups of the volume");
        for (start, count) in survey.only_in(&survey.owned, &survey.marked) {
            (start..start + count).for_each(|block| survey.marked.set(block, true));
        }
        groups.extend(&bad);
        let mut writes = WriteSet::new();
        for key in &survey.stray_groups {
            writes.delete(key.clone());
        }
        commit_apart(self.kv, std::mem::take(writes.reclaims())).await?;
        self.write_groups(&groups, &survey).await?;
        self.load_bits(&survey).await;
        Ok(())
    }

    /// Makes the bitmaps in memory agree with the rows.
    async fn load_bits(&self, survey: &Survey) {
        // Blocks in a discard have no bit in the rows; the discard itself frees them.
        let _no_discard = self.allocator.pause_discards().await;
        // A row that was read before it was repaired may be on its way to the memory.
        let _no_load = self.allocator.pause_loads().await;
        if !survey.opaque {
            self.allocator.set_compared();
        }
        let mut space = self.allocator.space_mut();
        for group in 0..space.groups().count().min(survey.groups.count()) {
            // Rows of a later release may own the blocks whose bits are lost.
            if !(survey.opaque && space.is_suspect(group)) {
                space.reload(group, survey.marked.group(group));
            }
        }
    }

    /// Makes the rows with counts agree with the bits.
    async fn count_groups(&self, survey: &Survey) -> Result<(), ChunkError> {
        let mut rows: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        for (row, of_row) in (0..).map_while(|row| Some((row, survey.groups.counted_in(row)?))) {
            let of_group = |group| match survey.opaque && self.allocator.space().is_suspect(group) {
                true => Counts::SUSPECT,
                false => survey.marked.counts(group),
            };
            let counts: Vec<_> = of_row.clone().map(of_group).collect();
            let is_free =
                |(group, counts): (u64, &Counts)| *counts == self.allocator.space().free_counts(group);
            // A start takes counts that are missing beside rows of their groups for lost.
            if survey.counted_rows.contains(&row) || !of_row.zip(&counts).all(is_free) {
                rows.insert(counts_key(row), encode_counts(&counts));
            }
        }
        self.make_rows(&[all_counts()], rows).await
    }

    /// Makes the rows of these ranges the ones that are given, all others deleted.
    async fn make_rows(
        &self,
        ranges: &[penstock_kv::Range],
        mut rows: BTreeMap<Vec<u8>, Vec<u8>>,
    ) -> Result<(), ChunkError> {
        let mut writes = WriteSet::new();
        for range in ranges {
            for_each(self.kv, range.clone(), |key, value| {
                match rows.remove(key) {
                    Some(right) if right == value => {}
                    Some(right) => drop(writes.put(key.to_vec(), right)),
                    None => drop(writes.delete(key.to_vec())),
                }
                Ok::<_, ChunkError>(())
            })
            .await?;
        }
        rows.into_iter().for_each(|(key, value)| _ = writes.put(key, value));
        Ok(commit_apart(self.kv, std::mem::take(writes.reclaims())).await?)
    }

    /// Returns up to `most` map rows that cannot be read, except those of a later release.
    pub async fn unreadable_rows(&self, most: usize) -> Result<Vec<Row>, ChunkError> {
        let mut pages = Pages::new(self.kv, all_maps());
        let mut found = Vec::new();
        loop {
            let rows = pages.next().await?;
            if rows.is_empty() {
                return Ok(found);
            }
            let bad = |(key, value): &Row| match read_row(key, value) {
                Ok(_) | Err(DecodeError::Unknown { .. }) => false,
                Err(_) => true,
            };
            found.extend(rows.into_iter().filter(bad));
            if found.len() >= most {
                found.truncate(most);
                return Ok(found);
            }
        }
    }

    /// Returns up to `most` runs of written blocks that are marked as used and belong to no file, each of at
    /// most one chunk. Returns none if rows of a later release exist, because these may own the blocks.
    pub async fn unowned_runs(&self, most: usize) -> Result<Vec<(u64, u64)>, ChunkError> {
        let survey = self.survey().await?;
        if survey.opaque {
            return Ok(Vec::new());
        }
        let step = u64::from(self.chunk_blocks);
        let cut = |(start, count): Run| {
            (0..count.div_ceil(step)).map(move |at| (start + at * step, step.min(count - at * step)))
        };
        let unowned = survey.only_in(&survey.marked, &survey.owned);
        let (per_stripe, mut runs) = (self.volumes.stripe_blocks(), Vec::new());
        for (start, count) in unowned.into_iter().flat_map(cut) {
            if runs.len() == most {
                break;
            }
            // Stripes that were never written contain nothing.
            let stripes = start / per_stripe..(start + count).div_ceil(per_stripe);
            if !self.volumes.written_in(stripes, 1).await?.is_empty() {
                runs.push((start, count));
            }
        }
        Ok(runs)
    }

    /// Returns map rows that make each run a chunk of `ino`, in order.
    pub fn rows_of_runs(&self, ino: Ino, runs: &[(u64, u64)]) -> Vec<Row> {
        let row = |(index, (block, count)): (u64, &Run)| {
            let (count, birth) = (to_u32(*count), Birth::FIRST);
            let extents = vec![Extent { first: 0, count, block: *block, preallocated: false, birth }];
            let row = MapRow { truncations: 0, extents }.encode(birth);
            (ChunkKey { file: FileId::main(ino), index }.row(birth), row)
        };
        (0..).zip(runs).map(row).collect()
    }

    /// Returns up to `most` map rows of an inode, from chunk `index` on.
    pub async fn rows_of(&self, ino: Ino, index: u64, most: usize) -> Result<Vec<Row>, ChunkError> {
        let (from, until) = map_range(FileId::main(ino), index);
        Ok(self.kv.scan(from, until, most).await?)
    }

    async fn write_groups(&self, groups: &BTreeSet<u64>, survey: &Survey) -> Result<(), ChunkError> {
        let mut left = groups.iter().peekable();
        while left.peek().is_some() {
            let mut writes = WriteSet::new();
            for group in left.by_ref().take(ROWS_AT_ONCE) {
                let bits = survey.marked.group(*group);
                match survey.check.loans.borrowed.get(group) {
                    Some(Some(borrowed)) => writes.put(Borrowed::key(*group), borrowed.encode(bits)),
                    // Another repair makes its row.
                    _ if *group >= survey.groups.own() => continue,
                    _ => writes.put(group_key(*group), encode_group(bits)),
                };
            }
            self.commit_repair(&mut writes).await?;
        }
        // Last: a group that is not as it was counted is suspect.
        self.count_groups(survey).await
    }

    /// Limits extents to their chunk and to the volume, and drops empty ones.
    pub async fn trim_extents(&self) -> Result<(), ChunkError> {
        let survey = self.survey().await?;
        let mut pages = Pages::new(self.kv, all_maps());
        loop {
            let rows = pages.next().await?;
            if rows.is_empty() {
                return Ok(());
            }
            let mut writes = WriteSet::new();
            for (key, value) in rows {
                let Ok((_, MapRow { truncations, extents })) = read_row(&key, &value) else { continue };
                let kept: Vec<Extent> =
                    extents.iter().map(|extent| survey.valid(extent)).filter(|part| part.count > 0).collect();
                match kept == extents {
                    true => {}
                    false if kept.is_empty() => drop(writes.delete(key)),
                    false => {
                        let row = MapRow { truncations, extents: kept };
                        writes.put(key, row.encode(Birth::FIRST));
                    }
                }
            }
            commit_apart(self.kv, std::mem::take(writes.reclaims())).await?;
        }
    }

    /// Gives every owner of a block except the first its own copy. Returns the chunks that could not get one.
    pub async fn copy_doubles(&self) -> Result<Vec<ChunkKey>, ChunkError> {
        let mut claimed = self.survey().await?.lent;
        let mut failed = Vec::new();
        let mut pages = Pages::new(self.kv, all_maps());
        loop {
            let rows = pages.next().await?;
            if rows.is_empty() {
                return Ok(failed);
            }
            for (key, value) in rows {
                let Ok((chunk, MapRow { truncations, extents })) = read_row(&key, &value) else { continue };
                let mut fresh = Vec::new();
                let mut map = Vec::new();
                for extent in &extents {
                    for at in 0..extent.count {
                        let (first, block) = (extent.first + at, extent.block + u64::from(at));
                        let one = Extent { first, count: 1, block, ..*extent };
                        if claimed.get(block) {
                            fresh.push(one);
                        } else {
                            claimed.set(block, true);
                            map.push(one);
                        }
                    }
                }
                if fresh.is_empty() {
                    continue;
                }
                match self.copy_blocks(chunk.file, &fresh).await {
                    Ok(copies) => {
                        let row = MapRow { truncations, extents: map };
                        self.commit_copies(key, row, copies).await?;
                    }
                    Err(error) => {
                        tracing::warn!(?chunk, %error, "blocks with two owners could not be copied");
                        failed.push(chunk);
                    }
                }
            }
        }
    }

    async fn commit_copies(
        &self,
        key: Vec<u8>,
        mut row: MapRow,
        copies: Vec<Extent>,
    ) -> Result<(), ChunkError> {
        let runs: Vec<Run> = copies.iter().map(|copy| (copy.block, 1)).collect();
        row.extents.extend(copies);
        row.extents.sort_by_key(|extent| extent.first);
        row.extents = joined(row.extents);
        let mut writes = WriteSet::new();
        writes.put(key, row.encode(Birth::FIRST));
        let mut space = self.allocator.space_mut().commit(runs.clone(), &[]);
        for (key, row) in std::mem::take(&mut space.rows) {
            writes.put(key, row);
        }
        let committed = self.commit_repair(&mut writes).await;
        match &committed {
            Ok(()) => _ = self.allocator.space_mut().end_commit(space),
            Err(_) => {
                self.allocator.space_mut().undo_commit(space);
                self.allocator.give_back_uncommitted(runs);
            }
        }
        committed
    }

    /// Copies single blocks to free ones, durably. A preallocated block gets a new block without a copy. One
    /// that cannot be read gets none: it stays with its first owner.
    async fn copy_blocks(&self, file: FileId, blocks: &[Extent]) -> Result<Vec<Extent>, ChunkError> {
        let mut copies: Vec<Extent> = Vec::new();
        let result = async {
            for from in blocks {
                let data = match from.preallocated {
                    true => None,
                    false => match self.volumes.read(from.block, 1, IO).await {
                        Err(error) if error.kind() == ErrorKind::Corrupt => {
                            tracing::warn!(block = from.block, %error, "a block with two owners cannot be read, and stays with the first one");
                            continue;
                        }
                        read => Some(read?),
                    },
                };
                let (block, _) = self.allocator.allocate_reserved(1, Source::Any).await?;
                copies.push(Extent { block, ..*from });
                if let Some(data) = data {
                    self.volumes.write(file, block, &data.gather(), &data.crcs).await?;
                }
            }
            self.volumes.flush_all().await
        };
        let result = result.await;
        if result.is_err() {
            self.allocator.give_back_uncommitted(copies.iter().map(|copy| (copy.block, 1)).collect());
        }
        assert!(copies.len() <= blocks.len(), "a block has one copy");
        result.map(|()| copies)
    }

    /// Makes the rows of files agree with their maps and with the metadata target, which names truncate
    /// generation and owner of each file, and counts accounts again. Rows of `opaque` inodes, which the
    /// metadata target cannot read, stay as they are but for their blocks. Does nothing if rows of a later
    /// release exist.
    ///
    /// Not one transaction: a repair that is interrupted leaves accounts that differ from the rows of files,
    /// and the next one counts again.
    pub async fn count_files(
        &self,
        files: &BTreeMap<Ino, Known>,
        opaque: &BTreeSet<Ino>,
    ) -> Result<(), ChunkError> {
        let counted = self.count_rows(files, opaque).await;
        self.forget_chunks();
        self.commits.accounts.set(Accounts::load(self.kv).await?.0);
        counted
    }

    async fn count_rows(
        &self,
        files: &BTreeMap<Ino, Known>,
        opaque: &BTreeSet<Ino>,
    ) -> Result<(), ChunkError> {
        let survey = self.survey().await?;
        if survey.opaque {
            return Ok(());
        }
        let owners = &survey.check.owners;
        let nothing = Owned::default();
        // A file that was truncated has a row, whatever else is left of it.
        let emptied = files.keys().filter(|ino| !owners.contains_key(ino)).map(|ino| (ino, &nothing));
        let row_of = |(ino, owned): (&Ino, &Owned)| {
            // Without an inode, which a check reports, it keeps its owner.
            let of_row = owned.file.map(|FileRow { truncations, owner, .. }| Known { truncations, owner });
            let Known { truncations, owner } = files.get(ino).copied().or(of_row).unwrap_or_default();
            let owner_number = owned.file.map_or(0, |row| row.owner_number);
            let truncations = truncations.max(owned.truncations);
            let row = FileRow { truncations, blocks: owned.held, owner, owner_number };
            // The file of a missing inode without blocks is gone.
            let exists = files.contains_key(ino) || opaque.contains(ino);
            (row.blocks > 0 || row.truncations > 0 && exists).then_some((*ino, row))
        };
        let right: BTreeMap<Ino, FileRow> = owners.iter().chain(emptied).filter_map(row_of).collect();
        let of_file =
            |(ino, row): (&Ino, &FileRow)| (FileRow::key(FileId::main(*ino), Birth::FIRST), row.encode());
        let accounts = accounts_of(right.values().copied());
        let of_owner =
            |(owner, blocks): (&Owner, &u64)| (owner.account(Branch::MAIN), encode_account(*blocks));
        let rows = right.iter().map(of_file).chain(accounts.iter().map(of_owner)).collect();
        self.make_rows(&[all_files(), all_accounts()], rows).await
    }

    /// Marks blocks that nothing owns as free, and adds the stripes that are empty then to those to discard.
    /// Does nothing if rows of a later release exist.
    pub async fn clear_unowned(&self) -> Result<(), ChunkError> {
        let mut survey = self.survey().await?;
        if survey.opaque {
            return Ok(());
        }
        let unowned = survey.only_in(&survey.marked, &survey.owned);
        let blocks = unowned.iter().flat_map(|(start, count)| *start..start + count);
        blocks.for_each(|block| survey.marked.set(block, false));
        let groups: BTreeSet<u64> = survey.groups.of_runs(&unowned).collect();
        self.write_groups(&groups, &survey).await?;
        // The blocks may be allocated only once the rows are durable.
        self.kv.flush().await?;
        self.load_bits(&survey).await;
        self.allocator.sweep_again().await
    }
}

#[cfg(test)]
mod tests;
