//! Changes of who belongs to the array: a member that fails, one that is replaced, one that is whole again, and the
//! set of carriers.
//!
//! Every change is one revision of the claim: recorded in coordination by compare-and-swap first, then copied to the
//! superblocks of all reachable members, then acted on. A power cut between the two leaves coordination ahead, which
//! the next opening takes as the truth.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::descriptor::Descriptor;
use crate::format::record::Entry;
use crate::ownership::{Claim, ClaimError};
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, BufMut};
use penstock_drive::superblock::{ArrayEntry, SliceEntry, Superblock};
use penstock_drive::{Class, DriveError, DriveHandle, Io, Slice};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const IO: Io = Io::new(Class::Rebuild, "carrier.copy");
const COPY_BYTES: u64 = 1 << 20;
/// Until another carrier is looked for again, after one could not be made.
pub(crate) const MEND_AGAIN: Duration = Duration::from_secs(10);

/// The search for carriers in place of lost ones.
#[derive(Debug, Default)]
pub(crate) struct Mending {
    wanted: Cell<bool>,
    /// Nothing is copied before this time.
    not_before: Cell<Duration>,
    /// Members that did not take a copy: others come first.
    refused: Cell<u64>,
}

impl Mending {
    /// Whether somebody asked for it and it is not done.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.get()
    }

    fn is_done(&self) {
        self.wanted.set(false);
        self.refused.set(0);
    }

    fn failed(&self, position: usize, now: Duration) {
        self.refused.set(self.refused.get() | 1 << position);
        self.not_before.set(now + MEND_AGAIN);
    }
}

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
        self.record_then(change, || ()).await
    }

    /// The same, with something that is done in the same step in which the change counts, before superblocks are written.
    async fn record_then(
        &self,
        change: impl FnOnce(&mut Descriptor),
        then: impl FnOnce(),
    ) -> Result<Vec<usize>, ArrayError> {
        let mut next = self.desc.borrow().clone();
        change(&mut next);
        let claim = self.claim.get();
        next.revision = next.revision.max(claim.revision) + 1;
        let stale =
            (0..).zip(&next.members).filter(|(_, member)| member.stale).map(|(at, _)| 1u64 << at).sum();
        let claimed = Claim { epoch: next.epoch, revision: next.revision, stale };
        self.ownership.swap(self.id, claim, claimed).await.map_err(|error| self.claim_error(error))?;
        self.claim.set(claimed);
        *self.desc.borrow_mut() = next.clone();
        for (member, entry) in self.members.borrow_mut().iter_mut().zip(&next.members) {
            member.stale = entry.stale;
        }
        then();
        // All at once: one drive that hangs delays the record by its own deadline and not by the sum.
        let writes = (0..next.members.len()).filter_map(|position| {
            let (slice, next) = (self.member_slice(position)?, &next);
            Some(async move {
                let put = |superblock: &mut Superblock| put_descriptor(superblock, next, position);
                (position, slice.drive().update_superblock(put).await)
            })
        });
        let mut failed = Vec::new();
        for (position, result) in join_all(writes).await {
            if let Err(error) = result {
                tracing::warn!(array = self.name, position, %error, "superblock not written");
                failed.push(position);
            }
        }
        Ok(failed)
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
        if let Some(slice) = self.member_slice(position)
            && self.life(position) == life
        {
            self.roster.failed(slice.drive(), why).await.map_err(ArrayError::Suspended)?;
        }
        self.record_lost().await
    }

    /// Records every member whose drive is gone as stale. Waits while coordination cannot record.
    pub(crate) async fn record_lost(&self) -> Result<(), ArrayError> {
        let _one_at_a_time = self.reconfig.lock().await;
        loop {
            let lost: Vec<usize> = {
                let members = self.members.borrow();
                (0..members.len()).filter(|position| members[*position].is_newly_lost()).collect()
            };
            if lost.is_empty() {
                return Ok(());
            }
            // A drive may be latched by who knows nothing of arrays.
            lost.iter().for_each(|position| self.note_latched(*position));
            tracing::warn!(array = self.name, members = ?lost, "members recorded as stale");
            match self.record(|next| lost.iter().for_each(|at| next.members[*at].stale = true)).await {
                Ok(failed) => {
                    self.resume();
                    self.want_mending();
                    self.fail_superblocks(failed).await;
                }
                Err(ArrayError::Ownership { why, .. }) => self.suspend(why).await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Judges drives that did not take a superblock. Where none may be lost they stay: the record that counts is made,
    /// and other drives carry a copy.
    async fn fail_superblocks(&self, positions: Vec<usize>) {
        let drives: Vec<_> = positions.iter().filter_map(|position| self.member_slice(*position)).collect();
        let verdicts = drives.iter().map(|slice| self.roster.failed(slice.drive(), "superblock not written"));
        for why in join_all(verdicts).await.into_iter().filter_map(Result::err) {
            tracing::error!(array = self.name, why, "a superblock is out of date");
        }
    }

    /// Lets the log's writer and the resync task look at the members.
    pub(crate) fn want_mending(&self) {
        self.mending.wanted.set(true);
        self.mending.not_before.set(Duration::ZERO);
        self.log.wake.notify_one();
        self.resync_wake.notify_one();
    }

    /// Puts a blank slice in a member's place. Everything on it counts as stale until rebuilt.
    pub async fn replace_member(
        &self,
        position: usize,
        drive: &Rc<DriveHandle>,
        slice: Slice,
    ) -> Result<(), ArrayError> {
        if !self.members.borrow()[position].stale {
            self.fail_member(position, "replaced by an administrator").await?;
        }
        // No strip that is on its way to the old slice counts as written once the entry is queued.
        self.members.borrow_mut()[position].remove_slice();
        self.append(Entry::MemberReset { member: position as u16 }, Vec::new()).await?;
        let _one_at_a_time = self.reconfig.lock().await;
        let change = |next: &mut Descriptor| {
            let member = &mut next.members[position];
            member.drive = drive.id();
            member.offset = slice.offset();
            member.len = slice.len();
            member.generation += 1;
            member.stale = true;
        };
        // A slice that is not recorded is not used: what it gets would be taken for the old drive's.
        let put = || self.members.borrow_mut()[position].put_slice(slice.clone());
        let failed = self.record_then(change, put).await?;
        if failed.contains(&position) {
            return Err(ArrayError::Invalid(format!("drive {} does not take its superblock", drive.id())));
        }
        self.want_mending();
        Ok(())
    }

    /// A rebuilt member counts again.
    pub(crate) async fn activate_member(&self, position: usize) -> Result<(), ArrayError> {
        let _one_at_a_time = self.reconfig.lock().await;
        if self.member_slice(position).is_none() {
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
            failed = self.record(leave).await?;
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

    /// The carriers there should be: those that still serve, and then the first active members, last those that did not
    /// take a copy.
    fn wanted_carriers(&self) -> Vec<usize> {
        let members = self.members.borrow();
        let good = |at: &usize| !members[*at].stale && members[*at].reachable().is_some();
        let desc = self.desc.borrow();
        let mut wanted: Vec<usize> = desc.carriers.iter().map(|at| usize::from(*at)).filter(good).collect();
        let refused = |at: &usize| self.mending.refused.get() & 1 << at != 0;
        let (last, first): (Vec<usize>, Vec<usize>) = (0..members.len()).filter(good).partition(refused);
        for position in first.into_iter().chain(last) {
            if wanted.len() < self.geo.carriers() && !wanted.contains(&position) {
                wanted.push(position);
            }
        }
        wanted
    }

    /// Whether a lost carrier can be replaced.
    pub(crate) fn carriers_need_mending(&self) -> bool {
        let wanted = self.wanted_carriers();
        let desc = self.desc.borrow();
        wanted.len() != desc.carriers.len() || wanted.iter().any(|at| !desc.carriers.contains(&(*at as u16)))
    }

    /// Replaces lost carriers: copies log, roots and table pages to new members, then records the new set. Only the
    /// log's writer calls it, between two records, so nothing is appended meanwhile; the checkpoint lock keeps roots
    /// and pages still. A member that does not take its copy keeps nobody: the carriers that are left go on.
    pub(crate) async fn mend_carriers(&self) -> Result<(), ArrayError> {
        if !self.carriers_need_mending() {
            self.mending.is_done();
            return Ok(());
        }
        if self.env.now() < self.mending.not_before.get() {
            return Ok(());
        }
        // A checkpoint in progress writes to the carriers it began with: come back at the next segment.
        let Ok(_no_checkpoint) = self.checkpoint.try_lock() else { return Ok(()) };
        let wanted = self.wanted_carriers();
        let old = self.live_carriers();
        if wanted.is_empty() || old.is_empty() {
            return Ok(());
        }
        for position in wanted.iter().filter(|at| !old.contains(at)) {
            if !self.copy_carrier(&old, *position).await? {
                self.mending.failed(*position, self.env.now());
                return Ok(());
            }
        }
        let _one_at_a_time = self.reconfig.lock().await;
        if wanted.iter().any(|at| self.members.borrow()[*at].stale) {
            return Ok(());
        }
        tracing::info!(array = self.name, carriers = ?wanted, "carriers of the log replaced");
        let change = |next: &mut Descriptor| {
            next.carriers = wanted.iter().map(|at| *at as u16).collect();
            next.carriers_epoch += 1;
        };
        let recorded = self.record(change).await;
        drop(_one_at_a_time);
        let failed = match recorded {
            // Tried again with the next record: the old set still serves.
            Err(ArrayError::Ownership { why, .. }) => return self.suspend(why).await,
            other => other?,
        };
        // What was copied is not verified yet: a rotten source block must not count as a copy.
        self.metadata_bad.set(true);
        self.repair_wake.notify_one();
        self.log.wake.notify_one();
        self.fail_unwritten(failed).await
    }

    /// Copies what a carrier holds to a member. Returns whether it has all of it.
    async fn copy_carrier(&self, from: &[usize], to: usize) -> Result<bool, ArrayError> {
        let (life, Some(slice)) = (self.life(to), self.member_slice(to)) else { return Ok(false) };
        match self.copy_reserved(from, &slice).await {
            Ok(()) => Ok(self.life(to) == life),
            Err(DriveError::HostFull) => Ok(false),
            Err(error) => match self.fail_life(to, life, &error.to_string()).await {
                Ok(()) => Ok(false),
                Err(ArrayError::Suspended(why)) => {
                    tracing::warn!(
                        array = self.name,
                        position = to,
                        why,
                        "no carrier of the log can be made of it"
                    );
                    Ok(false)
                }
                Err(error) => Err(error),
            },
        }
    }

    async fn copy_reserved(&self, from: &[usize], to: &Slice) -> Result<(), DriveError> {
        let reserved = self.geo.reserved();
        let mut at = reserved.start;
        while at < reserved.end {
            let len = COPY_BYTES.min(reserved.end - at) as usize;
            if self.is_needed(at, len as u64) {
                to.write(at, self.read_most(from, at, len).await, IO).await?;
            }
            at += len as u64;
        }
        to.flush(IO).await
    }

    /// Whether a range of the reserved part holds live segments, roots or pages.
    fn is_needed(&self, at: u64, len: u64) -> bool {
        let segment_bytes = u64::from(self.geo.segment_bytes);
        let log_end = self.geo.segments * segment_bytes;
        let in_use = |slot: u64| {
            self.log.segments.borrow().iter().any(|segment| segment.number % self.geo.segments == slot)
        };
        at + len > log_end || (at / segment_bytes..=(at + len - 1) / segment_bytes).any(in_use)
    }

    /// What the carriers hold in a range, block by block where none can read all of it. A block that nobody can read is zeros
    /// in the copy, so that nothing which the drive held before passes for it.
    ///
    /// Copies verified structures only in the sense that every one carries its own checksum: a rotten source block is
    /// found, and mended from the other carriers, by the scrub that follows a change of carriers.
    async fn read_most(&self, from: &[usize], at: u64, len: usize) -> Buf {
        if let Some(bytes) = self.read_any(from, at, len).await {
            return bytes;
        }
        let mut whole = BufMut::zeroed(len);
        for (block, target) in whole.as_mut().chunks_exact_mut(BLOCK_BYTES).enumerate() {
            let offset = at + (block * BLOCK_BYTES) as u64;
            match self.read_any(from, offset, BLOCK_BYTES).await {
                Some(bytes) => target.copy_from_slice(&bytes),
                None => tracing::warn!(array = self.name, offset, "no carrier of the log can read a block"),
            }
        }
        whole.freeze()
    }

    async fn read_any(&self, from: &[usize], at: u64, len: usize) -> Option<Buf> {
        for carrier in from {
            let Some(slice) = self.member_slice(*carrier) else { continue };
            if let Ok(bytes) = slice.read(at, len, IO).await {
                return Some(bytes);
            }
        }
        None
    }
}
