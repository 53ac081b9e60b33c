//! The restore of a key-value store from a copy, into an empty one.
//!
//! Rows come back as they were copied, but for maps: blocks may have been freed and written by others since.
//! A map keeps the blocks with contents that are older than the copy's version, which no other file can have
//! got since. All blocks with newer contents become one file without an inode, so that a repair gives it a
//! name in `/lost+found`. The result tells the files that lack blocks. Versions are those of strips, so one
//! write makes the whole strip newer, with blocks of other files: [`Newer::Stay`] leaves those with their
//! files.
//!
//! All groups count as suspect afterwards, so that nothing is allocated before a repair has marked the blocks
//! of files.
//!
//! Invariant: the rows by which a start knows the store are written last, after all others are durable. Until
//! then nothing is written on the volume, and the restore can be made again.

use super::format::{Anchor, Pieces, SegmentHead, blocks_in, decode_index, take_rows};
use super::{IO, NONE_MADE, file_of, read_anchor, void_anchor};
use crate::ChunkError;
use crate::free::{Groups, Run, runs_of};
use crate::rows::{
    Borrowed, ChunkKey, Counter, Counts, Extent, FileRow, Lent, LentKey, MapRow, Owner, counts_key,
    encode_counts, file_of_key, read_row,
};
use penstock_array::{ArrayError, BlockChanges, Volume};
use penstock_base::num::{to_u32, to_usize};
use penstock_base::{Birth, DecodeError, ErrorKind, FileId, Ino, LocalBoxFuture, Version};
use penstock_kv::{Kv, KvError, KvRead, ROWS_AT_ONCE, Row, Usage, WriteSet};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// Bytes of rows after which a transaction is committed.
const BATCH_BYTES: usize = 64 << 10;
/// Stripes that are listed at a time.
const STRIPES: usize = 4096;
/// Files that are listed by number.
const LISTED: usize = 10_000;
/// Numbers of loans that may have been given since the copy.
const LOANS_SINCE: u64 = 1 << 32;
/// The last number of a loan from which it can go on.
const MOST_LOANS: u64 = 1 << 62;

/// The name space's part of a restore.
pub trait Names {
    /// The value of a row that is none of the target's; none if it is left out, or written last.
    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<Option<Vec<u8>>, DecodeError>;

    /// The number that the file of all newer blocks gets. All rows were seen.
    fn number(&self) -> Result<Ino, DecodeError>;

    /// In a store of several targets, the number of a loan up to which others may have been given by the time
    /// of the restore, whatever the copy says: an earlier restore may have gone on from the same copy.
    fn loans(&self) -> Option<u64>;

    /// The rows that are written last.
    fn last(&self) -> Result<WriteSet, DecodeError>;
}

/// The treatment of blocks of files that may have been written since the copy, perhaps by others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Newer {
    /// They are taken from their files, which read as zeros there.
    #[default]
    AreCollected,
    /// They stay in the files, which may show newer contents, also those of others.
    Stay,
}

/// The way of a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct How {
    /// The treatment of blocks that may be newer.
    pub newer: Newer,
    /// Also while pages of the stripe table cannot be read: blocks in their stripes count as written since,
    /// and what is newer there is given up. Otherwise the restore fails: they may be readable in a moment.
    pub may_lack: bool,
}

/// Files with blocks that may have been written since the copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangedFiles {
    /// Number of files.
    pub files: u64,
    /// These blocks.
    pub blocks: u64,
    /// The first of them, with the number of these blocks of each.
    pub listed: BTreeMap<Ino, u64>,
}

impl ChangedFiles {
    /// Adds a file; all blocks of one come behind each other.
    fn add(&mut self, ino: Ino, blocks: u64, last: &mut Option<Ino>) {
        self.files += u64::from(*last != Some(ino));
        *last = Some(ino);
        self.blocks += blocks;
        if self.listed.len() < LISTED || self.listed.contains_key(&ino) {
            *self.listed.entry(ino).or_default() += blocks;
        }
    }
}

/// The outcome of a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restored {
    /// The copy.
    pub copy: Anchor,
    /// Rows that were written.
    pub rows: u64,
    /// The treatment of what may be newer.
    pub how: Newer,
    /// Files with blocks that may be newer.
    pub changed: ChangedFiles,
    /// Blocks that may be newer and are in no file of the copy.
    pub newer_blocks: u64,
    /// The file that has them, if there are any.
    pub newer: Option<Ino>,
}

/// A copy of which every segment was read and verified.
pub struct Found {
    anchors: Volume,
    /// The number of its anchor.
    slot: usize,
    anchor: Anchor,
    pieces: Pieces,
    /// Blocks of the other copy, as far as they are known.
    others: Vec<Run>,
    /// Why other copies cannot be used.
    passed_over: Vec<String>,
}

impl Found {
    /// The anchor of the copy.
    pub fn anchor(&self) -> &Anchor {
        &self.anchor
    }

    /// Other copies that cannot be used, and why.
    pub fn passed_over(&self) -> &[String] {
        &self.passed_over
    }

    /// The blocks of all segments, in order.
    fn all_pieces(&self) -> impl Iterator<Item = &Vec<Run>> {
        self.pieces.iter().chain(&self.anchor.index)
    }
}

/// Reads a segment.
async fn read_segment(
    volume: &Volume,
    anchor: &Anchor,
    runs: &[Run],
    wanted: SegmentHead,
) -> Result<Vec<u8>, ChunkError> {
    let bad = |why| DecodeError::Bad { what: "segment of a copy of the map", why };
    if blocks_in(runs) > u64::from(anchor.chunk_blocks) {
        return Err(bad("longer than a chunk").into());
    }
    let mut bytes = Vec::new();
    for (block, count) in runs {
        bytes.extend_from_slice(&volume.read(*block, *count, IO).await?.gather());
    }
    let (head, contents) = SegmentHead::open(&bytes)?;
    match head == wanted {
        true => Ok(contents.to_vec()),
        false => Err(bad("of another copy, or in another place").into()),
    }
}

async fn read_index(volume: &Volume, anchor: &Anchor) -> Result<Pieces, ChunkError> {
    let mut pieces = Pieces::new();
    for (number, runs) in (anchor.segments..).zip(&anchor.index) {
        let head = SegmentHead { id: anchor.id, number, is_index: true };
        pieces.extend(decode_index(&read_segment(volume, anchor, runs, head).await?)?);
    }
    match pieces.len() == anchor.segments as usize {
        true => Ok(pieces),
        false => {
            let why = "not as many segments as the anchor says";
            Err(DecodeError::Bad { what: "index of a copy of the map", why }.into())
        }
    }
}

async fn read_rows(
    volume: &Volume,
    anchor: &Anchor,
    pieces: &Pieces,
    number: u32,
) -> Result<Vec<u8>, ChunkError> {
    let head = SegmentHead { id: anchor.id, number, is_index: false };
    read_segment(volume, anchor, &pieces[number as usize], head).await
}

/// Reads all of a copy. Returns the blocks of its segments with rows.
async fn verify(volume: &Volume, anchor: &Anchor) -> Result<Pieces, ChunkError> {
    let (pieces, mut rows) = (read_index(volume, anchor).await?, 0);
    for number in 0..anchor.segments {
        let contents = read_rows(volume, anchor, &pieces, number).await?;
        rows += take_rows(&contents)?.len() as u64;
    }
    match rows == anchor.rows {
        true => Ok(pieces),
        false => {
            let why = "not as many rows as its anchor says";
            Err(DecodeError::Bad { what: "copy of the map", why }.into())
        }
    }
}

/// True if a later release wrote it.
pub(super) fn is_later(error: &ChunkError) -> bool {
    matches!(error, ChunkError::Row(DecodeError::Unknown { .. }))
}

/// True if all of a copy can be read. Fails if that cannot be said now.
pub(super) async fn is_whole(volume: &Volume, anchor: &Anchor) -> Result<bool, ChunkError> {
    match verify(volume, anchor).await {
        Ok(_) => Ok(true),
        Err(error) if is_later(&error) => Err(error),
        Err(error) if error.kind() == ErrorKind::Corrupt => {
            tracing::warn!(serial = anchor.serial, %error, "a copy of the map is damaged");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// The newest copy on a volume of which all can be read. Without one, the error says why. Fails for a copy of
/// a later release.
pub async fn find(volume: &Volume, anchors: &Volume) -> Result<Found, ChunkError> {
    let (mut found, mut others, mut why): (Option<Found>, Vec<Run>, _) = (None, Vec::new(), Vec::new());
    for slot in 0..2 {
        let mut serial = u64::MAX;
        let read = async {
            let anchor = read_anchor(anchors, slot).await?;
            serial = anchor.serial;
            let pieces = verify(volume, &anchor).await.map_err(|error| match is_later(&error) {
                true => error,
                false => ChunkError::Invalid(format!("copy {}: {error}", anchor.serial)),
            })?;
            let (anchors, others, passed_over) = (anchors.clone(), Vec::new(), Vec::new());
            Ok::<_, ChunkError>(Found { anchors, slot, anchor, pieces, others, passed_over })
        };
        match read.await {
            Ok(whole) => {
                let (newer, older) = match found.take() {
                    Some(before) if before.anchor.serial > whole.anchor.serial => (before, Some(whole)),
                    before => (whole, before),
                };
                others.extend(older.iter().flat_map(Found::all_pieces).flatten());
                found = Some(newer);
            }
            Err(error) if is_later(&error) => return Err(error),
            Err(error) => why.push((serial, error.to_string())),
        }
    }
    match found {
        Some(found) => {
            // Nothing is wrong where none was made, and an older one is not missed.
            let is_missed = |(serial, why): &(u64, String)| *serial > found.anchor.serial && why != NONE_MADE;
            let passed_over = why.into_iter().filter(is_missed).map(|(_, why)| why).collect();
            Ok(Found { others, passed_over, ..found })
        }
        None => {
            let why = why.into_iter().map(|(_, why)| why).collect::<Vec<_>>().join("; ");
            Err(ChunkError::Invalid(format!("there is no copy of the map that can be used: {why}")))
        }
    }
}

/// Rows on their way.
struct Writer<'a> {
    kv: &'a dyn Kv,
    writes: WriteSet,
    rows: usize,
    bytes: usize,
    all: u64,
}

impl Writer<'_> {
    async fn put(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), ChunkError> {
        self.rows += 1;
        self.all += 1;
        self.bytes += key.len() + value.len();
        self.writes.put(key, value);
        if self.rows >= ROWS_AT_ONCE / 2 || self.bytes >= BATCH_BYTES {
            self.commit().await?;
        }
        Ok(())
    }

    async fn commit(&mut self) -> Result<(), ChunkError> {
        (self.rows, self.bytes) = (0, 0);
        let mut writes = std::mem::take(&mut self.writes);
        // They were there before.
        writes.reclaims();
        Ok(self.kv.commit(writes).await?)
    }
}

/// The ages of blocks.
struct Ages<'a> {
    volume: &'a Volume,
    version: Version,
    how: How,
    /// Blocks of the copies, which are nobody else's.
    copies: Vec<Run>,
    /// The stripe that was asked for last. None of its contents are known if its page is lost.
    last: Option<(u64, Option<BlockChanges>)>,
    /// Newer blocks that stay in their files.
    claimed: Vec<Run>,
}

impl Ages<'_> {
    /// The blocks of a stripe with older contents, and with newer ones. None if nobody can say.
    async fn of_stripe(&mut self, stripe: u64) -> Result<Option<&BlockChanges>, ChunkError> {
        if self.last.as_ref().is_none_or(|(last, _)| *last != stripe) {
            let changes = match self.volume.changes_since(stripe, self.version).await {
                Ok(mut changes) => {
                    let copies = runs_in(&self.copies, stripe, self.volume.stripe_blocks());
                    changes.new = changes.new.iter().flat_map(|run| gaps(&copies, run)).collect();
                    Some(changes)
                }
                Err(ArrayError::Damaged { .. }) if self.how.may_lack => None,
                Err(error) => return Err(error.into()),
            };
            self.last = Some((stripe, changes));
        }
        Ok(self.last.as_ref().expect("it was just put there").1.as_ref())
    }

    /// The parts of an extent that the file keeps, and the number of its blocks that may be newer. It keeps
    /// old ones, and of a preallocated extent also those without contents.
    async fn kept(&mut self, extent: &Extent) -> Result<(Vec<Extent>, u64), ChunkError> {
        let how = self.how;
        let mut claimed = Vec::new();
        let on_volume = self.volume.blocks().saturating_sub(extent.block).min(extent.count.into());
        // Nothing is known of blocks beyond the volume.
        let mut newer = u64::from(extent.count) - on_volume;
        let per_stripe = self.volume.stripe_blocks();
        let end = (extent.block + u64::from(extent.count)).min(self.volume.blocks());
        let (mut kept, mut at) = (Vec::new(), extent.block);
        while at < end {
            let stripe = at / per_stripe;
            let base = stripe * per_stripe;
            let within = to_u32(at - base)..to_u32(end.min(base + per_stripe) - base);
            let Some(changes) = self.of_stripe(stripe).await? else {
                newer += u64::from(within.end - within.start);
                at = base + u64::from(within.end);
                continue;
            };
            let (old, new) = (overlaps(&changes.old, &within), overlaps(&changes.new, &within));
            let len =
                |runs: &[Range<u32>]| runs.iter().map(|run| u64::from(run.end - run.start)).sum::<u64>();
            newer += match extent.preallocated {
                true => len(&new),
                false => u64::from(within.end - within.start) - len(&old),
            };
            // Reserved blocks without contents stay reserved; newer contents of them may be the file's own.
            let same = if extent.preallocated { gaps(&changes.new, &within) } else { old };
            let mut runs: Vec<(Range<u32>, bool)> =
                same.into_iter().map(|run| (run, extent.preallocated)).collect();
            if how.newer == Newer::Stay {
                claimed.extend(
                    new.iter().map(|run| (base + u64::from(run.start), u64::from(run.end - run.start))),
                );
                runs.extend(new.into_iter().map(|run| (run, false)));
                runs.sort_unstable_by_key(|(run, _)| run.start);
            }
            kept.extend(runs.into_iter().map(|(run, preallocated)| Extent {
                first: extent.first + to_u32(base + u64::from(run.start) - extent.block),
                count: run.end - run.start,
                block: base + u64::from(run.start),
                preallocated,
                ..*extent
            }));
            at = base + u64::from(within.end);
        }
        self.claimed.extend(claimed);
        Ok((kept, newer))
    }
}

/// The parts of `within` that are in one of the runs.
fn overlaps(runs: &[Range<u32>], within: &Range<u32>) -> Vec<Range<u32>> {
    let part = |run: &Range<u32>| run.start.max(within.start)..run.end.min(within.end);
    runs.iter().map(part).filter(|part| !part.is_empty()).collect()
}

/// The parts of `within` that are in none of the runs, which are in order.
fn gaps(runs: &[Range<u32>], within: &Range<u32>) -> Vec<Range<u32>> {
    let (mut found, mut at) = (Vec::new(), within.start);
    for run in overlaps(runs, within) {
        if at < run.start {
            found.push(at..run.start);
        }
        at = run.end;
    }
    if at < within.end {
        found.push(at..within.end);
    }
    found
}

/// A store that forgets everything.
struct Nowhere;

impl KvRead for Nowhere {
    fn get(&self, _: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async { Ok(None) })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        Box::pin(async move { Ok(vec![None; keys.len()]) })
    }

    fn scan(&self, _: Vec<u8>, _: Vec<u8>, _: usize) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn keys(&self, _: Vec<u8>, _: Vec<u8>, _: usize) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        Box::pin(async { Ok(Vec::new()) })
    }
}

impl Kv for Nowhere {
    fn snapshot(&self) -> LocalBoxFuture<'_, Result<Rc<dyn KvRead>, KvError>> {
        Box::pin(async { Ok(Rc::new(Nowhere) as Rc<dyn KvRead>) })
    }

    fn commit(&self, _: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async { Ok(()) })
    }

    fn commit_durable(&self, _: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async { Ok(()) })
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async { Ok(()) })
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// Finds out what [`restore`] would do, and does not do it.
pub async fn preview(
    found: &Found,
    volume: &Volume,
    names: &mut dyn Names,
    how: How,
) -> Result<Restored, ChunkError> {
    fill(found, volume, &Nowhere, names, how).await
}

/// Puts the rows of a copy into an empty store, and makes the anchor of the other one void, whose blocks are
/// free from then on. `names` has the rows that are not the target's.
pub async fn restore(
    found: &Found,
    volume: &Volume,
    kv: &dyn Kv,
    names: &mut dyn Names,
    how: How,
) -> Result<Restored, ChunkError> {
    let restored = fill(found, volume, kv, names, how).await?;
    kv.flush().await?;
    void_anchor(&found.anchors, 1 - found.slot).await?;
    let mut last = names.last()?;
    last.reclaims();
    kv.commit_durable(last).await?;
    Ok(restored)
}

/// Puts all rows but the last ones.
async fn fill(
    found: &Found,
    volume: &Volume,
    kv: &dyn Kv,
    names: &mut dyn Names,
    how: How,
) -> Result<Restored, ChunkError> {
    // Blocks that are in the log count as changed.
    if let Err(error) = volume.array().destage_and_checkpoint().await {
        tracing::warn!(%error, "some blocks stay in the log, and count as newer than the copy");
    }
    let mut writer = Writer { kv, writes: WriteSet::new(), rows: 0, bytes: 0, all: 0 };
    let of_copies = found.all_pieces().flatten().chain(&found.others).copied();
    let copies = joined_runs(of_copies.collect());
    let mut ages =
        Ages { volume, version: found.anchor.version, how, copies, last: None, claimed: Vec::new() };
    let (mut changed, mut last, mut loans) = (ChangedFiles::default(), None, 0u64);
    for number in 0..found.anchor.segments {
        let contents = read_rows(volume, &found.anchor, &found.pieces, number).await?;
        for (key, value) in take_rows(&contents)? {
            if let Ok((chunk, row)) = read_row(key, value) {
                let (mut extents, mut newer) = (Vec::new(), 0);
                for extent in &row.extents {
                    let (kept, of_extent) = ages.kept(extent).await?;
                    extents.extend(kept);
                    newer += of_extent;
                }
                if newer > 0 {
                    changed.add(chunk.file.ino, newer, &mut last);
                }
                if !extents.is_empty() {
                    let extents = crate::map::joined(extents);
                    writer.put(key.to_vec(), MapRow { extents, ..row }.encode(Birth::FIRST)).await?;
                }
            } else if file_of_key(key).is_some() {
                writer.put(key.to_vec(), value.to_vec()).await?;
            } else if let (Ok(_), Ok(lent)) = (LentKey::decode(key), Lent::decode(value)) {
                // They are the borrower's, old or new. A repair keeps what the borrower does not know of.
                ages.claimed.extend(runs_of(&lent.loan, volume.stripe_blocks()));
                writer.put(key.to_vec(), Lent { is_restored: true, ..lent }.encode()).await?;
            } else if Borrowed::group_of(key).is_ok() {
                // Nobody knows what was written there since: a repair collects it on the lender.
            } else if let Ok(Counter::Loans { last, .. }) = Counter::decode(key, value) {
                loans = last;
            } else if let Some(value) = names.row(key, value)? {
                writer.put(key.to_vec(), value).await?;
            }
        }
    }
    if let Some(by_time) = names.loans() {
        let last = loans.saturating_add(LOANS_SINCE).max(by_time).min(MOST_LOANS);
        let (key, value) = Counter::Loans { last, forgotten: last, has_dropped: false }.encode();
        writer.put(key, value).await?;
    }
    let newer = names.number()?;
    let newer_blocks = put_newer(found, newer, &mut ages, &mut writer).await?;
    put_copy(found, &mut writer).await?;
    let groups = Groups::new(volume.blocks(), volume.stripe_blocks());
    for (row, of_row) in (0..).map_while(|row| Some((row, groups.counted_in(row)?))) {
        let counts: Vec<Counts> = of_row.map(|_| Counts::SUSPECT).collect();
        writer.put(counts_key(row), encode_counts(&counts)).await?;
    }
    writer.commit().await?;
    let newer = (newer_blocks > 0).then_some(newer);
    Ok(Restored {
        copy: found.anchor.clone(),
        rows: writer.all,
        how: how.newer,
        changed,
        newer_blocks,
        newer,
    })
}

/// The parts of runs, which are in order, in a stripe, counted from its first block.
fn runs_in(runs: &[Run], stripe: u64, per_stripe: u64) -> Vec<Range<u32>> {
    let base = stripe * per_stripe;
    let first = runs.partition_point(|(block, count)| block + count <= base);
    let inside = runs[first..].iter().take_while(|(block, _)| *block < base + per_stripe);
    let within = |(block, count): &Run| {
        to_u32(block.max(&base) - base)..to_u32((block + count - base).min(per_stripe))
    };
    inside.map(within).collect()
}

/// These runs in order, joined where they overlap or follow each other.
fn joined_runs(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable();
    let mut joined: Vec<Run> = Vec::with_capacity(runs.len());
    for (block, count) in runs {
        match joined.last_mut() {
            Some((first, of)) if *first + *of >= block => *of = (*of).max(block + count - *first),
            _ => joined.push((block, count)),
        }
    }
    joined
}

/// Makes all blocks with contents newer than the copy chunks of one file, but for those that stay in other
/// files. Returns their number.
async fn put_newer(
    found: &Found,
    ino: Ino,
    ages: &mut Ages<'_>,
    writer: &mut Writer<'_>,
) -> Result<u64, ChunkError> {
    let (volume, per_stripe) = (ages.volume, ages.volume.stripe_blocks());
    let claimed = joined_runs(std::mem::take(&mut ages.claimed));
    let chunk_blocks = found.anchor.chunk_blocks;
    let (mut chunk, mut held, mut index, mut all) = (Vec::new(), 0, 0, 0);
    let put = async |chunk: &mut Vec<Extent>, index: &mut u64, writer: &mut Writer<'_>| {
        let key = ChunkKey { file: FileId::main(ino), index: *index };
        let row = MapRow { truncations: 0, extents: std::mem::take(chunk) };
        *index += 1;
        writer.put(key.row(Birth::FIRST), row.encode(Birth::FIRST)).await
    };
    let mut from = 0;
    loop {
        // Stripes of a page that cannot be read for a moment are not passed over.
        let stripes = match ages.how.may_lack {
            true => volume.written(from, STRIPES).await?,
            false => volume.all_written(from, STRIPES).await?,
        };
        let Some(end) = stripes.last() else { break };
        from = end + 1;
        for stripe in stripes {
            let base = stripe * per_stripe;
            let taken = runs_in(&claimed, stripe, per_stripe);
            let new = ages.of_stripe(stripe).await?.map(|changes| changes.new.clone()).unwrap_or_default();
            for mut run in new.iter().flat_map(|run| gaps(&taken, run)) {
                while !run.is_empty() {
                    let count = (run.end - run.start).min(chunk_blocks - held);
                    let block = base + u64::from(run.start);
                    chunk.push(Extent {
                        first: held,
                        count,
                        block,
                        preallocated: false,
                        birth: Birth::FIRST,
                    });
                    (held, run.start, all) = (held + count, run.start + count, all + u64::from(count));
                    if held == chunk_blocks {
                        put(&mut chunk, &mut index, writer).await?;
                        held = 0;
                    }
                }
            }
        }
    }
    if !chunk.is_empty() {
        put(&mut chunk, &mut index, writer).await?;
    }
    Ok(all)
}

/// Puts the rows of the copy itself, which stays what it is.
async fn put_copy(found: &Found, writer: &mut Writer<'_>) -> Result<(), ChunkError> {
    let file = file_of(found.anchor.serial);
    let mut blocks = 0;
    for (index, runs) in (0..).zip(found.all_pieces()) {
        let (mut extents, mut first) = (Vec::new(), 0);
        for (block, count) in runs {
            let count = to_u32(*count);
            extents.push(Extent { first, count, block: *block, preallocated: false, birth: Birth::FIRST });
            first += count;
        }
        blocks += blocks_in(runs);
        let row = MapRow { truncations: 0, extents }.encode(Birth::FIRST);
        writer.put(ChunkKey { file, index }.row(Birth::FIRST), row).await?;
    }
    assert!(to_usize(blocks) > 0, "a copy has a segment");
    let row = FileRow { truncations: 0, blocks, owner: Owner::default(), owner_number: 0 };
    writer.put(FileRow::key(file, Birth::FIRST), row.encode()).await
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_cut_by_others() {
        let runs = [0..2, 5..6, 9..12];
        for (within, inside, outside) in [
            (0..12, vec![0..2, 5..6, 9..12], vec![2..5, 6..9]),
            (1..10, vec![1..2, 5..6, 9..10], vec![2..5, 6..9]),
            (2..5, vec![], vec![2..5]),
            (5..6, vec![5..6], vec![]),
            (11..20, vec![11..12], vec![12..20]),
        ] {
            assert_eq!((overlaps(&runs, &within), gaps(&runs, &within)), (inside, outside), "{within:?}");
        }
    }

    #[test]
    fn runs_are_joined() {
        let runs = vec![(9, 1), (0, 2), (2, 3), (4, 1), (20, 5), (21, 1)];
        let joined = joined_runs(runs);
        assert_eq!(joined, [(0, 5), (9, 1), (20, 5)]);
        let within = |stripe| runs_in(&joined, stripe, 8);
        assert_eq!(
            (within(0), within(1), within(2), within(3)),
            (vec![0..5], vec![1..2], vec![4..8], vec![0..1])
        );
    }

    #[test]
    fn files_are_counted_once() {
        let (mut changed, mut last) = (ChangedFiles::default(), None);
        for (ino, blocks) in [(7, 1), (7, 2), (9, 4)] {
            changed.add(Ino(ino), blocks, &mut last);
        }
        assert_eq!((changed.files, changed.blocks), (2, 7));
        assert_eq!(changed.listed, BTreeMap::from([(Ino(7), 3), (Ino(9), 4)]));
    }
}
