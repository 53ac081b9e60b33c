//! The state of files that are open or have unsynced writes.
//!
//! Invariant: a loss of writes stays to be reported until an fsync reports it, or until the last handle is
//! closed after a close has reported it.

use crate::sent::Change;
use penstock_base::{FileId, HashMap, Spread};
use penstock_wire::metadata::{Attr, Time, set_id_bits};
use std::cell::RefCell;
use std::rc::Rc;

/// The target's blocks behind the last block of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tail {
    /// A crash or a failed write may have left some.
    Unknown,
    /// There are none.
    Clean,
}

/// Report of the last loss of a file's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Report {
    /// There was none, or an fsync has reported it.
    Done,
    /// Nothing has reported it.
    Due,
    /// Only a close has. If no handle is left after that, it counts as reported.
    ByClose,
}

/// State of a file that is open or has unsynced writes.
#[derive(Clone, Debug)]
pub(crate) struct FileState {
    size: u64,
    sent_size: u64,
    truncations: u64,
    chunk_blocks: u32,
    spread: Spread,
    mtime: Option<Time>,
    writes: u64,
    opens: u64,
    writers: u64,
    is_mapped: bool,
    tail: Tail,
    has_set_id: bool,
    /// The last change that was sent to the service, if it is not durable: a restart of the service may lose
    /// it.
    unsynced: Option<Change>,
    losses: u64,
    report: Report,
    lost_end: u64,
    is_stale: bool,
}

impl FileState {
    /// The state of a file with attributes from the service, on these targets; nothing is unsynced.
    pub(crate) fn of(attr: &Attr, spread: Spread) -> Self {
        Self {
            size: attr.size,
            sent_size: attr.size,
            truncations: attr.truncations,
            // If the service sends no chunk size, requests that it refuses are better than a division by
            // zero.
            chunk_blocks: attr.chunk_blocks.max(1),
            spread,
            mtime: None,
            writes: 0,
            opens: 0,
            writers: 0,
            is_mapped: false,
            tail: Tail::Unknown,
            has_set_id: set_id_bits(attr.mode) != 0,
            unsynced: None,
            losses: 0,
            report: Report::Done,
            lost_end: 0,
            is_stale: false,
        }
    }

    /// Size in bytes, including unsynced writes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Size in bytes that the service has.
    pub(crate) fn sent_size(&self) -> u64 {
        self.sent_size
    }

    /// Truncate generation of the inode.
    pub(crate) fn truncations(&self) -> u64 {
        self.truncations
    }

    /// Number of blocks in a chunk of the file.
    pub(crate) fn chunk_blocks(&self) -> u32 {
        self.chunk_blocks
    }

    /// The targets with its chunks.
    pub(crate) fn spread(&self) -> Spread {
        self.spread
    }

    /// Modification time of unsynced writes; `None` if there are none.
    pub(crate) fn mtime(&self) -> Option<Time> {
        self.mtime
    }

    /// True if there are writes whose size and time were not sent.
    pub(crate) fn has_unsynced_writes(&self) -> bool {
        self.mtime.is_some()
    }

    /// Number of open handles.
    pub(crate) fn opens(&self) -> u64 {
        self.opens
    }

    /// True if programs may write to it through the kernel's pages.
    pub(crate) fn is_written_by_pages(&self) -> bool {
        self.writers > 0 || self.is_mapped
    }

    /// True if the kernel has pages of the file that a program may change in a mapping.
    pub(crate) fn is_mapped(&self) -> bool {
        self.is_mapped
    }

    /// True if the mode has set-id bits, which a write may have to remove.
    pub(crate) fn has_set_id(&self) -> bool {
        self.has_set_id
    }

    /// True if the state may be out of date: the service restarted, or no lease covers the file.
    pub(crate) fn is_stale(&self) -> bool {
        self.is_stale
    }

    /// True if the target has nothing behind the last block of the file.
    pub(crate) fn has_clean_tail(&self) -> bool {
        self.tail == Tail::Clean
    }

    /// Number of times that writes of the file were lost.
    pub(crate) fn losses(&self) -> u64 {
        self.losses
    }

    /// Number of losses that a descriptor opened now need not report: all, except the last one if it was not
    /// reported yet.
    pub(crate) fn losses_told(&self) -> u64 {
        self.losses - u64::from(self.is_lost())
    }

    /// True if nobody was told of the last loss.
    pub(crate) fn is_untold(&self) -> bool {
        self.report == Report::Due
    }

    /// True if no fsync has reported the last loss.
    pub(crate) fn is_lost(&self) -> bool {
        self.report != Report::Done
    }

    /// End of the file at the time when writes to it, by any client, may have been lost. The kernel may still
    /// have this end, and a page that a program changed there is outside the file now.
    pub(crate) fn lost_end(&self) -> u64 {
        self.lost_end
    }

    /// True if nothing needs the state: no handle, no unsynced change, no loss to report.
    fn is_idle(&self) -> bool {
        self.opens == 0 && self.mtime.is_none() && !self.is_lost() && self.unsynced.is_none()
    }

    /// The state may be out of date from now on.
    pub(crate) fn make_stale(&mut self) {
        self.is_stale = true;
    }

    /// Replaces a stale state by one that was fetched. Handles and losses stay.
    pub(crate) fn refresh(&mut self, fetched: &Self) {
        assert!(self.is_stale, "only a stale state is replaced");
        (self.size, self.sent_size, self.truncations) = (fetched.size, fetched.size, fetched.truncations);
        self.take_layout(fetched);
        (self.tail, self.has_set_id, self.is_stale) = (Tail::Unknown, fetched.has_set_id, false);
    }

    /// A file that is made again after a restart of the service, or that was empty, may lie on other targets
    /// than before.
    pub(crate) fn take_layout(&mut self, fetched: &Self) {
        (self.spread, self.chunk_blocks) = (fetched.spread, fetched.chunk_blocks);
    }

    /// The service was started again, and everything that was not durable will be sent to it. The state of a
    /// file without unsynced writes is fetched anew.
    pub(crate) fn restarted(&mut self) {
        // The end may result from a write of another client that is lost.
        self.note_lost_end();
        self.is_stale |= !self.has_unsynced_writes();
    }

    /// Unsynced writes were sent to a new start of the service, which has these attributes of the file.
    pub(crate) fn resent(&mut self, fetched: &Self) {
        (self.sent_size, self.truncations) = (fetched.size.min(self.size), fetched.truncations);
        self.take_layout(fetched);
        (self.tail, self.has_set_id, self.is_stale) = (Tail::Unknown, fetched.has_set_id, false);
    }

    /// Counts one more open handle.
    pub(crate) fn open(&mut self) {
        self.opens += 1;
    }

    /// Counts one open handle less.
    pub(crate) fn close(&mut self) {
        self.opens = self.opens.saturating_sub(1);
        if self.opens == 0 {
            self.lost_end = 0;
            if self.report == Report::ByClose {
                self.report = Report::Done;
            }
        }
    }

    /// Counts an open handle that may write through the kernel's pages, or one less.
    pub(crate) fn count_writer(&mut self, more: bool) {
        self.writers = if more { self.writers + 1 } else { self.writers.saturating_sub(1) };
    }

    /// The kernel may have pages of the file that programs change in mappings, or has none any more.
    pub(crate) fn set_mapped(&mut self, mapped: bool) {
        self.is_mapped = mapped;
    }

    /// No kernel has the file any more. Returns the number of handles to close.
    pub(crate) fn kernel_is_gone(&mut self) -> u64 {
        (self.writers, self.is_mapped) = (0, false);
        self.opens
    }

    /// A write that ends at `end` is done. It may not make the file larger than it is if `end` is inside.
    pub(crate) fn wrote(&mut self, end: u64, now: Time) {
        self.size = self.size.max(end);
        self.changed(now);
    }

    /// The contents changed, and the size did not.
    pub(crate) fn changed(&mut self, now: Time) {
        assert!(!self.is_stale, "a change is made to a state that is known");
        self.mtime = Some(now);
        self.writes += 1;
    }

    /// A write failed: some of its blocks may be written, also behind the end of the file.
    pub(crate) fn write_failed(&mut self) {
        self.tail = Tail::Unknown;
    }

    /// The service dropped everything behind the end of the file, at this truncate generation.
    pub(crate) fn cleaned(&mut self, truncations: u64) {
        (self.truncations, self.tail) = (truncations, Tail::Clean);
    }

    /// The size was set, with all times. Data that is still unsynced gets the time `unsynced_time`.
    pub(crate) fn resized(&mut self, attr: &Attr, unsynced_time: Option<Time>) {
        (self.size, self.sent_size) = (attr.size, attr.size);
        self.cleaned(attr.truncations);
        self.writes += 1;
        self.mtime = unsynced_time;
        // The kernel learns this size from the reply.
        self.lost_end = 0;
    }

    /// Size and time were sent as they were in the state `sent`.
    pub(crate) fn synced(&mut self, sent: &Self) {
        assert!(self.writes >= sent.writes && self.losses >= sent.losses, "counts only rise");
        if self.truncations == sent.truncations {
            self.sent_size = self.sent_size.max(sent.size);
        }
        // Writes that came after it stay unsynced.
        if self.writes == sent.writes {
            self.mtime = None;
        }
    }

    /// A change was sent that the next `Sync` request makes durable.
    pub(crate) fn sent(&mut self, change: Change) {
        self.unsynced = Some(change);
    }

    /// Changes up to this one are durable.
    pub(crate) fn durable_upto(&mut self, change: Change) {
        self.unsynced = self.unsynced.filter(|last| *last > change);
    }

    /// True if a restart of the service loses something of the file.
    pub(crate) fn can_lose(&self) -> bool {
        self.has_unsynced_writes() || self.unsynced.is_some()
    }

    /// Records that unsynced writes are lost.
    pub(crate) fn lose(&mut self) {
        self.unsynced = None;
        self.mtime = None;
        self.writes += 1;
        self.losses += 1;
        self.report = Report::Due;
        self.note_lost_end();
    }

    /// Nobody wants the unsynced writes any more.
    pub(crate) fn forget_writes(&mut self) {
        (self.unsynced, self.mtime) = (None, None);
    }

    /// Records that a page that was written back, or a change of attributes, is lost. Everything else that is
    /// unsynced is still there.
    pub(crate) fn lose_part(&mut self) {
        self.losses += 1;
        self.report = Report::Due;
        self.note_lost_end();
    }

    /// Records the present end, because the file may be shorter from now on without the kernel knowing.
    pub(crate) fn note_lost_end(&mut self) {
        self.lost_end = self.lost_end.max(self.size);
    }

    /// The last loss was reported by an fsync.
    pub(crate) fn reported(&mut self) {
        self.report = Report::Done;
    }

    /// The last loss was reported by a close.
    pub(crate) fn reported_by_close(&mut self) {
        assert!(self.is_lost(), "there is a loss to report");
        self.report = Report::ByClose;
    }

    /// A request set attributes, after which the mode is this. With `dropped` it removed the set-id bits.
    pub(crate) fn mode_set(&mut self, mode: u32, dropped: bool) {
        // Replies may arrive in another order: only the request that dropped the bits shows that they are
        // gone.
        self.has_set_id = set_id_bits(mode) != 0 || self.has_set_id && !dropped;
    }

    /// Replaces size and times that a service sent by those of unsynced writes. Does nothing if the state is
    /// stale.
    fn overlay(&self, attr: &mut Attr) {
        if self.is_stale {
            return;
        }
        attr.size = self.size;
        if let Some(mtime) = self.mtime {
            attr.mtime = mtime;
            attr.ctime = attr.ctime.max(mtime);
        }
    }
}

/// A file's state, shared by the operations on it.
pub(crate) type SharedState = Rc<RefCell<FileState>>;

/// The states of files.
#[derive(Default)]
pub(crate) struct Files(RefCell<HashMap<FileId, SharedState>>);

impl Files {
    /// Returns the state of a file, if there is one.
    pub(crate) fn get(&self, file: FileId) -> Option<SharedState> {
        self.0.borrow().get(&file).cloned()
    }

    /// Returns the state of a file; `make` makes it if there is none.
    pub(crate) fn get_or_make(&self, file: FileId, make: impl FnOnce() -> FileState) -> SharedState {
        self.0.borrow_mut().entry(file).or_insert_with(|| Rc::new(RefCell::new(make()))).clone()
    }

    /// Reads or changes the state of a file, if there is one.
    pub(crate) fn with<T>(&self, file: FileId, act: impl FnOnce(&mut FileState) -> T) -> Option<T> {
        self.0.borrow().get(&file).map(|state| act(&mut state.borrow_mut()))
    }

    /// Replaces size and times that a service sent by those of unsynced writes, if there are some.
    pub(crate) fn overlay(&self, attr: &mut Attr) {
        self.with(attr.file(), |state| state.overlay(attr));
    }

    /// Reads or changes all states.
    pub(crate) fn for_each(&self, mut act: impl FnMut(FileId, &mut FileState)) {
        self.0.borrow().iter().for_each(|(file, state)| act(*file, &mut state.borrow_mut()));
    }

    /// The files whose states are wanted, in order.
    pub(crate) fn select(&self, wanted: impl Fn(&FileState) -> bool) -> Vec<FileId> {
        let files = self.0.borrow();
        let wanted = files.iter().filter(|(_, state)| wanted(&state.borrow()));
        let mut files: Vec<FileId> = wanted.map(|(file, _)| *file).collect();
        files.sort_unstable();
        files
    }

    /// True if there is no state at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// True if there is a state of the file.
    pub(crate) fn contains(&self, file: FileId) -> bool {
        self.0.borrow().contains_key(&file)
    }

    /// Forgets a file that is not open, has no unsynced change and no unreported loss, and is not in use by
    /// an operation.
    pub(crate) fn forget_idle(&self, file: FileId) {
        let mut files = self.0.borrow_mut();
        if files.get(&file).is_some_and(|state| state.borrow().is_idle() && Rc::strong_count(state) == 1) {
            files.remove(&file);
        }
    }
}

#[cfg(test)]
mod tests;
