//! Drives that are as they were a while ago: a snapshot that was taken back, or a copy that stands where the drive was.
//!
//! They lack all that was written since, and the table says that it is there. So the descriptor names for each member an epoch of
//! which its own superblock is at least, whether it counts or is lost, and so does the root for all that count: every opening
//! writes the superblocks of all members before its root. A member whose superblock is older is such a drive. A copy from within
//! the present opening is not told: its strips do not verify, which reads and scrubs find.
//!
//! Where stripes would be lost without such drives and those that are away, the opening ends before it writes: its redo would make
//! what the right drives have out of date, and bringing them back would not help. An administrator may give up what only they have.
//!
//! Invariant: such a drive is recorded as stale before anything is written past it, and is neither read nor written before the log
//! says that nothing on it counts. A power cut before that leaves its superblock as it is, and the next opening finds the
//! same; the right drive, if it is there then, is brought up to date like one that was away.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::descriptor::Descriptor;
use crate::format::root::Root;
use crate::notes::Note;
use crate::open::Lacking;
use penstock_base::Epoch;
use penstock_drive::Slice;

/// A member that is left out, with its slice.
pub(crate) type LeftOut = (usize, Slice);

impl Array {
    /// Takes the slices of members away that are outdated, and returns them. Where what they lack is given up and more would be missing
    /// than the array survives, all stay: what is old on them does not verify.
    pub(crate) async fn leave_out_outdated(&self, root: &Root, stale: u64, lacking: Lacking) -> Vec<LeftOut> {
        let (mut found, mut missing) = (Vec::new(), 0);
        for position in 0..self.geo.strips() {
            let is_stale = stale & 1 << position != 0;
            let least = root.least_epoch(position, &self.desc.borrow().members[position], is_stale);
            let (mut is_missing, slice) = (is_stale, self.member_slice(position));
            match slice {
                None => is_missing = true,
                Some(slice) if self.epoch_on(&slice).await < least => {
                    tracing::warn!(
                        array = self.name,
                        position,
                        drive = %slice.drive().id(),
                        path = slice.drive().path(),
                        "the drive is as it was before an earlier start of the array"
                    );
                    found.push((position, slice));
                    is_missing = true;
                }
                Some(_) => {}
            }
            missing += usize::from(is_missing);
        }
        if lacking == Lacking::Accept && missing > self.geo.m {
            found.clear();
        }
        for (position, _) in &found {
            let member = &mut self.members.borrow_mut()[*position];
            member.remove_slice();
            member.stale = true;
        }
        found
    }

    /// Refuses to go on where stripes would be lost without the drives that are away or left out.
    pub(crate) fn check_loss(&self, left_out: &[LeftOut]) -> Result<(), ArrayError> {
        let (desc, members) = (self.desc.borrow(), self.members.borrow());
        let gone: Vec<usize> = (0..members.len()).filter(|at| members[*at].reachable().is_none()).collect();
        let mask = gone.iter().fold(0, |mask, position| mask | 1 << position);
        let stripes = self.table.borrow().lost_without(mask, self.geo.m);
        if stripes == 0 {
            return Ok(());
        }
        let name = |position: &usize| {
            let how = match left_out.iter().find(|(at, _)| at == position) {
                Some((_, slice)) => format!("as it was in the past, at {}", slice.drive().path()),
                None => "not here".to_owned(),
            };
            format!("drive {} ({how})", desc.members[*position].drive)
        };
        let which = gone.iter().map(name).collect::<Vec<_>>().join(", ");
        Err(ArrayError::WouldLose { name: self.name.clone(), stripes, which })
    }

    /// The owner's epoch when a drive last took its superblock.
    async fn epoch_on(&self, slice: &Slice) -> Epoch {
        let superblock = slice.drive().superblock().await;
        let own = superblock.arrays.iter().find(|entry| entry.array == self.id);
        own.and_then(|entry| Descriptor::decode(&entry.descriptor).ok()).map_or(Epoch(0), |found| found.epoch)
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
