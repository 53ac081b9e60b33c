//! Files as a target has them in memory: truncate generation, owner, and the blocks that they hold.
//!
//! Invariants:
//! - all chunks of a file that are in memory share one state, which is in memory as long as one of them is;
//! - `held` counts the blocks that the maps of the file name, committed or not, and those reserved for its
//!   dirty blocks;
//! - a file that holds blocks or was truncated has an owner.

use crate::ChunkError;
use crate::rows::{FileRow, MOST_BLOCKS, Owner};
use std::cell::Cell;

/// The truncate generation of a file that is being removed: it is above all others.
pub const REMOVED: u64 = u64::MAX;

/// A file as the sender of a change and the metadata target know it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// The truncate generation as the sender knows it.
    pub truncations: u64,
    /// The owner that the metadata target names. It counts if the target has nothing of the file yet.
    pub owner: Owner,
}

/// The metadata target as it was when it named the owner of a file to a target of another stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AsOf {
    /// The last number in its queue of work: changes of the owner up to there are in what it says.
    pub queued: u64,
    /// The truncate generation of the file.
    pub truncations: u64,
}

/// Gives the state of a file as the sender of a change and the metadata target know it. It is asked when the
/// change begins, which may be long after it was sent: the owner may have been changed meanwhile.
pub trait Knows {
    /// The file as they know it now.
    fn known(&self) -> Known;

    /// The metadata target as it is now, if it is of another stack. One of the target's own stack changes
    /// what it says together with the rows here.
    fn as_of(&self) -> AsOf {
        AsOf::default()
    }
}

impl Knows for Known {
    fn known(&self) -> Known {
        *self
    }
}

/// One file.
#[derive(Debug, Default)]
pub(crate) struct FileState {
    /// None for a file of which only holes were read.
    owner: Cell<Option<Owner>>,
    /// The number of the change that made it the owner; 0 for a file of the target's own stack.
    owner_number: Cell<u64>,
    /// The owner that the metadata target named last with a change.
    named: Cell<Option<Owner>>,
    truncations: Cell<u64>,
    /// The transaction in progress, or one before it, removes the inode.
    is_ended: Cell<bool>,
    /// As committed.
    row: Cell<Option<FileRow>>,
    held: Cell<u64>,
}

impl FileState {
    /// A file with this row, or none.
    pub(crate) fn of_row(row: Option<FileRow>) -> Self {
        Self {
            owner: Cell::new(row.map(|row| row.owner)),
            owner_number: Cell::new(row.map_or(0, |row| row.owner_number)),
            named: Cell::new(None),
            truncations: Cell::new(row.map_or(0, |row| row.truncations)),
            is_ended: Cell::new(false),
            held: Cell::new(row.map_or(0, |row| row.blocks)),
            row: Cell::new(row),
        }
    }

    /// Begins a change that adds blocks. Rejects it like [`FileState::check`]; else the file has an owner
    /// from here on, as long as it stays in memory. A chunk with changes keeps it there.
    pub(crate) fn begin(&self, known: &dyn Knows) -> Result<(), ChunkError> {
        let (known, as_of) = (known.known(), known.as_of());
        // A truncation of which this target had nothing to do was not told to it.
        self.truncate(as_of.truncations);
        self.check(known.truncations)?;
        self.learn(known.owner, as_of.queued);
        Ok(())
    }

    /// Takes the owner that the metadata target names as of a number in its queue, if the target knows none.
    pub(crate) fn learn(&self, owner: Owner, queued: u64) {
        self.named.set(Some(owner));
        if self.owner.get().is_none() {
            self.owner.set(Some(owner));
            self.owner_number.set(queued);
        }
    }

    /// Changes the owner by the change of this number, and returns the one before with its number. None if
    /// the present one is of that change or of a later one.
    pub(crate) fn set_owner_as_of(&self, owner: Owner, number: u64) -> Option<(Option<Owner>, u64)> {
        let is_newer = number > self.owner_number.get();
        is_newer.then(|| (self.owner.replace(Some(owner)), self.owner_number.replace(number)))
    }

    /// The owner was not changed by a change with a number.
    pub(crate) fn undo_owner_as_of(&self, (owner, number): (Option<Owner>, u64)) {
        self.owner.set(owner);
        self.owner_number.set(number);
    }

    /// The owner, if anybody has named it.
    pub(crate) fn owner(&self) -> Option<Owner> {
        self.owner.get()
    }

    /// Changes the owner. Returns the one before, if there was one.
    pub(crate) fn set_owner(&self, owner: Owner) -> Option<Owner> {
        self.owner.replace(Some(owner))
    }

    /// The owner was not changed. Somebody may have begun to write meanwhile, and named the owner as it is.
    pub(crate) fn undo_owner(&self, before: Option<Owner>) {
        self.owner.set(before.or(self.named.get()));
    }

    /// The truncate generation.
    pub(crate) fn truncations(&self) -> u64 {
        self.truncations.get()
    }

    /// Rejects a change that was sent before the file was truncated.
    pub(crate) fn check(&self, sent: u64) -> Result<(), ChunkError> {
        let found = self.truncations();
        if sent < found { Err(ChunkError::Truncated { found, sent }) } else { Ok(()) }
    }

    /// Rejects changes with a lower truncate generation from here on. Returns the generation before.
    pub(crate) fn truncate(&self, generation: u64) -> u64 {
        self.truncations.replace(generation.max(self.truncations()))
    }

    /// A truncation failed: changes with the generation before are accepted again.
    pub(crate) fn undo_truncation(&self, before: u64) {
        assert!(before <= self.truncations(), "a truncation raised {before}");
        self.truncations.set(before);
    }

    /// Sets if the next transaction removes the inode. Only that one may delete the row of a file that was
    /// truncated: a crash before it must find the truncate generation.
    pub(crate) fn set_ended(&self, is_ended: bool) {
        assert!(!is_ended || self.truncations() == REMOVED, "the removal has begun");
        self.is_ended.set(is_ended);
    }

    /// The removal of the file was given up: its row counts.
    pub(crate) fn stays(&self) {
        self.is_ended.set(false);
        if self.truncations() == REMOVED {
            self.truncations.set(self.row.get().map_or(0, |row| row.truncations));
        }
    }

    /// Blocks that the file holds, committed or not, and those reserved for its dirty blocks.
    pub(crate) fn held(&self) -> u64 {
        self.held.get()
    }

    /// A part of the file that held `before` blocks holds `now`.
    pub(crate) fn count(&self, before: u64, now: u64) {
        // A damaged row may name fewer blocks than the maps.
        self.held.set((self.held() + now).saturating_sub(before));
    }

    /// The row as committed.
    pub(crate) fn row(&self) -> Option<FileRow> {
        self.row.get()
    }

    /// The row with the present truncate generation and owner, and with these blocks more and less; none for
    /// a file without a row. Fails if nobody has named the owner.
    pub(crate) fn next_row(&self, allocated: u64, freed: u64) -> Result<Option<FileRow>, ChunkError> {
        let blocks = self.row.get().map_or(0, |row| row.blocks) + allocated;
        if blocks < freed {
            tracing::error!(blocks, freed, "a file gave up more blocks than it holds: `penstock fs check`");
        }
        let blocks = blocks.saturating_sub(freed);
        let truncations = match self.truncations() {
            REMOVED if blocks == 0 && self.is_ended.get() => 0,
            REMOVED => self.row.get().map_or(0, |row| row.truncations),
            truncations => truncations,
        };
        assert!(truncations >> 63 == 0, "truncate generation {truncations} can be read back");
        if blocks == 0 && truncations == 0 {
            return Ok(None);
        }
        let owner = self.owner.get().ok_or_else(|| ChunkError::Invalid("a file without an owner".into()))?;
        let owner_number = self.owner_number.get();
        Ok(Some(FileRow { truncations, blocks: blocks.min(MOST_BLOCKS), owner, owner_number }))
    }

    /// The row was committed.
    pub(crate) fn committed(&self, row: Option<FileRow>) {
        let is_needed = row.is_none_or(|row| row.blocks > 0 || row.truncations > 0);
        assert!(is_needed, "{row:?} says nothing");
        self.row.set(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(file: &FileState, allocated: u64, freed: u64) -> Option<FileRow> {
        file.next_row(allocated, freed).unwrap()
    }

    const OWNER: Owner = Owner { uid: 7, gid: 8, project: 0 };

    #[test]
    fn a_file_has_a_row_while_it_holds_blocks_or_was_truncated() {
        let file = FileState::default();
        assert_eq!(next(&file, 0, 0), None);
        assert!(file.next_row(3, 1).is_err(), "nobody has named its owner");
        file.learn(OWNER, 0);
        file.learn(Owner::default(), 9);
        let row = |truncations, blocks| Some(FileRow { truncations, blocks, owner: OWNER, owner_number: 0 });
        assert_eq!(next(&file, 3, 1), row(0, 2));
        file.committed(row(0, 2));
        assert_eq!((next(&file, 0, 2), next(&file, 0, 9)), (None, None));
        let before = file.truncate(4);
        assert_eq!((before, next(&file, 0, 2)), (0, row(4, 0)));
        assert_eq!(file.truncate(1), 4, "it goes forwards");
        assert_eq!(file.truncations(), 4);
        file.undo_truncation(before);
        assert_eq!(next(&file, 0, 0), row(0, 2));
    }

    #[test]
    fn a_file_that_is_removed_takes_no_change_and_leaves_no_row() {
        let row = FileRow { truncations: 3, blocks: 5, owner: OWNER, owner_number: 0 };
        let file = FileState::of_row(Some(row));
        assert_eq!((file.held(), file.truncations()), (5, 3));
        assert!(file.check(2).is_err() && file.check(3).is_ok());
        file.truncate(REMOVED);
        assert!(file.check(u64::MAX - 1).is_err());
        assert_eq!(next(&file, 0, 2), Some(FileRow { blocks: 3, ..row }), "a step of the removal");
        assert_eq!(next(&file, 0, 5), Some(FileRow { blocks: 0, ..row }), "the inode is still there");
        file.set_ended(true);
        assert_eq!(next(&file, 0, 5), None);
        file.stays();
        assert_eq!(file.truncations(), 3);
    }

    #[test]
    fn held_blocks_are_counted_by_differences() {
        let file =
            FileState::of_row(Some(FileRow { truncations: 0, blocks: 5, owner: OWNER, owner_number: 0 }));
        file.count(0, 3);
        file.count(2, 0);
        assert_eq!(file.held(), 6);
        file.count(9, 0);
        assert_eq!(file.held(), 0, "more than the row named");
    }

    #[test]
    fn of_changes_of_the_owner_the_one_with_the_highest_number_counts() {
        let of = |uid| Owner { uid, ..OWNER };
        let file = FileState::default();
        file.learn(of(1), 5);
        assert_eq!(file.set_owner_as_of(of(2), 5), None, "what was named is as of that change");
        let before = file.set_owner_as_of(of(3), 6).unwrap();
        assert_eq!((next(&file, 1, 0).map(|row| (row.owner, row.owner_number))), Some((of(3), 6)));
        file.undo_owner_as_of(before);
        assert_eq!((next(&file, 1, 0).map(|row| (row.owner, row.owner_number))), Some((of(1), 5)));
    }

    /// Regression: a change of the owner that failed took the owner away from a first write beside it.
    #[test]
    fn an_owner_that_was_not_changed_is_the_one_before_or_the_one_that_a_write_named() {
        let other = Owner { uid: 9, ..OWNER };
        let file = FileState::default();
        let before = file.set_owner(other);
        file.undo_owner(before);
        assert!(file.next_row(1, 0).is_err());
        let before = file.set_owner(other);
        file.learn(OWNER, 0);
        assert_eq!(next(&file, 1, 0).map(|row| row.owner), Some(other));
        file.undo_owner(before);
        assert_eq!(next(&file, 1, 0).map(|row| row.owner), Some(OWNER));
        let before = file.set_owner(other);
        file.undo_owner(before);
        assert_eq!(next(&file, 1, 0).map(|row| row.owner), Some(OWNER));
    }
}
