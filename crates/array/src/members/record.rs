//! Changes of who belongs to the array: a member that fails, one that is replaced, one that is rebuilt.
//!
//! Every change is one revision of the claim. It is recorded in coordination by compare-and-swap first, then
//! copied to the labels of all reachable members, then acted on. A power cut in between leaves
//! coordination ahead, and the next opening takes coordination as the truth.
//!
//! Invariant: records are made under the reconfiguration lock only. [`Reconfiguration`] is that lock, and
//! only it can record.

use super::labels;
use super::ownership::{AcceptedLoss, Claim, ClaimError, Generations};
use super::{Life, Members};
use crate::error::ArrayError;
use crate::format::descriptor::Descriptor;
use crate::format::label::Label;
use crate::format::record::Entry;
use crate::format::root::Root;
use crate::place::{MemberNo, MemberSet};
use futures_util::future::join_all;
use penstock_base::Epoch;
use penstock_base::rank::{RankedGuard, scoped};
use penstock_drive::{DriveError, Slice};
use std::rc::Rc;

/// Attempts to have other drives name a new one in their labels.
const MOST_ATTEMPTS: u32 = 20;
const NOT_NAMED: &str = "no other drive takes the label that names the new one";

/// A change that is recorded.
pub(crate) struct Recorded {
    /// Members whose label could not be written.
    pub(crate) failed: Vec<MemberNo>,
    /// So many labels name the change that one of them is left, whichever members may still be lost.
    is_known: bool,
}

/// The right to change the record of an array's members. One holder at a time.
pub(crate) struct Reconfiguration<'a> {
    pub(super) members: &'a Members,
    _one_at_a_time: RankedGuard<'a, ()>,
}

impl Reconfiguration<'_> {
    /// Records `change` of the descriptor: coordination, then labels. Returns the members whose
    /// label could not be written.
    pub(crate) async fn record(
        &self,
        change: impl FnOnce(&mut Descriptor),
    ) -> Result<Vec<MemberNo>, ArrayError> {
        self.record_then(change, || ()).await.map(|recorded| recorded.failed)
    }

    /// Like [`Self::record`]. Calls `then` in the step in which the change counts, before labels are
    /// written.
    pub(super) async fn record_then(
        &self,
        change: impl FnOnce(&mut Descriptor),
        then: impl FnOnce(),
    ) -> Result<Recorded, ArrayError> {
        let this = self.members;
        // After a stop, failures tell nothing about drives that the next opening could not find out itself.
        this.context.check_open()?;
        let mut next = this.desc.borrow().clone();
        change(&mut next);
        let claim = this.claim();
        next.revision = next.revision.max(claim.revision) + 1;
        if next.epoch == claim.epoch {
            // Until a root of this opening is durable, drives with contents of the past are known by earlier
            // epochs.
            let as_they_are = match next.root_epoch == next.epoch {
                true => MemberSet::NONE,
                false => this.accepted.borrow().used(),
            };
            let epoch = next.epoch;
            for at in this.written.get().without(as_they_are).iter() {
                next.members[at.index()].epoch = epoch;
            }
        }
        let claimed = Claim {
            epoch: next.epoch,
            revision: next.revision,
            stale: next.stale(),
            accepted: this.accepted.borrow().clone(),
            generations: Generations::of(&next.members),
            root_epoch: next.root_epoch,
        };
        // A damaged label may have brought numbers near the end of what can be read. Written to all
        // drives, they would make the array unreadable.
        Descriptor::decode(&next.encode())?;
        assert!(claimed.root_epoch >= claim.root_epoch, "a claim goes forwards");
        assert!(claimed.epoch >= claim.epoch && claimed.revision > claim.revision, "a claim goes forwards");
        this.ownership
            .swap(this.context.id, claim, claimed.clone())
            .await
            .map_err(|error| this.claim_error(error))?;
        *this.claim.borrow_mut() = claimed;
        *this.desc.borrow_mut() = next.clone();
        for (member, entry) in this.members.borrow_mut().iter_mut().zip(&next.members) {
            member.set_stale(entry.stale);
        }
        then();
        Ok(self.write_labels(&next).await)
    }

    /// Writes the labels of all reachable members. Waits for a full host until enough are written.
    async fn write_labels(&self, recorded: &Descriptor) -> Recorded {
        let this = self.members;
        // All at the same time: a drive that hangs delays the record by its own deadline and not by the sum.
        let mut waiting: Vec<MemberNo> = this.context.layout.all_members().iter().collect();
        let (mut failed, mut written) = (Vec::new(), 0);
        // Whichever members are lost from here on, one that is left has the record.
        let (losable, stale) = (this.context.layout.most_losable(this.context.geo.m), this.stale().len());
        // With spare places stale members need not be among those that may be lost.
        let losable = if this.context.layout.spares() > 0 { losable } else { losable.saturating_sub(stale) };
        let enough = (losable + 1).min(waiting.len().saturating_sub(stale).max(1));
        loop {
            let writes = waiting.iter().map(|member| scoped(this.write_label(*member)));
            let results = join_all(writes).await;
            let mut full = Vec::new();
            for (member, result) in waiting.iter().copied().zip(results) {
                match result {
                    Ok(true) if !recorded.members[member.index()].stale => written += 1,
                    Ok(_) => {}
                    // A full host is no fault of the drive.
                    Err(DriveError::HostFull) => full.push(member),
                    Err(error) => {
                        tracing::warn!(array = this.context.name, %member, %error, "label not written");
                        failed.push(member);
                    }
                }
            }
            waiting = full;
            let is_over = waiting.is_empty() || written >= enough;
            if is_over || this.context.suspend("host full".to_owned()).await.is_err() {
                break;
            }
        }
        waiting.into_iter().for_each(|member| _ = this.owe_label(member));
        this.context.resume();
        Recorded { failed, is_known: written >= enough }
    }

    /// Records members as stale, or once more what is recorded.
    async fn record_stale(&self, lost: MemberSet) -> Result<Recorded, ArrayError> {
        // The drive may have been latched by another array of the store.
        lost.iter().for_each(|member| self.members.note_latched(member));
        if !lost.is_empty() {
            tracing::warn!(array = self.members.context.name, members = ?lost, "members recorded as stale");
        }
        let change = |next: &mut Descriptor| lost.iter().for_each(|at| next.members[at.index()].stale = true);
        self.record_then(change, || ()).await
    }

    /// Records a change, and once more while too few labels name it. It gives up after
    /// [`MOST_ATTEMPTS`], because the administrator who fails or replaces a drive waits. Returns the members
    /// whose label could not be written.
    async fn record_until_known(
        &self,
        change: impl FnOnce(&mut Descriptor),
    ) -> Result<Vec<MemberNo>, ArrayError> {
        let (mut recorded, mut attempts) = (self.record_then(change, || ()).await?, 1);
        while !recorded.is_known {
            self.members.fail_labels(recorded.failed).await;
            if attempts == MOST_ATTEMPTS {
                // The member stays lost, and a start finds which drive it is.
                self.members.context.resume();
                return Err(ArrayError::Suspended(NOT_NAMED.to_owned()));
            }
            self.members.context.suspend(NOT_NAMED.to_owned()).await?;
            recorded = self.record_stale(self.members.newly_lost()).await?;
            attempts += 1;
        }
        Ok(recorded.failed)
    }
}

impl Members {
    /// Waits for the right to change the record.
    pub(crate) async fn reconfigure(&self) -> Reconfiguration<'_> {
        let _one_at_a_time = self.reconfiguration.lock().await;
        Reconfiguration { members: self, _one_at_a_time }
    }

    fn claim_error(&self, error: ClaimError) -> ArrayError {
        match error {
            ClaimError::Changed(found) if found.epoch > self.claim.borrow().epoch => ArrayError::Fenced {
                array: self.context.id,
                found: found.epoch.0,
                mine: self.claim.borrow().epoch.0,
            },
            other => self.unclaimed(&other),
        }
    }

    fn unclaimed(&self, error: &ClaimError) -> ArrayError {
        ArrayError::Ownership { array: self.context.id, why: error.to_string() }
    }

    /// The claim on record, and the members that are stale by it or, where labels are newer, by them.
    pub(crate) async fn recorded(&self) -> Result<(Claim, MemberSet), ArrayError> {
        let claim = self.ownership.current(self.context.id).await.map_err(|error| self.unclaimed(&error))?;
        let desc = self.desc.borrow();
        let valid = claim.generations.replaced().filter(|(at, _)| !claim.stale.contains(*at));
        for (at, generation) in valid {
            if desc.members.get(at.index()).is_some_and(|member| member.generation < generation) {
                return Err(ArrayError::Replaced { name: self.context.name.clone(), member: at.index() });
            }
        }
        let is_newest = claim.revision >= desc.revision;
        let stale = if is_newest { claim.stale } else { desc.stale() };
        Ok((claim, stale))
    }

    /// The epoch of an opening that finds `claim`.
    pub(crate) fn next_epoch(&self, claim: &Claim) -> Epoch {
        Epoch(self.desc.borrow().epoch.0.max(claim.epoch.0) + 1)
    }

    /// Takes the array over from `found`: records a new epoch, and members that are not here as stale.
    pub(crate) async fn take_over(
        &self,
        found: Claim,
        stale: MemberSet,
        root: &Root,
        accepted: AcceptedLoss,
    ) -> Result<(), ArrayError> {
        self.claim.replace(found.clone());
        self.accepted.replace(accepted);
        let absent = self.gone();
        let reconfiguration = self.reconfigure().await;
        let failed = reconfiguration
            .record(|next| {
                next.epoch = self.next_epoch(&found);
                // No label that is here may name the epoch of the last root any more.
                next.root_epoch = next.root_epoch.max(found.root_epoch);
                for (at, entry) in next.members.iter_mut().enumerate() {
                    let member = MemberNo::new(at);
                    let is_stale = stale.contains(member);
                    entry.epoch = root.least_epoch(member, entry, is_stale);
                    entry.stale = is_stale || absent.contains(member);
                }
            })
            .await?;
        self.owned.set(true);
        drop(reconfiguration);
        self.fail_unwritten(failed).await?;
        // Another one may have failed since `absent` was taken.
        self.record_lost().await
    }

    /// Records that the roots of this epoch are durable, and which members have a label of it.
    pub(crate) async fn record_root(&self) -> Result<(), ArrayError> {
        let reconfiguration = self.reconfigure().await;
        let failed = reconfiguration.record(|next| next.root_epoch = next.epoch).await?;
        drop(reconfiguration);
        self.fail_unwritten(failed).await
    }

    /// Writes a member's label with the descriptor as it is by now. Returns false if its drive is gone, or is
    /// another one by then.
    pub(crate) async fn write_label(&self, member: MemberNo) -> Result<bool, DriveError> {
        let Some((slice, labelling)) = self.labelled(member) else { return Ok(false) };
        let label = || {
            let desc = self.desc.borrow();
            let is_still_there = desc.members[member.index()].drive == slice.drive().id();
            is_still_there.then(|| Label::new(&desc, member))
        };
        let is_written = labelling.write(&slice, label).await?;
        // The records about the member are about the slice that is in its place now.
        let is_there = self.labelled(member).is_some_and(|(_, present)| Rc::ptr_eq(&present, &labelling));
        if !is_written || !is_there {
            return Ok(false);
        }
        self.written.set(self.written.get().with(MemberSet::one(member)));
        Ok(true)
    }

    /// Writes a member's label, or owes it one while the host is full. Returns false if the drive
    /// refuses it.
    async fn write_or_owe_label(&self, member: MemberNo) -> bool {
        match self.write_label(member).await {
            Ok(true) => self.owed.remove(member),
            Ok(false) if self.slice(member).is_none() => self.owed.remove(member),
            // The replacement writes the label of the new slice itself.
            Ok(false) => {}
            Err(DriveError::HostFull) => _ = self.owe_label(member),
            Err(error) => {
                tracing::warn!(array = self.context.name, %member, %error, "label not written");
                return false;
            }
        }
        true
    }

    /// Has a member's label written as soon as that is possible. Returns false if that was wanted
    /// before.
    pub(super) fn owe_label(&self, member: MemberNo) -> bool {
        let is_new = self.owed.add(member);
        if is_new {
            self.context.signals.carriers.notify_one();
        }
        is_new
    }

    /// Members that did not take their label.
    pub(crate) fn owed_labels(&self) -> MemberSet {
        self.owed.all()
    }

    /// Writes labels that are owed.
    pub(crate) async fn write_owed_labels(&self) -> Result<(), ArrayError> {
        let mut failed = Vec::new();
        for member in self.owed.all().iter() {
            if !self.write_or_owe_label(member).await {
                failed.push(member);
            }
        }
        self.fail_unwritten(failed).await
    }

    /// Takes the drive of a member out of service, for all arrays that use it. Returns when that is recorded.
    pub(crate) async fn fail(&self, member: MemberNo, why: &str) -> Result<(), ArrayError> {
        if let Some(slice) = self.slice(member) {
            self.roster.take_out(slice.drive(), why).map_err(ArrayError::Suspended)?;
        }
        self.record_lost().await
    }

    /// A write or flush of a member failed that began in `life`. Returns when the member is recorded as
    /// stale; an error [`ArrayError::Suspended`] if no further member may be lost. A failure in an earlier
    /// life is no fault of the present one.
    pub(crate) async fn fail_life(&self, member: MemberNo, life: Life, why: &str) -> Result<(), ArrayError> {
        self.context.check_open()?;
        if let Some(slice) = self.slice(member)
            && self.life(member) == life
        {
            self.roster.failed(slice.drive(), why).await.map_err(ArrayError::Suspended)?;
        }
        self.record_lost().await
    }

    /// Records every member whose drive is gone as stale. Waits while coordination cannot record. An array
    /// that is not taken over yet does so when it is.
    pub(crate) async fn record_lost(&self) -> Result<(), ArrayError> {
        let reconfiguration = self.reconfigure().await;
        if !self.owned.get() {
            return Ok(());
        }
        loop {
            let lost = self.newly_lost();
            if lost.is_empty() {
                return Ok(());
            }
            match reconfiguration.record_stale(lost).await {
                Ok(recorded) => {
                    self.context.resume();
                    self.changed();
                    self.fail_labels(recorded.failed).await;
                }
                Err(ArrayError::Ownership { why, .. }) => self.context.suspend(why).await?,
                Err(error) => return Err(error),
            }
        }
    }

    fn newly_lost(&self) -> MemberSet {
        self.select(super::Member::is_newly_lost)
    }

    /// Judges drives that did not take a label. A drive that may not be lost stays: the record that
    /// counts is made, and other drives carry a copy. Its own label is owed.
    async fn fail_labels(&self, positions: Vec<MemberNo>) {
        if self.context.is_closed() {
            return;
        }
        let judge = async |member: MemberNo| {
            let slice = self.slice(member)?;
            Some((member, self.roster.failed(slice.drive(), "label not written").await.err()?))
        };
        for (member, why) in join_all(positions.into_iter().map(judge)).await.into_iter().flatten() {
            if self.owe_label(member) {
                tracing::error!(array = self.context.name, %member, why, "a label is out of date");
            }
        }
    }

    /// Fails members that did not take a label.
    pub(crate) async fn fail_unwritten(&self, positions: Vec<MemberNo>) -> Result<(), ArrayError> {
        if positions.is_empty() {
            return Ok(());
        }
        self.fail_labels(positions).await;
        self.record_lost().await
    }

    /// Puts a blank slice in a member's place. Everything on it counts as stale until it is rebuilt.
    pub(crate) async fn replace(&self, member: MemberNo, slice: Slice) -> Result<(), ArrayError> {
        // Before anything changes: a drive that takes no label takes no member's place.
        labels::clear_label(&slice).await.map_err(|error| {
            ArrayError::Invalid(format!("drive {} does not take its label: {error}", slice.drive().id()))
        })?;
        // One that is being rebuilt may hold strips that count.
        if !self.stale().contains(member) || self.is_reachable(member) {
            self.fail(member, "replaced by an administrator").await?;
        }
        self.put(member, slice).await
    }

    /// Takes a slice on which nothing counts as a member.
    pub(crate) async fn put(&self, member: MemberNo, slice: Slice) -> Result<(), ArrayError> {
        // Between the removal of one slice and the arrival of the next, no third one takes the place.
        let _one_at_a_time = self.replacement.lock().await;
        // No strip that is in flight to the old slice counts as written once the entry is queued.
        self.members.borrow_mut()[member.index()].remove_slice();
        self.queue.append(Entry::MemberReset { member }, Vec::new()).await?;
        let reconfiguration = self.reconfigure().await;
        let change = |next: &mut Descriptor| {
            let epoch = next.epoch;
            let entry = &mut next.members[member.index()];
            entry.drive = slice.drive().id();
            entry.offset = slice.offset();
            entry.len = slice.len();
            entry.generation += 1;
            entry.stale = true;
            // The drive that was in this place before lacks all that is rebuilt from here on, should it come
            // back. If the power is cut before the new slice has its own label, the slice is rebuilt
            // from nothing again.
            entry.epoch = epoch;
            self.accepted.borrow_mut().made_again(member);
        };
        // A slice that a start might not find recorded is not used: its contents would be taken for the old
        // drive's.
        let mut failed = reconfiguration.record_until_known(change).await?;
        self.written.set(self.written.get().without(MemberSet::one(member)));
        self.members.borrow_mut()[member.index()].put_slice(slice);
        if !self.write_or_owe_label(member).await {
            failed.push(member);
        }
        drop(reconfiguration);
        // The record is in force from here on, whether or not the drive fails.
        self.changed();
        self.fail_unwritten(failed).await
    }

    /// A member that was rebuilt in `life` counts again.
    pub(crate) async fn activate(&self, member: MemberNo, life: Life) -> Result<(), ArrayError> {
        let reconfiguration = self.reconfigure().await;
        if self.slice(member).is_none() || self.life(member) != life {
            return Err(ArrayError::Invalid("the member went away".into()));
        }
        tracing::info!(array = self.context.name, %member, "all strips of the member are valid again");
        // Its replica of the log is from before it was stale: it leaves the carriers before it counts again.
        // These are two records, because a power cut may leave coordination ahead of labels, and only
        // those name carriers.
        let mut failed = Vec::new();
        if self.desc.borrow().carriers().any(|carrier| carrier == member) {
            let leave = |next: &mut Descriptor| {
                next.carriers.retain(|carrier| *carrier != member.number());
                next.carriers_epoch += 1;
            };
            let recorded = reconfiguration.record_then(leave, || ()).await?;
            failed = recorded.failed;
            if !recorded.is_known {
                drop(reconfiguration);
                self.fail_unwritten(failed).await?;
                let why = "no label says yet that its copy of the log is old".to_owned();
                return Err(ArrayError::Suspended(why));
            }
        }
        failed.extend(reconfiguration.record(|next| next.members[member.index()].stale = false).await?);
        drop(reconfiguration);
        self.changed();
        self.fail_unwritten(failed).await
    }
}
