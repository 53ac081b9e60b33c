//! Changes of who belongs to the array: a member that fails, one that is replaced, one that is whole again.
//!
//! Every change is one revision of the claim: recorded in coordination by compare-and-swap first, then copied to the
//! superblocks of all reachable members, then acted on. A power cut between the two leaves coordination ahead, which
//! the next opening takes as the truth.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::descriptor::Descriptor;
use crate::format::record::Entry;
use crate::ownership::{Claim, ClaimError, Generations};
use futures_util::future::join_all;
use penstock_drive::superblock::{ArrayEntry, SliceEntry, Superblock};
use penstock_drive::{DriveError, DriveHandle, Slice};
use std::rc::Rc;

/// Attempts to have other drives name a new one in their superblocks.
const MOST_ATTEMPTS: u32 = 20;
const NOT_NAMED: &str = "no other drive takes the superblock that names the new one";

/// Puts an array's descriptor and the slice of one of its members into a superblock.
pub(crate) fn put_descriptor(superblock: &mut Superblock, descriptor: &Descriptor, position: usize) {
    let member = &descriptor.members[position];
    let (array, revision) = (descriptor.array, descriptor.revision);
    superblock.arrays.retain(|entry| entry.array != array);
    superblock.arrays.push(ArrayEntry { array, revision, descriptor: descriptor.encode() });
    superblock.slices.retain(|slice| slice.array != array);
    superblock.slices.push(SliceEntry {
        array,
        member: position as u16,
        generation: member.generation,
        offset: member.offset,
        len: member.len,
    });
}

/// A change that is recorded.
pub(crate) struct Recorded {
    /// Members whose superblock could not be written.
    pub(crate) failed: Vec<usize>,
    /// So many superblocks say it that one of them is left whoever may be lost.
    is_known: bool,
}

impl Array {
    fn claim_error(&self, error: ClaimError) -> ArrayError {
        match error {
            ClaimError::Changed(found) if found.epoch > self.claim.get().epoch => {
                ArrayError::Fenced { array: self.id, found: found.epoch.0, mine: self.claim.get().epoch.0 }
            }
            other => ArrayError::Ownership { array: self.id, why: other.to_string() },
        }
    }

    /// Records `change` of the descriptor: coordination, then superblocks. Call under the reconfiguration lock.
    /// Returns members whose superblock could not be written.
    pub(crate) async fn record(
        &self,
        change: impl FnOnce(&mut Descriptor),
    ) -> Result<Vec<usize>, ArrayError> {
        self.record_then(change, || ()).await.map(|recorded| recorded.failed)
    }

    /// The same, with something that is done in the same step in which the change counts, before superblocks are written.
    pub(crate) async fn record_then(
        &self,
        change: impl FnOnce(&mut Descriptor),
        then: impl FnOnce(),
    ) -> Result<Recorded, ArrayError> {
        // What fails once an array has stopped says nothing of drives that the next opening could not find out, and nobody asks any more
        // how many it can lose.
        if self.closed.get() {
            return Err(ArrayError::Closed);
        }
        let mut next = self.desc.borrow().clone();
        change(&mut next);
        let claim = self.claim.get();
        next.revision = next.revision.max(claim.revision) + 1;
        if next.epoch == claim.epoch {
            // As long as no root of this opening is durable, drives from the past are told by the epochs from before it.
            let as_they_are = match next.root_epoch == next.epoch {
                true => 0,
                false => self.accepted.get().used(),
            };
            let written = self.written.get() & !as_they_are;
            let written = next.members.iter_mut().enumerate().filter(|(at, _)| written & 1 << at != 0);
            written.for_each(|(_, member)| member.epoch = next.epoch);
        }
        let claimed = Claim {
            epoch: next.epoch,
            revision: next.revision,
            stale: next.stale(),
            accepted: self.accepted.get(),
            generations: Generations::of(&next.members),
            root_epoch: next.root_epoch,
        };
        assert!(claimed.root_epoch >= claim.root_epoch, "a claim goes forwards");
        self.ownership.swap(self.id, claim, claimed).await.map_err(|error| self.claim_error(error))?;
        self.claim.set(claimed);
        *self.desc.borrow_mut() = next.clone();
        for (member, entry) in self.members.borrow_mut().iter_mut().zip(&next.members) {
            member.stale = entry.stale;
        }
        then();
        // All at once: one drive that hangs delays the record by its own deadline and not by the sum.
        let mut waiting: Vec<usize> = (0..next.members.len()).collect();
        let (mut failed, mut written) = (Vec::new(), 0);
        // Whoever may be lost from here on, one that is left says what is recorded.
        let stale = self.members.borrow().iter().filter(|member| member.stale).count();
        let enough = self.geo.m.saturating_sub(stale) + 1;
        loop {
            let writes = waiting.iter().map(|position| self.write_superblock(*position));
            let results = join_all(writes).await;
            let mut full = Vec::new();
            for (position, result) in waiting.iter().copied().zip(results) {
                match result {
                    Ok(true) if !next.members[position].stale => written += 1,
                    Ok(_) => {}
                    // A full host is no fault of the drive.
                    Err(DriveError::HostFull) => full.push(position),
                    Err(error) => {
                        tracing::warn!(array = self.name, position, %error, "superblock not written");
                        failed.push(position);
                    }
                }
            }
            waiting = full;
            if waiting.is_empty() || written >= enough || self.suspend("host full".to_owned()).await.is_err()
            {
                break;
            }
        }
        waiting.into_iter().for_each(|position| _ = self.mending.owe_superblock(position));
        self.resume();
        Ok(Recorded { failed, is_known: written >= enough })
    }

    /// Writes a member's superblock as the descriptor is by now. Returns false where there is none to write.
    pub(crate) async fn write_superblock(&self, position: usize) -> Result<bool, DriveError> {
        let Some(slice) = self.member_slice(position) else { return Ok(false) };
        let put = |superblock: &mut Superblock| put_descriptor(superblock, &self.desc.borrow(), position);
        slice.drive().update_superblock(put).await?;
        self.written.set(self.written.get() | 1 << position);
        Ok(true)
    }

    /// The same; where the host is full it is owed. Returns false where the drive does not take it.
    pub(crate) async fn write_or_owe_superblock(&self, position: usize) -> bool {
        match self.write_superblock(position).await {
            Ok(_) => self.mending.superblock_is_written(position),
            Err(DriveError::HostFull) => _ = self.mending.owe_superblock(position),
            Err(error) => {
                tracing::warn!(array = self.name, position, %error, "superblock not written");
                return false;
            }
        }
        true
    }

    /// Takes the drive of a member out of service, for all arrays that use it. Returns when that is recorded.
    pub async fn fail_member(&self, position: usize, why: &str) -> Result<(), ArrayError> {
        if let Some(slice) = self.member_slice(position) {
            self.roster.take_out(slice.drive(), why).map_err(ArrayError::Suspended)?;
        }
        self.record_lost().await
    }

    /// A write or flush of a member failed that was begun under `life`. Returns when the member is recorded as stale; an
    /// error `Suspended` when no further member may be lost. What an earlier life did is no fault of the present one.
    pub(crate) async fn fail_life(&self, position: usize, life: u64, why: &str) -> Result<(), ArrayError> {
        if self.closed.get() {
            return Err(ArrayError::Closed);
        }
        if let Some(slice) = self.member_slice(position)
            && self.life(position) == life
        {
            self.roster.failed(slice.drive(), why).await.map_err(ArrayError::Suspended)?;
        }
        self.record_lost().await
    }

    /// Records every member whose drive is gone as stale. Waits while coordination cannot record. An array that is not taken over
    /// yet does so when it is.
    pub(crate) async fn record_lost(&self) -> Result<(), ArrayError> {
        let _one_at_a_time = self.reconfig.lock().await;
        if !self.owned.get() {
            return Ok(());
        }
        loop {
            let lost = self.newly_lost();
            if lost.is_empty() {
                return Ok(());
            }
            match self.record_stale(&lost).await {
                Ok(recorded) => {
                    self.resume();
                    self.want_mending();
                    self.fail_superblocks(recorded.failed).await;
                }
                Err(ArrayError::Ownership { why, .. }) => self.suspend(why).await?,
                Err(error) => return Err(error),
            }
        }
    }

    fn newly_lost(&self) -> Vec<usize> {
        let members = self.members.borrow();
        (0..members.len()).filter(|position| members[*position].is_newly_lost()).collect()
    }

    /// Records members as stale, or once more what is recorded. Call under the reconfiguration lock.
    async fn record_stale(&self, lost: &[usize]) -> Result<Recorded, ArrayError> {
        // A drive may be latched by who knows nothing of arrays.
        lost.iter().for_each(|position| self.note_latched(*position));
        if !lost.is_empty() {
            tracing::warn!(array = self.name, members = ?lost, "members recorded as stale");
        }
        let change = |next: &mut Descriptor| lost.iter().for_each(|at| next.members[*at].stale = true);
        self.record_then(change, || ()).await
    }

    /// Judges drives that did not take a superblock. Where none may be lost they stay: the record that counts is made,
    /// and other drives carry a copy; theirs is written when they take it.
    async fn fail_superblocks(&self, positions: Vec<usize>) {
        if self.closed.get() {
            return;
        }
        let judge = async |position: usize| {
            let slice = self.member_slice(position)?;
            Some((position, self.roster.failed(slice.drive(), "superblock not written").await.err()?))
        };
        for (position, why) in join_all(positions.into_iter().map(judge)).await.into_iter().flatten() {
            if self.mending.owe_superblock(position) {
                tracing::error!(array = self.name, position, why, "a superblock is out of date");
            }
        }
    }

    /// Puts a blank slice in a member's place. Everything on it counts as stale until rebuilt.
    pub async fn replace_member(
        &self,
        position: usize,
        drive: &Rc<DriveHandle>,
        slice: Slice,
    ) -> Result<(), ArrayError> {
        // Before anything changes: one that takes none takes nobody's place.
        drive.update_superblock(|_| ()).await.map_err(|error| {
            ArrayError::Invalid(format!("drive {} does not take its superblock: {error}", drive.id()))
        })?;
        if !self.members.borrow()[position].stale {
            self.fail_member(position, "replaced by an administrator").await?;
        }
        self.put_member(position, slice).await
    }

    /// Takes a member's slice as one on which nothing counts.
    pub(crate) async fn put_member(&self, position: usize, slice: Slice) -> Result<(), ArrayError> {
        // No strip that is on its way to the old slice counts as written once the entry is queued.
        self.members.borrow_mut()[position].remove_slice();
        self.append(Entry::MemberReset { member: position as u16 }, Vec::new()).await?;
        let _one_at_a_time = self.reconfig.lock().await;
        let change = |next: &mut Descriptor| {
            let member = &mut next.members[position];
            member.drive = slice.drive().id();
            member.offset = slice.offset();
            member.len = slice.len();
            member.generation += 1;
            member.stale = true;
            // The drive that was in this place before, if it comes back, lacks all that is rebuilt from here on. Where the power is cut before
            // the slice's own superblock says so, it is made again.
            member.epoch = next.epoch;
            let mut accepted = self.accepted.get();
            accepted.is_made_again(position);
            self.accepted.set(accepted);
        };
        // A slice that a start might not find recorded is not used: what it gets would be taken for the old drive's.
        let mut failed = self.record_until_known(change).await?;
        self.members.borrow_mut()[position].put_slice(slice);
        if !self.write_or_owe_superblock(position).await {
            failed.push(position);
        }
        drop(_one_at_a_time);
        // It is in force from here on, whatever becomes of the drive.
        self.want_mending();
        self.fail_unwritten(failed).await
    }

    /// Records a change, and once more while too few superblocks say it; not for ever, because whoever fails or replaces a drive
    /// waits. Call under the reconfiguration lock. Returns members whose superblock could not be written.
    async fn record_until_known(
        &self,
        change: impl FnOnce(&mut Descriptor),
    ) -> Result<Vec<usize>, ArrayError> {
        let (mut recorded, mut attempts) = (self.record_then(change, || ()).await?, 1);
        while !recorded.is_known {
            self.fail_superblocks(recorded.failed).await;
            if attempts == MOST_ATTEMPTS {
                // The member stays lost, and a start finds who it is.
                self.resume();
                return Err(ArrayError::Suspended(NOT_NAMED.to_owned()));
            }
            self.suspend(NOT_NAMED.to_owned()).await?;
            recorded = self.record_stale(&self.newly_lost()).await?;
            attempts += 1;
        }
        Ok(recorded.failed)
    }

    /// A member that was rebuilt in a life counts again.
    pub(crate) async fn activate_member(&self, position: usize, life: u64) -> Result<(), ArrayError> {
        let _one_at_a_time = self.reconfig.lock().await;
        if self.member_slice(position).is_none() || self.life(position) != life {
            return Err(ArrayError::Invalid("the member went away".into()));
        }
        tracing::info!(array = self.name, position, "member is whole again");
        // Its copy of the log is from before it was stale: it leaves the carriers before it counts again. Two records,
        // because a cut may leave coordination ahead of the superblocks, and only those name the carriers.
        let mut failed = Vec::new();
        if self.desc.borrow().carriers.contains(&(position as u16)) {
            let leave = |next: &mut Descriptor| {
                next.carriers.retain(|carrier| usize::from(*carrier) != position);
                next.carriers_epoch += 1;
            };
            let recorded = self.record_then(leave, || ()).await?;
            failed = recorded.failed;
            if !recorded.is_known {
                drop(_one_at_a_time);
                self.fail_unwritten(failed).await?;
                let why = "no superblock says yet that its copy of the log is old".to_owned();
                return Err(ArrayError::Suspended(why));
            }
        }
        failed.extend(self.record(|next| next.members[position].stale = false).await?);
        drop(_one_at_a_time);
        self.want_mending();
        self.fail_unwritten(failed).await
    }

    /// Fails members that did not take a superblock.
    pub(crate) async fn fail_unwritten(&self, positions: Vec<usize>) -> Result<(), ArrayError> {
        if positions.is_empty() {
            return Ok(());
        }
        self.fail_superblocks(positions).await;
        self.record_lost().await
    }
}
