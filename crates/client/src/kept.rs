//! Changes that were acknowledged and are not durable, kept to be sent again after a restart of the service.
//!
//! Of a file these are the blocks that were written, the last contents of each, and the changes of its space.
//! Of the name space they are the requests that changed something, with their numbers in the order of all
//! changes ([`penstock_wire::metadata::Change`]).
//!
//! Invariants:
//! - everything that was acknowledged by the present start of the service, or was sent to it again, is here
//!   until a `Sync` request has made it durable that began after it, or until it is reported as lost;
//! - a write or a change begins only below the bound, except a change that may free space. Only these and
//!   what is on its way exceed it;
//! - blocks take no more than twice the memory that is counted for them.

use crate::sent::Change;
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Branch, Buf, FileId, HashMap};
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::{self, RenameRequest, SetAttrRequest, XattrRequest};
use penstock_wire::{Failure, Kind};
use prost::Message;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use tokio::sync::Notify;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Most bytes that are kept.
const MOST_BYTES: u64 = 256 << 20;
/// Memory that a request or a change of space counts for besides its body.
const ENTRY_BYTES: u64 = 256;

/// A request that changed the name space.
#[derive(Clone)]
pub(crate) struct KeptChange {
    pub(crate) kind: Kind,
    pub(crate) branch: Branch,
    pub(crate) sequence: u64,
    pub(crate) body: Vec<u8>,
    /// Its number and time.
    pub(crate) change: metadata::Change,
    /// The inode that it made; 0 for none.
    pub(crate) made: u64,
    /// The file that it changes, or puts in place of another one.
    pub(crate) file: Option<FileId>,
    /// The blocks of the file must be there before: it sets the size, or replaces another file.
    pub(crate) needs_blocks: bool,
    /// It drops blocks of the file.
    pub(crate) drops_blocks: bool,
    /// Its number among the changes that were sent.
    sent: Change,
}

impl KeptChange {
    fn memory(&self) -> u64 {
        self.body.len() as u64 + ENTRY_BYTES
    }
}

/// Contents of a file that are sent again.
pub(crate) enum KeptWrite {
    Space(SpaceChange, Range<u64>),
    Blocks(u64, Buf),
}

/// Blocks of one write.
struct Extent {
    data: Buf,
    /// Bytes of memory that `data` keeps alive.
    memory: u64,
    write: u64,
}

impl Extent {
    fn blocks(&self) -> u64 {
        self.data.len() as u64 / BLOCK
    }

    /// The part with these blocks, relative to its first one.
    fn part(&self, blocks: Range<u64>) -> Self {
        assert!(blocks.start < blocks.end && blocks.end <= self.blocks(), "{blocks:?} is in it");
        let bytes = to_usize(blocks.start * BLOCK)..to_usize(blocks.end * BLOCK);
        let data = self.data.slice(bytes);
        let write = self.write;
        match (data.len() as u64) * 2 < self.memory {
            // A small part must not keep a large buffer alive.
            true => Self { memory: data.len() as u64, data: Buf::copy_from(&data), write },
            false => Self { data, memory: self.memory, write },
        }
    }
}

/// The kept part of one file.
#[derive(Default)]
struct KeptFile {
    /// By first block, without overlaps.
    extents: BTreeMap<u64, Extent>,
    space: Vec<(u64, SpaceChange, Range<u64>)>,
    /// Number of the last write to the file.
    last: u64,
    /// The truncate generation that the last write knew.
    truncations: u64,
    /// The writes up to a number were committed before a change with a number was sent.
    committed: VecDeque<(u64, Change)>,
}

impl KeptFile {
    fn memory(&self) -> u64 {
        self.extents.values().map(|extent| extent.memory).sum::<u64>() + self.space.len() as u64 * ENTRY_BYTES
    }

    fn is_empty(&self) -> bool {
        self.extents.is_empty() && self.space.is_empty()
    }

    /// Removes blocks. Returns the change of the memory that is counted.
    fn cut(&mut self, blocks: &Range<u64>) -> i128 {
        let mut freed = 0;
        loop {
            let before = self.extents.range(..blocks.end).next_back();
            let Some((&first, _)) = before.filter(|(first, extent)| **first + extent.blocks() > blocks.start)
            else {
                return -freed;
            };
            let extent = self.extents.remove(&first).expect("it was just found");
            freed += i128::from(extent.memory);
            let end = first + extent.blocks();
            let mut keep = |from: u64, until: u64| {
                if from < until {
                    let part = extent.part(from - first..until - first);
                    freed -= i128::from(part.memory);
                    self.extents.insert(from, part);
                }
            };
            keep(first, blocks.start);
            keep(blocks.end, end);
        }
    }

    /// Forgets what the writes up to a number have left.
    fn forget_upto(&mut self, write: u64) {
        self.extents.retain(|_, extent| extent.write > write);
        self.space.retain(|(of, ..)| *of > write);
    }
}

/// Everything that is kept.
pub(crate) struct Kept {
    is_on: Cell<bool>,
    most: Cell<u64>,
    bytes: Cell<u64>,
    changes: RefCell<Vec<KeptChange>>,
    files: RefCell<HashMap<FileId, KeptFile>>,
    /// Number of the last write to any file.
    last: Cell<u64>,
    /// Notified at half of the bound.
    pressed: Notify,
    /// Number of syncs that have ended, and the outcome of the last.
    syncs: Cell<u64>,
    outcome: RefCell<Result<(), Failure>>,
    synced: Notify,
}

impl Default for Kept {
    fn default() -> Self {
        Self {
            is_on: Cell::new(false),
            most: Cell::new(MOST_BYTES),
            bytes: Cell::new(0),
            changes: RefCell::default(),
            files: RefCell::default(),
            last: Cell::new(0),
            pressed: Notify::new(),
            syncs: Cell::new(0),
            outcome: RefCell::new(Ok(())),
            synced: Notify::new(),
        }
    }
}

impl Kept {
    /// Keeps everything from now on: the service may be started again without this client.
    pub(crate) fn begin(&self) {
        self.is_on.set(true);
    }

    /// True if anything is kept at all.
    pub(crate) fn is_on(&self) -> bool {
        self.is_on.get()
    }

    /// Sets the bound, in bytes.
    #[cfg(test)]
    pub(crate) fn set_most(&self, bytes: u64) {
        self.most.set(bytes);
    }

    /// Waits until there is room for more. Fails if a sync could not make any.
    pub(crate) async fn room(&self) -> Result<(), Failure> {
        loop {
            let (synced, syncs) = (self.synced.notified(), self.syncs.get());
            if self.bytes.get() < self.most.get() {
                return Ok(());
            }
            self.pressed.notify_one();
            synced.await;
            if self.syncs.get() > syncs && self.bytes.get() >= self.most.get() {
                self.outcome.borrow().clone()?;
            }
        }
    }

    /// Waits until a sync is wanted before its time.
    pub(crate) async fn pressed(&self) {
        self.pressed.notified().await;
    }

    /// Asks for a sync.
    pub(crate) fn press(&self) {
        self.pressed.notify_one();
    }

    /// A sync of everything has ended.
    pub(crate) fn note_sync(&self, outcome: Result<(), Failure>) {
        self.syncs.set(self.syncs.get() + 1);
        *self.outcome.borrow_mut() = outcome;
        self.synced.notify_waiters();
    }

    fn count(&self, more: i128) {
        let bytes = i128::from(self.bytes.get()) + more;
        self.bytes.set(u64::try_from(bytes).expect("only what was counted is given back"));
        if more > 0 && self.bytes.get() * 2 >= self.most.get() {
            self.pressed.notify_one();
        }
    }

    /// Keeps a request that was acknowledged with this change, under the number of a change that was sent.
    pub(crate) fn add_change(
        &self,
        (kind, branch, sequence): (Kind, Branch, u64),
        body: &[u8],
        (change, ino): (metadata::Change, u64),
        sent: Change,
    ) {
        if !self.is_on() {
            return;
        }
        let Repeated { body, file, needs_blocks, drops_blocks } = Repeated::of(kind, branch, body);
        let made = if kind == Kind::Make { ino } else { 0 };
        let kept =
            KeptChange { kind, branch, sequence, body, change, made, file, needs_blocks, drops_blocks, sent };
        self.count(i128::from(kept.memory()));
        self.changes.borrow_mut().push(kept);
    }

    fn with_file(&self, file: FileId, truncations: u64, act: impl FnOnce(&mut KeptFile, u64) -> i128) {
        if !self.is_on() {
            return;
        }
        let mut files = self.files.borrow_mut();
        let known = files.entry(file).or_default();
        let write = self.last.get() + 1;
        self.last.set(write);
        known.last = write;
        known.truncations = known.truncations.max(truncations);
        let more = act(known, write);
        drop(files);
        self.count(more);
    }

    /// Keeps blocks that were written from `first` on, at this truncate generation.
    pub(crate) fn add_blocks(&self, (file, truncations): (FileId, u64), first: u64, data: &Buf) {
        self.with_file(file, truncations, |known, write| {
            let (memory, data) = (data.len() as u64, data.clone());
            assert!(memory > 0 && memory.is_multiple_of(BLOCK), "blocks are kept as a whole");
            let freed = known.cut(&(first..first + memory / BLOCK));
            known.extents.insert(first, Extent { data, memory, write });
            freed + i128::from(memory)
        });
    }

    /// Keeps a change of space that was made at this truncate generation.
    pub(crate) fn add_space(
        &self,
        (file, truncations): (FileId, u64),
        change: SpaceChange,
        blocks: Range<u64>,
    ) {
        self.with_file(file, truncations, |known, write| {
            let freed = match change {
                SpaceChange::Reserve => 0,
                _ => known.cut(&blocks),
            };
            known.space.push((write, change, blocks));
            freed + i128::from(ENTRY_BYTES)
        });
    }

    /// Forgets blocks of a file from this one on, because its size was set, to a smaller one if `is_smaller`.
    /// A larger size leaves reserved space.
    pub(crate) fn truncate(&self, file: FileId, first: u64, is_smaller: bool) {
        let mut freed = 0;
        let mut files = self.files.borrow_mut();
        if let Some(known) = files.get_mut(&file) {
            freed = known.cut(&(first..u64::MAX));
            let before = known.space.len();
            if is_smaller {
                known.space.iter_mut().for_each(|(_, _, blocks)| blocks.end = blocks.end.min(first));
                known.space.retain(|(_, _, blocks)| !blocks.is_empty());
            }
            freed -= i128::from((before - known.space.len()) as u64 * ENTRY_BYTES);
            if known.is_empty() && known.committed.is_empty() {
                files.remove(&file);
            }
        }
        drop(files);
        self.count(freed);
    }

    /// The truncate generation that the last write knew that is kept of a file; 0 if nothing is.
    pub(crate) fn truncations(&self, file: FileId) -> u64 {
        self.files.borrow().get(&file).map_or(0, |known| known.truncations)
    }

    /// Returns a mark for [`Self::committed`]; none if nothing is kept of the file.
    pub(crate) fn mark(&self, file: FileId) -> Option<u64> {
        self.files.borrow().get(&file).filter(|known| !known.is_empty()).map(|known| known.last)
    }

    /// True if something is kept of a file that was not committed.
    pub(crate) fn is_uncommitted(&self, file: FileId) -> bool {
        let files = self.files.borrow();
        let upto = |known: &KeptFile| known.committed.back().map_or(0, |(write, _)| *write);
        files.get(&file).is_some_and(|known| !known.is_empty() && upto(known) < known.last)
    }

    /// Everything kept of a file before this mark was committed, before the change of this number was sent.
    pub(crate) fn committed(&self, file: FileId, mark: Option<u64>, sent: Change) {
        if let (Some(mark), Some(known)) = (mark, self.files.borrow_mut().get_mut(&file)) {
            assert!(mark <= known.last, "a mark is from the past");
            known.committed.push_back((mark, sent));
        }
    }

    /// A `Sync` request has made durable what was sent up to this number.
    pub(crate) fn are_durable(&self, upto: Change) {
        self.forget_changes(|kept| kept.sent <= upto);
        let mut freed = 0;
        self.files.borrow_mut().retain(|_, known| {
            if known.committed.front().is_none_or(|(_, sent)| *sent > upto) {
                return true;
            }
            let before = known.memory();
            while let Some((write, _)) = known.committed.pop_front_if(|(_, sent)| *sent <= upto) {
                known.forget_upto(write);
            }
            freed += i128::from(before) - i128::from(known.memory());
            assert!(freed >= 0, "nothing is added");
            !known.is_empty()
        });
        self.count(-freed);
    }

    /// Forgets what is kept of a file, because it is lost.
    pub(crate) fn forget_file(&self, file: FileId) {
        let freed = self.files.borrow_mut().remove(&file).map_or(0, |known| known.memory());
        self.count(-i128::from(freed));
    }

    /// Forgets a request, because it is lost.
    pub(crate) fn forget_change(&self, lost: &KeptChange) {
        self.forget_changes(|kept| kept.sent == lost.sent);
    }

    fn forget_changes(&self, is_gone: impl Fn(&KeptChange) -> bool) {
        let mut freed = 0;
        self.changes.borrow_mut().retain(|kept| {
            let stays = !is_gone(kept);
            freed += if stays { 0 } else { i128::from(kept.memory()) };
            stays
        });
        self.count(-freed);
    }

    /// Forgets everything, because the session has ended.
    pub(crate) fn end(&self) {
        self.is_on.set(false);
        self.changes.take();
        self.files.take();
        self.bytes.set(0);
        self.synced.notify_waiters();
    }

    /// The requests that are kept, in the order of their changes.
    pub(crate) fn changes(&self) -> Vec<KeptChange> {
        let mut changes = self.changes.borrow().clone();
        changes.sort_by_key(|kept| (kept.change.number, kept.sent));
        changes
    }

    /// The files of which something is kept, in order.
    pub(crate) fn files(&self) -> Vec<FileId> {
        let files = self.files.borrow();
        let mut files: Vec<FileId> =
            files.iter().filter(|(_, known)| !known.is_empty()).map(|(file, _)| *file).collect();
        files.sort_unstable();
        files
    }

    /// Everything that is kept of a file, in an order in which it can be sent.
    pub(crate) fn writes(&self, file: FileId) -> Vec<KeptWrite> {
        let files = self.files.borrow();
        let Some(known) = files.get(&file) else { return Vec::new() };
        let space = known.space.iter().map(|(_, change, blocks)| KeptWrite::Space(*change, blocks.clone()));
        let blocks =
            known.extents.iter().map(|(first, extent)| KeptWrite::Blocks(*first, extent.data.clone()));
        space.chain(blocks).collect()
    }
}

/// A request as it is repeated, without what the service compared with the time before a restart.
struct Repeated {
    body: Vec<u8>,
    file: Option<FileId>,
    needs_blocks: bool,
    drops_blocks: bool,
}

impl Repeated {
    fn of(kind: Kind, branch: Branch, body: &[u8]) -> Self {
        let own = "a request of this client is decoded";
        let of = |ino: u64| Some(FileId::of_numbers(branch.0, ino));
        let other = Self { body: body.to_vec(), file: None, needs_blocks: false, drops_blocks: false };
        match kind {
            Kind::SetAttr => {
                let mut request = SetAttrRequest::decode(body).expect(own);
                request.known_truncations = None;
                let needs_blocks = request.size.is_some();
                Self {
                    body: request.encode_to_vec(),
                    file: of(request.ino),
                    needs_blocks,
                    drops_blocks: needs_blocks && !request.grow,
                }
            }
            Kind::Rename => {
                let mut request = RenameRequest::decode(body).expect(own);
                let found = request.found.take().filter(|found| found.replaced > 0 && found.moved > 0);
                request.start = 0;
                let file = found.and_then(|found| of(found.moved));
                Self { body: request.encode_to_vec(), file, needs_blocks: file.is_some(), ..other }
            }
            Kind::SetXattr | Kind::RemoveXattr => {
                Self { file: of(XattrRequest::decode(body).expect(own).ino), ..other }
            }
            _ => other,
        }
    }
}

#[cfg(test)]
mod tests;
