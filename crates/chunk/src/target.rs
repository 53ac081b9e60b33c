//! The target: its parts put together, writes into memory, and reads.
//!
//! The order of locks is in `ranks.rs`.

use crate::accounts::Accounts;
use crate::allocator::Allocator;
use crate::cache::{ChunkCache, NewBlocks, WantedRow};
use crate::commit::Commits;
use crate::counters::TargetCounts;
use crate::fetch::fetch;
use crate::files::Knows;
use crate::free::{Space, SpaceUsage};
use crate::fsck::{DamagedRuns, Fsck, find_damaged, lost_with};
use crate::lending::{Lending, load_loans};
use crate::rows::{
    ChunkKey, FileRow, GROUP_WORDS, GROUPS_IN_A_ROW, Owner, all_counts, all_groups, decode_counts,
    decode_counts_key, decode_group, decode_group_key, group_key, is_copy,
};
use crate::volumes::Volumes;
use crate::writeback::Writeback;
use crate::{ChunkError, DIRTY_BYTES};
use penstock_array::{Blocks, Volume};
use penstock_base::num::{to_u32, to_usize};
use penstock_base::rank::scoped;
use penstock_base::{
    BLOCK_BYTES, Birth, Branch, Buf, DecodeError, Env, FileId, Gate, Ino, IoContext, MAX_FILE_BYTES, Quiet,
    TargetId,
};
use penstock_drive::{Class, Io};
use penstock_kv::{Kv, WriteSet, for_each};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

const IO: Io = Io::new(Class::Client, "chunk.read");

/// Memory that a target may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetMemory {
    /// Dirty blocks in bytes. Above this, a write first writes back the oldest chunks.
    pub dirty_bytes: u64,
    /// Chunks above which clean ones are evicted.
    pub chunks: usize,
    /// Allocation groups whose bits are in memory, above which those leave that are not needed.
    pub groups: usize,
}

impl Default for TargetMemory {
    fn default() -> Self {
        Self { dirty_bytes: DIRTY_BYTES, chunks: crate::cache::MOST, groups: crate::free::MOST_GROUPS }
    }
}

impl TargetMemory {
    /// All of it in bytes, about.
    pub fn bytes(&self) -> u64 {
        // A chunk with few extents, and a group with the bits that are committed and those that are used.
        let [chunk, group] = [512, 2 * 8 * GROUP_WORDS as u64];
        self.dirty_bytes + self.chunks as u64 * chunk + self.groups as u64 * group
    }
}

/// Settings of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetConfig {
    /// The number of the target.
    pub id: TargetId,
    /// Blocks in a chunk: a multiple of the stripe size.
    pub chunk_blocks: u32,
    /// Changes with every start. A client that sees another value marks its uncommitted writes as lost.
    pub generation: u64,
    /// The memory that it may use.
    pub memory: TargetMemory,
}

impl TargetConfig {
    /// Chunks of 1 MiB, rounded down to full stripes; at least one stripe. Memory that suits most machines.
    pub fn for_volume(volume: &Volume, id: TargetId, generation: u64) -> Self {
        let stripe = volume.stripe_blocks();
        let chunk_blocks = (256 / stripe).max(1) * stripe;
        Self { id, chunk_blocks: to_u32(chunk_blocks), generation, memory: TargetMemory::default() }
    }
}

/// The chunk store on one volume.
pub struct Target {
    pub(crate) volumes: Rc<Volumes>,
    pub(crate) kv: Rc<dyn Kv>,
    pub(crate) config: TargetConfig,
    pub(crate) gate: Rc<Gate>,
    pub(crate) cache: Rc<ChunkCache>,
    pub(crate) allocator: Rc<Allocator>,
    pub(crate) commits: Rc<Commits>,
    env: Env,
    pub(crate) lending: Rc<Lending>,
    writeback: Rc<Writeback>,
    written_blocks: Cell<u64>,
    read_blocks: Cell<u64>,
    committed_files: Cell<u64>,
}

impl Target {
    /// Opens the target on `volume` with its rows in `kv`. `gate` is shared with everything else that changes
    /// those rows.
    pub async fn open(
        env: &Env,
        volume: Volume,
        kv: Rc<dyn Kv>,
        gate: Rc<Gate>,
        config: TargetConfig,
    ) -> Result<Rc<Self>, ChunkError> {
        let (chunk_blocks, per_stripe) = (u64::from(config.chunk_blocks), volume.stripe_blocks());
        assert!(
            chunk_blocks > 0 && chunk_blocks.is_multiple_of(per_stripe),
            "a chunk of {chunk_blocks} blocks is full stripes of {per_stripe}"
        );
        let mut space = load_space(&volume, &*kv).await?;
        space.keep_groups(config.memory.groups);
        let knows_all_loans = load_loans(&*kv, &mut space).await?;
        let (accounts, has_all_accounts) = Accounts::load(&*kv).await?;
        let owned = accounts.values().fold(0u64, |all, blocks| all.saturating_add(*blocks));
        // A suspect group counts as full, and would hide what others lack.
        let (used, may_hide) = (space.used_blocks(), space.suspects() > 0);
        let volumes = Volumes::new(volume);
        let cache = ChunkCache::new(&kv, config.chunk_blocks, volumes.shared_groups(), config.memory.chunks);
        let allocator = Allocator::new(env, &volumes, &kv, space, config.chunk_blocks);
        let writeback = Writeback::new(&volumes, &cache, &allocator, config.chunk_blocks);
        let commits = Commits::new(env, &volumes, &kv, &gate, &cache, &allocator, &writeback);
        commits.accounts.set(accounts);
        let lending = Lending::load(config.id, &commits, knows_all_loans).await?;
        let (_, lent) = lending.blocks();
        if used < owned + lent || may_hide || !has_all_accounts || lending.has_dropped() {
            tracing::error!(used, owned, lent, "blocks of files may be marked as free: all are looked up");
            allocator.must_compare();
        }
        env.spawn("target commit", Box::pin(scoped(commits.clone().run())));
        env.spawn("target discard", Box::pin(scoped(allocator.clone().run())));
        env.spawn("target sweep", Box::pin(scoped(allocator.clone().run_sweep())));
        Ok(Rc::new(Self {
            volumes,
            lending,
            kv,
            config,
            gate,
            cache,
            allocator,
            commits,
            env: env.clone(),
            writeback,
            written_blocks: Cell::new(0),
            read_blocks: Cell::new(0),
            committed_files: Cell::new(0),
        }))
    }

    /// Gets to know the other targets of the pool that serve: those that may lend to this one. Blocks of
    /// loans of others cannot be used, nor of loans that the lender does not have.
    pub fn meet(&self, others: &[Rc<Self>]) {
        let others: Vec<Rc<Lending>> = others.iter().map(|other| other.lending.clone()).collect();
        self.lending.meet(&others);
    }

    /// Another target does not serve any more.
    pub fn part(&self, other: TargetId) {
        self.lending.part(other);
    }

    /// Has other targets end the loans that this one does not have: a crash has kept it from using them, or
    /// them from taking them back.
    pub async fn end_unknown_loans(&self) -> Result<(), ChunkError> {
        self.lending.end_unknown_loans().await
    }

    /// Blocks that this target has on loan, and blocks that others have from it.
    pub fn loans(&self) -> (u64, u64) {
        self.lending.blocks()
    }

    /// The settings that the target was opened with.
    pub fn config(&self) -> TargetConfig {
        self.config
    }

    /// Total, free and headroom blocks. Blocks in a running discard count as free.
    pub fn usage(&self) -> SpaceUsage {
        self.allocator.usage()
    }

    /// The counters since the target was opened.
    pub fn counts(&self) -> TargetCounts {
        TargetCounts {
            written_blocks: self.written_blocks.get(),
            read_blocks: self.read_blocks.get(),
            commits: self.committed_files.get(),
            discarded_stripes: self.allocator.discarded_stripes(),
            group_reads: self.allocator.group_reads(),
            ..self.writeback.counts()
        }
    }

    /// Waits until all written stripes without an owner are found that were there at the start.
    pub async fn sweep(&self) -> Result<(), ChunkError> {
        self.allocator.sweep().await
    }

    /// True once all written stripes without an owner are found that were there at the start.
    pub fn is_swept(&self) -> bool {
        self.allocator.is_swept()
    }

    /// False while all blocks of files are looked up, because some may be marked as free. Nothing is
    /// allocated before.
    pub fn is_compared(&self) -> bool {
        self.allocator.is_compared()
    }

    /// The allocation groups in which nothing is allocated until a repair, because some of their bits may be
    /// lost.
    pub fn suspect_groups(&self) -> u64 {
        self.allocator.space().suspects()
    }

    /// The target's own volume.
    pub fn volume(&self) -> &Volume {
        self.volumes.own()
    }

    fn check_blocks(&self, key: ChunkKey, first: u32, count: usize) -> Result<(), ChunkError> {
        let (end, chunk_blocks) = (u64::from(first) + count as u64, u64::from(self.config.chunk_blocks));
        let end_in_file = key.index.saturating_mul(chunk_blocks).saturating_add(end);
        let is_in_a_file = end_in_file <= MAX_FILE_BYTES / BLOCK_BYTES as u64;
        match end <= chunk_blocks && count > 0 && is_in_a_file {
            true => Ok(()),
            false => {
                Err(ChunkError::Invalid(format!("blocks {first}+{count} are not in chunk {}", key.index)))
            }
        }
    }

    /// Writes complete blocks of a chunk. They are in memory when this returns, and durable after a commit.
    ///
    /// A chunk that becomes full is written back in the background; this call does not wait for that. While
    /// more than [`TargetMemory::dirty_bytes`] are dirty, it first writes back the oldest chunks. The
    /// write-back is charged to the tenant that wrote to the chunk last; appends to the log are the system's,
    /// since they have the writes of many.
    pub async fn write(
        &self,
        key: ChunkKey,
        first: u32,
        data: &Buf,
        crcs: &[u32],
        known: impl Knows,
        io: IoContext,
    ) -> Result<(), ChunkError> {
        self.check_blocks(key, first, crcs.len())?;
        if data.len() != crcs.len() * BLOCK_BYTES {
            return Err(ChunkError::Invalid(format!("{} checksums for {} bytes", crcs.len(), data.len())));
        }
        let new = NewBlocks { first, data, crcs, tenant: io.tenant };
        let is_full = match is_copy(key.file.ino) {
            // It must be on the target's own volume.
            true => {
                let wanted_blocks = crcs.len() as u64;
                let act = async || {
                    let free_blocks = self.allocator.space().free_of_volume();
                    if free_blocks < wanted_blocks {
                        return Err(ChunkError::NoSpace { free_blocks, wanted_blocks });
                    }
                    self.try_write(key, &new, &known).await
                };
                self.lending.with_own_space(act).await?
            }
            false => self.lending.with_space(async || self.try_write(key, &new, &known).await).await?,
        };
        if is_full {
            self.env.spawn("target place", Box::pin(scoped(self.writeback.clone().write_in_turn(key))));
        }
        self.written_blocks.set(self.written_blocks.get() + crcs.len() as u64);
        while self.cache.dirty_blocks() * BLOCK_BYTES as u64 > self.config.memory.dirty_bytes {
            let Some(oldest) = self.cache.oldest_dirty() else { break };
            self.writeback.write_chunk(oldest).await?;
        }
        Ok(())
    }

    /// Returns true if the chunk is full of dirty blocks now.
    async fn try_write(
        &self,
        key: ChunkKey,
        new: &NewBlocks<'_>,
        known: &dyn Knows,
    ) -> Result<bool, ChunkError> {
        let _lock = self.cache.exclusive(key).await;
        let chunk = self.cache.get(key).await?;
        chunk.borrow().file().begin(known)?;
        let blocks = new.first..new.first + to_u32(new.crcs.len());
        // Those in stripes that cannot be read will get other ones.
        let is_lost =
            |block: u64| self.volumes.knows_unreadable(block / self.volumes.stripe_blocks()) == Some(true);
        let mut without_space = chunk.borrow().without_space(blocks.clone());
        if self.volumes.lacks_too_much() {
            without_space.extend(chunk.borrow().with_lost_space(blocks, is_lost));
            without_space.sort_by_key(|range| range.start);
        }
        self.allocator.reserve(without_space.iter().map(|range| range.len() as u64).sum())?;
        Ok(self.cache.write(key, &chunk, new, &without_space))
    }

    /// Reads blocks of a chunk. Blocks that were never written read as zeros.
    pub async fn read(
        &self,
        key: ChunkKey,
        first: u32,
        count: u32,
        io: IoContext,
    ) -> Result<Blocks, ChunkError> {
        self.check_blocks(key, first, count as usize)?;
        let _lock = self.cache.shared(key).await;
        let chunk = self.cache.get(key).await?;
        self.read_blocks.set(self.read_blocks.get() + u64::from(count));
        fetch(&self.volumes, &chunk, first, count, IO.within(io)).await
    }

    /// Makes everything written to a file durable. With `deferred`, the rows are only committed, and the
    /// caller makes the shared key-value store durable next.
    pub async fn commit(&self, file: FileId, deferred: bool) -> Result<(), ChunkError> {
        let commit = async || self.commits.commit(file, deferred).await;
        match is_copy(file.ino) {
            // It has only the target's own volume, whatever others lend.
            true => self.lending.with_own_space(commit).await?,
            false => self.lending.with_space(commit).await?,
        }
        self.committed_files.set(self.committed_files.get() + 1);
        Ok(())
    }

    /// Makes everything durable. If a file fails, the others are still committed before the error is
    /// returned.
    pub async fn commit_all(&self) -> Result<(), ChunkError> {
        self.commits.commit_all().await
    }

    /// Makes committed rows durable, and the blocks that they freed available again.
    pub async fn sync(&self) -> Result<(), ChunkError> {
        self.commits.sync().await
    }

    /// An inode is new: no inode had its number before, and it has no chunk.
    pub fn file_made(&self, file: FileId) {
        self.cache.file_made(file);
    }

    /// A file was removed, or stays although its removal had begun: forgets its truncate generation and its
    /// empty chunks.
    pub fn file_removed(&self, file: FileId) {
        self.cache.file_removed(file);
    }

    /// Blocks that each file holds, committed or not, with those that its dirty blocks will get. A file whose
    /// row cannot be read has none here; a check reports it.
    pub async fn held_blocks(&self, files: &[FileId]) -> Result<Vec<u64>, ChunkError> {
        let mut held: Vec<Option<u64>> = files.iter().map(|file| self.cache.held(*file)).collect();
        let unknown: Vec<usize> = (0..files.len()).filter(|at| held[*at].is_none()).collect();
        let keys = unknown.iter().map(|at| FileRow::key(files[*at], Birth::FIRST)).collect();
        for (at, row) in unknown.into_iter().zip(self.kv.get_many(keys).await?) {
            held[at] = read_file_row(files[at], row).ok().flatten().map(|row| row.blocks);
        }
        assert_eq!(held.len(), files.len(), "a number for each file");
        Ok(held.into_iter().map(|blocks| blocks.unwrap_or(0)).collect())
    }

    /// Blocks that a file holds as for [`Target::held_blocks`], or the row to be read for that.
    pub fn held_or_row(&self, file: FileId) -> Result<u64, WantedRow> {
        self.cache.held_or_row(file)
    }

    /// The blocks of a file whose row was read. A file whose row cannot be read has none here, and stays out
    /// of memory: whoever uses its contents is refused.
    pub fn held_by_row(&self, wanted: &WantedRow, row: Option<Vec<u8>>) -> u64 {
        match read_file_row(wanted.file(), row) {
            Ok(row) => self.cache.take_row(wanted, row),
            Err(_) => self.cache.held(wanted.file()).unwrap_or(0),
        }
    }

    /// Counts a file to another owner, in one transaction with `writes`.
    pub async fn set_owner(&self, file: FileId, owner: Owner, writes: WriteSet) -> Result<(), ChunkError> {
        let _changing = self.gate.change().await;
        let _lock = self.commits.lock(file).await;
        let state = self.cache.file(file).await?;
        // From here on a first write counts to the new owner too.
        let before = state.set_owner(owner);
        let result = self.commits.commit_rows(file, &state, Vec::new(), writes).await;
        if result.is_err() {
            state.undo_owner(before);
        }
        result
    }

    /// Committed blocks of all files, by branch and owner.
    pub fn accounts(&self) -> BTreeMap<(Branch, Owner), u64> {
        self.commits.accounts.all()
    }

    /// Returns the blocks of files that cannot be read. Only stripes that a read or a scrub found unreadable
    /// are considered, and each block in them is read again; and those of loans whose lender is away.
    pub async fn damaged(&self) -> Result<DamagedRuns, ChunkError> {
        find_damaged(&self.volumes, &*self.kv, self.config.chunk_blocks).await
    }

    /// Returns the number of blocks of each file that are on loan from a target that is away.
    pub async fn lost_with(&self, lender: TargetId) -> Result<BTreeMap<Ino, u64>, ChunkError> {
        lost_with(&self.volumes, &*self.kv, self.config.chunk_blocks, lender).await
    }

    /// Checks and repairs, for a caller that lets nothing else change rows.
    ///
    /// # Panics
    /// If `quiet` is of another gate.
    pub fn fsck<'a>(&'a self, quiet: &'a Quiet<'_>) -> Fsck<'a> {
        assert!(quiet.is_of(&self.gate), "the gate of this target is quiet");
        Fsck {
            volumes: &self.volumes,
            kv: &*self.kv,
            cache: &self.cache,
            allocator: &self.allocator,
            commits: &self.commits,
            lending: &self.lending,
            chunk_blocks: self.config.chunk_blocks,
        }
    }

    /// Writes a chunk back without a commit.
    #[cfg(test)]
    pub(crate) async fn write_back(&self, key: ChunkKey) {
        self.writeback.write_chunk(key).await.unwrap();
    }

    /// Makes the target's background tasks end.
    pub fn stop(&self) {
        self.commits.stop();
        self.allocator.stop();
    }
}

/// Decodes the row of a file, if it has one. An error is reported.
fn read_file_row(file: FileId, row: Option<Vec<u8>>) -> Result<Option<FileRow>, DecodeError> {
    row.map(|value| FileRow::decode(&value)).transpose().inspect_err(|error| {
        tracing::error!(?file, %error, "the row of a file cannot be read: `penstock fs check`");
    })
}

/// The space as its rows count it.
async fn load_space(volume: &Volume, kv: &dyn Kv) -> Result<Space, ChunkError> {
    let mut space = Space::new(volume.blocks(), volume.stripe_blocks());
    let (groups, mut bad) = (space.groups(), Vec::new());
    let mut uncounted: BTreeMap<u64, Range<u64>> =
        (0..).map_while(|row| Some((row, groups.counted_in(row)?))).collect();
    for_each(kv, all_counts(), |key, value| {
        let range = decode_counts_key(key).and_then(|row| uncounted.remove(&row));
        // A row outside the volume's groups says nothing; a check reports it.
        let Some(range) = range else { return Ok(()) };
        let Ok(counts) = decode_counts(value, to_usize(range.end - range.start)) else {
            bad.push(range);
            return Ok(());
        };
        for (group, counts) in range.zip(counts) {
            match space.is_possible(group, counts) {
                true => space.set_counts(group, counts),
                false => space.suspect(group),
            }
        }
        Ok::<_, ChunkError>(())
    })
    .await?;
    // The first group with a row, of those that come next.
    let mut next = 0;
    for range in uncounted.into_values() {
        if next < range.start {
            let found = kv.keys(group_key(range.start), all_groups().1, 1).await?;
            // A key that is none may stand before others.
            next = found.first().map_or(u64::MAX, |key| decode_group_key(key).unwrap_or(range.start));
        }
        // Groups that never had a used block have no row. Earlier repairs left some that have one without a
        // bit.
        if next >= range.end {
            continue;
        }
        let rows = kv.scan(group_key(range.start), group_key(range.end), to_usize(GROUPS_IN_A_ROW)).await?;
        let is_free = |row: &[u8]| {
            decode_group(row, GROUP_WORDS).is_ok_and(|words| words.iter().all(|word| *word == 0))
        };
        if !rows.iter().all(|(_, row)| is_free(row)) {
            bad.push(range);
        }
    }
    for range in bad {
        tracing::error!(
            ?range,
            "counts of allocation groups cannot be read or are missing: nothing is allocated in these until `penstock fs check --repair`"
        );
        // It may have said that some are suspect.
        range.for_each(|group| space.suspect(group));
    }
    Ok(space)
}

#[cfg(test)]
mod tests;
