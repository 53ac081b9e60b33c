//! Superblocks of an array's drives: putting a descriptor into one, and those that a drive did not take yet.

use crate::format::descriptor::Descriptor;
use crate::place::{Position, Positions};
use penstock_drive::superblock::{ArrayEntry, SliceEntry, Superblock};
use std::cell::Cell;

/// Puts an array's descriptor and the slice of one of its members into a superblock.
pub(crate) fn put_descriptor(superblock: &mut Superblock, descriptor: &Descriptor, position: Position) {
    let member = &descriptor.members[position.index()];
    let (array, revision) = (descriptor.array, descriptor.revision);
    superblock.arrays.retain(|entry| entry.array != array);
    superblock.arrays.push(ArrayEntry { array, revision, descriptor: descriptor.encode() });
    superblock.slices.retain(|slice| slice.array != array);
    superblock.slices.push(SliceEntry {
        array,
        member: position.number(),
        generation: member.generation,
        offset: member.offset,
        len: member.len,
    });
}

/// Members that count, or may count, and did not take their superblock. Each is owed one until it takes it,
/// or its drive is gone.
#[derive(Default)]
pub(crate) struct OwedSuperblocks(Cell<Positions>);

impl OwedSuperblocks {
    /// Adds a member. Returns false if it was owed one before.
    pub(crate) fn add(&self, position: Position) -> bool {
        let owed = self.0.get();
        self.0.set(owed.with(Positions::one(position)));
        !owed.contains(position)
    }

    /// A member took its superblock.
    pub(crate) fn remove(&self, position: Position) {
        self.0.set(self.0.get().without(Positions::one(position)));
    }

    /// The members.
    pub(crate) fn all(&self) -> Positions {
        self.0.get()
    }
}
