//! Drives that are as they were a while ago: a snapshot that was taken back, or a copy that stands where the drive was.
//!
//! What was written since is not on them, and the table says that it is. Every opening writes the superblocks of all members
//! before its root, and the root names the opening's epoch, so a member that counts and whose own superblock is of an earlier one
//! is such a drive. A copy from within the present opening is not told: its strips do not verify, which reads and scrubs find.
//!
//! Invariant: such a drive is neither read nor written, and not recorded as stale either, until the log says that nothing on it
//! counts. A power cut before that leaves its superblock as it is, and the next opening finds the same.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::descriptor::Descriptor;
use crate::format::root::Root;
use crate::notes::Note;
use penstock_base::Epoch;
use penstock_drive::Slice;

/// A member that is left out, with its slice.
type LeftOut = (usize, Slice);

impl Array {
    /// Takes the slices of members away that count and are outdated, and returns them. Where more would be missing than the
    /// array survives, all stay.
    pub(crate) async fn leave_out_outdated(&self, root: &Root, stale: u64) -> Vec<LeftOut> {
        let (mut found, mut missing) = (Vec::new(), 0);
        for position in 0..self.geo.strips() {
            let Some(slice) = self.member_slice(position).filter(|_| stale & 1 << position == 0) else {
                missing += 1;
                continue;
            };
            let epoch = self.epoch_on(&slice).await;
            if epoch < root.epoch && root.behind & 1 << position == 0 {
                tracing::error!(
                    array = self.name,
                    position,
                    drive = %slice.drive().id(),
                    path = slice.drive().path(),
                    "the drive is as it was before the last start of the array"
                );
                found.push((position, slice));
            }
        }
        if missing + found.len() > self.geo.m && !found.is_empty() {
            tracing::error!(
                array = self.name,
                "no further member can be missed: these drives are used as they are"
            );
            found.clear();
        }
        for (position, _) in &found {
            self.members.borrow_mut()[*position].remove_slice();
            self.outdated.set(self.outdated.get() | 1 << position);
        }
        self.note_outdated();
        found
    }

    /// The owner's epoch when a drive last took its superblock.
    async fn epoch_on(&self, slice: &Slice) -> Epoch {
        let superblock = slice.drive().superblock().await;
        let own = superblock.arrays.iter().find(|entry| entry.array == self.id);
        own.and_then(|entry| Descriptor::decode(&entry.descriptor).ok()).map_or(Epoch(0), |found| found.epoch)
    }

    /// They count as stale whatever is recorded.
    pub(crate) fn note_outdated(&self) {
        let outdated = self.outdated.get();
        for (position, member) in self.members.borrow_mut().iter_mut().enumerate() {
            member.stale |= outdated & 1 << position != 0;
        }
    }

    /// Has members that were left out made again from the others.
    pub(crate) async fn take_back_outdated(&self, left_out: Vec<LeftOut>) -> Result<(), ArrayError> {
        for (position, slice) in left_out {
            self.note(Note::Outdated { position });
            self.put_member(position, slice).await?;
        }
        Ok(())
    }
}
