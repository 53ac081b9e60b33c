//! Copies of all rows of the key-value store on the data volume: what is left if the store is lost beyond its
//! redundancy.
//!
//! A copy is a file without an inode, of a family of inode numbers that nobody else has ([`is_copy`]). Its
//! blocks are allocated, counted and checked like those of other files. An *anchor* at the end of the volume,
//! in stripes that no file gets, says where its segments are. There are two anchors, which take turns, so one
//! copy is whole while the other one is made.
//!
//! A copy is made while rows change: it is not of one moment, and a restore must be followed by a repair. Its
//! version tells which blocks have the contents that its rows mean ([`restore`]).
//!
//! Invariants:
//! - an anchor is written after all that it names is durable, and is made void before that is freed;
//! - nothing of a copy is freed while no other one is known to be whole, but if there is no other;
//! - rows that a copy has were read after its version was taken and all writes before that were committed.

pub mod format;
mod restore;

pub use crate::rows::is_copy;
pub use format::{Anchor, anchor_stripes};
pub use restore::{ChangedFiles, Found, How, Names, Newer, Restored, find, preview, restore};

use crate::ChunkError;
use crate::files::{Known, REMOVED};
use crate::free::Run;
use crate::rows::{
    COPIES_END, ChunkKey, FileRow, MapRow, all_accounts, all_counts, all_groups, file_of_key, map_range,
};
use crate::target::Target;
use crate::truncate::Behind;
use format::{
    ANCHOR_BLOCKS, Pieces, SEGMENT_BYTES, SegmentHead, blocks_in, encode_index, index_bytes, put_row,
    row_bytes,
};
use penstock_array::{Discard, Volume};
use penstock_base::num::{to_u32, to_usize};
use penstock_base::{
    BLOCK_BYTES, Birth, Buf, BufMut, Class, DecodeError, Enc, Env, ErrorKind, FileId, Ino, IoContext,
    crc32c_blocks,
};
use penstock_drive::Io;
use penstock_kv::{Pages, Range, WriteSet, for_each, for_each_key};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const IO: Io = Io::new(Class::Meta, "copy.read");
const WRITES: IoContext = IoContext::system(Class::Meta);
/// Rest after each segment, so that a copy takes a part of the drives' time only.
const REST: Duration = Duration::from_millis(5);
/// Chunks that one transaction frees.
const STEP: usize = 64;
/// Nothing is where an anchor would be.
const NONE_MADE: &str = "none was made there";
/// Whatever is read counts as unreadable after so many tries, with this pause between.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_secs(5);

/// Does something until the result is one to keep, at most three times, with a pause of 5 s between. Returns
/// the last result: an error of the moment has passed by then.
pub async fn tried<T>(env: &Env, is_kept: impl Fn(&T) -> bool, mut one: impl AsyncFnMut() -> T) -> T {
    for _ in 1..TRIES {
        let result = one().await;
        if is_kept(&result) {
            return result;
        }
        env.sleep(PAUSE).await;
    }
    one().await
}

/// The file of a copy.
fn file_of(serial: u64) -> FileId {
    assert!(serial > 0 && serial < COPIES_END, "copy {serial} has a number of its own");
    FileId::main(Ino(serial))
}

/// True if a row is not copied: what counts others, and the maps of copies.
fn is_left_out(key: &[u8]) -> bool {
    let within = |(from, until): &Range| from.as_slice() <= key && key < until.as_slice();
    [all_groups(), all_counts(), all_accounts()].iter().any(within)
        || file_of_key(key).is_some_and(|file| is_copy(file.ino))
}

/// The stripes that the anchor with this number has.
fn stripes_of(anchors: &Volume, slot: usize) -> std::ops::Range<u64> {
    let each = anchors.blocks() / 2 / anchors.stripe_blocks();
    slot as u64 * each..(slot as u64 + 1) * each
}

/// The first of the blocks that the anchor with this number has, and how many it fills.
fn place_of(anchors: &Volume, slot: usize) -> Run {
    (stripes_of(anchors, slot).start * anchors.stripe_blocks(), ANCHOR_BLOCKS)
}

/// Reads one of the anchors.
async fn read_anchor(anchors: &Volume, slot: usize) -> Result<Anchor, ChunkError> {
    let (block, count) = place_of(anchors, slot);
    let bytes = anchors.read(block, count, IO).await?.gather();
    if bytes.iter().all(|byte| *byte == 0) {
        return Err(ChunkError::Invalid(NONE_MADE.into()));
    }
    let found = Anchor::decode(&bytes)?;
    match found.array == anchors.array().id() {
        true => Ok(found),
        false => {
            Err(DecodeError::Bad { what: "anchor of a copy of the map", why: "of another array" }.into())
        }
    }
}

/// Makes an anchor void, durably. Stripes of it that were lost can be written again.
async fn void_anchor(anchors: &Volume, slot: usize) -> Result<(), ChunkError> {
    let stripes = stripes_of(anchors, slot);
    assert!(stripes.end * anchors.stripe_blocks() <= anchors.blocks(), "the place of anchor {slot}");
    let left = anchors.discard(stripes.start, stripes.end - stripes.start, Discard::InTable).await?;
    match left.is_empty() {
        true => Ok(()),
        false => {
            Err(ChunkError::Invalid("the place of an anchor is in a lost page of the stripe table".into()))
        }
    }
}

/// The blocks of an anchor, which is encoded.
fn padded(bytes: &[u8]) -> Result<Buf, ChunkError> {
    let len = to_usize(ANCHOR_BLOCKS) * BLOCK_BYTES;
    if bytes.len() > len {
        return Err(ChunkError::Invalid("a copy of the map is in too many pieces".into()));
    }
    let mut padded = BufMut::zeroed(len);
    padded.as_mut()[..bytes.len()].copy_from_slice(bytes);
    Ok(padded.freeze())
}

/// Writes an anchor to a place that is void, durably, and reads it back.
async fn write_anchor(anchors: &Volume, slot: usize, data: Buf) -> Result<(), ChunkError> {
    let (block, count) = place_of(anchors, slot);
    assert_eq!(data.len(), to_usize(count) * BLOCK_BYTES, "an anchor fills its place");
    anchors.write(block, &data, &crc32c_blocks(&data)).await?;
    anchors.flush().await?;
    match anchors.read(block, count, IO).await?.gather()[..] == data[..] {
        true => Ok(()),
        false => Err(ChunkError::Invalid("an anchor does not read back".into())),
    }
}

/// The newest copy that an anchor names. It may not be whole.
pub async fn newest(anchors: &Volume) -> Option<Anchor> {
    let mut found = None;
    for slot in 0..2 {
        if let Ok(anchor) = read_anchor(anchors, slot).await {
            found = Some(anchor).into_iter().chain(found).max_by_key(|anchor: &Anchor| anchor.serial);
        }
    }
    found
}

/// The copies of one target.
pub struct Copies {
    env: Env,
    target: Rc<Target>,
    anchors: Volume,
    known: RefCell<[Option<Anchor>; 2]>,
    is_making: Cell<bool>,
}

/// The contents of the place of an anchor.
enum Slot {
    Names(Anchor),
    /// It was read, and is no anchor.
    Void,
    /// It cannot be read, and may be one.
    Unread,
}

impl Slot {
    fn anchor(self) -> Option<Anchor> {
        match self {
            Self::Names(anchor) => Some(anchor),
            Self::Void | Self::Unread => None,
        }
    }
}

/// A copy is being made.
struct Making<'a>(&'a Cell<bool>);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Copies {
    /// The copies whose anchors are on the volume `anchors`. An anchor that cannot be read counts as none.
    pub async fn open(env: &Env, target: &Rc<Target>, anchors: Volume) -> Rc<Self> {
        let mut known = [None, None];
        for (slot, known) in known.iter_mut().enumerate() {
            *known = read_anchor(&anchors, slot)
                .await
                .inspect_err(|error| tracing::debug!(slot, %error, "no copy of the map"))
                .ok();
        }
        let (env, target) = (env.clone(), target.clone());
        Rc::new(Self { env, target, anchors, known: RefCell::new(known), is_making: Cell::new(false) })
    }

    /// The newest copy.
    pub fn newest(&self) -> Option<Anchor> {
        self.known.borrow().iter().flatten().max_by_key(|anchor| anchor.serial).cloned()
    }

    /// True while a copy is being made.
    pub fn is_making(&self) -> bool {
        self.is_making.get()
    }

    /// Makes a copy of all rows for which `is_copied` holds, in place of the older one of two. Refused while
    /// another one is made.
    pub async fn make(&self, is_copied: impl Fn(&[u8]) -> bool) -> Result<Anchor, ChunkError> {
        if self.is_making.replace(true) {
            return Err(ChunkError::Invalid("a copy of the map is being made".into()));
        }
        let _making = Making(&self.is_making);
        let (slot, may_free) = self.oldest().await?;
        match may_free {
            // Before its copy is freed. The other one stays as it is.
            true => void_anchor(&self.anchors, slot).await?,
            // Its copy may be the only one: the place is made void when there is another. That it can be is
            // known before a copy is made for nothing.
            false => self.anchors.look_at_table(stripes_of(&self.anchors, slot)).await?,
        }
        let serial = self.remove_others(may_free).await? + 1;
        let mut may_be_named = false;
        let made = async {
            let anchor = self.write_copy(serial, is_copied).await?;
            let data = padded(&anchor.encode())?;
            void_anchor(&self.anchors, slot).await?;
            may_be_named = true;
            write_anchor(&self.anchors, slot, data).await?;
            Ok(anchor)
        };
        let made: Result<Anchor, ChunkError> = made.await;
        if let Err(error) = made {
            let freed = async {
                if may_be_named {
                    // It may be the only one that is whole.
                    if !may_free {
                        return Ok(());
                    }
                    void_anchor(&self.anchors, slot).await?;
                }
                self.remove(serial).await
            };
            if let Err(error) = freed.await {
                tracing::warn!(serial, %error, "a copy of the map that failed is freed with the next one");
            }
            return Err(error);
        }
        let anchor = made?;
        self.known.borrow_mut()[slot] = Some(anchor.clone());
        Ok(anchor)
    }

    /// The number of the anchor that is to be written over, which counts as void now: one without a copy, one
    /// that is not what was written, one that cannot be read or whose copy cannot, or the older one. True if
    /// other copies than the one that stays may be freed: that one is whole, or there is none.
    async fn oldest(&self) -> Result<(usize, bool), ChunkError> {
        let mut slots = [Slot::Void, Slot::Void];
        for (slot, found) in slots.iter_mut().enumerate() {
            *found = self.read_slot(slot).await?;
        }
        let (slot, may_free) = match &slots {
            [Slot::Void, Slot::Void | Slot::Names(_)] => (0, true),
            [Slot::Names(_), Slot::Void] => (1, true),
            [Slot::Void | Slot::Unread, Slot::Unread] => (0, false),
            [Slot::Unread, Slot::Void] => (1, false),
            [Slot::Unread, Slot::Names(other)] => {
                if self.is_whole(other).await? {
                    (0, true)
                } else {
                    (1, false)
                }
            }
            [Slot::Names(other), Slot::Unread] => {
                if self.is_whole(other).await? {
                    (1, true)
                } else {
                    (0, false)
                }
            }
            [Slot::Names(first), Slot::Names(second)] => {
                let ((older, old), (newer, new)) = match first.serial <= second.serial {
                    true => ((0, first), (1, second)),
                    false => ((1, second), (0, first)),
                };
                if self.is_whole(new).await? {
                    (older, true)
                } else {
                    tracing::error!(serial = new.serial, "a copy of the map cannot be read any more");
                    if self.is_whole(old).await? { (newer, true) } else { (older, false) }
                }
            }
        };
        let mut known = slots.map(Slot::anchor);
        known[slot] = None;
        *self.known.borrow_mut() = known;
        Ok((slot, may_free))
    }

    /// True if all of a copy can be read, now or in a moment.
    async fn is_whole(&self, anchor: &Anchor) -> Result<bool, ChunkError> {
        let one = async || restore::is_whole(self.target.volume(), anchor).await;
        tried(&self.env, |whole| !matches!(whole, Ok(false)), one).await
    }

    /// Reads an anchor, now or in a moment. Fails for one of a later release.
    async fn read_slot(&self, slot: usize) -> Result<Slot, ChunkError> {
        let is_read = |read: &Result<Anchor, ChunkError>| {
            matches!(read, Ok(_) | Err(ChunkError::Row(_) | ChunkError::Invalid(_)))
        };
        match tried(&self.env, is_read, async || read_anchor(&self.anchors, slot).await).await {
            Ok(anchor) => Ok(Slot::Names(anchor)),
            Err(error) if restore::is_later(&error) => Err(error),
            Err(ChunkError::Row(_) | ChunkError::Invalid(_)) => Ok(Slot::Void),
            Err(error) => {
                tracing::error!(slot, %error, "the anchor of a copy of the map cannot be read");
                Ok(Slot::Unread)
            }
        }
    }

    /// Frees all copies without an anchor, if that may be done. Returns the highest number of any.
    async fn remove_others(&self, may_free: bool) -> Result<u64, ChunkError> {
        let kept: BTreeSet<u64> = self.known.borrow().iter().flatten().map(|anchor| anchor.serial).collect();
        let mut found = BTreeSet::new();
        let (first, end) = (FileId::main(Ino(0)), FileId::main(Ino(COPIES_END)));
        let files = (FileRow::key(first, Birth(u64::MAX)), FileRow::key(end, Birth(u64::MAX)));
        for range in [(map_range(first, 0).0, map_range(end, 0).0), files] {
            for_each_key(&*self.target.kv, range, |key| {
                let copy = file_of_key(key).filter(|file| is_copy(file.ino));
                found.extend(copy.map(|file| file.ino.0));
                Ok::<_, ChunkError>(())
            })
            .await?;
        }
        for serial in found.iter().filter(|serial| may_free && !kept.contains(serial)) {
            self.remove(*serial).await?;
        }
        Ok(found.into_iter().chain(kept).max().unwrap_or(0))
    }

    /// Frees a copy.
    async fn remove(&self, serial: u64) -> Result<(), ChunkError> {
        let (file, known) = (file_of(serial), Known { truncations: REMOVED, ..Known::default() });
        for stop in self.target.truncate_steps(file, 0, STEP).await? {
            self.drop_from(file, stop, known).await?;
        }
        self.drop_from(file, 0, known).await?;
        self.target.file_removed(file);
        self.target.sync().await
    }

    async fn drop_from(&self, file: FileId, block: u64, known: Known) -> Result<(), ChunkError> {
        let mut writes = WriteSet::new();
        writes.reclaims();
        self.target.truncate(file, block..u64::MAX, Behind::Dropped, known, writes).await
    }

    async fn write_copy(&self, serial: u64, is_copied: impl Fn(&[u8]) -> bool) -> Result<Anchor, ChunkError> {
        let (file, volume) = (file_of(serial), self.target.volume());
        // A block that gets its place only later would count as changed.
        volume.array().destage_and_checkpoint().await?;
        let chunk_blocks = self.target.config().chunk_blocks;
        let mut anchor = Anchor {
            array: volume.array().id(),
            serial,
            id: self.env.random(),
            version: volume.version(),
            created_ns: self.env.wall_ns(),
            rows: 0,
            bytes: 0,
            chunk_blocks,
            segments: 0,
            index: Vec::new(),
        };
        // From here on everything written before that version is in a row, or has no owner.
        match self.target.commit_all().await {
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                tracing::warn!(%error, "some writes have no space, and are not in the copy of the map");
            }
            committed => committed?,
        }
        let room = chunk_blocks as usize * BLOCK_BYTES - SEGMENT_BYTES;
        let (mut pages, mut contents) =
            (Pages::new(&*self.target.kv, (Vec::new(), vec![0xff; 256])), Enc::new());
        loop {
            let rows = pages.next().await?;
            if rows.is_empty() {
                break;
            }
            for (key, value) in rows.iter().filter(|(key, _)| !is_left_out(key) && is_copied(key)) {
                if row_bytes(key, value) > room {
                    return Err(ChunkError::Invalid(format!(
                        "a row of {} bytes is in no chunk",
                        value.len()
                    )));
                }
                if contents.len() + row_bytes(key, value) > room {
                    self.write_segment(&anchor, anchor.segments, false, &contents.finish()).await?;
                    anchor.segments += 1;
                }
                put_row(&mut contents, key, value);
                anchor.rows += 1;
                anchor.bytes += row_bytes(key, value) as u64;
            }
        }
        self.write_segment(&anchor, anchor.segments, false, &contents.finish()).await?;
        anchor.segments += 1;
        self.target.commit(file, false).await?;
        let mut rest = &self.pieces_of(file, 0, anchor.segments).await?[..];
        let mut parts = 0;
        while !rest.is_empty() {
            let mut bytes = 4;
            let fits = |runs: &&Vec<Run>| {
                bytes += index_bytes(runs);
                bytes <= room
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (part, others) = rest.split_at(count);
            self.write_segment(&anchor, anchor.segments + parts, true, &encode_index(part)).await?;
            parts += 1;
            rest = others;
        }
        self.target.commit(file, false).await?;
        anchor.index = self.pieces_of(file, anchor.segments, parts).await?;
        Ok(anchor)
    }

    async fn write_segment(
        &self,
        anchor: &Anchor,
        number: u32,
        is_index: bool,
        contents: &[u8],
    ) -> Result<(), ChunkError> {
        // Full chunks have stripes of their own: blocks of files beside them would count as newer.
        let bytes = SegmentHead { id: anchor.id, number, is_index }.seal(contents, anchor.chunk_blocks);
        assert_eq!(bytes.len(), anchor.chunk_blocks as usize * BLOCK_BYTES, "a segment is a full chunk");
        let (data, crcs) = (Buf::copy_from(&bytes), crc32c_blocks(&bytes));
        let key = ChunkKey { file: file_of(anchor.serial), index: number.into() };
        self.target.write(key, 0, &data, &crcs, Known::default(), WRITES).await?;
        self.env.sleep(REST).await;
        Ok(())
    }

    /// The blocks of some chunks of a copy, as they are committed.
    async fn pieces_of(&self, file: FileId, first: u32, count: u32) -> Result<Pieces, ChunkError> {
        let mut pieces = Pieces::new();
        for_each(&*self.target.kv, map_range(file, first.into()), |key, value| {
            if to_u32(pieces.len()) == count {
                return Ok(());
            }
            let (chunk, birth) = ChunkKey::decode(key)?;
            let row = MapRow::decode(value, birth)?;
            assert_eq!(chunk.index, u64::from(first) + pieces.len() as u64, "the chunks follow each other");
            let runs: Vec<Run> =
                row.extents.iter().map(|extent| (extent.block, u64::from(extent.count))).collect();
            let ends = row.extents.last().map_or(0, |last| last.first + last.count);
            assert_eq!(blocks_in(&runs), u64::from(ends), "a segment has no hole");
            pieces.push(runs);
            Ok::<_, ChunkError>(())
        })
        .await?;
        assert_eq!(to_u32(pieces.len()), count, "all segments are committed");
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests;
