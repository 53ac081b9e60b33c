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
use crate::ownership::{AcceptedLoss, Claim};
use crate::replay::Redo;
use crate::strip::{Erased, Part};
use penstock_base::Epoch;
use penstock_drive::{Class, Io, Slice};
use std::time::Duration;

/// A member that is left out, with its slice.
pub(crate) type LeftOut = (usize, Slice);

/// Stripes that an opening reads to see whether they are lost whatever comes back; where there are more it does not go on.
const MOST_READ: u64 = 1024;
/// No further one is read after this time.
const LONGEST_LOOK: Duration = Duration::from_secs(60);
const IO: Io = Io::new(Class::Meta, "open.stripe");

impl Array {
    /// Takes the slices of members away that are outdated, and returns them. Where what they lack is given up and more would be missing
    /// than the array survives, all stay: what is old on them does not verify. Returns as well what the claim is to say of those.
    pub(crate) async fn leave_out_outdated(
        &self,
        root: &Root,
        claim: &Claim,
        stale: u64,
        lacking: Lacking,
    ) -> (Vec<LeftOut>, AcceptedLoss) {
        let mut accepted = claim.accepted;
        if root.epoch >= claim.epoch {
            accepted.has_root(root.epoch);
        }
        let (mut found, mut missing) = (Vec::new(), 0);
        for position in 0..self.geo.strips() {
            let is_stale = stale & 1 << position != 0;
            let least = root.least_epoch(position, &self.desc.borrow().members[position], is_stale);
            let (mut is_missing, slice) = (is_stale, self.member_slice(position));
            if let Some(slice) = slice {
                let epoch = self.epoch_on(&slice).await;
                if epoch < least || accepted.may_be_old(position, epoch) {
                    tracing::warn!(
                        array = self.name,
                        position,
                        drive = %slice.drive().id(),
                        path = slice.drive().path(),
                        "the drive is as it was before an earlier start of the array"
                    );
                    found.push((position, slice));
                    is_missing = true;
                } else {
                    // The right drive is back, or it was never away.
                    accepted.is_found(position, self.next_epoch(claim));
                }
            } else {
                is_missing = true;
            }
            missing += usize::from(is_missing);
        }
        let used = match lacking == Lacking::Accept && missing > self.geo.m {
            true => found.drain(..).fold(0, |used, (position, _)| used | 1 << position),
            false => 0,
        };
        accepted.uses(used, self.next_epoch(claim));
        for (position, _) in &found {
            let member = &mut self.members.borrow_mut()[*position];
            member.remove_slice();
            member.stale = true;
        }
        (found, accepted)
    }

    /// Members whose drives are away, do not take I/O, or were left out, as a bit mask.
    pub(crate) fn gone(&self) -> u64 {
        let members = self.members.borrow();
        let gone = members.iter().enumerate().filter(|(_, member)| member.reachable().is_none());
        gone.fold(0, |mask, (position, _)| mask | 1 << position)
    }

    /// Refuses to go on where stripes would be lost without the drives that are away or left out.
    pub(crate) async fn check_loss(&self, left_out: &[LeftOut], redo: &Redo) -> Result<(), ArrayError> {
        let gone = self.gone();
        let mut stripes = self.table.borrow().lost_without(gone, self.geo.m);
        if (1..=MOST_READ).contains(&stripes) {
            stripes -= self.lost_anyway(gone, redo).await;
        }
        if stripes == 0 {
            return Ok(());
        }
        let desc = self.desc.borrow();
        let name = |position: usize| {
            let how = match left_out.iter().find(|(at, _)| *at == position) {
                Some((_, slice)) => format!("as it was in the past, at {}", slice.drive().path()),
                None => "not here".to_owned(),
            };
            format!("drive {} ({how})", desc.members[position].drive)
        };
        let which =
            (0..self.geo.strips()).filter(|at| gone & 1 << at != 0).map(name).collect::<Vec<_>>().join(", ");
        Err(ArrayError::WouldLose { name: self.name.clone(), stripes, which })
    }

    /// Of the stripes that would be lost without `gone` members, those that cannot be read with them either.
    async fn lost_anyway(&self, gone: u64, redo: &Redo) -> u64 {
        let (mut lost, mut from, until) = (0, 0, self.env.now() + LONGEST_LOOK);
        while self.env.now() < until {
            let next = self.table.borrow().find_lost_without(from, gone, self.geo.m);
            let Some(stripe) = next else { break };
            // What the log writes again may be torn on the drives.
            lost += u64::from(!redo.contains_key(&stripe) && !self.may_be_read(stripe, gone).await);
            from = stripe + 1;
        }
        lost
    }

    /// True if some of a stripe could be read with the `gone` members here, as they were last. A strip that cannot be read now may be
    /// right; one that does not verify is not.
    async fn may_be_read(&self, stripe: u64, gone: u64) -> bool {
        let columns = 0..self.geo.strip_blocks;
        let (away, here): (Vec<usize>, Vec<usize>) = {
            let valid = self.geo.all_strips() & !self.stale_strips(stripe);
            let positions = (0..self.geo.strips()).filter(|at| valid & 1 << at != 0);
            positions.partition(|at| gone & 1 << at != 0)
        };
        let parts = self.read_parts(stripe, &here, &columns, IO).await;
        columns.into_iter().any(|column| {
            let may_be_right = |part: &&Result<Part, Erased>| match part {
                Ok(_) | Err(Erased::Unreachable) => true,
                Err(Erased::Strip) => false,
                Err(Erased::Blocks { bad, .. }) => !bad.contains(&(column as usize)),
            };
            away.len() + parts.values().filter(may_be_right).count() >= self.geo.k
        })
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
