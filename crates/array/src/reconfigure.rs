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
use crate::log::Segment;
use crate::ownership::{Claim, ClaimError};
use crate::salvage;
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, BufMut};
use penstock_drive::superblock::{ArrayEntry, SliceEntry, Superblock};
use penstock_drive::{Class, DriveError, DriveHandle, Io, Slice};
use std::cell::Cell;
use std::ops::Range;
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
    /// True while it was asked for and is not done.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.get()
    }

    fn is_done(&self) {
        self.wanted.set(false);
        self.refused.set(0);
    }

    /// Some are missing after an attempt that took so long: the log stood still for it.
    fn pause(&self, now: Duration, took: Duration) {
        self.not_before.set(now + MEND_AGAIN.max(took * 10));
    }
}

/// The outcome of a copy.
enum Copied {
    Whole,
    /// The member did not take it.
    Refused,
    /// No carrier that is left can read some block.
    Unreadable,
}

/// The carriers that a copy is made from.
struct Sources {
    slices: Vec<Slice>,
    /// By slice: it did not answer, and is not asked again.
    silent: Vec<bool>,
}

impl Sources {
    /// A range, each block from a carrier that can read it.
    ///
    /// Copies verified structures only in the sense that every one carries its own checksum: a rotten source block is
    /// found, and mended from the other carriers, by the scrub that follows a change of carriers.
    async fn read(&mut self, at: u64, len: usize) -> Option<Buf> {
        let mut whole = BufMut::zeroed(len);
        let mut lacking = vec![true; len / BLOCK_BYTES];
        for (slice, silent) in self.slices.iter().zip(&mut self.silent) {
            if *silent {
                continue;
            }
            let found = salvage::read(slice, at, len, IO).await;
            if !found.lacks_some() {
                return Some(found.bytes().clone());
            }
            *silent = !found.answered();
            for block in (0..lacking.len()).filter(|block| found.has(*block, 1)) {
                let bytes = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
                whole.as_mut()[bytes.clone()].copy_from_slice(&found.bytes()[bytes]);
                lacking[block] = false;
            }
            if !lacking.contains(&true) {
                return Some(whole.freeze());
            }
        }
        None
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
                loop {
                    let put = |superblock: &mut Superblock| put_descriptor(superblock, next, position);
                    let result = slice.drive().update_superblock(put).await;
                    // A full host is no fault of the drive.
                    if !matches!(result, Err(DriveError::HostFull))
                        || self.suspend("host full".to_owned()).await.is_err()
                    {
                        return (position, result);
                    }
                }
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
        let began = self.env.now();
        let mut wanted_now: Vec<usize> = wanted.iter().copied().filter(|at| old.contains(at)).collect();
        let kept = wanted_now.len();
        for position in wanted.iter().copied().filter(|at| !old.contains(at)) {
            match self.copy_carrier(&old, position).await? {
                Copied::Whole => wanted_now.push(position),
                Copied::Refused => self.mending.refused.set(self.mending.refused.get() | 1 << position),
                Copied::Unreadable => {
                    // A record that cannot be read leaves the log when all of it is in the strips.
                    self.metadata_bad.set(true);
                    self.repair_wake.notify_one();
                    break;
                }
            }
        }
        if wanted_now.len() < wanted.len() {
            let now = self.env.now();
            self.mending.pause(now, now - began);
            if wanted_now.len() == kept {
                return Ok(());
            }
        }
        let wanted = wanted_now;
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

    /// Copies what a carrier holds to a member.
    async fn copy_carrier(&self, from: &[usize], to: usize) -> Result<Copied, ArrayError> {
        let (life, Some(slice)) = (self.life(to), self.member_slice(to)) else { return Ok(Copied::Refused) };
        let slices: Vec<Slice> = from.iter().filter_map(|carrier| self.member_slice(*carrier)).collect();
        let mut sources = Sources { silent: vec![false; slices.len()], slices };
        match self.copy_reserved(&mut sources, &slice).await {
            Ok(true) if self.life(to) == life => Ok(Copied::Whole),
            Ok(true) | Err(DriveError::HostFull) => Ok(Copied::Refused),
            Ok(false) => Ok(Copied::Unreadable),
            Err(error) => match self.fail_life(to, life, &error.to_string()).await {
                Ok(()) => Ok(Copied::Refused),
                Err(ArrayError::Suspended(why)) => {
                    tracing::warn!(array = self.name, position = to, why, "it takes no copy of the log");
                    Ok(Copied::Refused)
                }
                Err(error) => Err(error),
            },
        }
    }

    /// Returns whether all could be read.
    async fn copy_reserved(&self, from: &mut Sources, to: &Slice) -> Result<bool, DriveError> {
        for range in self.needed_ranges() {
            for at in range.clone().step_by(COPY_BYTES as usize) {
                let len = COPY_BYTES.min(range.end - at) as usize;
                let Some(bytes) = from.read(at, len).await else {
                    tracing::warn!(
                        array = self.name,
                        at,
                        len,
                        "no carrier of the log can read a block of these"
                    );
                    return Ok(false);
                };
                to.write(at, bytes, IO).await?;
            }
        }
        to.flush(IO).await.map(|()| true)
    }

    /// Parts of what is reserved that an opening reads: live segments up to their last record, roots, and pages.
    fn needed_ranges(&self) -> Vec<Range<u64>> {
        let segments = self.log.segments.borrow();
        let of = |segment: &Segment| {
            let at = self.geo.segment_at(segment.number);
            let end = segment
                .records
                .last()
                .map_or(1, |last| last.offset_blocks + last.shape.head_blocks + last.shape.payload_blocks);
            at..at + u64::from(end) * BLOCK_BYTES as u64
        };
        let log_end = self.geo.segments * u64::from(self.geo.segment_bytes);
        segments.iter().map(of).chain(std::iter::once(log_end..self.geo.reserved().end)).collect()
    }
}
